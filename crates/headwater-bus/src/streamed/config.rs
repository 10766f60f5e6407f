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
    /// What all keys begin with. Default: `wink`.
    pub prefix: String,
    /// Whose control stream it works with. Default: `default`.
    pub namespace: Namespace,
    /// The session of events and subscriptions that name none. Default: none.
    pub session: Option<SessionId>,
    /// What to do with an event while the backend is away. Default: [`FailurePolicy::Fail`].
    pub on_failure: FailurePolicy,
    /// When the backend is left alone after failures.
    pub breaker: BreakerConfig,
    /// How long ids of published events are remembered, so that one that is published again counts once. `None`
    /// (default) does so for 10 min, and only for events that were given an id; with a spool, for all events. Several
    /// times as long as a call of the backend may take (less than once is refused), at most 24 h.
    pub dedup_window: Option<Duration>,
    /// How much of the control stream is kept once every group is done with it. Default: 10 000 entries.
    pub control_retention: Retention,
    /// How much of a session's stream is kept. Default: everything.
    pub session_retention: Retention,
    /// Publishes under way at once; what is more waits. Default: 1000.
    pub in_flight_max: usize,
    /// Entries per stream and read of live subscriptions. Default: 256.
    pub batch: usize,
    /// How long such a read waits. Default: 5 s.
    pub poll: Duration,
    /// How long closing waits for what was begun: publishes, handlers, all at once. Default: 25 s.
    pub drain: Duration,
    /// How often the bus looks at its health by itself, for metrics and
    /// [`last_health`](crate::StreamedBus::last_health). Default: 30 s; `None` never.
    pub health_every: Option<Duration>,
    /// Settings of durable subscriptions.
    pub queue: QueueConfig,
    /// The time that is written into events. Default: the machine's.
    pub clock: Arc<dyn Clock>,
}

/// What to do with an event that cannot be stored because the backend is away.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum FailurePolicy {
    /// Publishing fails. No handler runs.
    #[default]
    Fail,
    /// It waits in a file and is stored when the backend is back, in order within its session. Handlers of this process
    /// run at once.
    Spool(SpoolConfig),
    /// Handlers of this process run. The result says whether other processes may see the event:
    /// [`StoreOutcome::LocalOnly`](crate::Stored::LocalOnly) was not sent, because the breaker was open, and no other
    /// process ever sees it; [`StoreOutcome::Unconfirmed`](crate::Stored::Unconfirmed) was sent and not confirmed,
    /// and may be in its stream.
    LocalOnly,
}

/// How long ids are remembered, if the settings do not say.
pub(super) const DEDUP_WINDOW_DEFAULT: Duration = Duration::from_secs(10 * 60);

impl Default for StreamedBusConfig {
    fn default() -> Self {
        Self {
            prefix: PREFIX.to_owned(),
            namespace: Namespace::new("default").expect("it is a valid name"),
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
    /// Checks them for a backend whose calls take so long at most.
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
            let problem = format!("{:?}; more than zero, at most {WAIT_MAX:?}", self.poll);
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
