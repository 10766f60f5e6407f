//! One call: commands of one slot, re-sent until each has a final reply.
//!
//! Upstream: `client`. Guarantees: a call ends by its deadline. A command that may have taken effect is re-sent only if it is
//! idempotent. A command that the server rejected without effect (moved, loading, unknown script, no longer primary) is
//! re-sent until the deadline, independently of the other commands.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use tokio::time::Instant;

use super::client::{Idempotency, RedisClient, RetryBackoff};
use super::command::{Commands, EncodedCommands};
use super::connection::ConnectError;
use super::error::{ReplyError, RetryAction};
use super::multiplexed::{RequestError, RequestResult};
use super::node::Node;
use super::reply::RespReplies;
use super::scripts::Script;
use crate::error::{BoxError, Result, StreamError};

/// How many redirections or unknown scripts are retried without a pause.
const IMMEDIATE_REDIRECTS_MAX: u32 = 3;

pub(super) struct RetryingCall<'a> {
    client: &'a RedisClient,
    slot: u16,
    encoded: EncodedCommands,
    idempotency: Idempotency,
    deadline: Instant,
    backoff: RetryBackoff,
    redirections: u32,
    /// The replies so far; the last error for commands that are retried. Empty until the first error.
    replies: Vec<Bytes>,
    attempt: CallAttempt,
}

/// What to send next.
#[derive(Default)]
struct CallAttempt {
    /// Indexes of the commands; all of them if `None`.
    commands: Option<Vec<usize>>,
    /// Scripts to load first.
    load: Vec<&'static Script>,
    /// The server of an `ASK` redirection.
    ask_address: Option<String>,
}

/// The rejected commands of an attempt, and how to retry them.
#[derive(Default)]
struct Retriable {
    next: CallAttempt,
    readonly: bool,
    wait: bool,
}

impl<'a> RetryingCall<'a> {
    pub(super) fn new(
        client: &'a RedisClient,
        slot: u16,
        encoded: EncodedCommands,
        idempotency: Idempotency,
        deadline: Instant,
    ) -> Self {
        Self {
            client,
            slot,
            encoded,
            idempotency,
            deadline,
            backoff: RetryBackoff::default(),
            redirections: 0,
            replies: Vec::new(),
            attempt: CallAttempt::default(),
        }
    }

    /// Runs the call. `first` is the result of a first attempt, if one was made.
    pub(super) async fn run(mut self, mut first: Option<RequestResult>) -> Result<RespReplies> {
        loop {
            let sent = match first.take() {
                Some(result) => Ok(result),
                None => self.send().await,
            };
            let cause: BoxError = match sent {
                Ok(Ok(replies)) => {
                    if self.attempt.commands.is_none() && !replies.may_contain_errors() {
                        return Ok(replies);
                    }
                    if let Some(replies) = self.handle_replies(&replies).await? {
                        return Ok(replies);
                    }
                    continue;
                }
                Ok(Err(RequestError::ReplyLost(error)))
                    if self.idempotency == Idempotency::AtMostOnce =>
                {
                    self.client.refresh_slots(None, self.deadline).await;
                    return Err(StreamError::unavailable(
                        "the reply was lost, the call may have been executed",
                        error,
                    ));
                }
                Ok(Err(error)) => error.into(),
                Err(ConnectError::Fatal(error)) => return Err(error),
                Err(error) => error.into(),
            };
            self.client.refresh_slots(None, self.deadline).await;
            if !self.backoff.pause(self.deadline).await {
                return Err(StreamError::unavailable("no reply within the deadline", cause));
            }
            self.client.check_open()?;
        }
    }

    async fn send(&self) -> Result<RequestResult, ConnectError> {
        let (bytes, replies) = self.encode_attempt();
        let redirect =
            self.attempt.ask_address.as_ref().and_then(|at| self.client.node_for_redirect(at));
        let node: Arc<Node> = match redirect {
            Some(node) => node,
            None => self.client.node_for_slot(self.slot, self.deadline).await?,
        };
        node.send(&bytes, replies, self.deadline).await
    }

