//! Tickets: the list, and one ticket with its conversation, how each answer came about, and the state of its issue.

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;
use uuid::Uuid;

use crate::api_client::Part;
use crate::components::{
    ButtonStyle, ListOrder, Tone, action, badge, button, choices, empty, excerpt, facts, id, live,
    matching, pager, problem, search_pager, table_with_order, time, time_with_utc,
};
use crate::screen::{Screen, ScreenContent};
use crate::screens::ROWS;
use crate::screens::runs::RunsPart;
use crate::screens::why::{WhySubject, why_panel};
use crate::text::{self, cut, encoded, field, items, plain, shell_word, visible};
use crate::user::ConsoleRole;

const FILTER: [&str; 4] = ["status", "user_id", "words", "oldest_first"];

/// The choice of tickets that are handed over, beside the states.
const QUEUE: &str = "handed_over";

/// Messages of a page of a conversation.
const MESSAGES: usize = 200;

/// Maximum characters of a message in a conversation.
const MESSAGE_CHARS_MAX: usize = 20_000;

pub(crate) async fn list(screen: Screen) -> Response {
    // The queue of people: open tickets that are handed over.
    let is_queue = screen.query.get("status") == QUEUE;
    let filter = match is_queue {
        true => {
            format!(
                "handed_over=true&status=open&{}",
                screen.query.query_of(&["user_id", "words", "oldest_first", "cursor"])
            )
        }
        false => screen.query.query_of(&[&FILTER[..], &["cursor"]].concat()),
    };
    let order = ListOrder::of(&screen, "Opened", ("oldest_first", false), &FILTER);
    // Further pages have the count of the first.
    let is_first = screen.query.get("cursor").is_empty();
    let path = format!("/tickets?limit={ROWS}&count={is_first}&{filter}");
    let content = match screen.api.get(&path).await {
        Err(error) => problem("The list of tickets", &error, &screen),
        // A page of a search may be empty although further ones are not.
        Ok(page) if items(&page, "tickets").is_empty() && page["next_cursor"].is_null() => empty(
            "No ticket matches. Open the first one:",
            Some("headwater ticket new --title 'Router blinks red' --content 'Since yesterday.'"),
        ),
        Ok(page) => html! {
            (table_with_order("Tickets", &["Title", "Status", "User", "Opened", "Updated", "Ticket"], Some(&order), &html! {
                @for ticket in items(&page, "tickets") { (row(ticket)) }
            }))
            (matching(&page, "ticket matches", "tickets match"))
            @match page["searched"].as_u64() {
                Some(searched) => (search_pager(&screen, &FILTER, (searched, "ticket", "tickets"), &page["next_cursor"])),
                None => (pager(&screen, &FILTER, &page["next_cursor"])),
            }
        },
    };
    let mut command = "headwater ticket list".to_owned();
    if is_queue {
        command += " --handed-over";
    }
    for (option, name) in [("status", "status"), ("user", "user_id"), ("words", "words")] {
        if !screen.query.get(name).is_empty() && screen.query.get(name) != QUEUE {
            command += &format!(" --{option} {}", shell_word(screen.query.get(name)));
        }
    }
    if screen.query.get("oldest_first") == "true" {
        command += " --oldest-first";
    }
    let content = html! {
        div.filters {
            (choices(&screen, "status", &[("", "All"), ("open", "Open"), ("closed", "Closed"), (QUEUE, "Handed over")], &FILTER))
            form.inline action="/console/tickets" {
                @for name in ["status", "oldest_first"] {
                    @if !screen.query.get(name).is_empty() { input type="hidden" name=(name) value=(screen.query.get(name)); }
                }
                label for="user" { "User" }
                input #user name="user_id" value=(screen.query.get("user_id")) maxlength="200";
                label for="words" { "Words" }
                input #words name="words" value=(screen.query.get("words")) maxlength="200";
                button.button type="submit" { "Filter" }
            }
        }
        // Not live: a search reads the messages of many tickets.
        @if screen.query.get("words").is_empty() { (live("tickets", &content)) } @else { (content) }
    };
    screen.page(ScreenContent { title: "Tickets".to_owned(), path: Vec::new(), command, content })
}

