//! Claims on PostgreSQL: claim, heartbeat, complete, fail and release, each one call of a SQL function.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Error, Row};

use crate::claim::{
    AfterFailure, Claim, ClaimOptions, ClaimRelease, ClaimReleased, ClaimRenewal, ClaimedIssue,
    CompletionOutcome, FailureOutcome, ReleaseReason, RunCompletion, RunFailure,
};
use crate::error::Result;
use crate::issue::{ClaimEpoch, EventLog, EventLogId, IssueId};
use crate::limits::{FIELDS_BYTES_MAX, RUN_EVENTS_MAX, claim_bytes_max};
use crate::outbox::types::{NewOutboxRow, idempotency_key};
use crate::row_decoding::{count, ms, optional_timestamp, read_issue, timestamp, to_i64, trace};
use crate::sql::SqlRow;
use crate::validate::error_text;

pub(super) async fn claim(
    connection: &mut PgConnection,
    issues: &[IssueId],
    options: &ClaimOptions,
) -> Result<Vec<Claim>, Error> {
    let rows = sqlx::query("SELECT * FROM headwater_claim($1, $2, $3, $4, $5, $6)")
        .bind(
            distinct(issues, |issue| (*issue, ClaimEpoch::default()))
                .iter()
                .map(|issue| issue.0)
                .collect::<Vec<_>>(),
        )
        .bind(options.worker.as_str())
        .bind(ms(options.ttl))
        .bind(to_i64(options.events_max))
        .bind(to_i64(claim_bytes_max(issues.len())))
        .bind(i64::from(options.crashes_max))
        .fetch_all(connection)
        .await?;
    let mut found = HashMap::new();
    for row in rows {
        let (id, claim) = read_claim(row)?;
        found.insert(id, claim);
    }
    // If an issue is named twice, the second result is that of an attempt after the first.
    let result = |issue: &IssueId| match found.get_mut(issue) {
        None => Claim::Missing,
        Some(claim) => {
            let second = second_attempt(claim);
            std::mem::replace(claim, second)
        }
    };
    Ok(issues.iter().map(result).collect())
}

/// Result of a second attempt in the same call.
fn second_attempt(first: &Claim) -> Claim {
    match first {
        Claim::Won(claimed) => Claim::Taken {
            owner: claimed.issue.claim_owner.clone().unwrap_or_default(),
            expires_at: claimed.expires_at,
        },
        Claim::Quarantined { since, .. } => Claim::Quarantined { since: *since, just_now: false },
        other => other.clone(),
    }
}

fn read_claim(row: PgRow) -> Result<(IssueId, Claim), Error> {
    let (is_won, just_now): (bool, bool) = (row.try_get(23)?, row.try_get(24)?);
    let now = timestamp(row.try_get(25)?);
    let events = if is_won { read_events(&row)? } else { vec![] };
    let completed = row.try_get::<Option<i64>, _>(34)?.map(EventLogId);
    let issue = read_issue(&SqlRow::Postgres(row))?;
    let id = issue.id;
    if is_won {
        let claimed = ClaimedIssue {
            epoch: issue.claim_epoch,
            completed_event_log_id: completed,
            expires_at: issue.claim_expires_at.unwrap_or_default(),
            events,
            issue,
        };
        return Ok((id, Claim::Won(Box::new(claimed))));
    }
    let claim = match (issue.quarantined_at, issue.claim_owner, issue.not_before) {
        (Some(since), ..) => Claim::Quarantined { since, just_now },
        (None, Some(owner), _) => {
            Claim::Taken { owner, expires_at: issue.claim_expires_at.unwrap_or_default() }
        }
        (None, None, Some(not_before)) => Claim::NotYet { not_before, wait: not_before.since(now) },
        (None, None, None) => Claim::Idle,
    };
    Ok((id, claim))
}

/// The event logs of an issue, returned as one array per column.
fn read_events(row: &PgRow) -> Result<Vec<EventLog>, Error> {
    let issue_id = IssueId(row.try_get(0)?);
    let Some(ids) = row.try_get::<Option<Vec<i64>>, _>(26)? else { return Ok(vec![]) };
    let mut sources = row.try_get::<Vec<String>, _>(27)?.into_iter();
    let mut event_types = row.try_get::<Vec<String>, _>(28)?.into_iter();
    let mut keys = row.try_get::<Vec<String>, _>(29)?.into_iter();
    let mut payloads = row.try_get::<Vec<String>, _>(30)?.into_iter();
    let mut created = row.try_get::<Vec<i64>, _>(31)?.into_iter();
    let mut errors = row.try_get::<Vec<Option<String>>, _>(32)?.into_iter();
    let mut traces = row.try_get::<Vec<Option<String>>, _>(33)?.into_iter();
    let event = |id| EventLog {
        id: EventLogId(id),
        issue_id,
        source: sources.next().unwrap_or_default(),
        event_type: event_types.next().unwrap_or_default(),
        dedup_key: keys.next().unwrap_or_default(),
        payload: payloads.next().unwrap_or_default(),
        created_at: timestamp(created.next().unwrap_or_default()),
        processed_at: None,
        processing_error: errors.next().unwrap_or_default(),
        trace: trace(traces.next().unwrap_or_default()),
    };
    Ok(ids.into_iter().map(event).collect())
}

