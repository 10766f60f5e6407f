//! The panel that says why something waits: one sentence, the command and the action that resolve it, and the facts.
//!
//! Upstream: the screens of issues, tickets, messages, groups, outbox rows and plans; delayed messages have a line of a table. Downstream: the
//! routes `.../why`, whose answers all have `reason`, `sentence` and `command`. Guarantees: the command is shown even if the sentence
//! lacks it; an action beyond the role of the caller is disabled and names the role.

use maud::{Markup, html};
use serde_json::Value;

use crate::api_client::Part;
use crate::components::{ButtonStyle, action, excerpt, id, problem};
use crate::screen::Screen;
use crate::text::{counted, cut, encoded, field, items, plain, visible};
use crate::user::{ConsoleRole, ConsoleUser};

/// Maximum characters of a sentence.
const SENTENCE_CHARS_MAX: usize = 1000;

/// What a panel is about, with what its answer does not name.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WhySubject<'a> {
    Issue,
    /// With its id.
    Ticket(&'a str),
    Message,
    Group,
    OutboxRow,
    /// The plan that has the answer.
    Plan(&'a Value),
}

/// Why it waits, as far as that can be read.
pub(crate) fn why_panel(screen: &Screen, subject: WhySubject<'_>, why: &Part) -> Markup {
    match why {
        Err(error) if error.is_not_found() => html! {},
        Err(error) => problem("Why it waits", error, screen),
        Ok(why) => panel(&screen.user, subject, why),
    }
}

/// The panel of an answer.
pub(crate) fn panel(user: &ConsoleUser, subject: WhySubject<'_>, why: &Value) -> Markup {
    let sentence = cut(field(why, "sentence"), SENTENCE_CHARS_MAX).0;
    let command = field(why, "command");
    html! {
        section.why {
            h2 { "Why" }
            p { (long(sentence)) }
            @if !command.is_empty() && !sentence.contains(command) {
                p { "Command: " bdi { code { (command) } } }
            }
            @if let Some(remedy) = remedy(user, subject, why) { div.buttons { (remedy) } }
            @if !items(why, "steps").is_empty() {
                details {
                    summary { "The facts" }
                    dl.facts {
                        @for step in items(why, "steps") { div { dt { (step_name(subject, why, step)) } dd { (long(field(step, "found"))) } } }
                    }
                }
            }
            @if let Some(pending) = why["pending_events"].as_u64().filter(|pending| *pending > 0) {
                p.quiet { (counted(pending, "pending event", "pending events")) }
            }
        }
    }
}

/// Why a delayed message waits, with its group.
pub(crate) fn delayed_line(topic: &str, message: &Value) -> Markup {
    html! {
        (long(field(message, "sentence")))
        @if let Some(group) = message["group"].as_str() { " " a href=(group_address(topic, group)) { "Show the group" } }
    }
}

fn long(text: &str) -> Markup {
    html! { bdi { (visible(cut(text, SENTENCE_CHARS_MAX).0)) } }
}

/// The name of a fact; of a message, the group that it is about.
fn step_name(subject: WhySubject<'_>, why: &Value, step: &Value) -> Markup {
    let name = field(step, "step");
    match subject {
        WhySubject::Message => {
            html! { a href=(group_address(field(why, "topic"), name)) { (id(name)) } }
        }
        _ => excerpt(&name.replace('_', " ")),
    }
}

fn group_address(topic: &str, group: &str) -> String {
    format!("/console/topics/{}/groups/{}", encoded(topic), encoded(group))
}

fn link(label: &str, address: &str) -> Markup {
    html! { a.button href=(address) { (label) } }
}

/// A button for a change that needs the role `write`.
fn change(user: &ConsoleUser, label: &str, path: &str, fields: &[(&str, &str)]) -> Markup {
    action(user, ConsoleRole::Write, (path, label, ButtonStyle::Primary), fields)
}

/// What resolves it: a button, or a link to where that can be done.
fn remedy(user: &ConsoleUser, subject: WhySubject<'_>, why: &Value) -> Option<Markup> {
    match subject {
        WhySubject::Issue => of_issue(user, None, why),
        WhySubject::Ticket(ticket) => of_issue(user, Some(ticket), why),
        WhySubject::Message => of_message(user, why),
        WhySubject::Group => of_group(why),
        WhySubject::OutboxRow => of_outbox_row(user, why),
        WhySubject::Plan(plan) => of_plan(user, plan, why),
    }
}

/// What follows the beginning of the command.
fn after<'a>(why: &'a Value, begin: &str) -> Option<&'a str> {
    field(why, "command").strip_prefix(begin)
}

fn processes() -> Markup {
    link("Show processes", "/console/processes")
}

fn doctor() -> Markup {
    link("Open Doctor", "/console/doctor")
}

