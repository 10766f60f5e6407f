//! Overview: is all well, and what should be done?

use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::api_client::Part;
use crate::chart::{ChartScale, ChartTimes, ChartUnit, chart_lines, time_chart};
use crate::components::{ButtonStyle, Tone, action, badge, choices, empty, live, problem};
use crate::screen::{Screen, ScreenContent};
use crate::text::{duration, encoded, field, items, number};
use crate::user::ConsoleRole;

/// Ranges of the charts: value of the parameter `range`, age of the first step, length of a step.
static RANGES: [(&str, u64, &str); 4] =
    [("15m", 15, "10s"), ("", 60, "1m"), ("6h", 360, "5m"), ("48h", 2880, "30m")];

/// Series of the charts.
const SERIES: &str = "events,runs,run_p50_ms,run_p95_ms,run_p99_ms,queued,outbox_lag_ms,runs_failed,deliveries_failed,dead_letters";

pub(crate) async fn show(screen: Screen) -> Response {
    let (overview, history) = tokio::join!(screen.api.get("/overview"), history(&screen));
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
            h2 { "The last " (range_of(&screen).1) }
            (choices(&screen, "range", &[("15m", "15 minutes"), ("", "1 hour"), ("6h", "6 hours"), ("48h", "48 hours")]))
            // A part of its own: it changes less often.
            (live("charts", &charts(&screen, &history)))
        },
    })
}

fn range_of(screen: &Screen) -> (&'static (&'static str, u64, &'static str), &'static str) {
    let chosen = RANGES.iter().find(|(name, ..)| *name == screen.query.get("range"));
    let range = chosen.unwrap_or(&RANGES[1]);
    let name = match range.0 {
        "15m" => "15 minutes",
        "6h" => "6 hours",
        "48h" => "48 hours",
        _ => "hour",
    };
    (range, name)
}

/// The history of the chosen range. While there is less than two minutes of it, that of this process in steps of ten seconds.
async fn history(screen: &Screen) -> Part {
    let read = async |(_, minutes, step): &(&str, u64, &str)| {
        let from = OffsetDateTime::now_utc() - time::Duration::minutes(*minutes as i64);
        // To the minute, so that viewers share an answer.
        let from = from.replace_second(0).and_then(|from| from.replace_nanosecond(0)).ok();
        let from = from.and_then(|from| from.format(&Rfc3339).ok()).unwrap_or_default();
        let path = format!("/history?series={SERIES}&from={}&step={step}", encoded(&from));
        screen.api.get(&path).await
    };
    let history = read(range_of(screen).0).await?;
    if items(&history, "points").len() < 2 && history["step_ms"] == 60_000 {
        return read(&RANGES[0]).await;
    }
    Ok(history)
}

fn charts(screen: &Screen, history: &Part) -> Markup {
    let history = match history {
        Ok(history) => history,
        Err(error) => return problem("The history", error, screen),
    };
    let times = ChartTimes::of(history).filter(|_| !items(history, "points").is_empty());
    let Some(times) = times else {
        let sentence = "There is no history of this time yet. A process records its first values ten seconds after its start.";
        return empty(sentence, None);
    };
    let chart = |title: &str, unit, scale, series: &[(&str, &'static str)]| {
        time_chart(title, unit, scale, &times, &chart_lines(history, series))
    };
    let (linear, logarithmic) = (ChartScale::Linear, ChartScale::Logarithmic);
    let (count, milliseconds) = (ChartUnit::Count, ChartUnit::Milliseconds);
    let per_step = match history["step_ms"].as_u64().unwrap_or_default() / 1000 {
        60 => "per minute".to_owned(),
        seconds if seconds.is_multiple_of(60) => format!("per {} minutes", seconds / 60),
        seconds => format!("per {seconds} seconds"),
    };
    html! {
        div.charts {
            (chart(&format!("Events in and runs done, {per_step}"), count, linear, &[("events", "events in"), ("runs", "runs done")]))
            (chart("Time of a run", milliseconds, logarithmic, &[("run_p50_ms", "half within"), ("run_p95_ms", "95 % within"), ("run_p99_ms", "99 % within")]))
            (chart("Queued issues", count, linear, &[("queued", "queued")]))
            (chart("Lag: age of the oldest reply to deliver", milliseconds, logarithmic, &[("outbox_lag_ms", "oldest reply")]))
            (chart(&format!("Failures, {per_step}"), count, linear, &[("runs_failed", "runs"), ("deliveries_failed", "deliveries"), ("dead_letters", "dead letters")]))
        }
        p.quiet {
            @if field(history, "scope") == "process" { "Of this process. " } @else { "Of all processes. " }
            @if let Some(problem) = history["problem"].as_str() { "Incomplete: " (problem) ". " }
            "A dashed vertical line is the start of a process; a gap is a time without samples. " code { "headwater history" }
        }
    }
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
        (tiles(overview))
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
                    "outbox_lag" => { a.button href="/console/outbox" { "Show the outbox" } }
                    _ => { a.button href="/console/doctor" { "Open Doctor" } }
                }
            }
        }
    }
}

fn tiles(overview: &Value) -> Markup {
    let count = |part: &str, name: &str| overview[part][name].as_u64().map(number);
    let time = |part: &str, name: &str| overview[part][name].as_u64().map(duration);
    let more = if overview["topics"]["complete"] == false { "+" } else { "" };
    let topics = |name: &str| count("topics", name).map(|count| count + more);
    // The budget is one of each integration; the one that has used the most counts.
    let tokens = overview["tokens"]["most_used"].as_u64().map(|most| {
        let max = overview["tokens"]["max"].as_u64().unwrap_or(0).max(1);
        format!("{} %", most.saturating_mul(100) / max)
    });
    let tiles = [
        ("Queued issues", count("issues", "queued"), "/console/issues?status=queued"),
        ("Running", count("issues", "processing"), "/console/issues?status=processing"),
        ("Quarantined", count("issues", "quarantined"), "/console/issues?quarantined=true"),
        ("Replies to deliver", count("outbox", "pending"), "/console/outbox"),
        ("Oldest reply waits", time("outbox", "lag_ms"), "/console/outbox"),
        ("Dead replies", count("outbox", "dead"), "/console/outbox"),
        ("Consumer lag", topics("lag"), "/console/topics"),
        ("Dead letters", topics("dead_letters"), "/console/failures"),
        ("Workers", count("workers", "alive"), "/console/processes"),
        ("Token budget used today", tokens, "/console/reports"),
    ];
    html! {
        h2.visually-hidden { "Numbers" }
        ul.tiles {
            @for (name, value, address) in tiles {
                li { a href=(address) {
                    span.label { (name) }
                    @match value { Some(value) => strong { (value) }, None => strong.unknown { "unknown" } }
                } }
            }
        }
    }
}
