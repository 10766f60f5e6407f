//! What a promise is tested in: two connections to one store, a way to let time pass, and the calls that most tests make.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::panic::Location;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::{
    Claim, ClaimOptions, ClaimedIssue, CompletionOutcome, DebounceWindow, EventLogId, Issue,
    IssueId, NewEvent, NewOutboxRow, OutboxKind, Recorded, RunCompletion, Store,
};

/// What a promise returns. A broken promise panics; an error that was not expected comes back here.
pub type StoreTestResult<T = ()> = Result<T, TestFailure>;

/// An error that was not expected, with the place that met it.
pub struct TestFailure {
    message: String,
    at: &'static Location<'static>,
}

impl<E: Error + 'static> From<E> for TestFailure {
    #[track_caller]
    fn from(error: E) -> Self {
        Self { message: error.to_string(), at: Location::caller() }
    }
}

// What the test harness prints.
impl fmt::Debug for TestFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected success, found an error: {}", self.at, self.message)
    }
}

type Passing = Pin<Box<dyn Future<Output = StoreTestResult> + Send>>;

/// The surroundings of one test: an empty store of its own.
pub struct StoreTestEnv {
    /// The connection under test.
    pub store: Arc<dyn Store>,
    /// Another process on the same data.
    pub second: Arc<dyn Store>,
    pass: Box<dyn Fn(Duration) -> Passing + Send + Sync>,
    _kept: Vec<Box<dyn Any + Send>>,
}

impl fmt::Debug for StoreTestEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreTestEnv").field("store", &self.store).finish_non_exhaustive()
    }
}

/// The integration that is there in every test.
pub(super) const INTEGRATION: &str = "main";

/// The life of claims in tests: long, so that only [`StoreTestEnv::pass`] ends one.
pub(super) const TTL: Duration = Duration::from_secs(3600);

impl StoreTestEnv {
    /// Surroundings from two connections to the same empty store, and a function that lets time pass in it.
    pub async fn new<F>(
        store: Arc<dyn Store>,
        second: Arc<dyn Store>,
        pass: impl Fn(Duration) -> F + Send + Sync + 'static,
    ) -> StoreTestResult<Self>
    where
        F: Future<Output = StoreTestResult> + Send + 'static,
    {
        store.ensure_integration(INTEGRATION, "github").await?;
        let pass = Box::new(move |duration| Box::pin(pass(duration)) as Passing);
        Ok(Self { store, second, pass, _kept: Vec::new() })
    }

    /// Keeps a server or a directory for as long as the test runs.
    #[must_use]
    pub fn keep(mut self, thing: impl Any + Send) -> Self {
        self._kept.push(Box::new(thing));
        self
    }

    /// Lets time pass in the store.
    pub async fn pass(&self, duration: Duration) -> StoreTestResult {
        (self.pass)(duration).await
    }

    /// Records one event without a debounce window.
    pub async fn record(&self, issue: &str, key: &str) -> StoreTestResult<Recorded> {
        Ok(self.record_all(&[event(issue, key)]).await?.remove(0))
    }

    /// Records events, none of which is refused.
    pub async fn record_all(&self, events: &[NewEvent]) -> StoreTestResult<Vec<Recorded>> {
        let recorded = self.store.record(events, &DebounceWindow::default()).await;
        Ok(recorded.into_iter().collect::<Result<_, _>>()?)
    }

    /// Tries to claim one issue as worker `a`.
    pub async fn try_claim(&self, issue: IssueId) -> StoreTestResult<Claim> {
        Ok(self.store.claim(&[issue], &options("a")).await?.remove(0))
    }

    /// Claims one issue as worker `a`.
    pub async fn claim(&self, issue: IssueId) -> StoreTestResult<ClaimedIssue> {
        Ok(won(self.try_claim(issue).await?))
    }

    /// Completes one run.
    pub async fn complete(&self, completion: RunCompletion) -> StoreTestResult<CompletionOutcome> {
        Ok(self.store.complete(&[completion]).await?.remove(0))
    }

    /// The issue as it is.
    pub async fn issue(&self, id: IssueId) -> StoreTestResult<Issue> {
        Ok(self.second.issue(id).await?.expect("the issue exists"))
    }

    /// The books balance, and no issue is idle with work to do.
    pub async fn assert_sound(&self) -> StoreTestResult {
        let report = self.second.check_consistency(10).await?;
        assert_eq!(report.discrepancies, [], "the books balance");
        assert_eq!(report.recorded, report.processed + report.pending + report.quarantined);
        Ok(())
    }

    /// Records one event and ends its run with these replies.
    pub async fn replied(&self, issue: &str, replies: &[&str]) -> StoreTestResult<IssueId> {
        let recorded = self.record(issue, &format!("{issue}/{}", replies.join("/"))).await?;
        let claimed = self.claim(recorded.issue_id).await?;
        let outbox = replies.iter().map(|text| reply(text)).collect();
        self.complete(RunCompletion { outbox, ..completion(&claimed) }).await?;
        Ok(recorded.issue_id)
    }
}

/// An event of an issue of [`INTEGRATION`], with a payload that follows from its key.
pub(super) fn event(issue: &str, key: &str) -> NewEvent {
    NewEvent {
        integration: INTEGRATION.into(),
        external_project_id: "project".into(),
        external_issue_id: issue.into(),
        source: "github".into(),
        event_type: "comment".into(),
        dedup_key: Some(key.into()),
        payload: serde_json::json!({ "key": key }).to_string(),
    }
}

/// How most tests claim.
pub(super) fn options(worker: &str) -> ClaimOptions {
    ClaimOptions { ttl: TTL, ..ClaimOptions::new(worker) }
}

/// What was won, or a failed test.
pub(super) fn won(claim: Claim) -> ClaimedIssue {
    match claim {
        Claim::Won(claimed) => *claimed,
        other => panic!("expected to win the claim, found {other:?}"),
    }
}

/// The end of a run that handled all it was given.
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
