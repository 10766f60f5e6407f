//! The composition root: builds and starts everything, in the order in which an event flows through it.
//!
//! ```text
//! webhooks, tickets, stream entries -> inbox -> nudge -> worker -> outbox -> replies, analytics
//!                                        \________ sweeper ________/
//! ```
//!
//! Upstream: `entry.rs`. Guarantees: every task started here is joined here. A service that ends by itself stops the
//! process with exit code 1, so that a process supervisor restarts it. Shutdown takes at most `worker.drain` plus ten
//! seconds (`shutdown.rs` has the order).

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use async_trait::async_trait;
use futures_util::future::join_all;
use headwater_issue::{
    CommitVerifier, DebounceWindow, HandlerError, Inbox, InboxConfig, IssueHandler,
    IssueRetryPolicy, Nudger, Outbox, OutboxConfig, Resolution, Run, STREAM, SchemaPolicy, Store,
    SweepOptions, Sweeper, SweeperConfig, Worker, WorkerConfig,
};
use headwater_queue::Queue;
use headwater_stream::{Backend, Backoff};
use metrics::gauge;
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::{Instrument, debug, error, info, info_span, warn};

use crate::analytics::Analytics;
use crate::api::Operations;
use crate::api::tickets_sse::SseListeners;
use crate::config::{Settings, WorkSettings};
use crate::desk::build::DeskServices;
use crate::entry::Extensions;
use crate::exit::CliError;
use crate::http::audit::AuditLog;
use crate::http::router;
use crate::http::{Authenticator, BackgroundJobs, BodyBudget, BoundListener, RateLimiter};
use crate::inbound::webhook_log::WebhookLog;
use crate::outbound::notification_sinks::NotificationLinks;
use crate::server::app_state::{App, AppState, ServerState};
use crate::server::db_availability::DatabaseMonitor;
use crate::server::demo::Demo;
use crate::server::health::ProcessHealth;
use crate::server::plans::runner::PlanRunner;
use crate::server::retention::HistoryRetention;
use crate::server::services::Services;
use crate::server::shutdown::Running;
use crate::server::shutdown_signal::ShutdownSignal;
use crate::server::startup;
use crate::telemetry::history::MetricsHistory;
use crate::telemetry::history::topics::TopicHistory;
use crate::telemetry::{self, Telemetry};
use crate::tickets::{OverdueAction, Tickets};

/// Maximum backoff between two deliveries of an outbox row.
const OUTBOX_BACKOFF: Backoff = Backoff::Exponential {
    first: Duration::from_secs(1),
    factor: 2.0,
    max: Duration::from_secs(15 * 60),
    jitter: 1.0,
};

