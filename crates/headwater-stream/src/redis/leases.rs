//! Leases on Redis: the lease is a key that expires and holds its holder; beside it a record of the epoch and for
//! whom it began, which outlives the lease.
//!
//! A lease is held in an epoch while the key exists and its holder is the one of the record. So a lease that expired, was
//! released, or was taken by a program that knows no epochs fences at once.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::try_join_all;

use super::RedisBackend;
use super::command::Commands;
use super::error::Failure;
use super::reply::{Cursor, Replies, parse_digits};
use super::servers::Effect;
use super::streams::millis;
use super::watch::RedisLeaseWatch;
use super::{foreign_name, keys, scripts};
use crate::check;
use crate::error::{Result, StreamError};
use crate::leases::{Acquire, Epoch, Fence, LeaseInfo, LeaseWatch, Leases, Renewal};
use crate::limits::LEASE_TTL_MAX;
use crate::name::{HolderName, LeaseName};

/// How long an epoch is remembered at least. Epochs grow without it, too, as long as clocks do.
const RECORD_TTL_MIN: Duration = Duration::from_secs(24 * 60 * 60);
/// Leases in one script, so that none holds up the server for long.
const LEASES_AT_ONCE: usize = 500;

#[async_trait]
impl Leases for RedisBackend {
    async fn acquire(
        &self,
        lease: &LeaseName,
        holder: &HolderName,
        ttl: Duration,
    ) -> Result<Acquire> {
        check::lease_ttl(ttl)?;
        let keys = [lease.as_str(), &keys::epoch(lease)];
        let args = [holder.to_string(), millis(ttl).to_string(), record_ttl(ttl)];
        let commands = Commands::run(&scripts::ACQUIRE, &keys, &args);
        // Whoever holds the lease already gets the same epoch again, so a lost reply may be asked for twice.
        let replies = self.call(lease, commands, Effect::Repeatable).await?;
        read_acquire(&replies).map_err(|failure| failure.about(lease))
    }

    async fn renew(
        &self,
        holder: &HolderName,
        leases: &[Fence],
        ttl: Duration,
    ) -> Result<Vec<Renewal>> {
        check::renew(leases, ttl)?;
        let head = [holder.to_string(), millis(ttl).to_string(), record_ttl(ttl)];
        let add = |commands: &mut Commands, part: &[&Fence]| {
            commands.script(&scripts::RENEW, &keys_of(part), head.len() + part.len());
            head.iter().for_each(|arg| commands.arg(arg));
            part.iter().for_each(|fence| commands.arg_number(fence.epoch.0));
        };
        let read = |cursor: &mut Cursor<'_>| {
            Ok(if cursor.number()? == 1 { Renewal::Kept } else { Renewal::Lost })
        };
        self.for_leases(leases, |fence| &fence.lease, Effect::Repeatable, add, read).await
    }

    async fn release(&self, holder: &HolderName, leases: &[Fence]) -> Result<usize> {
        check::leases(leases.len())?;
        let channel = keys::released_channel(self.database);
        let add = |commands: &mut Commands, part: &[&Fence]| {
            commands.script(&scripts::RELEASE, &keys_of(part), 2 + part.len());
            commands.arg(holder.as_str());
            commands.arg(&channel);
            part.iter().for_each(|fence| commands.arg_number(fence.epoch.0));
        };
        let read = |cursor: &mut Cursor<'_>| Ok(cursor.number()? == 1);
        let released =
            self.for_leases(leases, |fence| &fence.lease, Effect::Once, add, read).await?;
        Ok(released.into_iter().filter(|released| *released).count())
    }

    async fn leases(&self, leases: &[LeaseName]) -> Result<Vec<Option<LeaseInfo>>> {
        check::leases(leases.len())?;
        let add = |commands: &mut Commands, part: &[&LeaseName]| {
            let keys: Vec<String> =
                part.iter().flat_map(|lease| [lease.to_string(), keys::epoch(lease)]).collect();
            commands.script(&scripts::LEASES, &keys, 0);
        };
        self.for_leases(leases, |lease| lease, Effect::Repeatable, add, read_info).await
    }

    async fn watch(&self, prefix: &str) -> Result<Box<dyn LeaseWatch>> {
        Ok(Box::new(RedisLeaseWatch::open(&self.servers, self.database, prefix).await?))
    }
}

