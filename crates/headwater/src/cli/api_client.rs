//! Client of the HTTP API: over the network, or in this process.
//!
//! Guarantees: both return the same results; an unreachable server is exit code 3 within [`CONNECT_TIMEOUT`], or when
//! `in_process.rs` stops retrying; tokens are never printed.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode, header};
use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt, TryStreamExt};
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use tower::ServiceExt;

use crate::cli::in_process::{InProcessApi, Requirements};
use crate::cli::local_audit;
use crate::cli::output::OutputRows;
use crate::cli::progress;
use crate::config::{Settings, shown_url};
use crate::exit::CliError;
use crate::http::{ErrorCause, NOT_FOUND_MESSAGE};
use crate::http_client;

/// Timeouts of a connection and of a response.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a rate-limited request is retried, each time after the `Retry-After` of the server.
const RATE_LIMIT_RETRIES: usize = 30;
/// Variable with the token.
const TOKEN_VARIABLE: &str = "HEADWATER_TOKEN";
/// Maximum bytes of a response, or of one line or event of it; and of an error response.
const RESPONSE_BYTES_MAX: usize = 256 * 1024 * 1024;
const ERROR_BYTES_MAX: usize = 64 * 1024;

/// A connection to the API.
pub(super) enum ApiClient {
    /// Over the network.
    Network { client: reqwest::Client, base: String, token: Option<SecretString> },
    /// In this process.
    InProcess(Box<InProcessApi>),
}

impl ApiClient {
    /// Connects to the server at `url`.
    pub(super) fn network(url: &str) -> Result<Self, CliError> {
        let base = url.trim_end_matches('/').to_owned();
        if !base.starts_with("http://") && !base.starts_with("https://") {
            return Err(CliError::usage(format!(
                "invalid --url `{url}`; it must begin with http:// or https://"
            )));
        }
        http_client::install_tls_provider();
        let client = reqwest::Client::builder().connect_timeout(CONNECT_TIMEOUT).build();
        let client = client
            .map_err(|error| CliError::new(format!("failed to build the HTTP client: {error}")))?;
        let token =
            std::env::var(TOKEN_VARIABLE).ok().filter(|token| !token.is_empty()).map(Into::into);
        Ok(Self::Network { client, base, token })
    }

    /// Opens the backends of the settings.
    pub(super) async fn in_process(
        settings: &Settings,
        requirements: Requirements,
    ) -> Result<Self, CliError> {
        Ok(Self::InProcess(Box::new(InProcessApi::open(settings, requirements).await?)))
    }

    /// GET.
    pub(super) async fn get(
        &self,
        path: &str,
        query: &[(&str, String)],
    ) -> Result<Value, CliError> {
        self.call(Method::GET, path, query, None).await
    }

