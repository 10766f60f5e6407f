//! The marker in comments of the desk. It identifies a posted reply, and keeps the desk from answering itself.
//!
//! Upstream: `outbound` writes and searches it, `inbound::webhooks` and `desk` search it. Guarantees: the marker of a
//! reply is the same for every attempt and unique; it ends with an HMAC of the idempotency key, so it cannot be forged
//! without the secret. Text of users and models cannot become a marker, because `<` is escaped in comments.

use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretString};
use sha2::Sha256;

use crate::text;

/// Start of every marker.
pub(crate) const PREFIX: &str = "<!-- headwater:reply ";
const SUFFIX: &str = " -->";

/// Bytes of the HMAC in a marker.
const MAC_BYTES: usize = 16;

/// The marker of the reply with this idempotency key, signed with the secret. Invisible in rendered comments.
pub fn marker_for(idempotency_key: &str, secret: &SecretString) -> String {
    let secret = secret.expose_secret().as_bytes();
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("a key may have any length");
    mac.update(b"headwater:reply ");
    mac.update(idempotency_key.as_bytes());
    let mac = mac.finalize().into_bytes();
    format!("{}{}{SUFFIX}", unsigned_prefix(idempotency_key), hex::encode(&mac[..MAC_BYTES]))
}

/// The marker of a reply without the HMAC, which does not depend on author and secret.
pub(crate) fn unsigned_prefix(idempotency_key: &str) -> String {
    // Keys are generated; other characters are dropped, so that a key cannot end the marker early.
    let safe = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    let key: String = idempotency_key.chars().filter(safe).collect();
    format!("{PREFIX}{} ", text::cut(&key, 200))
}

/// Whether a comment ends with a reply marker, signed with any secret: replies of other installations are not answered
/// either. A quoted marker does not count: it is not at the end, or its line begins with `>`.
pub fn contains_marker(body: &str) -> bool {
    let Some(start) = body.rfind(PREFIX) else { return false };
    let line = body[..start].rsplit('\n').next().unwrap_or_default();
    let rest = body[start..].split_once(SUFFIX).map(|(_, rest)| rest.trim());
    rest == Some("") && !line.trim_start().starts_with('>')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> SecretString {
        text.to_owned().into()
    }

    #[test]
    fn a_marker_is_found_and_a_key_cannot_end_it_early() {
        assert!(contains_marker(&format!("Hello\n\n{}\n", marker_for("abc-1-2-0", &secret("s")))));
        assert!(!contains_marker("Hello <!-- other -->"));
        assert!(
            marker_for("a --><script>", &secret("s"))
                .starts_with("<!-- headwater:reply a--script ")
        );
        assert_eq!(marker_for("a --><script>", &secret("s")).matches("-->").count(), 1);
    }

    #[test]
    fn a_marker_depends_on_the_key_and_the_secret() {
        let marker = marker_for("k-1", &secret("s"));
        assert_eq!(marker, marker_for("k-1", &secret("s")));
        for other in [
            marker_for("k-1", &secret("t")),
            marker_for("k-2", &secret("s")),
            marker_for("k-1<", &secret("s")),
        ] {
            assert_ne!(marker, other);
        }
        assert!(
            marker.starts_with(&unsigned_prefix("k-1"))
                && !marker.starts_with(&unsigned_prefix("k"))
        );
    }

    #[test]
    fn a_comment_that_quotes_a_reply_does_not_contain_a_marker() {
        let marker = marker_for("k", &secret("s"));
        assert!(!contains_marker(&format!("> Hello\n> {marker}\n\nThat did not help.")));
        assert!(!contains_marker(&format!("That did not help.\n> Hello\n> {marker}\n")));
        assert!(!contains_marker(&format!("Why is there {marker} in your reply?")));
    }
}
