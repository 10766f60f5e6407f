//! A model run as a session on the bus: what was asked, which tools were called, what was answered.
//!
//! Upstream: `handler` tells of each step. Downstream: the bus; whoever replays the session sees the run again.
//! Promises: a run never fails, and never waits long, because the bus is away. With a spool, its steps reach the session when
//! streams are back, in order; without one, or if it is full, the loss is logged.

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
use crate::desk::model::{Answer, ModelPrompt, ToolCall, Turn, Usage};
use crate::desk::pending_sessions::LateSessions;
use crate::desk::tools::ToolOutcome;

/// How long a run waits for the place of its session.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a run waits for the bus at each step: longer than a call of the backend may take, after which the spool has it.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(10);

const PROMPT_NAMESPACE: &str = "headwater.desk";
const PROMPT_KEY: &str = "reply";

/// The session of one run. It is there when there is something to replay: runs that wait for a model leave none.
pub(crate) struct RunSession {
    sessions: Arc<Sessions>,
    late: Arc<LateSessions>,
    /// `None` while the backend is away; what is published then comes to its session later, and so does the session to the list.
    session: OnceCell<Option<Session>>,
    /// The first event, until there is a second one or the run has come to something.
    rendered: Mutex<Option<PromptRendered>>,
    id: SessionId,
    adapter: String,
}

impl RunSession {
    /// A new session for a run: `issue-7-run-3-` and a random part, so that a database that began anew repeats none.
    pub(crate) fn new(
        sessions: &Arc<Sessions>,
        late: &Arc<LateSessions>,
        run: &Run,
        adapter: &str,
    ) -> Self {
        let random = uuid::Uuid::new_v4().simple().to_string();
        let id = format!("issue-{}-run-{}-{}", run.issue().id, run.epoch(), &random[..12]);
        let id = SessionId::new(id).expect("numbers and letters are a valid session id");
        Self {
            sessions: Arc::clone(sessions),
            late: Arc::clone(late),
            session: OnceCell::new(),
            rendered: Mutex::default(),
            id,
            adapter: adapter.to_owned(),
        }
    }

    async fn begin(&self) -> Option<Session> {
        let problem = match timeout(BEGIN_TIMEOUT, self.sessions.create(&self.id)).await {
            Ok(Ok(session)) => return Some(session),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {BEGIN_TIMEOUT:?}"),
        };
        warn!(session = %self.id, error = problem, "the streams are away: the session of a model run is made when they are back");
        self.late.add(self.id.clone());
        None
    }

    /// Makes the session, with what was rendered, if nothing has made it yet.
    pub(crate) async fn keep(&self) {
        let rendered = self.rendered.lock().expect("nobody panics in there").take();
        if let Some(rendered) = rendered {
            self.publish(rendered).await;
        }
    }

    pub(crate) fn id(&self) -> &str {
        self.id.as_str()
    }

    pub(crate) fn rendered(&self, prompt: &ModelPrompt, inputs: Json) {
        let texts = prompt.turns.iter().filter_map(|turn| match turn {
            Turn::Instruction(text) | Turn::Data(text) => Some(text.as_str()),
            Turn::Answer(_) | Turn::ToolResult { .. } => None,
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
        *self.rendered.lock().expect("nobody panics in there") = Some(rendered);
    }

    pub(crate) async fn invoked(&self, call: &ToolCall, outcome: &ToolOutcome) {
        self.keep().await;
        let value = serde_json::from_str(&outcome.told).unwrap_or(Json::Null);
        self.publish(ToolInvoked {
            prompt_name: prompt_name(),
            adapter: self.adapter.clone(),
            name: call.name.clone(),
            params: outcome.arguments.clone(),
            result: ToolResult { message: outcome.told.clone(), success: outcome.success, value },
            session_id: Some(self.id.to_string()),
            created_at: created_at(),
            call_id: Some(call.id.clone()),
        })
        .await;
    }

    pub(crate) async fn executed(&self, answer: &Answer, usage: Usage) {
        self.keep().await;
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
            match self.session.get_or_init(|| self.begin()).await {
                Some(session) => session.publish(event).await.map(drop).map_err(|e| e.to_string()),
                None => {
                    self.sessions.bus().publish(event).await.map(drop).map_err(|e| e.to_string())
                }
            }
        };
        let problem = match timeout(PUBLISH_TIMEOUT, publishing).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => format!("the bus took longer than {PUBLISH_TIMEOUT:?}"),
        };
        warn!(session = %self.id, event_type = E::TYPE, error = %problem, "a step of a model run is not in its session");
    }
}

fn prompt_name() -> String {
    format!("{PROMPT_NAMESPACE}.{PROMPT_KEY}")
}

fn created_at() -> Option<String> {
    Some(budget::now().to_rfc3339())
}
