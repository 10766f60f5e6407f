//! The ticket statements, written once for both dialects: their parameters and how their rows are decoded.
//!
//! Upstream: `store`, inside a transaction of `headwater-issue` or on a read connection. Downstream: `sqlite` and
//! `postgres` define the SQL; each gets all these functions for its own connection type.

/// Implements the functions. The dialect defines one constant per statement, and how it binds search patterns.
macro_rules! implement_statements {
    ($connection:ident, $row:ident, bind_patterns = $patterns:expr) => {
        /// Does nothing if the ticket exists.
        pub(crate) async fn insert_ticket(
            connection: &mut $connection,
            row: &NewTicketRow<'_>,
        ) -> Result<(), Error> {
            let insert = sqlx::query(INSERT_TICKET).bind(row.ticket_id.to_string());
            let insert = insert.bind(row.issue_id.0).bind(row.title).bind(row.user_id);
            insert.bind(rows::to_ms(row.now)).execute(connection).await.map(drop)
        }

        /// Locks the ticket until the end of the transaction.
        pub(crate) async fn lock_ticket(
            connection: &mut $connection,
            ticket_id: Uuid,
        ) -> Result<Option<Ticket>, Error> {
            let select = sqlx::query(LOCK_TICKET).bind(ticket_id.to_string());
            select.fetch_optional(connection).await?.as_ref().map(read_ticket).transpose()
        }

        pub(crate) async fn ticket(
            connection: &mut $connection,
            ticket_id: Uuid,
        ) -> Result<Option<Ticket>, Error> {
            let select = sqlx::query(TICKET).bind(ticket_id.to_string());
            select.fetch_optional(connection).await?.as_ref().map(read_ticket).transpose()
        }

        pub(crate) async fn change_ticket(
            connection: &mut $connection,
            ticket_id: Uuid,
            status: TicketStatus,
            handed_over: bool,
            now: Timestamp,
        ) -> Result<(), Error> {
            let update = sqlx::query(CHANGE_TICKET).bind(ticket_id.to_string());
            let update = update.bind(status.as_str()).bind(handed_over).bind(rows::to_ms(now));
            update.execute(connection).await.map(drop)
        }

        pub(crate) async fn insert_message(
            connection: &mut $connection,
            row: &NewMessageRow<'_>,
        ) -> Result<(), Error> {
            let insert = sqlx::query(INSERT_MESSAGE).bind(row.message_id.to_string());
            let insert = insert.bind(row.ticket_id.to_string()).bind(row.author.as_str());
            let insert = insert.bind(row.content).bind(rows::to_ms(row.now));
            insert.bind(rows::run_json(&row.run)).execute(connection).await.map(drop)
        }

        pub(crate) async fn message(
            connection: &mut $connection,
            message_id: Uuid,
        ) -> Result<Option<TicketMessage>, Error> {
            let select = sqlx::query(MESSAGE).bind(message_id.to_string());
            select.fetch_optional(connection).await?.as_ref().map(read_message).transpose()
        }

        pub(crate) async fn messages(
            connection: &mut $connection,
            ticket_id: Uuid,
            after: i64,
            limit: i64,
        ) -> Result<Vec<TicketMessage>, Error> {
            let select = sqlx::query(MESSAGES).bind(ticket_id.to_string()).bind(after).bind(limit);
            select.fetch_all(connection).await?.iter().map(read_message).collect()
        }

        pub(crate) async fn tickets(
            connection: &mut $connection,
            filter: &TicketFilter,
            limit: i64,
        ) -> Result<Vec<Ticket>, Error> {
            let select = sqlx::query(TICKETS)
                .bind(filter.before.unwrap_or(i64::MAX))
                .bind(filter.status.map(TicketStatus::as_str))
                .bind(filter.user_id.as_deref())
                .bind(limit);
            select.fetch_all(connection).await?.iter().map(read_ticket).collect()
        }

        /// Scans only the newest tickets, so that the cost does not grow with their number.
        pub(crate) async fn search(
            connection: &mut $connection,
            search: &SearchParameters<'_>,
        ) -> Result<Vec<FoundTicket>, Error> {
            let select = sqlx::query(SEARCH).bind(search.user_id).bind(SEARCHED_MAX);
            let select = select.bind(search.except).bind($patterns(search.patterns));
            let read = |row: &$row| {
                Ok(FoundTicket {
                    ticket_id: row.try_get(0)?,
                    title: row.try_get(1)?,
                    status: row.try_get(2)?,
                    answer: row.try_get(3)?,
                })
            };
            select.bind(search.limit).fetch_all(connection).await?.iter().map(read).collect()
        }

        /// Tokens counted against the budgets of an issue and of a day, from one snapshot.
        pub(crate) async fn token_usage(
            connection: &mut $connection,
            row: &ReservationRow,
            now: i64,
        ) -> Result<[BudgetUsage; 2], Error> {
            let select = sqlx::query(
                "SELECT
                     coalesce((SELECT tokens FROM desk_usage WHERE scope = $1), 0),
                     coalesce((SELECT tokens FROM desk_usage WHERE scope = $2), 0),
                     CAST(coalesce(sum(counted) FILTER (WHERE of_issue), 0) AS bigint),
                     CAST(coalesce(sum(unsettled) FILTER (WHERE of_issue), 0) AS bigint),
                     CAST(coalesce(sum(counted) FILTER (WHERE of_day), 0) AS bigint),
                     CAST(coalesce(sum(unsettled) FILTER (WHERE of_day), 0) AS bigint)
                 FROM (
                     SELECT issue_id = $3 AS of_issue, day = $4 AS of_day,
                         CASE WHEN settled_at IS NULL AND expires_at <= $5 THEN tokens_if_lost ELSE tokens END AS counted,
                         CASE WHEN settled_at IS NULL AND expires_at > $5 THEN tokens ELSE 0 END AS unsettled
                     FROM desk_reservations
                     WHERE (issue_id = $3 OR day = $4) AND NOT rolled_up AND id <> $6
                 ) AS open",
            );
            let select = select.bind(row.issue_scope()).bind(row.day_scope());
            let select = select.bind(row.issue_id).bind(row.day).bind(now).bind(&row.id);
            let found = select.fetch_one(connection).await?;
            let number = |index: usize| -> Result<u64, Error> {
                Ok(u64::try_from(found.try_get::<i64, _>(index)?).unwrap_or(0))
            };
            let spent = |usage: usize, counted: usize| -> Result<BudgetUsage, Error> {
                let total = number(usage)?.saturating_add(number(counted)?);
                Ok(BudgetUsage { total, unsettled: number(counted + 1)? })
            };
            Ok([spent(0, 2)?, spent(1, 4)?])
        }

        /// Does nothing if the reservation exists, because it was settled before.
        pub(crate) async fn insert_reservation(
            connection: &mut $connection,
            row: &ReservationRow,
        ) -> Result<(), Error> {
            let insert = sqlx::query(
                "INSERT INTO desk_reservations (id, issue_id, day, tokens, tokens_if_lost, expires_at)
                 VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (id) DO NOTHING",
            );
            let insert = insert.bind(&row.id).bind(row.issue_id).bind(row.day);
            let insert = insert.bind(row.tokens).bind(row.tokens_if_lost).bind(row.expires_at);
            insert.execute(connection).await.map(drop)
        }

        pub(crate) async fn remove_reservation(
            connection: &mut $connection,
            row: &ReservationRow,
        ) -> Result<(), Error> {
            let delete =
                sqlx::query("DELETE FROM desk_reservations WHERE id = $1 AND settled_at IS NULL");
            delete.bind(&row.id).execute(connection).await.map(drop)
        }

        /// Only the first settlement counts. It is stored even without a reservation, so that a delayed insert of the
        /// reservation has no effect.
        pub(crate) async fn settle_reservation(
            connection: &mut $connection,
            row: &ReservationRow,
            used: i64,
            now: i64,
        ) -> Result<(), Error> {
            let upsert = sqlx::query(
                "INSERT INTO desk_reservations (id, issue_id, day, tokens, tokens_if_lost, expires_at, settled_at)
                 VALUES ($1, $2, $3, $4, $4, $5, $6)
                 ON CONFLICT (id) DO UPDATE SET tokens = excluded.tokens, settled_at = excluded.settled_at
                 WHERE desk_reservations.settled_at IS NULL AND NOT desk_reservations.rolled_up",
            );
            let upsert = upsert.bind(&row.id).bind(row.issue_id).bind(row.day);
            upsert.bind(used).bind(row.expires_at).bind(now).execute(connection).await.map(drop)
        }

        /// Aggregates settled and expired reservations, and deletes aggregated ones that expired before
        /// `remove_before`.
        pub(crate) async fn roll_up_reservations(
            connection: &mut $connection,
            now: i64,
            remove_before: i64,
        ) -> Result<(), Error> {
            for statement in ROLL_UP {
                sqlx::query(statement).bind(now).execute(&mut *connection).await?;
            }
            let delete =
                sqlx::query("DELETE FROM desk_reservations WHERE rolled_up AND expires_at <= $1");
            delete.bind(remove_before).execute(connection).await.map(drop)
        }

        fn read_ticket(row: &$row) -> Result<Ticket, Error> {
            Ok(Ticket {
                number: row.try_get(0)?,
                ticket_id: rows::parse_id(row.try_get(1)?)?,
                issue_id: headwater_issue::IssueId(row.try_get(2)?),
                title: row.try_get(3)?,
                user_id: row.try_get(4)?,
                status: rows::parse_status(row.try_get(5)?)?,
                handed_over: row.try_get(6)?,
                created_at: rows::from_ms(row.try_get(7)?),
                updated_at: rows::from_ms(row.try_get(8)?),
            })
        }

        fn read_message(row: &$row) -> Result<TicketMessage, Error> {
            Ok(TicketMessage {
                seq: row.try_get(0)?,
                message_id: rows::parse_id(row.try_get(1)?)?,
                ticket_id: rows::parse_id(row.try_get(2)?)?,
                author: rows::parse_author(row.try_get(3)?)?,
                content: row.try_get(4)?,
                created_at: rows::from_ms(row.try_get(5)?),
            })
        }
    };
}
pub(crate) use implement_statements;
