//! Invalid requests and outputs cause typed failures, and the worker continues.

use std::time::Duration;

use headwater_bus::limits::PAYLOAD_BYTES_MAX;
use headwater_bus::{
    BusError, Event, EventBusExt, MainLoopClient, MainLoopClientConfig, MainLoopConfig,
    MainLoopError, MainLoopFailed, MainLoopRequest, MainLoopWorker, ReceivedEvent, ReplyConfig,
    RequestFailure, RequestId, Requester, Submission, SubscribeOptions,
};
use headwater_conformance::bus::HandlerLog;
use headwater_stream::{EntryId, Fields, MapName, RegistryMap, Retention, SetName};
use serde_json::{Value, json};

use crate::fixture::{Ask, Fixture, Loop, fast_config};

on_streams![
    an_undecodable_request_fails_at_once,
    invalid_requests_of_other_programs_fail_visibly,
    an_output_larger_than_a_mebibyte_fails_the_request,
    a_request_larger_than_a_mebibyte_is_rejected_without_effect,
    invalid_settings_are_rejected_by_name,
];

mod on_backends {
    use super::*;
    on_streams![
        an_undecodable_request_entry_is_parked_and_blocks_no_other,
        a_reply_that_cannot_be_stored_is_not_retried_forever,
        a_reply_ttl_shorter_than_the_call_deadline_is_rejected_without_effect,
    ];
}

async fn assert_worker_is_running(fixture: &Fixture, main_loop: &Loop) {
    let client = fixture.client("alive").await;
    let before = main_loop.log.lines().len();
    let done =
        client.submit::<_, String>(Submission::new(Ask::Echo("a".to_owned()))).await.unwrap();
    assert_eq!((done.output.as_str(), main_loop.log.lines().len()), ("a", before + 1));
}

async fn an_undecodable_request_fails_at_once(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    for invalid in [json!(7), json!({ "Fly": "to the moon" }), Value::Null] {
        let failed = client.submit::<_, Value>(Submission::new(invalid)).await.unwrap_err();
        assert_eq!(failed.failure(), Some(RequestFailure::Malformed), "{failed}");
    }
    assert!(main_loop.log.lines().is_empty());
    assert_worker_is_running(&fixture, &main_loop).await;
    worker.stop().await.unwrap();
}

async fn invalid_requests_of_other_programs_fail_visibly(fixture: Fixture) {
    let main_loop = Loop::default();
    let bus = fixture.bus().await;
    let watched = HandlerLog::default();
    let watch = {
        let watched = watched.clone();
        move |event: ReceivedEvent<MainLoopFailed>| {
            watched.add(format!("{:?} {}", event.request_id, event.kind));
            std::future::ready(())
        }
    };
    bus.subscribe::<MainLoopFailed>(SubscribeOptions::live(), watch).await.unwrap();
    let worker = fixture.worker(&main_loop).await;
    let request = |id: &str| MainLoopRequest {
        request_id: id.to_owned(),
        request: json!({ "Echo": "a" }),
        ..Default::default()
    };
    let invalid = [
        request(""),
        request("a\nb"),
        MainLoopRequest { reply_to: Some("a:b".to_owned()), ..request("reply_to") },
        MainLoopRequest { deadline: Some("soon".to_owned()), ..request("deadline") },
    ];
    let mut seen = 0;
    for event in invalid {
        bus.publish(event).await.unwrap();
        seen += 1;
        watched.wait_for(seen).await;
    }
    let expected = [
        "\"\" malformed",
        "\"a\\nb\" malformed",
        "\"reply_to\" malformed",
        "\"deadline\" malformed",
    ];
    assert_eq!(watched.lines(), expected);
    assert!(main_loop.log.lines().is_empty());
    assert_worker_is_running(&fixture, &main_loop).await;
    worker.stop().await.unwrap();
}

