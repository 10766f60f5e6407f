//! Fail-over when an owner dies, at any step.

use std::collections::BTreeSet;
use std::time::Duration;

use headwater_assignment::{AssignmentConfig, ClaimError, Notification, OnExpired};
use headwater_stream::{AcquireResult, HolderName};
use tokio::time::{Instant, sleep};

use crate::fixture::{QUIET, SLACK, ServiceFixture, quick};

everywhere!(
    a_killed_consumers_stream_is_claimed_by_exactly_one_survivor_in_time,
    one_of_many_concurrent_claims_wins,
    unfinished_streams_are_recovered_and_finished_ones_are_not,
    a_crash_between_read_and_lease_is_detected,
    a_crash_between_lease_and_claim_is_detected,
    a_restarted_service_recovers_its_streams,
    an_unclaimed_stream_is_announced_again,
    a_stream_is_claimed_automatically_if_configured,
    a_stream_that_exceeds_owners_max_is_quarantined,
    claiming_an_owned_done_or_unknown_stream_fails_with_the_reason,
);

async fn a_killed_consumers_stream_is_claimed_by_exactly_one_survivor_in_time(
    fixture: &ServiceFixture,
) {
    // Given an owner and three waiting consumers.
    let config = quick();
    let mut owner = fixture.consumer("owner", config.clone()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    let owned = owner.added().await;
    assert_eq!((owned.stream(), owned.owners()), (&stream, 1));
    let mut survivors = Vec::new();
    for _ in 0..3 {
        survivors.push(fixture.consumer("survivor", config.clone()).await);
    }
    sleep(QUIET).await;

    // When the owner dies, then a consumer is notified and claims the stream ...
    owner.die();
    let died = Instant::now();
    let (new, after) = {
        let claims = survivors.iter_mut().map(|survivor| {
            Box::pin(async {
                loop {
                    assert_eq!(survivor.expired().await, stream);
                    match survivor.assignment.claim(&stream).await {
                        Ok(new) => return (new, died.elapsed()),
                        Err(ClaimError::AlreadyClaimed { .. }) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
            })
        });
        futures_util::future::select_all(claims).await.0
    };

    // ... in time, and no other consumer owns it.
    assert!(after < config.lease_ttl() + SLACK, "after {after:?}");
    assert!(new.epoch() > owned.epoch());
    assert_eq!((new.stream(), new.owners()), (&stream, 2));
    assert!(new.guard().is_valid());
    sleep(QUIET).await;
    assert_eq!(survivors.iter().map(|s| s.assignment.owned().len()).sum::<usize>(), 1);
    for survivor in &survivors {
        let claim = survivor.assignment.claim(&stream).await;
        assert!(matches!(claim, Err(ClaimError::AlreadyClaimed { .. })), "{claim:?}");
    }
}

async fn one_of_many_concurrent_claims_wins(fixture: &ServiceFixture) {
    let mut owner = fixture.consumer("owner", quick()).await;
    let names: Vec<String> = (0..20).map(|i| i.to_string()).collect();
    let streams = fixture.add(&names.iter().map(String::as_str).collect::<Vec<_>>()).await;
    owner.added_many(streams.len()).await;
    owner.die();
    let mut claimants = Vec::new();
    for _ in 0..4 {
        claimants.push(fixture.consumer("claimant", quick()).await);
    }
    // All leases have expired when all streams are announced.
    let mut expired = BTreeSet::new();
    while expired.len() < streams.len() {
        expired.insert(claimants[0].expired().await);
    }

    for stream in &streams {
        // Four processes, and two callers in each of them.
        let claims = claimants.iter().chain(&claimants).map(|c| c.assignment.claim(stream));
        let claims = futures_util::future::join_all(claims).await;
        let won: Vec<_> = claims.iter().flatten().collect();
        assert_eq!(won.len(), 1, "{claims:?}");
        assert_eq!(won[0].owners(), 2);
        for claim in claims.iter().filter_map(|claim| claim.as_ref().err()) {
            assert!(matches!(claim, ClaimError::AlreadyClaimed { .. }), "{claim}");
        }
    }
    assert_eq!(claimants.iter().map(|c| c.assignment.owned().len()).sum::<usize>(), streams.len());
}

async fn unfinished_streams_are_recovered_and_finished_ones_are_not(fixture: &ServiceFixture) {
    let mut first = fixture.consumer("first", quick()).await;
    let streams = fixture.add(&["a", "b", "c", "d", "e"]).await;
    let owned = first.added_many(5).await;
    for done in owned.iter().filter(|owned| streams[..2].contains(owned.stream())) {
        first.assignment.done(done).await.unwrap();
    }
    first.die();

    let mut second = fixture.consumer("second", quick()).await;
    let mut recovered = Vec::new();
    for _ in 0..3 {
        let stream = second.expired().await;
        let owned = second.assignment.claim(&stream).await.unwrap();
        assert_eq!(owned.owners(), 2);
        recovered.push(stream);
    }
    recovered.sort();
    assert_eq!(recovered, streams[2..]);
    second.expect_no_notification_for(QUIET + quick().sweep_every).await;

    for owned in second.assignment.owned() {
        second.assignment.done(&owned).await.unwrap();
    }
    assert_eq!(
        (fixture.pending().await, fixture.entries(&fixture.input()).await),
        (vec![], vec![])
    );
}

async fn a_crash_between_read_and_lease_is_detected(fixture: &ServiceFixture) {
    let mut consumer = fixture.consumer("c", AssignmentConfig { streams_max: 1, ..quick() }).await;
    fixture.add(&["owned"]).await;
    consumer.added().await;
    // No consumer has capacity, so only the ghost reads this entry; it has no lease, and no lease expires.
    let stream = fixture.add(&["lost"]).await.remove(0);
    fixture.read_and_die().await;

    assert_eq!(consumer.expired().await, stream);
    let mut other = fixture.consumer("other", quick()).await;
    assert_eq!(other.expired().await, stream);
    assert_eq!(other.assignment.claim(&stream).await.unwrap().owners(), 2);
}

async fn a_crash_between_lease_and_claim_is_detected(fixture: &ServiceFixture) {
    let mut owner = fixture.consumer("owner", quick()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    owner.added().await;
    owner.die();
    let mut survivor = fixture.consumer("survivor", quick()).await;
    assert_eq!(survivor.expired().await, stream);

    // Given a process that acquires the lease and dies before it has the entry.
    let ghost = HolderName::new("ghost:1").unwrap();
    let backend = fixture.connect().await;
    let won =
        backend.acquire(&fixture.lease(&stream), &ghost, Duration::from_secs(6)).await.unwrap();
    assert!(matches!(won, AcquireResult::Won(_)));
    match survivor.assignment.claim(&stream).await {
        Err(ClaimError::AlreadyClaimed { by, .. }) => assert_eq!(by, Some(ghost)),
        other => panic!("{other:?}"),
    }

    // When that lease expires, then the stream is announced again.
    while survivor.assignment.owned().is_empty() {
        let stream = survivor.expired().await;
        match survivor.assignment.claim(&stream).await {
            Ok(_) | Err(ClaimError::AlreadyClaimed { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
}

async fn a_restarted_service_recovers_its_streams(fixture: &ServiceFixture) {
    let mut before = fixture.consumer("c", quick()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    before.added().await;
    before.die();
    sleep(quick().lease_ttl() + Duration::from_millis(100)).await;

    // No process was running when the lease expired. The first sweep is at the start.
    let started = Instant::now();
    let slow = AssignmentConfig { sweep_every: Duration::from_secs(60), ..quick() };
    let mut after = fixture.consumer("c", slow.clone()).await;
    assert_eq!(after.expired().await, stream);
    assert!(started.elapsed() < slow.sweep_every, "after {:?}", started.elapsed());
}

async fn an_unclaimed_stream_is_announced_again(fixture: &ServiceFixture) {
    let mut owner = fixture.consumer("owner", quick()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    owner.added().await;
    owner.die();

    let mut survivor = fixture.consumer("survivor", quick()).await;
    for _ in 0..3 {
        assert_eq!(survivor.expired().await, stream);
    }
    survivor.assignment.claim(&stream).await.unwrap();
    survivor.expect_no_notification_for(2 * quick().sweep_every).await;
}

async fn a_stream_is_claimed_automatically_if_configured(fixture: &ServiceFixture) {
    let mut owner = fixture.consumer("owner", quick()).await;
    let stream = fixture.add(&["s"]).await.remove(0);
    owner.added().await;
    owner.die();

    let config = AssignmentConfig { on_expired: OnExpired::Claim, ..quick() };
    let mut survivor = fixture.consumer("survivor", config).await;
    let owned = survivor.added().await;
    assert_eq!((owned.stream(), owned.owners()), (&stream, 2));
    survivor.assignment.done(&owned).await.unwrap();
    assert_eq!(fixture.pending().await, []);
}

async fn a_stream_that_exceeds_owners_max_is_quarantined(fixture: &ServiceFixture) {
    let config = AssignmentConfig {
        owners_max: 2,
        heartbeat_every: Duration::from_millis(250),
        sweep_every: Duration::from_millis(100),
        ..Default::default()
    };
    let stream = fixture.add(&["poison"]).await.remove(0);
    let mut first = fixture.consumer("first", config.clone()).await;
    first.added().await;
    first.die();
    let mut second = fixture.consumer("second", config.clone()).await;
    assert_eq!(second.expired().await, stream);
    assert_eq!(second.assignment.claim(&stream).await.unwrap().owners(), 2);
    second.die();

    // When two owners have died, then there is no third.
    let mut third = fixture.consumer("third", config).await;
    match third.next().await {
        Notification::Quarantined { stream: quarantined, owners } => {
            assert_eq!((quarantined, owners), (stream.clone(), 2));
        }
        other => panic!("{other:?}"),
    }
    let letters = fixture.dead_letters().await;
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].fields.get("reason").unwrap(), "quarantined after 2 owners");
    let input = letters[0].fields.get("lbs-input").unwrap();
    assert!(std::str::from_utf8(input).unwrap().contains(stream.as_str()));
    assert_eq!(
        (fixture.pending().await, fixture.entries(&fixture.input()).await),
        (vec![], vec![])
    );
    assert!(matches!(third.assignment.claim(&stream).await, Err(ClaimError::Unknown { .. })));
    third.expect_no_notification_for(QUIET).await;
}

async fn claiming_an_owned_done_or_unknown_stream_fails_with_the_reason(fixture: &ServiceFixture) {
    let mut owner = fixture.consumer("owner", quick()).await;
    let other = fixture.consumer("other", AssignmentConfig { read_batch: 1, ..quick() }).await;
    let mut other = other;
    let stream = fixture.add(&["s"]).await.remove(0);
    let (owner, other, owned) = tokio::select! {
        owned = owner.added() => (&mut owner, &mut other, owned),
        owned = other.added() => (&mut other, &mut owner, owned),
    };

    for claimant in [&owner, &other] {
        match claimant.assignment.claim(&stream).await {
            Err(ClaimError::AlreadyClaimed { by, .. }) => {
                assert_eq!(by.as_ref(), Some(owner.assignment.holder()));
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(owned.guard().is_valid());

    owner.assignment.done(&owned).await.unwrap();
    for claimant in [&owner, &other] {
        for stream in [&stream, &fixture.stream("never added")] {
            let claim = claimant.assignment.claim(stream).await;
            assert!(matches!(claim, Err(ClaimError::Unknown { .. })), "{claim:?}");
        }
    }
    let backend = fixture.connect().await;
    assert_eq!(backend.leases(&[fixture.lease(&stream)]).await.unwrap(), [None]);
}
