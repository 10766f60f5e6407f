//! Delayed messages: sent now, appended to their partition later.
//!
//! Upstream: applications. Downstream: the delay set of the topic; its consumers append due messages to their
//! partitions.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::clock::Timestamp;
use headwater_stream::{DelayId, DueTime, ScheduleRequest, StreamError};
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use super::{PreparedMessage, Producer, single, use_expired};
use crate::error::{QueueError, Result};
use crate::keys;
use crate::message::NewMessage;
use crate::queue::UseExpired;
use crate::topic::{Partition, TopicName};

/// A scheduled message. Keep it to be able to [cancel](Producer::cancel) the message.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DelayedMessage {
    /// Its topic.
    pub topic: TopicName,
    /// Its partition.
    pub partition: Partition,
    /// Its id in the delay set of the partition.
    pub id: DelayId,
}

impl Producer {
    /// Schedules a message for delivery after a delay, measured by the clock of the backend. It arrives within about
    /// 250 ms of its due time if the topic has a consumer.
    ///
    /// Its partition is chosen now. It cannot have an id: delayed messages are not deduplicated.
    pub async fn send_after(
        &self,
        topic: &str,
        message: NewMessage,
        after: Duration,
    ) -> Result<DelayedMessage> {
        self.send_due(topic, message, DueTime::After(after)).await
    }

    /// Schedules a message for delivery at a point in time; a past one is due at once. See [`Producer::send_after`].
    pub async fn send_at(
        &self,
        topic: &str,
        message: NewMessage,
        at: Timestamp,
    ) -> Result<DelayedMessage> {
        self.send_due(topic, message, DueTime::At(at)).await
    }

    /// Cancels a delayed message. Returns whether it was still waiting; if not, it was delivered or cancelled before.
    pub async fn cancel(&self, delayed: &DelayedMessage) -> Result<bool> {
        let until = Instant::now() + self.inner.config.deadline;
        let name = delayed.topic.as_str();
        let cached = self.cached_topic(name, UseExpired::Always, until).await?;
        let cancelling = async {
            let queue = &self.inner.queue;
            let mut topic = Arc::clone(&cached.topic);
            if delayed.partition >= topic.partitions {
                // The partition may have been added since the copy was read.
                topic = queue.read_topic(&delayed.topic).await?;
            }
            if delayed.partition >= topic.partitions {
                return Ok(false);
            }
            let delays = keys::delays(&topic, delayed.partition);
            Ok(queue.backend().cancel(&delays, delayed.id).await?)
        };
        timeout_at(until, cancelling).await.unwrap_or_else(|_| Err(self.deadline_exceeded(name)))
    }

    async fn send_due(
        &self,
        topic: &str,
        message: NewMessage,
        due: DueTime,
    ) -> Result<DelayedMessage> {
        let until = Instant::now() + self.inner.config.deadline;
        let use_expired = use_expired(std::slice::from_ref(&message));
        let cached = self.cached_topic(topic, use_expired, until).await?;
        if message.id.is_some() {
            let problem = "a delayed message cannot have an id; send it without one, or undelayed";
            return Err(QueueError::invalid("id", problem));
        }
        let (PreparedMessage { partition, fields, .. }, span) = self.prepare(&cached, message)?;
        let handle = cached.partition(partition);
        let delays = keys::delays(&cached.topic, partition);
        let sending = async {
            self.reserve_budget(&cached, fields.bytes()).await?;
            let item = ScheduleRequest { to: handle.stream.clone(), due, fields };
            single(self.inner.queue.backend().schedule(&delays, &[item]).await?)
        };
        let scheduled = timeout_at(until, sending.instrument(span))
            .await
            .unwrap_or_else(|_| Err(self.deadline_exceeded(topic)));
        match scheduled {
            Ok(id) => {
                handle.delayed.increment(1);
                Ok(DelayedMessage { topic: cached.topic.name.clone(), partition, id })
            }
            Err(error) => {
                handle.errors.increment(1);
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
