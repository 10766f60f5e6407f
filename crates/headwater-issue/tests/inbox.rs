//! A caller of the inbox that is cancelled after the commit has recorded its event.

mod support;

use std::sync::{Arc, Mutex};

use anyhow::Result;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use headwater_issue::{InboxConfig, IssueId, ProcessingStep, Recorded, StepObserver, WorkerConfig};
use support::{Backends, RunLog, System, wait_until};

type Caller = BoxFuture<'static, Result<Recorded>>;

/// Drops the caller as soon as its event is committed.
#[derive(Default)]
struct CancelAfterCommit(Mutex<Option<Caller>>);

impl std::fmt::Debug for CancelAfterCommit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CancelAfterCommit").finish_non_exhaustive()
    }
}

impl CancelAfterCommit {
    fn caller(&self) -> std::sync::MutexGuard<'_, Option<Caller>> {
        self.0.lock().expect("not poisoned")
    }
}

impl StepObserver for CancelAfterCommit {
    fn on_step(&self, step: ProcessingStep, _: IssueId) {
        if step == ProcessingStep::Recorded {
            drop(self.caller().take());
        }
    }
}

#[tokio::test]
async fn a_caller_cancelled_after_the_commit_still_nudges() -> Result<()> {
    let cancel = Arc::new(CancelAfterCommit::default());
    let config = InboxConfig { step_observer: cancel.clone(), ..InboxConfig::default() };
    let system = Arc::new(System::with(&Backends::in_memory(), config).await?);
    let run_log = RunLog::default();
    // There is no sweeper: only the nudge makes the worker process the issue.
    let worker = system.start(run_log.handler(), WorkerConfig::default())?;

    let calling = Arc::clone(&system);
    let mut caller = async move { calling.record("1", "a").await }.boxed();
    // Polled once: it has submitted its event and waits for the result.
    assert!(futures_util::poll!(&mut caller).is_pending());
    *cancel.caller() = Some(caller);

    wait_until("the caller to be cancelled", || async { cancel.caller().is_none() }).await?;
    system.wait_processed().await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [["a"]]);
    Ok(())
}
