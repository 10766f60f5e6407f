//! The spool: a stream on disk that buffers events while the backend is unavailable.
//!
//! Upstream: `streamed/store`, when an event cannot be stored. Downstream: an embedded backend in a directory;
//! `streamed/spool_drain` moves events to their streams.
//! Guarantees: added events are synced to disk, in order, and survive a crash; while the spool is not empty, every newer
//! event of the bus is added behind, so the order within each session is kept. It is bounded; full is an error. A
//! spool belongs to one bus, and one process at a time has its directory open.
//! Not here: when to drain, and how duplicates are avoided (see `streamed/spool_drain`).

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::clock::{Clock, Timestamp};
use headwater_stream::{
    Backend, Direction, Entry, EntryId, Fields, IdempotentEntry, MapName, Options, Range,
    RegistryMap, Retention, StreamError, StreamName, connect,
};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use tracing::warn;

use crate::bus::SpoolHealth;
use crate::error::{BusError, Result};
use crate::event::EVENT_ID;
use crate::limits::{BATCH_MAX, SPOOL_BYTES_MAX};
use crate::metrics;
use crate::name::EventId;

/// Fields that an event has in addition while it is in the spool.
const STREAM: &str = "spool_stream";
const ATTEMPTED: &str = "spool_attempted";

/// How long newer events wait for a drain that makes progress.
const THROTTLE_MAX: Duration = Duration::from_secs(5);

/// Dedup window of rejected events: a crash may have prevented their removal from the spool.
const REJECTED_DEDUP_TTL: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Settings of a spool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpoolConfig {
    /// The directory, for this spool alone; it is created if missing. A path without `?`.
    pub directory: PathBuf,
    /// Limit of the events in the spool, in bytes of memory, and of the events that were permanently rejected by their
    /// streams; if the latter is reached, the spool is not drained until some are deleted. On disk it takes up to four
    /// times that. Default: 64 MiB, at most 1 GiB.
    pub max_bytes: u64,
}

impl SpoolConfig {
    /// A spool in this directory, with the default limit.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into(), max_bytes: 64 * 1024 * 1024 }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        self.url()?;
        if !(4096..=SPOOL_BYTES_MAX).contains(&self.max_bytes) {
            let problem = format!("{}; 4096 to {SPOOL_BYTES_MAX}", self.max_bytes);
            return Err(BusError::invalid("spool `max_bytes`", problem));
        }
        Ok(())
    }

    /// The URL of the backend. Its own limit leaves room for rejected events.
    fn url(&self) -> Result<String> {
        // Absolute: `embedded:memory` is not a directory.
        let path = std::path::absolute(&self.directory).ok();
        let path = path.as_ref().and_then(|path| path.to_str()).filter(|path| !path.contains('?'));
        let path = path.ok_or_else(|| {
            let problem = format!("`{}` is not usable in a URL", self.directory.display());
            BusError::invalid("spool `directory`", problem)
        })?;
        let (max_bytes, compact_bytes) = (2 * self.max_bytes + MIB, self.max_bytes.max(MIB));
        Ok(format!("embedded:{path}?max_bytes={max_bytes}&compact_bytes={compact_bytes}"))
    }
}

const MIB: u64 = 1024 * 1024;

/// An event in the spool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SpooledEvent {
    pub(crate) id: EntryId,
    pub(crate) stream: StreamName,
    pub(crate) event_id: EventId,
    pub(crate) fields: Fields,
    /// Whether it was sent before and may be in its stream.
    pub(crate) attempted: bool,
}

impl SpooledEvent {
    /// Decodes an entry of the spool; `None` if another program wrote it.
    pub(crate) fn read(entry: &Entry) -> Option<Self> {
        let text = |name: &str| std::str::from_utf8(entry.fields.get(name)?).ok();
        let is_own = |name: &Bytes| name != STREAM.as_bytes() && name != ATTEMPTED.as_bytes();
        Some(Self {
            id: entry.id,
            stream: StreamName::new(text(STREAM)?).ok()?,
            event_id: EventId::new(text(EVENT_ID)?).ok()?,
            fields: Fields::new(entry.fields.iter().filter(|(name, _)| is_own(name)).cloned()),
            attempted: text(ATTEMPTED) == Some("true"),
        })
    }

    pub(crate) fn spooled_at(&self) -> Timestamp {
        Timestamp::from_millis(self.id.ms)
    }
}

/// Memory use of an entry, as the embedded backend computes it.
fn entry_bytes(fields: &Fields) -> u64 {
    (48 + 64 * fields.len() + fields.bytes()) as u64
}

/// An open spool.
pub(crate) struct Spool {
    config: SpoolConfig,
    backend: Arc<dyn Backend>,
    events: StreamName,
    rejected: StreamName,
    state: Mutex<SpoolState>,
    /// Notified when a call of `add` ends.
    added: Notify,
    /// Whether the drain makes progress.
    is_draining: watch::Sender<bool>,
}

