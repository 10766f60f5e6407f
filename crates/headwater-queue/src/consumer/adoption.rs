//! Adoption: taking over entries that are pending for somebody who does not work on them any more.
//!
//! Upstream: `workplace` when a partition is gained or a member died, `upkeep` from time to time. Downstream: `worker`.
//! Promises: in the order of ids; no more than there is room for; an entry that may kill whoever handles it is handled
//! alone, so that its neighbours do not run out of deliveries with it.
//! Entries that were trimmed or deleted while they were pending are gone by somebody's explicit act: they are counted and
//! logged.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use headwater_stream::{
    ConsumerName, EntryId, GroupStart, Pending, PendingQuery, Reclaim, ReclaimFrom, StreamError,
    Then,
};
use tracing::{debug, info, warn};

use super::worker::{Phase, Worker};

const PAUSE: Duration = Duration::from_millis(100);
/// How long an entry that may be dangerous is handled alone before others join it.
const ALONE_FOR: Duration = Duration::from_secs(5);
/// Deliveries from which on an entry may be dangerous: one read it and died, another took it over and died.
const SUSPECT_DELIVERIES: u64 = 2;

/// Whose entries to take.
#[derive(Clone, Debug)]
pub(super) enum Whose {
    /// Everybody's: nobody else may work on the partition.
    Anyone,
    /// Everybody's but our own.
    Others,
    /// Those of one consumer.
    Consumer(ConsumerName),
    /// Those that nobody touched for this long.
    Idle(Duration),
}

impl Whose {
    /// Those that were given back unhandled.
    pub(super) fn released() -> Self {
        Self::Consumer(ConsumerName::new(Then::RELEASED).expect("it is a valid name"))
    }

    fn consumer(&self) -> Option<&ConsumerName> {
        match self {
            Self::Consumer(consumer) => Some(consumer),
            Self::Anyone | Self::Others | Self::Idle(_) => None,
        }
    }

    fn min_idle(&self) -> Duration {
        match self {
            Self::Idle(idle) => *idle,
            Self::Anyone | Self::Others | Self::Consumer(_) => Duration::ZERO,
        }
    }

    fn includes(&self, row: &Pending, me: &ConsumerName) -> bool {
        matches!(self, Self::Anyone | Self::Consumer(_)) || row.consumer != *me
    }
}

impl Worker {
    /// Shared: reads, and takes what others gave back.
    pub(super) async fn read_and_sweep(self: Arc<Self>) {
        if self.call_witness().await {
            self.open_for_reading();
            self.sweep_at_once().await;
        }
    }

    /// Before anything is in hand. Returns whether to go on.
    async fn call_witness(self: &Arc<Self>) -> bool {
        while let Err(error) = self.witness.call(self.job.backend.as_ref()).await {
            if !error.is_transient() {
                warn!(stream = %self.rules.stream, %error, "if the server loses its data, nobody will notice");
                break;
            }
            if !self.goes_on_after(&error).await {
                return false;
            }
        }
        true
    }

    /// Takes over whatever is pending, then reads. The partition is ours alone.
    pub(super) async fn take_over_and_read(self: Arc<Self>) {
        if !self.call_witness().await {
            return;
        }
        while let Err(error) = self.adopt(&Whose::Anyone).await {
            if !self.goes_on_after(&error).await {
                return;
            }
        }
        self.open_for_reading();
    }

    /// After an error: mends what can be mended and waits a moment. Returns whether to try again.
    async fn goes_on_after(self: &Arc<Self>, error: &StreamError) -> bool {
        if matches!(error, StreamError::Fenced { .. }) {
            self.fenced();
            return false;
        }
        if matches!(error, StreamError::NoGroup { .. }) && self.create_group().await {
            return true;
        }
        warn!(stream = %self.rules.stream, %error, "taking entries over failed, trying again");
        tokio::time::sleep(PAUSE).await;
        self.lease.is_trusted()
    }

    async fn create_group(&self) -> bool {
        let (stream, group) = (&self.rules.stream, &self.job.group);
        // From the beginning: what is in a partition that is new to the group, nobody has handled yet.
        self.job.backend.ensure_group(stream, group, GroupStart::Beginning).await.is_ok()
    }

    /// Takes entries over, page by page as there is room; one adoption at a time, or two would take the same entries.
    pub(super) async fn adopt(self: &Arc<Self>, whose: &Whose) -> Result<(), StreamError> {
        let _turn = self.adoption_turn().await;
        let mut after = None;
        loop {
            // First what is in hand, then what is pending: what is settled in between is not taken for left behind.
            let known = self.ids_in_hand();
            let mut listed = self.list(whose, after).await?;
            let Some(last) = listed.last() else { return Ok(()) };
            after = Some(last.id);
            listed.retain(|row| whose.includes(row, &self.consumer) && !known.contains(&row.id));
            let mut rest = listed.as_slice();
            while let Some(first) = rest.first() {
                self.until(|state| state.phase != Phase::Open || self.adoption_room() > 0).await;
                if first.deliveries >= self.suspect_from() {
                    // Nothing else is being handled, so nothing else dies with it. Those that rest may do so.
                    let alone = self.until(|state| state.phase != Phase::Open || state.is_idle());
                    let _ = tokio::time::timeout(ALONE_FOR, alone).await;
                }
                if self.lock().phase != Phase::Open {
                    return Ok(());
                }
                let (page, later) = rest.split_at(self.page(rest).min(self.adoption_room().max(1)));
                let ids: Vec<EntryId> = page.iter().map(|row| row.id).collect();
                let taken = self.take(whose, &ids).await;
                if taken.as_ref().is_err_and(StreamError::is_transient) {
                    // The reply may be lost: then they are ours, and nobody knows.
                    self.look_for_unseen();
                }
                taken?;
                rest = later;
            }
        }
    }

