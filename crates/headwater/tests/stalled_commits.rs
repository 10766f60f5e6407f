//! Stalled commits on PostgreSQL count against no issue, and the token ledger stays correct.

mod support;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use headwater_testkit::{Postgres, Proxy};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::desk::{all_idle, answered, by, open};
use crate::support::model::FakeModel;
use crate::support::{LIMIT, ServerDir};

/// Longer than `lock_timeout` (1 s), shorter than the deadline of a call (10 s).
const STALL: Duration = Duration::from_secs(3);

const TICKETS: usize = 60;

/// Reported token usage of one request.
const TOKENS: (u64, u64) = (40, 2);

/// All counted tokens: of reservations and aggregated.
const SPENT: &str = "SELECT coalesce(sum(tokens), 0)::bigint FROM (
    SELECT tokens FROM desk_usage WHERE scope LIKE 'day:%'
    UNION ALL SELECT tokens FROM desk_reservations WHERE NOT rolled_up) AS spent";
const UNSETTLED: &str = "SELECT count(*) FROM desk_reservations WHERE settled_at IS NULL";

// The fake model runs on the runtime of the test.
#[tokio::test(flavor = "multi_thread")]
async fn stalled_commits_quarantine_no_issue_and_leak_no_tokens() -> Result<()> {
    let postgres = Postgres::start()?;
    let database = postgres.database()?;
    let proxy = Proxy::start(postgres.addr())?;
    let (model, model_url) = FakeModel::open(TOKENS).await?;
    let place = ServerDir::new()?;
    // One counted failure quarantines an issue.
    let url = database.url_at(proxy.addr());
    let server = place.serve(
        &[
            &["--database-url", &url, "--model-url", &model_url, "--model-name", "test"][..],
            &["--worker-attempts", "1", "--issue-quiet", "10ms", "--sweep-every", "200ms"],
        ]
        .concat(),
    )?;

    proxy.hold("COMMIT", 12, STALL)?;
    let opening = (0..TICKETS).map(|number| {
        let content = format!("Where is parcel {number}?");
        let server = &server;
        async move { open(server, &content).await }
    });
    let mut tickets: Vec<String> = Vec::new();
    for opened in futures_util::future::join_all(opening).await {
        tickets.push(opened?["ticket_id"].as_str().context("a ticket")?.to_owned());
    }
    for ticket in &tickets {
        let shown = answered(&server, ticket, 1).await;
        let (_, quarantined) = server.get("/api/v1/issues?quarantined=true").await?;
        assert_eq!(quarantined["issues"], json!([]), "{}", server.log());
        assert_eq!(by(&shown?, "assistant"), [FakeModel::ANSWER]);
    }
    all_idle(&server).await?;
    assert!(proxy.held() >= 5, "{} commits stalled", proxy.held());
    let (_, issues) = server.get("/api/v1/issues?limit=100").await?;
    let issues = issues["issues"].as_array().context("issues")?.clone();
    assert_eq!(issues.len(), TICKETS);
    let counts = |issue: &Value| (issue["attempts"].clone(), issue["crashes"].clone());
    assert!(issues.iter().all(|issue| counts(issue) == (json!(0), json!(0))), "{issues:#?}");

    // Settlements whose commits stalled are retried, and count once.
    proxy.heal()?;
    let deadline = Instant::now() + LIMIT;
    while database.query(UNSETTLED)? != "0" {
        ensure!(Instant::now() < deadline, "reservations are not settled: {}", server.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let requests = model.requests("").len() as u64;
    let used = requests * (TOKENS.0 + TOKENS.1);
    assert_eq!(database.query(SPENT)?, used.to_string(), "{requests} requests");
    Ok(())
}
