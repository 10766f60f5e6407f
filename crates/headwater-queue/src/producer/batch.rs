//! Many messages in one call: one append per partition, and for each message what became of it.
//!
//! Promises: messages of one partition keep their order, also when some of them fail: after the first that failed,
//! nothing later of its partition is sent. Partitions do not wait for each other.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use headwater_stream::limits::{BATCH_BYTES_MAX, BATCH_MAX, ENTRY_BYTES_MAX};
use headwater_stream::{Append, Fields, StreamError};
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use super::once::KnownId;
use super::outlet::Outlet;
use super::route::Route;
use super::{Producer, Sealed, Sent, too_few};
use crate::error::{QueueError, Result};
use crate::keys::Layout;
use crate::limits::SEND_BATCH_MAX;
use crate::message::{Headers, NewMessage};
use crate::topic::{Partition, Topic};
use crate::trace::{self, TraceContext};

/// The messages of one partition, in order.
struct Share {
    partition: Partition,
    entries: Vec<Fields>,
    /// Those that have an id, by their number among the entries.
    known_ids: BTreeMap<usize, KnownId>,
    /// Where each of them stands in the batch.
    places: Vec<usize>,
}

impl Share {
    fn new(partition: Partition, room: usize) -> Self {
        Self {
            partition,
            entries: Vec::with_capacity(room),
            known_ids: BTreeMap::new(),
            places: Vec::with_capacity(room),
        }
    }
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
        let shares = self.share_out(&route, messages, traced.context)?;
        let sending = async {
            self.admit_shares(&route, &shares, until).await?;
            // Without ids and with one server, one request serves all partitions.
            let together = shares.len() > 1
                && !is_spread(&route.topic)
                && shares.iter().all(|share| share.known_ids.is_empty());
            let results = if together {
                self.send_together(&route, shares, until).await
            } else {
                let each = shares.into_iter().map(|share| self.send_share(&route, share, until));
                join_all(each).await
            };
            // If there is no time left to look, there was none to warn in either.
            let _ = timeout_at(until, self.confirm(&route)).await;
            Ok(in_order(results, count))
        };
        sending.instrument(traced.span).await
    }

    /// Validates all, and gives every partition its share.
    fn share_out(
        &self,
        route: &Route,
        messages: Vec<NewMessage>,
        trace: Option<TraceContext>,
    ) -> Result<Vec<Share>> {
        let mut shares: Vec<Share> = Vec::new();
        // Which share is that of a partition.
        let mut share_of: Vec<Option<usize>> = vec![None; usize::from(route.topic.partitions)];
        let (now, count) = (self.inner.stamp.now(), messages.len());
        for (place, message) in messages.into_iter().enumerate() {
            let sealed = message.validate(&route.topic).and_then(|()| {
                let partition = self.partition_of(route, &message)?;
                self.seal(route, message, partition, now.clone(), trace)
            });
            let Sealed { partition, known_id, fields } =
                sealed.map_err(|error| at_place(place, error))?;
            let index = *share_of[usize::from(partition)].get_or_insert_with(|| {
                let room = if route.topic.partitions == 1 { count } else { 0 };
                shares.push(Share::new(partition, room));
                shares.len() - 1
            });
            let share = &mut shares[index];
            if let Some(known_id) = known_id {
                share.known_ids.insert(share.entries.len(), known_id);
            }
            share.entries.push(fields);
            share.places.push(place);
        }
        Ok(shares)
    }

    async fn admit_shares(&self, route: &Route, shares: &[Share], until: Instant) -> Result<()> {
        if route.budget.is_none() {
            return Ok(());
        }
        let bytes = shares.iter().flat_map(|share| &share.entries).map(Fields::bytes).sum();
        timeout_at(until, self.admit(route, bytes))
            .await
            .unwrap_or_else(|_| Err(self.too_late(route.topic.name.as_str())))
    }

    /// Sends all shares by one request, and what does not fit into it by further ones.
    async fn send_together(
        &self,
        route: &Route,
        shares: Vec<Share>,
        until: Instant,
    ) -> Vec<(Share, Vec<Result<Sent>>)> {
        let retention = &route.topic.policies.retention;
        let mut told: Vec<(Share, Vec<Result<Sent>>)> =
            shares.into_iter().map(|share| (share, Vec::new())).collect();
        loop {
            let outlets: Vec<(usize, &Outlet)> = told
                .iter()
                .enumerate()
                .filter(|(_, (share, results))| results.len() < share.entries.len())
                .map(|(at, (share, _))| (at, route.outlet(share.partition)))
                .collect();
            if outlets.is_empty() {
                return told;
            }
            let appends: Vec<Append<'_>> = outlets
                .iter()
                .map(|(at, outlet)| {
                    let (share, results) = &told[*at];
                    let left = &share.entries[results.len()..];
                    let entries = &left[..fitting(left)];
                    Append { stream: &outlet.stream, entries, retention }
                })
                .collect();
            let sending = self.inner.queue.backend().append_many(&appends);
            let sent = timeout_at(until, sending).await;
            for (nth, (at, outlet)) in outlets.into_iter().enumerate() {
                let sent = match &sent {
                    Ok(sent) => sent.get(nth).map(|sent| sent.as_ref().map_err(again)),
                    Err(_) => Some(Err(self.too_late(route.topic.name.as_str()))),
                };
                let (share, results) = &mut told[at];
                let before = results.len();
                match sent {
                    Some(Ok(ids)) => results.extend(ids.iter().map(|id| Ok(outlet.sent(*id)))),
                    Some(Err(error)) => fail(share, results, &error),
                    None => fail(share, results, &too_few()),
                }
                results[before..].iter().for_each(|result| outlet.count(result));
            }
        }
    }

    async fn send_share(
        &self,
        route: &Route,
        mut share: Share,
        until: Instant,
    ) -> (Share, Vec<Result<Sent>>) {
        let outlet = route.outlet(share.partition);
        let mut results = Vec::with_capacity(share.entries.len());
        while results.len() < share.entries.len() {
            let run = self.send_run(route, outlet, &mut share, results.len());
            match timeout_at(until, run).await {
                Ok(Ok(sent)) if sent.is_empty() => fail(&share, &mut results, &too_few()),
                Ok(Ok(sent)) => results.extend(sent.into_iter().map(Ok)),
                Ok(Err(error)) => fail(&share, &mut results, &error),
                Err(_) => {
                    let error = self.too_late(route.topic.name.as_str());
                    fail(&share, &mut results, &error);
                }
            }
        }
        results.iter().for_each(|result| outlet.count(result));
        (share, results)
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
        Ok(ids.into_iter().map(|id| outlet.sent(id)).collect())
    }
}

