//! A process is killed (SIGKILL) right after each processing step, and nothing is lost or done twice.
//!
//! The victim is this test binary in a child process: inbox, worker, sweeper and outbox. It kills itself inside the
//! step observer. The test then starts a new system on the same database and streams, and asserts that every event is
//! processed once, every reply was delivered with one idempotency key, the store is consistent, and no nudge is left.

mod support;

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use headwater_issue::{
    Deliver, DeliverError, EventLogFilter, InboxConfig, IssueFilter, IssueId, OutboxConfig,
    OutboxRow, ProcessingStep, StepObserver, SweepOptions, Sweeper, SweeperConfig, WorkerConfig,
};
use headwater_testkit::Child;
use support::{Backends, DeliveryLog, LONG, RunLog, System, event_of, wait_until};

const ISSUES: [&str; 3] = ["1", "2", "3"];
const EVENTS: [&str; 2] = ["a", "b"];

/// Short, so that claims of the victim expire soon; renewed often enough for a slow machine.
const CLAIM_TTL: Duration = Duration::from_secs(1);

macro_rules! crash_tests {
    ($($name:ident: $step:literal,)*) => {
        mod with_sqlite_and_embedded_streams {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() -> anyhow::Result<()> {
                super::nothing_is_lost_after($step, super::Backends::directory).await
            })*
        }

        #[cfg(feature = "postgres")]
        mod with_postgres_and_redis {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() -> anyhow::Result<()> {
                super::nothing_is_lost_after($step, super::Backends::servers).await
            })*
        }
    };
}

crash_tests! {
    a_crash_after_an_event_is_recorded_loses_nothing: "Recorded",
    a_crash_after_a_nudge_is_sent_loses_nothing: "Nudged",
    a_crash_after_a_nudge_is_received_loses_nothing: "Received",
    a_crash_after_an_issue_is_claimed_loses_nothing: "Claimed",
    a_crash_after_the_handler_has_returned_repeats_the_run_but_no_reply: "Handled",
    a_crash_after_a_run_is_completed_repeats_nothing: "Completed",
    a_crash_after_a_nudge_is_acknowledged_loses_no_reply: "Acknowledged",
    a_crash_after_a_reply_is_taken_from_the_outbox_loses_no_reply: "Taken",
    a_crash_after_a_reply_is_delivered_repeats_it_with_the_same_key: "Delivered",
    a_crash_after_a_delivery_is_settled_repeats_no_reply: "Settled",
}

async fn nothing_is_lost_after(step: &str, backends: impl Fn() -> Result<Backends>) -> Result<()> {
    for occurrence in ["1", "3"] {
        let backends = backends()?;
        let deliveries = tempfile::NamedTempFile::new()?;
        let confirmed = kill_a_process(&backends, step, occurrence, deliveries.path())?;
        assert_recovered(&backends, &confirmed, deliveries.path())
            .await
            .with_context(|| format!("after {step} number {occurrence}"))?;
    }
    Ok(())
}

/// Runs a victim until it dies. Returns the events that it has confirmed.
fn kill_a_process(
    backends: &Backends,
    step: &str,
    occurrence: &str,
    deliveries: &std::path::Path,
) -> Result<BTreeSet<String>> {
    let deliveries = deliveries.to_str().context("the path is not UTF-8")?;
    let victim = Child::spawn_self(
        "victim",
        &[
            ("DATABASE", &backends.database),
            ("STREAMS", &backends.streams),
            ("STEP", step),
            ("OCCURRENCE", occurrence),
            ("LETTERS", deliveries),
        ],
    )?;
    let status = victim.wait(LONG)?;
    ensure!(status.signal() == Some(9), "step {step} was not reached: {status}");
    let mut confirmed = BTreeSet::new();
    while let Ok(line) = victim.line(LONG) {
        if let Some((_, key)) = line.split_once("CONFIRMED ") {
            confirmed.insert(key.trim().to_owned());
        }
    }
    Ok(confirmed)
}

/// Starts a new system on the backends of the victim, and asserts the final state.
async fn assert_recovered(
    backends: &Backends,
    confirmed: &BTreeSet<String>,
    deliveries: &std::path::Path,
) -> Result<()> {
    let system = System::at(backends).await?;
    let services = Services::start(&system, DeliveryFile::open(deliveries)?, None)?;

    // A sender sends an event again only if it was not confirmed.
    for (issue, event) in all_events() {
        let event = event_of(issue, event);
        if !confirmed.contains(event.dedup_key.as_deref().unwrap_or_default()) {
            system.inbox.record(event).await?;
        }
    }
    system.wait_processed().await?;
    wait_until("all replies to be delivered", || async {
        let backlog = system.store.backlog().await.expect("the store replies");
        backlog.outbox_pending == 0
    })
    .await?;
    wait_acknowledged(&system).await?;
    services.stop().await?;

    let report = system.assert_consistent().await?;
    assert_eq!((report.issues, report.recorded, report.processed), (3, 6, 6));
    let mut ids = Vec::new();
    for issue in system.store.issues(&IssueFilter::default(), 10).await? {
        for log in system.store.event_logs(issue.id, &EventLogFilter::default(), 10).await? {
            ids.push(log.id);
        }
    }
    let seen = DeliveryLog::default();
    for line in std::fs::read_to_string(deliveries)?.lines() {
        let (key, reply) = line.split_once(' ').context("a complete line")?;
        seen.add(reply, key);
    }
    seen.assert_one_reply_each(ids);
    Ok(())
}

