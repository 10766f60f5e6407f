//! The spool: a file where events wait while the backend is away.
//!
//! Upstream: `publish`, when an event cannot be stored. Downstream: the replay, which moves events to their streams.
//! Promises: events that were added are on the disk, in the order they were added; while any of them waits, every newer
//! event of the bus goes behind it, so the order within each session stays as it was published. It is bounded, and full
//! is an error. A spool belongs to one bus.
//! Not here: when to replay, and how to see to it that nothing is stored twice (see `streamed/replay`).

mod fault_injection;
mod file;
mod record;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use headwater_stream::{Coalescer, CoalescerConfig};
use tokio::sync::{Notify, watch};
use tokio::task::spawn_blocking;
use tracing::error;

use crate::bus::SpoolHealth;
use crate::error::{BusError, Result, SpoolError};
use crate::limits::SPOOL_BYTES_MAX;
use crate::metrics;

use self::file::SpoolFile;
pub(crate) use self::record::SpooledEvent;

/// Where events wait while the backend is away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpoolConfig {
    /// The file; it is made if it is missing. Events that their streams refuse for good go to a file beside it, with
    /// `.rejected` at the end of its name.
    pub file: PathBuf,
    /// Bytes it may have, and as many the file beside it; if that is full, nothing is replayed until somebody removes
    /// it. Default: 64 MiB, at most 1 GiB.
    pub max_bytes: u64,
}

impl SpoolConfig {
    /// A spool in this file.
    pub fn new(file: impl Into<PathBuf>) -> Self {
        Self { file: file.into(), max_bytes: 64 * 1024 * 1024 }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        if self.file.file_name().is_none() {
            let problem = format!("`{}` names no file", self.file.display());
            return Err(BusError::invalid("spool", problem));
        }
        if !(4096..=SPOOL_BYTES_MAX).contains(&self.max_bytes) {
            let problem = format!("{}; 4096 to {SPOOL_BYTES_MAX}", self.max_bytes);
            return Err(BusError::invalid("max_bytes of the spool", problem));
        }
        Ok(())
    }
}

/// An open spool.
pub(crate) struct Spool {
    shared: Arc<SpoolShared>,
    /// Events that are added at the same time share one sync of the disk.
    writes: Coalescer<PendingWrite, Result<(), SpoolError>>,
}

struct SpoolShared {
    config: SpoolConfig,
    owner: String,
    /// Locked only by threads that may block. `None` once it is closed.
    file: Mutex<Option<SpoolFile>>,
    /// Events that were accepted and may not be in the file yet. While there are any, or any wait in the file, nothing
    /// goes past them.
    unwritten: AtomicUsize,
    /// Events that wait in the file, as it says itself.
    written: AtomicUsize,
    bytes: AtomicU64,
    rejected: AtomicU64,
    /// Something was added.
    added: Notify,
    /// How the events that wait get on.
    throttle_state: watch::Sender<ThrottleState>,
}

/// How the events that wait get on, for those that come after them.
#[derive(Clone, Copy, Default)]
struct ThrottleState {
    /// Steps made so far.
    steps: u64,
    /// They get on: one newer event of each caller may be added for each step, so that they become fewer.
    is_draining: bool,
    /// The end is near: newer events wait for it, and then need not be added at all.
    is_almost_drained: bool,
}

impl Spool {
    /// Opens the spool of the bus `owner`, with what waits in it.
    pub(crate) async fn open(config: SpoolConfig, owner: &str) -> Result<Self> {
        config.validate()?;
        let (path, name, max_bytes) = (config.file.clone(), owner.to_owned(), config.max_bytes);
        let opened = blocking(&config.file, move || SpoolFile::open(&path, &name, max_bytes));
        let file = opened.await?;
        let (beside, name) = (rejected_path(&config.file), owner.to_owned());
        let counting = blocking(&config.file, move || file::rejected(&beside, &name, 0));
        // It holds up nobody: what is in it is over, and whoever looks into it is told.
        let rejected = counting.await.unwrap_or_else(|error| {
            error!(%error, "the file of rejected events cannot be read");
            (0, Vec::new())
        });
        let shared = Arc::new(SpoolShared {
            owner: owner.to_owned(),
            unwritten: AtomicUsize::new(0),
            written: AtomicUsize::new(file.pending()),
            bytes: AtomicU64::new(file.bytes()),
            rejected: AtomicU64::new(rejected.0),
            added: Notify::new(),
            throttle_state: watch::Sender::new(ThrottleState::default()),
            file: Mutex::new(Some(file)),
            config,
        });
        metrics::spooled(shared.pending());
        let writer = Arc::clone(&shared);
        let writes = Coalescer::new(CoalescerConfig::default(), move |batch| {
            let shared = Arc::clone(&writer);
            async move { shared.write(batch).await }
        })?;
        Ok(Self { shared, writes })
    }

