//! Errors in the settings: the name, the value with secrets hidden, and what is allowed.
//!
//! Upstream: the other modules of `config`. Downstream: `entry.rs`, which prints it and exits with code 2.

use strsim::levenshtein;

use crate::config::sources::SettingValue;
use crate::config::table::{Setting, TABLE};

/// An invalid setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct SettingsError(String);

impl SettingsError {
    /// Any other error.
    pub(crate) fn new(sentence: impl Into<String>) -> Self {
        Self(sentence.into())
    }

    /// A value that its type does not allow.
    pub(crate) fn invalid_value(value: &SettingValue) -> Self {
        let (name, shown, source) = (value.setting.name, value.shown(), &value.source);
        let allowed = value.setting.value_type.allowed();
        Self(format!("invalid setting `{name}` = `{shown}` (from {source}); allowed: {allowed}"))
    }

    /// A TOML value of the wrong type, such as a list.
    pub(crate) fn wrong_type(setting: &Setting, kind: &str) -> Self {
        let (name, allowed) = (setting.name, setting.value_type.allowed());
        Self(format!("invalid setting `{name}`: {kind} is not allowed here; allowed: {allowed}"))
    }

    /// An unknown setting.
    pub(crate) fn unknown(name: &str, place: &str) -> Self {
        let wanted = name.trim_start_matches("HEADWATER_").to_lowercase().replace('.', "_");
        let nearest = TABLE
            .iter()
            .map(|setting| (levenshtein(&setting.name.replace('.', "_"), &wanted), setting.name))
            .min()
            .filter(|(distance, _)| *distance <= 3)
            .map(|(_, nearest)| format!("; did you mean `{nearest}`?"));
        let hint = nearest.unwrap_or_else(|| "; `headwater config` lists all settings".to_owned());
        Self(format!("unknown setting `{name}` (from {place}){hint}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typo_gets_a_hint() {
        let error = SettingsError::unknown("http.listn", "headwater.toml").to_string();
        assert!(error.contains("did you mean `http.listen`?"), "{error}");
        let error = SettingsError::unknown("HEADWATER_STREAM_URI", "environment").to_string();
        assert!(error.contains("`stream.url`"), "{error}");
        let error = SettingsError::unknown("coffee.strength", "headwater.toml").to_string();
        assert!(error.contains("headwater config"), "{error}");
    }
}
