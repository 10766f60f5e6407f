//! Notifications: one bounded, ordered queue from the assignment to the program.
//!
//! Guarantees: senders never wait, so a slow or missing reader cannot block a heartbeat or a shutdown. The
//! queue is bounded: `Added` needs a reserved slot before a stream is acquired, so no stream is acquired
//! without a notification. `Disowned` has separate slots, one for each stream that can have been reported.
//! `Expired` is queued once per stream; it and `Quarantined` are dropped and counted when the queue is full
//! (the sweep repeats `Expired`). `Terminated` has the last slot.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use headwater_stream::StreamName;
use tokio::sync::Notify;

use crate::metrics::{AssignmentMetrics, NOTIFICATIONS, NOTIFICATIONS_DROPPED};
use crate::owned::Owned;

/// An event of the assignment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Notification {
    /// This process owns a stream: a new one, a released one, or one of a dead owner that was claimed
    /// automatically.
    Added(Owned),
    /// The owner of a stream died: claim it. Repeated with each sweep until a consumer owns it.
    Expired(StreamName),
    /// This process no longer owns a stream. Stop working on it.
    Disowned {
        /// The stream.
        stream: StreamName,
        /// Why.
        reason: Disowned,
    },
    /// More than `owners_max` owners died with a stream; its input entry is in the dead letters.
    Quarantined {
        /// The stream.
        stream: StreamName,
        /// How many owners it had.
        owners: u64,
    },
    /// The assignment has terminated; this is the last notification.
    Terminated(Terminated),
}

impl Notification {
    /// The label in metrics.
    fn kind(&self) -> &'static str {
        match self {
            Self::Added(_) => "added",
            Self::Expired(_) => "expired",
            Self::Disowned { .. } => "disowned",
            Self::Quarantined { .. } => "quarantined",
            Self::Terminated(_) => "terminated",
        }
    }
}

/// Why a stream is no longer owned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Disowned {
    /// The lease expired or has another holder.
    LeaseLost,
    /// The lease could not be renewed in time: the backend did not reply, or this process was paused.
    LeaseUnconfirmed,
    /// The input entry was deleted, or the backend was flushed.
    EntryGone,
    /// It was released for a consumer with fewer streams.
    Rebalanced,
    /// It was not done within the drain time of a shutdown.
    Shutdown,
}

/// Why the assignment terminated.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Terminated {
    /// By [`shutdown`](crate::Assignment::shutdown).
    Shutdown,
    /// It was dropped without a shutdown; its leases expire.
    Dropped,
    /// A task failed and cannot recover.
    Failed {
        /// What went wrong.
        problem: String,
    },
}

/// The receiver. Once it is dropped, no more streams are acquired.
#[derive(Debug)]
pub struct Notifications {
    notification_queue: Arc<NotificationQueue>,
}

impl Notifications {
    pub(crate) fn new(notification_queue: &Arc<NotificationQueue>) -> Self {
        Self { notification_queue: Arc::clone(notification_queue) }
    }

    /// Waits for the next notification. `None` after [`Notification::Terminated`]. Cancel-safe.
    pub async fn recv(&mut self) -> Option<Notification> {
        loop {
            if let Some(next) = self.notification_queue.take() {
                return next;
            }
            // `Notify` stores a wakeup sent since `take`, so none is lost.
            self.notification_queue.arrived.notified().await;
        }
    }

    /// The next notification, without waiting.
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
    queue: Mutex<NotificationQueueState>,
    max: usize,
    disowned_max: usize,
    arrived: Notify,
    /// Signalled when a notification was received and its slot is free.
    pub(crate) received: Notify,
    metrics: AssignmentMetrics,
}

#[derive(Debug, Default)]
struct NotificationQueueState {
    items: VecDeque<Notification>,
    /// Streams with an `Expired` in `items`.
    expired: HashSet<StreamName>,
    /// `Disowned` in `items`: they have separate slots.
    disowned: usize,
    /// Slots reserved for streams that are being acquired.
    reserved: usize,
    closed: bool,
    reader_dropped: bool,
}

