//! One attempt of a call that goes through the effect ledger: its intent, the call, its outcome, and what is said about it.
//!
//! Upstream: `tool_calls` decides about attempts. Downstream: the tool, and the [`EffectLedger`].
//! Guarantees: the call is made after its intent is committed, and only while no other attempt can be in progress. Its outcome is
//! recorded again while the database is unavailable, for a bounded time.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use headwater_issue::{ClaimEpoch, IssueId};
use metrics::counter;
use serde_json::{Value as Json, json};
use tokio::time::{sleep, timeout};
use tracing::warn;

use crate::desk::effects::{
    Effect, EffectBegin, EffectLedger, EffectOutcome, EffectStatus, PlannedCall, ToldEffect,
    canonical_json,
};
use crate::desk::prompt::escaped_json;
use crate::desk::tool::{Tool, ToolError, ToolRecovery, ToolRequest};
use crate::limits::EFFECT_RESOLVE_FOR;
use crate::text;

/// Counter of tool calls. Labels: `tool`, `result` (`ok`, `failed`, `unknown`, `planned`, `invalid`, `known`, `stopped`).
const TOOL_CALLS: &str = "headwater_tool_calls_total";

/// How much longer than its timeout an attempt counts as being in progress: time to commit its intent before, and a
/// reserve after it, in which the request may still be on its way.
const LEASE_BEFORE: Duration = Duration::from_secs(2);
const LEASE_AFTER: Duration = Duration::from_secs(1);

/// How long an outcome is recorded again while the database is unavailable, and the pause in between.
const RECORD_FOR: Duration = Duration::from_secs(60);
const RECORD_PAUSE: Duration = Duration::from_millis(250);

/// Bytes of arguments, and of a problem, in a sentence for a person.
const SHOWN_ARGUMENTS_BYTES_MAX: usize = 200;
const SHOWN_PROBLEM_BYTES_MAX: usize = 150;

/// How an attempt came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    /// The call was not made before.
    New,
    /// The call may have been made before, with the same key.
    Repeated,
    /// The tool says that the call was not carried out.
    LookedUp,
}

/// One attempt, on a task of its own.
pub(super) struct EffectCall {
    pub(super) ledger: Arc<dyn EffectLedger>,
    pub(super) tool: Arc<dyn Tool>,
    pub(super) issue_id: IssueId,
    pub(super) epoch: ClaimEpoch,
    pub(super) call: PlannedCall,
    pub(super) request: ToolRequest,
    pub(super) attempt: Attempt,
}

/// Result of an attempt.
pub(super) enum Attempted {
    Ended(Effect),
    /// Without an outcome.
    Unresolved(Effect),
    InProgress(Duration),
    Fenced,
}

/// What an attempt says about the tool, for its circuit breaker.
pub(super) enum ToolResponse {
    /// It was not called.
    None,
    /// It has done what was asked, or rejected it.
    Useful,
    /// It did not respond, or could not be called.
    Failed(String),
}

impl EffectCall {
    pub(super) async fn make(mut self) -> Result<(Attempted, ToolResponse), String> {
        let limit = self.tool.definition().timeout;
        let lease = LEASE_BEFORE + limit + LEASE_AFTER;
        let asked = Instant::now();
        let begun = self.ledger.begin_effect(self.issue_id, self.epoch, &self.call, lease).await?;
        let not_called = |attempted| Ok((attempted, ToolResponse::None));
        let effect = match begun {
            EffectBegin::Started(effect) => effect,
            EffectBegin::Ended(effect) if effect.status == EffectStatus::Unknown => {
                return not_called(Attempted::Unresolved(effect));
            }
            EffectBegin::Ended(effect) => return not_called(Attempted::Ended(effect)),
            EffectBegin::InProgress(left) => return not_called(Attempted::InProgress(left)),
            EffectBegin::Fenced => return not_called(Attempted::Fenced),
        };
        self.request.idempotency_key = effect.key.to_string();
        // A slow commit must not move the call beyond the lease, which began before it.
        let left = (LEASE_BEFORE + limit).saturating_sub(asked.elapsed());
        let (result, response) = match left.is_zero() {
            true => {
                let problem = "the database did not respond in time".to_owned();
                (Err(ToolError::NotCarriedOut(problem)), ToolResponse::None)
            }
            false => {
                let result = limited(self.tool.call(&self.request), limit.min(left)).await;
                let response = response_of(&result);
                (result, response)
            }
        };
        let is_certain = self.attempt != Attempt::Repeated && effect.attempts == 1
            || self.attempt == Attempt::LookedUp;
        let outcome = match result {
            Ok(result) => EffectOutcome::Done(success(&result)),
            Err(ToolError::Rejected(problem)) => EffectOutcome::Failed(failure(&problem)),
            Err(ToolError::NotCarriedOut(problem)) if is_certain => {
                EffectOutcome::Failed(failure(&problem))
            }
            Err(error) => {
                let gives_up = self.tool.definition().recovery == ToolRecovery::Person
                    || effect.age >= EFFECT_RESOLVE_FOR;
                let problem = text::one_line(&error.to_string(), 500);
                match gives_up {
                    true => EffectOutcome::Unknown(problem),
                    false => EffectOutcome::Open(problem),
                }
            }
        };
        let effect = with_outcome(effect, &outcome);
        let counted = match effect.status {
            EffectStatus::Done => "ok",
            EffectStatus::Failed => "failed",
            _ => "unknown",
        };
        count(&self.call.tool, counted);
        self.record(&effect, &outcome).await?;
        let attempted = match effect.status {
            EffectStatus::Done | EffectStatus::Failed => Attempted::Ended(effect),
            _ => Attempted::Unresolved(effect),
        };
        Ok((attempted, response))
    }

