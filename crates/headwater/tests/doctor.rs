//! The doctor of a server: it reports the current state, and checks the rest if one server is unreachable.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use headwater_testkit::{Postgres, Redis};
use serde_json::Value;
use support::cli::CliFixture;
use support::{Server, ServerDir, text};

/// Exit code and findings.
fn doctor(dir: &ServerDir, server: &Server) -> (Option<i32>, Vec<Value>) {
    let output = dir.run(&["doctor", "--json", "--url", &server.url("")]).unwrap();
    let lines = text(&output.stdout);
    let findings: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(!findings.is_empty(), "{}", text(&output.stderr));
    (output.status.code(), findings)
}

/// Severity of the only finding about a subject.
fn severity<'a>(findings: &'a [Value], subject: &str) -> &'a str {
    let found: Vec<_> = findings.iter().filter(|finding| finding["subject"] == subject).collect();
    assert_eq!(found.len(), 1, "{subject}: {findings:?}");
    found[0]["severity"].as_str().unwrap()
}

#[test]
fn it_reports_the_current_state_of_redis() {
    let cli = CliFixture::with_server();
    let redis = cli.redis.as_ref().unwrap();
    let set = |name: &str, value: &str| {
        redis.command(&["CONFIG", "SET", name, value]).unwrap();
    };
    let look = || doctor(&cli.dir, cli.server());
    for (name, wrong, right, subject, expected) in [
        ("maxmemory-policy", "allkeys-lru", "noeviction", "eviction", "error"),
        ("notify-keyspace-events", "", "Ex", "notify-keyspace-events", "warning"),
        ("appendonly", "no", "yes", "persistence", "warning"),
        ("maxmemory", "1", "1gb", "memory", "error"),
    ] {
        let of_redis = |findings: Vec<Value>| -> Vec<Value> {
            // The database has findings about persistence as well.
            let is_redis = |finding: &Value| !finding["found"].as_str().unwrap().contains("sync");
            let is_ours =
                |finding: &Value| finding["subject"] != "persistence" || is_redis(finding);
            findings
                .into_iter()
                .filter(is_ours)
                .filter(|it| it["found"] != "full_page_writes is on")
                .collect()
        };
        set(name, right);
        assert_eq!(severity(&of_redis(look().1), subject), "ok", "{name} {right}");
        set(name, wrong);
        let (code, findings) = look();
        assert_eq!(severity(&of_redis(findings), subject), expected, "{name} {wrong}");
        if subject == "memory" {
            // Writes fail with the same reason.
            let message = cli.fails(&["produce", "orders", "--payload", "x", "--create"], 3);
            assert!(message.contains("stream backend is full"), "{message}");
        }
        assert!(code == Some(1) || expected == "warning" && code == Some(4), "{name}: {code:?}");
        set(name, right);
    }
}

#[tokio::test]
async fn an_unreachable_or_silent_server_is_reported_with_all_other_findings() {
    let (redis, postgres) = (Redis::start().unwrap(), Postgres::start().unwrap());
    let database = postgres.database().unwrap();
    let dir = ServerDir::new().unwrap();
    let server =
        dir.serve(&["--stream-url", &redis.url(), "--database-url", &database.url()]).unwrap();
    server.until("/health/ready", |_, body| body["status"] == "ready").await.unwrap();
    let of_streams = ["eviction", "commands", "groups"];
    let of_database = ["migrations", "workers", "outbox"];
    let check = |unreachable: &str, reported: &[&str], missing: &[&str]| {
        let (code, findings) = doctor(&dir, &server);
        assert_eq!(code, Some(3), "{findings:?}");
        assert_eq!(severity(&findings, unreachable), "unreachable", "{findings:?}");
        reported.iter().for_each(|subject| assert_eq!(severity(&findings, subject), "ok"));
        let is_reported = |subject: &&str| findings.iter().any(|it| it["subject"] == **subject);
        assert!(!missing.iter().any(is_reported), "{findings:?}");
    };

    redis.pause().unwrap();
    check("streams", &of_database, &of_streams);
    redis.resume().unwrap();
    redis.stop().unwrap();
    check("streams", &of_database, &of_streams);
    redis.restart().unwrap();
    server.until("/health/ready", |_, body| body["status"] == "ready").await.unwrap();

    postgres.pause().unwrap();
    check("database", &of_streams, &of_database);
    postgres.resume().unwrap();
    postgres.stop().unwrap();
    check("database", &of_streams, &of_database);
    postgres.restart().unwrap();
    server.until("/health/ready", |_, body| body["status"] == "ready").await.unwrap();
    let (_, findings) = doctor(&dir, &server);
    assert_eq!(severity(&findings, "database"), "ok", "{findings:?}");
}

/// Exit code and result of a command that prints JSON lines.
fn json_lines(dir: &ServerDir, words: &[&str]) -> (Option<i32>, Vec<Value>, String) {
    let output = dir.run(words).unwrap();
    let lines = text(&output.stdout);
    let lines = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (output.status.code(), lines, text(&output.stderr))
}

#[tokio::test]
async fn the_consistency_check_covers_all_issues_over_http_and_resumes() {
    let database = Postgres::shared().unwrap().database().unwrap();
    let dir = ServerDir::new().unwrap();
    let server = dir.serve(&["--database-url", &database.url()]).unwrap();
    server.until("/health/ready", |_, body| body["status"] == "ready").await.unwrap();
    // More than two pages, each issue with one processed event.
    let insert = "WITH g AS (INSERT INTO integrations (name, provider) VALUES ('many', 'github') RETURNING id),
          i AS (INSERT INTO issues (integration_id, external_project_id, external_issue_id)
              SELECT g.id, 'p', n::text FROM g, generate_series(1, 450) AS n RETURNING id, integration_id)
        INSERT INTO event_logs (issue_id, integration_id, source, event_type, dedup_key, digest, payload, payload_bytes,
            processed_at)
        SELECT id, integration_id, 's', 't', id::text, '', '{}', 2, now() FROM i";
    database.query(insert).unwrap();
    let url = server.url("");
    let audit = |more: &[&str]| {
        json_lines(&dir, &[&["audit", "books", "--json", "--url", &url], more].concat())
    };
    let (code, books, _) = audit(&[]);
    assert_eq!(
        (code, &books[0]["issues"], &books[0]["recorded"]),
        (Some(0), &450.into(), &450.into())
    );
    assert_eq!((&books[0]["balances"], &books[0]["next_cursor"]), (&true.into(), &Value::Null));

    // An inconsistent issue in the last page.
    let last: i64 = database.query("SELECT max(id) FROM issues").unwrap().trim().parse().unwrap();
    database.query(&format!("UPDATE issues SET pending_events = 3 WHERE id = {last}")).unwrap();
    let (code, books, message) = audit(&[]);
    assert_eq!((code, &books[0]["discrepancies_total"]), (Some(1), &1.into()), "{message}");
    assert_eq!(books[0]["discrepancies"][0]["issue_id"], last);
    let (code, books, _) = audit(&["--after", &(last - 10).to_string()]);
    assert_eq!((code, &books[0]["issues"]), (Some(1), &10.into()));

    // It is part of the doctor only on request.
    let (_, findings) = doctor(&dir, &server);
    assert!(findings.iter().all(|finding| finding["subject"] != "audit"), "{findings:?}");
    let (code, findings, _) =
        json_lines(&dir, &["doctor", "--consistency", "--json", "--url", &url]);
    assert_eq!((code, severity(&findings, "audit")), (Some(1), "error"));
}
