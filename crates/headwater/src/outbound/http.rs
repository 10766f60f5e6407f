//! Sends a request and classifies the response for a delivery.
//!
//! Upstream: the deliverers. Guarantees: 4xx is permanent, except 408, 425, 429 and a 403 caused by a rate limit; 5xx
//! and network errors are retried. 401 and a redirect to another host concern the integration: its replies are held
//! until an operator has fixed its token or address. 403 may concern one project or one text: only this reply waits. `Retry-After` and the rate limits of GitHub and GitLab are honoured. Redirects are
//! followed with the same method and body, on the same host only, so that credentials are not sent elsewhere. Error
//! messages contain no address and no token.

use std::time::{Duration, SystemTime};

use headwater_issue::DeliverError;
use headwater_issue::limits::DELIVERY_PAUSE_MAX;
use reqwest::header::{DATE, HeaderMap, LOCATION, RETRY_AFTER};
use reqwest::{Client, RequestBuilder, Response, StatusCode, Url};

use crate::http_client;
use crate::limits::ERROR_BODY_BYTES_MAX;
use crate::text;

/// Timeout of one request. Shorter than a delivery, so that a search and a post both fit.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(12);

/// Maximum redirects per request.
const REDIRECTS_MAX: usize = 5;

/// Pause after GitHub's secondary rate limit without `Retry-After`.
const SECONDARY_LIMIT_PAUSE: Duration = Duration::from_secs(60);

/// Sends a request, follows redirects, and returns the response if it is a success.
pub(crate) async fn send(
    client: &Client,
    request: RequestBuilder,
) -> Result<Response, DeliverError> {
    check_status(exchange(client, request).await?).await
}

/// Sends a request, follows redirects, and returns the response, whatever its status.
pub(super) async fn exchange(
    client: &Client,
    request: RequestBuilder,
) -> Result<Response, DeliverError> {
    let retry = |error: reqwest::Error| DeliverError::Retry(http_client::describe(&error));
    let mut request = request.timeout(REQUEST_TIMEOUT).build().map_err(retry)?;
    let configured = request.url().clone();
    for _ in 0..=REDIRECTS_MAX {
        let repeated = request.try_clone();
        let response = client.execute(request).await.map_err(retry)?;
        if !is_redirect(response.status()) {
            return Ok(response);
        }
        let (Some(next), Some(mut repeated)) = (redirect(&response, &configured), repeated) else {
            return Err(refused_redirect(response.status()));
        };
        *repeated.url_mut() = next;
        request = repeated;
    }
    Err(DeliverError::Retry(format!("more than {REDIRECTS_MAX} redirects")))
}

/// Redirects that repeat the request unchanged. A 303 does not.
fn is_redirect(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::MOVED_PERMANENTLY
            | StatusCode::FOUND
            | StatusCode::TEMPORARY_REDIRECT
            | StatusCode::PERMANENT_REDIRECT
    )
}

/// The target of a redirect, if it is on the configured host.
fn redirect(response: &Response, configured: &Url) -> Option<Url> {
    let location = response.headers().get(LOCATION)?.to_str().ok()?;
    let next = response.url().join(location).ok()?;
    is_same_host(configured, &next).then_some(next)
}

/// The same scheme, host and port, or an upgrade from HTTP to HTTPS on the default ports.
fn is_same_host(configured: &Url, next: &Url) -> bool {
    let is_upgrade = (configured.scheme(), next.scheme()) == ("http", "https")
        && configured.port().is_none()
        && next.port().is_none();
    let has_no_login = next.username().is_empty() && next.password().is_none();
    let is_same = configured.scheme() == next.scheme()
        && configured.port_or_known_default() == next.port_or_known_default();
    configured.host_str() == next.host_str() && (is_same || is_upgrade) && has_no_login
}

fn refused_redirect(status: StatusCode) -> DeliverError {
    DeliverError::Held(format!(
        "response {status} redirects to another host, which is not followed; set `base_url` of the \
         integration, or `url` of the notification, to the new address"
    ))
}

/// The response if it is a success, or what its status means for the delivery.
pub(super) async fn check_status(response: Response) -> Result<Response, DeliverError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let (is_retryable, pause) =
        (is_retryable(&response), retry_after(response.headers(), SystemTime::now()));
    let body = http_client::read_prefix(response, ERROR_BODY_BYTES_MAX).await;
    let body = text::one_line(&String::from_utf8_lossy(&body), 300);
    let is_forbidden = matches!(status, StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS);
    let is_secondary = is_forbidden && body.to_ascii_lowercase().contains("secondary rate limit");
    let problem = format!("response {status}: {body}");
    Err(match (is_retryable || is_secondary, pause) {
        (true, Some(after)) => DeliverError::Paused { problem, after },
        (true, None) if is_secondary => {
            DeliverError::Paused { problem, after: SECONDARY_LIMIT_PAUSE }
        }
        (true, None) => DeliverError::Retry(problem),
        (false, _) if status == StatusCode::UNAUTHORIZED => DeliverError::Held(problem),
        (false, _) if status == StatusCode::FORBIDDEN && !is_closed(&body) => {
            DeliverError::Denied(problem)
        }
        (false, _) => DeliverError::Dead(problem),
    })
}

/// Whether a 403 is permanent: GitHub sends it for a locked issue and an archived repository.
fn is_closed(body: &str) -> bool {
    let body = body.to_ascii_lowercase();
    ["is locked", "archived"].iter().any(|word| body.contains(word))
}

