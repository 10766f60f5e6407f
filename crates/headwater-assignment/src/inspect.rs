//! What a service looks like from outside: its streams, their owners, its live consumers; and a release by an operator.
//!
//! Upstream: operator tools; no consumer has to run. Downstream: the backend.
//! Guarantees: reading changes nothing and creates no group. A release takes effect in the order of `release`: the input
//! entry is settled under the fence of the owner before the lease is released, so it does not count towards `owners_max`,
//! and everything that the former owner does under its epoch afterwards is rejected.
//! Not here: working on streams (see [`Assignment`](crate::Assignment)).

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use headwater_stream::{
    Backend, ConsumerName, Direction, Entry, EntryId, Epoch, Fence, HolderName, LeaseInfo,
    LeaseName, MemberList, PendingDelivery, PendingDeliveryQuery, Range, Result, SettleAction,
    SettleBatch, Settlement, StreamError, StreamName,
};

use crate::entry_index::before;
use crate::error::ReleaseError;
use crate::input::{self, MalformedInput};
use crate::names::Names;
use crate::reassignment::is_released;

/// Maximum number of streams in a page of [`list`].
pub const LIST_MAX: usize = 1000;

/// Entries per read, and bytes after which a page ends: an entry can have a megabyte.
const READ_PAGE: usize = 100;
const PAGE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Pending entries per call.
const PENDING_PAGE: usize = 1000;

/// A stream in the input of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssignedStream {
    /// Its input entry.
    pub entry_id: EntryId,
    /// The stream; `None` if the entry is malformed.
    pub stream: Option<StreamName>,
    /// The `Info` of the entry: JSON text, unchanged.
    pub info: Option<Box<str>>,
    /// Whether it has an owner.
    pub state: AssignedState,
    /// The holder of its lease.
    pub holder: Option<HolderName>,
    /// The epoch of its owner; `None` without an owner, and for an owner that is another program without epochs.
    pub epoch: Option<Epoch>,
    /// Remaining time of the lease, unless the owner renews it.
    pub remaining: Option<Duration>,
    /// Number of owners so far, without those that released it.
    pub owners: u64,
}

/// Whether a stream has an owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AssignedState {
    /// No consumer has read its entry.
    Waiting,
    /// A consumer owns it.
    Owned,
    /// Its owner died; a consumer claims it.
    Expired,
    /// Its owner released it; a consumer with free capacity acquires it as new.
    Released,
    /// Its lease key holds a value of another type. It cannot be owned until an operator deletes the key.
    Blocked,
    /// Its entry is malformed, for this reason; the next consumer that reads it moves it to the dead letters.
    Malformed(String),
}

impl AssignedState {
    /// The name of the state in lower case.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Owned => "owned",
            Self::Expired => "expired",
            Self::Released => "released",
            Self::Blocked => "blocked",
            Self::Malformed(_) => "malformed",
        }
    }
}

impl fmt::Display for AssignedState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A page of the streams of a service, in the order in which they were added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AssignedStreams {
    /// The streams.
    pub streams: Vec<AssignedStream>,
    /// Where the next page starts (`after`); `None` if this was the last one.
    pub next: Option<EntryId>,
}

/// A service: its keys, counts and live consumers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceSummary {
    /// The input stream.
    pub input: StreamName,
    /// Streams that no consumer has read yet; `None` if the server does not report it.
    pub waiting: Option<u64>,
    /// Streams with an owner, and those whose owner died or released them.
    pub assigned: u64,
    /// Entries in the dead letters `<service>-input:dlq`.
    pub dead_letters: u64,
    /// The consumers that are alive, in alphabetical order.
    pub members: Vec<HolderName>,
}

/// Result of [`release`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorRelease {
    /// The stream.
    pub stream: StreamName,
    /// Its owner until now; `None` if the owner was dead already.
    pub former_holder: Option<HolderName>,
    /// The epoch that is rejected from now on.
    pub fenced_epoch: Option<Epoch>,
}

