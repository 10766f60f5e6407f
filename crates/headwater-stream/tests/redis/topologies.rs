//! Sentinel and Cluster: a primary dies, a replica takes over, and work goes on.

use std::time::Duration;

use anyhow::{Result, ensure};
use headwater_stream::{HolderName, LeaseName, Options, connect};
use headwater_testkit::{Cluster, Sentinel, unique};

use crate::Desk;

/// Long enough for every replica to have what the primary has: replication is not waited for by Redis itself.
async fn replicated(wait: impl Fn() -> Result<bool>) -> Result<()> {
    for _ in 0..500 {
        if wait()? {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    anyhow::bail!("the replica never got the entry")
}

#[tokio::test]
async fn sentinel_names_the_primary_and_work_goes_on_after_a_fail_over() -> Result<()> {
    let sentinel = Sentinel::start()?;
    let desk = Desk::open(&sentinel.url()).await?;
    desk.round_trip().await?;
    let mut reader = desk.reader().await?;
    let before = desk.append("before").await?;
    let stream = desk.stream.as_str().to_owned();
    replicated(|| Ok(sentinel.replica().command(&["XLEN", &stream])?.int() == Some(2))).await?;

    sentinel.primary().kill9()?;

    // Scripts too: the new primary has to learn them.
    let (lease, holder) = (LeaseName::new("lease")?, HolderName::new("ada")?);
    let ttl = Duration::from_secs(30);
    crate::patiently("acquire", async || desk.backend.acquire(&lease, &holder, ttl).await).await?;
    let after = desk.append_patiently("after").await?;
    let mut seen = Vec::new();
    while !seen.contains(&after) {
        let entries = desk.read_patiently(reader.as_mut()).await?;
        seen.extend(entries.iter().map(|entry| entry.id));
    }
    ensure!(seen.contains(&before), "what was replicated is lost: {seen:?}");
    Ok(())
}

#[tokio::test]
async fn a_cluster_goes_on_after_a_primary_died_under_a_reader() -> Result<()> {
    let cluster = Cluster::start()?;
    let options = Options { call_deadline: crate::DEADLINE, ..Options::default() };
    let backend = connect(&cluster.url(), &options).await?;
    let desk = Desk::with(backend, &unique("orders")).await?;
    desk.round_trip().await?;
    let mut reader = desk.reader().await?;
    let before = desk.append("before").await?;
    let slot = cluster.slot_of(desk.stream.as_str())?;
    let (primary, replica) = (cluster.primary_of_slot(slot)?, cluster.replica_of_slot(slot)?);
    let dump = desk.stream.as_str().to_owned();
    replicated(|| {
        let mut replica = replica.connect()?;
        replica.command(&["READONLY"])?.ok()?;
        Ok(replica.command(&["XLEN", &dump])?.int() == Some(2))
    })
    .await?;

    primary.kill9()?;

    let after = desk.append_patiently("after").await?;
    let mut seen = Vec::new();
    while !seen.contains(&after) {
        let entries = desk.read_patiently(reader.as_mut()).await?;
        seen.extend(entries.iter().map(|entry| entry.id));
    }
    ensure!(seen.contains(&before), "what was replicated is lost: {seen:?}");
    Ok(())
}

#[tokio::test]
async fn a_cluster_serves_streams_of_all_its_primaries() -> Result<()> {
    let cluster = Cluster::shared()?;
    let backend = connect(&cluster.url(), &Options::default()).await?;
    for number in 0..12 {
        Desk::with(backend.clone(), &unique(&format!("orders-{number}")))
            .await?
            .round_trip()
            .await?;
    }
    Ok(())
}
