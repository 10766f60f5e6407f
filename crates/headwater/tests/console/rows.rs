//! Long lists: further rows come while the reader scrolls, at most 400 are in the page, new ones wait.

use anyhow::{Context, Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::{Value, json};

use crate::fixture::{ConsoleFixture, Reader};
use crate::support::{LIMIT, Server, ServerDir};

/// Rows in the page, at most.
const ROWS_MAX: i64 = 400;

const ROWS: &str = "return document.querySelectorAll('main tbody tr[data-key]').length";

/// The number of rows, and the first and the last one.
const ENDS: &str = "const rows = [...document.querySelectorAll('main tbody tr[data-key]')];
    return [rows.length, rows[0]?.dataset.key ?? null, rows.at(-1)?.dataset.key ?? null]";

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

/// Makes dead letters of so many messages.
async fn dead_letters(server: &Server, count: usize) -> Result<()> {
    let group = "/api/v1/topics/long/groups/billing";
    let mut dead = 0;
    while dead < count {
        let wanted = json!({"max": (count - dead).min(100), "wait_ms": 5000, "lease_ms": 60000});
        let (_, pulled) = server.post(&format!("{group}/pull"), &wanted).await?;
        let letter = |message: &Value| json!({"lease": message["lease"], "outcome": "dead_letter", "reason": "no address"});
        let messages = pulled["messages"].as_array().context("messages")?;
        let settlements: Vec<Value> = messages.iter().map(letter).collect();
        dead += settlements.len();
        let body = json!({"settlements": settlements});
        ensure!(server.post(&format!("{group}/settle"), &body).await?.0 == 200);
    }
    let all = |_: u16, topic: &Value| topic["dead_letters"] == count;
    server.until("/api/v1/topics/long", all).await.map(drop)
}

/// Selected rows that leave the page stay selected, and the box in the head of the table selects all rows that are shown.
async fn a_selection_outlives_its_rows(reader: &Reader, server: &Server) -> Result<()> {
    const LETTERS: usize = 460;
    dead_letters(server, LETTERS).await?;
    reader.open("/console/topics/long/dead-letters").await?;
    // All rows that are shown, and none. In one script, because further rows may come at any time.
    let selected = "return document.querySelectorAll('#selected input[name=id]:checked').length";
    let press = "const box = document.querySelector('thead input[type=checkbox]'); box.click();
        const boxes = [...document.querySelectorAll('#selected tbody input[name=id]')];
        return [box.checkVisibility(), boxes.length > 0, boxes.every(one => one.checked), boxes.some(one => one.checked)]";
    for is_selected in [true, false] {
        let found = reader.driver().execute(press).await?;
        ensure!(found == json!([true, true, is_selected, is_selected]), "{found}");
    }

    // The first two, which leave the page.
    let mut chosen = Vec::new();
    for row in [1, 2] {
        let row = reader.find(&format!("tbody tr:nth-child({row}) input[name=id]")).await?;
        row.click().await?;
        chosen.push(row.value().await?);
    }
    // Whenever the form is sent, both are in it: as a checked box, or hidden.
    let watch = "window.fewest = 2;
        const count = () => {
            const fields = document.querySelectorAll('#selected input[type=hidden][name=id], #selected input[name=id]:checked');
            window.fewest = Math.min(window.fewest, fields.length);
            requestAnimationFrame(count);
        };
        count();";
    reader.driver().execute(watch).await?;
    let shows =
        |id: &str| format!("return document.querySelector('tr[data-key=\"{id}\"]') !== null");
    let down = "scrollTo(0, document.documentElement.scrollHeight)";
    // At the end nothing moves any more: the link to the next page is hidden when all of its rows are there.
    let is_at_end = "return document.querySelector('nav.pager a[rel=next]')?.hidden === true";
    scroll(reader, down, is_at_end).await?;
    ensure!(
        reader.driver().execute(&shows(&chosen[0])).await? == false,
        "the row has not left the page"
    );
    let kept = "return [...document.querySelectorAll('#selected input[type=hidden][name=id]')].map(field => field.value).sort()";
    let kept: Vec<String> = serde_json::from_value(reader.driver().execute(kept).await?)?;
    let mut expected = chosen.clone();
    expected.sort();
    ensure!(kept == expected, "{kept:?}");

    // They come back as they were, each once.
    scroll(reader, "scrollBy(0, -2000)", &shows(&chosen[0])).await?;
    let hidden = "return document.querySelectorAll('#selected input[type=hidden][name=id]').length";
    ensure!(reader.number(hidden).await? == 0, "they are in the form twice");
    ensure!(reader.number(selected).await? == 2, "they are not selected any more");

    // Away again, with one more: the action is about all three.
    scroll(reader, down, is_at_end).await?;
    let last = reader.find("tbody tr:last-child input[name=id]").await?;
    last.click().await?;
    chosen.push(last.value().await?);
    ensure!(
        reader.number("return window.fewest").await? == 2,
        "one was not in the form for a while"
    );
    reader.click("Purge selected…").await?;
    reader.until_shown("Purge 3 dead letters?").await?;
    let shown = reader.text().await?;
    ensure!(chosen.iter().all(|id| shown.contains(id)), "{chosen:?}: {shown}");
    reader.click("Purge 3 dead letters").await?;
    reader.until_shown("3 deleted permanently.").await?;
    for id in &chosen {
        let path = format!("/api/v1/topics/long/dead-letters/{id}");
        ensure!(server.get(&path).await?.0 == 404, "{id} is still there");
    }
    ensure!(server.get("/api/v1/topics/long").await?.1["dead_letters"] == LETTERS - 3);
    Ok(())
}

/// Scrolls until a script returns true, and watches the number of rows. Other rows must come within the limit.
async fn scroll(reader: &Reader, step: &str, until: &str) -> Result<i64> {
    let mut deadline = std::time::Instant::now() + LIMIT;
    let mut known = Value::Null;
    let mut most = 0;
    loop {
        let ends = reader.driver().execute(ENDS).await?;
        let rows = ends[0].as_i64().context("a number of rows")?;
        if ends != known {
            (known, deadline) = (ends, std::time::Instant::now() + LIMIT);
        }
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

    a_selection_outlives_its_rows(&reader, &server).await?;
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
    reader.until_offered(2).await?;
    ensure!(reader.number(place).await? == before, "what is read has moved");
    ensure!(
        reader.number("return document.querySelectorAll('tr[data-key=a-new-one]').length").await?
            == 0
    );
    reader.must_be_accessible("a list with new rows").await?;
    // The offer keeps the focus when its number changes.
    let focus = "window.offer = document.querySelector('#new-rows button'); window.offer.focus()";
    reader.driver().execute(focus).await?;
    let topic = json!({"name": "one-more", "partitions": 1});
    ensure!(server.post("/api/v1/topics", &topic).await?.0 == 201);
    reader.until_offered(3).await?;
    let is_focused = "return document.activeElement === window.offer";
    ensure!(reader.driver().execute(is_focused).await? == true, "the offer has lost the focus");
    ensure!(reader.number(place).await? == before, "what is read has moved");
    reader.click("3 new").await?;
    reader.until_shown("a-new-one").await?;
    ensure!(reader.number("return scrollY").await? == 0, "the new rows are shown");
    let focused = reader.driver().execute("return document.activeElement.id").await?;
    ensure!(focused == "main", "the focus is lost");
    ensure!(reader.driver().count("#new-rows button").await? == 0, "nothing is left to offer");
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}

#[tokio::test]
async fn what_is_read_stays_in_place_while_rows_above_it_become_higher() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let insert = "INSERT INTO integrations (name, provider) VALUES ('shop', 'github');
        INSERT INTO issues (integration_id, external_project_id, external_issue_id)
        SELECT id, 'acme/shop', n::text FROM integrations, generate_series(1, 45) AS n WHERE name = 'shop'";
    fixture.database.query(insert)?;
    let reader = Reader::start(&fixture.server, BrowserScripts::On).await?;
    reader.open("/console/issues").await?;
    reader.until_shown("Live").await?;
    reader.driver().execute("scrollTo(0, 700)").await?;
    // The first row in view, as the page chooses it, and the right edge of its first column.
    let first = "const row = [...document.querySelectorAll('main tr[data-key]')].find(row => row.getBoundingClientRect().bottom > 0);
        window.read = row; return Number(row.dataset.key)";
    let first = reader.number(first).await?;
    let place = "const cell = window.read.cells[0].getBoundingClientRect();
        return Math.round(cell.top) * 10000 + Math.round(cell.right)";
    let before = reader.number(place).await?;
    let grow = format!(
        "UPDATE issues SET last_error = repeat('the bank refused ', 10) WHERE id < {first}"
    );
    fixture.database.query(&grow)?;
    reader.until_shown("the bank refused").await?;
    let moved = (reader.number(place).await? - before).abs();
    // The browser scrolls by whole pixels, so a row may be one pixel off.
    ensure!(moved == 0 || moved == 10_000, "what is read has moved");
    ensure!(reader.number("return scrollY").await? > 750, "the rows above have not grown");
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}

#[tokio::test]
async fn a_list_is_reversed_by_the_head_of_its_column_and_the_address_keeps_the_order() -> Result<()>
{
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    for n in 0..60 {
        let ticket = json!({"title": format!("Ticket {n}"), "content": "Hello."});
        ensure!(server.post("/api/v1/tickets", &ticket).await?.0 == 201);
    }
    let reader = Reader::start(&server, BrowserScripts::On).await?;
    let keys = "return [...document.querySelectorAll('main tbody tr[data-key]')].map(row => Number(row.dataset.key))";
    let listed = async || -> Result<Vec<i64>> {
        Ok(serde_json::from_value(reader.driver().execute(keys).await?)?)
    };
    reader.open("/console/issues").await?;
    let ascending = listed().await?;
    ensure!(ascending.len() >= 50 && ascending.is_sorted(), "{ascending:?}");
    reader.find("th[aria-sort=ascending] a").await?.click().await?;
    reader.find("th[aria-sort=descending] a").await?;
    ensure!(reader.path().await? == "/console/issues?newest_first=true");
    reader.until_shown("headwater issue list --newest-first").await?;
    scroll(
        &reader,
        "scrollTo(0, document.documentElement.scrollHeight)",
        "return document.querySelectorAll('main tbody tr[data-key]').length === 60",
    )
    .await?;
    let mut descending = listed().await?;
    descending.reverse();
    ensure!(descending.is_sorted() && descending.starts_with(&ascending[..10]), "{descending:?}");

    // Tickets have the newest first by default.
    let first = "return document.querySelector('main tbody tr th').textContent";
    reader.open("/console/tickets").await?;
    ensure!(reader.driver().execute(first).await? == "Ticket 59");
    reader.find("th[aria-sort=descending] a").await?.click().await?;
    reader.find("th[aria-sort=ascending]").await?;
    ensure!(reader.driver().execute(first).await? == "Ticket 0");
    reader.must_be_accessible("a list in reverse order").await?;
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}
