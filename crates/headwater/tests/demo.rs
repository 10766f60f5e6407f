//! The demo of the real binary: the first command of the README.

mod support;

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::support::{ServerDir, text};

#[test]
fn the_demo_runs_all_steps_and_removes_its_data() -> Result<()> {
    let dir = ServerDir::new()?;
    let started = Instant::now();
    let output = dir.run(&["serve", "--http-listen", "127.0.0.1:0", "--demo", "--demo-exit"])?;
    let (stdout, log) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{log}");
    assert!(started.elapsed() < Duration::from_secs(60), "it takes less than a minute");

    let words: Vec<_> = stdout.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let mut expected = vec![
        "started", "opened", "answered", "answered", "answered", "batched", "received", "rejected",
        "replied", "checked", "stopping",
    ];
    if cfg!(feature = "analytics") {
        expected.insert(10, "reported");
    }
    assert_eq!(words, expected, "{stdout}");
    assert!(stdout.contains("6 messages in a row got 1 reply"), "{stdout}");
    assert!(!log.contains("\"level\":\"ERROR\""), "{log}");
    assert_eq!(std::fs::read_dir(dir.path())?.count(), 0, "its data was in a temporary directory");
    Ok(())
}

#[tokio::test]
async fn after_the_demo_it_serves_until_it_is_stopped() -> Result<()> {
    let dir = ServerDir::new()?;
    let mut server = dir.serve(&["--demo", "--log-level", "info"])?;
    server
        .until("/api/v1/issues", |_, body| {
            body["issues"].as_array().is_some_and(|issues| issues.len() == 5)
        })
        .await?;
    assert_eq!(server.get("/health/live").await?.0, 200);
    assert!(server.stop()?.success(), "{}", server.log());
    Ok(())
}
