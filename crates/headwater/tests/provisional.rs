//! Provisional answers through the real binary: listeners see an answer while the model writes it, in every process, and
//! nothing that needs an approval.

mod support;

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use headwater_testkit::{Postgres, Redis};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::time::timeout;

use crate::support::desk::{answered, by, open};
use crate::support::model::{FakeModel, ModelFault};
use crate::support::tool_service::ToolService;
use crate::support::{LIMIT, Server, ServerDir, text};

/// Pieces of an answer with a control character, which no listener may see.
const PIECES: &[&str] = &["Your parcel\u{7} ", "arrives ", "today."];

/// Starts a desk with this model.
fn desk(place: &ServerDir, url: &str, more: &[&str]) -> Result<Server> {
    let model = ["--model-url", url, "--model-name", "test-model", "--analytics-path", ""];
    let quick = ["--issue-quiet", "10ms", "--sweep-every", "200ms"];
    place.serve(&[&model[..], &quick, more].concat())
}

fn id(created: &Value) -> Result<String> {
    Ok(created["ticket_id"].as_str().context("a ticket")?.to_owned())
}

/// The events of a ticket.
struct Listener {
    chunks: BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    buffer: String,
}

impl Listener {
    async fn open(server: &Server, ticket: &str) -> Result<Self> {
        let request = server.client.get(server.url(&format!("/api/v1/tickets/{ticket}/events")));
        let response = request.timeout(LIMIT * 5).send().await?;
        ensure!(response.status() == 200, "{}", response.status());
        Ok(Self { chunks: response.bytes_stream().boxed(), buffer: String::new() })
    }

    /// The next event: its name and data.
    async fn next(&mut self) -> Result<(String, Value)> {
        loop {
            if let Some((event, rest)) = self.buffer.split_once("\n\n") {
                let field = |name: &str| {
                    event.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
                };
                let found = field("event:").zip(field("data:"));
                let found = found.map(|(name, data)| (name.to_owned(), data.to_owned()));
                let has_id = event.lines().any(|line| line.starts_with("id:"));
                self.buffer = rest.to_owned();
                if let Some((name, data)) = found {
                    // A resumed stream continues after a message, never after a provisional text.
                    ensure!(has_id == (name == "message"), "{name}: {data}");
                    return Ok((name, serde_json::from_str(&data)?));
                }
                continue;
            }
            let chunk = timeout(LIMIT, self.chunks.next()).await?.context("the stream ended")?;
            self.buffer.push_str(&text(&chunk?));
        }
    }

    /// The next event with this name; other ones are collected.
    async fn until(&mut self, name: &str, seen: &mut Vec<(String, Value)>) -> Result<Value> {
        loop {
            let (found, data) = self.next().await?;
            seen.push((found.clone(), data.clone()));
            if found == name {
                return Ok(data);
            }
        }
    }

    /// Waits for a provisional text with this content.
    async fn text(&mut self, content: &str) -> Result<Value> {
        loop {
            let data = self.until("provisional", &mut Vec::new()).await?;
            if data["content"] == content {
                return Ok(data);
            }
        }
    }

