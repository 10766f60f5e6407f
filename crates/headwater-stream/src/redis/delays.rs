//! Delays on Redis: a sorted set by due time, and a hash of what the entries carry.
//!
//! Whoever waits looks when an entry is due, and again when `bells` tells of a new entry that is due before all others.

use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;
use tracing::warn;

use super::RedisBackend;
use super::command::Commands;
use super::error::{Failure, Refusal};
use super::reply::{Cursor, Replies};
use super::servers::{Effect, closed};
use super::settle::due_words;
use super::streams::list;
use super::{foreign_name, keys, msgpack, scripts};
use crate::check;
use crate::clock::Timestamp;
use crate::delays::{DelayId, DelayStats, Delayed, Delays, PutAside, Returned};
use crate::entry::EntryId;
use crate::error::{Result, StreamError};
use crate::name::{DelayName, StreamName};

/// Entries that cannot be moved are passed over, this many at most in one call.
const PASSED_OVER_MAX: usize = 10_000;
/// Entries moved in one step of the server.
const MOVED_AT_ONCE: usize = 500;

#[async_trait]
impl Delays for RedisBackend {
    async fn put_aside(&self, delays: &DelayName, items: &[PutAside]) -> Result<Vec<DelayId>> {
        check::put_aside(items)?;
        for item in items {
            self.must_share_slot("the stream it goes to", delays.as_str(), item.to.as_str())?;
        }
        let mut commands = Commands::new();
        let keys = [delays.as_str(), &keys::delay_entries(delays)];
        commands.script(&scripts::PUT_ASIDE, &keys, 1 + items.len() * 4);
        commands.arg(keys::due_channel(self.database));
        for item in items {
            let (kind, ms) = due_words(item.due);
            commands.arg(kind);
            commands.arg_number(ms);
            commands.arg(item.to.as_str());
            commands.arg(msgpack::target_and_fields(item.to.as_str(), &item.fields));
        }
        let replies = self.call(delays, commands, Effect::Once).await?;
        list(&replies, |cursor| cursor.digits().map(DelayId))
            .map_err(|failure| failure.about(delays))
    }

    async fn cancel(&self, delays: &DelayName, id: DelayId) -> Result<bool> {
        let keys = [delays.as_str(), &keys::delay_entries(delays)];
        let commands = Commands::run(&scripts::CANCEL, &keys, &[number(id)]);
        let replies = self.call(delays, commands, Effect::Once).await?;
        replies.cursor().number().map(|removed| removed > 0).map_err(|f| f.about(delays))
    }

    async fn take_due(&self, delays: &DelayName, count: usize) -> Result<Vec<Returned>> {
        check::count(count)?;
        self.servers.in_time(Duration::ZERO, self.take_all_due(delays, count)).await
    }

    async fn wait_due(&self, delays: &DelayName, wait: Duration) -> Result<bool> {
        check::wait(wait)?;
        if wait.is_zero() {
            return Ok(self.next_due(delays).await?.is_due());
        }
        self.servers.in_time(wait, self.wait_until_due(delays, wait)).await
    }

    async fn delay_stats(&self, delays: &DelayName) -> Result<DelayStats> {
        let next = self.next_due(delays).await?;
        Ok(DelayStats { waiting: next.waiting, next_due: next.due_at })
    }

    async fn delayed(
        &self,
        delays: &DelayName,
        offset: usize,
        count: usize,
    ) -> Result<Vec<Delayed>> {
        check::count(count)?;
        let keys = [delays.as_str(), &keys::delay_entries(delays)];
        let last = offset.saturating_add(count - 1).min(i64::MAX as usize);
        let args = [offset.min(i64::MAX as usize).to_string(), last.to_string()];
        let commands = Commands::run(&scripts::DELAYED, &keys, &args);
        let replies = self.call(delays, commands, Effect::Repeatable).await?;
        list(&replies, |cursor| {
            cursor.array_of(3)?;
            let (id, _) = read_member(cursor.text()?)?;
            let due_at = read_score(cursor.text()?)?;
            let (to, fields) = msgpack::read_target_and_fields(cursor.text()?)?;
            Ok(Delayed { id, to: foreign_name(to.as_bytes(), StreamName::new)?, due_at, fields })
        })
        .map_err(|failure| failure.about(delays))
    }

    async fn delete_delays(&self, delays: &DelayName) -> Result<bool> {
        let keys = [delays.as_str(), &keys::delay_entries(delays)];
        let commands = Commands::run(&scripts::DELETE_DELAYS, &keys, &[""; 0]);
        let replies = self.call(delays, commands, Effect::Once).await?;
        replies.cursor().number().map(|deleted| deleted > 0).map_err(|f| f.about(delays))
    }
}

/// What is known of a delay set before waiting for it.
struct Next {
    waiting: u64,
    due_at: Option<Timestamp>,
    now: Timestamp,
}

impl Next {
    fn is_due(&self) -> bool {
        self.due_at.is_some_and(|due| due <= self.now)
    }

    fn remaining(&self) -> Duration {
        self.due_at.map_or(Duration::MAX, |due| due.since(self.now))
    }
}

impl RedisBackend {
    async fn next_due(&self, delays: &DelayName) -> Result<Next> {
        let commands = Commands::run(&scripts::NEXT_DUE, &[delays], &[""; 0]);
        let replies = self.call(delays, commands, Effect::Repeatable).await?;
        read_next(&replies).map_err(|failure| failure.about(delays))
    }