    /// Whether events wait: then every newer one must be added behind them.
    pub(crate) fn has_pending(&self) -> bool {
        self.shared.pending() > 0
    }

    /// Adds events in order, all or none. When it returns they are on the disk.
    pub(crate) async fn add(&self, events: Vec<SpooledEvent>) -> Result<(), SpoolError> {
        let bytes = events.iter().map(|event| event.fields.bytes()).sum();
        let gone = || SpoolError::Disk {
            file: self.shared.config.file.clone(),
            problem: "the writer ended".to_owned(),
        };
        let events = PendingWrite::new(&self.shared, events);
        let written = self.writes.call_weighing(events, bytes).await;
        metrics::spooled(self.shared.pending());
        written.unwrap_or_else(|_| Err(gone()))
    }

    /// Lets older events get on before newer ones are added. Without this, whoever publishes all the time would be
    /// ahead of the replay for ever. Returns at once while the backend is away. Cancel-safe.
    pub(crate) async fn throttle(&self) {
        let mut throttle_state = self.shared.throttle_state.subscribe();
        let begun = throttle_state.borrow_and_update().steps;
        let may_go_on = |throttle_state: &ThrottleState| {
            let gets_on = throttle_state.is_draining && throttle_state.steps == begun;
            !throttle_state.is_almost_drained && !gets_on
        };
        // The sender lives as long as the spool does.
        let _ = throttle_state.wait_for(may_go_on).await;
    }

    /// For the one who moves events: what it says of its progress holds until it says otherwise or goes away.
    pub(crate) fn drain_throttle(&self) -> Throttle {
        Throttle(Arc::clone(&self.shared))
    }

    /// Returns when events wait, or soon after. Cancel-safe.
    pub(crate) async fn wait_for_events(&self) {
        if !self.has_pending() {
            self.shared.added.notified().await;
        }
    }

    /// The oldest events, up to so many and about so many bytes. Events that are being written are not among them.
    pub(crate) async fn peek(
        &self,
        count: usize,
        max_bytes: u64,
    ) -> Result<Vec<SpooledEvent>, SpoolError> {
        self.with_file(move |file| file.peek(count, max_bytes)).await
    }

    /// The oldest `count` events are in their streams.
    pub(crate) async fn acknowledge(&self, count: usize) -> Result<(), SpoolError> {
        let noting = self.with_file(move |file| {
            file.acknowledge(count);
            Ok(())
        });
        noting.await?;
        metrics::spooled(self.shared.pending());
        Ok(())
    }

    /// Puts events that their stream refused for good into the file beside the spool, each once. They still wait in the
    /// spool. An error means that they must not be taken out of it.
    pub(crate) async fn reject(&self, events: Vec<SpooledEvent>) -> Result<(), SpoolError> {
        let shared = &self.shared;
        let (path, owner) = (rejected_path(&shared.config.file), shared.owner.clone());
        let max_bytes = shared.config.max_bytes;
        let write = move || file::reject(&path, &owner, max_bytes, &events);
        let count = blocking(&shared.config.file, write).await?;
        shared.rejected.store(count, Ordering::SeqCst);
        Ok(())
    }

    /// The oldest events that their streams refused for good, up to so many.
    pub(crate) async fn rejected(&self, count: usize) -> Result<Vec<SpooledEvent>, SpoolError> {
        let shared = &self.shared;
        let (path, owner) = (rejected_path(&shared.config.file), shared.owner.clone());
        let read = move || file::rejected(&path, &owner, count);
        Ok(blocking(&shared.config.file, read).await?.1)
    }

    /// Closes the file, with what waits in it. When it returns, another bus may open it.
    pub(crate) async fn close(&self) {
        let shared = Arc::clone(&self.shared);
        // Closing a file gives its lock back; an error means that the runtime is at its end, and the process with it.
        let _ = spawn_blocking(move || drop(shared.lock().take())).await;
    }

