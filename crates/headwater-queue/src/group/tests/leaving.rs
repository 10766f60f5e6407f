//! Members that leave, die or revoke slowly.

use std::sync::Arc;

use headwater_stream::HolderName;
use tokio::time::{Instant, sleep};

use super::fixture::{Callback, GroupFixture, Member, QUIET, fast_config, wait_until};
use crate::keys::{self, MembershipKeys};
use crate::topic::{Partition, Topic, TopicName};

async fn a_leaving_member_hands_over_without_waiting_for_lease_expiry(fixture: &GroupFixture) {
    let mut fixture = fixture.other_topic();
    fixture.config.lease.ttl = LONG;
    fixture.create(6).await;
    let (stays, leaves) = (fixture.member().await, fixture.member().await);
    fixture.wait_until_balanced(&[&stays, &leaves], 6).await;
    let owned = leaves.owns();
    let listener = leaves.listener.clone();

    let began = Instant::now();
    leaves.leave().await;
    fixture.wait_until_balanced(&[&stays], 6).await;

    println!("everything was handed over {:?} after the leave started", began.elapsed());
    for partition in owned {
        assert!(
            listener.last_time_of(&Callback::Revoked(partition))
                <= stays.listener.last_time_of(&Callback::Assigned(partition))
        );
    }
    // By the leave itself, not by lease expiry.
    assert!(began.elapsed() < LONG, "after {:?}", began.elapsed());
    assert_eq!(fixture.member_list().await.len(), 1);
}

async fn a_dropped_membership_leaves_in_the_background(fixture: &GroupFixture) {
    fixture.create(4).await;
    let (stays, mut leaves) = (fixture.member().await, fixture.member().await);
    fixture.wait_until_balanced(&[&stays, &leaves], 4).await;
    drop(leaves.membership.take());
    fixture.wait_until_balanced(&[&stays], 4).await;
    assert_eq!(leaves.count(|callback| matches!(callback, Callback::Revoked(_))), 2);
}

async fn a_dead_member_is_replaced_after_its_lease_expires(fixture: &GroupFixture) {
    fixture.create(4).await;
    let (lives, dies) = (fixture.member().await, fixture.member().await);
    fixture.wait_until_balanced(&[&lives, &dies], 4).await;
    let orphans = dies.owns();
    lives.clear_callbacks();

    dies.die();
    let died = Instant::now();
    fixture.wait_until_balanced(&[&lives], 4).await;

    let took = died.elapsed();
    println!("replaced {:?} after death, the lease is {:?}", took, fast_config().lease.ttl);
    assert_eq!(
        lives.count(|callback| matches!(callback, Callback::Revoke(_) | Callback::Lost(_))),
        0
    );
    assert_eq!(orphans.len(), 2);
    wait_until("the dead member to be removed", || async {
        fixture.member_list().await.len() == 1
    })
    .await;
}

/// While one revoke takes long, leases are renewed and other partitions are reassigned.
async fn a_slow_revoke_does_not_block_other_partitions(fixture: &GroupFixture) {
    fixture.create(4).await;
    let (slow, fast) = (fixture.member().await, fixture.member().await);
    fixture.wait_until_balanced(&[&slow, &fast], 4).await;

    // A third member joins while the revokes of one owner take longer than its lease TTL.
    slow.listener.block_revoke();
    let third = fixture.member().await;
    wait_until("a revoke to start", || async {
        slow.count(|callback| matches!(callback, Callback::Revoke(_))) > 0
            || fast.count(|callback| matches!(callback, Callback::Revoke(_))) > 0
    })
    .await;
    let fourth = fixture.member().await;
    sleep(fast_config().lease.ttl + QUIET).await;

    // The slow member still owns its partitions, and the other member has its share.
    assert_eq!(slow.count(|callback| matches!(callback, Callback::Lost(_) | Callback::Evicted)), 0);
    assert_eq!(slow.owns().len(), 2);
    assert!(slow.owns().iter().all(|partition| slow.listener.lease(*partition).is_valid()));
    assert_eq!(fast.owns().len(), 1);
    slow.listener.unblock_revoke();
    fixture.wait_until_balanced(&[&slow, &fast, &third, &fourth], 4).await;
}

