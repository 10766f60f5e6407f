//! The page of an action that failed: whether something was changed, and what was submitted, to be sent again.
//!
//! Upstream: `Screen::failed`. Guarantees: what was typed is not lost; the status is that of the failure; if it is not known whether
//! the change was made, the page says so and names what shows it.

use axum::http::StatusCode;
use axum::response::Response;
use maud::{Markup, html};

use crate::api_client::{FailedEffect, Problem};
use crate::components::{Tone, banner};
use crate::screen::{Screen, ScreenContent};
use crate::screens::letter_filter;
use crate::text::visible;

/// Path prefix of all actions.
const PREFIX: &str = "/console/do/";

/// Fields with text of several lines, and their names for people.
const TEXTS: [(&str, &str); 2] = [("content", "Text"), ("payload", "Payload")];

/// Whether a page is that of an action.
pub(crate) fn is_action(screen: &Screen) -> bool {
    screen.uri.path().starts_with(PREFIX)
}

/// What an action is about, what it does with it (a participle), and what shows whether it was done.
fn words(route: &str) -> Option<(&'static str, &'static str, &'static str)> {
    let again = "To do it again does no harm";
    let rest = "Done again, it continues with those that are left";
    let decided = "The list of drafts shows it; a draft is decided once";
    Some(match route.strip_prefix(PREFIX)? {
        "tickets/{id}/close" => ("ticket", "closed", again),
        "tickets/{id}/reopen" => ("ticket", "reopened", again),
        "tickets/{id}/take" => ("ticket", "taken", again),
        "tickets/{id}/assign" => ("ticket", "assigned", again),
        "tickets/{id}/unassign" => ("assignee", "removed", again),
        "tickets/{id}/reply" => ("reply", "stored", "Sent again from this page, it is stored once"),
        "drafts/{id}/approve" => ("draft", "approved", decided),
        "drafts/{id}/reject" => ("draft", "rejected", decided),
        "issues/{id}/retry" => ("issue", "retried", again),
        "issues/{id}/release" => ("issue", "released", again),
        "issues/release" => ("issues", "released", rest),
        "issues/retry" => ("issues", "retried", rest),
        "outbox/{id}/retry" => ("reply", "queued", again),
        "outbox/retry" => ("replies", "queued", rest),
        "topics/{topic}/produce" => (
            "message",
            "stored",
            "Look at the newest messages of the topic first: sent again, it may be stored twice",
        ),
        "topics/{topic}/grow" => ("partitions", "added", "The topic shows its partitions"),
        "topics/{topic}/trim" => {
            ("messages", "removed", "The topic shows how many messages it has")
        }
        "topics/{topic}/delete" => ("topic", "deleted", "The list of topics shows it"),
        "topics/{topic}/dead-letters/replay" => ("dead letters", "replayed", rest),
        "topics/{topic}/dead-letters/purge" => ("dead letters", "purged", rest),
        "topics/{topic}/dead-letters/{id}/edit" => (
            "edited copy",
            "sent",
            "Sent again from this page, it is sent once; 0 replayed means that it was sent before",
        ),
        "topics/{topic}/dead-letters/plan" | "failures/{id}/plan" => {
            ("replay plan", "made", "Look at the replay plans first: done again, there may be two")
        }
        "topics/{topic}/groups/{group}/reset" => ("group", "moved", "The group shows its lag"),
        "topics/{topic}/groups/{group}/delete" => {
            ("group", "deleted", "The topic shows its groups")
        }
        "sessions/{session}/fork" => ("session", "forked", "The list of sessions shows it"),
        "failures/{id}/retry" => ("failures", "retried", rest),
        "failures/{id}/purge" => ("dead letters", "purged", rest),
        "plans/{id}/pause" => ("replay plan", "paused", "The plan shows its state"),
        "plans/{id}/resume" => ("replay plan", "resumed", "The plan shows its state"),
        "plans/{id}/cancel" => ("replay plan", "cancelled", "The plan shows its state"),
        _ => return None,
    })
}

/// The page that shows what the action is about.
fn back(screen: &Screen) -> String {
    let path = screen.uri.path().replacen(PREFIX, "/console/", 1);
    let (page, _) = path.rsplit_once('/').unwrap_or((&path, ""));
    if page.starts_with("/console/drafts/") {
        return "/console/drafts".to_owned();
    }
    let filter = match page.rsplit('/').next() {
        Some("dead-letters") => screen.form.query_of(letter_filter()),
        Some("issues") => screen.form.query_of(&["integration", "error"]),
        Some("outbox") => screen.form.query_of(&["issue"]),
        _ => String::new(),
    };
    if filter.is_empty() { page.to_owned() } else { format!("{page}?{filter}") }
}

