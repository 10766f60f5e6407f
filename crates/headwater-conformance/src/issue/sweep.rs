//! The sweep.

use std::time::Duration;

use super::env::{StoreTestEnv, TTL, options, won};
use crate::TestResult;
use headwater_issue::{
    AfterFailure, Nudge, OutboxDelivery, OutboxSettlement, RunFailure, SweepOptions, SweepReport,
};

const OVERDUE: Duration = Duration::from_secs(600);

fn sweep() -> SweepOptions {
    SweepOptions { nudge_overdue: OVERDUE, crashes_max: 2, ..SweepOptions::default() }
}

pub async fn an_overdue_nudge_is_sent_again_and_only_once(env: StoreTestEnv) -> TestResult {
    let recorded = env.record("42", "a").await?;
    env.record("42", "b").await?;
    assert_eq!(env.store.sweep(&sweep()).await?, SweepReport::default());
    env.advance(OVERDUE).await?;
    let nudge = Nudge { issue_id: recorded.issue_id, event_log_id: recorded.event_log_id };
    assert_eq!(env.second.sweep(&sweep()).await?.nudges, [nudge]);
    assert_eq!(env.store.sweep(&sweep()).await?, SweepReport::default());
    env.advance(OVERDUE).await?;
    assert_eq!(env.store.sweep(&sweep()).await?.nudges, [nudge]);
    Ok(())
}

pub async fn an_issue_that_is_not_due_is_not_nudged(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    let then = AfterFailure::Retry { after: OVERDUE * 3 };
    let (epoch, error) = (claimed.epoch, "broken".to_owned());
    env.store.fail(&[RunFailure { issue_id: issue, epoch, error, then }], 5).await?;
    env.advance(OVERDUE * 2).await?;
    assert_eq!(env.store.sweep(&sweep()).await?, SweepReport::default());
    env.advance(OVERDUE * 2).await?;
    assert_eq!(env.store.sweep(&sweep()).await?.nudges.len(), 1);
    Ok(())
}

pub async fn an_expired_claim_is_requeued_and_nudged(env: StoreTestEnv) -> TestResult {
    let recorded = env.record("42", "a").await?;
    env.claim(recorded.issue_id).await?;
    env.advance(TTL).await?;
    let swept = env.store.sweep(&sweep()).await?;
    assert_eq!((swept.requeued, swept.more), (1, false));
    let nudge = Nudge { issue_id: recorded.issue_id, event_log_id: recorded.event_log_id };
    assert_eq!(swept.nudges, [nudge]);
    assert_eq!(env.store.sweep(&sweep()).await?, SweepReport::default());
    assert_eq!(env.claim(recorded.issue_id).await?.issue.crashes, 1);
    env.assert_consistent().await
}

pub async fn repeatedly_expired_claims_are_quarantined(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    env.claim(issue).await?;
    env.advance(TTL).await?;
    env.store.sweep(&sweep()).await?;
    env.claim(issue).await?;
    env.advance(TTL).await?;
    let swept = env.store.sweep(&sweep()).await?;
    assert_eq!((swept.requeued, swept.quarantined), (0, vec![issue]));
    assert_eq!(swept.nudges, []);
    assert!(env.issue(issue).await?.quarantined_at.is_some());
    let letter = env.second.dead_letters(None, 10).await?.remove(0);
    let error = "claim of worker `a` expired";
    assert_eq!((letter.issue_id, letter.error.as_str(), letter.crashes), (issue, error, 2));
    let log = env.store.event_logs(issue, &Default::default(), 1).await?.remove(0);
    assert_eq!(log.processing_error.as_deref(), Some(error));
    env.assert_consistent().await
}

pub async fn a_sweep_stops_at_its_limit_and_reports_more(env: StoreTestEnv) -> TestResult {
    let mut issues = Vec::new();
    for n in 0..5 {
        issues.push(env.record(&n.to_string(), &n.to_string()).await?.issue_id);
    }
    env.store.claim(&issues[..3], &options("a")).await?;
    env.advance(TTL + OVERDUE).await?;
    let options = SweepOptions { limit: 2, ..sweep() };
    let mut nudged = Vec::new();
    let mut sweeps = 0;
    loop {
        let swept = env.store.sweep(&options).await?;
        assert!(swept.requeued <= 2 && swept.nudges.len() <= 4);
        nudged.extend(swept.nudges.iter().map(|nudge| nudge.issue_id));
        sweeps += 1;
        if !swept.more {
            break;
        }
    }
    assert_eq!(sweeps, 2, "the first sweep reached its limit");
    nudged.sort();
    nudged.dedup();
    assert_eq!(nudged.len(), 5, "every issue was nudged");
    Ok(())
}

