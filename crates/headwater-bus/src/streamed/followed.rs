//! The streams that live subscriptions follow, and how far each was read.
//!
//! Upstream: subscriptions add and remove streams. Downstream: `tail` reads them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use headwater_stream::{EntryId, StreamName};
use tokio::sync::Notify;

use crate::error::{BusError, Result};
use crate::limits::FOLLOWED_MAX;

#[derive(Default)]
pub(super) struct Followed {
    streams: Mutex<HashMap<StreamName, Following>>,
    /// The list of streams is another one now.
    pub(super) changed: Notify,
}

struct Following {
    /// Everything up to here was read.
    position: EntryId,
    /// How many subscriptions follow it.
    subscriptions: usize,
}

impl Followed {
    /// Follows a stream from a position, or goes on where it is read already.
    pub(super) fn add(&self, stream: &StreamName, from: EntryId) -> Result<()> {
        let mut streams = self.lock();
        if streams.len() >= FOLLOWED_MAX && !streams.contains_key(stream) {
            let problem = format!("the bus follows {FOLLOWED_MAX} streams, which is the limit");
            return Err(BusError::invalid("a live subscription", problem));
        }
        let fresh = Following { position: from, subscriptions: 0 };
        streams.entry(stream.clone()).or_insert(fresh).subscriptions += 1;
        drop(streams);
        self.changed.notify_one();
        Ok(())
    }

    /// One subscription less follows the stream.
    pub(super) fn remove(&self, stream: &StreamName) {
        let mut streams = self.lock();
        if let Some(following) = streams.get_mut(stream) {
            following.subscriptions -= 1;
            if following.subscriptions == 0 {
                streams.remove(stream);
            }
        }
        drop(streams);
        self.changed.notify_one();
    }

    pub(super) fn positions(&self) -> Vec<(StreamName, EntryId)> {
        self.lock().iter().map(|(stream, at)| (stream.clone(), at.position)).collect()
    }

    /// Everything up to `entry_id` was dealt with.
    pub(super) fn advance(&self, stream: &StreamName, entry_id: EntryId) {
        if let Some(following) = self.lock().get_mut(stream) {
            following.position = following.position.max(entry_id);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<StreamName, Following>> {
        self.streams.lock().expect("no code panics while it holds this lock")
    }
}
