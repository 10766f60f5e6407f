//! Notifications: one bounded, ordered channel between the assignment and its program.
//!
//! Promises: nothing that tells of them ever waits, so a slow or absent reader cannot stop a heartbeat or a shutdown.
//! What waits is bounded: `Added` needs a place before a stream is taken, so no stream is taken that nobody hears of;
//! `Disowned` has places of its own, one for each stream that can have been received of; `Expired` waits once per stream,
//! and with `Quarantined` it is dropped and counted when there is no place (the sweep announces the former again);
//! `Terminated` has the last place.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use headwater_stream::StreamName;
use tokio::sync::Notify;

use crate::metrics::AssignmentMetrics;
use crate::owned::Owned;

/// Something the program should know.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Notification {
    /// A stream is ours from now on: a new one, one that its owner gave back, or a dead owner's that was claimed for us.
    Added(Owned),
    /// A stream's owner died and the stream is free: claim it. Said again with each sweep until somebody has it.
    Expired(StreamName),
    /// A stream is no longer ours. Stop working on it.
    Disowned {
        /// The stream.
        stream: StreamName,
        /// Why.
        reason: Disowned,
    },
    /// A stream wore out too many owners; its input entry is in the dead letters.
    Quarantined {
        /// The stream.
        stream: StreamName,
        /// How many owners it had.
        owners: u64,
    },
    /// The assignment has ended; this is the last notification.
    Terminated(Terminated),
}

/// Why a stream is no longer ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Disowned {
    /// The lease ran out or has another holder.
    LeaseLost,
    /// The lease could not be renewed in time: the backend did not answer, or this process stood still.
    LeaseUnconfirmed,
    /// The input entry is gone: somebody deleted it, or the streams were flushed.
    EntryGone,
    /// It was given to a consumer with fewer streams.
    Rebalanced,
    /// It was not done when a shutdown had drained long enough.
    Shutdown,
}

/// Why the assignment has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Terminated {
    /// By [`shutdown`](crate::Assignment::shutdown).
    Shutdown,
    /// It was dropped without a shutdown; its leases run out.
    Dropped,
    /// It cannot go on.
    Failed {
        /// What went wrong.
        problem: String,
    },
}

/// The reading end of the channel. Once it is dropped, no more streams are taken.
#[derive(Debug)]
pub struct Notifications {
    notification_queue: Arc<NotificationQueue>,
}

impl Notifications {
    pub(crate) fn new(notification_queue: &Arc<NotificationQueue>) -> Self {
        Self { notification_queue: Arc::clone(notification_queue) }
    }

    /// The next notification; waits for it. `None` after [`Notification::Terminated`]. Cancel-safe.
    pub async fn recv(&mut self) -> Option<Notification> {
        loop {
            if let Some(next) = self.notification_queue.take() {
                return next;
            }
            // Keeps a wake-up that came since `take`, so none is lost.
            self.notification_queue.arrived.notified().await;
        }
    }

    /// The next notification if one waits.
    pub fn try_recv(&mut self) -> Option<Notification> {
        self.notification_queue.take().flatten()
    }
}

impl Drop for Notifications {
    fn drop(&mut self) {
        let mut queue = self.notification_queue.lock();
        queue.reader_dropped = true;
        queue.items.clear();
        queue.disowned = 0;
    }
}

#[derive(Debug)]
pub(crate) struct NotificationQueue {
    queue: Mutex<QueueState>,
    max: usize,
    disowned_max: usize,
    arrived: Notify,
    /// A notification was taken, so there is a place.
    pub(crate) received: Notify,
    metrics: AssignmentMetrics,
}

#[derive(Debug, Default)]
struct QueueState {
    items: VecDeque<Notification>,
    /// Streams with an `Expired` in `items`.
    expired: HashSet<StreamName>,
    /// `Disowned` in `items`: they have places of their own.
    disowned: usize,
    /// Places kept for streams that are being taken.
    reserved: usize,
    closed: bool,
    reader_dropped: bool,
}

