//! What fails while pages are open: Redis, the database, the process itself, and too many tabs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::future::join_all;
use headwater_testkit::{BrowserScripts, Postgres, Redis};
use serde_json::{Value, json};

use crate::fixture::{ConsoleFixture, Reader};
use crate::screens::with_data;
use crate::support::{LIMIT, Server, ServerDir, client};

/// Time for every screen at once, while a dependency is down.
const SCREENS_LIMIT: Duration = Duration::from_secs(40);

/// Waits until the server has noticed, and nothing is answered from memory any more: an answer is kept for a second.
async fn noticed(server: &Server, part: &'static str) -> Result<()> {
    server.until("/api/v1/overview", |_, overview| overview[part].is_null()).await?;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    Ok(())
}

/// Reads every screen at once. Returns how many have a part that cannot be shown.
async fn read_all(server: &Server, paths: &[String], broken: &str) -> Result<usize> {
    let began = Instant::now();
    let read = |path: &String| {
        let request = server.client.get(server.url(path));
        async move {
            let response = request.send().await?;
            let status = response.status().as_u16();
            anyhow::Ok((status, response.text().await?))
        }
    };
    let pages = join_all(paths.iter().map(read)).await;
    let mut incomplete = 0;
    for (path, page) in paths.iter().zip(pages) {
        let (status, page) = page.with_context(|| path.clone())?;
        ensure!(
            status == 200 && page.contains("</main>"),
            "{path} without {broken}: {status} {page}"
        );
        ensure!(!page.contains("<code>internal</code>"), "{path} without {broken}: {page}");
        let says = ["cannot be shown", "not read", "not searched", "unavailable"];
        incomplete += usize::from(says.iter().any(|part| page.contains(part)));
    }
    ensure!(began.elapsed() < SCREENS_LIMIT, "without {broken}: {:?}", began.elapsed());
    Ok(incomplete)
}

#[tokio::test]
async fn every_screen_answers_without_redis_and_without_the_database() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let data = fixture.fill().await?;
    let paths: Vec<String> = with_data(&data).into_iter().map(|(path, _)| path).collect();
    ensure!(read_all(&fixture.server, &paths, "nothing").await? <= 1, "all screens are whole");
    fixture.postgres.stop()?;
    noticed(&fixture.server, "issues").await?;
    let of_database = ["/issues", "/tickets", "/plans", "/outbox", "/processes", "/audit"];
    let is_of = |path: &&String| of_database.iter().any(|part| path.contains(part));
    let expected = paths.iter().filter(is_of).count();
    let found = read_all(&fixture.server, &paths, "PostgreSQL").await?;
    ensure!(found >= expected, "{found} of {expected} screens say that something is missing");
    fixture.postgres.restart()?;
    fixture.server.until("/api/v1/overview", |_, overview| overview["issues"].is_object()).await?;
    // Last, because it has nothing stored when it starts again.
    fixture.redis.kill9()?;
    noticed(&fixture.server, "topics").await?;
    let is_of = |path: &&String| path.contains("/topics") || path.contains("/sessions");
    let expected = paths.iter().filter(is_of).count();
    let found = read_all(&fixture.server, &paths, "Redis").await?;
    ensure!(found >= expected, "{found} of {expected} screens say that something is missing");
    Ok(())
}

/// Settles everything that arrives, at whichever server answers at this address.
fn consume(root: String) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        let client = client();
        loop {
            let group = format!("{root}/api/v1/topics/orders/groups/billing");
            let wanted = json!({"max": 50, "wait_ms": 300, "lease_ms": 2000});
            let pulled = client.post(format!("{group}/pull")).json(&wanted).send().await;
            let Ok(answer) = pulled else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let answer: Value = answer.json().await.unwrap_or_default();
            let messages = answer["messages"].as_array().cloned().unwrap_or_default();
            let done = |message: &Value| json!({"lease": message["lease"], "outcome": "done"});
            let settlements: Vec<Value> = messages.iter().map(done).collect();
            if settlements.is_empty() {
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
            let body = json!({"settlements": settlements});
            let _ = client.post(format!("{group}/settle")).json(&body).send().await;
        }
    })
}

