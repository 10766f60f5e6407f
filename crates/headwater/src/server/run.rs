//! The composition root: the whole system on one page, in the order in which an event goes through it.
//!
//! ```text
//! webhooks, tickets, stream entries -> inbox -> nudge -> worker -> outbox -> replies, analytics
//!                                        \________ sweeper ________/
//! ```
//!
//! Upstream: `command`. Promises: what starts here is joined here. A part that ends by itself stops the process with exit
//! code 1, so that whoever watches it starts it anew. A stop takes `worker.drain` and ten seconds at most: first no new
//! requests and no new claims, then the last replies, then the doors. What does not end in time is ended: nothing runs on
//! when the database is closed.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use async_trait::async_trait;
use futures_util::FutureExt;
use headwater_issue::{
    Confirmations, HandlerError, Inbox, InboxConfig, IssueHandler, Outbox, OutboxConfig, Quiet,
    Resolution, RetryPolicy, Run, STREAM, Store, SweepOptions, Sweeper, SweeperConfig, Worker,
    WorkerConfig,
};
use headwater_queue::Queue;
use headwater_stream::Backend;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout, timeout_at};
use tracing::{Instrument, debug, error, info, info_span, warn};

use crate::analytics::Analytics;
use crate::api::Operations;
use crate::api::tickets_sse::Listeners;
use crate::config::{Settings, Work};
use crate::desk::build;
use crate::desk::build::DeskParts;
use crate::exit::Failure;
use crate::http::audit::Audit;
use crate::http::router;
use crate::http::{Access, BodyBudget, Listening, LongWork, Rate};
use crate::server::app_state::{App, Shared};
use crate::server::db_availability::DatabaseWatch;
use crate::server::demo::Demo;
use crate::server::health::Health;
use crate::server::shutdown::Stopping;
use crate::server::startup;
use crate::telemetry::{self, Telemetry};

/// Beyond the drain, by when claims are given back and all parts have ended; by when the last replies are sent; by when
/// what is left is closed. Traces that are left have the rest of the ten seconds.
const PARTS_MAX: Duration = Duration::from_millis(5500);
const REPLIES_MAX: Duration = Duration::from_secs(7);
const CLOSE_MAX: Duration = Duration::from_secs(8);

/// How long beyond the drain a stop waits for deliveries that are under way.
const REPLIES_DRAIN: Duration = Duration::from_secs(5);

/// How long the database may take to close: all who used it have ended, but for a count of the books that it goes on with.
const DATABASE_MAX: Duration = Duration::from_secs(2);

/// How long a part may take to end that is ended: one that holds its thread does not end at all.
const ABORT_MAX: Duration = Duration::from_millis(200);

// What is told to end has time to do so, and to say what became of its work.
const _: () = assert!(REPLIES_DRAIN.as_millis() + 1000 <= REPLIES_MAX.as_millis());
const _: () = assert!(PARTS_MAX.as_millis() + ABORT_MAX.as_millis() < REPLIES_MAX.as_millis());
const _: () = assert!(REPLIES_MAX.as_millis() + ABORT_MAX.as_millis() < CLOSE_MAX.as_millis());

/// The longest wait between two tries to deliver a row.
const OUTBOX_BACKOFF_MAX: Duration = Duration::from_secs(15 * 60);

/// How often gauges are set.
const SAMPLE_EVERY: Duration = Duration::from_secs(5);

/// How often sessions are looked after: what is too old goes, what is long is compacted.
const SESSIONS_EVERY: Duration = Duration::from_secs(10 * 60);

/// What this process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Everything.
    Serve,
    /// Work, but no HTTP except health and metrics.
    Worker,
}

impl Role {
    fn as_str(self) -> &'static str {
        match self {
            Self::Serve => "serve",
            Self::Worker => "worker",
        }
    }
}

