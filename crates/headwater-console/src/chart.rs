//! Line charts and heat maps over time, and bars in a line, as SVG without scripts; a chart has its data as a table.
//!
//! Upstream: screens. Guarantees: a time without a value is a gap; lines differ in colour and dashes; a chart is drawn with
//! the colours of the page, light or dark; no inline style.

use maud::{Markup, html};
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::components::table;
use crate::text::{counted, duration, number, plain, visible};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 190.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 628.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 160.0;

/// Lines that differ in style. At most so many are drawn; the table of a chart has all of them.
const STYLES: [&str; LINES_MAX] =
    ["line-a", "line-b", "line-c", "line-d", "line-e", "line-f", "line-g"];
pub(crate) const LINES_MAX: usize = 7;

/// Shades of a heat map, from few to many.
const SHADES: [&str; 5] = ["heat-1", "heat-2", "heat-3", "heat-4", "heat-5"];

/// Height that the label of a row of a heat map needs.
const LABEL_HEIGHT: f64 = 14.0;

/// Marks in the list below charts; the newest.
const MARKS_LISTED: usize = 20;

/// What the values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChartUnit {
    Count,
    Milliseconds,
}

impl ChartUnit {
    fn show(self, value: f64) -> String {
        match self {
            // Halves occur only on the axis.
            Self::Count if value.fract() > 0.0 => format!("{value:.1}"),
            Self::Count => number(value as u64),
            Self::Milliseconds if value > 0.0 && value < 10.0 => format!("{value:.1} ms"),
            Self::Milliseconds => duration(value as u64),
        }
    }
}

/// How values become heights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChartScale {
    Linear,
    /// Each line of the grid is ten times the one below.
    Logarithmic,
}

/// Times of a chart, and what happened.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChartTimes {
    from: i64,
    to: i64,
    step: i64,
    /// Begin of each point, in milliseconds since 1970, ascending.
    points: Vec<i64>,
    /// Starts of processes, replay plans and rebalances.
    marks: Vec<(i64, String)>,
}

/// One line: its name and its values, one for each point.
#[derive(Clone, Debug)]
pub(crate) struct ChartLine {
    name: String,
    values: Vec<Option<f64>>,
}

impl ChartLine {
    /// Whether it has a value above zero.
    pub(crate) fn has_values(&self) -> bool {
        self.largest() > 0.0
    }

    fn largest(&self) -> f64 {
        self.values.iter().flatten().copied().fold(0.0, f64::max)
    }
}

fn milliseconds(at: &Value) -> Option<i64> {
    let at = OffsetDateTime::parse(at.as_str()?, &Rfc3339).ok()?;
    i64::try_from(at.unix_timestamp_nanos() / 1_000_000).ok()
}

/// `10:05:30` in UTC.
fn clock(ms: i64) -> String {
    let at = OffsetDateTime::from_unix_timestamp(ms / 1000).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    format!("{:02}:{:02}:{:02}", at.hour(), at.minute(), at.second())
}

impl ChartTimes {
    /// Of a response of `/history`.
    pub(crate) fn of(history: &Value) -> Option<Self> {
        let points = history["points"].as_array()?.iter();
        let marks = history["marks"].as_array()?.iter();
        let mark = |mark: &Value| {
            let named = |name: &str| plain(&mark[name]);
            let sentence = match mark["kind"].as_str() {
                Some("plan") => format!("replay plan {} was made", named("plan")),
                Some("rebalance") => {
                    let moved = mark["partitions"].as_u64().unwrap_or(0);
                    let moved =
                        counted(moved, "partition has a new owner", "partitions have new owners");
                    format!("{moved} in {} / {}", named("topic"), named("group"))
                }
                _ => format!("process {} started, version {}", named("process"), named("version")),
            };
            Some((milliseconds(&mark["at"])?, visible(&sentence).into_owned()))
        };
        Some(Self {
            from: milliseconds(&history["from"])?,
            to: milliseconds(&history["to"])?,
            step: history["step_ms"].as_i64().filter(|step| *step > 0)?,
            points: points.map(|point| milliseconds(&point["at"])).collect::<Option<_>>()?,
            marks: marks.filter_map(mark).collect(),
        })
    }

