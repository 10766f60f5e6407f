//! A store that injects faults: calls take effect, but their replies are lost, rejected or delayed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use headwater_issue::*;
use headwater_stream::clock::Timestamp;

/// Wraps another store.
#[derive(Debug)]
pub(crate) struct FlakyStore {
    store: Arc<dyn Store>,
    lost_replies: Mutex<HashMap<&'static str, usize>>,
    faults: Mutex<Faults>,
}

/// Faults of completions, the outbox and claims.
#[derive(Debug, Default)]
struct Faults {
    rejected: Option<IssueId>,
    blocked: Option<IssueId>,
    rejected_batches: usize,
    rejected_settlements: usize,
    rejects_batch_takes: bool,
    rejected_takes: usize,
    blocks_claims: bool,
    blocked_claims: usize,
    claim_delay: Duration,
    take_delay: Duration,
}

impl FlakyStore {
    pub(crate) fn new(store: Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self { store, lost_replies: Mutex::default(), faults: Mutex::default() })
    }

    /// Loses the next `count` replies of this call.
    pub(crate) fn lose_replies(&self, call: &'static str, count: usize) {
        self.lost_replies.lock().expect("not poisoned").insert(call, count);
    }

    /// Rejects completions of this issue as invalid.
    pub(crate) fn reject_completions_of(&self, issue_id: IssueId) {
        self.faults.lock().expect("not poisoned").rejected = Some(issue_id);
    }

    /// Fails completions of this issue as unavailable.
    pub(crate) fn block_completions_of(&self, issue_id: IssueId) {
        self.faults.lock().expect("not poisoned").blocked = Some(issue_id);
    }

    /// Number of rejected batches of completions.
    pub(crate) fn rejected_batches(&self) -> usize {
        self.faults.lock().expect("not poisoned").rejected_batches
    }

    /// Rejects the next `count` settlements.
    pub(crate) fn reject_settlements(&self, count: usize) {
        self.faults.lock().expect("not poisoned").rejected_settlements = count;
    }

    /// Rejects calls that take more than one outbox row.
    pub(crate) fn reject_batch_takes(&self) {
        self.faults.lock().expect("not poisoned").rejects_batch_takes = true;
    }

    /// Number of rejected calls that take more than one row.
    pub(crate) fn rejected_takes(&self) -> usize {
        self.faults.lock().expect("not poisoned").rejected_takes
    }

    /// Makes claims unavailable, or available again.
    pub(crate) fn block_claims(&self, is_blocked: bool) {
        self.faults.lock().expect("not poisoned").blocks_claims = is_blocked;
    }

    /// Number of claims that failed as unavailable.
    pub(crate) fn blocked_claims(&self) -> usize {
        self.faults.lock().expect("not poisoned").blocked_claims
    }

    /// Delays replies of claims.
    pub(crate) fn delay_claim_replies(&self, by: Duration) {
        self.faults.lock().expect("not poisoned").claim_delay = by;
    }

    /// Delays the reply of the next take from the outbox.
    pub(crate) fn delay_next_take_reply(&self, by: Duration) {
        self.faults.lock().expect("not poisoned").take_delay = by;
    }

    fn fail_completions(&self, completions: &[RunCompletion]) -> Result<()> {
        let mut faults = self.faults.lock().expect("not poisoned");
        let has =
            |issue: Option<IssueId>| completions.iter().any(|one| Some(one.issue_id) == issue);
        if has(faults.rejected) {
            faults.rejected_batches += usize::from(completions.len() > 1);
            return Err(invalid("value overflows"));
        }
        if has(faults.blocked) {
            return Err(IssueError::Unavailable { problem: "blocked".into(), source: None });
        }
        Ok(())
    }

    /// Whether all replies to lose have been lost.
    pub(crate) fn all_replies_lost(&self) -> bool {
        self.lost_replies.lock().expect("not poisoned").values().all(|left| *left == 0)
    }

    fn reply<T>(&self, call: &'static str, result: Result<T>) -> Result<T> {
        let mut lost_replies = self.lost_replies.lock().expect("not poisoned");
        match lost_replies.get_mut(call) {
            Some(left) if *left > 0 => {
                *left -= 1;
                Err(IssueError::Unavailable {
                    problem: format!("the reply of {call} is lost"),
                    source: None,
                })
            }
            _ => result,
        }
    }
}

fn invalid(problem: &str) -> IssueError {
    IssueError::Invalid { what: "a value".into(), problem: problem.into() }
}

macro_rules! delegate {
    (impl $trait:ident { $($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)* } $($other:item)*) => {
        #[async_trait]
        impl $trait for FlakyStore {
            $(async fn $name(&self, $($argument: $type),*) -> Result<$result> {
                let result = self.store.$name($($argument),*).await;
                self.reply(stringify!($name), result)
            })*

            $($other)*
        }
    };
}

