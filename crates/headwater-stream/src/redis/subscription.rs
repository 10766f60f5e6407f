//! A connection that listens to channels, and asks the server now and then whether it is still there.
//!
//! Upstream: `watch` (leases) and `bells` (delays). Promises: it ends when the server is gone, also without a word.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;

use super::command::Commands;
use super::connection::{ConnectError, Connection};
use super::error::Failure;
use super::node::Node;
use super::reply::{Replies, Value};
use crate::error::{Result, StreamError};

/// A server that is silent for this long is asked whether it is there.
const PING_EVERY: Duration = Duration::from_secs(5);

pub(super) struct Subscription {
    connection: Connection,
    /// How long a server may take to say that it is there.
    patience: Duration,
}

impl Subscription {
    pub(super) async fn open(
        node: &Arc<Node>,
        patience: Duration,
        deadline: Instant,
    ) -> Result<Self> {
        let connection = node.dedicated(deadline).await.map_err(unavailable)?;
        Ok(Self { connection, patience })
    }

    /// Listens to a channel, too; the inner error says why the server does not allow it.
    pub(super) async fn add(
        &mut self,
        channel: &str,
        deadline: Instant,
    ) -> Result<Result<(), String>> {
        let subscribe = Commands::one(&["SUBSCRIBE", channel]).pack();
        let replies = timeout_at(deadline, self.connection.ask(&subscribe))
            .await
            .map_err(|_| silent())?
            .map_err(|error| StreamError::unavailable("no subscription in time", error))?;
        match replies.cursor().value() {
            Ok(Value::Array(_)) => Ok(Ok(())),
            Ok(Value::Error(text)) => Ok(Err(String::from_utf8_lossy(text).into_owned())),
            _ => Err(StreamError::Protocol { problem: "no answer to SUBSCRIBE".to_owned() }),
        }
    }

    /// Passes on channel and text of each message, until the connection breaks.
    pub(super) async fn hear(mut self, mut tell: impl FnMut(&[u8], &str)) {
        let mut pinged = false;
        self.connection.start(&[], 1);
        loop {
            let patience = if pinged { self.patience } else { PING_EVERY };
            match timeout(patience, self.connection.finish()).await {
                Ok(Ok(replies)) => {
                    pinged = false;
                    // What is no message is the answer to our question.
                    if let Ok(Some((channel, text))) = read(&replies) {
                        tell(channel, text);
                    }
                    self.connection.start(&[], 1);
                }
                Ok(Err(error)) => {
                    debug!(%error, "a connection that listens broke");
                    return;
                }
                Err(_) if pinged => return,
                Err(_) => {
                    self.connection.push(&Commands::one(&["PING"]).pack().bytes);
                    pinged = true;
                }
            }
        }
    }
}

fn read(replies: &Replies) -> Result<Option<(&[u8], &str)>, Failure> {
    let mut cursor = replies.cursor();
    if cursor.array()? != 3 || cursor.text()? != b"message" {
        return Ok(None);
    }
    let (channel, text) = (cursor.text()?, cursor.text()?);
    Ok(std::str::from_utf8(text).ok().map(|text| (channel, text)))
}

fn silent() -> StreamError {
    StreamError::Unavailable { problem: "no subscription in time".to_owned(), source: None }
}

pub(super) fn unavailable(error: ConnectError) -> StreamError {
    match error {
        ConnectError::Refused(error) => error,
        error => StreamError::unavailable("no connection in time", error),
    }
}
