//! One server of a Redis Cluster is down: routes and commands go on with the partitions and topics of the others.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use headwater_queue::{
    ConsumerConfig, DeadLetterQuery, Message, NewMessage, Outcome, Policies, ProducerConfig, Queue,
};
use headwater_testkit::{Cluster, unique};
use serde_json::{Value, json};

use crate::support::{LIMIT, Server, ServerDir, eventually, text};

const PARTITIONS: u16 = 12;
/// How long producers use the metadata that they have read.
const REFRESH: Duration = Duration::from_secs(2);
/// Longer than that, and than a server remembers that a topic exists, 5 s.
const OUTAGE: Duration = Duration::from_secs(8);

/// A cluster that goes on without one of its servers.
struct Shards {
    cluster: Cluster,
    queue: Queue,
}

impl Shards {
    async fn start() -> Result<Self> {
        let cluster = Cluster::builder()
            .setting("cluster-require-full-coverage", "no")
            // A server that is slow on a busy machine keeps its slots.
            .setting("cluster-node-timeout", "15000")
            .start()?;
        let streams = headwater_stream::connect(&cluster.url(), &Default::default()).await?;
        Ok(Self { cluster, queue: Queue::new(streams) })
    }

    /// The port of the server that has this key.
    fn port_of(&self, key: &str) -> Result<u16> {
        Ok(self.cluster.primary_of_slot(self.cluster.slot_of(key)?)?.port())
    }

    /// The port of the server that has the metadata of a topic.
    fn port_of_metadata(&self, topic: &str) -> Result<u16> {
        self.port_of(&format!("streaming:mq:topic:{topic}:meta"))
    }

    /// The port of a server without the lists of topics.
    fn port_without_lists(&self) -> Result<u16> {
        let lists = [
            self.port_of("streaming:mq:topics:registry")?,
            self.port_of("streaming:mq:topics:plain")?,
        ];
        let nodes = self.cluster.nodes();
        let mut primaries = nodes[..nodes.len() / 2].iter().map(|node| node.port());
        primaries.find(|port| !lists.contains(port)).context("three servers")
    }

    /// Creates a topic. Returns the port of the server of each partition.
    async fn create(&self, topic: &str) -> Result<Vec<u16>> {
        let policies = Policies { refresh: REFRESH, ..Policies::default() };
        self.queue.topics().create(topic, PARTITIONS, policies).await?;
        let described = self.queue.topics().describe(topic).await?;
        described.partitions.iter().map(|partition| self.port_of(&partition.stream_key)).collect()
    }

    /// Kills a server, and before it its replica, so that it does not take over.
    fn kill(&self, port: u16) -> Result<()> {
        let nodes = self.cluster.nodes();
        let at = nodes.iter().position(|node| node.port() == port).context("no such server")?;
        // Primaries come first, then their replicas in the same order.
        nodes[at + nodes.len() / 2].kill9()?;
        nodes[at].kill9()
    }
}

