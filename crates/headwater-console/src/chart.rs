//! Line charts over time and bars in a line, as SVG without scripts; a chart has its data as a table.
//!
//! Upstream: screens. Guarantees: a time without a value is a gap in its line; lines differ in colour and dashes; a chart is drawn with
//! the colours of the page, light or dark; no inline style.

use maud::{Markup, html};
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::components::table;
use crate::text::{duration, number, plain};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 190.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 628.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 160.0;

/// Lines that differ in style.
const STYLES: [&str; 3] = ["line-a", "line-b", "line-c"];

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
    /// Starts of processes.
    marks: Vec<(i64, String)>,
}

/// One line: its name and its values, one for each point.
#[derive(Clone, Debug)]
pub(crate) struct ChartLine {
    name: &'static str,
    values: Vec<Option<f64>>,
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
                _ => format!("process {} started, version {}", named("process"), named("version")),
            };
            Some((milliseconds(&mark["at"])?, sentence))
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
pub(crate) fn chart_lines(history: &Value, series: &[(&str, &'static str)]) -> Vec<ChartLine> {
    let points = history["points"].as_array().map_or(&[][..], Vec::as_slice);
    let values = |name: &str| points.iter().map(|point| point["values"][name].as_f64()).collect();
    series.iter().map(|(series, name)| ChartLine { name, values: values(series) }).collect()
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

/// A chart with its legend and its data.
pub(crate) fn time_chart(
    title: &str,
    unit: ChartUnit,
    scale: ChartScale,
    times: &ChartTimes,
    lines: &[ChartLine],
) -> Markup {
    let all = lines.iter().flat_map(|line| line.values.iter().flatten().copied());
    let axis = Axis::new(scale, all.fold(0.0, f64::max));
    html! {
        figure.time-chart {
            figcaption {
                strong { (title) }
                ul.legend {
                    @for (line, style) in lines.iter().zip(STYLES) {
                        li {
                            svg width="24" height="8" viewBox="0 0 24 8" aria-hidden="true" { path class=(style) d="M0 4H24" {} }
                            " " (line.name)
                        }
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
                @for (at, sentence) in &times.marks {
                    path.mark d={ "M" (tenths(times.x(*at))) " " (TOP) "V" (BOTTOM) } { title { (clock(*at)) " UTC: " (sentence) } }
                }
                @for (line, style) in lines.iter().zip(STYLES) { (line_path(times, &axis, line, style)) }
                @for (index, at) in times.points.iter().enumerate() { (read_out(times, *at, index, unit, lines)) }
            }
            details {
                summary { "Data" }
                (data(title, unit, times, lines))
            }
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

/// The line, interrupted where a value is missing. A single value between gaps is a dot.
fn line_path(times: &ChartTimes, axis: &Axis, line: &ChartLine, style: &str) -> Markup {
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
    html! {
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
        std::iter::once("Time (UTC)").chain(lines.iter().map(|line| line.name)).collect();
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
            "marks": [{"at": at(5), "kind": "started", "process": "<b>a", "version": "1.0"}],
        })
    }

    fn drawn(unit: ChartUnit, scale: ChartScale, series: &[(&str, &'static str)]) -> String {
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
    fn a_response_of_another_form_has_no_chart() {
        assert!(ChartTimes::of(&json!({"from": "now"})).is_none());
        assert!(ChartTimes::of(&Value::Null).is_none());
    }
}
