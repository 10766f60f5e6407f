//! What fails while pages are open: Redis, the database, the process itself, and too many tabs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::future::join_all;
use headwater_testkit::{BrowserScripts, Postgres, Redis};
use serde_json::{Value, json};

use crate::fixture::{ConsoleFixture, Reader};
use crate::screens::{with_data, with_desk_data};
use crate::support::{LIMIT, Server, ServerDir, client};

/// Time for every screen at once, while a dependency is down.
const SCREENS_LIMIT: Duration = Duration::from_secs(40);

/// Waits until the server has noticed, and nothing is answered from memory any more: an answer is kept for a second.
async fn noticed(server: &Server, part: &'static str) -> Result<()> {
    server.until("/api/v1/overview", |_, overview| overview[part].is_null()).await?;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    Ok(())
}

/// Reads a screen. Returns its page, and whether a part of it cannot be shown.
async fn read(server: &Server, path: &str) -> Result<(String, bool)> {
    let response = server.client.get(server.url(path)).send().await?;
    let status = response.status().as_u16();
    let page = response.text().await?;
    ensure!(status == 200 && page.contains("</main>"), "{path}: {status} {page}");
    ensure!(!page.contains("<code>internal</code>"), "{path}: {page}");
    let says = ["cannot be shown", "not read", "not searched", ">unavailable<"];
    let is_incomplete = says.iter().any(|part| page.contains(part));
    Ok((page, is_incomplete))
}

/// Reads every screen at once. Each of those that need the broken part must say that something cannot be shown.
async fn read_all(
    server: &Server,
    paths: &[String],
    broken: &str,
    is_needed_by: impl Fn(&str) -> bool,
) -> Result<()> {
    let began = Instant::now();
    let pages = join_all(paths.iter().map(|path| read(server, path))).await;
    ensure!(began.elapsed() < SCREENS_LIMIT, "without {broken}: {:?}", began.elapsed());
    let mut needed_by = 0;
    for (path, page) in paths.iter().zip(pages) {
        let (page, is_incomplete) = page.with_context(|| format!("without {broken}"))?;
        needed_by += usize::from(is_needed_by(path));
        ensure!(
            is_incomplete || !is_needed_by(path),
            "{path} does not say that something is missing without {broken}: {page}"
        );
    }
    ensure!(needed_by > 0, "no screen needs {broken}");
    Ok(())
}

/// The text of the content of a page.
fn text_of(page: &str) -> String {
    let main = page.split("<main").nth(1).unwrap_or_default();
    main.split('<').filter_map(|part| part.split_once('>')).map(|(_, text)| text).collect()
}

/// Reads a screen until it shows all of this and none of that: a part that is read from a busy server may be late.
async fn until_said(server: &Server, path: &str, wanted: &[&str], unwanted: &[&str]) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let (page, _) = read(server, path).await?;
        let text = text_of(&page);
        let is_said = wanted.iter().all(|part| text.contains(part));
        if is_said && !unwanted.iter().any(|part| text.contains(part)) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{path} does not say {wanted:?}: {text}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What screens of several sources say without PostgreSQL: which part is missing, and the rest.
async fn the_rest_is_shown_without_postgres(server: &Server, session: &str) -> Result<()> {
    let missing = ["cannot be shown. ", "Code unavailable, request ", "Open Doctor"];
    let with = |first: &'static str| [&[first][..], &missing].concat();
    for (path, wanted, unwanted) in [
        (
            "/console/failures",
            vec![
                "order # has no address",
                "Dead letters: 4 failures read",
                "Quarantined issues: not read ",
                "Dead replies: not read ",
            ],
            vec!["refused by the bank", "Nothing has failed"],
        ),
        (
            "/console/search?q=billing",
            vec![
                "group of topic orders",
                "Tickets: not searched ",
                "Topics and groups: names of 1 topics",
            ],
            vec!["Topics and groups: not searched"],
        ),
        ("/console/consistency?check=1", with("The check "), vec!["Consistent"]),
        ("/console/reports/tokens-and-cost", with("The report "), vec!["There is no data yet"]),
        ("/console/reports", vec!["Tokens and cost of all model runs"], vec!["cannot be shown"]),
        (
            "/console/sessions",
            vec![session, "open"],
            vec!["cannot be shown", "There are no sessions"],
        ),
    ] {
        until_said(server, path, &wanted, &unwanted).await?;
    }
    let path = format!("/console/sessions/{session}");
    until_said(server, &path, &["Steps", "State after this step"], &["cannot be shown"]).await
}

