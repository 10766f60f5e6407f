//! The way to the routes of `admin`: over the network, or in this process.
//!
//! Promises: both give the same answers; a server that cannot be reached is exit code 3 within [`CONNECT_MAX`] or as soon
//! as `local` gives up; a token is never printed.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode, header};
use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt, TryStreamExt};
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use tower::ServiceExt;

use crate::cli::in_process::{Local, Needs};
use crate::cli::local_audit;
use crate::cli::output::Rows;
use crate::config::{Settings, shown_url};
use crate::exit::Failure;
use crate::http::NOTHING_HERE;
use crate::http_client;

/// How long a connection to a server may take, and an answer.
const CONNECT_MAX: Duration = Duration::from_secs(5);
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// How often a request is sent again that came too soon; each time after as long as the server says.
const TOO_SOON_MAX: usize = 30;
/// The variable that holds the token.
const TOKEN: &str = "HEADWATER_TOKEN";
/// Bytes of an answer, or of one line or event of it; and of a refusal.
const ANSWER_BYTES_MAX: usize = 256 * 1024 * 1024;
const REFUSAL_BYTES_MAX: usize = 64 * 1024;

/// The way to the routes.
pub(super) enum Client {
    /// Over the network.
    Network { client: reqwest::Client, base: String, token: Option<SecretString> },
    /// In this process, on what it opened.
    InProcess(Box<Local>),
}

impl Client {
    /// To this server.
    pub(super) fn network(url: &str) -> Result<Self, Failure> {
        let base = url.trim_end_matches('/').to_owned();
        if !base.starts_with("http://") && !base.starts_with("https://") {
            return Err(Failure::usage(format!(
                "--url is `{url}`; it must begin with http:// or https://"
            )));
        }
        http_client::choose_tls();
        let client = reqwest::Client::builder().connect_timeout(CONNECT_MAX).build();
        let client = client.map_err(|error| Failure::new(format!("no HTTP client: {error}")))?;
        let token = std::env::var(TOKEN).ok().filter(|token| !token.is_empty()).map(Into::into);
        Ok(Self::Network { client, base, token })
    }

    /// On the servers of the settings.
    pub(super) async fn in_process(settings: &Settings, needs: Needs) -> Result<Self, Failure> {
        Ok(Self::InProcess(Box::new(Local::open(settings, needs).await?)))
    }

    /// Asks for something.
    pub(super) async fn get(&self, path: &str, query: &[(&str, String)]) -> Result<Value, Failure> {
        self.call(Method::GET, path, query, None).await
    }

    /// Asks for something that may not be there.
    pub(super) async fn find(
        &self,
        path: &str,
        query: &[(&str, String)],
    ) -> Result<Option<Value>, Failure> {
        match self.get(path, query).await {
            Ok(found) => Ok(Some(found)),
            Err(Failure::Missing(_)) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Wants something done.
    pub(super) async fn post(&self, path: &str, body: Value) -> Result<Value, Failure> {
        self.call(Method::POST, path, &[], Some(body)).await
    }

    /// The same for what may take as long as it is long.
    pub(super) async fn post_long(&self, path: &str, body: Value) -> Result<Value, Failure> {
        let mut pieces = self.stream(Method::POST, path, &[], Some(body)).await?;
        let mut bytes = Vec::new();
        while let Some(piece) = pieces.next().await {
            bytes.extend_from_slice(&piece?);
            if bytes.len() > ANSWER_BYTES_MAX {
                return Err(too_long());
            }
        }
        parsed(&bytes)
    }

    /// Wants something gone.
    pub(super) async fn delete(&self, path: &str) -> Result<Value, Failure> {
        self.call(Method::DELETE, path, &[], None).await
    }

    /// All pages of a list, `limit` items at most; each page has its items under `field`. Returns whether there may be more.
    pub(super) async fn pages(
        &self,
        path: &str,
        query: &[(&str, String)],
        field: &str,
        limit: usize,
        mut show: impl FnMut(Value),
    ) -> Result<bool, Failure> {
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

    /// Shows all pages of a list, each item as a row.
    pub(super) async fn show_pages(
        &self,
        mut rows: Rows,
        path: &str,
        query: &[(&str, String)],
        field: &str,
        limit: usize,
    ) -> Result<(), Failure> {
        if self.pages(path, query, field, limit, |item| rows.add(&item)).await? {
            rows.note_more();
        }
        rows.finish()
    }

    /// All pages of a list as one.
    pub(super) async fn all(
        &self,
        path: &str,
        field: &str,
        limit: usize,
    ) -> Result<Value, Failure> {
        let mut found = Vec::new();
        self.pages(path, &[], field, limit, |item| found.push(item)).await?;
        Ok(Value::Array(found))
    }

    /// The data of server-sent events, as they come.
    pub(super) async fn events(
        &self,
        path: &str,
        query: &[(&str, String)],
    ) -> Result<BoxStream<'static, Result<Value, Failure>>, Failure> {
        Ok(data_of_events(self.stream(Method::GET, path, query, None).await?).boxed())
    }

    /// The same for what changes something.
    pub(super) async fn post_events(
        &self,
        path: &str,
        body: Value,
    ) -> Result<BoxStream<'static, Result<Value, Failure>>, Failure> {
        Ok(data_of_events(self.stream(Method::POST, path, &[], Some(body)).await?).boxed())
    }

    /// The lines of an answer, as they come.
    pub(super) async fn lines(
        &self,
        path: &str,
        query: &[(&str, String)],
    ) -> Result<BoxStream<'static, Result<String, Failure>>, Failure> {
        Ok(lines_of(self.stream(Method::GET, path, query, None).await?).boxed())
    }

