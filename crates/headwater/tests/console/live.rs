//! Live pages: changes appear without a reload, and what the reader has touched stays.

use anyhow::{Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::json;

use crate::fixture::Reader;
use crate::support::ServerDir;

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
    reader.find("[data-live=events] details.item summary").await?.click().await?;
    server
        .post(&format!("/api/v1/tickets/{id}/messages"), &json!({"content": "A third one."}))
        .await?;
    let deadline = std::time::Instant::now() + crate::support::LIMIT;
    while reader.driver().count("[data-live=events] details.item").await? < 3 {
        ensure!(std::time::Instant::now() < deadline, "the third event is not shown");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    ensure!(
        reader.find("[data-live=events] details.item").await?.attribute("open").await?.is_some(),
        "the details were closed"
    );

    // Keys: pause, and go.
    reader.find("main").await?.send_keys("p").await?;
    reader.until_shown("Paused").await?;
    reader.find("main").await?.send_keys("gs").await?;
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
    let mut open = Vec::new();
    for _ in 0..200 {
        let response =
            server.client.get(server.url("/console/live?of=%2Fconsole%2Fhelp")).send().await?;
        ensure!(response.status() == 200, "{response:?}");
        open.push(response);
    }
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
