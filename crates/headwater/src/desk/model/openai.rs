//! Any chat endpoint that speaks like OpenAI's: `POST {model.url}/chat/completions`, streamed.
//!
//! Upstream: `handler`. Downstream: a server that is not ours and may do anything.
//! Promises: no call lasts longer than the total time-out, no silence within an answer longer than the idle one; 429 and
//! 5xx are asked again (Retry-After is heeded) while there is time; the key is in no log and no error.
//! Refuses: redirects, which would carry the key elsewhere.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value as Json, json};
use tokio::time::{Instant, sleep, timeout_at};
use tracing::warn;

use crate::desk::model::sse::SseReader;
use crate::desk::model::{
    Answer, LanguageModel, ModelError, ModelPrompt, Piece, Pieces, ToolCall, Turn, Usage,
};
use crate::http_client;
use crate::limits::{
    ERROR_BODY_BYTES_MAX, RESPONSE_BYTES_MAX, RETRY_AFTER_MAX, TOOL_ARGUMENTS_BYTES_MAX,
    TOOL_CALLS_MAX,
};

/// Where the model is and how patient we are.
#[derive(Clone, Debug)]
pub struct OpenAiConfig {
    /// The address below which `chat/completions` is, such as `https://api.example.com/v1`.
    pub url: String,
    /// Which model of that service.
    pub model: String,
    /// The key, if the service wants one.
    pub key: Option<SecretString>,
    /// How long one answer may take, tries included. Default: 120 s.
    pub total_timeout: Duration,
    /// How long the service may say nothing. Default: 30 s.
    pub idle_timeout: Duration,
    /// How often one prompt is sent at most. Default: 4.
    pub tries_max: u32,
    /// How long to wait before the second try, if the service does not say; doubles each time. Default: 500 ms.
    pub backoff: Duration,
}

impl OpenAiConfig {
    /// The default patience with a service.
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
            tries_max: 4,
            backoff: Duration::from_millis(500),
        }
    }
}

/// A model behind HTTP.
#[derive(Debug)]
pub struct OpenAiModel {
    client: Client,
    endpoint: reqwest::Url,
    config: OpenAiConfig,
}

/// What one try came to.
enum Try {
    Answering(Response),
    /// Ask again, after this time if the service said so.
    Again(Option<Duration>, ModelError),
    Failed(ModelError),
}

impl OpenAiModel {
    /// A client of the service. Nothing is sent yet.
    pub fn new(config: OpenAiConfig) -> Result<Self, String> {
        let endpoint = format!("{}/chat/completions", config.url.trim_end_matches('/'));
        let endpoint: reqwest::Url =
            endpoint.parse().map_err(|error| format!("model.url is no address: {error}"))?;
        if !matches!(endpoint.scheme(), "http" | "https") {
            return Err("model.url must begin with http:// or https://".to_owned());
        }
        if config.tries_max == 0 || config.total_timeout.is_zero() || config.idle_timeout.is_zero()
        {
            return Err("tries_max and the time-outs of the model must not be zero".to_owned());
        }
        Ok(Self { client: http_client::build()?, endpoint, config })
    }

    async fn send(&self, body: &Bytes, until: Instant) -> Try {
        let mut request = self
            .client
            .post(self.endpoint.clone())
            .header(CONTENT_TYPE, "application/json")
            .header("accept", "text/event-stream, application/json")
            .body(body.clone());
        if let Some(key) = &self.config.key {
            request = request.bearer_auth(key.expose_secret());
        }
        let patience = until.min(Instant::now() + self.config.idle_timeout);
        match timeout_at(patience, request.send()).await {
            Err(_) => Try::Again(None, unavailable("it did not begin to answer in time")),
            Ok(Err(error)) if error.is_connect() => {
                Try::Again(None, ModelError::Away(http_client::describe(&error)))
            }
            Ok(Err(error)) => Try::Again(None, unavailable(http_client::describe(&error))),
            Ok(Ok(response)) if response.status().is_success() => Try::Answering(response),
            Ok(Ok(response)) => {
                let key = self.config.key.as_ref().map_or("", |key| key.expose_secret());
                refusal(response, patience, key).await
            }
        }
    }
}

fn unavailable(reason: impl Into<String>) -> ModelError {
    ModelError::Unavailable(reason.into())
}

