//! Topics: the list, and one topic with its partitions, groups and policies.

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::api_client::Part;
use crate::chart::sparkline;
use crate::components::{
    ButtonStyle, Tone, badge, button, count, empty, excerpt, facts, id, live, or_last, pager,
    problem, table, time,
};
use crate::screen::{Screen, ScreenContent};
use crate::screens::history::{self, HOUR};
use crate::screens::why::delayed_line;
use crate::screens::{ROWS, known_or_last};
use crate::text::{bytes, counted, duration, encoded, field, items, number, plain, shell_word};
use crate::user::ConsoleRole;

/// Delayed messages on the screen of a topic.
const DELAYED_ROWS: usize = 20;

/// A partition with this many times the average length stands out.
const HOT_FACTOR: u64 = 4;

pub(crate) async fn list(screen: Screen) -> Response {
    let filter = screen.query.query_of(&["name", "cursor"]);
    let path = format!("/topics?lag=true&rates=true&limit={ROWS}&{filter}");
    let topics = screen.api.get(&path).await;
    let content = or_last("The list of topics", &topics, &screen, |page| list_of(&screen, page));
    let name = screen.query.get("name");
    let mut command = "headwater topic list".to_owned();
    if !name.is_empty() {
        command += &format!(" --name {}", shell_word(name));
    }
    let content = html! {
        form.filters.inline action="/console/topics" {
            label for="name" { "Name contains" }
            input #name name="name" value=(name) maxlength="200";
            button.button type="submit" { "Filter" }
        }
        (live("topics", &content))
    };
    screen.page(ScreenContent { title: "Topics".to_owned(), path: Vec::new(), command, content })
}

fn list_of(screen: &Screen, page: &Value) -> Markup {
    if items(page, "topics").is_empty() && !screen.query.get("name").is_empty() {
        return empty("No topic has this in its name.", None);
    }
    if items(page, "topics").is_empty() {
        return empty(
            "There are no topics. Create the first one:",
            Some("headwater topic create orders --partitions 4"),
        );
    }
    let head = [
        "Topic",
        "Partitions",
        "Messages",
        "In/s",
        "Settled/s",
        "Last hour",
        "Bytes",
        "Worst lag",
        "Delayed",
        "Dead letters",
        "Groups",
        "Created",
    ];
    html! {
        (table("Topics", &head, &html! { @for topic in items(page, "topics") { (row(topic)) } }))
        p.quiet { "Rates are those of the last minute, of the 50 busiest topics; a bar is messages in within two minutes." }
        (pager(screen, &["name"], &page["next_cursor"]))
    }
}

/// Messages per second, over a minute.
fn rate(per_second: &Value) -> Markup {
    html! { td.count { @match per_second.as_f64() {
        Some(rate) if rate < 10.0 => (format!("{rate:.1}")),
        Some(rate) => (number(rate.round() as u64)),
        None => span.quiet { "–" },
    } } }
}

/// How many messages came in over the last hour.
fn curve(rates: &Value) -> Markup {
    let counts: Vec<u64> = items(rates, "added").iter().filter_map(Value::as_u64).collect();
    let total = counts.iter().fold(0, |sum: u64, count| sum.saturating_add(*count));
    let most = counts.iter().max().copied().unwrap_or(0);
    let label = format!(
        "{} in within the last hour, at most {} in two minutes",
        counted(total, "message", "messages"),
        number(most)
    );
    sparkline(&label, &counts)
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
                @if !topic["problem"].is_null() { " " (badge(Tone::Bad, "its server does not answer")) }
            }
            (count(&topic["partitions"]))
            (count(&topic["length"]))
            (rate(&topic["rates"]["added_per_second"]))
            (rate(&topic["rates"]["settled_per_second"]))
            td { (curve(&topic["rates"])) }
            td.count { (topic["bytes"].as_u64().map_or("–".to_owned(), bytes)) }
            (count(&topic["worst_lag"]))
            (count(&topic["delayed"]))
            @if dead > 0 { td.count { a href={ (address) "/dead-letters" } { (number(dead)) } } } @else { (count(&topic["dead_letters"])) }
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
    let of_topic = format!("topic={}", encoded(&topic));
    let (described, groups, delayed, history) = tokio::join!(
        screen.api.get(&path),
        screen.api.get(&groups_path),
        screen.api.get(&delayed_path),
        history::read(&screen, &of_topic, HOUR)
    );
    let (described, is_last) = match known_or_last(&screen, "topic", described) {
        Ok(known) => known,
        Err(error) => return screen.failed("Topic", &error),
    };
    let address = format!("/console/topics/{}", encoded(&topic));
    let owners = groups.clone().ok();
    let groups = or_last("The groups", &groups, &screen, |page| match items(page, "groups") {
        [] => empty(
            "No group reads this topic. Start one:",
            Some(&format!("headwater consume {} --group billing", shell_word(&topic))),
        ),
        groups => table(
            "Groups",
            &["Group", "Lag", "Pending", "Members", "State"],
            &html! { @for group in groups { (group_row(&address, group)) } },
        ),
    });
    let dead = described["dead_letters"].as_u64().unwrap_or(0);
    let content = html! {
        ul.choices {
            li { a href={ (address) "/messages" } { "Messages" } }
            li { a href={ (address) "/dead-letters" } { "Dead letters (" (number(dead)) ")" } }
        }
        (live("numbers", &html! { (is_last) (numbers(&described)) }))
        h2 { "Groups" }
        (live("groups", &groups))
        h2 { "The last hour" }
        (live("charts", &history::charts(&screen, &history, history::topic_charts)))
        h2 { "Partitions" }
        (live("partitions", &partitions(&topic, &described, owners.as_deref().unwrap_or(&Value::Null))))
        (live("delayed", &delayed_messages(&screen, &topic, &delayed)))
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
                @if !items(group, "unread_partitions").is_empty() { (badge(Tone::Bad, "a server does not answer")) }
                @else if members == 0 && lag > 0 { (badge(Tone::Bad, "no consumers")) }
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

/// The partitions with their owners. Those with much more than the others are marked.
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
fn delayed_messages(screen: &Screen, topic: &str, delayed: &Part) -> Markup {
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
                        td { (delayed_line(topic, message)) }
                        td { (excerpt(message["payload"].as_str().unwrap_or("(bytes)"))) }
                    }
                }
            }))
            p.quiet { "Those that are due first. " bdi { code { "headwater message delayed " (shell_word(topic)) } } }
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Partitions of these lengths.
    fn shown(lengths: &[u64]) -> String {
        let partition = |(index, length): (usize, &u64)| json!({"partition": index, "length": length, "first_id": null, "last_id": null, "stream_key": "k"});
        let all: Vec<Value> = lengths.iter().enumerate().map(partition).collect();
        partitions("orders", &json!({"partitions": all}), &Value::Null).into_string()
    }

    #[test]
    fn a_partition_with_more_than_four_times_the_average_is_hot() {
        let one = shown(&[10, 10, 10, 10, 10, 10, 10, 500]);
        assert_eq!(one.matches(">hot</span>").count(), 1, "{one}");
        let row = one.split("<tr").find(|row| row.contains("hot")).unwrap();
        assert!(row.contains("data-key=\"7\""), "{row}");
        for even in [&[5000][..], &[], &[0, 0, 0], &[100, 400, 100], &[0, 0, 0, 0, 0, 4]] {
            let even_shown = shown(even);
            assert!(!even_shown.contains(">hot<"), "{even:?}: {even_shown}");
        }
    }
}
