//! The connection breaks while partitions are given up.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_queue::{Outcome, Queue};
use headwater_stream::{ConsumerName, GroupName, Options, connect};
use headwater_testkit::{Proxy, Redis};

use crate::env::{Env, GROUP, eventually, quick};
use crate::forgetful::Forgetful;
use crate::record::{payload, recorder};
use crate::shared::shared;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_a_read_had_fetched_when_it_broke_is_left_to_others_by_one_that_stops() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let env = Env::open(&redis.url_at(proxy.addr()), ()).await?;
    env.create(2).await?;
    // Sent beside the bad network.
    let stream = [env.stream(0).await?, env.stream(1).await?];
    let direct = connect(&redis.url(), &Options::default()).await?;
    // Keeps the feed at work, and the process a member, while the other one comes and goes.
    let stays = format!("{}-stays", env.topic);
    let (idle, _unseen) = recorder(|_| Outcome::Done);
    let staying = env.queue.subscribe(&stays, GROUP, idle, shared()).await?;

    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let mut sent = BTreeSet::new();
    for round in 0..10 {
        let subscription =
            env.queue.subscribe(&env.topic, GROUP, handler.clone(), shared()).await?;
        let sending = async {
            for n in 0..20 {
                let payload = format!("{round}/{n}");
                let fields = headwater_stream::Fields::new([("payload", payload.clone())]);
                let keep = headwater_stream::Retention::KEEP_ALL;
                direct.append(&stream[n % 2], &[fields], &keep).await?;
                sent.insert(payload);
                // What is sent from now on is delivered by the server and goes astray.
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
    let last = env.queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    let mut got = BTreeSet::new();
    while got.len() < sent.len() {
        got.insert(payload(&seen.next().await?));
    }
    assert_eq!(got, sent);
    env.until_settled(0).await?;
    env.until_settled(1).await?;
    last.stop().await;
    staying.stop().await;
    Ok(())
}

/// The read of a partition that was given up failed here, but waits at the server still: it takes nothing from the next owner.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_partition_is_given_up_when_no_read_of_it_that_failed_is_under_way_any_more() -> Result<()>
{
    let redis = Redis::start()?;
    let url = redis.url();
    let waiting = async || {
        let list = redis.command(&["CLIENT", "LIST"])?.text();
        let waits = |line: &&str| line.contains("cmd=xreadgroup") && line.contains("flags=b");
        anyhow::Ok(list.lines().filter(waits).count())
    };
    let env = Env::open(&url, ()).await?;
    let stream = [env.stream(0).await?];
    let forgetful = Forgetful::new(Arc::clone(&env.backend));
    let queue = Queue::with_config(Arc::clone(&forgetful) as _, quick())?;
    // Keeps the feed at work when the other one has stopped.
    let stays = format!("{}-stays", env.topic);
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let staying = queue.subscribe(&stays, GROUP, handler.clone(), shared()).await?;
    let leaving = queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    env.send(0, None, "first").await?;
    assert_eq!(seen.payloads(1).await?, ["first"]);
    env.until_settled(0).await?;
    eventually("the next read waits at the server", async || Ok(waiting().await? == 1)).await?;

    forgetful.break_off_reads();
    eventually("it failed", async || Ok(forgetful.broken_reads() == 1)).await?;
    leaving.stop().await;

    env.send(0, None, "for the next owner").await?;
    assert_eq!(env.pending(0).await?, []);
    let (group, next) = (GroupName::new(GROUP)?, ConsumerName::new("next")?);
    let mut reader = env.backend.reader(&group, &next).await?;
    let batches = reader.read(&stream, 10, Duration::ZERO).await?;
    assert_eq!(batches.len(), 1, "the one who stopped has it");
    // The reading of the others goes on.
    let fields = headwater_stream::Fields::new([("payload", "still here")]);
    let keep = headwater_stream::Retention::KEEP_ALL;
    env.backend.append(&headwater_stream::StreamName::new(&stays)?, &[fields], &keep).await?;
    assert_eq!(seen.payloads(1).await?, ["still here"]);
    staying.stop().await;
    Ok(())
}
