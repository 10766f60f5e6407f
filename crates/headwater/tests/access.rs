//! Authentication, roles, the audit log and HTTP limits of the real binary.

mod support;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::sender::{github, github_issues, integrations, send};
use crate::support::{LIMIT, Server, ServerDir};

const READ: &str = "read-read-read-read";
const WRITE: &str = "write-write-write-write";
const ADMIN: &str = "admin-admin-admin-admin";

fn with_tokens() -> Result<(ServerDir, Server)> {
    with_tokens_at(&[])
}

fn with_tokens_at(arguments: &[&str]) -> Result<(ServerDir, Server)> {
    let tokens = [("reader", "read", READ), ("writer", "write", WRITE), ("boss", "admin", ADMIN)];
    let mut settings = integrations();
    for (name, role, token) in tokens {
        settings +=
            &format!("[[token]]\nname = \"{name}\"\nrole = \"{role}\"\ntoken = \"{token}\"\n");
    }
    let dir = ServerDir::new()?.settings(&settings)?;
    let server = dir.serve(&[&["--issue-quiet", "50ms"], arguments].concat())?;
    Ok((dir, server))
}

async fn ask(
    server: &Server,
    method: &str,
    path: &str,
    token: Option<&str>,
) -> Result<(u16, Value)> {
    let mut request = server.client.request(method.parse()?, server.url(path));
    if let Some(token) = token {
        request = request.bearer_auth(token);
    }
    send(request).await
}

#[tokio::test]
async fn each_role_grants_its_operations_and_no_more() -> Result<()> {
    let (_dir, server) = with_tokens()?;
    let body = github_issues("opened", 42, "x").to_string();
    let (status, recorded) = send(github(&server, "issues", "d-1", body.as_bytes())).await?;
    assert_eq!(status, 200, "a signed webhook needs no token");
    let id = recorded["issue_id"].as_i64().context("an id")?;

    let look = [
        "/api/v1/issues".to_owned(),
        format!("/api/v1/issues/{id}"),
        format!("/api/v1/issues/{id}/why"),
        format!("/api/v1/issues/{id}/timeline"),
        format!("/api/v1/issues/{id}/events"),
        "/metrics".to_owned(),
    ];
    let change = [format!("/api/v1/issues/{id}/retry"), format!("/api/v1/issues/{id}/release")];
    for path in &look {
        for (token, status) in
            [(None, 401), (Some("guess-guess-guess"), 401), (Some(READ), 200), (Some(ADMIN), 200)]
        {
            assert_eq!(ask(&server, "GET", path, token).await?.0, status, "{path} {token:?}");
        }
    }
    for path in &change {
        for (token, status) in
            [(None, 401), (Some(READ), 403), (Some(WRITE), 200), (Some(ADMIN), 200)]
        {
            assert_eq!(ask(&server, "POST", path, token).await?.0, status, "{path} {token:?}");
        }
    }
    for (token, status) in [(None, 401), (Some(READ), 403), (Some(WRITE), 403), (Some(ADMIN), 200)]
    {
        assert_eq!(ask(&server, "GET", "/api/v1/audit", token).await?.0, status, "{token:?}");
    }
    for path in ["/health/live", "/health/ready"] {
        assert_ne!(ask(&server, "GET", path, None).await?.0, 401, "{path} is unauthenticated");
    }
    assert!(!server.log().contains(READ) && !server.log().contains(ADMIN), "no token is logged");
    Ok(())
}

