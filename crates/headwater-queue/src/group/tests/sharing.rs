//! Members share partitions: evenly, soon, and with few moves.

use std::collections::BTreeSet;

use tokio::time::sleep;

use super::place::{Member, Place, QUIET, Told, eventually, is_balanced};
use crate::config::Mode;
use crate::error::QueueError;

async fn one_member_owns_everything(place: &Place) {
    place.create(5).await;
    let member = place.member().await;
    place.balanced(&[&member], 5).await;
    assert!(matches!(member.told()[0], Told::Joined(_)));
    for (partition, info) in (0..).zip(place.holders().await) {
        let info = info.unwrap();
        assert_eq!(info.holder.as_str(), member.consumer().as_str());
        assert_eq!(info.epoch, member.desk.lease(partition).fence().epoch);
    }
    member.leave().await;
}

async fn a_late_joiner_gets_its_share_and_nothing_else_moves(place: &Place) {
    place.create(8).await;
    let early = place.members(2).await;
    place.balanced(&early.iter().collect::<Vec<_>>(), 8).await;
    let before: Vec<BTreeSet<_>> = early.iter().map(Member::owns).collect();
    early.iter().for_each(Member::forget_told);

    let late = place.member().await;
    place.balanced(&[&early[0], &early[1], &late], 8).await;

    for (member, before) in early.iter().zip(before) {
        assert!(member.owns().is_subset(&before), "something moved that need not");
        assert_eq!(member.count(|told| matches!(told, Told::Gained(_))), 0);
        assert_eq!(member.count(|told| matches!(told, Told::Lost(_) | Told::Expelled)), 0);
    }
    assert_eq!(late.count(|told| matches!(told, Told::Gained(_))), 2);
    assert_eq!(late.count(|told| matches!(told, Told::GiveUp(_))), 0);
}

async fn a_partition_changes_hands_after_it_was_given_up(place: &Place) {
    place.create(1 + 1).await;
    let old = place.member().await;
    place.balanced(&[&old], 2).await;
    let new = place.member().await;
    place.balanced(&[&old, &new], 2).await;

    let moved = *new.owns().first().unwrap();
    let given_up = old.desk.when(&Told::GivenUp(moved)).unwrap();
    let gained = new.desk.when(&Told::Gained(moved)).unwrap();
    assert!(given_up <= gained);
    println!("handed over in {:?}", gained - given_up);
}

async fn any_number_of_members_shares_any_number_of_partitions(place: &Place) {
    // All sizes in between are tried by the property tests of `assign`; these are the corners, with real leases.
    for (members, partitions) in [(1, 1), (2, 1), (3, 16), (5, 7), (8, 16), (8, 3)] {
        let place = place.another();
        place.create(partitions).await;
        let members = place.members(members).await;
        let all: Vec<&Member> = members.iter().collect();
        place.balanced(&all, partitions).await;
        let owned: Vec<BTreeSet<_>> = all.iter().map(|member| member.owns()).collect();
        sleep(QUIET).await;
        let still: Vec<BTreeSet<_>> = all.iter().map(|member| member.owns()).collect();
        assert_eq!(owned, still, "what is balanced stays where it is");
        for member in members {
            member.leave().await;
        }
        assert_eq!(place.listed().await, [""; 0]);
    }
}

async fn members_that_come_at_once_agree(place: &Place) {
    place.create(12).await;
    let joining: Vec<_> = (0..4).map(|_| place.member()).collect();
    let members = futures_util::future::join_all(joining).await;
    place.balanced(&members.iter().collect::<Vec<_>>(), 12).await;
}

async fn topics_of_one_process_and_group_are_one_member(place: &Place) {
    let (queue, others) = (place.queue().await, [place.another(), place.another()]);
    let mut members = Vec::new();
    for other in &others {
        other.create(3).await;
        let member = Member::join(queue.clone(), &other.topic, place, Mode::Owned, None).await;
        members.push(member.unwrap());
    }
    for member in &members {
        place.balanced(&[member], 3).await;
    }
    assert_eq!(members[0].consumer(), members[1].consumer());
    let other = members.pop().unwrap();
    other.leave().await;
    assert!(is_balanced(&[&members[0]], 3));
    assert_eq!(place.listed().await.len(), 1);
}

async fn a_second_subscription_of_the_same_queue_is_refused(place: &Place) {
    place.create(2).await;
    let first = place.member().await;
    let queue = first.queue.clone();
    let second = Member::join(queue.clone(), &place.topic, place, Mode::Owned, None).await;
    let Err(QueueError::Invalid { problem, .. }) = second else { panic!("it was not refused") };
    assert!(problem.contains(&place.topic) && problem.contains("concurrency"), "{problem}");
    place.balanced(&[&first], 2).await;

    // One that follows on the first is not a second one, also if the first is still leaving.
    drop(first);
    let third = Member::join(queue, &place.topic, place, Mode::Owned, None).await.unwrap();
    place.balanced(&[&third], 2).await;
}

async fn members_that_disagree_on_the_mode_are_refused(place: &Place) {
    place.create(2).await;
    let first = place.member().await;
    let Err(error) = place.try_member(Mode::Shared, None).await else { panic!("not refused") };
    assert!(matches!(error, QueueError::Invalid { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("Owned") && text.contains("Shared"), "{text}");
    first.leave().await;

    // When the first is gone, the other mode is as good as any.
    let second = place.try_member(Mode::Shared, None).await.unwrap();
    assert_eq!(place.listed().await.len(), 1);
    second.leave().await;
}

async fn of_two_that_disagree_and_come_at_once_one_stays_at_most(place: &Place) {
    place.create(1).await;
    let (owned, shared) =
        tokio::join!(place.try_member(Mode::Owned, None), place.try_member(Mode::Shared, None));
    assert!(owned.is_err() || shared.is_err());
    let stayed = usize::from(owned.is_ok()) + usize::from(shared.is_ok());
    eventually("the other to be gone", || async { place.listed().await.len() == stayed }).await;
}

everywhere!(
    one_member_owns_everything,
    a_late_joiner_gets_its_share_and_nothing_else_moves,
    a_partition_changes_hands_after_it_was_given_up,
    any_number_of_members_shares_any_number_of_partitions,
    members_that_come_at_once_agree,
    topics_of_one_process_and_group_are_one_member,
    a_second_subscription_of_the_same_queue_is_refused,
    members_that_disagree_on_the_mode_are_refused,
    of_two_that_disagree_and_come_at_once_one_stays_at_most,
);
