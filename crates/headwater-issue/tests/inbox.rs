//! The inbox and its callers: one that goes away after the commit has recorded its event all the same.

mod support;

use std::sync::{Arc, Mutex};

use anyhow::Result;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use headwater_issue::{InboxConfig, IssueId, Recorded, Step, Steps, WorkerConfig};
use support::{Journal, Place, System, until};

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

impl Steps for HangUp {
    fn taken(&self, step: Step, _: IssueId) {
        if step == Step::Recorded {
            drop(self.call().take());
        }
    }
}

#[tokio::test]
async fn a_caller_that_hangs_up_after_the_commit_has_nudged_all_the_same() -> Result<()> {
    let hang_up = Arc::new(HangUp::default());
    let config = InboxConfig { steps: hang_up.clone(), ..InboxConfig::default() };
    let system = Arc::new(System::with(&Place::now(), config).await?);
    let journal = Journal::default();
    // Nobody sweeps: only the nudge brings the worker to the issue.
    let worker = system.start(journal.handler(), WorkerConfig::default())?;

    let calling = Arc::clone(&system);
    let mut caller = async move { calling.record("1", "a").await }.boxed();
    // Asked once, and never again: it has sent its event off and waits for the answer.
    assert!(futures_util::poll!(&mut caller).is_pending());
    *hang_up.call() = Some(caller);

    until("the caller to hang up", || async { hang_up.call().is_none() }).await?;
    system.settled().await?;
    worker.stop().await?;
    assert_eq!(journal.runs(), [["a"]]);
    Ok(())
}
