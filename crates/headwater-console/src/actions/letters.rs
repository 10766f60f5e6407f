//! Actions on dead letters: replay and purge those that are selected, all that match or all of a cause; replay an edited copy.
//!
//! Upstream: the screens of dead letters, and `failures.rs`. Guarantees: every selected one is touched, however many they are; counting and
//! work have a time limit, after which the page says what is left; what was done before a failure is part of its message.

use std::time::Duration;

use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::confirmation::{Confirmation, EXAMPLES_MAX, accepts_more, left_out, letter_example};
use super::topics::readers_of;
use super::{WORK_TIME_MAX, done, done_in_part, done_with};
use crate::api_client::{ConsoleApi, LongWork, Problem};
use crate::form::FormFields;
use crate::screen::Screen;
use crate::screens::letter_filter;
use crate::text::{encoded, items, shell_word};
use crate::user::ConsoleRole;

/// Dead letters of one call by id, as in the API.
const IDS_MAX: usize = 100;

/// Time for counting what is selected.
const COUNT_TIME_MAX: Duration = Duration::from_secs(8);

/// What is done with dead letters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LetterAction {
    Replay,
    Purge,
}

impl LetterAction {
    /// The last part of its route and the verb of its command.
    fn name(self) -> &'static str {
        match self {
            Self::Replay => "replay",
            Self::Purge => "purge",
        }
    }

    /// The number in its answer, and the code of the sentence afterwards.
    fn counter(self) -> &'static str {
        match self {
            Self::Replay => "replayed",
            Self::Purge => "purged",
        }
    }

    /// What a confirmation says about the groups of the topic.
    pub(super) fn readers(self) -> &'static str {
        match self {
            Self::Replay => "Groups that handle them again",
            Self::Purge => "Groups of the topic",
        }
    }

    fn path(self, topic: &str) -> String {
        format!("/topics/{}/dead-letters/{}", encoded(topic), self.name())
    }
}

/// Dead letters of a topic, as bodies of calls and as words of commands.
#[derive(Debug, PartialEq)]
pub(super) struct LetterSelection {
    calls: Vec<(Value, String)>,
    /// Their number, if they are selected by id.
    ids: Option<u64>,
}

impl LetterSelection {
    /// These, in as many calls as the API needs.
    pub(super) fn of_ids(ids: &[&str]) -> Self {
        let call = |ids: &[&str]| {
            let words: Vec<_> = ids.iter().map(|id| shell_word(id)).collect();
            (json!({"ids": ids}), words.join(" "))
        };
        Self { calls: ids.chunks(IDS_MAX).map(call).collect(), ids: Some(ids.len() as u64) }
    }

    /// What a form selects: by id, by filter, or all. `None`: nothing.
    fn of(form: &FormFields) -> Option<Self> {
        let ids = form.all("id");
        if !ids.is_empty() {
            return Some(Self::of_ids(&ids));
        }
        if form.get("select") != "matching" {
            return None;
        }
        let (mut body, mut words) = filter_of(form);
        if words.is_empty() {
            body["all"] = true.into();
            words.push("--all".to_owned());
        }
        Some(Self { calls: vec![(body, words.join(" "))], ids: None })
    }

    /// The command that does the same: one for each call.
    pub(super) fn command(&self, action: LetterAction, topic: &str) -> String {
        let (name, topic) = (action.name(), shell_word(topic));
        // A replay asks for no confirmation.
        let end = if action == LetterAction::Purge { " --yes" } else { "" };
        let one =
            |(_, words): &(Value, String)| format!("headwater dlq {name} {topic} {words}{end}");
        self.calls.iter().map(one).collect::<Vec<_>>().join(" && ")
    }

