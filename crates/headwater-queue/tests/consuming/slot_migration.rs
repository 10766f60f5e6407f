//! A slot of a cluster moves to a node that had none, while its partition is consumed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{ConsumerConfig, Message, Outcome};
use headwater_stream::{
    ConsumerName, EntryId, Epoch, Fence, Fields, GroupName, LeaseName, Retention, SettleAction,
    SettleBatch, Settlement, StreamError, StreamName,
};
use headwater_testkit::{ChaosCounts, Cluster, Redis, wait_until};

use crate::fixture::{Fixture, GROUP, TIMEOUT, eventually};

const MESSAGES: usize = 200;

/// Makes a replica a primary without slots.
fn empty_primary(cluster: &Cluster, slot: u16) -> Result<&Redis> {
    let known = cluster.primary_of_slot(slot)?;
    let node = cluster.replica_of_slot(slot)?;
    let id = node.command(&["CLUSTER", "MYID"])?.text();
    node.command(&["CLUSTER", "RESET", "SOFT"])?.ok()?;
    for other in cluster.nodes().iter().filter(|other| other.port() != node.port()) {
        let port = other.port().to_string();
        node.command(&["CLUSTER", "MEET", "127.0.0.1", &port])?.ok()?;
    }
    wait_until("the cluster to know the new primary", TIMEOUT, || {
        let is_primary = |line: &str| line.starts_with(&id) && line.contains("master");
        let knows = |node: &Redis| {
            node.command(&["CLUSTER", "NODES"])
                .is_ok_and(|nodes| nodes.text().lines().any(is_primary))
        };
        knows(known)
            && node
                .command(&["CLUSTER", "INFO"])
                .is_ok_and(|info| info.text().lines().any(|line| line == "cluster_state:ok"))
    })?;
    Ok(node)
}

fn connections(node: &Redis) -> Result<u64> {
    let stats = node.command(&["INFO", "stats"])?.text();
    let count = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    Ok(count.context("no count of connections")?.parse()?)
}

/// A former owner cannot settle.
async fn assert_fenced(fixture: &Fixture, stream: &StreamName, epoch: Epoch) -> Result<()> {
    let lease = LeaseName::new(format!("streaming:mq:lease:{{{}:0}}:{GROUP}", fixture.topic))?;
    let entries = &[Settlement { id: EntryId::MIN, action: SettleAction::Ack }];
    let settle = SettleBatch {
        stream,
        group: &GroupName::new(GROUP)?,
        consumer: &ConsumerName::new("former")?,
        fence: Some(&Fence { lease, epoch }),
        entries,
    };
    let settled = fixture.backend.settle(settle).await;
    assert!(matches!(settled, Err(StreamError::Fenced { .. })), "{settled:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_partition_is_consumed_while_its_slot_moves() -> Result<()> {
    let cluster = Arc::new(Cluster::start()?);
    let fixture = Fixture::open(&cluster.url(), Arc::clone(&cluster)).await?;
    fixture.create(3).await?;
    let stream = fixture.stream(0).await?;
    let slot = cluster.slot_of(stream.as_str())?;
    let from = cluster.primary_of_slot(slot)?;
    let to = empty_primary(&cluster, slot)?;
    let handled = Arc::<Mutex<Vec<(String, Option<Epoch>)>>>::default();
    let seen = Arc::clone(&handled);
    let handler = move |message: Message| {
        let payload = String::from_utf8_lossy(&message.payload).into_owned();
        seen.lock().unwrap().push((payload, message.epoch));
        async { Outcome::Done }
    };
    let config = ConsumerConfig { concurrency: 1, ..Default::default() };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    let send = async |number: usize| {
        let fields = Fields::new([
            ("payload", number.to_string()),
            ("timestamp", "2026-01-01T00:00:00Z".to_owned()),
            ("retryCount", "0".to_owned()),
            ("topic", fixture.topic.clone()),
            ("partitionId", "0".to_owned()),
            ("headers", "{}".to_owned()),
        ]);
        fixture.backend.append(&stream, &[fields], &Retention::KEEP_ALL).await?;
        anyhow::Ok(())
    };
    send(0).await?;
    eventually("the first message is handled", async || Ok(handled.lock().unwrap().len() == 1))
        .await?;
    let epoch = handled.lock().unwrap()[0].1.context("an owner has an epoch")?;

    let before = connections(to)?;
    let id_of = |node: &Redis| anyhow::Ok(node.command(&["CLUSTER", "MYID"])?.text());
    let (from_id, to_id, number) = (id_of(from)?, id_of(to)?, slot.to_string());
    to.command(&["CLUSTER", "SETSLOT", &number, "IMPORTING", &from_id])?.ok()?;
    from.command(&["CLUSTER", "SETSLOT", &number, "MIGRATING", &to_id])?.ok()?;
    let migrate = async {
        let port = to.port().to_string();
        let listed = from.command(&["CLUSTER", "GETKEYSINSLOT", &number, "100"])?;
        // The stream, the lease, its epoch and the data epoch: one at a time.
        for key in listed.items().iter().map(|key| key.text()) {
            tokio::time::sleep(Duration::from_millis(200)).await;
            from.command(&["MIGRATE", "127.0.0.1", &port, &key, "0", "5000"])?.ok()?;
        }
        // The lease is at the new node, and the old one redirects each call.
        assert_fenced(&fixture, &stream, Epoch(epoch.0 - 1)).await?;
        // Longer than the lease: it must be renewed at the new node.
        tokio::time::sleep(Duration::from_secs(4)).await;
        for node in [to, from] {
            node.command(&["CLUSTER", "SETSLOT", &number, "NODE", &to_id])?.ok()?;
        }
        assert_fenced(&fixture, &stream, Epoch(epoch.0 - 1)).await?;
        anyhow::Ok(())
    };
    let sending = async {
        for number in 1..MESSAGES {
            send(number).await?;
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        anyhow::Ok(())
    };
    tokio::try_join!(migrate, sending)?;

    eventually("all messages are handled", async || Ok(handled.lock().unwrap().len() >= MESSAGES))
        .await?;
    let expected: Vec<String> = (0..MESSAGES).map(|number| number.to_string()).collect();
    let handled: Vec<String> = handled.lock().unwrap().iter().map(|(it, _)| it.clone()).collect();
    assert_eq!(handled, expected, "each once and in order");
    let opened = connections(to)? - before;
    assert!(opened < 40, "{opened} connections for {MESSAGES} messages");
    subscription.stop().await;
    let messages = MESSAGES as u64;
    ChaosCounts { sent: messages, handled: messages, ..Default::default() }.report("slot migration")
}
