//! The concurrency scenarios of issue-centric processing, one test each, on both kinds of backends.

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
                super::$name(super::Backends::in_memory_with_test_clock()).await
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
    of_two_workers_with_the_same_nudge_one_runs_and_the_other_does_nothing,
    an_issue_of_a_crashed_worker_is_processed_by_another_after_the_claim_expires,
    a_redelivered_nudge_after_a_commit_is_a_no_op,
    a_redelivered_nudge_after_a_commit_processes_a_new_event,
    a_new_event_after_a_no_op_nudge_sends_its_own_nudge,
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

async fn of_two_workers_with_the_same_nudge_one_runs_and_the_other_does_nothing(
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

async fn an_issue_of_a_crashed_worker_is_processed_by_another_after_the_claim_expires(
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
                    gate.wait().await;
                    Ok::<_, HandlerError>(Resolution::new())
                }
            },
            WorkerConfig::default(),
        )?
    };
    gate.wait_for_arrivals(1).await?;
    crashed.abort().await;

    let rescuer = system.worker(run_log.handler(), WorkerConfig::default())?;
    rescuer.process_issue(issue_id).await;
    assert!(run_log.runs().is_empty(), "the claim of the dead worker is still held");
    assert!(system.sweeper(None)?.run_once().await?.nudges.is_empty());

    backends.expire_claims(CLAIM_TTL).await?;
    let swept = system.sweeper(None)?.run_once().await?;
    assert_eq!((swept.requeued, swept.nudges.len()), (1, 1));
    rescuer.process_issue(issue_id).await;
    assert_eq!(run_log.runs(), [["a"]]);
    system.assert_consistent().await?;
    Ok(())
}

/// The state after a worker has committed and crashed before it acknowledged the nudge.
async fn committed_and_not_acknowledged(
    backends: &Backends,
    run_log: &RunLog,
) -> Result<(System, headwater_issue::IssueId)> {
    let system = System::at(backends).await?;
    let issue_id = system.record("1", "a").await?.issue_id;
    system.record("1", "b").await?;
    // This worker does not consume the stream, so it acknowledges nothing.
    system.worker(run_log.handler(), WorkerConfig::default())?.process_issue(issue_id).await;
    let issue = system.store.issue(issue_id).await?.expect("it exists");
    assert_eq!((issue.status, issue.pending_events), (ProcessingStatus::Idle, 0));
    Ok((system, issue_id))
}

async fn a_redelivered_nudge_after_a_commit_is_a_no_op(backends: Backends) -> Result<()> {
    let run_log = RunLog::default();
    let (system, _) = committed_and_not_acknowledged(&backends, &run_log).await?;

    let worker = system.start(run_log.handler(), WorkerConfig::default())?;
    wait_acknowledged(&system, 1).await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [["a", "b"]]);
    system.assert_consistent().await?;
    Ok(())
}

async fn a_redelivered_nudge_after_a_commit_processes_a_new_event(
    backends: Backends,
) -> Result<()> {
    let run_log = RunLog::default();
    let (system, _) = committed_and_not_acknowledged(&backends, &run_log).await?;
    let recorded = system.record("1", "c").await?;
    assert!(recorded.nudge, "the issue was idle");

    let worker = system.start(run_log.handler(), WorkerConfig::default())?;
    wait_acknowledged(&system, 2).await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [vec!["a", "b"], vec!["c"]], "the new nudge found nothing to do");
    system.assert_consistent().await?;
    Ok(())
}

async fn a_new_event_after_a_no_op_nudge_sends_its_own_nudge(backends: Backends) -> Result<()> {
    let run_log = RunLog::default();
    let (system, _) = committed_and_not_acknowledged(&backends, &run_log).await?;
    let worker = system.start(run_log.handler(), WorkerConfig::default())?;
    wait_acknowledged(&system, 1).await?;

    system.record("1", "c").await?;
    wait_acknowledged(&system, 2).await?;
    worker.stop().await?;
    assert_eq!(run_log.runs(), [vec!["a", "b"], vec!["c"]]);
    system.assert_consistent().await?;
    Ok(())
}

/// Waits until `sent` nudges were sent and all are acknowledged.
async fn wait_acknowledged(system: &System, sent: u64) -> Result<()> {
    let stream = headwater_stream::StreamName::new(headwater_issue::STREAM)?;
    wait_until("nudges to be acknowledged", || async {
        let stats = system.streams.stats(&stream).await.expect("the stream replies");
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
                run_log.record(&run);
                if run.events().len() == 1 {
                    gate.wait().await;
                }
                Ok::<_, HandlerError>(support::replies(&run))
            }
        }
    };
    let worker = system.start(handler, WorkerConfig::default())?;
    gate.wait_for_arrivals(1).await?;

    // Recording succeeds while the handler runs: no transaction is open.
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
    let deliveries = DeliveryLog::default();
    system.outbox(deliveries.clone(), Default::default())?.run_once().await?;
    deliveries.assert_one_reply_each(event_ids(system.store.as_ref(), issue_id).await?);
    system.assert_consistent().await?;
    Ok(())
}
