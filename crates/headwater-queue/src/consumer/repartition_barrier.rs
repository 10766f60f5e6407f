//! Repartition barriers keep the order of a key while its topic is resized: a message in the key's new partition is
//! blocked until the group has finished the key's older messages in the old partition.
//!
//! Upstream: `partition_driver` asks for each message, with [`MessageOrder::PerKey`](crate::MessageOrder::PerKey).
//! Downstream: `barrier_watcher` checks which barriers may open.
//! Guarantees: a message sent before a resize is never blocked by it, and one sent after it waits only for messages that
//! the resize did not move; so there is no deadlock. A message whose key does not hash to its partition, as far as this
//! process knows, waits until the topic was read again.
//! Not here: messages whose producer chose the partition. Their keys have no partition of their own.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use headwater_stream::EntryId;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::key_queues::InFlightMessage;
use crate::config::MessageOrder;
use crate::partitioner::hash_partition;
use crate::topic::{Partition, Resize, Topic};

/// What a blocked message waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Barrier {
    /// The messages in partition `old` from before the resize that began at `began_ms`.
    Resize { began_ms: u64, old: Partition },
    /// The topic has to be read again.
    TopicRefresh,
}

/// The barriers of a subscription.
pub(super) struct Barriers {
    /// If false, no message is ever blocked.
    is_ordered: bool,
    state: Mutex<BarrierState>,
    /// Notified when a message is blocked.
    pub(super) has_blocked: Notify,
}

struct BarrierState {
    topic: Arc<Topic>,
    /// The topic was in this state at this time.
    topic_read_at: Instant,
    /// Resizes with a closed barrier.
    resizes: Vec<Resize>,
    /// Start times of the resizes whose barriers are all open.
    completed: HashSet<u64>,
    /// Open barriers of resizes that are not completed.
    open: HashSet<Barrier>,
    /// Keys found in a partition they do not hash to, although no resize explains it: their producer chooses the
    /// partition, so their messages do not wait for a topic refresh.
    manually_partitioned: HashSet<(Partition, Bytes)>,
}

/// Keys remembered as manually partitioned. Beyond it, all are forgotten and checked again.
const MANUALLY_PARTITIONED_MAX: usize = 10_000;

impl Barriers {
    pub(super) fn new(order: MessageOrder, topic: Arc<Topic>) -> Self {
        let state = BarrierState {
            resizes: topic.resizes.clone(),
            topic,
            topic_read_at: Instant::now(),
            completed: HashSet::new(),
            open: HashSet::new(),
            manually_partitioned: HashSet::new(),
        };
        Self {
            is_ordered: order == MessageOrder::PerKey,
            state: Mutex::new(state),
            has_blocked: Notify::new(),
        }
    }

    /// Takes a topic that was read at this time or later.
    pub(super) fn update_topic(&self, topic: Arc<Topic>, topic_read_at: Instant) {
        let mut state = self.lock();
        if is_newer(&topic, &state.topic) {
            if topic.created_at != state.topic.created_at
                || topic.resizes.len() != state.topic.resizes.len()
            {
                state.manually_partitioned.clear();
            }
            let is_completed =
                |resize: &Resize| state.completed.contains(&resize.began.as_millis());
            state.resizes =
                topic.resizes.iter().filter(|resize| !is_completed(resize)).cloned().collect();
            state.topic = topic;
        }
        state.topic_read_at = state.topic_read_at.max(topic_read_at);
    }

    /// The barrier that blocks a message; `None` if it may be handled.
    pub(super) fn blocking(&self, item: &InFlightMessage, partition: Partition) -> Option<Barrier> {
        if !self.is_ordered {
            return None;
        }
        let bytes = item.key.as_ref()?;
        let key = std::str::from_utf8(bytes).ok()?;
        let mut state = self.lock();
        let topic = &state.topic;
        // The newest resize first: it is the most likely to be in progress.
        for resize in state.resizes.iter().rev() {
            if let Some(barrier) = barrier_for(resize, key, item.delivery.id, partition)
                && !state.open.contains(&barrier)
            {
                return Some(barrier);
            }
        }
        // It may have been sent before a resize, to the partition that the key had then.
        let hashes_here = |partitions: u16| hash_partition(key, partitions) == partition;
        let is_expected_here = hashes_here(topic.partitions)
            || topic.resizes.iter().any(|resize| hashes_here(resize.from));
        if is_expected_here {
            return None;
        }
        let partition_key = (partition, bytes.clone());
        if state.manually_partitioned.contains(&partition_key) {
            return None;
        }
        if state.topic_read_at < item.received_at {
            return Some(Barrier::TopicRefresh);
        }
        if state.manually_partitioned.len() >= MANUALLY_PARTITIONED_MAX {
            state.manually_partitioned.clear();
        }
        state.manually_partitioned.insert(partition_key);
        None
    }

