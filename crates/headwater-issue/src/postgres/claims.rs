//! Claims on PostgreSQL: claim, heartbeat, complete, fail and release, each one call of a SQL function.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Error, Row};

use super::timestamps::time;
use crate::claim::{
    AfterFailure, Claim, ClaimOptions, ClaimRelease, ClaimReleased, ClaimRenewal, ClaimedIssue,
    CompletionOutcome, FailureOutcome, ReleaseReason, RunCompletion, RunFailure,
};
use crate::error::Result;
use crate::issue::{ClaimEpoch, EventLog, EventLogId, Issue, IssueId, ProcessingStatus};
use crate::limits::{FIELDS_BYTES_MAX, RUN_EVENTS_MAX, claim_bytes_max};
use crate::outbox::types::{NewOutboxRow, idempotency_key};
use crate::row_decoding::{count, ms, optional_timestamp, timestamp, to_i64, trace};
use crate::validate::error_text;

pub(super) async fn claim(
    connection: &mut PgConnection,
    issues: &[IssueId],
    options: &ClaimOptions,
) -> Result<Vec<Claim>, Error> {
    let rows = sqlx::query("SELECT * FROM headwater_claim_issues($1, $2, $3, $4, $5, $6)")
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
    let mut found: HashMap<IssueId, Claim> = HashMap::with_capacity(rows.len());
    for row in &rows {
        let id = IssueId(row.try_get(0)?);
        match row.try_get(1)? {
            Some(true) => _ = found.insert(id, Claim::Won(Box::new(read_won(id, row)?))),
            Some(false) => _ = found.insert(id, read_not_won(row)?),
            // A further event log of a claimed issue, in the order of ids.
            None => {
                if let Some(Claim::Won(claimed)) = found.get_mut(&id) {
                    claimed.events.extend(read_event(id, row)?);
                }
            }
        }
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

/// A claimed issue with its oldest event log.
fn read_won(id: IssueId, row: &PgRow) -> Result<ClaimedIssue, Error> {
    let issue = Issue {
        id,
        integration: row.try_get(4)?,
        provider: row.try_get(5)?,
        external_project_id: row.try_get(6)?,
        external_issue_id: row.try_get(7)?,
        status: ProcessingStatus::Processing,
        pending_events: count(row.try_get(8)?)?,
        claim_epoch: ClaimEpoch(row.try_get(9)?),
        claim_owner: row.try_get(10)?,
        claim_expires_at: time(row, 11)?,
        not_before: time(row, 12)?,
        attempts: count(row.try_get(13)?)?,
        crashes: count(row.try_get(14)?)?,
        superseded: count(row.try_get(15)?)?,
        quarantined_at: time(row, 16)?,
        last_error: row.try_get(17)?,
        fields: row.try_get(18)?,
        discussions: row.try_get(19)?,
        processing_started_at: time(row, 20)?,
        last_processed_at: time(row, 21)?,
        nudged_at: time(row, 22)?,
        created_at: time(row, 23)?.unwrap_or_default(),
        updated_at: time(row, 24)?.unwrap_or_default(),
    };
    Ok(ClaimedIssue {
        epoch: issue.claim_epoch,
        completed_event_log_id: row.try_get::<Option<i64>, _>(25)?.map(EventLogId),
        expires_at: issue.claim_expires_at.unwrap_or_default(),
        events: read_event(id, row)?.into_iter().collect(),
        issue,
    })
}

fn read_not_won(row: &PgRow) -> Result<Claim, Error> {
    let (quarantined_at, owner) = (time(row, 16)?, row.try_get::<Option<String>, _>(10)?);
    Ok(match (quarantined_at, owner, time(row, 12)?) {
        (Some(since), ..) => Claim::Quarantined { since, just_now: row.try_get(2)? },
        (None, Some(owner), _) => {
            Claim::Taken { owner, expires_at: time(row, 11)?.unwrap_or_default() }
        }
        (None, None, Some(not_before)) => {
            let now = time(row, 3)?.unwrap_or_default();
            Claim::NotYet { not_before, wait: not_before.since(now) }
        }
        (None, None, None) => Claim::Idle,
    })
}

/// The event log of a row; `None` if an issue was claimed without one.
fn read_event(issue_id: IssueId, row: &PgRow) -> Result<Option<EventLog>, Error> {
    let Some(id) = row.try_get::<Option<i64>, _>(26)? else { return Ok(None) };
    Ok(Some(EventLog {
        id: EventLogId(id),
        issue_id,
        source: row.try_get(27)?,
        event_type: row.try_get(28)?,
        dedup_key: row.try_get(29)?,
        payload: row.try_get(30)?,
        created_at: time(row, 31)?.unwrap_or_default(),
        processed_at: None,
        processing_error: row.try_get(32)?,
        trace: trace(row.try_get(33)?),
    }))
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
    // A run that is named twice is passed once; the second result is `repeated`. Issues in the order of ids, in which all
    // functions lock them.
    let mut runs = distinct(completions, |completion| (completion.issue_id, completion.epoch));
    runs.sort_by_key(|run| run.issue_id);
    let mut logs: Vec<(i64, i64, i64)> = Vec::with_capacity(runs.len());
    let mut outbox: Vec<(i64, i64, String, &NewOutboxRow)> = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        let (place, issue) = (to_i64(index + 1), run.issue_id.0);
        logs.extend(run.event_log_ids.iter().map(|log| (place, issue, log.0)));
        let key = |number| idempotency_key(identity, run.issue_id, run.epoch, number);
        outbox.extend(run.outbox.iter().enumerate().map(|(n, row)| (place, issue, key(n), row)));
    }
    let changes = runs.iter().any(|run| run.fields.is_some() || run.discussions.is_some());
    let rows = sqlx::query(
        "SELECT * FROM headwater_complete_runs($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)",
    )
    .bind(runs.iter().map(|run| run.issue_id.0).collect::<Vec<_>>())
    .bind(runs.iter().map(|run| run.epoch.0).collect::<Vec<_>>())
    .bind(changes)
    .bind(runs.iter().map(|run| run.fields.as_deref()).collect::<Vec<_>>())
    .bind(runs.iter().map(|run| run.discussions.as_deref()).collect::<Vec<_>>())
    .bind(logs.iter().map(|(place, ..)| *place).collect::<Vec<_>>())
    .bind(logs.iter().map(|(_, issue, _)| *issue).collect::<Vec<_>>())
    .bind(logs.iter().map(|(.., log)| *log).collect::<Vec<_>>())
    .bind(outbox.iter().map(|(place, ..)| *place).collect::<Vec<_>>())
    .bind(outbox.iter().map(|(_, issue, ..)| *issue).collect::<Vec<_>>())
    .bind(outbox.iter().map(|(.., row)| row.kind.as_str()).collect::<Vec<_>>())
    .bind(outbox.iter().map(|(.., row)| row.target.as_str()).collect::<Vec<_>>())
    .bind(outbox.iter().map(|(.., key, _)| key.as_str()).collect::<Vec<_>>())
    .bind(outbox.iter().map(|(.., row)| row.payload.as_str()).collect::<Vec<_>>())
    .bind(to_i64(FIELDS_BYTES_MAX))
    .fetch_all(connection)
    .await?;
    let mut found = HashMap::with_capacity(rows.len());
    for row in &rows {
        let place: usize = count(row.try_get(0)?)?;
        let requeued = row.try_get(2)?;
        let not_before = time(row, 3)?.filter(|_| requeued);
        let completed =
            CompletionOutcome::Committed { requeued, not_before, repeated: row.try_get(1)? };
        if let Some(run) = place.checked_sub(1).and_then(|index| runs.get(index)) {
            found.insert((run.issue_id, run.epoch), completed);
        }
    }
    let result = |completion: &RunCompletion| {
        let Some(completed) = found.get_mut(&(completion.issue_id, completion.epoch)) else {
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
