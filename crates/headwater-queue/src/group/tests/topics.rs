//! Topics that change under running consumers.

use std::time::Duration;

use headwater_stream::Epoch;

use super::place::{Place, Told, eventually};
use crate::keys::Layout;
use crate::topic::Policies;

async fn partitions_of_a_topic_that_grows_are_taken(place: &Place) {
    place.create(2).await;
    let members = [place.member().await, place.member().await];
    place.balanced(&[&members[0], &members[1]], 2).await;

    place.queue().await.topics().grow(&place.topic, 6).await.unwrap();

    place.balanced(&[&members[0], &members[1]], 6).await;
    for member in &members {
        assert!(member.count(|told| *told == Told::Changed(6)) > 0);
        assert_eq!(member.count(|told| matches!(told, Told::Lost(_) | Told::Expelled)), 0);
    }
}

async fn a_topic_that_is_deleted_and_created_anew_is_consumed_again(place: &Place) {
    place.create(3).await;
    let member = place.member().await;
    place.balanced(&[&member], 3).await;
    let queue = place.queue().await;

    // Without a meta it is a plain topic, and the member goes on waiting for what comes.
    queue.topics().delete(&place.topic).await.unwrap();
    place.balanced(&[&member], 1).await;
    let layout = |member: &super::place::Member| member.desk.lock().owned[&0].topic.layout;
    eventually("plain keys", || async {
        matches!(layout(&member), Layout::Plain | Layout::PlainClustered)
    })
    .await;

    // Created again it is what it was, under its own keys.
    let policies = Policies { refresh: Duration::from_millis(200), ..Default::default() };
    queue.topics().create(&place.topic, 2, policies).await.unwrap();
    place.balanced(&[&member], 2).await;
    eventually("its own keys", || async {
        matches!(layout(&member), Layout::Partitioned | Layout::Clustered)
    })
    .await;
    for (partition, info) in (0..).zip(place.holders().await) {
        assert_eq!(info.unwrap().epoch, member.desk.lease(partition).fence().epoch);
    }
    assert_eq!(member.count(|told| matches!(told, Told::Lost(_) | Told::Expelled)), 0);
}

async fn a_topic_that_nobody_created_has_one_partition(place: &Place) {
    let member = place.member().await;
    place.balanced(&[&member], 1).await;
    assert!(member.desk.lease(0).fence().epoch > Epoch(0));
}

everywhere!(
    partitions_of_a_topic_that_grows_are_taken,
    a_topic_that_is_deleted_and_created_anew_is_consumed_again,
    a_topic_that_nobody_created_has_one_partition,
);
