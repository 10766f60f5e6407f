//! Delay sets on Redis: a sorted set by due time, and a hash with the fields of the entries.
//!
//! A waiting task polls at the earliest due time, and when `delay_wakeups` reports a new earliest entry.

use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;
use tracing::warn;

use super::RedisBackend;
use super::client::{Idempotency, closed};
use super::command::Commands;
use super::error::{ReplyError, ServerError};
use super::keys::Key;
use super::reply::Cursor;
use super::settle::due_args;
use super::{msgpack, sanitized_name, scripts};
use crate::clock::Timestamp;
use crate::delays::{DelayId, DelayStats, DelayedEntry, Delays, PromotedEntry, ScheduleRequest};
use crate::entry::EntryId;
use crate::error::{Result, StreamError};
use crate::name::{DelayName, StreamName};
use crate::validate;

/// Maximum number of entries that one call skips because their streams cannot take them.
const SKIPPED_MAX: usize = 10_000;
/// Entries promoted by one script call.
const PROMOTE_BATCH: usize = 500;

#[async_trait]
impl Delays for RedisBackend {
    async fn schedule(
        &self,
        delays: &DelayName,
        items: &[ScheduleRequest],
    ) -> Result<Vec<DelayId>> {
        validate::schedule(items)?;
        for item in items {
            self.check_same_slot("the target stream", delays.as_str(), item.to.as_str())?;
        }
        let mut commands = Commands::new();
        commands.script(&scripts::SCHEDULE, &self.keys().delay_set(delays), 1 + items.len() * 4);
        commands.arg(self.keys().due_channel());
        for item in items {
            let (kind, ms) = due_args(item.due);
            commands.arg(kind);
            commands.arg_number(ms);
            // A name, not a key: `promote` makes the key.
            commands.arg(item.to.as_str());
            commands.arg(msgpack::target_and_fields(item.to.as_str(), &item.fields));
        }
        let read = |reply: &mut Cursor<'_>| reply.list(|id| id.digits().map(DelayId));
        self.call_once(delays, commands, read).await
    }

    async fn cancel(&self, delays: &DelayName, id: DelayId) -> Result<bool> {
        let keys = self.keys().delay_set(delays);
        let commands = Commands::run(&scripts::CANCEL_DELAYED, &keys, &[padded(id)]);
        self.call_once(delays, commands, |reply| Ok(reply.number()? > 0)).await
    }

    async fn promote_due(&self, delays: &DelayName, count: usize) -> Result<Vec<PromotedEntry>> {
        validate::count(count)?;
        self.client.with_deadline(Duration::ZERO, self.promote_all_due(delays, count)).await
    }

    async fn wait_until_due(&self, delays: &DelayName, wait: Duration) -> Result<bool> {
        validate::wait(wait)?;
        if wait.is_zero() {
            return Ok(self.delay_set_state(delays).await?.is_due());
        }
        self.client.with_deadline(wait, self.poll_until_due(delays, wait)).await
    }

    async fn delay_stats(&self, delays: &DelayName) -> Result<DelayStats> {
        let state = self.delay_set_state(delays).await?;
        Ok(DelayStats { waiting: state.waiting, next_due: state.due_at })
    }

    async fn delayed(
        &self,
        delays: &DelayName,
        offset: usize,
        count: usize,
    ) -> Result<Vec<DelayedEntry>> {
        validate::count(count)?;
        let keys = self.keys().delay_set(delays);
        let last = offset.saturating_add(count - 1).min(i64::MAX as usize);
        let args = [offset.min(i64::MAX as usize).to_string(), last.to_string()];
        let commands = Commands::run(&scripts::LIST_DELAYED, &keys, &args);
        let replies = self.call_bulk(delays, commands, Idempotency::Idempotent).await?;
        let delayed = replies.cursor().list(read_delayed);
        delayed.map_err(|error| error.into_stream_error(delays))
    }

    async fn delete_delay_set(&self, delays: &DelayName) -> Result<bool> {
        let keys = self.keys().delay_set(delays);
        let commands = Commands::run(&scripts::DELETE_DELAY_SET, &keys, &[""; 0]);
        self.call_once(delays, commands, |reply| Ok(reply.number()? > 0)).await
    }
}

/// Size and earliest due time of a delay set.
struct DelaySetState {
    waiting: u64,
    due_at: Option<Timestamp>,
    now: Timestamp,
}

impl DelaySetState {
    fn is_due(&self) -> bool {
        self.due_at.is_some_and(|due| due <= self.now)
    }

    fn remaining(&self) -> Duration {
        self.due_at.map_or(Duration::MAX, |due| due.since(self.now))
    }
}

impl RedisBackend {
    async fn delay_set_state(&self, delays: &DelayName) -> Result<DelaySetState> {
        let commands = Commands::run(&scripts::NEXT_DUE, &[self.key(delays)], &[""; 0]);
        self.call_idempotent(delays, commands, read_state).await
    }

    async fn promote_all_due(
        &self,
        delays: &DelayName,
        count: usize,
    ) -> Result<Vec<PromotedEntry>> {
        let (mut promoted, mut skipped) = (Vec::new(), 0);
        let mut first_error = None;
        while promoted.len() < count && skipped < SKIPPED_MAX {
            let wanted = (count - promoted.len()).min(PROMOTE_BATCH);
            let members = self.due_members(delays, skipped, wanted).await?;
            let last = members.len() < wanted;
            if !members.is_empty() {
                let (moved, failed) = self.promote(delays, &members).await?;
                promoted.extend(moved);
                skipped += failed.len();
                first_error = first_error.or(failed.into_iter().next());
            }
            if last {
                break;
            }
        }
        match first_error {
            Some(error) if promoted.is_empty() => Err(error),
            _ => Ok(promoted),
        }
    }

