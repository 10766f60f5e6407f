//! Messages of a topic: browse by position, and one message with its payload.

use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::Response;
use futures_util::future::join_all;
use maud::{Markup, html};
use serde_json::Value;

use crate::api_client::Problem;
use crate::components::{
    Tone, badge, block, count, empty, excerpt, facts, id, live, pager, payload, problem, table,
    time, time_with_utc,
};
use crate::screen::{Screen, ScreenContent};
use crate::screens::ROWS;
use crate::screens::why::{WhySubject, why_panel};
use crate::text::{counted, encoded, field, items, number, plain, shell_word};

const FILTER: [&str; 7] = ["from", "to", "partition", "key", "header", "text", "newest_first"];

/// Those of the filter that have an option of the same name on the command line.
const OPTIONS: [&str; 6] = ["from", "to", "partition", "key", "header", "text"];

fn path_of(topic: &str) -> Vec<(String, String)> {
    vec![
        ("Topics".to_owned(), "/console/topics".to_owned()),
        (topic.to_owned(), format!("/console/topics/{}", encoded(topic))),
    ]
}

pub(crate) async fn list(screen: Screen, Path(topic): Path<String>) -> Response {
    let mut names = FILTER.to_vec();
    names.push("cursor");
    let filter = screen.query.query_of(&names);
    let path = format!("/topics/{}/messages?limit={ROWS}&{filter}", encoded(&topic));
    let content = match screen.api.get(&path).await {
        Err(error) if error.is_not_found() => return screen.failed("Topic", &error),
        Err(error) => problem("The messages", &error, &screen),
        Ok(page) if items(&page, "messages").is_empty() && page["search"].is_object() => html! {
            (empty("None of the messages that were looked at matches.", None))
            (scanned(&page))
            (pager(&screen, &FILTER, &page["next_cursor"]))
        },
        Ok(page) if items(&page, "messages").is_empty() => empty(
            "No stored message matches. Send one:",
            Some(&format!("headwater produce {} --payload hello", shell_word(&topic))),
        ),
        Ok(page) => html! {
            (table("Messages", &["Message", "Partition", "Key", "Stored", "Attempt", "Payload"], &html! {
                @for message in items(&page, "messages") { (row(&topic, message)) }
            }))
            (scanned(&page))
            (pager(&screen, &FILTER, &page["next_cursor"]))
        },
    };
    let content = html! {
        form.filters.inline action={ "/console/topics/" (encoded(&topic)) "/messages" } {
            label for="from" { "From (id or time)" }
            input #from name="from" value=(screen.query.get("from")) maxlength="60";
            label for="to" { "To" }
            input #to name="to" value=(screen.query.get("to")) maxlength="60";
            label for="partition" { "Partition" }
            input #partition name="partition" value=(screen.query.get("partition")) inputmode="numeric" size="5" maxlength="5";
            label for="key" { "Key" }
            input #key name="key" value=(screen.query.get("key")) size="14" maxlength="500";
            label for="header" { "Header" }
            input #header name="header" value=(screen.query.get("header")) placeholder="name or name=value" size="16" maxlength="500";
            label for="text" { "Payload contains" }
            input #text name="text" value=(screen.query.get("text")) size="14" maxlength="500";
            label { input type="checkbox" name="newest_first" value="true" checked[screen.query.get("newest_first") == "true"]; " Newest first" }
            button.button type="submit" { "Show" }
        }
        // Stored messages do not change; new ones are on later pages.
        (content)
    };
    screen.page(ScreenContent {
        title: "Messages".to_owned(),
        path: path_of(&topic),
        command: command(&screen, &topic),
        content,
    })
}

/// How far a search has looked.
fn scanned(page: &Value) -> Markup {
    let number_of = |name: &str| number(page["search"][name].as_u64().unwrap_or(0));
    html! {
        @if page["search"].is_object() {
            p.quiet {
                "Scanned " (number_of("scanned")) " of " (number_of("total")) " messages."
                @if !page["next_cursor"].is_null() { " The next page looks further." }
            }
        } @else {
            p.quiet { (counted(items(page, "messages").len() as u64, "message", "messages")) " on this page." }
        }
    }
}

fn command(screen: &Screen, topic: &str) -> String {
    let mut command = format!("headwater message list {}", shell_word(topic));
    for name in OPTIONS.iter().filter(|name| !screen.query.get(name).is_empty()) {
        command += &format!(" --{name} {}", shell_word(screen.query.get(name)));
    }
    if screen.query.get("newest_first") == "true" {
        command += " --newest-first";
    }
    command
}

