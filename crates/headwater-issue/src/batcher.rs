//! Claims and completions of runs that happen at the same time share transactions; deliveries likewise.
//!
//! Upstream: `worker` and `outbox`. Downstream: `store`. Promises: what gathers while one call is under way goes with the next; a lone
//! run waits for nobody. A bad completion is refused before it shares a call; if the database refuses a shared call all the
//! same, for what may be the fault of one, each is called on its own.

use std::sync::Arc;

use headwater_stream::{Coalescer, CoalescerConfig, Gone, StreamError};

use crate::claim::{Claim, ClaimOptions, Completed, Completion};
use crate::delivery::{OutboxSettled, OutboxSettlement};
use crate::error::{IssueError, Result};
use crate::issue::IssueId;
use crate::limits::{BATCH_BYTES_MAX, BATCH_MAX, SINGLE_FAILURES_MAX};
use crate::store::Store;

/// Each item its answer: from one call for all of them, or else from one call each.
macro_rules! each_its_answer {
    ($items:expr, |$batch:ident| $call:expr) => {{
        let items = $items;
        let answers = {
            let $batch = items.as_slice();
            $call.await
        };
        match answers {
            Err(error) if items.len() > 1 && error.may_concern_one() => {
                let mut singly = Singly::new(items.len());
                for $batch in items.chunks(1) {
                    if singly.goes_on() {
                        let answers = $call.await;
                        singly.push(answers);
                    }
                }
                singly.finish(error)
            }
            answers => spread(items.len(), answers),
        }
    }};
}

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
            async move { each_its_answer!(issues, |batch| store.claim(batch, &options)) }
        });
        let complete_store = Arc::clone(store);
        let completions = Coalescer::new(gathering, move |completions: Vec<Completion>| {
            let store = Arc::clone(&complete_store);
            async move { each_its_answer!(completions, |batch| store.complete(batch)) }
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
        async move { each_its_answer!(settlements, |batch| store.settle_outbox(batch)) }
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

/// The answers to calls of one item each.
struct Singly<T> {
    count: usize,
    answers: Vec<Result<T>>,
    failures_in_a_row: usize,
}

impl<T> Singly<T> {
    fn new(count: usize) -> Self {
        Self { count, answers: Vec::with_capacity(count), failures_in_a_row: 0 }
    }

    fn goes_on(&self) -> bool {
        self.failures_in_a_row < SINGLE_FAILURES_MAX
    }

    fn push(&mut self, answers: Result<Vec<T>>) {
        let answer = answers.and_then(|answers| {
            let problem = || "the database gave no answer to a call".to_owned();
            let missing = || IssueError::Schema { problem: problem() };
            answers.into_iter().next().ok_or_else(missing)
        });
        self.failures_in_a_row = if answer.is_err() { self.failures_in_a_row + 1 } else { 0 };
        self.answers.push(answer);
    }

    /// Those that were not tried have the error of the shared call. It concerned another one, so it is no verdict on them.
    fn finish(mut self, error: IssueError) -> Vec<Result<T>> {
        let error = match error {
            IssueError::Unavailable { .. } => error,
            other => IssueError::Unavailable {
                problem: other.to_string(),
                source: Some(Arc::new(other)),
            },
        };
        self.answers.resize_with(self.count, || Err(error.clone()));
        self.answers
    }
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
