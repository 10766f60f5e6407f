//! The OpenAI-compatible client against a server with every kind of behavior.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Response, StatusCode};
use axum::routing::post;
use futures_util::{StreamExt, stream};
use headwater::desk::model::{
    Fault, IncompleteReason, LanguageModel, ModelAnswer, ModelError, ModelPrompt, ResponseChunk,
    TokenUsage, ToolCall, ToolSpec, Turn,
};
use headwater::desk::{OpenAiConfig, OpenAiModel};
use headwater_stream::Backoff;
use serde_json::{Value as Json, json};

/// Behavior of the server for one request.
#[derive(Clone)]
enum Behavior {
    /// Streams these chunks, one by one.
    StreamChunks(Vec<String>),
    /// Streams these chunks, then stalls and keeps the connection open.
    Stall(Vec<String>),
    /// Responds with status, body and headers.
    Respond(u16, &'static str, Vec<(&'static str, &'static str)>),
    /// Never responds.
    NoResponse,
    /// Streams bytes that are not UTF-8.
    StreamBytes(&'static [u8]),
    /// Streams the same chunk without end.
    StreamForever(String),
}

#[derive(Default)]
struct Server {
    script: Mutex<Vec<Behavior>>,
    requests: Mutex<Vec<(HeaderMap, Json)>>,
    count: AtomicUsize,
}

impl Server {
    async fn start(script: Vec<Behavior>) -> (Arc<Self>, SocketAddr) {
        let server = Arc::new(Self { script: Mutex::new(script), ..Self::default() });
        let router =
            Router::new().route("/v1/chat/completions", post(respond)).with_state(server.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        (server, address)
    }
}

async fn respond(
    State(server): State<Arc<Server>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    let body = serde_json::from_slice(&body).unwrap();
    server.requests.lock().unwrap().push((headers, body));
    server.count.fetch_add(1, Ordering::SeqCst);
    let behavior = server.script.lock().unwrap().remove(0);
    let streamed = |body: Body| {
        Response::builder().header("content-type", "text/event-stream").body(body).unwrap()
    };
    let byte_stream = |chunks: Vec<String>| {
        stream::iter(chunks.into_iter().map(|chunk| Ok::<_, Infallible>(Bytes::from(chunk))))
    };
    match behavior {
        Behavior::StreamChunks(chunks) => streamed(Body::from_stream(byte_stream(chunks))),
        Behavior::Stall(chunks) => {
            streamed(Body::from_stream(byte_stream(chunks).chain(stream::pending())))
        }
        Behavior::StreamForever(chunk) => {
            streamed(Body::from_stream(stream::repeat_with(move || {
                Ok::<_, Infallible>(Bytes::from(chunk.clone()))
            })))
        }
        Behavior::StreamBytes(bytes) => streamed(Body::from(bytes)),
        Behavior::NoResponse => std::future::pending().await,
        Behavior::Respond(status, body, headers) => {
            let mut response = Response::builder().status(StatusCode::from_u16(status).unwrap());
            for (name, value) in headers {
                response = response.header(name, value);
            }
            response.body(Body::from(body)).unwrap()
        }
    }
}

fn event(json: &Json) -> String {
    format!("data: {json}\n\n")
}

fn text(text: &str) -> String {
    event(&json!({"choices": [{"index": 0, "delta": {"content": text}}]}))
}

fn stop() -> Vec<String> {
    vec![
        event(&json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})),
        event(&json!({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 7}})),
        "data: [DONE]\n\n".to_owned(),
    ]
}

fn answers(words: &str) -> Behavior {
    Behavior::StreamChunks([vec![text(words)], stop()].concat())
}

fn model(address: SocketAddr) -> OpenAiModel {
    model_with_timeouts(address, Duration::from_secs(20), Duration::from_secs(10))
}

fn model_with_timeouts(address: SocketAddr, total: Duration, idle: Duration) -> OpenAiModel {
    let key = Some("sk-secret-key".to_owned().into());
    OpenAiModel::new(OpenAiConfig {
        total_timeout: total,
        idle_timeout: idle,
        backoff: Backoff::Fixed(Duration::from_millis(1)),
        ..OpenAiConfig::new(format!("http://{address}/v1/"), "small", key)
    })
    .unwrap()
}

fn prompt() -> ModelPrompt {
    ModelPrompt {
        turns: vec![Turn::System("Be kind.".into()), Turn::User("{}".into())],
        tools: vec![],
        output_tokens_max: 50,
    }
}

