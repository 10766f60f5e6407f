//! Runs of an issue: when each was claimed, by which worker, how it ended, what the model did, and what it wrote.
//!
//! Upstream: the screens of an issue and of a ticket. Downstream: the route `/issues/ID/timeline`, and the sessions of the runs.

use maud::{Markup, html};
use serde_json::Value;

use crate::api_client::Part;
use crate::components::{Tone, badge, block, empty, excerpt, id, json_block, problem, time};
use crate::screen::Screen;
use crate::text::{counted, duration, encoded, field, items, number, plain};

/// Runs on a page of an issue and of a ticket.
const RUNS: usize = 10;

/// Steps of a session that are shown with its run; the session has all of them.
const STEPS: usize = 50;

/// The runs of an issue, the newest one with the steps of its session. Those of the others are behind a link: an open page reads
/// all of it each second.
pub(crate) struct RunsPart {
    timeline: Part,
    /// Of the newest run that called a model.
    steps: Option<RunSteps>,
}

/// The steps of a run.
struct RunSteps {
    epoch: Value,
    steps: Part,
}

impl RunsPart {
    /// Reads a page of runs, and the session of the newest one that called a model.
    pub(crate) async fn read(screen: &Screen, issue: &str, cursor: &str) -> Self {
        let path = format!("/issues/{}/timeline?limit={RUNS}&{cursor}", encoded(issue));
        let timeline = screen.api.get(&path).await;
        let mut runs = timeline.iter().flat_map(|timeline| items(timeline, "runs"));
        let newest = runs.find_map(|run| Some((run["epoch"].clone(), session_of(run)?)));
        let steps = match newest {
            None => None,
            Some((epoch, session)) => {
                let path = format!("/sessions/{}/events?limit={STEPS}", encoded(session));
                Some(RunSteps { epoch, steps: screen.api.get(&path).await })
            }
        };
        Self { timeline, steps }
    }

    /// The list, newest first.
    pub(crate) fn list(&self, screen: &Screen) -> Markup {
        let timeline = match &self.timeline {
            Err(error) => return problem("The runs", error, screen),
            Ok(timeline) => timeline,
        };
        let runs = items(timeline, "runs");
        html! {
            @if let Some(running) = timeline["running"].as_object() {
                @let running = Value::Object(running.clone());
                div.item data-key="running" {
                    p {
                        "Run " (plain(&running["epoch"])) " " (badge(Tone::Active, "in progress")) " "
                        span.quiet { "claimed " (time(&running["claimed_at"])) " by " (excerpt(field(&running, "worker"))) }
                    }
                }
            } @else if runs.is_empty() {
                (empty("No run has ended yet.", None))
            }
            @for run in runs {
                @let steps = self.steps.as_ref().filter(|steps| steps.epoch == run["epoch"]);
                (run_item(run, steps.map(|steps| &steps.steps)))
            }
        }
    }

    /// Cursor of the next page, or null.
    pub(crate) fn next(&self) -> &Value {
        match &self.timeline {
            Ok(timeline) => &timeline["next_cursor"],
            Err(_) => &Value::Null,
        }
    }
}

/// The session of a run; `None` if it called no model.
fn session_of(run: &Value) -> Option<&str> {
    items(run, "models").iter().rev().find_map(|model| model["session"].as_str())
}

fn result_badge(result: &str) -> Markup {
    let tone = match result {
        "done" => Tone::Good,
        "failed" | "quarantined" => Tone::Bad,
        "deferred" | "expired" | "fenced" => Tone::Warning,
        _ => Tone::Neutral,
    };
    badge(tone, result)
}

fn run_item(run: &Value, steps: Option<&Part>) -> Markup {
    let epoch = plain(&run["epoch"]);
    let models = items(run, "models");
    let tokens: u64 = models.iter().map(|model| sum(model, &["tokens_in", "tokens_out"])).sum();
    html! {
        details.item data-key={ "run-" (epoch) } {
            summary {
                "Run " (epoch) " " (result_badge(field(run, "result"))) " "
                span.quiet {
                    (time(&run["ended_at"])) " · "
                    (counted(run["processed_events"].as_u64().unwrap_or(0), "event", "events"))
                    @if tokens > 0 { " · " (counted(tokens, "token", "tokens")) }
                }
            }
            p { (excerpt_reason(field(run, "reason"))) }
            ol.timeline {
                @for event in items(run, "events") {
                    li {
                        "Event " (id(&plain(&event["id"]))) " " strong { (excerpt(field(event, "event_type"))) }
                        " from " (excerpt(field(event, "source"))) " " span.quiet { (time(&event["created_at"])) }
                    }
                }
                li {
                    "Claimed by " (id(field(run, "worker"))) ", epoch " (epoch)
                    @if let Some(wait) = run["wait_ms"].as_u64() { ", after a wait of " (duration(wait)) }
                    " " span.quiet { (time(&run["claimed_at"])) }
                }
                @for model in models { li { (model_line(model)) } }
                @match (steps, session_of(run)) {
                    (Some(steps), _) => li { (session_steps(steps)) },
                    (None, Some(session)) => li {
                        a href={ "/console/sessions/" (encoded(session)) } { "Prompts, tool calls and answers of this run" }
                    },
                    (None, None) => {}
                }
                li {
                    "Ended after " (duration(run["duration_ms"].as_u64().unwrap_or(0))) ": " (field(run, "result"))
                    " " span.quiet { (time(&run["ended_at"])) }
                }
                @for row in items(run, "outbox") { li { (outbox_line(row)) } }
            }
        }
    }
}

