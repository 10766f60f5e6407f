//! How an ownership ends, by its owner or by loss, and that it ends once.

use std::time::Duration;

use headwater_assignment::{AssignmentConfig, Disowned, EndError, Notification, Terminated};
use headwater_stream::SettleAction;
use tokio::time::{Instant, timeout};

use crate::fixture::{LIMIT, QUIET, SLACK, ServiceFixture, eventually, quick};

everywhere!(
    done_completes_a_stream,
    a_released_stream_goes_to_another_consumer_as_new,
    a_stream_whose_lease_is_lost_is_disowned_once_and_cannot_be_ended,
    a_stream_whose_entry_was_deleted_is_disowned,
    an_entry_reclaimed_by_another_program_is_reclaimed,
    ownership_lasts_as_long_as_the_process_lives,
    shutdown_waits_for_work_and_releases_the_rest,
    shutdown_acquires_nothing_more_and_is_idempotent,
    a_dropped_assignment_terminates_its_notifications,
);

async fn done_completes_a_stream(fixture: &ServiceFixture) {
    let mut consumer = fixture.consumer("c", quick()).await;
    fixture.add(&["s"]).await;
    let owned = consumer.added().await;
    let work = owned.work().unwrap();

    consumer.assignment.done(&owned).await.unwrap();

    drop(work);
    let lease = fixture.lease(owned.stream());
    assert_eq!(fixture.connect().await.leases(&[lease]).await.unwrap(), [None]);
    assert!(owned.work().is_none());
    assert!(!owned.guard().is_valid());
    timeout(LIMIT, owned.guard().lost()).await.unwrap();
    assert_eq!(
        (fixture.pending().await, fixture.entries(&fixture.input()).await),
        (vec![], vec![])
    );
    // A retry is not an error; a different end is.
    consumer.assignment.done(&owned).await.unwrap();
    let release = consumer.assignment.release(&owned).await;
    assert!(matches!(release, Err(EndError::NotOwner { .. })), "{release:?}");
    consumer.expect_no_notification_for(2 * quick().heartbeat_every).await;
}

