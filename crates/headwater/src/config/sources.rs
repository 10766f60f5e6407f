//! Where values come from: flags before the environment before the file before the defaults.
//!
//! Upstream: the command line, the process, `headwater.toml`; all passed in as data. Downstream: `Settings` and `headwater config`.
//! Promises: every value has passed the check of its kind, and every name that nobody knows is refused, so that a slip of
//! the pen is seen at the start.

use std::path::PathBuf;

use secrecy::{ExposeSecret, SecretString};

use crate::config::error::SettingsError;
use crate::config::redact;
use crate::config::table::{self, Setting, TABLE};
use crate::config::value_type::Kind;

const PREFIX: &str = "HEADWATER_";

/// Names the settings file instead of `headwater.toml`.
pub(crate) const FILE_VARIABLE: &str = "HEADWATER_SETTINGS";

/// Beginnings of variables that are not ours although they look so: Kubernetes describes a service called `headwater` to
/// every container in this way, and tests tell each other where their servers are.
const FOREIGN: [&str; 3] = ["HEADWATER_SERVICE_", "HEADWATER_PORT", "HEADWATER_TESTKIT_"];

/// Variables that are no settings: for the verbs of operators, and what `consume --exec` tells its command, which may be
/// this program again.
const OTHERS: [&str; 10] = [
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
];

/// What was said, and where.
#[derive(Debug, Default)]
pub(crate) struct Given {
    /// Name of the setting and value, from the command line.
    pub(crate) flags: Vec<(&'static str, String)>,
    /// The environment of the process.
    pub(crate) environment: Vec<(String, String)>,
    /// The settings file and its text.
    pub(crate) file: Option<(PathBuf, String)>,
}

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Nobody said anything.
    Default,
    /// The settings file.
    File(PathBuf),
    /// A variable.
    Environment(String),
    /// The command line.
    Flag(String),
}

impl std::fmt::Display for Source {
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
pub(crate) struct Value {
    /// Which one.
    pub(crate) setting: &'static Setting,
    /// Where the value came from.
    pub(crate) source: Source,
    text: SecretString,
}

impl Value {
    fn new(setting: &'static Setting, text: String, source: Source) -> Result<Self, SettingsError> {
        let value = Self { setting, source, text: text.into() };
        // An empty value is none, for those settings that need not have one.
        if value.text().is_empty() && setting.default.is_empty() {
            return Ok(value);
        }
        setting.kind.check(value.text()).map_err(|_| SettingsError::wrong(&value))?;
        Ok(value)
    }

    /// The value itself. Not for people: it may hold a secret.
    pub(crate) fn text(&self) -> &str {
        self.text.expose_secret()
    }

    /// The value, as far as people may see it.
    pub(crate) fn shown(&self) -> String {
        match self.setting.kind {
            Kind::Secret if self.text().is_empty() => String::new(),
            Kind::Secret => redact::HIDDEN.to_owned(),
            Kind::StreamUrl | Kind::DatabaseUrl | Kind::WebUrl | Kind::ModelUrl => {
                redact::url(self.text())
            }
            _ => self.text().to_owned(),
        }
    }
}

/// The value of every setting, in the order of the table.
#[derive(Debug)]
pub(crate) struct Values(Vec<Value>);

impl Values {
    /// Takes for each setting the first of its sources that has it. `named` are variables that the file refers to.
    pub(crate) fn resolve(
        given: &Given,
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
                (Some((_, text)), ..) => (text.clone(), Source::Flag(setting.flag())),
                (None, Some((_, text)), _) => (text.clone(), Source::Environment(variable)),
                (None, None, Some((_, text))) => (text.clone(), Source::File(path.clone())),
                (None, None, None) => (setting.default.to_owned(), Source::Default),
            };
            Value::new(setting, text, source)
        };
        Ok(Self(TABLE.iter().map(resolve_one).collect::<Result<_, _>>()?))
    }

    /// The value of a setting by its name.
    ///
    /// # Panics
    ///
    /// If the table has no such setting, which only a mistake of ours can bring about; a test reads them all.
    pub(crate) fn get(&self, name: &str) -> &Value {
        let found = self.0.iter().find(|value| value.setting.name == name);
        found.unwrap_or_else(|| panic!("the table has no setting `{name}`"))
    }

    /// All of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Value> {
        self.0.iter()
    }
}

fn refuse_unknown_variables(given: &Given, named: &[String]) -> Result<(), SettingsError> {
    let known = |name: &String| {
        name == FILE_VARIABLE
            || OTHERS.contains(&name.as_str())
            || named.contains(name)
            || FOREIGN.iter().any(|foreign| name.starts_with(foreign))
            || TABLE.iter().any(|setting| setting.variable() == *name)
    };
    let ours = given.environment.iter().filter(|(name, _)| name.starts_with(PREFIX));
    match ours.map(|(name, _)| name).find(|name| !known(name)) {
        Some(name) => Err(SettingsError::unknown(name, "the environment")),
        None => Ok(()),
    }
}

/// `listen` below `[http]` as `http.listen`; everything of it must be in the table.
fn flatten(
    path: &std::path::Path,
    file: &toml::Table,
) -> Result<Vec<(&'static str, String)>, SettingsError> {
    let place = path.display().to_string();
    let mut found = Vec::new();
    for (section, content) in file {
        let toml::Value::Table(content) = content else {
            return Err(SettingsError::unknown(section, &place));
        };
        for (key, value) in content {
            let name = format!("{section}.{key}");
            let setting =
                table::find(&name).ok_or_else(|| SettingsError::unknown(&name, &place))?;
            let text = match value {
                toml::Value::String(text) => text.clone(),
                toml::Value::Integer(number) => number.to_string(),
                toml::Value::Float(number) => number.to_string(),
                toml::Value::Boolean(switch) => switch.to_string(),
                other => {
                    let kind = format!("{} in {place}", other.type_str());
                    return Err(SettingsError::of_kind(setting, &kind));
                }
            };
            found.push((setting.name, text));
        }
    }
    Ok(found)
}
