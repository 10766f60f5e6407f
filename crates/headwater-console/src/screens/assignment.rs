//! Assignment: who owns which partition of which group, and the streams of a service with their owners.

use axum::extract::Path;
use axum::response::{IntoResponse, Redirect, Response};
use maud::{Markup, html};
use serde_json::Value;

use crate::components::{
    Tone, badge, count, empty, excerpt, facts, id, live, or_last, pager, problem, table, time,
};
use crate::screen::{Screen, ScreenContent};
use crate::text::{counted, duration, encoded, field, items, number, plain, shell_word, visible};

/// Streams of a page: the grid shows all of them at once.
const GRID_ROWS: usize = 200;

/// Owners that differ in colour.
const COLORS: usize = 8;

/// All partitions as a grid, and a form for the name of a service, because Redis has no list of them.
pub(crate) async fn choose(screen: Screen) -> Response {
    let service = screen.query.get("service");
    if !service.is_empty() {
        return Redirect::to(&format!("/console/assignment/{}", encoded(service))).into_response();
    }
    let filter = screen.query.query_of(&["topic", "cursor"]);
    let owners_path = format!("/assignment?{filter}");
    let moves_path = format!("/assignment/moves?{}", screen.query.query_of(&["topic"]));
    let (owners, moved) = tokio::join!(screen.api.get(&owners_path), screen.api.get(&moves_path));
    let grid = or_last("The partitions", &owners, &screen, |page| {
        let (groups, unread) = (items(page, "groups"), items(page, "unread_topics"));
        if groups.is_empty() && unread.is_empty() {
            return empty(
                "No group reads a topic. Start one:",
                Some("headwater consume TOPIC --group billing"),
            );
        }
        html! {
            @for topic in unread {
                p { (id(&plain(topic))) " " (badge(Tone::Bad, "its server does not answer")) }
            }
            @for group in groups { (partition_grid(group)) }
            (pager(&screen, &["topic"], &page["next_cursor"]))
        }
    });
    let moved = or_last("The moves", &moved, &screen, moves);
    let content = html! {
        form.filters.inline action="/console/assignment" {
            label for="topic" { "Topic" }
            input #topic name="topic" value=(screen.query.get("topic")) maxlength="200";
            button.button type="submit" { "Show partitions" }
        }
        h2 { "Partitions" }
        (live("partitions", &grid))
        h2 { "Moves of the last hour" }
        (live("moves", &moved))
        h2 { "Streams of a service" }
        p { "A service shares streams among its consumers, each with one owner at a time." }
        form.inline action="/console/assignment" {
            label for="service" { "Service" }
            input #service name="service" required maxlength="200";
            button.button type="submit" { "Show" }
        }
        (empty("Add the first stream of a service:", Some("headwater assign add SERVICE STREAM")))
    };
    screen.page(ScreenContent {
        title: "Assignment".to_owned(),
        path: Vec::new(),
        command: "headwater group owners".to_owned(),
        content,
    })
}

/// Which partitions had a new owner.
fn moves(page: &Value) -> Markup {
    let moves = items(page, "moves");
    let owner = |name: &Value| match name.as_str() {
        Some(name) => excerpt(name),
        None => html! { span.quiet { "no owner" } },
    };
    html! {
        @if moves.is_empty() {
            p { "No partition has a new owner." }
        } @else {
            (table("Moves of the last hour", &["When", "Group", "Partition", "From", "To", "Epoch"], &html! {
                @for one in moves {
                    @let (topic, group) = (field(one, "topic"), field(one, "group"));
                    tr data-key={ (topic) "/" (group) "/" (plain(&one["partition"])) "/" (plain(&one["epoch"])) } {
                        td { (time(&one["at"])) }
                        th scope="row" {
                            a href={ "/console/topics/" (encoded(topic)) "/groups/" (encoded(group)) } { bdi { (visible(topic)) " / " (visible(group)) } }
                        }
                        td { (plain(&one["partition"])) }
                        td { (owner(&one["from"])) }
                        td { (owner(&one["to"])) }
                        td.count { (plain(&one["epoch"])) }
                    }
                }
            }))
        }
        p.quiet {
            @match page["since"].as_str() {
                Some(_) => { "This process looks every ten seconds, since " (time(&page["since"])) ". " },
                None => "This process has not looked yet. ",
            }
            @if page["complete"] == false { "Not all groups or moves are shown. " }
            code { "headwater group moves" }
        }
    }
}

