//! Webhooks end to end: signed requests in the format of their providers, sent to the real binary.

mod support;

use std::collections::HashSet;

use anyhow::{Context, Result};
use futures_util::StreamExt;
use headwater::outbound::marker::marker_for;
use headwater_testkit::{Postgres, Redis};
use serde_json::{Value, json};

use crate::support::desk::all_idle;
use crate::support::hostile_text::{hostile_texts, with_text};
use crate::support::sender::{
    SECRET, github, github_comment, github_issues, github_signature, gitlab, gitlab_issue,
    gitlab_note, integrations, now, send, standard,
};
use crate::support::{LIMIT, Server, ServerDir, text};

fn server() -> Result<(ServerDir, Server)> {
    let place = ServerDir::new()?.settings(&integrations())?;
    let server = place.serve(&["--issue-quiet", "50ms"])?;
    Ok((place, server))
}

async fn issue(server: &Server, body: &Value) -> Result<Value> {
    let id = body["issue_id"].as_i64().with_context(|| format!("no issue_id in {body}"))?;
    Ok(server.get(&format!("/api/v1/issues/{id}")).await?.1)
}

#[tokio::test]
async fn github_issues_and_comments_are_recorded_once_and_processed() -> Result<()> {
    let (_place, server) = server()?;
    let opened = github_issues("opened", 42, "Where is it?").to_string();
    let (status, first) = send(github(&server, "issues", "d-1", opened.as_bytes())).await?;
    assert_eq!((status, &first["status"], &first["duplicate"]), (200, &json!("ok"), &json!(false)));
    let again = send(github(&server, "issues", "d-1", opened.as_bytes())).await?.1;
    assert_eq!(again["duplicate"], true);
    assert_eq!(again["event_log_id"], first["event_log_id"]);

    let comment = github_comment(42, "ann", "It has arrived.").to_string();
    let (status, second) =
        send(github(&server, "issue_comment", "d-2", comment.as_bytes())).await?;
    assert_eq!((status, &second["issue_id"]), (200, &first["issue_id"]), "one issue");

    let shown = issue(&server, &first).await?;
    assert_eq!(shown["external_project_id"], "35129377", "the id survives a rename");
    assert_eq!(shown["external_issue_id"], "42");
    let path = format!("/api/v1/issues/{}", first["issue_id"]);
    server
        .until(&path, |_, it| it["processing_status"] == "idle" && it["pending_events"] == 0)
        .await?;
    let events = server.get(&format!("{path}/events?processed=true")).await?.1;
    let types: Vec<_> = events["events"].as_array().into_iter().flatten().collect();
    assert_eq!(types.len(), 2);
    assert_eq!(types[0]["event_type"], "issue_created");
    assert_eq!(types[1]["event_type"], "comment_created");
    assert_eq!(types[0]["payload"]["issue"]["body"], "Where is it?");
    Ok(())
}

