//! One server of a cluster dies, or hangs: the partitions of the others go on, and another process can join.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use async_trait::async_trait;
use headwater_queue::{
    ConsumerConfig, Handler, Message, Mode, Outcome, Policies, Queue, QueueError, Subscription,
};
use headwater_stream::{
    Fields, GroupName, PendingDelivery, PendingDeliveryQuery, Retention, SetName, StreamName,
};
use headwater_testkit::{ChaosCounts, Cluster, Redis, unique};
use tokio::time::Instant;

use crate::fixture::{Fixture, GROUP, eventually, text};

pub(crate) const PARTITIONS: u16 = 12;
/// A partition of a healthy server may stand still for as long as a hand-over takes, never for the lifetime of a lease (3 s)
/// or the deadline of a call (5 s).
pub(crate) const STOP_MAX: Duration = Duration::from_secs(2);
/// How long messages are sent before the fault, to know how long they wait on this machine anyway.
const BASELINE: Duration = Duration::from_secs(2);
/// Messages of this round become dead letters.
const POISON: &str = "poison";

/// The server that fails.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Victim {
    /// One that holds partitions, and not the metadata of the topic.
    PartitionsOnly,
    DeadLetters,
    /// The one that holds the metadata of the topic, and not the set of its streams.
    Metadata,
    /// The one that holds both.
    MetadataAndStreamSet,
}

impl Victim {
    /// Whether it holds the set of the topic's streams; `None`: it does not matter.
    fn has_stream_set(self) -> Option<bool> {
        match self {
            Self::Metadata => Some(false),
            Self::MetadataAndStreamSet => Some(true),
            Self::PartitionsOnly | Self::DeadLetters => None,
        }
    }
}

/// How a server and its replica fail.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServerFault {
    /// Its connections end, and new ones are refused.
    Dead,
    /// It accepts connections and never answers.
    Hangs,
}

impl ServerFault {
    pub(crate) fn begin(self, (primary, replica): (&Redis, &Redis)) -> Result<()> {
        for server in [replica, primary] {
            match self {
                Self::Dead => server.kill9()?,
                Self::Hangs => server.pause()?,
            }
        }
        Ok(())
    }

    pub(crate) fn end(self, (primary, replica): (&Redis, &Redis)) -> Result<()> {
        match self {
            Self::Dead => {
                replica.restart()?;
                primary.restart()
            }
            Self::Hangs => {
                // Before the replica, which would take over.
                primary.resume()?;
                primary.command(&["PING"])?.ok()?;
                replica.resume()
            }
        }
    }
}

/// A cluster that goes on without one of its servers, and a topic on all of them.
pub(crate) struct ShardFixture {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) fixture: Fixture,
    pub(crate) streams: Vec<StreamName>,
    /// The partitions of the server that fails.
    affected: Vec<usize>,
    victim: u16,
    pub(crate) handled: HandledMessages,
    counts: Mutex<ChaosCounts>,
    /// How long a partition of a healthy server may stand still.
    pub(crate) stop_max: Duration,
}

pub(crate) type HandledMessages = Arc<Mutex<BTreeMap<String, Handled>>>;

#[derive(Clone, Copy)]
pub(crate) struct Handled {
    pub(crate) times: usize,
    pub(crate) at: Instant,
    pub(crate) by: usize,
}

/// Records who handled what, and when.
struct ShardHandler {
    by: usize,
    handled: HandledMessages,
}

#[async_trait]
impl Handler for ShardHandler {
    async fn handle(&self, message: Message) -> Outcome {
        let payload = String::from_utf8_lossy(&message.payload).into_owned();
        let mut handled = self.handled.lock().expect("no panic");
        let first = Handled { times: 0, at: Instant::now(), by: self.by };
        let is_poison = payload.contains(POISON);
        handled.entry(payload).or_insert(first).times += 1;
        match is_poison {
            true => Outcome::DeadLetter { reason: "a test".to_owned() },
            false => Outcome::Done,
        }
    }
}

impl ShardFixture {
    pub(crate) async fn start(victim: Victim) -> Result<Self> {
        Self::start_with(victim, Policies::default()).await
    }

