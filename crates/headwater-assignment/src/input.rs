//! Input entries: what they say, how they are written, and what becomes of those that say nothing.
//!
//! Promises: `Info` is echoed byte for byte; keys are read whatever their case; whatever cannot be read keeps its
//! bytes on the way to the dead letters.

use std::collections::BTreeMap;

use headwater_stream::limits::{ENTRY_BYTES_MAX, FIELDS_MAX};
use headwater_stream::{EntryId, Fields, Result, StreamError, StreamName};
use serde_json::value::RawValue;

use crate::names::Names;

/// The field of an input entry that holds the JSON.
pub const INPUT_FIELD: &str = "lbs-input";

const NAME_KEY: &str = "DataStreamName";
const INFO_KEY: &str = "Info";

/// What an input entry says: which stream, and what its producer wants its owner to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Input {
    pub(crate) stream: StreamName,
    /// JSON text as it was written.
    pub(crate) info: Option<Box<str>>,
}

/// Why an input entry cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MalformedInput(pub(crate) String);

/// Reads the fields of an input entry.
pub(crate) fn parse(fields: &Fields, names: &Names) -> Result<Input, MalformedInput> {
    let malformed = |problem: String| MalformedInput(problem);
    let json = fields
        .get(INPUT_FIELD)
        .ok_or_else(|| malformed(format!("it has no field `{INPUT_FIELD}`")))?;
    let object: BTreeMap<String, Box<RawValue>> = serde_json::from_slice(json)
        .map_err(|error| malformed(format!("`{INPUT_FIELD}` is not a JSON object: {error}")))?;
    let name = value(&object, NAME_KEY).ok_or_else(|| malformed(format!("no `{NAME_KEY}`")))?;
    let name: String = serde_json::from_str(name)
        .map_err(|_| malformed(format!("`{NAME_KEY}` is not a string")))?;
    let stream = StreamName::new(&name).map_err(|error| malformed(error.to_string()))?;
    // A name that is too long for its lease can have no owner.
    names.lease(&stream).map_err(|error| malformed(error.to_string()))?;
    Ok(Input { stream, info: value(&object, INFO_KEY).map(Into::into) })
}

/// The value of a key whatever its case, the exact one first. `null` is as good as absent.
fn value<'a>(object: &'a BTreeMap<String, Box<RawValue>>, key: &str) -> Option<&'a str> {
    let any_case = || object.iter().find(|(name, _)| name.eq_ignore_ascii_case(key));
    let value = object.get(key).or_else(|| any_case().map(|(_, value)| value))?.get();
    (value != "null").then_some(value)
}

/// Writes the fields of an input entry. `info` is JSON text.
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

/// A dead letter: the entry as it was, and after its fields the reason and where it comes from.
///
/// Where there is no room for more fields the letter only says which entry it is about, and that entry stays in the
/// input stream: the second value is whether it may be removed from there.
pub(crate) fn dead_letter(id: EntryId, fields: &Fields, reason: &str) -> (Fields, bool) {
    let about = [("reason", reason.to_owned()), ("originalMessageId", id.to_string())];
    let ours: usize = about.iter().map(|(name, value)| name.len() + value.len()).sum();
    let fits = fields.len() + about.len() <= FIELDS_MAX && fields.bytes() + ours <= ENTRY_BYTES_MAX;
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
    fn what_is_written_is_read_and_the_info_is_echoed_byte_for_byte() {
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
    fn keys_are_read_whatever_their_case_and_the_exact_one_wins() {
        let input = read(r#"{"datastreamname": "a", "INFO": {"x": 1}, "other": 2}"#).unwrap();
        assert_eq!((input.stream.as_str(), input.info.as_deref()), ("a", Some(r#"{"x": 1}"#)));
        let input = read(r#"{"DATASTREAMNAME": "b", "DataStreamName": "a"}"#).unwrap();
        assert_eq!(input.stream.as_str(), "a");
        assert_eq!(read(r#"{"DataStreamName": "a", "Info": null}"#).unwrap().info, None);
    }

    #[test]
    fn what_names_no_stream_is_malformed_and_says_why() {
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
    fn a_dead_letter_holds_the_entry_as_it_was_or_points_to_it() {
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
