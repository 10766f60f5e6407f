//! Health: whether the process lives, and whether it can do its work, with reasons.
//!
//! Upstream: `run` tells which parts run. Downstream: `/health/live` and `/health/ready`.
//! Promises: ready is the truth of this moment: the database and the streams are asked, each within two seconds; a part that
//! ended, or a worker whose signs of life do not arrive, is named. Reasons hold no secrets.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use headwater_issue::{Inbox, Store};
use headwater_stream::{Backend, DedupScope, StreamError};
use serde::Serialize;
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::analytics::{self, Analytics};
use crate::server::app_state::App;
use crate::server::shutdown::Stopping;

/// How long a dependency may take to answer.
const CHECK_MAX: Duration = Duration::from_secs(2);

/// Readiness is asked without a token, so the streams are written to once within this time, however often it is asked.
const PROBE_EVERY: Duration = Duration::from_secs(2);

/// How long a mark of the write probe stays if nothing removes it.
const PROBE_TTL: Duration = Duration::from_secs(5);

/// Where the write probe leaves its mark.
const PROBE_SCOPE: &str = "headwater:readiness";

/// A commit that failed this long ago, with none that succeeded since, means that the database refuses writes.
const REFUSED_WITHIN: Duration = Duration::from_secs(10);

/// What is known of the parts of this process.
#[derive(Clone, Debug)]
pub(crate) struct Health {
    worker: String,
    parts: Arc<Mutex<BTreeMap<&'static str, bool>>>,
    stopping: Stopping,
    analytics: Option<Analytics>,
    stream_writes: Arc<tokio::sync::Mutex<Option<WriteProbe>>>,
}

/// The result of the latest write to the streams.
#[derive(Clone, Debug)]
struct WriteProbe {
    at: Instant,
    problem: Option<String>,
}

/// One thing that must be so.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Check {
    name: &'static str,
    ok: bool,
    elapsed_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// All of them.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Readiness {
    /// `ready` or `not_ready`.
    status: &'static str,
    checks: Vec<Check>,
    /// Nothing depends on it, so it is told and not checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    analytics: Option<analytics::State>,
}

impl Readiness {
    /// Whether work can be done.
    pub(crate) fn is_ready(&self) -> bool {
        self.checks.iter().all(|check| check.ok)
    }

    /// Name, whether it is so, and why not.
    pub(crate) fn checks(&self) -> impl Iterator<Item = (&str, bool, &str)> {
        self.checks
            .iter()
            .map(|check| (check.name, check.ok, check.reason.as_deref().unwrap_or_default()))
    }
}

impl Health {
    /// The health of a process whose worker is called so.
    pub(crate) fn new(worker: impl Into<String>, stopping: Stopping) -> Self {
        let (parts, stream_writes) = (Arc::default(), Arc::default());
        Self { worker: worker.into(), parts, stopping, analytics: None, stream_writes }
    }

    /// Tells how analytics stands, too.
    pub(crate) fn with_analytics(self, analytics: Analytics) -> Self {
        Self { analytics: Some(analytics), ..self }
    }

    /// Notes that a part runs, or has ended.
    pub(crate) fn note(&self, part: &'static str, is_running: bool) {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).insert(part, is_running);
    }

    /// Asks everything now.
    pub(crate) async fn readiness(
        &self,
        store: &dyn Store,
        streams: &dyn Backend,
        inbox: &Inbox,
    ) -> Readiness {
        let (database, streams) =
            tokio::join!(self.check_database(store), self.check_streams(streams));
        let mut checks = Vec::from(database);
        let refused = inbox.is_refused(REFUSED_WITHIN);
        let reason = refused.then(|| "it refuses new events; the log says why".to_owned());
        checks.push(Check::new("database writes", Instant::now(), reason));
        checks.push(streams);
        let ended: Vec<_> = {
            let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
            parts.iter().filter(|(_, running)| !**running).map(|(part, _)| *part).collect()
        };
        let reason = (!ended.is_empty()).then(|| format!("not running: {}", ended.join(", ")));
        checks.push(Check::new("parts", Instant::now(), reason));
        let stopping = self.stopping.has_begun().then(|| "the process is stopping".to_owned());
        checks.push(Check::new("accepting", Instant::now(), stopping));
        let is_ready = checks.iter().all(|check| check.ok);
        // Whoever asks need not be anybody.
        let analytics = self.analytics.as_ref().map(|it| it.state().without_reason());
        Readiness { status: if is_ready { "ready" } else { "not_ready" }, checks, analytics }
    }

