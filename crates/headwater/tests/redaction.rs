//! Redaction through the real binary: the model endpoint and the sessions get placeholders, replies and tools get the values.

mod support;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::support::desk::{all_idle, answered, by};
use crate::support::model::{FakeModel, ModelFault};
use crate::support::{LIMIT, ServerDir, text};

const SETTINGS: &str = "[desk]\nredact = [\"email\", \"card\", \"iban\", \"phone\"]\n\
    [[redaction]]\nname = \"order\"\npattern = 'ORD-[0-9]{6}'\n";

/// What no model may see.
const SECRETS: [&str; 6] = [
    "ada@example.com",
    "grace@example.com",
    "4111 1111 1111 1111",
    "DE89 3704 0044 0532 0130 00",
    "+49 170 1234567",
    "ORD-123456",
];

#[tokio::test(flavor = "multi_thread")]
async fn a_model_sees_placeholders_and_a_user_sees_the_values() -> Result<()> {
    let (model, url) = FakeModel::open((5, 5)).await?;
    let reply = "I wrote to [EMAIL_1] about [ORDER_1]; [CARD_1] is safe. [EMAIL_9] [TEXT_1]";
    let search = ModelFault::Call("search_tickets", r#"{"query":"[ORDER_1] of [EMAIL_1]"}"#);
    model.plan("case-private", &[search, ModelFault::Finish(reply, "stop")]);
    let place = ServerDir::new()?.settings(SETTINGS)?;
    let server = place.serve(&[
        "--model-url",
        &url,
        "--model-name",
        "test-model",
        "--issue-quiet",
        "10ms",
    ])?;
    // An earlier ticket of the same user, which the tool finds.
    let earlier = json!({"title": "ORD-123456", "content": "ORD-123456 of ada@example.com and grace@example.com",
        "user_id": "ada@example.com"});
    let (_, earlier) = server.post("/api/v1/tickets", &earlier).await?;
    answered(&server, earlier["ticket_id"].as_str().context("an id")?, 1).await?;
    let content = "case-private: I am ada@example.com, not [EMAIL_1]. Charge 4111 1111 1111 1111 or \
        DE89 3704 0044 0532 0130 00, call +49 170 1234567 about ORD-123456.";
    let ticket = json!({"title": "Order", "content": content, "user_id": "ada@example.com"});
    let (status, created) = server.post("/api/v1/tickets", &ticket).await?;
    assert_eq!(status, 201);
    let id = created["ticket_id"].as_str().context("an id")?;
    let shown = answered(&server, id, 1).await?;
    // The values of the conversation, what the user wrote for itself, and nothing for an unknown placeholder.
    let expected = "I wrote to ada@example.com about ORD-123456; 4111 1111 1111 1111 is safe. [EMAIL_9] [EMAIL_1]";
    assert_eq!(by(&shown, "assistant"), [expected], "{shown:#}");
    // The next run redacts the answer of this one, too.
    let path = format!("/api/v1/tickets/{id}/messages");
    server.post(&path, &json!({"content": "And again"})).await?;
    answered(&server, id, 2).await?;
    all_idle(&server).await?;

    let requests = model.requests("");
    assert!(requests.len() >= 4, "{}", requests.len());
    let is_secret_free = |what: &str, text: &str| {
        for secret in SECRETS {
            assert!(!text.contains(secret), "{secret} in {what}: {text}");
        }
    };
    for request in &requests {
        is_secret_free("a request", &request.body.to_string());
    }
    // The tool was called with the values, and found the earlier ticket: its title is a placeholder.
    let last = requests.iter().map(|request| request.body.to_string());
    let after_tool = last.filter(|body| body.contains("\"role\":\"tool\"")).collect::<Vec<_>>();
    assert_eq!(after_tool.len(), 1);
    let ticket_id = earlier["ticket_id"].as_str().context("an id")?;
    assert!(after_tool[0].contains(ticket_id), "{}", after_tool[0]);

    // Sessions have what the model had.
    let sessions = server.until("/api/v1/sessions", |_, body| {
        body["sessions"].as_array().is_some_and(|sessions| sessions.len() >= 3)
    });
    let sessions = tokio::time::timeout(LIMIT, sessions).await??;
    for session in sessions["sessions"].as_array().context("sessions")? {
        let name = session["session"].as_str().context("a session")?;
        let (_, events) = server.get(&format!("/api/v1/sessions/{name}/events")).await?;
        is_secret_free(name, &events.to_string());
    }
    Ok(())
}

#[test]
fn an_invalid_pattern_stops_the_process_and_is_named() -> Result<()> {
    for (settings, named) in [
        ("[[redaction]]\nname = \"open\"\npattern = '('\n", "[[redaction]] `open`"),
        ("[[redaction]]\nname = \"A\"\npattern = 'x'\n", "[[redaction]] `A`"),
        (
            "[[redaction]]\nname = \"a\"\npattern = 'x'\n[[redaction]]\nname = \"a\"\npattern = 'y'\n",
            "`a`",
        ),
        ("[desk]\nredact = [\"address\"]\n", "`desk.redact`"),
        ("[desk]\nredact = [1]\n", "`desk.redact`"),
        ("[[redaction]]\nname = \"a\"\npattern = 'x'\nmore = 1\n", "more"),
    ] {
        let output = ServerDir::new()?.settings(settings)?.run(&["serve"])?;
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{settings}: {message}");
        assert!(message.contains(named), "{settings}: {message}");
    }
    let place = ServerDir::new()?.settings(SETTINGS)?;
    let shown = text(&place.run(&["config"])?.stdout);
    assert!(shown.contains("email,card,iban,phone"), "{shown}");
    assert!(shown.contains("[[redaction]] name=order pattern=ORD-[0-9]{6}"), "{shown}");
    let shown: Value = serde_json::from_slice(&place.run(&["config", "--json"])?.stdout)?;
    assert_eq!(shown["redactions"], json!([{"name": "order", "pattern": "ORD-[0-9]{6}"}]));
    Ok(())
}