    /// GET; `None` if the object does not exist.
    pub(super) async fn get_optional(
        &self,
        path: &str,
        query: &[(&str, String)],
    ) -> Result<Option<Value>, CliError> {
        match self.get(path, query).await {
            Ok(found) => Ok(Some(found)),
            Err(CliError::NotFound(_)) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// POST.
    pub(super) async fn post(&self, path: &str, body: Value) -> Result<Value, CliError> {
        self.call(Method::POST, path, &[], Some(body)).await
    }

    /// POST without a response timeout, for long operations.
    pub(super) async fn post_long(&self, path: &str, body: Value) -> Result<Value, CliError> {
        parse_json(&read_whole(self.stream(Method::POST, path, &[], Some(body)).await?).await?)
    }

    /// GET: the response as it is.
    pub(super) async fn text(&self, path: &str) -> Result<String, CliError> {
        let bytes = read_whole(self.stream(Method::GET, path, &[], None).await?).await?;
        String::from_utf8(bytes).map_err(|_| CliError::new("the response is not UTF-8"))
    }

    /// DELETE.
    pub(super) async fn delete(&self, path: &str) -> Result<Value, CliError> {
        self.call(Method::DELETE, path, &[], None).await
    }

    /// Reads pages of a list, up to `limit` items; `field` is the array in each page. Returns whether there may be
    /// more.
    pub(super) async fn pages(
        &self,
        path: &str,
        query: &[(&str, String)],
        field: &str,
        limit: usize,
        mut show: impl FnMut(Value),
    ) -> Result<bool, CliError> {
        let mut left = limit;
        let mut cursor = None;
        while left > 0 {
            let mut query = query.to_vec();
            query.push(("limit", left.min(100).to_string()));
            query.extend(cursor.map(|cursor| ("cursor", cursor)));
            let mut page = self.get(path, &query).await?;
            if let Value::Array(items) = page[field].take() {
                for item in items.into_iter().take(left) {
                    left -= 1;
                    show(item);
                }
            }
            match page["next_cursor"].take() {
                Value::String(next) => cursor = Some(next),
                Value::Number(next) => cursor = Some(next.to_string()),
                _ => return Ok(false),
            }
        }
        Ok(cursor.is_some())
    }

    /// Prints a list, one row per item.
    pub(super) async fn show_pages(
        &self,
        mut rows: OutputRows,
        path: &str,
        query: &[(&str, String)],
        field: &str,
        limit: usize,
    ) -> Result<(), CliError> {
        let reading = self.pages(path, query, field, limit, |item| rows.add(&item));
        if progress::waiting(format!("reading {}", field.replace('_', " ")), reading).await? {
            rows.note_more();
        }
        rows.finish()
    }

    /// All items of a list as one array.
    pub(super) async fn all_pages(
        &self,
        path: &str,
        query: &[(&str, String)],
        field: &str,
        limit: usize,
    ) -> Result<Value, CliError> {
        let mut found = Vec::new();
        let reading = self.pages(path, query, field, limit, |item| found.push(item));
        progress::waiting(format!("reading {field}"), reading).await?;
        Ok(Value::Array(found))
    }

    /// GET: the data of server-sent events.
    pub(super) async fn events(
        &self,
        path: &str,
        query: &[(&str, String)],
    ) -> Result<BoxStream<'static, Result<Value, CliError>>, CliError> {
        Ok(self.named_events(path, query).await?.map_ok(|(_, data)| data).boxed())
    }

    /// GET: the names and data of server-sent events.
    pub(super) async fn named_events(
        &self,
        path: &str,
        query: &[(&str, String)],
    ) -> Result<BoxStream<'static, Result<(String, Value), CliError>>, CliError> {
        Ok(parse_events(self.stream(Method::GET, path, query, None).await?).boxed())
    }

