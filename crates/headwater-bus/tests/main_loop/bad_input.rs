//! Requests and outputs that make no sense: typed failures, and a worker that lives.

use std::time::Duration;

use headwater_bus::conformance::HandlerLog;
use headwater_bus::limits::PAYLOAD_BYTES_MAX;
use headwater_bus::{
    BusError, Event, EventBusExt, MainLoopClient, MainLoopClientConfig, MainLoopConfig,
    MainLoopError, MainLoopFailed, MainLoopRequest, MainLoopWorker, ReceivedEvent, ReplyConfig,
    RequestFailure, RequestId, Requester, Submission, SubscribeOptions,
};
use headwater_stream::{EntryId, Fields, MapName, RegistryMap, Retention, SetName};
use serde_json::{Value, json};

use crate::place::{Ask, Loop, Place, quick};

everywhere![
    a_request_that_the_main_loop_does_not_understand_fails_at_once,
    odd_requests_of_other_programs_fail_where_others_can_see,
    an_output_of_more_than_a_mebibyte_is_a_failure_and_not_a_hang,
    a_request_of_more_than_a_mebibyte_is_refused_without_effect,
    settings_that_make_no_sense_are_refused_by_name,
];

mod on_backends {
    use super::*;
    on_streams![
        an_entry_that_is_no_request_is_parked_and_stops_nobody,
        a_reply_that_can_be_kept_nowhere_is_not_tried_for_ever,
        replies_that_are_known_for_less_time_than_a_call_may_take_are_refused_without_effect,
    ];
}

async fn lives(place: &Place, main_loop: &Loop) {
    let client = place.client("alive").await;
    let before = main_loop.log.lines().len();
    let done =
        client.submit::<_, String>(Submission::new(Ask::Echo("a".to_owned()))).await.unwrap();
    assert_eq!((done.output.as_str(), main_loop.log.lines().len()), ("a", before + 1));
}

async fn a_request_that_the_main_loop_does_not_understand_fails_at_once(place: Place) {
    let main_loop = Loop::default();
    let worker = place.worker(&main_loop).await;
    let client = place.client("desk").await;
    for odd in [json!(7), json!({ "Fly": "to the moon" }), Value::Null] {
        let failed = client.submit::<_, Value>(Submission::new(odd)).await.unwrap_err();
        assert_eq!(failed.failure(), Some(RequestFailure::Malformed), "{failed}");
    }
    assert!(main_loop.log.lines().is_empty());
    lives(&place, &main_loop).await;
    worker.stop().await.unwrap();
}

