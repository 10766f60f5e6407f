//! The spool: a file that buffers events while the backend is unavailable.
//!
//! Upstream: `publish`, when an event cannot be stored. Downstream: `streamed/spool_drain` moves events to their
//! streams.
//! Guarantees: added events are synced to disk, in order; while the spool is not empty, every newer event of the bus is
//! added behind, so the order within each session is kept. It is bounded; full is an error. A spool belongs to one
//! bus.
//! Not here: when to drain, and how duplicates are avoided (see `streamed/spool_drain`).

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

/// Settings of a spool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpoolConfig {
    /// The file; it is created if missing. Events that are permanently rejected by their streams go to a file beside
    /// it, with the suffix `.rejected`.
    pub file: PathBuf,
    /// Size limit in bytes of the file, and of the `.rejected` file; if the latter is full, the spool is not drained
    /// until an operator removes it. Default: 64 MiB, at most 1 GiB.
    pub max_bytes: u64,
}

impl SpoolConfig {
    /// A spool in this file, with the default limit.
    pub fn new(file: impl Into<PathBuf>) -> Self {
        Self { file: file.into(), max_bytes: 64 * 1024 * 1024 }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        if self.file.file_name().is_none() {
            let problem = format!("`{}` has no file name", self.file.display());
            return Err(BusError::invalid("spool", problem));
        }
        if !(4096..=SPOOL_BYTES_MAX).contains(&self.max_bytes) {
            let problem = format!("{}; 4096 to {SPOOL_BYTES_MAX}", self.max_bytes);
            return Err(BusError::invalid("spool `max_bytes`", problem));
        }
        Ok(())
    }
}

/// An open spool.
pub(crate) struct Spool {
    shared: Arc<SpoolShared>,
    /// Batches concurrent writes into one disk sync.
    writes: Coalescer<PendingWrite, Result<(), SpoolError>>,
}

struct SpoolShared {
    config: SpoolConfig,
    owner: String,
    /// Locked only by threads that may block. `None` once it is closed.
    file: Mutex<Option<SpoolFile>>,
    /// Events that were accepted and may not be in the file yet. While this or `written` is not zero, newer events
    /// must be added behind.
    unwritten: AtomicUsize,
    /// Events in the file.
    written: AtomicUsize,
    bytes: AtomicU64,
    rejected: AtomicU64,
    /// Notified when events were added.
    added: Notify,
    /// Progress of the drain.
    throttle_state: watch::Sender<ThrottleState>,
}

/// Progress of the drain, for throttling newer events.
#[derive(Clone, Copy, Default)]
struct ThrottleState {
    /// Number of drain steps.
    steps: u64,
    /// The drain makes progress: each caller may add one batch per step, so that the spool gets shorter.
    is_draining: bool,
    /// The spool is almost empty: newer events wait until it is, and are then stored directly.
    is_almost_drained: bool,
}

