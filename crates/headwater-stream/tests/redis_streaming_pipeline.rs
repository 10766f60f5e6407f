//! Calls that are sent in parts keep their order; large replies do not keep memory alive.
#![cfg(feature = "redis")]

mod redis_support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use headwater_stream::{Fields, Options, Range, Retention, connect};
use headwater_testkit::Redis;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::redis_support::*;

const MIB: usize = 1024 * 1024;

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

/// A proxy that rejects the first entries with LOADING and forwards everything afterwards.
#[derive(Clone, Default)]
struct LoadingProxy {
    /// Number of rejected entries.
    rejected: Arc<AtomicUsize>,
}

impl LoadingProxy {
    async fn start(redis: &Redis) -> Result<(Self, String)> {
        let proxy = Self::default();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = redis.url_at(listener.local_addr()?);
        let (server, guard) = (redis.addr(), proxy.clone());
        // Ends with the runtime of the test.
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (proxy, server) = (guard.clone(), TcpStream::connect(server).await);
                tokio::spawn(async move { proxy.forward(client, server?).await });
            }
            anyhow::Ok(())
        });
        Ok((proxy, url))
    }

    /// Forwards commands one by one, except the first entries.
    async fn forward(self, client: TcpStream, server: TcpStream) -> Result<()> {
        let (mut client, mut server) = (BufReader::new(client), BufReader::new(server));
        loop {
            let mut commands = vec![message(&mut client).await?];
            let is_first = self.rejected.load(Ordering::SeqCst) == 0;
            if is_first && commands[0].windows(4).any(|word| word == b"XADD") {
                // Collect all commands that the client sends before the first reply: its capacity is limited. On a runtime
                // with one thread, the client has nothing left to send when the timeout passes.
                let quiet = Duration::from_secs(10);
                while let Ok(more) = tokio::time::timeout(quiet, message(&mut client)).await {
                    commands.push(more?);
                }
                self.rejected.store(commands.len(), Ordering::SeqCst);
                let loading = b"-LOADING the server is loading its data\r\n".repeat(commands.len());
                client.write_all(&loading).await?;
                continue;
            }
            for command in commands {
                server.write_all(&command).await?;
                client.write_all(&message(&mut server).await?).await?;
            }
        }
    }
}

#[tokio::test]
async fn the_rest_of_an_append_is_sent_after_the_rejected_part() -> Result<()> {
    let redis = Redis::start()?;
    let (proxy, url) = LoadingProxy::start(&redis).await?;
    let options = Options { call_deadline: Duration::from_secs(120), ..Options::default() };
    let backend = connect(&url, &options).await?;
    // More than the capacity of a connection: the last parts of the last append wait for replies.
    let (count, size) = (280, 100 * 1024);
    let entries: Vec<Fields> = (0..count)
        .map(|number| Fields::new([("number", number.to_string()), ("much", "x".repeat(size))]))
        .collect();
    let names = ["a", "b", "c"].map(stream);
    assert!(names.len() * count * size > 64 * MIB, "it exceeds the capacity");
    let appends = names.iter().map(|name| backend.append(name, &entries, &Retention::KEEP_ALL));
    let appended = futures_util::future::join_all(appends).await;

    let rejected = proxy.rejected.load(Ordering::SeqCst);
    assert!(
        rejected > count && rejected < 3 * count,
        "{rejected} were rejected, not all were sent"
    );
    for (name, appended) in names.iter().zip(appended) {
        assert_eq!(appended?.len(), count, "{name}");
        let found = backend.range(name, Range::first(3 * count)).await?;
        let numbers: Vec<_> = found.iter().filter_map(|entry| entry.fields.get("number")).collect();
        let expected: Vec<_> = (0..count).map(|number| number.to_string()).collect();
        assert_eq!(numbers, expected.iter().map(String::as_bytes).collect::<Vec<_>>(), "{name}");
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
