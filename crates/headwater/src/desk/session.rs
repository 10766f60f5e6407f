//! Records a model run as a session on the bus: prompt, tool calls, answers.
//!
//! Upstream: `handler` records each step. Downstream: the bus; replaying the session shows the run.
//! Guarantees: a run never fails, and is never delayed for long, because the bus is unavailable. With a spool, its steps
//! reach the session in order when streams are available again; without one, or if it is full, the loss is logged.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_bus::{
    Event, EventBusExt, PromptExecuted, PromptRendered, Session, SessionId, Sessions, ToolInvoked,
    ToolResult,
};
use headwater_issue::Run;
use serde_json::{Value as Json, json};
use tokio::sync::OnceCell;
use tokio::time::timeout;
use tracing::warn;

use crate::desk::budget;
use crate::desk::model::{ModelAnswer, ModelPrompt, TokenUsage, ToolCall, Turn};
use crate::desk::pending_sessions::PendingSessions;
use crate::desk::tools::ToolOutcome;

/// How long a run waits for the creation of its session.
const CREATE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a run waits for the bus at each step. Longer than a backend call, after which the step is in the spool.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(10);

const PROMPT_NAMESPACE: &str = "headwater.desk";
const PROMPT_KEY: &str = "reply";

/// The session of one run, created with its first event, so that a run that never reaches the model creates none.
pub(crate) struct RunSession {
    sessions: Arc<Sessions>,
    pending: Arc<PendingSessions>,
    /// `None` if the backend was unavailable: events are published without it, and [`PendingSessions`] registers it
    /// later.
    session: OnceCell<Option<Session>>,
    /// The prompt; published with the next event or when the run has a result.
    rendered: Mutex<Option<PromptRendered>>,
    id: SessionId,
    adapter: String,
}

impl RunSession {
    /// A session id `issue-7-run-3-` plus a random part, so that a recreated database does not repeat ids.
    pub(crate) fn new(
        sessions: &Arc<Sessions>,
        pending: &Arc<PendingSessions>,
        run: &Run,
        adapter: &str,
    ) -> Self {
        let random = uuid::Uuid::new_v4().simple().to_string();
        let id = format!("issue-{}-run-{}-{}", run.issue().id, run.epoch(), &random[..12]);
        let id = SessionId::new(id).expect("numbers and letters are a valid session id");
        Self {
            sessions: Arc::clone(sessions),
            pending: Arc::clone(pending),
            session: OnceCell::new(),
            rendered: Mutex::default(),
            id,
            adapter: adapter.to_owned(),
        }
    }

    async fn create(&self) -> Option<Session> {
        let problem = match timeout(CREATE_TIMEOUT, self.sessions.create(&self.id)).await {
            Ok(Ok(session)) => return Some(session),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("timed out after {CREATE_TIMEOUT:?}"),
        };
        warn!(session = %self.id, error = problem, "streams unavailable; the session of the model run is created later");
        self.pending.add(self.id.clone());
        None
    }

    /// Publishes the prompt, which creates the session, unless that has happened.
    pub(crate) async fn ensure_created(&self) {
        let rendered =
            self.rendered.lock().expect("no code panics while it holds this lock").take();
        if let Some(rendered) = rendered {
            self.publish(rendered).await;
        }
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
            created_at: created_at(),
        };
        *self.rendered.lock().expect("no code panics while it holds this lock") = Some(rendered);
    }

    pub(crate) async fn record_tool_call(&self, call: &ToolCall, outcome: &ToolOutcome) {
        self.ensure_created().await;
        let value = serde_json::from_str(&outcome.content).unwrap_or(Json::Null);
        self.publish(ToolInvoked {
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
            created_at: created_at(),
            call_id: Some(call.id.clone()),
        })
        .await;
    }

    pub(crate) async fn record_answer(&self, answer: &ModelAnswer, usage: TokenUsage) {
        self.ensure_created().await;
        let calls: Vec<&str> = answer.calls.iter().map(|call| call.name.as_str()).collect();
        self.publish(PromptExecuted {
            prompt_name: prompt_name(),
            adapter: self.adapter.clone(),
            result: json!({"text": answer.text, "tool_calls": calls}),
            usage: json!({"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}),
            session_id: Some(self.id.to_string()),
            created_at: created_at(),
        })
        .await;
    }

    async fn publish<E: Event>(&self, event: E) {
        let publishing = async {
            match self.session.get_or_init(|| self.create()).await {
                Some(session) => session.publish(event).await.map(drop).map_err(|e| e.to_string()),
                None => {
                    self.sessions.bus().publish(event).await.map(drop).map_err(|e| e.to_string())
                }
            }
        };
        let problem = match timeout(PUBLISH_TIMEOUT, publishing).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => format!("timed out after {PUBLISH_TIMEOUT:?}"),
        };
        warn!(session = %self.id, event_type = E::TYPE, error = %problem, "step of a model run could not be recorded in its session");
    }
}

fn prompt_name() -> String {
    format!("{PROMPT_NAMESPACE}.{PROMPT_KEY}")
}

fn created_at() -> Option<String> {
    Some(budget::now().to_rfc3339())
}
