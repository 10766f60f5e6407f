//! Static members: a restart moves no partition.

use tokio::time::{Instant, sleep};

use super::fixture::{Callback, GroupFixture, QUIET, fast_config, wait_until};
use crate::config::Mode;

async fn restarting_a_static_member_moves_no_partition(fixture: &GroupFixture) {
    fixture.create(5).await;
    let one = fixture.try_member(Mode::Owned, Some("one")).await.unwrap();
    let two = fixture.try_member(Mode::Owned, Some("two")).await.unwrap();
    let three = fixture.member().await;
    fixture.wait_until_balanced(&[&one, &two, &three], 5).await;
    let had = two.owns();
    [&one, &three].iter().for_each(|member| member.clear_callbacks());

    // Its partitions stay reserved while it is stopped.
    two.leave().await;
    assert!(fixture.member_list().await.iter().any(|entry| entry.starts_with("two {")));
    sleep(QUIET).await;
    // After the restart it gets the same partitions under a new consumer name.
    let two = fixture.try_member(Mode::Owned, Some("two")).await.unwrap();
    fixture.wait_until_balanced(&[&one, &two, &three], 5).await;
    assert_eq!(two.owns(), had);
    for member in [&one, &three] {
        assert_eq!(member.callbacks(), [], "another member was rebalanced");
    }
    // The reservation is removed.
    wait_until("the reservation to be gone", || async { fixture.member_list().await.len() == 3 })
        .await;

    // Afterwards it takes part in rebalances.
    one.leave().await;
    fixture.wait_until_balanced(&[&two, &three], 5).await;
}

async fn a_static_member_is_replaced_when_its_reservation_expires(fixture: &GroupFixture) {
    fixture.create(4).await;
    let stays = fixture.try_member(Mode::Owned, Some("stays")).await.unwrap();
    let goes = fixture.try_member(Mode::Owned, Some("goes")).await.unwrap();
    fixture.wait_until_balanced(&[&stays, &goes], 4).await;
    let left = Instant::now();
    goes.leave().await;
    fixture.wait_until_balanced(&[&stays], 4).await;
    println!(
        "replaced {:?} after it left; the lease is {:?}",
        left.elapsed(),
        fast_config().lease.ttl
    );
    wait_until("it to be removed", || async { fixture.member_list().await.len() == 1 }).await;
}

async fn a_second_process_with_the_same_member_id_waits(fixture: &GroupFixture) {
    fixture.create(3).await;
    let first = fixture.try_member(Mode::Owned, Some("same")).await.unwrap();
    fixture.wait_until_balanced(&[&first], 3).await;

    let second = fixture.try_member(Mode::Owned, Some("same")).await.unwrap();
    sleep(QUIET).await;
    assert_eq!(second.callbacks(), []);
    assert_eq!(first.owns().len(), 3);

    // It joins when the first one leaves,
    first.leave().await;
    fixture.wait_until_balanced(&[&second], 3).await;
    // or dies.
    let third = fixture.try_member(Mode::Owned, Some("same")).await.unwrap();
    second.die();
    fixture.wait_until_balanced(&[&third], 3).await;
}

async fn a_member_waiting_for_its_id_can_leave(fixture: &GroupFixture) {
    fixture.create(1).await;
    let first = fixture.try_member(Mode::Owned, Some("same")).await.unwrap();
    fixture.wait_until_balanced(&[&first], 1).await;
    let second = fixture.try_member(Mode::Owned, Some("same")).await.unwrap();
    second.leave().await;
    assert_eq!(
        first.count(|callback| *callback != Callback::Assigned(0)),
        1,
        "{:?}",
        first.callbacks()
    );
}

on_every_backend!(
    restarting_a_static_member_moves_no_partition,
    a_static_member_is_replaced_when_its_reservation_expires,
    a_second_process_with_the_same_member_id_waits,
    a_member_waiting_for_its_id_can_leave,
);
