//! Notifications: ticket events reach receivers at least once, through the real binary with receivers that fail, hang and are
//! unreachable, and through a sink in the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use headwater::outbound::notifications::{
    NotificationConfig, NotificationForwarder, NotificationSink, TicketNotification,
};
use headwater::outbound::sign;
use headwater::tickets::{NewTicket, TicketEventType, Tickets};
use headwater_issue::{DebounceWindow, DeliverError, Nudger, StoreOptions};
use headwater_queue::Queue;
use headwater_stream::{Backend, Fields, GroupStart, Range, Retention, SetName, StreamName};
use headwater_testkit::{Proxy, Redis, RedisReply};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::support::desk::{answered, open};
use crate::support::receivers::{Accepted, Fault, Receiver};
use crate::support::{LIMIT, Server, ServerDir, eventually, text};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

fn section(id: &str, url: &str, more: &str) -> String {
    format!(
        "[[notification]]\nid = \"{id}\"\nurl = \"{url}/{id}\"\nsecret = \"{SECRET}\"\n{more}\n"
    )
}

/// Starts a server with these sections and waits until the groups of the receivers exist.
async fn serve(place: &ServerDir, redis: &Redis, ids: &[&str]) -> Result<Server> {
    let quick = ["--issue-quiet", "10ms", "--analytics-path", ""];
    let server = place.serve(&[&quick[..], &["--stream-url", &redis.url()]].concat())?;
    let exists = || {
        let groups = redis.command(&["XINFO", "GROUPS", "ticket_events"]);
        let names: Vec<String> = groups
            .iter()
            .flat_map(RedisReply::items)
            .flat_map(RedisReply::items)
            .map(RedisReply::text)
            .collect();
        ids.iter().all(|id| names.contains(&format!("notification:{id}")))
    };
    eventually("the groups of the receivers", exists).await.with_context(|| server.log())?;
    Ok(server)
}

/// Entries that a group has read and not acknowledged.
fn pending(redis: &Redis, id: &str) -> Option<i64> {
    let reply = redis.command(&["XPENDING", "ticket_events", &format!("notification:{id}")]);
    reply.ok()?.items().first().and_then(RedisReply::int)
}

fn dead_letters(redis: &Redis) -> i64 {
    let length = redis.command(&["XLEN", "ticket_events:dlq"]);
    length.ok().and_then(|length| length.int()).unwrap_or(0)
}

/// The accepted requests of a receiver, by type and id of the event.
fn received(receiver: &Receiver, id: &str) -> BTreeMap<(String, String), Vec<Accepted>> {
    let mut by_event = BTreeMap::<_, Vec<Accepted>>::new();
    for one in receiver.accepted().into_iter().filter(|one| one.path == format!("/{id}")) {
        let event_type = one.body["type"].as_str().unwrap_or_default().to_owned();
        by_event.entry((event_type, one.key.clone())).or_default().push(one);
    }
    by_event
}

fn types(receiver: &Receiver, id: &str) -> Vec<String> {
    received(receiver, id).into_keys().map(|(event_type, _)| event_type).collect()
}

