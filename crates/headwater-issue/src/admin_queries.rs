//! The administrative operations of both stores, as statements of `sql`.
//!
//! Upstream: every store that implements [`SqlStore`]. Downstream: the columns and rows of `row_decoding`. Guarantees: a
//! listing is one statement, so it is one snapshot.

use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::clock::Timestamp;

use crate::admin::{
    AdminStore, Backlog, ConsistencyReport, DeadOutboxRow, Discrepancy, EventLogFilter,
    IntegrationInfo, IssueDeadLetter, IssueFacts, IssueFilter, IssueRetried, OutboxFacts,
    OutboxFilter, OutboxStatus, QuarantineCleared, UndeliveredRow, WorkerInfo,
};
use crate::admin_statements::{
    BACKLOG, issues_count_statement, issues_statement, outbox_facts_select, outbox_statement,
};
use crate::claim::IssueRun;
use crate::error::{IssueError, Result};
use crate::issue::{
    ClaimEpoch, DeadLetterId, EventLog, EventLogId, IntegrationId, Issue, IssueId, OutboxId,
    ProcessingStatus,
};
use crate::limits::{OLDEST_WAIT_ISSUES, PAGE_MAX, RUN_EVENTS_SCANNED_MAX, UNDELIVERED_MAX};
use crate::outbox::types::OutboxKind;
use crate::row_decoding::{
    count, database_error, dead_letter_columns, event_log_columns, inconsistency, issue_columns,
    known_value, optional_timestamp, outbox_columns, read_dead_letter, read_event_log, read_issue,
    read_outbox, read_run, timestamp, to_i64,
};
use crate::sql::{SqlRow, SqlValue};
use crate::validate;

