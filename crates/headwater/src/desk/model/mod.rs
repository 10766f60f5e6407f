//! The interface to language models: a prompt in, a streamed answer out.
//!
//! Upstream: `handler`. Downstream: `openai` (any OpenAI-compatible chat endpoint) and `scripted`.
//! Guarantees: errors are classified by who can fix them; a collected answer stays within the limits.
//! Not here: the text of a prompt (see `prompt`), what tools do (see `tools`).

pub mod openai;
pub mod scripted;
mod sse;

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use serde_json::Value as Json;

use crate::limits::{ANSWER_BYTES_MAX, TOOL_ARGUMENTS_BYTES_MAX, TOOL_CALLS_MAX};

/// A language model. Dropping a call, or the stream it returned, cancels the request.
#[async_trait]
pub trait LanguageModel: Send + Sync + fmt::Debug {
    /// Name of the model, for people and in events.
    fn name(&self) -> &str;

    /// Whether it is free, so that token budgets do not apply. Default: `false`.
    fn is_free(&self) -> bool {
        false
    }

    /// Requests a completion. Chunks arrive as the model produces them; nothing follows an error.
    async fn complete(&self, prompt: &ModelPrompt) -> Result<ResponseStream, ModelError>;
}

/// A prompt.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct ModelPrompt {
    /// The conversation with the model, oldest first.
    pub turns: Vec<Turn>,
    /// The tools it may call. Empty: it has to answer with text.
    pub tools: Vec<ToolSpec>,
    /// Maximum tokens of the answer.
    pub output_tokens_max: u32,
}

impl ModelPrompt {
    /// Estimated tokens: four bytes each, plus a constant per turn and tool.
    pub fn tokens_estimate(&self) -> u64 {
        let turns: usize = self.turns.iter().map(|turn| turn.bytes() + 16).sum();
        let tools: usize =
            self.tools.iter().map(|tool| tool.parameters.to_string().len() + 64).sum();
        estimate_tokens(turns + tools)
    }
}

/// Estimated tokens of `bytes` bytes of text.
pub(crate) fn estimate_tokens(bytes: usize) -> u64 {
    (bytes as u64).div_ceil(4)
}

/// One turn of the conversation with a model.
#[derive(Clone, Debug, PartialEq)]
pub enum Turn {
    /// Instructions of the desk. Never contains user text.
    System(String),
    /// Data for the model. User text is in here, escaped.
    User(String),
    /// An earlier answer of the model.
    Assistant(ModelAnswer),
    /// The result of a tool call.
    ToolResult {
        /// The id of the call.
        call_id: String,
        /// JSON.
        content: String,
    },
}

impl Turn {
    fn bytes(&self) -> usize {
        match self {
            Self::System(text) | Self::User(text) => text.len(),
            Self::Assistant(answer) => {
                let calls: usize = answer.calls.iter().map(|call| call.arguments.len() + 32).sum();
                answer.text.len() + calls
            }
            Self::ToolResult { content, .. } => content.len(),
        }
    }
}

/// A tool as a model sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolSpec {
    /// Its name.
    pub name: &'static str,
    /// What it does.
    pub description: &'static str,
    /// JSON Schema of its arguments.
    pub parameters: Json,
}

/// A part of a streamed answer.
#[derive(Clone, Debug, PartialEq)]
pub enum ResponseChunk {
    /// More text.
    Text(String),
    /// A tool to call.
    Call(ToolCall),
    /// Token usage as counted by the service.
    Usage(TokenUsage),
    /// The answer is incomplete. A complete one has no such chunk.
    Incomplete(IncompleteReason),
}

/// Why an answer is incomplete. It must not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IncompleteReason {
    /// The maximum number of output tokens was reached.
    Length,
    /// The model or a filter of the service refused to answer.
    Refused,
}

/// A tool call requested by a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Identifies the call; its result refers to it.
    pub id: String,
    /// The tool.
    pub name: String,
    /// JSON as written by the model; untrusted.
    pub arguments: String,
}

/// Token usage of a model call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct TokenUsage {
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
}

impl TokenUsage {
    /// Input plus output tokens.
    pub fn total(self) -> u64 {
        self.input_tokens.saturating_add(self.output_tokens)
    }

    /// The sum of both.
    pub fn plus(self, other: Self) -> Self {
        Self {
            input_tokens: self.input_tokens.saturating_add(other.input_tokens),
            output_tokens: self.output_tokens.saturating_add(other.output_tokens),
        }
    }
}

/// A complete answer.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct ModelAnswer {
    /// The text.
    pub text: String,
    /// Requested tool calls, in order.
    pub calls: Vec<ToolCall>,
    /// Token usage; `None` if the service did not report it.
    pub usage: Option<TokenUsage>,
    /// Why the answer is incomplete; `None` if it is complete.
    pub incomplete: Option<IncompleteReason>,
}