async fn complete(model: &OpenAiModel) -> Result<ModelAnswer, ModelError> {
    model.complete(&prompt()).await?.collect().await
}

#[tokio::test]
async fn an_answer_is_streamed_in_chunks_with_its_token_usage() {
    let all = [vec![text("Hel"), text("lo")], stop()].concat().concat();
    // Split at arbitrary positions.
    let cut = all.as_bytes().chunks(7).map(|part| String::from_utf8(part.to_vec()).unwrap());
    let (server, address) = Server::start(vec![Behavior::StreamChunks(cut.collect())]).await;
    let mut stream = model(address).complete(&prompt()).await.unwrap();
    let mut got = Vec::new();
    while let Some(chunk) = stream.next().await {
        got.push(chunk.unwrap());
    }
    let usage = TokenUsage { input_tokens: 11, output_tokens: 7 };
    assert_eq!(
        got,
        [
            ResponseChunk::Text("Hel".into()),
            ResponseChunk::Text("lo".into()),
            ResponseChunk::Usage(usage)
        ]
    );
    let requests = server.requests.lock().unwrap();
    let (headers, body) = &requests[0];
    assert_eq!(headers["authorization"], "Bearer sk-secret-key");
    assert_eq!(
        (&body["model"], &body["stream"], &body["max_completion_tokens"]),
        (&json!("small"), &json!(true), &json!(50))
    );
    assert_eq!(body.get("max_tokens"), None, "current models reject it");
    assert_eq!(body["messages"][0], json!({"role": "system", "content": "Be kind."}));
    assert_eq!(body["messages"][1]["role"], "user");
    assert_eq!(body.get("tools"), None);
}

