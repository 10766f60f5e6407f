//! The texts inside a text of JSON, each with its place there.
//!
//! Upstream: `redaction`, which searches them: an escape such as `\n` before a value, or one inside it, would hide it. No I/O, linear
//! time. The JSON is not written anew, so that patterns for more than one text of it see what was written.

use std::ops::Range;

use serde::de::IgnoredAny;

/// A string without its escapes, or a number.
pub(super) struct JsonText {
    pub(super) text: String,
    pub(super) is_number: bool,
    /// Where each byte of `text` begins in the JSON, and where the last one ends. The bytes of one character begin together.
    places: Vec<usize>,
}

impl JsonText {
    /// The place of a part of `text` in the JSON.
    pub(super) fn place(&self, part: &Range<usize>) -> Range<usize> {
        self.places[part.start]..self.places[part.end]
    }
}

/// The strings, also the names of fields, and the numbers of a text that is a JSON object or array; of another text, none.
pub(super) fn json_texts(json: &str) -> Vec<JsonText> {
    let is_json = json.trim_start().starts_with(['{', '['])
        && serde_json::from_str::<IgnoredAny>(json).is_ok();
    if !is_json {
        return Vec::new();
    }
    let (mut texts, mut at) = (Vec::new(), 0);
    while let Some(first) = json.as_bytes().get(at) {
        match first {
            b'"' => {
                let text = string_at(json, at + 1);
                at = text.places[text.text.len()] + 1;
                texts.push(text);
            }
            b'-' | b'0'..=b'9' => {
                let is_part = |c: char| matches!(c, '0'..='9' | '+' | '-' | '.' | 'e' | 'E');
                let length = json[at..].find(|c| !is_part(c)).unwrap_or(json.len() - at);
                let text = json[at..at + length].to_owned();
                texts.push(JsonText {
                    text,
                    is_number: true,
                    places: (at..=at + length).collect(),
                });
                at += length;
            }
            _ => at += 1,
        }
    }
    texts
}

/// The string that begins after its quotation mark at `at`.
fn string_at(json: &str, mut at: usize) -> JsonText {
    let (mut text, mut places) = (String::new(), Vec::new());
    while let Some(first) = json[at..].chars().next().filter(|first| *first != '"') {
        let (character, length) = match first {
            '\\' => escape(&json[at..]),
            other => (other, other.len_utf8()),
        };
        text.push(character);
        places.resize(text.len(), at);
        at += length;
    }
    places.push(at);
    JsonText { text, is_number: false, places }
}

/// The character of the escape that a text begins with, and the length of the escape. Half of a pair is the replacement character.
fn escape(text: &str) -> (char, usize) {
    let unit = |at: usize| {
        let digits = text.get(at..at + 6)?.strip_prefix("\\u")?;
        u16::from_str_radix(digits, 16).ok()
    };
    let simple = text[1..].chars().next().unwrap_or('\\');
    let character = match simple {
        'u' => {
            let units = [unit(0), unit(6)].into_iter().flatten();
            let decoded = char::decode_utf16(units).next().and_then(Result::ok);
            let character = decoded.unwrap_or(char::REPLACEMENT_CHARACTER);
            return (character, if character.len_utf16() == 2 { 12 } else { 6 });
        }
        'b' => '\u{8}',
        'f' => '\u{c}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        other => other,
    };
    (character, 1 + simple.len_utf8())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value as Json, json};

    use super::*;

    #[test]
    fn each_text_has_its_place() {
        let json = r#" {"a\n\u00e4b": ["x\ud83d\ude00y", -1.5e3, true, null, ""], "\ud83d\/": 7} "#;
        let texts = json_texts(json);
        let shown: Vec<_> = texts.iter().map(|one| (one.text.as_str(), one.is_number)).collect();
        let expected = [
            ("a\näb", false),
            ("x😀y", false),
            ("-1.5e3", true),
            ("", false),
            ("\u{fffd}/", false),
            ("7", true),
        ];
        assert_eq!(shown, expected);
        assert_eq!(&json[texts[0].place(&(1..5))], r"\n\u00e4b");
        assert_eq!(&json[texts[1].place(&(1..5))], r"\ud83d\ude00");
        assert_eq!(&json[texts[2].place(&(0..6))], "-1.5e3");
        for other in ["", "12", "\"x\"", "{\"a\": 1", "[1] and [2]", "[\"\\x\"]"] {
            assert!(json_texts(other).is_empty(), "{other}");
        }
    }

    proptest! {
        #[test]
        fn strings_are_decoded_as_by_the_parser(texts in proptest::collection::vec(any::<String>(), 0..5)) {
            let json = json!(texts).to_string();
            let found: Vec<_> = json_texts(&json).into_iter().map(|one| one.text).collect();
            prop_assert_eq!(&found, &texts);
        }

        #[test]
        fn any_text_is_accepted(text in "[\\[{]?[\\PC\"\\\\u0-9a-f:,]{0,40}[\\]}]?") {
            if serde_json::from_str::<Json>(&text).is_err() {
                return Ok(());
            }
            for one in json_texts(&text) {
                prop_assert!(one.place(&(0..one.text.len())).end <= text.len());
            }
        }
    }
}
