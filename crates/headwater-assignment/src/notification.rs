//! Notifications: one bounded, ordered channel between the assignment and its program.
//!
//! Promises: nothing that tells of them ever waits, so a slow or absent reader cannot stop a heartbeat or a shutdown.
//! What waits is bounded: `Added` needs a place before a stream is taken, so no stream is taken that nobody hears of;
//! `Disowned` has places of its own, one for each stream that can have been heard of; `Expired` waits once per stream,
//! and with `Quarantined` it is dropped and counted when there is no place (the sweep announces the former again);
//! `Terminated` has the last place.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use headwater_stream::StreamName;
use tokio::sync::Notify;

use crate::metrics::Metrics;
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
    broker: Arc<Broker>,
}

impl Notifications {
    pub(crate) fn new(broker: &Arc<Broker>) -> Self {
        Self { broker: Arc::clone(broker) }
    }

    /// The next notification; waits for it. `None` after [`Notification::Terminated`]. Cancel-safe.
    pub async fn recv(&mut self) -> Option<Notification> {
        loop {
            if let Some(next) = self.broker.take() {
                return next;
            }
            // Keeps a wake-up that came since `take`, so none is lost.
            self.broker.arrived.notified().await;
        }
    }

    /// The next notification if one waits.
    pub fn try_recv(&mut self) -> Option<Notification> {
        self.broker.take().flatten()
    }
}

impl Drop for Notifications {
    fn drop(&mut self) {
        let mut queue = self.broker.lock();
        queue.abandoned = true;
        queue.items.clear();
        queue.disowned = 0;
    }
}

#[derive(Debug)]
pub(crate) struct Broker {
    queue: Mutex<Queue>,
    max: usize,
    disowned_max: usize,
    arrived: Notify,
    /// A notification was taken, so there is a place.
    pub(crate) taken: Notify,
    metrics: Metrics,
}

#[derive(Debug, Default)]
struct Queue {
    items: VecDeque<Notification>,
    /// Streams with an `Expired` in `items`.
    expired: HashSet<StreamName>,
    /// `Disowned` in `items`: they have places of their own.
    disowned: usize,
    /// Places kept for streams that are being taken.
    reserved: usize,
    closed: bool,
    abandoned: bool,
}

impl Broker {
    /// A channel for `max` notifications and as many `Disowned` as there can be streams to lose.
    pub(crate) fn new(max: usize, streams_max: usize, metrics: Metrics) -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::default(),
            max,
            // Streams in hand, and those whose `Added` still waits.
            disowned_max: streams_max + max,
            arrived: Notify::new(),
            taken: Notify::new(),
            metrics,
        })
    }

    /// A place for an `Added`; `None` if the channel is full or nobody reads it.
    pub(crate) fn reserve(self: &Arc<Self>) -> Option<Place> {
        let mut queue = self.lock();
        if queue.room(self.max) == 0 {
            return None;
        }
        queue.reserved += 1;
        Some(Place { broker: Arc::clone(self) })
    }

    /// How many places there are.
    pub(crate) fn room(&self) -> usize {
        self.lock().room(self.max)
    }

    pub(crate) fn expired(&self, stream: &StreamName) {
        let mut queue = self.lock();
        if queue.closed || queue.expired.contains(stream) {
            return;
        }
        if queue.room(self.max) == 0 {
            self.metrics.notification_dropped("expired");
            return;
        }
        queue.expired.insert(stream.clone());
        self.push(queue, Notification::Expired(stream.clone()), "expired");
    }

    /// Takes an `Expired` back that is no longer true.
    pub(crate) fn no_longer_expired(&self, stream: &StreamName) {
        let mut queue = self.lock();
        if queue.expired.remove(stream) {
            queue.items.retain(|item| !matches!(item, Notification::Expired(s) if s == stream));
        }
    }

    pub(crate) fn quarantined(&self, stream: &StreamName, owners: u64) {
        let queue = self.lock();
        if queue.room(self.max) == 0 {
            self.metrics.notification_dropped("quarantined");
            return;
        }
        let notification = Notification::Quarantined { stream: stream.clone(), owners };
        self.push(queue, notification, "quarantined");
    }

    pub(crate) fn disowned(&self, stream: &StreamName, reason: Disowned) {
        let mut queue = self.lock();
        if queue.closed || queue.abandoned || queue.disowned >= self.disowned_max {
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
        if queue.abandoned {
            return;
        }
        self.push(queue, Notification::Terminated(reason), "terminated");
    }

    fn push(
        &self,
        mut queue: MutexGuard<'_, Queue>,
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
        self.taken.notify_one();
        Some(Some(next))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("no code panics while it holds this lock")
    }
}

