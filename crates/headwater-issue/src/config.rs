//! Configuration of the worker and of the outbox.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{process_name, start_id};

use crate::claim::ClaimOptions;
use crate::error::{IssueError, Result};
use crate::limits::{
    CLAIM_TTL_DEFAULT, CONCURRENT_DELIVERIES_MAX, CONCURRENT_RUNS_MAX, RUN_EVENTS_DEFAULT,
};
use crate::retry_policy::IssueRetryPolicy;
use crate::step_observer::{NoStepObserver, StepObserver};

/// What happens to a run when a newer event of its issue arrives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnNewEvent {
    /// The run continues; the event is in the next run.
    #[default]
    Queue,
    /// The run is stale: it is cancelled, its result is discarded, and a new run starts with all events.
    Supersede {
        /// Maximum number of consecutive cancellations; the next run continues to its end.
        times_max: u32,
    },
}

/// Configuration of a worker.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Name of the worker, unique per start. Default: `worker:HOST:PID:` and a random number.
    pub name: String,
    /// Maximum number of concurrent runs. Default: 64; at most [`CONCURRENT_RUNS_MAX`].
    pub concurrency: usize,
    /// Runs in flight beyond `concurrency`: claimed before a handler is free, or handled and not yet committed. Larger batches
    /// make fast handlers faster, up to about 4 times [`BATCH_MAX`](crate::limits::BATCH_MAX). With slow handlers an issue
    /// would wait here although another worker is free, and the wait counts for `deadline`. Default: 0; with `concurrency`
    /// at most [`CONCURRENT_RUNS_MAX`].
    pub claim_ahead: usize,
    /// TTL of a claim without a heartbeat. Default: 60 s.
    pub claim_ttl: Duration,
    /// Interval of claim renewals. Default: 15 s; at most a third of `claim_ttl`.
    pub heartbeat_every: Duration,
    /// Maximum number of event logs in one run. Default: 200.
    pub events_max: usize,
    /// Timeout of a handler; exceeding it is a failure. Default: 15 min.
    pub deadline: Duration,
    /// Retry policy of failed runs.
    pub retry: IssueRetryPolicy,
    /// What happens when a newer event arrives during a run. Default: the run continues.
    pub on_new_event: OnNewEvent,
    /// Interval of checks for newer events, one read for all runs, with [`OnNewEvent::Supersede`]. Default: 1 s.
    pub newer_events_every: Duration,
    /// How long a shutdown waits for handlers. Then they are cancelled, and their claims are released without counting
    /// an attempt. Default: 25 s.
    pub drain: Duration,
    /// Concurrent batched calls, for claims and for completions each. Default: 2.
    pub calls_max: usize,
    /// Observer of processing steps, for tests. Default: none.
    pub step_observer: Arc<dyn StepObserver>,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            name: unique_name(),
            concurrency: 64,
            claim_ahead: 0,
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
        concurrency(self.concurrency, CONCURRENT_RUNS_MAX)?;
        if self.in_flight_max() > CONCURRENT_RUNS_MAX {
            let problem = format!("with `concurrency` must be at most {CONCURRENT_RUNS_MAX}");
            return Err(IssueError::invalid("claim_ahead", problem));
        }
        // Two renewals may fail before the claim is lost.
        if self.heartbeat_every.is_zero() || self.heartbeat_every * 3 > self.claim_ttl {
            let problem =
                format!("must be at most a third of `claim_ttl`, which is {:?}", self.claim_ttl);
            return Err(IssueError::invalid("heartbeat_every", problem));
        }
        if self.newer_events_every.is_zero() || self.deadline.is_zero() {
            return Err(IssueError::invalid(
                "newer_events_every or deadline",
                "must be greater than zero",
            ));
        }
        Ok(())
    }

    /// Runs in flight, claimed or handled.
    pub(crate) fn in_flight_max(&self) -> usize {
        self.concurrency.saturating_add(self.claim_ahead)
    }

    pub(crate) fn claim_options(&self) -> ClaimOptions {
        ClaimOptions {
            worker: self.name.clone(),
            ttl: self.claim_ttl,
            events_max: self.events_max,
            crashes_max: self.retry.crashes_max,
        }
    }

    /// Interval of checks for newer events, lapsed claims and due renewals.
    pub(crate) fn check_every(&self) -> Duration {
        match self.on_new_event {
            OnNewEvent::Queue => self.heartbeat_every,
            OnNewEvent::Supersede { .. } => self.heartbeat_every.min(self.newer_events_every),
        }
    }
}

/// Configuration of the outbox.
#[derive(Clone, Debug)]
pub struct OutboxConfig {
    /// Name of the deliverer, unique per start. Default: like a worker.
    pub name: String,
    /// Maximum number of deliveries in flight. Default: 64.
    pub concurrency: usize,
    /// Maximum number of deliveries in flight to one target (integration, kind and `target`), so that a slow target
    /// does not delay the others. A prompt target reaches it, a failing target gets one. Default: 16; at most
    /// `concurrency`.
    pub per_target: usize,
    /// Timeout of one delivery. Default: 30 s.
    pub deadline: Duration,
    /// How long a taken row is invisible to other deliverers. Default: 60 s; longer than `deadline`.
    pub ttl: Duration,
    /// Polling interval, in addition to wake-ups. Default: 1 s.
    pub every: Duration,
    /// How long a shutdown waits for deliveries. Then they are cancelled, and their rows are released without counting
    /// an attempt. Default: 25 s.
    pub drain: Duration,
    /// Retry policy of failed deliveries.
    pub retry: IssueRetryPolicy,
    /// Observer of processing steps, for tests. Default: none.
    pub step_observer: Arc<dyn StepObserver>,
}

impl Default for OutboxConfig {
    fn default() -> Self {
        Self {
            name: unique_name(),
            concurrency: 64,
            per_target: 16,
            deadline: Duration::from_secs(30),
            ttl: Duration::from_secs(60),
            every: Duration::from_secs(1),
            drain: Duration::from_secs(25),
            retry: IssueRetryPolicy::default(),
            step_observer: Arc::new(NoStepObserver),
        }
    }
}

impl OutboxConfig {
    pub(crate) fn validate(&self) -> Result<()> {
        self.retry.validate()?;
        concurrency(self.concurrency, CONCURRENT_DELIVERIES_MAX)?;
        if self.per_target == 0 {
            return Err(IssueError::invalid("per_target", "must be at least 1"));
        }
        if self.deadline.is_zero() || self.deadline >= self.ttl {
            let problem =
                format!("{:?} must be shorter than `ttl`, which is {:?}", self.deadline, self.ttl);
            return Err(IssueError::invalid("deadline", problem));
        }
        if self.every.is_zero() {
            return Err(IssueError::invalid("every", "must be greater than zero"));
        }
        Ok(())
    }
}

fn concurrency(value: usize, max: usize) -> Result<()> {
    if (1..=max).contains(&value) {
        return Ok(());
    }
    Err(IssueError::invalid("concurrency", format!("is {value}, must be from 1 to {max}")))
}

/// A worker name that is unique over processes and time.
fn unique_name() -> String {
    format!("{}:{}", process_name(), start_id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_setting_is_rejected_by_name() {
        let default = WorkerConfig::default;
        let minute = Duration::from_secs(60);
        for (name, config) in [
            ("concurrency", WorkerConfig { concurrency: 0, ..default() }),
            ("claim_ahead", WorkerConfig { claim_ahead: CONCURRENT_RUNS_MAX, ..default() }),
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