    pub(crate) fn health(&self) -> SpoolHealth {
        let shared = &self.shared;
        SpoolHealth {
            events: shared.pending(),
            bytes: shared.bytes.load(Ordering::SeqCst),
            max_bytes: shared.config.max_bytes,
            rejected: shared.rejected.load(Ordering::SeqCst),
        }
    }

    async fn with_file<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut SpoolFile) -> Result<T, SpoolError> + Send + 'static,
    ) -> Result<T, SpoolError> {
        let shared = Arc::clone(&self.shared);
        let path = shared.config.file.clone();
        blocking(&path, move || shared.with_file(work)).await
    }
}

/// Events on their way to the file. They count from the beginning, so that nothing goes past them, until they are in
/// the file or refused, even if whoever added them has gone away.
struct PendingWrite {
    shared: Arc<SpoolShared>,
    events: Vec<SpooledEvent>,
}

impl PendingWrite {
    fn new(shared: &Arc<SpoolShared>, events: Vec<SpooledEvent>) -> Self {
        shared.unwritten.fetch_add(events.len(), Ordering::SeqCst);
        Self { shared: Arc::clone(shared), events }
    }
}

impl Drop for PendingWrite {
    fn drop(&mut self) {
        self.shared.unwritten.fetch_sub(self.events.len(), Ordering::SeqCst);
        self.shared.added.notify_one();
    }
}

/// Says how the events that wait get on.
pub(crate) struct Throttle(Arc<SpoolShared>);

impl Throttle {
    /// Some of them are in their streams. When no more than `few` are left, newer ones wait for the end.
    pub(crate) fn advanced(&self, few: usize) {
        let left = self.0.pending();
        self.0.throttle_state.send_modify(|throttle_state| {
            throttle_state.steps += 1;
            throttle_state.is_draining = left > 0;
            throttle_state.is_almost_drained =
                left > 0 && (left <= few || throttle_state.is_almost_drained);
        });
    }

    /// They do not get on, or there are none.
    pub(crate) fn stalled(&self) {
        self.0.throttle_state.send_modify(|throttle_state| {
            (throttle_state.is_draining, throttle_state.is_almost_drained) = (false, false)
        });
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        self.stalled();
    }
}

impl SpoolShared {
    /// All events that are not in their streams. One that is just being written may count twice, and never not at all.
    fn pending(&self) -> usize {
        // In this order: an event is in the file before it ceases to be unwritten.
        let unwritten = self.unwritten.load(Ordering::SeqCst);
        unwritten + self.written.load(Ordering::SeqCst)
    }

    /// Writes what gathered, one request after the other if all together do not fit.
    async fn write(self: Arc<Self>, batch: Vec<PendingWrite>) -> Vec<Result<(), SpoolError>> {
        let (count, path) = (batch.len(), self.config.file.clone());
        let work = move || {
            self.with_file(|file| {
                let all: Vec<SpooledEvent> =
                    batch.iter().flat_map(|unwritten| unwritten.events.iter().cloned()).collect();
                if file.append(&all).is_ok() {
                    return Ok(vec![Ok(()); batch.len()]);
                }
                Ok(batch.iter().map(|unwritten| file.append(&unwritten.events)).collect())
            })
        };
        blocking(&path, work).await.unwrap_or_else(|error| vec![Err(error); count])
    }

    fn with_file<T>(
        &self,
        work: impl FnOnce(&mut SpoolFile) -> Result<T, SpoolError>,
    ) -> Result<T, SpoolError> {
        let mut file = self.lock();
        let Some(file) = file.as_mut() else {
            let (file, problem) = (self.config.file.clone(), "it is closed".to_owned());
            return Err(SpoolError::Disk { file, problem });
        };
        let result = work(file);
        self.bytes.store(file.bytes(), Ordering::SeqCst);
        self.written.store(file.pending(), Ordering::SeqCst);
        result
    }

    fn lock(&self) -> MutexGuard<'_, Option<SpoolFile>> {
        self.file.lock().expect("no code panics while it holds this lock")
    }
}

fn rejected_path(spool: &Path) -> PathBuf {
    let mut path = spool.as_os_str().to_owned();
    path.push(".rejected");
    path.into()
}

async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> Result<T, SpoolError> + Send + 'static,
) -> Result<T, SpoolError> {
    spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(SpoolError::Disk { file: path.to_owned(), problem: error.to_string() })
    })
}

#[cfg(test)]
mod tests;
