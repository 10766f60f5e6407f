//! The audit log: who changed what, and when.

use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{
    Tone, badge, empty, excerpt, id, live, pager, problem, search_pager, table, time_with_utc,
};
use crate::screen::{Screen, ScreenContent};
use crate::screens::ROWS;
use crate::text::{field, items, shell_word};

/// Names of the filter.
const FILTER: [&str; 3] = ["caller", "path", "from"];

pub(crate) async fn list(screen: Screen) -> Response {
    let filter = screen.query.query_of(&[&FILTER[..], &["cursor"]].concat());
    let is_filtered = FILTER.iter().any(|name| !screen.query.get(name).is_empty());
    let content = match screen.api.get(&format!("/audit?limit={ROWS}&{filter}")).await {
        Err(error) => problem("The audit log", &error, &screen),
        Ok(page) => entries(&screen, &page, is_filtered),
    };
    let mut command = "headwater audit log".to_owned();
    for name in FILTER.iter().filter(|name| !screen.query.get(name).is_empty()) {
        command += &format!(" --{name} {}", shell_word(screen.query.get(name)));
    }
    let content = html! {
        form.filters.inline action="/console/audit" {
            label for="caller" { "Who" }
            input #caller name="caller" value=(screen.query.get("caller")) maxlength="200";
            label for="path" { "What contains" }
            input #path name="path" value=(screen.query.get("path")) placeholder="purge" maxlength="200";
            label for="from" { "From" }
            input #from name="from" value=(screen.query.get("from")) placeholder="time" size="20" maxlength="60";
            button.button type="submit" { "Filter" }
        }
        // Not live with a filter: it compares many entries.
        @if is_filtered { (content) } @else { (live("audit", &content)) }
    };
    screen.page(ScreenContent { title: "Audit".to_owned(), path: Vec::new(), command, content })
}

fn entries(screen: &Screen, page: &Value, is_filtered: bool) -> Markup {
    let next = &page["next_cursor"];
    html! {
        @if !items(page, "entries").is_empty() {
            (table("Changes", &["When", "Who", "Role", "Client", "What", "Result"], &html! {
                @for entry in items(page, "entries") { (row(entry)) }
            }))
        } @else if !is_filtered {
            (empty("Nothing has been changed through the API yet.", None))
        } @else if next.is_null() {
            (empty("No change matches.", None))
        }
        @match page["searched"].as_u64() {
            Some(searched) => (search_pager(screen, &FILTER, (searched, "entry", "entries"), next)),
            None => (pager(screen, &[], next)),
        }
    }
}

fn row(entry: &Value) -> Markup {
    html! {
        tr data-key=(field(entry, "id")) {
            td { (time_with_utc(&entry["at"])) }
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