/// The subscription leaves after a lease was acquired and before the listener was called.
async fn leaving_while_partitions_are_acquired_leaves_no_lease_held(fixture: &GroupFixture) {
    fixture.create(128).await;
    for round in 0..5 {
        let member = fixture.member().await;
        // At once, and as soon as the first is assigned: then other acquires are in progress.
        while round > 0 && member.owns().is_empty() {
            tokio::task::yield_now().await;
        }
        member.leave().await;
        assert_eq!(fixture.member_list().await, [""; 0]);
        assert!(
            fixture.holders().await.iter().all(Option::is_none),
            "{:?}",
            fixture.holders().await
        );
    }
}

async fn a_member_that_joins_without_notification_is_found_by_polling(fixture: &GroupFixture) {
    fixture.create(2).await;
    let member = fixture.member().await;
    fixture.wait_until_balanced(&[&member], 2).await;
    add_member_without_notification(fixture).await;
    wait_until("its share to be revoked", || async { member.owns().len() == 1 }).await;
}

/// Adds a member that sends no notification and acquires nothing: only its lease and its entry exist.
async fn add_member_without_notification(fixture: &GroupFixture) {
    let backend = fixture.connect().await;
    let holder = HolderName::new("silent:1").unwrap();
    let keys = MembershipKeys::new(&*backend, &fixture.group);
    for lease in keys.member("silent:1") {
        backend.acquire(&lease, &holder, LONG).await.unwrap();
    }
    let entry = format!("silent:1 silent:1 owned {}", fixture.topic);
    for members in keys.members() {
        backend.set_add(&members, &[&entry], None).await.unwrap();
    }
}

/// The reply of an acquire was lost, and the partition was assigned to another member before the retry.
async fn an_orphaned_lease_is_released(fixture: &GroupFixture) {
    fixture.create(2).await;
    let member = fixture.member().await;
    fixture.wait_until_balanced(&[&member], 2).await;
    add_member_without_notification(fixture).await;
    wait_until("its share to be revoked", || async { member.owns().len() == 1 }).await;
    let free = if member.owns().contains(&0) { 1 } else { 0 };
    wait_until("its lease to be free", || async { fixture.holders().await[free].is_none() }).await;

    let name = TopicName::new(&fixture.topic).unwrap();
    let backend = fixture.connect().await;
    let topic = Topic::read(&*backend, &name).await.unwrap();
    let lease = keys::lease(&topic, &fixture.group, free as Partition);
    let holder = HolderName::new(member.consumer().as_str()).unwrap();
    backend.acquire(&lease, &holder, LONG).await.unwrap();

    wait_until("it to be free again", || async { fixture.holders().await[free].is_none() }).await;
    assert_eq!(member.owns().len(), 1);
}

const LONG: std::time::Duration = std::time::Duration::from_secs(60);

async fn a_subscription_outlives_its_queue_and_leaves_no_task(fixture: &GroupFixture) {
    fixture.create(3).await;
    let member = fixture.member().await;
    fixture.wait_until_balanced(&[&member], 3).await;
    let lease = member.listener.lease(0);
    let Member { queue, membership, listener } = member;
    drop(queue);
    sleep(fast_config().lease.ttl).await;
    assert!(lease.is_valid());

    let watched = Arc::downgrade(&listener);
    drop((listener, membership));
    wait_until("the last task to end", || async { watched.strong_count() == 0 }).await;
    lease.lost().await;
    wait_until("all members and leases to be gone", || async {
        fixture.member_list().await.is_empty()
    })
    .await;
    assert!(fixture.holders().await.iter().all(Option::is_none));
}

on_every_backend!(
    a_leaving_member_hands_over_without_waiting_for_lease_expiry,
    a_dropped_membership_leaves_in_the_background,
    a_dead_member_is_replaced_after_its_lease_expires,
    a_slow_revoke_does_not_block_other_partitions,
    leaving_while_partitions_are_acquired_leaves_no_lease_held,
    a_member_that_joins_without_notification_is_found_by_polling,
    an_orphaned_lease_is_released,
    a_subscription_outlives_its_queue_and_leaves_no_task,
);
