//! What is wrong with the settings: the name, the value as far as it may be seen, and what is allowed.
//!
//! Upstream: everything in `settings`. Downstream: `main`, which prints it and ends with exit code 2. One type, since the
//! reader does the same after each of them: mend the setting.

use crate::config::sources::Value;
use crate::config::table::{Setting, TABLE};

/// A setting that stops the start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct SettingsError(String);

impl SettingsError {
    /// Anything else.
    pub(crate) fn new(sentence: impl Into<String>) -> Self {
        Self(sentence.into())
    }

    /// A value that its kind does not allow.
    pub(crate) fn wrong(value: &Value) -> Self {
        let (name, shown, source) = (value.setting.name, value.shown(), &value.source);
        let allowed = value.setting.kind.allowed();
        Self(format!("the setting `{name}` is `{shown}` (from {source}); allowed is {allowed}"))
    }

    /// A value that is not even text.
    pub(crate) fn of_kind(setting: &Setting, kind: &str) -> Self {
        let (name, allowed) = (setting.name, setting.kind.allowed());
        Self(format!("the setting `{name}` is a value of the kind {kind}; allowed is {allowed}"))
    }

    /// A name that no setting has.
    pub(crate) fn unknown(name: &str, place: &str) -> Self {
        let wanted = name.trim_start_matches("HEADWATER_").to_lowercase().replace('.', "_");
        let nearest = TABLE
            .iter()
            .map(|setting| (distance(&setting.name.replace('.', "_"), &wanted), setting.name))
            .min()
            .filter(|(distance, _)| *distance <= 3)
            .map(|(_, nearest)| format!("; did you mean `{nearest}`?"));
        let hint = nearest.unwrap_or_else(|| "; `headwater config` lists them all".to_owned());
        Self(format!("there is no setting `{name}` (from {place}){hint}"))
    }
}

/// How many letters to add, remove or change to get from one word to the other.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (index, letter) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = index + 1;
        for place in 0..to.len() {
            let change = diagonal + usize::from(letter != to[place]);
            diagonal = row[place + 1];
            row[place + 1] = change.min(row[place] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_pen_gets_a_hint() {
        let error = SettingsError::unknown("http.listn", "headwater.toml").to_string();
        assert!(error.contains("did you mean `http.listen`?"), "{error}");
        let error = SettingsError::unknown("HEADWATER_STREAM_URI", "the environment").to_string();
        assert!(error.contains("`stream.url`"), "{error}");
        let error = SettingsError::unknown("coffee.strength", "headwater.toml").to_string();
        assert!(error.contains("headwater config"), "{error}");
    }

    #[test]
    fn the_distance_of_words_is_counted_in_letters() {
        for (from, to, letters) in [("a", "a", 0), ("", "ab", 2), ("kitten", "sitting", 3)] {
            assert_eq!(distance(from, to), letters);
        }
    }
}