#[tokio::test]
async fn every_change_is_in_the_audit_log_with_who_what_and_when() -> Result<()> {
    let (_dir, server) = with_tokens()?;
    assert_eq!(ask(&server, "POST", "/api/v1/issues/7/retry", Some(WRITE)).await?.0, 404);
    assert_eq!(ask(&server, "POST", "/api/v1/issues/7/release", Some(ADMIN)).await?.0, 404);
    assert_eq!(ask(&server, "POST", "/api/v1/issues/7/retry", Some(READ)).await?.0, 403);
    assert_eq!(ask(&server, "GET", "/api/v1/issues", Some(WRITE)).await?.0, 200);

    let (_, log) = ask(&server, "GET", "/api/v1/audit", Some(ADMIN)).await?;
    let entries = log["entries"].as_array().context("entries")?;
    let recorded: Vec<_> = entries
        .iter()
        .map(|entry| {
            (
                entry["caller"].as_str(),
                entry["method"].as_str(),
                entry["path"].as_str(),
                entry["status"].as_u64(),
            )
        })
        .collect();
    assert_eq!(
        recorded,
        [
            (Some("boss"), Some("POST"), Some("/api/v1/issues/7/release"), Some(404)),
            (Some("writer"), Some("POST"), Some("/api/v1/issues/7/retry"), Some(404)),
        ],
        "newest first; reads and rejected requests are not recorded"
    );
    for entry in entries {
        assert!(entry["at"].as_str().is_some_and(|at| at.starts_with("20") && at.ends_with('Z')));
        assert_eq!(entry["client"], "127.0.0.1");
    }

    let (_, first) = ask(&server, "GET", "/api/v1/audit?limit=1", Some(ADMIN)).await?;
    let cursor = first["next_cursor"].as_str().context("a cursor")?;
    let (_, second) =
        ask(&server, "GET", &format!("/api/v1/audit?limit=1&cursor={cursor}"), Some(ADMIN)).await?;
    assert_eq!(second["entries"][0], entries[1]);
    assert!(first.get("searched").is_none(), "without a filter nothing is searched");

    // By caller, path and time; the answer says how many entries were searched.
    for (filter, found) in [
        ("caller=writer", vec![&entries[1]]),
        ("path=ISSUES%2F7%2Frel", vec![&entries[0]]),
        ("caller=boss&path=retry", vec![]),
        ("caller=&path=&from=2026-01-01T00:00:00Z", vec![&entries[0], &entries[1]]),
        ("from=9999-01-01T00:00:00Z", vec![]),
    ] {
        let path = format!("/api/v1/audit?{filter}");
        let (status, page) = ask(&server, "GET", &path, Some(ADMIN)).await?;
        assert_eq!(status, 200, "{filter}: {page}");
        let searched = if filter.starts_with("from=9999") { 0 } else { 2 };
        assert_eq!((&page["searched"], &page["next_cursor"]), (&json!(searched), &Value::Null));
        let listed: Vec<_> = page["entries"].as_array().context("entries")?.iter().collect();
        assert_eq!(listed, found, "{filter}");
    }
    for wrong in [
        "limit=0",
        "limit=501",
        "limit=x",
        "cursor=x",
        "cursro=1",
        "from=x",
        "caller=%00",
        "path=a%00",
    ] {
        let (status, answer) =
            ask(&server, "GET", &format!("/api/v1/audit?{wrong}"), Some(ADMIN)).await?;
        assert_eq!((status, answer["error"]["code"].as_str()), (400, Some("invalid")), "{wrong}");
    }
    Ok(())
}

#[tokio::test]
async fn unknown_issues_and_invalid_queries_are_rejected() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    for (method, path, status) in [
        ("GET", "/api/v1/issues/7", 404),
        ("GET", "/api/v1/issues/7/why", 404),
        ("GET", "/api/v1/issues/7/events", 404),
        ("POST", "/api/v1/issues/7/retry", 404),
        ("POST", "/api/v1/issues/7/release", 404),
        ("GET", "/api/v1/issues/seven", 404),
        ("GET", "/api/v1/issues/99999999999999999999", 404),
        ("GET", "/api/v1/issues/%00", 404),
        ("GET", "/api/v1/issues/-1", 404),
        ("POST", "/api/v1/issues/1;DROP%20TABLE%20issues/retry", 404),
        ("GET", "/api/v1/issues?status=lost", 400),
        ("GET", "/api/v1/issues?limit=0", 400),
        ("GET", "/api/v1/issues?limit=501", 400),
        ("GET", "/api/v1/issues?limit=-1", 400),
        ("GET", "/api/v1/issues?cursor=x", 400),
        ("GET", "/api/v1/issues?quarantined=maybe", 400),
        ("GET", "/api/v1/issues?stauts=idle", 400),
        ("GET", "/api/v1/issues/7/events?limit=0", 400),
        ("DELETE", "/api/v1/issues/7", 405),
        ("GET", "/api/v1/nothing", 404),
        ("GET", "/api/v2/issues", 404),
    ] {
        let (found, answer) = ask(&server, method, path, None).await?;
        assert_eq!(found, status, "{method} {path}: {answer}");
        assert!(answer["error"]["code"].is_string(), "{method} {path}: {answer}");
        assert!(answer["error"]["message"].is_string(), "{method} {path}: {answer}");
    }
    let odd = "/api/v1/issues?integration=%27%3B%20DROP%20TABLE%20issues%3B%20--&status=idle";
    assert_eq!(
        ask(&server, "GET", odd, None).await?,
        (200, json!({"issues": [], "next_cursor": null}))
    );
    Ok(())
}

