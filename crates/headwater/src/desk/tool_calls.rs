//! Makes the tool calls of one run.
//!
//! Upstream: `handler`. Downstream: built-in tools, the tools of the [`Toolbox`], the [`EffectLedger`].
//!
//! Guarantees: a call that changes something is made only after its intent is committed under the claim of the run, on a task
//! of its own that the end of the run does not cut off. A call that has an outcome is not made again for the same request; one
//! without an outcome is repeated with the same key, looked up, or given to a person, before the model is asked. A call that
//! needs an approval is only planned. Every problem of a tool is an answer to the model; none fails a run. While a tool fails
//! for several issues, only single calls test it, so that it holds no slots of the worker; calls without an outcome wait.

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use headwater_issue::{ClaimEpoch, HandlerError, Issue, IssueId, Run};
use metrics::counter;
use serde_json::{Value as Json, json};
use tokio::time::{sleep, timeout};
use tokio_util::task::TaskTracker;
use tracing::{info, warn};
use uuid::Uuid;

use crate::desk::breaker::{BreakerOpen, CallPermit, CircuitBreaker};
use crate::desk::conversation::Conversation;
use crate::desk::effects::{
    Effect, EffectBegin, EffectLedger, EffectOutcome, EffectStatus, PlannedCall, canonical_json,
};
use crate::desk::model::{ModelAnswer, ToolCall, ToolSpec, Turn};
use crate::desk::prompt::escaped_json;
use crate::desk::redaction::Redaction;
use crate::desk::tool::{Tool, ToolError, ToolRecovery, ToolRequest};
use crate::desk::toolbox::Toolbox;
use crate::desk::tools::{self, BUILT_IN, SearchScope, TicketSearch, ToolOutcome, rejected};
use crate::limits::EFFECT_RESOLVE_FOR;
use crate::text;

/// Counter of tool calls. Labels: `tool`, `result` (`ok`, `failed`, `unknown`, `planned`, `invalid`, `known`, `stopped`).
pub(crate) const TOOL_CALLS: &str = "headwater_tool_calls_total";

/// How much longer than its timeout an attempt counts as being in progress: time to commit its intent before, and a
/// reserve after it, in which the request may still be on its way.
const LEASE_BEFORE: Duration = Duration::from_secs(2);
const LEASE_AFTER: Duration = Duration::from_secs(1);

/// How long an outcome is recorded again while the database is unavailable, and the pause in between.
const RECORD_FOR: Duration = Duration::from_secs(60);
const RECORD_PAUSE: Duration = Duration::from_millis(250);

/// How long [`DeskTools::close`] waits.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

/// What the model is told about a tool that is not called.
const NOT_RESPONDING: &str = "the tool does not respond; do not call it again now";

/// Bytes of arguments in a sentence for a person.
const SHOWN_ARGUMENTS_BYTES_MAX: usize = 200;

/// The tools of a desk, and the calls in progress.
#[derive(Debug, Default)]
pub(super) struct DeskTools {
    toolbox: Toolbox,
    ledger: Option<Arc<dyn EffectLedger>>,
    /// By the name of the tool.
    breakers: HashMap<String, CircuitBreaker>,
    calling: TaskTracker,
}

impl DeskTools {
    pub(super) fn new(toolbox: Toolbox, ledger: Arc<dyn EffectLedger>) -> Self {
        let breakers = toolbox.names().map(|name| (name.to_owned(), CircuitBreaker::of_tool(name)));
        let breakers = breakers.collect();
        Self { toolbox, ledger: Some(ledger), breakers, calling: TaskTracker::new() }
    }

