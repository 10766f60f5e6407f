//! The streams that live subscriptions follow, and how far each was read.
//!
//! Upstream: subscriptions add and remove streams. Downstream: `tail` reads them, and looks for what it may have missed
//! where this says that it came late.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use headwater_stream::{EntryId, StreamName};
use tokio::sync::Notify;

use crate::error::{BusError, Result};
use crate::limits::FOLLOWED_STREAMS_MAX;

#[derive(Default)]
pub(super) struct FollowedStreams {
    streams: Mutex<HashMap<StreamName, FollowedStream>>,
    /// The list of streams is another one now.
    pub(super) changed: Notify,
}

struct FollowedStream {
    /// Everything up to here was read.
    position: EntryId,
    /// Whether the entry at the position was read, and not only where the stream ended when somebody began to follow
    /// it.
    is_read: bool,
    /// Whether nobody waited for the next entries when they came, or may have come.
    is_late: bool,
    /// How many subscriptions follow it.
    subscriptions: usize,
}

impl FollowedStreams {
    /// Follows a stream from a position, or goes on where it is read already.
    pub(super) fn add(&self, stream: &StreamName, from: EntryId) -> Result<()> {
        let mut streams = self.lock();
        if streams.len() >= FOLLOWED_STREAMS_MAX && !streams.contains_key(stream) {
            let problem =
                format!("the bus follows {FOLLOWED_STREAMS_MAX} streams, which is the limit");
            return Err(BusError::invalid("live subscription", problem));
        }
        let fresh =
            FollowedStream { position: from, is_read: false, is_late: false, subscriptions: 0 };
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
        if let Some(following) = self.lock().get_mut(stream)
            && following.position < entry_id
        {
            (following.position, following.is_read) = (entry_id, true);
        }
    }

    /// Nobody waits for the next entries of this stream.
    pub(super) fn mark_late(&self, stream: &StreamName) {
        if let Some(following) = self.lock().get_mut(stream) {
            following.is_late = true;
        }
    }

    /// Nobody waits for anything.
    pub(super) fn mark_all_late(&self) {
        self.lock().values_mut().for_each(|following| following.is_late = true);
    }

    /// Entries have come. Returns the last one that was read before, if some between may be gone: streams are trimmed
    /// from their beginning only, so as long as it is there, none is.
    pub(super) fn last_read_if_late(&self, stream: &StreamName) -> Option<EntryId> {
        let mut streams = self.lock();
        let following = streams.get_mut(stream)?;
        let was_late = std::mem::take(&mut following.is_late);
        (was_late && following.is_read).then_some(following.position)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<StreamName, FollowedStream>> {
        self.streams.lock().expect("no code panics while it holds this lock")
    }
}
