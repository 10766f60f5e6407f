//! The raw loop to compare with: RESP over one blocking socket, with as little work as possible.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Context, Result, bail};

use crate::{PAYLOAD_BYTES, READ_BATCH};

pub(crate) struct Raw {
    write: TcpStream,
    read: BufReader<TcpStream>,
    line: Vec<u8>,
}

impl Raw {
    pub(crate) fn connect(address: SocketAddr) -> Result<Self> {
        let write = TcpStream::connect(address)?;
        write.set_nodelay(true)?;
        let read = BufReader::with_capacity(1 << 18, write.try_clone()?);
        Ok(Self { write, read, line: Vec::new() })
    }

    /// Appends entries in pipelines of `pipeline`, one in flight.
    pub(crate) fn append(&mut self, key: &str, entries: usize, pipeline: usize) -> Result<()> {
        let payload = "x".repeat(PAYLOAD_BYTES);
        let one = command(&["XADD", key, "*", "payload", &payload]);
        let many = one.repeat(pipeline);
        for _ in 0..entries / pipeline {
            self.write.write_all(&many)?;
            for _ in 0..pipeline {
                self.skip()?;
            }
        }
        Ok(())
    }

    pub(crate) fn create_group(&mut self, key: &str) -> Result<()> {
        self.call(&["XGROUP", "CREATE", key, "workers", "0", "MKSTREAM"])
    }

    pub(crate) fn delete(&mut self, keys: &[&str]) -> Result<()> {
        self.call(&[&["UNLINK"], keys].concat())
    }

    pub(crate) fn call(&mut self, words: &[&str]) -> Result<()> {
        self.write.write_all(&command(words))?;
        self.skip()
    }

    /// Reads and acknowledges everything in batches of [`READ_BATCH`].
    pub(crate) fn consume(&mut self, key: &str, entries: usize) -> Result<()> {
        let mut seen = 0;
        while seen < entries {
            let ids = self.read_group(key, READ_BATCH, None)?;
            let mut words = vec!["XACK", key, "workers"];
            words.extend(ids.iter().map(String::as_str));
            self.call(&words)?;
            seen += ids.len();
        }
        Ok(())
    }

    /// One XREADGROUP of one stream; returns the ids.
    pub(crate) fn read_group(
        &mut self,
        key: &str,
        count: usize,
        block_ms: Option<u64>,
    ) -> Result<Vec<String>> {
        let (count, block) = (count.to_string(), block_ms.unwrap_or_default().to_string());
        let mut words = vec!["XREADGROUP", "GROUP", "workers", "raw", "COUNT", &count];
        if block_ms.is_some() {
            words.extend(["BLOCK", &block]);
        }
        words.extend(["STREAMS", key, ">"]);
        self.write.write_all(&command(&words))?;

        // *1 [ *2 [ key, *n [ *2 [ id, fields ] ] ] ]
        if self.header()?.1 < 1 {
            return Ok(Vec::new());
        }
        self.header()?;
        self.skip()?;
        let (_, entries) = self.header()?;
        (0..entries)
            .map(|_| {
                self.header()?;
                let (kind, length) = self.header()?;
                if kind != b'$' {
                    bail!("an id was expected");
                }
                let id = self.bulk(length)?;
                self.skip()?;
                Ok(id)
            })
            .collect()
    }

    fn bulk(&mut self, length: i64) -> Result<String> {
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

fn command(words: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
    bytes
}
