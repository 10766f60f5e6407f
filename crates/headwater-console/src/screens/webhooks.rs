//! Webhooks: what became of those that this process received.

use axum::response::Response;
use maud::html;

use crate::components::{Tone, badge, count, empty, excerpt, id, live, problem, table, time};
use crate::screen::{Screen, ScreenContent};
use crate::text::{field, items};

pub(crate) async fn show(screen: Screen) -> Response {
    let content = match screen.api.get("/webhooks").await {
        Err(error) => problem("The webhooks", &error, &screen),
        Ok(page) => html! {
            @if items(&page, "integrations").is_empty() {
                (empty("No integration receives webhooks. Add one to the settings:", Some("[[integration]]")))
            } @else {
                (table("Integrations", &["Integration", "Address", "Recorded", "Duplicate", "Ignored", "Rejected", "Last"], &html! {
                    @for one in items(&page, "integrations") {
                        tr data-key=(field(one, "integration")) {
                            th scope="row" { (id(field(one, "integration"))) }
                            td { (id(field(one, "path"))) }
                            (count(&one["recorded"])) (count(&one["duplicate"])) (count(&one["ignored"])) (count(&one["rejected"]))
                            td { (time(&one["last_at"])) }
                        }
                    }
                }))
            }
            @if !items(&page, "recent").is_empty() {
                h2 { "Rejected and ignored" }
                (table("Rejected and ignored", &["Time", "Integration", "Result", "Reason"], &html! {
                    @for one in items(&page, "recent") {
                        tr {
                            td { (time(&one["at"])) }
                            td { (excerpt(field(one, "integration"))) }
                            td { @if one["result"] == "rejected" { (badge(Tone::Bad, "rejected")) } @else { (badge(Tone::Neutral, "ignored")) } }
                            td { (excerpt(field(one, "reason"))) }
                        }
                    }
                }))
            }
            p.quiet { "Since this process started. Each process counts its own." }
        },
    };
    screen.page(ScreenContent {
        title: "Webhooks".to_owned(),
        path: Vec::new(),
        command: "headwater webhook list".to_owned(),
        content: live("webhooks", &content),
    })
}
