//! Processes whose clocks are wrong by years: only the database's clock counts.
#![cfg(feature = "postgres")]

mod support;

use std::time::Duration;

use anyhow::Result;
use headwater_issue::{
    Claim, ClaimOptions, DeliverError, InboxConfig, OutboxConfig, OutboxRow, Quiet, RetryPolicy,
    SweepOptions, WorkerConfig,
};
use headwater_stream::clock::{TestClock, Timestamp};
use sqlx::{Connection as _, PgConnection};
use support::{Journal, LONG, Letters, Place, System, event_of};

const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Two processes on the same servers: to one it is 1971, to the other the year 2100 or so.
async fn early_and_late(place: &Place, config: InboxConfig) -> Result<(System, System)> {
    let early = TestClock::at(Timestamp::from_millis(0).after(YEAR));
    let late = TestClock::at(Timestamp::from_millis(0).after(YEAR * 130));
    let early = System::with(&place.with_clock(early), config.clone()).await?;
    Ok((early, System::with(&place.with_clock(late), config).await?))
}

/// The time of the database.
async fn now(place: &Place) -> Result<Timestamp> {
    let mut postgres = PgConnection::connect(&place.database).await?;
    let query = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint";
    let ms: i64 = sqlx::query_scalar(query).fetch_one(&mut postgres).await?;
    Ok(Timestamp::from_millis(u64::try_from(ms)?))
}

#[tokio::test]
async fn a_quiet_window_is_counted_by_the_clock_of_the_database() -> Result<()> {
    let place = Place::servers()?;
    let quiet = Quiet { quiet: LONG * 10, max_wait: LONG * 10, ..Quiet::default() };
    let config = InboxConfig { quiet, ..InboxConfig::default() };
    let (early, late) = early_and_late(&place, config).await?;
    let before = now(&place).await?;
    let recorded = early.record("1", "a").await?;
    let again = late.record("1", "b").await?;
    let after = now(&place).await?;
    for not_before in [recorded.not_before, again.not_before] {
        let not_before = not_before.expect("it waits");
        assert!(before.after(quiet.quiet) <= not_before && not_before <= after.after(quiet.quiet));
    }
    // Neither of them takes it too soon.
    for system in [&early, &late] {
        let claim = system.store.claim(&[recorded.issue_id], &ClaimOptions::new("w")).await?;
        let Claim::NotYet { wait, .. } = claim[0] else { panic!("{claim:?}") };
        assert!(wait <= quiet.quiet && wait > quiet.quiet / 2, "{wait:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_sweep_takes_nobody_s_claim_and_repeats_no_nudge_for_the_sake_of_its_own_clock()
-> Result<()> {
    let place = Place::servers()?;
    let (early, late) = early_and_late(&place, InboxConfig::default()).await?;
    let claimed = early.record("1", "a").await?.issue_id;
    early.record("2", "a").await?;
    early.store.claim(&[claimed], &ClaimOptions { ttl: LONG, ..ClaimOptions::new("w") }).await?;
    let options = SweepOptions { nudge_overdue: LONG, ..SweepOptions::default() };
    for system in [&early, &late] {
        let swept = system.store.sweep(&options).await?;
        assert!(swept.nudges.is_empty() && swept.requeued == 0, "{swept:?}");
    }
    // What has run out by the database's clock has run out for both.
    place.let_claims_run_out(LONG).await?;
    assert_eq!(early.store.sweep(&options).await?.requeued, 1);
    Ok(())
}

#[tokio::test]
async fn the_outbox_hides_and_repeats_rows_by_the_clock_of_the_database() -> Result<()> {
    let place = Place::servers()?;
    let (early, late) = early_and_late(&place, InboxConfig::default()).await?;
    let journal = Journal::default();
    let worker = early.worker(journal.handler(), WorkerConfig::default())?;
    for issue in ["1", "2"] {
        let issue_id = early.record(issue, "a").await?.issue_id;
        worker.look_at(issue_id).await;
    }
    // One row is in the hands of the early process; the late one has only the other, and its failure is put off.
    assert_eq!(early.store.take_outbox("early", 1, LONG).await?.len(), 1);
    let retry =
        RetryPolicy { backoff_first: LONG * 10, backoff_max: LONG * 10, ..Default::default() };
    let fails = |_: OutboxRow| async { Err(DeliverError::Retry("busy".into())) };
    let failing = late.outbox(fails, OutboxConfig { retry, ..OutboxConfig::default() })?;
    assert_eq!(failing.run_once().await?, 1);
    let letters = Letters::default();
    for system in [&early, &late] {
        let outbox = system.outbox(letters.clone(), OutboxConfig::default())?;
        assert_eq!(outbox.run_once().await?, 0, "nothing is due");
    }
    assert_eq!(early.store.backlog().await?.outbox_pending, 2);
    Ok(())
}

#[tokio::test]
async fn a_whole_flow_works_between_processes_whose_clocks_are_a_century_apart() -> Result<()> {
    let place = Place::servers()?;
    let (early, late) = early_and_late(&place, InboxConfig::default()).await?;
    let journal = Journal::default();
    let worker = late.start(journal.handler(), WorkerConfig::default())?;
    let mut ids = Vec::new();
    for issue in ["1", "2", "3"] {
        ids.push(early.inbox.record(event_of(issue, "a")).await?.event_log_id);
    }
    early.settled().await?;
    worker.stop().await?;
    let letters = Letters::default();
    early.outbox(letters.clone(), OutboxConfig::default())?.run_once().await?;
    letters.assert_one_reply_each(ids);
    early.assert_balanced().await?;
    Ok(())
}