impl NotificationQueue {
    /// A channel for `max` notifications and as many `Disowned` as there can be streams to lose.
    pub(crate) fn new(max: usize, streams_max: usize, metrics: AssignmentMetrics) -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::default(),
            max,
            // Streams in hand, and those whose `Added` still waits.
            disowned_max: streams_max + max,
            arrived: Notify::new(),
            received: Notify::new(),
            metrics,
        })
    }

    /// A place for an `Added`; `None` if the channel is full or nobody reads it.
    pub(crate) fn reserve(self: &Arc<Self>) -> Option<NotificationSlot> {
        let mut queue = self.lock();
        if queue.free_capacity(self.max) == 0 {
            return None;
        }
        queue.reserved += 1;
        Some(NotificationSlot { notification_queue: Arc::clone(self) })
    }

    /// How many places there are.
    pub(crate) fn free_capacity(&self) -> usize {
        self.lock().free_capacity(self.max)
    }

    pub(crate) fn expired(&self, stream: &StreamName) {
        let mut queue = self.lock();
        if queue.closed || queue.expired.contains(stream) {
            return;
        }
        if queue.free_capacity(self.max) == 0 {
            self.metrics.notification_dropped("expired");
            return;
        }
        queue.expired.insert(stream.clone());
        self.push(queue, Notification::Expired(stream.clone()), "expired");
    }

    /// Takes an `Expired` back that is no longer true.
    pub(crate) fn retract_expired(&self, stream: &StreamName) {
        let mut queue = self.lock();
        if queue.expired.remove(stream) {
            queue.items.retain(|item| !matches!(item, Notification::Expired(s) if s == stream));
        }
    }

    pub(crate) fn quarantined(&self, stream: &StreamName, owners: u64) {
        let queue = self.lock();
        if queue.free_capacity(self.max) == 0 {
            self.metrics.notification_dropped("quarantined");
            return;
        }
        let notification = Notification::Quarantined { stream: stream.clone(), owners };
        self.push(queue, notification, "quarantined");
    }

    pub(crate) fn disowned(&self, stream: &StreamName, reason: Disowned) {
        let mut queue = self.lock();
        if queue.closed || queue.reader_dropped || queue.disowned >= self.disowned_max {
            self.metrics.notification_dropped("disowned");
            return;
        }
        queue.disowned += 1;
        let notification = Notification::Disowned { stream: stream.clone(), reason };
        self.push(queue, notification, "disowned");
    }

    /// The last notification; what comes later is dropped.
    pub(crate) fn terminated(&self, reason: Terminated) {
        let mut queue = self.lock();
        if queue.closed {
            return;
        }
        queue.closed = true;
        if queue.reader_dropped {
            return;
        }
        self.push(queue, Notification::Terminated(reason), "terminated");
    }

    fn push(
        &self,
        mut queue: MutexGuard<'_, QueueState>,
        notification: Notification,
        kind: &'static str,
    ) {
        queue.items.push_back(notification);
        drop(queue);
        self.metrics.notification(kind);
        self.arrived.notify_one();
    }

    /// The next notification: `None` if none waits, `Some(None)` if none will come.
    fn take(&self) -> Option<Option<Notification>> {
        let mut queue = self.lock();
        let Some(next) = queue.items.pop_front() else { return queue.closed.then_some(None) };
        match &next {
            Notification::Expired(stream) => {
                queue.expired.remove(stream);
            }
            Notification::Disowned { .. } => queue.disowned -= 1,
            _ => {}
        }
        drop(queue);
        self.received.notify_one();
        Some(Some(next))
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.queue.lock().expect("no code panics while it holds this lock")
    }
}

impl QueueState {
    fn free_capacity(&self, max: usize) -> usize {
        if self.closed || self.reader_dropped {
            return 0;
        }
        max.saturating_sub(self.items.len() - self.disowned + self.reserved)
    }
}

