//! Token budgets: what the model may cost per issue and per day.
//!
//! Upstream: `books` reserves before a model is asked and settles after. Downstream: a [`Ledger`], kept in SQL by
//! `tickets`, so all processes share it.
//! Promises: what is reserved or spent never exceeds a limit, however many runs ask at once. A reservation counts in full
//! until it is settled or expires; one that expires, because its process died, counts as its prompt: the model may have
//! read it.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use headwater_issue::IssueId;
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use uuid::Uuid;

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

/// A reservation that is not settled within this time expires: 2 h, longer than any model may take for an answer.
pub(crate) const RESERVATION_TTL: Duration = Duration::from_secs(2 * 60 * 60);

/// What models may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Tokens in and out for one issue, over its whole life. Default: 200,000.
    pub issue_tokens_max: u64,
    /// Tokens in and out for all issues, per day (UTC). Default: 5,000,000.
    pub day_tokens_max: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { issue_tokens_max: 200_000, day_tokens_max: 5_000_000 }
    }
}

/// A reservation, to be settled with what was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// Identifies it: reserving or settling twice with one id counts once.
    pub id: Uuid,
    /// The issue that is charged.
    pub issue_id: IssueId,
    /// The day that is charged, in days since 1970.
    pub day: u64,
    /// The most that the question may take: prompt and answer.
    pub tokens: u64,
    /// Of these, the tokens of the prompt: what the reservation counts as if it is never settled.
    pub prompt_tokens: u64,
}

impl Reservation {
    /// A reservation on the day of `now`, with an id of its own.
    pub fn new(issue_id: IssueId, tokens: u64, prompt_tokens: u64, now: Timestamp) -> Self {
        let day = now.as_millis() / DAY_MS;
        Self { id: Uuid::now_v7(), issue_id, day, tokens, prompt_tokens }
    }

    /// How long the day lasts from `now` on.
    pub fn rest_of_day(&self, now: Timestamp) -> Duration {
        Timestamp::from_millis((self.day + 1) * DAY_MS).since(now)
    }
}

/// What became of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserved {
    /// It is granted.
    Granted,
    /// The issue has used up its tokens; nothing was reserved.
    IssueSpent,
    /// The tokens of the day are used up; nothing was reserved.
    DaySpent,
    /// A budget is full, but only with reservations that are not settled yet; nothing was reserved. Ask again soon.
    Pending,
}

/// What counts against one budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Spent {
    /// All of it, unsettled reservations in full.
    pub(crate) total: u64,
    /// The part that is not settled yet.
    pub(crate) unsettled: u64,
}

impl Spent {
    /// Whether `tokens` more exceed `max`, and whether they do so even if nothing unsettled is used.
    fn refuses(self, tokens: u64, max: u64) -> Option<bool> {
        let exceeds = |spent: u64| spent.saturating_add(tokens) > max;
        exceeds(self.total).then(|| exceeds(self.total.saturating_sub(self.unsettled)))
    }
}

/// Decides on `tokens` more, by what counts against the issue and the day without them.
pub(crate) fn decide(issue: Spent, day: Spent, tokens: u64, budget: &Budget) -> Reserved {
    let refused = (
        issue.refuses(tokens, budget.issue_tokens_max),
        day.refuses(tokens, budget.day_tokens_max),
    );
    match refused {
        (Some(true), _) => Reserved::IssueSpent,
        (_, Some(true)) => Reserved::DaySpent,
        (None, None) => Reserved::Granted,
        _ => Reserved::Pending,
    }
}

/// Counts tokens. Its errors are failures of our own storage: they never count against an issue.
#[async_trait]
pub trait Ledger: Send + Sync + std::fmt::Debug {
    /// Counts the tokens as reserved if both budgets allow, else nothing. After an error it may have happened: settle the
    /// reservation with 0. A reservation that was settled before is not made again.
    async fn reserve(&self, reservation: &Reservation, budget: &Budget)
    -> Result<Reserved, String>;

    /// Replaces what was reserved by what was used. Idempotent: only the first settlement of an id counts.
    async fn settle(&self, reservation: &Reservation, used: u64) -> Result<(), String>;

