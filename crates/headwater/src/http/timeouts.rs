//! The outermost middleware: timeout, panic handling and metrics of every request.
//!
//! Upstream: `server.rs`. Downstream: `rate_limit.rs`. Guarantees: a response begins within `http.request_timeout`,
//! except for imports and forks, and earlier if the database is down; requests are counted by route, not by path,
//! which clients can choose freely.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use metrics::{counter, histogram};
use tokio::time::{Instant, timeout};
use tracing::{Instrument, debug, error, field, info_span};

use crate::http::ApiError;
use crate::http::client_address::client_of;
use crate::server::app_state::HttpServer;
use crate::telemetry::continue_trace;

/// Requests. Labels: route, method, status.
pub(crate) const REQUESTS: &str = "headwater_http_requests_total";
/// Seconds until an answer began. Labels: route.
pub(crate) const DURATION: &str = "headwater_http_duration_seconds";

/// Routes without a timeout: their duration depends on the amount of data. Their waits have separate limits.
const WITHOUT_TIMEOUT: [&str; 2] =
    ["/api/v1/sessions/{session}/fork", "/api/v1/sessions/{session}/import"];

/// Routes that cannot respond without the database.
const NEED_DATABASE: [&str; 5] =
    ["/webhooks/", "/api/v1/tickets", "/api/v1/issues", "/api/v1/outbox", "/api/v1/audit"];

/// Whether a route or path of the API cannot respond without the database.
pub(super) fn needs_database(route: &str) -> bool {
    NEED_DATABASE.iter().any(|begin| route.starts_with(begin))
}

/// Middleware: timeout, panics, metrics and common response headers.
pub(crate) async fn apply(
    State(server): State<HttpServer>,
    mut request: Request,
    next: Next,
) -> Response {
    let started = Instant::now();
    let route = request.extensions().get::<MatchedPath>().map_or("none", |path| path.as_str());
    let (route, method) = (route.to_owned(), request.method().clone());

    // Held until the response begins; by then the decoded body is dropped.
    let memory = server.body_budget.for_request(client_of(&request));
    request.extensions_mut().insert(Arc::clone(&memory));

    let span = info_span!("request", route, %method, status = field::Empty);
    continue_trace(&span, request.headers());
    let answering = AssertUnwindSafe(next.run(request).instrument(span.clone())).catch_unwind();
    let limit = server.app.settings.http.request_timeout;
    let limit = if WITHOUT_TIMEOUT.contains(&route.as_str()) { Duration::MAX } else { limit };
    let unavailable = async {
        match needs_database(&route) {
            true => server.database.wait_unavailable().await,
            false => std::future::pending().await,
        }
    };
    let answered = tokio::select! {
        biased;
        answered = timeout(limit, answering) => answered,
        () = unavailable => Ok(Ok(ApiError::unavailable("database refuses connections; try again later").into_response())),
    };
    let mut response = match answered {
        Ok(Ok(response)) => response,
        Ok(Err(_)) => {
            error!(route, "request panicked");
            ApiError::internal().into_response()
        }
        Err(_) => ApiError::unavailable("request timed out; try again").into_response(),
    };

    drop(memory);

    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    let (status, took) = (response.status(), started.elapsed());
    span.record("status", status.as_u16());
    debug!(route, %method, status = status.as_u16(), elapsed_ms = took.as_millis(), "request completed");
    let method = if method.as_str().len() <= 7 { method.to_string() } else { "other".to_owned() };
    let status = status.as_u16().to_string();
    counter!(REQUESTS, "route" => route.clone(), "method" => method, "status" => status)
        .increment(1);
    histogram!(DURATION, "route" => route).record(took);
    response
}
