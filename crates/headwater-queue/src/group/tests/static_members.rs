//! Members with an id that stays: a restart moves nothing.

use tokio::time::{Instant, sleep};

use super::place::{Place, QUIET, Told, eventually, quick};
use crate::config::Mode;

async fn a_restart_of_a_static_member_moves_nothing(place: &Place) {
    place.create(5).await;
    let one = place.try_member(Mode::Owned, Some("one")).await.unwrap();
    let two = place.try_member(Mode::Owned, Some("two")).await.unwrap();
    let three = place.member().await;
    place.balanced(&[&one, &two, &three], 5).await;
    let had = two.owns();
    [&one, &three].iter().for_each(|member| member.forget_told());

    // While it is away, nobody takes what it had ...
    two.leave().await;
    assert!(place.listed().await.iter().any(|entry| entry.starts_with("two {")));
    sleep(QUIET).await;
    // ... and when it is back, under a new name, it has the same as before.
    let two = place.try_member(Mode::Owned, Some("two")).await.unwrap();
    place.balanced(&[&one, &two, &three], 5).await;
    assert_eq!(two.owns(), had);
    for member in [&one, &three] {
        assert_eq!(member.told(), [], "somebody else had something to do with it");
    }
    // What was kept for it is kept no longer.
    eventually("the reservation to be gone", || async { place.listed().await.len() == 3 }).await;

    // It takes part like any other afterwards.
    one.leave().await;
    place.balanced(&[&two, &three], 5).await;
}

async fn a_static_member_that_stays_away_is_replaced_when_its_time_is_up(place: &Place) {
    place.create(4).await;
    let stays = place.try_member(Mode::Owned, Some("stays")).await.unwrap();
    let goes = place.try_member(Mode::Owned, Some("goes")).await.unwrap();
    place.balanced(&[&stays, &goes], 4).await;
    let left = Instant::now();
    goes.leave().await;
    place.balanced(&[&stays], 4).await;
    println!("replaced {:?} after it left; the lease is {:?}", left.elapsed(), quick().lease.ttl);
    eventually("it to be forgotten", || async { place.listed().await.len() == 1 }).await;
}

async fn of_two_processes_with_one_id_the_second_waits(place: &Place) {
    place.create(3).await;
    let first = place.try_member(Mode::Owned, Some("same")).await.unwrap();
    place.balanced(&[&first], 3).await;

    let second = place.try_member(Mode::Owned, Some("same")).await.unwrap();
    sleep(QUIET).await;
    assert_eq!(second.told(), []);
    assert_eq!(first.owns().len(), 3);

    // It has its turn when the first is gone, whether that says so ...
    first.leave().await;
    place.balanced(&[&second], 3).await;
    // ... or not.
    let third = place.try_member(Mode::Owned, Some("same")).await.unwrap();
    second.die();
    place.balanced(&[&third], 3).await;
}

async fn one_that_waits_for_its_id_can_leave(place: &Place) {
    place.create(1).await;
    let first = place.try_member(Mode::Owned, Some("same")).await.unwrap();
    place.balanced(&[&first], 1).await;
    let second = place.try_member(Mode::Owned, Some("same")).await.unwrap();
    second.leave().await;
    assert_eq!(first.count(|told| *told != Told::Gained(0)), 1, "{:?}", first.told());
}

everywhere!(
    a_restart_of_a_static_member_moves_nothing,
    a_static_member_that_stays_away_is_replaced_when_its_time_is_up,
    of_two_processes_with_one_id_the_second_waits,
    one_that_waits_for_its_id_can_leave,
);
