//! Detects that Redis lost data and appends again the messages that were in flight: all of it (flushed, or restarted
//! empty), or the newest writes (a fail-over, a restart with `everysec`).
//!
//! Upstream: `partition_context`, when the server does not know an entry; `partition_driver`, when the lease was lost with
//! messages in flight. Downstream: the backend.
//! Guarantees: an in-flight message, its retry or its dead letter survives the loss. A consumer that was paused until
//! another one took over writes nothing: the data epoch, a key beside the stream that never changes while the server
//! keeps its data, distinguishes a loss from a trim. After a fail-over or a restart, a message that was in hand then, was settled
//! with a lost reply and trimmed since may be retried twice; its dead letter is written twice only if [`LETTERS_SEARCHED_MAX`] others
//! came after it.
//! Not here: messages that were not in flight when the server lost them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::clock::{Clock, SystemClock};
use headwater_stream::{
    Backend, Backoff, DeliveredEntry, Direction, Entry, EntryId, MapName, PendingDeliveryQuery,
    Range, RegistryMap, Retention, RetryTimer, ScheduleRequest, SettleAction, Settlement,
    StreamError, StreamName, start_id,
};
use tokio::time::Instant;
use tracing::{debug, error, warn};

use super::metrics::record_anomaly;
use crate::message::{
    self, ORIGINAL_MESSAGE_ID, PARTITION_ID, REPLAYED_FROM, RETRY_GROUP, read_id,
};
use crate::pagination::previous;
use crate::topic::{GroupName, TopicName};

/// The field of the data epoch's key.
const SINCE_FIELD: &str = "since";
/// Dead letters, counted from the newest one, among which one is looked for before it is written again, and how many are read at
/// once: few, because each may have a megabyte.
const LETTERS_SEARCHED_MAX: usize = 2000;
const LETTERS_PAGE: usize = 20;
/// How much the clocks of two servers may differ.
const CLOCKS_DIFFER_MAX: Duration = Duration::from_secs(60);
/// How long to retry while the server does not answer. After that the message is lost and reported.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(10 * 60);
const BACKOFF: Backoff = Backoff::doubling(Duration::from_millis(50), Duration::from_secs(2));

/// Appends again what the server lost of one partition.
#[derive(Clone)]
pub(super) struct LossRecovery {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) topic: TopicName,
    pub(super) stream: StreamName,
    pub(super) group: GroupName,
    pub(super) data_epoch: Arc<DataEpoch>,
    /// The group was removed and created again; its pending entries up to this one are forgotten.
    pub(super) restored_through: Option<EntryId>,
    /// The newest entry that this consumer received.
    pub(super) received_through: EntryId,
}

/// Detects whether the server lost its data since consumption of a partition started. The first consumer stores a
/// random value in a key beside the stream; if the value differs later, the data of the server was lost. If it is the same
/// at another run of the server, the newest writes may be lost: what was received before that was noticed is in doubt,
/// what is received later is not.
#[derive(Debug)]
pub(super) struct DataEpoch {
    map: MapName,
    seen: Mutex<Option<SeenEpoch>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct SeenEpoch {
    since: Bytes,
    run: Option<String>,
    /// Entries up to this one were received before the last change of the run was noticed.
    doubtful_through: Option<EntryId>,
}

/// What the server may have lost since consumption of a partition started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataLoss {
    Nothing,
    /// The server restarted or another one took over: the newest writes may be missing, up to this entry.
    MaybeTail {
        through: EntryId,
    },
    All,
}

impl DataLoss {
    /// Whether the server may have lost this entry, which this consumer received.
    pub(super) fn may_include(self, id: EntryId) -> bool {
        match self {
            Self::Nothing => false,
            Self::MaybeTail { through } => id <= through,
            Self::All => true,
        }
    }
}

impl DataEpoch {
    pub(super) fn new(map: MapName) -> Self {
        Self { map, seen: Mutex::new(None) }
    }

