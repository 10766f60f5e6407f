//! The effect ledger in SQL.
//!
//! Upstream: `desk::tool_calls` begins and ends calls; `drafts` adds those that a person has decided about; routes list them.
//! Downstream: the table `tool_effects`.
//!
//! Guarantees: an intent is committed in the transaction that checks the claim of its run, under the lock of the issue, so a
//! worker that has lost its claim begins nothing. A call has one row, which never returns from an outcome to an attempt.

use std::time::Duration;

use async_trait::async_trait;
use headwater_issue::{ClaimEpoch, EventLogId, IssueId, SqlRow, StoreConnection, Transaction};
use sqlx::Error;
use uuid::Uuid;

use crate::desk::effects::{
    Effect, EffectBegin, EffectLedger, EffectOutcome, EffectStatus, PlannedCall, canonical_json,
};
use crate::limits::{EFFECTS_PER_ISSUE_MAX, TOOL_TIMEOUT_MAX};
use crate::tickets::sql::statements::{execute, from_ms, list};
use crate::tickets::store::{Tickets, retry_on_conflict};
use crate::tickets::ticket::TicketError;

/// Longest lease of an attempt. A longer one means that the clock of the database was set back, and it is over.
const LEASE_MAX: Duration = TOOL_TIMEOUT_MAX.saturating_mul(2);

/// Which calls to list, newest first.
#[derive(Clone, Debug, Default)]
pub struct EffectFilter {
    /// Only those with this status.
    pub status: Option<EffectStatus>,
    /// Only those of this tool.
    pub tool: Option<String>,
    /// Only those of this issue.
    pub issue_id: Option<i64>,
    /// Only those with a smaller number: the last one of the previous page.
    pub before: Option<i64>,
}

macro_rules! select_effect {
    ($rest:literal) => {
        concat!(
            "SELECT number, effect_key, issue_id, integration, request, tool, arguments, status, attempts, epoch, ",
            "result, problem, draft, decided_by, created_at, started_at, ended_at, ",
            "coalesce(lease_until - headwater_ms(headwater_now()), 0), ",
            "headwater_ms(headwater_now()) - coalesce(started_at, created_at) FROM tool_effects ",
            $rest
        )
    };
}

fn read_effect(row: &SqlRow) -> Result<Effect, Error> {
    let invalid =
        |what: &str| Error::Decode(format!("invalid {what} in the table `tool_effects`").into());
    let (key, arguments, status) =
        (row.get::<String>(1)?, row.get::<String>(6)?, row.get::<String>(7)?);
    let call = PlannedCall {
        tool: row.get(5)?,
        arguments: serde_json::from_str(&arguments).map_err(|_| invalid("arguments"))?,
        request: row.get(4)?,
    };
    let time = |index| Ok::<_, Error>(row.get::<Option<i64>>(index)?.map(from_ms));
    let duration = |index| {
        let ms = u64::try_from(row.get::<i64>(index)?).unwrap_or(0);
        Ok::<_, Error>(Duration::from_millis(ms))
    };
    let lease_left = duration(17)?;
    Ok(Effect {
        number: row.get(0)?,
        key: Uuid::parse_str(&key).map_err(|_| invalid("effect_key"))?,
        issue_id: IssueId(row.get(2)?),
        integration: row.get(3)?,
        call,
        status: EffectStatus::parse(&status).ok_or_else(|| invalid("status"))?,
        attempts: row.get(8)?,
        epoch: row.get(9)?,
        result: row.get(10)?,
        problem: row.get(11)?,
        draft: row.get(12)?,
        decided_by: row.get(13)?,
        created_at: from_ms(row.get(14)?),
        started_at: time(15)?,
        ended_at: time(16)?,
        lease_left: if lease_left > LEASE_MAX { Duration::ZERO } else { lease_left },
        age: duration(18)?,
    })
}

impl Tickets {
    /// At most `limit` calls, newest first.
    pub async fn effects(
        &self,
        filter: &EffectFilter,
        limit: usize,
    ) -> Result<Vec<Effect>, TicketError> {
        let select = select_effect!(
            "WHERE number < $1 AND ($2::text IS NULL OR status = $2) AND ($3::text IS NULL OR tool = $3)
                 AND ($4::bigint IS NULL OR issue_id = $4) ORDER BY number DESC LIMIT $5"
        );
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let parameters = [
            filter.before.unwrap_or(i64::MAX).into(),
            filter.status.map(EffectStatus::as_str).into(),
            filter.tool.as_deref().into(),
            filter.issue_id.into(),
            limit.into(),
        ];
        self.read(async |connection| {
            list(connection, "effects", select, &parameters, read_effect).await
        })
        .await
    }