/// The streams of a service after an input entry, at most `limit` (1 to [`LIST_MAX`]). A page may be shorter than
/// `limit` although more follow. Streams that are done are not listed.
pub async fn list(
    backend: &dyn Backend,
    service: &str,
    after: Option<EntryId>,
    limit: usize,
) -> Result<AssignedStreams> {
    if !(1..=LIST_MAX).contains(&limit) {
        let problem = format!("{limit} is not between 1 and {LIST_MAX}");
        return Err(StreamError::invalid("limit", problem));
    }
    let names = Names::new(service)?;
    let reader = InputView::open(backend, &names).await?;
    let mut page = AssignedStreams { next: after, ..Default::default() };
    let mut bytes = 0;
    while page.streams.len() < limit && bytes < PAGE_BYTES_MAX {
        let count = READ_PAGE.min(limit - page.streams.len());
        let entries = reader.entries(page.next, count).await?;
        let is_last = entries.len() < count;
        page.next = entries.last().map(|entry| entry.id).or(page.next);
        bytes += entries.iter().map(|entry| entry.fields.bytes()).sum::<usize>();
        page.streams.extend(reader.describe(entries).await?);
        if is_last {
            page.next = None;
            break;
        }
    }
    Ok(page)
}

/// Describes one stream of a service; `None` if no input entry names it: it is done or was never added. Reads the input
/// from the beginning. If it was added more than once, the entry that is owned counts, else the first.
pub async fn describe(
    backend: &dyn Backend,
    service: &str,
    stream: &StreamName,
) -> Result<Option<AssignedStream>> {
    let names = Names::new(service)?;
    InputView::open(backend, &names).await?.find(stream).await
}

/// The keys, counts and live consumers of a service.
pub async fn summarize(backend: &dyn Backend, service: &str) -> Result<ServiceSummary> {
    let names = Names::new(service)?;
    let stats = backend.stats(&names.input).await?;
    let group = stats.as_ref().and_then(|stats| {
        let mut groups = stats.groups.iter();
        groups.find(|group| group.name == names.group)
    });
    let length = stats.as_ref().map_or(0, |stats| stats.length);
    let dead_letters = backend.stats(&names.dead_letters).await?.map_or(0, |stats| stats.length);
    let parse = |text: &str| names.member(text);
    let list = MemberList::new(vec![names.members.clone()]);
    let snapshot = list.read(backend, parse, Vec::new()).await?;
    let mut members: Vec<HolderName> = snapshot.alive().cloned().collect();
    members.sort();
    Ok(ServiceSummary {
        waiting: group.map_or(Some(length), |group| group.lag),
        assigned: group.map_or(0, |group| group.pending),
        input: names.input.clone(),
        dead_letters,
        members,
    })
}

/// Takes a stream from its owner, alive or dead; a consumer with free capacity acquires it as new. The former owner is
/// notified when it next renews its lease; what it does under its epoch until then is rejected.
///
/// Does not count towards `owners_max`. Idempotent: a stream that is released already stays so. May be retried if the
/// backend was unavailable.
pub async fn release(
    backend: &dyn Backend,
    service: &str,
    stream: &StreamName,
) -> Result<OperatorRelease, ReleaseError> {
    let names = Names::new(service)?;
    let lease = names.lease(stream)?;
    let view = InputView::open(backend, &names).await?;
    let found = view.find(stream).await?;
    let not_found = || ReleaseError::NotFound { stream: stream.clone(), service: service.into() };
    let assigned = found.ok_or_else(not_found)?;
    let released = |former: Option<(HolderName, Epoch)>| {
        let (former_holder, fenced_epoch) = former.unzip();
        OperatorRelease { stream: stream.clone(), former_holder, fenced_epoch }
    };
    match (&assigned.state, assigned.holder, assigned.epoch) {
        (AssignedState::Released, ..) => Ok(released(None)),
        (AssignedState::Owned, Some(holder), Some(epoch)) => {
            let fence = Fence { lease, epoch };
            let former = view.release_entry(assigned.entry_id, Some(&fence), None).await?;
            backend.release(&holder, std::slice::from_ref(&fence)).await?;
            // The heartbeat of the owner may have taken the entry back between these two steps: it was still the
            // owner then. Without a lease it would be found as an owner that died.
            if former.is_some() && view.leases(std::slice::from_ref(stream)).await? == [None] {
                view.release_entry(assigned.entry_id, None, former.as_ref()).await?;
            }
            Ok(released(Some((holder, epoch))))
        }
        (AssignedState::Owned, Some(holder), None) => {
            Err(ReleaseError::ForeignOwner { stream: stream.clone(), holder, lease })
        }
        (AssignedState::Expired, ..) => {
            view.release_entry(assigned.entry_id, None, None).await?;
            Ok(released(None))
        }
        (AssignedState::Blocked, ..) => {
            Err(ReleaseError::Blocked { stream: stream.clone(), lease })
        }
        _ => Err(ReleaseError::NotOwned { stream: stream.clone() }),
    }
}

