//! Parts of pages: times, badges, facts, blocks of text, banners, tables, buttons.
//!
//! Guarantees: text of users is escaped, isolated from the direction of the text around it, cut to a limit that is
//! stated, and its control characters are visible.

use std::time::Duration;

use maud::{Markup, PreEscaped, html};
use serde_json::Value;
use time::OffsetDateTime;

use crate::api_client::{Part, Problem};
use crate::screen::Screen;
use crate::text::{self, cut, visible};
use crate::user::{ConsoleRole, ConsoleUser};

/// Maximum characters of a text shown as a block.
const BLOCK_CHARS_MAX: usize = 20_000;

/// Maximum characters of a text in a table.
const EXCERPT_CHARS_MAX: usize = 120;

/// Steps of durations in banners of open pages: each other text is sent to the browser and read out.
const LIVE_STEP_SECONDS: u64 = 10;

/// A part that is kept up to date while the page is open. Names are unique in a page.
pub(crate) fn live(name: &str, content: &Markup) -> Markup {
    html! {
        (PreEscaped(format!("<!--live:{name}-->")))
        div data-live=(name) { (content) }
        (PreEscaped(format!("<!--/live:{name}-->")))
    }
}

/// A time relative to now, with the time in UTC on hover.
pub(crate) fn time(at: &Value) -> Markup {
    let Some(at) = at.as_str() else { return html! { span.quiet { "–" } } };
    match text::relative_time(at, OffsetDateTime::now_utc()) {
        Some((relative, utc)) => html! { time datetime=(at) title=(utc) { (relative) } },
        None => html! { (at) },
    }
}

/// The same with the time in UTC as text, where the exact time matters: not every reader has a pointer.
pub(crate) fn time_with_utc(at: &Value) -> Markup {
    let utc = at.as_str().and_then(|at| text::relative_time(at, OffsetDateTime::now_utc()));
    html! {
        (time(at))
        @if let Some((_, utc)) = utc { " " span.utc { (utc) } }
    }
}

/// Text of a user in a line.
pub(crate) fn excerpt(text: &str) -> Markup {
    let (shown, is_cut) = cut(text, EXCERPT_CHARS_MAX);
    html! { bdi { (visible(shown)) @if is_cut { "…" } } }
}

/// An id or name, in fixed-width letters.
pub(crate) fn id(text: &str) -> Markup {
    html! { code { (excerpt(text)) } }
}

/// Text of a user as a block.
pub(crate) fn block(text: &str) -> Markup {
    let (shown, is_cut) = cut(text, BLOCK_CHARS_MAX);
    html! {
        pre tabindex="0" { bdi { (visible(shown)) } }
        @if is_cut {
            p.quiet {
                "The first " (text::number(BLOCK_CHARS_MAX as u64)) " characters of " (text::bytes(text.len() as u64))
                ". The API returns the whole text."
            }
        }
    }
}

/// Text of a user as a block, in which the lines are marked that differ from another text.
fn difference(text: &str, other: &str) -> Markup {
    let ((shown, is_cut), (other, _)) = (cut(text, BLOCK_CHARS_MAX), cut(other, BLOCK_CHARS_MAX));
    html! {
        pre tabindex="0" { bdi {
            @for (differs, lines) in text::differing_lines(shown, other) {
                @if differs { mark { span.visually-hidden { "Differs: " } (visible(&lines)) } } @else { (visible(&lines)) }
                "\n"
            }
        } }
        @if is_cut { p.quiet { "The first " (text::number(BLOCK_CHARS_MAX as u64)) " characters are compared." } }
    }
}

/// JSON as an indented block, in which the lines are marked that differ from other JSON.
pub(crate) fn json_difference(value: &Value, other: &Value) -> Markup {
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        // Formatting a value cannot fail.
        other => serde_json::to_string_pretty(other).unwrap_or_default(),
    };
    difference(&text(value), &text(other))
}

/// JSON as an indented block; text that is no JSON as it is.
pub(crate) fn json_block(value: &Value) -> Markup {
    match value {
        Value::String(text) => block(text),
        // Formatting a value cannot fail.
        other => block(&serde_json::to_string_pretty(other).unwrap_or_default()),
    }
}

