//! A full disk, and a deleted or replaced database file.

use anyhow::Result;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};

use super::{File, event, open, record};

/// Signal of a write over the file size limit. Unhandled, it ends the process.
const SIGXFSZ: i32 = 25;

/// Limits the file size of this process, to simulate a full disk; `None` removes the limit.
fn limit_files(bytes: Option<u64>) -> Result<()> {
    let maximum = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: bytes.or(maximum), maximum })?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_recovers_after_a_full_disk() -> Result<()> {
    let _ignored = signal(SignalKind::from_raw(SIGXFSZ))?;
    let file = File::new()?;
    let store = open(&file.url).await?;
    record(&*store, "42", "before").await?;

    limit_files(Some(4096))?;
    // Failures of a statement and of the commit end the transaction in different ways.
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
    let report = store.check_consistency(1).await?;
    assert_eq!(report.recorded, 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_confirmed_after_the_database_file_was_deleted_or_replaced() -> Result<()> {
    let file = File::new()?;
    let path = std::path::PathBuf::from(file.url.trim_start_matches("sqlite:"));
    let moved = path.with_extension("moved");
    let store = open(&file.url).await?;
    record(&*store, "1", "before").await?;
    let mut transaction = store.begin().await?;
    transaction.record(&[event("1", "in between")], &Default::default()).await.remove(0)?;

    std::fs::rename(&path, &moved)?;
    let assert_rejected = |result: Result<(), headwater_issue::IssueError>, what: &str| {
        let error = result.expect_err(what).to_string();
        assert!(error.contains("database file") && error.contains("while it was open"), "{error}");
    };
    assert_rejected(transaction.commit().await, "the commit of a transaction");
    assert_rejected(record(&*store, "1", "deleted").await.map(drop), "a record");
    assert_rejected(store.workers().await.map(drop), "a read, which readiness asks for");
    std::fs::write(&path, b"")?;
    assert_rejected(record(&*store, "1", "replaced").await.map(drop), "a record");

    // The same file is back: no restart is needed.
    std::fs::rename(&moved, &path)?;
    record(&*store, "1", "after").await?;
    Ok(())
}