/// `ticket`: the page is about that ticket of the issue.
fn of_issue(user: &ConsoleUser, ticket: Option<&str>, why: &Value) -> Option<Markup> {
    let issue = plain(&why["issue_id"]);
    let back = ticket.map_or(String::new(), |ticket| format!("?ticket={}", encoded(ticket)));
    let on_issue = |verb: &str, label: &str| {
        change(user, label, &format!("/console/do/issues/{issue}/{verb}{back}"), &[])
    };
    let reopened = ticket.or_else(|| after(why, "headwater ticket reopen "));
    let reopen = |label: &str| {
        reopened.map(|ticket| {
            change(user, label, &format!("/console/do/tickets/{}/reopen", encoded(ticket)), &[])
        })
    };
    Some(match field(why, "reason") {
        "quarantined" => on_issue("release", "Release"),
        "retrying" | "deferred" => on_issue("retry", "Retry now"),
        "waiting" => on_issue("retry", "Process now"),
        "draft" => link("Open the drafts", "/console/drafts"),
        "no_worker" | "worker_dead" | "claim_ran_out" => processes(),
        "queued" => doctor(),
        "reply_dead" => match after(why, "headwater outbox retry ") {
            Some(row) => link("Show the outbox row", &format!("/console/outbox/{}", encoded(row))),
            None => link("Show the outbox", "/console/outbox"),
        },
        "reply_waiting" => link("Show its replies", &format!("/console/outbox?issue={issue}")),
        // An issue of a provider is reopened there.
        "handed_over" => reopen("Return to the desk")?,
        "closed" => reopen("Reopen ticket")?,
        _ => return None,
    })
}

fn of_message(user: &ConsoleUser, why: &Value) -> Option<Markup> {
    let topic = field(why, "topic");
    let address = format!("/console/topics/{}", encoded(topic));
    Some(match field(why, "reason") {
        "dead_letter" => {
            let letter = field(why, "command").rsplit(' ').next()?;
            let replay = format!("/console/do/topics/{}/dead-letters/replay", encoded(topic));
            html! {
                (link("Show the dead letter", &format!("{address}/dead-letters/{}", encoded(letter))))
                (change(user, "Replay…", &replay, &[("id", letter)]))
            }
        }
        "no_group" => link("Show the topic", &address),
        "no_member" | "no_owner" | "waiting" | "released" | "in_progress" => {
            // The sentence is about one of the groups.
            let is_meant = |step: &&Value| {
                field(why, "sentence").contains(&format!("in group `{}`: ", field(step, "step")))
            };
            let group = items(why, "steps").iter().find(is_meant)?;
            link("Show the group", &group_address(topic, field(group, "step")))
        }
        _ => return None,
    })
}

fn of_group(why: &Value) -> Option<Markup> {
    let topic = encoded(field(why, "topic"));
    match field(why, "reason") {
        "no_member" | "no_owner" => {
            Some(link("Show all partitions", &format!("/console/assignment?topic={topic}")))
        }
        "unread" => Some(doctor()),
        _ => None,
    }
}

fn of_outbox_row(user: &ConsoleUser, why: &Value) -> Option<Markup> {
    let row = plain(&why["id"]);
    Some(match field(why, "reason") {
        "dead" => change(user, "Retry delivery", &format!("/console/do/outbox/{row}/retry"), &[]),
        "behind" => {
            let first = after(why, "headwater outbox why ")?;
            link(&format!("Show row {first}"), &format!("/console/outbox/{}", encoded(first)))
        }
        "lease_expired" | "due" => processes(),
        "retrying" => link("Show settings", "/console/settings"),
        _ => return None,
    })
}

