//! Batches concurrent claims, completions and settlements into shared transactions.
//!
//! Upstream: `worker` and `outbox`. Downstream: `store`. Guarantees: items that arrive during a call go with the next
//! one; a single item is not delayed. An invalid completion is rejected before batching. If a batch fails and one item
//! may be the cause, each item is called on its own.

use std::sync::Arc;

use headwater_stream::{BatchError, Coalescer, CoalescerConfig, StreamError};

use crate::claim::{Claim, ClaimOptions, CompletionOutcome, RunCompletion};
use crate::error::{IssueError, Result};
use crate::issue::IssueId;
use crate::limits::{BATCH_BYTES_MAX, BATCH_MAX, CONSECUTIVE_FAILURES_MAX};
use crate::outbox::types::{OutboxSettled, OutboxSettlement};
use crate::store::Store;

/// One result per item: from one call for the batch or, if an item may be the cause of its failure, from one call each.
macro_rules! batch_then_singly {
    ($items:expr, |$batch:ident| $call:expr) => {{
        let items = $items;
        let results = {
            let $batch = items.as_slice();
            $call.await
        };
        match results {
            Err(error) if items.len() > 1 && error.is_item_error() => {
                let mut retries = SingleRetries::new(items.len());
                for $batch in items.chunks(1) {
                    if retries.should_continue() {
                        let results = $call.await;
                        retries.push(results);
                    }
                }
                retries.finish(error)
            }
            results => fan_out(items.len(), results),
        }
    }};
}

#[derive(Debug)]
pub(crate) struct Batcher {
    claims: Coalescer<IssueId, Result<Claim>>,
    completions: Coalescer<RunCompletion, Result<CompletionOutcome>>,
}

impl Batcher {
    pub(crate) fn new(
        store: &Arc<dyn Store>,
        options: ClaimOptions,
        calls_max: usize,
    ) -> Result<Self> {
        let coalescer_config = coalescer_config(calls_max);
        let options = Arc::new(options);
        let claim_store = Arc::clone(store);
        let claims = Coalescer::new(coalescer_config, move |issues: Vec<IssueId>| {
            let (store, options) = (Arc::clone(&claim_store), Arc::clone(&options));
            async move { batch_then_singly!(issues, |batch| store.claim(batch, &options)) }
        });
        let complete_store = Arc::clone(store);
        let completions =
            Coalescer::new(coalescer_config, move |completions: Vec<RunCompletion>| {
                let store = Arc::clone(&complete_store);
                async move { batch_then_singly!(completions, |batch| store.complete(batch)) }
            });
        Ok(Self { claims: claims.map_err(invalid)?, completions: completions.map_err(invalid)? })
    }

    pub(crate) async fn claim(&self, issue_id: IssueId) -> Result<Claim> {
        self.claims.call(issue_id).await.unwrap_or_else(batch_lost)
    }

    pub(crate) async fn complete(&self, completion: RunCompletion) -> Result<CompletionOutcome> {
        completion.validate()?;
        let bytes = completion.bytes();
        self.completions.call_with_size(completion, bytes).await.unwrap_or_else(batch_lost)
    }
}

/// Batches settlements of deliveries.
pub(crate) fn settlements(
    store: &Arc<dyn Store>,
) -> Result<Coalescer<OutboxSettlement, Result<OutboxSettled>>> {
    let store = Arc::clone(store);
    let settlements =
        Coalescer::new(coalescer_config(1), move |settlements: Vec<OutboxSettlement>| {
            let store = Arc::clone(&store);
            async move { batch_then_singly!(settlements, |batch| store.settle_outbox(batch)) }
        });
    settlements.map_err(invalid)
}

fn coalescer_config(calls_max: usize) -> CoalescerConfig {
    CoalescerConfig {
        max_items: BATCH_MAX,
        max_bytes: BATCH_BYTES_MAX,
        in_flight_max: calls_max,
        ..CoalescerConfig::default()
    }
}

fn invalid(error: StreamError) -> IssueError {
    IssueError::invalid("calls_max", error.to_string())
}

/// Results of calls with one item each.
struct SingleRetries<T> {
    count: usize,
    results: Vec<Result<T>>,
    consecutive_failures: usize,
}

impl<T> SingleRetries<T> {
    fn new(count: usize) -> Self {
        Self { count, results: Vec::with_capacity(count), consecutive_failures: 0 }
    }

    fn should_continue(&self) -> bool {
        self.consecutive_failures < CONSECUTIVE_FAILURES_MAX
    }

    fn push(&mut self, results: Result<Vec<T>>) {
        let answer = results.and_then(|results| {
            let problem = || "the store returned no result for an item".to_owned();
            let missing = || IssueError::Schema { problem: problem() };
            results.into_iter().next().ok_or_else(missing)
        });
        self.consecutive_failures = if answer.is_err() { self.consecutive_failures + 1 } else { 0 };
        self.results.push(answer);
    }

    /// Items that were not called get the error of the batch. It may concern another item, so it is reported as
    /// `Unavailable`.
    fn finish(mut self, error: IssueError) -> Vec<Result<T>> {
        let error = match error {
            IssueError::Unavailable { .. } => error,
            other => IssueError::Unavailable {
                problem: other.to_string(),
                source: Some(Arc::new(other)),
            },
        };
        self.results.resize_with(self.count, || Err(error.clone()));
        self.results
    }
}

/// One result per caller; an error of the batch is cloned for all.
fn fan_out<T>(count: usize, results: Result<Vec<T>>) -> Vec<Result<T>> {
    match results {
        Ok(results) => results.into_iter().map(Ok).collect(),
        Err(error) => (0..count).map(|_| Err(error.clone())).collect(),
    }
}

pub(crate) fn batch_lost<T>(gone: BatchError) -> Result<T> {
    let problem = "the batch ended without a result".to_owned();
    Err(IssueError::Unavailable { problem, source: Some(Arc::new(gone)) })
}
