//! A pub/sub connection, with periodic pings to detect a dead server.
//!
//! Upstream: `lease_watch` and `delay_wakeups`. Guarantees: it ends when the server is gone, even if the connection is not
//! closed.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;

use super::command::Commands;
use super::connection::{ConnectError, Connection, LivenessCheck};
use super::error::ReplyError;
use super::node::Node;
use super::reply::{RespReplies, RespValue};
use crate::error::{Result, StreamError};

/// A ping is sent after this long without a message.
const PING_EVERY: Duration = Duration::from_secs(5);

pub(super) struct PubSubConnection {
    connection: Connection,
    liveness: LivenessCheck,
}

/// When a subscription is checked whose server has so long to reply.
pub(super) fn liveness(ping_timeout: Duration) -> LivenessCheck {
    LivenessCheck { silence_max: PING_EVERY, ping_timeout }
}

impl PubSubConnection {
    pub(super) async fn open(
        node: &Arc<Node>,
        liveness: LivenessCheck,
        deadline: Instant,
    ) -> Result<Self> {
        let connection = node.open_dedicated(deadline).await.map_err(unavailable)?;
        Ok(Self::new(connection, liveness))
    }

    pub(super) fn new(connection: Connection, liveness: LivenessCheck) -> Self {
        Self { connection, liveness }
    }

    /// Subscribes to a channel. The inner error is the server's reason for denying it.
    pub(super) async fn subscribe(
        &mut self,
        channel: &str,
        deadline: Instant,
    ) -> Result<Result<(), String>> {
        let subscribe = Commands::one(&["SUBSCRIBE", channel]).encode();
        let replies = timeout_at(deadline, self.connection.request(&subscribe))
            .await
            .map_err(|_| subscribe_timed_out())?
            .map_err(|error| StreamError::unavailable("SUBSCRIBE failed", error))?;
        match replies.cursor().value() {
            Ok(RespValue::Array(_)) => Ok(Ok(())),
            Ok(RespValue::Error(text)) => Ok(Err(String::from_utf8_lossy(text).into_owned())),
            _ => Err(StreamError::Protocol { problem: "unexpected reply to SUBSCRIBE".to_owned() }),
        }
    }

    /// Calls `on_message` with channel and text of each message, until the connection breaks or should be replaced.
    pub(super) async fn run(mut self, mut on_message: impl FnMut(&[u8], &str)) {
        let mut pinged = false;
        self.connection.start(&[], 1);
        // Credentials cannot be renewed on a connection with subscriptions.
        while !self.connection.should_replace() {
            let LivenessCheck { silence_max, ping_timeout } = self.liveness;
            let limit = if pinged { ping_timeout } else { silence_max };
            match timeout(limit, self.connection.finish()).await {
                Ok(Ok(replies)) => {
                    pinged = false;
                    // Anything but a message is the reply to a ping.
                    if let Ok(Some((channel, text))) = read(&replies) {
                        on_message(channel, text);
                    }
                    self.connection.start(&[], 1);
                }
                Ok(Err(error)) => {
                    debug!(%error, "pub/sub connection lost");
                    return;
                }
                Err(_) if pinged => return,
                Err(_) => {
                    self.connection.push(&Commands::one(&["PING"]).encode().bytes);
                    pinged = true;
                }
            }
        }
    }
}

fn read(replies: &RespReplies) -> Result<Option<(&[u8], &str)>, ReplyError> {
    let mut cursor = replies.cursor();
    if cursor.array()? != 3 || cursor.text()? != b"message" {
        return Ok(None);
    }
    let (channel, text) = (cursor.text()?, cursor.text()?);
    Ok(std::str::from_utf8(text).ok().map(|text| (channel, text)))
}

fn subscribe_timed_out() -> StreamError {
    StreamError::Unavailable {
        problem: "no reply to SUBSCRIBE within the deadline".to_owned(),
        source: None,
    }
}

pub(super) fn unavailable(error: ConnectError) -> StreamError {
    match error {
        ConnectError::Fatal(error) => error,
        error => StreamError::unavailable("no connection within the deadline", error),
    }
}
