//! Hints of expired leases: the server's notify flags, extended and never taken away.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use headwater_stream::{Acquire, Backend, HintKind, HolderName, LeaseName, LeaseWatch, WatchMode};
use headwater_testkit::{Cluster, Redis, unique};

use crate::Desk;

const TTL: Duration = Duration::from_millis(200);

async fn acquire(backend: &dyn Backend, lease: &str) -> Result<LeaseName> {
    let (lease, holder) = (LeaseName::new(lease)?, HolderName::new("ada")?);
    let acquired = backend.acquire(&lease, &holder, TTL).await?;
    ensure!(matches!(acquired, Acquire::Won(_)), "{acquired:?}");
    Ok(lease)
}

/// Waits until the watch tells that this lease expired.
async fn hears_expiry(watch: &mut dyn LeaseWatch, lease: &LeaseName) -> Result<()> {
    let heard = async {
        loop {
            let hint = watch.next().await;
            if hint.kind == HintKind::Expired && hint.lease.as_ref() == Some(lease) {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(10), heard).await.context("no hint came")
}

fn flags(redis: &Redis) -> Result<String> {
    Ok(redis.command(&["CONFIG", "GET", "notify-keyspace-events"])?.ok()?.items()[1].text())
}

#[tokio::test]
async fn expiry_is_heard_whatever_flags_the_server_had() -> Result<()> {
    for before in ["", "Ex", "Kg", "AKE", "gx"] {
        let redis = Redis::builder().notify(before).start()?;
        let desk = Desk::open(&redis.url()).await?;
        let mut watch = desk.backend.watch("").await?;
        ensure!(*watch.mode() == WatchMode::All, "{before}: {:?}", watch.mode());

        let lease = acquire(desk.backend.as_ref(), "lease").await?;

        hears_expiry(watch.as_mut(), &lease).await.context(before)?;
        let after = flags(&redis)?;
        // The server may spell the same flags in another order, or `A` for all of them.
        for flag in before.chars() {
            ensure!(after.contains(flag) || after.contains('A'), "{before:?} became {after:?}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_server_that_forbids_config_leaves_the_sweep_and_says_so() -> Result<()> {
    let redis = Redis::builder().user("desk", "secret", "~* &* +@all -config").start()?;
    let desk = Desk::open(&redis.url()).await?;

    let mut watch = desk.backend.watch("").await?;

    match watch.mode() {
        WatchMode::ReleasesOnly { reason } => ensure!(!reason.is_empty(), "no reason"),
        WatchMode::All => anyhow::bail!("it cannot know of expiry"),
    }
    ensure!(flags(&redis)?.is_empty(), "the flags were changed all the same");
    // Releases are heard all the same.
    let (lease, holder) = (LeaseName::new("lease")?, HolderName::new("ada")?);
    let Acquire::Won(epoch) = desk.backend.acquire(&lease, &holder, TTL * 50).await? else {
        anyhow::bail!("the lease was held");
    };
    let fence = headwater_stream::Fence { lease: lease.clone(), epoch };
    desk.backend.release(&holder, &[fence]).await?;
    let hint = tokio::time::timeout(Duration::from_secs(10), watch.next()).await?;
    assert_eq!((hint.lease, hint.kind), (Some(lease), HintKind::Released));
    Ok(())
}

#[tokio::test]
async fn expiry_is_heard_in_the_database_that_is_used() -> Result<()> {
    let redis = Redis::start()?;
    let desk = Desk::open(&format!("redis://{}/3", redis.addr())).await?;
    let mut watch = desk.backend.watch("").await?;

    let lease = acquire(desk.backend.as_ref(), "lease").await?;

    hears_expiry(watch.as_mut(), &lease).await
}

#[tokio::test]
async fn expiry_is_heard_from_every_primary_of_a_cluster() -> Result<()> {
    let cluster = Cluster::shared()?;
    let options = headwater_stream::Options::default();
    let backend = headwater_stream::connect(&cluster.url(), &options).await?;
    let prefix = unique("lease");
    let mut watch = backend.watch(&prefix).await?;
    ensure!(*watch.mode() == WatchMode::All, "{:?}", watch.mode());

    let mut primaries = std::collections::BTreeSet::new();
    for number in 0..20 {
        let name = format!("{prefix}-{number}");
        primaries.insert(cluster.primary_of_slot(cluster.slot_of(&name)?)?.port());
        let lease = acquire(backend.as_ref(), &name).await?;
        hears_expiry(watch.as_mut(), &lease).await.context(name)?;
    }

    ensure!(primaries.len() == 3, "the names cover {} primaries only", primaries.len());
    Ok(())
}
