//! The `[[integration]]` sections of the settings file, and the checks of all array sections together.
//!
//! Upstream: `headwater.toml` and the variables it names; `notifications.rs`, `tokens.rs` and `endpoints.rs` for the other sections.
//! Downstream: `inbound` and `outbound`.
//! Guarantees: ids and names are unique, required secrets are present and never shown, unknown fields are rejected.

use std::collections::HashSet;
use std::sync::Arc;

use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::config::endpoints::{self, CheckedModelEndpoint, RawModelEndpoint};
use crate::config::error::SettingsError;
use crate::config::notifications::{NotificationSettings, RawNotification};
use crate::config::redactions::RedactionSettings;
use crate::config::tokens::{RawToken, TokenSettings};
use crate::config::tools::{self, RawTool};
use crate::config::value_type::ValueType;
use crate::desk::Provider;
use crate::desk::tool::Tool;
use crate::desk::tools::BUILT_IN;
use crate::desk::{ModeRule, ReplyMode};

/// Maximum length of an id; ids are part of URLs.
const ID_CHARS_MAX: usize = 64;

/// How GitHub names the association of an author with a repository.
pub(crate) const ASSOCIATIONS: [&str; 8] = [
    "OWNER",
    "MEMBER",
    "COLLABORATOR",
    "CONTRIBUTOR",
    "FIRST_TIME_CONTRIBUTOR",
    "FIRST_TIMER",
    "MANNEQUIN",
    "NONE",
];

/// Id of the built-in integration for tickets.
pub(crate) const DESK: &str = "desk";

/// Type of an integration.
#[derive(Clone, Debug)]
pub(crate) enum ProviderKind {
    /// GitHub, or a GitHub Enterprise Server.
    Github,
    /// GitLab, anywhere.
    Gitlab,
    /// Any sender of Standard Webhooks.
    Standard,
    /// Tickets of this server.
    Desk,
    /// A provider of the program that embeds the server.
    Embedded(Arc<dyn Provider>),
}

impl ProviderKind {
    /// The built-in ones.
    pub(crate) const BUILT_IN: [Self; 4] = [Self::Github, Self::Gitlab, Self::Standard, Self::Desk];

    /// Its name in URLs, SQL and the settings file.
    pub(crate) fn as_str(&self) -> &str {
        match self {
            Self::Github => "github",
            Self::Gitlab => "gitlab",
            Self::Standard => "standard",
            Self::Desk => "desk",
            Self::Embedded(provider) => provider.name(),
        }
    }
}

impl PartialEq for ProviderKind {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

/// The built-in providers and those of the embedding program, whose names must be valid and unique.
fn provider_kinds(embedded: &[Arc<dyn Provider>]) -> Result<Vec<ProviderKind>, SettingsError> {
    for provider in embedded {
        check_name("name of a provider of this program", provider.name().to_owned())?;
    }
    let embedded = embedded.iter().map(|one| ProviderKind::Embedded(Arc::clone(one)));
    let kinds: Vec<_> = ProviderKind::BUILT_IN.into_iter().chain(embedded).collect();
    check_unique("name of a provider", kinds.iter().map(ProviderKind::as_str))?;
    Ok(kinds)
}

/// One `[[integration]]`.
#[derive(Clone, Debug)]
pub(crate) struct IntegrationSettings {
    /// Its id, part of the URL of its webhooks.
    pub(crate) id: String,
    /// Its type.
    pub(crate) provider: ProviderKind,
    /// Webhook signing secret. Required for every provider except the desk.
    pub(crate) secret: Option<SecretString>,
    /// Token for sending replies.
    pub(crate) reply_token: Option<SecretString>,
    /// GitHub App that sends replies instead of a token.
    pub(crate) app: Option<GithubAppSettings>,
    /// Base URL of its API; for a `standard` integration, the callback URL of replies.
    pub(crate) base_url: Option<String>,
    /// Login under which replies are posted. Events from this author are ignored.
    pub(crate) bot_login: Option<String>,
    /// Logins of people of the support team. With a message of one of them, that person takes the issue over.
    pub(crate) agents: Vec<String>,
    /// Associations of authors with the repository whose messages are handled, as named by GitHub; empty: all.
    pub(crate) author_associations: Vec<String>,
    /// What becomes of answers that no rule matches.
    pub(crate) mode: ReplyMode,
    /// Rules that choose another mode, in order.
    pub(crate) rules: Vec<ModeRule>,
    /// Ids of the model endpoints that answer, in order; empty: all.
    pub(crate) models: Vec<String>,
    /// Whether the program defines it, and not the settings file.
    pub(crate) is_built_in: bool,
}

/// The GitHub App of an integration.
#[derive(Clone, Debug)]
pub(crate) struct GithubAppSettings {
    /// Its id, or its client id.
    pub(crate) id: String,
    /// Its private key in PEM format.
    pub(crate) key: SecretString,
    /// The installation of all replies; `None`: the one that sent the webhook.
    pub(crate) installation: Option<u64>,
}

/// The id of an app: GitHub has a number and a text for each.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum AppId {
    Number(u64),
    Text(String),
}