    fn x(&self, at: i64) -> f64 {
        let length = (self.to - self.from).max(1) as f64;
        LEFT + (RIGHT - LEFT) * ((at - self.from) as f64 / length).clamp(0.0, 1.0)
    }
}

/// The lines of these series of a response of `/history`: name of the series, name for people.
pub(crate) fn chart_lines(history: &Value, series: &[(&str, &str)]) -> Vec<ChartLine> {
    let points = history["points"].as_array().map_or(&[][..], Vec::as_slice);
    let values = |name: &str| points.iter().map(|point| point["values"][name].as_f64()).collect();
    let line = |(series, name): &(&str, &str)| ChartLine {
        name: visible(name).into_owned(),
        values: values(series),
    };
    series.iter().map(line).collect()
}

/// What happened in the time of charts, newest first, for reading without a pointer. Nothing if there are no marks. Times are not relative, so
/// that a live page does not change every second.
pub(crate) fn marks_list(times: &ChartTimes) -> Markup {
    let mut marks: Vec<_> = times.marks.iter().collect();
    marks.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    html! {
        @if !marks.is_empty() {
            details {
                summary { "Marks (" (marks.len()) ")" }
                ul.marks {
                    @for (at, sentence) in marks.iter().take(MARKS_LISTED) { li { (clock(*at)) " UTC: " bdi { (sentence) } } }
                }
                @if marks.len() > MARKS_LISTED { p.quiet { "The newest " (MARKS_LISTED) "." } }
            }
        }
    }
}

/// Bars in a line of text, for a glance; `label` says in words what they show.
pub(crate) fn sparkline(label: &str, counts: &[u64]) -> Markup {
    let most = counts.iter().max().copied().unwrap_or(0).max(1) as f64;
    let width = counts.len().max(1) * 4;
    html! {
        @if counts.is_empty() { span.quiet { "–" } }
        @else {
            svg.sparkline role="img" aria-label=(label) viewBox={ "0 0 " (width) " 24" } preserveAspectRatio="none" {
                @for (index, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
                    @let height = (*count as f64 / most * 22.0).max(2.0);
                    rect x=(index * 4) y=(format!("{:.1}", 24.0 - height)) width="3" height=(format!("{height:.1}")) {}
                }
            }
        }
    }
}

/// The lines that are drawn: all of them, or those with the largest values if there are more than styles.
fn drawn_lines(lines: &[ChartLine]) -> Vec<&ChartLine> {
    let mut drawn: Vec<&ChartLine> = lines.iter().collect();
    if drawn.len() > LINES_MAX {
        drawn.sort_by(|one, other| other.largest().total_cmp(&one.largest()));
        drawn.truncate(LINES_MAX);
    }
    drawn
}

/// A chart with its legend and its data. It says how many lines it leaves out.
pub(crate) fn time_chart(
    title: &str,
    unit: ChartUnit,
    scale: ChartScale,
    times: &ChartTimes,
    lines: &[ChartLine],
) -> Markup {
    let largest = lines.iter().map(ChartLine::largest).fold(0.0, f64::max);
    let axis = Axis::new(scale, largest);
    let drawn = drawn_lines(lines);
    let left_out = (lines.len() - drawn.len()) as u64;
    html! {
        figure.time-chart {
            figcaption {
                strong { (title) }
                ul.legend {
                    @for (line, style) in drawn.iter().zip(STYLES) {
                        li {
                            svg width="24" height="8" viewBox="0 0 24 8" aria-hidden="true" { path class=(style) d="M0 4H24" {} }
                            " " bdi { (line.name) }
                        }
                    }
                    @if left_out > 0 {
                        li { (counted(left_out, "line with smaller values is", "lines with smaller values are")) " only in the data" }
                    }
                }
            }
            svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label={ (title) ": line chart; its data follows as a table" } {
                @for value in axis.grid() {
                    @let y = tenths(axis.y(value));
                    path.grid d={ "M" (LEFT) " " (y) "H" (RIGHT) } {}
                    text.axis x=(LEFT - 6.0) y=(y) text-anchor="end" dominant-baseline="middle" { (unit.show(value)) }
                }
                (time_labels(times))
                (mark_lines(times))
                @let is_single = lines.len() == 1;
                @for (line, style) in drawn.iter().zip(STYLES) { (line_path(times, &axis, line, style, is_single)) }
                @for (index, at) in times.points.iter().enumerate() { (read_out(times, *at, index, unit, lines)) }
            }
            details {
                summary { "Data" }
                (data(title, unit, times, lines))
            }
        }
    }
}

