//! Real processes, really killed and stopped.

use std::time::Duration;

use headwater_stream::{Fields, Retention, StreamName};
use headwater_testkit::{Child, Redis};
use tokio::time::{Instant, sleep};

use super::place::{LIMIT, Member, Place, QUIET, Told, eventually, quick};
use crate::config::Mode;

fn spawn(place: &Place, url: &str, victim: &str) -> Child {
    let name = format!("group::tests::processes::{victim}");
    let environment = [("URL", url), ("TOPIC", &place.topic), ("GROUP", place.group.as_str())];
    Child::spawn_self(&name, &environment).unwrap()
}

/// The place of a child process, as its parent said.
fn inherited() -> Place {
    let [url, topic, group] = ["URL", "TOPIC", "GROUP"].map(|name| std::env::var(name).unwrap());
    let mut place = Place::at(url);
    place.topic = topic;
    place.group = headwater_stream::GroupName::new(group).unwrap();
    place
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a role that other tests of this file start as a process of its own"]
async fn victim_owns_partitions() {
    let member = inherited().member().await;
    let mut seen = 0;
    loop {
        for told in member.told().into_iter().skip(seen) {
            seen += 1;
            println!("TOLD {told:?}");
        }
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_partitions_of_a_process_killed_with_9_are_taken_over_in_time() {
    killed_owner_is_replaced(&Redis::shared().unwrap().url()).await;
}

/// The server tells nobody of leases that run out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_partitions_of_a_killed_process_are_taken_over_in_time_without_notifications() {
    let redis = Redis::builder().user("app", "secret", "~* &* +@all -config").start().unwrap();
    killed_owner_is_replaced(&redis.url()).await;
}

async fn killed_owner_is_replaced(url: &str) {
    let mut place = Place::at(url.to_owned());
    // So seldom that it plays no part: the survivor has to know when the lease ends.
    place.config.rebalance_every = Duration::from_secs(600);
    place.create(4).await;
    let owner = spawn(&place, url, "victim_owns_partitions");
    owner.line_after("TOLD Gained", LIMIT).unwrap();
    let survivor = place.member().await;
    eventually("its share to be taken", || async { survivor.owns().len() == 2 }).await;

    owner.kill9().unwrap();
    let killed = Instant::now();
    place.balanced(&[&survivor], 4).await;

    let took = killed.elapsed();
    println!("replaced {took:?} after the kill; the lease is {:?}", quick().lease.ttl);
    // The promise is 250 ms after the lease; the rest is for a machine that does other things, too.
    assert!(took < quick().lease.ttl + Duration::from_secs(30), "after {took:?}");
    assert!(survivor.count(|told| matches!(told, Told::Lost(_) | Told::GiveUp(_))) == 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_stopped_past_its_lease_loses_everything_and_joins_anew() {
    let url = Redis::shared().unwrap().url();
    let place = Place::at(url.clone());
    place.create(4).await;
    let owner = spawn(&place, &url, "victim_owns_partitions");
    let name = owner.line_after("TOLD Joined", LIMIT).unwrap();
    owner.line_after("TOLD Gained", LIMIT).unwrap();
    let survivor = place.member().await;
    eventually("its share to be taken", || async { survivor.owns().len() == 2 }).await;

    // When it stands still past its leases, the other has everything ...
    owner.pause().unwrap();
    place.balanced(&[&survivor], 4).await;
    let epochs = place.holders().await;
    sleep(QUIET).await;
    assert_eq!(survivor.owns().len(), 4);
    survivor.forget_told();

    // ... and when it wakes, it first learns that it lost everything, then joins under another name.
    owner.resume().unwrap();
    owner.line_after("TOLD Lost", LIMIT).unwrap();
    owner.line_after("TOLD Expelled", LIMIT).unwrap();
    assert_ne!(owner.line_after("TOLD Joined", LIMIT).unwrap(), name);
    owner.line_after("TOLD Gained", LIMIT).unwrap();
    eventually("it to have its share again", || async { survivor.owns().len() == 2 }).await;
    assert_eq!(survivor.count(|told| matches!(told, Told::Lost(_))), 0);
    for partition in survivor.owns() {
        let before = epochs[usize::from(partition)].as_ref().unwrap();
        assert_eq!(before.epoch, survivor.desk.lease(partition).fence().epoch);
    }
}

/// What follows the topic in the name of the stream in which workers write down their epochs.
const LOG: &str = "log";

/// Writes down, for as long as it lives, which epochs it works in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a role that other tests of this file start as a process of its own"]
async fn victim_writes_down_its_epochs() {
    let place = inherited();
    let backend = place.connect().await;
    let log = StreamName::new(format!("{}:{LOG}", place.topic)).unwrap();
    let member = Member::join(place.queue().await, &place.topic, &place, Mode::Owned, None).await;
    let member = member.unwrap();
    println!("READY");
    loop {
        let owned: Vec<_> = member.desk.lock().owned.values().cloned().collect();
        let lines = owned.iter().filter(|owned| owned.lease.is_trusted()).map(|owned| {
            let epoch = owned.lease.fence().epoch.to_string();
            Fields::new([("partition", owned.partition.to_string()), ("epoch", epoch)])
        });
        let lines: Vec<Fields> = lines.collect();
        if !lines.is_empty() {
            // What is written late was begun while the lease was trusted.
            let _ = backend.append(&log, &lines, &Retention::KEEP_ALL).await;
        }
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn however_often_processes_are_killed_and_stopped_no_two_work_on_one_partition() {
    let url = Redis::shared().unwrap().url();
    let place = Place::at(url.clone());
    place.create(6).await;
    let spawn = || spawn(&place, &url, "victim_writes_down_its_epochs");
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
        // The second time for longer than its lease, then not, and so on.
        let pause = if round % 2 == 1 { quick().lease.ttl + QUIET } else { QUIET };
        sleep(pause).await;
        workers.last().unwrap().resume().unwrap();
    }
    // In the end all partitions are at work, each in one epoch, and none went back to an older one.
    let log = StreamName::new(format!("{}:{LOG}", place.topic)).unwrap();
    sleep(quick().lease.ttl).await;
    eventually("every partition to have an owner", || async {
        place.holders().await.iter().all(Option::is_some)
    })
    .await;
    let backend = place.connect().await;
    let entries = backend.range(&log, headwater_stream::Range::first(10_000)).await.unwrap();
    let mut last = std::collections::BTreeMap::<String, u64>::new();
    for entry in &entries {
        let text = |name| String::from_utf8(entry.fields.get(name).unwrap().to_vec()).unwrap();
        let (partition, epoch) = (text("partition"), text("epoch").parse::<u64>().unwrap());
        let before = last.insert(partition.clone(), epoch).unwrap_or(0);
        assert!(before <= epoch, "partition {partition}: epoch {epoch} at work after {before}");
    }
    assert_eq!(last.len(), 6, "of {} entries", entries.len());
}