impl Spool {
    /// Opens the spool of the bus `owner`, with its events.
    pub(crate) async fn open(config: SpoolConfig, owner: &str) -> Result<Self> {
        config.validate()?;
        let (path, name, max_bytes) = (config.file.clone(), owner.to_owned(), config.max_bytes);
        let opened = blocking(&config.file, move || SpoolFile::open(&path, &name, max_bytes));
        let file = opened.await?;
        let (beside, name) = (rejected_path(&config.file), owner.to_owned());
        let counting = blocking(&config.file, move || file::rejected(&beside, &name, 0));
        // Not fatal: these events are already rejected, and reading them later reports the error.
        let rejected = counting.await.unwrap_or_else(|error| {
            error!(%error, "file of rejected events cannot be read");
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

    /// Whether it has events: then every newer event must be added behind them.
    pub(crate) fn has_pending(&self) -> bool {
        self.shared.pending() > 0
    }

    /// Adds events in order, all or none. They are on disk when it returns.
    pub(crate) async fn add(&self, events: Vec<SpooledEvent>) -> Result<(), SpoolError> {
        let bytes = events.iter().map(|event| event.fields.bytes()).sum();
        let writer_ended = || SpoolError::Disk {
            file: self.shared.config.file.clone(),
            problem: "the writer task ended".to_owned(),
        };
        let events = PendingWrite::new(&self.shared, events);
        let written = self.writes.call_with_size(events, bytes).await;
        metrics::spooled(self.shared.pending());
        written.unwrap_or_else(|_| Err(writer_ended()))
    }

    /// Waits for the drain before newer events are added. Otherwise a busy publisher could stay ahead of the drain
    /// forever. Returns at once if the drain is stalled. Cancel-safe.
    pub(crate) async fn throttle(&self) {
        let mut throttle_state = self.shared.throttle_state.subscribe();
        let start = throttle_state.borrow_and_update().steps;
        let may_go_on = |throttle_state: &ThrottleState| {
            let gets_on = throttle_state.is_draining && throttle_state.steps == start;
            !throttle_state.is_almost_drained && !gets_on
        };
        // The sender lives as long as the spool.
        let _ = throttle_state.wait_for(may_go_on).await;
    }

    /// Reports the progress of the drain. The last report holds until the next one or until it is dropped.
    pub(crate) fn drain_throttle(&self) -> Throttle {
        Throttle(Arc::clone(&self.shared))
    }

    /// Returns when there are events, or soon after. Cancel-safe.
    pub(crate) async fn wait_for_events(&self) {
        if !self.has_pending() {
            self.shared.added.notified().await;
        }
    }

    /// The oldest events, up to `count` and about `max_bytes`. Excludes events that are being written.
    pub(crate) async fn peek(
        &self,
        count: usize,
        max_bytes: u64,
    ) -> Result<Vec<SpooledEvent>, SpoolError> {
        self.with_file(move |file| file.peek(count, max_bytes)).await
    }

    /// Removes the oldest `count` events, which are in their streams now.
    pub(crate) async fn acknowledge(&self, count: usize) -> Result<(), SpoolError> {
        let noting = self.with_file(move |file| {
            file.acknowledge(count);
            Ok(())
        });
        noting.await?;
        metrics::spooled(self.shared.pending());
        Ok(())
    }

    /// Adds permanently rejected events to the `.rejected` file, each once. They stay in the spool. On an error they
    /// must not be removed from it.
    pub(crate) async fn reject(&self, events: Vec<SpooledEvent>) -> Result<(), SpoolError> {
        let shared = &self.shared;
        let (path, owner) = (rejected_path(&shared.config.file), shared.owner.clone());
        let max_bytes = shared.config.max_bytes;
        let write = move || file::reject(&path, &owner, max_bytes, &events);
        let count = blocking(&shared.config.file, write).await?;
        shared.rejected.store(count, Ordering::SeqCst);
        Ok(())
    }

    /// The oldest permanently rejected events, up to `count`.
    pub(crate) async fn rejected(&self, count: usize) -> Result<Vec<SpooledEvent>, SpoolError> {
        let shared = &self.shared;
        let (path, owner) = (rejected_path(&shared.config.file), shared.owner.clone());
        let read = move || file::rejected(&path, &owner, count);
        Ok(blocking(&shared.config.file, read).await?.1)
    }

    /// Closes the file with its events. After it returns, another bus may open it.
    pub(crate) async fn close(&self) {
        let shared = Arc::clone(&self.shared);
        // Closing a file releases its lock. An error means that the runtime is shutting down.
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

/// Events to be written. They are counted from the start until they are in the file or rejected, even if the caller is
/// dropped, so that no newer event overtakes them.
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

/// Reports the progress of the drain.
pub(crate) struct Throttle(Arc<SpoolShared>);

impl Throttle {
    /// Some events were moved to their streams. If at most `few` remain, newer events wait until the spool is empty.
    pub(crate) fn advanced(&self, few: usize) {
        let left = self.0.pending();
        self.0.throttle_state.send_modify(|throttle_state| {
            throttle_state.steps += 1;
            throttle_state.is_draining = left > 0;
            throttle_state.is_almost_drained =
                left > 0 && (left <= few || throttle_state.is_almost_drained);
        });
    }

    /// The drain makes no progress, or the spool is empty.
    pub(crate) fn stalled(&self) {
        self.0.throttle_state.send_modify(|throttle_state| {
            (throttle_state.is_draining, throttle_state.is_almost_drained) = (false, false);
        });
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        self.stalled();
    }
}

impl SpoolShared {
    /// Events that are not in their streams. An event being written may be counted twice, but never missed.
    fn pending(&self) -> usize {
        // In this order: an event is in the file before it stops being unwritten.
        let unwritten = self.unwritten.load(Ordering::SeqCst);
        unwritten + self.written.load(Ordering::SeqCst)
    }

    /// Writes the batch; if it does not fit as a whole, one request after the other.
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
            let (file, problem) = (self.config.file.clone(), "the spool is closed".to_owned());
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
