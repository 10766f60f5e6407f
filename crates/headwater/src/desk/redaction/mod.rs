//! Redaction: personal data becomes placeholders before a model sees it, and is restored in what the model writes.
//!
//! Upstream: `handler`, for each run; `config` makes the rules. Downstream: `patterns` finds the data. No I/O.
//! Guarantees: a value has one placeholder within a run, such as `[EMAIL_1]`; restoring a redacted text gives back the same text.
//! Text of users that looks like a placeholder is replaced, too, so it stands for itself and for no other value. Matching takes
//! linear time for the built-in patterns. At most [`REDACTED_VALUES_MAX`] values are remembered; further ones are replaced by a
//! placeholder without a number, which is not restored.
//! Not promised: that every personal value is found. A placeholder that the model changes is not restored.

mod patterns;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use regex::{Captures, Regex};
use serde_json::Value as Json;

use crate::desk::conversation::{Conversation, ConversationEntry};
use crate::desk::model::ToolCall;
use crate::desk::prompt::escaped_json;
use crate::desk::redaction::patterns::Detector;
use crate::desk::tools::ToolOutcome;
use crate::limits::{REDACTED_VALUES_MAX, REDACTION_PATTERN_BYTES_MAX, REDACTION_PATTERNS_MAX};

pub(crate) use crate::desk::redaction::patterns::BUILT_IN;

/// Placeholders, ours and those that a user wrote.
const PLACEHOLDER: &str = r"\[[A-Z][A-Z0-9_]{0,63}_[0-9]{1,9}\]";

/// Longest placeholder: brackets, name, underscore and number.
const PLACEHOLDER_BYTES_MAX: usize = 76;

/// Kind of text that looks like a placeholder.
const LITERAL: &str = "TEXT";

/// What is redacted; by default nothing.
pub(crate) struct RedactionRules {
    detectors: Vec<Detector>,
    placeholder: Regex,
}

impl std::fmt::Debug for RedactionRules {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kinds = self.detectors.iter().map(|one| one.kind.as_str());
        f.debug_list().entries(kinds).finish()
    }
}

impl RedactionRules {
    /// Rules with these [`BUILT_IN`] patterns, and custom ones with their names. Without any, nothing is redacted.
    pub(crate) fn new(
        built_in: &[&str],
        custom: &[(String, String)],
    ) -> Result<Self, RedactionRuleError> {
        let invalid =
            |name: &str, problem: String| RedactionRuleError { name: name.to_owned(), problem };
        if custom.len() > REDACTION_PATTERNS_MAX {
            let problem = format!("there are more than {REDACTION_PATTERNS_MAX} patterns");
            return Err(invalid(&custom[REDACTION_PATTERNS_MAX].0, problem));
        }
        let placeholder = Regex::new(PLACEHOLDER).expect("the pattern is valid");
        let mut detectors = Vec::new();
        for (name, pattern) in custom {
            let is_name = name.starts_with(|c: char| c.is_ascii_lowercase())
                && name.len() <= 32
                && name.chars().all(|c| matches!(c, 'a'..='z' | '0'..='9' | '_'));
            if !is_name {
                let problem = "the name must have 1 to 32 characters of a-z, 0-9 and _, and begin with a letter";
                return Err(invalid(name, problem.to_owned()));
            }
            if pattern.len() > REDACTION_PATTERN_BYTES_MAX {
                let problem =
                    format!("the pattern is longer than {REDACTION_PATTERN_BYTES_MAX} bytes");
                return Err(invalid(name, problem));
            }
            detectors
                .push(Detector::custom(name, pattern).map_err(|problem| invalid(name, problem))?);
        }
        for name in built_in {
            let detector = Detector::built_in(name);
            detectors.push(detector.ok_or_else(|| invalid(name, "unknown pattern".to_owned()))?);
        }
        if !detectors.is_empty() {
            detectors.insert(0, Detector::of(LITERAL, placeholder.clone()));
        }
        Ok(Self { detectors, placeholder })
    }

    /// What is to be replaced: ranges in order, which do not overlap, and their kinds.
    fn find(&self, text: &str) -> Vec<(Range<usize>, &str)> {
        let find = |detector: &'_ Detector| detector.find(text);
        let mut found: Vec<(Range<usize>, &str)> = Vec::new();
        for detector in &self.detectors {
            found.extend(find(detector).into_iter().map(|range| (range, detector.kind.as_str())));
        }
        // Stable: of two that begin together and are equally long, the earlier rule names the kind.
        found.sort_by_key(|(range, _)| (range.start, std::cmp::Reverse(range.end)));
        let mut merged: Vec<(Range<usize>, &str)> = Vec::new();
        for (range, kind) in found {
            match merged.last_mut() {
                // Both as a whole: a part of a value would be left over otherwise.
                Some((last, _)) if range.start < last.end => last.end = last.end.max(range.end),
                _ => merged.push((range, kind)),
            }
        }
        merged
    }
}

/// A custom pattern that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("[[redaction]] `{name}`: {problem}")]
pub(crate) struct RedactionRuleError {
    name: String,
    problem: String,
}

impl Default for RedactionRules {
    fn default() -> Self {
        Self::new(&[], &[]).expect("no rule is invalid")
    }
}

/// The values of one run. By default nothing is redacted.
#[derive(Clone, Default)]
pub(crate) struct Redaction {
    rules: Arc<RedactionRules>,
    values: Arc<Mutex<RedactedValues>>,
}