    /// A dry run, until its time is over.
    async fn count(
        &self,
        api: &ConsoleApi,
        topic: &str,
        action: LetterAction,
    ) -> Result<LetterCount, Problem> {
        let (path, deadline) = (action.path(topic), Instant::now() + COUNT_TIME_MAX);
        let mut count = LetterCount { is_complete: true, ..LetterCount::default() };
        for (body, _) in &self.calls {
            let mut body = body.clone();
            body["dry_run"] = true.into();
            if Instant::now() >= deadline {
                count.is_complete = false;
                break;
            }
            match self.call(api, &path, body, deadline).await? {
                LongWork::Ended(answer) => {
                    let number = |name: &str| answer[name].as_u64().unwrap_or(0);
                    count.changed += number(action.counter());
                    count.already_replayed += number("already_replayed");
                    count.refused += number("refused");
                }
                LongWork::Stopped(counted) => {
                    count.changed += counted;
                    count.is_complete = false;
                    break;
                }
            }
        }
        if let Some(ids) = self.ids.filter(|_| !count.is_complete) {
            // Their number is known.
            count = LetterCount { changed: ids, is_complete: true, ..LetterCount::default() };
        }
        Ok(count)
    }

    /// One call. By id it is short and has no deadline.
    async fn call(
        &self,
        api: &ConsoleApi,
        path: &str,
        body: Value,
        deadline: Instant,
    ) -> Result<LongWork, Problem> {
        match self.ids {
            Some(_) => api.post(path, body).await.map(LongWork::Ended),
            None => api.post_until(path, body, deadline).await,
        }
    }

    /// Replays or purges them until the deadline.
    pub(super) async fn act(
        &self,
        api: &ConsoleApi,
        topic: &str,
        action: LetterAction,
        deadline: Instant,
    ) -> Result<LetterWork, Problem> {
        let path = action.path(topic);
        let mut work = LetterWork::default();
        for (index, (body, _)) in self.calls.iter().enumerate() {
            if index > 0 && Instant::now() >= deadline {
                return Ok(work);
            }
            match self.call(api, &path, body.clone(), deadline).await {
                Ok(LongWork::Ended(answer)) => {
                    let number = |name: &str| answer[name].as_u64().unwrap_or(0);
                    work.changed += number(action.counter());
                    let others = number("already_replayed") + number("refused");
                    work.handled += number(action.counter()) + others;
                }
                Ok(LongWork::Stopped(done)) => {
                    work.changed += done;
                    work.handled += done;
                    return Ok(work);
                }
                Err(error) => return Err(error.after(work.changed, action.counter())),
            }
        }
        Ok(LetterWork { is_done: true, ..work })
    }
}

/// What a dry run has counted.
#[derive(Debug, Default, PartialEq)]
struct LetterCount {
    /// Those that would be replayed or purged.
    changed: u64,
    already_replayed: u64,
    refused: u64,
    /// Whether these are all.
    is_complete: bool,
}

/// What was done.
#[derive(Debug, Default, PartialEq)]
pub(super) struct LetterWork {
    /// Those that were replayed or purged.
    changed: u64,
    /// The same with those that were left out.
    handled: u64,
    /// Whether there was time for all.
    is_done: bool,
}

impl LetterWork {
    /// Back to a page, which says what was done and, of `total`, what is left.
    pub(super) fn shown(&self, action: LetterAction, back: &str, total: Option<u64>) -> Response {
        let left = total.map(|total| total.saturating_sub(self.handled));
        match (self.is_done, action) {
            (true, _) => done_with(back, action.counter(), self.changed),
            (false, LetterAction::Purge) => done_in_part(back, "purged", self.changed, left),
            (false, LetterAction::Replay) => done_in_part(back, "handled", self.handled, left),
        }
    }
}

/// The filter of a form as the body of a call, and as words of a command.
pub(super) fn filter_of(form: &FormFields) -> (Value, Vec<String>) {
    let (mut body, mut words) = (json!({}), Vec::new());
    for name in letter_filter().iter().filter(|name| !form.get(name).is_empty()) {
        let value = form.get(name);
        body[*name] = match (*name, value.parse::<u16>()) {
            ("partition", Ok(partition)) => partition.into(),
            _ => value.into(),
        };
        words.push(format!("--{name} {}", shell_word(value)));
    }
    (body, words)
}

