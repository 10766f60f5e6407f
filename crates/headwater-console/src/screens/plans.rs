//! Replay plans: the list, and one plan with its progress.

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{
    ButtonStyle, Tone, action, badge, block, choices, count, empty, excerpt, facts, id, live,
    pager, problem, table, time,
};
use crate::screen::{Screen, ScreenContent};
use crate::screens::ROWS;
use crate::screens::why::{self, WhySubject};
use crate::text::{counted, encoded, field, items, number, plain, shell_word};
use crate::user::ConsoleRole;

const STATES: [(&str, &str); 6] = [
    ("", "All"),
    ("running", "Running"),
    ("paused", "Paused"),
    ("stopped", "Stopped"),
    ("cancelled", "Cancelled"),
    ("done", "Done"),
];

fn state_badge(plan: &Value) -> Markup {
    let state = field(plan, "state");
    let tone = match state {
        "running" => Tone::Active,
        "paused" => Tone::Warning,
        "stopped" => Tone::Bad,
        "done" => Tone::Good,
        _ => Tone::Neutral,
    };
    badge(tone, state)
}

/// What a plan replays, in a line.
fn subject(plan: &Value) -> String {
    let topics: Vec<String> = items(plan, "topics").iter().map(plain).collect();
    match plan["cause"].as_str() {
        Some(cause) => format!("{}: {cause}", topics.join(", ")),
        None => format!("dead letters of {}", topics.join(", ")),
    }
}

pub(crate) async fn list(screen: Screen) -> Response {
    let filter = screen.query.query_of(&["state", "cursor"]);
    let rows = match &screen.api.get(&format!("/plans?limit={ROWS}&{filter}")).await {
        Err(error) => problem("The replay plans", error, &screen),
        Ok(page) if items(page, "plans").is_empty() => empty(
            "No replay plan matches. Open a cause on the Failures screen and choose “Replay plan”, or run:",
            Some("headwater plan create TOPIC --dry-run"),
        ),
        Ok(page) => html! {
            (table("Replay plans", &["Plan", "State", "What", "Total", "Sent", "Settled", "Failed again", "Left", "Created"], &html! {
                @for plan in items(page, "plans") { (row(plan)) }
            }))
            (pager(&screen, &["state"], &page["next_cursor"]))
        },
    };
    let content = html! {
        div.filters { (choices(&screen, "state", &STATES, &[])) }
        (live("plans", &rows))
    };
    let state = screen.query.get("state");
    let known = STATES.iter().any(|(name, _)| *name == state && !state.is_empty());
    let option = if known { format!(" --state {state}") } else { String::new() };
    screen.page(ScreenContent {
        title: "Replay plans".to_owned(),
        path: Vec::new(),
        command: format!("headwater plan list{option}"),
        content,
    })
}

fn row(plan: &Value) -> Markup {
    let key = plain(&plan["id"]);
    html! {
        tr data-key=(key) {
            th scope="row" { a href={ "/console/plans/" (key) } { (id(&key)) } }
            td { (state_badge(plan)) }
            td { (excerpt(&subject(plan))) }
            (count(&plan["total"]))
            (count(&plan["sent"]))
            (count(&plan["settled"]))
            (count(&plan["failed"]))
            (count(&plan["left"]))
            td { (time(&plan["created_at"])) }
        }
    }
}

pub(crate) async fn show(screen: Screen, Path(key): Path<String>) -> Response {
    let plan = match screen.api.get(&format!("/plans/{}", encoded(&key))).await {
        Ok(plan) => plan,
        Err(error) => return screen.failed("Replay plan", &error),
    };
    let content = html! {
        p { (state_badge(&plan)) }
        (why::panel(&screen.user, WhySubject::Plan(&plan), &plan["why"]))
        div.buttons { (buttons(&screen, &plan, &key)) }
        (counters(&plan))
        h2 { "What" }
        (what(&plan))
    };
    screen.page(ScreenContent {
        title: format!("Replay plan {key}"),
        path: vec![("Replay plans".to_owned(), "/console/plans".to_owned())],
        command: format!("headwater plan show {}", shell_word(&key)),
        content: live("plan", &content),
    })
}

fn counters(plan: &Value) -> Markup {
    let counter = |name: &str| plan[name].as_u64().unwrap_or(0);
    let total = counter("total");
    let ended = counter("settled") + counter("failed") + counter("skipped") + counter("unknown");
    let step = &plan["step"];
    let of_step = |name: &str| step[name].as_u64().unwrap_or(0);
    let kind = if field(step, "kind") == "canary" { "canary" } else { "ramp" };
    let same = match counter("failed_same_cause") {
        0 => String::new(),
        same => format!(", {} with the same cause", number(same)),
    };
    html! {
        p {
            label for="ended" { "With an outcome: " (number(ended)) " of " (number(total)) " " }
            progress #ended max=(total.max(1)) value=(ended.min(total)) { (number(ended)) }
        }
        (facts(&[
            ("Total", html! { (number(total)) }),
            ("Sent", html! { (number(counter("sent"))) }),
            ("Settled by their group", html! { (number(counter("settled"))) }),
            ("Failed again", html! { (number(counter("failed"))) (same) }),
            ("Awaited", html! { (number(counter("awaited"))) }),
            ("Left", html! { (number(counter("left"))) }),
            ("Left out", html! { (number(counter("skipped"))) }),
            ("Outcome unknown", html! { (number(counter("unknown"))) }),
            ("Step", html! {
                (number(of_step("number"))) ", " (kind) ": " (number(of_step("sent"))) " of "
                (counted(of_step("letters"), "letter", "letters")) " at " (number(of_step("per_second"))) " per second, "
                (number(of_step("failed"))) " failed"
            }),
        ]))
    }
}

fn what(plan: &Value) -> Markup {
    let filter: Vec<String> = ["reason", "key", "partition", "from", "to"]
        .iter()
        .filter(|name| !plan["filter"][**name].is_null())
        .map(|name| format!("{name} {}", plain(&plan["filter"][*name])))
        .collect();
    html! {
        (facts(&[
            ("Topics", html! {
                @for topic in items(plan, "topics") {
                    @let name = plain(topic);
                    a href={ "/console/topics/" (encoded(&name)) "/dead-letters" } { (id(&name)) } " "
                }
            }),
            ("Filter", html! {
                @if filter.is_empty() { span.quiet { "–" } } @else { (excerpt(&filter.join(", "))) }
            }),
            ("Made by", excerpt(field(plan, "created_by"))),
            ("Made", time(&plan["created_at"])),
            ("State since", time(&plan["changed_at"])),
            ("Process", html! {
                @match plan["process"].as_str() { Some(name) => (id(name)), None => span.quiet { "–" } }
            }),
        ]))
        @if let Some(cause) = plan["cause"].as_str() { h2 { "Cause" } (block(cause)) }
    }
}

/// The panel above has the button that resumes it.
fn buttons(screen: &Screen, plan: &Value, key: &str) -> Markup {
    let act = |verb: &str, label: &str, style| {
        let path = format!("/console/do/plans/{}/{verb}", encoded(key));
        action(&screen.user, ConsoleRole::Write, (&path, label, style), &[])
    };
    let state = field(plan, "state");
    html! {
        @if state == "running" { (act("pause", "Pause", ButtonStyle::Primary)) }
        @if matches!(state, "running" | "paused" | "stopped") { (act("cancel", "Cancel plan…", ButtonStyle::Danger)) }
    }
}