/// The partitions of a group, coloured by owner.
fn partition_grid(group: &Value) -> Markup {
    let (topic, name) = (field(group, "topic"), field(group, "group"));
    let members = items(group, "members");
    let of_member = |owner: &str| {
        let index = members.iter().position(|member| field(member, "member") == owner)?;
        Some(OwnerMark { class: format!("owner-{}", index % COLORS), letters: letters(index) })
    };
    let (orphans, skew) =
        (group["orphans"].as_u64().unwrap_or(0), group["skew"].as_u64().unwrap_or(0));
    let is_shared = field(group, "mode") == "shared";
    html! {
        section data-key={ (topic) "/" (name) } {
            h3 {
                a href={ "/console/topics/" (encoded(topic)) "/groups/" (encoded(name)) } { bdi { (visible(topic)) " / " (visible(name)) } } " "
                @if orphans > 0 { (badge(Tone::Bad, &counted(orphans, "partition waits without an owner", "partitions wait without an owner"))) " " }
                @if skew > 1 { (badge(Tone::Warning, &format!("shared unevenly, by {skew}"))) " " }
                @if is_shared { (badge(Tone::Neutral, "shared: every member reads all")) " " }
                @if members.is_empty() { (badge(Tone::Neutral, "no members")) }
            }
            @if !members.is_empty() {
                ul.owners { @for member in members {
                    @let mark = of_member(field(member, "member"));
                    li class=[mark.as_ref().map(|mark| &*mark.class)] {
                        @if let Some(mark) = &mark { strong { (mark.letters) } " " }
                        (excerpt(field(member, "member"))) " " span.quiet { (counted(member["partitions"].as_u64().unwrap_or(0), "partition", "partitions")) }
                    }
                } }
            }
            ul.partitions aria-label={ "Partitions of " (visible(topic)) " for " (visible(name)) } {
                @for partition in items(group, "partitions") { (cell(partition, &of_member, is_shared)) }
            }
        }
    }
}

/// How the partitions of a member look: a colour, and letters for those who cannot tell colours apart.
struct OwnerMark {
    class: String,
    letters: String,
}

/// `A` to `Z`, then `AA` and so on.
fn letters(index: usize) -> String {
    let letter = |index: usize| char::from(b'A' + (index % 26) as u8);
    match index {
        0..26 => letter(index).to_string(),
        _ => letters(index / 26 - 1) + &letter(index).to_string(),
    }
}

fn cell(
    partition: &Value,
    of_member: &impl Fn(&str) -> Option<OwnerMark>,
    is_shared: bool,
) -> Markup {
    let owner = partition["owner"].as_str();
    let waits = partition["lag"].as_u64().is_none_or(|lag| lag > 0)
        || partition["pending"].as_u64().unwrap_or(0) > 0;
    let is_unread = partition["problem"].is_string();
    let is_orphan = owner.is_none() && waits && !is_shared && !is_unread;
    let mark = owner.and_then(of_member);
    let class = match (owner, &mark) {
        (Some(_), mark) => mark.as_ref().map(|mark| &*mark.class),
        (None, _) => (is_orphan || is_unread).then_some("orphan"),
    };
    let lag = partition["lag"].as_u64().map_or("unknown".to_owned(), number);
    html! {
        li class=[class] data-key=(plain(&partition["partition"])) {
            strong {
                span.visually-hidden { "Partition " } (plain(&partition["partition"]))
                @if let Some(mark) = &mark { span.mark aria-hidden="true" { (mark.letters) } }
            }
            @match (owner, partition["remaining_ms"].as_u64()) {
                (Some(owner), left) => {
                    span.visually-hidden { "owner " (excerpt(owner)) ", lease " }
                    (left.map_or("–".to_owned(), duration))
                    span.visually-hidden { " left, epoch " (plain(&partition["epoch"])) }
                }
                (None, _) if is_unread => "its server does not answer",
                (None, _) if is_orphan => "no owner",
                (None, _) => span.quiet { "free" },
            }
            @if waits && !is_unread { div { "lag " (lag) } }
        }
    }
}

pub(crate) async fn show(screen: Screen, Path(service): Path<String>) -> Response {
    let path = format!("/assignments/{}", encoded(&service));
    let cursor = screen.query.query_of(&["cursor"]);
    let streams = format!("{path}/streams?limit={GRID_ROWS}&{cursor}");
    let (summary, streams) = tokio::join!(screen.api.get(&path), screen.api.get(&streams));
    let content = html! {
        @match &summary {
            Err(error) => (problem("The service", error, &screen)),
            Ok(summary) => (numbers(summary)),
        }
        @match &streams {
            Err(error) => (problem("The streams", error, &screen)),
            Ok(page) if items(page, "streams").is_empty() => {
                (empty("The service has no streams. Add one:", Some(&format!("headwater assign add {} STREAM", shell_word(&service)))))
            }
            Ok(page) => {
                h2 { "Owners" }
                (grid(items(page, "streams")))
                h2 { "Streams" }
                (table("Streams", &["Stream", "State", "Owner", "Epoch", "Lease", "Owners so far"], &html! {
                    @for stream in items(page, "streams") { (row(stream)) }
                }))
                (pager(&screen, &[], &page["next_cursor"]))
            }
        }
    };
    screen.page(ScreenContent {
        command: format!("headwater assign list {}", shell_word(&service)),
        title: service,
        path: vec![("Assignment".to_owned(), "/console/assignment".to_owned())],
        content: live("assignment", &content),
    })
}