    pub(crate) async fn start_with(victim: Victim, policies: Policies) -> Result<Self> {
        let cluster = Cluster::builder()
            .setting("cluster-require-full-coverage", "no")
            .setting("appendonly", "yes")
            .start()?;
        let cluster = Arc::new(cluster);
        let mut fixture = Fixture::open(&cluster.url(), Arc::clone(&cluster)).await?;
        let port_of = |key: &str| -> Result<u16> {
            Ok(cluster.primary_of_slot(cluster.slot_of(key)?)?.port())
        };
        let meta = loop {
            let meta = port_of(&format!("streaming:mq:topic:{}:meta", fixture.topic))?;
            let has_set = port_of(stream_set(&fixture.topic)?.as_str())? == meta;
            if victim.has_stream_set().is_none_or(|wanted| wanted == has_set) {
                break meta;
            }
            fixture.topic = unique("orders");
        };
        fixture.queue.topics().create(&fixture.topic, PARTITIONS, policies).await?;
        let mut streams = Vec::new();
        for partition in 0..PARTITIONS {
            streams.push(fixture.stream(partition).await?);
        }
        let dead_letters = port_of(&format!("stream:topic:{}:dlq", fixture.topic))?;
        let mut on_partitions_only = None;
        for stream in &streams {
            let port = port_of(stream.as_str())?;
            on_partitions_only = on_partitions_only.or((port != meta).then_some(port));
        }
        let victim = match victim {
            Victim::DeadLetters => dead_letters,
            Victim::Metadata | Victim::MetadataAndStreamSet => meta,
            Victim::PartitionsOnly => {
                on_partitions_only.expect("twelve partitions are on more than one server")
            }
        };
        let mut affected = Vec::new();
        for (partition, stream) in streams.iter().enumerate() {
            if port_of(stream.as_str())? == victim {
                affected.push(partition);
            }
        }
        assert!(affected.len() < usize::from(PARTITIONS), "{affected:?}");
        let (handled, counts) = Default::default();
        let stop_max = STOP_MAX;
        Ok(Self { cluster, fixture, streams, affected, victim, handled, counts, stop_max })
    }

    /// The server that fails, and its replica.
    pub(crate) fn victims(&self) -> Result<(&Redis, &Redis)> {
        let at = self.cluster.nodes().iter().position(|node| node.port() == self.victim);
        let at = at.context("the victim is a node")?;
        // Primaries come first, then their replicas in the same order.
        let nodes = self.cluster.nodes();
        Ok((&nodes[at], &nodes[at + nodes.len() / 2]))
    }

    pub(crate) fn healthy(&self) -> Vec<usize> {
        (0..self.streams.len()).filter(|partition| !self.affected.contains(partition)).collect()
    }

    pub(crate) async fn subscribe(
        &self,
        queue: &Queue,
        by: usize,
        mode: Mode,
    ) -> Result<Subscription> {
        let handler = ShardHandler { by, handled: Arc::clone(&self.handled) };
        let config = ConsumerConfig { mode, ..Default::default() };
        Ok(queue.subscribe(&self.fixture.topic, GROUP, handler, config).await?)
    }

    /// Sends one message to each of these partitions.
    pub(crate) async fn send(&self, partitions: &[usize], round: &str) -> Result<()> {
        for partition in partitions {
            let fields = Fields::new([
                ("payload", format!("{partition} {round}")),
                ("timestamp", "2026-01-01T00:00:00Z".to_owned()),
                ("retryCount", "0".to_owned()),
                ("topic", self.fixture.topic.clone()),
                ("partitionId", partition.to_string()),
                ("headers", "{}".to_owned()),
            ]);
            let stream = &self.streams[*partition];
            self.counts.lock().expect("no panic").sent += 1;
            self.fixture.backend.append(stream, &[fields], &Retention::KEEP_ALL).await?;
        }
        Ok(())
    }

    /// The pending entries of a partition. Does not need the metadata of the topic.
    pub(crate) async fn pending(&self, partition: usize) -> Result<Vec<PendingDelivery>> {
        let query = PendingDeliveryQuery {
            stream: &self.streams[partition],
            group: &GroupName::new(GROUP)?,
            consumer: None,
            min_idle: Duration::ZERO,
            after: None,
            count: 1000,
        };
        Ok(self.fixture.backend.pending(query).await?)
    }