    /// Reads the epoch, or creates it. To be called before anything is read: losses from then on are detected.
    pub(super) async fn observe(&self, backend: &dyn Backend) -> Result<(), StreamError> {
        let run = backend.server_run(self.map.as_str()).await?;
        let since = match self.read(backend).await? {
            Some(since) => since,
            None => {
                // If two consumers create it, both read the first one's value.
                let mine =
                    Bytes::from(format!("{} {}", SystemClock.now().to_rfc3339(), start_id()));
                let fields: RegistryMap = BTreeMap::from([(SINCE_FIELD.to_owned(), mine.clone())]);
                backend.map_create(&self.map, &fields).await?;
                self.read(backend).await?.unwrap_or(mine)
            }
        };
        *self.seen() = Some(SeenEpoch { since, run, doubtful_through: None });
        Ok(())
    }

    /// What the server may have lost, if the newest entry that the consumer received is `received_through`.
    async fn loss(
        &self,
        backend: &dyn Backend,
        received_through: EntryId,
    ) -> Result<DataLoss, StreamError> {
        // Never observed: it cannot tell.
        let Some(since) = self.seen().as_ref().map(|seen| seen.since.clone()) else {
            return Ok(DataLoss::Nothing);
        };
        if self.read(backend).await? != Some(since) {
            return Ok(DataLoss::All);
        }
        let run = backend.server_run(self.map.as_str()).await?;
        let mut seen = self.seen();
        let Some(seen) = seen.as_mut() else { return Ok(DataLoss::Nothing) };
        if seen.run != run {
            seen.run = run;
            seen.doubtful_through = seen.doubtful_through.max(Some(received_through));
        }
        let doubtful = seen.doubtful_through.map(|through| DataLoss::MaybeTail { through });
        Ok(doubtful.unwrap_or(DataLoss::Nothing))
    }

    async fn read(&self, backend: &dyn Backend) -> Result<Option<Bytes>, StreamError> {
        let fields = backend.map_get(&self.map).await?;
        Ok(fields.and_then(|mut fields| fields.remove(SINCE_FIELD)))
    }

    fn seen(&self) -> MutexGuard<'_, Option<SeenEpoch>> {
        self.seen.lock().expect("no code panics while it holds the epoch")
    }
}

impl LossRecovery {
    /// What the server may have lost.
    pub(super) async fn loss(&self) -> Result<DataLoss, StreamError> {
        self.data_epoch.loss(self.backend.as_ref(), self.received_through).await
    }

    /// The settlement that appends an unfinished message again, for its group only.
    pub(super) fn requeue(&self, delivery: &DeliveredEntry) -> Settlement {
        let original = delivery.fields.get(ORIGINAL_MESSAGE_ID).and_then(read_id);
        let first_id = original.unwrap_or(delivery.id);
        let fields = message::replace_fields(
            &delivery.fields,
            &[
                (ORIGINAL_MESSAGE_ID, Some(first_id.to_string())),
                (RETRY_GROUP, Some(self.group.to_string())),
            ],
        );
        Settlement {
            id: delivery.id,
            action: SettleAction::Append { to: self.stream.clone(), fields },
        }
    }

    /// After a settle call that had no effect on some entries although the lease is ours. Entries that another consumer
    /// has, or that were settled before, need nothing; the follow-ups of entries unknown to the server are written.
    pub(super) async fn recover_stale(&self, batch: &[Settlement]) {
        for settlement in batch.iter().filter(|entry| is_follow_up(&entry.action)) {
            self.recover(settlement, LossEvidence::StaleSettle).await;
        }
    }

    /// After the lease was lost: writes what was in flight if the server lost it. Otherwise the next owner has reclaimed it
    /// and nothing is written.
    pub(super) async fn recover_all(self, mut left: Vec<Settlement>) {
        left.retain(|entry| is_follow_up(&entry.action));
        left.sort_by_key(|entry| entry.id);
        let mut budget = RetryBudget::new();
        let loss = loop {
            match self.loss().await {
                Ok(loss) => break loss,
                Err(error) if budget.wait_before_retry(&error).await => {}
                Err(error) => {
                    return warn!(stream = %self.stream, %error, "cannot determine whether the server lost its data; entries in flight are not re-appended");
                }
            }
        };
        for settlement in left.iter().filter(|entry| loss.may_include(entry.id)) {
            self.recover(settlement, LossEvidence::DataLoss).await;
        }
    }

