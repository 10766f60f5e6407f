//! Shared helpers of the Redis backend tests.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use headwater_stream::{
    Backend, ConsumerName, DedupScope, DelayName, EntryId, Fields, GroupName, GroupReader,
    HolderName, LeaseName, MapName, Options, SetName, StreamName, connect,
};
use headwater_testkit::Redis;

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
    let start = Instant::now();
    loop {
        let list = redis.command(&["CLIENT", "LIST"])?.text();
        let is_blocked = |line: &&str| line.contains("cmd=xreadgroup") && line.contains("flags=b");
        if list.lines().filter(is_blocked).count() >= count {
            return Ok(());
        }
        if start.elapsed() > Duration::from_secs(60) {
            bail!("no reader is blocked: {list}");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
