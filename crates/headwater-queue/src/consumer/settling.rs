//! Settling: deliveries whose outcome is known are ended at the backend, many in one call.
//!
//! Upstream: `worker` collects outcomes. Downstream: [`Streams::settle`](headwater_stream::Streams::settle).
//! Promises: one call at a time per partition, with all that ended meanwhile; the follow-up (retry, dead letter) is
//! written with the acknowledgement or before it; a call that failed is repeated while the lease is trusted, which does no
//! harm: what was settled is settled once. With a lease that is gone, nothing is settled and the partition ends; what the
//! server lost is left to `rescue`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use headwater_stream::limits::{BATCH_BYTES_MAX, BATCH_MAX, FOLLOW_UP_BYTES_MAX};
use headwater_stream::{EntryId, Settle, Settled, Settlement, StreamError, Then};
use tokio::time::Instant;
use tracing::{debug, error, warn};

use super::rescue::Rescuer;
use super::runner::let_others_run;
use super::worker::{Leftovers, State, Worker};

/// The first and the longest pause before a call is repeated.
const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Bytes of follow-ups in one call; the last one may go beyond.
const BYTES_AT_ONCE: usize = BATCH_BYTES_MAX - FOLLOW_UP_BYTES_MAX;

impl Worker {
    /// Settles until there is nothing left to settle.
    pub(super) async fn settle_all(self: Arc<Self>, generation: u64) {
        // Those who are at work on other partitions end first: what is settled at the same time leaves in one write.
        let_others_run().await;
        while let Some(batch) = self.take_batch(generation) {
            self.settle_batch(&batch).await;
        }
    }

    /// What to settle next; `None` ends the settler.
    fn take_batch(&self, generation: u64) -> Option<Arc<Vec<Settlement>>> {
        let mut state = self.lock();
        if state.generation != generation {
            return None;
        }
        let count = batch_len(&state);
        if count == 0 {
            state.has_settler = false;
            state.settling = Arc::default();
            self.tell_watchers(&state);
            return None;
        }
        let rest = state.outcomes.split_off(count);
        let batch = Arc::new(std::mem::replace(&mut state.outcomes, rest));
        state.settling = Arc::clone(&batch);
        Some(batch)
    }

    async fn settle_batch(self: &Arc<Self>, batch: &[Settlement]) {
        let started = Instant::now();
        match self.settle_in_the_end(batch).await {
            Ok(settled) => {
                self.meters.settled(settled.applied, started.elapsed());
                self.meters.in_flight(self.job.in_hand.load(Ordering::Relaxed));
                if settled.stale > 0 {
                    self.rescuer().look_after_stale(batch).await;
                }
            }
            Err(StreamError::Fenced { .. }) => self.fenced(),
            Err(error) if batch.len() > 1 => {
                debug!(stream = %self.rules.stream, %error, "settling one by one");
                for one in batch.chunks(1) {
                    if let Err(error) = self.settle_in_the_end(one).await {
                        self.give_up_settling(one[0].id, &error);
                    }
                }
            }
            Err(error) => self.give_up_settling(batch[0].id, &error),
        }
    }

    /// Settles, and tries again for as long as that can help.
    async fn settle_in_the_end(&self, batch: &[Settlement]) -> Result<Settled, StreamError> {
        let mut pause = PAUSE_FIRST;
        loop {
            let settle = Settle {
                stream: &self.rules.stream,
                group: &self.job.group,
                consumer: &self.consumer,
                fence: self.fence.as_ref(),
                entries: batch,
            };
            match self.job.backend.settle(settle).await {
                Err(error) if error.is_transient() && self.lease.is_trusted() => {
                    self.meters.anomaly("settle_failed", 1);
                    warn!(stream = %self.rules.stream, %error, "settling failed, trying again");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
                answer => return answer,
            }
        }
    }

    /// The lease has another holder: nothing we do here counts any more.
    pub(super) fn fenced(&self) {
        warn!(stream = %self.rules.stream, consumer = %self.consumer, "fenced: the partition has another owner");
        self.meters.anomaly("fenced", 1);
        self.alarm.raise();
        self.abandon();
    }

    /// The lease is gone, and with it the right to what is in hand: others take it over, unless the server lost it.
    pub(super) fn abandon(&self) {
        let Leftovers { unhandled, outcomes } = self.end();
        let rescuer = self.rescuer();
        let again = unhandled.iter().map(|delivery| rescuer.again(delivery));
        let left: Vec<Settlement> = outcomes.into_iter().chain(again).collect();
        if !left.is_empty() {
            self.job.rescue(rescuer.take_care_of(left));
        }
    }

    pub(super) fn rescuer(&self) -> Rescuer {
        Rescuer {
            backend: Arc::clone(&self.job.backend),
            topic: self.job.topic.clone(),
            stream: self.rules.stream.clone(),
            group: self.job.group.clone(),
            witness: Arc::clone(&self.witness),
        }
    }

    /// An entry stays pending: whoever takes the partition over finds it.
    fn give_up_settling(self: &Arc<Self>, id: EntryId, error: &StreamError) {
        if matches!(error, StreamError::Fenced { .. }) {
            return self.fenced();
        }
        self.meters.anomaly("unsettled", 1);
        error!(stream = %self.rules.stream, entry_id = %id, %error, "entry could not be settled and stays pending");
    }
}

/// How many outcomes fit into one call.
fn batch_len(state: &State) -> usize {
    let mut bytes = 0;
    let fits = |entry: &&Settlement| {
        let room = bytes < BYTES_AT_ONCE;
        bytes += match &entry.then {
            Then::Append { fields, .. } | Then::PutAside { fields, .. } => fields.bytes(),
            Then::Done | Then::Delete | Then::Release => 0,
        };
        room
    };
    state.outcomes.iter().take(BATCH_MAX).take_while(fits).count()
}