/// Counts of runs or calls by their duration, over time: each column is a step, each row a range of durations.
struct HeatMap {
    title: String,
    /// The ranges that have counts, from short to long: `100 ms to 250 ms`, and the upper bound as a label.
    ranges: Vec<(String, String)>,
    /// For each point the counts of these ranges; `None` if they are unknown.
    counts: Vec<Option<Vec<u64>>>,
    most: u64,
}

impl HeatMap {
    /// Of a series of a response of `/history` that has buckets; `None` if all of them are empty.
    fn of(title: &str, history: &Value, series: &str) -> Option<Self> {
        let known = history["series"].as_array()?.iter().find(|one| one["name"] == series)?;
        let bounds: Vec<f64> =
            known["bounds_ms"].as_array()?.iter().filter_map(Value::as_f64).collect();
        let point = |point: &Value| {
            let counts = point["values"][series].as_array()?.iter();
            Some(counts.map(|count| count.as_u64().unwrap_or(0)).collect::<Vec<_>>())
        };
        let counts: Vec<_> = history["points"].as_array()?.iter().map(point).collect();
        let has_count = |bucket: &usize| {
            counts
                .iter()
                .flatten()
                .any(|counts| counts.get(*bucket).is_some_and(|count| *count > 0))
        };
        let first = (0..=bounds.len()).find(has_count)?;
        let last = (0..=bounds.len()).rfind(has_count)?;
        let range = |bucket: usize| {
            let shown = |bound: &f64| ChartUnit::Milliseconds.show(*bound);
            let lower = bucket.checked_sub(1).and_then(|below| bounds.get(below)).map(shown);
            match (lower, bounds.get(bucket).map(shown)) {
                (Some(lower), Some(upper)) => (format!("{lower} to {upper}"), upper),
                (None, Some(upper)) => (format!("up to {upper}"), upper),
                (lower, None) => {
                    (format!("more than {}", lower.unwrap_or_default()), "longer".to_owned())
                }
            }
        };
        let shown = |counts: Vec<u64>| {
            (first..=last).map(|bucket| counts.get(bucket).copied().unwrap_or(0)).collect()
        };
        let counts: Vec<Option<Vec<u64>>> =
            counts.into_iter().map(|counts| counts.map(shown)).collect();
        let most = counts.iter().flatten().flatten().copied().max().unwrap_or(0);
        Some(Self {
            title: title.to_owned(),
            ranges: (first..=last).map(range).collect(),
            counts,
            most,
        })
    }

