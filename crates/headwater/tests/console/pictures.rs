//! The pictures of the README and of docs/console.md: the demo in a browser. `cargo xtask screenshots` runs it.

use anyhow::{Context, Result, ensure};
use headwater_testkit::BrowserScripts;
use serde_json::Value;

use crate::fixture::Reader;
use crate::support::ServerDir;

/// Maximum bytes of a picture, because it is part of the repository.
const PICTURE_BYTES_MAX: u64 = 150 * 1000;

#[tokio::test]
#[ignore = "writes the pictures of the documentation; run by `cargo xtask screenshots`"]
async fn pictures_of_the_demo_for_the_documentation() -> Result<()> {
    let folder =
        std::env::var_os("HEADWATER_SCREENSHOTS").context("HEADWATER_SCREENSHOTS is not set")?;
    let dir = ServerDir::new()?;
    // The demo itself logs only errors; the address is in the log.
    let server = dir.serve(&["--demo", "--log-level", "info"])?;
    let has_some = |list: &'static str| {
        move |_: u16, page: &Value| page[list].as_array().is_some_and(|all| !all.is_empty())
    };
    // The last steps of the demo.
    server.until("/api/v1/outbox/dead", has_some("rows")).await?;
    server
        .until("/api/v1/topics/orders/dead-letters", |_, page| {
            page["dead_letters"].as_array().is_some_and(|all| all.len() >= 3)
        })
        .await?;
    let is_answered = |_: u16, page: &Value| page["runs"][0]["models"][0]["session"].is_string();
    let tickets = server.until("/api/v1/tickets", has_some("tickets")).await?;
    let mut ticket = None;
    for one in tickets["tickets"].as_array().context("tickets")? {
        let issue = one["issue_id"].as_i64().context("an issue")?;
        let path = format!("/api/v1/issues/{issue}/timeline");
        if is_answered(200, &server.get(&path).await?.1) {
            ticket = one["ticket_id"].as_str().map(str::to_owned);
            break;
        }
    }
    let ticket = ticket.context("a ticket that a model has answered")?;

    let reader = Reader::start(&server, BrowserScripts::On).await?;
    for (name, path) in [
        ("console-overview", "/console?range=15m".to_owned()),
        ("console-ticket", format!("/console/tickets/{ticket}")),
        ("console-failures", "/console/failures".to_owned()),
        ("console-assignment", "/console/assignment".to_owned()),
    ] {
        reader.open(&path).await?;
        reader.must_be_accessible(&path).await?;
        if name == "console-ticket" {
            reader.find("[data-live=runs] details.item summary").await?.click().await?;
            reader
                .driver()
                .execute(
                    "document.querySelector('[data-live=runs]').scrollIntoView({block: 'end'})",
                )
                .await?;
        }
        reader.picture(name).await?;
        let file = std::path::Path::new(&folder).join(format!("{name}.png"));
        let bytes = std::fs::metadata(&file)?.len();
        ensure!(bytes <= PICTURE_BYTES_MAX, "{} has {bytes} bytes", file.display());
    }
    reader.must_be_clean(&[]).await?;
    reader.browser.quit().await
}