/// A payload: JSON indented if it is JSON, otherwise as text.
pub(crate) fn payload(object: &Value) -> Markup {
    if let Some(encoded) = object["payload_base64"].as_str() {
        return html! { p.quiet { "Not UTF-8; shown as base64." } (block(encoded)) };
    }
    let text = text::field(object, "payload");
    // Only what is shown whole is worth formatting.
    let parsed = (text.len() <= BLOCK_CHARS_MAX).then(|| serde_json::from_str::<Value>(text).ok());
    match parsed.flatten().filter(|value| value.is_object() || value.is_array()) {
        Some(value) => html! {
            (json_block(&value))
            details { summary { "As it was sent" } (block(text)) }
        },
        None => block(text),
    }
}

/// Meaning of a badge or banner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Good,
    Neutral,
    Active,
    Warning,
    Bad,
}

impl Tone {
    fn class(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Neutral => "neutral",
            Self::Active => "active",
            Self::Warning => "warning",
            Self::Bad => "bad",
        }
    }
}

/// A short state in a box.
pub(crate) fn badge(tone: Tone, text: &str) -> Markup {
    html! { span class={ "badge " (tone.class()) } { (text) } }
}

/// A message across the page. Bad ones are announced at once.
pub(crate) fn banner(tone: Tone, content: &Markup) -> Markup {
    let role = if tone == Tone::Bad { "alert" } else { "status" };
    html! { div class={ "banner " (tone.class()) } role=(role) { (content) } }
}

/// Names with their values.
pub(crate) fn facts(facts: &[(&str, Markup)]) -> Markup {
    html! {
        dl.facts {
            @for (name, value) in facts { div { dt { (name) } dd { (value) } } }
        }
    }
}

/// A part that could not be read, and of which nothing is shown.
pub(crate) fn problem(what: &str, problem: &Problem, screen: &Screen) -> Markup {
    unread(what, problem, screen, None)
}

/// The same of a part of which the last answer is shown below.
pub(crate) fn problem_with_last(
    what: &str,
    problem: &Problem,
    screen: &Screen,
    age: Duration,
) -> Markup {
    let step = if screen.is_live { LIVE_STEP_SECONDS } else { 1 };
    unread(what, problem, screen, Some(as_of_step(age, step)))
}

fn unread(what: &str, problem: &Problem, screen: &Screen, last: Option<String>) -> Markup {
    let tone = if problem.is_unavailable() { Tone::Warning } else { Tone::Bad };
    screen.log_failed(what, problem);
    let step = if screen.is_live { LIVE_STEP_SECONDS } else { 1 };
    let lasting = problem.lasting.map_or(0, |lasting| lasting.as_secs() / step * step);
    let content = html! {
        p {
            strong { (what) " cannot be shown" @if last.is_some() { " as it is now" } "." } " " (problem.message) ". "
            @if let Some(as_of) = &last { "It is shown " (as_of) ". " }
            @if lasting > 0 { "This has lasted for " (text::duration(lasting * 1000)) ". " }
            @if problem.is_unavailable() && last.is_none() { "The rest of this page is up to date. " }
        }
        p.quiet {
            "Code " code { (problem.code) }
            @if !screen.is_live { ", request " code { (screen.request_id) } }
            ". "
            a href=(screen.address()) { "Try again" } " · " a href="/console/doctor" { "Open Doctor" }
        }
    };
    banner(tone, &content)
}

/// How old something is that is shown although it may have changed.
pub(crate) fn as_of(age: Duration) -> String {
    as_of_step(age, 1)
}

/// The same in steps of so many seconds.
fn as_of_step(age: Duration, step: u64) -> String {
    let seconds = (age.as_secs() / step * step).max(step);
    format!("as of {} ago", text::duration(seconds * 1000))
}

/// A part of a page. If it cannot be read, a banner says so, and the last answer is shown below it with its age.
pub(crate) fn or_last(
    what: &str,
    part: &Part,
    screen: &Screen,
    show: impl FnOnce(&Value) -> Markup,
) -> Markup {
    match part {
        Ok(value) => show(value),
        Err(error) => match &error.last {
            Some((last, age)) => {
                html! { (problem_with_last(what, error, screen, *age)) (show(last)) }
            }
            None => problem(what, error, screen),
        },
    }
}

