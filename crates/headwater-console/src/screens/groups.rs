//! One consumer group: members, partitions with their owners, reset and delete.

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{
    ButtonStyle, Tone, badge, banner, button, count, empty, excerpt, facts, id, live, table,
};
use crate::screen::{Screen, ScreenContent};
use crate::screens::history::{self, HOUR};
use crate::screens::known_or_last;
use crate::screens::why::{WhySubject, why_panel};
use crate::text::{counted, duration, encoded, field, items, number, plain, shell_word};
use crate::user::ConsoleRole;

pub(crate) async fn show(screen: Screen, Path((topic, group)): Path<(String, String)>) -> Response {
    let path = format!("/topics/{}/groups/{}", encoded(&topic), encoded(&group));
    let why = format!("{path}/why");
    let of_group = format!("topic={}&group={}", encoded(&topic), encoded(&group));
    let (described, why, history) = tokio::join!(
        screen.api.get(&path),
        screen.api.get(&why),
        history::read(&screen, &of_group, HOUR)
    );
    let (described, is_last) = match known_or_last(&screen, "group", described) {
        Ok(known) => known,
        Err(error) => return screen.failed("Group", &error),
    };
    let action = format!("/console/do{path}");
    let content = html! {
        (live("why", &why_panel(&screen, WhySubject::Group, &why)))
        (live("group", &html! { (is_last) (group_state(&described)) }))
        h2 { "The last hour" }
        (live("charts", &history::charts(&screen, &history, history::topic_charts)))
        h2 { "Move the group" }
        form.inline method="post" action={ (action) "/reset" } {
            label for="to" { "Position" }
            input #to name="to" required placeholder="beginning, end, id or time" maxlength="100";
            (button(&screen.user, ConsoleRole::Admin, ButtonStyle::Danger, "Reset…"))
        }
        h2 { "Delete" }
        form.action method="post" action={ (action) "/delete" } {
            (button(&screen.user, ConsoleRole::Admin, ButtonStyle::Danger, "Delete group…"))
        }
    };
    screen.page(ScreenContent {
        title: group.clone(),
        path: vec![
            ("Topics".to_owned(), "/console/topics".to_owned()),
            (topic.clone(), format!("/console/topics/{}", encoded(&topic))),
        ],
        command: format!("headwater group describe {} {}", shell_word(&topic), shell_word(&group)),
        content,
    })
}

fn group_state(group: &Value) -> Markup {
    let unread = items(group, "unread_partitions").len() as u64;
    html! {
        @if unread > 0 {
            (banner(Tone::Bad, &html! {
                p {
                    (counted(unread, "partition is", "partitions are")) " on a server of the stream backend that does not answer. The numbers lack what waits there."
                }
            }))
        }
        (facts(&[
            ("Lag", html! { (group["lag"].as_u64().map_or("unknown".to_owned(), number)) }),
            ("Pending", html! { (plain(&group["pending"])) }),
            ("Members", html! { (items(group, "members").len()) }),
        ]))
        h2 { "Members" }
        @if items(group, "members").is_empty() {
            (empty("No member is alive.", None))
        } @else {
            (table("Members", &["Member", "Consumer", "Mode", "Heartbeat"], &html! {
                @for member in items(group, "members") {
                    tr data-key=(field(member, "member")) {
                        th scope="row" { (id(field(member, "member"))) }
                        td { (excerpt(&plain(&member["consumer"]))) }
                        td { (field(member, "mode")) }
                        td { @match member["heartbeat_age_ms"].as_u64() { Some(age) => { (duration(age)) " ago" }, None => "–" } }
                    }
                }
            }))
        }
        h2 { "Partitions" }
        (table("Partitions", &["Partition", "Lag", "Pending", "Oldest pending", "Owner", "Epoch", "Lease left", "Last delivered"], &html! {
            @for partition in items(group, "partitions") { (partition_row(partition)) }
        }))
    }
}

/// How old the oldest pending message is, and how often it was delivered.
fn oldest_pending(oldest: &Value) -> Markup {
    let deliveries = oldest["deliveries"].as_u64().unwrap_or(0);
    html! {
        @match oldest["age_ms"].as_u64() {
            None => span.quiet { "–" },
            Some(age) => {
                span title=(field(oldest, "id")) { (duration(age)) }
                @if deliveries > 1 { " " (badge(Tone::Warning, &format!("delivered {deliveries} times"))) }
                @else if oldest["idle_ms"].is_null() { " " (badge(Tone::Neutral, "released")) }
            }
        }
    }
}

fn partition_row(partition: &Value) -> Markup {
    let owner = &partition["owner"];
    html! {
        tr data-key=(plain(&partition["partition"])) {
            th scope="row" { (plain(&partition["partition"])) }
            (count(&partition["lag"]))
            (count(&partition["pending"]))
            td { (oldest_pending(&partition["oldest_pending"])) }
            td {
                @if partition["problem"].is_string() { (badge(Tone::Bad, "its server does not answer")) }
                @else if owner.is_null() { (badge(Tone::Neutral, "no owner")) }
                @else { (excerpt(field(owner, "holder"))) }
            }
            (count(&owner["epoch"]))
            td { @match owner["remaining_ms"].as_u64() { Some(left) => (duration(left)), None => "–" } }
            td { (id(&plain(&partition["last_delivered"]))) }
        }
    }
}
