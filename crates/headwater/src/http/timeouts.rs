//! The outermost layer: how long a request may take, and how long it took.
//!
//! Upstream: `server`. Downstream: `rate`. Promises: an answer begins within `http.request_timeout`, but that of an import or
//! a fork, of which nobody knows how long it is, and sooner when nobody listens where the database should be; every request is
//! counted by its route, never by its path, which anybody can make up.

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
use crate::server::app_state::App;
use crate::telemetry::continue_trace;

/// Requests. Labels: route, method, status.
pub(crate) const REQUESTS: &str = "headwater_http_requests_total";
/// Seconds until an answer began. Labels: route.
pub(crate) const DURATION: &str = "headwater_http_duration_seconds";

/// Routes that take as long as what they copy is long. What they wait for has limits of its own.
const AS_LONG_AS_IT_TAKES: [&str; 2] =
    ["/api/v1/sessions/{session}/fork", "/api/v1/sessions/{session}/import"];

/// Routes that nothing can be said to without the database.
const NEED_THE_DATABASE: [&str; 5] =
    ["/webhooks/", "/api/v1/tickets", "/api/v1/issues", "/api/v1/outbox", "/api/v1/audit"];

/// A layer: time limit, panics, measuring, and headers that every answer has.
pub(crate) async fn limit(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let route = request.extensions().get::<MatchedPath>().map_or("none", |path| path.as_str());
    let (route, method) = (route.to_owned(), request.method().clone());

    // Held until the answer begins: what was made of the body is gone by then.
    let memory = app.body_budget.of_request(app.rate.client(&request));
    request.extensions_mut().insert(Arc::clone(&memory));

    let span = info_span!("request", route, %method, status = field::Empty);
    continue_trace(&span, request.headers());
    let answering = AssertUnwindSafe(next.run(request).instrument(span.clone())).catch_unwind();
    let limit = app.settings.http.request_timeout;
    let limit = if AS_LONG_AS_IT_TAKES.contains(&route.as_str()) { Duration::MAX } else { limit };
    let away = async {
        match NEED_THE_DATABASE.iter().any(|begin| route.starts_with(begin)) {
            true => app.database.away().await,
            false => std::future::pending().await,
        }
    };
    let answered = tokio::select! {
        biased;
        answered = timeout(limit, answering) => answered,
        () = away => Ok(Ok(ApiError::unavailable("the database cannot be reached; try again").into_response())),
    };
    let mut response = match answered {
        Ok(Ok(response)) => response,
        Ok(Err(_)) => {
            error!(route, "a request panicked");
            ApiError::internal().into_response()
        }
        Err(_) => ApiError::unavailable("the request took too long; try again").into_response(),
    };

    drop(memory);

    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    let (status, took) = (response.status(), started.elapsed());
    span.record("status", status.as_u16());
    debug!(route, %method, status = status.as_u16(), elapsed_ms = took.as_millis(), "request");
    let method = if method.as_str().len() <= 7 { method.to_string() } else { "other".to_owned() };
    let status = status.as_u16().to_string();
    counter!(REQUESTS, "route" => route.clone(), "method" => method, "status" => status)
        .increment(1);
    histogram!(DURATION, "route" => route).record(took);
    response
}
