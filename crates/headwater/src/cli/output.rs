//! Output: tables and text for people, one JSON value per line for programs.
//!
//! Guarantees: text for people is escaped for the terminal (`text::printable`) before it is coloured or measured; output
//! for programs (`--json`, exports, CSV) goes through [`exact`], byte for byte. On a terminal, text is wrapped and tables
//! are cut to its width unless `--wide` is given; in a pipe nothing is cut. Colours are used only on a terminal, and not
//! with `NO_COLOR` (`console`).

use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use console::{Alignment, Style, Term, measure_text_width, pad_str, truncate_str};
use serde_json::{Map, Value};

use crate::cli::fields::{self, label, ordered, to_json};
use crate::exit::CliError;
use crate::text::printable;

/// Columns are not cut below this width.
const COLUMN_MIN: usize = 12;
/// Text is not wrapped below this width.
const WRAP_MIN: usize = 20;
/// Columns of a message on a terminal, with their widths; the last one gets the rest.
const MESSAGE_COLUMNS: [(&str, usize); 5] =
    [("ID", 17), ("PARTITION", 9), ("KEY", 12), ("ATTEMPT", 7), ("PAYLOAD", 0)];

/// How a command prints.
#[derive(Clone, Copy, Debug)]
pub(super) struct OutputStyle {
    /// One JSON value per line.
    pub(super) json: bool,
    /// Neither wrap nor cut.
    pub(super) wide: bool,
}

impl OutputStyle {
    /// Columns that fit, if there is a limit.
    pub(super) fn width(self) -> Option<usize> {
        let term = Term::stdout();
        (term.is_term() && !self.wide).then(|| usize::from(term.size().1).max(WRAP_MIN))
    }

    /// Whether values of a stream are printed as rows: for a person at a terminal.
    pub(super) fn is_rows(self) -> bool {
        !self.json && std::io::stdout().is_terminal()
    }
}

/// Rows, printed as a table or as JSON lines.
pub(super) struct OutputRows {
    style: OutputStyle,
    columns: &'static [(&'static str, &'static str)],
    rows: Vec<Vec<String>>,
    lines: Vec<String>,
}

impl OutputRows {
    /// `columns` are headings with the JSON pointers of their values.
    pub(super) fn new(
        style: OutputStyle,
        columns: &'static [(&'static str, &'static str)],
    ) -> Self {
        Self { style, columns, rows: Vec::new(), lines: Vec::new() }
    }

    pub(super) fn add(&mut self, item: &Value) {
        if self.style.json {
            self.lines.push(to_json(item));
            return;
        }
        let cell = |pointer: &str| {
            let name = pointer.rsplit('/').next().unwrap_or_default();
            item.pointer(pointer).map(|value| cell(name, value)).unwrap_or_default()
        };
        self.rows.push(self.columns.iter().map(|(_, pointer)| cell(pointer)).collect());
    }

    /// Tells a person that the limit was reached.
    pub(super) fn note_more(&self) {
        if !self.style.json {
            note("more results available; raise --limit");
        }
    }

    pub(super) fn finish(self) -> Result<(), CliError> {
        if self.style.json {
            return self.lines.iter().try_for_each(|json| exact(json));
        }
        let headings = self.columns.iter().map(|(heading, _)| (*heading).to_owned()).collect();
        let table: Vec<_> = std::iter::once(headings).chain(self.rows).collect();
        print_table(&table, self.style.width(), "")
    }
}

/// Prints escaped cells as a table; the first row is the heading.
pub(super) fn print_table(
    rows: &[Vec<String>],
    width: Option<usize>,
    indent: &str,
) -> Result<(), CliError> {
    let lines = columns(rows, width.map(|width| width.saturating_sub(indent.len())));
    for (number, line) in lines.iter().enumerate() {
        let line = if number == 0 { heading(line) } else { line.clone() };
        exact(&format!("{indent}{line}"))?;
    }
    Ok(())
}

