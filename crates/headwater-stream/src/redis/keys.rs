//! All Redis keys and channels of this backend.
//!
//! A name is its key. Data that belongs to a name is stored under a derived key in the same slot.

use crate::entry::EntryId;
use crate::name::{
    ConsumerName, DedupScope, DelayName, GroupName, LeaseName, StreamName, hash_tag,
};
use crate::streams::SettleBatch;

/// Number of slots of a Redis Cluster.
pub(super) const SLOTS: usize = 16_384;

/// Suffix of the key of an epoch record.
const EPOCH: &str = ":epoch";

/// The epoch record of a lease. It outlives the lease.
pub(super) fn epoch(lease: &LeaseName) -> String {
    derived(lease.as_str(), EPOCH)
}

/// Whether this is the key of an epoch record.
pub(super) fn is_epoch(key: &str) -> bool {
    key.ends_with(EPOCH)
}

/// The fields of the entries in a delay set: a hash by entry id.
pub(super) fn delay_entries(delays: &DelayName) -> String {
    derived(delays.as_str(), ":entries")
}

/// The state of one de-duplication id. An id may contain any character, so the key marks the end of the scope: by its closing
/// brace, or by its length in front.
pub(super) fn dedup(scope: &DedupScope, id: &str) -> String {
    match hash_tag(scope.as_str()) {
        Some(_) => format!("{}:{scope}:{id}", scope.as_str().len()),
        None => format!("{{{scope}}}:{id}"),
    }
}

/// The entry id of an idempotent append. The end of the stream name is marked as in [`dedup`].
pub(super) fn once(stream: &StreamName, id: &str) -> String {
    match hash_tag(stream.as_str()) {
        Some(_) => format!("once:{}:{stream}:{id}", stream.as_str().len()),
        None => format!("once:{{{stream}}}:{id}"),
    }
}

/// The idempotency id of the follow-up of an entry that a consumer settles. Names have any length, so it is a digest.
pub(super) fn follow_up_id(settle: &SettleBatch<'_>, entry: EntryId) -> String {
    let SettleBatch { stream, group, consumer, .. } = settle;
    let whole = format!("{stream}\0{group}\0{consumer}\0{entry}");
    format!("follow-up:{}", sha1_smol::Sha1::from(whole).digest())
}

/// Tombstone: the readers of a consumer on a stream were disconnected.
pub(super) fn reader_tombstone(
    stream: &StreamName,
    group: &GroupName,
    consumer: &ConsumerName,
) -> String {
    let group_bytes = group.as_str().len();
    match hash_tag(stream.as_str()) {
        Some(_) => {
            let stream_bytes = stream.as_str().len();
            format!("silenced:{stream_bytes}:{group_bytes}:{stream}:{group}:{consumer}")
        }
        None => format!("silenced:{group_bytes}:{{{stream}}}:{group}:{consumer}"),
    }
}

/// Name of a reader's connections. The server allows no spaces in it, so it is a digest.
///
/// A reader of a cluster has a connection per slot, and the slot is in its name: disconnecting one does not affect the others.
pub(super) fn reader_name(
    place: ReaderPlace,
    group: &GroupName,
    consumer: &ConsumerName,
) -> String {
    let whole = format!("{group}\0{consumer}");
    let digest = sha1_smol::Sha1::from(whole).digest();
    match place {
        ReaderPlace::Database(database) => format!("headwater:reader@{database}:{digest}"),
        ReaderPlace::Slot(slot) => format!("headwater:reader@0:{slot}:{digest}"),
    }
}

/// What a connection of a reader reads from.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReaderPlace {
    Database(u32),
    /// A slot of a cluster, which has one database.
    Slot(u16),
}

/// Channel for released leases. Channels are shared by all databases, so its name contains the database.
pub(super) fn released_channel(database: u32) -> String {
    format!("headwater:released@{database}")
}

/// Channel for delay sets whose earliest due time moved forward.
pub(super) fn due_channel(database: u32) -> String {
    format!("headwater:due@{database}")
}

/// Channel of keyspace notifications about expired keys.
pub(super) fn expired_channel(database: u32) -> String {
    format!("__keyevent@{database}__:expired")
}

fn derived(name: &str, suffix: &str) -> String {
    match hash_tag(name) {
        Some(_) => format!("{name}{suffix}"),
        None => format!("{{{name}}}{suffix}"),
    }
}

/// The slot of a key in a Redis Cluster.
pub(super) fn slot(key: &str) -> u16 {
    let tag = hash_tag(key).unwrap_or(key);
    let crc =
        tag.bytes().fold(0_u16, |crc, byte| (crc << 8) ^ CRC[usize::from((crc >> 8) as u8 ^ byte)]);
    crc % SLOTS as u16
}

/// CRC-16 table with the polynomial of the cluster specification.
const CRC: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_match_the_cluster_specification() {
        assert_eq!(slot("123456789"), 0x31C3);
        assert_eq!(slot("{user1000}.following"), slot("user1000"));
        assert_eq!(slot("foo"), 12_182);
    }

    #[test]
    fn ids_of_two_scopes_never_share_a_key() {
        let key = |scope: &str, id: &str| dedup(&DedupScope::new(scope).unwrap(), id);
        assert_ne!(key("a", "b:c"), key("a:b", "c"));
        assert_ne!(key("{t}a", "b:c"), key("{t}a:b", "c"));
        let once = |stream: &str, id: &str| once(&StreamName::new(stream).unwrap(), id);
        assert_ne!(once("a", "b:c"), once("a:b", "c"));
        assert_ne!(once("{t}a", "b:c"), once("{t}a:b", "c"));
        assert_ne!(once("a", "x"), once("{a}", "x"));
    }

    #[test]
    fn a_derived_key_is_in_the_slot_of_its_name() {
        for name in ["orders", "a{b", "stream:{t:0}", "{a}{b}", "键"] {
            let lease = LeaseName::new(name).unwrap();
            assert_eq!(slot(&epoch(&lease)), slot(name), "{name}");
            let scope = DedupScope::new(name).unwrap();
            assert_eq!(slot(&dedup(&scope, "{x}")), slot(name), "{name}");
            let stream = StreamName::new(name).unwrap();
            assert_eq!(slot(&once(&stream, "{x}")), slot(name), "{name}");
            let (group, consumer) = (GroupName::new("{g}"), ConsumerName::new("{c}"));
            let tombstone = reader_tombstone(&stream, &group.unwrap(), &consumer.unwrap());
            assert_eq!(slot(&tombstone), slot(name), "{name}");
        }
    }
}
