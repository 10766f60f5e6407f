//! How an ownership ends, by wish or by loss, and that it ends once.

use std::time::Duration;

use headwater_assignment::{AssignmentConfig, Disowned, EndError, Notification, Terminated};
use headwater_stream::Then;
use tokio::time::{Instant, timeout};

use crate::place::{LIMIT, Place, QUIET, SLACK, eventually, quick};

everywhere!(
    done_ends_a_stream_for_good,
    a_released_stream_goes_to_somebody_else_as_if_it_were_new,
    a_stream_whose_lease_is_lost_is_disowned_once_and_cannot_be_ended,
    a_stream_whose_entry_is_gone_is_disowned,
    an_entry_that_somebody_else_took_is_taken_back,
    ownership_lasts_as_long_as_the_process_lives,
    shutdown_waits_for_work_and_gives_back_the_rest,
    shutdown_takes_nothing_more_and_ends_twice_without_harm,
    a_dropped_assignment_ends_its_channel,
);

async fn done_ends_a_stream_for_good(place: &Place) {
    let mut consumer = place.consumer("c", quick()).await;
    place.add(&["s"]).await;
    let owned = consumer.added().await;
    let work = owned.work().unwrap();

    consumer.assignment.done(&owned).await.unwrap();

    drop(work);
    let lease = place.lease(owned.stream());
    assert_eq!(place.connect().await.leases(&[lease]).await.unwrap(), [None]);
    assert!(owned.work().is_none());
    assert!(!owned.guard().is_trusted());
    timeout(LIMIT, owned.guard().lost()).await.unwrap();
    assert_eq!((place.pending().await, place.entries(&place.input()).await), (vec![], vec![]));
    // A repetition is no error, another wish is.
    consumer.assignment.done(&owned).await.unwrap();
    let release = consumer.assignment.release(&owned).await;
    assert!(matches!(release, Err(EndError::NotOwner { .. })), "{release:?}");
    consumer.hears_nothing_for(2 * quick().heartbeat_every).await;
}

async fn a_released_stream_goes_to_somebody_else_as_if_it_were_new(place: &Place) {
    let mut giver = place.consumer("giver", quick()).await;
    let stream = place.add(&["s"]).await.remove(0);
    let given = giver.added().await;
    let mut taker = place.consumer("taker", quick()).await;

    let released = Instant::now();
    giver.assignment.release(&given).await.unwrap();
    let taken = taker.added().await;

    assert!(released.elapsed() < SLACK, "after {:?}", released.elapsed());
    assert_eq!((taken.stream(), taken.owners()), (&stream, 1));
    assert!(taken.epoch() > given.epoch());
    assert!(giver.assignment.owned().is_empty());
    let done = giver.assignment.done(&given).await;
    assert!(matches!(done, Err(EndError::NotOwner { .. })), "{done:?}");
    giver.hears_nothing_for(QUIET).await;
    taker.assignment.done(&taken).await.unwrap();
}

async fn a_stream_whose_lease_is_lost_is_disowned_once_and_cannot_be_ended(place: &Place) {
    let mut owner = place.consumer("owner", quick()).await;
    let stream = place.add(&["s"]).await.remove(0);
    let old = owner.added().await;
    let mut other = place.consumer("other", quick()).await;

    // When the lease is broken and another process has the stream ...
    place.break_lease(&old, owner.assignment.holder()).await;
    assert_eq!(other.expired().await, stream);
    let new = other.assignment.claim(&stream).await.unwrap();

    // ... then the old owner can change nothing, and hears of it once.
    for _ in 0..2 {
        let done = owner.assignment.done(&old).await;
        assert!(matches!(done, Err(EndError::NotOwner { .. })), "{done:?}");
    }
    assert_eq!(owner.disowned().await, (stream, Disowned::LeaseLost));
    timeout(LIMIT, old.guard().lost()).await.unwrap();
    assert!(old.work().is_none());
    owner.hears_nothing_for(2 * quick().heartbeat_every).await;
    assert!(new.guard().is_trusted());
    other.assignment.done(&new).await.unwrap();
}

async fn a_stream_whose_entry_is_gone_is_disowned(place: &Place) {
    let mut consumer = place.consumer("c", quick()).await;
    let stream = place.add(&["s"]).await.remove(0);
    let owned = consumer.added().await;

    let backend = place.connect().await;
    let id = place.entries(&place.input()).await[0].id;
    backend.remove_group(&place.input(), &place.group()).await.unwrap();
    backend.delete_entries(&place.input(), &[id]).await.unwrap();

    // The group is made anew, and the next beat finds nothing pending in it.
    assert_eq!(consumer.disowned().await, (stream, Disowned::EntryGone));
    assert!(!owned.guard().is_trusted() || owned.work().is_none());
    consumer.hears_nothing_for(QUIET).await;
}

