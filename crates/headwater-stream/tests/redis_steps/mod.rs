//! What the tests of the Redis backend share.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use headwater_stream::{
    Backend, ConsumerName, DedupScope, DelayName, EntryId, Fields, GroupName, GroupReader,
    HolderName, LeaseName, MapName, Options, SetName, StreamName, connect,
};

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

/// Reads what there is, waiting for it up to 5 s.
pub(crate) async fn read_ids(
    reader: &mut dyn GroupReader,
    stream: &StreamName,
) -> Result<Vec<EntryId>> {
    let streams = std::slice::from_ref(stream);
    let batches = reader.read(streams, 100, Duration::from_secs(5)).await?;
    Ok(batches.into_iter().flat_map(|batch| batch.entries).map(|entry| entry.id).collect())
}
