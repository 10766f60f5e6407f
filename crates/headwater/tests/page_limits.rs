//! Pages of large rows: limited in bytes, and complete.

mod support;

use anyhow::{Context, Result};
use headwater_testkit::Postgres;
use serde_json::Value;
use support::sender::{github, github_issues, integrations, send};
use support::{Server, ServerDir};

/// Events, each almost as large as a webhook may be.
const EVENTS: usize = 20;
const BYTES: usize = 900_000;
/// Maximum bytes of a page, with the last row and the JSON around rows.
const PAGE_MAX: usize = 10 * 1024 * 1024;

async fn a_page_of_large_events_is_short_and_says_where_the_next_begins(
    server: &Server,
) -> Result<()> {
    let mut event = github_issues("opened", 7, "large");
    event["padding"] = "x".repeat(BYTES).into();
    let mut issue = Value::Null;
    for number in 0..EVENTS {
        let delivery = format!("d-{number}");
        event["number_of_this"] = number.into();
        event["issue"]["body"] = format!("large {number}").into();
        let body = event.to_string();
        let (status, sent) = send(github(server, "issues", &delivery, body.as_bytes())).await?;
        assert_eq!(status, 200, "{sent}");
        issue = sent["issue_id"].clone();
    }
    for newest_first in [false, true] {
        let mut seen = Vec::new();
        let (mut cursor, mut pages) = (String::new(), 0);
        loop {
            let path = format!(
                "/api/v1/issues/{issue}/events?limit=500&newest_first={newest_first}{cursor}"
            );
            let bytes = server.client.get(server.url(&path)).send().await?.bytes().await?;
            assert!(bytes.len() < PAGE_MAX, "{} bytes", bytes.len());
            let page: Value = serde_json::from_slice(&bytes)?;
            for event in page["events"].as_array().context("events")? {
                assert_eq!(event["payload"]["padding"].as_str().map(str::len), Some(BYTES));
                seen.push(event["payload"]["number_of_this"].as_u64().context("a number")?);
            }
            pages += 1;
            match page["next_cursor"].as_i64() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        if newest_first {
            seen.reverse();
        }
        assert_eq!(seen, (0..EVENTS as u64).collect::<Vec<_>>());
        assert!(pages >= 2, "{pages} pages");
    }
    Ok(())
}

#[tokio::test]
async fn a_page_of_large_events_is_short_in_sqlite() -> Result<()> {
    let dir = ServerDir::new()?.settings(&integrations())?;
    let server = dir.serve(&[])?;
    a_page_of_large_events_is_short_and_says_where_the_next_begins(&server).await
}

#[tokio::test]
async fn a_page_of_large_events_is_short_in_postgres() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let dir = ServerDir::new()?.settings(&integrations())?;
    let server = dir.serve(&["--database-url", &database.url()])?;
    a_page_of_large_events_is_short_and_says_where_the_next_begins(&server).await
}
