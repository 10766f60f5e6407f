//! Verifies that confirmed events are committed, by reading a random sample back on a separate connection.
//!
//! Upstream: `inbox` and other callers of `record` add the ids of confirmed events. Downstream: `store`. A confirmed
//! event that is missing has no row that a consistency check could find, so its id is kept here until it is verified.
//! Bounded memory, one read per interval, no effect on callers. Every missing event is logged as an error and counted
//! in `headwater_confirmed_events_missing_total`. It is a detector, not a guarantee.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use metrics::counter;
use tracing::{debug, error};

use crate::error::Result;
use crate::issue::EventLogId;
use crate::metrics::{CONFIRMED_EVENTS_CHECKED, CONFIRMED_EVENTS_MISSING};
use crate::store::Store;

/// Maximum number of event logs per check.
const SAMPLE_MAX: usize = 64;

/// Interval of checks.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// A random sample of confirmed event logs to verify. Clones share the sample.
#[derive(Clone, Debug, Default)]
pub struct CommitVerifier {
    sample: Arc<Mutex<ConfirmationSample>>,
}

#[derive(Debug, Default)]
struct ConfirmationSample {
    ids: Vec<EventLogId>,
    /// Event logs added since the last check, in the sample or not.
    seen: u64,
}

impl CommitVerifier {
    /// Adds an event log that was confirmed to its sender. Each has the same probability of being checked.
    pub fn add(&self, id: EventLogId) {
        let mut sample = self.sample.lock().expect("no code panics while it holds this lock");
        sample.seen += 1;
        if sample.ids.len() < SAMPLE_MAX {
            sample.ids.push(id);
            return;
        }
        let index = fastrand::u64(..sample.seen);
        if let Some(replaced) = usize::try_from(index).ok().and_then(|at| sample.ids.get_mut(at)) {
            *replaced = id;
        }
    }

    /// Checks the sample once and clears it, also on error. Returns the confirmed event logs that are missing.
    pub async fn verify_once(&self, store: &dyn Store) -> Result<Vec<EventLogId>> {
        let ConfirmationSample { ids, .. } =
            std::mem::take(&mut *self.sample.lock().expect("no code panics while it holds it"));
        if ids.is_empty() {
            return Ok(vec![]);
        }
        let missing = store.missing_event_logs(&ids).await?;
        counter!(CONFIRMED_EVENTS_CHECKED).increment(ids.len() as u64);
        counter!(CONFIRMED_EVENTS_MISSING).increment(missing.len() as u64);
        for id in &missing {
            error!(
                event_log_id = id.0,
                "a confirmed event is missing in the database: it was rolled back or deleted"
            );
        }
        Ok(missing)
    }

    /// Checks the sample every few seconds until `shutdown` completes.
    pub async fn run(self, store: Arc<dyn Store>, shutdown: impl Future<Output = ()>) {
        tokio::pin!(shutdown);
        loop {
            tokio::select! {
                () = &mut shutdown => return,
                () = tokio::time::sleep(CHECK_EVERY) => {}
            }
            if let Err(error) = self.verify_once(&*store).await {
                debug!(%error, "check of confirmed events failed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sample_is_bounded_and_includes_late_events() {
        let commit_verifier = CommitVerifier::default();
        for id in 0..10_000 {
            commit_verifier.add(EventLogId(id));
        }
        let sample = commit_verifier.sample.lock().unwrap();
        assert_eq!((sample.ids.len(), sample.seen), (SAMPLE_MAX, 10_000));
        // The probability that all are from the first half is 2^-64.
        assert!(sample.ids.iter().any(|id| id.0 >= 5_000));
    }
}