fn numbers(summary: &Value) -> Markup {
    let shown = |name: &str| html! { (summary[name].as_u64().map_or("–".to_owned(), number)) };
    let members = items(summary, "members");
    html! {
        (facts(&[
            ("Waiting", shown("waiting")),
            ("Assigned", shown("assigned")),
            ("Dead letters", shown("dead_letters")),
            ("Consumers", html! { (number(members.len() as u64)) }),
        ]))
        @if !members.is_empty() { p { "Alive: " @for member in members { (id(&plain(member))) " " } } }
    }
}

/// How the state of a stream is shown.
fn tone(state: &str) -> Tone {
    match state {
        "owned" => Tone::Good,
        "waiting" => Tone::Active,
        "released" => Tone::Neutral,
        "expired" => Tone::Warning,
        _ => Tone::Bad,
    }
}

/// All streams of the page, by owner: skew and orphans stand out.
fn grid(streams: &[Value]) -> Markup {
    let mut owners: Vec<&str> = streams.iter().map(|stream| field(stream, "holder")).collect();
    owners.sort_unstable();
    owners.dedup();
    html! {
        @for owner in owners {
            @let owned: Vec<&Value> = streams.iter().filter(|stream| field(stream, "holder") == owner).collect();
            div {
                p { @if owner.is_empty() { strong { "No owner" } } @else { (id(owner)) } " " span.quiet { (owned.len()) } }
                ul.choices { @for stream in owned { li { (badge(tone(field(stream, "state")), field(stream, "stream"))) } } }
            }
        }
    }
}

fn row(stream: &Value) -> Markup {
    html! {
        tr data-key=(field(stream, "entry_id")) {
            th scope="row" { (id(field(stream, "stream"))) }
            td {
                (badge(tone(field(stream, "state")), field(stream, "state")))
                @if let Some(reason) = stream["problem"].as_str() { " " (excerpt(reason)) }
            }
            td { @match stream["holder"].as_str() { Some(owner) => (id(owner)), None => span.quiet { "–" } } }
            (count(&stream["epoch"]))
            td { (stream["remaining_ms"].as_u64().map_or("–".to_owned(), duration)) }
            td { (plain(&stream["owners"])) }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn group(orphans: u64, skew: u64) -> Value {
        json!({
            "topic": "orders", "group": "billing", "mode": "exclusive", "orphans": orphans, "skew": skew,
            "members": [{"member": "a", "partitions": 3}, {"member": "b", "partitions": 1}],
            "partitions": [
                {"partition": 0, "owner": "b", "remaining_ms": 9000, "epoch": 2, "lag": 3, "pending": 0},
                {"partition": 1, "owner": null, "lag": 5, "pending": 0},
                {"partition": 2, "owner": null, "lag": 0, "pending": 0},
            ],
        })
    }

    #[test]
    fn partitions_without_an_owner_and_uneven_shares_are_marked() {
        let shown = partition_grid(&group(1, 2)).into_string();
        assert!(shown.contains("1 partition waits without an owner"), "{shown}");
        assert!(shown.contains("shared unevenly, by 2"), "{shown}");
        // A partition without work needs no owner.
        assert_eq!(shown.matches("no owner").count(), 1, "{shown}");
        assert!(shown.contains("<li class=\"orphan\" data-key=\"1\">"), "{shown}");
        assert!(shown.contains("<li class=\"owner-1\" data-key=\"0\">"), "{shown}");
        // Not by colour only.
        assert!(shown.contains("<li class=\"owner-1\"><strong>B</strong> <bdi>b</bdi>"), "{shown}");
        assert_eq!(shown.matches("<span class=\"mark\" aria-hidden=\"true\">B</span>").count(), 1);
        assert_eq!(shown.matches(">free<").count(), 1, "{shown}");

        let shown = partition_grid(&group(0, 1)).into_string();
        assert!(!shown.contains("without an owner") && !shown.contains("unevenly"), "{shown}");
    }

    #[test]
    fn every_member_has_letters_of_its_own() {
        let found = [0, 1, 25, 26, 27, 701, 702].map(letters);
        assert_eq!(found, ["A", "B", "Z", "AA", "AB", "ZZ", "AAA"]);
    }

    #[test]
    fn a_group_whose_members_read_everything_has_no_orphans() {
        let mut shared = group(0, 0);
        shared["mode"] = "shared".into();
        let shown = partition_grid(&shared).into_string();
        assert!(!shown.contains("orphan") && shown.contains("every member reads all"), "{shown}");
    }
}