#[derive(Default)]
struct SpoolState {
    /// Events that are or may be in the spool, and their bytes. While this is not zero, newer events must be added behind.
    events: usize,
    bytes: u64,
    rejected: u64,
    /// Calls of `add` so far, and those in flight.
    adds: u64,
    adding: usize,
    /// The last entry that was drained, and drained entries that could not be removed.
    drained: EntryId,
    removed: Vec<EntryId>,
}

/// A call of `add` in flight.
struct AddGuard<'a>(&'a Spool);

impl Drop for AddGuard<'_> {
    fn drop(&mut self) {
        self.0.lock().adding -= 1;
        self.0.added.notify_one();
        self.0.report();
    }
}

impl Spool {
    /// Opens the spool of the bus `owner`, with its events.
    pub(crate) async fn open(
        config: SpoolConfig,
        owner: &str,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        config.validate()?;
        let options = Options { clock, ..Options::default() };
        let backend = connect(&config.url()?, &options).await;
        let spool = Self {
            backend: backend.map_err(|error| failed(&config, error))?,
            config,
            events: StreamName::new("events")?,
            rejected: StreamName::new("rejected")?,
            state: Mutex::default(),
            added: Notify::new(),
            is_draining: watch::Sender::new(false),
        };
        let opened = spool.load(owner).await;
        opened.map_err(|error| failed(&spool.config, error))?;
        Ok(spool)
    }

    /// Checks the owner and counts what is there.
    async fn load(&self, owner: &str) -> Result<(), StreamError> {
        let map = MapName::new("spool")?;
        let fields = RegistryMap::from([("owner".to_owned(), Bytes::from(owner.to_owned()))]);
        self.backend.map_create(&map, &fields).await?;
        let known = self.backend.map_get(&map).await?.unwrap_or_default();
        let known = known.get("owner").map_or(&[][..], |known| known);
        if known != owner.as_bytes() {
            let known = String::from_utf8_lossy(known);
            let problem = format!("it belongs to bus `{known}`, not to `{owner}`");
            return Err(StreamError::invalid("the directory", problem));
        }
        if let Some(stats) = self.backend.stats(&self.events).await? {
            let mut state = self.lock();
            (state.events, state.bytes) = (stats.length as usize, stats.bytes.unwrap_or_default());
        }
        self.report();
        self.count_rejected().await
    }

    /// Whether it may have events: then every newer event must be added behind them.
    pub(crate) fn has_pending(&self) -> bool {
        self.lock().events > 0
    }

    /// Adds events of one stream in order, all or none. They are on disk when it returns. After
    /// [`BusError::SpoolFull`] they are not in the spool; after another error they may be.
    pub(crate) async fn add(
        &self,
        stream: &StreamName,
        events: impl Iterator<Item = &Fields>,
        attempted: bool,
    ) -> Result<()> {
        let stream = Bytes::copy_from_slice(stream.as_str().as_bytes());
        let attempted = Bytes::from_static(if attempted { b"true" } else { b"false" });
        let more = [(STREAM, stream), (ATTEMPTED, attempted)];
        let more = more.map(|(name, value)| (Bytes::from_static(name.as_bytes()), value));
        let entry = |fields: &Fields| Fields::new(fields.iter().cloned().chain(more.clone()));
        let entries: Vec<Fields> = events.map(entry).collect();
        // Counted before the write and even if the caller is dropped, so that no newer event overtakes them. If they
        // turn out not to be in the spool, `peek` corrects the count.
        let _adding = self.begin_add(&entries)?;
        let appended = self.backend.append(&self.events, &entries, &Retention::KEEP_ALL).await;
        appended.map(drop).map_err(|error| failed(&self.config, error))
    }

