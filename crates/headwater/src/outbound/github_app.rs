//! Installation tokens of a GitHub App: short-lived tokens instead of a personal one.
//!
//! Upstream: `outbound` asks for the token of the installation that an issue belongs to. Downstream: the API of GitHub.
//! Guarantees: a token is used until shortly before it expires; of several deliveries that need a new one, one asks for it and the
//! others wait for its result. The private key and tokens are never printed. A key that GitHub rejects concerns the integration: its
//! replies are held (decision 47). An installation that is gone concerns the replies to its repositories only.
//! Limit: `INSTALLATIONS_MAX` cached tokens.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use headwater_issue::{DeliverError, OutboxRow, Store};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use reqwest::Client;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::json;
use tokio_rustls::rustls::SignatureScheme;
use tokio_rustls::rustls::crypto::ring::sign::any_supported_type;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::sign::SigningKey;

use crate::desk::conversation::installation_for;
use crate::http_client;
use crate::limits::ERROR_BODY_BYTES_MAX;
use crate::outbound::http;

/// A token is replaced this long before it expires, so that it does not expire during a delivery.
const RENEW_BEFORE: Duration = Duration::from_secs(5 * 60);

/// How long the signed request for a token is valid; GitHub allows ten minutes.
const JWT_LIFETIME: Duration = Duration::from_secs(9 * 60);

/// How far the clock of GitHub may be behind.
const CLOCK_DIFFERENCE: Duration = Duration::from_secs(60);

/// Maximum installations whose tokens are cached; over it, all are forgotten and asked for again.
const INSTALLATIONS_MAX: usize = 1000;

/// A GitHub App that posts replies.
pub struct GithubApp {
    app_id: String,
    key: Arc<dyn SigningKey>,
    /// The installation of all replies; `None`: the one that sent the webhook.
    installation: Option<u64>,
    tokens: Mutex<HashMap<u64, Arc<InstallationToken>>>,
}

/// The token of one installation. The lock is held while a new one is asked for, so that one caller asks and the others wait.
type InstallationToken = tokio::sync::Mutex<Option<CachedToken>>;

#[derive(Clone)]
struct CachedToken {
    token: SecretString,
    expires_at: Timestamp,
}

impl std::fmt::Debug for GithubApp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GithubApp").field("app_id", &self.app_id).finish_non_exhaustive()
    }
}

/// The answer of GitHub.
#[derive(Deserialize)]
struct NewToken {
    token: String,
    expires_at: String,
}

impl GithubApp {
    /// An app with this private key in PEM format (RSA). Fails if the key is not one.
    pub fn new(
        app_id: impl Into<String>,
        private_key: &SecretString,
        installation: Option<u64>,
    ) -> Result<Self, String> {
        let not_a_key = "the private key of the GitHub App is not an RSA key in PEM format";
        let der = PrivateKeyDer::from_pem_slice(private_key.expose_secret().as_bytes());
        let der = der.map_err(|_| not_a_key.to_owned())?;
        let key = any_supported_type(&der).map_err(|_| not_a_key.to_owned())?;
        let app = Self { app_id: app_id.into(), key, installation, tokens: Mutex::default() };
        // Says now whether the key can sign, not with the first reply.
        app.jwt(SystemClock.now()).map(|_| app).ok_or_else(|| not_a_key.to_owned())
    }

    /// The installation that a reply belongs to.
    pub(super) async fn installation(
        &self,
        store: &dyn Store,
        row: &OutboxRow,
    ) -> Result<u64, DeliverError> {
        if let Some(installation) = self.installation {
            return Ok(installation);
        }
        let unavailable =
            |error: headwater_issue::IssueError| DeliverError::Unavailable(error.to_string());
        let newest = store.newest_event_log_at_commit(row.id).await.map_err(unavailable)?;
        let event = match newest {
            Some(id) => store.event_log(id).await.map_err(unavailable)?,
            None => None,
        };
        let issue = store.issue(row.issue_id).await.map_err(unavailable)?;
        installation_for(event.as_ref(), issue.as_ref()).ok_or_else(|| {
            let problem = "the webhook names no installation of the GitHub App; let the App send the webhooks, or set \
                           `installation_id` of the integration";
            DeliverError::Denied(problem.to_owned())
        })
    }

