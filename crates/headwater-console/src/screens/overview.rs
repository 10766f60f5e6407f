//! Overview: is all well, and what should be done?

use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::chart::{
    ChartScale, ChartTimes, ChartUnit, LINES_MAX, chart_lines, heat_map, time_chart,
};
use crate::components::{ButtonStyle, Tone, action, as_of, badge, choices, live, problem};
use crate::screen::{Screen, ScreenContent};
use crate::screens::history::{self, HOUR, QUARTER, per_step};
use crate::text::{duration, field, items, number};
use crate::user::ConsoleRole;

/// Ranges of the charts: value of the parameter `range`, its name, age of the first step in minutes and length of a step.
static RANGES: [(&str, &str, (u64, &str)); 4] = [
    ("15m", "15 minutes", QUARTER),
    ("", "hour", HOUR),
    ("6h", "6 hours", (360, "5m")),
    ("48h", "48 hours", (2880, "30m")),
];

/// Series of the charts.
const SERIES: &str = "events,runs,run_p50_ms,run_p95_ms,run_p99_ms,run_times,queued,oldest_wait_ms,outbox_lag_ms,runs_failed,\
    model_failures,deliveries_refused,deliveries_away,dead_letters_handler,dead_letters_crashes,dead_letters_malformed";

/// The replies that wait for their delivery; without a state the outbox lists the dead ones.
const TO_DELIVER: &str = "/console/outbox?status=pending";

/// What fails: series and cause.
const CAUSES: [(&str, &str); 7] = [
    ("runs_failed", "run failed"),
    ("model_failures", "model call failed"),
    ("deliveries_refused", "receiver refused a reply"),
    ("deliveries_away", "receiver does not answer"),
    ("dead_letters_handler", "handler of a message failed"),
    ("dead_letters_crashes", "consumer crashed"),
    ("dead_letters_malformed", "message malformed"),
];

// Each cause is drawn.
const _: () = assert!(CAUSES.len() <= LINES_MAX);

pub(crate) async fn show(screen: Screen) -> Response {
    let range = RANGES.iter().find(|(value, ..)| *value == screen.query.get("range"));
    let (_, name, range) = range.unwrap_or(&RANGES[1]);
    let selection = format!("series={SERIES}");
    let (overview, history) =
        tokio::join!(screen.api.get("/overview"), history::read(&screen, &selection, *range));
    let content = match overview {
        Ok(overview) => content(&screen, &overview),
        Err(error) => problem("The overview", &error, &screen),
    };
    screen.page(ScreenContent {
        title: "Overview".to_owned(),
        path: Vec::new(),
        command: "headwater overview".to_owned(),
        content: html! {
            (live("overview", &content))
            h2 { "The last " (name) }
            (choices(&screen, "range", &[("15m", "15 minutes"), ("", "1 hour"), ("6h", "6 hours"), ("48h", "48 hours")], &[]))
            // A part of its own: it changes less often.
            (live("charts", &history::charts(&screen, &history, charts)))
        },
    })
}

fn charts(history: &Value, times: &ChartTimes) -> Markup {
    let chart = |title: &str, unit, scale, series: &[(&str, &str)]| {
        time_chart(title, unit, scale, times, &chart_lines(history, series))
    };
    let (linear, logarithmic) = (ChartScale::Linear, ChartScale::Logarithmic);
    let (count, milliseconds) = (ChartUnit::Count, ChartUnit::Milliseconds);
    let per_step = per_step(history);
    html! {
        (chart(&format!("Events in and runs done, {per_step}"), count, linear, &[("events", "events in"), ("runs", "runs done")]))
        (chart("Time of a run", milliseconds, logarithmic, &[("run_p50_ms", "half within"), ("run_p95_ms", "95 % within"), ("run_p99_ms", "99 % within")]))
        (heat_map(&format!("How long runs took, {per_step}"), times, history, "run_times"))
        (chart("Queued issues", count, linear, &[("queued", "queued")]))
        (chart("Lag: age of the oldest", milliseconds, logarithmic, &[("oldest_wait_ms", "queued issue"), ("outbox_lag_ms", "reply to deliver")]))
        (failures(history, times, &per_step))
    }
}

/// Failures by cause: those that occur, or all if none does.
fn failures(history: &Value, times: &ChartTimes, per_step: &str) -> Markup {
    let mut lines = chart_lines(history, &CAUSES);
    if lines.iter().any(|line| line.has_values()) {
        lines.retain(|line| line.has_values());
    }
    let title = format!("Failures by cause, {per_step}");
    time_chart(&title, ChartUnit::Count, ChartScale::Linear, times, &lines)
}

fn content(screen: &Screen, overview: &Value) -> Markup {
    let problems = items(overview, "problems");
    let tone = match field(overview, "status") {
        "ok" => Tone::Good,
        "warning" => Tone::Warning,
        _ => Tone::Bad,
    };
    html! {
        section class={ "verdict " (match tone { Tone::Good => "good", Tone::Warning => "warning", _ => "bad" }) } {
            h2 { (field(overview, "verdict")) }
            @if !problems.is_empty() {
                ul.problems {
                    @for found in problems { (problem_line(screen, found)) }
                }
            }
        }
        (tiles(screen, overview))
        h2 { "Dependencies" }
        ul.dependencies {
            @for found in items(overview, "dependencies") {
                li {
                    @if found["ok"] == true { (badge(Tone::Good, "ok")) } @else { (badge(Tone::Bad, "unavailable")) }
                    " " strong { (field(found, "name")) } " " span.quiet { (field(found, "kind")) }
                    @if let Some(reason) = found["reason"].as_str() { " " (reason) }
                }
            }
        }
    }
}