#[tokio::test]
async fn issue_pages_are_complete_and_filters_apply() -> Result<()> {
    let dir = ServerDir::new()?.settings(&integrations())?;
    let server = dir.serve(&["--issue-quiet", "1h", "--issue-max-wait", "2h"])?;
    for number in 1..=5 {
        let body = github_issues("opened", number, "x").to_string();
        send(github(&server, "issues", &format!("d-{number}"), body.as_bytes())).await?;
    }
    let mut seen = Vec::new();
    let mut path = "/api/v1/issues?limit=2&status=queued&integration=shop".to_owned();
    loop {
        let (_, page) = server.get(&path).await?;
        let issues = page["issues"].as_array().context("issues")?;
        assert!(issues.len() <= 2);
        seen.extend(
            issues
                .iter()
                .filter_map(|issue| issue["external_issue_id"].as_str().map(str::to_owned)),
        );
        let Some(cursor) = page["next_cursor"].as_i64() else { break };
        path = format!("/api/v1/issues?limit=2&status=queued&integration=shop&cursor={cursor}");
    }
    assert_eq!(seen, ["1", "2", "3", "4", "5"]);
    assert_eq!(server.get("/api/v1/issues?status=processing").await?.1["issues"], json!([]));
    assert_eq!(server.get("/api/v1/issues?quarantined=true").await?.1["issues"], json!([]));
    let why = server.get("/api/v1/issues/1/why").await?.1;
    assert_eq!(why["reason"], "waiting");
    assert!(
        why["sentence"]
            .as_str()
            .is_some_and(|sentence| sentence.contains("waits for further events until")),
        "{why}"
    );

    let (_, retried) = server.post("/api/v1/issues/1/retry", &json!({})).await?;
    assert_eq!(retried["result"], "queued", "it no longer waits for the debounce window");
    server.until("/api/v1/issues/1", |_, issue| issue["pending_events"] == 0).await?;
    assert_eq!(
        server.post("/api/v1/issues/1/release", &json!({})).await?.1["result"],
        "not_quarantined"
    );
    Ok(())
}

#[tokio::test]
async fn cross_origin_requests_cannot_change_anything() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    let change = || server.client.post(server.url("/api/v1/issues/1/retry"));
    let (status, answer) = send(change().header("origin", "https://evil.example")).await?;
    assert_eq!((status, answer["error"]["code"].as_str()), (403, Some("other_page")));
    let (status, answer) = send(change().header("host", "evil.example")).await?;
    assert_eq!((status, answer["error"]["code"].as_str()), (403, Some("other_name")));
    assert_eq!(send(change()).await?.0, 404);
    Ok(())
}

