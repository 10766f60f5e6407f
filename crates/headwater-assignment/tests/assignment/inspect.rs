//! A service as an operator sees it, and a release by an operator.

use headwater_assignment::{
    AssignedState, AssignmentConfig, Disowned, EndError, OnExpired, ReleaseError, add, describe,
    list, release, summarize,
};
use headwater_stream::{Fields, Retention};

use crate::fixture::{ServiceFixture, eventually, quick};

everywhere!(
    reading_creates_nothing,
    streams_are_listed_in_pages_with_state_owner_and_info,
    a_stream_whose_owner_died_is_expired_until_it_is_claimed,
    an_operator_takes_a_stream_from_a_live_owner_without_counting_a_death,
    an_operator_releases_a_stream_of_a_dead_owner_for_any_consumer,
    a_release_without_an_owner_says_why_it_is_refused,
);

fn claiming() -> AssignmentConfig {
    AssignmentConfig { on_expired: OnExpired::Claim, ..quick() }
}

async fn reading_creates_nothing(fixture: &ServiceFixture) {
    let backend = fixture.connect().await;
    let page = list(&*backend, &fixture.service, None, 10).await.unwrap();
    assert_eq!((page.streams.len(), page.next), (0, None));
    assert_eq!(describe(&*backend, &fixture.service, &fixture.stream("s")).await.unwrap(), None);
    let summary = summarize(&*backend, &fixture.service).await.unwrap();
    assert_eq!((summary.waiting, summary.assigned, summary.dead_letters), (Some(0), 0, 0));
    assert!(summary.members.is_empty());
    assert_eq!(backend.stats(&fixture.input()).await.unwrap(), None);

    // With an entry and without a consumer there is still no group.
    let stream = fixture.add(&["s"]).await.remove(0);
    let found = describe(&*backend, &fixture.service, &stream).await.unwrap().unwrap();
    assert_eq!((found.state, found.owners), (AssignedState::Waiting, 0));
    assert_eq!(summarize(&*backend, &fixture.service).await.unwrap().waiting, Some(1));
    assert!(backend.stats(&fixture.input()).await.unwrap().unwrap().groups.is_empty());
}

