//! Messages with an id count once within the producer's window, however often they are sent.
//!
//! Downstream: `append_once` of the backend, which knows the ids of one stream. So a repeat has to meet the first one in
//! its partition: the partition comes from the key or else from the id, and after a growth the id is looked for in the
//! partition it had before.
//! Not here: a first send that is still under way, by a process that does not know of the growth yet, while the repeat
//! already goes to the new partition. Order per key goes before that.

use std::time::Duration;

use headwater_stream::clock::{Clock, SystemClock};
use headwater_stream::{Appended, Coalescer, CoalescerConfig, Fields, Once, StreamError};

use super::outlet::Outlet;
use super::route::Route;
use super::{Producer, Sent, too_few};
use crate::error::{QueueError, Result};
use crate::keys;
use crate::message::NewMessage;
use crate::partitioner::hash_partition;
use crate::topic::{Growth, Partition};

/// How far the clock of this machine may be from the backend's, when it is asked which growths are recent. A clock that is
/// set may be off by hours; the price of a large value is a lookup more per send for a day after a growth.
const CLOCK_SKEW_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Carries out sends of messages with ids, those of concurrent callers together.
pub(super) type OnceSends = Coalescer<Once, Result<Appended>>;

/// The id of a message, and where it may have been sent before.
#[derive(Clone, Debug)]
pub(super) struct KnownId {
    pub(super) id: String,
    /// The partitions it had before recent growths.
    pub(super) earlier: Vec<Partition>,
}

impl Producer {
    /// The partition of a message that names none, by its key or id.
    pub(super) fn chosen_partition(&self, message: &NewMessage, partitions: u16) -> Partition {
        let partitioner = &self.inner.config.partitioner;
        match (&message.id, &message.key) {
            // What is chosen anew each time would never meet what was sent before.
            (Some(id), None) => hash_partition(id, partitions),
            (Some(id), Some(_)) if !partitioner.is_stable() => hash_partition(id, partitions),
            (_, key) => partitioner.partition(key.as_deref(), partitions),
        }
    }

    /// Takes the id out of a message.
    pub(super) fn take_id(
        &self,
        route: &Route,
        message: &mut NewMessage,
        partition: Partition,
    ) -> Option<KnownId> {
        let mut earlier = Vec::new();
        if message.id.is_some() && message.partition.is_none() {
            let relevant = self.inner.config.idempotence_window
                + Growth::settling(route.topic.policies.refresh)
                + CLOCK_SKEW_MAX;
            let since = SystemClock.now().before(relevant);
            for growth in route.topic.growths.iter().filter(|growth| growth.began >= since) {
                let old = self.chosen_partition(message, growth.from);
                if old != partition && !earlier.contains(&old) && old < route.topic.partitions {
                    earlier.push(old);
                }
            }
        }
        message.id.take().map(|id| KnownId { id, earlier })
    }

    /// Appends one entry, unless its id is known. Those of other callers go with it.
    pub(super) async fn append_once(
        &self,
        route: &Route,
        outlet: &Outlet,
        known: KnownId,
        fields: Fields,
    ) -> Result<Sent> {
        if let Some(earlier) = self.find_earlier(route, &[&known]).await?.remove(0) {
            return Ok(earlier);
        }
        let bytes = fields.bytes();
        let sends = outlet.once_sends(|| self.once_sends(route, outlet));
        let once = Once { id: known.id, fields };
        let Appended { id, duplicate } = match sends.call_weighing(once, bytes).await {
            Ok(appended) => appended?,
            Err(gone) => {
                let problem = gone.to_string();
                return Err(StreamError::Unavailable { problem, source: Some(gone.into()) }.into());
            }
        };
        Ok(Sent { id, partition: outlet.partition, duplicate })
    }

    /// Appends entries in order, except those whose ids are known.
    pub(super) async fn append_once_all(
        &self,
        route: &Route,
        outlet: &Outlet,
        entries: Vec<(KnownId, Fields)>,
    ) -> Result<Vec<Sent>> {
        let ids: Vec<&KnownId> = entries.iter().map(|(known, _)| known).collect();
        let earlier = self.find_earlier(route, &ids).await?;
        let new: Vec<Once> = entries
            .into_iter()
            .zip(&earlier)
            .filter(|(_, earlier)| earlier.is_none())
            .map(|((known, fields), _)| Once { id: known.id, fields })
            .collect();
        let (keep, retention) =
            (self.inner.config.idempotence_window, &route.topic.policies.retention);
        let appended =
            self.inner.queue.backend().append_once(&outlet.stream, &new, keep, retention).await?;
        let mut appended = appended.into_iter().map(|Appended { id, duplicate }| Sent {
            id,
            partition: outlet.partition,
            duplicate,
        });
        let told = earlier.into_iter().map(|earlier| earlier.or_else(|| appended.next()));
        told.collect::<Option<_>>().ok_or_else(too_few)
    }

    /// Looks for ids in the partitions they had before recent growths.
    async fn find_earlier(&self, route: &Route, ids: &[&KnownId]) -> Result<Vec<Option<Sent>>> {
        let mut found: Vec<Option<Sent>> = vec![None; ids.len()];
        let mut partitions: Vec<Partition> =
            ids.iter().flat_map(|known| known.earlier.iter().copied()).collect();
        partitions.sort_unstable();
        partitions.dedup();
        for partition in partitions {
            let places: Vec<usize> =
                (0..ids.len()).filter(|at| ids[*at].earlier.contains(&partition)).collect();
            let asked: Vec<&str> = places.iter().map(|at| ids[*at].id.as_str()).collect();
            let stream = keys::stream(&route.topic, partition);
            let there = self.inner.queue.backend().appended(&stream, &asked).await?;
            for (at, id) in places.into_iter().zip(there) {
                found[at] = found[at].or(id.map(|id| Sent { id, partition, duplicate: true }));
            }
        }
        Ok(found)
    }

    fn once_sends(&self, route: &Route, outlet: &Outlet) -> OnceSends {
        let backend = self.inner.queue.backend().clone();
        let stream = outlet.stream.clone();
        let retention = route.topic.policies.retention;
        let keep = self.inner.config.idempotence_window;
        let carry_out = move |entries: Vec<Once>| {
            let (backend, stream) = (backend.clone(), stream.clone());
            async move {
                match backend.append_once(&stream, &entries, keep, &retention).await {
                    Ok(appended) => appended.into_iter().map(Ok).collect(),
                    Err(error) => {
                        let error = QueueError::from(error);
                        entries.iter().map(|_| Err(error.again())).collect()
                    }
                }
            }
        };
        Coalescer::new(CoalescerConfig::default(), carry_out)
            .expect("the default settings are valid")
    }
}
