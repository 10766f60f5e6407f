//! Client of OpenAI-compatible chat endpoints: `POST {model.url}/chat/completions`, streamed.
//!
//! Upstream: `handler`. Downstream: an untrusted server.
//! Guarantees: a call takes at most the total timeout, a pause within an answer at most the idle timeout. 429 and 5xx
//! are retried within the total timeout and honour `Retry-After`. The request has the fields that current models expect;
//! if the service rejects one of them, the call is repeated without it, and later calls begin that way. The key appears
//! in no log and no error. Redirects are not followed, because they could leak the key.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use headwater_stream::Backoff;
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::{Client, Response};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value as Json, json};
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{info, warn};

use crate::config::shown_url;
use crate::desk::model::sse::SseReader;
use crate::desk::model::{
    IncompleteReason, LanguageModel, ModelAnswer, ModelError, ModelPrompt, ResponseChunk,
    ResponseStream, TokenUsage, ToolCall, Turn,
};
use crate::http_client;
use crate::limits::{
    ERROR_BODY_BYTES_MAX, RESPONSE_BYTES_MAX, RETRY_AFTER_MAX, TOOL_ARGUMENTS_BYTES_MAX,
    TOOL_CALLS_MAX,
};
use crate::text;

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
    /// The format of the last request that the service accepted.
    format: Mutex<RequestFormat>,
}

/// Result of one request.
enum AttemptOutcome {
    Responding(Response),
    /// Retry, after this time if the service said so.
    Retry(Option<Duration>, ModelError),
    Failed(ModelError),
    /// The service rejected the request, with this message. Another format may be accepted.
    Rejected(String),
}

/// Optional parts of a request, on which services differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct RequestFormat {
    /// Sends `max_tokens`, as older services expect, instead of `max_completion_tokens`.
    old_token_limit: bool,
    without_usage: bool,
    without_streaming: bool,
}

impl RequestFormat {
    /// The format to try after an error message; `None` if the message names no part of the request.
    fn after(self, message: &str) -> Option<Self> {
        // A message that rejects `max_tokens` names its replacement.
        if message.contains("max_completion_tokens") {
            return Some(Self { old_token_limit: !self.old_token_limit, ..self });
        }
        if message.contains("stream_options") && !self.without_usage {
            return Some(Self { without_usage: true, ..self });
        }
        // Some organizations may not stream some models.
        (message.contains("stream") && !self.without_streaming)
            .then_some(Self { without_streaming: true, ..self })
    }
}

/// Maximum changes of the format within one call.
const FORMAT_CHANGES_MAX: u32 = 3;

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
        Ok(Self { client: http_client::build()?, endpoint, config, format: Mutex::default() })
    }

    fn format(&self) -> MutexGuard<'_, RequestFormat> {
        self.format.lock().expect("no code panics while it holds this lock")
    }

    fn body(&self, prompt: &ModelPrompt, format: RequestFormat) -> Bytes {
        Bytes::from(request(&self.config.model, prompt, format).to_string())
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
                let cause = http_client::describe(&error);
                let reason = format!("{}: {cause}", shown_url(&self.config.url));
                AttemptOutcome::Retry(None, ModelError::Unreachable(reason))
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
    match status.as_u16() {
        // The account has no credit: waiting does not help.
        429 if error_code(&body) == "insufficient_quota" => {
            AttemptOutcome::Failed(ModelError::Unauthorized(reason))
        }
        // The service did not process the request. Other server errors may have used tokens.
        429 | 502 | 503 | 529 => {
            AttemptOutcome::Retry(after, ModelError::RateLimited { after, reason })
        }
        408 | 409 | 425 | 500..=599 => AttemptOutcome::Retry(after, unavailable(reason)),
        401..=404 => AttemptOutcome::Failed(ModelError::Unauthorized(reason)),
        413 => AttemptOutcome::Failed(ModelError::TooLong(reason)),
        400..=499 => match content_error(&body, &reason) {
            Some(error) => AttemptOutcome::Failed(error),
            None => AttemptOutcome::Rejected(reason),
        },
        _ => AttemptOutcome::Failed(ModelError::Unauthorized(reason)),
    }
}

/// Error codes and words of services for a prompt that is too long, and for one that violates a policy.
const TOO_LONG: [&str; 12] = [
    "exceed_context_size",
    "context size",
    "token count",
    "maximum number of tokens",
    "context_length_exceeded",
    "string_above_max_length",
    "context length",
    "context window",
    "maximum context",
    "prompt is too long",
    "input is too long",
    "too many tokens",
];
const POLICY: [&str; 8] = [
    "content_policy_violation",
    "content_filter",
    "invalid_prompt",
    "moderation_blocked",
    "content policy",
    "content management policy",
    "usage policy",
    "safety system",
];