async fn refusal(response: Response, patience: Instant, key: &str) -> Try {
    let status = response.status();
    let after = retry_after(&response);
    let said = timeout_at(patience, http_client::read_prefix(response, ERROR_BODY_BYTES_MAX)).await;
    let said = said.unwrap_or_default();
    let reason = format!("{status}: {}", said_in_words(&said, key));
    match status {
        StatusCode::TOO_MANY_REQUESTS => Try::Again(after, ModelError::Busy { after, reason }),
        StatusCode::REQUEST_TIMEOUT => Try::Again(after, unavailable(reason)),
        // It turned us away at the door. Other failures of a server may have cost something, or be the prompt's fault.
        status if matches!(status.as_u16(), 502 | 503 | 529) => {
            Try::Again(after, ModelError::Busy { after, reason })
        }
        status if status.is_server_error() => Try::Again(after, unavailable(reason)),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND => {
            Try::Failed(ModelError::Denied(reason))
        }
        status if status.is_client_error() => Try::Failed(ModelError::Refused(reason)),
        _ => Try::Failed(ModelError::Denied(reason)),
    }
}

/// Whole seconds; a date is not worth a parser, and the backoff serves as well.
fn retry_after(response: &Response) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(RETRY_AFTER_MAX))
}

/// What a service says, for a log. Some repeat the key that they do not like.
fn said_in_words(body: &[u8], key: &str) -> String {
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

    async fn ask(&self, prompt: &ModelPrompt) -> Result<Pieces, ModelError> {
        let until = Instant::now() + self.config.total_timeout;
        let body = Bytes::from(request(&self.config.model, prompt).to_string());
        let mut attempt = 1;
        loop {
            let (after, error) = match self.send(&body, until).await {
                Try::Answering(response) => {
                    return pieces(response, until, self.config.idle_timeout).await;
                }
                Try::Failed(error) => return Err(error),
                Try::Again(after, error) => (after, error),
            };
            let wait = after.unwrap_or(self.config.backoff * 2_u32.saturating_pow(attempt - 1));
            // Whoever asked can wait longer than we can: the issue is put off, and nobody's time is used up.
            if attempt >= self.config.tries_max || Instant::now() + wait >= until {
                return Err(error);
            }
            warn!(attempt, %error, "model did not answer, asking again");
            sleep(wait).await;
            attempt += 1;
        }
    }
}

