//! An OpenAI-compatible service of a test's own: it streams, and fails in the ways that services fail.

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

/// What the service does with one question.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Does {
    /// 429, with so many seconds in `Retry-After`.
    Busy(u64),
    /// 500.
    Fails,
    /// Takes the question and says nothing.
    Stalls,
    /// Falls silent in the middle of its answer.
    StallsWithin,
    /// Hangs up in the middle of its answer.
    HangsUp,
}

/// One question as it came.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) body: Value,
    pub(crate) at: Instant,
}

/// The service. It answers each question by streaming [`FakeModel::ANSWER`], once its door is open.
#[derive(Clone)]
pub(crate) struct FakeModel {
    inner: Arc<Inner>,
}

struct Inner {
    /// What to do first with questions that hold a word.
    plans: Mutex<HashMap<&'static str, VecDeque<Does>>>,
    asked: Mutex<Vec<Asked>>,
    door: Semaphore,
    /// What it says that each answer took.
    tokens: (u64, u64),
}

impl FakeModel {
    pub(crate) const ANSWER: &str = "A model says <hello>.";

    /// A service whose door is closed, and its address.
    pub(crate) async fn start(tokens: (u64, u64)) -> Result<(Self, String)> {
        let (plans, asked) = (Mutex::default(), Mutex::default());
        let inner = Arc::new(Inner { plans, asked, door: Semaphore::new(0), tokens });
        let model = Self { inner };
        let router =
            Router::new().route("/v1/chat/completions", post(complete)).with_state(model.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        // Ends with the runtime of the test.
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok((model, format!("http://{address}/v1")))
    }

    /// A service that answers at once.
    pub(crate) async fn open(tokens: (u64, u64)) -> Result<(Self, String)> {
        let (model, url) = Self::start(tokens).await?;
        model.open_door();
        Ok((model, url))
    }

    /// Lets everybody in from now on.
    pub(crate) fn open_door(&self) {
        self.inner.door.add_permits(1_000_000);
    }

    /// What it does, one after another, with questions that hold this word; then it answers them.
    pub(crate) fn plan(&self, word: &'static str, does: &[Does]) {
        let plan = does.iter().copied().collect();
        self.inner.plans.lock().expect("no panic").insert(word, plan);
    }

    /// The questions so far that hold this word.
    pub(crate) fn asked(&self, word: &str) -> Vec<Asked> {
        let asked = self.inner.asked.lock().expect("no panic");
        asked.iter().filter(|asked| asked.body.to_string().contains(word)).cloned().collect()
    }

    fn next(&self, question: &str) -> Option<Does> {
        let mut plans = self.inner.plans.lock().expect("no panic");
        let plan = plans.iter_mut().find(|(word, _)| question.contains(**word));
        plan.and_then(|(_, does)| does.pop_front())
    }
}

async fn complete(State(model): State<FakeModel>, Json(body): Json<Value>) -> Response {
    let does = model.next(&body.to_string());
    model.inner.asked.lock().expect("no panic").push(Asked { body, at: Instant::now() });
    drop(model.inner.door.acquire().await.expect("it is never closed"));
    let refusal = |message: &str| Json(json!({"error": {"message": message}}));
    match does {
        Some(Does::Busy(seconds)) => {
            let after = [(header::RETRY_AFTER, seconds.to_string())];
            (StatusCode::TOO_MANY_REQUESTS, after, refusal("slow down")).into_response()
        }
        Some(Does::Fails) => {
            (StatusCode::INTERNAL_SERVER_ERROR, refusal("we are sorry")).into_response()
        }
        Some(Does::Stalls) => std::future::pending().await,
        Some(Does::StallsWithin) => {
            streamed(stream::iter([begun()]).chain(stream::pending()).boxed())
        }
        Some(Does::HangsUp) => streamed(stream::iter([begun()]).boxed()),
        None => streamed(stream::iter(answer(model.inner.tokens)).boxed()),
    }
}

fn streamed(chunks: stream::BoxStream<'static, Bytes>) -> Response {
    let body = Body::from_stream(chunks.map(Ok::<_, Infallible>));
    ([(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
}

fn chunk(content: &str, finish: Option<&str>) -> Bytes {
    let chunk = json!({"choices": [{"delta": {"content": content}, "finish_reason": finish}]});
    Bytes::from(format!("data: {chunk}\n\n"))
}

/// Words that nobody is to read: the answer does not go on.
fn begun() -> Bytes {
    chunk("Half an ans", None)
}

/// The whole answer in pieces, cut at odd places.
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
