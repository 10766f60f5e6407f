//! Cleans, truncates and escapes text from outside.
//!
//! Upstream: `tickets`, `inbound` and `desk`. Guarantees: cleaned text contains no control characters except line feeds
//! and tabs, so every database and terminal accepts it; nothing else is changed. Only [`printable`] decides what a
//! terminal may show. Escaping for JSON, HTML and comments is done where those are written.

// Commands in messages are quoted the same way as those in the console.
pub(crate) use headwater_console::shell_word;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// All bytes except the unreserved characters of RFC 3986.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Removes control characters except tabs, and turns every line ending into a line feed.
pub fn cleaned(text: &str) -> String {
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    text.chars().filter(|c| matches!(c, '\n' | '\t') || !c.is_control()).collect()
}

/// Escapes characters that a terminal would interpret, hide or reorder: control characters except line feed and tab
/// (C0, C1, DEL), bidirectional controls and zero-width characters. They become `\uXXXX` as in JSON, so a line of
/// JSON keeps its meaning.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if !is_unprintable(character) {
            shown.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            shown.push_str(&format!("\\u{unit:04x}"));
        }
    }
    shown
}

fn is_unprintable(character: char) -> bool {
    match character {
        '\n' | '\t' => false,
        // Soft hyphen, Arabic letter mark, Mongolian vowel separator, byte order mark.
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{feff}' => true,
        // Zero-width characters and directional marks; line and paragraph separators, embeddings and overrides.
        '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' => true,
        // Invisible operators, isolates, deprecated format characters; annotations; tags.
        '\u{2060}'..='\u{206f}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}' => true,
        other => other.is_control(),
    }
}

/// The longest prefix of at most `bytes_max` bytes that ends on a character boundary.
pub fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

/// Cleans a text, joins its words with single spaces, and truncates it. For titles and names.
pub fn one_line(text: &str, bytes_max: usize) -> String {
    let line = cleaned(text).split_whitespace().collect::<Vec<_>>().join(" ");
    cut(&line, bytes_max).to_owned()
}

/// Percent-encodes one path segment or query value.
pub fn percent_encoded(text: &str) -> String {
    utf8_percent_encode(text, ENCODED).to_string()
}

/// An error with its causes, each mentioned once.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

/// A count with its noun: `one` for 1, else `several`.
pub fn counted(count: u64, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_control_characters_are_removed() {
        assert_eq!(
            cleaned("a\r\nb\rc\td\0e\u{1b}[31m\u{85}<b>&'\"ü键"),
            "a\nb\nc\tde[31m<b>&'\"ü键"
        );
    }

    #[test]
    fn terminal_control_and_invisible_characters_are_escaped_as_in_json() {
        let nasty = "a\u{1b}[2J\u{7f}\u{9b}31m\r\u{202e}\u{2066}\u{200b}\u{feff}\u{e0041}ü键🙂";
        let shown = printable(nasty);
        assert!(
            shown.starts_with("a\\u001b[2J\\u007f\\u009b31m\\u000d\\u202e\\u2066\\u200b\\ufeff")
        );
        assert!(shown.ends_with("\\udb40\\udc41ü键🙂") && !shown.chars().any(is_unprintable));
        assert_eq!(printable("two\nlines\tand a tab"), "two\nlines\tand a tab");
        let json = serde_json::json!({ nasty: [nasty] });
        let printed: serde_json::Value =
            serde_json::from_str(&printable(&json.to_string())).unwrap();
        assert_eq!(printed, json);
    }

    #[test]
    fn truncation_never_splits_a_character() {
        assert_eq!((cut("aü", 2), cut("aü", 3), cut("", 5)), ("a", "aü", ""));
        assert_eq!(one_line(" Help\n me\u{0} ", 100), "Help me");
    }
}
