//! What operators are told is true: schema versions, lists of topics, holders of files, causes, names.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::process::Stdio;

use headwater_testkit::Postgres;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection, SqliteConnection};
use support::cli::{CliFixture, until};
use support::desk::{answered, open};
use support::{ServerDir, text};

#[tokio::test]
async fn an_older_and_a_newer_schema_are_named_with_both_versions_and_changed_by_no_command() {
    let database = Postgres::shared().unwrap().database().unwrap();
    let dir = ServerDir::new().unwrap();
    let to = ["--database-url", &database.url(), "--stream-url", "embedded:memory"];
    let run = |verb: &[&str]| dir.run(&[verb, &to].concat()).unwrap();
    let bench = ["bench", "record", "--count", "1"];
    // An empty database: also `bench` leaves it alone.
    let output = run(&bench);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("no tables of this program") && said.contains("version 3"), "{said}");
    assert!(run(&["migrate"]).status.success());
    assert!(run(&bench).status.success());

    let mut connection = PgConnection::connect(&database.url()).await.unwrap();
    let newest: i64 = sqlx::query_scalar("SELECT max(version) FROM headwater_migrations")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    let older = "DELETE FROM headwater_migrations WHERE version = $1";
    sqlx::query(older).bind(newest).execute(&mut connection).await.unwrap();
    let expected = format!(
        "its schema has version {}, this program needs version {newest}; run `headwater migrate`",
        newest - 1
    );
    for verb in [&["ticket", "list"][..], &["issue", "list"], &bench] {
        let output = run(verb);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{verb:?}: {said}");
        assert!(said.contains(&expected), "{verb:?}: {said}");
    }

    let newer = "INSERT INTO headwater_migrations (version, description, success, checksum, execution_time)
        SELECT version + $1, 'later', true, checksum, 0 FROM headwater_migrations WHERE version = 1001";
    sqlx::query(newer).bind(newest - 1001 + 5).execute(&mut connection).await.unwrap();
    let expected = format!(
        "its schema has version {}, this program knows versions up to {newest}; upgrade",
        newest + 5
    );
    for verb in [&["ticket", "list"][..], &bench, &["migrate"]] {
        let output = run(verb);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{verb:?}: {said}");
        assert!(said.contains(&expected), "{verb:?}: {said}");
    }
}

fn names(lines: &[Value]) -> Vec<(&str, &str)> {
    lines
        .iter()
        .map(|line| (line["name"].as_str().unwrap(), line["kind"].as_str().unwrap()))
        .collect()
}

fn lists_show_every_stream(cli: &CliFixture) {
    cli.stdout(&["topic", "create", "orders"]);
    // A misspelt name is refused; with `--create` it is listed.
    let said = cli.fails(&["produce", "order", "--payload", "x"], 1);
    assert!(said.contains("did you mean `orders`"), "{said}");
    cli.stdout(&["produce", "order", "--payload", "x", "--create"]);
    let listed = cli.json(&["topic", "list"]);
    assert_eq!(names(&listed), [("order", "plain"), ("orders", "created")]);
    let all = cli.json(&["topic", "list", "--all"]);
    assert!(names(&all).contains(&("order", "plain")), "{all:?}");
    if cli.has_server() {
        for system in ["issue_work", "ticket_events"] {
            assert!(names(&all).contains(&(system, "system")), "{system}: {all:?}");
        }
    }
    let top = cli.json(&["top", "--once"]);
    assert!(top.iter().any(|line| line["topic"] == "order"), "{top:?}");
    let doctor = text(&cli.run(&["doctor"], "").stdout);
    assert!(doctor.contains("`order`"), "{doctor}");
    cli.stdout(&["topic", "delete", "order", "--yes"]);
    assert_eq!(names(&cli.json(&["topic", "list"])), [("orders", "created")]);
}

#[test]
fn lists_show_every_stream_of_ours_on_embedded_streams() {
    lists_show_every_stream(&CliFixture::embedded());
}

#[test]
fn lists_show_every_stream_of_ours_on_redis() {
    lists_show_every_stream(&CliFixture::redis());
}

#[test]
fn lists_show_every_stream_of_ours_at_a_server() {
    lists_show_every_stream(&CliFixture::with_server());
}

#[tokio::test]
async fn a_duckdb_file_in_use_names_the_server_that_has_it() {
    let dir = ServerDir::new().unwrap();
    let server = dir.serve(&[]).unwrap();
    server
        .until("/health/ready", |_, body| body["analytics"]["state"] == "ingesting")
        .await
        .unwrap();
    // The caller's own `http.listen` is another one.
    let output = dir.run(&["sql", "SELECT 1", "--http-listen", "127.0.0.1:1"]).unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let expected = format!("`--url http://{}`", server.address);
    assert!(said.contains(&expected) && said.contains(&server.pid().to_string()), "{said}");
    let over = dir.run(&["sql", "SELECT 1", "--url", &server.url("")]).unwrap();
    assert!(over.status.success(), "{}", text(&over.stderr));
}

