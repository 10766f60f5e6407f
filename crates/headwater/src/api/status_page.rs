//! The status page at `/`: plain HTML without scripts.
//!
//! Upstream: `http/router.rs`. Guarantees: all text is escaped (`maud`); no external resources are loaded; if the
//! database is unavailable, the page says so.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse};
use headwater_issue::{Backlog, Issue, IssueFilter, ProcessingStatus, WorkerInfo};
use maud::{DOCTYPE, Markup, html};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::server::app_state::HttpServer;
use crate::server::health::ReadinessResponse;

/// Maximum issues shown in each table.
const SHOWN_MAX: usize = 20;

/// Refresh interval of the page in seconds.
const REFRESH_SECONDS: u32 = 5;

const STYLE: &str = "body{font-family:sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}\
    table{border-collapse:collapse;margin:.5rem 0 1.5rem}td,th{text-align:left;padding:.2rem .8rem .2rem 0;vertical-align:top}\
    th{border-bottom:1px solid #999}.bad{color:#a00;font-weight:bold}.good{color:#060}";

/// Content security policy: no scripts, no external resources.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Route `/`.
pub(crate) fn routes() -> OpenApiRouter<HttpServer> {
    OpenApiRouter::new().routes(routes!(page))
}

/// Show the status page.
#[utoipa::path(get, path = "/", tag = "health",
    responses((status = 200, content_type = "text/html", body = String), (status = 503, content_type = "text/html", body = String)))]
async fn page(State(server): State<HttpServer>) -> impl IntoResponse {
    let readiness = server.health.readiness(&server).await;
    let app = &server.app;
    let list = |status, quarantined| {
        let filter = IssueFilter { status, quarantined, ..IssueFilter::default() };
        let store = &app.store;
        async move { store.issues(&filter, SHOWN_MAX).await.unwrap_or_default() }
    };
    // Failed queries are left out; the checks above name the reason.
    let (backlog, workers, processing, queued, quarantined) = tokio::join!(
        app.store.backlog(),
        app.store.workers(),
        list(Some(ProcessingStatus::Processing), None),
        list(Some(ProcessingStatus::Queued), None),
        list(None, Some(true)),
    );
    let streams = app.streams.describe();
    let rendered = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="refresh" content=(REFRESH_SECONDS);
                title { "Headwater" }
                style { (STYLE) }
            }
            body {
                h1 { "Headwater" }
                p {
                    "Version " (env!("CARGO_PKG_VERSION")) ", streams: " (streams.kind) " ("
                    (streams.address) "), database: " (app.settings.database_shown()) "."
                }
                (checks(&readiness))
                @if let Ok(backlog) = &backlog { (numbers(backlog)) }
                @if let Ok(workers) = &workers { (table_of_workers(workers)) }
                (table_of_issues("Processing", &processing))
                (table_of_issues("Queued", &queued))
                (table_of_issues("Quarantined", &quarantined))
                p { "More: " code { "/api/v1/issues" } ", " code { "/health/ready" } ", " code { "/metrics" } "." }
            }
        }
    };
    let status =
        if readiness.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let headers =
        [(header::CONTENT_SECURITY_POLICY, POLICY), (header::REFERRER_POLICY, "no-referrer")];
    (status, headers, Html(rendered.into_string()))
}

fn checks(readiness: &ReadinessResponse) -> Markup {
    html! {
        h2 { @if readiness.is_ready() { "Ready" } @else { "Not ready" } }
        table {
            @for (name, is_ok, reason) in readiness.checks() {
                tr {
                    td { (name) }
                    td class=(if is_ok { "good" } else { "bad" }) { @if is_ok { "ok" } @else { "failed" } }
                    td { (reason) }
                }
            }
        }
    }
}

fn numbers(backlog: &Backlog) -> Markup {
    let rows = [
        ("issues queued", backlog.queued),
        ("issues processing", backlog.processing),
        ("issues quarantined", backlog.quarantined),
        ("outbox rows pending", backlog.outbox_pending),
        ("outbox rows dead", backlog.outbox_dead),
    ];
    html! {
        h2 { "Work" }
        table { @for (name, count) in rows { tr { td { (name) } td { (count) } } } }
    }
}

fn table_of_workers(workers: &[WorkerInfo]) -> Markup {
    html! {
        h2 { "Workers" }
        table {
            tr { th { "name" } th { "since" } th { "claims" } }
            @for worker in workers.iter().take(SHOWN_MAX) {
                tr {
                    td { (worker.worker) }
                    td { (worker.started_at.to_rfc3339()) }
                    td { (worker.claims) }
                }
            }
        }
    }
}

fn table_of_issues(title: &str, issues: &[Issue]) -> Markup {
    html! {
        @if !issues.is_empty() {
            h2 { (title) }
            table {
                tr { th { "id" } th { "integration" } th { "project" } th { "issue" } th { "pending" } th { "last error" } }
                @for issue in issues {
                    tr {
                        td { (issue.id) }
                        td { (issue.integration) }
                        td { (issue.external_project_id) }
                        td { (issue.external_issue_id) }
                        td { (issue.pending_events) }
                        td { (issue.last_error.as_deref().unwrap_or_default()) }
                    }
                }
            }
        }
    }
}
