//! Many messages in one call: one append per partition, and for each message what became of it.
//!
//! Promises: messages of one partition keep their order, also when some of them fail: after the first that failed,
//! nothing later of its partition is sent. Partitions do not wait for each other.

use std::collections::BTreeMap;
use std::ops::Range;

use futures_util::future::join_all;
use headwater_stream::limits::{BATCH_BYTES_MAX, BATCH_MAX, ENTRY_BYTES_MAX};
use headwater_stream::{Append, Fields};
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use super::once::KnownId;
use super::outlet::Outlet;
use super::route::Route;
use super::{Producer, Sealed, Sent, too_few};
use crate::error::{QueueError, Result};
use crate::limits::SEND_BATCH_MAX;
use crate::message::{Headers, NewMessage};
use crate::topic::Partition;
use crate::trace::{self, TraceContext};

/// Messages that are ready to be sent, those of one partition together and in order.
struct Batch {
    entries: Vec<Fields>,
    /// Where each of them stands in what the caller gave.
    places: Vec<usize>,
    /// Those that have an id, by their place.
    known_ids: BTreeMap<usize, KnownId>,
    shares: Vec<Share>,
}

/// Which of the entries are for one partition.
struct Share {
    partition: Partition,
    entries: Range<usize>,
}

/// What became of messages, by their place; `None` until it is known.
type Told = Vec<Option<Result<Sent>>>;

impl Batch {
    /// A batch for so many messages.
    fn with_capacity(messages: usize) -> Self {
        Self {
            entries: Vec::with_capacity(messages),
            places: Vec::with_capacity(messages),
            known_ids: BTreeMap::new(),
            shares: Vec::new(),
        }
    }

    /// Adds a message. Those of one partition come one after the other.
    fn add(&mut self, sealed: Sealed, place: usize) {
        let Sealed { partition, known_id, fields } = sealed;
        let at = self.entries.len();
        match self.shares.last_mut() {
            Some(share) if share.partition == partition => share.entries.end = at + 1,
            _ => self.shares.push(Share { partition, entries: at..at + 1 }),
        }
        if let Some(known_id) = known_id {
            self.known_ids.insert(place, known_id);
        }
        self.entries.push(fields);
        self.places.push(place);
    }

    fn has_id(&self, at: usize) -> bool {
        self.known_ids.contains_key(&self.places[at])
    }

