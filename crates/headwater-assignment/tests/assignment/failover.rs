//! What happens when an owner dies, at whatever step.

use std::collections::BTreeSet;
use std::time::Duration;

use headwater_assignment::{AssignmentConfig, ClaimError, Notification, OnExpired};
use headwater_stream::{Acquire, HolderName};
use tokio::time::{Instant, sleep};

use crate::place::{Place, QUIET, SLACK, quick};

everywhere!(
    a_killed_consumers_stream_is_claimed_by_exactly_one_survivor_in_time,
    of_all_who_claim_at_once_one_wins,
    a_partial_set_is_recovered_without_what_is_done,
    a_crash_between_read_and_lock_is_found,
    a_crash_between_lock_and_takeover_is_found,
    a_restarted_service_finds_what_it_left,
    an_unclaimed_stream_is_announced_again,
    a_stream_is_claimed_for_the_program_if_it_asks_for_that,
    a_stream_that_wears_out_its_owners_is_quarantined,
    claiming_what_is_owned_done_or_unknown_says_so,
);

async fn a_killed_consumers_stream_is_claimed_by_exactly_one_survivor_in_time(place: &Place) {
    // Given an owner and three others who wait.
    let config = quick();
    let mut owner = place.consumer("owner", config.clone()).await;
    let stream = place.add(&["s"]).await.remove(0);
    let owned = owner.added().await;
    assert_eq!((owned.stream(), owned.owners()), (&stream, 1));
    let mut survivors = Vec::new();
    for _ in 0..3 {
        survivors.push(place.consumer("survivor", config.clone()).await);
    }
    sleep(QUIET).await;

    // When the owner dies, then somebody hears of it and claims the stream ...
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

    // ... in time, and nobody else has it.
    assert!(after < config.lease_ttl() + SLACK, "after {after:?}");
    assert!(new.epoch() > owned.epoch());
    assert_eq!((new.stream(), new.owners()), (&stream, 2));
    assert!(new.guard().is_trusted());
    sleep(QUIET).await;
    assert_eq!(survivors.iter().map(|s| s.assignment.owned().len()).sum::<usize>(), 1);
    for survivor in &survivors {
        let claim = survivor.assignment.claim(&stream).await;
        assert!(matches!(claim, Err(ClaimError::AlreadyClaimed { .. })), "{claim:?}");
    }
}

