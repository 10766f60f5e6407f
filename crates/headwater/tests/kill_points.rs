//! `kill -9` of the real binary between an effect and its record: every effect happens once.

mod support;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use headwater_testkit::{Database, Postgres, Proxy, Redis, RedisReply};
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};
use tokio::net::TcpListener;
use uuid::Uuid;

use crate::support::desk::{all_idle, answered, by, open};
use crate::support::model::FakeModel;
use crate::support::sender::{SECRET, github, github_issues, send};
use crate::support::{LIMIT, ServerDir, eventually};

/// A GitHub that stores comments and, while silent, does not respond after storing one.
#[derive(Clone, Default)]
struct SlowGithub {
    comments: Arc<Mutex<Vec<String>>>,
    looked: Arc<AtomicUsize>,
    is_silent: Arc<AtomicBool>,
}

async fn comment(State(github): State<SlowGithub>, Json(body): Json<Value>) -> StatusCode {
    let text = body["body"].as_str().unwrap_or_default().to_owned();
    github.comments.lock().expect("no panic").push(text);
    if github.is_silent.load(Ordering::SeqCst) {
        std::future::pending::<()>().await;
    }
    StatusCode::CREATED
}

async fn list(State(github): State<SlowGithub>, Path(_): Path<(String, String)>) -> Json<Value> {
    github.looked.fetch_add(1, Ordering::SeqCst);
    let comments = github.comments.lock().expect("no panic");
    Json(comments.iter().map(|body| json!({"id": 1, "body": body})).collect())
}

