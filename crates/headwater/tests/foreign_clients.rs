//! Commands and snippets of the five documents, run by `redis-cli`, the Python client of Redis and `psql` against the real
//! binary. The Python programs are in `clients/`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use headwater_testkit::{Postgres, Redis, package_folder, python_with_redis, wait_until};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::cli::CliFixture;
use crate::support::desk::{answered, open};
use crate::support::{LIMIT, ServerDir, text};

const QUEUED: &str = "-- Queued issues (backlog)
SELECT COUNT(*) FROM issues WHERE processing_status = 'queued';";

const STUCK: &str = "-- Stuck in processing (potential crashes)
SELECT * FROM issues 
WHERE processing_status = 'processing' 
  AND processing_started_at < now() - interval '10 minutes';";

const UNPROCESSED: &str = "-- Unprocessed events per issue
SELECT issue_id, COUNT(*) 
FROM event_logs 
WHERE processed_at IS NULL 
GROUP BY issue_id;";

/// The five metrics of the document, behind our prefix.
const METRICS: [&str; 5] = [
    "headwater_issues_queued_total",
    "headwater_issues_processing_duration_seconds",
    "headwater_issues_processed_total",
    "headwater_events_per_issue_batch",
    "headwater_redis_pending_messages",
];

/// Runs a program of `clients/` and returns what it printed.
fn python(redis: &Redis, program: &str, arguments: &[&str]) -> Result<String> {
    let script = package_folder().join("tests/clients").join(program);
    let output = python_with_redis(&script)?.arg(redis.url()).args(arguments).output()?;
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    ensure!(output.status.success(), "{program} {arguments:?}: {out}{err}");
    Ok(out.trim().to_owned())
}

/// Runs one command with `redis-cli`.
fn redis_cli(redis: &Redis, line: &str) -> Result<String> {
    let mut command = Command::new("redis-cli");
    command.args(["-h", "127.0.0.1", "-p", &redis.port().to_string()]);
    let output = command.args(line.split(' ')).output().context("redis-cli does not start")?;
    ensure!(output.status.success(), "{line}: {}", text(&output.stderr));
    Ok(text(&output.stdout).trim().to_owned())
}

#[tokio::test]
async fn another_program_reads_reclaims_and_sends_nudges_and_psql_sees_the_backlog() -> Result<()> {
    let redis = Redis::start()?;
    let database = Postgres::shared()?.database()?;
    let place = ServerDir::new()?;
    let (streams, url) = (redis.url(), database.url());
    let to = ["--stream-url", &streams, "--database-url", &url];
    let run = |verb: &[&str]| -> Result<String> {
        let output = place.run(&[verb, &to].concat())?;
        ensure!(output.status.success(), "{verb:?}: {}", text(&output.stderr));
        Ok(text(&output.stdout))
    };
    run(&["migrate"])?;
    let created = redis_cli(&redis, "XGROUP CREATE issue_work issue-workers 0 MKSTREAM")?;
    assert_eq!(created, "OK");

    // An event is committed and nudged; no worker of ours runs.
    let new = ["ticket", "new", "--user", "ada", "--title", "Parcel", "--content", "Where?"];
    let opened: Value = serde_json::from_str(&run(&[&new[..], &["--json"]].concat())?)?;
    assert_eq!((database.query(QUEUED)?.as_str(), database.query(STUCK)?.as_str()), ("1", ""));
    let issue = opened["issue_id"].to_string();
    assert_eq!(database.query(UNPROCESSED)?, format!("{issue}|1"));
    // The nudge of a command is a hint, which may be lost when the command ends; this one waits for it.
    run(&["issue", "retry", &issue])?;
    let nudge: Value = serde_json::from_str(&python(&redis, "issues.py", &["consume"])?)?;
    assert_eq!(nudge["issue_id"], json!(issue), "{nudge}");
    let event_log = nudge["event_log_id"].as_str().context("an id")?;

    // A worker is killed while it processes the issue.
    let quick = ["--issue-quiet", "10ms", "--worker-claim", "1s", "--analytics-path", ""];
    let slow = ["--model-url", "scripted:600s"];
    let mut killed = place.serve(&[&to[..], &quick, &slow].concat())?;
    let is_claimed = |_: u16, issue: &Value| issue["processing_status"] == "processing";
    killed.until(&format!("/api/v1/issues/{issue}"), is_claimed).await?;
    database.query("UPDATE issues SET processing_started_at = now() - interval '11 minutes'")?;
    assert!(database.query(STUCK)?.starts_with(&format!("{issue}|")));
    killed.kill9()?;

    // Another one answers. Further nudges of another program change nothing.
    let server = place.serve(&[&to[..], &quick].concat())?;
    let ticket = opened["ticket_id"].as_str().context("an id")?;
    for _ in 0..3 {
        python(&redis, "issues.py", &["produce", &issue, event_log])?;
    }
    answered(&server, ticket, 1).await?;
    let is_idle = |_: u16, issue: &Value| issue["processing_status"] == "idle";
    server.until(&format!("/api/v1/issues/{issue}"), is_idle).await?;
    python(&redis, "issues.py", &["produce", &issue, event_log])?;
    wait_until("all nudges to be acknowledged", LIMIT, || {
        python(&redis, "issues.py", &["pending"]).is_ok_and(|count| count == "0")
    })?;
    assert_eq!((database.query(QUEUED)?, database.query(UNPROCESSED)?), ("0".into(), "".into()));
    // This process has not queued an issue yet.
    let second = open(&server, "And another parcel?").await?;
    answered(&server, second["ticket_id"].as_str().context("an id")?, 1).await?;
    let has_all = |_: u16, metrics: &Value| {
        metrics.as_str().is_some_and(|text| METRICS.iter().all(|name| text.contains(name)))
    };
    server.until("/metrics", has_all).await?;
    let (_, shown) = server.get(&format!("/api/v1/tickets/{ticket}")).await?;
    assert_eq!(shown["messages"].as_array().map(Vec::len), Some(2), "one answer: {shown}");
    Ok(())
}

