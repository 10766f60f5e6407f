//! Fences: a call that presents a stale epoch is rejected as a whole.

use std::time::Duration;

use headwater_stream::{
    AcquireResult, DueTime, EntryId, Epoch, Fence, ReclaimFrom, ReclaimRequest, SettleAction,
    Settlement, StreamError, StreamName,
};

use super::env::{StreamTestEnv, consumer, holder};
use super::steps::{Flow, HOUR, done, fields_in, ids_of, ms, numbered, settled, sleep_ms};
use crate::failure::TestResult;

/// Acquires the lease of this test for `name`; it must be free.
async fn hold(env: &StreamTestEnv, name: &str, ttl: Duration) -> TestResult<Fence> {
    let lease = env.lease("orders");
    match env.second.acquire(&lease, &holder(name), ttl).await? {
        AcquireResult::Won(epoch) => Ok(Fence { lease, epoch }),
        held => panic!("expected {name} to win the lease, found {held:?}"),
    }
}

/// Stale fences, one for each way a lease can be lost.
async fn lost_fences(env: &StreamTestEnv) -> TestResult<Vec<(&'static str, Fence)>> {
    let never = Fence { lease: env.lease("never"), epoch: Epoch(1) };
    let expired = hold(env, "ann", ms(60)).await?;
    sleep_ms(120).await;
    let released = hold(env, "bob", HOUR).await?;
    env.second.release(&holder("bob"), std::slice::from_ref(&released)).await?;
    let current = hold(env, "cid", HOUR).await?;
    let future = Fence { epoch: Epoch(current.epoch.0 + 1), ..current };
    Ok(vec![
        ("a lease that never was", never),
        ("an expired lease with a new holder", expired),
        ("a released lease with a new holder", released),
        ("an epoch that has not begun", future),
    ])
}

/// Every kind of settlement, on four entries.
fn everything(env: &StreamTestEnv, ids: &[EntryId], dead: &StreamName) -> Vec<Settlement> {
    let delays = env.delays("later");
    let to = env.stream("orders");
    let due = DueTime::After(HOUR);
    let aside = SettleAction::Reschedule { delays, to, due, fields: numbered(3) };
    let dead_letter = SettleAction::Append { to: dead.clone(), fields: numbered(2) };
    [SettleAction::Ack, SettleAction::Delete, dead_letter, aside, SettleAction::Release]
        .into_iter()
        .zip(ids)
        .map(|(then, id)| Settlement { id: *id, action: then })
        .collect()
}

/// Fails unless the call was rejected because of `fence`.
fn assert_fenced<T: std::fmt::Debug>(
    what: &str,
    fence: &Fence,
    answer: headwater_stream::Result<T>,
) {
    match answer {
        Err(StreamError::Fenced { lease, epoch }) => {
            assert_eq!((lease.as_str(), epoch), (fence.lease.as_str(), fence.epoch.0), "{what}");
        }
        other => panic!("{what}: expected Fenced, found {other:?}"),
    }
}

async fn assert_untouched(
    env: &StreamTestEnv,
    flow: &Flow,
    ids: &[EntryId],
    dead: &StreamName,
) -> TestResult {
    let expected: Vec<_> = ids.iter().map(|id| (*id, "ann".to_owned(), 1)).collect();
    assert_eq!(flow.pending_owners().await?, expected, "everything is still pending");
    assert_eq!(flow.ids().await?, ids, "everything is still in the stream");
    assert_eq!(env.second.stats(dead).await?, None, "there is no follow-up");
    assert_eq!(env.second.delay_stats(&env.delays("later")).await?.waiting, 0);
    Ok(())
}

pub async fn a_settle_with_a_current_fence_is_applied(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(5).await?;
    let dead = env.stream("dead");
    let fence = hold(&env, "ann", HOUR).await?;

    let answer = flow.settle_under("ann", Some(&fence), &everything(&env, &ids, &dead)).await?;

    assert!(answer == settled(5, 0) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.pending_ids().await?, ids[4..], "only the released one");
    assert_eq!(fields_in(&*env.second, &dead).await?, [numbered(2)]);
    Ok(())
}