/// Runs until a signal, or until a part fails.
pub(crate) async fn run(
    role: Role,
    settings: Settings,
    handler: Option<Arc<dyn IssueHandler>>,
    demo: Option<Demo>,
    telemetry: &Telemetry,
) -> Result<(), Failure> {
    let stopping = Stopping::default();
    stopping.on_signals().context("signals cannot be heard")?;
    // Before the port: a wrong setting is reported as such, also while the port is in use.
    startup::check(&settings)?;
    let listening = match role {
        Role::Serve => Listening::bind("http.listen", settings.http.listen).await?,
        Role::Worker => Listening::bind("worker.listen", settings.http.worker_listen).await?,
    };

    // The truth, and the streams that make it fast.
    let streams = startup::streams(&settings, &stopping).await?;
    let store = startup::store(&settings, &stopping).await?;
    for integration in &settings.integrations {
        let known = store.ensure_integration(&integration.id, integration.provider.as_str()).await;
        known.with_context(|| format!("[[integration]] `{}`", integration.id))?;
    }

    // The way in: events are stored, and workers are nudged.
    let nudger = telemetry.nudger(Arc::clone(&streams));
    let confirmations = Confirmations::default();
    let inbox_config = inbox_config(&settings.work, &confirmations);
    let inbox =
        Inbox::new(Arc::clone(&store), nudger.clone(), inbox_config).context("the inbox")?;

    // Work: claim, handle, complete. The desk handles what no handler of your own does.
    let desk =
        Box::pin(DeskParts::open(&settings, &store, &streams, &nudger, &confirmations)).await;
    let desk = desk.context("the desk")?;
    let config = worker_config(&settings.work);
    let (handler, config) = match handler {
        Some(handler) => (handler, config),
        None => (Arc::clone(&desk.desk) as Arc<dyn IssueHandler>, settings.desk.worker(config)),
    };
    let worker = Worker::new(Arc::clone(&store), nudger.clone(), Chosen(handler), config)
        .context("the worker")?;
    let sweeper = Sweeper::new(
        Arc::clone(&store),
        nudger.clone(),
        Some(worker.clone()),
        sweeper_config(&settings.work),
    )
    .context("the sweeper")?;

    // The way out: replies and events leave after the commit.
    let DeskParts { tickets, replies, intake, bus, sessions, desk } = desk;
    let outbox = Outbox::new(Arc::clone(&store), replies, outbox_config(&settings.work))
        .context("the outbox")?;

    // What happened, for whoever asks; one process of a machine keeps it.
    let path = settings.analytics_path.as_deref().filter(|_| role == Role::Serve);
    let analytics = Analytics::of_server(path, Arc::clone(&store), stopping.clone());

    // What people touch.
    let health = Health::new(worker.name(), stopping.clone()).with_analytics(analytics.clone());
    let audit = Audit::open(Arc::clone(&store), settings.audit_rows_max).await;
    let model_runs = Arc::clone(&sessions);
    let app: App = Arc::new(Shared {
        audit: Arc::new(audit.context("the audit log")?),
        access: Access::new(&settings.tokens),
        rate: Rate::new(&settings.http),
        body_budget: BodyBudget::new(settings.http.body_memory_bytes_max),
        metrics: telemetry.metrics.clone(),
        health: health.clone(),
        stopping: stopping.clone(),
        store: Arc::clone(&store),
        database: DatabaseWatch::default(),
        streams: Arc::clone(&streams),
        nudger,
        inbox,
        settings: settings.clone(),
        tickets,
        sessions,
        long_work: LongWork::default(),
        listeners: Listeners::default(),
    });
    let operations = Operations::new(Arc::clone(&streams), settings.http.clone(), stopping.clone());
    let operations = operations.context("the operations")?;
    let routes = match role {
        Role::Serve => router::serve(&app, operations.clone(), analytics.clone()),
        Role::Worker => router::worker(&app),
    };

    // Everything runs.
    let queue = Queue::new(Arc::clone(&streams));
    let mut parts = Parts::new(health, stopping.clone());
    let until = || {
        let stopping = stopping.clone();
        async move { stopping.begun().await }
    };
    let shutdown = until();
    let (work_queue, intake_queue, analytics_queue) = (queue.clone(), queue.clone(), queue.clone());
    parts.start("worker", async move { worker.run(&work_queue, shutdown).await });
    let shutdown = until();
    parts.start("sweeper", async move { sweeper.run(shutdown).await });
    let sampling =
        sample(Arc::clone(&store), Arc::clone(&streams), queue, telemetry.metrics.clone());
    let shutdown = until();
    parts.start("gauges", async move {
        tokio::select! { () = shutdown => {}, () = sampling => {} }
    });
    let (shutdown, watching) = (until(), app.database.clone().run(settings.database_url.clone()));
    parts.start("database watch", async move {
        tokio::select! { () = shutdown => {}, () = watching => {} }
    });
    let (shutdown, confirming) = (until(), Arc::clone(&store));
    parts.start("confirmation check", async move { confirmations.run(confirming, shutdown).await });
    // Sessions of runs that began while streams were away.
    let (shutdown, late) = (until(), desk.late_sessions());
    parts.start("late sessions", async move { late.run(shutdown).await });
    // What other programs say of tickets.
    let shutdown = until();
    parts.start("ticket events", async move { intake.run(&intake_queue, shutdown).await });
    if role == Role::Serve {
        let shutdown = until();
        parts.start("sessions", async move {
            let _ = model_runs.run(SESSIONS_EVERY, shutdown).await;
        });
    }
    if analytics.is_on() {
        let (analytics, queue) = (analytics.clone(), analytics_queue);
        parts.start("analytics", async move { analytics.run(queue).await });
    }
    // Until when the last replies may be under way, once no new ones come.
    let (last_replies, told) = oneshot::channel::<Instant>();
    let mut outbox_part = Parts::new(parts.health.clone(), stopping.clone());
    outbox_part.start("outbox", async move {
        let until = async { told.await.unwrap_or_else(|_| Instant::now()).into_std() };
        outbox.run_until(until).await;
    });
    if let Some(demo) = demo {
        parts.start("demo", demo.run(listening.address, stopping.clone()));
    }
    let url = format!("http://{}", listening.address);
    let serving =
        listening.serve(routes, settings.http.clone(), settings.work.drain, stopping.clone());
    parts.start("http", serving);
    let (streams_at, database_at) = (settings.stream_shown(), settings.database_shown());
    info!(role = role.as_str(), url, streams = streams_at, database = database_at, "running");

    // The stop, in the order of the flow. What does not end in time is lost to nobody: claims and rows run out.
    stopping.begun().await;
    let drained = Instant::now() + settings.work.drain;
    let failed = {
        let ending = async {
            tokio::join!(
                parts.join(drained + PARTS_MAX),
                by(drained + PARTS_MAX, operations.close(), "consumers over HTTP"),
                by(drained + PARTS_MAX, app.long_work.close(), "imports or forks"),
            )
        };
        tokio::pin!(ending);
        let in_time = timeout_at(drained, ending.as_mut()).await;
        // Runs that go on until now are ended, so no new replies come of them.
        let _ = last_replies.send(drained + REPLIES_DRAIN);
        let rest = async {
            match in_time {
                Ok(ended) => ended,
                Err(_) => ending.await,
            }
        };
        let ((failed, (), ()), outbox) =
            tokio::join!(rest, outbox_part.join(drained + REPLIES_MAX));
        failed.or(outbox)
    };
    drop(app);
    let end = drained + CLOSE_MAX;
    tokio::join!(
        by(end, analytics.close(), "a rebuild of analytics, which is undone"),
        by(end, desk.close(), "the books of the desk"),
        by(end, build::close(bus), "the bus"),
    );
    tokio::join!(
        by(end.min(Instant::now() + DATABASE_MAX), store.close(), "the database"),
        by(end, close(streams), "the streams")
    );
    match failed {
        Some(part) => Err(Failure::new(format!("`{part}` ended by itself; the log says why"))),
        None => {
            info!("stopped");
            Ok(())
        }
    }
}