    /// One question tells of the database, its tables, and the worker's signs of life in it.
    async fn check_database(&self, store: &dyn Store) -> [Check; 3] {
        let started = Instant::now();
        let (database, worker) = match timeout(CHECK_MAX, store.workers()).await {
            Ok(Ok(workers)) => {
                let is_seen = workers.iter().any(|worker| worker.worker == self.worker);
                let lost = "the worker of this process has shown no sign of life of late";
                (None, (!is_seen).then(|| lost.to_owned()))
            }
            Ok(Err(error)) => {
                warn!(%error, "not ready: the database");
                (Some("it does not answer; the log says why".to_owned()), Some(unknown()))
            }
            Err(_) => (Some(format!("it did not answer within {CHECK_MAX:?}")), Some(unknown())),
        };
        // The tables were brought up to date when the database was opened; an answer means that they are there.
        let migrations = database.as_ref().map(|_| unknown());
        [
            Check::new("database", started, database),
            Check::new("migrations", started, migrations),
            Check::new("worker", started, worker),
        ]
    }

    /// Whether the streams answer, and whether they take writes: a server that is full or has lost its replicas still
    /// answers.
    async fn check_streams(&self, streams: &dyn Backend) -> Check {
        let started = Instant::now();
        let reason = match timeout(CHECK_MAX, streams.now()).await {
            Ok(Ok(_)) => self.stream_write_problem(streams).await,
            Ok(Err(error)) => {
                warn!(%error, "not ready: the streams");
                Some("they do not answer, work goes on slowly; the log says why".to_owned())
            }
            Err(_) => Some(format!("they did not answer within {CHECK_MAX:?}")),
        };
        Check::new("streams", started, reason)
    }

    /// Why the streams take no write, as seen by the latest probe; a new one is made if that one is old.
    async fn stream_write_problem(&self, streams: &dyn Backend) -> Option<String> {
        let mut latest = self.stream_writes.lock().await;
        if let Some(probe) = latest.as_ref().filter(|probe| probe.at.elapsed() < PROBE_EVERY) {
            return probe.problem.clone();
        }
        let problem = match timeout(CHECK_MAX, probe_write(streams, &self.worker)).await {
            Ok(Ok(())) => None,
            // The permissions of this user do not cover the probe; what it works with may be allowed.
            Ok(Err(error @ StreamError::Denied { .. })) => {
                debug!(%error, "whether the streams take writes is not known");
                None
            }
            Ok(Err(error)) => {
                warn!(%error, "not ready: the streams refuse writes");
                Some("they refuse writes, work goes on slowly; the log says why".to_owned())
            }
            Err(_) => Some(format!("they took no write within {CHECK_MAX:?}")),
        };
        *latest = Some(WriteProbe { at: Instant::now(), problem: problem.clone() });
        problem
    }
}

/// Writes a mark that needs memory, and removes it.
async fn probe_write(streams: &dyn Backend, worker: &str) -> Result<(), StreamError> {
    let scope = DedupScope::new(PROBE_SCOPE)?;
    streams.dedup_begin(&scope, &[worker], PROBE_TTL).await?;
    streams.dedup_abandon(&scope, &[worker]).await
}

fn unknown() -> String {
    "unknown while the database does not answer".to_owned()
}

impl Check {
    fn new(name: &'static str, started: Instant, reason: Option<String>) -> Self {
        let elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        Self { name, ok: reason.is_none(), elapsed_ms, reason }
    }
}

/// `/health/live` and `/health/ready`, for everybody.
pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(live)).routes(routes!(ready))
}

/// That the process lives.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Alive {
    /// `alive`.
    status: &'static str,
}

/// Whether the process lives.
#[utoipa::path(get, path = "/health/live", tag = "health", responses((status = 200, body = Alive)), security(()))]
async fn live() -> Json<Alive> {
    Json(Alive { status: "alive" })
}

/// Whether the process can do its work, with reasons.
#[utoipa::path(get, path = "/health/ready", tag = "health",
    responses((status = 200, body = Readiness), (status = 503, body = Readiness)), security(()))]
async fn ready(State(app): State<App>) -> Response {
    let readiness =
        app.health.readiness(app.store.as_ref(), app.streams.as_ref(), &app.inbox).await;
    let status =
        if readiness.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(readiness)).into_response()
}
