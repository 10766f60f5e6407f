//! Processes with clocks that are wrong by years: only the database's clock matters.
#![cfg(feature = "postgres")]

mod support;

use std::time::Duration;

use anyhow::Result;
use headwater_issue::{
    Claim, ClaimOptions, DebounceWindow, DeliverError, InboxConfig, IssueRetryPolicy, OutboxConfig,
    OutboxRow, SweepOptions, WorkerConfig,
};
use headwater_stream::Backoff;
use headwater_stream::clock::{TestClock, Timestamp};
use sqlx::{Connection as _, PgConnection};
use support::{Backends, DeliveryLog, LONG, RunLog, System, event_of};

const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Two processes on the same servers, with clocks in 1971 and 2100.
async fn early_and_late(backends: &Backends, config: InboxConfig) -> Result<(System, System)> {
    let early = TestClock::at(Timestamp::from_millis(0).after(YEAR));
    let late = TestClock::at(Timestamp::from_millis(0).after(YEAR * 130));
    let early = System::with(&backends.with_clock(early), config.clone()).await?;
    Ok((early, System::with(&backends.with_clock(late), config).await?))
}

/// Current time of the database.
async fn now(backends: &Backends) -> Result<Timestamp> {
    let mut postgres = PgConnection::connect(&backends.database).await?;
    let query = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint";
    let ms: i64 = sqlx::query_scalar(query).fetch_one(&mut postgres).await?;
    Ok(Timestamp::from_millis(u64::try_from(ms)?))
}

#[tokio::test]
async fn a_debounce_window_uses_the_clock_of_the_database() -> Result<()> {
    let backends = Backends::servers()?;
    let debounce =
        DebounceWindow { quiet_for: LONG * 10, max_wait: LONG * 10, ..DebounceWindow::default() };
    let config = InboxConfig { debounce, ..InboxConfig::default() };
    let (early, late) = early_and_late(&backends, config).await?;
    let before = now(&backends).await?;
    let recorded = early.record("1", "a").await?;
    let again = late.record("1", "b").await?;
    let after = now(&backends).await?;
    for not_before in [recorded.not_before, again.not_before] {
        let not_before = not_before.expect("it waits");
        assert!(
            before.after(debounce.quiet_for) <= not_before
                && not_before <= after.after(debounce.quiet_for)
        );
    }
    // Neither process claims it too early.
    for system in [&early, &late] {
        let claim = system.store.claim(&[recorded.issue_id], &ClaimOptions::new("w")).await?;
        let Claim::NotYet { wait, .. } = claim[0] else { panic!("{claim:?}") };
        assert!(wait <= debounce.quiet_for && wait > debounce.quiet_for / 2, "{wait:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_sweep_ignores_the_clock_of_its_process() -> Result<()> {
    let backends = Backends::servers()?;
    let (early, late) = early_and_late(&backends, InboxConfig::default()).await?;
    let claimed = early.record("1", "a").await?.issue_id;
    early.record("2", "a").await?;
    early.store.claim(&[claimed], &ClaimOptions { ttl: LONG, ..ClaimOptions::new("w") }).await?;
    let options = SweepOptions { nudge_overdue: LONG, ..SweepOptions::default() };
    for system in [&early, &late] {
        let swept = system.store.sweep(&options).await?;
        assert!(swept.nudges.is_empty() && swept.requeued == 0, "{swept:?}");
    }
    // A claim that expired by the database's clock is expired for both.
    backends.expire_claims(LONG).await?;
    assert_eq!(early.store.sweep(&options).await?.requeued, 1);
    Ok(())
}

#[tokio::test]
async fn the_outbox_uses_the_clock_of_the_database() -> Result<()> {
    let backends = Backends::servers()?;
    let (early, late) = early_and_late(&backends, InboxConfig::default()).await?;
    let run_log = RunLog::default();
    let worker = early.worker(run_log.handler(), WorkerConfig::default())?;
    for issue in ["1", "2"] {
        let issue_id = early.record(issue, "a").await?.issue_id;
        worker.process_issue(issue_id).await;
    }
    // The early process has taken one row; the late one gets only the other, and its failure is retried later.
    assert_eq!(early.store.take_outbox("early", 1, LONG).await?.len(), 1);
    let retry = IssueRetryPolicy { backoff: Backoff::Fixed(LONG * 10), ..Default::default() };
    let fails = |_: OutboxRow| async { Err(DeliverError::Retry("busy".into())) };
    let failing = late.outbox(fails, OutboxConfig { retry, ..OutboxConfig::default() })?;
    assert_eq!(failing.run_once().await?, 1);
    let deliveries = DeliveryLog::default();
    for system in [&early, &late] {
        let outbox = system.outbox(deliveries.clone(), OutboxConfig::default())?;
        assert_eq!(outbox.run_once().await?, 0, "nothing is due");
    }
    assert_eq!(early.store.backlog().await?.outbox_pending, 2);
    Ok(())
}

#[tokio::test]
async fn processes_with_clocks_a_century_apart_process_events_together() -> Result<()> {
    let backends = Backends::servers()?;
    let (early, late) = early_and_late(&backends, InboxConfig::default()).await?;
    let run_log = RunLog::default();
    let worker = late.start(run_log.handler(), WorkerConfig::default())?;
    let mut ids = Vec::new();
    for issue in ["1", "2", "3"] {
        ids.push(early.inbox.record(event_of(issue, "a")).await?.event_log_id);
    }
    early.wait_processed().await?;
    worker.stop().await?;
    let deliveries = DeliveryLog::default();
    early.outbox(deliveries.clone(), OutboxConfig::default())?.run_once().await?;
    deliveries.assert_one_reply_each(ids);
    early.assert_consistent().await?;
    Ok(())
}
