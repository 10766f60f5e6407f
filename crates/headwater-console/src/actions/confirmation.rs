//! The page before a change that destroys or touches more than one thing: a dry run.
//!
//! Guarantees: the button carries verb and number; the number is sent with it, and if it is not the same any more the
//! page is shown again; a deletion needs the name typed.

use axum::response::Response;
use maud::html;
use serde_json::Value;

use crate::components::{ButtonStyle, Tone, banner, button, excerpt};
use crate::form::FormFields;
use crate::screen::{Screen, ScreenContent};
use crate::text::{counted, field, number, visible};
use crate::user::ConsoleRole;

/// Maximum examples on the page.
pub(super) const EXAMPLES_MAX: usize = 10;

/// Names of the fields that the page adds.
const OWN_FIELDS: [&str; 2] = ["confirm", "typed"];

/// What a change would do.
pub(super) struct Confirmation {
    /// Verb of the button, such as `Purge`.
    pub(super) verb: &'static str,
    /// How many it touches, and their name for one and for many.
    pub(super) count: u64,
    pub(super) unit: (&'static str, &'static str),
    /// Whether there may be more than `count`; the title says so.
    pub(super) or_more: bool,
    pub(super) needed: ConsoleRole,
    /// Some of them.
    pub(super) examples: Vec<String>,
    /// What follows from it, in sentences.
    pub(super) consequences: Vec<String>,
    /// Whether something is lost permanently.
    pub(super) is_destructive: bool,
    /// The name that must be typed.
    pub(super) typed: Option<String>,
    /// The command that does the same.
    pub(super) command: String,
    /// The page to go back to.
    pub(super) back: String,
}

impl Confirmation {
    /// Of one thing, which is destroyed: its name must be typed.
    pub(super) fn of_deletion(
        (one, name): (&'static str, &str),
        consequences: Vec<String>,
        command: String,
        back: String,
    ) -> Self {
        Self {
            verb: "Delete",
            count: 1,
            unit: (one, one),
            or_more: false,
            needed: ConsoleRole::Admin,
            examples: Vec::new(),
            consequences,
            is_destructive: true,
            typed: Some(name.to_owned()),
            command,
            back,
        }
    }

    /// Whether the form confirms exactly this.
    pub(super) fn is_given(&self, form: &FormFields) -> bool {
        let is_same = confirmed(form) == Some(self.count);
        is_same && self.typed.as_ref().is_none_or(|name| form.get("typed") == name)
    }

    /// The page that asks for it.
    pub(super) fn page(&self, screen: &Screen, form: &FormFields) -> Response {
        let what = counted(self.count, self.unit.0, self.unit.1);
        let label = format!("{} {what}", self.verb);
        let (title, mark) = match self.or_more {
            true => (format!("{label} or more"), "+"),
            false => (label.clone(), ""),
        };
        let style = if self.is_destructive { ButtonStyle::Danger } else { ButtonStyle::Primary };
        // Shown again: something was sent that is not enough.
        let confirmed = confirmed(form);
        let has_changed = confirmed.is_some_and(|confirmed| confirmed != self.count);
        let is_mistyped = confirmed.is_some() && !has_changed;
        let content = html! {
            @if has_changed {
                (banner(Tone::Warning, &html! { p { "The number has changed since. Please confirm again." } }))
            }
            @if is_mistyped {
                (banner(Tone::Bad, &html! { p { "The typed name is not the same. Nothing was changed." } }))
            }
            @if self.count == 0 {
                p { "Nothing matches, so there is nothing to do." }
                p { a.button href=(self.back) { "Back" } }
            } @else {
                @for sentence in &self.consequences { p { (visible(sentence)) } }
                @if self.is_destructive { p { strong { "This cannot be undone." } } }
                @if !self.examples.is_empty() {
                    h2 { @if self.count > self.examples.len() as u64 { "Examples" } @else { "Affected" } }
                    ul.examples { @for example in &self.examples { li { (excerpt(example)) } } }
                }
                form.stacked method="post" action=(screen.uri.path()) {
                    @for (name, value) in form.without(&OWN_FIELDS) { input type="hidden" name=(name) value=(value); }
                    input type="hidden" name="confirm" value={ (self.count) (mark) };
                    @if let Some(name) = &self.typed {
                        label for="typed" { "Type " code { bdi { (visible(name)) } } " to confirm" }
                        input #typed name="typed" required autocomplete="off" maxlength="500";
                    }
                    div.buttons {
                        (button(&screen.user, self.needed, style, &label))
                        a.button href=(self.back) { "Cancel" }
                    }
                }
            }
        };
        screen.page(ScreenContent {
            title: format!("{title}?"),
            path: Vec::new(),
            command: self.command.clone(),
            content,
        })
    }
}

/// The number on the button that was pressed.
fn confirmed(form: &FormFields) -> Option<u64> {
    let confirmed = form.get("confirm");
    confirmed.strip_suffix('+').unwrap_or(confirmed).parse().ok()
}

/// Whether the page said "or more". Where counting ends by time, the number is another one each time.
pub(super) fn accepts_more(form: &FormFields) -> bool {
    form.get("confirm").ends_with('+') && confirmed(form).is_some()
}

/// An example of a dead letter.
pub(super) fn letter_example(letter: &Value) -> String {
    format!("{} · {}", field(letter, "id"), field(letter, "reason"))
}

/// What a dry run of a replay leaves out, in sentences.
pub(super) fn left_out(tried: &Value) -> impl Iterator<Item = String> {
    let reasons = [("already_replayed", "already replayed"), ("refused", "refused")];
    reasons.into_iter().filter_map(|(name, text)| {
        let count = tried[name].as_u64().filter(|count| *count > 0)?;
        Some(format!("{} {text}; these are left out.", number(count)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_number_and_the_typed_name_confirm() {
        let confirmation = Confirmation {
            verb: "Delete",
            count: 3,
            unit: ("message", "messages"),
            or_more: false,
            needed: ConsoleRole::Admin,
            examples: Vec::new(),
            consequences: Vec::new(),
            is_destructive: true,
            typed: Some("orders".to_owned()),
            command: String::new(),
            back: String::new(),
        };
        let given = |query| confirmation.is_given(&FormFields::from_query(query));
        assert!(given("confirm=3&typed=orders") && given("confirm=3%2B&typed=orders"));
        for wrong in [
            "",
            "confirm=3",
            "confirm=4&typed=orders",
            "confirm=3&typed=order",
            "confirm=x&typed=orders",
        ] {
            assert!(!given(wrong), "{wrong}");
        }
        let more = |query| accepts_more(&FormFields::from_query(query));
        assert!(more("confirm=3%2B") && !more("confirm=3") && !more("confirm=%2B") && !more(""));
    }
}
