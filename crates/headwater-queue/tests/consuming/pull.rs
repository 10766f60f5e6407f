//! Pull and settle: messages under leases, without a handler.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{
    ConsumerConfig, LeaseResult, NewMessage, Outcome, Policies, ProducerConfig, PullRequest,
    PulledMessage, Puller, QueueError, Reset, ResetGuard, ResetTo,
};
use headwater_stream::{ConsumerName, GroupName, MapName};
use headwater_testkit::Redis;
use tokio::time::{Instant, sleep, timeout};

use crate::fixture::{Fixture, GROUP, TIMEOUT, eventually};
use crate::recording_handler::recording_handler;
use crate::shared::shared;

const SHORT: Duration = Duration::from_secs(1);

fn request(max: usize) -> PullRequest {
    PullRequest { max, wait: Duration::from_secs(20), lease: Duration::from_secs(60) }
}

fn short(max: usize) -> PullRequest {
    PullRequest { lease: SHORT, ..request(max) }
}

/// Pulls until there is a message.
async fn one(puller: &Puller, fixture: &Fixture, request: PullRequest) -> Result<PulledMessage> {
    let pulling = async {
        loop {
            let mut pulled = puller.pull(&fixture.topic, GROUP, request).await?;
            assert!(pulled.len() <= 1, "{pulled:?}");
            if let Some(message) = pulled.pop() {
                return anyhow::Ok(message);
            }
        }
    };
    timeout(TIMEOUT, pulling).await.context("no message")?
}

async fn settle(
    puller: &Puller,
    fixture: &Fixture,
    pulled: &PulledMessage,
    outcome: Outcome,
) -> Result<LeaseResult> {
    let outcomes = vec![(pulled.lease.clone(), outcome)];
    Ok(puller.settle(&fixture.topic, GROUP, outcomes).await?[0])
}

fn payload(pulled: &PulledMessage) -> String {
    String::from_utf8_lossy(&pulled.message.payload).into_owned()
}

async fn a_message_is_settled_by_another_process_than_pulled_it(fixture: Fixture) -> Result<()> {
    fixture.create(3).await?;
    for partition in 0..3 {
        fixture.send(partition, Some("k"), &format!("m{partition}")).await?;
    }
    let (first, second) = (fixture.queue.puller(), fixture.second_queue().await?.puller());
    let mut leases = Vec::new();
    while leases.len() < 3 {
        let pulled = first.pull(&fixture.topic, GROUP, request(10)).await?;
        assert!(pulled.iter().all(|one| one.message.attempt == 1 && one.attempts_max == 5));
        leases.extend(pulled.into_iter().map(|one| one.lease.to_string()));
    }
    // The process that pulled them ends.
    first.close().await;
    let stopped = first.pull(&fixture.topic, GROUP, request(1)).await;
    assert!(matches!(stopped, Err(QueueError::Stopped { .. })), "{stopped:?}");
    let mut outcomes = Vec::new();
    for lease in leases {
        outcomes.push((lease.parse()?, Outcome::Done));
    }
    let again = outcomes.clone();
    let settled = second.settle(&fixture.topic, GROUP, outcomes).await?;
    assert_eq!(settled, [LeaseResult::Applied; 3]);
    let settled = second.settle(&fixture.topic, GROUP, again).await?;
    assert_eq!(settled, [LeaseResult::Expired; 3]);
    for partition in 0..3 {
        assert!(fixture.pending(partition).await?.is_empty());
    }
    Ok(())
}

