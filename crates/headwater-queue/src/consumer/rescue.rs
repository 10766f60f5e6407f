//! What to do when the server lost everything (flushed, or restarted without its data) while messages were in hand: they
//! and what follows from them exist here only, so they are written again.
//!
//! Upstream: `settling`, when the server knows nothing of an entry; `worker`, when its lease is gone with all it had in
//! hand. Downstream: the backend.
//! Promises: a message in hand, its retry or its dead letter outlives the server's data. One that stood still until
//! others took over changes nothing: a *witness*, which lies beside the stream and never changes while the server keeps
//! its data, tells whether that was lost or only trimmed.
//! Not here: what was in nobody's hand when the server lost it.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::clock::{Clock, SystemClock};
use headwater_stream::{
    Backend, Delivery, EntryId, MapName, PendingQuery, PutAside, Range, RegistryMap, Retention,
    Settlement, StreamError, StreamName, Then,
};
use tokio::time::Instant;
use tracing::{debug, error, warn};

use super::meters::anomaly;
use crate::message::{self, ORIGINAL_MESSAGE_ID, RETRY_GROUP, read_id};
use crate::page::previous;
use crate::topic::{GroupName, TopicName};

/// The field of a witness.
const SINCE: &str = "since";
/// How long to try when the server does not answer: by then, whoever waits for the messages has noticed.
const RESCUED_WITHIN: Duration = Duration::from_secs(10 * 60);
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Writes again what the server lost of one partition.
#[derive(Clone)]
pub(super) struct Rescuer {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) topic: TopicName,
    pub(super) stream: StreamName,
    pub(super) group: GroupName,
    pub(super) witness: Arc<Witness>,
}

/// Tells whether the server still has the data it had when the work on a partition began.
#[derive(Debug)]
pub(super) struct Witness {
    map: MapName,
    seen: OnceLock<Bytes>,
}

impl Witness {
    pub(super) fn new(map: MapName) -> Self {
        Self { map, seen: OnceLock::new() }
    }

    /// To be called before anything is read: what is lost from then on is noticed.
    pub(super) async fn call(&self, backend: &dyn Backend) -> Result<(), StreamError> {
        let since = match self.since(backend).await? {
            Some(since) => since,
            None => {
                // Who comes second finds the first one's.
                let chance = RandomState::new().hash_one(SINCE);
                let mine = Bytes::from(format!("{} {chance:016x}", SystemClock.now().to_rfc3339()));
                let fields: RegistryMap = BTreeMap::from([(SINCE.to_owned(), mine.clone())]);
                backend.map_create(&self.map, &fields).await?;
                self.since(backend).await?.unwrap_or(mine)
            }
        };
        let _ = self.seen.set(since);
        Ok(())
    }

    /// Whether the server lost what it had. `None` if nobody knows.
    async fn has_lost_all(&self, backend: &dyn Backend) -> Result<Option<bool>, StreamError> {
        let Some(seen) = self.seen.get() else { return Ok(None) };
        Ok(Some(self.since(backend).await?.as_ref() != Some(seen)))
    }

    async fn since(&self, backend: &dyn Backend) -> Result<Option<Bytes>, StreamError> {
        let fields = backend.map_get(&self.map).await?;
        Ok(fields.and_then(|mut fields| fields.remove(SINCE)))
    }
}

impl Rescuer {
    /// Whether it is certain that the server lost what it had.
    pub(super) async fn has_lost_all(&self) -> Result<bool, StreamError> {
        Ok(self.witness.has_lost_all(self.backend.as_ref()).await? == Some(true))
    }

    /// What becomes of a message that is in hand and was not handled to the end: it is there again, for its group.
    pub(super) fn again(&self, delivery: &Delivery) -> Settlement {
        let original = delivery.fields.get(ORIGINAL_MESSAGE_ID).and_then(read_id);
        let first_id = original.unwrap_or(delivery.id);
        let fields = message::replace_fields(
            &delivery.fields,
            &[
                (ORIGINAL_MESSAGE_ID, Some(first_id.to_string())),
                (RETRY_GROUP, Some(self.group.to_string())),
            ],
        );
        Settlement { id: delivery.id, then: Then::Append { to: self.stream.clone(), fields } }
    }

    /// After a settle that took no effect for some of these, under a lease that is ours: those that somebody else has,
    /// or that we settled before, are fine. What the server knows nothing of is written now.
    pub(super) async fn look_after_stale(&self, batch: &[Settlement]) {
        for settlement in batch.iter().filter(|entry| is_follow_up(&entry.then)) {
            self.rescue(settlement, Suspicion::Stale).await;
        }
    }