    pub(crate) fn times(&self, partition: usize, round: &str) -> usize {
        let handled = self.handled.lock().expect("no panic");
        handled.get(&format!("{partition} {round}")).map_or(0, |handled| handled.times)
    }

    pub(crate) async fn wait_for(&self, partitions: &[usize], round: &str) -> Result<()> {
        eventually(&format!("{round} is handled"), async || {
            Ok(partitions.iter().all(|partition| self.times(*partition, round) > 0))
        })
        .await
    }

    /// Adds the counts to the report of `cargo xtask chaos`.
    pub(crate) fn report(&self, test: &str) -> Result<()> {
        let mut counts = *self.counts.lock().expect("no panic");
        let handled = self.handled.lock().expect("no panic");
        counts.handled = handled.len() as u64;
        counts.doubled = handled.values().map(|handled| handled.times as u64 - 1).sum();
        counts.lost = counts.sent - counts.handled;
        counts.report(test)
    }

    /// Sends to all partitions before the fault. Returns the longest time until a message was handled.
    pub(crate) async fn baseline(&self) -> Result<Duration> {
        let waited = self.longest_wait("baseline", BASELINE).await?;
        println!("before the fault, a message waited up to {waited:?}");
        Ok(waited)
    }

    /// Sends to the healthy partitions for this long. Each message must be handled soon.
    pub(crate) async fn keep_sending(
        &self,
        name: &str,
        limit: Duration,
        baseline: Duration,
    ) -> Result<()> {
        let waited = self.longest_wait(name, limit).await?;
        self.record_stop(waited);
        assert!(
            waited < self.stop_max,
            "a message of `{name}` was handled after {waited:?}; before the fault it took up to {baseline:?}"
        );
        Ok(())
    }

    /// Adds the time that a partition of a healthy server stood still to the counts.
    pub(crate) fn record_stop(&self, stop: Duration) {
        let mut counts = self.counts.lock().expect("no panic");
        counts.longest_stop = counts.longest_stop.max(stop);
    }

    async fn longest_wait(&self, name: &str, limit: Duration) -> Result<Duration> {
        let waits = self.longest_waits(name, limit).await?.into_values();
        Ok(waits.map(|(wait, _)| wait).max().unwrap_or_default())
    }

