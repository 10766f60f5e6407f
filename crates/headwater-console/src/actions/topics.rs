//! Actions on topics: produce, grow, trim, delete.

use axum::extract::Path;
use axum::response::{IntoResponse, Redirect, Response};
use serde_json::{Value, json};

use super::confirmation::Confirmation;
use super::{done, done_with};
use crate::form::FormFields;
use crate::screen::Screen;
use crate::text::{counted, encoded, field, items, plain, shell_word};
use crate::user::ConsoleRole;

pub(super) async fn produce(
    screen: Screen,
    Path(topic): Path<String>,
    form: FormFields,
) -> Response {
    let payload = form.get("payload").replace("\r\n", "\n");
    let mut message = json!({"payload": payload});
    if !form.get("key").is_empty() {
        message["key"] = form.get("key").into();
    }
    let path = format!("/topics/{}/messages", encoded(&topic));
    match screen.api.post(&path, json!({"messages": [message]})).await {
        Ok(sent) => {
            let entry = field(&sent["messages"][0], "id");
            let address =
                format!("/console/topics/{}/messages/{}", encoded(&topic), encoded(entry));
            Redirect::to(&address).into_response()
        }
        Err(error) => screen.failed("Message", &error),
    }
}

pub(super) async fn delete_topic(
    screen: Screen,
    Path(topic): Path<String>,
    form: FormFields,
) -> Response {
    let path = format!("/topics/{}", encoded(&topic));
    let described = match screen.api.get(&path).await {
        Ok(described) => described,
        Err(error) => return screen.failed("Topic", &error),
    };
    let counts = |name: &str| described[name].as_u64().unwrap_or(0);
    let mut consequences = vec![format!(
        "Topic `{topic}` is deleted with {}, {} and {}.",
        counted(counts("length"), "message", "messages"),
        counted(counts("delayed"), "delayed message", "delayed messages"),
        counted(counts("dead_letters"), "dead letter", "dead letters"),
    )];
    consequences.extend(readers(&described, "Groups that read it"));
    let confirmation = Confirmation::of_deletion(
        ("topic", &topic),
        consequences,
        format!("headwater topic delete {} --yes", shell_word(&topic)),
        format!("/console/topics/{}", encoded(&topic)),
    );
    if !confirmation.is_given(&form) {
        return confirmation.page(&screen, &form);
    }
    match screen.api.delete(&path).await {
        Ok(_) => done("/console/topics", "deleted"),
        Err(error) => screen.failed("Topic", &error),
    }
}

pub(super) async fn grow(screen: Screen, Path(topic): Path<String>, form: FormFields) -> Response {
    let path = format!("/topics/{}/grow", encoded(&topic));
    let wanted: u64 = form.get("partitions").trim().parse().unwrap_or(0);
    let tried = screen.api.post(&path, json!({"partitions": wanted, "dry_run": true})).await;
    let described = match tried {
        Ok(described) => described,
        Err(error) => return screen.failed("Topic", &error),
    };
    let now = items(&described, "partitions").len() as u64;
    let mut consequences = vec![
        format!(
            "Topic `{topic}` has {} and will have {wanted}. It cannot shrink again.",
            counted(now, "partition", "partitions")
        ),
        "Some keys move to new partitions and keep their order. It takes about 10 s: until every producer knows."
            .to_owned(),
    ];
    consequences.extend(readers(&described, "Groups that share the new partitions"));
    let confirmation = Confirmation {
        verb: "Add",
        count: wanted.saturating_sub(now),
        unit: ("partition", "partitions"),
        or_more: false,
        needed: ConsoleRole::Admin,
        examples: Vec::new(),
        consequences,
        is_destructive: true,
        typed: None,
        command: format!("headwater topic grow {} --partitions {wanted}", shell_word(&topic)),
        back: format!("/console/topics/{}", encoded(&topic)),
    };
    if !confirmation.is_given(&form) {
        return confirmation.page(&screen, &form);
    }
    match screen.api.post(&path, json!({"partitions": wanted})).await {
        Ok(_) => done_with(&confirmation.back, "grown", confirmation.count),
        Err(error) => screen.failed("Topic", &error),
    }
}

