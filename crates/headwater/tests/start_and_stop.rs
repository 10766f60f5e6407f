//! Startup, startup errors and shutdown of the real binary.

mod support;

use std::sync::Arc;
use std::thread;

use anyhow::{Result, anyhow};
use headwater_testkit::{Postgres, Redis};
use serde_json::Value;

use crate::support::{ServerDir, eventually, text};

#[tokio::test]
async fn without_other_services_it_becomes_ready_and_shuts_down_gracefully() -> Result<()> {
    let dir = ServerDir::new()?;
    let mut server = dir.serve(&[])?;

    assert_eq!(server.get("/health/live").await?.0, 200);
    let ready = server.until("/health/ready", |_, body| body["status"] == "ready").await?;
    assert_eq!(ready["status"], "ready");
    let checks: Vec<_> = ready["checks"].as_array().into_iter().flatten().collect();
    for name in ["database", "migrations", "streams", "worker", "parts", "accepting"] {
        assert!(checks.iter().any(|check| check["name"] == name && check["ok"] == true), "{name}");
    }

    assert!(server.stop()?.success(), "{}", server.log());
    server.wait_for_log("worker stopped")?;
    Ok(())
}

#[tokio::test]
async fn unknown_paths_and_methods_are_errors_in_the_common_format() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    let (status, body) = server.get("/nowhere").await?;
    assert_eq!((status, body["error"]["code"].as_str()), (404, Some("not_found")));
    let (status, body) = server.post("/health/live", &serde_json::json!({})).await?;
    assert_eq!((status, body["error"]["code"].as_str()), (405, Some("method_not_allowed")));
    Ok(())
}

#[test]
fn invalid_usage_and_settings_are_exit_code_2_with_allowed_values() -> Result<()> {
    let dir = ServerDir::new()?.settings("[worker]\nconcurrency = 0\n")?;
    for (arguments, words) in [
        (&["serve"][..], &["`worker.concurrency`", "`0`", "from 1 to 10000", "headwater.toml"][..]),
        (&["serve", "--worker-concurrency", "many"], &["`many`", "--worker-concurrency"]),
        (&["sevre"], &["sevre", "serve"]),
        (&["serve", "--settings", "missing.toml"], &["missing.toml"]),
        (
            &["serve", "--worker-concurrency", "1", "--http-listen", "0.0.0.0:0"],
            &["`http.listen`", "[[token]]"],
        ),
        (
            &["worker", "--worker-concurrency", "1", "--worker-listen", "0.0.0.0:0"],
            &["`worker.listen`", "[[token]]"],
        ),
        (
            &["serve", "--worker-concurrency", "1", "--stream-url", "redis://:hunter2@a:b:c"],
            &["`stream.url`"],
        ),
    ] {
        let output = dir.run(arguments)?;
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        for word in words {
            assert!(error.contains(word), "{arguments:?} lacks {word}: {error}");
        }
        assert!(!error.contains("hunter2"), "{error}");
    }
    Ok(())
}

#[test]
fn settings_are_checked_before_a_port_is_bound() -> Result<()> {
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let dir = ServerDir::new()?;
    for (verb, listen) in [("serve", "--http-listen"), ("worker", "--worker-listen")] {
        for (setting, url) in [
            ("stream.url", "redis://:hunter2@a:b:c"),
            ("stream.url", "embedded:x?sync=never"),
            ("database.url", "postgres://ann:hunter2@127.0.0.1:port/headwater"),
            ("database.url", "sqlite:x?mode=sometimes"),
        ] {
            let flag = format!("--{}", setting.replace('.', "-"));
            let output = dir.run(&[verb, listen, &address, &flag, url])?;
            let error = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{verb} {url}: {error}");
            assert!(error.contains(setting) && !error.contains("hunter2"), "{error}");
        }
        let output = dir.run(&[verb, listen, &address])?;
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(&format!("cannot listen on {address}")), "{error}");
    }
    Ok(())
}

#[test]
fn an_unreachable_server_is_exit_code_3_and_named_without_its_password() -> Result<()> {
    let dir = ServerDir::new()?;
    let serve = ["serve", "--http-listen", "127.0.0.1:0", "--start-wait", "1s"];
    let redis = ["--stream-url", "redis://:hunter2@127.0.0.1:1"];
    let postgres = ["--database-url", "postgres://ann:hunter2@127.0.0.1:1/headwater"];
    for (verb, url, address) in [
        (&["topic", "list"][..], redis, "redis://:***@127.0.0.1:1"),
        (&serve, postgres, "postgres://ann:***@127.0.0.1:1"),
    ] {
        let output = dir.run(&[verb, &url].concat())?;
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{error}");
        assert!(error.contains(address) && error.contains("is unreachable"), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
    Ok(())
}

#[tokio::test]
async fn servers_that_start_late_are_waited_for() -> Result<()> {
    let redis = Redis::start()?;
    let postgres = Postgres::start()?;
    let database = postgres.database()?;
    let (stream_url, database_url) = (redis.url(), database.url());
    redis.stop()?;
    postgres.stop()?;

    let dir = ServerDir::new()?;
    let arguments = ["--stream-url", &stream_url, "--database-url", &database_url];
    let mut server = dir.serve_soon(&arguments)?;
    server.wait_for_log("stream backend not reachable")?;
    server.wait_for_log("database not reachable yet")?;
    postgres.restart()?;
    redis.restart()?;
    server.listening()?;
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;
    Ok(())
}

#[tokio::test]
async fn a_locked_directory_names_the_owning_process() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    let output = dir.run(&["serve", "--http-listen", "127.0.0.1:0"])?;
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    let address = format!("--url http://{}`", server.address);
    for word in ["in use by process", &server.pid().to_string(), &address, "`stream.url`", "Redis"]
    {
        assert!(error.contains(word), "lacks {word}: {error}");
    }
    Ok(())
}

#[tokio::test]
async fn the_directory_of_the_data_is_only_for_its_user() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let dir = ServerDir::new()?;
    let _server = dir.serve(&[])?;
    let data = std::fs::metadata(dir.path().join("headwater-data"))?;
    assert_eq!(data.permissions().mode() & 0o777, 0o700);
    Ok(())
}

