//! Waiting tasks: reads that wait for entries, waits for due entries, and lease subscribers.
//!
//! Guarantees: a task that registers under the lock, after it found nothing, is notified by the next change.
//! No change is missed in between.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::Notify;

use crate::leases::{LeaseEvent, LeaseEventKind};
use crate::name::{ConsumerName, GroupName, LeaseName};

/// Tasks to notify when something changes under a name.
#[derive(Debug, Default)]
pub(super) struct NameWaiters {
    by_name: HashMap<Box<str>, Vec<Arc<Notify>>>,
}

impl NameWaiters {
    pub(super) fn add(&mut self, name: &str, who: &Arc<Notify>) {
        self.by_name.entry(name.into()).or_default().push(Arc::clone(who));
    }

    pub(super) fn remove(&mut self, name: &str, who: &Arc<Notify>) {
        if let Some(all) = self.by_name.get_mut(name) {
            all.retain(|one| !Arc::ptr_eq(one, who));
            if all.is_empty() {
                self.by_name.remove(name);
            }
        }
    }

    pub(super) fn of(&self, name: &str) -> &[Arc<Notify>] {
        self.by_name.get(name).map_or(&[], Vec::as_slice)
    }

    pub(super) fn wake_all(&self) {
        self.by_name.values().flatten().for_each(|who| who.notify_one());
    }
}

/// Blocked group reads, by group and consumer.
#[derive(Debug, Default)]
pub(super) struct BlockedReads {
    by_consumer: HashMap<(GroupName, ConsumerName), Vec<Arc<BlockedRead>>>,
}

/// A group read that waits for entries.
#[derive(Debug)]
pub(super) struct BlockedRead {
    group: GroupName,
    consumer: ConsumerName,
    woken: Arc<Notify>,
    /// Set under the engine lock, so no entry is delivered to this read afterwards.
    is_cancelled: AtomicBool,
}

impl BlockedRead {
    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }
}

impl BlockedReads {
    pub(super) fn add(
        &mut self,
        group: &GroupName,
        consumer: &ConsumerName,
        woken: &Arc<Notify>,
    ) -> Arc<BlockedRead> {
        let read = Arc::new(BlockedRead {
            group: group.clone(),
            consumer: consumer.clone(),
            woken: Arc::clone(woken),
            is_cancelled: AtomicBool::new(false),
        });
        let key = (group.clone(), consumer.clone());
        self.by_consumer.entry(key).or_default().push(Arc::clone(&read));
        read
    }

    pub(super) fn remove(&mut self, read: &Arc<BlockedRead>) {
        let key = (read.group.clone(), read.consumer.clone());
        if let Some(all) = self.by_consumer.get_mut(&key) {
            all.retain(|one| !Arc::ptr_eq(one, read));
            if all.is_empty() {
                self.by_consumer.remove(&key);
            }
        }
    }

    /// Cancels the blocked reads of a consumer. Returns how many there were.
    pub(super) fn cancel(&self, group: &GroupName, consumer: &ConsumerName) -> usize {
        let key = (group.clone(), consumer.clone());
        let all = self.by_consumer.get(&key).map_or(&[][..], Vec::as_slice);
        for read in all {
            read.is_cancelled.store(true, Ordering::Relaxed);
            read.woken.notify_one();
        }
        all.len()
    }
}

/// All subscribers to lease events.
#[derive(Debug, Default)]
pub(super) struct LeaseSubscribers {
    all: Vec<Weak<LeaseSubscriber>>,
}

/// A lease subscriber and its queue of undelivered hints.
#[derive(Debug)]
pub(super) struct LeaseSubscriber {
    prefix: String,
    hints: Mutex<VecDeque<LeaseEvent>>,
    pub(super) notified: Notify,
}

/// Hints queued per subscriber. On overflow they are replaced by one `Lagged`.
const HINTS_MAX: usize = 1024;

impl LeaseSubscribers {
    pub(super) fn add(&mut self, prefix: &str) -> Arc<LeaseSubscriber> {
        self.all.retain(|subscriber| subscriber.strong_count() > 0);
        let (hints, notified) = Default::default();
        let subscriber = Arc::new(LeaseSubscriber { prefix: prefix.to_owned(), hints, notified });
        self.all.push(Arc::downgrade(&subscriber));
        subscriber
    }

    pub(super) fn publish(&self, lease: &LeaseName, kind: LeaseEventKind) {
        for subscriber in self.all.iter().filter_map(Weak::upgrade) {
            if lease.as_str().starts_with(&subscriber.prefix) {
                subscriber.publish(lease, kind);
            }
        }
    }

    /// Wakes all subscribers to reset their timers: the next lease now expires earlier.
    pub(super) fn wake_all(&self) {
        self.all
            .iter()
            .filter_map(Weak::upgrade)
            .for_each(|subscriber| subscriber.notified.notify_one());
    }
}

impl LeaseSubscriber {
    fn publish(&self, lease: &LeaseName, kind: LeaseEventKind) {
        let mut hints = self.lock();
        if hints.len() >= HINTS_MAX {
            hints.clear();
            hints.push_back(LeaseEvent { lease: None, kind: LeaseEventKind::Lagged });
        }
        hints.push_back(LeaseEvent { lease: Some(lease.clone()), kind });
        drop(hints);
        self.notified.notify_one();
    }

    pub(super) fn take(&self) -> Option<LeaseEvent> {
        self.lock().pop_front()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<LeaseEvent>> {
        self.hints.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
