//! The `[[tool]]` sections of the settings file: HTTP endpoints that the model may call.
//!
//! Upstream: `headwater.toml` and the variables it names. Downstream: `desk::build`. Guarantees: every schema, template and header is
//! checked at the start; names are unique; secrets are never shown; unknown fields are rejected.

use std::sync::Arc;

use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::Value as Json;

use crate::config::error::SettingsError;
use crate::config::integrations::{SecretText, SecretsPolicy, check_unique, resolve_secret};
use crate::config::value_type::time;
use crate::desk::http_tool::{HttpTool, HttpToolBody, HttpToolConfig, HttpToolHeader};
use crate::desk::tool::{Tool, ToolDefinition};
use crate::desk::toolbox::Toolbox;
use crate::text;

/// One `[[tool]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawTool {
    name: String,
    description: String,
    parameters: Option<toml::Value>,
    method: Option<String>,
    url: String,
    body: Option<toml::Value>,
    #[serde(default, rename = "header")]
    headers: Vec<RawHeader>,
    timeout: Option<String>,
    response_bytes_max: Option<usize>,
    #[serde(default)]
    allowed_hosts: Vec<String>,
    idempotency_header: Option<String>,
    lookup_url: Option<String>,
    #[serde(default)]
    integrations: Vec<String>,
    changes: Option<bool>,
    #[serde(default)]
    approval: bool,
}

/// One `[[tool.header]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawHeader {
    name: String,
    value: Option<SecretText>,
    secret_env: Option<String>,
    #[serde(default)]
    prefix: String,
}

impl RawTool {
    /// The variables that it refers to.
    pub(super) fn variables(&self) -> impl Iterator<Item = &String> {
        self.headers.iter().filter_map(|header| header.secret_env.as_ref())
    }

    fn check(
        self,
        environment: &[(String, String)],
        secrets: SecretsPolicy,
        integrations: &[&str],
    ) -> Result<HttpTool, SettingsError> {
        let location = format!("[[tool]] `{}`", text::one_line(&self.name, 64));
        let invalid = |problem: String| SettingsError::new(format!("{location} {problem}"));
        if let Some(unknown) =
            self.integrations.iter().find(|id| !integrations.contains(&id.as_str()))
        {
            let (shown, known) = (text::one_line(unknown, 60), integrations.join("`, `"));
            return Err(invalid(format!(
                "has an unknown integration `{shown}` in `integrations`; allowed: `{known}`"
            )));
        }
        check_unique(
            &format!("integration of {location}"),
            self.integrations.iter().map(String::as_str),
        )?;
        let json = |field: &str, value: toml::Value| match value {
            toml::Value::String(text) => serde_json::from_str::<Json>(&text)
                .map_err(|error| invalid(format!("has an invalid `{field}`: not JSON: {error}"))),
            table => serde_json::to_value(table)
                .map_err(|error| invalid(format!("has an invalid `{field}`: {error}"))),
        };
        let parameters = match self.parameters {
            Some(schema) => json("parameters", schema)?,
            None => serde_json::json!({"type": "object", "additionalProperties": false}),
        };
        let method = self.method.unwrap_or_else(|| "GET".to_owned());
        let mut definition = ToolDefinition {
            integrations: self.integrations,
            // Only a `GET` is presumed to change nothing.
            changes: self.changes.unwrap_or(method != "GET"),
            approval: self.approval,
            ..ToolDefinition::new(self.name, self.description, parameters)
        };
        if let Some(text) = &self.timeout {
            definition.timeout = time(text).ok_or_else(|| {
                let shown = text::one_line(text, 60);
                invalid(format!("has an invalid `timeout` `{shown}`; write `5s`"))
            })?;
        }
        let mut config = HttpToolConfig::new(definition, &method, &self.url);
        if let Some(body) = self.body {
            config.body = HttpToolBody::Template(json("body", body)?);
        }
        for header in self.headers {
            let location = format!("{location}, header `{}`", text::one_line(&header.name, 60));
            let (direct, variable) = (header.value, header.secret_env.as_deref());
            if direct.is_none() && variable.is_none() {
                return Err(SettingsError::new(format!(
                    "{location} has no value; set `secret_env` to the name of a variable, or `value`"
                )));
            }
            let from = (environment, secrets);
            // Missing only for commands that call no tool.
            if let Some(value) = resolve_secret(&location, "secret", direct, variable, from)? {
                let value = format!("{}{}", header.prefix, value.expose_secret());
                let value = SecretString::from(value);
                config.headers.push(HttpToolHeader { name: header.name, value });
            }
        }
        config.idempotency_header = self.idempotency_header;
        config.lookup_url = self.lookup_url;
        config.allowed_hosts = self.allowed_hosts;
        if let Some(bytes) = self.response_bytes_max {
            config.response_bytes_max = bytes;
        }
        HttpTool::new(config).map_err(|problem| SettingsError::new(format!("[[tool]] {problem}")))
    }
}

/// Validates all sections.
pub(super) fn check_all(
    raw: Vec<RawTool>,
    environment: &[(String, String)],
    secrets: SecretsPolicy,
    integrations: &[&str],
) -> Result<Vec<Arc<dyn Tool>>, SettingsError> {
    let tools = raw.into_iter().map(|one| {
        let tool = one.check(environment, secrets, integrations)?;
        Ok(Arc::new(tool) as Arc<dyn Tool>)
    });
    let tools = tools.collect::<Result<Vec<_>, _>>()?;
    Toolbox::new(tools.clone())
        .map_err(|problem| SettingsError::new(format!("[[tool]] {problem}")))?;
    Ok(tools)
}