fn check_signature(one: &Accepted) -> Result<()> {
    let header = |name: &str| one.headers.get(name).and_then(|value| value.to_str().ok());
    let (id, time) = (header("webhook-id"), header("webhook-timestamp"));
    let (id, time) = id.zip(time).context("headers of Standard Webhooks")?;
    let expected =
        sign(&SECRET.to_owned().into(), id, time.parse()?, one.body.to_string().as_bytes());
    ensure!(header("webhook-signature") == Some(&*expected), "{one:?}");
    ensure!(id == one.key && one.body["data"]["event_type"] == one.body["type"], "{one:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_receiver_gets_each_chosen_event_under_one_id_and_delays_no_other() -> Result<()>
{
    let redis = Redis::start()?;
    let (receiver, url) = Receiver::start().await?;
    let chosen = r#"events = ["TICKET_CREATED", "AI_RESPONSE_GENERATED", "TICKET_CLOSED"]"#;
    let file = section("crm", &url, &format!("{chosen}\ntimeout = \"300ms\""));
    // Nothing listens there.
    let place = ServerDir::new()?.settings(&(file + &section("dead", "http://127.0.0.1:9", "")))?;
    let server = serve(&place, &redis, &["crm", "dead"]).await?;

    receiver.fail_next(Fault::Respond(500, vec![]));
    receiver.fail_next(Fault::LoseResponse);
    receiver.fail_next(Fault::Hang);
    receiver.fail_next(Fault::Respond(429, vec![("retry-after", "1".to_owned())]));
    let ticket = open(&server, "Where is my parcel?").await?;
    let ticket = ticket["ticket_id"].as_str().context("an id")?.to_owned();
    answered(&server, &ticket, 1).await?;
    let (status, closed) =
        server.post(&format!("/api/v1/tickets/{ticket}/close"), &json!({})).await?;
    assert_eq!(status, 200, "{closed}");

    let expected = ["AI_RESPONSE_GENERATED", "TICKET_CLOSED", "TICKET_CREATED"];
    eventually("all chosen events", || types(&receiver, "crm") == expected)
        .await
        .with_context(|| server.log())?;
    eventually("their acknowledgement", || pending(&redis, "crm") == Some(0)).await?;
    let received = received(&receiver, "crm");
    assert_eq!(received.len(), 3, "one id for each event: {received:#?}");
    let repeated = received.values().filter(|all| all.len() == 2).count();
    assert_eq!(repeated, 1, "the event whose response was lost: {received:#?}");
    for one in received.values().flatten() {
        check_signature(one)?;
        assert_eq!(one.body["data"]["ticket_id"], json!(ticket), "{one:?}");
    }
    let answer =
        received.iter().find(|((event_type, _), _)| event_type.starts_with("AI_")).unwrap();
    let payload = &answer.1[0].body["data"]["payload"];
    assert!(payload["tokens_out"].as_u64() > Some(0), "{payload}");

    // The other receiver has got nothing; its events are kept for it, as no dead letters.
    assert!(pending(&redis, "dead") > Some(0));
    assert_eq!(dead_letters(&redis), 0);
    let metric = r#"headwater_notifications_total{notification="crm",result="delivered"} 3"#;
    server.until("/metrics", |_, page| page.as_str().is_some_and(|it| it.contains(metric))).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn events_that_a_receiver_rejects_are_dead_letters_and_a_replay_reaches_only_it() -> Result<()>
{
    let redis = Redis::start()?;
    let (receiver, url) = Receiver::start().await?;
    let one_type = r#"events = ["TICKET_CREATED"]"#;
    let file = section("strict", &url, one_type)
        + &section("impatient", &url, &format!("{one_type}\nattempts = 1"))
        + &section("other", &url, one_type);
    let place = ServerDir::new()?.settings(&file)?;
    let server = serve(&place, &redis, &["strict", "impatient", "other"]).await?;

    // The three receivers get the event in any order: one is rejected, one fails, one succeeds.
    receiver.fail_next(Fault::RespondWithBody(422, "no such customer"));
    let ticket = open(&server, "Hello").await?;
    eventually("one dead letter", || dead_letters(&redis) == 1)
        .await
        .with_context(|| server.log())?;
    eventually("two deliveries", || receiver.accepted().len() == 2).await?;
    let to = ["--url", &server.url("")];
    let run = |verb: &[&str]| -> Result<String> {
        let output = place.run(&[verb, &to].concat())?;
        ensure!(output.status.success(), "{verb:?}: {}", text(&output.stderr));
        Ok(text(&output.stdout))
    };
    let listed = run(&["dlq", "list", "ticket_events", "--json"])?;
    assert!(listed.contains("no such customer") && listed.contains("notification `"), "{listed}");

    run(&["dlq", "replay", "ticket_events", "--all"])?;
    eventually("the replay", || receiver.accepted().len() == 3)
        .await
        .with_context(|| server.log())?;
    let paths: BTreeSet<String> = receiver.accepted().into_iter().map(|one| one.path).collect();
    assert_eq!(paths.len(), 3, "each receiver once: {paths:?}");
    let ids: BTreeSet<String> = receiver.accepted().into_iter().map(|one| one.key).collect();
    assert_eq!(ids.len(), 1, "the same id as before: {ids:?}");

    // At the attempt limit.
    receiver.fail_randomly(AlwaysFails);
    open(&server, "Again").await?;
    eventually("a dead letter of the impatient one", || dead_letters(&redis) == 1).await?;
    let listed = run(&["dlq", "list", "ticket_events", "--json"])?;
    assert!(
        listed.contains("notification `impatient`") && listed.contains("(attempt 1)"),
        "{listed}"
    );
    let shown =
        server.get(&format!("/api/v1/tickets/{}", ticket["ticket_id"].as_str().unwrap())).await?;
    assert_eq!(shown.0, 200);
    Ok(())
}

#[derive(Debug)]
struct AlwaysFails;

impl support::receivers::FaultSource for AlwaysFails {
    fn next_fault(&mut self) -> Option<Fault> {
        Some(Fault::Respond(503, vec![]))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_survive_that_receiver_and_server_are_killed() -> Result<()> {
    let redis = Redis::start()?;
    let (receiver, url) = Receiver::start().await?;
    let proxy = Proxy::start(url.trim_start_matches("http://").parse()?)?;
    let file = section("crm", &format!("http://{}", proxy.addr()), "timeout = \"500ms\"");
    let place = ServerDir::new()?.settings(&file)?;
    let mut server = serve(&place, &redis, &["crm"]).await?;
    proxy.cut()?;
    let ticket = open(&server, "Where is my parcel?").await?;
    let ticket = ticket["ticket_id"].as_str().context("an id")?.to_owned();
    server.wait_for_log("notification failed; it will be retried")?;
    assert!(pending(&redis, "crm") > Some(0), "not acknowledged");
    server.kill9()?;

    // While the server is down, another program adds an event.
    let event = json!({"event_type": "MESSAGE_RECEIVED", "ticket_id": ticket, "message_id": Uuid::new_v4(), "payload": {"content": "Hello?"}});
    redis.command(&["XADD", "ticket_events", "*", "data", &event.to_string()])?.ok()?;
    proxy.heal()?;
    let server = serve(&place, &redis, &["crm"]).await?;
    let has_all = || {
        let types = types(&receiver, "crm");
        ["TICKET_CREATED", "MESSAGE_RECEIVED"].iter().all(|one| types.iter().any(|it| it == one))
    };
    eventually("both events", has_all).await.with_context(|| server.log())?;
    eventually("their acknowledgement", || pending(&redis, "crm") == Some(0)).await?;
    assert_eq!(dead_letters(&redis), 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_graceful_stop_releases_events_that_wait_for_their_next_attempt() -> Result<()> {
    let redis = Redis::start()?;
    let (receiver, url) = Receiver::start().await?;
    let place =
        ServerDir::new()?.settings(&section("crm", &url, r#"events = ["TICKET_CREATED"]"#))?;
    let mut server = serve(&place, &redis, &["crm"]).await?;
    // Asks for a pause of an hour.
    receiver.fail_next(Fault::Respond(503, vec![("retry-after", "3600".to_owned())]));
    open(&server, "Where is my parcel?").await?;
    server.wait_for_log("notification failed; it will be retried")?;
    assert!(server.stop()?.success(), "{}", server.log());
    // The next process does not wait for a lease.
    let server = serve(&place, &redis, &["crm"]).await?;
    eventually("the event", || receiver.accepted().len() == 1)
        .await
        .with_context(|| server.log())?;
    Ok(())
}

/// Fails as the content of an event says, and records the others.
#[derive(Clone, Default)]
struct ScriptedSink {
    calls: Arc<Mutex<Vec<(String, String)>>>,
}

impl ScriptedSink {
    fn calls(&self) -> Vec<(String, String)> {
        self.calls.lock().unwrap().clone()
    }
}

#[async_trait]
impl NotificationSink for ScriptedSink {
    async fn notify(&self, notification: &TicketNotification) -> Result<(), DeliverError> {
        let content = notification.event.payload.content.clone();
        let times = {
            let mut calls = self.calls.lock().unwrap();
            calls.push((content.clone(), notification.id.clone()));
            calls.iter().filter(|(one, _)| *one == content).count()
        };
        match content.as_str() {
            "fails once" if times == 1 => Err(DeliverError::Retry("not yet".into())),
            "hangs once" if times == 1 => std::future::pending().await,
            "rejected" => Err(DeliverError::Dead("not wanted".into())),
            "denied" => Err(DeliverError::Denied("response 403".into())),
            _ => Ok(()),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sink_of_an_embedding_program_is_called_until_it_succeeds_or_rejects() -> Result<()> {
    let streams = headwater_stream::connect("embedded:memory", &Default::default()).await?;
    let queue = Queue::new(Arc::clone(&streams));
    let stream = StreamName::new("ticket_events")?;
    let contents = ["fine", "fails once", "hangs once", "rejected", "other type"];
    for content in contents {
        let event_type = if content == "other type" { "TICKET_CLOSED" } else { "MESSAGE_RECEIVED" };
        let event = json!({"event_type": event_type, "ticket_id": Uuid::new_v4(), "message_id": Uuid::new_v4(), "content": content});
        let fields = Fields::new([("data", event.to_string())]);
        streams.append(&stream, &[fields], &Retention::KEEP_ALL).await?;
    }
    streams.append(&stream, &[Fields::new([("data", "no json")])], &Retention::KEEP_ALL).await?;

    let (sink, shutdown) = (ScriptedSink::default(), CancellationToken::new());
    let config = NotificationConfig {
        events: vec![TicketEventType::MessageReceived],
        timeout: Duration::from_millis(200),
        start: GroupStart::Beginning,
        ..NotificationConfig::new("chat")
    };
    let forwarder = NotificationForwarder::new(config, Arc::new(sink.clone()), shutdown.clone());
    let forwarder = forwarder.map_err(anyhow::Error::msg)?;
    let running = {
        let queue = queue.clone();
        tokio::spawn(async move { forwarder.run(&queue).await })
    };
    eventually("all calls", || sink.calls().len() == 6).await?;
    shutdown.cancel();
    running.await?;

    let mut calls = BTreeMap::<String, BTreeSet<String>>::new();
    for (content, id) in sink.calls() {
        calls.entry(content).or_default().insert(id);
    }
    let expected = ["fails once", "fine", "hangs once", "rejected"];
    assert!(calls.keys().eq(expected.iter()), "{calls:?}");
    assert!(calls.values().all(|ids| ids.len() == 1), "one id for all attempts: {calls:?}");
    let group = queue.inspect().groups("ticket_events").await?;
    let group =
        group.iter().find(|group| group.group == "notification:chat").context("the group")?;
    assert_eq!((group.pending, group.lag), (0, Some(0)), "all are acknowledged");
    let dead = queue.inspect().topic("ticket_events:dlq").await?;
    let length: u64 = dead.partitions.iter().map(|partition| partition.length).sum();
    assert_eq!(length, 1, "only the rejected one; the desk keeps invalid entries");
    Ok(())
}

#[test]
fn a_server_with_an_invalid_notification_does_not_start() -> Result<()> {
    let place = ServerDir::new()?.settings(&section("crm", "ftp://x", ""))?;
    let output = place.run(&["serve", "--stream-url", "embedded:memory"])?;
    assert_eq!(output.status.code(), Some(2));
    let message = text(&output.stderr);
    assert!(message.contains("[[notification]] `crm` has an invalid url"), "{message}");
    let place = ServerDir::new()?.settings(&section("crm", "http://ann:hunter2@localhost", ""))?;
    for verb in [&["config"][..], &["config", "--json"]] {
        let shown: Value = text(&place.run(verb)?.stdout).into();
        let shown = shown.as_str().unwrap_or_default();
        assert!(
            shown.contains("crm") && !shown.contains("hunter2") && !shown.contains(SECRET),
            "{shown}"
        );
    }
    Ok(())
}

/// The clock of the process is paused: it advances whenever everything waits.
#[tokio::test(start_paused = true)]
async fn an_event_that_is_denied_while_others_are_accepted_becomes_a_dead_letter() -> Result<()> {
    let streams = headwater_stream::connect("embedded:memory", &Default::default()).await?;
    let queue = Queue::new(Arc::clone(&streams));
    let stream = StreamName::new("ticket_events")?;
    // One less than are sent concurrently.
    let contents = [&["denied"; 7][..], &["fine"; 3]].concat();
    for content in contents {
        let event = json!({"event_type": "MESSAGE_RECEIVED", "ticket_id": Uuid::new_v4(), "message_id": Uuid::new_v4(), "content": content});
        let fields = Fields::new([("data", event.to_string())]);
        streams.append(&stream, &[fields], &Retention::KEEP_ALL).await?;
    }
    let (sink, shutdown) = (ScriptedSink::default(), CancellationToken::new());
    let config =
        NotificationConfig { start: GroupStart::Beginning, ..NotificationConfig::new("chat") };
    let forwarder = NotificationForwarder::new(config, Arc::new(sink.clone()), shutdown.clone());
    let forwarder = forwarder.map_err(anyhow::Error::msg)?;
    let running = {
        let queue = queue.clone();
        tokio::spawn(async move { forwarder.run(&queue).await })
    };
    let started = tokio::time::Instant::now();
    let dead_letters = StreamName::new("ticket_events:dlq")?;
    while streams.range(&dead_letters, Range::first(10)).await?.len() < 7 {
        ensure!(started.elapsed() < Duration::from_secs(60 * 60), "{:?}", sink.calls());
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    shutdown.cancel();
    running.await?;
    assert_eq!(sink.calls().iter().filter(|(content, _)| content == "fine").count(), 3);
    Ok(())
}

/// A ticket whose mark cannot be read: another type of value has its key, as if its shard did not answer.
async fn hide_mark(streams: &dyn Backend, ticket: Uuid) -> Result<StreamName> {
    let key = StreamName::new(format!("processed_messages:{ticket}"))?;
    streams.append(&key, &[Fields::new([("x", "x")])], &Retention::KEEP_ALL).await?;
    Ok(key)
}

async fn mark(streams: &dyn Backend, ticket: Uuid) -> Result<()> {
    let key = SetName::new(format!("processed_messages:{ticket}"))?;
    streams.set_add(&key, &["erased"], None).await?;
    Ok(())
}

async fn append(streams: &dyn Backend, ticket: Uuid, content: &str) -> Result<()> {
    let event = json!({"event_type": "MESSAGE_RECEIVED", "ticket_id": ticket, "message_id": Uuid::new_v4(), "content": content});
    let fields = Fields::new([("data", event.to_string())]);
    streams.append(&StreamName::new("ticket_events")?, &[fields], &Retention::KEEP_ALL).await?;
    Ok(())
}

async fn pending_of_chat(queue: &Queue) -> Result<(u64, Option<u64>)> {
    let groups = queue.inspect().groups("ticket_events").await?;
    let group = groups.into_iter().find(|group| group.group == "notification:chat");
    Ok(group.map(|group| (group.pending, group.lag)).unwrap_or_default())
}

/// Runs a forwarder until `check` is done.
async fn while_forwarding(
    queue: &Queue,
    sink: &ScriptedSink,
    tickets: Option<Tickets>,
    check: impl Future<Output = Result<()>>,
) -> Result<()> {
    let shutdown = CancellationToken::new();
    let config =
        NotificationConfig { start: GroupStart::Beginning, ..NotificationConfig::new("chat") };
    let forwarder = NotificationForwarder::new(config, Arc::new(sink.clone()), shutdown.clone());
    let mut forwarder = forwarder.map_err(anyhow::Error::msg)?;
    if let Some(tickets) = tickets {
        forwarder = forwarder.with_tickets(tickets);
    }
    let running = {
        let queue = queue.clone();
        tokio::spawn(async move { forwarder.run(&queue).await })
    };
    let checked = check.await;
    shutdown.cancel();
    running.await?;
    checked
}

#[tokio::test(flavor = "multi_thread")]
async fn tickets_whose_mark_cannot_be_read_do_not_keep_others_waiting() -> Result<()> {
    let streams = headwater_stream::connect("embedded:memory", &Default::default()).await?;
    let queue = Queue::new(Arc::clone(&streams));
    // More than are sent concurrently, and read ahead.
    let mut hidden = Vec::new();
    for _ in 0..30 {
        let ticket = Uuid::new_v4();
        hidden.push(hide_mark(&*streams, ticket).await?);
        append(&*streams, ticket, "hidden").await?;
    }
    for _ in 0..20 {
        append(&*streams, Uuid::new_v4(), "fine").await?;
    }
    let sink = ScriptedSink::default();
    let count = |content: &str| sink.calls().iter().filter(|(one, _)| one == content).count();
    while_forwarding(&queue, &sink, None, async {
        eventually("those of other tickets", || count("fine") == 20).await?;
        assert_eq!(count("hidden"), 0, "it is unknown whether their tickets were erased");
        // The last ones are settled after the receiver has accepted them.
        let deadline = Instant::now() + LIMIT;
        while pending_of_chat(&queue).await?.0 != 30 {
            ensure!(Instant::now() < deadline, "{:?}", pending_of_chat(&queue).await?);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        // The shard answers again.
        for key in &hidden {
            streams.delete_stream(key).await?;
        }
        eventually("all", || count("hidden") == 30).await
    })
    .await?;
    assert_eq!((sink.calls().len(), pending_of_chat(&queue).await?), (50, (0, Some(0))));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_database_decides_about_a_ticket_that_is_marked_or_whose_mark_cannot_be_read()
-> Result<()> {
    let streams = headwater_stream::connect("embedded:memory", &Default::default()).await?;
    let queue = Queue::new(Arc::clone(&streams));
    let directory = tempfile::tempdir()?;
    let url = format!("sqlite:{}", directory.path().join("tickets.db").display());
    let store = headwater_issue::connect(&url, &StoreOptions::default()).await?;
    let nudger = Nudger::new(Arc::clone(&streams));
    let tickets = Tickets::open(store, nudger, DebounceWindow::default()).await?;
    let mut existing = Vec::new();
    for _ in 0..2 {
        let new = NewTicket { title: "t".into(), content: "c".into(), ..NewTicket::default() };
        existing.push(tickets.create(new).await?.ticket_id);
    }
    // An erasure of it failed, or was interrupted.
    mark(&*streams, existing[0]).await?;
    append(&*streams, existing[0], "stays").await?;
    hide_mark(&*streams, existing[1]).await?;
    append(&*streams, existing[1], "exists").await?;
    let (erased, unknown) = (Uuid::new_v4(), Uuid::new_v4());
    mark(&*streams, erased).await?;
    append(&*streams, erased, "erased").await?;
    hide_mark(&*streams, unknown).await?;
    append(&*streams, unknown, "unknown").await?;
    append(&*streams, Uuid::new_v4(), "not imported").await?;

    let sink = ScriptedSink::default();
    while_forwarding(&queue, &sink, Some(tickets), async {
        eventually("three", || sink.calls().len() == 3).await?;
        let deadline = Instant::now() + LIMIT;
        // All are read, and only the one that may have been erased waits.
        while pending_of_chat(&queue).await? != (1, Some(0)) {
            ensure!(Instant::now() < deadline, "{:?}", pending_of_chat(&queue).await?);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    })
    .await?;
    let sent: BTreeSet<String> = sink.calls().into_iter().map(|(content, _)| content).collect();
    assert!(sent.iter().eq(["exists", "not imported", "stays"]), "{sent:?}");
    Ok(())
}
