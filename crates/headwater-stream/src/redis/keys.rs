//! All Redis keys and channels of this backend. No other module turns a name into a key, or a key into a name.
//!
//! A key is the prefix of the URL (none by default) and a name. Data that belongs to a name is stored under a derived key in
//! the same slot. On a cluster with a prefix, a name without a hash tag is its own tag, because the prefix would change its
//! slot: `app1:{orders}`. So the slot of a key is always that of its name, whatever the prefix.

use std::borrow::Cow;
use std::fmt;

use crate::entry::EntryId;
use crate::name::{
    ConsumerName, DedupScope, DelayName, GroupName, LeaseName, MapName, SetName, StreamName,
    hash_tag,
};
use crate::streams::SettleBatch;

/// Number of slots of a Redis Cluster.
pub(super) const SLOTS: usize = 16_384;

/// Suffix of the key of an epoch record.
const EPOCH: &str = ":epoch";

/// A key. Commands accept no text in its place, so no name is sent without the prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key<'a> {
    prefix: &'a str,
    rest: Cow<'a, str>,
}

impl Key<'_> {
    /// Its two parts, which are written one after the other.
    pub(super) fn parts(&self) -> [&[u8]; 2] {
        [self.prefix.as_bytes(), self.rest.as_bytes()]
    }

    pub(super) fn len(&self) -> usize {
        self.prefix.len() + self.rest.len()
    }

    /// Whether the server means this key.
    pub(super) fn is(&self, text: &[u8]) -> bool {
        text.strip_prefix(self.prefix.as_bytes()) == Some(self.rest.as_bytes())
    }
}

impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.prefix, self.rest)
    }
}

/// A name that has a key of its own.
pub(super) trait KeyName: AsRef<str> {}

impl KeyName for StreamName {}
impl KeyName for LeaseName {}
impl KeyName for DelayName {}
impl KeyName for MapName {}
impl KeyName for SetName {}

/// The keys, channels and connection names of one prefix in one database.
pub(super) struct Keyspace {
    prefix: String,
    database: u32,
    is_cluster: bool,
    released_channel: String,
    due_channel: String,
    expired_channel: String,
}

impl Keyspace {
    pub(super) fn new(prefix: &str, database: u32, is_cluster: bool) -> Self {
        Self {
            prefix: prefix.to_owned(),
            database,
            is_cluster,
            // Channels are shared by all databases, so their names contain the database.
            released_channel: format!("{prefix}headwater:released@{database}"),
            due_channel: format!("{prefix}headwater:due@{database}"),
            expired_channel: format!("__keyevent@{database}__:expired"),
        }
    }

    /// The key of a name.
    pub(super) fn of<'a>(&'a self, name: &'a impl KeyName) -> Key<'a> {
        let name = name.as_ref();
        let needs_tag = self.is_cluster && !self.prefix.is_empty() && hash_tag(name).is_none();
        match needs_tag {
            true => self.key(format!("{{{name}}}")),
            false => self.key(name),
        }
    }