#[tokio::test]
async fn another_program_opens_a_ticket_and_follows_it_to_the_session_of_its_answer() -> Result<()>
{
    let redis = Redis::start()?;
    let place = ServerDir::new()?;
    let quick = ["--stream-url", &redis.url(), "--issue-quiet", "10ms", "--analytics-path", ""];
    let server = place.serve(&quick)?;
    wait_until("the group of the desk", LIMIT, || {
        redis_cli(&redis, "XINFO GROUPS ticket_events").is_ok_and(|it| it.contains("ai_processor"))
    })?;
    let program = tokio::task::spawn_blocking(move || python(&redis, "ticket_events.py", &[]));
    let ticket = program.await?.with_context(|| server.log())?;
    answered(&server, &ticket, 1).await?;
    Ok(())
}

#[test]
fn another_program_uses_the_event_bus_as_its_document_says() -> Result<()> {
    let redis = Redis::start()?;
    let mut cli = CliFixture::embedded();
    cli.direct_args = vec!["--stream-url".to_owned(), redis.url()];
    cli.args = cli.direct_args.clone();
    let verb = ["loop", "worker", "code-review", "--exec", r#"printf '{"got": %s}' "$(cat)""#];
    let mut command = cli.dir.command(&[&verb[..], &["--stream-url", &redis.url()]].concat());
    let mut worker = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;

    let session = Uuid::new_v4().to_string();
    let replied = python(&redis, "event_bus.py", &["code-review", &session]);
    worker.kill()?;
    worker.wait()?;
    let reply: Value = serde_json::from_str(&replied?)?;
    assert_eq!(reply, json!({"got": {"file": "main.rs"}}));
    // Its session is recovered from the stream.
    let events = cli.json(&["session", "replay", &session]);
    assert_eq!(events.len(), 1, "{events:?}");
    assert!(events[0].to_string().contains("my_tool"), "{events:?}");
    Ok(())
}

#[test]
fn another_program_reads_a_topic_and_adds_a_stream_to_be_assigned() -> Result<()> {
    let redis = Redis::start()?;
    let mut cli = CliFixture::embedded();
    cli.direct_args = vec!["--stream-url".to_owned(), redis.url()];
    cli.args = cli.direct_args.clone();
    let full = ["--entry-format", "full"];
    cli.stdout(&[&["topic", "create", "orders", "--partitions", "2"][..], &full].concat());
    for key in ["k0", "k1", "k29"] {
        cli.stdout(&["produce", "orders", "--key", key, "--payload", key]);
    }
    let payloads: Vec<String> = serde_json::from_str(&python(&redis, "topics.py", &["orders"])?)?;
    // The hash of the document: 3366 and 104434 are even, 3365 is odd.
    assert_eq!(payloads, ["k1", "k29", "k0"]);
    let trimmed = redis_cli(&redis, "XTRIM stream:topic:orders:p:1 MAXLEN 0")?;
    assert_eq!(trimmed, "1");
    let streams = cli.json(&["assign", "list", "calls"]);
    assert_eq!(streams.len(), 1, "{streams:?}");
    assert!(streams[0].to_string().contains("call:7"), "{streams:?}");
    Ok(())
}
