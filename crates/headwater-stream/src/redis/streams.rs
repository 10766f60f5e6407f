//! Streams and consumer groups on Redis.

use std::time::Duration;

use async_trait::async_trait;

use super::RedisBackend;
use super::client::Idempotency;
use super::command::Commands;
use super::error::ReplyError;
use super::keys::{Key, KeyName, Keyspace};
use super::readers::{RedisGroupReader, RedisTailReader};
use super::reply::{Cursor, RespReplies, parse_id};
use super::sanitized_name;
use super::{scripts, trim};
use crate::entry::{DeliveredEntry, Entry, EntryId, Fields};
use crate::error::{Result, StreamError};
use crate::name::{ConsumerName, GroupName, MapName, StreamName};
use crate::registry::Registry;
use crate::streams::{
    AppendRequest, AppendedEntry, Direction, DisconnectOutcome, GroupCondition, GroupReader,
    GroupStart, IdempotentEntry, PendingDelivery, PendingDeliveryQuery, Range, ReclaimFrom,
    ReclaimRequest, ReclaimResult, Retention, SettleBatch, SettleResult, StreamStats, Streams,
    TailReader, TrimGuard, TrimResult,
};
use crate::validate;

#[async_trait]
impl Streams for RedisBackend {
    async fn append(
        &self,
        stream: &StreamName,
        entries: &[Fields],
        retention: &Retention,
    ) -> Result<Vec<EntryId>> {
        self.append_one(&AppendRequest { stream, entries: &entries, retention }).await
    }

    async fn append_many(&self, appends: &[AppendRequest<'_>]) -> Vec<Result<Vec<EntryId>>> {
        self.append_each(appends).await
    }

    async fn append_once(
        &self,
        stream: &StreamName,
        entries: &[IdempotentEntry],
        keep: Duration,
        retention: &Retention,
    ) -> Result<Vec<AppendedEntry>> {
        validate::append_once(entries, keep, retention)?;
        if entries.is_empty() {
            return self.client.check_open().map(|()| Vec::new());
        }
        self.append_new(stream, entries, keep, retention).await
    }

    async fn appended(&self, stream: &StreamName, ids: &[&str]) -> Result<Vec<Option<EntryId>>> {
        validate::idempotency_ids(ids)?;
        if ids.is_empty() {
            return self.client.check_open().map(|()| Vec::new());
        }
        let keys: Vec<Key<'_>> = ids.iter().map(|id| self.keys().once(stream, id)).collect();
        let mut commands = Commands::new();
        commands.begin(1 + keys.len());
        commands.arg("MGET");
        keys.iter().for_each(|key| commands.arg_key(key));
        let mut keys = keys.into_iter();
        let read = |reply: &mut Cursor<'_>| {
            let (key, text) = (keys.next(), reply.text_or_nil()?);
            let wrong_type = || StreamError::WrongType {
                name: key.map_or(String::new(), |key| key.to_string()),
            };
            let id = text.map(|text| parse_id(text).ok_or_else(wrong_type));
            Ok(id.transpose())
        };
        let found = self.call_idempotent(stream, commands, |reply| reply.list(read)).await?;
        found.into_iter().collect()
    }

    async fn ensure_group(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
    ) -> Result<bool> {
        let commands = create_group(self.keys(), stream, group, start);
        self.call_idempotent(stream, commands, |reply| Ok(reply.number()? == 1)).await
    }

    async fn ensure_group_if(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
        condition: GroupCondition<'_>,
    ) -> Result<bool> {
        let missing =
            || StreamError::NoGroup { stream: stream.to_string(), group: group.to_string() };
        match condition {
            GroupCondition::StreamOrMap { map, without } if self.slot(map) == self.slot(stream) => {
                let (keys, condition) = ([self.key(stream), self.key(map)], ["map", without]);
                self.create_group_if(stream, group, start, &keys, &condition)
                    .await?
                    .ok_or_else(missing)
            }
            _ => {
                let keys = [self.key(stream)];
                let created =
                    self.create_group_if(stream, group, start, &keys, &["stream"]).await?;
                match (created, condition) {
                    (Some(is_new), _) => Ok(is_new),
                    (None, GroupCondition::StreamExists) => Err(missing()),
                    (None, GroupCondition::StreamOrMap { map, without }) => self
                        .create_with_map(stream, group, start, (map, without))
                        .await?
                        .ok_or_else(missing),
                }
            }
        }
    }

