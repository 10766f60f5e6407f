//! Key queues: the in-flight messages of one partition, and which of them may be handled now.
//!
//! Upstream: `partition_state` adds what was read. Downstream: it hands what is ready to handlers.
//! Guarantees: messages leave in the order they arrived; with [`MessageOrder::PerKey`], one message per key is handled at
//! a time and later ones of the key stay queued behind it until it is completed. A message without a key never waits.
//! Not here: time and tasks. This is plain data.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use bytes::Bytes;
use headwater_stream::{DeliveredEntry, EntryId, Fields};
use tokio::time::Instant;

use crate::config::MessageOrder;
use crate::message::KEY;

/// A message that was delivered to this consumer and is not settled.
#[derive(Clone, Debug)]
pub(super) struct InFlightMessage {
    pub(super) delivery: DeliveredEntry,
    /// Failed attempts in place.
    pub(super) failures: u32,
    /// The key it blocks, with [`MessageOrder::PerKey`].
    pub(super) key: Option<Bytes>,
    pub(super) received_at: Instant,
}

/// The key of an entry.
fn key_of(fields: &Fields) -> Option<Bytes> {
    let mut slices = fields.slices();
    let (_, key) = slices.find(|(name, _)| *name == KEY.as_bytes())?;
    Some(fields.share(key))
}

impl InFlightMessage {
    /// Keeps only the id and the key; the entry is read again before it is handled.
    fn drop_payload(&mut self) {
        // Copied: a slice would keep the whole buffer alive.
        self.key = self.key.as_deref().map(Bytes::copy_from_slice);
        self.delivery.fields = Fields::new::<Bytes, Bytes>([]);
    }

    /// Whether its payload was dropped: a stored entry has at least one field.
    fn is_evicted(&self) -> bool {
        self.delivery.fields.is_empty()
    }
}

#[derive(Debug)]
pub(super) struct KeyQueues {
    order: MessageOrder,
    ready: VecDeque<InFlightMessage>,
    /// Keys with a message that is ready, being handled, in backoff or blocked; and the messages queued behind it.
    busy_keys: HashMap<Bytes, VecDeque<InFlightMessage>>,
    /// Messages queued behind others.
    queued_behind: usize,
    /// Failed messages that wait for their next attempt.
    in_backoff: HashMap<EntryId, InFlightMessage>,
    /// Messages behind a barrier: older messages of their key are in another partition.
    blocked: HashMap<EntryId, InFlightMessage>,
    blocked_keys: HashSet<Bytes>,
    /// Blocked messages and those queued behind them.
    blocked_count: usize,
    /// Payloads of blocked messages beyond this number are dropped.
    blocked_max: usize,
    /// Messages whose turn it is and whose payload has to be read again.
    evicted: BTreeMap<EntryId, InFlightMessage>,
}

impl KeyQueues {
    pub(super) fn new(order: MessageOrder, blocked_max: usize) -> Self {
        Self {
            order,
            ready: VecDeque::new(),
            busy_keys: HashMap::new(),
            queued_behind: 0,
            in_backoff: HashMap::new(),
            blocked: HashMap::new(),
            blocked_keys: HashSet::new(),
            blocked_count: 0,
            blocked_max,
            evicted: BTreeMap::new(),
        }
    }

    pub(super) fn add(&mut self, delivery: DeliveredEntry, received_at: Instant) {
        let key = match self.order {
            MessageOrder::Relaxed => None,
            MessageOrder::PerKey => key_of(&delivery.fields),
        };
        let mut item = InFlightMessage { delivery, failures: 0, key, received_at };
        if let Some(key) = &item.key {
            if let Some(queue) = self.busy_keys.get_mut(key) {
                if self.blocked_keys.contains(key) {
                    self.blocked_count += 1;
                    if self.blocked_count > self.blocked_max {
                        item.drop_payload();
                    }
                }
                queue.push_back(item);
                self.queued_behind += 1;
                return;
            }
            self.busy_keys.insert(key.clone(), VecDeque::new());
        }
        self.ready.push_back(item);
    }

    /// The next message to handle.
    pub(super) fn next(&mut self) -> Option<InFlightMessage> {
        loop {
            let item = self.ready.pop_front()?;
            if !item.is_evicted() {
                return Some(item);
            }
            self.evicted.insert(item.delivery.id, item);
        }
    }

