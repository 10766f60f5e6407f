//! The inbox and its callers: one that goes away after the commit has recorded its event all the same.

mod support;

use std::sync::{Arc, Mutex};

use anyhow::Result;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use headwater_issue::{InboxConfig, IssueId, ProcessingStep, Recorded, StepObserver, WorkerConfig};
use support::{Backends, RunLog, System, wait_until};

type Caller = BoxFuture<'static, Result<Recorded>>;

/// Drops the caller as soon as its event is committed, before anything else happens.
#[derive(Default)]
struct HangUp(Mutex<Option<Caller>>);

impl std::fmt::Debug for HangUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HangUp").finish_non_exhaustive()
    }
}

impl HangUp {
    fn call(&self) -> std::sync::MutexGuard<'_, Option<Caller>> {
        self.0.lock().expect("not poisoned")
    }
}

impl StepObserver for HangUp {
    fn on_step(&self, step: ProcessingStep, _: IssueId) {
        if step == ProcessingStep::Recorded {
            drop(self.call().take());
        }
    }
}

#[tokio::test]
async fn a_caller_that_hangs_up_after_the_commit_has_nudged_all_the_same() -> Result<()> {
    let hang_up = Arc::new(HangUp::default());
    let config = InboxConfig { step_observer: hang_up.clone(), ..InboxConfig::default() };
    let system = Arc::new(System::with(&Backends::now(), config).await?);
    let run_log = RunLog::default();
    // Nobody sweeps: only the nudge brings the worker to the issue.
    let worker = system.start(run_log.handler(), WorkerConfig::default())?;

    let calling = Arc::clone(&system);
    let mut caller = async move { calling.record("1", "a").await }.boxed();
    // Asked once, and never again: it has sent its event off and waits for the answer.
    assert!(futures_util::poll!(&mut caller).is_pending());
    *hang_up.call() = Some(caller);

    wait_until("the caller to hang up", || async { hang_up.call().is_none() }).await?;
    system.wait_processed().await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [["a"]]);
    Ok(())
}
