//! Messages of one partition that are in hand, and which of them may be handled now.
//!
//! Upstream: `worker` puts in what was read. Downstream: its runners take out what is ready.
//! Promises: messages come out in the order they came in; with [`Order::PerKey`], one of a key at a time, and the key's
//! later ones stay behind it until it has ended. A message without a key waits for nobody.
//! Not here: time and tasks. This is plain data, under the lock of its worker.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use bytes::Bytes;
use headwater_stream::{Delivery, EntryId, Fields};
use tokio::time::Instant;

use crate::config::Order;
use crate::message::KEY;

/// A message in hand.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) delivery: Delivery,
    /// How often it failed here, in its lane.
    pub(super) failures: u32,
    /// The lane it holds up, with [`Order::PerKey`].
    pub(super) key: Option<Bytes>,
    /// When it came.
    pub(super) came_at: Instant,
}

/// What decides the order of an entry.
fn key_of(fields: &Fields) -> Option<Bytes> {
    let mut slices = fields.slices();
    let (_, key) = slices.find(|(name, _)| *name == KEY.as_bytes())?;
    Some(fields.share(key))
}

impl Item {
    /// Keeps nothing but what is needed to wait, and to be read again.
    fn strip(&mut self) {
        // Copied: a part of the bytes would keep all of them.
        self.key = self.key.as_deref().map(Bytes::copy_from_slice);
        self.delivery.fields = Fields::new::<Bytes, Bytes>([]);
    }

    /// Whether it is to be read again before it can be handled: an entry has at least one field.
    fn is_bare(&self) -> bool {
        self.delivery.fields.is_empty()
    }
}

#[derive(Debug)]
pub(super) struct Lanes {
    order: Order,
    ready: VecDeque<Item>,
    /// Keys of which one message is ready, handled, resting or held; and those that wait behind it.
    busy: HashMap<Bytes, VecDeque<Item>>,
    /// How many wait behind others.
    behind: usize,
    /// Those that failed and wait for their next try.
    resting: HashMap<EntryId, Item>,
    /// Those that wait for older messages of their key in another partition.
    held: HashMap<EntryId, Item>,
    /// The keys of those, and how many messages they keep waiting, themselves included.
    held_keys: HashSet<Bytes>,
    held_up: usize,
    /// Of those that are held up beyond this number, only the ids are kept.
    held_max: usize,
    /// Those whose turn it is, and which are to be read again.
    absent: BTreeMap<EntryId, Item>,
}

impl Lanes {
    pub(super) fn new(order: Order, held_max: usize) -> Self {
        Self {
            order,
            ready: VecDeque::new(),
            busy: HashMap::new(),
            behind: 0,
            resting: HashMap::new(),
            held: HashMap::new(),
            held_keys: HashSet::new(),
            held_up: 0,
            held_max,
            absent: BTreeMap::new(),
        }
    }

    /// Takes a message in.
    pub(super) fn add(&mut self, delivery: Delivery, came_at: Instant) {
        let key = match self.order {
            Order::Relaxed => None,
            Order::PerKey => key_of(&delivery.fields),
        };
        let mut item = Item { delivery, failures: 0, key, came_at };
        if let Some(key) = &item.key {
            if let Some(lane) = self.busy.get_mut(key) {
                if self.held_keys.contains(key) {
                    self.held_up += 1;
                    if self.held_up > self.held_max {
                        item.strip();
                    }
                }
                lane.push_back(item);
                self.behind += 1;
                return;
            }
            self.busy.insert(key.clone(), VecDeque::new());
        }
        self.ready.push_back(item);
    }

    /// The next message to handle.
    pub(super) fn next(&mut self) -> Option<Item> {
        loop {
            let item = self.ready.pop_front()?;
            if !item.is_bare() {
                return Some(item);
            }
            self.absent.insert(item.delivery.id, item);
        }
    }

    /// The first of those that are to be read again.
    pub(super) fn absent(&self, count: usize) -> Vec<EntryId> {
        self.absent.keys().take(count).copied().collect()
    }

