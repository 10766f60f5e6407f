//! Redaction through the real binary: the model endpoint and the sessions get placeholders, replies and tools get the values.

mod support;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::support::desk::{all_idle, answered, by};
use crate::support::model::{FakeModel, ModelFault};
use crate::support::sender::{STANDARD_SECRET, now, send, standard};
use crate::support::tool_desk::{SQLITE, ToolDesk, ask, decide, only_answer, planned};
use crate::support::tool_service::CallPlan;
use crate::support::{LIMIT, ServerDir, eventually, text};

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

/// The model writes placeholders; one of them is of no value.
const CALLS: &[CallPlan] = &[
    ("case-known", &[("repeated", r#"{"order": "[ORDER_1] [REF_1]\n[PHONE_1]"}"#)]),
    ("case-approved", &[("approved", r#"{"order": "[ORDER_1] [REF_1]\n[PHONE_1]"}"#)]),
    (
        "case-read",
        &[("status", r#"{"order": "[ORDER_1]"}"#), ("status", r#"{"order": "[ORDER_9]"}"#)],
    ),
];

/// What the service gets.
const ORDER: &str = "ORD-123456 R&D-7\n+49 170 1234567";

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_gets_the_values_and_the_model_only_placeholders_of_its_results() -> Result<()> {
    let more = format!("{SETTINGS}[[redaction]]\nname = \"ref\"\npattern = 'R&D-[0-9]+'\n");
    let desk = ToolDesk::with_settings(CALLS, SQLITE, &more).await?;
    let server = desk.serve()?;
    let content = |case: &str| format!("{case}: ORD-123456 R&D-7, call +49 170 1234567");

    // A newer message supersedes the run after its call: the next run shows the call and its result to the model again.
    desk.model.block(true);
    let (ticket, issue) = ask(&server, &content("case-known")).await?;
    let path = format!("/api/v1/effects?issue_id={issue}");
    let page = server.until(&path, |_, page| page["effects"][0]["status"] == "done").await?;
    assert_eq!(page["effects"][0]["arguments"]["order"], ORDER, "{page:#}");
    eventually("the result", || desk.model.requests("case-known").len() == 2).await?;
    let more = json!({"content": "Quickly!"});
    assert_eq!(server.post(&format!("/api/v1/tickets/{ticket}/messages"), &more).await?.0, 201);
    eventually("the next run", || !desk.model.requests("Quickly!").is_empty()).await?;
    desk.model.block(false);
    let answer = only_answer(&server, &ticket).await?;
    for value in ["ORD-123456", "R&D-7", "+49 170 1234567"] {
        assert!(answer.contains(value), "{answer}");
    }

    // A person sees the values, and approves them.
    let (ticket, issue) = ask(&server, &content("case-approved")).await?;
    let draft = planned(&server, issue).await?;
    assert_eq!(draft["calls"][0]["arguments"]["order"], ORDER, "{draft:#}");
    assert_eq!(decide(&server, &draft, "approve", json!({})).await?.0, 200);
    let answer = only_answer(&server, &ticket).await?;
    assert!(answer.contains("R&D-7"), "{answer}");
    assert_eq!(desk.service.requests(ORDER).len(), 2, "one of each case");

    // A placeholder that stands for nothing stays what it is.
    let (ticket, _) = ask(&server, &content("case-read")).await?;
    only_answer(&server, &ticket).await?;
    let reads: Vec<String> = desk.service.reads().into_iter().map(|read| read.0).collect();
    assert_eq!(reads, ["/orders/ORD-123456?user=ada", "/orders/%5BORDER_9%5D?user=ada"]);

    let mut results = 0;
    for request in desk.model.requests("") {
        let seen = request.to_string();
        for value in ["ORD-123456", "R&D-7", "0026D-7", "170 1234567"] {
            assert!(!seen.contains(value), "{value} in {request:#}");
        }
        let messages = request["messages"].as_array().context("messages")?;
        let of_tools = messages.iter().filter(|one| one["role"] == "tool");
        let refunds = of_tools.filter(|one| one["content"].to_string().contains("refunded"));
        for refund in refunds {
            results += 1;
            let shown = refund["content"].as_str().context("a content")?;
            let shown: Value = serde_json::from_str(shown)?;
            assert_eq!(shown["result"]["refunded"], "[ORDER_1] [REF_1]\n[PHONE_1]", "{shown}");
        }
    }
    // Of the run that was superseded, of the next one, and of the one after the approval.
    assert_eq!(results, 3);
    let (_, sessions) = server.get("/api/v1/sessions").await?;
    for session in sessions["sessions"].as_array().context("sessions")? {
        let name = session["session"].as_str().context("a session")?;
        let (_, events) = server.get(&format!("/api/v1/sessions/{name}/events")).await?;
        let events = events.to_string();
        for value in ["ORD-123456", "R&D-7", "0026D-7", "170 1234567"] {
            assert!(!events.contains(value), "{value} in {events}");
        }
    }
    Ok(())
}

/// A webhook without a text is shown to the model as JSON, in which a line break is an escape.
#[tokio::test(flavor = "multi_thread")]
async fn a_payload_without_a_text_is_redacted_by_its_values() -> Result<()> {
    let (model, url) = FakeModel::open((5, 5)).await?;
    let settings = format!(
        "{SETTINGS}[[integration]]\nid = \"anybody\"\nprovider = \"standard\"\nsecret = \"{STANDARD_SECRET}\"\n"
    );
    let place = ServerDir::new()?.settings(&settings)?;
    let given = ["--model-url", &url, "--model-name", "m", "--issue-quiet", "10ms"];
    let server = place.serve(&given)?;
    let body = json!({"type": "form", "issue": "7", "note": "case-json, card:\n4111 1111 1111 1111",
        "form": "{\"tel\":\"\\n+49 170 1234567\"}"});
    let (status, body) = send(standard(&server, "m-1", now(), body.to_string().as_bytes())).await?;
    assert_eq!(status, 200, "{body}");
    eventually("the request", || !model.requests("case-json").is_empty()).await?;
    let request = model.requests("case-json").remove(0).body.to_string();
    assert!(request.contains("[CARD_1]") && request.contains("[PHONE_1]"), "{request}");
    assert!(!request.contains("1111 1111") && !request.contains("1234567"), "{request}");
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
