//! Column lists shared by the statements of the PostgreSQL store.

/// The columns of `read_issue!`; `i` is the issue, `g` its integration.
macro_rules! issue_columns {
    () => {
        "i.id, g.name, g.provider, i.external_project_id, i.external_issue_id, i.processing_status,
         i.pending_events, i.claim_epoch, i.claim_owner, headwater_ms(i.claim_expires_at),
         headwater_ms(i.not_before), i.attempts, i.crashes, i.superseded, headwater_ms(i.quarantined_at),
         i.last_error, i.fields::text, i.discussions::text, headwater_ms(i.processing_started_at),
         headwater_ms(i.last_processed_at), headwater_ms(i.nudged_at), headwater_ms(i.created_at),
         headwater_ms(i.updated_at)"
    };
}
pub(super) use issue_columns;

/// The columns of `read_event_log!`; `e` is the event log.
macro_rules! event_log_columns {
    () => {
        "e.id, e.issue_id, e.source, e.event_type, e.dedup_key, e.payload::text, headwater_ms(e.created_at),
         headwater_ms(e.processed_at), e.processing_error, e.trace"
    };
}
pub(super) use event_log_columns;

/// The columns of `read_dead_letter!`; `d` is the dead letter, `i` its issue, `g` the integration.
macro_rules! dead_letter_columns {
    () => {
        "d.id, d.issue_id, g.name, g.provider, i.external_project_id, i.external_issue_id, d.error, d.attempts,
         d.crashes, d.pending_events, d.event_log_id, headwater_ms(d.quarantined_at), headwater_ms(d.released_at)"
    };
}
pub(super) use dead_letter_columns;

/// The columns of `read_outbox!`; `o` is the row, `i` its issue, `g` the integration.
macro_rules! outbox_columns {
    () => {
        "o.id, o.issue_id, g.name, g.provider, i.external_project_id, i.external_issue_id, o.kind, o.target,
         o.idempotency_key, o.payload::text, o.deliveries, o.attempts, headwater_ms(o.created_at), o.crashes"
    };
}
pub(super) use outbox_columns;
