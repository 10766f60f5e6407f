//! Leases on Redis: a key with an expiry whose value is the holder, and an epoch record (epoch and its holder) that outlives
//! it.
//!
//! An epoch is current while the key exists and its value is the holder in the record. So a lease that expired, was released,
//! or was taken by a program without epochs fences its old holder at once.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, timeout_at};

use super::RedisBackend;
use super::client::Idempotency;
use super::command::Commands;
use super::error::ReplyError;
use super::keys::Key;
use super::lease_watch::RedisLeaseWatch;
use super::reply::{Cursor, parse_digits};
use super::streams::millis;
use super::{sanitized_name, scripts};
use crate::error::{Result, StreamError};
use crate::leases::{
    AcquireResult, Epoch, Fence, LeaseInfo, LeaseWatch, Leases, OTHER_SERVERS_PART, Renewal,
};
use crate::limits::LEASE_TTL_MAX;
use crate::name::{HolderName, LeaseName};
use crate::validate;

/// Minimum lifetime of an epoch record. Without a record, epochs still increase as long as the server's clock does.
const RECORD_TTL_MIN: Duration = Duration::from_secs(24 * 60 * 60);
/// Leases per script call, so that no call blocks the server for long.
const LEASES_PER_SCRIPT: usize = 500;
/// How long the other servers of a cluster have after the first one has answered, so that a dead one delays no call.
const OTHERS_MAX: Duration = Duration::from_secs(1);

#[async_trait]
impl Leases for RedisBackend {
    async fn acquire(
        &self,
        lease: &LeaseName,
        holder: &HolderName,
        ttl: Duration,
    ) -> Result<AcquireResult> {
        validate::lease_ttl(ttl)?;
        let keys = self.keys().lease_with_epoch(lease);
        let args = [holder.to_string(), millis(ttl).to_string(), record_ttl(ttl)];
        let commands = Commands::run(&scripts::ACQUIRE, &keys, &args);
        // The current holder gets the same epoch again, so the call is idempotent.
        self.call_idempotent(lease, commands, read_acquire).await
    }

    async fn renew(
        &self,
        holder: &HolderName,
        leases: &[Fence],
        ttl: Duration,
    ) -> Result<Vec<Renewal>> {
        validate::renew(leases, ttl)?;
        let head = [holder.to_string(), millis(ttl).to_string(), record_ttl(ttl)];
        let add = |commands: &mut Commands, part: &[&Fence]| {
            commands.script(&scripts::RENEW, &self.keys_of(part), head.len() + part.len());
            head.iter().for_each(|arg| commands.arg(arg));
            part.iter().for_each(|fence| commands.arg_number(fence.epoch.0));
        };
        let read = |cursor: &mut Cursor<'_>| {
            Ok(if cursor.number()? == 1 { Renewal::Kept } else { Renewal::Lost })
        };
        // Well within the time that a renewal may take.
        let others = OTHERS_MAX.min(ttl / OTHER_SERVERS_PART);
        let renewals = self
            .for_leases(leases, |fence| &fence.lease, Idempotency::Idempotent, others, add, read)
            .await?;
        or_unknown(renewals, Renewal::Unknown)
    }

    async fn release(&self, holder: &HolderName, leases: &[Fence]) -> Result<usize> {
        validate::leases(leases.len())?;
        let add = |commands: &mut Commands, part: &[&Fence]| {
            commands.script(&scripts::RELEASE, &self.keys_of(part), 2 + part.len());
            commands.arg(holder.as_str());
            commands.arg(self.keys().released_channel());
            part.iter().for_each(|fence| commands.arg_number(fence.epoch.0));
        };
        let read = |cursor: &mut Cursor<'_>| Ok(cursor.number()? == 1);
        let released = self
            .for_leases(
                leases,
                |fence| &fence.lease,
                Idempotency::AtMostOnce,
                OTHERS_MAX,
                add,
                read,
            )
            .await?;
        match released {
            (_, Some(error)) => Err(error),
            (released, None) => Ok(released.into_iter().filter(|one| *one == Some(true)).count()),
        }
    }

    async fn leases(&self, leases: &[LeaseName]) -> Result<Vec<Option<LeaseInfo>>> {
        validate::leases(leases.len())?;
        let add = |commands: &mut Commands, part: &[&LeaseName]| {
            let keys: Vec<Key<'_>> =
                part.iter().flat_map(|lease| self.keys().lease_with_epoch(lease)).collect();
            commands.script(&scripts::LEASES, &keys, 0);
        };
        let found = self
            .for_leases(leases, |lease| lease, Idempotency::Idempotent, OTHERS_MAX, add, read_info)
            .await?;
        or_unknown(found, Some(LeaseInfo::unknown()))
    }

    async fn watch(&self, prefix: &str) -> Result<Box<dyn LeaseWatch>> {
        Ok(Box::new(RedisLeaseWatch::open(&self.client, prefix).await?))
    }
}

