//! Liveness and readiness of the process.
//!
//! Upstream: `run.rs` reports which services run. Downstream: `/health/live` and `/health/ready`. Guarantees: readiness
//! reflects the current state: the database is queried with a timeout of two seconds, the stream backend with one of half
//! a second; a service that ended or a worker whose heartbeat is missing is named. Without the stream backend the process
//! is degraded but ready, because SQL takes and delivers every event. Reasons contain no secrets.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use headwater_issue::Store;
use headwater_stream::{Backend, DedupScope, StreamError};
use serde::Serialize;
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::analytics::{self, Analytics};
use crate::desk::Desk;
use crate::server::app_state::{HttpServer, ServerState};
use crate::server::shutdown_signal::ShutdownSignal;
use crate::server::stream_monitor::{self, StreamMonitor};

/// Timeout of the database check.
const CHECK_MAX: Duration = Duration::from_secs(2);

/// Timeout of the stream check. Short, because its failure does not make the process unready, but a slow answer could.
const STREAMS_MAX: Duration = Duration::from_millis(500);

/// Readiness is unauthenticated, so the stream write probe runs at most once per interval.
const PROBE_EVERY: Duration = Duration::from_secs(2);

/// Lifetime of the probe's dedup entry if it is not removed.
const PROBE_TTL: Duration = Duration::from_secs(5);

/// Name of the check whose failure alone does not make the process unready.
const STREAMS: &str = "streams";

/// Status of a process that cannot do its work.
const NOT_READY: &str = "not_ready";

/// Dedup scope of the write probe.
const PROBE_SCOPE: &str = "headwater:readiness";

/// If the last commit within this time failed, the database counts as refusing writes.
const WRITE_FAILURE_WINDOW: Duration = Duration::from_secs(10);

/// Health of this process.
#[derive(Clone, Debug)]
pub(crate) struct ProcessHealth {
    worker: String,
    parts: Arc<Mutex<BTreeMap<&'static str, bool>>>,
    shutdown: ShutdownSignal,
    analytics: Option<Analytics>,
    stream_monitor: Option<StreamMonitor>,
    stream_writes: Arc<tokio::sync::Mutex<Option<WriteProbe>>>,
    desk: Option<Arc<Desk>>,
}

/// Result of the latest write probe.
#[derive(Clone, Debug)]
struct WriteProbe {
    at: Instant,
    problem: Option<String>,
}

/// One readiness check.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ReadinessCheck {
    name: &'static str,
    ok: bool,
    elapsed_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// Readiness of the process.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ReadinessResponse {
    /// `ready`, `degraded` (only the check `streams` fails: events are taken, and processed from SQL) or `not_ready`.
    status: &'static str,
    checks: Vec<ReadinessCheck>,
    /// Informational: readiness does not depend on analytics.
    #[serde(skip_serializing_if = "Option::is_none")]
    analytics: Option<analytics::AnalyticsState>,
    /// Informational: readiness does not depend on the models, whose outage defers runs. Empty without the desk.
    models: Vec<ModelReadiness>,
}

/// A model endpoint, as the calls of this process found it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelReadiness {
    id: String,
    /// False while its calls fail: then single calls test it, and the next endpoint answers.
    ok: bool,
}

impl ReadinessResponse {
    /// Whether events are taken and processed.
    pub(crate) fn is_ready(&self) -> bool {
        self.status != NOT_READY
    }
}

impl ProcessHealth {
    /// Health of a process with the given worker name.
    pub(crate) fn new(worker: impl Into<String>, shutdown: ShutdownSignal) -> Self {
        let (parts, stream_writes) = (Arc::default(), Arc::default());
        let (analytics, stream_monitor, desk) = (None, None, None);
        let worker = worker.into();
        Self { worker, parts, shutdown, analytics, stream_monitor, stream_writes, desk }
    }

    /// Includes whether the stream backend was reached since the start.
    pub(crate) fn with_streams(self, stream_monitor: StreamMonitor) -> Self {
        Self { stream_monitor: Some(stream_monitor), ..self }
    }

