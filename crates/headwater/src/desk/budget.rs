//! Token budgets: what the model may cost per issue and per day.
//!
//! Upstream: `books` reserves before a model is asked and settles after. Downstream: a [`Ledger`], kept in SQL by
//! `tickets`, so all processes share it.
//! Promises: what is reserved or spent never exceeds a limit, however many runs ask at once. A process that dies leaves its
//! reservations as spent: the model may have done the work.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use headwater_issue::IssueId;
use headwater_stream::clock::{Clock, SystemClock, Timestamp};

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

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
    /// Who asks.
    pub issue_id: IssueId,
    /// The day it counts for, since 1970.
    pub day: u64,
    /// How much.
    pub tokens: u64,
}

impl Reservation {
    /// A reservation on the day of `now`.
    pub fn new(issue_id: IssueId, tokens: u64, now: Timestamp) -> Self {
        Self { issue_id, day: now.as_millis() / DAY_MS, tokens }
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
}

/// Keeps the books.
#[async_trait]
pub trait Ledger: Send + Sync + std::fmt::Debug {
    /// Counts the tokens as spent if both budgets allow, else nothing. One atomic step.
    async fn reserve(&self, reservation: &Reservation, budget: &Budget)
    -> Result<Reserved, String>;

    /// Replaces what was reserved by what was used.
    async fn settle(&self, reservation: &Reservation, used: u64) -> Result<(), String>;
}

/// A ledger of one process, gone with it.
#[derive(Debug, Default)]
pub struct MemoryLedger {
    spent: Mutex<Spent>,
}

#[derive(Debug, Default)]
struct Spent {
    issues: HashMap<IssueId, u64>,
    days: HashMap<u64, u64>,
}

impl MemoryLedger {
    /// What an issue has spent.
    pub fn of_issue(&self, issue_id: IssueId) -> u64 {
        self.spent().issues.get(&issue_id).copied().unwrap_or(0)
    }

    fn spent(&self) -> std::sync::MutexGuard<'_, Spent> {
        self.spent.lock().expect("no code panics while it holds this lock")
    }
}

#[async_trait]
impl Ledger for MemoryLedger {
    async fn reserve(
        &self,
        reservation: &Reservation,
        budget: &Budget,
    ) -> Result<Reserved, String> {
        let Reservation { issue_id, day, tokens } = *reservation;
        let mut spent = self.spent();
        let issue = spent.issues.get(&issue_id).copied().unwrap_or(0).saturating_add(tokens);
        let of_day = spent.days.get(&day).copied().unwrap_or(0).saturating_add(tokens);
        if issue > budget.issue_tokens_max {
            return Ok(Reserved::IssueSpent);
        }
        if of_day > budget.day_tokens_max {
            return Ok(Reserved::DaySpent);
        }
        spent.issues.insert(issue_id, issue);
        spent.days.insert(day, of_day);
        Ok(Reserved::Granted)
    }

    async fn settle(&self, reservation: &Reservation, used: u64) -> Result<(), String> {
        let Reservation { issue_id, day, tokens } = *reservation;
        let settled = |spent: u64| spent.saturating_sub(tokens).saturating_add(used);
        let mut spent = self.spent();
        spent.issues.entry(issue_id).and_modify(|spent| *spent = settled(*spent));
        spent.days.entry(day).and_modify(|spent| *spent = settled(*spent));
        Ok(())
    }
}

/// The time now, for reservations.
pub(crate) fn now() -> Timestamp {
    SystemClock.now()
}
