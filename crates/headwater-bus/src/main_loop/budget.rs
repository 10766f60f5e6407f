//! Budgets: resource limits of a request, charged during execution and passed on to sub-requests.
//!
//! Upstream: the `Budget` of a request. Downstream: the application charges a [`Meter`].
//! Guarantees: a charge that exceeds a limit is counted and returns an error, and the run ends even if the error is
//! ignored. A leased amount cannot be spent here until its unused part is returned.
//! Not here: resources used by a process before it crashed; they are unknown.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::watch;

use crate::builtin_events::{Budget, RequestUsage};

/// A request exceeded its budget. Its run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("budget exceeded: {used} of {limit} {what}")]
pub struct OverBudget {
    /// The limited resource.
    pub what: &'static str,
    /// Amount charged, including amounts leased to other requests.
    pub used: u64,
    /// The limit.
    pub limit: u64,
}

/// Charges resources against a budget. Clones share the same meter.
#[derive(Clone)]
pub struct Meter {
    inner: Arc<Inner>,
}

struct Inner {
    budget: Budget,
    state: Mutex<MeterState>,
    over: watch::Sender<Option<OverBudget>>,
}

#[derive(Clone, Copy, Default)]
struct MeterState {
    used: RequestUsage,
    /// Amounts held by leases, and amounts of leases that were dropped.
    leased: LimitAmounts,
}

/// One amount for each limit of a budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LimitAmounts([u64; 5]);

/// Names of the amounts, in order.
const LIMIT_NAMES: [&str; 5] =
    ["total tokens", "input tokens", "output tokens", "calls", "millionths of cost"];

impl From<RequestUsage> for LimitAmounts {
    fn from(usage: RequestUsage) -> Self {
        let RequestUsage { input_tokens, output_tokens, calls, cost_micros } = usage;
        let total = input_tokens.saturating_add(output_tokens);
        Self([total, input_tokens, output_tokens, calls, cost_micros])
    }
}

impl LimitAmounts {
    fn plus(self, other: Self) -> Self {
        Self(std::array::from_fn(|index| self.0[index].saturating_add(other.0[index])))
    }

    fn minus(self, other: Self) -> Self {
        Self(std::array::from_fn(|index| self.0[index].saturating_sub(other.0[index])))
    }
}

fn limits(budget: &Budget) -> [Option<u64>; 5] {
    [
        budget.max_total_tokens,
        budget.max_input_tokens,
        budget.max_output_tokens,
        budget.max_calls,
        budget.max_cost_micros,
    ]
}

fn from_limits(limits: [Option<u64>; 5]) -> Budget {
    let [max_total_tokens, max_input_tokens, max_output_tokens, max_calls, max_cost_micros] =
        limits;
    Budget { max_total_tokens, max_input_tokens, max_output_tokens, max_calls, max_cost_micros }
}

fn plus(one: RequestUsage, other: RequestUsage) -> RequestUsage {
    RequestUsage {
        input_tokens: one.input_tokens.saturating_add(other.input_tokens),
        output_tokens: one.output_tokens.saturating_add(other.output_tokens),
        calls: one.calls.saturating_add(other.calls),
        cost_micros: one.cost_micros.saturating_add(other.cost_micros),
    }
}

impl Meter {
    /// Creates a meter with nothing charged.
    pub fn new(budget: Budget) -> Self {
        let (over, _) = watch::channel(None);
        Self { inner: Arc::new(Inner { budget, state: Mutex::default(), over }) }
    }

    /// Charges resources that were used. An error means that the budget is exceeded, now or before: stop.
    pub fn charge(&self, usage: RequestUsage) -> Result<(), OverBudget> {
        let mut state = self.state();
        state.used = plus(state.used, usage);
        self.check_limits(&state)
    }

    /// Charges one call to a model: input tokens, output tokens and cost.
    pub fn charge_model(
        &self,
        input_tokens: u64,
        output_tokens: u64,
        cost_micros: u64,
    ) -> Result<(), OverBudget> {
        self.charge(RequestUsage { input_tokens, output_tokens, calls: 1, cost_micros })
    }

    /// Charges one call to a tool.
    pub fn charge_call(&self) -> Result<(), OverBudget> {
        self.charge(RequestUsage { calls: 1, ..RequestUsage::default() })
    }

    /// Resources charged so far.
    pub fn used(&self) -> RequestUsage {
        self.state().used
    }

    /// The remaining budget.
    pub fn left(&self) -> Budget {
        let state = *self.state();
        let used = LimitAmounts::from(state.used).plus(state.leased);
        let limits = limits(&self.inner.budget);
        from_limits(std::array::from_fn(|index| {
            limits[index].map(|limit| limit.saturating_sub(used.0[index]))
        }))
    }

    /// Leases a part of the remaining budget to another request: the amount requested for, or what remains if that is less.
    /// Resources that `requested` does not limit get all that remains.
    pub fn lease(&self, requested: Budget) -> Result<BudgetLease, OverBudget> {
        let mut state = self.state();
        self.check_limits(&state)?;
        let used = LimitAmounts::from(state.used).plus(state.leased);
        let (own, requested) = (limits(&self.inner.budget), limits(&requested));
        let leased: [Option<u64>; 5] = std::array::from_fn(|index| {
            let left = own[index].map(|limit| limit.saturating_sub(used.0[index]));
            match (left, requested[index]) {
                (Some(left), Some(requested)) => Some(left.min(requested)),
                (left, requested) => left.or(requested),
            }
        });
        // Resources without a limit here need no accounting.
        let amounts = LimitAmounts(std::array::from_fn(|index| {
            own[index].and(leased[index]).unwrap_or_default()
        }));
        state.leased = state.leased.plus(amounts);
        Ok(BudgetLease { meter: self.clone(), budget: from_limits(leased), amounts })
    }

