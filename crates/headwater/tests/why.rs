//! `issue why` and `ticket why` name the cause and the command that helps, wherever an answer is stuck; a raised token
//! budget frees the issues that wait for it; every run of a model is in the report.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::time::{Duration, Instant};

use axum::Router;
use axum::http::StatusCode;
use headwater_testkit::{Postgres, Redis};
use serde_json::{Value, json};
use support::desk::{answered, open};
use support::model::{FakeModel, ModelFault};
use support::sender::{SECRET, github, github_issues, send};
use support::{LIMIT, Server, ServerDir, text};

/// Starts a desk with this model.
fn desk(dir: &ServerDir, url: &str, more: &[&str]) -> Server {
    let model = ["--model-url", url, "--model-name", "test-model"];
    let quick = ["--issue-quiet", "10ms", "--sweep-every", "200ms"];
    dir.serve(&[&model[..], &quick, more].concat()).unwrap()
}

/// Standard output of a command that succeeds.
fn stdout(dir: &ServerDir, verb: &[&str]) -> String {
    let output = dir.run(verb).unwrap();
    assert!(output.status.success(), "{verb:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Runs `why` until its output contains all of these.
fn until_why(dir: &ServerDir, verb: &[&str], expected: &[&str]) -> String {
    let deadline = Instant::now() + LIMIT;
    loop {
        let said = stdout(dir, verb);
        if expected.iter().all(|part| said.contains(part)) {
            return said;
        }
        assert!(Instant::now() < deadline, "{verb:?} lacks one of {expected:?}:\n{said}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn number(value: &Value) -> String {
    value.as_i64().unwrap().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_refused_by_the_provider_is_named_with_its_answer_and_the_retry() {
    let refuse = || async { (StatusCode::GONE, "{\"message\":\"Issues are disabled\"}") };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().fallback(refuse);
    tokio::spawn(async move { axum::serve(listener, router).await });
    let settings = format!(
        "[[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"{SECRET}\"\n\
         reply_token_env = \"SHOP_TOKEN\"\nbase_url = \"http://{address}\"\n"
    );
    let dir = ServerDir::new().unwrap().settings(&settings).unwrap().variable("SHOP_TOKEN", "t");
    let server = dir.serve(&["--issue-quiet", "10ms"]).unwrap();
    let body = github_issues("opened", 1, "x").to_string();
    let (_, recorded) = send(github(&server, "issues", "d", body.as_bytes())).await.unwrap();
    let (id, url) = (number(&recorded["issue_id"]), server.url(""));
    let expected = ["delivery of its reply failed permanently", "410", "`headwater outbox retry "];
    let said = until_why(&dir, &["issue", "why", &id, "--url", &url], &expected);
    assert!(said.contains("outbox     last reply delivered: never; row"), "{said}");

    // The row itself says the same; so does the database without a server.
    let (_, rows) = server.get("/api/v1/outbox/dead").await.unwrap();
    let row = number(&rows["rows"][0]["id"]);
    let retry = format!("`headwater outbox retry {row}`");
    let expected = [&*format!("reply {row} of issue {id} was given up"), "410", &retry, "commit"];
    until_why(&dir, &["outbox", "why", &row, "--url", &url], &expected);
    until_why(&dir, &["outbox", "why", &row], &expected);
    for show in [
        &["outbox", "show", &row, "--json", "--url", &url][..],
        &["outbox", "show", &row, "--json"],
    ] {
        let shown: Value = serde_json::from_str(&stdout(&dir, show)).unwrap();
        assert_eq!((&shown["status"], &shown["kind"]), (&json!("dead"), &json!("reply")));
        assert!(shown["error"].to_string().contains("410"), "{shown}");
    }
    let (status, why) = server.get(&format!("/api/v1/outbox/{row}/why")).await.unwrap();
    assert_eq!((status, &why["reason"], &why["status"]), (200, &json!("dead"), &json!("dead")));
    let (status, missing) = server.get("/api/v1/outbox/987654/why").await.unwrap();
    assert_eq!((status, &missing["error"]["code"]), (404, &json!("not_found")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_says_what_became_of_it_in_each_group_and_the_way_out() {
    let redis = Redis::start().unwrap();
    let dir = ServerDir::new().unwrap();
    for streams in [None, Some(redis.url())] {
        let backend: Vec<&str> = streams.iter().flat_map(|url| ["--stream-url", url]).collect();
        let server = dir.serve(&backend).unwrap();
        let post = async |path: &str, body: Value| {
            let (status, answer) =
                server.post(&format!("/api/v1/topics{path}"), &body).await.unwrap();
            assert!(status < 300, "{path}: {status} {answer}");
            answer
        };
        post("", json!({"name": "orders", "partitions": 1})).await;
        let sent =
            post("/orders/messages", json!({"messages": [{"payload": "a"}, {"payload": "b"}]}))
                .await;
        let ids = [0, 1].map(|index| sent["messages"][index]["id"].as_str().unwrap().to_owned());
        let url = server.url("");
        let why = |id: &str| ["message", "why", "orders", id, "--url", &url].map(str::to_owned);
        let said = |id: &str| {
            let verb = why(id);
            stdout(&dir, &verb.each_ref().map(String::as_str))
        };
        let all = said(&ids[0]);
        assert!(
            all.contains("no group reads the topic")
                && all.contains("`headwater consume orders --group NAME`"),
            "{all}"
        );

        let pull = json!({"max": 1, "wait_ms": 5000, "lease_ms": 60000});
        let pulled = post("/orders/groups/billing/pull", pull).await;
        let all = said(&ids[0]);
        assert!(
            all.contains("delivered 1 time, to")
                && all.contains("`headwater pending orders --group billing`"),
            "{all}"
        );
        let all = said(&ids[1]);
        assert!(all.contains("not delivered yet, with 1 message of partition 0"), "{all}");

        let lease = &pulled["messages"][0]["lease"];
        let settled = json!({"settlements": [{"lease": lease, "outcome": "dead_letter", "reason": "no address"}]});
        post("/orders/groups/billing/settle", settled).await;
        let path = format!("/api/v1/topics/orders/messages/{}/why", ids[0]);
        let is_dead = |_: u16, why: &Value| why["reason"] == "dead_letter";
        let dead = server.until(&path, is_dead).await.unwrap();
        assert!(
            dead["sentence"].as_str().unwrap().contains(": no address; fix the cause"),
            "{dead}"
        );
        assert_eq!(dead["steps"][0]["step"], "billing");

        let pulled = post("/orders/groups/billing/pull", json!({"max": 1, "wait_ms": 5000})).await;
        let settled =
            json!({"settlements": [{"lease": pulled["messages"][0]["lease"], "outcome": "done"}]});
        post("/orders/groups/billing/settle", settled).await;
        let path = format!("/api/v1/topics/orders/messages/{}/why", ids[1]);
        server.until(&path, |_, why: &Value| why["reason"] == "settled").await.unwrap();

        for (path, status, part) in [
            ("/orders/messages/1-1/why", 404, "trimmed, or never stored"),
            ("/orders/messages/nonsense/why", 400, "expected an entry id"),
            ("/none/messages/1-1/why", 404, "none"),
        ] {
            let (found, answer) = server.get(&format!("/api/v1/topics{path}")).await.unwrap();
            let message = answer["error"]["message"].as_str().unwrap();
            assert!(found == status && message.contains(part), "{path}: {found} {answer}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_message_is_not_called_settled_if_there_are_many_dead_letters() {
    const OTHERS: usize = 201;
    let dir = ServerDir::new().unwrap();
    let server = dir.serve(&[]).unwrap();
    let topic = json!({"name": "orders", "partitions": 1});
    assert_eq!(server.post("/api/v1/topics", &topic).await.unwrap().0, 201);
    let messages: Vec<_> = (0..=OTHERS).map(|n| json!({"payload": n.to_string()})).collect();
    let (_, sent) = server
        .post("/api/v1/topics/orders/messages", &json!({"messages": messages}))
        .await
        .unwrap();
    let group = "/api/v1/topics/orders/groups/billing";
    let mut pulled = Vec::new();
    while pulled.len() <= OTHERS {
        let wanted = json!({"max": 100, "wait_ms": 5000, "lease_ms": 60000});
        let (_, more) = server.post(&format!("{group}/pull"), &wanted).await.unwrap();
        pulled.extend(more["messages"].as_array().unwrap().iter().cloned());
    }
    let dead_letter = async |messages: &[Value], expected: usize| {
        let letter = |message: &Value| json!({"lease": message["lease"], "outcome": "dead_letter", "reason": "no address"});
        for some in messages.chunks(100) {
            let settlements: Vec<_> = some.iter().map(letter).collect();
            let body = json!({"settlements": settlements});
            let (status, settled) = server.post(&format!("{group}/settle"), &body).await.unwrap();
            assert_eq!(status, 200, "{settled}");
        }
        let is_all = |_: u16, topic: &Value| topic["dead_letters"] == expected;
        server.until("/api/v1/topics/orders", is_all).await.unwrap();
    };
    // The first message is the last to become a dead letter.
    dead_letter(&pulled[1..], OTHERS).await;
    dead_letter(&pulled[..1], OTHERS + 1).await;
    let path = |index: usize| {
        let id = sent["messages"][index]["id"].as_str().unwrap();
        format!("/api/v1/topics/orders/messages/{id}/why")
    };
    let (status, why) = server.get(&path(0)).await.unwrap();
    assert_eq!((status, &why["reason"]), (200, &json!("unknown")), "{why}");
    let sentence = why["sentence"].as_str().unwrap();
    assert!(
        sentence.contains("unknown: settled, or a dead letter beyond the 200 that were looked at")
            && why["command"] == "headwater dlq list orders",
        "{why}"
    );
    // One that is found is known.
    let (_, why) = server.get(&path(1)).await.unwrap();
    assert_eq!(why["reason"], "dead_letter", "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_the_provider_forbids_is_named_with_its_answer_and_the_setting() {
    let forbid = || async { (StatusCode::FORBIDDEN, "{\"message\":\"Resource not accessible\"}") };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().fallback(forbid);
    tokio::spawn(async move { axum::serve(listener, router).await });
    let settings = format!(
        "[[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"{SECRET}\"\n\
         reply_token_env = \"SHOP_TOKEN\"\nbase_url = \"http://{address}\"\n"
    );
    let dir = ServerDir::new().unwrap().settings(&settings).unwrap().variable("SHOP_TOKEN", "t");
    let redis = Redis::start().unwrap();
    let database = Postgres::shared().unwrap().database().unwrap();
    let backends = ["--stream-url", &redis.url(), "--database-url", &database.url()];
    let server = dir.serve(&[&backends[..], &["--issue-quiet", "10ms"]].concat()).unwrap();
    let body = github_issues("opened", 1, "x").to_string();
    let (_, recorded) = send(github(&server, "issues", "d", body.as_bytes())).await.unwrap();
    let (id, url) = (number(&recorded["issue_id"]), server.url(""));
    let expected = ["is not delivered: ", "403", "Resource not accessible", "`headwater config`"];
    let why = ["issue", "why", &id, "--url", &url];
    let said = until_why(&dir, &why, &expected);
    assert!(said.contains("it is sent again by itself, next at 20"), "{said}");
    // What it refers to is there.
    let config = stdout(&dir, &["config"]);
    let line = config.lines().find(|line| line.contains("id=shop")).unwrap();
    assert!(line.contains("reply_token=***") && line.contains(&address.to_string()), "{config}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handed_over_ticket_is_named_with_its_reason_and_the_way_back() {
    let (model, url) = FakeModel::open((5, 5)).await.unwrap();
    model.plan("case-refused", &[ModelFault::Refusal]);
    let dir = ServerDir::new().unwrap();
    let server = desk(&dir, &url, &[]);
    let created = open(&server, "case-refused").await.unwrap();
    let (ticket, url) = (created["ticket_id"].as_str().unwrap(), server.url(""));
    let command = format!("`headwater ticket reopen {ticket}`");
    let expected = ["handed over to a person (the model refused to answer)", &command];
    until_why(&dir, &["ticket", "why", ticket, "--url", &url], &expected);

    // An agent who answers takes the ticket over, too.
    let other = open(&server, "plain").await.unwrap();
    let other = other["ticket_id"].as_str().unwrap();
    answered(&server, other, 1).await.unwrap();
    let reply = ["ticket", "reply", other, "--content", "I do it", "--agent", "Grace"];
    stdout(&dir, &[&reply[..], &["--url", &url]].concat());
    let command = format!("`headwater ticket reopen {other}`");
    until_why(&dir, &["ticket", "why", other, "--url", &url], &["a person", &command]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_model_is_named_with_its_error_and_the_retry() {
    let (model, url) = FakeModel::open((5, 5)).await.unwrap();
    let denied = "{\"error\":{\"message\":\"Incorrect API key provided\"}}";
    model.plan("case-key", &[ModelFault::Respond(401, "application/json", denied); 100]);
    let dir = ServerDir::new().unwrap();
    let server = desk(&dir, &url, &[]);
    let created = open(&server, "case-key").await.unwrap();
    let (id, url) = (number(&created["issue_id"]), server.url(""));
    let command = format!("`headwater issue retry {id}`");
    let expected = ["is deferred until", "Incorrect API key", &command, "test-model: last run"];
    until_why(&dir, &["issue", "why", &id, "--url", &url], &expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_worker_is_named_while_its_claim_lasts() {
    let (_model, url) = FakeModel::start((5, 5)).await.unwrap();
    let dir = ServerDir::new().unwrap();
    // The model does not answer, so the run is in progress when its worker dies.
    let mut server = desk(&dir, &url, &["--worker-claim", "10m"]);
    let created = open(&server, "slow").await.unwrap();
    let id = number(&created["issue_id"]);
    let at = server.url("");
    until_why(&dir, &["issue", "why", &id, "--url", &at], &["is being processed", "alive"]);
    server.kill9().unwrap();
    let expected = ["which is dead: worker heartbeat missing", "`headwater worker`"];
    until_why(&dir, &["issue", "why", &id], &expected);
}

async fn a_raised_budget_frees_what_waits(backends: &[&str]) {
    let (_model, url) = FakeModel::open((19_000, 500)).await.unwrap();
    let dir = ServerDir::new().unwrap();
    let limit = |tokens| [&["--desk-day-tokens-max", tokens][..], backends].concat();
    let mut server = desk(&dir, &url, &limit("20000"));
    let first = open(&server, "first question").await.unwrap();
    answered(&server, first["ticket_id"].as_str().unwrap(), 1).await.unwrap();
    let second = open(&server, "second question").await.unwrap();
    let (id, at) = (number(&second["issue_id"]), server.url(""));
    let expected = ["is deferred until", "`desk.day_tokens_max` = 20000", "`headwater issue retry"];
    until_why(&dir, &["issue", "why", &id, "--url", &at], &expected);

    // A retry without a higher budget waits again.
    let retry = ["issue", "retry", "--all", "--waiting", "--yes", "--json", "--url", &at];
    let retried: Value = serde_json::from_str(&stdout(&dir, &retry)).unwrap();
    assert_eq!(retried, json!({"retried": 1}));
    until_why(&dir, &["issue", "why", &id, "--url", &at], &expected);
    assert!(server.stop().unwrap().success(), "{}", server.log());

    // The same limit frees nothing; a higher one does.
    let mut server = desk(&dir, &url, &limit("20000"));
    until_why(&dir, &["issue", "why", &id, "--url", &server.url("")], &expected);
    assert!(server.stop().unwrap().success(), "{}", server.log());
    let server = desk(&dir, &url, &limit("1000000"));
    answered(&server, second["ticket_id"].as_str().unwrap(), 1).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raised_budget_frees_waiting_issues_at_the_next_start() {
    a_raised_budget_frees_what_waits(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raised_budget_frees_waiting_issues_on_redis_and_postgresql() {
    let redis = Redis::start().unwrap();
    let database = Postgres::shared().unwrap().database().unwrap();
    let (streams, database) = (redis.url(), database.url());
    let backends = ["--stream-url", streams.as_str(), "--database-url", &database];
    a_raised_budget_frees_what_waits(&backends).await;
}

/// The rows of `tokens-and-cost` as (integration, model, runs, unanswered, tokens in, tokens out).
fn tokens(dir: &ServerDir, to: &[&str]) -> Vec<Value> {
    let rows = stdout(dir, &[&["report", "tokens-and-cost", "--json"][..], to].concat());
    assert!(rows.lines().all(|row| row.starts_with("{\"day\":\"20")), "in this order: {rows}");
    let rows = rows.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let fields = ["integration", "model", "runs", "unanswered", "tokens_in", "tokens_out"];
    rows.map(|row| fields.iter().map(|name| row[name].clone()).collect()).collect()
}

async fn every_run_is_counted(backends: &[&str]) {
    let (model, url) = FakeModel::open((100, 10)).await.unwrap();
    model.plan("case-fails", &[ModelFault::HangUpMidAnswer; 4]);
    // A refused answer is paid for.
    model.plan("case-refused", &[ModelFault::Refusal]);
    let settings =
        format!("[[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"{SECRET}\"\n");
    let dir = ServerDir::new().unwrap().settings(&settings).unwrap();
    let prices = ["--model-price-in", "1000000", "--model-price-out", "1000000"];
    let mut server = desk(&dir, &url, &[&prices[..], backends].concat());

    let plain = open(&server, "plain").await.unwrap();
    answered(&server, plain["ticket_id"].as_str().unwrap(), 1).await.unwrap();
    let body = github_issues("opened", 1, "x").to_string();
    send(github(&server, "issues", "d", body.as_bytes())).await.unwrap();
    let refused = open(&server, "case-refused").await.unwrap();
    answered(&server, refused["ticket_id"].as_str().unwrap(), 1).await.unwrap();
    let failing = open(&server, "case-fails").await.unwrap();
    answered(&server, failing["ticket_id"].as_str().unwrap(), 1).await.unwrap();
    let metrics = server.until("/metrics", |_, metrics| {
        let has = |part| metrics.as_str().unwrap().contains(part);
        has("headwater_model_runs_total{integration=\"shop\",model=\"test-model\",result=\"done\"} 1")
            && has("headwater_token_budget_max{integration=\"desk\"} 5000000")
    });
    let metrics = metrics.await.unwrap();
    let metrics = metrics.as_str().unwrap();
    assert!(metrics.contains("headwater_model_tokens_total{"), "{metrics}");
    assert!(metrics.contains("headwater_model_cost{"), "{metrics}");
    assert!(server.stop().unwrap().success(), "{}", server.log());

    // The database is enough: no server, no DuckDB file.
    let rows = tokens(&dir, backends);
    assert_eq!(rows.len(), 2, "{rows:?}");
    assert_eq!(rows[1], json!(["shop", "test-model", 1, 0, 100, 10]), "{rows:?}");
    let [integration, model, runs, unanswered, tokens_in, tokens_out] =
        std::array::from_fn(|at| rows[0][at].clone());
    assert_eq!((integration, model), (json!("desk"), json!("test-model")));
    let number = |value: Value| value.as_u64().unwrap();
    // Three answers, and at least one failed run: four attempts of one call.
    assert!(number(runs) == 3 + number(unanswered.clone()), "{rows:?}");
    assert!(number(unanswered) >= 1 && number(tokens_in.clone()) > 300, "{rows:?}");
    // A refusal reports no usage.
    assert!(number(tokens_out.clone()) >= 20, "{rows:?}");

    // The same for each issue; together they are what the report has.
    let usage = |created: &Value| -> Value {
        let id = created["issue_id"].to_string();
        let shown = stdout(&dir, &[&["issue", "show", &id, "--json"][..], backends].concat());
        let issue: Value = serde_json::from_str(&shown).unwrap();
        let id = created["ticket_id"].as_str().unwrap();
        let shown = stdout(&dir, &[&["ticket", "show", id, "--json"][..], backends].concat());
        let ticket: Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(issue["usage"], ticket["usage"]);
        let people = stdout(&dir, &[&["ticket", "show", id][..], backends].concat());
        assert!(people.contains("tokens in"), "{people}");
        issue["usage"].clone()
    };
    let plain = usage(&plain);
    let expected = json!({"runs": 1, "unanswered": 0, "calls": 1, "tokens_in": 100, "tokens_out": 10, "cost": 110.0});
    assert_eq!(plain, expected);
    let failing = usage(&failing);
    assert!(
        failing["unanswered"].as_u64() >= Some(1) && failing["calls"].as_u64() >= Some(2),
        "{failing}"
    );
    let all = [plain, usage(&refused), failing];
    let sum = |name: &str| all.iter().map(|usage| usage[name].as_u64().unwrap()).sum::<u64>();
    assert_eq!(
        (sum("tokens_in"), sum("tokens_out")),
        (number(tokens_in), number(tokens_out)),
        "{all:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn every_model_run_is_in_the_report_whatever_its_integration_and_result() {
    every_run_is_counted(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_model_run_is_in_the_report_on_redis_and_postgresql() {
    let redis = Redis::start().unwrap();
    let database = Postgres::shared().unwrap().database().unwrap();
    let (streams, database) = (redis.url(), database.url());
    every_run_is_counted(&["--stream-url", &streams, "--database-url", &database]).await;
}
