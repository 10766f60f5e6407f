//! The `[[integration]]` and `[[token]]` sections of the settings file.
//!
//! Upstream: `headwater.toml` and the variables it names. Downstream: `inbound`, `outbound` and `http/auth.rs`.
//! Guarantees: ids and names are unique, required secrets are present and never shown, unknown fields are rejected.

use std::collections::HashSet;

use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::config::error::SettingsError;
use crate::config::value_type::ValueType;

/// Maximum length of an id; ids are part of URLs.
const ID_CHARS_MAX: usize = 64;

/// Minimum length of a token; shorter ones can be guessed.
const TOKEN_CHARS_MIN: usize = 16;

/// Id of the built-in integration for tickets.
pub(crate) const DESK: &str = "desk";

/// Type of an integration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Provider {
    /// GitHub, or a GitHub Enterprise Server.
    Github,
    /// GitLab, anywhere.
    Gitlab,
    /// Any sender of Standard Webhooks.
    Standard,
    /// Tickets of this server.
    Desk,
}

impl Provider {
    /// Its name in URLs, SQL and the settings file.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Github => "github",
            Self::Gitlab => "gitlab",
            Self::Standard => "standard",
            Self::Desk => "desk",
        }
    }
}

/// What a principal may do; each role includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    /// Read.
    Read,
    /// Change tickets and issues.
    Write,
    /// All operations.
    Admin,
}

impl Role {
    /// Its name in the settings file.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Admin => "admin",
        }
    }
}

/// One `[[integration]]`.
#[derive(Clone, Debug)]
pub(crate) struct IntegrationSettings {
    /// Its id, part of the URL of its webhooks.
    pub(crate) id: String,
    /// Its type.
    pub(crate) provider: Provider,
    /// Webhook signing secret. Required for every provider except the desk.
    pub(crate) secret: Option<SecretString>,
    /// Token for sending replies.
    pub(crate) reply_token: Option<SecretString>,
    /// Base URL of its API; for a `standard` integration, the callback URL of replies.
    pub(crate) base_url: Option<String>,
    /// Login under which replies are posted. Events from this author are ignored.
    pub(crate) bot_login: Option<String>,
}

/// One `[[token]]`.
#[derive(Clone, Debug)]
pub(crate) struct TokenSettings {
    /// Name of the principal, as in the audit log.
    pub(crate) name: String,
    /// Its role.
    pub(crate) role: Role,
    /// The token.
    pub(crate) token: SecretString,
}

/// Whether the command needs the secrets of the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SecretsPolicy {
    /// Servers: a missing secret is an error.
    Required,
    /// Commands that read, or call a server: missing variables are ignored.
    Optional,
}

/// The array sections of the settings file.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct ListSections {
    #[serde(default, rename = "integration")]
    integrations: Vec<RawIntegration>,
    #[serde(default, rename = "token")]
    tokens: Vec<RawToken>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawIntegration {
    id: String,
    provider: Provider,
    secret: Option<SecretText>,
    secret_env: Option<String>,
    reply_token_env: Option<String>,
    base_url: Option<String>,
    bot_login: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawToken {
    name: String,
    role: Role,
    token: Option<SecretText>,
    token_env: Option<String>,
}

/// A secret in the settings file; `Debug` hides it.
#[derive(Deserialize)]
#[serde(transparent)]
struct SecretText(String);

impl std::fmt::Debug for SecretText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(crate::config::redact::HIDDEN)
    }
}

impl ListSections {
    /// Whether any token is configured.
    pub(crate) fn has_tokens(&self) -> bool {
        !self.tokens.is_empty()
    }

    /// The variables that the sections refer to.
    pub(crate) fn variables(&self) -> Vec<String> {
        let of_integrations =
            self.integrations.iter().flat_map(|raw| [&raw.secret_env, &raw.reply_token_env]);
        let of_tokens = self.tokens.iter().map(|raw| &raw.token_env);
        of_integrations.chain(of_tokens).flatten().cloned().collect()
    }

    /// Validates the sections and adds the built-in `desk`. Names all unset variables in one error.
    pub(crate) fn integrations(
        mut self,
        environment: &[(String, String)],
        secrets: SecretsPolicy,
    ) -> Result<(Vec<IntegrationSettings>, Vec<TokenSettings>), SettingsError> {
        let is_set = |variable: &String| environment.iter().any(|(name, _)| name == variable);
        let unset: Vec<String> =
            self.variables().into_iter().filter(|variable| !is_set(variable)).collect();
        if secrets == SecretsPolicy::Required && unset.len() > 1 {
            let names = unset.join("`, `");
            return Err(SettingsError::new(format!(
                "variables `{names}` named in the settings file are not set"
            )));
        }
        if secrets == SecretsPolicy::Optional {
            // A command presents its token to a server and needs no configured ones.
            self.tokens.retain(|raw| raw.token_env.as_ref().is_none_or(is_set));
        }
        let mut integrations = self
            .integrations
            .into_iter()
            .map(|raw| raw.check(environment, secrets))
            .collect::<Result<Vec<_>, _>>()?;
        if !integrations.iter().any(|one| one.id == DESK) {
            integrations.push(IntegrationSettings {
                id: DESK.to_owned(),
                provider: Provider::Desk,
                secret: None,
                reply_token: None,
                base_url: None,
                bot_login: None,
            });
        }
        let tokens = self
            .tokens
            .into_iter()
            .map(|raw| raw.check(environment))
            .collect::<Result<Vec<_>, _>>()?;
        check_unique("[[integration]] id", integrations.iter().map(|one| one.id.as_str()))?;
        check_unique("[[token]] name", tokens.iter().map(|one| one.name.as_str()))?;
        check_unique("[[token]] token", tokens.iter().map(|one| one.token.expose_secret()))
            .map_err(|_| {
                SettingsError::new(
                    "two [[token]] sections have the same token; each must be unique",
                )
            })?;
        Ok((integrations, tokens))
    }
}