    /// Asks for a call of a tool.
    fn admit(&self, tool: &str, issue: IssueId) -> Result<Option<CallPermit<'_>>, BreakerOpen> {
        let breaker = self.breakers.get(tool);
        breaker.map(|breaker| breaker.admit(issue, Instant::now())).transpose()
    }

    pub(super) fn specs(&self, issue: &Issue) -> Vec<ToolSpec> {
        self.toolbox.specs(issue)
    }

    pub(super) fn may_need_approval(&self, issue: &Issue) -> bool {
        self.toolbox.may_need_approval(issue)
    }

    /// Waits a bounded time for calls that outlived their runs.
    pub(super) async fn close(&self) {
        self.calling.close();
        let _ = timeout(CLOSE_TIMEOUT, self.calling.wait()).await;
    }

    /// Runs on a task of its own: a cancelled statement leaves its connection in an unknown state, and a cancelled call its
    /// outcome.
    async fn apart<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, String>> + Send + 'static,
    ) -> Result<T, HandlerError> {
        let done = self.calling.spawn(work).await;
        let done = done.map_err(|panic| panic.to_string()).and_then(|done| done);
        done.map_err(|error| HandlerError::unavailable(format!("effect ledger: {error}")))
    }
}

/// Why a run cannot go on after a call.
#[derive(Debug)]
pub(super) enum ToolStop {
    /// The run is repeated later.
    Later(HandlerError),
    /// A person has to take over, for this reason.
    Person(String),
}

impl From<HandlerError> for ToolStop {
    fn from(error: HandlerError) -> Self {
        Self::Later(error)
    }
}

/// The tools of one run.
pub(super) struct RunTools<'a> {
    desk: &'a DeskTools,
    run: &'a Run,
    user: Option<&'a str>,
    request: i64,
    specs: Vec<ToolSpec>,
    /// Calls of this request with an outcome.
    known: Vec<Effect>,
    /// Those that this run has brought to their outcome before the model was asked.
    settled: Vec<(ToolCall, ToolOutcome)>,
    /// Calls that wait for an approval.
    planned: Vec<PlannedCall>,
    /// Tools that did not respond in this run. They are not called again, so that a run takes a bounded time.
    unavailable: HashSet<String>,
    /// Pause before a run that cannot go on is repeated.
    pause: Duration,
    /// Why a person has to take over.
    unresolved: Option<String>,
}

impl<'a> RunTools<'a> {
    /// Reads the ledger, and settles calls of earlier runs: those that were approved are made, and those without an outcome are
    /// repeated, looked up or given to a person.
    pub(super) async fn open(
        desk: &'a DeskTools,
        run: &'a Run,
        conversation: &'a Conversation,
        pause: Duration,
    ) -> Result<Self, HandlerError> {
        let (issue, request) = (run.issue(), conversation.request);
        let mut tools = Self {
            desk,
            run,
            user: conversation.user_id.as_deref(),
            request: request.0,
            specs: desk.specs(issue),
            known: Vec::new(),
            settled: Vec::new(),
            planned: Vec::new(),
            unavailable: HashSet::new(),
            pause,
            unresolved: None,
        };
        let Some(ledger) = desk.ledger.clone() else { return Ok(tools) };
        let issue_id = issue.id;
        let effects = desk.apart(async move { ledger.effects_of(issue_id, request).await }).await?;
        for effect in effects {
            let effect = match effect.status {
                EffectStatus::Approved | EffectStatus::Started => {
                    match tools.settle(effect).await {
                        Ok(effect) => {
                            tools.settled.push((as_call(&effect), tool_outcome(&effect)));
                            effect
                        }
                        Err(ToolStop::Later(error)) => return Err(error),
                        Err(ToolStop::Person(reason)) => {
                            tools.unresolved = Some(reason);
                            continue;
                        }
                    }
                }
                EffectStatus::Unknown => {
                    tools.unresolved = Some(facts(&effect));
                    continue;
                }
                _ => effect,
            };
            if effect.call.request == tools.request {
                tools.known.push(effect);
            }
        }
        Ok(tools)
    }

    /// Why a person has to take over, instead of the model.
    pub(super) fn unresolved(&self) -> Option<&String> {
        self.unresolved.as_ref()
    }

    pub(super) fn specs(&self) -> &[ToolSpec] {
        &self.specs
    }

    /// Names of the tools that earlier runs called for this request.
    pub(super) fn known_names(&self) -> impl Iterator<Item = String> {
        self.known.iter().map(|effect| effect.call.tool.clone())
    }

