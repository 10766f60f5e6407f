//! The client of OpenAI-compatible services against a server that does everything such a server may do.

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
    Answer, LanguageModel, ModelError, ModelPrompt, Piece, ToolCall, ToolSpec, Turn, Usage,
};
use headwater::desk::{OpenAiConfig, OpenAiModel};
use serde_json::{Value as Json, json};

/// What the server does with one request.
#[derive(Clone)]
enum Does {
    /// Streams these chunks, one by one.
    Streams(Vec<String>),
    /// Streams these, then says nothing more and keeps the connection.
    Stalls(Vec<String>),
    /// Answers at once.
    Answers(u16, &'static str, Vec<(&'static str, &'static str)>),
    /// Says nothing at all.
    IsSilent,
    /// Streams bytes that are no text.
    SendsBytes(&'static [u8]),
    /// Streams the same chunk for ever.
    NeverEnds(String),
}

#[derive(Default)]
struct Server {
    script: Mutex<Vec<Does>>,
    requests: Mutex<Vec<(HeaderMap, Json)>>,
    count: AtomicUsize,
}

impl Server {
    async fn start(script: Vec<Does>) -> (Arc<Self>, SocketAddr) {
        let server = Arc::new(Self { script: Mutex::new(script), ..Self::default() });
        let router =
            Router::new().route("/v1/chat/completions", post(answer)).with_state(server.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        (server, address)
    }
}

async fn answer(
    State(server): State<Arc<Server>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    let body = serde_json::from_slice(&body).unwrap();
    server.requests.lock().unwrap().push((headers, body));
    server.count.fetch_add(1, Ordering::SeqCst);
    let does = server.script.lock().unwrap().remove(0);
    let streamed = |body: Body| {
        Response::builder().header("content-type", "text/event-stream").body(body).unwrap()
    };
    let chunks = |chunks: Vec<String>| {
        stream::iter(chunks.into_iter().map(|chunk| Ok::<_, Infallible>(Bytes::from(chunk))))
    };
    match does {
        Does::Streams(pieces) => streamed(Body::from_stream(chunks(pieces))),
        Does::Stalls(pieces) => {
            streamed(Body::from_stream(chunks(pieces).chain(stream::pending())))
        }
        Does::NeverEnds(chunk) => streamed(Body::from_stream(stream::repeat_with(move || {
            Ok::<_, Infallible>(Bytes::from(chunk.clone()))
        }))),
        Does::SendsBytes(bytes) => streamed(Body::from(bytes)),
        Does::IsSilent => std::future::pending().await,
        Does::Answers(status, body, headers) => {
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

fn says(words: &str) -> Does {
    Does::Streams([vec![text(words)], stop()].concat())
}

fn model(address: SocketAddr) -> OpenAiModel {
    impatient(address, Duration::from_secs(20), Duration::from_secs(10))
}

fn impatient(address: SocketAddr, total: Duration, idle: Duration) -> OpenAiModel {
    let key = Some("sk-secret-key".to_owned().into());
    OpenAiModel::new(OpenAiConfig {
        total_timeout: total,
        idle_timeout: idle,
        backoff: Duration::from_millis(1),
        ..OpenAiConfig::new(format!("http://{address}/v1/"), "small", key)
    })
    .unwrap()
}

fn prompt() -> ModelPrompt {
    ModelPrompt {
        turns: vec![Turn::Instruction("Be kind.".into()), Turn::Data("{}".into())],
        tools: vec![],
        output_tokens_max: 50,
    }
}

async fn ask(model: &OpenAiModel) -> Result<Answer, ModelError> {
    model.ask(&prompt()).await?.gather().await
}

#[tokio::test]
async fn an_answer_comes_piece_by_piece_with_what_it_took() {
    let all = [vec![text("Hel"), text("lo")], stop()].concat().concat();
    // The network cuts where it likes.
    let cut = all.as_bytes().chunks(7).map(|part| String::from_utf8(part.to_vec()).unwrap());
    let (server, address) = Server::start(vec![Does::Streams(cut.collect())]).await;
    let mut pieces = model(address).ask(&prompt()).await.unwrap();
    let mut got = Vec::new();
    while let Some(piece) = pieces.next().await {
        got.push(piece.unwrap());
    }
    let usage = Usage { input_tokens: 11, output_tokens: 7 };
    assert_eq!(got, [Piece::Text("Hel".into()), Piece::Text("lo".into()), Piece::Usage(usage)]);
    let requests = server.requests.lock().unwrap();
    let (headers, body) = &requests[0];
    assert_eq!(headers["authorization"], "Bearer sk-secret-key");
    assert_eq!(
        (&body["model"], &body["stream"], &body["max_tokens"]),
        (&json!("small"), &json!(true), &json!(50))
    );
    assert_eq!(body["messages"][0], json!({"role": "system", "content": "Be kind."}));
    assert_eq!(body["messages"][1]["role"], "user");
    assert_eq!(body.get("tools"), None);
}

#[tokio::test]
async fn calls_of_tools_are_put_together_from_their_fragments() {
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
    let (server, address) = Server::start(vec![Does::Streams(script), says("ok")]).await;
    let model = model(address);
    let spec = ToolSpec { name: "search", description: "d", parameters: json!({"type": "object"}) };
    let mut prompt = ModelPrompt { tools: vec![spec], ..prompt() };
    let answer = model.ask(&prompt).await.unwrap().gather().await.unwrap();
    let call = |id: &str, name: &str, arguments: &str| ToolCall {
        id: id.into(),
        name: name.into(),
        arguments: arguments.into(),
    };
    assert_eq!(answer.calls, [call("c1", "search", r#"{"query":"x"}"#), call("c2", "close", "{}")]);

    // What was called, and what came of it, goes back in the words of the service.
    prompt.turns.push(Turn::Answer(answer));
    prompt.turns.push(Turn::ToolResult { call_id: "c1".into(), content: "[]".into() });
    model.ask(&prompt).await.unwrap().gather().await.unwrap();
    let body = &server.requests.lock().unwrap()[1].1;
    assert_eq!(body["tools"][0]["function"]["name"], "search");
    assert_eq!(body["messages"][2]["tool_calls"][0]["function"]["arguments"], r#"{"query":"x"}"#);
    assert_eq!(body["messages"][3], json!({"role": "tool", "tool_call_id": "c1", "content": "[]"}));
}

#[tokio::test]
async fn a_service_that_does_not_stream_serves_as_well() {
    let body = r#"{"choices":[{"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":2}}"#;
    let json = vec![("content-type", "application/json")];
    let (_server, address) = Server::start(vec![Does::Answers(200, body, json)]).await;
    let answer = ask(&model(address)).await.unwrap();
    assert_eq!((answer.text.as_str(), answer.usage.unwrap().total()), ("Hello", 3));
}

#[tokio::test]
async fn a_busy_or_broken_service_is_asked_again() {
    let script = vec![
        Does::Answers(429, "slow down", vec![("retry-after", "0")]),
        Does::Answers(500, "oops", vec![]),
        Does::Answers(503, "", vec![]),
        says("Hello"),
    ];
    let (server, address) = Server::start(script).await;
    assert_eq!(ask(&model(address)).await.unwrap().text, "Hello");
    assert_eq!(server.count.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn a_service_that_stays_broken_is_given_up_after_the_last_try() {
    let (server, address) = Server::start(vec![Does::Answers(500, "oops", vec![]); 9]).await;
    let error = ask(&model(address)).await.unwrap_err();
    assert!(
        matches!(&error, ModelError::Unavailable(reason) if reason.contains("oops")),
        "{error}"
    );
    assert_eq!(server.count.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn a_service_that_wants_us_to_wait_longer_than_we_can_tells_the_caller_how_long() {
    let busy = Does::Answers(429, "", vec![("retry-after", "77")]);
    let (server, address) = Server::start(vec![busy]).await;
    let error = ask(&model(address)).await.unwrap_err();
    let after = Some(Duration::from_secs(77));
    assert!(matches!(&error, ModelError::Busy { after: it, .. } if *it == after), "{error}");
    assert_eq!(server.count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn refusals_are_told_apart_and_never_show_the_key() {
    let body = r#"{"error":{"message":"Incorrect API key provided: sk-secret-key\u0007"}}"#;
    for (status, denied) in
        [(401, true), (403, true), (404, true), (400, false), (422, false), (302, true)]
    {
        let (server, address) =
            Server::start(vec![Does::Answers(status, body, vec![("location", "/x")])]).await;
        let model = model(address);
        let error = ask(&model).await.unwrap_err();
        assert_eq!(matches!(error, ModelError::Denied(_)), denied, "{status}: {error}");
        assert_eq!(matches!(error, ModelError::Refused(_)), !denied, "{status}: {error}");
        assert!(error.to_string().contains("Incorrect API key provided: ***"), "{error}");
        assert!(!format!("{model:?} {error:?} {error}").contains("sk-secret-key"));
        assert_eq!(server.count.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test]
async fn a_service_that_falls_silent_is_given_up_in_time() {
    // Silence ends it: the answer as a whole would have all the time in the world.
    let (short, long) = (Duration::from_secs(2), Duration::from_secs(3600));
    let (_server, address) = Server::start(vec![Does::Stalls(vec![text("Hel")]); 9]).await;
    let model = impatient(address, long, short);
    let answer = tokio::time::timeout(Duration::from_secs(120), ask(&model)).await;
    let error = answer.expect("it is given up").unwrap_err();
    assert!(
        matches!(&error, ModelError::Unavailable(reason) if reason.contains("silent")),
        "{error}"
    );

    // Not even a beginning: it is asked again, and given up when the time is over.
    let (server, address) = Server::start(vec![Does::IsSilent; 9]).await;
    let error = ask(&impatient(address, short * 2, short)).await.unwrap_err();
    assert!(matches!(error, ModelError::Unavailable(_)), "{error}");
    assert!(server.count.load(Ordering::SeqCst) >= 1);
}

#[tokio::test]
async fn an_answer_that_is_cut_off_is_no_answer() {
    let (_server, address) = Server::start(vec![Does::Streams(vec![text("Pay them 100")])]).await;
    let error = ask(&model(address)).await.unwrap_err();
    assert!(
        matches!(&error, ModelError::Unavailable(reason) if reason.contains("cut off")),
        "{error}"
    );
}

#[tokio::test]
async fn garbage_is_an_error_and_nothing_else() {
    let deep = format!("data: {}\n\n", "[".repeat(100_000));
    for does in [
        Does::Streams(vec!["data: {\"choices\": [{\n\n".to_owned()]),
        Does::Streams(vec![deep]),
        Does::Streams(vec!["data: 17\n\n".to_owned()]),
        Does::Streams(vec!["<html>not a model</html>".to_owned()]),
        Does::SendsBytes(b"data: \xff\xfe\n\n"),
        Does::Streams(
            [vec![event(&json!({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}))], stop()]
                .concat(),
        ),
        Does::NeverEnds(text("x")),
        Does::NeverEnds("x".repeat(1000)),
        Does::Streams(vec![event(&json!({"error": {"message": "overloaded"}}))]),
    ] {
        let (_server, address) = Server::start(vec![does]).await;
        let error = ask(&model(address)).await.unwrap_err();
        assert!(matches!(error, ModelError::Garbled(_) | ModelError::Unavailable(_)), "{error}");
    }
}

#[tokio::test]
async fn an_address_that_is_none_is_refused_at_once() {
    for url in ["", "not an address", "ftp://example.com", "file:///etc/passwd"] {
        assert!(OpenAiModel::new(OpenAiConfig::new(url, "m", None)).is_err(), "{url}");
    }
    // Nobody listens there.
    let error = ask(&model("127.0.0.1:1".parse().unwrap())).await.unwrap_err();
    assert!(matches!(error, ModelError::Away(_)), "{error}");
}
