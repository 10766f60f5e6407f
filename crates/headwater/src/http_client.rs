//! The one HTTP client: how everything here talks to servers of others.
//!
//! Upstream: `desk` (models) and `replies`. Promises: no redirect is followed, since it would carry keys elsewhere; a body
//! is read up to a limit; errors name what went wrong without the address, which may hold a secret.

use std::sync::Once;
use std::time::Duration;

use reqwest::{Client, Response, redirect};

use crate::text::with_causes;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

static PROVIDER: Once = Once::new();

/// One TLS stack for everything.
pub(crate) fn choose_tls() {
    PROVIDER.call_once(|| {
        // Somebody may have installed one before: theirs serves as well.
        let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    });
}

/// A client with TLS by rustls and ring, and the roots of the system.
pub(crate) fn build() -> Result<Client, String> {
    choose_tls();
    Client::builder()
        .redirect(redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .user_agent(concat!("headwater/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| format!("there is no HTTP client: {}", describe(&error)))
}

/// What went wrong, with its causes, without the address.
pub(crate) fn describe(error: &reqwest::Error) -> String {
    let kind = if error.is_timeout() {
        "no answer in time"
    } else if error.is_connect() {
        "no connection"
    } else if error.is_body() || error.is_decode() {
        "the answer broke off"
    } else {
        "the request failed"
    };
    // Its own text names the address.
    match std::error::Error::source(error) {
        None => kind.to_owned(),
        Some(cause) => format!("{kind}: {}", with_causes(cause)),
    }
}

/// The beginning of a body, for people; whatever comes of the rest.
pub(crate) async fn read_beginning(mut response: Response, limit: usize) -> Vec<u8> {
    let mut body = Vec::new();
    while body.len() < limit
        && let Ok(Some(chunk)) = response.chunk().await
    {
        body.extend_from_slice(&chunk);
    }
    body.truncate(limit);
    body
}

/// Reads a body; one that is longer than `limit` is an error.
pub(crate) async fn read_limited(mut response: Response, limit: usize) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| describe(&error))? {
        if body.len() + chunk.len() > limit {
            return Err(format!("the answer is longer than {limit} bytes"));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}
