//! The test environment: two connections to one store, a way to advance time, and helpers for common calls.

use std::any::Any;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::TestResult;
use headwater_issue::{
    Claim, ClaimOptions, ClaimedIssue, CompletionOutcome, DebounceWindow, EventLogId, Issue,
    IssueId, NewEvent, NewOutboxRow, OutboxKind, Recorded, RunCompletion, Store,
};

type Advancing = Pin<Box<dyn Future<Output = TestResult> + Send>>;

/// The environment of one test: an empty store.
pub struct StoreTestEnv {
    /// The connection under test.
    pub store: Arc<dyn Store>,
    /// A second connection to the same data, as of another process.
    pub second: Arc<dyn Store>,
    advance: Box<dyn Fn(Duration) -> Advancing + Send + Sync>,
    _kept: Vec<Box<dyn Any + Send>>,
}

impl fmt::Debug for StoreTestEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreTestEnv").field("store", &self.store).finish_non_exhaustive()
    }
}

/// The integration that exists in every test.
pub(super) const INTEGRATION: &str = "main";

/// TTL of claims in tests: long, so that a claim expires only with [`StoreTestEnv::advance`].
pub(super) const TTL: Duration = Duration::from_secs(3600);

impl StoreTestEnv {
    /// Creates an environment from two connections to the same empty store, and a function that advances its time.
    pub async fn new<F>(
        store: Arc<dyn Store>,
        second: Arc<dyn Store>,
        advance: impl Fn(Duration) -> F + Send + Sync + 'static,
    ) -> TestResult<Self>
    where
        F: Future<Output = TestResult> + Send + 'static,
    {
        store.ensure_integration(INTEGRATION, "github").await?;
        let advance = Box::new(move |duration| Box::pin(advance(duration)) as Advancing);
        Ok(Self { store, second, advance, _kept: Vec::new() })
    }

    /// Keeps a server or a directory alive until the test ends.
    #[must_use]
    pub fn keep(mut self, thing: impl Any + Send) -> Self {
        self._kept.push(Box::new(thing));
        self
    }

    /// Advances the time of the store.
    pub async fn advance(&self, duration: Duration) -> TestResult {
        (self.advance)(duration).await
    }

    /// Records one event without a debounce window.
    pub async fn record(&self, issue: &str, key: &str) -> TestResult<Recorded> {
        Ok(self.record_all(&[event(issue, key)]).await?.remove(0))
    }

    /// Records events; fails if one is rejected.
    pub async fn record_all(&self, events: &[NewEvent]) -> TestResult<Vec<Recorded>> {
        let recorded = self.store.record(events, &DebounceWindow::default()).await;
        Ok(recorded.into_iter().collect::<Result<_, _>>()?)
    }

    /// Tries to claim one issue as worker `a`.
    pub async fn try_claim(&self, issue: IssueId) -> TestResult<Claim> {
        Ok(self.store.claim(&[issue], &options("a")).await?.remove(0))
    }

    /// Claims one issue as worker `a`.
    pub async fn claim(&self, issue: IssueId) -> TestResult<ClaimedIssue> {
        Ok(won(self.try_claim(issue).await?))
    }

    /// Completes one run.
    pub async fn complete(&self, completion: RunCompletion) -> TestResult<CompletionOutcome> {
        Ok(self.store.complete(&[completion]).await?.remove(0))
    }

    /// The current issue.
    pub async fn issue(&self, id: IssueId) -> TestResult<Issue> {
        Ok(self.second.issue(id).await?.expect("the issue exists"))
    }

    /// Asserts that the consistency report has no discrepancies.
    pub async fn assert_consistent(&self) -> TestResult {
        let report = self.second.check_consistency(10).await?;
        assert_eq!(report.discrepancies, [], "the store is consistent");
        assert_eq!(report.recorded, report.processed + report.pending + report.quarantined);
        Ok(())
    }

    /// Records one event and completes its run with these replies.
    pub async fn replied(&self, issue: &str, replies: &[&str]) -> TestResult<IssueId> {
        let recorded = self.record(issue, &format!("{issue}/{}", replies.join("/"))).await?;
        let claimed = self.claim(recorded.issue_id).await?;
        let outbox = replies.iter().map(|text| reply(text)).collect();
        self.complete(RunCompletion { outbox, ..completion(&claimed) }).await?;
        Ok(recorded.issue_id)
    }
}

/// An event of an issue of [`INTEGRATION`], with a payload derived from its key.
pub(super) fn event(issue: &str, key: &str) -> NewEvent {
    NewEvent {
        integration: INTEGRATION.into(),
        external_project_id: "project".into(),
        external_issue_id: issue.into(),
        source: "github".into(),
        event_type: "comment".into(),
        dedup_key: Some(key.into()),
        trace: None,
        payload: serde_json::json!({ "key": key }).to_string(),
    }
}

/// Claim options of most tests.
pub(super) fn options(worker: &str) -> ClaimOptions {
    ClaimOptions { ttl: TTL, ..ClaimOptions::new(worker) }
}

/// The claimed issue; panics if the claim was not acquired.
pub(super) fn won(claim: Claim) -> ClaimedIssue {
    match claim {
        Claim::Won(claimed) => *claimed,
        other => panic!("expected the claim to be acquired, found {other:?}"),
    }
}

/// Completion of a run that processed all its events.
pub(super) fn completion(claimed: &ClaimedIssue) -> RunCompletion {
    RunCompletion {
        issue_id: claimed.issue.id,
        epoch: claimed.epoch,
        event_log_ids: ids(claimed),
        ..RunCompletion::default()
    }
}

/// The event logs of a run.
pub(super) fn ids(claimed: &ClaimedIssue) -> Vec<EventLogId> {
    claimed.events.iter().map(|event| event.id).collect()
}

/// A reply with this text.
pub(super) fn reply(text: &str) -> NewOutboxRow {
    let payload = serde_json::json!({ "text": text }).to_string();
    NewOutboxRow { kind: OutboxKind::Reply, target: "comment".into(), payload }
}

/// The text of a [`reply`].
pub(super) fn text_of(payload: &str) -> String {
    let value: serde_json::Value = serde_json::from_str(payload).expect("a payload is JSON");
    value["text"].as_str().expect("a reply has a text").to_owned()
}