    /// Includes the state of analytics.
    pub(crate) fn with_analytics(self, analytics: Analytics) -> Self {
        Self { analytics: Some(analytics), ..self }
    }

    /// Includes the state of the models of the desk.
    pub(crate) fn with_desk(self, desk: Option<Arc<Desk>>) -> Self {
        Self { desk, ..self }
    }

    /// Records that a service started or ended.
    pub(crate) fn set_running(&self, part: &'static str, is_running: bool) {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).insert(part, is_running);
    }

    /// Runs all checks now.
    pub(crate) async fn readiness(&self, server: &ServerState) -> ReadinessResponse {
        let (store, streams) = (server.work_store.as_ref(), server.app.streams.as_ref());
        let (database, streams) =
            tokio::join!(self.check_database(store), self.check_streams(streams));
        let mut checks = Vec::from(database);
        let refused = server.inbox.has_failed_within(WRITE_FAILURE_WINDOW);
        let reason = refused.then(|| "rejecting new events; see the log".to_owned());
        checks.push(ReadinessCheck::new("database writes", Instant::now(), reason));
        checks.push(streams);
        let ended: Vec<_> = {
            let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
            parts.iter().filter(|(_, running)| !**running).map(|(part, _)| *part).collect()
        };
        let reason = (!ended.is_empty()).then(|| format!("not running: {}", ended.join(", ")));
        checks.push(ReadinessCheck::new("parts", Instant::now(), reason));
        let shutdown = self.shutdown.is_triggered().then(|| "shutting down".to_owned());
        checks.push(ReadinessCheck::new("accepting", Instant::now(), shutdown));
        let mut failed = checks.iter().filter(|check| !check.ok).map(|check| check.name);
        let status = match (failed.next(), failed.next()) {
            (None, _) => "ready",
            (Some(STREAMS), None) => "degraded",
            _ => NOT_READY,
        };
        // This endpoint is unauthenticated, so no reason is shown.
        let analytics = self.analytics.as_ref().map(|it| it.state().without_reason());
        let models = self.desk.as_ref().map(|desk| desk.model_states()).unwrap_or_default();
        let models =
            models.into_iter().map(|state| ModelReadiness { id: state.id, ok: state.is_available });
        ReadinessResponse { status, checks, analytics, models: models.collect() }
    }

    /// One query checks the connection, the tables and the worker's heartbeat.
    async fn check_database(&self, store: &dyn Store) -> [ReadinessCheck; 3] {
        let started = Instant::now();
        let (database, worker) = match timeout(CHECK_MAX, store.workers()).await {
            Ok(Ok(workers)) => {
                let is_seen = workers.iter().any(|worker| worker.worker == self.worker);
                let lost = "heartbeat of this process's worker is missing";
                (None, (!is_seen).then(|| lost.to_owned()))
            }
            Ok(Err(error)) => {
                warn!(%error, "not ready: database query failed");
                (Some("query failed; see the log".to_owned()), Some(unknown()))
            }
            Err(_) => (Some(format!("no answer within {CHECK_MAX:?}")), Some(unknown())),
        };
        // Migrations ran when the database was opened; a successful query shows that the tables exist.
        let migrations = database.as_ref().map(|_| unknown());
        [
            ReadinessCheck::new("database", started, database),
            ReadinessCheck::new("migrations", started, migrations),
            ReadinessCheck::new("worker", started, worker),
        ]
    }

    /// Checks that the stream backend answers and accepts writes. A server that is full or has lost its replicas
    /// still answers.
    async fn check_streams(&self, streams: &dyn Backend) -> ReadinessCheck {
        let started = Instant::now();
        let checking = async {
            if let Some(problem) = self.stream_monitor.as_ref().and_then(StreamMonitor::problem) {
                return Some(problem.to_owned());
            }
            match streams.now().await {
                Ok(_) => self.stream_write_problem(streams).await,
                Err(error) => {
                    warn!(%error, "degraded: stream backend does not answer");
                    Some(stream_monitor::reason(&error).to_owned())
                }
            }
        };
        let reason = timeout(STREAMS_MAX, checking).await.unwrap_or_else(|_| {
            Some(format!("no answer within {STREAMS_MAX:?}, processing continues from SQL"))
        });
        ReadinessCheck::new(STREAMS, started, reason)
    }

