//! Handles one run: all pending events of one issue become one reply of a model.
//!
//! Upstream: a worker of `headwater-issue`, with `on_new_event = Supersede`. Downstream: the model, its tools, and the
//! resolution, whose replies `outbound` delivers after the commit.
//!
//! Guarantees: model calls, and tool calls that go through the effect ledger, are the only external effects of a run, so a run
//! that fails anywhere is simply repeated. A
//! model call that fails because of our settings or the service costs the issue no attempt: the run is deferred, however
//! long the outage lasts. If the text of the conversation is the cause, or the model gives no complete answer, the issue
//! is handed over to a person. An incomplete answer is never sent.
//! Before a run completes it asks the database once more for newer events; if there are any, the worker discards the
//! answer and starts a run with all of them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use headwater_issue::{HandlerError, Issue, IssueError, IssueHandler, Resolution, Run, Store};
use metrics::counter;
use serde_json::json;
use tracing::{info, warn};
use uuid::Uuid;

use crate::desk::breaker::CallPermit;
use crate::desk::budget::{self, Ledger, ModelRunResult, TokenReservation};
use crate::desk::conversation::{Conversation, ConversationEntry};
use crate::desk::desk_config::DeskConfig;
use crate::desk::draft::{DraftLookup, DraftOutcome};
use crate::desk::effect_call::UnresolvedCall;
use crate::desk::effects::EffectLedger;
use crate::desk::model::{
    Fault, IncompleteReason, LanguageModel, ModelAnswer, ModelError, ModelPrompt, TokenUsage, Turn,
    estimate_tokens,
};
use crate::desk::model_endpoints::{
    DEFAULT_MODEL, GuardedModel, MODEL_FALLBACKS, ModelEndpoint, ModelEndpointState,
    ModelEndpoints, NoEndpoint, UnansweredCall,
};
use crate::desk::model_runs::ModelRunRecord;
use crate::desk::policy::{self, IntegrationPolicy};
use crate::desk::prompt::{self, SystemPrompt};
use crate::desk::prompt_template::PromptValues;
use crate::desk::prompt_versions::{PromptSource, PromptVersions};
use crate::desk::provisional::{ProvisionalAnswers, ProvisionalWriter};
use crate::desk::redaction::{Redaction, RedactionRules};
use crate::desk::resolution::{
    ModelOutcome, answer_context, record_only, resolve, resolve_planned, resolve_unresolved,
};
use crate::desk::session::{RunSession, StepWriter};
use crate::desk::token_reservations::{OpenReservation, ReservationOutcome, TokenAccounting};
use crate::desk::tool_calls::{DeskTools, RunTools, ToolStop};
use crate::desk::toolbox::Toolbox;
use crate::desk::tools::{TicketSearch, ToolEffect, rejected};
use crate::limits::{
    OUTPUT_LIMIT_RAISES_MAX, PROMPT_THREAD_BYTES_MAX, PROMPT_THREAD_BYTES_MIN, TOOL_ROUNDS_MAX,
};

/// Counter of failed model calls. Labels: `model`, `fault` (`ours`, `theirs`, `content`).
pub const MODEL_FAILURES: &str = "headwater_model_failures_total";

/// Factor by which the limit of output tokens grows after an answer that reached it.
const OUTPUT_LIMIT_FACTOR: u32 = 4;

/// Longest pause before a deferred run calls a failing model again.
const FAILING_MODEL_PAUSE_MAX: Duration = Duration::from_secs(300);

/// Pause before a failed heartbeat is repeated.
const HEARTBEAT_RETRY_PAUSE: Duration = Duration::from_millis(250);

/// Answers issues with a language model.
pub struct Desk {
    models: ModelEndpoints,
    search: Arc<dyn TicketSearch>,
    accounting: TokenAccounting,
    step_writer: StepWriter,
    config: DeskConfig,
    /// By integration.
    policies: HashMap<String, IntegrationPolicy>,
    drafts: Option<Arc<dyn DraftLookup>>,
    prompts: Option<PromptVersions>,
    provisional: Option<ProvisionalAnswers>,
    /// Without it, nothing is redacted.
    redaction: Option<Arc<RedactionRules>>,
    tools: DeskTools,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("models", &self.models).finish_non_exhaustive()
    }
}

