//! Makes the tool calls of one run.
//!
//! Upstream: `handler`. Downstream: built-in tools, the tools of the [`Toolbox`], the [`EffectLedger`].
//!
//! Guarantees: a call that changes something is made only after its intent is committed under the claim of the run, on a task
//! of its own that the end of the run does not cut off. A call that has an outcome is not made again for the same request; one
//! without an outcome is repeated with the same key, looked up, or given to a person, before the model is asked. A call that
//! needs an approval is only planned. Every problem of a tool is an answer to the model; none fails a run. While a tool fails
//! for several issues, only single calls test it, so that it holds no slots of the worker; calls without an outcome wait. An
//! approved call that cannot be made waits for [`EFFECT_RESOLVE_FOR`] at most, and not beyond the next message of the user. No
//! call waits for one of another tool. The ledger alone decides what a person has to be told, so that a crash hides nothing.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_issue::{EventLog, HandlerError, Issue, IssueId, Run};
use headwater_stream::clock::Timestamp;
use serde_json::{Value as Json, json};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};
use uuid::Uuid;

use crate::desk::breaker::{BreakerOpen, CallPermit, CircuitBreaker};
use crate::desk::conversation::Conversation;
use crate::desk::draft::DECISION_SOURCE;
use crate::desk::effect_call::{
    Attempt, Attempted, EffectCall, ToolResponse, UnresolvedCall, count, failure, limited,
    response_of, success, with_outcome,
};
use crate::desk::effects::{Effect, EffectLedger, EffectOutcome, EffectStatus, PlannedCall};
use crate::desk::model::{ModelAnswer, ToolCall, ToolSpec, Turn};
use crate::desk::prompt::escaped_json;
use crate::desk::redaction::Redaction;
use crate::desk::tool::{Tool, ToolError, ToolRecovery, ToolRequest};
use crate::desk::toolbox::Toolbox;
use crate::desk::tools::{self, BUILT_IN, SearchScope, TicketSearch, ToolOutcome, rejected};
use crate::limits::EFFECT_RESOLVE_FOR;
use crate::text;

/// How long [`DeskTools::close`] waits.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);

/// Time for the end of a run whose tools have answered.
const END_OF_RUN: Duration = Duration::from_secs(2);

/// Bytes of the reason for which a call waits or was given up. It may be a text of the service, which can be of any kind.
const PROBLEM_BYTES_MAX: usize = 300;

/// What the model is told about a tool that is not called.
const NOT_RESPONDING: &str = "the tool does not respond; do not call it again now";

/// Why a call is not made after another one of the same run.
const NO_OUTCOME: &str = "another call of this run had no outcome";

/// What the model is told about a call whose outcome a person has to find out.
const TOLD_UNKNOWN: &str = "it is unknown whether this call was carried out; a person was told to check it; do not make it again";

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
    /// The call has to wait: the run is repeated after this time. Other calls can be made.
    Later { after: Duration, reason: String },
    /// The run cannot continue: the ledger is unavailable, or the claim is lost.
    Failed(HandlerError),
    /// A person has to take over, because of this call.
    Person(UnresolvedCall),
}

impl From<HandlerError> for ToolStop {
    fn from(error: HandlerError) -> Self {
        Self::Failed(error)
    }
}