async fn an_entry_that_somebody_else_took_is_taken_back(place: &Place) {
    let mut consumer = place.consumer("c", quick()).await;
    place.add(&["s"]).await;
    let owned = consumer.added().await;

    // Given a foreign program that reclaims by time alone.
    let (backend, thief) = (place.connect().await, "thief".parse().unwrap());
    let (input, group) = (place.input(), place.group());
    let ids = [place.entries(&input).await[0].id];
    let reclaim = headwater_stream::Reclaim {
        stream: &input,
        group: &group,
        consumer: &thief,
        fence: None,
        from: headwater_stream::ReclaimFrom::Ids(&ids),
        min_idle: Duration::ZERO,
        after: None,
        count: 1,
    };
    assert_eq!(backend.reclaim(reclaim).await.unwrap().entries.len(), 1);

    eventually("the entry to be taken back", || async {
        place.pending().await[0].consumer.as_str() == consumer.assignment.holder().as_str()
    })
    .await;
    consumer.assignment.done(&owned).await.unwrap();
    consumer.hears_nothing_for(QUIET).await;
}

async fn ownership_lasts_as_long_as_the_process_lives(place: &Place) {
    let mut owner = place.consumer("owner", quick()).await;
    place.add(&["s"]).await;
    let owned = owner.added().await;
    let mut other = place.consumer("other", quick()).await;

    other.hears_nothing_for(3 * quick().lease_ttl()).await;

    assert!(owned.guard().is_trusted());
    // The entry is kept alive, too, so that nobody takes it for abandoned.
    assert!(place.pending().await[0].idle < quick().lease_ttl());
    assert_eq!(place.pending().await[0].deliveries, 1);
    owner.assignment.done(&owned).await.unwrap();
}

async fn shutdown_waits_for_work_and_gives_back_the_rest(place: &Place) {
    let mut consumer = place.consumer("c", quick()).await;
    place.add(&["done in time", "never done", "neither"]).await;
    let owned = consumer.added_many(3).await;

    // When two of three are not done within the drain ...
    let drain = Duration::from_secs(5);
    let (given_back, ()) = tokio::join!(consumer.assignment.shutdown(drain), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        consumer.assignment.done(&owned[0]).await.unwrap();
    });

    // ... then they are given back, not acknowledged, and their owner is told.
    assert_eq!(given_back.unwrap(), 2);
    let mut disowned = vec![consumer.disowned().await, consumer.disowned().await];
    disowned.sort_by_key(|(stream, _)| stream.clone());
    let mut rest: Vec<_> =
        owned[1..].iter().map(|owned| (owned.stream().clone(), Disowned::Shutdown)).collect();
    rest.sort_by_key(|(stream, _)| stream.clone());
    assert_eq!(disowned, rest);
    assert!(matches!(consumer.next().await, Notification::Terminated(Terminated::Shutdown)));
    assert!(consumer.notifications.recv().await.is_none());
    let pending = place.pending().await;
    assert_eq!(pending.len(), 2);
    assert!(pending.iter().all(|p| p.consumer.as_str() == Then::RELEASED && p.deliveries == 0));
    assert_eq!(
        place.connect().await.leases(&[place.lease(owned[1].stream())]).await.unwrap(),
        [None]
    );

    // The next process gets them as if they were new.
    let mut next = place.consumer("next", quick()).await;
    assert_eq!(next.added().await.owners(), 1);
    assert_eq!(next.added().await.owners(), 1);
    assert_eq!(next.assignment.members().await.unwrap().len(), 1);
}

async fn shutdown_takes_nothing_more_and_ends_twice_without_harm(place: &Place) {
    let mut consumer = place.consumer("c", quick()).await;
    let (first, second) = tokio::join!(
        consumer.assignment.shutdown(Duration::ZERO),
        consumer.assignment.shutdown(Duration::ZERO),
    );
    assert_eq!((first.unwrap(), second.unwrap()), (0, 0));
    assert_eq!(consumer.assignment.shutdown(LIMIT).await.unwrap(), 0);

    let stream = place.add(&["s"]).await.remove(0);
    let claim = consumer.assignment.claim(&stream).await;
    assert!(matches!(claim, Err(headwater_assignment::ClaimError::Closed)), "{claim:?}");
    assert!(matches!(consumer.next().await, Notification::Terminated(Terminated::Shutdown)));
    assert!(consumer.notifications.recv().await.is_none());
    assert_eq!(place.pending().await, []);

    let mut late = place.consumer("late", AssignmentConfig { streams_max: 1, ..quick() }).await;
    assert_eq!(late.added().await.stream(), &stream);
}

async fn a_dropped_assignment_ends_its_channel(place: &Place) {
    let mut consumer = place.consumer("c", quick()).await;
    place.add(&["s"]).await;
    let owned = consumer.added().await;
    drop(consumer.assignment);

    let last = consumer.notifications.recv().await;
    assert!(matches!(last, Some(Notification::Terminated(Terminated::Dropped))), "{last:?}");
    assert!(consumer.notifications.recv().await.is_none());
    // Nothing renews the lease any more, so its guard fires.
    timeout(LIMIT, owned.guard().lost()).await.unwrap();
}