fn status(ticket: &Value) -> Markup {
    html! {
        @if ticket["status"] == "open" { (badge(Tone::Active, "open")) } @else { (badge(Tone::Neutral, "closed")) }
        @if ticket["handed_over"] == true {
            " " (badge(Tone::Warning, "handed over"))
            @if let Some(assignee) = ticket["assignee"].as_str() { " " (excerpt(assignee)) }
        }
    }
}

fn row(ticket: &Value) -> Markup {
    let address = format!("/console/tickets/{}", encoded(field(ticket, "ticket_id")));
    html! {
        tr data-key=(field(ticket, "ticket_id")) {
            th scope="row" { a href=(address) { (excerpt(or_untitled(field(ticket, "title")))) } }
            td { (status(ticket)) }
            td { (excerpt(&plain(&ticket["user_id"]))) }
            td { (time(&ticket["created_at"])) }
            td { (time(&ticket["updated_at"])) }
            td { (id(&field(ticket, "ticket_id").chars().take(8).collect::<String>())) }
        }
    }
}

fn or_untitled(title: &str) -> &str {
    if title.trim().is_empty() { "(no title)" } else { title }
}

pub(crate) async fn show(screen: Screen, Path(ticket_id): Path<String>) -> Response {
    let path = format!("/tickets/{}?provisional=true&newest=true", encoded(&ticket_id));
    let ticket = match screen.api.get(&path).await {
        Ok(ticket) => ticket,
        Err(error) => return screen.failed("Ticket", &error),
    };
    let issue = plain(&ticket["issue_id"]);
    let why_path = format!("/tickets/{}/why", encoded(&ticket_id));
    let (why, runs, earlier) = tokio::join!(
        screen.api.get(&why_path),
        RunsPart::read(&screen, &issue, ""),
        earlier_messages(&screen, &ticket_id)
    );
    let content = html! {
        div.columns {
            section.wide aria-label="Conversation" {
                (live("conversation", &conversation(&screen, &ticket, earlier.as_ref())))
                (reply_form(&screen, &ticket))
                h2 { "How each answer came about" }
                (live("runs", &runs.list(&screen)))
                @if !runs.next().is_null() {
                    p { "Older runs are shown with " a href={ "/console/issues/" (issue) } { "issue " (issue) } "." }
                }
            }
            aside aria-label="State" {
                (live("state", &state(&screen, &ticket, &why)))
            }
        }
    };
    let name = or_untitled(field(&ticket, "title")).to_owned();
    screen.page(ScreenContent {
        title: name,
        path: vec![("Tickets".to_owned(), "/console/tickets".to_owned())],
        command: format!("headwater ticket show {}", field(&ticket, "ticket_id")),
        content,
    })
}

/// The messages before a position of a long conversation; `None` for its end, which is part of the ticket.
async fn earlier_messages(screen: &Screen, ticket_id: &str) -> Option<Part> {
    let before = screen.query.get("before");
    let path = format!(
        "/tickets/{}/messages?limit={MESSAGES}&before={}",
        encoded(ticket_id),
        encoded(before)
    );
    if before.is_empty() { None } else { Some(screen.api.get(&path).await) }
}

fn conversation(screen: &Screen, ticket: &Value, earlier: Option<&Part>) -> Markup {
    let page = match earlier {
        None => ticket,
        Some(Ok(page)) => page,
        Some(Err(error)) => return problem("The messages", error, screen),
    };
    let (path, previous) = (screen.uri.path(), &page["previous_cursor"]);
    html! {
        @if earlier.is_some() || !previous.is_null() {
            nav.pager aria-label="Messages" {
                @if !previous.is_null() { a href={ (path) "?before=" (encoded(&plain(previous))) } { "Earlier messages" } }
                @if earlier.is_some() { a href=(path) { "Newest messages" } }
            }
        }
        ol.conversation {
            @for message in items(page, "messages") { (message_item(message)) }
        }
        @if let Some(provisional) = ticket["provisional"].as_str() {
            section aria-label="Provisional answer" {
                p.quiet { strong { "Assistant" } " · writes this now, not sent yet" }
                (message_text(provisional))
            }
        }
    }
}

fn message_item(message: &Value) -> Markup {
    let author = field(message, "author");
    html! {
        li data-key=(field(message, "message_id")) class={ "from-" (if author == "user" { "user" } else { "desk" }) } {
            p.quiet {
                strong { (match author { "user" => "User", "agent" => "Agent", "assistant" => "Assistant", other => other }) }
                " · " (time_with_utc(&message["created_at"]))
            }
            (message_text(field(message, "content")))
        }
    }
}

