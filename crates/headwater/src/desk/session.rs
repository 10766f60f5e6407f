//! Records a model run as a session: prompt, tool calls, answers.
//!
//! Upstream: `handler` records each step. Downstream: rows of the outbox, which `outbound` appends to the session.
//! Guarantees: a run never waits for streams. Its steps are committed together with its result, so the session gets each
//! of them once and in order, whatever fails. A run without a result (failed, superseded, claim lost) leaves the steps
//! that it has made: they are written to the outbox in the background; lost are only those of a crashed process,
//! and of a run whose result was not committed although its handler had returned.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_bus::{
    Event, EventId, PromptExecuted, PromptRendered, SessionId, ToolInvoked, ToolResult,
};
use headwater_issue::limits::{OUTBOX_PER_RUN_MAX, PAYLOAD_BYTES_MAX};
use headwater_issue::{
    IssueId, KeyedOutboxRow, NewOutboxRow, OutboxKind, Run, Store, TraceContext,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::TaskTracker;
use tracing::warn;

use crate::desk::budget;
use crate::desk::model::{ModelAnswer, ModelPrompt, TokenUsage, ToolCall, Turn};
use crate::desk::tools::ToolOutcome;
use crate::telemetry;

/// `target` of the outbox rows.
pub(crate) const SESSION_STEPS: &str = "headwater.session_steps";

/// Maximum rows of one run; the replies of the run have room beside them.
const ROWS_MAX: usize = OUTBOX_PER_RUN_MAX / 2;

/// How long steps without a result are written again while the database is unavailable, and the pause in between.
const WRITE_RETRY_FOR: Duration = Duration::from_secs(10 * 60);
const WRITE_RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Runs whose steps are being written in the background; those of further ones are dropped.
const WRITES_MAX: usize = 1000;

/// How long [`StepWriter::close`] waits.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

const PROMPT_NAMESPACE: &str = "headwater.desk";
const PROMPT_KEY: &str = "reply";

/// Payload of an outbox row: steps of one session, in order.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SessionSteps {
    pub(crate) session_id: String,
    /// The trace of the run, as a `traceparent`; the same for all its steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) trace: Option<String>,
    pub(crate) steps: Vec<SessionStep>,
}

/// An encoded event.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SessionStep {
    pub(crate) event_id: String,
    #[serde(rename = "type")]
    pub(crate) event_type: String,
    pub(crate) version: u32,
    pub(crate) timestamp: String,
    /// The payload as text, because a database may change JSON (order of keys, NUL characters).
    pub(crate) payload: String,
}

/// The session of one run.
pub(crate) struct RunSession<'a> {
    writer: &'a StepWriter,
    issue_id: IssueId,
    id: SessionId,
    adapter: String,
    trace: TraceContext,
    recorded: Mutex<RecordedSteps>,
}

#[derive(Default)]
struct RecordedSteps {
    /// The prompt. It becomes a step with the next one or when the run has a result, so that a run that never reaches
    /// the model has no session.
    prompt: Option<PromptRendered>,
    steps: Vec<SessionStep>,
}

impl<'a> RunSession<'a> {
    /// A session id `issue-7-run-3-` plus a random part, so that a recreated database does not repeat ids.
    pub(crate) fn new(writer: &'a StepWriter, run: &Run, adapter: &str) -> Self {
        let random = uuid::Uuid::new_v4().simple().to_string();
        let id = format!("issue-{}-run-{}-{}", run.issue().id, run.epoch(), &random[..12]);
        let id = SessionId::new(id).expect("numbers and letters are a valid session id");
        let (issue_id, adapter) = (run.issue().id, adapter.to_owned());
        // Without a collector the run has no trace; its steps belong together nevertheless.
        let trace = telemetry::current_trace().unwrap_or_else(TraceContext::root);
        Self { writer, issue_id, id, adapter, trace, recorded: Mutex::default() }
    }

    pub(crate) fn id(&self) -> &str {
        self.id.as_str()
    }