    /// A call, if it exists.
    pub async fn effect(&self, number: i64) -> Result<Option<Effect>, TicketError> {
        let select = select_effect!("WHERE number = $1");
        let found = self.read(async |connection| {
            list(connection, "effect", select, &[number.into()], read_effect).await
        });
        Ok(found.await?.pop())
    }

    async fn effects_of_request(
        &self,
        issue_id: IssueId,
        EventLogId(request): EventLogId,
    ) -> Result<Vec<Effect>, TicketError> {
        let select = select_effect!(
            "WHERE issue_id = $1 AND (request = $2 OR status IN ('approved', 'started')) ORDER BY number DESC LIMIT $3"
        );
        let limit = i64::try_from(EFFECTS_PER_ISSUE_MAX).unwrap_or(i64::MAX);
        let parameters = [issue_id.0.into(), request.into(), limit.into()];
        let found = self.read(async |connection| {
            list(connection, "effects of an issue", select, &parameters, read_effect).await
        });
        let mut found = found.await?;
        found.reverse();
        Ok(found)
    }

    async fn begin_effect_once(
        &self,
        issue_id: IssueId,
        ClaimEpoch(epoch): ClaimEpoch,
        call: &PlannedCall,
        lease: Duration,
    ) -> Result<EffectBegin, TicketError> {
        let mut transaction = self.store.begin().await?;
        let Some(integration) = claimed(transaction.as_mut(), issue_id, epoch).await? else {
            return Ok(EffectBegin::Fenced);
        };
        let digest = call.digest();
        let known = find(transaction.connection(), issue_id, call.request, &digest).await?;
        match known {
            Some(known) => match known.status {
                EffectStatus::Approved => {}
                EffectStatus::Started if known.lease_left.is_zero() => {}
                EffectStatus::Started => return Ok(EffectBegin::InProgress(known.lease_left)),
                _ => return Ok(EffectBegin::Ended(known)),
            },
            None => {
                insert(transaction.connection(), (issue_id, &integration), call, None).await?;
            }
        }
        let update = "UPDATE tool_effects SET status = 'started', attempts = attempts + 1, epoch = $4, problem = NULL,
                 lease_until = headwater_ms(headwater_now()) + $5,
                 started_at = coalesce(started_at, headwater_ms(headwater_now()))
             WHERE issue_id = $1 AND request = $2 AND digest = $3";
        let lease = i64::try_from(lease.as_millis()).unwrap_or(i64::MAX);
        let parameters =
            [issue_id.0.into(), call.request.into(), (&digest).into(), epoch.into(), lease.into()];
        execute(transaction.connection(), "begin effect", update, &parameters).await?;
        let begun = find(transaction.connection(), issue_id, call.request, &digest).await?;
        transaction.commit().await?;
        Ok(begun.map_or(EffectBegin::Fenced, EffectBegin::Started))
    }

    async fn end_effect_once(
        &self,
        key: Uuid,
        attempt: i64,
        outcome: &EffectOutcome,
    ) -> Result<(), TicketError> {
        // What was carried out stays so, whichever attempt tells it.
        let done = "UPDATE tool_effects SET status = 'done', result = $2, problem = NULL, lease_until = NULL,
                 ended_at = headwater_ms(headwater_now())
             WHERE effect_key = $1 AND status IN ('started', 'unknown')";
        let ended = "UPDATE tool_effects SET status = $3, result = $4, problem = $5, lease_until = NULL,
                 ended_at = CASE WHEN $3 IN ('approved', 'started') THEN NULL ELSE headwater_ms(headwater_now()) END
             WHERE effect_key = $1 AND attempts = $2 AND status IN ('approved', 'started')";
        let key = key.to_string();
        let mut transaction = self.store.begin().await?;
        let (status, result, problem) = match outcome {
            EffectOutcome::Done(result) => {
                let parameters = [(&key).into(), result.into()];
                execute(transaction.connection(), "end effect", done, &parameters).await?;
                return Ok(transaction.commit().await?);
            }
            EffectOutcome::Failed(result) => ("failed", Some(result.as_str()), None),
            EffectOutcome::Waiting(problem) => ("approved", None, Some(problem.as_str())),
            EffectOutcome::Expired { result, problem } => {
                ("failed", Some(result.as_str()), Some(problem.as_str()))
            }
            EffectOutcome::Open(problem) => ("started", None, Some(problem.as_str())),
            EffectOutcome::Unknown(problem) => ("unknown", None, Some(problem.as_str())),
        };
        let parameters =
            [(&key).into(), attempt.into(), status.into(), result.into(), problem.into()];
        execute(transaction.connection(), "end effect", ended, &parameters).await?;
        Ok(transaction.commit().await?)
    }
}

