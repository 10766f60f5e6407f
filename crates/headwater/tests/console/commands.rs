//! The commands that the console shows can be pasted into a shell: they are parsed, and hostile names stay names.

use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::support::{Server, ServerDir, text};

/// A name with everything that a shell would interpret, and the same in an address.
const NAME: &str = "it's $(touch oops) `touch oops`; touch oops";
const ENCODED: &str = "it%27s%20%24%28touch%20oops%29%20%60touch%20oops%60%3B%20touch%20oops";

/// The same for sessions, whose names have no spaces.
const SESSION: &str = "it's$(id>oops)`id>oops`;id>oops";
const SESSION_ENCODED: &str = "it%27s%24%28id%3Eoops%29%60id%3Eoops%60%3Bid%3Eoops";

/// The commands on a page.
fn commands(page: &str) -> Vec<String> {
    let codes = page.split("<code").skip(1).filter_map(|rest| rest.split_once('>'));
    let texts = codes.filter_map(|(_, rest)| rest.split("</code>").next());
    let plain = |text: &str| {
        text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&amp;", "&")
    };
    texts.map(plain).filter(|text| text.starts_with("headwater ")).collect()
}

/// A word in single quotes.
fn shell_word(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Runs a line in a shell that finds the binary under its installed name.
fn shell(dir: &ServerDir, server: &Server, line: &str) -> Result<Output> {
    let programs = dir.path().join("programs");
    if !programs.exists() {
        std::fs::create_dir(&programs)?;
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_headwater"), programs.join("headwater"))?;
    }
    let path = format!("{}:{}", programs.display(), std::env::var("PATH")?);
    let mut command = Command::new("sh");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("HEADWATER_") {
            command.env_remove(name);
        }
    }
    command.args(["-c", line]).current_dir(dir.path());
    command.env("PATH", path).env("HEADWATER_URL", server.url(""));
    Ok(command.output()?)
}

async fn page(server: &Server, path: &str) -> Result<String> {
    let response = server.client.get(server.url(path)).send().await?;
    ensure!(response.status() == 200, "{path}: {}", response.status());
    Ok(response.text().await?)
}

/// A session with this name: an imported one, of a run of the model.
async fn session(server: &Server, encoded: &str) -> Result<()> {
    let ticket = json!({"title": "Router blinks red", "content": "Since yesterday."});
    ensure!(server.post("/api/v1/tickets", &ticket).await?.0 == 201);
    let is_there = |_: u16, page: &Value| page["sessions"][0]["session"].is_string();
    let page = server.until("/api/v1/sessions", is_there).await?;
    let run = page["sessions"][0]["session"].as_str().context("a session")?;
    let export = server.client.get(server.url(&format!("/api/v1/sessions/{run}/export")));
    let lines = export.send().await?.text().await?;
    let import = server.client.post(server.url(&format!("/api/v1/sessions/{encoded}/import")));
    let import = import.header("content-type", "application/x-ndjson").body(lines).send().await?;
    ensure!(import.status() == 201, "{}", import.text().await?);
    Ok(())
}

/// The page that asks for a confirmation.
async fn asked(server: &Server, path: &str, form: &str) -> Result<String> {
    let request = server.client.post(server.url(path)).header("origin", server.url(""));
    let request = request.header("content-type", "application/x-www-form-urlencoded");
    let response = request.body(form.to_owned()).send().await?;
    ensure!(response.status() == 200, "{path}: {}", response.status());
    Ok(response.text().await?)
}

