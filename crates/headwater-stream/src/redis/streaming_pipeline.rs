//! A pipeline whose first commands are sent while later ones are still being encoded.
//!
//! Upstream: appends of many entries. Downstream: `multiplexed`, and `retry` after an error.
//! The server processes the first part while the caller encodes the rest.
//! Guarantees: the commands reach the server in order, on one connection; a call in parts succeeds, fails and is retried like
//! a call that is sent whole.

use bytes::Bytes;
use tokio::time::Instant;

use super::client::{Idempotency, RedisClient};
use super::command::Commands;
use super::error::RetryAction;
use super::multiplexed::{
    FlushPolicy, MultiplexedConnection, RequestError, RequestResult, ResponseFuture,
};
use super::reply::RespReplies;
use super::retry::RetryingCall;
use crate::error::Result;

/// The first part is small so that the server starts early.
const FIRST_FLUSH_BYTES: usize = 12 * 1024;
/// Smaller parts cost more system calls, larger ones leave the server idle (measured).
const FLUSH_BYTES: usize = 64 * 1024;

pub(super) struct StreamingPipeline<'a> {
    client: &'a RedisClient,
    slot: u16,
    deadline: Instant,
    pub(super) commands: Commands,
    /// The connection of all parts; `None` if the call is sent whole at the end.
    connection: Option<MultiplexedConnection>,
    responses: Vec<ResponseFuture>,
    /// Bytes and number of the commands that were sent.
    sent_bytes: usize,
    sent_commands: usize,
}

impl<'a> StreamingPipeline<'a> {
    /// Starts a call with capacity for this many bytes.
    pub(super) fn new(client: &'a RedisClient, slot: u16, bytes: usize) -> Result<Self> {
        client.check_open()?;
        Ok(Self {
            client,
            slot,
            deadline: client.deadline(),
            commands: Commands::with_capacity(bytes),
            connection: client.connection(slot),
            responses: Vec::new(),
            sent_bytes: 0,
            sent_commands: 0,
        })
    }

    /// Sends the buffered commands if they are large enough. Must be called between two commands.
    pub(super) fn flush_if_large(&mut self) {
        let enough = if self.responses.is_empty() { FIRST_FLUSH_BYTES } else { FLUSH_BYTES };
        if self.commands.position() - self.sent_bytes >= enough {
            self.flush(FlushPolicy::Now);
        }
    }

    fn flush(&mut self, policy: FlushPolicy) {
        let Some(connection) = &self.connection else { return };
        let bytes = self.commands.bytes_from(self.sent_bytes);
        let replies = self.commands.len() - self.sent_commands;
        // Without capacity or a connection, the rest is sent by `finish`.
        match connection.try_send(bytes, replies, self.deadline, policy) {
            Some(response) => {
                self.responses.push(response);
                self.sent_bytes = self.commands.position();
                self.sent_commands = self.commands.len();
            }
            None if self.responses.is_empty() => self.connection = None,
            None => {}
        }
    }

    /// Sends the rest and returns the replies to all commands, including errors.
    pub(super) async fn finish(mut self, idempotency: Idempotency) -> Result<RespReplies> {
        if self.sent_commands < self.commands.len() {
            let policy =
                if self.responses.is_empty() { FlushPolicy::Auto } else { FlushPolicy::Now };
            self.flush(policy);
        }
        let Self { client, slot, deadline, commands, connection, responses, .. } = self;
        let unsent = commands.len() - self.sent_commands;
        let result = match connection {
            None => None,
            Some(_) if unsent == 0 => Some(collect(responses).await),
            Some(connection) => {
                let rest = (commands.bytes_from(self.sent_bytes), unsent);
                let sent = self.sent_commands;
                Some(collect_and_send(&connection, responses, sent, rest, deadline).await)
            }
        };
        match result {
            Some(Ok(replies)) if !replies.may_contain_errors() => Ok(replies),
            result => {
                let call =
                    RetryingCall::new(client, slot, commands.encode(), idempotency, deadline);
                Box::pin(call.run(result)).await
            }
        }
    }
}

