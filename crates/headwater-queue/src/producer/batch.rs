//! Many messages in one call: one append per partition, and for each message what became of it.
//!
//! Promises: messages of one partition keep their order, also when some of them fail: after the first that failed,
//! nothing later of its partition is sent. Partitions do not wait for each other.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use headwater_stream::limits::{BATCH_BYTES_MAX, BATCH_MAX};
use headwater_stream::{EntryId, Fields};
use tokio::time::{Instant, timeout_at};

use super::outlet::Outlet;
use super::route::Route;
use super::{Producer, Sent};
use crate::error::{QueueError, Result};
use crate::limits::SEND_BATCH_MAX;
use crate::message::NewMessage;
use crate::topic::Partition;

/// The messages of one partition, in order.
#[derive(Default)]
struct Share {
    entries: Vec<Fields>,
    /// Where each of them stands in the batch.
    places: Vec<usize>,
}

impl Producer {
    /// Sends messages, those of one partition together. If one is invalid, the call fails and none is sent; else there
    /// is one result for each, in order.
    ///
    /// Messages of one partition keep their order: after one that failed, nothing later of its partition is sent.
    pub async fn send_batch(
        &self,
        topic: &str,
        messages: Vec<NewMessage>,
    ) -> Result<Vec<Result<Sent>>> {
        let until = Instant::now() + self.inner.config.deadline;
        let count = messages.len();
        if count > SEND_BATCH_MAX {
            let problem = format!("{count} messages; the limit is {SEND_BATCH_MAX}");
            return Err(QueueError::invalid("a batch", problem));
        }
        let route = self.route(topic, until).await?;
        let shares = self.share_out(&route, messages)?;
        let sending = shares
            .into_iter()
            .map(|(partition, share)| self.send_share(&route, partition, share, until));
        let mut results: Vec<(usize, Result<Sent>)> =
            join_all(sending).await.into_iter().flatten().collect();
        results.sort_unstable_by_key(|(place, _)| *place);
        Ok(results.into_iter().map(|(_, result)| result).collect())
    }

    /// Validates all, and gives every partition its share.
    fn share_out(
        &self,
        route: &Route,
        messages: Vec<NewMessage>,
    ) -> Result<BTreeMap<Partition, Share>> {
        let mut shares: BTreeMap<Partition, Share> = BTreeMap::new();
        let timestamp = self.inner.stamp.now();
        for (place, message) in messages.into_iter().enumerate() {
            let checked = message.validate(&route.topic).and_then(|()| {
                let partition = self.partition_of(route, &message)?;
                let envelope = &route.outlet(partition).envelope;
                Ok((partition, message.into_fields(envelope, timestamp.clone())?))
            });
            let (partition, fields) = checked.map_err(|error| at_place(place, error))?;
            let share = shares.entry(partition).or_default();
            share.entries.push(fields);
            share.places.push(place);
        }
        Ok(shares)
    }

    async fn send_share(
        &self,
        route: &Route,
        partition: Partition,
        share: Share,
        until: Instant,
    ) -> Vec<(usize, Result<Sent>)> {
        let outlet = route.outlet(partition);
        let mut results = Vec::with_capacity(share.places.len());
        while results.len() < share.entries.len() {
            let done = results.len();
            let now = &share.entries[done..][..fitting(&share.entries[done..])];
            let sending = self.append_all(route, outlet, now);
            let sent = timeout_at(until, sending)
                .await
                .unwrap_or_else(|_| Err(self.too_late(route.topic.name.as_str())));
            match sent {
                Ok(ids) => {
                    results.extend(
                        ids.into_iter().map(|id| Ok(Sent { id, partition, duplicate: false })),
                    );
                }
                Err(error) => {
                    results.extend(share.entries[done..].iter().map(|_| Err(error.again())));
                }
            }
        }
        results.iter().for_each(|result| outlet.count(result));
        share.places.into_iter().zip(results).collect()
    }

    async fn append_all(
        &self,
        route: &Route,
        outlet: &Outlet,
        entries: &[Fields],
    ) -> Result<Vec<EntryId>> {
        let retention = &route.topic.policies.retention;
        Ok(self.inner.queue.backend().append(&outlet.stream, entries, retention).await?)
    }
}

/// How many of these fit into one append; at least one, for each fits alone.
fn fitting(entries: &[Fields]) -> usize {
    let mut bytes = 0;
    let fits = |fields: &&Fields| {
        bytes += fields.bytes();
        bytes <= BATCH_BYTES_MAX
    };
    entries.iter().take(BATCH_MAX).take_while(fits).count()
}

fn at_place(place: usize, error: QueueError) -> QueueError {
    match error {
        QueueError::Invalid { what, problem } => {
            QueueError::Invalid { what: format!("{what} (message {place} of the batch)"), problem }
        }
        other => other,
    }
}
