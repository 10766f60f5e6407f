//! Analytics in the binary: what happened in all tickets, in a DuckDB file; reports, SQL, and rebuilding it from the truth.
//!
//! Upstream: `run` starts it beside the desk; routes and verbs ask it. Downstream: `headwater-analytics`, where DuckDB is
//! linked (the feature `analytics`); without it everything here answers that it is not there, and how to have it.
//! Promises: nothing else waits for it: a file that cannot be opened is told and tried again, and the server is ready all the
//! same. One process at a time has the file; a second one waits for its turn. One rebuild at a time; a stop ends it without
//! effect.

#[cfg(not(feature = "analytics"))]
mod disabled;
#[cfg(feature = "analytics")]
mod duckdb;
mod error;
mod rebuild;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use headwater_analytics::{AnalyticsError, Table, TicketEvent};
use headwater_issue::Store;
use headwater_queue::Queue;
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tracing::{info, warn};
use utoipa::ToSchema;

use crate::server::shutdown::ShutdownSignal;
use crate::server::startup;

#[cfg(not(feature = "analytics"))]
use crate::analytics::disabled::Sink;
#[cfg(feature = "analytics")]
use crate::analytics::duckdb::Sink;
pub(crate) use crate::analytics::error::Problem;
pub(crate) use crate::analytics::rebuild::Rebuilding;

/// What is said instead of a reason to those who may not read the log.
const IN_THE_LOG: &str = "the log says why";

/// Questions that are answered at once; each may take all processors.
const QUESTIONS_MAX: usize = 4;

/// How soon a file that could not be opened, or streams that could not be read, are tried again.
const TRY_EVERY: Duration = Duration::from_secs(5);

/// Batches of a rebuild, each in one step: read from SQL, stored in the file.
type Batches = Box<dyn Iterator<Item = Result<Vec<TicketEvent>, AnalyticsError>> + Send>;

/// How analytics stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(tag = "state", content = "reason", rename_all = "snake_case")]
pub(crate) enum State {
    /// This program has none.
    NotBuiltIn,
    /// The settings want none.
    Off,
    /// It is about to begin.
    Starting,
    /// Events go in.
    Ingesting,
    /// Events wait in their stream, for this reason.
    Waiting(String),
}

impl State {
    /// The same for those who may not read the log: a reason names files and what DuckDB says of them.
    pub(crate) fn without_reason(self) -> Self {
        match self {
            Self::Waiting(_) => Self::Waiting(IN_THE_LOG.to_owned()),
            other => other,
        }
    }
}

/// Analytics. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Analytics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    sink: Sink,
    path: Option<PathBuf>,
    store: Option<Arc<dyn Store>>,
    shutdown: ShutdownSignal,
    state: Mutex<State>,
    questions: Arc<Semaphore>,
    rebuilding: Arc<Mutex<Rebuilding>>,
    job: Mutex<Option<JoinHandle<()>>>,
}

impl Analytics {
    /// Of a server that keeps its file at `path`; `None`: it has none.
    pub(crate) fn of_server(
        path: Option<&Path>,
        store: Arc<dyn Store>,
        shutdown: ShutdownSignal,
    ) -> Self {
        let state = match (Sink::IS_BUILT_IN, path) {
            (false, _) => State::NotBuiltIn,
            (true, None) => State::Off,
            (true, Some(_)) => State::Starting,
        };
        Self::new(Sink::default(), path, Some(store), state, shutdown)
    }

    /// Whether there is a file that could be asked.
    pub(crate) fn check(path: Option<&Path>) -> Result<(), Problem> {
        checked(path).map(drop)
    }

    /// For questions, on a file that no process writes.
    pub(crate) async fn to_ask(path: Option<&Path>) -> Result<Self, Problem> {
        let sink = Sink::to_read(checked(path)?).await?;
        Ok(Self::new(sink, path, None, State::Off, ShutdownSignal::default()))
    }

    /// For a rebuild, on a file that no other process has.
    pub(crate) async fn to_rebuild(
        path: Option<&Path>,
        store: Arc<dyn Store>,
    ) -> Result<Self, Problem> {
        let path = checked(path)?;
        create_parent(path)?;
        let sink = Sink::to_write(path).await?;
        Ok(Self::new(sink, Some(path), Some(store), State::Off, ShutdownSignal::default()))
    }

    fn new(
        sink: Sink,
        path: Option<&Path>,
        store: Option<Arc<dyn Store>>,
        state: State,
        shutdown: ShutdownSignal,
    ) -> Self {
        Self(Arc::new(Inner {
            sink,
            path: path.map(Path::to_owned),
            store,
            shutdown,
            state: Mutex::new(state),
            questions: Arc::new(Semaphore::new(QUESTIONS_MAX)),
            rebuilding: Arc::default(),
            job: Mutex::default(),
        }))
    }