/// What the administrative operations need of a store. In statements, `headwater_now()` is the time of the database.
#[async_trait]
pub(crate) trait SqlStore: Send + Sync {
    /// Executes a statement that reads. `what` names the operation in errors.
    async fn query(
        &self,
        what: &str,
        sql: &'static str,
        parameters: &[SqlValue<'_>],
    ) -> Result<Vec<SqlRow>>;

    /// Executes a statement that writes, and commits.
    async fn execute(
        &self,
        what: &str,
        sql: &'static str,
        parameters: &[SqlValue<'_>],
    ) -> Result<()>;

    /// Handles a step of the clock, so that expiry times can be compared with it.
    async fn handle_clock_step(&self) -> Result<()>;

    /// Ends a quarantine or, with `retry`, any wait. `None` if the issue does not exist.
    async fn end_wait(&self, what: &str, id: IssueId, retry: bool) -> Result<Option<WaitEnded>>;

    /// Makes a dead row deliverable again and wakes deliverers. Returns whether there is such a row.
    async fn requeue_dead_outbox(&self, id: OutboxId) -> Result<bool>;
}

/// Result of ending a quarantine or a wait.
pub(crate) struct WaitEnded {
    pub(crate) was_quarantined: bool,
    pub(crate) changed: bool,
    /// Status afterwards.
    pub(crate) status: ProcessingStatus,
}

/// The rows of a query, each read by `read`.
async fn list<T>(
    store: &impl SqlStore,
    what: &str,
    sql: &'static str,
    parameters: &[SqlValue<'_>],
    read: impl Fn(&SqlRow) -> Result<T, sqlx::Error>,
) -> Result<Vec<T>> {
    let rows = store.query(what, sql, parameters).await?;
    let read: Result<_, sqlx::Error> = rows.iter().map(read).collect();
    read.map_err(|error| database_error(what, error))
}

/// The first row of a query.
async fn first<T>(
    store: &impl SqlStore,
    what: &str,
    sql: &'static str,
    parameters: &[SqlValue<'_>],
    read: impl Fn(&SqlRow) -> Result<T, sqlx::Error>,
) -> Result<Option<T>> {
    Ok(list(store, what, sql, parameters, read).await?.into_iter().next())
}

async fn end_wait(
    store: &impl SqlStore,
    what: &str,
    id: IssueId,
    retry: bool,
) -> Result<WaitEnded> {
    let ended = store.end_wait(what, id, retry).await?;
    ended.ok_or_else(|| IssueError::NotFound { what: format!("issue {id}") })
}

/// Where a page begins that follows no other.
fn first_id(newest_first: bool) -> i64 {
    if newest_first { i64::MAX } else { i64::MIN }
}

fn read_integration(row: &SqlRow) -> Result<IntegrationInfo, sqlx::Error> {
    let (name, provider) = (row.get(1)?, row.get(2)?);
    Ok(IntegrationInfo { id: IntegrationId(row.get(0)?), name, provider })
}

#[async_trait]
impl<S: SqlStore> AdminStore for S {
    async fn ensure_integration(&self, name: &str, provider: &str) -> Result<IntegrationId> {
        validate::name("name", name)?;
        validate::name("provider", provider)?;
        let what = "creating an integration";
        let insert = "INSERT INTO integrations (name, provider, created_at)
             VALUES ($1, $2, headwater_now()) ON CONFLICT (name) DO NOTHING";
        let select = "SELECT id, name, provider FROM integrations WHERE name = $1";
        // A read first: a command that only looks also works while the database is read-only.
        let mut found = first(self, what, select, &[name.into()], read_integration).await?;
        if found.is_none() {
            self.execute(what, insert, &[name.into(), provider.into()]).await?;
            found = first(self, what, select, &[name.into()], read_integration).await?;
        }
        match found {
            Some(found) if found.provider == provider => Ok(found.id),
            Some(IntegrationInfo { name: integration, provider, .. }) => {
                Err(IssueError::OtherProvider { integration, provider })
            }
            None => Err(IssueError::NotFound { what: format!("integration `{name}`") }),
        }
    }

    async fn expire_leases(&self) -> Result<()> {
        let what = "ending the leases of dead processes";
        let claims = "UPDATE issues SET claim_expires_at = headwater_now()
            WHERE processing_status = 'processing' AND claim_expires_at > headwater_now()";
        let rows = "UPDATE outbox SET due_at = headwater_now()
            WHERE status = 'taken' AND due_at > headwater_now()";
        self.execute(what, claims, &[]).await?;
        self.execute(what, rows, &[]).await
    }

    async fn integrations(&self, after: Option<&str>) -> Result<Vec<IntegrationInfo>> {
        let select =
            "SELECT id, name, provider FROM integrations WHERE name > $1 ORDER BY name LIMIT $2";
        let parameters = [after.unwrap_or_default().into(), to_i64(PAGE_MAX).into()];
        list(self, "listing integrations", select, &parameters, read_integration).await
    }

    async fn issue(&self, id: IssueId) -> Result<Option<Issue>> {
        let select = concat!(
            "SELECT ",
            issue_columns!(),
            " FROM issues i JOIN integrations g ON g.id = i.integration_id WHERE i.id = $1"
        );
        first(self, "reading an issue", select, &[id.0.into()], read_issue).await
    }

    async fn find_issue(
        &self,
        integration: &str,
        external_project_id: &str,
        external_issue_id: &str,
    ) -> Result<Option<Issue>> {
        let select = concat!(
            "SELECT ",
            issue_columns!(),
            " FROM issues i JOIN integrations g ON g.id = i.integration_id
              WHERE g.name = $1 AND i.external_project_id = $2 AND i.external_issue_id = $3"
        );
        let names = [integration, external_project_id, external_issue_id].map(SqlValue::from);
        first(self, "finding an issue", select, &names, read_issue).await
    }

    async fn issues(&self, filter: &IssueFilter, limit: usize) -> Result<Vec<Issue>> {
        validate::page(limit)?;
        let error = filter.error.as_deref().map(containing);
        let parameters = [
            filter.after.map_or(first_id(filter.newest_first), |after| after.0).into(),
            filter.status.map(ProcessingStatus::as_str).into(),
            filter.quarantined.into(),
            filter.integration.as_deref().into(),
            error.as_deref().into(),
            to_i64(limit).into(),
        ];
        list(self, "listing issues", issues_statement(filter), &parameters, read_issue).await
    }

    async fn count_issues(&self, filter: &IssueFilter, max: usize) -> Result<usize> {
        let error = filter.error.as_deref().map(containing);
        let parameters = [
            to_i64(max).into(),
            filter.status.map(ProcessingStatus::as_str).into(),
            filter.quarantined.into(),
            filter.integration.as_deref().into(),
            error.as_deref().into(),
        ];
        let read = |row: &SqlRow| count(row.get(0)?);
        let select = issues_count_statement(filter);
        let counted = first(self, "counting issues", select, &parameters, read).await?;
        Ok(counted.unwrap_or_default())
    }

    async fn event_logs(
        &self,
        issue_id: IssueId,
        filter: &EventLogFilter,
        limit: usize,
    ) -> Result<Vec<EventLog>> {
        validate::page(limit)?;
        macro_rules! select {
            ($after:literal, $order:literal) => {
                concat!(
                    "SELECT ",
                    event_log_columns!(),
                    " FROM event_logs e WHERE e.issue_id = $1 AND e.id ",
                    $after,
                    " $2 AND ($3::boolean IS NULL OR (e.processed_at IS NOT NULL) = $3) ORDER BY e.id ",
                    $order,
                    " LIMIT $4"
                )
            };
        }
        let select = if filter.newest_first { select!("<", "DESC") } else { select!(">", "ASC") };
        let after = filter.after.map_or(first_id(filter.newest_first), |after| after.0);
        let parameters =
            [issue_id.0.into(), after.into(), filter.processed.into(), to_i64(limit).into()];
        list(self, "listing event logs", select, &parameters, read_event_log).await
    }

    async fn runs(
        &self,
        issue_id: IssueId,
        before: Option<ClaimEpoch>,
        limit: usize,
    ) -> Result<Vec<IssueRun>> {
        validate::page(limit)?;
        let select = "SELECT issue_id, epoch, worker, headwater_ms(claimed_at), headwater_ms(ended_at), result, error, events
             FROM issue_runs WHERE issue_id = $1 AND epoch < $2 ORDER BY epoch DESC LIMIT $3";
        let before = before.map_or(i64::MAX, |before| before.0);
        let parameters = [issue_id.0.into(), before.into(), to_i64(limit).into()];
        list(self, "listing runs", select, &parameters, read_run).await
    }

    async fn processed_event_logs(
        &self,
        issue_id: IssueId,
        from: Timestamp,
        to: Timestamp,
        limit: usize,
    ) -> Result<Vec<EventLog>> {
        validate::page(limit)?;
        let select = "SELECT e.id, e.issue_id, e.source, e.event_type, e.dedup_key, '', headwater_ms(e.created_at),
                 headwater_ms(e.processed_at), e.processing_error, e.trace
             FROM (SELECT id, issue_id, source, event_type, dedup_key, created_at, processed_at, processing_error, trace
                 FROM event_logs WHERE issue_id = $1 ORDER BY id DESC LIMIT $4) AS e
             WHERE e.processed_at >= headwater_time($2) AND e.processed_at <= headwater_time($3)
             ORDER BY e.id LIMIT $5";
        let scanned = to_i64(RUN_EVENTS_SCANNED_MAX);
        let (from, to) = (column(from), column(to));
        let parameters =
            [issue_id.0.into(), from.into(), to.into(), scanned.into(), to_i64(limit).into()];
        list(self, "listing event logs", select, &parameters, read_event_log).await
    }

    async fn event_log(&self, id: EventLogId) -> Result<Option<EventLog>> {
        let select = concat!("SELECT ", event_log_columns!(), " FROM event_logs e WHERE e.id = $1");
        first(self, "reading an event log", select, &[id.0.into()], read_event_log).await
    }

    async fn original_payload(&self, id: EventLogId) -> Result<Option<String>> {
        let select = "SELECT body FROM event_log_originals WHERE event_log_id = $1";
        let read = |row: &SqlRow| {
            let text = String::from_utf8(row.get(0)?);
            text.map_err(|error| sqlx::Error::Decode(error.into()))
        };
        first(self, "reading an original payload", select, &[id.0.into()], read).await
    }

    async fn newest_event_log_at_commit(&self, id: OutboxId) -> Result<Option<EventLogId>> {
        let select = "SELECT newest_event_log_id FROM outbox WHERE id = $1";
        let read = |row: &SqlRow| Ok(row.get::<Option<i64>>(0)?.map(EventLogId));
        Ok(first(self, "reading an outbox row", select, &[id.0.into()], read).await?.flatten())
    }

    async fn release(&self, id: IssueId) -> Result<QuarantineCleared> {
        let ended = end_wait(self, "releasing an issue", id, false).await?;
        Ok(match (ended.was_quarantined, ended.status) {
            (false, _) => QuarantineCleared::NotQuarantined,
            (true, ProcessingStatus::Queued) => QuarantineCleared::Queued,
            (true, _) => QuarantineCleared::Idle,
        })
    }

    async fn retry(&self, id: IssueId) -> Result<IssueRetried> {
        let ended = end_wait(self, "retrying an issue", id, true).await?;
        Ok(match (ended.changed, ended.status) {
            (true, ProcessingStatus::Queued) => IssueRetried::Queued,
            (_, ProcessingStatus::Processing) => IssueRetried::Processing,
            _ => IssueRetried::Idle,
        })
    }

    async fn issue_facts(&self, id: IssueId) -> Result<Option<IssueFacts>> {
        self.handle_clock_step().await?;
        let select = concat!(
            "SELECT ",
            issue_columns!(),
            ", (SELECT headwater_ms(e.created_at) FROM event_logs e
                WHERE e.issue_id = i.id AND e.processed_at IS NULL ORDER BY e.id LIMIT 1),
               (SELECT count(*) FROM workers WHERE expires_at > headwater_now()),
               EXISTS (SELECT 1 FROM workers
                WHERE worker = i.claim_owner AND expires_at > headwater_now()),
               headwater_ms(headwater_now()),
               (SELECT headwater_ms(seen_at) FROM workers WHERE worker = i.claim_owner),
               (SELECT headwater_ms(max(o.delivered_at)) FROM outbox o
                WHERE o.issue_id = i.id AND o.kind = 'reply' AND o.status = 'delivered')
              FROM issues i JOIN integrations g ON g.id = i.integration_id WHERE i.id = $1"
        );
        let read = |row: &SqlRow| {
            Ok(IssueFacts {
                issue: read_issue(row)?,
                oldest_pending_at: optional_timestamp(row.get(23)?),
                workers_alive: count(row.get(24)?)?,
                owner_alive: row.get(25)?,
                now: timestamp(row.get(26)?),
                owner_seen_at: optional_timestamp(row.get(27)?),
                reply_delivered_at: optional_timestamp(row.get(28)?),
                undelivered: Vec::new(),
            })
        };
        let what = "reading the facts about an issue";
        let Some(facts) = first(self, what, select, &[id.0.into()], read).await? else {
            return Ok(None);
        };
        let undelivered =
            "SELECT id, kind, target, status, attempts, headwater_ms(due_at), last_error
             FROM outbox WHERE issue_id = $1 AND status <> 'delivered' ORDER BY id LIMIT $2";
        let read = |row: &SqlRow| {
            let (kind, status): (String, String) = (row.get(1)?, row.get(3)?);
            Ok(UndeliveredRow {
                id: OutboxId(row.get(0)?),
                kind: known_value(&kind, OutboxKind::parse(&kind))?,
                target: row.get(2)?,
                is_dead: status == "dead",
                attempts: u32::try_from(row.get::<i64>(4)?).unwrap_or(u32::MAX),
                due_at: timestamp(row.get(5)?),
                error: row.get(6)?,
            })
        };
        let parameters = [id.0.into(), to_i64(UNDELIVERED_MAX).into()];
        let undelivered = list(self, what, undelivered, &parameters, read).await?;
        Ok(Some(IssueFacts { undelivered, ..facts }))
    }

    async fn check_consistency_page(
        &self,
        after: Option<IssueId>,
        issues_max: usize,
    ) -> Result<ConsistencyReport> {
        validate::page(issues_max)?;
        let what = "checking consistency";
        // One statement, so that the counter and the event logs of an issue are from one snapshot.
        let select =
            "SELECT i.id, i.processing_status, i.pending_events, i.quarantined_at IS NOT NULL,
                 (SELECT count(*) FROM event_logs e WHERE e.issue_id = i.id),
                 (SELECT count(*) FROM event_logs e
                  WHERE e.issue_id = i.id AND e.processed_at IS NULL)
             FROM issues i WHERE i.id > $1 ORDER BY i.id LIMIT $2";
        let parameters =
            [after.map_or(i64::MIN, |after| after.0).into(), to_i64(issues_max).into()];
        let rows = self.query(what, select, &parameters).await?;
        let mut report = ConsistencyReport::default();
        for row in &rows {
            add_issue(&mut report, row).map_err(|error| database_error(what, error))?;
        }
        report.resume_after = report.resume_after.filter(|_| rows.len() == issues_max);
        Ok(report)
    }

    async fn backlog(&self) -> Result<Backlog> {
        let read = |row: &SqlRow| {
            let [oldest, first_pending] =
                [optional_timestamp(row.get(5)?), optional_timestamp(row.get(6)?)];
            let now = timestamp(row.get(7)?);
            let age = |oldest: Option<Timestamp>| {
                oldest.map_or(Duration::ZERO, |oldest| now.since(oldest))
            };
            Ok(Backlog {
                queued: count(row.get(0)?)?,
                processing: count(row.get(1)?)?,
                quarantined: count(row.get(2)?)?,
                outbox_pending: count(row.get(3)?)?,
                outbox_dead: count(row.get(4)?)?,
                outbox_lag: age(oldest),
                oldest_wait: age(first_pending),
            })
        };
        let parameters = [to_i64(OLDEST_WAIT_ISSUES).into()];
        let backlog = first(self, "counting the backlog", BACKLOG, &parameters, read).await?;
        Ok(backlog.unwrap_or_default())
    }

    async fn workers(&self) -> Result<Vec<WorkerInfo>> {
        self.handle_clock_step().await?;
        let select = "SELECT worker, headwater_ms(started_at), headwater_ms(seen_at),
                 headwater_ms(expires_at), (SELECT count(*) FROM issues
                 WHERE processing_status = 'processing' AND claim_owner = worker)
             FROM workers WHERE expires_at > headwater_now() ORDER BY worker LIMIT $1";
        let read = |row: &SqlRow| {
            Ok(WorkerInfo {
                worker: row.get(0)?,
                started_at: timestamp(row.get(1)?),
                seen_at: timestamp(row.get(2)?),
                expires_at: timestamp(row.get(3)?),
                claims: count(row.get(4)?)?,
            })
        };
        list(self, "listing workers", select, &[to_i64(PAGE_MAX).into()], read).await
    }

    async fn dead_letters(
        &self,
        after: Option<DeadLetterId>,
        limit: usize,
    ) -> Result<Vec<IssueDeadLetter>> {
        validate::page(limit)?;
        let select = concat!(
            "SELECT ",
            dead_letter_columns!(),
            " FROM dead_letters d JOIN issues i ON i.id = d.issue_id
                  JOIN integrations g ON g.id = i.integration_id
              WHERE d.id > $1 ORDER BY d.id LIMIT $2"
        );
        let parameters = [after.map_or(i64::MIN, |after| after.0).into(), to_i64(limit).into()];
        list(self, "listing dead letters", select, &parameters, read_dead_letter).await
    }

    async fn dead_outbox(
        &self,
        after: Option<OutboxId>,
        limit: usize,
    ) -> Result<Vec<DeadOutboxRow>> {
        validate::page(limit)?;
        let select = concat!(
            "SELECT ",
            outbox_columns!(),
            ", coalesce(o.last_error, '') FROM outbox o JOIN issues i ON i.id = o.issue_id
                   JOIN integrations g ON g.id = i.integration_id
               WHERE o.status = 'dead' AND o.id > $1 ORDER BY o.id LIMIT $2"
        );
        let parameters = [after.map_or(i64::MIN, |after| after.0).into(), to_i64(limit).into()];
        let read = |row: &SqlRow| Ok(DeadOutboxRow { row: read_outbox(row)?, error: row.get(14)? });
        list(self, "listing dead outbox rows", select, &parameters, read).await
    }

    async fn outbox_rows(&self, filter: &OutboxFilter, limit: usize) -> Result<Vec<OutboxFacts>> {
        validate::page(limit)?;
        let parameters = [
            filter.after.map_or(first_id(filter.newest_first), |after| after.0).into(),
            filter.status.map(OutboxStatus::as_str).into(),
            filter.issue.map(|issue| issue.0).into(),
            to_i64(limit).into(),
        ];
        let select = outbox_statement(filter);
        list(self, "listing outbox rows", select, &parameters, read_outbox_facts).await
    }

    async fn outbox_facts(&self, id: OutboxId) -> Result<Option<OutboxFacts>> {
        let select = concat!(outbox_facts_select!(), " WHERE o.id = $1");
        let what = "reading the facts about an outbox row";
        first(self, what, select, &[id.0.into()], read_outbox_facts).await
    }

    async fn committed_outbox(
        &self,
        issue_id: IssueId,
        from: Timestamp,
        to: Timestamp,
        limit: usize,
    ) -> Result<Vec<OutboxFacts>> {
        validate::page(limit)?;
        let select = concat!(
            outbox_facts_select!(),
            " WHERE o.issue_id = $1 AND o.created_at >= headwater_time($2)
                  AND o.created_at <= headwater_time($3) ORDER BY o.id LIMIT $4"
        );
        let parameters =
            [issue_id.0.into(), column(from).into(), column(to).into(), to_i64(limit).into()];
        list(self, "listing outbox rows", select, &parameters, read_outbox_facts).await
    }

    async fn retry_outbox(&self, id: OutboxId) -> Result<()> {
        if !self.requeue_dead_outbox(id).await? {
            return Err(IssueError::NotFound { what: format!("dead outbox row {id}") });
        }
        Ok(())
    }
}

/// A pattern of `LIKE ... ESCAPE '!'` for texts in lower case that contain this one.
fn containing(text: &str) -> String {
    let escaped = text.to_lowercase().replace('!', "!!").replace('%', "!%").replace('_', "!_");
    format!("%{escaped}%")
}

/// A time as a parameter.
fn column(time: Timestamp) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

fn read_outbox_facts(row: &SqlRow) -> Result<OutboxFacts, sqlx::Error> {
    let (kind, status): (String, String) = (row.get(3)?, row.get(5)?);
    let number = |index: usize| row.get::<i64>(index).map(|n| u32::try_from(n).unwrap_or(u32::MAX));
    Ok(OutboxFacts {
        id: OutboxId(row.get(0)?),
        issue_id: IssueId(row.get(1)?),
        integration: row.get(2)?,
        kind: known_value(&kind, OutboxKind::parse(&kind))?,
        target: row.get(4)?,
        status: known_value(&status, OutboxStatus::parse(&status))?,
        attempts: number(6)?,
        crashes: number(7)?,
        due_at: timestamp(row.get(8)?),
        taken_by: row.get(9)?,
        error: row.get(10)?,
        created_at: timestamp(row.get(11)?),
        delivered_at: optional_timestamp(row.get(12)?),
        behind: row.get::<Option<i64>>(13)?.map(OutboxId),
        now: timestamp(row.get(14)?),
    })
}

/// Adds one issue to a report, as its last one.
fn add_issue(report: &mut ConsistencyReport, row: &SqlRow) -> Result<(), sqlx::Error> {
    let issue_id = IssueId(row.get(0)?);
    let status: String = row.get(1)?;
    let status = known_value(&status, ProcessingStatus::parse(&status))?;
    let (pending_events, quarantined): (i64, bool) = (row.get(2)?, row.get(3)?);
    let (recorded, unprocessed): (i64, i64) = (row.get(4)?, row.get(5)?);
    report.issues += 1;
    report.recorded += count::<u64>(recorded)?;
    report.processed += count::<u64>(recorded - unprocessed)?;
    let pending = if quarantined { &mut report.quarantined } else { &mut report.pending };
    *pending += count::<u64>(pending_events)?;
    report.resume_after = Some(issue_id);
    if let Some(problem) = inconsistency(status, pending_events, unprocessed, quarantined) {
        let unprocessed = count(unprocessed)?;
        report.discrepancies_total += 1;
        report.discrepancies.push(Discrepancy {
            issue_id,
            status,
            pending_events,
            unprocessed,
            quarantined,
            problem,
        });
    }
    Ok(())
}
