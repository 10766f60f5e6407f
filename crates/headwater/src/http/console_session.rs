//! The session cookie of the console: derived from a token, stored nowhere.
//!
//! Upstream: `console.rs`. The cookie is `v1.NAME.EXPIRES.NONCE.HMAC`: the name of the token (base64), the time of expiry
//! in Unix seconds, random bytes, and a keyed hash (HMAC-SHA-256) of the rest. The key is the hash of the token.
//! Guarantees: every process with the same settings accepts it, also after a restart; it ends at its expiry, and as soon
//! as the token is changed or removed. The token cannot be derived from it.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, header};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use headwater_stream::clock::Timestamp;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use uuid::Uuid;

use crate::http::auth::{Authenticator, Principal, is_loopback};

/// How long a login lasts.
pub(super) const SESSION_LIFETIME: Duration = Duration::from_secs(12 * 3600);

/// Name of the cookie. With the prefix browsers accept it only over HTTPS, and from this host only.
const SECURE_NAME: &str = "__Host-headwater";

/// Name of the cookie on loopback, where there is no HTTPS.
const LOOPBACK_NAME: &str = "headwater";

/// Version of the format.
const VERSION: &str = "v1";

/// The value of a new cookie for the token with this hash.
fn issue(hash: &[u8; 32], principal: &Principal, now: Timestamp) -> String {
    let name = URL_SAFE_NO_PAD.encode(&principal.name);
    let expires = now.after(SESSION_LIFETIME).as_millis() / 1000;
    let nonce = Uuid::new_v4().simple();
    let signed = format!("{VERSION}.{name}.{expires}.{nonce}");
    let mac = hex::encode(mac(hash, &signed).finalize().into_bytes());
    format!("{signed}.{mac}")
}

fn mac(hash: &[u8; 32], signed: &str) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(hash).expect("a key of any length is valid");
    mac.update(signed.as_bytes());
    mac
}

impl Authenticator {
    /// The principal of a token, and a cookie for it.
    pub(super) fn log_in(&self, token: &str, now: Timestamp) -> Option<(Principal, String)> {
        let principal = self.find(token)?;
        // Names are unique.
        let (hash, _) = self.tokens().iter().find(|(_, known)| *known == principal)?;
        let cookie = issue(hash, &principal, now);
        Some((principal, cookie))
    }

    /// The principal of a cookie that is valid now.
    pub(super) fn principal_of_cookie(&self, value: &str, now: Timestamp) -> Option<Principal> {
        let (signed, presented) = value.rsplit_once('.')?;
        let presented = hex::decode(presented).ok()?;
        let mut parts = signed.split('.');
        let (version, name) = (parts.next()?, parts.next()?);
        let expires: u64 = parts.next()?.parse().ok()?;
        if version != VERSION || now.as_millis() / 1000 >= expires {
            return None;
        }
        let name = URL_SAFE_NO_PAD.decode(name).ok()?;
        let mut named = self.tokens().iter().filter(|(_, known)| known.name.as_bytes() == name);
        // Compared in constant time.
        let found = named.find(|(hash, _)| mac(hash, signed).verify_slice(&presented).is_ok());
        found.map(|(_, principal)| principal.clone())
    }
}

fn has_loopback_host(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    host.is_some_and(is_loopback)
}

/// The cookie of a request, by the name that belongs to its host.
pub(super) fn presented_cookie(headers: &HeaderMap) -> Option<&str> {
    let name = if has_loopback_host(headers) { LOOPBACK_NAME } else { SECURE_NAME };
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs =
        cookies.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(known, _)| *known == name).map(|(_, value)| value)
}

