//! Resolves where each value comes from: flags, then environment, then file, then defaults.
//!
//! Upstream: `entry.rs`, which passes all sources as data. Downstream: `Settings` and `headwater config`. Guarantees:
//! every value is valid for its type, and unknown names are rejected, so that a typo is reported at startup.

use std::path::PathBuf;
use std::sync::Arc;

use secrecy::{ExposeSecret, SecretString};

use crate::config::error::SettingsError;
use crate::config::redact;
use crate::config::table::{self, Setting, TABLE};
use crate::config::value_type::ValueType;
use crate::desk::Provider;

const PREFIX: &str = "HEADWATER_";

/// Variable with the path of the settings file.
pub(crate) const FILE_VARIABLE: &str = "HEADWATER_SETTINGS";

/// Prefixes of variables that look like settings but are not: Kubernetes sets them for a service named `headwater`,
/// and the tests use them for their servers.
const FOREIGN_PREFIXES: [&str; 3] = ["HEADWATER_SERVICE_", "HEADWATER_PORT", "HEADWATER_TESTKIT_"];

/// Variables that are not settings: for operator commands, and those that `--exec` sets for its command, which may be
/// this program.
const NON_SETTINGS: [&str; 17] = [
    "HEADWATER_URL",
    "HEADWATER_TOKEN",
    "HEADWATER_ID",
    "HEADWATER_TOPIC",
    "HEADWATER_KEY",
    "HEADWATER_PARTITION",
    "HEADWATER_ATTEMPT",
    "HEADWATER_HEADERS",
    "HEADWATER_PAYLOAD_BYTES",
    "HEADWATER_PAYLOAD_SHA256",
    "HEADWATER_SERVICE",
    "HEADWATER_STREAM",
    "HEADWATER_INFO",
    "HEADWATER_EPOCH",
    "HEADWATER_OWNERS",
    "HEADWATER_NAMESPACE",
    "HEADWATER_REQUEST_ID",
];

/// All values that were given, by source.
#[derive(Debug, Default)]
pub(crate) struct RawSettings {
    /// Setting name and value from the command line.
    pub(crate) flags: Vec<(&'static str, String)>,
    /// Environment of the process.
    pub(crate) environment: Vec<(String, String)>,
    /// Path and text of the settings file.
    pub(crate) file: Option<(PathBuf, String)>,
    /// Providers of an embedding program.
    pub(crate) providers: Vec<Arc<dyn Provider>>,
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SettingSource {
    /// The default.
    Default,
    /// The settings file.
    File(PathBuf),
    /// An environment variable.
    Environment(String),
    /// A command line flag.
    Flag(String),
}

impl std::fmt::Display for SettingSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Environment(variable) => f.write_str(variable),
            Self::Flag(flag) => write!(f, "--{flag}"),
        }
    }
}

/// A setting with its value.
#[derive(Debug)]
pub(crate) struct SettingValue {
    /// The setting.
    pub(crate) setting: &'static Setting,
    /// Where the value came from.
    pub(crate) source: SettingSource,
    text: SecretString,
}

impl SettingValue {
    fn new(
        setting: &'static Setting,
        text: String,
        source: SettingSource,
    ) -> Result<Self, SettingsError> {
        let value = Self { setting, source, text: text.into() };
        // Settings without a default may be empty.
        if value.text().is_empty() && setting.default.is_empty() {
            return Ok(value);
        }
        setting.value_type.check(value.text()).map_err(|_| SettingsError::invalid_value(&value))?;
        Ok(value)
    }

    /// The raw value. May contain a secret.
    pub(crate) fn text(&self) -> &str {
        self.text.expose_secret()
    }

    /// The value with secrets hidden.
    pub(crate) fn shown(&self) -> String {
        match self.setting.value_type {
            ValueType::Secret if self.text().is_empty() => String::new(),
            ValueType::Secret => redact::HIDDEN.to_owned(),
            ValueType::StreamUrl
            | ValueType::DatabaseUrl
            | ValueType::WebUrl
            | ValueType::ModelUrl => redact::url(self.text()),
            _ => self.text().to_owned(),
        }
    }
}

