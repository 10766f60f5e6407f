//! `POST /console/do/...`: changes, each followed by a redirect.
//!
//! Upstream: forms of `screens/`. Downstream: the API, which checks the role and writes the audit log. Guarantees:
//! whatever destroys or touches more than one thing is confirmed first (`confirmation.rs`); an action that fails says whether
//! something was changed, and offers what was submitted again (`failed.rs`); what takes longer than [`WORK_TIME_MAX`] stops and
//! says what is left, which the same action continues.

mod confirmation;
mod desk;
pub(crate) mod failed;
mod failures;
mod letters;
mod plans;
mod sessions;
mod streams;
mod topics;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::post;

use crate::api_client::ConsoleState;
use crate::form::read_form;

/// Time for an action on many things, below the default of `http.request_timeout` with room for the answer.
const WORK_TIME_MAX: Duration = Duration::from_secs(20);

/// Routes of all actions.
pub(crate) fn routes() -> Router<Arc<ConsoleState>> {
    Router::new()
        .route("/console/do/tickets/{id}/close", post(desk::close_ticket))
        .route("/console/do/tickets/{id}/reopen", post(desk::reopen_ticket))
        .route("/console/do/tickets/{id}/take", post(desk::take_ticket))
        .route("/console/do/tickets/{id}/assign", post(desk::assign_ticket))
        .route("/console/do/tickets/{id}/unassign", post(desk::unassign_ticket))
        .route("/console/do/tickets/{id}/reply", post(desk::reply))
        .route("/console/do/drafts/{id}/approve", post(desk::approve_draft))
        .route("/console/do/drafts/{id}/reject", post(desk::reject_draft))
        .route("/console/do/issues/{id}/retry", post(desk::retry_issue))
        .route("/console/do/issues/{id}/release", post(desk::release_issue))
        .route("/console/do/issues/release", post(desk::release_issues))
        .route("/console/do/issues/retry", post(desk::retry_issues))
        .route("/console/do/outbox/{id}/retry", post(desk::retry_reply))
        .route("/console/do/outbox/retry", post(desk::retry_replies))
        .route("/console/do/topics/{topic}/produce", post(topics::produce))
        .route("/console/do/topics/{topic}/grow", post(topics::grow))
        .route("/console/do/topics/{topic}/trim", post(topics::trim))
        .route("/console/do/topics/{topic}/delete", post(topics::delete_topic))
        .route("/console/do/topics/{topic}/dead-letters/replay", post(letters::replay))
        .route("/console/do/topics/{topic}/dead-letters/purge", post(letters::purge))
        .route("/console/do/topics/{topic}/dead-letters/plan", post(plans::create_for_topic))
        .route("/console/do/topics/{topic}/dead-letters/{id}/edit", post(letters::replay_edited))
        .route("/console/do/topics/{topic}/groups/{group}/reset", post(streams::reset_group))
        .route("/console/do/topics/{topic}/groups/{group}/delete", post(streams::delete_group))
        .route("/console/do/sessions/{session}/fork", post(sessions::fork))
        .route("/console/do/failures/{id}/retry", post(failures::retry))
        .route("/console/do/failures/{id}/purge", post(failures::purge))
        .route("/console/do/failures/{id}/plan", post(plans::create))
        .route("/console/do/plans/{id}/pause", post(plans::pause))
        .route("/console/do/plans/{id}/resume", post(plans::resume))
        .route("/console/do/plans/{id}/cancel", post(plans::cancel))
        .route_layer(from_fn(read_form))
}

/// Back to a page, which says what was done.
fn done(address: &str, code: &str) -> Response {
    Redirect::to(&format!("{address}?done={code}")).into_response()
}

/// Back to a page, which says with how many it was done.
fn done_with(address: &str, code: &str, count: u64) -> Response {
    Redirect::to(&with_parameters(address, &format!("done={code}&count={count}"))).into_response()
}

/// Back to a page, which says with how many it was done before the time was over, and how many are left if that is known.
fn done_in_part(address: &str, code: &str, count: u64, left: Option<u64>) -> Response {
    let left = left.map_or_else(|| "more".to_owned(), |left| left.to_string());
    let parameters = format!("done={code}&count={count}&left={left}");
    Redirect::to(&with_parameters(address, &parameters)).into_response()
}

fn with_parameters(address: &str, parameters: &str) -> String {
    let separator = if address.contains('?') { '&' } else { '?' };
    format!("{address}{separator}{parameters}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_keeps_the_filter_and_says_what_is_left() {
        let location = |response: Response| {
            response.headers()["location"].to_str().expect("an address").to_owned()
        };
        let whole = done_with("/console/topics", "purged", 3);
        assert_eq!(location(whole), "/console/topics?done=purged&count=3");
        let part = done_in_part("/console/topics?key=a", "purged", 3, Some(4));
        assert_eq!(location(part), "/console/topics?key=a&done=purged&count=3&left=4");
        let part = done_in_part("/console/topics", "purged", 3, None);
        assert_eq!(location(part), "/console/topics?done=purged&count=3&left=more");
    }
}
