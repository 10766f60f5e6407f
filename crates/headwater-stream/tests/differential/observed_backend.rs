//! One backend and what a sequence has seen of it: runs calls and returns results without ids, epochs and
//! times.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::{
    Backend, ConsumerName, DedupScope, DelayId, DelayName, DueTime, Entry, EntryId, Epoch, Fence,
    Fields, GroupName, GroupReader, HolderName, LeaseName, MapName, Range, RegistryMap, Result,
    SetName, StreamName, TailReader,
};

use crate::operations::*;

pub(crate) const HOUR: Duration = Duration::from_secs(3600);
/// Far in the past and far in the future, in milliseconds since 1970.
const PAST_MS: u64 = 1_000;
const FUTURE_MS: u64 = 4_000_000_000_000;
const ALL: usize = 10_000;

/// A result to compare. Lag is separate: a server may not know it.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallResult {
    pub(crate) text: String,
    pub(crate) lags: Vec<Option<u64>>,
}

impl CallResult {
    pub(crate) fn agrees_with(&self, other: &Self) -> bool {
        let lags_agree = self.lags.iter().zip(&other.lags).all(|lags| match lags {
            (Some(one), Some(other)) => one == other,
            _ => true,
        });
        self.text == other.text && lags_agree
    }
}

/// A connection shared by many sequences, one after the other.
pub(crate) struct Connection {
    backend: Arc<dyn Backend>,
    pub(crate) readers: HashMap<(u8, u8), Box<dyn GroupReader>>,
    pub(crate) tail: Box<dyn TailReader>,
}

impl Connection {
    pub(crate) async fn new(backend: Arc<dyn Backend>) -> Result<Self> {
        let tail = backend.tail().await?;
        Ok(Self { backend, readers: HashMap::new(), tail })
    }
}

/// What one sequence has seen.
pub(crate) struct ObservedBackend<'a> {
    pub(crate) connection: &'a mut Connection,
    prefix: String,
    /// The entry ids of each stream, in order of creation.
    pub(crate) entries: HashMap<u8, Vec<EntryId>>,
    pub(crate) delayed: HashMap<u8, Vec<DelayId>>,
    pub(crate) epochs: HashMap<u8, Vec<Epoch>>,
    appended: usize,
    /// Streams with deleted unread entries: a server may not know the lag of their groups.
    pub(crate) holes: [bool; STREAMS as usize + 1],
}

pub(crate) fn consumer(number: u8) -> ConsumerName {
    ConsumerName::new(format!("consumer{number}")).unwrap()
}

pub(crate) fn group(number: u8) -> GroupName {
    GroupName::new(format!("group{number}")).unwrap()
}

pub(crate) fn holder(number: u8) -> HolderName {
    HolderName::new(format!("holder{number}")).unwrap()
}

pub(crate) fn registry_map(fields: &[(u8, u8)]) -> RegistryMap {
    fields.iter().map(|(name, value)| (format!("f{name}"), value_of(*value))).collect()
}

pub(crate) fn value_of(value: u8) -> Bytes {
    Bytes::from("v".repeat(usize::from(value)))
}

pub(crate) fn nth<T: Copy>(all: Option<&Vec<T>>, nth: Nth) -> Option<T> {
    let all = all.filter(|all| !all.is_empty())?;
    Some(all[usize::from(nth) % all.len()])
}

pub(crate) fn place<T: PartialEq + Debug>(all: Option<&Vec<T>>, one: &T) -> String {
    match all.and_then(|all| all.iter().position(|known| known == one)) {
        Some(place) => format!("#{place}"),
        None => "never seen".to_owned(),
    }
}

pub(crate) fn errors<T>(answer: Result<T>, text: impl FnOnce(T) -> String) -> String {
    match answer {
        Ok(value) => text(value),
        // Only the variant: names and reasons differ by backend.
        Err(error) => {
            let debug = format!("{error:?}");
            format!("error {}", debug.split([' ', '{', '(']).next().unwrap_or_default())
        }
    }
}

pub(crate) fn idle(long: bool) -> Duration {
    if long { HOUR } else { Duration::ZERO }
}

impl<'a> ObservedBackend<'a> {
    pub(crate) fn new(connection: &'a mut Connection, prefix: String) -> Self {
        let (entries, delayed, epochs) = Default::default();
        Self {
            connection,
            prefix,
            entries,
            delayed,
            epochs,
            appended: 0,
            holes: Default::default(),
        }
    }

    pub(crate) fn backend(&self) -> Arc<dyn Backend> {
        Arc::clone(&self.connection.backend)
    }

    fn name(&self, kind: &str, number: u8, own: u8) -> String {
        match number {
            number if number < own => format!("{{{}}}:{kind}{number}", self.prefix),
            _ => format!("{{{}}}:shared", self.prefix),
        }
    }

    pub(crate) fn stream(&self, number: u8) -> StreamName {
        StreamName::new(self.name("stream", number, STREAMS)).unwrap()
    }

    pub(crate) fn delays(&self, number: u8) -> DelayName {
        DelayName::new(self.name("delays", number, DELAYS)).unwrap()
    }

    pub(crate) fn lease(&self, number: u8) -> LeaseName {
        LeaseName::new(self.name("lease", number, LEASES)).unwrap()
    }