    async fn recover(&self, settlement: &Settlement, evidence: LossEvidence) {
        let mut budget = RetryBudget::new();
        while let Err(error) = self.try_recover(settlement, evidence).await {
            if !budget.wait_before_retry(&error).await {
                record_anomaly(self.topic.as_str(), self.group.as_str(), "unsettled", 1);
                error!(stream = %self.stream, entry_id = %settlement.id, %error, "could not re-append an entry lost by Redis; the message is lost");
                return;
            }
        }
    }

    async fn try_recover(
        &self,
        Settlement { id, action: then }: &Settlement,
        evidence: LossEvidence,
    ) -> Result<(), StreamError> {
        let is_known = match evidence {
            LossEvidence::StaleSettle => self.is_known(*id).await?,
            // An entry may have been added after the loss: the server has it.
            LossEvidence::DataLoss => self.exists(*id).await?,
        };
        if is_known || self.has_dead_letter(*id, then).await? {
            return Ok(());
        }
        self.write_follow_up(then).await?;
        record_anomaly(self.topic.as_str(), self.group.as_str(), "lost_by_the_server", 1);
        warn!(stream = %self.stream, entry_id = %id, "the server lost an in-flight entry; it was appended again");
        Ok(())
    }

    /// Whether the dead letter of an entry is written: the settle call had its effect and its reply was lost, and the entry was
    /// trimmed since; or the reply to an earlier attempt to recover it was lost.
    async fn has_dead_letter(&self, id: EntryId, then: &SettleAction) -> Result<bool, StreamError> {
        let SettleAction::Append { to, fields } = then else { return Ok(false) };
        if *to == self.stream {
            return Ok(false);
        }
        let is_same = |letter: &Entry| {
            let identity = [PARTITION_ID, ORIGINAL_MESSAGE_ID, REPLAYED_FROM, RETRY_GROUP];
            identity.iter().all(|name| letter.fields.get(name) == fields.get(name))
        };
        let from = EntryId::new(id.ms.saturating_sub(CLOCKS_DIFFER_MAX.as_millis() as u64), 0);
        let (mut to_id, direction) = (EntryId::MAX, Direction::Backward);
        for _ in 0..LETTERS_SEARCHED_MAX / LETTERS_PAGE {
            let range = Range { from, to: to_id, direction, count: LETTERS_PAGE };
            let letters = self.backend.range(to, range).await?;
            if letters.iter().any(is_same) {
                return Ok(true);
            }
            let oldest = letters.last().filter(|_| letters.len() == LETTERS_PAGE);
            match oldest.and_then(|oldest| previous(oldest.id)) {
                Some(before) => to_id = before,
                None => break,
            }
        }
        Ok(false)
    }

    /// Whether the server knows an entry: it exists, or it was settled.
    async fn is_known(&self, id: EntryId) -> Result<bool, StreamError> {
        if self.restored_through.is_some_and(|through| id <= through) {
            return self.is_pending(id).await;
        }
        if self.exists(id).await? {
            return Ok(true);
        }
        // On a busy topic, the group may have passed this id again after the loss.
        if self.loss().await?.may_include(id) {
            return Ok(false);
        }
        // It may be trimmed, after we acknowledged it and the reply was lost. Then the group has passed this id.
        let stats = self.backend.stats_without_lag(&self.stream).await?;
        let groups = stats.map(|stats| stats.groups).unwrap_or_default();
        Ok(groups.iter().any(|known| known.name == self.group && known.last_delivered >= id))
    }

    /// Whether the entry is in its stream, or pending.
    async fn exists(&self, id: EntryId) -> Result<bool, StreamError> {
        let range = Range { from: id, to: id, ..Range::first(1) };
        let is_stored = !self.backend.range(&self.stream, range).await?.is_empty();
        Ok(is_stored || self.is_pending(id).await?)
    }