/// The body of a request.
fn request(model: &str, prompt: &ModelPrompt) -> Json {
    let mut body = json!({
        "model": model,
        "messages": prompt.turns.iter().map(turn).collect::<Vec<_>>(),
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

fn turn(turn: &Turn) -> Json {
    match turn {
        Turn::Instruction(text) => json!({"role": "system", "content": text}),
        Turn::Data(text) => json!({"role": "user", "content": text}),
        Turn::Answer(answer) => spoken(answer),
        Turn::ToolResult { call_id, content } => {
            json!({"role": "tool", "tool_call_id": call_id, "content": content})
        }
    }
}

fn spoken(answer: &Answer) -> Json {
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

/// The pieces of an answer: streamed, or all at once from a service that does not stream.
async fn pieces(response: Response, until: Instant, idle: Duration) -> Result<Pieces, ModelError> {
    let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    if kind.is_some_and(|kind| kind.starts_with("application/json")) {
        let patience = until.min(Instant::now() + idle);
        let body =
            timeout_at(patience, http_client::read_limited(response, RESPONSE_BYTES_MAX)).await;
        let body = body.map_err(|_| unavailable("the answer did not end in time"))?;
        let body = body.map_err(ModelError::Unavailable)?;
        let mut gathering = Gathering::default();
        gathering.event(&body)?;
        return Ok(Pieces::ready(gathering.end()?));
    }
    let reading = Reading {
        body: response.bytes_stream().boxed(),
        reader: Some(SseReader::default()),
        gathering: Gathering::default(),
        ready: VecDeque::new(),
        read_bytes: 0,
        until,
        idle,
    };
    Ok(Pieces::new(stream::try_unfold(reading, Reading::next)))
}

/// An answer that is being read.
struct Reading {
    body: BoxStream<'static, reqwest::Result<Bytes>>,
    /// `None` after the end.
    reader: Option<SseReader>,
    gathering: Gathering,
    ready: VecDeque<Piece>,
    read_bytes: usize,
    until: Instant,
    idle: Duration,
}

impl Reading {
    async fn next(mut self) -> Result<Option<(Piece, Self)>, ModelError> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Ok(Some((piece, self)));
            }
            let Some(mut reader) = self.reader.take() else { return Ok(None) };
            let patience = self.until.min(Instant::now() + self.idle);
            let chunk = timeout_at(patience, self.body.next()).await.map_err(|_| {
                unavailable("it fell silent in the middle of its answer, or took too long")
            })?;
            let Some(chunk) = chunk else {
                if let Some(event) = reader.finish().map_err(ModelError::Garbled)? {
                    self.take(&event)?;
                }
                self.ready.extend(std::mem::take(&mut self.gathering).end()?);
                continue;
            };
            let chunk = chunk.map_err(|error| unavailable(http_client::describe(&error)))?;
            self.read_bytes += chunk.len();
            if self.read_bytes > RESPONSE_BYTES_MAX {
                let problem = format!("it is longer than {RESPONSE_BYTES_MAX} bytes");
                return Err(ModelError::Garbled(problem));
            }
            for event in reader.feed(&chunk).map_err(ModelError::Garbled)? {
                self.take(&event)?;
            }
            if self.gathering.done {
                self.ready.extend(std::mem::take(&mut self.gathering).end()?);
            } else {
                self.reader = Some(reader);
            }
        }
    }

    fn take(&mut self, event: &str) -> Result<(), ModelError> {
        self.gathering.event(event.as_bytes())?;
        let text = std::mem::take(&mut self.gathering.text);
        self.ready.extend((!text.is_empty()).then_some(Piece::Text(text)));
        Ok(())
    }
}

/// What was said so far. Calls of tools come in fragments and are whole only at the end.
#[derive(Default)]
struct Gathering {
    text: String,
    calls: BTreeMap<u64, ToolCall>,
    usage: Option<Usage>,
    /// Whether the service gave a reason to stop, or said that it is done.
    finished: bool,
    done: bool,
}

impl Gathering {
    fn event(&mut self, event: &[u8]) -> Result<(), ModelError> {
        if event == b"[DONE]" {
            (self.finished, self.done) = (true, true);
            return Ok(());
        }
        let json: Json = serde_json::from_slice(event)
            .map_err(|error| ModelError::Garbled(format!("an event is no JSON: {error}")))?;
        if let Some(error) = json.get("error").filter(|error| !error.is_null()) {
            let message =
                error.get("message").and_then(Json::as_str).unwrap_or("it did not say why");
            return Err(unavailable(message.chars().take(300).collect::<String>()));
        }
        if let Some(usage) = json.get("usage").filter(|usage| usage.is_object()) {
            let count = |name: &str| usage.get(name).and_then(Json::as_u64).unwrap_or(0);
            let (input_tokens, output_tokens) =
                (count("prompt_tokens"), count("completion_tokens"));
            self.usage = Some(Usage { input_tokens, output_tokens });
        }
        let Some(choice) = json.pointer("/choices/0") else { return Ok(()) };
        self.finished |= choice.get("finish_reason").is_some_and(|reason| !reason.is_null());
        let said = choice.get("delta").or_else(|| choice.get("message"));
        let Some(said) = said else { return Ok(()) };
        if let Some(text) = said.get("content").and_then(Json::as_str) {
            self.text.push_str(text);
        }
        let calls = said.get("tool_calls").and_then(Json::as_array);
        for (place, call) in calls.into_iter().flatten().enumerate() {
            self.call(place as u64, call)?;
        }
        Ok(())
    }

    fn call(&mut self, place: u64, fragment: &Json) -> Result<(), ModelError> {
        let index = fragment.get("index").and_then(Json::as_u64).unwrap_or(place);
        let empty = ToolCall { id: String::new(), name: String::new(), arguments: String::new() };
        let call = self.calls.entry(index).or_insert(empty);
        let text = |pointer: &str| fragment.pointer(pointer).and_then(Json::as_str).unwrap_or("");
        call.id.push_str(text("/id"));
        call.name.push_str(text("/function/name"));
        call.arguments.push_str(text("/function/arguments"));
        let bytes = call.id.len() + call.name.len() + call.arguments.len();
        if self.calls.len() > TOOL_CALLS_MAX || bytes > TOOL_ARGUMENTS_BYTES_MAX {
            let problem = format!(
                "more than {TOOL_CALLS_MAX} calls of tools, or one above {TOOL_ARGUMENTS_BYTES_MAX} bytes"
            );
            return Err(ModelError::Garbled(problem));
        }
        Ok(())
    }

    /// The pieces that are left at the end. An answer that just stops was cut off.
    fn end(self) -> Result<Vec<Piece>, ModelError> {
        if !self.finished {
            return Err(unavailable("its answer was cut off"));
        }
        let mut pieces = Vec::new();
        pieces.extend((!self.text.is_empty()).then_some(Piece::Text(self.text)));
        for (index, mut call) in self.calls {
            if call.name.is_empty() {
                return Err(ModelError::Garbled("a call names no tool".to_owned()));
            }
            if call.id.is_empty() {
                call.id = format!("call-{index}");
            }
            pieces.push(Piece::Call(call));
        }
        pieces.extend(self.usage.map(Piece::Usage));
        Ok(pieces)
    }
}
