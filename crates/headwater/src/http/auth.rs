//! Authentication and authorization: bearer tokens with roles.
//!
//! Upstream: `rate_limit.rs`. Downstream: routes, which take a [`Principal`] as argument. Guarantees: the presented
//! token is compared with all tokens in constant time; reading requires the role `read`, changes require `write`, and
//! a route can require more. Cross-origin browser requests are rejected, except navigation to a page (CSRF
//! protection). Without tokens only requests of this machine are served: with a loopback `Host` header, and not
//! through a proxy: with no header that a proxy adds, and not in HTTP/1.0.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::Response;
use base64::Engine;
use secrecy::ExposeSecret;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use crate::config::{Role, TokenSettings};
use crate::http::ApiError;
use crate::http::rate_limit::RateLimiter;
use crate::http::token_scope::ScopedRequest;
use crate::server::app_state::HttpServer;

/// Attempts of one client to log in to the console.
const LOGINS_PER_MINUTE: u32 = 5;

/// Path prefix of the API, which has no pages to navigate to.
const API_PREFIX: &str = "/api/";

/// The authenticated caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Principal {
    /// Name of the token; `local` without tokens.
    pub(crate) name: String,
    /// Its role.
    pub(crate) role: Role,
    /// The integrations whose objects it can see and change; `None`: all.
    pub(crate) integrations: Option<Arc<[String]>>,
}

/// All tokens, stored as hashes.
pub(crate) struct Authenticator {
    tokens: Vec<([u8; 32], Principal)>,
    /// Limits attempts to log in to the console.
    pub(super) login_limiter: RateLimiter,
}

impl Authenticator {
    /// Accepts these tokens. Without tokens every local client is an admin.
    pub(crate) fn new(tokens: &[TokenSettings]) -> Self {
        let known = tokens.iter().map(|token| {
            let hash = Sha256::digest(token.token.expose_secret().as_bytes()).into();
            let integrations = token.integrations.clone();
            (hash, Principal { name: token.name.clone(), role: token.role, integrations })
        });
        Self { tokens: known.collect(), login_limiter: RateLimiter::per_minute(LOGINS_PER_MINUTE) }
    }

    /// All tokens: hash and principal.
    pub(super) fn tokens(&self) -> &[([u8; 32], Principal)] {
        &self.tokens
    }

    /// The principal of a request in this version of HTTP with these headers.
    pub(super) fn authenticate(
        &self,
        method: &Method,
        path: &str,
        version: Version,
        headers: &HeaderMap,
    ) -> Result<Principal, ApiError> {
        reject_cross_origin(method, path, headers)?;
        if self.tokens.is_empty() {
            reject_non_loopback_host(headers)?;
            reject_proxied(version, headers)?;
            return Ok(Principal::unlimited("local", Role::Admin));
        }
        let presented_token = presented_token(method, headers).ok_or_else(|| {
            unauthorized("authentication required: send `Authorization: Bearer TOKEN`")
        })?;
        self.find(&presented_token).ok_or_else(|| unauthorized("unknown token"))
    }

    /// Hashes have equal length and all are compared, so the time reveals neither the length nor the position of a
    /// token.
    pub(super) fn find(&self, presented_token: &str) -> Option<Principal> {
        let hash: [u8; 32] = Sha256::digest(presented_token.as_bytes()).into();
        let (mut found, mut position) = (Choice::from(0), 0_u32);
        for (index, (known, _)) in self.tokens.iter().enumerate() {
            let is_it = known.ct_eq(&hash);
            position.conditional_assign(&u32::try_from(index).unwrap_or(u32::MAX), is_it);
            found |= is_it;
        }
        bool::from(found).then(|| self.tokens[position as usize].1.clone())
    }
}

