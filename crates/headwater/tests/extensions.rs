//! Programs with their own model, routes and tools: they answer tickets, the routes are behind the tokens of the server, and a tool
//! that panics or never ends stops nothing.

mod support;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::support::desk::{answered, by, new_ticket};
use crate::support::tool_desk::{ask, effects, only_answer};
use crate::support::tool_service::{CallPlan, ToolModel};
use crate::support::{ServerDir, text};

const SETTINGS: &str = "\
    [[token]]\nname = \"reader\"\nrole = \"read\"\ntoken = \"a-token-of-the-reader\"\n\
    [[token]]\nname = \"writer\"\nrole = \"write\"\ntoken = \"a-token-of-the-writer\"\n\
    [[token]]\nname = \"admin\"\nrole = \"admin\"\ntoken = \"a-token-of-the-admin\"\n";

/// An example that was built with this test.
fn example(name: &str) -> Result<std::path::PathBuf> {
    let this = std::env::current_exe()?;
    let built = this.ancestors().nth(2).context("no examples directory")?.join("examples");
    let program = built.join(name).with_extension(std::env::consts::EXE_EXTENSION);
    ensure!(program.exists(), "{} does not exist; build it with --examples", program.display());
    Ok(program)
}

#[tokio::test]
async fn a_program_adds_its_own_model_and_routes() -> Result<()> {
    let place = ServerDir::new()?.program(example("extensions")?).settings(SETTINGS)?;
    let server = place.serve(&["--issue-quiet", "10ms", "--http-body-bytes-max", "2048"])?;
    let call = async |method: &str, token: &str, body: &str| -> Result<(u16, String)> {
        let method = reqwest::Method::from_bytes(method.as_bytes())?;
        let mut request = server.client.request(method, server.url("/x/hours"));
        if !token.is_empty() {
            request = request.bearer_auth(token);
        }
        let response = request.body(body.to_owned()).send().await?;
        Ok((response.status().as_u16(), text(&response.bytes().await?)))
    };
    let (reader, writer) = ("a-token-of-the-reader", "a-token-of-the-writer");
    assert_eq!(call("GET", "", "").await?.0, 401);
    assert_eq!(call("GET", "wrong", "").await?.0, 401);
    assert_eq!(call("GET", reader, "").await?, (200, "Monday to Friday, 9 to 17\n".to_owned()));
    assert_eq!(call("POST", reader, "x").await?.0, 403);
    assert_eq!(call("POST", writer, "x").await?, (200, "x".to_owned()));
    assert_eq!(call("POST", writer, &"x".repeat(4096)).await?.0, 413);

    // The change is in the audit log.
    let audit = server.client.get(server.url("/api/v1/audit")).bearer_auth("a-token-of-the-admin");
    let audit = audit.send().await?.text().await?;
    assert!(audit.contains("/x/hours") && audit.contains("writer"), "{audit}");

    // The model answers.
    let ticket = new_ticket("Where is my parcel?");
    let open = server.client.post(server.url("/api/v1/tickets")).bearer_auth(writer).json(&ticket);
    let created: serde_json::Value = open.send().await?.json().await?;
    let id = created["ticket_id"].as_str().context("an id")?;
    let path = server.url(&format!("/api/v1/tickets/{id}"));
    let deadline = tokio::time::Instant::now() + support::LIMIT;
    loop {
        let shown: serde_json::Value =
            server.client.get(&path).bearer_auth(reader).send().await?.json().await?;
        if !by(&shown, "assistant").is_empty() {
            assert_eq!(by(&shown, "assistant"), ["Thank you for your message."]);
            assert_eq!(shown["usage"]["runs"], json!(1), "{shown:#}");
            break;
        }
        ensure!(tokio::time::Instant::now() < deadline, "{shown:#}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    Ok(())
}

#[tokio::test]
async fn without_tokens_the_routes_are_open_to_local_programs_only() -> Result<()> {
    let place = ServerDir::new()?.program(example("extensions")?);
    let server = place.serve(&["--issue-quiet", "10ms"])?;
    let local = server.client.get(server.url("/x/hours")).send().await?;
    assert_eq!(local.status(), 200);
    let proxied = server.client.get(server.url("/x/hours")).header("x-forwarded-for", "192.0.2.1");
    assert_eq!(proxied.send().await?.status(), 403);
    let created = support::desk::open(&server, "Hello").await?;
    let id = created["ticket_id"].as_str().context("an id")?;
    assert_eq!(by(&answered(&server, id, 1).await?, "assistant").len(), 1);
    Ok(())
}

const CALLS: &[CallPlan] = &[
    ("case-greet", &[("greet", "{}")]),
    ("case-panic", &[("panic", "{}")]),
    ("case-wait", &[("wait", "{}")]),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_of_a_program_is_called_and_its_defects_stop_nothing() -> Result<()> {
    let (_model, url) = ToolModel::start(CALLS).await?;
    let place = ServerDir::new()?.program(example("faulty_extensions")?);
    let quick = ["--issue-quiet", "10ms", "--sweep-every", "200ms", "--analytics-path", ""];
    let server =
        place.serve(&[&quick[..], &["--model-url", &url, "--model-name", "m"]].concat())?;
    let (ticket, _) = ask(&server, "case-greet").await?;
    let answer = only_answer(&server, &ticket).await?;
    let expected = r#"{"ok":true,"result":{"from":"desk","hello":"ada"}}"#;
    assert!(answer.contains(expected), "{answer}");

    // It may have changed something: it is not called again, and a person gets the facts.
    let (ticket, issue) = ask(&server, "case-panic").await?;
    let path = format!("/api/v1/tickets/{ticket}");
    let shown = server.until(&path, |_, shown| shown["handed_over"] == true).await?;
    let reason = shown["hand_over_reason"].as_str().context("a reason")?;
    assert!(reason.contains("the tool panicked"), "{reason}");
    let recorded = effects(&server, issue).await?;
    let (status, attempts) = (&recorded[0]["status"], &recorded[0]["attempts"]);
    assert_eq!((recorded.len(), status, attempts), (1, &json!("unknown"), &json!(1)));

    let (ticket, _) = ask(&server, "case-wait").await?;
    let answer = only_answer(&server, &ticket).await?;
    assert!(answer.contains("no response within 500ms"), "{answer}");
    let (ticket, _) = ask(&server, "case-greet again").await?;
    assert!(only_answer(&server, &ticket).await?.contains("ada"));
    Ok(())
}