fn count(database: &Database, what: &str) -> usize {
    let counted = database.query(&format!("SELECT count(*) FROM {what}"));
    counted.ok().and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// Expires the leases of a killed process: an outbox row is leased for thirty seconds.
fn let_rows_run_out(database: &Database) -> Result<()> {
    database.query("UPDATE outbox SET due_at = now() WHERE status = 'taken'").map(drop)
}

// The fake server must respond while the test waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_kill_between_posting_a_comment_and_recording_it_posts_it_once() -> Result<()> {
    let hub = SlowGithub::default();
    hub.is_silent.store(true, Ordering::SeqCst);
    let routes = post(comment).get(list);
    let router = Router::new()
        .route("/repositories/{id}/issues/{number}/comments", routes)
        .with_state(hub.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, router).await });
    let database = Postgres::shared()?.database()?;
    let settings = format!(
        "[[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"{SECRET}\"\n\
         reply_token_env = \"SHOP_TOKEN\"\nbase_url = \"http://{address}\"\n"
    );
    let dir = ServerDir::new()?.settings(&settings)?.variable("SHOP_TOKEN", "a token");
    let url = database.url();
    let arguments = ["--issue-quiet", "10ms", "--database-url", &url];

    // The comment is stored, but the process has no response.
    let mut server = dir.serve(&arguments)?;
    let body = github_issues("opened", 42, "Where is it?").to_string();
    send(github(&server, "issues", "d-1", body.as_bytes())).await?;
    let posted = || hub.comments.lock().expect("no panic").len();
    eventually("a comment", || posted() == 1).await?;
    server.kill9()?;
    assert_eq!(count(&database, "outbox WHERE kind = 'reply' AND status = 'taken'"), 1);

    let_rows_run_out(&database)?;
    hub.is_silent.store(false, Ordering::SeqCst);
    let _server = dir.serve(&arguments)?;
    let is_noted = || count(&database, "outbox WHERE kind = 'reply' AND status = 'delivered'") == 1;
    eventually("the reply to be recorded", is_noted).await?;
    assert!(hub.looked.load(Ordering::SeqCst) >= 1, "existing comments were searched first");
    assert_eq!(posted(), 1, "{:?}", hub.comments.lock().expect("no panic"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_between_adding_a_reply_and_recording_it_adds_it_once() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let (model, model_url) = FakeModel::start((5, 5)).await?;
    let dir = ServerDir::new()?;
    let url = database.url();
    let quiet = ["--issue-quiet", "10ms", "--sweep-every", "200ms"];
    let model_at = ["--model-url", &model_url, "--model-name", "m"];
    let arguments = [&["--database-url", &url][..], &quiet, &model_at].concat();
    let mut server = dir.serve(&arguments)?;
    let created = open(&server, "Where is it?").await?;
    let ticket = created["ticket_id"].as_str().context("a ticket")?.to_owned();
    eventually("a question", || !model.requests("Where is it?").is_empty()).await?;

    // The reply waits for the lock on its ticket; then its outbox row is locked.
    let mut door = PgConnection::connect(&url).await?;
    let mut at_door = door.begin().await?;
    sqlx::query("SELECT number FROM tickets FOR UPDATE").execute(&mut *at_door).await?;
    model.unblock();
    let reply = "outbox WHERE kind = 'reply' AND status = 'taken'";
    eventually("the answer to be taken", || count(&database, reply) == 1).await?;
    let mut books = PgConnection::connect(&url).await?;
    let mut on_row = books.begin().await?;
    sqlx::query("SELECT id FROM outbox WHERE kind = 'reply' FOR UPDATE")
        .execute(&mut *on_row)
        .await?;
    at_door.rollback().await?;
    let answer = "ticket_messages WHERE author = 'assistant'";
    eventually("the answer in its ticket", || count(&database, answer) == 1).await?;
    server.kill9()?;
    // Also end its database sessions, as if the machine had died.
    let waiting =
        "pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    database.query(&format!("SELECT pg_terminate_backend(pid) FROM {waiting}"))?;
    eventually("no session waiting for the row", || count(&database, waiting) == 0).await?;
    on_row.rollback().await?;
    assert_eq!(count(&database, "outbox WHERE kind = 'reply' AND status = 'delivered'"), 0);

    let_rows_run_out(&database)?;
    let server = dir.serve(&arguments)?;
    let left = "outbox WHERE status NOT IN ('delivered')";
    eventually("all deliveries to be recorded", || {
        // A waiting row may have been leased and released before the kill.
        let_rows_run_out(&database).is_ok() && count(&database, left) == 0
    })
    .await?;
    all_idle(&server).await?;
    let shown = answered(&server, &ticket, 1).await?;
    assert_eq!(by(&shown, "assistant"), [FakeModel::ANSWER], "{shown:#}");
    let events = "outbox WHERE payload->>'event_type' = 'AI_RESPONSE_GENERATED'";
    assert_eq!(count(&database, events), 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_between_storing_an_entry_and_acknowledging_it_counts_it_once() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let database = Postgres::shared()?.database()?;
    let dir = ServerDir::new()?;
    let (url, way) = (database.url(), redis.url_at(proxy.addr()));
    let arguments = ["--issue-quiet", "10ms", "--database-url", &url, "--stream-url"];
    let mut server = dir.serve(&[&arguments[..], &[&way]].concat())?;
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;

    // The desk has read the entry and waits for the table; then Redis is disconnected, and then the table is
    // unlocked.
    let (ticket, message) = (Uuid::new_v4(), Uuid::new_v4());
    let event = json!({"event_type": "MESSAGE_RECEIVED", "ticket_id": ticket, "message_id": message, "content": "once"});
    let mut gate = PgConnection::connect(&url).await?;
    let stored = || count(&database, "ticket_messages WHERE author = 'user'");
    let waiting =
        "pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let deadline = Instant::now() + LIMIT * 2;
    let mut is_added = false;
    while stored() == 0 {
        assert!(Instant::now() < deadline, "{}", server.log());
        proxy.heal()?;
        let mut closed = gate.begin().await?;
        sqlx::query("LOCK TABLE tickets IN EXCLUSIVE MODE").execute(&mut *closed).await?;
        if !is_added {
            let words = ["XADD", "ticket_events", "*", "data", &event.to_string()];
            redis.command(&words)?.ok()?;
            is_added = true;
        }
        eventually("the desk to wait for the lock", || count(&database, waiting) > 0).await?;
        proxy.cut()?;
        closed.rollback().await?;
        // The desk waits only a few seconds; if it gave up just before, repeat.
        let until = Instant::now() + Duration::from_secs(3);
        while stored() == 0 && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    server.kill9()?;
    let pending = || {
        let reply = redis.command(&["XPENDING", "ticket_events", "ai_processor_group"]).ok()?;
        reply.items().first().and_then(RedisReply::int)
    };
    assert_eq!(pending(), Some(1), "it is stored but not acknowledged");

    let server = dir.serve(&[&arguments[..], &[&redis.url()]].concat())?;
    let shown = answered(&server, &ticket.to_string(), 1).await?;
    eventually("the entry to be acknowledged", || pending() == Some(0)).await?;
    all_idle(&server).await?;
    assert_eq!(by(&shown, "user"), ["once"], "{shown:#}");
    let shown = answered(&server, &ticket.to_string(), 1).await?;
    assert_eq!((by(&shown, "user").len(), by(&shown, "assistant").len()), (1, 1), "{shown:#}");
    assert_eq!(count(&database, "event_logs"), 1);
    Ok(())
}

#[tokio::test]
async fn on_embedded_storage_the_work_of_a_killed_process_continues_at_once() -> Result<()> {
    let (model, url) = FakeModel::start((1, 1)).await?;
    let dir = ServerDir::new()?;
    // Longer than the test may take.
    let arguments = ["--model-url", &url, "--model-name", "m", "--worker-claim", "10m"];
    let mut server = dir.serve(&arguments)?;
    let created = open(&server, "a question").await?;
    let ticket = created["ticket_id"].as_str().context("a ticket")?;
    eventually("the model to be asked", || !model.requests("a question").is_empty()).await?;
    server.kill9()?;

    model.unblock();
    let server = dir.serve(&arguments)?;
    let shown = answered(&server, ticket, 1).await?;
    assert_eq!(by(&shown, "assistant"), [FakeModel::ANSWER], "{shown:#}");
    Ok(())
}
