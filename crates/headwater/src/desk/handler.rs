//! Handles one run: all pending events of one issue become one reply of a model.
//!
//! Upstream: a worker of `headwater-issue`, with `on_new_event = Supersede`. Downstream: the model, its tools, and the
//! resolution, whose replies `outbound` delivers after the commit.
//!
//! Guarantees: model calls are the only external effect of a run, so a run that fails anywhere is simply repeated.
//! Before a run completes it asks the database once more for newer events; if there are any, the worker discards the
//! answer and starts a run with all of them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use headwater_analytics::RunMetrics;
use headwater_issue::{
    DebounceWindow, EventLogId, HandlerError, IssueError, IssueHandler, OnNewEvent, Resolution,
    Run, Store, WorkerConfig,
};
use serde_json::json;
use tracing::{info, warn};
use uuid::Uuid;

use crate::desk::budget::{self, Ledger, TokenBudget, TokenReservation};
use crate::desk::conversation::{Conversation, ConversationEntry};
use crate::desk::model::{
    LanguageModel, ModelAnswer, ModelError, ModelPrompt, TokenUsage, Turn, estimate_tokens,
};
use crate::desk::prompt;
use crate::desk::reply::{DeskReply, ReplyTarget};
use crate::desk::session::{RunSession, StepWriter};
use crate::desk::token_reservations::{OpenReservation, ReservationOutcome, TokenAccounting};
use crate::desk::tools::{self, SearchScope, TicketSearch, ToolEffect};
use crate::limits::{REPLY_BYTES_MAX, TOOL_ROUNDS_MAX};
use crate::text;
use crate::tickets::Author;

/// Longest pause before a deferred run calls an unreachable model again.
const UNREACHABLE_PAUSE_MAX: Duration = Duration::from_secs(300);

/// Pause before a failed heartbeat is repeated.
const HEARTBEAT_RETRY_PAUSE: Duration = Duration::from_millis(250);

/// Settings of the desk.
#[derive(Clone, Copy, Debug)]
pub struct DeskConfig {
    /// Debounce: a run starts when no event has arrived for this long. Default: 800 ms.
    pub quiet: Duration,
    /// Upper bound of the debounce delay. Default: 5 s.
    pub max_wait: Duration,
    /// Maximum events per run. Default: 200.
    pub events_max: usize,
    /// How many runs in a row newer events may supersede; the next run is finished. Default: 5.
    pub supersede_max: u32,
    /// Maximum tokens of one answer. Default: 1024.
    pub output_tokens_max: u32,
    /// Minimum pause before a run calls an unreachable or rate-limited model again. Such a run counts no attempt.
    /// Default: 5 s.
    pub unreachable_pause: Duration,
    /// Token limits.
    pub budget: TokenBudget,
    /// Which tickets the model may search. Default: those of the same user.
    pub search: SearchScope,
    /// Price of the model's tokens.
    pub prices: Prices,
}

/// Price per million tokens, in the currency of the reports. Default: zero, which means unknown: no cost is reported.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prices {
    /// Price of input tokens.
    pub input: f64,
    /// Price of output tokens.
    pub output: f64,
}

impl Prices {
    fn cost(&self, usage: TokenUsage) -> Option<f64> {
        let known = *self != Self::default();
        let of = |tokens: u64, price: f64| tokens as f64 * price / 1e6;
        known.then(|| of(usage.input_tokens, self.input) + of(usage.output_tokens, self.output))
    }
}

impl Default for DeskConfig {
    fn default() -> Self {
        Self {
            quiet: Duration::from_millis(800),
            max_wait: Duration::from_secs(5),
            events_max: 200,
            supersede_max: 5,
            output_tokens_max: 1024,
            unreachable_pause: Duration::from_secs(5),
            budget: TokenBudget::default(),
            search: SearchScope::default(),
            prices: Prices::default(),
        }
    }
}