/// One call of a model, whichever endpoint answers it.
struct ModelCall<'a> {
    run: &'a Run,
    prompt: &'a ModelPrompt,
    /// The author of the newest message, whose budget is charged.
    author: Option<&'a ConversationEntry>,
    may_be_empty: bool,
    provisional: Option<&'a ProvisionalWriter>,
}

/// Why a run ends without an answer of the model.
enum Stop {
    /// The token budget of the issue is used up.
    BudgetExceeded,
    /// The model gives no answer that can be sent, for this reason.
    NoAnswer(String),
    /// A person has to look at tool calls.
    Person(Vec<UnresolvedCall>),
    /// A model call failed.
    Model(ModelError),
    Failed(HandlerError),
}

impl From<HandlerError> for Stop {
    fn from(error: HandlerError) -> Self {
        Self::Failed(error)
    }
}

impl From<ToolStop> for Stop {
    fn from(stop: ToolStop) -> Self {
        match stop {
            ToolStop::Later { after, reason } => Self::Failed(HandlerError::defer(after, reason)),
            ToolStop::Failed(error) => Self::Failed(error),
            ToolStop::Person(call) => Self::Person(vec![call]),
        }
    }
}

impl Desk {
    /// Creates a desk. `search` and `ledger` are usually the ticket store. `store` is the store of the issues.
    pub fn new(
        model: Arc<dyn LanguageModel>,
        search: Arc<dyn TicketSearch>,
        ledger: Arc<dyn Ledger>,
        store: Arc<dyn Store>,
        config: DeskConfig,
    ) -> Self {
        let (accounting, step_writer) = (TokenAccounting::new(ledger), StepWriter::new(store));
        let default = ModelEndpoint { id: DEFAULT_MODEL.to_owned(), model, prices: config.prices };
        let models = ModelEndpoints::new(vec![default], config.unreachable_pause);
        Self {
            models,
            search,
            accounting,
            step_writer,
            config,
            policies: HashMap::new(),
            drafts: None,
            prompts: None,
            provisional: None,
            redaction: None,
            tools: DeskTools::default(),
        }
    }

    /// Sets the models, in the order in which runs try them, instead of the one of [`new`](Self::new). A run goes on with the
    /// next one if a call fails, unless the text of the conversation is the cause.
    ///
    /// # Panics
    ///
    /// If there is no model.
    pub fn with_models(self, models: Vec<ModelEndpoint>) -> Self {
        assert!(!models.is_empty(), "a desk needs a model");
        Self { models: ModelEndpoints::new(models, self.config.unreachable_pause), ..self }
    }

    /// Which models are called, as this process sees it.
    pub fn model_states(&self) -> Vec<ModelEndpointState> {
        self.models.states()
    }

    /// Sets the policies of integrations, by their ids. All others have the default policy.
    pub fn with_policies(self, policies: HashMap<String, IntegrationPolicy>) -> Self {
        Self { policies, ..self }
    }

    /// Sets where runs learn what became of the drafts of earlier runs. Without it, every draft is outdated by the next
    /// event.
    pub fn with_drafts(self, drafts: Arc<dyn DraftLookup>) -> Self {
        Self { drafts: Some(drafts), ..self }
    }

    /// Sets where the prompts of integrations are stored. Without it, all have the built-in one.
    pub fn with_prompts(self, prompts: Arc<dyn PromptSource>) -> Self {
        Self { prompts: Some(PromptVersions::new(prompts)), ..self }
    }

    /// Sets the tools beside the built-in ones, and the ledger of their effects.
    pub fn with_tools(self, tools: Toolbox, ledger: Arc<dyn EffectLedger>) -> Self {
        Self { tools: DeskTools::new(tools, ledger), ..self }
    }

    /// Sets where listeners of tickets see answers while they are being written. Without it, they do not.
    pub(crate) fn with_provisional(self, provisional: ProvisionalAnswers) -> Self {
        Self { provisional: Some(provisional), ..self }
    }

    /// Sets what is replaced by placeholders before the model sees it.
    pub(crate) fn with_redaction(self, rules: Arc<RedactionRules>) -> Self {
        Self { redaction: Some(rules), ..self }
    }

