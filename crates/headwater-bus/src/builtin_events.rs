//! The built-in event types, under the names that other programs know them by.
//!
//! Upstream: model runs and the main loop publish them. Downstream: sessions and whoever watches.
//! Promises: fields that another program leaves out have defaults; fields it adds are ignored.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::error::Result;
use crate::event::{Event, Scope};
use crate::registry::EventRegistry;

impl EventRegistry {
    /// A registry with the built-in types.
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

/// Writes `impl Event` for a type whose session is in its field `session_id`.
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

/// A prompt was made of its template and is about to be sent to a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PromptRendered {
    /// The namespace of the prompt's template.
    pub prompt_ns: String,
    /// The key of the prompt's template.
    pub prompt_key: String,
    /// The name of the prompt, if it has one.
    pub prompt_name: Option<String>,
    /// Which model service it goes to.
    pub adapter: String,
    /// The session it belongs to.
    pub session_id: Option<String>,
    /// What the template was filled with.
    pub render_inputs: Json,
    /// The text that is sent.
    pub rendered_prompt: String,
    /// When, as in RFC 3339.
    pub created_at: Option<String>,
}
telemetry!(PromptRendered, "weakincentives.runtime.events.PromptRendered");

/// A model called a tool, and the tool answered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ToolInvoked {
    /// The prompt in whose course it was called.
    pub prompt_name: String,
    /// Which model service called it.
    pub adapter: String,
    /// The tool.
    pub name: String,
    /// What it was called with.
    pub params: Json,
    /// What it answered.
    pub result: ToolResult,
    /// The session it belongs to.
    pub session_id: Option<String>,
    /// When, as in RFC 3339.
    pub created_at: Option<String>,
    /// What the model's service calls this call.
    pub call_id: Option<String>,
}
telemetry!(ToolInvoked, "weakincentives.runtime.events.ToolInvoked");

/// What a tool answered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ToolResult {
    /// For the model to read.
    pub message: String,
    /// Whether it worked.
    pub success: bool,
    /// For programs to read.
    pub value: Json,
}

/// A model answered a prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PromptExecuted {
    /// The prompt.
    pub prompt_name: String,
    /// Which model service answered.
    pub adapter: String,
    /// The answer.
    pub result: Json,
    /// What it took: tokens in and out, where the service tells.
    pub usage: Json,
    /// The session it belongs to.
    pub session_id: Option<String>,
    /// When, as in RFC 3339.
    pub created_at: Option<String>,
}
telemetry!(PromptExecuted, "weakincentives.runtime.events.PromptExecuted");

/// Somebody asks the main loop to do something.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MainLoopRequest {
    /// What the request is known by; a second one with the same id is not carried out again.
    pub request_id: String,
    /// What to do.
    pub request: Json,
    /// What it may cost.
    pub budget: Option<Budget>,
    /// When it must be done, as in RFC 3339.
    pub deadline: Option<String>,
    /// What it may use.
    pub resources: Json,
    /// Who waits for the reply: it goes to `wink:control:<namespace>:reply:<reply_to>`. Without this, nobody does.
    pub reply_to: Option<String>,
    /// When, as in RFC 3339.
    pub created_at: Option<String>,
}

impl Event for MainLoopRequest {
    const TYPE: &'static str = "weakincentives.runtime.main_loop.MainLoopRequest";
}

/// What a request may cost. What is not said is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Budget {
    /// Tokens in and out together.
    pub max_total_tokens: Option<u64>,
    /// Tokens sent to models.
    pub max_input_tokens: Option<u64>,
    /// Tokens that models answer with.
    pub max_output_tokens: Option<u64>,
    /// Calls to models and tools.
    pub max_calls: Option<u64>,
    /// Money, in millionths of the currency that the application counts in.
    pub max_cost_micros: Option<u64>,
}

/// What a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RequestUsage {
    /// Tokens sent to models.
    pub input_tokens: u64,
    /// Tokens that models answered with.
    pub output_tokens: u64,
    /// Calls to models and tools.
    pub calls: u64,
    /// Money, in millionths of the currency that the application counts in.
    pub cost_micros: u64,
}

/// Why a request was given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RequestFailure {
    /// It failed as often as it may be tried.
    #[default]
    Failed,
    /// It panicked as often as it may be tried.
    Panicked,
    /// Whoever carried it out said that it can never succeed.
    GivenUp,
    /// The processes that carried it out died, as often as they may.
    Crashed,
    /// It took more than its budget.
    OverBudget,
    /// Its deadline passed, or it took longer than any request may.
    DeadlinePassed,
    /// Its requester does not want it any more.
    Cancelled,
    /// The request is not what the main loop understands.
    Malformed,
    /// What came of it is larger than an event may be.
    TooLarge,
    /// Something that only a newer version knows.
    #[serde(other)]
    Other,
}

impl RequestFailure {
    /// Its name, as in events and metrics.
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

/// A request was carried out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MainLoopCompleted {
    /// The request.
    pub request_id: String,
    /// What came of it.
    pub response: Json,
    /// The session in which it was carried out.
    pub session_id: Option<String>,
    /// When, as in RFC 3339.
    pub completed_at: Option<String>,
    /// What it took, as far as it was charged.
    pub usage: RequestUsage,
}

impl Event for MainLoopCompleted {
    const TYPE: &'static str = "weakincentives.runtime.main_loop.MainLoopCompleted";
}

/// A request was given up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MainLoopFailed {
    /// The request.
    pub request_id: String,
    /// Why, for people.
    pub error: String,
    /// Why, for programs.
    pub kind: RequestFailure,
    /// The session in which it was tried, if it came that far.
    pub session_id: Option<String>,
    /// When, as in RFC 3339.
    pub failed_at: Option<String>,
    /// What it took, as far as it was charged.
    pub usage: RequestUsage,
}

impl Event for MainLoopFailed {
    const TYPE: &'static str = "weakincentives.runtime.main_loop.MainLoopFailed";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_types_have_the_names_that_other_programs_know() {
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
    fn what_another_program_leaves_out_or_adds_does_not_matter() {
        let json = r#"{"name":"search","result":{"message":"ok","success":true},"event_id":"e"}"#;
        let event: ToolInvoked = serde_json::from_str(json).unwrap();
        assert_eq!((event.name.as_str(), event.result.success), ("search", true));
        assert_eq!(event.session(), None);
    }

    #[test]
    fn why_a_request_failed_is_spelled_the_same_in_events_and_metrics() {
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
