//! Actions on sessions.

use axum::extract::Path;
use axum::response::Response;
use serde_json::json;

use super::done;
use crate::form::FormFields;
use crate::screen::Screen;
use crate::text::encoded;

pub(super) async fn fork(
    screen: Screen,
    Path(session): Path<String>,
    form: FormFields,
) -> Response {
    let new = form.get("session");
    let body = json!({"session": new, "until": form.get("until")});
    match screen.api.post(&format!("/sessions/{}/fork", encoded(&session)), body).await {
        Ok(_) => done(&format!("/console/sessions/{}", encoded(new)), "forked"),
        Err(error) => screen.failed("Fork", &error),
    }
}
