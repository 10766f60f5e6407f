//! Claims on SQLite: claim, heartbeat, complete, fail and release.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use headwater_stream::clock::Timestamp;
use serde_json::{Map, Value, json};
use sqlx::sqlite::SqliteConnection;
use sqlx::{Error, Row};

use super::state_batch::StateBatch;
use super::statements::{json_rows, to_column};
use super::{WriteTx, outbox};
use crate::claim::{
    Claim, ClaimOptions, ClaimRelease, ClaimReleased, ClaimRenewal, ClaimedIssue,
    CompletionOutcome, FailureOutcome, RunCompletion, RunFailure,
};
use crate::error::Result;
use crate::issue::{ClaimEpoch, EventLog, EventLogId, Issue, IssueId, ProcessingStatus};
use crate::limits::{FIELDS_BYTES_MAX, RUN_EVENTS_MAX, claim_bytes_max};
use crate::outbox::types::idempotency_key;
use crate::row_decoding::{
    count, event_log_columns, issue_columns, read_event_log, read_issue, to_i64,
};
use crate::sql::{SqlRow, sqlite_rows};
use crate::state::{IssueState, Transition, TransitionEffect};
use crate::validate::error_text;

pub(super) async fn claim(
    tx: &mut WriteTx,
    issues: &[IssueId],
    options: &ClaimOptions,
) -> Result<Vec<Claim>, Error> {
    let now = tx.now;
    let mut states = StateBatch::load(&mut tx.transaction, issues.iter().copied(), now).await?;
    let transition = Transition::Claim {
        owner: options.worker.clone(),
        ttl: options.ttl,
        crashes_max: options.crashes_max,
    };
    let mut claims = Vec::with_capacity(issues.len());
    let mut won = HashMap::new();
    for (index, issue) in issues.iter().enumerate() {
        let effect = states.apply(*issue, &transition);
        if let Some(TransitionEffect::Won(_)) = effect {
            won.insert(*issue, index);
        }
        claims.push(match (effect, states.get(*issue)) {
            (Some(effect), Some(state)) => not_won(&effect, state, now),
            _ => Claim::Missing,
        });
    }
    states.save(&mut tx.transaction).await?;

    let mut events = load_events(
        &mut tx.transaction,
        won.keys(),
        options.events_max,
        claim_bytes_max(issues.len()),
    )
    .await?;
    for (issue, completed_event_log_id) in load_issues(&mut tx.transaction, won.keys()).await? {
        let claimed = ClaimedIssue {
            completed_event_log_id,
            epoch: issue.claim_epoch,
            expires_at: issue.claim_expires_at.unwrap_or_default(),
            events: events.remove(&issue.id).unwrap_or_default(),
            issue,
        };
        if let Some(index) = won.get(&claimed.issue.id) {
            claims[*index] = Claim::Won(Box::new(claimed));
        }
    }
    Ok(claims)
}

/// Result of a claim that was not acquired. Results of acquired claims are replaced after their event logs are loaded.
fn not_won(effect: &TransitionEffect, state: &IssueState, now: Timestamp) -> Claim {
    match (effect, state.quarantined_at, &state.claim_owner, state.claim_expires_at) {
        (TransitionEffect::NotYet(not_before), ..) => {
            Claim::NotYet { not_before: *not_before, wait: not_before.since(now) }
        }
        (effect, Some(since), ..) => {
            Claim::Quarantined { since, just_now: *effect == TransitionEffect::Quarantined }
        }
        (_, _, Some(owner), Some(expires_at)) => Claim::Taken { owner: owner.clone(), expires_at },
        _ => Claim::Idle,
    }
}