/// The integration of an issue, locked, if the claim with this epoch is held.
async fn claimed(
    transaction: &mut dyn Transaction,
    issue_id: IssueId,
    epoch: i64,
) -> Result<Option<String>, TicketError> {
    let select =
        "SELECT (SELECT n.name FROM integrations n WHERE n.id = i.integration_id) FROM issues i
         WHERE i.id = $1 AND i.claim_epoch = $2 AND i.processing_status = 'processing' FOR UPDATE";
    let read = |row: &SqlRow| row.get::<String>(0);
    let parameters = [issue_id.0.into(), epoch.into()];
    Ok(list(transaction.connection(), "lock claim", select, &parameters, read).await?.pop())
}

async fn find(
    connection: StoreConnection<'_>,
    issue_id: IssueId,
    request: i64,
    digest: &str,
) -> Result<Option<Effect>, TicketError> {
    let select = select_effect!("WHERE issue_id = $1 AND request = $2 AND digest = $3");
    let parameters = [issue_id.0.into(), request.into(), digest.into()];
    Ok(list(connection, "find effect", select, &parameters, read_effect).await?.pop())
}

/// A decision about a call.
pub(super) struct CallDecision<'a> {
    pub(super) status: EffectStatus,
    /// What the model is told about a rejection.
    pub(super) result: Option<&'a str>,
    pub(super) draft: i64,
    pub(super) by: &'a str,
}

/// Adds a call without an attempt. An approval replaces a rejection, and any decision an approved call that was not made;
/// otherwise a call that is known stays as it is.
pub(super) async fn insert(
    connection: StoreConnection<'_>,
    (issue_id, integration): (IssueId, &str),
    call: &PlannedCall,
    decision: Option<CallDecision<'_>>,
) -> Result<(), TicketError> {
    let insert = "INSERT INTO tool_effects (effect_key, issue_id, integration, request, tool, arguments, digest, status,
             result, draft, decided_by, created_at, ended_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, headwater_ms(headwater_now()),
             CASE WHEN $8 = 'rejected' THEN headwater_ms(headwater_now()) END)
         ON CONFLICT (issue_id, request, digest) DO UPDATE SET status = excluded.status, result = excluded.result,
             draft = excluded.draft, decided_by = excluded.decided_by, created_at = excluded.created_at,
             ended_at = excluded.ended_at, problem = NULL
         WHERE tool_effects.status = 'rejected' AND excluded.status = 'approved'
             OR tool_effects.status = 'failed' AND tool_effects.attempts = 0 AND excluded.status <> 'started'";
    let (key, digest) = (Uuid::now_v7().to_string(), call.digest());
    let arguments = canonical_json(&call.arguments);
    let status = decision.as_ref().map_or(EffectStatus::Started, |decision| decision.status);
    let parameters = [
        (&key).into(),
        issue_id.0.into(),
        integration.into(),
        call.request.into(),
        (&call.tool).into(),
        (&arguments).into(),
        (&digest).into(),
        status.as_str().into(),
        decision.as_ref().and_then(|decision| decision.result).into(),
        decision.as_ref().map(|decision| decision.draft).into(),
        decision.as_ref().map(|decision| decision.by).into(),
    ];
    execute(connection, "insert effect", insert, &parameters).await
}

#[async_trait]
impl EffectLedger for Tickets {
    async fn effects_of(
        &self,
        issue_id: IssueId,
        request: EventLogId,
    ) -> Result<Vec<Effect>, String> {
        self.effects_of_request(issue_id, request).await.map_err(|error| error.to_string())
    }

    async fn begin_effect(
        &self,
        issue_id: IssueId,
        epoch: ClaimEpoch,
        call: &PlannedCall,
        lease: Duration,
    ) -> Result<EffectBegin, String> {
        let begun = retry_on_conflict(|| self.begin_effect_once(issue_id, epoch, call, lease));
        begun.await.map_err(|error| error.to_string())
    }

    async fn end_effect(
        &self,
        key: Uuid,
        attempt: i64,
        outcome: &EffectOutcome,
    ) -> Result<(), String> {
        let ended = retry_on_conflict(|| self.end_effect_once(key, attempt, outcome));
        ended.await.map_err(|error| error.to_string())
    }
}
