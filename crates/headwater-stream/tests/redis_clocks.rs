//! Steps of the clock of Redis, and a promoted replica whose clock is behind: fences hold.
#![cfg(feature = "redis")]

mod redis_support;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use headwater_stream::{
    AcquireResult, Backend, EntryId, Fence, GroupStart, Retention, SettleBatch, Settlement,
    StreamError,
};
use headwater_testkit::{Redis, WallClock, wait_until};

use crate::redis_support::*;

const KEEP: Retention = Retention::KEEP_ALL;
const TTL: Duration = Duration::from_secs(60);
const HOUR: i64 = 3600;

async fn acquire(backend: &Arc<dyn Backend>, name: &str) -> Result<Fence> {
    match backend.acquire(&lease("orders:lease"), &holder(name), TTL).await? {
        AcquireResult::Won(epoch) => Ok(Fence { lease: lease("orders:lease"), epoch }),
        held => bail!("{held:?}"),
    }
}

/// Reads one entry for `ann`; returns its id.
async fn delivered(backend: &Arc<dyn Backend>) -> Result<EntryId> {
    let orders = stream("orders");
    backend.append(&orders, &[one()], &KEEP).await?;
    backend.ensure_group(&orders, &group("workers"), GroupStart::Beginning).await?;
    let mut reader = backend.reader(&group("workers"), &consumer("ann")).await?;
    let ids = read_ids(&mut *reader, &orders).await?;
    ids.first().copied().context("an entry is there")
}

async fn settle(backend: &Arc<dyn Backend>, fence: &Fence, id: EntryId) -> Result<(), StreamError> {
    let (orders, workers, ann) = (stream("orders"), group("workers"), consumer("ann"));
    let entries = [Settlement::ack(id)];
    let batch = SettleBatch {
        stream: &orders,
        group: &workers,
        consumer: &ann,
        fence: Some(fence),
        entries: &entries,
    };
    backend.settle(batch).await.map(drop)
}

fn assert_fenced(result: Result<(), StreamError>) {
    assert!(matches!(result, Err(StreamError::Fenced { .. })), "{result:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_step_of_redis_ends_leases_or_prolongs_them_and_fences_hold() -> Result<()> {
    let clock = WallClock::start()?;
    let redis = Redis::builder().clock(&clock).start()?;
    let backend = open(&redis.url()).await?;
    let id = delivered(&backend).await?;
    let ann = acquire(&backend, "ann").await?;

    // Forward: the lease is over at once, whatever its holder believes.
    clock.set(HOUR)?;
    wait_until("the lease to expire", TTL, || {
        redis.command(&["EXISTS", "orders:lease"]).is_ok_and(|there| there.int() == Some(0))
    })?;
    assert_fenced(settle(&backend, &ann, id).await);
    let bob = acquire(&backend, "bob").await?;
    assert!(bob.epoch > ann.epoch);
    assert_fenced(settle(&backend, &ann, id).await);

    // Back: the lease of bob lasts longer, nobody else gets it, and the next epoch is greater.
    clock.set(-HOUR)?;
    let refused = acquire(&backend, "ann").await;
    assert!(refused.is_err(), "bob holds it: {refused:?}");
    backend.release(&holder("bob"), std::slice::from_ref(&bob)).await?;
    let ann_again = acquire(&backend, "ann").await?;
    assert!(ann_again.epoch > bob.epoch, "{ann_again:?} after {bob:?}");
    assert_fenced(settle(&backend, &bob, id).await);
    settle(&backend, &ann_again, id).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_replica_with_a_clock_behind_fences_the_old_holder() -> Result<()> {
    let primary = Redis::start()?;
    let clock = WallClock::start()?;
    clock.set(-HOUR)?;
    let follow = format!("127.0.0.1 {}", primary.port());
    let replica = Redis::builder().clock(&clock).setting("replicaof", &follow).start()?;
    let before = open(&primary.url()).await?;
    let id = delivered(&before).await?;
    wait_until("the replica to have the delivery", TTL, || {
        let pending = replica.command(&["XPENDING", "orders", "workers"]);
        pending.is_ok_and(|pending| pending.items().first().is_some_and(|n| n.int() == Some(1)))
    })?;

    // The replica is promoted without the lease: asynchronous replication had not sent it yet.
    replica.command(&["REPLICAOF", "NO", "ONE"])?.ok()?;
    let ann = acquire(&before, "ann").await?;
    let after = open(&replica.url()).await?;
    assert_fenced(settle(&after, &ann, id).await);
    let bob = acquire(&after, "bob").await?;
    assert!(bob.epoch < ann.epoch, "the clock behind gives a smaller epoch");

    // Epochs are compared for equality, not for order: the greater one of ann is stale.
    assert_fenced(settle(&after, &ann, id).await);
    settle(&after, &bob, id).await?;
    Ok(())
}
