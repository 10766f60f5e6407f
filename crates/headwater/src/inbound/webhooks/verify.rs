//! Verifies webhook signatures on the raw bytes.
//!
//! Upstream: `webhooks`. Guarantees: comparisons take constant time; only the signature headers are parsed. Error
//! messages help the owner of the secret and reveal nothing to others.

use std::time::Duration;

use axum::http::HeaderMap;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use headwater_stream::clock::Timestamp;
use hmac::Mac;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::desk::provider::is_hmac_sha256;
use crate::inbound::standard_webhooks;
use crate::inbound::webhooks::header;

/// Maximum signatures per header: old and new secret during a rotation, plus some more.
const SIGNATURES_MAX: usize = 16;

type Verification = Result<(), &'static str>;

/// `X-Hub-Signature-256: sha256=HEX`.
pub(super) fn github(secret: &str, headers: &HeaderMap, bytes: &[u8]) -> Verification {
    let signature =
        header(headers, "x-hub-signature-256").ok_or("X-Hub-Signature-256 is missing")?;
    let digits = signature.strip_prefix("sha256=").unwrap_or_default();
    let mut signature = [0; 32];
    hex::decode_to_slice(digits, &mut signature)
        .map_err(|_| "X-Hub-Signature-256 is not `sha256=` and 64 hexadecimal digits")?;
    if is_hmac_sha256(secret, &signature, &[bytes]) {
        Ok(())
    } else {
        Err("invalid signature: check that both sides use the same secret")
    }
}

/// `X-Gitlab-Token: SECRET`.
pub(super) fn gitlab(secret: &str, headers: &HeaderMap) -> Verification {
    let token = headers.get("x-gitlab-token").ok_or("X-Gitlab-Token is missing")?;
    // Hashes have the same length, so the length of the secret does not leak.
    let (ours, theirs) = (Sha256::digest(secret.as_bytes()), Sha256::digest(token.as_bytes()));
    let is_valid = bool::from(ours.as_slice().ct_eq(theirs.as_slice()));
    if is_valid {
        Ok(())
    } else {
        Err("invalid X-Gitlab-Token: check that both sides use the same secret")
    }
}

/// `webhook-id`, `webhook-timestamp`, `webhook-signature: v1,BASE64 v1,BASE64`, over `id.timestamp.body`.
pub(super) fn standard(
    secret: &str,
    headers: &HeaderMap,
    bytes: &[u8],
    now: Timestamp,
    tolerance: Duration,
) -> Verification {
    let id = header(headers, "webhook-id").ok_or("webhook-id is missing")?;
    let timestamp = header(headers, "webhook-timestamp").ok_or("webhook-timestamp is missing")?;
    let signatures = header(headers, "webhook-signature").ok_or("webhook-signature is missing")?;
    let seconds: u64 =
        timestamp.parse().map_err(|_| "webhook-timestamp is not a number of seconds since 1970")?;
    let signed_at = Timestamp::from_millis(seconds.saturating_mul(1000));

    let mac = standard_webhooks::authenticate(secret, id, timestamp, bytes);
    let is_valid = signatures
        .split(' ')
        .take(SIGNATURES_MAX)
        .filter_map(|signature| STANDARD.decode(signature.strip_prefix("v1,")?).ok())
        .any(|signature| mac.clone().verify_slice(&signature).is_ok());
    if !is_valid {
        return Err("invalid signature: check that both sides use the same secret");
    }
    // Checked after the signature, so that a sender without the secret learns nothing about the clock.
    if now.since(signed_at) > tolerance || signed_at.since(now) > tolerance {
        return Err(
            "webhook-timestamp is too old or in the future: check the clocks of both sides",
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| {
            (HeaderName::from_static(name), HeaderValue::from_bytes(value.as_bytes()).unwrap())
        });
        pairs.collect()
    }

    #[test]
    fn the_example_of_the_github_documentation_is_valid_and_every_change_of_it_is_not() {
        let (secret, body) = ("It's a Secret to Everybody", b"Hello, World!");
        let right = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
        let check = |signature: &str, body: &[u8]| {
            github(secret, &headers(&[("x-hub-signature-256", signature)]), body)
        };
        assert_eq!(check(right, body), Ok(()));
        assert!(check(right, b"Hello, World?").is_err());
        assert!(github("other", &headers(&[("x-hub-signature-256", right)]), body).is_err());
        assert!(github(secret, &headers(&[]), body).is_err());
        let digits = right.trim_start_matches("sha256=");
        let wrong = [
            digits.to_owned(),
            format!("sha1={digits}"),
            format!("sha256={}", &digits[..62]),
            format!("sha256={}zz", &digits[..62]),
            format!("sha256={digits}00"),
            "sha256=".to_owned(),
            "sha256=ä".repeat(20),
        ];
        for wrong in wrong {
            assert!(check(&wrong, body).is_err(), "{wrong}");
        }
        // Every digit matters.
        for at in 0..digits.len() {
            let other = if digits[at..].starts_with('0') { "1" } else { "0" };
            let wrong = format!("sha256={}{other}{}", &digits[..at], &digits[at + 1..]);
            assert!(check(&wrong, body).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_gitlab_token_must_match_exactly() {
        let check = |token: &str| gitlab("secret", &headers(&[("x-gitlab-token", token)]));
        assert_eq!(check("secret"), Ok(()));
        for wrong in ["Secret", "secre", "secrets", "", "sécret"] {
            assert!(check(wrong).is_err(), "{wrong}");
        }
        assert!(gitlab("secret", &headers(&[])).is_err());
    }

    // The vector of the Standard Webhooks specification.
    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
    const TIME: u64 = 1_614_265_330;
    const BODY: &[u8] = br#"{"test": 2432232314}"#;
    const SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

    fn check_standard(signature: &str, time: &str, now: u64, body: &[u8]) -> Verification {
        let headers = headers(&[
            ("webhook-id", ID),
            ("webhook-timestamp", time),
            ("webhook-signature", signature),
        ]);
        let now = Timestamp::from_millis(now * 1000);
        standard(SECRET, &headers, body, now, Duration::from_secs(300))
    }

    #[test]
    fn the_standard_webhooks_test_vector_is_valid_also_among_other_signatures() {
        let time = TIME.to_string();
        assert_eq!(check_standard(SIGNATURE, &time, TIME, BODY), Ok(()));
        let several = format!("v1,AAAA v2,{} {SIGNATURE}", "A".repeat(44));
        assert_eq!(check_standard(&several, &time, TIME, BODY), Ok(()));
        assert!(check_standard("v1,AAAA", &time, TIME, BODY).is_err());
        assert!(check_standard(SIGNATURE, &time, TIME, b"{}").is_err());
        assert!(check_standard(SIGNATURE, &(TIME + 1).to_string(), TIME, BODY).is_err());
        assert!(check_standard(SIGNATURE, "soon", TIME, BODY).is_err());
        let hidden_behind = "v1,AAAA ".repeat(SIGNATURES_MAX) + SIGNATURE;
        assert!(check_standard(&hidden_behind, &time, TIME, BODY).is_err());
    }

    #[test]
    fn a_signature_is_valid_for_five_minutes_before_and_after() {
        let time = TIME.to_string();
        for right in [TIME - 300, TIME + 300] {
            assert_eq!(check_standard(SIGNATURE, &time, right, BODY), Ok(()), "{right}");
        }
        for wrong in [TIME - 301, TIME + 301, 0] {
            assert!(check_standard(SIGNATURE, &time, wrong, BODY).is_err(), "{wrong}");
        }
    }
}
