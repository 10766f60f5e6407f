//! Redis may lose everything at any time, or be away: every event is processed exactly once in effect, and work goes on.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
use headwater_issue::{
    EventLogFilter, InboxConfig, IssueFilter, SweepOptions, Sweeper, SweeperConfig, WorkerConfig,
};
use headwater_testkit::{Proxy, Redis, unique};
use support::{Backends, DeliveryLog, LONG, RunLog, RunningWorker, System, wait_until};
use tokio::task::JoinSet;

const ISSUES: usize = 20;
const WRITERS: usize = 4;

/// One process of a fleet: a worker with its sweeper and its outbox.
struct Member {
    worker: RunningWorker,
    others: JoinSet<()>,
}

impl Member {
    fn start(system: &System, run_log: &RunLog, letters: &DeliveryLog) -> Result<Self> {
        let config = WorkerConfig {
            claim_ttl: Duration::from_secs(5),
            heartbeat_every: Duration::from_secs(1),
            ..WorkerConfig::default()
        };
        let worker = system.start(run_log.handler(), config)?;
        let options =
            SweepOptions { nudge_overdue: Duration::from_millis(500), ..SweepOptions::default() };
        let sweeper = Sweeper::new(
            Arc::clone(&system.store),
            system.nudger.clone(),
            Some(worker.worker.clone()),
            SweeperConfig { every: Duration::from_millis(200), options },
        )?;
        let outbox = system.outbox(letters.clone(), Default::default())?;
        let mut others = JoinSet::new();
        others.spawn(async move { sweeper.run(std::future::pending()).await });
        others.spawn(async move { outbox.run(std::future::pending()).await });
        Ok(Self { worker, others })
    }

    async fn stop(mut self) -> Result<()> {
        self.others.shutdown().await;
        self.worker.stop().await
    }
}

/// Load from many senders until it is told to stop; each event is recorded once for sure.
async fn load(system: Arc<System>, stop: Arc<AtomicBool>, recorded: Arc<AtomicUsize>) {
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let (system, stop) = (Arc::clone(&system), Arc::clone(&stop));
        let recorded = Arc::clone(&recorded);
        writers.spawn(async move {
            for number in 0.. {
                if stop.load(Ordering::SeqCst) {
                    break;
                }
                let issue = ((number * WRITERS + writer) % ISSUES).to_string();
                let event = format!("{writer}-{number}");
                // A webhook waits for the database only, so it succeeds whatever Redis does.
                let done = tokio::time::timeout(LONG, system.record(&issue, &event)).await;
                done.expect("in time").expect("it is recorded");
                recorded.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(25)).await;
            }
        });
    }
    while let Some(done) = writers.join_next().await {
        done.expect("no writer fails");
    }
}

/// Waits until so many events more are recorded.
async fn more_load(recorded: &AtomicUsize) -> Result<()> {
    let goal = recorded.load(Ordering::SeqCst) + 60;
    wait_until("load", || async { recorded.load(Ordering::SeqCst) >= goal }).await
}

/// Waits until so many events more are processed.
async fn more_work(system: &System) -> Result<()> {
    let processed =
        || async { system.store.check_consistency(1).await.expect("it answers").processed };
    let goal = processed().await + 60;
    wait_until("work to go on", || async { processed().await >= goal }).await
}

async fn survives(database: &Backends) -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let streams = redis.url_at(proxy.addr());
    let backends = Backends::named(&database.database, &streams);
    let (run_log, letters) = (RunLog::default(), DeliveryLog::default());
    let first = Arc::new(System::with(&backends, InboxConfig::default()).await?);
    let second = System::with(&backends, InboxConfig::default()).await?;
    let members =
        [Member::start(&first, &run_log, &letters)?, Member::start(&second, &run_log, &letters)?];
    let (stop, recorded) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let loading = tokio::spawn(load(Arc::clone(&first), Arc::clone(&stop), Arc::clone(&recorded)));

    more_load(&recorded).await?;
    redis.command(&["FLUSHALL"])?;
    more_load(&recorded).await?;
    more_work(&first).await?;

    redis.kill9()?;
    more_load(&recorded).await?;
    // Redis is away: the sweep is the way of delivery.
    more_work(&first).await?;
    redis.restart()?;
    more_load(&recorded).await?;

    proxy.cut()?;
    more_load(&recorded).await?;
    more_work(&first).await?;
    proxy.heal()?;
    more_load(&recorded).await?;
    redis.command(&["FLUSHALL"])?;

    stop.store(true, Ordering::SeqCst);
    loading.await?;
    first.wait_processed().await?;
    wait_until("all replies to be delivered", || async {
        first.store.backlog().await.expect("it answers").outbox_pending == 0
    })
    .await?;
    for member in members {
        member.stop().await?;
    }

    let report = first.assert_consistent().await?;
    assert_eq!(report.recorded, recorded.load(Ordering::SeqCst) as u64);
    assert_eq!(report.processed, report.recorded);
    let mut ids = Vec::new();
    for issue in first.store.issues(&IssueFilter::default(), 1000).await? {
        for log in first.store.event_logs(issue.id, &EventLogFilter::default(), 1000).await? {
            ids.push(log.id);
        }
    }
    assert_eq!(ids.len() as u64, report.recorded);
    letters.assert_one_reply_each(ids);
    println!("{report}; {} runs, {} deliveries", run_log.runs().len(), letters.deliveries());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn with_sqlite_every_event_is_processed_once_though_redis_is_flushed_killed_and_cut_off()
-> Result<()> {
    survives(&Backends::directory()?).await
}

#[cfg(feature = "postgres")]
#[tokio::test(flavor = "multi_thread")]
async fn with_postgres_every_event_is_processed_once_though_redis_is_flushed_killed_and_cut_off()
-> Result<()> {
    let postgres = headwater_testkit::Postgres::shared()?.database()?;
    survives(&Backends::named(&postgres.url(), "")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_starts_while_redis_is_away_works_and_takes_nudges_once_it_is_back()
-> Result<()> {
    let redis = Redis::start()?;
    let database = Backends::directory()?;
    let backends = Backends::named(&database.database, &redis.url());
    let (run_log, letters) = (RunLog::default(), DeliveryLog::default());
    let system = System::at(&backends).await?;
    redis.kill9()?;
    let member = Member::start(&system, &run_log, &letters)?;
    let event = unique("away");
    system.record("1", &event).await?;
    system.wait_processed().await?;

    redis.restart()?;
    let stream = headwater_stream::StreamName::new(headwater_issue::STREAM)?;
    wait_until("the worker to take nudges", || async {
        let event = unique("back");
        system.record("2", &event).await.expect("it is recorded");
        let stats = system.streams.stats(&stream).await.ok().flatten();
        let groups = stats.map(|stats| stats.groups).unwrap_or_default();
        groups.iter().any(|group| group.last_delivered > headwater_stream::EntryId::MIN)
    })
    .await?;
    system.wait_processed().await?;
    member.stop().await?;
    system.assert_consistent().await?;
    Ok(())
}