/// Middleware: authenticates and requires `read` to read and `write` to change.
pub(crate) async fn require_authentication(
    State(server): State<HttpServer>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let (method, path, version) = (request.method(), request.uri().path(), request.version());
    let principal = server.authenticator.authenticate(method, path, version, request.headers())?;
    let needed = if is_read_only(request.method()) { Role::Read } else { Role::Write };
    principal.require_role(needed)?;
    ScopedRequest::of(&request).check(&principal, &server.app).await?;
    request.extensions_mut().insert(principal);
    Ok(next.run(request).await)
}

/// Middleware for calls of the console, whose caller is known: requires `read` to read and `write` to change.
pub(super) async fn require_role(
    State(server): State<HttpServer>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let principal = request.extensions().get::<Principal>().cloned();
    let principal = principal.ok_or_else(|| unauthorized("authentication required"))?;
    let needed = if is_read_only(request.method()) { Role::Read } else { Role::Write };
    principal.require_role(needed)?;
    ScopedRequest::of(&request).check(&principal, &server.app).await?;
    Ok(next.run(request).await)
}

/// Whether a request with this method changes nothing.
pub(crate) fn is_read_only(method: &Method) -> bool {
    [Method::GET, Method::HEAD, Method::OPTIONS].contains(method)
}

impl Principal {
    /// A caller who can see all integrations.
    pub(crate) fn unlimited(name: impl Into<String>, role: Role) -> Self {
        Self { name: name.into(), role, integrations: None }
    }

    /// Fails with 403 if the role is lower than `needed`.
    pub(crate) fn require_role(&self, needed: Role) -> Result<(), ApiError> {
        if self.role >= needed {
            return Ok(());
        }
        let (needed, role) = (needed.as_str(), self.role.as_str());
        let message = format!("role `{needed}` required, but this token has the role `{role}`");
        Err(ApiError::new(StatusCode::FORBIDDEN, "forbidden", message))
    }
}

/// Extracts the principal in routes below [`require_authentication`].
impl<S: Sync> FromRequestParts<S> for Principal {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        // Without the middleware there is no principal, so the request is rejected.
        parts
            .extensions
            .get::<Self>()
            .cloned()
            .ok_or_else(|| unauthorized("authentication required"))
    }
}

/// The token of a request. Basic authentication (token as password) is accepted for reads only, because browsers also
/// send it with cross-origin requests.
fn presented_token(method: &Method, headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, rest) = value.split_once(' ')?;
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(rest.trim().to_owned());
    }
    if scheme.eq_ignore_ascii_case("basic") && is_read_only(method) {
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

/// Rejects cross-origin requests of browsers, also reads: they would cost resources although the other page cannot
/// see the response. Navigation to one of our pages is allowed.
pub(super) fn reject_cross_origin(
    method: &Method,
    path: &str,
    headers: &HeaderMap,
) -> Result<(), ApiError> {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let host = text("host").unwrap_or_default();
    let is_of_this_site = text("sec-fetch-site") != Some("cross-site");
    let is_followed = text("sec-fetch-mode") == Some("navigate")
        && text("sec-fetch-dest").is_none_or(|dest| dest == "document")
        && !path.starts_with(API_PREFIX);
    let is_ours = match text("origin").filter(|_| !is_read_only(method)) {
        Some(origin) => origin.split_once("://").is_some_and(|(_, authority)| authority == host),
        None => is_of_this_site || (is_read_only(method) && is_followed),
    };
    if is_ours {
        return Ok(());
    }
    let message = "cross-origin request rejected (CSRF protection)";
    Err(ApiError::new(StatusCode::FORBIDDEN, "other_page", message))
}

/// Without tokens, a foreign `Host` is DNS rebinding or a proxy that needs a token.
fn reject_non_loopback_host(headers: &HeaderMap) -> Result<(), ApiError> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next().and_then(|host| host.to_str().ok());
    if host.is_some_and(is_loopback) && hosts.next().is_none() {
        return Ok(());
    }
    let message =
        "no [[token]] is configured, so only requests with a loopback `Host` header are accepted";
    Err(ApiError::new(StatusCode::FORBIDDEN, "other_name", message))
}

