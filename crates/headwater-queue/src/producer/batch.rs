//! Many messages in one call: one append per partition, and for each message what became of it.
//!
//! Promises: messages of one partition keep their order, also when some of them fail: after the first that failed,
//! nothing later of its partition is sent. Partitions do not wait for each other.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use futures_util::future::join_all;
use headwater_stream::limits::{BATCH_BYTES_MAX, BATCH_MAX, ENTRY_BYTES_MAX};
use headwater_stream::{Append, Entries, EntrySize, Fields, StreamName};
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use super::once::KnownId;
use super::outlet::Outlet;
use super::route::Route;
use super::{Producer, Sent, only, too_few};
use crate::error::{QueueError, Result};
use crate::limits::SEND_BATCH_MAX;
use crate::message::{Envelope, Headers, NewMessage, Outgoing};
use crate::topic::Partition;
use crate::trace::{self, TraceContext};

/// Messages that are ready to be sent, those of one partition together and in order.
struct Batch {
    messages: Vec<Outgoing>,
    /// Where each of them stands in what the caller gave.
    places: Vec<usize>,
    /// Those that have an id, by their place.
    known_ids: BTreeMap<usize, KnownId>,
    shares: Vec<Share>,
    /// When they were sent.
    timestamp: Bytes,
}

/// Which of the messages are for one partition.
struct Share {
    partition: Partition,
    messages: Range<usize>,
}

/// Messages of one partition as entries, which are made while they are sent.
struct Run<'a> {
    messages: &'a [Outgoing],
    envelope: &'a Envelope,
    timestamp: &'a Bytes,
}

impl Entries for Run<'_> {
    fn len(&self) -> usize {
        self.messages.len()
    }

    fn size(&self, at: usize) -> EntrySize {
        self.messages[at].size(self.envelope, self.timestamp)
    }

    fn entry(&self, at: usize) -> Cow<'_, Fields> {
        Cow::Owned(self.messages[at].seal(self.envelope, self.timestamp))
    }
}

impl Run<'_> {
    /// As many of them as fit into one append; at least one, for each fits alone.
    fn fitting(mut self) -> Self {
        // Few enough fit whatever they hold.
        if self.len() > BATCH_BYTES_MAX / ENTRY_BYTES_MAX {
            let mut bytes = 0;
            let fits = |at: &usize| {
                bytes += self.size(*at).bytes;
                bytes <= BATCH_BYTES_MAX
            };
            let fitting = (0..self.len()).take(BATCH_MAX).take_while(fits).count();
            self.messages = &self.messages[..fitting];
        }
        self
    }
}

/// What became of messages, by their place; `None` until it is known.
type Told = Vec<Option<Result<Sent>>>;

impl Batch {
    /// A batch for so many messages.
    fn with_capacity(messages: usize, timestamp: Bytes) -> Self {
        Self {
            messages: Vec::with_capacity(messages),
            places: Vec::with_capacity(messages),
            known_ids: BTreeMap::new(),
            shares: Vec::new(),
            timestamp,
        }
    }

    /// Adds a message. Those of one partition come one after the other.
    fn add(&mut self, partition: Partition, message: Outgoing, place: usize) {
        let at = self.messages.len();
        match self.shares.last_mut() {
            Some(share) if share.partition == partition => share.messages.end = at + 1,
            _ => self.shares.push(Share { partition, messages: at..at + 1 }),
        }
        self.messages.push(message);
        self.places.push(place);
    }

    /// Messages of one partition as entries.
    fn run<'a>(&'a self, outlet: &'a Outlet, messages: Range<usize>) -> Run<'a> {
        let (envelope, timestamp) = (&outlet.envelope, &self.timestamp);
        Run { messages: &self.messages[messages], envelope, timestamp }
    }

    fn has_id(&self, at: usize) -> bool {
        self.known_ids.contains_key(&self.places[at])
    }

    /// Tells of messages, from one of them on.
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
        let mut batch = Batch::with_capacity(messages.len(), self.inner.stamp.now());
        for (partition, place) in order {
            let message = std::mem::take(&mut messages[place]);
            let (known_id, outgoing) = self
                .take_apart(route, message, partition, trace)
                .map_err(|error| at_place(place, error))?;
            if let Some(known_id) = known_id {
                batch.known_ids.insert(place, known_id);
            }
            batch.add(partition, outgoing, place);
        }
        Ok(batch)
    }

    async fn admit_batch(&self, route: &Route, batch: &Batch, until: Instant) -> Result<()> {
        if route.budget.is_none() {
            return Ok(());
        }
        let bytes_of = |share: &Share| {
            let run = batch.run(route.outlet(share.partition), share.messages.clone());
            (0..run.len()).map(|at| run.size(at).bytes).sum::<usize>()
        };
        let bytes = batch.shares.iter().map(bytes_of).sum();
        timeout_at(until, self.admit(route, bytes))
            .await
            .unwrap_or_else(|_| Err(self.too_late(route.topic.name.as_str())))
    }

    /// Sends all shares by one request, and what does not fit into it by further ones.
    async fn send_together(&self, route: &Route, batch: &Batch, until: Instant) -> Told {
        let retention = &route.topic.policies.retention;
        let mut told = untold(batch.messages.len());
        let outlet = |share: &Share| (share.messages.clone(), route.outlet(share.partition));
        // What is left of each share.
        let mut left: Vec<(Range<usize>, &Outlet)> = batch.shares.iter().map(outlet).collect();
        while !left.is_empty() {
            let each = left.iter();
            let runs: Vec<(&StreamName, Run<'_>)> = each
                .map(|(range, outlet)| (&outlet.stream, batch.run(outlet, range.clone()).fitting()))
                .collect();
            let appends: Vec<Append<'_>> = runs
                .iter()
                .map(|(stream, run)| Append { stream, entries: run, retention })
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
        let mut told = untold(batch.messages.len());
        for (share, results) in batch.shares.iter().zip(join_all(each).await) {
            batch.tell(&mut told, share.messages.start, results.into_iter());
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
        let mut results = Vec::with_capacity(share.messages.len());
        while results.len() < share.messages.len() {
            let left = share.messages.start + results.len()..share.messages.end;
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
        outlet.count(&results);
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
        let mut run = batch.run(outlet, left.clone()).fitting();
        let has_id = batch.has_id(left.start);
        if !batch.known_ids.is_empty() {
            let alike = left.clone().take_while(|at| batch.has_id(*at) == has_id).count();
            run.messages = &run.messages[..alike.min(run.len())];
        }
        if has_id {
            let places = &batch.places[left.start..left.start + run.len()];
            let ids = places.iter().filter_map(|place| batch.known_ids.get(place));
            let entries = (0..run.len()).map(|at| run.entry(at).into_owned());
            return self.append_once_all(route, outlet, ids.cloned().zip(entries).collect()).await;
        }
        let retention = &route.topic.policies.retention;
        let append = Append { stream: &outlet.stream, entries: &run, retention };
        let ids = only(self.inner.queue.backend().append_many(&[append]).await)??;
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

fn at_place(place: usize, error: QueueError) -> QueueError {
    match error {
        QueueError::Invalid { what, problem } => {
            QueueError::Invalid { what: format!("{what} (message {place} of the batch)"), problem }
        }
        other => other,
    }
}
