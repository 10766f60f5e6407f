//! The `[[redaction]]` sections of the settings file: custom patterns of what a model must not see.
//!
//! Upstream: `headwater.toml`. Downstream: `desk::redaction`, with the setting `desk.redact`. Guarantees: names are unique, every
//! pattern compiles, unknown fields are rejected.

use serde::Deserialize;

use crate::config::error::SettingsError;
use crate::config::integrations::check_unique;
use crate::desk::redaction::RedactionRules;

/// One `[[redaction]]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RedactionSettings {
    /// The name in placeholders.
    pub(crate) name: String,
    /// A regular expression.
    pub(crate) pattern: String,
}

/// The rules of the sections and of `desk.redact`, a list separated by commas.
pub(super) fn rules(
    custom: &[RedactionSettings],
    built_in: &str,
) -> Result<RedactionRules, SettingsError> {
    check_unique("[[redaction]] name", custom.iter().map(|one| one.name.as_str()))?;
    let built_in: Vec<&str> =
        built_in.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    let custom: Vec<(String, String)> =
        custom.iter().map(|one| (one.name.clone(), one.pattern.clone())).collect();
    RedactionRules::new(&built_in, &custom).map_err(|error| SettingsError::new(error.to_string()))
}
