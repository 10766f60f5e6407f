//! Approved tool calls that cannot be made at once: they wait for a limited time, and never beyond the next message of the user.
//! None holds back another one, and a person is told about each that was not made.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::support::model::{FakeModel, ModelFault};
use crate::support::tool_desk::{SQLITE, ToolDesk, ask, decide, effects, only_answer, planned};
use crate::support::tool_service::CallPlan;
use crate::support::{Server, eventually, text};

/// What the service of the tool `switched` does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServiceMode {
    Works,
    /// Responds with an error.
    Fails,
    /// Does not respond before the mode changes.
    Holds,
}

/// The service of the tool `switched`.
#[derive(Clone)]
struct SwitchedService {
    mode: Arc<watch::Sender<ServiceMode>>,
    /// The orders of all requests, and whether they were carried out.
    requests: Arc<Mutex<Vec<(String, bool)>>>,
    /// How many requests it did not respond to at once.
    held: Arc<AtomicUsize>,
}

impl SwitchedService {
    /// Starts it; returns it and the settings of its tool, whose timeout is the longest possible one.
    async fn start() -> Result<(Self, String)> {
        let mode = Arc::new(watch::Sender::new(ServiceMode::Works));
        let service = Self { mode, requests: Arc::default(), held: Arc::default() };
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let tool = format!(
            "[[tool]]\nname = \"switched\"\ndescription = \"Refunds an order.\"\nmethod = \"POST\"\nurl = \"http://{}/\"\n\
             parameters = {{ type = \"object\", properties = {{ order = {{ type = \"string\" }} }} }}\n\
             timeout = \"60s\"\nidempotency_header = \"Idempotency-Key\"\napproval = true\n",
            listener.local_addr()?
        );
        let router = Router::new().route("/", post(refund)).with_state(service.clone());
        // Stops with the runtime of the test.
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok((service, tool))
    }

    fn switch(&self, mode: ServiceMode) {
        self.mode.send_replace(mode);
    }

    /// Requests for an order, and how many were carried out.
    fn requests(&self, order: &str) -> (usize, usize) {
        let requests = self.requests.lock().expect("no panic");
        let of_order = requests.iter().filter(|(one, _)| one == order);
        (of_order.clone().count(), of_order.filter(|(_, is_done)| *is_done).count())
    }
}