    /// Small differences between small counts show, too: shades follow the logarithm.
    fn shade(&self, count: u64) -> &'static str {
        let part = (1.0 + count as f64).ln() / (1.0 + self.most as f64).ln();
        let index = (part * SHADES.len() as f64).ceil() as usize;
        SHADES[index.clamp(1, SHADES.len()) - 1]
    }

    fn draw(&self, times: &ChartTimes) -> Markup {
        let height = (BOTTOM - TOP) / self.ranges.len() as f64;
        let top = |row: usize| BOTTOM - height * (row + 1) as f64;
        let every = (LABEL_HEIGHT / height).ceil().max(1.0) as usize;
        html! {
            @for (row, (_, label)) in self.ranges.iter().enumerate().step_by(every) {
                text.axis x=(LEFT - 6.0) y=(tenths(top(row) + height / 2.0)) text-anchor="end" dominant-baseline="middle" { (label) }
            }
            (time_labels(times))
            @for (at, counts) in times.points.iter().zip(&self.counts) {
                @let (left, right) = (times.x(*at), times.x(*at + times.step));
                @if let Some(counts) = counts {
                    rect class="heat-0" x=(tenths(left)) y=(TOP) width=(tenths(right - left)) height=(BOTTOM - TOP) {}
                    @for (row, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
                        rect class=(self.shade(*count)) x=(tenths(left)) y=(tenths(top(row))) width=(tenths(right - left)) height=(tenths(height)) {
                            title { (clock(*at)) " UTC: " (number(*count)) " took " (self.ranges[row].0) }
                        }
                    }
                }
            }
            (mark_lines(times))
        }
    }

    fn data(&self, times: &ChartTimes) -> Markup {
        let head: Vec<&str> = std::iter::once("Time (UTC)")
            .chain(self.ranges.iter().map(|(range, _)| &**range))
            .collect();
        table(
            &format!("{}: data", self.title),
            &head,
            &html! {
                @for (at, counts) in times.points.iter().zip(&self.counts).rev() {
                    tr {
                        th scope="row" { (clock(*at)) }
                        @for row in 0..self.ranges.len() {
                            td { @match counts { Some(counts) => (number(counts[row])), None => "–" } }
                        }
                    }
                }
            },
        )
    }
}

/// A heat map with its legend and its data: how many took how long.
pub(crate) fn heat_map(title: &str, times: &ChartTimes, history: &Value, series: &str) -> Markup {
    let Some(map) = HeatMap::of(title, history, series) else {
        return html! { figure.time-chart { figcaption { strong { (title) } } p.quiet { "None ended in this time." } } };
    };
    html! {
        figure.time-chart {
            figcaption {
                strong { (title) }
                ul.legend { li {
                    "1 " svg width="60" height="12" viewBox="0 0 60 12" aria-hidden="true" {
                        @for (index, shade) in SHADES.iter().enumerate() { rect class=(shade) x=(index * 12) y="0" width="12" height="12" {} }
                    }
                    " " (number(map.most))
                } }
            }
            svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label={ (title) ": heat map; its data follows as a table" } { (map.draw(times)) }
            details {
                summary { "Data" }
                (map.data(times))
            }
        }
    }
}

fn mark_lines(times: &ChartTimes) -> Markup {
    html! {
        @for (at, sentence) in &times.marks {
            path.mark d={ "M" (tenths(times.x(*at))) " " (TOP) "V" (BOTTOM) } { title { (clock(*at)) " UTC: " (sentence) } }
        }
    }
}

/// Begin, middle and end, relative to the end.
fn time_labels(times: &ChartTimes) -> Markup {
    let ago = |at: i64| match u64::try_from(times.to - at) {
        Ok(0) | Err(_) => "now".to_owned(),
        Ok(distance) => format!("{} ago", duration(distance)),
    };
    let middle = times.from + (times.to - times.from) / 2;
    html! {
        @for (at, anchor) in [(times.from, "start"), (middle, "middle"), (times.to, "end")] {
            text.axis x=(tenths(times.x(at))) y=(BOTTOM + 18.0) text-anchor=(anchor) { (ago(at)) }
        }
    }
}