/// The error of a rejected request, if the text of the prompt is the cause.
fn content_error(body: &[u8], reason: &str) -> Option<ModelError> {
    let said = format!("{} {reason}", error_code(body)).to_ascii_lowercase();
    let names = |words: &[&str]| words.iter().any(|word| said.contains(word));
    if names(&TOO_LONG) {
        return Some(ModelError::TooLong(reason.to_owned()));
    }
    names(&POLICY).then(|| ModelError::Rejected(reason.to_owned()))
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

/// The machine-readable code of an error; empty if there is none.
fn error_code(body: &[u8]) -> String {
    let json: Json = serde_json::from_slice(body).unwrap_or_default();
    // Some services send a number as code.
    let text = |pointer: &str| json.pointer(pointer).and_then(Json::as_str);
    text("/error/code").or_else(|| text("/error/type")).unwrap_or_default().to_owned()
}

#[async_trait]
impl LanguageModel for OpenAiModel {
    fn name(&self) -> &str {
        &self.config.model
    }

    async fn complete(&self, prompt: &ModelPrompt) -> Result<ResponseStream, ModelError> {
        let deadline = Instant::now() + self.config.total_timeout;
        let known_format = *self.format();
        let mut format = known_format;
        let mut body = self.body(prompt, format);
        let (mut attempt, mut format_changes) = (1, 0);
        loop {
            let (after, error) = match self.send(&body, deadline).await {
                AttemptOutcome::Responding(response) => {
                    if format != known_format {
                        *self.format() = format;
                    }
                    return response_stream(response, deadline, self.config.idle_timeout).await;
                }
                AttemptOutcome::Rejected(reason) => {
                    let Some(next) =
                        format.after(&reason).filter(|_| format_changes < FORMAT_CHANGES_MAX)
                    else {
                        return Err(ModelError::InvalidRequest(reason));
                    };
                    info!(reason, format = ?next, "model service rejected the request; trying another format");
                    (format, body) = (next, self.body(prompt, next));
                    format_changes += 1;
                    continue;
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
fn request(model: &str, prompt: &ModelPrompt, format: RequestFormat) -> Json {
    let mut body = json!({
        "model": model,
        "messages": prompt.turns.iter().map(message).collect::<Vec<_>>(),
        "stream": !format.without_streaming,
    });
    let token_limit = if format.old_token_limit { "max_tokens" } else { "max_completion_tokens" };
    body[token_limit] = prompt.output_tokens_max.into();
    if !format.without_streaming && !format.without_usage {
        body["stream_options"] = json!({"include_usage": true});
    }
    if !prompt.tools.is_empty() {
        let tools = prompt.tools.iter().map(|tool| {
            let (name, description, parameters) = (&tool.name, &tool.description, &tool.parameters);
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
    if let Some(kind) = kind.filter(|kind| kind.starts_with("text/html")) {
        let kind = text::one_line(kind, 60);
        return Err(ModelError::InvalidResponse(format!("content type `{kind}`")));
    }
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
    incomplete: Option<IncompleteReason>,
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
        let finish = choice.get("finish_reason").filter(|reason| !reason.is_null());
        self.finished |= finish.is_some();
        match finish.and_then(Json::as_str) {
            Some("length") => self.incomplete = Some(IncompleteReason::Length),
            Some("content_filter") => self.incomplete = Some(IncompleteReason::Refused),
            _ => {}
        }
        let delta = choice.get("delta").or_else(|| choice.get("message"));
        let Some(delta) = delta else { return Ok(()) };
        if let Some(text) = delta.get("content").and_then(Json::as_str) {
            self.text.push_str(text);
        }
        if delta.get("refusal").and_then(Json::as_str).is_some_and(|refusal| !refusal.is_empty()) {
            self.incomplete = Some(IncompleteReason::Refused);
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
        // The tool calls of an incomplete answer may be incomplete, too.
        let calls = if self.incomplete.is_some() { BTreeMap::new() } else { self.calls };
        for (index, mut call) in calls {
            if call.name.is_empty() {
                return Err(ModelError::InvalidResponse("a tool call has no name".to_owned()));
            }
            if call.id.is_empty() {
                call.id = format!("call-{index}");
            }
            chunks.push(ResponseChunk::Call(call));
        }
        chunks.extend(self.usage.map(ResponseChunk::Usage));
        chunks.extend(self.incomplete.map(ResponseChunk::Incomplete));
        Ok(chunks)
    }
}
