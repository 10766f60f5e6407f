//! Client of OpenAI-compatible chat endpoints: `POST {model.url}/chat/completions`, streamed.
//!
//! Upstream: `handler`. Downstream: an untrusted server.
//! Guarantees: a call takes at most the total timeout, a pause within an answer at most the idle timeout. 429 and 5xx
//! are retried within the total timeout and honour `Retry-After`. The key appears in no log and no error. Redirects
//! are not followed, because they could leak the key.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use headwater_stream::Backoff;
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value as Json, json};
use tokio::time::{Instant, sleep, timeout_at};
use tracing::warn;

use crate::desk::model::sse::SseReader;
use crate::desk::model::{
    LanguageModel, ModelAnswer, ModelError, ModelPrompt, ResponseChunk, ResponseStream, TokenUsage,
    ToolCall, Turn,
};
use crate::http_client;
use crate::limits::{
    ERROR_BODY_BYTES_MAX, RESPONSE_BYTES_MAX, RETRY_AFTER_MAX, TOOL_ARGUMENTS_BYTES_MAX,
    TOOL_CALLS_MAX,
};

/// Address, credentials and timeouts of a model.
#[derive(Clone, Debug)]
pub struct OpenAiConfig {
    /// Base URL of `chat/completions`, such as `https://api.example.com/v1`.
    pub url: String,
    /// Name of the model.
    pub model: String,
    /// API key, if the service needs one.
    pub key: Option<SecretString>,
    /// Total timeout of a call, retries included. Default: 120 s.
    pub total_timeout: Duration,
    /// Longest pause without data from the service. Default: 30 s.
    pub idle_timeout: Duration,
    /// Maximum attempts per call. Default: 4.
    pub attempts_max: u32,
    /// Pause before another attempt without `Retry-After`. Default: 500 ms, doubling.
    pub backoff: Backoff,
}

impl OpenAiConfig {
    /// A configuration with default timeouts.
    pub fn new(
        url: impl Into<String>,
        model: impl Into<String>,
        key: Option<SecretString>,
    ) -> Self {
        Self {
            url: url.into(),
            model: model.into(),
            key,
            total_timeout: Duration::from_secs(120),
            idle_timeout: Duration::from_secs(30),
            attempts_max: 4,
            backoff: Backoff::doubling(Duration::from_millis(500), Duration::from_secs(60)),
        }
    }
}

/// An OpenAI-compatible model.
#[derive(Debug)]
pub struct OpenAiModel {
    client: Client,
    endpoint: reqwest::Url,
    config: OpenAiConfig,
}

/// Result of one request.
enum AttemptOutcome {
    Responding(Response),
    /// Retry, after this time if the service said so.
    Retry(Option<Duration>, ModelError),
    Failed(ModelError),
}

impl OpenAiModel {
    /// Validates the configuration. Sends nothing.
    pub fn new(config: OpenAiConfig) -> Result<Self, String> {
        let endpoint = format!("{}/chat/completions", config.url.trim_end_matches('/'));
        let endpoint: reqwest::Url =
            endpoint.parse().map_err(|error| format!("`model.url` is not a valid URL: {error}"))?;
        if !matches!(endpoint.scheme(), "http" | "https") {
            return Err("`model.url` must begin with http:// or https://".to_owned());
        }
        if config.attempts_max == 0
            || config.total_timeout.is_zero()
            || config.idle_timeout.is_zero()
        {
            return Err("`attempts_max` and the timeouts of the model must not be zero".to_owned());
        }
        Ok(Self { client: http_client::build()?, endpoint, config })
    }

