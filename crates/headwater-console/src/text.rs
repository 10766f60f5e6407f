//! Text for people: numbers, durations, times, and text of users made safe to show.
//!
//! Guarantees: control characters become visible symbols; text is cut at a character boundary; a time that cannot be
//! parsed is shown as it is.

use std::borrow::Cow;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Characters of a path segment or query value that are encoded.
const ENCODED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~').remove(b':');

/// A text as a path segment or query value.
pub(crate) fn encoded(text: &str) -> String {
    utf8_percent_encode(text, ENCODED).to_string()
}

/// A word of a command as a POSIX shell reads it: as it is if no character has a meaning there, else in single quotes.
pub fn shell_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Makes control characters visible: U+0000 becomes `␀`. Line breaks and tabs stay.
pub(crate) fn visible(text: &str) -> Cow<'_, str> {
    let is_hidden = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let symbol = |c: char| match c {
        '\r' => '\u{240d}',
        '\u{7f}' => '\u{2421}',
        c if is_hidden(c) => {
            char::from_u32(0x2400 + u32::from(c)).filter(|_| c < ' ').unwrap_or('\u{fffd}')
        }
        c => c,
    };
    Cow::Owned(text.chars().map(symbol).collect())
}

/// The first `max` characters, and whether more follow.
pub(crate) fn cut(text: &str, max: usize) -> (&str, bool) {
    match text.char_indices().nth(max) {
        Some((end, _)) => (&text[..end], true),
        None => (text, false),
    }
}

/// A text field of a JSON object; empty if it is absent or no text.
pub(crate) fn field<'a>(object: &'a Value, name: &str) -> &'a str {
    object[name].as_str().unwrap_or_default()
}

/// The items of a JSON array field; none if it is absent.
pub(crate) fn items<'a>(object: &'a Value, name: &str) -> &'a [Value] {
    object[name].as_array().map_or(&[], Vec::as_slice)
}

/// A value as text: strings without quotes, `null` as nothing.
pub(crate) fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// `1204` as `1,204`.
pub(crate) fn number(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 issue`, `2 issues`.
pub(crate) fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{} {}", number(count), if count == 1 { one } else { many })
}

/// A duration in its largest unit: `14 s`, `3 min`, `2 h`, `5 d`.
pub(crate) fn duration(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..120_000 => format!("{} s", ms / 1_000),
        120_000..7_200_000 => format!("{} min", ms / 60_000),
        7_200_000..172_800_000 => format!("{} h", ms / 3_600_000),
        _ => format!("{} d", ms / 86_400_000),
    }
}

/// Bytes in a binary unit: `512 B`, `1.5 KiB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let (mut size, mut unit) = (count as f64 / 1024.0, UNITS[0]);
    for next in &UNITS[1..] {
        if size < 1024.0 {
            break;
        }
        (size, unit) = (size / 1024.0, next);
    }
    format!("{size:.1} {unit}")
}

/// A time relative to `now`, such as `3 min ago` or `in 14 s`, and the time in UTC to the second. `None` if the text is
/// not a time in RFC 3339.
pub(crate) fn relative_time(at: &str, now: OffsetDateTime) -> Option<(String, String)> {
    let at = OffsetDateTime::parse(at, &Rfc3339).ok()?.to_offset(time::UtcOffset::UTC);
    let ms = (now - at).whole_milliseconds();
    let distance = u64::try_from(ms.unsigned_abs()).unwrap_or(u64::MAX);
    let shown = match (ms >= 0, distance) {
        (_, 0..1_000) => "now".to_owned(),
        (true, _) => format!("{} ago", duration(distance)),
        (false, _) => format!("in {}", duration(distance)),
    };
    let whole = at.replace_nanosecond(0).ok()?.format(&Rfc3339).ok()?;
    Some((shown, whole.replace('T', " ").replace('Z', " UTC")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_become_visible_and_line_breaks_stay() {
        assert_eq!(visible("a\0b\u{1b}[0m\r\nc\td\u{7f}\u{9b}"), "a␀b␛[0m␍\nc\td␡\u{fffd}");
        assert!(matches!(visible("plain ünïcode\n"), Cow::Borrowed(_)));
    }

    #[test]
    fn text_is_cut_at_a_character_boundary() {
        assert_eq!(cut("äöü", 2), ("äö", true));
        assert_eq!(cut("äöü", 3), ("äöü", false));
    }

    #[test]
    fn numbers_durations_and_bytes_are_readable() {
        let numbers = [0, 12, 999, 1_000, 1_204, 2_104_377].map(number);
        assert_eq!(numbers, ["0", "12", "999", "1,000", "1,204", "2,104,377"]);
        assert_eq!(
            counted(1, "issue", "issues") + &counted(2, "issue", "issues"),
            "1 issue2 issues"
        );
        let durations = [999, 14_000, 180_000, 7_200_000, 500_000_000].map(duration);
        assert_eq!(durations, ["999 ms", "14 s", "3 min", "2 h", "5 d"]);
        assert_eq!([100, 1_536, 5 << 20].map(bytes), ["100 B", "1.5 KiB", "5.0 MiB"]);
    }

    #[test]
    fn times_are_relative_with_utc_beside_them() {
        let now = OffsetDateTime::parse("2026-11-17T20:00:00Z", &Rfc3339).unwrap();
        let shown = |at| relative_time(at, now);
        let at = |relative: &str, utc: &str| Some((relative.to_owned(), utc.to_owned()));
        assert_eq!(shown("2026-11-17T19:57:00.25Z"), at("2 min ago", "2026-11-17 19:57:00 UTC"));
        assert_eq!(shown("2026-11-17T20:00:14.5Z"), at("in 14 s", "2026-11-17 20:00:14 UTC"));
        assert_eq!(shown("2026-11-17T21:00:00+01:00"), at("now", "2026-11-17 20:00:00 UTC"));
        assert_eq!(shown("yesterday"), None);
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        let words = ["a-b_1.2", "a b", "it's", "", "$(id)", "a;b"].map(shell_word);
        assert_eq!(words, ["a-b_1.2", "'a b'", "'it'\\''s'", "''", "'$(id)'", "'a;b'"]);
    }

    #[test]
    fn names_are_encoded_for_paths() {
        assert_eq!(encoded("a/b?c#d e"), "a%2Fb%3Fc%23d%20e");
        assert_eq!(encoded("1700-0"), "1700-0");
    }
}
