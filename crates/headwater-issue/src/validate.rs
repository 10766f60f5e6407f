//! Validates the arguments of store calls before they have any effect.
//!
//! Upstream: the callers of a store, and every store. Guarantees: no store rejects validated arguments for their form.
//! Not here: checks that need the database, such as whether an integration exists.

use std::collections::HashSet;
use std::time::Duration;

use crate::claim::{AfterFailure, ClaimOptions, RunCompletion, RunFailure, SweepOptions};
use crate::error::{IssueError, Result};
use crate::issue::{DebounceWindow, NewEvent};
use crate::json::{self, JsonShape, Storable};
use crate::limits::{
    BATCH_BYTES_MAX, BATCH_MAX, CLAIM_TTL_MAX, CLAIM_TTL_MIN, DELAY_MAX, ERROR_BYTES_MAX,
    NAME_BYTES_MAX, OUTBOX_PER_RUN_MAX, OUTBOX_TAKE_MAX, OUTBOX_TARGETS_MAX, PAGE_MAX,
    RUN_EVENTS_MAX, SWEEP_MAX,
};
use crate::outbox::types::{
    KeyedOutboxRow, NewOutboxRow, OutboxDelivery, OutboxSettlement, OutboxTake,
};

/// Text that SQL can store: bounded length, no NUL. May be empty.
fn text(what: &str, value: &str) -> Result<()> {
    if value.len() > NAME_BYTES_MAX {
        let problem = format!("has {} bytes, at most {NAME_BYTES_MAX} are allowed", value.len());
        return Err(IssueError::invalid(what, problem));
    }
    if value.contains('\0') {
        return Err(IssueError::invalid(what, "contains a NUL character"));
    }
    Ok(())
}

/// A name: non-empty text.
pub(crate) fn name(what: &str, value: &str) -> Result<()> {
    if value.is_empty() {
        return Err(IssueError::invalid(what, "is empty"));
    }
    text(what, value)
}

/// A count of at most `max`.
pub(crate) fn count(what: &str, count: usize, max: usize) -> Result<()> {
    if count > max {
        return Err(IssueError::invalid(what, format!("{count} is over the limit of {max}")));
    }
    Ok(())
}

/// A batch of at most [`BATCH_MAX`] items.
pub(crate) fn batch(what: &str, length: usize) -> Result<()> {
    count(what, length, BATCH_MAX)
}

/// The size of a page: at least one row.
pub(crate) fn page(limit: usize) -> Result<()> {
    if limit == 0 {
        return Err(IssueError::invalid("limit", "must be at least 1"));
    }
    count("limit", limit, PAGE_MAX)
}

/// A delay of at most [`DELAY_MAX`].
pub(crate) fn delay(what: &str, value: Duration) -> Result<()> {
    if value > DELAY_MAX {
        return Err(IssueError::invalid(what, "is longer than a year"));
    }
    Ok(())
}

/// The TTL of a claim, or of a taken outbox row.
pub(crate) fn ttl(what: &str, value: Duration) -> Result<()> {
    if !(CLAIM_TTL_MIN..=CLAIM_TTL_MAX).contains(&value) {
        let problem = format!("must be from {CLAIM_TTL_MIN:?} to {CLAIM_TTL_MAX:?}");
        return Err(IssueError::invalid(what, problem));
    }
    Ok(())
}

/// An error text as stored: truncated to the maximum, NUL replaced.
pub(crate) fn error_text(error: &str) -> String {
    let mut end = error.len().min(ERROR_BYTES_MAX);
    while !error.is_char_boundary(end) {
        end -= 1;
    }
    error[..end].replace('\0', "\u{fffd}")
}

impl NewEvent {
    /// Rejects empty or overlong names, NUL in a name, and a payload that is not JSON, too large or too deep.
    pub fn validate(&self) -> Result<()> {
        self.storable().map(drop)
    }

    /// Validates, and returns the payload as it is stored.
    pub(crate) fn storable(&self) -> Result<Storable<'_>> {
        name("integration", &self.integration)?;
        text("external_project_id", &self.external_project_id)?;
        name("external_issue_id", &self.external_issue_id)?;
        name("source", &self.source)?;
        name("event_type", &self.event_type)?;
        if let Some(key) = &self.dedup_key {
            name("dedup_key", key)?;
        }
        json::storable("payload", &self.payload)
    }
}

impl DebounceWindow {
    /// Rejects values out of range.
    pub fn validate(&self) -> Result<()> {
        delay("quiet_for", self.quiet_for)?;
        delay("max_wait", self.max_wait)
    }
}

impl ClaimOptions {
    /// Rejects values out of range.
    pub fn validate(&self) -> Result<()> {
        name("worker", &self.worker)?;
        ttl("ttl", self.ttl)?;
        if self.events_max == 0 || self.crashes_max == 0 {
            return Err(IssueError::invalid("events_max or crashes_max", "must be at least 1"));
        }
        count("events_max", self.events_max, RUN_EVENTS_MAX)
    }
}

