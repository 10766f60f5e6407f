//! Settles delivered entries in one atomic step per stream.
//!
//! Guarantees: a follow-up is written before or with the acknowledgement; if it cannot be written, the entry stays pending.
//! A follow-up in another slot of a cluster is written first, once for each consumer however often it settles the entry; if the
//! consumer dies in between, the next one writes it again: a duplicate, never a loss.

use std::collections::HashSet;
use std::time::Duration;

use super::RedisBackend;
use super::client::Idempotency;
use super::command::Commands;
use super::error::ReplyError;
use super::keys::Key;
use super::reply::Cursor;
use super::streams::{epoch_text, fenced, millis};
use super::{keys, msgpack, scripts};
use crate::delays::DueTime;
use crate::entry::EntryId;
use crate::error::{Result, StreamError};
use crate::leases::Fence;
use crate::name::StreamName;
use crate::streams::{
    IdempotentEntry, Retention, SettleAction, SettleBatch, SettleResult, Settlement,
};

/// How long a server remembers that a follow-up was written. Longer than a consumer takes for two attempts, and not much longer: an
/// operator may let the consumer handle the entry again.
const FOLLOW_UP_ID_TTL: Duration = Duration::from_secs(60);

impl RedisBackend {
    pub(super) async fn settle_entries(&self, settle: SettleBatch<'_>) -> Result<SettleResult> {
        if settle.entries.is_empty() && settle.fence.is_none() {
            return self.client.check_open().map(|()| SettleResult::default());
        }
        let only_acks =
            settle.entries.iter().all(|entry| matches!(entry.action, SettleAction::Ack));
        if only_acks && settle.fence.is_none() {
            return self.acknowledge(&settle).await;
        }
        if let Some(fence) = settle.fence.filter(|_| only_acks) {
            return self.acknowledge_fenced(&settle, fence).await;
        }
        let elsewhere = |entry: &&Settlement| match &entry.action {
            SettleAction::Append { to, .. } => {
                self.client.slot(to.as_str()) != self.slot(settle.stream)
            }
            _ => false,
        };
        if settle.entries.iter().any(|entry| elsewhere(&entry)) {
            let both = async {
                let copied = self.append_follow_ups(&settle, elsewhere).await?;
                self.run_script(&settle, Some(&copied)).await
            };
            return self.client.with_deadline(Duration::ZERO, both).await;
        }
        self.run_script(&settle, None).await
    }

    /// Fast path: all entries are acknowledged, without a fence.
    async fn acknowledge(&self, settle: &SettleBatch<'_>) -> Result<SettleResult> {
        let mut commands = Commands::with_capacity(64 + settle.entries.len() * 28);
        commands.begin(3 + settle.entries.len());
        commands.arg("XACK");
        commands.arg_key(&self.key(settle.stream));
        commands.arg(settle.group.as_str());
        settle.entries.iter().for_each(|entry| commands.arg_id(entry.id));
        self.settle_with(settle, commands).await
    }

    /// Fast path of an owner: all entries are acknowledged, with a fence.
    async fn acknowledge_fenced(
        &self,
        settle: &SettleBatch<'_>,
        fence: &Fence,
    ) -> Result<SettleResult> {
        let keys = self.keys_with_fence(settle.stream, Some(fence))?;
        let mut commands = Commands::with_capacity(256 + settle.entries.len() * 28);
        commands.script(&scripts::ACK_FENCED, &keys, 2 + settle.entries.len());
        commands.arg(settle.group.as_str());
        commands.arg(epoch_text(settle.fence));
        settle.entries.iter().for_each(|entry| commands.arg_id(entry.id));
        self.settle_with(settle, commands).await
    }

    /// General case: one script. The follow-ups of entries in `copied` are already written.
    async fn run_script(
        &self,
        settle: &SettleBatch<'_>,
        copied: Option<&HashSet<EntryId>>,
    ) -> Result<SettleResult> {
        let mut keys = self.keys_with_fence(settle.stream, settle.fence)?;
        let mut args: Vec<Arg<'_>> = Vec::with_capacity(3 + settle.entries.len() * 2);
        for entry in settle.entries {
            self.add_entry(settle, entry, copied, &mut keys, &mut args)?;
        }
        let mut commands = Commands::new();
        commands.script(&scripts::SETTLE, &keys, 4 + args.len());
        commands.arg(settle.group.as_str());
        commands.arg(settle.consumer.as_str());
        commands.arg(epoch_text(settle.fence));
        commands.arg(self.keys().due_channel());
        for arg in args {
            match arg {
                Arg::Word(word) => commands.arg(word),
                Arg::Id(id) => commands.arg_id(id),
                Arg::Number(number) => commands.arg_number(number),
                Arg::Packed(bytes) => commands.arg(bytes),
            }
        }
        self.settle_with(settle, commands).await
    }

    /// Sends a command that returns how many entries it settled.
    async fn settle_with(
        &self,
        settle: &SettleBatch<'_>,
        commands: Commands,
    ) -> Result<SettleResult> {
        let replies = self.call(settle.stream, commands, Idempotency::AtMostOnce).await?;
        let applied = replies.cursor().count().map_err(|error| settle_error(error, settle))?;
        let applied = (applied as usize).min(settle.entries.len());
        Ok(SettleResult { applied, stale: settle.entries.len() - applied })
    }

