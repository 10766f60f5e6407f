//! Settling: the end of deliveries, in one atomic step per stream.
//!
//! Promises: a follow-up is written before, or with, the acknowledgement; what cannot be written leaves the entry
//! pending. Where a follow-up lives in another slot of a cluster it is written first, so a crash in between gives a
//! duplicate, never a loss.

use std::collections::HashSet;
use std::time::Duration;

use super::RedisBackend;
use super::appends::add_appends;
use super::command::Commands;
use super::error::Failure;
use super::servers::Effect;
use super::streams::{epoch_text, fenced, list, millis};
use super::{keys, msgpack, scripts};
use crate::delays::Due;
use crate::entry::{EntryId, Fields};
use crate::error::{Result, StreamError};
use crate::leases::Fence;
use crate::name::StreamName;
use crate::streams::{Settle, Settled, Settlement, Then};

impl RedisBackend {
    pub(super) async fn settle_entries(&self, settle: Settle<'_>) -> Result<Settled> {
        if settle.entries.is_empty() && settle.fence.is_none() {
            return self.servers.check_open().map(|()| Settled::default());
        }
        let only_done = settle.entries.iter().all(|entry| matches!(entry.then, Then::Done));
        if only_done && settle.fence.is_none() {
            return self.acknowledge(&settle).await;
        }
        if let Some(fence) = settle.fence.filter(|_| only_done) {
            return self.acknowledge_fenced(&settle, fence).await;
        }
        let elsewhere = |entry: &&Settlement| match &entry.then {
            Then::Append { to, .. } => self.servers.slot(to.as_str()) != self.slot(settle.stream),
            _ => false,
        };
        if settle.entries.iter().any(|entry| elsewhere(&entry)) {
            let both = async {
                let copied = self.append_elsewhere(&settle, elsewhere).await?;
                self.run_script(&settle, Some(&copied)).await
            };
            return self.servers.in_time(Duration::ZERO, both).await;
        }
        self.run_script(&settle, None).await
    }

    /// The usual case: everything is done, and nobody asks under which lease.
    async fn acknowledge(&self, settle: &Settle<'_>) -> Result<Settled> {
        let mut commands = Commands::with_capacity(64 + settle.entries.len() * 28);
        commands.begin(3 + settle.entries.len());
        commands.arg("XACK");
        commands.arg(settle.stream.as_str());
        commands.arg(settle.group.as_str());
        settle.entries.iter().for_each(|entry| commands.arg_id(entry.id));
        let replies = self.call(settle.stream, commands, Effect::Once).await?;
        let applied = replies.cursor().count().map_err(|failure| failure.about(settle.stream))?;
        Ok(settled(applied, settle))
    }

    /// The usual case of an owner: everything is done, under its lease.
    async fn acknowledge_fenced(&self, settle: &Settle<'_>, fence: &Fence) -> Result<Settled> {
        let keys = self.keys_with_fence(settle.stream, Some(fence))?;
        let mut commands = Commands::with_capacity(256 + settle.entries.len() * 28);
        commands.script(&scripts::DONE, &keys, 2 + settle.entries.len());
        commands.arg(settle.group.as_str());
        commands.arg(epoch_text(settle.fence));
        settle.entries.iter().for_each(|entry| commands.arg_id(entry.id));
        let replies = self.call(settle.stream, commands, Effect::Once).await?;
        let applied = replies.cursor().count().map_err(|failure| refused(failure, settle))?;
        Ok(settled(applied, settle))
    }

    /// Everything else: one script. Entries in `copied` have their follow-up already.
    async fn run_script(
        &self,
        settle: &Settle<'_>,
        copied: Option<&HashSet<EntryId>>,
    ) -> Result<Settled> {
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
        commands.arg(keys::due_channel(self.database));
        for arg in args {
            match arg {
                Arg::Word(word) => commands.arg(word),
                Arg::Id(id) => commands.arg_id(id),
                Arg::Number(number) => commands.arg_number(number),
                Arg::Packed(bytes) => commands.arg(bytes),
            }
        }
        let replies = self.call(settle.stream, commands, Effect::Once).await?;
        let applied = replies.cursor().count().map_err(|failure| refused(failure, settle))?;
        Ok(settled(applied, settle))
    }