    fn begin_add(&self, entries: &[Fields]) -> Result<AddGuard<'_>> {
        let mut state = self.lock();
        let (bytes, limit) = (entries.iter().map(entry_bytes).sum::<u64>(), self.config.max_bytes);
        if state.bytes + bytes > limit {
            let (directory, bytes) = (self.config.directory.clone(), state.bytes);
            return Err(BusError::SpoolFull { directory, bytes, limit });
        }
        state.events += entries.len();
        state.bytes += bytes;
        state.adds += 1;
        state.adding += 1;
        Ok(AddGuard(self))
    }

    /// Waits while the drain makes progress, for at most `THROTTLE_MAX`. Otherwise a busy publisher could stay ahead of
    /// it forever. Cancel-safe.
    pub(crate) async fn throttle(&self) {
        let mut is_draining = self.is_draining.subscribe();
        let _ = timeout(THROTTLE_MAX, is_draining.wait_for(|is_draining| !is_draining)).await;
    }

    /// Reports whether the drain makes progress.
    pub(crate) fn set_draining(&self, is_draining: bool) {
        self.is_draining
            .send_if_modified(|known| std::mem::replace(known, is_draining) != is_draining);
    }

    /// Returns when events were added, or soon after. Cancel-safe.
    pub(crate) async fn wait_for_add(&self) {
        self.added.notified().await;
    }

    /// The oldest entries that are not drained, up to `count` and `max_bytes`, but at least one if there is one.
    pub(crate) async fn peek(
        &self,
        count: usize,
        max_bytes: u64,
    ) -> Result<Vec<Entry>, StreamError> {
        let (from, adds) = {
            let state = self.lock();
            (state.drained.next(), (state.adding == 0).then_some(state.adds))
        };
        let range = Range { from, to: EntryId::MAX, direction: Direction::Forward, count };
        let mut entries = self.backend.range(&self.events, range).await?;
        let mut bytes = 0;
        let fits = |entry: &&Entry| {
            bytes += entry_bytes(&entry.fields);
            bytes <= max_bytes
        };
        entries.truncate(entries.iter().take_while(fits).count().max(1));
        let mut state = self.lock();
        // Nothing was added meanwhile, so the spool is empty: events of a failed write are not in it.
        if entries.is_empty() && adds == Some(state.adds) {
            (state.events, state.bytes) = (0, 0);
        }
        Ok(entries)
    }

    /// Removes the oldest entries, which are in their streams now. If the disk fails, they are removed together with the
    /// next ones; after a crash in between, they are sent again and deduplicated by id.
    pub(crate) async fn remove(&self, entries: &[Entry]) {
        let removed = {
            let mut state = self.lock();
            let bytes: u64 = entries.iter().map(|entry| entry_bytes(&entry.fields)).sum();
            state.events = state.events.saturating_sub(entries.len());
            state.bytes = state.bytes.saturating_sub(bytes);
            state.drained = entries.last().map_or(state.drained, |last| last.id);
            state.removed.extend(entries.iter().map(|entry| entry.id));
            std::mem::take(&mut state.removed)
        };
        self.report();
        for ids in removed.chunks(BATCH_MAX) {
            if let Err(error) = self.backend.delete_entries(&self.events, ids).await {
                warn!(%error, "spool could not remove events that were moved to their streams");
                self.lock().removed.extend(ids);
            }
        }
    }

    /// Copies permanently rejected entries to a stream of their own, each once. On an error they must not be removed.
    pub(crate) async fn reject(&self, entries: Vec<Entry>) -> Result<(), StreamError> {
        if entries.is_empty() {
            return Ok(());
        }
        let once =
            |entry: Entry| IdempotentEntry { id: entry.id.to_string(), fields: entry.fields };
        let once: Vec<IdempotentEntry> = entries.into_iter().map(once).collect();
        let keep = REJECTED_DEDUP_TTL;
        self.backend.append_once(&self.rejected, &once, keep, &Retention::KEEP_ALL).await?;
        self.count_rejected().await
    }

    /// The oldest permanently rejected events, up to `count`.
    pub(crate) async fn rejected(&self, count: usize) -> Result<Vec<SpooledEvent>, StreamError> {
        let entries = self.backend.range(&self.rejected, Range::first(count)).await?;
        Ok(entries.iter().filter_map(SpooledEvent::read).collect())
    }

    /// Deletes a rejected event. Returns whether it existed.
    pub(crate) async fn delete_rejected(&self, id: EntryId) -> Result<bool, StreamError> {
        let deleted = self.backend.delete_entries(&self.rejected, &[id]).await?;
        self.count_rejected().await?;
        Ok(deleted > 0)
    }

    async fn count_rejected(&self) -> Result<(), StreamError> {
        let stats = self.backend.stats(&self.rejected).await?;
        self.lock().rejected = stats.map_or(0, |stats| stats.length);
        Ok(())
    }

    /// Closes the directory with its events. After it returns, another bus may open it.
    pub(crate) async fn close(&self) {
        if let Err(error) = self.backend.close().await {
            let directory = self.config.directory.display();
            warn!(%directory, %error, "spool could not be closed cleanly");
        }
    }

    pub(crate) fn health(&self) -> SpoolHealth {
        let SpoolState { events, bytes, rejected, .. } = *self.lock();
        SpoolHealth { events, bytes, max_bytes: self.config.max_bytes, rejected }
    }

    fn report(&self) {
        metrics::spooled(self.lock().events);
    }

    fn lock(&self) -> MutexGuard<'_, SpoolState> {
        self.state.lock().expect("no code panics while it holds this lock")
    }
}

fn failed(config: &SpoolConfig, source: StreamError) -> BusError {
    BusError::Spool { directory: config.directory.clone(), source: Arc::new(source) }
}

#[cfg(test)]
mod tests;