    /// Opens a barrier permanently: the messages it blocks and all later ones may be handled.
    pub(super) fn open(&self, barrier: Barrier) {
        let mut state = self.lock();
        state.open.insert(barrier);
        // A resize whose barriers are all open is dropped, so that later messages are not checked against it.
        let BarrierState { resizes, completed, open, .. } = &mut *state;
        resizes.retain(|resize| {
            let is_completed = closed_barriers(resize, open).next().is_none();
            if is_completed {
                completed.insert(resize.began.as_millis());
            }
            !is_completed
        });
        open.retain(|barrier| match barrier {
            Barrier::Resize { began_ms, .. } => !completed.contains(began_ms),
            Barrier::TopicRefresh => false,
        });
    }

    /// The closed barriers of a resize.
    pub(super) fn closed(&self, resize: &Resize) -> Vec<Barrier> {
        let state = self.lock();
        match state.completed.contains(&resize.began.as_millis()) {
            true => Vec::new(),
            false => closed_barriers(resize, &state.open).collect(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BarrierState> {
        self.state.lock().expect("no code panics while it holds the barriers")
    }
}

fn closed_barriers<'a>(
    resize: &Resize,
    open: &'a HashSet<Barrier>,
) -> impl Iterator<Item = Barrier> + 'a {
    let began_ms = resize.began.as_millis();
    (0..resize.from)
        .map(move |old| Barrier::Resize { began_ms, old })
        .filter(|barrier| !open.contains(barrier))
}

/// Whether this is not older than the known state. While a topic exists, resizes are only added and completed.
fn is_newer(topic: &Topic, known: &Topic) -> bool {
    let age = |topic: &Topic| {
        let completed = topic.resizes.iter().filter(|resize| resize.last_ids.is_some()).count();
        (topic.resizes.len(), completed)
    };
    topic.created_at != known.created_at || age(topic) >= age(known)
}

/// The barrier of a message, if the resize moved its key to this partition.
fn barrier_for(resize: &Resize, key: &str, id: EntryId, partition: Partition) -> Option<Barrier> {
    let began_ms = resize.began.as_millis();
    let old = hash_partition(key, resize.from);
    let is_moved = old != partition && hash_partition(key, resize.to) == partition;
    (is_moved && id.ms >= began_ms).then_some(Barrier::Resize { began_ms, old })
}

/// Whether a resize moved this key to this partition: then the message is itself blocked here.
pub(super) fn is_moved_by(resize: &Resize, key: Option<&[u8]>, partition: Partition) -> bool {
    let key = key.and_then(|key| std::str::from_utf8(key).ok());
    key.is_some_and(|key| hash_partition(key, resize.from) != partition)
}

#[cfg(test)]
mod tests {
    use headwater_stream::clock::Timestamp;
    use headwater_stream::{DeliveredEntry, Fields};

    use super::*;
    use crate::keys::Layout;
    use crate::topic::TopicName;

    /// From 4 to 6 partitions, at millisecond 1000. Keys are single characters, scope hash is their number.
    fn resized_topic() -> Topic {
        let name = TopicName::new("orders").unwrap();
        let resize = Resize { from: 4, to: 6, began: Timestamp::from_millis(1000), last_ids: None };
        Topic { partitions: 6, resizes: vec![resize], ..Topic::plain(name, Layout::Partitioned) }
    }

    fn item(hash: u8, ms: u64, received_at: Instant) -> InFlightMessage {
        let delivery = DeliveredEntry {
            id: EntryId::new(ms, 0),
            fields: Fields::new([("a", "b")]),
            deliveries: 1,
        };
        InFlightMessage {
            delivery,
            failures: 0,
            key: Some(Bytes::copy_from_slice(&[hash])),
            received_at,
        }
    }

    fn barriers(topic: Topic) -> Barriers {
        Barriers::new(MessageOrder::PerKey, Arc::new(topic))
    }