    /// One of them was read again and is ready; or it is there no more, then it is taken out. Returns whether it was.
    pub(super) fn fill(&mut self, id: EntryId, fields: Option<Fields>) -> bool {
        let Some(mut item) = self.absent.remove(&id) else { return false };
        match fields {
            Some(fields) => {
                item.delivery.fields = fields;
                self.ready.push_back(item);
                false
            }
            None => {
                self.ended(item.key.as_ref());
                true
            }
        }
    }

    /// A message of this key has ended: the next one is ready.
    pub(super) fn ended(&mut self, key: Option<&Bytes>) {
        let Some(key) = key else { return };
        match self.busy.get_mut(key).map(VecDeque::pop_front) {
            Some(Some(next)) => {
                self.behind -= 1;
                self.ready.push_back(next);
            }
            Some(None) => {
                self.busy.remove(key);
            }
            None => {}
        }
    }

    /// A message failed: its lane waits until it is woken.
    pub(super) fn rest(&mut self, item: Item) {
        self.resting.insert(item.delivery.id, item);
    }

    /// A message that rests, to be tried again; `None` if it is gone.
    pub(super) fn resting(&self, id: EntryId) -> Option<&Item> {
        self.resting.get(&id)
    }

    /// A message that rested is ready again, before all others.
    pub(super) fn wake(&mut self, id: EntryId, deliveries: u64) -> bool {
        let Some(mut item) = self.resting.remove(&id) else { return false };
        item.delivery.deliveries = deliveries;
        self.ready.push_front(item);
        true
    }

    /// A message waits at a gate, and its lane with it.
    pub(super) fn hold(&mut self, mut item: Item) {
        self.held_up += 1 + self.behind(&item);
        if self.held_up > self.held_max {
            item.strip();
            if let Some(key) = &item.key
                && let Some(lane) = self.busy.remove(key)
            {
                self.busy.insert(key.clone(), lane);
            }
        }
        self.held_keys.extend(item.key.clone());
        self.held.insert(item.delivery.id, item);
    }

    /// How many wait behind this one.
    fn behind(&self, item: &Item) -> usize {
        item.key.as_ref().and_then(|key| self.busy.get(key)).map_or(0, VecDeque::len)
    }

    /// Those whose gate is open now are ready, in the order of their ids.
    pub(super) fn let_through(&mut self, is_open: impl Fn(&Item) -> bool) -> usize {
        let mut open: Vec<EntryId> =
            self.held.iter().filter(|(_, item)| is_open(item)).map(|(id, _)| *id).collect();
        open.sort_unstable();
        for id in &open {
            let Some(item) = self.held.remove(id) else { continue };
            self.held_up -= 1 + self.behind(&item);
            item.key.iter().for_each(|key| {
                self.held_keys.remove(key);
            });
            self.ready.push_back(item);
        }
        open.len()
    }

    /// Those that wait at a gate.
    pub(super) fn held(&self) -> impl Iterator<Item = &Item> {
        self.held.values()
    }

    /// How many wait at a gate, or behind one that does.
    pub(super) fn held_len(&self) -> usize {
        self.held_up
    }

    pub(super) fn ready_len(&self) -> usize {
        self.ready.len()
    }

    /// How many there are, whatever they wait for.
    pub(super) fn len(&self) -> usize {
        self.ready.len() + self.behind + self.resting.len() + self.held.len() + self.absent.len()
    }

    /// The entries of all of them.
    pub(super) fn ids(&self) -> impl Iterator<Item = EntryId> {
        let behind = self.busy.values().flatten();
        let apart = self.resting.values().chain(self.held.values()).chain(self.absent.values());
        self.ready.iter().chain(behind).chain(apart).map(|item| item.delivery.id)
    }

    /// Takes everything out, in no particular order.
    pub(super) fn clear(&mut self) -> Vec<EntryId> {
        let ids = self.ids().collect();
        *self = Self::new(self.order, self.held_max);
        ids
    }

