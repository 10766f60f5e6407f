//! The marker in comments of the desk. It identifies a posted reply, and keeps the desk from answering itself.
//!
//! Upstream: `outbound` writes and searches it, `inbound::webhooks` verifies it. Guarantees: the marker of a reply is
//! the same for every attempt and unique. It ends with two HMACs, of the idempotency key and of the text of the comment, so
//! it cannot be forged without the secret, and a comment of somebody else that quotes or copies it is not taken for a
//! reply. Text of users and models cannot become a marker, because `<` is escaped in comments.

use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretString};
use sha2::Sha256;

use crate::text;

/// Start of every marker.
pub(crate) const PREFIX: &str = "<!-- headwater:reply ";
const SUFFIX: &str = " -->";

/// Bytes of each HMAC in a marker.
const MAC_BYTES: usize = 16;

/// Maximum bytes of the key in a marker.
const KEY_BYTES_MAX: usize = 200;

/// Maximum bytes of a marker.
pub(crate) const BYTES_MAX: usize = PREFIX.len() + KEY_BYTES_MAX + 4 * MAC_BYTES + 2 + SUFFIX.len();

/// The marker of the reply with this idempotency key and text, signed with the secret. Invisible in rendered comments.
pub fn marker_for(idempotency_key: &str, text: &str, secret: &SecretString) -> String {
    let signed = signed_prefix(idempotency_key, secret);
    format!("{signed} {}{SUFFIX}", text_mac(&printable(idempotency_key), text, secret))
}

/// The marker of a reply without the HMAC of its text.
pub(crate) fn signed_prefix(idempotency_key: &str, secret: &SecretString) -> String {
    let key_mac = key_mac(&printable(idempotency_key), secret);
    format!("{}{key_mac}", unsigned_prefix(idempotency_key))
}

/// The marker of a reply without the HMACs, which does not depend on author and secret.
pub(crate) fn unsigned_prefix(idempotency_key: &str) -> String {
    format!("{PREFIX}{} ", printable(idempotency_key))
}

/// Keys are generated; other characters are dropped, so that a key cannot end the marker early.
fn printable(idempotency_key: &str) -> String {
    let safe = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    let key: String = idempotency_key.chars().filter(safe).collect();
    text::cut(&key, KEY_BYTES_MAX).to_owned()
}

fn key_mac(key: &str, secret: &SecretString) -> String {
    mac(&["headwater:reply", key], secret)
}

/// Providers may change line ends and spaces at the end, so only the words count.
fn text_mac(key: &str, text: &str, secret: &SecretString) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    mac(&["headwater:text", key, &words.join(" ")], secret)
}

fn mac(parts: &[&str], secret: &SecretString) -> String {
    let secret = secret.expose_secret().as_bytes();
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("a key may have any length");
    // No part before the last contains a space.
    mac.update(parts.join(" ").as_bytes());
    hex::encode(&mac.finalize().into_bytes()[..MAC_BYTES])
}

/// Whether the desk wrote this comment: it ends with a marker that was signed with the secret for exactly this text. Of
/// an edited comment (`is_edited`) only the key is verified: somebody may have edited a reply of the desk.
pub fn is_own(body: &str, is_edited: bool, secret: &SecretString) -> bool {
    let Some(start) = body.rfind(PREFIX) else { return false };
    let (text, marker) = body.split_at(start);
    let Some((marker, "")) = marker.trim_end().split_once(SUFFIX) else { return false };
    let mut parts = marker[PREFIX.len()..].split(' ');
    let (Some(key), Some(of_key), Some(of_text), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    of_key == key_mac(key, secret) && (is_edited || of_text == text_mac(key, text, secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> SecretString {
        text.to_owned().into()
    }

    fn reply(text: &str) -> String {
        format!("{text}\n\n{}", marker_for("abc-1-2-0", text, &secret("s")))
    }

    #[test]
    fn a_reply_is_recognized_and_a_key_cannot_end_its_marker_early() {
        let ours = reply("Hello,\n\nworld.");
        assert!(is_own(&ours, false, &secret("s")));
        assert!(is_own(&ours.replace('\n', "\r\n"), false, &secret("s")));
        assert!(is_own(&format!("{ours}\n"), false, &secret("s")));
        assert!(!is_own(&ours, false, &secret("t")));
        assert!(!is_own("Hello <!-- other -->", false, &secret("s")));
        let odd = marker_for("a --><script>", "x", &secret("s"));
        assert!(odd.starts_with("<!-- headwater:reply a--script "), "{odd}");
        assert_eq!(odd.matches("-->").count(), 1);
        assert!(marker_for(&"k".repeat(999), "x", &secret("s")).len() <= BYTES_MAX);
    }

    #[test]
    fn a_marker_depends_on_the_key_the_text_and_the_secret() {
        let marker = marker_for("k-1", "x", &secret("s"));
        assert_eq!(marker, marker_for("k-1", "x", &secret("s")));
        for other in [
            marker_for("k-1", "x", &secret("t")),
            marker_for("k-1", "y", &secret("s")),
            marker_for("k-2", "x", &secret("s")),
        ] {
            assert_ne!(marker, other);
        }
        assert!(marker.starts_with(&signed_prefix("k-1", &secret("s"))));
        assert!(marker.starts_with(&unsigned_prefix("k-1")));
        assert!(!marker.starts_with(&unsigned_prefix("k")));
    }

    #[test]
    fn a_comment_that_quotes_or_copies_a_reply_is_not_a_reply() {
        let ours = reply("Hello");
        let marker = &ours[ours.find(PREFIX).unwrap()..];
        for other in [
            format!("That did not help.\n\n{ours}"),
            format!("My own text\n\n{marker}"),
            format!("{ours}\n\nThat did not help."),
            format!("> Hello\n> {marker}"),
            "Soon.\n\n<!-- headwater:reply abc-1-1-0 -->".to_owned(),
            format!("x {PREFIX}"),
        ] {
            assert!(!is_own(&other, false, &secret("s")), "{other}");
        }
        // Somebody corrects a reply.
        assert!(is_own(&ours.replace("Hello", "Hallo"), true, &secret("s")));
    }
}
