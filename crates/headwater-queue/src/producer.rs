//! Sends messages: validates, chooses the partition, appends.
//!
//! Upstream: applications. Downstream: the streams of a topic.
//! Promises: what is invalid is refused before anything happens; a partition is never chosen by what was known longer
//! ago than the topic's `refresh`; a send that was confirmed is in its partition, and every other outcome is an error.
//! Not here: repeating a send that failed. Whoever does so gives the message an id, so that it counts once.

mod batch;
mod budget;
mod delayed;
mod once;
mod outlet;
mod route;
mod stamp;

use std::fmt;
use std::sync::Arc;

use headwater_stream::{EntryId, Fields, StreamError};
use metrics::counter;
use tokio::time::{Instant, timeout_at};
use tracing::{Instrument, Span, warn};

pub use self::delayed::DelayedMessage;
use self::once::KnownId;
use self::outlet::Outlet;
use self::route::{Route, Routes};
use self::stamp::Stamp;
use crate::config::ProducerConfig;
use crate::error::{QueueError, Result};
use crate::message::{NewMessage, Outgoing};
use crate::metrics::ANOMALIES;
use crate::queue::Queue;
use crate::topic::Partition;
use crate::trace::{self, TraceBridge, TraceContext};

/// Sends messages to topics. Clones are the same producer; their concurrent sends share round trips.
#[derive(Clone)]
pub struct Producer {
    inner: Arc<Inner>,
}

struct Inner {
    queue: Queue,
    config: ProducerConfig,
    routes: Routes,
    stamp: Stamp,
}

/// Where a message is that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Its entry in the partition.
    pub id: EntryId,
    /// The partition.
    pub partition: Partition,
    /// Whether a message with its id was sent before, within the window; then nothing was sent now.
    pub duplicate: bool,
}

/// A message that is ready for its partition.
struct Sealed {
    partition: Partition,
    known_id: Option<KnownId>,
    fields: Fields,
}

impl Queue {
    /// A producer. One serves a whole process.
    pub fn producer(&self, config: ProducerConfig) -> Result<Producer> {
        config.validate()?;
        let routes = Routes::new(self.clone());
        let inner = Inner { queue: self.clone(), config, routes, stamp: Stamp::default() };
        Ok(Producer { inner: Arc::new(inner) })
    }
}

impl fmt::Debug for Producer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer")
            .field("queue", &self.inner.queue)
            .field("config", &self.inner.config)
            .finish_non_exhaustive()
    }
}

impl Producer {
    /// Sends a message; returns when it is in its partition. A topic that nobody created is plain.
    ///
    /// After [`QueueError::DeadlineExceeded`], or an error of the backend that is transient, it may have been sent: repeat
    /// it with the same id. The same holds for a send that is dropped before it returns.
    pub async fn send(&self, topic: &str, message: NewMessage) -> Result<Sent> {
        let until = Instant::now() + self.inner.config.deadline;
        let route = self.route(topic, until).await?;
        let (Sealed { partition, known_id, fields }, span) = self.prepare(&route, message)?;
        let outlet = route.outlet(partition);
        let sending = async {
            if route.budget.is_some() {
                self.admit(&route, fields.bytes()).await?;
            }
            let sent = match known_id {
                None => self.append(&route, outlet, fields).await?,
                Some(known_id) => self.append_once(&route, outlet, known_id, fields).await?,
            };
            self.confirm(&route).await;
            Ok(sent)
        };
        let sent = timeout_at(until, sending.instrument(span))
            .await
            .unwrap_or_else(|_| Err(self.too_late(topic)));
        outlet.count(std::slice::from_ref(&sent));
        sent
    }

    /// Checks a message and makes it ready for its partition. Nothing happened yet.
    fn prepare(&self, route: &Route, message: NewMessage) -> Result<(Sealed, Span)> {
        self.check_and_seal(route, message).inspect_err(|_| route.count_refused(1))
    }

