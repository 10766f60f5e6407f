//! Settings of a queue, of its producers and of its subscriptions.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::limits::{COUNT_MAX, KEEP_MAX, WAIT_MAX};
use headwater_stream::{GroupStart, LeaseRenewerConfig};

use crate::error::{QueueError, Result};
use crate::handler::RetryPolicy;
use crate::limits::{BLOCKED_IDS_MAX, DEADLINE_MAX, GROUP_BYTES_MAX, IN_FLIGHT_MAX};
use crate::partitioner::{HashPartitioner, Partitioner};
use crate::trace::TraceBridge;

/// Settings of a process as a member of its groups.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// Leases of partitions and the liveness lease of this process. Default: 15 s, renewed every 5 s.
    pub lease: LeaseRenewerConfig,
    /// How often members and partitions are polled, besides notifications. Default: 5 s. Not zero.
    pub rebalance_every: Duration,
    /// Name of this process. A start id is appended for its consumer names. Default: `worker:HOST:PID`.
    pub name: Option<String>,
    /// Connects spans to a trace collector. Default: none; ids are generated and recorded in the spans.
    pub trace: Option<Arc<dyn TraceBridge>>,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            lease: LeaseRenewerConfig::default(),
            rebalance_every: Duration::from_secs(5),
            name: None,
            trace: None,
        }
    }
}

impl QueueConfig {
    pub(crate) fn validate(&self) -> Result<()> {
        self.lease.validate()?;
        if self.rebalance_every.is_zero() {
            return Err(QueueError::invalid("rebalance_every", "must not be zero"));
        }
        if let Some(name) = &self.name {
            validate_name("name", name)?;
        }
        Ok(())
    }
}

/// Settings of a producer.
#[derive(Clone)]
pub struct ProducerConfig {
    /// Timeout of a send, retries included. After it the message may still arrive. Default: 10 s, at most 1 h.
    pub deadline: Duration,
    /// Chooses the partition of a message without an explicit one. Default: [`HashPartitioner`].
    pub partitioner: Arc<dyn Partitioner>,
    /// How long message ids are remembered: within it, a second message with the same id is a duplicate and not sent.
    /// Default: 10 min; at least `deadline`.
    pub idempotence_window: Duration,
}

impl Default for ProducerConfig {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(10),
            partitioner: Arc::new(HashPartitioner::default()),
            idempotence_window: Duration::from_secs(10 * 60),
        }
    }
}

impl fmt::Debug for ProducerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProducerConfig")
            .field("deadline", &self.deadline)
            .field("idempotence_window", &self.idempotence_window)
            .finish_non_exhaustive()
    }
}

impl ProducerConfig {
    pub(crate) fn validate(&self) -> Result<()> {
        if self.deadline.is_zero() || self.deadline > DEADLINE_MAX {
            let problem =
                format!("{:?}; must be more than zero and at most {DEADLINE_MAX:?}", self.deadline);
            return Err(QueueError::invalid("deadline", problem));
        }
        // A shorter window could forget a message while its send is retried.
        if self.idempotence_window < self.deadline || self.idempotence_window > KEEP_MAX {
            let problem = format!(
                "{:?}; must be at least the deadline ({:?}) and at most {KEEP_MAX:?}",
                self.idempotence_window, self.deadline
            );
            return Err(QueueError::invalid("idempotence_window", problem));
        }
        Ok(())
    }
}

/// How a group shares the partitions of a topic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Each partition has one owner, which holds its lease.
    #[default]
    Owned,
    /// Consumers compete for the messages of all partitions; no order.
    Shared,
}

/// Order in which messages are handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MessageOrder {
    /// No order: a failed message is retried later, behind others.
    #[default]
    Relaxed,
    /// Messages of one key in the order they were sent: while one is retried, later ones of its key wait. Requires
    /// [`Mode::Owned`].
    PerKey,
}

/// Default of [`ConsumerConfig::reclaim_idle`]. Pulls reassign entries of a subscription that were idle for longer.
pub(crate) const RECLAIM_IDLE_DEFAULT: Duration = Duration::from_secs(5 * 60);

/// Settings of a subscription.
#[derive(Clone, Debug)]
pub struct ConsumerConfig {
    /// How the group shares partitions. Default: [`Mode::Owned`]. Must be the same for all members of a group.
    pub mode: Mode,
    /// Order in which messages are handled. Default: [`MessageOrder::Relaxed`].
    pub order: MessageOrder,
    /// Start position of a new group. Default: the oldest message.
    pub start: GroupStart,
    /// Maximum messages per partition and read. Default: 256.
    pub batch: usize,
    /// How long a read blocks when there are no messages. Default: 5 s, at most 60 s.
    pub poll: Duration,
    /// Maximum messages in flight, prefetched ones included. Default: 1,000, at most 100,000.
    pub in_flight_max: usize,
    /// Maximum bytes in flight. Reads and reclaims ask for as many messages as fit if they are as large as the largest
    /// recent one, so that one read can exceed it when messages become larger; one message is always accepted.
    /// Default: 64 MiB.
    pub in_flight_bytes_max: usize,
    /// [`Mode::Shared`]: maximum prefetched messages per partition, beyond those being handled. With slow handlers, a
    /// small number leaves messages to other consumers. Default: as many as `in_flight_max` allows.
    pub read_ahead: Option<usize>,
    /// Concurrent handlers per partition; with [`MessageOrder::PerKey`], of different keys. Default: 1.
    pub concurrency: usize,
    /// When and how often a failed message is retried.
    pub retry: RetryPolicy,
    /// Timeout of a handler. Its future is then dropped and the attempt counts as failed. A handler that blocks its
    /// thread cannot be dropped; it is only counted. Default: none.
    pub handler_timeout: Option<Duration>,
    /// Drain timeout: how long shutdown and revocation wait for handlers before they are aborted. Default: 25 s.
    pub drain: Duration,
    /// Static member name that survives restarts: until the lease of the stopped process expires, its partitions stay
    /// reserved for it. Default: none.
    pub member: Option<String>,
    /// [`Mode::Shared`]: pending messages of consumers without a heartbeat (other programs) are reclaimed after they
    /// were idle for this long. Default: 5 min.
    pub reclaim_idle: Duration,
    /// [`MessageOrder::PerKey`]: blocked messages per partition that are kept in memory while a topic is resized.
    /// Beyond it only ids are kept and the payloads are read again later. Default: 20,000.
    pub blocked_max: usize,
}