/// What a trim keeps, as the body of a call and as words of a command. Empty fields are left out.
fn kept(form: &FormFields) -> (Value, String) {
    let (mut body, mut words) = (json!({}), Vec::new());
    let hours = form.get("hours").trim();
    if !hours.is_empty() {
        // The API rejects what is not a number.
        body["age_ms"] = hours
            .parse::<u64>()
            .map_or(hours.into(), |hours| hours.saturating_mul(3_600_000).into());
        words.push(format!("--age {}", shell_word(&format!("{hours}h"))));
    }
    for (name, option) in [("count", "--count"), ("partition", "--partition")] {
        let value = form.get(name).trim();
        if !value.is_empty() {
            body[name] = value.parse::<u64>().map_or(value.into(), Value::from);
            words.push(format!("{option} {}", shell_word(value)));
        }
    }
    if form.get("force") == "true" {
        body["force"] = true.into();
        words.push("--force".to_owned());
    }
    (body, words.join(" "))
}

pub(super) async fn trim(screen: Screen, Path(topic): Path<String>, form: FormFields) -> Response {
    let path = format!("/topics/{}/trim", encoded(&topic));
    let (body, words) = kept(&form);
    let mut dry_run = body.clone();
    dry_run["dry_run"] = true.into();
    let described_path = format!("/topics/{}", encoded(&topic));
    let (tried, described) =
        tokio::join!(screen.api.post(&path, dry_run), screen.api.get(&described_path));
    let tried = match tried {
        Ok(tried) => tried,
        Err(error) => return screen.failed("Topic", &error),
    };
    let mut consequences =
        vec!["At most so many of the oldest messages are removed, with their payloads.".to_owned()];
    if body["force"] == true {
        consequences.push("Messages that a group has not read or not settled are lost.".to_owned());
    } else if tried["held_back"] == true {
        consequences
            .push("Others are kept because a group has not read or not settled them.".to_owned());
    }
    if let Ok(described) = described {
        consequences.extend(readers(&described, "Groups that read it"));
    }
    let confirmation = Confirmation {
        verb: "Trim",
        count: tried["removed"].as_u64().unwrap_or(0),
        unit: ("message", "messages"),
        or_more: tried["or_more"] == true,
        needed: ConsoleRole::Admin,
        examples: Vec::new(),
        consequences,
        is_destructive: true,
        typed: None,
        command: format!("headwater topic trim {} {words} --yes", shell_word(&topic)),
        back: format!("/console/topics/{}", encoded(&topic)),
    };
    if !confirmation.is_given(&form) {
        return confirmation.page(&screen, &form);
    }
    match screen.api.post(&path, body).await {
        Ok(answer) => {
            done_with(&confirmation.back, "trimmed", answer["removed"].as_u64().unwrap_or(0))
        }
        Err(error) => screen.failed("Topic", &error),
    }
}

/// A sentence about the groups of a topic; `None` if it has none, or they cannot be read.
pub(super) async fn readers_of(screen: &Screen, topic: &str, what: &str) -> Option<String> {
    let described = screen.api.get(&format!("/topics/{}", encoded(topic))).await.ok()?;
    readers(&described, what)
}

/// A sentence about the groups of a topic, if it has any.
fn readers(described: &Value, what: &str) -> Option<String> {
    let names: Vec<_> = items(described, "groups").iter().map(plain).collect();
    (!names.is_empty()).then(|| format!("{what}: {}.", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_trim_keeps_is_what_was_filled_in() {
        let kept = |query| kept(&FormFields::from_query(query));
        assert_eq!(kept("count=&hours=&partition="), (json!({}), String::new()));
        let (body, words) = kept("count=100&hours=24&partition=3&force=true");
        assert_eq!(
            body,
            json!({"count": 100, "age_ms": 86_400_000, "partition": 3, "force": true})
        );
        assert_eq!(words, "--age 24h --count 100 --partition 3 --force");
        let (body, words) = kept("count=%24(id)");
        assert_eq!((body, &*words), (json!({"count": "$(id)"}), "--count '$(id)'"));
    }
}
