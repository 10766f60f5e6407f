//! While Redis is away: answers come all the same, and every step and event reaches its stream later.

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::future::join_all;
use headwater::outbound::Outlet;
use headwater::tickets::{TICKET_EVENTS, TicketEvent, TicketEventType, TicketPayload};
use headwater_issue::{DeliverError, IssueId, OutboxId, OutboxKind, OutboxRow};
use headwater_stream::clock::{Clock, SystemClock};
use headwater_stream::{Options, StreamName};
use headwater_testkit::{Persistence, Proxy, Redis, Reply};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::desk::{all_idle, answered, by, open};
use crate::support::model::FakeModel;
use crate::support::{LIMIT, Server, ServerDir, eventually};

/// The types of the steps in a session's stream, in order, without what stands before their last dot.
fn steps(redis: &Redis, session: &str) -> Vec<String> {
    let stream = format!("wink:events:{session}");
    let Ok(entries) = redis.command(&["XRANGE", &stream, "-", "+"]) else { return Vec::new() };
    let step = |entry: &Reply| {
        let fields = entry.items().get(1).map(Reply::items).unwrap_or_default();
        let place = fields.iter().position(|field| field.text() == "type")?;
        let name = fields.get(place + 1)?.text();
        name.rsplit('.').next().map(str::to_owned)
    };
    entries.items().iter().filter_map(step).collect()
}

/// The session of the last run of an issue, which its reply names, too.
async fn session(server: &Server, created: &Value) -> Result<String> {
    let path = format!("/api/v1/issues/{}", created["issue_id"]);
    let has_session = |_: u16, issue: &Value| issue["fields"]["session_id"].is_string();
    let issue = server.until(&path, has_session).await?;
    Ok(issue["fields"]["session_id"].as_str().context("a session")?.to_owned())
}

// The service of the test answers while the test waits.
#[tokio::test(flavor = "multi_thread")]
async fn the_steps_of_a_run_during_an_outage_reach_its_session_when_redis_is_back() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let (model, model_url) = FakeModel::start((5, 5)).await?;
    let place = ServerDir::new()?;
    let way = redis.url_at(proxy.addr());
    // On a busy machine a run may outlive its place in the group; its claim runs out soon, and it comes again.
    let quick = ["--issue-quiet", "10ms", "--sweep-every", "200ms", "--worker-claim", "10s"];
    let model_at = ["--model-url", &model_url, "--model-name", "m"];
    let arguments = [&["--stream-url", &way][..], &quick, &model_at].concat();
    let server = place.serve(&arguments)?;

    // Redis goes away in the middle of a run, and stays away for a whole one.
    let first = open(&server, "first question").await?;
    eventually("a question", || !model.asked("first question").is_empty()).await?;
    proxy.cut()?;
    model.open_door();
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
    assert!(!server.log().contains("is not in its session"), "{}", server.log());
    // Those that could not be made then are listed by now, and shown.
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
async fn a_kill_during_an_outage_leaves_the_steps_to_the_next_process() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let (_model, model_url) = FakeModel::open((5, 5)).await?;
    let place = ServerDir::new()?;
    let way = redis.url_at(proxy.addr());
    let quick = ["--issue-quiet", "10ms", "--sweep-every", "200ms"];
    let model_at = ["--model-url", &model_url, "--model-name", "m"];
    let arguments = [&["--stream-url", &way][..], &quick, &model_at].concat();
    let mut server = place.serve(&arguments)?;
    // Another process of the same directory has a spool of its own.
    let _other = place.worker(&arguments)?;
    proxy.cut()?;
    let created = open(&server, "a question").await?;
    let session = session(&server, &created).await?;
    server.kill9()?;

    proxy.heal()?;
    let server = place.serve(&arguments)?;
    eventually("the steps", || steps(&redis, &session).len() >= 2).await?;
    assert_eq!(steps(&redis, &session), ["PromptRendered", "PromptExecuted"]);
    // Nobody knows of it any more, but it is found by its name.
    let (status, shown) = server.get(&format!("/api/v1/sessions/{session}")).await?;
    assert_eq!((status, &shown["events"]), (200, &json!(2)), "{shown}");
    assert_eq!(server.get("/api/v1/sessions/nothing").await?.0, 404);

    // Nor is anything changed of what another program wrote: no list, no group, no time to live.
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