    /// The exceeded limit, if there is one.
    pub fn over(&self) -> Option<OverBudget> {
        *self.inner.over.borrow()
    }

    /// Returns when the budget is exceeded. Cancel-safe.
    pub(crate) async fn exceeded(&self) -> OverBudget {
        let mut over = self.inner.over.subscribe();
        loop {
            if let Some(over) = *over.borrow_and_update() {
                return over;
            }
            if over.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    fn check_limits(&self, state: &MeterState) -> Result<(), OverBudget> {
        let used = LimitAmounts::from(state.used).plus(state.leased);
        for (index, limit) in limits(&self.inner.budget).into_iter().enumerate() {
            if let Some(limit) = limit.filter(|limit| used.0[index] > *limit) {
                let over = OverBudget { what: LIMIT_NAMES[index], used: used.0[index], limit };
                self.inner.over.send_if_modified(|known| known.replace(over).is_none());
                return Err(over);
            }
        }
        // Once exceeded, the budget stays exceeded, even if a lease is returned.
        self.over().map_or(Ok(()), Err)
    }

    fn state(&self) -> MutexGuard<'_, MeterState> {
        self.inner.state.lock().expect("no code panics while it holds this lock")
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("used", &self.used()).field("left", &self.left()).finish()
    }
}

/// A part of a budget leased to another request. A dropped lease counts as spent, because its usage is unknown.
#[derive(Debug)]
#[must_use = "a dropped lease counts as spent"]
pub struct BudgetLease {
    meter: Meter,
    budget: Budget,
    amounts: LimitAmounts,
}

impl BudgetLease {
    /// Budget of the other request.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// Charges the usage of the other request and returns the rest.
    pub fn settle(self, usage: RequestUsage) -> Result<(), OverBudget> {
        let mut state = self.meter.state();
        state.leased = state.leased.minus(self.amounts);
        state.used = plus(state.used, usage);
        self.meter.check_limits(&state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(total: u64) -> Budget {
        Budget { max_total_tokens: Some(total), ..Budget::default() }
    }

    #[test]
    fn a_budget_may_be_used_up_but_not_exceeded() {
        let meter = Meter::new(Budget { max_calls: Some(3), ..tokens(100) });
        assert_eq!(meter.charge_model(40, 50, 7), Ok(()));
        assert_eq!(meter.charge_model(5, 5, 7), Ok(()));
        assert_eq!(meter.left(), Budget { max_calls: Some(1), ..tokens(0) });
        let over = OverBudget { what: LIMIT_NAMES[0], used: 101, limit: 100 };
        assert_eq!(meter.charge_model(1, 0, 0), Err(over));
        assert_eq!(meter.charge(RequestUsage::default()), Err(over), "it stays exceeded");
        assert_eq!(meter.over(), Some(over));
        assert_eq!(meter.used().cost_micros, 14, "unlimited resources are counted, too");
    }

    #[test]
    fn each_limit_is_enforced() {
        for (budget, usage) in [
            (
                Budget { max_input_tokens: Some(1), ..Budget::default() },
                RequestUsage { input_tokens: 2, ..RequestUsage::default() },
            ),
            (
                Budget { max_output_tokens: Some(1), ..Budget::default() },
                RequestUsage { output_tokens: 2, ..RequestUsage::default() },
            ),
            (
                Budget { max_calls: Some(1), ..Budget::default() },
                RequestUsage { calls: 2, ..RequestUsage::default() },
            ),
            (
                Budget { max_cost_micros: Some(1), ..Budget::default() },
                RequestUsage { cost_micros: u64::MAX, ..RequestUsage::default() },
            ),
        ] {
            assert!(Meter::new(budget).charge(usage).is_err(), "{budget:?}");
            assert!(Meter::new(Budget::default()).charge(usage).is_ok(), "{budget:?}");
        }
    }

    #[test]
    fn a_leased_amount_cannot_be_spent_twice_and_the_unused_part_is_returned() {
        let meter = Meter::new(tokens(100));
        meter.charge_model(30, 0, 0).unwrap();
        let first = meter.lease(tokens(50)).unwrap();
        assert_eq!(first.budget(), tokens(50));
        let second = meter.lease(Budget { max_calls: Some(4), ..Budget::default() }).unwrap();
        assert_eq!(second.budget(), Budget { max_calls: Some(4), ..tokens(20) });
        assert_eq!(meter.left(), tokens(0));

        first.settle(RequestUsage { input_tokens: 10, ..RequestUsage::default() }).unwrap();
        assert_eq!(meter.left(), tokens(40));
        drop(second);
        assert_eq!(meter.left(), tokens(40), "the usage of a dropped lease is unknown");
        meter.charge_model(40, 0, 0).unwrap();
        assert!(meter.charge_model(1, 0, 0).is_err());
        assert!(meter.lease(tokens(1)).is_err(), "nothing remains to be leased");
    }

    #[tokio::test]
    async fn waiters_are_notified_of_the_charge_that_exceeds_the_budget() {
        let meter = Meter::new(tokens(1));
        let waiting = tokio::spawn({
            let meter = meter.clone();
            async move { meter.exceeded().await }
        });
        let _ = meter.charge_model(2, 0, 0);
        assert_eq!(waiting.await.unwrap().used, 2);
        assert_eq!(meter.exceeded().await.used, 2);
    }
}
