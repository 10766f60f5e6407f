//! A server and a worker start, are ready and process events without Redis, and use it when it comes.

mod support;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use headwater_testkit::{Postgres, Redis, Sentinel, wait_until};
use serde_json::{Value, json};

use crate::support::desk::{all_idle, answered, by, open};
use crate::support::sender::{github, github_issues, integrations, send};
use crate::support::{Server, ServerDir, eventually, text};

const QUICK: [&str; 4] = ["--issue-quiet", "10ms", "--sweep-every", "200ms"];

/// Sends a webhook and waits until its issue was processed.
async fn webhook(server: &Server, number: u64) -> Result<()> {
    let body = github_issues("opened", number, "Where is it?").to_string();
    let delivery = format!("delivery-{number}");
    let (status, answer) = send(github(server, "issues", &delivery, body.as_bytes())).await?;
    ensure!(status == 200, "{status} {answer}\n{}", server.log());
    let path = format!("/api/v1/issues/{}", answer["issue_id"]);
    server.until(&path, |_, issue| issue["last_processed_at"].is_string()).await?;
    Ok(())
}

/// Opens a ticket and waits for its answer.
async fn ticket(server: &Server) -> Result<()> {
    let created = open(server, "a question").await?;
    let ticket = created["ticket_id"].as_str().context("a ticket")?;
    let shown = answered(server, ticket, 1).await?;
    ensure!(by(&shown, "user") == ["a question"], "{shown:#}");
    Ok(())
}

/// Whether the process is degraded but ready, because of the streams alone.
fn is_degraded(status: u16, body: &Value) -> bool {
    let checks = body["checks"].as_array().into_iter().flatten();
    let failed: Vec<_> = checks.filter(|check| check["ok"] == false).collect();
    let is_streams = |check: &&Value| {
        check["name"] == "streams"
            && check["reason"].as_str().is_some_and(|it| it.contains("continues from SQL"))
    };
    status == 200
        && body["status"] == "degraded"
        && failed.len() == 1
        && failed.iter().all(is_streams)
}

async fn is_ready(server: &Server) -> Result<()> {
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;
    Ok(())
}

/// Routes on streams fail with a clear error, routes on SQL work.
async fn only_streams_are_unavailable(server: &Server, message: &str) -> Result<()> {
    let send = json!({"messages": [{"payload": "x"}]});
    for (status, body) in [
        server.get("/api/v1/topics").await?,
        server.get("/api/v1/sessions").await?,
        server.post("/api/v1/topics/orders/messages", &send).await?,
    ] {
        let error = &body["error"];
        ensure!((status, error["code"].as_str()) == (503, Some("unavailable")), "{status} {body}");
        ensure!(error["message"].as_str().is_some_and(|it| it.contains(message)), "{body}");
    }
    for path in ["/api/v1/issues", "/api/v1/tickets", "/api/v1/outbox/dead"] {
        ensure!(server.get(path).await?.0 == 200, "{path}");
    }
    Ok(())
}

/// Number of published ticket events.
fn published(redis: &Redis) -> usize {
    let length = redis.command(&["XLEN", "ticket_events"]);
    length.ok().and_then(|length| length.text().parse().ok()).unwrap_or_default()
}

/// How Redis is missing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Absence {
    /// It refuses connections.
    Down,
    /// It accepts connections and does not answer.
    Hangs,
}

impl Absence {
    fn begin(self, redis: &Redis) -> Result<()> {
        match self {
            Self::Down => redis.stop(),
            Self::Hangs => redis.pause(),
        }
    }

    fn end(self, redis: &Redis) -> Result<()> {
        match self {
            Self::Down => redis.restart(),
            Self::Hangs => redis.resume(),
        }
    }
}

async fn starts_without_redis(database: Option<&str>, absence: Absence) -> Result<()> {
    let redis = Redis::start()?;
    absence.begin(&redis)?;
    let dir = ServerDir::new()?.settings(&integrations())?;
    let url = redis.url();
    let mut arguments = vec!["--stream-url", &url];
    arguments.extend(database.into_iter().flat_map(|url| ["--database-url", url]));
    arguments.extend(QUICK);
    let mut server = dir.serve(&arguments)?;
    server.until("/health/ready", is_degraded).await?;
    webhook(&server, 1).await?;
    ticket(&server).await?;
    only_streams_are_unavailable(&server, "stream backend unavailable").await?;
    server.wait_for_log("stream backend not reachable")?;

    // A worker alone processes what the server took.
    if database.is_some() {
        let mut worker = dir.worker(&arguments)?;
        worker.until("/health/ready", is_degraded).await?;
        ensure!(server.stop()?.success(), "{}", server.log());
        server = dir.serve(&[&arguments[..], &["--worker-concurrency", "1"]].concat())?;
        webhook(&server, 2).await?;
        absence.end(&redis)?;
        is_ready(&worker).await?;
        ensure!(worker.stop()?.success(), "{}", worker.log());
    } else {
        absence.end(&redis)?;
    }

    // Redis came: everything uses it, without a restart.
    is_ready(&server).await?;
    server.wait_for_log("stream backend opened")?;
    webhook(&server, 3).await?;
    ticket(&server).await?;
    // Two messages and two replies, at least.
    eventually("the ticket events", || published(&redis) >= 4).await?;
    let send = json!({"messages": [{"payload": "x"}], "create": true});
    let (status, body) = server.post("/api/v1/topics/orders/messages", &send).await?;
    ensure!(status == 201, "{status} {body}");
    let groups = redis.command(&["XINFO", "GROUPS", "issue_work"])?;
    ensure!(!groups.items().is_empty(), "workers consume nudges");
    all_idle(&server).await?;
    ensure!(server.stop()?.success(), "{}", server.log());
    Ok(())
}