    #[test]
    fn only_moved_keys_are_blocked_and_only_by_their_old_partition() {
        let barriers = barriers(resized_topic());
        let now = Instant::now();
        // 65 = 1 of 4, 5 of 6. 72 = 0 of 4, 0 of 6. 69 = 1 of 4, 3 of 6.
        let barrier = |old| Some(Barrier::Resize { began_ms: 1000, old });
        assert_eq!(barriers.blocking(&item(65, 2000, now), 5), barrier(1));
        assert_eq!(barriers.blocking(&item(69, 2000, now), 3), barrier(1));
        assert_eq!(barriers.blocking(&item(72, 2000, now), 0), None);
        assert_eq!(barriers.blocking(&item(65, 2000, now), 1), None, "it is in its old partition");
        assert_eq!(barriers.blocking(&item(69, 999, now), 3), None, "sent before the resize began");
        barriers.open(Barrier::Resize { began_ms: 1000, old: 1 });
        assert_eq!(barriers.blocking(&item(65, 2000, now), 5), None);
    }

    #[test]
    fn a_key_that_does_not_hash_to_its_partition_waits_for_a_topic_refresh() {
        let name = TopicName::new("orders").unwrap();
        let before = Topic { partitions: 4, ..Topic::plain(name, Layout::Partitioned) };
        let barriers = barriers(before.clone());
        let received_at = Instant::now() + std::time::Duration::from_secs(1);
        assert_eq!(barriers.blocking(&item(69, 2000, received_at), 3), Some(Barrier::TopicRefresh));
        assert_eq!(barriers.blocking(&item(69, 2000, received_at), 1), None);
        // The topic is unchanged: the producer chose the partition.
        barriers.update_topic(Arc::new(before), received_at);
        assert_eq!(barriers.blocking(&item(69, 2000, received_at), 3), None);
        let later = received_at + std::time::Duration::from_secs(1);
        assert_eq!(barriers.blocking(&item(69, 3000, later), 3), None, "it is remembered");
        assert_eq!(
            barriers.blocking(&item(69, 3000, later), 2),
            Some(Barrier::TopicRefresh),
            "in another partition"
        );
        assert_eq!(
            barriers.blocking(&item(73, 3000, later), 3),
            Some(Barrier::TopicRefresh),
            "another key"
        );
        // The topic was resized.
        barriers.update_topic(Arc::new(resized_topic()), received_at);
        let barrier = Barrier::Resize { began_ms: 1000, old: 1 };
        assert_eq!(barriers.blocking(&item(69, 2000, received_at), 3), Some(barrier));
    }

    #[test]
    fn a_resize_is_dropped_when_all_its_barriers_are_open() {
        let barriers = barriers(resized_topic());
        let now = Instant::now();
        let resize = resized_topic().resizes.remove(0);
        assert_eq!(barriers.closed(&resize).len(), 4);
        for old in 0..4 {
            assert_eq!(barriers.lock().resizes.len(), 1);
            barriers.open(Barrier::Resize { began_ms: 1000, old });
        }
        assert!(barriers.lock().resizes.is_empty() && barriers.lock().open.is_empty());
        barriers.update_topic(Arc::new(resized_topic()), now);
        assert!(
            barriers.lock().resizes.is_empty(),
            "reading the same topic again does not bring it back"
        );
        assert_eq!(barriers.blocking(&item(65, 2000, now), 5), None);
        // A later resize has its own barriers.
        let mut resized_again = resized_topic();
        let began = Timestamp::from_millis(5000);
        resized_again.resizes.push(Resize { from: 6, to: 8, began, last_ids: None });
        resized_again.partitions = 8;
        barriers.update_topic(Arc::new(resized_again), now);
        assert_eq!(barriers.lock().resizes.len(), 1);
        // 70 = 4 of 6, 6 of 8.
        let barrier = Barrier::Resize { began_ms: 5000, old: 4 };
        assert_eq!(barriers.blocking(&item(70, 6000, now), 6), Some(barrier));
    }

    #[test]
    fn two_keys_that_swap_partitions_do_not_block_each_other() {
        // 69: from 1 to 3. 67: from 3 to 1. Each waits for the other's partition, but not for moved messages there.
        let resize = &resized_topic().resizes[0];
        assert!(is_moved_by(resize, Some(&[69]), 3));
        assert!(is_moved_by(resize, Some(&[67]), 1));
        assert!(!is_moved_by(resize, Some(&[65]), 1), "an old message of its key blocks");
        assert!(!is_moved_by(resize, None, 1));
    }

    #[test]
    fn with_relaxed_order_no_message_is_blocked() {
        let barriers = Barriers::new(MessageOrder::Relaxed, Arc::new(resized_topic()));
        assert_eq!(barriers.blocking(&item(65, 2000, Instant::now()), 5), None);
    }
}