    /// The same for what changes something.
    pub(super) async fn post_lines(
        &self,
        path: &str,
        body: Value,
    ) -> Result<BoxStream<'static, Result<String, Failure>>, Failure> {
        Ok(lines_of(self.stream(Method::POST, path, &[], Some(body)).await?).boxed())
    }

    async fn stream(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, String)],
        body: Option<Value>,
    ) -> Result<BoxStream<'static, Result<Bytes, Failure>>, Failure> {
        match self {
            Self::Network { base, .. } => {
                let response = self.send(method, path, query, body, None).await?;
                let base = base.clone();
                let broken = move |error: reqwest::Error| unreachable(&base, &error);
                Ok(response.bytes_stream().map_err(broken).boxed())
            }
            Self::InProcess(local) => {
                let body = body.map(|body| Body::from(body.to_string()));
                let response = in_process(&local.routes, method, path, query, body).await?;
                let body = response.into_body().into_data_stream();
                Ok(body.map_err(|error| Failure::new(error.to_string())).boxed())
            }
        }
    }

    /// Sends something long, piece by piece.
    pub(super) async fn upload(
        &self,
        path: &str,
        pieces: BoxStream<'static, std::io::Result<Bytes>>,
    ) -> Result<Value, Failure> {
        let bytes = match self {
            Self::Network { client, base, token } => {
                let mut request = client.post(format!("{base}{}", address(path, &[])));
                if let Some(token) = token {
                    request = request.bearer_auth(token.expose_secret());
                }
                let response = request.body(reqwest::Body::wrap_stream(pieces)).send().await;
                let response = response.map_err(|error| unreachable(base, &error))?;
                whole_of(base, accepted(response).await?).await?
            }
            Self::InProcess(local) => {
                let body = Some(Body::from_stream(pieces));
                let response = in_process(&local.routes, Method::POST, path, &[], body).await?;
                whole(response).await?
            }
        };
        parsed(&bytes)
    }

    /// Lets go of what was opened.
    pub(super) async fn close(self) {
        if let Self::InProcess(local) = self {
            local.close().await;
        }
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, String)],
        body: Option<Value>,
    ) -> Result<Value, Failure> {
        let bytes = match self {
            Self::Network { base, .. } => {
                let response = self.send(method, path, query, body, Some(ANSWER_MAX)).await?;
                whole_of(base, response).await?
            }
            Self::InProcess(local) => {
                let body = body.map(|body| Body::from(body.to_string()));
                whole(in_process(&local.routes, method, path, query, body).await?).await?
            }
        };
        parsed(&bytes)
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, String)],
        body: Option<Value>,
        limit: Option<Duration>,
    ) -> Result<reqwest::Response, Failure> {
        let Self::Network { client, base, token } = self else {
            return Err(Failure::new("there is no server to ask"));
        };
        let mut request = client.request(method, format!("{base}{}", address(path, query)));
        if let Some(token) = token {
            request = request.bearer_auth(token.expose_secret());
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        if let Some(limit) = limit {
            request = request.timeout(limit);
        }
        // A request that came too soon had no effect, so it may come again.
        for _ in 0..TOO_SOON_MAX {
            let Some(again) = request.try_clone() else { break };
            let response = again.send().await.map_err(|error| unreachable(base, &error))?;
            if response.status() != StatusCode::TOO_MANY_REQUESTS {
                return accepted(response).await;
            }
            let after = response.headers().get(header::RETRY_AFTER);
            let after = after.and_then(|after| after.to_str().ok()?.parse().ok()).unwrap_or(1);
            let body = http_client::read_beginning(response, REFUSAL_BYTES_MAX).await;
            let error = serde_json::from_slice::<Value>(&body).unwrap_or_default();
            if error["error"]["code"] != "too_many_requests" {
                return Err(refused(StatusCode::TOO_MANY_REQUESTS, &body));
            }
            tokio::time::sleep(Duration::from_secs(after).min(CONNECT_MAX)).await;
        }
        let response = request.send().await.map_err(|error| unreachable(base, &error))?;
        accepted(response).await
    }
}

