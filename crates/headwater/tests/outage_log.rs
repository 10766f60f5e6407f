//! The log during an outage of Redis, the access to data files, and leases of a second server on one SQLite file.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use headwater_testkit::{Postgres, Redis};
use serde_json::Value;
use support::desk::{answered, open};
use support::model::FakeModel;
use support::{Server, ServerDir, text};

/// Log lines at `WARN` or above.
fn warnings(server: &Server) -> Vec<Value> {
    let log = server.log();
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap_or_default());
    lines.filter(|line| ["WARN", "ERROR"].contains(&line["level"].as_str().unwrap_or(""))).collect()
}

#[tokio::test]
async fn an_outage_of_redis_is_one_line_with_address_and_cause_and_its_end_another() {
    let redis = Redis::start().unwrap();
    let database = Postgres::shared().unwrap().database().unwrap();
    let dir = ServerDir::new().unwrap();
    let quick = ["--issue-quiet", "10ms", "--sweep-every", "200ms"];
    let to = ["--stream-url", &redis.url(), "--database-url", &database.url()];
    let server = dir.serve(&[&quick[..], &to].concat()).unwrap();
    server.until("/health/ready", |_, body| body["status"] == "ready").await.unwrap();
    let before = warnings(&server).len();

    redis.stop().unwrap();
    server.until("/health/ready", |_, body| body["status"] == "degraded").await.unwrap();
    server.wait_for_log("stream backend not reachable").unwrap();
    // Work goes on during the outage: sweeps, nudges, reads, polls and health checks all fail.
    for number in 0..20 {
        open(&server, &format!("question {number}")).await.unwrap();
        server.get("/health/ready").await.unwrap();
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    let during = warnings(&server).split_off(before);
    let port = redis.url().rsplit(':').next().unwrap().trim_end_matches('/').to_owned();
    let outage: Vec<_> = during
        .iter()
        .filter(|line| {
            line["message"].as_str().unwrap().starts_with("stream backend not reachable")
        })
        .collect();
    assert_eq!(outage.len(), 1, "{during:#?}");
    assert!(outage[0]["address"].as_str().unwrap().contains(&port), "{outage:?}");
    assert!(!outage[0]["error"].as_str().unwrap().is_empty(), "{outage:?}");
    // A long outage also ends leases, once each.
    let is_lease = |line: &&Value| {
        let message = line["message"].as_str().unwrap();
        message.starts_with("lease lost") || message.starts_with("evicted from the group")
    };
    let others = during.iter().filter(|line| !is_lease(line)).count();
    assert!(others <= 3, "{during:#?}");

    redis.restart().unwrap();
    server.until("/health/ready", |_, body| body["status"] == "ready").await.unwrap();
    let log = server.log();
    let opened = log.lines().filter(|line| line.contains("stream backend opened")).count();
    assert_eq!(opened, 2, "one at the start, one after the outage:\n{log}");
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[tokio::test]
async fn other_users_cannot_read_data_files_wherever_they_are() {
    // The default directory, and files at custom paths in a directory that others may read.
    let custom = ["--stream-url", "embedded:streams", "--database-url", "sqlite:tickets.db"];
    let custom = [&custom[..], &["--analytics-path", "numbers.duckdb"]].concat();
    for arguments in [&[][..], &custom] {
        let dir = ServerDir::new().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        if !arguments.is_empty() {
            // Left by an earlier version.
            std::fs::create_dir(dir.path().join("streams")).unwrap();
            let open = PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(dir.path().join("streams"), open).unwrap();
            std::fs::write(dir.path().join("tickets.db"), "").unwrap();
            let open = PermissionsExt::from_mode(0o644);
            std::fs::set_permissions(dir.path().join("tickets.db"), open).unwrap();
        }
        let server = dir.serve(arguments).unwrap();
        let created = open(&server, "hello").await.unwrap();
        answered(&server, created["ticket_id"].as_str().unwrap(), 1).await.unwrap();
        server
            .until("/health/ready", |_, body| body["analytics"]["state"] == "ingesting")
            .await
            .unwrap();
        for entry in std::fs::read_dir(dir.path()).unwrap() {
            let path = entry.unwrap().path();
            assert_eq!(mode(&path) & 0o007, 0, "{path:?}: {:o}", mode(&path));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_server_on_the_same_sqlite_file_does_not_end_the_claims_of_the_first() {
    let (_model, url) = FakeModel::start((5, 5)).await.unwrap();
    let dir = ServerDir::new().unwrap();
    let model = ["--model-url", &url, "--model-name", "m", "--issue-quiet", "10ms"];
    let database = ["--database-url", "sqlite:shared.db", "--analytics-path", ""];
    let at = |streams: &'static str| [&model[..], &database, &["--stream-url", streams]].concat();
    let first = dir.serve(&at("embedded:one")).unwrap();
    let created = open(&first, "slow").await.unwrap();
    let issue = format!("/api/v1/issues/{}", created["issue_id"]);
    let is_claimed = |_: u16, issue: &Value| issue["processing_status"] == "processing";
    let claimed = first.until(&issue, is_claimed).await.unwrap();
    let mut second = dir.serve(&at("embedded:two")).unwrap();
    second.until("/health/ready", |_, body| body["status"] == "ready").await.unwrap();
    let (_, now) = second.get(&issue).await.unwrap();
    assert_eq!(now["claim_epoch"], claimed["claim_epoch"], "{now}");
    assert_eq!(now["crashes"], 0, "{now}");
    let expires = |issue: &Value| issue["claim_expires_at"].as_str().unwrap().to_owned();
    assert!(expires(&now) >= expires(&claimed), "{now}");
    assert!(second.stop().unwrap().success(), "{}", text(second.log().as_bytes()));
}
