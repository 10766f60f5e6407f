//! The composition root: builds and starts everything, in the order in which an event flows through it.
//!
//! ```text
//! webhooks, tickets, stream entries -> inbox -> nudge -> worker -> outbox -> replies, analytics
//!                                        \________ sweeper ________/
//! ```
//!
//! Upstream: `entry.rs`. Promises: every task started here is joined here. A service that ends by itself stops the
//! process with exit code 1, so that a process supervisor restarts it. Shutdown takes at most `worker.drain` plus ten
//! seconds. Shutdown order: stop accepting requests and claims, drain deliveries, close connections. Tasks that miss
//! their deadline are aborted, so none of them uses the database after it is closed.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use async_trait::async_trait;
use futures_util::FutureExt;
use headwater_issue::{
    CommitVerifier, DebounceWindow, HandlerError, Inbox, InboxConfig, IssueHandler,
    IssueRetryPolicy, Outbox, OutboxConfig, Resolution, Run, STREAM, Store, SweepOptions, Sweeper,
    SweeperConfig, Worker, WorkerConfig,
};
use headwater_queue::Queue;
use headwater_stream::Backend;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout, timeout_at};
use tracing::{Instrument, debug, error, info, info_span, warn};

use crate::analytics::Analytics;
use crate::api::Operations;
use crate::api::tickets_sse::SseListeners;
use crate::config::{Settings, WorkSettings};
use crate::desk::build;
use crate::desk::build::DeskServices;
use crate::exit::CliError;
use crate::http::audit::AuditLog;
use crate::http::router;
use crate::http::{Authenticator, BackgroundJobs, BodyBudget, BoundListener, RateLimiter};
use crate::server::app_state::{App, AppState};
use crate::server::db_availability::DatabaseMonitor;
use crate::server::demo::Demo;
use crate::server::health::ProcessHealth;
use crate::server::shutdown::ShutdownSignal;
use crate::server::startup;
use crate::telemetry::{self, Telemetry};

/// Shutdown deadlines, counted from the end of the drain: services ended and claims released; last replies delivered;
/// connections closed. The rest of the ten seconds is for unsent traces.
const SERVICES_MAX: Duration = Duration::from_millis(5500);
const REPLIES_MAX: Duration = Duration::from_secs(7);
const CLOSE_MAX: Duration = Duration::from_secs(8);

/// How long after the drain the outbox may finish deliveries in flight.
const REPLIES_DRAIN: Duration = Duration::from_secs(5);

/// How long the database may take to close. A consistency check may still be running on it.
const DATABASE_MAX: Duration = Duration::from_secs(2);

/// How long an aborted service may take to end; one that blocks its thread does not end at all.
const ABORT_MAX: Duration = Duration::from_millis(200);

// A service has time to end and to report its result before it is aborted.
const _: () = assert!(REPLIES_DRAIN.as_millis() + 1000 <= REPLIES_MAX.as_millis());
const _: () = assert!(SERVICES_MAX.as_millis() + ABORT_MAX.as_millis() < REPLIES_MAX.as_millis());
const _: () = assert!(REPLIES_MAX.as_millis() + ABORT_MAX.as_millis() < CLOSE_MAX.as_millis());

/// Maximum backoff between two deliveries of an outbox row.
const OUTBOX_BACKOFF_MAX: Duration = Duration::from_secs(15 * 60);

/// Interval at which gauges are updated.
const SAMPLE_EVERY: Duration = Duration::from_secs(5);

/// Interval of session maintenance: expiry and compaction.
const SESSIONS_EVERY: Duration = Duration::from_secs(10 * 60);

/// Which command this process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessRole {
    /// `serve`: everything.
    Serve,
    /// `worker`: no HTTP except health and metrics.
    Worker,
}

impl ProcessRole {
    fn as_str(self) -> &'static str {
        match self {
            Self::Serve => "serve",
            Self::Worker => "worker",
        }
    }
}