fn message_text(content: &str) -> Markup {
    let (shown, is_cut) = cut(content, MESSAGE_CHARS_MAX);
    html! {
        div.message { bdi { (visible(shown)) } }
        @if is_cut {
            p.quiet { "The first " (text::number(MESSAGE_CHARS_MAX as u64)) " characters of " (text::bytes(content.len() as u64)) "." }
        }
    }
}

fn reply_form(screen: &Screen, ticket: &Value) -> Markup {
    let path = format!("/console/do/tickets/{}/reply", encoded(field(ticket, "ticket_id")));
    html! {
        form.stacked method="post" action=(path) {
            // Sent twice, the reply is stored once.
            input type="hidden" name="message_id" value=(Uuid::now_v7());
            label for="content" { "Reply to the user as a person" }
            textarea #content name="content" rows="4" required {}
            div { (button(&screen.user, ConsoleRole::Write, ButtonStyle::Primary, "Send reply")) }
        }
    }
}

fn state(screen: &Screen, ticket: &Value, why: &Part) -> Markup {
    let base = format!("/console/do/tickets/{}", encoded(field(ticket, "ticket_id")));
    let issue = plain(&ticket["issue_id"]);
    let is_open = ticket["status"] == "open";
    let write = ConsoleRole::Write;
    html! {
        h2 { "State" }
        (facts(&[
            ("Status", status(ticket)),
            ("User", excerpt(&plain(&ticket["user_id"]))),
            ("Opened", time_with_utc(&ticket["created_at"])),
            ("Updated", time_with_utc(&ticket["updated_at"])),
            ("Issue", html! { a href={ "/console/issues/" (issue) } { (id(&issue)) } }),
            ("Ticket", id(field(ticket, "ticket_id"))),
            ("Model", excerpt(&usage(&ticket["usage"]))),
        ]))
        div.buttons {
            @if is_open { (action(&screen.user, write, (&format!("{base}/close"), "Close ticket", ButtonStyle::Plain), &[])) }
            @else { (action(&screen.user, write, (&format!("{base}/reopen"), "Reopen ticket", ButtonStyle::Plain), &[])) }
            @if ticket["handed_over"] == true {
                @if ticket["assignee"].is_null() {
                    (action(&screen.user, write, (&format!("{base}/take"), "Take ticket", ButtonStyle::Primary), &[]))
                } @else {
                    (action(&screen.user, write, (&format!("{base}/unassign"), "Remove assignee", ButtonStyle::Plain), &[]))
                }
            }
            @if is_open && ticket["handed_over"] == true {
                (action(&screen.user, write, (&format!("{base}/reopen"), "Return to the desk", ButtonStyle::Plain), &[]))
            }
        }
        @if ticket["handed_over"] == true { (hand_over(screen, ticket, &base)) }
        (why_panel(screen, WhySubject::Ticket(field(ticket, "ticket_id")), why))
    }
}

/// What the models used for a ticket, in all of its runs.
fn usage(usage: &Value) -> String {
    let count = |name: &str| text::number(usage[name].as_u64().unwrap_or_default());
    let cost = usage["cost"].as_f64().map_or(String::new(), |cost| format!(", cost {cost}"));
    format!(
        "{} runs, {} tokens in, {} out{cost}",
        count("runs"),
        count("tokens_in"),
        count("tokens_out")
    )
}

/// Since when, why and to whom a ticket is handed over.
fn hand_over(screen: &Screen, ticket: &Value, base: &str) -> Markup {
    let or = |name: &str, unknown: &str| {
        excerpt(ticket[name].as_str().filter(|text| !text.is_empty()).unwrap_or(unknown))
    };
    html! {
        h2 { "Hand-over" }
        (facts(&[
            ("Since", time_with_utc(&ticket["handed_over_at"])),
            ("Reason", or("hand_over_reason", "unknown")),
            ("Assignee", or("assignee", "nobody")),
        ]))
        form.inline method="post" action={ (base) "/assign" } {
            label for="assignee" { "Assign to" }
            input #assignee name="assignee" maxlength="128" required;
            (button(&screen.user, ConsoleRole::Write, ButtonStyle::Plain, "Assign"))
        }
    }
}
