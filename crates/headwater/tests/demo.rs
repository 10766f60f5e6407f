//! The demo of the real binary: the first command of the README.

mod support;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

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
        "replied", "checked", "filling", "filled", "stopping",
    ];
    if cfg!(feature = "analytics") {
        expected.insert(10, "reported");
    }
    assert_eq!(words, expected, "{stdout}");
    assert!(stdout.contains("6 messages in a row got 1 reply"), "{stdout}");
    // Only the reply that is refused on purpose.
    let errors: Vec<_> = log.lines().filter(|line| line.contains("\"level\":\"ERROR\"")).collect();
    assert!(errors.len() == 1 && errors[0].contains("delivery failed permanently"), "{log}");
    assert_eq!(std::fs::read_dir(dir.path())?.count(), 0, "its data was in a temporary directory");
    Ok(())
}

#[tokio::test]
async fn after_the_demo_it_serves_until_it_is_stopped() -> Result<()> {
    let dir = ServerDir::new()?;
    let mut server = dir.serve(&["--demo", "--log-level", "info"])?;
    // Every list of the console has something to show.
    for (path, list, count) in [
        ("/api/v1/issues", "issues", 8),
        ("/api/v1/tickets", "tickets", 5),
        ("/api/v1/tickets?handed_over=true", "tickets", 1),
        ("/api/v1/sessions", "sessions", 1),
        ("/api/v1/topics", "topics", 1),
        ("/api/v1/topics/orders/messages", "messages", 24),
        ("/api/v1/topics/orders/groups", "groups", 1),
        ("/api/v1/topics/orders/dead-letters", "dead_letters", 3),
        ("/api/v1/failures", "clusters", 3),
        ("/api/v1/outbox/dead", "rows", 1),
        ("/api/v1/drafts", "drafts", 1),
        ("/api/v1/plans", "plans", 1),
        ("/api/v1/assignments/cameras/streams", "streams", 1),
        ("/api/v1/webhooks", "recent", 1),
        ("/api/v1/processes", "processes", 1),
        ("/api/v1/audit", "entries", 5),
        ("/api/v1/history?step=10s", "points", 1),
    ] {
        let has_enough = |_: u16, body: &serde_json::Value| {
            body[list].as_array().is_some_and(|items| items.len() >= count)
        };
        server.until(path, has_enough).await.with_context(|| format!("{path} is not filled"))?;
    }
    let (_, group) = server.get("/api/v1/topics/orders/groups/billing").await?;
    assert_eq!(group["lag"], 4, "{group}");
    let (_, topic) = server.get("/api/v1/topics/orders").await?;
    assert_eq!(topic["delayed"], 1, "{topic}");
    let plan = |_: u16, plan: &serde_json::Value| plan["state"] == "done";
    let plan = server.until("/api/v1/plans/1", plan).await?;
    assert_eq!((&plan["settled"], &plan["failed"]), (&7.into(), &0.into()), "{plan}");
    // The last step says where the console is.
    let console = server.url("/console");
    let serving = server.printed_line("serving ")?;
    assert!(serving.contains(&format!("web console at {console};")), "{serving}");
    assert_eq!(server.get("/health/live").await?.0, 200);
    assert!(server.stop()?.success(), "{}", server.log());
    Ok(())
}