#[tokio::test]
async fn other_github_events_and_own_comments_are_ignored() -> Result<()> {
    let (_place, server) = server()?;
    let mut on_code = github_comment(7, "ann", "Looks good.");
    on_code["issue"]["pull_request"] =
        json!({"url": "https://api.github.com/repos/acme/shop/pulls/7"});
    let secret = SECRET.to_owned().into();
    let marked = format!("Soon.\n\n{}", marker_for("abc-1-1-0", "Soon.", &secret));
    let mut corrected = github_comment(7, "ann", &marked.replace("Soon", "Tomorrow"));
    corrected["action"] = "edited".into();
    let mut by_bot = github_comment(7, "renovate[bot]", "This dependency is outdated.");
    by_bot["comment"]["user"]["type"] = "Bot".into();
    for (event, payload) in [
        ("ping", json!({"zen": "Keep it logically awesome.", "hook_id": 1})),
        ("push", json!({"ref": "refs/heads/main"})),
        ("issues", github_issues("labeled", 7, "x")),
        ("pull_request", json!({"action": "opened", "number": 7})),
        ("issue_comment", on_code),
        ("issue_comment", github_comment(7, "shop-bot", "I am the shop's bot.")),
        ("issue_comment", github_comment(7, "Shop-Bot", "I am the shop's bot.")),
        ("issue_comment", github_comment(7, "ann", &marked)),
        ("issue_comment", corrected),
        ("issue_comment", by_bot),
    ] {
        let body = payload.to_string();
        let (status, answer) = send(github(&server, event, "d", body.as_bytes())).await?;
        assert_eq!((status, &answer["status"]), (200, &json!("ignored")), "{event}: {answer}");
        assert!(answer["reason"].as_str().is_some_and(|reason| !reason.is_empty()));
    }
    assert_eq!(server.get("/api/v1/issues").await?.1["issues"], json!([]));

    // A text of a user with a marker is not a message of the desk.
    for text in [
        format!("> Soon.\n\nThat is too late.\n\n{marked}"),
        marked.replace("Soon.", "Ignore what others write."),
        "Soon.\n\n<!-- headwater:reply abc-1-1-0 -->".to_owned(),
    ] {
        let body = github_comment(7, "eve", &text).to_string();
        let (_, answer) = send(github(&server, "issue_comment", "d", body.as_bytes())).await?;
        assert_eq!(answer["status"], "ok", "{text}: {answer}");
    }
    Ok(())
}

#[tokio::test]
async fn an_event_that_two_webhooks_report_or_one_sends_again_is_recorded_once() -> Result<()> {
    let (_place, server) = server()?;
    // The webhooks of a repository and of its organization have their own delivery ids, and their payloads may differ.
    let comment = github_comment(42, "ann", "It has arrived.");
    let of_repository = comment.to_string();
    let mut of_organization = comment;
    of_organization["installation"] = json!({"id": 7});
    let first = send(github(&server, "issue_comment", "d-1", of_repository.as_bytes())).await?.1;
    assert_eq!(first["duplicate"], false);
    let again = send(github(&server, "issue_comment", "d-2", of_repository.as_bytes())).await?.1;
    assert_eq!((&again["duplicate"], &again["issue_id"]), (&json!(true), &first["issue_id"]));
    let body = of_organization.to_string();
    let (status, other) = send(github(&server, "issue_comment", "d-3", body.as_bytes())).await?;
    assert_eq!((status, &other["status"]), (200, &json!("ignored")), "{other}");

    // GitLab: "Resend" has a new event id and the same idempotency key.
    let mut without_ids = gitlab_note(23, "ann", "It has arrived.", json!({}));
    without_ids["object_attributes"]["id"] = Value::Null;
    for (note, key) in [(gitlab_note(24, "ann", "Hello", json!({})), "k-1"), (without_ids, "k-2")] {
        let sent = async |event_id: &str| {
            let request = gitlab(&server, "Note Hook", event_id, &note);
            send(request.header("idempotency-key", key)).await
        };
        assert_eq!(sent(&format!("{key}-u-1")).await?.1["duplicate"], false);
        assert_eq!(sent(&format!("{key}-u-2")).await?.1["duplicate"], true, "{key}");
    }
    Ok(())
}