    /// The first ids whose payload has to be read again.
    pub(super) fn evicted(&self, count: usize) -> Vec<EntryId> {
        self.evicted.keys().take(count).copied().collect()
    }

    /// Restores an evicted payload, so that the message is ready; `None` removes it because the entry is gone. Returns
    /// whether it was removed.
    pub(super) fn restore(&mut self, id: EntryId, fields: Option<Fields>) -> bool {
        let Some(mut item) = self.evicted.remove(&id) else { return false };
        match fields {
            Some(fields) => {
                item.delivery.fields = fields;
                self.ready.push_back(item);
                false
            }
            None => {
                self.complete(item.key.as_ref());
                true
            }
        }
    }

    /// A message of this key is completed: the next one of the key is ready.
    pub(super) fn complete(&mut self, key: Option<&Bytes>) {
        let Some(key) = key else { return };
        match self.busy_keys.get_mut(key).map(VecDeque::pop_front) {
            Some(Some(next)) => {
                self.queued_behind -= 1;
                self.ready.push_back(next);
            }
            Some(None) => {
                self.busy_keys.remove(key);
            }
            None => {}
        }
    }

    /// A message failed: it and its key wait until [`Self::end_backoff`].
    pub(super) fn start_backoff(&mut self, item: InFlightMessage) {
        self.in_backoff.insert(item.delivery.id, item);
    }

    pub(super) fn in_backoff(&self, id: EntryId) -> Option<&InFlightMessage> {
        self.in_backoff.get(&id)
    }

    /// Makes a message in backoff ready again, before all others. Returns whether it was in backoff.
    pub(super) fn end_backoff(&mut self, id: EntryId, deliveries: u64) -> bool {
        let Some(mut item) = self.in_backoff.remove(&id) else { return false };
        item.delivery.deliveries = deliveries;
        self.ready.push_front(item);
        true
    }

    /// Blocks a message at a barrier, and its key with it.
    pub(super) fn block(&mut self, mut item: InFlightMessage) {
        self.blocked_count += 1 + self.queued_behind(&item);
        if self.blocked_count > self.blocked_max {
            item.drop_payload();
            // Re-inserted under the copied key: the old one would keep the buffer of the payload alive.
            if let Some(key) = &item.key
                && let Some(queue) = self.busy_keys.remove(key)
            {
                self.busy_keys.insert(key.clone(), queue);
            }
        }
        self.blocked_keys.extend(item.key.clone());
        self.blocked.insert(item.delivery.id, item);
    }

    /// How many messages are queued behind this one.
    fn queued_behind(&self, item: &InFlightMessage) -> usize {
        item.key.as_ref().and_then(|key| self.busy_keys.get(key)).map_or(0, VecDeque::len)
    }

    /// Makes messages whose barrier is open ready, in the order of their ids. Returns how many.
    pub(super) fn unblock(&mut self, is_open: impl Fn(&InFlightMessage) -> bool) -> usize {
        let mut open: Vec<EntryId> =
            self.blocked.iter().filter(|(_, item)| is_open(item)).map(|(id, _)| *id).collect();
        open.sort_unstable();
        for id in &open {
            let Some(item) = self.blocked.remove(id) else { continue };
            self.blocked_count -= 1 + self.queued_behind(&item);
            item.key.iter().for_each(|key| {
                self.blocked_keys.remove(key);
            });
            self.ready.push_back(item);
        }
        open.len()
    }

    pub(super) fn blocked(&self) -> impl Iterator<Item = &InFlightMessage> {
        self.blocked.values()
    }

    /// How many messages are blocked, including those queued behind a blocked one.
    pub(super) fn blocked_len(&self) -> usize {
        self.blocked_count
    }

    pub(super) fn ready_len(&self) -> usize {
        self.ready.len()
    }

    /// All messages except those being handled.
    pub(super) fn len(&self) -> usize {
        let waiting = self.in_backoff.len() + self.blocked.len() + self.evicted.len();
        self.ready.len() + self.queued_behind + waiting
    }

    /// All messages except those being handled, in no particular order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &InFlightMessage> {
        let queued = self.busy_keys.values().flatten();
        let waiting =
            self.in_backoff.values().chain(self.blocked.values()).chain(self.evicted.values());
        self.ready.iter().chain(queued).chain(waiting)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = EntryId> {
        self.iter().map(|item| item.delivery.id)
    }