/// Reads the input of a service.
struct InputView<'a> {
    backend: &'a dyn Backend,
    names: &'a Names,
    /// The last entry that was delivered; `None` without a group. Later entries wait; earlier ones that are not pending
    /// are settled.
    last_delivered: Option<EntryId>,
}

impl<'a> InputView<'a> {
    async fn open(backend: &'a dyn Backend, names: &'a Names) -> Result<Self> {
        let stats = backend.stats(&names.input).await?;
        let groups = stats.map(|stats| stats.groups).unwrap_or_default();
        let group = groups.into_iter().find(|group| group.name == names.group);
        Ok(Self { backend, names, last_delivered: group.map(|group| group.last_delivered) })
    }

    async fn entries(&self, after: Option<EntryId>, count: usize) -> Result<Vec<Entry>> {
        let from = after.map_or(EntryId::MIN, EntryId::next);
        let range = Range { from, to: EntryId::MAX, direction: Direction::Forward, count };
        self.backend.range(&self.names.input, range).await
    }

    async fn find(&self, stream: &StreamName) -> Result<Option<AssignedStream>> {
        let (mut first, mut after) = (None, None);
        loop {
            let entries = self.entries(after, READ_PAGE).await?;
            let is_last = entries.len() < READ_PAGE;
            after = entries.last().map(|entry| entry.id).or(after);
            let names_it = |entry: &Entry| {
                let input = input::parse(&entry.fields, self.names);
                input.is_ok_and(|input| input.stream == *stream)
            };
            for found in self.describe(entries.into_iter().filter(names_it).collect()).await? {
                if found.state == AssignedState::Owned {
                    return Ok(Some(found));
                }
                first.get_or_insert(found);
            }
            if is_last {
                return Ok(first);
            }
        }
    }

    /// Describes entries, which are in ascending order; leaves out settled ones.
    async fn describe(&self, entries: Vec<Entry>) -> Result<Vec<AssignedStream>> {
        let (Some(first), Some(last)) = (entries.first(), entries.last()) else {
            return Ok(Vec::new());
        };
        let pending = self.pending(first.id, last.id).await?;
        let is_waiting = |id| self.last_delivered.is_none_or(|last| id > last);
        let parsed: Vec<_> = entries
            .into_iter()
            .filter(|entry| is_waiting(entry.id) || pending.contains_key(&entry.id))
            .map(|entry| (entry.id, input::parse(&entry.fields, self.names)))
            .collect();
        let streams: HashSet<StreamName> = parsed
            .iter()
            .filter_map(|(_, input)| Some(input.as_ref().ok()?.stream.clone()))
            .collect();
        let streams: Vec<StreamName> = streams.into_iter().collect();
        let leases = self.leases(&streams).await?;
        let leases: HashMap<StreamName, Option<LeaseInfo>> =
            streams.into_iter().zip(leases).collect();
        let describe = |(entry_id, input): (EntryId, Result<input::Input, MalformedInput>)| {
            let pending = pending.get(&entry_id);
            let owners = pending.map_or(0, |pending| pending.deliveries);
            let (stream, info, state) = match input {
                Ok(input) => (Some(input.stream), input.info, None),
                Err(MalformedInput(reason)) => (None, None, Some(AssignedState::Malformed(reason))),
            };
            let lease = stream.as_ref().and_then(|stream| leases.get(stream)?.as_ref());
            let state = state.unwrap_or_else(|| state_of(pending, lease));
            let lease = lease.filter(|_| state == AssignedState::Owned);
            AssignedStream {
                holder: lease.map(|lease| lease.holder.clone()),
                epoch: lease.map(|lease| lease.epoch).filter(|epoch| epoch.0 > 0),
                remaining: lease.map(|lease| lease.remaining),
                entry_id,
                stream,
                info,
                state,
                owners,
            }
        };
        Ok(parsed.into_iter().map(describe).collect())
    }