/// A place in the channel for the `Added` of a stream that is being taken; free again when dropped.
#[derive(Debug)]
pub(crate) struct NotificationSlot {
    notification_queue: Arc<NotificationQueue>,
}

impl NotificationSlot {
    pub(crate) fn added(self, owned: Owned) {
        let notification_queue = Arc::clone(&self.notification_queue);
        {
            let mut queue = notification_queue.lock();
            if queue.closed || queue.reader_dropped {
                notification_queue.metrics.notification_dropped("added");
                return;
            }
            queue.items.push_back(Notification::Added(owned));
        }
        // `self` still counts as reserved until it is dropped below, so nobody got the place in between.
        notification_queue.metrics.notification("added");
        notification_queue.arrived.notify_one();
    }
}

impl Drop for NotificationSlot {
    fn drop(&mut self) {
        self.notification_queue.lock().reserved -= 1;
        self.notification_queue.received.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channel(max: usize, streams_max: usize) -> (Arc<NotificationQueue>, Notifications) {
        let notification_queue =
            NotificationQueue::new(max, streams_max, AssignmentMetrics::new("svc"));
        let notifications = Notifications::new(&notification_queue);
        (notification_queue, notifications)
    }

    fn stream(name: &str) -> StreamName {
        StreamName::new(name).unwrap()
    }

    #[test]
    fn what_waits_is_bounded_whatever_is_told() {
        let (notification_queue, mut notifications) = channel(3, 2);
        let slot = notification_queue.reserve().unwrap();
        for i in 0..100 {
            notification_queue.expired(&stream(&format!("e{i}")));
            notification_queue.quarantined(&stream("q"), 5);
            notification_queue.disowned(&stream(&format!("d{i}")), Disowned::LeaseLost);
        }
        assert!(notification_queue.reserve().is_none());
        notification_queue.terminated(Terminated::Shutdown);
        notification_queue.disowned(&stream("late"), Disowned::LeaseLost);

        let received: Vec<_> = std::iter::from_fn(|| notifications.try_recv()).collect();
        // One place is reserved, two are for others, five for what can be lost, one for the end.
        assert_eq!(received.len(), 2 + 5 + 1, "{received:?}");
        assert!(matches!(received.last(), Some(Notification::Terminated(Terminated::Shutdown))));
        drop(slot);
    }

    #[test]
    fn an_expired_stream_waits_once_and_can_be_taken_back() {
        let (notification_queue, mut notifications) = channel(10, 1);
        for name in ["a", "b", "a"] {
            notification_queue.expired(&stream(name));
        }
        notification_queue.retract_expired(&stream("a"));
        assert!(
            matches!(notifications.try_recv(), Some(Notification::Expired(s)) if s == stream("b"))
        );
        assert!(notifications.try_recv().is_none());
        // Once received, it can be said again.
        notification_queue.expired(&stream("b"));
        assert!(notifications.try_recv().is_some());
    }

    #[test]
    fn a_reserved_place_is_free_again_when_it_is_not_used() {
        let (notification_queue, notifications) = channel(1, 1);
        let slot = notification_queue.reserve().unwrap();
        assert!(notification_queue.reserve().is_none());
        drop(slot);
        assert!(notification_queue.reserve().is_some());
        drop(notifications);
        assert!(notification_queue.reserve().is_none(), "nobody reads");
    }

    #[tokio::test]
    async fn a_reader_that_waits_is_woken_and_the_end_is_the_end() {
        let (notification_queue, mut notifications) = channel(1, 1);
        let reader = tokio::spawn(async move {
            let mut received = 0;
            while notifications.recv().await.is_some() {
                received += 1;
            }
            received
        });
        tokio::task::yield_now().await;
        notification_queue.expired(&stream("a"));
        tokio::task::yield_now().await;
        notification_queue.terminated(Terminated::Dropped);
        assert_eq!(reader.await.unwrap(), 2);
    }
}