/// The tools of one run.
pub(super) struct RunTools<'a> {
    desk: &'a DeskTools,
    run: &'a Run,
    conversation: &'a Conversation,
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
    /// The calls because of which a person has to take over.
    unresolved: Vec<UnresolvedCall>,
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
            conversation,
            specs: desk.specs(issue),
            known: Vec::new(),
            settled: Vec::new(),
            planned: Vec::new(),
            unavailable: HashSet::new(),
            pause,
            unresolved: Vec::new(),
        };
        let Some(ledger) = desk.ledger.clone() else { return Ok(tools) };
        let issue_id = issue.id;
        let reading = desk.apart(async move { ledger.effects_of(issue_id, request).await });
        let mut effects = reading.await?;
        // First those that were never begun: one that gets no response, whenever it is repeated, must not hold them back.
        effects.sort_by_key(|effect| effect.status == EffectStatus::Started);
        let mut waiting = Vec::new();
        for effect in effects {
            match effect.status {
                EffectStatus::Approved | EffectStatus::Started => {}
                _ => {
                    tools.add(effect);
                    continue;
                }
            }
            let tool = desk.toolbox.find(&effect.call.tool, &issue.integration);
            let timeout = tool.map_or(Duration::ZERO, |tool| tool.definition().timeout);
            // A call, the look-up after it, and the end of the run: a run that takes too long counts as failed.
            let has_time = waiting.is_empty() || run.time_left() >= 2 * timeout + END_OF_RUN;
            let settled = match has_time {
                true => tools.settle(effect).await,
                false => tools.postpone(effect).await,
            };
            match settled {
                Ok(effect) => {
                    tools.settled.push((as_call(&effect), tool_outcome(&effect)));
                    tools.add(effect);
                }
                // The others do not wait for it: otherwise they would be made late, and after the user has written "stop".
                Err(ToolStop::Later { after, reason }) => waiting.push((after, reason)),
                Err(ToolStop::Failed(error)) => return Err(error),
                Err(ToolStop::Person(call)) => tools.unresolved.push(call),
            }
        }
        // A run that hands the issue over is the last one, so it has to wait for all calls, too.
        if let Some((after, reason)) = waiting.into_iter().min_by_key(|(after, _)| *after) {
            return Err(HandlerError::defer(after, reason));
        }
        tools.known.sort_by_key(|effect| effect.number);
        Ok(tools)
    }

    /// Adds a call with an outcome: a person has to be told about it first, or the model sees it.
    fn add(&mut self, effect: Effect) {
        let was_told = self.conversation.told_effects.contains(&effect.told());
        match UnresolvedCall::of(&effect).filter(|_| !was_told) {
            Some(call) => self.unresolved.push(call),
            None if effect.call.request == self.conversation.request.0 => self.known.push(effect),
            None => {}
        }
    }

    /// The calls because of which a person has to take over, instead of the model.
    pub(super) fn unresolved(&self) -> &[UnresolvedCall] {
        &self.unresolved
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
            return Ok(tools::call(call, &self.specs, issue, search, scope, self.user()).await);
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
            let request = ToolRequest::new(issue, self.user(), &call.name, arguments, key);
            return Ok(self.call_unrecorded(call, tool.as_ref(), &request).await);
        }
        let request = self.conversation.request.0;
        let planned = PlannedCall { tool: call.name.clone(), arguments, request };
        let (digest, approval) = (planned.digest(), tool.definition().approval);
        // One that was approved and never made may be approved again.
        let has_outcome = |known: &&Effect| !(approval && known.was_not_made());
        let known = self.known.iter().filter(has_outcome);
        if let Some(known) = known.into_iter().find(|known| known.call.digest() == digest) {
            count(&call.name, "known");
            return Ok(tool_outcome(known));
        }
        if approval {
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

    fn user(&self) -> Option<&str> {
        self.conversation.user_id.as_deref()
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
        report(permit, &response_of(&result));
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
        // It has waited too long, even if the tool responds now.
        let waited = effect.problem.clone().filter(|_| is_new && self.is_void(&effect));
        if let Some(problem) = waited {
            return self.wait(effect, &problem, Duration::ZERO).await;
        }
        let tool = match (tool, checked) {
            (Some(tool), Ok(_)) => tool,
            // Perhaps only in this process, which has other settings than the one that began the call.
            _ => {
                let problem = "the tool is not configured any more, or its parameters have changed";
                return match is_new {
                    true => self.wait(effect, problem, Duration::ZERO).await,
                    false => self.give_up_late(effect, problem).await,
                };
            }
        };
        if !is_new && !effect.lease_left.is_zero() {
            return Err(in_progress(&effect.call, effect.lease_left));
        }
        let recovery = tool.definition().recovery;
        if !is_new && recovery == ToolRecovery::Person {
            let problem = effect.problem.clone();
            let problem = problem.unwrap_or_else(|| "the process ended during the call".into());
            return self.end(effect, EffectOutcome::Unknown(problem)).await;
        }
        let admitted = match self.unavailable.contains(&effect.call.tool) {
            true => {
                Err(BreakerOpen { last_error: NO_OUTCOME.to_owned(), ..BreakerOpen::default() })
            }
            false => self.desk.admit(&effect.call.tool, self.run.issue().id),
        };
        let permit = match admitted {
            Ok(permit) => permit,
            Err(open) => {
                count(&effect.call.tool, "stopped");
                let problem = format!("the tool does not respond: {}", open.last_error);
                if is_new {
                    return self.wait(effect, &problem, open.after).await;
                }
                self.pause = self.pause.max(open.after);
                return self.give_up_late(effect, &problem).await;
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

    /// Leaves a call to the next run, because no time is left in this one.
    async fn postpone(&self, effect: Effect) -> Result<Effect, ToolStop> {
        let reason = format!("no time is left for a call of `{}`", effect.call.tool);
        if effect.status == EffectStatus::Started {
            return Err(ToolStop::Later { after: self.pause, reason });
        }
        // Recorded as waiting: otherwise it would be made after the user has written "stop", and never expire.
        let problem = effect.problem.clone().unwrap_or(reason);
        self.wait(effect, &problem, Duration::ZERO).await
    }

    /// Whether a call that a person has approved, and that could not be made at once, is not made any more.
    fn is_void(&self, effect: &Effect) -> bool {
        effect.age >= EFFECT_RESOLVE_FOR || self.is_followed_by_a_message(effect)
    }

    /// A call that a person has approved cannot be made now. Nothing has begun, so it can be ended without a doubt.
    async fn wait(
        &self,
        effect: Effect,
        problem: &str,
        after: Duration,
    ) -> Result<Effect, ToolStop> {
        let problem = text::one_line(problem, PROBLEM_BYTES_MAX);
        if self.is_followed_by_a_message(&effect) {
            let told = "the user wrote again; ask for the call again if it is still wanted, a person approves it again";
            let failed = EffectOutcome::Failed(failure(&format!("not made: {problem}; {told}")));
            return self.end(effect, failed).await;
        }
        if effect.age >= EFFECT_RESOLVE_FOR {
            let result = failure(&format!("not made: {problem}"));
            return self.end(effect, EffectOutcome::Expired { result, problem }).await;
        }
        let reason = format!("tool `{}`: {problem}", effect.call.tool);
        self.end(effect, EffectOutcome::Waiting(problem)).await?;
        Err(ToolStop::Later { after: after.max(self.pause), reason })
    }

    /// Whether the user wrote after a person had approved the call.
    fn is_followed_by_a_message(&self, effect: &Effect) -> bool {
        let is_decision = |event: &&EventLog| {
            let payload = serde_json::from_str::<Json>(&event.payload).unwrap_or_default();
            event.source == DECISION_SOURCE && payload["draft"].as_i64() == effect.draft
        };
        let decision = self.run.events().iter().find(is_decision);
        let decided = decision.map(|event| event.id).unwrap_or_default();
        self.conversation.newest_message.is_some_and(|message| message > decided)
    }

    /// Tries a call without an outcome again later, or gives it to a person.
    async fn give_up_late(&self, effect: Effect, problem: &str) -> Result<Effect, ToolStop> {
        let problem = text::one_line(problem, PROBLEM_BYTES_MAX);
        if effect.age >= EFFECT_RESOLVE_FOR {
            return self.end(effect, EffectOutcome::Unknown(problem)).await;
        }
        let reason = format!("tool `{}`: {problem}", effect.call.tool);
        Err(ToolStop::Later { after: self.pause, reason })
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
        self.unavailable.insert(effect.call.tool.clone());
        self.give_up_late(effect, &problem).await
    }

    fn request_of(&self, call: &PlannedCall, key: Uuid) -> ToolRequest {
        let arguments = call.arguments.clone();
        ToolRequest::new(self.run.issue(), self.user(), &call.tool, arguments, key.to_string())
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
        let (attempted, response) = self.desk.apart(effect_call.make()).await?;
        report(permit, &response);
        if let (Attempted::Unresolved(_), ToolResponse::Failed(_)) = (&attempted, &response) {
            self.unavailable.insert(call.tool.clone());
        }
        match attempted {
            Attempted::Ended(effect) => Ok(effect),
            // It is unknown, or will be at the next run.
            Attempted::Unresolved(effect)
                if recovery == ToolRecovery::Person || effect.status == EffectStatus::Unknown =>
            {
                Err(ToolStop::Person(UnresolvedCall::unknown(&effect)))
            }
            Attempted::Unresolved(effect) => {
                let problem = effect.problem.as_deref().unwrap_or_default();
                let reason = format!("tool `{}` gave no outcome: {problem}", call.tool);
                Err(ToolStop::Later { after: self.pause, reason })
            }
            Attempted::InProgress(left) => Err(in_progress(&call, left)),
            // The worker discards the result of this run.
            Attempted::Fenced => {
                Err(HandlerError::unavailable("the claim of the issue is lost").into())
            }
        }
    }
}

/// Tells the breaker of a tool what a call says about it.
fn report(permit: Option<CallPermit<'_>>, response: &ToolResponse) {
    match (permit, response) {
        (Some(permit), ToolResponse::Useful) => permit.succeeded(),
        (Some(permit), ToolResponse::Failed(problem)) => {
            permit.tool_failed(problem, Instant::now());
        }
        _ => {}
    }
}

fn in_progress(call: &PlannedCall, left: Duration) -> ToolStop {
    let reason = format!("a call of tool `{}` by an earlier run may be in progress", call.tool);
    // Usually it ends long before its lease.
    ToolStop::Later { after: left.min(Duration::from_secs(1)), reason }
}

/// What the model is told about a call with an outcome.
fn tool_outcome(effect: &Effect) -> ToolOutcome {
    let content = effect.result.clone().unwrap_or_else(|| failure(TOLD_UNKNOWN));
    ToolOutcome {
        content: with_time(content, effect.ended_at),
        success: effect.status == EffectStatus::Done,
        arguments: effect.call.arguments.clone(),
        effect: None,
    }
}

/// Adds to the outcome of an earlier run when it was recorded: a request may be open for weeks, and its results old.
fn with_time(content: String, ended_at: Option<Timestamp>) -> String {
    match (ended_at, serde_json::from_str(&content)) {
        (Some(ended_at), Ok(Json::Object(mut fields))) => {
            fields.insert("at".to_owned(), ended_at.to_rfc3339().into());
            escaped_json(&fields)
        }
        _ => content,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outcome_of_an_earlier_run_has_its_time() {
        let ended_at = Some(Timestamp::from_millis(1_000));
        let dated = with_time(success(&json!({"refunded": "<1>"})), ended_at);
        let read: Json = serde_json::from_str(&dated).unwrap();
        let expected =
            json!({"at": "1970-01-01T00:00:01.000Z", "ok": true, "result": {"refunded": "<1>"}});
        assert_eq!(read, expected);
        assert!(!dated.contains('<'), "{dated}");
        // The result of this run, and one that is no JSON, stay as they are.
        assert_eq!(with_time("{}".to_owned(), None), "{}");
        assert_eq!(with_time("text".to_owned(), ended_at), "text");
    }
}
