//! The editable part of the system prompt: text with variables.
//!
//! Upstream: `prompt_versions` and the routes of prompts parse templates. Downstream: `prompt` adds the rendered text to the
//! safety rules, which are no part of a template. Guarantees: a template that parses renders with every issue; the
//! values of variables come from the settings and the clock, never from users.

use crate::limits::{PROMPT_TEMPLATE_BYTES_MAX, PROMPT_TEMPLATE_LINES_MAX};

/// What a variable is replaced by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptVariable {
    /// The id of the integration.
    Integration,
    /// Its provider: `github`, `gitlab`, `standard` or `desk`.
    Provider,
    /// The date in UTC, such as `2026-01-31`.
    Date,
    /// The names of the tools that the model may call, separated by commas.
    Tools,
}

impl PromptVariable {
    /// All variables.
    pub const ALL: [Self; 4] = [Self::Integration, Self::Provider, Self::Date, Self::Tools];

    /// The name in a template.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Integration => "integration",
            Self::Provider => "provider",
            Self::Date => "date",
            Self::Tools => "tools",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.as_str() == name)
    }
}

/// The values of the variables in one run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptValues {
    /// The id of the integration.
    pub integration: String,
    /// Its provider.
    pub provider: String,
    /// The date in UTC.
    pub date: String,
    /// Names of the tools.
    pub tools: Vec<String>,
}

/// Why a text is not a prompt. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid prompt, line {line}: {problem}")]
pub struct InvalidPrompt {
    /// Line of the mistake, from 1.
    pub line: usize,
    /// The mistake and how to fix it.
    pub problem: String,
}

/// A parsed prompt: text in which `{{name}}` stands for a variable, and `{{{{` for two braces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptTemplate(Vec<TemplatePart>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum TemplatePart {
    Text(String),
    Variable(PromptVariable),
}

const OPEN: &str = "{{";
const CLOSE: &str = "}}";

impl PromptTemplate {
    /// Parses a prompt. Fails if it is empty or too long, contains control characters or an unknown variable, or if a
    /// variable does not end.
    pub fn parse(content: &str) -> Result<Self, InvalidPrompt> {
        check_text(content)?;
        let invalid = |rest: &str, problem: String| {
            let line = content[..content.len() - rest.len()].matches('\n').count() + 1;
            Err(InvalidPrompt { line, problem })
        };
        let (mut parts, mut text, mut rest) = (Vec::new(), String::new(), content);
        while let Some((before, after)) = rest.split_once(OPEN) {
            text.push_str(before);
            let at = &rest[before.len()..];
            if let Some(after) = after.strip_prefix(OPEN) {
                text.push_str(OPEN);
                rest = after;
                continue;
            }
            let Some((name, after)) =
                after.split_once(CLOSE).filter(|(name, _)| !name.contains('\n'))
            else {
                let problem = "`{{` without `}}` in the same line; write `{{{{` for two braces";
                return invalid(at, problem.to_owned());
            };
            let Some(variable) = PromptVariable::parse(name.trim()) else {
                let known = PromptVariable::ALL.map(PromptVariable::as_str).join("`, `");
                let shown = crate::text::one_line(name, 60);
                return invalid(at, format!("unknown variable `{shown}`; known: `{known}`"));
            };
            parts.push(TemplatePart::Text(std::mem::take(&mut text)));
            parts.push(TemplatePart::Variable(variable));
            rest = after;
        }
        text.push_str(rest);
        parts.push(TemplatePart::Text(text));
        Ok(Self(parts))
    }

    /// The text with the values of the variables.
    pub fn render(&self, values: &PromptValues) -> String {
        let tools = values.tools.join(", ");
        let part = |part: &TemplatePart| match part {
            TemplatePart::Text(text) => text.clone(),
            TemplatePart::Variable(PromptVariable::Integration) => values.integration.clone(),
            TemplatePart::Variable(PromptVariable::Provider) => values.provider.clone(),
            TemplatePart::Variable(PromptVariable::Date) => values.date.clone(),
            TemplatePart::Variable(PromptVariable::Tools) => tools.clone(),
        };
        self.0.iter().map(part).collect()
    }
}

fn check_text(content: &str) -> Result<(), InvalidPrompt> {
    let invalid = |line: usize, problem: String| Err(InvalidPrompt { line, problem });
    if content.trim().is_empty() {
        let problem = "the prompt is empty; roll back to version 0 for the built-in one";
        return invalid(1, problem.to_owned());
    }
    if content.len() > PROMPT_TEMPLATE_BYTES_MAX {
        let problem = format!(
            "the prompt has {} bytes; at most {PROMPT_TEMPLATE_BYTES_MAX} are allowed",
            content.len()
        );
        return invalid(1, problem);
    }
    for (number, line) in content.split('\n').enumerate() {
        if number == PROMPT_TEMPLATE_LINES_MAX {
            let problem =
                format!("the prompt has more than {PROMPT_TEMPLATE_LINES_MAX} lines; shorten it");
            return invalid(number + 1, problem);
        }
        if let Some(control) = line.chars().find(|c| c.is_control() && *c != '\t') {
            let problem = format!("control character U+{:04X}; remove it", control as u32);
            return invalid(number + 1, problem);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn values() -> PromptValues {
        PromptValues {
            integration: "shop".into(),
            provider: "github".into(),
            date: "2026-01-31".into(),
            tools: vec!["hand_over".into(), "close_ticket".into()],
        }
    }

    fn rendered(content: &str) -> Result<String, InvalidPrompt> {
        PromptTemplate::parse(content).map(|template| template.render(&values()))
    }

    #[test]
    fn variables_are_replaced_and_everything_else_is_kept() {
        for (content, expected) in [
            ("Be brief.", "Be brief."),
            ("{{integration}} on {{ provider }}, {{date}}", "shop on github, 2026-01-31"),
            ("Tools: {{tools}}.\n\tEnd", "Tools: hand_over, close_ticket.\n\tEnd"),
            ("{{{{date}} is {{date}}", "{{date}} is 2026-01-31"),
            ("{ \"a\": {\"b\": 1}}", "{ \"a\": {\"b\": 1}}"),
            ("}} {", "}} {"),
        ] {
            assert_eq!(rendered(content).as_deref(), Ok(expected), "{content}");
        }
    }

    #[test]
    fn an_invalid_prompt_is_refused_with_its_line() {
        let long = "x".repeat(PROMPT_TEMPLATE_BYTES_MAX + 1);
        let many = "x\n".repeat(PROMPT_TEMPLATE_LINES_MAX + 1);
        for (content, line, problem) in [
            ("", 1, "empty"),
            (" \n\t", 1, "empty"),
            (long.as_str(), 1, "at most"),
            (many.as_str(), PROMPT_TEMPLATE_LINES_MAX + 1, "lines"),
            ("a\nb\0", 2, "U+0000"),
            ("a\rb", 1, "U+000D"),
            ("one\ntwo {{user}}", 2, "unknown variable `user`; known: `integration`"),
            ("{{}}", 1, "unknown variable ``"),
            ("{{Date}}", 1, "unknown variable `Date`"),
            ("{{ date", 1, "without `}}`"),
            ("a\n{{ da\nte }}", 2, "without `}}`"),
        ] {
            let error = rendered(content).expect_err(problem);
            assert_eq!(error.line, line, "{error}");
            assert!(error.problem.contains(problem), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics_and_text_without_braces_is_unchanged(content in any::<String>()) {
            if let Ok(rendered) = rendered(&content)
                && !content.contains("{{")
            {
                prop_assert_eq!(rendered, content);
            }
        }
    }
}
