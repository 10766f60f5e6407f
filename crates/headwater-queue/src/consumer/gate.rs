//! Gates keep the order of a key while its topic grows: a message in the key's new partition waits until the group is
//! done with the key's older messages in the old one.
//!
//! Upstream: `worker` asks for each message, with [`Order::PerKey`](crate::Order::PerKey). Downstream: `gatekeeper` finds out
//! which gates may open.
//! Promises: a message that was sent before a growth never waits for it, and one that was sent after it waits for
//! nothing but messages that were not moved by it; so nobody waits in a circle. A message whose key does not belong to
//! its partition, as far as we know, waits until we have looked whether the topic grew.
//! Not here: messages whose sender chose the partition itself. Their keys have no partition of their own.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use headwater_stream::EntryId;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::lanes::Item;
use crate::config::Order;
use crate::partitioner::hash_partition;
use crate::topic::{Growth, Partition, Topic};

/// What a message waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Gate {
    /// The messages of this partition from before the growth that began at this time.
    Growth { began_ms: u64, old: Partition },
    /// News of the topic.
    News,
}

/// The gates of a subscription.
pub(super) struct Gates {
    /// False where no message ever waits.
    is_ordered: bool,
    state: Mutex<State>,
    /// Somebody waits.
    pub(super) waiting: Notify,
}

struct State {
    topic: Arc<Topic>,
    /// When we last knew that the topic is as it is.
    known_at: Instant,
    /// Growths of which not all gates are open yet.
    growths: Vec<Growth>,
    /// When those began of which all are.
    over: HashSet<u64>,
    /// Open gates of growths that are not over.
    open: HashSet<Gate>,
    /// Keys that were found where they do not belong, with no growth to explain it: their sender chooses the partition
    /// itself, so there is no news to wait for with each of their messages.
    placed: HashSet<(Partition, Bytes)>,
}

/// Keys that are remembered as placed by their sender; beyond it, all are asked for again.
const PLACED_MAX: usize = 10_000;

impl Gates {
    pub(super) fn new(order: Order, topic: Arc<Topic>) -> Self {
        let state = State {
            growths: topic.growths.clone(),
            topic,
            known_at: Instant::now(),
            over: HashSet::new(),
            open: HashSet::new(),
            placed: HashSet::new(),
        };
        Self {
            is_ordered: order == Order::PerKey,
            state: Mutex::new(state),
            waiting: Notify::new(),
        }
    }

    /// The topic was so at this time, or later.
    pub(super) fn learn(&self, topic: Arc<Topic>, known_at: Instant) {
        let mut state = self.lock();
        if is_news(&topic, &state.topic) {
            if topic.created_at != state.topic.created_at
                || topic.growths.len() != state.topic.growths.len()
            {
                state.placed.clear();
            }
            let is_over = |growth: &Growth| state.over.contains(&growth.began.as_millis());
            state.growths =
                topic.growths.iter().filter(|growth| !is_over(growth)).cloned().collect();
            state.topic = topic;
        }
        state.known_at = state.known_at.max(known_at);
    }

    /// What a message waits for; `None` if it may be handled.
    pub(super) fn before(&self, item: &Item, partition: Partition) -> Option<Gate> {
        if !self.is_ordered {
            return None;
        }
        let bytes = item.key.as_ref()?;
        let key = std::str::from_utf8(bytes).ok()?;
        let mut state = self.lock();
        let topic = &state.topic;
        // The newest growth first: it is the one most likely to be under way.
        for growth in state.growths.iter().rev() {
            if let Some(gate) = gate_of(growth, key, item.delivery.id, partition)
                && !state.open.contains(&gate)
            {
                return Some(gate);
            }
        }
        // Before the topic grew, perhaps, and then it lies where it always did.
        let belongs = |partitions: u16| hash_partition(key, partitions) == partition;
        let is_at_home =
            belongs(topic.partitions) || topic.growths.iter().any(|growth| belongs(growth.from));
        if is_at_home {
            return None;
        }
        let place = (partition, bytes.clone());
        if state.placed.contains(&place) {
            return None;
        }
        if state.known_at < item.came_at {
            return Some(Gate::News);
        }
        if state.placed.len() >= PLACED_MAX {
            state.placed.clear();
        }
        state.placed.insert(place);
        None
    }