/// The value of every setting, in the order of the table.
#[derive(Debug)]
pub(crate) struct SettingValues(Vec<SettingValue>);

impl SettingValues {
    /// Takes each value from the source with the highest precedence. `named` are the variables that the settings file
    /// refers to.
    pub(crate) fn resolve(
        given: &RawSettings,
        file: &toml::Table,
        named: &[String],
    ) -> Result<Self, SettingsError> {
        refuse_unknown_variables(given, named)?;
        let path = given.file.as_ref().map(|(path, _)| path.clone()).unwrap_or_default();
        let from_file = flatten(&path, file)?;
        let resolve_one = |setting: &'static Setting| {
            let flag = given.flags.iter().find(|(name, _)| *name == setting.name);
            let variable = setting.variable();
            let environment = given.environment.iter().find(|(name, _)| *name == variable);
            let in_file = from_file.iter().find(|(name, _)| *name == setting.name);
            let (text, source) = match (flag, environment, in_file) {
                (Some((_, text)), ..) => (text.clone(), SettingSource::Flag(setting.flag())),
                (None, Some((_, text)), _) => (text.clone(), SettingSource::Environment(variable)),
                (None, None, Some((_, text))) => (text.clone(), SettingSource::File(path.clone())),
                (None, None, None) => (setting.default.to_owned(), SettingSource::Default),
            };
            SettingValue::new(setting, text, source)
        };
        Ok(Self(TABLE.iter().map(resolve_one).collect::<Result<_, _>>()?))
    }

    /// The value of the setting `name`.
    ///
    /// # Panics
    ///
    /// If there is no such setting. A test reads all of them.
    pub(crate) fn get(&self, name: &str) -> &SettingValue {
        let found = self.0.iter().find(|value| value.setting.name == name);
        found.unwrap_or_else(|| panic!("unknown setting `{name}`"))
    }

    /// All values.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &SettingValue> {
        self.0.iter()
    }
}

fn refuse_unknown_variables(given: &RawSettings, named: &[String]) -> Result<(), SettingsError> {
    let known = |name: &String| {
        name == FILE_VARIABLE
            || NON_SETTINGS.contains(&name.as_str())
            || named.contains(name)
            || FOREIGN_PREFIXES.iter().any(|foreign| name.starts_with(foreign))
            || TABLE.iter().any(|setting| setting.variable() == *name)
    };
    let ours = given.environment.iter().filter(|(name, _)| name.starts_with(PREFIX));
    match ours.map(|(name, _)| name).find(|name| !known(name)) {
        Some(name) => Err(SettingsError::unknown(name, "environment")),
        None => Ok(()),
    }
}

/// Turns `listen` below `[http]` into `http.listen`, and rejects unknown names.
fn flatten(
    path: &std::path::Path,
    file: &toml::Table,
) -> Result<Vec<(&'static str, String)>, SettingsError> {
    let location = path.display().to_string();
    let mut found = Vec::new();
    for (section, content) in file {
        let toml::Value::Table(content) = content else {
            return Err(SettingsError::unknown(section, &location));
        };
        for (key, value) in content {
            let name = format!("{section}.{key}");
            let setting =
                table::find(&name).ok_or_else(|| SettingsError::unknown(&name, &location))?;
            let text = match value {
                toml::Value::String(text) => text.clone(),
                toml::Value::Integer(number) => number.to_string(),
                toml::Value::Float(number) => number.to_string(),
                toml::Value::Boolean(switch) => switch.to_string(),
                toml::Value::Array(words)
                    if matches!(setting.value_type, ValueType::Words(_))
                        && words.iter().all(toml::Value::is_str) =>
                {
                    words.iter().filter_map(toml::Value::as_str).collect::<Vec<_>>().join(",")
                }
                other => {
                    let kind = format!("{} in {location}", other.type_str());
                    return Err(SettingsError::wrong_type(setting, &kind));
                }
            };
            found.push((setting.name, text));
        }
    }
    Ok(found)
}
