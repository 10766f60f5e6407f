//! Actions on groups and dead letters.

use axum::extract::Path;
use axum::response::Response;
use serde_json::{Value, json};

use super::confirmation::{Confirmation, EXAMPLES_MAX, left_out, letter_example};
use super::{done, done_with};
use crate::form::FormFields;
use crate::screen::Screen;
use crate::screens::letter_filter;
use crate::text::{counted, encoded, items, number, shell_word};
use crate::user::ConsoleRole;

/// Maximum dead letters selected by id, as in the API.
const IDS_MAX: usize = 100;

/// The selected dead letters as the body of a call, and as words of a command.
fn selection(form: &FormFields) -> Option<(Value, String)> {
    let ids: Vec<_> = form.all("id").into_iter().take(IDS_MAX).collect();
    if !ids.is_empty() {
        let words: Vec<_> = ids.iter().map(|id| shell_word(id)).collect();
        return Some((json!({"ids": ids}), words.join(" ")));
    }
    if form.get("select") != "matching" {
        return None;
    }
    let (mut body, mut words) = (json!({}), Vec::new());
    for name in letter_filter().iter().filter(|name| !form.get(name).is_empty()) {
        let value = form.get(name);
        body[*name] = match (*name, value.parse::<u16>()) {
            ("partition", Ok(partition)) => partition.into(),
            _ => value.into(),
        };
        words.push(format!("--{name} {}", shell_word(value)));
    }
    if words.is_empty() {
        body["all"] = true.into();
        words.push("--all".to_owned());
    }
    Some((body, words.join(" ")))
}

pub(super) async fn replay(
    screen: Screen,
    Path(topic): Path<String>,
    form: FormFields,
) -> Response {
    on_letters(screen, topic, form, LetterAction::Replay).await
}

pub(super) async fn replay_edited(
    screen: Screen,
    Path((topic, entry)): Path<(String, String)>,
    form: FormFields,
) -> Response {
    // Browsers send line breaks of forms as CR LF.
    let payload = form.get("payload").replace("\r\n", "\n");
    let path = format!("/topics/{}/dead-letters/{}/replay", encoded(&topic), encoded(&entry));
    match screen.api.post(&path, json!({"payload": payload})).await {
        Ok(answer) if answer["replayed"] == false => {
            done_with(&format!("/console/topics/{}/dead-letters", encoded(&topic)), "replayed", 0)
        }
        Ok(_) => done(&format!("/console/topics/{}/dead-letters", encoded(&topic)), "edited"),
        Err(error) => screen.failed("Dead letter", &error),
    }
}

