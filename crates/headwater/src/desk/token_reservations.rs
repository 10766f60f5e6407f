//! Reserves tokens before a model call and settles them after it, whatever its outcome.
//!
//! Upstream: `handler`. Downstream: a [`Ledger`].
//! Guarantees: each reservation is settled once, also if its run is dropped (superseded, claim lost, worker stopping) or
//! the ledger is unavailable: settlements are retried until the ledger confirms one. No ledger call is cancelled
//! half-way, and a run waits a bounded time for each. Only a process crash leaves a reservation unsettled; the ledger
//! lets it expire.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_issue::IssueId;
use headwater_stream::Backoff;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

use crate::desk::budget::{
    Ledger, ModelRun, RESERVATION_TTL, ReserveDecision, TokenBudget, TokenReservation,
};

/// How long a run waits for a reservation before it is deferred. Longer than the store's call timeout.
const RESERVE_TIMEOUT: Duration = Duration::from_secs(15);

/// How long a run waits for the confirmation of its settlement. The settlement continues in the background.
const SETTLE_ACK_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a reservation waits for pending settlements of this process when a budget is full; also the limit at
/// shutdown.
const SETTLEMENTS_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a settlement is retried. Afterwards the reservation expires.
const SETTLE_RETRY_FOR: Duration = Duration::from_secs(60 * 60);
const _: () = assert!(SETTLE_RETRY_FOR.as_secs() < RESERVATION_TTL.as_secs());

/// Backoff between settlement attempts: initial, maximum.
const SETTLE_BACKOFF: Backoff =
    Backoff::doubling(Duration::from_millis(100), Duration::from_secs(15));

/// Maximum number of concurrent settlements. Beyond it, reservations are left to expire.
const SETTLEMENTS_MAX: usize = 10_000;

/// Settlements that call the ledger concurrently.
const SETTLE_CALLS_MAX: usize = 4;

/// How often this process calls [`Ledger::maintain`] while tokens are used.
const MAINTAIN_EVERY: Duration = Duration::from_secs(30);

/// Reserves and settles tokens. A settlement continues if the run that requested it is dropped.
#[derive(Debug)]
pub(crate) struct TokenAccounting {
    ledger: Arc<dyn Ledger>,
    /// Background settlements; aborted when the desk is dropped.
    settling: Mutex<JoinSet<()>>,
    /// Number of unconfirmed settlements.
    unsettled: watch::Sender<usize>,
    /// Limits concurrent ledger calls, so that settlements do not take every database connection after an outage.
    call_permits: Arc<Semaphore>,
    started: Instant,
    /// When the next maintenance is due, in milliseconds after `started`.
    maintain_at: AtomicU64,
}

/// Result of [`TokenAccounting::reserve`].
pub(crate) enum ReservationOutcome<'a> {
    /// Granted; settle it.
    Granted(OpenReservation<'a>),
    /// The issue budget is used up; nothing was reserved.
    IssueBudgetExceeded,
    /// The budget of the day of the integration is used up; nothing was reserved.
    DayBudgetExceeded,
    /// The budget of the day of the author is used up; nothing was reserved.
    UserBudgetExceeded,
    /// The budget of the day of all strangers is used up; nothing was reserved.
    StrangersBudgetExceeded,
    /// Unsettled reservations fill a budget; nothing was reserved. Retry soon.
    Pending,
}

/// A granted reservation. If dropped without [`settle`](Self::settle), it is settled with `tokens_if_dropped`.
pub(crate) struct OpenReservation<'a> {
    accounting: &'a TokenAccounting,
    reservation: TokenReservation,
    tokens_if_dropped: u64,
    is_settled: bool,
}

impl TokenAccounting {
    pub(crate) fn new(ledger: Arc<dyn Ledger>) -> Self {
        Self {
            ledger,
            settling: Mutex::default(),
            unsettled: watch::Sender::new(0),
            call_permits: Arc::new(Semaphore::new(SETTLE_CALLS_MAX)),
            started: Instant::now(),
            maintain_at: AtomicU64::new(0),
        }
    }

