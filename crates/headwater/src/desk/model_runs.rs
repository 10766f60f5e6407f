//! Records what each run of a model used: tokens, cost and result, also of runs that failed or were superseded.
//!
//! Upstream: `handler` reports each model call and the end of the run. Downstream: `token_reservations`, which stores
//! the record in the [`Ledger`](crate::desk::Ledger), and metrics.
//! Guarantees: a run is recorded once for each model that it called, also if it is dropped in the middle of a call; that call
//! counts its prompt. Only a crashed process loses the record of its runs in progress.

use headwater_issue::{IssueId, Run};
use metrics::{counter, gauge};
use uuid::Uuid;

use crate::desk::budget::{self, ModelRun, ModelRunResult};
use crate::desk::model::TokenUsage;
use crate::desk::token_reservations::TokenAccounting;

/// Counter of runs that called the model. Labels: integration, model, result (`done`, `handed_over`, `failed`,
/// `superseded`).
pub const MODEL_RUNS: &str = "headwater_model_runs_total";
/// Counter of tokens. Labels: integration, model, direction (`in`, `out`).
pub const MODEL_TOKENS: &str = "headwater_model_tokens_total";
/// Gauge that only grows: cost since the process started, in the currency of the prices. Labels: integration, model.
pub const MODEL_COST: &str = "headwater_model_cost";

/// Price per million tokens, in the currency of the reports. Default: zero, which means unknown: no cost is reported.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prices {
    /// Price of input tokens.
    pub input: f64,
    /// Price of output tokens.
    pub output: f64,
}

impl Prices {
    pub(crate) fn cost(&self, usage: TokenUsage) -> Option<f64> {
        let known = *self != Self::default();
        let of = |tokens: u64, price: f64| tokens as f64 * price / 1e6;
        known.then(|| of(usage.input_tokens, self.input) + of(usage.output_tokens, self.output))
    }
}

/// The record of one run: a row for each model that it called. If it is dropped before [`finish`](Self::finish), the run was
/// superseded.
pub(crate) struct ModelRunRecord<'a> {
    accounting: &'a TokenAccounting,
    /// The run without a model.
    run: ModelRun,
    /// In the order of their first calls; the last one is in use.
    models: Vec<ModelUse>,
    /// How the run ended.
    end: Option<ModelRunResult>,
    /// Prompt tokens of the call in progress.
    in_flight: Option<u64>,
}

/// The calls of one model in a run.
struct ModelUse {
    model: String,
    prices: Prices,
    calls: u64,
    usage: TokenUsage,
}

impl<'a> ModelRunRecord<'a> {
    pub(crate) fn new(
        accounting: &'a TokenAccounting,
        run: &Run,
        prompt_version: i64,
        session: &str,
    ) -> Self {
        let epoch = run.epoch();
        let IssueId(issue_id) = run.issue().id;
        let run = ModelRun {
            id: Uuid::nil(),
            at: budget::now(),
            issue_id: IssueId(issue_id),
            integration: run.issue().integration.clone(),
            model: String::new(),
            prompt_version,
            epoch,
            session: session.to_owned(),
            result: ModelRunResult::Superseded,
            calls: 0,
            tokens_in: 0,
            tokens_out: 0,
            cost_micros: None,
        };
        Self { accounting, run, models: Vec::new(), end: None, in_flight: None }
    }

    /// A call of a model begins.
    pub(crate) fn begin_call(&mut self, model: &str, prices: Prices, prompt_tokens: u64) {
        let known = self.models.iter().position(|used| used.model == model);
        let mut used = match known {
            Some(place) => self.models.remove(place),
            None => {
                let (model, usage) = (model.to_owned(), TokenUsage::default());
                ModelUse { model, prices, calls: 0, usage }
            }
        };
        used.calls += 1;
        self.models.push(used);
        self.in_flight = Some(prompt_tokens);
    }

    /// The call has used these tokens.
    pub(crate) fn end_call(&mut self, usage: TokenUsage) {
        self.in_flight = None;
        if let Some(used) = self.models.last_mut() {
            used.usage = used.usage.plus(usage);
        }
    }

    /// Tokens of all calls so far.
    pub(crate) fn usage(&self) -> TokenUsage {
        self.models.iter().fold(TokenUsage::default(), |sum, used| sum.plus(used.usage))
    }

    /// Cost of all calls so far; `None` if no price is known.
    pub(crate) fn cost(&self) -> Option<f64> {
        let costs = self.models.iter().filter_map(|used| used.prices.cost(used.usage));
        costs.fold(None, |sum, cost| Some(sum.unwrap_or_default() + cost))
    }

    /// The run ended.
    pub(crate) fn finish(mut self, result: ModelRunResult) {
        self.end = Some(result);
    }
}

impl Drop for ModelRunRecord<'_> {
    fn drop(&mut self) {
        if let Some(input_tokens) = self.in_flight.take() {
            self.end_call(TokenUsage { input_tokens, output_tokens: 0 });
        }
        let (last, end) = (self.models.len().saturating_sub(1), self.end);
        for (place, used) in self.models.iter().enumerate() {
            // The run went on with another model because this one failed.
            let result = match end {
                _ if place < last => ModelRunResult::Failed,
                Some(result) => result,
                None => ModelRunResult::Superseded,
            };
            let cost = used.prices.cost(used.usage);
            let run = ModelRun {
                id: Uuid::now_v7(),
                model: used.model.clone(),
                result,
                calls: used.calls,
                tokens_in: used.usage.input_tokens,
                tokens_out: used.usage.output_tokens,
                cost_micros: cost.map(|cost| (cost * 1e6).round() as u64),
                ..self.run.clone()
            };
            count(&run, cost);
            self.accounting.record_run(run);
        }
    }
}

/// Adds a run to the metrics.
fn count(run: &ModelRun, cost: Option<f64>) {
    let labels = [("integration", run.integration.clone()), ("model", run.model.clone())];
    counter!(MODEL_RUNS, "integration" => run.integration.clone(), "model" => run.model.clone(),
        "result" => run.result.as_str())
    .increment(1);
    for (direction, tokens) in [("in", run.tokens_in), ("out", run.tokens_out)] {
        counter!(MODEL_TOKENS, "integration" => run.integration.clone(),
            "model" => run.model.clone(), "direction" => direction)
        .increment(tokens);
    }
    if let Some(cost) = cost {
        gauge!(MODEL_COST, &labels).increment(cost);
    }
}