fn all_events() -> impl Iterator<Item = (&'static str, &'static str)> {
    ISSUES.into_iter().flat_map(|issue| EVENTS.into_iter().map(move |event| (issue, event)))
}

/// Waits until every nudge is acknowledged, including those of the victim.
async fn wait_acknowledged(system: &System) -> Result<()> {
    let stream = headwater_stream::StreamName::new(headwater_issue::STREAM)?;
    wait_until("nudges to be acknowledged", || async {
        let stats = system.streams.stats(&stream).await.expect("the stream replies");
        stats.is_some_and(|stats| {
            let done =
                |group: &headwater_stream::GroupStats| group.pending == 0 && group.lag == Some(0);
            stats.groups.len() == 1 && stats.groups.iter().all(done)
        })
    })
    .await
}

/// Worker, sweeper and outbox of one process.
struct Services {
    worker: support::RunningWorker,
    others: tokio::task::JoinSet<()>,
}

impl Services {
    fn start(
        system: &System,
        deliveries: DeliveryFile,
        step_observer: Option<Arc<dyn StepObserver>>,
    ) -> Result<Self> {
        let step_observer =
            step_observer.unwrap_or_else(|| Arc::new(headwater_issue::NoStepObserver));
        let config = WorkerConfig {
            claim_ttl: CLAIM_TTL,
            heartbeat_every: CLAIM_TTL / 5,
            step_observer: Arc::clone(&step_observer),
            ..WorkerConfig::default()
        };
        let worker = system.start(RunLog::default().handler(), config)?;
        let options =
            SweepOptions { nudge_overdue: Duration::from_millis(300), ..SweepOptions::default() };
        let sweeper = Sweeper::new(
            Arc::clone(&system.store),
            system.nudger.clone(),
            Some(worker.worker.clone()),
            SweeperConfig { every: Duration::from_millis(100), options },
        )?;
        let outbox = OutboxConfig {
            ttl: CLAIM_TTL,
            deadline: CLAIM_TTL / 2,
            every: Duration::from_millis(100),
            step_observer,
            ..OutboxConfig::default()
        };
        let outbox = system.outbox(deliveries, outbox)?;
        let mut others = tokio::task::JoinSet::new();
        others.spawn(async move { sweeper.run(std::future::pending()).await });
        others.spawn(async move { outbox.run(std::future::pending()).await });
        Ok(Self { worker, others })
    }

    async fn stop(mut self) -> Result<()> {
        self.others.shutdown().await;
        self.worker.stop().await
    }
}

/// Delivers into a file, which survives the process.
struct DeliveryFile(File);

impl DeliveryFile {
    fn open(path: &std::path::Path) -> Result<Self> {
        Ok(Self(OpenOptions::new().append(true).open(path)?))
    }
}

#[async_trait]
impl Deliver for DeliveryFile {
    async fn deliver(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        let line = format!("{} {}\n", row.idempotency_key, row.payload);
        (&self.0).write_all(line.as_bytes()).map_err(|error| DeliverError::Retry(error.to_string()))
    }
}

/// Kills the process right after the n-th occurrence of a step.
#[derive(Debug)]
struct KillAfter {
    step: String,
    left: AtomicUsize,
}

impl StepObserver for KillAfter {
    fn on_step(&self, step: ProcessingStep, _: IssueId) {
        if format!("{step:?}") == self.step && self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            die();
        }
    }
}

fn die() -> ! {
    let pid = rustix::process::getpid();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL)
        .expect("a process can signal itself");
    unreachable!("SIGKILL ends the process")
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a role that other tests of this file start as a process of its own"]
async fn victim() -> Result<()> {
    let variable = |name: &str| std::env::var(name).with_context(|| format!("{name} is not set"));
    let (step, occurrence) = (variable("STEP")?, variable("OCCURRENCE")?.parse()?);
    let backends = Backends::named(&variable("DATABASE")?, &variable("STREAMS")?);
    let deliveries = DeliveryFile::open(variable("LETTERS")?.as_ref())?;
    let step_observer: Arc<dyn StepObserver> =
        Arc::new(KillAfter { step: step.clone(), left: AtomicUsize::new(occurrence) });
    let config =
        InboxConfig { step_observer: Arc::clone(&step_observer), ..InboxConfig::default() };
    let system = System::with(&backends, config).await?;
    let services = Services::start(&system, deliveries, Some(step_observer))?;
    for (issue, event) in all_events() {
        let recorded = system.record(issue, event).await?;
        ensure!(!recorded.duplicate, "the backends are new");
        println!("CONFIRMED {issue}/{event}");
    }
    if step == "Acknowledged" {
        // The queue acknowledges after the handler has returned, which only the stream shows.
        system.wait_processed().await?;
        wait_acknowledged(&system).await?;
        die();
    }
    tokio::time::sleep(LONG).await;
    services.stop().await
}
