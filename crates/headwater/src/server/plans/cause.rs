//! Reduces an error message to its cause: the message without what differs from case to case.
//!
//! Upstream: `api/failures.rs` groups failures by it; replay plans compare the causes before and after a replay.

use sha2::{Digest, Sha256};

use crate::text;

/// Bytes of a cause.
const CAUSE_BYTES_MAX: usize = 300;

/// Hexadecimal digits of the id of a cause.
const ID_DIGITS: usize = 16;

/// The id of a cause: the same for the same kind, place and cause.
pub(crate) fn cause_id(kind: &str, place: &str, cause: &str) -> String {
    let digest = Sha256::digest(format!("{kind}\0{place}\0{cause}"));
    hex::encode(digest)[..ID_DIGITS].to_owned()
}

/// The message without what differs from case to case: quoted text becomes `"…"`, words with digits become `#`. Only the
/// first line counts.
pub(crate) fn cause_of(message: &str) -> String {
    let line = message.lines().find(|line| !line.trim().is_empty()).unwrap_or("(no message)");
    let mut cause = String::new();
    let mut word = String::new();
    let mut letters = line.chars().peekable();
    let flush = |cause: &mut String, word: &mut String| {
        if word.contains(|c: char| c.is_ascii_digit()) {
            // A row of ids is one.
            if !cause.ends_with('#') {
                cause.push('#');
            }
        } else {
            cause.push_str(word);
        }
        word.clear();
    };
    while let Some(letter) = letters.next() {
        match letter {
            quote @ ('"' | '\'' | '`') => {
                let is_apostrophe = quote == '\'' && !word.is_empty();
                let has_end = letters.clone().any(|c| c == quote);
                if is_apostrophe || !has_end {
                    word.push(letter);
                    continue;
                }
                flush(&mut cause, &mut word);
                for inner in letters.by_ref() {
                    if inner == quote {
                        break;
                    }
                }
                cause.push_str("\"…\"");
            }
            // These connect the parts of numbers, times and ids.
            '-' | '.' | ':' | '_'
                if letters.peek().is_some_and(|next| next.is_alphanumeric())
                    && !word.is_empty() =>
            {
                word.push(letter);
            }
            letter if letter.is_alphanumeric() => word.push(letter),
            letter => {
                flush(&mut cause, &mut word);
                cause.push(if letter.is_control() { ' ' } else { letter });
            }
        }
    }
    flush(&mut cause, &mut word);
    text::cut(cause.trim(), CAUSE_BYTES_MAX).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_from_case_to_case_is_not_part_of_the_cause() {
        let same = [
            "order 1234 refused: card `4111` of \"Ann\" expired at 2026-11-17T20:00:00Z",
            "order 99 refused: card `4242` of \"Bob's\" expired at 2025-01-01T00:00:00.123Z",
        ];
        assert_eq!(cause_of(same[0]), "order # refused: card \"…\" of \"…\" expired at #");
        assert_eq!(cause_of(same[0]), cause_of(same[1]));
        assert_eq!(cause_of("10.0.0.7:6379 timed out"), "# timed out");
        let uuids =
            ["0192f0c1-aaaa-7bbb-8ccc-1234567890ab", "ffffffff-1111-4222-8333-444444444444"];
        assert_eq!(
            cause_of(&format!("no user {}", uuids[0])),
            cause_of(&format!("no user {}", uuids[1]))
        );
    }

    #[test]
    fn words_and_apostrophes_stay_and_different_causes_differ() {
        assert_eq!(cause_of("can't connect to host"), "can't connect to host");
        assert_eq!(cause_of("an unpaired ` quote"), "an unpaired ` quote");
        assert_ne!(cause_of("timeout"), cause_of("refused"));
        assert_eq!(cause_of("\n\n  first line\nat frame 12"), "first line");
        assert_eq!((cause_of(""), cause_of("a\0b")), ("(no message)".to_owned(), "a b".to_owned()));
        assert!(cause_of(&"long ".repeat(10_000)).len() <= CAUSE_BYTES_MAX);
    }
}