fn is_retryable(response: &Response) -> bool {
    let status = response.status();
    let is_limited =
        response.headers().contains_key(RETRY_AFTER) || is_rate_limit_exhausted(response.headers());
    match status {
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS => true,
        // GitHub sends 403 for rate limits.
        StatusCode::FORBIDDEN => is_limited,
        _ => status.is_server_error(),
    }
}

/// Rate limit headers of GitHub (`x-`) and GitLab.
const RATE_LIMITS: [(&str, &str); 2] =
    [("x-ratelimit-remaining", "x-ratelimit-reset"), ("ratelimit-remaining", "ratelimit-reset")];

fn is_rate_limit_exhausted(headers: &HeaderMap) -> bool {
    let is_zero = |name: &str| headers.get(name).is_some_and(|left| left == "0");
    RATE_LIMITS.iter().any(|(remaining, _)| is_zero(remaining))
}

/// How long to pause: `Retry-After` in seconds or as a date, or the reset time of an exhausted rate limit. Dates are
/// compared with the server's own `Date`, because its clock may differ. At most [`DELIVERY_PAUSE_MAX`].
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = |name: &str| headers.get(name)?.to_str().ok().map(str::trim);
    let seconds = |text: &str| {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        // A number that overflows is treated as the maximum.
        is_number.then(|| Duration::from_secs(text.parse().unwrap_or(u64::MAX)))
    };
    let date = |text: &str| httpdate::parse_http_date(text).ok();
    let now = text(DATE.as_str()).and_then(date).unwrap_or(now);
    let until = |time: SystemTime| time.duration_since(now).unwrap_or(Duration::ZERO);
    let reset = || {
        let used_up = |name: &str| text(name) == Some("0");
        let (_, reset) = RATE_LIMITS.iter().find(|(remaining, _)| used_up(remaining))?;
        let since_epoch = seconds(text(reset)?)?;
        Some(SystemTime::UNIX_EPOCH.checked_add(since_epoch).map_or(Duration::MAX, until))
    };
    let after = text(RETRY_AFTER.as_str());
    let after = after.and_then(|after| seconds(after).or_else(|| date(after).map(until)));
    after.or_else(reset).map(|pause| pause.min(DELIVERY_PAUSE_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pause_of(headers: &[(&'static str, &str)]) -> Option<u64> {
        let headers = headers.iter().map(|(name, value)| {
            (name.parse::<reqwest::header::HeaderName>().unwrap(), value.parse().unwrap())
        });
        // 2026-11-01T08:00:00Z.
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_793_520_000);
        retry_after(&headers.collect(), now).map(|pause| pause.as_secs())
    }

    #[test]
    fn every_form_of_retry_after_is_parsed_and_bounded() {
        for (headers, expected) in [
            (&[("retry-after", "120")][..], Some(120)),
            (&[("retry-after", " 0 ")], Some(0)),
            (&[("retry-after", "99999999999999999999999")], Some(3600)),
            (&[("retry-after", "Sun, 01 Nov 2026 08:01:30 GMT")], Some(90)),
            (&[("retry-after", "Sunday, 01-Nov-26 08:01:30 GMT")], Some(90)),
            (&[("retry-after", "Sun, 01 Nov 2026 07:00:00 GMT")], Some(0)),
            (&[("retry-after", "Fri, 31 Dec 9999 23:59:59 GMT")], Some(3600)),
            // The server's clock is an hour behind the local one.
            (
                &[
                    ("retry-after", "Sun, 01 Nov 2026 07:01:30 GMT"),
                    ("date", "Sun, 01 Nov 2026 07:00:00 GMT"),
                ],
                Some(90),
            ),
            (&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1793520045")], Some(45)),
            (&[("ratelimit-remaining", "0"), ("ratelimit-reset", "1793520045")], Some(45)),
            (&[("x-ratelimit-remaining", "7"), ("x-ratelimit-reset", "1793520045")], None),
            (
                &[
                    ("retry-after", "5"),
                    ("x-ratelimit-remaining", "0"),
                    ("x-ratelimit-reset", "1793520045"),
                ],
                Some(5),
            ),
            (&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "soon")], None),
            (&[("retry-after", "-5")], None),
            (&[("retry-after", "soon")], None),
            (&[], None),
        ] {
            assert_eq!(pause_of(headers), expected, "{headers:?}");
        }
    }

    #[test]
    fn a_locked_issue_is_closed_and_a_missing_permission_is_not() {
        assert!(is_closed("Unable to create comment because issue is locked."));
        assert!(is_closed("Repository was archived so is read-only."));
        assert!(!is_closed("Resource not accessible by personal access token"));
    }

    #[test]
    fn redirects_stay_on_the_configured_host() {
        let is_followed = |from: &str, to: &str| {
            let from: Url = from.parse().unwrap();
            is_same_host(&from, &from.join(to).unwrap())
        };
        for (from, to, expected) in [
            ("https://a.example/x", "/y?z", true),
            ("https://a.example/x", "https://a.example:443/y", true),
            ("https://a.example/x", "https://b.example/y", false),
            ("https://a.example/x", "//b.example/y", false),
            ("https://a.example/x", "http://a.example/y", false),
            ("https://a.example/x", "https://a.example:8443/y", false),
            ("https://a.example/x", "https://u:p@a.example/y", false),
            ("https://a.example/x", "https://a.example@b.example/y", false),
            ("https://a.example/x", "https://a.example.b.example/y", false),
            ("http://a.example/x", "https://a.example/y", true),
            ("http://a.example:8080/x", "https://a.example/y", false),
        ] {
            assert_eq!(is_followed(from, to), expected, "{from} to {to}");
        }
    }
}
