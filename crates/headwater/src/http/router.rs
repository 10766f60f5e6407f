//! Every route of the server, and the layers it stands behind.
//!
//! Upstream: `run`. Downstream: the modules, each with its own `routes()`.
//! Promises: everything stands behind the limits of time and rate; everything but health and webhooks (which are signed) stands
//! behind access. What no route has is 404 in the shape of every refusal. Every route is described at `/openapi.json`: it is
//! added with its description or not at all.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::IntoResponse;
use axum::{Extension, Router};
use bytes::Bytes;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::analytics::Analytics;
use crate::api::analytics;
use crate::api::issues;
use crate::api::status_page;
use crate::api::tickets;
use crate::api::{self, Operations};
use crate::http::audit;
use crate::http::auth;
use crate::http::openapi;
use crate::http::rate_limit;
use crate::http::timeouts;
use crate::http::{ApiError, NOTHING_HERE};
use crate::inbound::webhooks;
use crate::server::app_state::App;
use crate::server::health;

/// The routes below `/api/v1`.
pub(crate) fn api(operations: Operations) -> OpenApiRouter<App> {
    let routes = issues::routes().merge(tickets::routes()).merge(audit::routes());
    routes.merge(api::routes_of_app()).merge(api::routes().with_state(operations))
}

/// All routes of `serve`.
pub(crate) fn serve(app: &App, operations: Operations, analytics: Analytics) -> Router {
    let api = api(operations).merge(analytics::routes().with_state(analytics));
    let guarded = OpenApiRouter::new().nest("/api/v1", api).merge(status_page::routes());
    let guarded = guarded.routes(routes!(metrics)).routes(routes!(openapi));
    // Webhooks check their callers themselves, by signatures.
    let open = health::routes().merge(webhooks::routes());
    let (guarded, mut described) = guarded.split_for_parts();
    let (open, open_described) = open.split_for_parts();
    described.merge(open_described);
    let described = Description(Bytes::from(openapi::complete(described)).into());
    // The outer layer is the last: first who it is, then the entry in the audit log, then the change.
    let guarded = guarded
        .layer(Extension(described))
        .layer(from_fn_with_state(Arc::clone(&app.audit), audit::record))
        .layer(from_fn_with_state(app.clone(), auth::require));
    finish(open.merge(guarded), app)
}

/// What a worker answers: health and metrics.
pub(crate) fn worker(app: &App) -> Router {
    let guarded = Router::from(OpenApiRouter::new().routes(routes!(metrics)));
    let guarded = guarded.layer(from_fn_with_state(app.clone(), auth::require));
    finish(Router::from(health::routes()).merge(guarded), app)
}

fn finish(routes: Router<App>, app: &App) -> Router {
    routes
        .fallback(|| async { ApiError::not_found(NOTHING_HERE) })
        .method_not_allowed_fallback(|| async {
            let message = "this address does not know this method";
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
        })
        .layer(from_fn_with_state(app.clone(), rate_limit::limit))
        .layer(from_fn_with_state(app.clone(), timeouts::limit))
        .with_state(app.clone())
}

/// Metrics for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "health", responses((status = 200, content_type = "text/plain", body = String)))]
async fn metrics(State(app): State<App>) -> impl IntoResponse {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, app.metrics.render())
}

/// The description of all routes, made once.
#[derive(Clone)]
struct Description(Arc<Bytes>);

/// This description.
#[utoipa::path(get, path = "/openapi.json", tag = "health",
    responses((status = 200, description = "OpenAPI 3.1", body = serde_json::Value)))]
async fn openapi(Extension(description): Extension<Description>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], Bytes::clone(&description.0))
}
