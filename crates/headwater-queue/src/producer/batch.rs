//! Many messages in one call: one append per partition, and for each message what became of it.
//!
//! Promises: messages of one partition keep their order, also when some of them fail: after the first that failed,
//! nothing later of its partition is sent. Partitions do not wait for each other.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use headwater_stream::Fields;
use headwater_stream::limits::{BATCH_BYTES_MAX, BATCH_MAX};
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use super::once::KnownId;
use super::outlet::Outlet;
use super::route::Route;
use super::{Producer, Sent};
use crate::error::{QueueError, Result};
use crate::limits::SEND_BATCH_MAX;
use crate::message::{Headers, NewMessage};
use crate::topic::Partition;
use crate::trace::{self, Traced};

/// The messages of one partition, in order.
#[derive(Default)]
struct Share {
    entries: Vec<Fields>,
    /// Those that have an id, by their number among the entries.
    known_ids: BTreeMap<usize, KnownId>,
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
        let traced = trace::sending(self.bridge(), &route.topic.name, None, &Headers::new());
        let shares = self.share_out(&route, messages, &traced)?;
        let sending = self.send_shares(&route, shares, until);
        let mut results = sending.instrument(traced.span).await?;
        results.sort_unstable_by_key(|(place, _)| *place);
        Ok(results.into_iter().map(|(_, result)| result).collect())
    }

    /// Validates all, and gives every partition its share.
    fn share_out(
        &self,
        route: &Route,
        messages: Vec<NewMessage>,
        traced: &Traced,
    ) -> Result<BTreeMap<Partition, Share>> {
        let mut shares: BTreeMap<Partition, Share> = BTreeMap::new();
        for (place, message) in messages.into_iter().enumerate() {
            let prepared = message.validate(&route.topic).and_then(|()| {
                let partition = self.partition_of(route, &message)?;
                self.seal(route, message, partition, traced.context)
            });
            let prepared = prepared.map_err(|error| at_place(place, error))?;
            let share = shares.entry(prepared.partition).or_default();
            if let Some(known_id) = prepared.known_id {
                share.known_ids.insert(share.entries.len(), known_id);
            }
            share.entries.push(prepared.fields);
            share.places.push(place);
        }
        Ok(shares)
    }

    /// Sends all shares at once. Each minds the deadline, so that it can be told which messages made it.
    async fn send_shares(
        &self,
        route: &Route,
        shares: BTreeMap<Partition, Share>,
        until: Instant,
    ) -> Result<Vec<(usize, Result<Sent>)>> {
        let bytes = shares.values().flat_map(|share| &share.entries).map(Fields::bytes).sum();
        timeout_at(until, self.admit(route, bytes))
            .await
            .unwrap_or_else(|_| Err(self.too_late(route.topic.name.as_str())))?;
        let sending = shares
            .into_iter()
            .map(|(partition, share)| self.send_share(route, partition, share, until));
        let results = join_all(sending).await.into_iter().flatten().collect();
        // If there is no time left to look, there was none to warn in either.
        let _ = timeout_at(until, self.confirm(route)).await;
        Ok(results)
    }

    async fn send_share(
        &self,
        route: &Route,
        partition: Partition,
        mut share: Share,
        until: Instant,
    ) -> Vec<(usize, Result<Sent>)> {
        let outlet = route.outlet(partition);
        let mut results = Vec::with_capacity(share.places.len());
        while results.len() < share.entries.len() {
            let done = results.len();
            let run = self.send_run(route, outlet, &mut share, done);
            match timeout_at(until, run).await {
                Ok(Ok(sent)) => results.extend(sent.into_iter().map(Ok)),
                failed => {
                    let error = match failed {
                        Ok(Err(error)) => error,
                        _ => self.too_late(route.topic.name.as_str()),
                    };
                    results.extend(share.entries[done..].iter().map(|_| Err(error.again())));
                }
            }
        }
        results.iter().for_each(|result| outlet.count(result));
        share.places.into_iter().zip(results).collect()
    }

    /// Sends as many as go together, from this one on: all with ids, or all without.
    async fn send_run(
        &self,
        route: &Route,
        outlet: &Outlet,
        share: &mut Share,
        from: usize,
    ) -> Result<Vec<Sent>> {
        let has_id = share.known_ids.contains_key(&from);
        let mut count = fitting(&share.entries[from..]);
        if !share.known_ids.is_empty() {
            let alike = |at: &usize| share.known_ids.contains_key(at) == has_id;
            count = (from..from + count).take_while(alike).count();
        }
        let entries = &share.entries[from..from + count];
        if has_id {
            let ids = (from..from + count).filter_map(|at| share.known_ids.remove(&at));
            let entries = ids.zip(entries.iter().cloned()).collect();
            return self.append_once_all(route, outlet, entries).await;
        }
        let retention = &route.topic.policies.retention;
        let ids = self.inner.queue.backend().append(&outlet.stream, entries, retention).await?;
        let sent = |id| Sent { id, partition: outlet.partition, duplicate: false };
        Ok(ids.into_iter().map(sent).collect())
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
