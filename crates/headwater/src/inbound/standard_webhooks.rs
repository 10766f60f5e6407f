//! Standard Webhooks signatures, for verifying and signing.
//!
//! Upstream: `inbound::webhooks` verifies, `outbound::callback` signs. Guarantees: a secret is decoded to the same key
//! on both sides.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

/// HMAC-SHA256 of `id.timestamp.body`.
pub(crate) fn authenticate(secret: &str, id: &str, timestamp: &str, body: &[u8]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(&key(secret)).expect("a key may have any length");
    for part in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
        mac.update(part);
    }
    mac
}

/// Decodes a secret: base64 with or without the prefix `whsec_`, otherwise its bytes.
fn key(secret: &str) -> Vec<u8> {
    let encoded = secret.strip_prefix("whsec_").unwrap_or(secret);
    let key = STANDARD.decode(encoded).ok().filter(|key| !key.is_empty());
    key.unwrap_or_else(|| secret.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_base64_with_or_without_prefix_or_plain_text() {
        assert_eq!(key("whsec_c2VjcmV0"), b"secret");
        assert_eq!(key("c2VjcmV0"), b"secret");
        assert_eq!(key("no base64!"), b"no base64!");
        assert_eq!(key("whsec_no base64!"), b"whsec_no base64!");
        assert_eq!(key("whsec_"), b"whsec_", "an empty key is not decoded");
    }
}
