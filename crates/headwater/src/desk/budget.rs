//! Token budgets per issue, and per day for an integration, for an author and for all strangers.
//!
//! Upstream: `token_reservations` reserves tokens before a model call and settles them after. Downstream: a [`Ledger`];
//! `tickets` keeps it in SQL, shared by all processes.
//! Guarantees: reserved plus used tokens never exceed a limit, however many runs reserve concurrently. A reservation
//! counts in full until it is settled or expires. An expired reservation (its process died) counts as its prompt
//! tokens, because the model may have read the prompt. The next run of its issue lets it expire soon, so that a dead process does
//! not keep the budget of others. If the process only stood still, and calls its model for longer than that, its output tokens
//! are not counted.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use headwater_issue::{ClaimEpoch, Issue, IssueId};
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use uuid::Uuid;

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

/// A reservation that is not settled within 2 h expires. Longer than the longest allowed model call.
pub(crate) const RESERVATION_TTL: Duration = Duration::from_secs(2 * 60 * 60);

/// How long a reservation still counts in full after the next run of its issue has reserved. Enough to settle it, also if the
/// database was unreachable for a moment.
pub(crate) const LAPSED_RESERVATION_TTL: Duration = Duration::from_secs(2 * 60);

/// Token limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBudget {
    /// Input and output tokens of one issue over its lifetime. Default: 200,000.
    pub issue_tokens_max: u64,
    /// Input and output tokens of all issues of one integration per UTC day. Default: 5,000,000.
    pub day_tokens_max: u64,
    /// Of these, tokens for the messages of one author, so that one author cannot use up the budget of all. Default:
    /// 500,000.
    pub user_tokens_max: u64,
    /// Of the tokens of the integration, those for the messages of all strangers together, so that many new accounts
    /// cannot use up the budget of all. Default: 2,500,000.
    pub strangers_tokens_max: u64,
}

impl Default for TokenBudget {
    fn default() -> Self {
        Self {
            issue_tokens_max: 200_000,
            day_tokens_max: 5_000_000,
            user_tokens_max: 500_000,
            strangers_tokens_max: 2_500_000,
        }
    }
}

/// A reservation of tokens for one model call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenReservation {
    /// Idempotency key: reserving or settling twice with one id counts once.
    pub id: Uuid,
    /// The issue whose budget is charged.
    pub issue_id: IssueId,
    /// The integration of the issue, whose budget of the day is charged.
    pub integration: String,
    /// The author whose budget of the day is charged, if known.
    pub user: Option<String>,
    /// Whether the author is a stranger, so that the budget of strangers is charged, too.
    pub is_stranger: bool,
    /// The UTC day, in days since 1970-01-01.
    pub day: u64,
    /// Upper bound of the call: prompt and answer.
    pub tokens: u64,
    /// The prompt's part of `tokens`. An expired reservation counts as this many tokens.
    pub prompt_tokens: u64,
}

impl TokenReservation {
    /// A reservation with a new id on the UTC day of `now`.
    pub fn new(
        issue: &Issue,
        user: Option<&str>,
        now: Timestamp,
        tokens: u64,
        prompt: u64,
    ) -> Self {
        Self {
            id: Uuid::now_v7(),
            issue_id: issue.id,
            integration: issue.integration.clone(),
            user: user.map(str::to_owned),
            is_stranger: false,
            day: day_of(now),
            tokens,
            prompt_tokens: prompt,
        }
    }

    /// Identifies the budget of the day of the integration.
    pub(crate) fn day_scope(&self) -> String {
        format!("{}{}", day_scope_prefix(self.day), self.integration)
    }

    /// Identifies the budget of the day of the author.
    pub(crate) fn user_scope(&self) -> Option<String> {
        let user = self.user.as_ref()?;
        Some(format!("{}{}:{user}", user_scope_prefix(self.day), self.integration))
    }

    /// Identifies the budget of the day of all strangers of the integration. Shorter than the scope of any author.
    pub(crate) fn strangers_scope(&self) -> Option<String> {
        let prefix = user_scope_prefix(self.day);
        self.is_stranger.then(|| format!("{prefix}{}", self.integration))
    }

    /// Time from `now` to the end of the charged day.
    pub fn rest_of_day(&self, now: Timestamp) -> Duration {
        Timestamp::from_millis((self.day + 1) * DAY_MS).since(now)
    }
}

/// Start of the scopes of integrations of one day. They sort by day.
pub(crate) fn day_scope_prefix(day: u64) -> String {
    format!("day:{day:06}:")
}

/// Start of the scopes of authors of one day. They sort by day.
pub(crate) fn user_scope_prefix(day: u64) -> String {
    format!("user:{day:06}:")
}

/// The UTC day of a time, in days since 1970-01-01.
pub(crate) fn day_of(now: Timestamp) -> u64 {
    now.as_millis() / DAY_MS
}

/// Result of [`Ledger::reserve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveDecision {
    /// The tokens are reserved.
    Granted,
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

/// Decides whether `tokens` more fit into the budgets of issue, day, user and strangers, whose usage does not include
/// them.
pub(crate) fn decide(
    [issue, day, user, strangers]: [BudgetUsage; 4],
    tokens: u64,
    budget: &TokenBudget,
) -> ReserveDecision {
    let exceeded = (
        issue.exceeds(tokens, budget.issue_tokens_max),
        day.exceeds(tokens, budget.day_tokens_max),
        user.exceeds(tokens, budget.user_tokens_max),
        strangers.exceeds(tokens, budget.strangers_tokens_max),
    );
    match exceeded {
        (Some(true), ..) => ReserveDecision::IssueBudgetExceeded,
        (_, Some(true), ..) => ReserveDecision::DayBudgetExceeded,
        (_, _, Some(true), _) => ReserveDecision::UserBudgetExceeded,
        (_, _, _, Some(true)) => ReserveDecision::StrangersBudgetExceeded,
        (None, None, None, None) => ReserveDecision::Granted,
        _ => ReserveDecision::Pending,
    }
}

