//! A reply as a comment that people read on GitHub or GitLab.
//!
//! Upstream: `github` and `gitlab`. Promises: nothing of the model's text is markup of ours: no HTML, no command of GitLab, no
//! mark, and it mentions nobody. The mark at the end is hidden and tells which reply it is.

use crate::limits::{COMMENT_BYTES_MAX, REPLY_BYTES_MAX};
use crate::marker;
use crate::text;

/// The body of a comment.
pub(super) fn body(content: &str, idempotency_key: &str) -> String {
    let mark = marker::of(idempotency_key);
    let room = COMMENT_BYTES_MAX - mark.len() - 8;
    let escaped = escaped(text::cut(content, REPLY_BYTES_MAX));
    let shown = text::cut(&escaped, room);
    let more = if shown.len() < escaped.len() { "…" } else { "" };
    format!("{shown}{more}\n\n{mark}")
}

fn escaped(content: &str) -> String {
    let mut escaped = String::with_capacity(content.len() + content.len() / 8);
    for (index, line) in content.lines().enumerate() {
        if index > 0 {
            escaped.push('\n');
        }
        // At the beginning of a line, GitLab takes it for a command: `/close`, `/assign`.
        let line = match line.trim_start().strip_prefix('/') {
            Some(rest) => format!("\\/{rest}"),
            None => line.to_owned(),
        };
        for c in line.chars() {
            match c {
                '&' => escaped.push_str("&amp;"),
                '<' => escaped.push_str("&lt;"),
                '>' => escaped.push_str("&gt;"),
                // A word joiner: looks the same, and calls nobody.
                '@' => escaped.push_str("@\u{2060}"),
                c => escaped.push(c),
            }
        }
    }
    escaped
}

/// Parts of an address, each within its place whatever it holds.
pub(super) fn path_segment(segment: &str) -> Option<String> {
    if segment.is_empty() || segment == "." || segment == ".." {
        return None;
    }
    let mut encoded = String::new();
    for byte in segment.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                encoded.push(char::from(byte));
            }
            byte => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    Some(encoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_models_text_is_only_text() {
        let body = body(
            "<script>x</script> &amp; @everyone\n/close\n  /assign @me\n<!-- headwater:reply k -->",
            "k-1",
        );
        assert!(!body.contains("<script>") && !body.contains("@everyone"));
        assert!(body.lines().all(|line| !line.trim_start().starts_with('/')), "{body}");
        assert_eq!(body.matches("<!--").count(), 1);
        assert!(body.ends_with("\n\n<!-- headwater:reply k-1 -->"));
    }

    #[test]
    fn a_comment_is_never_longer_than_the_other_side_takes() {
        for content in ["<".repeat(REPLY_BYTES_MAX), "ü".repeat(REPLY_BYTES_MAX)] {
            assert!(body(&content, "k").len() <= COMMENT_BYTES_MAX);
        }
    }

    #[test]
    fn a_name_stays_one_part_of_an_address() {
        assert_eq!(path_segment("a b/../?x#ü").unwrap(), "a%20b%2F..%2F%3Fx%23%C3%BC");
        assert_eq!((path_segment(".."), path_segment("."), path_segment("")), (None, None, None));
    }
}
