//! Settings of a queue, of its producers and of its subscriptions.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::limits::{COUNT_MAX, KEEP_MAX, WAIT_MAX};
use headwater_stream::{GroupStart, KeeperConfig};

use crate::error::{QueueError, Result};
use crate::limits::{DEADLINE_MAX, GROUP_BYTES_MAX, HELD_IDS_MAX, IN_FLIGHT_MAX};
use crate::partitioner::{HashPartitioner, Partitioner};
use crate::retry::RetryPolicy;
use crate::trace::TraceBridge;

/// Settings of a process's part in all its groups.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// How leases are kept: those of partitions, and the one that shows that this process lives. Default: 15 s, renewed
    /// every 5 s.
    pub lease: KeeperConfig,
    /// How often members and partitions are looked at, besides when something is heard of them. Default: 5 s.
    pub rebalance_every: Duration,
    /// How this process is called. Its consumers bear the name with a start id after it. Default: `worker:HOST:PID`.
    pub name: Option<String>,
    /// What ties spans to the ids of a collector. Default: none; ids are made here and recorded in the spans.
    pub trace: Option<Arc<dyn TraceBridge>>,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            lease: KeeperConfig::default(),
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
            return Err(QueueError::invalid("rebalance_every", "it is zero"));
        }
        if let Some(name) = &self.name {
            check_name("name", name)?;
        }
        Ok(())
    }
}

/// Settings of a producer.
#[derive(Clone)]
pub struct ProducerConfig {
    /// How long a send may take, everything included; then it fails and may still arrive. Default: 10 s.
    pub deadline: Duration,
    /// Chooses the partition of a message that names none. Default: [`HashPartitioner`].
    pub partitioner: Arc<dyn Partitioner>,
    /// How long ids of messages are remembered: a second message with an id counts as the first one. Default: 10 min.
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
            let problem = format!("{:?}; more than zero, at most {DEADLINE_MAX:?}", self.deadline);
            return Err(QueueError::invalid("deadline", problem));
        }
        // A shorter window would forget a message while its send is repeated.
        if self.idempotence_window < self.deadline || self.idempotence_window > KEEP_MAX {
            let problem = format!(
                "{:?}; at least the deadline ({:?}), at most {KEEP_MAX:?}",
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
    /// Each partition has one effective owner, by lease.
    #[default]
    Owned,
    /// Consumers compete for the messages of all partitions; no order.
    Shared,
}

/// Which messages wait for each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// None: one that fails is put aside and comes back later, behind others.
    #[default]
    Relaxed,
    /// Those of one key: while one is tried again, the key's later ones wait. Needs [`Mode::Owned`].
    PerKey,
}

/// Settings of a subscription.
#[derive(Clone, Debug)]
pub struct ConsumerConfig {
    /// How the group shares partitions. Default: [`Mode::Owned`]. The same for all members of a group.
    pub mode: Mode,
    /// Which messages wait for each other. Default: [`Order::Relaxed`].
    pub order: Order,
    /// Where a group that is new begins. Default: at the oldest message.
    pub start: GroupStart,
    /// Messages per partition and read. Default: 256.
    pub batch: usize,
    /// How long a read waits for messages. Default: 5 s.
    pub poll: Duration,
    /// Messages in hand at once, read ahead included. Default: 1000.
    pub in_flight_max: usize,
    /// [`Mode::Shared`]: messages of one partition in hand beyond those that are being handled. Where handlers are slow,
    /// a small number leaves the rest to other consumers. Default: as many as `in_flight_max` allows.
    pub read_ahead: Option<usize>,
    /// Messages of one partition that are handled at once; with [`Order::PerKey`], of different keys. Default: 1.
    pub concurrency: usize,
    /// When and how often a failed message is tried again.
    pub retry: RetryPolicy,
    /// How long a handler may take; then it is dropped, and that is a failure. One that blocks its thread cannot be dropped.
    /// Both are counted. Default: none.
    pub handler_timeout: Option<Duration>,
    /// How long stopping and handing over wait for handlers; what is left is released. Default: 25 s.
    pub drain: Duration,
    /// A name that stays the same over restarts: while the lease of a stopped process runs, its partitions are kept for
    /// it. Default: none.
    pub member: Option<String>,
    /// [`Mode::Shared`]: after this time without a sign, messages of consumers that send no heartbeat (other programs)
    /// are taken over. Default: 5 min.
    pub reclaim_idle: Duration,
    /// [`Order::PerKey`]: messages of a partition that may wait in memory for older ones of their key while a topic grows.
    /// Of those beyond it only the id is kept, and they are read again when their turn comes. Default: 20,000.
    pub held_max: usize,
}