#[test]
fn a_command_prints_the_cause_of_a_denied_call_and_logs_on_request() {
    let cli = CliFixture::redis();
    cli.stdout(&["topic", "create", "orders"]);
    let redis = cli.redis.as_ref().unwrap();
    let acl = [
        "ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@all", "-xadd", "-eval", "-evalsha",
        "-fcall",
    ];
    redis.command(&acl).unwrap().ok().unwrap();
    let url = redis.url().replace("redis://", "redis://reader:secret@");
    let to = ["--stream-url", &url];
    let produce = ["produce", "orders", "--payload", "x"];
    let output = cli.run_at(&produce, &to, "");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("NOPERM") && !said.contains("see the server log"), "{said}");
    assert_eq!(said.lines().count(), 2, "error and help, no log unless it is asked for: {said}");

    let output = cli.run_at(&[&produce[..], &["--log-level", "debug"]].concat(), &to, "");
    let said = text(&output.stderr);
    assert!(said.lines().count() > 2 && said.contains("stream backend opened"), "{said}");
}

#[tokio::test]
async fn sending_to_a_topic_with_an_encoded_name_writes_no_audit_entry() {
    let dir = ServerDir::new().unwrap();
    let server = dir.serve(&[]).unwrap();
    let (status, _) = server
        .post("/api/v1/topics", &json!({"name": "orders:eu", "partitions": 1}))
        .await
        .unwrap();
    assert_eq!(status, 201);
    for path in ["orders%3Aeu", "orders:eu"] {
        for number in 0..150 {
            let message = json!({"messages": [{"payload": number.to_string()}]});
            let (status, body) =
                server.post(&format!("/api/v1/topics/{path}/messages"), &message).await.unwrap();
            assert_eq!(status, 201, "{body}");
        }
    }
    let entries = |body: &Value| body["entries"].as_array().unwrap().len();
    let (_, audit) = server.get("/api/v1/audit?limit=500").await.unwrap();
    assert_eq!(entries(&audit), 1, "only the creation: {audit}");
    // The server's own streams are recorded under every spelling of their names.
    for path in ["ticket%5Fevents", "headwater:control:default", "wink%3Acontrol%3Adefault"] {
        let message = json!({"messages": [{"payload": "x"}]});
        server.post(&format!("/api/v1/topics/{path}/messages"), &message).await.unwrap();
    }
    let (_, audit) = server.get("/api/v1/audit?limit=500").await.unwrap();
    assert_eq!(entries(&audit), 4, "{audit}");
}

#[test]
fn an_existing_topic_owners_and_released_messages_are_described_for_people() {
    let cli = CliFixture::redis();
    cli.stdout(&["topic", "create", "orders", "--retention-count", "5"]);
    let said = cli.fails(&["topic", "create", "orders", "--retention-age", "1h"], 1);
    let expected = "`retention_count` is 5, not none; `retention_age` is none, not 3600s";
    assert!(said.contains(expected) && !said.contains("Policies"), "{said}");

    cli.stdout(&["produce", "orders", "--payload", "x"]);
    // A command that fails releases its message.
    let consume = ["consume", "orders", "--group", "g", "--count", "1", "--timeout", "2s"];
    cli.run(&[&consume[..], &["--exec", "kill -9 $PPID"]].concat(), "");
    let described = cli.stdout(&["group", "describe", "orders", "g"]);
    assert!(!described.contains("{\"") && !described.contains("~released"), "{described}");
}