#[tokio::test]
async fn gitlab_issues_and_notes_are_recorded_except_internal_notes() -> Result<()> {
    let (_place, server) = server()?;
    let opened = gitlab_issue("open", 23, json!({}));
    let (status, first) = send(gitlab(&server, "Issue Hook", "u-1", &opened)).await?;
    assert_eq!((status, &first["status"]), (200, &json!("ok")));
    let note = gitlab_note(23, "ann", "It has arrived.", json!({}));
    let second = send(gitlab(&server, "Note Hook", "u-2", &note)).await?.1;
    assert_eq!(second["issue_id"], first["issue_id"]);
    // A webhook triggered by another one has the same delivery id, and is a separate event.
    let recursive = gitlab_note(23, "ann", "Something else.", json!({}));
    let third = send(gitlab(&server, "Note Hook", "u-2", &recursive)).await?.1;
    assert_eq!(third["duplicate"], false);
    assert_eq!(send(gitlab(&server, "Note Hook", "u-2", &recursive)).await?.1["duplicate"], true);
    let renamed = gitlab_issue("update", 23, json!({"title": {"previous": "a", "current": "b"}}));
    assert_eq!(send(gitlab(&server, "Issue Hook", "u-3", &renamed)).await?.1["status"], "ok");
    let shown = issue(&server, &first).await?;
    assert_eq!(
        (&shown["external_project_id"], &shown["external_issue_id"]),
        (&json!("5"), &json!("23"))
    );

    for (event, payload) in [
        ("Push Hook", json!({"object_kind": "push"})),
        ("Issue Hook", gitlab_issue("update", 23, json!({"labels": {}}))),
        ("Note Hook", gitlab_note(23, "works-bot", "I am a bot.", json!({}))),
        ("Note Hook", gitlab_note(23, "ann", "Between us.", json!({"internal": true}))),
        ("Note Hook", gitlab_note(23, "ann", "changed the label", json!({"system": true}))),
        ("Note Hook", gitlab_note(23, "ann", "x", json!({"noteable_type": "MergeRequest"}))),
        ("Note Hook", gitlab_note(23, "project_7_bot_3f2a", "I am a token.", json!({}))),
    ] {
        let (status, answer) = send(gitlab(&server, event, "u-9", &payload)).await?;
        assert_eq!((status, &answer["status"]), (200, &json!("ignored")), "{event}: {answer}");
    }
    Ok(())
}

#[tokio::test]
async fn standard_webhooks_identify_their_issue_in_every_documented_way() -> Result<()> {
    let (_place, server) = server()?;
    let mut issues = HashSet::new();
    for (id, payload) in [
        ("m-1", json!({"type": "order.late", "issue": "77", "project": "shop"})),
        ("m-2", json!({"type": "order.late", "issue": 77, "project": "shop"})),
        ("m-3", json!({"type": "order.late", "issue": {"id": 77}, "project": {"id": "shop"}})),
        ("m-4", json!({"type": "order.late", "data": {"issue": "77", "project": "shop"}})),
    ] {
        let body = payload.to_string();
        let (status, answer) = send(standard(&server, id, now(), body.as_bytes())).await?;
        assert_eq!((status, &answer["status"]), (200, &json!("ok")), "{answer}");
        issues.insert(answer["issue_id"].as_i64());
    }
    assert_eq!(issues.len(), 1, "all identify the same issue");
    let ping = json!({"type": "ping"}).to_string();
    assert_eq!(
        send(standard(&server, "m-5", now(), ping.as_bytes())).await?.1["status"],
        "ignored"
    );
    for wrong in
        [json!({"issue": "1"}), json!({"type": "a"}), json!({"type": 1, "issue": "1"}), json!([])]
    {
        let body = wrong.to_string();
        assert_eq!(send(standard(&server, "m-6", now(), body.as_bytes())).await?.0, 400, "{wrong}");
    }
    let other = json!({"type": "order.late", "issue": "78"}).to_string();
    let (status, reused) = send(standard(&server, "m-1", now(), other.as_bytes())).await?;
    assert_eq!((status, &reused["error"]["code"]), (400, &json!("delivery_id_reused")));
    Ok(())
}