    /// The calls of earlier runs for this request, as the model has made them.
    pub(super) fn known_turns(&self, redaction: &Redaction) -> Vec<Turn> {
        let calls = self.known.iter().map(|effect| redaction.redact_call(&as_call(effect)));
        let calls: Vec<ToolCall> = calls.collect();
        if calls.is_empty() {
            return Vec::new();
        }
        let asked = Turn::Assistant(ModelAnswer { calls, ..ModelAnswer::default() });
        let results = self.known.iter().map(|effect| Turn::ToolResult {
            call_id: as_call(effect).id,
            content: redaction.redact_outcome(tool_outcome(effect)).content,
        });
        std::iter::once(asked).chain(results).collect()
    }

    /// The calls of earlier runs that this run has brought to their outcome.
    pub(super) fn settled(&self) -> &[(ToolCall, ToolOutcome)] {
        &self.settled
    }

    /// Calls that wait for an approval.
    pub(super) fn planned(&mut self) -> Vec<PlannedCall> {
        std::mem::take(&mut self.planned)
    }

    /// Makes a call of the model.
    pub(super) async fn call(
        &mut self,
        call: &ToolCall,
        search: &dyn TicketSearch,
        scope: SearchScope,
    ) -> Result<ToolOutcome, ToolStop> {
        let issue = self.run.issue();
        let integration = &issue.integration;
        if BUILT_IN.contains(&call.name.as_str()) {
            return Ok(tools::call(call, &self.specs, issue, search, scope, self.user).await);
        }
        let Some(tool) = self.desk.toolbox.find(&call.name, integration).cloned() else {
            // Not with the name that the model has invented.
            count("", "invalid");
            return Ok(rejected(call, "there is no such tool"));
        };
        let arguments = self.desk.toolbox.arguments(&call.name, integration, &call.arguments);
        let arguments = match arguments {
            Ok(arguments) => arguments,
            Err(problem) => {
                count(&call.name, "invalid");
                return Ok(rejected(call, &problem));
            }
        };
        if self.unavailable.contains(&call.name) {
            return Ok(rejected(call, NOT_RESPONDING));
        }
        if !tool.definition().is_recorded() {
            let key = Uuid::now_v7().to_string();
            let request = ToolRequest::new(issue, self.user, &call.name, arguments, key);
            return Ok(self.call_unrecorded(call, tool.as_ref(), &request).await);
        }
        let planned = PlannedCall { tool: call.name.clone(), arguments, request: self.request };
        let digest = planned.digest();
        if let Some(known) = self.known.iter().find(|known| known.call.digest() == digest) {
            count(&call.name, "known");
            return Ok(tool_outcome(known));
        }
        if tool.definition().approval {
            count(&call.name, "planned");
            if !self.planned.contains(&planned) {
                self.planned.push(planned);
            }
            let problem = "this call needs the approval of a person; it was not made yet";
            return Ok(rejected(call, problem));
        }
        let Ok(permit) = self.desk.admit(&call.name, issue.id) else {
            return Ok(self.stopped(call));
        };
        let effect = self.attempt(planned, tool, Attempt::New, permit).await?;
        let outcome = tool_outcome(&effect);
        self.known.push(effect);
        Ok(outcome)
    }

    /// The answer to a call that is not made because the tool fails for other issues, too.
    fn stopped(&mut self, call: &ToolCall) -> ToolOutcome {
        count(&call.name, "stopped");
        self.unavailable.insert(call.name.clone());
        rejected(call, NOT_RESPONDING)
    }

    async fn call_unrecorded(
        &mut self,
        call: &ToolCall,
        tool: &dyn Tool,
        request: &ToolRequest,
    ) -> ToolOutcome {
        let Ok(permit) = self.desk.admit(&call.name, self.run.issue().id) else {
            return self.stopped(call);
        };
        let limit = tool.definition().timeout;
        let result = limited(tool.call(request), limit).await;
        if let Some(permit) = permit {
            match &result {
                Ok(_) | Err(ToolError::Rejected(_)) => permit.succeeded(),
                Err(error) => permit.tool_failed(&error.to_string(), Instant::now()),
            }
        }
        let error = match result {
            Ok(result) => {
                count(&call.name, "ok");
                return finished(call, &json!({"ok": true, "result": result}), true);
            }
            Err(error) => error,
        };
        count(&call.name, "failed");
        if !matches!(error, ToolError::Rejected(_)) {
            warn!(issue_id = %self.run.issue().id, tool = call.name, %error, "tool call failed");
            self.unavailable.insert(call.name.clone());
        }
        rejected(call, &error.to_string())
    }

