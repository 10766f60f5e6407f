//! Who consumes over HTTP, and what each has in hand.
//!
//! Upstream: `consuming`. Promises: every message that is expected gets one word, whoever vanishes; at most
//! [`CONSUMERS_MAX`] attend at once; what was started is joined when the process stops.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headwater_queue::Outcome;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::server::shutdown::Stopping;

/// Consumers over HTTP in one process.
pub(crate) const CONSUMERS_MAX: usize = 200;

/// All of them.
#[derive(Default)]
pub(crate) struct Consumers {
    attending: Mutex<HashMap<String, Arc<Attendance>>>,
    tasks: Mutex<JoinSet<()>>,
}

/// The place of one consumer, which is free again when this is dropped.
pub(crate) struct Place {
    consumers: Arc<Consumers>,
    consumer: String,
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.consumers.attending).remove(&self.consumer);
    }
}

impl Consumers {
    /// Takes one in, if there is room, for as long as its place is kept.
    pub(crate) fn admit(
        consumers: &Arc<Self>,
        consumer: &str,
        attendance: &Arc<Attendance>,
    ) -> Option<Place> {
        let mut attending = lock(&consumers.attending);
        if attending.len() >= CONSUMERS_MAX {
            return None;
        }
        attending.insert(consumer.to_owned(), Arc::clone(attendance));
        Some(Place { consumers: Arc::clone(consumers), consumer: consumer.to_owned() })
    }

    pub(crate) fn find(&self, consumer: &str) -> Option<Arc<Attendance>> {
        lock(&self.attending).get(consumer).cloned()
    }

    /// Runs until it is done, or until `close`.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = lock(&self.tasks);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Waits for all that was spawned; each ends by itself when the process stops or its caller leaves.
    pub(crate) async fn close(&self) {
        for attendance in lock(&self.attending).values() {
            attendance.wish.begin();
        }
        let mut tasks = std::mem::take(&mut *lock(&self.tasks));
        while tasks.join_next().await.is_some() {}
    }
}

/// How an attendance ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It said so, or we stop: what it has is given back.
    Left,
    /// Nobody knows what became of what it was handed.
    Vanished,
}

/// One consumer.
pub(crate) struct Attendance {
    topic: String,
    group: String,
    hand: Mutex<Hand>,
    heard: Mutex<Instant>,
    /// It wants to leave.
    wish: Stopping,
    /// It hands out no more.
    ending: Stopping,
    /// It has left the group.
    ended: Stopping,
}

/// What it has in hand.
#[derive(Default)]
struct Hand {
    last: u64,
    is_over: bool,
    waiting: HashMap<u64, Waiting>,
}

struct Waiting {
    word: oneshot::Sender<Outcome>,
    /// Whether the caller may have seen it.
    is_sent: bool,
}

impl Attendance {
    pub(crate) fn new(topic: &str, group: &str) -> Self {
        Self {
            topic: topic.to_owned(),
            group: group.to_owned(),
            hand: Mutex::default(),
            heard: Mutex::new(Instant::now()),
            wish: Stopping::default(),
            ending: Stopping::default(),
            ended: Stopping::default(),
        }
    }

    pub(crate) fn is_of(&self, topic: &str, group: &str) -> bool {
        self.topic == topic && self.group == group
    }

    /// A number for a message, and where its word will come from; `None` once it is over.
    pub(crate) fn expect(&self) -> Option<(u64, oneshot::Receiver<Outcome>)> {
        let mut hand = lock(&self.hand);
        if hand.is_over {
            return None;
        }
        hand.last += 1;
        let (delivery, (word, receiver)) = (hand.last, oneshot::channel());
        hand.waiting.insert(delivery, Waiting { word, is_sent: false });
        Some((delivery, receiver))
    }

    pub(crate) fn forget(&self, delivery: u64) {
        lock(&self.hand).waiting.remove(&delivery);
    }

    /// From now on the caller may have seen it.
    pub(crate) fn sent(&self, delivery: u64) {
        if let Some(waiting) = lock(&self.hand).waiting.get_mut(&delivery) {
            waiting.is_sent = true;
        }
    }