/// The validated array sections.
pub(crate) struct Lists {
    pub(crate) integrations: Vec<IntegrationSettings>,
    pub(crate) notifications: Vec<NotificationSettings>,
    pub(crate) tokens: Vec<TokenSettings>,
    pub(crate) endpoints: Vec<CheckedModelEndpoint>,
    pub(crate) redactions: Vec<RedactionSettings>,
    pub(crate) tools: Vec<Arc<dyn Tool>>,
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
    #[serde(default, rename = "notification")]
    notifications: Vec<RawNotification>,
    #[serde(default, rename = "token")]
    tokens: Vec<RawToken>,
    #[serde(default, rename = "redaction")]
    redactions: Vec<RedactionSettings>,
    /// `endpoint` of the section `model`.
    #[serde(default, rename = "model.endpoint")]
    endpoints: Vec<RawModelEndpoint>,
    #[serde(default, rename = "tool")]
    tools: Vec<RawTool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawIntegration {
    id: String,
    provider: String,
    secret: Option<SecretText>,
    secret_env: Option<String>,
    reply_token_env: Option<String>,
    app_id: Option<AppId>,
    app_key_env: Option<String>,
    installation_id: Option<u64>,
    base_url: Option<String>,
    bot_login: Option<String>,
    #[serde(default)]
    agents: Vec<String>,
    #[serde(default)]
    author_associations: Vec<String>,
    mode: Option<String>,
    #[serde(default, rename = "rule")]
    rules: Vec<RawRule>,
    #[serde(default)]
    models: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    mode: String,
    #[serde(default)]
    author_associations: Vec<String>,
    first_contact: Option<bool>,
    #[serde(default)]
    tools: Vec<String>,
    #[serde(default)]
    words: Vec<String>,
    hours: Option<String>,
}

/// A secret in the settings file; `Debug` hides it.
#[derive(Deserialize)]
#[serde(transparent)]
pub(super) struct SecretText(pub(super) String);

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
        let of_integrations = self
            .integrations
            .iter()
            .flat_map(|raw| [&raw.secret_env, &raw.reply_token_env, &raw.app_key_env]);
        let of_notifications = self.notifications.iter().map(|raw| &raw.secret_env);
        let of_tokens = self.tokens.iter().map(|raw| &raw.token_env);
        let of_endpoints = self.endpoints.iter().filter_map(RawModelEndpoint::variable);
        let all = of_integrations.chain(of_notifications).chain(of_tokens).flatten();
        let of_tools = self.tools.iter().flat_map(RawTool::variables);
        all.chain(of_endpoints).chain(of_tools).cloned().collect()
    }

    /// Validates the sections and adds the built-in `desk`. Names all unset variables in one error.
    pub(crate) fn check(
        mut self,
        environment: &[(String, String)],
        secrets: SecretsPolicy,
        providers: &[Arc<dyn Provider>],
    ) -> Result<Lists, SettingsError> {
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
        let endpoints = endpoints::check_all(self.endpoints, environment, secrets)?;
        let kinds = provider_kinds(providers)?;
        let mut integrations = self
            .integrations
            .into_iter()
            .map(|raw| raw.check(environment, secrets, &kinds))
            .collect::<Result<Vec<_>, _>>()?;
        if !integrations.iter().any(|one| one.id == DESK) {
            integrations.push(IntegrationSettings {
                id: DESK.to_owned(),
                provider: ProviderKind::Desk,
                secret: None,
                reply_token: None,
                app: None,
                base_url: None,
                bot_login: None,
                agents: Vec::new(),
                author_associations: Vec::new(),
                mode: ReplyMode::Auto,
                rules: Vec::new(),
                models: Vec::new(),
                is_built_in: true,
            });
        }
        for integration in &integrations {
            let location = format!("[[integration]] `{}`", integration.id);
            endpoints::check_choice(&location, &integration.models, &endpoints)?;
        }
        let ids: Vec<&str> = integrations.iter().map(|one| one.id.as_str()).collect();
        let tools = tools::check_all(self.tools, environment, secrets, &ids)?;
        check_rule_tools(&integrations, &tools)?;
        let tokens = self
            .tokens
            .into_iter()
            .map(|raw| raw.check(environment))
            .collect::<Result<Vec<_>, _>>()?;
        for token in &tokens {
            let of_token = token.integrations.iter().flat_map(|all| all.iter());
            let is_unknown = |id: &&String| !integrations.iter().any(|one| one.id == **id);
            if let Some(unknown) = of_token.into_iter().find(is_unknown) {
                return Err(SettingsError::new(format!(
                    "[[token]] `{}` names the unknown integration `{unknown}`; allowed: the ids of [[integration]] sections, and `{DESK}`",
                    token.name
                )));
            }
        }
        let notifications = self
            .notifications
            .into_iter()
            .map(|raw| raw.check(environment, secrets))
            .collect::<Result<Vec<_>, _>>()?;
        check_unique("[[integration]] id", integrations.iter().map(|one| one.id.as_str()))?;
        let ids = notifications.iter().map(|one| one.config.id.as_str());
        check_unique("[[notification]] id", ids)?;
        check_unique("[[token]] name", tokens.iter().map(|one| one.name.as_str()))?;
        check_unique("[[token]] token", tokens.iter().map(|one| one.token.expose_secret()))
            .map_err(|_| {
                SettingsError::new(
                    "two [[token]] sections have the same token; each must be unique",
                )
            })?;
        let redactions = self.redactions;
        Ok(Lists { integrations, notifications, tokens, endpoints, redactions, tools })
    }
}