/// A streamed answer.
pub struct ResponseStream(BoxStream<'static, Result<ResponseChunk, ModelError>>);

impl ResponseStream {
    /// Wraps a stream of chunks.
    pub fn new(
        chunks: impl futures_util::Stream<Item = Result<ResponseChunk, ModelError>> + Send + 'static,
    ) -> Self {
        Self(chunks.boxed())
    }

    /// A stream of chunks that are already available.
    pub fn ready(chunks: Vec<ResponseChunk>) -> Self {
        Self::new(stream::iter(chunks.into_iter().map(Ok)))
    }

    /// The next chunk; `None` at the end. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<ResponseChunk, ModelError>> {
        self.0.next().await
    }

    /// Collects the complete answer. Fails with [`ModelError::InvalidResponse`] if it exceeds a limit.
    pub async fn collect(self) -> Result<ModelAnswer, ModelError> {
        self.collect_with(|_| {}).await
    }

    /// The same, and calls `on_text` with each chunk of text.
    pub(crate) async fn collect_with(
        mut self,
        on_text: impl Fn(&str),
    ) -> Result<ModelAnswer, ModelError> {
        let mut answer = ModelAnswer::default();
        while let Some(chunk) = self.next().await {
            match chunk? {
                ResponseChunk::Text(text) => {
                    on_text(&text);
                    answer.text.push_str(&text);
                }
                ResponseChunk::Call(call) => answer.calls.push(call),
                ResponseChunk::Usage(usage) => answer.usage = Some(usage),
                ResponseChunk::Incomplete(reason) => answer.incomplete = Some(reason),
            }
            let too_long = answer.text.len() > ANSWER_BYTES_MAX
                || answer.calls.len() > TOOL_CALLS_MAX
                || answer.calls.iter().any(|call| call.arguments.len() > TOOL_ARGUMENTS_BYTES_MAX);
            if too_long {
                let problem = format!(
                    "longer than {ANSWER_BYTES_MAX} bytes, {TOOL_CALLS_MAX} tool calls or \
                     {TOOL_ARGUMENTS_BYTES_MAX} bytes of arguments"
                );
                return Err(ModelError::InvalidResponse(problem));
            }
        }
        Ok(answer)
    }
}

impl fmt::Debug for ResponseStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ResponseStream")
    }
}

/// Who can fix a failed model call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The operator of this program: settings, or a request that the service does not accept.
    Ours,
    /// The service: it is unreachable, overloaded, or answers incompletely.
    Theirs,
    /// The text of this conversation. Other conversations are not affected.
    Content,
}

impl Fault {
    /// The name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Theirs => "theirs",
            Self::Content => "content",
        }
    }
}

/// Why a model call failed. Never contains the API key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The service is rate limiting or overloaded: retry after this time.
    #[error("model rate limited or overloaded: {reason}")]
    RateLimited {
        /// When to retry, if the service said so.
        after: Option<Duration>,
        /// Status and message of the service.
        reason: String,
    },
    /// No connection to the service: retry later.
    #[error("model unreachable; check `model.url`: {0}")]
    Unreachable(String),
    /// No answer, or an incomplete one: retry later. Tokens may have been used.
    #[error("model call failed: {0}")]
    Unavailable(String),
    /// The response is invalid or empty: retry later. Tokens may have been used.
    #[error("invalid response from the model: {0}")]
    InvalidResponse(String),
    /// Key, model name or address are wrong. The operator must fix the settings.
    #[error("model service denied access; check `model.url`, `model.name` and the key: {0}")]
    Unauthorized(String),
    /// The service does not accept the request, whatever its text. The operator must fix the settings.
    #[error("model service rejected the request; check `model.url` and `model.name`: {0}")]
    InvalidRequest(String),
    /// The prompt is longer than the model allows.
    #[error("prompt is too long for the model: {0}")]
    TooLong(String),
    /// The service rejected the text of this prompt. Retrying will not help.
    #[error("model rejected the prompt: {0}")]
    Rejected(String),
}

impl ModelError {
    /// Who can fix it.
    pub fn fault(&self) -> Fault {
        match self {
            Self::RateLimited { .. }
            | Self::Unreachable(_)
            | Self::Unavailable(_)
            | Self::InvalidResponse(_) => Fault::Theirs,
            Self::Unauthorized(_) | Self::InvalidRequest(_) => Fault::Ours,
            Self::TooLong(_) | Self::Rejected(_) => Fault::Content,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(arguments: String) -> ResponseChunk {
        ResponseChunk::Call(ToolCall { id: "1".into(), name: "search".into(), arguments })
    }

    #[tokio::test]
    async fn chunks_are_collected_in_order() {
        let usage = TokenUsage { input_tokens: 3, output_tokens: 2 };
        let chunks = vec![
            ResponseChunk::Text("Hel".into()),
            call("{}".into()),
            ResponseChunk::Text("lo".into()),
            ResponseChunk::Usage(usage),
        ];
        let answer = ResponseStream::ready(chunks).collect().await.unwrap();
        assert_eq!((answer.text.as_str(), answer.calls.len()), ("Hello", 1));
        assert_eq!(answer.usage.unwrap().total(), 5);
    }

    #[tokio::test]
    async fn an_answer_over_a_limit_is_rejected() {
        let text = ResponseChunk::Text("x".repeat(ANSWER_BYTES_MAX / 2 + 1));
        let many = vec![call("{}".into()); TOOL_CALLS_MAX + 1];
        let long = vec![call("x".repeat(TOOL_ARGUMENTS_BYTES_MAX + 1))];
        for chunks in [vec![text.clone(), text], many, long] {
            let error = ResponseStream::ready(chunks).collect().await.unwrap_err();
            assert!(matches!(error, ModelError::InvalidResponse(_)), "{error}");
        }
    }
}
