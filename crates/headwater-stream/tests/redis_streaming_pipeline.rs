//! Calls that go to the server in parts, and replies that come back in large ones: order, and memory.
#![cfg(feature = "redis")]

mod redis_steps;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use headwater_stream::{Fields, Options, Range, Retention, connect};
use headwater_testkit::Redis;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::redis_steps::*;

const MIB: usize = 1024 * 1024;

/// A piece of the protocol, as it came: a command, or a reply of one line or with a length.
async fn piece(from: &mut BufReader<TcpStream>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut pieces = 1;
    while pieces > 0 {
        pieces -= 1;
        let begin = bytes.len();
        while !bytes[begin..].ends_with(b"\r\n") {
            bytes.push(from.read_u8().await?);
        }
        let line = String::from_utf8_lossy(&bytes[begin..bytes.len() - 2]).into_owned();
        let length = || line[1..].parse::<i64>().map(|length| usize::try_from(length).unwrap_or(0));
        match line.as_bytes()[0] {
            b'*' | b'~' | b'>' => pieces += length()?,
            b'%' => pieces += 2 * length()?,
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

/// Stands before a server that is loading when the first entries reach it, and has loaded by the time it says so.
#[derive(Clone, Default)]
struct Gate {
    /// Entries that were refused.
    refused: Arc<AtomicUsize>,
}

impl Gate {
    async fn start(redis: &Redis) -> Result<(Self, String)> {
        let gate = Self::default();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = redis.url_at(listener.local_addr()?);
        let (server, guard) = (redis.addr(), gate.clone());
        // Ends with the runtime of the test.
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (gate, server) = (guard.clone(), TcpStream::connect(server).await);
                tokio::spawn(async move { gate.pass(client, server?).await });
            }
            anyhow::Ok(())
        });
        Ok((gate, url))
    }

    /// Passes commands on one by one, except the first entries.
    async fn pass(self, client: TcpStream, server: TcpStream) -> Result<()> {
        let (mut client, mut server) = (BufReader::new(client), BufReader::new(server));
        loop {
            let mut commands = vec![piece(&mut client).await?];
            let is_first = self.refused.load(Ordering::SeqCst) == 0;
            if is_first && commands[0].windows(4).any(|word| word == b"XADD") {
                // All that can come before the first answer: whoever sends them has only so much room. In a runtime of one
                // thread nobody has anything left to do when the time is over.
                let quiet = Duration::from_secs(10);
                while let Ok(more) = tokio::time::timeout(quiet, piece(&mut client)).await {
                    commands.push(more?);
                }
                self.refused.store(commands.len(), Ordering::SeqCst);
                let loading = b"-LOADING the server is loading its data\r\n".repeat(commands.len());
                client.write_all(&loading).await?;
                continue;
            }
            for command in commands {
                server.write_all(&command).await?;
                client.write_all(&piece(&mut server).await?).await?;
            }
        }
    }
}

#[tokio::test]
async fn the_rest_of_an_append_stays_behind_what_the_server_refused_of_it() -> Result<()> {
    let redis = Redis::start()?;
    let (gate, url) = Gate::start(&redis).await?;
    let options = Options { call_deadline: Duration::from_secs(120), ..Options::default() };
    let backend = connect(&url, &options).await?;
    // More than has room on a connection at once: the last parts of the last append wait for answers.
    let (count, size) = (280, 100 * 1024);
    let entries: Vec<Fields> = (0..count)
        .map(|number| Fields::new([("number", number.to_string()), ("much", "x".repeat(size))]))
        .collect();
    let names = ["a", "b", "c"].map(stream);
    assert!(names.len() * count * size > 64 * MIB, "it would all have room");
    let appends = names.iter().map(|name| backend.append(name, &entries, &Retention::KEEP_ALL));
    let appended = futures_util::future::join_all(appends).await;

    let refused = gate.refused.load(Ordering::SeqCst);
    assert!(refused > count && refused < 3 * count, "{refused} were refused, not all had left");
    for (name, appended) in names.iter().zip(appended) {
        assert_eq!(appended?.len(), count, "{name}");
        let found = backend.range(name, Range::first(3 * count)).await?;
        let numbers: Vec<_> = found.iter().filter_map(|entry| entry.fields.get("number")).collect();
        let expected: Vec<_> = (0..count).map(|number| number.to_string()).collect();
        assert_eq!(numbers, expected.iter().map(String::as_bytes).collect::<Vec<_>>(), "{name}");
    }
    Ok(())
}

/// What this process has in memory.
fn resident_bytes() -> Result<usize> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: usize = line.and_then(|it| it.split_whitespace().next()).context("VmRSS")?.parse()?;
    Ok(kib * 1024)
}

#[tokio::test]
async fn a_little_that_came_behind_much_keeps_only_its_own_memory() -> Result<()> {
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    let (large, small) = (stream("large"), stream("small"));
    let much = vec![Fields::new([("much", "x".repeat(MIB))]); 5];
    backend.append(&large, &much, &Retention::KEEP_ALL).await?;
    backend.append(&small, &[one()], &Retention::KEEP_ALL).await?;

    // On one connection, one right behind the other; what is little is kept, as a consumer keeps what it works on. Five parts
    // leave room behind them in memory that has grown by doubling.
    let mut kept = Vec::new();
    let mut before = 0;
    for round in 0..60 {
        let much = backend.range(&large, Range::first(10));
        let little = async {
            let mut all = Vec::new();
            // One of them at least is asked for while the answer to the large question is under way.
            for _ in 0..20 {
                all.push(backend.range(&small, Range::first(1)).await?);
                tokio::task::yield_now().await;
            }
            anyhow::Ok(all)
        };
        let (much, little) = tokio::join!(much, little);
        ensure!(much?.len() == 5, "all of it");
        kept.push(little?);
        if round == 9 {
            before = resident_bytes()?;
        }
    }
    let grown = resident_bytes()?.saturating_sub(before);
    assert!(grown < 100 * MIB, "{} MiB for {} small entries", grown / MIB, kept.len());
    Ok(())
}
