//! How streams are distributed among consumers.

use std::collections::BTreeSet;
use std::time::Duration;

use headwater_assignment::{AssignmentConfig, Disowned, Rebalance};
use tokio::time::sleep;

use crate::fixture::{QUIET, ServiceFixture, eventually, quick};

everywhere!(
    two_starts_with_one_consumer_name_are_two_consumers,
    a_late_joiner_gets_its_share_of_idle_streams,
    without_rebalance_a_late_joiner_gets_no_streams,
    members_are_the_live_consumers,
);

fn rebalancing() -> AssignmentConfig {
    AssignmentConfig {
        rebalance: Rebalance::Idle { per_sweep: 2 },
        sweep_every: Duration::from_millis(200),
        ..quick()
    }
}

async fn two_starts_with_one_consumer_name_are_two_consumers(fixture: &ServiceFixture) {
    let config = AssignmentConfig { streams_max: 2, ..quick() };
    let mut first = fixture.consumer("same", config.clone()).await;
    let mut second = fixture.consumer("same", config).await;
    fixture.add(&["a", "b", "c", "d"]).await;
    first.added_many(2).await;
    second.added_many(2).await;

    assert!(first.owns().is_disjoint(&second.owns()));
    assert_ne!(first.assignment.holder(), second.assignment.holder());

    // One of them dies; the other keeps its streams and can claim the rest.
    let (left, kept) = (first.owns(), second.owns());
    first.die();
    let mut expired = BTreeSet::new();
    while expired.len() < left.len() {
        expired.insert(second.expired().await);
    }
    assert_eq!(expired, left);
    assert_eq!(second.owns(), kept);
}

async fn a_late_joiner_gets_its_share_of_idle_streams(fixture: &ServiceFixture) {
    let mut early = fixture.consumer("early", rebalancing()).await;
    fixture.add(&["a", "b", "c", "d", "e", "f"]).await;
    let owned = early.added_many(6).await;
    let busy: Vec<_> = owned[..2].iter().map(|owned| owned.work().unwrap()).collect();

    let mut late = fixture.consumer("late", rebalancing()).await;
    let got = late.added_many(3).await;

    for _ in 0..3 {
        let (stream, reason) = early.disowned().await;
        assert_eq!(reason, Disowned::Rebalanced);
        assert!(got.iter().any(|owned| *owned.stream() == stream && owned.owners() == 1));
        assert!(
            owned[..2].iter().all(|busy| *busy.stream() != stream),
            "streams with work in progress stay"
        );
    }
    assert!(early.owns().is_disjoint(&late.owns()));
    assert_eq!((early.owns().len(), late.owns().len()), (3, 3));
    // The distribution is stable.
    early.expect_no_notification_for(QUIET).await;
    late.expect_no_notification_for(QUIET).await;
    drop(busy);
}

async fn without_rebalance_a_late_joiner_gets_no_streams(fixture: &ServiceFixture) {
    let mut early = fixture.consumer("early", quick()).await;
    fixture.add(&["a", "b"]).await;
    early.added_many(2).await;
    let mut late = fixture.consumer("late", quick()).await;
    late.expect_no_notification_for(2 * quick().sweep_every).await;
    assert_eq!(early.owns().len(), 2);
}

async fn members_are_the_live_consumers(fixture: &ServiceFixture) {
    let first = fixture.consumer("first", quick()).await;
    let second = fixture.consumer("second", quick()).await;
    let mut holders = vec![first.assignment.holder().clone(), second.assignment.holder().clone()];
    holders.sort();
    let mut members = first.assignment.members().await.unwrap();
    members.sort();
    assert_eq!(members, holders);

    second.die();
    eventually("the dead member to be removed", || async {
        first.assignment.members().await.unwrap() == [first.assignment.holder().clone()]
    })
    .await;
    sleep(QUIET).await;
    first.assignment.shutdown(Duration::ZERO).await.unwrap();
    let third = fixture.consumer("third", quick()).await;
    assert_eq!(third.assignment.members().await.unwrap(), [third.assignment.holder().clone()]);
}