    /// Whether there was such a message to settle.
    pub(crate) fn settle(&self, delivery: u64, outcome: Outcome) -> bool {
        let found = lock(&self.hand).waiting.remove(&delivery);
        // An error means that the handler was cancelled: its partition has a new owner.
        found.is_some_and(|waiting| waiting.word.send(outcome).is_ok())
    }

    pub(crate) fn heard(&self) {
        *lock(&self.heard) = Instant::now();
    }

    /// Returns when nothing was heard for so long. Cancel-safe.
    pub(crate) async fn lease_over(&self, lease: Duration) {
        loop {
            let end = *lock(&self.heard) + lease;
            if end <= Instant::now() {
                return;
            }
            sleep_until(end).await;
        }
    }

    /// Returns when it wants to leave. Cancel-safe.
    pub(crate) async fn leaving(&self) {
        self.wish.begun().await;
    }

    /// Returns when it hands out no more. Cancel-safe.
    pub(crate) async fn ending(&self) {
        self.ending.begun().await;
    }

    /// Gives every message that waits its word.
    pub(crate) fn end(&self, end: End) {
        let waiting = {
            let mut hand = lock(&self.hand);
            hand.is_over = true;
            std::mem::take(&mut hand.waiting)
        };
        for (_, Waiting { word, is_sent }) in waiting {
            let _ = word.send(match end {
                End::Vanished if is_sent => {
                    Outcome::retry("the consumer was gone before it said what became of it")
                }
                _ => Outcome::Release,
            });
        }
        self.ending.begin();
    }

    /// It has left the group.
    pub(crate) fn ended(&self) {
        self.ended.begin();
    }

    /// Leaves, and returns when it has left.
    pub(crate) async fn leave(&self) {
        self.wish.begin();
        self.ended.begun().await;
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
    async fn what_a_vanished_consumer_was_handed_is_tried_again_and_the_rest_given_back() {
        let attendance = Attendance::new("t", "g");
        let (seen, seen_word) = attendance.expect().unwrap();
        let (_, unseen_word) = attendance.expect().unwrap();
        attendance.sent(seen);
        attendance.end(End::Vanished);
        assert!(matches!(seen_word.await.unwrap(), Outcome::Retry { .. }));
        assert!(matches!(unseen_word.await.unwrap(), Outcome::Release));
        assert!(attendance.expect().is_none());
        assert!(!attendance.settle(seen, Outcome::Done));
    }

    #[tokio::test]
    async fn who_leaves_gives_back_what_it_has() {
        let attendance = Attendance::new("t", "g");
        let (delivery, word) = attendance.expect().unwrap();
        attendance.sent(delivery);
        attendance.end(End::Left);
        assert!(matches!(word.await.unwrap(), Outcome::Release));
    }

    #[tokio::test]
    async fn a_lease_runs_from_the_last_sign_of_life() {
        let attendance = Attendance::new("t", "g");
        assert!(attendance.lease_over(Duration::ZERO).now_or_never().is_some());
        let hour = Duration::from_secs(3600);
        assert!(attendance.lease_over(hour).now_or_never().is_none());
        let before = *lock(&attendance.heard);
        tokio::time::sleep(Duration::from_millis(2)).await;
        attendance.heard();
        assert!(*lock(&attendance.heard) > before);
    }

    #[test]
    fn whoever_goes_away_at_whatever_moment_leaves_its_place_to_others() {
        let consumers = Arc::new(Consumers::default());
        let attendance = Arc::new(Attendance::new("orders", "workers"));
        let admit = |number: usize| Consumers::admit(&consumers, &number.to_string(), &attendance);
        let mut places: Vec<Place> = (0..CONSUMERS_MAX).filter_map(admit).collect();
        assert_eq!(places.len(), CONSUMERS_MAX);
        assert!(admit(CONSUMERS_MAX).is_none(), "there is no room for one more");

        places.pop();
        assert!(consumers.find(&(CONSUMERS_MAX - 1).to_string()).is_none());
        assert!(admit(CONSUMERS_MAX).is_some());
    }
}
