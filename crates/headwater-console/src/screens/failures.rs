//! Failures: dead letters, quarantined issues and dead replies in one place, grouped by cause.

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::chart::sparkline;
use crate::components::{
    ButtonStyle, Tone, action, badge, block, count, empty, excerpt, facts, id, live, problem,
    table, time,
};
use crate::screen::{Screen, ScreenContent};
use crate::text::{self, counted, encoded, field, items, number, plain, shell_word};
use crate::user::ConsoleRole;

/// Name and address of the kinds of failures.
fn kind(cluster: &Value) -> &'static str {
    match field(cluster, "kind") {
        "dead_letter" => "dead letters",
        "issue" => "quarantined issues",
        _ => "dead replies",
    }
}

pub(crate) async fn list(screen: Screen) -> Response {
    let content = match screen.api.get("/failures").await {
        Err(error) => problem("The failures", &error, &screen),
        Ok(found) => html! {
            @if items(&found, "clusters").is_empty() {
                (empty("Nothing has failed: no dead letters, no quarantined issues, no dead replies.", None))
            } @else {
                (table("Failures by cause", &["Cause", "Where", "Count", "Keys", "First", "Last", "When"], &html! {
                    @for cluster in items(&found, "clusters") { (row(cluster)) }
                }))
            }
            (sources(&found))
        },
    };
    screen.page(ScreenContent {
        title: "Failures".to_owned(),
        path: Vec::new(),
        command: "headwater failure list".to_owned(),
        content: live("failures", &content),
    })
}

/// What was read, and what was not.
fn sources(found: &Value) -> Markup {
    html! {
        ul.sources {
            @for source in items(found, "sources") {
                li.quiet {
                    (field(source, "name")) ": "
                    @if let Some(reason) = source["problem"].as_str() {
                        (badge(Tone::Bad, "not read")) " " (reason)
                    } @else {
                        (counted(source["read"].as_u64().unwrap_or(0), "failure read", "failures read"))
                        @let unread: Vec<String> = items(source, "unread").iter().map(plain).collect();
                        @if !unread.is_empty() {
                            "; " (badge(Tone::Bad, "not read")) " "
                            (if unread.len() == 1 { "topic " } else { "topics " }) (unread.join(", "))
                            ": no answer; what was read before is shown"
                        } @else if source["complete"] == false { ", the newest ones; there are more" }
                    }
                }
            }
        }
    }
}

fn row(cluster: &Value) -> Markup {
    let key = field(cluster, "id");
    html! {
        tr data-key=(key) {
            th scope="row" { a href={ "/console/failures/" (encoded(key)) } { (excerpt(field(cluster, "cause"))) } }
            td { (kind(cluster)) " " (id(field(cluster, "place"))) }
            td.count { (total(cluster)) }
            td.count { (number(cluster["keys"].as_u64().unwrap_or(0))) }
            td { (time(&cluster["first"])) }
            td { (time(&cluster["last"])) }
            td { (curve(cluster)) }
        }
    }
}

/// How many failures a cause has; "+" if there may be more.
fn total(cluster: &Value) -> String {
    let more = if cluster["complete"] == false { "+" } else { "" };
    number(cluster["count"].as_u64().unwrap_or(0)) + more
}

/// How the failures of a cause are spread over the time from the first to the last.
fn curve(cluster: &Value) -> Markup {
    let counts: Vec<u64> = items(cluster, "curve").iter().filter_map(Value::as_u64).collect();
    let most = counts.iter().max().copied().unwrap_or(0);
    sparkline(&format!("from first to last, at most {} at once", number(most)), &counts)
}

/// When a part of the curve begins, in UTC.
fn begin(cluster: &Value, index: usize, parts: usize) -> Option<String> {
    let at = |name: &str| OffsetDateTime::parse(field(cluster, name), &Rfc3339).ok();
    let (first, last) = (at("first")?, at("last")?);
    let begin = first + (last - first) * i32::try_from(index).ok()? / i32::try_from(parts).ok()?;
    text::relative_time(&begin.format(&Rfc3339).ok()?, begin).map(|(_, utc)| utc)
}

/// The same as a table.
fn curve_table(cluster: &Value) -> Markup {
    let counts = items(cluster, "curve");
    html! {
        // All within a second would be one line, many times.
        @if counts.len() > 1 && begin(cluster, 0, counts.len()) != begin(cluster, counts.len() - 1, counts.len()) {
            details.curve-data {
                summary { "Data" }
                (table("Failures over time", &["From", "Count"], &html! {
                    @for (index, one) in counts.iter().enumerate() {
                        tr { th scope="row" { (begin(cluster, index, counts.len()).unwrap_or_default()) } (count(one)) }
                    }
                }))
            }
        }
    }
}

