//! The desk at work: all pending events of one issue become one reply of a model.
//!
//! Upstream: a worker of `headwater-issue`, which runs it with `on_new_event = Supersede`. Downstream: the model, tools, and
//! the resolution, whose replies `replies` delivers after the commit.
//!
//! Promises: nothing happens in the outside world during a run but questions to the model; a run that dies anywhere is
//! simply run again. Before the end, the database is asked once more whether newer events have come: then the worker throws
//! the answer away and begins anew with all of them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use headwater_analytics::RunFigures;
use headwater_bus::Sessions;
use headwater_issue::{
    EventLogId, HandlerError, IssueError, IssueHandler, OnNewEvent, Quiet, Resolution, Run,
    WorkerConfig,
};
use serde_json::json;
use tracing::{info, warn};
use uuid::Uuid;

use crate::desk::budget::{self, Budget, Ledger, Reservation};
use crate::desk::conversation::{Entry, Thread};
use crate::desk::model::{
    Answer, LanguageModel, ModelError, ModelPrompt, Turn, Usage, estimate_tokens,
};
use crate::desk::pending_sessions::LateSessions;
use crate::desk::prompt;
use crate::desk::reply::{Reply, ReplyTarget};
use crate::desk::session::RunSession;
use crate::desk::token_accounting::{Books, Open, Opened};
use crate::desk::tools::{self, Effect, SearchScope, TicketSearch};
use crate::limits::{REPLY_BYTES_MAX, TOOL_ROUNDS_MAX};
use crate::text;
use crate::tickets::Author;

/// The longest that a run waits before it asks again whether a model is back.
const AWAY_PAUSE_MAX: Duration = Duration::from_secs(300);

/// How long to wait for a database that did not answer.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(250);

/// Settings of the desk.
#[derive(Clone, Copy, Debug)]
pub struct DeskConfig {
    /// A run waits until no event has come for this long. Default: 800 ms.
    pub quiet: Duration,
    /// But no event waits longer than this. Default: 5 s.
    pub max_wait: Duration,
    /// Events in one run. Default: 200.
    pub events_max: usize,
    /// How often in a row newer events may end a run before its answer; then one is finished. Default: 5.
    pub supersede_max: u32,
    /// Tokens of one answer. Default: 1024.
    pub output_tokens_max: u32,
    /// How long a run waits at least for a model that is away or busy, without an attempt counted. Default: 5 s.
    pub away_pause: Duration,
    /// What models may cost.
    pub budget: Budget,
    /// Whose tickets the model may search. Default: those of the same user.
    pub search: SearchScope,
    /// What the model's tokens cost.
    pub prices: Prices,
}

/// What a million tokens cost, in the currency that reports are to show. Default: nothing is known, so no cost is told.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prices {
    /// Of prompts.
    pub input: f64,
    /// Of answers.
    pub output: f64,
}

impl Prices {
    fn cost(&self, usage: Usage) -> Option<f64> {
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
            away_pause: Duration::from_secs(5),
            budget: Budget::default(),
            search: SearchScope::default(),
            prices: Prices::default(),
        }
    }
}

impl DeskConfig {
    /// The quiet window for whoever records events of the desk.
    pub fn quiet(&self) -> Quiet {
        Quiet { quiet: self.quiet, max_wait: self.max_wait, events_max: self.events_max }
    }

    /// The settings of a worker that runs the desk: others as given.
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
    books: Books,
    sessions: Arc<Sessions>,
    late_sessions: Arc<LateSessions>,
    config: DeskConfig,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("model", &self.model).finish_non_exhaustive()
    }
}

/// What the model came to, with all its tools.
#[derive(Debug, Default)]
struct Outcome {
    text: String,
    effects: Vec<Effect>,
    /// Of all questions of the run.
    usage: Usage,
}

/// Why a run ends without the model.
enum Stop {
    /// The issue has used up its tokens.
    Spent,
    Failed(HandlerError),
}

