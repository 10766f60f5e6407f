//! Stopping workers: running requests are finished or released.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::{Event, EventBus, MainLoopCompleted, MainLoopConfig, RequestId, Submission};

use crate::fixture::{Ask, Fixture, Loop, Mute, begun, fast_config, sessions};

on_streams![a_stopping_worker_finishes_running_requests];

mod on_backends {
    use super::*;
    on_streams![
        a_request_running_longer_than_the_drain_is_released_without_counting_as_an_attempt,
        a_dropped_worker_releases_its_requests,
        a_bus_closed_before_its_worker_loses_nothing,
        another_worker_publishes_the_copy_of_a_reply_if_its_worker_stops,
    ];
}

fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

fn ask() -> Submission<Ask> {
    Submission::new(Ask::Wait("a".to_owned())).id(id("r1"))
}

async fn a_stopping_worker_finishes_running_requests(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    let (done, ()) = tokio::join!(client.submit::<_, String>(ask()), async {
        main_loop.begun.notified().await;
        let (stopped, ()) = tokio::join!(worker.stop(), async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            main_loop.open_gate();
        });
        stopped.unwrap();
    });
    assert_eq!(done.unwrap().output, "a");
    worker.stop().await.unwrap();
}

/// Starts a request on one worker, ends that worker with `end`, and asserts that another one completes the request.
async fn reclaimed<F>(fixture: &Fixture, first: &Loop, end: F)
where
    F: Future<Output = ()>,
{
    let client = fixture.client("desk").await;
    let second = Loop::default();
    second.open_gate();
    let (done, worker) = tokio::join!(client.submit::<_, String>(ask()), async {
        first.begun.notified().await;
        end.await;
        // One attempt only: a released request is not counted.
        let config = MainLoopConfig { max_crashes: 1, max_attempts: 1, ..fast_config() };
        fixture.worker_with(&second, config).await
    });
    assert_eq!(done.unwrap().output, "a");
    assert_eq!(first.log.lines(), ["begun r1", "dropped r1"]);
    assert_eq!(begun(&second, "r1"), 1);
    fixture.control_settles_at(MainLoopCompleted::TYPE, 1).await;
    worker.stop().await.unwrap();
}

async fn a_request_running_longer_than_the_drain_is_released_without_counting_as_an_attempt(
    fixture: Fixture,
) {
    let first = Loop::default();
    let config = MainLoopConfig { drain: Duration::from_millis(50), ..fast_config() };
    let worker = fixture.worker_with(&first, config).await;
    reclaimed(&fixture, &first, async { worker.stop().await.unwrap() }).await;
}

async fn a_dropped_worker_releases_its_requests(fixture: Fixture) {
    let first = Loop::default();
    let worker = fixture.worker(&first).await;
    reclaimed(&fixture, &first, async { drop(worker) }).await;
}

async fn another_worker_publishes_the_copy_of_a_reply_if_its_worker_stops(fixture: Fixture) {
    let first = Loop::default();
    let config = MainLoopConfig { drain: Duration::from_millis(50), ..fast_config() };
    let bus = Arc::new(Mute { bus: fixture.bus().await, refuses: true });
    let sessions = sessions(bus).await;
    let worker = headwater_bus::MainLoopWorker::start(sessions, first.clone(), config).await;
    let client = fixture.client("desk").await;
    let submit = Submission::new(Ask::Echo("a".to_owned())).id(id("r1"));
    assert_eq!(client.submit::<_, String>(submit).await.unwrap().output, "a");
    worker.unwrap().stop().await.unwrap();
    fixture.control_settles_at(MainLoopCompleted::TYPE, 0).await;

    let second = Loop::default();
    let worker = fixture.worker(&second).await;
    fixture.control_settles_at(MainLoopCompleted::TYPE, 1).await;
    assert_eq!(begun(&second, "r1"), 0, "it has its reply");
    worker.stop().await.unwrap();
}

async fn a_bus_closed_before_its_worker_loses_nothing(fixture: Fixture) {
    let main_loop = Loop::default();
    let bus = fixture.streamed().await;
    let sessions = sessions(bus.clone()).await;
    let worker = headwater_bus::MainLoopWorker::start(sessions, main_loop.clone(), fast_config())
        .await
        .unwrap();
    let client = fixture.client("desk").await;
    let (done, ()) = tokio::join!(client.submit::<_, String>(ask()), async {
        main_loop.begun.notified().await;
        let (closed, ()) = tokio::join!(bus.close(), async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            main_loop.open_gate();
        });
        closed.unwrap();
    });
    assert_eq!(done.unwrap().output, "a", "closing waits for handlers, and they can publish");
    worker.stop().await.unwrap();
}