fn sum(object: &Value, names: &[&str]) -> u64 {
    names.iter().filter_map(|name| object[*name].as_u64()).sum()
}

fn excerpt_reason(reason: &str) -> Markup {
    html! { bdi { (crate::text::visible(crate::text::cut(reason, 1000).0)) } }
}

fn model_line(model: &Value) -> Markup {
    let version = match model["prompt_version"].as_u64().unwrap_or(0) {
        0 => "the built-in prompt".to_owned(),
        version => format!("prompt version {version}"),
    };
    let calls = model["calls"].as_u64().unwrap_or(0);
    html! {
        "Model " strong { (excerpt(field(model, "model"))) } ", " (version) ", "
        (counted(calls, "call", "calls")) ": "
        (number(sum(model, &["tokens_in"]))) " tokens in, " (number(sum(model, &["tokens_out"]))) " out"
        @if let Some(cost) = model["cost"].as_f64() { ", cost " (format!("{cost:.4}")) }
        @if model["result"] != "done" { " " (badge(Tone::Neutral, &field(model, "result").replace('_', " "))) }
        @if let Some(session) = model["session"].as_str() {
            ", " a href={ "/console/sessions/" (encoded(session)) } { "session" }
        }
    }
}

/// Tool calls and answers of a session.
fn session_steps(steps: &Part) -> Markup {
    let page = match steps {
        Err(error) if error.is_not_found() => {
            return html! { span.quiet { "The steps of the session are not stored yet, or were deleted after " code { "retention.sessions" } "." } };
        }
        Err(error) => {
            return html! { span.quiet { "The steps of the session cannot be read: " (excerpt(&error.message)) } };
        }
        Ok(page) => page,
    };
    html! {
        @for step in items(page, "events") {
            @let payload = &step["payload"];
            @match field(step, "type").rsplit('.').next().unwrap_or_default() {
                "ToolInvoked" => {
                    details data-key=(field(step, "id")) {
                        summary {
                            "Tool " strong { (excerpt(field(payload, "name"))) } " "
                            @if payload["result"]["success"] == true { (badge(Tone::Good, "ok")) } @else { (badge(Tone::Bad, "failed")) }
                            " " span.quiet { (excerpt(&plain(&payload["params"]))) }
                        }
                        p { "Arguments" } (json_block(&payload["params"]))
                        p { "Result" } (block(field(&payload["result"], "message")))
                    }
                }
                "PromptExecuted" => {
                    details data-key=(field(step, "id")) {
                        summary { "Answer of the model " span.quiet { (excerpt(&plain(&payload["result"]["text"]))) } }
                        (block(&plain(&payload["result"]["text"])))
                    }
                }
                "PromptRendered" => {
                    details data-key=(field(step, "id")) {
                        summary { "Prompt " span.quiet { (excerpt(field(payload, "rendered_prompt"))) } }
                        (block(field(payload, "rendered_prompt")))
                    }
                }
                _ => {}
            }
        }
        @if !page["next_cursor"].is_null() { p.quiet { "The session has further steps." } }
    }
}

fn outbox_line(row: &Value) -> Markup {
    let number = plain(&row["id"]);
    let (tone, status) = match field(row, "status") {
        "delivered" => (Tone::Good, "delivered"),
        "dead" => (Tone::Bad, "dead"),
        other => (Tone::Warning, other),
    };
    let what = match (field(row, "kind"), field(row, "target")) {
        (_, "headwater.session_steps") => "Steps of the session",
        ("reply", _) => "Reply",
        _ => "Event",
    };
    html! {
        (what) " " a href={ "/console/outbox/" (number) } { (id(&number)) } " " (badge(tone, status)) " "
        @if row["delivered_at"].is_null() {
            @if let Some(error) = row["error"].as_str() { (excerpt(error)) }
        } @else {
            span.quiet { "posted " (time(&row["delivered_at"])) }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::extract::Path;
    use axum::routing::get;
    use axum::{Json, Router};
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn the_steps_of_the_newest_run_are_shown_and_those_of_the_others_are_linked() {
        let run = |epoch: u64| {
            let session = (epoch < 9).then(|| format!("s-{epoch}"));
            json!({"epoch": epoch, "result": "done", "models": [{"model": "m", "session": session}]})
        };
        let timeline: Vec<Value> = (1..10).rev().map(run).collect();
        let timeline = move || async move { Json(json!({"runs": timeline})) };
        let reads = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&reads);
        let events = move |Path(session): Path<String>| async move {
            counted.fetch_add(1, Ordering::SeqCst);
            let payload = json!({"rendered_prompt": format!("Prompt of {session}.")});
            Json(json!({"events": [{"id": "1-0", "type": "PromptRendered", "payload": payload}]}))
        };
        let api = Router::new()
            .route("/api/v1/issues/7/timeline", get(timeline))
            .route("/api/v1/sessions/{session}/events", get(events));
        let screen = Screen::for_test(api, "/console/issues/7");
        let runs = RunsPart::read(&screen, "7", "").await;
        assert_eq!(reads.load(Ordering::SeqCst), 1);
        // Run 9 called no model.
        let shown = runs.list(&screen).into_string();
        assert!(shown.contains("Prompt of s-8."), "{shown}");
        assert_eq!(shown.matches("Prompts, tool calls and answers of this run").count(), 7);
        assert!(shown.contains("href=\"/console/sessions/s-7\">Prompts"), "{shown}");
    }
}
