//! Token accounting of a desk: tokens are reserved before a model is asked, and settled whatever becomes of the question.
//!
//! Upstream: `handler`. Downstream: a [`Ledger`].
//! Promises: a reservation is settled once, also if its run is dropped (superseded, claim lost, worker stopping) or the
//! ledger does not answer: settlements are repeated until the ledger confirms one. No call of the ledger is dropped
//! half-way, and a run waits a bounded time for each. Only a process that dies leaves a reservation unsettled; the ledger
//! lets it expire.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, warn};

use crate::desk::budget::{Budget, Ledger, RESERVATION_TTL, Reservation, Reserved};

/// How long a run waits for the ledger before it is deferred: longer than a call of the store may take.
const RESERVE_WITHIN: Duration = Duration::from_secs(15);

/// How long a run that has its answer waits for the settlement, which goes on without it.
const SETTLE_WAIT: Duration = Duration::from_secs(1);

/// How long a full budget waits for settlements of this process, and a stop for the last of them.
const SETTLED_WITHIN: Duration = Duration::from_secs(5);

/// How long a settlement is repeated; then the reservation is left to expire.
const SETTLE_FOR: Duration = Duration::from_secs(60 * 60);
const _: () = assert!(SETTLE_FOR.as_secs() < RESERVATION_TTL.as_secs());

/// Pauses between the calls of a settlement: the first, and the longest.
const SETTLE_PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(15));

/// Settlements under way; beyond it, reservations are left to expire.
const SETTLING_MAX: usize = 10_000;

/// Settlements that call the ledger at once.
const SETTLE_CALLS_MAX: usize = 4;

/// How often this process has the ledger do its upkeep, while tokens are used.
const MAINTAIN_EVERY: Duration = Duration::from_secs(30);

/// Reserves and settles. Settling goes on if the run that asked for it is dropped.
#[derive(Debug)]
pub(crate) struct Books {
    ledger: Arc<dyn Ledger>,
    /// Settlements under way, so that they end with the desk.
    settling: Mutex<JoinSet<()>>,
    /// How many they are.
    unsettled: watch::Sender<usize>,
    /// Of those, the ones that may call the ledger now: after an outage they must not take every connection.
    calling: Arc<Semaphore>,
    started: Instant,
    /// When the ledger's upkeep is due, in milliseconds after `started`.
    maintain_at: AtomicU64,
}

/// What became of a reservation.
pub(crate) enum Opened<'a> {
    /// It is granted; settle it.
    Granted(Open<'a>),
    /// The issue has used up its tokens; nothing was reserved.
    IssueSpent,
    /// The tokens of the day are used up; nothing was reserved.
    DaySpent,
    /// Unsettled reservations fill a budget; nothing was reserved. Ask again soon.
    Pending,
}

/// A reservation that is not settled yet. Dropped, it is settled with `if_dropped`.
pub(crate) struct Open<'a> {
    books: &'a Books,
    reservation: Reservation,
    if_dropped: u64,
    is_settled: bool,
}

impl Books {
    pub(crate) fn new(ledger: Arc<dyn Ledger>) -> Self {
        Self {
            ledger,
            settling: Mutex::default(),
            unsettled: watch::Sender::new(0),
            calling: Arc::new(Semaphore::new(SETTLE_CALLS_MAX)),
            started: Instant::now(),
            maintain_at: AtomicU64::new(0),
        }
    }

