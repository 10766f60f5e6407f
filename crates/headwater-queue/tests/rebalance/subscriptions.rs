//! Subscriptions of several queues share a topic in order while they join and leave.

use headwater_testkit::{Cluster, Redis};

use crate::fixture::{HandledLog, QueueFixture, wait_until};

async fn no_message_is_lost_or_out_of_order_while_consumers_join_and_leave(fixture: QueueFixture) {
    fixture.create(6).await;
    let keys: Vec<String> = (0..12).map(|key| format!("key-{key}")).collect();
    let log = HandledLog::default();
    let first = fixture.consumer(&log, "first").await;
    let mut guests = Vec::new();
    for round in 0..6 {
        for key in &keys {
            fixture.send(key, round * 5..round * 5 + 5).await;
        }
        // One joins in each round, and one leaves in every second round.
        guests.push(fixture.consumer(&log, "guest").await);
        if round % 2 == 1 {
            guests.remove(0).stop().await;
        }
    }
    wait_until("everything to be handled", || {
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
async fn no_message_is_lost_or_out_of_order_while_consumers_join_and_leave_embedded() {
    no_message_is_lost_or_out_of_order_while_consumers_join_and_leave(
        QueueFixture::embedded().await,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_message_is_lost_or_out_of_order_while_consumers_join_and_leave_on_redis() {
    let url = Redis::shared().unwrap().url();
    no_message_is_lost_or_out_of_order_while_consumers_join_and_leave(QueueFixture::with_server(
        url,
    ))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_message_is_lost_or_out_of_order_while_consumers_join_and_leave_on_a_cluster() {
    let url = Cluster::shared().unwrap().url();
    no_message_is_lost_or_out_of_order_while_consumers_join_and_leave(QueueFixture::with_server(
        url,
    ))
    .await;
}
