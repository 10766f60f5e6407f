//! Topics: the list, and one topic with its partitions, groups and policies.

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::api_client::Part;
use crate::components::{
    ButtonStyle, Tone, badge, button, count, empty, excerpt, facts, id, live, pager, problem,
    table, time,
};
use crate::screen::{Screen, ScreenContent};
use crate::screens::ROWS;
use crate::text::{bytes, duration, encoded, field, items, number, plain, shell_word};
use crate::user::ConsoleRole;

/// Delayed messages on the screen of a topic.
const DELAYED_ROWS: usize = 20;

/// A partition with this many times the average length stands out.
const HOT_FACTOR: u64 = 4;

pub(crate) async fn list(screen: Screen) -> Response {
    let cursor = screen.query.query_of(&["cursor"]);
    let content = match screen.api.get(&format!("/topics?lag=true&limit={ROWS}&{cursor}")).await {
        Err(error) => problem("The list of topics", &error, &screen),
        Ok(page) if items(&page, "topics").is_empty() => empty(
            "There are no topics. Create the first one:",
            Some("headwater topic create orders --partitions 4"),
        ),
        Ok(page) => {
            let head = [
                "Topic",
                "Partitions",
                "Messages",
                "Bytes",
                "Worst lag",
                "Delayed",
                "Dead letters",
                "Groups",
                "Created",
            ];
            html! {
                (table("Topics", &head, &html! { @for topic in items(&page, "topics") { (row(topic)) } }))
                (pager(&screen, &[], &page["next_cursor"]))
            }
        }
    };
    screen.page(ScreenContent {
        title: "Topics".to_owned(),
        path: Vec::new(),
        command: "headwater topic list".to_owned(),
        content: live("topics", &content),
    })
}

fn row(topic: &Value) -> Markup {
    let name = field(topic, "name");
    let address = format!("/console/topics/{}", encoded(name));
    let dead = topic["dead_letters"].as_u64().unwrap_or(0);
    html! {
        tr data-key=(name) {
            th scope="row" {
                a href=(address) { (id(name)) }
                @if !topic["deleting_since"].is_null() { " " (badge(Tone::Warning, "being deleted")) }
            }
            (count(&topic["partitions"]))
            (count(&topic["length"]))
            td.count { (topic["bytes"].as_u64().map_or("–".to_owned(), bytes)) }
            (count(&topic["worst_lag"]))
            (count(&topic["delayed"]))
            td.count { @if dead > 0 { a href={ (address) "/dead-letters" } { (number(dead)) } } @else { "0" } }
            td { @for (index, group) in items(topic, "groups").iter().enumerate() {
                @if index > 0 { ", " }
                @let group = group.as_str().unwrap_or_default();
                a href={ (address) "/groups/" (encoded(group)) } { (excerpt(group)) }
            } }
            td { (time(&topic["created_at"])) }
        }
    }
}

pub(crate) async fn show(screen: Screen, Path(topic): Path<String>) -> Response {
    let path = format!("/topics/{}", encoded(&topic));
    let groups_path = format!("{path}/groups");
    let delayed_path = format!("{path}/delayed?limit={DELAYED_ROWS}");
    let (described, groups, delayed) = tokio::join!(
        screen.api.get(&path),
        screen.api.get(&groups_path),
        screen.api.get(&delayed_path)
    );
    let described = match described {
        Ok(described) => described,
        Err(error) => return screen.failed("Topic", &error),
    };
    let address = format!("/console/topics/{}", encoded(&topic));
    let owners = groups.clone().ok();
    let groups = match &groups {
        Err(error) => problem("The groups", error, &screen),
        Ok(page) if items(page, "groups").is_empty() => empty(
            "No group reads this topic. Start one:",
            Some(&format!("headwater consume {} --group billing", shell_word(&topic))),
        ),
        Ok(page) => table(
            "Groups",
            &["Group", "Lag", "Pending", "Members", "State"],
            &html! {
                @for group in items(page, "groups") { (group_row(&address, group)) }
            },
        ),
    };
    let dead = described["dead_letters"].as_u64().unwrap_or(0);
    let content = html! {
        ul.choices {
            li { a href={ (address) "/messages" } { "Messages" } }
            li { a href={ (address) "/dead-letters" } { "Dead letters (" (number(dead)) ")" } }
        }
        (live("numbers", &numbers(&described)))
        h2 { "Groups" }
        (live("groups", &groups))
        h2 { "Partitions" }
        (live("partitions", &partitions(&topic, &described, owners.as_deref().unwrap_or(&Value::Null))))
        (live("delayed", &delayed_messages(&screen, &delayed)))
        h2 { "Policies" }
        (policies(&described["policies"]))
        (produce_form(&screen, &address))
        (grow_form(&screen, &address, items(&described, "partitions").len()))
        (trim_form(&screen, &address))
        h2 { "Delete" }
        form.action method="post" action={ "/console/do/topics/" (encoded(&topic)) "/delete" } {
            (button(&screen.user, ConsoleRole::Admin, ButtonStyle::Danger, "Delete topic…"))
        }
    };
    screen.page(ScreenContent {
        title: topic.clone(),
        path: vec![("Topics".to_owned(), "/console/topics".to_owned())],
        command: format!("headwater topic describe {}", shell_word(&topic)),
        content,
    })
}

