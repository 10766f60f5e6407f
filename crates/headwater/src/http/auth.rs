//! Who may do what: bearer tokens with roles.
//!
//! Upstream: `rate`. Downstream: routes, which find a [`Caller`] with the request.
//! Promises: tokens are compared in constant time, all of them; looking takes `read`, changing takes `write`, and a route can
//! ask for more. What another web page sends is refused, looking too, but for a link to a page; a browser on this machine is
//! not its user's consent. Without tokens, only requests to a loopback name are served.

use std::net::{Ipv4Addr, Ipv6Addr};

use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use base64::Engine;
use secrecy::ExposeSecret;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use crate::config::{Role, Token};
use crate::http::ApiError;
use crate::server::app_state::App;

/// Below it are no pages.
const API: &str = "/api/";

/// Who calls, and what they may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    /// The name of the token; `local` where there are none.
    pub(crate) name: String,
    /// What it allows.
    pub(crate) role: Role,
}

/// All tokens, by their hashes.
pub(crate) struct Access {
    tokens: Vec<([u8; 32], Caller)>,
}

impl Access {
    /// Knows these tokens. None: everybody on this machine is an admin.
    pub(crate) fn new(tokens: &[Token]) -> Self {
        let known = tokens.iter().map(|token| {
            let hash = Sha256::digest(token.token.expose_secret().as_bytes()).into();
            (hash, Caller { name: token.name.clone(), role: token.role })
        });
        Self { tokens: known.collect() }
    }

    /// Who sends a request with these headers.
    fn caller(&self, method: &Method, path: &str, headers: &HeaderMap) -> Result<Caller, ApiError> {
        refuse_other_pages(method, path, headers)?;
        if self.tokens.is_empty() {
            refuse_other_names(headers)?;
            return Ok(Caller { name: "local".to_owned(), role: Role::Admin });
        }
        let presented = presented(method, headers)
            .ok_or_else(|| unauthorized("this needs a token: `Authorization: Bearer TOKEN`"))?;
        self.find(&presented).ok_or_else(|| unauthorized("there is no such token"))
    }

    /// Hashes have one length, so that of a token does not show; every one is compared, so its place does not either.
    fn find(&self, presented: &str) -> Option<Caller> {
        let hash: [u8; 32] = Sha256::digest(presented.as_bytes()).into();
        let (mut found, mut place) = (Choice::from(0), 0_u32);
        for (index, (known, _)) in self.tokens.iter().enumerate() {
            let is_it = known.ct_eq(&hash);
            place.conditional_assign(&u32::try_from(index).unwrap_or(u32::MAX), is_it);
            found |= is_it;
        }
        bool::from(found).then(|| self.tokens[place as usize].1.clone())
    }
}

/// A layer for everything below it: `read` to look, `write` to change.
pub(crate) async fn require(
    State(app): State<App>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let (method, path) = (request.method(), request.uri().path());
    let caller = app.access.caller(method, path, request.headers())?;
    let needed = if is_look(request.method()) { Role::Read } else { Role::Write };
    caller.must_be(needed)?;
    request.extensions_mut().insert(caller);
    Ok(next.run(request).await)
}

/// Whether a request with this method changes nothing.
pub(crate) fn is_look(method: &Method) -> bool {
    [Method::GET, Method::HEAD, Method::OPTIONS].contains(method)
}

impl Caller {
    /// Refuses those whose role is lower.
    pub(crate) fn must_be(&self, needed: Role) -> Result<(), ApiError> {
        if self.role >= needed {
            return Ok(());
        }
        let (needed, role) = (needed.as_str(), self.role.as_str());
        let message = format!("this needs the role `{needed}`, and this token has `{role}`");
        Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message))
    }
}

/// The caller as an argument of a route below [`require`].
impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        // A route that asks for a caller and stands outside of the layer lets nobody in.
        parts.extensions.get::<Self>().cloned().ok_or_else(|| unauthorized("this needs a token"))
    }
}