    /// The messages this gate kept back may pass, and all that come later.
    pub(super) fn open(&self, gate: Gate) {
        let mut state = self.lock();
        state.open.insert(gate);
        // A growth of which all gates are open is looked at no more: it would cost every message a moment for ever.
        let State { growths, over, open, .. } = &mut *state;
        growths.retain(|growth| {
            let is_over = shut_gates(growth, open).next().is_none();
            if is_over {
                over.insert(growth.began.as_millis());
            }
            !is_over
        });
        open.retain(|gate| match gate {
            Gate::Growth { began_ms, .. } => !over.contains(began_ms),
            Gate::News => false,
        });
    }

    /// The gates of a growth that are not open yet.
    pub(super) fn shut(&self, growth: &Growth) -> Vec<Gate> {
        let state = self.lock();
        match state.over.contains(&growth.began.as_millis()) {
            true => Vec::new(),
            false => shut_gates(growth, &state.open).collect(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no code panics while it holds the gates")
    }
}

fn shut_gates<'a>(growth: &Growth, open: &'a HashSet<Gate>) -> impl Iterator<Item = Gate> + 'a {
    let began_ms = growth.began.as_millis();
    (0..growth.from)
        .map(move |old| Gate::Growth { began_ms, old })
        .filter(|gate| !open.contains(gate))
}

/// Whether this is not older than what we know. Growths are only added, and settled, while a topic lives.
fn is_news(topic: &Topic, known: &Topic) -> bool {
    let age = |topic: &Topic| {
        let settled = topic.growths.iter().filter(|growth| growth.last_ids.is_some()).count();
        (topic.growths.len(), settled)
    };
    topic.created_at != known.created_at || age(topic) >= age(known)
}

/// The gate before a message, if the growth moved its key here.
fn gate_of(growth: &Growth, key: &str, id: EntryId, partition: Partition) -> Option<Gate> {
    let began_ms = growth.began.as_millis();
    let old = hash_partition(key, growth.from);
    let is_moved = old != partition && hash_partition(key, growth.to) == partition;
    (is_moved && id.ms >= began_ms).then_some(Gate::Growth { began_ms, old })
}

/// Whether a growth moved this key away from the partition it lies in: then it waits there for others itself.
pub(super) fn is_moved_by(growth: &Growth, key: Option<&[u8]>, partition: Partition) -> bool {
    let key = key.and_then(|key| std::str::from_utf8(key).ok());
    key.is_some_and(|key| hash_partition(key, growth.from) != partition)
}

#[cfg(test)]
mod tests {
    use headwater_stream::clock::Timestamp;
    use headwater_stream::{Delivery, Fields};

    use super::*;
    use crate::keys::Layout;
    use crate::topic::TopicName;

    /// From 4 to 6 partitions, at millisecond 1000. Keys are single characters, whose hash is their number.
    fn grown() -> Topic {
        let name = TopicName::new("orders").unwrap();
        let growth = Growth { from: 4, to: 6, began: Timestamp::from_millis(1000), last_ids: None };
        Topic { partitions: 6, growths: vec![growth], ..Topic::plain(name, Layout::Partitioned) }
    }

    fn item(hash: u8, ms: u64, came_at: Instant) -> Item {
        let delivery =
            Delivery { id: EntryId::new(ms, 0), fields: Fields::new([("a", "b")]), deliveries: 1 };
        Item { delivery, failures: 0, key: Some(Bytes::copy_from_slice(&[hash])), came_at }
    }

    fn gates(topic: Topic) -> Gates {
        Gates::new(Order::PerKey, Arc::new(topic))
    }

