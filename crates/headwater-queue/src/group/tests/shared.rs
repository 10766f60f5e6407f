//! Shared mode: members own no partitions and reclaim the messages of dead members.

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
        assert!(member.listener.lock().joined.as_ref().unwrap().lease.is_valid());
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

    // Nothing is reclaimed from a live member, also when another member leaves.
    let leaves = shared_member(fixture).await;
    leaves.leave().await;
    sleep(fast_config().lease.ttl + QUIET).await;
    let reclaims = || lives.count(|callback| *callback == Callback::MemberDied(dead.clone()));
    assert_eq!(reclaims(), 0);

    // A failed reclaim is retried; the dead member is removed only after it succeeded.
    lives.listener.reclaims.store(false, Ordering::SeqCst);
    dies.die();
    wait_until("a second attempt", || async { reclaims() >= 2 }).await;
    assert_eq!(fixture.member_list().await.len(), 2);
    lives.listener.reclaims.store(true, Ordering::SeqCst);
    wait_until("the dead member to be removed", || async {
        fixture.member_list().await.len() == 1
    })
    .await;
    let tries = reclaims();
    sleep(QUIET).await;
    assert_eq!(reclaims(), tries);
}

async fn the_next_member_to_join_reclaims_from_the_last_dead_member(fixture: &GroupFixture) {
    fixture.create(2).await;
    let dies = shared_member(fixture).await;
    let dead = dies.consumer();
    dies.die();
    let next = shared_member(fixture).await;
    wait_until("the dead member to be reclaimed", || async {
        next.count(|callback| *callback == Callback::MemberDied(dead.clone())) > 0
    })
    .await;
}

on_every_backend!(
    shared_members_join_without_owning_partitions,
    messages_of_a_shared_member_are_reclaimed_only_after_it_died,
    the_next_member_to_join_reclaims_from_the_last_dead_member,
);
