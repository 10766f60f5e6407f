//! Tests of single steps, at interleavings that no test from outside can bring about.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{Backend, Delivery, Options, StreamName, Then, connect};

use crate::config::AssignmentConfig;
use crate::member::Member;
use crate::names::{Identity, Names};
use crate::notification::{Disowned, Notification, Notifications};
use crate::owned::{Owned, Phase, Wish};

const LIMIT: Duration = Duration::from_secs(5);

async fn backend() -> Arc<dyn Backend> {
    connect("embedded:memory", &Options::default()).await.unwrap()
}

async fn member(backend: &Arc<dyn Backend>) -> (Member, Notifications) {
    let (names, identity) = (Names::new("svc").unwrap(), Identity::new("c").unwrap());
    let config = AssignmentConfig::default();
    let member = Member::new(Arc::clone(backend), names, identity, config).unwrap();
    member.prepare().await.unwrap();
    let notifications = Notifications::new(&member.broker);
    (member, notifications)
}

fn stream() -> StreamName {
    StreamName::new("s").unwrap()
}

/// Adds the stream and reads its entry, which is then in hand and not yet ours.
async fn read(member: &Member) -> Vec<Delivery> {
    crate::add(&*member.backend, "svc", &stream(), None).await.unwrap();
    let reader = member.backend.reader(&member.names.group, &member.identity.consumer).await;
    let mut reader = reader.unwrap();
    let batches = reader.read(std::slice::from_ref(&member.names.input), 1, LIMIT).await.unwrap();
    reader.close().await.unwrap();
    batches.into_iter().flat_map(|batch| batch.entries).collect()
}

async fn own(member: &Member, notifications: &mut Notifications) -> Owned {
    assert_eq!(member.take_new(read(member).await).await, []);
    match notifications.try_recv() {
        Some(Notification::Added(owned)) => owned,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn an_entry_that_was_done_by_another_before_its_lease_was_ours_is_not_taken() {
    // Given a reader that stands still between the read and the lease, long enough to be taken for dead.
    let backend = backend().await;
    let (slow, mut heard) = member(&backend).await;
    let deliveries = read(&slow).await;
    let (other, _keep) = member(&backend).await;
    let owned = other.claim(&stream()).await.unwrap();
    other.end(&owned, Wish::Done).await.unwrap();

    // When it goes on, then the stream is not done a second time.
    assert_eq!(slow.take_new(deliveries).await, []);
    assert!(heard.try_recv().is_none());
    assert_eq!(slow.slots.len(), 0);
    assert_eq!(slow.holders(&[stream()]).await.unwrap(), [None]);
}

#[tokio::test]
async fn an_entry_that_another_has_is_not_given_back_in_its_name() {
    let backend = backend().await;
    let (slow, mut heard) = member(&backend).await;
    let deliveries = read(&slow).await;
    let (other, _keep) = member(&backend).await;
    let owned = other.claim(&stream()).await.unwrap();

    assert_eq!(slow.take_new(deliveries).await, []);

    assert!(heard.try_recv().is_none());
    let pending = slow.first_pending(&[owned.entry()]).await.unwrap().unwrap();
    assert_eq!(pending.consumer, other.identity.consumer);
    other.end(&owned, Wish::Done).await.unwrap();
}

#[tokio::test]
async fn an_end_that_happened_without_a_reply_is_found_out_by_the_heartbeat() {
    for (wish, then) in [(Wish::Done, Then::Delete), (Wish::GiveBack, Then::Release)] {
        let backend = backend().await;
        let (member, mut heard) = member(&backend).await;
        let owned = own(&member, &mut heard).await;
        // The caller went away in the middle, and the call took effect.
        drop(owned.begin_end(wish).unwrap_or_else(|phase| panic!("{phase:?}")));
        let settlement = headwater_stream::Settlement { id: owned.entry(), then };
        member.settle(Some(owned.guard().fence()), &[settlement]).await.unwrap();
        assert!(owned.work().is_none());

        member.run_heartbeat_once(LIMIT).await.unwrap();
        member.run_heartbeat_once(LIMIT).await.unwrap();

        assert_eq!(owned.phase(), Phase::Ended(wish));
        member.end(&owned, wish).await.unwrap();
        assert_eq!(member.slots.len(), 0);
        assert_eq!(member.holders(&[stream()]).await.unwrap(), [None]);
        assert!(heard.try_recv().is_none(), "its owner wished it");
    }
}

#[tokio::test]
async fn an_end_that_did_not_happen_leaves_the_stream_to_its_owner() {
    let backend = backend().await;
    let (member, mut heard) = member(&backend).await;
    let owned = own(&member, &mut heard).await;
    drop(owned.begin_end(Wish::GiveBack).unwrap_or_else(|phase| panic!("{phase:?}")));

    member.run_heartbeat_once(LIMIT).await.unwrap();

    assert!(owned.work().is_some());
    member.end(&owned, Wish::Done).await.unwrap();
}

#[tokio::test]
async fn a_loss_is_told_once_however_many_find_out() {
    let backend = backend().await;
    let (member, mut heard) = member(&backend).await;
    let owned = own(&member, &mut heard).await;
    for reason in [Disowned::LeaseLost, Disowned::LeaseUnconfirmed, Disowned::EntryGone] {
        member.disown(&owned, reason);
    }
    let told = heard.try_recv();
    let first = matches!(told, Some(Notification::Disowned { reason: Disowned::LeaseLost, .. }));
    assert!(first && heard.try_recv().is_none(), "{told:?}");
    assert!(owned.work().is_none());
}

#[tokio::test]
async fn a_claim_that_is_dropped_leaves_no_lease_behind() {
    let backend = backend().await;
    let (member, _heard) = member(&backend).await;
    // Given a caller that goes away between the lease and the entry.
    drop(member.lock(&stream()).await.unwrap().unwrap());
    assert!(member.holders(&[stream()]).await.unwrap()[0].is_some());

    member.run_heartbeat_once(LIMIT).await.unwrap();

    assert_eq!(member.holders(&[stream()]).await.unwrap(), [None]);
}

#[tokio::test]
async fn what_is_being_worked_on_is_not_given_back() {
    let backend = backend().await;
    let (member, mut heard) = member(&backend).await;
    let owned = own(&member, &mut heard).await;

    let work = owned.work().unwrap();
    assert_eq!(owned.begin_give_back_if_idle().err(), Some(Phase::Active));
    drop(work);
    let ending = owned.begin_give_back_if_idle().unwrap_or_else(|phase| panic!("{phase:?}"));
    assert!(owned.work().is_none());
    ending.failed();
    assert!(owned.work().is_some());
}