    /// Shows the answer to the listeners of the ticket while the model writes it, if it is certain to be posted.
    fn provisional_writer(
        &self,
        run: &Run,
        conversation: &Conversation,
        policy: &IntegrationPolicy,
        message_id: Uuid,
        redaction: &Redaction,
    ) -> Option<ProvisionalWriter> {
        let provisional = self.provisional.as_ref().filter(|_| run.issue().provider == "desk")?;
        // What the model writes beside a call that needs an approval is not posted.
        let is_certain = policy.is_certainly_auto(&answer_context(conversation, &[]))
            && !self.tools.may_need_approval(run.issue());
        if !is_certain {
            return None;
        }
        let ticket_id = Uuid::parse_str(&run.issue().external_issue_id).ok()?;
        let redaction = redaction.clone();
        let to_shown = move |text: &str| redaction.restore_beginning(text);
        Some(provisional.write((ticket_id, message_id, run.epoch().0), to_shown))
    }

    /// The prompt of the integration of an issue. If it is unknown, the run is deferred without an attempt.
    async fn system_prompt(&self, issue: &Issue) -> Result<SystemPrompt, HandlerError> {
        let Some(prompts) = &self.prompts else { return Ok(SystemPrompt::built_in()) };
        let values = PromptValues {
            integration: issue.integration.clone(),
            provider: issue.provider.clone(),
            date: budget::now().to_rfc3339()[..10].to_owned(),
            tools: self.tools.specs(issue).into_iter().map(|tool| tool.name).collect(),
        };
        prompts.prompt(&values).await.map_err(HandlerError::unavailable)
    }

    /// What became of the draft of the last run.
    async fn draft_outcome(&self, issue: &Issue) -> Result<Option<DraftOutcome>, HandlerError> {
        let (Some(drafts), Some(draft)) = (&self.drafts, Conversation::last_draft(issue)) else {
            return Ok(None);
        };
        // On its own task: a cancelled call would leave its connection in an unknown state.
        let (drafts, issue_id) = (Arc::clone(drafts), issue.id);
        let found = tokio::spawn(async move { drafts.draft_outcome(issue_id, draft).await }).await;
        let found = found.map_err(|panic| panic.to_string()).and_then(|found| found);
        let unavailable =
            |error| HandlerError::unavailable(format!("reading draft {draft}: {error}"));
        found.map(Some).map_err(unavailable)
    }

    /// Waits a bounded time for tool calls and pending token settlements, and until the sessions of runs without a result are
    /// stored.
    /// Call it after the last run has ended.
    pub async fn close(&self) {
        let closing_provisional = async {
            if let Some(provisional) = &self.provisional {
                provisional.close().await;
            }
        };
        tokio::join!(
            self.accounting.wait_until_settled(),
            self.step_writer.close(),
            closing_provisional,
            self.tools.close()
        );
    }

