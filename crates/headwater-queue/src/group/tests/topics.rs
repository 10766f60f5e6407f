//! Topics that change while they are consumed.

use std::time::Duration;

use headwater_stream::Epoch;

use super::fixture::{Callback, GroupFixture, wait_until};
use crate::keys::Layout;
use crate::topic::Policies;

async fn new_partitions_of_a_grown_topic_are_assigned(fixture: &GroupFixture) {
    fixture.create(2).await;
    let members = [fixture.member().await, fixture.member().await];
    fixture.wait_until_balanced(&[&members[0], &members[1]], 2).await;

    fixture.queue().await.topics().grow(&fixture.topic, 6).await.unwrap();

    fixture.wait_until_balanced(&[&members[0], &members[1]], 6).await;
    for member in &members {
        assert!(member.count(|callback| *callback == Callback::TopicChanged(6)) > 0);
        assert_eq!(
            member.count(|callback| matches!(callback, Callback::Lost(_) | Callback::Evicted)),
            0
        );
    }
}

async fn a_topic_deleted_and_created_again_is_consumed_again(fixture: &GroupFixture) {
    fixture.create(3).await;
    let member = fixture.member().await;
    fixture.wait_until_balanced(&[&member], 3).await;
    let queue = fixture.queue().await;

    // Without meta it is a plain topic; the member keeps consuming it.
    queue.topics().delete(&fixture.topic).await.unwrap();
    fixture.wait_until_balanced(&[&member], 1).await;
    let layout = |member: &super::fixture::Member| member.listener.lock().owned[&0].topic.layout;
    wait_until("plain keys", || async {
        matches!(layout(&member), Layout::Plain | Layout::PlainClustered)
    })
    .await;

    // Created again it has partition keys.
    let policies = Policies { refresh: Duration::from_millis(200), ..Default::default() };
    queue.topics().create(&fixture.topic, 2, policies).await.unwrap();
    fixture.wait_until_balanced(&[&member], 2).await;
    wait_until("partition keys", || async {
        matches!(layout(&member), Layout::Partitioned | Layout::Clustered)
    })
    .await;
    for (partition, info) in (0..).zip(fixture.holders().await) {
        assert_eq!(info.unwrap().epoch, member.listener.lease(partition).fence().epoch);
    }
    assert_eq!(
        member.count(|callback| matches!(callback, Callback::Lost(_) | Callback::Evicted)),
        0
    );
}

async fn a_plain_topic_has_one_partition(fixture: &GroupFixture) {
    let member = fixture.member().await;
    fixture.wait_until_balanced(&[&member], 1).await;
    assert!(member.listener.lease(0).fence().epoch > Epoch(0));
}

on_every_backend!(
    new_partitions_of_a_grown_topic_are_assigned,
    a_topic_deleted_and_created_again_is_consumed_again,
    a_plain_topic_has_one_partition,
);