/// Whether the same may succeed when it is sent again.
fn may_succeed(screen: &Screen, status: StatusCode) -> bool {
    let has_text = TEXTS.iter().any(|(name, _)| !screen.form.get(name).is_empty());
    let may = [StatusCode::CONFLICT, StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT];
    has_text || status.is_server_error() || may.contains(&status)
}

pub(crate) fn page(screen: &Screen, problem: &Problem) -> Response {
    let unknown = ("change", "made", "Check it before you do it again");
    let (subject, done, check) = words(&screen.route).unwrap_or(unknown);
    let was = if subject.ends_with('s') { "were" } else { "was" };
    // An earlier try from this page was stored after all, before its text was changed.
    let has_other_text = screen.route.ends_with("/reply") && problem.status == StatusCode::CONFLICT;
    let (title, certainty) = match problem.effect {
        _ if has_other_text => (
            "A reply was already stored".to_owned(),
            "The text that was sent first from this page is in the ticket, and this one was not stored",
        ),
        FailedEffect::Nothing => (format!("The {subject} {was} not {done}"), "Nothing was changed"),
        FailedEffect::Part => (format!("Not all {subject} {was} {done}"), "Only a part was done"),
        FailedEffect::Unknown => {
            (format!("The {subject} may have been {done}"), "It is not known whether it was done")
        }
    };
    tracing::warn!(
        request_id = screen.request_id,
        route = screen.route,
        status = problem.status.as_u16(),
        code = problem.code,
        effect = ?problem.effect,
        error = problem.message,
        "an action of the console failed"
    );
    let content = html! {
        (banner(Tone::Bad, &html! {
            p { strong { (certainty) ": " } (visible(&problem.message)) "." }
            @if problem.effect == FailedEffect::Unknown { p { (check) "." } }
            p.quiet { "Code " code { (problem.code) } ", request " code { (screen.request_id) } "." }
        }))
        @if may_succeed(screen, problem.status) && !has_other_text { (form(screen)) }
        p { a href=(back(screen)) { "Go back" } " · " a href="/console" { "Back to the overview" } }
    };
    let page = ScreenContent { title, path: Vec::new(), command: String::new(), content };
    screen.page_with_status(problem.status, page)
}

/// The same fields, to be sent again; texts can be changed.
fn form(screen: &Screen) -> Markup {
    html! {
        form.stacked method="post" action=(screen.address()) {
            @for (name, value) in screen.form.without(&[]) {
                @match TEXTS.iter().find(|(text, _)| *text == name) {
                    None => input type="hidden" name=(name) value=(value);
                    Some((_, label)) => {
                        label for=(name) { (label) }
                        // Browsers leave out a first line break.
                        textarea id=(name) name=(name) rows="6" { "\n" (value) }
                    }
                }
            }
            div { button.button.primary type="submit" { "Try again" } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::FormFields;

    /// The first try was stored although its answer did not come, and the text was changed since.
    #[tokio::test]
    async fn another_text_for_a_stored_reply_is_not_tried_again() {
        let mut screen = Screen::for_test(axum::Router::new(), "/console/do/tickets/7/reply");
        screen.route = "/console/do/tickets/{id}/reply".to_owned();
        screen.form = FormFields::from_query("content=Hello&message_id=1");
        let shown = async |status| {
            let answer = page(&screen, &Problem::new(status, "any", "refused"));
            let body = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
            String::from_utf8(body.to_vec()).unwrap()
        };
        let (busy, stored) =
            (shown(StatusCode::SERVICE_UNAVAILABLE).await, shown(StatusCode::CONFLICT).await);
        assert!(busy.contains("Try again") && busy.contains("Hello"), "{busy}");
        assert!(!stored.contains("Try again") && !stored.contains("Nothing was"), "{stored}");
        assert!(stored.contains("A reply was already stored"), "{stored}");
    }

    #[test]
    fn every_action_has_words() {
        let routes = include_str!("mod.rs").split(".route(\"").skip(1);
        let routes: Vec<_> = routes.filter_map(|rest| rest.split('"').next()).collect();
        assert!(routes.len() > 30, "{routes:?}");
        for route in routes {
            assert!(words(route).is_some(), "{route}");
        }
    }
}
