//! Reclaiming pending entries, as a part of `partition_state`: of the previous owner, of a dead consumer, released ones,
//! and own ones that a failed read fetched.
//!
//! Upstream: `partition_state`. Downstream: `partition_driver` lists and reclaims, page by page.
//! Guarantees: one reclaim at a time, in the order of ids, and no more than there is capacity for; an entry that may
//! crash its consumer is handled alone, so that other entries do not reach the crash limit with it; entries of a failed
//! read are reclaimed before anything else is read.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use headwater_stream::{
    Backoff, ConsumerName, EntryId, PendingDelivery, ReclaimResult, SettleAction, StreamError,
};
use tokio::time::Instant;

use super::partition_state::{
    Action, PartitionPhase, PartitionReport, PartitionState, ReclaimReply, StateSettings,
};
use super::pull::lease_of;

/// How often a reclaim that must succeed is retried. Without randomness: the state machine has no source of it.
const RETRY: Backoff = Backoff::doubling(Duration::from_millis(100), Duration::from_secs(1));
/// How often a stream that was deleted or replaced is checked: a producer may create it again.
const STREAM_CHECK_EVERY: Duration = Duration::from_millis(500);
/// How long a suspect entry is handled alone before others join it.
const ALONE_FOR: Duration = Duration::from_secs(5);
/// Own entries that are reclaimed at a time without capacity.
const OWN_PAGE: usize = 8;
/// An entry is suspect from this many deliveries on: one consumer read it and died, a second one reclaimed it and died.
const SUSPECT_DELIVERIES: u64 = 2;

/// Which pending entries to reclaim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ReclaimScope {
    /// All entries, including our own: no other consumer may work on the partition.
    All,
    /// All entries except our own.
    Others,
    /// The entries of one consumer.
    Consumer(ConsumerName),
    /// Entries that were idle for at least this long, except pulled ones whose lease has not run out.
    Idle(Duration),
    /// Our own entries (this is our name) that are not in flight.
    Unseen(ConsumerName),
}

impl ReclaimScope {
    /// Entries that were released unhandled.
    pub(super) fn released() -> Self {
        Self::Consumer(ConsumerName::new(SettleAction::RELEASED).expect("it is a valid name"))
    }

    pub(super) fn consumer(&self) -> Option<&ConsumerName> {
        match self {
            Self::Consumer(consumer) | Self::Unseen(consumer) => Some(consumer),
            Self::All | Self::Others | Self::Idle(_) => None,
        }
    }

    pub(super) fn min_idle(&self) -> Duration {
        match self {
            Self::Idle(idle) => *idle,
            _ => Duration::ZERO,
        }
    }

    fn includes(&self, row: &PendingDelivery, own_name: &ConsumerName) -> bool {
        match self {
            Self::Others => row.consumer != *own_name,
            Self::Idle(_) => {
                let is_leased = lease_of(&row.consumer).is_some_and(|lease| row.idle < lease);
                row.consumer != *own_name && !is_leased
            }
            Self::All | Self::Consumer(_) | Self::Unseen(_) => true,
        }
    }
}

/// Why entries are reclaimed, and what follows.
#[derive(Debug)]
pub(super) enum ReclaimPurpose {
    /// Before reading starts. Retried until it succeeds.
    Start,
    /// Periodically.
    Orphans,
    Member(ReclaimReply),
    /// After a failed read. Retried until it succeeds; then reading continues.
    Unseen,
    /// The same during shutdown, once.
    LastUnseen,
}

/// The reclaim that is running, and those requested.
#[derive(Debug, Default)]
pub(super) struct ReclaimState {
    running: Option<RunningReclaim>,
    requested: VecDeque<(ReclaimPurpose, ReclaimScope)>,
    /// Whether a failed read may have fetched entries that this process has not seen.
    has_unseen: bool,
    /// How many entries the subscription has capacity for.
    pub(super) page_max: Option<usize>,
}

#[derive(Debug)]
struct RunningReclaim {
    purpose: ReclaimPurpose,
    scope: ReclaimScope,
    step: ReclaimStep,
    /// Where the next page begins.
    after: Option<EntryId>,
    /// What was in flight before the page was listed: an entry settled in between is not taken for orphaned.
    known: HashSet<EntryId>,
    /// Listed and not reclaimed.
    rows: VecDeque<PendingDelivery>,
    /// Until when a suspect entry waits for running handlers.
    alone_until: Option<Instant>,
    /// How often it failed since entries were reclaimed.
    failures: u32,
}

#[derive(Clone, Copy, Debug)]
enum ReclaimStep {
    List,
    Listing,
    Reclaim,
    Reclaiming,
    Retry(Instant),
}

