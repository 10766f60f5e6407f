//! Administrative queries whose SQL is the same for both stores: listings and the consistency check.
//!
//! Upstream: `admin` of both stores, which add what differs. Downstream: the column lists of `statements` and the
//! macros of `row_decoding`. Parameters are `$1`, `$2` and so on, which both databases accept; types are given by
//! `CAST`.

/// Implements [`AdminStore`](crate::AdminStore) for a store: the methods here and the given ones. The store must have a
/// method `call` that runs an async closure on a connection.
macro_rules! implement_admin_store {
    (for $store:ident, with { $($own:item)* }) => {
        #[async_trait::async_trait]
        impl $crate::AdminStore for $store {
            async fn integrations(&self, after: Option<&str>) -> Result<Vec<IntegrationInfo>> {
                self.call("listing integrations", async |connection| {
                    let rows = sqlx::query(
                        "SELECT id, name, provider FROM integrations WHERE name > $1
                         ORDER BY name LIMIT $2",
                    )
                    .bind(after.unwrap_or_default())
                    .bind(to_i64(PAGE_MAX))
                    .fetch_all(&mut *connection)
                    .await?;
                    let mut integrations = Vec::with_capacity(rows.len());
                    for row in &rows {
                        let (id, name, provider) =
                            (IntegrationId(row.try_get(0)?), row.try_get(1)?, row.try_get(2)?);
                        integrations.push(IntegrationInfo { id, name, provider });
                    }
                    Ok(integrations)
                })
                .await
            }

            async fn issue(&self, id: IssueId) -> Result<Option<Issue>> {
                self.call("reading an issue", async |connection| {
                    let row = sqlx::query(concat!(
                        "SELECT ",
                        issue_columns!(),
                        " FROM issues i JOIN integrations g ON g.id = i.integration_id
                          WHERE i.id = $1"
                    ))
                    .bind(id.0)
                    .fetch_optional(&mut *connection)
                    .await?;
                    row.map(|row| Ok(read_issue!(&row))).transpose()
                })
                .await
            }

            async fn find_issue(
                &self,
                integration: &str,
                external_project_id: &str,
                external_issue_id: &str,
            ) -> Result<Option<Issue>> {
                self.call("finding an issue", async |connection| {
                    let row = sqlx::query(concat!(
                        "SELECT ",
                        issue_columns!(),
                        " FROM issues i JOIN integrations g ON g.id = i.integration_id
                          WHERE g.name = $1 AND i.external_project_id = $2
                              AND i.external_issue_id = $3"
                    ))
                    .bind(integration)
                    .bind(external_project_id)
                    .bind(external_issue_id)
                    .fetch_optional(&mut *connection)
                    .await?;
                    row.map(|row| Ok(read_issue!(&row))).transpose()
                })
                .await
            }

            async fn issues(&self, filter: &IssueFilter, limit: usize) -> Result<Vec<Issue>> {
                validate::page(limit)?;
                self.call("listing issues", async |connection| {
                    let rows = sqlx::query(concat!(
                        "SELECT ",
                        issue_columns!(),
                        " FROM issues i JOIN integrations g ON g.id = i.integration_id
                          WHERE i.id > $1
                              AND (CAST($2 AS text) IS NULL OR i.processing_status = $2)
                              AND (CAST($3 AS boolean) IS NULL
                                  OR (i.quarantined_at IS NOT NULL) = $3)
                              AND (CAST($4 AS text) IS NULL OR g.name = $4)
                          ORDER BY i.id LIMIT $5"
                    ))
                    .bind(filter.after.map_or(i64::MIN, |after| after.0))
                    .bind(filter.status.map(ProcessingStatus::as_str))
                    .bind(filter.quarantined)
                    .bind(filter.integration.as_deref())
                    .bind(to_i64(limit))
                    .fetch_all(&mut *connection)
                    .await?;
                    rows.iter().map(|row| Ok(read_issue!(row))).collect()
                })
                .await
            }

            async fn event_logs(
                &self,
                issue_id: IssueId,
                filter: &EventLogFilter,
                limit: usize,
            ) -> Result<Vec<EventLog>> {
                validate::page(limit)?;
                self.call("listing event logs", async |connection| {
                    let rows = sqlx::query(concat!(
                        "SELECT ",
                        event_log_columns!(),
                        " FROM event_logs e WHERE e.issue_id = $1 AND e.id > $2
                              AND (CAST($3 AS boolean) IS NULL
                                  OR (e.processed_at IS NOT NULL) = $3)
                          ORDER BY e.id LIMIT $4"
                    ))
                    .bind(issue_id.0)
                    .bind(filter.after.map_or(i64::MIN, |after| after.0))
                    .bind(filter.processed)
                    .bind(to_i64(limit))
                    .fetch_all(&mut *connection)
                    .await?;
                    rows.iter().map(|row| Ok(read_event_log!(row))).collect()
                })
                .await
            }

            async fn original_payload(
                &self,
                id: $crate::issue::EventLogId,
            ) -> Result<Option<String>> {
                self.call("reading an original payload", async |connection| {
                    let row = sqlx::query(
                        "SELECT body FROM event_log_originals WHERE event_log_id = $1",
                    )
                    .bind(id.0)
                    .fetch_optional(&mut *connection)
                    .await?;
                    let Some(row) = row else { return Ok(None) };
                    let text = String::from_utf8(row.try_get(0)?);
                    text.map(Some).map_err(|error| sqlx::Error::Decode(error.into()))
                })
                .await
            }

            async fn newest_event_log_at_commit(
                &self,
                id: OutboxId,
            ) -> Result<Option<$crate::issue::EventLogId>> {
                self.call("reading an outbox row", async |connection| {
                    let row = sqlx::query("SELECT newest_event_log_id FROM outbox WHERE id = $1")
                        .bind(id.0)
                        .fetch_optional(&mut *connection)
                        .await?;
                    let Some(row) = row else { return Ok(None) };
                    Ok(row.try_get::<Option<i64>, _>(0)?.map($crate::issue::EventLogId))
                })
                .await
            }

            async fn dead_letters(
                &self,
                after: Option<DeadLetterId>,
                limit: usize,
            ) -> Result<Vec<IssueDeadLetter>> {
                validate::page(limit)?;
                self.call("listing dead letters", async |connection| {
                    let rows = sqlx::query(concat!(
                        "SELECT ",
                        dead_letter_columns!(),
                        " FROM dead_letters d JOIN issues i ON i.id = d.issue_id
                              JOIN integrations g ON g.id = i.integration_id
                          WHERE d.id > $1 ORDER BY d.id LIMIT $2"
                    ))
                    .bind(after.map_or(i64::MIN, |after| after.0))
                    .bind(to_i64(limit))
                    .fetch_all(&mut *connection)
                    .await?;
                    rows.iter().map(|row| Ok(read_dead_letter!(row))).collect()
                })
                .await
            }

            async fn dead_outbox(
                &self,
                after: Option<OutboxId>,
                limit: usize,
            ) -> Result<Vec<DeadOutboxRow>> {
                validate::page(limit)?;
                self.call("listing dead outbox rows", async |connection| {
                    let rows = sqlx::query(concat!(
                        "SELECT ",
                        outbox_columns!(),
                        ", coalesce(o.last_error, '') FROM outbox o
                               JOIN issues i ON i.id = o.issue_id
                               JOIN integrations g ON g.id = i.integration_id
                           WHERE o.status = 'dead' AND o.id > $1 ORDER BY o.id LIMIT $2"
                    ))
                    .bind(after.map_or(i64::MIN, |after| after.0))
                    .bind(to_i64(limit))
                    .fetch_all(&mut *connection)
                    .await?;
                    let mut dead = Vec::with_capacity(rows.len());
                    for row in &rows {
                        dead.push(DeadOutboxRow { row: read_outbox!(row), error: row.try_get(14)? });
                    }
                    Ok(dead)
                })
                .await
            }

            $($own)*
        }
    };
}
pub(crate) use implement_admin_store;