/// The partitions that are not on this server.
fn healthy(ports: &[u16], victim: u16) -> Vec<u16> {
    (0..).zip(ports).filter(|(_, port)| **port != victim).map(|(partition, _)| partition).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_starts_without_a_server_handles_the_partitions_of_the_others() -> Result<()>
{
    let shards = Shards::start().await?;
    let topic = unique("orders");
    let ports = shards.create(&topic).await?;
    let metadata = shards.port_of_metadata(&topic)?;
    let victim = ports.iter().find(|port| **port != metadata);
    let victim = *victim.context("twelve partitions are on more than one server")?;
    let healthy = healthy(&ports, victim);
    ensure!(!healthy.is_empty(), "twelve partitions are on more than one server");

    shards.kill(victim)?;
    let dir = ServerDir::new()?;
    let exec = "cat > handled-$HEADWATER_PARTITION";
    let verb = ["consume", &topic, "--group", "g", "--exec", exec];
    let mut consumer =
        dir.start_soon(&[&verb[..], &["--stream-url", &shards.cluster.url()]].concat())?;
    let producer = shards.queue.producer(ProducerConfig::default())?;
    for partition in &healthy {
        let message = NewMessage::new(format!("message {partition}")).to_partition(*partition);
        producer.send(&topic, message).await?;
    }

    let is_handled = |partition: &u16| {
        let file = dir.path().join(format!("handled-{partition}"));
        std::fs::read_to_string(file).is_ok_and(|text| text == format!("message {partition}"))
    };
    let all_handled =
        eventually("the messages of the healthy partitions", || healthy.iter().all(is_handled));
    all_handled.await.with_context(|| consumer.log())?;
    ensure!(!consumer.has_ended(), "{}", consumer.log());
    Ok(())
}

/// Sends a message to each of these partitions over HTTP.
async fn send(server: &Server, topic: &str, partitions: &[u16]) -> Result<()> {
    for partition in partitions {
        let messages = json!({"messages": [{"payload": "p", "partition": partition}]});
        let (status, body) =
            server.post(&format!("/api/v1/topics/{topic}/messages"), &messages).await?;
        ensure!(status == 201, "partition {partition}: {status} {body}\n{}", server.log());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_over_http_are_accepted_without_the_server_of_the_metadata() -> Result<()> {
    let shards = Shards::start().await?;
    let topic = unique("orders");
    let ports = shards.create(&topic).await?;
    let victim = shards.port_of_metadata(&topic)?;
    let healthy = healthy(&ports, victim);
    ensure!(!healthy.is_empty(), "twelve partitions are on more than one server");
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--stream-url", &shards.cluster.url()])?;
    send(&server, &topic, &healthy).await?;

    shards.kill(victim)?;
    let began = Instant::now();
    while began.elapsed() < OUTAGE {
        send(&server, &topic, &healthy).await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    send(&server, &topic, &healthy).await
}

/// Creates a topic with one partition and a group. Its partition is on this server, or nothing of it is.
async fn create_on(shards: &Shards, victim: u16, is_on_victim: bool) -> Result<String> {
    let name = loop {
        let name = unique("orders");
        let stream = shards.port_of(&format!("stream:topic:{{{name}:0}}"))?;
        let others =
            [shards.port_of_metadata(&name)?, shards.port_of(&format!("stream:topic:{name}:dlq"))?];
        if (stream == victim) == is_on_victim && !others.contains(&victim) {
            break name;
        }
    };
    shards.queue.topics().create(&name, 1, Policies::default()).await?;
    let handler = |_: Message| async { Outcome::Done };
    shards.queue.subscribe(&name, "g", handler, ConsumerConfig::default()).await?.stop().await;
    Ok(name)
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_and_owners_are_listed_without_a_server() -> Result<()> {
    let shards = Shards::start().await?;
    let victim = shards.port_without_lists()?;
    let healthy = create_on(&shards, victim, false).await?;
    let affected = create_on(&shards, victim, true).await?;
    let dir = ServerDir::new()?;
    let url = shards.cluster.url();
    let server = dir.serve(&["--stream-url", &url])?;

    shards.kill(victim)?;
    let listed = dir.run(&["topic", "list", "--json", "--stream-url", &url])?;
    ensure!(listed.status.success(), "{}", text(&listed.stderr));
    let topics: Vec<Value> =
        text(&listed.stdout).lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let topic = |name: &str| {
        let found = topics.iter().find(|topic| topic["name"] == name);
        found.with_context(|| format!("{name} is not in {topics:?}"))
    };
    let found = topic(&healthy)?;
    assert_eq!((&found["length"], &found["groups"]), (&json!(0), &json!(["g"])), "{found}");
    assert!(found["problem"].is_null(), "{found}");
    let found = topic(&affected)?;
    assert_eq!((&found["length"], &found["kind"]), (&Value::Null, &json!("unknown")), "{found}");
    assert!(found["problem"].is_string(), "{found}");

    let (status, owners) = server.get("/api/v1/assignment").await?;
    assert_eq!(status, 200, "{owners}");
    let unread = owners["unread_topics"].as_array().context("unread topics")?;
    assert!(unread.contains(&json!(affected)), "{owners}");
    let groups = owners["groups"].as_array().context("groups")?;
    assert!(groups.iter().any(|group| group["topic"] == healthy.as_str()), "{owners}");
    let is_partial = |_: u16, overview: &Value| {
        let problems = overview["problems"].as_array().into_iter().flatten();
        let mut codes = problems.map(|problem| &problem["code"]);
        overview["topics"]["unread"].as_u64() >= Some(1)
            && codes.any(|code| code == "topics_unavailable")
    };
    server.until("/api/v1/overview", is_partial).await?;
    Ok(())
}

/// Creates a topic with a dead letter, whose stream of dead letters is on this server, or nothing of it is. Returns its name and
/// the id of the dead letter.
async fn with_dead_letter(
    shards: &Shards,
    victim: u16,
    is_on_victim: bool,
) -> Result<(String, String)> {
    let name = loop {
        let name = unique("orders");
        let letters = shards.port_of(&format!("stream:topic:{name}:dlq"))?;
        let others = [
            shards.port_of_metadata(&name)?,
            shards.port_of(&format!("stream:topic:{{{name}:0}}"))?,
        ];
        if (letters == victim) == is_on_victim && !others.contains(&victim) {
            break name;
        }
    };
    shards.queue.topics().create(&name, 1, Policies::default()).await?;
    let handler = |_: Message| async { Outcome::dead_letter("card declined") };
    let config = ConsumerConfig::default();
    let subscription = shards.queue.subscribe(&name, "g", handler, config).await?;
    let producer = shards.queue.producer(ProducerConfig::default())?;
    producer.send(&name, NewMessage::new("order 1")).await?;
    let letters = shards.queue.dead_letters(&name).await?;
    let deadline = Instant::now() + LIMIT;
    let letter = loop {
        let page = letters.browse(&DeadLetterQuery::default()).await?;
        if let Some(letter) = page.items.first() {
            break letter.id.to_string();
        }
        ensure!(Instant::now() < deadline, "the message did not become a dead letter");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    subscription.stop().await;
    Ok((name, letter))
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_of_other_topics_are_found_without_a_server() -> Result<()> {
    let shards = Shards::start().await?;
    let victim = shards.port_without_lists()?;
    let (healthy, letter) = with_dead_letter(&shards, victim, false).await?;
    let (affected, _) = with_dead_letter(&shards, victim, true).await?;
    let dir = ServerDir::new()?;
    let server = dir.serve(&["--stream-url", &shards.cluster.url()])?;
    let cause_of = |failures: &Value, topic: &str| {
        let mut clusters = failures["clusters"].as_array().into_iter().flatten();
        let found = clusters.find(|cluster| cluster["place"] == topic)?;
        Some(found["id"].as_str()?.to_owned())
    };
    let has_both = |_: u16, failures: &Value| {
        cause_of(failures, &healthy).is_some() && cause_of(failures, &affected).is_some()
    };
    let before = server.until("/api/v1/failures", has_both).await?;
    assert_eq!(before["sources"][0]["unread"], json!([]), "{before}");

    shards.kill(victim)?;
    // The causes that were read before are shown, with the name of the topic that does not answer.
    let is_partial = |_: u16, failures: &Value| {
        failures["sources"][0]["unread"] == json!([affected]) && has_both(200, failures)
    };
    let failures = server.until("/api/v1/failures", is_partial).await?;
    let letters = &failures["sources"][0];
    assert_eq!((&letters["problem"], &letters["complete"]), (&Value::Null, &json!(false)));
    let cause = cause_of(&failures, &healthy).context("the cause of the healthy topic")?;
    let (status, shown) = server.get(&format!("/api/v1/failures/{cause}?ids=true")).await?;
    assert_eq!((status, &shown["ids"]), (200, &json!([letter])), "{shown}");
    let is_found = |_: u16, found: &Value| {
        let mut results = found["results"].as_array().into_iter().flatten();
        results.any(|result| result["kind"] == "dead_letter" && result["topic"] == healthy.as_str())
            && found["sources"].to_string().contains("one topic did not answer")
    };
    server.until(&format!("/api/v1/search?q={letter}"), is_found).await?;
    Ok(())
}

/// The rest of the group stays visible, and no change is made that depends on what cannot be read.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_is_described_with_its_owners_and_members_without_a_server() -> Result<()> {
    let shards = Shards::start().await?;
    let victim = shards.port_without_lists()?;
    // Its metadata is on another server, and at least one of its partitions on this one.
    let topic = loop {
        let topic = unique("orders");
        let partition = shards.port_of(&format!("stream:topic:{{{topic}:0}}"))?;
        if shards.port_of_metadata(&topic)? != victim && partition == victim {
            break topic;
        }
    };
    let ports = shards.create(&topic).await?;
    let healthy = healthy(&ports, victim);
    let unread: Vec<u16> = (0..PARTITIONS).filter(|it| !healthy.contains(it)).collect();
    ensure!(!healthy.is_empty(), "twelve partitions are on more than one server");
    let handler = |_: Message| async { Outcome::Done };
    let consumer = shards.queue.subscribe(&topic, "g", handler, ConsumerConfig::default()).await?;
    eventually("it owns all partitions", || consumer.stats().partitions == usize::from(PARTITIONS))
        .await?;
    let (dir, url) = (ServerDir::new()?, shards.cluster.url());
    let shown = |verb: &[&str]| -> Result<(Value, String)> {
        let shown = dir.run(&[verb, &["--json", "--stream-url", &url]].concat())?;
        let note = text(&shown.stderr);
        ensure!(shown.status.success(), "{verb:?}: {note}");
        Ok((serde_json::from_str(&text(&shown.stdout))?, note))
    };

    shards.kill(victim)?;
    let (group, note) = shown(&["group", "describe", &topic, "g"])?;
    assert_eq!(group["unread_partitions"], json!(unread), "{group}");
    assert!(group["lag"].is_null() && group["pending"] == 0, "{group}");
    assert!(note.contains("not in the counts of group `g`"), "{note}");
    let members = group["members"].as_array().context("members")?;
    assert!(members.len() == 1 && members[0]["heartbeat_age_ms"].is_u64(), "{group}");
    let owner = &members[0]["consumer"];
    let partitions = group["partitions"].as_array().context("partitions")?;
    assert_eq!(partitions.len(), usize::from(PARTITIONS));
    for partition in &healthy {
        let found = &partitions[usize::from(*partition)];
        assert!(found["owner"]["holder"] == *owner && found["problem"].is_null(), "{found}");
        assert_eq!((&found["pending"], &found["lag"]), (&json!(0), &json!(0)), "{found}");
    }
    for partition in &unread {
        let found = &partitions[usize::from(*partition)];
        assert!(found["owner"].is_null() && found["problem"].is_string(), "{found}");
        assert_eq!((&found["pending"], &found["lag"]), (&Value::Null, &Value::Null), "{found}");
    }

    let (listed, _) = shown(&["group", "list", &topic])?;
    assert_eq!((&listed["group"], &listed["unread_partitions"]), (&json!("g"), &json!(unread)));
    let (why, _) = shown(&["group", "why", &topic, "g"])?;
    assert_eq!(why["reason"], "unread", "{why}");
    let (owners, _) = shown(&["group", "owners", &topic])?;
    let shares = json!([{"member": owner, "partitions": healthy.len()}]);
    assert_eq!((&owners["members"], &owners["orphans"]), (&shares, &json!(0)), "{owners}");
    let server = dir.serve(&["--stream-url", &url])?;
    let (status, page) = server.get("/api/v1/assignment").await?;
    assert_eq!(status, 200, "{page}");
    let groups = page["groups"].as_array().context("groups")?;
    assert!(groups.iter().any(|group| group["topic"] == topic.as_str()), "{page}");
    let unread_topics = page["unread_topics"].as_array().map(Vec::as_slice).unwrap_or_default();
    assert!(!unread_topics.contains(&json!(topic)), "{page}");

    consumer.stop().await;
    let error = shards.queue.remove_group(&topic, "g").await.expect_err("owners are unknown");
    assert!(error.is_transient(), "{error:?}");
    let view = shards.queue.inspect().group(&topic, "g").await?;
    for partition in healthy {
        let found = &view.partitions[usize::from(partition)];
        assert!(found.last_delivered.is_some(), "the group is still there: {found:?}");
    }
    Ok(())
}