    /// A lease and its epoch record, which outlives the lease.
    pub(super) fn lease_with_epoch<'a>(&'a self, lease: &'a LeaseName) -> [Key<'a>; 2] {
        [self.of(lease), self.derived(lease.as_str(), EPOCH)]
    }

    /// A delay set, and the fields of its entries: a hash by entry id.
    pub(super) fn delay_set<'a>(&'a self, delays: &'a DelayName) -> [Key<'a>; 2] {
        [self.of(delays), self.derived(delays.as_str(), ":entries")]
    }

    /// The state of one de-duplication id. An id may contain any character, so the key marks the end of the scope: by its
    /// closing brace, or by its length in front.
    pub(super) fn dedup(&self, scope: &DedupScope, id: &str) -> Key<'_> {
        self.key(match hash_tag(scope.as_str()) {
            Some(_) => format!("{}:{scope}:{id}", scope.as_str().len()),
            None => format!("{{{scope}}}:{id}"),
        })
    }

    /// The entry id of an idempotent append. The end of the stream name is marked as in [`dedup`](Self::dedup).
    pub(super) fn once(&self, stream: &StreamName, id: &str) -> Key<'_> {
        self.key(match hash_tag(stream.as_str()) {
            Some(_) => format!("once:{}:{stream}:{id}", stream.as_str().len()),
            None => format!("once:{{{stream}}}:{id}"),
        })
    }

    /// Tombstone: the readers of a consumer on a stream were disconnected.
    pub(super) fn reader_tombstone(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Key<'_> {
        let group_bytes = group.as_str().len();
        self.key(match hash_tag(stream.as_str()) {
            Some(_) => {
                let stream_bytes = stream.as_str().len();
                format!("silenced:{stream_bytes}:{group_bytes}:{stream}:{group}:{consumer}")
            }
            None => format!("silenced:{group_bytes}:{{{stream}}}:{group}:{consumer}"),
        })
    }

    /// Name of the connections of a reader of this stream. The server allows no spaces in it, so it is a digest.
    ///
    /// A reader of a cluster has a connection per slot, and the slot is in its name: disconnecting one does not affect the
    /// others.
    pub(super) fn reader_name(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> String {
        let whole = match self.prefix.as_str() {
            "" => format!("{group}\0{consumer}"),
            prefix => format!("{prefix}\0{group}\0{consumer}"),
        };
        let digest = sha1_smol::Sha1::from(whole).digest();
        match self.is_cluster {
            false => format!("headwater:reader@{}:{digest}", self.database),
            true => format!("headwater:reader@0:{}:{digest}", slot(stream.as_str())),
        }
    }

    /// Channel for released leases.
    pub(super) fn released_channel(&self) -> &str {
        &self.released_channel
    }

    /// Channel for delay sets whose earliest due time moved forward.
    pub(super) fn due_channel(&self) -> &str {
        &self.due_channel
    }

    /// Channel of keyspace notifications about expired keys, of all programs.
    pub(super) fn expired_channel(&self) -> &str {
        &self.expired_channel
    }

    /// The lease with this key; `None` for the key of another program, and for an epoch record.
    pub(super) fn lease_of(&self, key: &str) -> Option<LeaseName> {
        let rest = key.strip_prefix(&self.prefix)?;
        if rest.ends_with(EPOCH) {
            return None;
        }
        let own_tag = |rest: &str| {
            let is_added = self.is_cluster && !self.prefix.is_empty();
            let name = rest.strip_prefix('{')?.strip_suffix('}')?;
            (is_added && !name.contains('}')).then(|| name.to_owned())
        };
        LeaseName::new(own_tag(rest).as_deref().unwrap_or(rest)).ok()
    }

    fn derived(&self, name: &str, suffix: &str) -> Key<'_> {
        self.key(match hash_tag(name) {
            Some(_) => format!("{name}{suffix}"),
            None => format!("{{{name}}}{suffix}"),
        })
    }

    fn key<'a>(&'a self, rest: impl Into<Cow<'a, str>>) -> Key<'a> {
        Key { prefix: &self.prefix, rest: rest.into() }
    }
}

/// The idempotency id of the follow-up of an entry that a consumer settles. Names have any length, so it is a digest.
pub(super) fn follow_up_id(settle: &SettleBatch<'_>, entry: EntryId) -> String {
    let SettleBatch { stream, group, consumer, .. } = settle;
    let whole = format!("{stream}\0{group}\0{consumer}\0{entry}");
    format!("follow-up:{}", sha1_smol::Sha1::from(whole).digest())
}

