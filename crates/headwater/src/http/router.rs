//! Composes all routes and their middleware.
//!
//! Upstream: `server/run.rs`. Downstream: the route modules. Guarantees: all routes have timeouts and rate limits; all
//! except health, webhooks and links to drafts (which are signed) require authentication. Unknown paths give 404 as an [`ApiError`].
//! Every route is described in `/openapi.json`, except pages for people: the console, and those of links to drafts.

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, State};
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
use crate::api::tickets;
use crate::api::{self, Operations};
use crate::http::audit;
use crate::http::auth;
use crate::http::console;
use crate::http::draft_pages;
use crate::http::openapi;
use crate::http::rate_limit;
use crate::http::timeouts;
use crate::http::{ApiError, NOT_FOUND_MESSAGE};
use crate::inbound::webhooks;
use crate::server::app_state::{App, HttpServer};
use crate::server::health;

/// Where the routes of an embedding program are.
pub(crate) const EXTENSION_PREFIX: &str = "/x";

/// Routes below `/api/v1`.
pub(crate) fn api(operations: Operations) -> OpenApiRouter<App> {
    let routes = issues::routes().merge(tickets::routes()).merge(audit::routes());
    let routes = routes.merge(api::console_routes(operations.clone()));
    routes.merge(api::app_routes()).merge(api::routes().with_state(operations))
}

/// Routes of `serve`.
pub(crate) fn serve(
    server: &HttpServer,
    operations: Operations,
    analytics: Analytics,
    extension: Option<Router>,
) -> Router {
    let api = api(operations).with_state(Arc::clone(&server.app));
    let api = api.merge(analytics::routes().with_state(analytics));
    let (api, api_described) = OpenApiRouter::new().nest("/api/v1", api).split_for_parts();
    let console = console::routes(server, api.clone());
    let guarded = OpenApiRouter::with_openapi(api_described).merge(api.into());
    let guarded = guarded.routes(routes!(metrics)).routes(routes!(openapi));
    // Webhooks authenticate by signature.
    let open = health::routes().merge(webhooks::routes());
    let (guarded, mut described) = guarded.split_for_parts();
    let (open, open_described) = open.split_for_parts();
    described.merge(open_described);
    let described = OpenApiDocument(Bytes::from(openapi::build_document(described)).into());
    let guarded = match extension {
        Some(routes) => {
            let limit = DefaultBodyLimit::max(server.app.settings.http.body_bytes_max);
            guarded.nest(EXTENSION_PREFIX, routes.layer(limit).with_state(()))
        }
        None => guarded,
    };
    // The last layer is the outermost: authenticate, write the audit entry, then run the route.
    let guarded = guarded
        .layer(Extension(described))
        .layer(from_fn_with_state(Arc::clone(&server.app.audit), audit::record))
        .layer(from_fn_with_state(server.clone(), auth::require_authentication));
    // Links to drafts authenticate by signature, too.
    finish(open.merge(guarded).merge(console).merge(draft_pages::routes()), server)
}

/// Routes of `worker`: health and metrics.
pub(crate) fn worker(server: &HttpServer) -> Router {
    let guarded = Router::from(OpenApiRouter::new().routes(routes!(metrics)));
    let guarded = guarded.layer(from_fn_with_state(server.clone(), auth::require_authentication));
    finish(Router::from(health::routes()).merge(guarded), server)
}

fn finish(routes: Router<HttpServer>, server: &HttpServer) -> Router {
    routes
        .fallback(|| async { ApiError::not_found(NOT_FOUND_MESSAGE) })
        .method_not_allowed_fallback(|| async {
            let message = "method not allowed for this path";
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
        })
        .layer(from_fn_with_state(server.clone(), rate_limit::apply))
        .layer(from_fn_with_state(server.clone(), timeouts::apply))
        .with_state(server.clone())
}

/// Prometheus metrics.
#[utoipa::path(get, path = "/metrics", tag = "health", responses((status = 200, content_type = "text/plain", body = String)))]
async fn metrics(State(server): State<HttpServer>) -> impl IntoResponse {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, server.metrics.render())
}

/// The OpenAPI document, built once.
#[derive(Clone)]
struct OpenApiDocument(Arc<Bytes>);

/// This OpenAPI document.
#[utoipa::path(get, path = "/openapi.json", tag = "health",
    responses((status = 200, description = "OpenAPI 3.1", body = serde_json::Value)))]
async fn openapi(Extension(description): Extension<OpenApiDocument>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], Bytes::clone(&description.0))
}