impl RedisBackend {
    fn keys_of<'a>(&'a self, fences: &[&'a Fence]) -> Vec<Key<'a>> {
        fences.iter().flat_map(|fence| self.keys().lease_with_epoch(&fence.lease)).collect()
    }

    /// Runs a script over leases in batches: one round trip in total, or one per slot (concurrently) on a cluster. The
    /// results are in the order of `all`; those of a slot whose call failed, or did not end within `others` after the first
    /// one, are `None`, with the last error.
    async fn for_leases<T, A>(
        &self,
        all: &[T],
        lease: impl Fn(&T) -> &LeaseName,
        idempotency: Idempotency,
        others: Duration,
        add: impl Fn(&mut Commands, &[&T]),
        read: impl Fn(&mut Cursor<'_>) -> Result<A, ReplyError>,
    ) -> Result<PartialResults<A>> {
        if all.is_empty() {
            return self.client.check_open().map(|()| (Vec::new(), None));
        }
        let mut order: Vec<(u16, usize)> =
            all.iter().enumerate().map(|(at, each)| (self.slot(lease(each)), at)).collect();
        // Without a cluster, all leases are in slot 0.
        order.sort_unstable();
        let mut calls: FuturesUnordered<_> = order
            .chunk_by(|a, b| a.0 == b.0)
            .map(|indexes| {
                let mut commands = Commands::new();
                let parts: Vec<&[(u16, usize)]> = indexes.chunks(LEASES_PER_SCRIPT).collect();
                for part in &parts {
                    let part: Vec<&T> = part.iter().map(|(_, at)| &all[*at]).collect();
                    add(&mut commands, &part);
                }
                async move {
                    let replies = self.client.call(indexes[0].0, commands, idempotency).await?;
                    Ok::<_, StreamError>((parts, replies))
                }
            })
            .collect();
        let mut results: Vec<Option<A>> = all.iter().map(|_| None).collect();
        let (mut failure, mut limit) = (None, None);
        loop {
            let called = match limit {
                None => calls.next().await,
                Some(limit) => match timeout_at(limit, calls.next()).await {
                    Ok(called) => called,
                    Err(late) => {
                        let problem = "a server of the cluster did not answer in time";
                        failure = Some(StreamError::unavailable(problem, late));
                        break;
                    }
                },
            };
            let Some(called) = called else { break };
            let (parts, replies) = match called {
                Ok(called) => called,
                Err(error) => {
                    failure = Some(error);
                    continue;
                }
            };
            limit.get_or_insert_with(|| Instant::now() + others);
            let mut cursor = replies.cursor();
            let read_all = || {
                for part in parts {
                    let map_error =
                        |error: ReplyError| error.into_stream_error(lease(&all[part[0].1]));
                    cursor.array_of(part.len()).map_err(map_error)?;
                    for (_, at) in part {
                        results[*at] = Some(read(&mut cursor).map_err(map_error)?);
                    }
                }
                Ok(())
            };
            // A server that rejects its part does not affect the leases of the others.
            if let Err(error) = read_all() {
                failure = Some(error);
            }
        }
        Ok((results, failure))
    }
}

/// One result per lease, and the error of those without one.
type PartialResults<A> = (Vec<Option<A>>, Option<StreamError>);

/// Fails if no lease has a result; otherwise those without one get `unknown`.
fn or_unknown<A: Clone>((results, failure): PartialResults<A>, unknown: A) -> Result<Vec<A>> {
    match failure {
        Some(error) if results.iter().all(Option::is_none) => Err(error),
        _ => Ok(results.into_iter().map(|one| one.unwrap_or_else(|| unknown.clone())).collect()),
    }
}

fn record_ttl(ttl: Duration) -> String {
    millis(RECORD_TTL_MIN.max(ttl * 2)).to_string()
}

fn read_acquire(cursor: &mut Cursor<'_>) -> Result<AcquireResult, ReplyError> {
    cursor.array()?;
    if cursor.number()? == 1 {
        return Ok(AcquireResult::Won(Epoch(cursor.digits()?)));
    }
    let by = sanitized_name(cursor.text()?, HolderName::new)?;
    Ok(AcquireResult::Held { by, remaining: remaining(cursor.number()?) })
}

fn read_info(cursor: &mut Cursor<'_>) -> Result<Option<LeaseInfo>, ReplyError> {
    if cursor.array_or_nil()?.is_none() {
        return Ok(None);
    }
    // An invalid value under one key must not fail the other leases.
    let holder =
        std::str::from_utf8(cursor.text()?).ok().and_then(|name| HolderName::new(name).ok());
    let epoch =
        parse_digits(cursor.text()?).ok_or_else(|| ReplyError::unexpected("expected an epoch"))?;
    let remaining = remaining(cursor.number()?);
    Ok(Some(match holder {
        Some(holder) => LeaseInfo { holder, epoch: Epoch(epoch), remaining },
        None => LeaseInfo::wrong_type(),
    }))
}

/// Remaining time of a lease. A key without expiry, set by another program, counts as the maximum.
fn remaining(ms: i64) -> Duration {
    match u64::try_from(ms) {
        Ok(ms) => Duration::from_millis(ms),
        Err(_) if ms == -1 => LEASE_TTL_MAX,
        Err(_) => Duration::ZERO,
    }
}