/// A handler that is chosen when the process starts.
struct Chosen(Arc<dyn IssueHandler>);

#[async_trait]
impl IssueHandler for Chosen {
    async fn handle(&self, run: Run) -> Result<Resolution, HandlerError> {
        let (issue_id, attempt, events) = (run.issue().id, run.attempt(), run.events().len());
        let span = info_span!("run", %issue_id, attempt, events);
        telemetry::continue_origins(&span, run.events());
        self.0.handle(run).instrument(span).await
    }
}

/// Tasks by name. One that ends before the stop begins the stop.
struct Parts {
    tasks: JoinSet<Option<&'static str>>,
    health: Health,
    stopping: Stopping,
}

impl Parts {
    fn new(health: Health, stopping: Stopping) -> Self {
        Self { tasks: JoinSet::new(), health, stopping }
    }

    fn start(&mut self, part: &'static str, running: impl Future<Output = ()> + Send + 'static) {
        let (health, stopping) = (self.health.clone(), self.stopping.clone());
        health.note(part, true);
        self.tasks.spawn(async move {
            // A panic is an end like any other.
            let ended = AssertUnwindSafe(running).catch_unwind().await;
            health.note(part, false);
            debug!(part, "part ended");
            if ended.is_err() {
                error!(part, "a part panicked, stopping");
            } else if !stopping.has_begun() {
                error!(part, "a part ended by itself, stopping");
            }
            let has_failed = ended.is_err() || !stopping.has_begun();
            stopping.begin();
            has_failed.then_some(part)
        });
    }