/// Runs until a signal arrives or a service fails.
pub(crate) async fn run(
    role: ProcessRole,
    settings: Settings,
    handler: Option<Arc<dyn IssueHandler>>,
    demo: Option<Demo>,
    telemetry: &Telemetry,
) -> Result<(), CliError> {
    let shutdown = ShutdownSignal::default();
    shutdown.on_signals().context("failed to install signal handlers")?;
    // Before binding the port, so that an invalid setting is reported even if the port is in use.
    startup::check(&settings)?;
    let listening = match role {
        ProcessRole::Serve => BoundListener::bind("http.listen", settings.http.listen).await?,
        ProcessRole::Worker => {
            BoundListener::bind("worker.listen", settings.http.worker_listen).await?
        }
    };

    // Database and stream backend.
    let streams = startup::streams(&settings, &shutdown).await?;
    let store = startup::store(&settings, &shutdown).await?;
    for integration in &settings.integrations {
        let known = store.ensure_integration(&integration.id, integration.provider.as_str()).await;
        known.with_context(|| format!("[[integration]] `{}`", integration.id))?;
    }

    // Inbound: the inbox stores events and nudges workers.
    let nudger = telemetry.nudger(Arc::clone(&streams));
    let confirmations = CommitVerifier::default();
    let inbox_config = inbox_config(&settings.work, &confirmations);
    let inbox = Inbox::new(Arc::clone(&store), nudger.clone(), inbox_config)
        .context("failed to start the inbox")?;

    // Work: claim, handle, complete. The desk is the default handler.
    let desk =
        Box::pin(DeskServices::open(&settings, &store, &streams, &nudger, &confirmations)).await;
    let desk = desk.context("failed to start the desk")?;
    let config = worker_config(&settings.work);
    let (handler, config) = match handler {
        Some(handler) => (handler, config),
        None => (Arc::clone(&desk.desk) as Arc<dyn IssueHandler>, settings.desk.worker(config)),
    };
    let worker = Worker::new(Arc::clone(&store), nudger.clone(), TracedHandler(handler), config)
        .context("failed to start the worker")?;
    let sweeper = Sweeper::new(
        Arc::clone(&store),
        nudger.clone(),
        Some(worker.clone()),
        sweeper_config(&settings.work),
    )
    .context("failed to start the sweeper")?;

    // Outbound: the outbox delivers replies and events after the commit.
    let DeskServices { tickets, delivery: replies, ticket_events: intake, bus, sessions, desk } =
        desk;
    let outbox = Outbox::new(Arc::clone(&store), replies, outbox_config(&settings.work))
        .context("failed to start the outbox")?;

    // Analytics: only `serve` opens the DuckDB file.
    let path = settings.analytics_path.as_deref().filter(|_| role == ProcessRole::Serve);
    let analytics = Analytics::for_server(path, Arc::clone(&store), shutdown.clone());

    // HTTP.
    let health =
        ProcessHealth::new(worker.name(), shutdown.clone()).with_analytics(analytics.clone());
    let audit = AuditLog::open(Arc::clone(&store), settings.audit_rows_max).await;
    let model_runs = Arc::clone(&sessions);
    let app: App = Arc::new(AppState {
        audit: Arc::new(audit.context("failed to open the audit log")?),
        authenticator: Authenticator::new(&settings.tokens),
        rate_limiter: RateLimiter::new(&settings.http),
        body_budget: BodyBudget::new(settings.http.body_memory_bytes_max),
        metrics: telemetry.metrics.clone(),
        health: health.clone(),
        shutdown: shutdown.clone(),
        store: Arc::clone(&store),
        database: DatabaseMonitor::default(),
        streams: Arc::clone(&streams),
        nudger,
        inbox,
        settings: settings.clone(),
        tickets,
        sessions,
        background_jobs: BackgroundJobs::default(),
        listeners: SseListeners::default(),
    });
    let operations = Operations::new(Arc::clone(&streams), settings.http.clone(), shutdown.clone());
    let operations = operations.context("failed to create the queue API")?;
    let routes = match role {
        ProcessRole::Serve => router::serve(&app, operations.clone(), analytics.clone()),
        ProcessRole::Worker => router::worker(&app),
    };

    // Start all services.
    let queue = Queue::new(Arc::clone(&streams));
    let mut services = Services::new(health, shutdown.clone());
    let stop_requested = || {
        let shutdown = shutdown.clone();
        async move { shutdown.wait().await }
    };
    let stopped = stop_requested();
    let (work_queue, intake_queue, analytics_queue) = (queue.clone(), queue.clone(), queue.clone());
    services.start("worker", async move { worker.run(&work_queue, stopped).await });
    let stopped = stop_requested();
    services.start("sweeper", async move { sweeper.run(stopped).await });
    let sampling =
        sample(Arc::clone(&store), Arc::clone(&streams), queue, telemetry.metrics.clone());
    let stopped = stop_requested();
    services.start("gauges", async move {
        tokio::select! { () = stopped => {}, () = sampling => {} }
    });
    let (stopped, watching) =
        (stop_requested(), app.database.clone().run(settings.database_url.clone()));
    services.start("database monitor", async move {
        tokio::select! { () = stopped => {}, () = watching => {} }
    });
    let (stopped, confirming) = (stop_requested(), Arc::clone(&store));
    services
        .start("confirmation check", async move { confirmations.run(confirming, stopped).await });
    // Sessions of runs that started while the stream backend was unavailable.
    let (stopped, late) = (stop_requested(), desk.pending_sessions());
    services.start("pending sessions", async move { late.run(stopped).await });
    // Ticket events from other programs.
    let stopped = stop_requested();
    services.start("ticket events", async move { intake.run(&intake_queue, stopped).await });
    if role == ProcessRole::Serve {
        let stopped = stop_requested();
        services.start("sessions", async move {
            let _ = model_runs.run(SESSIONS_EVERY, stopped).await;
        });
    }
    if analytics.is_enabled() {
        let (analytics, queue) = (analytics.clone(), analytics_queue);
        services.start("analytics", async move { analytics.run(queue).await });
    }
    // Sends the outbox its drain deadline once no new replies can be produced.
    let (last_replies, deadline_received) = oneshot::channel::<Instant>();
    let mut outbox_service = Services::new(services.health.clone(), shutdown.clone());
    outbox_service.start("outbox", async move {
        let until = async { deadline_received.await.unwrap_or_else(|_| Instant::now()).into_std() };
        outbox.run_until(until).await;
    });
    if let Some(demo) = demo {
        services.start("demo", demo.run(listening.address, shutdown.clone()));
    }
    let url = format!("http://{}", listening.address);
    let serving =
        listening.serve(routes, settings.http.clone(), settings.work.drain, shutdown.clone());
    services.start("http", serving);
    let (streams_at, database_at) = (settings.stream_shown(), settings.database_shown());
    info!(
        role = role.as_str(),
        url,
        streams = streams_at,
        database = database_at,
        "server running"
    );

    // Shutdown. Work that does not finish in time is retried later: claims and outbox leases expire.
    shutdown.wait().await;
    let drained = Instant::now() + settings.work.drain;
    let failed = {
        let ending = async {
            tokio::join!(
                services.join(drained + SERVICES_MAX),
                finish_before(drained + SERVICES_MAX, operations.close(), "HTTP consumers"),
                finish_before(
                    drained + SERVICES_MAX,
                    app.background_jobs.close(),
                    "imports and forks"
                ),
            )
        };
        tokio::pin!(ending);
        let in_time = timeout_at(drained, ending.as_mut()).await;
        // Runs still in progress are aborted by now, so they produce no more replies.
        let _ = last_replies.send(drained + REPLIES_DRAIN);
        let rest = async {
            match in_time {
                Ok(ended) => ended,
                Err(_) => ending.await,
            }
        };
        let ((failed, (), ()), outbox) =
            tokio::join!(rest, outbox_service.join(drained + REPLIES_MAX));
        failed.or(outbox)
    };
    drop(app);
    let end = drained + CLOSE_MAX;
    tokio::join!(
        finish_before(end, analytics.close(), "analytics rebuild"),
        finish_before(end, desk.close(), "desk token accounting"),
        finish_before(end, build::close(bus), "bus"),
    );
    tokio::join!(
        finish_before(end.min(Instant::now() + DATABASE_MAX), store.close(), "database"),
        finish_before(end, close(streams), "streams")
    );
    match failed {
        Some(part) => {
            Err(CliError::new(format!("service `{part}` ended unexpectedly; see the log")))
        }
        None => {
            info!("stopped");
            Ok(())
        }
    }
}

