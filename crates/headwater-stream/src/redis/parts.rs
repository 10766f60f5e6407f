//! A call whose first commands are on their way while the rest is still put together.
//!
//! Upstream: appends of many entries. Downstream: `link`, and `call` for whatever goes wrong.
//! The server and we work at the same time: what we need to pack the rest costs the caller nothing.
//! Promises: the commands reach the server in order, on one connection; a call in parts succeeds, fails and is sent again
//! like one that is sent whole.

use bytes::Bytes;
use tokio::time::Instant;

use super::call::Call;
use super::command::Commands;
use super::error::Remedy;
use super::link::{Answer, Broken, Haste, Link, Outcome};
use super::reply::Replies;
use super::servers::{Effect, Servers};
use crate::error::Result;

/// The first part is small, so that the server begins soon.
const FIRST_PART_BYTES: usize = 12 * 1024;
/// Less would cost more calls to the system, more would let the server wait (measured).
const PART_BYTES: usize = 64 * 1024;

pub(super) struct PartedCall<'a> {
    servers: &'a Servers,
    slot: u16,
    deadline: Instant,
    pub(super) commands: Commands,
    /// The way of all parts; the rest is sent otherwise if it ends.
    link: Option<Link>,
    answers: Vec<Answer>,
    /// What of the commands has left.
    sent_bytes: usize,
    sent_commands: usize,
}

impl<'a> PartedCall<'a> {
    /// Begins a call with room for this many bytes.
    pub(super) fn new(servers: &'a Servers, slot: u16, bytes: usize) -> Result<Self> {
        servers.check_open()?;
        Ok(Self {
            servers,
            slot,
            deadline: servers.deadline(),
            commands: Commands::with_capacity(bytes),
            link: servers.link(slot),
            answers: Vec::new(),
            sent_bytes: 0,
            sent_commands: 0,
        })
    }

    /// Sends what has gathered, if that is enough to be worth it. To be called between two commands.
    pub(super) fn send_some(&mut self) {
        let enough = if self.answers.is_empty() { FIRST_PART_BYTES } else { PART_BYTES };
        if self.commands.position() - self.sent_bytes >= enough {
            self.send_part(Haste::Now);
        }
    }

    fn send_part(&mut self, haste: Haste) {
        let Some(link) = &self.link else { return };
        let bytes = self.commands.bytes_from(self.sent_bytes);
        let replies = self.commands.len() - self.sent_commands;
        // Without room or without a connection, the rest waits until all of it is known.
        match link.try_send(bytes, replies, self.deadline, haste) {
            Some(answer) => {
                self.answers.push(answer);
                self.sent_bytes = self.commands.position();
                self.sent_commands = self.commands.len();
            }
            None if self.answers.is_empty() => self.link = None,
            None => {}
        }
    }

    /// Sends the rest, and returns the replies to all commands, errors included.
    pub(super) async fn finish(mut self, effect: Effect) -> Result<Replies> {
        if self.sent_commands < self.commands.len() {
            let haste = if self.answers.is_empty() { Haste::None } else { Haste::Now };
            self.send_part(haste);
        }
        let Self { servers, slot, deadline, commands, link, mut answers, .. } = self;
        let unsent = commands.len() - self.sent_commands;
        let outcome = match link {
            None => None,
            Some(_) if unsent == 0 && answers.len() == 1 => match answers.pop() {
                Some(answer) => Some(answer.await),
                None => None,
            },
            Some(link) => {
                let rest = commands.bytes_from(self.sent_bytes);
                Some(match unsent {
                    0 => collect(answers).await,
                    _ => {
                        collect_and_send(
                            &link,
                            answers,
                            self.sent_commands,
                            (rest, unsent),
                            deadline,
                        )
                        .await
                    }
                })
            }
        };
        match outcome {
            Some(Ok(replies)) if !replies.may_refuse() => Ok(replies),
            outcome => {
                let call = Call::new(servers, slot, commands.pack(), effect, deadline);
                Box::pin(call.run(outcome)).await
            }
        }
    }
}