/// Reads a consistency report within a transaction, so that all of it is from one snapshot.
macro_rules! read_consistency_report {
    ($reading:expr, $limit:expr) => {{
        let reading = &mut $reading;
        let totals = sqlx::query(
            "SELECT (SELECT count(*) FROM issues), (SELECT count(*) FROM event_logs),
                 (SELECT count(*) FROM event_logs WHERE processed_at IS NOT NULL),
                 (SELECT CAST(coalesce(sum(pending_events), 0) AS bigint) FROM issues
                  WHERE quarantined_at IS NULL),
                 (SELECT CAST(coalesce(sum(pending_events), 0) AS bigint) FROM issues
                  WHERE quarantined_at IS NOT NULL)",
        )
        .fetch_one(&mut **reading)
        .await?;
        let inconsistent = sqlx::query(
            "SELECT i.id, i.processing_status, i.pending_events, coalesce(e.unprocessed, 0),
                 i.quarantined_at IS NOT NULL, count(*) OVER ()
             FROM issues AS i LEFT JOIN (
                 SELECT issue_id, count(*) AS unprocessed FROM event_logs
                 WHERE processed_at IS NULL GROUP BY issue_id) AS e ON e.issue_id = i.id
             WHERE i.pending_events != coalesce(e.unprocessed, 0)
                 OR (i.processing_status = 'idle' AND i.quarantined_at IS NULL
                     AND i.pending_events > 0)
                 OR (i.processing_status != 'idle'
                     AND (i.quarantined_at IS NOT NULL OR i.pending_events = 0))
             ORDER BY i.id LIMIT $1",
        )
        .bind(to_i64($limit))
        .fetch_all(&mut **reading)
        .await?;
        let mut report = $crate::admin::ConsistencyReport {
            issues: count(totals.try_get(0)?)?,
            recorded: count(totals.try_get(1)?)?,
            processed: count(totals.try_get(2)?)?,
            pending: count(totals.try_get(3)?)?,
            quarantined: count(totals.try_get(4)?)?,
            ..Default::default()
        };
        for row in &inconsistent {
            report.discrepancies_total = count(row.try_get(5)?)?;
            let status: String = row.try_get(1)?;
            let status = known_value(&status, ProcessingStatus::parse(&status))?;
            let (pending_events, unprocessed) = (row.try_get(2)?, row.try_get(3)?);
            let quarantined = row.try_get(4)?;
            let problem = $crate::row_decoding::inconsistency(
                status,
                pending_events,
                unprocessed,
                quarantined,
            );
            report.discrepancies.push($crate::admin::Discrepancy {
                issue_id: IssueId(row.try_get(0)?),
                status,
                pending_events,
                unprocessed: count(unprocessed)?,
                quarantined,
                problem: problem.unwrap_or_default(),
            });
        }
        report
    }};
}
pub(crate) use read_consistency_report;
