//! Long lists: further rows come while the reader scrolls, at most 400 are in the page, new ones wait.

use anyhow::{Context, Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::{Value, json};

use crate::fixture::Reader;
use crate::support::{LIMIT, Server, ServerDir};

/// Rows in the page, at most.
const ROWS_MAX: i64 = 400;

const ROWS: &str = "return document.querySelectorAll('main tbody tr[data-key]').length";

async fn send(server: &Server, from: usize, count: usize) -> Result<Vec<String>> {
    let message = |n: usize| {
        let headers = json!({"n": n.to_string()});
        json!({"key": format!("k{n}"), "payload": format!("message number {n}"), "headers": headers})
    };
    let messages: Vec<Value> = (from..from + count).map(message).collect();
    let body = json!({"messages": messages});
    let (status, sent) = server.post("/api/v1/topics/long/messages", &body).await?;
    ensure!(status == 201, "{sent}");
    let sent = sent["messages"].as_array().context("messages")?;
    Ok(sent.iter().filter_map(|one| one["id"].as_str().map(str::to_owned)).collect())
}

/// Scrolls until a script returns true, and watches the number of rows.
async fn scroll(reader: &Reader, step: &str, until: &str) -> Result<i64> {
    let deadline = std::time::Instant::now() + LIMIT;
    let mut most = 0;
    loop {
        let rows = reader.number(ROWS).await?;
        ensure!(rows <= ROWS_MAX, "{rows} rows are in the page");
        most = most.max(rows);
        if reader.driver().execute(until).await? == true {
            return Ok(most);
        }
        ensure!(std::time::Instant::now() < deadline, "{until} stays false with {rows} rows");
        reader.driver().execute(step).await?;
    }
}

#[tokio::test]
async fn rows_come_while_scrolling_and_at_most_400_are_in_the_page() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    let topic = json!({"name": "long", "partitions": 1});
    ensure!(server.post("/api/v1/topics", &topic).await?.0 == 201);
    let sent = send(&server, 0, 1200).await?;
    let (first, last) = (&sent[0], &sent[1199]);
    let reader = Reader::start(&server, BrowserScripts::On).await?;

    // To the end and back, as a reader scrolls.
    reader.open("/console/topics/long/messages").await?;
    let shows = |entry: &str| {
        format!("return document.querySelector('tr[data-key=\"0/{entry}\"]') !== null")
    };
    let down = "scrollTo(0, document.documentElement.scrollHeight)";
    let most = scroll(&reader, down, &shows(last)).await?;
    ensure!(most > 300, "rows are dropped early: at most {most}");
    ensure!(reader.driver().execute(&shows(first)).await? == false, "the first rows are dropped");
    reader.find("tr.earlier a").await?;
    reader.must_be_accessible("the end of a long list").await?;
    scroll(&reader, "scrollBy(0, -2000)", &shows(first)).await?;
    // Each row once, in the order of their ids.
    let keys = reader.driver().execute("return [...document.querySelectorAll('main tbody tr[data-key]')].map(row => row.dataset.key)").await?;
    let keys: Vec<String> = serde_json::from_value(keys)?;
    let expected: Vec<String> =
        sent[..keys.len()].iter().map(|entry| format!("0/{entry}")).collect();
    ensure!(keys == expected, "{keys:?}");

    // What a reader sees stays where it is when rows before it are dropped.
    reader.driver().execute(down).await?;
    reader
        .until(&format!(
            "return document.querySelectorAll('main tbody tr[data-key]').length > {}",
            100
        ))
        .await?;

    // A filter says how far it looked, and a page of it is a link.
    let shown = reader.open("/console/topics/long/messages?text=NUMBER+1199").await?;
    ensure!(shown.contains("Scanned 1,200 of 1,200 messages."), "{shown}");
    ensure!(reader.number(ROWS).await? == 1, "{shown}");
    let shown = reader.open("/console/topics/long/messages?header=n%3D7").await?;
    ensure!(reader.number(ROWS).await? == 1 && shown.contains("message number 7"), "{shown}");
    let shown = reader.open("/console/topics/long/messages?key=k31").await?;
    ensure!(reader.number(ROWS).await? == 1 && shown.contains("message number 31"), "{shown}");
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}

#[tokio::test]
async fn pages_of_a_search_contain_each_message_once() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    let topic = json!({"name": "long", "partitions": 3});
    ensure!(server.post("/api/v1/topics", &topic).await?.0 == 201);
    send(&server, 0, 1000).await?;
    for order in ["", "&newest_first=true"] {
        let (mut found, mut cursor) = (Vec::new(), String::new());
        loop {
            let path = format!("/api/v1/topics/long/messages?text=7&limit=10{order}{cursor}");
            let (status, page) = server.get(&path).await?;
            ensure!(status == 200, "{page}");
            let messages = page["messages"].as_array().context("messages")?;
            ensure!(messages.len() <= 10 && page["search"]["total"] == 1000, "{page}");
            found.extend(messages.iter().filter_map(|one| one["key"].as_str().map(str::to_owned)));
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        let mut expected: Vec<String> = (0..1000)
            .map(|n| n.to_string())
            .filter(|n| n.contains('7'))
            .map(|n| format!("k{n}"))
            .collect();
        found.sort();
        expected.sort();
        ensure!(found == expected, "{} of {}", found.len(), expected.len());
    }
    for wrong in ["text=", "key=&limit=5", "header=a&limit=0", "text=a&limit=1001"] {
        let (status, answer) = server.get(&format!("/api/v1/topics/long/messages?{wrong}")).await?;
        ensure!(status == 400, "{wrong}: {answer}");
    }

    // One message, and its neighbours of the same key.
    let again = send(&server, 500, 1).await?;
    let (_, page) = server.get("/api/v1/topics/long/messages?key=k500").await?;
    let (one, partition) = (&page["messages"][0], &page["messages"][0]["partition"]);
    let path = format!(
        "/api/v1/topics/long/messages/{}?partition={partition}",
        one["id"].as_str().context("an id")?
    );
    let (_, shown) = server.get(&path).await?;
    ensure!(
        shown["next_of_key"] == again[0].as_str() && shown["previous_of_key"].is_null(),
        "{shown}"
    );
    ensure!(server.get("/api/v1/topics/long/messages/1-1").await?.0 == 404);
    Ok(())
}

#[tokio::test]
async fn new_rows_wait_while_the_reader_is_further_down() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    for n in 0..40 {
        let topic = json!({"name": format!("topic-{n:02}"), "partitions": 1});
        ensure!(server.post("/api/v1/topics", &topic).await?.0 == 201);
    }
    let reader = Reader::start(&server, BrowserScripts::On).await?;
    reader.open("/console/topics").await?;
    reader.until_shown("Live").await?;
    reader.driver().execute("scrollTo(0, 600)").await?;
    let place = "return Math.round(document.querySelector('tr[data-key=topic-20]').getBoundingClientRect().top)";
    let before = reader.number(place).await?;
    for name in ["a-new-one", "another"] {
        let topic = json!({"name": name, "partitions": 1});
        ensure!(server.post("/api/v1/topics", &topic).await?.0 == 201);
    }
    reader.until_shown("2 new").await?;
    ensure!(reader.number(place).await? == before, "what is read has moved");
    ensure!(
        reader.number("return document.querySelectorAll('tr[data-key=a-new-one]').length").await?
            == 0
    );
    reader.must_be_accessible("a list with new rows").await?;
    reader.click("2 new").await?;
    reader.until_shown("a-new-one").await?;
    ensure!(reader.number("return scrollY").await? == 0, "the new rows are shown");
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}