impl SweepOptions {
    /// Rejects values out of range.
    pub fn validate(&self) -> Result<()> {
        if self.limit == 0 || self.crashes_max == 0 {
            return Err(IssueError::invalid("limit or crashes_max", "must be at least 1"));
        }
        delay("nudge_overdue", self.nudge_overdue)?;
        delay("keep", self.keep)?;
        count("limit", self.limit, SWEEP_MAX)
    }
}

impl RunCompletion {
    /// Rejects too many or too large outbox rows, and invalid JSON.
    pub fn validate(&self) -> Result<()> {
        count("event_log_ids", self.event_log_ids.len(), RUN_EVENTS_MAX)?;
        count("outbox", self.outbox.len(), OUTBOX_PER_RUN_MAX)?;
        if let Some(fields) = &self.fields
            && json::validate("fields", fields)? != JsonShape::Object
        {
            return Err(IssueError::invalid("fields", "is not a JSON object"));
        }
        if let Some(discussions) = &self.discussions {
            json::validate("discussions", discussions)?;
        }
        self.outbox.iter().try_for_each(outbox_row)?;
        if self.bytes() > BATCH_BYTES_MAX {
            let problem = format!(
                "has {} bytes in total, at most {BATCH_BYTES_MAX} are allowed",
                self.bytes()
            );
            return Err(IssueError::invalid("completion", problem));
        }
        Ok(())
    }

    /// Bytes that count towards [`BATCH_BYTES_MAX`].
    pub fn bytes(&self) -> usize {
        let texts = [&self.fields, &self.discussions];
        let fields: usize = texts.iter().map(|text| text.as_ref().map_or(0, String::len)).sum();
        fields + self.outbox.iter().map(|row| row.payload.len()).sum::<usize>()
    }
}

/// An outbox row.
fn outbox_row(row: &NewOutboxRow) -> Result<()> {
    text("the target of an outbox row", &row.target)?;
    json::validate("the payload of an outbox row", &row.payload).map(|_| ())
}

/// The arguments of `write_outbox`.
pub(crate) fn keyed_outbox(rows: &[KeyedOutboxRow]) -> Result<()> {
    count("rows", rows.len(), OUTBOX_PER_RUN_MAX)?;
    let mut keys = HashSet::new();
    for KeyedOutboxRow { key, row } in rows {
        name("the key of an outbox row", key)?;
        if !keys.insert(key) {
            let problem = format!("`{key}` is used twice in one call");
            return Err(IssueError::invalid("the key of an outbox row", problem));
        }
        outbox_row(row)?;
    }
    batch_bytes(rows.iter().map(|one| one.row.payload.len()).sum())
}

/// The arguments of `complete`.
pub(crate) fn completions(completions: &[RunCompletion]) -> Result<()> {
    batch("completions", completions.len())?;
    completions.iter().try_for_each(RunCompletion::validate)?;
    batch_bytes(completions.iter().map(RunCompletion::bytes).sum())
}

/// The total size of all payloads of one call.
pub(crate) fn batch_bytes(bytes: usize) -> Result<()> {
    if bytes > BATCH_BYTES_MAX {
        let problem = format!("has {bytes} bytes in total, at most {BATCH_BYTES_MAX} are allowed");
        return Err(IssueError::invalid("batch", problem));
    }
    Ok(())
}

/// The arguments of `fail`.
pub(crate) fn failures(failures: &[RunFailure], attempts_max: u32) -> Result<()> {
    batch("failures", failures.len())?;
    if attempts_max == 0 {
        return Err(IssueError::invalid("attempts_max", "must be at least 1"));
    }
    failures.iter().try_for_each(|failure| match failure.then {
        AfterFailure::Retry { after } | AfterFailure::Defer { after } => delay("after", after),
        AfterFailure::Quarantine => Ok(()),
    })
}

/// The arguments of `take_outbox_from`.
pub(crate) fn outbox_take(take: &OutboxTake) -> Result<()> {
    name("worker", &take.worker)?;
    count("limit", take.limit, OUTBOX_TAKE_MAX)?;
    ttl("ttl", take.ttl)?;
    count("targets", take.targets.len(), OUTBOX_TARGETS_MAX)
}

/// The arguments of `settle_outbox`.
pub(crate) fn settlements(settlements: &[OutboxSettlement]) -> Result<()> {
    batch("settlements", settlements.len())?;
    settlements.iter().try_for_each(|settlement| match &settlement.delivery {
        OutboxDelivery::Retry { after, .. } | OutboxDelivery::Unavailable { after, .. } => {
            delay("after", *after)
        }
        OutboxDelivery::Delivered | OutboxDelivery::Dead { .. } | OutboxDelivery::Release => Ok(()),
    })
}
