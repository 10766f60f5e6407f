//! The `[[model.endpoint]]` sections of the settings file: further language models, for fallback and for single integrations.
//!
//! Upstream: `headwater.toml` and the variables it names. Downstream: `desk::build`. Guarantees: ids are unique, and `default` is
//! the endpoint of the settings `model.…`; keys are never shown; unknown fields are rejected.

use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::config::error::SettingsError;
use crate::config::integrations::{
    SecretText, SecretsPolicy, check_name, check_unique, resolve_secret,
};
use crate::config::value_type::{SCRIPTED, ValueType, time};
use crate::config::{ModelSettings, shown_url};
use crate::desk::Prices;

/// Id of the endpoint of the settings `model.…`.
pub(crate) const DEFAULT_ENDPOINT: &str = "default";

/// Maximum number of sections.
const ENDPOINTS_MAX: usize = 16;

/// A model endpoint.
#[derive(Clone, Debug)]
pub(crate) struct ModelEndpointSettings {
    /// Its id, as integrations name it.
    pub(crate) id: String,
    /// Address, key and timeouts.
    pub(crate) model: ModelSettings,
    /// Price of its tokens.
    pub(crate) prices: Prices,
}

/// One `[[model.endpoint]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawModelEndpoint {
    id: String,
    url: SecretText,
    name: Option<String>,
    key: Option<SecretText>,
    key_env: Option<String>,
    timeout: Option<String>,
    idle_timeout: Option<String>,
    price_in: Option<f64>,
    price_out: Option<f64>,
}

/// A validated section; times that it does not set are those of `model.…`.
#[derive(Clone, Debug)]
pub(crate) struct CheckedModelEndpoint {
    id: String,
    url: SecretString,
    name: String,
    key: Option<SecretString>,
    timeout: Option<Duration>,
    idle_timeout: Option<Duration>,
    prices: Prices,
}

impl RawModelEndpoint {
    /// The variable that it refers to.
    pub(super) fn variable(&self) -> Option<&String> {
        self.key_env.as_ref()
    }

    fn check(
        self,
        environment: &[(String, String)],
        secrets: SecretsPolicy,
    ) -> Result<CheckedModelEndpoint, SettingsError> {
        let id = check_name("[[model.endpoint]] id", self.id)?;
        let location = format!("[[model.endpoint]] `{id}`");
        let invalid = |problem: String| Err(SettingsError::new(format!("{location} {problem}")));
        if id == DEFAULT_ENDPOINT {
            return invalid(
                "is the endpoint of the settings `model.url` and `model.name`; choose another id"
                    .to_owned(),
            );
        }
        let SecretText(url) = self.url;
        if ValueType::ModelUrl.check(&url).is_err() {
            let (shown, allowed) = (shown_url(&url), ValueType::ModelUrl.allowed());
            return invalid(format!("has an invalid url `{shown}`; allowed: {allowed}"));
        }
        let name = self.name.unwrap_or_default();
        if name.trim().is_empty() && !url.starts_with(SCRIPTED) {
            return invalid("has no `name`; set it to a model of the endpoint".to_owned());
        }
        let from = (environment, secrets);
        let key = resolve_secret(&location, "key", self.key, self.key_env.as_deref(), from)?;
        let duration = |field: &str, text: Option<String>, min: Duration| {
            let Some(text) = text else { return Ok(None) };
            let max = Duration::from_secs(3600);
            let found = time(&text).filter(|time| (min..=max).contains(time));
            found.map(Some).ok_or_else(|| {
                let shown = crate::text::one_line(&text, 60);
                let allowed = ValueType::Time { min, max }.allowed();
                let problem = format!("has an invalid {field} `{shown}`; allowed: {allowed}");
                SettingsError::new(format!("{location} {problem}"))
            })
        };
        let timeout = duration("timeout", self.timeout, Duration::from_secs(1))?;
        let idle_timeout = duration("idle_timeout", self.idle_timeout, Duration::from_millis(100))?;
        let price = |price: Option<f64>| price.unwrap_or_default();
        let prices = Prices { input: price(self.price_in), output: price(self.price_out) };
        let is_price = |price: f64| (0.0..=1e9).contains(&price);
        if !is_price(prices.input) || !is_price(prices.output) {
            return invalid("has an invalid price; allowed: a number from 0 to 1e9".to_owned());
        }
        Ok(CheckedModelEndpoint { id, url: url.into(), name, key, timeout, idle_timeout, prices })
    }
}

/// Validates all sections.
pub(super) fn check_all(
    raw: Vec<RawModelEndpoint>,
    environment: &[(String, String)],
    secrets: SecretsPolicy,
) -> Result<Vec<CheckedModelEndpoint>, SettingsError> {
    if raw.len() > ENDPOINTS_MAX {
        return Err(SettingsError::new(format!(
            "there are {} [[model.endpoint]] sections; at most {ENDPOINTS_MAX} are allowed",
            raw.len()
        )));
    }
    let checked = raw
        .into_iter()
        .map(|one| one.check(environment, secrets))
        .collect::<Result<Vec<_>, _>>()?;
    check_unique("[[model.endpoint]] id", checked.iter().map(|one| one.id.as_str()))?;
    Ok(checked)
}

impl CheckedModelEndpoint {
    /// Its id.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// The endpoint, with the timeouts of `default` where it sets none.
    pub(super) fn complete(self, default: &ModelSettings) -> ModelEndpointSettings {
        let Self { id, url, name, key, timeout, idle_timeout, prices } = self;
        let scripted = url.expose_secret().strip_prefix(SCRIPTED);
        let scripted = scripted.map(|delay| time(delay).unwrap_or_default());
        let model = ModelSettings {
            scripted,
            url,
            name,
            key,
            timeout: timeout.unwrap_or(default.timeout),
            idle_timeout: idle_timeout.unwrap_or(default.idle_timeout),
        };
        ModelEndpointSettings { id, model, prices }
    }
}

/// Checks `models` of an integration: known ids, each once.
pub(super) fn check_choice(
    location: &str,
    models: &[String],
    endpoints: &[CheckedModelEndpoint],
) -> Result<(), SettingsError> {
    check_unique(&format!("model of {location}"), models.iter().map(String::as_str))?;
    let is_known = |id: &str| id == DEFAULT_ENDPOINT || endpoints.iter().any(|one| one.id == id);
    match models.iter().find(|id| !is_known(id)) {
        None => Ok(()),
        Some(unknown) => {
            let ids = endpoints.iter().map(CheckedModelEndpoint::id);
            let known: Vec<&str> = std::iter::once(DEFAULT_ENDPOINT).chain(ids).collect();
            let shown = crate::text::one_line(unknown, 60);
            Err(SettingsError::new(format!(
                "{location} has an unknown model `{shown}` in `models`; allowed: `{}`",
                known.join("`, `")
            )))
        }
    }
}