fn numbers(topic: &Value) -> Markup {
    let shown = |name: &str| html! { (topic[name].as_u64().map_or("–".to_owned(), number)) };
    html! {
        (facts(&[
            ("Messages", shown("length")),
            ("Bytes", html! { (topic["bytes"].as_u64().map_or("–".to_owned(), bytes)) }),
            ("Delayed", shown("delayed")),
            ("Next due", time(&topic["next_due"])),
            ("Dead letters", shown("dead_letters")),
            ("Partitions", html! { (items(topic, "partitions").len()) }),
            ("Created", time(&topic["created_at"])),
            ("Layout", html! { (field(topic, "layout")) }),
        ]))
        @if topic["is_growing"] == true { p { (badge(Tone::Active, "growing")) " Keys are being moved to new partitions." } }
    }
}

fn group_row(address: &str, group: &Value) -> Markup {
    let name = field(group, "group");
    let members = items(group, "members").len();
    let lag = group["lag"].as_u64().unwrap_or(0) + group["pending"].as_u64().unwrap_or(0);
    html! {
        tr data-key=(name) {
            th scope="row" { a href={ (address) "/groups/" (encoded(name)) } { (id(name)) } }
            (count(&group["lag"]))
            (count(&group["pending"]))
            td { (members) }
            td {
                @if members == 0 && lag > 0 { (badge(Tone::Bad, "no consumers")) }
                @else if members == 0 { (badge(Tone::Neutral, "no members")) }
                @else if lag == 0 { (badge(Tone::Good, "up to date")) }
                @else { (badge(Tone::Active, "reading")) }
            }
        }
    }
}

/// Who owns a partition, for each group that has an owner.
fn partition_owners(groups: &Value, partition: &Value) -> Vec<(String, String)> {
    let owner = |group: &Value| {
        let of_group = items(group, "partitions").iter();
        let found = of_group.into_iter().find(|one| one["partition"] == *partition)?;
        let owner = found["owner"]["holder"].as_str()?.to_owned();
        Some((field(group, "group").to_owned(), owner))
    };
    items(groups, "groups").iter().filter_map(owner).collect()
}

fn partitions(name: &str, topic: &Value, groups: &Value) -> Markup {
    let all = items(topic, "partitions");
    let total: u64 = all.iter().filter_map(|partition| partition["length"].as_u64()).sum();
    let average = total / (all.len() as u64).max(1);
    let is_hot = |partition: &Value| {
        let length = partition["length"].as_u64().unwrap_or(0);
        all.len() > 1 && length > HOT_FACTOR * average.max(1)
    };
    table(
        "Partitions",
        &["Partition", "Messages", "Bytes", "First id", "Last id", "Owners", "Key"],
        &html! {
            @for partition in all {
                tr data-key=(plain(&partition["partition"])) {
                    th scope="row" {
                        a href={ "/console/topics/" (encoded(name)) "/messages?partition=" (plain(&partition["partition"])) } { (plain(&partition["partition"])) }
                        @if is_hot(partition) { " " (badge(Tone::Warning, "hot")) }
                    }
                    (count(&partition["length"]))
                    td.count { (partition["bytes"].as_u64().map_or("–".to_owned(), bytes)) }
                    td { (id(&plain(&partition["first_id"]))) }
                    td { (id(&plain(&partition["last_id"]))) }
                    td {
                        @let owners = partition_owners(groups, &partition["partition"]);
                        @if owners.is_empty() { span.quiet { "–" } }
                        @for (group, owner) in &owners { div { (excerpt(group)) ": " (excerpt(owner)) } }
                    }
                    td { (id(field(partition, "stream_key"))) }
                }
            }
        },
    )
}

