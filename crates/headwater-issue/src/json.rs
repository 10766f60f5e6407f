//! JSON as text: validated before it is stored, sanitized for `jsonb`, compacted for hashing.
//!
//! Upstream: `validate`, `event_batch` and `dedup`. Guarantees: every store accepts validated text. It is valid JSON,
//! not too large, not too deep, without NUL in a string, and without a number that overflows or grows when written
//! without exponent. [`sanitize`] converts any valid JSON into such text. No tree is built: `serde_json` checks the
//! syntax, and one pass over the tokens checks the rest, with eight bytes per key of the open objects.

use std::borrow::Cow;
use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};

use serde::de::IgnoredAny;

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
    let text = sanitize(text);
    let is_lossy = check(what, &text)? || matches!(text, Cow::Owned(_));
    Ok(Storable { text, is_lossy })
}

/// Rejects text that some store cannot store. `what` names the argument in the error.
pub(crate) fn validate(what: &str, text: &str) -> Result<JsonShape> {
    check(what, text)?;
    let is_object = text.trim_ascii_start().starts_with('{');
    Ok(if is_object { JsonShape::Object } else { JsonShape::Other })
}

/// Rejects text that some store cannot store. Returns whether `jsonb` would drop part of it.
fn check(what: &str, text: &str) -> Result<bool> {
    if text.len() > PAYLOAD_BYTES_MAX {
        let problem = format!("has {} bytes, at most {PAYLOAD_BYTES_MAX} are allowed", text.len());
        return Err(IssueError::invalid(what, problem));
    }
    let syntax = serde_json::from_str::<IgnoredAny>(text).map_err(|error| error.to_string());
    syntax.and_then(|_| check_tokens(text)).map_err(|problem| {
        IssueError::invalid(what, format!("is not JSON that can be stored: {problem}"))
    })
}

/// Checks valid JSON for what PostgreSQL cannot store as `jsonb`, or writes much longer than it was. Returns whether
/// `jsonb` would drop a repeated key or the sign of zero.
fn check_tokens(text: &str) -> Result<bool, String> {
    let hasher = RandomState::new();
    // The hashes of the keys of every open object or array. A collision only causes a needless copy of the original.
    let mut open: Vec<HashSet<u64>> = Vec::new();
    let (mut is_lossy, mut written_out) = (false, text.len());
    for (start, token) in tokens(text) {
        match token.as_bytes()[0] {
            b'{' | b'[' => open.push(HashSet::new()),
            b'}' | b']' => drop(open.pop()),
            b'"' => {
                if !unstorable_escapes(token).is_empty() {
                    return Err("a string contains a NUL character or a lone surrogate".to_owned());
                }
                if is_key(text, start + token.len())
                    && let Some(keys) = open.last_mut()
                {
                    is_lossy |= !keys.insert(hasher.hash_one(unescaped(token)));
                }
            }
            b'-' | b'0'..=b'9' => {
                written_out += added_zeros(token)?;
                match token.parse::<f64>() {
                    Ok(number) if number.is_finite() => {
                        is_lossy |= number == 0.0 && number.is_sign_negative();
                    }
                    _ => return Err("a number is out of range".to_owned()),
                }
            }
            _ => {}
        }
        if open.len() > JSON_DEPTH_MAX {
            return Err(format!("nesting is deeper than {JSON_DEPTH_MAX} levels"));
        }
    }
    if written_out > PAYLOAD_BYTES_MAX {
        return Err(format!(
            "it has {written_out} bytes with its numbers written out, at most {PAYLOAD_BYTES_MAX} are allowed"
        ));
    }
    Ok(is_lossy)
}

/// Replaces values of valid JSON that PostgreSQL's `jsonb` cannot store: `\u0000` and lone surrogates become U+FFFD,
/// and numbers outside the range of `f64` become strings with the same characters. Invalid JSON does not become valid.
/// Borrowed if nothing was replaced.
pub fn sanitize(text: &str) -> Cow<'_, str> {
    let (mut sanitized, mut copied) = (String::new(), 0);
    let mut replace = |start: usize, end: usize, with: &str| {
        sanitized.push_str(&text[copied..start]);
        sanitized.push_str(with);
        copied = end;
    };
    for (start, token) in tokens(text) {
        let end = start + token.len();
        match token.as_bytes()[0] {
            b'"' => {
                for escape in unstorable_escapes(token) {
                    replace(start + escape, start + escape + ESCAPE_LENGTH, "\\ufffd");
                }
            }
            // A number as a key is invalid JSON and must stay invalid.
            b'-' | b'0'..=b'9' if !is_key(text, end) && is_unstorable_number(token) => {
                replace(start, end, &format!("\"{token}\""));
            }
            _ => {}
        }
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    sanitized.push_str(&text[copied..]);
    Cow::Owned(sanitized)
}

/// The strings, the number-like texts and all other characters of a text, with their positions.
fn tokens(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut position = 0;
    std::iter::from_fn(move || {
        let (start, rest) = (position, &text[position..]);
        position += match rest.as_bytes().first()? {
            b'"' => string_length(rest.as_bytes()),
            b'-' | b'0'..=b'9' => number_length(rest.as_bytes()),
            _ => rest.chars().next()?.len_utf8(),
        };
        Some((start, &text[start..position]))
    })
}

/// Whether a colon follows at this position.
fn is_key(text: &str, end: usize) -> bool {
    text[end..].trim_ascii_start().starts_with(':')
}

/// The text of a valid JSON string.
fn unescaped(token: &str) -> Cow<'_, str> {
    if token.contains('\\') {
        return Cow::Owned(serde_json::from_str(token).unwrap_or_default());
    }
    Cow::Borrowed(token.trim_matches('"'))
}

/// The bytes of `\u` and four hexadecimal digits.
const ESCAPE_LENGTH: usize = 6;

/// Positions of escapes of NUL and of lone surrogates in a string.
fn unstorable_escapes(token: &str) -> Vec<usize> {
    let bytes = token.as_bytes();
    let (mut found, mut position) = (Vec::new(), 0);
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

/// Whether the text is a JSON number that some store rejects or writes at an unbounded length.
fn is_unstorable_number(number: &str) -> bool {
    let is_storable =
        added_zeros(number).is_ok() && number.parse::<f64>().is_ok_and(f64::is_finite);
    !is_storable && serde_json::from_str::<IgnoredAny>(number).is_ok()
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
