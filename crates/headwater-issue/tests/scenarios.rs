//! The concurrency scenarios of issue-centric processing, one test each, on both kinds of places.

mod support;

use std::time::Duration;

use anyhow::Result;
use headwater_issue::{HandlerError, ProcessingStatus, Resolution, Run, WorkerConfig};
use support::{Backends, DeliveryLog, Gate, LONG, RunLog, System, event_ids, wait_until};

const CLAIM_TTL: Duration = Duration::from_secs(60);

macro_rules! scenarios {
    ($($name:ident,)*) => {
        mod with_sqlite_and_embedded_streams {
            $(#[tokio::test]
            async fn $name() -> anyhow::Result<()> {
                super::$name(super::Backends::memory()).await
            })*
        }

        #[cfg(feature = "postgres")]
        mod with_postgres_and_redis {
            $(#[tokio::test]
            async fn $name() -> anyhow::Result<()> {
                super::$name(super::Backends::servers()?).await
            })*
        }
    };
}

scenarios! {
    two_webhooks_for_one_issue_become_one_run_with_both_events,
    of_two_workers_with_the_same_nudge_one_works_and_the_other_does_nothing,
    what_a_crashed_worker_had_claimed_is_done_by_another_when_the_claim_has_run_out,
    after_a_commit_without_acknowledgement_the_old_nudge_is_a_no_op,
    after_a_commit_without_acknowledgement_the_old_nudge_serves_for_a_new_event,
    after_the_old_nudge_was_a_no_op_a_new_event_brings_its_own,
    an_event_that_arrives_while_processing_is_not_lost,
}

async fn two_webhooks_for_one_issue_become_one_run_with_both_events(
    backends: Backends,
) -> Result<()> {
    let (system, run_log) = (System::at(&backends).await?, RunLog::default());

    let (a, b) = tokio::join!(system.record("1", "a"), system.record("1", "b"));
    let (a, b) = (a?, b?);
    assert_eq!(a.issue_id, b.issue_id);
    assert!(a.nudge != b.nudge, "the first queues the issue, the second finds it queued");

    let worker = system.start(run_log.handler(), WorkerConfig::default())?;
    system.wait_processed().await?;
    worker.stop().await?;
    let mut runs = run_log.runs();
    runs.iter_mut().for_each(|run| run.sort());
    assert_eq!(runs, [["a", "b"]]);
    system.assert_consistent().await?;
    Ok(())
}

async fn of_two_workers_with_the_same_nudge_one_works_and_the_other_does_nothing(
    backends: Backends,
) -> Result<()> {
    let (system, run_log) = (System::at(&backends).await?, RunLog::default());
    let issue_id = system.record("1", "a").await?.issue_id;
    let first = system.worker(run_log.handler(), WorkerConfig::default())?;
    let second = system.worker(run_log.handler(), WorkerConfig::default())?;

    tokio::join!(first.process_issue(issue_id), second.process_issue(issue_id));

    assert_eq!(run_log.runs(), [["a"]]);
    system.assert_consistent().await?;
    Ok(())
}

async fn what_a_crashed_worker_had_claimed_is_done_by_another_when_the_claim_has_run_out(
    backends: Backends,
) -> Result<()> {
    let (system, run_log, gate) =
        (System::at(&backends).await?, RunLog::default(), Gate::default());
    let issue_id = system.record("1", "a").await?.issue_id;
    let crashed = {
        let gate = gate.clone();
        system.start(
            move |_: Run| {
                let gate = gate.clone();
                async move {
                    gate.pass().await;
                    Ok::<_, HandlerError>(Resolution::new())
                }
            },
            WorkerConfig::default(),
        )?
    };
    gate.arrivals(1).await?;
    crashed.abort().await;

    let rescuer = system.worker(run_log.handler(), WorkerConfig::default())?;
    rescuer.process_issue(issue_id).await;
    assert!(run_log.runs().is_empty(), "the claim of the dead worker still holds");
    assert!(system.sweeper(None)?.run_once().await?.nudges.is_empty());

    backends.let_claims_run_out(CLAIM_TTL).await?;
    let swept = system.sweeper(None)?.run_once().await?;
    assert_eq!((swept.requeued, swept.nudges.len()), (1, 1));
    rescuer.process_issue(issue_id).await;
    assert_eq!(run_log.runs(), [["a"]]);
    system.assert_consistent().await?;
    Ok(())
}

