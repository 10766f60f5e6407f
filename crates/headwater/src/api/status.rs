//! The status of the whole system in one response: servers, issues, outbox, workers, model, budget.
//!
//! Upstream: `headwater status` and `headwater top`. Downstream: the store, the stream backend and the settings.
//! Guarantees: read-only; costs a few short queries. An unreachable server is part of the response, with the reason.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use secrecy::ExposeSecret;
use serde::Serialize;
use tokio::time::timeout;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::dto::{milliseconds, time};
use crate::config::{ModelEndpointSettings, shown_url};
use crate::http::body::JsonResult;
use crate::server::app_state::{App, AppState};

/// Timeout of each server.
const SERVER_MAX: Duration = Duration::from_secs(3);
/// Maximum number of workers in the response.
const WORKERS_MAX: usize = 100;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(status))
}

/// The status of the system.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SystemStatusResponse {
    /// `ready`, `degraded` (the streams are unreachable: events are taken, and processed from SQL), or `not ready` (the
    /// database is unreachable, or issues wait and no worker is active).
    health: &'static str,
    version: &'static str,
    streams: ServerStatusDto,
    database: ServerStatusDto,
    /// `null` if the database is unreachable; also the next two.
    issues: Option<IssueCountsDto>,
    outbox: Option<OutboxCountsDto>,
    /// Active workers.
    workers: Option<Vec<WorkerDto>>,
    /// The first model endpoint.
    model: ModelStatusDto,
    /// All model endpoints, in the order in which they are tried.
    models: Vec<ModelStatusDto>,
    /// Token budgets of today, one for each integration that used tokens.
    budget: Vec<BudgetStatusDto>,
}

/// A server and whether it answers.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ServerStatusDto {
    address: String,
    ok: bool,
    /// Why it does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// Issues by state.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct IssueCountsDto {
    queued: u64,
    processing: u64,
    quarantined: u64,
}

/// Undelivered replies and events.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OutboxCountsDto {
    pending: u64,
    dead: u64,
    /// Age of the oldest pending one.
    lag_ms: u64,
}

/// An active worker.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct WorkerDto {
    worker: String,
    started_at: String,
    seen_at: String,
    /// Issues that it is processing.
    claims: u64,
}

/// A model of the desk.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct ModelStatusDto {
    /// Id of the endpoint.
    id: String,
    /// `scripted:` or the URL.
    url: String,
    /// Empty if it has none.
    name: String,
}

/// The token budget of an integration.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BudgetStatusDto {
    integration: String,
    used_tokens: u64,
    max_tokens: u64,
}

/// Show the status of the system.
#[utoipa::path(get, path = "/status", tag = "status", responses((status = 200, body = SystemStatusResponse)))]
async fn status(State(app): State<App>) -> JsonResult<SystemStatusResponse> {
    Ok(Json(read_status(&app).await))
}

async fn read_status(app: &AppState) -> SystemStatusResponse {
    let in_time = "no answer within 3s";
    let streams = async {
        match timeout(SERVER_MAX, app.streams.now()).await {
            Ok(answer) => answer.map(drop).map_err(|error| error.to_string()),
            Err(_) => Err(in_time.to_owned()),
        }
    };
    let database = async {
        let work = async { tokio::try_join!(app.store.backlog(), app.store.workers()) };
        match timeout(SERVER_MAX, work).await {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => Err(in_time.to_owned()),
        }
    };
    let used = async { timeout(SERVER_MAX, app.tickets.tokens_of_day()).await };
    let (streams, database, used) = tokio::join!(streams, database, used);
    let max_tokens = app.settings.desk.budget.day_tokens_max;
    let used = used.ok().and_then(Result::ok).unwrap_or_default().into_iter();
    let budget = used.map(|(integration, used_tokens)| BudgetStatusDto {
        integration,
        used_tokens,
        max_tokens,
    });
    let health = match (&streams, &database) {
        (_, Err(_)) => "not ready",
        (_, Ok((backlog, workers))) if workers.is_empty() && backlog.queued > 0 => "not ready",
        (Err(_), _) => "degraded",
        _ => "ready",
    };
    let described = app.streams.describe();
    let address = match described.address.is_empty() {
        true => described.kind.to_owned(),
        false => format!("{} {}", described.kind, described.address),
    };
    let models = || app.settings.models.iter().map(model_status);
    let database_status = ServerStatusDto {
        address: app.settings.database_shown(),
        ok: database.is_ok(),
        problem: database.as_ref().err().cloned(),
    };
    let (backlog, workers) = database.ok().unzip();
    SystemStatusResponse {
        health,
        version: env!("CARGO_PKG_VERSION"),
        streams: ServerStatusDto { address, ok: streams.is_ok(), problem: streams.err() },
        database: database_status,
        issues: backlog.as_ref().map(|backlog| IssueCountsDto {
            queued: backlog.queued,
            processing: backlog.processing,
            quarantined: backlog.quarantined,
        }),
        outbox: backlog.as_ref().map(|backlog| OutboxCountsDto {
            pending: backlog.outbox_pending,
            dead: backlog.outbox_dead,
            lag_ms: milliseconds(backlog.outbox_lag),
        }),
        workers: workers.map(|workers| {
            let workers = workers.into_iter().take(WORKERS_MAX).map(|worker| WorkerDto {
                worker: worker.worker,
                started_at: time(worker.started_at),
                seen_at: time(worker.seen_at),
                claims: worker.claims,
            });
            workers.collect()
        }),
        model: models().next().unwrap_or_default(),
        models: models().collect(),
        budget: budget.collect(),
    }
}

fn model_status(endpoint: &ModelEndpointSettings) -> ModelStatusDto {
    let url = match endpoint.model.scripted {
        Some(_) => "scripted:".to_owned(),
        None => shown_url(endpoint.model.url.expose_secret()),
    };
    ModelStatusDto { id: endpoint.id.clone(), url, name: endpoint.model.name.clone() }
}
