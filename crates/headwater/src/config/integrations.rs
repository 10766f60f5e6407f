//! The settings of which there can be several: `[[integration]]` and `[[token]]` of the settings file.
//!
//! Upstream: `headwater.toml`, and the variables it names. Downstream: `webhooks`, `replies` and `http::access`.
//! Promises: ids and names are unique, secrets are there and never shown, and whatever the file says beyond this is refused.

use std::collections::HashSet;

use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::config::error::SettingsError;
use crate::config::value_type::Kind;

/// Letters of an id: it stands in addresses.
const ID_LETTERS_MAX: usize = 64;

/// A shorter token can be guessed.
const TOKEN_LETTERS_MIN: usize = 16;

/// The integration of tickets, which is always there.
pub(crate) const DESK: &str = "desk";

/// The other side of an integration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Provider {
    /// GitHub, or a GitHub Enterprise Server.
    Github,
    /// GitLab, anywhere.
    Gitlab,
    /// Anybody who speaks Standard Webhooks.
    Standard,
    /// Our own tickets.
    Desk,
}

impl Provider {
    /// The name in addresses, in SQL and in the settings file.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Github => "github",
            Self::Gitlab => "gitlab",
            Self::Standard => "standard",
            Self::Desk => "desk",
        }
    }
}

/// What a caller may do; each includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    /// Look.
    Read,
    /// Change tickets and issues.
    Write,
    /// Everything.
    Admin,
}

impl Role {
    /// The name in the settings file.
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
pub(crate) struct Integration {
    /// Its name, which stands in the address of its webhooks.
    pub(crate) id: String,
    /// The other side.
    pub(crate) provider: Provider,
    /// What webhooks are signed with. Every provider but the desk has one.
    pub(crate) secret: Option<SecretString>,
    /// What we present when we reply.
    pub(crate) reply_token: Option<SecretString>,
    /// Where the other side's API is; of a `standard` integration, where replies go.
    pub(crate) base_url: Option<String>,
    /// The name under which we reply there: what it writes is not an event for us.
    pub(crate) bot_login: Option<String>,
}

/// One `[[token]]`.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    /// Who presents it; stands in the audit log.
    pub(crate) name: String,
    /// What its bearer may do.
    pub(crate) role: Role,
    /// The token.
    pub(crate) token: SecretString,
}

/// Whether what runs with the settings needs their secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Secrets {
    /// It signs, verifies or admits with them.
    Needed,
    /// It looks, or asks somebody else; a variable that is not set is no matter.
    NotNeeded,
}

/// The part of the file that holds lists.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Lists {
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

/// Text of the file that `Debug` does not show.
#[derive(Deserialize)]
#[serde(transparent)]
struct SecretText(String);

impl std::fmt::Debug for SecretText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(crate::config::redact::HIDDEN)
    }
}

impl Lists {
    /// Whether there are tokens at all.
    pub(crate) fn has_tokens(&self) -> bool {
        !self.tokens.is_empty()
    }

    /// The variables that it names.
    pub(crate) fn variables(&self) -> Vec<String> {
        let of_integrations =
            self.integrations.iter().flat_map(|raw| [&raw.secret_env, &raw.reply_token_env]);
        let of_tokens = self.tokens.iter().map(|raw| &raw.token_env);
        of_integrations.chain(of_tokens).flatten().cloned().collect()
    }