/// Sends raw bytes and returns everything received until the connection ends.
async fn raw(server: &Server, bytes: &[u8]) -> Result<String> {
    let mut stream = tokio::net::TcpStream::connect(server.address).await?;
    stream.write_all(bytes).await?;
    let mut answer = Vec::new();
    // A closed connection may end with an error after its response.
    let _ = tokio::time::timeout(LIMIT, stream.read_to_end(&mut answer)).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[tokio::test]
async fn slow_large_and_malformed_headers_are_rejected() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--http-read-timeout", "3s", "--http-header-bytes-max", "8192"])?;
    let large = format!("GET / HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "x".repeat(20_000));
    assert!(raw(&server, large.as_bytes()).await?.starts_with("HTTP/1.1 431 "));
    let many = format!("GET / HTTP/1.1\r\nhost: localhost\r\n{}\r\n", "x: 1\r\n".repeat(150));
    assert!(raw(&server, many.as_bytes()).await?.starts_with("HTTP/1.1 431 "));
    assert!(raw(&server, b"nonsense\r\n\r\n").await?.starts_with("HTTP/1.1 400 "));
    // The server closes it although nothing more is sent.
    raw(&server, b"GET / HTTP/1.1\r\nhost: ").await?;
    let slow =
        "POST /api/v1/issues/1/retry HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{";
    raw(&server, slow.as_bytes()).await?;
    assert_eq!(server.get("/health/live").await?.0, 200);
    Ok(())
}

#[tokio::test]
async fn consuming_system_streams_requires_the_admin_role() -> Result<()> {
    let (_dir, server) = with_tokens()?;
    let call = async |what: &str, topic: &str, group: &str, token: &str, body: &Value| {
        let path = format!("/api/v1/topics/{topic}/groups/{group}/{what}");
        let request = server.client.post(server.url(&path)).bearer_auth(token);
        anyhow::Ok(request.json(body).send().await?.status().as_u16())
    };
    let consume = async |topic: &str, group: &str, token: &str| -> Result<u16> {
        let status = call("pull", topic, group, token, &json!({"wait_ms": 0})).await?;
        for (what, list) in [("settle", "settlements"), ("extend", "leases")] {
            assert_eq!(call(what, topic, group, token, &json!({list: []})).await?, status);
        }
        Ok(status)
    };
    for (topic, group) in [
        ("issue_work", "issue-workers"),
        ("issue_work", "mine"),
        ("ticket_events", "ai_processor_group"),
        ("ticket_events", "analytics_group"),
        ("wink:control:default", "mine"),
        ("wink:events:issue-1-run-1", "mine"),
        ("streaming:mq:retry:orders", "mine"),
        ("stream:topic:orders:p:0", "mine"),
    ] {
        assert_eq!(consume(topic, group, WRITE).await?, 403, "{topic} {group}");
    }
    assert_eq!(consume("issue_work", "mine", ADMIN).await?, 200);
    // Other groups of `ticket_events` and user topics need only `write`.
    assert_eq!(consume("ticket_events", "mine", WRITE).await?, 200);
    assert_eq!(consume("orders", "mine", WRITE).await?, 200);
    Ok(())
}

#[tokio::test]
async fn sending_to_system_streams_and_to_streams_of_other_programs_requires_the_admin_role()
-> Result<()> {
    let redis = headwater_testkit::Redis::start()?;
    let (_dir, server) = with_tokens_at(&["--stream-url", &redis.url()])?;
    let produce = async |topic: &str, token: &str| -> Result<u16> {
        let request = server.client.post(server.url(&format!("/api/v1/topics/{topic}/messages")));
        let body = json!({"messages": [{"payload": "x"}], "create": true});
        Ok(send(request.bearer_auth(token).json(&body)).await?.0)
    };
    redis.command(&["XADD", "jobs", "*", "task", "1"])?.ok()?;
    redis.command(&["XADD", "mails", "*", "payload", "hello", "to", "ada"])?.ok()?;
    redis.command(&["XADD", "clicks", "*", "payload", "from another client"])?.ok()?;
    redis.command(&["SET", "counter", "1"])?.ok()?;
    for topic in [
        "issue_work",
        "ticket_events",
        "wink:control:default",
        "wink:events:issue-1-run-1",
        "streaming:mq:retry:orders",
        "streaming:mq:desk:provisional",
        "stream:topic:orders:p:0",
        "jobs",
        "mails",
    ] {
        let length = redis.command(&["XLEN", topic])?;
        assert_eq!(produce(topic, WRITE).await?, 403, "{topic}");
        assert_eq!(redis.command(&["XLEN", topic])?, length, "{topic}");
    }
    assert_eq!(produce("counter", WRITE).await?, 409, "it is no stream");
    assert_eq!(redis.command(&["GET", "counter"])?.text(), "1");
    for topic in ["orders", "orders", "clicks"] {
        assert_eq!(produce(topic, WRITE).await?, 201, "{topic}");
    }
    assert_eq!(produce("jobs", ADMIN).await?, 201);
    Ok(())
}

#[tokio::test]
async fn without_tokens_nobody_behind_a_proxy_is_an_admin() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    let (status, _) = ask(&server, "GET", "/api/v1/issues", None).await?;
    assert_eq!(status, 200, "a local request needs no token");
    for header in ["X-Forwarded-For", "X-Forwarded-Host", "Forwarded", "Via", "X-Real-IP"] {
        for (method, path) in
            [("GET", "/api/v1/issues"), ("POST", "/api/v1/topics"), ("GET", "/metrics")]
        {
            let request = server.client.request(method.parse()?, server.url(path));
            let (status, body) =
                send(request.header(header, "203.0.113.7").json(&json!({"name": "t"}))).await?;
            assert_eq!(
                (status, &body["error"]["code"]),
                (403, &json!("proxied")),
                "{header} {path}"
            );
        }
    }
    let probe =
        server.client.get(server.url("/health/live")).header("Via", "1.1 proxy").send().await?;
    assert_eq!(probe.status(), 200, "probes come through proxies");
    Ok(())
}