    pub(crate) fn map(&self, number: u8) -> MapName {
        MapName::new(self.name("map", number, MAPS)).unwrap()
    }

    pub(crate) fn set(&self, number: u8) -> SetName {
        SetName::new(self.name("set", number, SETS)).unwrap()
    }

    pub(crate) fn scope(&self) -> DedupScope {
        DedupScope::new(format!("{{{}}}:dedup", self.prefix)).unwrap()
    }

    /// The id of an entry seen before, or one that never existed.
    pub(crate) fn id(&self, stream: u8, which: Nth) -> EntryId {
        nth(self.entries.get(&stream), which).unwrap_or(EntryId::new(1, 1))
    }

    pub(crate) fn ids(&self, stream: u8, which: &[Nth]) -> Vec<EntryId> {
        which.iter().map(|which| self.id(stream, *which)).collect()
    }

    pub(crate) fn show_id(&self, stream: u8, id: EntryId) -> String {
        if id == EntryId::MIN {
            return "MIN".to_owned();
        }
        place(self.entries.get(&stream), &id)
    }

    pub(crate) fn show_ids(&self, stream: u8, ids: &[EntryId]) -> String {
        ids.iter().map(|id| self.show_id(stream, *id)).collect::<Vec<_>>().join(" ")
    }

    pub(crate) fn show_entries(&self, stream: u8, entries: &[Entry]) -> String {
        let show = |e: &Entry| format!("{}={:?}", self.show_id(stream, e.id), e.fields);
        entries.iter().map(show).collect::<Vec<_>>().join(" ")
    }

    pub(crate) fn fence(&self, (lease, which): (u8, Nth)) -> Fence {
        let epoch = nth(self.epochs.get(&lease), which).unwrap_or(Epoch(1));
        Fence { lease: self.lease(lease), epoch }
    }

    pub(crate) fn show_epoch(&mut self, lease: u8, epoch: Epoch) -> String {
        let known = self.epochs.entry(lease).or_default();
        if !known.contains(&epoch) {
            known.push(epoch);
        }
        let grows = known.is_sorted();
        format!("{} grows={grows}", place(Some(known), &epoch))
    }

    pub(crate) fn due(when: When) -> DueTime {
        match when {
            When::Past(ms) => DueTime::At(Timestamp::from_millis(PAST_MS + u64::from(ms))),
            When::AtOnce => DueTime::After(Duration::ZERO),
            When::InAnHour => DueTime::After(HOUR),
            When::FarFuture(ms) => DueTime::At(Timestamp::from_millis(FUTURE_MS + u64::from(ms))),
        }
    }

    pub(crate) fn show_due(at: Timestamp) -> String {
        match at.as_millis() {
            ms if !(2 * PAST_MS..FUTURE_MS).contains(&ms) => ms.to_string(),
            _ => "around now".to_owned(),
        }
    }

    pub(crate) fn next_fields(&mut self) -> Fields {
        self.appended += 1;
        Fields::new([("number", self.appended.to_string())])
    }

    /// Learns the ids of entries created without a reported id.
    pub(crate) async fn discover(&mut self) {
        let backend = self.backend();
        for number in 0..=STREAMS {
            let known = self.entries.entry(number).or_default();
            let from = known.last().map_or(EntryId::MIN, |id| id.next());
            let range = Range { from, ..Range::first(ALL) };
            let stream = self.stream(number);
            if let Ok(found) = backend.range(&stream, range).await {
                let ids = found.into_iter().map(|entry| entry.id);
                self.entries.entry(number).or_default().extend(ids);
            }
        }
        for number in 0..=DELAYS {
            if let Ok(found) = backend.delayed(&self.delays(number), 0, ALL).await {
                let known = self.delayed.entry(number).or_default();
                let mut new: Vec<DelayId> =
                    found.into_iter().map(|d| d.id).filter(|id| !known.contains(id)).collect();
                new.sort();
                known.extend(new);
            }
        }
    }

    /// The complete state at the end of a sequence.
    pub(crate) async fn everything(&mut self) -> Vec<(String, CallResult)> {
        self.discover().await;
        let mut all = Vec::new();
        for stream in 0..=STREAMS {
            all.push((format!("stats of stream {stream}"), self.stats(stream).await));
            let mut calls = vec![Operation::Range {
                stream,
                from: None,
                to: None,
                backward: false,
                count: 255,
            }];
            calls.extend((0..GROUPS).map(|group| Operation::Pending {
                stream,
                group,
                consumer: None,
                long_idle: false,
                after: None,
                count: 255,
            }));
            for call in calls {
                all.push((format!("{call:?}"), self.run(&call).await));
            }
        }
        let mut calls = vec![Operation::Leases, Operation::Begin { ids: (0..4).collect() }];
        calls.extend((0..=DELAYS).map(|delays| Operation::Delayed {
            delays,
            offset: 0,
            count: 255,
        }));
        calls.extend((0..=MAPS).map(|map| Operation::MapGet { map }));
        calls.extend((0..=SETS).map(|set| Operation::SetMembers { set }));
        for call in calls {
            all.push((format!("{call:?}"), self.run(&call).await));
        }
        all
    }
}