pub(super) async fn purge(screen: Screen, Path(topic): Path<String>, form: FormFields) -> Response {
    on_letters(screen, topic, form, LetterAction::Purge).await
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LetterAction {
    Replay,
    Purge,
}

async fn on_letters(
    screen: Screen,
    topic: String,
    form: FormFields,
    action: LetterAction,
) -> Response {
    let back = format!("/console/topics/{}/dead-letters", encoded(&topic));
    let Some((body, words)) = selection(&form) else {
        let none = crate::api_client::Problem::new(
            axum::http::StatusCode::BAD_REQUEST,
            "nothing_selected",
            "no dead letter is selected; go back and select some",
        );
        return screen.failed("Dead letters", &none);
    };
    let (verb, name, counter) = match action {
        LetterAction::Replay => ("Replay", "replay", "replayed"),
        LetterAction::Purge => ("Purge", "purge", "purged"),
    };
    let path = format!("/topics/{}/dead-letters/{name}", encoded(&topic));
    let mut dry_run = body.clone();
    dry_run["dry_run"] = true.into();
    let (tried, examples) =
        tokio::join!(screen.api.post(&path, dry_run), examples(&screen, &topic, &form));
    let tried = match tried {
        Ok(tried) => tried,
        Err(error) => return screen.failed("Dead letters", &error),
    };
    let mut consequences = Vec::new();
    if action == LetterAction::Replay {
        consequences.push("They are sent to their partitions again and processed by every group. If the cause remains, they fail again.".to_owned());
        consequences.extend(left_out(&tried));
    } else {
        consequences
            .push("Their payloads are deleted. They can not be replayed afterwards.".to_owned());
    }
    let is_purge = action == LetterAction::Purge;
    let confirmation = Confirmation {
        verb,
        count: tried[counter].as_u64().unwrap_or(0),
        unit: ("dead letter", "dead letters"),
        or_more: false,
        needed: if is_purge { ConsoleRole::Admin } else { ConsoleRole::Write },
        examples,
        consequences,
        is_destructive: is_purge,
        typed: None,
        // A replay asks for no confirmation.
        command: format!(
            "headwater dlq {name} {} {words}{}",
            shell_word(&topic),
            if is_purge { " --yes" } else { "" }
        ),
        back: back.clone(),
    };
    if !confirmation.is_given(&form) {
        return confirmation.page(&screen, &form);
    }
    match screen.api.post(&path, body).await {
        Ok(answer) => done_with(&back, counter, answer[counter].as_u64().unwrap_or(0)),
        Err(error) => screen.failed("Dead letters", &error),
    }
}

/// Ids and reasons of some of the selected dead letters.
async fn examples(screen: &Screen, topic: &str, form: &FormFields) -> Vec<String> {
    let ids = form.all("id");
    if !ids.is_empty() {
        return ids.into_iter().take(EXAMPLES_MAX).map(str::to_owned).collect();
    }
    let filter = form.query_of(letter_filter());
    let path = format!(
        "/topics/{}/dead-letters?newest_first=true&limit={EXAMPLES_MAX}&{filter}",
        encoded(topic)
    );
    let page = screen.api.get(&path).await;
    let letters =
        page.map(|page| items(&page, "dead_letters").iter().map(letter_example).collect());
    letters.unwrap_or_default()
}

pub(super) async fn reset_group(
    screen: Screen,
    Path((topic, group)): Path<(String, String)>,
    form: FormFields,
) -> Response {
    let path = format!("/topics/{}/groups/{}/reset", encoded(&topic), encoded(&group));
    let to = form.get("to");
    // A group with members refuses the change but not the dry run.
    let tried =
        match screen.api.post(&path, json!({"to": to, "dry_run": true, "force": true})).await {
            Ok(tried) => tried,
            Err(error) => return screen.failed("Group", &error),
        };
    let count = |name: &str| tried[name]["count"].as_u64().unwrap_or(0);
    let or_more = |name: &str| tried[name]["or_more"] == true;
    let line = |name: &str, text: &str| {
        let more = if or_more(name) { " or more" } else { "" };
        format!("{}{more} {text}", counted(count(name), "message", "messages"))
    };
    let total = count("again") + count("skipped") + count("dropped");
    let confirmation = Confirmation {
        verb: "Move the group over",
        count: total,
        unit: ("message", "messages"),
        or_more: ["again", "skipped", "dropped"].into_iter().any(or_more),
        needed: ConsoleRole::Admin,
        examples: Vec::new(),
        consequences: vec![
            line("again", "will be delivered again."),
            line("skipped", "will be skipped."),
            line("dropped", "in progress: their outcome will be ignored."),
        ],
        is_destructive: true,
        typed: None,
        command: format!(
            "headwater group reset {} {} --to {} --yes",
            shell_word(&topic),
            shell_word(&group),
            shell_word(to)
        ),
        back: format!("/console/topics/{}/groups/{}", encoded(&topic), encoded(&group)),
    };
    if !confirmation.is_given(&form) {
        return confirmation.page(&screen, &form);
    }
    match screen.api.post(&path, json!({"to": to})).await {
        Ok(_) => done(&confirmation.back, "reset"),
        Err(error) => screen.failed("Group", &error),
    }
}

pub(super) async fn delete_group(
    screen: Screen,
    Path((topic, group)): Path<(String, String)>,
    form: FormFields,
) -> Response {
    let path = format!("/topics/{}/groups/{}", encoded(&topic), encoded(&group));
    let described = match screen.api.get(&path).await {
        Ok(described) => described,
        Err(error) => return screen.failed("Group", &error),
    };
    let waiting = |name: &str| described[name].as_u64().unwrap_or(0);
    let confirmation = Confirmation::of_deletion(
        ("group", &group),
        vec![
            format!(
                "Group `{group}` of topic `{topic}` forgets its position: {} not yet delivered, {} in progress.",
                counted(waiting("lag"), "message", "messages"),
                number(waiting("pending"))
            ),
            "Messages are kept, but retention no longer waits for the group.".to_owned(),
        ],
        format!("headwater group delete {} {} --yes", shell_word(&topic), shell_word(&group)),
        format!("/console/topics/{}/groups/{}", encoded(&topic), encoded(&group)),
    );
    if !confirmation.is_given(&form) {
        return confirmation.page(&screen, &form);
    }
    match screen.api.delete(&path).await {
        Ok(_) => done(&format!("/console/topics/{}", encoded(&topic)), "deleted"),
        Err(error) => screen.failed("Group", &error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_letters_are_selected_by_id_by_filter_or_all() {
        let selected = |query| selection(&FormFields::from_query(query));
        assert_eq!(selected(""), None);
        assert_eq!(selected("reason=x"), None, "a filter alone selects nothing");
        let (body, words) = selected("id=1-0&id=2-0&select=matching").unwrap();
        assert_eq!((body, &*words), (json!({"ids": ["1-0", "2-0"]}), "1-0 2-0"));
        let (body, words) = selected("select=matching&partition=3&reason=a+b").unwrap();
        assert_eq!(body, json!({"reason": "a b", "partition": 3}));
        assert_eq!(words, "--reason 'a b' --partition 3");
        let (_, words) = selected("select=matching&reason=it%27s+%24%28id%29").unwrap();
        assert_eq!(words, "--reason 'it'\\''s $(id)'");
        let (_, words) = selected("id=1-0&id=%3Bid").unwrap();
        assert_eq!(words, "1-0 ';id'");
        assert_eq!(selected("select=matching").unwrap().0, json!({"all": true}));
    }
}
