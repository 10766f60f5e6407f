//! The documented sample commands for `ticket_events` against a running desk: with `redis-cli` as written, and by a
//! program that shares the stream.

mod support;

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use headwater_testkit::{Postgres, Redis, RedisReply, wait_until};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::desk::{answered, by};
use crate::support::{LIMIT, Server, ServerDir, text};

const CREATE: &str = "XGROUP CREATE ticket_events ai_processor_group $ MKSTREAM";
const ADD: &str = r#"XADD ticket_events * data '{"event_type": "MESSAGE_RECEIVED", "ticket_id": "...", "message_id": "..."}'"#;
const READ: &str = "XREADGROUP GROUP ai_processor_group worker_1 COUNT 1 STREAMS ticket_events >";

/// The output of `redis-cli` for one line of input. It is in the package of `redis-server`.
fn redis_cli(redis: &Redis, line: &str) -> Result<String> {
    let mut child = Command::new("redis-cli")
        .args(["-h", "127.0.0.1", "-p", &redis.port().to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("redis-cli does not start; install the Debian package redis-tools")?;
    // Dropped at the end of the statement: end of input stops redis-cli.
    child.stdin.take().context("a pipe")?.write_all(format!("{line}\n").as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{}", text(&output.stderr));
    Ok(text(&output.stdout))
}

/// The sample event with real ids.
fn add(ticket: Uuid, message: Uuid) -> String {
    ADD.replacen("...", &ticket.to_string(), 1).replacen("...", &message.to_string(), 1)
}

/// Pending entries of the group.
fn pending(redis: &Redis) -> Option<i64> {
    let reply = redis.command(&["XPENDING", "ticket_events", "ai_processor_group"]).ok()?;
    reply.items().first().and_then(RedisReply::int)
}

/// Whether the group of the desk exists.
fn has_group(redis: &Redis) -> bool {
    let groups = redis.command(&["XINFO", "GROUPS", "ticket_events"]);
    groups.is_ok_and(|groups| {
        groups
            .items()
            .iter()
            .any(|group| group.items().iter().any(|value| value.text() == "ai_processor_group"))
    })
}

fn dead_letters(redis: &Redis) -> i64 {
    let length = redis.command(&["XLEN", "ticket_events:dlq"]);
    length.ok().and_then(|length| length.int()).unwrap_or(0)
}

/// The events of this type and ticket in the stream.
fn events(redis: &Redis, event_type: &str, ticket: Uuid) -> Vec<Value> {
    let Ok(entries) = redis.command(&["XRANGE", "ticket_events", "-", "+"]) else {
        return Vec::new();
    };
    let read = |entry: &RedisReply| {
        let fields = entry.items().get(1).map(RedisReply::items).unwrap_or_default();
        let event: Value = serde_json::from_str(&fields.get(1)?.text()).ok()?;
        let is_one = event["event_type"] == event_type && event["ticket_id"] == ticket.to_string();
        is_one.then_some(event)
    };
    entries.items().iter().filter_map(read).collect()
}

fn desk(place: &ServerDir, redis: &Redis) -> Result<Server> {
    let idle = ["--desk-reclaim-idle", "500ms"];
    // Analytics would be a second group with its own dead letters.
    let alone = ["--analytics-path", ""];
    let always = ["--stream-url", &redis.url(), "--issue-quiet", "50ms"];
    place.serve(&[&always[..], &idle, &alone].concat())
}

#[tokio::test]
async fn redis_cli_runs_the_sample_commands_as_they_are_written() -> Result<()> {
    let redis = Redis::start()?;
    let place = ServerDir::new()?;
    let server = desk(&place, &redis)?;
    wait_until("the desk's group", LIMIT, || has_group(&redis))?;

    // The group exists already.
    let created = redis_cli(&redis, CREATE)?;
    assert!(created.starts_with("BUSYGROUP"), "{created}");

    // As written, the sample has no valid ticket id: it becomes a dead letter.
    let added = redis_cli(&redis, ADD)?;
    assert!(added.contains('-') && !added.contains("ERR"), "{added}");
    wait_until("a dead letter", LIMIT, || dead_letters(&redis) == 1)?;

    // With ids it becomes a ticket that is answered.
    let (ticket, message) = (Uuid::new_v4(), Uuid::new_v4());
    redis_cli(&redis, &add(ticket, message))?;
    let shown = answered(&server, &ticket.to_string(), 1).await?;
    assert_eq!(by(&shown, "user"), [""]);

    // Either this consumer or the desk gets an entry. An entry that is read and not acknowledged is reclaimed.
    for _ in 0..5 {
        let ticket = Uuid::new_v4();
        redis_cli(&redis, &add(ticket, Uuid::new_v4()))?;
        let read = redis_cli(&redis, READ)?;
        assert!(!read.contains("ERR") && !read.contains("NOGROUP"), "{read}");
        answered(&server, &ticket.to_string(), 1).await?;
    }
    wait_until("all entries to be acknowledged", LIMIT, || pending(&redis) == Some(0))?;
    assert_eq!(dead_letters(&redis), 1);
    Ok(())
}

#[tokio::test]
async fn the_documented_sample_commands_work_against_a_running_desk() -> Result<()> {
    let redis = Redis::start()?;
    let place = ServerDir::new()?;
    // The group may exist before the desk starts.
    let create: Vec<&str> = CREATE.split(' ').collect();
    redis.command(&create)?.ok()?;
    let server = desk(&place, &redis)?;
    let add = |event: &str| redis.command(&["XADD", "ticket_events", "*", "data", event])?.ok();
    let event = |event_type: &str, ticket: Uuid, message: Uuid| json!({"event_type": event_type, "ticket_id": ticket, "message_id": message});

    let (ticket, message) = (Uuid::new_v4(), Uuid::new_v4());
    let sample = event("MESSAGE_RECEIVED", ticket, message);
    add(&sample.to_string())?;
    let shown = answered(&server, &ticket.to_string(), 1).await?;
    assert_eq!(by(&shown, "user"), [""]);

    // Repeated, also with other content: the message id decides.
    add(&sample.to_string())?;
    let mut flat = sample.clone();
    flat["content"] = "again".into();
    add(&flat.to_string())?;
    // The nested and the flat form.
    let created = Uuid::new_v4();
    let mut whole = event("TICKET_CREATED", created, Uuid::new_v4());
    whole["user_id"] = json!(Uuid::new_v4());
    whole["payload"] =
        json!({"content": "My router is broken", "timestamp": "2026-01-01T00:00:00Z"});
    add(&whole.to_string())?;
    let mut flat = event("MESSAGE_RECEIVED", created, Uuid::new_v4());
    flat["content"] = "flat".into();
    add(&flat.to_string())?;
    let path = format!("/api/v1/tickets/{created}");
    let is_whole = |status: u16, body: &Value| {
        status == 200 && by(body, "user").len() == 2 && !by(body, "assistant").is_empty()
    };
    server.until(&path, is_whole).await?;

    // The desk publishes its events in the documented form and does not answer itself. They are published after the
    // answer is in its ticket, so wait for them.
    let published = || events(&redis, "AI_RESPONSE_GENERATED", ticket);
    wait_until("the answer to be published", LIMIT, || !published().is_empty())?;
    wait_until("all entries to be acknowledged", LIMIT, || pending(&redis) == Some(0))?;
    let (_, shown) = server.get(&format!("/api/v1/tickets/{ticket}")).await?;
    assert_eq!((by(&shown, "user").len(), by(&shown, "assistant").len()), (1, 1), "{shown:#}");
    let published = published();
    assert_eq!(published.len(), 1, "{published:?}");
    let metrics = &published[0]["payload"];
    assert_eq!(metrics["events"], 1, "{metrics}");
    for count in ["tokens_in", "tokens_out"] {
        assert!(metrics[count].as_u64() > Some(0), "{metrics}");
    }
    let cache = format!("processed_messages:{ticket}");
    let is_cached = || {
        let member = redis.command(&["SISMEMBER", &cache, &message.to_string()]);
        member.is_ok_and(|member| member.int() == Some(1))
    };
    // The cache is best effort: a failed write is repeated with the next entry.
    wait_until("the message in the cache", LIMIT, || {
        is_cached() || add(&sample.to_string()).is_err()
    })?;
    assert!(is_cached());
    let left = redis.command(&["TTL", &cache])?.int().context("a number")?;
    assert!((1..=86_400).contains(&left), "{left}");
    Ok(())
}

#[tokio::test]
async fn an_entry_that_another_program_read_and_did_not_acknowledge_is_reclaimed() -> Result<()> {
    let redis = Redis::start()?;
    let place = ServerDir::new()?;
    let server = desk(&place, &redis)?;
    wait_until("the desk's group", LIMIT, || has_group(&redis))?;
    let late = Uuid::new_v4();
    let taken = json!({"event_type": "MESSAGE_RECEIVED", "ticket_id": late, "message_id": Uuid::new_v4(), "content": "taken"});
    // The desk has a blocking read, too, and Redis serves it after the current command: adding and reading in one
    // script makes the other program first.
    let add_and_read = "redis.call('XADD', KEYS[1], '*', 'data', ARGV[1]) \
        return redis.call('XREADGROUP', 'GROUP', 'ai_processor_group', 'worker_1', \
        'COUNT', '1', 'STREAMS', KEYS[1], '>')";
    let read = redis.command(&["EVAL", add_and_read, "1", "ticket_events", &taken.to_string()])?;
    assert!(!read.items().is_empty(), "worker_1 has an entry: {read:?}");
    let shown = answered(&server, &late.to_string(), 1).await?;
    assert_eq!(by(&shown, "user"), ["taken"]);
    wait_until("the entry to be acknowledged", LIMIT, || pending(&redis) == Some(0))?;
    Ok(())
}

#[tokio::test]
async fn an_invalid_entry_becomes_a_dead_letter_and_blocks_nothing() -> Result<()> {
    let redis = Redis::start()?;
    let place = ServerDir::new()?;
    let server = desk(&place, &redis)?;
    for fields in [["data", "no json"], ["other", "field"], ["data", r#"{"event_type":"X"}"#]] {
        redis.command(&["XADD", "ticket_events", "*", fields[0], fields[1]])?.ok()?;
    }
    let ticket = Uuid::new_v4();
    redis_cli(&redis, &add(ticket, Uuid::new_v4()))?;
    answered(&server, &ticket.to_string(), 1).await?;
    wait_until("three dead letters", LIMIT, || dead_letters(&redis) >= 3)?;
    wait_until("all entries to be acknowledged", LIMIT, || pending(&redis) == Some(0))?;
    assert_eq!(dead_letters(&redis), 3);
    let kept = redis.command(&["XRANGE", "ticket_events:dlq", "-", "+"])?;
    let fields = kept.items().iter().flat_map(|entry| entry.items()).flat_map(RedisReply::items);
    assert!(
        fields.clone().any(|field| field.text().contains("no json")),
        "with its original bytes"
    );
    Ok(())
}

#[tokio::test]
async fn after_a_redis_flush_the_desk_continues_and_no_ticket_is_lost() -> Result<()> {
    let redis = Redis::start()?;
    let place = ServerDir::new()?;
    let server = desk(&place, &redis)?;
    wait_until("the desk's group", LIMIT, || has_group(&redis))?;
    let (before, after) = (Uuid::new_v4(), Uuid::new_v4());
    redis_cli(&redis, &add(before, Uuid::new_v4()))?;
    answered(&server, &before.to_string(), 1).await?;

    redis.command(&["FLUSHALL"])?.ok()?;
    wait_until("the desk to read again", LIMIT, || has_group(&redis))?;
    redis_cli(&redis, &add(after, Uuid::new_v4()))?;
    answered(&server, &after.to_string(), 1).await?;
    let (_, shown) = server.get(&format!("/api/v1/tickets/{before}")).await?;
    assert_eq!((by(&shown, "user").len(), by(&shown, "assistant").len()), (1, 1), "{shown:#}");
    Ok(())
}

#[tokio::test]
async fn a_cache_hit_counts_only_if_sql_has_the_message() -> Result<()> {
    let redis = Redis::start()?;
    let place = ServerDir::new()?;
    let server = desk(&place, &redis)?;
    wait_until("the desk's group", LIMIT, || has_group(&redis))?;
    // As after a crash between cache write and commit, or a restored old database.
    let (ticket, message) = (Uuid::new_v4(), Uuid::new_v4());
    let cache = format!("processed_messages:{ticket}");
    redis.command(&["SADD", &cache, &message.to_string()])?.ok()?;
    redis_cli(&redis, &add(ticket, message))?;
    let shown = answered(&server, &ticket.to_string(), 1).await?;
    assert_eq!(by(&shown, "user").len(), 1, "{shown:#}");
    Ok(())
}

#[tokio::test]
async fn an_entry_waits_while_the_database_is_unavailable() -> Result<()> {
    let redis = Redis::start()?;
    let postgres = Postgres::start()?;
    let database = postgres.database()?;
    let place = ServerDir::new()?;
    let always = ["--stream-url", &redis.url(), "--issue-quiet", "50ms", "--analytics-path", ""];
    let server = place.serve(&[&always[..], &["--database-url", &database.url()]].concat())?;
    wait_until("the desk's group", LIMIT, || has_group(&redis))?;
    postgres.stop()?;
    let ticket = Uuid::new_v4();
    redis_cli(&redis, &add(ticket, Uuid::new_v4()))?;
    server.wait_for_log("storing a ticket event failed; retrying")?;
    assert_eq!((pending(&redis), dead_letters(&redis)), (Some(1), 0), "it is not acknowledged");

    postgres.restart()?;
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;
    answered(&server, &ticket.to_string(), 1).await?;
    wait_until("the entry to be acknowledged", LIMIT, || pending(&redis) == Some(0))?;
    Ok(())
}

/// `sanitized_string` of the format: the desk cleans what it reads, whatever the writer did.
#[tokio::test]
async fn the_content_of_an_entry_is_cleaned_and_nothing_else_is_changed() -> Result<()> {
    let redis = Redis::start()?;
    let place = ServerDir::new()?;
    let server = desk(&place, &redis)?;
    let ticket = Uuid::new_v4();
    let event = json!({
        "event_type": "TICKET_CREATED", "ticket_id": ticket, "message_id": Uuid::new_v4(),
        "payload": {
            "content": "one\r\ntwo\rthree\tfour\u{0}\u{1b}[31m\u{85}<script>alert('&')</script> \u{202e}键🙂  ",
            "title": " My\n router\u{7} <b> ",
        },
    });
    redis.command(&["XADD", "ticket_events", "*", "data", &event.to_string()])?.ok()?;

    let shown = answered(&server, &ticket.to_string(), 1).await?;
    let content = "one\ntwo\nthree\tfour[31m<script>alert('&')</script> \u{202e}键🙂  ";
    assert_eq!(by(&shown, "user"), [content]);
    assert_eq!(shown["title"], "My router <b>", "{shown}");
    // A text that is too long is not cut: it becomes a dead letter.
    let long = json!({
        "event_type": "MESSAGE_RECEIVED", "ticket_id": ticket, "message_id": Uuid::new_v4(),
        "payload": { "content": "x".repeat(1024 * 1024) },
    });
    redis.command(&["XADD", "ticket_events", "*", "data", &long.to_string()])?.ok()?;
    wait_until("a dead letter", LIMIT, || dead_letters(&redis) == 1)?;
    Ok(())
}
