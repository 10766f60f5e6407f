//! The mark in comments that we write, by which a reply is found again and not answered.
//!
//! Upstream: `replies` writes it and looks for it, `webhooks` and `desk` look for it. Promises: the mark of one reply is the
//! same at every attempt and no other reply has it; without the secret it cannot be forged, since it
//! ends with an HMAC of the idempotency key. No text of a user or a model becomes one, since `<` is escaped in what we send.

use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretString};
use sha2::Sha256;

use crate::text;

/// How every mark begins.
pub(crate) const PREFIX: &str = "<!-- headwater:reply ";
const SUFFIX: &str = " -->";

/// Bytes of the HMAC in a mark.
const MAC_BYTES: usize = 16;

/// The mark of the reply with this idempotency key, signed with the secret. Hidden where comments are shown.
pub fn of(idempotency_key: &str, secret: &SecretString) -> String {
    let secret = secret.expose_secret().as_bytes();
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("a key may have any length");
    mac.update(b"headwater:reply ");
    mac.update(idempotency_key.as_bytes());
    let mac = mac.finalize().into_bytes();
    let mac: String = mac[..MAC_BYTES].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}{mac}{SUFFIX}", unsigned(idempotency_key))
}

/// How every mark of the reply with this idempotency key begins, whatever its author and secret.
pub(crate) fn unsigned(idempotency_key: &str) -> String {
    // Keys are of our making; should one ever hold more, it must not end the mark early.
    let safe = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    let key: String = idempotency_key.chars().filter(safe).collect();
    format!("{PREFIX}{} ", text::cut(&key, 200))
}

/// Whether a comment ends with the mark of a reply, whatever its secret: replies of other installations are not answered
/// either. A mark within a quotation is not at the end, or its line begins with `>`.
pub fn is_ours(body: &str) -> bool {
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
    fn a_mark_is_found_again_and_cannot_be_ended_early() {
        assert!(is_ours(&format!("Hello\n\n{}\n", of("abc-1-2-0", &secret("s")))));
        assert!(!is_ours("Hello <!-- other -->"));
        assert!(of("a --><script>", &secret("s")).starts_with("<!-- headwater:reply a--script "));
        assert_eq!(of("a --><script>", &secret("s")).matches("-->").count(), 1);
    }

    #[test]
    fn a_mark_depends_on_the_key_and_the_secret() {
        let mark = of("k-1", &secret("s"));
        assert_eq!(mark, of("k-1", &secret("s")));
        for other in [of("k-1", &secret("t")), of("k-2", &secret("s")), of("k-1<", &secret("s"))] {
            assert_ne!(mark, other);
        }
        assert!(mark.starts_with(&unsigned("k-1")) && !mark.starts_with(&unsigned("k")));
    }

    #[test]
    fn a_person_who_quotes_a_reply_is_heard() {
        let mark = of("k", &secret("s"));
        assert!(!is_ours(&format!("> Hello\n> {mark}\n\nThat did not help.")));
        assert!(!is_ours(&format!("That did not help.\n> Hello\n> {mark}\n")));
        assert!(!is_ours(&format!("Why is there {mark} in your reply?")));
    }
}
