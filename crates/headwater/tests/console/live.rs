//! Live pages: changes appear without a reload, and what the reader has touched stays.

use anyhow::{Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::json;

use crate::fixture::Reader;
use crate::support::{Server, ServerDir};

#[tokio::test]
async fn changes_appear_without_a_reload_and_open_details_and_typed_text_stay() -> Result<()> {
    let dir = ServerDir::new()?;
    let mut server = dir.serve(&["--issue-quiet", "0s", "--issue-max-wait", "0s"])?;
    let new = json!({"title": "First ticket", "content": "Hello."});
    let (_, ticket) = server.post("/api/v1/tickets", &new).await?;
    let reader = Reader::start(&server, BrowserScripts::On).await?;

    // A list: a new row comes up by itself.
    reader.open("/console/tickets").await?;
    reader.until_shown("First ticket").await?;
    reader.driver().execute("window.stayed = true").await?;
    server.post("/api/v1/tickets", &json!({"title": "Second ticket", "content": "Hello."})).await?;
    reader.until_shown("Second ticket").await?;
    let stayed = reader.driver().execute("return window.stayed === true").await?;
    ensure!(stayed == true, "the page was reloaded");

    // A ticket: the conversation grows while a reply is being typed.
    let id = ticket["ticket_id"].as_str().unwrap_or_default();
    reader.open(&format!("/console/tickets/{id}")).await?;
    reader.fill("content", "half a reply").await?;
    let more = json!({"content": "And another thing."});
    server.post(&format!("/api/v1/tickets/{id}/messages"), &more).await?;
    reader.until_shown("And another thing.").await?;
    ensure!(reader.find("#content").await?.value().await? == "half a reply");
    let focused = reader.driver().execute("return document.activeElement.id").await?;
    ensure!(focused == "content", "the field has lost the focus");

    // An issue: opened details stay open.
    let issue = ticket["issue_id"].as_i64().unwrap_or_default();
    reader.open(&format!("/console/issues/{issue}")).await?;
    let opened = reader.find("[data-live=events] details.item summary").await?;
    let event = opened.text().await?;
    opened.click().await?;
    server
        .post(&format!("/api/v1/tickets/{id}/messages"), &json!({"content": "A third one."}))
        .await?;
    let deadline = std::time::Instant::now() + crate::support::LIMIT;
    while reader.driver().count("[data-live=events] details.item").await? < 3 {
        ensure!(std::time::Instant::now() < deadline, "the third event is not shown");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    // The newest event comes first.
    let open = reader.find("[data-live=events] details.item[open] summary").await?.text().await?;
    let first = reader.find("[data-live=events] details.item summary").await?.text().await?;
    let of = |summary: &str| summary.split_whitespace().next().map(str::to_owned);
    ensure!(of(&open) == of(&event) && of(&first) != of(&event), "{event}, {open}, {first}");

    // Keys: pause, and go.
    reader.find("main").await?.send_keys("p").await?;
    reader.until_shown("Paused").await?;
    // In one script: the second key must follow the first one within a second and a half.
    let go = "for (const key of ['g', 's']) document.body.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}))";
    reader.driver().execute(go).await?;
    reader.until_shown("There are no topics.").await?;
    reader.find("main").await?.send_keys("/").await?;
    let focused = reader.driver().execute("return document.activeElement.id").await?;
    ensure!(focused == "search", "`/` moves to the search");
    reader.must_be_clean(&[]).await?;

    // A server that stops while the page is open: the page says so, and goes on afterwards.
    let address = server.address.to_string();
    ensure!(server.stop()?.success(), "an open page must not delay the shutdown: {}", server.log());
    reader.until_shown("No connection, trying again").await?;
    let server = dir.start_soon(&["serve", "--http-listen", &address])?;
    reader.until_shown("Live").await?;
    drop(server);
    reader.browser.quit().await
}

async fn live_connections(server: &Server, count: usize) -> Result<Vec<reqwest::Response>> {
    let mut open = Vec::new();
    for _ in 0..count {
        let response =
            server.client.get(server.url("/console/live?of=%2Fconsole%2Fwebhooks")).send().await?;
        ensure!(response.status() == 200, "{response:?}");
        open.push(response);
    }
    Ok(open)
}

#[tokio::test]
async fn a_page_that_polls_offers_new_rows_and_is_live_again_when_there_is_room() -> Result<()> {
    let dir = ServerDir::new()?;
    let server =
        dir.serve(&["--http-connections-max", "400", "--http-client-connections-max", "400"])?;
    let create = async |name: &str| {
        let topic = json!({"name": name, "partitions": 1});
        ensure!(server.post("/api/v1/topics", &topic).await?.0 == 201, "{name}");
        anyhow::Ok(())
    };
    for n in 0..40 {
        create(&format!("topic-{n:02}")).await?;
    }
    let open = live_connections(&server, 200).await?;
    let reader = Reader::start(&server, BrowserScripts::On).await?;
    reader.open("/console/topics").await?;
    reader.until_shown("Updated every 10 s").await?;
    reader.driver().execute("scrollTo(0, 600)").await?;
    // Whatever the page says between one poll and the next, the rows stay offered.
    let watch = "window.said = []; window.watching = new MutationObserver(() => window.said.push(document.getElementById('new-rows').textContent));
        window.watching.observe(document.getElementById('new-rows'), {childList: true, characterData: true, subtree: true});";
    reader.driver().execute(watch).await?;
    create("a-new-one").await?;
    reader.until_offered(1).await?;
    create("another").await?;
    reader.until_offered(2).await?;
    let said = reader.driver().execute("window.watching.disconnect(); return window.said").await?;
    ensure!(said == json!(["1 new", "2 new"]), "{said}");
    reader.click("2 new").await?;
    reader.until_shown("another").await?;
    // Another page, such as the login, is no update.
    reader.driver().execute("window.fetch = async () => new Response('<p>Log in</p>')").await?;
    reader.until_shown("No connection, trying again").await?;
    drop(open);
    reader.until_shown("Live").await?;
    reader.must_be_clean(&["503"]).await?;
    reader.browser.quit().await
}

#[tokio::test]
async fn a_live_connection_needs_a_screen_and_ends_with_its_limit() -> Result<()> {
    let dir = ServerDir::new()?;
    let server =
        dir.serve(&["--http-connections-max", "400", "--http-client-connections-max", "400"])?;
    for wrong in [
        "",
        "https%3A%2F%2Fevil.example",
        "%2Fapi%2Fv1%2Fissues",
        "%2Fconsole%2Flive",
        "%2Fconsolex",
    ] {
        let path = format!("/console/live?of={wrong}");
        ensure!(server.get(&path).await?.0 == 400, "{wrong}");
    }
    let mut open = live_connections(&server, 200).await?;
    let refused = server.client.get(server.url("/console/live?of=%2Fconsole")).send().await?;
    ensure!(refused.status() == 503 && refused.headers()["retry-after"] == "10");
    // One that ends makes room.
    open.pop();
    let deadline = std::time::Instant::now() + crate::support::LIMIT;
    loop {
        let path = server.url("/console/live?of=%2Fconsole");
        if server.client.get(path).send().await?.status() == 200 {
            return Ok(());
        }
        ensure!(std::time::Instant::now() < deadline, "the place is not free again");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn the_focus_stays_where_it_is_when_rows_come_and_go_and_a_selection_delays_changes()
-> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    let create = async |name: &str| {
        let topic = json!({"name": name, "partitions": 1});
        ensure!(server.post("/api/v1/topics", &topic).await?.0 == 201, "{name}");
        anyhow::Ok(())
    };
    for name in ["before", "middle", "zulu"] {
        create(name).await?;
    }
    let reader = Reader::start(&server, BrowserScripts::On).await?;
    reader.open("/console/topics").await?;
    reader.until_shown("Live").await?;
    let focus =
        "window.focused = document.querySelector('tr[data-key=middle] a'); window.focused.focus()";
    reader.driver().execute(focus).await?;
    let must_be_focused = async |when: &str| {
        let kept = "return document.activeElement === window.focused && window.focused.isConnected";
        ensure!(reader.driver().execute(kept).await? == true, "the focus is lost: {when}");
        Ok(())
    };

    let path = server.url("/api/v1/topics/before");
    ensure!(server.client.delete(path).send().await?.status().is_success());
    reader.until("return !document.querySelector('tr[data-key=before]')").await?;
    must_be_focused("the row before it is gone").await?;
    create("another").await?;
    reader.until("return document.querySelector('tr[data-key=another]') !== null").await?;
    must_be_focused("there is another row before it").await?;

    // Text that is selected: the page changes when the selection ends.
    let select = "getSelection().selectAllChildren(document.querySelector('h1'));
        window.arrived = false;
        window.other = new EventSource('/console/live?of=%2Fconsole%2Ftopics');
        window.other.addEventListener('parts', event => { window.arrived ||= event.data.includes('later'); });";
    reader.driver().execute(select).await?;
    create("later").await?;
    reader.until("return window.arrived").await?;
    let is_shown = "return document.querySelector('tr[data-key=later]') !== null";
    ensure!(reader.driver().execute(is_shown).await? == false, "the page changed");
    reader.driver().execute("window.other.close(); getSelection().removeAllRanges()").await?;
    reader.until(is_shown).await?;

    // Paused: nothing changes, although another connection sees it; then everything is there.
    reader.driver().press("p").await?;
    reader.until_shown("Paused").await?;
    let watch = "window.seen = '';
        window.other = new EventSource('/console/live?of=%2Fconsole%2Ftopics');
        window.other.addEventListener('parts', event => { window.seen += event.data; });";
    reader.driver().execute(watch).await?;
    // The second one arrives a second after the first one, which a page that is not paused shows by then.
    for name in ["paused-1", "paused-2"] {
        create(name).await?;
        reader.until(&format!("return window.seen.includes('{name}')")).await?;
    }
    let shown = "return document.querySelectorAll('tr[data-key^=paused-]').length";
    ensure!(reader.number(shown).await? == 0, "the paused page changed");
    let offered = reader.find("#new-rows").await?.text().await?;
    ensure!(offered.is_empty(), "the paused page offers {offered:?}");
    reader.driver().execute("window.other.close()").await?;
    reader.driver().press("p").await?;
    reader.until(&format!("{shown} === 2")).await?;

    // The tail of a topic: a message appears by itself.
    reader.open("/console/tail?topic=middle").await?;
    reader.until_shown("No message is stored.").await?;
    reader.driver().execute("window.stayed = true").await?;
    let message = json!({"messages": [{"key": "k", "payload": "as it arrives"}]});
    ensure!(server.post("/api/v1/topics/middle/messages", &message).await?.0 == 201);
    reader.until_shown("as it arrives").await?;
    let stayed = reader.driver().execute("return window.stayed === true").await?;
    ensure!(stayed == true, "the page was reloaded");
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}
