//! Configuration of stream assignment, validated at the start.

use std::time::Duration;

use headwater_stream::limits::{BATCH_MAX, COUNT_MAX, LEASE_TTL_MAX, LEASE_TTL_MIN, LEASES_MAX};
use headwater_stream::{LeaseRenewerConfig, Result, StreamError};

/// Configuration of one consumer.
#[derive(Clone, Debug)]
pub struct AssignmentConfig {
    /// Maximum number of streams this process owns. Default: 1000. Limit: [`STREAMS_MAX`].
    pub streams_max: usize,
    /// Interval at which input entries are kept alive; a lease lasts twice as long and is renewed three times meanwhile.
    /// Default: 5 s. Limits: 25 ms to 12 h.
    pub heartbeat_every: Duration,
    /// Interval of the sweep over all pending entries. With at most `heartbeat_every`, fail-over does not depend
    /// on notifications. Default: 5 s. Limits: 10 ms to 1 h.
    pub sweep_every: Duration,
    /// What to do with a stream whose owner died. Default: announce it.
    pub on_expired: OnExpired,
    /// Owners that may die with a stream before it is dead-lettered. Default: 5. Limit: at least 1.
    pub owners_max: u64,
    /// Maximum number of new streams per read; small values spread streams better. Default: 16. Limit: 10 000.
    pub read_batch: usize,
    /// Capacity of the notification queue. While it is full, no new streams are acquired. Default: 1024. Limit:
    /// 1 million.
    pub notifications_max: usize,
    /// Whether owners above their fair share release idle streams. Default: off.
    pub rebalance: Rebalance,
}

/// What to do with a stream whose owner died.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnExpired {
    /// Send [`Expired`](crate::Notification::Expired); the program decides whether to claim it.
    #[default]
    Announce,
    /// Claim it if there is free capacity; it is sent as [`Added`](crate::Notification::Added).
    Claim,
}

/// Whether owners release streams so that consumers that join later get their share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rebalance {
    /// An owner keeps its streams.
    #[default]
    Off,
    /// An owner above its fair share (streams divided by live consumers, rounded up) releases up to `per_sweep`
    /// idle streams per sweep. A stream is idle while there is no guard from
    /// [`Owned::work`](crate::Owned::work).
    Idle {
        /// Maximum number of streams per sweep. Limit: 1 to 4096.
        per_sweep: usize,
    },
}

/// Limit of `streams_max`: one call renews all leases, including the member lease.
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

    /// Lease duration: two heartbeat intervals, as other programs on the same keys expect.
    pub fn lease_ttl(&self) -> Duration {
        self.heartbeat_every * 2
    }

    pub(crate) fn renewer(&self) -> LeaseRenewerConfig {
        let ttl = self.lease_ttl();
        LeaseRenewerConfig { ttl, renew_every: ttl / 3, safety_margin: ttl / 10 }
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
            format!("{value:?} is not between {min:?} and {max:?}"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_so_is_their_renewer_config() {
        let config = AssignmentConfig::default();
        config.validate().unwrap();
        config.renewer().validate().unwrap();
        let fastest =
            AssignmentConfig { heartbeat_every: Duration::from_millis(25), ..Default::default() };
        fastest.validate().unwrap();
        fastest.renewer().validate().unwrap();
    }

    #[test]
    fn the_error_names_a_setting_that_is_out_of_range() {
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