    async fn send(&self, body: &Bytes, deadline: Instant) -> AttemptOutcome {
        let mut request = self
            .client
            .post(self.endpoint.clone())
            .header(CONTENT_TYPE, "application/json")
            .header("accept", "text/event-stream, application/json")
            .body(body.clone());
        if let Some(key) = &self.config.key {
            request = request.bearer_auth(key.expose_secret());
        }
        let idle_deadline = deadline.min(Instant::now() + self.config.idle_timeout);
        match timeout_at(idle_deadline, request.send()).await {
            Err(_) => AttemptOutcome::Retry(None, unavailable("no response within the timeout")),
            Ok(Err(error)) if error.is_connect() => {
                AttemptOutcome::Retry(None, ModelError::Unreachable(http_client::describe(&error)))
            }
            Ok(Err(error)) => {
                AttemptOutcome::Retry(None, unavailable(http_client::describe(&error)))
            }
            Ok(Ok(response)) if response.status().is_success() => {
                AttemptOutcome::Responding(response)
            }
            Ok(Ok(response)) => {
                let key = self.config.key.as_ref().map_or("", |key| key.expose_secret());
                error_response(response, idle_deadline, key).await
            }
        }
    }
}

fn unavailable(reason: impl Into<String>) -> ModelError {
    ModelError::Unavailable(reason.into())
}

async fn error_response(response: Response, idle_deadline: Instant, key: &str) -> AttemptOutcome {
    let status = response.status();
    let after = retry_after(&response);
    let body =
        timeout_at(idle_deadline, http_client::read_prefix(response, ERROR_BODY_BYTES_MAX)).await;
    let body = body.unwrap_or_default();
    let reason = format!("{status}: {}", error_message(&body, key));
    match status {
        StatusCode::TOO_MANY_REQUESTS => {
            AttemptOutcome::Retry(after, ModelError::RateLimited { after, reason })
        }
        StatusCode::REQUEST_TIMEOUT => AttemptOutcome::Retry(after, unavailable(reason)),
        // The service did not process the request. Other server errors may have used tokens, or be caused by the
        // prompt.
        status if matches!(status.as_u16(), 502 | 503 | 529) => {
            AttemptOutcome::Retry(after, ModelError::RateLimited { after, reason })
        }
        status if status.is_server_error() => AttemptOutcome::Retry(after, unavailable(reason)),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND => {
            AttemptOutcome::Failed(ModelError::Unauthorized(reason))
        }
        status if status.is_client_error() => AttemptOutcome::Failed(ModelError::Rejected(reason)),
        _ => AttemptOutcome::Failed(ModelError::Unauthorized(reason)),
    }
}

/// `Retry-After` in seconds. A date is ignored; the backoff applies.
fn retry_after(response: &Response) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(RETRY_AFTER_MAX))
}

/// The error message in a response body, without the key, which some services repeat.
fn error_message(body: &[u8], key: &str) -> String {
    let json: Option<Json> = serde_json::from_slice(body).ok();
    let message = json.as_ref().and_then(|json| json.pointer("/error/message")?.as_str());
    let text = message.map_or_else(|| String::from_utf8_lossy(body).into_owned(), str::to_owned);
    let text = if key.is_empty() { text } else { text.replace(key, "***") };
    text.chars().filter(|c| !c.is_control()).take(300).collect()
}

#[async_trait]
impl LanguageModel for OpenAiModel {
    fn name(&self) -> &str {
        &self.config.model
    }

    async fn complete(&self, prompt: &ModelPrompt) -> Result<ResponseStream, ModelError> {
        let deadline = Instant::now() + self.config.total_timeout;
        let body = Bytes::from(request(&self.config.model, prompt).to_string());
        let mut attempt = 1;
        loop {
            let (after, error) = match self.send(&body, deadline).await {
                AttemptOutcome::Responding(response) => {
                    return response_stream(response, deadline, self.config.idle_timeout).await;
                }
                AttemptOutcome::Failed(error) => return Err(error),
                AttemptOutcome::Retry(after, error) => (after, error),
            };
            let wait = after.unwrap_or_else(|| self.config.backoff.delay(attempt, fastrand::f64()));
            // Give up: the issue is deferred, which holds no worker.
            if attempt >= self.config.attempts_max || Instant::now() + wait >= deadline {
                return Err(error);
            }
            warn!(attempt, %error, "model call failed; retrying");
            sleep(wait).await;
            attempt += 1;
        }
    }
}

