//! How many rows of a list match: counted up to 10,000, of what the caller can see, on both databases.

use anyhow::{Context, Result, ensure};
use reqwest::header::{AUTHORIZATION, HeaderMap};
use serde_json::{Value, json};

use crate::fixture::ConsoleFixture;
use crate::support::{Server, ServerDir};

async fn page(server: &Server, path: &str) -> Result<String> {
    Ok(server.client.get(server.url(path)).send().await?.text().await?)
}

async fn matching(server: &Server, path: &str) -> Result<Value> {
    let (status, answer) = server.get(&format!("/api/v1{path}")).await?;
    ensure!(status == 200, "{path}: {answer}");
    Ok(answer["matching"].clone())
}

#[tokio::test]
async fn counts_end_at_10_000_and_follow_the_filter() -> Result<()> {
    let fixture = ConsoleFixture::start()?;
    let server = &fixture.server;
    let insert = "INSERT INTO integrations (name, provider) VALUES ('shop', 'github');
        INSERT INTO issues (integration_id, external_project_id, external_issue_id)
        SELECT id, 'acme/shop', n::text FROM integrations, generate_series(1, 10002) AS n WHERE name = 'shop';
        INSERT INTO tickets (ticket_id, issue_id, title, user_id, status, created_at, updated_at)
        SELECT gen_random_uuid(), id, 'Many', CASE WHEN external_issue_id = '7' THEN 'ann' END,
            CASE WHEN external_issue_id IN ('1', '2', '3') THEN 'closed' ELSE 'open' END, now(), now() FROM issues;
        INSERT INTO outbox (issue_id, integration_id, kind, target, idempotency_key, payload, status, due_at, last_error)
        SELECT id, integration_id, 'reply', 'acme/shop#1', 'dead-' || id, '{}', 'dead', now(), 'status 403' FROM issues";
    fixture.database.query(insert)?;
    let (_, rows) = server.get("/api/v1/outbox?limit=1").await?;
    ensure!(rows["matching"].is_null(), "only counted if asked for: {rows}");
    let issue = rows["rows"][0]["issue_id"].as_i64().context("an issue")?;
    for (path, expected) in [
        ("/tickets?limit=1&count=true".to_owned(), 10_001),
        ("/tickets?limit=1&count=true&status=closed".to_owned(), 3),
        ("/tickets?limit=1&count=true&user_id=ann".to_owned(), 1),
        ("/tickets?limit=1&count=true&handed_over=true".to_owned(), 0),
        ("/outbox?limit=1&count=true&status=dead".to_owned(), 10_001),
        ("/outbox?limit=1&count=true&status=pending".to_owned(), 0),
        (format!("/outbox?limit=1&count=true&issue={issue}"), 1),
    ] {
        ensure!(matching(server, &path).await? == expected, "{path}");
    }
    for (path, sentence) in [
        ("/console/tickets", "10,000+ tickets match."),
        ("/console/tickets?status=closed", "3 tickets match."),
        ("/console/tickets?user_id=ann", "1 ticket matches."),
        ("/console/issues", "10,000+ issues match."),
        ("/console/outbox?status=any", "10,000+ rows match."),
    ] {
        let shown = page(server, path).await?;
        ensure!(shown.contains(sentence), "{path} does not show {sentence:?}: {shown}");
    }
    Ok(())
}

#[tokio::test]
async fn a_limited_token_counts_only_what_it_can_see() -> Result<()> {
    const SETTINGS: &str = r#"
[[integration]]
id = "shop"
provider = "github"
secret = "not-sent-by-anybody"
[[token]]
name = "root"
role = "admin"
token = "admin-token-of-root"
[[token]]
name = "of-shop"
role = "read"
token = "reader-token-of-shop"
integrations = ["shop"]
"#;
    let dir = ServerDir::new()?.settings(SETTINGS)?;
    let mut server = dir.serve(&["--issue-quiet", "0s", "--issue-max-wait", "0s"])?;
    let client = |token: &str| -> Result<reqwest::Client> {
        let bearer = format!("Bearer {token}").parse()?;
        let headers = HeaderMap::from_iter([(AUTHORIZATION, bearer)]);
        Ok(reqwest::Client::builder().default_headers(headers).build()?)
    };
    server.client = client("admin-token-of-root")?;
    let ticket = json!({"title": "Router blinks red", "content": "Since yesterday."});
    ensure!(server.post("/api/v1/tickets", &ticket).await?.0 == 201);
    let is_there = |_: u16, rows: &Value| rows["matching"].as_u64() > Some(0);
    let all = server.until("/api/v1/outbox?count=true", is_there).await?;
    ensure!(matching(&server, "/tickets?count=true").await? == 1);
    drop(all);
    // Rows and their count are read by two queries, and the desk goes on writing.
    let agree = |_: u16, page: &Value| {
        page["rows"].as_array().is_some_and(|rows| page["matching"] == rows.len())
    };
    server.until("/api/v1/outbox?count=true", agree).await?;

    server.client = client("reader-token-of-shop")?;
    let (_, own) = server.get("/api/v1/outbox?count=true").await?;
    ensure!(own["matching"] == 0 && own["rows"] == json!([]), "{own}");
    Ok(())
}