    /// Sends to the healthy partitions for this long. Returns for each of them the longest time until a message was handled, and
    /// by whom the last one was.
    pub(crate) async fn longest_waits(
        &self,
        name: &str,
        limit: Duration,
    ) -> Result<BTreeMap<usize, (Duration, usize)>> {
        let (healthy, until) = (self.healthy(), Instant::now() + limit);
        let mut sent = Vec::new();
        for round in 0.. {
            if Instant::now() >= until {
                break;
            }
            let round = format!("{name} {round}");
            sent.push((round.clone(), Instant::now()));
            self.send(&healthy, &round).await?;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        for (round, _) in &sent {
            self.wait_for(&healthy, round).await?;
        }
        let handled = self.handled.lock().expect("no panic");
        let mut longest = BTreeMap::new();
        for (round, sent) in sent {
            for partition in &healthy {
                let Handled { at, by, .. } = handled[&format!("{partition} {round}")];
                let (wait, last) = longest.entry(*partition).or_default();
                *wait = (at - sent).max(*wait);
                *last = by;
            }
        }
        Ok(longest)
    }
}

/// The set of the streams of a topic.
pub(crate) fn stream_set(topic: &str) -> Result<SetName> {
    Ok(SetName::new(format!("streaming:mq:topic:{topic}:partitions"))?)
}

/// No replica takes over. The others go on, a second process joins, and the rest follows when the server is back.
async fn healthy_partitions_go_on_without_a_server(mode: Mode, fault: ServerFault) -> Result<()> {
    let shards = ShardFixture::start(Victim::PartitionsOnly).await?;
    let healthy = shards.healthy();
    let all: Vec<usize> = (0..usize::from(PARTITIONS)).collect();
    let first = shards.subscribe(&shards.fixture.queue, 1, mode).await?;
    eventually("it has all partitions", async || Ok(first.stats().partitions == all.len())).await?;
    shards.send(&all, "before").await?;
    shards.wait_for(&all, "before").await?;
    let baseline = shards.baseline().await?;

    fault.begin(shards.victims()?)?;
    // Longer than the lease of its partitions.
    shards.keep_sending("without it", Duration::from_secs(8), baseline).await?;

    let second_queue = shards.fixture.second_queue().await?;
    let second = shards.subscribe(&second_queue, 2, mode).await?;
    if mode == Mode::Owned {
        eventually("the processes share the healthy partitions", async || {
            let shares = [first.stats().partitions, second.stats().partitions];
            Ok(shares.iter().sum::<usize>() == healthy.len() && shares[0].abs_diff(shares[1]) <= 1)
        })
        .await?;
    }
    shards.keep_sending("joined", Duration::from_secs(5), baseline).await?;
    let by = |consumer| {
        let handled = shards.handled.lock().expect("no panic");
        handled.values().filter(|handled| handled.by == consumer).count()
    };
    assert!(by(2) > 0, "the second process handled messages");

    fault.end(shards.victims()?)?;
    shards.cluster.wait_until_ok(Duration::from_secs(60))?;
    shards.send(&all, "after").await?;
    shards.wait_for(&all, "after").await?;
    for name in ["before", "after"] {
        for partition in &all {
            assert_eq!(shards.times(*partition, name), 1, "{partition} {name}");
        }
    }
    if mode == Mode::Owned {
        eventually("all partitions are shared again", async || {
            let shares = [first.stats().partitions, second.stats().partitions];
            Ok(shares == [all.len() / 2; 2])
        })
        .await?;
    }
    tokio::join!(first.stop(), second.stop());
    shards.report("a cluster without one server")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn owned_partitions_of_healthy_servers_go_on_without_a_dead_server() -> Result<()> {
    healthy_partitions_go_on_without_a_server(Mode::Owned, ServerFault::Dead).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn shared_partitions_of_healthy_servers_go_on_without_a_dead_server() -> Result<()> {
    healthy_partitions_go_on_without_a_server(Mode::Shared, ServerFault::Dead).await
}

/// A call to a server that hangs ends at its deadline, not at once: renewals of the other leases must not wait for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn owned_partitions_of_healthy_servers_go_on_while_a_server_hangs() -> Result<()> {
    healthy_partitions_go_on_without_a_server(Mode::Owned, ServerFault::Hangs).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn shared_partitions_of_healthy_servers_go_on_while_a_server_hangs() -> Result<()> {
    healthy_partitions_go_on_without_a_server(Mode::Shared, ServerFault::Hangs).await
}

/// The replica is promoted after longer than the lifetime of a lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn healthy_partitions_go_on_during_a_fail_over() -> Result<()> {
    let shards = ShardFixture::start(Victim::PartitionsOnly).await?;
    for node in shards.cluster.nodes() {
        node.command(&["CONFIG", "SET", "cluster-node-timeout", "6000"])?.ok()?;
    }
    let all: Vec<usize> = (0..usize::from(PARTITIONS)).collect();
    let subscription = shards.subscribe(&shards.fixture.queue, 1, Mode::Owned).await?;
    shards.send(&all, "before").await?;
    shards.wait_for(&all, "before").await?;
    let baseline = shards.baseline().await?;

    shards.victims()?.0.kill9()?;
    shards.keep_sending("failing over", Duration::from_secs(9), baseline).await?;
    shards.cluster.wait_until_ok(Duration::from_secs(60))?;
    shards.send(&all, "after").await?;
    shards.wait_for(&all, "after").await?;
    eventually("it has all partitions", async || Ok(subscription.stats().partitions == all.len()))
        .await?;
    subscription.stop().await;
    shards.report("a fail-over of a cluster")
}

/// All partitions of a member are on the server that dies: it loses them, and stays a member under its name.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_member_stays_if_all_its_partitions_are_on_the_dead_server() -> Result<()> {
    let cluster = Cluster::builder().setting("cluster-require-full-coverage", "no").start()?;
    let cluster = Arc::new(cluster);
    let fixture = Fixture::open(&cluster.url(), Arc::clone(&cluster)).await?;
    let primary_of =
        |key: &str| -> Result<u16> { Ok(cluster.primary_of_slot(cluster.slot_of(key)?)?.port()) };
    fixture.create(1).await?;
    let victim = primary_of(fixture.stream(0).await?.as_str())?;
    // A topic of the same group that has nothing on that server, and no leases of partitions.
    let topics = fixture.queue.topics();
    let other = loop {
        let name = unique("other");
        topics.create(&name, 1, Policies::default()).await?;
        let described = topics.describe(&name).await?;
        let meta = format!("streaming:mq:topic:{name}:meta");
        let keys = [&meta, &described.dead_letters_key, &described.partitions[0].stream_key];
        let ports: Result<Vec<u16>> = keys.into_iter().map(|key| primary_of(key)).collect();
        if !ports?.contains(&victim) {
            break name;
        }
    };
    let handled = HandledMessages::default();
    let handler = || ShardHandler { by: 1, handled: Arc::clone(&handled) };
    let owned = ConsumerConfig::default();
    let owned = fixture.queue.subscribe(&fixture.topic, GROUP, handler(), owned).await?;
    let shared = ConsumerConfig { mode: Mode::Shared, ..Default::default() };
    let shared = fixture.queue.subscribe(&other, GROUP, handler(), shared).await?;
    eventually("it has its partition", async || Ok(owned.stats().partitions == 1)).await?;
    let second = fixture.second_queue().await?;
    let members = async || {
        let view = second.inspect().group(&other, GROUP).await?;
        let alive = view.members.into_iter().filter(|member| member.heartbeat_age.is_some());
        anyhow::Ok(alive.filter_map(|member| member.consumer).collect::<Vec<_>>())
    };
    let before = members().await?;
    assert_eq!(before.len(), 1);

    let nodes = cluster.nodes();
    let at = nodes.iter().position(|node| node.port() == victim).context("it is a node")?;
    let (primary, replica) = (&nodes[at], &nodes[at + nodes.len() / 2]);
    replica.kill9()?;
    primary.kill9()?;
    eventually("the partition is lost", async || Ok(owned.stats().partitions == 0)).await?;
    // Longer than the lifetime of a lease.
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until {
        assert_eq!(members().await?, before);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    replica.restart()?;
    primary.restart()?;
    eventually("it has its partition again", async || Ok(owned.stats().partitions == 1)).await?;
    assert_eq!(members().await?, before);
    tokio::join!(owned.stop(), shared.stop());
    Ok(())
}

/// The server of the dead letters is dead: a message that becomes one stays pending and delays no other.
async fn messages_are_acknowledged_without_the_server_of_the_dead_letters(
    mode: Mode,
) -> Result<()> {
    let shards = ShardFixture::start(Victim::DeadLetters).await?;
    let healthy = shards.healthy();
    // Shorter than the outage: what waits for its dead letter is not delivered again.
    let config =
        ConsumerConfig { mode, reclaim_idle: Duration::from_secs(2), ..Default::default() };
    let handler = ShardHandler { by: 1, handled: Arc::clone(&shards.handled) };
    let (queue, topic) = (&shards.fixture.queue, &shards.fixture.topic);
    let subscription = queue.subscribe(topic, GROUP, handler, config).await?;
    shards.send(&healthy, "before").await?;
    shards.wait_for(&healthy, "before").await?;
    let baseline = shards.baseline().await?;

    let (primary, replica) = shards.victims()?;
    replica.kill9()?;
    primary.kill9()?;
    let pending = async || {
        let mut pending = Vec::new();
        for partition in &healthy {
            pending.push(shards.pending(*partition).await?.len());
        }
        anyhow::Ok(pending)
    };
    shards.send(&healthy, POISON).await?;
    shards.wait_for(&healthy, POISON).await?;
    // Longer than the deadline of the call that writes a dead letter.
    shards.keep_sending("dead", Duration::from_secs(7), baseline).await?;
    eventually("only the dead letters are pending", async || {
        Ok(pending().await?.into_iter().all(|pending| pending == 1))
    })
    .await?;

    replica.restart()?;
    primary.restart()?;
    shards.cluster.wait_until_ok(Duration::from_secs(60))?;
    eventually("the dead letters are written", async || {
        Ok(pending().await?.into_iter().all(|pending| pending == 0))
    })
    .await?;
    let letters = shards.fixture.wait_for_dead_letters(healthy.len()).await?;
    let partitions: Vec<String> =
        letters.iter().map(|letter| text(letter, "partitionId")).collect();
    assert_eq!(letters.len(), healthy.len(), "each once, not {partitions:?}");
    for partition in &healthy {
        assert_eq!(shards.times(*partition, POISON), 1, "{partition}");
    }
    subscription.stop().await;
    shards.report("a dead server of dead letters")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn owners_acknowledge_messages_without_the_server_of_the_dead_letters() -> Result<()> {
    messages_are_acknowledged_without_the_server_of_the_dead_letters(Mode::Owned).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn shared_consumers_acknowledge_messages_without_the_server_of_the_dead_letters() -> Result<()>
{
    messages_are_acknowledged_without_the_server_of_the_dead_letters(Mode::Shared).await
}

/// The server of the metadata is dead: members go on. A new one gets an error that says why, and joins when it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_new_consumer_waits_for_the_server_of_the_metadata_and_others_go_on() -> Result<()> {
    let shards = ShardFixture::start(Victim::Metadata).await?;
    let all: Vec<usize> = (0..usize::from(PARTITIONS)).collect();
    let first = shards.subscribe(&shards.fixture.queue, 1, Mode::Owned).await?;
    shards.send(&all, "before").await?;
    shards.wait_for(&all, "before").await?;
    let second_queue = shards.fixture.second_queue().await?;
    let baseline = shards.baseline().await?;

    let (primary, replica) = shards.victims()?;
    replica.kill9()?;
    primary.kill9()?;
    let joining = shards.subscribe(&second_queue, 2, Mode::Owned);
    // Longer than the lease of its partitions, and than the deadline of a call.
    let sending = shards.keep_sending("dead", Duration::from_secs(6), baseline);
    let (joined, sent) = tokio::join!(joining, sending);
    sent?;
    let error = joined.expect_err("the layout of the topic is unknown");
    let problem = error.to_string();
    assert!(problem.contains("metadata") && problem.contains(&shards.fixture.topic), "{problem}");
    let error = error.downcast::<QueueError>()?;
    assert!(error.is_transient(), "{error:?}");

    replica.restart()?;
    primary.restart()?;
    shards.cluster.wait_until_ok(Duration::from_secs(60))?;
    let second = shards.subscribe(&second_queue, 2, Mode::Owned).await?;
    eventually("all partitions are shared", async || {
        let shares = [first.stats().partitions, second.stats().partitions];
        Ok(shares == [all.len() / 2; 2])
    })
    .await?;
    shards.send(&all, "after").await?;
    shards.wait_for(&all, "after").await?;
    for partition in &all {
        assert_eq!(shards.times(*partition, "after"), 1, "{partition}");
    }
    tokio::join!(first.stop(), second.stop());
    shards.report("a dead server of metadata")
}

/// Calls for partitions of the dead server take their deadline (5 s) once, not in turns.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_consumer_of_many_partitions_starts_without_a_dead_server() -> Result<()> {
    let shards = ShardFixture::start(Victim::PartitionsOnly).await?;
    let (queue, cluster) = (&shards.fixture.queue, &shards.cluster);
    let many = loop {
        let name = unique("many");
        let meta = cluster.slot_of(&format!("streaming:mq:topic:{name}:meta"))?;
        if cluster.primary_of_slot(meta)?.port() != shards.victim {
            break name;
        }
    };
    queue.topics().create(&many, 512, Policies::default()).await?;

    ServerFault::Dead.begin(shards.victims()?)?;
    let start = Instant::now();
    let handler = ShardHandler { by: 1, handled: Arc::clone(&shards.handled) };
    let subscription = queue.subscribe(&many, GROUP, handler, ConsumerConfig::default()).await?;
    let took = start.elapsed();
    drop(subscription);
    // In turns, 64 at a time, they take over 40 s.
    assert!(took < Duration::from_secs(30), "it took {took:?}");
    Ok(())
}
