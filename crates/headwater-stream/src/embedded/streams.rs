//! Implementation of [`Streams`]; longer calls are in `append`, `settle`, `pending` and `reader`.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::redo_record::RedoRecord;
use super::state::group::GroupState;
use super::transaction::{Durability, ReadTx};
use super::{Embedded, append, pending, reader, settle};
use crate::clock::Timestamp;
use crate::entry::{Entry, EntryId, Fields};
use crate::error::{Result, StreamError};
use crate::name::{ConsumerName, GroupName, StreamName};
use crate::streams::{
    AppendedEntry, ConsumerStats, Direction, DisconnectOutcome, GroupCondition, GroupReader,
    GroupStart, GroupStats, IdempotentEntry, PendingDelivery, PendingDeliveryQuery, Range,
    ReclaimRequest, ReclaimResult, Retention, SettleBatch, SettleResult, StreamStats, Streams,
    TailReader, TrimGuard, TrimResult,
};
use crate::validate;

#[async_trait]
impl Streams for Embedded {
    async fn append(
        &self,
        stream: &StreamName,
        entries: &[Fields],
        retention: &Retention,
    ) -> Result<Vec<EntryId>> {
        validate::append(&entries, retention)?;
        if entries.is_empty() {
            self.shared().ensure_open()?;
            return Ok(Vec::new());
        }
        let append = self
            .shared()
            .transact(Durability::Durable, |tx| append::append(tx, stream, entries, retention));
        append.await
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
            return self.shared().ensure_open().map(|()| Vec::new());
        }
        let append = self.shared().transact(Durability::Durable, |tx| {
            append::append_once(tx, stream, entries, keep, retention)
        });
        append.await
    }

    async fn appended(&self, stream: &StreamName, ids: &[&str]) -> Result<Vec<Option<EntryId>>> {
        validate::idempotency_ids(ids)?;
        self.shared().read(|tx| append::appended(tx, stream, ids)).await
    }

    async fn ensure_group(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
    ) -> Result<bool> {
        self.create_group(stream, group, start, None).await
    }

    async fn ensure_group_if(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
        condition: GroupCondition<'_>,
    ) -> Result<bool> {
        self.create_group(stream, group, start, Some(condition)).await
    }

    async fn remove_group(&self, stream: &StreamName, group: &GroupName) -> Result<bool> {
        let remove = self.shared().transact(Durability::Durable, |tx| {
            let exists = tx.state().group(stream, group, tx.now)?.is_some();
            if exists {
                let (stream, group) = (stream.as_str(), group.as_str());
                tx.apply(&RedoRecord::RemoveGroup { stream, group });
            }
            Ok(exists)
        });
        remove.await
    }

    async fn reset_group(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
    ) -> Result<bool> {
        let reset = self.shared().transact(Durability::Durable, |tx| {
            let Some((found, _)) = tx.state().group(stream, group, tx.now)? else {
                return Ok(false);
            };
            let after = start_after(start, found.last_id);
            let (stream, group) = (stream.as_str(), group.as_str());
            tx.apply(&RedoRecord::RemoveGroup { stream, group });
            tx.apply(&RedoRecord::CreateGroup { stream, group, after });
            Ok(true)
        });
        reset.await
    }

    async fn reader(
        &self,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<Box<dyn GroupReader>> {
        self.shared().ensure_open()?;
        Ok(Box::new(reader::EmbeddedGroupReader::new(Arc::clone(&self.engine), group, consumer)))
    }

    /// Only a blocked read can be in flight: any other read is one step under the lock.
    async fn disconnect_reader(
        &self,
        _stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<DisconnectOutcome> {
        let ended = self
            .shared()
            .transact_without_wait(|tx| Ok(tx.blocked_reads().cancel(group, consumer)))?;
        Ok(DisconnectOutcome::Disconnected { readers: ended })
    }

    async fn tail(&self) -> Result<Box<dyn TailReader>> {
        self.shared().ensure_open()?;
        Ok(Box::new(reader::EmbeddedTailReader::new(Arc::clone(&self.engine))))
    }

    async fn settle(&self, settle: SettleBatch<'_>) -> Result<SettleResult> {
        validate::settle(&settle)?;
        if settle.entries.is_empty() && settle.fence.is_none() {
            self.shared().ensure_open()?;
            return Ok(SettleResult::default());
        }
        self.shared().transact(Durability::Durable, |tx| settle::settle(tx, &settle)).await
    }

    async fn keep_alive(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
        ids: &[EntryId],
    ) -> Result<Vec<EntryId>> {
        validate::ids(ids)?;
        let keep = self.shared().transact(Durability::Written, |tx| {
            pending::keep_alive(tx, stream, group, consumer, ids)
        });
        keep.await
    }

    async fn reclaim(&self, reclaim: ReclaimRequest<'_>) -> Result<ReclaimResult> {
        validate::reclaim(&reclaim)?;
        self.shared().transact(Durability::Written, |tx| pending::reclaim(tx, &reclaim)).await
    }

    async fn pending(&self, query: PendingDeliveryQuery<'_>) -> Result<Vec<PendingDelivery>> {
        validate::count(query.count)?;
        self.shared().read(|tx| pending::list(tx, &query)).await
    }

    async fn range(&self, stream: &StreamName, range: Range) -> Result<Vec<Entry>> {
        validate::count(range.count)?;
        self.shared().read(|tx| entries_of(tx, stream, range)).await
    }

    async fn trim(
        &self,
        stream: &StreamName,
        retention: &Retention,
        guard: TrimGuard,
    ) -> Result<TrimResult> {
        validate::retention(retention)?;
        let trim = self
            .shared()
            .transact(Durability::Durable, |tx| append::trim(tx, stream, retention, guard));
        trim.await
    }

    async fn delete_entries(&self, stream: &StreamName, ids: &[EntryId]) -> Result<usize> {
        validate::ids(ids)?;
        if ids.is_empty() {
            return self.shared().ensure_open().map(|()| 0);
        }
        let delete = self.shared().transact(Durability::Durable, |tx| {
            let Some(found) = tx.state().stream(stream.as_str(), tx.now)? else {
                return Ok(0);
            };
            let mut present: Vec<EntryId> =
                ids.iter().copied().filter(|id| found.entries.contains(*id)).collect();
            present.sort_unstable();
            present.dedup();
            let count = present.len();
            if count > 0 {
                let (stream, ids) = (stream.as_str(), Cow::Owned(present));
                tx.apply(&RedoRecord::DeleteEntries { stream, ids });
            }
            Ok(count)
        });
        delete.await
    }

    async fn delete_stream(&self, stream: &StreamName) -> Result<bool> {
        let name = stream.as_str();
        self.remove(name, |tx| Ok(tx.state().stream(name, tx.now)?.is_some())).await
    }

    async fn rename_stream(&self, from: &StreamName, to: &StreamName) -> Result<bool> {
        let rename = self.shared().transact(Durability::Durable, |tx| {
            let exists = tx.state().stream(from.as_str(), tx.now)?.is_some();
            let target = tx.state().stream(to.as_str(), tx.now)?;
            if !exists || from == to || target.is_some_and(|target| target.entries.len() > 0) {
                return Ok(false);
            }
            if target.is_some() || tx.state().is_expired(to.as_str(), tx.now) {
                tx.apply(&RedoRecord::Remove { name: to.as_str() });
            }
            tx.apply(&RedoRecord::Rename { from: from.as_str(), to: to.as_str() });
            Ok(true)
        });
        rename.await
    }

    async fn stats(&self, stream: &StreamName) -> Result<Option<StreamStats>> {
        let stats = self.shared().read(|tx| {
            let Some(stream) = tx.state.stream(stream.as_str(), tx.now)? else {
                return Ok(None);
            };
            Ok(Some(StreamStats {
                length: stream.entries.len() as u64,
                first_id: stream.entries.first_id(),
                last_id: stream.entries.last_id(),
                last_generated_id: stream.last_id,
                entries_added: None,
                max_deleted_id: None,
                bytes: Some(stream.entries.bytes()),
                groups: stream.groups.values().map(|group| group_stats(group, tx.now)).collect(),
            }))
        });
        stats.await
    }

    async fn remove_idle_consumers(
        &self,
        stream: &StreamName,
        group: &GroupName,
        idle: Duration,
    ) -> Result<Vec<ConsumerName>> {
        let remove = self.shared().transact(Durability::Durable, |tx| {
            pending::remove_consumers(tx, stream, group, idle, None)
        });
        remove.await
    }

    async fn remove_consumer(
        &self,
        stream: &StreamName,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<bool> {
        let remove = self.shared().transact(Durability::Durable, |tx| {
            pending::remove_consumers(tx, stream, group, Duration::ZERO, Some(consumer))
        });
        Ok(!remove.await?.is_empty())
    }
}

impl Embedded {
    /// Creates a group unless it exists. Fails with `NoGroup` if the condition does not hold.
    async fn create_group(
        &self,
        stream: &StreamName,
        group: &GroupName,
        start: GroupStart,
        condition: Option<GroupCondition<'_>>,
    ) -> Result<bool> {
        let ensure = self.shared().transact(Durability::Durable, |tx| {
            let found = tx.state().stream(stream.as_str(), tx.now)?;
            if found.is_some_and(|stream| stream.groups.contains_key(group.as_str())) {
                return Ok(false);
            }
            let is_permitted = match condition {
                _ if found.is_some() => true,
                None => true,
                Some(GroupCondition::StreamExists) => false,
                Some(GroupCondition::StreamOrMap { map, without }) => {
                    let map = tx.state().map(map.as_str(), tx.now)?;
                    map.is_some_and(|fields| !fields.contains_key(without))
                }
            };
            if !is_permitted {
                let (stream, group) = (stream.to_string(), group.to_string());
                return Err(StreamError::NoGroup { stream, group });
            }
            let after = start_after(start, found.map_or(EntryId::MIN, |stream| stream.last_id));
            tx.remove_expired(stream.as_str());
            let (stream, group) = (stream.as_str(), group.as_str());
            tx.apply(&RedoRecord::CreateGroup { stream, group, after });
            Ok(true)
        });
        ensure.await
    }
}

fn start_after(start: GroupStart, last_id: EntryId) -> EntryId {
    match start {
        GroupStart::Beginning => EntryId::MIN,
        GroupStart::End => last_id,
        GroupStart::After(id) => id,
    }
}

fn entries_of(tx: &mut ReadTx<'_>, stream: &StreamName, range: Range) -> Result<Vec<Entry>> {
    let Some(stream) = tx.state.stream(stream.as_str(), tx.now)? else {
        return Ok(Vec::new());
    };
    let entry = |(id, fields): &(EntryId, Fields)| Entry { id: *id, fields: fields.clone() };
    let found: Vec<Entry> = match range.direction {
        Direction::Forward => {
            let entries = stream.entries.from(range.from).take_while(|(id, _)| *id <= range.to);
            entries.take(range.count).map(entry).collect()
        }
        Direction::Backward => {
            let entries =
                stream.entries.down_from(range.to).take_while(|(id, _)| *id >= range.from);
            entries.take(range.count).map(entry).collect()
        }
    };
    let newest = found.iter().map(|entry| entry.id).max();
    tx.visible_commit = newest.map_or(0, |newest| stream.commit_of(newest));
    Ok(found)
}

fn group_stats(group: &GroupState, now: Timestamp) -> GroupStats {
    let consumers = group.consumers.values().map(|consumer| ConsumerStats {
        name: consumer.name.clone(),
        pending: consumer.pending.len() as u64,
        idle: now.since(consumer.seen_at),
    });
    GroupStats {
        name: group.name.clone(),
        pending: group.pending.len() as u64,
        lag: Some(group.unread()),
        last_delivered: group.last_delivered,
        consumers: consumers.collect(),
    }
}
