//! The interface of tools that a model may call beside the built-in ones.
//!
//! Upstream: `toolbox` checks the arguments of a call; `tool_calls` makes it, through the effect ledger if the tool changes
//! something. Downstream: `http_tool`, and tools of an embedding program (`Extensions::tool`).
//! Guarantees: a tool gets only arguments that match its schema, and only data of the issue it is called for.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use headwater_issue::Issue;
use serde_json::Value as Json;

use crate::limits::TOOL_TIMEOUT_DEFAULT;

/// A tool. Its calls may be dropped at any await if it changes nothing; otherwise they end by themselves or at the timeout.
#[async_trait]
pub trait Tool: Send + Sync + fmt::Debug + 'static {
    /// What it is; always the same.
    fn definition(&self) -> &ToolDefinition;

    /// Calls it. The result is shown to the model.
    async fn call(&self, request: &ToolRequest) -> Result<Json, ToolError>;

    /// What an earlier call with the same idempotency key has done; `None` if it has done nothing. Only for tools with
    /// [`ToolRecovery::LookUp`].
    async fn look_up(&self, request: &ToolRequest) -> Result<Option<Json>, ToolError> {
        let name = &request.tool;
        Err(ToolError::Unknown(format!("tool `{name}` has no look-up")))
    }
}

/// What a tool is.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolDefinition {
    /// Its name: 1 to 64 letters, digits, `-` and `_`.
    pub name: String,
    /// What it does, for the model.
    pub description: String,
    /// JSON Schema of its arguments, with `"type": "object"`.
    pub parameters: Json,
    /// Integrations whose issues may use it. Empty: all.
    pub integrations: Vec<String>,
    /// Whether a call changes something. Then it goes through the effect ledger. Default: true.
    pub changes: bool,
    /// Whether a person has to approve each call. Default: false.
    pub approval: bool,
    /// Limit of one call, at most [`TOOL_TIMEOUT_MAX`](crate::limits::TOOL_TIMEOUT_MAX). Default: 10 s.
    pub timeout: Duration,
    /// What happens after a call without a known outcome. Default: a person.
    pub recovery: ToolRecovery,
}

impl ToolDefinition {
    /// A tool of all integrations that changes something and needs no approval.
    pub fn new(
        name: impl Into<String>,
        description: impl Into<String>,
        parameters: impl Into<Json>,
    ) -> Self {
        Self {
            name: name.into(),
            description: description.into(),
            parameters: parameters.into(),
            integrations: Vec::new(),
            changes: true,
            approval: false,
            timeout: TOOL_TIMEOUT_DEFAULT,
            recovery: ToolRecovery::Person,
        }
    }

    /// Whether issues of this integration may use it.
    pub fn is_for(&self, integration: &str) -> bool {
        self.integrations.is_empty() || self.integrations.iter().any(|one| one == integration)
    }

    /// Whether its calls go through the effect ledger.
    pub(crate) fn is_recorded(&self) -> bool {
        self.changes || self.approval
    }
}

/// What happens after a call without a known outcome, for example because the process was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ToolRecovery {
    /// The call is repeated with the same idempotency key, which the service respects.
    Repeat,
    /// The tool is asked what the call has done; if nothing, it is made.
    LookUp,
    /// A person takes the issue over.
    #[default]
    Person,
}

/// One call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolRequest {
    /// Name of the tool.
    pub tool: String,
    /// Arguments that match the schema: an object.
    pub arguments: Json,
    /// The same for every attempt of this call, and different for any other call.
    pub idempotency_key: String,
    /// Integration of the issue.
    pub integration: String,
    /// Project id of the issue at its provider; empty if it has none.
    pub external_project_id: String,
    /// Issue id at its provider; of a ticket, the ticket id.
    pub external_issue_id: String,
    /// User of the ticket, if it is known.
    pub user_id: Option<String>,
}

impl ToolRequest {
    pub(crate) fn new(
        issue: &Issue,
        user_id: Option<&str>,
        tool: &str,
        arguments: Json,
        idempotency_key: String,
    ) -> Self {
        Self {
            tool: tool.to_owned(),
            arguments,
            idempotency_key,
            integration: issue.integration.clone(),
            external_project_id: issue.external_project_id.clone(),
            external_issue_id: issue.external_issue_id.clone(),
            user_id: user_id.map(str::to_owned),
        }
    }
}

/// Why a call gave no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// The call is invalid, and so is every repetition: it has changed nothing.
    #[error("{0}")]
    Rejected(String),
    /// This attempt was not carried out, for example because there was no connection. Another one may be.
    #[error("{0}")]
    NotCarriedOut(String),
    /// It is unknown whether the call has changed something, for example after a timeout.
    #[error("{0}")]
    Unknown(String),
}