    /// GET: the lines of the response.
    pub(super) async fn lines(
        &self,
        path: &str,
        query: &[(&str, String)],
    ) -> Result<BoxStream<'static, Result<String, CliError>>, CliError> {
        Ok(lines_of(self.stream(Method::GET, path, query, None).await?).boxed())
    }

    /// POST: the lines of the response.
    pub(super) async fn post_lines(
        &self,
        path: &str,
        body: Value,
    ) -> Result<BoxStream<'static, Result<String, CliError>>, CliError> {
        Ok(lines_of(self.stream(Method::POST, path, &[], Some(body)).await?).boxed())
    }

    async fn stream(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, String)],
        body: Option<Value>,
    ) -> Result<BoxStream<'static, Result<Bytes, CliError>>, CliError> {
        match self {
            Self::Network { base, .. } => {
                let response = self.send(method, path, query, body, None).await?;
                let base = base.clone();
                let broken = move |error: reqwest::Error| unreachable(&base, &error);
                Ok(response.bytes_stream().map_err(broken).boxed())
            }
            Self::InProcess(api) => {
                let body = body.map(|body| Body::from(body.to_string()));
                let response = call_in_process(&api.routes, method, path, query, body).await?;
                let body = response.into_body().into_data_stream();
                Ok(body.map_err(|error| CliError::new(error.to_string())).boxed())
            }
        }
    }

    /// POST of a streamed body.
    pub(super) async fn upload(
        &self,
        path: &str,
        pieces: BoxStream<'static, std::io::Result<Bytes>>,
    ) -> Result<Value, CliError> {
        let bytes = match self {
            Self::Network { client, base, token } => {
                let mut request = client.post(format!("{base}{}", request_uri(path, &[])));
                if let Some(token) = token {
                    request = request.bearer_auth(token.expose_secret());
                }
                let response = request.body(reqwest::Body::wrap_stream(pieces)).send().await;
                let response = response.map_err(|error| unreachable(base, &error))?;
                read_network_body(base, check_status(response).await?).await?
            }
            Self::InProcess(api) => {
                let body = Some(Body::from_stream(pieces));
                let response = call_in_process(&api.routes, Method::POST, path, &[], body).await?;
                read_body(response).await?
            }
        };
        parse_json(&bytes)
    }

    /// Closes the backends that were opened.
    pub(super) async fn close(self) {
        if let Self::InProcess(api) = self {
            api.close().await;
        }
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, String)],
        body: Option<Value>,
    ) -> Result<Value, CliError> {
        // No route has an empty part; only an empty name in an argument makes one.
        if path.split('/').skip(1).any(str::is_empty) {
            return Err(CliError::usage("a name or an id is empty"));
        }
        let bytes = match self {
            Self::Network { base, .. } => {
                let response = self.send(method, path, query, body, Some(RESPONSE_TIMEOUT)).await?;
                read_network_body(base, response).await?
            }
            Self::InProcess(api) => {
                let body = body.map(|body| Body::from(body.to_string()));
                read_body(call_in_process(&api.routes, method, path, query, body).await?).await?
            }
        };
        parse_json(&bytes)
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, String)],
        body: Option<Value>,
        limit: Option<Duration>,
    ) -> Result<reqwest::Response, CliError> {
        let Self::Network { client, base, token } = self else {
            return Err(CliError::new("not connected to a server"));
        };
        let mut request = client.request(method, format!("{base}{}", request_uri(path, query)));
        if let Some(token) = token {
            request = request.bearer_auth(token.expose_secret());
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        if let Some(limit) = limit {
            request = request.timeout(limit);
        }
        // A rate-limited request had no effect, so it can be repeated.
        for _ in 0..RATE_LIMIT_RETRIES {
            let Some(again) = request.try_clone() else { break };
            let response = again.send().await.map_err(|error| unreachable(base, &error))?;
            if response.status() != StatusCode::TOO_MANY_REQUESTS {
                return check_status(response).await;
            }
            let after = response.headers().get(header::RETRY_AFTER);
            let after = after.and_then(|after| after.to_str().ok()?.parse().ok()).unwrap_or(1);
            let body = http_client::read_prefix(response, ERROR_BYTES_MAX).await;
            let error = serde_json::from_slice::<Value>(&body).unwrap_or_default();
            if error["error"]["code"] != "too_many_requests" {
                return Err(to_cli_error(StatusCode::TOO_MANY_REQUESTS, &body));
            }
            tokio::time::sleep(Duration::from_secs(after).min(CONNECT_TIMEOUT)).await;
        }
        let response = request.send().await.map_err(|error| unreachable(base, &error))?;
        check_status(response).await
    }
}

async fn check_status(response: reqwest::Response) -> Result<reqwest::Response, CliError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let url = response.url().clone();
    let body = http_client::read_prefix(response, ERROR_BYTES_MAX).await;
    // A 404 without our error format comes from another program; one for an unknown path means a wrong base URL.
    let error = serde_json::from_slice::<Value>(&body).unwrap_or_default();
    let message = error["error"]["message"].as_str();
    if status == StatusCode::NOT_FOUND && message.is_none_or(|message| message == NOT_FOUND_MESSAGE)
    {
        let url = shown_url(url.as_str());
        return Err(CliError::new(format!(
            "no Headwater API at {url}; --url must be http://HOST:PORT"
        )));
    }
    Err(to_cli_error(status, &body))
}

/// Reads a response from the network, up to the limit.
async fn read_network_body(base: &str, mut response: reqwest::Response) -> Result<Bytes, CliError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| unreachable(base, &error))? {
        if bytes.len() + chunk.len() > RESPONSE_BYTES_MAX {
            return Err(response_too_long());
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes.into())
}

