//! The DuckDB file of this process.
//!
//! Upstream: `analytics`. Downstream: `headwater-analytics`. Guarantees: blocking calls run on blocking threads; the
//! file is opened once, however often the streams fail.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use headwater_analytics::{
    AnalyticsError, AnalyticsReader, AnalyticsStore, DeadLetterMirror, DeadLetterMirrorConfig,
    Ingest, IngestConfig, Table,
};
use headwater_queue::Queue;
use headwater_stream::clock::{Clock, SystemClock, Timestamp};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::spawn_blocking;

use crate::analytics::{AnalyticsRequestError, RebuildBatches};
use crate::server::startup;

/// A rebuild keeps entries younger than this: an entry of another program reaches the database some time after the
/// stream.
const INGEST_LAG_MS: u64 = 10 * 60 * 1000;

/// A DuckDB file, open or closed.
#[derive(Debug, Default)]
pub(super) struct DuckDbFile {
    file: Mutex<OpenFile>,
}

#[derive(Clone, Debug, Default)]
enum OpenFile {
    #[default]
    Closed,
    ReadOnly(AnalyticsReader),
    ReadWrite(Arc<AnalyticsStore>),
}

/// Running ingestion of events and dead letters.
#[derive(Debug)]
pub(super) struct DuckDbIngest {
    ingest: Ingest,
    dead_letters: DeadLetterMirror,
}

impl DuckDbFile {
    pub(super) const IS_BUILT_IN: bool = true;

    pub(super) async fn open_read_only(path: &Path) -> Result<Self, AnalyticsRequestError> {
        let reader = blocking(path, AnalyticsReader::open).await?;
        Ok(Self { file: Mutex::new(OpenFile::ReadOnly(reader)) })
    }

    pub(super) async fn open_read_write(path: &Path) -> Result<Self, AnalyticsRequestError> {
        let store = blocking(path, AnalyticsStore::open).await?;
        startup::restrict_access(path);
        Ok(Self { file: Mutex::new(OpenFile::ReadWrite(Arc::new(store))) })
    }

    pub(super) fn can_write(&self) -> bool {
        matches!(self.file(), OpenFile::ReadWrite(_))
    }

    /// Opens the file, unless it is open, and starts the ingestion.
    pub(super) async fn start_ingest(
        &self,
        path: &Path,
        queue: &Queue,
    ) -> Result<DuckDbIngest, AnalyticsRequestError> {
        let store = match self.file() {
            OpenFile::ReadWrite(store) => store,
            OpenFile::Closed | OpenFile::ReadOnly(_) => {
                let store = Arc::new(blocking(path, AnalyticsStore::open).await?);
                startup::restrict_access(path);
                *self.file.lock().unwrap_or_else(PoisonError::into_inner) =
                    OpenFile::ReadWrite(Arc::clone(&store));
                store
            }
        };
        let ingest = Ingest::start(queue, Arc::clone(&store), IngestConfig::default()).await?;
        let dead_letters =
            DeadLetterMirror::new(queue.clone(), store, DeadLetterMirrorConfig::default());
        Ok(DuckDbIngest { ingest, dead_letters })
    }

    /// Runs a query. Holds the permit until the query has ended, also if the caller is cancelled.
    pub(super) async fn query(
        &self,
        sql: &str,
        limit: Duration,
        permit: OwnedSemaphorePermit,
    ) -> Result<Table, AnalyticsRequestError> {
        let reader = match self.file() {
            OpenFile::Closed => return Err(AnalyticsRequestError::NotOpen(String::new())),
            OpenFile::ReadOnly(reader) => reader,
            OpenFile::ReadWrite(store) => store.reader().clone(),
        };
        Ok(reader.query_within(sql, limit, permit).await?)
    }

    /// Replaces all rows. Returns the number of rows removed and stored.
    pub(super) async fn rebuild(
        &self,
        batches: RebuildBatches,
    ) -> Result<(u64, u64), AnalyticsRequestError> {
        let OpenFile::ReadWrite(store) = self.file() else {
            return Err(AnalyticsRequestError::NotOpen(String::new()));
        };
        let keep_from =
            Timestamp::from_millis(SystemClock.now().as_millis().saturating_sub(INGEST_LAG_MS));
        let rebuilt = spawn_blocking(move || store.rebuild(keep_from, batches)).await;
        let rebuilt = rebuilt.unwrap_or_else(|ended| {
            Err(AnalyticsError::Store { what: "rebuild its tables", problem: ended.to_string() })
        })?;
        Ok((rebuilt.removed, rebuilt.stored))
    }

    fn file(&self) -> OpenFile {
        self.file.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl DuckDbIngest {
    /// Runs until `shutdown` completes, then stores what is in flight.
    pub(super) async fn run(self, shutdown: impl Future<Output = ()>) {
        self.dead_letters.run(shutdown).await;
        self.ingest.stop().await;
    }
}

async fn blocking<T: Send + 'static>(
    path: &Path,
    open: impl FnOnce(&Path) -> Result<T, AnalyticsError> + Send + 'static,
) -> Result<T, AnalyticsRequestError> {
    let path: PathBuf = path.to_owned();
    let opened = spawn_blocking(move || open(&path)).await;
    opened
        .unwrap_or_else(|ended| Err(AnalyticsError::Source(ended.to_string())))
        .map_err(AnalyticsRequestError::from)
}