impl RawIntegration {
    fn check(
        self,
        environment: &[(String, String)],
        secrets: SecretsPolicy,
        kinds: &[ProviderKind],
    ) -> Result<IntegrationSettings, SettingsError> {
        let id = check_name("[[integration]] id", self.id.clone())?;
        let location = format!("[[integration]] `{id}`");
        let provider = kinds.iter().find(|kind| kind.as_str() == self.provider).cloned();
        let provider = provider.ok_or_else(|| {
            let names: Vec<&str> = kinds.iter().map(ProviderKind::as_str).collect();
            SettingsError::new(format!(
                "{location} has an unknown provider `{}`; allowed: {}; a provider of an embedding program is known to that program only",
                self.provider.chars().take(ID_CHARS_MAX).collect::<String>(),
                names.join(", ")
            ))
        })?;
        let from = (environment, secrets);
        let app = check_app(&location, &self, from)?;
        let secret =
            resolve_secret(&location, "secret", self.secret, self.secret_env.as_deref(), from)?;
        let has_secret = secret.is_some() || self.secret_env.is_some();
        if !has_secret && provider != ProviderKind::Desk {
            return Err(SettingsError::new(format!(
                "{location} has no secret; set `secret_env` to the name of a variable, or `secret`"
            )));
        }
        if id == DESK && provider != ProviderKind::Desk {
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
        let Self { base_url, bot_login, agents, author_associations, models, .. } = self;
        check_people(&location, &provider, &agents, &author_associations)?;
        let mode = self.mode.as_deref().map(|mode| parse_mode(&location, mode)).transpose()?;
        let mode = mode.unwrap_or_default();
        let rules =
            self.rules.into_iter().enumerate().map(|(place, rule)| {
                rule.check(&format!("{location}, rule {}", place + 1), &provider)
            });
        let rules = rules.collect::<Result<Vec<_>, _>>()?;
        let is_built_in = false;
        Ok(IntegrationSettings {
            id,
            provider,
            secret,
            reply_token,
            app,
            base_url,
            bot_login,
            agents,
            author_associations,
            mode,
            rules,
            models,
            is_built_in,
        })
    }
}

impl RawRule {
    fn check(self, location: &str, provider: &ProviderKind) -> Result<ModeRule, SettingsError> {
        let mode = parse_mode(location, &self.mode)?;
        check_people(location, provider, &[], &self.author_associations)?;
        if self.words.iter().any(|word| word.trim().is_empty()) {
            return Err(SettingsError::new(format!("{location} has an empty text in `words`")));
        }
        let hours = self.hours.as_deref().map(|hours| {
            parse_hours(hours).ok_or_else(|| {
                SettingsError::new(format!(
                    "{location} has invalid `hours` `{hours}`; write two different hours of the day in UTC, such as `22-6`"
                ))
            })
        });
        let hours = hours.transpose()?;
        let Self { author_associations, first_contact, tools, words, .. } = self;
        let rule = ModeRule { mode, author_associations, first_contact, tools, words, hours };
        if rule.is_empty() {
            return Err(SettingsError::new(format!(
                "{location} has no condition; set `mode` of the integration instead"
            )));
        }
        Ok(rule)
    }
}

fn parse_mode(location: &str, mode: &str) -> Result<ReplyMode, SettingsError> {
    ReplyMode::parse(mode).ok_or_else(|| {
        SettingsError::new(format!(
            "{location} has an unknown mode `{mode}`; allowed: auto, draft, note"
        ))
    })
}

/// `22-6`.
fn parse_hours(hours: &str) -> Option<(u8, u8)> {
    let (from, until) = hours.split_once('-')?;
    let hour = |text: &str, max: u8| text.trim().parse::<u8>().ok().filter(|hour| *hour <= max);
    let (from, until) = (hour(from, 23)?, hour(until, 24)?);
    (from != until).then_some((from, until))
}

/// Checks the tools that rules name: built-in ones, or those of `[[tool]]` sections.
fn check_rule_tools(
    integrations: &[IntegrationSettings],
    tools: &[Arc<dyn Tool>],
) -> Result<(), SettingsError> {
    let names = tools.iter().map(|tool| tool.definition().name.as_str());
    let names: Vec<&str> = BUILT_IN.into_iter().chain(names).collect();
    for integration in integrations {
        for (place, rule) in integration.rules.iter().enumerate() {
            if let Some(unknown) = rule.tools.iter().find(|tool| !names.contains(&tool.as_str())) {
                return Err(SettingsError::new(format!(
                    "[[integration]] `{}`, rule {} has an unknown tool `{unknown}`; allowed: {}",
                    integration.id,
                    place + 1,
                    names.join(", ")
                )));
            }
        }
    }
    Ok(())
}

/// Checks `agents` and `author_associations`.
fn check_people(
    location: &str,
    provider: &ProviderKind,
    agents: &[String],
    associations: &[String],
) -> Result<(), SettingsError> {
    if *provider == ProviderKind::Desk && !agents.is_empty() {
        return Err(SettingsError::new(format!(
            "{location}: `agents` has no effect on tickets; send messages of agents with the author `agent`"
        )));
    }
    if agents.iter().any(|login| login.trim().is_empty()) {
        return Err(SettingsError::new(format!("{location} has an empty name in `agents`")));
    }
    if *provider != ProviderKind::Github && !associations.is_empty() {
        return Err(SettingsError::new(format!(
            "{location}: only GitHub sends the association of an author; remove `author_associations`"
        )));
    }
    check_associations(location, associations)
}

fn check_associations(location: &str, associations: &[String]) -> Result<(), SettingsError> {
    match associations.iter().find(|one| !ASSOCIATIONS.contains(&one.as_str())) {
        None => Ok(()),
        Some(unknown) => Err(SettingsError::new(format!(
            "{location} has an unknown association `{unknown}` in `author_associations`; allowed: {}",
            ASSOCIATIONS.join(", ")
        ))),
    }
}

/// The GitHub App of an integration, if it has one.
fn check_app(
    location: &str,
    raw: &RawIntegration,
    from: (&[(String, String)], SecretsPolicy),
) -> Result<Option<GithubAppSettings>, SettingsError> {
    let refuse = |problem: &str| Err(SettingsError::new(format!("{location} {problem}")));
    let (id, variable) = match (&raw.app_id, raw.app_key_env.as_deref()) {
        (None, None) if raw.installation_id.is_none() => return Ok(None),
        (Some(id), Some(variable)) => (id, variable),
        _ => return refuse("has only a part of a GitHub App; set `app_id` and `app_key_env`"),
    };
    if raw.provider != ProviderKind::Github.as_str() {
        return refuse("has `app_id`, but only the provider `github` has Apps; remove it");
    }
    if raw.reply_token_env.is_some() {
        return refuse("has both `reply_token_env` and `app_id`; remove one of them");
    }
    let key = resolve_secret(location, "app_key", None, Some(variable), from)?;
    let id = match id {
        AppId::Number(id) => id.to_string(),
        AppId::Text(id) => id.clone(),
    };
    Ok(key.map(|key| GithubAppSettings { id, key, installation: raw.installation_id }))
}

/// Reads a secret from the file, or from the variable that the file names.
pub(super) fn resolve_secret(
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

pub(super) fn check_name(what: &str, name: String) -> Result<String, SettingsError> {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    if (1..=ID_CHARS_MAX).contains(&name.len()) && name.chars().all(is_plain) {
        return Ok(name);
    }
    let shown: String = name.chars().take(ID_CHARS_MAX).collect();
    Err(SettingsError::new(format!(
        "invalid {what} `{shown}`; allowed: 1 to {ID_CHARS_MAX} letters, digits, `-`, `_` and `.`"
    )))
}

pub(super) fn check_unique<'a>(
    what: &str,
    names: impl Iterator<Item = &'a str>,
) -> Result<(), SettingsError> {
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
