//! Appends keep their order when the server rejects commands in the middle; large replies do not keep memory alive.
#![cfg(feature = "redis")]

mod redis_support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use headwater_stream::{
    AppendRequest, Backend, Fields, Options, Range, Retention, StreamError, StreamName, connect,
};
use headwater_testkit::{Redis, RedisConnection, RedisReply, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::redis_support::*;

const MIB: usize = 1024 * 1024;
const COUNT: usize = 40;
const KEEP: Retention = Retention::KEEP_ALL;

/// How long a server may take to change its state.
const LIMIT: Duration = Duration::from_secs(60);

/// Why the server rejects commands for a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rejection {
    /// A script runs.
    Busy,
    /// The server reads its data.
    Loading,
    /// The server is a replica.
    ReadOnly,
    /// The memory is full.
    Full,
    /// There are too few replicas.
    NoReplicas,
    /// No server of the cluster has the slot.
    Unassigned,
    /// The slot moves to another server, which has the stream already.
    Asked,
    /// The slot has moved to another server.
    Moved,
}

/// The server that rejects commands, and another one of its cluster.
struct Servers {
    redis: Redis,
    other: Option<Redis>,
}

impl Servers {
    fn start(rejection: Rejection, announced: SocketAddr) -> Result<Self> {
        match rejection {
            Rejection::Unassigned | Rejection::Asked | Rejection::Moved => Self::cluster(announced),
            // Redis 6.2 permits `DEBUG` and does not know the setting.
            Rejection::Loading => Redis::builder()
                .setting("enable-debug-command", "yes")
                .start()
                .or_else(|_| Redis::start())
                .map(|redis| Self { redis, other: None }),
            _ => Ok(Self { redis: Redis::start()?, other: None }),
        }
    }

    /// One server with all slots, which tells clients this address, and one without slots.
    fn cluster(announced: SocketAddr) -> Result<Self> {
        let node = Redis::builder()
            .setting("cluster-enabled", "yes")
            .setting("cluster-node-timeout", "60000")
            .setting("cluster-require-full-coverage", "no")
            .setting("cluster-announce-ip", "127.0.0.1");
        let other = node.clone().start()?;
        let redis = node.setting("cluster-announce-port", &announced.port().to_string()).start()?;
        redis.command(&["CLUSTER", "SET-CONFIG-EPOCH", "1"])?.ok()?;
        other.command(&["CLUSTER", "SET-CONFIG-EPOCH", "2"])?.ok()?;
        // ADDSLOTSRANGE is not in Redis 6.2.
        let slots: Vec<String> = (0..16_384).map(|slot| slot.to_string()).collect();
        let mut words = vec!["CLUSTER", "ADDSLOTS"];
        words.extend(slots.iter().map(String::as_str));
        redis.command(&words)?.ok()?;
        redis.command(&["CLUSTER", "MEET", "127.0.0.1", &other.port().to_string()])?.ok()?;
        let text = |node: &Redis, what: &str| {
            node.command(&["CLUSTER", what]).map(|reply| reply.text()).unwrap_or_default()
        };
        let is_ready = |node: &Redis| {
            let nodes = text(node, "NODES");
            text(node, "INFO").contains("cluster_state:ok")
                && nodes.lines().count() == 2
                && !nodes.contains("handshake")
        };
        wait_until("a cluster", LIMIT, || is_ready(&redis) && is_ready(&other))?;
        Ok(Self { redis, other: Some(other) })
    }

    /// Makes the server reject writes to stream `b`. Returns the connection on which a command runs meanwhile.
    fn begin(&self, rejection: Rejection) -> Result<Option<RedisConnection>> {
        let redis = &self.redis;
        let command = |words: &[&str]| redis.command(words)?.ok();
        match rejection {
            Rejection::Busy => {
                command(&["CONFIG", "SET", "lua-time-limit", "1"])?;
                return self.run_until(&["EVAL", "while true do end", "0"], "BUSY").map(Some);
            }
            Rejection::Loading => {
                command(&["DEBUG", "POPULATE", "3000", "key", "1000"])?;
                // In microseconds: a minute for all of them. The server replies to other commands after each.
                command(&["CONFIG", "SET", "key-load-delay", "20000"])?;
                command(&["CONFIG", "SET", "rdbcompression", "no"])?;
                command(&["CONFIG", "SET", "loading-process-events-interval-bytes", "1024"])?;
                return self.run_until(&["DEBUG", "RELOAD"], "LOADING").map(Some);
            }
            Rejection::ReadOnly => command(&["REPLICAOF", "127.0.0.1", "1"])?,
            Rejection::Full => command(&["CONFIG", "SET", "maxmemory", "1"])?,
            Rejection::NoReplicas => command(&["CONFIG", "SET", "min-replicas-to-write", "1"])?,
            Rejection::Unassigned => command(&["CLUSTER", "DELSLOTS", &self.slot()?])?,
            Rejection::Asked | Rejection::Moved => self.migrate(rejection == Rejection::Moved)?,
        };
        Ok(None)
    }

