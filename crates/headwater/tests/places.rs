//! Places that only so many callers may have at once, against the real binary: nobody keeps one, and nobody takes two.

mod support;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use headwater_testkit::{Postgres, Redis};
use serde_json::json;
use sqlx::{Connection, PgConnection};

use crate::support::{LIMIT, Place, Server, eventually};

/// More than can consume at once.
const MANY: usize = 250;

fn consume(server: &Server, topic: &str) -> reqwest::RequestBuilder {
    let path = format!("/api/v1/topics/{topic}/groups/workers/consume");
    server.client.post(server.url(&path)).json(&json!({"mode": "shared"}))
}

#[tokio::test]
async fn consumers_that_hang_up_while_they_join_leave_their_places_to_others() -> Result<()> {
    let redis = Redis::start()?;
    let place = Place::new()?;
    // Who hangs up would otherwise be outlived by the limit of time of his request.
    let many = ["--http-rate-per-second", "1000000", "--http-rate-burst", "1000000"];
    let server = place.serve(&[&["--stream-url", &redis.url()][..], &many].concat())?;
    server.until("/health/ready", |status, _| status == 200).await?;
    let (status, made) =
        server.post("/api/v1/topics", &json!({"name": "orders", "partitions": 1})).await?;
    assert_eq!(status, 201, "{made}");

    // Redis stands still: whoever joins has a place, and waits. Each of them hangs up.
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

    // One after another, as many as there is room for: each has its place and keeps it.
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
    let place = Place::new()?;
    let url = database.url();
    let server = place.serve(&["--database-url", &url])?;
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
    for answer in asking {
        assert_eq!(answer.await??, 200, "each has its turn");
    }
    Ok(())
}