/// The token of a request. A browser presents it as the password of basic authentication, which is good for looking only: it
/// would send it along with whatever another page makes it send.
fn presented(method: &Method, headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, rest) = value.split_once(' ')?;
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(rest.trim().to_owned());
    }
    if scheme.eq_ignore_ascii_case("basic") && is_look(method) {
        let decoded = base64::engine::general_purpose::STANDARD.decode(rest.trim()).ok()?;
        let (_, password) = std::str::from_utf8(&decoded).ok()?.split_once(':')?;
        return Some(password.to_owned());
    }
    None
}

fn unauthorized(message: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message).with_header(
        header::WWW_AUTHENTICATE,
        HeaderValue::from_static("Bearer, Basic realm=\"headwater\""),
    )
}

/// What a browser sends on behalf of another page changes nothing, and keeps nobody busy: an answer that the page cannot read
/// costs as much as any other. A link that a person follows to a page of ours is no such thing.
fn refuse_other_pages(method: &Method, path: &str, headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let host = text("host").unwrap_or_default();
    let is_of_this_site = text("sec-fetch-site") != Some("cross-site");
    let is_followed = text("sec-fetch-mode") == Some("navigate")
        && text("sec-fetch-dest").is_none_or(|place| place == "document")
        && !path.starts_with(API);
    let is_ours = match text("origin").filter(|_| !is_look(method)) {
        Some(origin) => origin.split_once("://").is_some_and(|(_, place)| place == host),
        None => is_of_this_site || (is_look(method) && is_followed),
    };
    if is_ours {
        return Ok(());
    }
    let message = "this request comes from another web page";
    Err(ApiError::new(StatusCode::FORBIDDEN, "other_page", message))
}

/// Without tokens, a name that leads here but is not ours is a trick (DNS rebinding), or a proxy that needs a token.
fn refuse_other_names(headers: &HeaderMap) -> Result<(), ApiError> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next().and_then(|host| host.to_str().ok());
    if host.is_some_and(is_loopback) && hosts.next().is_none() {
        return Ok(());
    }
    let message =
        "no [[token]] is configured, so only requests with a loopback `Host` header are accepted";
    Err(ApiError::new(StatusCode::FORBIDDEN, "other_name", message))
}

