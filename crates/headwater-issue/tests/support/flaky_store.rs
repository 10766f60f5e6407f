//! A store whose answers get lost: the call happens, and the caller hears that the database is away.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use headwater_issue::*;

/// A store in front of another one.
#[derive(Debug)]
pub(crate) struct FlakyStore {
    store: Arc<dyn Store>,
    lost: Mutex<HashMap<&'static str, usize>>,
    troubled: Mutex<Trouble>,
}

/// What is wrong with the completions of one issue, with the outbox and with claims.
#[derive(Debug, Default)]
struct Trouble {
    refused: Option<IssueId>,
    blocked: Option<IssueId>,
    shared_refusals: usize,
    refused_settlements: usize,
    refuses_shared_takes: bool,
    refused_takes: usize,
    blocks_claims: bool,
    blocked_claims: usize,
    slow_claims: Duration,
}

impl FlakyStore {
    pub(crate) fn new(store: Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self { store, lost: Mutex::default(), troubled: Mutex::default() })
    }

    /// The next `count` answers to this call get lost.
    pub(crate) fn lose(&self, call: &'static str, count: usize) {
        self.lost.lock().expect("not poisoned").insert(call, count);
    }

    /// No completion of this issue can be kept.
    pub(crate) fn refuse(&self, issue_id: IssueId) {
        self.troubled.lock().expect("not poisoned").refused = Some(issue_id);
    }

    /// The database is never there for completions of this issue.
    pub(crate) fn block(&self, issue_id: IssueId) {
        self.troubled.lock().expect("not poisoned").blocked = Some(issue_id);
    }

    /// How many calls of several completions were refused.
    pub(crate) fn shared_refusals(&self) -> usize {
        self.troubled.lock().expect("not poisoned").shared_refusals
    }

    /// The next `count` settlements are refused.
    pub(crate) fn refuse_settlements(&self, count: usize) {
        self.troubled.lock().expect("not poisoned").refused_settlements = count;
    }

    /// Rows of the outbox cannot be taken together.
    pub(crate) fn refuse_shared_takes(&self) {
        self.troubled.lock().expect("not poisoned").refuses_shared_takes = true;
    }

    /// How many calls for several rows were refused.
    pub(crate) fn refused_takes(&self) -> usize {
        self.troubled.lock().expect("not poisoned").refused_takes
    }

    /// The database is not there for claims, or is again.
    pub(crate) fn block_claims(&self, is_blocked: bool) {
        self.troubled.lock().expect("not poisoned").blocks_claims = is_blocked;
    }

    /// How many claims have found no database.
    pub(crate) fn blocked_claims(&self) -> usize {
        self.troubled.lock().expect("not poisoned").blocked_claims
    }

    /// Answers to claims are so long on their way.
    pub(crate) fn slow_down_claims(&self, by: Duration) {
        self.troubled.lock().expect("not poisoned").slow_claims = by;
    }

    fn trouble(&self, completions: &[RunCompletion]) -> Result<()> {
        let mut trouble = self.troubled.lock().expect("not poisoned");
        let has =
            |issue: Option<IssueId>| completions.iter().any(|one| Some(one.issue_id) == issue);
        if has(trouble.refused) {
            trouble.shared_refusals += usize::from(completions.len() > 1);
            return Err(refused("value overflows"));
        }
        if has(trouble.blocked) {
            return Err(IssueError::Unavailable { problem: "blocked".into(), source: None });
        }
        Ok(())
    }

    /// Whether all answers that were to be lost are lost.
    pub(crate) fn is_done(&self) -> bool {
        self.lost.lock().expect("not poisoned").values().all(|left| *left == 0)
    }

    fn heard<T>(&self, call: &'static str, answer: Result<T>) -> Result<T> {
        let mut lost = self.lost.lock().expect("not poisoned");
        match lost.get_mut(call) {
            Some(left) if *left > 0 => {
                *left -= 1;
                Err(IssueError::Unavailable {
                    problem: format!("the answer to {call} is lost"),
                    source: None,
                })
            }
            _ => answer,
        }
    }
}

fn refused(problem: &str) -> IssueError {
    IssueError::Invalid { what: "a value".into(), problem: problem.into() }
}