/// The request body.
fn request(model: &str, prompt: &ModelPrompt) -> Json {
    let mut body = json!({
        "model": model,
        "messages": prompt.turns.iter().map(message).collect::<Vec<_>>(),
        "max_tokens": prompt.output_tokens_max,
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    if !prompt.tools.is_empty() {
        let tools = prompt.tools.iter().map(|tool| {
            let (name, description, parameters) = (tool.name, tool.description, &tool.parameters);
            json!({"type": "function",
                "function": {"name": name, "description": description, "parameters": parameters}})
        });
        body["tools"] = tools.collect();
    }
    body
}

fn message(turn: &Turn) -> Json {
    match turn {
        Turn::System(text) => json!({"role": "system", "content": text}),
        Turn::User(text) => json!({"role": "user", "content": text}),
        Turn::Assistant(answer) => assistant_message(answer),
        Turn::ToolResult { call_id, content } => {
            json!({"role": "tool", "tool_call_id": call_id, "content": content})
        }
    }
}

fn assistant_message(answer: &ModelAnswer) -> Json {
    let mut json = json!({"role": "assistant", "content": answer.text});
    if !answer.calls.is_empty() {
        let calls = answer.calls.iter().map(|call| {
            json!({"id": call.id, "type": "function",
                "function": {"name": call.name, "arguments": call.arguments}})
        });
        json["tool_calls"] = calls.collect();
    }
    json
}

/// The chunks of a response, also if the service does not stream.
async fn response_stream(
    response: Response,
    deadline: Instant,
    idle: Duration,
) -> Result<ResponseStream, ModelError> {
    let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    if kind.is_some_and(|kind| kind.starts_with("application/json")) {
        let idle_deadline = deadline.min(Instant::now() + idle);
        let body =
            timeout_at(idle_deadline, http_client::read_limited(response, RESPONSE_BYTES_MAX))
                .await;
        let body =
            body.map_err(|_| unavailable("the response was not complete within the timeout"))?;
        let body = body.map_err(ModelError::Unavailable)?;
        let mut accumulator = Accumulator::default();
        accumulator.add_event(&body)?;
        return Ok(ResponseStream::ready(accumulator.finish()?));
    }
    let state = ResponseStreamState {
        body: response.bytes_stream().boxed(),
        reader: Some(SseReader::default()),
        accumulator: Accumulator::default(),
        ready: VecDeque::new(),
        read_bytes: 0,
        deadline,
        idle,
    };
    Ok(ResponseStream::new(stream::try_unfold(state, ResponseStreamState::next)))
}

/// State of a response that is being read.
struct ResponseStreamState {
    body: BoxStream<'static, reqwest::Result<Bytes>>,
    /// `None` at the end of the response.
    reader: Option<SseReader>,
    accumulator: Accumulator,
    ready: VecDeque<ResponseChunk>,
    read_bytes: usize,
    deadline: Instant,
    idle: Duration,
}

impl ResponseStreamState {
    async fn next(mut self) -> Result<Option<(ResponseChunk, Self)>, ModelError> {
        loop {
            if let Some(chunk) = self.ready.pop_front() {
                return Ok(Some((chunk, self)));
            }
            let Some(mut reader) = self.reader.take() else { return Ok(None) };
            let idle_deadline = self.deadline.min(Instant::now() + self.idle);
            let bytes = timeout_at(idle_deadline, self.body.next())
                .await
                .map_err(|_| unavailable("the response stalled or exceeded the total timeout"))?;
            let Some(bytes) = bytes else {
                if let Some(event) = reader.finish().map_err(ModelError::InvalidResponse)? {
                    self.push_event(&event)?;
                }
                self.ready.extend(std::mem::take(&mut self.accumulator).finish()?);
                continue;
            };
            let bytes = bytes.map_err(|error| unavailable(http_client::describe(&error)))?;
            self.read_bytes += bytes.len();
            if self.read_bytes > RESPONSE_BYTES_MAX {
                let problem = format!("longer than {RESPONSE_BYTES_MAX} bytes");
                return Err(ModelError::InvalidResponse(problem));
            }
            for event in reader.feed(&bytes).map_err(ModelError::InvalidResponse)? {
                self.push_event(&event)?;
            }
            if self.accumulator.done {
                self.ready.extend(std::mem::take(&mut self.accumulator).finish()?);
            } else {
                self.reader = Some(reader);
            }
        }
    }

    fn push_event(&mut self, event: &str) -> Result<(), ModelError> {
        self.accumulator.add_event(event.as_bytes())?;
        let text = std::mem::take(&mut self.accumulator.text);
        self.ready.extend((!text.is_empty()).then_some(ResponseChunk::Text(text)));
        Ok(())
    }
}

/// The answer so far. Tool calls arrive in fragments and are complete only at the end.
#[derive(Default)]
struct Accumulator {
    text: String,
    calls: BTreeMap<u64, ToolCall>,
    usage: Option<TokenUsage>,
    /// Whether the service sent a finish reason or `[DONE]`.
    finished: bool,
    done: bool,
}

impl Accumulator {
    fn add_event(&mut self, event: &[u8]) -> Result<(), ModelError> {
        if event == b"[DONE]" {
            (self.finished, self.done) = (true, true);
            return Ok(());
        }
        let json: Json = serde_json::from_slice(event).map_err(|error| {
            ModelError::InvalidResponse(format!("an event is not JSON: {error}"))
        })?;
        if let Some(error) = json.get("error").filter(|error| !error.is_null()) {
            let message = error.get("message").and_then(Json::as_str).unwrap_or("no reason given");
            return Err(unavailable(message.chars().take(300).collect::<String>()));
        }
        if let Some(usage) = json.get("usage").filter(|usage| usage.is_object()) {
            let count = |name: &str| usage.get(name).and_then(Json::as_u64).unwrap_or(0);
            let (input_tokens, output_tokens) =
                (count("prompt_tokens"), count("completion_tokens"));
            self.usage = Some(TokenUsage { input_tokens, output_tokens });
        }
        let Some(choice) = json.pointer("/choices/0") else { return Ok(()) };
        self.finished |= choice.get("finish_reason").is_some_and(|reason| !reason.is_null());
        let delta = choice.get("delta").or_else(|| choice.get("message"));
        let Some(delta) = delta else { return Ok(()) };
        if let Some(text) = delta.get("content").and_then(Json::as_str) {
            self.text.push_str(text);
        }
        let calls = delta.get("tool_calls").and_then(Json::as_array);
        for (position, call) in calls.into_iter().flatten().enumerate() {
            self.add_call_fragment(position as u64, call)?;
        }
        Ok(())
    }

    fn add_call_fragment(&mut self, position: u64, fragment: &Json) -> Result<(), ModelError> {
        let index = fragment.get("index").and_then(Json::as_u64).unwrap_or(position);
        let empty = ToolCall { id: String::new(), name: String::new(), arguments: String::new() };
        let call = self.calls.entry(index).or_insert(empty);
        let text = |pointer: &str| fragment.pointer(pointer).and_then(Json::as_str).unwrap_or("");
        call.id.push_str(text("/id"));
        call.name.push_str(text("/function/name"));
        call.arguments.push_str(text("/function/arguments"));
        let bytes = call.id.len() + call.name.len() + call.arguments.len();
        if self.calls.len() > TOOL_CALLS_MAX || bytes > TOOL_ARGUMENTS_BYTES_MAX {
            let problem = format!(
                "more than {TOOL_CALLS_MAX} tool calls, or one longer than {TOOL_ARGUMENTS_BYTES_MAX} bytes"
            );
            return Err(ModelError::InvalidResponse(problem));
        }
        Ok(())
    }

    /// The remaining chunks. A response without a finish reason was cut off.
    fn finish(self) -> Result<Vec<ResponseChunk>, ModelError> {
        if !self.finished {
            return Err(unavailable("the response was cut off"));
        }
        let mut chunks = Vec::new();
        chunks.extend((!self.text.is_empty()).then_some(ResponseChunk::Text(self.text)));
        for (index, mut call) in self.calls {
            if call.name.is_empty() {
                return Err(ModelError::InvalidResponse("a tool call has no name".to_owned()));
            }
            if call.id.is_empty() {
                call.id = format!("call-{index}");
            }
            chunks.push(ResponseChunk::Call(call));
        }
        chunks.extend(self.usage.map(ResponseChunk::Usage));
        Ok(chunks)
    }
}