async fn streams_are_listed_in_pages_with_state_owner_and_info(fixture: &ServiceFixture) {
    let backend = fixture.connect().await;
    let mut owner = fixture.consumer("owner", AssignmentConfig { streams_max: 1, ..quick() }).await;
    let info = r#"{"tenant":  "acme"}"#;
    let first = fixture.stream("s0");
    add(&*backend, &fixture.service, &first, Some(info)).await.unwrap();
    let owned = owner.added().await;
    fixture.add(&["s1", "s2"]).await;
    let malformed = Fields::new([("other", "1")]);
    backend.append(&fixture.input(), &[malformed], &Retention::KEEP_ALL).await.unwrap();

    let (mut listed, mut after) = (Vec::new(), None);
    loop {
        let page = list(&*backend, &fixture.service, after, 2).await.unwrap();
        assert!(page.streams.len() <= 2);
        listed.extend(page.streams);
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    let states: Vec<&str> = listed.iter().map(|stream| stream.state.as_str()).collect();
    assert_eq!(states, ["owned", "waiting", "waiting", "malformed"]);
    let held = &listed[0];
    assert_eq!((held.stream.as_ref(), held.info.as_deref()), (Some(&first), Some(info)));
    assert_eq!(held.holder.as_ref(), Some(owner.assignment.holder()));
    assert_eq!((held.epoch, held.owners), (Some(owned.epoch()), 1));
    assert!(held.remaining.is_some_and(|left| left <= quick().lease_ttl()));
    assert_eq!((&listed[3].stream, listed[1].holder.as_ref()), (&None, None));
    let summary = summarize(&*backend, &fixture.service).await.unwrap();
    assert_eq!(summary.members, [owner.assignment.holder().clone()]);
    assert_eq!(summary.assigned, 1);

    // What is done is not listed, and its successor is read.
    owner.assignment.done(&owned).await.unwrap();
    let next = owner.added().await;
    let listed = list(&*backend, &fixture.service, None, 1).await.unwrap().streams;
    assert_eq!(listed[0].stream.as_ref(), Some(next.stream()));
    assert!(list(&*backend, &fixture.service, None, 0).await.is_err());
}

async fn a_stream_whose_owner_died_is_expired_until_it_is_claimed(fixture: &ServiceFixture) {
    let backend = fixture.connect().await;
    let mut owner = fixture.consumer("owner", quick()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    owner.added().await;
    owner.die();
    let state =
        || async { describe(&*backend, &fixture.service, &stream).await.unwrap().unwrap().state };
    eventually("the lease to expire", || async { state().await == AssignedState::Expired }).await;

    let mut other = fixture.consumer("other", claiming()).await;
    let owned = other.added().await;
    let found = describe(&*backend, &fixture.service, &stream).await.unwrap().unwrap();
    assert_eq!((found.state, found.owners), (AssignedState::Owned, 2));
    other.assignment.done(&owned).await.unwrap();
    assert_eq!(describe(&*backend, &fixture.service, &stream).await.unwrap(), None);
}

async fn an_operator_takes_a_stream_from_a_live_owner_without_counting_a_death(
    fixture: &ServiceFixture,
) {
    let backend = fixture.connect().await;
    let mut owner = fixture.consumer("owner", quick()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    let owned = owner.added().await;
    let mut other = fixture.consumer("other", quick()).await;

    let released = release(&*backend, &fixture.service, &stream).await.unwrap();

    assert_eq!(released.former_holder.as_ref(), Some(owner.assignment.holder()));
    assert_eq!(released.fenced_epoch, Some(owned.epoch()));
    // The former owner is fenced at once, and notified.
    let done = owner.assignment.done(&owned).await;
    assert!(matches!(done, Err(EndError::NotOwner { .. })), "{done:?}");
    assert_eq!(owner.disowned().await, (stream.clone(), Disowned::LeaseLost));
    owner.die();
    let next = other.added().await;
    assert_eq!((next.stream(), next.owners()), (&stream, 1));
    assert!(next.epoch() > owned.epoch());
    other.assignment.done(&next).await.unwrap();
}

async fn an_operator_releases_a_stream_of_a_dead_owner_for_any_consumer(fixture: &ServiceFixture) {
    let backend = fixture.connect().await;
    let mut owner = fixture.consumer("owner", quick()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    owner.added().await;
    owner.die();
    let state =
        || async { describe(&*backend, &fixture.service, &stream).await.unwrap().unwrap().state };
    eventually("the lease to expire", || async { state().await == AssignedState::Expired }).await;

    for _ in 0..2 {
        let released = release(&*backend, &fixture.service, &stream).await.unwrap();
        assert_eq!((released.former_holder, released.fenced_epoch), (None, None));
        assert_eq!(state().await, AssignedState::Released);
    }
    // Not `Expired`, although this consumer does not claim by itself.
    let mut other = fixture.consumer("other", quick()).await;
    let next = other.added().await;
    assert_eq!((next.stream(), next.owners()), (&stream, 1));
}

async fn a_release_without_an_owner_says_why_it_is_refused(fixture: &ServiceFixture) {
    let backend = fixture.connect().await;
    let stream = fixture.stream("s");
    let refused = release(&*backend, &fixture.service, &stream).await.unwrap_err();
    assert!(matches!(refused, ReleaseError::NotFound { .. }), "{refused}");

    fixture.add(&["s"]).await;
    let refused = release(&*backend, &fixture.service, &stream).await.unwrap_err();
    assert!(matches!(refused, ReleaseError::NotOwned { .. }), "{refused}");
}

/// A lock without an epoch, as the original client writes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lock_of_another_program_is_shown_and_not_released() {
    let redis = headwater_testkit::Redis::start().unwrap();
    let fixture = ServiceFixture::at(redis.url());
    let backend = fixture.connect().await;
    let mut ghost = fixture.consumer("ghost", quick()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    ghost.added().await;
    ghost.die();
    let lease = fixture.lease(&stream);
    redis.command(&["set", lease.as_str(), "go-consumer", "px", "60000"]).unwrap().ok().unwrap();

    let found = describe(&*backend, &fixture.service, &stream).await.unwrap().unwrap();
    assert_eq!((found.state, found.epoch), (AssignedState::Owned, None));
    assert_eq!(found.holder.unwrap().as_str(), "go-consumer");
    let refused = release(&*backend, &fixture.service, &stream).await.unwrap_err();
    assert!(matches!(refused, ReleaseError::ForeignOwner { .. }), "{refused}");
    assert!(refused.to_string().contains(lease.as_str()), "{refused}");
    assert_eq!(redis.command(&["get", lease.as_str()]).unwrap().text(), "go-consumer");
}