/// Loads issues, each with its newest event log at its last completion.
async fn load_issues(
    connection: &mut SqliteConnection,
    issues: impl Iterator<Item = &IssueId>,
) -> Result<Vec<(Issue, Option<EventLogId>)>, Error> {
    let select = concat!(
        "SELECT ",
        issue_columns!(),
        ", i.completed_event_log_id FROM issues i JOIN integrations g ON g.id = i.integration_id
          WHERE i.id IN (SELECT value FROM json_each($1))"
    );
    let issues = json_rows(issues.map(|issue| issue.0.into()).collect());
    let rows = sqlite_rows(connection, select, &[(&issues).into()]).await?;
    let read = |row: &SqlRow| Ok((read_issue(row)?, row.get::<Option<i64>>(23)?.map(EventLogId)));
    rows.iter().map(read).collect()
}

/// The oldest unprocessed event logs of each issue, within the limits of a run.
async fn load_events(
    connection: &mut SqliteConnection,
    issues: impl Iterator<Item = &IssueId>,
    events_max: usize,
    bytes_max: usize,
) -> Result<HashMap<IssueId, Vec<EventLog>>, Error> {
    let issues: Vec<_> = issues.map(|issue| issue.0.into()).collect();
    let sizes = sqlx::query(
        "SELECT e.issue_id, e.id, e.payload_bytes FROM json_each(?1) AS asked
         CROSS JOIN event_logs AS e ON e.id IN (
             SELECT x.id FROM event_logs AS x
             WHERE x.issue_id = asked.value AND x.processed_at IS NULL ORDER BY x.id LIMIT ?2)
         ORDER BY e.issue_id, e.id",
    )
    .bind(json_rows(issues))
    .bind(to_i64(events_max))
    .fetch_all(&mut *connection)
    .await?;
    // Sizes first, payloads second, because a run is also limited in bytes.
    let mut bytes: HashMap<i64, usize> = HashMap::new();
    let mut wanted = Vec::with_capacity(sizes.len());
    for row in &sizes {
        let (issue, id): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        let before = bytes.get(&issue).copied().unwrap_or(0);
        let with_this = before + count::<usize>(row.try_get(2)?)?;
        bytes.insert(issue, with_this);
        if before == 0 || with_this <= bytes_max {
            wanted.push(id.into());
        }
    }
    let select = concat!(
        "SELECT ",
        event_log_columns!(),
        " FROM event_logs e WHERE e.id IN (SELECT value FROM json_each($1)) ORDER BY e.id"
    );
    let rows = sqlite_rows(connection, select, &[(&json_rows(wanted)).into()]).await?;
    let mut events: HashMap<IssueId, Vec<EventLog>> = HashMap::new();
    for row in &rows {
        let event = read_event_log(row)?;
        events.entry(event.issue_id).or_default().push(event);
    }
    Ok(events)
}

pub(super) async fn heartbeat(
    tx: &mut WriteTx,
    claims: &[(IssueId, ClaimEpoch)],
    ttl: Duration,
) -> Result<Vec<ClaimRenewal>, Error> {
    let issues = claims.iter().map(|(issue, _)| *issue);
    let mut states = StateBatch::load(&mut tx.transaction, issues, tx.now).await?;
    for (issue, epoch) in claims {
        states.apply(*issue, &Transition::Heartbeat { epoch: *epoch, ttl });
    }
    let renewals = read_renewals(&states, claims);
    states.save(&mut tx.transaction).await?;
    Ok(renewals)
}

pub(super) async fn check(
    connection: &mut SqliteConnection,
    claims: &[(IssueId, ClaimEpoch)],
) -> Result<Vec<ClaimRenewal>, Error> {
    let issues = claims.iter().map(|(issue, _)| *issue);
    let states = StateBatch::load(connection, issues, Timestamp::default()).await?;
    Ok(read_renewals(&states, claims))
}

/// The claims that are held, each with its expiry time and pending events. The others are lost.
fn read_renewals(states: &StateBatch, claims: &[(IssueId, ClaimEpoch)]) -> Vec<ClaimRenewal> {
    let renewal = |(issue, epoch): &(IssueId, ClaimEpoch)| match states.get(*issue) {
        Some(state) if states.is_held(*issue, *epoch) => ClaimRenewal::Kept {
            expires_at: state.claim_expires_at.unwrap_or_default(),
            pending_events: state.pending_events,
        },
        _ => ClaimRenewal::Lost,
    };
    claims.iter().map(renewal).collect()
}

