//! Settings of workers and clients of a main loop.

use std::time::Duration;

use headwater_queue::Backoff;
use headwater_stream::{LeaseRenewerConfig, Retention};

use crate::error::{BusError, Result};
use crate::limits::{CONCURRENT_REQUESTS_MAX, REPLY_TTL_MAX, RUN_TIMEOUT_MAX};

/// Settings of a [`MainLoopWorker`](crate::MainLoopWorker).
#[derive(Clone, Debug)]
pub struct MainLoopConfig {
    /// Requests executed at once by this process. Default: 16, at most [`CONCURRENT_REQUESTS_MAX`].
    pub concurrency: usize,
    /// Attempts before a request fails. Default: 3.
    pub max_attempts: u32,
    /// Worker processes that may crash during a request, or lose its lock because it blocks them, before it fails.
    /// Default: 3.
    pub max_crashes: u32,
    /// Backoff between attempts. Default: 1 s doubling up to 60 s, with jitter.
    pub backoff: Backoff,
    /// Timeout of a request over all attempts, independent of its deadline. Default: 1 h, at most [`RUN_TIMEOUT_MAX`].
    pub run_timeout: Duration,
    /// How long stopping waits for running requests; the rest is released. Default: 25 s.
    pub drain: Duration,
    /// Lease settings of request locks. Default: 15 s, renewed every 5 s.
    pub lease: LeaseRenewerConfig,
    /// Retention of replies.
    pub replies: ReplyConfig,
    /// Interval of the sweep of expired replies. Default: 10 min.
    pub sweep_every: Duration,
}

impl Default for MainLoopConfig {
    fn default() -> Self {
        Self {
            concurrency: 16,
            max_attempts: 3,
            max_crashes: 3,
            backoff: Backoff::default(),
            run_timeout: Duration::from_secs(60 * 60),
            drain: Duration::from_secs(25),
            lease: LeaseRenewerConfig::default(),
            replies: ReplyConfig::default(),
            sweep_every: Duration::from_secs(10 * 60),
        }
    }
}

impl MainLoopConfig {
    pub(super) fn validate(&self) -> Result<()> {
        if !(1..=CONCURRENT_REQUESTS_MAX).contains(&self.concurrency) {
            let problem = format!("{}; 1 to {CONCURRENT_REQUESTS_MAX}", self.concurrency);
            return Err(BusError::invalid("concurrency", problem));
        }
        for (name, count) in
            [("max_attempts", self.max_attempts), ("max_crashes", self.max_crashes)]
        {
            if !(1..=ATTEMPTS_MAX).contains(&count) {
                return Err(BusError::invalid(name, format!("{count}; 1 to {ATTEMPTS_MAX}")));
            }
        }
        for (name, time) in [("run_timeout", self.run_timeout), ("sweep_every", self.sweep_every)] {
            if time.is_zero() || time > RUN_TIMEOUT_MAX {
                let problem =
                    format!("{time:?}; must be greater than zero and at most {RUN_TIMEOUT_MAX:?}");
                return Err(BusError::invalid(name, problem));
            }
        }
        if self.drain > RUN_TIMEOUT_MAX {
            return Err(BusError::invalid(
                "drain",
                format!("{:?}; at most {RUN_TIMEOUT_MAX:?}", self.drain),
            ));
        }
        self.lease.validate()?;
        self.replies.validate()
    }
}

/// Largest `max_attempts` and `max_crashes`.
const ATTEMPTS_MAX: u32 = 900;

// The queue counts deliveries, too. It must not dead-letter a request that still needs its reply.
const _: () = assert!(ATTEMPTS_MAX < headwater_queue::limits::ATTEMPTS_MAX);

/// Settings of a [`MainLoopClient`](crate::MainLoopClient).
#[derive(Clone, Debug)]
pub struct MainLoopClientConfig {
    /// Default timeout for a reply. Default: 60 s; limited by [`REPLY_TTL_MAX`].
    pub timeout: Duration,
    /// Retention of replies written by this client (cancellations).
    pub replies: ReplyConfig,
}

impl Default for MainLoopClientConfig {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(60), replies: ReplyConfig::default() }
    }
}

/// Retention of replies. Must be the same for all workers and clients of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyConfig {
    /// How long a reply can be fetched, and how long a repeated request id is recognized. Default: 24 h; at least the
    /// call deadline of the backend, at most [`REPLY_TTL_MAX`].
    pub ttl: Duration,
    /// Number of replies kept per requester. Default: 10 000.
    pub max_len: u64,
    /// Approximate bytes of replies kept per requester. Default: 256 MiB.
    pub max_bytes: u64,
}

impl Default for ReplyConfig {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(24 * 60 * 60),
            max_len: 10_000,
            max_bytes: 256 * 1024 * 1024,
        }
    }
}

impl ReplyConfig {
    pub(super) fn validate(&self) -> Result<()> {
        if self.ttl.as_millis() == 0 || self.ttl > REPLY_TTL_MAX {
            let problem = format!("{:?}; 1 ms to {REPLY_TTL_MAX:?}", self.ttl);
            return Err(BusError::invalid("ttl", problem));
        }
        for (name, number) in [("max_len", self.max_len), ("max_bytes", self.max_bytes)] {
            if number == 0 {
                return Err(BusError::invalid(name, "must be greater than zero"));
            }
        }
        Ok(())
    }

    pub(super) fn retention(&self) -> Retention {
        Retention {
            max_len: Some(self.max_len),
            max_age: Some(self.ttl),
            max_bytes: Some(self.max_bytes),
        }
    }
}