    /// Brings a call of an earlier run to its outcome.
    async fn settle(&mut self, effect: Effect) -> Result<Effect, ToolStop> {
        let integration = &self.run.issue().integration;
        let tool = self.desk.toolbox.find(&effect.call.tool, integration).cloned();
        let arguments = effect.call.arguments.to_string();
        let checked = self.desk.toolbox.arguments(&effect.call.tool, integration, &arguments);
        let is_new = effect.status == EffectStatus::Approved;
        let tool = match (tool, checked) {
            (Some(tool), Ok(_)) => tool,
            (None, _) | (_, Err(_)) if is_new => {
                let problem = "the tool is not configured any more, or its parameters have changed";
                let content = failure(problem);
                return self.end(effect, EffectOutcome::Failed(content)).await;
            }
            _ => {
                let problem = "the tool is not configured any more";
                return self.end_unknown(effect, problem.to_owned()).await;
            }
        };
        if !is_new && !effect.lease_left.is_zero() {
            return Err(in_progress(&effect.call, effect.lease_left));
        }
        let recovery = tool.definition().recovery;
        if !is_new && recovery == ToolRecovery::Person {
            let problem = effect.problem.clone();
            let problem = problem.unwrap_or_else(|| "the process ended during the call".into());
            return self.end_unknown(effect, problem).await;
        }
        let permit = match self.desk.admit(&effect.call.tool, self.run.issue().id) {
            Ok(permit) => permit,
            Err(open) => {
                count(&effect.call.tool, "stopped");
                let problem = format!("the tool does not respond: {}", open.last_error);
                if !is_new && effect.age >= EFFECT_RESOLVE_FOR {
                    return self.end_unknown(effect, problem).await;
                }
                let reason = format!("tool `{}`: {problem}", effect.call.tool);
                return Err(HandlerError::defer(open.after.max(self.pause), reason).into());
            }
        };
        if is_new {
            return self.attempt(effect.call, tool, Attempt::New, permit).await;
        }
        let (name, number) = (&effect.call.tool, effect.number);
        info!(issue_id = %effect.issue_id, tool = name, number, "tool call has no outcome; recovering");
        match recovery {
            ToolRecovery::LookUp => self.look_up(effect, tool, permit).await,
            _ => self.attempt(effect.call, tool, Attempt::Repeated, permit).await,
        }
    }

    /// Gives a call without an outcome to a person.
    async fn end_unknown(&self, effect: Effect, problem: String) -> Result<Effect, ToolStop> {
        let effect = self.end(effect, EffectOutcome::Unknown(problem)).await?;
        Err(ToolStop::Person(facts(&effect)))
    }

    async fn look_up(
        &mut self,
        effect: Effect,
        tool: Arc<dyn Tool>,
        permit: Option<CallPermit<'_>>,
    ) -> Result<Effect, ToolStop> {
        let request = self.request_of(&effect.call, effect.key);
        let problem = match limited(tool.look_up(&request), tool.definition().timeout).await {
            Ok(Some(result)) => {
                if let Some(permit) = permit {
                    permit.succeeded();
                }
                let content = success(&result);
                return self.end(effect, EffectOutcome::Done(content)).await;
            }
            Ok(None) => return self.attempt(effect.call, tool, Attempt::LookedUp, permit).await,
            Err(error) => format!("look-up failed: {error}"),
        };
        if let Some(permit) = permit {
            permit.tool_failed(&problem, Instant::now());
        }
        if effect.age >= EFFECT_RESOLVE_FOR {
            return self.end_unknown(effect, problem).await;
        }
        let reason = format!("tool `{}`: {problem}", effect.call.tool);
        Err(HandlerError::defer(self.pause, reason).into())
    }

    fn request_of(&self, call: &PlannedCall, key: Uuid) -> ToolRequest {
        let arguments = call.arguments.clone();
        ToolRequest::new(self.run.issue(), self.user, &call.tool, arguments, key.to_string())
    }

