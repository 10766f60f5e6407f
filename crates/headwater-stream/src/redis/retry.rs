//! One call: commands of one slot, re-sent until each has a final reply.
//!
//! Upstream: `client`. Guarantees: a call ends by its deadline. A command that may have taken effect is re-sent only if it is
//! idempotent. A command that the server rejected without effect (moved, loading, unknown script, no longer primary) is
//! re-sent until the deadline, independently of the other commands. A transaction is re-sent as a whole. A script that may run
//! on a full server is re-sent once with that flag.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tokio::time::Instant;

use super::client::{CallConnection, Idempotency, RedisClient, RetryBackoff};
use super::command::{Commands, EncodedCommands};
use super::connection::ConnectError;
use super::error::{ReplyError, RetryAction, ServerError};
use super::metrics;
use super::multiplexed::{RequestError, RequestResult};
use super::node::Node;
use super::reply::RespReplies;
use super::scripts::Script;
use crate::error::{BoxError, Result, StreamError};

/// How many redirections or unknown scripts are retried without a pause.
const IMMEDIATE_REDIRECTS_MAX: u32 = 3;

pub(super) struct RetryingCall<'a> {
    client: &'a RedisClient,
    connection: CallConnection,
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
    /// Single commands and whole transactions; all of them if `None`.
    units: Option<Vec<Range<usize>>>,
    /// Scripts to load first.
    load: Vec<&'static Script>,
    /// The server of an `ASK` redirection.
    ask_address: Option<String>,
    /// Whether the scripts are sent with the flag for full servers.
    to_full_server: bool,
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
        connection: CallConnection,
        slot: u16,
        encoded: EncodedCommands,
        idempotency: Idempotency,
        deadline: Instant,
    ) -> Self {
        Self {
            client,
            connection,
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
                    if self.attempt.units.is_none() && !replies.may_contain_errors() {
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
            ::metrics::counter!(metrics::CALL_RETRIES, "result" => "unreachable").increment(1);
        }
    }

    async fn send(&self) -> Result<RequestResult, ConnectError> {
        let (bytes, replies) = self.encode_attempt();
        let redirect = self.attempt.ask_address.as_ref();
        let redirect = redirect.and_then(|at| self.client.node_for_redirect(self.slot, at));
        let node: Arc<Node> = match redirect {
            Some(node) => node,
            None => self.client.node_for_slot(self.slot, self.deadline).await?,
        };
        self.connection.of(&node).send(&bytes, replies, self.deadline).await
    }

    /// The bytes of this attempt and the number of replies they get.
    fn encode_attempt(&self) -> (Cow<'_, [u8]>, usize) {
        let Some(units) = &self.attempt.units else {
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
        for unit in units {
            // It applies to a whole transaction.
            if self.attempt.ask_address.is_some() {
                add(&Commands::one(&["ASKING"]).encode().bytes);
            }
            for index in unit.clone() {
                match self.for_full_server(index, commands[index]) {
                    Some(command) => add(&command),
                    None => add(commands[index]),
                }
            }
        }
        (bytes.into(), replies)
    }

    /// The command with the flag for full servers, if this attempt is for one.
    fn for_full_server(&self, index: usize, command: &[u8]) -> Option<Vec<u8>> {
        let text = self.encoded.script(index)?.text_for_full_server()?;
        self.attempt.to_full_server.then(|| EncodedCommands::with_text(command, &text)).flatten()
    }

    /// Stores final replies and prepares the next attempt for rejected commands. Returns all replies when none is left.
    async fn handle_replies(&mut self, replies: &RespReplies) -> Result<Option<RespReplies>> {
        let retriable =
            self.classify(replies).map_err(|error| error.into_stream_error("the server"))?;
        if retriable.next.units.as_ref().is_some_and(Vec::is_empty) {
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
        if retriable.wait || retriable.readonly {
            ::metrics::counter!(metrics::CALL_RETRIES, "result" => "refused").increment(1);
        }
        self.attempt = retriable.next;
        Ok(None)
    }

    fn classify(&mut self, replies: &RespReplies) -> Result<Retriable, ReplyError> {
        let units = self.attempt.units.take().unwrap_or_else(|| self.encoded.units());
        let asking = usize::from(self.attempt.ask_address.is_some());
        let commands: usize = units.iter().map(|unit| asking + unit.len()).sum();
        let mut parts = replies.split(self.attempt.load.len() + commands)?.into_iter();
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
        for unit in units {
            let parts: Vec<_> = parts.by_ref().skip(asking).take(unit.len()).collect();
            let error = parts.first().and_then(|(_, error)| error.as_ref());
            if self.attempt.to_full_server && error.is_some_and(ServerError::is_no_script) {
                // A server before Redis 7: the error of the first attempt counts.
                continue;
            }
            let may_run = |script: &Script| script.text_for_full_server().is_some();
            let is_for_full_server = !self.attempt.to_full_server
                && error.is_some_and(ServerError::is_full)
                && self.encoded.script(unit.start).is_some_and(may_run);
            let action = retry_action(&parts);
            for (index, (reply, _)) in unit.clone().zip(parts) {
                self.replies[index] = reply;
            }
            if is_for_full_server {
                retriable.next.to_full_server = true;
                again.push(unit);
                continue;
            }
            if action != RetryAction::Fail {
                again.push(unit.clone());
            }
            match action {
                RetryAction::Fail => {}
                RetryAction::Wait => retriable.wait = true,
                RetryAction::FindPrimary => retriable.readonly = true,
                RetryAction::Moved { address } => {
                    ::metrics::counter!(metrics::REDIRECTS, "result" => "moved").increment(1);
                    retriable.wait |= !self.client.on_moved(self.slot, &address);
                }
                RetryAction::Ask { address } => {
                    ::metrics::counter!(metrics::REDIRECTS, "result" => "ask").increment(1);
                    retriable.next.ask_address = Some(address);
                }
                RetryAction::LoadScript => {
                    // The node that a slot is being moved to may not know the script.
                    let same_node = self.attempt.ask_address.clone();
                    retriable.next.ask_address = retriable.next.ask_address.take().or(same_node);
                    if let Some(script) = self.encoded.script(unit.start)
                        && retriable.next.load.iter().all(|known| !std::ptr::eq(*known, script))
                    {
                        retriable.next.load.push(script);
                    }
                }
            }
        }
        retriable.next.to_full_server |= self.attempt.to_full_server;
        retriable.next.units = Some(again);
        Ok(retriable)
    }

    /// All replies in the order of the commands.
    fn take_replies(&mut self) -> RespReplies {
        RespReplies::new(std::mem::take(&mut self.replies).concat().into(), true)
    }
}

/// How to retry a command or a transaction with these replies.
fn retry_action(replies: &[(Bytes, Option<ServerError>)]) -> RetryAction {
    let rejected = |(_, error): &(Bytes, Option<ServerError>)| error.is_some();
    let has_effect = match replies {
        // Without its `MULTI`, a transaction is single commands.
        [multi, ..] if rejected(multi) => !replies.iter().all(rejected),
        [.., exec] => !rejected(exec),
        [] => true,
    };
    let mut actions = replies.iter().filter_map(|(_, error)| Some(error.as_ref()?.retry_action()));
    let retry = actions.find(|action| *action != RetryAction::Fail);
    retry.filter(|_| !has_effect).unwrap_or(RetryAction::Fail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn action(replies: &str) -> RetryAction {
        let count = replies.matches("\r\n").count();
        let replies = RespReplies::new(Bytes::copy_from_slice(replies.as_bytes()), true);
        retry_action(&replies.split(count).unwrap())
    }

    #[test]
    fn a_transaction_is_retried_only_if_it_had_no_effect() {
        let aborted = "-EXECABORT Transaction discarded because of previous errors.\r\n";
        let retry = |members: &str, exec: &str| action(&format!("+OK\r\n{members}{exec}"));
        assert_eq!(retry("+QUEUED\r\n-BUSY wait\r\n", aborted), RetryAction::Wait);
        assert_eq!(retry("-OOM full\r\n+QUEUED\r\n", aborted), RetryAction::Fail);
        let busy = "-EXECABORT Transaction discarded because of: BUSY wait\r\n";
        assert_eq!(retry("+QUEUED\r\n", busy), RetryAction::Wait);
        assert_eq!(retry("+QUEUED\r\n", "*0\r\n"), RetryAction::Fail);
        // The server was loading and rejected all of it.
        assert_eq!(action(&"-LOADING wait\r\n".repeat(4)), RetryAction::Wait);
        // Without `MULTI`, one command took effect.
        let without = "-LOADING wait\r\n:1\r\n-ERR EXEC without MULTI\r\n";
        assert_eq!(action(without), RetryAction::Fail);
    }

    #[test]
    fn a_command_is_retried_if_it_was_rejected() {
        assert_eq!(action("-BUSY wait\r\n"), RetryAction::Wait);
        assert_eq!(action("-ERR no\r\n"), RetryAction::Fail);
        assert_eq!(action(":1\r\n"), RetryAction::Fail);
    }
}
