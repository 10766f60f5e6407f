//! How fast events go through the whole flow, beside the same work as raw SQL in the same run on the same machine.
//!
//! `record`: 64 clients of one inbox, beside one transaction per event. `claim + complete`: a worker with a handler that
//! does nothing, from the nudges in the stream to the last commit, beside one job per transaction. `webhook`: the 99th
//! percentile of 64 clients that record for one issue while its handler runs for 5 s, beside the same while nothing runs.
//! Each figure is the best of [`ROUNDS`] rounds, taken in turn: what else the machine does only slows a round down.
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

/// The parts of a process that are measured.
struct Parts {
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
    let parts = Parts { store, nudger, inbox: Arc::new(inbox), queue: Queue::new(streams) };

    let (mut record, mut raw_record) = (0.0_f64, 0.0_f64);
    let (mut run, mut raw_run) = (0.0_f64, 0.0_f64);
    for round in 0..ROUNDS {
        record =
            record.max(record_all(&parts, &format!("shared-{round}"), events, ISSUES).await?.0);
        work_all(&parts).await?;
        let raw_events = raw.clone();
        let record_raw = move |n| {
            let raw = raw_events.clone();
            async move { raw.record(&event(&format!("raw-{round}"), n, ISSUES)).await }
        };
        raw_record = raw_record.max(per_second(CLIENTS, events, record_raw).await?);
        while parts.store.backlog().await?.queued > 0 {
            headwater_issue::Sweeper::new(
                Arc::clone(&parts.store),
                parts.nudger.clone(),
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
            work_all(&parts).await?;
        }

        record_all(&parts, &format!("jobs-{round}"), events, events).await?;
        run = run.max(work_all(&parts).await?);
        let (_, issues) = record_all(&parts, &format!("raw-jobs-{round}"), events, events).await?;
        let (raw, issues) = (raw.clone(), Arc::new(issues));
        let run_raw = move |n: usize| {
            let (raw, issues) = (raw.clone(), Arc::clone(&issues));
            async move { raw.run(issues[n]).await }
        };
        raw_run = raw_run.max(per_second(CLIENTS, events, run_raw).await?);
    }
    assert!(headwater_issue::check_consistency(parts.store.as_ref()).await?.is_consistent());
    report(name, "record, 64 clients", record, raw_record, 2.0);
    report(name, "claim + complete", run, raw_run, 3.0);
    webhook_beside_a_long_run(name, &parts).await
}

/// Records by 64 clients of one inbox: the speed, and the issues.
async fn record_all(
    parts: &Parts,
    prefix: &str,
    events: usize,
    issues: usize,
) -> Result<(f64, Vec<IssueId>)> {
    let seen = Arc::new(std::sync::Mutex::new(Vec::with_capacity(events)));
    let (inbox, prefix) = (Arc::clone(&parts.inbox), prefix.to_owned());
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

/// Notes when the last of so many runs is committed.
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

/// A worker that works off every issue that is queued; how many runs a second, from its start to the last commit.
async fn work_all(parts: &Parts) -> Result<f64> {
    let queued = parts.store.backlog().await?.queued as usize;
    let finish = Arc::new(Finish {
        left: AtomicUsize::new(queued),
        at: std::sync::Mutex::default(),
        crossed: Notify::new(),
    });
    let handler = |_: Run| async { Ok::<_, HandlerError>(Resolution::new()) };
    let step_observer: Arc<dyn StepObserver> = Arc::clone(&finish) as Arc<dyn StepObserver>;
    let config = WorkerConfig { concurrency: 256, step_observer, ..WorkerConfig::default() };
    let worker = Worker::new(Arc::clone(&parts.store), parts.nudger.clone(), handler, config)?;
    let started = Instant::now();
    worker.run(&parts.queue, finish.crossed.notified()).await;
    let at = finish.at.lock().unwrap().unwrap_or_else(Instant::now);
    Ok(queued as f64 / (at - started).as_secs_f64())
}

/// Records for one issue by 64 clients for a while; the latencies, sorted.
async fn latencies(parts: &Parts, prefix: &str, time: Duration) -> Result<Vec<Duration>> {
    let until = Instant::now() + time;
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (inbox, prefix) = (Arc::clone(&parts.inbox), format!("{prefix}-{client}"));
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
                // A webhook is no flood: each client sends about a hundred a second.
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

async fn webhook_beside_a_long_run(name: &str, parts: &Parts) -> Result<()> {
    let p99 = |sorted: &[Duration]| sorted[sorted.len() * 99 / 100];
    let idle = latencies(parts, &format!("{name}-idle"), LONG_RUN).await?;
    while parts.store.backlog().await?.queued > 0 {
        work_all(parts).await?;
    }

    let (begun, has_begun) = oneshot::channel();
    let begun = Arc::new(std::sync::Mutex::new(Some(begun)));
    let handler = move |_: Run| {
        let begun = begun.lock().unwrap().take();
        async move {
            if let Some(begun) = begun {
                let _ = begun.send(());
                tokio::time::sleep(LONG_RUN + Duration::from_secs(1)).await;
            }
            Ok::<_, HandlerError>(Resolution::new())
        }
    };
    let config = WorkerConfig::default();
    let worker = Worker::new(Arc::clone(&parts.store), parts.nudger.clone(), handler, config)?;
    latencies(parts, &format!("{name}-first"), Duration::from_millis(50)).await?;
    let (stop, stopped) = oneshot::channel::<()>();
    let queue = parts.queue.clone();
    let running =
        tokio::spawn(async move { worker.run(&queue, async { drop(stopped.await) }).await });
    has_begun.await?;
    let busy = latencies(parts, &format!("{name}-busy"), LONG_RUN).await?;
    drop(stop);
    running.await?;

    let (idle, busy) = (p99(&idle), p99(&busy));
    let reached = busy < Duration::from_millis(100) && busy <= idle * 2;
    let verdict = if reached { "reached" } else { "MISSED" };
    println!(
        "{name:9} webhook p99 while its handler runs {busy:.1?}, idle {idle:.1?} (to reach 100 ms and 2 x: {verdict})"
    );
    Ok(())
}
