//! What may be said to a store, checked before anything happens.
//!
//! Upstream: the callers of a store, and every store itself. Promises: what passes here is refused by no store for its form.
//! Not here: what only the database knows, such as whether an integration exists.

use std::collections::HashSet;
use std::time::Duration;

use crate::claim::{AfterFailure, ClaimOptions, Completion, Failure, SweepOptions};
use crate::delivery::{Delivery, KeyedOutbox, NewOutbox, OutboxSettlement, OutboxTake};
use crate::error::{IssueError, Result};
use crate::issue::{NewEvent, Quiet};
use crate::json::{self, Shape, Storable};
use crate::limits::{
    BATCH_BYTES_MAX, BATCH_MAX, CLAIM_TTL_MAX, CLAIM_TTL_MIN, DELAY_MAX, ERROR_BYTES_MAX,
    NAME_BYTES_MAX, OUTBOX_PER_RUN_MAX, OUTBOX_TAKE_MAX, OUTBOX_TARGETS_MAX, PAGE_MAX,
    RUN_EVENTS_MAX, SWEEP_MAX,
};

/// Text that SQL can keep, of a bounded length; it may be empty.
fn text(what: &str, value: &str) -> Result<()> {
    if value.len() > NAME_BYTES_MAX {
        let problem = format!("it has {} bytes, at most {NAME_BYTES_MAX} are allowed", value.len());
        return Err(IssueError::invalid(what, problem));
    }
    if value.contains('\0') {
        return Err(IssueError::invalid(what, "it contains a NUL character"));
    }
    Ok(())
}

/// A name: text that is not empty.
pub(crate) fn name(what: &str, value: &str) -> Result<()> {
    if value.is_empty() {
        return Err(IssueError::invalid(what, "it is empty"));
    }
    text(what, value)
}

/// At most `max` of something.
pub(crate) fn count(what: &str, count: usize, max: usize) -> Result<()> {
    if count > max {
        return Err(IssueError::invalid(
            what,
            format!("there are {count}, at most {max} are allowed"),
        ));
    }
    Ok(())
}

/// A batch of the ordinary size.
pub(crate) fn batch(what: &str, length: usize) -> Result<()> {
    count(what, length, BATCH_MAX)
}

/// The size of a page; at least one row.
pub(crate) fn page(limit: usize) -> Result<()> {
    if limit == 0 {
        return Err(IssueError::invalid("limit", "it is zero"));
    }
    count("limit", limit, PAGE_MAX)
}

/// A time that lies ahead, not too far.
pub(crate) fn delay(what: &str, value: Duration) -> Result<()> {
    if value > DELAY_MAX {
        return Err(IssueError::invalid(what, "it is longer than a year"));
    }
    Ok(())
}

/// The life of a claim, or of a row in hand.
pub(crate) fn ttl(what: &str, value: Duration) -> Result<()> {
    if !(CLAIM_TTL_MIN..=CLAIM_TTL_MAX).contains(&value) {
        let problem = format!("it must be from {CLAIM_TTL_MIN:?} to {CLAIM_TTL_MAX:?}");
        return Err(IssueError::invalid(what, problem));
    }
    Ok(())
}

/// An error text as it is kept: cut to its maximum, NUL replaced. An error about an error would help nobody.
pub(crate) fn error_text(error: &str) -> String {
    let mut end = error.len().min(ERROR_BYTES_MAX);
    while !error.is_char_boundary(end) {
        end -= 1;
    }
    error[..end].replace('\0', "\u{fffd}")
}

impl NewEvent {
    /// Refuses what no store can keep: empty or overlong names, NUL in a name, and a payload that is not JSON, too large
    /// or too deep.
    pub fn check(&self) -> Result<()> {
        self.storable().map(drop)
    }