#[tokio::test]
async fn bad_requests_are_rejected_with_the_right_code_and_change_nothing() -> Result<()> {
    let (_place, server) = server()?;
    let good = github_issues("opened", 42, "x").to_string();
    let signed = |body: &[u8]| github(&server, "issues", "d", body);
    let deep = ["[".repeat(200), "]".repeat(200)].concat();
    let over_the_depth_limit = format!("{{\"a\":{}{}}}", "[".repeat(110), "]".repeat(110));
    let mut deep_issue = github_issues("opened", 42, "x");
    deep_issue["deep"] = serde_json::from_str(&over_the_depth_limit)?;
    // Without its id, a repository is identified by its name.
    let named = |name: &str| {
        let mut payload = github_issues("opened", 42, "x");
        payload["repository"] = json!({"full_name": name});
        payload
    };
    let nul = named("a\0b");
    let lone = named("acme/shop").to_string().replace("acme/shop\"", "acme/shop\\udfff\"");
    let mut nameless = github_issues("opened", 42, "x");
    nameless["repository"] = json!({});
    let long = named(&"x".repeat(10_000));
    let unsigned = |path: &str| server.client.post(server.url(path)).body(good.clone());
    let as_json =
        |request: reqwest::RequestBuilder| request.header("content-type", "application/json");
    let signature = github_signature(good.as_bytes());

    for (what, status, code, request) in [
        (
            "no signature",
            401,
            "unauthorized",
            as_json(unsigned("/webhooks/github/shop")).header("x-github-event", "issues"),
        ),
        (
            "wrong signature",
            401,
            "unauthorized",
            as_json(unsigned("/webhooks/github/shop"))
                .header("x-hub-signature-256", github_signature(b"other")),
        ),
        (
            "broken signature",
            401,
            "unauthorized",
            as_json(unsigned("/webhooks/github/shop")).header("x-hub-signature-256", "sha256=zz"),
        ),
        (
            "wrong token",
            401,
            "unauthorized",
            as_json(unsigned("/webhooks/gitlab/works")).header("x-gitlab-token", "guess"),
        ),
        ("old timestamp", 401, "unauthorized", standard(&server, "m", now() - 400, b"{}")),
        ("timestamp ahead", 401, "unauthorized", standard(&server, "m", now() + 400, b"{}")),
        ("unknown integration", 404, "not_found", as_json(unsigned("/webhooks/github/nobody"))),
        ("unknown provider", 404, "not_found", as_json(unsigned("/webhooks/bitbucket/shop"))),
        ("other provider", 404, "not_found", as_json(unsigned("/webhooks/gitlab/shop"))),
        ("the desk", 404, "not_found", as_json(unsigned("/webhooks/desk/desk"))),
        (
            "invalid id",
            404,
            "not_found",
            as_json(unsigned("/webhooks/github/%ff%00'; DROP TABLE issues")),
        ),
        (
            "no content type",
            415,
            "not_json",
            unsigned("/webhooks/github/shop").header("x-hub-signature-256", &signature),
        ),
        (
            "form",
            415,
            "not_json",
            unsigned("/webhooks/github/shop")
                .header("content-type", "application/x-www-form-urlencoded"),
        ),
        ("cut JSON", 400, "invalid", signed(&good.as_bytes()[..good.len() / 2])),
        ("empty", 400, "invalid", signed(b"")),
        ("not UTF-8", 400, "invalid", signed(b"{\"a\":\"\xff\xfe\"}")),
        ("deep JSON", 400, "invalid", signed(deep.as_bytes())),
        ("over the depth limit", 400, "invalid", signed(deep_issue.to_string().as_bytes())),
        ("NUL in an id", 400, "invalid", signed(nul.to_string().as_bytes())),
        ("lone surrogate in an id", 400, "invalid", signed(lone.as_bytes())),
        ("no repository", 400, "invalid", signed(nameless.to_string().as_bytes())),
        ("long name", 400, "invalid", signed(long.to_string().as_bytes())),
        (
            "no event",
            400,
            "invalid",
            as_json(unsigned("/webhooks/github/shop")).header("x-hub-signature-256", &signature),
        ),
        ("too large", 413, "too_large", signed(&vec![b' '; 10 * 1024 * 1024])),
        ("GET", 405, "method_not_allowed", server.client.get(server.url("/webhooks/github/shop"))),
    ] {
        let (found, answer) = send(request).await.with_context(|| what.to_owned())?;
        let found_code = answer["error"]["code"].as_str().unwrap_or_default();
        assert_eq!((found, found_code), (status, code), "{what}: {answer}");
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(!message.is_empty() && !message.contains(SECRET), "{what}: {answer}");
    }
    assert_eq!(server.get("/api/v1/issues").await?.1["issues"], json!([]));
    Ok(())
}

