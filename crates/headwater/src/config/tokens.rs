//! The `[[token]]` sections of the settings file.
//!
//! Upstream: `integrations.rs`. Downstream: `http/auth.rs`. Guarantees: a token is long enough and never shown.

use std::sync::Arc;

use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::config::error::SettingsError;
use crate::config::integrations::{SecretText, SecretsPolicy, check_name, resolve_secret};

/// Minimum length of a token; shorter ones can be guessed.
const TOKEN_CHARS_MIN: usize = 16;

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

/// One `[[token]]`.
#[derive(Clone, Debug)]
pub(crate) struct TokenSettings {
    /// Name of the principal, as in the audit log.
    pub(crate) name: String,
    /// Its role.
    pub(crate) role: Role,
    /// The token.
    pub(crate) token: SecretString,
    /// The integrations that it is limited to; `None`: all.
    pub(crate) integrations: Option<Arc<[String]>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawToken {
    name: String,
    role: Role,
    token: Option<SecretText>,
    pub(super) token_env: Option<String>,
    integrations: Option<Vec<String>>,
}

impl RawToken {
    pub(super) fn check(
        self,
        environment: &[(String, String)],
    ) -> Result<TokenSettings, SettingsError> {
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
        if self.integrations.as_ref().is_some_and(Vec::is_empty) {
            return Err(SettingsError::new(format!(
                "{location} has empty `integrations`; name at least one, or remove it to allow all"
            )));
        }
        let integrations = self.integrations.map(Arc::from);
        Ok(TokenSettings { name, role: self.role, token, integrations })
    }
}