    pub(crate) fn record_prompt(&self, prompt: &ModelPrompt, inputs: Json) {
        let texts = prompt.turns.iter().filter_map(|turn| match turn {
            Turn::System(text) | Turn::User(text) => Some(text.as_str()),
            Turn::Assistant(_) | Turn::ToolResult { .. } => None,
        });
        let rendered = PromptRendered {
            prompt_ns: PROMPT_NAMESPACE.to_owned(),
            prompt_key: PROMPT_KEY.to_owned(),
            prompt_name: Some(prompt_name()),
            adapter: self.adapter.clone(),
            session_id: Some(self.id.to_string()),
            render_inputs: inputs,
            rendered_prompt: texts.collect::<Vec<_>>().join("\n\n"),
            created_at: Some(now()),
        };
        self.recorded.lock().expect("no code panics while it holds this lock").prompt =
            Some(rendered);
    }

    pub(crate) fn record_tool_call(&self, call: &ToolCall, outcome: &ToolOutcome) {
        let value = serde_json::from_str(&outcome.content).unwrap_or(Json::Null);
        self.record(&ToolInvoked {
            prompt_name: prompt_name(),
            adapter: self.adapter.clone(),
            name: call.name.clone(),
            params: outcome.arguments.clone(),
            result: ToolResult {
                message: outcome.content.clone(),
                success: outcome.success,
                value,
            },
            session_id: Some(self.id.to_string()),
            created_at: Some(now()),
            call_id: Some(call.id.clone()),
        });
    }

    /// `model` is the one that answered; it may be another one than at the beginning of the run.
    pub(crate) fn record_answer(&self, model: &str, answer: &ModelAnswer, usage: TokenUsage) {
        let calls: Vec<&str> = answer.calls.iter().map(|call| call.name.as_str()).collect();
        self.record(&PromptExecuted {
            prompt_name: prompt_name(),
            adapter: model.to_owned(),
            result: json!({"text": answer.text, "tool_calls": calls}),
            usage: json!({"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}),
            session_id: Some(self.id.to_string()),
            created_at: Some(now()),
        });
    }

    fn record<E: Event>(&self, event: &E) {
        let mut recorded = self.recorded.lock().expect("no code panics while it holds this lock");
        let prompt = recorded.prompt.take().map(|prompt| step(&prompt));
        recorded.steps.extend(prompt);
        recorded.steps.push(step(event));
    }

    /// The rows to commit with the result of the run. Call it after the last await of the run.
    pub(crate) fn into_rows(mut self) -> Vec<NewOutboxRow> {
        let recorded = self.recorded.get_mut().expect("no code panics while it holds this lock");
        let RecordedSteps { prompt, mut steps } = std::mem::take(recorded);
        steps.extend(prompt.map(|prompt| step(&prompt)));
        to_rows(&self.id, self.trace, steps)
    }
}

impl Drop for RunSession<'_> {
    fn drop(&mut self) {
        let recorded = self.recorded.get_mut().expect("no code panics while it holds this lock");
        let rows = to_rows(&self.id, self.trace, std::mem::take(&mut recorded.steps));
        if !rows.is_empty() {
            self.writer.write(self.issue_id, &self.id, rows);
        }
    }
}

/// Writes the steps of runs without a result to the outbox, in the background.
pub(crate) struct StepWriter {
    store: Arc<dyn Store>,
    writing: TaskTracker,
}

impl StepWriter {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, writing: TaskTracker::new() }
    }

    fn write(&self, issue_id: IssueId, session: &SessionId, rows: Vec<NewOutboxRow>) {
        // Without a runtime the process is exiting.
        if self.writing.len() >= WRITES_MAX || Handle::try_current().is_err() {
            warn!(%session, %issue_id, "steps of a run without a result are not recorded in its session");
            return;
        }
        let keyed = |(index, row)| KeyedOutboxRow { key: format!("{session}-{index}"), row };
        let rows: Vec<KeyedOutboxRow> = rows.into_iter().enumerate().map(keyed).collect();
        let (store, session) = (Arc::clone(&self.store), session.clone());
        self.writing.spawn(async move {
            let give_up_at = Instant::now() + WRITE_RETRY_FOR;
            while let Err(error) = write_once(&*store, issue_id, &rows).await {
                if !error.is_transient() || Instant::now() >= give_up_at {
                    warn!(%session, %issue_id, %error, "steps of a run without a result could not be recorded in its session");
                    return;
                }
                sleep(WRITE_RETRY_PAUSE).await;
            }
        });
    }

    /// Waits for a bounded time until everything is written.
    pub(crate) async fn close(&self) {
        self.writing.close();
        let _ = timeout(CLOSE_TIMEOUT, self.writing.wait()).await;
    }
}

