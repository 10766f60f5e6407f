//! A faulty HTTP model, and token budgets, through the real binary.

mod support;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use headwater_testkit::WallClock;
use serde_json::{Value, json};

use crate::support::desk::{all_idle, answered, by, open};
use crate::support::model::{FakeModel, ModelFault};
use crate::support::{Server, ServerDir, eventually};

fn id(created: &Value) -> Result<String> {
    Ok(created["ticket_id"].as_str().context("a ticket")?.to_owned())
}

/// Starts a desk with this model.
fn desk(place: &ServerDir, url: &str, more: &[&str]) -> Result<Server> {
    let model = ["--model-url", url, "--model-name", "test-model"];
    let quick = ["--issue-quiet", "10ms", "--sweep-every", "200ms"];
    place.serve(&[&model[..], &quick, more].concat())
}

// The fake model runs on the runtime of the test.
#[tokio::test(flavor = "multi_thread")]
async fn each_ticket_gets_one_complete_answer_despite_model_faults() -> Result<()> {
    let (model, url) = FakeModel::open((5, 5)).await?;
    let plans: [(&str, &[ModelFault]); 8] = [
        ("case-plain", &[]),
        ("case-busy", &[ModelFault::RateLimit(2)]),
        // The last pause is longer than the model timeout: the issue is deferred.
        (
            "case-often-busy",
            &[
                ModelFault::RateLimit(0),
                ModelFault::RateLimit(0),
                ModelFault::RateLimit(1),
                ModelFault::RateLimit(3),
            ],
        ),
        ("case-fails", &[ModelFault::ServerError]),
        ("case-often-fails", &[ModelFault::ServerError; 6]),
        ("case-stalls", &[ModelFault::Stall]),
        ("case-falls-silent", &[ModelFault::StallMidAnswer, ModelFault::StallMidAnswer]),
        (
            "case-hangs-up",
            &[ModelFault::HangUpMidAnswer, ModelFault::ServerError, ModelFault::Stall],
        ),
    ];
    for (word, faults) in plans {
        model.plan(word, faults);
    }
    let place = ServerDir::new()?;
    let server = desk(&place, &url, &["--model-idle-timeout", "2s"])?;
    let mut tickets = Vec::new();
    for (word, faults) in plans {
        let created = open(&server, &format!("This is {word}.")).await?;
        tickets.push((id(&created)?, word, faults.len()));
    }
    for (ticket, ..) in &tickets {
        answered(&server, ticket, 1).await?;
    }
    all_idle(&server).await?;
    for (ticket, word, failures) in &tickets {
        let shown = answered(&server, ticket, 1).await?;
        assert_eq!(by(&shown, "assistant"), [FakeModel::ANSWER], "{word}: {shown:#}");
        let requests = model.requests(&format!("{word}."));
        assert!(requests.len() > *failures, "{word}: {} requests", requests.len());
        for request in requests {
            assert_eq!(request.body["stream"], true);
            assert_eq!(request.body["model"], "test-model");
        }
    }
    let busy = model.requests("case-busy.");
    let waited = busy[1].at.duration_since(busy[0].at);
    assert!(waited >= Duration::from_secs(2), "Retry-After is honoured: {waited:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_the_model_or_an_expired_key_quarantines_no_issue() -> Result<()> {
    let (model, url) = FakeModel::open((5, 5)).await?;
    let denied =
        "{\"error\":{\"message\":\"Incorrect API key provided\",\"code\":\"invalid_api_key\"}}";
    // Eight responses are two runs of four attempts each.
    model.plan("case-outage", &[ModelFault::ServerError; 8]);
    model.plan("case-key", &[ModelFault::Respond(401, "application/json", denied); 2]);
    let place = ServerDir::new()?;
    // The first counted attempt would quarantine an issue.
    let server = desk(&place, &url, &["--worker-attempts", "1"])?;
    // One after the other: together, their failures would add up to long pauses of the breaker.
    for word in ["case-outage", "case-key"] {
        let ticket = id(&open(&server, &format!("This is {word}.")).await?)?;
        let shown = answered(&server, &ticket, 1).await?;
        assert_eq!(by(&shown, "assistant"), [FakeModel::ANSWER], "{shown:#}");
    }
    all_idle(&server).await?;
    let (_, quarantined) = server.get("/api/v1/issues?quarantined=true").await?;
    assert_eq!(quarantined["issues"], json!([]));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_a_day_quarantines_nothing_and_every_ticket_is_answered_once_after_it()
-> Result<()> {
    let clock = WallClock::start()?;
    let (model, url) = FakeModel::open((5, 5)).await?;
    model.plan("case-day", &[ModelFault::ServerError; 1000]);
    let mut place = ServerDir::new()?;
    for (name, value) in clock.environment() {
        place = place.variable(&name, &value);
    }
    // The first counted attempt would quarantine an issue.
    let server = desk(&place, &url, &["--worker-attempts", "1", "--analytics-path", ""])?;
    let mut tickets = Vec::new();
    for number in 1..=3 {
        tickets.push(id(&open(&server, &format!("This is case-day {number}.")).await?)?);
    }
    let quarantined = "/api/v1/issues?quarantined=true";
    for hour in 1..=24 {
        let requests = model.requests("case-day").len();
        clock.set(hour * 3600)?;
        // Only now and then: the breaker waits longer from failure to failure, in real time.
        if matches!(hour, 1 | 12) {
            eventually("a call", || model.requests("case-day").len() > requests).await?;
        }
        assert_eq!(server.get(quarantined).await?.1["issues"], json!([]), "hour {hour}");
    }
    model.plan("case-day", &[]);
    for ticket in &tickets {
        answered(&server, ticket, 1).await?;
    }
    all_idle(&server).await?;
    for ticket in &tickets {
        let shown = answered(&server, ticket, 1).await?;
        assert_eq!(by(&shown, "assistant"), [FakeModel::ANSWER], "{shown:#}");
    }
    assert_eq!(server.get(quarantined).await?.1["issues"], json!([]));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_issue_over_its_token_budget_is_handed_over() -> Result<()> {
    // One answer uses most of the issue budget.
    let (model, url) = FakeModel::open((9_000, 500)).await?;
    let place = ServerDir::new()?;
    let server = desk(&place, &url, &["--desk-issue-tokens-max", "10000"])?;
    let ticket = id(&open(&server, "first question").await?)?;
    let shown = answered(&server, &ticket, 1).await?;
    assert_eq!(shown["handed_over"], false);

    let path = format!("/api/v1/tickets/{ticket}");
    let (status, _) =
        server.post(&format!("{path}/messages"), &json!({"content": "second question"})).await?;
    assert_eq!(status, 201);
    let shown = server.until(&path, |_, shown| shown["handed_over"] == true).await?;
    let answers = by(&shown, "assistant");
    assert_eq!(answers.len(), 2, "{shown:#}");
    assert!(answers[1].contains("A person will take over"), "{shown:#}");
    assert!(
        model.requests("second question").is_empty(),
        "no model call after the budget is used up"
    );

    // Another issue has its own budget.
    let other = id(&open(&server, "third question").await?)?;
    assert_eq!(by(&answered(&server, &other, 1).await?, "assistant"), [FakeModel::ANSWER]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_daily_token_budget_is_used_up_tickets_wait_and_none_is_lost() -> Result<()> {
    let (model, url) = FakeModel::open((19_000, 500)).await?;
    let place = ServerDir::new()?;
    let mut server = desk(&place, &url, &["--desk-day-tokens-max", "20000"])?;
    let first = id(&open(&server, "first question").await?)?;
    answered(&server, &first, 1).await?;

    let second = open(&server, "second question").await?;
    let issue = format!("/api/v1/issues/{}", second["issue_id"]);
    let is_waiting = |_: u16, issue: &Value| {
        issue["last_error"].as_str().is_some_and(|error| error.contains("daily token budget"))
    };
    let shown = server.until(&issue, is_waiting).await?;
    assert_eq!(
        (&shown["processing_status"], &shown["pending_events"]),
        (&json!("queued"), &json!(1))
    );
    assert!(shown["not_before"].is_string() && shown["quarantined_at"].is_null(), "{shown:#}");
    assert!(model.requests("second question").is_empty());

    // Token usage and deferred issues are in SQL and survive a restart.
    assert!(server.stop()?.success(), "{}", server.log());
    let mut server = desk(&place, &url, &["--desk-day-tokens-max", "20000"])?;
    let third = open(&server, "third question").await?;
    let issue_of_third = format!("/api/v1/issues/{}", third["issue_id"]);
    server.until(&issue_of_third, is_waiting).await?;
    assert!(server.stop()?.success(), "{}", server.log());

    // An operator raises the budget, which frees the issues.
    let server = desk(&place, &url, &["--desk-day-tokens-max", "1000000"])?;
    for created in [&second, &third] {
        let shown = answered(&server, &id(created)?, 1).await?;
        assert_eq!(by(&shown, "assistant"), [FakeModel::ANSWER]);
    }
    Ok(())
}

/// What becomes of a ticket after the faults.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Expected {
    /// The model answers.
    Answer,
    /// A person takes over.
    Person,
}

/// Where a case sends its requests at first; afterwards the process is restarted with the address of the model.
#[derive(Clone, Copy, Debug, PartialEq)]
enum FirstAddress {
    /// The model.
    Right,
    /// A host that does not exist.
    NoSuchHost,
    /// TLS at a port that does not speak it.
    NoTls,
}

const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";

/// A model that fails in one way, and then works.
struct FaultCase {
    word: &'static str,
    faults: Vec<ModelFault>,
    address: FirstAddress,
    expected: Expected,
}

/// Runs one case on its own server: the ticket is answered once, nothing is quarantined, and nothing that was cut off is posted.
async fn survives(case: &FaultCase) -> Result<()> {
    let word = case.word;
    let (model, url) = FakeModel::open((5, 5)).await?;
    model.plan(word, &case.faults);
    let place = ServerDir::new()?.variable("HEADWATER_MODEL_KEY", "a-secret-model-key");
    // The first counted attempt would quarantine the issue.
    let more = ["--worker-attempts", "1", "--model-idle-timeout", "1s", "--analytics-path", ""];
    let first = match case.address {
        FirstAddress::Right => url.clone(),
        FirstAddress::NoSuchHost => "http://model.invalid/v1".to_owned(),
        FirstAddress::NoTls => url.replace("http://", "https://"),
    };
    let mut server = desk(&place, &first, &more)?;
    let created = open(&server, &format!("This is {word}.")).await?;
    let (ticket, issue) = (id(&created)?, format!("/api/v1/issues/{}", created["issue_id"]));
    if first != url {
        let has_failed = |_: u16, issue: &Value| issue["last_error"].is_string();
        let shown = server.until(&issue, has_failed).await?;
        ensure!(shown["quarantined_at"].is_null(), "{word}: {shown:#}");
        ensure!(server.stop()?.success(), "{word}: {}", server.log());
        server = desk(&place, &url, &more)?;
    }
    let shown = answered(&server, &ticket, 1).await.context(word)?;
    all_idle(&server).await?;
    let path = format!("/api/v1/tickets/{ticket}");
    let shown = match case.expected {
        Expected::Answer => shown,
        Expected::Person => server.until(&path, |_, body| body["handed_over"] == true).await?,
    };
    let answers = by(&shown, "assistant");
    ensure!(answers.len() == 1, "{word}: {shown:#}");
    match case.expected {
        Expected::Answer => ensure!(answers == [FakeModel::ANSWER], "{word}: {shown:#}"),
        Expected::Person => {
            ensure!(answers[0].contains("A person will take over"), "{word}: {shown:#}");
        }
    }
    let (_, issue) = server.get(&issue).await?;
    ensure!(issue["attempts"] == 0 && issue["crashes"] == 0, "{word}: {issue:#}");
    let (_, quarantined) = server.get("/api/v1/issues?quarantined=true").await?;
    ensure!(quarantined["issues"] == json!([]), "{word}: {quarantined:#}");
    let requests = model.requests(word).len();
    let failures = case.faults.len();
    ensure!(requests >= failures && requests <= failures + 4, "{word}: {requests} requests");
    ensure!(!server.log().contains("a-secret-model-key"), "{word}: the key is in the log");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_faults_of_a_model_quarantine_nothing_and_every_ticket_is_answered_once()
-> Result<()> {
    // Whoever follows a redirect to another host gives it the key.
    let (elsewhere, elsewhere_url) = FakeModel::open((5, 5)).await?;
    let elsewhere_url: &'static str =
        Box::leak(format!("{elsewhere_url}/chat/completions").into_boxed_str());
    let status = |status, body| ModelFault::Respond(status, JSON, body);
    let message = r#"{"error":{"message":"failed"}}"#;
    let parameter = r#"{"error":{"message":"Unknown parameter: 'x'.","code":"unknown_parameter"}}"#;
    let denied = r#"{"error":{"message":"Incorrect API key provided","code":"invalid_api_key"}}"#;
    let missing = r#"{"error":{"message":"The model `test-model` does not exist"}}"#;
    let length = ModelFault::Finish("Half an ans", "length");
    let of = |word, faults: Vec<ModelFault>| FaultCase {
        word,
        faults,
        address: FirstAddress::Right,
        expected: Expected::Answer,
    };
    // Four attempts are one run; the fifth failure meets the next run.
    let lasting = |word, fault| of(word, vec![fault; 5]);
    let cases = vec![
        of("fault-400", vec![status(400, parameter)]),
        of("fault-401", vec![status(401, denied)]),
        of("fault-404", vec![status(404, missing)]),
        lasting("fault-408", status(408, message)),
        lasting("fault-429", ModelFault::RateLimit(0)),
        lasting("fault-500", ModelFault::ServerError),
        lasting("fault-502", ModelFault::Respond(502, "text/html", "<h1>Bad Gateway</h1>")),
        lasting("fault-503", status(503, message)),
        lasting("fault-529", status(529, message)),
        lasting("fault-timeout", ModelFault::Stall),
        lasting("fault-cut", ModelFault::HangUpMidAnswer),
        lasting("fault-stalls", ModelFault::StallMidAnswer),
        of("fault-garbage", vec![ModelFault::Respond(200, EVENTS, "data: {\"choices\": [\n\n")]),
        of("fault-empty", vec![ModelFault::Respond(200, EVENTS, "data: [DONE]\n\n")]),
        of("fault-length", vec![length; 2]),
        FaultCase { expected: Expected::Person, ..of("fault-too-long", vec![length; 3]) },
        FaultCase { expected: Expected::Person, ..of("fault-refusal", vec![ModelFault::Refusal]) },
        of("fault-html", vec![ModelFault::Respond(200, "text/html", "<html>Log in</html>")]),
        of("fault-redirect", vec![ModelFault::Redirect(elsewhere_url)]),
        FaultCase { address: FirstAddress::NoSuchHost, ..of("fault-dns", vec![]) },
        FaultCase { address: FirstAddress::NoTls, ..of("fault-tls", vec![]) },
    ];
    // Each has its own server, so that no circuit breaker is shared; a few at a time.
    for some in cases.chunks(7) {
        try_join_all(some.iter().map(survives)).await?;
    }
    assert!(elsewhere.requests("").is_empty(), "a redirect to another host was followed");
    Ok(())
}
