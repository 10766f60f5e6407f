//! Text of others: checked when it comes in, cut where it must be short.
//!
//! Upstream: `tickets`, `ticket_events` and `desk`. Promises: what was cleaned holds no control character but line ends
//! and tabs, so every database and every terminal can keep it; nothing else of it is changed. Escaping is not done here but
//! where text is shown: in JSON, in HTML, in a comment.

/// Takes control characters out, and makes every line end a `\n`.
pub fn cleaned(text: &str) -> String {
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    text.chars().filter(|c| matches!(c, '\n' | '\t') || !c.is_control()).collect()
}

/// The beginning of a text, at most so many bytes, cut between characters.
pub fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

/// The same on one line, for titles and names.
pub fn one_line(text: &str, bytes_max: usize) -> String {
    let line = cleaned(text).split_whitespace().collect::<Vec<_>>().join(" ");
    cut(&line, bytes_max).to_owned()
}

/// One segment of a path, or one value of a query, whatever it holds.
pub fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                encoded.push(char::from(byte));
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

/// An error with its causes, each once.
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

/// How many there are, with the words for one or for several.
pub fn counted(count: u64, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_control_characters_go() {
        assert_eq!(
            cleaned("a\r\nb\rc\td\0e\u{1b}[31m\u{85}<b>&'\"ü键"),
            "a\nb\nc\tde[31m<b>&'\"ü键"
        );
    }

    #[test]
    fn a_cut_never_splits_a_character() {
        assert_eq!((cut("aü", 2), cut("aü", 3), cut("", 5)), ("a", "aü", ""));
        assert_eq!(one_line(" Help\n me\u{0} ", 100), "Help me");
    }
}