fn row(topic: &str, message: &Value) -> Markup {
    let (entry, partition) = (field(message, "id"), plain(&message["partition"]));
    let address = format!(
        "/console/topics/{}/messages/{}?partition={partition}",
        encoded(topic),
        encoded(entry)
    );
    let shown = message["payload"].as_str().unwrap_or("(bytes)");
    html! {
        tr data-key={ (partition) "/" (entry) } {
            th scope="row" {
                a href=(address) { (id(entry)) }
                @if !message["problem"].is_null() { " " (badge(Tone::Bad, "malformed")) }
            }
            td { (partition) }
            td { (excerpt(&plain(&message["key"]))) }
            td { (time(&message["stored_at"])) }
            (count(&message["attempt"]))
            td { (excerpt(shown)) }
        }
    }
}

pub(crate) async fn show(screen: Screen, Path((topic, entry)): Path<(String, String)>) -> Response {
    let path = format!("/topics/{}/messages/{}", encoded(&topic), encoded(&entry));
    let read = async |partition: &str| {
        let (shown, why) = (format!("{path}?{partition}"), format!("{path}/why?{partition}"));
        tokio::join!(screen.api.get(&shown), screen.api.get(&why))
    };
    let asked = screen.query.query_of(&["partition"]);
    let shown = screen.api.get_unnamed(&format!("{path}?{asked}")).await;
    let found = match shown.is_err_and(|error| error.status == StatusCode::BAD_REQUEST) {
        false => vec![read(&asked).await],
        true => match same_ids(&screen, &topic, &entry).await {
            Ok(partitions) => join_all(partitions.iter().map(|partition| read(partition))).await,
            Err(error) => return screen.failed("Message", &error),
        },
    };
    let mut command =
        format!("headwater message why {} {}", shell_word(&topic), shell_word(&entry));
    if let [(Ok(first), _), _, ..] = &found[..] {
        command += &format!(" --partition {}", plain(&first["partition"]));
    }
    let mut content = html! {};
    for (shown, why) in found {
        let message = match shown {
            Ok(message) => message,
            Err(error) => return screen.failed("Message", &error),
        };
        let neighbours = neighbours(&encoded(&topic), &message);
        content = html! { (content) (why_panel(&screen, WhySubject::Message, &why)) (details(&message)) (neighbours) };
    }
    let mut above = path_of(&topic);
    above.push(("Messages".to_owned(), format!("/console/topics/{}/messages", encoded(&topic))));
    screen.page(ScreenContent {
        title: entry.clone(),
        path: above,
        command,
        content: live("message", &content),
    })
}

/// The partitions that have a message with this id, as parameters.
async fn same_ids(screen: &Screen, topic: &str, entry: &str) -> Result<Vec<String>, Problem> {
    let (topic, entry) = (encoded(topic), encoded(entry));
    let path = format!("/topics/{topic}/messages?from={entry}&to={entry}&limit=10");
    let page = screen.api.get(&path).await?;
    let partition = |message: &Value| format!("partition={}", plain(&message["partition"]));
    Ok(items(&page, "messages").iter().map(partition).collect())
}

/// Links to the messages of the same key before and after a message.
fn neighbours(topic: &str, message: &Value) -> Markup {
    let link = |name: &str| match message[name].as_str() {
        None => html! { span.quiet { "none near it" } },
        Some(entry) => {
            let partition = plain(&message["partition"]);
            let address = format!(
                "/console/topics/{topic}/messages/{}?partition={partition}",
                encoded(entry)
            );
            html! { a href=(address) { (id(entry)) } }
        }
    };
    html! {
        @if !message["key"].is_null() {
            h2 { "Same key" }
            (facts(&[("Before", link("previous_of_key")), ("After", link("next_of_key"))]))
        }
    }
}

fn details(message: &Value) -> Markup {
    let headers = &message["headers"];
    html! {
        (facts(&[
            ("Partition", html! { (plain(&message["partition"])) }),
            ("Key", excerpt(&plain(&message["key"]))),
            ("Stored", time_with_utc(&message["stored_at"])),
            ("Attempt", html! { (plain(&message["attempt"])) }),
        ]))
        @if let Some(reason) = message["problem"].as_str() {
            p { (badge(Tone::Bad, "malformed")) " " (excerpt(reason)) }
        }
        h2 { "Payload" }
        (payload(message))
        (named_values("Headers", headers))
        (named_values("Fields", &message["fields"]))
    }
}

/// Names with values, if there are any: an object, or pairs.
pub(crate) fn named_values(title: &str, values: &Value) -> Markup {
    let pairs: Vec<(String, String)> = match values {
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| (name.clone(), plain(value))).collect()
        }
        Value::Array(pairs) => {
            pairs.iter().map(|pair| (plain(&pair[0]), plain(&pair[1]))).collect()
        }
        _ => Vec::new(),
    };
    html! {
        @if !pairs.is_empty() {
            h2 { (title) }
            @for (name, value) in pairs { h3 { (id(&name)) } (block(&value)) }
        }
    }
}
