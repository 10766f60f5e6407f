//! From webhook to reply through the real binary with a fake GitHub; and shutdown with work in flight.

mod support;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Json, Router};
use headwater_testkit::{Postgres, Redis};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::support::sender::{SECRET, github, github_comment, github_issues, send};
use crate::support::{LIMIT, Server, ServerDir, eventually};

const TOKEN: &str = "a token of the shop";

/// A fake GitHub that stores comments: issue number and text.
#[derive(Clone, Default)]
struct Github {
    comments: Arc<Mutex<Vec<(String, String)>>>,
    /// Number of started POSTs.
    started_posts: Arc<AtomicUsize>,
    delay: Duration,
}

type Comment = Path<(String, String)>;

impl Github {
    async fn start() -> Result<(Self, SocketAddr)> {
        Self::start_slow(Duration::ZERO).await
    }

    /// Starts one that takes `delay` per comment, and stores it only if the client waits.
    async fn start_slow(delay: Duration) -> Result<(Self, SocketAddr)> {
        let this = Self { delay, ..Self::default() };
        let router = Router::new()
            .route("/repositories/{id}/issues/{number}/comments", post(comment).get(list))
            .with_state(this.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        // Stops with the runtime of the test.
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok((this, address))
    }

    fn comments(&self) -> Vec<(String, String)> {
        self.comments.lock().expect("no panic").clone()
    }
}

async fn comment(
    State(github): State<Github>,
    Path((_, number)): Comment,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> (StatusCode, Json<Value>) {
    if headers.get("authorization").is_none_or(|value| value != format!("Bearer {TOKEN}").as_str())
    {
        return (StatusCode::UNAUTHORIZED, Json(json!({"message": "Bad credentials"})));
    }
    github.started_posts.fetch_add(1, Ordering::SeqCst);
    tokio::time::sleep(github.delay).await;
    let text = body["body"].as_str().unwrap_or_default().to_owned();
    github.comments.lock().expect("no panic").push((number, text));
    (StatusCode::CREATED, Json(json!({"id": 1})))
}

async fn list(State(github): State<Github>, Path((_, number)): Comment) -> Json<Value> {
    let comments = github.comments();
    let of_issue = comments.iter().filter(|(of, _)| *of == number);
    Json(of_issue.map(|(_, body)| json!({"id": 1, "body": body})).collect())
}

fn place(github: SocketAddr) -> Result<ServerDir> {
    let settings = format!(
        "[[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"{SECRET}\"\n\
         reply_token_env = \"SHOP_TOKEN\"\nbase_url = \"http://{github}\"\n"
    );
    Ok(ServerDir::new()?.settings(&settings)?.variable("SHOP_TOKEN", TOKEN))
}

async fn wait_for_comments(github: &Github, count: usize, server: &Server) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while github.comments().len() < count {
        anyhow::ensure!(Instant::now() < deadline, "no comment: {}", server.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_github_issue_is_answered_once_and_the_own_comment_is_ignored() -> Result<()> {
    let (github_server, address) = Github::start().await?;
    let place = place(address)?;
    let server = place.serve(&["--issue-quiet", "100ms"])?;
    let body = github_issues("opened", 42, "Where is it?").to_string();
    for _ in 0..3 {
        assert_eq!(send(github(&server, "issues", "d-1", body.as_bytes())).await?.0, 200);
    }
    wait_for_comments(&github_server, 1, &server).await?;

    // GitHub sends a webhook for the desk's own comment, and a person answers.
    let (number, ours) = github_server.comments().first().cloned().context("a comment")?;
    assert_eq!(number, "42");
    let echo = github_comment(42, "shop-bot", &ours).to_string();
    let (_, answer) = send(github(&server, "issue_comment", "d-2", echo.as_bytes())).await?;
    assert_eq!(answer["status"], "ignored");
    let more = github_comment(42, "ann", "It is still not here.").to_string();
    let (_, answer) = send(github(&server, "issue_comment", "d-3", more.as_bytes())).await?;
    assert_eq!(answer["status"], "ok");
    wait_for_comments(&github_server, 2, &server).await?;

    let path = format!("/api/v1/issues/{}", answer["issue_id"]);
    server.until(&path, |_, issue| issue["pending_events"] == 0).await?;
    assert_eq!(github_server.comments().len(), 2, "{:#?}", github_server.comments());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_of_500_webhooks_on_one_issue_is_processed_with_few_replies() -> Result<()> {
    let (github_server, address) = Github::start().await?;
    let redis = Redis::start()?;
    let database = Postgres::shared()?.database()?;
    let place = place(address)?;
    let server = place.serve(&["--stream-url", &redis.url(), "--database-url", &database.url()])?;

    let mut sending = tokio::task::JoinSet::new();
    for number in 0..500 {
        let body = github_comment(42, "ann", &format!("Where is it? {number}")).to_string();
        let request = github(&server, "issue_comment", &format!("storm-{number}"), body.as_bytes());
        sending.spawn(async move { send(request).await });
    }
    let (mut ids, mut issue_id) = (HashSet::new(), None);
    while let Some(sent) = sending.join_next().await {
        let (status, answer) = sent??;
        let details = || format!("{answer}\n{}", server.log());
        assert_eq!((status, &answer["status"]), (200, &json!("ok")), "{}", details());
        ids.insert(answer["event_log_id"].as_i64());
        issue_id = answer["issue_id"].as_i64();
    }
    assert_eq!(ids.len(), 500, "each is a separate event");

    let path = format!("/api/v1/issues/{}", issue_id.context("an issue")?);
    let is_done =
        |_: u16, it: &Value| it["pending_events"] == 0 && it["processing_status"] == "idle";
    server.until(&path, is_done).await?;
    let unprocessed = server.get(&format!("{path}/events?processed=false")).await?.1;
    assert_eq!(unprocessed["events"], json!([]));
    wait_for_comments(&github_server, 1, &server).await?;
    let comments = github_server.comments();
    assert!(comments.len() <= 10, "{} replies", comments.len());
    let (_, metrics) = server.get("/metrics").await?;
    let recorded = "headwater_webhooks_total{provider=\"github\",result=\"recorded\"} 500";
    assert!(metrics.as_str().is_some_and(|text| text.contains(recorded)), "{metrics}");
    Ok(())
}

async fn open_ticket(server: &Server) -> Result<(String, String)> {
    let ticket = json!({"title": "My parcel is late", "content": "Where is it?"});
    let (status, opened) = server.post("/api/v1/tickets", &ticket).await?;
    assert_eq!(status, 201, "{opened}");
    let ticket = format!("/api/v1/tickets/{}", opened["ticket_id"].as_str().context("an id")?);
    Ok((ticket, format!("/api/v1/issues/{}", opened["issue_id"])))
}

fn replies(ticket: &Value) -> usize {
    let messages = ticket["messages"].as_array().into_iter().flatten();
    messages.filter(|message| message["author"] == "assistant").count()
}

#[tokio::test]
async fn a_shutdown_during_a_model_call_completes_it_and_delivers_its_reply() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let place = ServerDir::new()?;
    let slow = ["--issue-quiet", "10ms", "--model-url", "scripted:8s"];
    let url = database.url();
    let mut server = place.serve(&[&slow[..], &["--database-url", &url]].concat())?;
    let (_, issue) = open_ticket(&server).await?;
    server.until(&issue, |_, it| it["processing_status"] == "processing").await?;
    assert!(server.stop()?.success(), "{}", server.log());

    // The process has ended: everything in the tables was committed before.
    let pending = database.query("SELECT processing_status, pending_events FROM issues")?;
    assert_eq!(pending.trim(), "idle|0", "{}", server.log());
    let count = "SELECT count(*) FROM ticket_messages WHERE author = 'assistant'";
    assert_eq!(database.query(count)?.trim(), "1", "{}", server.log());
    Ok(())
}

/// The reply takes longer than the fixed part of the shutdown.
#[tokio::test(flavor = "multi_thread")]
async fn a_reply_in_flight_at_shutdown_has_the_drain_time_to_arrive() -> Result<()> {
    let (slow, address) = Github::start_slow(Duration::from_secs(8)).await?;
    let database = Postgres::shared()?.database()?;
    let place = place(address)?;
    let mut server = place.serve(&["--issue-quiet", "10ms", "--database-url", &database.url()])?;
    let body = github_issues("opened", 42, "Where is it?").to_string();
    assert_eq!(send(github(&server, "issues", "d-1", body.as_bytes())).await?.0, 200);
    eventually("the reply", || slow.started_posts.load(Ordering::SeqCst) == 1).await?;
    assert!(server.stop()?.success(), "{}", server.log());
    assert_eq!(slow.comments().len(), 1, "{}", server.log());
    let left =
        "SELECT count(*) FROM outbox WHERE status IN ('waiting', 'pending', 'taken', 'dead')";
    assert_eq!(database.query(left)?.trim(), "0", "it would be repeated: {}", server.log());
    Ok(())
}

#[tokio::test]
async fn a_run_that_exceeds_the_drain_is_released_without_an_attempt() -> Result<()> {
    let place = ServerDir::new()?;
    let quiet = ["--issue-quiet", "10ms"];
    let slow = ["--model-url", "scripted:1h", "--model-timeout", "1h", "--worker-drain", "200ms"];
    let mut server = place.serve(&[&quiet[..], &slow].concat())?;
    let (ticket, issue) = open_ticket(&server).await?;
    server.until(&issue, |_, it| it["processing_status"] == "processing").await?;
    let started = Instant::now();
    assert!(server.stop()?.success(), "{}", server.log());
    assert!(started.elapsed() < Duration::from_secs(30), "the shutdown has a time limit");

    let server = place.serve(&quiet)?;
    server.until(&ticket, |_, it| replies(it) == 1).await?;
    let found = server.until(&issue, |_, it| it["pending_events"] == 0).await?;
    assert_eq!((&found["attempts"], &found["crashes"]), (&json!(0), &json!(0)), "{found}");
    Ok(())
}
