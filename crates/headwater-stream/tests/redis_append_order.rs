//! Appends keep their order when the server rejects commands in the middle; large replies do not keep memory alive.
#![cfg(feature = "redis")]

mod redis_support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use headwater_stream::{
    AppendRequest, Backend, Fields, Options, Range, Retention, StreamError, StreamName, connect,
};
use headwater_testkit::{Redis, RedisConnection, RedisReply};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::redis_support::*;

const MIB: usize = 1024 * 1024;
const COUNT: usize = 40;
const KEEP: Retention = Retention::KEEP_ALL;

/// Why the server rejects commands for a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rejection {
    /// A script runs.
    Busy,
    /// The server is a replica.
    ReadOnly,
    /// The memory is full.
    Full,
    /// There are too few replicas.
    NoReplicas,
}

impl Rejection {
    /// Makes the server reject writes. Returns the connection that runs the script.
    fn begin(self, redis: &Redis) -> Result<Option<RedisConnection>> {
        let command = |words: &[&str]| redis.command(words)?.ok();
        match self {
            Self::Busy => {
                command(&["CONFIG", "SET", "lua-time-limit", "1"])?;
                let mut script = redis.connect()?;
                script.send(&["EVAL", "while true do end", "0"])?;
                let start = Instant::now();
                while !redis.command(&["PING"])?.text().starts_with("BUSY") {
                    ensure!(start.elapsed() < Duration::from_secs(60), "the script does not run");
                }
                return Ok(Some(script));
            }
            Self::ReadOnly => command(&["REPLICAOF", "127.0.0.1", "1"])?,
            Self::Full => command(&["CONFIG", "SET", "maxmemory", "1"])?,
            Self::NoReplicas => command(&["CONFIG", "SET", "min-replicas-to-write", "1"])?,
        };
        Ok(None)
    }

    fn end(self, redis: &Redis, script: Option<RedisConnection>) -> Result<()> {
        let command = |words: &[&str]| redis.command(words)?.ok();
        match self {
            Self::Busy => {
                command(&["SCRIPT", "KILL"])?;
                let ended = script.context("a script runs")?.receive()?;
                ensure!(matches!(ended, RedisReply::Error(_)), "{ended:?}");
                RedisReply::Nil
            }
            Self::ReadOnly => command(&["REPLICAOF", "NO", "ONE"])?,
            Self::Full => command(&["CONFIG", "SET", "maxmemory", "0"])?,
            Self::NoReplicas => command(&["CONFIG", "SET", "min-replicas-to-write", "0"])?,
        };
        Ok(())
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
    redis: Arc<Redis>,
    rejection: Rejection,
    text: String,
    rejected: AtomicUsize,
}

impl RejectingProxy {
    async fn start(
        redis: &Arc<Redis>,
        rejection: Rejection,
        text: &str,
    ) -> Result<(Arc<Self>, String)> {
        let proxy = Arc::new(Self {
            redis: Arc::clone(redis),
            rejection,
            text: text.to_owned(),
            rejected: AtomicUsize::new(0),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = redis.url_at(listener.local_addr()?);
        let accepting = Arc::clone(&proxy);
        // Ends with the runtime of the test.
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (proxy, server) = (Arc::clone(&accepting), accepting.redis.addr());
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
        loop {
            let command = message(&mut client).await?;
            let is_it = command.windows(self.text.len()).any(|word| word == self.text.as_bytes());
            let rejects = is_it && self.rejected.fetch_add(1, Ordering::SeqCst) == 0;
            let script = if rejects { self.rejection.begin(&self.redis)? } else { None };
            server.write_all(&command).await?;
            let reply = message(&mut server).await?;
            if rejects {
                ensure!(reply.starts_with(b"-"), "the server accepted the command");
                self.rejection.end(&self.redis, script)?;
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
    let redis = Arc::new(Redis::start()?);
    let names = ["a", "b", "c"].map(stream);
    let (proxy, url) = RejectingProxy::start(&redis, rejection, "b:25.").await?;
    let backend = connect(&url, &Options::default()).await?;
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

#[tokio::test]
async fn entries_after_a_rejected_one_do_not_overtake_it() -> Result<()> {
    for rejection in [Rejection::Busy, Rejection::ReadOnly, Rejection::Full, Rejection::NoReplicas]
    {
        // In one request; and each stream in several chunks.
        for (size, together) in [(10, true), (10, false), (8 * 1024, true), (8 * 1024, false)] {
            let case = format!("{rejection:?}, {size} bytes, together: {together}");
            append_with_rejection(rejection, size, together).await.context(case)?;
        }
    }
    Ok(())
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
