//! Claims and completions of runs that happen at the same time share transactions; deliveries likewise.
//!
//! Upstream: `worker` and `outbox`. Downstream: `store`. Promises: what gathers while one call is under way goes with the next; a lone
//! run waits for nobody. A bad completion is refused before it shares a call.

use std::sync::Arc;

use headwater_stream::{Coalescer, CoalescerConfig, Gone, StreamError};

use crate::claim::{Claim, ClaimOptions, Completed, Completion};
use crate::delivery::{OutboxSettled, OutboxSettlement};
use crate::error::{IssueError, Result};
use crate::issue::IssueId;
use crate::limits::{BATCH_BYTES_MAX, BATCH_MAX};
use crate::store::Store;

#[derive(Debug)]
pub(crate) struct Batcher {
    claims: Coalescer<IssueId, Result<Claim>>,
    completions: Coalescer<Completion, Result<Completed>>,
}

impl Batcher {
    pub(crate) fn new(
        store: &Arc<dyn Store>,
        options: ClaimOptions,
        calls_max: usize,
    ) -> Result<Self> {
        let gathering = gathering(calls_max);
        let options = Arc::new(options);
        let claim_store = Arc::clone(store);
        let claims = Coalescer::new(gathering, move |issues: Vec<IssueId>| {
            let (store, options) = (Arc::clone(&claim_store), Arc::clone(&options));
            async move { spread(issues.len(), store.claim(&issues, &options).await) }
        });
        let complete_store = Arc::clone(store);
        let completions = Coalescer::new(gathering, move |completions: Vec<Completion>| {
            let store = Arc::clone(&complete_store);
            async move { spread(completions.len(), store.complete(&completions).await) }
        });
        Ok(Self { claims: claims.map_err(invalid)?, completions: completions.map_err(invalid)? })
    }

    pub(crate) async fn claim(&self, issue_id: IssueId) -> Result<Claim> {
        self.claims.call(issue_id).await.unwrap_or_else(without_answer)
    }

    pub(crate) async fn complete(&self, completion: Completion) -> Result<Completed> {
        completion.check()?;
        let bytes = completion.bytes();
        self.completions.call_weighing(completion, bytes).await.unwrap_or_else(without_answer)
    }
}

/// The ends of deliveries share transactions, too.
pub(crate) fn settlements(
    store: &Arc<dyn Store>,
) -> Result<Coalescer<OutboxSettlement, Result<OutboxSettled>>> {
    let store = Arc::clone(store);
    let settlements = Coalescer::new(gathering(1), move |settlements: Vec<OutboxSettlement>| {
        let store = Arc::clone(&store);
        async move { spread(settlements.len(), store.settle_outbox(&settlements).await) }
    });
    settlements.map_err(invalid)
}

fn gathering(calls_max: usize) -> CoalescerConfig {
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

/// Each caller gets its answer, or all the same error.
fn spread<T>(count: usize, answers: Result<Vec<T>>) -> Vec<Result<T>> {
    match answers {
        Ok(answers) => answers.into_iter().map(Ok).collect(),
        Err(error) => (0..count).map(|_| Err(error.clone())).collect(),
    }
}

pub(crate) fn without_answer<T>(gone: Gone) -> Result<T> {
    let problem = "the shared call ended without an answer".to_owned();
    Err(IssueError::Unavailable { problem, source: Some(Arc::new(gone)) })
}
