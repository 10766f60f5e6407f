//! Dead letters of a topic: the list with a selection, and one dead letter.

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{
    ButtonStyle, ListOrder, action, block, button, count, empty, excerpt, facts, id, live, pager,
    payload, problem, table_with_order, time,
};
use crate::screen::{Screen, ScreenContent};
use crate::screens::ROWS;
use crate::screens::messages::named_values;
use crate::text::{encoded, field, items, plain, shell_word};
use crate::user::ConsoleRole;

/// What may have removed a dead letter.
const GONE: &str =
    "dead letters are kept until they are replayed or purged, or their topic is deleted";

/// Names of the filter.
pub(crate) const FILTER: [&str; 5] = ["reason", "key", "partition", "from", "to"];

fn path_of(topic: &str) -> Vec<(String, String)> {
    vec![
        ("Topics".to_owned(), "/console/topics".to_owned()),
        (topic.to_owned(), format!("/console/topics/{}", encoded(topic))),
    ]
}

pub(crate) async fn list(screen: Screen, Path(topic): Path<String>) -> Response {
    let filter = screen.query.query_of(&[&FILTER[..], &["cursor"]].concat());
    let keep = [&FILTER[..], &["oldest_first"]].concat();
    let newest_first = screen.query.get("oldest_first") != "true";
    let path = format!(
        "/topics/{}/dead-letters?newest_first={newest_first}&limit={ROWS}&{filter}",
        encoded(&topic)
    );
    let order = ListOrder::of(&screen, "Dead letter", ("oldest_first", false), &keep);
    let address = format!("/console/topics/{}/dead-letters", encoded(&topic));
    let act = address.replacen("/console/", "/console/do/", 1);
    let found = screen.api.get(&path).await;
    let content = match &found {
        Err(error) if error.is_not_found() => return screen.failed("Topic", error),
        Err(error) => problem("The dead letters", error, &screen),
        Ok(page) if items(page, "dead_letters").is_empty() => empty(
            "No dead letter matches. A message becomes one after its last attempt has failed.",
            None,
        ),
        Ok(page) => html! {
            (selection(&screen, &act, &address, page, &order))
            (pager(&screen, &keep, &page["next_cursor"]))
        },
    };
    let content = html! {
        form.filters.inline action=(address) {
            label for="reason" { "Reason contains" }
            input #reason name="reason" value=(screen.query.get("reason")) maxlength="200";
            label for="key" { "Key" }
            input #key name="key" value=(screen.query.get("key")) maxlength="200";
            label for="partition" { "Partition" }
            input #partition name="partition" value=(screen.query.get("partition")) inputmode="numeric" size="5" maxlength="5";
            label for="from" { "Failed from" }
            input #from name="from" value=(screen.query.get("from")) placeholder="time" size="14" maxlength="60";
            label for="to" { "to" }
            input #to name="to" value=(screen.query.get("to")) placeholder="time" size="14" maxlength="60";
            button.button type="submit" { "Filter" }
        }
        (content)
    };
    let mut command = format!("headwater dlq list {}", shell_word(&topic));
    if newest_first {
        command += " --newest-first";
    }
    for name in FILTER.iter().filter(|name| !screen.query.get(name).is_empty()) {
        command += &format!(" --{name} {}", shell_word(screen.query.get(name)));
    }
    screen.page(ScreenContent {
        title: "Dead letters".to_owned(),
        path: path_of(&topic),
        command,
        content,
    })
}

/// The rows with boxes to select them, and what can be done with those selected or with all that match.
fn selection(screen: &Screen, act: &str, address: &str, page: &Value, order: &ListOrder) -> Markup {
    let (write, admin) = (ConsoleRole::Write, ConsoleRole::Admin);
    let mut filter: Vec<(&str, &str)> =
        FILTER.iter().map(|name| (*name, screen.query.get(name))).collect();
    filter.retain(|(_, value)| !value.is_empty());
    filter.push(("select", "matching"));
    html! {
        form #selected method="post" action={ (act) "/replay" } {
            (table_with_order("Dead letters", &["Selected", "Dead letter", "Key", "Failed", "Failures", "Replays", "Reason"], Some(order), &html! {
                @for letter in items(page, "dead_letters") { (row(address, letter)) }
            }))
            div.buttons {
                (button(&screen.user, write, ButtonStyle::Plain, "Replay selected…"))
                @if screen.user.role >= admin {
                    button.button.danger type="submit" formaction={ (act) "/purge" } { "Purge selected…" }
                } @else {
                    (button(&screen.user, admin, ButtonStyle::Danger, "Purge selected…"))
                }
            }
        }
        div.buttons {
            (action(&screen.user, write, (&format!("{act}/plan"), "Plan the replay of all that match…", ButtonStyle::Primary), &filter))
            (action(&screen.user, write, (&format!("{act}/replay"), "Replay all that match…", ButtonStyle::Plain), &filter))
            (action(&screen.user, admin, (&format!("{act}/purge"), "Purge all that match…", ButtonStyle::Danger), &filter))
        }
    }
}

