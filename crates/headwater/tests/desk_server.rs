//! The desk in the real binary: tickets over HTTP, killed processes, and bad input.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod support;

use std::collections::HashMap;
use std::time::Duration;

use futures_util::StreamExt;
use headwater_testkit::{Postgres, Redis};
use serde_json::{Value, json};
use support::desk::{all_idle, answered, by, new_ticket, open};
use support::model::FakeModel;
use support::{LIMIT, Server, ServerDir, answer, eventually};
use uuid::Uuid;

#[tokio::test]
async fn a_ticket_is_answered_closed_and_reopened_without_external_services() {
    let place = ServerDir::new().unwrap();
    let mut server = place.serve(&["--issue-quiet", "100ms"]).unwrap();
    let created = open(&server, "Where is my parcel? <script>alert(1)</script>").await.unwrap();
    let id = created["ticket_id"].as_str().unwrap().to_owned();
    assert!(created["issue_id"].is_i64() && created["message_id"].is_string());
    let ticket = answered(&server, &id, 1).await.unwrap();
    assert_eq!(ticket["status"], "open");
    assert_eq!(by(&ticket, "user"), ["Where is my parcel? <script>alert(1)</script>"]);
    assert!(by(&ticket, "assistant")[0].contains("Where is my parcel?"), "{ticket:#}");

    // A subscriber gets all messages from the beginning, then new ones.
    let response = server
        .client
        .get(server.url(&format!("/api/v1/tickets/{id}/events")))
        .send()
        .await
        .unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let mut events = response.bytes_stream();
    let mut received = String::new();
    let mut wait_for = async |what: &str| {
        let waiting = async {
            while !received.contains(what) {
                received.push_str(&String::from_utf8_lossy(&events.next().await.unwrap().unwrap()));
            }
        };
        tokio::time::timeout(LIMIT, waiting).await.expect(what);
    };
    wait_for("\"status\":\"open\"").await;
    let path = format!("/api/v1/tickets/{id}/messages");
    let (status, _) = server.post(&path, &json!({"content": "Thank you, solved"})).await.unwrap();
    assert_eq!(status, 201);
    wait_for("Thank you, solved").await;
    // The scripted model closes the ticket with a tool.
    wait_for("\"status\":\"closed\"").await;
    let (status, body) =
        server.post(&format!("/api/v1/tickets/{id}/reopen"), &json!({})).await.unwrap();
    assert_eq!((status, &body["status"], &body["changed"]), (200, &json!("open"), &json!(true)));
    let (_, body) = server.post(&format!("/api/v1/tickets/{id}/close"), &json!({})).await.unwrap();
    assert_eq!((&body["status"], &body["changed"]), (&json!("closed"), &json!(true)));
    let (_, list) = server.get("/api/v1/tickets?status=closed&user_id=ada&limit=1").await.unwrap();
    assert_eq!(list["tickets"][0]["ticket_id"], id.as_str());
    let (_, list) = server.get("/api/v1/tickets?status=open").await.unwrap();
    assert_eq!(list["tickets"], json!([]));
    assert!(server.stop().unwrap().success(), "{}", server.log());
}

#[tokio::test]
async fn tickets_and_answers_survive_a_kill_at_any_moment() {
    let place = ServerDir::new().unwrap();
    let mut ids: Vec<String> = Vec::new();
    for round in 0..3 {
        let mut server = place
            .serve(&[
                "--issue-quiet",
                "0ms",
                "--issue-max-wait",
                "0ms",
                // Long enough that only a kill ends a claim: five lost claims quarantine an issue.
                "--worker-claim",
                "4s",
                "--sweep-every",
                "200ms",
                "--model-url",
                "scripted:50ms",
            ])
            .unwrap();
        for number in 0..5 {
            let created = open(&server, &format!("question {number} of {round}")).await.unwrap();
            ids.push(created["ticket_id"].as_str().unwrap().to_owned());
        }
        tokio::time::sleep(Duration::from_millis(20 * round)).await;
        server.kill9().unwrap();
    }
    let server = place
        .serve(&[
            "--issue-quiet",
            "0ms",
            "--issue-max-wait",
            "0ms",
            "--worker-claim",
            "4s",
            "--sweep-every",
            "200ms",
        ])
        .unwrap();
    for id in &ids {
        let ticket = answered(&server, id, 1).await.unwrap();
        assert_eq!(by(&ticket, "user").len(), 1, "{ticket:#}");
    }
    // No ticket is answered twice, not even by work in flight when a process died.
    all_idle(&server).await.unwrap();
    for id in &ids {
        let ticket = answered(&server, id, 1).await.unwrap();
        assert_eq!(by(&ticket, "assistant").len(), 1, "{ticket:#}");
    }
}