fn of_plan(user: &ConsoleUser, plan: &Value, why: &Value) -> Option<Markup> {
    let resume = format!("/console/do/plans/{}/resume", plain(&plan["id"]));
    Some(match field(why, "reason") {
        "paused" | "stopped" => change(user, "Resume", &resume, &[]),
        "no_process" => processes(),
        "unavailable" => doctor(),
        "no_member" => {
            let topic = encoded(items(plan, "topics").first()?.as_str()?);
            link("Show the topic", &format!("/console/topics/{topic}"))
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use axum::http::Extensions;
    use serde_json::json;

    use super::*;

    fn user(role: ConsoleRole) -> ConsoleUser {
        let (name, view, forwarded) = ("ann".to_owned(), String::new(), Extensions::new());
        ConsoleUser { name, role, view, has_session: false, forwarded }
    }

    fn shown(subject: WhySubject<'_>, why: &Value) -> String {
        panel(&user(ConsoleRole::Write), subject, why).into_string()
    }

    #[test]
    fn each_reason_has_the_action_that_resolves_it() {
        let plan = json!({"id": 3, "topics": ["a b"]});
        let (ticket, plan) = (WhySubject::Ticket("t-1"), WhySubject::Plan(&plan));
        for (subject, reason, command, parts) in [
            (WhySubject::Issue, "quarantined", "", ["/console/do/issues/7/release\"", ">Release<"]),
            (WhySubject::Issue, "retrying", "", ["/console/do/issues/7/retry\"", ">Retry now<"]),
            (ticket, "deferred", "", ["/console/do/issues/7/retry?ticket=t-1", ">Retry now<"]),
            (WhySubject::Issue, "waiting", "", ["/console/do/issues/7/retry\"", ">Process now<"]),
            (
                WhySubject::Issue,
                "reply_dead",
                "headwater outbox retry 9",
                ["href=\"/console/outbox/9\"", "outbox row"],
            ),
            (WhySubject::Issue, "draft", "", ["href=\"/console/drafts\"", "Open the drafts"]),
            (WhySubject::Issue, "no_worker", "", ["href=\"/console/processes\"", "Show processes"]),
            (ticket, "handed_over", "", ["/console/do/tickets/t-1/reopen", ">Return to the desk<"]),
            (ticket, "closed", "", ["/console/do/tickets/t-1/reopen", ">Reopen ticket<"]),
            (
                WhySubject::Issue,
                "handed_over",
                "headwater ticket reopen t-2",
                ["/console/do/tickets/t-2/reopen", ">Return to the desk<"],
            ),
            (
                WhySubject::Message,
                "dead_letter",
                "headwater dlq replay 'a b' 5-0",
                ["/console/topics/a%20b/dead-letters/5-0", "name=\"id\" value=\"5-0\""],
            ),
            (
                WhySubject::Message,
                "waiting",
                "",
                ["href=\"/console/topics/a%20b/groups/it%27s\"", "Show the group"],
            ),
            (
                WhySubject::Group,
                "no_owner",
                "",
                ["/console/assignment?topic=a%20b", "Show all partitions"],
            ),
            (WhySubject::OutboxRow, "dead", "", ["/console/do/outbox/5/retry", ">Retry delivery<"]),
            (
                WhySubject::OutboxRow,
                "behind",
                "headwater outbox why 4",
                ["href=\"/console/outbox/4\"", "Show row 4"],
            ),
            (plan, "stopped", "", ["/console/do/plans/3/resume", ">Resume<"]),
            (plan, "no_member", "", ["/console/topics/a%20b", "Show the topic"]),
        ] {
            let why = json!({
                "issue_id": 7, "id": 5, "topic": "a b", "reason": reason, "command": command,
                "sentence": "message 5-0 in group `it's`: not delivered yet",
                "steps": [{"step": "other", "found": "x"}, {"step": "it's", "found": "x"}],
            });
            let found = shown(subject, &why);
            assert!(parts.iter().all(|part| found.contains(part)), "{subject:?} {reason}: {found}");
        }
        let foreign =
            json!({"issue_id": 7, "reason": "handed_over", "command": "headwater issue show 7"});
        assert!(!shown(WhySubject::Issue, &foreign).contains("<form"), "reopened at its provider");
    }

    #[test]
    fn the_command_is_shown_once() {
        let why =
            |sentence: &str| json!({"reason": "x", "command": "headwater x", "sentence": sentence});
        let times = |sentence: &str| {
            shown(WhySubject::Group, &why(sentence)).matches("headwater x").count()
        };
        assert_eq!((times("run `headwater x`"), times("nothing waits")), (1, 1));
        assert_eq!(times(&format!("{} `headwater x`", "long ".repeat(400))), 1, "behind the cut");
    }

    #[test]
    fn an_action_beyond_the_role_is_disabled_and_names_the_role() {
        let why = json!({"issue_id": 7, "reason": "quarantined", "sentence": "it is quarantined"});
        let found = panel(&user(ConsoleRole::Read), WhySubject::Issue, &why).into_string();
        assert!(
            found.contains("disabled") && found.contains("needs the role <code>write</code>"),
            "{found}"
        );
    }

    #[test]
    fn the_facts_of_a_message_are_its_groups() {
        let steps = json!([{"step": "my_group", "found": "settled"}]);
        let why = json!({"topic": "orders", "reason": "settled", "steps": steps});
        let found = shown(WhySubject::Message, &why);
        assert!(found.contains("/groups/my_group\"") && found.contains("<bdi>my_group</bdi>"));
        assert!(shown(WhySubject::Group, &why).contains("<bdi>my group</bdi>"));
        let message = json!({"sentence": "It was sent again", "group": "it's"});
        let line = delayed_line("a b", &message).into_string();
        assert!(line.contains("/console/topics/a%20b/groups/it%27s"), "{line}");
    }
}
