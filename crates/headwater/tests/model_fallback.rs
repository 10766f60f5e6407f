//! Several model endpoints on the real binary: a failing one is replaced by the next, each issue is answered once, and an outage
//! of all of them quarantines nothing.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::support::desk::{all_idle, answered, by, open};
use crate::support::model::{FakeModel, ModelFault};
use crate::support::{Server, ServerDir, text};

/// A server with the endpoints `default` and `spare`.
fn serve(first: &str, second: &str, more: &str) -> Result<(ServerDir, Server)> {
    let settings = format!(
        "[model]\nurl = \"{first}\"\nname = \"one\"\nidle_timeout = \"500ms\"\nprice_in = 1000000\n\
         [[model.endpoint]]\nid = \"spare\"\nurl = \"{second}\"\nname = \"two\"\nkey_env = \"SPARE_KEY\"\n\
         price_out = 2000000\n{more}\n"
    );
    let place = ServerDir::new()?.settings(&settings)?.variable("SPARE_KEY", "a-secret-key");
    let server = place.serve(&["--issue-quiet", "10ms", "--sweep-every", "200ms"])?;
    Ok((place, server))
}

/// Opens a ticket and waits until it is answered and nothing is left to do. Returns the ticket.
async fn answer_to(server: &Server, content: &str) -> Result<Value> {
    let ticket = open(server, content).await?;
    let id = ticket["ticket_id"].as_str().context("an id")?;
    answered(server, id, 1).await?;
    all_idle(server).await?;
    Ok(server.get(&format!("/api/v1/tickets/{id}")).await?.1)
}

async fn metrics(server: &Server) -> Result<String> {
    Ok(server.client.get(server.url("/metrics")).send().await?.text().await?)
}

