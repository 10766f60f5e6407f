//! Tests of single steps, with interleavings that cannot be forced from outside.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{Backend, DeliveredEntry, Options, SettleAction, StreamName, connect};

use crate::config::AssignmentConfig;
use crate::member::AssignmentMember;
use crate::names::{MemberIdentity, Names};
use crate::notification::{Disowned, Notification, Notifications};
use crate::owned::{EndReason, Owned, OwnershipPhase};

const LIMIT: Duration = Duration::from_secs(5);

async fn backend() -> Arc<dyn Backend> {
    connect("embedded:memory", &Options::default()).await.unwrap()
}

async fn member(backend: &Arc<dyn Backend>) -> (AssignmentMember, Notifications) {
    let (names, identity) = (Names::new("svc").unwrap(), MemberIdentity::new("c").unwrap());
    let config = AssignmentConfig::default();
    let (member, _losses) =
        AssignmentMember::new(Arc::clone(backend), names, identity, config).unwrap();
    member.prepare().await.unwrap();
    let notifications = Notifications::new(&member.notification_queue);
    (member, notifications)
}

fn stream() -> StreamName {
    StreamName::new("s").unwrap()
}

/// Adds the stream and reads its entry; it is pending but the stream is not owned yet.
async fn read(member: &AssignmentMember) -> Vec<DeliveredEntry> {
    crate::add(&*member.backend, "svc", &stream(), None).await.unwrap();
    let reader = member.backend.reader(&member.names.group, &member.identity.consumer).await;
    let mut reader = reader.unwrap();
    let batches = reader.read(std::slice::from_ref(&member.names.input), 1, LIMIT).await.unwrap();
    reader.close().await.unwrap();
    batches.into_iter().flat_map(|batch| batch.entries).collect()
}

async fn take_ownership(member: &AssignmentMember, notifications: &mut Notifications) -> Owned {
    assert_eq!(member.acquire_new(read(member).await).await, []);
    match notifications.try_recv() {
        Some(Notification::Added(owned)) => owned,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn an_entry_completed_by_another_consumer_before_its_lease_was_acquired_is_not_taken() {
    // Given a reader that pauses between read and lease, long enough to be considered dead.
    let backend = backend().await;
    let (slow, mut received) = member(&backend).await;
    let deliveries = read(&slow).await;
    let (other, _keep) = member(&backend).await;
    let owned = other.claim(&stream()).await.unwrap();
    other.end(&owned, EndReason::Done).await.unwrap();

    // When it continues, then the stream is not processed a second time.
    assert_eq!(slow.acquire_new(deliveries).await, []);
    assert!(received.try_recv().is_none());
    assert_eq!(slow.owned_set.len(), 0);
    assert_eq!(slow.holders(&[stream()]).await.unwrap(), [None]);
}

#[tokio::test]
async fn an_entry_pending_for_another_consumer_is_not_released() {
    let backend = backend().await;
    let (slow, mut received) = member(&backend).await;
    let deliveries = read(&slow).await;
    let (other, _keep) = member(&backend).await;
    let owned = other.claim(&stream()).await.unwrap();

    assert_eq!(slow.acquire_new(deliveries).await, []);

    assert!(received.try_recv().is_none());
    let pending = slow.first_pending(&[owned.entry()]).await.unwrap().unwrap();
    assert_eq!(pending.consumer, other.identity.consumer);
    other.end(&owned, EndReason::Done).await.unwrap();
}

#[tokio::test]
async fn the_heartbeat_detects_an_end_whose_reply_was_lost() {
    for (reason, then) in
        [(EndReason::Done, SettleAction::Delete), (EndReason::Release, SettleAction::Release)]
    {
        let backend = backend().await;
        let (member, mut received) = member(&backend).await;
        let owned = take_ownership(&member, &mut received).await;
        // The caller was cancelled, and the call took effect.
        drop(owned.begin_end(reason).unwrap_or_else(|phase| panic!("{phase:?}")));
        let settlement = headwater_stream::Settlement { id: owned.entry(), action: then };
        member.settle(Some(owned.guard().fence()), &[settlement]).await.unwrap();
        assert!(owned.work().is_none());

        member.run_heartbeat_once(LIMIT).await.unwrap();
        member.renewer.run_once().await.unwrap();

        assert_eq!(owned.phase(), OwnershipPhase::Ended(reason));
        member.end(&owned, reason).await.unwrap();
        assert_eq!(member.owned_set.len(), 0);
        assert_eq!(member.holders(&[stream()]).await.unwrap(), [None]);
        assert!(received.try_recv().is_none(), "its owner ended it");
    }
}

#[tokio::test]
async fn an_end_without_effect_leaves_the_stream_with_its_owner() {
    let backend = backend().await;
    let (member, mut received) = member(&backend).await;
    let owned = take_ownership(&member, &mut received).await;
    drop(owned.begin_end(EndReason::Release).unwrap_or_else(|phase| panic!("{phase:?}")));

    member.run_heartbeat_once(LIMIT).await.unwrap();

    assert!(owned.work().is_some());
    member.end(&owned, EndReason::Done).await.unwrap();
}

#[tokio::test]
async fn a_loss_is_notified_once_however_many_tasks_detect_it() {
    let backend = backend().await;
    let (member, mut received) = member(&backend).await;
    let owned = take_ownership(&member, &mut received).await;
    for reason in [Disowned::LeaseLost, Disowned::LeaseUnconfirmed, Disowned::EntryGone] {
        member.disown(&owned, reason);
    }
    let notification = received.try_recv();
    let first =
        matches!(notification, Some(Notification::Disowned { reason: Disowned::LeaseLost, .. }));
    assert!(first && received.try_recv().is_none(), "{notification:?}");
    assert!(owned.work().is_none());
}

#[tokio::test]
async fn a_cancelled_claim_leaves_no_lease_behind() {
    let backend = backend().await;
    let (member, _heard) = member(&backend).await;
    // Given a caller that is cancelled between the lease and the entry.
    drop(member.acquire_lease(&stream()).await.unwrap());
    assert!(member.holders(&[stream()]).await.unwrap()[0].is_some());

    member.renewer.run_once().await.unwrap();

    assert_eq!(member.holders(&[stream()]).await.unwrap(), [None]);
}

#[tokio::test]
async fn a_stream_with_work_in_progress_is_not_released() {
    let backend = backend().await;
    let (member, mut received) = member(&backend).await;
    let owned = take_ownership(&member, &mut received).await;

    let work = owned.work().unwrap();
    assert_eq!(owned.begin_release_if_idle().err(), Some(OwnershipPhase::Active));
    drop(work);
    let attempt = owned.begin_release_if_idle().unwrap_or_else(|phase| panic!("{phase:?}"));
    assert!(owned.work().is_none());
    attempt.failed();
    assert!(owned.work().is_some());
}