    fn add_entry<'a>(
        &'a self,
        settle: &SettleBatch<'_>,
        entry: &'a Settlement,
        copied: Option<&HashSet<EntryId>>,
        keys: &mut Vec<Key<'a>>,
        args: &mut Vec<Arg<'a>>,
    ) -> Result<()> {
        let id = Arg::Id(entry.id);
        match &entry.action {
            SettleAction::Ack => args.extend([Arg::Word("ack"), id]),
            SettleAction::Delete => args.extend([Arg::Word("delete"), id]),
            SettleAction::Release => args.extend([Arg::Word("release"), id]),
            SettleAction::Append { to, fields } => {
                if let Some(copied) = copied
                    && self.client.slot(to.as_str()) != self.slot(settle.stream)
                {
                    if copied.contains(&entry.id) {
                        args.extend([Arg::Word("ack_owned"), id]);
                    }
                    return Ok(());
                }
                let key = key_index(keys, [self.key(to)]);
                let packed = Arg::Packed(msgpack::fields(fields));
                args.extend([Arg::Word("append"), id, Arg::Number(key), packed]);
            }
            SettleAction::Reschedule { delays, to, due, fields } => {
                self.check_same_slot("delays", settle.stream.as_str(), delays.as_str())?;
                self.check_same_slot("the target stream", delays.as_str(), to.as_str())?;
                let key = key_index(keys, self.keys().delay_set(delays));
                let (kind, ms) = due_args(*due);
                args.extend([Arg::Word("reschedule"), id, Arg::Number(key), Arg::Word(kind)]);
                // A name, not a key: the one who promotes the entry makes the key.
                args.extend([Arg::Number(ms), Arg::Word(to.as_str())]);
                args.push(Arg::Packed(msgpack::target_and_fields(to.as_str(), fields)));
            }
        }
        Ok(())
    }

    /// Appends the follow-ups that belong to other slots, for entries still pending for the consumer. Returns those entries.
    async fn append_follow_ups(
        &self,
        settle: &SettleBatch<'_>,
        elsewhere: impl Fn(&&Settlement) -> bool,
    ) -> Result<HashSet<EntryId>> {
        let moving: Vec<&Settlement> = settle.entries.iter().filter(elsewhere).collect();
        let keys = self.keys_with_fence(settle.stream, settle.fence)?;
        let mut commands = Commands::new();
        commands.script(&scripts::OWNED_PENDING, &keys, 3 + moving.len());
        commands.arg(settle.group.as_str());
        commands.arg(settle.consumer.as_str());
        commands.arg(epoch_text(settle.fence));
        moving.iter().for_each(|entry| commands.arg_id(entry.id));
        let replies = self.call(settle.stream, commands, Idempotency::Idempotent).await?;
        let held =
            replies.cursor().list(Cursor::id).map_err(|error| settle_error(error, settle))?;
        let held: HashSet<EntryId> = held.into_iter().collect();

        let mut targets: Vec<(&StreamName, Vec<IdempotentEntry>)> = Vec::new();
        let mut seen = HashSet::new();
        for entry in moving {
            // An entry listed twice gets one follow-up.
            if !held.contains(&entry.id) || !seen.insert(entry.id) {
                continue;
            }
            if let SettleAction::Append { to, fields } = &entry.action {
                let id = keys::follow_up_id(settle, entry.id);
                let follow_up = IdempotentEntry { id, fields: fields.clone() };
                match targets.iter_mut().find(|(target, _)| *target == to) {
                    Some((_, list)) => list.push(follow_up),
                    None => targets.push((to, vec![follow_up])),
                }
            }
        }
        for (target, follow_ups) in targets {
            self.append_new(target, &follow_ups, FOLLOW_UP_ID_TTL, &Retention::KEEP_ALL).await?;
        }
        Ok(held)
    }

    /// The keys of a script: the stream, and the lease with its epoch record if there is a fence.
    pub(super) fn keys_with_fence<'a>(
        &'a self,
        stream: &'a StreamName,
        fence: Option<&'a Fence>,
    ) -> Result<Vec<Key<'a>>> {
        let mut all = vec![self.key(stream)];
        if let Some(fence) = fence {
            self.check_same_slot("the fence", stream.as_str(), fence.lease.as_str())?;
            all.extend(self.keys().lease_with_epoch(&fence.lease));
        }
        Ok(all)
    }

    /// Fails on a cluster if the two keys are in different slots: a script is limited to one.
    pub(super) fn check_same_slot(&self, what: &str, base: &str, other: &str) -> Result<()> {
        if self.client.slot(base) == self.client.slot(other) {
            return Ok(());
        }
        Err(StreamError::invalid(
            what,
            format!(
                "on a Redis Cluster `{other}` must be in the slot of `{base}`; give both the same hash tag `{{…}}`"
            ),
        ))
    }
}

/// One argument of the script.
enum Arg<'a> {
    Word(&'a str),
    Id(EntryId),
    Number(u64),
    Packed(Vec<u8>),
}

/// A due time as script arguments.
pub(super) fn due_args(due: DueTime) -> (&'static str, u64) {
    match due {
        DueTime::After(delay) => ("after", millis(delay)),
        DueTime::At(at) => ("at", at.as_millis()),
    }
}

/// The 1-based index of the first of these keys; they are added if missing.
fn key_index<'a, const N: usize>(keys: &mut Vec<Key<'a>>, wanted: [Key<'a>; N]) -> u64 {
    let found = keys.windows(N).position(|window| window == wanted);
    let index = found.unwrap_or_else(|| {
        keys.extend(wanted);
        keys.len() - N
    });
    index as u64 + 1
}

fn settle_error(error: ReplyError, settle: &SettleBatch<'_>) -> StreamError {
    match error {
        ReplyError::Server(error) if error.is_fenced() => fenced(settle.fence),
        error => error.into_stream_error(settle.stream),
    }
}