/// Aligns escaped cells in columns as a terminal shows them: a Chinese character or an emoji is two columns wide. Cuts
/// the widest columns until all fit the width.
pub(super) fn columns(rows: &[Vec<String>], width: Option<usize>) -> Vec<String> {
    let mut widths: Vec<usize> = Vec::new();
    for row in rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(measure_text_width(cell));
        }
    }
    if let Some(width) = width {
        let gaps = 2 * widths.len().saturating_sub(1);
        loop {
            let over = (widths.iter().sum::<usize>() + gaps).saturating_sub(width);
            let widest = widths.iter_mut().filter(|width| **width > COLUMN_MIN).max();
            let Some(widest) = widest.filter(|_| over > 0) else { break };
            *widest = widest.saturating_sub(over).max(COLUMN_MIN);
        }
    }
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| {
            let cell = state_color(cell).apply_to(truncate_str(cell, *width, "…")).to_string();
            pad_str(&cell, *width, Alignment::Left, None).into_owned()
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// A heading or label on a terminal.
pub(super) fn heading(text: &str) -> String {
    Style::new().bold().apply_to(text).to_string()
}

/// The colour of a state; none for other words.
pub(super) fn state_color(word: &str) -> Style {
    match word {
        "quarantined" | "dead" | "error" | "unreachable" | "failed" | "not ready" => {
            Style::new().red()
        }
        "queued" | "warning" | "degraded" | "handed over" | "waiting" => Style::new().yellow(),
        "ok" | "ready" | "open" | "active" | "done" => Style::new().green(),
        _ => Style::new(),
    }
}

/// Text from outside on one line.
pub(super) fn plain(text: &str) -> String {
    printable(&text.replace(['\r', '\n'], " "))
}

/// A JSON value on one line, raw for programs or escaped for people.
pub(super) fn json(style: OutputStyle, value: &Value) -> Result<(), CliError> {
    let text = to_json(value);
    if style.json { exact(&text) } else { line(&text) }
}

/// A change: what it did in one sentence, or the response as JSON.
pub(super) fn changed(
    style: OutputStyle,
    answer: &Value,
    sentence: impl AsRef<str>,
) -> Result<(), CliError> {
    if style.json { exact(&to_json(answer)) } else { line(sentence.as_ref()) }
}

/// A message of a topic: a row on a terminal, otherwise JSON.
pub(super) fn message(style: OutputStyle, message: &Value) -> Result<(), CliError> {
    static HAS_HEADING: AtomicBool = AtomicBool::new(false);
    if !style.is_rows() {
        return json(style, message);
    }
    if !HAS_HEADING.swap(true, Ordering::Relaxed) {
        let names = MESSAGE_COLUMNS.map(|(name, _)| name.to_owned());
        exact(&heading(&message_row(&names, style.width())))?;
    }
    let payload = match &message["payload_base64"] {
        Value::String(base64) => format!("(base64) {}", plain(base64)),
        _ => cell("payload", &message["payload"]),
    };
    let [id, partition, key, attempt] =
        ["id", "partition", "key", "attempt"].map(|name| cell(name, &message[name]));
    exact(&message_row(&[id, partition, key, attempt, payload], style.width()))
}

/// One row with fixed columns: the next messages are not known yet.
fn message_row(cells: &[String; 5], width: Option<usize>) -> String {
    let cells = cells.iter().zip(MESSAGE_COLUMNS);
    let row: Vec<_> = cells
        .map(|(cell, (_, width))| pad_str(cell, width, Alignment::Left, None).into_owned())
        .collect();
    let row = row.join("  ");
    width.map_or_else(|| row.clone(), |width| truncate_str(&row, width, "…").into_owned())
}

/// An object as one line of JSON, or as one field per line with nested lists as tables.
pub(super) fn object(style: OutputStyle, value: &Value) -> Result<(), CliError> {
    if style.json {
        return exact(&to_json(value));
    }
    let Value::Object(fields) = value else { return line(&fields::text("", value)) };
    let is_list =
        |value: &Value| value.as_array().is_some_and(|items| items.iter().any(Value::is_object));
    print_fields(style, fields, "")?;
    for (name, value) in ordered(fields).into_iter().filter(|(_, value)| is_list(value)) {
        exact(&format!("\n{}", heading(&label(name))))?;
        let items = value.as_array().map(Vec::as_slice).unwrap_or_default();
        print_table(&table(items), style.width(), "  ")?;
    }
    Ok(())
}

/// The fields that are not lists of objects, each with a label; nested objects are indented.
fn print_fields(
    style: OutputStyle,
    fields: &Map<String, Value>,
    indent: &str,
) -> Result<(), CliError> {
    let is_shown = |value: &Value| match value {
        Value::Null => false,
        Value::Array(items) => !items.iter().any(Value::is_object) && !items.is_empty(),
        Value::Object(fields) => fields.values().any(|value| !value.is_null()),
        _ => true,
    };
    let shown: Vec<_> = ordered(fields).into_iter().filter(|(_, value)| is_shown(value)).collect();
    let labels = shown.iter().map(|(name, _)| measure_text_width(&label(name)));
    let label_width = labels.max().unwrap_or(0);
    for (name, value) in shown {
        if let Value::Object(inner) = value {
            exact(&format!("{indent}{}", heading(&label(name))))?;
            print_fields(style, inner, &format!("{indent}  "))?;
            continue;
        }
        let name_shown = pad_str(&label(name), label_width, Alignment::Left, None).into_owned();
        let start = format!("{indent}{}  ", heading(&name_shown));
        print_wrapped(style, &start, &fields::text(name, value))?;
    }
    Ok(())
}

/// Prints text after `start`; further lines are aligned with the first.
pub(super) fn print_wrapped(style: OutputStyle, start: &str, text: &str) -> Result<(), CliError> {
    let margin = measure_text_width(start);
    let width = style.width().map(|width| width.saturating_sub(margin).max(WRAP_MIN));
    for (number, part) in wrap(&printable(text), width).iter().enumerate() {
        let start = if number == 0 { start.to_owned() } else { " ".repeat(margin) };
        let color = state_color(part);
        exact(format!("{start}{}", color.apply_to(part)).trim_end())?;
    }
    Ok(())
}

/// The lines of a text, broken between words to fit the width; longer words are split.
pub(super) fn wrap(text: &str, width: Option<usize>) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in text.trim_end().split('\n') {
        let Some(width) = width else {
            lines.push(paragraph.to_owned());
            continue;
        };
        let (mut current, mut used) = (String::new(), 0);
        for word in paragraph.split(' ') {
            if !current.is_empty() {
                if used + 1 + measure_text_width(word) > width {
                    lines.push(std::mem::take(&mut current));
                    used = 0;
                } else {
                    current.push(' ');
                    used += 1;
                }
            }
            for character in word.chars() {
                let needed = measure_text_width(character.encode_utf8(&mut [0; 4]));
                if used + needed > width && used > 0 {
                    lines.push(std::mem::take(&mut current));
                    used = 0;
                }
                current.push(character);
                used += needed;
            }
        }
        lines.push(current);
    }
    lines
}

