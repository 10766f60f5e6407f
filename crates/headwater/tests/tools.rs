//! Tools of the desk on the real binary: what they may call, what the model is told, and that every effect happens once,
//! whenever the process is killed.

mod support;

use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use headwater_testkit::{Database, Postgres};
use serde_json::{Value, json};

use crate::support::desk::{all_idle, answered};
use crate::support::tool_desk::{
    SQLITE, ToolDesk, ask, decide, effects, end_sessions, only_answer, planned,
};
use crate::support::tool_service::CallPlan;
use crate::support::{ServerDir, eventually, text};

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
    let (ticket, _) = ask(&server, "Where is it?").await?;
    let answer = only_answer(&server, &ticket).await?;
    assert!(
        answer.contains(r#"{"ok":true,"result":{"status":"sent \u003cyesterday\u003e"}}"#),
        "{answer}"
    );
    let reads = place.service.reads();
    assert_eq!(reads.len(), 1, "{reads:?}");
    assert_eq!(reads[0].0, "/orders/a%2F..%2Fb?user=ada");
    assert_eq!(reads[0].1["authorization"], "Bearer a shop token");
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

const APPROVALS: &[CallPlan] = &[
    ("order-1", &[("approved", r#"{"order": "order-1"}"#)]),
    ("order-2", &[("approved", r#"{"order": "order-2"}"#)]),
    ("order-3", &[("approved", r#"{"order": "order-3"}"#)]),
];

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

    assert!(place.service.requests("order-2").is_empty());
    for order in ["order-1", "order-3"] {
        assert_eq!(place.service.requests(order).len(), 1, "{order}");
    }
    let output = place.dir.run(&["effect", "list", "--json", "--url", &at])?;
    assert_eq!(text(&output.stdout).lines().count(), 3, "{}", text(&output.stdout));
    let number = effects(&server, issue).await?[0]["id"].to_string();
    let output = place.dir.run(&["effect", "show", &number, "--url", &at])?;
    assert!(text(&output.stdout).contains("order-3"), "{}", text(&output.stdout));

    // The data of the user.
    let output = place.dir.run(&["export", "--user", "ada", "--url", &at])?;
    assert_eq!(text(&output.stdout).matches("\"effect\":").count(), 3, "{}", text(&output.stdout));
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