/// How a run of a model ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelRunResult {
    /// With an answer.
    Done,
    /// Without an answer: the issue was handed over to a person.
    HandedOver,
    /// It failed or was deferred, and is repeated.
    Failed,
    /// Newer events, a lost claim or the end of the process ended it.
    Superseded,
}

impl ModelRunResult {
    /// The name in SQL and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::HandedOver => "handed_over",
            Self::Failed => "failed",
            Self::Superseded => "superseded",
        }
    }
}

/// What one run of a model used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelRun {
    /// Idempotency key.
    pub id: Uuid,
    /// When it began.
    pub at: Timestamp,
    /// The issue.
    pub issue_id: IssueId,
    /// The integration of the issue.
    pub integration: String,
    /// Name of the model.
    pub model: String,
    /// Version of the prompt; 0 is the built-in one.
    pub prompt_version: i64,
    /// The run of the issue: the epoch of its claim.
    pub epoch: ClaimEpoch,
    /// The session with its steps.
    pub session: String,
    /// How it ended.
    pub result: ModelRunResult,
    /// Calls of the model.
    pub calls: u64,
    /// Input tokens of all calls.
    pub tokens_in: u64,
    /// Output tokens of all calls.
    pub tokens_out: u64,
    /// Cost in millionths of the currency of the prices; `None` without a price.
    pub cost_micros: Option<u64>,
}

/// Counts tokens. An error is a storage failure and never counts as an attempt of the issue.
#[async_trait]
pub trait Ledger: Send + Sync + std::fmt::Debug {
    /// Reserves the tokens if all budgets allow it, otherwise changes nothing. After an error the reservation may
    /// exist: settle it with 0. A reservation that was already settled is not made again.
    async fn reserve(
        &self,
        reservation: &TokenReservation,
        budget: &TokenBudget,
    ) -> Result<ReserveDecision, String>;

    /// Replaces the reserved by the used tokens. Idempotent: only the first settlement of an id counts.
    async fn settle(&self, reservation: &TokenReservation, used: u64) -> Result<(), String>;

    /// Stores what a run of a model used. Idempotent by id. By default it is not stored.
    async fn record_run(&self, run: &ModelRun) -> Result<(), String> {
        let _ = run;
        Ok(())
    }

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
    /// By the scopes of days and users.
    scopes: HashMap<String, u64>,
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

    fn scope(
        &self,
        scope: Option<String>,
        of: impl Fn(&TokenReservation) -> Option<String>,
    ) -> BudgetUsage {
        let Some(scope) = scope else { return BudgetUsage::default() };
        let settled = self.scopes.get(&scope).copied().unwrap_or(0);
        self.spent(settled, |one| of(one).as_ref() == Some(&scope))
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
        let issue = entries.issue(reservation.issue_id);
        let day = entries.scope(Some(reservation.day_scope()), |one| Some(one.day_scope()));
        let user = entries.scope(reservation.user_scope(), TokenReservation::user_scope);
        let strangers =
            entries.scope(reservation.strangers_scope(), TokenReservation::strangers_scope);
        let reserved = decide([issue, day, user, strangers], reservation.tokens, budget);
        if reserved == ReserveDecision::Granted {
            entries.unsettled.insert(reservation.id, reservation.clone());
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
        let scopes = [
            Some(reservation.day_scope()),
            reservation.user_scope(),
            reservation.strangers_scope(),
        ];
        for scope in scopes.into_iter().flatten() {
            add(entries.scopes.entry(scope).or_default());
        }
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
        let budget = TokenBudget {
            issue_tokens_max: 100,
            day_tokens_max: 1000,
            user_tokens_max: 500,
            strangers_tokens_max: 300,
        };
        let spent = |total, unsettled| BudgetUsage { total, unsettled };
        let ask = |issue, day| decide([issue, day, spent(0, 0), spent(0, 0)], 10, &budget);
        let by_user = |user| decide([spent(0, 0), spent(0, 0), user, spent(0, 0)], 10, &budget);
        let by_strangers =
            |used| decide([spent(0, 0), spent(0, 0), spent(0, 0), used], 10, &budget);
        assert_eq!(by_strangers(spent(290, 0)), ReserveDecision::Granted);
        assert_eq!(by_strangers(spent(291, 0)), ReserveDecision::StrangersBudgetExceeded);
        assert_eq!(by_strangers(spent(291, 1)), ReserveDecision::Pending);
        assert_eq!(by_user(spent(490, 0)), ReserveDecision::Granted);
        assert_eq!(by_user(spent(491, 0)), ReserveDecision::UserBudgetExceeded);
        assert_eq!(by_user(spent(491, 1)), ReserveDecision::Pending);
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
        let reservation = TokenReservation {
            id: Uuid::now_v7(),
            issue_id: IssueId(1),
            integration: "desk".to_owned(),
            user: None,
            is_stranger: false,
            day: 0,
            tokens: 100,
            prompt_tokens: 60,
        };
        let granted = ledger.reserve(&reservation, &TokenBudget::default()).await;
        assert_eq!((granted, ledger.issue_total(IssueId(1))), (Ok(ReserveDecision::Granted), 100));
        for used in [70, 70, 5] {
            ledger.settle(&reservation, used).await.unwrap();
            assert_eq!(ledger.issue_total(IssueId(1)), 70);
        }
    }
}
