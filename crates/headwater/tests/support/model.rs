//! A fake OpenAI-compatible service that streams answers and injects faults.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::Result;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// A fault of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ModelFault {
    /// 429 with this `Retry-After` in seconds.
    RateLimit(u64),
    /// 500.
    ServerError,
    /// This status with a body of this content type.
    Respond(u16, &'static str, &'static str),
    /// Redirects to this URL.
    Redirect(&'static str),
    /// Streams this text, ended by this finish reason.
    Finish(&'static str, &'static str),
    /// Streams a refusal instead of text.
    Refusal,
    /// Never responds.
    Stall,
    /// Stalls in the middle of the answer.
    StallMidAnswer,
    /// Closes the connection in the middle of the answer.
    HangUpMidAnswer,
    /// Calls this tool with these arguments.
    Call(&'static str, &'static str),
    /// Streams these pieces, each when [`FakeModel::write`] allows it, and then ends the answer.
    Pieces(&'static [&'static str]),
    /// The same, and ends the answer with a call of this tool with these arguments.
    PiecesAndCall(&'static [&'static str], &'static str, &'static str),
}

/// A received request.
#[derive(Clone, Debug)]
pub(crate) struct ModelRequest {
    pub(crate) body: Value,
    pub(crate) at: Instant,
}

/// The service. It answers each request by streaming [`FakeModel::ANSWER`], once unblocked.
#[derive(Clone)]
pub(crate) struct FakeModel {
    inner: Arc<Inner>,
}

struct Inner {
    /// Faults of the first requests that contain a word.
    plans: Mutex<HashMap<&'static str, VecDeque<ModelFault>>>,
    requests: Mutex<Vec<ModelRequest>>,
    gate: Semaphore,
    /// Permits for [`ModelFault::Pieces`].
    pieces: Arc<Semaphore>,
    /// Reported token usage of each answer.
    tokens: (u64, u64),
}

impl FakeModel {
    pub(crate) const ANSWER: &str = "A model says <hello>.";

    /// Starts a blocked service; returns it and its URL.
    pub(crate) async fn start(tokens: (u64, u64)) -> Result<(Self, String)> {
        let (plans, requests) = (Mutex::default(), Mutex::default());
        let (gate, pieces) = (Semaphore::new(0), Arc::new(Semaphore::new(0)));
        let inner = Arc::new(Inner { plans, requests, gate, pieces, tokens });
        let model = Self { inner };
        let router =
            Router::new().route("/v1/chat/completions", post(complete)).with_state(model.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        // Stops with the runtime of the test.
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok((model, format!("http://{address}/v1")))
    }

    /// Starts an unblocked service.
    pub(crate) async fn open(tokens: (u64, u64)) -> Result<(Self, String)> {
        let (model, url) = Self::start(tokens).await?;
        model.unblock();
        Ok((model, url))
    }

    /// Answers all requests from now on.
    pub(crate) fn unblock(&self) {
        self.inner.gate.add_permits(1_000_000);
    }

    /// Lets `count` more pieces of [`ModelFault::Pieces`] be written, also by later answers. The end of an answer needs one, too.
    pub(crate) fn write(&self, count: usize) {
        self.inner.pieces.add_permits(count);
    }

    /// Sets the faults of the next requests that contain this word; afterwards they are answered.
    pub(crate) fn plan(&self, word: &'static str, faults: &[ModelFault]) {
        let plan = faults.iter().copied().collect();
        self.inner.plans.lock().expect("no panic").insert(word, plan);
    }

    /// The requests so far that contain this word.
    pub(crate) fn requests(&self, word: &str) -> Vec<ModelRequest> {
        let requests = self.inner.requests.lock().expect("no panic");
        requests.iter().filter(|request| request.body.to_string().contains(word)).cloned().collect()
    }

    fn next_fault(&self, request: &str) -> Option<ModelFault> {
        let mut plans = self.inner.plans.lock().expect("no panic");
        let plan = plans.iter_mut().find(|(word, _)| request.contains(**word));
        plan.and_then(|(_, faults)| faults.pop_front())
    }
}

async fn complete(State(model): State<FakeModel>, Json(body): Json<Value>) -> Response {
    let fault = model.next_fault(&body.to_string());
    model.inner.requests.lock().expect("no panic").push(ModelRequest { body, at: Instant::now() });
    drop(model.inner.gate.acquire().await.expect("never closed"));
    let error = |message: &str| Json(json!({"error": {"message": message}}));
    match fault {
        Some(ModelFault::RateLimit(seconds)) => {
            let after = [(header::RETRY_AFTER, seconds.to_string())];
            (StatusCode::TOO_MANY_REQUESTS, after, error("slow down")).into_response()
        }
        Some(ModelFault::ServerError) => {
            (StatusCode::INTERNAL_SERVER_ERROR, error("internal error")).into_response()
        }
        Some(ModelFault::Respond(status, kind, body)) => {
            let status = StatusCode::from_u16(status).expect("a status");
            let headers = [(header::CONTENT_TYPE, kind), (header::LOCATION, "/elsewhere")];
            (status, headers, body).into_response()
        }
        Some(ModelFault::Redirect(url)) => {
            (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, url)]).into_response()
        }
        Some(ModelFault::Finish(text, reason)) => {
            streamed(stream::iter([chunk(text, Some(reason))]).boxed())
        }
        Some(ModelFault::Refusal) => {
            let refusal = json!({"choices": [{"delta": {"refusal": "I cannot help with that."}}]});
            let refusal = Bytes::from(format!("data: {refusal}\n\n"));
            streamed(stream::iter([refusal, chunk("", Some("stop"))]).boxed())
        }
        Some(ModelFault::Stall) => std::future::pending().await,
        Some(ModelFault::StallMidAnswer) => {
            streamed(stream::iter([partial_answer()]).chain(stream::pending()).boxed())
        }
        Some(ModelFault::HangUpMidAnswer) => streamed(stream::iter([partial_answer()]).boxed()),
        Some(ModelFault::Call(name, arguments)) => {
            streamed(stream::iter([call(name, arguments)]).boxed())
        }
        Some(ModelFault::Pieces(texts)) => paced(&model, texts, chunk("", Some("stop"))),
        Some(ModelFault::PiecesAndCall(texts, name, arguments)) => {
            paced(&model, texts, call(name, arguments))
        }
        None => streamed(stream::iter(answer(model.inner.tokens)).boxed()),
    }
}