    /// A token of this installation: the cached one, or a new one if it expires soon or is `rejected`.
    pub(super) async fn token(
        &self,
        client: &Client,
        base_url: &str,
        installation: u64,
        rejected: Option<&SecretString>,
    ) -> Result<SecretString, DeliverError> {
        let slot = {
            let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
            if tokens.len() >= INSTALLATIONS_MAX && !tokens.contains_key(&installation) {
                tokens.clear();
            }
            Arc::clone(tokens.entry(installation).or_default())
        };
        let mut cached = slot.lock().await;
        let now = SystemClock.now();
        let is_usable = |one: &&CachedToken| {
            let is_rejected = rejected
                .is_some_and(|rejected| rejected.expose_secret() == one.token.expose_secret());
            now.after(RENEW_BEFORE) < one.expires_at && !is_rejected
        };
        if let Some(one) = cached.as_ref().filter(is_usable) {
            return Ok(one.token.clone());
        }
        let new = self.renew(client, base_url, installation, now).await?;
        let token = new.token.clone();
        *cached = Some(new);
        Ok(token)
    }

    async fn renew(
        &self,
        client: &Client,
        base_url: &str,
        installation: u64,
        now: Timestamp,
    ) -> Result<CachedToken, DeliverError> {
        let jwt = self.jwt(now).ok_or_else(|| {
            DeliverError::Held("signing with the private key of the GitHub App failed".to_owned())
        })?;
        let base = base_url.trim_end_matches('/');
        let request = client
            .post(format!("{base}/app/installations/{installation}/access_tokens"))
            .bearer_auth(jwt)
            .header("accept", "application/vnd.github+json")
            .header("x-github-api-version", "2022-11-28");
        let about = |problem| {
            format!(
                "no token for installation {installation} of GitHub App {}: {problem}",
                self.app_id
            )
        };
        let response = http::send(client, request).await.map_err(|error| match error {
            // Not permanent: the reply waits until the installation exists again.
            DeliverError::Dead(problem) | DeliverError::Denied(problem) => {
                DeliverError::Denied(about(problem))
            }
            DeliverError::Held(problem) => DeliverError::Held(about(problem)),
            DeliverError::Retry(problem) => DeliverError::Retry(about(problem)),
            other => other,
        })?;
        let body = http_client::read_limited(response, ERROR_BODY_BYTES_MAX).await;
        let body = body.map_err(|problem| DeliverError::Retry(about(problem)))?;
        let invalid = || DeliverError::Retry(about("invalid response".to_owned()));
        let new: NewToken = serde_json::from_slice(&body).map_err(|_| invalid())?;
        let expires_at = Timestamp::from_rfc3339(&new.expires_at).ok_or_else(invalid)?;
        Ok(CachedToken { token: new.token.into(), expires_at })
    }

    /// A signed request in the name of the app (JWT, RS256); `None` if the key cannot sign.
    fn jwt(&self, now: Timestamp) -> Option<String> {
        let seconds = |time: Timestamp| time.as_millis() / 1000;
        let claims = json!({
            "iat": seconds(now.before(CLOCK_DIFFERENCE)),
            "exp": seconds(now.after(JWT_LIFETIME)),
            "iss": self.app_id,
        });
        let header = URL_SAFE_NO_PAD.encode(json!({"alg": "RS256", "typ": "JWT"}).to_string());
        let signed = format!("{header}.{}", URL_SAFE_NO_PAD.encode(claims.to_string()));
        let signer = self.key.choose_scheme(&[SignatureScheme::RSA_PKCS1_SHA256])?;
        let signature = signer.sign(signed.as_bytes()).ok()?;
        Some(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }
}
