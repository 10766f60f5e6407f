//! Tests of the stores beyond the conformance suite: concurrent starts, caller's transactions, lost connections,
//! foreign locks, and administrative SQL.
#![cfg(all(feature = "sqlite", feature = "postgres"))]
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

mod admin;
mod backlog;
mod cancellation;
mod failures;
mod full_disk;
mod migrations;
mod start;
mod transactions;

use std::sync::Arc;

use anyhow::Result;
use headwater_issue::{DebounceWindow, NewEvent, Recorded, Store, StoreOptions, connect};

fn event(issue: &str, key: &str) -> NewEvent {
    NewEvent {
        integration: "main".into(),
        external_project_id: "project".into(),
        external_issue_id: issue.into(),
        source: "github".into(),
        event_type: "comment".into(),
        dedup_key: Some(key.into()),
        trace: None,
        payload: r#"{"action":"created"}"#.into(),
    }
}

async fn record(store: &dyn Store, issue: &str, key: &str) -> headwater_issue::Result<Recorded> {
    store.record(&[event(issue, key)], &DebounceWindow::default()).await.remove(0)
}

async fn open(url: &str) -> Result<Arc<dyn Store>> {
    open_with(url, &StoreOptions::default()).await
}

async fn open_with(url: &str, options: &StoreOptions) -> Result<Arc<dyn Store>> {
    let store = connect(url, options).await?;
    store.ensure_integration("main", "github").await?;
    Ok(store)
}

/// A SQLite file in its own directory.
struct File {
    _directory: tempfile::TempDir,
    url: String,
}

impl File {
    fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let url = format!("sqlite:{}", directory.path().join("issues.db").display());
        Ok(Self { _directory: directory, url })
    }
}