/// Older versions of nginx send HTTP/1.0 to the server behind them, with its address as `Host` and no header of their own.
#[tokio::test]
async fn without_tokens_requests_in_http_1_0_are_rejected_and_probes_are_not() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    server.until("/health/ready", |status, _| status == 200).await?;
    let get = async |path: &str, version: &str| -> Result<(String, String)> {
        let address = server.address;
        let request =
            format!("GET {path} HTTP/{version}\r\nhost: {address}\r\nconnection: close\r\n\r\n");
        let answer = raw(&server, request.as_bytes()).await?;
        let status = answer.split(' ').nth(1).unwrap_or_default().to_owned();
        Ok((status, answer))
    };
    for path in ["/api/v1/issues", "/metrics", "/console/topics"] {
        let (status, answer) = get(path, "1.0").await?;
        assert_eq!(status, "403", "{path}: {answer}");
        let (status, answer) = get(path, "1.1").await?;
        assert_eq!(status, "200", "{path}: {answer}");
    }
    let (_, answer) = get("/api/v1/issues", "1.0").await?;
    assert!(answer.contains("proxied") && answer.contains("HTTP/1.0"), "{answer}");
    for path in ["/health", "/health/live", "/health/ready"] {
        let (status, answer) = get(path, "1.0").await?;
        assert_eq!(status, "200", "probes of load balancers may use HTTP/1.0: {path}: {answer}");
    }
    Ok(())
}

#[tokio::test]
async fn behind_a_trusted_proxy_the_audit_log_has_the_address_of_the_client() -> Result<()> {
    let token = format!("[[token]]\nname = \"boss\"\nrole = \"admin\"\ntoken = \"{ADMIN}\"\n");
    let dir = ServerDir::new()?.settings(&token)?;
    for (forwarded, client) in [("true", "203.0.113.7"), ("false", "127.0.0.1")] {
        let mut server = dir.serve(&["--http-forwarded", forwarded])?;
        let request = server.client.post(server.url("/api/v1/topics")).bearer_auth(ADMIN);
        let request = request.header("X-Forwarded-For", "10.1.1.1, 203.0.113.7");
        send(request.json(&json!({"name": format!("orders-{forwarded}")}))).await?;
        let (_, log) = ask(&server, "GET", "/api/v1/audit?limit=1", Some(ADMIN)).await?;
        assert_eq!(log["entries"][0]["client"], client, "{log}");
        assert!(server.stop()?.success(), "{}", server.log());
    }
    Ok(())
}

#[tokio::test]
async fn cross_origin_navigation_is_allowed_and_other_requests_are_rejected() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&[])?;
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;
    let look = async |path: &str, mode: &str, dest: &str| -> Result<(u16, Value)> {
        let request = server.client.get(server.url(path));
        let request = request.header("sec-fetch-site", "cross-site").header("sec-fetch-mode", mode);
        send(request.header("sec-fetch-dest", dest)).await
    };
    let costly =
        ["/api/v1/sql?query=select%201", "/api/v1/audit/books", "/api/v1/topics", "/metrics"];
    for path in costly {
        let (status, refused) = look(path, "no-cors", "image").await?;
        assert_eq!((status, &refused["error"]["code"]), (403, &json!("other_page")), "{path}");
    }
    assert_eq!(look("/", "navigate", "document").await?.0, 200);
    assert_eq!(look("/api/v1/topics", "navigate", "document").await?.0, 403);
    assert_eq!(look("/health/ready", "no-cors", "image").await?.0, 200, "health is not protected");
    Ok(())
}