async fn of_all_who_claim_at_once_one_wins(place: &Place) {
    let mut owner = place.consumer("owner", quick()).await;
    let names: Vec<String> = (0..20).map(|i| i.to_string()).collect();
    let streams = place.add(&names.iter().map(String::as_str).collect::<Vec<_>>()).await;
    owner.added_many(streams.len()).await;
    owner.die();
    let mut claimants = Vec::new();
    for _ in 0..4 {
        claimants.push(place.consumer("claimant", quick()).await);
    }
    // All leases have run out when all streams are announced.
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

async fn a_partial_set_is_recovered_without_what_is_done(place: &Place) {
    let mut first = place.consumer("first", quick()).await;
    let streams = place.add(&["a", "b", "c", "d", "e"]).await;
    let owned = first.added_many(5).await;
    for done in owned.iter().filter(|owned| streams[..2].contains(owned.stream())) {
        first.assignment.done(done).await.unwrap();
    }
    first.die();

    let mut second = place.consumer("second", quick()).await;
    let mut recovered = Vec::new();
    for _ in 0..3 {
        let stream = second.expired().await;
        let owned = second.assignment.claim(&stream).await.unwrap();
        assert_eq!(owned.owners(), 2);
        recovered.push(stream);
    }
    recovered.sort();
    assert_eq!(recovered, streams[2..]);
    second.hears_nothing_for(QUIET + quick().sweep_every).await;

    for owned in second.assignment.owned() {
        second.assignment.done(&owned).await.unwrap();
    }
    assert_eq!((place.pending().await, place.entries(&place.input()).await), (vec![], vec![]));
}

async fn a_crash_between_read_and_lock_is_found(place: &Place) {
    let mut consumer = place.consumer("c", AssignmentConfig { streams_max: 1, ..quick() }).await;
    place.add(&["in hand"]).await;
    consumer.added().await;
    // Nobody has room, so only the ghost reads this one; it has no lease, and no lease expires.
    let stream = place.add(&["lost"]).await.remove(0);
    place.read_and_die().await;

    assert_eq!(consumer.expired().await, stream);
    let mut other = place.consumer("other", quick()).await;
    assert_eq!(other.expired().await, stream);
    assert_eq!(other.assignment.claim(&stream).await.unwrap().owners(), 2);
}

async fn a_crash_between_lock_and_takeover_is_found(place: &Place) {
    let mut owner = place.consumer("owner", quick()).await;
    let stream = place.add(&["s"]).await.remove(0);
    owner.added().await;
    owner.die();
    let mut survivor = place.consumer("survivor", quick()).await;
    assert_eq!(survivor.expired().await, stream);

    // Given somebody who wins the lease and dies before it has the entry.
    let ghost = HolderName::new("ghost:1").unwrap();
    let backend = place.connect().await;
    let won = backend.acquire(&place.lease(&stream), &ghost, Duration::from_secs(6)).await.unwrap();
    assert!(matches!(won, Acquire::Won(_)));
    match survivor.assignment.claim(&stream).await {
        Err(ClaimError::AlreadyClaimed { by, .. }) => assert_eq!(by, Some(ghost)),
        other => panic!("{other:?}"),
    }

    // When that lease runs out, then the stream is announced once more.
    while survivor.assignment.owned().is_empty() {
        let stream = survivor.expired().await;
        match survivor.assignment.claim(&stream).await {
            Ok(_) | Err(ClaimError::AlreadyClaimed { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
}

async fn a_restarted_service_finds_what_it_left(place: &Place) {
    let mut before = place.consumer("c", quick()).await;
    let stream = place.add(&["s"]).await.remove(0);
    before.added().await;
    before.die();
    sleep(quick().lease_ttl() + Duration::from_millis(100)).await;

    // Nobody was there to hear the lease run out. The first sweep is at the start.
    let started = Instant::now();
    let slow = AssignmentConfig { sweep_every: Duration::from_secs(60), ..quick() };
    let mut after = place.consumer("c", slow.clone()).await;
    assert_eq!(after.expired().await, stream);
    assert!(started.elapsed() < slow.sweep_every, "after {:?}", started.elapsed());
}

async fn an_unclaimed_stream_is_announced_again(place: &Place) {
    let mut owner = place.consumer("owner", quick()).await;
    let stream = place.add(&["s"]).await.remove(0);
    owner.added().await;
    owner.die();

    let mut survivor = place.consumer("survivor", quick()).await;
    for _ in 0..3 {
        assert_eq!(survivor.expired().await, stream);
    }
    survivor.assignment.claim(&stream).await.unwrap();
    survivor.hears_nothing_for(2 * quick().sweep_every).await;
}

async fn a_stream_is_claimed_for_the_program_if_it_asks_for_that(place: &Place) {
    let mut owner = place.consumer("owner", quick()).await;
    let stream = place.add(&["s"]).await.remove(0);
    owner.added().await;
    owner.die();

    let config = AssignmentConfig { on_expired: OnExpired::Claim, ..quick() };
    let mut survivor = place.consumer("survivor", config).await;
    let owned = survivor.added().await;
    assert_eq!((owned.stream(), owned.owners()), (&stream, 2));
    survivor.assignment.done(&owned).await.unwrap();
    assert_eq!(place.pending().await, []);
}

async fn a_stream_that_wears_out_its_owners_is_quarantined(place: &Place) {
    let config = AssignmentConfig {
        owners_max: 2,
        heartbeat_every: Duration::from_millis(250),
        sweep_every: Duration::from_millis(100),
        ..Default::default()
    };
    let stream = place.add(&["poison"]).await.remove(0);
    let mut first = place.consumer("first", config.clone()).await;
    first.added().await;
    first.die();
    let mut second = place.consumer("second", config.clone()).await;
    assert_eq!(second.expired().await, stream);
    assert_eq!(second.assignment.claim(&stream).await.unwrap().owners(), 2);
    second.die();

    // When two owners have died, then the third is spared.
    let mut third = place.consumer("third", config).await;
    match third.next().await {
        Notification::Quarantined { stream: quarantined, owners } => {
            assert_eq!((quarantined, owners), (stream.clone(), 2));
        }
        other => panic!("{other:?}"),
    }
    let letters = place.dead_letters().await;
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].fields.get("reason").unwrap(), "quarantined after 2 owners");
    let input = letters[0].fields.get("lbs-input").unwrap();
    assert!(std::str::from_utf8(input).unwrap().contains(stream.as_str()));
    assert_eq!((place.pending().await, place.entries(&place.input()).await), (vec![], vec![]));
    assert!(matches!(third.assignment.claim(&stream).await, Err(ClaimError::Unknown { .. })));
    third.hears_nothing_for(QUIET).await;
}

async fn claiming_what_is_owned_done_or_unknown_says_so(place: &Place) {
    let mut owner = place.consumer("owner", quick()).await;
    let other = place.consumer("other", AssignmentConfig { read_batch: 1, ..quick() }).await;
    let mut other = other;
    let stream = place.add(&["s"]).await.remove(0);
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
    assert!(owned.guard().is_trusted());

    owner.assignment.done(&owned).await.unwrap();
    for claimant in [&owner, &other] {
        for stream in [&stream, &place.stream("never added")] {
            let claim = claimant.assignment.claim(stream).await;
            assert!(matches!(claim, Err(ClaimError::Unknown { .. })), "{claim:?}");
        }
    }
    let backend = place.connect().await;
    assert_eq!(backend.leases(&[place.lease(&stream)]).await.unwrap(), [None]);
}