pub(super) async fn complete(
    tx: &mut WriteTx,
    identity: &str,
    completions: &[RunCompletion],
) -> Result<Vec<CompletionOutcome>, Error> {
    let issues = completions.iter().map(|completion| completion.issue_id);
    let mut states = StateBatch::load(&mut tx.transaction, issues, tx.now).await?;
    // If an issue is named twice, only the first completion can hold the claim.
    let mut named = HashSet::new();
    let held: Vec<&RunCompletion> = completions
        .iter()
        .filter(|one| states.is_held(one.issue_id, one.epoch) && named.insert(one.issue_id))
        .collect();
    let processed = mark_processed(tx, &held).await?;
    change_fields(tx, &held).await?;
    write_outbox(tx, identity, &held).await?;

    let mut completed = Vec::with_capacity(completions.len());
    for RunCompletion { issue_id, epoch, .. } in completions {
        let processed = processed.get(issue_id).copied().unwrap_or(0);
        let transition = Transition::Complete { epoch: *epoch, processed };
        let effect = states.apply(*issue_id, &transition).unwrap_or(TransitionEffect::Fenced);
        let state = states.get(*issue_id);
        let queued = state.is_some_and(|state| state.status == ProcessingStatus::Queued);
        completed.push(match effect {
            TransitionEffect::Fenced => CompletionOutcome::Fenced,
            effect => CompletionOutcome::Committed {
                requeued: queued,
                not_before: state.filter(|_| queued).and_then(|state| state.not_before),
                repeated: effect == TransitionEffect::Repeated,
            },
        });
    }
    states.save(&mut tx.transaction).await?;
    Ok(completed)
}

/// Marks the event logs of these runs as processed, and returns their number per issue.
async fn mark_processed(
    tx: &mut WriteTx,
    held: &[&RunCompletion],
) -> Result<BTreeMap<IssueId, u64>, Error> {
    let rows = held.iter().flat_map(|completion| {
        completion.event_log_ids.iter().map(|log| json!([log.0, completion.issue_id.0]))
    });
    let rows = sqlx::query(
        "UPDATE event_logs SET processed_at = ?2, processing_error = NULL
         FROM (SELECT DISTINCT value ->> 0 AS id, value ->> 1 AS issue_id FROM json_each(?1)) AS done
         WHERE event_logs.id = done.id AND event_logs.issue_id = done.issue_id
             AND event_logs.processed_at IS NULL
         RETURNING event_logs.issue_id",
    )
    .bind(json_rows(rows.collect()))
    .bind(to_column(tx.now))
    .fetch_all(&mut *tx.transaction)
    .await?;
    let mut processed = BTreeMap::new();
    for row in &rows {
        *processed.entry(IssueId(row.try_get(0)?)).or_default() += 1;
    }
    Ok(processed)
}

async fn change_fields(tx: &mut WriteTx, held: &[&RunCompletion]) -> Result<(), Error> {
    for completion in held {
        if let Some(fields) = &completion.fields {
            let row = sqlx::query("SELECT fields FROM issues WHERE id = ?1")
                .bind(completion.issue_id.0)
                .fetch_one(&mut *tx.transaction)
                .await?;
            let merged = merge(&row.try_get::<String, _>(0)?, fields)?;
            if merged.len() > FIELDS_BYTES_MAX {
                let (issue, bytes) = (completion.issue_id, merged.len());
                return Err(Error::InvalidArgument(format!(
                    "fields of issue {issue} would have {bytes} bytes; the limit is {FIELDS_BYTES_MAX}"
                )));
            }
            sqlx::query("UPDATE issues SET fields = ?2 WHERE id = ?1")
                .bind(completion.issue_id.0)
                .bind(merged)
                .execute(&mut *tx.transaction)
                .await?;
        }
        if let Some(discussions) = &completion.discussions {
            sqlx::query("UPDATE issues SET discussions = ?2 WHERE id = ?1")
                .bind(completion.issue_id.0)
                .bind(discussions.as_str())
                .execute(&mut *tx.transaction)
                .await?;
        }
    }
    Ok(())
}