macro_rules! pass_on {
    (impl $trait:ident { $($name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)* } $($other:item)*) => {
        #[async_trait]
        impl $trait for FlakyStore {
            $(async fn $name(&self, $($argument: $type),*) -> Result<$answer> {
                let answer = self.store.$name($($argument),*).await;
                self.heard(stringify!($name), answer)
            })*

            $($other)*
        }
    };
}

pass_on! {
    impl Store {
        heartbeat(claims: &[(IssueId, ClaimEpoch)], ttl: Duration) -> Vec<Renewal>;
        fail(failures: &[RunFailure], attempts_max: u32) -> Vec<FailureOutcome>;
        release_claims(claims: &[ClaimRelease]) -> Vec<ClaimReleased>;
        sweep(options: &SweepOptions) -> SweepReport;
        heartbeat_worker(worker: &str, ttl: Duration) -> ();
        missing_event_logs(ids: &[EventLogId]) -> Vec<EventLogId>;
        begin() -> Box<dyn Transaction>;
    }

    async fn record(&self, events: &[NewEvent], debounce: &DebounceWindow) -> Vec<Result<Recorded>> {
        let answers = self.store.record(events, debounce).await;
        match self.heard("record", Ok(())) {
            Ok(()) => answers,
            Err(error) => answers.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    async fn claim(&self, issues: &[IssueId], options: &ClaimOptions) -> Result<Vec<Claim>> {
        let slow_claims = {
            let mut trouble = self.troubled.lock().expect("not poisoned");
            if trouble.blocks_claims {
                trouble.blocked_claims += 1;
                return Err(IssueError::Unavailable { problem: "blocked".into(), source: None });
            }
            trouble.slow_claims
        };
        let answer = self.store.claim(issues, options).await;
        tokio::time::sleep(slow_claims).await;
        self.heard("claim", answer)
    }

    async fn complete(&self, completions: &[RunCompletion]) -> Result<Vec<CompletionOutcome>> {
        self.trouble(completions)?;
        let answer = self.store.complete(completions).await;
        self.heard("complete", answer)
    }

    async fn take_outbox_from(&self, take: &OutboxTake) -> Result<Vec<OutboxRow>> {
        {
            let mut trouble = self.troubled.lock().expect("not poisoned");
            if trouble.refuses_shared_takes && take.limit > 1 {
                trouble.refused_takes += 1;
                return Err(refused("too much at once"));
            }
        }
        let answer = self.store.take_outbox_from(take).await;
        self.heard("take_outbox", answer)
    }

    async fn settle_outbox(&self, settlements: &[OutboxSettlement]) -> Result<Vec<OutboxSettled>> {
        {
            let mut trouble = self.troubled.lock().expect("not poisoned");
            if trouble.refused_settlements > 0 {
                trouble.refused_settlements -= 1;
                return Err(refused("no such thing"));
            }
        }
        let answer = self.store.settle_outbox(settlements).await;
        self.heard("settle_outbox", answer)
    }

    async fn outbox_wake(&self, wait: Duration) {
        self.store.outbox_wake(wait).await;
    }

    async fn read_connection(&self) -> Result<ReadConnection> {
        self.store.read_connection().await
    }

    async fn close(&self) {
        self.store.close().await;
    }
}

pass_on! {
    impl AdminStore {
        ensure_integration(name: &str, provider: &str) -> IntegrationId;
        integrations(after: Option<&str>) -> Vec<IntegrationInfo>;
        issue(id: IssueId) -> Option<Issue>;
        find_issue(integration: &str, project: &str, issue: &str) -> Option<Issue>;
        issues(filter: &IssueFilter, limit: usize) -> Vec<Issue>;
        event_logs(id: IssueId, filter: &EventLogFilter, limit: usize) -> Vec<EventLog>;
        original_payload(id: EventLogId) -> Option<String>;
        newest_event_log_at_commit(id: OutboxId) -> Option<EventLogId>;
        release(id: IssueId) -> QuarantineCleared;
        retry(id: IssueId) -> IssueRetried;
        issue_facts(id: IssueId) -> Option<IssueFacts>;
        check_consistency(limit: usize) -> ConsistencyReport;
        backlog() -> Backlog;
        workers() -> Vec<WorkerInfo>;
        dead_letters(after: Option<DeadLetterId>, limit: usize) -> Vec<IssueDeadLetter>;
        dead_outbox(after: Option<OutboxId>, limit: usize) -> Vec<DeadOutboxRow>;
        retry_outbox(id: OutboxId) -> ();
    }
}