/// What is shown instead of an empty list: a sentence, and the command that creates the first item.
pub(crate) fn empty(sentence: &str, command: Option<&str>) -> Markup {
    html! {
        div.empty {
            p { (sentence) }
            @if let Some(command) = command { p { code { (command) } } }
        }
    }
}

/// A table that scrolls on its own if the page is narrow.
pub(crate) fn table(label: &str, head: &[&str], body: &Markup) -> Markup {
    table_with_order(label, head, None, body)
}

/// The order of a list by the column that has an index. The address has a parameter for the other order, so a link keeps it.
pub(crate) struct ListOrder {
    column: &'static str,
    is_ascending: bool,
    reverse: String,
}

impl ListOrder {
    /// The order that the address asks for: ascending or descending by default, the other one with `parameter`. `keep` names
    /// the parameters of the filter.
    pub(crate) fn of(
        screen: &Screen,
        column: &'static str,
        (parameter, ascends_by_default): (&str, bool),
        keep: &[&str],
    ) -> Self {
        let is_reversed = screen.query.get(parameter) == "true";
        let keep: Vec<&str> = keep.iter().copied().filter(|name| *name != parameter).collect();
        let mut query = screen.query.query_of(&keep);
        if !is_reversed {
            query += if query.is_empty() { "" } else { "&" };
            query += &format!("{parameter}=true");
        }
        let path = screen.uri.path();
        let reverse = if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") };
        Self { column, is_ascending: is_reversed != ascends_by_default, reverse }
    }
}

/// A table whose list can be reversed by a link in the head of a column.
pub(crate) fn table_with_order(
    label: &str,
    head: &[&str],
    order: Option<&ListOrder>,
    body: &Markup,
) -> Markup {
    let of_column = |name: &str| order.filter(|order| order.column == name);
    let direction = |order: &ListOrder| if order.is_ascending { "ascending" } else { "descending" };
    html! {
        div.scroll role="region" aria-label=(label) tabindex="0" {
            table {
                caption.visually-hidden { (label) }
                thead { tr { @for name in head {
                    th scope="col" class=[is_count(name).then_some("count")] aria-sort=[of_column(name).map(direction)] {
                        @match of_column(name) {
                            None => (name),
                            Some(order) => {
                                a.order href=(order.reverse) title="Reverse the order" {
                                    (name) " " span aria-hidden="true" { @if order.is_ascending { "▲" } @else { "▼" } }
                                }
                            }
                        }
                        // Shown by the script that makes it work.
                        @if *name == "Selected" { " " input type="checkbox" hidden aria-label="Select all rows shown"; }
                    }
                } } }
                tbody { (body) }
            }
        }
    }
}

/// Columns of numbers are aligned to the right.
fn is_count(name: &str) -> bool {
    const COUNTS: [&str; 28] = [
        "Events",
        "Recorded",
        "Duplicate",
        "Ignored",
        "Rejected",
        "Partitions",
        "Messages",
        "Delayed",
        "Dead letters",
        "Pending",
        "Attempts",
        "Lag",
        "Failures",
        "Count",
        "Bytes",
        "Epoch",
        "Claims",
        "Replays",
        "Keys",
        "Worst lag",
        "In/s",
        "Settled/s",
        "Attempt",
        "Sent",
        "Settled",
        "Failed again",
        "Left",
        "Total",
    ];
    COUNTS.contains(&name)
}

/// A number in a table.
pub(crate) fn count(value: &Value) -> Markup {
    html! { td.count { @match value.as_u64() { Some(count) => (text::number(count)), None => span.quiet { "–" } } } }
}

/// How many rows of a list match on all pages, if the API counted them.
pub(crate) fn matching(page: &Value, one: &str, many: &str) -> Markup {
    html! {
        @if let Some(count) = page["matching"].as_u64() { p.quiet { (text::capped(count, one, many)) "." } }
    }
}

/// Links between the pages of a list. `keep` names the parameters of the filter.
pub(crate) fn pager(screen: &Screen, keep: &[&str], next: &Value) -> Markup {
    let next = text::plain(next);
    let filter = screen.query.query_of(keep);
    let path = screen.uri.path();
    let first = if filter.is_empty() { path.to_owned() } else { format!("{path}?{filter}") };
    let join = if filter.is_empty() { "" } else { "&" };
    let is_first = screen.query.get("cursor").is_empty();
    html! {
        @if !is_first || !next.is_empty() {
            nav.pager aria-label="Pages" {
                @if !is_first { a href=(first) { "First page" } }
                @if !next.is_empty() {
                    a rel="next" href={ (path) "?" (filter) (join) "cursor=" (text::encoded(&next)) } { "Next page" }
                }
            }
        }
    }
}

