//! A fake model that calls tools, and the HTTP service that they call, with faults.
//!
//! The model has no state: the text of the user and the number of tool results decide what it does next, so a repeated run
//! does the same. The service counts its requests, and what it has carried out, by idempotency key.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

async fn listen(router: Router) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    // Stops with the runtime of the test.
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(format!("http://{address}"))
}

/// A word in the text of a user, and the calls that the model makes for it, one after another.
pub(crate) type CallPlan = (&'static str, &'static [(&'static str, &'static str)]);

/// The model.
#[derive(Clone)]
pub(crate) struct ToolModel {
    plans: &'static [CallPlan],
    requests: Arc<Mutex<Vec<Value>>>,
    /// While true, requests with a tool result wait.
    blocked: Arc<watch::Sender<bool>>,
}

impl ToolModel {
    /// Starts it; returns it and its URL.
    pub(crate) async fn start(plans: &'static [CallPlan]) -> Result<(Self, String)> {
        let blocked = Arc::new(watch::Sender::new(false));
        let model = Self { plans, requests: Arc::default(), blocked };
        let router = Router::new().route("/v1/chat/completions", post(complete));
        let url = listen(router.with_state(model.clone())).await?;
        Ok((model, format!("{url}/v1")))
    }

    /// Whether requests with a tool result wait.
    pub(crate) fn block(&self, blocked: bool) {
        self.blocked.send_replace(blocked);
    }

    /// The requests so far whose thread contains this word.
    pub(crate) fn requests(&self, word: &str) -> Vec<Value> {
        let requests = self.requests.lock().expect("no panic");
        requests.iter().filter(|body| thread(body).contains(word)).cloned().collect()
    }
}

/// The thread of the issue in a request.
fn thread(body: &Value) -> &str {
    let messages = body["messages"].as_array().map_or(&[][..], Vec::as_slice);
    let of_user = messages.iter().find(|one| one["role"] == "user");
    of_user.and_then(|one| one["content"].as_str()).unwrap_or_default()
}

async fn complete(State(model): State<ToolModel>, Json(body): Json<Value>) -> Response {
    model.requests.lock().expect("no panic").push(body.clone());
    let messages = body["messages"].as_array().cloned().unwrap_or_default();
    let told: Vec<Value> = messages.iter().filter(|one| one["role"] == "tool").cloned().collect();
    let asked = thread(&body).to_owned();
    let plan =
        model.plans.iter().find(|(word, _)| asked.contains(word)).map_or(&[][..], |plan| plan.1);
    if !told.is_empty() {
        let mut blocked = model.blocked.subscribe();
        let _ = blocked.wait_for(|blocked| !blocked).await;
    }
    let (delta, finish) = match plan.get(told.len()) {
        Some((name, arguments)) if body["tools"].is_array() => {
            let function = json!({"name": name, "arguments": arguments});
            let call = json!({"index": 0, "id": format!("c{}", told.len()), "function": function});
            (json!({"tool_calls": [call]}), "tool_calls")
        }
        _ => {
            let results: Vec<&str> =
                told.iter().filter_map(|one| one["content"].as_str()).collect();
            (json!({"content": format!("The tools say: {}", results.join(" "))}), "stop")
        }
    };
    let chunk = json!({"choices": [{"delta": delta, "finish_reason": finish}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 5}});
    let kind = [(header::CONTENT_TYPE, "text/event-stream")];
    (kind, format!("data: {chunk}\n\ndata: [DONE]\n\n")).into_response()
}

/// The service that tools call.
#[derive(Clone, Default)]
pub(crate) struct ToolService {
    state: Arc<Mutex<ServiceState>>,
    /// Does not respond after it has carried out a request.
    pub(crate) is_silent_after: Arc<AtomicBool>,
    /// Does not respond, and carries out nothing.
    pub(crate) is_silent_before: Arc<AtomicBool>,
}

