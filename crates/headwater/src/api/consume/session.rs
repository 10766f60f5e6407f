//! Sessions of HTTP consumers and their deliveries in flight.
//!
//! Upstream: `mod.rs`. Guarantees: every delivery gets exactly one outcome, even if the client disconnects; at most
//! [`CONSUMERS_MAX`] sessions at once; tasks are joined at shutdown.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headwater_queue::Outcome;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::server::shutdown_signal::ShutdownSignal;

/// Maximum HTTP consumers in one process.
pub(crate) const CONSUMERS_MAX: usize = 200;

/// All sessions of this process.
#[derive(Default)]
pub(crate) struct ConsumerSessions {
    sessions: Mutex<HashMap<String, Arc<ConsumerSession>>>,
    tasks: Mutex<JoinSet<()>>,
}

/// The slot of one consumer; freed on drop.
pub(crate) struct ConsumerPermit {
    consumers: Arc<ConsumerSessions>,
    consumer: String,
}

impl Drop for ConsumerPermit {
    fn drop(&mut self) {
        lock(&self.consumers.sessions).remove(&self.consumer);
    }
}

impl ConsumerSessions {
    /// Registers a session if there is a free slot, until its permit is dropped.
    pub(crate) fn admit(
        consumers: &Arc<Self>,
        consumer: &str,
        session: &Arc<ConsumerSession>,
    ) -> Option<ConsumerPermit> {
        let mut sessions = lock(&consumers.sessions);
        if sessions.len() >= CONSUMERS_MAX {
            return None;
        }
        sessions.insert(consumer.to_owned(), Arc::clone(session));
        Some(ConsumerPermit { consumers: Arc::clone(consumers), consumer: consumer.to_owned() })
    }

    pub(crate) fn find(&self, consumer: &str) -> Option<Arc<ConsumerSession>> {
        lock(&self.sessions).get(consumer).cloned()
    }

    /// Runs a task until it ends or `close` joins it.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = lock(&self.tasks);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Asks all consumers to leave and waits for their tasks.
    pub(crate) async fn close(&self) {
        for session in lock(&self.sessions).values() {
            session.leave_requested.trigger();
        }
        let mut tasks = std::mem::take(&mut *lock(&self.tasks));
        while tasks.join_next().await.is_some() {}
    }
}

/// How a session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SessionEnd {
    /// The client left, or the server shuts down: deliveries are released.
    Left,
    /// The client disconnected or its lease expired: sent deliveries count as failed.
    Lost,
}

/// One consumer.
pub(crate) struct ConsumerSession {
    topic: String,
    group: String,
    in_flight: Mutex<SessionDeliveries>,
    last_seen: Mutex<Instant>,
    /// The client wants to leave.
    leave_requested: ShutdownSignal,
    /// No more deliveries are sent.
    closing: ShutdownSignal,
    /// The consumer has left the group.
    ended: ShutdownSignal,
}

/// Deliveries in flight.
#[derive(Default)]
struct SessionDeliveries {
    last: u64,
    is_closed: bool,
    waiting: HashMap<u64, UnsettledDelivery>,
}

struct UnsettledDelivery {
    outcome: oneshot::Sender<Outcome>,
    /// Whether the client may have received it.
    is_sent: bool,
}

impl ConsumerSession {
    pub(crate) fn new(topic: &str, group: &str) -> Self {
        Self {
            topic: topic.to_owned(),
            group: group.to_owned(),
            in_flight: Mutex::default(),
            last_seen: Mutex::new(Instant::now()),
            leave_requested: ShutdownSignal::default(),
            closing: ShutdownSignal::default(),
            ended: ShutdownSignal::default(),
        }
    }

    pub(crate) fn belongs_to(&self, topic: &str, group: &str) -> bool {
        self.topic == topic && self.group == group
    }

    /// Registers a delivery and returns its number and the receiver of its outcome; `None` once the session is
    /// closed.
    pub(crate) fn begin_delivery(&self) -> Option<(u64, oneshot::Receiver<Outcome>)> {
        let mut in_flight = lock(&self.in_flight);
        if in_flight.is_closed {
            return None;
        }
        in_flight.last += 1;
        let (delivery, (outcome, receiver)) = (in_flight.last, oneshot::channel());
        in_flight.waiting.insert(delivery, UnsettledDelivery { outcome, is_sent: false });
        Some((delivery, receiver))
    }

    pub(crate) fn cancel_delivery(&self, delivery: u64) {
        lock(&self.in_flight).waiting.remove(&delivery);
    }