    /// Calls the model, and the tools it requests, until it answers without a tool call.
    async fn run_model(
        &self,
        run: &Run,
        (system, mut endpoints, tools): (&SystemPrompt, Vec<&GuardedModel>, &mut RunTools<'_>),
        conversation: &Conversation,
        session: &RunSession<'_>,
        record: &mut ModelRunRecord<'_>,
        (redaction, provisional): (&Redaction, Option<&ProvisionalWriter>),
    ) -> Result<ModelOutcome, Stop> {
        if !tools.unresolved().is_empty() {
            return Err(Stop::Person(tools.unresolved().to_vec()));
        }
        // Only the model and the session see placeholders; tools, budgets and replies have the values.
        let redacted = redaction.conversation(conversation);
        let tokens_max = self.config.output_tokens_max;
        let mut prompt = prompt::render(system, &redacted, tools.specs().to_vec(), tokens_max);
        prompt.turns.extend(tools.known_turns(redaction));
        let inputs = json!({
            "prompt_version": system.version,
            "issue_id": run.issue().id.0, "epoch": run.epoch().0, "attempt": run.attempt(),
            "event_log_ids": run.events().iter().map(|event| event.id.0).collect::<Vec<_>>(),
        });
        session.record_prompt(&prompt, inputs);
        for (call, result) in tools.settled() {
            let call = redaction.redact_call(call);
            session.record_tool_call(&call, &redaction.redact_outcome(result.clone()));
        }
        let author = conversation.newest_user_message();
        let mut outcome =
            ModelOutcome { tools: tools.known_names().collect(), ..ModelOutcome::default() };
        let (mut round, mut raises, mut thread_bytes_max) = (0, 0, PROMPT_THREAD_BYTES_MAX);
        let mut was_refused = false;
        loop {
            if round == TOOL_ROUNDS_MAX {
                prompt.tools.clear();
            }
            let may_be_empty = !outcome.effects.is_empty();
            let call = ModelCall { run, prompt: &prompt, author, may_be_empty, provisional };
            let completing = self.complete(&call, &mut endpoints, session, record);
            let answer = match completing.await {
                Ok(answered) => answered,
                Err(Stop::Model(ModelError::TooLong(_)))
                    if thread_bytes_max > PROMPT_THREAD_BYTES_MIN =>
                {
                    thread_bytes_max /= 2;
                    prompt::trim(&mut prompt, &redacted, thread_bytes_max);
                    continue;
                }
                // The service accepted the lower limit, and does not allow this one.
                Err(Stop::Model(ModelError::InvalidRequest(reason))) if raises > 0 => {
                    return Err(Stop::NoAnswer(reason));
                }
                Err(stop) => return Err(stop),
            };
            match answer.incomplete {
                Some(IncompleteReason::Length) if raises < OUTPUT_LIMIT_RAISES_MAX => {
                    raises += 1;
                    prompt.output_tokens_max =
                        prompt.output_tokens_max.saturating_mul(OUTPUT_LIMIT_FACTOR);
                    continue;
                }
                Some(IncompleteReason::Length) => {
                    let max = prompt.output_tokens_max;
                    let reason = format!("the answer is longer than {max} tokens");
                    return Err(Stop::NoAnswer(reason));
                }
                Some(IncompleteReason::Refused) => {
                    return Err(Stop::NoAnswer("the model refused to answer".to_owned()));
                }
                None => {}
            }
            outcome.text = redaction.restore(&answer.text);
            if answer.calls.is_empty() {
                return Ok(outcome);
            }
            prompt.turns.push(Turn::Assistant(answer.clone()));
            if prompt.tools.is_empty() {
                // What it wrote beside the calls is no answer.
                outcome.text.clear();
                if std::mem::replace(&mut was_refused, true) {
                    let problem = "the model called tools until the limit and did not answer";
                    let stop = Stop::NoAnswer(problem.to_owned());
                    return if may_be_empty { Ok(outcome) } else { Err(stop) };
                }
                for call in &answer.calls {
                    let result = rejected(call, "no more calls are possible; answer without them");
                    session.record_tool_call(call, &result);
                    let (call_id, content) = (call.id.clone(), result.content);
                    prompt.turns.push(Turn::ToolResult { call_id, content });
                }
                continue;
            }
            for call in &answer.calls {
                let (search, scope) = (self.search.as_ref(), self.config.search);
                let real = redaction.restore_call(call);
                let result = tools.call(&real, search, scope).await?;
                let result = redaction.redact_outcome(result);
                session.record_tool_call(call, &result);
                outcome.tools.push(call.name.clone());
                let content = result.content;
                prompt.turns.push(Turn::ToolResult { call_id: call.id.clone(), content });
                // An effect requested twice happens once.
                outcome.effects.extend(result.effect.filter(|effect| !outcome.has_effect(effect)));
            }
            // A person who takes over decides about everything else, too.
            let planned = tools.planned();
            let reason = String::new();
            if !planned.is_empty() && !outcome.has_effect(&ToolEffect::HandOver { reason }) {
                return Ok(ModelOutcome { planned, ..outcome });
            }
            round += 1;
        }
    }

    /// Pause before the run calls a failing model again. It grows with the age of the oldest event.
    fn pause(&self, run: &Run) -> Duration {
        let waited = run.events().first().map(|event| budget::now().since(event.created_at));
        let pause = (waited.unwrap_or_default() / 10).min(FAILING_MODEL_PAUSE_MAX);
        pause.max(self.config.unreachable_pause)
    }

    /// What happens after a run without an answer of the model: the issue is handed over, or the run is deferred.
    fn after_stop(&self, run: &Run, stop: Stop) -> Result<ModelOutcome, HandlerError> {
        let reason = match stop {
            Stop::BudgetExceeded => {
                return Ok(ModelOutcome::budget_exceeded(self.config.budget.issue_tokens_max));
            }
            Stop::Failed(error) => return Err(error),
            Stop::NoAnswer(reason) => reason,
            Stop::Person(calls) => return Ok(ModelOutcome::unresolved(calls)),
            Stop::Model(error) if error.fault() == Fault::Content => error.to_string(),
            Stop::Model(error) => {
                let after = match &error {
                    ModelError::RateLimited { after, .. } => after.unwrap_or_default(),
                    _ => Duration::ZERO,
                };
                return Err(HandlerError::defer(after.max(self.pause(run)), error));
            }
        };
        Ok(ModelOutcome::no_answer(reason))
    }

    /// Reserves the tokens of one model call.
    async fn reserve(
        &self,
        run: &Run,
        prompt: &ModelPrompt,
        prompt_tokens: u64,
        author: Option<&ConversationEntry>,
    ) -> Result<OpenReservation<'_>, Stop> {
        let now = budget::now();
        let tokens = prompt_tokens + u64::from(prompt.output_tokens_max);
        let user = author.and_then(|author| author.name.as_deref());
        let association = author.and_then(|author| author.association.as_deref());
        let reservation = TokenReservation {
            is_stranger: policy::is_stranger(association),
            ..TokenReservation::new(run.issue(), user, now, tokens, prompt_tokens)
        };
        let rest_of_day = reservation.rest_of_day(now);
        let deferred = |after, reason: &str| Err(HandlerError::defer(after, reason).into());
        let budget = &self.config.budget;
        match self.accounting.reserve(reservation, budget).await {
            Ok(ReservationOutcome::Granted(open)) => Ok(open),
            Ok(ReservationOutcome::IssueBudgetExceeded) => Err(Stop::BudgetExceeded),
            Ok(ReservationOutcome::DayBudgetExceeded) => {
                deferred(rest_of_day, &used_up("integration", "day", budget.day_tokens_max))
            }
            Ok(ReservationOutcome::UserBudgetExceeded) => {
                deferred(rest_of_day, &used_up("author", "user", budget.user_tokens_max))
            }
            Ok(ReservationOutcome::StrangersBudgetExceeded) => {
                let tokens_max = budget.strangers_tokens_max;
                deferred(rest_of_day, &used_up("strangers", "strangers", tokens_max))
            }
            Ok(ReservationOutcome::Pending) => {
                let reason = "the remaining token budget is reserved by other runs; retrying when they have settled";
                deferred(self.config.unreachable_pause, reason)
            }
            // Storage failure, not specific to this issue: no attempt is counted.
            Err(error) => {
                let reason = format!("token ledger unavailable: {error}");
                Err(HandlerError::unavailable(reason).into())
            }
        }
    }