    async fn take_all_due(&self, delays: &DelayName, count: usize) -> Result<Vec<Returned>> {
        let (mut returned, mut stuck) = (Vec::new(), 0);
        let mut problem = None;
        while returned.len() < count && stuck < PASSED_OVER_MAX {
            let wanted = (count - returned.len()).min(MOVED_AT_ONCE);
            let members = self.due_members(delays, stuck, wanted).await?;
            let last = members.len() < wanted;
            if !members.is_empty() {
                let (moved, refused) = self.move_due(delays, &members).await?;
                returned.extend(moved);
                stuck += refused.len();
                problem = problem.or(refused.into_iter().next());
            }
            if last {
                break;
            }
        }
        match problem {
            Some(problem) if returned.is_empty() => Err(problem),
            _ => Ok(returned),
        }
    }

    async fn wait_until_due(&self, delays: &DelayName, wait: Duration) -> Result<bool> {
        let until = Instant::now() + wait;
        let bell = self.bells.wait_for(&self.servers, delays);
        loop {
            // Heard from before the look on, so that no ring is lost in between.
            let mut rung = std::pin::pin!(bell.rung.notified());
            rung.as_mut().enable();
            let next = self.next_due(delays).await?;
            if next.is_due() {
                return Ok(true);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let pause = left.min(next.remaining()).min(self.bells.look_every());
            tokio::select! {
                () = rung => {}
                () = tokio::time::sleep(pause) => {}
                () = self.servers.until_closed() => return Err(closed()),
            }
        }
    }

    async fn due_members(
        &self,
        delays: &DelayName,
        offset: usize,
        count: usize,
    ) -> Result<Vec<Vec<u8>>> {
        let args = [offset.to_string(), count.to_string()];
        let commands = Commands::run(&scripts::DUE, &[delays], &args);
        let replies = self.call(delays, commands, Effect::Repeatable).await?;
        list(&replies, |cursor| Ok(cursor.text()?.to_vec())).map_err(|f| f.about(delays))
    }

    /// Moves these entries. Returns those that moved, and why others could not.
    async fn move_due(
        &self,
        delays: &DelayName,
        members: &[Vec<u8>],
    ) -> Result<(Vec<Returned>, Vec<StreamError>)> {
        let members = members
            .iter()
            .map(|member| Ok((member.as_slice(), read_member(member)?)))
            .collect::<Result<Vec<_>, Failure>>()
            .map_err(|failure| failure.about(delays))?;
        let mut keys = vec![delays.as_str().to_owned(), keys::delay_entries(delays)];
        let mut args: Vec<Vec<u8>> = Vec::with_capacity(members.len() * 3);
        for (member, (id, target)) in &members {
            let known = keys[2..].iter().position(|key| key == target.as_str());
            let index = known.unwrap_or_else(|| {
                keys.push(target.to_string());
                keys.len() - 3
            });
            let key = (index + 3).to_string();
            args.extend([member.to_vec(), number(*id).into_bytes(), key.into_bytes()]);
        }
        let commands = Commands::run(&scripts::TAKE_DUE, &keys, &args);
        let replies = self.call(delays, commands, Effect::Once).await?;
        let answers = list(&replies, read_answer).map_err(|failure| failure.about(delays))?;
        let (mut moved, mut refused) = (Vec::new(), Vec::new());
        for ((_, (delay, stream)), answer) in members.into_iter().zip(answers) {
            match answer {
                Answer::Gone => {}
                Answer::Moved(id) => moved.push(Returned { delay, stream, id }),
                Answer::Refused(refusal) => refused.push(refusal.about(stream.as_str())),
                Answer::Empty => {
                    warn!(delays = %delays, %delay, "a delayed entry had lost its fields, removed");
                }
            }
        }
        Ok((moved, refused))
    }
}

/// What became of one due entry.
enum Answer {
    Gone,
    Moved(EntryId),
    Refused(Refusal),
    Empty,
}

fn read_answer(cursor: &mut Cursor<'_>) -> Result<Answer, Failure> {
    cursor.array()?;
    Ok(match cursor.number()? {
        0 => Answer::Gone,
        1 => Answer::Moved(cursor.id()?),
        2 => Answer::Refused(Refusal::new(cursor.text()?)),
        _ => Answer::Empty,
    })
}

fn read_next(replies: &Replies) -> Result<Next, Failure> {
    let mut cursor = replies.cursor();
    cursor.array_of(3)?;
    let waiting = cursor.count()?;
    let due_at = cursor.text_or_nil()?.map(read_score).transpose()?;
    Ok(Next { waiting, due_at, now: Timestamp::from_millis(cursor.count()?) })
}

/// A number as it stands in front of a member, so that members of one due time are in order.
fn number(id: DelayId) -> String {
    format!("{:020}", id.0)
}

/// The number and the target in a member.
fn read_member(member: &[u8]) -> Result<(DelayId, StreamName), Failure> {
    let foreign = || Failure::shape("a delay set with a member that is not one of ours");
    let (digits, target) = member.split_at_checked(20).ok_or_else(foreign)?;
    let id = super::reply::parse_digits(digits).ok_or_else(foreign)?;
    let target = target.strip_prefix(b":").ok_or_else(foreign)?;
    let target = std::str::from_utf8(target).map_err(|_| foreign())?;
    Ok((DelayId(id), StreamName::new(target).map_err(|_| foreign())?))
}

/// A due time; the server keeps it as a floating point number.
fn read_score(text: &[u8]) -> Result<Timestamp, Failure> {
    std::str::from_utf8(text)
        .ok()
        .and_then(|text| text.parse::<f64>().ok())
        .map(|score| Timestamp::from_millis(score as u64))
        .ok_or_else(|| Failure::shape("a due time that is no number"))
}
