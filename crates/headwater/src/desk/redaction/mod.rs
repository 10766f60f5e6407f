//! Redaction: personal data becomes placeholders before a model sees it, and is restored in what the model writes.
//!
//! Upstream: `handler`, for each run; `config` makes the rules. Downstream: `patterns` finds the data, `json_text` the texts of a
//! message that is JSON, which is searched as a whole, too: a pattern may be for a name and its value. No I/O.
//! Guarantees: a value has one placeholder within a run, such as `[EMAIL_1]`; restoring a redacted text gives back the same text.
//! Text of users that looks like a placeholder is replaced, too, so it stands for itself and for no other value. Matching takes
//! linear time for the built-in patterns. At most [`REDACTED_VALUES_MAX`] values are remembered; further ones are replaced by a
//! placeholder without a number, which is not restored.
//! Not promised: that every personal value is found. A placeholder that the model changes is not restored.

mod json_text;
mod patterns;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use regex::{Captures, Regex};
use serde_json::Value as Json;

use crate::desk::conversation::{Conversation, ConversationEntry};
use crate::desk::model::ToolCall;
use crate::desk::prompt::escaped_json;
use crate::desk::redaction::json_text::json_texts;
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

    /// What is to be replaced, in order.
    fn find<'a>(&'a self, text: &str) -> Vec<FoundValue<'a>> {
        let mut found = Vec::new();
        for detector in &self.detectors {
            found.extend(detector.find(text).into_iter().map(|range| FoundValue {
                value: text[range.clone()].to_owned(),
                range,
                kind: &detector.kind,
                is_number: false,
            }));
        }
        merged(text, found)
    }

    /// The same in a text that may be JSON: in the whole text, and in its texts without their escapes, which may be JSON themselves.
    /// Bounded: each further level doubles the escapes.
    fn find_in_json<'a>(&'a self, text: &str) -> Vec<FoundValue<'a>> {
        let mut found = Vec::new();
        for inner in json_texts(text) {
            let of_text = self.find_in_json(&inner.text).into_iter();
            if inner.is_number {
                // As a whole: it becomes a string.
                found.extend(of_text.take(1).map(|finding| FoundValue {
                    range: inner.place(&(0..inner.text.len())),
                    value: inner.text.clone(),
                    is_number: true,
                    ..finding
                }));
            } else {
                found.extend(of_text.map(|finding| FoundValue {
                    range: inner.place(&finding.range),
                    is_number: false,
                    ..finding
                }));
            }
        }
        // Last: of two at the same place, the value without escapes is the one to restore.
        found.extend(self.find(text));
        merged(text, found)
    }
}

/// A part of a text that is to be replaced.
struct FoundValue<'a> {
    range: Range<usize>,
    kind: &'a str,
    /// What its placeholder stands for.
    value: String,
    /// Whether it is a number of JSON, in whose place only a string can be.
    is_number: bool,
}

/// The findings in a text in order, without overlaps.
fn merged<'a>(text: &str, mut found: Vec<FoundValue<'a>>) -> Vec<FoundValue<'a>> {
    // Stable: of two that begin together and are equally long, the earlier rule names the kind.
    found.sort_by_key(|one| (one.range.start, std::cmp::Reverse(one.range.end)));
    let mut merged: Vec<FoundValue<'a>> = Vec::new();
    for finding in found {
        match merged.last_mut() {
            Some(last) if finding.range.end <= last.range.end => {}
            // Both as a whole: a part of a value would be left over otherwise.
            Some(last) if finding.range.start < last.range.end => {
                last.range.end = finding.range.end;
                last.value = text[last.range.clone()].to_owned();
                last.is_number = false;
            }
            _ => merged.push(finding),
        }
    }
    merged
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
        self.replace(text, self.rules.find(text))
    }

    /// Replaces values by placeholders in a text that may be JSON, such as the payload of a webhook without a text.
    fn redact_message(&self, text: &str) -> String {
        self.replace(text, self.rules.find_in_json(text))
    }

    fn replace(&self, text: &str, found: Vec<FoundValue<'_>>) -> String {
        if found.is_empty() {
            return text.to_owned();
        }
        let (mut redacted, mut at) = (String::with_capacity(text.len()), 0);
        let mut values = self.lock();
        for FoundValue { range, kind, value, is_number } in found {
            redacted.push_str(&text[at..range.start]);
            let quote = if is_number { "\"" } else { "" };
            let placeholder = values.placeholder(&value, kind);
            redacted.extend([quote, placeholder.as_str(), quote]);
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
            text: self.redact_message(&entry.text),
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
        self.map_call(call, |text| self.restore_message(text))
    }

    /// Restores values in a text that may be JSON, in which they are escaped.
    fn restore_message(&self, text: &str) -> String {
        let json = serde_json::from_str(text).ok().filter(is_object_or_array);
        let Some(json) = json else { return self.restore(text) };
        let restored = map_texts(Json::clone(&json), &|text| self.restore_message(text));
        if restored == json { text.to_owned() } else { restored.to_string() }
    }

    /// A tool call of an earlier run, with placeholders for its values.
    pub(crate) fn redact_call(&self, call: &ToolCall) -> ToolCall {
        self.map_call(call, |text| self.redact_message(text))
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
        let redact = |json| map_texts(json, &|text| self.redact_message(text));
        let content = match serde_json::from_str::<Json>(&outcome.content) {
            Ok(json) if !is_object_or_array(&json) => escaped_json(&redact(json)),
            _ => self.redact_message(&outcome.content),
        };
        ToolOutcome { content, arguments: redact(outcome.arguments), ..outcome }
    }
}

fn is_object_or_array(json: &Json) -> bool {
    json.is_object() || json.is_array()
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