impl From<HandlerError> for Stop {
    fn from(error: HandlerError) -> Self {
        Self::Failed(error)
    }
}

impl Desk {
    /// A desk with a model. The tickets it may search and the ledger are the ticket store's.
    pub fn new(
        model: Arc<dyn LanguageModel>,
        search: Arc<dyn TicketSearch>,
        ledger: Arc<dyn Ledger>,
        sessions: Arc<Sessions>,
        config: DeskConfig,
    ) -> Self {
        let late_sessions = Arc::new(LateSessions::new(Arc::clone(&sessions)));
        Self { model, search, books: Books::new(ledger), sessions, late_sessions, config }
    }

    /// Sessions that were begun while streams were away. Somebody must run it, or they are not listed.
    pub(crate) fn late_sessions(&self) -> Arc<LateSessions> {
        Arc::clone(&self.late_sessions)
    }

    /// Waits a while for settlements of tokens. Call it when no run is under way any more.
    pub async fn close(&self) {
        self.books.settled().await;
    }

    /// Asks the model, and carries out its tools, until it has an answer.
    async fn converse(
        &self,
        run: &Run,
        thread: &Thread,
        session: &RunSession,
    ) -> Result<Outcome, Stop> {
        let specs = tools::specs(run.issue());
        let mut prompt = prompt::render(thread, specs.clone(), self.config.output_tokens_max);
        let inputs = json!({
            "issue_id": run.issue().id.0, "epoch": run.epoch().0, "attempt": run.attempt(),
            "event_log_ids": run.events().iter().map(|event| event.id.0).collect::<Vec<_>>(),
        });
        session.rendered(&prompt, inputs);
        let mut outcome = Outcome::default();
        for round in 0..=TOOL_ROUNDS_MAX {
            if round == TOOL_ROUNDS_MAX {
                prompt.tools.clear();
            }
            let (answer, usage) = self.ask(run, &prompt, session).await?;
            outcome.usage = outcome.usage.plus(usage);
            outcome.text = answer.text.clone();
            if answer.calls.is_empty() || prompt.tools.is_empty() {
                break;
            }
            prompt.turns.push(Turn::Answer(answer.clone()));
            for call in &answer.calls {
                let user = thread.user_id.as_deref();
                let (search, scope) = (self.search.as_ref(), self.config.search);
                let result = tools::call(call, &specs, run.issue(), search, scope, user).await;
                session.invoked(call, &result).await;
                let content = result.told;
                prompt.turns.push(Turn::ToolResult { call_id: call.id.clone(), content });
                // The same effect twice is one.
                outcome.effects.extend(result.effect.filter(|effect| !outcome.has(effect)));
            }
        }
        Ok(outcome)
    }

    /// When to run again after a model failed.
    fn after(&self, run: &Run, error: ModelError) -> HandlerError {
        // The longer it lasts, the less a little more matters.
        let waited = run.events().first().map(|event| budget::now().since(event.created_at));
        let pause = (waited.unwrap_or_default() / 10).min(AWAY_PAUSE_MAX);
        let pause = pause.max(self.config.away_pause);
        match error {
            // Everybody is turned away: no fault of this issue.
            ModelError::Busy { after, .. } => {
                HandlerError::put_off(after.unwrap_or_default().max(pause), error)
            }
            ModelError::Away(_) => HandlerError::put_off(pause, error),
            ModelError::Refused(_) => HandlerError::quarantine(error),
            _ => HandlerError::retry(error),
        }
    }

