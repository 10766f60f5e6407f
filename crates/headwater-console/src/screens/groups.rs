//! One consumer group: members, partitions with their owners, reset and delete.

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{
    ButtonStyle, Tone, badge, banner, button, count, empty, excerpt, facts, id, live, table,
};
use crate::screen::{Screen, ScreenContent};
use crate::text::{counted, duration, encoded, field, items, number, plain, shell_word};
use crate::user::ConsoleRole;

pub(crate) async fn show(screen: Screen, Path((topic, group)): Path<(String, String)>) -> Response {
    let path = format!("/topics/{}/groups/{}", encoded(&topic), encoded(&group));
    let described = match screen.api.get(&path).await {
        Ok(described) => described,
        Err(error) => return screen.failed("Group", &error),
    };
    let action = format!("/console/do{path}");
    let content = html! {
        (live("group", &group_state(&described)))
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

/// Why the group waits, in one sentence.
fn why(group: &Value) -> (Tone, String) {
    let (lag, pending) = (group["lag"].as_u64(), group["pending"].as_u64().unwrap_or(0));
    let members = items(group, "members").len();
    let orphans = items(group, "partitions").iter().filter(|partition| {
        let waits =
            partition["lag"].as_u64().unwrap_or(0) + partition["pending"].as_u64().unwrap_or(0);
        partition["owner"].is_null() && waits > 0
    });
    let orphans = orphans.count() as u64;
    let waiting = lag.unwrap_or(0) + pending;
    if waiting == 0 {
        return (Tone::Good, "The group has processed every message.".to_owned());
    }
    let messages = counted(waiting, "message waits", "messages wait");
    if members == 0 {
        let sentence = format!("{messages} because the group has no members: start a consumer.");
        return (Tone::Bad, sentence);
    }
    if orphans > 0 {
        let partitions = counted(orphans, "partition has", "partitions have");
        let sentence = format!(
            "{messages}; {partitions} no owner yet: a rebalance or the end of a lease is awaited."
        );
        return (Tone::Warning, sentence);
    }
    let members = counted(members as u64, "member reads", "members read");
    (Tone::Active, format!("{messages}; {members} the group."))
}

fn group_state(group: &Value) -> Markup {
    let (tone, sentence) = why(group);
    html! {
        (banner(tone, &html! { p { (sentence) } }))
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
        (table("Partitions", &["Partition", "Lag", "Pending", "Owner", "Epoch", "Lease left", "Last delivered"], &html! {
            @for partition in items(group, "partitions") { (partition_row(partition)) }
        }))
    }
}

fn partition_row(partition: &Value) -> Markup {
    let owner = &partition["owner"];
    html! {
        tr data-key=(plain(&partition["partition"])) {
            th scope="row" { (plain(&partition["partition"])) }
            (count(&partition["lag"]))
            (count(&partition["pending"]))
            td { @if owner.is_null() { (badge(Tone::Neutral, "no owner")) } @else { (excerpt(field(owner, "holder"))) } }
            (count(&owner["epoch"]))
            td { @match owner["remaining_ms"].as_u64() { Some(left) => (duration(left)), None => "–" } }
            td { (id(&plain(&partition["last_delivered"]))) }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_group_says_why_it_waits() {
        let group = |lag: u64, members: usize, owner: Value| {
            json!({"lag": lag, "pending": 0, "members": vec![json!({}); members],
                "partitions": [{"partition": 0, "lag": lag, "pending": 0, "owner": owner}]})
        };
        let owner = json!({"holder": "a"});
        assert_eq!(why(&group(0, 0, Value::Null)).0, Tone::Good);
        let (tone, sentence) = why(&group(3, 0, Value::Null));
        assert_eq!(tone, Tone::Bad);
        assert_eq!(sentence, "3 messages wait because the group has no members: start a consumer.");
        assert_eq!(why(&group(1, 1, Value::Null)).0, Tone::Warning);
        assert_eq!(why(&group(1, 1, owner)).1, "1 message waits; 1 member reads the group.");
    }
}
