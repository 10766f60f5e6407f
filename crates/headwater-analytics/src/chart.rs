//! Draws a table as an SVG bar chart without scripts or external fonts.
//!
//! Upstream: `report` defines the columns. Guarantees: every text is escaped; an empty chart says so; at most the last
//! [`LABELS_MAX`] labels are drawn.

use std::fmt::Write as _;

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
const COLOURS: [&str; 3] = ["#2f6fb3", "#e08a2e", "#5a9a4d"];

/// Draws the result of a report.
pub fn svg(title: &str, chart: &Chart, table: &Table) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\" role=\"img\">\n\
         <title>{title}</title>\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT}\" y=\"28\" font-size=\"18\">{title}</text>\n",
        title = escape(title)
    );
    let rows = &table.rows[table.rows.len().saturating_sub(LABELS_MAX)..];
    let bars: Vec<usize> = chart.bars.iter().filter_map(|name| table.column(name)).collect();
    let values = rows.iter().flat_map(|row| bars.iter().map(|bar| number(&row[*bar])));
    let top = round_up(values.fold(0.0, f64::max));
    match table.column(chart.label) {
        Some(label) if !rows.is_empty() && !bars.is_empty() => {
            scale(&mut svg, top);
            legend(&mut svg, chart.bars);
            columns(&mut svg, rows, label, &bars, top);
        }
        _ => put(&mut svg, format_args!("<text x=\"{LEFT}\" y=\"200\">no data yet</text>\n")),
    }
    svg.push_str("</svg>\n");
    svg
}

/// Five horizontal lines with their values.
fn scale(svg: &mut String, top: f64) {
    for step in 0..=4 {
        let (value, y) = (top * f64::from(step) / 4.0, height(top * f64::from(step) / 4.0, top));
        put(
            svg,
            format_args!(
                "<line x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\n\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>\n",
                LEFT - 6.0,
                y + 4.0
            ),
        );
    }
}

fn legend(svg: &mut String, names: &[&str]) {
    for (index, name) in names.iter().enumerate() {
        let x = LEFT + 160.0 * index as f64;
        put(
            svg,
            format_args!(
                "<rect x=\"{x}\" y=\"38\" width=\"12\" height=\"12\" fill=\"{}\"/>\n\
                 <text x=\"{}\" y=\"48\">{}</text>\n",
                COLOURS[index % COLOURS.len()],
                x + 18.0,
                escape(name)
            ),
        );
    }
}

/// The bars of each row side by side, and its label below them.
fn columns(svg: &mut String, rows: &[Vec<Value>], label: usize, bars: &[usize], top: f64) {
    let slot = (RIGHT - LEFT) / rows.len() as f64;
    let width = slot * 0.8 / bars.len() as f64;
    for (row_index, row) in rows.iter().enumerate() {
        let left = LEFT + slot * (row_index as f64 + 0.1);
        for (bar_index, bar) in bars.iter().enumerate() {
            let y = height(number(&row[*bar]), top);
            put(
                svg,
                format_args!(
                    "<rect x=\"{:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"{}\">\
                     <title>{}</title></rect>\n",
                    left + width * bar_index as f64,
                    BOTTOM - y,
                    COLOURS[bar_index % COLOURS.len()],
                    escape(&text(&row[*bar]))
                ),
            );
        }
        let (x, y) = (left + slot * 0.4, BOTTOM + 14.0);
        put(
            svg,
            format_args!(
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"end\" \
                 transform=\"rotate(-35 {x:.1} {y:.1})\">{}</text>\n",
                escape(&shortened(&text(&row[label])))
            ),
        );
    }
}

fn height(value: f64, top: f64) -> f64 {
    BOTTOM - (BOTTOM - TOP) * value / top
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

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            // XML allows no other control characters, not even escaped.
            '\t' | '\n' | '\r' => escaped.push(' '),
            control if control.is_control() => escaped.push('\u{fffd}'),
            other => escaped.push(other),
        }
    }
    escaped
}

fn put(svg: &mut String, text: std::fmt::Arguments<'_>) {
    svg.write_fmt(text).expect("writing to a string does not fail");
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const CHART: Chart = Chart { label: "reason", bars: &["letters"] };

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