async fn odd_requests_of_other_programs_fail_where_others_can_see(place: Place) {
    let main_loop = Loop::default();
    let bus = place.bus().await;
    let watched = HandlerLog::default();
    let watch = {
        let watched = watched.clone();
        move |event: ReceivedEvent<MainLoopFailed>| {
            watched.add(format!("{:?} {}", event.request_id, event.kind));
            std::future::ready(())
        }
    };
    bus.subscribe::<MainLoopFailed>(SubscribeOptions::live(), watch).await.unwrap();
    let worker = place.worker(&main_loop).await;
    let request = |id: &str| MainLoopRequest {
        request_id: id.to_owned(),
        request: json!({ "Echo": "a" }),
        ..Default::default()
    };
    let odd = [
        request(""),
        request("a\nb"),
        MainLoopRequest { reply_to: Some("a:b".to_owned()), ..request("reply_to") },
        MainLoopRequest { deadline: Some("soon".to_owned()), ..request("deadline") },
    ];
    let mut seen = 0;
    for event in odd {
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
    lives(&place, &main_loop).await;
    worker.stop().await.unwrap();
}

async fn an_entry_that_is_no_request_is_parked_and_stops_nobody(place: Place) {
    let main_loop = Loop::default();
    let worker = place.worker(&main_loop).await;
    let backend = place.backend().await;
    let fields = [
        Fields::new([("type", MainLoopRequest::TYPE), ("payload", r#"{"request_id":5}"#)]),
        Fields::new([("type", MainLoopRequest::TYPE), ("payload", "no JSON")]),
        Fields::new([("odd", "entry")]),
    ];
    backend.append(&place.control(), &fields, &Retention::KEEP_ALL).await.unwrap();
    lives(&place, &main_loop).await;
    let bus = place.streamed().await;
    let deadline = tokio::time::Instant::now() + crate::place::LIMIT;
    while bus.parked(EntryId::MIN, 10).await.unwrap().len() < 3 {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    worker.stop().await.unwrap();
}

async fn a_reply_that_can_be_kept_nowhere_is_not_tried_for_ever(place: Place) {
    let main_loop = Loop::default();
    let worker = place.worker(&main_loop).await;
    let client = place.client("desk").await;
    // A key of another kind lies where the replies of two other requesters are to go.
    let backend = place.backend().await;
    for requester in ["shop", "store"] {
        let taken = MapName::new(place.replies(requester).as_str()).unwrap();
        let odd = RegistryMap::from([("odd".to_owned(), "map".into())]);
        assert!(backend.map_create(&taken, &odd).await.unwrap());
    }
    let submit = Submission::new(Ask::Echo("a".to_owned())).id(RequestId::new("r1").unwrap());
    client.submit::<_, String>(submit).await.unwrap();
    let bus = place.streamed().await;
    // One that has a reply elsewhere, and one that is carried out for nobody else.
    for (request_id, requester) in [("r1", "shop"), ("r2", "store")] {
        let request = MainLoopRequest {
            request_id: request_id.to_owned(),
            request: json!({ "Echo": "a" }),
            reply_to: Some(requester.to_owned()),
            ..Default::default()
        };
        bus.publish(request).await.unwrap();
    }
    place.requests_settle().await;
    assert_eq!(main_loop.log.lines(), ["begun r1", "begun r2"]);
    lives(&place, &main_loop).await;
    worker.stop().await.unwrap();
}

async fn replies_that_are_known_for_less_time_than_a_call_may_take_are_refused_without_effect(
    place: Place,
) {
    let calls_take = place.backend().await.call_deadline();
    // Calls to an embedded backend are neither given up nor repeated.
    let keep = calls_take.map_or(Duration::from_millis(1), |most| most - Duration::from_millis(1));
    let replies = ReplyConfig { ttl: keep, ..Default::default() };
    let config = MainLoopConfig { replies, ..quick() };
    let started = MainLoopWorker::start(place.sessions().await, Loop::default(), config).await;
    let config = MainLoopClientConfig { replies, ..Default::default() };
    let requester = Requester::new("desk").unwrap();
    let opened = MainLoopClient::open(place.bus().await, requester, config).await;
    let refused = [started.err().map(|e| e.to_string()), opened.err().map(|e| e.to_string())];
    for error in &refused {
        let is_refused = error.as_ref().is_some_and(|error| error.starts_with("keep is invalid"));
        assert_eq!(is_refused, calls_take.is_some(), "{refused:?}");
    }
    if calls_take.is_some() {
        // Nobody is on the list of those who have replies, and there is no group of workers.
        let set = SetName::new(format!("{}:requesters", place.control())).unwrap();
        assert!(place.backend().await.set_members(&set).await.unwrap().is_empty());
        assert!(place.backend().await.stats(&place.control()).await.unwrap().is_none());
    }
}

async fn an_output_of_more_than_a_mebibyte_is_a_failure_and_not_a_hang(place: Place) {
    let main_loop = Loop::default();
    let worker = place.worker(&main_loop).await;
    let client = place.client("desk").await;
    let id = RequestId::new("big").unwrap();
    let submit = |size| Submission::new(Ask::Big(size)).id(id.clone());
    let failed = client.submit::<_, String>(submit(PAYLOAD_BYTES_MAX + 1)).await.unwrap_err();
    assert_eq!(failed.failure(), Some(RequestFailure::TooLarge), "{failed}");
    assert_eq!(main_loop.log.lines().len(), 1, "it is not tried again");
    // The largest that fits, with what surrounds it.
    let fits = Submission::new(Ask::Big(PAYLOAD_BYTES_MAX - 1000));
    let done = client.submit::<_, String>(fits).await.unwrap();
    assert_eq!(done.output.len(), PAYLOAD_BYTES_MAX - 1000);
    worker.stop().await.unwrap();
}

async fn a_request_of_more_than_a_mebibyte_is_refused_without_effect(place: Place) {
    let main_loop = Loop::default();
    let worker = place.worker(&main_loop).await;
    let client = place.client("desk").await;
    let big = Ask::Echo("x".repeat(PAYLOAD_BYTES_MAX + 1));
    let error = client.submit::<_, String>(Submission::new(big)).await.unwrap_err();
    assert!(matches!(error, MainLoopError::Bus(BusError::TooLarge { .. })), "{error}");
    lives(&place, &main_loop).await;
    worker.stop().await.unwrap();
}

async fn settings_that_make_no_sense_are_refused_by_name(place: Place) {
    let replies = ReplyConfig { max_len: 0, ..Default::default() };
    for (name, config) in [
        ("concurrency", MainLoopConfig { concurrency: 0, ..quick() }),
        ("max_attempts", MainLoopConfig { max_attempts: 0, ..quick() }),
        ("max_crashes", MainLoopConfig { max_crashes: 0, ..quick() }),
        ("run_timeout", MainLoopConfig { run_timeout: Duration::ZERO, ..quick() }),
        ("drain", MainLoopConfig { drain: Duration::MAX, ..quick() }),
        ("sweep_every", MainLoopConfig { sweep_every: Duration::MAX, ..quick() }),
        ("max_len", MainLoopConfig { replies, ..quick() }),
    ] {
        let sessions = place.sessions().await;
        let error = MainLoopWorker::start(sessions, Loop::default(), config).await.unwrap_err();
        assert!(error.to_string().starts_with(name), "{name}: {error}");
    }
}