/// The line, interrupted where a value is missing. A single value between gaps is a dot. `has_area`: what is below it is filled.
fn line_path(
    times: &ChartTimes,
    axis: &Axis,
    line: &ChartLine,
    style: &str,
    has_area: bool,
) -> Markup {
    let mut parts: Vec<Vec<(f64, f64)>> = Vec::new();
    let mut last = None;
    for (at, value) in times.points.iter().zip(&line.values) {
        let Some(value) = value else {
            last = None;
            continue;
        };
        let point = (times.x(*at + times.step / 2), axis.y(*value));
        match (last == Some(*at - times.step), parts.last_mut()) {
            (true, Some(part)) => part.push(point),
            _ => parts.push(vec![point]),
        }
        last = Some(*at);
    }
    let path = |part: &[(f64, f64)]| {
        let points = part.iter().map(|(x, y)| format!("{} {}", tenths(*x), tenths(*y)));
        format!("M{}", points.collect::<Vec<_>>().join("L"))
    };
    let (dots, parts): (Vec<_>, Vec<_>) = parts.into_iter().partition(|part| part.len() == 1);
    let d: String = parts.iter().map(|part| path(part)).collect();
    let area = |part: &Vec<(f64, f64)>| {
        let (first, last) = (tenths(part[0].0), tenths(part[part.len() - 1].0));
        format!("{}L{last} {BOTTOM}L{first} {BOTTOM}Z", path(part))
    };
    let areas: String = parts.iter().filter(|_| has_area).map(area).collect();
    html! {
        @if !areas.is_empty() { path.area d=(areas) {} }
        @if !d.is_empty() { path class=(style) d=(d) {} }
        @for (x, y) in dots.into_iter().flatten() { circle class=(style) cx=(tenths(x)) cy=(tenths(y)) r="2.5" {} }
    }
}

/// Shown by the browser while the pointer is over a step.
fn read_out(
    times: &ChartTimes,
    at: i64,
    index: usize,
    unit: ChartUnit,
    lines: &[ChartLine],
) -> Markup {
    let (left, right) = (times.x(at), times.x(at + times.step));
    let values =
        lines.iter().map(|line| format!("{} {}", line.name, shown(unit, line.values[index])));
    html! {
        rect.read-out x=(tenths(left)) y=(TOP) width=(tenths(right - left)) height=(BOTTOM - TOP) {
            title { (clock(at)) " UTC: " (values.collect::<Vec<_>>().join(", ")) }
        }
    }
}

fn shown(unit: ChartUnit, value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), |value| unit.show(value))
}

fn data(title: &str, unit: ChartUnit, times: &ChartTimes, lines: &[ChartLine]) -> Markup {
    let head: Vec<&str> =
        std::iter::once("Time (UTC)").chain(lines.iter().map(|line| &*line.name)).collect();
    table(
        &format!("{title}: data"),
        &head,
        &html! {
            @for (index, at) in times.points.iter().enumerate().rev() {
                tr {
                    th scope="row" { (clock(*at)) }
                    @for line in lines { td { (shown(unit, line.values[index])) } }
                }
            }
        },
    )
}

/// The vertical axis.
struct Axis {
    scale: ChartScale,
    /// Of a logarithmic axis; below it, values are drawn at the bottom.
    low: f64,
    high: f64,
}

impl Axis {
    fn new(scale: ChartScale, largest: f64) -> Self {
        match scale {
            ChartScale::Linear => Self { scale, low: 0.0, high: round_up(largest) },
            ChartScale::Logarithmic => {
                let high = 10_f64.powf(largest.max(10.0).log10().ceil());
                Self { scale, low: 1.0, high }
            }
        }
    }

    fn y(&self, value: f64) -> f64 {
        let part = match self.scale {
            ChartScale::Linear => value / self.high,
            ChartScale::Logarithmic => {
                (value.max(self.low) / self.low).log10() / (self.high / self.low).log10()
            }
        };
        BOTTOM - (BOTTOM - TOP) * part.clamp(0.0, 1.0)
    }

    /// Values with a line across the chart.
    fn grid(&self) -> Vec<f64> {
        match self.scale {
            ChartScale::Linear => vec![0.0, self.high / 2.0, self.high],
            ChartScale::Logarithmic => {
                let count = (self.high / self.low).log10().round() as i32;
                // At most five lines.
                let every = (count + 3) / 4;
                (0..=count)
                    .filter(|line| line % every.max(1) == 0)
                    .map(|line| self.low * 10_f64.powi(line))
                    .collect()
            }
        }
    }
}