impl Queue {
    fn room(&self, max: usize) -> usize {
        if self.closed || self.abandoned {
            return 0;
        }
        max.saturating_sub(self.items.len() - self.disowned + self.reserved)
    }
}

/// A place in the channel for the `Added` of a stream that is being taken; free again when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    broker: Arc<Broker>,
}

impl Place {
    pub(crate) fn added(self, owned: Owned) {
        let broker = Arc::clone(&self.broker);
        {
            let mut queue = broker.lock();
            if queue.closed || queue.abandoned {
                broker.metrics.notification_dropped("added");
                return;
            }
            queue.items.push_back(Notification::Added(owned));
        }
        // `self` still counts as reserved until it is dropped below, so nobody got the place in between.
        broker.metrics.notification("added");
        broker.arrived.notify_one();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.broker.lock().reserved -= 1;
        self.broker.taken.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channel(max: usize, streams_max: usize) -> (Arc<Broker>, Notifications) {
        let broker = Broker::new(max, streams_max, Metrics::new("svc"));
        let notifications = Notifications::new(&broker);
        (broker, notifications)
    }

    fn stream(name: &str) -> StreamName {
        StreamName::new(name).unwrap()
    }

    #[test]
    fn what_waits_is_bounded_whatever_is_told() {
        let (broker, mut notifications) = channel(3, 2);
        let place = broker.reserve().unwrap();
        for i in 0..100 {
            broker.expired(&stream(&format!("e{i}")));
            broker.quarantined(&stream("q"), 5);
            broker.disowned(&stream(&format!("d{i}")), Disowned::LeaseLost);
        }
        assert!(broker.reserve().is_none());
        broker.terminated(Terminated::Shutdown);
        broker.disowned(&stream("late"), Disowned::LeaseLost);

        let heard: Vec<_> = std::iter::from_fn(|| notifications.try_recv()).collect();
        // One place is reserved, two are for others, five for what can be lost, one for the end.
        assert_eq!(heard.len(), 2 + 5 + 1, "{heard:?}");
        assert!(matches!(heard.last(), Some(Notification::Terminated(Terminated::Shutdown))));
        drop(place);
    }

    #[test]
    fn an_expired_stream_waits_once_and_can_be_taken_back() {
        let (broker, mut notifications) = channel(10, 1);
        for name in ["a", "b", "a"] {
            broker.expired(&stream(name));
        }
        broker.no_longer_expired(&stream("a"));
        assert!(
            matches!(notifications.try_recv(), Some(Notification::Expired(s)) if s == stream("b"))
        );
        assert!(notifications.try_recv().is_none());
        // Once heard, it can be said again.
        broker.expired(&stream("b"));
        assert!(notifications.try_recv().is_some());
    }

    #[test]
    fn a_reserved_place_is_free_again_when_it_is_not_used() {
        let (broker, notifications) = channel(1, 1);
        let place = broker.reserve().unwrap();
        assert!(broker.reserve().is_none());
        drop(place);
        assert!(broker.reserve().is_some());
        drop(notifications);
        assert!(broker.reserve().is_none(), "nobody reads");
    }

    #[tokio::test]
    async fn a_reader_that_waits_is_woken_and_the_end_is_the_end() {
        let (broker, mut notifications) = channel(1, 1);
        let reader = tokio::spawn(async move {
            let mut heard = 0;
            while notifications.recv().await.is_some() {
                heard += 1;
            }
            heard
        });
        tokio::task::yield_now().await;
        broker.expired(&stream("a"));
        tokio::task::yield_now().await;
        broker.terminated(Terminated::Dropped);
        assert_eq!(reader.await.unwrap(), 2);
    }
}