impl NotificationQueue {
    /// A queue for `max` notifications and one `Disowned` per stream that can be lost.
    pub(crate) fn new(max: usize, streams_max: usize, metrics: AssignmentMetrics) -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::default(),
            max,
            // Owned streams, and those whose `Added` is still queued.
            disowned_max: streams_max + max,
            arrived: Notify::new(),
            received: Notify::new(),
            metrics,
        })
    }

    /// Reserves a slot for an `Added`; `None` if the queue is full or has no reader.
    pub(crate) fn reserve(self: &Arc<Self>) -> Option<NotificationSlot> {
        let mut queue = self.lock();
        if queue.free_capacity(self.max) == 0 {
            return None;
        }
        queue.reserved += 1;
        Some(NotificationSlot { notification_queue: Arc::clone(self) })
    }

    /// Number of free slots.
    pub(crate) fn free_capacity(&self) -> usize {
        self.lock().free_capacity(self.max)
    }

    /// Queues a notification. Dropped and counted if there is no slot for it.
    pub(crate) fn send(&self, notification: Notification) {
        let kind = notification.kind();
        let mut queue = self.lock();
        let has_slot = !queue.closed && !queue.reader_dropped;
        let has_slot = has_slot
            && match &notification {
                // `Added` has reserved its slot.
                Notification::Added(_) | Notification::Terminated(_) => true,
                Notification::Disowned { .. } => queue.disowned < self.disowned_max,
                Notification::Expired(stream) if queue.expired.contains(stream) => return,
                _ => queue.free_capacity(self.max) > 0,
            };
        queue.closed |= matches!(notification, Notification::Terminated(_));
        if !has_slot {
            drop(queue);
            return self.metrics.count_by(NOTIFICATIONS_DROPPED, "kind", kind);
        }
        match &notification {
            Notification::Disowned { .. } => queue.disowned += 1,
            Notification::Expired(stream) => drop(queue.expired.insert(stream.clone())),
            _ => {}
        }
        queue.items.push_back(notification);
        drop(queue);
        self.metrics.count_by(NOTIFICATIONS, "kind", kind);
        self.arrived.notify_one();
    }

    /// Removes a queued `Expired` that no longer applies.
    pub(crate) fn retract_expired(&self, stream: &StreamName) {
        let mut queue = self.lock();
        if queue.expired.remove(stream) {
            queue.items.retain(|item| !matches!(item, Notification::Expired(s) if s == stream));
        }
    }

    /// The next notification: `None` if the queue is empty, `Some(None)` if it is closed.
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

    fn lock(&self) -> MutexGuard<'_, NotificationQueueState> {
        self.queue.lock().expect("no code panics while it holds this lock")
    }
}

impl NotificationQueueState {
    fn free_capacity(&self, max: usize) -> usize {
        if self.closed || self.reader_dropped {
            return 0;
        }
        max.saturating_sub(self.items.len() - self.disowned + self.reserved)
    }
}

/// A slot for the `Added` of a stream that is being acquired; freed on drop.
#[derive(Debug)]
pub(crate) struct NotificationSlot {
    notification_queue: Arc<NotificationQueue>,
}

impl NotificationSlot {
    /// Queues the notification; the slot stays reserved until it is queued.
    pub(crate) fn added(self, owned: Owned) {
        self.notification_queue.send(Notification::Added(owned));
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

    fn disowned(name: &str) -> Notification {
        Notification::Disowned { stream: stream(name), reason: Disowned::LeaseLost }
    }

    #[test]
    fn the_queue_is_bounded() {
        let (notification_queue, mut notifications) = channel(3, 2);
        let slot = notification_queue.reserve().unwrap();
        for i in 0..100 {
            notification_queue.send(Notification::Expired(stream(&format!("e{i}"))));
            notification_queue.send(Notification::Quarantined { stream: stream("q"), owners: 5 });
            notification_queue.send(disowned(&format!("d{i}")));
        }
        assert!(notification_queue.reserve().is_none());
        notification_queue.send(Notification::Terminated(Terminated::Shutdown));
        notification_queue.send(disowned("late"));

        let received: Vec<_> = std::iter::from_fn(|| notifications.try_recv()).collect();
        // One slot is reserved, two are general, five are for `Disowned`, one for `Terminated`.
        assert_eq!(received.len(), 2 + 5 + 1, "{received:?}");
        assert!(matches!(received.last(), Some(Notification::Terminated(Terminated::Shutdown))));
        drop(slot);
    }

    #[test]
    fn expired_is_queued_once_per_stream_and_can_be_retracted() {
        let (notification_queue, mut notifications) = channel(10, 1);
        for name in ["a", "b", "a"] {
            notification_queue.send(Notification::Expired(stream(name)));
        }
        notification_queue.retract_expired(&stream("a"));
        assert!(
            matches!(notifications.try_recv(), Some(Notification::Expired(s)) if s == stream("b"))
        );
        assert!(notifications.try_recv().is_none());
        // Once received, it can be queued again.
        notification_queue.send(Notification::Expired(stream("b")));
        assert!(notifications.try_recv().is_some());
    }

    #[test]
    fn an_unused_reserved_slot_is_freed_on_drop() {
        let (notification_queue, notifications) = channel(1, 1);
        let slot = notification_queue.reserve().unwrap();
        assert!(notification_queue.reserve().is_none());
        drop(slot);
        assert!(notification_queue.reserve().is_some());
        drop(notifications);
        assert!(notification_queue.reserve().is_none(), "no reader");
    }

    #[tokio::test]
    async fn a_waiting_reader_is_woken_and_gets_none_after_terminated() {
        let (notification_queue, mut notifications) = channel(1, 1);
        let reader = tokio::spawn(async move {
            let mut received = 0;
            while notifications.recv().await.is_some() {
                received += 1;
            }
            received
        });
        tokio::task::yield_now().await;
        notification_queue.send(Notification::Expired(stream("a")));
        tokio::task::yield_now().await;
        notification_queue.send(Notification::Terminated(Terminated::Dropped));
        assert_eq!(reader.await.unwrap(), 2);
    }
}