    /// Takes these entries, unless somebody was faster.
    async fn take(self: &Arc<Self>, whose: &Whose, ids: &[EntryId]) -> Result<(), StreamError> {
        let (from, after) = match whose {
            // What another member took meanwhile is no longer this consumer's.
            Whose::Consumer(consumer) => (ReclaimFrom::Consumer(consumer), before(ids[0])),
            Whose::Anyone | Whose::Others | Whose::Idle(_) => (ReclaimFrom::Ids(ids), None),
        };
        let reclaim = Reclaim {
            stream: &self.rules.stream,
            group: &self.job.group,
            consumer: &self.consumer,
            fence: self.fence.as_ref(),
            from,
            min_idle: whose.min_idle(),
            after,
            count: ids.len(),
        };
        let reclaimed = self.job.backend.reclaim(reclaim).await?;
        self.report_deleted(&reclaimed.deleted);
        if !reclaimed.entries.is_empty() {
            info!(
                stream = %self.rules.stream, consumer = %self.consumer, entries = reclaimed.entries.len(),
                "took pending entries over"
            );
        }
        self.receive(reclaimed.entries);
        Ok(())
    }

    /// Deliveries from which on an entry may be dangerous.
    fn suspect_from(&self) -> u64 {
        SUSPECT_DELIVERIES + self.rules.tries_in_lane()
    }

    /// How many of these to take at once: those that are as dangerous as the first.
    fn page(&self, rows: &[Pending]) -> usize {
        let crashes_max = u64::from(self.job.config.retry.max_crashes) + self.rules.tries_in_lane();
        let danger = |row: &Pending| match row.deliveries {
            few if few < self.suspect_from() => 0,
            some if some + 1 < crashes_max => 1,
            _ => 2,
        };
        let first = danger(&rows[0]);
        let alike = rows.iter().take_while(|row| danger(row) == first).count();
        match first {
            0 => alike,
            1 => alike.min(self.job.config.concurrency),
            _ => 1,
        }
    }

    async fn list(
        &self,
        whose: &Whose,
        after: Option<EntryId>,
    ) -> Result<Vec<Pending>, StreamError> {
        let query = PendingQuery {
            stream: &self.rules.stream,
            group: &self.job.group,
            consumer: whose.consumer(),
            min_idle: whose.min_idle(),
            after,
            count: self.job.config.batch,
        };
        self.job.backend.pending(query).await
    }

    fn report_deleted(&self, deleted: &[EntryId]) {
        if let Some(first) = deleted.first() {
            self.meters.anomaly("deleted_while_pending", deleted.len());
            warn!(
                stream = %self.rules.stream, entries = deleted.len(), entry_id = %first,
                "pending entries were trimmed or deleted by somebody; they are gone"
            );
        }
    }

    /// A read or a take-over failed: what it may have fetched is pending for us, and nobody has seen it. It comes before
    /// what is read next.
    pub(super) fn look_for_unseen(self: &Arc<Self>) {
        self.has_unseen.store(true, Ordering::SeqCst);
        if self.stop_reading() {
            self.spawn(Arc::clone(self).find_unseen());
        }
    }

    async fn find_unseen(self: Arc<Self>) {
        loop {
            while self.has_unseen.swap(false, Ordering::SeqCst) {
                while let Err(error) = self.adopt_unseen().await {
                    if !self.goes_on_after(&error).await {
                        return;
                    }
                }
            }
            self.open_for_reading();
            // Another read may have failed just before.
            if !self.has_unseen.load(Ordering::SeqCst) || !self.stop_reading() {
                return;
            }
        }
    }

    /// Before the end, when nothing is read any more: what a failed read had fetched is not left behind.
    pub(super) async fn gather_unseen(self: &Arc<Self>) {
        if !self.has_unseen.load(Ordering::SeqCst) && !self.is_adopting() {
            return;
        }
        if let Err(error) = self.adopt_unseen().await {
            debug!(stream = %self.rules.stream, %error, "what a failed read may have fetched stays pending");
        }
    }

    async fn adopt_unseen(self: &Arc<Self>) -> Result<(), StreamError> {
        let _turn = self.adoption_turn().await;
        let mine = Whose::Consumer(self.consumer.clone());
        let mut after = None;
        loop {
            // First what is in hand, then what is pending: nothing is taken for unseen that was settled in between.
            let known = self.ids_in_hand();
            let rows = self.list(&mine, after).await?;
            let Some(last) = rows.last() else { return Ok(()) };
            after = Some(last.id);
            let unseen: Vec<EntryId> =
                rows.iter().map(|row| row.id).filter(|id| !known.contains(id)).collect();
            if unseen.is_empty() {
                continue;
            }
            debug!(stream = %self.rules.stream, entries = unseen.len(), "found what a failed read had fetched");
            self.meters.anomaly("unseen", unseen.len());
            let reclaim = Reclaim {
                stream: &self.rules.stream,
                group: &self.job.group,
                consumer: &self.consumer,
                fence: self.fence.as_ref(),
                from: ReclaimFrom::Ids(&unseen),
                min_idle: Duration::ZERO,
                after: None,
                count: unseen.len(),
            };
            let reclaimed = self.job.backend.reclaim(reclaim).await?;
            self.report_deleted(&reclaimed.deleted);
            self.receive(reclaimed.entries);
        }
    }
}

/// The cursor that makes a page begin with this entry.
fn before(id: EntryId) -> Option<EntryId> {
    match (id.seq.checked_sub(1), id.ms.checked_sub(1)) {
        (Some(seq), _) => Some(EntryId::new(id.ms, seq)),
        (None, Some(ms)) => Some(EntryId::new(ms, u64::MAX)),
        (None, None) => None,
    }
}