    #[test]
    fn only_keys_that_moved_wait_and_only_behind_their_old_partition() {
        let gates = gates(grown());
        let now = Instant::now();
        // 65 = 1 of 4, 5 of 6. 72 = 0 of 4, 0 of 6. 69 = 1 of 4, 3 of 6.
        let growth = |old| Some(Gate::Growth { began_ms: 1000, old });
        assert_eq!(gates.before(&item(65, 2000, now), 5), growth(1));
        assert_eq!(gates.before(&item(69, 2000, now), 3), growth(1));
        assert_eq!(gates.before(&item(72, 2000, now), 0), None);
        assert_eq!(gates.before(&item(65, 2000, now), 1), None, "it lies in its old partition");
        assert_eq!(gates.before(&item(69, 999, now), 3), None, "sent before the growth began");
        gates.open(Gate::Growth { began_ms: 1000, old: 1 });
        assert_eq!(gates.before(&item(65, 2000, now), 5), None);
    }

    #[test]
    fn a_key_that_does_not_belong_where_it_lies_waits_for_news() {
        let name = TopicName::new("orders").unwrap();
        let before = Topic { partitions: 4, ..Topic::plain(name, Layout::Partitioned) };
        let gates = gates(before.clone());
        let came_at = Instant::now() + std::time::Duration::from_secs(1);
        assert_eq!(gates.before(&item(69, 2000, came_at), 3), Some(Gate::News));
        assert_eq!(gates.before(&item(69, 2000, came_at), 1), None);
        // Nothing new: the sender chose the partition itself.
        gates.learn(Arc::new(before), came_at);
        assert_eq!(gates.before(&item(69, 2000, came_at), 3), None);
        let later = came_at + std::time::Duration::from_secs(1);
        assert_eq!(gates.before(&item(69, 3000, later), 3), None, "nor will it next time");
        assert_eq!(gates.before(&item(69, 3000, later), 2), Some(Gate::News), "but elsewhere");
        assert_eq!(gates.before(&item(73, 3000, later), 3), Some(Gate::News), "or another key");
        // It grew.
        gates.learn(Arc::new(grown()), came_at);
        let gate = Gate::Growth { began_ms: 1000, old: 1 };
        assert_eq!(gates.before(&item(69, 2000, came_at), 3), Some(gate));
    }

    #[test]
    fn a_growth_is_forgotten_when_all_its_gates_are_open() {
        let gates = gates(grown());
        let now = Instant::now();
        let growth = grown().growths.remove(0);
        assert_eq!(gates.shut(&growth).len(), 4);
        for old in 0..4 {
            assert_eq!(gates.lock().growths.len(), 1);
            gates.open(Gate::Growth { began_ms: 1000, old });
        }
        assert!(gates.lock().growths.is_empty() && gates.lock().open.is_empty());
        gates.learn(Arc::new(grown()), now);
        assert!(gates.lock().growths.is_empty(), "the same news do not bring it back");
        assert_eq!(gates.before(&item(65, 2000, now), 5), None);
        // Another one is another one.
        let mut again = grown();
        let began = Timestamp::from_millis(5000);
        again.growths.push(Growth { from: 6, to: 8, began, last_ids: None });
        again.partitions = 8;
        gates.learn(Arc::new(again), now);
        assert_eq!(gates.lock().growths.len(), 1);
        // 70 = 4 of 6, 6 of 8.
        let gate = Gate::Growth { began_ms: 5000, old: 4 };
        assert_eq!(gates.before(&item(70, 6000, now), 6), Some(gate));
    }

    #[test]
    fn two_that_were_moved_past_each_other_do_not_wait_for_each_other() {
        // 69: from 1 to 3. 67: from 3 to 1. Each waits for the other's partition, but not for a moved message there.
        let growth = &grown().growths[0];
        assert!(is_moved_by(growth, Some(&[69]), 3));
        assert!(is_moved_by(growth, Some(&[67]), 1));
        assert!(!is_moved_by(growth, Some(&[65]), 1), "an old message of its key is waited for");
        assert!(!is_moved_by(growth, None, 1));
    }

    #[test]
    fn without_order_nobody_waits() {
        let gates = Gates::new(Order::Relaxed, Arc::new(grown()));
        assert_eq!(gates.before(&item(65, 2000, Instant::now()), 5), None);
    }
}
