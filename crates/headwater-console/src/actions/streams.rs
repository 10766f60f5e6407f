//! Actions on groups: move one to another position, delete one.

use axum::extract::Path;
use axum::response::Response;
use serde_json::json;

use super::confirmation::Confirmation;
use super::done;
use crate::form::FormFields;
use crate::screen::Screen;
use crate::text::{counted, encoded, number, shell_word};
use crate::user::ConsoleRole;

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