    /// Tells of these entries.
    fn tell(&self, told: &mut Told, from: usize, results: impl Iterator<Item = Result<Sent>>) {
        for (place, result) in self.places[from..].iter().zip(results) {
            told[*place] = Some(result);
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
        let batch = self
            .share_out(&route, messages, traced.context)
            .inspect_err(|_| route.count_refused(count))?;
        let sending = async {
            self.admit_batch(&route, &batch, until).await?;
            // Without ids and with one server, one request serves all partitions. Of several, one that is away must not
            // keep the news of the others.
            let together = !route.topic.layout.is_spread() && batch.known_ids.is_empty();
            let results = match &batch.shares[..] {
                // It has all of them, in the order in which they were given.
                [share] => self.send_share(&route, &batch, share, until).await,
                _ if together => all(self.send_together(&route, &batch, until).await),
                _ => all(self.send_shares(&route, &batch, until).await),
            };
            // If there is no time left to look, there was none to warn in either.
            let _ = timeout_at(until, self.confirm(&route)).await;
            Ok(results)
        };
        sending.instrument(traced.span).await
    }

    /// Validates all, and gives every partition its share.
    fn share_out(
        &self,
        route: &Route,
        mut messages: Vec<NewMessage>,
        trace: Option<TraceContext>,
    ) -> Result<Batch> {
        let mut order = Vec::with_capacity(messages.len());
        for (place, message) in messages.iter().enumerate() {
            let partition =
                message.validate(&route.topic).and_then(|()| self.partition_of(route, message));
            order.push((partition.map_err(|error| at_place(place, error))?, place));
        }
        // By partition, and those of one partition as they were given.
        order.sort_unstable();
        let now = self.inner.stamp.now();
        let mut batch = Batch::with_capacity(messages.len());
        for (partition, place) in order {
            let message = std::mem::take(&mut messages[place]);
            let sealed = self.seal(route, message, partition, now.clone(), trace);
            batch.add(sealed.map_err(|error| at_place(place, error))?, place);
        }
        Ok(batch)
    }

    async fn admit_batch(&self, route: &Route, batch: &Batch, until: Instant) -> Result<()> {
        if route.budget.is_none() {
            return Ok(());
        }
        let bytes = batch.entries.iter().map(Fields::bytes).sum();
        timeout_at(until, self.admit(route, bytes))
            .await
            .unwrap_or_else(|_| Err(self.too_late(route.topic.name.as_str())))
    }

    /// Sends all shares by one request, and what does not fit into it by further ones.
    async fn send_together(&self, route: &Route, batch: &Batch, until: Instant) -> Told {
        let retention = &route.topic.policies.retention;
        let mut told = untold(batch.entries.len());
        let outlet = |share: &Share| (share.entries.clone(), route.outlet(share.partition));
        // What is left of each share.
        let mut left: Vec<(Range<usize>, &Outlet)> = batch.shares.iter().map(outlet).collect();
        while !left.is_empty() {
            let appends: Vec<Append<'_>> = left
                .iter()
                .map(|(range, outlet)| {
                    let entries = &batch.entries[range.clone()];
                    Append {
                        stream: &outlet.stream,
                        entries: &entries[..fitting(entries)],
                        retention,
                    }
                })
                .collect();
            let sending = self.inner.queue.backend().append_many(&appends);
            let mut sent = timeout_at(until, sending).await.map(Vec::into_iter);
            left.retain_mut(|(range, outlet)| {
                let answer = match &mut sent {
                    Ok(sent) => sent.next().unwrap_or_else(|| Ok(Vec::new())).map_err(Into::into),
                    Err(_) => Err(self.too_late(route.topic.name.as_str())),
                };
                let ids =
                    answer.and_then(|ids| if ids.is_empty() { Err(too_few()) } else { Ok(ids) });
                match ids {
                    Ok(ids) => {
                        let count = ids.len().min(range.len());
                        let sent = ids.into_iter().take(count).map(|id| Ok(outlet.sent(id)));
                        batch.tell(&mut told, range.start, sent);
                        outlet.count_sent(count);
                        range.start += count;
                    }
                    Err(error) => {
                        outlet.errors.increment(range.len() as u64);
                        batch.tell(
                            &mut told,
                            range.start,
                            range.clone().map(|_| Err(error.again())),
                        );
                        range.start = range.end;
                    }
                }
                range.start < range.end
            });
        }
        told
    }

    /// Sends each share by requests of its own.
    async fn send_shares(&self, route: &Route, batch: &Batch, until: Instant) -> Told {
        let each = batch.shares.iter().map(|share| self.send_share(route, batch, share, until));
        let mut told = untold(batch.entries.len());
        for (share, results) in batch.shares.iter().zip(join_all(each).await) {
            batch.tell(&mut told, share.entries.start, results.into_iter());
        }
        told
    }

    async fn send_share(
        &self,
        route: &Route,
        batch: &Batch,
        share: &Share,
        until: Instant,
    ) -> Vec<Result<Sent>> {
        let outlet = route.outlet(share.partition);
        let mut results = Vec::with_capacity(share.entries.len());
        while results.len() < share.entries.len() {
            let left = share.entries.start + results.len()..share.entries.end;
            let error =
                match timeout_at(until, self.send_run(route, outlet, batch, left.clone())).await {
                    Ok(Ok(sent)) if sent.is_empty() => too_few(),
                    Ok(Ok(sent)) => {
                        results.extend(sent.into_iter().map(Ok));
                        continue;
                    }
                    Ok(Err(error)) => error,
                    Err(_) => self.too_late(route.topic.name.as_str()),
                };
            // What is left of a share was not sent, because of this.
            results.extend(left.map(|_| Err(error.again())));
        }
        results.iter().for_each(|result| outlet.count(result));
        results
    }

    /// Sends as many as go together, from the first of these on: all with ids, or all without.
    async fn send_run(
        &self,
        route: &Route,
        outlet: &Outlet,
        batch: &Batch,
        left: Range<usize>,
    ) -> Result<Vec<Sent>> {
        let mut run = left.start..left.start + fitting(&batch.entries[left.clone()]);
        let has_id = batch.has_id(run.start);
        if !batch.known_ids.is_empty() {
            run.end = run.start + run.clone().take_while(|at| batch.has_id(*at) == has_id).count();
        }
        let entries = &batch.entries[run.clone()];
        if has_id {
            let ids = batch.places[run].iter().filter_map(|place| batch.known_ids.get(place));
            let entries = ids.cloned().zip(entries.iter().cloned()).collect();
            return self.append_once_all(route, outlet, entries).await;
        }
        let retention = &route.topic.policies.retention;
        let ids = self.inner.queue.backend().append(&outlet.stream, entries, retention).await?;
        Ok(ids.into_iter().map(|id| outlet.sent(id)).collect())
    }
}

/// What became of each.
fn all(told: Told) -> Vec<Result<Sent>> {
    told.into_iter().map(|result| result.unwrap_or_else(|| Err(too_few()))).collect()
}

fn untold(count: usize) -> Told {
    std::iter::repeat_with(|| None).take(count).collect()
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

fn at_place(place: usize, error: QueueError) -> QueueError {
    match error {
        QueueError::Invalid { what, problem } => {
            QueueError::Invalid { what: format!("{what} (message {place} of the batch)"), problem }
        }
        other => other,
    }
}