async fn read_whole(
    mut pieces: BoxStream<'static, Result<Bytes, CliError>>,
) -> Result<Vec<u8>, CliError> {
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.next().await {
        bytes.extend_from_slice(&piece?);
        if bytes.len() > RESPONSE_BYTES_MAX {
            return Err(response_too_long());
        }
    }
    Ok(bytes)
}

fn response_too_long() -> CliError {
    CliError::new(format!("response exceeds {RESPONSE_BYTES_MAX} bytes; request less data"))
}

async fn read_body(response: axum::response::Response) -> Result<Bytes, CliError> {
    let bytes = axum::body::to_bytes(response.into_body(), RESPONSE_BYTES_MAX).await;
    bytes.map_err(|error| CliError::new(error.to_string()))
}

fn parse_json(bytes: &[u8]) -> Result<Value, CliError> {
    serde_json::from_slice(bytes)
        .map_err(|error| CliError::new(format!("invalid JSON in response: {error}")))
}

async fn call_in_process(
    routes: &Router,
    method: Method,
    path: &str,
    query: &[(&str, String)],
    body: Option<Body>,
) -> Result<axum::response::Response, CliError> {
    let request = Request::builder()
        .method(method)
        .uri(request_uri(path, query))
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.unwrap_or_default());
    let mut request = request.map_err(|error| CliError::usage(error.to_string()))?;
    request.extensions_mut().insert(local_audit::principal());
    let response = routes.clone().oneshot(request).await;
    let response = response.unwrap_or_else(|never| match never {});
    if response.status().is_success() {
        return Ok(response);
    }
    let status = response.status();
    let cause = response.extensions().get::<ErrorCause>().cloned();
    let body =
        axum::body::to_bytes(response.into_body(), RESPONSE_BYTES_MAX).await.unwrap_or_default();
    // There is no server with a log.
    Err(match (to_cli_error(status, &body), cause) {
        (CliError::Unreachable(message), Some(ErrorCause(cause))) => {
            CliError::Unreachable(format!("{message}: {cause}"))
        }
        (CliError::Failed(_), Some(ErrorCause(cause))) => CliError::new(cause),
        (error, _) => error,
    })
}

/// Path and query, percent-encoded.
fn request_uri(path: &str, query: &[(&str, String)]) -> String {
    let mut request_uri = format!("/api/v1{path}");
    for (index, (name, value)) in query.iter().enumerate() {
        request_uri.push(if index == 0 { '?' } else { '&' });
        request_uri.push_str(name);
        request_uri.push('=');
        request_uri.push_str(&escape(value));
    }
    request_uri
}

/// Encodes one path segment or query value.
pub(super) use crate::text::percent_encoded as escape;

fn unreachable(base: &str, error: &reqwest::Error) -> CliError {
    let (base, why) = (shown_url(base), http_client::describe(error));
    // Reported by the TLS library when the server does not use TLS.
    if base.starts_with("https://") && why.contains("InvalidContentType") {
        return CliError::Unreachable(format!(
            "{base} is unreachable: the server uses http, not https; fix --url"
        ));
    }
    CliError::Unreachable(format!("{base} is unreachable: {why}; start the server, or fix --url"))
}

/// Maps an error response to an exit code: 400 is a usage error, 502 and 503 are unreachable.
fn to_cli_error(status: StatusCode, body: &[u8]) -> CliError {
    let error = serde_json::from_slice::<Value>(body).unwrap_or_default();
    let message =
        error["error"]["message"].as_str().unwrap_or("the server returned no message").to_owned();
    match status {
        StatusCode::BAD_REQUEST => CliError::usage(message),
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::BAD_GATEWAY => CliError::Unreachable(message),
        StatusCode::NOT_FOUND => CliError::NotFound(message),
        StatusCode::UNAUTHORIZED => {
            CliError::new(format!("{message}; set {TOKEN_VARIABLE} to a valid token"))
        }
        _ => CliError::new(message),
    }
}

/// The error in the last line of a streamed response; `None` for any other line.
pub(super) fn error_in_line(line: &Value) -> Option<CliError> {
    let error = line.get("error")?;
    let message = error["message"].as_str().unwrap_or("the server returned no message").to_owned();
    Some(match error["code"].as_str() {
        Some("invalid") => CliError::usage(message),
        Some("unavailable") => CliError::Unreachable(message),
        Some("not_found") => CliError::NotFound(message),
        _ => CliError::new(message),
    })
}

