//! Members that compete for messages: nobody owns anything, the dead are taken over.

use std::sync::atomic::Ordering;

use tokio::time::sleep;

use super::place::{Member, Place, QUIET, Told, eventually, quick};
use crate::config::Mode;

async fn competing(place: &Place) -> Member {
    place.try_member(Mode::Shared, None).await.unwrap()
}

async fn everybody_joins_and_nobody_owns(place: &Place) {
    place.create(4).await;
    let members = [competing(place).await, competing(place).await];
    sleep(QUIET).await;
    for member in &members {
        assert_eq!(member.told(), [Told::Joined(member.consumer())]);
        assert!(member.desk.lock().joined.as_ref().unwrap().lease.is_trusted());
    }
    assert!(place.holders().await.iter().all(Option::is_none));
    for member in members {
        member.leave().await;
    }
    assert_eq!(place.listed().await, [""; 0]);
}

async fn what_a_dead_member_had_in_hand_is_taken_over_once_it_is_dead(place: &Place) {
    place.create(4).await;
    let (lives, dies) = (competing(place).await, competing(place).await);
    let dead = dies.consumer();

    // While it lives, however long, it is left alone, also when another leaves.
    let leaves = competing(place).await;
    leaves.leave().await;
    sleep(quick().lease.ttl + QUIET).await;
    let orphaned = || lives.count(|told| *told == Told::Orphaned(dead.clone()));
    assert_eq!(orphaned(), 0);

    // A take-over that fails is tried again; only then is the dead forgotten.
    lives.desk.takes_over.store(false, Ordering::SeqCst);
    dies.die();
    eventually("a second try", || async { orphaned() >= 2 }).await;
    assert_eq!(place.listed().await.len(), 2);
    lives.desk.takes_over.store(true, Ordering::SeqCst);
    eventually("the dead to be forgotten", || async { place.listed().await.len() == 1 }).await;
    let tries = orphaned();
    sleep(QUIET).await;
    assert_eq!(orphaned(), tries);
}

async fn the_last_to_die_is_taken_over_by_whoever_comes_next(place: &Place) {
    place.create(2).await;
    let dies = competing(place).await;
    let dead = dies.consumer();
    dies.die();
    let next = competing(place).await;
    eventually("the dead to be taken over", || async {
        next.count(|told| *told == Told::Orphaned(dead.clone())) > 0
    })
    .await;
}

everywhere!(
    everybody_joins_and_nobody_owns,
    what_a_dead_member_had_in_hand_is_taken_over_once_it_is_dead,
    the_last_to_die_is_taken_over_by_whoever_comes_next,
);
