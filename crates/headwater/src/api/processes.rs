//! Processes that work on issues, and the settings of this one.

use axum::Json;
use axum::extract::State;
use headwater_stream::clock::{Clock, SystemClock};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::config::{Role, shown_url};
use crate::http::auth::Principal;
use crate::http::body::JsonResult;
use crate::server::app_state::App;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(processes)).routes(routes!(settings))
}

/// All processes.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ProcessPage {
    processes: Vec<ProcessDto>,
}

/// A process that works on issues.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ProcessDto {
    /// Name, unique for each start.
    name: String,
    /// Whether its last heartbeat still counts.
    alive: bool,
    started_at: String,
    /// Time of the last heartbeat.
    seen_at: String,
    /// Issues it has claimed.
    claims: u64,
}

/// List the processes that work on issues.
#[utoipa::path(get, path = "/processes", tag = "console", responses((status = 200, body = ProcessPage)))]
async fn processes(State(app): State<App>) -> JsonResult<ProcessPage> {
    let now = SystemClock.now();
    let workers = app.store.workers().await?;
    let processes = workers.into_iter().map(|worker| ProcessDto {
        alive: worker.expires_at > now,
        started_at: worker.started_at.to_rfc3339(),
        seen_at: worker.seen_at.to_rfc3339(),
        claims: worker.claims,
        name: worker.worker,
    });
    Ok(Json(ProcessPage { processes: processes.collect() }))
}

/// The settings of a process, without secrets.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SettingsResponse {
    /// Name, value, source and description of each setting.
    settings: Vec<Value>,
    /// Id, provider and base URL of each integration.
    integrations: Vec<Value>,
    /// Name and role of each token.
    tokens: Vec<Value>,
}

/// Show the settings of this process. Secrets are hidden.
#[utoipa::path(get, path = "/settings", tag = "console", responses((status = 200, body = SettingsResponse), (status = 403)))]
async fn settings(State(app): State<App>, principal: Principal) -> JsonResult<SettingsResponse> {
    principal.require_role(Role::Admin)?;
    let settings = &app.settings;
    let integrations = settings.integrations.iter().map(|one| {
        json!({"id": one.id, "provider": one.provider.as_str(), "base_url": one.base_url.as_deref().map(shown_url)})
    });
    let tokens = settings.tokens.iter();
    let tokens = tokens.map(|token| json!({"name": token.name, "role": token.role.as_str()}));
    Ok(Json(SettingsResponse {
        settings: settings.shown.as_ref().clone(),
        integrations: integrations.collect(),
        tokens: tokens.collect(),
    }))
}