#[tokio::test]
async fn a_killed_process_ends_neither_a_plan_nor_the_page_that_shows_it() -> Result<()> {
    const LETTERS: usize = 40;
    let (redis, postgres) = (Redis::start()?, Postgres::start()?);
    let database = postgres.database()?;
    let dir = ServerDir::new()?;
    let arguments = ["--stream-url", &redis.url(), "--database-url", &database.url()];
    let mut server = dir.serve(&arguments)?;
    let topic = json!({"name": "orders", "partitions": 2});
    ensure!(server.post("/api/v1/topics", &topic).await?.0 == 201);
    let message = |n: usize| json!({"key": format!("k{n}"), "payload": format!("order {n}")});
    let messages = json!({"messages": (0..LETTERS).map(message).collect::<Vec<_>>()});
    ensure!(server.post("/api/v1/topics/orders/messages", &messages).await?.0 == 201);
    let group = "/api/v1/topics/orders/groups/billing";
    let mut dead = 0;
    while dead < LETTERS {
        let wanted = json!({"max": 50, "wait_ms": 2000, "lease_ms": 60000});
        let (_, pulled) = server.post(&format!("{group}/pull"), &wanted).await?;
        let letter = |message: &Value| json!({"lease": message["lease"], "outcome": "dead_letter", "reason": "no address"});
        let all: Vec<Value> =
            pulled["messages"].as_array().context("messages")?.iter().map(letter).collect();
        dead += all.len();
        ensure!(
            server.post(&format!("{group}/settle"), &json!({"settlements": all})).await?.0 == 200
        );
    }
    let letters = |_: u16, topic: &Value| topic["dead_letters"] == LETTERS;
    server.until("/api/v1/topics/orders", letters).await?;

    let consumer = consume(server.url(""));
    let (status, plan) = server.post("/api/v1/plans", &json!({"topics": ["orders"]})).await?;
    ensure!(status < 300, "{plan}");
    let path = format!("/plans/{}", plan["id"]);
    let reader = Reader::start(&server, BrowserScripts::On).await?;
    reader.open(&format!("/console{path}")).await?;
    reader.until_shown("running").await?;
    // Some letters are sent, others are not.
    server.until(&format!("/api/v1{path}"), |_, plan| plan["sent"].as_u64() > Some(0)).await?;
    let address = server.address.to_string();
    server.kill9()?;
    reader.until_shown("No connection, trying again").await?;
    let again = [&["serve", "--http-listen", &address][..], &arguments].concat();
    let mut server = dir.start_soon(&again)?;
    server.listening()?;
    // The same page goes on by itself until the plan is done.
    reader.driver().execute("window.stayed = true").await?;
    reader.until_shown("Live").await?;
    let done = server.until(&format!("/api/v1{path}"), |_, plan| plan["state"] == "done").await?;
    ensure!(done["settled"] == LETTERS && done["failed"] == 0, "{done}");
    reader.until_shown("done").await?;
    reader.until_shown(&format!("With an outcome: {LETTERS} of {LETTERS}")).await?;
    ensure!(reader.driver().execute("return window.stayed === true").await? == true);
    let (_, topic) = server.get("/api/v1/topics/orders").await?;
    ensure!(
        topic["length"] == 2 * LETTERS && topic["dead_letters"] == 0,
        "each was sent once: {topic}"
    );
    consumer.abort();
    // The browser reports the connections that were refused while no server ran.
    reader.must_be_clean(&["net::ERR_", "status of 503"]).await?;
    reader.browser.quit().await
}

#[tokio::test]
async fn ten_tabs_share_the_connections_of_the_browser() -> Result<()> {
    const TABS: usize = 10;
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    let reader = Reader::start(&server, BrowserScripts::On).await?;
    let mut tabs = Vec::new();
    for _ in 0..TABS {
        let tab = reader.driver().new_tab().await?;
        reader.driver().switch_to(&tab).await?;
        reader.open("/console/tickets").await?;
        tabs.push(tab);
    }
    // Every tab is usable: it loads pages and becomes live when it is looked at.
    for (number, tab) in tabs.iter().enumerate() {
        reader.driver().switch_to(tab).await?;
        let began = Instant::now();
        reader.open("/console/issues").await?;
        ensure!(began.elapsed() < LIMIT / 4, "tab {number} loads for {:?}", began.elapsed());
        reader.open("/console/tickets").await?;
        reader.until_shown("Live").await?;
    }
    let new = json!({"title": "Seen in the first tab", "content": "Hello."});
    ensure!(server.post("/api/v1/tickets", &new).await?.0 == 201);
    for tab in [&tabs[0], &tabs[TABS - 1]] {
        reader.driver().switch_to(tab).await?;
        reader.until_shown("Seen in the first tab").await?;
        reader.must_be_clean(&[]).await?;
    }
    reader.browser.quit().await
}