/// Repeated after a lost reply, it writes nothing twice: the rows have keys.
async fn write_once(
    store: &dyn Store,
    issue_id: IssueId,
    rows: &[KeyedOutboxRow],
) -> headwater_issue::Result<()> {
    let mut transaction = store.begin().await?;
    transaction.write_outbox(issue_id, rows).await?;
    transaction.commit().await
}

fn step<E: Event>(event: &E) -> SessionStep {
    SessionStep {
        event_id: EventId::random().to_string(),
        event_type: E::TYPE.to_owned(),
        version: E::VERSION,
        timestamp: now(),
        payload: serde_json::to_string(event).expect("texts and JSON values are JSON"),
    }
}

/// Packs steps into as few rows as their maximum size allows. A step that is too large is dropped.
fn to_rows(session: &SessionId, trace: TraceContext, steps: Vec<SessionStep>) -> Vec<NewOutboxRow> {
    let trace = Some(trace.to_string());
    let head = json!({"session_id": session.as_str(), "trace": trace, "steps": []});
    let head = head.to_string().len();
    let (mut rows, mut batch, mut bytes) = (Vec::new(), Vec::new(), head);
    let row = |steps| {
        let (session_id, trace) = (session.to_string(), trace.clone());
        let payload = SessionSteps { session_id, trace, steps };
        let payload = serde_json::to_string(&payload).expect("texts and numbers are JSON");
        NewOutboxRow { kind: OutboxKind::Event, target: SESSION_STEPS.to_owned(), payload }
    };
    for step in steps {
        let size = serde_json::to_string(&step).expect("texts and numbers are JSON").len() + 1;
        if head + size > PAYLOAD_BYTES_MAX || rows.len() >= ROWS_MAX {
            warn!(%session, event_type = step.event_type, "step of a model run is too large to be recorded in its session");
            continue;
        }
        if bytes + size > PAYLOAD_BYTES_MAX {
            rows.push(row(std::mem::take(&mut batch)));
            bytes = head;
        }
        bytes += size;
        batch.push(step);
    }
    if !batch.is_empty() {
        rows.push(row(batch));
    }
    rows
}

fn prompt_name() -> String {
    format!("{PROMPT_NAMESPACE}.{PROMPT_KEY}")
}

fn now() -> String {
    budget::now().to_rfc3339()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step_of(payload: String) -> SessionStep {
        SessionStep {
            event_id: EventId::random().to_string(),
            event_type: "test.Step".to_owned(),
            version: 1,
            timestamp: now(),
            payload,
        }
    }

    #[test]
    fn steps_are_packed_in_order_into_rows_that_every_store_accepts() {
        let session = SessionId::new("s").unwrap();
        let text = |number: usize| format!("{number} \0 \" {}", "x".repeat(300 * 1024));
        let mut steps: Vec<_> = (0..7).map(|number| step_of(text(number))).collect();
        steps.insert(3, step_of("\u{1}".repeat(PAYLOAD_BYTES_MAX / 4)));
        let rows = to_rows(&session, TraceContext::root(), steps);
        assert_eq!(rows.len(), 3);
        let mut read = Vec::new();
        for row in &rows {
            assert!(row.payload.len() <= PAYLOAD_BYTES_MAX, "{}", row.payload.len());
            let batch: SessionSteps = serde_json::from_str(&row.payload).unwrap();
            assert_eq!(batch.session_id, "s");
            read.extend(batch.steps.into_iter().map(|step| step.payload));
        }
        assert_eq!(read, (0..7).map(text).collect::<Vec<_>>());
        assert!(to_rows(&session, TraceContext::root(), Vec::new()).is_empty());
    }
}