    /// Reserves the tokens of one question.
    async fn reserve(
        &self,
        run: &Run,
        prompt: &ModelPrompt,
        prompt_tokens: u64,
    ) -> Result<Open<'_>, Stop> {
        let now = budget::now();
        let tokens = prompt_tokens + u64::from(prompt.output_tokens_max);
        let reservation = Reservation::new(run.issue().id, tokens, prompt_tokens, now);
        let deferred = |after, reason: &str| Err(HandlerError::put_off(after, reason).into());
        match self.books.reserve(reservation, &self.config.budget).await {
            Ok(Opened::Granted(open)) => Ok(open),
            Ok(Opened::IssueSpent) => Err(Stop::Spent),
            Ok(Opened::DaySpent) => {
                let reason = "the token budget of the day is used up; raise it, or wait until tomorrow (UTC)";
                deferred(reservation.rest_of_day(now), reason)
            }
            Ok(Opened::Pending) => {
                let reason =
                    "the rest of the token budget is reserved by other runs; waiting for them";
                deferred(self.config.away_pause, reason)
            }
            // Our own storage failed: no fault of this issue.
            Err(error) => {
                let reason = format!("the token ledger did not answer: {error}");
                Err(HandlerError::unavailable(reason).into())
            }
        }
    }

    /// One question to the model, within the budgets.
    async fn ask(
        &self,
        run: &Run,
        prompt: &ModelPrompt,
        session: &RunSession,
    ) -> Result<(Answer, Usage), Stop> {
        let prompt_tokens = prompt.tokens_estimate();
        // A model that costs nothing has no budget.
        let open = match self.model.is_free() {
            true => None,
            false => Some(self.reserve(run, prompt, prompt_tokens).await?),
        };
        // If newer events end the run here, what was reserved for the answer is given back.
        let answered = match self.model.ask(prompt).await {
            Ok(pieces) => pieces.gather().await,
            Err(error) => Err(error),
        };
        let answer = match answered {
            Ok(answer) => answer,
            Err(error) => {
                settle(open, used_by_failure(&error, prompt_tokens)).await;
                return Err(self.after(run, error).into());
            }
        };
        let estimate = Usage {
            input_tokens: prompt_tokens,
            output_tokens: estimate_tokens(answer.text.len()),
        };
        let usage = answer.usage.unwrap_or(estimate);
        settle(open, usage.total()).await;
        session.executed(&answer, usage).await;
        Ok((answer, usage))
    }

    /// What a run took.
    fn figures(&self, run: &Run, usage: Usage) -> RunFigures {
        let count = |number: u64| Some(u32::try_from(number).unwrap_or(u32::MAX));
        RunFigures {
            events: count(run.events().len() as u64),
            tokens_in: count(usage.input_tokens),
            tokens_out: count(usage.output_tokens),
            cost: self.config.prices.cost(usage),
        }
    }

    /// Everything that the run changes.
    fn resolve(
        &self,
        run: &Run,
        thread: &Thread,
        outcome: Outcome,
        session: &RunSession,
    ) -> Resolution {
        let content = text::cut(text::cleaned(&outcome.text).trim(), REPLY_BYTES_MAX).to_owned();
        // An issue that gets news all the time must get an answer some time.
        let unless_stale = run.issue().superseded < self.config.supersede_max;
        let up_to = run.events().last().map(|event| event.id).map(|EventLogId(id)| id);
        let up_to = up_to.filter(|_| unless_stale);
        let session_id = Some(session.id().to_owned());
        let row = |content: String, target, run| {
            let (message_id, session_id) = (Some(Uuid::now_v7()), session_id.clone());
            Reply { content, message_id, session_id, up_to, run }.into_row(target)
        };
        let figures = self.figures(run, outcome.usage);
        let answer = Entry {
            author: Author::Assistant,
            name: None,
            text: content.clone(),
            at: budget::now().to_rfc3339(),
            unless_stale,
        };
        let mut resolution = remembering(thread, Some(&answer));
        let hands_over =
            outcome.effects.iter().any(|effect| matches!(effect, Effect::HandOver { .. }));
        let fields = json!({
            "session_id": session_id, "user_id": thread.user_id,
            "handed_over": (hands_over || thread.handed_over).then_some(true),
        });
        resolution.fields = Some(fields.to_string());
        resolution.outbox.push(row(content, ReplyTarget::Answer, figures));
        let nothing = RunFigures::default();
        for effect in outcome.effects {
            resolution.outbox.push(match effect {
                Effect::HandOver { reason } => row(reason, ReplyTarget::HandOver, nothing),
                Effect::Close { reason } => row(reason, ReplyTarget::Close, nothing),
            });
        }
        resolution
    }
}

