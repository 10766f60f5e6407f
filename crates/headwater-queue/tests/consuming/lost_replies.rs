//! The server executes a call, but its reply is lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Result, ensure};
use headwater_queue::{ConsumerConfig, Outcome, Queue, QueueConfig, Subscription, metrics};
use headwater_stream::{
    ConsumerName, EntryId, GroupName, LeaseRenewerConfig, Options, ReclaimFrom, ReclaimRequest,
    connect,
};
use headwater_testkit::{Proxy, Redis};

use crate::bad_input::{read_and_die, read_and_die_in};
use crate::fixture::{Fixture, GROUP, TIMEOUT, eventually, short_leases};
use crate::lossy_backend::LossyBackend;
use crate::metric_recorder::{counter_value, install_metric_recorder};
use crate::recording_handler::{RecordingHandler, payload, recording_handler};
use crate::shared::shared;

/// The delay of every reply: long enough to observe the effect at the server, and then to lose the reply.
const REPLY_DELAY: Duration = Duration::from_secs(1);

/// A queue behind a faulty network, and a direct connection.
struct FaultyNetwork {
    direct: Fixture,
    proxy: Proxy,
    queue: Queue,
}

impl FaultyNetwork {
    async fn start() -> Result<Self> {
        install_metric_recorder();
        let redis = Redis::start()?;
        let proxy = Proxy::start(redis.addr())?;
        let behind = redis.url_at(proxy.addr());
        let direct = Fixture::open(&redis.url(), redis).await?;
        // Leases long enough that late replies do not make the member appear dead.
        let lease = LeaseRenewerConfig {
            ttl: Duration::from_secs(60),
            renew_every: Duration::from_secs(15),
            ..Default::default()
        };
        let config = QueueConfig { lease, ..Default::default() };
        let queue = Queue::with_config(connect(&behind, &Options::default()).await?, config)?;
        Ok(Self { direct, proxy, queue })
    }

    async fn subscribe(
        &self,
        handler: RecordingHandler,
        config: ConsumerConfig,
    ) -> Result<Subscription> {
        Ok(self.queue.subscribe(&self.direct.topic, GROUP, handler, config).await?)
    }