#[tokio::test]
async fn readiness_names_an_unavailable_dependency_and_recovers() -> Result<()> {
    let redis = Redis::start()?;
    let database = Postgres::shared()?.database()?;
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--stream-url", &redis.url(), "--database-url", &database.url()])?;
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;

    redis.pause()?;
    let fails = |body: &Value| {
        let checks = body["checks"].as_array().into_iter().flatten();
        let failed = checks.filter(|check| check["ok"] == false);
        failed.map(|check| check["name"].as_str().unwrap_or_default()).collect::<Vec<_>>()
            == ["streams"]
    };
    server
        .until("/health/ready", |status, body| {
            status == 200 && body["status"] == "degraded" && fails(body)
        })
        .await?;
    assert_eq!(server.get("/health/live").await?.0, 200);

    redis.resume()?;
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;
    Ok(())
}

/// Another session holds a lock on the table.
#[tokio::test]
async fn a_slow_release_of_budget_waits_does_not_delay_the_start() -> Result<()> {
    let database = Arc::new(Postgres::shared()?.database()?);
    let dir = ServerDir::new()?;
    let url = database.url();
    let arguments = ["--database-url", url.as_str()];
    assert!(dir.serve(&arguments)?.stop()?.success());
    let locked = Arc::clone(&database);
    let locking = thread::spawn(move || {
        // It ends with an error when the session is terminated.
        let _ = locked.query("BEGIN; LOCK TABLE budget_waits; SELECT pg_sleep(60); COMMIT");
    });
    let holders = "SELECT count(*) FROM pg_locks JOIN pg_class ON relation = pg_class.oid
        WHERE relname = 'budget_waits' AND mode = 'AccessExclusiveLock' AND granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    eventually("the table is locked", || database.query(holders).is_ok_and(|count| count == "1"))
        .await?;
    let server = dir.serve(&arguments)?;
    assert!(!server.log().contains("not released"), "{}", server.log());
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;
    assert_eq!(database.query(holders)?, "1");
    database.query(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE datname = current_database() AND query LIKE '%pg_sleep%' AND pid <> pg_backend_pid()",
    )?;
    locking.join().map_err(|_| anyhow!("the session panicked"))?;
    Ok(())
}

#[tokio::test]
async fn a_worker_serves_only_health_and_metrics() -> Result<()> {
    let redis = Redis::start()?;
    let database = Postgres::shared()?.database()?;
    let dir = ServerDir::new()?;
    let mut worker =
        dir.worker(&["--stream-url", &redis.url(), "--database-url", &database.url()])?;
    worker.until("/health/ready", |_, body| body["status"] == "ready").await?;
    let (status, metrics) = worker.get("/metrics").await?;
    assert_eq!(status, 200);
    assert!(metrics.as_str().is_some_and(|text| text.contains("headwater_http_requests_total")));
    assert_eq!(worker.get("/api/v1/issues").await?.0, 404);
    assert!(worker.stop()?.success());
    Ok(())
}

#[test]
fn config_prints_each_value_and_its_source_without_secrets() -> Result<()> {
    let dir = ServerDir::new()?.settings("[worker]\nconcurrency = 7\n")?;
    let mut command = dir.command(&["config", "--issue-quiet", "2s"]);
    command.env("HEADWATER_DATABASE_URL", "postgres://ann:hunter2@localhost/a");
    command.env_remove("HEADWATER_HTTP_LISTEN");
    let output = command.output()?;
    assert!(output.status.success());
    let printed = text(&output.stdout);
    let line = |name: &str| {
        let found = printed.lines().find(|line| line.starts_with(name));
        found.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("worker.concurrency"), "worker.concurrency 7 (headwater.toml)");
    assert_eq!(line("issue.quiet"), "issue.quiet 2s (--issue-quiet)");
    assert_eq!(line("http.listen"), "http.listen 127.0.0.1:8080 (default)");
    let database = "database.url postgres://ann:***@localhost/a (HEADWATER_DATABASE_URL)";
    assert_eq!(line("database.url"), database);
    assert!(!printed.contains("hunter2"));
    Ok(())
}