    /// Upkeep, such as summing up what is settled. Called now and then while tokens are used.
    async fn maintain(&self) -> Result<(), String> {
        Ok(())
    }
}

/// A ledger of one process, gone with it.
#[derive(Debug, Default)]
pub struct MemoryLedger {
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    unsettled: HashMap<Uuid, Reservation>,
    issues: HashMap<IssueId, u64>,
    days: HashMap<u64, u64>,
}

impl MemoryLedger {
    /// What counts against an issue.
    pub fn of_issue(&self, issue_id: IssueId) -> u64 {
        self.entries().issue(issue_id).total
    }

    fn entries(&self) -> std::sync::MutexGuard<'_, Entries> {
        self.entries.lock().expect("no code panics while it holds this lock")
    }
}

impl Entries {
    fn issue(&self, issue_id: IssueId) -> Spent {
        let settled = self.issues.get(&issue_id).copied().unwrap_or(0);
        self.spent(settled, |one| one.issue_id == issue_id)
    }

    fn day(&self, day: u64) -> Spent {
        self.spent(self.days.get(&day).copied().unwrap_or(0), |one| one.day == day)
    }

    fn spent(&self, settled: u64, counts: impl Fn(&Reservation) -> bool) -> Spent {
        let unsettled = self.unsettled.values().filter(|one| counts(one));
        let unsettled = unsettled.fold(0, |sum: u64, one| sum.saturating_add(one.tokens));
        Spent { total: settled.saturating_add(unsettled), unsettled }
    }
}

#[async_trait]
impl Ledger for MemoryLedger {
    async fn reserve(
        &self,
        reservation: &Reservation,
        budget: &Budget,
    ) -> Result<Reserved, String> {
        let mut entries = self.entries();
        let (issue, day) = (entries.issue(reservation.issue_id), entries.day(reservation.day));
        let reserved = decide(issue, day, reservation.tokens, budget);
        if reserved == Reserved::Granted {
            entries.unsettled.insert(reservation.id, *reservation);
        }
        Ok(reserved)
    }

    async fn settle(&self, reservation: &Reservation, used: u64) -> Result<(), String> {
        let mut entries = self.entries();
        if entries.unsettled.remove(&reservation.id).is_none() {
            return Ok(());
        }
        let add = |spent: &mut u64| *spent = spent.saturating_add(used);
        add(entries.issues.entry(reservation.issue_id).or_default());
        add(entries.days.entry(reservation.day).or_default());
        Ok(())
    }
}

/// The time now, for reservations.
pub(crate) fn now() -> Timestamp {
    SystemClock.now()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_that_only_unsettled_reservations_fill_is_pending_and_not_spent() {
        let budget = Budget { issue_tokens_max: 100, day_tokens_max: 1000 };
        let spent = |total, unsettled| Spent { total, unsettled };
        let ask = |issue, day| decide(issue, day, 10, &budget);
        assert_eq!(ask(spent(90, 0), spent(990, 500)), Reserved::Granted);
        assert_eq!(ask(spent(91, 0), spent(0, 0)), Reserved::IssueSpent);
        assert_eq!(ask(spent(91, 1), spent(0, 0)), Reserved::Pending);
        assert_eq!(ask(spent(0, 0), spent(991, 0)), Reserved::DaySpent);
        assert_eq!(ask(spent(0, 0), spent(991, 1)), Reserved::Pending);
        assert_eq!(ask(spent(91, 1), spent(991, 0)), Reserved::DaySpent);
    }

    #[tokio::test]
    async fn a_settlement_that_is_repeated_counts_once() {
        let ledger = MemoryLedger::default();
        let reservation = Reservation::new(IssueId(1), 100, 60, Timestamp::from_millis(0));
        let granted = ledger.reserve(&reservation, &Budget::default()).await;
        assert_eq!((granted, ledger.of_issue(IssueId(1))), (Ok(Reserved::Granted), 100));
        for used in [70, 70, 5] {
            ledger.settle(&reservation, used).await.unwrap();
            assert_eq!(ledger.of_issue(IssueId(1)), 70);
        }
    }
}