impl DeskConfig {
    /// The debounce window for recorders of desk events.
    pub fn debounce_window(&self) -> DebounceWindow {
        DebounceWindow {
            quiet_for: self.quiet,
            max_wait: self.max_wait,
            events_max: self.events_max,
        }
    }

    /// Settings of a worker that runs the desk; everything else as in `others`.
    pub fn worker(&self, others: WorkerConfig) -> WorkerConfig {
        WorkerConfig {
            events_max: self.events_max,
            on_new_event: OnNewEvent::Supersede { times_max: self.supersede_max },
            ..others
        }
    }
}

/// Answers issues with a language model.
pub struct Desk {
    model: Arc<dyn LanguageModel>,
    search: Arc<dyn TicketSearch>,
    accounting: TokenAccounting,
    step_writer: StepWriter,
    config: DeskConfig,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("model", &self.model).finish_non_exhaustive()
    }
}

/// The result of all model calls of a run.
#[derive(Debug, Default)]
struct ModelOutcome {
    text: String,
    effects: Vec<ToolEffect>,
    /// Sum over all model calls of the run.
    usage: TokenUsage,
}

/// Why a run ends without an answer of the model.
enum Stop {
    /// The token budget of the issue is used up.
    BudgetExceeded,
    Failed(HandlerError),
}

impl From<HandlerError> for Stop {
    fn from(error: HandlerError) -> Self {
        Self::Failed(error)
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
        Self { model, search, accounting, step_writer, config }
    }

    /// Waits a bounded time for pending token settlements, and until the sessions of runs without a result are stored.
    /// Call it after the last run has ended.
    pub async fn close(&self) {
        tokio::join!(self.accounting.wait_until_settled(), self.step_writer.close());
    }

    /// Calls the model, and the tools it requests, until it answers without a tool call.
    async fn run_model(
        &self,
        run: &Run,
        conversation: &Conversation,
        session: &RunSession<'_>,
    ) -> Result<ModelOutcome, Stop> {
        let specs = tools::specs(run.issue());
        let mut prompt = prompt::render(conversation, specs.clone(), self.config.output_tokens_max);
        let inputs = json!({
            "issue_id": run.issue().id.0, "epoch": run.epoch().0, "attempt": run.attempt(),
            "event_log_ids": run.events().iter().map(|event| event.id.0).collect::<Vec<_>>(),
        });
        session.record_prompt(&prompt, inputs);
        let mut outcome = ModelOutcome::default();
        for round in 0..=TOOL_ROUNDS_MAX {
            if round == TOOL_ROUNDS_MAX {
                prompt.tools.clear();
            }
            let (answer, usage) = self.complete(run, &prompt, session).await?;
            outcome.usage = outcome.usage.plus(usage);
            outcome.text = answer.text.clone();
            if answer.calls.is_empty() || prompt.tools.is_empty() {
                break;
            }
            prompt.turns.push(Turn::Assistant(answer.clone()));
            for call in &answer.calls {
                let user = conversation.user_id.as_deref();
                let (search, scope) = (self.search.as_ref(), self.config.search);
                let result = tools::call(call, &specs, run.issue(), search, scope, user).await;
                session.record_tool_call(call, &result);
                let content = result.content;
                prompt.turns.push(Turn::ToolResult { call_id: call.id.clone(), content });
                // An effect requested twice happens once.
                outcome.effects.extend(result.effect.filter(|effect| !outcome.has_effect(effect)));
            }
        }
        Ok(outcome)
    }

    /// Maps a model error to when, and whether, the run is repeated.
    fn retry_policy(&self, run: &Run, error: ModelError) -> HandlerError {
        // The pause grows with the age of the oldest event.
        let waited = run.events().first().map(|event| budget::now().since(event.created_at));
        let pause = (waited.unwrap_or_default() / 10).min(UNREACHABLE_PAUSE_MAX);
        let pause = pause.max(self.config.unreachable_pause);
        match error {
            // The error is not specific to this issue, so no attempt is counted.
            ModelError::RateLimited { after, .. } => {
                HandlerError::defer(after.unwrap_or_default().max(pause), error)
            }
            ModelError::Unreachable(_) => HandlerError::defer(pause, error),
            ModelError::Rejected(_) => HandlerError::quarantine(error),
            _ => HandlerError::retry(error),
        }
    }