pub(super) async fn heartbeat(
    connection: &mut PgConnection,
    claims: &[(IssueId, ClaimEpoch)],
    ttl: Duration,
) -> Result<Vec<ClaimRenewal>, Error> {
    let rows = sqlx::query("SELECT * FROM headwater_renew_claims($1, $2, $3)")
        .bind(claims.iter().map(|(issue, _)| issue.0).collect::<Vec<_>>())
        .bind(claims.iter().map(|(_, epoch)| epoch.0).collect::<Vec<_>>())
        .bind(ms(ttl))
        .fetch_all(connection)
        .await?;
    read_renewals(&rows, claims)
}

pub(super) async fn check(
    connection: &mut PgConnection,
    claims: &[(IssueId, ClaimEpoch)],
) -> Result<Vec<ClaimRenewal>, Error> {
    let rows = sqlx::query(
        "SELECT id, claim_epoch, headwater_ms(claim_expires_at), pending_events
         FROM issues WHERE id = ANY ($1) AND processing_status = 'processing'",
    )
    .bind(claims.iter().map(|(issue, _)| issue.0).collect::<Vec<_>>())
    .fetch_all(connection)
    .await?;
    read_renewals(&rows, claims)
}

/// The claims that are held, each with its expiry time and pending events. The others are lost.
fn read_renewals(
    rows: &[PgRow],
    claims: &[(IssueId, ClaimEpoch)],
) -> Result<Vec<ClaimRenewal>, Error> {
    let mut kept = HashMap::new();
    for row in rows {
        let claim = (IssueId(row.try_get(0)?), ClaimEpoch(row.try_get(1)?));
        let (expires_at, pending_events) = (timestamp(row.try_get(2)?), count(row.try_get(3)?)?);
        kept.insert(claim, ClaimRenewal::Kept { expires_at, pending_events });
    }
    Ok(claims.iter().map(|claim| kept.get(claim).copied().unwrap_or(ClaimRenewal::Lost)).collect())
}

pub(super) async fn complete(
    connection: &mut PgConnection,
    identity: &str,
    completions: &[RunCompletion],
) -> Result<Vec<CompletionOutcome>, Error> {
    // A run that is named twice is passed once; the second result is `repeated`.
    let mut indices = HashMap::new();
    let mut runs: Vec<&RunCompletion> = Vec::with_capacity(completions.len());
    for completion in completions {
        indices.entry((completion.issue_id, completion.epoch)).or_insert_with(|| {
            runs.push(completion);
            runs.len()
        });
    }
    let mut logs: Vec<(i64, i64)> = Vec::new();
    let mut outbox: Vec<(i64, String, &NewOutboxRow)> = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        let run_number = to_i64(index + 1);
        logs.extend(run.event_log_ids.iter().map(|log| (run_number, log.0)));
        let key = |number| idempotency_key(identity, run.issue_id, run.epoch, number);
        outbox.extend(run.outbox.iter().enumerate().map(|(n, row)| (run_number, key(n), row)));
    }
    let results = sqlx::query(
        "SELECT * FROM headwater_complete($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
    )
    .bind(runs.iter().map(|run| run.issue_id.0).collect::<Vec<_>>())
    .bind(runs.iter().map(|run| run.epoch.0).collect::<Vec<_>>())
    .bind(runs.iter().map(|run| run.fields.clone()).collect::<Vec<_>>())
    .bind(runs.iter().map(|run| run.discussions.clone()).collect::<Vec<_>>())
    .bind(logs.iter().map(|(run, _)| *run).collect::<Vec<_>>())
    .bind(logs.iter().map(|(_, log)| *log).collect::<Vec<_>>())
    .bind(outbox.iter().map(|(run, ..)| *run).collect::<Vec<_>>())
    .bind(outbox.iter().map(|(.., row)| row.kind.as_str()).collect::<Vec<_>>())
    .bind(outbox.iter().map(|(.., row)| row.target.as_str()).collect::<Vec<_>>())
    .bind(outbox.iter().map(|(_, key, _)| key.as_str()).collect::<Vec<_>>())
    .bind(outbox.iter().map(|(.., row)| row.payload.as_str()).collect::<Vec<_>>())
    .bind(to_i64(FIELDS_BYTES_MAX))
    .fetch_all(connection)
    .await?;
    let mut found = HashMap::new();
    for result in &results {
        let requeued = result.try_get::<&str, _>(2)? == "queued";
        let not_before = optional_timestamp(result.try_get(3)?).filter(|_| requeued);
        let completed =
            CompletionOutcome::Committed { requeued, not_before, repeated: result.try_get(1)? };
        found.insert(count::<usize>(result.try_get(0)?)?, completed);
    }
    let result = |completion: &RunCompletion| {
        let index = indices.get(&(completion.issue_id, completion.epoch));
        let Some(completed) = index.and_then(|index| found.get_mut(index)) else {
            return CompletionOutcome::Fenced;
        };
        let reported = *completed;
        if let CompletionOutcome::Committed { repeated, .. } = completed {
            *repeated = true;
        }
        reported
    };
    Ok(completions.iter().map(result).collect())
}

