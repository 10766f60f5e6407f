//! Subscriptions of several queues share a topic, in order, while they come and go.

use headwater_testkit::{Cluster, Redis};

use crate::env::{Log, Place, eventually};

async fn nothing_is_lost_or_out_of_order_while_consumers_come_and_go(place: Place) {
    place.create(6).await;
    let keys: Vec<String> = (0..12).map(|key| format!("key-{key}")).collect();
    let log = Log::default();
    let first = place.consumer(&log, "first").await;
    let mut guests = Vec::new();
    for round in 0..6 {
        for key in &keys {
            place.send(key, round * 5..round * 5 + 5).await;
        }
        // One comes each time, and every second time one goes.
        guests.push(place.consumer(&log, "guest").await);
        if round % 2 == 1 {
            guests.remove(0).stop().await;
        }
    }
    eventually("everything to be handled", || {
        log.by_key()
            .values()
            .map(|numbers| numbers.iter().max().map_or(0, |max| max + 1))
            .sum::<u64>()
            == 12 * 30
    })
    .await;
    log.check(&keys, 30);
    assert!(log.by("guest") > 0 && log.by("first") > 0);
    first.stop().await;
    for guest in guests {
        guest.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_or_out_of_order_while_consumers_come_and_go_embedded() {
    nothing_is_lost_or_out_of_order_while_consumers_come_and_go(Place::embedded().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_or_out_of_order_while_consumers_come_and_go_on_redis() {
    let url = Redis::shared().unwrap().url();
    nothing_is_lost_or_out_of_order_while_consumers_come_and_go(Place::at(url)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_or_out_of_order_while_consumers_come_and_go_on_a_cluster() {
    let url = Cluster::shared().unwrap().url();
    nothing_is_lost_or_out_of_order_while_consumers_come_and_go(Place::at(url)).await;
}