pub async fn a_live_claim_is_left_alone(env: StoreTestEnv) -> TestResult {
    let issue = env.record("42", "a").await?.issue_id;
    let claimed = env.claim(issue).await?;
    env.advance(TTL - Duration::from_secs(600)).await?;
    env.store.heartbeat(&[(issue, claimed.epoch)], TTL).await?;
    env.advance(Duration::from_secs(1200)).await?;
    assert_eq!(env.store.sweep(&sweep()).await?, SweepReport::default());
    let taken = env.second.claim(&[issue], &options("b")).await?.remove(0);
    assert!(matches!(taken, headwater_issue::Claim::Taken { .. }), "{taken:?}");
    env.advance(TTL).await?;
    won(env.second.claim(&[issue], &options("b")).await?.remove(0));
    Ok(())
}

pub async fn a_released_or_retried_issue_is_nudged_by_the_next_sweep(
    env: StoreTestEnv,
) -> TestResult {
    let recorded = env.record("42", "a").await?;
    let issue = recorded.issue_id;
    let nudge = Nudge { issue_id: issue, event_log_id: recorded.event_log_id };
    let fail = async |then| {
        let (epoch, error) = (env.claim(issue).await?.epoch, "broken".to_owned());
        let failed = env.store.fail(&[RunFailure { issue_id: issue, epoch, error, then }], 5).await;
        TestResult::Ok(failed.map(|_| ())?)
    };
    fail(AfterFailure::Quarantine).await?;
    env.store.release(issue).await?;
    assert_eq!(env.second.sweep(&sweep()).await?.nudges, [nudge]);
    assert_eq!(env.store.sweep(&sweep()).await?, SweepReport::default());

    fail(AfterFailure::Retry { after: OVERDUE }).await?;
    assert_eq!(env.store.sweep(&sweep()).await?, SweepReport::default());
    env.store.retry(issue).await?;
    assert_eq!(env.second.sweep(&sweep()).await?.nudges, [nudge]);
    assert_eq!(env.store.sweep(&sweep()).await?, SweepReport::default());
    Ok(())
}

pub async fn only_delivered_rows_and_released_dead_letters_are_removed_after_their_retention(
    env: StoreTestEnv,
) -> TestResult {
    let keep = TTL * 10;
    let options = SweepOptions { keep, limit: 2, ..sweep() };
    for issue in 0..5 {
        env.replied(&issue.to_string(), &["a", "b"]).await?;
    }
    // Three rows are delivered, one is dead, one is taken; five wait.
    let rows = env.store.take_outbox("deliverer", 10, TTL).await?;
    for (n, row) in rows.iter().take(4).enumerate() {
        let dead = || OutboxDelivery::Dead { error: "gone".into() };
        let delivery = if n < 3 { OutboxDelivery::Delivered } else { dead() };
        let (id, deliveries) = (row.id, row.deliveries);
        env.store.settle_outbox(&[OutboxSettlement { id, deliveries, delivery }]).await?;
    }
    let quarantined = env.record("9", "z").await?.issue_id;
    let (epoch, error) = (env.claim(quarantined).await?.epoch, "broken".to_owned());
    let then = AfterFailure::Quarantine;
    env.store.fail(&[RunFailure { issue_id: quarantined, epoch, error, then }], 5).await?;
    env.advance(keep - Duration::from_secs(600)).await?;
    assert_eq!(env.store.sweep(&options).await?, SweepReport::default());
    env.advance(Duration::from_secs(600)).await?;
    let swept = env.store.sweep(&options).await?;
    assert_eq!((swept.pruned, swept.more), (2, true));
    let swept = env.second.sweep(&options).await?;
    assert_eq!((swept.pruned, swept.more), (1, false));
    assert_eq!(env.store.sweep(&options).await?, SweepReport::default());
    let backlog = env.store.backlog().await?;
    assert_eq!((backlog.outbox_pending, backlog.outbox_dead), (6, 1));

    // A dead letter is retained until its release, and for the retention after it.
    assert_eq!(env.store.dead_letters(None, 10).await?.len(), 1);
    env.store.release(quarantined).await?;
    env.store.sweep(&options).await?;
    assert_eq!(env.store.dead_letters(None, 10).await?.len(), 1);
    env.advance(keep).await?;
    assert_eq!(env.store.sweep(&options).await?.pruned, 1);
    assert_eq!(env.store.dead_letters(None, 10).await?, []);
    Ok(())
}