/// The list of dead letters with the filter of a form.
pub(super) fn list_of(topic: &str, form: &FormFields) -> String {
    let filter = form.query_of(letter_filter());
    let join = if filter.is_empty() { "" } else { "?" };
    format!("/console/topics/{}/dead-letters{join}{filter}", encoded(topic))
}

pub(super) async fn replay(
    screen: Screen,
    Path(topic): Path<String>,
    form: FormFields,
) -> Response {
    on_selected(screen, topic, form, LetterAction::Replay).await
}

pub(super) async fn purge(screen: Screen, Path(topic): Path<String>, form: FormFields) -> Response {
    on_selected(screen, topic, form, LetterAction::Purge).await
}

async fn on_selected(
    screen: Screen,
    topic: String,
    form: FormFields,
    action: LetterAction,
) -> Response {
    let deadline = Instant::now() + WORK_TIME_MAX;
    let back = list_of(&topic, &form);
    let Some(selection) = LetterSelection::of(&form) else {
        let none = Problem::new(
            StatusCode::BAD_REQUEST,
            "nothing_selected",
            "no dead letter is selected; go back and select some",
        );
        return screen.failed("Dead letters", &none);
    };
    let mut total = None;
    // What cannot be counted in time is not counted again.
    if !accepts_more(&form) {
        let (counted, examples, readers) = tokio::join!(
            selection.count(&screen.api, &topic, action),
            examples(&screen, &topic, &form),
            readers_of(&screen, &topic, action.readers())
        );
        let counted = match counted {
            Ok(counted) => counted,
            Err(error) => return screen.failed("Dead letters", &error),
        };
        let mut consequences = consequences(&selection, action, &counted);
        consequences.extend(readers);
        let is_purge = action == LetterAction::Purge;
        let confirmation = Confirmation {
            verb: if is_purge { "Purge" } else { "Replay" },
            count: counted.changed,
            unit: ("dead letter", "dead letters"),
            or_more: !counted.is_complete,
            needed: if is_purge { ConsoleRole::Admin } else { ConsoleRole::Write },
            examples,
            consequences,
            is_destructive: is_purge,
            typed: None,
            command: selection.command(action, &topic),
            back: back.clone(),
        };
        if !confirmation.is_given(&form) {
            return confirmation.page(&screen, &form);
        }
        let LetterCount { changed, already_replayed, refused, is_complete } = counted;
        total = is_complete.then_some(changed + already_replayed + refused);
    }
    match selection.act(&screen.api, &topic, action, deadline).await {
        Ok(work) => work.shown(action, &back, total),
        Err(error) => screen.failed("Dead letters", &error),
    }
}