    fn check_and_seal(&self, route: &Route, message: NewMessage) -> Result<(Sealed, Span)> {
        message.validate(&route.topic)?;
        let partition = self.partition_of(route, &message)?;
        let traced =
            trace::sending(self.bridge(), &route.topic.name, Some(partition), &message.headers);
        let now = self.inner.stamp.now();
        let (known_id, outgoing) = self.take_apart(route, message, partition, traced.context)?;
        let fields = outgoing.seal(&route.outlet(partition).envelope, &now);
        Ok((Sealed { partition, known_id, fields }, traced.span))
    }

    /// What becomes of a valid message: an id to be known by, if it has one, and an entry.
    fn take_apart(
        &self,
        route: &Route,
        mut message: NewMessage,
        partition: Partition,
        trace: Option<TraceContext>,
    ) -> Result<(Option<KnownId>, Outgoing)> {
        let known_id = self.take_id(route, &mut message, partition);
        Ok((known_id, message.into_outgoing(trace)?))
    }

    fn bridge(&self) -> Option<&dyn TraceBridge> {
        self.inner.queue.inner.config.trace.as_deref()
    }

    async fn append(&self, route: &Route, outlet: &Outlet, fields: Fields) -> Result<Sent> {
        let retention = &route.topic.policies.retention;
        // Those of other callers go with it: the backend sees to that. Gathering them here, before it, was measured to
        // cost more than it saves (2.6 us of processor time per message, against 2.2).
        let backend = self.inner.queue.backend();
        let id = only(backend.append(&outlet.stream, &[fields], retention).await?)?;
        Ok(outlet.sent(id))
    }

    /// Refuses a send if the topic holds as much as it may.
    async fn admit(&self, route: &Route, bytes: usize) -> Result<()> {
        match &route.budget {
            None => Ok(()),
            Some(budget) => budget.admit(&self.inner.queue, &route.topic, bytes).await,
        }
    }

    /// A message that arrived so late that a growth may be settled without it is safe, but perhaps out of order.
    async fn confirm(&self, route: &Route) {
        if !route.is_overdue() {
            return;
        }
        let topic = &route.topic.name;
        let now = self.inner.queue.topic(topic).await;
        if now.is_ok_and(|now| now.partitions != route.topic.partitions) {
            let name = topic.to_string();
            counter!(ANOMALIES, "topic" => name, "group" => "", "result" => "late_send")
                .increment(1);
            warn!(%topic, "the topic grew while a message was sent, keys may be out of order");
        }
    }

    /// What is known of the topic, read again if it is too old.
    async fn route(&self, topic: &str, until: Instant) -> Result<Arc<Route>> {
        // The deadline was set just now.
        let now = until - self.inner.config.deadline;
        if let Some(route) = self.inner.routes.fresh(topic, now) {
            return Ok(route);
        }
        let reading = self.inner.routes.read(topic);
        timeout_at(until, reading).await.unwrap_or_else(|_| Err(self.too_late(topic)))
    }

    /// The partition a valid message goes to.
    fn partition_of(&self, route: &Route, message: &NewMessage) -> Result<Partition> {
        if let Some(partition) = message.partition {
            return Ok(partition);
        }
        let partitions = route.topic.partitions;
        let chosen = self.chosen_partition(message, partitions);
        if chosen >= partitions {
            let problem = format!(
                "the partitioner chose {chosen}; topic `{}` has partitions 0 to {}",
                route.topic.name,
                partitions - 1
            );
            return Err(QueueError::invalid("a partition", problem));
        }
        Ok(chosen)
    }

    fn too_late(&self, topic: &str) -> QueueError {
        let deadline = self.inner.config.deadline;
        QueueError::DeadlineExceeded { topic: topic.to_owned(), deadline }
    }
}

/// What the backend tells of the one thing it was given.
fn only<T>(told: Vec<T>) -> Result<T> {
    told.into_iter().next().ok_or_else(too_few)
}

fn too_few() -> QueueError {
    let problem = "something was sent, its id is missing".to_owned();
    StreamError::Protocol { problem }.into()
}