    /// After the lease was lost: writes what was in hand, if the server lost everything. If it did not, others have
    /// taken over, and nothing here counts any more.
    pub(super) async fn take_care_of(self, mut left: Vec<Settlement>) {
        left.retain(|entry| is_follow_up(&entry.then));
        left.sort_by_key(|entry| entry.id);
        let mut patience = Patience::new();
        loop {
            match self.has_lost_all().await {
                Ok(true) => break,
                Ok(false) => return,
                Err(error) if patience.goes_on_after(&error).await => {}
                Err(error) => {
                    return warn!(stream = %self.stream, %error, "the server does not say what it lost");
                }
            }
        }
        for settlement in &left {
            self.rescue(settlement, Suspicion::Lost).await;
        }
    }

    async fn rescue(&self, settlement: &Settlement, suspicion: Suspicion) {
        let mut patience = Patience::new();
        while let Err(error) = self.try_rescue(settlement, suspicion).await {
            if !patience.goes_on_after(&error).await {
                anomaly(self.topic.as_str(), self.group.as_str(), "unsettled", 1);
                error!(stream = %self.stream, entry_id = %settlement.id, %error, "an entry that the server lost is lost");
                return;
            }
        }
    }

    async fn try_rescue(
        &self,
        Settlement { id, then }: &Settlement,
        suspicion: Suspicion,
    ) -> Result<(), StreamError> {
        let is_known = match suspicion {
            Suspicion::Stale => self.is_known(*id).await?,
            // Some may have come after the loss: these the server has.
            Suspicion::Lost => self.is_there(*id).await?,
        };
        if !is_known {
            self.write(then).await?;
            anomaly(self.topic.as_str(), self.group.as_str(), "lost_by_the_server", 1);
            warn!(stream = %self.stream, entry_id = %id, "the server lost an entry in hand; it is written again");
        }
        Ok(())
    }

    /// Whether the server knows anything of an entry: it is there, or it was and is settled.
    async fn is_known(&self, id: EntryId) -> Result<bool, StreamError> {
        if self.is_there(id).await? {
            return Ok(true);
        }
        // On a busy topic the group may be beyond this entry again, after everything was lost.
        if self.has_lost_all().await? {
            return Ok(false);
        }
        // Trimmed, and acknowledged by us before the reply was lost? Then the group has come at least this far.
        let stats = self.backend.stats(&self.stream).await?;
        let groups = stats.map(|stats| stats.groups).unwrap_or_default();
        Ok(groups.iter().any(|known| known.name == self.group && known.last_delivered >= id))
    }