    fn end(&self, rejection: Rejection, running: Option<RedisConnection>) -> Result<()> {
        let command = |words: &[&str]| self.redis.command(words)?.ok();
        match rejection {
            Rejection::Busy => {
                command(&["SCRIPT", "KILL"])?;
                let ended = running.context("a script runs")?.receive()?;
                ensure!(matches!(ended, RedisReply::Error(_)), "{ended:?}");
                ended
            }
            Rejection::Loading => {
                command(&["CONFIG", "SET", "key-load-delay", "0"])?;
                running.context("the server loads its data")?.receive()?.ok()?
            }
            Rejection::ReadOnly => command(&["REPLICAOF", "NO", "ONE"])?,
            Rejection::Full => command(&["CONFIG", "SET", "maxmemory", "0"])?,
            Rejection::NoReplicas => command(&["CONFIG", "SET", "min-replicas-to-write", "0"])?,
            Rejection::Unassigned => command(&["CLUSTER", "ADDSLOTS", &self.slot()?])?,
            // The other server has the stream from now on.
            Rejection::Asked | Rejection::Moved => RedisReply::Nil,
        };
        Ok(())
    }

    /// Sends a command that takes long, and waits until the server replies with this error to others.
    fn run_until(&self, words: &[&str], error: &str) -> Result<RedisConnection> {
        let mut running = self.redis.connect()?;
        running.send(words)?;
        wait_until(error, LIMIT, || {
            self.redis.command(&["PING"]).is_ok_and(|reply| reply.text().starts_with(error))
        })?;
        Ok(running)
    }

    /// The slot of stream `b`.
    fn slot(&self) -> Result<String> {
        Ok(self.redis.command(&["CLUSTER", "KEYSLOT", "b"])?.ok()?.text())
    }

    /// Moves stream `b` to the other server, and also its slot if it is to own it.
    fn migrate(&self, is_owner: bool) -> Result<RedisReply> {
        let (redis, slot) = (&self.redis, self.slot()?);
        let other = self.other.as_ref().context("there is another server")?;
        let id_of = |node: &Redis| anyhow::Ok(node.command(&["CLUSTER", "MYID"])?.ok()?.text());
        let (from, to, port) = (id_of(redis)?, id_of(other)?, other.port().to_string());
        other.command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from])?.ok()?;
        redis.command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to])?.ok()?;
        let moved = redis.command(&["MIGRATE", "127.0.0.1", &port, "b", "0", "5000"])?.ok()?;
        if is_owner {
            for node in [other, redis] {
                node.command(&["CLUSTER", "SETSLOT", &slot, "NODE", &to])?.ok()?;
            }
        }
        Ok(moved)
    }
}

/// Reads one RESP message: a command or a reply.
async fn message(from: &mut BufReader<TcpStream>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut messages = 1;
    while messages > 0 {
        messages -= 1;
        let begin = bytes.len();
        while !bytes[begin..].ends_with(b"\r\n") {
            bytes.push(from.read_u8().await?);
        }
        let line = String::from_utf8_lossy(&bytes[begin..bytes.len() - 2]).into_owned();
        let length = || line[1..].parse::<i64>().map(|length| usize::try_from(length).unwrap_or(0));
        match line.as_bytes()[0] {
            b'*' | b'~' | b'>' => messages += length()?,
            b'%' => messages += 2 * length()?,
            b'$' if line != "$-1" => {
                let begin = bytes.len();
                bytes.resize(begin + length()? + 2, 0);
                from.read_exact(&mut bytes[begin..]).await?;
            }
            _ => {}
        }
    }
    Ok(bytes)
}