    /// Calls the endpoints in order until one answers. The one that answered is the first one of the next call, so that a run
    /// stays with one model if it can.
    async fn complete(
        &self,
        call: &ModelCall<'_>,
        endpoints: &mut [&GuardedModel],
        session: &RunSession<'_>,
        record: &mut ModelRunRecord<'_>,
    ) -> Result<ModelAnswer, Stop> {
        let issue = call.run.issue();
        let mut unanswered = UnansweredCall::default();
        for place in 0..endpoints.len() {
            let endpoint = endpoints[place];
            let permit = match endpoint.breaker.admit(issue.id, Instant::now()) {
                Ok(permit) => permit,
                Err(open) => {
                    unanswered.skipped(open);
                    continue;
                }
            };
            match self.call_endpoint(call, endpoint, permit, record).await {
                Ok((answer, usage)) => {
                    session.record_answer(&endpoint.label, &answer, usage);
                    if place > 0 {
                        let (integration, model) =
                            (issue.integration.clone(), endpoint.label.clone());
                        counter!(MODEL_FALLBACKS, "integration" => integration, "model" => model)
                            .increment(1);
                    }
                    endpoints[..=place].rotate_right(1);
                    return Ok(answer);
                }
                Err(Stop::Model(error)) if error.fault() != Fault::Content => {
                    if place + 1 < endpoints.len() {
                        let model = &endpoint.label;
                        warn!(issue_id = %issue.id, model, %error, "model call failed; trying the next model");
                    }
                    unanswered.failed(endpoint, error);
                }
                Err(stop) => return Err(stop),
            }
        }
        Err(match unanswered.into_end(self.pause(call.run)) {
            NoEndpoint::Failed(error) => Stop::Model(error),
            NoEndpoint::Waiting(error) => Stop::Failed(error),
        })
    }