#[tokio::test]
async fn tool_calls_are_assembled_from_fragments() {
    let fragment = |json: Json| event(&json!({"choices": [{"delta": {"tool_calls": [json]}}]}));
    let script = [
        vec![
            fragment(
                json!({"index": 0, "id": "c1", "function": {"name": "search", "arguments": ""}}),
            ),
            fragment(json!({"index": 0, "function": {"arguments": "{\"query\":"}})),
            fragment(
                json!({"index": 1, "id": "c2", "function": {"name": "close", "arguments": "{}"}}),
            ),
            fragment(json!({"index": 0, "function": {"arguments": "\"x\"}"}})),
        ],
        stop(),
    ]
    .concat();
    let (server, address) =
        Server::start(vec![Behavior::StreamChunks(script), answers("ok")]).await;
    let model = model(address);
    let spec = ToolSpec {
        name: "search".into(),
        description: "d".into(),
        parameters: json!({"type": "object"}),
    };
    let mut prompt = ModelPrompt { tools: vec![spec], ..prompt() };
    let answer = model.complete(&prompt).await.unwrap().collect().await.unwrap();
    let call = |id: &str, name: &str, arguments: &str| ToolCall {
        id: id.into(),
        name: name.into(),
        arguments: arguments.into(),
    };
    assert_eq!(answer.calls, [call("c1", "search", r#"{"query":"x"}"#), call("c2", "close", "{}")]);

    // Tool calls and their results are sent back in the format of the service.
    prompt.turns.push(Turn::Assistant(answer));
    prompt.turns.push(Turn::ToolResult { call_id: "c1".into(), content: "[]".into() });
    model.complete(&prompt).await.unwrap().collect().await.unwrap();
    let body = &server.requests.lock().unwrap()[1].1;
    assert_eq!(body["tools"][0]["function"]["name"], "search");
    assert_eq!(body["messages"][2]["tool_calls"][0]["function"]["arguments"], r#"{"query":"x"}"#);
    assert_eq!(body["messages"][3], json!({"role": "tool", "tool_call_id": "c1", "content": "[]"}));
}

#[tokio::test]
async fn a_service_that_does_not_stream_is_supported() {
    let body = r#"{"choices":[{"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":2}}"#;
    let json = vec![("content-type", "application/json")];
    let (_server, address) = Server::start(vec![Behavior::Respond(200, body, json)]).await;
    let answer = complete(&model(address)).await.unwrap();
    assert_eq!((answer.text.as_str(), answer.usage.unwrap().total()), ("Hello", 3));
}

#[tokio::test]
async fn rate_limits_and_server_errors_are_retried() {
    let script = vec![
        Behavior::Respond(429, "slow down", vec![("retry-after", "0")]),
        Behavior::Respond(500, "oops", vec![]),
        Behavior::Respond(503, "", vec![]),
        answers("Hello"),
    ];
    let (server, address) = Server::start(script).await;
    assert_eq!(complete(&model(address)).await.unwrap().text, "Hello");
    assert_eq!(server.count.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn a_call_fails_after_the_last_attempt() {
    let (server, address) = Server::start(vec![Behavior::Respond(500, "oops", vec![]); 9]).await;
    let error = complete(&model(address)).await.unwrap_err();
    assert!(
        matches!(&error, ModelError::Unavailable(reason) if reason.contains("oops")),
        "{error}"
    );
    assert_eq!(server.count.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn a_retry_after_beyond_the_timeout_is_returned_to_the_caller() {
    let busy = Behavior::Respond(429, "", vec![("retry-after", "77")]);
    let (server, address) = Server::start(vec![busy]).await;
    let error = complete(&model(address)).await.unwrap_err();
    let after = Some(Duration::from_secs(77));
    assert!(matches!(&error, ModelError::RateLimited { after: it, .. } if *it == after), "{error}");
    assert_eq!(server.count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn client_errors_are_classified_and_never_show_the_key() {
    let body = r#"{"error":{"message":"Incorrect API key provided: sk-secret-key\u0007"}}"#;
    for (status, denied) in
        [(401, true), (403, true), (404, true), (400, false), (422, false), (302, true)]
    {
        let (server, address) =
            Server::start(vec![Behavior::Respond(status, body, vec![("location", "/x")])]).await;
        let model = model(address);
        let error = complete(&model).await.unwrap_err();
        assert_eq!(matches!(error, ModelError::Unauthorized(_)), denied, "{status}: {error}");
        assert_eq!(matches!(error, ModelError::InvalidRequest(_)), !denied, "{status}: {error}");
        assert_eq!(error.fault(), Fault::Ours, "{status}: {error}");
        assert!(error.to_string().contains("Incorrect API key provided: ***"), "{error}");
        assert!(!format!("{model:?} {error:?} {error}").contains("sk-secret-key"));
        assert_eq!(server.count.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test]
async fn a_service_that_rejects_a_part_of_the_request_gets_it_without_that_part() {
    let rejected = |body| Behavior::Respond(400, body, vec![("content-type", "application/json")]);
    // Mistral, an older server, and OpenAI for an organization that may not stream.
    let token_limit =
        r#"{"detail":[{"type":"extra_forbidden","loc":["body","max_completion_tokens"]}]}"#;
    let usage = r#"{"error":{"message":"Unrecognized request argument supplied: stream_options"}}"#;
    let streaming = r#"{"error":{"message":"Your organization must be verified to stream this model.","param":"stream"}}"#;
    let whole = r#"{"choices":[{"message":{"content":"Hello"},"finish_reason":"stop"}]}"#;
    let json = vec![("content-type", "application/json")];
    let script = vec![
        rejected(token_limit),
        rejected(usage),
        rejected(streaming),
        Behavior::Respond(200, whole, json),
        answers("Hello"),
        // The service was replaced by one with a current model.
        rejected(
            r#"{"error":{"message":"Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."}}"#,
        ),
        answers("Hello"),
    ];
    let (server, address) = Server::start(script).await;
    let model = model(address);
    for _ in 0..3 {
        assert_eq!(complete(&model).await.unwrap().text, "Hello");
    }
    let requests = server.requests.lock().unwrap();
    let has = |name: &str| -> Vec<bool> {
        requests.iter().map(|(_, body)| body.get(name).is_some_and(|it| it != false)).collect()
    };
    let (yes, no) = (true, false);
    // The accepted format is remembered.
    assert_eq!(has("max_completion_tokens"), [yes, no, no, no, no, no, yes]);
    assert_eq!(has("max_tokens"), [no, yes, yes, yes, yes, yes, no]);
    assert_eq!(has("stream_options"), [yes, yes, no, no, no, no, no]);
    assert_eq!(has("stream"), [yes, yes, yes, no, no, no, no]);
}

#[tokio::test]
async fn an_error_caused_by_the_text_is_not_a_request_error() {
    for (body, is_too_long) in [
        (r#"{"error":{"message":"m","code":"context_length_exceeded"}}"#, true),
        (r#"{"error":{"message":"This model's maximum context length is 8192 tokens."}}"#, true),
        (r#"{"type":"error","error":{"message":"prompt is too long: 9 > 8"}}"#, true),
        (r#"{"error":{"message":"m","code":"content_policy_violation"}}"#, false),
        (
            r#"{"error":{"message":"The response was filtered due to the prompt triggering Azure OpenAI's content management policy."}}"#,
            false,
        ),
    ] {
        let (_server, address) = Server::start(vec![Behavior::Respond(400, body, vec![])]).await;
        let error = complete(&model(address)).await.unwrap_err();
        assert_eq!(error.fault(), Fault::Content, "{error}");
        assert_eq!(matches!(error, ModelError::TooLong(_)), is_too_long, "{error}");
    }
}

#[tokio::test]
async fn an_incomplete_answer_is_marked() {
    let finish = |reason: &str| {
        let last = json!({"choices": [{"delta": {}, "finish_reason": reason}]});
        let call = json!({"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{\"a"}}]}}]});
        Behavior::StreamChunks(vec![text("Pay them 100"), event(&call), event(&last)])
    };
    let refusal =
        event(&json!({"choices": [{"delta": {"refusal": "No."}, "finish_reason": "stop"}]}));
    for (behavior, expected) in [
        (finish("length"), IncompleteReason::Length),
        (finish("content_filter"), IncompleteReason::Refused),
        (Behavior::StreamChunks(vec![refusal]), IncompleteReason::Refused),
    ] {
        let (_server, address) = Server::start(vec![behavior]).await;
        let answer = complete(&model(address)).await.unwrap();
        assert_eq!((answer.incomplete, answer.calls.len()), (Some(expected), 0));
    }
}

#[tokio::test]
async fn a_stalled_service_times_out() {
    // The idle timeout applies: the total timeout is much longer.
    let (short, long) = (Duration::from_secs(2), Duration::from_secs(3600));
    let (_server, address) = Server::start(vec![Behavior::Stall(vec![text("Hel")]); 9]).await;
    let model = model_with_timeouts(address, long, short);
    let answer = tokio::time::timeout(Duration::from_secs(120), complete(&model)).await;
    let error = answer.expect("it times out").unwrap_err();
    assert!(
        matches!(&error, ModelError::Unavailable(reason) if reason.contains("stalled")),
        "{error}"
    );

    // No response at all: retried until the total timeout.
    let (server, address) = Server::start(vec![Behavior::NoResponse; 9]).await;
    let error = complete(&model_with_timeouts(address, short * 2, short)).await.unwrap_err();
    assert!(matches!(error, ModelError::Unavailable(_)), "{error}");
    assert!(server.count.load(Ordering::SeqCst) >= 1);
}

#[tokio::test]
async fn a_truncated_answer_is_an_error() {
    let (_server, address) =
        Server::start(vec![Behavior::StreamChunks(vec![text("Pay them 100")])]).await;
    let error = complete(&model(address)).await.unwrap_err();
    assert!(
        matches!(&error, ModelError::Unavailable(reason) if reason.contains("cut off")),
        "{error}"
    );
}

#[tokio::test]
async fn an_invalid_response_is_an_error() {
    let deep = format!("data: {}\n\n", "[".repeat(100_000));
    for behavior in [
        Behavior::StreamChunks(vec!["data: {\"choices\": [{\n\n".to_owned()]),
        Behavior::StreamChunks(vec![deep]),
        Behavior::StreamChunks(vec!["data: 17\n\n".to_owned()]),
        Behavior::StreamChunks(vec!["<html>not a model</html>".to_owned()]),
        Behavior::StreamBytes(b"data: \xff\xfe\n\n"),
        Behavior::StreamChunks(
            [vec![event(&json!({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}))], stop()]
                .concat(),
        ),
        Behavior::StreamForever(text("x")),
        Behavior::StreamForever("x".repeat(1000)),
        Behavior::StreamChunks(vec![event(&json!({"error": {"message": "overloaded"}}))]),
    ] {
        let (_server, address) = Server::start(vec![behavior]).await;
        let error = complete(&model(address)).await.unwrap_err();
        assert!(
            matches!(error, ModelError::InvalidResponse(_) | ModelError::Unavailable(_)),
            "{error}"
        );
    }
}

#[tokio::test]
async fn an_invalid_url_is_rejected_and_a_refused_connection_is_unreachable() {
    for url in ["", "not an address", "ftp://example.com", "file:///etc/passwd"] {
        assert!(OpenAiModel::new(OpenAiConfig::new(url, "m", None)).is_err(), "{url}");
    }
    // Nothing listens on this port.
    let error = complete(&model("127.0.0.1:1".parse().unwrap())).await.unwrap_err();
    assert!(matches!(error, ModelError::Unreachable(_)), "{error}");
    let said = error.to_string();
    assert!(said.contains("`model.url`: http://127.0.0.1:1"), "{said}");
}
