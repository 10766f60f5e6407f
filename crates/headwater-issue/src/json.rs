//! JSON as text: validated before it is stored, sanitized for `jsonb`, compacted for hashing.
//!
//! Upstream: `validate`, `event_batch` and `dedup`. Guarantees: every store accepts validated text. It is valid JSON,
//! not too large, not too deep, without NUL in a string, and without a number that overflows or grows when written
//! without exponent. [`sanitize`] converts any valid JSON into such text. No tree is built; validation costs three
//! passes and eight bytes per key of the open objects.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasher, RandomState};

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::error::{IssueError, Result};
use crate::limits::{
    JSON_DEPTH_MAX, NUMBER_BYTES_MAX, NUMBER_EXPONENT_MAX, NUMBER_EXPONENT_MIN, PAYLOAD_BYTES_MAX,
};

/// Type of a JSON text at its top level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JsonShape {
    Object,
    Other,
}

/// JSON that every store accepts.
#[derive(Debug)]
pub(crate) struct Storable<'a> {
    /// The text to store.
    pub(crate) text: Cow<'a, str>,
    /// Whether storing `text` as `jsonb` loses part of the original: replaced characters or numbers, repeated keys, the
    /// sign of zero.
    pub(crate) is_lossy: bool,
}

/// Converts valid JSON within the limits into text that every store accepts. `what` names the argument in the error.
pub(crate) fn storable<'a>(what: &str, text: &'a str) -> Result<Storable<'a>> {
    let sanitized = sanitize(text);
    let Checked { is_lossy, .. } = read(what, &sanitized)?;
    let is_lossy = is_lossy || matches!(sanitized, Cow::Owned(_));
    Ok(Storable { text: sanitized, is_lossy })
}

/// Rejects text that some store cannot store. `what` names the argument in the error.
pub(crate) fn validate(what: &str, text: &str) -> Result<JsonShape> {
    read(what, text).map(|checked| checked.shape)
}

fn read(what: &str, text: &str) -> Result<Checked> {
    if text.len() > PAYLOAD_BYTES_MAX {
        let problem = format!("has {} bytes, at most {PAYLOAD_BYTES_MAX} are allowed", text.len());
        return Err(IssueError::invalid(what, problem));
    }
    let is_lossy = Cell::new(false);
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let level = Level { depth: 0, is_lossy: &is_lossy, hasher: &RandomState::new() };
    let shape = level.deserialize(&mut deserializer);
    let shape = shape.and_then(|shape| deserializer.end().map(|()| shape)).map_err(|error| {
        IssueError::invalid(what, format!("is not JSON that can be stored: {error}"))
    })?;
    check_numbers(text).map_err(|problem| IssueError::invalid(what, problem))?;
    Ok(Checked { shape, is_lossy: is_lossy.get() })
}

/// Replaces values of valid JSON that PostgreSQL's `jsonb` cannot store: `\u0000` and lone surrogates become U+FFFD,
/// and numbers outside the range of `f64` become strings with the same characters. Invalid JSON does not become valid.
/// Borrowed if nothing was replaced.
pub fn sanitize(text: &str) -> Cow<'_, str> {
    let bytes = text.as_bytes();
    let mut sanitized = String::new();
    let mut copied = 0;
    let mut replace = |start: usize, end: usize, with: &str| {
        sanitized.push_str(&text[copied..start]);
        sanitized.push_str(with);
        copied = end;
    };
    let mut position = 0;
    while let Some(byte) = bytes.get(position) {
        position += match byte {
            b'"' => {
                let end = position + string_length(&bytes[position..]);
                for start in unstorable_escapes(&bytes[..end], position) {
                    replace(start, start + ESCAPE_LENGTH, "\\ufffd");
                }
                end - position
            }
            b'-' | b'0'..=b'9' => {
                let length = number_length(&bytes[position..]);
                let (number, end) = (&text[position..position + length], position + length);
                // A number as a key is invalid JSON and must stay invalid.
                let is_key = bytes[end..].trim_ascii_start().first() == Some(&b':');
                if !is_key && is_number(number) && !is_storable_number(number) {
                    replace(position, end, &format!("\"{number}\""));
                }
                length
            }
            _ => 1,
        };
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    sanitized.push_str(&text[copied..]);
    Cow::Owned(sanitized)
}

/// The bytes of `\u` and four hexadecimal digits.
const ESCAPE_LENGTH: usize = 6;

