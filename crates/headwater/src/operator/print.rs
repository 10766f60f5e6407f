//! Answers on standard output: tables for people, one JSON value a line for programs.

use std::io::{ErrorKind, Write};

use serde_json::Value;

use crate::failure::Failure;

/// Characters of a cell; longer ones are cut.
const CELL_MAX: usize = 80;

/// Rows that become a table at the end, or lines of JSON at once.
pub(super) struct Rows {
    json: bool,
    columns: &'static [(&'static str, &'static str)],
    rows: Vec<Vec<String>>,
    lines: Vec<String>,
}

impl Rows {
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

    pub(super) fn finish(self) -> Result<(), Failure> {
        if self.json {
            return self.lines.iter().try_for_each(|json| line(json));
        }
        let headings = self.columns.iter().map(|(heading, _)| (*heading).to_owned()).collect();
        let table: Vec<_> = std::iter::once(headings).chain(self.rows).collect();
        columns(&table).iter().try_for_each(|row| line(row))
    }
}

/// Rows with their cells below each other.
pub(super) fn columns(rows: &[Vec<String>]) -> Vec<String> {
    let mut widths: Vec<usize> = Vec::new();
    for row in rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// Several lines, which may hold a stranger's text.
pub(super) fn text(text: &str) -> Result<(), Failure> {
    text.lines().try_for_each(|one| line(&plain(one)))
}

/// A stranger's text without control characters, which would let it move the cursor, or worse.
pub(super) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\t' { '\u{fffd}' } else { c }).collect()
}

/// One object: as one line of JSON, or as a name and a value a line, lists of objects below it.
pub(super) fn object(json: bool, value: &Value) -> Result<(), Failure> {
    if json {
        return line(&value.to_string());
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
        for item in value.as_array().into_iter().flatten() {
            let item: Vec<String> = item
                .as_object()
                .into_iter()
                .flatten()
                .filter(|(_, value)| !value.is_null())
                .map(|(name, value)| format!("{name}={}", cell(value)))
                .collect();
            line(&format!("  {}", item.join(" ")))?;
        }
    }
    Ok(())
}

/// One line. A reader that went away, such as `head`, ends the verb without a failure.
pub(super) fn line(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(Failure::NobodyReads),
        Err(error) => Err(Failure::new(format!("standard output cannot be written: {error}"))),
    }
}

/// A value in one cell. Control characters would let a stranger's text move the cursor, or worse.
pub(super) fn cell(value: &Value) -> String {
    let text = match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(cell).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    };
    let shown: String =
        text.chars().take(CELL_MAX).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if text.chars().count() > CELL_MAX { shown + "…" } else { shown }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_strangers_text_moves_no_cursor() {
        assert_eq!(cell(&json!("a\u{1b}[2Jb\nc")), "a\u{fffd}[2Jb\u{fffd}c");
        assert_eq!(cell(&json!("x".repeat(100))).chars().count(), CELL_MAX + 1);
        assert_eq!(cell(&json!(["a", "b"])), "a,b");
    }
}