#[tokio::test]
async fn names_of_other_systems_are_shown_as_ours_and_both_are_taken() {
    let cli = CliFixture::with_server();
    let created = open(cli.server(), "hello").await.unwrap();
    answered(cli.server(), created["ticket_id"].as_str().unwrap(), 1).await.unwrap();
    let ask = |verb: &[&str]| cli.run(verb, "");
    let sessions = until(&ask, &["session", "list"], |lines| !lines.is_empty());
    let session = sessions[0]["session"].as_str().unwrap().to_owned();
    let replay = ["session", "replay", session.as_str()];
    let events = until(&ask, &replay, |lines| lines.len() >= 2);
    let events: Vec<_> = events.iter().filter(|event| event["type"].is_string()).collect();
    let types: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert!(types.iter().all(|name| name.starts_with("headwater.run.")), "{types:?}");
    // Both names of a stream work.
    for name in [format!("headwater:events:{session}"), format!("wink:events:{session}")] {
        let described = cli.json(&["topic", "describe", &name]);
        assert_eq!(described[0]["name"], format!("headwater:events:{session}"));
    }
    // All steps of a run are in one trace.
    let traces: std::collections::BTreeSet<_> =
        events.iter().map(|event| event["fields"]["trace_id"].as_str().unwrap()).collect();
    assert_eq!(traces.len(), 1, "{events:?}");

    let groups = until(&ask, &["group", "list", "ticket_events"], |lines| !lines.is_empty());
    assert!(groups.iter().any(|group| group["group"] == "desk"), "{groups:?}");
    for name in ["desk", "ai_processor_group"] {
        let group = cli.json(&["group", "describe", "ticket_events", name]);
        assert_eq!(group[0]["group"], "desk");
    }
}