    /// Calls one endpoint once, within the token budgets.
    async fn call_endpoint(
        &self,
        &ModelCall { run, prompt, author, may_be_empty, provisional }: &ModelCall<'_>,
        GuardedModel { endpoint, label, .. }: &GuardedModel,
        permit: CallPermit<'_>,
        record: &mut ModelRunRecord<'_>,
    ) -> Result<(ModelAnswer, TokenUsage), Stop> {
        let count_failure = |error: &ModelError| {
            let fault = error.fault().as_str();
            counter!(MODEL_FAILURES, "model" => label.clone(), "fault" => fault).increment(1);
        };
        let prompt_tokens = prompt.tokens_estimate();
        // Token budgets do not apply to a free model.
        let open = match endpoint.model.is_free() {
            true => None,
            false => Some(self.reserve(run, prompt, prompt_tokens, author).await?),
        };
        // If newer events cancel the run here, dropping `open` settles it with the prompt tokens, and dropping `record`
        // records them.
        record.begin_call(label, endpoint.prices, prompt_tokens);
        // What an earlier call wrote is not the answer.
        provisional.inspect(|writer| writer.clear());
        let show = |chunk: &str| {
            provisional.inspect(|writer| writer.append(chunk));
        };
        let answered = match endpoint.model.complete(prompt).await {
            Ok(chunks) => chunks.collect_with(show).await,
            Err(error) => Err(error),
        };
        let answer = match answered {
            Ok(answer) => answer,
            Err(error) => {
                // Otherwise an outage would use up the budget of the issues that test the model.
                let used = match permit.was_failing {
                    true => 0,
                    false => tokens_used_by_failure(&error, prompt_tokens),
                };
                count_failure(&error);
                match error.fault() {
                    Fault::Content => permit.succeeded(),
                    Fault::Ours | Fault::Theirs => permit.failed(&error, Instant::now()),
                }
                record.end_call(TokenUsage { input_tokens: used, output_tokens: 0 });
                settle(open, used).await;
                return Err(Stop::Model(error));
            }
        };
        let estimate = TokenUsage {
            input_tokens: prompt_tokens,
            output_tokens: estimate_tokens(answer.text.len()),
        };
        let usage = answer.usage.unwrap_or(estimate);
        record.end_call(usage);
        let is_empty = answer.text.trim().is_empty() && answer.calls.is_empty();
        if is_empty && answer.incomplete.is_none() && !may_be_empty {
            let error = ModelError::InvalidResponse("the answer is empty".to_owned());
            count_failure(&error);
            permit.failed(&error, Instant::now());
            settle(open, usage.total()).await;
            return Err(Stop::Model(error));
        }
        permit.succeeded();
        settle(open, usage.total()).await;
        Ok((answer, usage))
    }
}