/// Gauge of open tickets that are handed over to a person. Label: `assigned` (`true`, `false`).
const HANDED_OVER: &str = "headwater_tickets_handed_over";

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
    extensions: Extensions,
    demo: Option<Demo>,
    telemetry: &Telemetry,
) -> Result<(), CliError> {
    let shutdown = ShutdownSignal::default();
    shutdown.on_signals().context("failed to install signal handlers")?;
    // Before binding the port, so that an invalid setting is reported even if the port is in use.
    startup::check(&settings)?;
    // `settings` has the providers.
    let Extensions { handler, notifications, model, routes: extension_routes, tools, .. } =
        extensions;
    let listening = match role {
        ProcessRole::Serve => BoundListener::bind("http.listen", settings.http.listen).await?,
        ProcessRole::Worker => {
            BoundListener::bind("worker.listen", settings.http.worker_listen).await?
        }
    };

    // A worker does not serve the pages that links lead to.
    let served_at = match role {
        ProcessRole::Serve => listening.address,
        ProcessRole::Worker => settings.http.listen,
    };
    let base_url = settings.links.base_url(served_at);
    let draft_links = settings.links.draft_links(served_at);
    let links = NotificationLinks { base_url, draft_links: draft_links.clone() };
    let notifications = startup::notifications(&settings, notifications, &links, &shutdown)?;

    // Database and stream backend.
    let (streams, stream_monitor) = startup::streams_for_server(&settings, &shutdown).await?;
    if role == ProcessRole::Serve {
        startup::announce(&settings, listening.address);
    }
    let store = startup::store(&settings, &shutdown, SchemaPolicy::Migrate).await?;
    // Held until the process ends.
    let _database_lock = startup::end_leases_of_predecessor(&settings, store.as_ref()).await?;
    let http_store = match role {
        ProcessRole::Serve => startup::http_store(&settings, &shutdown, &store).await?,
        ProcessRole::Worker => Arc::clone(&store),
    };
    for integration in &settings.integrations {
        let known = store.ensure_integration(&integration.id, integration.provider.as_str()).await;
        known.with_context(|| format!("[[integration]] `{}`", integration.id))?;
    }

    // Inbound: the inbox stores events and nudges workers.
    let nudger = Nudger::new(Arc::clone(&streams));
    let confirmations = CommitVerifier::default();
    let inbox_config = inbox_config(&settings.work, &confirmations);
    let inbox = Inbox::new(Arc::clone(&http_store), nudger.clone(), inbox_config)
        .context("failed to start the inbox")?;

    // Work: claim, handle, complete. The desk is the default handler.
    let own = (model, tools);
    let desk =
        Box::pin(DeskServices::open(&settings, &store, &streams, &nudger, &confirmations, own))
            .await;
    let desk = desk.context("failed to start the desk")?;
    let config = worker_config(&settings.work);
    let desk_at_work = handler.is_none().then(|| Arc::clone(&desk.desk));
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
        sweeper_config(&settings),
    )
    .context("failed to start the sweeper")?;

    // Outbound: the outbox delivers replies and events after the commit.
    let DeskServices {
        tickets,
        delivery: replies,
        ticket_events: intake,
        bus,
        sessions,
        desk,
        provisional,
    } = desk;
    let outbox = Outbox::new(Arc::clone(&store), replies, outbox_config(&settings.work))
        .context("failed to start the outbox")?;

    // Analytics: only `serve` opens the DuckDB file.
    let mut analytics = settings.analytics.clone();
    analytics.path = analytics.path.filter(|_| role == ProcessRole::Serve);
    let analytics = Analytics::for_server(&analytics, Arc::clone(&store), shutdown.clone());
    if let Some(path) = settings.analytics.path.as_deref().filter(|_| analytics.is_enabled()) {
        startup::announce_analytics(path, listening.address);
    }

    // HTTP.
    let health = ProcessHealth::new(worker.name(), shutdown.clone())
        .with_streams(stream_monitor.clone())
        .with_analytics(analytics.clone())
        .with_desk(desk_at_work);
    let audit = AuditLog::open(Arc::clone(&http_store), settings.audit_rows_max).await;
    let model_runs = Arc::clone(&sessions);
    let history = Arc::new(MetricsHistory::new(worker.name(), settings.retention.metrics));
    let retention = HistoryRetention::new(tickets.clone(), settings.retention);
    let app: App = Arc::new(AppState {
        settings: settings.clone(),
        store: Arc::clone(&http_store),
        streams: Arc::clone(&streams),
        nudger,
        audit: Arc::new(audit.context("failed to open the audit log")?),
        tickets: tickets.on_store(Arc::clone(&http_store)),
        draft_links,
        sessions,
        background_jobs: BackgroundJobs::default(),
        webhook_log: WebhookLog::default(),
        history: Arc::clone(&history),
        listeners: SseListeners::default(),
        provisional,
        shutdown: shutdown.clone(),
    });
    let server = Arc::new(ServerState {
        app: Arc::clone(&app),
        inbox,
        health: health.clone(),
        work_store: Arc::clone(&store),
        database: DatabaseMonitor::default(),
        authenticator: Authenticator::new(&settings.tokens),
        rate_limiter: RateLimiter::new(&settings.http),
        body_budget: BodyBudget::new(settings.http.body_memory_bytes_max),
        metrics: telemetry.metrics.clone(),
    });
    let plans = PlanRunner::new(
        Arc::clone(&store),
        Queue::new(Arc::clone(&streams)),
        worker.name(),
        shutdown.clone(),
    );
    let operations = Operations::new(Arc::clone(&streams), settings.http.clone(), shutdown.clone());
    let operations = operations.context("failed to create the queue API")?;
    // A worker has no routes that read it.
    let topic_history =
        (role == ProcessRole::Serve).then(|| Arc::clone(operations.topic_history()));
    let routes = match role {
        ProcessRole::Serve => {
            router::serve(&server, operations.clone(), analytics.clone(), extension_routes)
        }
        ProcessRole::Worker => router::worker(&server),
    };

    // Start all services.
    let queue = Queue::new(Arc::clone(&streams));
    let mut services = Services::new(health.clone(), shutdown.clone());
    let stop_requested = || {
        let shutdown = shutdown.clone();
        async move { shutdown.wait().await }
    };
    let stopped = stop_requested();
    let (work_queue, intake_queue, analytics_queue) = (queue.clone(), queue.clone(), queue.clone());
    let notification_queue = queue.clone();
    services.start("worker", async move { worker.run(&work_queue, stopped).await });
    let stopped = stop_requested();
    services.start("sweeper", async move { sweeper.run(stopped).await });
    // Once, beside the other services: a slow database must not delay the start.
    let (stopped, waiting, budget) = (stop_requested(), tickets.clone(), settings.desk.budget);
    services.start("budget waits", async move {
        let releasing = async {
            if let Err(error) = waiting.release_budget_waits(&budget).await {
                warn!(%error, "issues that wait for a raised token budget not released; they continue on the next UTC day");
            }
            std::future::pending::<()>().await;
        };
        tokio::select! { () = stopped => {}, () = releasing => {} }
    });
    let sampled = (Arc::clone(&store), Arc::clone(&streams), tickets.clone());
    let histories = (Arc::clone(&history), topic_history);
    let sampling = sample(sampled, queue, telemetry.metrics.clone(), histories);
    let stopped = stop_requested();
    services.start("gauges", async move {
        tokio::select! { () = stopped => {}, () = sampling => {} }
    });
    let (stopped, history_store) = (stop_requested(), Arc::clone(&store));
    let history_metrics = telemetry.metrics.clone();
    services.start("history", async move {
        let store = history_store.as_ref();
        tokio::select! { () = stopped => {}, () = history.run(&history_metrics, store) => {} }
        history.flush(&history_metrics, store).await;
    });
    let (stopped, watching) =
        (stop_requested(), server.database.clone().run(settings.database_url.clone()));
    services.start("database monitor", async move {
        tokio::select! { () = stopped => {}, () = watching => {} }
    });
    let (stopped, watching) = (stop_requested(), stream_monitor.run(Arc::clone(&streams)));
    services.start("stream monitor", async move {
        tokio::select! { () = stopped => {}, () = watching => {} }
    });
    let (stopped, confirming) = (stop_requested(), Arc::clone(&store));
    services
        .start("confirmation check", async move { confirmations.run(confirming, stopped).await });
    services.start("replay plans", plans.run());
    // Ticket events from other programs.
    let stopped = stop_requested();
    services.start("ticket events", async move { intake.run(&intake_queue, stopped).await });
    if let Some(max_wait) = settings.draft_max_wait {
        let action = match settings.draft_overdue_hands_over {
            true => OverdueAction::HandOver,
            false => OverdueAction::Notify,
        };
        let (stopped, every) = (stop_requested(), settings.work.sweep_every);
        let reporting = report_overdue_drafts(tickets.clone(), max_wait, action, every);
        services.start("overdue drafts", async move {
            tokio::select! { () = stopped => {}, () = reporting => {} }
        });
    }
    if !notifications.is_empty() {
        let queue = notification_queue;
        let forwarders: Vec<_> =
            notifications.into_iter().map(|one| one.with_tickets(tickets.clone())).collect();
        services.start("notifications", async move {
            join_all(forwarders.iter().map(|one| one.run(&queue))).await;
        });
    }
    if role == ProcessRole::Serve {
        let (stopped, deleting) = (stop_requested(), retention);
        services.start("retention", async move {
            tokio::select! { () = stopped => {}, () = deleting.run() => {} }
        });
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
    let mut outbox_service = Services::new(health, shutdown.clone());
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

    shutdown.wait().await;
    let running = Running {
        services,
        outbox: outbox_service,
        last_replies,
        operations,
        app,
        analytics,
        desk,
        bus,
        stores: [http_store, store],
        streams,
    };
    running.shut_down(settings.work.drain).await
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

/// Updates gauges until it is dropped.
async fn sample(
    (store, streams, tickets): (Arc<dyn Store>, Arc<dyn Backend>, Tickets),
    queue: Queue,
    metrics: metrics_exporter_prometheus::PrometheusHandle,
    (history, topic_history): (Arc<MetricsHistory>, Option<Arc<TopicHistory>>),
) {
    let mut sampler = queue.sampler(&[STREAM]).expect("the topic name is valid");
    let mut ticks = interval(SAMPLE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        metrics.run_upkeep();
        let sampled = headwater_issue::metrics::sample(store.as_ref(), Some(&streams)).await;
        match sampled {
            Ok(()) => history.note_gauges(),
            Err(error) => {
                debug!(%error, "failed to sample the database, gauges keep their values");
            }
        }
        match tickets.hand_over_counts().await {
            Ok(counts) => {
                let gauge = |assigned: &'static str| gauge!(HANDED_OVER, "assigned" => assigned);
                gauge("true").set(counts.assigned as f64);
                gauge("false").set(counts.unassigned as f64);
            }
            Err(error) => debug!(%error, "failed to count hand-overs, gauges keep their values"),
        }
        let sampled = sampler.run_once().await;
        if let Some(history) = &topic_history {
            history.sample(&queue, sampler.measured(), sampled.is_ok()).await;
        }
        if let Err(error) = sampled {
            debug!(%error, "failed to sample topics, gauges keep their values");
        }
    }
}

/// Reports drafts that wait too long, until it is dropped.
async fn report_overdue_drafts(
    tickets: Tickets,
    max_wait: Duration,
    action: OverdueAction,
    every: Duration,
) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // On its own task: a transaction that is dropped in the middle would cost a connection.
        let tickets = tickets.clone();
        let pass =
            tokio::spawn(async move { tickets.report_overdue_drafts(max_wait, action).await });
        match pass.await {
            Ok(Ok(0)) => {}
            Ok(Ok(count)) => warn!(count, ?action, "drafts wait longer than `desk.draft_max_wait`"),
            Ok(Err(error)) => debug!(%error, "failed to look for overdue drafts; retrying"),
            Err(panic) => error!(%panic, "looking for overdue drafts panicked; retrying"),
        }
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

fn sweeper_config(settings: &Settings) -> SweeperConfig {
    let work = &settings.work;
    let options = SweepOptions {
        nudge_overdue: work.sweep_every,
        crashes_max: work.attempts,
        keep: settings.retention.outbox,
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
        backoff: OUTBOX_BACKOFF,
    };
    OutboxConfig { retry, deadline, ttl, ..OutboxConfig::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{RawSettings, SecretsPolicy, load};

    #[test]
    fn by_default_workers_renew_their_claims_and_heartbeats_every_15_s() {
        let loaded = load(&RawSettings::default(), SecretsPolicy::Required).unwrap();
        let config = worker_config(&loaded.settings.work);
        assert_eq!(config.heartbeat_every, Duration::from_secs(15));
        assert_eq!(config.heartbeat_every, WorkerConfig::default().heartbeat_every);
    }
}