#[tokio::test]
async fn an_agent_has_a_name_of_their_own() {
    let dir = ServerDir::new().unwrap();
    let server = dir.serve(&["--issue-quiet", "10ms"]).unwrap();
    let created = open(&server, "hello").await.unwrap();
    let ticket = created["ticket_id"].as_str().unwrap();
    answered(&server, ticket, 1).await.unwrap();
    let url = server.url("");
    let reply = ["ticket", "reply", ticket, "--content", "I look into it", "--agent", "Grace"];
    let output = dir.run(&[&reply[..], &["--url", &url]].concat()).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let path = format!("/api/v1/tickets/{ticket}");
    let (_, shown) = server.get(&path).await.unwrap();
    let message = shown["messages"].as_array().unwrap().last().unwrap().clone();
    assert_eq!((&message["author"], &message["agent"]), (&json!("agent"), &json!("Grace")));
    let shown = dir.run(&["ticket", "show", ticket, "--url", &url]).unwrap();
    assert!(text(&shown.stdout).contains("\nagent Grace  20"), "{}", text(&shown.stdout));

    // The conversation that the model sees has the name of the agent, not that of the customer.
    server.post(&format!("{path}/reopen"), &json!({})).await.unwrap();
    server.post(&format!("{path}/messages"), &json!({"content": "and now?"})).await.unwrap();
    answered(&server, ticket, 2).await.unwrap();
    let issue = format!("/api/v1/issues/{}", created["issue_id"]);
    let issue =
        server.until(&issue, |_, issue| issue["discussions"].to_string().contains("and now"));
    let discussions = issue.await.unwrap()["discussions"].clone();
    let of = |author: &str| {
        let entries = discussions.as_array().unwrap().iter();
        entries
            .filter(|entry| entry["author"] == author)
            .map(|entry| entry["name"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(of("agent"), [json!("Grace")], "{discussions}");
    assert_eq!(of("user"), [json!("ada"), json!("ada")], "{discussions}");

    // A user has no agent name.
    let body = json!({"content": "x", "author": "user", "agent": "Grace"});
    let (status, body) = server.post(&format!("{path}/messages"), &body).await.unwrap();
    assert!(status == 400 && body.to_string().contains("`agent`"), "{status} {body}");
}

#[test]
fn config_names_the_source_of_each_integration_and_reports_a_full_disk() {
    let settings = "[[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"s\"\n";
    let dir = ServerDir::new().unwrap().settings(settings).unwrap();
    let said = text(&dir.run(&["config"]).unwrap().stdout);
    let line = |id: &str| said.lines().find(|line| line.contains(id)).unwrap().to_owned();
    assert!(line("id=desk").ends_with("(built in)"), "{said}");
    assert!(line("id=shop").ends_with("(headwater.toml)"), "{said}");

    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = dir.command(&["config"]).stdout(Stdio::from(full)).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cannot write to standard output"));
}

#[tokio::test]
async fn health_lists_its_pages_and_every_metric_has_a_help_line() {
    let cli = CliFixture::with_server();
    let server = cli.server();
    let (status, health) = server.get("/health").await.unwrap();
    assert_eq!(status, 200);
    let pages = health["pages"].as_array().unwrap();
    assert!(pages.iter().any(|page| page["path"] == "/health/ready"), "{health}");

    cli.stdout(&["produce", "orders", "--payload", "x", "--create"]);
    let created = open(server, "hello").await.unwrap();
    answered(server, created["ticket_id"].as_str().unwrap(), 1).await.unwrap();
    let has_gauges = |_: u16, metrics: &Value| {
        metrics.as_str().is_some_and(|metrics| metrics.contains("headwater_topic_length"))
    };
    let metrics = server.until("/metrics", has_gauges).await.unwrap();
    let metrics = metrics.as_str().unwrap();
    let families = |kind: &str| -> std::collections::BTreeSet<String> {
        let lines = metrics.lines().filter_map(|line| line.strip_prefix(kind));
        lines.map(|line| line.split(' ').next().unwrap().to_owned()).collect()
    };
    let (types, helps) = (families("# TYPE "), families("# HELP "));
    assert!(types.len() > 15, "{types:?}");
    assert_eq!(types, helps);
}

/// The lines of `/metrics` without their values, after some work.
async fn series(dir: &ServerDir, to: &[&str]) -> (u32, Vec<String>) {
    let mut server = dir.serve(&[to, &["--issue-quiet", "10ms"]].concat()).unwrap();
    let url = server.url("");
    for verb in [
        &["produce", "orders", "--payload", "x", "--create"][..],
        &["consume", "orders", "--group", "g", "--count", "1", "--timeout", "90s"],
    ] {
        let output = dir.run(&[verb, &["--url", &url]].concat()).unwrap();
        assert!(output.status.success(), "{verb:?}: {}", text(&output.stderr));
    }
    let created = open(&server, "hello").await.unwrap();
    answered(&server, created["ticket_id"].as_str().unwrap(), 1).await.unwrap();
    let wanted =
        ["headwater_consumed_total{", "headwater_inflight{", "headwater_partitions_owned{"];
    let is_complete = |_: u16, metrics: &Value| {
        wanted.iter().all(|name| metrics.as_str().is_some_and(|metrics| metrics.contains(name)))
    };
    let metrics = server.until("/metrics", is_complete).await.unwrap();
    let pid = server.pid();
    assert!(server.stop().unwrap().success(), "{}", server.log());
    let lines = metrics.as_str().unwrap().lines().filter(|line| !line.starts_with('#'));
    let names = lines.filter_map(|line| line.rsplit_once(' ')).map(|(series, _)| series.to_owned());
    (pid, names.collect())
}

#[tokio::test]
async fn a_restart_adds_no_time_series() {
    let cli = CliFixture::redis();
    let to: Vec<&str> = cli.direct_args.iter().map(String::as_str).collect();
    let (first_pid, first) = series(&cli.dir, &to).await;
    let (second_pid, second) = series(&cli.dir, &to).await;
    for (pid, lines) in [(first_pid, &first), (second_pid, &second)] {
        for line in lines {
            // A label value must not name one start: no process id, no random id, no UUID.
            let labels = line.split_once('{').map_or("", |(_, labels)| labels);
            for word in labels.split(|c: char| !c.is_ascii_alphanumeric()) {
                let is_hex = word.len() >= 12 && word.chars().all(|c| c.is_ascii_hexdigit());
                assert!(!is_hex && word != pid.to_string(), "{line}");
            }
        }
    }
    // Series of consumers are the same ones. Which of the others exist depends on what happened.
    let consumers = |lines: &[String]| -> std::collections::BTreeSet<String> {
        lines.iter().filter(|line| line.contains("consumer=")).cloned().collect()
    };
    assert!(consumers(&first).len() >= 3, "{first:#?}");
    assert_eq!(consumers(&first), consumers(&second));
}

#[tokio::test]
async fn a_page_whose_topics_are_gone_does_not_end_the_list() {
    let cli = CliFixture::redis();
    let redis = cli.redis.as_ref().unwrap();
    for name in ["a", "b", "c"] {
        cli.stdout(&["produce", name, "--payload", "x", "--create"]);
    }
    // Deleted by another program: the names stay registered.
    for name in ["a", "b"] {
        redis.command(&["DEL", name]).unwrap().ok().unwrap();
    }
    let cli = cli.start_server();
    let (_, page) = cli.server().get("/api/v1/topics?limit=1").await.unwrap();
    assert_eq!(page["topics"][0]["name"], "c", "{page}");
}

#[tokio::test]
async fn commands_that_look_do_not_write_to_the_database() {
    let dir = ServerDir::new().unwrap();
    let to = ["--database-url", "sqlite:headwater.db", "--stream-url", "embedded:memory"];
    assert!(dir.run(&[&["migrate"][..], &to].concat()).unwrap().status.success());
    for verb in [&["ticket", "list"][..], &["issue", "list"], &["outbox", "list"]] {
        assert!(dir.run(&[verb, &to].concat()).unwrap().status.success());
    }
    let url = format!("sqlite:{}", dir.file("headwater.db"));
    let mut connection = SqliteConnection::connect(&url).await.unwrap();
    let integrations: i64 = sqlx::query_scalar("SELECT count(*) FROM integrations")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(integrations, 0);
}