    /// Removes everything and returns the ids, in no particular order.
    pub(super) fn clear(&mut self) -> Vec<EntryId> {
        let ids = self.ids().collect();
        *self = Self::new(self.order, self.blocked_max);
        ids
    }

    /// Removes everything and returns the deliveries, in no particular order, except those whose payload was dropped.
    pub(super) fn take_all(&mut self) -> Vec<DeliveredEntry> {
        let with_payload = self.iter().filter(|item| !item.is_evicted());
        let all = with_payload.map(|item| item.delivery.clone()).collect();
        *self = Self::new(self.order, self.blocked_max);
        all
    }

    /// Removes these messages. Returns how many there were.
    pub(super) fn remove(&mut self, gone: &HashSet<EntryId>) -> usize {
        let before = self.len();
        let stays = |item: &InFlightMessage| !gone.contains(&item.delivery.id);
        for queue in self.busy_keys.values_mut() {
            queue.retain(stays);
        }
        self.queued_behind = self.busy_keys.values().map(VecDeque::len).sum();
        // Removing the head of a key's queue makes the next message ready.
        let mut heads = Vec::new();
        self.ready.retain(|item| stays(item) || !push_head(&mut heads, item));
        self.in_backoff.retain(|_, item| stays(item) || !push_head(&mut heads, item));
        self.blocked.retain(|_, item| stays(item) || !push_head(&mut heads, item));
        self.evicted.retain(|_, item| stays(item) || !push_head(&mut heads, item));
        let removed = before - self.len();
        for key in heads {
            self.complete(key.as_ref());
        }
        self.blocked_keys = self.blocked.values().filter_map(|item| item.key.clone()).collect();
        self.blocked_count = self.blocked.values().map(|item| 1 + self.queued_behind(item)).sum();
        removed
    }
}

