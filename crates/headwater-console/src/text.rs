//! Text for people: numbers, durations, times, and text of users made safe to show.
//!
//! Guarantees: control characters become visible symbols; text is cut at a character boundary; a time that cannot be
//! parsed is shown as it is.

use std::borrow::Cow;
use std::collections::HashSet;

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

/// The lines of a text in groups, and whether each group differs from the other text: these lines are not in it, apart from those that
/// both begin and end with. A comma at the end does not count, because the last field of an object has none.
pub(crate) fn differing_lines(text: &str, other: &str) -> Vec<(bool, String)> {
    fn bare(line: &str) -> &str {
        line.strip_suffix(',').unwrap_or(line)
    }
    let (lines, others): (Vec<&str>, Vec<&str>) = (text.lines().collect(), other.lines().collect());
    let is_same = |(line, other): &(&&str, &&str)| bare(line) == bare(other);
    let before = lines.iter().zip(&others).take_while(is_same).count();
    let rest = (&lines[before..], &others[before..]);
    let after = rest.0.iter().rev().zip(rest.1.iter().rev()).take_while(is_same).count();
    let middle = &lines[before..lines.len() - after];
    let known: HashSet<&str> =
        others[before..others.len() - after].iter().map(|line| bare(line)).collect();
    let own: HashSet<&str> = middle.iter().map(|line| bare(line)).collect();
    // The same lines in another order, or more often.
    let is_whole = own == known;
    let mut groups: Vec<(bool, String)> = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let is_inner = (before..lines.len() - after).contains(&index);
        let differs = is_inner && (is_whole || !known.contains(bare(line)));
        match groups.last_mut() {
            Some((of_group, group)) if *of_group == differs => {
                group.push('\n');
                group.push_str(line);
            }
            _ => groups.push((differs, (*line).to_owned())),
        }
    }
    groups
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

/// Rows that a list counts; an API that finds more of them answers with one more.
const COUNT_MAX: u64 = 10_000;

/// How many, in words; `10,000+` for more than are counted.
pub(crate) fn capped(count: u64, one: &str, many: &str) -> String {
    match count {
        0..=COUNT_MAX => counted(count, one, many),
        _ => format!("{}+ {many}", number(COUNT_MAX)),
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
        let counts = [1, 10_000, 10_001].map(|count| capped(count, "issue", "issues"));
        assert_eq!(counts, ["1 issue", "10,000 issues", "10,000+ issues"]);
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
    fn lines_that_differ_are_marked_on_both_sides() {
        let marked = |text: &str, other: &str| {
            let groups = differing_lines(text, other);
            let sign = |(differs, lines): &(bool, String)| match differs {
                true => format!("[{lines}]"),
                false => lines.clone(),
            };
            groups.iter().map(sign).collect::<Vec<_>>().join("|")
        };
        assert_eq!(marked("{\na,\nb,\nc\n}", "{\na,\nx,\nc\n}"), "{\na,|[b,]|c\n}");
        assert_eq!(marked("{\na,\nx,\nc\n}", "{\na,\nb,\nc\n}"), "{\na,|[x,]|c\n}");
        // A field that only one has: the comma before it is no difference.
        assert_eq!(marked("{\na,\nb\n}", "{\na\n}"), "{\na,|[b]|}");
        assert_eq!(marked("{\na\n}", "{\na,\nb\n}"), "{\na\n}");
        // Two fields with an equal one between them.
        assert_eq!(marked("{\n1\nb\n2\n}", "{\n3\nb\n4\n}"), "{|[1]|b|[2]|}");
        // Another order, and a line that is there twice.
        assert_eq!(marked("a\nb", "b\na"), "[a\nb]");
        assert_eq!(marked("a\na\nb", "a\nb"), "a|[a]|b");
        assert_eq!(marked("a", "a"), "a");
        assert_eq!((marked("a", ""), marked("", "a")), ("[a]".to_owned(), String::new()));
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
