//! Partitioners: choose the partition of a message from its key.
//!
//! Guarantees: the hash is the one that other programs use (Java's `String.hashCode`), so that all agree on the partition
//! of a key.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

use crate::topic::Partition;

/// Chooses a partition for a message.
pub trait Partitioner: Send + Sync {
    /// The partition for a key among `partitions`, which is at least 1. A send fails if the result is not below
    /// `partitions`.
    fn partition(&self, key: Option<&str>, partitions: u16) -> Partition;

    /// Whether a key always has the same partition among the same `partitions`. If not, the partition of a message with
    /// an id is the hash of its id, so that a duplicate goes to the same partition. Default: true.
    fn is_stable(&self) -> bool {
        true
    }
}

/// Java's `String.hashCode`: over UTF-16 units, 32 bits, wrapping.
pub fn hash_code(key: &str) -> i32 {
    // ASCII is its own UTF-16, and nearly every key is ASCII.
    let step = |hash: i32, unit: i32| hash.wrapping_mul(31).wrapping_add(unit);
    if key.is_ascii() {
        key.bytes().fold(0, |hash, byte| step(hash, i32::from(byte)))
    } else {
        key.encode_utf16().fold(0, |hash, unit| step(hash, i32::from(unit)))
    }
}

/// The partition of a key by its hash.
pub(crate) fn hash_partition(key: &str, partitions: u16) -> Partition {
    let partition = hash_code(key).rem_euclid(i32::from(partitions));
    u16::try_from(partition).expect("the remainder is below a u16")
}

/// Hashes the key; messages without a key are distributed round robin. The default.
#[derive(Debug, Default)]
pub struct HashPartitioner(RoundRobin);

impl Partitioner for HashPartitioner {
    fn partition(&self, key: Option<&str>, partitions: u16) -> Partition {
        match key {
            Some(key) => hash_partition(key, partitions),
            None => self.0.partition(None, partitions),
        }
    }
}

/// Round robin, ignoring the key: no order per key.
#[derive(Debug, Default)]
pub struct RoundRobin {
    next: AtomicUsize,
}

impl Partitioner for RoundRobin {
    fn partition(&self, _key: Option<&str>, partitions: u16) -> Partition {
        let turn = self.next.fetch_add(1, Ordering::Relaxed) % usize::from(partitions);
        u16::try_from(turn).expect("the remainder is below a u16")
    }

    fn is_stable(&self) -> bool {
        false
    }
}

/// A random partition, ignoring the key: no order per key. Unlike round robin it needs no turn that callers share, and
/// several producers do not fall into step.
#[derive(Clone, Copy, Debug, Default)]
pub struct RandomPartitioner;

impl Partitioner for RandomPartitioner {
    fn partition(&self, _key: Option<&str>, partitions: u16) -> Partition {
        fastrand::u16(0..partitions)
    }

    fn is_stable(&self) -> bool {
        false
    }
}

/// Points and their partitions, sorted by point.
type Ring = Arc<[(u32, Partition)]>;

/// Consistent hashing: when a topic is resized from P to Q partitions, only about (Q - P) / Q of the keys move.
#[derive(Debug)]
pub struct ConsistentHash {
    virtual_nodes: u32,
    /// One per partition count this process has seen.
    rings: RwLock<HashMap<u16, Ring>>,
    keyless: RoundRobin,
}

impl ConsistentHash {
    /// A ring with this many points per partition, 1 to 1,000. With 100, partitions differ by about 10 %.
    pub fn new(virtual_nodes: u32) -> Self {
        Self {
            virtual_nodes: virtual_nodes.clamp(1, 1000),
            rings: RwLock::default(),
            keyless: RoundRobin::default(),
        }
    }

