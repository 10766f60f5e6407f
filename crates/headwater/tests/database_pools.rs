//! Slow HTTP requests and many listeners do not take the database away from work.

mod support;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use headwater_testkit::{Database, Postgres};
use serde_json::json;
use sqlx::{Connection, Executor, PgConnection};

use crate::support::desk::{answered, by, open};
use crate::support::model::FakeModel;
use crate::support::{LIMIT, Server, ServerDir};

// The fake model runs on the runtime of the test.
#[tokio::test(flavor = "multi_thread")]
async fn slow_requests_do_not_keep_heartbeats_and_claims_waiting() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let (model, model_url) = FakeModel::start((5, 5)).await?;
    let dir = ServerDir::new()?;
    let url = database.url();
    let quick = ["--issue-quiet", "10ms", "--sweep-every", "200ms", "--worker-claim", "4s"];
    let model_at = ["--model-url", &model_url, "--model-name", "m"];
    let many = ["--http-rate-per-second", "1000000", "--http-rate-burst", "1000000"];
    let few = ["--database-url", &url, "--database-connections", "4"];
    let server = dir.serve(&[&few[..], &quick, &model_at, &many].concat())?;
    let created = open(&server, "a question").await?;
    let ticket = created["ticket_id"].as_str().context("a ticket")?;
    support::eventually("a model request", || !model.requests("a question").is_empty()).await?;

    // While the run waits for the model, each request waits for a lock and fails after a second. There are far more of them than
    // connections, for much longer than the claim lasts.
    let mut locking = PgConnection::connect(&url).await?;
    locking.execute("BEGIN; LOCK TABLE audit_log IN ACCESS EXCLUSIVE MODE").await?;
    let until = Instant::now() + Duration::from_secs(10);
    let slow = (0..100).map(|_| async {
        let mut answers = 0;
        while Instant::now() < until {
            let (status, body) = server.get("/api/v1/audit").await?;
            ensure!(status == 503, "{status} {body}");
            answers += 1;
        }
        Ok(answers)
    });
    let answers: Result<Vec<u32>> = futures_util::stream::iter(slow)
        .buffer_unordered(100)
        .collect::<Vec<_>>()
        .await
        .into_iter()
        .collect();
    assert!(answers?.iter().all(|answers| *answers >= 1));
    locking.execute("ROLLBACK").await?;

    model.unblock();
    let shown = answered(&server, ticket, 1).await?;
    assert_eq!(by(&shown, "assistant"), [FakeModel::ANSWER]);
    let log = server.log();
    for problem in ["claims were not renewed", "claim lost", "worker heartbeat failed"] {
        assert!(!log.contains(problem), "{problem}: {log}");
    }
    assert_eq!(model.requests("a question").len(), 1, "the run was not repeated");
    Ok(())
}

/// Transactions of a database so far.
fn transactions(database: &Database) -> Result<u64> {
    let counted = database.query(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()",
    )?;
    Ok(counted.parse()?)
}

/// Transactions per second over some seconds.
async fn rate(database: &Database) -> Result<f64> {
    let (before, began) = (transactions(database)?, Instant::now());
    // A session reports its transactions once per second.
    tokio::time::sleep(Duration::from_secs(5)).await;
    Ok((transactions(database)? - before) as f64 / began.elapsed().as_secs_f64())
}

async fn listen(server: &Server, ticket: &str) -> Result<reqwest::Response> {
    // Without the time limit of other requests.
    let client = reqwest::Client::builder().no_proxy().build()?;
    let request = client.get(server.url(&format!("/api/v1/tickets/{ticket}/events")));
    let response = request.send().await?;
    ensure!(response.status() == 200, "{}", response.status());
    Ok(response)
}

/// Reads events until one contains this text.
async fn receive(response: reqwest::Response, text: &str) -> Result<()> {
    let mut events = response.bytes_stream();
    let mut received = String::new();
    while !received.contains(text) {
        let chunk =
            tokio::time::timeout(LIMIT, events.next()).await?.context("the stream ended")?;
        received.push_str(&String::from_utf8_lossy(&chunk?));
    }
    Ok(())
}

/// Each listens to a ticket of its own: a poll for each ticket would be as many queries as one for each listener.
#[tokio::test]
async fn many_listeners_share_one_poll_and_get_the_messages_of_other_processes() -> Result<()> {
    const LISTENERS: usize = 100;
    let database = Postgres::shared()?.database()?;
    let url = database.url();
    let (dir, other_dir) = (ServerDir::new()?, ServerDir::new()?);
    let many = ["--http-rate-per-second", "1000000", "--http-rate-burst", "1000000"];
    let arguments = [&["--database-url", &url, "--issue-quiet", "10ms"][..], &many].concat();
    let server = dir.serve(&arguments)?;
    let other = other_dir.serve(&arguments)?;
    let mut tickets = Vec::new();
    for _ in 0..LISTENERS {
        let created = open(&server, "a question").await?;
        tickets.push(created["ticket_id"].as_str().context("a ticket")?.to_owned());
    }
    for ticket in &tickets {
        answered(&server, ticket, 1).await?;
    }
    let without = rate(&database).await?;

    let mut listening = Vec::new();
    for ticket in &tickets {
        listening.push(listen(&server, ticket).await?);
    }
    // On a busy machine the first polls of all listeners take a while. Without a common poll the rate stays high.
    let mut more = f64::INFINITY;
    for _ in 0..20 {
        let with = rate(&database).await?;
        println!(
            "{without:.0} transactions per second alone, {with:.0} with {LISTENERS} listeners"
        );
        more = more.min(with - without);
        if more < LISTENERS as f64 / 2.0 {
            break;
        }
    }
    assert!(more < LISTENERS as f64 / 2.0, "{more:.0} transactions per second for {LISTENERS}");

    for ticket in &tickets {
        let path = format!("/api/v1/tickets/{ticket}/messages");
        let (status, body) = other.post(&path, &json!({"content": "from another process"})).await?;
        ensure!(status == 201, "{body}");
    }
    for response in listening {
        receive(response, "from another process").await?;
    }
    Ok(())
}