    /// Reserves the tokens of one model call.
    async fn reserve(
        &self,
        run: &Run,
        prompt: &ModelPrompt,
        prompt_tokens: u64,
    ) -> Result<OpenReservation<'_>, Stop> {
        let now = budget::now();
        let tokens = prompt_tokens + u64::from(prompt.output_tokens_max);
        let reservation = TokenReservation::new(run.issue().id, tokens, prompt_tokens, now);
        let deferred = |after, reason: &str| Err(HandlerError::defer(after, reason).into());
        match self.accounting.reserve(reservation, &self.config.budget).await {
            Ok(ReservationOutcome::Granted(open)) => Ok(open),
            Ok(ReservationOutcome::IssueBudgetExceeded) => Err(Stop::BudgetExceeded),
            Ok(ReservationOutcome::DayBudgetExceeded) => {
                let reason =
                    "the daily token budget is used up; raise it or wait until the next UTC day";
                deferred(reservation.rest_of_day(now), reason)
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

    /// Calls the model once, within the token budgets.
    async fn complete(
        &self,
        run: &Run,
        prompt: &ModelPrompt,
        session: &RunSession<'_>,
    ) -> Result<(ModelAnswer, TokenUsage), Stop> {
        let prompt_tokens = prompt.tokens_estimate();
        // Token budgets do not apply to a free model.
        let open = match self.model.is_free() {
            true => None,
            false => Some(self.reserve(run, prompt, prompt_tokens).await?),
        };
        // If newer events cancel the run here, dropping `open` settles it with the prompt tokens.
        let answered = match self.model.complete(prompt).await {
            Ok(chunks) => chunks.collect().await,
            Err(error) => Err(error),
        };
        let answer = match answered {
            Ok(answer) => answer,
            Err(error) => {
                settle(open, tokens_used_by_failure(&error, prompt_tokens)).await;
                return Err(self.retry_policy(run, error).into());
            }
        };
        let estimate = TokenUsage {
            input_tokens: prompt_tokens,
            output_tokens: estimate_tokens(answer.text.len()),
        };
        let usage = answer.usage.unwrap_or(estimate);
        settle(open, usage.total()).await;
        session.record_answer(&answer, usage);
        Ok((answer, usage))
    }

    /// Events, tokens and cost of a run.
    fn run_metrics(&self, run: &Run, usage: TokenUsage) -> RunMetrics {
        let count = |number: u64| Some(u32::try_from(number).unwrap_or(u32::MAX));
        RunMetrics {
            events: count(run.events().len() as u64),
            tokens_in: count(usage.input_tokens),
            tokens_out: count(usage.output_tokens),
            cost: self.config.prices.cost(usage),
        }
    }

    /// Builds the resolution: reply, tool effects, conversation and issue fields.
    fn resolve(
        &self,
        run: &Run,
        conversation: &Conversation,
        outcome: ModelOutcome,
        session: &RunSession<'_>,
    ) -> Resolution {
        let content = text::cut(text::cleaned(&outcome.text).trim(), REPLY_BYTES_MAX).to_owned();
        // After too many superseded runs the reply is sent even if it is stale, so that a busy issue gets an answer.
        let unless_stale = run.issue().superseded < self.config.supersede_max;
        let up_to = run.events().last().map(|event| event.id).map(|EventLogId(id)| id);
        let up_to = up_to.filter(|_| unless_stale);
        let session_id = Some(session.id().to_owned());
        let row = |content: String, target, run| {
            let (message_id, session_id) = (Some(Uuid::now_v7()), session_id.clone());
            DeskReply { content, message_id, session_id, up_to, run }.into_row(target)
        };
        let run_metrics = self.run_metrics(run, outcome.usage);
        let answer = ConversationEntry {
            author: Author::Assistant,
            name: None,
            text: content.clone(),
            at: budget::now().to_rfc3339(),
            unless_stale,
        };
        let mut resolution = record_only(conversation, Some(&answer));
        let hands_over =
            outcome.effects.iter().any(|effect| matches!(effect, ToolEffect::HandOver { .. }));
        let fields = json!({
            "session_id": session_id, "user_id": conversation.user_id,
            "handed_over": (hands_over || conversation.handed_over).then_some(true),
        });
        resolution.fields = Some(fields.to_string());
        resolution.outbox.push(row(content, ReplyTarget::Answer, run_metrics));
        let nothing = RunMetrics::default();
        for effect in outcome.effects {
            resolution.outbox.push(match effect {
                ToolEffect::HandOver { reason } => row(reason, ReplyTarget::HandOver, nothing),
                ToolEffect::Close { reason } => row(reason, ReplyTarget::Close, nothing),
            });
        }
        resolution
    }
}

impl ModelOutcome {
    fn has_effect(&self, effect: &ToolEffect) -> bool {
        let same = |one: &ToolEffect| std::mem::discriminant(one) == std::mem::discriminant(effect);
        self.effects.iter().any(same)
    }

    /// The text, or a default text if the model only called a tool.
    fn or_default_text(mut self) -> Result<Self, HandlerError> {
        if !self.text.trim().is_empty() {
            return Ok(self);
        }
        self.text = match self.effects.first() {
            Some(ToolEffect::Close { .. }) => {
                "This ticket is now closed. Write again to open it.".to_owned()
            }
            Some(ToolEffect::HandOver { .. }) => {
                "A person will take over and answer you here.".to_owned()
            }
            None => return Err(HandlerError::retry("the model returned an empty answer")),
        };
        Ok(self)
    }

    fn budget_exceeded() -> Self {
        Self {
            text:
                "I cannot answer more in this conversation. A person will take over and answer you here."
                    .to_owned(),
            effects: vec![ToolEffect::HandOver {
                reason: "the token budget of this issue is used up".to_owned(),
            }],
            usage: TokenUsage::default(),
        }
    }
}

#[async_trait]
impl IssueHandler for Desk {
    async fn handle(&self, run: Run) -> Result<Resolution, HandlerError> {
        let conversation =
            Conversation::load(run.issue(), run.events(), run.completed_event_log_id());
        if !conversation.needs_answer {
            return Ok(record_only(&conversation, None));
        }
        let session = RunSession::new(&self.step_writer, &run, self.model.name());
        let outcome = match self.run_model(&run, &conversation, &session).await {
            Ok(outcome) => outcome,
            Err(Stop::BudgetExceeded) => {
                info!(issue_id = %run.issue().id, "token budget of the issue is used up; handing over to a person");
                ModelOutcome::budget_exceeded()
            }
            Err(Stop::Failed(error)) => return Err(error),
        };
        let mut resolution =
            self.resolve(&run, &conversation, outcome.or_default_text()?, &session);
        // Query the database instead of relying on notifications. If there are newer events, the worker cancels this
        // run at the next await, unless the supersede limit is reached.
        check_for_newer_events(&run).await?;
        tokio::task::yield_now().await;
        // After the last await: a run that is superseded before leaves its session, too.
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

/// A resolution that only records the conversation.
fn record_only(conversation: &Conversation, answer: Option<&ConversationEntry>) -> Resolution {
    let fields = json!({
        "user_id": conversation.user_id, "handed_over": conversation.handed_over.then_some(true),
    });
    Resolution::new().discussions(conversation.to_discussions(answer)).fields(fields.to_string())
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
        // The service rejected the request before processing it.
        ModelError::RateLimited { .. }
        | ModelError::Unreachable(_)
        | ModelError::Unauthorized(_)
        | ModelError::Rejected(_) => 0,
        ModelError::Unavailable(_) | ModelError::InvalidResponse(_) => prompt_tokens,
    }
}