    /// The same; returns the payload as a store holds it.
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

impl Quiet {
    /// Refuses what makes no sense.
    pub fn check(&self) -> Result<()> {
        delay("quiet", self.quiet)?;
        delay("max_wait", self.max_wait)
    }
}

impl ClaimOptions {
    /// Refuses what makes no sense.
    pub fn check(&self) -> Result<()> {
        name("worker", &self.worker)?;
        ttl("ttl", self.ttl)?;
        if self.events_max == 0 || self.crashes_max == 0 {
            return Err(IssueError::invalid("events_max or crashes_max", "it is zero"));
        }
        count("events_max", self.events_max, RUN_EVENTS_MAX)
    }
}

impl SweepOptions {
    /// Refuses what makes no sense.
    pub fn check(&self) -> Result<()> {
        if self.limit == 0 || self.crashes_max == 0 {
            return Err(IssueError::invalid("limit or crashes_max", "it is zero"));
        }
        delay("nudge_overdue", self.nudge_overdue)?;
        delay("keep", self.keep)?;
        count("limit", self.limit, SWEEP_MAX)
    }
}

impl Completion {
    /// Refuses what no store can keep: too many or too large replies, and what is not JSON.
    pub fn check(&self) -> Result<()> {
        count("event_log_ids", self.event_log_ids.len(), RUN_EVENTS_MAX)?;
        count("the outbox of a run", self.outbox.len(), OUTBOX_PER_RUN_MAX)?;
        if let Some(fields) = &self.fields
            && json::check("fields", fields)? != Shape::Object
        {
            return Err(IssueError::invalid("fields", "it is not a JSON object"));
        }
        if let Some(discussions) = &self.discussions {
            json::check("discussions", discussions)?;
        }
        self.outbox.iter().try_for_each(outbox_row)?;
        if self.bytes() > BATCH_BYTES_MAX {
            let problem = format!(
                "it has {} bytes in all, at most {BATCH_BYTES_MAX} are allowed",
                self.bytes()
            );
            return Err(IssueError::invalid("a completion", problem));
        }
        Ok(())
    }

    /// How much it adds to [`BATCH_BYTES_MAX`].
    pub fn bytes(&self) -> usize {
        let texts = [&self.fields, &self.discussions];
        let fields: usize = texts.iter().map(|text| text.as_ref().map_or(0, String::len)).sum();
        fields + self.outbox.iter().map(|row| row.payload.len()).sum::<usize>()
    }
}

/// A reply or event.
fn outbox_row(row: &NewOutbox) -> Result<()> {
    text("the target of an outbox row", &row.target)?;
    json::check("the payload of an outbox row", &row.payload).map(|_| ())
}

/// A whole call of `write_outbox`.
pub(crate) fn keyed_outbox(rows: &[KeyedOutbox]) -> Result<()> {
    count("the rows", rows.len(), OUTBOX_PER_RUN_MAX)?;
    let mut keys = HashSet::new();
    for KeyedOutbox { key, row } in rows {
        name("the key of an outbox row", key)?;
        if !keys.insert(key) {
            let problem = format!("`{key}` is there twice");
            return Err(IssueError::invalid("the key of an outbox row", problem));
        }
        outbox_row(row)?;
    }
    batch_bytes(rows.iter().map(|one| one.row.payload.len()).sum())
}

/// A whole call of `complete`.
pub(crate) fn completions(completions: &[Completion]) -> Result<()> {
    batch("completions", completions.len())?;
    completions.iter().try_for_each(Completion::check)?;
    batch_bytes(completions.iter().map(Completion::bytes).sum())
}

/// All payloads of one call together.
pub(crate) fn batch_bytes(bytes: usize) -> Result<()> {
    if bytes > BATCH_BYTES_MAX {
        let problem = format!("it has {bytes} bytes in all, at most {BATCH_BYTES_MAX} are allowed");
        return Err(IssueError::invalid("the batch", problem));
    }
    Ok(())
}

/// A whole call of `fail`.
pub(crate) fn failures(failures: &[Failure], attempts_max: u32) -> Result<()> {
    batch("failures", failures.len())?;
    if attempts_max == 0 {
        return Err(IssueError::invalid("attempts_max", "it is zero"));
    }
    failures.iter().try_for_each(|failure| match failure.then {
        AfterFailure::Retry { after } | AfterFailure::PutOff { after } => delay("after", after),
        AfterFailure::Quarantine => Ok(()),
    })
}

/// A call of `take_outbox_from`.
pub(crate) fn outbox_take(take: &OutboxTake) -> Result<()> {
    name("worker", &take.worker)?;
    count("limit", take.limit, OUTBOX_TAKE_MAX)?;
    ttl("ttl", take.ttl)?;
    count("targets", take.targets.len(), OUTBOX_TARGETS_MAX)
}

/// A whole call of `settle_outbox`.
pub(crate) fn settlements(settlements: &[OutboxSettlement]) -> Result<()> {
    batch("settlements", settlements.len())?;
    settlements.iter().try_for_each(|settlement| match &settlement.delivery {
        Delivery::Retry { after, .. } | Delivery::Away { after, .. } => delay("after", *after),
        Delivery::Delivered | Delivery::Dead { .. } | Delivery::Release => Ok(()),
    })
}
