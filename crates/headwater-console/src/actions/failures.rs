//! The actions on one cause: replay or purge its dead letters, release its issues or retry its replies.
//!
//! Guarantee: they touch what the API has read of the cause, and say so if there may be more.

use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::confirmation::{Confirmation, EXAMPLES_MAX};
use super::letters::{LetterAction, LetterSelection};
use super::topics::readers_of;
use super::{WORK_TIME_MAX, done_in_part, done_with};
use crate::api_client::{ConsoleApi, Part, Problem};
use crate::form::FormFields;
use crate::screen::Screen;
use crate::text::{counted, encoded, field, items};
use crate::user::ConsoleRole;

pub(super) async fn retry(screen: Screen, Path(key): Path<String>, form: FormFields) -> Response {
    let deadline = Instant::now() + WORK_TIME_MAX;
    let cluster = match read(&screen, &key).await {
        Ok(cluster) => cluster,
        Err(error) => return screen.failed("Cause", &error),
    };
    let (verb, unit, code) = match field(&cluster, "kind") {
        "dead_letter" => ("Replay", ("dead letter", "dead letters"), "replayed"),
        "issue" => ("Release", ("issue", "issues"), "released"),
        _ => ("Retry", ("reply", "replies"), "queued"),
    };
    let ids = ids(&cluster);
    let mut consequences = vec![
        format!("Cause: {}", field(&cluster, "cause")),
        "They are processed again. If the cause remains, they fail again.".to_owned(),
    ];
    consequences.extend(readers(&screen, &cluster, LetterAction::Replay).await);
    consequences.extend(incomplete(&cluster));
    let confirmation = Confirmation {
        verb,
        count: ids.len() as u64,
        unit,
        or_more: cluster["complete"] == false,
        needed: ConsoleRole::Write,
        examples: items(&cluster, "samples").iter().take(EXAMPLES_MAX).map(example).collect(),
        consequences,
        is_destructive: false,
        typed: None,
        command: command(&cluster, &ids),
        back: format!("/console/failures/{}", encoded(&key)),
    };
    if !confirmation.is_given(&form) {
        return confirmation.page(&screen, &form);
    }
    if field(&cluster, "kind") == "dead_letter" {
        return on_letters(&screen, &cluster, LetterAction::Replay, deadline).await;
    }
    match retry_all(&screen.api, &cluster, &ids, deadline).await {
        Ok((count, 0)) => done_with("/console/failures", code, count),
        Ok((count, left)) => done_in_part("/console/failures", code, count, Some(left)),
        Err(error) => screen.failed("Cause", &error),
    }
}

pub(super) async fn purge(screen: Screen, Path(key): Path<String>, form: FormFields) -> Response {
    let deadline = Instant::now() + WORK_TIME_MAX;
    let cluster = match read(&screen, &key).await {
        Ok(cluster) => cluster,
        Err(error) => return screen.failed("Cause", &error),
    };
    if field(&cluster, "kind") != "dead_letter" {
        let message = "only dead letters can be purged";
        let problem = Problem::new(StatusCode::BAD_REQUEST, "invalid", message);
        return screen.failed("Cause", &problem);
    }
    let ids = ids(&cluster);
    let mut consequences = vec![
        format!("Cause: {}", field(&cluster, "cause")),
        "Their payloads are deleted. They can not be replayed afterwards.".to_owned(),
    ];
    consequences.extend(readers(&screen, &cluster, LetterAction::Purge).await);
    consequences.extend(incomplete(&cluster));
    let confirmation = Confirmation {
        verb: "Purge",
        count: ids.len() as u64,
        unit: ("dead letter", "dead letters"),
        or_more: cluster["complete"] == false,
        needed: ConsoleRole::Admin,
        examples: items(&cluster, "samples").iter().take(EXAMPLES_MAX).map(example).collect(),
        consequences,
        is_destructive: true,
        typed: None,
        command: LetterSelection::of_ids(&ids)
            .command(LetterAction::Purge, field(&cluster, "place")),
        back: format!("/console/failures/{}", encoded(&key)),
    };
    if !confirmation.is_given(&form) {
        return confirmation.page(&screen, &form);
    }
    on_letters(&screen, &cluster, LetterAction::Purge, deadline).await
}

/// The cause with the ids of all that were read of it.
async fn read(screen: &Screen, key: &str) -> Part {
    screen.api.get(&format!("/failures/{}?ids=true", encoded(key))).await
}

fn ids(cluster: &Value) -> Vec<&str> {
    items(cluster, "ids").iter().filter_map(Value::as_str).collect()
}

fn example(sample: &Value) -> String {
    format!("{} · {}", field(sample, "id"), field(sample, "message"))
}

/// The groups of the topic of dead letters, in a sentence.
async fn readers(screen: &Screen, cluster: &Value, action: LetterAction) -> Option<String> {
    match field(cluster, "kind") {
        "dead_letter" => readers_of(screen, field(cluster, "place"), action.readers()).await,
        _ => None,
    }
}

