//! Limits of concurrent callers: slots are freed, and each caller uses one.

mod support;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use headwater_testkit::{Postgres, Redis};
use serde_json::json;
use sqlx::{Connection, PgConnection};

use crate::support::{LIMIT, Server, ServerDir, eventually};

/// More than the limit of HTTP consumers.
const MANY: usize = 250;

fn consume(server: &Server, topic: &str) -> reqwest::RequestBuilder {
    let path = format!("/api/v1/topics/{topic}/groups/workers/consume");
    server.client.post(server.url(&path)).json(&json!({"mode": "shared"}))
}

#[tokio::test]
async fn consumers_that_disconnect_while_joining_free_their_slots() -> Result<()> {
    let redis = Redis::start()?;
    let dir = ServerDir::new()?;
    // The rate limit must not reject these requests.
    let many = ["--http-rate-per-second", "1000000", "--http-rate-burst", "1000000"];
    let server = dir.serve(&[&["--stream-url", &redis.url()][..], &many].concat())?;
    server.until("/health/ready", |status, _| status == 200).await?;
    let (status, made) =
        server.post("/api/v1/topics", &json!({"name": "orders", "partitions": 1})).await?;
    assert_eq!(status, 201, "{made}");

    // Redis is paused: each client gets a slot, waits, and disconnects.
    redis.pause()?;
    let joining = (0..MANY).map(|_| {
        let request = consume(&server, "orders").timeout(Duration::from_secs(3));
        async move { request.send().await.map(|response| response.status()) }
    });
    let mut joining = futures_util::stream::iter(joining).buffer_unordered(MANY);
    let (mut hung_up, mut refused) = (0, 0);
    while let Some(answer) = joining.next().await {
        match answer {
            Err(_) => hung_up += 1,
            Ok(status) => {
                assert_eq!(status, 503, "joining is impossible");
                refused += 1;
            }
        }
    }
    drop(joining);
    assert!(hung_up >= 200, "{hung_up} disconnected, {refused} were rejected");
    redis.resume()?;

    // One after another, each gets a slot and keeps it.
    let mut guests = Vec::new();
    let deadline = tokio::time::Instant::now() + LIMIT;
    while guests.len() < 20 {
        ensure!(tokio::time::Instant::now() < deadline, "no free slot: {}", server.log());
        let response = consume(&server, "orders").send().await?;
        match response.status().as_u16() {
            200 => {
                let mut events = response.bytes_stream();
                let first = events.next().await.context("an event")??;
                assert!(String::from_utf8_lossy(&first).contains("event: consumer"), "{first:?}");
                guests.push(events);
            }
            // Redis has just resumed, and some disconnects may not have been noticed yet.
            503 => tokio::time::sleep(Duration::from_millis(50)).await,
            other => panic!("{other}"),
        }
    }
    Ok(())
}

// The callers wait while the test queries the database.
#[tokio::test(flavor = "multi_thread")]
async fn consistency_checks_run_one_at_a_time() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let dir = ServerDir::new()?;
    let url = database.url();
    let server = dir.serve(&["--database-url", &url])?;
    server.until("/health/ready", |status, _| status == 200).await?;

    // The check waits for the lock on the events.
    let mut gate = PgConnection::connect(&url).await?;
    let mut closed = gate.begin().await?;
    sqlx::query("LOCK TABLE event_logs IN ACCESS EXCLUSIVE MODE").execute(&mut *closed).await?;
    let asking: Vec<_> = (0..4)
        .map(|_| {
            let request = server.client.get(server.url("/api/v1/audit/books"));
            tokio::spawn(async move { request.send().await.map(|answer| answer.status()) })
        })
        .collect();
    let counting = || {
        let found = database.query(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
             AND wait_event_type = 'Lock' AND query LIKE 'WITH totals AS%'",
        );
        found.ok().and_then(|count| count.trim().parse::<usize>().ok()).unwrap_or(0)
    };
    eventually("a running check", || counting() > 0).await?;
    // The others have time to get as far.
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        assert!(counting() <= 1, "one check at a time");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    closed.rollback().await?;
    let mut answers = Vec::new();
    for answer in asking {
        answers.push(answer.await??.as_u16());
    }
    answers.sort_unstable();
    assert_eq!(answers, [200, 429, 429, 429], "the others are rejected");
    let is_free = |status: u16, _: &serde_json::Value| status == 200;
    server.until("/api/v1/audit/books", is_free).await?;
    Ok(())
}

#[tokio::test]
async fn tails_are_limited_and_ending_one_frees_a_slot() -> Result<()> {
    let dir = ServerDir::new()?;
    let many = ["--http-rate-per-second", "1000000", "--http-rate-burst", "1000000"];
    let server = dir.serve(&many)?;
    let path = "/api/v1/topics/orders/tail";
    let mut tails = Vec::new();
    let refused = loop {
        let response = server.client.get(server.url(path)).send().await?;
        if response.status() != 200 {
            break response;
        }
        tails.push(response);
        ensure!(tails.len() <= 200, "there is no limit");
    };
    assert_eq!((refused.status().as_u16(), tails.len()), (429, 200));
    tails.clear();
    let deadline = tokio::time::Instant::now() + LIMIT;
    while server.client.get(server.url(path)).send().await?.status() != 200 {
        ensure!(tokio::time::Instant::now() < deadline, "no free slot: {}", server.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

#[tokio::test]
async fn delayed_messages_keep_their_order_per_key_and_are_limited() -> Result<()> {
    let redis = Redis::start()?;
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--stream-url", &redis.url()])?;
    let (status, _) =
        server.post("/api/v1/topics", &json!({"name": "orders", "partitions": 1})).await?;
    assert_eq!(status, 201);
    let path = "/api/v1/topics/orders/messages";
    let message = |number: usize| {
        let key = ["a", "b", "c"][number % 3];
        json!({"key": key, "payload": number.to_string(), "delay_ms": 1})
    };
    let messages: Vec<_> = (0..300).map(message).collect();
    let (status, sent) = server.post(path, &json!({"messages": messages})).await?;
    assert_eq!(status, 201, "{sent}");
    let results = sent["messages"].as_array().context("results")?;
    assert!(results.len() == 300 && results.iter().all(|one| one["delayed_id"].is_string()));

    let too_many: Vec<_> = (0..10_001).map(|_| json!({"payload": "", "delay_ms": 9})).collect();
    let (status, refused) = server.post(path, &json!({"messages": too_many})).await?;
    assert_eq!(status, 400, "{refused}");

    // A consumer promotes due messages.
    let _reader = consume(&server, "orders").send().await?;
    let all = |_: u16, page: &serde_json::Value| {
        page["messages"].as_array().is_some_and(|messages| messages.len() == 300)
    };
    let page = server.until(&format!("{path}?limit=1000"), all).await?;
    for key in ["a", "b", "c"] {
        let messages = page["messages"].as_array().into_iter().flatten();
        let numbers = messages.filter(|message| message["key"] == key);
        let numbers: Vec<usize> =
            numbers.filter_map(|message| message["payload"].as_str()?.parse().ok()).collect();
        assert!(numbers.is_sorted() && numbers.len() == 100, "{key}: {numbers:?}");
    }
    Ok(())
}
