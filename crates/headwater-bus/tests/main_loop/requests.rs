//! Requests and their replies.

use std::collections::BTreeSet;

use headwater_bus::{
    Event, EventBusExt, MainLoopCompleted, MainLoopRequest, ReceivedEvent, RequestFailure,
    RequestId, Submission, SubscribeOptions,
};
use headwater_conformance::bus::HandlerLog;
use serde_json::{Value, json};

use crate::fixture::{Ask, Fixture, Loop, begun, fast_config};

on_streams![
    a_request_is_executed_in_its_own_session_and_replied_to,
    a_request_submitted_twice_is_executed_once_and_both_callers_get_the_reply,
    two_requesters_with_one_request_get_one_reply,
    a_failed_request_is_retried_in_the_same_session,
    a_request_whose_attempts_all_fail_reports_the_reason,
    a_request_of_another_program_without_reply_to_is_executed,
];

mod together {
    use super::*;
    on_streams![
        workers_compete_for_requests_and_each_is_executed_once,
        no_request_waits_while_a_worker_is_idle,
    ];
}

fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

async fn a_request_is_executed_in_its_own_session_and_replied_to(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    let watched = HandlerLog::default();
    let bus = fixture.bus().await;
    let watch = {
        let watched = watched.clone();
        move |event: ReceivedEvent<MainLoopCompleted>| {
            watched.add(format!("{} {}", event.envelope.event_id, event.response));
            std::future::ready(())
        }
    };
    bus.subscribe::<MainLoopCompleted>(SubscribeOptions::live(), watch).await.unwrap();

    let first =
        client.submit::<_, Vec<u64>>(Submission::new(Ask::Note(1)).id(id("r 1:{}"))).await.unwrap();
    assert_eq!(first.output, [1]);
    let session = client.session_of(&id("r 1:{}"));
    assert_eq!(first.session.as_ref(), Some(&session));
    let second = client.submit::<_, Vec<u64>>(Submission::new(Ask::Note(2))).await.unwrap();
    assert_eq!(second.output, [2], "another request has another session");

    let seen = watched.settles_at(2).await;
    assert!(seen.contains(&"reply:r 1:{} [1]".to_owned()), "{seen:?}");
    let sessions = fixture.sessions().await;
    assert!(sessions.recover(&session).await.is_ok());
    assert_eq!(main_loop.log.lines().len(), 2);
    worker.stop().await.unwrap();
}

async fn a_request_submitted_twice_is_executed_once_and_both_callers_get_the_reply(
    fixture: Fixture,
) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let [one, other] = [fixture.client("desk").await, fixture.client("desk").await];
    let ask = |text: &str| Submission::new(Ask::Wait(text.to_owned())).id(id("r1"));
    let open = async {
        main_loop.begun.notified().await;
        // Long enough for the second one to overlap with the first; otherwise it finds the reply.
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        main_loop.open_gate();
    };
    let (first, second, ()) =
        tokio::join!(one.submit::<_, String>(ask("a")), other.submit::<_, String>(ask("a")), open);
    assert_eq!(first.unwrap().output, "a");
    assert_eq!(second.unwrap().output, "a");
    let third = one.submit::<_, String>(ask("something else")).await.unwrap();
    assert_eq!(third.output, "a", "the id decides");
    assert_eq!(begun(&main_loop, "r1"), 1);
    worker.stop().await.unwrap();
}

async fn two_requesters_with_one_request_get_one_reply(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let [desk, shop] = [fixture.client("desk").await, fixture.client("shop").await];
    let ask = || Submission::new(Ask::Wait("a".to_owned())).id(id("r1"));
    let open = async {
        main_loop.begun.notified().await;
        main_loop.open_gate();
    };
    let (first, second, ()) =
        tokio::join!(desk.submit::<_, String>(ask()), shop.submit::<_, String>(ask()), open);
    assert_eq!((first.unwrap().output, second.unwrap().output), ("a".to_owned(), "a".to_owned()));
    assert_eq!(begun(&main_loop, "r1"), 1);
    worker.stop().await.unwrap();
}

async fn a_failed_request_is_retried_in_the_same_session(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    let done =
        client.submit::<_, u32>(Submission::new(Ask::FailTimes(2)).id(id("r1"))).await.unwrap();
    assert_eq!(done.output, 3);
    assert_eq!(begun(&main_loop, "r1"), 3);
    worker.stop().await.unwrap();
}

