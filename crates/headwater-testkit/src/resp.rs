//! A minimal blocking Redis client for tests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// Timeout of a connection attempt or a reply; a paused server never answers.
const REPLY_LIMIT: Duration = Duration::from_secs(5);

/// The reply of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RedisReply {
    /// No value.
    Nil,
    /// A number.
    Int(i64),
    /// A simple or bulk string.
    Text(Vec<u8>),
    /// An error, such as `WRONGTYPE Operation against ...`.
    Error(String),
    /// A list of replies.
    Array(Vec<RedisReply>),
}

impl RedisReply {
    /// The text of a string or an error, the digits of a number; empty for the others.
    pub fn text(&self) -> String {
        match self {
            RedisReply::Text(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            RedisReply::Error(error) => error.clone(),
            RedisReply::Int(number) => number.to_string(),
            RedisReply::Nil | RedisReply::Array(_) => String::new(),
        }
    }

    /// The number of a numeric reply.
    pub fn int(&self) -> Option<i64> {
        match self {
            RedisReply::Int(number) => Some(*number),
            _ => None,
        }
    }

    /// The items of a list; empty for the others.
    pub fn items(&self) -> &[RedisReply] {
        match self {
            RedisReply::Array(items) => items,
            _ => &[],
        }
    }

    /// Turns an error reply into an `Err`.
    pub fn ok(self) -> Result<RedisReply> {
        match self {
            RedisReply::Error(error) => bail!("the server replied: {error}"),
            reply => Ok(reply),
        }
    }
}

trait ByteStream: Read + Write + Send {}
impl<T: Read + Write + Send> ByteStream for T {}

/// One connection to a Redis server.
pub struct RedisConnection {
    wire: BufReader<Box<dyn ByteStream>>,
}

impl RedisConnection {
    /// Connects over TCP, for example through a [`Proxy`](crate::Proxy).
    pub fn open(address: SocketAddr) -> Result<RedisConnection> {
        let stream = TcpStream::connect_timeout(&address, REPLY_LIMIT)
            .with_context(|| format!("cannot connect to {address}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(REPLY_LIMIT))?;
        stream.set_write_timeout(Some(REPLY_LIMIT))?;
        Ok(RedisConnection { wire: BufReader::new(Box::new(stream)) })
    }

    pub(crate) fn open_unix(path: &Path) -> Result<RedisConnection> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(REPLY_LIMIT))?;
        stream.set_write_timeout(Some(REPLY_LIMIT))?;
        Ok(RedisConnection { wire: BufReader::new(Box::new(stream)) })
    }

    /// Sends one command and waits for its reply, at most five seconds.
    pub fn command(&mut self, words: &[&str]) -> Result<RedisReply> {
        self.send(words)?;
        self.receive().with_context(|| format!("no reply to {}", words.join(" ")))
    }

    /// Sends one command and does not wait.
    pub fn send(&mut self, words: &[&str]) -> Result<()> {
        let mut request = format!("*{}\r\n", words.len());
        for word in words {
            request.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        Ok(self.wire.get_mut().write_all(request.as_bytes())?)
    }

    /// Waits for the next reply, at most five seconds.
    pub fn receive(&mut self) -> Result<RedisReply> {
        let mut line = String::new();
        if self.wire.read_line(&mut line)? == 0 {
            bail!("the server closed the connection");
        }
        let Some((kind, value)) = line.trim_end().split_at_checked(1) else {
            bail!("the server sent an empty line");
        };
        Ok(match kind {
            "+" => RedisReply::Text(value.into()),
            "-" => RedisReply::Error(value.to_string()),
            ":" => RedisReply::Int(value.parse()?),
            "$" => match usize::try_from(value.parse::<i64>()?) {
                Ok(length) => RedisReply::Text(self.receive_bytes(length)?),
                Err(_) => RedisReply::Nil,
            },
            "*" => match usize::try_from(value.parse::<i64>()?) {
                Ok(count) => {
                    RedisReply::Array((0..count).map(|_| self.receive()).collect::<Result<_>>()?)
                }
                Err(_) => RedisReply::Nil,
            },
            _ => bail!("not a Redis reply: {line:?}"),
        })
    }

    fn receive_bytes(&mut self, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length + 2];
        self.wire.read_exact(&mut bytes)?;
        bytes.truncate(length);
        Ok(bytes)
    }
}

impl std::fmt::Debug for RedisConnection {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("RedisConnection").finish_non_exhaustive()
    }
}