async fn pulls_of_large_messages_read_no_more_than_they_return(fixture: Fixture) -> Result<()> {
    let large = "x".repeat(1_000_000);
    for _ in 0..12 {
        fixture.send(0, None, &large).await?;
    }
    let puller = fixture.queue.puller();
    let pulled = puller.pull(&fixture.topic, GROUP, short(1000)).await?;
    assert_eq!(pulled.len(), 4, "as many as fit into one answer");
    assert_eq!(fixture.pending(0).await?.len(), 4, "and no others were read");
    // Another process has read the rest, and died.
    let (group, dead) = (GroupName::new(GROUP)?, ConsumerName::new("pull:1000:0:dead")?);
    let mut reader = fixture.backend.reader(&group, &dead).await?;
    let streams = [fixture.stream(0).await?];
    let mut read = 0;
    while read < 8 {
        let batches = reader.read(&streams, 8, SHORT).await?;
        read += batches.iter().map(|batch| batch.entries.len()).sum::<usize>();
    }
    eventually("all leases ran out", async || {
        Ok(fixture.pending(0).await?.iter().all(|row| row.idle > SHORT))
    })
    .await?;
    for pulls in 1..=3 {
        let pulled = puller.pull(&fixture.topic, GROUP, request(1000)).await?;
        assert_eq!(pulled.len(), 4);
        let pending = fixture.pending(0).await?;
        let again = pending.iter().filter(|row| row.deliveries > 1).count();
        assert_eq!(again, pulls * 4, "a delivery counts only for those that were returned");
    }
    Ok(())
}

async fn a_lease_that_ran_out_is_reassigned_and_its_holder_is_fenced(
    fixture: Fixture,
) -> Result<()> {
    fixture.send(0, None, "precious").await?;
    let (first, second) = (fixture.queue.puller(), fixture.second_queue().await?.puller());
    let lost = one(&first, &fixture, short(1)).await?;
    // The same process, and another one.
    for (holder, deliveries) in [(&first, 2), (&second, 3)] {
        let got = one(holder, &fixture, short(1)).await?;
        assert_eq!((got.message.id, got.message.deliveries), (lost.message.id, deliveries));
        assert_eq!(got.message.attempt, 1, "no attempt failed");
        for outcome in [Outcome::retry("late"), Outcome::Release, Outcome::dead_letter("late")] {
            let result = settle(&first, &fixture, &lost, outcome).await?;
            assert_eq!(result, LeaseResult::Expired);
        }
        let extended =
            second.extend(&fixture.topic, GROUP, std::slice::from_ref(&lost.lease)).await?;
        assert_eq!(extended, [LeaseResult::Expired]);
        if deliveries == 3 {
            assert_eq!(settle(&first, &fixture, &got, Outcome::Done).await?, LeaseResult::Applied);
        }
    }
    assert!(fixture.pending(0).await?.is_empty() && fixture.dead_letters().await?.is_empty());
    Ok(())
}

async fn an_extended_lease_stays_with_its_holder(fixture: Fixture) -> Result<()> {
    fixture.send(0, None, "long work").await?;
    let (first, second) = (fixture.queue.puller(), fixture.second_queue().await?.puller());
    let held = one(&first, &fixture, short(1)).await?;
    let other = {
        let (puller, topic) = (second.clone(), fixture.topic.clone());
        let wait = Duration::from_secs(4);
        tokio::spawn(
            async move { puller.pull(&topic, GROUP, PullRequest { wait, ..short(1) }).await },
        )
    };
    while !other.is_finished() {
        let extended =
            second.extend(&fixture.topic, GROUP, std::slice::from_ref(&held.lease)).await?;
        assert_eq!(extended, [LeaseResult::Applied]);
        sleep(SHORT / 5).await;
    }
    assert!(other.await??.is_empty(), "it was held all the time");
    assert_eq!(settle(&second, &fixture, &held, Outcome::Done).await?, LeaseResult::Applied);
    Ok(())
}

