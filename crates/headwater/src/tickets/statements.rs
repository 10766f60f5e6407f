//! What is done with the tables of tickets, once for both dialects: which values a statement takes, and how its rows are read.
//!
//! Upstream: `store`, inside a transaction of `headwater-issue` or on one of its connections. Downstream: `sqlite` and
//! `postgres`, which spell the statements; each of them has all of these functions, for its own connections.

/// Implements the functions. The file has the SQL by their names, in capitals, and says how it binds the patterns of a search.
macro_rules! implement_statements {
    ($connection:ident, $row:ident, binding patterns by $patterns:expr) => {
        /// The newest version of the tables that this program knows.
        pub(super) const VERSION: usize = MIGRATIONS.len();

        /// Applies what is missing. Nobody else does at the same time.
        pub(super) async fn migrate(connection: &mut $connection) -> Result<usize, Error> {
            prepare_migrations(connection).await?;
            let newest = sqlx::query("SELECT coalesce(max(version), 0) FROM desk_migrations")
                .fetch_one(&mut *connection)
                .await?;
            let applied = usize::try_from(newest.try_get::<i64, _>(0)?).unwrap_or(0);
            for (index, sql) in MIGRATIONS.iter().enumerate().skip(applied) {
                connection.execute(sqlx::raw_sql(*sql)).await?;
                sqlx::query("INSERT INTO desk_migrations (version) VALUES ($1)")
                    .bind(i64::try_from(index + 1).unwrap_or(i64::MAX))
                    .execute(&mut *connection)
                    .await?;
            }
            Ok(applied.max(MIGRATIONS.len()))
        }

        /// One that is there already stays as it is.
        pub(super) async fn insert_ticket(
            connection: &mut $connection,
            row: &NewTicketRow<'_>,
        ) -> Result<(), Error> {
            let insert = sqlx::query(INSERT_TICKET).bind(row.ticket_id.to_string());
            let insert = insert.bind(row.issue_id.0).bind(row.title).bind(row.user_id);
            insert.bind(rows::ms(row.now)).execute(connection).await.map(drop)
        }

        /// The ticket, which nobody else changes until the end of the transaction.
        pub(super) async fn lock_ticket(
            connection: &mut $connection,
            ticket_id: Uuid,
        ) -> Result<Option<Ticket>, Error> {
            let select = sqlx::query(LOCK_TICKET).bind(ticket_id.to_string());
            select.fetch_optional(connection).await?.as_ref().map(read_ticket).transpose()
        }

        pub(super) async fn ticket(
            connection: &mut $connection,
            ticket_id: Uuid,
        ) -> Result<Option<Ticket>, Error> {
            let select = sqlx::query(TICKET).bind(ticket_id.to_string());
            select.fetch_optional(connection).await?.as_ref().map(read_ticket).transpose()
        }

        pub(super) async fn change_ticket(
            connection: &mut $connection,
            ticket_id: Uuid,
            status: TicketStatus,
            handed_over: bool,
            now: Timestamp,
        ) -> Result<(), Error> {
            let update = sqlx::query(CHANGE_TICKET).bind(ticket_id.to_string());
            let update = update.bind(status.as_str()).bind(handed_over).bind(rows::ms(now));
            update.execute(connection).await.map(drop)
        }

        pub(super) async fn insert_message(
            connection: &mut $connection,
            row: &NewMessageRow<'_>,
        ) -> Result<(), Error> {
            let insert = sqlx::query(INSERT_MESSAGE).bind(row.message_id.to_string());
            let insert = insert.bind(row.ticket_id.to_string()).bind(row.author.as_str());
            let insert = insert.bind(row.content).bind(rows::ms(row.now));
            insert.bind(rows::figures(&row.run)).execute(connection).await.map(drop)
        }

        pub(super) async fn message(
            connection: &mut $connection,
            message_id: Uuid,
        ) -> Result<Option<TicketMessage>, Error> {
            let select = sqlx::query(MESSAGE).bind(message_id.to_string());
            select.fetch_optional(connection).await?.as_ref().map(read_message).transpose()
        }

        pub(super) async fn messages(
            connection: &mut $connection,
            ticket_id: Uuid,
            after: i64,
            limit: i64,
        ) -> Result<Vec<TicketMessage>, Error> {
            let select = sqlx::query(MESSAGES).bind(ticket_id.to_string()).bind(after).bind(limit);
            select.fetch_all(connection).await?.iter().map(read_message).collect()
        }

        pub(super) async fn tickets(
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

        /// Looks at the newest tickets only, so that a search costs the same however many there are.
        pub(super) async fn search(
            connection: &mut $connection,
            search: &SearchRow<'_>,
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

        /// Counts tokens as spent if the limit allows. Returns whether it did.
        pub(super) async fn spend(
            connection: &mut $connection,
            scope: &str,
            tokens: i64,
            limit: i64,
        ) -> Result<bool, Error> {
            sqlx::query(
                "INSERT INTO desk_usage (scope, tokens) VALUES ($1, 0) ON CONFLICT (scope) DO NOTHING",
            )
            .bind(scope)
            .execute(&mut *connection)
            .await?;
            let spent = sqlx::query(
                "UPDATE desk_usage SET tokens = tokens + $2 WHERE scope = $1 AND tokens + $2 <= $3",
            )
            .bind(scope)
            .bind(tokens)
            .bind(limit)
            .execute(connection)
            .await?;
            Ok(spent.rows_affected() == 1)
        }

        pub(super) async fn correct(
            connection: &mut $connection,
            scope: &str,
            by: i64,
        ) -> Result<(), Error> {
            let update = sqlx::query(
                "UPDATE desk_usage SET tokens = CASE WHEN tokens + $2 < 0 THEN 0 ELSE tokens + $2 END WHERE scope = $1",
            );
            update.bind(scope).bind(by).execute(connection).await.map(drop)
        }

        fn read_ticket(row: &$row) -> Result<Ticket, Error> {
            Ok(Ticket {
                number: row.try_get(0)?,
                ticket_id: rows::id(row.try_get(1)?)?,
                issue_id: headwater_issue::IssueId(row.try_get(2)?),
                title: row.try_get(3)?,
                user_id: row.try_get(4)?,
                status: rows::status(row.try_get(5)?)?,
                handed_over: row.try_get(6)?,
                created_at: rows::time(row.try_get(7)?),
                updated_at: rows::time(row.try_get(8)?),
            })
        }

        fn read_message(row: &$row) -> Result<TicketMessage, Error> {
            Ok(TicketMessage {
                seq: row.try_get(0)?,
                message_id: rows::id(row.try_get(1)?)?,
                ticket_id: rows::id(row.try_get(2)?)?,
                author: rows::author(row.try_get(3)?)?,
                content: row.try_get(4)?,
                created_at: rows::time(row.try_get(5)?),
            })
        }
    };
}
pub(super) use implement_statements;