/// What follows from it, in sentences.
fn consequences(
    selection: &LetterSelection,
    action: LetterAction,
    counted: &LetterCount,
) -> Vec<String> {
    let mut sentences = Vec::new();
    if action == LetterAction::Replay {
        sentences.push("They are sent to their partitions again and processed by every group. If the cause remains, they fail again.".to_owned());
        if selection.ids.is_none() {
            sentences.push("A replay plan sends a few of them first, and goes on by itself if this takes long.".to_owned());
        }
        let LetterCount { already_replayed, refused, .. } = counted;
        let tried = json!({"already_replayed": already_replayed, "refused": refused});
        sentences.extend(left_out(&tried));
    } else {
        sentences
            .push("Their payloads are deleted. They can not be replayed afterwards.".to_owned());
    }
    if !counted.is_complete {
        let seconds = COUNT_TIME_MAX.as_secs();
        sentences.push(format!(
            "Only so many were counted within {seconds} s; all that match are meant."
        ));
    }
    sentences
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

pub(super) async fn replay_edited(
    screen: Screen,
    Path((topic, entry)): Path<(String, String)>,
    form: FormFields,
) -> Response {
    // Browsers send line breaks of forms as CR LF.
    let payload = form.get("payload").replace("\r\n", "\n");
    let path = format!("/topics/{}/dead-letters/{}/replay", encoded(&topic), encoded(&entry));
    let back = format!("/console/topics/{}/dead-letters", encoded(&topic));
    match screen.api.post(&path, json!({"payload": payload})).await {
        Ok(answer) if answer["replayed"] == false => done_with(&back, "replayed", 0),
        Ok(_) => done(&back, "edited"),
        Err(error) => screen.failed("Dead letter", &error),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::http::Extensions;
    use axum::response::IntoResponse;
    use axum::routing::post;
    use axum::{Json, Router};

    use super::*;
    use crate::api_client::{ConsoleSeconds, ConsoleState};
    use crate::user::ConsoleUser;

    fn selected(query: &str) -> Option<LetterSelection> {
        LetterSelection::of(&FormFields::from_query(query))
    }

    #[test]
    fn dead_letters_are_selected_by_id_by_filter_or_all() {
        let one = |query| {
            let mut calls = selected(query).unwrap().calls;
            assert_eq!(calls.len(), 1);
            calls.remove(0)
        };
        assert_eq!(selected(""), None);
        assert_eq!(selected("reason=x"), None, "a filter alone selects nothing");
        let (body, words) = one("id=1-0&id=2-0&select=matching");
        assert_eq!((body, &*words), (json!({"ids": ["1-0", "2-0"]}), "1-0 2-0"));
        let (body, words) = one("select=matching&partition=3&reason=a+b");
        assert_eq!(body, json!({"reason": "a b", "partition": 3}));
        assert_eq!(words, "--reason 'a b' --partition 3");
        let (_, words) = one("select=matching&reason=it%27s+%24%28id%29");
        assert_eq!(words, "--reason 'it'\\''s $(id)'");
        let (_, words) = one("id=1-0&id=%3Bid");
        assert_eq!(words, "1-0 ';id'");
        assert_eq!(one("select=matching").0, json!({"all": true}));
        let purge = selected("select=matching").unwrap().command(LetterAction::Purge, "a b");
        assert_eq!(purge, "headwater dlq purge 'a b' --all --yes");
    }

    /// The bodies of the calls of an API, in which a call with ids takes 3 s and one with a filter a minute.
    type Calls = Arc<Mutex<Vec<Value>>>;

    fn api() -> (ConsoleApi, Calls) {
        let calls = Calls::default();
        let seen = Arc::clone(&calls);
        let purge = move |Json(body): Json<Value>| async move {
            seen.lock().unwrap().push(body.clone());
            if let Some(ids) = body["ids"].as_array() {
                tokio::time::sleep(Duration::from_secs(3)).await;
                let error = json!({"error": {"code": "not_found", "message": "no such letter"}});
                return match ids[0] == "gone" {
                    true => (StatusCode::NOT_FOUND, Json(error)).into_response(),
                    false => Json(json!({"purged": ids.len(), "is_done": true})).into_response(),
                };
            }
            let lines = futures_util::stream::unfold(1, |second: u64| async move {
                let line = match second {
                    0..60 => {
                        tokio::time::sleep(Duration::from_secs(1)).await;
                        json!({"progress": {"done": 100 * second}})
                    }
                    60 => json!({"end": {"purged": 6000, "is_done": true}}),
                    _ => return None,
                };
                Some((Ok::<_, std::convert::Infallible>(format!("{line}\n")), second + 1))
            });
            axum::body::Body::from_stream(lines).into_response()
        };
        let router = Router::new().route("/api/v1/topics/orders/dead-letters/purge", post(purge));
        let state = Arc::new(ConsoleState::new(router, ConsoleSeconds::start()));
        let (name, view, forwarded) = ("ann".to_owned(), String::new(), Extensions::new());
        let role = ConsoleRole::Admin;
        let user = ConsoleUser { name, role, view, has_session: false, forwarded };
        (ConsoleApi::new(state, user), calls)
    }

    fn numbered(count: usize) -> LetterSelection {
        let ids: Vec<String> = (0..count).map(|number| format!("{number}-0")).collect();
        LetterSelection::of_ids(&ids.iter().map(String::as_str).collect::<Vec<_>>())
    }

    #[tokio::test(start_paused = true)]
    async fn more_than_a_hundred_selected_ones_are_all_purged() {
        let (api, calls) = api();
        let selection = numbered(250);
        let counted = selection.count(&api, "orders", LetterAction::Purge).await.unwrap();
        assert_eq!((counted.changed, counted.is_complete), (250, true));
        assert!(calls.lock().unwrap().iter().all(|body| body["dry_run"] == true));
        calls.lock().unwrap().clear();
        let deadline = Instant::now() + WORK_TIME_MAX;
        let work = selection.act(&api, "orders", LetterAction::Purge, deadline).await;
        assert_eq!(work, Ok(LetterWork { changed: 250, handled: 250, is_done: true }));
        let size = |body: &Value| body["ids"].as_array().unwrap().len();
        assert_eq!(calls.lock().unwrap().iter().map(size).collect::<Vec<_>>(), [100, 100, 50]);
        let command = selection.command(LetterAction::Purge, "orders");
        assert_eq!(command.matches("headwater dlq purge orders ").count(), 3);
        assert!(command.contains(" 99-0 --yes && headwater dlq purge orders 100-0 "), "{command}");
    }

    #[tokio::test(start_paused = true)]
    async fn work_ends_with_its_time_and_says_what_is_left() {
        let (api, calls) = api();
        let selection = selected("select=matching&reason=x").unwrap();
        let counted = selection.count(&api, "orders", LetterAction::Purge).await.unwrap();
        assert_eq!((counted.changed, counted.is_complete), (800, false), "in 8 s");
        assert_eq!(calls.lock().unwrap()[0]["dry_run"], true);
        let deadline = Instant::now() + WORK_TIME_MAX;
        let work = selection.act(&api, "orders", LetterAction::Purge, deadline).await.unwrap();
        assert_eq!(work, LetterWork { changed: 2000, handled: 2000, is_done: false });
        let location = |total| {
            let response = work.shown(LetterAction::Purge, "/console/x", total);
            response.headers()["location"].to_str().unwrap().to_owned()
        };
        assert_eq!(location(Some(6000)), "/console/x?done=purged&count=2000&left=4000");
        assert_eq!(location(None), "/console/x?done=purged&count=2000&left=more");
    }

    #[tokio::test(start_paused = true)]
    async fn of_very_many_ids_those_are_left_for_which_there_is_no_time() {
        let (api, _) = api();
        let selection = numbered(1000);
        let counted = selection.count(&api, "orders", LetterAction::Purge).await.unwrap();
        assert_eq!((counted.changed, counted.is_complete), (1000, true), "their number is known");
        let deadline = Instant::now() + WORK_TIME_MAX;
        let work = selection.act(&api, "orders", LetterAction::Purge, deadline).await;
        assert_eq!(work, Ok(LetterWork { changed: 700, handled: 700, is_done: false }));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_says_what_was_done_before() {
        let (api, _) = api();
        let mut ids = vec!["1-0"; IDS_MAX];
        ids.push("gone");
        let (selection, deadline) = (LetterSelection::of_ids(&ids), Instant::now() + WORK_TIME_MAX);
        let failed = selection.act(&api, "orders", LetterAction::Purge, deadline).await;
        let failed = failed.unwrap_err();
        assert!(failed.is_not_found());
        assert_eq!(failed.message, "no such letter; 100 were purged before");
    }
}
