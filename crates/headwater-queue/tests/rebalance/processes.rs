//! Consumers in separate processes that are killed with SIGKILL and stopped with SIGSTOP.

use std::time::Duration;

use headwater_queue::Message;
use headwater_testkit::{Child, Cluster, Redis};
use tokio::time::{Instant, sleep};

use crate::fixture::{GROUP, HandledLog, LIMIT, QueueFixture, fast_config, ordered, wait_until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started as a child process by other tests of this file"]
async fn role_consumer() {
    let mut fixture = QueueFixture::with_server(std::env::var("URL").unwrap());
    fixture.topic = std::env::var("TOPIC").unwrap();
    let handler = |message: Message| {
        println!("HANDLED {}", String::from_utf8_lossy(&message.payload));
        async {}
    };
    let queue = fixture.queue().await;
    let _subscription = queue.subscribe(&fixture.topic, GROUP, handler, ordered()).await.unwrap();
    std::future::pending::<()>().await;
}

fn spawn(fixture: &QueueFixture) -> Child {
    let environment = [("URL", fixture.url.as_str()), ("TOPIC", &fixture.topic)];
    Child::spawn_self("processes::role_consumer", &environment).unwrap()
}

/// A owns the partition and crashes, its lease expires, B acquires it and continues.
async fn a_killed_owner_is_replaced_and_work_continues(fixture: QueueFixture) {
    fixture.create(1).await;
    let owner = spawn(&fixture);
    fixture.send("k", 0..3).await;
    owner.line_after("HANDLED 2", LIMIT).unwrap();
    let log = HandledLog::default();
    let survivor = fixture.consumer(&log, "survivor").await;

    owner.kill9().unwrap();
    let killed = Instant::now();
    fixture.send("k", 3..6).await;
    wait_until("the rest to be handled", || {
        log.by_key().get("k").is_some_and(|numbers| numbers.last() == Some(&5))
    })
    .await;

    println!(
        "handled {:?} after the kill; the lease is {:?}",
        killed.elapsed(),
        fast_config().lease.ttl
    );
    // The owner acknowledged 0 to 2; the last of them may be redelivered.
    let numbers = log.by_key().remove("k").unwrap();
    assert!(numbers.is_sorted() && numbers.ends_with(&[3, 4, 5]), "{numbers:?}");
    survivor.stop().await;
}

/// The stopped process has a blocking read at the server. If it were answered after the reassignment, the new owner
/// would get that message only much later, out of order.
async fn a_stopped_owner_receives_no_message_after_its_partition_was_reassigned(
    fixture: QueueFixture,
) {
    fixture.create(1).await;
    let owner = spawn(&fixture);
    fixture.send("k", 0..1).await;
    owner.line_after("HANDLED 0", LIMIT).unwrap();
    let log = HandledLog::default();
    let survivor = fixture.consumer(&log, "survivor").await;

    // Stopped during a blocking read.
    sleep(Duration::from_secs(2)).await;
    owner.pause().unwrap();
    wait_until("the partition to be reassigned", || survivor.stats().partitions == 1).await;
    fixture.send("k", 1..20).await;
    wait_until("everything to be handled", || log.len() >= 19).await;
    let numbers = log.by_key().remove("k").unwrap();
    assert_eq!(numbers, (1..20).collect::<Vec<_>>());

    // After it resumes, nothing changes.
    owner.resume().unwrap();
    fixture.send("k", 20..25).await;
    wait_until("the rest to be handled", || log.len() >= 24).await;
    sleep(Duration::from_millis(500)).await;
    let numbers = log.by_key().remove("k").unwrap();
    assert_eq!(numbers, (1..25).collect::<Vec<_>>());
    survivor.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_owner_is_replaced_and_work_continues_on_redis() {
    a_killed_owner_is_replaced_and_work_continues(QueueFixture::with_server(
        Redis::shared().unwrap().url(),
    ))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_owner_is_replaced_and_work_continues_on_a_cluster() {
    a_killed_owner_is_replaced_and_work_continues(QueueFixture::with_server(
        Cluster::shared().unwrap().url(),
    ))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_owner_receives_no_message_after_its_partition_was_reassigned_on_redis() {
    let fixture = QueueFixture::with_server(Redis::shared().unwrap().url());
    a_stopped_owner_receives_no_message_after_its_partition_was_reassigned(fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_owner_receives_no_message_after_its_partition_was_reassigned_on_a_cluster() {
    let fixture = QueueFixture::with_server(Cluster::shared().unwrap().url());
    a_stopped_owner_receives_no_message_after_its_partition_was_reassigned(fixture).await;
}