/// Headers that a proxy adds.
const PROXY_HEADERS: [&str; 6] =
    ["forwarded", "via", "x-real-ip", "x-client-ip", "cf-connecting-ip", "true-client-ip"];

/// Without tokens, everybody behind a proxy on this machine would be an admin: many proxies send a loopback `Host`. HTTP/1.0
/// is what older versions of nginx use for `proxy_pass`, without a header of their own. A proxy that uses HTTP/1.1 and adds no
/// header cannot be recognized.
fn reject_proxied(version: Version, headers: &HeaderMap) -> Result<(), ApiError> {
    if version < Version::HTTP_11 {
        let message = "no [[token]] is configured, and requests in HTTP/1.0 usually come through a proxy; use HTTP/1.1, or configure a [[token]]";
        return Err(ApiError::new(StatusCode::FORBIDDEN, "proxied", message));
    }
    let is_of_a_proxy = |name: &HeaderName| {
        let name = name.as_str();
        PROXY_HEADERS.contains(&name) || name.starts_with("x-forwarded-")
    };
    let Some(name) = headers.keys().find(|name| is_of_a_proxy(name)) else { return Ok(()) };
    let message = format!(
        "no [[token]] is configured, and the request came through a proxy (header `{name}`); configure a [[token]]"
    );
    Err(ApiError::new(StatusCode::FORBIDDEN, "proxied", message))
}

