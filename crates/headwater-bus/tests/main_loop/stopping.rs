//! Workers that stop: what runs is finished or given back.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::{Event, EventBus, MainLoopCompleted, MainLoopConfig, RequestId, Submission};

use crate::place::{Ask, Loop, Mute, Place, begun, quick, sessions};

everywhere![a_worker_that_stops_finishes_what_runs];

mod on_backends {
    use super::*;
    on_streams![
        what_runs_longer_than_a_stop_waits_is_given_back_and_counts_as_no_try,
        a_worker_that_is_dropped_gives_back_what_it_had,
        a_bus_that_is_closed_under_its_worker_loses_nothing,
        a_worker_that_stops_between_a_reply_and_its_copy_leaves_the_copy_to_another,
    ];
}

fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

fn ask() -> Submission<Ask> {
    Submission::new(Ask::Wait("a".to_owned())).id(id("r1"))
}

async fn a_worker_that_stops_finishes_what_runs(place: Place) {
    let main_loop = Loop::default();
    let worker = place.worker(&main_loop).await;
    let client = place.client("desk").await;
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

/// Lets one worker begin, ends it somehow, and sees that another one does the work.
async fn taken_over<F>(place: &Place, first: &Loop, end: F)
where
    F: Future<Output = ()>,
{
    let client = place.client("desk").await;
    let second = Loop::default();
    second.open_gate();
    let (done, worker) = tokio::join!(client.submit::<_, String>(ask()), async {
        first.begun.notified().await;
        end.await;
        // One try only: what was given back is not counted.
        let config = MainLoopConfig { max_crashes: 1, max_attempts: 1, ..quick() };
        place.worker_with(&second, config).await
    });
    assert_eq!(done.unwrap().output, "a");
    assert_eq!(first.log.lines(), ["begun r1", "dropped r1"]);
    assert_eq!(begun(&second, "r1"), 1);
    place.control_settles_at(MainLoopCompleted::TYPE, 1).await;
    worker.stop().await.unwrap();
}

async fn what_runs_longer_than_a_stop_waits_is_given_back_and_counts_as_no_try(place: Place) {
    let first = Loop::default();
    let config = MainLoopConfig { drain: Duration::from_millis(50), ..quick() };
    let worker = place.worker_with(&first, config).await;
    taken_over(&place, &first, async { worker.stop().await.unwrap() }).await;
}

async fn a_worker_that_is_dropped_gives_back_what_it_had(place: Place) {
    let first = Loop::default();
    let worker = place.worker(&first).await;
    taken_over(&place, &first, async { drop(worker) }).await;
}

async fn a_worker_that_stops_between_a_reply_and_its_copy_leaves_the_copy_to_another(place: Place) {
    let first = Loop::default();
    let config = MainLoopConfig { drain: Duration::from_millis(50), ..quick() };
    let bus = Arc::new(Mute { bus: place.bus().await, refuses: true });
    let sessions = sessions(bus).await;
    let worker = headwater_bus::MainLoopWorker::start(sessions, first.clone(), config).await;
    let client = place.client("desk").await;
    let submit = Submission::new(Ask::Echo("a".to_owned())).id(id("r1"));
    assert_eq!(client.submit::<_, String>(submit).await.unwrap().output, "a");
    worker.unwrap().stop().await.unwrap();
    place.control_settles_at(MainLoopCompleted::TYPE, 0).await;

    let second = Loop::default();
    let worker = place.worker(&second).await;
    place.control_settles_at(MainLoopCompleted::TYPE, 1).await;
    assert_eq!(begun(&second, "r1"), 0, "it has its reply");
    worker.stop().await.unwrap();
}

async fn a_bus_that_is_closed_under_its_worker_loses_nothing(place: Place) {
    let main_loop = Loop::default();
    let bus = place.streamed().await;
    let sessions = sessions(bus.clone()).await;
    let worker =
        headwater_bus::MainLoopWorker::start(sessions, main_loop.clone(), quick()).await.unwrap();
    let client = place.client("desk").await;
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