async fn refund(State(service): State<SwitchedService>, Json(body): Json<Value>) -> Response {
    let order = body["order"].as_str().unwrap_or_default().to_owned();
    let number = {
        let mut requests = service.requests.lock().expect("no panic");
        requests.push((order.clone(), false));
        requests.len() - 1
    };
    let mut mode = service.mode.subscribe();
    if *mode.borrow_and_update() == ServiceMode::Holds {
        service.held.fetch_add(1, Ordering::SeqCst);
    }
    let mode = mode.wait_for(|mode| *mode != ServiceMode::Holds).await.map(|mode| *mode);
    if mode.is_ok_and(|mode| mode == ServiceMode::Fails) {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    service.requests.lock().expect("no panic")[number].1 = true;
    (StatusCode::CREATED, Json(json!({"refunded": order}))).into_response()
}

const CALLS: &[CallPlan] = &[
    ("order-0", &[("switched", r#"{"order": "order-0"}"#)]),
    ("order-1", &[("switched", r#"{"order": "order-1"}"#)]),
    ("order-2", &[("switched", r#"{"order": "order-2"}"#)]),
    // The model asks for it again when it learns that it was not made.
    (
        "order-3",
        &[("switched", r#"{"order": "order-3"}"#), ("switched", r#"{"order": "order-3"}"#)],
    ),
    ("order-4", &[("switched", r#"{"order": "order-4"}"#)]),
    ("order-5", &[("approved", r#"{"order": "order-5"}"#)]),
];

async fn approve(server: &Server, draft: &Value) -> Result<()> {
    assert_eq!(decide(server, draft, "approve", json!({})).await?.0, 200);
    Ok(())
}

/// Waits until the call of a tool for an issue has this status, and this text in its problem; returns the call.
async fn call_with(
    server: &Server,
    (issue, tool): (i64, &str),
    (status, problem): (&str, &str),
) -> Result<Value> {
    let path = format!("/api/v1/effects?issue_id={issue}&tool={tool}");
    let is_found = |_: u16, page: &Value| {
        let effect = &page["effects"][0];
        effect["status"] == status && effect["problem"].to_string().contains(problem)
    };
    Ok(server.until(&path, is_found).await?["effects"][0].clone())
}

/// Makes the approval of a waiting call older than the time that it may wait.
async fn let_expire(desk: &ToolDesk, (issue, tool): (i64, &str)) -> Result<()> {
    let older = format!(
        "UPDATE tool_effects SET created_at = created_at - 3600001
         WHERE status = 'approved' AND issue_id = {issue} AND tool = '{tool}'"
    );
    change_row(desk, older).await
}

/// Changes one row in the database of the desk.
async fn change_row(desk: &ToolDesk, update: String) -> Result<()> {
    let file = desk.dir.path().join("headwater-data").join("headwater.db");
    let options = SqliteConnectOptions::new().filename(file).busy_timeout(Duration::from_secs(10));
    let mut connection = options.connect().await?;
    let changed = sqlx::query(AssertSqlSafe(update.clone())).execute(&mut connection).await?;
    assert_eq!(changed.rows_affected(), 1, "{update}");
    Ok(connection.close().await?)
}

/// Handles an issue now, instead of after the pause of its deferred run.
async fn retry(server: &Server, issue: i64) -> Result<()> {
    server.post(&format!("/api/v1/issues/{issue}/retry"), &json!({})).await.map(drop)
}

async fn write(server: &Server, ticket: &str, content: &str) -> Result<()> {
    let path = format!("/api/v1/tickets/{ticket}/messages");
    assert_eq!(server.post(&path, &json!({"content": content})).await?.0, 201);
    Ok(())
}

/// Waits until a ticket is handed over; returns the reason.
async fn hand_over_reason(server: &Server, ticket: &str) -> Result<String> {
    let path = format!("/api/v1/tickets/{ticket}");
    let shown = server.until(&path, |_, shown| shown["handed_over"] == true).await?;
    Ok(shown["hand_over_reason"].as_str().context("a reason")?.to_owned())
}

/// Starts a process that does not know these tools, as in a rolling deploy.
fn serve_without(desk: &ToolDesk, tools: &[&str]) -> Result<Server> {
    let settings = desk.dir.path().join("headwater.toml");
    let known = std::fs::read_to_string(&settings)?;
    let renamed = tools.iter().fold(known.clone(), |text, tool| {
        text.replace(&format!("name = \"{tool}\""), &format!("name = \"other_{tool}\""))
    });
    std::fs::write(&settings, renamed)?;
    let server = desk.serve()?;
    std::fs::write(&settings, known)?;
    Ok(server)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_approved_call_of_a_tool_that_does_not_respond_waits_for_a_limited_time() -> Result<()> {
    let (service, tool) = SwitchedService::start().await?;
    let desk = ToolDesk::with_settings(CALLS, SQLITE, &tool).await?;
    let server = desk.serve()?;
    let mut asked = Vec::new();
    for number in 0..5 {
        let (ticket, issue) = ask(&server, &format!("Refund order-{number}")).await?;
        asked.push((ticket, issue, planned(&server, issue).await?));
    }
    // Three issues show that the tool fails.
    service.switch(ServiceMode::Fails);
    for (_, _, draft) in &asked[..3] {
        approve(&server, draft).await?;
    }
    for (_, issue, _) in &asked[..3] {
        call_with(&server, (*issue, "switched"), ("started", "status 500")).await?;
    }
    server.wait_for_log("tool calls stopped")?;
    // While one of them tests the tool, no other call is made, however long this test takes.
    service.switch(ServiceMode::Holds);
    eventually("the test", || service.held.load(Ordering::SeqCst) == 1).await?;
    let (ticket, issue, draft) = asked[3].clone();
    let (expired, issue_of_expired, draft_of_expired) = asked[4].clone();
    approve(&server, &draft).await?;
    approve(&server, &draft_of_expired).await?;
    let waits = ("approved", "the tool does not respond");
    call_with(&server, (issue_of_expired, "switched"), waits).await?;

    // The user writes again before the tool responds: the approval is void, and the model asks for another one.
    let effect = call_with(&server, (issue, "switched"), waits).await?;
    let (number, at) = (effect["id"].to_string(), server.url(""));
    let output = desk.dir.run(&["effect", "show", &number, "--url", &at])?;
    assert!(text(&output.stdout).contains("the tool does not respond"), "{output:?}");
    write(&server, &ticket, "Stop, wait!").await?;
    retry(&server, issue).await?;
    let second = planned(&server, issue).await?;
    let all = effects(&server, issue).await?;
    assert_eq!((all.len(), &all[0]["status"]), (1, &json!("failed")), "{all:#?}");
    assert!(all[0].to_string().contains("the user wrote again"), "{all:#?}");

    // Nobody writes: after an hour a person gets the facts.
    // Also if the ticket was handed over for another reason before.
    let hand_over = format!(
        "UPDATE tickets SET handed_over = 1, hand_over_reason = 'a draft is overdue' WHERE issue_id = {issue_of_expired}"
    );
    change_row(&desk, hand_over).await?;
    let_expire(&desk, (issue_of_expired, "switched")).await?;
    retry(&server, issue_of_expired).await?;
    let shown = format!("/api/v1/tickets/{expired}");
    let has_facts = |_: u16, shown: &Value| {
        let reason = shown["hand_over_reason"].as_str().unwrap_or_default();
        ["a draft is overdue. Also: ", "order-4", "approved by", "not made"]
            .iter()
            .all(|fact| reason.contains(fact))
    };
    server.until(&shown, has_facts).await?;
    assert_eq!(effects(&server, issue_of_expired).await?[0]["status"], "failed");

    // It works again. Only what is approved again is called.
    service.switch(ServiceMode::Works);
    for (number, (ticket, ..)) in asked[..3].iter().enumerate() {
        only_answer(&server, ticket).await.with_context(|| server.log())?;
        assert_eq!(service.requests(&format!("order-{number}")).1, 1, "{number}");
    }
    assert_eq!(service.requests("order-3"), (0, 0), "its approval is void");
    approve(&server, &second).await?;
    let answer = only_answer(&server, &ticket).await?;
    assert!(answer.contains(r#"{"refunded":"order-3"}"#), "{answer}");
    assert_eq!(service.requests("order-3"), (1, 1));
    assert_eq!(service.requests("order-4"), (0, 0));
    let all = effects(&server, issue).await?;
    assert_eq!((all.len(), &all[0]["status"]), (1, &json!("done")), "{all:#?}");
    Ok(())
}

/// A desk whose model calls the tools `approved` and `switched` in one answer when a user writes one of these words.
async fn desk_with_two_calls(
    words: &[&'static str],
) -> Result<(ToolDesk, FakeModel, SwitchedService)> {
    let (service, tool) = SwitchedService::start().await?;
    let (model, url) = FakeModel::open((5, 5)).await?;
    for &word in words {
        let call = |index: usize, name: &str| {
            let function = json!({"name": name, "arguments": json!({"order": word}).to_string()});
            json!({"index": index, "id": format!("c{index}"), "function": function})
        };
        let delta = json!({"tool_calls": [call(0, "approved"), call(1, "switched")]});
        let chunk = json!({"choices": [{"delta": delta, "finish_reason": "tool_calls"}]});
        let body: &str = format!("data: {chunk}\n\ndata: [DONE]\n\n").leak();
        model.plan(word, &[ModelFault::Respond(200, "text/event-stream", body)]);
    }
    let mut desk = ToolDesk::with_settings(&[], SQLITE, &tool).await?;
    desk.dir = desk.dir.variable("HEADWATER_MODEL_URL", &url);
    Ok((desk, model, service))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_approved_call_does_not_wait_for_another_one_of_its_draft() -> Result<()> {
    let (desk, model, service) = desk_with_two_calls(&["pair-0"]).await?;
    let mut server = desk.serve()?;
    let (ticket, issue) = ask(&server, "Refund pair-0").await?;
    let draft = planned(&server, issue).await?;
    assert_eq!(draft["calls"].as_array().map(Vec::len), Some(2), "{draft:#}");
    server.kill9()?;

    // The first call has to wait, and the second one is made at once.
    let server = serve_without(&desk, &["approved"])?;
    approve(&server, &draft).await?;
    call_with(&server, (issue, "switched"), ("done", "")).await?;
    assert_eq!(service.requests("pair-0"), (1, 1));
    call_with(&server, (issue, "approved"), ("approved", "not configured any more")).await?;

    // The user writes: what was not made is not made any more, and the model knows what was.
    write(&server, &ticket, "Stop, wait!").await?;
    retry(&server, issue).await?;
    assert_eq!(only_answer(&server, &ticket).await?, FakeModel::ANSWER);
    let call = call_with(&server, (issue, "approved"), ("failed", "null")).await?;
    assert!(call.to_string().contains("the user wrote again"), "{call:#}");
    assert_eq!(service.requests("pair-0"), (1, 1));
    assert!(desk.service.requests("pair-0").is_empty());
    let told = model.requests("Stop, wait!").pop().context("a request")?.body;
    let told = told["messages"].as_array().cloned().context("messages")?;
    let told: Vec<&str> = told
        .iter()
        .filter(|message| message["role"] == "tool")
        .filter_map(|message| message["content"].as_str())
        .collect();
    assert_eq!(told.len(), 2, "{told:#?}");
    assert!(told[0].contains("the user wrote again"), "{told:#?}");
    // The result of an earlier run has its time.
    let outcome: Value = serde_json::from_str(told[1])?;
    assert_eq!(outcome["result"], json!({"refunded": "pair-0"}), "{outcome:#}");
    let done = call_with(&server, (issue, "switched"), ("done", "")).await?;
    assert_eq!(outcome["at"], done["ended_at"], "{outcome:#} {done:#}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_approved_call_for_which_a_run_has_no_time_is_not_made_after_the_next_message()
-> Result<()> {
    let (mut desk, _model, service) = desk_with_two_calls(&["pair-3"]).await?;
    // Less than three calls of the tool `switched` may take.
    desk.dir = desk.dir.variable("HEADWATER_WORKER_DEADLINE", "100s");
    let mut server = desk.serve()?;
    let (ticket, issue) = ask(&server, "Refund pair-3").await?;
    let draft = planned(&server, issue).await?;
    server.kill9()?;
    let server = serve_without(&desk, &["approved"])?;
    approve(&server, &draft).await?;
    // The first call waits, so the second one is left to another run.
    call_with(&server, (issue, "approved"), ("approved", "not configured any more")).await?;
    call_with(&server, (issue, "switched"), ("approved", "no time is left")).await?;
    write(&server, &ticket, "Stop, wait!").await?;
    retry(&server, issue).await?;
    for tool in ["approved", "switched"] {
        let call = call_with(&server, (issue, tool), ("failed", "null")).await?;
        assert!(call.to_string().contains("the user wrote again"), "{call:#}");
    }
    assert_eq!(service.requests("pair-3"), (0, 0));
    assert!(desk.service.requests("pair-3").is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_person_is_told_about_every_approved_call_that_was_not_made() -> Result<()> {
    let (desk, _model, service) = desk_with_two_calls(&["pair-1", "pair-2"]).await?;
    let mut server = desk.serve()?;
    let mut asked = Vec::new();
    for word in ["pair-1", "pair-2"] {
        let (ticket, issue) = ask(&server, &format!("Refund {word}")).await?;
        asked.push((ticket, issue, planned(&server, issue).await?));
    }
    server.kill9()?;
    let server = serve_without(&desk, &["approved", "switched"])?;
    for (_, issue, draft) in &asked {
        approve(&server, draft).await?;
        let waits = ("approved", "not configured any more");
        call_with(&server, (*issue, "approved"), waits).await?;
    }
    let is_complete = |reason: &str| {
        ["tool `approved`", "tool `switched`"].iter().all(|tool| reason.contains(tool))
    };

    // Both expire at the same time.
    let (ticket, issue, _) = &asked[0];
    let_expire(&desk, (*issue, "approved")).await?;
    let_expire(&desk, (*issue, "switched")).await?;
    retry(&server, *issue).await?;
    let reason = hand_over_reason(&server, ticket).await?;
    assert!(is_complete(&reason), "{reason}");

    // The second one still waits in the run in which the first one expires.
    let (ticket, issue, _) = &asked[1];
    let_expire(&desk, (*issue, "approved")).await?;
    retry(&server, *issue).await?;
    call_with(&server, (*issue, "approved"), ("failed", "")).await?;
    let_expire(&desk, (*issue, "switched")).await?;
    retry(&server, *issue).await?;
    let reason = hand_over_reason(&server, ticket).await?;
    assert!(is_complete(&reason), "{reason}");
    for word in ["pair-1", "pair-2"] {
        assert_eq!(service.requests(word), (0, 0), "{word}");
        assert!(desk.service.requests(word).is_empty(), "{word}");
    }
    Ok(())
}

/// As in a rolling deploy: a process with other settings handles the issue.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_does_not_know_a_tool_leaves_its_approved_call_to_others() -> Result<()> {
    let desk = ToolDesk::new(CALLS, SQLITE).await?;
    let mut server = desk.serve()?;
    let (ticket, issue) = ask(&server, "Refund order-5").await?;
    let draft = planned(&server, issue).await?;
    server.kill9()?;
    let mut other = serve_without(&desk, &["approved"])?;
    approve(&other, &draft).await?;
    call_with(&other, (issue, "approved"), ("approved", "not configured any more")).await?;
    other.kill9()?;
    let server = desk.serve()?;
    retry(&server, issue).await?;
    let answer = only_answer(&server, &ticket).await?;
    assert!(answer.contains(r#"{"refunded":"order-5"}"#), "{answer}");
    assert_eq!(desk.service.requests("order-5").len(), 1);
    Ok(())
}