/// Runs the handler inside a span that continues the traces of its events.
struct TracedHandler(Arc<dyn IssueHandler>);

#[async_trait]
impl IssueHandler for TracedHandler {
    async fn handle(&self, run: Run) -> Result<Resolution, HandlerError> {
        let (issue_id, attempt, events) = (run.issue().id, run.attempt(), run.events().len());
        let span = info_span!("run", %issue_id, attempt, events);
        telemetry::continue_event_traces(&span, run.events());
        self.0.handle(run).instrument(span).await
    }
}

/// Named background tasks. A task that ends before shutdown triggers it.
struct Services {
    tasks: JoinSet<Option<&'static str>>,
    health: ProcessHealth,
    shutdown: ShutdownSignal,
}

impl Services {
    fn new(health: ProcessHealth, shutdown: ShutdownSignal) -> Self {
        Self { tasks: JoinSet::new(), health, shutdown }
    }

    fn start(&mut self, part: &'static str, running: impl Future<Output = ()> + Send + 'static) {
        let (health, shutdown) = (self.health.clone(), self.shutdown.clone());
        health.set_running(part, true);
        self.tasks.spawn(async move {
            // A panic counts as an unexpected end.
            let ended = AssertUnwindSafe(running).catch_unwind().await;
            health.set_running(part, false);
            debug!(part, "service ended");
            if ended.is_err() {
                error!(part, "service panicked, shutting down");
            } else if !shutdown.is_triggered() {
                error!(part, "service ended unexpectedly, shutting down");
            }
            let has_failed = ended.is_err() || !shutdown.is_triggered();
            shutdown.trigger();
            has_failed.then_some(part)
        });
    }