/// Whether a `Host` header is exactly `localhost` or a loopback address, with an optional port. Anything that does
/// not parse as a whole (user information, two ports, trailing text) is not loopback.
pub(super) fn is_loopback(host: &str) -> bool {
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

    fn authenticator() -> Authenticator {
        let token = |name: &str, role, token: &str| TokenSettings {
            name: name.to_owned(),
            role,
            token: token.to_owned().into(),
            integrations: None,
        };
        Authenticator::new(&[
            token("ann", Role::Read, "aaaaaaaaaaaaaaaa"),
            token("bob", Role::Write, "bbbbbbbbbbbbbbbb"),
        ])
    }

    #[test]
    fn a_token_determines_name_and_role() {
        let principal = |value: &str| {
            authenticator().authenticate(
                &Method::POST,
                "/api/v1/x",
                Version::HTTP_11,
                &headers(&[("authorization", value)]),
            )
        };
        assert_eq!(principal("Bearer bbbbbbbbbbbbbbbb").unwrap().name, "bob");
        assert_eq!(principal("bearer aaaaaaaaaaaaaaaa").unwrap().role, Role::Read);
        for wrong in ["Bearer", "Bearer ", "Bearer aaaaaaaaaaaaaaab", "bbbbbbbbbbbbbbbb", "Basic x"]
        {
            assert_eq!(principal(wrong).unwrap_err().status(), StatusCode::UNAUTHORIZED, "{wrong}");
        }
        let none = authenticator().authenticate(&Method::GET, "/", Version::HTTP_11, &headers(&[]));
        assert_eq!(none.unwrap_err().status(), StatusCode::UNAUTHORIZED);
    }

    #[test]
    fn basic_authentication_allows_reads_only() {
        let encoded = base64::engine::general_purpose::STANDARD.encode(":bbbbbbbbbbbbbbbb");
        let basic = headers(&[("authorization", &format!("Basic {encoded}"))]);
        assert_eq!(
            authenticator().authenticate(&Method::GET, "/", Version::HTTP_11, &basic).unwrap().name,
            "bob"
        );
        assert!(
            authenticator().authenticate(&Method::POST, "/", Version::HTTP_11, &basic).is_err()
        );
    }

    #[test]
    fn without_tokens_cross_origin_and_foreign_hosts_are_rejected() {
        let open = Authenticator::new(&[]);
        let look =
            |pairs: &[_]| open.authenticate(&Method::GET, "/", Version::HTTP_11, &headers(pairs));
        let change = |pairs: &[_]| {
            open.authenticate(&Method::POST, "/api/v1/x", Version::HTTP_11, &headers(pairs))
        };
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
        assert!(open.authenticate(&Method::GET, "/", Version::HTTP_11, &two).is_err());
        let host = ("host", "localhost:8080");
        assert!(change(&[host, ("origin", "http://localhost:8080")]).is_ok());
        for other in ["https://evil.example", "null", "http://localhost:9999"] {
            let refused = change(&[host, ("origin", other)]).unwrap_err();
            assert_eq!(refused.code(), "other_page", "{other}");
        }
        assert!(change(&[host, ("sec-fetch-site", "cross-site")]).is_err());
    }

    #[test]
    fn without_tokens_requests_through_a_proxy_are_rejected() {
        let (open, host) = (Authenticator::new(&[]), ("host", "localhost:8080"));
        for name in ["x-forwarded-for", "x-forwarded-proto", "forwarded", "via", "x-real-ip"] {
            let proxied = headers(&[host, (name, "10.0.0.7")]);
            let refused =
                open.authenticate(&Method::GET, "/", Version::HTTP_11, &proxied).unwrap_err();
            assert_eq!(refused.code(), "proxied", "{name}");
            let bearer = ("authorization", "Bearer bbbbbbbbbbbbbbbb");
            let proxied = headers(&[host, (name, "10.0.0.7"), bearer]);
            assert!(
                authenticator().authenticate(&Method::GET, "/", Version::HTTP_11, &proxied).is_ok(),
                "{name}"
            );
        }
    }

    #[test]
    fn without_tokens_requests_in_http_1_0_are_rejected() {
        let (open, host) = (Authenticator::new(&[]), ("host", "localhost:8080"));
        let look = |authenticator: &Authenticator, version, pairs: &[_]| {
            authenticator.authenticate(&Method::GET, "/", version, &headers(pairs))
        };
        for version in [Version::HTTP_11, Version::HTTP_2] {
            assert!(look(&open, version, &[host]).is_ok(), "{version:?}");
        }
        let refused = look(&open, Version::HTTP_10, &[host]).unwrap_err();
        assert_eq!(refused.code(), "proxied");
        let bearer = ("authorization", "Bearer bbbbbbbbbbbbbbbb");
        assert!(look(&authenticator(), Version::HTTP_10, &[host, bearer]).is_ok());
    }

    #[test]
    fn cross_origin_navigation_to_a_page_is_allowed_and_nothing_else() {
        let open = Authenticator::new(&[]);
        let look = |path: &str, site: &str, mode: &str, dest: &str| {
            let pairs = [
                ("host", "localhost:8080"),
                ("sec-fetch-site", site),
                ("sec-fetch-mode", mode),
                ("sec-fetch-dest", dest),
            ];
            open.authenticate(&Method::GET, path, Version::HTTP_11, &headers(&pairs))
                .map_err(|refusal| refusal.code())
        };
        for path in ["/", "/metrics", "/api/v1/sql", "/api/v1/doctor"] {
            for (mode, dest) in [("no-cors", "image"), ("cors", "empty"), ("navigate", "iframe")] {
                assert_eq!(look(path, "cross-site", mode, dest), Err("other_page"), "{path}");
                assert!(look(path, "same-origin", mode, dest).is_ok(), "{path} {mode}");
                assert!(look(path, "none", mode, dest).is_ok(), "{path} {mode}");
            }
        }
        assert!(look("/", "cross-site", "navigate", "document").is_ok());
        let refused = look("/api/v1/sql", "cross-site", "navigate", "document");
        assert_eq!(refused, Err("other_page"), "the API has no pages");
    }

    #[test]
    fn a_role_includes_lower_roles() {
        let principal = Principal::unlimited("ann", Role::Write);
        assert!(
            principal.require_role(Role::Read).is_ok()
                && principal.require_role(Role::Write).is_ok()
        );
        assert_eq!(
            principal.require_role(Role::Admin).unwrap_err().status(),
            StatusCode::FORBIDDEN
        );
    }
}
