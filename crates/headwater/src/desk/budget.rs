//! Token budgets per issue and per day.
//!
//! Upstream: `token_reservations` reserves tokens before a model call and settles them after. Downstream: a [`Ledger`];
//! `tickets` keeps it in SQL, shared by all processes.
//! Guarantees: reserved plus used tokens never exceed a limit, however many runs reserve concurrently. A reservation
//! counts in full until it is settled or expires. An expired reservation (its process died) counts as its prompt
//! tokens, because the model may have read the prompt.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use headwater_issue::IssueId;
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use uuid::Uuid;

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

/// A reservation that is not settled within 2 h expires. Longer than the longest allowed model call.
pub(crate) const RESERVATION_TTL: Duration = Duration::from_secs(2 * 60 * 60);

/// Token limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBudget {
    /// Input and output tokens of one issue over its lifetime. Default: 200,000.
    pub issue_tokens_max: u64,
    /// Input and output tokens of all issues per UTC day. Default: 5,000,000.
    pub day_tokens_max: u64,
}

impl Default for TokenBudget {
    fn default() -> Self {
        Self { issue_tokens_max: 200_000, day_tokens_max: 5_000_000 }
    }
}

/// A reservation of tokens for one model call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenReservation {
    /// Idempotency key: reserving or settling twice with one id counts once.
    pub id: Uuid,
    /// The issue whose budget is charged.
    pub issue_id: IssueId,
    /// The UTC day whose budget is charged, in days since 1970-01-01.
    pub day: u64,
    /// Upper bound of the call: prompt and answer.
    pub tokens: u64,
    /// The prompt's part of `tokens`. An expired reservation counts as this many tokens.
    pub prompt_tokens: u64,
}

impl TokenReservation {
    /// A reservation with a new id on the UTC day of `now`.
    pub fn new(issue_id: IssueId, tokens: u64, prompt_tokens: u64, now: Timestamp) -> Self {
        let day = now.as_millis() / DAY_MS;
        Self { id: Uuid::now_v7(), issue_id, day, tokens, prompt_tokens }
    }

    /// Time from `now` to the end of the charged day.
    pub fn rest_of_day(&self, now: Timestamp) -> Duration {
        Timestamp::from_millis((self.day + 1) * DAY_MS).since(now)
    }
}

/// Result of [`Ledger::reserve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveDecision {
    /// The tokens are reserved.
    Granted,
    /// The issue budget is used up; nothing was reserved.
    IssueBudgetExceeded,
    /// The budget of the day is used up; nothing was reserved.
    DayBudgetExceeded,
    /// Unsettled reservations fill a budget; nothing was reserved. Retry soon.
    Pending,
}

/// Tokens counted against one budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct BudgetUsage {
    /// Used tokens plus unsettled reservations.
    pub(crate) total: u64,
    /// Unsettled reservations only.
    pub(crate) unsettled: u64,
}

impl BudgetUsage {
    /// `None` if `tokens` more fit. `Some(true)` if they exceed `max` even when all unsettled reservations turn out
    /// unused, `Some(false)` if only the unsettled reservations are in the way.
    fn exceeds(self, tokens: u64, max: u64) -> Option<bool> {
        let is_over = |used: u64| used.saturating_add(tokens) > max;
        is_over(self.total).then(|| is_over(self.total.saturating_sub(self.unsettled)))
    }
}

/// Decides whether `tokens` more fit into both budgets. `issue` and `day` do not include them.
pub(crate) fn decide(
    issue: BudgetUsage,
    day: BudgetUsage,
    tokens: u64,
    budget: &TokenBudget,
) -> ReserveDecision {
    let exceeded = (
        issue.exceeds(tokens, budget.issue_tokens_max),
        day.exceeds(tokens, budget.day_tokens_max),
    );
    match exceeded {
        (Some(true), _) => ReserveDecision::IssueBudgetExceeded,
        (_, Some(true)) => ReserveDecision::DayBudgetExceeded,
        (None, None) => ReserveDecision::Granted,
        _ => ReserveDecision::Pending,
    }
}

/// Counts tokens. An error is a storage failure and never counts as an attempt of the issue.
#[async_trait]
pub trait Ledger: Send + Sync + std::fmt::Debug {
    /// Reserves the tokens if both budgets allow it, otherwise changes nothing. After an error the reservation may
    /// exist: settle it with 0. A reservation that was already settled is not made again.
    async fn reserve(
        &self,
        reservation: &TokenReservation,
        budget: &TokenBudget,
    ) -> Result<ReserveDecision, String>;