    /// The message of the model, and what came before it.
    async fn answer(&mut self) -> Result<(Value, Vec<(String, Value)>)> {
        let mut seen = Vec::new();
        loop {
            let message = self.until("message", &mut seen).await?;
            if message["author"] == "assistant" {
                return Ok((message, seen));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_sees_the_answer_grow_until_its_message_replaces_it() -> Result<()> {
    let (model, url) = FakeModel::open((5, 5)).await?;
    model.plan("case-grow", &[ModelFault::Pieces(PIECES)]);
    let place = ServerDir::new()?;
    let server = desk(&place, &url, &[])?;
    let ticket = id(&open(&server, "case-grow").await?)?;
    let mut listener = Listener::open(&server, &ticket).await?;
    model.write(1);
    let first = listener.text("Your parcel").await?;
    // One who joins later gets what is written so far.
    let mut late = Listener::open(&server, &ticket).await?;
    late.text("Your parcel").await?;
    let follow = place.command(&[
        "ticket",
        "follow",
        &ticket,
        "--json",
        "--count",
        "2",
        "--url",
        &server.url(""),
    ]);
    let mut follow = tokio::process::Command::from(follow).stdout(Stdio::piped()).spawn()?;
    let mut followed = BufReader::new(follow.stdout.take().context("a pipe")?).lines();
    let mut events: Vec<Value> = Vec::new();
    while events.last().is_none_or(|event| event["event"] != "provisional") {
        let line = timeout(LIMIT, followed.next_line()).await??.context("an event")?;
        events.push(serde_json::from_str(&line)?);
    }
    model.write(1);
    let second = listener.text("Your parcel arrives").await?;
    assert_eq!(first["message_id"], second["message_id"]);
    assert!(first["epoch"].is_i64() && first["sequence"].as_u64() < second["sequence"].as_u64());
    // Not stored anywhere, before the run has ended.
    let path = format!("/api/v1/tickets/{ticket}");
    let (_, shown) = server.get(&path).await?;
    assert_eq!(by(&shown, "assistant"), [""; 0]);
    assert!(shown["provisional"].is_null(), "{shown:#}");
    let (_, shown) = server.get(&format!("{path}?provisional=true")).await?;
    assert_eq!(shown["provisional"], "Your parcel arrives");
    let page = server.client.get(server.url(&format!("/console/tickets/{ticket}"))).send().await?;
    assert!(page.text().await?.contains("Your parcel arrives"));
    model.write(2);
    for listener in [&mut listener, &mut late] {
        let (message, seen) = listener.answer().await?;
        assert_eq!(message["content"], "Your parcel arrives today.");
        assert_eq!(message["message_id"], first["message_id"]);
        let withdrawn = &seen[seen.len() - 2];
        let expected = json!({"message_id": first["message_id"], "reason": "replaced"});
        assert_eq!(*withdrawn, ("withdrawn".to_owned(), expected), "{seen:#?}");
    }
    let (_, shown) = server.get(&format!("{path}?provisional=true")).await?;
    assert!(shown["provisional"].is_null(), "its message replaced it: {shown:#}");
    while let Some(line) = timeout(LIMIT, followed.next_line()).await?? {
        events.push(serde_json::from_str(&line)?);
    }
    assert!(timeout(LIMIT, follow.wait()).await??.success());
    let count = |name: &str| events.iter().filter(|event| event["event"] == name).count();
    assert_eq!((count("message"), count("withdrawn")), (2, 1), "{events:#?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn listeners_of_every_process_see_the_answer_of_the_process_that_runs_it() -> Result<()> {
    let (redis, database) = (Redis::start()?, Postgres::shared()?.database()?);
    let (model, url) = FakeModel::open((5, 5)).await?;
    model.plan("case-across", &[ModelFault::Pieces(PIECES)]);
    let (stream_url, database_url) = (redis.url(), database.url());
    let backends = ["--stream-url", &stream_url, "--database-url", &database_url];
    let (one_place, other_place) = (ServerDir::new()?, ServerDir::new()?);
    let one = desk(&one_place, &url, &backends)?;
    let other = desk(&other_place, &url, &backends)?;
    let ticket = id(&open(&one, "case-across").await?)?;
    // One of the two processes runs the model; both have a listener.
    let mut listeners =
        [Listener::open(&one, &ticket).await?, Listener::open(&other, &ticket).await?];
    model.write(1);
    for listener in &mut listeners {
        listener.text("Your parcel").await?;
    }
    model.write(3);
    for listener in &mut listeners {
        let (message, seen) = listener.answer().await?;
        assert_eq!(message["content"], "Your parcel arrives today.");
        assert_eq!(seen[seen.len() - 2].1["reason"], "replaced", "{seen:#?}");
    }
    // Nothing but a short stream and announcements that expire.
    let length = redis.command(&["XLEN", "streaming:mq:desk:provisional"])?.int();
    assert!((1..=200).contains(&length.context("a length")?), "{length:?}");
    let left = redis.command(&["TTL", &format!("streaming:mq:desk:listeners:{ticket}")])?.int();
    assert!((1..=60).contains(&left.context("seconds")?), "{left:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_needs_an_approval_or_may_need_one_is_never_shown() -> Result<()> {
    let rule =
        |rule: &str| format!("mode = \"auto\"\n[[integration.rule]]\nmode = \"draft\"\n{rule}");
    for (policy, is_posted) in [
        ("mode = \"draft\"".to_owned(), false),
        ("mode = \"note\"".to_owned(), false),
        (rule("words = [\"parcel\"]"), false),
        // The model may still call the tool; in the end it has not, and the answer is posted.
        (rule("tools = [\"close_ticket\"]"), true),
    ] {
        let (model, url) = FakeModel::open((5, 5)).await?;
        model.plan("case-secret", &[ModelFault::Pieces(PIECES)]);
        let settings = format!("[[integration]]\nid = \"desk\"\nprovider = \"desk\"\n{policy}\n");
        let place = ServerDir::new()?.settings(&settings)?;
        let server = desk(&place, &url, &[])?;
        let ticket = id(&open(&server, "case-secret: where is my parcel?").await?)?;
        let mut listener = Listener::open(&server, &ticket).await?;
        let (_, created) = listener.next().await?;
        assert_eq!(created["author"], "user");
        support::eventually("the call", || !model.requests("case-secret").is_empty()).await?;
        model.write(1);
        shows_nothing(&server, &ticket).await?;
        model.write(3);
        let mut seen = Vec::new();
        if is_posted {
            seen = listener.answer().await?.1;
        } else {
            server.until("/api/v1/drafts", |_, body| body["drafts"] != json!([])).await?;
            // A message of a person is the last event; whatever was shown came before.
            let message = json!({"content": "I take over", "author": "agent"});
            server.post(&format!("/api/v1/tickets/{ticket}/messages"), &message).await?;
            let last = listener.until("message", &mut seen).await?;
            assert_eq!(last["author"], "agent", "{policy}");
        }
        let names: Vec<&str> = seen.iter().map(|(name, _)| name.as_str()).collect();
        assert!(
            !names.contains(&"provisional") && !names.contains(&"withdrawn"),
            "{policy}: {names:?}"
        );
    }
    Ok(())
}

/// Much longer than the pause between two updates of a provisional text.
const OBSERVE_FOR: Duration = Duration::from_secs(1);

/// Looks for a provisional text while the model is in the middle of its answer: there is none.
async fn shows_nothing(server: &Server, ticket: &str) -> Result<()> {
    let path = format!("/api/v1/tickets/{ticket}?provisional=true");
    let until = tokio::time::Instant::now() + OBSERVE_FOR;
    while tokio::time::Instant::now() < until {
        let (_, shown) = server.get(&path).await?;
        ensure!(shown["provisional"].is_null(), "{shown:#}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// A tool that refunds orders, of this integration.
fn tool(name: &str, integration: &str, service: &str, more: &str) -> String {
    let parameters = r#"{ type = "object", required = ["order"], properties = { order = { type = "string" } } }"#;
    format!(
        "[[tool]]\nname = \"{name}\"\ndescription = \"Refunds.\"\nmethod = \"POST\"\nurl = \"{service}/refunds\"\n\
         parameters = {parameters}\nidempotency_header = \"Idempotency-Key\"\nintegrations = [\"{integration}\"]\n{more}\n"
    )
}

const SHOP: &str =
    "[[integration]]\nid = \"shop\"\nprovider = \"standard\"\nsecret = \"c2VjcmV0c2VjcmV0\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn text_beside_a_call_that_needs_an_approval_is_never_shown() -> Result<()> {
    let (model, url) = FakeModel::open((5, 5)).await?;
    let promise = ["I refund it ", "now."];
    let calls = [
        ModelFault::PiecesAndCall(&["I refund it ", "now."], "refund", r#"{"order": "o-1"}"#),
        ModelFault::Pieces(PIECES),
    ];
    model.plan("case-approve", &calls);
    let (service, service_url) = ToolService::start().await?;
    let place =
        ServerDir::new()?.settings(&tool("refund", "desk", &service_url, "approval = true"))?;
    let server = desk(&place, &url, &[])?;
    let created = open(&server, "case-approve").await?;
    let ticket = id(&created)?;
    let mut listener = Listener::open(&server, &ticket).await?;
    let (_, asked) = listener.next().await?;
    assert_eq!(asked["author"], "user");
    support::eventually("the call", || !model.requests("case-approve").is_empty()).await?;
    model.write(1);
    shows_nothing(&server, &ticket).await?;
    model.write(2);
    let path = "/api/v1/drafts?status=pending";
    let page = server.until(path, |_, body| body["drafts"] != json!([])).await?;
    assert!(service.requests("o-1").is_empty(), "not without an approval");
    let (_, shown) = server.get(&format!("/api/v1/tickets/{ticket}?provisional=true")).await?;
    assert!(shown["provisional"].is_null(), "{shown:#}");
    let path = format!("/api/v1/drafts/{}/approve", page["drafts"][0]["id"]);
    assert_eq!(server.post(&path, &json!({})).await?.0, 200);
    model.write(4);
    let (message, seen) = listener.answer().await?;
    assert_eq!(message["content"], "Your parcel arrives today.");
    let names: Vec<&str> = seen.iter().map(|(name, _)| name.as_str()).collect();
    assert!(!names.contains(&"provisional") && !names.contains(&"withdrawn"), "{seen:#?}");
    for text in promise {
        assert!(!format!("{seen:?}").contains(text.trim()), "{seen:#?}");
    }
    assert_eq!(service.requests("o-1").len(), 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn text_beside_another_call_is_withdrawn_and_shown_with_its_values() -> Result<()> {
    let (model, url) = FakeModel::open((5, 5)).await?;
    // A placeholder in two pieces.
    let text = &["I look for [EMA", "IL_1] now."];
    let calls = [
        ModelFault::PiecesAndCall(text, "refund", r#"{"order": "[EMAIL_1]"}"#),
        ModelFault::Pieces(PIECES),
    ];
    model.plan("case-call", &calls);
    let (service, service_url) = ToolService::start().await?;
    // A tool that needs an approval, of another integration, changes nothing.
    let settings = [
        "[desk]\nredact = [\"email\"]\n".to_owned(),
        SHOP.to_owned(),
        tool("refund", "desk", &service_url, ""),
        tool("approved", "shop", &service_url, "approval = true"),
    ];
    let place = ServerDir::new()?.settings(&settings.concat())?;
    let server = desk(&place, &url, &[])?;
    let ticket = id(&open(&server, "case-call of ada@example.com").await?)?;
    let mut listener = Listener::open(&server, &ticket).await?;
    model.write(1);
    let first = listener.text("I look for").await?;
    model.write(1);
    listener.text("I look for ada@example.com now.").await?;
    assert!(service.requests("ada@example.com").is_empty());
    model.write(1);
    let withdrawn = listener.until("withdrawn", &mut Vec::new()).await?;
    let expected = json!({"message_id": first["message_id"], "reason": "discarded"});
    assert_eq!(withdrawn, expected);
    model.write(1);
    listener.text("Your parcel").await?;
    assert_eq!(service.requests("ada@example.com").len(), 1);
    model.write(3);
    let (message, seen) = listener.answer().await?;
    assert_eq!(message["content"], "Your parcel arrives today.");
    assert_eq!(seen[seen.len() - 2].1["reason"], "replaced", "{seen:#?}");
    let requests = model.requests("");
    assert!(requests.iter().all(|one| !one.body.to_string().contains("ada@example.com")));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_text_of_a_run_that_is_superseded_or_fails_is_withdrawn() -> Result<()> {
    let (model, url) = FakeModel::open((5, 5)).await?;
    model.plan("case-stale", &[ModelFault::Pieces(PIECES)]);
    model.plan("case-cut", &[ModelFault::StallMidAnswer]);
    let place = ServerDir::new()?;
    let server = desk(&place, &url, &["--model-idle-timeout", "1s"])?;

    // Newer events supersede the run.
    let ticket = id(&open(&server, "case-stale").await?)?;
    let mut listener = Listener::open(&server, &ticket).await?;
    model.write(1);
    let shown = listener.text("Your parcel").await?;
    let path = format!("/api/v1/tickets/{ticket}/messages");
    server.post(&path, &json!({"content": "Never mind"})).await?;
    let withdrawn = listener.until("withdrawn", &mut Vec::new()).await?;
    let expected = json!({"message_id": shown["message_id"], "reason": "discarded"});
    assert_eq!(withdrawn, expected);
    let (message, _) = listener.answer().await?;
    assert_eq!(message["content"], FakeModel::ANSWER);
    assert_ne!(message["message_id"], shown["message_id"]);

    // The stream of the model stalls.
    let ticket = id(&open(&server, "case-cut").await?)?;
    let mut listener = Listener::open(&server, &ticket).await?;
    let shown = listener.text("Half an ans").await?;
    let withdrawn = listener.until("withdrawn", &mut Vec::new()).await?;
    assert_eq!(withdrawn["message_id"], shown["message_id"]);
    let (message, _) = listener.answer().await?;
    assert_eq!(message["content"], FakeModel::ANSWER);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_written_and_posted_while_redis_is_down() -> Result<()> {
    let redis = Redis::start()?;
    let (model, url) = FakeModel::open((5, 5)).await?;
    model.plan("case-down", &[ModelFault::Pieces(PIECES)]);
    let place = ServerDir::new()?;
    let server = desk(&place, &url, &["--stream-url", &redis.url()])?;
    let ticket = id(&open(&server, "case-down").await?)?;
    let mut listener = Listener::open(&server, &ticket).await?;
    model.write(1);
    listener.text("Your parcel").await?;
    drop(redis);
    model.write(1);
    listener.text("Your parcel arrives").await?;
    model.write(2);
    let shown = answered(&server, &ticket, 1).await?;
    assert_eq!(by(&shown, "assistant"), ["Your parcel arrives today."]);
    let (message, _) = timeout(Duration::from_secs(30), listener.answer()).await??;
    assert_eq!(message["content"], "Your parcel arrives today.");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_text_of_a_process_that_dies_expires() -> Result<()> {
    let (redis, database) = (Redis::start()?, Postgres::shared()?.database()?);
    let (model, url) = FakeModel::open((5, 5)).await?;
    // The second process repeats the run.
    model.plan("case-dies", &[ModelFault::Pieces(PIECES)]);
    let (stream_url, database_url) = (redis.url(), database.url());
    let backends = ["--stream-url", &stream_url, "--database-url", &database_url];
    let more = ["--worker-claim", "30s"];
    let (one_place, other_place) = (ServerDir::new()?, ServerDir::new()?);
    let mut one = desk(&one_place, &url, &[&backends[..], &more].concat())?;
    let ticket = id(&open(&one, "case-dies").await?)?;
    let asked = || !model.requests("case-dies").is_empty();
    support::eventually("the first run", asked).await?;
    let other = desk(&other_place, &url, &[&backends[..], &more].concat())?;
    let mut listener = Listener::open(&other, &ticket).await?;
    model.write(1);
    let shown = listener.text("Your parcel").await?;
    one.kill9()?;
    let withdrawn = listener.until("withdrawn", &mut Vec::new()).await?;
    assert_eq!(withdrawn["message_id"], shown["message_id"]);
    assert_eq!(withdrawn["reason"], "expired");
    let (message, _) = listener.answer().await?;
    assert_eq!(message["content"], FakeModel::ANSWER);
    Ok(())
}
