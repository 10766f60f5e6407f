//! The connection breaks while partitions are given up.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use headwater_queue::Outcome;
use headwater_stream::{Options, connect};
use headwater_testkit::{Proxy, Redis};

use crate::env::{Env, GROUP};
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