#[derive(Default)]
struct ServiceState {
    /// Keys and bodies of all requests that change something.
    requests: Vec<(String, Value)>,
    /// Bodies of those that were carried out, by key.
    done: BTreeMap<String, Vec<Value>>,
    /// Paths and headers of the requests that only read.
    reads: Vec<(String, HeaderMap)>,
}

impl ToolService {
    /// Starts it; returns it and its URL.
    pub(crate) async fn start() -> Result<(Self, String)> {
        let service = Self::default();
        let router = Router::new()
            .route("/refunds", post(refund))
            .route("/refunds/{key}", get(find))
            .route("/bad/{kind}", get(bad).post(bad))
            .fallback(get(read))
            .with_state(service.clone());
        let url = listen(router).await?;
        Ok((service, url))
    }

    /// Requests so far that change something: keys and bodies.
    pub(crate) fn requests(&self, order: &str) -> Vec<(String, Value)> {
        let state = self.state.lock().expect("no panic");
        state.requests.iter().filter(|(_, body)| body["order"] == order).cloned().collect()
    }

    /// How often the refund of an order was carried out.
    pub(crate) fn done(&self, order: &str) -> usize {
        let state = self.state.lock().expect("no panic");
        state.done.values().flatten().filter(|body| body["order"] == order).count()
    }

    /// Paths and headers of requests that only read.
    pub(crate) fn reads(&self) -> Vec<(String, HeaderMap)> {
        self.state.lock().expect("no panic").reads.clone()
    }
}

async fn refund(
    State(service): State<ToolService>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> Response {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok());
    // A service without idempotency keys finds the reference of the caller in the body, and repeats what it is asked.
    let given = key.is_some();
    let key = key.or(body["reference"].as_str()).unwrap_or_default().to_owned();
    {
        let mut state = service.state.lock().expect("no panic");
        state.requests.push((key.clone(), body.clone()));
        if !service.is_silent_before.load(Ordering::SeqCst) {
            let done = state.done.entry(key.clone()).or_default();
            if !given || done.is_empty() {
                done.push(body.clone());
            }
        }
    }
    if service.is_silent_before.load(Ordering::SeqCst)
        || service.is_silent_after.load(Ordering::SeqCst)
    {
        std::future::pending::<()>().await;
    }
    if body["order"] == "invalid" {
        service.state.lock().expect("no panic").done.remove(&key);
        return (StatusCode::UNPROCESSABLE_ENTITY, "no such order").into_response();
    }
    (StatusCode::CREATED, Json(json!({"refunded": body["order"]}))).into_response()
}

async fn find(State(service): State<ToolService>, Path(key): Path<String>) -> Response {
    let state = service.state.lock().expect("no panic");
    match state.done.get(&key).and_then(|done| done.first()) {
        Some(body) => Json(json!({"found": body["order"]})).into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

async fn read(
    State(service): State<ToolService>,
    uri: axum::http::Uri,
    headers: HeaderMap,
) -> Json<Value> {
    service.state.lock().expect("no panic").reads.push((uri.to_string(), headers));
    Json(json!({"status": "sent <yesterday>"}))
}

async fn bad(Path(kind): Path<String>) -> Response {
    match kind.as_str() {
        "html" => ([(header::CONTENT_TYPE, "text/html")], "<html>hello</html>").into_response(),
        "broken" => ([(header::CONTENT_TYPE, "application/json")], "{\"a\":").into_response(),
        "huge" => {
            let chunks =
                stream::repeat_with(|| Ok::<_, std::convert::Infallible>(vec![b'x'; 1 << 20]));
            Body::from_stream(chunks).into_response()
        }
        "never" => std::future::pending().await,
        "redirect" => {
            let to = [(header::LOCATION, "http://127.0.0.2:9/elsewhere")];
            (StatusCode::FOUND, to).into_response()
        }
        "moved" => (StatusCode::FOUND, [(header::LOCATION, "/orders/moved")]).into_response(),
        _ => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}
