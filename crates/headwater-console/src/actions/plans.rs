//! Actions on replay plans: make one for a cause or for the dead letters that match a filter, pause, resume and cancel it.

use axum::extract::Path;
use axum::response::Response;
use serde_json::{Value, json};

use super::confirmation::{Confirmation, accepts_more, left_out, letter_example};
use super::done;
use super::letters::{filter_of, list_of};
use crate::form::FormFields;
use crate::screen::Screen;
use crate::text::{counted, encoded, items, plain, shell_word};
use crate::user::ConsoleRole;

pub(super) async fn create(screen: Screen, Path(key): Path<String>, form: FormFields) -> Response {
    let wanted = PlanRequest {
        body: json!({"failure": key}),
        command: format!("headwater plan create --failure {}", shell_word(&key)),
        back: format!("/console/failures/{}", encoded(&key)),
    };
    wanted.create(screen, form).await
}

/// For the dead letters of a topic that match a filter.
pub(super) async fn create_for_topic(
    screen: Screen,
    Path(topic): Path<String>,
    form: FormFields,
) -> Response {
    let (mut body, words) = filter_of(&form);
    body["topics"] = json!([topic]);
    let options: String = words.iter().map(|words| format!(" {words}")).collect();
    let wanted = PlanRequest {
        body,
        command: format!("headwater plan create {}{options}", shell_word(&topic)),
        back: list_of(&topic, &form),
    };
    wanted.create(screen, form).await
}

/// A plan to be made.
struct PlanRequest {
    body: Value,
    command: String,
    /// The page to go back to.
    back: String,
}

impl PlanRequest {
    /// Makes it, after a confirmation.
    async fn create(self, screen: Screen, form: FormFields) -> Response {
        // Counting ends by time: the number of very many is another one each time, so they are not counted again.
        if !accepts_more(&form) {
            let mut dry_run = self.body.clone();
            dry_run["dry_run"] = true.into();
            let tried = match screen.api.post("/plans", dry_run).await {
                Ok(tried) => tried,
                Err(error) => return screen.failed("Replay plan", &error),
            };
            let confirmation = Confirmation {
                verb: "Plan the replay of",
                count: tried["letters"].as_u64().unwrap_or(0),
                unit: ("dead letter", "dead letters"),
                or_more: tried["complete"] == false,
                needed: ConsoleRole::Write,
                examples: items(&tried, "examples").iter().map(letter_example).collect(),
                consequences: consequences(&tried),
                is_destructive: false,
                typed: None,
                command: self.command,
                back: self.back,
            };
            if !confirmation.is_given(&form) {
                return confirmation.page(&screen, &form);
            }
        }
        match screen.api.post("/plans", self.body).await {
            Ok(plan) => done(&format!("/console/plans/{}", plain(&plan["id"])), "planned"),
            Err(error) => screen.failed("Replay plan", &error),
        }
    }
}

fn consequences(tried: &Value) -> Vec<String> {
    let steps = items(tried, "steps");
    let canary = steps.first().map_or(0, |step| step["letters"].as_u64().unwrap_or(0));
    let rates: Vec<String> = steps.iter().skip(1).map(|step| plain(&step["per_second"])).collect();
    let groups: Vec<String> = items(tried, "groups").iter().map(plain).collect();
    let mut sentences = match tried["cause"].as_str() {
        Some(cause) => vec![format!("Cause: {cause}")],
        None => Vec::new(),
    };
    sentences.extend([
        format!(
            "{} are sent first. When all of them are settled, the rest follows with {} per second.",
            counted(canary, "letter", "letters"),
            rates.join(", then ")
        ),
        "The plan stops by itself when more than 5 % of a step fail again. It can be paused and cancelled."
            .to_owned(),
    ]);
    if !groups.is_empty() {
        sentences.push(format!("They are handled again by: {}.", groups.join(", ")));
    }
    sentences.extend(left_out(tried));
    if tried["complete"] == false {
        sentences.push("There are more than a plan takes; the oldest are taken.".to_owned());
    }
    sentences
}

pub(super) async fn pause(screen: Screen, Path(key): Path<String>) -> Response {
    change(&screen, &key, "pause", "paused").await
}

pub(super) async fn resume(screen: Screen, Path(key): Path<String>) -> Response {
    change(&screen, &key, "resume", "resumed").await
}

pub(super) async fn cancel(screen: Screen, Path(key): Path<String>, form: FormFields) -> Response {
    let back = format!("/console/plans/{}", encoded(&key));
    let plan = match screen.api.get(&format!("/plans/{}", encoded(&key))).await {
        Ok(plan) => plan,
        Err(error) => return screen.failed("Replay plan", &error),
    };
    let left = counted(plan["left"].as_u64().unwrap_or(0), "letter", "letters");
    let confirmation = Confirmation {
        verb: "Cancel",
        count: 1,
        unit: ("replay plan", "replay plans"),
        or_more: false,
        needed: ConsoleRole::Write,
        examples: Vec::new(),
        consequences: vec![
            format!("{left} that were not sent stay dead letters."),
            "A cancelled plan cannot be resumed; make a new one for what is left.".to_owned(),
        ],
        is_destructive: true,
        typed: None,
        command: format!("headwater plan cancel {}", shell_word(&key)),
        back,
    };
    if !confirmation.is_given(&form) {
        return confirmation.page(&screen, &form);
    }
    change(&screen, &key, "cancel", "cancelled").await
}

async fn change(screen: &Screen, key: &str, verb: &str, code: &str) -> Response {
    match screen.api.post(&format!("/plans/{}/{verb}", encoded(key)), json!({})).await {
        Ok(_) => done(&format!("/console/plans/{}", encoded(key)), code),
        Err(error) => screen.failed("Replay plan", &error),
    }
}