    /// Replaces the reserved by the used tokens. Idempotent: only the first settlement of an id counts.
    async fn settle(&self, reservation: &TokenReservation, used: u64) -> Result<(), String>;

    /// Maintenance, such as aggregating settled reservations. Called from time to time while tokens are used.
    async fn maintain(&self) -> Result<(), String> {
        Ok(())
    }
}

/// An in-memory ledger for one process.
#[derive(Debug, Default)]
pub struct MemoryLedger {
    entries: Mutex<LedgerEntries>,
}

#[derive(Debug, Default)]
struct LedgerEntries {
    unsettled: HashMap<Uuid, TokenReservation>,
    issues: HashMap<IssueId, u64>,
    days: HashMap<u64, u64>,
}

impl MemoryLedger {
    /// Tokens counted against an issue: used plus reserved.
    pub fn issue_total(&self, issue_id: IssueId) -> u64 {
        self.entries().issue(issue_id).total
    }

    fn entries(&self) -> std::sync::MutexGuard<'_, LedgerEntries> {
        self.entries.lock().expect("no code panics while it holds this lock")
    }
}

impl LedgerEntries {
    fn issue(&self, issue_id: IssueId) -> BudgetUsage {
        let settled = self.issues.get(&issue_id).copied().unwrap_or(0);
        self.spent(settled, |one| one.issue_id == issue_id)
    }

    fn day(&self, day: u64) -> BudgetUsage {
        self.spent(self.days.get(&day).copied().unwrap_or(0), |one| one.day == day)
    }

    fn spent(&self, settled: u64, counts: impl Fn(&TokenReservation) -> bool) -> BudgetUsage {
        let unsettled = self.unsettled.values().filter(|one| counts(one));
        let unsettled = unsettled.fold(0, |sum: u64, one| sum.saturating_add(one.tokens));
        BudgetUsage { total: settled.saturating_add(unsettled), unsettled }
    }
}

#[async_trait]
impl Ledger for MemoryLedger {
    async fn reserve(
        &self,
        reservation: &TokenReservation,
        budget: &TokenBudget,
    ) -> Result<ReserveDecision, String> {
        let mut entries = self.entries();
        let (issue, day) = (entries.issue(reservation.issue_id), entries.day(reservation.day));
        let reserved = decide(issue, day, reservation.tokens, budget);
        if reserved == ReserveDecision::Granted {
            entries.unsettled.insert(reservation.id, *reservation);
        }
        Ok(reserved)
    }

    async fn settle(&self, reservation: &TokenReservation, used: u64) -> Result<(), String> {
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

pub(crate) fn now() -> Timestamp {
    SystemClock.now()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_filled_by_unsettled_reservations_is_pending_and_not_exceeded() {
        let budget = TokenBudget { issue_tokens_max: 100, day_tokens_max: 1000 };
        let spent = |total, unsettled| BudgetUsage { total, unsettled };
        let ask = |issue, day| decide(issue, day, 10, &budget);
        assert_eq!(ask(spent(90, 0), spent(990, 500)), ReserveDecision::Granted);
        assert_eq!(ask(spent(91, 0), spent(0, 0)), ReserveDecision::IssueBudgetExceeded);
        assert_eq!(ask(spent(91, 1), spent(0, 0)), ReserveDecision::Pending);
        assert_eq!(ask(spent(0, 0), spent(991, 0)), ReserveDecision::DayBudgetExceeded);
        assert_eq!(ask(spent(0, 0), spent(991, 1)), ReserveDecision::Pending);
        assert_eq!(ask(spent(91, 1), spent(991, 0)), ReserveDecision::DayBudgetExceeded);
    }

    #[tokio::test]
    async fn a_repeated_settlement_counts_once() {
        let ledger = MemoryLedger::default();
        let reservation = TokenReservation::new(IssueId(1), 100, 60, Timestamp::from_millis(0));
        let granted = ledger.reserve(&reservation, &TokenBudget::default()).await;
        assert_eq!((granted, ledger.issue_total(IssueId(1))), (Ok(ReserveDecision::Granted), 100));
        for used in [70, 70, 5] {
            ledger.settle(&reservation, used).await.unwrap();
            assert_eq!(ledger.issue_total(IssueId(1)), 70);
        }
    }
}