#[tokio::test]
async fn each_ticket_gets_one_reply_after_a_worker_is_killed_during_a_model_call() {
    let redis = Redis::start().unwrap();
    let database = Postgres::shared().unwrap().database().unwrap();
    let (model, url) = FakeModel::start((5, 5)).await.unwrap();
    let place = ServerDir::new().unwrap();
    let (streams, database) = (redis.url(), database.url());
    let arguments = [
        "--stream-url",
        &streams,
        "--database-url",
        &database,
        "--model-url",
        &url,
        "--model-name",
        "m",
        "--worker-claim",
        "2s",
        "--sweep-every",
        "500ms",
        "--issue-quiet",
        "0ms",
        "--issue-max-wait",
        "0ms",
        "--worker-concurrency",
        "4",
    ];
    let server = place.serve(&arguments).unwrap();
    let mut victim = place.worker(&arguments).unwrap();
    let _other = place.worker(&arguments).unwrap();

    // Open tickets until the victim has claimed one and waits for the model.
    let mut tickets: HashMap<i64, (String, String)> = HashMap::new();
    let pid = format!(":{}:", victim.pid());
    let deadline = tokio::time::Instant::now() + LIMIT;
    let claimed = 'found: loop {
        assert!(tokio::time::Instant::now() < deadline && tickets.len() < 60, "{}", server.log());
        let question = format!("question {}.", tickets.len());
        let created = open(&server, &question).await.unwrap();
        let id = created["ticket_id"].as_str().unwrap().to_owned();
        tickets.insert(created["issue_id"].as_i64().unwrap(), (id, question));
        tokio::time::sleep(Duration::from_millis(200)).await;
        let (_, body) = server.get("/api/v1/issues?status=processing").await.unwrap();
        for issue in body["issues"].as_array().unwrap() {
            if issue["claim_owner"].as_str().is_some_and(|owner| owner.contains(&pid)) {
                break 'found issue["id"].as_i64().unwrap();
            }
        }
    };
    let question = &tickets[&claimed].1;
    eventually("a model request", || !model.requests(question).is_empty()).await.unwrap();
    victim.kill9().unwrap();
    model.unblock();
    for (id, _) in tickets.values() {
        answered(&server, id, 1).await.unwrap();
    }
    all_idle(&server).await.unwrap();
    for (id, _) in tickets.values() {
        let ticket = answered(&server, id, 1).await.unwrap();
        assert_eq!(by(&ticket, "assistant"), [FakeModel::ANSWER], "one reply");
    }
}

async fn raw(server: &Server, path: &str, content_type: &str, body: Vec<u8>) -> (u16, Value) {
    let request =
        server.client.post(server.url(path)).header("content-type", content_type).body(body);
    answer(request.send().await.unwrap()).await.unwrap()
}