#[tokio::test]
async fn commands_can_be_pasted_into_a_shell_whatever_the_names_are() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--issue-quiet", "0s", "--issue-max-wait", "0s"])?;
    session(&server, SESSION_ENCODED).await?;
    let (status, created) =
        server.post("/api/v1/topics", &json!({"name": NAME, "partitions": 1})).await?;
    ensure!(status == 201, "{created}");
    let topic = format!("/console/topics/{ENCODED}");
    let mut pages = vec![page(&server, &format!("{topic}/messages")).await?];
    let api = format!("/api/v1/topics/{ENCODED}");
    server.post(&format!("{api}/messages"), &json!({"messages": [{"payload": "x"}]})).await?;
    let group = format!("{api}/groups/{ENCODED}");
    let (_, pulled) = server.post(&format!("{group}/pull"), &json!({"max": 1})).await?;
    let settlement =
        json!({"lease": pulled["messages"][0]["lease"], "outcome": "dead_letter", "reason": NAME});
    let settled = json!({"settlements": [settlement]});
    ensure!(server.post(&format!("{group}/settle"), &settled).await?.0 == 200);
    let (_, letters) = server.get(&format!("{api}/dead-letters")).await?;
    let letter = letters["dead_letters"][0]["id"].as_str().context("a dead letter")?;

    let later = json!({"messages": [{"payload": "x", "delay_ms": 3_600_000}]});
    ensure!(server.post(&format!("{api}/messages"), &later).await?.0 == 201);
    let (_, tickets) = server.get("/api/v1/tickets").await?;
    let ticket = tickets["tickets"][0]["ticket_id"].as_str().context("a ticket")?;
    let issue = &tickets["tickets"][0]["issue_id"];
    let filter = format!("reason={ENCODED}&key={ENCODED}");
    let screens = [
        topic.clone(),
        format!("{topic}/messages"),
        format!("{topic}/messages?key={ENCODED}&text={ENCODED}&header={ENCODED}&newest_first=true"),
        format!("/console/search?q={ENCODED}"),
        "/console".to_owned(),
        "/console/assignment".to_owned(),
        "/console/outbox?status=any".to_owned(),
        format!("{topic}/dead-letters"),
        format!("{topic}/dead-letters?{filter}"),
        format!("{topic}/dead-letters/{letter}"),
        format!("{topic}/groups/{ENCODED}"),
        format!("/console/tickets?status=open&user_id={ENCODED}"),
        format!("/console/issues?integration={ENCODED}"),
        format!("/console/tickets/{ticket}"),
        format!("/console/issues/{issue}"),
        format!("/console/tail?topic={ENCODED}"),
        format!("/console/drafts?status={ENCODED}"),
        "/console/drafts?status=approved".to_owned(),
        format!("/console/assignment/{ENCODED}"),
        format!("/console/sessions/{SESSION_ENCODED}"),
        format!("/console/sessions/{SESSION_ENCODED}/compare?with={SESSION_ENCODED}"),
        "/console/sql?query=SELECT%20%27it%27%27s%20%24%28touch%20oops%29%27".to_owned(),
        "/console/topics".to_owned(),
        format!("/console/topics?name={ENCODED}"),
        "/console/failures".to_owned(),
        "/console/plans".to_owned(),
        "/console/plans?state=running".to_owned(),
        "/console/outbox".to_owned(),
        "/console/processes".to_owned(),
        "/console/doctor".to_owned(),
        "/console/settings".to_owned(),
        "/console/audit".to_owned(),
        format!("/console/audit?caller={ENCODED}&path={ENCODED}"),
        "/console/help".to_owned(),
    ];
    for screen in &screens {
        pages.push(page(&server, screen).await?);
    }
    let act = topic.replacen("/console/", "/console/do/", 1);
    let selected = format!("select=matching&reason={ENCODED}");
    for (path, form) in [
        (format!("{act}/dead-letters/replay"), selected.as_str()),
        (format!("{act}/dead-letters/replay"), &format!("id={letter}")),
        (format!("{act}/dead-letters/plan"), &selected),
        (format!("{act}/dead-letters/purge"), &selected),
        (format!("{act}/dead-letters/purge"), "select=matching"),
        (format!("{act}/groups/{ENCODED}/reset"), "to=beginning"),
        (format!("{act}/groups/{ENCODED}/delete"), ""),
        ("/console/do/issues/retry".to_owned(), &format!("integration={ENCODED}&error={ENCODED}")),
        (format!("{act}/delete"), ""),
        (format!("{act}/grow"), "partitions=3"),
        (format!("{act}/trim"), "count=0&hours=5&force=true"),
        ("/console/do/issues/release".to_owned(), &format!("integration={ENCODED}")),
        ("/console/do/outbox/retry".to_owned(), ""),
        ("/console/do/outbox/retry".to_owned(), "issue=7"),
    ] {
        let page = asked(&server, &path, form).await?;
        ensure!(!commands(&page).is_empty(), "{path} shows no command:\n{page}");
        pages.push(page);
    }

    let shown: Vec<String> = pages.iter().flat_map(|page| commands(page)).collect();
    ensure!(shown.len() >= screens.len() + 12, "{shown:#?}");
    let quoted = shell_word(NAME);
    for line in [
        format!("headwater tail {quoted}"),
        format!("headwater assign list {quoted}"),
        format!("headwater message delayed {quoted}"),
        format!("headwater plan create {quoted} --reason {quoted}"),
        format!("headwater session replay {}", shell_word(SESSION)),
        format!("headwater session diff {0} {0}", shell_word(SESSION)),
        format!(
            "headwater session import NAME --input {}",
            shell_word(&format!("{SESSION}.jsonl"))
        ),
        // The query that was run.
        format!("headwater sql {}", shell_word("SELECT 'it''s $(touch oops)'")),
        "headwater draft list --status approved".to_owned(),
    ] {
        ensure!(shown.contains(&line), "{line} is not shown: {shown:#?}");
    }
    for line in &shown {
        // Every call of the program only prints its help, if it understands its arguments.
        let only_help = match line.as_str() {
            "headwater help" => line.clone(),
            line => format!("headwater() {{ command headwater \"$@\" --help; }}\n{line}"),
        };
        let output = shell(&dir, &server, &only_help)?;
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        ensure!(output.status.success() && out.contains("Usage: headwater"), "{line}\n{out}{err}");
        let looks =
            ["topic describe ", "group describe ", "dlq list ", "dlq show ", "ticket list", "help"];
        if looks.iter().any(|verb| line.starts_with(&format!("headwater {verb}"))) {
            let output = shell(&dir, &server, line)?;
            ensure!(output.status.success(), "{line}\n{}", text(&output.stderr));
        }
    }
    ensure!(!dir.path().join("oops").exists(), "a name was executed: {shown:#?}");
    Ok(())
}
