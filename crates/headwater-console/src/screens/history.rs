//! Charts of the history of metrics, for the overview and the screens of topics and groups.

use maud::{Markup, html};
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::api_client::Part;
use crate::chart::{
    ChartLine, ChartScale, ChartTimes, ChartUnit, chart_lines, marks_list, time_chart,
};
use crate::components::{empty, problem};
use crate::screen::Screen;
use crate::text::{encoded, field, items};

/// The last hour in minutes: age of the first step in minutes, and length of a step.
pub(crate) const HOUR: (u64, &str) = (60, "1m");

/// What is shown while there is less than two minutes of an hour.
pub(crate) const QUARTER: (u64, &str) = (15, "10s");

/// The history of a range. `selection`: parameters that name series or a topic. While there is less than two minutes of it, that of
/// this process in steps of ten seconds.
pub(crate) async fn read(screen: &Screen, selection: &str, range: (u64, &str)) -> Part {
    let read = async |(minutes, step): (u64, &str)| {
        let from = OffsetDateTime::now_utc() - time::Duration::minutes(minutes as i64);
        // To the minute, so that viewers share an answer.
        let from = from.replace_second(0).and_then(|from| from.replace_nanosecond(0)).ok();
        let from = from.and_then(|from| from.format(&Rfc3339).ok()).unwrap_or_default();
        let path = format!("/history?{selection}&from={}&step={step}", encoded(&from));
        screen.api.get(&path).await
    };
    let history = read(range).await?;
    if items(&history, "points").len() < 2 && history["step_ms"] == 60_000 {
        return read(QUARTER).await;
    }
    Ok(history)
}

/// The charts of a history, and what happened in its time.
pub(crate) fn charts(
    screen: &Screen,
    history: &Part,
    draw: impl FnOnce(&Value, &ChartTimes) -> Markup,
) -> Markup {
    let history = match history {
        Ok(history) => history,
        Err(error) => return problem("The history", error, screen),
    };
    let times = ChartTimes::of(history).filter(|_| !items(history, "points").is_empty());
    let Some(times) = times else {
        let sentence = "There is no history of this time yet. A process records its first values ten seconds after its start.";
        return empty(sentence, None);
    };
    html! {
        div.charts { (draw(history, &times)) }
        (marks_list(&times))
        p.quiet {
            @if field(history, "scope") == "process" { "Of this process. " } @else { "Of all processes. " }
            @if let Some(problem) = history["problem"].as_str() { "Incomplete: " (problem) ". " }
            "A dashed vertical line is a mark: the start of a process, a replay plan or a rebalance. A gap is a time without samples. " code { "headwater history" }
        }
    }
}

/// What counts are per: `per minute`.
pub(crate) fn per_step(history: &Value) -> String {
    match history["step_ms"].as_u64().unwrap_or_default() / 1000 {
        60 => "per minute".to_owned(),
        seconds if seconds.is_multiple_of(60) => format!("per {} minutes", seconds / 60),
        seconds => format!("per {seconds} seconds"),
    }
}

/// The charts of a topic, or of one of its groups: messages in and settled, and lag.
pub(crate) fn topic_charts(history: &Value, times: &ChartTimes) -> Markup {
    let chart = |title: &str, lines: &[ChartLine]| {
        time_chart(title, ChartUnit::Count, ChartScale::Linear, times, lines)
    };
    let flow = chart_lines(history, &[("added", "in"), ("settled", "settled")]);
    let names = items(history, "series").iter().map(|series| field(series, "name"));
    let of_groups: Vec<_> =
        names.filter_map(|name| Some((name, name.strip_prefix("lag:")?))).collect();
    let lags = match of_groups.is_empty() {
        true => chart_lines(history, &[("lag", "not delivered"), ("pending", "in progress")]),
        false => chart_lines(history, &of_groups),
    };
    let title = if of_groups.is_empty() { "Lag of the group" } else { "Lag of each group" };
    html! {
        (chart(&format!("Messages in and settled, {}", per_step(history)), &flow))
        (chart(title, &lags))
    }
}