/// Positions of escapes of NUL and of lone surrogates in the string that begins at `position`.
fn unstorable_escapes(bytes: &[u8], mut position: usize) -> Vec<usize> {
    let mut found = Vec::new();
    while let Some(offset) = bytes[position..].iter().position(|byte| *byte == b'\\') {
        position += offset;
        position +=
            match (escaped_unit(bytes, position), escaped_unit(bytes, position + ESCAPE_LENGTH)) {
                (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => 2 * ESCAPE_LENGTH,
                (Some(0 | 0xd800..=0xdfff), _) => {
                    found.push(position);
                    ESCAPE_LENGTH
                }
                _ => 2,
            };
        position = position.min(bytes.len());
    }
    found
}

/// The UTF-16 code unit of the `\uXXXX` at this position, if any.
fn escaped_unit(bytes: &[u8], position: usize) -> Option<u16> {
    let digits = bytes.get(position..position + ESCAPE_LENGTH)?.strip_prefix(b"\\u")?;
    if !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// Length of the number-like text at the start.
fn number_length(bytes: &[u8]) -> usize {
    let is_part = |byte: &u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
    bytes.iter().take_while(|byte| is_part(byte)).count()
}

/// Whether the text is a JSON number of any size.
fn is_number(text: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let unsigned = text.strip_prefix('-').unwrap_or(text);
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent)),
        None => (unsigned, None),
    };
    let (whole, fraction) = match mantissa.split_once('.') {
        Some((whole, fraction)) => (whole, Some(fraction)),
        None => (mantissa, None),
    };
    let exponent_digits = |text: &str| digits(text.strip_prefix(['+', '-']).unwrap_or(text));
    digits(whole)
        && (whole == "0" || !whole.starts_with('0'))
        && fraction.is_none_or(digits)
        && exponent.is_none_or(exponent_digits)
}

/// Whether every store accepts the number and writes it at a bounded length.
fn is_storable_number(number: &str) -> bool {
    added_zeros(number).is_ok() && number.parse::<f64>().is_ok_and(f64::is_finite)
}

/// Rejects numbers that are short as text and long in a store: PostgreSQL writes `1e-16383` without exponent, and
/// cannot store some numbers at all.
fn check_numbers(text: &str) -> Result<(), String> {
    let bytes = text.as_bytes();
    let mut written_out = text.len();
    let mut position = 0;
    while let Some(byte) = bytes.get(position) {
        let rest = &bytes[position..];
        position += match byte {
            b'"' => string_length(rest),
            b'-' | b'0'..=b'9' => {
                let length = number_length(rest);
                written_out += added_zeros(&text[position..position + length])?;
                length
            }
            _ => 1,
        };
    }
    if written_out > PAYLOAD_BYTES_MAX {
        return Err(format!(
            "has {written_out} bytes with its numbers written out, at most {PAYLOAD_BYTES_MAX} are allowed"
        ));
    }
    Ok(())
}

/// Length of the string at the start, including its quotation marks.
fn string_length(bytes: &[u8]) -> usize {
    let mut escaped = false;
    let is_end = |(index, byte): (usize, &u8)| {
        let ends = index > 0 && *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        ends
    };
    bytes.iter().enumerate().position(is_end).map_or(bytes.len(), |last| last + 1)
}

/// Upper bound of the characters added when a number is written without exponent.
fn added_zeros(number: &str) -> Result<usize, String> {
    if number.len() > NUMBER_BYTES_MAX {
        let length = number.len();
        return Err(format!(
            "a number has {length} characters, at most {NUMBER_BYTES_MAX} are allowed"
        ));
    }
    let Some((_, exponent)) = number.split_once(['e', 'E']) else { return Ok(0) };
    match exponent.parse::<i32>() {
        Ok(exponent) if (NUMBER_EXPONENT_MIN..=NUMBER_EXPONENT_MAX).contains(&exponent) => {
            Ok(exponent.unsigned_abs() as usize)
        }
        _ => Err(format!(
            "the exponent {exponent} of a number is outside {NUMBER_EXPONENT_MIN} to {NUMBER_EXPONENT_MAX}"
        )),
    }
}

/// Result of reading a valid JSON text.
struct Checked {
    shape: JsonShape,
    is_lossy: bool,
}

/// Reads one value at this nesting depth.
#[derive(Clone, Copy)]
struct Level<'a> {
    depth: usize,
    /// Set when `jsonb` would drop part of the text.
    is_lossy: &'a Cell<bool>,
    hasher: &'a RandomState,
}