/// How far a search without an index looked, and the link that searches on. A link of its own: pages that are read while a reader
/// scrolls would search everything. `keep` names the parameters of the filter, of which at least one is set.
pub(crate) fn search_pager(
    screen: &Screen,
    keep: &[&str],
    (searched, one, many): (u64, &str, &str),
    next: &Value,
) -> Markup {
    let next = text::plain(next);
    let address = format!("{}?{}", screen.uri.path(), screen.query.query_of(keep));
    let is_first = screen.query.get("cursor").is_empty();
    let was = if searched == 1 { "was" } else { "were" };
    html! {
        p.quiet { (text::counted(searched, one, many)) " " (was) " searched." }
        @if !is_first || !next.is_empty() {
            nav.pager aria-label="Search" {
                @if !is_first { a href=(address) { "First page" } }
                @if !next.is_empty() { a href={ (address) "&cursor=" (text::encoded(&next)) } { "Search further " (many) } }
            }
        }
    }
}

/// Links that set one parameter of the filter; the current one is marked. `keep` names the parameters of the filter that stay.
pub(crate) fn choices(
    screen: &Screen,
    name: &str,
    values: &[(&str, &str)],
    keep: &[&str],
) -> Markup {
    let (path, current) = (screen.uri.path(), screen.query.get(name));
    let keep: Vec<&str> = keep.iter().copied().filter(|kept| *kept != name).collect();
    let kept = screen.query.query_of(&keep);
    let address = |value: &str| {
        let chosen = (!value.is_empty()).then(|| format!("{name}={value}"));
        let query = chosen.into_iter().chain(Some(kept.clone()).filter(|kept| !kept.is_empty()));
        match &*query.collect::<Vec<_>>().join("&") {
            "" => path.to_owned(),
            query => format!("{path}?{query}"),
        }
    };
    html! {
        ul.choices {
            @for (value, label) in values {
                li {
                    @let address = address(value);
                    a href=(address) aria-current=[(*value == current).then_some("true")] { (label) }
                }
            }
        }
    }
}

/// How a button looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ButtonStyle {
    Plain,
    Primary,
    Danger,
}

/// A button. Without the needed role it is disabled and says which role it needs.
pub(crate) fn button(
    user: &ConsoleUser,
    needed: ConsoleRole,
    style: ButtonStyle,
    label: &str,
) -> Markup {
    let class = match style {
        ButtonStyle::Plain => "button",
        ButtonStyle::Primary => "button primary",
        ButtonStyle::Danger => "button danger",
    };
    html! {
        @if user.role >= needed {
            button class=(class) type="submit" { (label) }
        } @else {
            button class=(class) type="submit" disabled { (label) }
            span.quiet { " needs the role " code { (needed.as_str()) } }
        }
    }
}

