//! The DuckDB file of this process: opened, asked, filled, and let go.
//!
//! Upstream: `analytics`. Downstream: `headwater-analytics`. Promises: a file is opened, and asked to close, on threads that may
//! block; opened once, however often the streams behind it fail.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use headwater_analytics::{
    AnalyticsError, Ingest, IngestConfig, LetterMirror, LetterMirrorConfig, Table, Warehouse,
    WarehouseReader,
};
use headwater_queue::Queue;
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::spawn_blocking;

use crate::analytics::{Batches, Problem};

/// A rebuild lets the entries of the last minutes be: other programs write into the stream, and from there it may take a while
/// into the database.
const LATE_MS: u64 = 10 * 60 * 1000;

/// The file, if it is open.
#[derive(Debug, Default)]
pub(super) struct Sink {
    file: Mutex<File>,
}

#[derive(Clone, Debug, Default)]
enum File {
    #[default]
    Closed,
    ToRead(WarehouseReader),
    ToWrite(Arc<Warehouse>),
}

/// Events and dead letters on their way in.
#[derive(Debug)]
pub(super) struct Ingesting {
    ingest: Ingest,
    letters: LetterMirror,
}

impl Sink {
    pub(super) const IS_BUILT_IN: bool = true;

    pub(super) async fn to_read(path: &Path) -> Result<Self, Problem> {
        let reader = blocking(path, WarehouseReader::open).await?;
        Ok(Self { file: Mutex::new(File::ToRead(reader)) })
    }

    pub(super) async fn to_write(path: &Path) -> Result<Self, Problem> {
        let warehouse = blocking(path, Warehouse::open).await?;
        Ok(Self { file: Mutex::new(File::ToWrite(Arc::new(warehouse))) })
    }

    pub(super) fn can_write(&self) -> bool {
        matches!(self.file(), File::ToWrite(_))
    }

    /// Opens the file, unless it is open, and begins to take events in.
    pub(super) async fn begin(&self, path: &Path, queue: &Queue) -> Result<Ingesting, Problem> {
        let warehouse = match self.file() {
            File::ToWrite(warehouse) => warehouse,
            File::Closed | File::ToRead(_) => {
                let warehouse = Arc::new(blocking(path, Warehouse::open).await?);
                *self.file.lock().unwrap_or_else(PoisonError::into_inner) =
                    File::ToWrite(Arc::clone(&warehouse));
                warehouse
            }
        };
        let ingest = Ingest::start(queue, Arc::clone(&warehouse), IngestConfig::default()).await?;
        let letters = LetterMirror::new(queue.clone(), warehouse, LetterMirrorConfig::default());
        Ok(Ingesting { ingest, letters })
    }

    /// Keeps the place until it has answered, or given up.
    pub(super) async fn query(
        &self,
        sql: &str,
        place: OwnedSemaphorePermit,
    ) -> Result<Table, Problem> {
        let reader = match self.file() {
            File::Closed => return Err(Problem::NotOpen(String::new())),
            File::ToRead(reader) => reader,
            File::ToWrite(warehouse) => warehouse.reader().clone(),
        };
        Ok(reader.query_keeping(sql, place).await?)
    }

    /// Rows removed and stored.
    pub(super) async fn rebuild(&self, batches: Batches) -> Result<(u64, u64), Problem> {
        let File::ToWrite(warehouse) = self.file() else {
            return Err(Problem::NotOpen(String::new()));
        };
        let keep_from =
            Timestamp::from_millis(SystemClock.now().as_millis().saturating_sub(LATE_MS));
        let rebuilt = spawn_blocking(move || warehouse.rebuild(keep_from, batches)).await;
        let rebuilt = rebuilt.unwrap_or_else(|ended| {
            Err(AnalyticsError::Warehouse {
                what: "rebuild its tables",
                problem: ended.to_string(),
            })
        })?;
        Ok((rebuilt.removed, rebuilt.stored))
    }

    fn file(&self) -> File {
        self.file.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Ingesting {
    /// Until `shutdown`; then what is in hand is stored.
    pub(super) async fn run(self, shutdown: impl Future<Output = ()>) {
        self.letters.run(shutdown).await;
        self.ingest.stop().await;
    }
}

async fn blocking<T: Send + 'static>(
    path: &Path,
    open: impl FnOnce(&Path) -> Result<T, AnalyticsError> + Send + 'static,
) -> Result<T, Problem> {
    let path: PathBuf = path.to_owned();
    let opened = spawn_blocking(move || open(&path)).await;
    opened
        .unwrap_or_else(|ended| Err(AnalyticsError::Source(ended.to_string())))
        .map_err(Problem::from)
}
