//! Parameter conversions shared by the statements of the SQLite store.

use headwater_stream::clock::Timestamp;
use serde_json::Value;

/// Converts a timestamp into a column value.
pub(super) fn to_column(time: Timestamp) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

/// Converts an optional timestamp into a JSON value for a column.
pub(super) fn optional_column(time: Option<Timestamp>) -> Value {
    time.map_or(Value::Null, |time| to_column(time).into())
}

/// Rows or ids as one JSON parameter for `json_each`, because SQLite has no arrays.
pub(super) fn json_rows(rows: Vec<Value>) -> String {
    Value::Array(rows).to_string()
}
