//! Settings of stream assignment, checked once at the start.

use std::time::Duration;

use headwater_stream::limits::{BATCH_MAX, COUNT_MAX, LEASE_TTL_MAX, LEASE_TTL_MIN, LEASES_MAX};
use headwater_stream::{KeeperConfig, Result, StreamError};

/// How a process takes part in a service.
#[derive(Clone, Debug)]
pub struct AssignmentConfig {
    /// How many streams this process owns at most. Default: 1000. Limit: [`STREAMS_MAX`].
    pub streams_max: usize,
    /// How often ownership is renewed; a lease lives twice as long. Default: 5 s. Limits: 25 ms to 12 h.
    pub heartbeat_every: Duration,
    /// How often everything pending is looked through for what notifications missed. Up to `heartbeat_every`, fail-over
    /// needs no notifications to be in time. Default: 5 s. Limits: 10 ms to 1 h.
    pub sweep_every: Duration,
    /// What to do with a stream whose owner died. Default: announce it.
    pub on_expired: OnExpired,
    /// How many owners a stream may wear out before it goes to the dead letters. Default: 5. Limit: at least 1.
    pub owners_max: u64,
    /// How many new streams one read takes at most; small numbers spread them better. Default: 16. Limit: 10 000.
    pub read_batch: usize,
    /// How many notifications wait for a slow reader before no new streams are taken. Default: 1024. Limit: 1 million.
    pub notifications_max: usize,
    /// Whether owners above their fair share give idle streams away. Default: off.
    pub rebalance: Rebalance,
}

/// What to do with a stream whose owner died.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnExpired {
    /// Say [`Expired`](crate::Notification::Expired) and leave it to the program to claim it.
    #[default]
    Announce,
    /// Claim it while there is room; it comes as [`Added`](crate::Notification::Added).
    Claim,
}

/// Whether owners give streams away so that late joiners get their share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rebalance {
    /// An owner keeps what it has.
    #[default]
    Off,
    /// An owner above its fair share (streams by live consumers, rounded up) gives up to `per_sweep` idle streams away
    /// with each sweep. A stream is idle while nobody holds an [`Owned::work`](crate::Owned::work).
    Idle {
        /// How many streams at once. Limit: 1 to 4096.
        per_sweep: usize,
    },
}

/// Streams one process can own: one call renews them all, beside the lease that shows the process is alive.
pub const STREAMS_MAX: usize = LEASES_MAX - 1;

const NOTIFICATIONS_MAX: usize = 1_000_000;
const SWEEP_MIN: Duration = Duration::from_millis(10);
const SWEEP_MAX: Duration = Duration::from_secs(60 * 60);
const HEARTBEAT_MAX: Duration = Duration::from_secs(12 * 60 * 60);

impl Default for AssignmentConfig {
    fn default() -> Self {
        Self {
            streams_max: 1000,
            heartbeat_every: Duration::from_secs(5),
            sweep_every: Duration::from_secs(5),
            on_expired: OnExpired::default(),
            owners_max: 5,
            read_batch: 16,
            notifications_max: 1024,
            rebalance: Rebalance::default(),
        }
    }
}

impl AssignmentConfig {
    /// Checks that every setting is within its limits.
    pub fn validate(&self) -> Result<()> {
        within("streams_max", self.streams_max, 1, STREAMS_MAX)?;
        within("read_batch", self.read_batch, 1, COUNT_MAX)?;
        within("notifications_max", self.notifications_max, 1, NOTIFICATIONS_MAX)?;
        within("owners_max", self.owners_max, 1, u64::MAX)?;
        within("sweep_every", self.sweep_every, SWEEP_MIN, SWEEP_MAX)?;
        within("heartbeat_every", self.heartbeat_every, Duration::ZERO, HEARTBEAT_MAX)?;
        if let Rebalance::Idle { per_sweep } = self.rebalance {
            within("rebalance.per_sweep", per_sweep, 1, BATCH_MAX)?;
        }
        within("ttl", self.lease_ttl(), LEASE_TTL_MIN, LEASE_TTL_MAX)
    }

    /// How long a lease lives without a heartbeat: two intervals, as other programs on the same keys expect.
    pub fn lease_ttl(&self) -> Duration {
        self.heartbeat_every * 2
    }

    /// Renewal is driven by the heartbeat, not by the keeper; its own interval only has to be plausible.
    pub(crate) fn keeper(&self) -> KeeperConfig {
        let ttl = self.lease_ttl();
        KeeperConfig { ttl, renew_every: ttl / 3, margin: ttl / 10 }
    }
}

fn within<T: Copy + PartialOrd + std::fmt::Debug>(
    what: &str,
    value: T,
    min: T,
    max: T,
) -> Result<()> {
    if value < min || value > max {
        return Err(StreamError::invalid(
            what,
            format!("{value:?} is outside of {min:?} to {max:?}"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_so_is_the_keeper_they_give() {
        let config = AssignmentConfig::default();
        config.validate().unwrap();
        config.keeper().validate().unwrap();
        let fastest =
            AssignmentConfig { heartbeat_every: Duration::from_millis(25), ..Default::default() };
        fastest.validate().unwrap();
        fastest.keeper().validate().unwrap();
    }

    #[test]
    fn a_setting_out_of_its_limits_is_named() {
        let good = AssignmentConfig::default;
        for (what, config) in [
            ("streams_max", AssignmentConfig { streams_max: 0, ..good() }),
            ("streams_max", AssignmentConfig { streams_max: STREAMS_MAX + 1, ..good() }),
            ("ttl", AssignmentConfig { heartbeat_every: Duration::from_millis(24), ..good() }),
            ("sweep_every", AssignmentConfig { sweep_every: Duration::ZERO, ..good() }),
            ("owners_max", AssignmentConfig { owners_max: 0, ..good() }),
            ("read_batch", AssignmentConfig { read_batch: 0, ..good() }),
            ("notifications_max", AssignmentConfig { notifications_max: 0, ..good() }),
            (
                "rebalance.per_sweep",
                AssignmentConfig { rebalance: Rebalance::Idle { per_sweep: 0 }, ..good() },
            ),
        ] {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.starts_with(what), "{error}");
        }
    }
}
