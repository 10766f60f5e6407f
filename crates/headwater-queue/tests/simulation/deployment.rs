//! The servers of a simulation and their faults.
//!
//! A fail-over loses what was not replicated. To know what that may be, the replica first confirms everything before it
//! (`WAIT`), and is disconnected until the primary is dead: only what was written in between may be lost.

use std::ops::RangeInclusive;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use headwater_testkit::{Cluster, Persistence, Redis, Sentinel, wait_until};

use super::now_ms;

const LIMIT: Duration = Duration::from_secs(90);
/// How long a primary works without its replica before it is killed.
const UNREPLICATED_MAX: Duration = Duration::from_millis(700);
/// Pause between two attempts at a fail-over.
const RETRY_EVERY: Duration = Duration::from_millis(200);

/// When a primary wrote what its replica does not have, in milliseconds since 1970, and which partitions it had.
#[derive(Clone, Debug)]
pub(crate) struct LossWindow {
    pub(crate) cause: LossCause,
    pub(crate) times: RangeInclusive<u64>,
    pub(crate) partitions: Vec<u16>,
}

/// Why writes may be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LossCause {
    /// The primary was killed before its replica had them.
    FailOver,
    /// The primary was restarted and did not know of its successor. As long as that takes: a bound is not known.
    Restart,
}

impl LossWindow {
    pub(crate) fn duration(&self) -> Duration {
        Duration::from_millis(self.times.end().saturating_sub(*self.times.start()))
    }

    /// The longest one of a cause, if there is any.
    pub(crate) fn longest(windows: &[Self], cause: LossCause) -> Option<Duration> {
        windows.iter().filter(|window| window.cause == cause).map(Self::duration).max()
    }

    /// Whether a write that happened at some time of this range may be lost.
    pub(crate) fn overlaps(&self, writing: &RangeInclusive<u64>) -> bool {
        writing.start() <= self.times.end() && self.times.start() <= writing.end()
    }
}

pub(crate) enum Deployment {
    OneServer(Box<Redis>),
    Sentinel(Box<Sentinel>),
    Cluster(Cluster),
}

impl Deployment {
    /// One server. Confirmed writes survive `kill -9`.
    pub(crate) fn one_server() -> Result<Self> {
        Ok(Self::OneServer(Box::new(Redis::builder().persistence(Persistence::Always).start()?)))
    }

    /// A primary and a replica without persistence.
    pub(crate) fn sentinel() -> Result<Self> {
        Ok(Self::Sentinel(Box::new(Sentinel::start()?)))
    }

    /// Three primaries with a replica each, without persistence.
    pub(crate) fn cluster() -> Result<Self> {
        let cluster = Cluster::builder().setting("cluster-require-full-coverage", "no").start()?;
        Ok(Self::Cluster(cluster))
    }

    pub(crate) fn url(&self) -> String {
        match self {
            Self::OneServer(redis) => redis.url(),
            Self::Sentinel(sentinel) => sentinel.url(),
            Self::Cluster(cluster) => cluster.url(),
        }
    }

    /// The only server, which processes reach through proxies.
    pub(crate) fn one(&self) -> Option<&Redis> {
        match self {
            Self::OneServer(redis) => Some(redis),
            Self::Sentinel(_) | Self::Cluster(_) => None,
        }
    }

    fn nodes(&self) -> Vec<&Redis> {
        match self {
            Self::OneServer(redis) => vec![redis],
            Self::Sentinel(sentinel) => vec![sentinel.primary(), sentinel.replica()],
            Self::Cluster(cluster) => cluster.nodes().iter().collect(),
        }
    }

    /// Sets the memory limit of all servers that run; 0 is none.
    pub(crate) fn set_maxmemory(&self, bytes: u64) -> Result<()> {
        for node in self.nodes().into_iter().filter(|node| node.pid().is_ok()) {
            node.command(&["CONFIG", "SET", "maxmemory", &bytes.to_string()])?.ok()?;
        }
        Ok(())
    }

    /// Restarts dead servers. Returns when writes to a restarted one may be lost, if it was the primary that `killed` is about.
    ///
    /// A server of a cluster returns as the primary that it was. If it does not hear of its successor within two seconds, as on a
    /// busy machine, it takes writes from clients that do not know of it either, and discards them when it becomes a replica.
    pub(crate) fn heal(&self, killed: Option<&LossWindow>) -> Result<Option<LossWindow>> {
        let mut window = None;
        for node in self.nodes().into_iter().filter(|node| node.pid().is_err()) {
            let from = now_ms();
            node.restart()?;
            if let (Self::Cluster(_), Some(killed)) = (self, killed) {
                wait_until("a restarted primary to become a replica", LIMIT, || {
                    let info = node.command(&["INFO", "replication"]).map(|info| info.text());
                    info.is_ok_and(|info| info.contains("role:slave"))
                })?;
                let partitions = killed.partitions.clone();
                let (times, cause) = (from..=now_ms(), LossCause::Restart);
                window = Some(LossWindow { cause, times, partitions });
                println!("restarted: {window:?}");
            }
        }
        self.set_maxmemory(0)?;
        Ok(window)
    }