    /// Whether the entry is in its stream, or pending.
    async fn is_there(&self, id: EntryId) -> Result<bool, StreamError> {
        let range = Range { from: id, to: id, ..Range::first(1) };
        if !self.backend.range(&self.stream, range).await?.is_empty() {
            return Ok(true);
        }
        let query = PendingQuery {
            stream: &self.stream,
            group: &self.group,
            consumer: None,
            min_idle: Duration::ZERO,
            after: previous(id),
            count: 1,
        };
        match self.backend.pending(query).await {
            Ok(pending) => Ok(pending.first().is_some_and(|first| first.id == id)),
            Err(StreamError::NoGroup { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn write(&self, then: &Then) -> Result<(), StreamError> {
        match then {
            Then::Append { to, fields } => {
                let fields = std::slice::from_ref(fields);
                self.backend.append(to, fields, &Retention::KEEP_ALL).await?;
            }
            Then::PutAside { delays, to, due, fields } => {
                let item = PutAside { to: to.clone(), due: *due, fields: fields.clone() };
                self.backend.put_aside(delays, &[item]).await?;
            }
            Then::Done | Then::Delete | Then::Release => {}
        }
        Ok(())
    }
}

/// Why an entry may be lost.
#[derive(Clone, Copy, Debug)]
enum Suspicion {
    /// A settle took no effect.
    Stale,
    /// The server lost everything.
    Lost,
}

/// How long to go on when the server does not answer.
struct Patience {
    until: Instant,
    pause: Duration,
}

impl Patience {
    fn new() -> Self {
        Self { until: Instant::now() + RESCUED_WITHIN, pause: PAUSE_FIRST }
    }

    /// Waits a moment. Returns whether to try again.
    async fn goes_on_after(&mut self, error: &StreamError) -> bool {
        if !error.is_transient() || Instant::now() >= self.until {
            return false;
        }
        debug!(%error, "the server does not answer, trying again");
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        true
    }
}

fn is_follow_up(then: &Then) -> bool {
    matches!(then, Then::Append { .. } | Then::PutAside { .. })
}

#[cfg(test)]
mod tests {
    use headwater_stream::{ConsumerName, Fields, GroupStart, Options, Settle, TrimGuard, connect};

    use super::*;

    /// One message that a dead owner has in hand.
    async fn in_hand() -> anyhow::Result<(Rescuer, Settlement)> {
        let backend = connect("embedded:memory", &Options::default()).await?;
        let rescuer = Rescuer {
            backend,
            topic: TopicName::new("orders")?,
            stream: StreamName::new("orders")?,
            group: GroupName::new("billing")?,
            witness: Arc::new(Witness::new(MapName::new("witness")?)),
        };
        let Rescuer { backend, stream, group, .. } = &rescuer;
        rescuer.witness.call(backend.as_ref()).await?;
        let fields = Fields::new([("payload", "p")]);
        backend.ensure_group(stream, group, GroupStart::Beginning).await?;
        backend.append(stream, &[fields], &Retention::KEEP_ALL).await?;
        let mut reader = backend.reader(group, &ConsumerName::new("dead")?).await?;
        let streams = std::slice::from_ref(stream);
        let read = reader.read(streams, 1, Duration::ZERO).await?.remove(0).entries.remove(0);
        let again = rescuer.again(&read);
        Ok((rescuer, again))
    }

    /// The next owner handles it, and it is trimmed.
    async fn take_over(rescuer: &Rescuer, id: EntryId) -> anyhow::Result<()> {
        let Rescuer { backend, stream, group, .. } = rescuer;
        let consumer = &ConsumerName::new("next")?;
        let entries = &[Settlement::done(id)];
        backend.settle(Settle { stream, group, consumer, fence: None, entries }).await?;
        backend.trim(stream, &Retention::max_len(0), TrimGuard::Safe).await?;
        Ok(())
    }

    async fn rescued(rescuer: &Rescuer) -> anyhow::Result<usize> {
        Ok(rescuer.backend.range(&rescuer.stream, Range::first(10)).await?.len())
    }

    #[tokio::test]
    async fn what_others_handled_and_trimmed_is_not_written_again() -> anyhow::Result<()> {
        let (rescuer, again) = in_hand().await?;
        take_over(&rescuer, again.id).await?;
        rescuer.clone().take_care_of(vec![again.clone()]).await;
        assert_eq!(rescued(&rescuer).await?, 0);
        rescuer.look_after_stale(&[again]).await;
        assert_eq!(rescued(&rescuer).await?, 0);
        Ok(())
    }

    #[tokio::test]
    async fn what_the_server_lost_is_written_again_for_its_group() -> anyhow::Result<()> {
        let (rescuer, again) = in_hand().await?;
        take_over(&rescuer, again.id).await?;
        rescuer.backend.map_delete(&rescuer.witness.map).await?;
        rescuer.clone().take_care_of(vec![again.clone()]).await;
        let entries = rescuer.backend.range(&rescuer.stream, Range::first(10)).await?;
        assert_eq!(entries.len(), 1);
        let fields = &entries[0].fields;
        assert_eq!(fields.get("payload").unwrap(), "p");
        assert_eq!(fields.get(ORIGINAL_MESSAGE_ID).unwrap(), again.id.to_string().as_bytes());
        assert_eq!(fields.get(RETRY_GROUP).unwrap(), "billing");
        Ok(())
    }

    #[tokio::test]
    async fn what_came_after_the_loss_is_left_alone() -> anyhow::Result<()> {
        let (rescuer, again) = in_hand().await?;
        rescuer.backend.map_delete(&rescuer.witness.map).await?;
        rescuer.clone().take_care_of(vec![again]).await;
        assert_eq!(rescued(&rescuer).await?, 1, "the one that is there");
        Ok(())
    }

    #[tokio::test]
    async fn all_who_call_the_witness_see_the_same() -> anyhow::Result<()> {
        let (rescuer, _) = in_hand().await?;
        let second = Witness::new(rescuer.witness.map.clone());
        second.call(rescuer.backend.as_ref()).await?;
        assert_eq!(second.seen.get(), rescuer.witness.seen.get());
        assert!(!rescuer.has_lost_all().await?);
        rescuer.backend.map_delete(&rescuer.witness.map).await?;
        assert!(rescuer.has_lost_all().await?);
        second.call(rescuer.backend.as_ref()).await?;
        assert!(rescuer.has_lost_all().await?, "another one stands there now");
        Ok(())
    }
}
