//! Analytics of all ticket events in a DuckDB file: ingestion, reports, SQL queries, and rebuilds from the database.
//!
//! Upstream: `server::run` starts it beside the desk; routes and CLI verbs query it. Downstream:
//! `headwater-analytics`, if the feature `analytics` links DuckDB; otherwise every call fails with instructions.
//! Guarantees: no other service waits for analytics. If the file cannot be opened, that is logged and retried, and the
//! server is ready nevertheless. One process at a time has the file open; a second one waits. One rebuild at a time; a
//! shutdown cancels it without effect.

#[cfg(not(feature = "analytics"))]
mod disabled;
#[cfg(feature = "analytics")]
mod duckdb;
mod error;
mod rebuild;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use headwater_analytics::{AnalyticsError, Report, Table, TicketEventRow};
use headwater_issue::Store;
use headwater_queue::Queue;
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tracing::{info, warn};
use utoipa::ToSchema;

use crate::config::AnalyticsSettings;
use crate::server::shutdown_signal::ShutdownSignal;
use crate::server::startup;
use crate::tickets;

#[cfg(not(feature = "analytics"))]
use crate::analytics::disabled::DisabledFile as AnalyticsFile;
#[cfg(feature = "analytics")]
use crate::analytics::duckdb::DuckDbFile as AnalyticsFile;
pub(crate) use crate::analytics::error::AnalyticsRequestError;
pub(crate) use crate::analytics::rebuild::RebuildProgress;

/// Replaces the reason for callers that may not read the log.
const SEE_LOG: &str = "see the server log";

/// Concurrent queries. Each may use all processors.
const QUERIES_MAX: usize = 4;

/// Pause before a failed open or subscription is retried.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Batches of a rebuild, read from SQL one at a time.
type RebuildBatches = Box<dyn Iterator<Item = Result<Vec<TicketEventRow>, AnalyticsError>> + Send>;

/// State of analytics.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(tag = "state", content = "reason", rename_all = "snake_case")]
pub(crate) enum AnalyticsState {
    /// Built without analytics.
    NotBuiltIn,
    /// Disabled by the settings.
    Off,
    /// The ingestion has not started yet.
    Starting,
    /// The ingestion is running.
    Ingesting,
    /// The ingestion cannot start, for this reason; events wait in their stream.
    Waiting(String),
}

impl AnalyticsState {
    /// The state without the reason, which contains paths and DuckDB messages, for callers that may not read the log.
    pub(crate) fn without_reason(self) -> Self {
        match self {
            Self::Waiting(_) => Self::Waiting(SEE_LOG.to_owned()),
            other => other,
        }
    }
}

/// The analytics service. Clones share state.
#[derive(Clone, Debug)]
pub(crate) struct Analytics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: AnalyticsFile,
    settings: AnalyticsSettings,
    store: Option<Arc<dyn Store>>,
    shutdown: ShutdownSignal,
    state: Mutex<AnalyticsState>,
    queries: Arc<Semaphore>,
    rebuild_progress: Arc<Mutex<RebuildProgress>>,
    job: Mutex<Option<JoinHandle<()>>>,
}

impl Analytics {
    /// Analytics of a server; without a path it is disabled.
    pub(crate) fn for_server(
        settings: &AnalyticsSettings,
        store: Arc<dyn Store>,
        shutdown: ShutdownSignal,
    ) -> Self {
        let state = match (AnalyticsFile::IS_BUILT_IN, &settings.path) {
            (false, _) => AnalyticsState::NotBuiltIn,
            (true, None) => AnalyticsState::Off,
            (true, Some(_)) => AnalyticsState::Starting,
        };
        Self::new(AnalyticsFile::default(), settings, Some(store), state, shutdown)
    }

    /// Checks that analytics is built in and enabled.
    pub(crate) fn check(settings: &AnalyticsSettings) -> Result<(), AnalyticsRequestError> {
        enabled_path(settings).map(drop)
    }

    /// Opens a file read-only, for queries. No process may be writing it.
    pub(crate) async fn open_for_queries(
        settings: &AnalyticsSettings,
    ) -> Result<Self, AnalyticsRequestError> {
        let file = AnalyticsFile::open_read_only(enabled_path(settings)?).await?;
        Ok(Self::new(file, settings, None, AnalyticsState::Off, ShutdownSignal::default()))
    }

    /// Opens a file for a rebuild. No other process may have it open.
    pub(crate) async fn open_for_rebuild(
        settings: &AnalyticsSettings,
        store: Arc<dyn Store>,
    ) -> Result<Self, AnalyticsRequestError> {
        let path = enabled_path(settings)?;
        create_parent(path)?;
        let file = AnalyticsFile::open_read_write(path).await?;
        Ok(Self::new(file, settings, Some(store), AnalyticsState::Off, ShutdownSignal::default()))
    }

    fn new(
        file: AnalyticsFile,
        settings: &AnalyticsSettings,
        store: Option<Arc<dyn Store>>,
        state: AnalyticsState,
        shutdown: ShutdownSignal,
    ) -> Self {
        Self(Arc::new(Inner {
            file,
            settings: settings.clone(),
            store,
            shutdown,
            state: Mutex::new(state),
            queries: Arc::new(Semaphore::new(QUERIES_MAX)),
            rebuild_progress: Arc::default(),
            job: Mutex::default(),
        }))
    }