/// Says that there may be more than are touched, and how to reach them.
fn incomplete(cluster: &Value) -> Option<String> {
    if cluster["complete"] != false {
        return None;
    }
    let number = cluster["count"].as_u64().unwrap_or(0);
    Some(match field(cluster, "kind") {
        "dead_letter" => format!(
            "Only the newest dead letters of the topic were read, and {} of this cause. There may be older ones, which stay. A \
             replay plan takes all of this cause.",
            counted(number, "is", "are")
        ),
        _ => "Not all failures were read; there may be more of this cause. Do it again for those."
            .to_owned(),
    })
}

async fn on_letters(
    screen: &Screen,
    cluster: &Value,
    action: LetterAction,
    deadline: Instant,
) -> Response {
    let ids = ids(cluster);
    let selection = LetterSelection::of_ids(&ids);
    match selection.act(&screen.api, field(cluster, "place"), action, deadline).await {
        Ok(work) => work.shown(action, "/console/failures", Some(ids.len() as u64)),
        Err(error) => screen.failed("Cause", &error),
    }
}

fn command(cluster: &Value, ids: &[&str]) -> String {
    match field(cluster, "kind") {
        "dead_letter" => {
            LetterSelection::of_ids(ids).command(LetterAction::Replay, field(cluster, "place"))
        }
        "issue" => for_each("headwater issue release", ids),
        _ => for_each("headwater outbox retry", ids),
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

/// Releases issues or retries replies until the deadline, at least one. Returns how many it did, and how many are left.
async fn retry_all(
    api: &ConsoleApi,
    cluster: &Value,
    ids: &[&str],
    deadline: Instant,
) -> Result<(u64, u64), Problem> {
    let (area, verb) = match field(cluster, "kind") {
        "issue" => ("issues", "release"),
        _ => ("outbox", "retry"),
    };
    let mut total = 0;
    for (index, id) in ids.iter().enumerate() {
        if index > 0 && Instant::now() >= deadline {
            return Ok((total, (ids.len() - index) as u64));
        }
        match api.post(&format!("/{area}/{}/{verb}", encoded(id)), json!({})).await {
            Ok(_) => total += 1,
            // Retried or released by another caller.
            Err(error) if error.is_not_found() => {}
            Err(error) => {
                return Err(
                    error.after(total, if area == "issues" { "released" } else { "queued" })
                );
            }
        }
    }
    Ok((total, 0))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use axum::http::Extensions;
    use axum::routing::post;
    use axum::{Json, Router};

    use super::*;
    use crate::api_client::{ConsoleSeconds, ConsoleState};
    use crate::user::ConsoleUser;

    #[tokio::test(start_paused = true)]
    async fn a_cause_of_very_many_issues_is_released_until_the_time_is_over() {
        let release = |Path(id): Path<u64>| async move {
            tokio::time::sleep(Duration::from_secs(3)).await;
            let error = json!({"error": {"code": "not_found", "message": "no such issue"}});
            match id {
                2 => (StatusCode::NOT_FOUND, Json(error)),
                _ => (StatusCode::OK, Json(json!({}))),
            }
        };
        let router = Router::new().route("/api/v1/issues/{id}/release", post(release));
        let state = Arc::new(ConsoleState::new(router, ConsoleSeconds::start()));
        let (name, view, forwarded) = ("ann".to_owned(), String::new(), Extensions::new());
        let role = ConsoleRole::Write;
        let user = ConsoleUser { name, role, view, has_session: false, forwarded };
        let (api, cluster) = (ConsoleApi::new(state, user), json!({"kind": "issue"}));
        let ids: Vec<String> = (0..10).map(|id| id.to_string()).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();

        // Seven calls are made within 20 s; another caller has released one of these issues.
        let deadline = Instant::now() + WORK_TIME_MAX;
        assert_eq!(retry_all(&api, &cluster, &ids, deadline).await, Ok((6, 3)));
        // The same again continues.
        let deadline = Instant::now() + WORK_TIME_MAX;
        assert_eq!(retry_all(&api, &cluster, &ids[7..], deadline).await, Ok((3, 0)));
    }

    #[test]
    fn a_cause_of_which_not_all_was_read_says_so_and_names_what_takes_all() {
        let said = |kind, complete: bool| {
            incomplete(&json!({"kind": kind, "complete": complete, "count": 1000}))
        };
        assert_eq!(said("dead_letter", true), None);
        let letters = said("dead_letter", false).unwrap();
        assert!(
            letters.contains("1,000 are of this cause")
                && letters.contains("replay plan takes all"),
            "{letters}"
        );
        assert!(said("issue", false).unwrap().contains("there may be more"));
    }

    #[test]
    fn the_command_of_a_cause_has_all_of_its_ids() {
        let ids: Vec<String> = (0..120).map(|id| id.to_string()).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let of = |kind| command(&json!({"kind": kind, "place": "orders"}), &ids);
        assert!(
            of("issue").starts_with("for id in 0 1 2 ")
                && of("issue").contains(" 119; do headwater issue release $id; done")
        );
        assert!(of("dead_letter").ends_with(" 98 99 && headwater dlq replay orders 100 101 102 103 104 105 106 107 108 109 110 111 112 113 114 115 116 117 118 119"));
    }
}