/// Objects as rows with one column per field. Fields that are null in all objects are left out.
fn table(items: &[Value]) -> Vec<Vec<String>> {
    let filled = items.iter().filter_map(Value::as_object).flatten();
    let filled = filled.filter(|(_, value)| !value.is_null());
    let mut names: Vec<&String> = filled.map(|(name, _)| name).collect();
    names.sort_by_key(|name| (fields::rank(name), *name));
    names.dedup();
    let heading = names.iter().map(|name| label(name).to_uppercase()).collect();
    let row = |item: &Value| names.iter().map(|name| cell(name, &item[name.as_str()])).collect();
    std::iter::once(heading).chain(items.iter().map(row)).collect()
}

/// Prints escaped text for people.
pub(super) fn line(text: &str) -> Result<(), CliError> {
    exact(&printable(text))
}

/// Prints the lines of a difference, those of one text with a sign.
pub(super) fn difference(lines: &Value) -> Result<(), CliError> {
    for one in lines.as_array().into_iter().flatten() {
        let sign = match one["change"].as_str() {
            Some("removed") => "-",
            Some("added") => "+",
            _ => " ",
        };
        line(&format!("{sign}{}", one["text"].as_str().unwrap_or_default()))?;
    }
    Ok(())
}

/// Prints an escaped note for people on standard error.
pub(super) fn note(text: &str) {
    eprintln!("headwater: {}", printable(text));
}

/// Prints bytes unchanged, with a line feed. A closed pipe ends the command without a failure.
pub(super) fn exact(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(CliError::BrokenPipe),
        Err(error) => Err(CliError::new(format!("cannot write to standard output: {error}"))),
    }
}

/// The value of the field `name` as one cell; already escaped, because escaping changes its width.
pub(super) fn cell(name: &str, value: &Value) -> String {
    plain(&fields::text(name, value).replace('\t', " "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn control_characters_in_cells_are_escaped_and_nothing_is_cut() {
        assert_eq!(cell("", &json!("a\u{1b}[2Jb\nc\u{202e}d")), "a\\u001b[2Jb c\\u202ed");
        assert_eq!(cell("", &json!("x".repeat(100))).len(), 100);
        assert_eq!(cell("", &json!(["a", "b"])), "a, b");
    }

    #[test]
    fn wide_characters_take_two_columns() {
        let rows = [["订单", "1"], ["e\u{301}tat", "2"], ["🙂", "3"]]
            .map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(columns(&rows, None), ["订单  1", "e\u{301}tat  2", "🙂    3"]);
    }

    #[test]
    fn empty_columns_are_left_out_of_a_table() {
        let items = json!([
            { "idle_ms": 5, "name": "a", "note": null, "last_id": null },
            { "idle_ms": 1234, "name": "worker", "note": null, "last_id": "7-0" },
        ]);
        let expected = ["NAME    LAST ID  IDLE", "a                5 ms", "worker  7-0      1.2 s"];
        assert_eq!(columns(&table(items.as_array().unwrap()), None), expected);
    }

    #[test]
    fn a_table_is_cut_at_its_widest_columns() {
        let rows = [["ID", "REASON"], ["1-0", "the bank is closed today"]]
            .map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(columns(&rows, Some(20)), ["ID   REASON", "1-0  the bank is cl…"]);
        assert_eq!(columns(&rows, Some(5)), ["ID   REASON", "1-0  the bank is…"]);
    }

    #[test]
    fn text_is_wrapped_between_words_and_keeps_its_lines() {
        assert_eq!(
            wrap("the bank is closed\n\ntoday", Some(8)),
            ["the bank", "is", "closed", "", "today"]
        );
        assert_eq!(wrap("订单订单订单", Some(4)), ["订单", "订单", "订单"]);
        assert_eq!(wrap("one two", None), ["one two"]);
        assert_eq!(wrap("", Some(5)), [""]);
    }
}