impl Level<'_> {
    fn below<E: Error>(self) -> Result<Self, E> {
        if self.depth == JSON_DEPTH_MAX {
            return Err(E::custom(format_args!("nesting is deeper than {JSON_DEPTH_MAX} levels")));
        }
        Ok(Self { depth: self.depth + 1, ..self })
    }
}

impl<'de> DeserializeSeed<'de> for Level<'_> {
    type Value = JsonShape;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<JsonShape, D::Error> {
        deserializer.deserialize_any(self)
    }
}

fn reject_nul<E: Error>(text: &str) -> Result<(), E> {
    // PostgreSQL cannot store NUL in a string, so no store accepts it.
    if text.contains('\0') {
        return Err(E::custom("a string contains a NUL character"));
    }
    Ok(())
}

/// Reads a key and returns its hash.
struct Key<'a>(&'a RandomState);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = u64;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<u64, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<u64, E> {
        reject_nul(text)?;
        Ok(self.0.hash_one(text))
    }
}

impl<'de> Visitor<'de> for Level<'_> {
    type Value = JsonShape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<JsonShape, E> {
        Ok(JsonShape::Other)
    }

    fn visit_bool<E>(self, _: bool) -> Result<JsonShape, E> {
        Ok(JsonShape::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<JsonShape, E> {
        Ok(JsonShape::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<JsonShape, E> {
        Ok(JsonShape::Other)
    }

    fn visit_f64<E>(self, number: f64) -> Result<JsonShape, E> {
        if number == 0.0 && number.is_sign_negative() {
            self.is_lossy.set(true);
        }
        Ok(JsonShape::Other)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<JsonShape, E> {
        reject_nul(text)?;
        Ok(JsonShape::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<JsonShape, A::Error> {
        let below = self.below()?;
        while items.next_element_seed(below)?.is_some() {}
        Ok(JsonShape::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<JsonShape, A::Error> {
        let below = self.below()?;
        // A hash collision only causes a needless copy of the original.
        let mut keys = HashSet::new();
        while let Some(key) = members.next_key_seed(Key(self.hasher))? {
            if !keys.insert(key) {
                self.is_lossy.set(true);
            }
            members.next_value_seed(below)?;
        }
        Ok(JsonShape::Object)
    }
}

/// Removes whitespace between the tokens of valid JSON, and escapes the characters that are unsafe in HTML.
pub(crate) fn compact(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_string = false;
    let mut escaped = false;
    for character in text.chars() {
        match character {
            ' ' | '\t' | '\n' | '\r' if !in_string => continue,
            '<' => out.push_str("\\u003c"),
            '>' => out.push_str("\\u003e"),
            '&' => out.push_str("\\u0026"),
            '\u{2028}' => out.push_str("\\u2028"),
            '\u{2029}' => out.push_str("\\u2029"),
            other => out.push(other),
        }
        in_string ^= character == '"' && !escaped;
        escaped = character == '\\' && !escaped;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        validate("payload", text).expect_err("rejected").to_string()
    }

    #[test]
    fn every_type_of_json_value_is_valid_and_objects_are_recognized() {
        assert_eq!(
            validate("payload", r#"{"a":[1,-2,3.5e10,null,true,"é\n"]}"#).unwrap(),
            JsonShape::Object
        );
        for text in ["[]", "1", "\"\"", "null", "false", "18446744073709551615"] {
            assert_eq!(validate("payload", text).unwrap(), JsonShape::Other, "{text}");
        }
    }

    #[test]
    fn invalid_json_is_rejected() {
        for text in
            ["", "{", "{} {}", "{\"a\":}", "nul", "\"\u{1}\"", "1e400", "\"\\ud800\"", "NaN"]
        {
            assert!(problem(text).contains("not JSON"), "{text}");
        }
    }

    #[test]
    fn every_f64_is_valid() {
        for text in ["5e-324", "1.7976931348623157e+308", "-2.5E-10", "1e21", "[0.1,1e5,-7]"] {
            assert!(validate("payload", text).is_ok(), "{text}");
        }
        let written_out = format!("0.{}5", "0".repeat(323));
        assert!(validate("payload", &written_out).is_ok());
        // Digits within a string are not numbers.
        assert!(
            validate("payload", r#"["1e-16383","\\\"1e-16383", "\\", {"1e-16383":1}]"#).is_ok()
        );
    }

    #[test]
    fn a_number_that_grows_when_written_out_is_rejected() {
        let digits = format!("0.{}", "1".repeat(20_000));
        for text in
            ["1e-16383", "[1,-1E-20000]", "0e20000", r#"{"a\\":1e-400}"#, "1e-99999999999", &digits]
        {
            let problem = problem(text);
            assert!(problem.contains("a number"), "{problem}");
        }
        let many = format!("[{}0]", "1e300,".repeat(PAYLOAD_BYTES_MAX / 100));
        assert!(problem(&many).contains("written out"));
    }

    #[test]
    fn nul_is_rejected_in_strings_and_keys() {
        for text in [r#"["a\u0000b"]"#, r#"{"a\u0000":1}"#] {
            assert!(problem(text).contains("NUL"), "{text}");
        }
        assert!(validate("payload", r#""a\\u0000""#).is_ok());
    }

    fn sanitized(text: &str) -> String {
        let storable = storable("payload", text).expect("storable");
        assert!(storable.is_lossy, "{text}");
        storable.text.into_owned()
    }

    #[test]
    fn values_that_jsonb_cannot_store_are_replaced() {
        for (text, expected) in [
            (r#""a\u0000b""#, r#""a\ufffdb""#),
            (r#"{"\u0000":"\\\u0000"}"#, r#"{"\ufffd":"\\\ufffd"}"#),
            (
                r#"["\ud800","\udc00","\uD83D\uDE00","\ud83d\ud83d\ude00"]"#,
                r#"["\ufffd","\ufffd","\uD83D\uDE00","\ufffd\ud83d\ude00"]"#,
            ),
            (r#""\ud800\n\ude00x""#, r#""\ufffd\n\ufffdx""#),
            ("[1e400,-1E-20000 , 1]", r#"["1e400","-1E-20000" , 1]"#),
        ] {
            assert_eq!(sanitized(text), expected);
        }
        let digits = format!("0.{}", "1".repeat(20_000));
        assert_eq!(sanitized(&digits), format!("\"{digits}\""));
        let digits = "9".repeat(309);
        assert_eq!(sanitized(&digits), format!("\"{digits}\""));
    }

    #[test]
    fn values_that_jsonb_drops_silently_are_detected_and_unchanged() {
        for text in [r#"[{"a":1,"b":[{"c":1,"\u0063":2}]}]"#, "-0", "[-0.0e5]"] {
            assert_eq!(sanitized(text), text);
        }
        for text in [r#"[{"a":1},{"a":{"a":0}}]"#, r#""\\u0000 \\ud800""#, "[0,-1,0.0]", "1e308"] {
            let storable = storable("payload", text).unwrap();
            assert!(!storable.is_lossy && storable.text == text, "{text}");
        }
    }

    #[test]
    fn sanitizing_does_not_make_invalid_json_valid() {
        for text in [
            "",
            "\"",
            "\"\\",
            "\"\\u",
            "\"\\u00",
            "\"\\u0000",
            r#""\u000""#,
            r#""\u+000""#,
            r#""\u00é0""#,
            "-",
            "1e",
            "01e400",
            "1.e400",
            "1e400.5",
            "{1e400:1}",
            "{1e400 \n:1}",
            "1e4001e400",
            "true1e400",
            "1e400\"a\"",
            "--1e400",
            "-\"1e400\"",
            "\"\u{0}\"",
        ] {
            assert!(storable("payload", text).is_err(), "{text:?} became {:?}", sanitize(text));
        }
    }

    #[test]
    fn the_maximum_depth_is_valid_and_one_level_more_is_rejected() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(validate("payload", &nested(JSON_DEPTH_MAX)).is_ok());
        assert!(problem(&nested(JSON_DEPTH_MAX + 1)).contains("deeper"));
        assert!(validate("payload", &"[".repeat(500_000)).is_err());
    }

    #[test]
    fn the_maximum_size_is_valid_and_one_byte_more_is_rejected() {
        let sized = |bytes: usize| format!("\"{}\"", "x".repeat(bytes - 2));
        assert!(validate("payload", &sized(PAYLOAD_BYTES_MAX)).is_ok());
        assert!(problem(&sized(PAYLOAD_BYTES_MAX + 1)).contains("at most"));
    }

    #[test]
    fn compact_json_has_whitespace_only_inside_strings() {
        assert_eq!(compact("{ \"a b\" :\n[ 1 ,\t2 ] }"), r#"{"a b":[1,2]}"#);
        assert_eq!(compact(r#"["\" ", "\\" , " "]"#), r#"["\" ","\\"," "]"#);
        assert_eq!(compact("\"<&>\u{2028}\""), r#""\u003c\u0026\u003e\u2028""#);
    }
}