delegate! {
    impl Store {
        heartbeat(claims: &[(IssueId, ClaimEpoch)], ttl: Duration) -> Vec<ClaimRenewal>;
        check_claims(claims: &[(IssueId, ClaimEpoch)]) -> Vec<ClaimRenewal>;
        fail(failures: &[RunFailure], attempts_max: u32) -> Vec<FailureOutcome>;
        release_claims(claims: &[ClaimRelease]) -> Vec<ClaimReleased>;
        sweep(options: &SweepOptions) -> SweepReport;
        heartbeat_worker(worker: &str, ttl: Duration) -> ();
        missing_event_logs(ids: &[EventLogId]) -> Vec<EventLogId>;
        begin() -> Box<dyn Transaction>;
        migrate(migrations: &[headwater_issue::Migration]) -> ();
    }

    async fn record(&self, events: &[NewEvent], debounce: &DebounceWindow) -> Vec<Result<Recorded>> {
        let results = self.store.record(events, debounce).await;
        match self.reply("record", Ok(())) {
            Ok(()) => results,
            Err(error) => results.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    async fn claim(&self, issues: &[IssueId], options: &ClaimOptions) -> Result<Vec<Claim>> {
        let claim_delay = {
            let mut faults = self.faults.lock().expect("not poisoned");
            if faults.blocks_claims {
                faults.blocked_claims += 1;
                return Err(IssueError::Unavailable { problem: "blocked".into(), source: None });
            }
            faults.claim_delay
        };
        let result = self.store.claim(issues, options).await;
        tokio::time::sleep(claim_delay).await;
        self.reply("claim", result)
    }

    async fn complete(&self, completions: &[RunCompletion]) -> Result<Vec<CompletionOutcome>> {
        self.fail_completions(completions)?;
        let result = self.store.complete(completions).await;
        self.reply("complete", result)
    }

    async fn take_outbox_from(&self, take: &OutboxTake) -> Result<Vec<OutboxRow>> {
        let delay = {
            let mut faults = self.faults.lock().expect("not poisoned");
            if faults.rejects_batch_takes && take.limit > 1 {
                faults.rejected_takes += 1;
                return Err(invalid("too much at once"));
            }
            std::mem::take(&mut faults.take_delay)
        };
        let result = self.store.take_outbox_from(take).await;
        tokio::time::sleep(delay).await;
        self.reply("take_outbox", result)
    }

    async fn settle_outbox(&self, settlements: &[OutboxSettlement]) -> Result<Vec<OutboxSettled>> {
        {
            let mut faults = self.faults.lock().expect("not poisoned");
            if faults.rejected_settlements > 0 {
                faults.rejected_settlements -= 1;
                return Err(invalid("no such thing"));
            }
        }
        let result = self.store.settle_outbox(settlements).await;
        self.reply("settle_outbox", result)
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

delegate! {
    impl AdminStore {
        ensure_integration(name: &str, provider: &str) -> IntegrationId;
        expire_leases() -> ();
        integrations(after: Option<&str>) -> Vec<IntegrationInfo>;
        issue(id: IssueId) -> Option<Issue>;
        find_issue(integration: &str, project: &str, issue: &str) -> Option<Issue>;
        issues(filter: &IssueFilter, limit: usize) -> Vec<Issue>;
        count_issues(filter: &IssueFilter, max: usize) -> usize;
        event_logs(id: IssueId, filter: &EventLogFilter, limit: usize) -> Vec<EventLog>;
        runs(id: IssueId, before: Option<ClaimEpoch>, limit: usize) -> Vec<IssueRun>;
        processed_event_logs(id: IssueId, from: Timestamp, to: Timestamp, limit: usize) -> Vec<EventLog>;
        event_log(id: EventLogId) -> Option<EventLog>;
        original_payload(id: EventLogId) -> Option<String>;
        newest_event_log_at_commit(id: OutboxId) -> Option<EventLogId>;
        release(id: IssueId) -> QuarantineCleared;
        retry(id: IssueId) -> IssueRetried;
        issue_facts(id: IssueId) -> Option<IssueFacts>;
        check_consistency_page(after: Option<IssueId>, issues_max: usize) -> ConsistencyReport;
        backlog() -> Backlog;
        workers() -> Vec<WorkerInfo>;
        dead_letters(after: Option<DeadLetterId>, limit: usize) -> Vec<IssueDeadLetter>;
        dead_outbox(after: Option<OutboxId>, limit: usize) -> Vec<DeadOutboxRow>;
        outbox_facts(id: OutboxId) -> Option<OutboxFacts>;
        outbox_rows(filter: &OutboxFilter, limit: usize) -> Vec<OutboxFacts>;
        committed_outbox(id: IssueId, from: Timestamp, to: Timestamp, limit: usize) -> Vec<OutboxFacts>;
        retry_outbox(id: OutboxId) -> ();
    }
}
