//! A rebuild: pages of the truth, one after the other, until there are no more.
//!
//! Upstream: `Analytics::rebuild`. Downstream: the tables of tickets, then the file.
//! Promises: pages are read when the file asks for them, which is after it has let go of the old rows; so whatever went into
//! the file from the stream before is in the pages, too, because SQL had it first. A stop, or a page that cannot be read, ends
//! the rebuild, and the file stays as it was.

use std::sync::{Arc, Mutex, PoisonError};

use headwater_analytics::AnalyticsError;
use headwater_issue::Store;
use serde::Serialize;
use tokio::runtime::Handle;
use tracing::{info, warn};
use utoipa::ToSchema;

use crate::analytics::{Batches, Problem};
use crate::server::shutdown::ShutdownSignal;
use crate::tickets::History;

/// How a rebuild stands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct Rebuilding {
    /// Whether it is under way.
    pub(crate) is_running: bool,
    /// Events read so far.
    pub(crate) read: u64,
    /// Events there are, as counted at the beginning.
    pub(crate) total: u64,
    /// Rows that were there before, once it is done.
    pub(crate) removed: Option<u64>,
    /// Rows that are there now, once it is done.
    pub(crate) stored: Option<u64>,
    /// Why it ended without effect.
    pub(crate) problem: Option<String>,
}

impl Rebuilding {
    /// The same for those who may not read the log.
    pub(crate) fn without_reason(self) -> Self {
        let problem = self.problem.map(|_| crate::analytics::IN_THE_LOG.to_owned());
        Self { problem, ..self }
    }

    pub(super) fn begun() -> Self {
        Self { is_running: true, ..Self::default() }
    }
}

/// Counts, and then reads as it is asked to. The iterator blocks; it is for a thread that may.
pub(super) async fn batches(
    store: Arc<dyn Store>,
    progress: Arc<Mutex<Rebuilding>>,
    shutdown: ShutdownSignal,
) -> Result<Batches, AnalyticsError> {
    let mut history = History::new(store);
    let total = history.count().await.map_err(unreadable)?;
    note(&progress, |rebuilding| rebuilding.total = total);
    let runtime = Handle::current();
    let mut has_failed = false;
    Ok(Box::new(std::iter::from_fn(move || {
        if has_failed {
            return None;
        }
        let page = match shutdown.is_triggered() {
            true => Err(AnalyticsError::Source("the server is stopping".to_owned())),
            false => runtime.block_on(history.next()).map_err(unreadable),
        };
        match page {
            Ok(events) if events.is_empty() => None,
            Ok(events) => {
                note(&progress, |rebuilding| rebuilding.read += events.len() as u64);
                Some(Ok(events))
            }
            Err(error) => {
                has_failed = true;
                Some(Err(error))
            }
        }
    })))
}

/// Writes down how it ended: rows removed and stored, or why nothing has changed.
pub(super) fn end(progress: &Mutex<Rebuilding>, ended: Result<(u64, u64), Problem>) {
    note(progress, |rebuilding| {
        rebuilding.is_running = false;
        match ended {
            Ok((removed, stored)) => {
                info!(removed, stored, "analytics was rebuilt");
                (rebuilding.removed, rebuilding.stored) = (Some(removed), Some(stored));
            }
            Err(problem) => {
                warn!(error = %problem, "analytics was not rebuilt, everything is as before");
                rebuilding.problem = Some(problem.to_string());
            }
        }
    });
}

fn note(progress: &Mutex<Rebuilding>, change: impl FnOnce(&mut Rebuilding)) {
    change(&mut progress.lock().unwrap_or_else(PoisonError::into_inner));
}

fn unreadable(error: impl std::fmt::Display) -> AnalyticsError {
    AnalyticsError::Source(error.to_string())
}
