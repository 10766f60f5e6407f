//! Settings of a bus on streams.

use std::sync::Arc;
use std::time::Duration;

use headwater_queue::QueueConfig;
use headwater_stream::Retention;
use headwater_stream::clock::{Clock, SystemClock};
use headwater_stream::limits::{COUNT_MAX, WAIT_MAX};

use crate::breaker::BreakerConfig;
use crate::error::{BusError, Result};
use crate::keys::PREFIX;
use crate::limits::{DEDUP_WINDOW_MAX, IN_FLIGHT_MAX};
use crate::name::{Namespace, SessionId};
use crate::spool::SpoolConfig;

/// Settings of a [`StreamedBus`](crate::StreamedBus).
#[derive(Clone, Debug)]
pub struct StreamedBusConfig {
    /// Prefix of all keys. Default: `wink`.
    pub prefix: String,
    /// Namespace of the control stream. Default: `default`.
    pub namespace: Namespace,
    /// Session of events and subscriptions without one. Default: none.
    pub session: Option<SessionId>,
    /// What to do with events while the backend is unavailable. Default: [`FailurePolicy::Fail`].
    pub on_failure: FailurePolicy,
    /// Settings of the circuit breaker.
    pub breaker: BreakerConfig,
    /// How long event ids are deduplicated. `None` (default): 10 min, and only for events with an id set by the
    /// caller; with a spool, for all events. At least the call deadline of the backend, better several times that; at
    /// most 24 h.
    pub dedup_window: Option<Duration>,
    /// Retention of the control stream, after every group has acknowledged. Default: 10 000 entries.
    pub control_retention: Retention,
    /// Retention of session streams. Default: unlimited.
    pub session_retention: Retention,
    /// Publishes in flight; further ones wait. Default: 1000.
    pub in_flight_max: usize,
    /// Entries per stream and read, for live subscriptions. Default: 256.
    pub batch: usize,
    /// Timeout of such a read. Default: 5 s.
    pub poll: Duration,
    /// How long closing waits for publishes and handlers in flight. Default: 25 s.
    pub drain: Duration,
    /// Interval of automatic health checks, for metrics and
    /// [`last_health`](crate::StreamedBus::last_health). Default: 30 s; `None`: never.
    pub health_every: Option<Duration>,
    /// Settings of durable subscriptions.
    pub queue: QueueConfig,
    /// Clock for event timestamps. Default: the system clock.
    pub clock: Arc<dyn Clock>,
}

/// What to do with an event that cannot be stored because the backend is unavailable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum FailurePolicy {
    /// Publishing fails. No handler runs.
    #[default]
    Fail,
    /// The event is written to a stream on disk and moved to its stream when the backend is available again, in order within its
    /// session. Handlers of this process run at once.
    Spool(SpoolConfig),
    /// Handlers of this process run. The result tells whether other processes may see the event:
    /// [`StoreOutcome::LocalOnly`](crate::StoreOutcome::LocalOnly): not sent, because the breaker was open; no other
    /// process sees it. [`StoreOutcome::Unconfirmed`](crate::StoreOutcome::Unconfirmed): sent and not confirmed; it
    /// may be in its stream.
    LocalOnly,
}

/// Default dedup window.
pub(super) const DEDUP_WINDOW_DEFAULT: Duration = Duration::from_secs(10 * 60);

impl Default for StreamedBusConfig {
    fn default() -> Self {
        Self {
            prefix: PREFIX.to_owned(),
            namespace: Namespace::new("default").expect("it is a valid namespace"),
            session: None,
            on_failure: FailurePolicy::Fail,
            breaker: BreakerConfig::default(),
            dedup_window: None,
            control_retention: Retention::max_len(10_000),
            session_retention: Retention::KEEP_ALL,
            in_flight_max: 1000,
            batch: 256,
            poll: Duration::from_secs(5),
            drain: Duration::from_secs(25),
            health_every: Some(Duration::from_secs(30)),
            queue: QueueConfig::default(),
            clock: Arc::new(SystemClock),
        }
    }
}

impl StreamedBusConfig {
    /// Validates the settings for a backend with this call deadline.
    pub(crate) fn validate(&self, call_deadline: Option<Duration>) -> Result<()> {
        let dedup_window = self.dedup_window.unwrap_or(DEDUP_WINDOW_DEFAULT);
        BusError::check_dedup_window("dedup_window", dedup_window, call_deadline)?;
        let counts = [
            ("in_flight_max", self.in_flight_max, IN_FLIGHT_MAX),
            ("batch", self.batch, COUNT_MAX),
        ];
        for (name, count, max) in counts {
            if !(1..=max).contains(&count) {
                return Err(BusError::invalid(name, format!("{count}; 1 to {max}")));
            }
        }
        if self.poll.is_zero() || self.poll > WAIT_MAX {
            let problem =
                format!("{:?}; must be greater than zero and at most {WAIT_MAX:?}", self.poll);
            return Err(BusError::invalid("poll", problem));
        }
        if self.dedup_window.is_some_and(|time| time.as_millis() == 0 || time > DEDUP_WINDOW_MAX) {
            let problem = format!("{:?}; 1 ms to {DEDUP_WINDOW_MAX:?}", self.dedup_window);
            return Err(BusError::invalid("dedup_window", problem));
        }
        if self.health_every.is_some_and(|every| every.is_zero()) {
            return Err(BusError::invalid("health_every", "must be greater than zero"));
        }
        if let FailurePolicy::Spool(spool) = &self.on_failure {
            spool.validate()?;
        }
        self.breaker.validate()
    }
}