    /// Reserves tokens. An error is a ledger failure: defer the run. A reservation that may have been made
    /// nevertheless is settled with 0.
    pub(crate) async fn reserve(
        &self,
        reservation: TokenReservation,
        budget: &TokenBudget,
    ) -> Result<ReservationOutcome<'_>, String> {
        // The model is not called before the reservation is granted, so a drop or failure here used no tokens.
        let mut open = OpenReservation {
            accounting: self,
            reservation: reservation.clone(),
            tokens_if_dropped: 0,
            is_settled: false,
        };
        let mut reserved = self.try_reserve(reservation.clone(), *budget).await?;
        if reserved == ReserveDecision::Pending && *self.unsettled.borrow() > 0 {
            // Most likely a superseded run of this issue is about to return its tokens.
            self.wait_until_settled().await;
            reserved = self.try_reserve(reservation.clone(), *budget).await?;
        }
        open.is_settled = reserved != ReserveDecision::Granted;
        Ok(match reserved {
            ReserveDecision::Granted => {
                open.tokens_if_dropped = reservation.prompt_tokens;
                ReservationOutcome::Granted(open)
            }
            ReserveDecision::IssueBudgetExceeded => ReservationOutcome::IssueBudgetExceeded,
            ReserveDecision::DayBudgetExceeded => ReservationOutcome::DayBudgetExceeded,
            ReserveDecision::UserBudgetExceeded => ReservationOutcome::UserBudgetExceeded,
            ReserveDecision::StrangersBudgetExceeded => ReservationOutcome::StrangersBudgetExceeded,
            ReserveDecision::Pending => ReservationOutcome::Pending,
        })
    }

    /// Runs on its own task: a cancelled call would leave its connection in an unknown state.
    async fn try_reserve(
        &self,
        reservation: TokenReservation,
        budget: TokenBudget,
    ) -> Result<ReserveDecision, String> {
        let ledger = Arc::clone(&self.ledger);
        let call = tokio::spawn(async move { ledger.reserve(&reservation, &budget).await });
        match timeout(RESERVE_TIMEOUT, call).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(panic)) => Err(panic.to_string()),
            Err(_) => Err(format!("timed out after {RESERVE_TIMEOUT:?}")),
        }
    }

    /// Waits for pending settlements, at most [`SETTLEMENTS_TIMEOUT`].
    pub(crate) async fn wait_until_settled(&self) {
        let mut unsettled = self.unsettled.subscribe();
        let _ = timeout(SETTLEMENTS_TIMEOUT, unsettled.wait_for(|count| *count == 0)).await;
    }

    /// Settles in the background and retries until the ledger confirms. Drops `done` then.
    fn settle(&self, reservation: TokenReservation, used: u64, done: Option<oneshot::Sender<()>>) {
        let mut settling = self.settling.lock().expect("no code panics while it holds this lock");
        while settling.try_join_next().is_some() {}
        if settling.len() >= SETTLEMENTS_MAX {
            warn!(issue_id = %reservation.issue_id, "too many pending settlements; the tokens stay reserved until they expire");
            return;
        }
        let (ledger, unsettled) = (Arc::clone(&self.ledger), self.unsettled.clone());
        let call_permits = Arc::clone(&self.call_permits);
        unsettled.send_modify(|count| *count += 1);
        let should_maintain = self.is_maintenance_due();
        settling.spawn(async move {
            until_confirmed(&*ledger, &call_permits, LedgerCall::Settle(reservation, used)).await;
            unsettled.send_modify(|count| *count -= 1);
            drop(done);
            if should_maintain && let Err(error) = ledger.maintain().await {
                debug!(%error, "token ledger maintenance failed; retrying later");
            }
        });
    }

    /// Stores what a run used, in the background; retried like a settlement.
    pub(crate) fn record_run(&self, run: ModelRun) {
        let mut settling = self.settling.lock().expect("no code panics while it holds this lock");
        while settling.try_join_next().is_some() {}
        // Without a runtime the process is exiting.
        if settling.len() >= SETTLEMENTS_MAX || Handle::try_current().is_err() {
            warn!(issue_id = %run.issue_id, "the use of a model run is not recorded");
            return;
        }
        let (ledger, unsettled) = (Arc::clone(&self.ledger), self.unsettled.clone());
        let call_permits = Arc::clone(&self.call_permits);
        unsettled.send_modify(|count| *count += 1);
        settling.spawn(async move {
            until_confirmed(&*ledger, &call_permits, LedgerCall::RecordRun(run)).await;
            unsettled.send_modify(|count| *count -= 1);
        });
    }

    fn is_maintenance_due(&self) -> bool {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let next = now.saturating_add(MAINTAIN_EVERY.as_millis() as u64);
        let due = |at: u64| (at <= now).then_some(next);
        self.maintain_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, due).is_ok()
    }
}

/// An idempotent call of the ledger, made in the background.
enum LedgerCall {
    Settle(TokenReservation, u64),
    RecordRun(ModelRun),
}

impl LedgerCall {
    async fn make(&self, ledger: &dyn Ledger) -> Result<(), String> {
        match self {
            Self::Settle(reservation, used) => ledger.settle(reservation, *used).await,
            Self::RecordRun(run) => ledger.record_run(run).await,
        }
    }

    fn issue_id(&self) -> IssueId {
        match self {
            Self::Settle(reservation, _) => reservation.issue_id,
            Self::RecordRun(run) => run.issue_id,
        }
    }
}

/// Repeats a call until it succeeds, for a bounded time.
async fn until_confirmed(ledger: &dyn Ledger, call_permits: &Semaphore, call: LedgerCall) {
    let give_up_at = Instant::now() + SETTLE_RETRY_FOR;
    let mut retry = SETTLE_BACKOFF.timer();
    let permitted = async || {
        let _permit = call_permits.acquire().await;
        call.make(ledger).await
    };
    while let Err(error) = permitted().await {
        let issue_id = call.issue_id();
        if Instant::now() >= give_up_at {
            warn!(%issue_id, %error, "giving up settling tokens; they stay reserved until they expire");
            return;
        }
        debug!(%issue_id, %error, "settling tokens failed; retrying");
        retry.wait().await;
    }
}

impl OpenReservation<'_> {
    /// Replaces the reserved by the used tokens. Returns when the ledger has confirmed, or after
    /// [`SETTLE_ACK_TIMEOUT`].
    pub(crate) async fn settle(mut self, used: u64) {
        self.is_settled = true;
        let (done, settled) = oneshot::channel();
        self.accounting.settle(self.reservation.clone(), used, Some(done));
        // The sender is dropped on completion.
        let _ = timeout(SETTLE_ACK_TIMEOUT, settled).await;
    }
}

impl Drop for OpenReservation<'_> {
    fn drop(&mut self) {
        // Without a runtime the process is exiting; the reservation expires.
        if !self.is_settled && Handle::try_current().is_ok() {
            self.accounting.settle(self.reservation.clone(), self.tokens_if_dropped, None);
        }
    }
}
