//! Members that leave, die or take their time.

use std::sync::Arc;

use headwater_stream::HolderName;
use tokio::time::{Instant, sleep};

use super::place::{Member, Place, QUIET, Told, eventually, quick};
use crate::keys;
use crate::topic::{Partition, Topic, TopicName};

async fn a_member_that_leaves_hands_over_at_once(place: &Place) {
    let mut place = place.another();
    place.config.lease.ttl = LONG;
    place.create(6).await;
    let (stays, leaves) = (place.member().await, place.member().await);
    place.balanced(&[&stays, &leaves], 6).await;
    let owned = leaves.owns();
    let desk = leaves.desk.clone();

    let began = Instant::now();
    leaves.leave().await;
    place.balanced(&[&stays], 6).await;

    println!("everything was handed over {:?} after leaving began", began.elapsed());
    for partition in owned {
        assert!(desk.when(&Told::GivenUp(partition)) <= stays.desk.when(&Told::Gained(partition)));
    }
    // By its own word, not because a lease ran out.
    assert!(began.elapsed() < LONG, "after {:?}", began.elapsed());
    assert_eq!(place.listed().await.len(), 1);
}

async fn a_member_that_is_dropped_leaves_in_the_background(place: &Place) {
    place.create(4).await;
    let (stays, mut leaves) = (place.member().await, place.member().await);
    place.balanced(&[&stays, &leaves], 4).await;
    drop(leaves.membership.take());
    place.balanced(&[&stays], 4).await;
    assert_eq!(leaves.count(|told| matches!(told, Told::GivenUp(_))), 2);
}

async fn a_dead_member_is_replaced_when_its_lease_has_run_out(place: &Place) {
    place.create(4).await;
    let (lives, dies) = (place.member().await, place.member().await);
    place.balanced(&[&lives, &dies], 4).await;
    let orphans = dies.owns();
    lives.forget_told();

    dies.die();
    let died = Instant::now();
    place.balanced(&[&lives], 4).await;

    let took = died.elapsed();
    println!("replaced {:?} after death, the lease is {:?}", took, quick().lease.ttl);
    assert_eq!(lives.count(|told| matches!(told, Told::GiveUp(_) | Told::Lost(_))), 0);
    assert_eq!(orphans.len(), 2);
    eventually("the dead to be forgotten", || async { place.listed().await.len() == 1 }).await;
}

/// One hand-over takes as long as it takes: leases are renewed meanwhile, and other partitions change hands.
async fn a_slow_hand_over_holds_up_nothing_else(place: &Place) {
    place.create(4).await;
    let (slow, fast) = (place.member().await, place.member().await);
    place.balanced(&[&slow, &fast], 4).await;

    // When a third comes and one of those who should give something up does not, for longer than its leases live ...
    slow.desk.hold_on();
    let third = place.member().await;
    eventually("the slow one to be asked", || async {
        slow.count(|told| matches!(told, Told::GiveUp(_))) > 0
            || fast.count(|told| matches!(told, Told::GiveUp(_))) > 0
    })
    .await;
    let fourth = place.member().await;
    sleep(quick().lease.ttl + QUIET).await;

    // ... then it still owns what it holds, nobody else works on it, and the others have their shares.
    assert_eq!(slow.count(|told| matches!(told, Told::Lost(_) | Told::Expelled)), 0);
    assert_eq!(slow.owns().len(), 2);
    assert!(slow.owns().iter().all(|partition| slow.desk.lease(*partition).is_trusted()));
    assert_eq!(fast.owns().len(), 1);
    slow.desk.let_go();
    place.balanced(&[&slow, &fast, &third, &fourth], 4).await;
}

/// The lease is taken, and before anybody is told, the subscription leaves.
async fn leaving_while_partitions_are_taken_leaves_nothing_locked(place: &Place) {
    place.create(128).await;
    for round in 0..5 {
        let member = place.member().await;
        // At once, and as soon as the first is taken: then others are on their way.
        while round > 0 && member.owns().is_empty() {
            tokio::task::yield_now().await;
        }
        member.leave().await;
        assert_eq!(place.listed().await, [""; 0]);
        assert!(place.holders().await.iter().all(Option::is_none), "{:?}", place.holders().await);
    }
}

async fn what_nobody_told_is_found_by_sweeping(place: &Place) {
    place.create(2).await;
    let member = place.member().await;
    place.balanced(&[&member], 2).await;
    silent_member(place).await;
    eventually("its share to be given up", || async { member.owns().len() == 1 }).await;
}

/// A member that never rings and takes nothing: its lease and its entry are there, and nobody was told.
async fn silent_member(place: &Place) {
    let backend = place.connect().await;
    let holder = HolderName::new("silent:1").unwrap();
    let lease = keys::member(&place.group, "silent:1");
    backend.acquire(&lease, &holder, LONG).await.unwrap();
    let entry = format!("silent:1 silent:1 owned {}", place.topic);
    backend.set_add(&keys::members(&place.group), &[&entry], None).await.unwrap();
}

/// The reply of an acquire was lost, and by the time it could be asked again the partition was another's.
async fn a_lease_that_is_held_for_nothing_is_released(place: &Place) {
    place.create(2).await;
    let member = place.member().await;
    place.balanced(&[&member], 2).await;
    silent_member(place).await;
    eventually("its share to be given up", || async { member.owns().len() == 1 }).await;
    let free = if member.owns().contains(&0) { 1 } else { 0 };
    eventually("its lease to be free", || async { place.holders().await[free].is_none() }).await;

    let name = TopicName::new(&place.topic).unwrap();
    let backend = place.connect().await;
    let topic = Topic::read(&*backend, &name).await.unwrap();
    let lease = keys::lease(&topic, &place.group, free as Partition);
    let holder = HolderName::new(member.consumer().as_str()).unwrap();
    backend.acquire(&lease, &holder, LONG).await.unwrap();

    eventually("it to be free again", || async { place.holders().await[free].is_none() }).await;
    assert_eq!(member.owns().len(), 1);
}

const LONG: std::time::Duration = std::time::Duration::from_secs(60);

async fn a_subscription_outlives_its_queue_and_leaves_no_task_behind(place: &Place) {
    place.create(3).await;
    let member = place.member().await;
    place.balanced(&[&member], 3).await;
    let lease = member.desk.lease(0);
    let Member { queue, membership, desk } = member;
    drop(queue);
    sleep(quick().lease.ttl).await;
    assert!(lease.is_trusted());

    let watched = Arc::downgrade(&desk);
    drop((desk, membership));
    eventually("the last task to end", || async { watched.strong_count() == 0 }).await;
    lease.lost().await;
    eventually("nothing to be left", || async { place.listed().await.is_empty() }).await;
    assert!(place.holders().await.iter().all(Option::is_none));
}

everywhere!(
    a_member_that_leaves_hands_over_at_once,
    a_member_that_is_dropped_leaves_in_the_background,
    a_dead_member_is_replaced_when_its_lease_has_run_out,
    a_slow_hand_over_holds_up_nothing_else,
    leaving_while_partitions_are_taken_leaves_nothing_locked,
    what_nobody_told_is_found_by_sweeping,
    a_lease_that_is_held_for_nothing_is_released,
    a_subscription_outlives_its_queue_and_leaves_no_task_behind,
);
