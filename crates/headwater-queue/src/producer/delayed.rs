//! Messages that are sent now and arrive later.
//!
//! Upstream: applications. Downstream: the delayed messages of the topic, which its consumers move to their partitions
//! when they are due.

use std::time::Duration;

use headwater_stream::clock::Timestamp;
use headwater_stream::{DelayId, Due, PutAside, StreamError};
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use super::{Producer, Sealed, only};
use crate::error::{QueueError, Result};
use crate::keys;
use crate::message::NewMessage;
use crate::topic::{Partition, TopicName};

/// A message that waits for its time. Keep it to be able to [cancel](Producer::cancel) the message.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DelayedMessage {
    /// The topic it goes to.
    pub topic: TopicName,
    /// The partition it goes to.
    pub partition: Partition,
    /// Its number among the delayed messages of the partition.
    pub id: DelayId,
}

impl Producer {
    /// Sends a message that arrives after this time, by the backend's clock, within about 250 ms if somebody consumes
    /// the topic.
    ///
    /// Its partition is chosen now. It cannot have an id: delayed messages are not looked through for it.
    pub async fn send_after(
        &self,
        topic: &str,
        message: NewMessage,
        after: Duration,
    ) -> Result<DelayedMessage> {
        self.send_due(topic, message, Due::After(after)).await
    }

    /// The same for a point in time; one that has passed is due at once.
    pub async fn send_at(
        &self,
        topic: &str,
        message: NewMessage,
        at: Timestamp,
    ) -> Result<DelayedMessage> {
        self.send_due(topic, message, Due::At(at)).await
    }

    /// Takes a delayed message back. Returns whether it was still waiting; if not, it has arrived or was cancelled.
    pub async fn cancel(&self, delayed: &DelayedMessage) -> Result<bool> {
        let until = Instant::now() + self.inner.config.deadline;
        let route = self.route(delayed.topic.as_str(), until).await?;
        if delayed.partition >= route.topic.partitions {
            return Ok(false);
        }
        let delays = keys::delays(&route.topic, delayed.partition);
        let cancelling = self.inner.queue.backend().cancel(&delays, delayed.id);
        match timeout_at(until, cancelling).await {
            Ok(cancelled) => Ok(cancelled?),
            Err(_) => Err(self.too_late(delayed.topic.as_str())),
        }
    }

    async fn send_due(&self, topic: &str, message: NewMessage, due: Due) -> Result<DelayedMessage> {
        let until = Instant::now() + self.inner.config.deadline;
        let route = self.route(topic, until).await?;
        if message.id.is_some() {
            let problem = "a delayed message cannot have one; send it without, or without delay";
            return Err(QueueError::invalid("an id", problem));
        }
        let (Sealed { partition, fields, .. }, span) = self.prepare(&route, message)?;
        let outlet = route.outlet(partition);
        let delays = keys::delays(&route.topic, partition);
        let sending = async {
            self.admit(&route, fields.bytes()).await?;
            let item = PutAside { to: outlet.stream.clone(), due, fields };
            only(self.inner.queue.backend().put_aside(&delays, &[item]).await?)
        };
        let put_aside = timeout_at(until, sending.instrument(span))
            .await
            .unwrap_or_else(|_| Err(self.too_late(topic)));
        match put_aside {
            Ok(id) => {
                outlet.delayed.increment(1);
                Ok(DelayedMessage { topic: route.topic.name.clone(), partition, id })
            }
            Err(error) => {
                outlet.errors.increment(1);
                Err(match error {
                    QueueError::Backend(StreamError::Invalid { what, problem }) => {
                        QueueError::Invalid { what, problem }
                    }
                    other => other,
                })
            }
        }
    }
}