impl Outcome {
    fn has(&self, effect: &Effect) -> bool {
        let same = |one: &Effect| std::mem::discriminant(one) == std::mem::discriminant(effect);
        self.effects.iter().any(same)
    }

    /// A model may use a tool and say nothing; whoever asked wants a word all the same.
    fn or_default_text(mut self) -> Result<Self, HandlerError> {
        if !self.text.trim().is_empty() {
            return Ok(self);
        }
        self.text = match self.effects.first() {
            Some(Effect::Close { .. }) => {
                "This ticket is now closed. Write again to open it.".to_owned()
            }
            Some(Effect::HandOver { .. }) => {
                "A person will take over and answer you here.".to_owned()
            }
            None => return Err(HandlerError::retry("the model's answer is empty")),
        };
        Ok(self)
    }

    fn of_spent_budget() -> Self {
        Self {
            text:
                "I cannot answer more in this thread. A person will take over and answer you here."
                    .to_owned(),
            effects: vec![Effect::HandOver {
                reason: "the token budget of this issue is used up".to_owned(),
            }],
            usage: Usage::default(),
        }
    }
}

#[async_trait]
impl IssueHandler for Desk {
    async fn handle(&self, run: Run) -> Result<Resolution, HandlerError> {
        let thread = Thread::of(run.issue(), run.events(), run.completed_event_log_id());
        if !thread.wants_answer {
            return Ok(remembering(&thread, None));
        }
        let session = RunSession::new(&self.sessions, &self.late_sessions, &run, self.model.name());
        let outcome = match self.converse(&run, &thread, &session).await {
            Ok(outcome) => outcome,
            Err(Stop::Spent) => {
                info!(issue_id = %run.issue().id, "token budget of an issue is used up, handing over");
                Outcome::of_spent_budget()
            }
            Err(Stop::Failed(error)) => return Err(error),
        };
        session.keep().await;
        let resolution = self.resolve(&run, &thread, outcome.or_default_text()?, &session);
        // Ask the database, not what was last heard of it. If there is news, the worker ends this run at the next await,
        // unless it did so too often already.
        ask_for_news(&run).await?;
        tokio::task::yield_now().await;
        Ok(resolution)
    }
}

/// Asks until the database answers: the model's answer was paid for. The worker ends the run when the claim is lost.
async fn ask_for_news(run: &Run) -> Result<(), IssueError> {
    loop {
        match run.heartbeat().await {
            Err(error) if error.is_transient() && !run.is_cancelled() => {
                warn!(issue_id = %run.issue().id, %error, "the database did not tell whether there is news, asking again");
                tokio::time::sleep(ASK_AGAIN_AFTER).await;
            }
            asked => return asked,
        }
    }
}

/// A resolution that only keeps what was said.
fn remembering(thread: &Thread, answer: Option<&Entry>) -> Resolution {
    let fields = json!({
        "user_id": thread.user_id, "handed_over": thread.handed_over.then_some(true),
    });
    Resolution::new().discussions(thread.remembered(answer)).fields(fields.to_string())
}

/// Settles what was reserved, if anything was.
async fn settle(open: Option<Open<'_>>, used: u64) {
    if let Some(open) = open {
        open.settle(used).await;
    }
}

/// What a failed question may have cost.
fn used_by_failure(error: &ModelError, prompt_tokens: u64) -> u64 {
    match error {
        // It was turned away at the door.
        ModelError::Busy { .. }
        | ModelError::Away(_)
        | ModelError::Denied(_)
        | ModelError::Refused(_) => 0,
        ModelError::Unavailable(_) | ModelError::Garbled(_) => prompt_tokens,
    }
}