const JSON: &str = "application/json";

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_endpoint_is_replaced_by_the_next_which_answers_once() -> Result<()> {
    let denied = r#"{"error":{"message":"Incorrect API key provided"}}"#;
    let missing = r#"{"error":{"message":"The model `one` does not exist"}}"#;
    let cases = [
        ("case-500", ModelFault::ServerError, "theirs"),
        ("case-401", ModelFault::Respond(401, JSON, denied), "ours"),
        ("case-404", ModelFault::Respond(404, JSON, missing), "ours"),
        ("case-429", ModelFault::RateLimit(3600), "theirs"),
        ("case-stall", ModelFault::Stall, "theirs"),
        ("case-cut", ModelFault::HangUpMidAnswer, "theirs"),
        ("case-html", ModelFault::Respond(200, "text/html", "<html>Login</html>"), "theirs"),
    ];
    for (word, fault, blamed) in cases {
        let (first, first_url) = FakeModel::open((5, 5)).await?;
        let (second, second_url) = FakeModel::open((7, 3)).await?;
        first.plan(word, &[fault; 9]);
        let (_place, server) = serve(&first_url, &second_url, "")?;
        let ticket = answer_to(&server, word).await?;
        assert_eq!(by(&ticket, "assistant"), [FakeModel::ANSWER], "{word}: {ticket:#}");
        assert_eq!((first.requests(word).len(), second.requests(word).len()), (1, 1), "{word}");
        let metrics = metrics(&server).await?;
        for expected in [
            format!("headwater_model_failures_total{{model=\"one\",fault=\"{blamed}\"}} 1"),
            "headwater_model_fallbacks_total{integration=\"desk\",model=\"spare:two\"} 1".to_owned(),
            "headwater_model_runs_total{integration=\"desk\",model=\"one\",result=\"failed\"} 1".to_owned(),
            "headwater_model_runs_total{integration=\"desk\",model=\"spare:two\",result=\"done\"} 1"
                .to_owned(),
            "headwater_model_tokens_total{integration=\"desk\",model=\"spare:two\",direction=\"in\"} 7"
                .to_owned(),
            // Three tokens at two for each.
            "headwater_model_cost{integration=\"desk\",model=\"spare:two\"} 6".to_owned(),
        ] {
            assert!(metrics.contains(&expected), "{word}: {expected} in {metrics}");
        }
        let is_denied = blamed == "ours";
        assert_eq!(server.log().contains("model calls stopped"), is_denied, "{word}");
        let (status, ready) = server.get("/health/ready").await?;
        assert_eq!((status, &ready["status"]), (200, &json!("ready")), "{word}: {ready:#}");
        let expected = json!([{"id": "default", "ok": !is_denied}, {"id": "spare", "ok": true}]);
        assert_eq!(ready["models"], expected, "{word}");
        // Three issues have found it failing: the next one does not ask it.
        for number in 2..=4 {
            answer_to(&server, &format!("{word} {number}")).await?;
        }
        assert_eq!((first.requests(word).len(), second.requests(word).len()), (3, 4), "{word}");
        let (status, ready) = server.get("/health/ready").await?;
        let states = (status, &ready["models"][0]["ok"], &ready["models"][1]["ok"]);
        assert_eq!(states, (200, &json!(false), &json!(true)), "{word}: {ready:#}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_of_the_text_is_not_tried_elsewhere() -> Result<()> {
    let (first, first_url) = FakeModel::open((5, 5)).await?;
    let (second, second_url) = FakeModel::open((5, 5)).await?;
    let policy = r#"{"error":{"message":"flagged","code":"content_policy_violation"}}"#;
    first.plan("case-policy", &[ModelFault::Respond(400, JSON, policy)]);
    let (_place, server) = serve(&first_url, &second_url, "")?;
    let ticket = answer_to(&server, "case-policy").await?;
    let path = format!("/api/v1/tickets/{}", ticket["ticket_id"].as_str().context("an id")?);
    server.until(&path, |_, ticket| ticket["handed_over"] == true).await?;
    assert_eq!(second.requests("case-policy").len(), 0);
    // The endpoint works for all other issues.
    answer_to(&server, "another question").await?;
    assert_eq!(first.requests("another question").len(), 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_all_endpoints_quarantines_nothing_and_everything_is_answered_once_after_it()
-> Result<()> {
    let (first, first_url) = FakeModel::open((5, 5)).await?;
    let (second, second_url) = FakeModel::open((5, 5)).await?;
    let denied = r#"{"error":{"message":"Incorrect API key provided"}}"#;
    first.plan("outage", &[ModelFault::ServerError; 1000]);
    second.plan("outage", &[ModelFault::Respond(401, JSON, denied); 1000]);
    let (_place, server) = serve(&first_url, &second_url, "")?;
    let mut tickets = Vec::new();
    for number in 0..6 {
        let ticket = open(&server, &format!("outage {number}")).await?;
        tickets.push(ticket["ticket_id"].as_str().context("an id")?.to_owned());
    }
    for id in &tickets {
        let why = format!("/api/v1/tickets/{id}/why");
        server.until(&why, |_, why| why["reason"] == "deferred").await?;
    }
    let (status, ready) = server.get("/health/ready").await?;
    assert_eq!((status, &ready["status"]), (200, &json!("ready")), "{ready:#}");
    assert!(!first.requests("outage").is_empty() && !second.requests("outage").is_empty());
    // Both are repaired.
    first.plan("outage", &[]);
    second.plan("outage", &[]);
    for id in &tickets {
        answered(&server, id, 1).await?;
    }
    all_idle(&server).await?;
    for id in &tickets {
        let (_, ticket) = server.get(&format!("/api/v1/tickets/{id}")).await?;
        assert_eq!(by(&ticket, "assistant"), [FakeModel::ANSWER], "{ticket:#}");
        assert_eq!(ticket["handed_over"], false, "{ticket:#}");
    }
    let (_, quarantined) = server.get("/api/v1/issues?quarantined=true").await?;
    assert_eq!(quarantined["issues"], json!([]), "{quarantined:#}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_integration_chooses_its_endpoints() -> Result<()> {
    let (first, first_url) = FakeModel::open((5, 5)).await?;
    let (second, second_url) = FakeModel::open((5, 5)).await?;
    second.plan("case-500", &[ModelFault::ServerError]);
    let only = "[[integration]]\nid = \"desk\"\nprovider = \"desk\"\nmodels = [\"spare\"]";
    let (place, server) = serve(&first_url, &second_url, only)?;
    answer_to(&server, "Hello").await?;
    // No other endpoint is its fallback: the run is repeated.
    answer_to(&server, "case-500").await?;
    assert_eq!((first.requests("messages").len(), second.requests("case-500").len()), (0, 2));
    let (_, status) = server.get("/api/v1/status").await?;
    assert_eq!(status["models"][1]["name"], "two", "{status:#}");
    let shown = text(&place.run(&["config"])?.stdout);
    assert!(shown.contains("[[model.endpoint]] id=spare") && shown.contains("models=spare"));
    assert!(!shown.contains("a-secret-key"), "{shown}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_looks_at_each_endpoint() -> Result<()> {
    let (_first, url) = FakeModel::open((5, 5)).await?;
    // The fake has no list of models; nothing listens on port 1.
    let (place, server) = serve(&url, "http://127.0.0.1:1/v1", "")?;
    let (_, found) = server.get("/api/v1/doctor").await?;
    let of = |id: &str| {
        let findings = found["findings"].as_array().into_iter().flatten();
        findings.clone().find(|one| one["subject"] == format!("model {id}")).cloned()
    };
    let (default, spare) = (of("default").context("a finding")?, of("spare").context("a finding")?);
    assert_eq!(default["severity"], "ok", "{default:#}");
    assert_eq!(spare["severity"], "warning", "{spare:#}");
    assert!(spare["found"].to_string().contains("unreachable"), "{spare:#}");
    drop(server);
    let output = place.run(&["doctor"])?;
    let shown = text(&output.stdout);
    assert!(shown.contains("model spare: ") && shown.contains("model default: "), "{shown}");
    assert!(!shown.contains("a-secret-key"), "{shown}");
    // Without any endpoint that works it is an error.
    let broken = "[model]\nurl = \"http://127.0.0.1:1/v1\"\nname = \"m\"\n";
    let place = ServerDir::new()?.settings(broken)?;
    let output = place.run(&["doctor"])?;
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    Ok(())
}

#[test]
fn invalid_endpoints_are_refused_with_the_reason() {
    let spare = "[[model.endpoint]]\nid = \"spare\"\nurl = \"http://h/v1\"\nname = \"n\"\n";
    let desk = "[[integration]]\nid = \"desk\"\nprovider = \"desk\"\n";
    let cases = [
        (format!("{spare}{spare}"), "duplicate [[model.endpoint]] id `spare`"),
        (spare.replace("spare", "default"), "choose another id"),
        (spare.replace("http:", "ftp:"), "invalid url"),
        (spare.replace("name = \"n\"", ""), "has no `name`"),
        (format!("{spare}timeout = \"soon\"\n"), "invalid timeout"),
        (format!("{spare}price_in = -1.0\n"), "invalid price"),
        (format!("{spare}colour = \"red\"\n"), "unknown field `colour`"),
        (format!("{spare}{desk}models = [\"large\"]\n"), "unknown model `large`"),
        (format!("{spare}{desk}models = [\"spare\", \"spare\"]\n"), "must be unique"),
        (format!("{spare}{desk}models = [\"default\"]\n"), "`model.url` is not set"),
        ("[[model]]\nid = \"a\"\n".to_owned(), "[[model.endpoint]]"),
        (spare.repeat(17), "at most 16"),
    ];
    for (settings, problem) in cases {
        let place = ServerDir::new().unwrap().settings(&settings).unwrap();
        let output = place.run(&["config"]).unwrap();
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{settings}: {message}");
        assert!(message.contains(problem), "{problem}: {message}");
    }
}
