//! The built-in event types, with the type names used by other programs.
//!
//! Upstream: model runs and the main loop publish them. Downstream: sessions and subscribers.
//! Guarantees: missing fields have defaults; unknown fields are ignored.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::error::Result;
use crate::event::{Event, Scope};
use crate::registry::EventRegistry;

impl EventRegistry {
    /// Creates a registry with the built-in types.
    pub fn builtin() -> Self {
        let registry = || -> Result<Self> {
            Self::empty()
                .with::<PromptRendered>()?
                .with::<ToolInvoked>()?
                .with::<PromptExecuted>()?
                .with::<MainLoopRequest>()?
                .with::<MainLoopCompleted>()?
                .with::<MainLoopFailed>()
        };
        registry().expect("the names of the built-in types are valid and unique")
    }
}

/// Implements `Event` for a session-scoped type with a `session_id` field.
macro_rules! telemetry {
    ($type:ty, $name:literal) => {
        impl Event for $type {
            const TYPE: &'static str = $name;
            const SCOPE: Scope = Scope::Session;

            fn session(&self) -> Option<&str> {
                self.session_id.as_deref()
            }
        }
    };
}

/// A prompt was rendered from its template and is about to be sent to a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PromptRendered {
    /// The namespace of the prompt's template.
    pub prompt_ns: String,
    /// The key of the prompt's template.
    pub prompt_key: String,
    /// The name of the prompt, if it has one.
    pub prompt_name: Option<String>,
    /// The model adapter that the prompt is sent with.
    pub adapter: String,
    /// The session it belongs to.
    pub session_id: Option<String>,
    /// Inputs of the template.
    pub render_inputs: Json,
    /// The rendered text.
    pub rendered_prompt: String,
    /// Time of the event (RFC 3339).
    pub created_at: Option<String>,
}
telemetry!(PromptRendered, "weakincentives.runtime.events.PromptRendered");

/// A model called a tool, and the tool returned.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ToolInvoked {
    /// The prompt during which the tool was called.
    pub prompt_name: String,
    /// The model adapter that called the tool.
    pub adapter: String,
    /// The tool's name.
    pub name: String,
    /// Call parameters.
    pub params: Json,
    /// Result of the call.
    pub result: ToolResult,
    /// The session it belongs to.
    pub session_id: Option<String>,
    /// Time of the event (RFC 3339).
    pub created_at: Option<String>,
    /// Id of the tool call, as assigned by the model service.
    pub call_id: Option<String>,
}
telemetry!(ToolInvoked, "weakincentives.runtime.events.ToolInvoked");

/// Result of a tool call.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ToolResult {
    /// Text for the model.
    pub message: String,
    /// Whether the call succeeded.
    pub success: bool,
    /// Structured result.
    pub value: Json,
}

/// A model completed a prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PromptExecuted {
    /// The prompt.
    pub prompt_name: String,
    /// The model adapter that executed it.
    pub adapter: String,
    /// The model's output.
    pub result: Json,
    /// Token usage, if the model service reports it.
    pub usage: Json,
    /// The session it belongs to.
    pub session_id: Option<String>,
    /// Time of the event (RFC 3339).
    pub created_at: Option<String>,
}
telemetry!(PromptExecuted, "weakincentives.runtime.events.PromptExecuted");

/// A request to the main loop.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MainLoopRequest {
    /// Id of the request. A second request with the same id is not executed again.
    pub request_id: String,
    /// The request body.
    pub request: Json,
    /// Resource limits.
    pub budget: Option<Budget>,
    /// Deadline (RFC 3339).
    pub deadline: Option<String>,
    /// Resources the request may use; their meaning is defined by the main loop.
    pub resources: Json,
    /// Requester that receives the reply, on `wink:control:<namespace>:reply:<reply_to>`. `None`: no requester waits.
    pub reply_to: Option<String>,
    /// Time of the event (RFC 3339).
    pub created_at: Option<String>,
}

impl Event for MainLoopRequest {
    const TYPE: &'static str = "weakincentives.runtime.main_loop.MainLoopRequest";
}

/// Resource limits of a request. `None` means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Budget {
    /// Input and output tokens together.
    pub max_total_tokens: Option<u64>,
    /// Input tokens.
    pub max_input_tokens: Option<u64>,
    /// Output tokens.
    pub max_output_tokens: Option<u64>,
    /// Calls to models and tools.
    pub max_calls: Option<u64>,
    /// Cost, in millionths of the application's currency.
    pub max_cost_micros: Option<u64>,
}

