//! A model behind HTTP that streams, refuses, fails and stalls, and what it may cost: through the real binary.

mod support;

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::support::desk::{all_idle, answered, by, new_ticket, open};
use crate::support::model::{Does, FakeModel};
use crate::support::{Server, ServerDir};

fn id(created: &Value) -> Result<String> {
    Ok(created["ticket_id"].as_str().context("a ticket")?.to_owned())
}

/// A desk whose model is at this address. Failures cost it nothing but time.
fn desk(place: &ServerDir, url: &str, more: &[&str]) -> Result<Server> {
    let model = ["--model-url", url, "--model-name", "test-model", "--worker-attempts", "1000"];
    let quick = ["--issue-quiet", "10ms", "--sweep-every", "200ms"];
    place.serve(&[&model[..], &quick, more].concat())
}

// The service of the test answers while the test waits.
#[tokio::test(flavor = "multi_thread")]
async fn whatever_the_model_does_each_ticket_gets_one_whole_answer() -> Result<()> {
    let (model, url) = FakeModel::open((5, 5)).await?;
    let plans: [(&str, &[Does]); 8] = [
        ("case-plain", &[]),
        ("case-busy", &[Does::Busy(2)]),
        // The last pause is longer than the model may take: the issue itself waits.
        ("case-often-busy", &[Does::Busy(0), Does::Busy(0), Does::Busy(1), Does::Busy(3)]),
        ("case-fails", &[Does::Fails]),
        ("case-often-fails", &[Does::Fails; 6]),
        ("case-stalls", &[Does::Stalls]),
        ("case-falls-silent", &[Does::StallsWithin, Does::StallsWithin]),
        ("case-hangs-up", &[Does::HangsUp, Does::Fails, Does::Stalls]),
    ];
    for (word, does) in plans {
        model.plan(word, does);
    }
    let place = ServerDir::new()?;
    let server = desk(&place, &url, &["--model-idle-timeout", "2s"])?;
    let mut tickets = Vec::new();
    for (word, does) in plans {
        let created = open(&server, &format!("This is {word}.")).await?;
        tickets.push((id(&created)?, word, does.len()));
    }
    for (ticket, ..) in &tickets {
        answered(&server, ticket, 1).await?;
    }
    all_idle(&server).await?;
    for (ticket, word, failures) in &tickets {
        let shown = answered(&server, ticket, 1).await?;
        assert_eq!(by(&shown, "assistant"), [FakeModel::ANSWER], "{word}: {shown:#}");
        let asked = model.asked(&format!("{word}."));
        assert!(asked.len() > *failures, "{word} was asked {} times", asked.len());
        for question in asked {
            assert_eq!(question.body["stream"], true);
            assert_eq!(question.body["model"], "test-model");
        }
    }
    let busy = model.asked("case-busy.");
    let waited = busy[1].at.duration_since(busy[0].at);
    assert!(waited >= Duration::from_secs(2), "Retry-After is heeded: {waited:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_issue_that_has_used_up_its_tokens_goes_to_a_person() -> Result<()> {
    // An answer takes most of what the issue may cost.
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
    assert!(model.asked("second question").is_empty(), "it costs nothing any more");

    // Another issue has a budget of its own.
    let other = id(&open(&server, "third question").await?)?;
    assert_eq!(by(&answered(&server, &other, 1).await?, "assistant"), [FakeModel::ANSWER]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_tokens_of_the_day_are_used_up_tickets_wait_and_none_is_lost() -> Result<()> {
    let (model, url) = FakeModel::open((19_000, 500)).await?;
    let place = ServerDir::new()?;
    let mut server = desk(&place, &url, &["--desk-day-tokens-max", "20000"])?;
    let first = id(&open(&server, "first question").await?)?;
    answered(&server, &first, 1).await?;

    let second = open(&server, "second question").await?;
    let issue = format!("/api/v1/issues/{}", second["issue_id"]);
    let is_waiting = |_: u16, issue: &Value| {
        issue["last_error"].as_str().is_some_and(|error| error.contains("of the day"))
    };
    let shown = server.until(&issue, is_waiting).await?;
    assert_eq!(
        (&shown["processing_status"], &shown["pending_events"]),
        (&json!("queued"), &json!(1))
    );
    assert!(shown["not_before"].is_string() && shown["quarantined_at"].is_null(), "{shown:#}");
    assert!(model.asked("second question").is_empty());

    // What was spent is in SQL, and so is what waits: both are there after a stop.
    assert!(server.stop()?.success(), "{}", server.log());
    let mut server = desk(&place, &url, &["--desk-day-tokens-max", "20000"])?;
    let third = open(&server, "third question").await?;
    let issue_of_third = format!("/api/v1/issues/{}", third["issue_id"]);
    server.until(&issue_of_third, is_waiting).await?;
    assert!(server.stop()?.success(), "{}", server.log());

    // An operator raises the budget and does not wait for tomorrow.
    let server = desk(&place, &url, &["--desk-day-tokens-max", "1000000"])?;
    for created in [&second, &third] {
        let retry = format!("/api/v1/issues/{}/retry", created["issue_id"]);
        let (status, retried) = server.post(&retry, &new_ticket("")).await?;
        assert_eq!((status, &retried["result"]), (200, &json!("queued")));
        let shown = answered(&server, &id(created)?, 1).await?;
        assert_eq!(by(&shown, "assistant"), [FakeModel::ANSWER]);
    }
    Ok(())
}