    /// Records an outcome without a call.
    async fn end(&self, effect: Effect, outcome: EffectOutcome) -> Result<Effect, ToolStop> {
        let Some(ledger) = self.desk.ledger.clone() else { return Ok(effect) };
        let ended = with_outcome(effect, &outcome);
        let (key, attempt) = (ended.key, ended.attempts);
        self.desk.apart(async move { ledger.end_effect(key, attempt, &outcome).await }).await?;
        Ok(ended)
    }

    /// Makes one attempt of a call through the ledger.
    async fn attempt(
        &mut self,
        call: PlannedCall,
        tool: Arc<dyn Tool>,
        attempt: Attempt,
        permit: Option<CallPermit<'_>>,
    ) -> Result<Effect, ToolStop> {
        let Some(ledger) = self.desk.ledger.clone() else {
            let problem = "tool calls that change something need an effect ledger";
            return Err(HandlerError::unavailable(problem).into());
        };
        let (request, recovery) = (self.request_of(&call, Uuid::nil()), tool.definition().recovery);
        let effect_call = EffectCall {
            ledger,
            tool,
            issue_id: self.run.issue().id,
            epoch: self.run.epoch(),
            call: call.clone(),
            request,
            attempt,
        };
        let attempted = self.desk.apart(effect_call.make()).await?;
        match (&attempted, permit) {
            (Attempted::Ended(effect), Some(permit)) if effect.status == EffectStatus::Done => {
                permit.succeeded();
            }
            (Attempted::Unresolved(effect), Some(permit)) => {
                let problem = effect.problem.as_deref().unwrap_or_default();
                permit.tool_failed(problem, Instant::now());
            }
            // Nothing was called, or the call was rejected at once.
            _ => {}
        }
        match attempted {
            Attempted::Ended(effect) => Ok(effect),
            // It is unknown, or will be at the next run.
            Attempted::Unresolved(effect)
                if recovery == ToolRecovery::Person || effect.status == EffectStatus::Unknown =>
            {
                Err(ToolStop::Person(facts(&effect)))
            }
            Attempted::Unresolved(effect) => {
                let problem = effect.problem.as_deref().unwrap_or_default();
                let reason = format!("tool `{}` gave no outcome: {problem}", call.tool);
                Err(HandlerError::defer(self.pause, reason).into())
            }
            Attempted::InProgress(left) => Err(in_progress(&call, left)),
            // The worker discards the result of this run.
            Attempted::Fenced => {
                Err(HandlerError::unavailable("the claim of the issue is lost").into())
            }
        }
    }
}

fn in_progress(call: &PlannedCall, left: Duration) -> ToolStop {
    let reason = format!("a call of tool `{}` by an earlier run may be in progress", call.tool);
    // Usually it ends long before its lease.
    HandlerError::defer(left.min(Duration::from_secs(1)), reason).into()
}

/// How an attempt came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    /// The call was not made before.
    New,
    /// The call may have been made before, with the same key.
    Repeated,
    /// The tool says that the call was not carried out.
    LookedUp,
}

/// One attempt, on a task of its own.
struct EffectCall {
    ledger: Arc<dyn EffectLedger>,
    tool: Arc<dyn Tool>,
    issue_id: IssueId,
    epoch: ClaimEpoch,
    call: PlannedCall,
    request: ToolRequest,
    attempt: Attempt,
}

/// Result of an attempt.
enum Attempted {
    Ended(Effect),
    /// Without an outcome.
    Unresolved(Effect),
    InProgress(Duration),
    Fenced,
}