/// A proxy that forwards commands one by one. The server rejects the one with this text, once, and accepts the next ones.
struct RejectingProxy {
    servers: Servers,
    rejection: Rejection,
    text: String,
    rejected: AtomicUsize,
}

impl RejectingProxy {
    /// Starts servers and the proxy. Also returns the URL for a client.
    async fn start(rejection: Rejection, text: &str) -> Result<(Arc<Self>, String)> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let servers = Servers::start(rejection, address)?;
        let url = match &servers.other {
            Some(_) => format!("redis-cluster://{address}"),
            None => servers.redis.url_at(address),
        };
        let proxy = Arc::new(Self {
            servers,
            rejection,
            text: text.to_owned(),
            rejected: AtomicUsize::new(0),
        });
        let accepting = Arc::clone(&proxy);
        // Ends with the runtime of the test.
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (proxy, server) = (Arc::clone(&accepting), accepting.servers.redis.addr());
                tokio::spawn(async move {
                    let server = TcpStream::connect(server).await?;
                    proxy.forward(client, server).await
                });
            }
        });
        Ok((proxy, url))
    }

    async fn forward(&self, client: TcpStream, server: TcpStream) -> Result<()> {
        let (mut client, mut server) = (BufReader::new(client), BufReader::new(server));
        // While the server is to reject: the connection on which a command runs meanwhile.
        let mut rejecting = None;
        loop {
            let command = message(&mut client).await?;
            let is_it = command.windows(self.text.len()).any(|word| word == self.text.as_bytes());
            if is_it && self.rejected.fetch_add(1, Ordering::SeqCst) == 0 {
                rejecting = Some(self.servers.begin(self.rejection)?);
            }
            server.write_all(&command).await?;
            let reply = message(&mut server).await?;
            // Valkey takes a command for a key that has moved into a transaction, and rejects the transaction.
            if !reply.starts_with(b"+QUEUED")
                && let Some(running) = rejecting.take()
            {
                ensure!(reply.starts_with(b"-"), "the server accepted the command");
                self.servers.end(self.rejection, running)?;
            }
            client.write_all(&reply).await?;
        }
    }
}

/// Entries with a number and a payload of this size.
fn entries(of: &StreamName, size: usize) -> Vec<Fields> {
    let entry = |number| {
        Fields::new([("number", format!("{of}:{number}.")), ("payload", "x".repeat(size))])
    };
    (0..COUNT).map(entry).collect()
}

async fn numbers(backend: &Arc<dyn Backend>, of: &StreamName) -> Result<Vec<String>> {
    let found = backend.range(of, Range::first(3 * COUNT)).await?;
    let number =
        |fields: &Fields| Some(String::from_utf8_lossy(fields.get("number")?).into_owned());
    found.iter().map(|entry| number(&entry.fields).context("a number")).collect()
}

/// Appends to three streams while the server rejects one entry of the second one.
async fn append_with_rejection(rejection: Rejection, size: usize, together: bool) -> Result<()> {
    let names = ["a", "b", "c"].map(stream);
    let (proxy, url) = RejectingProxy::start(rejection, "b:25.").await?;
    // Loading takes as long as the machine needs.
    let call_deadline = match rejection {
        Rejection::Loading => Duration::from_secs(60),
        _ => Options::default().call_deadline,
    };
    let backend = connect(&url, &Options { call_deadline, ..Default::default() }).await?;
    let all = names.each_ref().map(|name| entries(name, size));
    let requests: Vec<AppendRequest<'_>> = names
        .iter()
        .zip(&all)
        .map(|(stream, entries)| AppendRequest { stream, entries, retention: &KEEP })
        .collect();
    let results = if together {
        backend.append_many(&requests).await
    } else {
        let each = names.iter().zip(&all).map(|(name, all)| backend.append(name, all, &KEEP));
        futures_util::future::join_all(each).await
    };

    ensure!(proxy.rejected.load(Ordering::SeqCst) > 0, "no entry was rejected");
    for (name, result) in names.iter().zip(results) {
        let found = numbers(&backend, name).await?;
        let sent: Vec<String> = (0..COUNT).map(|number| format!("{name}:{number}.")).collect();
        ensure!(sent.starts_with(&found), "{name} is not in order: {found:?}");
        match (rejection, result) {
            (_, Ok(ids)) => {
                ensure!(ids.len() == COUNT && found.len() == COUNT, "{name}: {found:?}");
            }
            (Rejection::Full, Err(StreamError::Full { .. })) if name.as_str() == "b" => {}
            (Rejection::NoReplicas, Err(StreamError::Unavailable { .. }))
                if name.as_str() == "b" => {}
            (_, Err(error)) => return Err(error).context(name.to_string()),
        }
    }
    Ok(())
}