async fn retries_and_dead_letters_follow_the_policies_of_the_topic(fixture: Fixture) -> Result<()> {
    let policies = Policies { max_retries: 1, ..Default::default() };
    fixture.queue.topics().create(&fixture.topic, 2, policies).await?;
    fixture.send(1, Some("k"), "fails").await?;
    let puller = fixture.queue.puller();
    let first = one(&puller, &fixture, request(1)).await?;
    assert_eq!((first.message.attempt, first.attempts_max), (1, 2));
    let after = Duration::from_millis(600);
    let (failed, started) = (Outcome::retry_after(after, "no"), Instant::now());
    assert_eq!(settle(&puller, &fixture, &first, failed).await?, LeaseResult::Applied);
    let second = one(&puller, &fixture, request(1)).await?;
    assert!(started.elapsed() >= after);
    assert_eq!((second.message.attempt, second.message.first_id()), (2, first.message.id));
    let failed = Outcome::retry("no again");
    assert_eq!(settle(&puller, &fixture, &second, failed).await?, LeaseResult::Applied);
    fixture.send(0, None, "hopeless").await?;
    let hopeless = one(&puller, &fixture, request(1)).await?;
    let given_up = Outcome::dead_letter("no use");
    assert_eq!(settle(&puller, &fixture, &hopeless, given_up).await?, LeaseResult::Applied);
    let letters = fixture.dead_letters().await?;
    let reasons: BTreeSet<String> =
        letters.iter().map(|letter| crate::fixture::text(letter, "reason")).collect();
    assert_eq!(reasons, BTreeSet::from(["no again (attempt 2 of 2)".into(), "no use".into()]));
    Ok(())
}

async fn a_message_that_no_holder_survives_becomes_a_dead_letter(fixture: Fixture) -> Result<()> {
    fixture.send(0, None, "poison").await?;
    fixture.send(0, None, "harmless").await?;
    let puller = fixture.queue.puller();
    let mut deliveries = BTreeMap::new();
    // Every holder dies with the poison; it settles what it got alone.
    let pulling = async {
        while fixture.dead_letters().await?.is_empty() {
            let request = PullRequest { wait: SHORT, ..short(10) };
            let pulled = puller.pull(&fixture.topic, GROUP, request).await?;
            let has_poison = pulled.iter().any(|one| payload(one) == "poison");
            for one in &pulled {
                deliveries.insert(payload(one), one.message.deliveries);
                assert!(one.message.deliveries <= 2 || pulled.len() == 1, "suspects come alone");
                if !has_poison {
                    settle(&puller, &fixture, one, Outcome::Done).await?;
                }
            }
        }
        anyhow::Ok(())
    };
    timeout(TIMEOUT, pulling).await.context("no dead letter")??;
    let letters = fixture.dead_letters().await?;
    assert_eq!(crate::fixture::text(&letters[0], "payload"), "poison");
    assert_eq!((letters.len(), deliveries["poison"]), (1, 5), "{deliveries:?}");
    assert!(deliveries["harmless"] < 5, "{deliveries:?}");
    Ok(())
}

async fn a_released_message_is_pulled_again_and_counts_no_delivery(fixture: Fixture) -> Result<()> {
    fixture.send(0, None, "not now").await?;
    let puller = fixture.queue.puller();
    for _ in 0..3 {
        let pulled = one(&puller, &fixture, request(1)).await?;
        assert_eq!((pulled.message.attempt, pulled.message.deliveries), (1, 1));
        let result = settle(&puller, &fixture, &pulled, Outcome::Release).await?;
        assert_eq!(result, LeaseResult::Applied);
    }
    Ok(())
}