    /// How it stands.
    pub(crate) fn state(&self) -> State {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether there is anything to run.
    pub(crate) fn is_on(&self) -> bool {
        !matches!(self.state(), State::NotBuiltIn | State::Off)
    }

    /// Opens the file and takes events in until the stop. What does not work is tried again.
    pub(crate) async fn run(&self, queue: Queue) {
        let (inner, shutdown) = (&self.0, &self.0.shutdown);
        let Some(path) = &inner.path else { return shutdown.wait().await };
        let ingesting = loop {
            let beginning = async {
                create_parent(path)?;
                inner.sink.begin(path, &queue).await
            };
            tokio::select! {
                () = shutdown.wait() => return,
                begun = beginning => match begun {
                    Ok(ingesting) => break ingesting,
                    Err(problem) => self.waits(problem.to_string()),
                },
            }
            tokio::select! {
                () = shutdown.wait() => return,
                () = tokio::time::sleep(TRY_EVERY) => {}
            }
        };
        info!(path = %path.display(), "analytics takes events in");
        self.becomes(State::Ingesting);
        ingesting.run(shutdown.wait()).await;
        self.becomes(State::Starting);
    }

    /// Told once, however often it is tried.
    fn waits(&self, problem: String) {
        let state = State::Waiting(problem.clone());
        if self.state() != state {
            warn!(
                error = problem,
                "analytics cannot take events in, they wait in their stream; will try again"
            );
            self.becomes(state);
        }
    }

    fn becomes(&self, state: State) {
        *self.0.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// Answers one `SELECT`.
    pub(crate) async fn query(&self, sql: &str) -> Result<Table, Problem> {
        // It is free again when the thread that answers has ended, which may be after the caller went away.
        let place = Arc::clone(&self.0.questions).try_acquire_owned();
        let place = place.map_err(|_| Problem::Busy(QUESTIONS_MAX))?;
        match self.0.sink.query(sql, place).await {
            Err(Problem::NotOpen(_)) => Err(self.not_open()),
            answer => answer,
        }
    }

    /// Begins to replace all events in the file by those of the database. [`rebuilding`](Self::rebuilding) tells the rest.
    pub(crate) fn rebuild(&self) -> Result<Rebuilding, Problem> {
        let inner = &self.0;
        let store = inner.store.clone().ok_or_else(|| self.not_open())?;
        if !inner.sink.can_write() {
            return Err(self.not_open());
        }
        let mut job = inner.job.lock().unwrap_or_else(PoisonError::into_inner);
        if job.as_ref().is_some_and(|job| !job.is_finished()) {
            return Err(Problem::Rebuilding);
        }
        let progress = Arc::clone(&inner.rebuilding);
        *progress.lock().unwrap_or_else(PoisonError::into_inner) = Rebuilding::begun();
        let whole = self.clone();
        *job = Some(tokio::spawn(async move {
            let batches = rebuild::batches(store, Arc::clone(&progress), whole.0.shutdown.clone());
            let ended = match batches.await {
                Ok(batches) => whole.0.sink.rebuild(batches).await,
                Err(error) => Err(error.into()),
            };
            rebuild::end(&progress, ended);
        }));
        drop(job);
        Ok(self.rebuilding())
    }

    /// How the last rebuild stands.
    pub(crate) fn rebuilding(&self) -> Rebuilding {
        self.0.rebuilding.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for a rebuild that the stop has told to end.
    pub(crate) async fn close(self) {
        let job = self.0.job.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(job) = job {
            // It ends between two batches, and what it did is undone.
            let _ = job.await;
        }
    }

    fn not_open(&self) -> Problem {
        match self.state() {
            State::NotBuiltIn => Problem::NotBuiltIn,
            State::Off => Problem::Off,
            State::Waiting(reason) => Problem::NotOpen(reason),
            State::Starting | State::Ingesting => Problem::NotOpen("it is about to begin".into()),
        }
    }
}

/// The path, where analytics is there and wanted.
fn checked(path: Option<&Path>) -> Result<&Path, Problem> {
    if !Sink::IS_BUILT_IN {
        return Err(Problem::NotBuiltIn);
    }
    path.ok_or(Problem::Off)
}

fn create_parent(path: &Path) -> Result<(), Problem> {
    startup::create_parent("analytics.path", &path.display().to_string())
        .map_err(|failure| Problem::NotOpen(failure.to_string()))
}
