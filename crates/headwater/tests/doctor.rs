//! The doctor of a server: it reports the current state, and checks the rest if one server is unreachable.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use headwater_testkit::{Postgres, Redis};
use serde_json::{Value, json};
use sqlx::{Connection, SqliteConnection};
use support::cli::CliFixture;
use support::{Server, ServerDir, text};

/// Exit code and findings of a server.
fn doctor(dir: &ServerDir, server: &Server) -> (Option<i32>, Vec<Value>) {
    findings(dir, &["--url", &server.url("")])
}

/// Exit code and findings.
fn findings(dir: &ServerDir, to: &[&str]) -> (Option<i32>, Vec<Value>) {
    let output = dir.run(&[&["doctor", "--json"], to].concat()).unwrap();
    let lines = text(&output.stdout);
    let findings: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(!findings.is_empty(), "{}", text(&output.stderr));
    (output.status.code(), findings)
}

/// The only finding about a subject.
fn only<'a>(findings: &'a [Value], subject: &str) -> &'a Value {
    let found: Vec<_> = findings.iter().filter(|finding| finding["subject"] == subject).collect();
    assert_eq!(found.len(), 1, "{subject}: {findings:?}");
    found[0]
}

/// Severity of the only finding about a subject.
fn severity<'a>(findings: &'a [Value], subject: &str) -> &'a str {
    only(findings, subject)["severity"].as_str().unwrap()
}

/// A field of a finding.
fn field<'a>(finding: &'a Value, name: &str) -> &'a str {
    finding[name].as_str().unwrap()
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

#[test]
fn the_commands_are_those_that_the_server_under_test_has() {
    let redis = Redis::start().unwrap();
    let info = redis.command(&["INFO", "server"]).unwrap().ok().unwrap().text();
    let line = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let server = match line("valkey_version:") {
        Some(valkey) => format!("Valkey {valkey}, compatible with Redis "),
        None => format!("Redis {}: ", line("redis_version:").unwrap()),
    };
    redis.command(&["XGROUP", "CREATE", "probe", "g", "0", "MKSTREAM"]).unwrap().ok().unwrap();
    let groups = redis.command(&["XINFO", "GROUPS", "probe"]).unwrap().ok().unwrap();
    let has_lag = groups.items()[0].items().iter().any(|item| item.text() == "lag");
    let works = |words: &[&str]| redis.command(words).unwrap().ok().is_ok();
    let probed = [
        ("(XINFO)", has_lag),
        ("(allow-oom)", works(&["EVAL", "#!lua flags=allow-oom\nreturn 1", "0"])),
        ("(CLIENT SETINFO)", works(&["CLIENT", "SETINFO", "LIB-NAME", "probe"])),
    ];

    let dir = ServerDir::new().unwrap();
    let (_, found) = findings(&dir, &["--stream-url", &redis.url()]);
    let commands = only(&found, "commands");
    let (used, missing) = field(commands, "found").split_once("; it lacks ").unwrap();
    assert!(used.starts_with(&server), "{server}: {used}");
    for (name, is_there) in probed {
        assert_eq!(
            (used.contains(name), missing.contains(name)),
            (is_there, !is_there),
            "{commands}"
        );
    }
    let expected = if probed[1].1 { "ok" } else { "warning" };
    assert_eq!(field(commands, "severity"), expected, "{commands}");
}

#[test]
fn a_large_topic_without_a_retention_and_many_dead_letters_are_warnings() {
    let redis = Redis::start().unwrap();
    let dir = ServerDir::new().unwrap();
    let to = ["--stream-url", &redis.url()];
    let run = |words: &[&str]| {
        let output = dir.run(&[words, &to].concat()).unwrap();
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    };
    let fill = |key: &str, count: &str, bytes: &str| {
        let script = "local text = string.rep('x', tonumber(ARGV[2]))
            for _ = 1, tonumber(ARGV[1]) do redis.call('XADD', KEYS[1], '*', 'payload', text) end";
        redis.command(&["EVAL", script, "1", key, count, bytes]).unwrap().ok().unwrap();
    };
    run(&["topic", "create", "many"]);
    run(&["topic", "create", "large"]);
    run(&["topic", "create", "limited", "--retention-age", "7d"]);
    run(&["topic", "create", "budget", "--byte-budget", "1GB"]);
    run(&["produce", "clicks", "--payload", "x", "--create"]);
    let warnings = || {
        let (_, found) = findings(&dir, &to);
        let is_ours =
            |one: &Value| ["topics", "dead letters"].iter().any(|it| one["subject"] == *it);
        found
            .into_iter()
            .filter(|one| is_ours(one) && one["severity"] == "warning")
            .map(|one| (field(&one, "found").to_owned(), field(&one, "advice").to_owned()))
            .collect::<Vec<_>>()
    };
    let none: [(String, String); 0] = [];
    // At the thresholds there is no warning.
    fill("stream:topic:many:p:0", "100000", "1");
    fill("stream:topic:many:dlq", "10000", "1");
    assert_eq!(warnings(), none);

    fill("stream:topic:many:p:0", "1", "1");
    fill("stream:topic:many:dlq", "1", "1");
    fill("stream:topic:large:p:0", "110", "1048576");
    fill("stream:topic:limited:p:0", "100001", "1");
    fill("stream:topic:budget:p:0", "100001", "1");
    fill("clicks", "100000", "1");
    let found = warnings();
    let about = |topic: &str, what: &str| {
        let start = format!("topic `{topic}` {what}");
        let found: Vec<_> = found.iter().filter(|(found, _)| found.starts_with(&start)).collect();
        assert_eq!(found.len(), 1, "{start}: {found:?}");
        found[0].clone()
    };
    assert_eq!(found.len(), 4, "{found:?}");
    let (many, advice) = about("many", "keeps everything");
    assert!(many.contains("100001 messages"), "{many}");
    assert!(advice.contains("`headwater topic alter many --retention-age 7d`"), "{advice}");
    assert!(about("large", "keeps everything").0.contains("110 messages ("), "{found:?}");
    // A plain topic cannot have a retention.
    let (_, advice) = about("clicks", "keeps everything");
    assert!(advice.contains("`headwater topic trim clicks --count 100000`"), "{advice}");
    let (_, advice) = about("many", "has 10001 dead letters");
    for command in ["dlq list many", "dlq replay many --all", "dlq purge many --all"] {
        assert!(advice.contains(&format!("`headwater {command}`")), "{advice}");
    }

    // The advice helps.
    run(&["topic", "alter", "many", "--retention-age", "7d"]);
    run(&["topic", "alter", "large", "--byte-budget", "1GB"]);
    run(&["topic", "trim", "clicks", "--count", "100000", "--yes"]);
    run(&["dlq", "purge", "many", "--all", "--yes"]);
    assert_eq!(warnings(), none);
}

