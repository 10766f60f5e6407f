//! The screens: each reads the API and renders a page.
//!
//! Guarantees: a part that cannot be read is replaced by a banner, and the rest is shown; an empty list says how to
//! create the first item; filters and positions are in the address.

mod assignment;
mod audit;
mod drafts;
mod failures;
mod groups;
mod help;
mod history;
mod insight;
mod issues;
mod letters;
mod messages;
mod outbox;
mod overview;
mod plans;
mod runs;
mod search;
mod sessions;
mod system;
mod tail;
mod tickets;
mod topics;
mod webhooks;
mod why;

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::get;
use maud::{Markup, html};
use serde_json::Value;

use crate::api_client::{ConsoleState, Part, Problem};
use crate::components::problem_with_last;
use crate::screen::Screen;

/// Rows of a page.
pub(crate) const ROWS: usize = 50;

/// Routes of all screens.
pub(crate) fn routes() -> Router<Arc<ConsoleState>> {
    Router::new()
        .route("/console", get(overview::show))
        .route("/console/search", get(search::show))
        .route("/console/help", get(help::show))
        .route("/console/tickets", get(tickets::list))
        .route("/console/tickets/{id}", get(tickets::show))
        .route("/console/issues", get(issues::list))
        .route("/console/issues/{id}", get(issues::show))
        .route("/console/topics", get(topics::list))
        .route("/console/topics/{topic}", get(topics::show))
        .route("/console/topics/{topic}/messages", get(messages::list))
        .route("/console/topics/{topic}/messages/{id}", get(messages::show))
        .route("/console/topics/{topic}/dead-letters", get(letters::list))
        .route("/console/topics/{topic}/dead-letters/{id}", get(letters::show))
        .route("/console/topics/{topic}/groups/{group}", get(groups::show))
        .route("/console/sessions", get(sessions::list))
        .route("/console/sessions/{session}", get(sessions::show))
        .route("/console/sessions/{session}/session.jsonl", get(sessions::export))
        .route("/console/sessions/{session}/steps/{entry}", get(sessions::play))
        .route("/console/sessions/{session}/compare", get(sessions::compare))
        .route("/console/assignment", get(assignment::choose))
        .route("/console/assignment/{service}", get(assignment::show))
        .route("/console/tail", get(tail::show))
        .route("/console/failures", get(failures::list))
        .route("/console/failures/{id}", get(failures::show))
        .route("/console/failures/{id}/failures.json", get(failures::export))
        .route("/console/plans", get(plans::list))
        .route("/console/plans/{id}", get(plans::show))
        .route("/console/outbox", get(outbox::list))
        .route("/console/outbox/{id}", get(outbox::show))
        .route("/console/reports", get(insight::reports))
        .route("/console/reports/{name}", get(insight::report))
        .route("/console/reports/{name}/{file}", get(insight::report_file))
        .route("/console/sql", get(insight::sql))
        .route("/console/consistency", get(insight::consistency))
        .route("/console/drafts", get(drafts::list))
        .route("/console/processes", get(system::processes))
        .route("/console/webhooks", get(webhooks::show))
        .route("/console/doctor", get(system::doctor))
        .route("/console/settings", get(system::settings))
        .route("/console/audit", get(audit::list))
        .route("/console/{*rest}", get(not_found))
}

async fn not_found(screen: Screen) -> Response {
    let problem = Problem::new(StatusCode::NOT_FOUND, "not_found", "there is no such page");
    screen.failed("Page", &problem)
}

/// What a page is about: its answer, or the last one with a banner. `what` begins in lower case.
pub(crate) fn known_or_last(
    screen: &Screen,
    what: &str,
    part: Part,
) -> Result<(Arc<Value>, Markup), Problem> {
    match part {
        Ok(value) => Ok((value, html! {})),
        Err(error) => match error.last.clone() {
            Some((last, age)) => {
                Ok((last, problem_with_last(&format!("The {what}"), &error, screen, age)))
            }
            None => Err(error),
        },
    }
}

/// Names of the filter of dead letters.
pub(crate) fn letter_filter() -> &'static [&'static str] {
    &letters::FILTER
}
