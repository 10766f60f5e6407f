//! Places that only so many callers may have at once, against the real binary: nobody keeps one, and nobody takes two.

mod support;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use headwater_testkit::{Postgres, Redis};
use serde_json::json;
use sqlx::{Connection, PgConnection};

use crate::support::{LIMIT, ServerDir, Server, eventually};

/// More than can consume at once.
const MANY: usize = 250;

fn consume(server: &Server, topic: &str) -> reqwest::RequestBuilder {
    let path = format!("/api/v1/topics/{topic}/groups/workers/consume");
    server.client.post(server.url(&path)).json(&json!({"mode": "shared"}))
}

#[tokio::test]
async fn consumers_that_hang_up_while_they_join_leave_their_places_to_others() -> Result<()> {
    let redis = Redis::start()?;
    let dir = ServerDir::new()?;
    // Who hangs up would otherwise be outlived by the limit of time of his request.
    let many = ["--http-rate-per-second", "1000000", "--http-rate-burst", "1000000"];
    let server = dir.serve(&[&["--stream-url", &redis.url()][..], &many].concat())?;
    server.until("/health/ready", |status, _| status == 200).await?;
    let (status, made) =
        server.post("/api/v1/topics", &json!({"name": "orders", "partitions": 1})).await?;
    assert_eq!(status, 201, "{made}");

    // Redis stands still: whoever joins has a dir, and waits. Each of them hangs up.
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
                assert_eq!(status, 503, "nobody can join");
                refused += 1;
            }
        }
    }
    drop(joining);
    assert!(hung_up >= 200, "{hung_up} hung up, {refused} were refused");
    redis.resume()?;

    // One after another, as many as there is room for: each has its dir and keeps it.
    let mut guests = Vec::new();
    let deadline = tokio::time::Instant::now() + LIMIT;
    while guests.len() < 20 {
        ensure!(tokio::time::Instant::now() < deadline, "no room: {}", server.log());
        let response = consume(&server, "orders").send().await?;
        match response.status().as_u16() {
            200 => {
                let mut events = response.bytes_stream();
                let first = events.next().await.context("an event")??;
                assert!(String::from_utf8_lossy(&first).contains("event: consumer"), "{first:?}");
                guests.push(events);
            }
            // Redis has just come back, and the last may not have heard yet that their callers are gone.
            503 => tokio::time::sleep(Duration::from_millis(50)).await,
            other => panic!("{other}"),
        }
    }
    Ok(())
}

// The callers wait while the test looks at the database.
#[tokio::test(flavor = "multi_thread")]
async fn the_books_are_counted_for_one_caller_at_a_time() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let dir = ServerDir::new()?;
    let url = database.url();
    let server = dir.serve(&["--database-url", &url])?;
    server.until("/health/ready", |status, _| status == 200).await?;

    // Whoever counts waits at the table of events.
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
             AND wait_event_type = 'Lock' AND query LIKE 'SELECT (SELECT count(*) FROM issues)%'",
        );
        found.ok().and_then(|count| count.trim().parse::<usize>().ok()).unwrap_or(0)
    };
    eventually("one that counts", || counting() > 0).await?;
    // The others have time to come as far.
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        assert!(counting() <= 1, "one counts at a time");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    closed.rollback().await?;
    let mut answers = Vec::new();
    for answer in asking {
        answers.push(answer.await??.as_u16());
    }
    answers.sort_unstable();
    assert_eq!(answers, [200, 429, 429, 429], "the others are told to come again");
    let is_free = |status: u16, _: &serde_json::Value| status == 200;
    server.until("/api/v1/audit/books", is_free).await?;
    Ok(())
}

#[tokio::test]
async fn tails_have_a_maximum_and_who_ends_one_makes_room() -> Result<()> {
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
        ensure!(tails.len() <= 200, "there is no end");
    };
    assert_eq!((refused.status().as_u16(), tails.len()), (429, 200));
    tails.clear();
    let deadline = tokio::time::Instant::now() + LIMIT;
    while server.client.get(server.url(path)).send().await?.status() != 200 {
        ensure!(tokio::time::Instant::now() < deadline, "no room: {}", server.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

#[tokio::test]
async fn delayed_messages_of_one_call_keep_their_order_per_key_and_are_not_endless() -> Result<()> {
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

    // Somebody reads, so that what is due is moved.
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