#[derive(Default)]
struct RedactedValues {
    /// Placeholder of each value, and the reverse.
    placeholders: HashMap<String, String>,
    values: HashMap<String, String>,
    /// Numbers used, by kind.
    numbers: HashMap<String, usize>,
}

impl RedactedValues {
    fn placeholder(&mut self, value: &str, kind: &str) -> String {
        if let Some(known) = self.placeholders.get(value) {
            return known.clone();
        }
        if self.values.len() >= REDACTED_VALUES_MAX {
            return format!("[{kind}]");
        }
        let number = self.numbers.entry(kind.to_owned()).or_default();
        *number += 1;
        let placeholder = format!("[{kind}_{number}]");
        self.placeholders.insert(value.to_owned(), placeholder.clone());
        self.values.insert(placeholder.clone(), value.to_owned());
        placeholder
    }
}

impl Redaction {
    /// Starts a run.
    pub(crate) fn new(rules: &Arc<RedactionRules>) -> Self {
        Self { rules: Arc::clone(rules), values: Arc::default() }
    }

    fn is_off(&self) -> bool {
        self.rules.detectors.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, RedactedValues> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces values by placeholders.
    pub(crate) fn redact(&self, text: &str) -> String {
        let found = self.rules.find(text);
        if found.is_empty() {
            return text.to_owned();
        }
        let (mut redacted, mut at) = (String::with_capacity(text.len()), 0);
        let mut values = self.lock();
        for (range, kind) in found {
            redacted.push_str(&text[at..range.start]);
            redacted.push_str(&values.placeholder(&text[range.clone()], kind));
            at = range.end;
        }
        redacted.push_str(&text[at..]);
        redacted
    }

    /// Replaces the placeholders of this run by their values, once: a value is not searched for placeholders.
    pub(crate) fn restore(&self, text: &str) -> String {
        if self.is_off() {
            return text.to_owned();
        }
        let values = self.lock();
        let value = |found: &Captures<'_>| {
            let placeholder = &found[0];
            values.values.get(placeholder).map_or(placeholder, String::as_str).to_owned()
        };
        self.rules.placeholder.replace_all(text, value).into_owned()
    }

    /// The same for the beginning of a text: a placeholder that may not be complete is left out.
    pub(crate) fn restore_beginning(&self, text: &str) -> String {
        if self.is_off() {
            return text.to_owned();
        }
        let open = text.rfind('[').filter(|at| {
            let tail = &text[*at..];
            tail.len() < PLACEHOLDER_BYTES_MAX && !tail.contains(']')
        });
        self.restore(&text[..open.unwrap_or(text.len())])
    }

    /// The conversation as the model sees it.
    pub(crate) fn conversation(&self, conversation: &Conversation) -> Conversation {
        if self.is_off() {
            return conversation.clone();
        }
        let redact = |entry: &ConversationEntry| ConversationEntry {
            name: entry.name.as_deref().map(|name| self.redact(name)),
            text: self.redact(&entry.text),
            ..entry.clone()
        };
        Conversation {
            past: conversation.past.iter().map(redact).collect(),
            pending: conversation.pending.iter().map(redact).collect(),
            ..conversation.clone()
        }
    }

    /// A tool call with the values that the model wrote placeholders for.
    pub(crate) fn restore_call(&self, call: &ToolCall) -> ToolCall {
        self.map_call(call, |text| self.restore(text))
    }

    /// A tool call of an earlier run, with placeholders for its values.
    pub(crate) fn redact_call(&self, call: &ToolCall) -> ToolCall {
        self.map_call(call, |text| self.redact(text))
    }

    /// Changes the texts of the arguments, and not their JSON: an escape such as `\n` before a value would hide it.
    fn map_call(&self, call: &ToolCall, change: impl Fn(&str) -> String) -> ToolCall {
        if self.is_off() {
            return call.clone();
        }
        let arguments = match serde_json::from_str::<Json>(&call.arguments) {
            Ok(arguments) => map_texts(arguments, &change).to_string(),
            Err(_) => change(&call.arguments),
        };
        ToolCall { arguments, ..call.clone() }
    }

    /// The result of a tool call as the model and the session see it.
    pub(crate) fn redact_outcome(&self, outcome: ToolOutcome) -> ToolOutcome {
        if self.is_off() {
            return outcome;
        }
        let redact = |json| map_texts(json, &|text| self.redact(text));
        let content = match serde_json::from_str::<Json>(&outcome.content) {
            Ok(json) => escaped_json(&redact(json)),
            Err(_) => self.redact(&outcome.content),
        };
        ToolOutcome { content, arguments: redact(outcome.arguments), ..outcome }
    }
}

/// Changes every text in a JSON value, also the names of fields.
fn map_texts(json: Json, change: &dyn Fn(&str) -> String) -> Json {
    match json {
        Json::String(text) => Json::String(change(&text)),
        Json::Array(items) => {
            Json::Array(items.into_iter().map(|item| map_texts(item, change)).collect())
        }
        Json::Object(fields) => Json::Object(
            fields
                .into_iter()
                .map(|(name, value)| (change(&name), map_texts(value, change)))
                .collect(),
        ),
        // A number may be a card or a phone number.
        Json::Number(number) => {
            let (text, changed) = (number.to_string(), change(&number.to_string()));
            if text == changed { Json::Number(number) } else { Json::String(changed) }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests;
