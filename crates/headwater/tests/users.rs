//! Export and erasure of the data of one user.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use headwater_stream::{DelayName, DueTime, Fields, Range, ScheduleRequest, StreamName};
use headwater_testkit::{Postgres, Redis, RedisReply};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::desk::{all_idle, answered};
use crate::support::model::FakeModel;
use crate::support::receivers::{Fault, FaultSource, Receiver};
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

/// Texts of the ticket are also in the stream of provisional answers, and in copies that wait for their time.
#[tokio::test]
async fn provisional_and_delayed_texts_are_erased() -> Result<()> {
    let redis = Redis::start()?;
    let dir = ServerDir::new()?;
    let given = ["--issue-quiet", "10ms", "--analytics-path", ""];
    let server = dir.serve(&[&["--stream-url", &redis.url()], &given[..]].concat())?;
    let (ada, _) = ticket(&server, "ada", SECRET).await?;
    let (bob, _) = ticket(&server, "bob", "nothing special").await?;
    all_idle(&server).await?;
    let streams = headwater_stream::connect(&redis.url(), &Default::default()).await?;
    let provisional = "streaming:mq:desk:provisional";
    let delays = DelayName::new("streaming:mq:retry:ticket_events")?;
    for id in [&ada, &bob] {
        let event =
            json!({"event_type": "MESSAGE_RECEIVED", "ticket_id": id, "content": id}).to_string();
        redis.command(&["XADD", provisional, "*", "data", &event])?.ok()?;
        let copy = ScheduleRequest {
            to: StreamName::new("ticket_events")?,
            due: DueTime::After(Duration::from_secs(3600)),
            fields: Fields::new([("data", event)]),
        };
        // More than one, so that cancelling moves the others.
        streams.schedule(&delays, &[copy.clone(), copy.clone(), copy]).await?;
    }
    let (status, erased) = server.post("/api/v1/erase", &json!({"user": "ada"})).await?;
    assert_eq!((status, &erased["tickets"]), (200, &json!(1)), "{erased}");
    let left = streams.delayed(&delays, 0, 100).await?;
    let left: Vec<String> =
        left.iter().map(|entry| text(entry.fields.get("data").unwrap())).collect();
    assert!(left.len() == 3 && left.iter().all(|data| data.contains(&bob)), "{left:?}");
    let shown = streams.range(&StreamName::new(provisional)?, Range::first(100)).await?;
    let shown: Vec<String> =
        shown.iter().filter_map(|entry| entry.fields.get("data").map(|data| text(data))).collect();
    assert!(shown.iter().any(|data| data.contains(&bob)), "{shown:?}");
    assert!(shown.iter().all(|data| !data.contains(&ada)), "{shown:?}");
    Ok(())
}

#[derive(Debug)]
struct AlwaysHangs;

impl FaultSource for AlwaysHangs {
    fn next_fault(&mut self) -> Option<Fault> {
        Some(Fault::Hang)
    }
}

/// A receiver of notifications fails while the user is erased. `attempts` decides whether the event would be sent again or
/// become a dead letter.
async fn an_event_in_hand_is_dropped_when_its_user_is_erased(attempts: u32) -> Result<()> {
    let redis = Redis::start()?;
    let (receiver, url) = Receiver::start().await?;
    let section = format!(
        "[[notification]]\nid = \"crm\"\nurl = \"{url}\"\nsecret = \"whsec_c2l4dGVlbiBieXRlcyBvciBtb3Jl\"\n\
         attempts = {attempts}\nfrom = \"beginning\"\n"
    );
    let dir = ServerDir::new()?.settings(&section)?;
    let given = ["--issue-quiet", "10ms", "--analytics-path", ""];
    receiver.fail_randomly(AlwaysHangs);
    let server = dir.serve(&[&["--stream-url", &redis.url()], &given[..]].concat())?;
    ticket(&server, "ada", SECRET).await?;
    all_idle(&server).await?;
    let sent = || receiver.requests().len();
    let ids = || -> BTreeSet<String> {
        let requests = receiver.requests();
        let ids = requests.iter().filter_map(|(_, _, headers)| headers.get("webhook-id"));
        ids.map(|id| text(id.as_bytes())).collect()
    };
    eventually("the question and the answer were sent", || ids().len() == 2).await?;
    let (status, erased) = server.post("/api/v1/erase", &json!({"user": "ada"})).await?;
    assert_eq!((status, &erased["tickets"]), (200, &json!(1)), "{erased}");
    // The attempts fail now, and the receiver works afterwards.
    let before = sent();
    receiver.release();
    let group = "notification:crm";
    let pending = || -> Option<i64> {
        let found = redis.command(&["XPENDING", "ticket_events", group]).ok()?;
        found.items().first().and_then(RedisReply::int)
    };
    eventually("the events are settled", || pending() == Some(0)).await?;
    assert_eq!((sent(), receiver.accepted().len()), (before, 0), "{:?}", receiver.accepted());
    assert_eq!(redis.command(&["XLEN", "ticket_events:dlq"])?.int(), Some(0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_in_hand_is_not_sent_again_after_its_user_was_erased() -> Result<()> {
    an_event_in_hand_is_dropped_when_its_user_is_erased(50).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_in_hand_becomes_no_dead_letter_after_its_user_was_erased() -> Result<()> {
    an_event_in_hand_is_dropped_when_its_user_is_erased(1).await
}

#[tokio::test(flavor = "multi_thread")]
async fn notifications_of_a_ticket_that_is_busy_and_stays_are_delivered() -> Result<()> {
    let redis = Redis::start()?;
    let (receiver, url) = Receiver::start().await?;
    let section = format!(
        "[[notification]]\nid = \"crm\"\nurl = \"{url}\"\nsecret = \"whsec_c2l4dGVlbiBieXRlcyBvciBtb3Jl\"\n\
         from = \"beginning\"\n"
    );
    let dir = ServerDir::new()?.settings(&section)?;
    let (model, url) = FakeModel::start((5, 5)).await?;
    let given = ["--stream-url", &redis.url(), "--issue-quiet", "0ms", "--analytics-path", ""];
    let model_given = ["--model-url", &url, "--model-name", "m"];
    let server = dir.serve(&[&given[..], &model_given].concat())?;
    let new = json!({"title": "Parcel", "content": SECRET, "user_id": "ada"});
    let (status, created) = server.post("/api/v1/tickets", &new).await?;
    ensure!(status == 201, "{created}");
    let id = created["ticket_id"].as_str().context("a ticket")?;
    eventually("the run waits for the model", || !model.requests("").is_empty()).await?;
    let (status, erased) = server.post("/api/v1/erase", &json!({"user": "ada"})).await?;
    assert_eq!((status, &erased["busy"]), (200, &json!(1)), "{erased}");

    model.unblock();
    answered(&server, id, 1).await?;
    let close = format!("/api/v1/tickets/{id}/close");
    assert_eq!(server.post(&close, &json!({})).await?.0, 200);
    let is_delivered = |event_type: &str| {
        let accepted = receiver.accepted();
        accepted.iter().any(|one| {
            one.body["type"] == event_type && one.body["data"]["ticket_id"].as_str() == Some(id)
        })
    };
    for event_type in ["AI_RESPONSE_GENERATED", "TICKET_CLOSED"] {
        eventually(event_type, || is_delivered(event_type)).await.with_context(|| server.log())?;
    }
    // Once it is not in use, it is erased.
    let (status, erased) = server.post("/api/v1/erase", &json!({"user": "ada"})).await?;
    assert_eq!((status, &erased["tickets"]), (200, &json!(1)), "{erased}");
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
