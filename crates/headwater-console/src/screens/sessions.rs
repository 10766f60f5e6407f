//! Sessions of model runs: the list, the steps of one, and two side by side.

use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::api_client::Problem;
use crate::components::{
    ButtonStyle, Tone, badge, banner, button, count, empty, excerpt, facts, id, json_block,
    json_difference, live, pager, problem, table, time,
};
use crate::screen::{Screen, ScreenContent};
use crate::screens::ROWS;
use crate::text::{counted, duration, encoded, field, items, number, plain, shell_word};
use crate::user::ConsoleRole;

pub(crate) async fn list(screen: Screen) -> Response {
    let filter = screen.query.query_of(&["issue", "cursor"]);
    let content = match screen.api.get(&format!("/sessions?limit={ROWS}&{filter}")).await {
        Err(error) => problem("The sessions", &error, &screen),
        Ok(page) if items(&page, "sessions").is_empty() => empty(
            "There are no sessions. A run of the model creates one:",
            Some("headwater ticket new --title Hello --content 'Is anybody there?'"),
        ),
        Ok(page) => html! {
            (table("Sessions", &["Session", "State", "Created", "Events", "Forked from"], &html! {
                @for session in items(&page, "sessions") {
                    tr data-key=(field(session, "session")) {
                        th scope="row" { (link(field(session, "session"))) }
                        td { (stage(session)) }
                        td { (time(&session["created_at"])) }
                        (count(&session["length"]))
                        td { @if let Some(parent) = session["parent"]["session"].as_str() { (link(parent)) } }
                    }
                }
            }))
            (pager(&screen, &["issue"], &page["next_cursor"]))
        },
    };
    let issue = screen.query.get("issue");
    let of =
        if issue.is_empty() { String::new() } else { format!(" --issue {}", shell_word(issue)) };
    screen.page(ScreenContent {
        title: "Sessions".to_owned(),
        path: Vec::new(),
        command: format!("headwater session list{of}"),
        content: html! {
            form.filters.inline action="/console/sessions" {
                label for="issue" { "Of issue" }
                input #issue name="issue" value=(issue) inputmode="numeric" size="10" maxlength="19";
                button.button type="submit" { "Filter" }
            }
            (live("sessions", &content))
        },
    })
}

fn link(session: &str) -> Markup {
    html! { a href={ "/console/sessions/" (encoded(session)) } { (id(session)) } }
}

fn stage(session: &Value) -> Markup {
    match field(session, "stage") {
        "open" => badge(Tone::Active, "open"),
        other => badge(Tone::Neutral, other),
    }
}

/// What may have removed a session.
const GONE: &str = "it may have expired: `retention.sessions` says how long a session is kept after its last event";

fn above() -> Vec<(String, String)> {
    vec![("Sessions".to_owned(), "/console/sessions".to_owned())]
}

