//! Waiting tasks: reads that wait for entries, waits for due entries, and watches of leases.
//!
//! Guarantees: a task that registers under the lock, after it found nothing, is notified by the next change.
//! No change is missed in between.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use tokio::sync::{Notify, broadcast};

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

/// Blocked group reads.
#[derive(Debug, Default)]
pub(super) struct BlockedReads {
    all: Vec<Weak<BlockedRead>>,
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
    /// Registers a read until the result is dropped.
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
        self.all.retain(|read| read.strong_count() > 0);
        self.all.push(Arc::downgrade(&read));
        read
    }

    /// Cancels the blocked reads of a consumer. Returns how many there were.
    pub(super) fn cancel(&self, group: &GroupName, consumer: &ConsumerName) -> usize {
        let all = self.all.iter().filter_map(Weak::upgrade);
        let cancel = |read: Arc<BlockedRead>| {
            read.is_cancelled.store(true, Ordering::Relaxed);
            read.woken.notify_one();
        };
        all.filter(|read| read.group == *group && read.consumer == *consumer).map(cancel).count()
    }
}

/// Lease events for all watches of this process.
#[derive(Debug)]
pub(super) struct LeaseEvents {
    events: broadcast::Sender<LeaseEvent>,
    /// Notified when the next lease expires earlier than before.
    pub(super) earlier_expiry: Arc<Notify>,
}

/// Events that a watch may be behind before it lags.
const EVENTS_MAX: usize = 512;

impl Default for LeaseEvents {
    fn default() -> Self {
        Self { events: broadcast::Sender::new(EVENTS_MAX), earlier_expiry: Arc::default() }
    }
}

impl LeaseEvents {
    pub(super) fn subscribe(&self) -> broadcast::Receiver<LeaseEvent> {
        self.events.subscribe()
    }

    pub(super) fn publish(&self, lease: &LeaseName, kind: LeaseEventKind) {
        // Fails if there is no watch.
        let _ = self.events.send(LeaseEvent { lease: Some(lease.clone()), kind });
    }
}
