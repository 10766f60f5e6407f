//! A deterministic, free model that follows a script, then fixed rules.
//!
//! Upstream: `handler`. The default model of a server without `model.url`, and the model of tests.
//! Guarantees: the same prompts in the same order give the same answers.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream;
use tokio::time::sleep;

use crate::desk::model::{
    LanguageModel, ModelAnswer, ModelError, ModelPrompt, ResponseChunk, ResponseStream, TokenUsage,
    ToolCall, Turn, estimate_tokens,
};
use crate::desk::prompt;
use crate::desk::tools;
use crate::text;

/// One step of a script.
#[derive(Clone, Debug)]
pub enum ScriptStep {
    /// Answers with this text.
    Say(String),
    /// Calls a tool with these arguments, in JSON.
    Call {
        /// The tool.
        name: String,
        /// JSON.
        arguments: String,
    },
    /// Fails with this error.
    Fail(ModelError),
    /// Never completes.
    Hang,
}

/// A scripted model.
#[derive(Debug)]
pub struct ScriptedModel {
    script: Mutex<VecDeque<ScriptStep>>,
    delay: Duration,
    is_metered: bool,
    prompts: Mutex<Vec<ModelPrompt>>,
}

/// Number of prompts kept for [`ScriptedModel::prompts`]; older ones are dropped.
const PROMPTS_MAX: usize = 1000;

impl Default for ScriptedModel {
    fn default() -> Self {
        Self::new([])
    }
}

impl ScriptedModel {
    /// Runs these steps in order, then follows the rules.
    pub fn new(script: impl IntoIterator<Item = ScriptStep>) -> Self {
        let script = Mutex::new(script.into_iter().collect());
        Self { script, delay: Duration::ZERO, is_metered: false, prompts: Mutex::default() }
    }

    /// Applies token budgets, as for a paid model.
    pub fn metered(mut self) -> Self {
        self.is_metered = true;
        self
    }

    /// Delays every answer by `delay`.
    pub fn with_delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// The prompts received so far, the newest thousand.
    pub fn prompts(&self) -> Vec<ModelPrompt> {
        lock(&self.prompts).clone()
    }

    fn next_step(&self, model_prompt: &ModelPrompt) -> ScriptStep {
        let step = lock(&self.script).pop_front();
        step.unwrap_or_else(|| rule_based_step(model_prompt))
    }
}

#[async_trait]
impl LanguageModel for ScriptedModel {
    fn name(&self) -> &str {
        "scripted"
    }

    fn is_free(&self) -> bool {
        !self.is_metered
    }

    async fn complete(&self, model_prompt: &ModelPrompt) -> Result<ResponseStream, ModelError> {
        {
            let mut prompts = lock(&self.prompts);
            if prompts.len() >= PROMPTS_MAX {
                prompts.remove(0);
            }
            prompts.push(model_prompt.clone());
        }
        let step = self.next_step(model_prompt);
        sleep(self.delay).await;
        let input_tokens = model_prompt.tokens_estimate();
        let usage = |bytes| {
            ResponseChunk::Usage(TokenUsage { input_tokens, output_tokens: estimate_tokens(bytes) })
        };
        match step {
            ScriptStep::Say(text) => {
                let usage = usage(text.len());
                // Several chunks, like a streaming service.
                let mut chunks: Vec<ResponseChunk> = text
                    .split_inclusive(' ')
                    .map(|word| ResponseChunk::Text(word.to_owned()))
                    .collect();
                chunks.push(usage);
                Ok(ResponseStream::ready(chunks))
            }
            ScriptStep::Call { name, arguments } => {
                let usage = usage(arguments.len());
                let id = format!("call-{}", model_prompt.turns.len());
                Ok(ResponseStream::ready(vec![
                    ResponseChunk::Call(ToolCall { id, name, arguments }),
                    usage,
                ]))
            }
            ScriptStep::Fail(error) => Err(error),
            ScriptStep::Hang => Ok(ResponseStream::new(stream::pending())),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no code panics while it holds this lock")
}

/// The rules: certain words in the newest message trigger a tool; everything else is answered.
fn rule_based_step(model_prompt: &ModelPrompt) -> ScriptStep {
    let Some(newest) = model_prompt.turns.iter().find_map(|turn| match turn {
        Turn::User(data) => prompt::newest_user_text(data),
        _ => None,
    }) else {
        return ScriptStep::Say("There is nothing to answer.".to_owned());
    };
    let words = newest.text.to_lowercase();
    let has = |any: &[&str]| any.iter().any(|word| words.contains(word));
    let called = |name: &str| model_prompt.turns.iter().any(|turn| calls(turn, name));
    let may = |name: &str| model_prompt.tools.iter().any(|tool| tool.name == name) && !called(name);
    let call = |name: &str, arguments: serde_json::Value| ScriptStep::Call {
        name: name.to_owned(),
        arguments: arguments.to_string(),
    };
    if may(tools::HAND_OVER) && has(&["human", "person", "lawyer"]) {
        return call(
            tools::HAND_OVER,
            serde_json::json!({"reason": "the user asked for a person"}),
        );
    }
    if may(tools::CLOSE_TICKET) && has(&["thank you, solved", "close this", "please close"]) {
        return call(
            tools::CLOSE_TICKET,
            serde_json::json!({"reason": "the user said it is solved"}),
        );
    }
    if may(tools::SEARCH_TICKETS) && has(&["again", "last time", "as before"]) {
        return call(tools::SEARCH_TICKETS, serde_json::json!({"query": shortened(&newest.text)}));
    }
    let messages = if newest.pending == 1 { "message" } else { "messages" };
    let done = if called(tools::CLOSE_TICKET) {
        " The ticket is closed."
    } else if called(tools::HAND_OVER) {
        " A person will take over."
    } else if called(tools::SEARCH_TICKETS) {
        " I have looked at your earlier tickets."
    } else {
        ""
    };
    ScriptStep::Say(format!(
        "Thank you. I have read your {} {messages}; the last one says: \u{201c}{}\u{201d}.{done}",
        newest.pending,
        shortened(&newest.text)
    ))
}

fn calls(turn: &Turn, name: &str) -> bool {
    matches!(turn, Turn::Assistant(ModelAnswer { calls, .. }) if calls.iter().any(|call| call.name == name))
}

fn shortened(text: &str) -> String {
    let line = text::one_line(text, usize::MAX);
    let short: String = line.chars().take(120).collect();
    if short.len() < line.len() { format!("{short}…") } else { short }
}