/// The slot of a name, and of its keys, in a Redis Cluster.
pub(super) fn slot(name: &str) -> u16 {
    let tag = hash_tag(name).unwrap_or(name);
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

    fn keyspaces() -> [Keyspace; 4] {
        let new = |prefix, is_cluster| Keyspace::new(prefix, 0, is_cluster);
        [new("", false), new("", true), new("app1:", false), new("app1:", true)]
    }

    #[test]
    fn slots_match_the_cluster_specification() {
        assert_eq!(slot("123456789"), 0x31C3);
        assert_eq!(slot("{user1000}.following"), slot("user1000"));
        assert_eq!(slot("foo"), 12_182);
    }

    #[test]
    fn ids_of_two_scopes_never_share_a_key() {
        for keys in keyspaces() {
            let key = |scope: &str, id: &str| {
                keys.dedup(&DedupScope::new(scope).unwrap(), id).to_string()
            };
            assert_ne!(key("a", "b:c"), key("a:b", "c"));
            assert_ne!(key("{t}a", "b:c"), key("{t}a:b", "c"));
            let once = |stream: &str, id: &str| {
                keys.once(&StreamName::new(stream).unwrap(), id).to_string()
            };
            assert_ne!(once("a", "b:c"), once("a:b", "c"));
            assert_ne!(once("{t}a", "b:c"), once("{t}a:b", "c"));
            assert_ne!(once("a", "x"), once("{a}", "x"));
        }
    }

    #[test]
    fn every_key_has_the_prefix_and_the_slot_of_its_name() {
        for keys in keyspaces() {
            for name in ["orders", "a{b", "stream:{t:0}", "{a}{b}", "键"] {
                let (lease, scope) = (LeaseName::new(name), DedupScope::new(name));
                let (stream, delays) = (StreamName::new(name), DelayName::new(name));
                let (lease, scope, stream) = (lease.unwrap(), scope.unwrap(), stream.unwrap());
                let (delays, group) = (delays.unwrap(), GroupName::new("{g}").unwrap());
                let consumer = ConsumerName::new("{c}").unwrap();
                let mut all = vec![keys.dedup(&scope, "{x}"), keys.once(&stream, "{x}")];
                all.extend(keys.lease_with_epoch(&lease));
                all.extend(keys.delay_set(&delays));
                all.push(keys.reader_tombstone(&stream, &group, &consumer));
                for key in all.iter().map(ToString::to_string) {
                    assert!(key.starts_with(&keys.prefix), "{key}");
                    // Without a cluster there are no slots, and a prefix changes that of a name without a tag.
                    if keys.is_cluster {
                        assert_eq!(slot(&key), slot(name), "{key}");
                    }
                }
            }
        }
    }

    #[test]
    fn without_a_prefix_a_name_is_its_key() {
        let [single, cluster, prefixed, prefixed_cluster] = keyspaces();
        let key =
            |keys: &Keyspace, name: &str| keys.of(&StreamName::new(name).unwrap()).to_string();
        for name in ["orders", "stream:{t:0}"] {
            assert_eq!(key(&single, name), name);
            assert_eq!(key(&cluster, name), name);
            assert_eq!(key(&prefixed, name), format!("app1:{name}"));
        }
        assert_eq!(key(&prefixed_cluster, "orders"), "app1:{orders}");
        assert_eq!(key(&prefixed_cluster, "stream:{t:0}"), "app1:stream:{t:0}");
        let orders = StreamName::new("orders").unwrap();
        assert!(prefixed.of(&orders).is(b"app1:orders"));
        for other in ["orders", "app2:orders", "app1:orders2", "app1:", ""] {
            assert!(!prefixed.of(&orders).is(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn a_lease_is_found_by_its_key_only() {
        for keys in keyspaces() {
            for name in ["orders", "a{b", "lease:{t:0}", "{a}{b}", "键"] {
                let lease = LeaseName::new(name).unwrap();
                let [key, epoch] = keys.lease_with_epoch(&lease).map(|key| key.to_string());
                assert_eq!(keys.lease_of(&key), Some(lease));
                assert_eq!(keys.lease_of(&epoch), None);
            }
            if !keys.prefix.is_empty() {
                assert_eq!(keys.lease_of("app2:orders"), None);
                assert_eq!(keys.lease_of("orders"), None);
            }
        }
    }

    #[test]
    fn channels_and_readers_of_two_prefixes_have_different_names() {
        let names = |prefix: &str| {
            let keys = Keyspace::new(prefix, 3, false);
            let (stream, group) = (StreamName::new("s").unwrap(), GroupName::new("g").unwrap());
            let reader = keys.reader_name(&stream, &group, &ConsumerName::new("c").unwrap());
            [keys.released_channel, keys.due_channel, reader]
        };
        let (one, two, none) = (names("app1:"), names("app2:"), names(""));
        assert_eq!(one[..2], ["app1:headwater:released@3", "app1:headwater:due@3"]);
        assert_eq!(none[..2], ["headwater:released@3", "headwater:due@3"]);
        for at in 0..3 {
            assert!(one[at] != two[at] && one[at] != none[at], "{one:?} {two:?} {none:?}");
        }
    }
}
