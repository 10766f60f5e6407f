//! Who holds which lease until when, and the epochs of leases that nobody holds.
//!
//! Promises: the epoch of a lease outlives the lease by a day, so that the next holder gets a larger one and an older
//! fence is refused; after that, epochs that begin at the time keep growing by themselves.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Timestamp;
use crate::name::{HolderName, LeaseName};

/// How long an epoch is remembered after its lease ended.
const EPOCH_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// How many forgotten epochs one new lease clears away.
const EXPIRED_PER_INSERT: usize = 4;

/// A lease that is held, unless its time has run out.
#[derive(Clone, Debug)]
pub(in crate::embedded) struct Lease {
    pub(in crate::embedded) name: LeaseName,
    pub(in crate::embedded) holder: HolderName,
    pub(in crate::embedded) epoch: u64,
    pub(in crate::embedded) until: Timestamp,
}

#[derive(Clone, Debug, Default)]
pub(in crate::embedded) struct EpochTable {
    last: HashMap<Arc<str>, (u64, Timestamp)>,
    by_expiry: BTreeSet<(Timestamp, Arc<str>)>,
}

impl EpochTable {
    /// The last epoch of a lease, held or not.
    pub(in crate::embedded) fn get(&self, lease: &str) -> Option<u64> {
        self.last.get(lease).map(|(epoch, _)| *epoch)
    }

    /// Remembers the epoch of a lease that is held until `until`, and forgets some whose time is over.
    pub(super) fn note(&mut self, lease: &str, epoch: u64, until: Timestamp, now: Timestamp) {
        for _ in 0..EXPIRED_PER_INSERT {
            let Some((end, name)) = self.by_expiry.first() else { break };
            if *end > now {
                break;
            }
            self.last.remove(name);
            self.by_expiry.pop_first();
        }
        self.restore(lease, epoch, until.after(EPOCH_RETENTION));
    }

    pub(super) fn restore(&mut self, lease: &str, epoch: u64, end: Timestamp) {
        let name = match self.last.get_key_value(lease) {
            Some((name, (_, end))) => {
                let name = name.clone();
                self.by_expiry.remove(&(*end, name.clone()));
                name
            }
            None => lease.into(),
        };
        self.by_expiry.insert((end, name.clone()));
        self.last.insert(name, (epoch, end));
    }

    /// All epochs, each with the time it is remembered until.
    pub(in crate::embedded) fn iter(&self) -> impl Iterator<Item = (&str, u64, Timestamp)> {
        self.last.iter().map(|(lease, (epoch, end))| (&**lease, *epoch, *end))
    }
}