/// Each claim once: a second end of the same claim in one call is fenced.
fn distinct<T>(items: &[T], claim: impl Fn(&T) -> (IssueId, ClaimEpoch)) -> Vec<&T> {
    let mut seen = HashSet::new();
    items.iter().filter(|item| seen.insert(claim(item))).collect()
}

pub(super) async fn fail(
    connection: &mut PgConnection,
    failures: &[RunFailure],
    attempts_max: u32,
) -> Result<Vec<FailureOutcome>, Error> {
    let claim = |failure: &RunFailure| (failure.issue_id, failure.epoch);
    let runs = distinct(failures, claim);
    let after = |failure: &&RunFailure| match failure.then {
        AfterFailure::Retry { after } | AfterFailure::Defer { after } => Some(ms(after)),
        AfterFailure::Quarantine => None,
    };
    let is_blamed = |failure: &&RunFailure| !matches!(failure.then, AfterFailure::Defer { .. });
    let rows = sqlx::query("SELECT * FROM headwater_fail($1, $2, $3, $4, $5, $6, $7)")
        .bind(runs.iter().map(|run| run.issue_id.0).collect::<Vec<_>>())
        .bind(runs.iter().map(|run| run.epoch.0).collect::<Vec<_>>())
        .bind(runs.iter().map(|run| error_text(&run.error)).collect::<Vec<_>>())
        .bind(runs.iter().map(after).collect::<Vec<_>>())
        .bind(runs.iter().map(is_blamed).collect::<Vec<_>>())
        .bind(i64::from(attempts_max))
        .bind(to_i64(RUN_EVENTS_MAX))
        .fetch_all(connection)
        .await?;
    let mut failed = HashMap::new();
    for row in &rows {
        let (issue_id, epoch) = (IssueId(row.try_get(0)?), ClaimEpoch(row.try_get(1)?));
        let attempts = count(row.try_get(2)?)?;
        let result = if row.try_get(3)? {
            FailureOutcome::Quarantined { attempts }
        } else {
            FailureOutcome::Requeued { attempts, not_before: timestamp(row.try_get(4)?) }
        };
        failed.insert((issue_id, epoch), result);
    }
    Ok(failures
        .iter()
        .map(|one| failed.remove(&claim(one)).unwrap_or(FailureOutcome::Fenced))
        .collect())
}

pub(super) async fn release_claims(
    connection: &mut PgConnection,
    claims: &[ClaimRelease],
) -> Result<Vec<ClaimReleased>, Error> {
    let claim = |give: &ClaimRelease| (give.issue_id, give.epoch);
    let runs = distinct(claims, claim);
    let rows = sqlx::query("SELECT * FROM headwater_release_claims($1, $2, $3)")
        .bind(runs.iter().map(|run| run.issue_id.0).collect::<Vec<_>>())
        .bind(runs.iter().map(|run| run.epoch.0).collect::<Vec<_>>())
        .bind(runs.iter().map(|run| run.reason == ReleaseReason::Superseded).collect::<Vec<_>>())
        .fetch_all(connection)
        .await?;
    let mut given = HashMap::new();
    for row in &rows {
        let claim = (IssueId(row.try_get(0)?), ClaimEpoch(row.try_get(1)?));
        given.insert(
            claim,
            ClaimReleased::Requeued { not_before: optional_timestamp(row.try_get(2)?) },
        );
    }
    Ok(claims
        .iter()
        .map(|one| given.remove(&claim(one)).unwrap_or(ClaimReleased::Fenced))
        .collect())
}
