//! The `[[notification]]` sections of the settings file.
//!
//! Upstream: `integrations.rs`. Downstream: `server/startup.rs`. Guarantees: the address and the events are valid; a webhook has a
//! secret, which is never shown. The URL may contain a secret, too.

use headwater_stream::GroupStart;
use secrecy::SecretString;
use serde::Deserialize;

use crate::config::error::SettingsError;
use crate::config::integrations::{SecretText, SecretsPolicy, check_name, resolve_secret};
use crate::config::value_type::{ValueType, time};
use crate::outbound::notifications::{NotificationConfig, notification_event_names};
use crate::tickets::TicketEventType;
use crate::tickets::desk_events::DeskEventType;

/// One `[[notification]]`.
#[derive(Clone, Debug)]
pub(crate) struct NotificationSettings {
    /// What is forwarded, and how often it is tried.
    pub(crate) config: NotificationConfig,
    /// URL of the receiver; may contain a password.
    pub(crate) url: SecretString,
    /// Signing secret; `None` for Slack, and for commands that send nothing.
    pub(crate) secret: Option<SecretString>,
    /// What is sent.
    pub(crate) format: NotificationFormat,
}

/// What a receiver gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NotificationFormat {
    /// A signed JSON request (Standard Webhooks).
    #[default]
    Webhook,
    /// A message for an incoming webhook of Slack.
    Slack,
}

impl NotificationFormat {
    /// The name in the settings file.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Webhook => "webhook",
            Self::Slack => "slack",
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawNotification {
    id: String,
    url: SecretText,
    secret: Option<SecretText>,
    pub(super) secret_env: Option<String>,
    events: Option<Vec<String>>,
    attempts: Option<u32>,
    timeout: Option<String>,
    from: Option<NotificationStart>,
    #[serde(default)]
    format: NotificationFormat,
}

/// Which events a new receiver begins with.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum NotificationStart {
    Now,
    Beginning,
}

impl RawNotification {
    pub(super) fn check(
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
        let has_secret = secret.is_some() || self.secret_env.is_some();
        match self.format {
            NotificationFormat::Webhook if !has_secret => {
                return Err(SettingsError::new(format!(
                    "{location} has no secret; set `secret_env` to the name of a variable, or `secret`"
                )));
            }
            NotificationFormat::Slack if has_secret => {
                return Err(SettingsError::new(format!(
                    "{location} has a secret, but the format `slack` is not signed; remove it"
                )));
            }
            _ => {}
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
            config.events.clear();
            for name in &events {
                if let Some(event) = TicketEventType::parse_public(name) {
                    config.events.push(event);
                } else if let Some(event) = DeskEventType::parse(name) {
                    config.desk_events.push(event);
                } else {
                    let known = notification_event_names().join("`, `");
                    let shown = crate::text::one_line(name, 60);
                    return Err(SettingsError::new(format!(
                        "{location} has the unknown event `{shown}`; allowed: `{known}`"
                    )));
                }
            }
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
        Ok(NotificationSettings { config, url: url.into(), secret, format: self.format })
    }
}
