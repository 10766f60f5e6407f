//! One call: commands of one slot, sent until each has its answer.
//!
//! Upstream: `servers`. Promises: a call ends by its deadline. A command that may have had its effect is sent again only
//! if that does no harm. A command that the server refused without effect (moved, loading, unknown script, no longer
//! primary) is sent again until the deadline: alone, whatever its neighbours did.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use tokio::time::Instant;

use super::command::{Commands, Packed};
use super::connection::ConnectError;
use super::error::{Failure, Remedy};
use super::link::{Broken, Outcome};
use super::node::Node;
use super::reply::Replies;
use super::scripts::Script;
use super::servers::{Backoff, Effect, Servers};
use crate::error::{BoxError, Result, StreamError};

/// How often a script may be unknown, or a slot elsewhere, before it is worth a pause.
const REDIRECTIONS_AT_ONCE: u32 = 3;

pub(super) struct Call<'a> {
    servers: &'a Servers,
    slot: u16,
    packed: Packed,
    effect: Effect,
    deadline: Instant,
    backoff: Backoff,
    redirections: u32,
    /// The answers so far; the last refusal where there is none. Empty until something was refused.
    answers: Vec<Bytes>,
    round: Round,
}

/// What to send next.
#[derive(Default)]
struct Round {
    /// Which commands; all of them if `None`.
    commands: Option<Vec<usize>>,
    /// Scripts the server has to learn before.
    load: Vec<&'static Script>,
    /// The server that asks for these commands, this once.
    asked_by: Option<String>,
}

/// What happened to the refused commands of a round.
#[derive(Default)]
struct Refused {
    next: Round,
    demoted: bool,
    wait: bool,
}

impl<'a> Call<'a> {
    pub(super) fn new(
        servers: &'a Servers,
        slot: u16,
        packed: Packed,
        effect: Effect,
        deadline: Instant,
    ) -> Self {
        Self {
            servers,
            slot,
            packed,
            effect,
            deadline,
            backoff: Backoff::default(),
            redirections: 0,
            answers: Vec::new(),
            round: Round::default(),
        }
    }

    /// Goes on from the outcome of a first attempt, if there was one.
    pub(super) async fn run(mut self, mut first: Option<Outcome>) -> Result<Replies> {
        loop {
            let sent = match first.take() {
                Some(outcome) => Ok(outcome),
                None => self.send().await,
            };
            let trouble: BoxError = match sent {
                Ok(Ok(replies)) => {
                    if self.round.commands.is_none() && !replies.may_refuse() {
                        return Ok(replies);
                    }
                    if let Some(answers) = self.take(&replies).await? {
                        return Ok(answers);
                    }
                    continue;
                }
                Ok(Err(Broken::Lost(error))) if self.effect == Effect::Once => {
                    self.servers.look_around(None, self.deadline).await;
                    return Err(StreamError::unavailable(
                        "the reply was lost, the call may have happened",
                        error,
                    ));
                }
                Ok(Err(broken)) => broken.into(),
                Err(ConnectError::Refused(error)) => return Err(error),
                Err(error) => error.into(),
            };
            self.servers.look_around(None, self.deadline).await;
            if !self.backoff.pause(self.deadline).await {
                return Err(StreamError::unavailable("no answer within the deadline", trouble));
            }
            self.servers.check_open()?;
        }
    }

    async fn send(&self) -> Result<Outcome, ConnectError> {
        let (bytes, replies) = self.assemble();
        let elsewhere = self.round.asked_by.as_ref().and_then(|at| self.servers.elsewhere(at));
        let node: Arc<Node> = match elsewhere {
            Some(node) => node,
            None => self.servers.owner(self.slot, self.deadline).await?,
        };
        node.send(&bytes, replies, self.deadline).await
    }

    /// The bytes of this round and how many replies they get.
    fn assemble(&self) -> (Cow<'_, [u8]>, usize) {
        let Some(indexes) = &self.round.commands else {
            return (Cow::Borrowed(&self.packed.bytes), self.packed.len());
        };
        let (mut bytes, mut replies) = (Vec::new(), 0);
        let mut add = |command: &[u8]| {
            bytes.extend_from_slice(command);
            replies += 1;
        };
        for script in &self.round.load {
            add(&Commands::one(&["SCRIPT", "LOAD", script.text()]).pack().bytes);
        }
        let commands = self.packed.commands();
        for command in indexes.iter().filter_map(|index| commands.get(*index)) {
            if self.round.asked_by.is_some() {
                add(&Commands::one(&["ASKING"]).pack().bytes);
            }
            add(command);
        }
        (bytes.into(), replies)
    }

    /// Sorts the replies of a round: answers are kept, refused commands go into the next one.
    async fn take(&mut self, replies: &Replies) -> Result<Option<Replies>> {
        let refused = self.sort(replies).map_err(|failure| failure.about("the server"))?;
        if refused.next.commands.as_ref().is_some_and(Vec::is_empty) {
            return Ok(Some(self.finished()));
        }
        if refused.demoted {
            self.servers.demoted(self.deadline).await;
        }
        if refused.wait {
            self.servers.look_around(None, self.deadline).await;
        }
        self.redirections += 1;
        let at_once =
            !refused.wait && !refused.demoted && self.redirections <= REDIRECTIONS_AT_ONCE;
        if !at_once && !self.backoff.pause(self.deadline).await {
            return Ok(Some(self.finished()));
        }
        self.servers.check_open()?;
        self.round = refused.next;
        Ok(None)
    }

    fn sort(&mut self, replies: &Replies) -> Result<Refused, Failure> {
        let all: Vec<usize> = (0..self.packed.len()).collect();
        let indexes = self.round.commands.as_ref().unwrap_or(&all);
        let asking = self.round.asked_by.is_some();
        let per_command = if asking { 2 } else { 1 };
        let expected = self.round.load.len() + indexes.len() * per_command;
        let mut parts = replies.split(expected)?.into_iter();
        for (_, refusal) in parts.by_ref().take(self.round.load.len()) {
            if let Some(refusal) = refusal.filter(|refusal| refusal.remedy() == Remedy::None) {
                return Err(Failure::Refused(refusal));
            }
        }
        if self.answers.is_empty() {
            self.answers = vec![Bytes::new(); self.packed.len()];
        }
        let mut refused = Refused::default();
        let mut again = Vec::new();
        for index in indexes {
            if asking {
                parts.next();
            }
            let Some((answer, refusal)) = parts.next() else { break };
            self.answers[*index] = answer;
            let remedy = refusal.map_or(Remedy::None, |refusal| refusal.remedy());
            if remedy != Remedy::None {
                again.push(*index);
            }
            match remedy {
                Remedy::None => {}
                Remedy::Wait => refused.wait = true,
                Remedy::FindPrimary => refused.demoted = true,
                Remedy::Moved { address } => {
                    refused.wait |= !self.servers.moved(self.slot, &address);
                }
                Remedy::Ask { address } => refused.next.asked_by = Some(address),
                Remedy::LoadScript => {
                    if let Some(script) = self.packed.script(*index)
                        && refused.next.load.iter().all(|known| !std::ptr::eq(*known, script))
                    {
                        refused.next.load.push(script);
                    }
                }
            }
        }
        refused.next.commands = Some(again);
        Ok(refused)
    }

    /// All answers in the order of the commands.
    fn finished(&mut self) -> Replies {
        Replies::new(std::mem::take(&mut self.answers).concat().into(), true)
    }
}