/// How many of these fit into one append; at least one, for each fits alone.
fn fitting(entries: &[Fields]) -> usize {
    // Few enough fit whatever they hold.
    if entries.len() <= BATCH_BYTES_MAX / ENTRY_BYTES_MAX {
        return entries.len();
    }
    let mut bytes = 0;
    let fits = |fields: &&Fields| {
        bytes += fields.bytes();
        bytes <= BATCH_BYTES_MAX
    };
    entries.iter().take(BATCH_MAX).take_while(fits).count()
}

/// What is left of a share was not sent, because of this.
fn fail(share: &Share, results: &mut Vec<Result<Sent>>, error: &QueueError) {
    results.extend(share.entries[results.len()..].iter().map(|_| Err(error.again())));
}

fn again(error: &StreamError) -> QueueError {
    error.again().into()
}

/// The results of all shares in the order of the batch.
fn in_order(told: Vec<(Share, Vec<Result<Sent>>)>, count: usize) -> Vec<Result<Sent>> {
    let mut ordered: Vec<Option<Result<Sent>>> =
        std::iter::repeat_with(|| None).take(count).collect();
    for (share, results) in told {
        if share.places.len() == count {
            return results;
        }
        for (place, result) in share.places.into_iter().zip(results) {
            ordered[place] = Some(result);
        }
    }
    ordered.into_iter().map(|result| result.unwrap_or_else(|| Err(too_few()))).collect()
}

fn at_place(place: usize, error: QueueError) -> QueueError {
    match error {
        QueueError::Invalid { what, problem } => {
            QueueError::Invalid { what: format!("{what} (message {place} of the batch)"), problem }
        }
        other => other,
    }
}

/// Whether several servers hold the partitions, so that one that is away must not keep the news of the others.
fn is_spread(topic: &Topic) -> bool {
    matches!(topic.layout, Layout::Clustered | Layout::PlainClustered)
}