fn push_head(heads: &mut Vec<Option<Bytes>>, item: &InFlightMessage) -> bool {
    heads.push(item.key.clone());
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delivery(n: u64, key: Option<&str>) -> DeliveredEntry {
        let mut pairs = vec![("payload", "x".to_owned())];
        pairs.extend(key.map(|key| (KEY, key.to_owned())));
        DeliveredEntry { id: EntryId::new(n, 0), fields: Fields::new(pairs), deliveries: 1 }
    }

    fn queues(order: MessageOrder, keys: &[Option<&str>]) -> KeyQueues {
        let mut queues = KeyQueues::new(order, 100);
        for (n, key) in keys.iter().enumerate() {
            queues.add(delivery(n as u64, *key), Instant::now());
        }
        queues
    }

    fn ready(queues: &mut KeyQueues) -> Vec<u64> {
        std::iter::from_fn(|| queues.next()).map(|item| item.delivery.id.ms).collect()
    }

    #[test]
    fn with_relaxed_order_all_messages_are_ready_at_once() {
        let mut queues = queues(MessageOrder::Relaxed, &[Some("a"), Some("a"), None]);
        assert_eq!(ready(&mut queues), [0, 1, 2]);
        assert_eq!(queues.len(), 0);
    }

    #[test]
    fn one_message_per_key_is_ready_and_the_next_follows_when_it_completes() {
        let mut queues =
            queues(MessageOrder::PerKey, &[Some("a"), Some("a"), Some("b"), None, None]);
        assert_eq!(ready(&mut queues), [0, 2, 3, 4]);
        queues.complete(None);
        assert!(ready(&mut queues).is_empty());
        let a = Bytes::from_static(b"a");
        queues.complete(Some(&a));
        assert_eq!(ready(&mut queues), [1]);
        queues.complete(Some(&a));
        queues.add(delivery(9, Some("a")), Instant::now());
        assert_eq!(ready(&mut queues), [9]);
    }

    #[test]
    fn a_key_waits_while_its_message_is_in_backoff_and_other_keys_continue() {
        let mut queues =
            queues(MessageOrder::PerKey, &[Some("a"), Some("a"), Some("b"), Some("b")]);
        let first = queues.next().unwrap();
        queues.start_backoff(first);
        assert_eq!(ready(&mut queues), [2]);
        queues.complete(Some(&Bytes::from_static(b"b")));
        assert!(queues.end_backoff(EntryId::new(0, 0), 2));
        assert_eq!(ready(&mut queues), [0, 3]);
        assert_eq!(queues.len(), 1);
        assert!(!queues.end_backoff(EntryId::new(0, 0), 3));
    }

    #[test]
    fn blocked_messages_become_ready_in_order_when_their_barrier_opens() {
        let mut queues = queues(MessageOrder::PerKey, &[Some("a"), Some("b"), Some("c")]);
        while let Some(item) = queues.next() {
            queues.block(item);
        }
        assert_eq!(queues.unblock(|item| item.key.as_deref() != Some(b"b")), 2);
        assert_eq!(ready(&mut queues), [0, 2]);
        assert_eq!((queues.blocked_len(), queues.len()), (1, 1));
    }

    #[test]
    fn messages_queued_behind_a_blocked_message_count_as_blocked() {
        let mut queues =
            queues(MessageOrder::PerKey, &[Some("a"), Some("a"), Some("b"), Some("b")]);
        let a = queues.next().unwrap();
        queues.block(a);
        assert_eq!(queues.blocked_len(), 2);
        queues.add(delivery(4, Some("a")), Instant::now());
        queues.add(delivery(5, Some("b")), Instant::now());
        assert_eq!(queues.blocked_len(), 3);
        let b = queues.next().unwrap();
        queues.block(b);
        assert_eq!(queues.blocked_len(), 6);
        queues.remove(&[EntryId::new(4, 0), EntryId::new(2, 0)].into());
        assert_eq!(queues.blocked_len(), 2, "the next message of its key is ready instead");
        assert_eq!(queues.unblock(|_| true), 1);
        assert_eq!(queues.blocked_len(), 0);
    }

    #[test]
    fn payloads_of_blocked_messages_beyond_the_limit_are_dropped_until_their_turn() {
        let mut queues = queues(MessageOrder::PerKey, &[Some("a"), Some("b"), Some("b")]);
        queues.blocked_max = 1;
        while let Some(item) = queues.next() {
            queues.block(item);
        }
        queues.add(delivery(3, Some("a")), Instant::now());
        assert_eq!((queues.blocked_len(), queues.len()), (4, 4));
        assert_eq!(queues.unblock(|_| true), 2);
        // Messages blocked within the limit keep their payload, and so does what was queued behind them then.
        assert_eq!(ready(&mut queues), [0]);
        assert_eq!(queues.evicted(10), [EntryId::new(1, 0)]);
        assert!(!queues.restore(EntryId::new(1, 0), Some(delivery(1, Some("b")).fields)));
        assert_eq!(ready(&mut queues), [1]);
        queues.complete(Some(&Bytes::from_static(b"b")));
        assert_eq!(ready(&mut queues), [2]);
        queues.complete(Some(&Bytes::from_static(b"a")));
        assert!(ready(&mut queues).is_empty());
        assert_eq!((queues.evicted(10), queues.len()), (vec![EntryId::new(3, 0)], 1));
        assert!(queues.restore(EntryId::new(3, 0), None), "the entry is gone");
        assert_eq!(queues.len(), 0);
        queues.add(delivery(4, Some("a")), Instant::now());
        assert_eq!(ready(&mut queues), [4], "its key is free again");
    }

    #[test]
    fn removing_a_message_makes_the_next_of_its_key_ready() {
        let keys = [Some("a"), Some("a"), Some("a"), Some("b"), None];
        let mut queues = queues(MessageOrder::PerKey, &keys);
        let gone = [0, 1, 4].map(|n| EntryId::new(n, 0)).into();
        assert_eq!(queues.remove(&gone), 3);
        assert_eq!(ready(&mut queues), [3, 2]);
    }

    #[test]
    fn clear_returns_the_ids_of_all_messages() {
        let mut queues =
            queues(MessageOrder::PerKey, &[Some("a"), Some("a"), Some("b"), Some("c"), None]);
        let (a, b) = (queues.next().unwrap(), queues.next().unwrap());
        queues.start_backoff(a);
        queues.block(b);
        let mut ids: Vec<u64> = queues.clear().iter().map(|id| id.ms).collect();
        ids.sort_unstable();
        assert_eq!(ids, [0, 1, 2, 3, 4]);
        assert_eq!(queues.len(), 0);
    }
}