    /// The primary of a key and its replica.
    fn pair(&self, key: &str) -> Result<Option<(&Redis, &Redis)>> {
        Ok(match self {
            Self::OneServer(_) => None,
            Self::Sentinel(sentinel) => {
                let (one, other) = (sentinel.primary(), sentinel.replica());
                let is_one = sentinel.current_primary()? == one.addr();
                Some(if is_one { (one, other) } else { (other, one) })
            }
            Self::Cluster(cluster) => {
                let slot = cluster.slot_of(key)?;
                // After a fail-over it may not be listed yet.
                let replica = cluster.replica_of_slot(slot).ok();
                replica
                    .map(|replica| anyhow::Ok((cluster.primary_of_slot(slot)?, replica)))
                    .transpose()?
            }
        })
    }

    /// Kills the primary of a key; its replica takes over without what was written for a while. Waits for the replica to be
    /// ready, which takes some time after another fail-over. Returns when writes may be lost; `None` if the replica did
    /// not become ready, and nothing was done.
    pub(crate) fn fail_over(
        &self,
        streams: &[String],
        key: &str,
        time: Duration,
    ) -> Result<Option<LossWindow>> {
        let until = Instant::now() + LIMIT;
        loop {
            let window = self.try_fail_over(streams, key, time)?;
            if window.is_some() || Instant::now() >= until {
                return Ok(window);
            }
            sleep(RETRY_EVERY);
        }
    }

    fn try_fail_over(
        &self,
        streams: &[String],
        key: &str,
        time: Duration,
    ) -> Result<Option<LossWindow>> {
        let Some((primary, replica)) = self.pair(key)? else { return Ok(None) };
        let mut partitions = Vec::new();
        for (partition, stream) in streams.iter().enumerate() {
            let is_affected = match self {
                Self::Cluster(cluster) => {
                    let slot = cluster.slot_of(stream)?;
                    cluster.primary_of_slot(slot)?.port() == primary.port()
                }
                _ => true,
            };
            partitions.extend(is_affected.then_some(u16::try_from(partition)?));
        }
        let from = now_ms();
        // The confirmation covers everything that was written before on any connection.
        let mut connection = primary.connect()?;
        let is_written = connection.command(&["SET", &format!("mark:{key}"), "1"])?.ok().is_ok();
        let acknowledged = connection.command(&["WAIT", "1", "3000"])?.int();
        if !is_written || acknowledged != Some(1) {
            println!("no fail-over yet: the replica is not in sync");
            return Ok(None);
        }
        replica.pause()?;
        // What is written from here on does not reach the replica, not even a buffer that it reads when it continues.
        connection.command(&["CLIENT", "KILL", "TYPE", "replica"])?.ok()?;
        sleep(time.min(UNREPLICATED_MAX));
        let killed = primary.addr();
        primary.kill9()?;
        let (times, cause) = (from..=now_ms(), LossCause::FailOver);
        let window = LossWindow { cause, times, partitions };
        println!("{window:?}");
        replica.resume()?;
        wait_until("the replica to take over", LIMIT, || match self {
            Self::OneServer(_) => true,
            Self::Sentinel(sentinel) => {
                sentinel.current_primary().is_ok_and(|primary| primary != killed)
            }
            Self::Cluster(cluster) => cluster
                .slot_of(key)
                .and_then(|slot| cluster.primary_of_slot(slot))
                .is_ok_and(|primary| primary.addr() != killed),
        })?;
        if let Self::Cluster(cluster) = self {
            cluster.wait_until_ok(LIMIT)?;
        }
        Ok(Some(window))
    }

    /// Moves the slot of a key to the next primary.
    pub(crate) fn move_slot(&self, key: &str) -> Result<()> {
        let Self::Cluster(cluster) = self else { return Ok(()) };
        let slot = cluster.slot_of(key)?;
        let from = cluster.primary_of_slot(slot)?.port();
        // The primaries of slots a third of all apart.
        let mut to = None;
        for third in 0..3 {
            let primary = cluster.primary_of_slot(third * 5461 + 100)?;
            to = to.or((primary.port() != from).then_some(primary));
        }
        cluster.move_slot(slot, to.context("another primary")?)
    }
}