async fn competing_pulls_get_each_message_once(fixture: Fixture) -> Result<()> {
    fixture.create(4).await?;
    let pullers = [fixture.queue.puller(), fixture.second_queue().await?.puller()];
    let (seen, mut all) = tokio::sync::mpsc::unbounded_channel();
    let mut tasks = tokio::task::JoinSet::new();
    for (number, puller) in pullers.iter().cycle().take(6).enumerate() {
        let (puller, topic, seen) = (puller.clone(), fixture.topic.clone(), seen.clone());
        // Leases of different lengths at once, and small and large pulls.
        let lease = Duration::from_secs([30, 60][number % 2]);
        let request = PullRequest { lease, ..request(1 + number * 3) };
        tasks.spawn(async move {
            loop {
                let pulled = puller.pull(&topic, GROUP, request).await?;
                let done = pulled.iter().map(|one| (one.lease.clone(), Outcome::Done)).collect();
                let settled = puller.settle(&topic, GROUP, done).await?;
                assert!(settled.iter().all(|result| *result == LeaseResult::Applied));
                for one in &pulled {
                    if seen.send(payload(one)).is_err() {
                        return anyhow::Ok(());
                    }
                }
            }
        });
    }
    for n in 0..200_u16 {
        fixture.send(n % 4, None, &format!("m{n}")).await?;
    }
    let mut got = BTreeSet::new();
    while got.len() < 200 {
        let payload = timeout(TIMEOUT, all.recv()).await?.context("a task failed")?;
        assert!(got.insert(payload.clone()), "{payload} came twice");
    }
    for partition in 0..4 {
        fixture.wait_until_settled(partition).await?;
    }
    drop(tasks);
    Ok(())
}

async fn pulls_dropped_at_any_time_lose_nothing(fixture: Fixture) -> Result<()> {
    fixture.create(2).await?;
    let puller = fixture.queue.puller();
    let mut got = BTreeSet::new();
    let mut keep = async |pulled: Vec<PulledMessage>| {
        for one in pulled {
            settle(&puller, &fixture, &one, Outcome::Done).await?;
            got.insert(payload(&one));
        }
        anyhow::Ok(got.len())
    };
    for n in 0..60_u64 {
        let pulling = puller.pull(&fixture.topic, GROUP, short(2));
        let sending = async {
            sleep(Duration::from_millis(n % 7)).await;
            fixture.send((n % 2) as u16, None, &format!("m{n}")).await
        };
        let cut = Duration::from_micros(n * 311 % 9000);
        let (pulled, sent) = tokio::join!(timeout(cut, pulling), sending);
        sent?;
        if let Ok(pulled) = pulled {
            keep(pulled?).await?;
        }
    }
    let until = Instant::now() + TIMEOUT;
    while keep(puller.pull(&fixture.topic, GROUP, short(50)).await?).await? < 60 {
        assert!(Instant::now() < until, "messages are missing");
    }
    Ok(())
}

async fn a_waiting_pull_gets_delayed_and_new_messages_and_an_impatient_one_what_is_there(
    fixture: Fixture,
) -> Result<()> {
    fixture.create(3).await?;
    let puller = fixture.queue.puller();
    let impatient = PullRequest { wait: Duration::ZERO, ..request(10) };
    assert!(puller.pull(&fixture.topic, GROUP, impatient).await?.is_empty());
    let producer = fixture.queue.producer(ProducerConfig::default())?;
    let delay = Duration::from_millis(700);
    producer.send_after(&fixture.topic, NewMessage::new("later"), delay).await?;
    let waiting = {
        let (puller, topic) = (puller.clone(), fixture.topic.clone());
        tokio::spawn(async move { puller.pull(&topic, GROUP, request(10)).await })
    };
    // Another caller does not wait for the first one.
    let started = Instant::now();
    assert!(puller.pull(&fixture.topic, GROUP, impatient).await?.is_empty());
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(waiting.await??.iter().map(payload).collect::<Vec<_>>(), ["later"]);
    fixture.send(2, None, "there").await?;
    let there = puller.pull(&fixture.topic, GROUP, impatient).await?;
    assert_eq!(there.iter().map(payload).collect::<Vec<_>>(), ["there"]);
    Ok(())
}

