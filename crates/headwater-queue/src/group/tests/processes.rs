//! Members in separate processes that are killed with SIGKILL and stopped with SIGSTOP.

use std::time::Duration;

use headwater_stream::{Fields, Retention, StreamName};
use headwater_testkit::{Child, Redis};
use tokio::time::{Instant, sleep};

use super::fixture::{Callback, GroupFixture, LIMIT, Member, QUIET, fast_config, wait_until};
use crate::config::Mode;

fn spawn(fixture: &GroupFixture, url: &str, role: &str) -> Child {
    let name = format!("group::tests::processes::{role}");
    let environment = [("URL", url), ("TOPIC", &fixture.topic), ("GROUP", fixture.group.as_str())];
    Child::spawn_self(&name, &environment).unwrap()
}

/// The fixture of a child process, from its environment.
fn inherited() -> GroupFixture {
    let [url, topic, group] = ["URL", "TOPIC", "GROUP"].map(|name| std::env::var(name).unwrap());
    let mut fixture = GroupFixture::with_server(url);
    fixture.topic = topic;
    fixture.group = headwater_stream::GroupName::new(group).unwrap();
    fixture
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started as a child process by other tests of this file"]
async fn role_owner() {
    let member = inherited().member().await;
    let mut seen = 0;
    loop {
        for callback in member.callbacks().into_iter().skip(seen) {
            seen += 1;
            println!("CALLBACK {callback:?}");
        }
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_of_a_killed_process_are_reassigned_after_lease_expiry() {
    killed_owner_is_replaced(&Redis::shared().unwrap().url()).await;
}

/// The server sends no keyspace notifications.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_of_a_killed_process_are_reassigned_without_keyspace_notifications() {
    let redis = Redis::builder().user("app", "secret", "~* &* +@all -config").start().unwrap();
    killed_owner_is_replaced(&redis.url()).await;
}

async fn killed_owner_is_replaced(url: &str) {
    let mut fixture = GroupFixture::with_server(url.to_owned());
    // Too rare to matter: the survivor must poll when the lease expires.
    fixture.config.rebalance_every = Duration::from_secs(600);
    fixture.create(4).await;
    let owner = spawn(&fixture, url, "role_owner");
    owner.line_after("CALLBACK Assigned", LIMIT).unwrap();
    let survivor = fixture.member().await;
    wait_until("the survivor to own its share", || async { survivor.owns().len() == 2 }).await;

    owner.kill9().unwrap();
    let killed = Instant::now();
    fixture.wait_until_balanced(&[&survivor], 4).await;

    let took = killed.elapsed();
    println!("replaced {took:?} after the kill; the lease is {:?}", fast_config().lease.ttl);
    // The target is 250 ms after expiry; the rest is margin for a loaded machine.
    assert!(took < fast_config().lease.ttl + Duration::from_secs(30), "after {took:?}");
    assert!(
        survivor.count(|callback| matches!(callback, Callback::Lost(_) | Callback::Revoke(_))) == 0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_stopped_past_its_lease_is_evicted_and_rejoins() {
    let url = Redis::shared().unwrap().url();
    let fixture = GroupFixture::with_server(url.clone());
    fixture.create(4).await;
    let owner = spawn(&fixture, &url, "role_owner");
    let name = owner.line_after("CALLBACK Joined", LIMIT).unwrap();
    owner.line_after("CALLBACK Assigned", LIMIT).unwrap();
    let survivor = fixture.member().await;
    wait_until("the survivor to own its share", || async { survivor.owns().len() == 2 }).await;

    // While it is stopped past its leases, the survivor gets all partitions.
    owner.pause().unwrap();
    fixture.wait_until_balanced(&[&survivor], 4).await;
    let epochs = fixture.holders().await;
    sleep(QUIET).await;
    assert_eq!(survivor.owns().len(), 4);
    survivor.clear_callbacks();

    // When it resumes, it loses its partitions, is evicted and rejoins under another name.
    owner.resume().unwrap();
    owner.line_after("CALLBACK Lost", LIMIT).unwrap();
    owner.line_after("CALLBACK Evicted", LIMIT).unwrap();
    assert_ne!(owner.line_after("CALLBACK Joined", LIMIT).unwrap(), name);
    owner.line_after("CALLBACK Assigned", LIMIT).unwrap();
    wait_until("it to own its share again", || async { survivor.owns().len() == 2 }).await;
    assert_eq!(survivor.count(|callback| matches!(callback, Callback::Lost(_))), 0);
    for partition in survivor.owns() {
        let before = epochs[usize::from(partition)].as_ref().unwrap();
        assert_eq!(before.epoch, survivor.listener.lease(partition).fence().epoch);
    }
}

/// Suffix of the stream in which owners log their epochs.
const LOG: &str = "log";

/// Logs the epochs of its partitions until it is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started as a child process by other tests of this file"]
async fn role_epoch_logger() {
    let fixture = inherited();
    let backend = fixture.connect().await;
    let log = StreamName::new(format!("{}:{LOG}", fixture.topic)).unwrap();
    let member =
        Member::join(fixture.queue().await, &fixture.topic, &fixture, Mode::Owned, None).await;
    let member = member.unwrap();
    println!("READY");
    loop {
        let owned: Vec<_> = member.listener.lock().owned.values().cloned().collect();
        let lines = owned.iter().filter(|owned| owned.lease.is_valid()).map(|owned| {
            let epoch = owned.lease.fence().epoch.to_string();
            Fields::new([("partition", owned.partition.to_string()), ("epoch", epoch)])
        });
        let lines: Vec<Fields> = lines.collect();
        if !lines.is_empty() {
            // A late write was started while the lease was trusted.
            let _ = backend.append(&log, &lines, &Retention::KEEP_ALL).await;
        }
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partition_epochs_never_go_back_when_processes_are_killed_and_stopped() {
    let url = Redis::shared().unwrap().url();
    let fixture = GroupFixture::with_server(url.clone());
    fixture.create(6).await;
    let spawn = || spawn(&fixture, &url, "role_epoch_logger");
    let mut workers: Vec<Child> = (0..3).map(|_| spawn()).collect();
    workers.iter().for_each(|worker| drop(worker.line_after("READY", LIMIT).unwrap()));

    for round in 0..4 {
        let stopped = workers.remove(0);
        stopped.pause().unwrap();
        let killed = workers.remove(0);
        sleep(Duration::from_millis(150 * round)).await;
        killed.kill9().unwrap();
        workers.push(spawn());
        workers.push(stopped);
        let worker = &workers[1];
        worker.line_after("READY", LIMIT).unwrap();
        // Alternately shorter and longer than the lease.
        let pause = if round % 2 == 1 { fast_config().lease.ttl + QUIET } else { QUIET };
        sleep(pause).await;
        workers.last().unwrap().resume().unwrap();
    }
    // In the end all partitions have an owner, and no partition went back to an older epoch.
    let log = StreamName::new(format!("{}:{LOG}", fixture.topic)).unwrap();
    sleep(fast_config().lease.ttl).await;
    wait_until("every partition to have an owner", || async {
        fixture.holders().await.iter().all(Option::is_some)
    })
    .await;
    let backend = fixture.connect().await;
    let entries = backend.range(&log, headwater_stream::Range::first(10_000)).await.unwrap();
    let mut last = std::collections::BTreeMap::<String, u64>::new();
    for entry in &entries {
        let text = |name| String::from_utf8(entry.fields.get(name).unwrap().to_vec()).unwrap();
        let (partition, epoch) = (text("partition"), text("epoch").parse::<u64>().unwrap());
        let before = last.insert(partition.clone(), epoch).unwrap_or(0);
        assert!(before <= epoch, "partition {partition}: epoch {epoch} used after {before}");
    }
    assert_eq!(last.len(), 6, "of {} entries", entries.len());
}
