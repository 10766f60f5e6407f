//! While Redis is unavailable, replies are delivered, and every step and event reaches its stream later.

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::future::join_all;
use headwater::outbound::TicketEventsPublisher;
use headwater::tickets::{TICKET_EVENTS, TicketEvent, TicketEventType, TicketPayload};
use headwater_bus::{EventRegistry, Folds, Sessions, SessionsConfig, StreamedBus};
use headwater_issue::{DeliverError, IssueId, OutboxId, OutboxKind, OutboxRow};
use headwater_stream::clock::{Clock, SystemClock};
use headwater_stream::{Options, StreamName};
use headwater_testkit::{Persistence, Proxy, Redis, RedisReply};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::desk::{all_idle, answered, by, open};
use crate::support::model::FakeModel;
use crate::support::{LIMIT, Server, ServerDir, eventually};

/// The types of the steps in the stream of a session, in order, without their namespace.
fn steps(redis: &Redis, session: &str) -> Vec<String> {
    let stream = format!("wink:events:{session}");
    let Ok(entries) = redis.command(&["XRANGE", &stream, "-", "+"]) else { return Vec::new() };
    let step = |entry: &RedisReply| {
        let fields = entry.items().get(1).map(RedisReply::items).unwrap_or_default();
        let index = fields.iter().position(|field| field.text() == "type")?;
        let name = fields.get(index + 1)?.text();
        name.rsplit('.').next().map(str::to_owned)
    };
    entries.items().iter().filter_map(step).collect()
}

/// The session of the last run of an issue.
async fn session(server: &Server, created: &Value) -> Result<String> {
    let path = format!("/api/v1/issues/{}", created["issue_id"]);
    let has_session = |_: u16, issue: &Value| issue["fields"]["session_id"].is_string();
    let issue = server.until(&path, has_session).await?;
    Ok(issue["fields"]["session_id"].as_str().context("a session")?.to_owned())
}

// The fake model runs on the runtime of the test.
#[tokio::test(flavor = "multi_thread")]
async fn the_steps_of_a_run_during_an_outage_reach_its_session_after_the_outage() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let (model, model_url) = FakeModel::start((5, 5)).await?;
    let place = ServerDir::new()?;
    let proxy_url = redis.url_at(proxy.addr());
    // On a busy machine a worker may lose its membership during a run; a short claim lets the run be repeated soon.
    let quick = ["--issue-quiet", "10ms", "--sweep-every", "200ms", "--worker-claim", "10s"];
    let model_at = ["--model-url", &model_url, "--model-name", "m"];
    let arguments = [&["--stream-url", &proxy_url][..], &quick, &model_at].concat();
    let server = place.serve(&arguments)?;

    // Redis fails in the middle of one run, and stays unavailable during a whole one.
    let first = open(&server, "first question").await?;
    eventually("a model request", || !model.requests("first question").is_empty()).await?;
    proxy.cut()?;
    model.unblock();
    let second = open(&server, "second question").await?;
    let mut sessions = Vec::new();
    for created in [&first, &second] {
        let ticket = created["ticket_id"].as_str().context("a ticket")?;
        let shown = answered(&server, ticket, 1).await?;
        assert_eq!(by(&shown, "assistant"), [FakeModel::ANSWER]);
        sessions.push(session(&server, created).await?);
    }
    assert!(steps(&redis, &sessions[1]).is_empty());

    proxy.heal()?;
    for session in &sessions {
        eventually("the steps", || steps(&redis, session).len() >= 2).await?;
        assert_eq!(steps(&redis, session), ["PromptRendered", "PromptExecuted"]);
    }
    // Sessions of runs during the outage are listed, and can be read.
    let listed = |_: u16, page: &Value| {
        let there = page["sessions"].as_array().into_iter().flatten();
        let there: Vec<_> = there.filter_map(|one| one["session"].as_str()).collect();
        sessions.iter().all(|session| there.contains(&session.as_str()))
    };
    server.until("/api/v1/sessions", listed).await?;
    let (status, shown) = server.get(&format!("/api/v1/sessions/{}", sessions[1])).await?;
    assert_eq!((status, &shown["events"]), (200, &json!(2)), "{shown}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_kill_during_an_outage_the_next_process_publishes_the_steps() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let (_model, model_url) = FakeModel::open((5, 5)).await?;
    let place = ServerDir::new()?;
    let proxy_url = redis.url_at(proxy.addr());
    let quick = ["--issue-quiet", "10ms", "--sweep-every", "200ms"];
    let model_at = ["--model-url", &model_url, "--model-name", "m"];
    let arguments = [&["--stream-url", &proxy_url][..], &quick, &model_at].concat();
    let mut server = place.serve(&arguments)?;
    proxy.cut()?;
    let created = open(&server, "a question").await?;
    let session = session(&server, &created).await?;
    server.kill9()?;

    proxy.heal()?;
    let server = place.serve(&arguments)?;
    eventually("the steps", || steps(&redis, &session).len() >= 2).await?;
    assert_eq!(steps(&redis, &session), ["PromptRendered", "PromptExecuted"]);
    let (_, page) = server.get("/api/v1/sessions").await?;
    assert_eq!(page["sessions"][0]["session"], json!(session), "{page}");
    let (status, shown) = server.get(&format!("/api/v1/sessions/{session}")).await?;
    assert_eq!((status, &shown["events"]), (200, &json!(2)), "{shown}");
    assert_eq!(server.get("/api/v1/sessions/nothing").await?.0, 404);

    // Reading a stream of another program changes nothing: no index, no group, no TTL.
    redis.command(&[
        "XADD",
        "wink:events:foreign",
        "1-1",
        "type",
        "other.Event",
        "payload",
        "{}",
    ])?;
    let keys = || -> Result<Vec<String>> {
        let found = redis.command(&["KEYS", "*foreign*"])?;
        Ok(found.items().iter().map(|key| key.text()).collect())
    };
    let (before, listed) = (keys()?, server.get("/api/v1/sessions").await?.1);
    let (status, shown) = server.get("/api/v1/sessions/foreign").await?;
    assert_eq!((status, &shown["length"]), (200, &json!(1)), "{shown}");
    assert_eq!((&shown["ttl_ms"], &shown["last_entry"]), (&Value::Null, &json!("1-1")), "{shown}");
    assert_eq!((keys()?, server.get("/api/v1/sessions").await?.1), (before, listed));
    let groups = redis.command(&["XINFO", "GROUPS", "wink:events:foreign"])?;
    assert!(groups.items().is_empty(), "{groups:?}");
    Ok(())
}