#[async_trait]
impl IssueHandler for Desk {
    async fn handle(&self, run: Run) -> Result<Resolution, HandlerError> {
        let default = IntegrationPolicy::default();
        let policy = self.policies.get(&run.issue().integration).unwrap_or(&default);
        let completed = run.completed_event_log_id();
        let draft = self.draft_outcome(run.issue()).await?;
        let conversation =
            Conversation::load(run.issue(), run.events(), completed, policy, draft.as_ref());
        // Also without an answer: what a person has approved is called, and what was begun is brought to its end.
        let mut tools = RunTools::open(&self.tools, &run, &conversation, self.pause(&run)).await?;
        if !conversation.needs_answer {
            return Ok(match tools.unresolved() {
                [] => record_only(&run, &conversation, None),
                calls => resolve_unresolved(&run, &conversation, calls, policy),
            });
        }
        let system = self.system_prompt(run.issue()).await?;
        let endpoints = self.models.in_order(&policy.models);
        let first = endpoints.first().map_or("", |endpoint| endpoint.label.as_str());
        let session = RunSession::new(&self.step_writer, &run, first);
        // Ends before the deadline of the run, which would count an attempt.
        let time_max = run.time_left() * 9 / 10;
        let mut record = ModelRunRecord::new(&self.accounting, &run, system.version, session.id());
        let telling = (&system, endpoints, &mut tools);
        let message_id = Uuid::now_v7();
        let redaction = self.redaction.as_ref().map(Redaction::new).unwrap_or_default();
        let provisional =
            self.provisional_writer(&run, &conversation, policy, message_id, &redaction);
        let texts = (&redaction, provisional.as_ref());
        let answering = self.run_model(&run, telling, &conversation, &session, &mut record, texts);
        let answering = tokio::time::timeout(time_max, answering);
        let outcome = answering.await.unwrap_or_else(|_| {
            let problem = format!("no answer within {time_max:?}");
            Err(Stop::Model(ModelError::Unavailable(problem)))
        });
        let (outcome, result) = match outcome {
            Ok(outcome) if !outcome.planned.is_empty() => {
                // It is a note for the person who decides, and is not posted.
                provisional.as_ref().inspect(|writer| writer.clear());
                (outcome, ModelRunResult::Done)
            }
            Ok(outcome) => (outcome.or_default_text(), ModelRunResult::Done),
            Err(stop) => {
                provisional.as_ref().inspect(|writer| writer.clear());
                let outcome = match self.after_stop(&run, stop) {
                    Ok(outcome) => outcome,
                    Err(error) => {
                        record.finish(ModelRunResult::Failed);
                        return Err(error);
                    }
                };
                info!(issue_id = %run.issue().id, effects = ?outcome.effects, "handing the issue over to a person");
                (outcome, ModelRunResult::HandedOver)
            }
        };
        let (usage, cost) = (record.usage(), record.cost());
        let outcome = ModelOutcome { usage, cost, message_id: Some(message_id), ..outcome };
        let mut resolution = match outcome.planned.is_empty() {
            false => resolve_planned(&run, &conversation, outcome, &session),
            true => {
                resolve(self.config.supersede_max, &run, &conversation, outcome, &session, policy)
            }
        };
        // Query the database instead of relying on notifications. If there are newer events, the worker cancels this
        // run at the next await, unless the supersede limit is reached.
        check_for_newer_events(&run).await?;
        tokio::task::yield_now().await;
        // After the last await: a run that is superseded before leaves its session and its record, too.
        record.finish(result);
        provisional.into_iter().for_each(ProvisionalWriter::finish);
        resolution.outbox.extend(session.into_rows());
        Ok(resolution)
    }
}

/// Repeats the heartbeat until the database answers, because the model call was already paid for. The worker cancels
/// the run when the claim is lost.
async fn check_for_newer_events(run: &Run) -> Result<(), IssueError> {
    loop {
        match run.heartbeat().await {
            Err(error) if error.is_transient() && !run.is_cancelled() => {
                warn!(issue_id = %run.issue().id, %error, "check for newer events failed; retrying");
                tokio::time::sleep(HEARTBEAT_RETRY_PAUSE).await;
            }
            result => return result,
        }
    }
}

/// Why a run is deferred to the next day; names the setting and the command that helps.
fn used_up(of: &str, setting: &str, tokens_max: u64) -> String {
    format!(
        "the daily token budget of the {of} is used up: raise `desk.{setting}_tokens_max` = {tokens_max} and restart, which \
         continues the waiting issues, or wait until the next UTC day"
    )
}

/// Settles a reservation, if there is one.
async fn settle(open: Option<OpenReservation<'_>>, used: u64) {
    if let Some(open) = open {
        open.settle(used).await;
    }
}

/// Tokens that a failed model call may have used.
fn tokens_used_by_failure(error: &ModelError, prompt_tokens: u64) -> u64 {
    match error {
        ModelError::Unavailable(_) | ModelError::InvalidResponse(_) => prompt_tokens,
        // The service did not process the request.
        _ => 0,
    }
}
