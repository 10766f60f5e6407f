//! Cancelled requests.

use std::sync::Arc;

use headwater_bus::{
    CancelOutcome, Event, MainLoopClient, MainLoopConfig, MainLoopFailed, RequestFailure,
    RequestId, Requester, Submission,
};
use serde_json::Value;

use crate::fixture::{Ask, Fixture, LIMIT, Loop, Mute, begun, fast_config};

on_streams![
    a_running_request_is_stopped_when_it_is_cancelled,
    a_waiting_request_is_not_started_when_it_is_cancelled,
    a_request_that_has_a_reply_cannot_be_cancelled,
    a_request_cancelled_before_it_is_submitted_is_not_executed,
];

/// On streams, where other processes can watch.
mod watched {
    use super::a_cancellation_not_published_by_its_requester_is_published_by_the_worker;

    on_streams!(a_cancellation_not_published_by_its_requester_is_published_by_the_worker);
}

fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

async fn a_running_request_is_stopped_when_it_is_cancelled(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let [client, other] = [fixture.client("desk").await, fixture.client("desk").await];
    let submit = Submission::new(Ask::Wait(String::new())).id(id("r1"));
    let (failed, ()) = tokio::join!(client.submit::<_, Value>(submit), async {
        main_loop.begun.notified().await;
        // Any process of the requester can cancel.
        assert_eq!(other.cancel(&id("r1")).await.unwrap(), CancelOutcome::Cancelled);
    });
    assert_eq!(failed.unwrap_err().failure(), Some(RequestFailure::Cancelled));
    assert_eq!(main_loop.log.settles_at(2).await, ["begun r1", "dropped r1"]);
    assert_eq!(
        client.cancel(&id("r1")).await.unwrap(),
        CancelOutcome::Cancelled,
        "it is cancelled still"
    );
    worker.stop().await.unwrap();
}

async fn a_waiting_request_is_not_started_when_it_is_cancelled(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker =
        fixture.worker_with(&main_loop, MainLoopConfig { concurrency: 1, ..fast_config() }).await;
    let client = fixture.client("desk").await;
    let first =
        client.submit::<_, String>(Submission::new(Ask::Wait("a".to_owned())).id(id("first")));
    let second = async {
        main_loop.begun.notified().await;
        let submit = Submission::new(Ask::Echo("b".to_owned())).id(id("second"));
        let (failed, cancelled) = tokio::join!(client.submit::<_, String>(submit), async {
            // In either order of request and cancellation.
            client.cancel(&id("second")).await
        });
        assert_eq!(cancelled.unwrap(), CancelOutcome::Cancelled);
        main_loop.open_gate();
        failed
    };
    let (first, second) = tokio::join!(first, second);
    assert_eq!(first.unwrap().output, "a");
    assert_eq!(second.unwrap_err().failure(), Some(RequestFailure::Cancelled));
    let third =
        client.submit::<_, String>(Submission::new(Ask::Echo("c".to_owned()))).await.unwrap();
    assert_eq!(third.output, "c", "whatever waited before it is over");
    assert_eq!(begun(&main_loop, "second"), 0);
    worker.stop().await.unwrap();
}

async fn a_request_that_has_a_reply_cannot_be_cancelled(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    let submit = || Submission::new(Ask::Echo("a".to_owned())).id(id("r1"));
    client.submit::<_, String>(submit()).await.unwrap();
    assert_eq!(client.cancel(&id("r1")).await.unwrap(), CancelOutcome::AlreadyReplied);
    assert_eq!(client.submit::<_, String>(submit()).await.unwrap().output, "a");
    worker.stop().await.unwrap();
}

async fn a_request_cancelled_before_it_is_submitted_is_not_executed(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    assert_eq!(client.cancel(&id("r1")).await.unwrap(), CancelOutcome::Cancelled);
    let submit = Submission::new(Ask::Echo("a".to_owned())).id(id("r1")).timeout(LIMIT);
    let failed = client.submit::<_, String>(submit).await.unwrap_err();
    assert_eq!(failed.failure(), Some(RequestFailure::Cancelled));
    worker.stop().await.unwrap();
    assert_eq!(begun(&main_loop, "r1"), 0);
}

async fn a_cancellation_not_published_by_its_requester_is_published_by_the_worker(
    fixture: Fixture,
) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    let mute = Arc::new(Mute { bus: fixture.bus().await, refuses: true });
    let requester = Requester::new("desk").unwrap();
    let cancel_after = MainLoopClient::open(mute, requester, Default::default()).await.unwrap();
    let submit = Submission::new(Ask::Wait("a".to_owned())).id(id("r1"));
    let (failed, ()) = tokio::join!(client.submit::<_, Value>(submit), async {
        main_loop.begun.notified().await;
        // It is stored; only the requester can know of it.
        assert!(cancel_after.cancel(&id("r1")).await.unwrap_err().is_transient());
    });
    assert_eq!(failed.unwrap_err().failure(), Some(RequestFailure::Cancelled));
    // The worker finds it when it looks for a reply.
    main_loop.open_gate();
    fixture.control_settles_at(MainLoopFailed::TYPE, 1).await;
    fixture.requests_settle().await;
    assert_eq!(fixture.entries(&fixture.replies("desk")).await.len(), 1);
    assert_eq!(begun(&main_loop, "r1"), 1);
    worker.stop().await.unwrap();
}