async fn a_released_stream_goes_to_another_consumer_as_new(fixture: &ServiceFixture) {
    let mut former_owner = fixture.consumer("former_owner", quick()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    let given = former_owner.added().await;
    let mut new_owner = fixture.consumer("new_owner", quick()).await;

    let released = Instant::now();
    former_owner.assignment.release(&given).await.unwrap();
    let acquired = new_owner.added().await;

    assert!(released.elapsed() < SLACK, "after {:?}", released.elapsed());
    assert_eq!((acquired.stream(), acquired.owners()), (&stream, 1));
    assert!(acquired.epoch() > given.epoch());
    assert!(former_owner.assignment.owned().is_empty());
    let done = former_owner.assignment.done(&given).await;
    assert!(matches!(done, Err(EndError::NotOwner { .. })), "{done:?}");
    former_owner.expect_no_notification_for(QUIET).await;
    new_owner.assignment.done(&acquired).await.unwrap();
}

async fn a_stream_whose_lease_is_lost_is_disowned_once_and_cannot_be_ended(
    fixture: &ServiceFixture,
) {
    let mut owner = fixture.consumer("owner", quick()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    let old = owner.added().await;
    let mut other = fixture.consumer("other", quick()).await;

    // When the lease is broken and another process owns the stream ...
    fixture.break_lease(&old, owner.assignment.holder()).await;
    assert_eq!(other.expired().await, stream);
    let new = other.assignment.claim(&stream).await.unwrap();

    // ... then the old owner can change nothing and is notified once.
    for _ in 0..2 {
        let done = owner.assignment.done(&old).await;
        assert!(matches!(done, Err(EndError::NotOwner { .. })), "{done:?}");
    }
    assert_eq!(owner.disowned().await, (stream, Disowned::LeaseLost));
    timeout(LIMIT, old.guard().lost()).await.unwrap();
    assert!(old.work().is_none());
    // Until the other one had claimed it, the stream was free for everybody, the old owner included.
    while let Some(notification) = owner.next_within(2 * quick().heartbeat_every).await {
        assert!(matches!(notification, Notification::Expired(_)), "{notification:?}");
    }
    assert!(new.guard().is_valid());
    other.assignment.done(&new).await.unwrap();
}

async fn a_stream_whose_entry_was_deleted_is_disowned(fixture: &ServiceFixture) {
    let mut consumer = fixture.consumer("c", quick()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    let owned = consumer.added().await;

    let backend = fixture.connect().await;
    let id = fixture.entries(&fixture.input()).await[0].id;
    backend.remove_group(&fixture.input(), &fixture.group()).await.unwrap();
    backend.delete_entries(&fixture.input(), &[id]).await.unwrap();

    // The group is recreated, and the next heartbeat finds nothing pending in it.
    assert_eq!(consumer.disowned().await, (stream, Disowned::EntryGone));
    assert!(!owned.guard().is_valid() || owned.work().is_none());
    consumer.expect_no_notification_for(QUIET).await;
}

async fn an_entry_reclaimed_by_another_program_is_reclaimed(fixture: &ServiceFixture) {
    let mut consumer = fixture.consumer("c", quick()).await;
    fixture.add(&["s"]).await;
    let owned = consumer.added().await;

    // Given another program that reclaims by idle time alone.
    let (backend, other_program) = (fixture.connect().await, "other_program".parse().unwrap());
    let (input, group) = (fixture.input(), fixture.group());
    let ids = [fixture.entries(&input).await[0].id];
    let reclaim = headwater_stream::ReclaimRequest {
        stream: &input,
        group: &group,
        consumer: &other_program,
        fence: None,
        from: headwater_stream::ReclaimFrom::Ids(&ids),
        min_idle: Duration::ZERO,
        after: None,
        count: 1,
    };
    assert_eq!(backend.reclaim(reclaim).await.unwrap().entries.len(), 1);

    eventually("the entry to be reclaimed", || async {
        fixture.pending().await[0].consumer.as_str() == consumer.assignment.holder().as_str()
    })
    .await;
    consumer.assignment.done(&owned).await.unwrap();
    consumer.expect_no_notification_for(QUIET).await;
}

async fn ownership_lasts_as_long_as_the_process_lives(fixture: &ServiceFixture) {
    let mut owner = fixture.consumer("owner", quick()).await;
    fixture.add(&["s"]).await;
    let owned = owner.added().await;
    let mut other = fixture.consumer("other", quick()).await;

    other.expect_no_notification_for(3 * quick().lease_ttl()).await;

    assert!(owned.guard().is_valid());
    // The entry is kept alive, so that no other consumer considers it abandoned.
    assert!(fixture.pending().await[0].idle < quick().lease_ttl());
    assert_eq!(fixture.pending().await[0].deliveries, 1);
    owner.assignment.done(&owned).await.unwrap();
}

async fn shutdown_waits_for_work_and_releases_the_rest(fixture: &ServiceFixture) {
    let mut consumer = fixture.consumer("c", quick()).await;
    fixture.add(&["done in time", "never done", "neither"]).await;
    let owned = consumer.added_many(3).await;

    // When two of three are not done within the drain time ...
    let drain = Duration::from_secs(5);
    let (released, ()) = tokio::join!(consumer.assignment.shutdown(drain), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        consumer.assignment.done(&owned[0]).await.unwrap();
    });

    // ... then they are released unacknowledged, and their owner is notified.
    assert_eq!(released.unwrap(), 2);
    let mut disowned = vec![consumer.disowned().await, consumer.disowned().await];
    disowned.sort_by_key(|(stream, _)| stream.clone());
    let mut rest: Vec<_> =
        owned[1..].iter().map(|owned| (owned.stream().clone(), Disowned::Shutdown)).collect();
    rest.sort_by_key(|(stream, _)| stream.clone());
    assert_eq!(disowned, rest);
    assert!(matches!(consumer.next().await, Notification::Terminated(Terminated::Shutdown)));
    assert!(consumer.notifications.recv().await.is_none());
    let pending = fixture.pending().await;
    assert_eq!(pending.len(), 2);
    assert!(
        pending.iter().all(|p| p.consumer.as_str() == SettleAction::RELEASED && p.deliveries == 0)
    );
    assert_eq!(
        fixture.connect().await.leases(&[fixture.lease(owned[1].stream())]).await.unwrap(),
        [None]
    );

    // The next process gets them as new streams.
    let mut next = fixture.consumer("next", quick()).await;
    assert_eq!(next.added().await.owners(), 1);
    assert_eq!(next.added().await.owners(), 1);
    assert_eq!(next.assignment.members().await.unwrap().len(), 1);
}

async fn shutdown_acquires_nothing_more_and_is_idempotent(fixture: &ServiceFixture) {
    let mut consumer = fixture.consumer("c", quick()).await;
    let (first, second) = tokio::join!(
        consumer.assignment.shutdown(Duration::ZERO),
        consumer.assignment.shutdown(Duration::ZERO),
    );
    assert_eq!((first.unwrap(), second.unwrap()), (0, 0));
    assert_eq!(consumer.assignment.shutdown(LIMIT).await.unwrap(), 0);

    let stream = fixture.add(&["s"]).await.remove(0);
    let claim = consumer.assignment.claim(&stream).await;
    assert!(matches!(claim, Err(headwater_assignment::ClaimError::Closed)), "{claim:?}");
    assert!(matches!(consumer.next().await, Notification::Terminated(Terminated::Shutdown)));
    assert!(consumer.notifications.recv().await.is_none());
    assert_eq!(fixture.pending().await, []);

    let mut late = fixture.consumer("late", AssignmentConfig { streams_max: 1, ..quick() }).await;
    assert_eq!(late.added().await.stream(), &stream);
}

async fn a_dropped_assignment_terminates_its_notifications(fixture: &ServiceFixture) {
    let mut consumer = fixture.consumer("c", quick()).await;
    fixture.add(&["s"]).await;
    let owned = consumer.added().await;
    drop(consumer.assignment);

    let last = consumer.notifications.recv().await;
    assert!(matches!(last, Some(Notification::Terminated(Terminated::Dropped))), "{last:?}");
    assert!(consumer.notifications.recv().await.is_none());
    // Nothing renews the lease any more, so its guard fires.
    timeout(LIMIT, owned.guard().lost()).await.unwrap();
}