/// The name and the JSON data of each server-sent event.
fn parse_events(
    chunks: BoxStream<'static, Result<Bytes, CliError>>,
) -> impl futures_util::Stream<Item = Result<(String, Value), CliError>> {
    split_on(chunks, b"\n\n").filter_map(|event| async {
        let text = match event {
            Ok(text) => text,
            Err(failure) => return Some(Err(failure)),
        };
        let data = text.lines().filter_map(|line| line.strip_prefix("data:"));
        let data: Vec<&str> = data.map(str::trim_start).collect();
        if data.is_empty() {
            return None;
        }
        let name = text.lines().find_map(|line| line.strip_prefix("event:"));
        let name = name.unwrap_or("message").trim().to_owned();
        let value = serde_json::from_str(&data.join("\n")).map(|value| (name, value));
        Some(value.map_err(|error| CliError::new(format!("invalid JSON in event: {error}"))))
    })
}

/// The non-empty lines.
fn lines_of(
    chunks: BoxStream<'static, Result<Bytes, CliError>>,
) -> impl futures_util::Stream<Item = Result<String, CliError>> {
    let is_some = |line: &Result<String, CliError>| {
        let is_empty = line.as_ref().is_ok_and(|line| line.trim().is_empty());
        std::future::ready(!is_empty)
    };
    split_on(chunks, b"\n").filter(is_some)
}

/// Splits a stream at separators. An incomplete part at the end is dropped.
fn split_on(
    chunks: BoxStream<'static, Result<Bytes, CliError>>,
    separator: &'static [u8],
) -> BoxStream<'static, Result<String, CliError>> {
    // `from` is where the search continues, so that no byte is searched twice.
    let state = (chunks, Vec::<u8>::new(), 0);
    let pieces = futures_util::stream::try_unfold(
        state,
        move |(mut chunks, mut buffer, mut from)| async move {
            loop {
                let found =
                    buffer[from..].windows(separator.len()).position(|some| some == separator);
                if let Some(found) = found {
                    let piece: Vec<u8> = buffer.drain(..from + found + separator.len()).collect();
                    let text = String::from_utf8_lossy(&piece[..from + found]).into_owned();
                    return Ok(Some((text, (chunks, buffer, 0))));
                }
                from = buffer.len().saturating_sub(separator.len() - 1);
                match chunks.next().await {
                    Some(_) if buffer.len() > RESPONSE_BYTES_MAX => return Err(response_too_long()),
                    Some(chunk) => buffer.extend_from_slice(&chunk?),
                    None => return Ok(None),
                }
            }
        },
    );
    pieces.boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_characters_are_percent_encoded() {
        assert_eq!(escape("a/b?c=d ü"), "a%2Fb%3Fc%3Dd%20%C3%BC");
        let query = [("from", "2026-11-15T10:00:00+01:00".to_owned())];
        assert_eq!(
            request_uri("/topics", &query),
            "/api/v1/topics?from=2026-11-15T10%3A00%3A00%2B01%3A00"
        );
    }

    #[tokio::test]
    async fn events_are_parsed_across_any_chunk_boundary() {
        let whole = ": hello\n\nevent: status\ndata: {\"n\":1}\n\ndata: {\"n\":\ndata: 2}\n\n";
        for size in 1..whole.len() {
            let chunks: Vec<_> = whole
                .as_bytes()
                .chunks(size)
                .map(|chunk| Ok(Bytes::copy_from_slice(chunk)))
                .collect();
            let events = parse_events(futures_util::stream::iter(chunks).boxed());
            let events: Vec<_> = events.map(Result::unwrap).collect().await;
            let (names, numbers): (Vec<_>, Vec<_>) =
                events.into_iter().map(|(name, data)| (name, data["n"].clone())).unzip();
            assert_eq!(names, ["status", "message"], "cut into {size}");
            assert_eq!(numbers, [1, 2], "cut into {size}");
        }
    }
}
