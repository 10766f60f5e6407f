//! Processes, Doctor and Settings.

use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{Tone, badge, count, empty, excerpt, id, live, problem, table, time};
use crate::screen::{Screen, ScreenContent};
use crate::text::{field, items, plain};

pub(crate) async fn processes(screen: Screen) -> Response {
    let content = match screen.api.get("/processes").await {
        Err(error) => problem("The processes", &error, &screen),
        Ok(page) if items(&page, "processes").is_empty() => {
            empty("No process works on issues. Start one:", Some("headwater worker"))
        }
        Ok(page) => table(
            "Processes",
            &["Process", "State", "Started", "Last heartbeat", "Claims"],
            &html! {
                @for process in items(&page, "processes") {
                    tr data-key=(field(process, "name")) {
                        th scope="row" { (id(field(process, "name"))) }
                        td { @if process["alive"] == true { (badge(Tone::Good, "alive")) } @else { (badge(Tone::Bad, "no heartbeat")) } }
                        td { (time(&process["started_at"])) }
                        td { (time(&process["seen_at"])) }
                        (count(&process["claims"]))
                    }
                }
            },
        ),
    };
    screen.page(ScreenContent {
        title: "Processes".to_owned(),
        path: Vec::new(),
        command: "headwater process list".to_owned(),
        content: live("processes", &content),
    })
}

pub(crate) async fn doctor(screen: Screen) -> Response {
    let content = match screen.api.get("/doctor").await {
        Err(error) => problem("The checks", &error, &screen),
        Ok(found) => findings(&found),
    };
    screen.page(ScreenContent {
        title: "Doctor".to_owned(),
        path: Vec::new(),
        command: "headwater doctor".to_owned(),
        // Not live: the checks read all rows.
        content: html! { (content) p { a.button href="/console/doctor" { "Check again" } } },
    })
}

fn findings(found: &Value) -> Markup {
    let mut all: Vec<&Value> = items(found, "findings").iter().collect();
    let rank = |finding: &Value| match field(finding, "severity") {
        "unreachable" => 0,
        "error" => 1,
        "warning" => 2,
        _ => 3,
    };
    all.sort_by_key(|finding| rank(finding));
    table(
        "Findings",
        &["Result", "Subject", "Found", "What to do"],
        &html! {
            @for finding in all {
                tr {
                    td { @match field(finding, "severity") {
                        "ok" => (badge(Tone::Good, "ok")),
                        "warning" => (badge(Tone::Warning, "warning")),
                        other => (badge(Tone::Bad, other)),
                    } }
                    th scope="row" { (excerpt(field(finding, "subject"))) }
                    td { (long(field(finding, "found"))) }
                    td { (long(field(finding, "advice"))) }
                }
            }
        },
    )
}

fn long(text: &str) -> Markup {
    html! { bdi { (crate::text::visible(crate::text::cut(text, 2000).0)) } }
}

pub(crate) async fn settings(screen: Screen) -> Response {
    let content = match screen.api.get("/settings").await {
        Err(error) => problem("The settings", &error, &screen),
        Ok(page) => html! {
            (table("Settings", &["Setting", "Value", "From", "Meaning"], &html! {
                @for setting in items(&page, "settings") {
                    tr {
                        th scope="row" { (id(field(setting, "name"))) }
                        td { (id(field(setting, "value"))) }
                        td { @if setting["source"] == "default" { span.quiet { "default" } } @else { strong { (field(setting, "source")) } } }
                        td { (long(field(setting, "description"))) }
                    }
                }
            }))
            h2 { "Integrations" }
            @if items(&page, "integrations").is_empty() { (empty("No integration is configured.", None)) }
            @else {
                (table("Integrations", &["Integration", "Provider", "Base URL"], &html! {
                    @for one in items(&page, "integrations") {
                        tr { th scope="row" { (id(field(one, "id"))) } td { (field(one, "provider")) } td { (excerpt(&plain(&one["base_url"]))) } }
                    }
                }))
            }
            h2 { "Tokens" }
            @if items(&page, "tokens").is_empty() { (empty("No token is configured: only this machine is served.", None)) }
            @else {
                (table("Tokens", &["Token", "Role"], &html! {
                    @for token in items(&page, "tokens") {
                        tr { th scope="row" { (id(field(token, "name"))) } td { (field(token, "role")) } }
                    }
                }))
            }
        },
    };
    screen.page(ScreenContent {
        title: "Settings".to_owned(),
        path: Vec::new(),
        command: "headwater process settings".to_owned(),
        content,
    })
}