    /// The pending entries in this range.
    async fn pending(
        &self,
        first: EntryId,
        last: EntryId,
    ) -> Result<HashMap<EntryId, PendingDelivery>> {
        let (mut found, mut after) = (HashMap::new(), before(first));
        while self.last_delivered.is_some() {
            let query = PendingDeliveryQuery {
                stream: &self.names.input,
                group: &self.names.group,
                consumer: None,
                min_idle: Duration::ZERO,
                after,
                count: PENDING_PAGE,
            };
            let page = match self.backend.pending(query).await {
                Err(StreamError::NoGroup { .. }) => break,
                page => page?,
            };
            let is_last = page.len() < PENDING_PAGE;
            after = page.last().map(|pending| pending.id);
            found.extend(page.into_iter().map(|pending| (pending.id, pending)));
            if is_last || after >= Some(last) {
                break;
            }
        }
        Ok(found)
    }

    async fn leases(&self, streams: &[StreamName]) -> Result<Vec<Option<LeaseInfo>>> {
        let leases: Vec<LeaseName> =
            streams.iter().map(|stream| self.names.lease(stream)).collect::<Result<_>>()?;
        let found = self.backend.leases(&leases).await?;
        if found.iter().flatten().any(LeaseInfo::is_unknown) {
            let problem = "the server of a lease did not answer".to_owned();
            return Err(StreamError::Unavailable { problem, source: None });
        }
        Ok(found)
    }

    /// Releases an entry for the consumer that has it, if that is `only`, and returns the consumer. Nothing changes if
    /// the entry is released or no longer pending, or goes to another consumer meanwhile.
    async fn release_entry(
        &self,
        id: EntryId,
        fence: Option<&Fence>,
        only: Option<&ConsumerName>,
    ) -> Result<Option<ConsumerName>> {
        let pending = self.pending(id, id).await?.remove(&id);
        let pending = pending.filter(|pending| !is_released(pending));
        let pending = pending.filter(|pending| only.is_none_or(|only| pending.consumer == *only));
        let Some(PendingDelivery { consumer, .. }) = pending else { return Ok(None) };
        let settle = SettleBatch {
            stream: &self.names.input,
            group: &self.names.group,
            consumer: &consumer,
            fence,
            entries: &[Settlement { id, action: SettleAction::Release }],
        };
        match self.backend.settle(settle).await {
            Ok(_) => Ok(Some(consumer)),
            // The owner ended or lost the stream meanwhile.
            Err(StreamError::Fenced { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn state_of(pending: Option<&PendingDelivery>, lease: Option<&LeaseInfo>) -> AssignedState {
    match (pending, lease) {
        (_, Some(lease)) if lease.is_wrong_type() => AssignedState::Blocked,
        (None, _) => AssignedState::Waiting,
        // Added twice: the lease belongs to the other entry.
        (Some(pending), _) if is_released(pending) => AssignedState::Released,
        (Some(_), Some(_)) => AssignedState::Owned,
        (Some(_), None) => AssignedState::Expired,
    }
}
