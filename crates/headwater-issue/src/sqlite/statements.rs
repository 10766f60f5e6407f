//! Column lists and parameter conversions shared by the statements of the SQLite store.

use headwater_stream::clock::Timestamp;
use serde_json::Value;

/// The columns of `read_issue!`; `i` is the issue, `g` its integration.
macro_rules! issue_columns {
    () => {
        "i.id, g.name, g.provider, i.external_project_id, i.external_issue_id, i.processing_status,
         i.pending_events, i.claim_epoch, i.claim_owner, i.claim_expires_at, i.not_before, i.attempts,
         i.crashes, i.superseded, i.quarantined_at, i.last_error, i.fields, i.discussions,
         i.processing_started_at, i.last_processed_at, i.nudged_at, i.created_at, i.updated_at"
    };
}
pub(super) use issue_columns;

/// The columns of `read_event_log!`; `e` is the event log.
macro_rules! event_log_columns {
    () => {
        "e.id, e.issue_id, e.source, e.event_type, e.dedup_key, e.payload, e.created_at, e.processed_at,
         e.processing_error, e.trace"
    };
}
pub(super) use event_log_columns;

/// The columns of `read_dead_letter!`; `d` is the dead letter, `i` its issue, `g` the integration.
macro_rules! dead_letter_columns {
    () => {
        "d.id, d.issue_id, g.name, g.provider, i.external_project_id, i.external_issue_id, d.error, d.attempts,
         d.crashes, d.pending_events, d.event_log_id, d.quarantined_at, d.released_at"
    };
}
pub(super) use dead_letter_columns;

/// The columns of `read_outbox!`; `o` is the row, `i` its issue, `g` the integration.
macro_rules! outbox_columns {
    () => {
        "o.id, o.issue_id, g.name, g.provider, i.external_project_id, i.external_issue_id, o.kind, o.target,
         o.idempotency_key, o.payload, o.deliveries, o.attempts, o.created_at, o.crashes"
    };
}
pub(super) use outbox_columns;

/// Converts a timestamp into a column value.
pub(super) fn to_column(time: Timestamp) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

/// Converts an optional timestamp into a JSON value for a column.
pub(super) fn optional_column(time: Option<Timestamp>) -> Value {
    time.map_or(Value::Null, |time| to_column(time).into())
}

/// Rows or ids as one JSON parameter for `json_each`, because SQLite has no arrays.
pub(super) fn json_rows(rows: Vec<Value>) -> String {
    Value::Array(rows).to_string()
}
