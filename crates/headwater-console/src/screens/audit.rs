//! The audit log: who changed what, and when.

use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{Tone, badge, empty, excerpt, id, live, pager, problem, table, time};
use crate::screen::{Screen, ScreenContent};
use crate::screens::ROWS;
use crate::text::{field, items};

pub(crate) async fn list(screen: Screen) -> Response {
    let cursor = screen.query.query_of(&["cursor"]);
    let content = match screen.api.get(&format!("/audit?limit={ROWS}&{cursor}")).await {
        Err(error) => problem("The audit log", &error, &screen),
        Ok(page) if items(&page, "entries").is_empty() => {
            empty("Nothing has been changed through the API yet.", None)
        }
        Ok(page) => html! {
            (table("Changes", &["When", "Who", "Role", "Client", "What", "Result"], &html! {
                @for entry in items(&page, "entries") { (row(entry)) }
            }))
            (pager(&screen, &[], &page["next_cursor"]))
        },
    };
    screen.page(ScreenContent {
        title: "Audit".to_owned(),
        path: Vec::new(),
        command: "headwater audit log".to_owned(),
        content: live("audit", &content),
    })
}

fn row(entry: &Value) -> Markup {
    html! {
        tr data-key=(field(entry, "id")) {
            td { (time(&entry["at"])) }
            th scope="row" { (excerpt(field(entry, "caller"))) }
            td { (field(entry, "role")) }
            td { (id(field(entry, "client"))) }
            td { (id(&format!("{} {}", field(entry, "method"), field(entry, "path")))) }
            td { @match entry["status"].as_u64() {
                Some(status @ 200..400) => (badge(Tone::Good, &status.to_string())),
                Some(status) => (badge(Tone::Bad, &status.to_string())),
                None => (badge(Tone::Warning, "interrupted")),
            } }
        }
    }
}
