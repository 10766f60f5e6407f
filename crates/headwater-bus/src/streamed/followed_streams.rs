//! The streams followed by live subscriptions, with their read positions.
//!
//! Upstream: subscriptions add and remove streams. Downstream: `tail` reads them, and checks for gaps where it was
//! late.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use headwater_stream::{EntryId, StreamName};
use tokio::sync::Notify;

use crate::error::{BusError, Result};
use crate::limits::FOLLOWED_STREAMS_MAX;

#[derive(Default)]
pub(super) struct FollowedStreams {
    streams: Mutex<HashMap<StreamName, FollowedStream>>,
    /// Notified when streams were added or removed.
    pub(super) changed: Notify,
}

struct FollowedStream {
    /// The last entry that was read.
    position: EntryId,
    /// Whether the entry at the position was read; otherwise it was the last entry when following started.
    is_read: bool,
    /// Whether no read was waiting when the next entries may have arrived.
    is_late: bool,
    /// Number of subscriptions.
    subscriptions: usize,
}

impl FollowedStreams {
    /// Follows a stream from a position, or from the current position if it is followed already.
    pub(super) fn add(&self, stream: &StreamName, from: EntryId) -> Result<()> {
        let mut streams = self.lock();
        if streams.len() >= FOLLOWED_STREAMS_MAX && !streams.contains_key(stream) {
            let problem =
                format!("the limit of {FOLLOWED_STREAMS_MAX} followed streams is reached");
            return Err(BusError::invalid("live subscription", problem));
        }
        let fresh =
            FollowedStream { position: from, is_read: false, is_late: false, subscriptions: 0 };
        streams.entry(stream.clone()).or_insert(fresh).subscriptions += 1;
        drop(streams);
        self.changed.notify_one();
        Ok(())
    }

    /// Removes one subscription of the stream.
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

    /// Records that everything up to `entry_id` was handled.
    pub(super) fn advance(&self, stream: &StreamName, entry_id: EntryId) {
        if let Some(following) = self.lock().get_mut(stream)
            && following.position < entry_id
        {
            (following.position, following.is_read) = (entry_id, true);
        }
    }

    /// Records that no read waits for the next entries of this stream.
    pub(super) fn mark_late(&self, stream: &StreamName) {
        if let Some(following) = self.lock().get_mut(stream) {
            following.is_late = true;
        }
    }

    /// Records that no read waits for any stream.
    pub(super) fn mark_all_late(&self) {
        self.lock().values_mut().for_each(|following| following.is_late = true);
    }

    /// Called when entries arrived. Returns the last entry that was read, if entries after it may have been trimmed
    /// unread: streams are trimmed from the beginning only, so nothing is missing as long as it exists.
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