    /// The current state.
    pub(crate) fn state(&self) -> AnalyticsState {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether [`run`](Self::run) has anything to do.
    pub(crate) fn is_enabled(&self) -> bool {
        !matches!(self.state(), AnalyticsState::NotBuiltIn | AnalyticsState::Off)
    }

    /// Opens the file and ingests events until shutdown. Retries failures.
    pub(crate) async fn run(&self, queue: Queue) {
        let (inner, shutdown) = (&self.0, &self.0.shutdown);
        let Some(path) = &inner.settings.path else { return shutdown.wait().await };
        let ingesting = loop {
            let starting = async {
                create_parent(path)?;
                inner.file.start_ingest(path, &queue).await
            };
            tokio::select! {
                () = shutdown.wait() => return,
                started = starting => match started {
                    Ok(ingesting) => break ingesting,
                    Err(problem) => self.set_waiting(problem.to_string()),
                },
            }
            tokio::select! {
                () = shutdown.wait() => return,
                () = tokio::time::sleep(RETRY_INTERVAL) => {}
            }
        };
        info!(path = %path.display(), "analytics ingestion started");
        self.set_state(AnalyticsState::Ingesting);
        ingesting.run(shutdown.wait()).await;
        self.set_state(AnalyticsState::Starting);
    }

    /// Logs a problem once, not for every retry.
    fn set_waiting(&self, problem: String) {
        let state = AnalyticsState::Waiting(problem.clone());
        if self.state() != state {
            warn!(
                error = problem,
                "analytics ingestion cannot start; events wait in their stream; retrying"
            );
            self.set_state(state);
        }
    }

    fn set_state(&self, state: AnalyticsState) {
        *self.0.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// Runs one `SELECT`.
    pub(crate) async fn query(&self, sql: &str) -> Result<Table, AnalyticsRequestError> {
        // Released when the query thread has ended, which may be after the caller was cancelled.
        let permit = Arc::clone(&self.0.queries).try_acquire_owned();
        let permit = permit.map_err(|_| AnalyticsRequestError::Busy(QUERIES_MAX))?;
        match self.0.file.query(sql, self.0.settings.query_timeout, permit).await {
            Err(AnalyticsRequestError::NotOpen(_)) => Err(self.not_open()),
            Err(AnalyticsRequestError::Analytics(AnalyticsError::TooSlow { limit })) => {
                Err(AnalyticsRequestError::TooSlow(limit))
            }
            result => result,
        }
    }

    /// Runs a built-in report.
    pub(crate) async fn report(&self, report: &Report) -> Result<Table, AnalyticsRequestError> {
        if !report.is_from_database() {
            return self.query(report.sql).await;
        }
        let store = self.0.store.as_ref().ok_or_else(|| self.not_open())?;
        let read = tickets::tokens_and_cost(store.as_ref()).await;
        read.map_err(|error| AnalyticsError::Source(error.to_string()).into())
    }

    /// Starts to replace all events in the file by those of the database. [`rebuild_progress`](Self::rebuild_progress)
    /// reports the result.
    pub(crate) fn rebuild(&self) -> Result<RebuildProgress, AnalyticsRequestError> {
        let inner = &self.0;
        let store = inner.store.clone().ok_or_else(|| self.not_open())?;
        if !inner.file.can_write() {
            return Err(self.not_open());
        }
        let mut job = inner.job.lock().unwrap_or_else(PoisonError::into_inner);
        if job.as_ref().is_some_and(|job| !job.is_finished()) {
            return Err(AnalyticsRequestError::RebuildRunning);
        }
        let progress = Arc::clone(&inner.rebuild_progress);
        *progress.lock().unwrap_or_else(PoisonError::into_inner) = RebuildProgress::started();
        let analytics = self.clone();
        *job = Some(tokio::spawn(async move {
            let batches =
                rebuild::batches(store, Arc::clone(&progress), analytics.0.shutdown.clone());
            let ended = match batches.await {
                Ok(batches) => analytics.0.file.rebuild(batches).await,
                Err(error) => Err(error.into()),
            };
            rebuild::finish(&progress, ended);
        }));
        drop(job);
        Ok(self.rebuild_progress())
    }

    /// Progress of the last rebuild.
    pub(crate) fn rebuild_progress(&self) -> RebuildProgress {
        self.0.rebuild_progress.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for a running rebuild, which the shutdown cancels.
    pub(crate) async fn close(self) {
        let job = self.0.job.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(job) = job {
            // It stops between two batches and is rolled back.
            let _ = job.await;
        }
    }

    fn not_open(&self) -> AnalyticsRequestError {
        match self.state() {
            AnalyticsState::NotBuiltIn => AnalyticsRequestError::NotBuiltIn,
            AnalyticsState::Off => AnalyticsRequestError::Off,
            AnalyticsState::Waiting(reason) => AnalyticsRequestError::NotOpen(reason),
            AnalyticsState::Starting | AnalyticsState::Ingesting => {
                AnalyticsRequestError::NotOpen("the ingestion is starting".into())
            }
        }
    }
}

/// The path, if analytics is built in and enabled.
fn enabled_path(settings: &AnalyticsSettings) -> Result<&Path, AnalyticsRequestError> {
    if !AnalyticsFile::IS_BUILT_IN {
        return Err(AnalyticsRequestError::NotBuiltIn);
    }
    settings.path.as_deref().ok_or(AnalyticsRequestError::Off)
}

fn create_parent(path: &Path) -> Result<(), AnalyticsRequestError> {
    startup::create_parent("analytics.path", &path.display().to_string())
        .map_err(|failure| AnalyticsRequestError::NotOpen(failure.to_string()))
}