impl Default for ConsumerConfig {
    fn default() -> Self {
        Self {
            mode: Mode::Owned,
            order: MessageOrder::Relaxed,
            start: GroupStart::Beginning,
            batch: 256,
            poll: Duration::from_secs(5),
            in_flight_max: 1000,
            in_flight_bytes_max: 64 * 1024 * 1024,
            read_ahead: None,
            concurrency: 1,
            retry: RetryPolicy::default(),
            handler_timeout: None,
            drain: Duration::from_secs(25),
            member: None,
            reclaim_idle: RECLAIM_IDLE_DEFAULT,
            blocked_max: 20_000,
        }
    }
}

impl ConsumerConfig {
    /// Maximum messages of one partition in flight. Unlimited for an owner; limited where consumers compete.
    pub(crate) fn partition_in_flight_max(&self) -> usize {
        match (self.mode, self.read_ahead) {
            (Mode::Shared, Some(read_ahead)) => self.concurrency + read_ahead,
            _ => usize::MAX,
        }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        let counts = [
            ("batch", self.batch, COUNT_MAX),
            ("in_flight_max", self.in_flight_max, IN_FLIGHT_MAX),
            ("concurrency", self.concurrency, IN_FLIGHT_MAX),
            ("blocked_max", self.blocked_max, BLOCKED_IDS_MAX),
        ];
        for (name, count, max) in counts {
            if !(1..=max).contains(&count) {
                return Err(QueueError::invalid(name, format!("{count}; must be 1 to {max}")));
            }
        }
        if let Some(count) = self.read_ahead.filter(|count| *count > IN_FLIGHT_MAX) {
            return Err(QueueError::invalid(
                "read_ahead",
                format!("{count}; must be at most {IN_FLIGHT_MAX}"),
            ));
        }
        if self.poll.is_zero() || self.poll > WAIT_MAX {
            let problem =
                format!("{:?}; must be more than zero and at most {WAIT_MAX:?}", self.poll);
            return Err(QueueError::invalid("poll", problem));
        }
        if self.handler_timeout.is_some_and(|time| time.is_zero()) {
            return Err(QueueError::invalid("handler_timeout", "must not be zero"));
        }
        if self.mode == Mode::Shared && self.order == MessageOrder::PerKey {
            let problem = "`PerKey` requires `Mode::Owned`: competing consumers keep no order";
            return Err(QueueError::invalid("order", problem));
        }
        if let Some(member) = &self.member {
            validate_name("member", member)?;
        }
        self.retry.validate()
    }
}

/// Names of members and processes become part of keys and of a space-separated list.
fn validate_name(what: &str, name: &str) -> Result<()> {
    let is_forbidden = |c: char| c.is_control() || c.is_whitespace() || matches!(c, '{' | '}');
    if name.is_empty() || name.len() > GROUP_BYTES_MAX || name.contains(is_forbidden) {
        let problem = format!(
            "`{name}`; must be 1 to {GROUP_BYTES_MAX} bytes without spaces, braces and control characters"
        );
        return Err(QueueError::invalid(what, problem));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_settings_are_rejected_by_name() {
        let default = ConsumerConfig::default;
        for (name, config) in [
            ("batch", ConsumerConfig { batch: 0, ..default() }),
            ("in_flight_max", ConsumerConfig { in_flight_max: 0, ..default() }),
            ("read_ahead", ConsumerConfig { read_ahead: Some(usize::MAX), ..default() }),
            ("concurrency", ConsumerConfig { concurrency: 0, ..default() }),
            ("poll", ConsumerConfig { poll: Duration::from_secs(61), ..default() }),
            (
                "order",
                ConsumerConfig { mode: Mode::Shared, order: MessageOrder::PerKey, ..default() },
            ),
            ("member", ConsumerConfig { member: Some("a b".into()), ..default() }),
        ] {
            assert!(config.validate().unwrap_err().to_string().starts_with(name), "{name}");
        }
        let producer = ProducerConfig::default;
        for (name, config) in [
            ("deadline", ProducerConfig { deadline: Duration::ZERO, ..producer() }),
            (
                "idempotence_window",
                ProducerConfig { idempotence_window: Duration::from_secs(1), ..producer() },
            ),
        ] {
            assert!(config.validate().unwrap_err().to_string().starts_with(name), "{name}");
        }
        assert!(producer().validate().is_ok());
        assert!(default().validate().is_ok());
        assert!(QueueConfig::default().validate().is_ok());
    }
}
