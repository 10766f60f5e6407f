//! The local queue of a worker: issues to process in this process, now or at a given time.
//!
//! Upstream: `sweeper` while the stream is unavailable, `worker` when an issue can be claimed only later. Downstream:
//! `worker`. Guarantees: an issue is queued at most once, at the earliest requested time. Not durable: after a crash,
//! the sweep finds the issues in the database.

use std::collections::{BTreeSet, HashMap};
use std::pin::pin;
use std::sync::{Mutex, MutexGuard};

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::issue::IssueId;
use crate::limits::LOCAL_QUEUE_MAX;

#[derive(Debug, Default)]
pub(crate) struct DueQueue {
    state: Mutex<LocalQueueState>,
    changed: Notify,
    /// Notified when an issue is removed.
    removed: Notify,
}

#[derive(Debug, Default)]
struct LocalQueueState {
    by_time: BTreeSet<(Instant, IssueId)>,
    by_issue: HashMap<IssueId, Instant>,
}

impl DueQueue {
    /// Queues the issue, or moves it to this time if that is earlier. Returns false if the queue is full.
    pub(crate) fn add(&self, issue_id: IssueId, at: Instant) -> bool {
        let mut state = self.lock();
        match state.by_issue.get(&issue_id).copied() {
            Some(queued) if queued <= at => return true,
            Some(queued) => {
                state.by_time.remove(&(queued, issue_id));
            }
            None if state.by_issue.len() >= LOCAL_QUEUE_MAX => return false,
            None => {}
        }
        state.by_issue.insert(issue_id, at);
        state.by_time.insert((at, issue_id));
        drop(state);
        self.changed.notify_one();
        true
    }

    /// Waits for the next due issue and removes it. Cancel-safe. For one caller at a time.
    pub(crate) async fn next(&self) -> IssueId {
        loop {
            let first = self.lock().by_time.first().copied();
            match first {
                Some((at, issue_id)) if at <= Instant::now() => {
                    let mut state = self.lock();
                    state.by_time.remove(&(at, issue_id));
                    state.by_issue.remove(&issue_id);
                    drop(state);
                    self.removed.notify_waiters();
                    return issue_id;
                }
                Some((at, _)) => tokio::select! {
                    () = sleep_until(at) => {}
                    () = self.changed.notified() => {}
                },
                None => self.changed.notified().await,
            }
        }
    }

    /// Whether more than `count` issues are due.
    pub(crate) fn has_more_due_than(&self, count: usize) -> bool {
        let now = Instant::now();
        self.lock().by_time.iter().nth(count).is_some_and(|(at, _)| *at <= now)
    }

    /// Waits until at most `count` issues are due. Cancel-safe.
    pub(crate) async fn until_due_at_most(&self, count: usize) {
        loop {
            let mut removed = pin!(self.removed.notified());
            // Before the check, so that a removal after it is noticed.
            removed.as_mut().enable();
            if !self.has_more_due_than(count) {
                return;
            }
            removed.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, LocalQueueState> {
        self.state.lock().expect("no code panics while it holds this lock")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_issue_is_returned_once_at_its_earliest_due_time() {
        let (queue, now) = (DueQueue::default(), Instant::now());
        for (issue, seconds) in [(1, 30), (2, 20), (1, 10), (3, 0), (2, 40)] {
            assert!(queue.add(IssueId(issue), now + Duration::from_secs(seconds)));
        }
        let mut seen = Vec::new();
        for _ in 0..3 {
            let issue = queue.next().await;
            seen.push((issue.0, now.elapsed().as_secs()));
        }
        assert_eq!(seen, [(3, 0), (1, 10), (2, 20)]);
        let none = tokio::time::timeout(Duration::from_secs(100), queue.next()).await;
        assert!(none.is_err(), "the queue is empty");
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiter_is_woken_when_few_issues_are_due() {
        let (queue, now) = (DueQueue::default(), Instant::now());
        for issue in 0..3 {
            queue.add(IssueId(issue), now);
        }
        queue.add(IssueId(9), now + Duration::from_secs(60));
        assert!(queue.has_more_due_than(2) && !queue.has_more_due_than(3));
        let waiting = async {
            queue.until_due_at_most(1).await;
            assert!(queue.has_more_due_than(0) && !queue.has_more_due_than(1));
        };
        let taking = async {
            queue.next().await;
            tokio::task::yield_now().await;
            queue.next().await;
        };
        tokio::join!(waiting, taking);
    }

    #[test]
    fn a_full_queue_rejects_new_issues() {
        let (queue, now) = (DueQueue::default(), Instant::now());
        assert!((0..LOCAL_QUEUE_MAX as i64).all(|issue| queue.add(IssueId(issue), now)));
        assert!(!queue.add(IssueId(-1), now));
        assert!(queue.add(IssueId(0), now), "a queued issue can be queued again");
    }
}
