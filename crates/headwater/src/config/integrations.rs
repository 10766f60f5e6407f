//! The `[[integration]]`, `[[notification]]` and `[[token]]` sections of the settings file.
//!
//! Upstream: `headwater.toml` and the variables it names. Downstream: `inbound`, `outbound` and `http/auth.rs`.
//! Guarantees: ids and names are unique, required secrets are present and never shown, unknown fields are rejected.

use std::collections::HashSet;
use std::sync::Arc;

use headwater_stream::GroupStart;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::config::endpoints::{self, CheckedModelEndpoint, RawModelEndpoint};
use crate::config::error::SettingsError;
use crate::config::tools::{self, RawTool};
use crate::config::value_type::{ValueType, time};
use crate::desk::tool::Tool;
use crate::desk::tools::BUILT_IN;
use crate::desk::{ModeRule, ReplyMode};
use crate::outbound::notifications::NotificationConfig;
use crate::tickets::TicketEventType;

/// Maximum length of an id; ids are part of URLs.
const ID_CHARS_MAX: usize = 64;

/// Minimum length of a token; shorter ones can be guessed.
const TOKEN_CHARS_MIN: usize = 16;

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

/// One `[[notification]]`.
#[derive(Clone, Debug)]
pub(crate) struct NotificationSettings {
    /// What is forwarded, and how often it is tried.
    pub(crate) config: NotificationConfig,
    /// URL of the receiver; may contain a password.
    pub(crate) url: SecretString,
    /// Signing secret; `None` only for commands that send nothing.
    pub(crate) secret: Option<SecretString>,
}

/// The validated array sections.
pub(crate) struct Lists {
    pub(crate) integrations: Vec<IntegrationSettings>,
    pub(crate) notifications: Vec<NotificationSettings>,
    pub(crate) tokens: Vec<TokenSettings>,
    pub(crate) endpoints: Vec<CheckedModelEndpoint>,
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
    provider: Provider,
    secret: Option<SecretText>,
    secret_env: Option<String>,
    reply_token_env: Option<String>,
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

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawNotification {
    id: String,
    url: SecretText,
    secret: Option<SecretText>,
    secret_env: Option<String>,
    events: Option<Vec<String>>,
    attempts: Option<u32>,
    timeout: Option<String>,
    from: Option<NotificationStart>,
}

/// Which events a new receiver begins with.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum NotificationStart {
    Now,
    Beginning,
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
        let of_integrations =
            self.integrations.iter().flat_map(|raw| [&raw.secret_env, &raw.reply_token_env]);
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
        Ok(Lists { integrations, notifications, tokens, endpoints, tools })
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
        let Self { provider, base_url, bot_login, agents, author_associations, models, .. } = self;
        check_people(&location, provider, &agents, &author_associations)?;
        let mode = self.mode.as_deref().map(|mode| parse_mode(&location, mode)).transpose()?;
        let mode = mode.unwrap_or_default();
        let rules =
            self.rules.into_iter().enumerate().map(|(place, rule)| {
                rule.check(&format!("{location}, rule {}", place + 1), provider)
            });
        let rules = rules.collect::<Result<Vec<_>, _>>()?;
        let is_built_in = false;
        Ok(IntegrationSettings {
            id,
            provider,
            secret,
            reply_token,
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

impl RawNotification {
    fn check(
        self,
        environment: &[(String, String)],
        secrets: SecretsPolicy,
    ) -> Result<NotificationSettings, SettingsError> {
        let id = check_name("[[notification]] id", self.id)?;
        let location = format!("[[notification]] `{id}`");
        let secret = resolve_secret(
            &location,
            "secret",
            self.secret,
            self.secret_env.as_deref(),
            (environment, secrets),
        )?;
        if secret.is_none() && self.secret_env.is_none() {
            return Err(SettingsError::new(format!(
                "{location} has no secret; set `secret_env` to the name of a variable, or `secret`"
            )));
        }
        let SecretText(url) = self.url;
        if ValueType::WebUrl.check(&url).is_err() {
            let (shown, allowed) = (crate::config::redact::url(&url), ValueType::WebUrl.allowed());
            return Err(SettingsError::new(format!(
                "{location} has an invalid url `{shown}`; allowed: {allowed}"
            )));
        }
        let mut config = NotificationConfig::new(id);
        if let Some(events) = self.events {
            let parse = |name: &String| {
                TicketEventType::parse_public(name).ok_or_else(|| {
                    let known = TicketEventType::PUBLIC.map(TicketEventType::as_str).join("`, `");
                    let shown = crate::text::one_line(name, 60);
                    SettingsError::new(format!(
                        "{location} has the unknown event `{shown}`; allowed: `{known}`"
                    ))
                })
            };
            config.events = events.iter().map(parse).collect::<Result<_, _>>()?;
        }
        if let Some(attempts) = self.attempts {
            config.attempts = attempts;
        }
        if let Some(text) = &self.timeout {
            config.timeout = time(text).ok_or_else(|| {
                let shown = crate::text::one_line(text, 60);
                SettingsError::new(format!(
                    "{location} has an invalid timeout `{shown}`; write `5s`"
                ))
            })?;
        }
        if let Some(NotificationStart::Beginning) = self.from {
            config.start = GroupStart::Beginning;
        }
        config
            .validate()
            .map_err(|problem| SettingsError::new(format!("[[notification]]: {problem}")))?;
        Ok(NotificationSettings { config, url: url.into(), secret })
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

impl RawRule {
    fn check(self, location: &str, provider: Provider) -> Result<ModeRule, SettingsError> {
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
    provider: Provider,
    agents: &[String],
    associations: &[String],
) -> Result<(), SettingsError> {
    if provider == Provider::Desk && !agents.is_empty() {
        return Err(SettingsError::new(format!(
            "{location}: `agents` has no effect on tickets; send messages of agents with the author `agent`"
        )));
    }
    if agents.iter().any(|login| login.trim().is_empty()) {
        return Err(SettingsError::new(format!("{location} has an empty name in `agents`")));
    }
    if provider != Provider::Github && !associations.is_empty() {
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