/// Whether a `Host` is `localhost` or a loopback address, with a port or without, and nothing else: what does not parse
/// as a whole (user information, two ports, a name after the address) is not loopback.
fn is_loopback(host: &str) -> bool {
    let is_port =
        |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok();
    if let Some((address, rest)) = host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        let is_address = address.parse::<Ipv6Addr>().is_ok_and(|address| address.is_loopback());
        return is_address && (rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port));
    }
    let (name, port) = match host.split_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (host, None),
    };
    let is_address = name.parse::<Ipv4Addr>().is_ok_and(|address| address.is_loopback());
    (is_address || name.eq_ignore_ascii_case("localhost")) && port.is_none_or(is_port)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| {
            (header::HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
        });
        pairs.collect()
    }

    fn access() -> Access {
        let token = |name: &str, role, token: &str| Token {
            name: name.to_owned(),
            role,
            token: token.to_owned().into(),
        };
        Access::new(&[
            token("ann", Role::Read, "aaaaaaaaaaaaaaaa"),
            token("bob", Role::Write, "bbbbbbbbbbbbbbbb"),
        ])
    }

    #[test]
    fn a_token_is_its_bearers_name_and_role() {
        let caller = |value: &str| {
            access().caller(&Method::POST, "/api/v1/x", &headers(&[("authorization", value)]))
        };
        assert_eq!(caller("Bearer bbbbbbbbbbbbbbbb").unwrap().name, "bob");
        assert_eq!(caller("bearer aaaaaaaaaaaaaaaa").unwrap().role, Role::Read);
        for wrong in ["Bearer", "Bearer ", "Bearer aaaaaaaaaaaaaaab", "bbbbbbbbbbbbbbbb", "Basic x"]
        {
            assert_eq!(caller(wrong).unwrap_err().status(), StatusCode::UNAUTHORIZED, "{wrong}");
        }
        let none = access().caller(&Method::GET, "/", &headers(&[]));
        assert_eq!(none.unwrap_err().status(), StatusCode::UNAUTHORIZED);
    }

    #[test]
    fn a_browser_may_look_with_a_password_and_change_nothing() {
        let encoded = base64::engine::general_purpose::STANDARD.encode(":bbbbbbbbbbbbbbbb");
        let basic = headers(&[("authorization", &format!("Basic {encoded}"))]);
        assert_eq!(access().caller(&Method::GET, "/", &basic).unwrap().name, "bob");
        assert!(access().caller(&Method::POST, "/", &basic).is_err());
    }

    #[test]
    fn without_tokens_other_pages_and_other_names_are_refused() {
        let open = Access::new(&[]);
        let look = |pairs: &[_]| open.caller(&Method::GET, "/", &headers(pairs));
        let change = |pairs: &[_]| open.caller(&Method::POST, "/api/v1/x", &headers(pairs));
        for host in ["localhost:8080", "127.0.0.1:8080", "[::1]:8080", "127.0.0.1"] {
            assert_eq!(look(&[("host", host)]).unwrap().role, Role::Admin, "{host}");
            assert!(change(&[("host", host)]).is_ok(), "{host}");
        }
        for host in ["evil.example", "127.0.0.1.evil.example", "", "10.0.0.1:8080"] {
            assert_eq!(look(&[("host", host)]).unwrap_err().code(), "other_name", "{host}");
        }
        for host in [
            "127.0.0.1:x@evil.example",
            "127.0.0.1:80@evil.example",
            "localhost@evil.example",
            "localhost:80:evil.example",
            "localhost:",
            "localhost:+80",
            "localhost:99999",
            "localhost/evil.example",
            "localhost evil.example",
            "[::1]evil.example",
            "[::1]:x@evil.example",
            "[::1",
            "[127.0.0.1]:80",
            "::1",
            "127.1",
            "0x7f.0.0.1",
        ] {
            assert_eq!(look(&[("host", host)]).unwrap_err().code(), "other_name", "{host}");
        }
        let mut two = headers(&[("host", "localhost")]);
        two.append(header::HOST, HeaderValue::from_static("evil.example"));
        assert!(open.caller(&Method::GET, "/", &two).is_err());
        let host = ("host", "localhost:8080");
        assert!(change(&[host, ("origin", "http://localhost:8080")]).is_ok());
        for other in ["https://evil.example", "null", "http://localhost:9999"] {
            let refused = change(&[host, ("origin", other)]).unwrap_err();
            assert_eq!(refused.code(), "other_page", "{other}");
        }
        assert!(change(&[host, ("sec-fetch-site", "cross-site")]).is_err());
    }

    #[test]
    fn another_page_can_lead_a_person_to_a_page_and_ask_for_nothing_itself() {
        let open = Access::new(&[]);
        let look = |path: &str, site: &str, mode: &str, place: &str| {
            let pairs = [
                ("host", "localhost:8080"),
                ("sec-fetch-site", site),
                ("sec-fetch-mode", mode),
                ("sec-fetch-dest", place),
            ];
            open.caller(&Method::GET, path, &headers(&pairs)).map_err(|refusal| refusal.code())
        };
        for path in ["/", "/metrics", "/api/v1/sql", "/api/v1/doctor"] {
            for (mode, place) in [("no-cors", "image"), ("cors", "empty"), ("navigate", "iframe")] {
                assert_eq!(look(path, "cross-site", mode, place), Err("other_page"), "{path}");
                assert!(look(path, "same-origin", mode, place).is_ok(), "{path} {mode}");
                assert!(look(path, "none", mode, place).is_ok(), "{path} {mode}");
            }
        }
        assert!(look("/", "cross-site", "navigate", "document").is_ok());
        let refused = look("/api/v1/sql", "cross-site", "navigate", "document");
        assert_eq!(refused, Err("other_page"), "a question is no page");
    }

    #[test]
    fn a_role_includes_those_below_it() {
        let caller = Caller { name: "ann".to_owned(), role: Role::Write };
        assert!(caller.must_be(Role::Read).is_ok() && caller.must_be(Role::Write).is_ok());
        assert_eq!(caller.must_be(Role::Admin).unwrap_err().status(), StatusCode::FORBIDDEN);
    }
}
