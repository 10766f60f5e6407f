//! Throughput of the whole flow, compared with the same work as raw SQL in the same process on the same machine.
//!
//! `record`: 64 clients of one inbox, compared with one transaction per event. `claim + complete`: a worker with a
//! no-op handler, from the nudges in the stream to the last commit, compared with one transaction per job. `webhook`:
//! the 99th percentile latency of 64 clients that record for one issue while its handler runs for 5 s, compared with an
//! idle issue. Each figure is the best of [`ROUNDS`] rounds.
//!
//! `HEADWATER_BENCH_EVENTS` sets how many events a round has (default 4000).
#![allow(clippy::unwrap_used, reason = "a benchmark that panics has failed")]

mod shared;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use headwater_issue::{
    HandlerError, Inbox, InboxConfig, IssueId, NewEvent, Nudger, ProcessingStep, Resolution, Run,
    StepObserver, Store, Worker, WorkerConfig,
};
use headwater_queue::Queue;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;

use self::shared::{
    CLIENTS, ISSUES, ROUNDS, Raw, event, events_of_a_round, on_each_store, per_second, report,
};

const LONG_RUN: Duration = Duration::from_secs(5);

fn main() -> Result<()> {
    on_each_store(measure)
}

/// The measured services of a process.
struct Services {
    store: Arc<dyn Store>,
    nudger: Nudger,
    inbox: Arc<Inbox>,
    queue: Queue,
}

async fn measure(name: &str, store: Arc<dyn Store>, raw: Raw) -> Result<()> {
    let events = events_of_a_round();
    let streams =
        headwater_stream::connect("embedded:memory", &headwater_stream::Options::default()).await?;
    let nudger = Nudger::new(Arc::clone(&streams));
    let inbox = Inbox::new(Arc::clone(&store), nudger.clone(), InboxConfig::default())?;
    let services = Services { store, nudger, inbox: Arc::new(inbox), queue: Queue::new(streams) };

    let (mut record, mut raw_record) = (0.0_f64, 0.0_f64);
    let (mut run, mut raw_run) = (0.0_f64, 0.0_f64);
    for round in 0..ROUNDS {
        record =
            record.max(record_all(&services, &format!("shared-{round}"), events, ISSUES).await?.0);
        work_all(&services).await?;
        let raw_events = raw.clone();
        let record_raw = move |n| {
            let raw = raw_events.clone();
            async move { raw.record(&event(&format!("raw-{round}"), n, ISSUES)).await }
        };
        raw_record = raw_record.max(per_second(CLIENTS, events, record_raw).await?);
        while services.store.backlog().await?.queued > 0 {
            headwater_issue::Sweeper::new(
                Arc::clone(&services.store),
                services.nudger.clone(),
                None,
                headwater_issue::SweeperConfig {
                    options: headwater_issue::SweepOptions {
                        nudge_overdue: Duration::from_millis(1),
                        ..Default::default()
                    },
                    ..Default::default()
                },
            )?
            .run_once()
            .await?;
            work_all(&services).await?;
        }

        record_all(&services, &format!("jobs-{round}"), events, events).await?;
        run = run.max(work_all(&services).await?);
        let (_, issues) =
            record_all(&services, &format!("raw-jobs-{round}"), events, events).await?;
        let (raw, issues) = (raw.clone(), Arc::new(issues));
        let run_raw = move |n: usize| {
            let (raw, issues) = (raw.clone(), Arc::clone(&issues));
            async move { raw.run(issues[n]).await }
        };
        raw_run = raw_run.max(per_second(CLIENTS, events, run_raw).await?);
    }
    assert!(headwater_issue::check_consistency(services.store.as_ref()).await?.is_consistent());
    report(name, "record, 64 clients", record, raw_record, 2.0);
    report(name, "claim + complete", run, raw_run, 3.0);
    webhook_beside_a_long_run(name, &services).await
}

/// Records with 64 clients of one inbox: the rate, and the issues.
async fn record_all(
    services: &Services,
    prefix: &str,
    events: usize,
    issues: usize,
) -> Result<(f64, Vec<IssueId>)> {
    let seen = Arc::new(std::sync::Mutex::new(Vec::with_capacity(events)));
    let (inbox, prefix) = (Arc::clone(&services.inbox), prefix.to_owned());
    let speed = {
        let seen = Arc::clone(&seen);
        per_second(CLIENTS, events, move |n| {
            let (inbox, seen) = (Arc::clone(&inbox), Arc::clone(&seen));
            let event = event(&prefix, n, issues);
            async move {
                let recorded = inbox.record(event).await?;
                seen.lock().unwrap().push(recorded.issue_id);
                Ok(())
            }
        })
        .await?
    };
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    Ok((speed, seen))
}

