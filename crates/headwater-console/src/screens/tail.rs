//! Tail: the newest messages of up to four topics, kept up to date.

use axum::response::Response;
use futures_util::future::join_all;
use maud::{Markup, html};
use serde_json::Value;

use crate::api_client::Part;
use crate::components::{empty, excerpt, id, live, problem, time};
use crate::screen::{Screen, ScreenContent};
use crate::text::{encoded, field, items, plain, shell_word};

/// Topics at once.
const TOPICS_MAX: usize = 4;

/// Messages of each topic.
const TAIL_ROWS: usize = 25;

pub(crate) async fn show(screen: Screen) -> Response {
    let mut topics = screen.query.all("topic");
    topics.truncate(TOPICS_MAX);
    let reads = topics.iter().map(|topic| {
        let path =
            format!("/topics/{}/messages?limit={TAIL_ROWS}&newest_first=true", encoded(topic));
        let api = screen.api.clone();
        async move { api.get(&path).await }
    });
    let parts = join_all(reads).await;
    let content = html! {
        form.filters.inline action="/console/tail" {
            @for index in 0..TOPICS_MAX {
                @let field_id = format!("topic-{index}");
                label for=(field_id) { "Topic " (index + 1) }
                input id=(field_id) name="topic" maxlength="200" size="14" value=[topics.get(index)];
            }
            button.button type="submit" { "Follow" }
        }
        @if topics.is_empty() { (empty("Name one to four topics. The newest messages appear here as they arrive.", None)) }
        (live("tail", &html! {
            div.side-by-side { @for (topic, part) in topics.iter().zip(&parts) { (column(&screen, topic, part)) } }
        }))
    };
    let command = match topics.first() {
        Some(topic) => format!("headwater tail {}", shell_word(topic)),
        None => "headwater tail TOPIC".to_owned(),
    };
    screen.page(ScreenContent { title: "Tail".to_owned(), path: Vec::new(), command, content })
}

fn column(screen: &Screen, topic: &str, part: &Part) -> Markup {
    html! {
        section {
            h2 { a href={ "/console/topics/" (encoded(topic)) } { bdi { (topic) } } }
            @match part {
                Err(error) => (problem("The messages", error, screen)),
                Ok(page) if items(page, "messages").is_empty() => (empty("No message is stored.", None)),
                Ok(page) => @for message in items(page, "messages") { (line(topic, message)) },
            }
        }
    }
}

fn line(topic: &str, message: &Value) -> Markup {
    let (entry, partition) = (field(message, "id"), plain(&message["partition"]));
    let address = format!(
        "/console/topics/{}/messages/{}?partition={partition}",
        encoded(topic),
        encoded(entry)
    );
    html! {
        p.line data-key={ (partition) "/" (entry) } {
            a href=(address) { (id(entry)) } " " span.quiet { (time(&message["stored_at"])) " " (excerpt(&plain(&message["key"]))) } " "
            (excerpt(message["payload"].as_str().unwrap_or("(bytes)")))
        }
    }
}
