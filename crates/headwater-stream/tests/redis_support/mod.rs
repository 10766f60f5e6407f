//! Shared helpers of the Redis backend tests.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use headwater_stream::{
    Backend, ConsumerName, DedupScope, DelayName, EntryId, Fields, GroupName, GroupReader,
    HolderName, LeaseName, MapName, Options, SetName, StreamName, connect,
};
use headwater_testkit::{Cluster, Redis};

macro_rules! names {
    ($($make:ident $type:ident)*) => {
        $(pub(crate) fn $make(name: &str) -> $type {
            $type::new(name).expect("a valid name")
        })*
    };
}

names! {
    stream StreamName
    group GroupName
    consumer ConsumerName
    lease LeaseName
    holder HolderName
    delays DelayName
    set SetName
    map MapName
    scope DedupScope
}

pub(crate) async fn open(url: &str) -> Result<Arc<dyn Backend>> {
    Ok(connect(url, &Options::default()).await?)
}

/// Creates a user who may do only what `docs/redis.md` lists, with the password `PASSWORD`, and sets what that user cannot.
/// With a prefix, the user may use only keys and channels that begin with it.
pub(crate) fn allow(servers: &[Redis], user: &str, prefix: &str) -> Result<()> {
    let page = include_str!("../../../../docs/redis.md");
    let (_, command) = page.split_once("\nACL SETUSER headwater ").context("no ACL rules")?;
    let (rules, _) = command.split_once("```").context("the block does not end")?;
    let (keys, channels) = (format!("~{prefix}*"), format!("&{prefix}*"));
    let rules = rules.split_whitespace().filter(|word| *word != "\\").map(|word| match word {
        "~*" if !prefix.is_empty() => &keys,
        "&headwater:*" if !prefix.is_empty() => &channels,
        word => word,
    });
    let rules: Vec<&str> = ["ACL", "SETUSER", user].into_iter().chain(rules).collect();
    for server in servers {
        server.command(&rules)?.ok()?;
        server.command(&["CONFIG", "SET", "notify-keyspace-events", "Ex"])?.ok()?;
    }
    Ok(())
}

/// The URL of a server for such a user.
pub(crate) fn url_of_user(redis: &Redis, user: &str, prefix: &str) -> String {
    format!("redis://{user}:PASSWORD@{}/?prefix={prefix}", redis.addr())
}

/// The URL of a cluster for such a user.
pub(crate) fn cluster_url_of_user(cluster: &Cluster, user: &str, prefix: &str) -> String {
    let url = cluster.url().replace("://", &format!("://{user}:PASSWORD@"));
    format!("{url}?prefix={prefix}")
}

pub(crate) fn one() -> Fields {
    numbered(1)
}

pub(crate) fn numbered(number: usize) -> Fields {
    Fields::new([("number", number.to_string())])
}

/// Reads available entries, blocking up to 5 s.
pub(crate) async fn read_ids(
    reader: &mut dyn GroupReader,
    stream: &StreamName,
) -> Result<Vec<EntryId>> {
    let streams = std::slice::from_ref(stream);
    let batches = reader.read(streams, 100, Duration::from_secs(5)).await?;
    Ok(batches.into_iter().flat_map(|batch| batch.entries).map(|entry| entry.id).collect())
}

/// Waits until `count` connections of this server are blocked in a group read.
pub(crate) async fn until_readers_block(redis: &Redis, count: usize) -> Result<()> {
    until_readers_block_on(std::slice::from_ref(redis), count).await
}

/// Waits until `count` connections of these servers are blocked in a group read.
pub(crate) async fn until_readers_block_on(servers: &[Redis], count: usize) -> Result<()> {
    let start = Instant::now();
    loop {
        let mut lists = String::new();
        for server in servers {
            lists += &server.command(&["CLIENT", "LIST"])?.text();
        }
        let is_blocked = |line: &&str| line.contains("cmd=xreadgroup") && line.contains("flags=b");
        if lists.lines().filter(is_blocked).count() >= count {
            return Ok(());
        }
        if start.elapsed() > Duration::from_secs(60) {
            bail!("no reader is blocked: {lists}");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