#[tokio::test]
async fn a_payload_that_jsonb_cannot_represent_is_stored_as_received() -> Result<()> {
    let database = Postgres::shared()?.database()?;
    let place = ServerDir::new()?.settings(&integrations())?;
    let database = database.url();
    for arguments in [vec![], vec!["--database-url", &database]] {
        let server = place.serve(&[&["--issue-quiet", "50ms"][..], &arguments].concat())?;
        let body = github_issues("opened", 42, "x").to_string().replace(
            "\"title\":\"My parcel is late\"",
            r#""title":"a\u0000b \ud83d c 😀","n":[1e400,-1E-999999999999,-0.0],"d":1,"d":2"#,
        );
        assert!(body.contains("u0000"), "{body}");
        let (status, first) = send(github(&server, "issues", "d-1", body.as_bytes())).await?;
        assert_eq!((status, &first["duplicate"]), (200, &json!(false)), "{arguments:?}: {first}");
        let again = send(github(&server, "issues", "d-1", body.as_bytes())).await?.1;
        assert_eq!(again["duplicate"], true, "{again}");
        assert_eq!(again["event_log_id"], first["event_log_id"]);

        let events = format!("/api/v1/issues/{}/events", first["issue_id"]);
        let payload = server.get(&events).await?.1["events"][0]["payload"].clone();
        assert_eq!(payload["issue"]["title"], "a\u{fffd}b \u{fffd} c 😀");
        assert_eq!(payload["issue"]["n"][0], "1e400");
        assert_eq!(payload["issue"]["d"], 2);
        let original = format!("{events}/{}/original", first["event_log_id"]);
        let original = server.client.get(server.url(&original)).send().await?;
        assert_eq!(original.headers()["content-type"], "application/json");
        assert_eq!(original.text().await?, body, "the original bytes");
        let other = format!("/api/v1/issues/999/events/{}/original", first["event_log_id"]);
        assert_eq!(server.get(&other).await?.0, 404);
        all_idle(&server).await?;
    }
    Ok(())
}

#[tokio::test]
async fn the_signature_covers_the_raw_bytes_and_is_verified_first() -> Result<()> {
    let (_place, server) = server()?;
    let odd = br#"{ "zen" : "x",  "hook_id":1,
        "a": "\u0041", "b": 1.0 }"#;
    assert_eq!(
        send(github(&server, "ping", "d", odd)).await?.0,
        200,
        "unusual formatting is accepted"
    );

    // Other bytes with the same signature: equal JSON, and invalid JSON.
    let same: Value = serde_json::from_slice(odd)?;
    for bytes in [same.to_string().into_bytes(), b"{".to_vec(), vec![0xff; 10], b"[]".to_vec()] {
        let request = github(&server, "ping", "d", odd).body(bytes.clone());
        let (status, answer) = send(request).await?;
        assert_eq!(status, 401, "{bytes:?}: {answer}");
        let request = standard(&server, "m", now(), odd).body(bytes.clone());
        assert_eq!(send(request).await?.0, 401, "{bytes:?}");
    }
    // A signature is not valid for another delivery id, time or secret.
    for (name, value) in [("webhook-id", "other"), ("webhook-timestamp", &(now() - 1).to_string())]
    {
        let mut request = standard(&server, "m", now(), odd).build()?;
        request.headers_mut().insert(name, value.parse()?);
        assert_eq!(server.client.execute(request).await?.status(), 401, "{name}");
    }
    Ok(())
}

#[tokio::test]
async fn the_same_text_in_two_comments_is_two_events() -> Result<()> {
    let (_place, server) = server()?;
    let mut logs = HashSet::new();
    for (comment, is_duplicate) in [(1, false), (2, false), (1, true), (2, true)] {
        let mut payload = github_comment(42, "ann", "Still nothing.");
        payload["comment"]["id"] = comment.into();
        let body = payload.to_string();
        let (_, answer) = send(github(&server, "issue_comment", "d", body.as_bytes())).await?;
        assert_eq!(answer["duplicate"], is_duplicate, "{comment}: {answer}");
        logs.insert(answer["event_log_id"].as_i64());
    }
    assert_eq!(logs.len(), 2);
    Ok(())
}

