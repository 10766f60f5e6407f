//! Throughput of the stores, compared with the same statements as raw SQL in the same process on the same machine.
//!
//! `record`: 64 clients whose events share transactions, compared with one transaction per event. `claim + complete`:
//! batches of issues, compared with one transaction per job. Prints a line per store and path with both rates and their
//! ratio, which must be at least 2.0 and 3.0. Each figure is the best of [`ROUNDS`] rounds.
//!
//! `HEADWATER_BENCH_EVENTS` sets how many events a round has (default 4000).
#![allow(clippy::unwrap_used, reason = "a benchmark that panics has failed")]

mod shared;

use std::sync::Arc;

use headwater_issue::{
    Claim, ClaimOptions, DebounceWindow, IssueId, NewEvent, Recorded, RunCompletion, Store, limits,
};
use tokio::sync::{mpsc, oneshot};

use self::shared::{
    CLIENTS, ISSUES, ROUNDS, Raw, event, events_of_a_round, on_each_store, per_second, report,
};

const WORKERS: usize = 4;

fn main() -> anyhow::Result<()> {
    on_each_store(measure)
}

async fn measure(name: &str, store: Arc<dyn Store>, raw: Raw) -> anyhow::Result<()> {
    let events = events_of_a_round();
    let (mut record, mut raw_record) = (0.0_f64, 0.0_f64);
    let (mut run, mut raw_run) = (0.0_f64, 0.0_f64);
    for round in 0..ROUNDS {
        record = record.max(record_shared(&store, round, events).await?);
        drain(&store).await?;
        raw_record = raw_record.max(record_raw(&raw, round, events).await?);
        drain(&store).await?;
        let issues = fill(&store, &format!("jobs-{round}"), events).await?;
        run = run.max(runs_batched(&store, issues).await?);
        let issues = fill(&store, &format!("raw-jobs-{round}"), events).await?;
        raw_run = raw_run.max(runs_raw(&raw, issues).await?);
    }
    assert!(store.check_consistency(1).await?.discrepancies.is_empty());
    report(name, "record, 64 clients", record, raw_record, 2.0);
    report(name, "claim + complete", run, raw_run, 3.0);
    Ok(())
}

type Waiting = (NewEvent, oneshot::Sender<headwater_issue::Result<Recorded>>);

/// Clients send their events to one committer, which records them in batches.
async fn record_shared(store: &Arc<dyn Store>, round: usize, events: usize) -> anyhow::Result<f64> {
    let (sender, mut receiver) = mpsc::channel::<Waiting>(limits::BATCH_MAX);
    let committer = tokio::spawn({
        let store = Arc::clone(store);
        async move {
            let mut waiting = Vec::new();
            while receiver.recv_many(&mut waiting, limits::BATCH_MAX).await > 0 {
                let (events, replies): (Vec<_>, Vec<_>) = waiting.drain(..).unzip();
                let recorded = store.record(&events, &DebounceWindow::default()).await;
                for (reply, recorded) in replies.into_iter().zip(recorded) {
                    let _ = reply.send(recorded);
                }
            }
        }
    });
    let speed = per_second(CLIENTS, events, move |n| {
        let sender = sender.clone();
        async move {
            let (reply, result) = oneshot::channel();
            sender.send((event(&format!("shared-{round}"), n, ISSUES), reply)).await?;
            result.await??;
            Ok(())
        }
    })
    .await?;
    committer.await?;
    Ok(speed)
}

async fn record_raw(raw: &Raw, round: usize, events: usize) -> anyhow::Result<f64> {
    let raw = raw.clone();
    per_second(CLIENTS, events, move |n| {
        let raw = raw.clone();
        async move { raw.record(&event(&format!("raw-{round}"), n, ISSUES)).await }
    })
    .await
}

/// Claims and completes everything, so that every measurement starts from the same state.
async fn drain(store: &Arc<dyn Store>) -> anyhow::Result<()> {
    let mut filter = headwater_issue::IssueFilter::default();
    loop {
        let page: Vec<IssueId> =
            store.issues(&filter, limits::BATCH_MAX).await?.iter().map(|issue| issue.id).collect();
        let Some(last) = page.last() else { return Ok(()) };
        filter.after = Some(*last);
        run_batch(store, &page).await?;
    }
}

/// Creates queued issues with one event each.
async fn fill(store: &Arc<dyn Store>, prefix: &str, issues: usize) -> anyhow::Result<Vec<IssueId>> {
    let mut ids = Vec::new();
    for first in (0..issues).step_by(limits::BATCH_MAX) {
        let last = (first + limits::BATCH_MAX).min(issues);
        let new =
            |n| NewEvent { external_issue_id: format!("{prefix}-{n}"), ..event(prefix, n, ISSUES) };
        let events: Vec<NewEvent> = (first..last).map(new).collect();
        for recorded in store.record(&events, &DebounceWindow::default()).await {
            ids.push(recorded?.issue_id);
        }
    }
    Ok(ids)
}

async fn run_batch(store: &Arc<dyn Store>, issues: &[IssueId]) -> anyhow::Result<usize> {
    let mut runs = Vec::new();
    for claim in store.claim(issues, &ClaimOptions::new("bench")).await? {
        if let Claim::Won(claimed) = claim {
            runs.push(RunCompletion {
                issue_id: claimed.issue.id,
                epoch: claimed.epoch,
                event_log_ids: claimed.events.iter().map(|event| event.id).collect(),
                ..RunCompletion::default()
            });
        }
    }
    store.complete(&runs).await?;
    Ok(runs.len())
}

async fn runs_batched(store: &Arc<dyn Store>, issues: Vec<IssueId>) -> anyhow::Result<f64> {
    let (store, total) = (Arc::clone(store), issues.len());
    // The batch size of a worker with 64 concurrent runs.
    let batches: Arc<Vec<Vec<IssueId>>> =
        Arc::new(issues.chunks(CLIENTS).map(<[_]>::to_vec).collect());
    let count = batches.len();
    let speed = per_second(WORKERS, count, move |n| {
        let (store, batches) = (Arc::clone(&store), Arc::clone(&batches));
        async move {
            anyhow::ensure!(run_batch(&store, &batches[n]).await? == batches[n].len());
            Ok(())
        }
    })
    .await?;
    Ok(speed * total as f64 / count as f64)
}

async fn runs_raw(raw: &Raw, issues: Vec<IssueId>) -> anyhow::Result<f64> {
    let (raw, issues) = (raw.clone(), Arc::new(issues));
    let total = issues.len();
    per_second(CLIENTS, total, move |n| {
        let (raw, issues) = (raw.clone(), Arc::clone(&issues));
        async move { raw.run(issues[n]).await }
    })
    .await
}