impl RawIntegration {
    fn check(
        self,
        environment: &[(String, String)],
        secrets: SecretsPolicy,
    ) -> Result<IntegrationSettings, SettingsError> {
        let id = check_name("[[integration]] id", self.id)?;
        let location = format!("[[integration]] `{id}`");
        let from = (environment, secrets);
        let secret =
            resolve_secret(&location, "secret", self.secret, self.secret_env.as_deref(), from)?;
        let has_secret = secret.is_some() || self.secret_env.is_some();
        if !has_secret && self.provider != Provider::Desk {
            return Err(SettingsError::new(format!(
                "{location} has no secret; set `secret_env` to the name of a variable, or `secret`"
            )));
        }
        if id == DESK && self.provider != Provider::Desk {
            return Err(SettingsError::new(format!(
                "{location} must have the provider `desk`; choose another id"
            )));
        }
        let reply_token =
            resolve_secret(&location, "reply_token", None, self.reply_token_env.as_deref(), from)?;
        if let Some(url) = &self.base_url
            && ValueType::WebUrl.check(url).is_err()
        {
            let (shown, allowed) = (crate::config::redact::url(url), ValueType::WebUrl.allowed());
            return Err(SettingsError::new(format!(
                "{location} has an invalid base_url `{shown}`; allowed: {allowed}"
            )));
        }
        let Self { provider, base_url, bot_login, .. } = self;
        Ok(IntegrationSettings { id, provider, secret, reply_token, base_url, bot_login })
    }
}

impl RawToken {
    fn check(self, environment: &[(String, String)]) -> Result<TokenSettings, SettingsError> {
        let name = check_name("[[token]] name", self.name)?;
        let location = format!("[[token]] `{name}`");
        let from = (environment, SecretsPolicy::Required);
        let token =
            resolve_secret(&location, "token", self.token, self.token_env.as_deref(), from)?;
        let token = token.ok_or_else(|| {
            SettingsError::new(format!(
                "{location} has no token; set `token_env` to the name of a variable, or `token`"
            ))
        })?;
        let letters = token.expose_secret().len();
        if letters < TOKEN_CHARS_MIN {
            return Err(SettingsError::new(format!(
                "{location} has {letters} characters; at least {TOKEN_CHARS_MIN} are required"
            )));
        }
        Ok(TokenSettings { name, role: self.role, token })
    }
}

/// Reads a secret from the file, or from the variable that the file names.
fn resolve_secret(
    location: &str,
    what: &str,
    direct: Option<SecretText>,
    variable: Option<&str>,
    (environment, secrets): (&[(String, String)], SecretsPolicy),
) -> Result<Option<SecretString>, SettingsError> {
    let text = match (direct, variable) {
        (Some(_), Some(_)) => {
            return Err(SettingsError::new(format!(
                "{location} has both `{what}` and `{what}_env`; remove one of them"
            )));
        }
        (Some(SecretText(text)), None) => text,
        (None, Some(variable)) => {
            let found = environment.iter().find(|(name, _)| name == variable);
            if found.is_none() && secrets == SecretsPolicy::Optional {
                return Ok(None);
            }
            found.map(|(_, text)| text.clone()).ok_or_else(|| {
                SettingsError::new(format!(
                    "{location}: variable `{variable}` for `{what}` is not set"
                ))
            })?
        }
        (None, None) => return Ok(None),
    };
    if text.is_empty() {
        return Err(SettingsError::new(format!("{location} has an empty `{what}`")));
    }
    Ok(Some(text.into()))
}

fn check_name(what: &str, name: String) -> Result<String, SettingsError> {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    if (1..=ID_CHARS_MAX).contains(&name.len()) && name.chars().all(is_plain) {
        return Ok(name);
    }
    let shown: String = name.chars().take(ID_CHARS_MAX).collect();
    Err(SettingsError::new(format!(
        "invalid {what} `{shown}`; allowed: 1 to {ID_CHARS_MAX} letters, digits, `-`, `_` and `.`"
    )))
}

fn check_unique<'a>(what: &str, names: impl Iterator<Item = &'a str>) -> Result<(), SettingsError> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(SettingsError::new(format!(
                "duplicate {what} `{name}`; it must be unique"
            )));
        }
    }
    Ok(())
}
