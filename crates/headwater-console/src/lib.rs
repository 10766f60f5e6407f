#![doc = include_str!("../README.md")]

mod actions;
mod api_client;
mod assets;
mod chart;
mod components;
mod draft_link;
mod form;
mod last_answers;
mod live;
mod screen;
mod screens;
mod text;
mod user;

use std::sync::Arc;

use axum::Router;
use axum::response::Redirect;
use axum::routing::get;
use tokio_util::sync::CancellationToken;

use crate::api_client::{ConsoleSeconds, ConsoleState};

pub use crate::draft_link::{DraftLinkView, draft_link_page, draft_link_result_page};
pub use crate::screen::{error_page, login_page};
pub use crate::text::shell_word;
pub use crate::user::{ConsoleRole, ConsoleUser, NotBegun};

/// Path prefix of all pages.
pub const PREFIX: &str = "/console";

/// Routes of the console: `/`, `/console` and everything below it except `/console/login` and `/console/logout`, which
/// belong to the authentication of the server.
///
/// `api` serves `/api/v1/...` for an authenticated caller: it checks the role and writes the audit log. Every request
/// needs a [`ConsoleUser`] in its extensions. `stopping` ends live connections.
pub fn routes(api: Router, stopping: CancellationToken) -> Router {
    let seconds = ConsoleSeconds::start();
    let state = Arc::new(ConsoleState::new(api, seconds));
    let screens: Router = screens::routes().with_state(Arc::clone(&state));
    let live = live::routes(screens.clone(), seconds, stopping);
    let actions: Router = actions::routes().with_state(state);
    Router::new()
        .route("/", get(|| async { Redirect::to(PREFIX) }))
        .merge(screens)
        .merge(actions)
        .merge(live)
}

/// The style sheet and scripts, to be served beside [`routes`]. They need no identity, because the login page uses them too.
pub fn asset_routes() -> Router {
    assets::routes()
}
