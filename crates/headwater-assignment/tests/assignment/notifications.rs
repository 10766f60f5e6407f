//! The channel: bounded, in order, and in nobody's way.

use std::time::Duration;

use headwater_assignment::{AssignmentConfig, Disowned, Notification, Terminated};
use tokio::time::{sleep, timeout};

use crate::place::{LIMIT, Place, QUIET, eventually, quick};

everywhere!(
    a_full_channel_stops_neither_heartbeat_nor_shutdown,
    nothing_is_taken_that_nobody_can_hear_of,
    without_a_reader_nothing_is_taken_and_shutdown_ends,
    the_order_is_kept,
);

async fn a_full_channel_stops_neither_heartbeat_nor_shutdown(place: &Place) {
    // Given a channel for one, whose reader has left off reading, and dead streams to announce.
    let mut ghost = place.consumer("ghost", quick()).await;
    place.add(&["x", "y", "z"]).await;
    ghost.added_many(3).await;
    ghost.die();
    let config = AssignmentConfig { notifications_max: 1, ..quick() };
    let mut consumer = place.consumer("c", config).await;
    let mine = loop {
        place.add(&["mine"]).await;
        match consumer.next().await {
            Notification::Added(owned) => break owned,
            other => drop(other),
        }
    };

    // When nobody reads for several intervals, then ownership lasts.
    sleep(3 * quick().lease_ttl()).await;
    assert!(mine.guard().is_trusted());

    // And the shutdown ends, and its last words are there for a reader who comes back.
    timeout(LIMIT, consumer.assignment.shutdown(Duration::ZERO)).await.unwrap().unwrap();
    let mut last = Vec::new();
    while let Some(notification) = consumer.notifications.recv().await {
        last.push(notification);
    }
    let told = last.iter().any(|notification| {
        matches!(notification, Notification::Disowned { stream, reason: Disowned::Shutdown } if stream == mine.stream())
    });
    assert!(told, "{last:?}");
    assert!(
        matches!(last.last(), Some(Notification::Terminated(Terminated::Shutdown))),
        "{last:?}"
    );
    assert!(last.len() <= 4, "{last:?}");
}

async fn nothing_is_taken_that_nobody_can_hear_of(place: &Place) {
    let config = AssignmentConfig { notifications_max: 2, ..quick() };
    let mut consumer = place.consumer("c", config).await;
    place.add(&["a", "b", "c", "d", "e"]).await;
    eventually("two to be taken", || async { consumer.assignment.owned().len() == 2 }).await;
    sleep(QUIET).await;
    assert_eq!(consumer.assignment.owned().len(), 2);

    // Each that is heard of makes room for one more.
    consumer.added_many(5).await;
    assert_eq!(consumer.assignment.owned().len(), 5);
}

async fn without_a_reader_nothing_is_taken_and_shutdown_ends(place: &Place) {
    let consumer = place.consumer("c", quick()).await;
    drop(consumer.notifications);
    place.add(&["a"]).await;
    sleep(QUIET).await;
    assert_eq!(consumer.assignment.owned().len(), 0);
    timeout(LIMIT, consumer.assignment.shutdown(LIMIT)).await.unwrap().unwrap();

    let mut other = place.consumer("other", quick()).await;
    other.added().await;
}

async fn the_order_is_kept(place: &Place) {
    let mut consumer = place.consumer("c", quick()).await;
    let names: Vec<String> = (0..20).map(|i| format!("s{i:02}")).collect();
    let streams = place.add(&names.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let added = consumer.added_many(streams.len()).await;
    assert_eq!(added.iter().map(|owned| owned.stream().clone()).collect::<Vec<_>>(), streams);
}