async fn a_pulled_group_is_active_and_has_no_owners(fixture: Fixture) -> Result<()> {
    let puller = fixture.queue.puller();
    let pulling = {
        let (puller, topic) = (puller.clone(), fixture.topic.clone());
        tokio::spawn(async move { puller.pull(&topic, GROUP, request(1)).await })
    };
    eventually("the group is active", async || {
        let group = fixture.queue.inspect().group(&fixture.topic, GROUP).await;
        Ok(group.is_ok_and(|group| !group.members.is_empty()))
    })
    .await?;
    let reset = Reset {
        to: ResetTo::End,
        partition: None,
        guard: ResetGuard::RequireInactive,
        dry_run: false,
    };
    let refused = fixture.queue.reset_group(&fixture.topic, GROUP, &reset).await;
    assert!(matches!(refused, Err(QueueError::GroupActive { .. })), "{refused:?}");
    let done = |_| async { Outcome::Done };
    let owner = fixture.queue.subscribe(&fixture.topic, GROUP, done, ConsumerConfig::default());
    assert!(matches!(owner.await, Err(QueueError::Invalid { .. })), "modes must not be mixed");
    // A subscription that competes is welcome.
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, done, shared()).await?;
    subscription.stop().await;
    puller.close().await;
    assert!(pulling.await??.is_empty());

    let owner =
        fixture.queue.subscribe(&fixture.topic, GROUP, done, ConsumerConfig::default()).await?;
    let refused = fixture.queue.puller().pull(&fixture.topic, GROUP, request(1)).await;
    assert!(matches!(refused, Err(QueueError::Invalid { .. })), "{refused:?}");
    owner.stop().await;
    Ok(())
}

async fn a_shared_subscription_reclaims_no_message_before_its_lease_runs_out(
    fixture: Fixture,
) -> Result<()> {
    let puller = fixture.queue.puller();
    fixture.send(0, None, "long work").await?;
    let held = one(&puller, &fixture, request(1)).await?;
    fixture.send(0, None, "abandoned").await?;
    one(&puller, &fixture, short(1)).await?;
    puller.close().await;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let config = ConsumerConfig { reclaim_idle: SHORT / 2, ..shared() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    // Both are idle for longer than `reclaim_idle`, and the lease of one has run out.
    assert_eq!(seen.payloads(1).await?, ["abandoned"]);
    let settled = settle(&puller, &fixture, &held, Outcome::Release).await?;
    assert_eq!(settled, LeaseResult::Applied);
    assert_eq!(seen.payloads(1).await?, ["long work"]);
    subscription.stop().await;
    Ok(())
}

async fn a_key_of_the_wrong_type_does_not_stop_pulls_of_other_partitions(
    fixture: Fixture,
) -> Result<()> {
    fixture.create(2).await?;
    let puller = fixture.queue.puller();
    let pull = async |partition, payload_sent: &str| {
        fixture.send(partition, None, payload_sent).await?;
        let pulled = one(&puller, &fixture, request(1)).await?;
        assert_eq!(payload(&pulled), payload_sent);
        let settled = settle(&puller, &fixture, &pulled, Outcome::Done).await?;
        assert_eq!(settled, LeaseResult::Applied);
        anyhow::Ok(())
    };
    pull(1, "first").await?;
    // The stream of a partition is replaced by a map.
    let broken = fixture.stream(1).await?;
    let map = MapName::new(broken.as_str())?;
    let fields = [("a".to_owned(), "b".into())].into();
    fixture.backend.delete_stream(&broken).await?;
    assert!(fixture.backend.map_create(&map, &fields).await?);
    // For longer than a check of the leases and a probe.
    let until = Instant::now() + SHORT * 3;
    while Instant::now() < until {
        pull(0, "alive").await?;
        sleep(SHORT / 5).await;
    }
    // Once the map is deleted, the partition is pulled again.
    fixture.backend.map_delete(&map).await?;
    pull(1, "recovered").await
}

/// The lag of another group is unknown to the server: counting it would read all entries, at each tick.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_pull_reads_no_entries_on_redis() -> Result<()> {
    let redis = Arc::new(Redis::start()?);
    let fixture = Fixture::open(&redis.url(), Arc::clone(&redis)).await?;
    fixture.create(1).await?;
    let mut ids = Vec::new();
    for number in 0..600 {
        ids.push(fixture.send(0, None, &number.to_string()).await?.to_string());
    }
    let stream = fixture.stream(0).await?.to_string();
    redis.command(&["XGROUP", "CREATE", &stream, GROUP, "$"])?.ok()?;
    redis.command(&["XGROUP", "CREATE", &stream, "slow", &ids[50]])?.ok()?;
    redis.command(&["XDEL", &stream, &ids[100]])?.ok()?;
    let slow = fixture.queue.inspect().group(&fixture.topic, "slow").await?;
    assert_eq!(slow.lag, Some(548), "the client counts it");
    redis.command(&["CONFIG", "RESETSTAT"])?.ok()?;
    let puller = fixture.queue.puller();
    // Several ticks.
    let wait = Duration::from_secs(4);
    let pulled = puller.pull(&fixture.topic, GROUP, PullRequest { wait, ..request(1) }).await?;
    assert!(pulled.is_empty(), "{pulled:?}");
    let calls = redis.command(&["INFO", "commandstats"])?.text();
    assert!(calls.contains("cmdstat_xpending:"), "leases were checked: {calls}");
    assert!(!calls.contains("cmdstat_xrange:"), "{calls}");
    puller.close().await;
    Ok(())
}