/// Merges the members of `changes` into `fields`; null removes a member.
fn merge(fields: &str, changes: &str) -> Result<String, Error> {
    let parse = |text: &str| {
        serde_json::from_str::<Map<String, Value>>(text)
            .map_err(|error| Error::Decode(error.into()))
    };
    let mut fields = parse(fields)?;
    for (name, value) in parse(changes)? {
        match value {
            Value::Null => fields.remove(&name),
            value => fields.insert(name, value),
        };
    }
    Ok(Value::Object(fields).to_string())
}

async fn write_outbox(
    tx: &mut WriteTx,
    identity: &str,
    held: &[&RunCompletion],
) -> Result<(), Error> {
    for completion in held {
        for (index, row) in completion.outbox.iter().enumerate() {
            let key = idempotency_key(identity, completion.issue_id, completion.epoch, index);
            let now = tx.now;
            outbox::insert(&mut tx.transaction, completion.issue_id, row, &key, now).await?;
        }
    }
    Ok(())
}

pub(super) async fn fail(
    tx: &mut WriteTx,
    failures: &[RunFailure],
    attempts_max: u32,
) -> Result<Vec<FailureOutcome>, Error> {
    let issues = failures.iter().map(|failure| failure.issue_id);
    let mut states = StateBatch::load(&mut tx.transaction, issues, tx.now).await?;
    let mut failed = Vec::with_capacity(failures.len());
    for RunFailure { issue_id, epoch, error, then } in failures {
        let error = error_text(error);
        let transition =
            Transition::Fail { epoch: *epoch, error: error.clone(), then: *then, attempts_max };
        let effect = states.apply(*issue_id, &transition);
        failed.push(match (effect, states.get(*issue_id)) {
            (Some(TransitionEffect::Queued | TransitionEffect::Finished), Some(state)) => {
                FailureOutcome::Requeued {
                    attempts: state.attempts,
                    not_before: state.not_before.unwrap_or(tx.now),
                }
            }
            (Some(TransitionEffect::Quarantined), Some(state)) => {
                FailureOutcome::Quarantined { attempts: state.attempts }
            }
            _ => FailureOutcome::Fenced,
        });
        if failed.last() != Some(&FailureOutcome::Fenced) {
            store_error(tx, *issue_id, &error).await?;
        }
    }
    states.save(&mut tx.transaction).await?;
    Ok(failed)
}

/// Stores the error on the oldest unprocessed event logs, up to the maximum of a run.
async fn store_error(tx: &mut WriteTx, issue_id: IssueId, error: &str) -> Result<(), Error> {
    sqlx::query(
        "UPDATE event_logs SET processing_error = ?2 WHERE id IN (
             SELECT id FROM event_logs WHERE issue_id = ?1 AND processed_at IS NULL
             ORDER BY id LIMIT ?3)",
    )
    .bind(issue_id.0)
    .bind(error)
    .bind(to_i64(RUN_EVENTS_MAX))
    .execute(&mut *tx.transaction)
    .await?;
    Ok(())
}

pub(super) async fn release_claims(
    tx: &mut WriteTx,
    claims: &[ClaimRelease],
) -> Result<Vec<ClaimReleased>, Error> {
    let issues = claims.iter().map(|claim| claim.issue_id);
    let mut states = StateBatch::load(&mut tx.transaction, issues, tx.now).await?;
    let mut given = Vec::with_capacity(claims.len());
    for ClaimRelease { issue_id, epoch, reason } in claims {
        let effect =
            states.apply(*issue_id, &Transition::ReleaseClaim { epoch: *epoch, reason: *reason });
        given.push(match (effect, states.get(*issue_id)) {
            (Some(TransitionEffect::Queued | TransitionEffect::Finished), Some(state)) => {
                ClaimReleased::Requeued { not_before: state.not_before }
            }
            _ => ClaimReleased::Fenced,
        });
    }
    states.save(&mut tx.transaction).await?;
    Ok(given)
}