/// Records when the last run is committed.
#[derive(Debug)]
struct Finish {
    left: AtomicUsize,
    at: std::sync::Mutex<Option<Instant>>,
    crossed: Notify,
}

impl StepObserver for Finish {
    fn on_step(&self, step: ProcessingStep, _: IssueId) {
        if step == ProcessingStep::Completed && self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            *self.at.lock().unwrap() = Some(Instant::now());
            self.crossed.notify_one();
        }
    }
}

/// Processes all queued issues; returns runs per second, from the start of the worker to the last commit.
async fn work_all(services: &Services) -> Result<f64> {
    let queued = services.store.backlog().await?.queued as usize;
    let finish = Arc::new(Finish {
        left: AtomicUsize::new(queued),
        at: std::sync::Mutex::default(),
        crossed: Notify::new(),
    });
    let handler = |_: Run| async { Ok::<_, HandlerError>(Resolution::new()) };
    let step_observer: Arc<dyn StepObserver> = Arc::clone(&finish) as Arc<dyn StepObserver>;
    let config = WorkerConfig { concurrency: 256, step_observer, ..WorkerConfig::default() };
    let worker =
        Worker::new(Arc::clone(&services.store), services.nudger.clone(), handler, config)?;
    let started = Instant::now();
    worker.run(&services.queue, finish.crossed.notified()).await;
    let at = finish.at.lock().unwrap().unwrap_or_else(Instant::now);
    Ok(queued as f64 / (at - started).as_secs_f64())
}

/// Records for one issue with 64 clients for some time; returns the sorted latencies.
async fn latencies(services: &Services, prefix: &str, time: Duration) -> Result<Vec<Duration>> {
    let until = Instant::now() + time;
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (inbox, prefix) = (Arc::clone(&services.inbox), format!("{prefix}-{client}"));
        clients.spawn(async move {
            let mut latencies = Vec::new();
            for n in 0.. {
                if Instant::now() >= until {
                    break;
                }
                let event = NewEvent {
                    external_project_id: "webhooks".into(),
                    external_issue_id: "1".into(),
                    ..event(&prefix, n, 1)
                };
                let started = Instant::now();
                inbox.record(event).await?;
                latencies.push(started.elapsed());
                // About a hundred events per second and client.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            anyhow::Ok(latencies)
        });
    }
    let mut all = Vec::new();
    while let Some(latencies) = clients.join_next().await {
        all.extend(latencies??);
    }
    all.sort_unstable();
    Ok(all)
}

async fn webhook_beside_a_long_run(name: &str, services: &Services) -> Result<()> {
    let p99 = |sorted: &[Duration]| sorted[sorted.len() * 99 / 100];
    let idle = latencies(services, &format!("{name}-idle"), LONG_RUN).await?;
    while services.store.backlog().await?.queued > 0 {
        work_all(services).await?;
    }

    let (started_tx, has_started) = oneshot::channel();
    let started_tx = Arc::new(std::sync::Mutex::new(Some(started_tx)));
    let handler = move |_: Run| {
        let started_tx = started_tx.lock().unwrap().take();
        async move {
            if let Some(started_tx) = started_tx {
                let _ = started_tx.send(());
                tokio::time::sleep(LONG_RUN + Duration::from_secs(1)).await;
            }
            Ok::<_, HandlerError>(Resolution::new())
        }
    };
    let config = WorkerConfig::default();
    let worker =
        Worker::new(Arc::clone(&services.store), services.nudger.clone(), handler, config)?;
    latencies(services, &format!("{name}-first"), Duration::from_millis(50)).await?;
    let (stop, stopped) = oneshot::channel::<()>();
    let queue = services.queue.clone();
    let running =
        tokio::spawn(async move { worker.run(&queue, async { drop(stopped.await) }).await });
    has_started.await?;
    let busy = latencies(services, &format!("{name}-busy"), LONG_RUN).await?;
    drop(stop);
    running.await?;

    let (idle, busy) = (p99(&idle), p99(&busy));
    let reached = busy < Duration::from_millis(100) && busy <= idle * 2;
    let status = if reached { "reached" } else { "MISSED" };
    println!(
        "{name:9} webhook p99 while its handler runs {busy:.1?}, idle {idle:.1?} (to reach 100 ms and 2 x: {status})"
    );
    Ok(())
}
