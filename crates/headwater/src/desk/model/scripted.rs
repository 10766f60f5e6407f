//! A model without a model: says what a script says, or answers by fixed rules. Deterministic, and costs nothing.
//!
//! Upstream: `handler`, like any model; the default of a server without `model.url`, and the model of tests.
//! Promises: the same prompts in the same order give the same answers.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream;
use tokio::time::sleep;

use crate::desk::model::{
    Answer, LanguageModel, ModelError, ModelPrompt, Piece, Pieces, ToolCall, Turn, Usage,
    estimate_tokens,
};
use crate::desk::prompt;
use crate::desk::tools;
use crate::text;

/// One answer of a script.
#[derive(Clone, Debug)]
pub enum Line {
    /// Says this.
    Say(String),
    /// Calls a tool with these arguments, in JSON.
    Call {
        /// The tool.
        name: String,
        /// JSON.
        arguments: String,
    },
    /// Fails.
    Fail(ModelError),
    /// Never ends.
    Hang,
}

/// A model that follows a script, then its rules.
#[derive(Debug)]
pub struct ScriptedModel {
    script: Mutex<VecDeque<Line>>,
    delay: Duration,
    is_metered: bool,
    asked: Mutex<Vec<ModelPrompt>>,
}

/// Prompts that are remembered for those who ask; older ones are forgotten.
const ASKED_MAX: usize = 1000;

impl Default for ScriptedModel {
    fn default() -> Self {
        Self::new([])
    }
}

impl ScriptedModel {
    /// Says these lines in order; when they are used up, it goes by its rules.
    pub fn new(script: impl IntoIterator<Item = Line>) -> Self {
        let script = Mutex::new(script.into_iter().collect());
        Self { script, delay: Duration::ZERO, is_metered: false, asked: Mutex::default() }
    }

    /// Subject to token budgets, as models that cost something are.
    pub fn metered(mut self) -> Self {
        self.is_metered = true;
        self
    }

    /// Takes this long for every answer.
    pub fn slow(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// The prompts it was asked so far, the newest thousand.
    pub fn asked(&self) -> Vec<ModelPrompt> {
        locked(&self.asked).clone()
    }

    fn next_line(&self, model_prompt: &ModelPrompt) -> Line {
        let line = locked(&self.script).pop_front();
        line.unwrap_or_else(|| rule(model_prompt))
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

    async fn ask(&self, model_prompt: &ModelPrompt) -> Result<Pieces, ModelError> {
        {
            let mut asked = locked(&self.asked);
            if asked.len() >= ASKED_MAX {
                asked.remove(0);
            }
            asked.push(model_prompt.clone());
        }
        let line = self.next_line(model_prompt);
        sleep(self.delay).await;
        let input_tokens = model_prompt.tokens_estimate();
        let usage =
            |bytes| Piece::Usage(Usage { input_tokens, output_tokens: estimate_tokens(bytes) });
        match line {
            Line::Say(text) => {
                let usage = usage(text.len());
                // In several pieces, as a service would.
                let mut pieces: Vec<Piece> =
                    text.split_inclusive(' ').map(|word| Piece::Text(word.to_owned())).collect();
                pieces.push(usage);
                Ok(Pieces::ready(pieces))
            }
            Line::Call { name, arguments } => {
                let usage = usage(arguments.len());
                let id = format!("call-{}", model_prompt.turns.len());
                Ok(Pieces::ready(vec![Piece::Call(ToolCall { id, name, arguments }), usage]))
            }
            Line::Fail(error) => Err(error),
            Line::Hang => Ok(Pieces::new(stream::pending())),
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no code panics while it holds this lock")
}

/// What the model does without a script: a few words of the newest message make it use a tool, all else is answered.
fn rule(model_prompt: &ModelPrompt) -> Line {
    let Some(newest) = model_prompt.turns.iter().find_map(|turn| match turn {
        Turn::Data(data) => prompt::newest_user_text(data),
        _ => None,
    }) else {
        return Line::Say("There is nothing to answer.".to_owned());
    };
    let words = newest.text.to_lowercase();
    let has = |any: &[&str]| any.iter().any(|word| words.contains(word));
    let called = |name: &str| model_prompt.turns.iter().any(|turn| calls(turn, name));
    let may = |name: &str| model_prompt.tools.iter().any(|tool| tool.name == name) && !called(name);
    let call = |name: &str, arguments: serde_json::Value| Line::Call {
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
    Line::Say(format!(
        "Thank you. I have read your {} {messages}; the last one says: \u{201c}{}\u{201d}.{done}",
        newest.pending,
        shortened(&newest.text)
    ))
}

fn calls(turn: &Turn, name: &str) -> bool {
    matches!(turn, Turn::Answer(Answer { calls, .. }) if calls.iter().any(|call| call.name == name))
}

fn shortened(text: &str) -> String {
    let line = text::one_line(text, usize::MAX);
    let short: String = line.chars().take(120).collect();
    if short.len() < line.len() { format!("{short}…") } else { short }
}