impl EffectCall {
    async fn make(mut self) -> Result<Attempted, String> {
        let limit = self.tool.definition().timeout;
        let lease = LEASE_BEFORE + limit + LEASE_AFTER;
        let asked = Instant::now();
        let begun = self.ledger.begin_effect(self.issue_id, self.epoch, &self.call, lease).await?;
        let effect = match begun {
            EffectBegin::Started(effect) => effect,
            EffectBegin::Ended(effect) if effect.status == EffectStatus::Unknown => {
                return Ok(Attempted::Unresolved(effect));
            }
            EffectBegin::Ended(effect) => return Ok(Attempted::Ended(effect)),
            EffectBegin::InProgress(left) => return Ok(Attempted::InProgress(left)),
            EffectBegin::Fenced => return Ok(Attempted::Fenced),
        };
        self.request.idempotency_key = effect.key.to_string();
        // A slow commit must not move the call beyond the lease, which began before it.
        let left = (LEASE_BEFORE + limit).saturating_sub(asked.elapsed());
        let result = match left.is_zero() {
            true => Err(ToolError::NotCarriedOut("the database did not respond in time".into())),
            false => limited(self.tool.call(&self.request), limit.min(left)).await,
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
        let counted = match &outcome {
            EffectOutcome::Done(_) => "ok",
            EffectOutcome::Failed(_) => "failed",
            EffectOutcome::Open(_) | EffectOutcome::Unknown(_) => "unknown",
        };
        count(&self.call.tool, counted);
        self.record(&effect, &outcome).await?;
        let effect = with_outcome(effect, &outcome);
        Ok(match effect.status {
            EffectStatus::Done | EffectStatus::Failed => Attempted::Ended(effect),
            _ => Attempted::Unresolved(effect),
        })
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

/// Calls a tool within a time. A panic is a call without a known outcome.
async fn limited<T>(
    calling: impl Future<Output = Result<T, ToolError>>,
    limit: Duration,
) -> Result<T, ToolError> {
    match timeout(limit, AssertUnwindSafe(calling).catch_unwind()).await {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => Err(ToolError::Unknown("the tool panicked".to_owned())),
        Err(_) => Err(ToolError::Unknown(format!("no response within {limit:?}"))),
    }
}

fn with_outcome(effect: Effect, outcome: &EffectOutcome) -> Effect {
    let (status, result, problem) = match outcome {
        EffectOutcome::Done(result) => (EffectStatus::Done, Some(result.clone()), None),
        EffectOutcome::Failed(result) => (EffectStatus::Failed, Some(result.clone()), None),
        EffectOutcome::Open(problem) => (EffectStatus::Started, None, Some(problem.clone())),
        EffectOutcome::Unknown(problem) => (EffectStatus::Unknown, None, Some(problem.clone())),
    };
    Effect { status, result, problem, ..effect }
}

fn success(result: &Json) -> String {
    escaped_json(&json!({"ok": true, "result": result}))
}

fn failure(problem: &str) -> String {
    escaped_json(&json!({"ok": false, "error": text::one_line(problem, 500)}))
}

/// What the model is told about a call that a person has rejected.
pub(crate) fn rejection(reason: Option<&str>) -> String {
    let reason = reason.map_or(String::new(), |reason| format!(": {reason}"));
    failure(&format!("a person rejected this call{reason}"))
}

/// What the model is told about a call with an outcome.
fn tool_outcome(effect: &Effect) -> ToolOutcome {
    ToolOutcome {
        content: effect.result.clone().unwrap_or_default(),
        success: effect.status == EffectStatus::Done,
        arguments: effect.call.arguments.clone(),
        effect: None,
    }
}

/// A call of an earlier run, as the model makes it.
fn as_call(effect: &Effect) -> ToolCall {
    ToolCall {
        id: format!("call_{}", effect.number),
        name: effect.call.tool.clone(),
        arguments: effect.call.arguments.to_string(),
    }
}

fn finished(call: &ToolCall, content: &Json, success: bool) -> ToolOutcome {
    let arguments = serde_json::from_str(&call.arguments).unwrap_or(Json::Null);
    ToolOutcome { content: escaped_json(content), success, arguments, effect: None }
}

/// What a person has to know to find out what a call has done.
fn facts(effect: &Effect) -> String {
    let arguments = canonical_json(&effect.call.arguments);
    let shown = text::cut(&arguments, SHOWN_ARGUMENTS_BYTES_MAX);
    let since = effect.started_at.unwrap_or(effect.created_at).to_rfc3339();
    let problem = effect.problem.as_deref().unwrap_or("no response");
    format!(
        "it is unknown whether the call of tool `{}` with {shown} at {since} was carried out ({problem}); \
         check it at the service, idempotency key {}; `headwater effect show {}` shows it",
        effect.call.tool, effect.key, effect.number
    )
}

fn count(tool: &str, result: &'static str) {
    counter!(TOOL_CALLS, "tool" => tool.to_owned(), "result" => result).increment(1);
}