/// The events in `ticket_events`, in order: ticket, type and content.
fn published(redis: &Redis) -> Vec<(String, String, String)> {
    let Ok(entries) = redis.command(&["XRANGE", TICKET_EVENTS, "-", "+"]) else {
        return Vec::new();
    };
    let read = |entry: &RedisReply| {
        let fields = entry.items().get(1).map(RedisReply::items).unwrap_or_default();
        let event: Value = serde_json::from_str(&fields.get(1)?.text()).ok()?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let content = text(&event["payload"]["content"]);
        Some((text(&event["ticket_id"]), text(&event["event_type"]), content))
    };
    entries.items().iter().filter_map(read).collect()
}

// The scripted model runs in the server, so the test may block.
#[tokio::test]
async fn many_events_during_an_outage_delay_no_reply_and_are_published_once_in_order() -> Result<()>
{
    const TICKETS: usize = 80;
    let redis = Redis::builder().persistence(Persistence::Always).start()?;
    let place = ServerDir::new()?;
    let quick = ["--issue-quiet", "500ms", "--sweep-every", "200ms"];
    let many = ["--http-rate-per-second", "1000000", "--http-rate-burst", "1000000"];
    let server = place.serve(&[&["--stream-url", &redis.url()][..], &quick, &many].concat())?;
    server.until("/health/ready", |_, body| body["status"] == "ready").await?;

    redis.stop()?;
    let mut tickets = Vec::new();
    for _ in 0..TICKETS {
        let created = open(&server, "first").await?;
        let ticket = created["ticket_id"].as_str().context("a ticket")?.to_owned();
        for content in ["second", "third"] {
            let path = format!("/api/v1/tickets/{ticket}/messages");
            let (status, body) = server.post(&path, &json!({"content": content})).await?;
            assert_eq!(status, 201, "{body}");
        }
        tickets.push(ticket);
    }
    // Several hundred events wait for Redis. Answers do not.
    let mut answers = BTreeMap::new();
    for ticket in &tickets {
        let shown = answered(&server, ticket, 1).await?;
        assert_eq!(by(&shown, "user"), ["first", "second", "third"], "{shown:#}");
    }
    all_idle(&server).await?;
    for ticket in &tickets {
        let shown = answered(&server, ticket, 1).await?;
        answers.insert(ticket.clone(), by(&shown, "assistant").len());
    }

    redis.restart()?;
    let expected = 3 * TICKETS + answers.values().sum::<usize>();
    eventually("all events", || published(&redis).len() >= expected).await?;
    // When a later event is published, duplicates would have been, too.
    let last = open(&server, "the last one").await?;
    let last = last["ticket_id"].as_str().context("a ticket")?.to_owned();
    eventually("the last event", || published(&redis).iter().any(|event| event.0 == last)).await?;
    let published: Vec<_> = published(&redis).into_iter().filter(|event| event.0 != last).collect();
    assert_eq!(published.len(), expected);
    for (ticket, answers) in &answers {
        let of_ticket: Vec<_> = published.iter().filter(|event| event.0 == *ticket).collect();
        let said: Vec<_> = of_ticket
            .iter()
            .filter(|event| event.1 != "AI_RESPONSE_GENERATED")
            .map(|event| (event.1.as_str(), event.2.as_str()))
            .collect();
        let expected = [
            ("TICKET_CREATED", "first"),
            ("MESSAGE_RECEIVED", "second"),
            ("MESSAGE_RECEIVED", "third"),
        ];
        assert_eq!(said, expected, "{of_ticket:?}");
        assert_eq!(of_ticket.len(), 3 + answers, "{of_ticket:?}");
    }
    Ok(())
}