    /// The integrations, with the desk's among them. All variables that are not set are named at once.
    pub(crate) fn integrations(
        mut self,
        environment: &[(String, String)],
        secrets: Secrets,
    ) -> Result<(Vec<Integration>, Vec<Token>), SettingsError> {
        let is_set = |variable: &String| environment.iter().any(|(name, _)| name == variable);
        let unset: Vec<String> =
            self.variables().into_iter().filter(|variable| !is_set(variable)).collect();
        if secrets == Secrets::Needed && unset.len() > 1 {
            let names = unset.join("`, `");
            return Err(SettingsError::new(format!(
                "the variables `{names}`, which the settings file names, are not set"
            )));
        }
        if secrets == Secrets::NotNeeded {
            // Whoever presents a token asks a server, which knows its own.
            self.tokens.retain(|raw| raw.token_env.as_ref().is_none_or(is_set));
        }
        let mut integrations = self
            .integrations
            .into_iter()
            .map(|raw| raw.check(environment, secrets))
            .collect::<Result<Vec<_>, _>>()?;
        if !integrations.iter().any(|one| one.id == DESK) {
            integrations.push(Integration {
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
        unique("[[integration]] id", integrations.iter().map(|one| one.id.as_str()))?;
        unique("[[token]] name", tokens.iter().map(|one| one.name.as_str()))?;
        unique("[[token]] token", tokens.iter().map(|one| one.token.expose_secret())).map_err(
            |_| SettingsError::new("two [[token]] have the same token; give each its own"),
        )?;
        Ok((integrations, tokens))
    }
}

impl RawIntegration {
    fn check(
        self,
        environment: &[(String, String)],
        secrets: Secrets,
    ) -> Result<Integration, SettingsError> {
        let id = name("[[integration]] id", self.id)?;
        let place = format!("[[integration]] `{id}`");
        let from = (environment, secrets);
        let secret = either(&place, "secret", self.secret, self.secret_env.as_deref(), from)?;
        let has_secret = secret.is_some() || self.secret_env.is_some();
        if !has_secret && self.provider != Provider::Desk {
            return Err(SettingsError::new(format!(
                "{place} has no secret; set `secret_env` to the name of a variable that holds it, or `secret`"
            )));
        }
        if id == DESK && self.provider != Provider::Desk {
            return Err(SettingsError::new(format!(
                "{place} must have the provider `desk`; choose another id for it"
            )));
        }
        let reply_token =
            either(&place, "reply_token", None, self.reply_token_env.as_deref(), from)?;
        if let Some(url) = &self.base_url
            && Kind::WebUrl.check(url).is_err()
        {
            let (shown, allowed) = (crate::config::redact::url(url), Kind::WebUrl.allowed());
            return Err(SettingsError::new(format!(
                "{place} has the base_url `{shown}`; allowed is {allowed}"
            )));
        }
        let Self { provider, base_url, bot_login, .. } = self;
        Ok(Integration { id, provider, secret, reply_token, base_url, bot_login })
    }
}

impl RawToken {
    fn check(self, environment: &[(String, String)]) -> Result<Token, SettingsError> {
        let name = name("[[token]] name", self.name)?;
        let place = format!("[[token]] `{name}`");
        let from = (environment, Secrets::Needed);
        let token = either(&place, "token", self.token, self.token_env.as_deref(), from)?;
        let token = token.ok_or_else(|| {
            SettingsError::new(format!(
                "{place} has no token; set `token_env` to the name of a variable that holds it, or `token`"
            ))
        })?;
        let letters = token.expose_secret().len();
        if letters < TOKEN_LETTERS_MIN {
            return Err(SettingsError::new(format!(
                "{place} has {letters} letters; at least {TOKEN_LETTERS_MIN} are needed"
            )));
        }
        Ok(Token { name, role: self.role, token })
    }
}

/// The secret, from the file itself or from the variable that the file names.
fn either(
    place: &str,
    what: &str,
    direct: Option<SecretText>,
    variable: Option<&str>,
    (environment, secrets): (&[(String, String)], Secrets),
) -> Result<Option<SecretString>, SettingsError> {
    let text = match (direct, variable) {
        (Some(_), Some(_)) => {
            return Err(SettingsError::new(format!(
                "{place} has both `{what}` and `{what}_env`; keep one of them"
            )));
        }
        (Some(SecretText(text)), None) => text,
        (None, Some(variable)) => {
            let found = environment.iter().find(|(name, _)| name == variable);
            if found.is_none() && secrets == Secrets::NotNeeded {
                return Ok(None);
            }
            found.map(|(_, text)| text.clone()).ok_or_else(|| {
                SettingsError::new(format!(
                    "{place} takes `{what}` from the variable `{variable}`, which is not set"
                ))
            })?
        }
        (None, None) => return Ok(None),
    };
    if text.is_empty() {
        return Err(SettingsError::new(format!("{place} has an empty `{what}`")));
    }
    Ok(Some(text.into()))
}

fn name(what: &str, name: String) -> Result<String, SettingsError> {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    if (1..=ID_LETTERS_MAX).contains(&name.len()) && name.chars().all(is_plain) {
        return Ok(name);
    }
    let shown: String = name.chars().take(ID_LETTERS_MAX).collect();
    Err(SettingsError::new(format!(
        "{what} is `{shown}`; allowed are 1 to {ID_LETTERS_MAX} letters, digits, `-`, `_` and `.`"
    )))
}

fn unique<'a>(what: &str, names: impl Iterator<Item = &'a str>) -> Result<(), SettingsError> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(SettingsError::new(format!(
                "{what} `{name}` stands twice; it must be unique"
            )));
        }
    }
    Ok(())
}