    /// Takes everything out, in no particular order. Of those of which only the id was kept, nothing is left.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Delivery> {
        let Self { ready, busy, resting, held, .. } =
            std::mem::replace(self, Self::new(self.order, self.held_max));
        let behind = busy.into_values().flatten();
        let apart = resting.into_values().chain(held.into_values());
        let all = ready.into_iter().chain(behind).chain(apart);
        all.filter(|item| !item.is_bare()).map(|item| item.delivery)
    }

    /// Takes these out, wherever they wait. Returns how many there were.
    pub(super) fn remove(&mut self, gone: &HashSet<EntryId>) -> usize {
        let before = self.len();
        let stays = |item: &Item| !gone.contains(&item.delivery.id);
        for lane in self.busy.values_mut() {
            lane.retain(stays);
        }
        self.behind = self.busy.values().map(VecDeque::len).sum();
        // Those at the head of a lane let the next one pass.
        let mut heads = Vec::new();
        self.ready.retain(|item| stays(item) || !heads_push(&mut heads, item));
        self.resting.retain(|_, item| stays(item) || !heads_push(&mut heads, item));
        self.held.retain(|_, item| stays(item) || !heads_push(&mut heads, item));
        self.absent.retain(|_, item| stays(item) || !heads_push(&mut heads, item));
        let removed = before - self.len();
        for key in heads {
            self.ended(key.as_ref());
        }
        self.held_keys = self.held.values().filter_map(|item| item.key.clone()).collect();
        self.held_up = self.held.values().map(|item| 1 + self.behind(item)).sum();
        removed
    }
}

