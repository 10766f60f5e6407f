//! The actions on one cause: replay or purge its dead letters, release its issues or retry its replies.

use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::confirmation::{Confirmation, EXAMPLES_MAX};
use super::done_with;
use crate::api_client::Problem;
use crate::form::FormFields;
use crate::screen::Screen;
use crate::text::{encoded, field, items, plain, shell_word};
use crate::user::ConsoleRole;

/// Dead letters of one call, as in the API.
const IDS_MAX: usize = 100;

pub(super) async fn retry(screen: Screen, Path(key): Path<String>, form: FormFields) -> Response {
    let path = format!("/failures/{}?ids=true", encoded(&key));
    let cluster = match screen.api.get(&path).await {
        Ok(cluster) => cluster,
        Err(error) => return screen.failed("Cause", &error),
    };
    let (verb, unit, code) = match field(&cluster, "kind") {
        "dead_letter" => ("Replay", ("dead letter", "dead letters"), "replayed"),
        "issue" => ("Release", ("issue", "issues"), "released"),
        _ => ("Retry", ("reply", "replies"), "queued"),
    };
    let ids: Vec<String> = items(&cluster, "ids").iter().map(plain).collect();
    let confirmation = Confirmation {
        verb,
        count: ids.len() as u64,
        unit,
        or_more: false,
        needed: ConsoleRole::Write,
        examples: items(&cluster, "samples").iter().take(EXAMPLES_MAX).map(example).collect(),
        consequences: vec![
            format!("Cause: {}", field(&cluster, "cause")),
            "They are processed again. If the cause remains, they fail again.".to_owned(),
        ],
        is_destructive: false,
        typed: None,
        command: command(&cluster, &ids),
        back: format!("/console/failures/{}", encoded(&key)),
    };
    if !confirmation.is_given(&form) {
        return confirmation.page(&screen, &form);
    }
    match retry_all(&screen, &cluster, &ids).await {
        Ok(count) => done_with("/console/failures", code, count),
        Err(error) => screen.failed("Cause", &error),
    }
}

pub(super) async fn purge(screen: Screen, Path(key): Path<String>, form: FormFields) -> Response {
    let path = format!("/failures/{}?ids=true", encoded(&key));
    let cluster = match screen.api.get(&path).await {
        Ok(cluster) => cluster,
        Err(error) => return screen.failed("Cause", &error),
    };
    if field(&cluster, "kind") != "dead_letter" {
        let message = "only dead letters can be purged";
        let problem = Problem::new(StatusCode::BAD_REQUEST, "invalid", message);
        return screen.failed("Cause", &problem);
    }
    let topic = field(&cluster, "place");
    let ids: Vec<String> = items(&cluster, "ids").iter().map(plain).collect();
    let first: Vec<&str> = ids.iter().take(IDS_MAX).map(String::as_str).collect();
    let confirmation = Confirmation {
        verb: "Purge",
        count: ids.len() as u64,
        unit: ("dead letter", "dead letters"),
        or_more: false,
        needed: ConsoleRole::Admin,
        examples: items(&cluster, "samples").iter().take(EXAMPLES_MAX).map(example).collect(),
        consequences: vec![
            format!("Cause: {}", field(&cluster, "cause")),
            "Their payloads are deleted. They can not be replayed afterwards.".to_owned(),
        ],
        is_destructive: true,
        typed: None,
        command: format!("headwater dlq purge {} {} --yes", shell_word(topic), first.join(" ")),
        back: format!("/console/failures/{}", encoded(&key)),
    };
    if !confirmation.is_given(&form) {
        return confirmation.page(&screen, &form);
    }
    match on_letters(&screen, topic, ("purge", "purged"), &ids).await {
        Ok(count) => done_with("/console/failures", "purged", count),
        Err(error) => screen.failed("Cause", &error),
    }
}

fn example(sample: &Value) -> String {
    format!("{} · {}", field(sample, "id"), field(sample, "message"))
}

/// Calls a verb on dead letters, some at a time, and adds up how many it changed.
async fn on_letters(
    screen: &Screen,
    topic: &str,
    (verb, counter): (&str, &str),
    ids: &[String],
) -> Result<u64, Problem> {
    let path = format!("/topics/{}/dead-letters/{verb}", encoded(topic));
    let mut total = 0;
    for batch in ids.chunks(IDS_MAX) {
        let answer = screen.api.post(&path, json!({"ids": batch})).await?;
        total += answer[counter].as_u64().unwrap_or(0);
    }
    Ok(total)
}

fn command(cluster: &Value, ids: &[String]) -> String {
    let first: Vec<&str> = ids.iter().take(IDS_MAX).map(String::as_str).collect();
    match field(cluster, "kind") {
        "dead_letter" => {
            let topic = shell_word(field(cluster, "place"));
            format!("headwater dlq replay {topic} {}", first.join(" "))
        }
        "issue" => for_each("headwater issue release", &first),
        _ => for_each("headwater outbox retry", &first),
    }
}

/// A command that takes one id, for each of these.
fn for_each(command: &str, ids: &[&str]) -> String {
    match ids {
        [] => format!("{command} ID"),
        [id] => format!("{command} {id}"),
        ids => format!("for id in {}; do {command} $id; done", ids.join(" ")),
    }
}

async fn retry_all(screen: &Screen, cluster: &Value, ids: &[String]) -> Result<u64, Problem> {
    let mut total = 0;
    match field(cluster, "kind") {
        "dead_letter" => {
            total =
                on_letters(screen, field(cluster, "place"), ("replay", "replayed"), ids).await?;
        }
        kind => {
            let (area, verb) =
                if kind == "issue" { ("issues", "release") } else { ("outbox", "retry") };
            for id in ids {
                match screen.api.post(&format!("/{area}/{}/{verb}", encoded(id)), json!({})).await {
                    Ok(_) => total += 1,
                    // Retried or released by another caller.
                    Err(error) if error.is_not_found() => {}
                    Err(error) => return Err(error),
                }
            }
        }
    }
    Ok(total)
}
