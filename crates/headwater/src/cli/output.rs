//! Output: tables for people, one JSON value per line for programs.
//!
//! Guarantees: text for people goes through [`line`] or [`note`], which escape it for the terminal (`text::printable`);
//! output for programs (`--json`, exports, CSV) goes through [`exact`], byte for byte.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Write};

use console::{Alignment, measure_text_width, pad_str};
use serde_json::Value;

use crate::exit::CliError;
use crate::text::printable;

/// Maximum characters of a cell; longer ones are truncated.
const CELL_MAX: usize = 80;

/// Fields that identify a row; shown first.
const ROW_NAMES: [&str; 3] = ["id", "name", "partition"];

/// Rows, printed as a table or as JSON lines.
pub(super) struct OutputRows {
    json: bool,
    columns: &'static [(&'static str, &'static str)],
    rows: Vec<Vec<String>>,
    lines: Vec<String>,
}

impl OutputRows {
    /// `columns` are headings with the JSON pointers of their values.
    pub(super) fn new(json: bool, columns: &'static [(&'static str, &'static str)]) -> Self {
        Self { json, columns, rows: Vec::new(), lines: Vec::new() }
    }

    pub(super) fn add(&mut self, item: &Value) {
        if self.json {
            self.lines.push(item.to_string());
            return;
        }
        let cell = |pointer: &str| item.pointer(pointer).map(cell).unwrap_or_default();
        self.rows.push(self.columns.iter().map(|(_, pointer)| cell(pointer)).collect());
    }

    /// Tells a person that the limit was reached.
    pub(super) fn note_more(&self) {
        if !self.json {
            note("more results available; raise --limit");
        }
    }

    pub(super) fn finish(self) -> Result<(), CliError> {
        if self.json {
            return self.lines.iter().try_for_each(|json| exact(json));
        }
        let headings = self.columns.iter().map(|(heading, _)| (*heading).to_owned()).collect();
        let table: Vec<_> = std::iter::once(headings).chain(self.rows).collect();
        columns(&table).iter().try_for_each(|row| line(row))
    }
}

/// Aligns cells in columns as a terminal shows them: a Chinese character or an emoji is two columns wide.
pub(super) fn columns(rows: &[Vec<String>]) -> Vec<String> {
    let mut widths: Vec<usize> = Vec::new();
    for row in rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(measure_text_width(cell));
        }
    }
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths);
        let cells = cells.map(|(cell, width)| pad_str(cell, *width, Alignment::Left, None));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// Text from outside on one line.
pub(super) fn plain(text: &str) -> String {
    printable(&text.replace(['\r', '\n'], " "))
}

/// A JSON value on one line, raw for programs or escaped for people.
pub(super) fn json(json: bool, value: &Value) -> Result<(), CliError> {
    let text = value.to_string();
    if json { exact(&text) } else { line(&text) }
}

/// An object as one line of JSON, or as one field per line with nested lists as tables.
pub(super) fn object(json: bool, value: &Value) -> Result<(), CliError> {
    if json {
        return exact(&value.to_string());
    }
    let Value::Object(fields) = value else { return line(&cell(value)) };
    let width = fields.keys().map(String::len).max().unwrap_or(0);
    let is_list =
        |value: &Value| value.as_array().is_some_and(|items| items.iter().any(Value::is_object));
    for (name, value) in fields.iter().filter(|(_, value)| !is_list(value) && !value.is_null()) {
        match value {
            Value::Object(inner) => {
                let inner: Vec<String> = inner
                    .iter()
                    .filter(|(_, value)| !value.is_null())
                    .map(|(name, value)| format!("{name}={}", cell(value)))
                    .collect();
                line(&format!("{name:<width$}  {}", inner.join(" ")))?;
            }
            value => line(&format!("{name:<width$}  {}", cell(value)))?,
        }
    }
    for (name, value) in fields.iter().filter(|(_, value)| is_list(value)) {
        line(&format!("\n{name}:"))?;
        let items = value.as_array().map(Vec::as_slice).unwrap_or_default();
        table(items).iter().try_for_each(|row| line(&format!("  {row}")))?;
    }
    Ok(())
}

/// Objects as a table with one column per field. Fields that are null in all objects are left out.
fn table(items: &[Value]) -> Vec<String> {
    let filled = items.iter().filter_map(Value::as_object).flatten();
    let filled = filled.filter(|(_, value)| !value.is_null());
    // Identifying fields come first.
    let names: BTreeSet<_> =
        filled.map(|(name, _)| (!ROW_NAMES.contains(&name.as_str()), name)).collect();
    let heading = names.iter().map(|(_, name)| name.to_uppercase().replace('_', " ")).collect();
    let row = |item: &Value| names.iter().map(|(_, name)| cell(&item[name.as_str()])).collect();
    let rows: Vec<_> = std::iter::once(heading).chain(items.iter().map(row)).collect();
    columns(&rows)
}

/// Prints escaped text for people.
pub(super) fn line(text: &str) -> Result<(), CliError> {
    exact(&printable(text))
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

/// A value as one cell; already escaped here, because escaping changes its width.
pub(super) fn cell(value: &Value) -> String {
    let text = match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(cell).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    };
    let shown: String = text.chars().take(CELL_MAX).collect();
    let shown = plain(&shown.replace('\t', " "));
    if text.chars().count() > CELL_MAX { shown + "…" } else { shown }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn control_characters_in_cells_are_escaped() {
        assert_eq!(cell(&json!("a\u{1b}[2Jb\nc\u{202e}d")), "a\\u001b[2Jb c\\u202ed");
        assert_eq!(cell(&json!("x".repeat(100))).chars().count(), CELL_MAX + 1);
        assert_eq!(cell(&json!(["a", "b"])), "a,b");
    }

    #[test]
    fn wide_characters_take_two_columns() {
        let rows = [["订单", "1"], ["e\u{301}tat", "2"], ["🙂", "3"]]
            .map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(columns(&rows), ["订单  1", "e\u{301}tat  2", "🙂    3"]);
    }

    #[test]
    fn empty_columns_are_left_out_of_a_table() {
        let items = json!([
            { "idle_ms": 5, "name": "a", "note": null, "last_id": null },
            { "idle_ms": 1234, "name": "worker", "note": null, "last_id": "7-0" },
        ]);
        let expected = ["NAME    IDLE MS  LAST ID", "a       5", "worker  1234     7-0"];
        assert_eq!(table(items.as_array().unwrap()), expected);
    }
}