#[tokio::test]
async fn pulls_out_of_range_are_rejected() -> Result<()> {
    let fixture = Fixture::embedded().await?;
    let puller = fixture.queue.puller();
    for (what, request) in [
        ("max", request(0)),
        ("max", request(1001)),
        ("wait", PullRequest { wait: Duration::from_secs(61), ..request(1) }),
        ("lease", PullRequest { lease: Duration::from_millis(999), ..request(1) }),
        ("lease", PullRequest { lease: Duration::from_secs(301), ..request(1) }),
    ] {
        let refused = puller.pull(&fixture.topic, GROUP, request).await.unwrap_err();
        assert!(refused.to_string().starts_with(what), "{refused}");
    }
    Ok(())
}

#[tokio::test]
async fn a_pull_of_large_messages_is_limited_in_bytes() -> Result<()> {
    let fixture = Fixture::embedded().await?;
    let large = "x".repeat(1_000_000);
    for _ in 0..10 {
        fixture.send(0, None, &large).await?;
    }
    let puller = fixture.queue.puller();
    let mut sizes = Vec::new();
    while sizes.iter().sum::<usize>() < 10 {
        let pulled = puller.pull(&fixture.topic, GROUP, request(10)).await?;
        sizes.push(pulled.len());
        for one in pulled {
            assert_eq!(settle(&puller, &fixture, &one, Outcome::Done).await?, LeaseResult::Applied);
        }
    }
    assert!(sizes.iter().all(|size| (1..=4).contains(size)), "{sizes:?}");
    Ok(())
}

on_every_backend!(
    a_message_is_settled_by_another_process_than_pulled_it,
    pulls_of_large_messages_read_no_more_than_they_return,
    a_lease_that_ran_out_is_reassigned_and_its_holder_is_fenced,
    an_extended_lease_stays_with_its_holder,
    retries_and_dead_letters_follow_the_policies_of_the_topic,
    a_message_that_no_holder_survives_becomes_a_dead_letter,
    a_released_message_is_pulled_again_and_counts_no_delivery,
    competing_pulls_get_each_message_once,
    pulls_dropped_at_any_time_lose_nothing,
    a_waiting_pull_gets_delayed_and_new_messages_and_an_impatient_one_what_is_there,
    a_pulled_group_is_active_and_has_no_owners,
    a_shared_subscription_reclaims_no_message_before_its_lease_runs_out,
    a_key_of_the_wrong_type_does_not_stop_pulls_of_other_partitions,
);