/// Messages that wait for their time, if there are any.
fn delayed_messages(screen: &Screen, delayed: &Part) -> Markup {
    let delayed = match delayed {
        Ok(delayed) => items(delayed, "delayed"),
        Err(error) => return problem("The delayed messages", error, screen),
    };
    html! {
        @if !delayed.is_empty() {
            h2 { "Delayed messages" }
            (table("Delayed messages", &["Due", "Partition", "Key", "Why", "Payload"], &html! {
                @for message in delayed {
                    tr {
                        td { (time(&message["due_at"])) }
                        td { (plain(&message["partition"])) }
                        td { (excerpt(&plain(&message["key"]))) }
                        td { (excerpt(field(message, "sentence"))) }
                        td { (excerpt(message["payload"].as_str().unwrap_or("(bytes)"))) }
                    }
                }
            }))
            p.quiet { "Those that are due first." }
        }
    }
}

fn policies(policies: &Value) -> Markup {
    let or_none = |text: Option<String>| html! { (text.unwrap_or_else(|| "none".to_owned())) };
    facts(&[
        ("Keep messages", or_none(policies["retention_count"].as_u64().map(number))),
        ("Keep for", or_none(policies["retention_age_ms"].as_u64().map(duration))),
        ("Keep bytes", or_none(policies["retention_bytes"].as_u64().map(bytes))),
        ("Byte budget", or_none(policies["byte_budget"].as_u64().map(bytes))),
        ("Largest payload", or_none(policies["payload_bytes_max"].as_u64().map(bytes))),
        ("Retries", or_none(policies["max_retries"].as_u64().map(number))),
        ("Entry format", or_none(policies["entry_format"].as_str().map(str::to_owned))),
    ])
}

fn produce_form(screen: &Screen, address: &str) -> Markup {
    let path = address.replacen("/console/", "/console/do/", 1);
    html! {
        details.item {
            summary { "Produce a message" }
            form.stacked method="post" action={ (path) "/produce" } {
                label for="key" { "Key (messages of one key keep their order)" }
                input #key name="key" maxlength="500";
                label for="payload" { "Payload" }
                textarea #payload name="payload" rows="4" {}
                div { (button(&screen.user, ConsoleRole::Write, ButtonStyle::Primary, "Produce message")) }
            }
        }
    }
}

fn grow_form(screen: &Screen, address: &str, now: usize) -> Markup {
    let path = address.replacen("/console/", "/console/do/", 1);
    html! {
        details.item {
            summary { "Add partitions" }
            form.inline method="post" action={ (path) "/grow" } {
                label for="partitions" { "Partitions, now " (now) }
                input #partitions name="partitions" required inputmode="numeric" size="5" maxlength="4";
                (button(&screen.user, ConsoleRole::Admin, ButtonStyle::Danger, "Grow…"))
            }
        }
    }
}

fn trim_form(screen: &Screen, address: &str) -> Markup {
    let path = address.replacen("/console/", "/console/do/", 1);
    html! {
        details.item {
            summary { "Remove the oldest messages" }
            form.stacked method="post" action={ (path) "/trim" } {
                label for="trim-count" { "Keep so many messages of each partition" }
                input #trim-count name="count" inputmode="numeric" maxlength="19";
                label for="trim-hours" { "Keep messages of so many hours" }
                input #trim-hours name="hours" inputmode="numeric" maxlength="10";
                label for="trim-partition" { "Only of partition" }
                input #trim-partition name="partition" inputmode="numeric" maxlength="4";
                label { input type="checkbox" name="force" value="true"; " Also messages that a group still needs" }
                div { (button(&screen.user, ConsoleRole::Admin, ButtonStyle::Danger, "Trim…")) }
            }
        }
    }
}
