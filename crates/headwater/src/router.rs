//! Every route of the server, and the layers it stands behind.
//!
//! Upstream: `run`. Downstream: the modules, each with its own `routes()`.
//! Promises: everything stands behind the limits of time and rate; everything but health and webhooks (which are signed) stands
//! behind access. What no route has is 404 in the shape of every refusal.

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::IntoResponse;
use axum::routing::get;

use crate::admin::{self, Operations};
use crate::app::App;
use crate::http::{ApiError, access, limits, rate};
use crate::{audit, health, issues, page, ticket_routes, webhooks};

/// All routes of `serve`.
pub(crate) fn serve(app: &App, operations: Operations) -> Router {
    let api = issues::routes().merge(ticket_routes::routes()).merge(audit::routes());
    let api = api.merge(admin::routes(operations));
    let guarded = Router::new().nest("/api/v1", api).merge(metrics_routes()).merge(page::routes());
    // The outer layer is the last: first who it is, then the entry in the audit log, then the change.
    let guarded = guarded
        .layer(from_fn_with_state(app.clone(), audit::record))
        .layer(from_fn_with_state(app.clone(), access::require));
    // Webhooks check their callers themselves, by signatures.
    let open = health::routes().merge(webhooks::routes());
    finish(open.merge(guarded), app)
}

/// What a worker answers: health and metrics.
pub(crate) fn worker(app: &App) -> Router {
    let guarded = metrics_routes().layer(from_fn_with_state(app.clone(), access::require));
    finish(health::routes().merge(guarded), app)
}

fn finish(routes: Router<App>, app: &App) -> Router {
    routes
        .fallback(|| async { ApiError::not_found("there is nothing at this address") })
        .method_not_allowed_fallback(|| async {
            let message = "this address does not know this method";
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
        })
        .layer(from_fn_with_state(app.clone(), rate::limit))
        .layer(from_fn_with_state(app.clone(), limits::limit))
        .with_state(app.clone())
}

fn metrics_routes() -> Router<App> {
    Router::new().route("/metrics", get(metrics))
}

async fn metrics(State(app): State<App>) -> impl IntoResponse {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, app.metrics.render())
}