    /// Records the outcome, which only this task knows, while the database may be unavailable.
    async fn record(&self, effect: &Effect, outcome: &EffectOutcome) -> Result<(), String> {
        let since = Instant::now();
        loop {
            match self.ledger.end_effect(effect.key, effect.attempts, outcome).await {
                Err(error) if since.elapsed() < RECORD_FOR => {
                    warn!(tool = self.call.tool, number = effect.number, %error, "outcome of a tool call not recorded; retrying");
                    sleep(RECORD_PAUSE).await;
                }
                result => return result,
            }
        }
    }
}

/// What the result of a call says about its tool.
pub(super) fn response_of<T>(result: &Result<T, ToolError>) -> ToolResponse {
    match result {
        Ok(_) | Err(ToolError::Rejected(_)) => ToolResponse::Useful,
        Err(error) => ToolResponse::Failed(error.to_string()),
    }
}

/// Calls a tool within a time. A panic is a call without a known outcome.
pub(super) async fn limited<T>(
    calling: impl Future<Output = Result<T, ToolError>>,
    limit: Duration,
) -> Result<T, ToolError> {
    match timeout(limit, AssertUnwindSafe(calling).catch_unwind()).await {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => Err(ToolError::Unknown("the tool panicked".to_owned())),
        Err(_) => Err(ToolError::Unknown(format!("no response within {limit:?}"))),
    }
}

pub(super) fn with_outcome(effect: Effect, outcome: &EffectOutcome) -> Effect {
    let (status, result, problem) = match outcome {
        EffectOutcome::Done(result) => (EffectStatus::Done, Some(result.clone()), None),
        EffectOutcome::Failed(result) => (EffectStatus::Failed, Some(result.clone()), None),
        EffectOutcome::Waiting(problem) => (EffectStatus::Approved, None, Some(problem.clone())),
        EffectOutcome::Expired { result, problem } => {
            (EffectStatus::Failed, Some(result.clone()), Some(problem.clone()))
        }
        EffectOutcome::Open(problem) => (EffectStatus::Started, None, Some(problem.clone())),
        EffectOutcome::Unknown(problem) => (EffectStatus::Unknown, None, Some(problem.clone())),
    };
    Effect { status, result, problem, ..effect }
}

pub(super) fn success(result: &Json) -> String {
    escaped_json(&json!({"ok": true, "result": result}))
}

pub(super) fn failure(problem: &str) -> String {
    escaped_json(&json!({"ok": false, "error": text::one_line(problem, 500)}))
}

/// What the model is told about a call that a person has rejected.
pub(crate) fn rejection(reason: Option<&str>) -> String {
    let reason = reason.map_or(String::new(), |reason| format!(": {reason}"));
    failure(&format!("a person rejected this call{reason}"))
}

/// A call that a person has to look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnresolvedCall {
    /// What is stored when a person was told about it.
    pub(super) told: ToldEffect,
    /// What the person has to know. Not for users: it has arguments of the call and texts of the service.
    pub(super) facts: String,
}

impl UnresolvedCall {
    /// The call, if a person has to look at it. Only what is in the ledger decides, so that a crash before a person was told
    /// changes nothing.
    pub(super) fn of(effect: &Effect) -> Option<Self> {
        match (effect.status, &effect.problem) {
            (EffectStatus::Unknown, _) => Some(Self::unknown(effect)),
            (_, Some(problem)) if effect.was_not_made() => Some(Self::not_made(effect, problem)),
            _ => None,
        }
    }

    /// It is unknown what the call has done.
    pub(super) fn unknown(effect: &Effect) -> Self {
        let since = effect.started_at.unwrap_or(effect.created_at).to_rfc3339();
        let problem = shown_problem(effect.problem.as_deref().unwrap_or("no response"));
        let facts = format!(
            "it is unknown whether the call of {} at {since} was carried out ({problem}); \
             check it at the service, idempotency key {}; `headwater effect show {}` shows it",
            described(&effect.call),
            effect.key,
            effect.number
        );
        Self { told: effect.told(), facts }
    }

    /// A person has approved the call, and it was not made.
    fn not_made(effect: &Effect, problem: &str) -> Self {
        let (by, at) = (effect.decided_by.as_deref(), effect.created_at.to_rfc3339());
        let problem = shown_problem(problem);
        let facts = format!(
            "the call of {} was approved by {} at {at}, and not made ({problem}); `headwater effect show {}` shows it",
            described(&effect.call),
            by.unwrap_or("a person"),
            effect.number
        );
        Self { told: effect.told(), facts }
    }
}

fn shown_problem(problem: &str) -> &str {
    text::cut(problem, SHOWN_PROBLEM_BYTES_MAX)
}

fn described(call: &PlannedCall) -> String {
    let arguments = canonical_json(&call.arguments);
    format!("tool `{}` with {}", call.tool, text::cut(&arguments, SHOWN_ARGUMENTS_BYTES_MAX))
}

pub(super) fn count(tool: &str, result: &'static str) {
    counter!(TOOL_CALLS, "tool" => tool.to_owned(), "result" => result).increment(1);
}
