//! Members that compete for messages: nobody owns anything, the dead are taken over.

use std::sync::atomic::Ordering;

use tokio::time::sleep;

use super::fixture::{Callback, GroupFixture, Member, QUIET, fast_config, wait_until};
use crate::config::Mode;

async fn shared_member(fixture: &GroupFixture) -> Member {
    fixture.try_member(Mode::Shared, None).await.unwrap()
}

async fn shared_members_join_without_owning_partitions(fixture: &GroupFixture) {
    fixture.create(4).await;
    let members = [shared_member(fixture).await, shared_member(fixture).await];
    sleep(QUIET).await;
    for member in &members {
        assert_eq!(member.callbacks(), [Callback::Joined(member.consumer())]);
        assert!(member.listener.lock().joined.as_ref().unwrap().lease.is_trusted());
    }
    assert!(fixture.holders().await.iter().all(Option::is_none));
    for member in members {
        member.leave().await;
    }
    assert_eq!(fixture.member_list().await, [""; 0]);
}

async fn messages_of_a_shared_member_are_reclaimed_only_after_it_died(fixture: &GroupFixture) {
    fixture.create(4).await;
    let (lives, dies) = (shared_member(fixture).await, shared_member(fixture).await);
    let dead = dies.consumer();

    // While it lives, however long, it is left alone, also when another leaves.
    let leaves = shared_member(fixture).await;
    leaves.leave().await;
    sleep(fast_config().lease.ttl + QUIET).await;
    let orphaned = || lives.count(|callback| *callback == Callback::MemberDied(dead.clone()));
    assert_eq!(orphaned(), 0);

    // A take-over that fails is tried again; only then is the dead forgotten.
    lives.listener.reclaims.store(false, Ordering::SeqCst);
    dies.die();
    wait_until("a second try", || async { orphaned() >= 2 }).await;
    assert_eq!(fixture.member_list().await.len(), 2);
    lives.listener.reclaims.store(true, Ordering::SeqCst);
    wait_until("the dead to be forgotten", || async { fixture.member_list().await.len() == 1 })
        .await;
    let tries = orphaned();
    sleep(QUIET).await;
    assert_eq!(orphaned(), tries);
}

async fn the_next_member_to_join_reclaims_from_the_last_dead_member(fixture: &GroupFixture) {
    fixture.create(2).await;
    let dies = shared_member(fixture).await;
    let dead = dies.consumer();
    dies.die();
    let next = shared_member(fixture).await;
    wait_until("the dead to be taken over", || async {
        next.count(|callback| *callback == Callback::MemberDied(dead.clone())) > 0
    })
    .await;
}

on_every_backend!(
    shared_members_join_without_owning_partitions,
    messages_of_a_shared_member_are_reclaimed_only_after_it_died,
    the_next_member_to_join_reclaims_from_the_last_dead_member,
);