/// What the stream of ticket events has, in order: ticket, type and content.
fn told(redis: &Redis) -> Vec<(String, String, String)> {
    let Ok(entries) = redis.command(&["XRANGE", TICKET_EVENTS, "-", "+"]) else {
        return Vec::new();
    };
    let read = |entry: &Reply| {
        let fields = entry.items().get(1).map(Reply::items).unwrap_or_default();
        let event: Value = serde_json::from_str(&fields.get(1)?.text()).ok()?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let content = text(&event["payload"]["content"]);
        Some((text(&event["ticket_id"]), text(&event["event_type"]), content))
    };
    entries.items().iter().filter_map(read).collect()
}

// The model thinks on a thread of the server's; the test waits on its own.
#[tokio::test]
async fn many_events_of_an_outage_hold_up_no_reply_and_are_told_once_and_in_order() -> Result<()> {
    const TICKETS: usize = 80;
    let redis = Redis::builder().persistence(Persistence::Always).start()?;
    let place = ServerDir::new()?;
    let quick = ["--issue-quiet", "500ms", "--sweep-every", "200ms"];
    let many = ["--http-rate-per-second", "1000000", "--http-rate-burst", "1000000"];
    let server = place.serve(&[&["--stream-url", &redis.url()][..], &quick, &many].concat())?;
    server.until("/health/ready", |status, _| status == 200).await?;

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
    // Several hundred events wait for Redis by now. Nobody's answer does.
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
    eventually("all events", || told(&redis).len() >= expected).await?;
    // What would come twice has had its time when later ones have come.
    let last = open(&server, "the last one").await?;
    let last = last["ticket_id"].as_str().context("a ticket")?.to_owned();
    eventually("the last event", || told(&redis).iter().any(|event| event.0 == last)).await?;
    let told: Vec<_> = told(&redis).into_iter().filter(|event| event.0 != last).collect();
    assert_eq!(told.len(), expected);
    for (ticket, answers) in &answers {
        let of_ticket: Vec<_> = told.iter().filter(|event| event.0 == *ticket).collect();
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

/// How many of these asked Redis, and did not just hear that it was away.
async fn asked(outlet: &Outlet, rows: &[OutboxRow]) -> usize {
    let answers = join_all(rows.iter().map(|row| outlet.publish(row))).await;
    let has_asked = |answer: &Result<(), DeliverError>| match answer {
        Err(DeliverError::Away(reason)) => !reason.contains("a moment ago"),
        other => panic!("{other:?}"),
    };
    answers.iter().filter(|answer| has_asked(answer)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_events_one_at_a_time_asks_a_redis_that_is_away() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let options = Options { call_deadline: Duration::from_secs(3), ..Options::default() };
    let streams = headwater_stream::connect(&redis.url_at(proxy.addr()), &options).await?;
    let outlet = Outlet::new(Arc::clone(&streams), StreamName::new("control")?);
    let rows: Vec<OutboxRow> = (0..64).map(event_row).collect();

    proxy.stall()?;
    assert_eq!(asked(&outlet, &rows).await, rows.len(), "nobody knows yet");
    // However long it is away: of all that come meanwhile, one finds out, and the others do not wait for it.
    for round in 0..3 {
        let asked = asked(&outlet, &rows).await;
        assert!(asked <= 1, "{asked} asked in round {round}");
        tokio::time::sleep(Duration::from_millis(2100)).await;
    }

    // Each is told in the end, once, though the first tries may have arrived after all.
    proxy.heal()?;
    let deadline = Instant::now() + LIMIT;
    for row in &rows {
        while let Err(error) = outlet.publish(row).await {
            assert!(matches!(error, DeliverError::Away(_)), "{error}");
            assert!(Instant::now() < deadline, "{error}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // The process died before it was noted: the row comes again.
        while let Err(error) = outlet.publish(row).await {
            assert!(matches!(error, DeliverError::Away(_)), "{error}");
            assert!(Instant::now() < deadline, "{error}");
        }
    }
    let mut numbers: Vec<usize> =
        told(&redis).iter().filter_map(|event| event.2.parse().ok()).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..rows.len()).collect::<Vec<_>>());
    Ok(())
}