async fn accepted(response: reqwest::Response) -> Result<reqwest::Response, Failure> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let asked = response.url().clone();
    let body = http_client::read_beginning(response, REFUSAL_BYTES_MAX).await;
    // Whoever answers without our words is somebody else; whoever knows no such address is asked at the wrong one.
    let error = serde_json::from_slice::<Value>(&body).unwrap_or_default();
    let message = error["error"]["message"].as_str();
    if status == StatusCode::NOT_FOUND && message.is_none_or(|message| message == NOTHING_HERE) {
        let asked = shown_url(asked.as_str());
        return Err(Failure::new(format!(
            "there is no Headwater at {asked}; --url is http://HOST:PORT"
        )));
    }
    Err(refused(status, &body))
}

/// All of an answer that came over the network, which may be anybody's.
async fn whole_of(base: &str, mut response: reqwest::Response) -> Result<Bytes, Failure> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| unreachable(base, &error))? {
        if bytes.len() + chunk.len() > ANSWER_BYTES_MAX {
            return Err(too_long());
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes.into())
}

fn too_long() -> Failure {
    Failure::new(format!("the answer has more than {ANSWER_BYTES_MAX} bytes; ask for less"))
}

async fn whole(response: axum::response::Response) -> Result<Bytes, Failure> {
    let bytes = axum::body::to_bytes(response.into_body(), ANSWER_BYTES_MAX).await;
    bytes.map_err(|error| Failure::new(error.to_string()))
}

fn parsed(bytes: &[u8]) -> Result<Value, Failure> {
    serde_json::from_slice(bytes)
        .map_err(|error| Failure::new(format!("the answer is not the JSON it should be: {error}")))
}

async fn in_process(
    routes: &Router,
    method: Method,
    path: &str,
    query: &[(&str, String)],
    body: Option<Body>,
) -> Result<axum::response::Response, Failure> {
    let request = Request::builder()
        .method(method)
        .uri(address(path, query))
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.unwrap_or_default());
    let mut request = request.map_err(|error| Failure::usage(error.to_string()))?;
    request.extensions_mut().insert(local_audit::caller());
    let response = routes.clone().oneshot(request).await;
    let response = response.unwrap_or_else(|never| match never {});
    if response.status().is_success() {
        return Ok(response);
    }
    let status = response.status();
    let body =
        axum::body::to_bytes(response.into_body(), ANSWER_BYTES_MAX).await.unwrap_or_default();
    Err(refused(status, &body))
}

/// Path and query with everything escaped.
fn address(path: &str, query: &[(&str, String)]) -> String {
    let mut address = format!("/api/v1{path}");
    for (index, (name, value)) in query.iter().enumerate() {
        address.push(if index == 0 { '?' } else { '&' });
        address.push_str(name);
        address.push('=');
        address.push_str(&escape(value));
    }
    address
}

/// One segment of a path, or one value of a query.
pub(super) use crate::text::percent_encoded as escape;