#[tokio::test]
async fn bad_input_is_rejected_with_an_error_code_and_changes_nothing() {
    let place = ServerDir::new().unwrap();
    let server = place.serve(&["--issue-quiet", "50ms"]).unwrap();
    let created = open(&server, "x").await.unwrap();
    let id = created["ticket_id"].as_str().unwrap().to_owned();
    answered(&server, &id, 1).await.unwrap();
    let create = "/api/v1/tickets".to_owned();
    let add = format!("/api/v1/tickets/{id}/messages");
    let json = "application/json";
    let long = "x".repeat(70_000);
    let deep = format!("{{\"title\":{}1{}}}", "[".repeat(5000), "]".repeat(5000));
    let cases: Vec<(&str, &str, Vec<u8>, u16)> = vec![
        (&create, json, b"".to_vec(), 400),
        (&create, json, b"{".to_vec(), 400),
        (&create, json, b"[]".to_vec(), 400),
        (&create, json, b"{\"title\":\"\xff\xfe\",\"content\":\"x\"}".to_vec(), 400),
        (&create, json, deep.into_bytes(), 400),
        (&create, json, br#"{"title":"t"}"#.to_vec(), 400),
        (&create, json, br#"{"title":1,"content":"x"}"#.to_vec(), 400),
        (&create, json, br#"{"title":"t","content":{"a":1}}"#.to_vec(), 400),
        (&create, json, br#"{"title":"t","content":"x","message_id":"no uuid"}"#.to_vec(), 400),
        (&create, json, br#"{"title":"t","content":"x","user_id":7}"#.to_vec(), 400),
        (&create, json, br#"{"title":"t","content":"x","status":"closed"}"#.to_vec(), 400),
        (&create, json, br#"{"title":"","content":"x"}"#.to_vec(), 400),
        (&create, json, br#"{"title":"t","content":" "}"#.to_vec(), 400),
        (&create, json, json!({"title": "t", "content": long}).to_string().into_bytes(), 400),
        (&create, json, json!({"title": long, "content": "x"}).to_string().into_bytes(), 400),
        (
            &create,
            json,
            json!({"title": "t", "content": "x", "user_id": long}).to_string().into_bytes(),
            400,
        ),
        (&create, "text/plain", new_ticket("x").to_string().into_bytes(), 415),
        (&create, json, vec![b'x'; 10 * 1024 * 1024], 413),
        (&add, json, br#"{"content":"x","author":"assistant"}"#.to_vec(), 400),
        (&add, json, br#"{"content":"x","author":"root"}"#.to_vec(), 400),
        (&add, json, br#"{"content":""}"#.to_vec(), 400),
        (&add, json, br#"{"content":null}"#.to_vec(), 400),
        (&add, "application/x-www-form-urlencoded", b"content=x".to_vec(), 415),
    ];
    for (path, kind, body, expected) in cases {
        let shown = String::from_utf8_lossy(&body[..body.len().min(80)]).into_owned();
        let (status, answer) = raw(&server, path, kind, body).await;
        assert_eq!(status, expected, "{path} {shown}: {answer}");
        assert!(
            answer["error"]["code"].is_string() && answer["error"]["message"].is_string(),
            "{answer}"
        );
    }
    let unknown = Uuid::new_v4();
    for path in [
        format!("/api/v1/tickets/{unknown}"),
        "/api/v1/tickets/1".to_owned(),
        "/api/v1/tickets/'%20OR%201=1".to_owned(),
        format!("/api/v1/tickets/{unknown}/events"),
        format!("/api/v1/tickets/{unknown}/messages"),
    ] {
        let (status, answer) = server.get(&path).await.unwrap();
        assert_eq!(
            (status, answer["error"]["code"].as_str()),
            (404, Some("not_found")),
            "{path}: {answer}"
        );
    }
    for action in ["messages", "close", "reopen"] {
        let (status, _) = server
            .post(&format!("/api/v1/tickets/{unknown}/{action}"), &json!({"content": "x"}))
            .await
            .unwrap();
        assert_eq!(status, 404, "{action}");
    }
    for query in [
        "status=gone",
        "limit=0",
        "limit=99999",
        "limit=x",
        "cursor=x",
        "unknown=1",
        "user_id=%00",
        "user_id=%ff",
    ] {
        let (status, answer) = server.get(&format!("/api/v1/tickets?{query}")).await.unwrap();
        assert!(
            status == 400 || (status == 200 && query == "user_id=%ff"),
            "{query}: {status} {answer}"
        );
    }
    let request = server
        .client
        .get(server.url(&format!("/api/v1/tickets/{id}/events")))
        .header("last-event-id", "x");
    assert_eq!(request.send().await.unwrap().status(), 400);

    // SQL and HTML are stored as plain text.
    let nasty = "'; DROP TABLE tickets; -- <script>alert(1)</script>";
    let (status, body) = server
        .post(&create, &json!({"title": nasty, "content": nasty, "user_id": nasty}))
        .await
        .unwrap();
    assert_eq!(status, 201, "{body}");
    let ticket = answered(&server, body["ticket_id"].as_str().unwrap(), 1).await.unwrap();
    assert_eq!((&ticket["title"], &ticket["user_id"]), (&json!(nasty), &json!(nasty)));
    let (_, list) = server.get("/api/v1/tickets").await.unwrap();
    assert_eq!(list["tickets"].as_array().unwrap().len(), 2, "nothing else was written: {list:#}");

    // Reuse of a message id for another message.
    let again = json!({"title": "other", "content": "other", "message_id": created["message_id"]});
    let (status, body) = server.post(&create, &again).await.unwrap();
    assert_eq!((status, body["error"]["code"].as_str()), (409, Some("conflict")), "{body}");
}

#[tokio::test]
async fn a_token_allows_only_what_its_role_allows() {
    let text = "[[token]]\nname = \"r\"\nrole = \"read\"\ntoken = \"rrrrrrrrrrrrrrrrrrrr\"\n\
                [[token]]\nname = \"w\"\nrole = \"write\"\ntoken = \"wwwwwwwwwwwwwwwwwwww\"\n";
    let place = ServerDir::new().unwrap().settings(text).unwrap();
    let server = place.serve(&[]).unwrap();
    let call = async |token: &str, method: &str, path: &str| {
        let request = match method {
            "GET" => server.client.get(server.url(path)),
            _ => server.client.post(server.url(path)).json(&new_ticket("x")),
        };
        let request = if token.is_empty() { request } else { request.bearer_auth(token) };
        answer(request.send().await.unwrap()).await.unwrap()
    };
    let (status, body) = call("wwwwwwwwwwwwwwwwwwww", "POST", "/api/v1/tickets").await;
    assert_eq!(status, 201, "{body}");
    let id = body["ticket_id"].as_str().unwrap().to_owned();
    for path in ["/api/v1/tickets".to_owned(), format!("/api/v1/tickets/{id}")] {
        assert_eq!(call("rrrrrrrrrrrrrrrrrrrr", "GET", &path).await.0, 200);
        assert_eq!(call("", "GET", &path).await.0, 401);
        assert_eq!(call("wrong-wrong-wrong-wrong", "GET", &path).await.0, 401);
    }
    for path in [
        "/api/v1/tickets".to_owned(),
        format!("/api/v1/tickets/{id}/messages"),
        format!("/api/v1/tickets/{id}/close"),
        format!("/api/v1/tickets/{id}/reopen"),
    ] {
        assert_eq!(call("rrrrrrrrrrrrrrrrrrrr", "POST", &path).await.0, 403, "{path}");
        assert_eq!(call("", "POST", &path).await.0, 401, "{path}");
    }
    assert_eq!(call("", "GET", &format!("/api/v1/tickets/{id}/events")).await.0, 401);
}
