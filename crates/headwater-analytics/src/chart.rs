//! Draws a table as an SVG bar chart without scripts or external fonts.
//!
//! Upstream: `report` defines the columns. Guarantees: every text is escaped; an empty chart says so; at most the last
//! [`LABELS_MAX`] labels are drawn.

use maud::{Markup, html};
use serde_json::Value;

use crate::report::Chart;
use crate::table::{Table, text};

/// Labels per chart; of a longer table only the last rows are shown.
const LABELS_MAX: usize = 60;
/// Characters per label; a longer one is truncated.
const LABEL_CHARS_MAX: usize = 24;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 400.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 312.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 944.0;
const COLOURS: [&str; 6] = ["#2f6fb3", "#e08a2e", "#5a9a4d", "#8a5fb0", "#c0504d", "#6b7280"];

/// Draws the result of a report.
pub fn svg(title: &str, chart: &Chart<'_>, table: &Table) -> String {
    let title = clean(title);
    let rows = &table.rows[table.rows.len().saturating_sub(LABELS_MAX)..];
    let bars: Vec<usize> = chart.bars.iter().filter_map(|name| table.column(name)).collect();
    let values = rows.iter().flat_map(|row| bars.iter().map(|bar| number(&row[*bar])));
    let top = round_up(values.fold(0.0, f64::max));
    let label = table.column(chart.label).filter(|_| !rows.is_empty() && !bars.is_empty());
    let svg = html! {
        svg xmlns="http://www.w3.org/2000/svg" viewBox={ "0 0 " (WIDTH) " " (HEIGHT) }
            font-family="sans-serif" font-size="12" role="img" {
            title { (title) }
            rect width=(WIDTH) height=(HEIGHT) fill="#fff" {}
            text x=(LEFT) y="28" font-size="18" { (title) }
            @match label {
                Some(label) => {
                    (scale(top))
                    (legend(chart.bars))
                    (columns(rows, label, &bars, top))
                }
                None => text x=(LEFT) y="200" { "no data yet" },
            }
        }
    };
    svg.into_string() + "\n"
}

/// Five horizontal lines with their values.
fn scale(top: f64) -> Markup {
    html! {
        @for value in (0..=4).map(|step| top * f64::from(step) / 4.0) {
            @let y = height(value, top);
            line x1=(LEFT) x2=(RIGHT) y1=(tenths(y)) y2=(tenths(y)) stroke="#ddd" {}
            text x=(tenths(LEFT - 6.0)) y=(tenths(y + 4.0)) text-anchor="end" { (value) }
        }
    }
}

fn legend(names: &[&str]) -> Markup {
    html! {
        @for (index, name) in names.iter().enumerate() {
            @let x = LEFT + 160.0 * index as f64;
            rect x=(x) y="38" width="12" height="12" fill=(COLOURS[index % COLOURS.len()]) {}
            text x=(x + 18.0) y="48" { (shortened(&clean(name))) }
        }
    }
}

/// The bars of each row side by side, and its label below them.
fn columns(rows: &[Vec<Value>], label: usize, bars: &[usize], top: f64) -> Markup {
    let slot = (RIGHT - LEFT) / rows.len() as f64;
    let width = slot * 0.8 / bars.len() as f64;
    let y = tenths(BOTTOM + 14.0);
    html! {
        @for (row_index, row) in rows.iter().enumerate() {
            @let left = LEFT + slot * (row_index as f64 + 0.1);
            @for (bar_index, bar) in bars.iter().enumerate() {
                @let top = height(number(&row[*bar]), top);
                rect x=(tenths(left + width * bar_index as f64)) y=(tenths(top)) width=(tenths(width))
                    height=(tenths(BOTTOM - top)) fill=(COLOURS[bar_index % COLOURS.len()]) {
                    title { (clean(&text(&row[*bar]))) }
                }
            }
            @let x = tenths(left + slot * 0.4);
            text x=(x) y=(y) text-anchor="end" transform={ "rotate(-35 " (x) " " (y) ")" } {
                (shortened(&clean(&text(&row[label]))))
            }
        }
    }
}

fn height(value: f64, top: f64) -> f64 {
    BOTTOM - (BOTTOM - TOP) * value / top
}

fn tenths(number: f64) -> String {
    format!("{number:.1}")
}

/// The height of a bar; 0 for negative and non-numeric values.
fn number(value: &Value) -> f64 {
    value.as_f64().filter(|number| number.is_finite()).unwrap_or(0.0).max(0.0)
}

/// The next number of the form 1, 2 or 5 times a power of ten, so that the scale reads well.
fn round_up(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf(value.log10().floor());
    [1.0, 2.0, 5.0, 10.0].iter().map(|step| step * power).find(|top| *top >= value).unwrap_or(value)
}

fn shortened(label: &str) -> String {
    match label.char_indices().nth(LABEL_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &label[..end]),
        None => label.to_owned(),
    }
}

/// XML allows no other control characters, not even escaped.
fn clean(text: &str) -> String {
    let clean = |c: char| match c {
        '\t' | '\n' | '\r' => ' ',
        control if control.is_control() => '\u{fffd}',
        other => other,
    };
    text.chars().map(clean).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const CHART: Chart<'static> = Chart { label: "reason", bars: &["letters"] };

    fn table(rows: Vec<Vec<Value>>) -> Table {
        Table { columns: vec!["reason".into(), "letters".into()], rows, truncated: false }
    }

    #[test]
    fn bars_are_scaled_to_the_axis() {
        let svg = svg(
            "Letters",
            &CHART,
            &table(vec![vec![json!("a"), json!(5)], vec![json!("b"), json!(2.5)]]),
        );
        // The scale ends at 5, so one bar is as high as the chart and the other half as high.
        assert!(svg.contains("height=\"248.0\""), "{svg}");
        assert!(svg.contains("height=\"124.0\""), "{svg}");
    }

    #[test]
    fn untrusted_texts_are_escaped() {
        let svg = svg("a & b", &CHART, &table(vec![vec![json!("<script>\u{1}"), json!(1)]]));
        assert!(svg.contains("&lt;script&gt;\u{fffd}") && !svg.contains("<script>"), "{svg}");
        assert!(svg.contains("<title>a &amp; b</title>"), "{svg}");
    }

    #[test]
    fn an_empty_chart_says_so() {
        assert!(svg("t", &CHART, &table(Vec::new())).contains("no data yet"));
        assert!(svg("t", &CHART, &Table::default()).contains("no data yet"));
    }

    #[test]
    fn only_the_last_rows_of_a_long_table_are_drawn() {
        let rows =
            (0..1000).map(|number| vec![json!(format!("r{number}")), json!(number)]).collect();
        let svg = svg("t", &CHART, &table(rows));
        assert!(svg.contains(">r999<") && svg.contains(">r940<") && !svg.contains(">r939<"));
    }
}
