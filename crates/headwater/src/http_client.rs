//! The HTTP client for calls to other servers.
//!
//! Upstream: `desk` (models), `outbound` and `telemetry`. Guarantees: redirects are not followed, because they would
//! forward credentials; a body is read up to a limit; errors do not contain the URL, which may hold a secret.

use std::sync::Once;
use std::time::Duration;

use reqwest::{Client, Response, redirect};

use crate::text::with_causes;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

static PROVIDER: Once = Once::new();

/// Installs the process-wide TLS provider (ring). Idempotent.
pub(crate) fn install_tls_provider() {
    PROVIDER.call_once(|| {
        // The caller's program may have installed another provider; that one is kept.
        let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    });
}

/// Builds a client with rustls, ring and the system's root certificates.
pub(crate) fn build() -> Result<Client, String> {
    install_tls_provider();
    Client::builder()
        .redirect(redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .user_agent(concat!("headwater/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| format!("failed to build the HTTP client: {}", describe(&error)))
}

/// Describes the error with its causes, without the URL.
pub(crate) fn describe(error: &reqwest::Error) -> String {
    let kind = if error.is_timeout() {
        "request timed out"
    } else if error.is_connect() {
        "connection failed"
    } else if error.is_body() || error.is_decode() {
        "response ended early"
    } else {
        "request failed"
    };
    // `reqwest::Error` itself prints the URL, so only its causes are used.
    match std::error::Error::source(error) {
        None => kind.to_owned(),
        Some(cause) => format!("{kind}: {}", with_causes(cause)),
    }
}

/// Reads at most `limit` bytes of a body, for error messages. A read error ends it early.
pub(crate) async fn read_prefix(mut response: Response, limit: usize) -> Vec<u8> {
    let mut body = Vec::new();
    while body.len() < limit
        && let Ok(Some(chunk)) = response.chunk().await
    {
        body.extend_from_slice(&chunk);
    }
    body.truncate(limit);
    body
}

/// Reads a whole body. Fails if it is longer than `limit` bytes.
pub(crate) async fn read_limited(mut response: Response, limit: usize) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| describe(&error))? {
        if body.len() + chunk.len() > limit {
            return Err(format!("response is longer than {limit} bytes"));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}