    async fn remove_group(&self, stream: &StreamName, group: &GroupName) -> Result<bool> {
        let commands =
            Commands::on_key(&["XGROUP", "DESTROY"], &self.key(stream), &[group.as_str()]);
        let replies = self.call(stream, commands, Idempotency::AtMostOnce).await?;
        match replies.cursor().number() {
            Ok(removed) => Ok(removed > 0),
            Err(ReplyError::Server(error)) if error.is_no_key() => Ok(false),
            Err(error) => Err(error.into_stream_error(stream)),
        }
    }

    async fn reset_group(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
    ) -> Result<bool> {
        let args = [group.to_string(), start_id(start)];
        let commands = Commands::run(&scripts::RESET_GROUP, &[self.key(stream)], &args);
        self.call_once(stream, commands, |reply| Ok(reply.number()? > 0)).await
    }

    async fn reader(
        &self,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<Box<dyn GroupReader>> {
        self.client.check_open()?;
        Ok(Box::new(RedisGroupReader::new(&self.client, group, consumer)))
    }

    async fn disconnect_reader(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<DisconnectOutcome> {
        self.disconnect_consumer(stream, group, consumer).await
    }

    async fn tail(&self) -> Result<Box<dyn TailReader>> {
        self.client.check_open()?;
        Ok(Box::new(RedisTailReader::new(&self.client)))
    }

    async fn settle(&self, settle: SettleBatch<'_>) -> Result<SettleResult> {
        validate::settle(&settle)?;
        self.settle_entries(settle).await
    }

    async fn keep_alive(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
        ids: &[EntryId],
    ) -> Result<Vec<EntryId>> {
        validate::ids(ids)?;
        let mut commands = Commands::new();
        commands.script(&scripts::KEEP_ALIVE, &[self.key(stream)], 2 + ids.len());
        commands.arg(group.as_str());
        commands.arg(consumer.as_str());
        ids.iter().for_each(|id| commands.arg_id(*id));
        self.call_idempotent(stream, commands, |reply| reply.list(Cursor::id)).await
    }

    async fn reclaim(&self, reclaim: ReclaimRequest<'_>) -> Result<ReclaimResult> {
        validate::reclaim(&reclaim)?;
        let ReclaimRequest { stream, group, .. } = reclaim;
        if reclaim.after == Some(EntryId::MAX) && reclaim.from.ids().is_none() {
            return Ok(ReclaimResult::default());
        }
        let keys = self.keys_with_fence(stream, reclaim.fence)?;
        let from: &[&str] = match reclaim.from {
            ReclaimFrom::Anyone => &["anyone"],
            ReclaimFrom::Others => &["others"],
            ReclaimFrom::Consumer(consumer) => &["consumer", consumer.as_str()],
            ReclaimFrom::Ids(_) => &["ids"],
            ReclaimFrom::Own(_) => &["own"],
        };
        let ids = reclaim.from.ids().unwrap_or_default();
        let mut commands = Commands::new();
        commands.script(&scripts::RECLAIM, &keys, 6 + from.len() + ids.len());
        commands.arg(group.as_str());
        commands.arg(reclaim.consumer.as_str());
        commands.arg(epoch_text(reclaim.fence));
        commands.arg_number(millis(reclaim.min_idle));
        commands.arg(reclaim.after.map_or(String::new(), |id| id.to_string()));
        commands.arg_number(reclaim.count as u64);
        from.iter().for_each(|word| commands.arg(word));
        ids.iter().for_each(|id| commands.arg_id(*id));
        let replies = self.call_bulk(stream, commands, Idempotency::AtMostOnce).await?;
        read_reclaimed(&replies).map_err(|error| match error {
            ReplyError::Server(error) if error.is_fenced() => fenced(reclaim.fence),
            error => error.into_group_error(stream, group),
        })
    }

    async fn pending(&self, query: PendingDeliveryQuery<'_>) -> Result<Vec<PendingDelivery>> {
        validate::count(query.count)?;
        if query.after == Some(EntryId::MAX) {
            return Ok(Vec::new());
        }
        let mut words = vec![query.group.to_string()];
        if !query.min_idle.is_zero() {
            words.extend(["IDLE".to_owned(), millis(query.min_idle).to_string()]);
        }
        words.push(query.after.map_or("-".to_owned(), |id| format!("({id}")));
        words.extend(["+".to_owned(), query.count.to_string()]);
        words.extend(query.consumer.map(ToString::to_string));
        let commands = Commands::on_key(&["XPENDING"], &self.key(query.stream), &words);
        let replies = self.call(query.stream, commands, Idempotency::Idempotent).await?;
        let read = |reply: &mut Cursor<'_>| {
            reply.array_of(4)?;
            Ok(PendingDelivery {
                id: reply.id()?,
                consumer: sanitized_name(reply.text()?, ConsumerName::new)?,
                idle: Duration::from_millis(reply.count()?),
                deliveries: reply.count()?,
            })
        };
        let pending = replies.cursor().list(read);
        pending.map_err(|error| error.into_group_error(query.stream, query.group))
    }

    async fn range(&self, stream: &StreamName, range: Range) -> Result<Vec<Entry>> {
        validate::count(range.count)?;
        let (from, to, count) =
            (range.from.to_string(), range.to.to_string(), range.count.to_string());
        let (name, first, last) = match range.direction {
            Direction::Forward => ("XRANGE", &from, &to),
            Direction::Backward => ("XREVRANGE", &to, &from),
        };
        let words = [first.as_str(), last, "COUNT", &count];
        let commands = Commands::on_key(&[name], &self.key(stream), &words);
        let replies = self.call_bulk(stream, commands, Idempotency::Idempotent).await?;
        let entries = replies.cursor().list(Cursor::entry);
        let entries = entries.map_err(|error| error.into_stream_error(stream))?;
        let existing =
            |(id, fields): (EntryId, Option<Fields>)| Some(Entry { id, fields: fields? });
        Ok(entries.into_iter().filter_map(existing).collect())
    }

    async fn trim(
        &self,
        stream: &StreamName,
        retention: &Retention,
        guard: TrimGuard,
    ) -> Result<TrimResult> {
        validate::retention(retention)?;
        let mut commands = Commands::new();
        trim::add(&mut commands, self.key(stream), retention, guard, false);
        self.call_once(stream, commands, trim::read).await
    }

    async fn delete_entries(&self, stream: &StreamName, ids: &[EntryId]) -> Result<usize> {
        validate::ids(ids)?;
        if ids.is_empty() {
            return self.client.check_open().map(|()| 0);
        }
        let mut commands = Commands::new();
        commands.begin(2 + ids.len());
        commands.arg("XDEL");
        commands.arg_key(&self.key(stream));
        ids.iter().for_each(|id| commands.arg_id(*id));
        self.call_once(stream, commands, |reply| Ok(reply.count()? as usize)).await
    }

    async fn delete_stream(&self, stream: &StreamName) -> Result<bool> {
        self.delete(stream, "stream").await
    }

    async fn rename_stream(&self, from: &StreamName, to: &StreamName) -> Result<bool> {
        self.check_same_slot("the new name", from.as_str(), to.as_str())?;
        let keys = [self.key(from), self.key(to)];
        let commands = Commands::run(&scripts::RENAME, &keys, &[""; 0]);
        let replies = self.call(from, commands, Idempotency::AtMostOnce).await?;
        let renamed = replies.cursor().number().map_err(|error| error.into_stream_error(from))?;
        Ok(renamed > 0)
    }

    async fn stats(&self, stream: &StreamName) -> Result<Option<StreamStats>> {
        self.client.with_deadline(Duration::ZERO, self.stream_stats(stream)).await
    }

    async fn stats_without_lag(&self, stream: &StreamName) -> Result<Option<StreamStats>> {
        Ok(self.reported_stats(stream).await?.map(StreamStats::without_lag))
    }

    async fn remove_idle_consumers(
        &self,
        stream: &StreamName,
        group: &GroupName,
        idle: Duration,
    ) -> Result<Vec<ConsumerName>> {
        self.remove_consumers(stream, group, &[&millis(idle).to_string()]).await
    }

    async fn remove_consumer(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<bool> {
        let removed = self.remove_consumers(stream, group, &["0", consumer.as_str()]).await?;
        Ok(!removed.is_empty())
    }
}

impl RedisBackend {
    /// Adds a trim to an append if one is due. Returns whether it did.
    pub(super) fn add_trim(
        &self,
        commands: &mut Commands,
        stream: &StreamName,
        entries: usize,
        retention: &Retention,
    ) -> bool {
        let trims = self.trim_schedule.is_due(stream, entries, retention);
        if trims {
            trim::add(commands, self.key(stream), retention, TrimGuard::Safe, true);
        }
        trims
    }

    /// Removes consumers without pending entries. `which`: the minimum idle time, and optionally a name.
    async fn remove_consumers(
        &self,
        stream: &StreamName,
        group: &GroupName,
        which: &[&str],
    ) -> Result<Vec<ConsumerName>> {
        let args = [&[group.as_str()], which].concat();
        let commands = Commands::run(&scripts::REMOVE_IDLE, &[self.key(stream)], &args);
        let replies = self.call(stream, commands, Idempotency::AtMostOnce).await?;
        let name = |reply: &mut Cursor<'_>| sanitized_name(reply.text()?, ConsumerName::new);
        let mut names =
            replies.cursor().list(name).map_err(|error| error.into_group_error(stream, group))?;
        names.sort();
        Ok(names)
    }

    /// Creates a group under a condition of the script. Returns whether it is new; `None` if the condition does not hold.
    async fn create_group_if(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
        keys: &[Key<'_>],
        condition: &[&str],
    ) -> Result<Option<bool>> {
        let start = start_id(start);
        let args = [&[group.as_str(), &start], condition].concat();
        let commands = Commands::run(&scripts::CREATE_GROUP, keys, &args);
        let read = |reply: &mut Cursor<'_>| {
            let created = reply.number()?;
            Ok((created >= 0).then_some(created == 1))
        };
        self.call_idempotent(stream, commands, read).await
    }

    /// Creates a group and its stream if a map of another slot exists without this field; `None` if not. The map is
    /// checked again afterwards: it may have been deleted meanwhile, together with the stream.
    async fn create_with_map(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
        (map, without): (&MapName, &str),
    ) -> Result<Option<bool>> {
        let holds = async || {
            let fields = self.map_get(map).await?;
            Ok::<_, StreamError>(fields.is_some_and(|fields| !fields.contains_key(without)))
        };
        if !holds().await? {
            return Ok(None);
        }
        let is_new = self.ensure_group(stream, group, start).await?;
        if holds().await? {
            return Ok(Some(is_new));
        }
        if is_new {
            let (key, args) = (self.key(stream), [group.as_str()]);
            let commands = Commands::run(&scripts::DELETE_UNUSED, &[key], &args);
            self.call_idempotent(stream, commands, |reply| reply.number().map(drop)).await?;
        }
        Ok(None)
    }

    /// Deletes a key of the given type. Returns whether it existed.
    pub(super) async fn delete(&self, name: &(impl KeyName + Sync), kind: &str) -> Result<bool> {
        let commands = Commands::run(&scripts::DELETE, &[self.key(name)], &[kind]);
        self.call_once(name, commands, |reply| Ok(reply.number()? > 0)).await
    }
}

/// A command that creates a group, and its stream if it does not exist.
pub(super) fn create_group(
    keys: &Keyspace,
    stream: &StreamName,
    group: &GroupName,
    start: GroupStart,
) -> Commands {
    let args = [group.as_str(), &start_id(start), "always"];
    Commands::run(&scripts::CREATE_GROUP, &[keys.of(stream)], &args)
}

fn start_id(start: GroupStart) -> String {
    match start {
        GroupStart::Beginning => "0".to_owned(),
        GroupStart::End => "$".to_owned(),
        GroupStart::After(id) => id.to_string(),
    }
}

/// The error of a call with a stale fence.
pub(super) fn fenced(fence: Option<&crate::leases::Fence>) -> StreamError {
    match fence {
        Some(fence) => StreamError::Fenced { lease: fence.lease.to_string(), epoch: fence.epoch.0 },
        None => {
            StreamError::Protocol { problem: "HWFENCED reply to a call without a fence".to_owned() }
        }
    }
}

/// The epoch of a fence as a script argument; empty without a fence.
pub(super) fn epoch_text(fence: Option<&crate::leases::Fence>) -> String {
    fence.map_or(String::new(), |fence| fence.epoch.to_string())
}

/// Whole milliseconds.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn read_reclaimed(replies: &RespReplies) -> Result<ReclaimResult, ReplyError> {
    let mut cursor = replies.cursor();
    cursor.array_of(4)?;
    let entries = cursor.list(Cursor::entry)?;
    cursor.array_of(entries.len())?;
    let mut taken = Vec::with_capacity(entries.len());
    for (id, fields) in entries {
        let deliveries = cursor.count()?;
        let fields = fields.ok_or_else(|| ReplyError::unexpected("entry without fields"))?;
        taken.push(DeliveredEntry { id, fields, deliveries });
    }
    let deleted = cursor.list(Cursor::id)?;
    let next = match cursor.text_or_nil()? {
        None => None,
        Some(text) => Some(parse_id(text).ok_or_else(|| ReplyError::unexpected("invalid cursor"))?),
    };
    taken.sort_by_key(|delivery| delivery.id);
    Ok(ReclaimResult { entries: taken, deleted, next })
}