async fn an_undecodable_request_entry_is_parked_and_blocks_no_other(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let backend = fixture.backend().await;
    let fields = [
        Fields::new([("type", MainLoopRequest::TYPE), ("payload", r#"{"request_id":5}"#)]),
        Fields::new([("type", MainLoopRequest::TYPE), ("payload", "no JSON")]),
        Fields::new([("odd", "entry")]),
    ];
    backend.append(&fixture.control(), &fields, &Retention::KEEP_ALL).await.unwrap();
    assert_worker_is_running(&fixture, &main_loop).await;
    let bus = fixture.streamed().await;
    let deadline = tokio::time::Instant::now() + crate::fixture::LIMIT;
    while bus.parked(EntryId::MIN, 10).await.unwrap().len() < 3 {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    worker.stop().await.unwrap();
}

async fn a_reply_that_cannot_be_stored_is_not_retried_forever(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    // The keys of the reply streams of two other requesters have another type.
    let backend = fixture.backend().await;
    for requester in ["shop", "store"] {
        let taken = MapName::new(fixture.replies(requester).as_str()).unwrap();
        let invalid = RegistryMap::from([("odd".to_owned(), "map".into())]);
        assert!(backend.map_create(&taken, &invalid).await.unwrap());
    }
    let submit = Submission::new(Ask::Echo("a".to_owned())).id(RequestId::new("r1").unwrap());
    client.submit::<_, String>(submit).await.unwrap();
    let bus = fixture.streamed().await;
    // One request has a reply to another requester; the other one is executed.
    for (request_id, requester) in [("r1", "shop"), ("r2", "store")] {
        let request = MainLoopRequest {
            request_id: request_id.to_owned(),
            request: json!({ "Echo": "a" }),
            reply_to: Some(requester.to_owned()),
            ..Default::default()
        };
        bus.publish(request).await.unwrap();
    }
    fixture.requests_settle().await;
    assert_eq!(main_loop.log.lines(), ["begun r1", "begun r2"]);
    assert_worker_is_running(&fixture, &main_loop).await;
    worker.stop().await.unwrap();
}

async fn a_reply_ttl_shorter_than_the_call_deadline_is_rejected_without_effect(fixture: Fixture) {
    let calls_take = fixture.backend().await.call_deadline();
    // Calls to an embedded backend neither time out nor are retried.
    let keep = calls_take.map_or(Duration::from_millis(1), |most| most - Duration::from_millis(1));
    let replies = ReplyConfig { ttl: keep, ..Default::default() };
    let config = MainLoopConfig { replies, ..fast_config() };
    let started = MainLoopWorker::start(fixture.sessions().await, Loop::default(), config).await;
    let config = MainLoopClientConfig { replies, ..Default::default() };
    let requester = Requester::new("desk").unwrap();
    let opened = MainLoopClient::open(fixture.bus().await, requester, config).await;
    let refused = [started.err().map(|e| e.to_string()), opened.err().map(|e| e.to_string())];
    for error in &refused {
        let is_refused = error.as_ref().is_some_and(|error| error.starts_with("ttl is invalid"));
        assert_eq!(is_refused, calls_take.is_some(), "{refused:?}");
    }
    if calls_take.is_some() {
        // No requester is registered, and there is no group of workers.
        let set = SetName::new(format!("{}:requesters", fixture.control())).unwrap();
        assert!(fixture.backend().await.set_members(&set).await.unwrap().is_empty());
        assert!(fixture.backend().await.stats(&fixture.control()).await.unwrap().is_none());
    }
}

async fn an_output_larger_than_a_mebibyte_fails_the_request(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    let id = RequestId::new("big").unwrap();
    let submit = |size| Submission::new(Ask::Big(size)).id(id.clone());
    let failed = client.submit::<_, String>(submit(PAYLOAD_BYTES_MAX + 1)).await.unwrap_err();
    assert_eq!(failed.failure(), Some(RequestFailure::TooLarge), "{failed}");
    assert_eq!(main_loop.log.lines().len(), 1, "it is not tried again");
    // The largest request that fits, including its other fields.
    let fits = Submission::new(Ask::Big(PAYLOAD_BYTES_MAX - 1000));
    let done = client.submit::<_, String>(fits).await.unwrap();
    assert_eq!(done.output.len(), PAYLOAD_BYTES_MAX - 1000);
    worker.stop().await.unwrap();
}

async fn a_request_larger_than_a_mebibyte_is_rejected_without_effect(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    let big = Ask::Echo("x".repeat(PAYLOAD_BYTES_MAX + 1));
    let error = client.submit::<_, String>(Submission::new(big)).await.unwrap_err();
    assert!(matches!(error, MainLoopError::Bus(BusError::TooLarge { .. })), "{error}");
    assert_worker_is_running(&fixture, &main_loop).await;
    worker.stop().await.unwrap();
}

async fn invalid_settings_are_rejected_by_name(fixture: Fixture) {
    let replies = ReplyConfig { max_len: 0, ..Default::default() };
    for (name, config) in [
        ("concurrency", MainLoopConfig { concurrency: 0, ..fast_config() }),
        ("max_attempts", MainLoopConfig { max_attempts: 0, ..fast_config() }),
        ("max_crashes", MainLoopConfig { max_crashes: 0, ..fast_config() }),
        ("run_timeout", MainLoopConfig { run_timeout: Duration::ZERO, ..fast_config() }),
        ("drain", MainLoopConfig { drain: Duration::MAX, ..fast_config() }),
        ("sweep_every", MainLoopConfig { sweep_every: Duration::MAX, ..fast_config() }),
        ("max_len", MainLoopConfig { replies, ..fast_config() }),
    ] {
        let sessions = fixture.sessions().await;
        let error = MainLoopWorker::start(sessions, Loop::default(), config).await.unwrap_err();
        assert!(error.to_string().starts_with(name), "{name}: {error}");
    }
}