async fn append_with_rejections(rejections: &[Rejection]) -> Result<()> {
    for rejection in rejections {
        // In one request, if there is no cluster; and each stream in several chunks.
        for (size, together) in [(10, true), (10, false), (8 * 1024, true), (8 * 1024, false)] {
            let case = format!("{rejection:?}, {size} bytes, together: {together}");
            append_with_rejection(*rejection, size, together).await.context(case)?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn entries_after_a_rejected_one_do_not_overtake_it() -> Result<()> {
    append_with_rejections(&[
        Rejection::Busy,
        Rejection::ReadOnly,
        Rejection::Full,
        Rejection::NoReplicas,
    ])
    .await
}

#[tokio::test]
async fn entries_after_one_rejected_by_a_loading_server_do_not_overtake_it() -> Result<()> {
    append_with_rejections(&[Rejection::Loading]).await
}

#[tokio::test]
async fn entries_after_one_rejected_by_a_cluster_do_not_overtake_it() -> Result<()> {
    append_with_rejections(&[Rejection::Unassigned, Rejection::Asked, Rejection::Moved]).await
}

#[tokio::test]
async fn a_user_without_transactions_is_denied_and_blocks_no_other_call() -> Result<()> {
    for rules in ["~* &* +@all -exec", "~* &* +@all -multi", "~* &* +@all -@transaction"] {
        let redis = Redis::builder().user("worker", "secret", rules).start()?;
        let backend = open(&redis.url()).await?;
        for _ in 0..2 {
            let result = backend.append(&stream("orders"), &[one(), one()], &KEEP).await;
            assert!(matches!(result, Err(StreamError::Denied { .. })), "{rules}: {result:?}");
        }
        backend.append(&stream("orders"), &[one()], &KEEP).await?;
        assert_eq!(backend.range(&stream("orders"), Range::first(9)).await?.len(), 1, "{rules}");
    }
    Ok(())
}

/// Resident memory of this process.
fn resident_bytes() -> Result<usize> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: usize = line.and_then(|it| it.split_whitespace().next()).context("VmRSS")?.parse()?;
    Ok(kib * 1024)
}

#[tokio::test]
async fn a_small_reply_behind_a_large_one_keeps_only_its_own_memory() -> Result<()> {
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    let (large, small) = (stream("large"), stream("small"));
    let large_entries = vec![Fields::new([("payload", "x".repeat(MIB))]); 5];
    backend.append(&large, &large_entries, &Retention::KEEP_ALL).await?;
    backend.append(&small, &[one()], &Retention::KEEP_ALL).await?;

    // On one connection, a small reply directly behind a large one. The small entries are kept, like those a consumer works on.
    // Five large entries leave free space in a buffer that has grown by doubling.
    let mut kept = Vec::new();
    let mut before = 0;
    for round in 0..60 {
        let large_entries = backend.range(&large, Range::first(10));
        let small_entries = async {
            let mut all = Vec::new();
            // At least one of them is requested while the large reply is in transit.
            for _ in 0..20 {
                all.push(backend.range(&small, Range::first(1)).await?);
                tokio::task::yield_now().await;
            }
            anyhow::Ok(all)
        };
        let (large_entries, small_entries) = tokio::join!(large_entries, small_entries);
        ensure!(large_entries?.len() == 5, "all of it");
        kept.push(small_entries?);
        if round == 9 {
            before = resident_bytes()?;
        }
    }
    let grown = resident_bytes()?.saturating_sub(before);
    assert!(grown < 100 * MIB, "{} MiB for {} small entries", grown / MIB, kept.len());
    Ok(())
}
