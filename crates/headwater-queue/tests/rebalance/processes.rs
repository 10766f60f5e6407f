//! Consumers in processes of their own, really killed and stopped.

use std::time::Duration;

use headwater_queue::Message;
use headwater_testkit::{Child, Cluster, Redis};
use tokio::time::{Instant, sleep};

use crate::env::{GROUP, LIMIT, Log, Place, eventually, ordered, quick};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a role that other tests of this file start as a process of its own"]
async fn victim_consumes() {
    let mut place = Place::at(std::env::var("URL").unwrap());
    place.topic = std::env::var("TOPIC").unwrap();
    let handler = |message: Message| {
        println!("HANDLED {}", String::from_utf8_lossy(&message.payload));
        async {}
    };
    let queue = place.queue().await;
    let _subscription = queue.subscribe(&place.topic, GROUP, handler, ordered()).await.unwrap();
    std::future::pending::<()>().await;
}

fn spawn(place: &Place) -> Child {
    let environment = [("URL", place.url.as_str()), ("TOPIC", &place.topic)];
    Child::spawn_self("processes::victim_consumes", &environment).unwrap()
}

/// The seed's sequence: A owns, A crashes, its lease runs out, B acquires and goes on where A was.
async fn the_work_of_a_killed_owner_goes_on(place: Place) {
    place.create(1).await;
    let owner = spawn(&place);
    place.send("k", 0..3).await;
    owner.line_after("HANDLED 2", LIMIT).unwrap();
    let log = Log::default();
    let survivor = place.consumer(&log, "survivor").await;

    owner.kill9().unwrap();
    let killed = Instant::now();
    place.send("k", 3..6).await;
    eventually("the rest to be handled", || {
        log.by_key().get("k").is_some_and(|numbers| numbers.last() == Some(&5))
    })
    .await;

    println!("handled {:?} after the kill; the lease is {:?}", killed.elapsed(), quick().lease.ttl);
    // 0 to 2 were settled by the owner, or perhaps not the last of them: then they come again.
    let numbers = log.by_key().remove("k").unwrap();
    assert!(numbers.is_sorted() && numbers.ends_with(&[3, 4, 5]), "{numbers:?}");
    survivor.stop().await;
}

/// A read of the stopped process waits at the server. Were it answered after the take-over, its first message would be
/// lost to the new owner until much later, and be handled after those that came behind it.
async fn a_stopped_owner_takes_no_message_after_its_partition_was_taken_over(place: Place) {
    place.create(1).await;
    let owner = spawn(&place);
    place.send("k", 0..1).await;
    owner.line_after("HANDLED 0", LIMIT).unwrap();
    let log = Log::default();
    let survivor = place.consumer(&log, "survivor").await;

    // Stopped while it waits for more.
    sleep(Duration::from_secs(2)).await;
    owner.pause().unwrap();
    eventually("the partition to be taken over", || survivor.stats().partitions == 1).await;
    place.send("k", 1..20).await;
    eventually("everything to be handled", || log.len() >= 19).await;
    let numbers = log.by_key().remove("k").unwrap();
    assert_eq!(numbers, (1..20).collect::<Vec<_>>());

    // Back again, it changes nothing.
    owner.resume().unwrap();
    place.send("k", 20..25).await;
    eventually("the rest to be handled", || log.len() >= 24).await;
    sleep(Duration::from_millis(500)).await;
    let numbers = log.by_key().remove("k").unwrap();
    assert_eq!(numbers, (1..25).collect::<Vec<_>>());
    survivor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_work_of_a_killed_owner_goes_on_on_redis() {
    the_work_of_a_killed_owner_goes_on(Place::at(Redis::shared().unwrap().url())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_work_of_a_killed_owner_goes_on_on_a_cluster() {
    the_work_of_a_killed_owner_goes_on(Place::at(Cluster::shared().unwrap().url())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_owner_takes_no_message_after_its_partition_was_taken_over_on_redis() {
    let place = Place::at(Redis::shared().unwrap().url());
    a_stopped_owner_takes_no_message_after_its_partition_was_taken_over(place).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_owner_takes_no_message_after_its_partition_was_taken_over_on_a_cluster() {
    let place = Place::at(Cluster::shared().unwrap().url());
    a_stopped_owner_takes_no_message_after_its_partition_was_taken_over(place).await;
}