fn problem_line(screen: &Screen, found: &Value) -> Markup {
    let tone = if found["level"] == "error" { Tone::Bad } else { Tone::Warning };
    let code = field(found, "code");
    html! {
        li data-code=(code) {
            (badge(tone, if tone == Tone::Bad { "act now" } else { "look" }))
            span { (field(found, "sentence")) }
            span.buttons {
                @match code {
                    "quarantined" => {
                        a.button href="/console/issues?quarantined=true" { "Show them" }
                        (action(&screen.user, ConsoleRole::Write, ("/console/do/issues/release", "Release all…", ButtonStyle::Plain), &[]))
                    }
                    "dead_replies" => {
                        a.button href="/console/outbox" { "Show them" }
                        (action(&screen.user, ConsoleRole::Write, ("/console/do/outbox/retry", "Retry all…", ButtonStyle::Plain), &[]))
                    }
                    "dead_letters" => { a.button href="/console/failures" { "Show by cause" } }
                    "no_worker" => { a.button href="/console/processes" { "Show processes" } }
                    "outbox_lag" => { a.button href=(TO_DELIVER) { "Show those to deliver" } }
                    _ => { a.button href="/console/doctor" { "Open Doctor" } }
                }
            }
        }
    }
}

fn tiles(screen: &Screen, overview: &Value) -> Markup {
    // What a dependency that does not answer said last, with its age.
    let parts = ["issues", "outbox", "workers", "topics", "tokens"].map(|name| {
        let known = screen.api.or_last(&format!("/overview#{name}"), &overview[name]);
        (name, known)
    });
    let part = |name: &str| {
        let found = parts.iter().find(|(part, _)| *part == name);
        found.and_then(|(_, known)| known.as_ref())
    };
    let value = |of: &str, name: &str| part(of).and_then(|(part, _)| part[name].as_u64());
    let count = |of: &str, name: &str| value(of, name).map(number);
    let time = |of: &str, name: &str| value(of, name).map(duration);
    let is_set =
        |of: &str, name: &str, set: bool| part(of).is_some_and(|(part, _)| part[name] == set);
    let or_more = |shown: String, more: bool| if more { shown + "+" } else { shown };
    let topics = |name: &str| {
        let is_more = is_set("topics", "complete", false);
        count("topics", name).map(|count| or_more(count, is_more))
    };
    let oldest_wait = time("issues", "oldest_wait_ms")
        .map(|wait| or_more(wait, is_set("issues", "oldest_wait_or_more", true)));
    // The budget is one of each integration; the one that has used the most counts.
    let tokens = value("tokens", "most_used").map(|most| {
        let max = value("tokens", "max").unwrap_or(0).max(1);
        format!("{} %", most.saturating_mul(100) / max)
    });
    let queued = "/console/issues?status=queued";
    let tiles = [
        ("Queued issues", "issues", count("issues", "queued"), queued),
        ("Oldest wait", "issues", oldest_wait, queued),
        ("Running", "issues", count("issues", "processing"), "/console/issues?status=processing"),
        (
            "Quarantined",
            "issues",
            count("issues", "quarantined"),
            "/console/issues?quarantined=true",
        ),
        ("Replies to deliver", "outbox", count("outbox", "pending"), TO_DELIVER),
        ("Oldest reply waits", "outbox", time("outbox", "lag_ms"), TO_DELIVER),
        ("Dead replies", "outbox", count("outbox", "dead"), "/console/outbox"),
        ("Consumer lag", "topics", topics("lag"), "/console/topics"),
        ("Dead letters", "topics", topics("dead_letters"), "/console/failures"),
        ("Workers", "workers", count("workers", "alive"), "/console/processes"),
        ("Token budget used today", "tokens", tokens, "/console/reports"),
    ];
    html! {
        h2.visually-hidden { "Numbers" }
        ul.tiles {
            @for (name, of, value, address) in tiles {
                li { a href=(address) {
                    span.label { (name) }
                    @match value { Some(value) => strong { (value) }, None => strong.unknown { "unknown" } }
                    @if let Some(age) = part(of).and_then(|(_, age)| *age) { span.age { (as_of(age)) } }
                } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn each_problem_has_its_buttons() {
        let screen = Screen::for_test(Router::new(), "/console");
        let expected: [(&str, &[&str]); 8] = [
            ("quarantined", &["/console/issues?quarantined=true", "/console/do/issues/release"]),
            ("dead_replies", &["/console/outbox", "/console/do/outbox/retry"]),
            ("dead_letters", &["/console/failures"]),
            ("no_worker", &["/console/processes"]),
            ("outbox_lag", &["/console/outbox?status=pending"]),
            ("database_unavailable", &["/console/doctor"]),
            ("streams_unavailable", &["/console/doctor"]),
            ("topics_unavailable", &["/console/doctor"]),
        ];
        for (code, parts) in expected {
            let found = json!({"level": "error", "code": code, "sentence": "Something is wrong."});
            let line = problem_line(&screen, &found).into_string();
            let leads_to = |part: &&&str| line.contains(&format!("=\"{part}\""));
            assert_eq!(parts.iter().filter(leads_to).count(), parts.len(), "{code}: {line}");
            assert_eq!(line.matches("class=\"button\"").count(), parts.len(), "{code}: {line}");
        }
    }
}