pub async fn a_renewed_lease_keeps_its_fence_current(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(1).await?;
    let fence = hold(&env, "ann", HOUR).await?;
    env.second.renew(&holder("ann"), std::slice::from_ref(&fence), HOUR).await?;

    flow.settle_under("ann", Some(&fence), &done(&ids)).await?;

    assert_eq!(flow.pending_ids().await?, []);
    Ok(())
}

pub async fn a_settle_with_a_stale_fence_changes_nothing(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(5).await?;
    let dead = env.stream("dead");

    for (what, fence) in lost_fences(&env).await? {
        let entries = everything(&env, &ids, &dead);
        assert_fenced(what, &fence, flow.settle_under("ann", Some(&fence), &entries).await);
        assert_untouched(&env, &flow, &ids, &dead).await?;
    }
    Ok(())
}

pub async fn an_expired_lease_fences_even_without_a_new_holder(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(1).await?;
    let fence = hold(&env, "ann", ms(80)).await?;
    sleep_ms(160).await;

    let answer = flow.settle_under("ann", Some(&fence), &done(&ids)).await;

    assert_fenced("an expired lease", &fence, answer);
    assert_eq!(flow.pending_ids().await?, ids);
    Ok(())
}

pub async fn a_released_lease_fences_even_without_a_new_holder(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(1).await?;
    let fence = hold(&env, "ann", HOUR).await?;
    env.second.release(&holder("ann"), std::slice::from_ref(&fence)).await?;

    let answer = flow.settle_under("ann", Some(&fence), &done(&ids)).await;

    assert_fenced("a released lease", &fence, answer);
    assert_eq!(flow.pending_ids().await?, ids);
    Ok(())
}

fn deleted(ids: &[EntryId]) -> Vec<Settlement> {
    ids.iter().map(|id| Settlement { id: *id, action: SettleAction::Delete }).collect()
}

pub async fn a_delete_can_be_retried_after_the_lease_expired_until_it_has_another_holder(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(3).await?;
    for (name, id) in [("expired", ids[0]), ("released", ids[1])] {
        let fence = hold(&env, name, if name == "expired" { ms(2000) } else { HOUR }).await?;
        flow.settle_under("ann", Some(&fence), &deleted(&[id])).await?;
        match name {
            "expired" => sleep_ms(2100).await,
            _ => drop(env.second.release(&holder(name), std::slice::from_ref(&fence)).await?),
        }

        let again = flow.settle_under("ann", Some(&fence), &deleted(&[id])).await?;
        assert_eq!(again, settled(0, 1), "{name}");
        // Together with a settlement that would have an effect, the whole call is fenced.
        let more = flow.settle_under("ann", Some(&fence), &deleted(&[id, ids[2]])).await;
        assert_fenced(name, &fence, more);
        let other = flow.settle_under("ann", Some(&fence), &done(&[id])).await;
        assert_fenced(name, &fence, other);

        let next = hold(&env, "next", HOUR).await?;
        let late = flow.settle_under("ann", Some(&fence), &deleted(&[id])).await;
        assert_fenced("another may have deleted it", &fence, late);
        env.second.release(&holder("next"), std::slice::from_ref(&next)).await?;
        let late = flow.settle_under("ann", Some(&fence), &deleted(&[id])).await;
        assert_fenced("another may have deleted it", &fence, late);
    }
    assert_eq!(flow.pending_ids().await?, ids[2..]);
    assert_eq!(flow.ids().await?, ids[2..]);
    Ok(())
}

pub async fn a_delete_that_was_not_applied_is_fenced_after_the_lease_expired(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let fence = hold(&env, "ann", HOUR).await?;
    // Acknowledged but not deleted: it was settled in another way.
    flow.settle_under("ann", Some(&fence), &done(&ids[..1])).await?;
    env.second.release(&holder("ann"), std::slice::from_ref(&fence)).await?;

    for id in &ids {
        let answer = flow.settle_under("ann", Some(&fence), &deleted(&[*id])).await;
        assert_fenced("it still exists", &fence, answer);
    }
    assert_eq!(flow.pending_ids().await?, ids[1..]);
    assert_eq!(flow.ids().await?, ids);
    Ok(())
}

