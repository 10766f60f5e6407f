//! A query result: columns and rows, as CSV or JSON lines.
//!
//! Upstream: `store` fills it. Downstream: command line and HTTP interface.
//! Guarantees: CSV cells round-trip (RFC 4180), except that a cell a spreadsheet would run as a formula gets a leading
//! apostrophe, because the texts are untrusted.

use serde::Deserialize;
use serde_json::Value;

/// A query result.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Table {
    /// The names of the columns, in order.
    pub columns: Vec<String>,
    /// The rows; each has one value per column.
    pub rows: Vec<Vec<Value>>,
    /// Whether the result was truncated at a limit.
    #[serde(rename = "is_cut")]
    pub truncated: bool,
}

impl Table {
    /// The index of the column with this name.
    pub fn column(&self, name: &str) -> Option<usize> {
        self.columns.iter().position(|column| column == name)
    }

    /// As CSV with a header line.
    pub fn to_csv(&self) -> String {
        let mut csv = String::new();
        line(&mut csv, self.columns.iter().map(String::as_str));
        for row in &self.rows {
            let cells: Vec<String> = row.iter().map(text).collect();
            line(&mut csv, cells.iter().map(String::as_str));
        }
        csv
    }

    /// As one JSON object per row, with the fields in the order of the columns.
    pub fn to_json_lines(&self) -> String {
        let mut lines = String::new();
        for row in &self.rows {
            let fields = self.columns.iter().zip(row);
            // A JSON map would order them by name.
            let fields = fields.map(|(name, value)| format!("{}:{value}", Value::from(&**name)));
            let fields = fields.collect::<Vec<_>>().join(",");
            lines.push_str(&format!("{{{fields}}}\n"));
        }
        lines
    }
}

/// The text of a value in a cell; empty for null.
pub(crate) fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn line<'a>(csv: &mut String, cells: impl Iterator<Item = &'a str>) {
    for (index, cell) in cells.enumerate() {
        if index > 0 {
            csv.push(',');
        }
        let is_formula = cell.starts_with(['=', '@', '\t', '\r'])
            || (cell.starts_with(['+', '-']) && cell.parse::<f64>().is_err());
        if is_formula || cell.contains([',', '"', '\n', '\r']) {
            csv.push('"');
            csv.push_str(if is_formula { "'" } else { "" });
            csv.push_str(&cell.replace('"', "\"\""));
            csv.push('"');
        } else {
            csv.push_str(cell);
        }
    }
    csv.push('\n');
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn table() -> Table {
        Table {
            columns: vec!["day".into(), "what, exactly".into()],
            rows: vec![
                vec![json!("2026-11-15"), json!(-3)],
                vec![json!("a \"b\"\nc"), json!(null)],
            ],
            truncated: false,
        }
    }

    #[test]
    fn cells_with_commas_quotes_and_lines_are_quoted() {
        let csv = "day,\"what, exactly\"\n2026-11-15,-3\n\"a \"\"b\"\"\nc\",\n";
        assert_eq!(table().to_csv(), csv);
    }

    #[test]
    fn formulas_are_escaped_for_spreadsheets() {
        for text in ["=1+1", "@SUM(A1)", "+cmd|' /C calc'!A0", "-2+3"] {
            let table = Table { rows: vec![vec![json!(text)]], ..Table::default() };
            assert_eq!(table.to_csv(), format!("\n\"'{text}\"\n"));
        }
    }

    #[test]
    fn every_row_is_one_json_object() {
        let lines = table().to_json_lines();
        assert!(lines.starts_with("{\"day\":\"2026-11-15\",\"what, exactly\":-3}\n"), "{lines}");
        let lines: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(lines[0], json!({"day": "2026-11-15", "what, exactly": -3}));
        assert_eq!(lines[1]["day"], "a \"b\"\nc");
    }
}