/// The header that sets the cookie; with an empty value, the one that removes it.
pub(super) fn set_cookie(headers: &HeaderMap, value: &str) -> HeaderValue {
    let (name, secure) = match has_loopback_host(headers) {
        true => (LOOPBACK_NAME, ""),
        false => (SECURE_NAME, "; Secure"),
    };
    let seconds = if value.is_empty() { 0 } else { SESSION_LIFETIME.as_secs() };
    let text = format!("{name}={value}; Path=/; HttpOnly; SameSite=Lax; Max-Age={seconds}{secure}");
    HeaderValue::from_str(&text).expect("base64, digits and hexadecimal are a header")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Role, TokenSettings};

    fn authenticator(tokens: &[(&str, &str)]) -> Authenticator {
        let tokens = tokens.iter().map(|(name, token)| TokenSettings {
            name: (*name).to_owned(),
            role: Role::Write,
            token: (*token).to_owned().into(),
            integrations: None,
        });
        Authenticator::new(&tokens.collect::<Vec<_>>())
    }

    const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

    #[test]
    fn a_cookie_is_valid_in_every_process_until_it_expires() {
        let (one, other) =
            (authenticator(&[("ann.b", "aaaa")]), authenticator(&[("ann.b", "aaaa")]));
        let (principal, cookie) = one.log_in("aaaa", NOW).unwrap();
        assert_eq!(principal.name, "ann.b");
        assert_eq!(cookie.split('.').count(), 5, "{cookie}");
        assert_eq!(other.principal_of_cookie(&cookie, NOW), Some(principal));
        let last = NOW.after(SESSION_LIFETIME).before(Duration::from_secs(1));
        assert!(other.principal_of_cookie(&cookie, last).is_some());
        assert!(other.principal_of_cookie(&cookie, NOW.after(SESSION_LIFETIME)).is_none());
        assert_ne!(
            one.log_in("aaaa", NOW).unwrap().1,
            cookie,
            "each login has a cookie of its own"
        );
    }

    #[test]
    fn a_changed_token_or_cookie_ends_the_session() {
        let before = authenticator(&[("ann", "aaaa"), ("bob", "bbbb")]);
        let (_, cookie) = before.log_in("aaaa", NOW).unwrap();
        assert!(before.log_in("aaab", NOW).is_none());
        for tokens in [&[("ann", "cccc")][..], &[("bob", "aaaa")], &[]] {
            assert!(
                authenticator(tokens).principal_of_cookie(&cookie, NOW).is_none(),
                "{tokens:?}"
            );
        }
        let parts: Vec<_> = cookie.split('.').collect();
        let later = (parts[2].parse::<u64>().unwrap() + 1).to_string();
        let bob = URL_SAFE_NO_PAD.encode("bob");
        for forged in [
            [parts[0], parts[1], &later, parts[3], parts[4]].join("."),
            [parts[0], &bob, parts[2], parts[3], parts[4]].join("."),
            ["v2", parts[1], parts[2], parts[3], parts[4]].join("."),
            [parts[0], parts[1], parts[2], parts[3], ""].join("."),
            parts[..4].join("."),
            String::new(),
            "....".to_owned(),
        ] {
            assert!(before.principal_of_cookie(&forged, NOW).is_none(), "{forged}");
        }
    }

    #[test]
    fn outside_loopback_the_cookie_is_for_https_and_this_host_only() {
        let headers = |host: &str, cookie: &str| {
            let pairs = [(header::HOST, host), (header::COOKIE, cookie)];
            pairs
                .into_iter()
                .map(|(name, value)| (name, value.parse().unwrap()))
                .collect::<HeaderMap>()
        };
        let text = |host| set_cookie(&headers(host, "a=b"), "x").to_str().unwrap().to_owned();
        assert!(
            text("desk.example").starts_with("__Host-headwater=x; Path=/; HttpOnly; SameSite=Lax;")
        );
        assert!(text("desk.example").ends_with("; Secure"));
        assert!(
            text("localhost:8080").starts_with("headwater=x;")
                && !text("localhost:8080").contains("Secure")
        );
        let both = "a=b; headwater=plain; __Host-headwater=secure";
        assert_eq!(presented_cookie(&headers("desk.example", both)), Some("secure"));
        assert_eq!(presented_cookie(&headers("127.0.0.1:1", both)), Some("plain"));
        assert_eq!(presented_cookie(&headers("desk.example", "headwater=plain")), None);
    }
}