    fn ring(&self, partitions: u16) -> Ring {
        const WHY: &str = "no code panics while it holds the ring";
        if let Some(ring) = self.rings.read().expect(WHY).get(&partitions) {
            return ring.clone();
        }
        let mut points: Vec<(u32, Partition)> = (0..partitions)
            .flat_map(|p| (0..self.virtual_nodes).map(move |node| (mix(&format!("{p}#{node}")), p)))
            .collect();
        points.sort_unstable();
        let ring: Ring = points.into();
        // One ring per partition count; the number of resizes of a topic is limited.
        self.rings.write().expect(WHY).insert(partitions, ring.clone());
        ring
    }
}

impl Default for ConsistentHash {
    fn default() -> Self {
        Self::new(100)
    }
}

impl Partitioner for ConsistentHash {
    fn partition(&self, key: Option<&str>, partitions: u16) -> Partition {
        let Some(key) = key else { return self.keyless.partition(None, partitions) };
        let ring = self.ring(partitions);
        let index = ring.partition_point(|(point, _)| *point < mix(key));
        ring[index % ring.len()].1
    }
}

/// Java's hash maps similar keys to close values; on a ring they must be spread.
fn mix(key: &str) -> u32 {
    let mut hash = 0x811c_9dc5_u32;
    for byte in key.bytes() {
        hash = (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    }
    hash = (hash ^ (hash >> 16)).wrapping_mul(0x85eb_ca6b);
    hash = (hash ^ (hash >> 13)).wrapping_mul(0xc2b2_ae35);
    hash ^ (hash >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_and_partition_of_a_key_match_other_programs() {
        for (key, hash, partitions) in [
            ("", 0, &[(3, 0)][..]),
            ("k0", 3365, &[(3, 2), (8, 5)]),
            ("k1", 3366, &[(3, 0)]),
            ("k29", 104_434, &[(3, 1), (8, 2)]),
            ("user-123", -267_697_872, &[(2, 0), (3, 0), (4, 0), (8, 0), (16, 0)]),
            ("order-42", 1_234_255_197, &[(8, 5), (16, 13)]),
            ("键", 38_190, &[(4, 2)]),
            ("😀", 1_772_899, &[(3, 1)]),
            ("polygenelubricants", i32::MIN, &[(3, 1)]),
        ] {
            assert_eq!(hash_code(key), hash, "{key}");
            for (count, partition) in partitions {
                assert_eq!(hash_partition(key, *count), *partition, "{key} of {count}");
            }
        }
    }

    #[test]
    fn messages_without_a_key_are_distributed_round_robin() {
        let partitioner = HashPartitioner::default();
        let chosen: Vec<_> = (0..6).map(|_| partitioner.partition(None, 3)).collect();
        assert_eq!(chosen, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn consistent_hashing_spreads_keys_and_moves_few_when_the_topic_is_resized() {
        let ring = ConsistentHash::default();
        let keys: Vec<String> = (0..10_000).map(|n| format!("user-{n}")).collect();
        let partitions_of =
            |count| -> Vec<_> { keys.iter().map(|key| ring.partition(Some(key), count)).collect() };
        let (eight, ten) = (partitions_of(8), partitions_of(10));
        for partition in 0..8 {
            let share = eight.iter().filter(|p| **p == partition).count();
            assert!((800..1700).contains(&share), "partition {partition} has {share} of 10000");
        }
        let moved = eight.iter().zip(&ten).filter(|(a, b)| a != b).count();
        assert!(moved < 3000, "{moved} of 10000 moved, expected about 2000");
        assert!(eight.iter().zip(&ten).all(|(a, b)| a == b || *b >= 8), "only to new partitions");
    }

    #[test]
    fn random_partitions_are_in_range_and_spread_over_all() {
        let mut seen = [0_u32; 8];
        for _ in 0..8000 {
            seen[usize::from(RandomPartitioner.partition(Some("the same key"), 8))] += 1;
        }
        // 1,000 are expected of each; 500 is 17 standard deviations away.
        assert!(seen.iter().all(|count| *count > 500), "{seen:?}");
        assert_eq!(RandomPartitioner.partition(None, 1), 0);
        assert!(!RandomPartitioner.is_stable());
    }
}
