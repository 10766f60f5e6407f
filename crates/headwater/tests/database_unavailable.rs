//! While PostgreSQL is down, requests fail fast and nothing is lost or duplicated.

mod support;

use anyhow::{Result, ensure};
use headwater_testkit::Postgres;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::sender::{github, github_issues, integrations, send};
use crate::support::{LIMIT, Server, ServerDir};

/// The error of requests that fail fast.
const KNOWN: &str = "database refuses connections; try again later";

async fn open(server: &Server) -> Result<(u16, Value)> {
    server.post("/api/v1/tickets", &json!({"title": "Parcel", "content": "It is late."})).await
}

#[tokio::test]
async fn requests_fail_fast_while_postgres_is_down_and_nothing_is_stored_twice() -> Result<()> {
    let postgres = Postgres::start()?;
    let database = postgres.database()?;
    let dir = ServerDir::new()?.settings(&integrations())?;
    let server =
        dir.serve(&["--database-url", &database.url(), "--http-request-timeout", "60s"])?;
    assert_eq!(open(&server).await?.0, 201);
    let event = github_issues("opened", 7, "Where is it?").to_string();
    let webhook = || send(github(&server, "issues", "d-1", event.as_bytes()));

    postgres.stop()?;
    let deadline = Instant::now() + LIMIT;
    let is_known = |(status, body): (u16, Value)| {
        assert_eq!(status, 503, "{body}");
        body["error"]["message"] == KNOWN
    };
    while !is_known(open(&server).await?) {
        ensure!(Instant::now() < deadline, "requests do not fail fast: {}", server.log());
    }
    // From here on all requests fail fast.
    assert!(is_known(open(&server).await?) && is_known(webhook().await?));
    assert!(is_known(server.get("/api/v1/issues").await?));
    assert_eq!(server.get("/health/live").await?.0, 200);
    server.wait_for_log("database refuses connections")?;

    postgres.restart()?;
    let deadline = Instant::now() + LIMIT;
    while webhook().await?.0 != 200 {
        ensure!(Instant::now() < deadline, "the database is not available again: {}", server.log());
    }
    let (status, again) = webhook().await?;
    assert_eq!((status, &again["duplicate"]), (200, &json!(true)), "{again}");
    let (_, tickets) = server.get("/api/v1/tickets").await?;
    assert_eq!(tickets["tickets"].as_array().map(Vec::len), Some(1), "{tickets}");
    assert_eq!(open(&server).await?.0, 201);
    Ok(())
}
