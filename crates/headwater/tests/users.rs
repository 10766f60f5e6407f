//! Export and erasure of the data of one user.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use anyhow::{Context, Result, ensure};
use headwater_testkit::{Postgres, Redis, RedisReply};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::desk::{all_idle, answered};
use crate::support::{LIMIT, Server, ServerDir, eventually, text};

const SECRET: &str = "a very private matter";

/// An answered ticket of a user: its id and its issue.
async fn ticket(server: &Server, user: &str, content: &str) -> Result<(String, i64)> {
    let new = json!({"title": "Parcel", "content": content, "user_id": user});
    let (status, created) = server.post("/api/v1/tickets", &new).await?;
    ensure!(status == 201, "{created}");
    let ticket = created["ticket_id"].as_str().context("a ticket")?.to_owned();
    answered(server, &ticket, 1).await?;
    Ok((ticket, created["issue_id"].as_i64().context("an issue")?))
}

fn export(dir: &ServerDir, to: &[&str], user: &str) -> Result<Vec<Value>> {
    let output = dir.run(&[&["export", "--user", user], to].concat())?;
    ensure!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

fn count(lines: &[Value], kind: &str) -> usize {
    lines.iter().filter(|line| !line[kind].is_null()).count()
}

#[tokio::test]
async fn the_data_of_a_user_is_exported_and_erased_and_that_of_others_stays() -> Result<()> {
    let redis = Redis::start()?;
    let database = Postgres::shared()?.database()?;
    let dir = ServerDir::new()?;
    let servers = ["--stream-url", &redis.url(), "--database-url", &database.url()];
    let server = dir.serve(&[&servers[..], &["--issue-quiet", "10ms"]].concat())?;
    let ada = [ticket(&server, "ada", SECRET).await?, ticket(&server, "ada", SECRET).await?];
    let bob = ticket(&server, "bob", "nothing special").await?;
    all_idle(&server).await?;
    let entries = || -> Result<String> {
        let found = redis.command(&["XRANGE", "ticket_events", "-", "+"])?;
        let fields = found.items().iter().filter_map(|entry| entry.items().get(1));
        let texts = fields.flat_map(|fields| fields.items()).map(RedisReply::text);
        Ok(texts.collect::<Vec<_>>().join("\n"))
    };
    let sessions = |issue: i64| -> usize {
        let found = redis.command(&["KEYS", &format!("wink:events:issue-{issue}-run-*")]);
        found.map_or(0, |found| found.items().len())
    };
    eventually("everything is published", || {
        let published = entries().is_ok_and(|entries| entries.matches(SECRET).count() >= 2);
        published && ada.iter().chain([&bob]).all(|(_, issue)| sessions(*issue) > 0)
    })
    .await?;

    let url = format!("http://{}", server.address);
    let by_server = ["--url", &url];
    let exported = export(&dir, &by_server, "ada")?;
    assert_eq!(count(&exported, "ticket"), 2, "{exported:?}");
    assert!(count(&exported, "message") >= 4 && count(&exported, "event") >= 2, "{exported:?}");
    assert!(count(&exported, "session") >= 2, "{exported:?}");
    assert_eq!(exported.last().unwrap(), &json!({"end": {"tickets": 2}}));
    let all = format!("{exported:?}");
    assert!(all.contains(SECRET) && !all.contains("nothing special"), "{all}");
    // Without a server the command reads the same.
    assert_eq!(count(&export(&dir, &servers, "ada")?, "ticket"), 2);

    let erase = ["erase", "--user", "ada", "--json", "--url", &url];
    assert_eq!(dir.run(&erase)?.status.code(), Some(2), "it asks for confirmation");
    let output = dir.run(&[&erase[..], &["--yes"]].concat())?;
    assert!(output.status.success(), "{}", text(&output.stderr));
    let erased: Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!((&erased["tickets"], &erased["busy"]), (&json!(2), &json!(0)), "{erased}");
    assert!(erased["sessions"].as_u64() >= Some(2), "{erased}");

    assert_eq!(export(&dir, &by_server, "ada")?, [json!({"end": {"tickets": 0}})]);
    let dump = database.query(
        "SELECT (SELECT count(*) FROM event_logs WHERE payload::text LIKE '%very private%')
             + (SELECT count(*) FROM outbox WHERE payload::text LIKE '%very private%')
             + (SELECT count(*) FROM ticket_messages WHERE content LIKE '%very private%')
             + (SELECT count(*) FROM tickets WHERE user_id = 'ada')
             + (SELECT count(*) FROM issues WHERE discussions::text || fields::text LIKE '%very private%')
             + (SELECT count(*) FROM audit_log WHERE path LIKE '%ada%')",
    )?;
    assert_eq!(dump, "0");
    assert!(!entries()?.contains(SECRET));
    assert!(ada.iter().all(|(_, issue)| sessions(*issue) == 0));

    // Another user keeps everything.
    let (status, shown) = server.get(&format!("/api/v1/tickets/{}", bob.0)).await?;
    assert_eq!((status, shown["messages"].as_array().map(Vec::len)), (200, Some(2)), "{shown}");
    assert!(sessions(bob.1) > 0 && entries()?.contains("nothing special"));
    ticket(&server, "ada", "a new beginning").await?;
    Ok(())
}

/// A server has an entry of the ticket in hand while another process erases the user.
#[tokio::test]
async fn an_entry_in_hand_does_not_bring_an_erased_ticket_back() -> Result<()> {
    let redis = Redis::start()?;
    let database = Postgres::shared()?.database()?;
    let dir = ServerDir::new()?;
    let servers = ["--stream-url", &redis.url(), "--database-url", &database.url()];
    let server = dir.serve(&[&servers[..], &["--issue-quiet", "10ms"]].concat())?;
    let (ticket, _) = ticket(&server, "ada", SECRET).await?;
    all_idle(&server).await?;
    let pending = || -> Option<i64> {
        let found = redis.command(&["XPENDING", "ticket_events", "ai_processor_group"]).ok()?;
        found.items().first().and_then(RedisReply::int)
    };
    let outbox = || {
        database
            .query("SELECT count(*) FROM outbox WHERE status IN ('waiting', 'pending', 'taken')")
    };
    eventually("everything is published and read back", || {
        outbox().is_ok_and(|count| count == "0") && pending() == Some(0)
    })
    .await?;

    // The read of the server waits at Redis, which delivers the entry to it.
    server.signal(Signal::STOP)?;
    let event = json!({
        "event_type": "MESSAGE_RECEIVED", "ticket_id": ticket, "user_id": "ada", "content": SECRET,
        "message_id": uuid::Uuid::new_v4(),
    });
    redis.command(&["XADD", "ticket_events", "*", "data", &event.to_string()])?.ok()?;
    eventually("the entry is delivered", || pending() == Some(1)).await?;
    let output =
        dir.run(&[&["erase", "--user", "ada", "--yes", "--json"], &servers[..]].concat())?;
    assert!(output.status.success(), "{}", text(&output.stderr));
    let erased: Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!((&erased["tickets"], &erased["busy"]), (&json!(1), &json!(0)), "{erased}");
    server.signal(Signal::CONT)?;
    eventually("the entry is handled", || pending() == Some(0)).await?;
    let tickets = database.query("SELECT count(*) FROM tickets")?;
    let events = database.query("SELECT count(*) FROM event_logs")?;
    assert_eq!((tickets.as_str(), events.as_str()), ("0", "0"), "{}", server.log());
    assert_eq!(redis.command(&["XLEN", "ticket_events:dlq"])?.int(), Some(0));
    Ok(())
}

#[tokio::test]
async fn a_ticket_in_use_is_reported_and_not_erased() -> Result<()> {
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--issue-quiet", "0ms", "--model-url", "scripted:20s"])?;
    let new = json!({"title": "Parcel", "content": SECRET, "user_id": "ada"});
    let (_, created) = server.post("/api/v1/tickets", &new).await?;
    let path = format!("/api/v1/issues/{}", created["issue_id"]);
    server.until(&path, |_, issue| issue["processing_status"] == "processing").await?;
    let began = std::time::Instant::now();
    let (status, erased) = server.post("/api/v1/erase", &json!({"user": "ada"})).await?;
    assert_eq!(
        (status, &erased["tickets"], &erased["busy"]),
        (200, &json!(0), &json!(1)),
        "{erased}"
    );
    assert!(began.elapsed() < LIMIT);
    assert_eq!(server.get(&path).await?.0, 200);
    Ok(())
}