/// Worker 1 has committed and dies before it acknowledges the nudge; this is what is left.
async fn committed_and_not_acknowledged(
    backends: &Backends,
    run_log: &RunLog,
) -> Result<(System, headwater_issue::IssueId)> {
    let system = System::at(backends).await?;
    let issue_id = system.record("1", "a").await?.issue_id;
    system.record("1", "b").await?;
    // A worker that never reads the stream acknowledges nothing in it.
    system.worker(run_log.handler(), WorkerConfig::default())?.process_issue(issue_id).await;
    let issue = system.store.issue(issue_id).await?.expect("it exists");
    assert_eq!((issue.status, issue.pending_events), (ProcessingStatus::Idle, 0));
    Ok((system, issue_id))
}

async fn after_a_commit_without_acknowledgement_the_old_nudge_is_a_no_op(
    backends: Backends,
) -> Result<()> {
    let run_log = RunLog::default();
    let (system, _) = committed_and_not_acknowledged(&backends, &run_log).await?;

    let worker = system.start(run_log.handler(), WorkerConfig::default())?;
    acknowledged(&system, 1).await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [["a", "b"]]);
    system.assert_consistent().await?;
    Ok(())
}

async fn after_a_commit_without_acknowledgement_the_old_nudge_serves_for_a_new_event(
    backends: Backends,
) -> Result<()> {
    let run_log = RunLog::default();
    let (system, _) = committed_and_not_acknowledged(&backends, &run_log).await?;
    let recorded = system.record("1", "c").await?;
    assert!(recorded.nudge, "the issue was idle");

    let worker = system.start(run_log.handler(), WorkerConfig::default())?;
    acknowledged(&system, 2).await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [vec!["a", "b"], vec!["c"]], "the new nudge found nothing to do");
    system.assert_consistent().await?;
    Ok(())
}

async fn after_the_old_nudge_was_a_no_op_a_new_event_brings_its_own(
    backends: Backends,
) -> Result<()> {
    let run_log = RunLog::default();
    let (system, _) = committed_and_not_acknowledged(&backends, &run_log).await?;
    let worker = system.start(run_log.handler(), WorkerConfig::default())?;
    acknowledged(&system, 1).await?;

    system.record("1", "c").await?;
    acknowledged(&system, 2).await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [vec!["a", "b"], vec!["c"]]);
    system.assert_consistent().await?;
    Ok(())
}

/// Waits until so many nudges were sent, and all are acknowledged.
async fn acknowledged(system: &System, sent: u64) -> Result<()> {
    let stream = headwater_stream::StreamName::new(headwater_issue::STREAM)?;
    wait_until("nudges to be acknowledged", || async {
        let stats = system.streams.stats(&stream).await.expect("the stream answers");
        stats.is_some_and(|stats| {
            let groups = &stats.groups;
            stats.length == sent
                && groups.len() == 1
                && groups[0].pending == 0
                && groups[0].lag == Some(0)
        })
    })
    .await
}

async fn an_event_that_arrives_while_processing_is_not_lost(backends: Backends) -> Result<()> {
    let (system, run_log, gate) =
        (System::at(&backends).await?, RunLog::default(), Gate::default());
    let issue_id = system.record("1", "a").await?.issue_id;
    let handler = {
        let (run_log, gate) = (run_log.clone(), gate.clone());
        move |run: Run| {
            let (run_log, gate) = (run_log.clone(), gate.clone());
            async move {
                run_log.write(&run);
                if run.events().len() == 1 {
                    gate.pass().await;
                }
                Ok::<_, HandlerError>(support::replies(&run))
            }
        }
    };
    let worker = system.start(handler, WorkerConfig::default())?;
    gate.arrivals(1).await?;

    // The webhook commits while the handler runs: no transaction is open meanwhile.
    for event in ["b", "c"] {
        let recorded = tokio::time::timeout(LONG, system.record("1", event)).await??;
        assert!(!recorded.nudge, "the end of the run will requeue it");
    }
    let issue = system.store.issue(issue_id).await?.expect("it exists");
    assert_eq!((issue.status, issue.pending_events), (ProcessingStatus::Processing, 3));
    gate.open();

    system.wait_processed().await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [vec!["a"], vec!["b", "c"]]);
    let letters = DeliveryLog::default();
    system.outbox(letters.clone(), Default::default())?.run_once().await?;
    letters.assert_one_reply_each(event_ids(system.store.as_ref(), issue_id).await?);
    system.assert_consistent().await?;
    Ok(())
}
