//! Redis may lose all data or be unavailable at any time: every event takes effect once, and processing continues.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
use headwater_issue::{
    EventLogFilter, InboxConfig, IssueFilter, Resolution, SweepOptions, Sweeper, SweeperConfig,
    WorkerConfig,
};
use headwater_testkit::{Proxy, Redis, RedisReply, unique};
use support::{Backends, DeliveryLog, Gate, LONG, RunLog, RunningWorker, System, wait_until};
use tokio::task::JoinSet;

const ISSUES: usize = 20;
const WRITERS: usize = 4;

/// One process: a worker with its sweeper and its outbox.
struct Member {
    worker: RunningWorker,
    others: JoinSet<()>,
}

impl Member {
    fn start(system: &System, run_log: &RunLog, deliveries: &DeliveryLog) -> Result<Self> {
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
        let outbox = system.outbox(deliveries.clone(), Default::default())?;
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

/// Records events from several senders until `stop`.
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
                // Recording waits only for the database, so it succeeds while Redis is unavailable.
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

/// Waits until 60 more events are recorded.
async fn wait_more_recorded(recorded: &AtomicUsize) -> Result<()> {
    let goal = recorded.load(Ordering::SeqCst) + 60;
    wait_until("load", || async { recorded.load(Ordering::SeqCst) >= goal }).await
}

/// Waits until 60 more events are processed.
async fn wait_more_processed(system: &System) -> Result<()> {
    let processed =
        || async { system.store.check_consistency(1).await.expect("the store replies").processed };
    let goal = processed().await + 60;
    wait_until("more processed events", || async { processed().await >= goal }).await
}

async fn assert_survives_redis_failures(database: &Backends) -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let streams = redis.url_at(proxy.addr());
    let backends = Backends::named(&database.database, &streams);
    let (run_log, deliveries) = (RunLog::default(), DeliveryLog::default());
    let first = Arc::new(System::with(&backends, InboxConfig::default()).await?);
    let second = System::with(&backends, InboxConfig::default()).await?;
    let members = [
        Member::start(&first, &run_log, &deliveries)?,
        Member::start(&second, &run_log, &deliveries)?,
    ];
    let (stop, recorded) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let loading = tokio::spawn(load(Arc::clone(&first), Arc::clone(&stop), Arc::clone(&recorded)));

    wait_more_recorded(&recorded).await?;
    redis.command(&["FLUSHALL"])?;
    wait_more_recorded(&recorded).await?;
    wait_more_processed(&first).await?;

    redis.kill9()?;
    wait_more_recorded(&recorded).await?;
    // While Redis is unavailable, the sweep passes issues to the workers.
    wait_more_processed(&first).await?;
    redis.restart()?;
    wait_more_recorded(&recorded).await?;

    proxy.cut()?;
    wait_more_recorded(&recorded).await?;
    wait_more_processed(&first).await?;
    proxy.heal()?;
    wait_more_recorded(&recorded).await?;
    redis.command(&["FLUSHALL"])?;

    stop.store(true, Ordering::SeqCst);
    loading.await?;
    first.wait_processed().await?;
    wait_until("all replies to be delivered", || async {
        first.store.backlog().await.expect("the store replies").outbox_pending == 0
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
    deliveries.assert_one_reply_each(ids);
    println!("{report}; {} runs, {} deliveries", run_log.runs().len(), deliveries.deliveries());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn with_sqlite_every_event_is_processed_once_while_redis_is_flushed_killed_and_disconnected()
-> Result<()> {
    assert_survives_redis_failures(&Backends::directory()?).await
}

#[cfg(feature = "postgres")]
#[tokio::test(flavor = "multi_thread")]
async fn with_postgres_every_event_is_processed_once_while_redis_is_flushed_killed_and_disconnected()
-> Result<()> {
    let postgres = headwater_testkit::Postgres::shared()?.database()?;
    assert_survives_redis_failures(&Backends::named(&postgres.url(), "")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_started_while_redis_is_unavailable_works_and_consumes_nudges_after_recovery()
-> Result<()> {
    let redis = Redis::start()?;
    let database = Backends::directory()?;
    let backends = Backends::named(&database.database, &redis.url());
    let (run_log, deliveries) = (RunLog::default(), DeliveryLog::default());
    let system = System::at(&backends).await?;
    redis.kill9()?;
    let member = Member::start(&system, &run_log, &deliveries)?;
    let event = unique("unavailable");
    system.record("1", &event).await?;
    system.wait_processed().await?;

    redis.restart()?;
    let stream = headwater_stream::StreamName::new(headwater_issue::STREAM)?;
    wait_until("the worker to take nudges", || async {
        let event = unique("recovered");
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

#[tokio::test(flavor = "multi_thread")]
async fn a_run_goes_on_while_redis_is_unreachable_for_longer_than_a_member_stays_in_its_group()
-> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let database = Backends::directory()?;
    let backends = Backends::named(&database.database, &redis.url_at(proxy.addr()));
    let system = System::at(&backends).await?;
    let gate = Gate::default();
    let handler = {
        let gate = gate.clone();
        move |_run| {
            let gate = gate.clone();
            async move {
                gate.wait().await;
                Ok(Resolution::default())
            }
        }
    };
    let worker = system.start(handler, WorkerConfig::default())?;
    let leases = ["KEYS", "streaming:mq:lease:~member:issue-workers:*"];
    let members = || redis.command(&leases).expect("Redis replies").items().len();
    wait_until("the worker to join", || async { members() == 1 }).await?;
    // Without a sweeper, it comes by its nudge.
    system.record("1", "a").await?;
    gate.wait_for_arrivals(1).await?;

    proxy.stall()?;
    // A member leaves before its lease expires.
    wait_until("the lease of the member to expire", || async { members() == 0 }).await?;
    gate.open();
    system.wait_processed().await?;
    proxy.heal()?;

    wait_until("the nudge to be acknowledged", || async {
        let pending = redis.command(&["XPENDING", headwater_issue::STREAM, headwater_issue::GROUP]);
        pending.expect("Redis replies").items().first().and_then(RedisReply::int) == Some(0)
    })
    .await?;
    worker.stop().await?;
    assert_eq!(gate.arrivals(), 1, "one run");
    system.assert_consistent().await?;
    Ok(())
}
