//! The commands behind the screens, with a server and without one.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::support::{Server, ServerDir, text};

/// The lines of JSON that a command prints.
fn json_lines(dir: &ServerDir, server: &Server, words: &[&str]) -> Result<Vec<Value>> {
    let url = server.url("");
    let output = dir.run(&[words, &["--url", &url, "--json"]].concat())?;
    ensure!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    let printed = text(&output.stdout);
    printed.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

#[tokio::test]
async fn every_screen_has_its_command() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--issue-quiet", "0s", "--issue-max-wait", "0s"])?;
    let post = async |path: &str, body: Value| {
        let (status, answer) = server.post(path, &body).await?;
        ensure!(status < 300, "{path}: {status} {answer}");
        anyhow::Ok(answer)
    };
    post("/api/v1/topics", json!({"name": "orders", "partitions": 2})).await?;
    let message = |n: u32| json!({"key": format!("k{n}"), "payload": format!("espresso {n}"), "headers": {"trace": format!("abc{n}")}});
    let messages: Vec<Value> = (0..5).map(message).collect();
    post("/api/v1/topics/orders/messages", json!({"messages": messages})).await?;
    let later = json!({"messages": [{"key": "k9", "payload": "later", "delay_ms": 3_600_000}]});
    post("/api/v1/topics/orders/messages", later).await?;
    let group = "/api/v1/topics/orders/groups/baristas";
    let pulled =
        post(&format!("{group}/pull"), json!({"max": 1, "wait_ms": 5000, "lease_ms": 60000}))
            .await?;
    let letter = json!({"lease": pulled["messages"][0]["lease"], "outcome": "dead_letter", "reason": "cup 7 is broken"});
    post(&format!("{group}/settle"), json!({"settlements": [letter]})).await?;
    let letters = |_: u16, topic: &Value| topic["dead_letters"] == 1;
    server.until("/api/v1/topics/orders", letters).await?;
    let ticket = post(
        "/api/v1/tickets",
        json!({"title": "Router blinks red", "content": "Since yesterday."}),
    )
    .await?;
    let issue = ticket["issue_id"].as_i64().context("an issue")?.to_string();
    let timeline = format!("/api/v1/issues/{issue}/timeline");
    server.until(&timeline, |_, timeline| timeline["runs"][0]["result"] == "done").await?;

    let lines = |words: &[&str]| json_lines(&dir, &server, words);
    let one = |words: &[&str]| -> Result<Value> { lines(words)?.pop().context("a line") };
    ensure!(one(&["me"])?["name"] == "local");
    let overview = one(&["overview"])?;
    ensure!(
        overview["topics"]["dead_letters"] == 1 && overview["tokens"]["max"].is_u64(),
        "{overview}"
    );
    ensure!(one(&["process", "list"])?["alive"] == true);
    let settings = lines(&["process", "settings"])?;
    let secret = settings.iter().find(|one| one["name"] == "stream.url");
    ensure!(secret.is_some_and(|one| one["value"].is_string() && one["source"].is_string()));
    let refused = dir.run(&["process", "settings"])?;
    ensure!(
        refused.status.code() == Some(2) && text(&refused.stderr).contains("--url"),
        "{}",
        text(&refused.stderr)
    );

    let found = lines(&["search", "router"])?;
    ensure!(found.iter().any(|one| one["kind"] == "ticket"), "{found:?}");
    for (words, kind) in [
        (issue.as_str(), "issue"),
        ("baristas", "group"),
        ("orders", "topic"),
        ("k3", "message"),
        ("abc4", "message"),
    ] {
        let found = lines(&["search", words])?;
        ensure!(found.iter().any(|one| one["kind"] == kind), "{words}: {found:?}");
    }
    let session = one(&["session", "list", "--issue", &issue])?;
    ensure!(lines(&["session", "list", "--issue", "987654"])?.is_empty());
    let name = session["session"].as_str().context("a session")?;
    ensure!(lines(&["search", name])?.iter().any(|one| one["kind"] == "session"));

    let cause = one(&["failure", "list"])?;
    ensure!(
        cause["cause"] == "cup # is broken" && cause["curve"].as_array().map(Vec::len) == Some(24),
        "{cause}"
    );
    let shown = one(&["failure", "show", cause["id"].as_str().context("an id")?])?;
    ensure!(shown["samples"][0]["message"] == "cup 7 is broken", "{shown}");

    ensure!(lines(&["message", "list", "orders"])?.len() == 5);
    let of_key = lines(&["message", "list", "orders", "--key", "k2"])?;
    ensure!(of_key.len() == 1 && of_key[0]["payload"] == "espresso 2", "{of_key:?}");
    ensure!(lines(&["message", "list", "orders", "--header", "trace=abc4"])?.len() == 1);
    ensure!(
        lines(&[
            "message",
            "list",
            "orders",
            "--text",
            "ESPRESSO",
            "--newest-first",
            "--limit",
            "2"
        ])?
        .len()
            == 2
    );
    let url = server.url("");
    let output = dir.run(&["message", "list", "orders", "--text", "nothing", "--url", &url])?;
    ensure!(text(&output.stderr).contains("scanned 5 of 5 messages"), "{}", text(&output.stderr));
    let id = of_key[0]["id"].as_str().context("an id")?;
    let partition = of_key[0]["partition"].to_string();
    let shown = one(&["message", "show", "orders", id, "--partition", &partition])?;
    ensure!(shown["key"] == "k2" && shown["next_of_key"].is_null(), "{shown}");
    let delayed = one(&["message", "delayed", "orders"])?;
    let sentence = delayed["sentence"].as_str().unwrap_or_default();
    ensure!(
        delayed["key"] == "k9" && sentence.starts_with("It was sent with a delay; due in 3"),
        "{delayed}"
    );

    let why = one(&["group", "why", "orders", "baristas"])?;
    ensure!(
        ["no_member", "no_owner", "working"].contains(&why["reason"].as_str().unwrap_or_default()),
        "{why}"
    );
    for words in [&["group", "owners"][..], &["group", "owners", "orders"]] {
        let owners = one(words)?;
        ensure!(
            owners["group"] == "baristas"
                && owners["partitions"].as_array().map(Vec::len) == Some(2),
            "{owners}"
        );
    }
    let rows = lines(&["outbox", "list", "--issue", &issue])?;
    let of_issue = |row: &Value| row["issue_id"].as_u64() == issue.parse().ok();
    ensure!(!rows.is_empty() && rows.iter().all(of_issue), "{rows:?}");
    ensure!(lines(&["outbox", "list", "--status", "dead"])?.is_empty());

    // Dry runs change nothing.
    let grown = one(&["topic", "grow", "orders", "--partitions", "4", "--dry-run"])?;
    ensure!(grown["partitions"].as_array().map(Vec::len) == Some(2), "{grown}");
    let refused =
        dir.run(&["topic", "grow", "orders", "--partitions", "1", "--dry-run", "--url", &url])?;
    ensure!(refused.status.code() == Some(2), "{}", text(&refused.stderr));
    let trimmed = one(&["topic", "trim", "orders", "--count", "0", "--force", "--dry-run"])?;
    ensure!(trimmed["removed"] == 5 && trimmed["is_done"] == false, "{trimmed}");
    let by_age = one(&["topic", "trim", "orders", "--age", "1h", "--dry-run"])?;
    ensure!(by_age["removed"] == 0 && by_age["or_more"] == false, "{by_age}");
    ensure!(lines(&["message", "list", "orders"])?.len() == 5);
    Ok(())
}