    /// Waits for all of them; the first that failed is named. Those that do not end in time are ended.
    async fn join(&mut self, deadline: Instant) -> Option<&'static str> {
        let mut failed = None;
        let joining = async {
            while let Some(ended) = self.tasks.join_next().await {
                failed = failed.or(ended.ok().flatten());
            }
        };
        if timeout_at(deadline, joining).await.is_err() {
            warn!(count = self.tasks.len(), "parts did not end in time, they are ended");
            let _ = timeout(ABORT_MAX, self.tasks.shutdown()).await;
        }
        failed
    }
}

/// Sets gauges, as long as it is not dropped.
async fn sample(
    store: Arc<dyn Store>,
    streams: Arc<dyn Backend>,
    queue: Queue,
    metrics: metrics_exporter_prometheus::PrometheusHandle,
) {
    let mut sampler = queue.sampler(&[STREAM]).expect("the name is short and plain");
    let mut ticks = interval(SAMPLE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        metrics.run_upkeep();
        let sampled = headwater_issue::metrics::sample(store.as_ref(), Some(&streams)).await;
        if let Err(error) = sampled {
            debug!(%error, "gauges keep their values");
        }
        if let Err(error) = sampler.run_once().await {
            debug!(%error, "gauges of topics keep their values");
        }
    }
}

async fn close(streams: Arc<dyn Backend>) {
    if let Err(error) = streams.close().await {
        warn!(%error, "the streams did not close well");
    }
}

/// Waits for an end until a deadline.
async fn by(deadline: Instant, ending: impl Future<Output = ()>, what: &str) {
    if timeout_at(deadline, ending).await.is_err() {
        warn!(what, "it did not end in time, and is left");
    }
}

fn inbox_config(work: &Work, confirmations: &Confirmations) -> InboxConfig {
    let quiet = Quiet { quiet: work.quiet, max_wait: work.max_wait, events_max: work.events_max };
    InboxConfig { quiet, confirmations: confirmations.clone(), ..InboxConfig::default() }
}

fn worker_config(work: &Work) -> WorkerConfig {
    WorkerConfig {
        concurrency: work.concurrency,
        claim_ttl: work.claim,
        heartbeat_every: work.claim / 4,
        events_max: work.events_max,
        deadline: work.deadline,
        retry: RetryPolicy {
            attempts_max: work.attempts,
            crashes_max: work.attempts,
            ..RetryPolicy::default()
        },
        drain: work.drain,
        ..WorkerConfig::default()
    }
}

fn sweeper_config(work: &Work) -> SweeperConfig {
    let options = SweepOptions {
        nudge_overdue: work.sweep_every,
        crashes_max: work.attempts,
        ..SweepOptions::default()
    };
    SweeperConfig { every: work.sweep_every, options }
}

fn outbox_config(work: &Work) -> OutboxConfig {
    // A row that a killed process had in hand comes again after `ttl`; somebody waits for it.
    let (deadline, ttl) = (Duration::from_secs(26), Duration::from_secs(30));
    let retry = RetryPolicy {
        attempts_max: work.outbox_attempts,
        crashes_max: work.attempts,
        backoff_max: OUTBOX_BACKOFF_MAX,
        ..RetryPolicy::default()
    };
    OutboxConfig { retry, deadline, ttl, ..OutboxConfig::default() }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn parts() -> (Parts, Stopping) {
        let stopping = Stopping::default();
        (Parts::new(Health::new("w", stopping.clone()), stopping.clone()), stopping)
    }

    /// Tells when it is dropped.
    struct Told(Arc<AtomicBool>);

    impl Drop for Told {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_that_does_not_end_in_time_is_ended_before_what_it_stands_on_is_closed() {
        let (mut parts, stopping) = parts();
        let is_over = Arc::new(AtomicBool::new(false));
        let told = Told(Arc::clone(&is_over));
        parts.start("endless", async move {
            let _told = told;
            pending::<()>().await;
        });
        stopping.begin();
        let began = Instant::now();
        assert_eq!(parts.join(began + PARTS_MAX).await, None);
        assert!(is_over.load(Ordering::SeqCst), "nothing of it runs on");
        assert!(began.elapsed() < PARTS_MAX + ABORT_MAX, "{:?}", began.elapsed());
        by(Instant::now() + ABORT_MAX, pending(), "what never closes").await;
    }

    #[tokio::test]
    async fn a_part_that_panics_or_ends_by_itself_is_named_and_begins_the_stop() {
        for panics in [true, false] {
            let (mut parts, stopping) = parts();
            parts.start("odd", async move { assert!(!panics, "on purpose") });
            stopping.begun().await;
            assert_eq!(parts.join(Instant::now() + CLOSE_MAX).await, Some("odd"));
        }
    }
}