#[test]
fn tables_without_a_retention_and_a_large_analytics_file_are_named() {
    let dir = ServerDir::new().unwrap();
    let to = ["--database-url", "sqlite:headwater.db", "--stream-url", "embedded:memory"];
    assert!(dir.run(&[&["migrate"][..], &to].concat()).unwrap().status.success());
    let found = |more: &[&str]| findings(&dir, &[&to[..], more].concat()).1;
    let of_events = ["event_logs", "event_log_originals", "issue_runs"];
    let of_issues =
        ["issues", "tickets", "ticket_messages", "drafts", "tool_effects", "desk_usage"];
    let of_models = ["model_runs", "model_run_days"];
    let of_issues = [&of_issues[..], &of_models].concat();
    let (events, issues) = (["--retention-events", "0ms"], ["--retention-issues", "0ms"]);
    for (more, named, silent, advice) in [
        (&events[..], &of_events[..], &of_issues[..], "set `retention.events`"),
        (&issues, &of_issues, &of_events, "set `retention.issues`"),
        (
            &[events, issues].concat(),
            &[&of_events[..], &of_issues].concat(),
            &["outbox"],
            "set `retention.events` and `retention.issues`",
        ),
    ] {
        let found = found(more);
        let retention = only(&found, "retention");
        assert_eq!((field(retention, "severity"), field(retention, "advice")), ("warning", advice));
        let says = |table: &&str| field(retention, "found").contains(&format!("`{table}`"));
        assert!(named.iter().all(says) && !silent.iter().any(says), "{retention}");
    }
    assert_eq!(severity(&found(&[]), "retention"), "ok");

    // Sparse files, which need no space.
    let is_of_analytics = |one: &&Value| one["subject"] == "analytics";
    assert_eq!(found(&[]).iter().find(is_of_analytics), None, "there is no file");
    let large = ["--analytics-path", "large.duckdb"];
    let size = |name: &str, bytes: u64| {
        let file = std::fs::File::create(dir.path().join(name)).unwrap();
        file.set_len(bytes).unwrap();
    };
    size("large.duckdb", 10 << 30);
    assert_eq!(severity(&found(&large), "analytics"), "ok");
    size("large.duckdb.wal", 1 << 20);
    let found = found(&large);
    let analytics = only(&found, "analytics");
    assert_eq!(field(analytics, "severity"), "warning", "{analytics}");
    assert!(field(analytics, "found").contains("has 10241 MiB"), "{analytics}");
    assert!(field(analytics, "advice").contains("`headwater analytics rebuild`"), "{analytics}");
}

#[tokio::test]
async fn open_tickets_that_nobody_answers_are_counted() {
    let dir = ServerDir::new().unwrap();
    let to = ["--database-url", "sqlite:headwater.db", "--stream-url", "embedded:memory"];
    let mut server = dir.serve(&to).unwrap();
    for title in ["old", "older", "new"] {
        let ticket = json!({"title": title, "content": "Where is it?"});
        assert_eq!(server.post("/api/v1/tickets", &ticket).await.unwrap().0, 201);
    }
    assert!(server.stop().unwrap().success());
    let found = || findings(&dir, &to).1;
    assert!(found().iter().all(|one| one["subject"] != "tickets"), "{:?}", found());

    let url = format!("sqlite:{}", dir.path().join("headwater.db").display());
    let mut database = SqliteConnection::connect(&url).await.unwrap();
    let year_ms = 366_u64 * 24 * 60 * 60 * 1000;
    sqlx::query("UPDATE tickets SET updated_at = updated_at - ? WHERE title <> 'new'")
        .bind(i64::try_from(year_ms).unwrap())
        .execute(&mut database)
        .await
        .unwrap();
    let found = found();
    let tickets = only(&found, "tickets");
    assert_eq!(field(tickets, "severity"), "warning", "{tickets}");
    assert!(field(tickets, "found").starts_with("2 tickets have been open"), "{tickets}");
    assert!(field(tickets, "advice").contains("`headwater ticket list"), "{tickets}");
}