impl ReclaimState {
    pub(super) fn request(&mut self, purpose: ReclaimPurpose, scope: ReclaimScope) {
        self.requested.push_back((purpose, scope));
    }

    pub(super) fn is_idle(&self) -> bool {
        self.running.is_none() && self.requested.is_empty()
    }

    /// Whether entries may be pending for this consumer that it has not seen.
    pub(super) fn may_have_unseen(&self) -> bool {
        self.has_unseen || !self.is_idle()
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let running = self.running.as_ref()?;
        match running.step {
            ReclaimStep::Retry(at) => Some(at),
            _ => running.alone_until,
        }
    }
}

impl PartitionState {
    /// A read or reclaim failed that may have fetched entries for this consumer.
    pub(super) fn expect_unseen(&mut self) {
        self.reclaims.has_unseen = true;
        if std::mem::replace(&mut self.is_reading, false) {
            self.actions.push(Action::StopReading);
            let own = self.settings.consumer_name.clone();
            self.reclaims.request(ReclaimPurpose::Unseen, ReclaimScope::Unseen(own));
        }
    }

    pub(super) fn advance_reclaims(&mut self) {
        loop {
            let is_active = self.phase == PartitionPhase::Active;
            let Some(running) = &self.reclaims.running else {
                let Some((purpose, scope)) = self.reclaims.requested.pop_front() else { return };
                self.reclaims.running = Some(RunningReclaim {
                    purpose,
                    scope,
                    step: ReclaimStep::List,
                    after: None,
                    known: HashSet::new(),
                    rows: VecDeque::new(),
                    alone_until: None,
                    failures: 0,
                });
                continue;
            };
            match running.step {
                ReclaimStep::Listing | ReclaimStep::Reclaiming => return,
                // During shutdown, other members reclaim the rest, or this one after its restart.
                _ if !is_active && !matches!(running.purpose, ReclaimPurpose::LastUnseen) => {
                    self.end_reclaim(false);
                }
                ReclaimStep::Retry(at) if self.now < at => return,
                ReclaimStep::Retry(_) | ReclaimStep::List => return self.list_pending(),
                ReclaimStep::Reclaim => {
                    if !self.reclaim_page() {
                        return;
                    }
                }
            }
        }
    }

    fn list_pending(&mut self) {
        let known = self.in_flight_ids();
        let Some(running) = &mut self.reclaims.running else { return };
        if matches!(running.scope, ReclaimScope::Unseen(_)) {
            self.reclaims.has_unseen = false;
        }
        running.known = known;
        running.step = ReclaimStep::Listing;
        let (scope, after) = (running.scope.clone(), running.after);
        self.actions.push(Action::ListPending { scope, after });
    }

    pub(super) fn on_pending_listed(&mut self, rows: Result<Vec<PendingDelivery>, StreamError>) {
        let mut rows = match rows {
            Ok(rows) => rows,
            Err(error) => return self.fail_reclaim(error),
        };
        let Some(last) = rows.last().map(|row| row.id) else { return self.end_reclaim(true) };
        let in_flight = self.in_flight_ids();
        let Some(running) = &mut self.reclaims.running else { return };
        let (scope, known) = (&running.scope, &running.known);
        rows.retain(|row| {
            let is_free = !known.contains(&row.id) && !in_flight.contains(&row.id);
            is_free && scope.includes(row, &self.settings.consumer_name)
        });
        running.after = Some(last);
        running.step = ReclaimStep::Reclaim;
        running.rows = rows.into();
        let found = running.rows.len();
        if found > 0 && matches!(running.scope, ReclaimScope::Unseen(_)) {
            self.report(PartitionReport::Unseen(found));
        }
    }

