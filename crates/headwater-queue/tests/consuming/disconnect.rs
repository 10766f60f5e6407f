//! Connections that break while partitions are revoked.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_queue::{Outcome, Queue};
use headwater_stream::{ConsumerName, GroupName, Options, connect};
use headwater_testkit::{Proxy, Redis};

use crate::fixture::{Fixture, GROUP, eventually, short_leases};
use crate::lossy_backend::LossyBackend;
use crate::recording_handler::{payload, recording_handler};
use crate::shared::shared;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_stopping_consumer_releases_entries_of_a_read_that_broke() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let fixture = Fixture::open(&redis.url_at(proxy.addr()), ()).await?;
    fixture.create(2).await?;
    // Sent over another connection, past the proxy.
    let stream = [fixture.stream(0).await?, fixture.stream(1).await?];
    let direct = connect(&redis.url(), &Options::default()).await?;
    // Keeps the fetcher running, and the process a member, while the other subscription starts and stops.
    let stays = format!("{}-stays", fixture.topic);
    let (idle, _unseen) = recording_handler(|_| Outcome::Done);
    let staying = fixture.queue.subscribe(&stays, GROUP, idle, shared()).await?;

    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let mut sent = BTreeSet::new();
    for round in 0..10 {
        let subscription =
            fixture.queue.subscribe(&fixture.topic, GROUP, handler.clone(), shared()).await?;
        let sending = async {
            for n in 0..20 {
                let payload = format!("{round}/{n}");
                let fields = headwater_stream::Fields::new([("payload", payload.clone())]);
                let keep = headwater_stream::Retention::KEEP_ALL;
                direct.append(&stream[n % 2], &[fields], &keep).await?;
                sent.insert(payload);
                // From now on, the server delivers messages whose replies are lost.
                if n == 5 {
                    proxy.stall()?;
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            proxy.cut_once()?;
            proxy.heal()?;
            anyhow::Ok(())
        };
        let stopping = async {
            tokio::time::sleep(Duration::from_millis(2 * round)).await;
            subscription.stop().await;
        };
        let (sending, ()) = tokio::join!(sending, stopping);
        sending?;
    }
    let last = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    let mut got = BTreeSet::new();
    while got.len() < sent.len() {
        got.insert(payload(&seen.next().await?));
    }
    assert_eq!(got, sent);
    fixture.wait_until_settled(0).await?;
    fixture.wait_until_settled(1).await?;
    last.stop().await;
    staying.stop().await;
    Ok(())
}

/// A failed read of a revoked partition may still block at the server. It must not take messages from the next owner.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_partition_is_revoked_only_after_its_failed_reads_have_ended() -> Result<()> {
    let redis = Redis::start()?;
    let url = redis.url();
    let waiting = async || {
        let list = redis.command(&["CLIENT", "LIST"])?.text();
        let waits = |line: &&str| line.contains("cmd=xreadgroup") && line.contains("flags=b");
        anyhow::Ok(list.lines().filter(waits).count())
    };
    let fixture = Fixture::open(&url, ()).await?;
    let stream = [fixture.stream(0).await?];
    let lossy = LossyBackend::new(Arc::clone(&fixture.backend));
    let queue = Queue::with_config(Arc::clone(&lossy) as _, short_leases())?;
    // Keeps the fetcher running after the other subscription has stopped.
    let stays = format!("{}-stays", fixture.topic);
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let staying = queue.subscribe(&stays, GROUP, handler.clone(), shared()).await?;
    let leaving = queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    fixture.send(0, None, "first").await?;
    assert_eq!(seen.payloads(1).await?, ["first"]);
    fixture.wait_until_settled(0).await?;
    eventually("the next read blocks at the server", async || Ok(waiting().await? == 1)).await?;

    lossy.fail_reads();
    eventually("the read failed", async || Ok(lossy.failed_reads() == 1)).await?;
    leaving.stop().await;

    fixture.send(0, None, "for the next owner").await?;
    assert_eq!(fixture.pending(0).await?, []);
    let (group, next) = (GroupName::new(GROUP)?, ConsumerName::new("next")?);
    let mut reader = fixture.backend.reader(&group, &next).await?;
    let batches = reader.read(&stream, 10, Duration::ZERO).await?;
    assert_eq!(batches.len(), 1, "the stopped consumer took the message");
    // Other partitions are still read.
    let fields = headwater_stream::Fields::new([("payload", "still here")]);
    let keep = headwater_stream::Retention::KEEP_ALL;
    fixture.backend.append(&headwater_stream::StreamName::new(&stays)?, &[fields], &keep).await?;
    assert_eq!(seen.payloads(1).await?, ["still here"]);
    staying.stop().await;
    Ok(())
}
