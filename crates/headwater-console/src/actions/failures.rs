//! The action on one cause: replay its dead letters, release its issues or retry its replies.

use axum::extract::Path;
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
    let example =
        |sample: &Value| format!("{} · {}", field(sample, "id"), field(sample, "message"));
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
            let topic = encoded(field(cluster, "place"));
            for batch in ids.chunks(IDS_MAX) {
                let path = format!("/topics/{topic}/dead-letters/replay");
                let answer = screen.api.post(&path, json!({"ids": batch})).await?;
                total += answer["replayed"].as_u64().unwrap_or(0);
            }
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
