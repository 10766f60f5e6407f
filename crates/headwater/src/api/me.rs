//! The caller: name, role and integrations.

use axum::Json;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::http::auth::Principal;
use crate::http::body::JsonResult;
use crate::server::app_state::App;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(me))
}

/// The caller.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MeResponse {
    /// Name of the token; `local` without tokens.
    name: String,
    /// `read`, `write` or `admin`.
    role: &'static str,
    /// The integrations whose objects it can see; `null`: all.
    integrations: Option<Vec<String>>,
    /// Version of the server.
    version: &'static str,
}

/// Show who the caller is.
#[utoipa::path(get, path = "/me", tag = "console", responses((status = 200, body = MeResponse)))]
async fn me(principal: Principal) -> JsonResult<MeResponse> {
    let Principal { name, role, integrations } = principal;
    let integrations = integrations.map(|all| all.to_vec());
    let version = env!("CARGO_PKG_VERSION");
    Ok(Json(MeResponse { name, role: role.as_str(), integrations, version }))
}