impl RedisBackend {
    /// Runs a script over leases, some at a time: one round trip without a cluster, one per slot (at the same time)
    /// with it. The answers are in the order of `all`.
    async fn for_leases<T, A>(
        &self,
        all: &[T],
        lease: impl Fn(&T) -> &LeaseName,
        effect: Effect,
        add: impl Fn(&mut Commands, &[&T]),
        read: impl Fn(&mut Cursor<'_>) -> Result<A, Failure>,
    ) -> Result<Vec<A>> {
        if all.is_empty() {
            return self.servers.check_open().map(|()| Vec::new());
        }
        let mut order: Vec<(u16, usize)> =
            all.iter().enumerate().map(|(at, each)| (self.slot(lease(each)), at)).collect();
        // Stable within a slot, and without a cluster everything is in one.
        order.sort_unstable();
        let calls = order.chunk_by(|a, b| a.0 == b.0).map(|places| {
            let mut commands = Commands::new();
            let parts: Vec<&[(u16, usize)]> = places.chunks(LEASES_AT_ONCE).collect();
            for part in &parts {
                let part: Vec<&T> = part.iter().map(|(_, at)| &all[*at]).collect();
                add(&mut commands, &part);
            }
            async move {
                let replies = self.servers.call(places[0].0, commands, effect).await?;
                Ok::<_, StreamError>((parts, replies))
            }
        });
        let mut answers: Vec<Option<A>> = all.iter().map(|_| None).collect();
        for (parts, replies) in try_join_all(calls).await? {
            let mut cursor = replies.cursor();
            for part in parts {
                let about = |failure: Failure| failure.about(lease(&all[part[0].1]));
                cursor.array_of(part.len()).map_err(about)?;
                for (_, at) in part {
                    answers[*at] = Some(read(&mut cursor).map_err(about)?);
                }
            }
        }
        // Every place is in exactly one part.
        Ok(answers.into_iter().flatten().collect())
    }
}

fn keys_of(fences: &[&Fence]) -> Vec<String> {
    fences.iter().flat_map(|fence| [fence.lease.to_string(), keys::epoch(&fence.lease)]).collect()
}

fn record_ttl(ttl: Duration) -> String {
    millis(RECORD_TTL_MIN.max(ttl * 2)).to_string()
}

fn read_acquire(replies: &Replies) -> Result<Acquire, Failure> {
    let mut cursor = replies.cursor();
    cursor.array()?;
    if cursor.number()? == 1 {
        return Ok(Acquire::Won(Epoch(cursor.digits()?)));
    }
    let by = foreign_name(cursor.text()?, HolderName::new)?;
    Ok(Acquire::Held { by, remaining: remaining(cursor.number()?) })
}

fn read_info(cursor: &mut Cursor<'_>) -> Result<Option<LeaseInfo>, Failure> {
    if cursor.array_or_nil()?.is_none() {
        return Ok(None);
    }
    // Anything can lie under the key of a lease, and concerns no other lease.
    let holder =
        std::str::from_utf8(cursor.text()?).ok().and_then(|name| HolderName::new(name).ok());
    let epoch = parse_digits(cursor.text()?).ok_or_else(|| Failure::shape("no epoch"))?;
    let remaining = remaining(cursor.number()?);
    Ok(Some(match holder {
        Some(holder) => LeaseInfo { holder, epoch: Epoch(epoch), remaining },
        None => LeaseInfo::wrong_type(),
    }))
}

/// What is left of a lease. One that a foreign program set without an end counts as the longest there is.
fn remaining(ms: i64) -> Duration {
    match u64::try_from(ms) {
        Ok(ms) => Duration::from_millis(ms),
        Err(_) if ms == -1 => LEASE_TTL_MAX,
        Err(_) => Duration::ZERO,
    }
}
