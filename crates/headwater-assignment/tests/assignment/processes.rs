//! Real processes that are killed and paused.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use headwater_assignment::{
    Assignment, AssignmentConfig, Disowned, EndError, Notification, OnExpired, Owned,
};
use headwater_stream::{Fields, Retention, StreamName};
use headwater_testkit::{Child, Redis};
use tokio::time::{Instant, sleep};

use crate::fixture::{Consumer, LIMIT, QUIET, SLACK, ServiceFixture, eventually, quick};

fn spawn(victim: &str, fixture: &ServiceFixture, url: &str) -> Child {
    let name = format!("processes::{victim}");
    Child::spawn_self(&name, &[("URL", url), ("SERVICE", &fixture.service)]).unwrap()
}

/// A consumer in a child process, configured by its parent.
async fn child_consumer(config: AssignmentConfig) -> (ServiceFixture, Consumer) {
    let mut fixture = ServiceFixture::at(std::env::var("URL").unwrap());
    fixture.service = std::env::var("SERVICE").unwrap();
    let consumer = fixture.consumer("child", config).await;
    (fixture, consumer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_stream_of_a_process_killed_with_sigkill_is_claimed_in_time() {
    let config = quick();
    let url = Redis::shared().unwrap().url();
    let fixture = ServiceFixture::at(url.clone());
    let stream = fixture.add(&["s"]).await.remove(0);
    let owner = spawn("victim_owns_a_stream", &fixture, &url);
    assert_eq!(owner.line_after("OWNED ", LIMIT).unwrap(), stream.as_str());
    let mut survivor = fixture.consumer("survivor", config.clone()).await;
    sleep(QUIET).await;

    owner.kill9().unwrap();
    let killed = Instant::now();

    assert_eq!(survivor.expired().await, stream);
    let owned = survivor.assignment.claim(&stream).await.unwrap();
    let limit = config.lease_ttl() + SLACK;
    assert!(killed.elapsed() < limit, "after {:?}", killed.elapsed());
    assert_eq!(owned.owners(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_paused_beyond_its_lease_is_notified_and_cannot_settle() {
    let url = Redis::shared().unwrap().url();
    let fixture = ServiceFixture::at(url.clone());
    let stream = fixture.add(&["s"]).await.remove(0);
    let owner = spawn("victim_owns_a_stream", &fixture, &url);
    owner.line_after("OWNED ", LIMIT).unwrap();
    let mut other = fixture.consumer("other", quick()).await;

    // When the owner is paused beyond its lease, another consumer owns the stream.
    owner.pause().unwrap();
    assert_eq!(other.expired().await, stream);
    let owned = other.assignment.claim(&stream).await.unwrap();
    sleep(QUIET).await;
    owner.resume().unwrap();

    // Then the resumed owner detects the loss, is notified, and changes nothing.
    owner.line_after("LOST", LIMIT).unwrap();
    assert_eq!(owner.line_after("DONE ", LIMIT).unwrap(), "not owner");
    let notified = owner.line_after("NOTIFIED ", LIMIT).unwrap();
    assert!(notified.starts_with(&format!("disowned {stream}")), "{notified}");
    assert_eq!(fixture.pending().await.len(), 1);
    assert!(owned.guard().is_valid());
    other.assignment.done(&owned).await.unwrap();
    assert_eq!(
        (fixture.pending().await, fixture.entries(&fixture.input()).await),
        (vec![], vec![])
    );
    other.expect_no_notification_for(QUIET).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a role that other tests of this file start as a process of its own"]
async fn victim_owns_a_stream() {
    let (_, mut consumer) = child_consumer(quick()).await;
    let owned = consumer.added().await;
    println!("OWNED {}", owned.stream());
    owned.guard().lost().await;
    println!("LOST");
    let done = match consumer.assignment.done(&owned).await {
        Err(EndError::NotOwner { .. }) => "not owner".to_owned(),
        other => format!("{other:?}"),
    };
    println!("DONE {done}");
    let (stream, reason) = consumer.disowned().await;
    assert!(matches!(reason, Disowned::LeaseLost | Disowned::LeaseUnconfirmed));
    println!("NOTIFIED disowned {stream} {reason:?}");
    std::future::pending::<()>().await;
}

/// Number of streams to process while processes are killed.
const STREAMS: usize = 60;
const KILLS: usize = 6;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_stream_is_completed_although_processes_are_killed() {
    let url = Redis::shared().unwrap().url();
    let fixture = ServiceFixture::at(url.clone());
    let names: Vec<String> = (0..STREAMS).map(|i| i.to_string()).collect();
    let streams = fixture.add(&names.iter().map(String::as_str).collect::<Vec<_>>()).await;

    // When one of three workers is killed and replaced repeatedly ...
    let mut workers: Vec<Child> =
        (0..3).map(|_| spawn("victim_works_until_killed", &fixture, &url)).collect();
    for round in 0..KILLS {
        let worker = workers.remove(0);
        worker.line_after("READY", LIMIT).unwrap();
        sleep(Duration::from_millis(40 * round as u64)).await;
        worker.kill9().unwrap();
        workers.push(spawn("victim_works_until_killed", &fixture, &url));
    }

    // ... then all streams are done in the end, and none is left or lost.
    eventually("all streams to be done", || async {
        fixture.pending().await.is_empty() && fixture.entries(&fixture.input()).await.is_empty()
    })
    .await;
    assert_eq!(fixture.dead_letters().await, []);
    let mut epochs: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for entry in fixture.entries(&done_log(&fixture)).await {
        let text = |name| String::from_utf8(entry.fields.get(name).unwrap().to_vec()).unwrap();
        epochs.entry(text("stream")).or_default().push(text("epoch").parse().unwrap());
    }
    assert_eq!(epochs.len(), streams.len());
    for (stream, epochs) in epochs {
        assert!(epochs.is_sorted(), "{stream}: an older owner worked after a newer one");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a role that other tests of this file start as a process of its own"]
async fn victim_works_until_killed() {
    let config = AssignmentConfig {
        streams_max: 8,
        owners_max: 100,
        on_expired: OnExpired::Claim,
        sweep_every: Duration::from_millis(200),
        ..quick()
    };
    let (fixture, consumer) = child_consumer(config).await;
    println!("READY");
    let Consumer { assignment, mut notifications } = consumer;
    let (assignment, log) = (Arc::new(assignment), done_log(&fixture));
    while let Some(notification) = notifications.recv().await {
        if let Notification::Added(owned) = notification {
            tokio::spawn(work(
                Arc::clone(&assignment),
                owned,
                fixture.connect().await,
                log.clone(),
            ));
        }
    }
}

async fn work(
    assignment: Arc<Assignment>,
    owned: Owned,
    backend: Arc<dyn headwater_stream::Backend>,
    log: StreamName,
) {
    let Some(_work) = owned.work() else { return };
    sleep(Duration::from_millis(100)).await;
    let line =
        Fields::new([("stream", owned.stream().to_string()), ("epoch", owned.epoch().to_string())]);
    if owned.guard().is_valid() {
        backend.append(&log, &[line], &Retention::KEEP_ALL).await.unwrap();
        // Only now: another consumer repeats what is not done.
        let _ = assignment.done(&owned).await;
    }
}

fn done_log(fixture: &ServiceFixture) -> StreamName {
    StreamName::new(format!("{}-log", fixture.service)).unwrap()
}