fn event_row(number: usize) -> OutboxRow {
    let event = TicketEvent {
        event_type: TicketEventType::MessageReceived,
        ticket_id: Uuid::now_v7(),
        message_id: Uuid::now_v7(),
        user_id: None,
        payload: TicketPayload::new(number.to_string(), SystemClock.now()),
    };
    OutboxRow {
        id: OutboxId(1),
        issue_id: IssueId(1),
        integration: "desk".into(),
        provider: "desk".into(),
        external_project_id: String::new(),
        external_issue_id: event.ticket_id.to_string(),
        kind: OutboxKind::Event,
        target: TICKET_EVENTS.into(),
        idempotency_key: format!("key-{number}"),
        payload: event.to_json(),
        deliveries: 1,
        attempts: 0,
        crashes: 0,
        created_at: SystemClock.now(),
    }
}

/// How many of these rows called Redis instead of backing off.
async fn attempts(publisher: &TicketEventsPublisher, rows: &[OutboxRow]) -> usize {
    let answers = join_all(rows.iter().map(|row| publisher.publish(row))).await;
    let was_attempted = |answer: &Result<(), DeliverError>| match answer {
        Err(DeliverError::Unavailable(reason)) => !reason.contains("a moment ago"),
        other => panic!("{other:?}"),
    };
    answers.iter().filter(|answer| was_attempted(answer)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_events_one_at_a_time_probes_an_unavailable_redis() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let options = Options { call_deadline: Duration::from_secs(3), ..Options::default() };
    let streams = headwater_stream::connect(&redis.url_at(proxy.addr()), &options).await?;
    let bus = Arc::new(StreamedBus::in_memory(EventRegistry::builtin()).await?);
    let sessions = Sessions::new(bus, Folds::none(), SessionsConfig::default()).await?;
    let control = StreamName::new("control")?;
    let publisher = TicketEventsPublisher::new(Arc::clone(&streams), control, Arc::new(sessions));
    let rows: Vec<OutboxRow> = (0..64).map(event_row).collect();

    proxy.stall()?;
    assert_eq!(attempts(&publisher, &rows).await, rows.len(), "no failure is known yet");
    // During the outage one event at a time probes Redis, and the others do not wait for it.
    for round in 0..3 {
        let attempts = attempts(&publisher, &rows).await;
        assert!(attempts <= 1, "{attempts} attempts in round {round}");
        tokio::time::sleep(Duration::from_millis(2100)).await;
    }

    // Each event is published exactly once in the end, even if a first attempt arrived after all.
    proxy.heal()?;
    let deadline = Instant::now() + LIMIT;
    for row in &rows {
        while let Err(error) = publisher.publish(row).await {
            assert!(matches!(error, DeliverError::Unavailable(_)), "{error}");
            assert!(Instant::now() < deadline, "{error}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // The process died before it recorded the delivery: the row is repeated.
        while let Err(error) = publisher.publish(row).await {
            assert!(matches!(error, DeliverError::Unavailable(_)), "{error}");
            assert!(Instant::now() < deadline, "{error}");
        }
    }
    let mut numbers: Vec<usize> =
        published(&redis).iter().filter_map(|event| event.2.parse().ok()).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..rows.len()).collect::<Vec<_>>());
    Ok(())
}
