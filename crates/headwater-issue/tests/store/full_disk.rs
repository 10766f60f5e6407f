//! A disk that is full for a while.

use anyhow::Result;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};

use super::{File, open, record};

/// What the system sends to a process that writes beyond its limit. Unheard, it would end the process.
const SIGXFSZ: i32 = 25;

/// Lets no file of this process grow beyond `bytes`, as a full disk would; `None` ends that.
fn limit_files(bytes: Option<u64>) -> Result<()> {
    let maximum = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: bytes.or(maximum), maximum })?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_full_disk_the_same_store_goes_on() -> Result<()> {
    let _ignored = signal(SignalKind::from_raw(SIGXFSZ))?;
    let file = File::new()?;
    let store = open(&file.url).await?;
    record(&*store, "42", "before").await?;

    limit_files(Some(4096))?;
    // In single statements and at their commit: both end a transaction in a way of their own.
    for round in 0..5 {
        let full = record(&*store, "42", &format!("full {round}")).await;
        assert!(full.as_ref().is_err_and(|error| error.is_transient()), "{full:?}");
        let long = "x".repeat(900_000);
        let mut event = super::event("42", &format!("long {round}"));
        event.payload = format!(r#"{{"text":"{long}"}}"#);
        let full = store.record(&[event], &Default::default()).await.remove(0);
        assert!(full.as_ref().is_err_and(|error| error.is_transient()), "{full:?}");
    }
    limit_files(None)?;

    record(&*store, "42", "after").await?;
    let audit = store.audit(1).await?;
    assert_eq!(audit.recorded, 2);
    Ok(())
}
