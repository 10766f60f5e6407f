//! How servers are found: Sentinels and their credentials, another primary, replicas of a cluster, redirections without a host.
#![cfg(feature = "redis")]

mod redis_support;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use headwater_stream::{Backend, Options, Range, Retention, StreamError, connect};
use headwater_testkit::{Cluster, Redis, Sentinel, wait_until};
use tokio::sync::Notify;
use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::redis_support::*;

const KEEP: Retention = Retention::KEEP_ALL;
/// Longer than 30 s, the time that a sentinel stays passive after it was starved.
const TIMEOUT: Duration = Duration::from_secs(90);

/// Appends with retries.
async fn append(backend: &Arc<dyn Backend>, name: &str, number: usize) -> Result<()> {
    let appending = async {
        loop {
            match backend.append(&stream(name), &[numbered(number)], &KEEP).await {
                Ok(_) => return anyhow::Ok(()),
                Err(StreamError::Unavailable { .. }) => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Err(error) => bail!(error),
            }
        }
    };
    tokio::time::timeout(TIMEOUT, appending).await?
}

/// The URL with its first host only.
fn first_host(url: &str) -> Result<String> {
    let (hosts, service) = url.rsplit_once('/').context("it names a service")?;
    let first = hosts.split(',').next().context("it has hosts")?;
    Ok(format!("{first}/{service}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinels_can_have_credentials_of_their_own() -> Result<()> {
    let sentinel = Sentinel::start_with_password("watch")?;
    let options = Options { call_deadline: Duration::from_secs(1), ..Options::default() };
    let without = connect(&sentinel.url(), &options).await.map(drop);
    assert!(without.is_err(), "the Sentinels require a password");

    let backend = open(&format!("{}?sentinel_password=watch", sentinel.url())).await?;
    append(&backend, "orders", 1).await?;
    assert_eq!(sentinel.primary().command(&["XLEN", "orders"])?.int(), Some(1));
    Ok(())
}

/// The user exists at the Sentinels only, and its password is not that of their default user.
#[tokio::test(flavor = "multi_thread")]
async fn sentinels_can_have_a_user_of_their_own() -> Result<()> {
    let sentinel = Sentinel::start_with_password("watch")?;
    for server in sentinel.sentinels() {
        let words = ["ACL", "SETUSER", "guard", "on", ">secret", "~*", "&*", "+@all"];
        server.command(&words)?.ok()?;
    }
    let options = Options { call_deadline: Duration::from_secs(1), ..Options::default() };
    for wrong in ["sentinel_password=secret", "sentinel_user=guard&sentinel_password=watch"] {
        let refused = connect(&format!("{}?{wrong}", sentinel.url()), &options).await.map(drop);
        assert!(refused.is_err(), "connected with {wrong}");
    }

    let login = "sentinel_user=guard&sentinel_password=secret";
    let backend = open(&format!("{}?{login}", sentinel.url())).await?;
    append(&backend, "orders", 1).await?;
    assert_eq!(sentinel.primary().command(&["XLEN", "orders"])?.int(), Some(1));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinels_that_the_url_does_not_name_are_learned() -> Result<()> {
    let sentinel = Sentinel::start()?;
    let backend = open(&first_host(&sentinel.url())?).await?;
    append(&backend, "orders", 1).await?;
    wait_until("the replica to have the entry", TIMEOUT, || {
        sentinel.replica().command(&["XLEN", "orders"]).is_ok_and(|length| length.int() == Some(1))
    })?;

    // The two others are enough for a failover, but the URL does not name them.
    sentinel.sentinels()[0].kill9()?;
    sentinel.primary().kill9()?;

    append(&backend, "orders", 2).await?;
    let length = sentinel.replica().command(&["XLEN", "orders"])?.int();
    assert_eq!(length, Some(2), "written to the new primary");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_sentinel_replaced_gets_no_writes_even_if_it_accepts_them() -> Result<()> {
    let sentinel = Sentinel::start()?;
    // Without pings, which would find the paused server as well.
    let options = Options { silence_max: Duration::from_secs(3600), ..Options::default() };
    let backend = connect(&sentinel.url(), &options).await?;
    append(&backend, "orders", 1).await?;
    let mut reader = backend.reader(&group("workers"), &consumer("ann")).await?;
    let orders = stream("orders");
    backend
        .ensure_group(&orders, &group("workers"), headwater_stream::GroupStart::Beginning)
        .await?;
    assert_eq!(read_ids(&mut *reader, &orders).await?.len(), 1);
    wait_until("the replica to have the group", TIMEOUT, || {
        let groups = sentinel.replica().command(&["XINFO", "GROUPS", "orders"]);
        groups.is_ok_and(|groups| groups.items().len() == 1)
    })?;

    // The primary is paused, replaced, and continues: for some seconds it is a primary as well.
    sentinel.primary().pause()?;
    wait_until("another primary", TIMEOUT, || {
        sentinel.current_primary().is_ok_and(|primary| primary == sentinel.replica().addr())
            && sentinel
                .replica()
                .command(&["ROLE"])
                .is_ok_and(|role| role.items().first().is_some_and(|role| role.text() == "master"))
    })?;
    // All Sentinels publish the switch when they learn it.
    for one in sentinel.sentinels() {
        wait_until("every sentinel to know it", TIMEOUT, || {
            let address = one.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"]);
            address.is_ok_and(|address| {
                address
                    .items()
                    .get(1)
                    .is_some_and(|port| port.text() == sentinel.replica().port().to_string())
            })
        })?;
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    sentinel.primary().resume()?;
    backend.append(&orders, &[numbered(2)], &KEEP).await?;

    let found = sentinel.replica().command(&["XLEN", "orders"])?.int();
    assert_eq!(found, Some(2), "the write went to the new primary");
    assert_eq!(read_ids(&mut *reader, &orders).await?.len(), 1, "and readers read from it");
    Ok(())
}

/// Notifies when the client logs that another server is the primary.
struct SwitchLog(Arc<Notify>);

impl Subscriber for SwitchLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().ends_with("redis::node") && metadata.is_event()
    }

    fn event(&self, event: &Event<'_>) {
        event.record(&mut |field: &Field, value: &dyn Debug| {
            let is_message = field.name() == "message";
            if is_message && format!("{value:?}").contains("named another primary") {
                self.0.notify_one();
            }
        });
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The old primary accepts the connection before the switch and answers after it, as a primary.
#[tokio::test(flavor = "multi_thread")]
async fn a_connect_that_began_before_a_switch_of_sentinel_does_not_lead_to_the_old_primary()
-> Result<()> {
    let sentinel = Sentinel::start()?;
    let hour = Duration::from_secs(3600);
    let options = Options { silence_max: hour, call_deadline: TIMEOUT, ..Options::default() };
    let backend = connect(&sentinel.url(), &options).await?;
    append(&backend, "orders", 1).await?;
    let switched = Arc::<Notify>::default();
    tracing::subscriber::set_global_default(SwitchLog(Arc::clone(&switched)))?;
    let length = |redis: &Redis| redis.command(&["XLEN", "orders"]).ok().and_then(|l| l.int());
    wait_until("the replica to have the entry", TIMEOUT, || length(sentinel.replica()) == Some(1))?;
    // The Sentinel that tells this client about the switch.
    let clients = |redis: &Redis| redis.command(&["CLIENT", "LIST"]).map(|list| list.text());
    let mut told = None;
    wait_until("the client to listen at a Sentinel", TIMEOUT, || {
        told = sentinel.sentinels().iter().find(|one| {
            clients(one).is_ok_and(|list| list.lines().any(|line| line.contains(" sub=1 ")))
        });
        told.is_some()
    })?;
    let told = told.context("it was found")?;

    let (old, new) = (sentinel.primary(), sentinel.replica());
    let list = clients(old)?;
    for line in list.lines().filter(|line| line.contains("name=headwater")) {
        let id = line.split(' ').next().and_then(|id| id.strip_prefix("id=")).context("an id")?;
        old.command(&["CLIENT", "KILL", "ID", id])?.ok()?;
    }
    old.pause()?;
    told.command(&["SENTINEL", "FAILOVER", "mymaster"])?.ok()?;
    let mut appending = {
        let backend = Arc::clone(&backend);
        tokio::spawn(async move { append(&backend, "orders", 2).await })
    };
    let has_switched = tokio::time::timeout(TIMEOUT, switched.notified());
    tokio::select! {
        heard = has_switched => {
            heard.context("the client hears of it")?;
            old.resume()?;
            appending.await??;
        }
        // It asked the Sentinels after the switch.
        appended = &mut appending => {
            appended??;
            old.resume()?;
        }
    }
    assert_eq!(length(new), Some(2), "written to the new primary");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sentinel_that_missed_the_failover_is_overruled_by_the_others() -> Result<()> {
    // Given a failover, and a Sentinel that names another server, which is a primary as well.
    let sentinel = Sentinel::start()?;
    sentinel.primary().kill9()?;
    wait_until("another primary", TIMEOUT, || {
        sentinel.current_primary().is_ok_and(|primary| primary == sentinel.replica().addr())
    })?;
    let old_primary = Redis::start()?;
    let outdated = Sentinel::start_outdated(&old_primary)?;

    // When a client asks it first.
    let url = sentinel.url().replace("://", &format!("://{},", outdated.addr()));
    let backend = open(&url).await?;
    append(&backend, "orders", 1).await?;

    // Then the newer answer of the others counts.
    assert_eq!(sentinel.replica().command(&["XLEN", "orders"])?.int(), Some(1));
    assert_eq!(old_primary.command(&["XLEN", "orders"])?.int(), Some(0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_of_a_cluster_are_asked_for_the_slots_when_all_primaries_are_gone() -> Result<()> {
    let cluster = Cluster::start()?;
    // The URL names one primary; its replica, which it does not name, takes over.
    let seed = &cluster.nodes()[0];
    let backend = open(&format!("redis-cluster://{}", seed.addr())).await?;
    append(&backend, "orders", 1).await?;
    for primary in &cluster.nodes()[..3] {
        primary.kill9()?;
    }
    // Without a majority of primaries there is no failover: an operator promotes the replicas.
    for replica in &cluster.nodes()[3..] {
        wait_until("the replica to take over", TIMEOUT, || {
            replica.command(&["CLUSTER", "FAILOVER", "TAKEOVER"]).is_ok()
                && replica.command(&["ROLE"]).is_ok_and(|role| {
                    role.items().first().is_some_and(|role| role.text() == "master")
                })
        })?;
    }
    append(&backend, "orders", 2).await?;
    assert!(!backend.range(&stream("orders"), Range::last(1)).await?.is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn redirections_of_a_cluster_without_a_host_lead_to_the_host_that_replied() -> Result<()> {
    let unknown = ("cluster-preferred-endpoint-type", "unknown-endpoint");
    // The nodes know each other by 127.0.0.1, and the client reaches them by another host, as behind a NAT.
    let both = ("bind", "127.0.0.1 127.0.0.2");
    // Since Redis 7.0.
    let builder = Cluster::builder().setting(unknown.0, unknown.1).setting(both.0, both.1);
    let Ok(cluster) = builder.start() else {
        println!("skipped: this server has no setting {}", unknown.0);
        return Ok(());
    };
    // Nothing listens at the first host of the URL.
    let port = cluster.nodes()[0].port();
    let url = format!("redis-cluster://127.0.0.3:{port},127.0.0.2:{port}?client_name=follower");
    let backend = open(&url).await?;
    append(&backend, "orders", 1).await?;
    let slot = cluster.slot_of("orders")?;
    let from = cluster.primary_of_slot(slot)?;
    let to = cluster.nodes()[..3].iter().find(|node| node.port() != from.port()).context("two")?;
    let id_of = |node: &headwater_testkit::Redis| -> Result<String> {
        Ok(node.command(&["CLUSTER", "MYID"])?.text())
    };
    let (from_id, to_id, number) = (id_of(from)?, id_of(to)?, slot.to_string());

    // While the slot moves, the old owner replies `ASK SLOT :PORT`.
    to.command(&["CLUSTER", "SETSLOT", &number, "IMPORTING", &from_id])?.ok()?;
    from.command(&["CLUSTER", "SETSLOT", &number, "MIGRATING", &to_id])?.ok()?;
    let port = to.port().to_string();
    from.command(&["MIGRATE", "127.0.0.1", &port, "orders", "0", "5000"])?.ok()?;
    let asked = from.command(&["XLEN", "orders"])?.text();
    assert!(asked.contains(&format!("ASK {slot} :{port}")), "{asked}");
    backend.append(&stream("orders"), &[numbered(2)], &KEEP).await?;

    // Then `MOVED SLOT :PORT`.
    for node in [to, from] {
        node.command(&["CLUSTER", "SETSLOT", &number, "NODE", &to_id])?.ok()?;
    }
    backend.append(&stream("orders"), &[numbered(3)], &KEEP).await?;
    assert_eq!(to.command(&["XLEN", "orders"])?.int(), Some(3));

    // All of that went over the host that the client reached the replying node by.
    for node in [from, to] {
        let clients = node.command(&["CLIENT", "LIST"])?.text();
        let mut ours = clients.lines().filter(|line| line.contains(" name=follower")).peekable();
        assert!(ours.peek().is_some(), "{clients}");
        let local = format!(" laddr=127.0.0.2:{} ", node.port());
        assert!(ours.all(|line| line.contains(&local)), "{clients}");
    }
    Ok(())
}