/// What the screens of streams say without Redis. The assignment was read before, so its last answer stays.
async fn the_streams_say_what_is_missing_without_redis(server: &Server) -> Result<()> {
    for (path, wanted, unwanted) in [
        (
            "/console/assignment",
            [
                "The partitions cannot be shown as it is now. ",
                "It is shown as of ",
                "orders / billing",
                "Moves of the last hour",
            ],
            "No group reads a topic.",
        ),
        (
            "/console/tail?topic=orders",
            [
                "orders",
                "The messages cannot be shown. ",
                "Code unavailable, request ",
                "Open Doctor",
            ],
            "It is shown as of ",
        ),
        (
            "/console/sessions",
            [
                "The sessions cannot be shown. ",
                "Code unavailable, request ",
                "Open Doctor",
                "Of issue",
            ],
            "There are no sessions.",
        ),
    ] {
        until_said(server, path, &wanted, &[unwanted]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn every_screen_answers_without_redis_and_without_the_database() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let data = fixture.fill().await?;
    let screens = [with_data(&data), with_desk_data(&fixture.fill_desk().await?)].concat();
    let paths: Vec<String> = screens.into_iter().map(|(path, _)| path).collect();
    // One after the other: all at once may take longer than a part has.
    for path in &paths {
        let deadline = Instant::now() + LIMIT;
        // One of its topics does not exist.
        let has_gap = path.starts_with("/console/tail?");
        loop {
            let (page, is_incomplete) = read(&fixture.server, path).await?;
            if is_incomplete == has_gap {
                break;
            }
            ensure!(Instant::now() < deadline, "{path} is not whole: {page}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    fixture.postgres.stop()?;
    noticed(&fixture.server, "issues").await?;
    let of_database =
        ["/issues", "/tickets", "/drafts", "/plans", "/outbox", "/processes", "/audit"];
    let is_of_database = |path: &str| of_database.iter().any(|part| path.contains(part));
    read_all(&fixture.server, &paths, "PostgreSQL", is_of_database).await?;
    the_rest_is_shown_without_postgres(&fixture.server, &data.session).await?;
    fixture.postgres.restart()?;
    fixture.server.until("/api/v1/overview", |_, overview| overview["issues"].is_object()).await?;
    // Among the last answers, of which only so many are kept.
    until_said(&fixture.server, "/console/assignment", &["orders / billing"], &[]).await?;
    // Last, because it has nothing stored when it starts again.
    fixture.redis.kill9()?;
    noticed(&fixture.server, "topics").await?;
    let is_of_streams = |path: &str| path.contains("/topics") || path.contains("/sessions");
    read_all(&fixture.server, &paths, "Redis", is_of_streams).await?;
    the_streams_say_what_is_missing_without_redis(&fixture.server).await
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

    // First the browser, so that the plan still runs when its page is opened.
    let reader = Reader::start(&server, BrowserScripts::On).await?;
    let (status, plan) = server.post("/api/v1/plans", &json!({"topics": ["orders"]})).await?;
    ensure!(status < 300, "{plan}");
    let path = format!("/plans/{}", plan["id"]);
    reader.open(&format!("/console{path}")).await?;
    reader.until_shown("running").await?;
    // Without outcomes the plan stays at its first step.
    let consumer = consume(server.url(""));
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
