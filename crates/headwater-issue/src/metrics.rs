//! Names of all metrics of this crate, with their labels and meaning.

use std::sync::Arc;

use headwater_stream::{Backend, StreamName};
use metrics::gauge;

use crate::error::Result;
use crate::nudge::{GROUP, STREAM};
use crate::store::Store;

/// Events passed to the inbox. Labels: result (`recorded`, `duplicate`, `refused`, `error`).
pub const EVENTS_RECORDED: &str = "headwater_events_recorded_total";
/// Issues queued by a recorded event.
pub const ISSUES_QUEUED: &str = "headwater_issues_queued_total";
/// Seconds from claim to the end of a run. Labels: result, as in [`ISSUES_PROCESSED`].
pub const ISSUES_PROCESSING_DURATION: &str = "headwater_issues_processing_duration_seconds";
/// Runs that ended. Labels: result (`done`, `failed`, `put_off`: deferred, `quarantined`, `fenced`, `superseded`,
/// `given_back`: claim released, `error`: the end of the run was not stored).
pub const ISSUES_PROCESSED: &str = "headwater_issues_processed_total";
/// Event logs in one run.
pub const EVENTS_PER_ISSUE_BATCH: &str = "headwater_events_per_issue_batch";
/// Pending entries of `issue_work`: delivered and not acknowledged.
pub const REDIS_PENDING_MESSAGES: &str = "headwater_redis_pending_messages";
/// Nudges sent. Labels: result (`sent`, `lost`: dropped, the sweep sends it again).
pub const NUDGES: &str = "headwater_nudges_total";
/// Nudges that caused no run. Labels: result (`idle`, `taken`, `waiting`, `quarantined`, `missing`, `malformed`,
/// `error`).
pub const NUDGES_WITHOUT_RUN: &str = "headwater_nudges_without_run_total";
/// Nudges of the sweep. Labels: result (`stream`, `direct`: added to the local queue of this process).
pub const SWEEP_NUDGES: &str = "headwater_sweep_nudges_total";
/// Issues requeued by the sweep because their claim expired.
pub const SWEEP_REQUEUED: &str = "headwater_sweep_requeued_total";
/// Issues quarantined by the sweep because too many of their claims expired.
pub const SWEEP_QUARANTINED: &str = "headwater_sweep_quarantined_total";
/// Outbox deliveries. Labels: kind, result (`delivered`, `retry`, `away`: target
/// unavailable, `dead`, `released`, `fenced`, `unsettled`).
pub const OUTBOX_DELIVERIES: &str = "headwater_outbox_deliveries_total";
/// Age in seconds of the oldest undelivered outbox row.
pub const OUTBOX_LAG: &str = "headwater_outbox_lag_seconds";
/// Outbox rows. Labels: status (`pending`, `dead`).
pub const OUTBOX_ROWS: &str = "headwater_outbox_rows";
/// Issues. Labels: status (`queued`, `processing`, `quarantined`).
pub const ISSUES: &str = "headwater_issues";
/// Longest time in seconds that a queued issue has waited, of the first 10,000 queued ones.
pub const ISSUES_OLDEST_WAIT: &str = "headwater_issues_oldest_wait_seconds";

/// PostgreSQL connections found inside a transaction that no call had open; each was closed. Alert on any.
pub const CONNECTIONS_IN_TRANSACTION: &str = "headwater_database_connections_in_transaction_total";
/// Sessions terminated by PostgreSQL because they were idle in a transaction (SQL state 25P03). Alert on any.
pub const IDLE_IN_TRANSACTION_TIMEOUTS: &str =
    "headwater_database_idle_in_transaction_timeouts_total";

/// Confirmed event logs that were read back on a separate connection.
pub const CONFIRMED_EVENTS_CHECKED: &str = "headwater_confirmed_events_checked_total";
/// Confirmed event logs that were missing when read back. Alert on any: confirmed events are lost.
pub const CONFIRMED_EVENTS_MISSING: &str = "headwater_confirmed_events_missing_total";

pub(crate) fn count_nudge_without_run(reason: &'static str) {
    metrics::counter!(NUDGES_WITHOUT_RUN, "result" => reason).increment(1);
}

/// Reads the backlog once and sets the gauges. `redis_pending_messages` keeps its value while the streams are
/// unavailable.
pub async fn sample(store: &dyn Store, streams: Option<&Arc<dyn Backend>>) -> Result<()> {
    if let Some(streams) = streams
        && let Ok(stream) = StreamName::new(STREAM)
        && let Ok(stats) = streams.stats(&stream).await
    {
        let groups = stats.map(|stats| stats.groups).unwrap_or_default();
        let workers = groups.iter().find(|group| group.name.as_str() == GROUP);
        gauge!(REDIS_PENDING_MESSAGES).set(workers.map_or(0, |group| group.pending) as f64);
    }
    let backlog = store.backlog().await?;
    gauge!(ISSUES, "status" => "queued").set(backlog.queued as f64);
    gauge!(ISSUES, "status" => "processing").set(backlog.processing as f64);
    gauge!(ISSUES, "status" => "quarantined").set(backlog.quarantined as f64);
    gauge!(ISSUES_OLDEST_WAIT).set(backlog.oldest_wait.as_secs_f64());
    gauge!(OUTBOX_ROWS, "status" => "pending").set(backlog.outbox_pending as f64);
    gauge!(OUTBOX_ROWS, "status" => "dead").set(backlog.outbox_dead as f64);
    gauge!(OUTBOX_LAG).set(backlog.outbox_lag.as_secs_f64());
    Ok(())
}