fn row(address: &str, letter: &Value) -> Markup {
    let entry = field(letter, "id");
    html! {
        tr data-key=(entry) {
            td { input type="checkbox" name="id" value=(entry) aria-label={ "Select " (entry) }; }
            th scope="row" { a href={ (address) "/" (encoded(entry)) } { (id(entry)) } }
            td { (excerpt(&plain(&letter["key"]))) }
            td { (time(&letter["failed_at"])) }
            (count(&letter["failures"]))
            (count(&letter["replays"]))
            td { (excerpt(field(letter, "reason"))) }
        }
    }
}

pub(crate) async fn show(screen: Screen, Path((topic, entry)): Path<(String, String)>) -> Response {
    let path = format!("/topics/{}/dead-letters/{}", encoded(&topic), encoded(&entry));
    let letter = match screen.api.get(&path).await {
        Ok(letter) => letter,
        Err(error) => return screen.failed("Dead letter", &error.or_gone(GONE)),
    };
    let act = format!("/console/do/topics/{}/dead-letters", encoded(&topic));
    let fields = [("id", entry.as_str())];
    let content = html! {
        (facts(&[
            ("Partition", html! { (plain(&letter["partition"])) }),
            ("Key", excerpt(&plain(&letter["key"]))),
            ("Message", id(&plain(&letter["original_id"]))),
            ("Sent", time(&letter["sent_at"])),
            ("Failed", time(&letter["failed_at"])),
            ("Failures", html! { (plain(&letter["failures"])) }),
            ("Replays", html! { (plain(&letter["replays"])) }),
        ]))
        h2 { "Reason" }
        (block(field(&letter, "reason")))
        h2 { "Payload" }
        (payload(&letter))
        (named_values("Headers", &letter["headers"]))
        div.buttons {
            (action(&screen.user, ConsoleRole::Write, (&format!("{act}/replay"), "Replay…", ButtonStyle::Primary), &fields))
            (action(&screen.user, ConsoleRole::Admin, (&format!("{act}/purge"), "Purge…", ButtonStyle::Danger), &fields))
        }
    };
    let mut above = path_of(&topic);
    above.push((
        "Dead letters".to_owned(),
        format!("/console/topics/{}/dead-letters", encoded(&topic)),
    ));
    screen.page(ScreenContent {
        title: entry.clone(),
        path: above,
        command: format!("headwater dlq show {} {}", shell_word(&topic), shell_word(&entry)),
        content: html! { (live("letter", &content)) (edit_form(&screen, &act, (&topic, &entry), &letter)) },
    })
}

/// A form to replay an edited copy. Not live: a page that changes would lose the text.
fn edit_form(screen: &Screen, act: &str, (topic, entry): (&str, &str), letter: &Value) -> Markup {
    let Some(text) = letter["payload"].as_str() else {
        return html! { p.quiet { "The payload is not text, so it cannot be edited here." } };
    };
    // Browsers send all line breaks as CR LF, of which the action makes LF, and replace NUL.
    let refused = [('\0', "NUL characters"), ('\r', "carriage returns (CR)")];
    if let Some((_, lost)) = refused.iter().find(|(one, _)| text.contains(*one)) {
        // No argument of a command can have NUL, and a shell would drop line breaks at the end.
        let (topic, entry) = (encoded(topic), encoded(entry));
        let command = format!(
            "POST /api/v1/topics/{topic}/dead-letters/{entry}/replay {{\"payload\": \"…\"}}"
        );
        return html! {
            p.quiet { "The payload has " (lost) ", which a form in a browser changes, so it cannot be edited here. Replay an edited copy with " code { (command) } }
        };
    }
    html! {
        details.item {
            summary { "Edit and replay" }
            form.stacked method="post" action={ (act) "/" (encoded(entry)) "/edit" } {
                label for="payload" { "Payload of the copy" }
                textarea #payload name="payload" rows="8" { "\n" (text) }
                p.quiet { "Key, headers and partition stay as they were. The dead letter is deleted when the copy is sent." }
                div { (button(&screen.user, ConsoleRole::Write, ButtonStyle::Primary, "Replay edited copy")) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_payload_that_a_form_would_change_is_not_edited_in_a_form() {
        let screen = Screen::for_test(Router::new(), "/console/topics/a/dead-letters/1-0");
        let shown = |payload: &str| {
            let letter = json!({"payload": payload});
            edit_form(&screen, "/act", ("a b", "1-0"), &letter).into_string()
        };
        for (payload, reason, way) in [
            ("a\r\nb", "carriage returns", "POST /api/v1/topics/a%20b/dead-letters/1-0/replay "),
            ("a\0\r", "NUL characters", "POST /api/v1/topics/a%20b/dead-letters/1-0/replay "),
        ] {
            let form = shown(payload);
            assert!(form.contains(reason) && form.contains(way), "{form}");
            assert!(!form.contains("<textarea"), "{form}");
        }
        assert!(shown("\na\nb").contains(">\n\na\nb</textarea>"), "the first line break stays");
    }
}