    /// Reserves tokens. An error is a failure of the ledger: defer the run. What it may have reserved is settled.
    pub(crate) async fn reserve(
        &self,
        reservation: Reservation,
        budget: &Budget,
    ) -> Result<Opened<'_>, String> {
        // Until it is granted, the model is not asked: dropped or failed before, nothing was used.
        let mut open = Open { books: self, reservation, if_dropped: 0, is_settled: false };
        let mut reserved = self.try_reserve(reservation, *budget).await?;
        if reserved == Reserved::Pending && *self.unsettled.borrow() > 0 {
            // Most likely what a superseded run of this issue gives back.
            self.settled().await;
            reserved = self.try_reserve(reservation, *budget).await?;
        }
        open.is_settled = reserved != Reserved::Granted;
        Ok(match reserved {
            Reserved::Granted => {
                open.if_dropped = reservation.prompt_tokens;
                Opened::Granted(open)
            }
            Reserved::IssueSpent => Opened::IssueSpent,
            Reserved::DaySpent => Opened::DaySpent,
            Reserved::Pending => Opened::Pending,
        })
    }

    /// On a task of its own: a call that is dropped half-way would leave a connection in an unknown state.
    async fn try_reserve(
        &self,
        reservation: Reservation,
        budget: Budget,
    ) -> Result<Reserved, String> {
        let ledger = Arc::clone(&self.ledger);
        let call = tokio::spawn(async move { ledger.reserve(&reservation, &budget).await });
        match timeout(RESERVE_WITHIN, call).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(panic)) => Err(panic.to_string()),
            Err(_) => Err(format!("no answer within {RESERVE_WITHIN:?}")),
        }
    }

    /// Waits a while for settlements under way.
    pub(crate) async fn settled(&self) {
        let mut unsettled = self.unsettled.subscribe();
        let _ = timeout(SETTLED_WITHIN, unsettled.wait_for(|count| *count == 0)).await;
    }

    /// Settles on a task, until the ledger confirms it. `done` is dropped then.
    fn settle(&self, reservation: Reservation, used: u64, done: Option<oneshot::Sender<()>>) {
        let mut settling = self.settling.lock().expect("no code panics while it holds this lock");
        while settling.try_join_next().is_some() {}
        if settling.len() >= SETTLING_MAX {
            warn!(issue_id = %reservation.issue_id, "too many settlements under way, tokens stay reserved until they expire");
            return;
        }
        let (ledger, unsettled) = (Arc::clone(&self.ledger), self.unsettled.clone());
        let calling = Arc::clone(&self.calling);
        unsettled.send_modify(|count| *count += 1);
        let maintains = self.is_maintenance_due();
        settling.spawn(async move {
            settle_until_confirmed(&*ledger, &calling, &reservation, used).await;
            unsettled.send_modify(|count| *count -= 1);
            drop(done);
            if maintains && let Err(error) = ledger.maintain().await {
                debug!(%error, "token ledger upkeep failed, trying again later");
            }
        });
    }

    fn is_maintenance_due(&self) -> bool {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let next = now.saturating_add(MAINTAIN_EVERY.as_millis() as u64);
        let due = |at: u64| (at <= now).then_some(next);
        self.maintain_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, due).is_ok()
    }
}

async fn settle_until_confirmed(
    ledger: &dyn Ledger,
    calling: &Semaphore,
    reservation: &Reservation,
    used: u64,
) {
    let until = Instant::now() + SETTLE_FOR;
    let (mut pause, longest) = SETTLE_PAUSES;
    let settle = async || {
        let _permit = calling.acquire().await;
        ledger.settle(reservation, used).await
    };
    while let Err(error) = settle().await {
        let issue_id = reservation.issue_id;
        if Instant::now() >= until {
            warn!(%issue_id, %error, "tokens were not settled; they stay reserved until they expire");
            return;
        }
        debug!(%issue_id, %error, "tokens were not settled, trying again");
        sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}

impl Open<'_> {
    /// Replaces what was reserved by what was used. Returns when that is confirmed, or after a second.
    pub(crate) async fn settle(mut self, used: u64) {
        self.is_settled = true;
        let (done, settled) = oneshot::channel();
        self.books.settle(self.reservation, used, Some(done));
        // The sender is dropped at the end.
        let _ended = timeout(SETTLE_WAIT, settled).await;
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // Without a runtime the process ends, and the reservation expires.
        if !self.is_settled && Handle::try_current().is_ok() {
            self.books.settle(self.reservation, self.if_dropped, None);
        }
    }
}
