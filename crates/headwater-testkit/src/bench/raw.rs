//! The baseline: RESP over one blocking socket with minimal overhead.
//!
//! Commands are encoded before the measurement starts.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Context, Result, bail};

/// A sequential connection.
#[derive(Debug)]
pub struct Raw {
    write: TcpStream,
    read: BufReader<TcpStream>,
    line: Vec<u8>,
}

/// The result of an XREADGROUP: keys, and the ids read from each.
pub type RawBatches = Vec<(String, Vec<String>)>;

impl Raw {
    /// Connects.
    pub fn connect(address: SocketAddr) -> Result<Self> {
        let write = TcpStream::connect(address)?;
        write.set_nodelay(true)?;
        let read = BufReader::with_capacity(1 << 18, write.try_clone()?);
        Ok(Self { write, read, line: Vec::new() })
    }

    /// Sends so many commands, in pipelines, one pipeline in flight.
    pub fn append(&mut self, pipelines: &Pipelines, entries: usize) -> Result<()> {
        for pipeline in pipelines.all.iter().cycle().take(entries / pipelines.len) {
            self.write.write_all(pipeline)?;
            for _ in 0..pipelines.len {
                self.skip()?;
            }
        }
        Ok(())
    }

    /// Creates a group at the beginning of each stream.
    pub fn create_groups<K: AsRef<str>>(&mut self, keys: &[K], group: &str) -> Result<()> {
        keys.iter().try_for_each(|key| {
            self.call(&["XGROUP", "CREATE", key.as_ref(), group, "0", "MKSTREAM"])
        })
    }

    /// Deletes keys.
    pub fn delete(&mut self, keys: &[&str]) -> Result<()> {
        self.call(&[&["UNLINK"], keys].concat())
    }

    /// Sends one command and waits for its reply.
    pub fn call(&mut self, words: &[&str]) -> Result<()> {
        self.send(&command(words))
    }

    /// The same for a command that is put together.
    pub fn send(&mut self, command: &[u8]) -> Result<()> {
        self.write.write_all(command)?;
        self.skip()
    }

    /// Reads everything of these streams, `count` entries of each at a time, and acknowledges what each read gave.
    pub fn consume<K: AsRef<str>>(
        &mut self,
        keys: &[K],
        group: &str,
        count: usize,
        entries: usize,
    ) -> Result<()> {
        let read = read_command(keys, group, count, None);
        let mut seen = 0;
        while seen < entries {
            let batches = self.read_group(&read)?;
            if batches.is_empty() {
                bail!("{seen} of {entries} entries were there");
            }
            let mut acks = Vec::new();
            for (key, ids) in &batches {
                let mut words = vec!["XACK", key.as_str(), group];
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
    pub fn read_group(&mut self, read: &[u8]) -> Result<RawBatches> {
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

    /// How many entries of these streams are pending in a group.
    pub fn pending<K: AsRef<str>>(&mut self, keys: &[K], group: &str) -> Result<i64> {
        let ask = |key: &K| command(&["XPENDING", key.as_ref(), group]);
        let asked: Vec<u8> = keys.iter().flat_map(ask).collect();
        self.write.write_all(&asked)?;
        let mut pending = 0;
        for _ in keys {
            // *4 [ count, first, last, consumers ]
            self.header()?;
            pending += self.header()?.1;
            (0..3).try_for_each(|_| self.skip())?;
        }
        Ok(pending)
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

/// Pipelines of commands that go around some streams.
#[derive(Debug)]
pub struct Pipelines {
    all: Vec<Vec<u8>>,
    /// How many commands each has.
    len: usize,
}

impl Pipelines {
    /// Pipelines of `len` commands that take these in turn, one for each stream.
    pub fn new(commands: &[Vec<u8>], len: usize) -> Self {
        // After this many, the first stream comes first again.
        let rounds = commands.len().div_ceil(len).max(1) * len;
        let all: Vec<&Vec<u8>> = commands.iter().cycle().take(rounds).collect();
        let joined =
            |part: &[&Vec<u8>]| part.iter().flat_map(|bytes| bytes.iter().copied()).collect();
        Self { all: all.chunks(len).map(joined).collect(), len }
    }
}

/// A read of new entries for the consumer `raw` of a group; with `block_ms` it waits for them.
pub fn read_command<K: AsRef<str>>(
    keys: &[K],
    group: &str,
    count: usize,
    block_ms: Option<u64>,
) -> Vec<u8> {
    let (count, block) = (count.to_string(), block_ms.unwrap_or_default().to_string());
    let mut words = vec!["XREADGROUP", "GROUP", group, "raw", "COUNT", &count];
    if block_ms.is_some() {
        words.extend(["BLOCK", &block]);
    }
    words.push("STREAMS");
    words.extend(keys.iter().map(AsRef::as_ref));
    words.extend(keys.iter().map(|_| ">"));
    command(&words)
}

/// A command as it goes over the wire.
pub fn command(words: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
    bytes
}
