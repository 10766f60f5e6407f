//! Input entries: parsing, writing and dead letters.
//!
//! Guarantees: `Info` is passed through byte for byte; keys are case-insensitive; a dead letter contains the
//! bytes of the original entry.

use std::collections::BTreeMap;

use headwater_stream::limits::{ENTRY_BYTES_MAX, FIELDS_MAX};
use headwater_stream::{EntryId, Fields, Result, StreamError, StreamName};
use serde_json::value::RawValue;

use crate::names::Names;

/// The field of an input entry that holds the JSON.
pub const INPUT_FIELD: &str = "lbs-input";

const NAME_KEY: &str = "DataStreamName";
const INFO_KEY: &str = "Info";

/// A parsed input entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Input {
    pub(crate) stream: StreamName,
    /// JSON text, unchanged.
    pub(crate) info: Option<Box<str>>,
}

/// Why an input entry is malformed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MalformedInput(pub(crate) String);

/// Parses the fields of an input entry.
pub(crate) fn parse(fields: &Fields, names: &Names) -> Result<Input, MalformedInput> {
    let malformed = |problem: String| MalformedInput(problem);
    let json = fields
        .get(INPUT_FIELD)
        .ok_or_else(|| malformed(format!("field `{INPUT_FIELD}` is missing")))?;
    let object: BTreeMap<String, Box<RawValue>> = serde_json::from_slice(json)
        .map_err(|error| malformed(format!("`{INPUT_FIELD}` is not a JSON object: {error}")))?;
    let name =
        value(&object, NAME_KEY).ok_or_else(|| malformed(format!("`{NAME_KEY}` is missing")))?;
    let name: String = serde_json::from_str(name)
        .map_err(|_| malformed(format!("`{NAME_KEY}` is not a string")))?;
    let stream = StreamName::new(&name).map_err(|error| malformed(error.to_string()))?;
    // A stream whose name is too long for its lease could not be owned.
    names.lease(&stream).map_err(|error| malformed(error.to_string()))?;
    Ok(Input { stream, info: value(&object, INFO_KEY).map(Into::into) })
}

/// The value of a key, case-insensitive, exact match first. `null` counts as missing.
fn value<'a>(object: &'a BTreeMap<String, Box<RawValue>>, key: &str) -> Option<&'a str> {
    let any_case = || object.iter().find(|(name, _)| name.eq_ignore_ascii_case(key));
    let value = object.get(key).or_else(|| any_case().map(|(_, value)| value))?.get();
    (value != "null").then_some(value)
}

/// Creates the fields of an input entry. `info` is JSON text.
pub(crate) fn fields(stream: &StreamName, info: Option<&str>) -> Result<Fields> {
    let not_json = |error| StreamError::invalid("the info", format!("it is not JSON: {error}"));
    let name = serde_json::Value::from(stream.as_str());
    let json = match info {
        None => format!("{{\"{NAME_KEY}\":{name}}}"),
        Some(info) => {
            let info: &RawValue = serde_json::from_str(info).map_err(not_json)?;
            format!("{{\"{NAME_KEY}\":{name},\"{INFO_KEY}\":{info}}}")
        }
    };
    Ok(Fields::new([(INPUT_FIELD, json)]))
}

/// A dead letter: the fields of the entry, then the reason and the original id.
///
/// If the fields do not fit, the letter only refers to the entry, which stays in the input stream. The
/// second value is whether the entry may be removed from there.
pub(crate) fn dead_letter(id: EntryId, fields: &Fields, reason: &str) -> (Fields, bool) {
    let about = [("reason", reason.to_owned()), ("originalMessageId", id.to_string())];
    let added: usize = about.iter().map(|(name, value)| name.len() + value.len()).sum();
    let fits =
        fields.len() + about.len() <= FIELDS_MAX && fields.bytes() + added <= ENTRY_BYTES_MAX;
    let original = fields.iter().filter(|_| fits).cloned();
    let about = about.map(|(name, value)| (name.into(), value.into()));
    (Fields::new(original.chain(about)), fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Input, MalformedInput> {
        parse(&Fields::new([(INPUT_FIELD, json.to_owned())]), &Names::new("svc").unwrap())
    }

    #[test]
    fn an_entry_round_trips_and_info_is_preserved_byte_for_byte() {
        let stream = StreamName::new("say \"hi\" 键").unwrap();
        for info in [None, Some("{\"b\": 1.50,  \"a\":[]}"), Some("7")] {
            let fields = fields(&stream, info).unwrap();
            let input = parse(&fields, &Names::new("svc").unwrap()).unwrap();
            assert_eq!(input.stream, stream);
            assert_eq!(input.info.as_deref(), info);
        }
        assert!(fields(&stream, Some("{not json")).is_err());
        assert!(fields(&stream, Some("{} {}")).is_err());
    }

    #[test]
    fn keys_are_case_insensitive_and_an_exact_match_wins() {
        let input = read(r#"{"datastreamname": "a", "INFO": {"x": 1}, "other": 2}"#).unwrap();
        assert_eq!((input.stream.as_str(), input.info.as_deref()), ("a", Some(r#"{"x": 1}"#)));
        let input = read(r#"{"DATASTREAMNAME": "b", "DataStreamName": "a"}"#).unwrap();
        assert_eq!(input.stream.as_str(), "a");
        assert_eq!(read(r#"{"DataStreamName": "a", "Info": null}"#).unwrap().info, None);
    }

    #[test]
    fn an_entry_without_a_valid_stream_name_is_malformed_with_a_reason() {
        let long = format!(r#"{{"DataStreamName": "{}"}}"#, "x".repeat(510));
        for json in [
            "",
            "{",
            "[]",
            "\"a\"",
            "{}",
            r#"{"DataStreamName": 1}"#,
            r#"{"DataStreamName": null}"#,
            r#"{"DataStreamName": ""}"#,
            r#"{"DataStreamName": "a\nb"}"#,
            &long,
            &"[".repeat(100_000),
        ] {
            let MalformedInput(reason) = read(json).unwrap_err();
            assert!(!reason.is_empty());
        }
        let names = Names::new("svc").unwrap();
        assert!(parse(&Fields::new([("other", "1")]), &names).is_err());
        assert!(parse(&Fields::new([(INPUT_FIELD, &b"\xff"[..])]), &names).is_err());
    }

    #[test]
    fn a_dead_letter_contains_the_entry_or_refers_to_it() {
        let id = EntryId::new(7, 1);
        let entry = Fields::new([("lbs-input", "{"), ("x", "1")]);
        let (letter, removable) = dead_letter(id, &entry, "why");
        assert!(removable);
        let pairs: Vec<_> = letter.iter().map(|(n, v)| (&n[..], &v[..])).collect();
        assert_eq!(
            pairs,
            [
                (&b"lbs-input"[..], &b"{"[..]),
                (b"x", b"1"),
                (b"reason", b"why"),
                (b"originalMessageId", b"7-1")
            ]
        );

        let crowded = Fields::new((0..FIELDS_MAX).map(|i| (format!("f{i}"), "v")));
        let huge = Fields::new([("x", vec![0; ENTRY_BYTES_MAX])]);
        for entry in [crowded, huge] {
            let (letter, removable) = dead_letter(id, &entry, "why");
            assert!(!removable);
            assert_eq!(letter.get("originalMessageId").unwrap(), "7-1");
            assert_eq!(letter.len(), 2);
        }
    }
}