/// Waits for the replies to all parts.
async fn collect(mut answers: Vec<Answer>) -> Outcome {
    let Some(last) = answers.pop() else { return Ok(Replies::joined(&[])) };
    // The last one first: when it is answered, so are all before it, and we are woken once.
    let last = last.await;
    let mut parts = Vec::with_capacity(answers.len() + 1);
    for answer in answers {
        parts.push(answer.await);
    }
    parts.push(last);
    join(parts)
}

/// Waits for the replies to the parts that have left, and sends the rest, which found no room before. After a refusal it
/// stays here: sent now and accepted, it would come before what is sent again.
async fn collect_and_send(
    link: &Link,
    answers: Vec<Answer>,
    sent: usize,
    (rest, unsent): (&[u8], usize),
    deadline: Instant,
) -> Outcome {
    let replies = collect(answers).await?;
    match stopped_by(&replies, sent) {
        Some(refusal) => {
            Ok(Replies::joined(&[replies, Replies::new(refusal.repeat(unsent).into(), true)]))
        }
        None => join(vec![Ok(replies), link.send(rest, unsent, deadline).await]),
    }
}

/// The refusal that holds for whatever comes next as well, if the last command met one: the server cannot, for now.
fn stopped_by(replies: &Replies, sent: usize) -> Option<Bytes> {
    if !replies.may_refuse() {
        return None;
    }
    // What makes no sense is told by whoever reads it whole.
    let (reply, refusal) = replies.split(sent).ok()?.pop()?;
    let is_for_all = |remedy| !matches!(remedy, Remedy::None | Remedy::LoadScript);
    refusal.filter(|refusal| is_for_all(refusal.remedy())).map(|_| reply)
}

/// What became of all parts together.
fn join(parts: Vec<Outcome>) -> Outcome {
    let mut replies = Vec::with_capacity(parts.len());
    for part in parts {
        match part {
            Ok(part) => replies.push(part),
            Err(broken) if replies.is_empty() => return Err(broken),
            // The parts before it had their effect.
            Err(Broken::NotSent(error) | Broken::Lost(error)) => return Err(Broken::Lost(error)),
        }
    }
    Ok(Replies::joined(&replies))
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use super::*;

    fn answered(text: &'static str) -> Outcome {
        Ok(Replies::new(Bytes::from_static(text.as_bytes()), text.starts_with('-')))
    }

    #[test]
    fn what_found_no_room_stays_behind_a_refusal_of_what_left_before_it() {
        let stopped = |text| stopped_by(&answered(text).unwrap(), 2);
        let down = "-CLUSTERDOWN wait\r\n";
        assert_eq!(stopped("-OOM no\r\n-CLUSTERDOWN wait\r\n").as_deref(), Some(down.as_bytes()));
        // It was accepted again, or was refused for itself alone: the rest may go.
        assert_eq!(stopped("-CLUSTERDOWN wait\r\n-WRONGTYPE no\r\n"), None);
        assert_eq!(stopped("-CLUSTERDOWN wait\r\n:1\r\n"), None);
        assert_eq!(stopped("-ERR no\r\n-NOSCRIPT none\r\n"), None);
        assert_eq!(stopped(":1\r\n:2\r\n"), None);
    }

    fn not_sent() -> Outcome {
        Err(Broken::NotSent(Arc::new(io::ErrorKind::NotConnected.into())))
    }

    #[test]
    fn replies_to_parts_are_read_as_one_and_a_refusal_among_them_is_known() {
        let replies = join(vec![answered("$1\r\na\r\n"), answered("-ERR no\r\n")]).unwrap();
        assert!(replies.may_refuse());
        assert_eq!(replies.split(2).unwrap().len(), 2);
    }

    #[test]
    fn a_call_of_which_a_part_was_answered_may_have_happened() {
        assert!(matches!(join(vec![not_sent(), not_sent()]), Err(Broken::NotSent(_))));
        assert!(matches!(join(vec![answered(":1\r\n"), not_sent()]), Err(Broken::Lost(_))));
    }
}
