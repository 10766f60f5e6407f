//! Decides whether a reply is stale: newer events arrived before the reply was committed, so it must not be sent.
//!
//! Upstream: `outbound` discards a stale reply; the run of the newer events answers all of them.
//! Not here: hand-overs, which are never stale, and a close that newer events supersede after the commit (see
//! `tickets::reply_delivery`).

use headwater_issue::{DeliverError, EventLogId, OutboxRow, Store};

use crate::desk::DeskReply;

/// Whether the issue had events, when the reply was committed, that its run had not seen. Compares ids, not times, so the
/// result is the same for every delivery attempt.
pub(super) async fn is_stale(
    store: &dyn Store,
    row: &OutboxRow,
    reply: &DeskReply,
) -> Result<bool, DeliverError> {
    let Some(up_to) = reply.up_to else { return Ok(false) };
    let newest = store.newest_event_log_at_commit(row.id).await;
    // Our own database failed, not the delivery: no attempt is counted.
    let newest = newest.map_err(|error| DeliverError::Unavailable(error.to_string()))?;
    Ok(newest.is_some_and(|EventLogId(newest)| newest > up_to))
}