pub(crate) async fn show(screen: Screen, Path(session): Path<String>) -> Response {
    let path = format!("/sessions/{}", encoded(&session));
    let cursor = screen.query.query_of(&["cursor"]);
    let events = format!("{path}/events?limit={ROWS}&{cursor}");
    let (info, events) = tokio::join!(screen.api.get(&path), screen.api.get(&events));
    let info = match info {
        Ok(info) => info,
        Err(error) => return screen.failed("Session", &error.or_gone(GONE)),
    };
    let steps = match &events {
        Err(error) => problem("The events", error, &screen),
        Ok(page) if items(page, "events").is_empty() => empty("No event is stored.", None),
        Ok(page) => html! {
            @for event in items(page, "events") { (step(&screen, &session, event, false)) }
            (pager(&screen, &[], &page["next_cursor"]))
        },
    };
    let content = html! {
        (facts(&[
            ("State", stage(&info)),
            ("Created", time(&info["created_at"])),
            ("Events", html! { (info["length"].as_u64().map_or("–".to_owned(), number)) }),
            ("Forked from", match info["parent"]["session"].as_str() {
                Some(parent) => html! { (link(parent)) " at " (id(field(&info["parent"], "entry"))) },
                None => html! { span.quiet { "–" } },
            }),
            ("Kept after its last event", html! { (info["ttl_ms"].as_u64().map_or("–".to_owned(), duration)) }),
        ]))
        @if let Some(reason) = info["problem"].as_str() {
            (banner(Tone::Warning, &html! { p { "The session is incomplete: " (excerpt(reason)) } }))
        }
        (live("steps", &html! { h2 { "Steps" } (steps) }))
        h2 { "Compare" }
        form.inline action={ "/console/sessions/" (encoded(&session)) "/compare" } {
            label for="with" { "With session" }
            input #with name="with" required maxlength="200" value=(plain(&info["parent"]["session"]));
            button.button type="submit" { "Compare" }
        }
        h2 { "Export" }
        p { a.button href={ "/console/sessions/" (encoded(&session)) "/session.jsonl" } download={ (session) ".jsonl" } { "Download all events" } }
        p.quiet { code { "headwater session import NAME --input " (shell_word(&format!("{session}.jsonl"))) } " makes a session of the file." }
    };
    screen.page(ScreenContent {
        command: format!("headwater session replay {}", shell_word(&session)),
        title: session,
        path: above(),
        content,
    })
}

/// All events of a session as lines of JSON, as `headwater session import` reads them.
pub(crate) async fn export(screen: Screen, Path(session): Path<String>) -> Response {
    let path = format!("/sessions/{}/export", encoded(&session));
    screen.download("Session", &path, ("application/x-ndjson", "session.jsonl")).await
}

/// Events that are read for the state after a step.
const PLAYED_MAX: usize = 500;

/// One step of a session: its event, the state after it, and the steps around it.
pub(crate) async fn play(
    screen: Screen,
    Path((session, entry)): Path<(String, String)>,
) -> Response {
    let path = format!("/sessions/{}/events?limit={PLAYED_MAX}", encoded(&session));
    let page = match screen.api.get(&path).await {
        Ok(page) => page,
        Err(error) => return screen.failed("Session", &error.or_gone(GONE)),
    };
    let events = items(&page, "events");
    let Some(at) = events.iter().position(|event| field(event, "id") == entry) else {
        let message = format!(
            "step `{entry}` is not among the first {PLAYED_MAX} events of session `{session}`"
        );
        let problem = Problem::new(StatusCode::NOT_FOUND, "not_found", message);
        return screen.failed("Step", &problem);
    };
    // The newest event of each type says what is true after this step.
    let mut state: Vec<(String, u64, &Value)> = Vec::new();
    for event in &events[..=at] {
        let kind = plain(&event["type"]);
        match state.iter_mut().find(|(known, ..)| *known == kind) {
            Some((_, count, newest)) => (*count, *newest) = (*count + 1, event),
            None => state.push((kind, 1, event)),
        }
    }
    let go = |to: Option<&Value>, label: &str| {
        html! {
            @match to {
                Some(event) => a.button href={ "/console/sessions/" (encoded(&session)) "/steps/" (encoded(field(event, "id"))) } { (label) },
                None => span.quiet { (label) },
            }
        }
    };
    let content = html! {
        nav.buttons aria-label="Steps" {
            (go(events.first().filter(|_| at > 0), "First step"))
            (go(at.checked_sub(1).map(|before| &events[before]), "Previous step"))
            (go(events.get(at + 1), "Next step"))
            (go(events.last().filter(|_| at + 1 < events.len()), "Last step"))
        }
        p { "Step " (at + 1) " of " (events.len()) @if !page["next_cursor"].is_null() { " or more" } "." }
        (step(&screen, &session, &events[at], true))
        h2 { "State after this step" }
        @for (kind, count, newest) in &state {
            details.item data-key=(kind) {
                summary { strong { (excerpt(kind)) } " " span.quiet { (counted(*count, "event", "events")) ", newest " (id(field(newest, "id"))) } }
                (json_block(&newest["payload"]))
            }
        }
    };
    let mut path = above();
    path.push((session.clone(), format!("/console/sessions/{}", encoded(&session))));
    screen.page(ScreenContent {
        title: format!("Step {}", at + 1),
        path,
        command: format!(
            "headwater session replay {} --until {}",
            shell_word(&session),
            shell_word(&entry)
        ),
        content,
    })
}

