//! Tools of the desk on the real binary: what they may call, what the model is told, and that every effect happens once,
//! whenever the process is killed.

mod support;

use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use headwater_testkit::{Database, Port, Postgres};
use serde_json::{Value, json};

use crate::support::desk::{all_idle, answered, by};
use crate::support::model::{FakeModel, ModelFault};
use crate::support::receivers::Receiver;
use crate::support::sender::{STANDARD_SECRET, now, send, standard};
use crate::support::tool_desk::{
    SQLITE, ToolDesk, ask, decide, effects, end_sessions, only_answer, planned,
};
use crate::support::tool_service::CallPlan;
use crate::support::{Server, ServerDir, eventually, text};

fn refused(body: &Value) -> &str {
    body["error"]["code"].as_str().unwrap_or_default()
}

const READING: &[CallPlan] = &[
    ("Where is it", &[("status", r#"{"order": "a/../b"}"#)]),
    ("html", &[("html", "{}")]),
    ("broken", &[("broken", "")]),
    ("huge", &[("huge", "{}")]),
    ("never", &[("never", "{}"), ("never", "{}"), ("never", "{}")]),
    ("redirect", &[("redirect", "{}")]),
    ("moved", &[("moved", "{}")]),
    ("error", &[("error", "{}")]),
    ("unknown", &[("rm_rf", "{}")]),
    ("foreign", &[("foreign", "{}")]),
    ("wrong", &[("status", r#"{"order": 7}"#)]),
    ("nonsense", &[("status", "not JSON")]),
    ("dots", &[("status", r#"{"order": ".."}"#)]),
    ("invalid", &[("repeated", r#"{"order": "invalid"}"#)]),
    ("forever", &[("status", r#"{"order": "1"}"#); 40]),
];

#[tokio::test(flavor = "multi_thread")]
async fn the_model_gets_the_results_of_tools_and_a_clear_error_for_everything_else() -> Result<()> {
    let place = ToolDesk::new(READING, SQLITE).await?;
    let server = place.serve()?;
    let (ticket, issue) = ask(&server, "Where is it?").await?;
    let answer = only_answer(&server, &ticket).await?;
    assert!(
        answer.contains(r#"{"ok":true,"result":{"status":"sent \u003cyesterday\u003e"}}"#),
        "{answer}"
    );
    let reads = place.service.reads();
    assert_eq!(reads.len(), 1, "{reads:?}");
    assert_eq!(reads[0].0, "/orders/a%2F..%2Fb?user=ada");
    assert_eq!(reads[0].1["authorization"], "Bearer a shop token");
    // The timeline of the issue has the call, when the steps of its session are stored.
    let parts = [
        "Tool <strong><bdi>status</bdi></strong> <span class=\"badge good\">ok</span>",
        "<p>Arguments</p>",
        "&quot;order&quot;: &quot;a/../b&quot;",
        "<p>Result</p>",
        "&quot;status&quot;:&quot;sent ",
    ];
    let has_all = |_: u16, page: &Value| {
        page.as_str().is_some_and(|page| parts.iter().all(|part| page.contains(part)))
    };
    server.until(&format!("/console/issues/{issue}"), has_all).await?;
    // The tool of another integration is not even offered.
    let request = place.model.requests("Where is it").pop().context("a request")?;
    let tools = request["tools"].to_string();
    assert!(tools.contains("looked_up") && !tools.contains("foreign"), "{tools}");

    let cases = [
        ("html", "the response is HTML"),
        ("broken", "the response is not JSON"),
        ("huge", "longer than 16384 bytes"),
        ("never", "no response within 500ms"),
        ("redirect", "the host `127.0.0.2`, which is not allowed"),
        ("moved", "sent"),
        ("error", "status 500"),
        ("unknown", "there is no such tool"),
        ("foreign", "there is no such tool"),
        ("wrong", "do not match the schema"),
        ("nonsense", "not JSON"),
        ("dots", "cannot be part of the path"),
        ("invalid", "status 422 Unprocessable Entity: no such order"),
        ("forever", "sent"),
    ];
    let mut tickets = Vec::new();
    for (word, expected) in cases {
        tickets.push((word, expected, ask(&server, word).await?.0));
    }
    for (word, expected, ticket) in tickets {
        let answer = only_answer(&server, &ticket).await?;
        assert!(answer.contains(expected), "{word}: {answer}");
    }
    // A tool that does not respond is called once in a run.
    let never = place.model.requests("never").pop().context("a request")?.to_string();
    assert_eq!(never.matches("no response within 500ms").count(), 1, "{never}");
    assert!(never.contains("do not call it again now"), "{never}");
    let metrics = server.client.get(server.url("/metrics")).send().await?.text().await?;
    assert!(
        metrics.contains(r#"headwater_tool_calls_total{tool="html",result="failed"} 1"#),
        "{metrics}"
    );
    Ok(())
}

/// Where the process is killed.
#[derive(Clone, Copy, Debug)]
enum KillPoint {
    /// The intent is committed, and the service has carried out nothing.
    BeforeTheEffect,
    /// The service has carried it out, and the process does not know.
    AfterTheEffect,
    /// The outcome is recorded, and the run is not committed.
    AfterTheOutcome,
}

const KILLS: &[CallPlan] = &[
    ("repeated-0", &[("repeated", r#"{"order": "repeated-0"}"#)]),
    ("repeated-1", &[("repeated", r#"{"order": "repeated-1"}"#)]),
    ("repeated-2", &[("repeated", r#"{"order": "repeated-2"}"#)]),
    ("looked_up-0", &[("looked_up", r#"{"order": "looked_up-0"}"#)]),
    ("looked_up-1", &[("looked_up", r#"{"order": "looked_up-1"}"#)]),
    ("looked_up-2", &[("looked_up", r#"{"order": "looked_up-2"}"#)]),
    ("personal-0", &[("personal", r#"{"order": "personal-0"}"#)]),
    ("personal-1", &[("personal", r#"{"order": "personal-1"}"#)]),
    ("personal-2", &[("personal", r#"{"order": "personal-2"}"#)]),
    ("approved-0", &[("approved", r#"{"order": "approved-0"}"#)]),
    ("approved-1", &[("approved", r#"{"order": "approved-1"}"#)]),
    ("approved-2", &[("approved", r#"{"order": "approved-2"}"#)]),
];

async fn a_kill_at_any_step_of_a_call_loses_and_repeats_no_effect(
    url: &str,
    database: Option<&Database>,
) -> Result<()> {
    let place = ToolDesk::new(KILLS, url).await?;
    let mut server = place.serve()?;
    let points =
        [KillPoint::BeforeTheEffect, KillPoint::AfterTheEffect, KillPoint::AfterTheOutcome];
    for tool in ["repeated", "looked_up", "personal", "approved"] {
        for (number, point) in points.into_iter().enumerate() {
            let order = format!("{tool}-{number}");
            let silence = match point {
                KillPoint::BeforeTheEffect => Some(&place.service.is_silent_before),
                KillPoint::AfterTheEffect => Some(&place.service.is_silent_after),
                KillPoint::AfterTheOutcome => None,
            };
            match silence {
                Some(silence) => silence.store(true, Ordering::SeqCst),
                None => place.model.block(true),
            }
            let (ticket, issue) = ask(&server, &order).await?;
            if tool == "approved" {
                let draft = planned(&server, issue).await?;
                assert!(place.service.requests(&order).is_empty(), "not without an approval");
                assert_eq!(decide(&server, &draft, "approve", json!({})).await?.0, 200);
            }
            eventually("the call", || place.service.requests(&order).len() == 1).await?;
            if matches!(point, KillPoint::AfterTheOutcome) {
                let path = format!("/api/v1/effects?issue_id={issue}");
                server.until(&path, |_, page| page["effects"][0]["status"] == "done").await?;
            }
            server.kill9()?;
            end_sessions(database)?;
            if let Some(silence) = silence {
                silence.store(false, Ordering::SeqCst);
            }
            place.model.block(false);
            server = place.serve()?;
            let answer = only_answer(&server, &ticket).await?;
            let requests = place.service.requests(&order);
            let keys: Vec<&String> = requests.iter().map(|(key, _)| key).collect();
            assert!(keys.iter().all(|key| *key == keys[0]), "{order} {point:?}: {requests:?}");
            let effects = effects(&server, issue).await?;
            assert_eq!(effects.len(), 1, "{order} {point:?}: {effects:#?}");
            let (status, done) = (&effects[0]["status"], place.service.done(&order));
            if tool == "personal" && !matches!(point, KillPoint::AfterTheOutcome) {
                // Nobody can know: never again, and a person gets the facts.
                assert_eq!(
                    (status, requests.len()),
                    (&json!("unknown"), 1),
                    "{point:?}: {effects:#?}"
                );
                // Delivered after the answer.
                let path = format!("/api/v1/tickets/{ticket}");
                let shown = server.until(&path, |_, shown| shown["handed_over"] == true).await?;
                let reason = shown["hand_over_reason"].as_str().context("a reason")?;
                assert!(reason.contains(&order) && reason.contains(keys[0]), "{reason}");
                let (_, why) = server.get(&format!("/api/v1/tickets/{ticket}/why")).await?;
                assert!(why["steps"].to_string().contains("personal unknown"), "{why:#}");
                continue;
            }
            assert_eq!((status, done), (&json!("done"), 1), "{order} {point:?}: {effects:#?}");
            assert!(answer.contains(&order), "{order} {point:?}: {answer}");
            if matches!(point, KillPoint::AfterTheOutcome) {
                assert_eq!(requests.len(), 1, "{order}: the recorded outcome is used");
            }
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_at_any_step_of_a_call_loses_and_repeats_no_effect_on_sqlite() -> Result<()> {
    a_kill_at_any_step_of_a_call_loses_and_repeats_no_effect(SQLITE, None).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_at_any_step_of_a_call_loses_and_repeats_no_effect_on_postgres() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let url = database.url();
    a_kill_at_any_step_of_a_call_loses_and_repeats_no_effect(&url, Some(&database)).await
}

const SUPERSEDED: &[CallPlan] = &[
    ("order-1", &[("personal", r#"{"order": "order-1"}"#)]),
    ("order-2", &[("repeated", r#"{"order": "order-2"}"#), ("repeated", r#"{"order":"order-2"}"#)]),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_message_repeats_no_call() -> Result<()> {
    let place = ToolDesk::new(SUPERSEDED, SQLITE).await?;
    let server = place.serve()?;
    place.model.block(true);
    let (ticket, issue) = ask(&server, "Refund order-1").await?;
    let path = format!("/api/v1/effects?issue_id={issue}");
    server.until(&path, |_, page| page["effects"][0]["status"] == "done").await?;
    // The run that has called the tool is superseded before its answer.
    let more = json!({"content": "Quickly!"});
    assert_eq!(server.post(&format!("/api/v1/tickets/{ticket}/messages"), &more).await?.0, 201);
    eventually("the next run", || !place.model.requests("Quickly!").is_empty()).await?;
    place.model.block(false);
    let answer = only_answer(&server, &ticket).await?;
    assert!(answer.contains("order-1"), "{answer}");
    assert_eq!(place.service.requests("order-1").len(), 1);
    assert_eq!(effects(&server, issue).await?.len(), 1);

    // A model that asks for the same call twice gets the same result twice.
    let (ticket, issue) = ask(&server, "Refund order-2").await?;
    let answer = only_answer(&server, &ticket).await?;
    assert_eq!(answer.matches(r#"{"refunded":"order-2"}"#).count(), 2, "{answer}");
    assert_eq!(
        (place.service.requests("order-2").len(), effects(&server, issue).await?.len()),
        (1, 1)
    );

    // A new request after an answer is another call.
    let more = json!({"content": "Refund order-2 again"});
    assert_eq!(server.post(&format!("/api/v1/tickets/{ticket}/messages"), &more).await?.0, 201);
    answered(&server, &ticket, 2).await?;
    let keys: Vec<String> =
        place.service.requests("order-2").into_iter().map(|one| one.0).collect();
    assert!(keys.len() == 2 && keys[0] != keys[1], "{keys:?}");
    Ok(())
}

const UNANSWERED: &[CallPlan] = &[
    ("order-1", &[("personal", r#"{"order": "order-1"}"#)]),
    ("order-2", &[("personal", r#"{"order": "order-2"}"#)]),
    ("order-3", &[("personal", r#"{"order": "order-3"}"#)]),
];

/// A run has made its call, and ends without an answer, because the ticket is closed or a person answers.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_ends_without_an_answer_keeps_its_calls() -> Result<()> {
    let place = ToolDesk::new(UNANSWERED, SQLITE).await?;
    let server = place.serve()?;
    for (order, is_closed) in [("order-1", true), ("order-2", false)] {
        place.model.block(true);
        let (ticket, issue) = ask(&server, &format!("Refund {order}")).await?;
        let path = format!("/api/v1/effects?issue_id={issue}");
        server.until(&path, |_, page| page["effects"][0]["status"] == "done").await?;
        eventually("the result", || place.model.requests(order).len() == 2).await?;
        let ticket_path = |verb: &str| format!("/api/v1/tickets/{ticket}/{verb}");
        match is_closed {
            true => assert_eq!(server.post(&ticket_path("close"), &json!({})).await?.0, 200),
            false => {
                let agent = json!({"content": "I am looking into it.", "author": "agent"});
                assert_eq!(server.post(&ticket_path("messages"), &agent).await?.0, 201);
            }
        }
        all_idle(&server).await?;
        place.model.block(false);
        if !is_closed {
            assert_eq!(server.post(&ticket_path("reopen"), &json!({})).await?.0, 200);
        }
        let more = json!({"content": "Hello? Was it refunded?"});
        assert_eq!(server.post(&ticket_path("messages"), &more).await?.0, 201);
        let answer = only_answer(&server, &ticket).await?;
        assert!(answer.contains(&format!(r#"{{"refunded":"{order}"}}"#)), "{answer}");
        assert_eq!(place.service.requests(order).len(), 1, "{order}");
        assert_eq!(effects(&server, issue).await?.len(), 1, "{order}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_outcome_is_told_to_a_person_although_no_answer_is_needed() -> Result<()> {
    let place = ToolDesk::new(UNANSWERED, SQLITE).await?;
    let mut server = place.serve()?;
    place.service.is_silent_after.store(true, Ordering::SeqCst);
    let (ticket, issue) = ask(&server, "Refund order-3").await?;
    eventually("the call", || place.service.requests("order-3").len() == 1).await?;
    let path = format!("/api/v1/tickets/{ticket}");
    assert_eq!(server.post(&format!("{path}/close"), &json!({})).await?.0, 200);
    server.kill9()?;
    place.service.is_silent_after.store(false, Ordering::SeqCst);
    server = place.serve()?;
    let shown = server.until(&path, |_, shown| shown["handed_over"] == true).await?;
    let key = place.service.requests("order-3")[0].0.clone();
    let reason = shown["hand_over_reason"].as_str().context("a reason")?;
    assert!(reason.contains("order-3") && reason.contains(&key), "{reason}");
    assert!(by(&shown, "assistant").is_empty(), "the ticket is closed: {shown:#}");

    // The person who knows of it returns the ticket to the desk: the model knows of it, too.
    assert_eq!(server.post(&format!("{path}/reopen"), &json!({})).await?.0, 200);
    let more = json!({"content": "Was it refunded?"});
    assert_eq!(server.post(&format!("{path}/messages"), &more).await?.0, 201);
    let answer = only_answer(&server, &ticket).await?;
    assert!(answer.contains("it is unknown whether this call was carried out"), "{answer}");
    assert_eq!(place.service.requests("order-3").len(), 1);
    assert_eq!(effects(&server, issue).await?.len(), 1);
    let (_, shown) = server.get(&path).await?;
    assert_eq!(shown["handed_over"], false, "{shown:#}");
    Ok(())
}

/// The program at the callback may show what it gets to the user.
#[tokio::test(flavor = "multi_thread")]
async fn a_callback_has_no_facts_of_a_tool_call() -> Result<()> {
    let (receiver, url) = Receiver::start().await?;
    let more = format!(
        "[[integration]]\nid = \"anybody\"\nprovider = \"standard\"\nsecret = \"{STANDARD_SECRET}\"\n\
         base_url = \"{url}/hook\"\n"
    );
    let place = ToolDesk::with_settings(UNANSWERED, SQLITE, &more).await?;
    let server = place.serve()?;
    place.service.is_silent_after.store(true, Ordering::SeqCst);
    let body =
        json!({"type": "message", "issue": "7", "data": {"text": "Refund order-3", "user": "ann"}});
    let (status, body) = send(standard(&server, "m-1", now(), body.to_string().as_bytes())).await?;
    assert_eq!(status, 200, "{body}");
    let handed_over =
        || receiver.accepted().into_iter().find(|one| one.body["type"] == "hand_over");
    eventually("the hand-over", || handed_over().is_some()).await?;
    let key = place.service.requests("order-3")[0].0.clone();
    for accepted in receiver.accepted() {
        let sent = accepted.body.to_string();
        assert!(!sent.contains("order-3") && !sent.contains(&key), "{sent}");
    }
    let handed_over = handed_over().context("a hand-over")?;
    assert_eq!(handed_over.content(), "a person has to check a tool call");
    // People of the support team see them.
    let (_, issue) = server.get("/api/v1/issues/1").await?;
    let reason = issue["fields"]["hand_over_reason"].as_str().context("a reason")?;
    assert!(reason.contains("order-3") && reason.contains(&key), "{reason}");
    Ok(())
}

const APPROVALS: &[CallPlan] = &[
    ("order-1", &[("approved", r#"{"order": "order-1"}"#)]),
    ("order-2", &[("approved", r#"{"order": "order-2"}"#)]),
    ("order-3", &[("approved", r#"{"order": "order-3"}"#)]),
    ("order-4", &[("approved", r#"{"order": "order-4"}"#)]),
];

/// Presses "Approve the calls".
async fn approve_on_the_console(server: &Server) -> Result<()> {
    let (ticket, issue) = ask(server, "Refund order-4").await?;
    let draft = planned(server, issue).await?;
    let action = format!("/console/do/drafts/{}/approve", draft["id"]);
    // The console keeps an answer for a second.
    let has_form = |_: u16, page: &Value| page.as_str().is_some_and(|page| page.contains(&action));
    let page = server.until("/console/drafts", has_form).await?;
    // The form of this draft.
    let form = page
        .as_str()
        .context("a page")?
        .split("<form ")
        .find(|form| form.contains(&action))
        .context("a form")?;
    let field = r#"<input type="hidden" name="calls" value="true">"#;
    assert!(form.contains(field) && form.contains("Approve the calls"), "{form}");
    let pressed = server.client.post(server.url(&action)).header("origin", server.url(""));
    let pressed = pressed.header("content-type", "application/x-www-form-urlencoded");
    let pressed = pressed.body(format!("version={}&calls=true", draft["version"]));
    let shown = pressed.send().await?.text().await?;
    assert!(shown.contains("The draft is approved"), "{shown}");
    let answer = only_answer(server, &ticket).await?;
    assert!(answer.contains(r#"{"refunded":"order-4"}"#), "{answer}");
    Ok(())
}

async fn a_call_is_made_once_when_a_person_approves_it(database: &str) -> Result<()> {
    let place = ToolDesk::new(APPROVALS, database).await?;
    let server = place.serve()?;
    let (ticket, issue) = ask(&server, "Refund order-1").await?;
    let draft = planned(&server, issue).await?;
    assert_eq!(draft["calls"], json!([{"tool": "approved", "arguments": {"order": "order-1"}}]));
    assert_eq!(draft["chosen_by"], "approval of `approved`", "{draft:#}");
    let why = format!("/api/v1/tickets/{ticket}/why");
    let why = server.until(&why, |_, why| why["reason"] == "draft").await?;
    assert!(why["sentence"].to_string().contains("wants to call `approved`"), "{why:#}");
    let console = server.client.get(server.url("/console/drafts")).send().await?.text().await?;
    assert!(console.contains("Approve the calls") && console.contains("order-1"), "{console}");
    for (verb, body) in [("edit", json!({"content": "x"})), ("approve", json!({"content": "x"}))] {
        let (status, answer) = decide(&server, &draft, verb, body).await?;
        assert_eq!((status, refused(&answer)), (409, "conflict"), "{verb}: {answer:#}");
    }
    all_idle(&server).await?;
    assert!(place.service.requests("order-1").is_empty(), "nothing is called without an approval");
    let (status, approved) = decide(&server, &draft, "approve", json!({"version": 1})).await?;
    assert_eq!(
        (status, &approved["changed"], &approved["posted"]),
        (200, &json!(true), &Value::Null)
    );
    let answer = only_answer(&server, &ticket).await?;
    assert!(answer.contains(r#"{"refunded":"order-1"}"#), "{answer}");
    let (status, again) = decide(&server, &draft, "approve", json!({})).await?;
    assert_eq!((status, &again["changed"]), (200, &json!(false)));
    assert_eq!(decide(&server, &draft, "reject", json!({})).await?.0, 409);

    // Rejected: the model learns why, and answers without the call.
    let (ticket, issue) = ask(&server, "Refund order-2").await?;
    let draft = planned(&server, issue).await?;
    let reason = json!({"reason": "too late"});
    assert_eq!(decide(&server, &draft, "reject", reason).await?.0, 200);
    let answer = only_answer(&server, &ticket).await?;
    assert!(answer.contains("a person rejected this call: too late"), "{answer}");
    assert_eq!(effects(&server, issue).await?[0]["status"], "rejected");

    // A newer message outdates it, and the new run plans it again.
    let (ticket, issue) = ask(&server, "Refund order-3").await?;
    let first = planned(&server, issue).await?;
    let more = json!({"content": "Please!"});
    assert_eq!(server.post(&format!("/api/v1/tickets/{ticket}/messages"), &more).await?.0, 201);
    let (status, answer) = decide(&server, &first, "approve", json!({})).await?;
    assert_eq!((status, refused(&answer)), (409, "outdated"), "{answer:#}");
    let path = format!("/api/v1/drafts?status=pending&issue_id={issue}");
    let is_new = |_: u16, body: &Value| body["drafts"][0]["id"].as_i64() > first["id"].as_i64();
    let second = server.until(&path, is_new).await?["drafts"][0].clone();
    let at = server.url("");
    let id = second["id"].to_string();
    let output = place.dir.run(&["draft", "approve", &id, "--url", &at])?;
    assert!(text(&output.stdout).contains("its tool calls are made"), "{}", text(&output.stderr));
    only_answer(&server, &ticket).await?;
    approve_on_the_console(&server).await?;

    assert!(place.service.requests("order-2").is_empty());
    for order in ["order-1", "order-3", "order-4"] {
        assert_eq!(place.service.requests(order).len(), 1, "{order}");
    }
    let output = place.dir.run(&["effect", "list", "--json", "--url", &at])?;
    assert_eq!(text(&output.stdout).lines().count(), 4, "{}", text(&output.stdout));
    let number = effects(&server, issue).await?[0]["id"].to_string();
    let output = place.dir.run(&["effect", "show", &number, "--url", &at])?;
    assert!(text(&output.stdout).contains("order-3"), "{}", text(&output.stdout));

    // The data of the user.
    let output = place.dir.run(&["export", "--user", "ada", "--url", &at])?;
    assert_eq!(text(&output.stdout).matches("\"effect\":").count(), 4, "{}", text(&output.stdout));
    let output = place.dir.run(&["erase", "--user", "ada", "--yes", "--url", &at])?;
    assert!(output.status.success(), "{}", text(&output.stderr));
    let (_, page) = server.get("/api/v1/effects").await?;
    assert_eq!(page["effects"], json!([]), "{page:#}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_is_made_once_when_a_person_approves_it_on_sqlite() -> Result<()> {
    a_call_is_made_once_when_a_person_approves_it(SQLITE).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_is_made_once_when_a_person_approves_it_on_postgres() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    a_call_is_made_once_when_a_person_approves_it(&database.url()).await
}

const DOWN: &[CallPlan] = &[
    ("down-0", &[("repeated", r#"{"order": "down-0"}"#)]),
    ("down-1", &[("repeated", r#"{"order": "down-1"}"#)]),
    ("down-2", &[("repeated", r#"{"order": "down-2"}"#)]),
    ("down-3", &[("repeated", r#"{"order": "down-3"}"#)]),
    ("down-4", &[("repeated", r#"{"order": "down-4"}"#)]),
    ("down-5", &[("repeated", r#"{"order": "down-5"}"#)]),
    ("read-0", &[("never", "{}")]),
    ("read-1", &[("never", "{}")]),
    ("read-2", &[("never", "{}")]),
    ("read-3", &[("never", "{}")]),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_that_does_not_respond_holds_no_slots_and_its_calls_continue_by_themselves()
-> Result<()> {
    let desk = ToolDesk::new(DOWN, SQLITE).await?;
    // One slot: a call that waits for the tool would delay every other issue.
    let server = desk.serve_with(&["--worker-concurrency", "1"])?;
    desk.service.is_silent_before.store(true, Ordering::SeqCst);
    let mut stuck = Vec::new();
    for number in 0..3 {
        let order = format!("down-{number}");
        stuck.push((order.clone(), ask(&server, &order).await?));
        eventually("the call", || !desk.service.requests(&order).is_empty()).await?;
    }
    server.wait_for_log("tool calls stopped")?;
    // Three issues have failed: for others the tool is not called, and the model is told so.
    for number in 3..6 {
        let order = format!("down-{number}");
        let (ticket, issue) = ask(&server, &order).await?;
        let shown = answered(&server, &ticket, 1).await?;
        assert!(shown.to_string().contains("the tool does not respond"), "{shown:#}");
        assert!(desk.service.requests(&order).is_empty(), "{order}");
        assert!(effects(&server, issue).await?.is_empty(), "nothing was begun");
    }
    // The same for a tool that only reads; the others work.
    for number in 0..4 {
        let (ticket, _) = ask(&server, &format!("read-{number}")).await?;
        let shown = answered(&server, &ticket, 1).await?.to_string();
        let expected =
            if number < 3 { "no response within 500ms" } else { "the tool does not respond" };
        assert!(shown.contains(expected), "{number}: {shown}");
    }
    let metrics = server.client.get(server.url("/metrics")).send().await?.text().await?;
    let stopped = r#"headwater_tool_calls_total{tool="never",result="stopped"} 1"#;
    assert!(metrics.contains(stopped), "{metrics}");

    // It works again: the calls without an outcome are made, with their keys.
    desk.service.is_silent_before.store(false, Ordering::SeqCst);
    for (order, (ticket, issue)) in stuck {
        let answer = only_answer(&server, &ticket).await?;
        assert!(answer.contains(&order), "{order}: {answer}");
        let requests = desk.service.requests(&order);
        assert!(requests.iter().all(|(key, _)| *key == requests[0].0), "{requests:?}");
        assert_eq!(desk.service.done(&order), 1, "{order}");
        assert_eq!(effects(&server, issue).await?[0]["status"], "done", "{order}");
    }
    server.wait_for_log("tool works again")?;
    Ok(())
}

const CLOSED_PORT: &[CallPlan] = &[
    ("order-0", &[("closed", "{}")]),
    ("order-1", &[("closed", "{}")]),
    ("order-2", &[("closed", "{}")]),
    ("order-3", &[("closed", "{}")]),
    ("order-4", &[("closed", "{}")]),
    ("order-5", &[("closed", "{}")]),
    ("order-6", &[("closed", "{}")]),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_that_cannot_be_reached_is_not_called_any_more() -> Result<()> {
    // Reserved until the test ends, so that nothing listens there.
    let port = Port::for_server()?;
    let tool = format!(
        "[[tool]]\nname = \"closed\"\ndescription = \"A closed port.\"\nmethod = \"POST\"\n\
         url = \"http://{}/\"\n",
        port.address()
    );
    let desk = ToolDesk::with_settings(CLOSED_PORT, SQLITE, &tool).await?;
    let server = desk.serve()?;
    for number in 0..CLOSED_PORT.len() {
        let (ticket, issue) = ask(&server, &format!("order-{number}")).await?;
        let answer = only_answer(&server, &ticket).await?;
        let effects = effects(&server, issue).await?;
        let is_called = !effects.is_empty();
        assert_eq!(answer.contains("the tool does not respond"), !is_called, "{number}: {answer}");
        assert!(is_called || number >= 3, "{number}: {effects:#?}");
        if !is_called {
            return Ok(());
        }
        // After each pause one call is tried. The pauses become longer, so that a slow machine, too, asks within one.
    }
    bail!("the tool is still called")
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_model_writes_beside_calls_that_are_refused_at_the_limit_is_not_posted() -> Result<()>
{
    let (model, url) = FakeModel::open((5, 5)).await?;
    let search = ModelFault::Call("search_tickets", r#"{"query":"x"}"#);
    let beside: ModelFault =
        ModelFault::PiecesAndCall(&["Let me look again."], "search_tickets", r#"{"query":"y"}"#);
    let answer = ModelFault::Finish("Here is your answer.", "stop");
    model.plan("case-late", &[search, search, search, search, beside, answer]);
    model.plan("case-never", &[search, search, search, search, beside, beside]);
    model.write(100);
    let given = ["--model-url", &url, "--model-name", "m", "--issue-quiet", "10ms"];
    let place = ServerDir::new()?;
    let server = place.serve(&[&given[..], &["--analytics-path", ""]].concat())?;
    let (ticket, _) = ask(&server, "case-late").await?;
    assert_eq!(only_answer(&server, &ticket).await?, "Here is your answer.");
    let last = model.requests("case-late").pop().context("a request")?.body.to_string();
    assert!(last.contains("no more calls are possible"), "{last}");
    let (ticket, _) = ask(&server, "case-never").await?;
    let answer = only_answer(&server, &ticket).await?;
    assert!(answer.contains("A person will take over"), "{answer}");
    let path = format!("/api/v1/tickets/{ticket}");
    server.until(&path, |_, shown| shown["handed_over"] == true).await?;
    Ok(())
}

#[test]
fn invalid_tools_are_rejected_at_the_start() -> Result<()> {
    let valid = "name = \"t\"\ndescription = \"d\"\nurl = \"https://h.example/{order}\"\n\
         parameters = '{\"type\": \"object\", \"properties\": {\"order\": {}}}'\n";
    for (tool, expected) in [
        (valid.replace("\"t\"", "\"a b\""), "invalid name `a b`"),
        (valid.replace("\"t\"", "\"hand_over\""), "`hand_over` is the name of a built-in tool"),
        (format!("{valid}[[tool]]\n{valid}"), "duplicate name `t`"),
        (valid.replace("{order}", "{other}"), "unknown variable `other`"),
        (valid.replace("{\"order\": {}}", "{"), "invalid `parameters`: not JSON"),
        (valid.replace("\"object\"", "\"string\""), "its `type` must be `object`"),
        (valid.replace("{\"order\": {}}", "{\"order\": {\"type\": 7}}"), "invalid `parameters`"),
        (
            valid.replace("{\"order\": {}}", "{\"order\": {\"$ref\": \"file:///etc/passwd\"}}"),
            "invalid `parameters`",
        ),
        (valid.replace("https://h", "https://{order}"), "its host must be fixed"),
        (
            format!("{valid}allowed_hosts = [\"other.example\"]"),
            "`h.example` is not in `allowed_hosts`",
        ),
        (
            format!("{valid}lookup_url = \"https://other.example/\""),
            "`other.example` is not in `allowed_hosts`",
        ),
        (format!("{valid}method = \"BREW\""), "invalid `method`"),
        (format!("{valid}timeout = \"2m\""), "invalid `timeout`"),
        (format!("{valid}timeout = \"soon\""), "invalid `timeout` `soon`"),
        (format!("{valid}response_bytes_max = 70000"), "invalid `response_bytes_max`"),
        (format!("{valid}integrations = [\"hub\"]"), "unknown integration `hub`"),
        (format!("{valid}idempotency_header = \"a b\""), "not the name of a header"),
        (format!("{valid}colour = \"red\""), "unknown field `colour`"),
        (format!("{valid}[[tool.header]]\nname = \"A\""), "header `A` has no value"),
        (format!("{valid}body = {{ x = \"{{other}}\" }}"), "invalid `body`: unknown variable"),
    ] {
        let output = ServerDir::new()?.settings(&format!("[[tool]]\n{tool}"))?.run(&["config"])?;
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{tool}: {error}");
        assert!(error.contains(expected), "{tool}: {error}");
    }
    let place = ServerDir::new()?.settings(&format!("[[tool]]\n{valid}"))?;
    let output = place.run(&["config"])?;
    assert!(
        text(&output.stdout).contains("[[tool]] name=t changes=false approval=false"),
        "{}",
        text(&output.stderr)
    );
    // A server needs the secrets.
    let header =
        format!("[[tool]]\n{valid}[[tool.header]]\nname = \"A\"\nsecret_env = \"NOT_SET\"\n");
    let output = ServerDir::new()?.settings(&header)?.run(&["serve"])?;
    assert!(text(&output.stderr).contains("`NOT_SET`"), "{}", text(&output.stderr));
    Ok(())
}