pub(crate) async fn show(screen: Screen, Path(key): Path<String>) -> Response {
    let cluster = match screen.api.get(&format!("/failures/{}", encoded(&key))).await {
        Ok(cluster) => cluster,
        Err(error) => return screen.failed("Cause", &error),
    };
    let count = cluster["count"].as_u64().unwrap_or(0);
    let (verb, one, many) = match field(&cluster, "kind") {
        "dead_letter" => ("Replay", "dead letter", "dead letters"),
        "issue" => ("Release", "issue", "issues"),
        _ => ("Retry", "reply", "replies"),
    };
    let label = format!("{verb} {}…", counted(count, one, many));
    let act = format!("/console/do/failures/{}/retry", encoded(&key));
    let plan = format!("/console/do/failures/{}/plan", encoded(&key));
    let purge = format!("/console/do/failures/{}/purge", encoded(&key));
    let is_of_letters = field(&cluster, "kind") == "dead_letter";
    let style = if is_of_letters { ButtonStyle::Plain } else { ButtonStyle::Primary };
    let content = html! {
        h2 { "Cause" }
        (block(field(&cluster, "cause")))
        (facts(&[
            ("Kind", html! { (kind(&cluster)) }),
            ("Where", id(field(&cluster, "place"))),
            ("Count", html! { (total(&cluster)) }),
            ("Keys", html! { (plain(&cluster["keys"])) }),
            ("First", time(&cluster["first"])),
            ("Last", time(&cluster["last"])),
            ("When", curve(&cluster)),
        ]))
        (curve_table(&cluster))
        @if cluster["complete"] == false {
            p {
                "Not all failures were read, only "
                @if is_of_letters { "the newest dead letters of the topic: a replay plan takes all of this cause." }
                @else { "so many; there may be more of this cause." }
            }
        }
        div.buttons {
            @if is_of_letters {
                (action(&screen.user, ConsoleRole::Write, (&plan, "Replay plan…", ButtonStyle::Primary), &[]))
            }
            (action(&screen.user, ConsoleRole::Write, (&act, &label, style), &[]))
            @if is_of_letters {
                (action(&screen.user, ConsoleRole::Admin, (&purge, &format!("Purge {}…", counted(count, one, many)), ButtonStyle::Danger), &[]))
            }
            a.button href={ "/console/failures/" (encoded(&key)) "/failures.json" } download { "Export" }
        }
        h2 { "Samples" }
        (table("Samples", &["Failure", "Key", "Failed", "Message"], &html! {
            @for sample in items(&cluster, "samples") { (sample_row(&cluster, sample)) }
        }))
    };
    screen.page(ScreenContent {
        title: "Cause".to_owned(),
        path: vec![("Failures".to_owned(), "/console/failures".to_owned())],
        command: format!("headwater failure show {}", shell_word(&key)),
        content: live("cause", &content),
    })
}

/// One cause with the ids of all its failures, as a file.
pub(crate) async fn export(screen: Screen, Path(key): Path<String>) -> Response {
    let path = format!("/failures/{}?ids=true", encoded(&key));
    screen.download("Cause", &path, ("application/json", "failures.json")).await
}

fn sample_row(cluster: &Value, sample: &Value) -> Markup {
    let entry = field(sample, "id");
    let address = match field(cluster, "kind") {
        "dead_letter" => {
            format!(
                "/console/topics/{}/dead-letters/{}",
                encoded(field(cluster, "place")),
                encoded(entry)
            )
        }
        "issue" => format!("/console/issues/{}", encoded(entry)),
        _ => format!("/console/outbox/{}", encoded(entry)),
    };
    html! {
        tr data-key=(entry) {
            th scope="row" { a href=(address) { (id(entry)) } }
            td { (excerpt(&plain(&sample["key"]))) }
            td { (time(&sample["at"])) }
            td { (excerpt(field(sample, "message"))) }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_curve_has_its_counts_as_a_table() {
        let cluster = json!({"first": "2026-11-17T20:00:00Z", "last": "2026-11-17T21:00:00Z", "curve": [3, 0, 1]});
        let shown = curve_table(&cluster).into_string();
        for row in [
            "<th scope=\"row\">2026-11-17 20:00:00 UTC</th><td class=\"count\">3</td>",
            "<th scope=\"row\">2026-11-17 20:20:00 UTC</th><td class=\"count\">0</td>",
            "<th scope=\"row\">2026-11-17 20:40:00 UTC</th><td class=\"count\">1</td>",
        ] {
            assert!(shown.contains(row), "{row}: {shown}");
        }
        assert_eq!(curve_table(&json!({"curve": [1]})).into_string(), "");
    }
}
