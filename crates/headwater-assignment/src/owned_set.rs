//! The streams this process owns or is acquiring: one slot each, at most `streams_max`.
//!
//! Guarantees: a stream has one slot, so two tasks never acquire the same stream. The task that removes a
//! slot sends the notification, so it is sent once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use headwater_stream::{Epoch, StreamName};
use tokio::sync::Notify;

use crate::owned::Owned;

#[derive(Debug)]
pub(crate) struct OwnedSet {
    inner: Mutex<Inner>,
    max: usize,
    /// Signalled when a slot was freed.
    pub(crate) freed: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    slots: HashMap<StreamName, OwnedSlot>,
    closed: bool,
}

#[derive(Debug)]
enum OwnedSlot {
    Acquiring,
    Owned(Owned),
}

/// Why there is no slot for a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoCapacity {
    /// The stream is owned or being acquired.
    Owned,
    /// `streams_max` is reached.
    Full,
    /// The assignment is closing.
    Closed,
}

impl OwnedSet {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { inner: Mutex::default(), max, freed: Notify::new() })
    }

    /// Reserves a slot for a stream; freed when the reservation is dropped.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        stream: &StreamName,
    ) -> Result<OwnedReservation, NoCapacity> {
        let mut inner = self.lock();
        if inner.closed {
            return Err(NoCapacity::Closed);
        }
        if inner.slots.contains_key(stream) {
            return Err(NoCapacity::Owned);
        }
        if inner.slots.len() >= self.max {
            return Err(NoCapacity::Full);
        }
        inner.slots.insert(stream.clone(), OwnedSlot::Acquiring);
        Ok(OwnedReservation { set: Arc::clone(self), stream: Some(stream.clone()) })
    }

    /// Number of free slots.
    pub(crate) fn free_capacity(&self) -> usize {
        let inner = self.lock();
        if inner.closed { 0 } else { self.max - inner.slots.len().min(self.max) }
    }

    /// Number of owned streams and streams being acquired.
    pub(crate) fn len(&self) -> usize {
        self.lock().slots.len()
    }

    /// Whether a stream is owned or being acquired.
    pub(crate) fn contains(&self, stream: &StreamName) -> bool {
        self.lock().slots.contains_key(stream)
    }

    /// The owned streams, in no particular order.
    pub(crate) fn owned(&self) -> Vec<Owned> {
        let inner = self.lock();
        inner
            .slots
            .values()
            .filter_map(|slot| match slot {
                OwnedSlot::Owned(owned) => Some(owned.clone()),
                OwnedSlot::Acquiring => None,
            })
            .collect()
    }

    /// Whether a stream is owned in this epoch.
    pub(crate) fn owns(&self, stream: &StreamName, epoch: Epoch) -> bool {
        owned_with(&self.lock(), stream, epoch).is_some()
    }

    /// Removes a stream owned in this epoch. Only one caller gets it.
    pub(crate) fn remove(&self, stream: &StreamName, epoch: Epoch) -> Option<Owned> {
        let removed = {
            let mut inner = self.lock();
            let owned = owned_with(&inner, stream, epoch)?.clone();
            inner.slots.remove(stream);
            owned
        };
        self.freed.notify_one();
        Some(removed)
    }

    /// Rejects further streams.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no code panics while it holds this lock")
    }
}

fn owned_with<'a>(inner: &'a Inner, stream: &StreamName, epoch: Epoch) -> Option<&'a Owned> {
    match inner.slots.get(stream) {
        Some(OwnedSlot::Owned(owned)) if owned.epoch() == epoch => Some(owned),
        _ => None,
    }
}

/// A slot for a stream that is being acquired.
#[derive(Debug)]
pub(crate) struct OwnedReservation {
    set: Arc<OwnedSet>,
    stream: Option<StreamName>,
}

impl OwnedReservation {
    /// Turns the reservation into an owned stream. Returns `false` while closing.
    pub(crate) fn commit(mut self, owned: Owned) -> bool {
        let mut inner = self.set.lock();
        if inner.closed {
            return false;
        }
        if let Some(stream) = self.stream.take() {
            inner.slots.insert(stream, OwnedSlot::Owned(owned));
        }
        true
    }
}

impl Drop for OwnedReservation {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            self.set.lock().slots.remove(&stream);
            self.set.freed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(name: &str) -> StreamName {
        StreamName::new(name).unwrap()
    }

    #[test]
    fn a_stream_has_one_slot_and_the_limit_holds() {
        let owned_set = OwnedSet::new(2);
        let first = owned_set.reserve(&stream("a")).unwrap();
        assert_eq!(owned_set.reserve(&stream("a")).unwrap_err(), NoCapacity::Owned);
        let _second = owned_set.reserve(&stream("b")).unwrap();
        assert_eq!(owned_set.reserve(&stream("c")).unwrap_err(), NoCapacity::Full);
        assert_eq!(owned_set.free_capacity(), 0);

        drop(first);
        assert_eq!(owned_set.free_capacity(), 1);
        assert!(!owned_set.contains(&stream("a")));
        owned_set.close();
        assert_eq!(owned_set.free_capacity(), 0);
        assert_eq!(owned_set.reserve(&stream("c")).unwrap_err(), NoCapacity::Closed);
    }
}