    fn add_entry<'a>(
        &self,
        settle: &Settle<'_>,
        entry: &'a Settlement,
        copied: Option<&HashSet<EntryId>>,
        keys: &mut Vec<String>,
        args: &mut Vec<Arg<'a>>,
    ) -> Result<()> {
        let id = Arg::Id(entry.id);
        match &entry.then {
            Then::Done => args.extend([Arg::Word("done"), id]),
            Then::Delete => args.extend([Arg::Word("delete"), id]),
            Then::Release => args.extend([Arg::Word("release"), id]),
            Then::Append { to, fields } => {
                if let Some(copied) = copied
                    && self.servers.slot(to.as_str()) != self.slot(settle.stream)
                {
                    if copied.contains(&entry.id) {
                        args.extend([Arg::Word("held"), id]);
                    }
                    return Ok(());
                }
                let key = position(keys, vec![to.to_string()]);
                let packed = Arg::Packed(msgpack::fields(fields));
                args.extend([Arg::Word("append"), id, Arg::Number(key), packed]);
            }
            Then::PutAside { delays, to, due, fields } => {
                self.must_share_slot("delays", settle.stream.as_str(), delays.as_str())?;
                self.must_share_slot("the stream it returns to", delays.as_str(), to.as_str())?;
                let key = position(keys, vec![delays.to_string(), keys::delay_entries(delays)]);
                let (kind, ms) = due_words(*due);
                args.extend([Arg::Word("aside"), id, Arg::Number(key), Arg::Word(kind)]);
                args.extend([Arg::Number(ms), Arg::Word(to.as_str())]);
                args.push(Arg::Packed(msgpack::target_and_fields(to.as_str(), fields)));
            }
        }
        Ok(())
    }

    /// Appends follow-ups that live in other slots, of entries that are in hand. Returns which those are.
    async fn append_elsewhere(
        &self,
        settle: &Settle<'_>,
        elsewhere: impl Fn(&&Settlement) -> bool,
    ) -> Result<HashSet<EntryId>> {
        let moving: Vec<&Settlement> = settle.entries.iter().filter(elsewhere).collect();
        let keys = self.keys_with_fence(settle.stream, settle.fence)?;
        let mut commands = Commands::new();
        commands.script(&scripts::HELD, &keys, 3 + moving.len());
        commands.arg(settle.group.as_str());
        commands.arg(settle.consumer.as_str());
        commands.arg(epoch_text(settle.fence));
        moving.iter().for_each(|entry| commands.arg_id(entry.id));
        let replies = self.call(settle.stream, commands, Effect::Repeatable).await?;
        let held =
            list(&replies, |cursor| cursor.id()).map_err(|failure| refused(failure, settle))?;
        let held: HashSet<EntryId> = held.into_iter().collect();

        let mut targets: Vec<(&StreamName, Vec<&Fields>)> = Vec::new();
        let mut seen = HashSet::new();
        for entry in moving {
            // An entry that is given twice has one follow-up.
            if !held.contains(&entry.id) || !seen.insert(entry.id) {
                continue;
            }
            if let Then::Append { to, fields } = &entry.then {
                match targets.iter_mut().find(|(target, _)| *target == to) {
                    Some((_, list)) => list.push(fields),
                    None => targets.push((to, vec![fields])),
                }
            }
        }
        for (target, all) in targets {
            let mut commands = Commands::new();
            add_appends(&mut commands, target, all.iter().copied());
            let replies = self.call(target, commands, Effect::Once).await?;
            let mut cursor = replies.cursor();
            for _ in all {
                cursor.id().map_err(|failure| failure.about(target))?;
            }
        }
        Ok(held)
    }

    /// The keys of a script: the stream, and the lease that is presented.
    pub(super) fn keys_with_fence(
        &self,
        stream: &StreamName,
        fence: Option<&Fence>,
    ) -> Result<Vec<String>> {
        let mut all = vec![stream.to_string()];
        if let Some(fence) = fence {
            self.must_share_slot("the fence", stream.as_str(), fence.lease.as_str())?;
            all.extend([fence.lease.to_string(), keys::epoch(&fence.lease)]);
        }
        Ok(all)
    }

    /// On a cluster, a script stays in one slot.
    pub(super) fn must_share_slot(&self, what: &str, base: &str, other: &str) -> Result<()> {
        if self.servers.slot(base) == self.servers.slot(other) {
            return Ok(());
        }
        Err(StreamError::invalid(
            what,
            format!(
                "on a Redis Cluster `{other}` must live in the slot of `{base}`; give both the same hash tag `{{…}}`"
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

/// How a script is told when something is due.
pub(super) fn due_words(due: Due) -> (&'static str, u64) {
    match due {
        Due::After(delay) => ("after", millis(delay)),
        Due::At(at) => ("at", at.as_millis()),
    }
}

/// The number, from 1, of the first of these keys, which are added if they are not there yet.
fn position(keys: &mut Vec<String>, wanted: Vec<String>) -> u64 {
    let len = wanted.len();
    let found = keys.windows(len).position(|window| window == wanted.as_slice());
    let index = found.unwrap_or_else(|| {
        keys.extend(wanted);
        keys.len() - len
    });
    index as u64 + 1
}

fn settled(applied: u64, settle: &Settle<'_>) -> Settled {
    let applied = (applied as usize).min(settle.entries.len());
    Settled { applied, stale: settle.entries.len() - applied }
}

fn refused(failure: Failure, settle: &Settle<'_>) -> StreamError {
    match failure {
        Failure::Refused(refusal) if refusal.is_fenced() => fenced(settle.fence),
        failure => failure.about(settle.stream),
    }
}
