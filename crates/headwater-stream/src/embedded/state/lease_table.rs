//! Leases and the last epochs of leases.
//!
//! Guarantees: the last epoch is retained for a day after the lease has expired, so the next holder gets a
//! larger one and an older fence is rejected. After that, new epochs still grow because they start at the
//! current time in milliseconds.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Timestamp;
use crate::name::{HolderName, LeaseName};

/// How long an epoch is retained after its lease has expired.
const EPOCH_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// Expired epochs removed per new lease.
const EXPIRED_PER_INSERT: usize = 4;

/// A lease, held until its expiration.
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

    /// Records the epoch of a lease held until `until` and removes a few expired epochs.
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

    /// All epochs with their retention times.
    pub(in crate::embedded) fn iter(&self) -> impl Iterator<Item = (&str, u64, Timestamp)> {
        self.last.iter().map(|(lease, (epoch, end))| (&**lease, *epoch, *end))
    }
}