    async fn poll_until_due(&self, delays: &DelayName, wait: Duration) -> Result<bool> {
        let until = Instant::now() + wait;
        let waiter = self.due_notifier.register(&self.client, delays);
        loop {
            // Enabled before the poll, so that no notification is lost in between.
            let mut notified = std::pin::pin!(waiter.notified.notified());
            notified.as_mut().enable();
            let state = self.delay_set_state(delays).await?;
            if state.is_due() {
                return Ok(true);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let pause = left.min(state.remaining()).min(self.due_notifier.poll_interval());
            tokio::select! {
                () = notified => {}
                () = tokio::time::sleep(pause) => {}
                () = self.client.until_closed() => return Err(closed()),
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
        let commands = Commands::run(&scripts::LIST_DUE, &[self.key(delays)], &args);
        let read = |reply: &mut Cursor<'_>| reply.list(|member| Ok(member.text()?.to_vec()));
        self.call_idempotent(delays, commands, read).await
    }

    /// Promotes these entries. Returns the promoted ones, and the errors of those whose streams cannot take them.
    async fn promote(
        &self,
        delays: &DelayName,
        members: &[Vec<u8>],
    ) -> Result<(Vec<PromotedEntry>, Vec<StreamError>)> {
        let members = members
            .iter()
            .map(|member| Ok((member.as_slice(), read_member(member)?)))
            .collect::<Result<Vec<_>, ReplyError>>()
            .map_err(|error| error.into_stream_error(delays))?;
        let mut keys = Vec::from(self.keys().delay_set(delays));
        let mut args: Vec<Vec<u8>> = Vec::with_capacity(members.len() * 3);
        for (member, (id, target)) in &members {
            let target = self.key(target);
            let known = keys[2..].iter().position(|key: &Key<'_>| *key == target);
            let index = known.unwrap_or_else(|| {
                keys.push(target);
                keys.len() - 3
            });
            let key = (index + 3).to_string();
            args.extend([member.to_vec(), padded(*id).into_bytes(), key.into_bytes()]);
        }
        let commands = Commands::run(&scripts::PROMOTE_DUE, &keys, &args);
        let results = self.call_once(delays, commands, |reply| reply.list(read_promotion)).await?;
        let (mut promoted, mut failed) = (Vec::new(), Vec::new());
        for ((_, (delay, stream)), result) in members.into_iter().zip(results) {
            match result {
                Promotion::NotFound => {}
                Promotion::Promoted(id) => promoted.push(PromotedEntry { delay, stream, id }),
                Promotion::Failed(error) => failed.push(error.into_stream_error(stream.as_str())),
                Promotion::FieldsMissing => {
                    warn!(delays = %delays, %delay, "removed a delayed entry without fields");
                }
            }
        }
        Ok((promoted, failed))
    }
}

/// Result of promoting one due entry.
enum Promotion {
    NotFound,
    Promoted(EntryId),
    Failed(ServerError),
    FieldsMissing,
}

fn read_promotion(cursor: &mut Cursor<'_>) -> Result<Promotion, ReplyError> {
    cursor.array()?;
    Ok(match cursor.number()? {
        0 => Promotion::NotFound,
        1 => Promotion::Promoted(cursor.id()?),
        2 => Promotion::Failed(ServerError::new(cursor.text()?)),
        _ => Promotion::FieldsMissing,
    })
}

fn read_delayed(cursor: &mut Cursor<'_>) -> Result<DelayedEntry, ReplyError> {
    cursor.array_of(3)?;
    let (id, _) = read_member(cursor.text()?)?;
    let due_at = read_score(cursor.text()?)?;
    let (to, fields) = msgpack::read_target_and_fields(cursor.text()?)?;
    let to = sanitized_name(to.as_bytes(), StreamName::new)?;
    Ok(DelayedEntry { id, to, due_at, fields })
}

fn read_state(cursor: &mut Cursor<'_>) -> Result<DelaySetState, ReplyError> {
    cursor.array_of(3)?;
    let waiting = cursor.count()?;
    let due_at = cursor.text_or_nil()?.map(read_score).transpose()?;
    Ok(DelaySetState { waiting, due_at, now: Timestamp::from_millis(cursor.count()?) })
}

/// The id as the prefix of a member, zero-padded so that members with one due time sort by id.
fn padded(id: DelayId) -> String {
    format!("{:020}", id.0)
}

/// Parses a member into id and target stream.
fn read_member(member: &[u8]) -> Result<(DelayId, StreamName), ReplyError> {
    let invalid = || ReplyError::unexpected("invalid member in a delay set");
    let (digits, target) = member.split_at_checked(20).ok_or_else(invalid)?;
    let id = super::reply::parse_digits(digits).ok_or_else(invalid)?;
    let target = target.strip_prefix(b":").ok_or_else(invalid)?;
    let target = std::str::from_utf8(target).map_err(|_| invalid())?;
    Ok((DelayId(id), StreamName::new(target).map_err(|_| invalid())?))
}

/// Parses a due time, which the server stores as a floating point number.
fn read_score(text: &[u8]) -> Result<Timestamp, ReplyError> {
    std::str::from_utf8(text)
        .ok()
        .and_then(|text| text.parse::<f64>().ok())
        .map(|score| Timestamp::from_millis(score as u64))
        .ok_or_else(|| ReplyError::unexpected("due time is not a number"))
}