fn heads_push(heads: &mut Vec<Option<Bytes>>, item: &Item) -> bool {
    heads.push(item.key.clone());
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delivery(n: u64, key: Option<&str>) -> Delivery {
        let mut pairs = vec![("payload", "x".to_owned())];
        pairs.extend(key.map(|key| (KEY, key.to_owned())));
        Delivery { id: EntryId::new(n, 0), fields: Fields::new(pairs), deliveries: 1 }
    }

    fn lanes(order: Order, keys: &[Option<&str>]) -> Lanes {
        let mut lanes = Lanes::new(order, 100);
        for (n, key) in keys.iter().enumerate() {
            lanes.add(delivery(n as u64, *key), Instant::now());
        }
        lanes
    }

    fn ready(lanes: &mut Lanes) -> Vec<u64> {
        std::iter::from_fn(|| lanes.next()).map(|item| item.delivery.id.ms).collect()
    }

    #[test]
    fn without_order_everything_is_ready_at_once() {
        let mut lanes = lanes(Order::Relaxed, &[Some("a"), Some("a"), None]);
        assert_eq!(ready(&mut lanes), [0, 1, 2]);
        assert_eq!(lanes.len(), 0);
    }

    #[test]
    fn of_each_key_one_is_ready_and_the_next_follows_when_it_ends() {
        let mut lanes = lanes(Order::PerKey, &[Some("a"), Some("a"), Some("b"), None, None]);
        assert_eq!(ready(&mut lanes), [0, 2, 3, 4]);
        lanes.ended(None);
        assert!(ready(&mut lanes).is_empty());
        let a = Bytes::from_static(b"a");
        lanes.ended(Some(&a));
        assert_eq!(ready(&mut lanes), [1]);
        lanes.ended(Some(&a));
        lanes.add(delivery(9, Some("a")), Instant::now());
        assert_eq!(ready(&mut lanes), [9]);
    }

    #[test]
    fn a_lane_rests_while_its_message_does_and_others_go_on() {
        let mut lanes = lanes(Order::PerKey, &[Some("a"), Some("a"), Some("b"), Some("b")]);
        let first = lanes.next().unwrap();
        lanes.rest(first);
        assert_eq!(ready(&mut lanes), [2]);
        lanes.ended(Some(&Bytes::from_static(b"b")));
        assert!(lanes.wake(EntryId::new(0, 0), 2));
        assert_eq!(ready(&mut lanes), [0, 3]);
        assert_eq!(lanes.len(), 1);
        assert!(!lanes.wake(EntryId::new(0, 0), 3));
    }

    #[test]
    fn those_that_wait_at_a_gate_pass_in_order_when_it_opens() {
        let mut lanes = lanes(Order::PerKey, &[Some("a"), Some("b"), Some("c")]);
        while let Some(item) = lanes.next() {
            lanes.hold(item);
        }
        assert_eq!(lanes.let_through(|item| item.key.as_deref() != Some(b"b")), 2);
        assert_eq!(ready(&mut lanes), [0, 2]);
        assert_eq!((lanes.held_len(), lanes.len()), (1, 1));
    }

    #[test]
    fn those_behind_one_that_waits_at_a_gate_wait_there_too() {
        let mut lanes = lanes(Order::PerKey, &[Some("a"), Some("a"), Some("b"), Some("b")]);
        let a = lanes.next().unwrap();
        lanes.hold(a);
        assert_eq!(lanes.held_len(), 2);
        lanes.add(delivery(4, Some("a")), Instant::now());
        lanes.add(delivery(5, Some("b")), Instant::now());
        assert_eq!(lanes.held_len(), 3);
        let b = lanes.next().unwrap();
        lanes.hold(b);
        assert_eq!(lanes.held_len(), 6);
        lanes.remove(&[EntryId::new(4, 0), EntryId::new(2, 0)].into());
        assert_eq!(lanes.held_len(), 2, "the next of its lane is ready instead");
        assert_eq!(lanes.let_through(|_| true), 1);
        assert_eq!(lanes.held_len(), 0);
    }

    #[test]
    fn of_those_beyond_the_limit_only_ids_are_kept_until_their_turn_comes() {
        let mut lanes = lanes(Order::PerKey, &[Some("a"), Some("b"), Some("b")]);
        lanes.held_max = 1;
        while let Some(item) = lanes.next() {
            lanes.hold(item);
        }
        lanes.add(delivery(3, Some("a")), Instant::now());
        assert_eq!((lanes.held_len(), lanes.len()), (4, 4));
        assert_eq!(lanes.let_through(|_| true), 2);
        // Whole is the first of each lane that came before the limit, and what was behind it then.
        assert_eq!(ready(&mut lanes), [0]);
        assert_eq!(lanes.absent(10), [EntryId::new(1, 0)]);
        assert!(!lanes.fill(EntryId::new(1, 0), Some(delivery(1, Some("b")).fields)));
        assert_eq!(ready(&mut lanes), [1]);
        lanes.ended(Some(&Bytes::from_static(b"b")));
        assert_eq!(ready(&mut lanes), [2]);
        lanes.ended(Some(&Bytes::from_static(b"a")));
        assert!(ready(&mut lanes).is_empty());
        assert_eq!((lanes.absent(10), lanes.len()), (vec![EntryId::new(3, 0)], 1));
        assert!(lanes.fill(EntryId::new(3, 0), None), "it is gone");
        assert_eq!(lanes.len(), 0);
        lanes.add(delivery(4, Some("a")), Instant::now());
        assert_eq!(ready(&mut lanes), [4], "and its lane is free");
    }

    #[test]
    fn what_is_taken_out_leaves_its_lane_to_the_next() {
        let keys = [Some("a"), Some("a"), Some("a"), Some("b"), None];
        let mut lanes = lanes(Order::PerKey, &keys);
        let gone = [0, 1, 4].map(|n| EntryId::new(n, 0)).into();
        assert_eq!(lanes.remove(&gone), 3);
        assert_eq!(ready(&mut lanes), [3, 2]);
    }

    #[test]
    fn clearing_names_everything_that_was_there() {
        let mut lanes = lanes(Order::PerKey, &[Some("a"), Some("a"), Some("b"), Some("c"), None]);
        let (a, b) = (lanes.next().unwrap(), lanes.next().unwrap());
        lanes.rest(a);
        lanes.hold(b);
        let mut ids: Vec<u64> = lanes.clear().iter().map(|id| id.ms).collect();
        ids.sort_unstable();
        assert_eq!(ids, [0, 1, 2, 3, 4]);
        assert_eq!(lanes.len(), 0);
    }
}
