//! A provider and tools with defects, for `tests/providers.rs` and `tests/extensions.rs`: what a panic in the code of an embedding
//! program may affect, and what not.

#[path = "extensions/chat.rs"]
mod chat;

use std::process::ExitCode;
use std::time::Duration;

use async_trait::async_trait;
use headwater::desk::provider::{
    DeliverError, MappedWebhook, Provider, ProviderReply, ReceivedWebhook,
};
use headwater::desk::{Tool, ToolDefinition, ToolError, ToolRequest};
use serde_json::{Value, json};

/// The provider `chat`, which panics where the webhook or the room says so.
#[derive(Debug)]
struct FaultyChat(chat::Chat);

#[async_trait]
impl Provider for FaultyChat {
    fn name(&self) -> &str {
        self.0.name()
    }

    async fn verify(&self, webhook: &ReceivedWebhook<'_>) -> Result<(), String> {
        assert!(webhook.header("x-panic").is_none(), "a defect in `verify`");
        self.0.verify(webhook).await
    }

    fn map(&self, webhook: &ReceivedWebhook<'_>, payload: &Value) -> Result<MappedWebhook, String> {
        assert!(payload["room"] != "panic-map", "a defect in `map`");
        self.0.map(webhook, payload)
    }

    async fn deliver(&self, reply: &ProviderReply<'_>) -> Result<(), DeliverError> {
        assert!(reply.issue != "panic-deliver", "a defect in `deliver`");
        self.0.deliver(reply).await
    }
}

/// What a tool does.
#[derive(Debug)]
enum Behavior {
    Greets,
    Panics,
    NeverEnds,
}

#[derive(Debug)]
struct OwnTool(ToolDefinition, Behavior);

impl OwnTool {
    fn new(name: &str, changes: bool, behavior: Behavior) -> Self {
        let definition = ToolDefinition {
            changes,
            timeout: Duration::from_millis(500),
            ..ToolDefinition::new(name, "A tool of this program.", json!({"type": "object"}))
        };
        Self(definition, behavior)
    }
}

#[async_trait]
impl Tool for OwnTool {
    fn definition(&self) -> &ToolDefinition {
        &self.0
    }

    async fn call(&self, request: &ToolRequest) -> Result<Value, ToolError> {
        match self.1 {
            Behavior::Greets => Ok(json!({"hello": request.user_id, "from": request.integration})),
            Behavior::Panics => panic!("a defect in a tool"),
            Behavior::NeverEnds => std::future::pending().await,
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let extensions = headwater::Extensions::default()
        .provider(FaultyChat(chat::Chat))
        .tool(OwnTool::new("greet", false, Behavior::Greets))
        .tool(OwnTool::new("panic", true, Behavior::Panics))
        .tool(OwnTool::new("wait", false, Behavior::NeverEnds));
    headwater::main_with_extensions(extensions).await
}
