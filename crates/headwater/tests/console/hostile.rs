//! Text of users that is HTML, script, very long, right-to-left or full of control characters, wherever it is shown.

use anyhow::{Context, Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::{Value, json};

use crate::fixture::{ConsoleFixture, Reader};

const SCRIPT: &str = "<script>window.hacked=1</script><img src=x onerror=window.hacked=2><!--/live:tickets--><svg onload=window.hacked=3>";
const MIRRORED: &str = "abc\u{202e}txt.exe\u{2066}שלום";

#[tokio::test]
async fn hostile_text_is_shown_as_text_on_every_screen() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let server = &fixture.server;
    let long = "long text ".repeat(100_000);
    let new = json!({"title": SCRIPT, "content": format!("{SCRIPT}\n{MIRRORED}\u{1b}[31m"), "user_id": MIRRORED});
    let (status, ticket) = server.post("/api/v1/tickets", &new).await?;
    ensure!(status == 201, "{ticket}");
    let id = ticket["ticket_id"].as_str().context("an id")?.to_owned();
    let issue = ticket["issue_id"].as_i64().context("an id")?;
    let (status, large) =
        server.post("/api/v1/tickets", &json!({"title": "large", "content": long})).await?;
    let large = match status {
        201 => large["ticket_id"].as_str().map(str::to_owned),
        // A limit of the desk; the queue has none below a megabyte.
        _ => None,
    };

    ensure!(
        server.post("/api/v1/topics", &json!({"name": "orders", "partitions": 1})).await?.0 == 201
    );
    let messages: Vec<Value> = [SCRIPT, MIRRORED, "nul \0 bell \u{7}", &long]
        .iter()
        .map(|text| json!({"key": text.chars().take(40).collect::<String>(), "payload": text, "headers": {"x": text.chars().take(100).collect::<String>()}}))
        .collect();
    let (status, sent) =
        server.post("/api/v1/topics/orders/messages", &json!({"messages": messages})).await?;
    ensure!(status == 201, "{sent}");
    let entries: Vec<&str> = sent["messages"]
        .as_array()
        .context("messages")?
        .iter()
        .filter_map(|one| one["id"].as_str())
        .collect();
    ensure!(entries.len() == 4, "{sent}");
    let wanted = json!({"max": 2, "wait_ms": 5000, "lease_ms": 60000});
    let (_, pulled) = server.post("/api/v1/topics/orders/groups/g/pull", &wanted).await?;
    let settlement = |message: &Value| json!({"lease": message["lease"], "outcome": "dead_letter", "reason": SCRIPT});
    let settlements: Vec<Value> =
        pulled["messages"].as_array().context("messages")?.iter().map(settlement).collect();
    ensure!(
        server
            .post("/api/v1/topics/orders/groups/g/settle", &json!({"settlements": settlements}))
            .await?
            .0
            == 200
    );
    let letters =
        |_: u16, page: &Value| page["dead_letters"].as_array().is_some_and(|all| !all.is_empty());
    server.until("/api/v1/topics/orders/dead-letters", letters).await?;

    let reader = Reader::start(server, BrowserScripts::On).await?;
    let mut paths = vec![
        "/console/tickets".to_owned(),
        format!("/console/tickets/{id}"),
        "/console/issues".to_owned(),
        format!("/console/issues/{issue}"),
        "/console/topics/orders/messages".to_owned(),
        "/console/topics/orders/dead-letters".to_owned(),
        "/console/failures".to_owned(),
        "/console/audit".to_owned(),
        "/console/search?q=%3Cscript%3Ewindow.hacked%3D1%3C%2Fscript%3E".to_owned(),
        "/console/tickets?user_id=%22%3E%3Cscript%3Ewindow.hacked%3D4%3C%2Fscript%3E".to_owned(),
        "/console/tickets?status=%3Cscript%3E".to_owned(),
        "/console/%3Cscript%3Ewindow.hacked=5%3C%2Fscript%3E".to_owned(),
        "/console/topics/%3Cimg%20src%3Dx%3E".to_owned(),
    ];
    paths.extend(entries.iter().map(|entry| format!("/console/topics/orders/messages/{entry}")));
    paths.extend(large.map(|large| format!("/console/tickets/{large}")));
    for path in &paths {
        reader.open(path).await?;
        let source = reader.driver().source().await?;
        ensure!(source.len() < 600_000, "{path} has {} bytes", source.len());
        let found = reader.driver().execute(
            "return {hacked: window.hacked ?? null, images: document.querySelectorAll('main img, main svg, main script').length,
                wide: document.documentElement.scrollWidth > document.documentElement.clientWidth}",
        ).await?;
        ensure!(found == json!({"hacked": null, "images": 0, "wide": false}), "{path}: {found}");
    }
    let message = reader.open(&format!("/console/topics/orders/messages/{}", entries[2])).await?;
    ensure!(message.contains("nul \u{2400} bell \u{2407}"), "{message}");
    let shown = reader.open(&format!("/console/tickets/{id}")).await?;
    ensure!(shown.contains("<script>window.hacked=1</script>"), "{shown}");
    reader.must_be_accessible("a hostile ticket").await?;
    reader.must_be_clean(&["status of 404", "status of 400"]).await?;
    reader.browser.quit().await
}