/// Waits for the replies to all parts.
async fn collect(mut responses: Vec<ResponseFuture>) -> RequestResult {
    let Some(last) = responses.pop() else { return Ok(RespReplies::joined(&[])) };
    // The last one first: when it is complete, so are all before it, and this task wakes once.
    let last = last.await;
    if responses.is_empty() {
        return last;
    }
    let mut parts = Vec::with_capacity(responses.len() + 1);
    for response in responses {
        parts.push(response.await);
    }
    parts.push(last);
    join_results(parts)
}

/// Waits for the replies to the parts that were sent, then sends the rest, for which there was no capacity. After a
/// retriable error the rest is not sent: accepted now, it would come before the commands that are re-sent.
async fn collect_and_send(
    connection: &MultiplexedConnection,
    responses: Vec<ResponseFuture>,
    sent: usize,
    (rest, unsent): (&[u8], usize),
    deadline: Instant,
) -> RequestResult {
    let replies = collect(responses).await?;
    match blocking_error(&replies, sent) {
        Some(error) => {
            let errors = RespReplies::new(error.repeat(unsent).into(), true);
            Ok(RespReplies::joined(&[replies, errors]))
        }
        None => join_results(vec![Ok(replies), connection.send(rest, unsent, deadline).await]),
    }
}

/// The reply to the last command, if it is an error that applies to the following commands too: the server is not ready.
fn blocking_error(replies: &RespReplies, sent: usize) -> Option<Bytes> {
    if !replies.may_contain_errors() {
        return None;
    }
    // Malformed replies are reported by the code that parses all of them.
    let (reply, error) = replies.split(sent).ok()?.pop()?;
    let is_for_all = |action| !matches!(action, RetryAction::Fail | RetryAction::LoadScript);
    error.filter(|error| is_for_all(error.retry_action())).map(|_| reply)
}

/// The result of all parts together.
fn join_results(parts: Vec<RequestResult>) -> RequestResult {
    let mut replies = Vec::with_capacity(parts.len());
    for part in parts {
        match part {
            Ok(part) => replies.push(part),
            Err(error) if replies.is_empty() => return Err(error),
            // The earlier parts took effect.
            Err(RequestError::NotSent(error) | RequestError::ReplyLost(error)) => {
                return Err(RequestError::ReplyLost(error));
            }
        }
    }
    Ok(RespReplies::joined(&replies))
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use super::*;

    fn reply(text: &'static str) -> RequestResult {
        Ok(RespReplies::new(Bytes::from_static(text.as_bytes()), text.starts_with('-')))
    }

    #[test]
    fn the_rest_is_not_sent_after_a_retriable_error_of_the_last_command() {
        let blocked = |text| blocking_error(&reply(text).unwrap(), 2);
        let down = "-CLUSTERDOWN wait\r\n";
        assert_eq!(blocked("-OOM no\r\n-CLUSTERDOWN wait\r\n").as_deref(), Some(down.as_bytes()));
        // The last command was accepted, or its error concerns it alone: the rest may be sent.
        assert_eq!(blocked("-CLUSTERDOWN wait\r\n-WRONGTYPE no\r\n"), None);
        assert_eq!(blocked("-CLUSTERDOWN wait\r\n:1\r\n"), None);
        assert_eq!(blocked("-ERR no\r\n-NOSCRIPT none\r\n"), None);
        assert_eq!(blocked(":1\r\n:2\r\n"), None);
    }

    fn not_sent() -> RequestResult {
        Err(RequestError::NotSent(Arc::new(io::ErrorKind::NotConnected.into())))
    }

    #[test]
    fn replies_to_parts_are_joined_and_keep_the_error_flag() {
        let replies = join_results(vec![reply("$1\r\na\r\n"), reply("-ERR no\r\n")]).unwrap();
        assert!(replies.may_contain_errors());
        assert_eq!(replies.split(2).unwrap().len(), 2);
    }

    #[test]
    fn a_call_with_a_completed_part_may_have_been_executed() {
        let unsent = join_results(vec![not_sent(), not_sent()]);
        assert!(matches!(unsent, Err(RequestError::NotSent(_))));
        let partial = join_results(vec![reply(":1\r\n"), not_sent()]);
        assert!(matches!(partial, Err(RequestError::ReplyLost(_))));
    }
}