fn streamed(chunks: stream::BoxStream<'static, Bytes>) -> Response {
    let body = Body::from_stream(chunks.map(Ok::<_, Infallible>));
    ([(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
}

/// Streams pieces, each when [`FakeModel::write`] allows it.
fn paced(model: &FakeModel, texts: &[&str], end: Bytes) -> Response {
    let texts = texts.iter().map(|text| chunk(text, None));
    let all = texts.chain([end]).collect::<Vec<_>>();
    let pieces = Arc::clone(&model.inner.pieces);
    let paced = stream::iter(all).then(move |piece| {
        let pieces = Arc::clone(&pieces);
        async move {
            pieces.acquire().await.expect("never closed").forget();
            piece
        }
    });
    streamed(paced.boxed())
}

/// The call of a tool, which ends an answer.
fn call(name: &str, arguments: &str) -> Bytes {
    let call = json!({"index": 0, "id": "call-1", "type": "function",
        "function": {"name": name, "arguments": arguments}});
    let call =
        json!({"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]});
    Bytes::from(format!("data: {call}\n\n"))
}

fn chunk(content: &str, finish: Option<&str>) -> Bytes {
    let chunk = json!({"choices": [{"delta": {"content": content}, "finish_reason": finish}]});
    Bytes::from(format!("data: {chunk}\n\n"))
}

/// The start of an answer that is never completed.
fn partial_answer() -> Bytes {
    chunk("Half an ans", None)
}

/// The complete answer in chunks that split events.
fn answer((input, output): (u64, u64)) -> Vec<Bytes> {
    let (first, second) = FakeModel::ANSWER.split_at(9);
    let usage = json!({"choices": [],
        "usage": {"prompt_tokens": input, "completion_tokens": output}});
    let rest = format!("data: {usage}\n\ndata: [DONE]\n\n");
    let (one, two) = rest.split_at(20);
    let last = chunk(second, Some("stop"));
    let (left, right) = (last.slice(..7), last.slice(7..));
    let (one, two) = (Bytes::from(one.to_owned()), Bytes::from(two.to_owned()));
    vec![chunk(first, None), left, right, one, two]
}
