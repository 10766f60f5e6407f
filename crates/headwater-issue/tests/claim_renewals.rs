//! What running issues cost PostgreSQL: claims are renewed at their interval, newer events are found by reading, and a
//! renewal is a HOT update, which leaves nothing for a vacuum of the indexes.
#![cfg(feature = "postgres")]
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
use headwater_issue::{
    Claim, ClaimEpoch, ClaimOptions, DebounceWindow, HandlerError, IssueId, NewEvent, Nudger,
    OnNewEvent, Resolution, Run, Store, StoreOptions, Worker, WorkerConfig, connect,
};
use headwater_queue::Queue;
use headwater_testkit::{Database, Postgres, wait_until};
use tokio::sync::Notify;

const ISSUES: usize = 64;
const LIMIT: Duration = Duration::from_secs(60);

fn event(issue: usize, key: &str) -> NewEvent {
    NewEvent {
        integration: "main".into(),
        external_project_id: "project".into(),
        external_issue_id: issue.to_string(),
        source: "github".into(),
        event_type: "comment".into(),
        dedup_key: Some(format!("{issue}-{key}")),
        trace: None,
        payload: r#"{"action":"created"}"#.into(),
    }
}

async fn open(database: &Database) -> Result<Arc<dyn Store>> {
    let store = connect(&database.url(), &StoreOptions::default()).await?;
    store.ensure_integration("main", "github").await?;
    Ok(store)
}

async fn record(store: &dyn Store) -> Result<Vec<IssueId>> {
    let mut issues = Vec::new();
    for issue in 0..ISSUES {
        let recorded = store.record(&[event(issue, "a")], &DebounceWindow::default()).await;
        issues.push(recorded.into_iter().next().unwrap()?.issue_id);
    }
    Ok(issues)
}

/// Updates of `issues`, and how many of them were HOT. The statistics of a session are complete when it has ended.
fn updates(database: &Database) -> Result<(u64, u64)> {
    let sessions = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()";
    let have_ended = || database.query(sessions).is_ok_and(|count| count == "0");
    wait_until("the sessions to end", LIMIT, have_ended)?;
    let counts = database.query(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'issues'",
    )?;
    let (all, hot) = counts.split_once('|').unwrap();
    Ok((all.parse()?, hot.parse()?))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_of_a_claim_is_a_hot_update() -> Result<()> {
    const RENEWALS: usize = 50;
    // A server of its own: a long transaction of another test would keep old row versions alive.
    let server = Postgres::start()?;
    let database = server.database()?;
    let store = open(&database).await?;
    let issues = record(store.as_ref()).await?;
    let won = store.claim(&issues, &ClaimOptions::new("worker")).await?;
    let claims: Vec<(IssueId, ClaimEpoch)> = won
        .into_iter()
        .map(|claim| match claim {
            Claim::Won(claimed) => (claimed.issue.id, claimed.epoch),
            other => panic!("{other:?}"),
        })
        .collect();
    store.close().await;
    let before = updates(&database)?;

    let store = open(&database).await?;
    for _ in 0..RENEWALS {
        store.heartbeat(&claims, Duration::from_secs(60)).await?;
        store.check_claims(&claims).await?;
    }
    store.close().await;
    let after = updates(&database)?;
    let (all, hot) = (after.0 - before.0, after.1 - before.1);
    let dead = database.query(
        "SELECT n_dead_tup, pg_relation_size('issues'), pg_indexes_size('issues')
         FROM pg_stat_user_tables WHERE relname = 'issues'",
    )?;
    println!(
        "{all} updates, {hot} HOT; dead rows, bytes of the table, bytes of the indexes: {dead}"
    );
    assert_eq!(all, (RENEWALS * ISSUES) as u64, "a check updates nothing");
    assert!(hot * 100 >= all * 95, "{hot} of {all} updates are HOT");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn looking_for_newer_events_writes_nothing_and_finds_them() -> Result<()> {
    // Between two renewals there are 60 checks.
    let (heartbeat_every, newer_events_every) = (Duration::from_secs(3), Duration::from_millis(50));
    let database = Postgres::shared()?.database()?;
    let store = open(&database).await?;
    let issues = record(store.as_ref()).await?;
    let streams = headwater_stream::connect("embedded:memory", &Default::default()).await?;
    let (running, release) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let handler = {
        let (running, release) = (Arc::clone(&running), Arc::clone(&release));
        move |run: Run| {
            let (running, release) = (Arc::clone(&running), Arc::clone(&release));
            async move {
                running.fetch_add(1, Ordering::SeqCst);
                // The second run of an issue, with all events, ends.
                if run.events().len() == 1 {
                    release.notified().await;
                }
                Ok::<_, HandlerError>(Resolution::default())
            }
        }
    };
    let config = WorkerConfig {
        concurrency: ISSUES,
        claim_ttl: heartbeat_every * 4,
        heartbeat_every,
        newer_events_every,
        on_new_event: OnNewEvent::Supersede { times_max: 3 },
        ..WorkerConfig::default()
    };
    let worker =
        Worker::new(Arc::clone(&store), Nudger::new(Arc::clone(&streams)), handler, config)?;
    let stop = Arc::new(Notify::new());
    let working = tokio::spawn({
        let (worker, stop, queue) = (worker.clone(), Arc::clone(&stop), Queue::new(streams));
        async move { worker.run(&queue, stop.notified()).await }
    });
    assert_eq!(worker.offer(issues.iter().copied()), ISSUES);
    wait_until("all runs", LIMIT, || running.load(Ordering::SeqCst) == ISSUES)?;
    let started = std::time::Instant::now();
    // Nothing to wait for: the test is about what does not happen meanwhile.
    tokio::time::sleep(heartbeat_every * 2).await;

    // A newer event supersedes its run within a few checks, long before the next renewal.
    let recorded = store.record(&[event(0, "b")], &DebounceWindow::default()).await.remove(0)?;
    let noticed = std::time::Instant::now();
    wait_until("the second run", LIMIT, || running.load(Ordering::SeqCst) == ISSUES + 1)?;
    let is_idle = || {
        let id = recorded.issue_id;
        let sql = format!("SELECT processing_status FROM issues WHERE id = {id}");
        database.query(&sql).is_ok_and(|status| status == "idle")
    };
    wait_until("the end of the second run", LIMIT, is_idle)?;
    let noticed = noticed.elapsed();
    release.notify_waiters();
    wait_until("the end of all runs", LIMIT, || worker.in_flight() == 0)?;
    let renewals = started.elapsed().as_millis() / heartbeat_every.as_millis() + 2;
    stop.notify_one();
    working.await?;
    store.close().await;

    let (all, hot) = updates(&database)?;
    // Per issue: claimed and completed, for the first one also superseded, recorded and again; the rest are renewals.
    let most = (ISSUES * 2 + 5) as u64 + ISSUES as u64 * renewals as u64;
    println!("{all} updates, {hot} HOT, newer event noticed after {noticed:?}");
    assert!(all <= most, "{all} updates of {ISSUES} issues, {most} at most");
    Ok(())
}
