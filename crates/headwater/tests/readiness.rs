//! `/health/ready` while a dependency answers but accepts no writes.

mod support;

use anyhow::{Result, ensure};
use headwater_testkit::Redis;
use serde_json::Value;

use crate::support::disk::SmallDisk;
use crate::support::sender::{github, github_issues, integrations, send};
use crate::support::{Server, ServerDir};

/// Whether a check failed.
fn fails(readiness: &Value, name: &str) -> bool {
    let mut checks = readiness["checks"].as_array().into_iter().flatten();
    checks.any(|check| check["name"] == name && check["ok"] == false)
}

async fn ready(server: &Server) -> Result<Value> {
    server.until("/health/ready", |_, body| body["status"] == "ready").await
}

#[tokio::test]
async fn readiness_is_degraded_while_redis_rejects_writes() -> Result<()> {
    let redis = Redis::start()?;
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--stream-url", &redis.url()])?;
    ready(&server).await?;
    for (refuse, allow) in [
        (["maxmemory", "1"], ["maxmemory", "0"]),
        (["min-replicas-to-write", "1"], ["min-replicas-to-write", "0"]),
    ] {
        redis.command(&[&["CONFIG", "SET"][..], &refuse].concat())?.ok()?;
        let is_degraded = |status: u16, body: &Value| {
            status == 200 && body["status"] == "degraded" && fails(body, "streams")
        };
        server.until("/health/ready", is_degraded).await?;
        redis.command(&[&["CONFIG", "SET"][..], &allow].concat())?.ok()?;
        ready(&server).await?;
    }
    Ok(())
}

#[tokio::test]
async fn readiness_fails_on_a_full_disk_and_recovers_without_a_restart() -> Result<()> {
    let dir = ServerDir::new()?.settings(&integrations())?;
    let data = support::directory(&dir, "data")?;
    let Some(disk) = SmallDisk::mount(&data)? else { return Ok(()) };
    let (database, streams) =
        (format!("sqlite:{}/issues.db", data.display()), format!("embedded:{}", data.display()));
    let urls = ["--database-url", &database, "--stream-url", &streams, "--issue-quiet", "10ms"];
    let server = dir.serve(&urls)?;
    ready(&server).await?;
    let body = github_issues("opened", 7, &"Where is it? ".repeat(2000)).to_string();
    let (status, answer) = send(github(&server, "issues", "before", body.as_bytes())).await?;
    ensure!(status == 200, "{answer}");

    disk.fill()?;
    let mut refused = 0;
    for number in 0..100 {
        let delivery = format!("full-{number}");
        let body = github_issues("opened", 8 + number, &"Where is it? ".repeat(2000)).to_string();
        let (status, _) = send(github(&server, "issues", &delivery, body.as_bytes())).await?;
        refused += u32::from(status == 503);
        if refused == 3 {
            break;
        }
    }
    assert_eq!(refused, 3, "the disk is full: {}", server.log());
    let (status, readiness) = server.get("/health/ready").await?;
    assert!(status == 503 && fails(&readiness, "database writes"), "{status} {readiness}");

    disk.free()?;
    ready(&server).await?;
    let body = github_issues("opened", 7, "And now?").to_string();
    let (status, answer) = send(github(&server, "issues", "after", body.as_bytes())).await?;
    assert_eq!(status, 200, "{answer}");
    server
        .until("/api/v1/issues?status=queued", |_, body| body["issues"] == serde_json::json!([]))
        .await?;
    Ok(())
}