    /// Marks a delivery as sent to the client.
    pub(crate) fn mark_sent(&self, delivery: u64) {
        if let Some(waiting) = lock(&self.in_flight).waiting.get_mut(&delivery) {
            waiting.is_sent = true;
        }
    }

    /// Settles a delivery. Returns whether it was in flight.
    pub(crate) fn settle(&self, delivery: u64, outcome: Outcome) -> bool {
        let found = lock(&self.in_flight).waiting.remove(&delivery);
        // The receiver is gone if the handler was cancelled because the partition has a new owner.
        found.is_some_and(|waiting| waiting.outcome.send(outcome).is_ok())
    }

    pub(crate) fn touch(&self) {
        *lock(&self.last_seen) = Instant::now();
    }

    /// Waits until nothing was received for `lease`. Cancel-safe.
    pub(crate) async fn lease_expired(&self, lease: Duration) {
        loop {
            let end = *lock(&self.last_seen) + lease;
            if end <= Instant::now() {
                return;
            }
            sleep_until(end).await;
        }
    }

    /// Waits until the client wants to leave. Cancel-safe.
    pub(crate) async fn wait_leave_requested(&self) {
        self.leave_requested.wait().await;
    }

    /// Waits until no more deliveries are sent. Cancel-safe.
    pub(crate) async fn closing(&self) {
        self.closing.wait().await;
    }

    /// Closes the session and gives every delivery in flight its outcome.
    pub(crate) fn end(&self, end: SessionEnd) {
        let waiting = {
            let mut in_flight = lock(&self.in_flight);
            in_flight.is_closed = true;
            std::mem::take(&mut in_flight.waiting)
        };
        for (_, UnsettledDelivery { outcome, is_sent }) in waiting {
            let _ = outcome.send(match end {
                SessionEnd::Lost if is_sent => {
                    Outcome::retry("consumer disconnected before settling the message")
                }
                _ => Outcome::Release,
            });
        }
        self.closing.trigger();
    }

    /// Marks that the consumer has left the group.
    pub(crate) fn ended(&self) {
        self.ended.trigger();
    }

    /// Requests to leave, and waits until the consumer has left the group.
    pub(crate) async fn leave(&self) {
        self.leave_requested.trigger();
        self.ended.wait().await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_lost_consumer_retries_sent_deliveries_and_releases_the_rest() {
        let session = ConsumerSession::new("t", "g");
        let (seen, seen_outcome) = session.begin_delivery().unwrap();
        let (_, unseen_outcome) = session.begin_delivery().unwrap();
        session.mark_sent(seen);
        session.end(SessionEnd::Lost);
        assert!(matches!(seen_outcome.await.unwrap(), Outcome::Retry { .. }));
        assert!(matches!(unseen_outcome.await.unwrap(), Outcome::Release));
        assert!(session.begin_delivery().is_none());
        assert!(!session.settle(seen, Outcome::Done));
    }

    #[tokio::test]
    async fn leaving_releases_all_deliveries() {
        let session = ConsumerSession::new("t", "g");
        let (delivery, outcome) = session.begin_delivery().unwrap();
        session.mark_sent(delivery);
        session.end(SessionEnd::Left);
        assert!(matches!(outcome.await.unwrap(), Outcome::Release));
    }

    #[tokio::test]
    async fn a_lease_is_renewed_by_any_request() {
        let session = ConsumerSession::new("t", "g");
        assert!(session.lease_expired(Duration::ZERO).now_or_never().is_some());
        let hour = Duration::from_secs(3600);
        assert!(session.lease_expired(hour).now_or_never().is_none());
        let before = *lock(&session.last_seen);
        tokio::time::sleep(Duration::from_millis(2)).await;
        session.touch();
        assert!(*lock(&session.last_seen) > before);
    }

    #[test]
    fn a_dropped_permit_frees_its_slot() {
        let consumers = Arc::new(ConsumerSessions::default());
        let session = Arc::new(ConsumerSession::new("orders", "workers"));
        let admit =
            |number: usize| ConsumerSessions::admit(&consumers, &number.to_string(), &session);
        let mut permits: Vec<ConsumerPermit> = (0..CONSUMERS_MAX).filter_map(admit).collect();
        assert_eq!(permits.len(), CONSUMERS_MAX);
        assert!(admit(CONSUMERS_MAX).is_none(), "all slots are taken");

        permits.pop();
        assert!(consumers.find(&(CONSUMERS_MAX - 1).to_string()).is_none());
        assert!(admit(CONSUMERS_MAX).is_some());
    }
}
