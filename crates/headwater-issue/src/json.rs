//! JSON as text: checked before it is stored, compacted where it is hashed.
//!
//! Upstream: `check` and `dedup`. Promises: what passes the check is stored by every store and read by every reader: it
//! is valid, not too large, not too deep, has no NUL in a string and no number that overflows or grows when written out.
//! Not here: any meaning. No tree is built, so a check costs two passes and no memory.

use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::error::{IssueError, Result};
use crate::limits::{
    JSON_DEPTH_MAX, NUMBER_BYTES_MAX, NUMBER_EXPONENT_MAX, NUMBER_EXPONENT_MIN, PAYLOAD_BYTES_MAX,
};

/// What a JSON text is at its top level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Object,
    Other,
}

/// Refuses what some store could not keep. `what` names the argument in the error.
pub(crate) fn check(what: &str, text: &str) -> Result<Shape> {
    if text.len() > PAYLOAD_BYTES_MAX {
        let problem =
            format!("it has {} bytes, at most {PAYLOAD_BYTES_MAX} are allowed", text.len());
        return Err(IssueError::invalid(what, problem));
    }
    match serde_json::from_str::<Checked>(text) {
        Ok(Checked(shape)) => {
            check_numbers(text).map_err(|problem| IssueError::invalid(what, problem))?;
            Ok(shape)
        }
        Err(error) => {
            Err(IssueError::invalid(what, format!("it is not JSON we can store: {error}")))
        }
    }
}

/// Refuses numbers of valid JSON that are small as text and large in a store: Postgres keeps every digit and writes
/// `1e-16383` out as that many zeros, and some it cannot keep at all.
fn check_numbers(text: &str) -> Result<(), String> {
    let bytes = text.as_bytes();
    let mut written_out = text.len();
    let mut position = 0;
    while let Some(byte) = bytes.get(position) {
        let rest = &bytes[position..];
        position += match byte {
            b'"' => string_length(rest),
            b'-' | b'0'..=b'9' => {
                let is_part =
                    |byte: &u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
                let length = rest.iter().take_while(|byte| is_part(byte)).count();
                written_out += added_zeros(&text[position..position + length])?;
                length
            }
            _ => 1,
        };
    }
    if written_out > PAYLOAD_BYTES_MAX {
        return Err(format!(
            "with its numbers written out it has {written_out} bytes, at most {PAYLOAD_BYTES_MAX} are allowed"
        ));
    }
    Ok(())
}

/// The length of the string that begins here, with its quotation marks.
fn string_length(bytes: &[u8]) -> usize {
    let mut escaped = false;
    let is_end = |(index, byte): (usize, &u8)| {
        let ends = index > 0 && *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        ends
    };
    bytes.iter().enumerate().position(is_end).map_or(bytes.len(), |last| last + 1)
}

/// How much longer a number is when it is written without its exponent, at most.
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
            "the exponent {exponent} of a number is not from {NUMBER_EXPONENT_MIN} to {NUMBER_EXPONENT_MAX}"
        )),
    }
}

/// A JSON text that was read to its end without a complaint.
struct Checked(Shape);

impl<'de> Deserialize<'de> for Checked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Level(0).deserialize(deserializer).map(Self)
    }
}

/// Reads one value that lies this many arrays and objects deep.
#[derive(Clone, Copy)]
struct Level(usize);

impl Level {
    fn below<E: Error>(self) -> Result<Self, E> {
        if self.0 == JSON_DEPTH_MAX {
            return Err(E::custom(format_args!("it is deeper than {JSON_DEPTH_MAX} levels")));
        }
        Ok(Self(self.0 + 1))
    }
}

impl<'de> DeserializeSeed<'de> for Level {
    type Value = Shape;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Shape, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Level {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Shape, E> {
        Ok(Shape::Other)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Shape, E> {
        Ok(Shape::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Shape, E> {
        Ok(Shape::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Shape, E> {
        Ok(Shape::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Shape, E> {
        Ok(Shape::Other)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Shape, E> {
        // Postgres can keep no NUL in a string, so nobody may.
        if text.contains('\0') {
            return Err(E::custom("a string contains a NUL character"));
        }
        Ok(Shape::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Shape, A::Error> {
        let below = self.below()?;
        while items.next_element_seed(below)?.is_some() {}
        Ok(Shape::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Shape, A::Error> {
        let below = self.below()?;
        while members.next_key_seed(below)?.is_some() {
            members.next_value_seed(below)?;
        }
        Ok(Shape::Object)
    }
}

/// Valid JSON without spaces between its parts, and with the characters escaped that are dangerous inside HTML.
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
        check("payload", text).expect_err("it is not stored").to_string()
    }

    #[test]
    fn every_kind_of_json_passes_and_an_object_is_told_apart() {
        assert_eq!(
            check("payload", r#"{"a":[1,-2,3.5e10,null,true,"é\n"]}"#).unwrap(),
            Shape::Object
        );
        for text in ["[]", "1", "\"\"", "null", "false", "18446744073709551615"] {
            assert_eq!(check("payload", text).unwrap(), Shape::Other, "{text}");
        }
    }

    #[test]
    fn what_is_not_json_is_refused() {
        for text in
            ["", "{", "{} {}", "{\"a\":}", "nul", "\"\u{1}\"", "1e400", "\"\\ud800\"", "NaN"]
        {
            assert!(problem(text).contains("not JSON"), "{text}");
        }
    }

    #[test]
    fn every_number_that_a_program_computes_passes() {
        for text in ["5e-324", "1.7976931348623157e+308", "-2.5E-10", "1e21", "[0.1,1e5,-7]"] {
            assert!(check("payload", text).is_ok(), "{text}");
        }
        let written_out = format!("0.{}5", "0".repeat(323));
        assert!(check("payload", &written_out).is_ok());
        // What looks like a number within a string is none.
        assert!(check("payload", r#"["1e-16383","\\\"1e-16383", "\\", {"1e-16383":1}]"#).is_ok());
    }

    #[test]
    fn a_number_that_grows_when_it_is_written_out_is_refused() {
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
    fn a_nul_is_refused_in_strings_and_in_names_however_it_is_spelled() {
        for text in [r#"["a\u0000b"]"#, r#"{"a\u0000":1}"#] {
            assert!(problem(text).contains("NUL"), "{text}");
        }
        assert!(check("payload", r#""a\\u0000""#).is_ok());
    }

    #[test]
    fn the_deepest_json_passes_and_one_level_more_does_not() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(check("payload", &nested(JSON_DEPTH_MAX)).is_ok());
        assert!(problem(&nested(JSON_DEPTH_MAX + 1)).contains("deeper"));
        assert!(check("payload", &"[".repeat(500_000)).is_err());
    }

    #[test]
    fn the_largest_json_passes_and_one_byte_more_does_not() {
        let sized = |bytes: usize| format!("\"{}\"", "x".repeat(bytes - 2));
        assert!(check("payload", &sized(PAYLOAD_BYTES_MAX)).is_ok());
        assert!(problem(&sized(PAYLOAD_BYTES_MAX + 1)).contains("at most"));
    }

    #[test]
    fn compact_json_has_no_spaces_but_those_in_strings() {
        assert_eq!(compact("{ \"a b\" :\n[ 1 ,\t2 ] }"), r#"{"a b":[1,2]}"#);
        assert_eq!(compact(r#"["\" ", "\\" , " "]"#), r#"["\" ","\\"," "]"#);
        assert_eq!(compact("\"<&>\u{2028}\""), r#""\u003c\u0026\u003e\u2028""#);
    }
}
