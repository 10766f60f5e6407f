//! The notification queue: bounded, ordered and non-blocking.

use std::time::Duration;

use headwater_assignment::{AssignmentConfig, Disowned, Notification, Terminated};
use tokio::time::{sleep, timeout};

use crate::fixture::{LIMIT, QUIET, ServiceFixture, eventually, quick};

everywhere!(
    a_full_queue_blocks_neither_heartbeat_nor_shutdown,
    no_stream_is_acquired_without_room_for_its_notification,
    without_a_reader_nothing_is_acquired_and_shutdown_completes,
    the_order_is_kept,
);

async fn a_full_queue_blocks_neither_heartbeat_nor_shutdown(fixture: &ServiceFixture) {
    // Given a queue for one, whose reader has stopped reading, and dead streams to announce.
    let mut ghost = fixture.consumer("ghost", quick()).await;
    fixture.add(&["x", "y", "z"]).await;
    ghost.added_many(3).await;
    ghost.die();
    let config = AssignmentConfig { notifications_max: 1, ..quick() };
    let mut consumer = fixture.consumer("c", config).await;
    let mine = loop {
        fixture.add(&["mine"]).await;
        match consumer.next().await {
            Notification::Added(owned) => break owned,
            other => drop(other),
        }
    };

    // When the queue is not read for several intervals, then ownership is kept.
    sleep(3 * quick().lease_ttl()).await;
    assert!(mine.guard().is_valid());

    // And the shutdown completes, and its last notifications are there for a reader that resumes.
    timeout(LIMIT, consumer.assignment.shutdown(Duration::ZERO)).await.unwrap().unwrap();
    let mut last = Vec::new();
    while let Some(notification) = consumer.notifications.recv().await {
        last.push(notification);
    }
    let notified = last.iter().any(|notification| {
        matches!(notification, Notification::Disowned { stream, reason: Disowned::Shutdown } if stream == mine.stream())
    });
    assert!(notified, "{last:?}");
    assert!(
        matches!(last.last(), Some(Notification::Terminated(Terminated::Shutdown))),
        "{last:?}"
    );
    assert!(last.len() <= 4, "{last:?}");
}

async fn no_stream_is_acquired_without_room_for_its_notification(fixture: &ServiceFixture) {
    let config = AssignmentConfig { notifications_max: 2, ..quick() };
    let mut consumer = fixture.consumer("c", config).await;
    fixture.add(&["a", "b", "c", "d", "e"]).await;
    eventually("two to be acquired", || async { consumer.assignment.owned().len() == 2 }).await;
    sleep(QUIET).await;
    assert_eq!(consumer.assignment.owned().len(), 2);

    // Each received notification frees capacity for one more stream.
    consumer.added_many(5).await;
    assert_eq!(consumer.assignment.owned().len(), 5);
}

async fn without_a_reader_nothing_is_acquired_and_shutdown_completes(fixture: &ServiceFixture) {
    let consumer = fixture.consumer("c", quick()).await;
    drop(consumer.notifications);
    fixture.add(&["a"]).await;
    sleep(QUIET).await;
    assert_eq!(consumer.assignment.owned().len(), 0);
    timeout(LIMIT, consumer.assignment.shutdown(LIMIT)).await.unwrap().unwrap();

    let mut other = fixture.consumer("other", quick()).await;
    other.added().await;
}

async fn the_order_is_kept(fixture: &ServiceFixture) {
    let mut consumer = fixture.consumer("c", quick()).await;
    let names: Vec<String> = (0..20).map(|i| format!("s{i:02}")).collect();
    let streams = fixture.add(&names.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let added = consumer.added_many(streams.len()).await;
    assert_eq!(added.iter().map(|owned| owned.stream().clone()).collect::<Vec<_>>(), streams);
}
