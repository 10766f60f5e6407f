//! Owned mode: partitions are balanced over members with few moves.

use std::collections::BTreeSet;

use tokio::time::sleep;

use super::fixture::{Callback, GroupFixture, Member, QUIET, is_balanced, wait_until};
use crate::config::Mode;
use crate::error::QueueError;

async fn a_single_member_owns_all_partitions(fixture: &GroupFixture) {
    fixture.create(5).await;
    let member = fixture.member().await;
    fixture.wait_until_balanced(&[&member], 5).await;
    assert!(matches!(member.callbacks()[0], Callback::Joined(_)));
    for (partition, info) in (0..).zip(fixture.holders().await) {
        let info = info.unwrap();
        assert_eq!(info.holder.as_str(), member.consumer().as_str());
        assert_eq!(info.epoch, member.listener.lease(partition).fence().epoch);
    }
    member.leave().await;
}

async fn a_late_joiner_gets_its_share_and_no_other_partition_moves(fixture: &GroupFixture) {
    fixture.create(8).await;
    let early = fixture.members(2).await;
    fixture.wait_until_balanced(&early.iter().collect::<Vec<_>>(), 8).await;
    let before: Vec<BTreeSet<_>> = early.iter().map(Member::owns).collect();
    early.iter().for_each(Member::clear_callbacks);

    let late = fixture.member().await;
    fixture.wait_until_balanced(&[&early[0], &early[1], &late], 8).await;

    for (member, before) in early.iter().zip(before) {
        assert!(member.owns().is_subset(&before), "a partition moved unnecessarily");
        assert_eq!(member.count(|callback| matches!(callback, Callback::Assigned(_))), 0);
        assert_eq!(
            member.count(|callback| matches!(callback, Callback::Lost(_) | Callback::Evicted)),
            0
        );
    }
    assert_eq!(late.count(|callback| matches!(callback, Callback::Assigned(_))), 2);
    assert_eq!(late.count(|callback| matches!(callback, Callback::Revoke(_))), 0);
}

async fn a_partition_is_assigned_only_after_it_was_revoked(fixture: &GroupFixture) {
    fixture.create(1 + 1).await;
    let old = fixture.member().await;
    fixture.wait_until_balanced(&[&old], 2).await;
    let new = fixture.member().await;
    fixture.wait_until_balanced(&[&old, &new], 2).await;

    let moved = *new.owns().first().unwrap();
    let revoked = old.listener.last_time_of(&Callback::Revoked(moved)).unwrap();
    let assigned = new.listener.last_time_of(&Callback::Assigned(moved)).unwrap();
    assert!(revoked <= assigned);
    println!("handed over in {:?}", assigned - revoked);
}

async fn partitions_are_balanced_for_various_group_sizes(fixture: &GroupFixture) {
    // The property tests of `assign` cover all sizes; these are corner cases with real leases.
    for (members, partitions) in [(1, 1), (2, 1), (3, 16), (5, 7), (8, 16), (8, 3)] {
        let fixture = fixture.other_topic();
        fixture.create(partitions).await;
        let members = fixture.members(members).await;
        let all: Vec<&Member> = members.iter().collect();
        fixture.wait_until_balanced(&all, partitions).await;
        let owned: Vec<BTreeSet<_>> = all.iter().map(|member| member.owns()).collect();
        sleep(QUIET).await;
        let still: Vec<BTreeSet<_>> = all.iter().map(|member| member.owns()).collect();
        assert_eq!(owned, still, "a balanced group moves nothing");
        for member in members {
            member.leave().await;
        }
        assert_eq!(fixture.member_list().await, [""; 0]);
    }
}

async fn concurrent_joins_converge(fixture: &GroupFixture) {
    fixture.create(12).await;
    let request: Vec<_> = (0..4).map(|_| fixture.member()).collect();
    let members = futures_util::future::join_all(request).await;
    fixture.wait_until_balanced(&members.iter().collect::<Vec<_>>(), 12).await;
}

async fn topics_of_one_queue_and_group_share_one_member(fixture: &GroupFixture) {
    let (queue, others) = (fixture.queue().await, [fixture.other_topic(), fixture.other_topic()]);
    let mut members = Vec::new();
    for other in &others {
        other.create(3).await;
        let member = Member::join(queue.clone(), &other.topic, fixture, Mode::Owned, None).await;
        members.push(member.unwrap());
    }
    for member in &members {
        fixture.wait_until_balanced(&[member], 3).await;
    }
    assert_eq!(members[0].consumer(), members[1].consumer());
    let other = members.pop().unwrap();
    other.leave().await;
    assert!(is_balanced(&[&members[0]], 3));
    assert_eq!(fixture.member_list().await.len(), 1);
}

async fn a_second_subscription_of_the_same_queue_is_rejected(fixture: &GroupFixture) {
    fixture.create(2).await;
    let first = fixture.member().await;
    let queue = first.queue.clone();
    let second = Member::join(queue.clone(), &fixture.topic, fixture, Mode::Owned, None).await;
    let Err(QueueError::Invalid { problem, .. }) = second else { panic!("not rejected") };
    assert!(problem.contains(&fixture.topic) && problem.contains("concurrency"), "{problem}");
    fixture.wait_until_balanced(&[&first], 2).await;

    // A subscription after the first one is accepted, even if the first is still leaving.
    drop(first);
    let third = Member::join(queue, &fixture.topic, fixture, Mode::Owned, None).await.unwrap();
    fixture.wait_until_balanced(&[&third], 2).await;
}

async fn a_member_with_a_different_mode_is_rejected(fixture: &GroupFixture) {
    fixture.create(2).await;
    let first = fixture.member().await;
    let Err(error) = fixture.try_member(Mode::Shared, None).await else { panic!("not rejected") };
    assert!(matches!(error, QueueError::Invalid { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("Owned") && text.contains("Shared"), "{text}");
    first.leave().await;

    // After the first has left, the other mode is accepted.
    let second = fixture.try_member(Mode::Shared, None).await.unwrap();
    assert_eq!(fixture.member_list().await.len(), 1);
    second.leave().await;
}

async fn of_two_concurrent_joins_with_different_modes_at_most_one_succeeds(fixture: &GroupFixture) {
    fixture.create(1).await;
    let (owned, shared) =
        tokio::join!(fixture.try_member(Mode::Owned, None), fixture.try_member(Mode::Shared, None));
    assert!(owned.is_err() || shared.is_err());
    let stayed = usize::from(owned.is_ok()) + usize::from(shared.is_ok());
    wait_until("the other to be gone", || async { fixture.member_list().await.len() == stayed })
        .await;
}

on_every_backend!(
    a_single_member_owns_all_partitions,
    a_late_joiner_gets_its_share_and_no_other_partition_moves,
    a_partition_is_assigned_only_after_it_was_revoked,
    partitions_are_balanced_for_various_group_sizes,
    concurrent_joins_converge,
    topics_of_one_queue_and_group_share_one_member,
    a_second_subscription_of_the_same_queue_is_rejected,
    a_member_with_a_different_mode_is_rejected,
    of_two_concurrent_joins_with_different_modes_at_most_one_succeeds,
);
