//! The mark in comments that we write, so that nobody, we least of all, takes them for news.
//!
//! Upstream: `replies` writes it, `webhooks` and `desk` look for it. Promises: the mark of one reply is the same at every
//! try and no other reply has it; no text of a user or a model becomes one, since `<` is escaped in what we send.

use crate::text;

const PREFIX: &str = "<!-- headwater:reply ";
const SUFFIX: &str = " -->";

/// The mark of the reply with this idempotency key. Hidden where comments are shown.
pub fn of(idempotency_key: &str) -> String {
    // Keys are of our making; should one ever hold more, it must not end the mark early.
    let safe = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    let key: String = idempotency_key.chars().filter(safe).collect();
    format!("{PREFIX}{}{SUFFIX}", text::cut(&key, 200))
}

/// Whether a comment is one that we have written.
pub fn is_ours(body: &str) -> bool {
    body.contains(PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_found_again_and_cannot_be_ended_early() {
        assert!(is_ours(&format!("Hello\n\n{}", of("abc-1-2-0"))));
        assert!(!is_ours("Hello <!-- other -->"));
        assert_eq!(of("a --><script>"), "<!-- headwater:reply a--script -->");
    }
}