/// One event, and a form that forks the session after it.
fn step(screen: &Screen, session: &str, event: &Value, is_open: bool) -> Markup {
    let entry = field(event, "id");
    html! {
        details.item data-key=(entry) open[is_open] {
            summary { (id(entry)) " " strong { (excerpt(&plain(&event["type"]))) } " " span.quiet { (excerpt(&plain(&event["payload"]))) } }
            (json_block(&event["payload"]))
            @if !is_open { p { a href={ "/console/sessions/" (encoded(session)) "/steps/" (encoded(entry)) } { "State after this step" } } }
            form.inline method="post" action={ "/console/do/sessions/" (encoded(session)) "/fork" } {
                input type="hidden" name="until" value=(entry);
                label for={ "fork-" (entry) } { "Fork after this step as" }
                input id={ "fork-" (entry) } name="session" required maxlength="200" value={ (session) "-fork" };
                (button(&screen.user, ConsoleRole::Write, ButtonStyle::Plain, "Fork"))
            }
        }
    }
}

/// An event of a session beside the one in the same place of another. What differs is marked, also for screen readers.
fn compared(event: &Value, other: Option<&Value>, is_cut: bool) -> Markup {
    let kind = excerpt(&plain(&event["type"]));
    let has_same_type = other.is_none_or(|other| other["type"] == event["type"]);
    let has_same_payload = other.is_some_and(|other| other["payload"] == event["payload"]);
    html! {
        div.item {
            p {
                (id(field(event, "id"))) " "
                strong { @if has_same_type { (kind) } @else { mark { span.visually-hidden { "Differs: " } (kind) } } } " "
                @match other {
                    Some(_) if has_same_type && has_same_payload => (badge(Tone::Neutral, "the same")),
                    Some(_) => (badge(Tone::Warning, "differs")),
                    // The other session may go on behind what was read.
                    None if is_cut => {},
                    None => (badge(Tone::Warning, "only here")),
                }
            }
            @match other {
                Some(other) => (json_difference(&event["payload"], &other["payload"])),
                None => (json_block(&event["payload"])),
            }
        }
    }
}

pub(crate) async fn compare(screen: Screen, Path(session): Path<String>) -> Response {
    let with = screen.query.get("with").to_owned();
    let path = format!("/sessions/{}/diff?with={}", encoded(&session), encoded(&with));
    let found = match screen.api.get(&path).await {
        Ok(found) => found,
        Err(error) => return screen.failed("Comparison", &error),
    };
    let same = found["same"].as_u64().unwrap_or(0);
    let (left, right) = (items(&found, "only_left"), items(&found, "only_right"));
    let is_cut = found["is_cut"] == true;
    let column = |session: &str, events: &[Value], others: &[Value]| {
        html! {
            section {
                h2 { (link(session)) }
                @if events.is_empty() { p.quiet { "No further event." } }
                @for (index, event) in events.iter().enumerate() { (compared(event, others.get(index), is_cut)) }
            }
        }
    };
    let content = html! {
        @if left.is_empty() && right.is_empty() {
            p { "Both have the same " (counted(same, "event", "events")) "." }
        } @else {
            p { "The first " (counted(same, "event is", "events are")) " the same. What follows differs:" }
            div.side-by-side { (column(&session, left, right)) (column(&with, right, left)) }
        }
        @if is_cut { p.quiet { "Further events are not shown." } }
    };
    let mut path = above();
    path.push((session.clone(), format!("/console/sessions/{}", encoded(&session))));
    screen.page(ScreenContent {
        title: "Comparison".to_owned(),
        path,
        command: format!("headwater session diff {} {}", shell_word(&session), shell_word(&with)),
        content,
    })
}