/// A form with one button that changes something.
pub(crate) fn action(
    user: &ConsoleUser,
    needed: ConsoleRole,
    (path, label, style): (&str, &str, ButtonStyle),
    fields: &[(&str, &str)],
) -> Markup {
    html! {
        form.action method="post" action=(path) {
            @for (name, value) in fields { input type="hidden" name=(name) value=(value); }
            (button(user, needed, style, label))
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::http::StatusCode;
    use serde_json::json;

    use super::*;

    #[test]
    fn hostile_text_is_escaped_isolated_and_cut() {
        let hostile = "<script>alert(1)</script>\u{202e}\0";
        let shown = excerpt(hostile).into_string();
        assert_eq!(shown, "<bdi>&lt;script&gt;alert(1)&lt;/script&gt;\u{202e}\u{2400}</bdi>");
        let long = block(&"x".repeat(1_000_000)).into_string();
        assert!(long.len() < 2 * BLOCK_CHARS_MAX && long.contains("976.6 KiB"), "{}", long.len());
    }

    #[test]
    fn an_exact_time_is_text() {
        let shown = time_with_utc(&json!("2026-11-17T19:57:00.25Z")).into_string();
        assert!(shown.ends_with("<span class=\"utc\">2026-11-17 19:57:00 UTC</span>"), "{shown}");
        assert_eq!(time_with_utc(&Value::Null).into_string(), time(&Value::Null).into_string());
    }

    #[test]
    fn an_id_that_is_cut_says_so() {
        let shown = id(&"x".repeat(121)).into_string();
        assert_eq!(shown, format!("<code><bdi>{}…</bdi></code>", "x".repeat(120)));
        assert_eq!(id("1-0").into_string(), "<code><bdi>1-0</bdi></code>");
    }

    #[test]
    fn a_choice_keeps_the_rest_of_the_filter() {
        let address = "/console/issues?quarantined=true&integration=code&status=failed&cursor=7";
        let screen = Screen::for_test(Router::new(), address);
        let keep = ["integration", "error"];
        let shown = choices(&screen, "status", &[("", "All"), ("queued", "Queued")], &keep);
        let shown = shown.into_string();
        for link in [
            "href=\"/console/issues?integration=code\">All<",
            "href=\"/console/issues?status=queued&amp;integration=code\">Queued<",
        ] {
            assert!(shown.contains(link), "{link}: {shown}");
        }
        let screen = Screen::for_test(Router::new(), "/console/issues");
        let shown = choices(&screen, "status", &[("", "All")], &keep).into_string();
        assert!(shown.contains("href=\"/console/issues\""), "{shown}");
    }

    #[test]
    fn a_banner_of_an_open_page_is_the_same_until_something_changes() {
        let shown = |is_live: bool, request_id: &str, seconds: u64| {
            let mut screen = Screen::for_test(Router::new(), "/console/topics");
            (screen.is_live, screen.request_id) = (is_live, request_id.to_owned());
            let status = StatusCode::SERVICE_UNAVAILABLE;
            let mut failed = Problem::new(status, "unavailable", "no answer");
            failed.lasting = Some(Duration::from_secs(seconds));
            problem("The topics", &failed, &screen).into_string()
                + &problem_with_last("The moves", &failed, &screen, Duration::from_secs(seconds))
                    .into_string()
        };
        assert_eq!(shown(true, "r-1", 11), shown(true, "r-2", 19));
        assert!(shown(true, "r-1", 21).contains("This has lasted for 20 s. "));
        assert!(!shown(true, "r-1", 9).contains("This has lasted"));
        let page = shown(false, "r-1", 11);
        assert!(page.contains("This has lasted for 11 s. ") && page.contains("r-1"), "{page}");
    }

    #[test]
    fn an_open_page_logs_a_failure_once() {
        let is_logged = |is_live: bool, status: StatusCode, lasting: Option<Duration>| {
            let mut screen = Screen::for_test(Router::new(), "/console/topics");
            screen.is_live = is_live;
            let mut failed = Problem::new(status, "code", "no answer");
            failed.lasting = lasting;
            screen.is_logged(&failed)
        };
        let (down, gone) = (StatusCode::SERVICE_UNAVAILABLE, StatusCode::NOT_FOUND);
        let second = Some(Duration::from_secs(1));
        assert!(is_logged(false, down, None) && is_logged(false, down, second));
        assert!(is_logged(false, gone, None), "a page that a person opens");
        assert!(is_logged(true, down, None) && !is_logged(true, down, second));
        assert!(!is_logged(true, gone, None), "it would be gone each second");
    }

    #[test]
    fn a_payload_is_shown_as_json_text_or_base64() {
        let shown = |object: Value| payload(&object).into_string();
        assert!(shown(json!({"payload": "{\"a\":[1]}"})).contains("&quot;a&quot;: [\n"));
        assert!(shown(json!({"payload": "plain"})).contains("<bdi>plain</bdi>"));
        assert!(shown(json!({"payload_base64": "/wA="})).contains("shown as base64"));
    }

    #[test]
    fn text_of_users_cannot_imitate_the_mark_of_a_live_part() {
        let shown = live("issue", &excerpt("<!--/live:issue-->")).into_string();
        assert_eq!(shown.matches("<!--/live:issue-->").count(), 1);
        assert!(shown.ends_with("<!--/live:issue-->"));
    }
}