    /// Waits for all services and returns the name of the first that failed. Services that miss the deadline are
    /// aborted.
    async fn join(&mut self, deadline: Instant) -> Option<&'static str> {
        let mut failed = None;
        let joining = async {
            while let Some(ended) = self.tasks.join_next().await {
                failed = failed.or(ended.ok().flatten());
            }
        };
        if timeout_at(deadline, joining).await.is_err() {
            warn!(
                count = self.tasks.len(),
                "services did not end before the deadline, aborting them"
            );
            let _ = timeout(ABORT_MAX, self.tasks.shutdown()).await;
        }
        failed
    }
}

/// Updates gauges until it is dropped.
async fn sample(
    store: Arc<dyn Store>,
    streams: Arc<dyn Backend>,
    queue: Queue,
    metrics: metrics_exporter_prometheus::PrometheusHandle,
) {
    let mut sampler = queue.sampler(&[STREAM]).expect("the topic name is valid");
    let mut ticks = interval(SAMPLE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        metrics.run_upkeep();
        let sampled = headwater_issue::metrics::sample(store.as_ref(), Some(&streams)).await;
        if let Err(error) = sampled {
            debug!(%error, "failed to sample the database, gauges keep their values");
        }
        if let Err(error) = sampler.run_once().await {
            debug!(%error, "failed to sample topics, gauges keep their values");
        }
    }
}

async fn close(streams: Arc<dyn Backend>) {
    if let Err(error) = streams.close().await {
        warn!(%error, "failed to close the stream backend");
    }
}

/// Awaits `ending` until the deadline, then logs and gives up.
async fn finish_before(deadline: Instant, ending: impl Future<Output = ()>, what: &str) {
    if timeout_at(deadline, ending).await.is_err() {
        warn!(what, "did not finish before the shutdown deadline");
    }
}

fn inbox_config(work: &WorkSettings, confirmations: &CommitVerifier) -> InboxConfig {
    let quiet = DebounceWindow {
        quiet_for: work.quiet,
        max_wait: work.max_wait,
        events_max: work.events_max,
    };
    InboxConfig {
        debounce: quiet,
        commit_verifier: confirmations.clone(),
        ..InboxConfig::default()
    }
}

fn worker_config(work: &WorkSettings) -> WorkerConfig {
    WorkerConfig {
        concurrency: work.concurrency,
        claim_ttl: work.claim,
        heartbeat_every: work.claim / 4,
        events_max: work.events_max,
        deadline: work.deadline,
        retry: IssueRetryPolicy {
            attempts_max: work.attempts,
            crashes_max: work.attempts,
            ..IssueRetryPolicy::default()
        },
        drain: work.drain,
        ..WorkerConfig::default()
    }
}

fn sweeper_config(work: &WorkSettings) -> SweeperConfig {
    let options = SweepOptions {
        nudge_overdue: work.sweep_every,
        crashes_max: work.attempts,
        ..SweepOptions::default()
    };
    SweeperConfig { every: work.sweep_every, options }
}

fn outbox_config(work: &WorkSettings) -> OutboxConfig {
    // After a kill the row is redelivered once `ttl` expires, so `ttl` is short.
    let (deadline, ttl) = (Duration::from_secs(26), Duration::from_secs(30));
    let retry = IssueRetryPolicy {
        attempts_max: work.outbox_attempts,
        crashes_max: work.attempts,
        backoff_max: OUTBOX_BACKOFF_MAX,
        ..IssueRetryPolicy::default()
    };
    OutboxConfig { retry, deadline, ttl, ..OutboxConfig::default() }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn services() -> (Services, ShutdownSignal) {
        let shutdown = ShutdownSignal::default();
        (Services::new(ProcessHealth::new("w", shutdown.clone()), shutdown.clone()), shutdown)
    }

    /// Sets its flag when dropped.
    struct DropFlag(Arc<AtomicBool>);

    impl Drop for DropFlag {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_service_that_misses_the_deadline_is_aborted_before_its_dependencies_close() {
        let (mut services, shutdown) = services();
        let is_over = Arc::new(AtomicBool::new(false));
        let flag = DropFlag(Arc::clone(&is_over));
        services.start("endless", async move {
            let _flag = flag;
            pending::<()>().await;
        });
        shutdown.trigger();
        let began = Instant::now();
        assert_eq!(services.join(began + SERVICES_MAX).await, None);
        assert!(is_over.load(Ordering::SeqCst), "the task was dropped");
        assert!(began.elapsed() < SERVICES_MAX + ABORT_MAX, "{:?}", began.elapsed());
        finish_before(Instant::now() + ABORT_MAX, pending(), "never closes").await;
    }

    #[tokio::test]
    async fn a_service_that_panics_or_ends_early_is_named_and_triggers_shutdown() {
        for panics in [true, false] {
            let (mut services, shutdown) = services();
            services.start("odd", async move { assert!(!panics, "on purpose") });
            shutdown.wait().await;
            assert_eq!(services.join(Instant::now() + CLOSE_MAX).await, Some("odd"));
        }
    }
}