async fn a_request_whose_attempts_all_fail_reports_the_reason(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    for (ask, name, kind, reason, tries) in [
        (Ask::FailTimes(100), "fails", RequestFailure::Failed, "not yet (attempt 3)", 3),
        (Ask::GiveUp, "gives up", RequestFailure::GivenUp, "never", 1),
        (Ask::Panic, "panics", RequestFailure::Panicked, "it panicked: as it was asked to", 3),
    ] {
        let failed =
            client.submit::<_, Value>(Submission::new(ask).id(id(name))).await.unwrap_err();
        assert_eq!(failed.failure(), Some(kind), "{failed}");
        assert!(failed.to_string().contains(reason), "{failed}");
        assert_eq!(begun(&main_loop, name), tries);
    }
    let fine =
        client.submit::<_, String>(Submission::new(Ask::Echo("a".to_owned()))).await.unwrap();
    assert_eq!(fine.output, "a", "the worker lives");
    worker.stop().await.unwrap();
}

async fn a_request_of_another_program_without_reply_to_is_executed(fixture: Fixture) {
    let main_loop = Loop::default();
    let bus = fixture.bus().await;
    let watched = HandlerLog::default();
    let watch = {
        let watched = watched.clone();
        move |event: ReceivedEvent<MainLoopCompleted>| {
            watched.add(&event.response);
            std::future::ready(())
        }
    };
    bus.subscribe::<MainLoopCompleted>(SubscribeOptions::live(), watch).await.unwrap();
    let worker = fixture.worker(&main_loop).await;
    let request = MainLoopRequest {
        request_id: "theirs".to_owned(),
        request: json!({ "Echo": "a" }),
        ..Default::default()
    };
    bus.publish(request.clone()).await.unwrap();
    bus.publish(request).await.unwrap();
    assert_eq!(watched.settles_at(1).await, ["\"a\""]);
    assert_eq!(begun(&main_loop, "theirs"), 1);
    worker.stop().await.unwrap();
}

async fn workers_compete_for_requests_and_each_is_executed_once(fixture: Fixture) {
    const REQUESTS: usize = 100;
    let loops = [Loop::default(), Loop::default()];
    let config = headwater_bus::MainLoopConfig { concurrency: 4, ..fast_config() };
    let workers = [
        fixture.worker_with(&loops[0], config.clone()).await,
        fixture.worker_with(&loops[1], config).await,
    ];
    let client = fixture.client("desk").await;
    let asking = (0..REQUESTS)
        .map(|number| client.submit::<_, String>(Submission::new(Ask::Echo(number.to_string()))));
    let outputs: BTreeSet<String> = futures_util::future::join_all(asking)
        .await
        .into_iter()
        .map(|completed| completed.unwrap().output)
        .collect();
    assert_eq!(outputs.len(), REQUESTS);
    let share = loops.each_ref().map(|main_loop| main_loop.log.lines().len());
    println!("shares: {share:?}");
    assert_eq!(share.iter().sum::<usize>(), REQUESTS);
    fixture.control_settles_at(MainLoopCompleted::TYPE, REQUESTS).await;
    assert_eq!(fixture.entries(&fixture.replies("desk")).await.len(), REQUESTS);
    for worker in &workers {
        worker.stop().await.unwrap();
    }
}

async fn no_request_waits_while_a_worker_is_idle(fixture: Fixture) {
    let main_loop = Loop::default();
    let config = headwater_bus::MainLoopConfig { concurrency: 1, ..fast_config() };
    let mut workers = Vec::new();
    for _ in 0..3 {
        workers.push(fixture.worker_with(&main_loop, config.clone()).await);
    }
    let client = fixture.client("desk").await;
    for round in 1..=5 {
        let asking = (0..3).map(|number| {
            client.submit::<_, String>(Submission::new(Ask::Wait(number.to_string())))
        });
        let (done, ()) = tokio::join!(futures_util::future::join_all(asking), async {
            // All three run at once, or this times out.
            main_loop.log.wait_for(round * 3).await;
            main_loop.gate.add_permits(3);
        });
        assert!(done.into_iter().all(|done| done.is_ok()));
    }
    for worker in &workers {
        worker.stop().await.unwrap();
    }
}