fn unreachable(base: &str, error: &reqwest::Error) -> Failure {
    let (base, why) = (shown_url(base), http_client::describe(error));
    // What the TLS library says when somebody answers in clear text.
    if base.starts_with("https://") && why.contains("InvalidContentType") {
        return Failure::Unreachable(format!(
            "{base} cannot be reached: it speaks http, not https; mend --url"
        ));
    }
    Failure::Unreachable(format!("{base} cannot be reached: {why}; start it, or mend --url"))
}

/// A refusal as an end of the verb: what the caller did wrong is wrong usage, what a server did not do is 3.
fn refused(status: StatusCode, body: &[u8]) -> Failure {
    let error = serde_json::from_slice::<Value>(body).unwrap_or_default();
    let message =
        error["error"]["message"].as_str().unwrap_or("the server gave no reason").to_owned();
    match status {
        StatusCode::BAD_REQUEST => Failure::usage(message),
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::BAD_GATEWAY => Failure::Unreachable(message),
        StatusCode::NOT_FOUND => Failure::Missing(message),
        StatusCode::UNAUTHORIZED => Failure::new(format!("{message}; put the token into {TOKEN}")),
        _ => Failure::new(message),
    }
}

/// The same for a refusal that is the last line of an answer; `None` for every other line.
pub(super) fn refused_line(line: &Value) -> Option<Failure> {
    let error = line.get("error")?;
    let message = error["message"].as_str().unwrap_or("the server gave no reason").to_owned();
    Some(match error["code"].as_str() {
        Some("invalid") => Failure::usage(message),
        Some("unavailable") => Failure::Unreachable(message),
        Some("not_found") => Failure::Missing(message),
        _ => Failure::new(message),
    })
}

/// The JSON of each event: lines `data:` until an empty one.
fn data_of_events(
    chunks: BoxStream<'static, Result<Bytes, Failure>>,
) -> impl futures_util::Stream<Item = Result<Value, Failure>> {
    cut(chunks, b"\n\n").filter_map(|event| async {
        let text = match event {
            Ok(text) => text,
            Err(failure) => return Some(Err(failure)),
        };
        let data = text.lines().filter_map(|line| line.strip_prefix("data:"));
        let data: Vec<&str> = data.map(str::trim_start).collect();
        if data.is_empty() {
            return None;
        }
        let value = serde_json::from_str(&data.join("\n"));
        Some(value.map_err(|error| Failure::new(format!("an event is not JSON: {error}"))))
    })
}

/// Each line without its end; empty ones are left out.
fn lines_of(
    chunks: BoxStream<'static, Result<Bytes, Failure>>,
) -> impl futures_util::Stream<Item = Result<String, Failure>> {
    let is_some = |line: &Result<String, Failure>| {
        let is_empty = line.as_ref().is_ok_and(|line| line.trim().is_empty());
        std::future::ready(!is_empty)
    };
    cut(chunks, b"\n").filter(is_some)
}

/// What stands between two separators. What comes after the last one was cut off, and is nothing.
fn cut(
    chunks: BoxStream<'static, Result<Bytes, Failure>>,
    separator: &'static [u8],
) -> BoxStream<'static, Result<String, Failure>> {
    // Where the search goes on: what was looked through once is not looked through again.
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
                    Some(_) if buffer.len() > ANSWER_BYTES_MAX => return Err(too_long()),
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
    fn names_with_odd_characters_stay_one_segment() {
        assert_eq!(escape("a/b?c=d ü"), "a%2Fb%3Fc%3Dd%20%C3%BC");
        let query = [("from", "2026-11-15T10:00:00+01:00".to_owned())];
        assert_eq!(
            address("/topics", &query),
            "/api/v1/topics?from=2026-11-15T10%3A00%3A00%2B01%3A00"
        );
    }

    #[tokio::test]
    async fn events_are_read_however_they_are_cut() {
        let whole = ": hello\n\nevent: message\ndata: {\"n\":1}\n\ndata: {\"n\":\ndata: 2}\n\n";
        for size in 1..whole.len() {
            let chunks: Vec<_> = whole
                .as_bytes()
                .chunks(size)
                .map(|chunk| Ok(Bytes::copy_from_slice(chunk)))
                .collect();
            let events = data_of_events(futures_util::stream::iter(chunks).boxed());
            let numbers: Vec<_> = events.map(|event| event.unwrap()["n"].clone()).collect().await;
            assert_eq!(numbers, [1, 2], "cut into {size}");
        }
    }
}
