//! Reads a sample of the confirmed events back, on a connection that wrote none of them.
//!
//! Upstream: `inbox` and every other caller of `record` note what they confirmed. Downstream: `store`. A confirmed event that
//! is not in the database has no row that an audit could find, so its id is remembered here until it is checked.
//! Promises: bounded memory, one read for each interval, and no effect on the callers. Refuses: it is a detector, not a
//! guarantee; each event that is missing is an error in the log and counts in `headwater_confirmed_events_missing_total`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use metrics::counter;
use tracing::{debug, error};

use crate::error::Result;
use crate::issue::EventLogId;
use crate::metrics::{CONFIRMED_EVENTS_CHECKED, CONFIRMED_EVENTS_MISSING};
use crate::random;
use crate::store::Store;

/// Event logs that are read back at once.
const SAMPLE_MAX: usize = 64;

/// Between two checks.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// Event logs that were confirmed and are still to be checked: a random sample. Clones are the same sample.
#[derive(Clone, Debug, Default)]
pub struct CommitVerifier {
    sample: Arc<Mutex<ConfirmationSample>>,
}

#[derive(Debug, Default)]
struct ConfirmationSample {
    ids: Vec<EventLogId>,
    /// Since the last check, those included that are not in the sample.
    seen: u64,
}

impl CommitVerifier {
    /// Notes that an event log was confirmed to its sender. Each has the same chance to be checked.
    pub fn add(&self, id: EventLogId) {
        let mut sample = self.sample.lock().expect("no code panics while it holds this lock");
        sample.seen += 1;
        if sample.ids.len() < SAMPLE_MAX {
            sample.ids.push(id);
            return;
        }
        let place = random::u64() % sample.seen;
        if let Some(replaced) = usize::try_from(place).ok().and_then(|at| sample.ids.get_mut(at)) {
            *replaced = id;
        }
    }

    /// Checks the sample once. Returns the confirmed event logs that are missing; after an error the sample is gone.
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
                "a confirmed event is not in the database: it was rolled back or deleted"
            );
        }
        Ok(missing)
    }

    /// Checks a sample every few seconds, until `shutdown`.
    pub async fn run(self, store: Arc<dyn Store>, shutdown: impl Future<Output = ()>) {
        tokio::pin!(shutdown);
        loop {
            tokio::select! {
                () = &mut shutdown => return,
                () = tokio::time::sleep(CHECK_EVERY) => {}
            }
            if let Err(error) = self.verify_once(&*store).await {
                debug!(%error, "confirmed events were not checked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sample_is_bounded_and_holds_late_events_too() {
        let commit_verifier = CommitVerifier::default();
        for id in 0..10_000 {
            commit_verifier.add(EventLogId(id));
        }
        let sample = commit_verifier.sample.lock().unwrap();
        assert_eq!((sample.ids.len(), sample.seen), (SAMPLE_MAX, 10_000));
        // The chance that all of them are among the first half is 2^-64.
        assert!(sample.ids.iter().any(|id| id.0 >= 5_000));
    }
}
