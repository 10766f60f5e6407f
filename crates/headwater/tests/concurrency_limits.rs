//! Limits of concurrent callers: slots are freed, and each caller uses one.

mod support;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use headwater_testkit::Redis;
use serde_json::json;

use crate::support::{LIMIT, Server, ServerDir};

/// More than the limit of waiting pulls of one caller.
const MANY: usize = 250;

fn pull(server: &Server, topic: &str) -> reqwest::RequestBuilder {
    let path = format!("/api/v1/topics/{topic}/groups/workers/pull");
    server.client.post(server.url(&path)).json(&json!({"wait_ms": 20_000}))
}

#[tokio::test]
async fn pulls_that_disconnect_while_joining_free_their_slots() -> Result<()> {
    let redis = Redis::start()?;
    let dir = ServerDir::new()?;
    // The rate limit must not reject these requests.
    let many = ["--http-rate-per-second", "1000000", "--http-rate-burst", "1000000"];
    let server = dir.serve(&[&["--stream-url", &redis.url()][..], &many].concat())?;
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;
    let (status, made) =
        server.post("/api/v1/topics", &json!({"name": "orders", "partitions": 1})).await?;
    assert_eq!(status, 201, "{made}");

    // Redis is paused: each client gets a slot, waits, and disconnects.
    redis.pause()?;
    let joining = (0..MANY).map(|_| {
        let request = pull(&server, "orders").timeout(Duration::from_secs(3));
        async move { request.send().await.map(|response| response.status()) }
    });
    let mut joining = futures_util::stream::iter(joining).buffer_unordered(MANY);
    let (mut hung_up, mut refused) = (0, 0);
    while let Some(answer) = joining.next().await {
        match answer {
            Err(_) => hung_up += 1,
            Ok(status) => {
                assert_eq!(status, 429, "joining is impossible");
                refused += 1;
            }
        }
    }
    drop(joining);
    assert_eq!((hung_up, refused), (200, 50), "disconnected, rejected");
    redis.resume()?;

    // All slots are free: as many clients wait, and each gets a message.
    let (status, _) = server
        .post(
            "/api/v1/topics/orders/messages",
            &json!({"messages": vec![json!({"payload": "x"}); 200]}),
        )
        .await?;
    assert_eq!(status, 201);
    let deadline = tokio::time::Instant::now() + LIMIT;
    let pulling = (0..200).map(async |_| {
        loop {
            ensure!(tokio::time::Instant::now() < deadline, "no free slot: {}", server.log());
            let response = pull(&server, "orders").send().await?;
            match response.status().as_u16() {
                200 => {
                    let pulled: serde_json::Value = response.json().await?;
                    if let [message] = pulled["messages"].as_array().context("messages")?.as_slice()
                    {
                        return Ok(message["id"].to_string());
                    }
                }
                // Redis has just resumed, and some disconnects may not have been noticed yet.
                429 | 503 => tokio::time::sleep(Duration::from_millis(50)).await,
                other => panic!("{other}"),
            }
        }
    });
    let ids = futures_util::future::try_join_all(pulling).await?;
    let distinct: std::collections::BTreeSet<String> = ids.into_iter().collect();
    assert_eq!(distinct.len(), 200);
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
    assert_eq!(pull(&server, "orders").send().await?.status(), 200);
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
