//! The commands that the console shows can be pasted into a shell: they are parsed, and hostile names stay names.

use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::support::{Server, ServerDir, text};

/// A name with everything that a shell would interpret, and the same in an address.
const NAME: &str = "it's $(touch oops) `touch oops`; touch oops";
const ENCODED: &str = "it%27s%20%24%28touch%20oops%29%20%60touch%20oops%60%3B%20touch%20oops";

/// The commands on a page.
fn commands(page: &str) -> Vec<String> {
    let codes = page.split("<code").skip(1).filter_map(|rest| rest.split_once('>'));
    let texts = codes.filter_map(|(_, rest)| rest.split("</code>").next());
    let plain = |text: &str| {
        text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&amp;", "&")
    };
    texts.map(plain).filter(|text| text.starts_with("headwater ")).collect()
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
    let server = dir.serve(&[])?;
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
        "/console/topics".to_owned(),
        "/console/failures".to_owned(),
        "/console/plans".to_owned(),
        "/console/plans?state=running".to_owned(),
        "/console/outbox".to_owned(),
        "/console/processes".to_owned(),
        "/console/doctor".to_owned(),
        "/console/settings".to_owned(),
        "/console/audit".to_owned(),
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
    ] {
        let page = asked(&server, &path, form).await?;
        ensure!(!commands(&page).is_empty(), "{path} shows no command:\n{page}");
        pages.push(page);
    }

    let shown: Vec<String> = pages.iter().flat_map(|page| commands(page)).collect();
    ensure!(shown.len() >= screens.len() + 12, "{shown:#?}");
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
