//! Settings of a worker.

use std::sync::Arc;
use std::time::Duration;

use crate::claim::ClaimOptions;
use crate::error::{IssueError, Result};
use crate::limits::{CLAIM_TTL_DEFAULT, CONCURRENT_RUNS_MAX, RUN_EVENTS_DEFAULT};
use crate::retry_policy::IssueRetryPolicy;
use crate::step_observer::{NoStepObserver, StepObserver};

/// What to do with a run when a newer event of its issue arrives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnNewEvent {
    /// The run goes on; the event comes with the next one.
    #[default]
    Queue,
    /// The run is cancelled and begins anew with all events. What it had is thrown away.
    Supersede {
        /// How often in a row; then a run goes on to its end.
        times_max: u32,
    },
}

/// Settings of a worker.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// How this worker is called, unique per start. Default: `worker:HOST:PID:` and a random number.
    pub name: String,
    /// Issues that are handled at once. Default: 64; at most [`CONCURRENT_RUNS_MAX`].
    pub concurrency: usize,
    /// How long a claim lives without a heartbeat. Default: 60 s.
    pub claim_ttl: Duration,
    /// How often claims are renewed. Default: 15 s; at most a third of `claim_ttl`.
    pub heartbeat_every: Duration,
    /// Event logs in one run. Default: 200.
    pub events_max: usize,
    /// How long a handler may take; then the run is a failure. Default: 15 min.
    pub deadline: Duration,
    /// When and how often a failed run is tried again.
    pub retry: IssueRetryPolicy,
    /// What to do when a newer event arrives during a run. Default: the run goes on.
    pub on_new_event: OnNewEvent,
    /// How often to look for newer events, where runs are superseded. Default: 1 s.
    pub newer_events_every: Duration,
    /// How long stopping waits for handlers; what is left is given back without counting an attempt. Default: 25 s.
    pub drain: Duration,
    /// Shared transactions under way at once, for claims and for completions. Default: 2.
    pub calls_max: usize,
    /// Is told of every step. Default: nobody.
    pub step_observer: Arc<dyn StepObserver>,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            name: unique_name(),
            concurrency: 64,
            claim_ttl: CLAIM_TTL_DEFAULT,
            heartbeat_every: Duration::from_secs(15),
            events_max: RUN_EVENTS_DEFAULT,
            deadline: Duration::from_secs(15 * 60),
            retry: IssueRetryPolicy::default(),
            on_new_event: OnNewEvent::Queue,
            newer_events_every: Duration::from_secs(1),
            drain: Duration::from_secs(25),
            calls_max: 2,
            step_observer: Arc::new(NoStepObserver),
        }
    }
}

impl WorkerConfig {
    pub(crate) fn validate(&self) -> Result<()> {
        self.retry.validate()?;
        self.claim_options().validate()?;
        if !(1..=CONCURRENT_RUNS_MAX).contains(&self.concurrency) {
            let problem = format!("{}; 1 to {CONCURRENT_RUNS_MAX}", self.concurrency);
            return Err(IssueError::invalid("concurrency", problem));
        }
        // Two heartbeats may be lost before the claim is.
        if self.heartbeat_every.is_zero() || self.heartbeat_every * 3 > self.claim_ttl {
            let problem = format!("it is not within a third of claim_ttl {:?}", self.claim_ttl);
            return Err(IssueError::invalid("heartbeat_every", problem));
        }
        if self.newer_events_every.is_zero() || self.deadline.is_zero() {
            return Err(IssueError::invalid("newer_events_every or deadline", "it is zero"));
        }
        Ok(())
    }

    pub(crate) fn claim_options(&self) -> ClaimOptions {
        ClaimOptions {
            worker: self.name.clone(),
            ttl: self.claim_ttl,
            events_max: self.events_max,
            crashes_max: self.retry.crashes_max,
        }
    }

    /// How often claims are renewed and newer events looked for.
    pub(crate) fn renew_every(&self) -> Duration {
        match self.on_new_event {
            OnNewEvent::Queue => self.heartbeat_every,
            OnNewEvent::Supersede { .. } => self.heartbeat_every.min(self.newer_events_every),
        }
    }
}

/// Names of workers are compared over processes and over time, so a name is never used twice.
pub(crate) fn unique_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = match host.trim() {
        "" => "localhost",
        host => host,
    };
    format!("worker:{host}:{}:{:016x}", std::process::id(), crate::random::u64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_make_no_sense_are_refused_by_name() {
        let default = WorkerConfig::default;
        let minute = Duration::from_secs(60);
        for (name, config) in [
            ("concurrency", WorkerConfig { concurrency: 0, ..default() }),
            ("worker", WorkerConfig { name: String::new(), ..default() }),
            ("heartbeat_every", WorkerConfig { heartbeat_every: minute, ..default() }),
            ("events_max", WorkerConfig { events_max: 0, ..default() }),
            ("ttl", WorkerConfig { claim_ttl: Duration::ZERO, ..default() }),
        ] {
            let error = config.validate().expect_err(name).to_string();
            assert!(error.starts_with(name), "{error}");
        }
        assert!(default().validate().is_ok());
        assert_ne!(default().name, default().name);
    }
}
