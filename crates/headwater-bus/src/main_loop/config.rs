//! Settings of workers and clients of a main loop.

use std::time::Duration;

use headwater_queue::Backoff;
use headwater_stream::{KeeperConfig, Retention};

use crate::error::{BusError, Result};
use crate::limits::{CONCURRENT_REQUESTS_MAX, REPLY_TTL_MAX, RUN_TIMEOUT_MAX};

/// Settings of a [`MainLoopWorker`](crate::MainLoopWorker).
#[derive(Clone, Debug)]
pub struct MainLoopConfig {
    /// Requests carried out at once by this process. Default: 16, at most [`CONCURRENT_REQUESTS_MAX`].
    pub concurrency: usize,
    /// How often a request is tried before it has failed. Default: 3.
    pub max_attempts: u32,
    /// How many processes may die over a request, or lose their lock because it blocks them, before it has failed.
    /// Default: 3.
    pub max_crashes: u32,
    /// How long to wait before the next try. Default: 1 s doubling up to 60 s, with jitter.
    pub backoff: Backoff,
    /// How long a request may take, all its tries together, whatever its deadline. Default: 1 h, at most
    /// [`RUN_TIMEOUT_MAX`].
    pub run_timeout: Duration,
    /// How long stopping waits for requests that are being carried out; what is left is given back. Default: 25 s.
    pub drain: Duration,
    /// How the right to carry out a request is kept. Default: 15 s, renewed every 5 s.
    pub lease: KeeperConfig,
    /// How replies are kept.
    pub replies: ReplyConfig,
    /// How often replies are looked for whose time is up. Default: 10 min.
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
            lease: KeeperConfig::default(),
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
                let problem = format!("{time:?}; more than zero, at most {RUN_TIMEOUT_MAX:?}");
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

/// Tries of a request, and processes that may die over it.
const ATTEMPTS_MAX: u32 = 900;

// The queue below counts deliveries, too. It must not bury a request that still needs its reply.
const _: () = assert!(ATTEMPTS_MAX < headwater_queue::limits::ATTEMPTS_MAX);

/// Settings of a [`MainLoopClient`](crate::MainLoopClient).
#[derive(Clone, Debug)]
pub struct MainLoopClientConfig {
    /// How long to wait for a reply, if a request does not say. Default: 60 s; no longer than any reply is kept.
    pub timeout: Duration,
    /// How replies are kept that this client writes itself: those of requests it cancels.
    pub replies: ReplyConfig,
}

impl Default for MainLoopClientConfig {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(60), replies: ReplyConfig::default() }
    }
}

/// How replies are kept. The same for all workers and clients of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyConfig {
    /// How long a reply can be fetched, and for how long a second request with its id is known to be a second one.
    /// Default: 24 h; no shorter than a call of the backend may take, at most [`REPLY_TTL_MAX`].
    pub ttl: Duration,
    /// The newest so many replies to a requester are kept. Default: 10 000.
    pub max_len: u64,
    /// About how many bytes of replies to a requester are kept. Default: 256 MiB.
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
