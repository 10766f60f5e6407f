//! The signature of Standard Webhooks: one rule for what comes in and for what goes out.
//!
//! Upstream: `webhooks` checks with it, `replies` signs with it. Downstream: none.
//! Promises: a secret means the same key on both sides.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

/// The HMAC of `id.timestamp.body`.
pub(crate) fn authenticate(secret: &str, id: &str, timestamp: &str, body: &[u8]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(&key(secret)).expect("a key may have any length");
    for part in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
        mac.update(part);
    }
    mac
}

/// Secrets are base64, mostly after `whsec_`; what is not base64 is taken as it is.
fn key(secret: &str) -> Vec<u8> {
    let encoded = secret.strip_prefix("whsec_").unwrap_or(secret);
    let key = STANDARD.decode(encoded).ok().filter(|key| !key.is_empty());
    key.unwrap_or_else(|| secret.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_base64_with_or_without_its_prefix_or_any_text() {
        assert_eq!(key("whsec_c2VjcmV0"), b"secret");
        assert_eq!(key("c2VjcmV0"), b"secret");
        assert_eq!(key("no base64!"), b"no base64!");
        assert_eq!(key("whsec_no base64!"), b"whsec_no base64!");
        assert_eq!(key("whsec_"), b"whsec_", "no key is no secret");
    }
}