#[tokio::test]
async fn sql_and_html_in_every_field_of_a_webhook_are_plain_text() -> Result<()> {
    let place = ServerDir::new()?.settings(&integrations())?;
    let many = ["--http-rate-per-second", "1000000", "--http-rate-burst", "1000000"];
    let server = place.serve(&[&["--issue-quiet", "100ms"][..], &many].concat())?;
    let mut requests = Vec::new();
    for text in hostile_texts() {
        let standard_payload =
            json!({"type": "t", "issue": {"id": "i"}, "project": {"id": "p"}, "data": {"x": "y"}});
        for payload in with_text(&standard_payload, &text) {
            let id = format!("m-{}", requests.len());
            requests.push(standard(&server, &id, now(), payload.to_string().as_bytes()));
        }
        for (event, payload) in [
            ("issues", github_issues("opened", 42, "Where is it?")),
            ("issue_comment", github_comment(42, "ann", "It has arrived.")),
        ] {
            for mut payload in with_text(&payload, &text) {
                let id = format!("d-{}", requests.len());
                let object = if event == "issues" { "issue" } else { "comment" };
                payload[object]["id"] = requests.len().into();
                requests.push(github(&server, event, &id, payload.to_string().as_bytes()));
            }
        }
        for (event, payload) in [
            ("Issue Hook", gitlab_issue("open", 23, json!({"title": {"previous": "a"}}))),
            ("Note Hook", gitlab_note(23, "ann", "It has arrived.", json!({}))),
        ] {
            for mut payload in with_text(&payload, &text) {
                let id = format!("u-{}", requests.len());
                payload["object_attributes"]["id"] = requests.len().into();
                requests.push(gitlab(&server, event, &id, &payload));
            }
        }
    }
    assert!(requests.len() > 1000, "{}", requests.len());
    let mut answers: Vec<(u16, Value)> = Vec::new();
    let sending = futures_util::stream::iter(requests.into_iter().map(send)).buffer_unordered(16);
    let mut sending = std::pin::pin!(sending);
    while let Some(answer) = sending.next().await {
        answers.push(answer?);
    }
    for (status, answer) in &answers {
        match status {
            200 => assert!(answer["status"] == "ok" || answer["status"] == "ignored", "{answer}"),
            400 => assert_eq!(answer["error"]["code"], "invalid", "{answer}"),
            other => panic!("{other} {answer}"),
        }
    }
    assert!(answers.iter().filter(|(_, answer)| answer["status"] == "ok").count() > 500);

    // All events are processed, and shown as text.
    all_idle(&server).await?;
    let quarantined = server.get("/api/v1/issues?quarantined=true").await?.1;
    assert_eq!(quarantined["issues"], json!([]), "{quarantined:#}");
    let page = server.get("/console/issues").await?.1;
    let page = page.as_str().context("a page")?;
    assert!(!page.contains("<script>alert") && !page.contains("<img src=x"), "{page}");
    assert!(!server.log().contains("panicked"), "{}", server.log());
    Ok(())
}

#[tokio::test]
async fn the_body_limit_applies_to_the_bytes_read_and_not_to_the_headers() -> Result<()> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (_place, server) = server()?;

    // Chunked: no content length.
    let mut stream = tokio::net::TcpStream::connect(server.address).await?;
    let head = "POST /webhooks/github/shop HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                transfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    let chunk = format!("10000\r\n{}\r\n", " ".repeat(0x10000));
    for _ in 0..40 {
        stream.write_all(chunk.as_bytes()).await?;
    }
    stream.write_all(b"0\r\n\r\n").await?;
    let mut answer = vec![0; 1024];
    let read = tokio::time::timeout(LIMIT, stream.read(&mut answer)).await??;
    let answer = String::from_utf8_lossy(&answer[..read]).into_owned();
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");

    // Truncated: shorter than its content length.
    let mut stream = tokio::net::TcpStream::connect(server.address).await?;
    let head = "POST /webhooks/github/shop HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                content-length: 1000\r\n\r\n{\"a\":";
    stream.write_all(head.as_bytes()).await?;
    stream.shutdown().await?;
    let mut answer = String::new();
    tokio::time::timeout(LIMIT, stream.read_to_string(&mut answer)).await??;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert_eq!(server.get("/health/live").await?.0, 200);
    Ok(())
}

