//! The states of a batch of issues: loaded together, transitioned one by one, saved together.
//!
//! Upstream: every transition of the SQLite store. Downstream: `state::apply`. Guarantees: transitions of an issue that
//! is named twice are applied in the order of the batch; one statement loads and one saves any number of issues.

use std::collections::{BTreeMap, BTreeSet};

use headwater_stream::clock::Timestamp;
use serde_json::{Value, json};
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{Error, Row};

use super::statements::{json_rows, optional_column, to_column};
use super::{dead_letters, runs};
use crate::issue::{ClaimEpoch, IssueId, ProcessingStatus};
use crate::row_decoding::{count, known_value, optional_timestamp};
use crate::state::{EndedRun, IssueState, Transition, TransitionEffect, apply};

/// The states of some issues within one transaction.
#[derive(Debug)]
pub(super) struct StateBatch {
    now: Timestamp,
    states: BTreeMap<IssueId, IssueState>,
    changed: BTreeSet<IssueId>,
    /// Issues quarantined, and issues released, by a transition.
    quarantined: BTreeSet<IssueId>,
    released: BTreeSet<IssueId>,
    /// Runs that a transition ended, and runs that had expired before their result came.
    ended: Vec<(IssueId, EndedRun)>,
    fenced: Vec<(IssueId, ClaimEpoch)>,
}

impl StateBatch {
    /// Loads those of these issues that exist.
    pub(super) async fn load(
        connection: &mut SqliteConnection,
        issues: impl IntoIterator<Item = IssueId>,
        now: Timestamp,
    ) -> Result<Self, Error> {
        let issues: BTreeSet<i64> = issues.into_iter().map(|issue| issue.0).collect();
        let rows = sqlx::query(
            "SELECT id, processing_status, pending_events, claim_epoch, completed_epoch, claim_owner,
                 claim_expires_at, not_before, first_pending_at, attempts, crashes, superseded,
                 quarantined_at, nudged_at, last_error
             FROM issues WHERE id IN (SELECT value FROM json_each(?1))",
        )
        .bind(json_rows(issues.into_iter().map(Value::from).collect()))
        .fetch_all(connection)
        .await?;
        let states = rows.iter().map(read).collect::<Result<_, Error>>()?;
        let (changed, quarantined, released) = Default::default();
        let (ended, fenced) = Default::default();
        Ok(Self { now, states, changed, quarantined, released, ended, fenced })
    }

    /// The current state; `None` if the issue does not exist.
    pub(super) fn get(&self, issue: IssueId) -> Option<&IssueState> {
        self.states.get(&issue)
    }

    /// Applies a transition; `None` if the issue does not exist.
    pub(super) fn apply(
        &mut self,
        issue: IssueId,
        transition: &Transition,
    ) -> Option<TransitionEffect> {
        let before = self.states.get_mut(&issue)?;
        let (after, effect) = apply(before, transition, self.now);
        self.ended.extend(EndedRun::of(before, &after, transition).map(|run| (issue, run)));
        if let (Transition::Complete { epoch, .. }, TransitionEffect::Fenced) =
            (transition, &effect)
        {
            self.fenced.push((issue, *epoch));
        }
        if effect == TransitionEffect::Quarantined {
            self.quarantined.insert(issue);
        }
        if before.quarantined_at.is_some() && after.quarantined_at.is_none() {
            self.released.insert(issue);
        }
        if after != *before {
            *before = after;
            self.changed.insert(issue);
        }
        Some(effect)
    }

    /// Whether the issue is claimed with this epoch.
    pub(super) fn is_held(&self, issue: IssueId, epoch: ClaimEpoch) -> bool {
        let held = |state: &IssueState| {
            state.status == ProcessingStatus::Processing && state.claim_epoch == epoch
        };
        self.get(issue).is_some_and(held)
    }

    /// Saves changed issues, their ended runs and their dead letters.
    pub(super) async fn save(self, connection: &mut SqliteConnection) -> Result<(), Error> {
        // Before the issues, which have the time of the claim until the next one.
        runs::write(connection, &self.ended, self.now).await?;
        runs::mark_fenced(connection, &self.fenced).await?;
        self.save_issues(connection).await?;
        dead_letters::write(connection, &self.quarantined).await?;
        dead_letters::release(connection, &self.released, self.now).await
    }

    async fn save_issues(&self, connection: &mut SqliteConnection) -> Result<(), Error> {
        if self.changed.is_empty() {
            return Ok(());
        }
        let rows = self.changed.iter().map(|id| write(*id, &self.states[id])).collect();
        sqlx::query(
            "UPDATE issues SET
                 processing_status = new.row ->> 1, pending_events = new.row ->> 2,
                 processing_started_at =
                     iif(new.row ->> 3 > claim_epoch, ?2, processing_started_at),
                 last_processed_at =
                     iif(new.row ->> 4 > completed_epoch, ?2, last_processed_at),
                 completed_event_log_id = iif(new.row ->> 4 > completed_epoch,
                     (SELECT max(e.id) FROM event_logs AS e WHERE e.issue_id = issues.id),
                     completed_event_log_id),
                 claim_epoch = new.row ->> 3, completed_epoch = new.row ->> 4,
                 claim_owner = new.row ->> 5, claim_expires_at = new.row ->> 6,
                 not_before = new.row ->> 7, first_pending_at = new.row ->> 8,
                 attempts = new.row ->> 9, crashes = new.row ->> 10, superseded = new.row ->> 11,
                 quarantined_at = new.row ->> 12, nudged_at = new.row ->> 13,
                 last_error = new.row ->> 14, updated_at = ?2
             FROM (SELECT value AS row FROM json_each(?1)) AS new
             WHERE issues.id = new.row ->> 0",
        )
        .bind(json_rows(rows))
        .bind(to_column(self.now))
        .execute(connection)
        .await?;
        Ok(())
    }
}

fn read(row: &SqliteRow) -> Result<(IssueId, IssueState), Error> {
    let status: String = row.try_get(1)?;
    let state = IssueState {
        status: known_value(&status, ProcessingStatus::parse(&status))?,
        pending_events: count(row.try_get(2)?)?,
        claim_epoch: ClaimEpoch(row.try_get(3)?),
        completed_epoch: ClaimEpoch(row.try_get(4)?),
        claim_owner: row.try_get(5)?,
        claim_expires_at: optional_timestamp(row.try_get(6)?),
        not_before: optional_timestamp(row.try_get(7)?),
        first_pending_at: optional_timestamp(row.try_get(8)?),
        attempts: count(row.try_get(9)?)?,
        crashes: count(row.try_get(10)?)?,
        superseded: count(row.try_get(11)?)?,
        quarantined_at: optional_timestamp(row.try_get(12)?),
        nudged_at: optional_timestamp(row.try_get(13)?),
        last_error: row.try_get(14)?,
    };
    Ok((IssueId(row.try_get(0)?), state))
}

fn write(id: IssueId, state: &IssueState) -> Value {
    json!([
        id.0,
        state.status.as_str(),
        state.pending_events,
        state.claim_epoch.0,
        state.completed_epoch.0,
        state.claim_owner,
        optional_column(state.claim_expires_at),
        optional_column(state.not_before),
        optional_column(state.first_pending_at),
        state.attempts,
        state.crashes,
        state.superseded,
        optional_column(state.quarantined_at),
        optional_column(state.nudged_at),
        state.last_error,
    ])
}