    /// The bytes of this attempt and the number of replies they get.
    fn encode_attempt(&self) -> (Cow<'_, [u8]>, usize) {
        let Some(indexes) = &self.attempt.commands else {
            return (Cow::Borrowed(&self.encoded.bytes), self.encoded.len());
        };
        let (mut bytes, mut replies) = (Vec::new(), 0);
        let mut add = |command: &[u8]| {
            bytes.extend_from_slice(command);
            replies += 1;
        };
        for script in &self.attempt.load {
            add(&Commands::one(&["SCRIPT", "LOAD", script.text()]).encode().bytes);
        }
        let commands = self.encoded.commands();
        for command in indexes.iter().filter_map(|index| commands.get(*index)) {
            if self.attempt.ask_address.is_some() {
                add(&Commands::one(&["ASKING"]).encode().bytes);
            }
            add(command);
        }
        (bytes.into(), replies)
    }

    /// Stores final replies and prepares the next attempt for rejected commands. Returns all replies when none is left.
    async fn handle_replies(&mut self, replies: &RespReplies) -> Result<Option<RespReplies>> {
        let retriable =
            self.classify(replies).map_err(|error| error.into_stream_error("the server"))?;
        if retriable.next.commands.as_ref().is_some_and(Vec::is_empty) {
            return Ok(Some(self.take_replies()));
        }
        if retriable.readonly {
            self.client.on_readonly(self.deadline).await;
        }
        if retriable.wait {
            self.client.refresh_slots(None, self.deadline).await;
        }
        self.redirections += 1;
        let immediately =
            !retriable.wait && !retriable.readonly && self.redirections <= IMMEDIATE_REDIRECTS_MAX;
        if !immediately && !self.backoff.pause(self.deadline).await {
            return Ok(Some(self.take_replies()));
        }
        self.client.check_open()?;
        self.attempt = retriable.next;
        Ok(None)
    }

    fn classify(&mut self, replies: &RespReplies) -> Result<Retriable, ReplyError> {
        let all: Vec<usize> = (0..self.encoded.len()).collect();
        let indexes = self.attempt.commands.as_ref().unwrap_or(&all);
        let asking = self.attempt.ask_address.is_some();
        let per_command = if asking { 2 } else { 1 };
        let expected = self.attempt.load.len() + indexes.len() * per_command;
        let mut parts = replies.split(expected)?.into_iter();
        for (_, error) in parts.by_ref().take(self.attempt.load.len()) {
            if let Some(error) = error.filter(|error| error.retry_action() == RetryAction::Fail) {
                return Err(ReplyError::Server(error));
            }
        }
        if self.replies.is_empty() {
            self.replies = vec![Bytes::new(); self.encoded.len()];
        }
        let mut retriable = Retriable::default();
        let mut again = Vec::new();
        for index in indexes {
            if asking {
                parts.next();
            }
            let Some((reply, error)) = parts.next() else { break };
            self.replies[*index] = reply;
            let action = error.map_or(RetryAction::Fail, |error| error.retry_action());
            if action != RetryAction::Fail {
                again.push(*index);
            }
            match action {
                RetryAction::Fail => {}
                RetryAction::Wait => retriable.wait = true,
                RetryAction::FindPrimary => retriable.readonly = true,
                RetryAction::Moved { address } => {
                    retriable.wait |= !self.client.on_moved(self.slot, &address);
                }
                RetryAction::Ask { address } => retriable.next.ask_address = Some(address),
                RetryAction::LoadScript => {
                    if let Some(script) = self.encoded.script(*index)
                        && retriable.next.load.iter().all(|known| !std::ptr::eq(*known, script))
                    {
                        retriable.next.load.push(script);
                    }
                }
            }
        }
        retriable.next.commands = Some(again);
        Ok(retriable)
    }

    /// All replies in the order of the commands.
    fn take_replies(&mut self) -> RespReplies {
        RespReplies::new(std::mem::take(&mut self.replies).concat().into(), true)
    }
}