    async fn is_pending(&self, id: EntryId) -> Result<bool, StreamError> {
        let query = PendingDeliveryQuery {
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

    async fn write_follow_up(&self, then: &SettleAction) -> Result<(), StreamError> {
        match then {
            SettleAction::Append { to, fields } => {
                let fields = std::slice::from_ref(fields);
                self.backend.append(to, fields, &Retention::KEEP_ALL).await?;
            }
            SettleAction::Reschedule { delays, to, due, fields } => {
                let item = ScheduleRequest { to: to.clone(), due: *due, fields: fields.clone() };
                self.backend.schedule(delays, &[item]).await?;
            }
            SettleAction::Ack | SettleAction::Delete | SettleAction::Release => {}
        }
        Ok(())
    }
}

/// Why an entry may be lost.
#[derive(Clone, Copy, Debug)]
enum LossEvidence {
    /// A settle call had no effect on it.
    StaleSettle,
    /// The server lost data.
    DataLoss,
}

/// Retries with backoff until [`RECOVERY_TIMEOUT`].
struct RetryBudget {
    until: Instant,
    timer: RetryTimer,
}

impl RetryBudget {
    fn new() -> Self {
        Self { until: Instant::now() + RECOVERY_TIMEOUT, timer: BACKOFF.timer() }
    }

    /// Waits before the next attempt. Returns whether to retry.
    async fn wait_before_retry(&mut self, error: &StreamError) -> bool {
        if !error.is_transient() || Instant::now() >= self.until {
            return false;
        }
        debug!(%error, "the server does not answer, retrying");
        self.timer.wait().await;
        true
    }
}

pub(super) fn is_follow_up(then: &SettleAction) -> bool {
    matches!(then, SettleAction::Append { .. } | SettleAction::Reschedule { .. })
}

#[cfg(test)]
mod tests {
    use headwater_stream::{
        ConsumerName, Fields, GroupStart, Options, SettleBatch, TrimGuard, connect,
    };

    use super::*;

    /// One message that is in flight at a dead owner.
    async fn in_flight() -> anyhow::Result<(LossRecovery, Settlement)> {
        let backend = connect("embedded:memory", &Options::default()).await?;
        let recovery = LossRecovery {
            backend,
            topic: TopicName::new("orders")?,
            stream: StreamName::new("orders")?,
            group: GroupName::new("billing")?,
            data_epoch: Arc::new(DataEpoch::new(MapName::new("epoch")?)),
            restored_through: None,
            received_through: EntryId::MIN,
        };
        let LossRecovery { backend, stream, group, .. } = &recovery;
        recovery.data_epoch.observe(backend.as_ref()).await?;
        let fields = Fields::new([("payload", "p")]);
        backend.ensure_group(stream, group, GroupStart::Beginning).await?;
        backend.append(stream, &[fields], &Retention::KEEP_ALL).await?;
        let mut reader = backend.reader(group, &ConsumerName::new("dead")?).await?;
        let streams = std::slice::from_ref(stream);
        let read = reader.read(streams, 1, Duration::ZERO).await?.remove(0).entries.remove(0);
        let again = recovery.requeue(&read);
        Ok((recovery, again))
    }

    /// The next owner handles the message, and it is trimmed.
    async fn handle_and_trim(recovery: &LossRecovery, id: EntryId) -> anyhow::Result<()> {
        let LossRecovery { backend, stream, group, .. } = recovery;
        let consumer = &ConsumerName::new("next")?;
        let entries = &[Settlement::ack(id)];
        backend.settle(SettleBatch { stream, group, consumer, fence: None, entries }).await?;
        backend.trim(stream, &Retention::max_len(0), TrimGuard::Safe).await?;
        Ok(())
    }

    async fn stream_len(recovery: &LossRecovery) -> anyhow::Result<usize> {
        Ok(recovery.backend.range(&recovery.stream, Range::first(10)).await?.len())
    }

    #[tokio::test]
    async fn an_entry_that_the_next_owner_handled_and_trimmed_is_not_appended_again()
    -> anyhow::Result<()> {
        let (recovery, again) = in_flight().await?;
        handle_and_trim(&recovery, again.id).await?;
        recovery.clone().recover_all(vec![again.clone()]).await;
        assert_eq!(stream_len(&recovery).await?, 0);
        recovery.recover_stale(&[again]).await;
        assert_eq!(stream_len(&recovery).await?, 0);
        Ok(())
    }

    #[tokio::test]
    async fn an_entry_lost_by_the_server_is_appended_again_for_its_group() -> anyhow::Result<()> {
        let (recovery, again) = in_flight().await?;
        handle_and_trim(&recovery, again.id).await?;
        recovery.backend.map_delete(&recovery.data_epoch.map).await?;
        recovery.clone().recover_all(vec![again.clone()]).await;
        let entries = recovery.backend.range(&recovery.stream, Range::first(10)).await?;
        assert_eq!(entries.len(), 1);
        let fields = &entries[0].fields;
        assert_eq!(fields.get("payload").unwrap(), "p");
        assert_eq!(fields.get(ORIGINAL_MESSAGE_ID).unwrap(), again.id.to_string().as_bytes());
        assert_eq!(fields.get(RETRY_GROUP).unwrap(), "billing");
        Ok(())
    }

    /// The settle call had its effect, its reply was lost, and the entry was trimmed: after a restart it looks like a lost one.
    #[tokio::test]
    async fn a_dead_letter_that_is_written_is_not_written_again() -> anyhow::Result<()> {
        let (recovery, again) = in_flight().await?;
        let LossRecovery { backend, data_epoch, .. } = &recovery;
        handle_and_trim(&recovery, again.id).await?;
        backend.map_delete(&data_epoch.map).await?;
        let letters = StreamName::new("letters")?;
        let of_group = |group: &str| {
            let original = (ORIGINAL_MESSAGE_ID, again.id.to_string());
            Fields::new([original, (RETRY_GROUP, group.to_owned())])
        };
        // More than one page.
        for _ in 0..=LETTERS_PAGE {
            backend.append(&letters, &[of_group("shipping")], &Retention::KEEP_ALL).await?;
        }
        let action = SettleAction::Append { to: letters.clone(), fields: of_group("billing") };
        let dead = Settlement { id: again.id, action };
        let written = async || {
            let found = backend.range(&letters, Range::first(1000)).await?;
            anyhow::Ok(found.iter().filter(|it| it.fields == of_group("billing")).count())
        };
        recovery.clone().recover_all(vec![dead.clone()]).await;
        assert_eq!(written().await?, 1, "that of another group is not it");
        for _ in 0..=LETTERS_PAGE {
            backend.append(&letters, &[of_group("shipping")], &Retention::KEEP_ALL).await?;
        }
        recovery.clone().recover_all(vec![dead.clone()]).await;
        recovery.recover_stale(&[dead]).await;
        assert_eq!(written().await?, 1);
        Ok(())
    }

    #[tokio::test]
    async fn an_entry_added_after_the_loss_is_not_appended_again() -> anyhow::Result<()> {
        let (recovery, again) = in_flight().await?;
        recovery.backend.map_delete(&recovery.data_epoch.map).await?;
        recovery.clone().recover_all(vec![again]).await;
        assert_eq!(stream_len(&recovery).await?, 1, "only the existing entry");
        Ok(())
    }

    #[tokio::test]
    async fn all_consumers_observe_the_same_data_epoch() -> anyhow::Result<()> {
        let (recovery, _) = in_flight().await?;
        let second = DataEpoch::new(recovery.data_epoch.map.clone());
        second.observe(recovery.backend.as_ref()).await?;
        assert_eq!(*second.seen(), *recovery.data_epoch.seen());
        assert_eq!(recovery.loss().await?, DataLoss::Nothing);
        recovery.backend.map_delete(&recovery.data_epoch.map).await?;
        assert_eq!(recovery.loss().await?, DataLoss::All);
        second.observe(recovery.backend.as_ref()).await?;
        assert_eq!(recovery.loss().await?, DataLoss::All, "the epoch is a different one now");
        Ok(())
    }
}
