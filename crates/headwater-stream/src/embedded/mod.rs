//! Embedded backend: streams in memory or in a directory, without a server.
//!
//! All state is in memory, behind one lock. A durable backend also writes a log of redo records to a
//! directory:
//!
//! `streams` `settle` `pending` `reader` `delays` `leases` `registry` `dedup`: decide what a call does
//! -> `redo_record`: each change as data -> `transaction`, `state`: apply it -> `codec`: its bytes ->
//! `engine`: the lock and the buffer
//! -> `log`, `writer`: two threads write and sync -> `segment`, `directory`: the files
//! -> `snapshot`: replaces a long log -> `recovery`: reads snapshot and log when the directory is opened.
//!
//! Guarantees: a call that returned survives what its `sync` mode states. Unreadable data is an error that
//! names the file and the offset; only an incomplete write at the very end is truncated. One process opens a
//! directory at a time.
//! Leases, delays and expirations use a steady clock (see `clock::steady`), so steps of the wall clock do
//! not affect them. After a restart it continues from the latest time in the log.

mod location;

mod codec;
mod directory;
mod log;
mod read_back;
mod redo_record;
mod segment;
mod state;
mod waiters;

mod recovery;
mod snapshot;

mod engine;
mod transaction;
mod writer;

mod append;
mod dedup;
mod delays;
mod leases;
mod pending;
mod reader;
mod registry;
mod settle;
mod streams;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use async_trait::async_trait;

use self::directory::{Directory, unavailable};
use self::engine::{Engine, EngineShared, EngineThreads};
use self::location::Location;
use self::log::{CommitLog, LogTail, SyncMode};
use self::recovery::Recovered;
use self::redo_record::RedoRecord;
use self::state::EmbeddedState;
use self::transaction::{Durability, Tx};
use self::writer::Compaction;
use crate::backend::{Backend, BackendDescription};
use crate::clock::{SteadyClock, Timestamp};
use crate::connect::Options;
use crate::error::{Result, StreamError};

/// The embedded backend.
#[derive(Debug)]
struct Embedded {
    engine: Arc<Engine>,
    address: String,
    /// Settings and recovery results, as shown by `describe`.
    facts: Vec<(&'static str, String)>,
}

/// Validates a location without accessing it.
pub(crate) fn check_location(location: &str) -> Result<()> {
    Location::parse(location).map(drop)
}

/// Opens the backend at what follows `embedded:` in a URL.
pub(crate) async fn open(location: &str, options: &Options) -> Result<Arc<dyn Backend>> {
    let location = Location::parse(location)?;
    let options = options.clone();
    // Reading a long log blocks, so it must not run on an async worker thread.
    let opened = tokio::task::spawn_blocking(move || match &location.directory {
        Some(path) => open_directory(path, &location, options),
        None => Ok(open_memory(&location, options)),
    });
    match opened.await {
        Ok(backend) => Ok(Arc::new(backend?)),
        Err(error) => Err(StreamError::unavailable("open was cancelled", error)),
    }
}

fn open_memory(location: &Location, options: Options) -> Embedded {
    let state = EmbeddedState::default();
    let clock = Arc::new(SteadyClock::new(options.clock, Timestamp::default()));
    let shared = EngineShared::new(clock, location.max_bytes, options.call_deadline, state, None);
    Embedded {
        engine: Arc::new(Engine::new(Arc::new(shared), None)),
        address: "memory".to_owned(),
        facts: vec![("max_bytes", location.max_bytes.to_string())],
    }
}

fn open_directory(
    path: &std::path::Path,
    location: &Location,
    options: Options,
) -> Result<Embedded> {
    let (directory, lock) = Directory::open(path)?;
    let recovered = recovery::recover(&directory)?;
    let Recovered { state, file, number, offset, log_bytes, snapshot_bytes, cut_bytes, is_durable } =
        recovered;
    let path_of_log = Arc::new(directory.log(number));
    let tail = LogTail { file: Arc::new(file), path: path_of_log, number, offset, synced: offset };
    let log = Arc::new(CommitLog::new(location.sync, tail));
    // Start no earlier than the latest logged time. Otherwise, if the wall clock was set back, deadlines would
    // be delayed by the step.
    let clock = Arc::new(SteadyClock::new(options.clock, state.latest()));
    let shared = Arc::new(EngineShared::new(
        clock,
        location.max_bytes,
        options.call_deadline,
        state,
        Some(Arc::clone(&log)),
    ));
    let (after_bytes, is_due) = (location.compact_bytes, !is_durable);
    let compaction = Compaction { after_bytes, log_bytes, snapshot_bytes, is_due };
    let threads = writer::start(&shared, &log, directory, compaction)
        .map_err(|error| unavailable(path, "could not start its log threads", error))?;
    let sync = match location.sync {
        SyncMode::Always => "always",
        SyncMode::Interval => "interval",
    };
    Ok(Embedded {
        engine: Arc::new(Engine::new(shared, Some(EngineThreads { threads, lock }))),
        address: path.display().to_string(),
        facts: vec![
            ("sync", sync.to_owned()),
            ("max_bytes", location.max_bytes.to_string()),
            ("compact_bytes", location.compact_bytes.to_string()),
            ("cut_bytes", cut_bytes.to_string()),
        ],
    })
}

impl Embedded {
    fn shared(&self) -> &EngineShared {
        &self.engine.shared
    }

    /// Removes the value of a name if there is one. Returns whether there was; `find` fails for a value of another type.
    async fn remove(
        &self,
        name: &str,
        find: impl FnOnce(&Tx<'_>) -> Result<bool> + Send,
    ) -> Result<bool> {
        let remove = self.shared().transact(Durability::Durable, |tx| {
            let exists = find(tx)?;
            if exists {
                tx.apply(&RedoRecord::Remove { name });
            }
            Ok(exists)
        });
        remove.await
    }
}

#[async_trait]
impl Backend for Embedded {
    fn describe(&self) -> BackendDescription {
        let mut facts = self.facts.clone();
        if let Some(log) = &self.shared().log {
            let counters = [
                ("writes", &log.writes),
                ("syncs", &log.syncs),
                ("compactions", &log.compactions),
                ("outages", &log.outages),
            ];
            let read =
                |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed).to_string();
            facts.extend(counters.map(|(name, count)| (name, read(count))));
        }
        BackendDescription { kind: "embedded", address: self.address.clone(), version: None, facts }
    }

    fn cluster_slot(&self, _key: &str) -> Option<u16> {
        None
    }

    async fn now(&self) -> Result<Timestamp> {
        self.shared().ensure_open()?;
        Ok(self.shared().clock.now())
    }

    async fn close(&self) -> Result<()> {
        let engine = Arc::clone(&self.engine);
        // `stop` blocks until the last sync has completed.
        let stopped = tokio::task::spawn_blocking(move || engine.stop()).await;
        stopped.map_err(|error| StreamError::unavailable("close was cancelled", error))?;
        match self.shared().log.as_ref().and_then(|log| log.failure()) {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }
}