/// The next number of the form 1, 2 or 5 times a power of ten, at least 2.
fn round_up(value: f64) -> f64 {
    if value <= 2.0 {
        return 2.0;
    }
    let power = 10_f64.powf(value.log10().floor());
    [1.0, 2.0, 5.0, 10.0].iter().map(|step| step * power).find(|top| *top >= value).unwrap_or(value)
}

fn tenths(number: f64) -> String {
    format!("{number:.1}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Six steps of ten seconds; the third is missing.
    fn history() -> Value {
        let at = |second: u32| format!("2026-11-15T10:00:{second:02}.000Z");
        let point = |second: u32, events: Value| json!({"at": at(second), "values": {"events": events, "p95": 250.0}});
        json!({
            "from": at(0), "to": "2026-11-15T10:01:00.000Z", "step_ms": 10_000,
            "points": [point(0, json!(4)), point(10, json!(2)), point(30, json!(3)), point(40, Value::Null), point(50, json!(1))],
            "marks": [
                {"at": at(5), "kind": "started", "process": "<b>a", "version": "1.0"},
                {"at": at(35), "kind": "rebalance", "topic": "orders", "group": "<i>g", "partitions": 2},
            ],
        })
    }

    fn drawn(unit: ChartUnit, scale: ChartScale, series: &[(&str, &str)]) -> String {
        let history = history();
        let times = ChartTimes::of(&history).unwrap();
        time_chart("Events", unit, scale, &times, &chart_lines(&history, series)).into_string()
    }

    #[test]
    fn a_missing_step_and_a_missing_value_interrupt_the_line() {
        let svg = drawn(ChartUnit::Count, ChartScale::Linear, &[("events", "events")]);
        let path = svg.split("<path class=\"line-a\" d=\"").nth(2).unwrap();
        // The axis ends at 5. Two points are joined; the others are dots.
        assert!(path.starts_with("M111.0 41.6L205.0 100.8\""), "{path}");
        assert_eq!(svg.matches("<circle class=\"line-a\"").count(), 2, "{svg}");
        assert!(svg.contains("10:00:30 UTC: events 3"), "{svg}");
        assert!(svg.contains("10:00:40 UTC: events –"), "{svg}");
    }

    #[test]
    fn the_data_is_a_table_and_marks_are_escaped() {
        let svg = drawn(ChartUnit::Count, ChartScale::Linear, &[("events", "events")]);
        assert!(svg.contains("<th scope=\"row\">10:00:50</th><td>1</td>"), "{svg}");
        assert!(svg.contains("process &lt;b&gt;a started, version 1.0"), "{svg}");
        let moved = "2 partitions have new owners in orders / &lt;i&gt;g";
        assert!(svg.contains(&format!("10:00:35 UTC: {moved}")), "{svg}");
        let list = marks_list(&ChartTimes::of(&history()).unwrap()).into_string();
        let (newest, oldest) = (list.find(moved), list.find("started, version 1.0"));
        assert!(newest.is_some() && newest < oldest && list.contains("Marks (2)"), "{list}");
        assert_eq!(marks_list(&ChartTimes::default()).into_string(), "");
        assert!(
            svg.contains("role=\"img\"") && svg.contains("aria-label=\"Events: line chart"),
            "{svg}"
        );
        assert!(!svg.contains("style="), "the policy allows no inline style");
    }

    #[test]
    fn latencies_are_drawn_on_a_logarithmic_axis() {
        let axis = Axis::new(ChartScale::Logarithmic, 250.0);
        assert_eq!(axis.grid(), [1.0, 10.0, 100.0, 1000.0]);
        assert_eq!((axis.y(1000.0), axis.y(1.0), axis.y(0.0)), (TOP, BOTTOM, BOTTOM));
        let long = Axis::new(ChartScale::Logarithmic, 600_000.0);
        assert!(long.grid().len() <= 5, "{:?}", long.grid());
        let svg = drawn(ChartUnit::Milliseconds, ChartScale::Logarithmic, &[("p95", "p95")]);
        assert!(svg.contains("p95 250 ms") && svg.contains(">1 s<"), "{svg}");
    }

    #[test]
    fn a_single_line_has_an_area_below_each_of_its_parts() {
        let one = drawn(ChartUnit::Count, ChartScale::Linear, &[("events", "events")]);
        assert!(
            one.contains("<path class=\"area\" d=\"M111.0 41.6L205.0 100.8L205.0 160L111.0 160Z\""),
            "{one}"
        );
        let two = drawn(ChartUnit::Count, ChartScale::Linear, &[("events", "a"), ("p95", "b")]);
        assert!(!two.contains("class=\"area\""), "areas would hide each other: {two}");
    }

    #[test]
    fn of_more_lines_than_styles_the_largest_are_drawn_and_the_data_has_all() {
        let line = |number: usize| ChartLine {
            name: format!("group {number}"),
            values: vec![Some(number as f64), None],
        };
        let times = ChartTimes {
            from: 0,
            to: 20_000,
            step: 10_000,
            points: vec![0, 10_000],
            ..ChartTimes::default()
        };
        let chart = |count: usize| {
            let lines: Vec<_> = (0..count).map(line).collect();
            let (unit, scale) = (ChartUnit::Count, ChartScale::Linear);
            time_chart("Lag", unit, scale, &times, &lines).into_string()
        };
        let (all, more) = (chart(LINES_MAX), chart(LINES_MAX + 2));
        assert!(all.contains("<bdi>group 0</bdi>") && !all.contains("only in the data"), "{all}");
        assert!(more.contains("2 lines with smaller values are only in the data"), "{more}");
        for number in 0..LINES_MAX + 2 {
            let legend = format!("<bdi>group {number}</bdi>");
            assert_eq!(more.contains(&legend), number >= 2, "{number}: {more}");
            let value = format!("<td>{number}</td>");
            assert!(more.contains(&value), "{number} is not in the data: {more}");
        }
    }

    #[test]
    fn a_heat_map_has_a_row_for_each_range_and_its_data_as_a_table() {
        let mut history = history();
        history["series"] = json!([{"name": "run_times", "bounds_ms": [2.5, 10.0, 100.0]}]);
        for (index, counts) in
            [json!([0, 1, 0, 0]), json!([0, 0, 0, 99]), json!(null)].into_iter().enumerate()
        {
            history["points"][index]["values"]["run_times"] = counts;
        }
        let times = ChartTimes::of(&history).unwrap();
        let svg = heat_map("Runs", &times, &history, "run_times").into_string();
        // Three ranges of 49.3 px; the lowest is at the bottom.
        assert!(svg.contains("<rect class=\"heat-1\" x=\"64.0\" y=\"110.7\""), "{svg}");
        assert!(svg.contains("<rect class=\"heat-5\" x=\"158.0\" y=\"12.0\""), "{svg}");
        assert!(svg.contains("10:00:00 UTC: 1 took 2.5 ms to 10 ms"), "{svg}");
        assert!(svg.contains("10:00:10 UTC: 99 took more than 100 ms"), "{svg}");
        assert!(!svg.contains("up to"), "empty ranges at the ends are left out: {svg}");
        assert!(
            svg.contains("<th scope=\"row\">10:00:10</th><td>0</td><td>0</td><td>99</td>"),
            "{svg}"
        );
        assert!(
            svg.contains("<th scope=\"row\">10:00:30</th><td>–</td><td>–</td><td>–</td>"),
            "{svg}"
        );
        assert_eq!(svg.matches("heat-0").count(), 2, "an unknown step is a gap: {svg}");
        assert!(!svg.contains("style=") && svg.contains("heat map; its data follows"), "{svg}");
        history["points"] = json!([]);
        let empty = heat_map("Runs", &times, &history, "run_times").into_string();
        assert!(empty.contains("None ended in this time.") && !empty.contains("<svg"), "{empty}");
    }

    #[test]
    fn a_response_of_another_form_has_no_chart() {
        assert!(ChartTimes::of(&json!({"from": "now"})).is_none());
        assert!(ChartTimes::of(&Value::Null).is_none());
    }
}
