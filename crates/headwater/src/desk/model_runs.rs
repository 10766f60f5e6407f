//! Records what each run of a model used: tokens, cost and result, also of runs that failed or were superseded.
//!
//! Upstream: `handler` reports each model call and the end of the run. Downstream: `token_reservations`, which stores
//! the record in the [`Ledger`](crate::desk::Ledger), and metrics.
//! Guarantees: a run that called the model is recorded once, also if it is dropped in the middle of a call; that call
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

/// The record of one run. If it is dropped before [`finish`](Self::finish), the run was superseded.
pub(crate) struct ModelRunRecord<'a> {
    accounting: &'a TokenAccounting,
    prices: Prices,
    run: ModelRun,
    usage: TokenUsage,
    /// Prompt tokens of the call in progress.
    in_flight: Option<u64>,
}

impl<'a> ModelRunRecord<'a> {
    pub(crate) fn new(
        accounting: &'a TokenAccounting,
        run: &Run,
        model: &str,
        prompt_version: i64,
        prices: Prices,
    ) -> Self {
        let IssueId(issue_id) = run.issue().id;
        let run = ModelRun {
            id: Uuid::now_v7(),
            at: budget::now(),
            issue_id: IssueId(issue_id),
            integration: run.issue().integration.clone(),
            model: model.to_owned(),
            prompt_version,
            result: ModelRunResult::Superseded,
            calls: 0,
            tokens_in: 0,
            tokens_out: 0,
            cost_micros: None,
        };
        Self { accounting, prices, run, usage: TokenUsage::default(), in_flight: None }
    }

    /// A call begins.
    pub(crate) fn begin_call(&mut self, prompt_tokens: u64) {
        self.run.calls += 1;
        self.in_flight = Some(prompt_tokens);
    }

    /// The call has used these tokens.
    pub(crate) fn end_call(&mut self, usage: TokenUsage) {
        self.in_flight = None;
        self.usage = self.usage.plus(usage);
    }

    /// Tokens of all calls so far.
    pub(crate) fn usage(&self) -> TokenUsage {
        self.usage
    }

    /// The run ended.
    pub(crate) fn finish(mut self, result: ModelRunResult) {
        self.run.result = result;
    }
}

impl Drop for ModelRunRecord<'_> {
    fn drop(&mut self) {
        if self.run.calls == 0 {
            return;
        }
        if let Some(input_tokens) = self.in_flight.take() {
            self.usage = self.usage.plus(TokenUsage { input_tokens, output_tokens: 0 });
        }
        let cost = self.prices.cost(self.usage);
        let mut run = self.run.clone();
        (run.tokens_in, run.tokens_out) = (self.usage.input_tokens, self.usage.output_tokens);
        run.cost_micros = cost.map(|cost| (cost * 1e6).round() as u64);
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
        self.accounting.record_run(run);
    }
}
