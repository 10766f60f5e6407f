//! What the answer of another server means for a delivery.
//!
//! Upstream: the deliverers. Promises: 4xx is for good, but 408, 425 and 429 are not, nor a 403 that speaks of a rate limit;
//! 5xx and the network may mend themselves. What is said of a failure holds no address and no token.

use std::time::Duration;

use headwater_issue::DeliverError;
use reqwest::{RequestBuilder, Response, StatusCode};

use crate::client;
use crate::limits::ERROR_BODY_BYTES_MAX;
use crate::text;

/// How long one request may take; shorter than a delivery, so that looking first and posting then both fit.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(12);

/// Sends a request, and returns its answer if it is a good one.
pub(super) async fn send(request: RequestBuilder) -> Result<Response, DeliverError> {
    let sent = request.timeout(REQUEST_TIMEOUT).send().await;
    let response = sent.map_err(|error| DeliverError::Retry(client::describe(&error)))?;
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let is_limited = is_rate_limited(&response);
    let said = client::read_beginning(response, ERROR_BODY_BYTES_MAX).await;
    let said = text::one_line(&String::from_utf8_lossy(&said), 300);
    let problem = format!("it answered {status}: {said}");
    Err(if is_limited || may_pass(status) {
        DeliverError::Retry(problem)
    } else {
        DeliverError::Dead(problem)
    })
}

fn may_pass(status: StatusCode) -> bool {
    status.is_server_error()
        || matches!(
            status,
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS
        )
}

/// GitHub says 403 where others say 429.
fn is_rate_limited(response: &Response) -> bool {
    let headers = response.headers();
    response.status() == StatusCode::FORBIDDEN
        && (headers.contains_key("retry-after")
            || headers.get("x-ratelimit-remaining").is_some_and(|left| left == "0"))
}