pub async fn a_lease_reacquired_by_its_old_holder_fences_the_old_epoch(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(1).await?;
    let old = hold(&env, "ann", ms(80)).await?;
    sleep_ms(160).await;
    let new = hold(&env, "ann", HOUR).await?;

    let answer = flow.settle_under("ann", Some(&old), &done(&ids)).await;
    assert_fenced("the old epoch", &old, answer);
    assert_eq!(flow.pending_ids().await?, ids);

    flow.settle_under("ann", Some(&new), &done(&ids)).await?;
    assert_eq!(flow.pending_ids().await?, []);
    Ok(())
}

pub async fn a_settle_with_a_stale_fence_writes_no_dead_letter_to_another_slot(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(5).await?;
    let dead = env.stream_elsewhere("dead");

    for (what, fence) in lost_fences(&env).await? {
        let entries = everything(&env, &ids, &dead);
        assert_fenced(what, &fence, flow.settle_under("ann", Some(&fence), &entries).await);
        assert_untouched(&env, &flow, &ids, &dead).await?;
    }
    Ok(())
}

pub async fn an_empty_settle_with_a_stale_fence_is_fenced(env: StreamTestEnv) -> TestResult {
    let (flow, _) = env.flow_with_pending(1).await?;
    for (what, fence) in lost_fences(&env).await? {
        assert_fenced(what, &fence, flow.settle_under("ann", Some(&fence), &[]).await);
    }
    Ok(())
}

pub async fn a_reclaim_with_a_current_fence_is_applied(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(3).await?;
    let fence = hold(&env, "bob", HOUR).await?;
    let bob = consumer("bob");

    let reclaim = ReclaimRequest { fence: Some(&fence), ..flow.reclaim_any(&bob) };
    let found = env.backend.reclaim(reclaim).await?;

    assert_eq!(ids_of(&found.entries), ids);
    Ok(())
}

pub async fn a_reclaim_with_a_stale_fence_claims_nothing(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(5).await?;
    let (bob, ann) = (consumer("bob"), consumer("ann"));

    for (what, fence) in lost_fences(&env).await? {
        let froms = [
            ReclaimFrom::Anyone,
            ReclaimFrom::Others,
            ReclaimFrom::Consumer(&ann),
            ReclaimFrom::Ids(&ids),
        ];
        for from in froms {
            let reclaim = ReclaimRequest { fence: Some(&fence), from, ..flow.reclaim_any(&bob) };
            assert_fenced(what, &fence, env.backend.reclaim(reclaim).await);
        }
        assert_untouched(&env, &flow, &ids, &env.stream("dead")).await?;
    }
    Ok(())
}

pub async fn the_new_holder_continues_where_the_fenced_one_stopped(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(4).await?;
    let old = hold(&env, "ann", ms(80)).await?;
    sleep_ms(160).await;
    let new = hold(&env, "bob", HOUR).await?;
    let bob = consumer("bob");

    // No minimum idle time: the lease grants the right.
    let reclaim =
        ReclaimRequest { fence: Some(&new), from: ReclaimFrom::Others, ..flow.reclaim_any(&bob) };
    env.backend.reclaim(reclaim).await?;
    let zombie = flow.settle_under("ann", Some(&old), &done(&ids)).await;
    assert_fenced("the former holder", &old, zombie);

    let expected: Vec<EntryId> = flow
        .pending_owners()
        .await?
        .into_iter()
        .filter(|(_, c, _)| c == "bob")
        .map(|x| x.0)
        .collect();
    assert_eq!(expected, ids, "all of it is pending for bob");
    flow.settle_under("bob", Some(&new), &done(&ids)).await?;
    assert_eq!(flow.pending_ids().await?, []);
    Ok(())
}