/// Resources that a request used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Usage")]
pub struct RequestUsage {
    /// Input tokens.
    pub input_tokens: u64,
    /// Output tokens.
    pub output_tokens: u64,
    /// Calls to models and tools.
    pub calls: u64,
    /// Cost, in millionths of the application's currency.
    pub cost_micros: u64,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RequestFailure {
    /// All attempts failed.
    #[default]
    Failed,
    /// The last attempt panicked.
    Panicked,
    /// The main loop reported a permanent failure.
    GivenUp,
    /// Too many worker processes crashed, or lost their lock, while executing it.
    Crashed,
    /// It exceeded its budget.
    OverBudget,
    /// Its deadline passed, or it ran longer than `run_timeout`.
    DeadlinePassed,
    /// Its requester cancelled it.
    Cancelled,
    /// The request could not be decoded by the main loop.
    Malformed,
    /// The output exceeds the payload limit of an event.
    TooLarge,
    /// A reason introduced by a newer version.
    #[serde(other)]
    Other,
}

impl RequestFailure {
    /// The reason's name in events and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Panicked => "panicked",
            Self::GivenUp => "given_up",
            Self::Crashed => "crashed",
            Self::OverBudget => "over_budget",
            Self::DeadlinePassed => "deadline_passed",
            Self::Cancelled => "cancelled",
            Self::Malformed => "malformed",
            Self::TooLarge => "too_large",
            Self::Other => "other",
        }
    }
}

impl std::fmt::Display for RequestFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A request was completed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MainLoopCompleted {
    /// The request.
    pub request_id: String,
    /// The output.
    pub response: Json,
    /// The session in which it was executed.
    pub session_id: Option<String>,
    /// Time of the event (RFC 3339).
    pub completed_at: Option<String>,
    /// Resources charged to the request.
    pub usage: RequestUsage,
}

impl Event for MainLoopCompleted {
    const TYPE: &'static str = "weakincentives.runtime.main_loop.MainLoopCompleted";
}

/// A request failed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MainLoopFailed {
    /// The request.
    pub request_id: String,
    /// Error message.
    pub error: String,
    /// Failure category.
    pub kind: RequestFailure,
    /// The session in which it was executed, if execution started.
    pub session_id: Option<String>,
    /// Time of the event (RFC 3339).
    pub failed_at: Option<String>,
    /// Resources charged to the request.
    pub usage: RequestUsage,
}

impl Event for MainLoopFailed {
    const TYPE: &'static str = "weakincentives.runtime.main_loop.MainLoopFailed";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_types_have_their_wire_names() {
        let names: Vec<String> = EventRegistry::builtin()
            .types()
            .map(|(name, version)| format!("{name} {version}"))
            .collect();
        assert_eq!(
            names,
            [
                "weakincentives.runtime.events.PromptExecuted 1",
                "weakincentives.runtime.events.PromptRendered 1",
                "weakincentives.runtime.events.ToolInvoked 1",
                "weakincentives.runtime.main_loop.MainLoopCompleted 1",
                "weakincentives.runtime.main_loop.MainLoopFailed 1",
                "weakincentives.runtime.main_loop.MainLoopRequest 1",
            ]
        );
    }

    #[test]
    fn missing_and_unknown_fields_are_accepted() {
        let json = r#"{"name":"search","result":{"message":"ok","success":true},"event_id":"e"}"#;
        let event: ToolInvoked = serde_json::from_str(json).unwrap();
        assert_eq!((event.name.as_str(), event.result.success), ("search", true));
        assert_eq!(event.session(), None);
    }

    #[test]
    fn request_failures_are_spelled_the_same_in_events_and_metrics() {
        for kind in [RequestFailure::OverBudget, RequestFailure::Failed, RequestFailure::TooLarge] {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.as_str());
        }
        let newer: MainLoopFailed =
            serde_json::from_str(r#"{"kind":"struck_by_lightning"}"#).unwrap();
        assert_eq!(newer.kind, RequestFailure::Other);
        let older: MainLoopFailed = serde_json::from_str(r#"{"error":"no"}"#).unwrap();
        assert_eq!(older.kind, RequestFailure::Failed);
    }
}
