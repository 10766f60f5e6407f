//! The books of a desk: tokens are reserved before a model is asked, and settled whatever becomes of the question.
//!
//! Upstream: `handler`. Downstream: a [`Ledger`].
//! Promises: a reservation is settled once. If its run is dropped, because newer events superseded it, its claim was lost or the
//! worker stops, it is settled with what the prompt alone takes; the next reservation of this process waits for that, so an
//! issue is not taken for spent by what it gives back. Only a process that dies leaves a reservation as spent.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::warn;

use super::budget::{Budget, Ledger, Reservation, Reserved};

/// How long a reservation waits for those that dropped runs give back, and a stop for the last of them.
const GIVEN_BACK_WITHIN: Duration = Duration::from_secs(5);

/// Reserves and settles. Settling goes on if whoever asked for it is dropped.
#[derive(Debug)]
pub(crate) struct Books {
    ledger: Arc<dyn Ledger>,
    /// Settlements under way, so that they end with the desk.
    settling: Mutex<JoinSet<()>>,
    /// How many of them are of runs that were dropped.
    given_back: watch::Sender<usize>,
}

/// What became of a reservation.
pub(crate) enum Opened<'a> {
    /// It is granted; settle it.
    Granted(Open<'a>),
    /// The issue has used up its tokens; nothing was reserved.
    IssueSpent,
    /// The tokens of the day are used up; nothing was reserved.
    DaySpent,
}

/// A reservation that is not settled yet. Dropped, it is settled with the tokens of the prompt.
pub(crate) struct Open<'a> {
    books: &'a Books,
    reservation: Reservation,
    prompt_tokens: u64,
    is_settled: bool,
}

impl Books {
    pub(crate) fn new(ledger: Arc<dyn Ledger>) -> Self {
        Self { ledger, settling: Mutex::default(), given_back: watch::Sender::new(0) }
    }

    /// Reserves tokens, of which the prompt takes so many.
    pub(crate) async fn reserve(
        &self,
        reservation: Reservation,
        prompt_tokens: u64,
        budget: &Budget,
    ) -> Result<Opened<'_>, String> {
        self.settled().await;
        // Dropped here, nobody knows whether it was granted: then it stays spent rather than be given back for nothing.
        Ok(match self.ledger.reserve(&reservation, budget).await? {
            Reserved::Granted => {
                Opened::Granted(Open { books: self, reservation, prompt_tokens, is_settled: false })
            }
            Reserved::IssueSpent => Opened::IssueSpent,
            Reserved::DaySpent => Opened::DaySpent,
        })
    }

    /// Waits a while for what dropped runs give back.
    pub(crate) async fn settled(&self) {
        let mut given_back = self.given_back.subscribe();
        let _ = timeout(GIVEN_BACK_WITHIN, given_back.wait_for(|count| *count == 0)).await;
    }

    /// Settles on a task, which says so at its end.
    fn settle(&self, reservation: Reservation, used: u64, then: impl FnOnce() + Send + 'static) {
        let ledger = Arc::clone(&self.ledger);
        let mut settling = self.settling.lock().expect("no code panics while it holds this lock");
        while settling.try_join_next().is_some() {}
        settling.spawn(async move {
            if let Err(error) = ledger.settle(&reservation, used).await {
                // What was reserved stays spent: the budget errs on the safe side.
                warn!(issue_id = %reservation.issue_id, %error, "tokens were not settled");
            }
            then();
        });
    }
}

impl Open<'_> {
    /// Replaces what was reserved by what was used.
    pub(crate) async fn settle(mut self, used: u64) {
        self.is_settled = true;
        let (done, settled) = oneshot::channel();
        self.books.settle(self.reservation, used, move || drop(done));
        // An error is what tells the end.
        let _ended: Result<(), _> = settled.await;
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // Without a runtime the process ends, and the reservation stays.
        if self.is_settled || Handle::try_current().is_err() {
            return;
        }
        let given_back = self.books.given_back.clone();
        given_back.send_modify(|count| *count += 1);
        let then = move || given_back.send_modify(|count| *count -= 1);
        self.books.settle(self.reservation, self.prompt_tokens, then);
    }
}
