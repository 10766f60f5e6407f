//! The seam to language models: a prompt goes in, an answer comes out piece by piece.
//!
//! Upstream: `handler` asks. Downstream: `openai` (any chat endpoint that speaks like OpenAI's) and `scripted`.
//! Promises: errors are split by what to do next; an answer that is gathered stays within the limits.
//! Not here: what a prompt says (see `prompt`), what tools do (see `tools`).

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

/// Answers prompts. Dropping a call, or what it returned, ends the work.
#[async_trait]
pub trait LanguageModel: Send + Sync + fmt::Debug {
    /// How it is called, for people and in events.
    fn name(&self) -> &str;

    /// Whether it costs nothing, so that token budgets do not apply. Default: no.
    fn is_free(&self) -> bool {
        false
    }

    /// Begins to answer. The pieces come as they are made; after an error nothing follows.
    async fn ask(&self, prompt: &ModelPrompt) -> Result<Pieces, ModelError>;
}

/// What a model gets to see.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct ModelPrompt {
    /// The conversation with the model, oldest first.
    pub turns: Vec<Turn>,
    /// The tools it may call; none: it has to answer in words.
    pub tools: Vec<ToolSpec>,
    /// The most tokens of its answer.
    pub output_tokens_max: u32,
}

impl ModelPrompt {
    /// About how many tokens it is: four bytes each, and a few for what is around.
    pub fn tokens_estimate(&self) -> u64 {
        let turns: usize = self.turns.iter().map(|turn| turn.bytes() + 16).sum();
        let tools: usize =
            self.tools.iter().map(|tool| tool.parameters.to_string().len() + 64).sum();
        estimate_tokens(turns + tools)
    }
}

/// About how many tokens so many bytes are.
pub(crate) fn estimate_tokens(bytes: usize) -> u64 {
    (bytes as u64).div_ceil(4)
}

/// One turn of the conversation with a model.
#[derive(Clone, Debug, PartialEq)]
pub enum Turn {
    /// What we tell the model to do. Never holds a word of a user.
    Instruction(String),
    /// What the model is to work with: text of users is in here, as data.
    Data(String),
    /// What the model said before.
    Answer(Answer),
    /// What came of a tool that it called.
    ToolResult {
        /// The call.
        call_id: String,
        /// JSON.
        content: String,
    },
}

impl Turn {
    fn bytes(&self) -> usize {
        match self {
            Self::Instruction(text) | Self::Data(text) => text.len(),
            Self::Answer(answer) => {
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

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// More text.
    Text(String),
    /// A tool to call.
    Call(ToolCall),
    /// What it took, as the service counts.
    Usage(Usage),
}

/// A model's wish to call a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// What the result is to be known by.
    pub id: String,
    /// The tool.
    pub name: String,
    /// JSON, as the model wrote it: not to be trusted.
    pub arguments: String,
}

/// Tokens in and out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Usage {
    /// Of the prompt.
    pub input_tokens: u64,
    /// Of the answer.
    pub output_tokens: u64,
}

impl Usage {
    /// Both together.
    pub fn total(self) -> u64 {
        self.input_tokens.saturating_add(self.output_tokens)
    }

    /// This and another.
    pub fn plus(self, other: Self) -> Self {
        Self {
            input_tokens: self.input_tokens.saturating_add(other.input_tokens),
            output_tokens: self.output_tokens.saturating_add(other.output_tokens),
        }
    }
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Answer {
    /// What the model says.
    pub text: String,
    /// The tools it wants to be called, in order.
    pub calls: Vec<ToolCall>,
    /// What it took; `None` if the service did not tell.
    pub usage: Option<Usage>,
}

/// The pieces of an answer on their way.
pub struct Pieces(BoxStream<'static, Result<Piece, ModelError>>);

impl Pieces {
    /// Pieces that a stream brings.
    pub fn new(
        pieces: impl futures_util::Stream<Item = Result<Piece, ModelError>> + Send + 'static,
    ) -> Self {
        Self(pieces.boxed())
    }

    /// Pieces that are all here.
    pub fn ready(pieces: Vec<Piece>) -> Self {
        Self::new(stream::iter(pieces.into_iter().map(Ok)))
    }

    /// The next piece; `None` at the end. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<Piece, ModelError>> {
        self.0.next().await
    }

    /// Waits for the whole answer, within the limits.
    pub async fn gather(mut self) -> Result<Answer, ModelError> {
        let mut answer = Answer::default();
        while let Some(piece) = self.next().await {
            match piece? {
                Piece::Text(text) => answer.text.push_str(&text),
                Piece::Call(call) => answer.calls.push(call),
                Piece::Usage(usage) => answer.usage = Some(usage),
            }
            let too_long = answer.text.len() > ANSWER_BYTES_MAX
                || answer.calls.len() > TOOL_CALLS_MAX
                || answer.calls.iter().any(|call| call.arguments.len() > TOOL_ARGUMENTS_BYTES_MAX);
            if too_long {
                let problem = format!(
                    "it is longer than {ANSWER_BYTES_MAX} bytes, {TOOL_CALLS_MAX} calls or \
                     {TOOL_ARGUMENTS_BYTES_MAX} bytes of arguments"
                );
                return Err(ModelError::Garbled(problem));
            }
        }
        Ok(answer)
    }
}

impl fmt::Debug for Pieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pieces")
    }
}

/// Why there is no answer. Never holds a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The service has too much to do, or is shut for a while, or we asked too often: ask again after this time.
    #[error("the model is busy: {reason}")]
    Busy {
        /// When to ask again, if the service said so.
        after: Option<Duration>,
        /// What it said.
        reason: String,
    },
    /// The service cannot be reached: ask again later.
    #[error("the model is away: {0}")]
    Away(String),
    /// The service did not answer, or not to the end: ask again later. It may have cost something.
    #[error("the model is unavailable: {0}")]
    Unavailable(String),
    /// The service refuses us: key, name of the model or address are wrong. A person must mend the settings.
    #[error("the model's service refuses us, check model.url, model.name and the key: {0}")]
    Denied(String),
    /// The service refuses this very prompt. Asking again is of no use.
    #[error("the model refuses this prompt: {0}")]
    Refused(String),
    /// The answer makes no sense. Another try may bring a better one.
    #[error("the model's answer makes no sense: {0}")]
    Garbled(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(arguments: String) -> Piece {
        Piece::Call(ToolCall { id: "1".into(), name: "search".into(), arguments })
    }

    #[tokio::test]
    async fn pieces_become_one_answer_in_order() {
        let usage = Usage { input_tokens: 3, output_tokens: 2 };
        let pieces = vec![
            Piece::Text("Hel".into()),
            call("{}".into()),
            Piece::Text("lo".into()),
            Piece::Usage(usage),
        ];
        let answer = Pieces::ready(pieces).gather().await.unwrap();
        assert_eq!((answer.text.as_str(), answer.calls.len()), ("Hello", 1));
        assert_eq!(answer.usage.unwrap().total(), 5);
    }

    #[tokio::test]
    async fn an_answer_beyond_a_limit_is_refused_and_not_kept() {
        let text = Piece::Text("x".repeat(ANSWER_BYTES_MAX / 2 + 1));
        let many = vec![call("{}".into()); TOOL_CALLS_MAX + 1];
        let long = vec![call("x".repeat(TOOL_ARGUMENTS_BYTES_MAX + 1))];
        for pieces in [vec![text.clone(), text], many, long] {
            let error = Pieces::ready(pieces).gather().await.unwrap_err();
            assert!(matches!(error, ModelError::Garbled(_)), "{error}");
        }
    }
}