    /// Why the stream backend rejects writes, from the latest probe; probes again if that one is outdated.
    async fn stream_write_problem(&self, streams: &dyn Backend) -> Option<String> {
        let mut latest = self.stream_writes.lock().await;
        if let Some(probe) = latest.as_ref().filter(|probe| probe.at.elapsed() < PROBE_EVERY) {
            return probe.problem.clone();
        }
        let problem = match probe_write(streams, &self.worker).await {
            Ok(()) => None,
            // Redis ACLs may deny the probe's commands but allow the ones in use.
            Err(error @ StreamError::Denied { .. }) => {
                debug!(%error, "stream write probe not permitted, write status unknown");
                None
            }
            Err(error) => {
                warn!(%error, "degraded: stream backend rejects writes");
                Some("rejecting writes, processing continues from SQL; see the log".to_owned())
            }
        };
        *latest = Some(WriteProbe { at: Instant::now(), problem: problem.clone() });
        problem
    }
}

/// Writes an entry that needs memory, and removes it.
async fn probe_write(streams: &dyn Backend, worker: &str) -> Result<(), StreamError> {
    let scope = DedupScope::new(PROBE_SCOPE)?;
    streams.dedup_begin(&scope, &[worker], PROBE_TTL).await?;
    streams.dedup_abandon(&scope, &[worker]).await
}

fn unknown() -> String {
    "unknown: the database does not answer".to_owned()
}

impl ReadinessCheck {
    fn new(name: &'static str, started: Instant, reason: Option<String>) -> Self {
        let elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        Self { name, ok: reason.is_none(), elapsed_ms, reason }
    }
}

/// `/health` and its pages, unauthenticated.
pub(crate) fn routes() -> OpenApiRouter<HttpServer> {
    OpenApiRouter::new().routes(routes!(pages)).routes(routes!(live)).routes(routes!(ready))
}

/// The pages below `/health`, and related ones.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct HealthPagesResponse {
    pages: Vec<HealthPage>,
}

/// A page about the health of the process.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct HealthPage {
    path: &'static str,
    /// What it shows.
    shows: &'static str,
}

/// List the pages about the health of the process.
#[utoipa::path(get, path = "/health", tag = "health", responses((status = 200, body = HealthPagesResponse)), security(()))]
async fn pages() -> Json<HealthPagesResponse> {
    let page = |(path, shows)| HealthPage { path, shows };
    let pages = [
        ("/health/live", "whether the process runs"),
        (
            "/health/ready",
            "whether it can do its work, with a reason for each failed check; 503 if not",
        ),
        ("/metrics", "Prometheus metrics; requires a token if one is configured"),
        ("/api/v1/doctor", "checks of the servers with advice; requires the role `admin`"),
    ];
    Json(HealthPagesResponse { pages: pages.map(page).into() })
}

/// Liveness of the process.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LivenessResponse {
    /// Always `alive`.
    status: &'static str,
}

/// Report that the process is alive.
#[utoipa::path(get, path = "/health/live", tag = "health", responses((status = 200, body = LivenessResponse)), security(()))]
async fn live() -> Json<LivenessResponse> {
    Json(LivenessResponse { status: "alive" })
}

/// Report whether the process can do its work, with reasons.
#[utoipa::path(get, path = "/health/ready", tag = "health",
    responses((status = 200, body = ReadinessResponse), (status = 503, body = ReadinessResponse)), security(()))]
async fn ready(State(server): State<HttpServer>) -> Response {
    let readiness = server.health.readiness(&server).await;
    let status =
        if readiness.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(readiness)).into_response()
}