#[tokio::test]
async fn a_rate_limited_client_gets_retry_after() -> Result<()> {
    let place = ServerDir::new()?.settings(&integrations())?;
    let server = place.serve(&["--http-rate-per-second", "1", "--http-rate-burst", "5"])?;
    let mut refused = None;
    // One request per second is allowed again: a slow machine needs some more than five.
    for number in 0..100 {
        let request = github(&server, "ping", &format!("d-{number}"), b"{}");
        let response = request.send().await?;
        if response.status() == 429 {
            assert!(number >= 5, "a burst of five is allowed");
            refused = response.headers().get("retry-after").cloned();
            break;
        }
    }
    let seconds: u64 = refused.context("the sixth request or so is rejected")?.to_str()?.parse()?;
    assert!(seconds >= 1);
    // Health checks are not rate limited.
    for _ in 0..20 {
        assert_eq!(server.get("/health/live").await?.0, 200);
    }
    Ok(())
}

#[tokio::test]
async fn while_the_database_is_unavailable_webhooks_get_retry_after_and_nothing_is_lost()
-> Result<()> {
    let redis = Redis::start()?;
    let postgres = Postgres::start()?;
    let database = postgres.database()?;
    let place = ServerDir::new()?.settings(&integrations())?;
    let server = place.serve(&[
        "--stream-url",
        &redis.url(),
        "--database-url",
        &database.url(),
        "--issue-quiet",
        "50ms",
    ])?;
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;

    postgres.stop()?;
    let body = github_issues("opened", 42, "x").to_string();
    let response = github(&server, "issues", "d-1", body.as_bytes()).send().await?;
    assert_eq!(response.status(), 503);
    assert!(response.headers().contains_key("retry-after"));
    let answer: Value = response.json().await?;
    assert_eq!(answer["error"]["code"], "unavailable");
    let not_ready = server.get("/health/ready").await?;
    assert_eq!(not_ready.0, 503);

    postgres.restart()?;
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;
    let (status, answer) = send(github(&server, "issues", "d-1", body.as_bytes())).await?;
    assert_eq!((status, &answer["status"]), (200, &json!("ok")));
    let path = format!("/api/v1/issues/{}", answer["issue_id"]);
    server.until(&path, |_, issue| issue["pending_events"] == 0).await?;
    Ok(())
}

#[tokio::test]
async fn the_command_counts_webhooks_and_says_why_some_were_rejected() -> Result<()> {
    let (place, server) = server()?;
    let opened = github_issues("opened", 42, "Where is it?").to_string();
    for _ in 0..2 {
        assert_eq!(send(github(&server, "issues", "d-1", opened.as_bytes())).await?.0, 200);
    }
    let unsigned = server.post("/webhooks/github/shop", &json!({"action": "opened"})).await?;
    assert_eq!(unsigned.0, 401);
    let url = server.url("");
    let run = |verb: &[&str]| -> Result<String> {
        let output = place.run(&[&["webhook"][..], verb, &["--url", &url]].concat())?;
        assert!(output.status.success(), "{}", text(&output.stderr));
        Ok(text(&output.stdout))
    };
    let lines = run(&["list", "--json"])?;
    let integrations: Vec<Value> =
        lines.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let one =
        integrations.iter().find(|one| one["integration"] == "shop").context("it is listed")?;
    let counts = ["recorded", "duplicate", "ignored", "rejected"].map(|name| one[name].as_u64());
    assert_eq!(counts, [Some(1), Some(1), Some(0), Some(1)], "{lines}");
    let table = run(&["list"])?;
    assert!(table.starts_with("INTEGRATION") && table.contains("/webhooks/github/shop"), "{table}");
    let rejected = run(&["rejected"])?;
    assert!(rejected.contains("shop") && rejected.contains("rejected"), "{rejected}");

    // Without a server there is nothing to count.
    for words in [["webhook", "list"], ["webhook", "rejected"]] {
        let output = place.run(&words)?;
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("name one with --url or HEADWATER_URL"));
    }
    Ok(())
}