impl Default for ConsumerConfig {
    fn default() -> Self {
        Self {
            mode: Mode::Owned,
            order: Order::Relaxed,
            start: GroupStart::Beginning,
            batch: 256,
            poll: Duration::from_secs(5),
            in_flight_max: 1000,
            read_ahead: None,
            concurrency: 1,
            retry: RetryPolicy::default(),
            handler_timeout: None,
            drain: Duration::from_secs(25),
            member: None,
            reclaim_idle: Duration::from_secs(5 * 60),
            held_max: 20_000,
        }
    }
}

impl ConsumerConfig {
    /// What of a partition may be in hand. Nobody waits for what an owner has; where consumers compete, others could have
    /// it.
    pub(crate) fn reach(&self) -> usize {
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
            ("held_max", self.held_max, HELD_IDS_MAX),
        ];
        for (name, count, max) in counts {
            if !(1..=max).contains(&count) {
                return Err(QueueError::invalid(name, format!("{count}; 1 to {max}")));
            }
        }
        if let Some(count) = self.read_ahead.filter(|count| *count > IN_FLIGHT_MAX) {
            return Err(QueueError::invalid(
                "read_ahead",
                format!("{count}; at most {IN_FLIGHT_MAX}"),
            ));
        }
        if self.poll.is_zero() || self.poll > WAIT_MAX {
            let problem = format!("{:?}; more than zero, at most {WAIT_MAX:?}", self.poll);
            return Err(QueueError::invalid("poll", problem));
        }
        if self.handler_timeout.is_some_and(|time| time.is_zero()) {
            return Err(QueueError::invalid("handler_timeout", "it is zero"));
        }
        if self.mode == Mode::Shared && self.order == Order::PerKey {
            let problem = "`PerKey` needs `Mode::Owned`: competing consumers keep no order";
            return Err(QueueError::invalid("order", problem));
        }
        if let Some(member) = &self.member {
            check_name("member", member)?;
        }
        self.retry.validate()
    }
}

/// Names of members and processes become part of keys and of a space-separated list.
fn check_name(what: &str, name: &str) -> Result<()> {
    let odd = |c: char| c.is_control() || c.is_whitespace() || matches!(c, '{' | '}');
    if name.is_empty() || name.len() > GROUP_BYTES_MAX || name.contains(odd) {
        let problem = format!(
            "`{name}`; 1 to {GROUP_BYTES_MAX} bytes without spaces, braces and control characters"
        );
        return Err(QueueError::invalid(what, problem));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_make_no_sense_are_refused_by_name() {
        let default = ConsumerConfig::default;
        for (name, config) in [
            ("batch", ConsumerConfig { batch: 0, ..default() }),
            ("in_flight_max", ConsumerConfig { in_flight_max: 0, ..default() }),
            ("read_ahead", ConsumerConfig { read_ahead: Some(usize::MAX), ..default() }),
            ("concurrency", ConsumerConfig { concurrency: 0, ..default() }),
            ("poll", ConsumerConfig { poll: Duration::from_secs(61), ..default() }),
            ("order", ConsumerConfig { mode: Mode::Shared, order: Order::PerKey, ..default() }),
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