#[tokio::test]
async fn with_postgres_everything_but_streams_works_until_redis_comes() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    starts_without_redis(Some(&database.url()), Absence::Down).await
}

#[tokio::test]
async fn with_sqlite_everything_but_streams_works_until_redis_comes() -> Result<()> {
    starts_without_redis(None, Absence::Down).await
}

#[tokio::test]
async fn everything_but_streams_works_until_a_redis_that_hangs_answers() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    starts_without_redis(Some(&database.url()), Absence::Hangs).await
}

#[tokio::test]
async fn a_rejected_password_stops_no_event_and_is_corrected_without_a_restart() -> Result<()> {
    let redis = Redis::start()?;
    let user = |rules: &[&str]| redis.command(&[&["ACL", "SETUSER", "app"], rules].concat());
    user(&["on", ">old", "~*", "&*", "+@all"])?.ok()?;
    let dir = ServerDir::new()?.settings(&integrations())?;
    let url = format!("redis://app:hunter2@{}", redis.addr());
    let server = dir.serve(&[&["--stream-url", &url][..], &QUICK].concat())?;
    let denied = server.wait_for_log("stream backend rejects this process")?;
    assert_eq!(denied["level"], "ERROR", "{denied}");
    server.until("/health/ready", is_degraded).await?;
    webhook(&server, 1).await?;
    ticket(&server).await?;
    only_streams_are_unavailable(&server, "denied access").await?;

    user(&[">hunter2"])?.ok()?;
    is_ready(&server).await?;
    webhook(&server, 2).await?;
    eventually("the ticket events", || published(&redis) >= 2).await?;

    // The password is rotated while the server runs.
    user(&["resetpass", ">new"])?.ok()?;
    redis.command(&["CLIENT", "KILL", "USER", "app"])?;
    server.until("/health/ready", is_degraded).await?;
    let before = published(&redis);
    webhook(&server, 3).await?;
    ticket(&server).await?;
    user(&[">hunter2"])?.ok()?;
    is_ready(&server).await?;
    webhook(&server, 4).await?;
    eventually("the ticket events", || published(&redis) >= before + 2).await?;

    let (status, dead) = server.get("/api/v1/outbox/dead").await?;
    let rows = dead["rows"].as_array().context("rows")?;
    // The replies to GitHub have no token.
    assert!(status == 200 && rows.iter().all(|row| row["kind"] == "reply"), "{dead}");
    assert!(!server.log().contains("hunter2"), "{}", server.log());
    Ok(())
}

/// Time for a replica to take over. Longer than 30 s, the time that a sentinel stays passive after it was starved.
const FAIL_OVER_LIMIT: Duration = Duration::from_secs(90);

#[tokio::test]
async fn without_a_primary_that_sentinel_knows_everything_else_works_and_then_the_replica_is_used()
-> Result<()> {
    let sentinel = Sentinel::start()?;
    let (primary, replica) = (sentinel.primary(), sentinel.replica());
    let dir = ServerDir::new()?.settings(&integrations())?;
    let url = sentinel.url();
    let server = dir.serve(&[&["--stream-url", &url][..], &QUICK].concat())?;
    is_ready(&server).await?;
    webhook(&server, 1).await?;
    ticket(&server).await?;
    eventually("the ticket events, also on the replica", || {
        published(primary) >= 2 && published(replica) == published(primary)
    })
    .await?;
    let before = published(replica);

    // No replica can take over until this one answers again.
    replica.pause()?;
    primary.kill9()?;
    server.until("/health/ready", is_degraded).await?;
    webhook(&server, 2).await?;
    ticket(&server).await?;
    only_streams_are_unavailable(&server, "stream backend unavailable").await?;

    replica.resume()?;
    wait_until("the replica to take over", FAIL_OVER_LIMIT, || {
        let role = replica.command(&["ROLE"]);
        role.is_ok_and(|role| role.items().first().is_some_and(|role| role.text() == "master"))
    })?;
    is_ready(&server).await?;
    webhook(&server, 3).await?;
    ticket(&server).await?;
    // A message and a reply of each of the two tickets, at least.
    eventually("the ticket events", || published(replica) >= before + 4).await?;
    all_idle(&server).await
}

#[test]
fn a_server_that_cannot_be_used_with_the_url_stops_the_start() -> Result<()> {
    let redis = Redis::start()?;
    let dir = ServerDir::new()?;
    let url = format!("redis-cluster://{}", redis.addr());
    for verb in ["serve", "worker"] {
        let output = dir.run(&[verb, "--stream-url", &url])?;
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("`stream.url`") && error.contains("cluster"), "{error}");
    }
    Ok(())
}
