//! What became of the webhooks that this process received.

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::config::ProviderKind;
use crate::http::auth::Principal;
use crate::http::body::JsonResult;
use crate::server::app_state::App;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(webhooks))
}

/// Webhooks of the answering process, since it started.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct WebhookSummary {
    integrations: Vec<WebhookIntegrationDto>,
    /// The latest 100 that were rejected or ignored, newest first.
    recent: Vec<UnrecordedWebhookDto>,
}

/// Webhooks of one integration.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct WebhookIntegrationDto {
    integration: String,
    provider: String,
    /// Where the provider sends them.
    path: String,
    recorded: u64,
    duplicate: u64,
    ignored: u64,
    rejected: u64,
    last_at: Option<String>,
}

/// A webhook that was not recorded.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct UnrecordedWebhookDto {
    at: String,
    integration: String,
    /// `rejected` or `ignored`.
    result: &'static str,
    reason: String,
}

/// Count the webhooks of each integration, and list the latest that were rejected or ignored with the reason.
#[utoipa::path(get, path = "/webhooks", tag = "console", responses((status = 200, body = WebhookSummary)))]
async fn webhooks(State(app): State<App>, principal: Principal) -> JsonResult<WebhookSummary> {
    let external =
        app.settings.integrations.iter().filter(|one| one.provider != ProviderKind::Desk);
    let external = external.filter(|one| principal.allows(&one.id));
    let integrations = external.map(|one| {
        let counts = app.webhook_log.counts(&one.id);
        let provider = one.provider.as_str();
        WebhookIntegrationDto {
            integration: one.id.clone(),
            provider: provider.to_owned(),
            path: format!("/webhooks/{provider}/{}", one.id),
            recorded: counts.recorded,
            duplicate: counts.duplicate,
            ignored: counts.ignored,
            rejected: counts.rejected,
            last_at: counts.last_at.map(|at| at.to_rfc3339()),
        }
    });
    let integrations = integrations.collect();
    let recent = app.webhook_log.recent().into_iter();
    let recent =
        recent.filter(|one| principal.allows(&one.integration)).map(|one| UnrecordedWebhookDto {
            at: one.at.to_rfc3339(),
            integration: one.integration,
            result: one.result.as_str(),
            reason: one.reason,
        });
    Ok(Json(WebhookSummary { integrations, recent: recent.collect() }))
}
