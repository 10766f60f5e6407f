//! The raw loop to compare with: RESP over one blocking socket, with as little work as possible.
//!
//! Entries have the same fields as ours, and commands are put together before the clock runs.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Context, Result, bail};

use crate::{GROUP, PAYLOAD_BYTES, READ_BATCH};

pub(crate) struct Raw {
    write: TcpStream,
    read: BufReader<TcpStream>,
    line: Vec<u8>,
}

/// What an XREADGROUP gave: keys, and the ids read from each.
pub(crate) type Batches = Vec<(String, Vec<String>)>;

impl Raw {
    pub(crate) fn connect(address: SocketAddr) -> Result<Self> {
        let write = TcpStream::connect(address)?;
        write.set_nodelay(true)?;
        let read = BufReader::with_capacity(1 << 18, write.try_clone()?);
        Ok(Self { write, read, line: Vec::new() })
    }

    /// Appends entries to the partitions in turn, in pipelines of `pipeline`, one in flight.
    pub(crate) fn append(&mut self, pipelines: &Pipelines, entries: usize) -> Result<()> {
        for pipeline in pipelines.0.iter().cycle().take(entries / pipelines.1) {
            self.write.write_all(pipeline)?;
            for _ in 0..pipelines.1 {
                self.skip()?;
            }
        }
        Ok(())
    }

    pub(crate) fn create_groups(&mut self, keys: &[String]) -> Result<()> {
        keys.iter()
            .try_for_each(|key| self.call(&["XGROUP", "CREATE", key, GROUP, "0", "MKSTREAM"]))
    }

    fn call(&mut self, words: &[&str]) -> Result<()> {
        self.send(&command(words))
    }

    /// Sends one command and waits for its reply.
    pub(crate) fn send(&mut self, command: &[u8]) -> Result<()> {
        self.write.write_all(command)?;
        self.skip()
    }

    /// Reads everything in batches of [`READ_BATCH`] per stream, and acknowledges each batch.
    pub(crate) fn consume(&mut self, keys: &[String], entries: usize) -> Result<()> {
        let read = read_command(keys, READ_BATCH, None);
        let mut seen = 0;
        while seen < entries {
            let batches = self.read_group(&read)?;
            if batches.is_empty() {
                bail!("{seen} of {entries} entries were there");
            }
            let mut acks = Vec::new();
            for (key, ids) in &batches {
                let mut words = vec!["XACK", key.as_str(), GROUP];
                words.extend(ids.iter().map(String::as_str));
                acks.extend(command(&words));
                seen += ids.len();
            }
            self.write.write_all(&acks)?;
            batches.iter().try_for_each(|_| self.skip())?;
        }
        Ok(())
    }

    /// Sends a command made by [`read_command`] and takes its reply apart.
    pub(crate) fn read_group(&mut self, read: &[u8]) -> Result<Batches> {
        self.write.write_all(read)?;
        // *n [ *2 [ key, *m [ *2 [ id, fields ] ] ] ]
        let (_, streams) = self.header()?;
        let mut batches = Vec::new();
        for _ in 0..streams.max(0) {
            self.header()?;
            let key = self.text()?;
            let (_, entries) = self.header()?;
            let mut ids = Vec::with_capacity(usize::try_from(entries)?);
            for _ in 0..entries {
                self.header()?;
                ids.push(self.text()?);
                self.skip()?;
            }
            batches.push((key, ids));
        }
        Ok(batches)
    }

    fn text(&mut self) -> Result<String> {
        let (kind, length) = self.header()?;
        if kind != b'$' {
            bail!("a text was expected");
        }
        let mut bytes = vec![0; usize::try_from(length)? + 2];
        self.read.read_exact(&mut bytes)?;
        bytes.truncate(bytes.len() - 2);
        Ok(String::from_utf8(bytes)?)
    }

    fn header(&mut self) -> Result<(u8, i64)> {
        self.line.clear();
        self.read.read_until(b'\n', &mut self.line)?;
        let (kind, rest) = self.line.split_first().context("the server closed the connection")?;
        if *kind == b'-' {
            bail!("{}", String::from_utf8_lossy(rest));
        }
        let number = std::str::from_utf8(rest)?.trim_end().parse().unwrap_or_default();
        Ok((*kind, number))
    }

    fn skip(&mut self) -> Result<()> {
        let (kind, number) = self.header()?;
        match kind {
            b'$' if number >= 0 => {
                let mut left = usize::try_from(number)? + 2;
                while left > 0 {
                    let step = self.read.fill_buf()?.len().min(left);
                    if step == 0 {
                        bail!("the server closed the connection");
                    }
                    self.read.consume(step);
                    left -= step;
                }
            }
            b'*' => (0..number).try_for_each(|_| self.skip())?,
            _ => {}
        }
        Ok(())
    }
}

/// Pipelines of XADD that go around the partitions, and how many commands each has.
pub(crate) struct Pipelines(Vec<Vec<u8>>, usize);

impl Pipelines {
    pub(crate) fn new(topic: &str, keys: &[String], pipeline: usize) -> Self {
        let one: Vec<Vec<u8>> = keys
            .iter()
            .enumerate()
            .map(|(partition, key)| append_command(topic, partition, key))
            .collect();
        // After this many, the first partition comes first again.
        let rounds = keys.len().div_ceil(pipeline).max(1) * pipeline;
        let all: Vec<&Vec<u8>> = one.iter().cycle().take(rounds).collect();
        let joined =
            |part: &[&Vec<u8>]| part.iter().flat_map(|bytes| bytes.iter().copied()).collect();
        Self(all.chunks(pipeline).map(joined).collect(), pipeline)
    }
}

pub(crate) fn append_command(topic: &str, partition: usize, key: &str) -> Vec<u8> {
    let (payload, partition) = ("x".repeat(PAYLOAD_BYTES), partition.to_string());
    command(&[
        "XADD",
        key,
        "*",
        "payload",
        &payload,
        "timestamp",
        "2026-01-01T00:00:00.000Z",
        "retryCount",
        "0",
        "maxRetries",
        "4",
        "topic",
        topic,
        "partitionId",
        &partition,
        "headers",
        "{}",
    ])
}

pub(crate) fn read_command(keys: &[String], count: usize, block_ms: Option<u64>) -> Vec<u8> {
    let (count, block) = (count.to_string(), block_ms.unwrap_or_default().to_string());
    let mut words = vec!["XREADGROUP", "GROUP", GROUP, "raw", "COUNT", &count];
    if block_ms.is_some() {
        words.extend(["BLOCK", &block]);
    }
    words.push("STREAMS");
    words.extend(keys.iter().map(String::as_str));
    words.extend(keys.iter().map(|_| ">"));
    command(&words)
}

fn command(words: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
    bytes
}
