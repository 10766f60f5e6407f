//! The agenda: issues that this process will look at by itself, now or at a given time.
//!
//! Upstream: `sweeper` when the stream is away, `worker` when an issue can be claimed only later. Downstream: `worker`.
//! Promises: an issue stands on it once, at the earliest time asked for. Not here: any durability. What is lost with the
//! process is in SQL, where the sweep finds it.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard};

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::issue::IssueId;
use crate::limits::LOCAL_QUEUE_MAX;

#[derive(Debug, Default)]
pub(crate) struct DueQueue {
    items: Mutex<Items>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Items {
    by_time: BTreeSet<(Instant, IssueId)>,
    by_issue: HashMap<IssueId, Instant>,
}

impl DueQueue {
    /// Looks at the issue at this time, or earlier if it stands on the agenda already. Whether there was room.
    pub(crate) fn add(&self, issue_id: IssueId, at: Instant) -> bool {
        let mut items = self.lock();
        match items.by_issue.get(&issue_id).copied() {
            Some(known) if known <= at => return true,
            Some(known) => {
                items.by_time.remove(&(known, issue_id));
            }
            None if items.by_issue.len() >= LOCAL_QUEUE_MAX => return false,
            None => {}
        }
        items.by_issue.insert(issue_id, at);
        items.by_time.insert((at, issue_id));
        drop(items);
        self.changed.notify_one();
        true
    }

    /// Waits for the next issue that is due, and takes it off. Cancel-safe. For one caller at a time.
    pub(crate) async fn next(&self) -> IssueId {
        loop {
            let first = self.lock().by_time.first().copied();
            match first {
                Some((at, issue_id)) if at <= Instant::now() => {
                    let mut items = self.lock();
                    items.by_time.remove(&(at, issue_id));
                    items.by_issue.remove(&issue_id);
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

    fn lock(&self) -> MutexGuard<'_, Items> {
        self.items.lock().expect("no code panics while it holds this lock")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn issues_come_when_they_are_due_each_once_at_its_earliest_time() {
        let (agenda, now) = (DueQueue::default(), Instant::now());
        for (issue, seconds) in [(1, 30), (2, 20), (1, 10), (3, 0), (2, 40)] {
            assert!(agenda.add(IssueId(issue), now + Duration::from_secs(seconds)));
        }
        let mut seen = Vec::new();
        for _ in 0..3 {
            let issue = agenda.next().await;
            seen.push((issue.0, now.elapsed().as_secs()));
        }
        assert_eq!(seen, [(3, 0), (1, 10), (2, 20)]);
        let none = tokio::time::timeout(Duration::from_secs(100), agenda.next()).await;
        assert!(none.is_err(), "nothing is left");
    }

    #[test]
    fn an_agenda_that_is_full_says_so() {
        let (agenda, now) = (DueQueue::default(), Instant::now());
        assert!((0..LOCAL_QUEUE_MAX as i64).all(|issue| agenda.add(IssueId(issue), now)));
        assert!(!agenda.add(IssueId(-1), now));
        assert!(agenda.add(IssueId(0), now), "one that stands on it needs no room");
    }
}