    /// Waits for a condition at the server, then loses all replies in flight.
    async fn lose_reply(
        &self,
        what: &str,
        condition: impl AsyncFn() -> Result<bool>,
    ) -> Result<()> {
        eventually(what, condition).await?;
        self.proxy.cut_once()?;
        self.proxy.heal()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_retry_whose_settle_reply_was_lost_is_delivered_once() -> Result<()> {
    lose_the_settle_reply(shared()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_retry_of_an_owner_whose_settle_reply_was_lost_is_delivered_once() -> Result<()> {
    lose_the_settle_reply(ConsumerConfig::default()).await
}

async fn lose_the_settle_reply(config: ConsumerConfig) -> Result<()> {
    let bad = FaultyNetwork::start().await?;
    let fixture = &bad.direct;
    let has_failed = Arc::new(tokio::sync::Notify::new());
    let failed = Arc::clone(&has_failed);
    let (handler, mut seen) = recording_handler(move |message| match message.payload.as_ref() {
        b"retry" if message.attempt == 1 => {
            failed.notify_one();
            Outcome::retry_after(Duration::ZERO, "again")
        }
        b"dead" => Outcome::dead_letter("no"),
        _ => Outcome::Done,
    });
    let subscription = bad.subscribe(handler, config).await?;
    // All connections are established.
    fixture.send(0, None, "first").await?;
    assert_eq!(seen.payloads(1).await?, ["first"]);
    fixture.wait_until_settled(0).await?;
    bad.proxy.delay(REPLY_DELAY)?;
    fixture.send(0, None, "retry").await?;
    fixture.send(0, None, "dead").await?;
    tokio::time::timeout(TIMEOUT, has_failed.notified()).await?;
    bad.lose_reply("all is settled", async || {
        Ok(fixture.dead_letters().await?.len() == 1 && fixture.pending(0).await?.is_empty())
    })
    .await?;
    assert_eq!(seen.payloads(3).await?, ["retry", "dead", "retry"]);
    fixture.send(0, None, "last").await?;
    assert_eq!(seen.payloads(1).await?, ["last"]);
    fixture.wait_until_settled(0).await?;
    assert_eq!(fixture.dead_letters().await?.len(), 1);
    ensure!(
        counter_value(metrics::ANOMALIES, &fixture.topic, "settle_failed") > 0,
        "no reply was lost"
    );
    assert_eq!(counter_value(metrics::ANOMALIES, &fixture.topic, "lost_by_the_server"), 0);
    subscription.stop().await;
    Ok(())
}

async fn entries_whose_reclaim_reply_was_lost_are_reclaimed_again(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    fixture.send(0, None, "orphan").await?;
    fixture.send(0, None, "orphan, too").await?;
    read_and_die(&fixture, &fixture.stream(0).await?).await?;
    let lossy = LossyBackend::new(Arc::clone(&fixture.backend));
    let queue = Queue::with_config(Arc::clone(&lossy) as _, short_leases())?;
    lossy.reclaims.store(1, Ordering::SeqCst);
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let config = ConsumerConfig { reclaim_idle: Duration::from_secs(1), ..shared() };
    let subscription = queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    assert_eq!(seen.payloads(2).await?, ["orphan", "orphan, too"]);
    fixture.wait_until_settled(0).await?;
    assert_eq!(lossy.reclaims.load(Ordering::SeqCst), 0);
    assert_eq!(counter_value(metrics::ANOMALIES, &fixture.topic, "unseen"), 2);
    subscription.stop().await;
    Ok(())
}

/// A message of a dead consumer; more replies are lost than a message may crash consumers.
async fn lost_reclaim_replies_do_not_count_as_crashes(fixture: Fixture) -> Result<()> {
    for (config, group) in [(ConsumerConfig::default(), "owned"), (shared(), "shared")] {
        fixture.send(0, None, group).await?;
        let stream = fixture.stream(0).await?;
        read_and_die_in(&fixture, &stream, group).await?;
        let lossy = LossyBackend::new(Arc::clone(&fixture.backend));
        let queue = Queue::with_config(Arc::clone(&lossy) as _, short_leases())?;
        lossy.reclaims.store(2 * config.retry.max_crashes as usize, Ordering::SeqCst);
        let (handler, mut seen) = recording_handler(|_| Outcome::Done);
        let config = ConsumerConfig { reclaim_idle: Duration::from_secs(1), ..config };
        let subscription = queue.subscribe(&fixture.topic, group, handler, config).await?;
        let message = seen.next().await?;
        assert_eq!((payload(&message).as_str(), message.deliveries), (group, 2));
        assert_eq!(lossy.reclaims.load(Ordering::SeqCst), 0);
        subscription.stop().await;
        fixture.backend.delete_stream(&stream).await?;
    }
    assert_eq!(fixture.dead_letters().await?, []);
    Ok(())
}

/// Otherwise the killed replies say that the script is unknown.
async fn load_reclaim_script(fixture: &Fixture) -> Result<()> {
    let (stream, group) = (fixture.stream(0).await?, GroupName::new(GROUP)?);
    let reclaim = ReclaimRequest {
        stream: &stream,
        group: &group,
        consumer: &ConsumerName::new("loader")?,
        fence: None,
        from: ReclaimFrom::Ids(&[EntryId::MIN]),
        min_idle: Duration::ZERO,
        after: None,
        count: 1,
    };
    ensure!(fixture.backend.reclaim(reclaim).await?.entries.is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn killed_replies_of_reclaims_do_not_count_as_crashes() -> Result<()> {
    let bad = FaultyNetwork::start().await?;
    let fixture = &bad.direct;
    fixture.send(0, None, "orphan").await?;
    read_and_die(fixture, &fixture.stream(0).await?).await?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let config = ConsumerConfig::default();
    let kills = 2 * u64::from(config.retry.max_crashes);
    load_reclaim_script(fixture).await?;
    // Arguments of a reclaim: no cursor, one entry, by `ids` or `own`.
    bad.proxy.drop_replies("\r\n$0\r\n\r\n$1\r\n1\r\n$3\r\n", kills)?;
    let subscription = bad.subscribe(handler, config).await?;
    let message = seen.next().await?;
    assert_eq!((payload(&message).as_str(), message.deliveries), ("orphan", 2));
    assert_eq!(bad.proxy.faults(), kills);
    assert_eq!(fixture.dead_letters().await?, []);
    subscription.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn killed_replies_of_reads_do_not_count_as_crashes() -> Result<()> {
    let bad = FaultyNetwork::start().await?;
    let fixture = &bad.direct;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let subscription = bad.subscribe(handler, ConsumerConfig::default()).await?;
    let send = async |payload: &str| fixture.send(0, None, payload).await;
    // Its read was sent before; those of the next ones are lost.
    bad.proxy.drop_replies("XREADGROUP", 5)?;
    for number in 0..8 {
        send(&number.to_string()).await?;
        let message = seen.next().await?;
        assert_eq!((payload(&message), message.deliveries), (number.to_string(), 1));
    }
    assert_eq!(bad.proxy.faults(), 5);
    subscription.stop().await;
    Ok(())
}

async fn a_message_whose_settle_reply_was_lost_is_settled_once(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    let lossy = LossyBackend::new(Arc::clone(&fixture.backend));
    let queue = Queue::with_config(Arc::clone(&lossy) as _, short_leases())?;
    let (handler, mut seen) = recording_handler(|message| match message.payload.as_ref() {
        b"retry" if message.attempt == 1 => Outcome::retry_after(Duration::ZERO, "again"),
        b"dead" => Outcome::dead_letter("no"),
        _ => Outcome::Done,
    });
    let subscription =
        queue.subscribe(&fixture.topic, GROUP, handler, ConsumerConfig::default()).await?;
    for (payload, deliveries) in [("retry", 2), ("dead", 1)] {
        lossy.settles.store(3, Ordering::SeqCst);
        fixture.send(0, None, payload).await?;
        assert_eq!(seen.payloads(deliveries).await?, vec![payload; deliveries]);
        eventually("the settle reply is lost", async || {
            Ok(lossy.settles.load(Ordering::SeqCst) == 0)
        })
        .await?;
        fixture.wait_until_settled(0).await?;
    }
    fixture.send(0, None, "last").await?;
    assert_eq!(seen.payloads(1).await?, ["last"]);
    fixture.wait_until_settled(0).await?;
    assert_eq!(fixture.dead_letters().await?.len(), 1);
    assert_eq!(counter_value(metrics::ANOMALIES, &fixture.topic, "settle_failed"), 6);
    subscription.stop().await;
    Ok(())
}

on_every_backend!(
    entries_whose_reclaim_reply_was_lost_are_reclaimed_again,
    lost_reclaim_replies_do_not_count_as_crashes,
    a_message_whose_settle_reply_was_lost_is_settled_once,
);
