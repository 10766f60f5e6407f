//! Rebuilds the analytics file from the database, page by page.
//!
//! Upstream: `Analytics::rebuild`. Downstream: the ticket tables, then the file.
//! Guarantees: the pages go into a second table, which replaces the first one in the last transaction (decision 53). What was
//! ingested meanwhile is copied then, so nothing is missing. A shutdown or a failed page ends the rebuild without changing the
//! reports.

use std::sync::{Arc, Mutex, PoisonError};

use headwater_analytics::AnalyticsError;
use headwater_issue::Store;
use serde::Serialize;
use tokio::runtime::Handle;
use tracing::{info, warn};
use utoipa::ToSchema;

use crate::analytics::{AnalyticsRequestError, RebuildBatches};
use crate::server::shutdown_signal::ShutdownSignal;
use crate::tickets::TicketExport;

/// Progress of a rebuild.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct RebuildProgress {
    /// Whether it is running.
    pub(crate) is_running: bool,
    /// Events read so far.
    pub(crate) read: u64,
    /// Events to read, at most: the ids at the start, some of which are not those of ticket events.
    pub(crate) total: u64,
    /// Rows deleted, once it is done.
    pub(crate) removed: Option<u64>,
    /// Rows stored, once it is done.
    pub(crate) stored: Option<u64>,
    /// Why it failed. A failed rebuild changes nothing.
    pub(crate) problem: Option<String>,
}

impl RebuildProgress {
    /// The progress without the reason, for callers that may not read the log.
    pub(crate) fn without_reason(self) -> Self {
        let problem = self.problem.map(|_| crate::analytics::SEE_LOG.to_owned());
        Self { problem, ..self }
    }

    pub(super) fn started() -> Self {
        Self { is_running: true, ..Self::default() }
    }
}

/// Estimates the number of events, and returns an iterator that reads them. The iterator blocks; use it on a blocking thread.
pub(super) async fn batches(
    store: Arc<dyn Store>,
    progress: Arc<Mutex<RebuildProgress>>,
    shutdown: ShutdownSignal,
) -> Result<RebuildBatches, AnalyticsError> {
    let mut export = TicketExport::new(store);
    let total = export.count().await.map_err(unreadable)?;
    note(&progress, |rebuild_progress| rebuild_progress.total = total);
    let runtime = Handle::current();
    let mut has_failed = false;
    Ok(Box::new(std::iter::from_fn(move || {
        if has_failed {
            return None;
        }
        let page = match shutdown.is_triggered() {
            true => Err(AnalyticsError::Source("the server is shutting down".to_owned())),
            false => runtime.block_on(export.next_page()).map_err(unreadable),
        };
        match page {
            Ok(events) if events.is_empty() => None,
            Ok(events) => {
                note(&progress, |rebuild_progress| rebuild_progress.read += events.len() as u64);
                Some(Ok(events))
            }
            Err(error) => {
                has_failed = true;
                Some(Err(error))
            }
        }
    })))
}

/// Records the result: rows removed and stored, or the error.
pub(super) fn finish(
    progress: &Mutex<RebuildProgress>,
    ended: Result<(u64, u64), AnalyticsRequestError>,
) {
    note(progress, |rebuild_progress| {
        rebuild_progress.is_running = false;
        match ended {
            Ok((removed, stored)) => {
                info!(removed, stored, "analytics rebuild completed");
                (rebuild_progress.removed, rebuild_progress.stored) = (Some(removed), Some(stored));
            }
            Err(problem) => {
                warn!(error = %problem, "analytics rebuild failed; the file is unchanged");
                rebuild_progress.problem = Some(problem.to_string());
            }
        }
    });
}

fn note(progress: &Mutex<RebuildProgress>, change: impl FnOnce(&mut RebuildProgress)) {
    change(&mut progress.lock().unwrap_or_else(PoisonError::into_inner));
}

fn unreadable(error: impl std::fmt::Display) -> AnalyticsError {
    AnalyticsError::Source(error.to_string())
}