    /// Reclaims the next page, if there is capacity. Returns whether the next step can follow at once.
    fn reclaim_page(&mut self) -> bool {
        let capacity = self.free_capacity(self.limits.regular);
        let is_idle = self.is_idle();
        let Some(running) = &mut self.reclaims.running else { return false };
        let Some(first) = running.rows.front() else {
            running.step = ReclaimStep::List;
            return true;
        };
        let count = if matches!(running.scope, ReclaimScope::Unseen(_)) {
            // They are ours already: without capacity, a few at a time.
            running.rows.len().min(capacity.max(OWN_PAGE))
        } else {
            if capacity == 0 {
                return false;
            }
            // No other handler runs, so no other message crashes with it. Messages in backoff may wait.
            if first.deliveries >= SUSPECT_DELIVERIES + self.settings.in_place_attempts && !is_idle
            {
                let until = *running.alone_until.get_or_insert(self.now + ALONE_FOR);
                if self.now < until {
                    return false;
                }
            }
            page_len(&running.rows, &self.settings).min(capacity)
        };
        // Entries that are ours already were claimed by a call whose reply was lost: this is not one more delivery.
        let own = self.settings.consumer_name.clone();
        let kind = |row: &PendingDelivery| (row.consumer == own, lease_of(&row.consumer));
        let (is_own, lease) = kind(first);
        let alike = running.rows.iter().take_while(|row| kind(row) == (is_own, lease)).count();
        running.alone_until = None;
        running.step = ReclaimStep::Reclaiming;
        let count = count.min(alike).min(self.reclaims.page_max.unwrap_or(usize::MAX));
        let ids = running.rows.drain(..count).map(|row| row.id).collect();
        let scope = match &running.scope {
            _ if is_own => ReclaimScope::Unseen(own),
            // Not if the lease was extended since it was listed.
            ReclaimScope::Idle(idle) => ReclaimScope::Idle(lease.unwrap_or_default().max(*idle)),
            scope => scope.clone(),
        };
        self.actions.push(Action::Reclaim { scope, ids });
        false
    }

    pub(super) fn on_reclaimed(&mut self, result: Result<ReclaimResult, StreamError>) {
        let ReclaimResult { entries, deleted, .. } = match result {
            Ok(result) => result,
            Err(error) => {
                if error.is_transient() {
                    // If only the reply was lost, the entries are pending for us, unseen.
                    self.expect_unseen();
                }
                return self.fail_reclaim(error);
            }
        };
        if !deleted.is_empty() {
            self.report(PartitionReport::DeletedWhilePending(deleted));
        }
        if let Some(running) = &mut self.reclaims.running {
            running.step = ReclaimStep::Reclaim;
            running.failures = 0;
            if !entries.is_empty() && !matches!(running.scope, ReclaimScope::Unseen(_)) {
                self.report(PartitionReport::Reclaimed(entries.len()));
            }
        }
        self.receive(entries);
    }

    fn fail_reclaim(&mut self, error: StreamError) {
        if matches!(error, StreamError::Fenced { .. }) {
            self.report(PartitionReport::Fenced);
            return self.terminate(true);
        }
        let is_missing =
            matches!(error, StreamError::NoGroup { .. } | StreamError::WrongType { .. });
        let Some(running) = &mut self.reclaims.running else { return };
        running.failures = running.failures.saturating_add(1);
        let pause =
            if is_missing { STREAM_CHECK_EVERY } else { RETRY.delay(running.failures, 0.0) };
        let retry_at = self.now + pause;
        let scope = running.scope.clone();
        let is_retried = matches!(running.purpose, ReclaimPurpose::Start | ReclaimPurpose::Unseen);
        if is_retried {
            running.step = ReclaimStep::Retry(retry_at);
            running.after = None;
            running.rows.clear();
        } else {
            self.end_reclaim(false);
        }
        self.report(PartitionReport::ReclaimFailed { scope, is_retried, error });
    }

    fn end_reclaim(&mut self, is_complete: bool) {
        let Some(ended) = self.reclaims.running.take() else { return };
        match ended.purpose {
            ReclaimPurpose::Start if is_complete => self.start_reading(),
            ReclaimPurpose::Unseen if is_complete && self.reclaims.has_unseen => {
                // Another read failed meanwhile.
                self.reclaims.request(ReclaimPurpose::Unseen, ended.scope);
            }
            ReclaimPurpose::Unseen if is_complete => self.start_reading(),
            // The last read is followed by another try.
            ReclaimPurpose::Unseen => self.reclaims.has_unseen = true,
            ReclaimPurpose::Member(reply) => self.actions.push(Action::Reply(reply, is_complete)),
            ReclaimPurpose::Start | ReclaimPurpose::Orphans | ReclaimPurpose::LastUnseen => {}
        }
    }
}

/// How many of these rows to reclaim at once: those with the same risk as the first.
fn page_len(rows: &VecDeque<PendingDelivery>, settings: &StateSettings) -> usize {
    let StateSettings { config, in_place_attempts, .. } = settings;
    let max_crashes = u64::from(config.retry.max_crashes);
    let risk = |row: &PendingDelivery| match row.deliveries {
        few if few < SUSPECT_DELIVERIES + in_place_attempts => 0,
        some if some + 1 < max_crashes + in_place_attempts => 1,
        _ => 2,
    };
    let first = risk(&rows[0]);
    let same_risk = rows.iter().take_while(|row| risk(row) == first).count();
    match first {
        0 => same_risk,
        1 => same_risk.min(config.concurrency),
        _ => 1,
    }
}
