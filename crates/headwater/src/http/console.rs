//! Authentication of the web console: login, logout, and who may see its pages.
//!
//! Upstream: `router.rs`. Downstream: the crate `headwater-console`, whose calls of the API run here with the identity of
//! the caller. Guarantees: without tokens only this machine is served, as everywhere; with tokens a page needs the
//! cookie of a login (`console_session.rs`) or an `Authorization` header. A change with a cookie needs an `Origin` header
//! of this host (CSRF protection). Attempts to log in are limited per client and audited. The cookie is accepted by the
//! console only, not by the API.

use axum::extract::{Request, State};
use axum::http::{Extensions, HeaderMap, Method, StatusCode, Version, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use axum::{Extension, Form, Router};
use headwater_console::{ConsoleRole, ConsoleUser, NotBegun, error_page, login_page};
use headwater_stream::clock::{Clock, SystemClock};
use serde::Deserialize;
use std::sync::Arc;
use tokio::time::Instant;
use tracing::warn;

use crate::config::Role;
use crate::http::audit::ChangeBegun;
use crate::http::auth::{self, Principal, is_read_only};
use crate::http::client_address::{ClientAddress, client_of};
use crate::http::console_session::{presented_cookie, set_cookie};
use crate::http::{ApiError, BodyMemory, audit, timeouts};
use crate::server::app_state::HttpServer;

const LOGIN: &str = "/console/login";
const LOGOUT: &str = "/console/logout";
const HOME: &str = headwater_console::PREFIX;

/// Maximum bytes of a path to return to after the login.
const NEXT_BYTES_MAX: usize = 2000;

/// All pages. `api` are the routes below `/api/v1`.
pub(super) fn routes(server: &HttpServer, api: Router<HttpServer>) -> Router<HttpServer> {
    // The last layer is the outermost: check the role, write the audit entry, then run the route.
    let api = api
        .layer(from_fn_with_state(Arc::clone(&server.app.audit), audit::record))
        .layer(from_fn_with_state(server.clone(), auth::require_role))
        .layer(from_fn_with_state(server.clone(), fail_fast))
        .with_state(server.clone());
    let pages = headwater_console::routes(api, server.app.shutdown.token())
        .layer(from_fn_with_state(server.clone(), require_user));
    Router::new()
        .route(LOGIN, get(show_login).post(log_in))
        .route(LOGOUT, post(log_out))
        .with_state(server.clone())
        .merge(headwater_console::asset_routes())
        .merge(pages)
        .with_state(())
}

/// Middleware: answers at once while the database is unavailable, instead of waiting for a connection. Says whether a change has begun.
async fn fail_fast(State(server): State<HttpServer>, mut request: Request, next: Next) -> Response {
    let needs_database = timeouts::needs_database(request.uri().path());
    // The entry in the audit log needs the database, although the change may not.
    if !needs_database && !audit::is_recorded(&request) {
        return next.run(request).await;
    }
    let begun = ChangeBegun::default();
    request.extensions_mut().insert(begun.clone());
    let cut_off = async {
        server.database.wait_unavailable().await;
        if !needs_database && begun.is_set() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        biased;
        response = next.run(request) => response,
        () = cut_off => {
            let refusal = ApiError::unavailable("database refuses connections; try again later");
            let mark = (!begun.is_set()).then_some(Extension(NotBegun));
            (mark, refusal).into_response()
        }
    }
}

/// Middleware: finds out who calls, and adds a [`ConsoleUser`].
async fn require_user(
    State(server): State<HttpServer>,
    mut request: Request,
    next: Next,
) -> Response {
    let (method, uri, headers) = (request.method(), request.uri(), request.headers());
    let version = request.version();
    let (principal, has_session) = match authenticate(&server, method, uri.path(), version, headers)
    {
        Ok(found) => found,
        Err(refusal) if refusal.code() == NO_SESSION && is_read_only(method) => {
            let address = uri.path_and_query().map_or(HOME, |address| address.as_str());
            return Redirect::to(&format!("{LOGIN}?next={}", encoded(address))).into_response();
        }
        Err(refusal) => return refused(&refusal),
    };
    let user = to_user(principal, has_session, request.extensions());
    request.extensions_mut().insert(user);
    next.run(request).await
}

/// Code of a refusal that a login can resolve.
const NO_SESSION: &str = "not_logged_in";

/// The caller, and whether a cookie says so.
fn authenticate(
    server: &HttpServer,
    method: &Method,
    path: &str,
    version: Version,
    headers: &HeaderMap,
) -> Result<(Principal, bool), ApiError> {
    let authenticator = &server.authenticator;
    let has_header = headers.contains_key(header::AUTHORIZATION);
    let found = if has_header || authenticator.tokens().is_empty() {
        (authenticator.authenticate(method, path, version, headers)?, false)
    } else {
        auth::reject_cross_origin(method, path, headers)?;
        let cookie = presented_cookie(headers);
        let principal =
            cookie.and_then(|it| authenticator.principal_of_cookie(it, SystemClock.now()));
        let message = "not logged in, or the login has expired; log in again";
        let refusal = || ApiError::new(StatusCode::UNAUTHORIZED, NO_SESSION, message);
        (principal.ok_or_else(refusal)?, true)
    };
    // A program that sends a token is no browser that was tricked into it.
    if !is_read_only(method) && !has_header {
        require_origin(headers)?;
    }
    Ok(found)
}

/// Browsers send `Origin` with every form; [`auth::reject_cross_origin`] has compared it.
fn require_origin(headers: &HeaderMap) -> Result<(), ApiError> {
    if headers.contains_key(header::ORIGIN) {
        return Ok(());
    }
    let message = "request without an `Origin` header rejected (CSRF protection)";
    Err(ApiError::new(StatusCode::FORBIDDEN, "no_origin", message))
}

fn to_user(principal: Principal, has_session: bool, extensions: &Extensions) -> ConsoleUser {
    let role = match principal.role {
        Role::Read => ConsoleRole::Read,
        Role::Write => ConsoleRole::Write,
        Role::Admin => ConsoleRole::Admin,
    };
    let mut forwarded = Extensions::new();
    if let Some(client) = extensions.get::<ClientAddress>() {
        forwarded.insert(*client);
    }
    if let Some(memory) = extensions.get::<Arc<BodyMemory>>() {
        forwarded.insert(Arc::clone(memory));
    }
    let name = principal.name.clone();
    // Names of integrations have no comma.
    let view = principal.integrations.as_ref().map_or(String::new(), |all| all.join(","));
    forwarded.insert(principal);
    ConsoleUser { name, role, view, has_session, forwarded }
}

fn refused(refusal: &ApiError) -> Response {
    error_page(refusal.status(), refusal.code(), refusal.message())
}

/// The path to return to, if it is a page of the console.
fn checked_next(next: &str) -> &str {
    let is_path = next == HOME
        || next
            .strip_prefix(HOME)
            .is_some_and(|rest| rest.starts_with('/') || rest.starts_with('?'));
    let is_plain = next.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\');
    let is_login = next.starts_with(LOGIN) || next.starts_with(LOGOUT);
    if is_path && is_plain && !is_login && next.len() <= NEXT_BYTES_MAX { next } else { HOME }
}

fn encoded(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
}

/// Form of a login.
#[derive(Deserialize)]
struct LoginForm {
    #[serde(default)]
    token: String,
    #[serde(default)]
    next: String,
}

async fn show_login(State(server): State<HttpServer>, request: Request) -> Response {
    if server.authenticator.tokens().is_empty() {
        return Redirect::to(HOME).into_response();
    }
    let query = request.uri().query().unwrap_or_default();
    let next = query.split('&').find_map(|pair| pair.strip_prefix("next=")).unwrap_or_default();
    let next = percent_encoding::percent_decode_str(next).decode_utf8_lossy().into_owned();
    login_page(StatusCode::OK, checked_next(&next), None)
}

async fn log_in(State(server): State<HttpServer>, request: Request) -> Response {
    let headers = request.headers().clone();
    let method = request.method();
    let checked =
        auth::reject_cross_origin(method, LOGIN, &headers).and_then(|()| require_origin(&headers));
    if let Err(refusal) = checked {
        return refused(&refusal);
    }
    let network = client_of(&request);
    let client = request.extensions().get::<ClientAddress>().copied();
    if let Err(wait) = server.authenticator.login_limiter.take(network, Instant::now()) {
        warn!(client = ?network, "too many attempts to log in to the console");
        let message = format!("too many attempts; try again in {} s", wait.as_secs() + 1);
        return login_page(StatusCode::TOO_MANY_REQUESTS, HOME, Some(&message));
    }
    let form =
        <Form<LoginForm> as axum::extract::FromRequest<()>>::from_request(request, &()).await;
    let Ok(Form(form)) = form else {
        return refused(&ApiError::invalid("the form is not readable"));
    };
    let next = checked_next(&form.next).to_owned();
    let found = server.authenticator.log_in(form.token.trim(), SystemClock.now());
    let status = if found.is_some() { StatusCode::SEE_OTHER } else { StatusCode::UNAUTHORIZED };
    let principal = found.as_ref().map(|(principal, _)| principal);
    let audited = server.app.audit.record_login(principal, client, LOGIN, status.as_u16()).await;
    if audited.is_err() {
        // A login changes nothing, and is needed most while the database is unavailable.
        let name = principal.map(|principal| principal.name.as_str());
        warn!(client = ?network, name, status = status.as_u16(), "login to the console without an audit entry");
    }
    match found {
        Some((_, cookie)) => {
            let cookie = [(header::SET_COOKIE, set_cookie(&headers, &cookie))];
            (cookie, Redirect::to(&next)).into_response()
        }
        None => login_page(status, &next, Some("This token is not known.")),
    }
}

async fn log_out(headers: HeaderMap) -> Response {
    let checked = auth::reject_cross_origin(&Method::POST, LOGOUT, &headers);
    if let Err(refusal) = checked.and_then(|()| require_origin(&headers)) {
        return refused(&refusal);
    }
    let cookie = [(header::SET_COOKIE, set_cookie(&headers, ""))];
    (cookie, Redirect::to(LOGIN)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_returns_only_to_pages_of_the_console() {
        for page in ["/console", "/console/issues?status=queued", "/console?done=closed"] {
            assert_eq!(checked_next(page), page);
        }
        for other in [
            "",
            "/",
            "//evil.example",
            "https://evil.example",
            "/consoleevil",
            "/console\\evil",
            "/console/\r\nx",
            "/console/login?next=/console",
            "/console/logout",
            "/api/v1/issues",
        ] {
            assert_eq!(checked_next(other), HOME, "{other}");
        }
        assert_eq!(checked_next(&format!("/console/{}", "x".repeat(NEXT_BYTES_MAX))), HOME);
    }
}
