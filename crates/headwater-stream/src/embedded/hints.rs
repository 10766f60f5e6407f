//! Those who wait: for entries in a stream, for delayed entries, for leases that become free.
//!
//! Promises: whoever registers under the lock, after having found nothing, is woken by the next change; there is no
//! moment in between in which a change goes unseen.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::Notify;

use crate::leases::{HintKind, LeaseHint};
use crate::name::LeaseName;

/// Who waits for something to happen to which name.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    by_name: HashMap<Box<str>, Vec<Arc<Notify>>>,
}

impl Watchers {
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

/// Those who watch leases.
#[derive(Debug, Default)]
pub(super) struct Ears {
    all: Vec<Weak<Ear>>,
}

/// One who watches leases: what it was told and has not yet heard.
#[derive(Debug)]
pub(super) struct Ear {
    prefix: String,
    hints: Mutex<VecDeque<LeaseHint>>,
    pub(super) told: Notify,
}

/// Hints that wait for one who watches; when there are more, they are replaced by one `Missed`.
const HINTS_MAX: usize = 1024;

impl Ears {
    pub(super) fn add(&mut self, prefix: &str) -> Arc<Ear> {
        self.all.retain(|ear| ear.strong_count() > 0);
        let (hints, told) = Default::default();
        let ear = Arc::new(Ear { prefix: prefix.to_owned(), hints, told });
        self.all.push(Arc::downgrade(&ear));
        ear
    }

    pub(super) fn tell(&self, lease: &LeaseName, kind: HintKind) {
        for ear in self.all.iter().filter_map(Weak::upgrade) {
            if lease.as_str().starts_with(&ear.prefix) {
                ear.tell(lease, kind);
            }
        }
    }

    /// The next lease ends earlier than it did: timers must be set anew.
    pub(super) fn wake_all(&self) {
        self.all.iter().filter_map(Weak::upgrade).for_each(|ear| ear.told.notify_one());
    }
}

impl Ear {
    fn tell(&self, lease: &LeaseName, kind: HintKind) {
        let mut hints = self.lock();
        if hints.len() >= HINTS_MAX {
            hints.clear();
            hints.push_back(LeaseHint { lease: None, kind: HintKind::Missed });
        }
        hints.push_back(LeaseHint { lease: Some(lease.clone()), kind });
        drop(hints);
        self.told.notify_one();
    }

    pub(super) fn take(&self) -> Option<LeaseHint> {
        self.lock().pop_front()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<LeaseHint>> {
        self.hints.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
