//! Streams inside the process, in memory or in a directory, with nothing to install.
//!
//! All state is in memory, behind one lock. Durable state is also a log of effects in a directory:
//!
//! `streams` `settle` `pending` `reader` `delays` `leases` `registry` `dedup`: decide what a call does
//! -> `effect`: each change as data -> `change`, `state`: carry it out -> `codec`: its bytes -> `engine`: the lock and the
//! buffer
//! -> `log`, `writer`: written and synced by two threads -> `segment`, `directory`: the files
//! -> `snapshot`: a short form of a long log -> `recovery`: all of it backwards, when it is opened.
//!
//! Promises: a call that returned survives what its `sync` mode says. What cannot be read is an error that names the
//! file and the place; only an unfinished write at the very end is cut off. One process has the directory at a time.
//! Time passes evenly for leases, delays and all that lapses, however the wall clock is set (see `clock::steady`), and goes
//! on from the latest time in the log when the directory is opened.

mod location;

mod codec;
mod directory;
mod log;
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
use self::state::EmbeddedState;
use self::writer::Compaction;
use crate::backend::{Backend, Description};
use crate::clock::{SteadyClock, Timestamp};
use crate::connect::Options;
use crate::error::{Result, StreamError};

/// The embedded backend.
#[derive(Debug)]
struct Embedded {
    engine: Arc<Engine>,
    address: String,
    /// What was found and chosen when it was opened.
    facts: Vec<(&'static str, String)>,
}

/// Checks where the data is to be, without looking there.
pub(crate) fn check_location(location: &str) -> Result<()> {
    Location::parse(location).map(drop)
}

/// Opens the backend at what follows `embedded:` in a URL.
pub(crate) async fn open(location: &str, options: &Options) -> Result<Arc<dyn Backend>> {
    let location = Location::parse(location)?;
    let options = options.clone();
    // Reading a long log takes a while; other tasks go on meanwhile.
    let opened = tokio::task::spawn_blocking(move || match &location.directory {
        Some(path) => open_directory(path, &location, options),
        None => Ok(open_memory(&location, options)),
    });
    match opened.await {
        Ok(backend) => Ok(Arc::new(backend?)),
        Err(error) => Err(StreamError::unavailable("opening was interrupted", error)),
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
    let Recovered { state, file, number, offset, log_bytes, snapshot_bytes, cut_bytes } = recovered;
    let path_of_log = Arc::new(directory.log(number));
    let tail = LogTail { file: Arc::new(file), path: path_of_log, number, offset, synced: offset };
    let log = Arc::new(CommitLog::new(location.sync, tail));
    // What was set by a clock that has been set back since would else wait until that clock is there again.
    let clock = Arc::new(SteadyClock::new(options.clock, state.latest()));
    let shared = Arc::new(EngineShared::new(
        clock,
        location.max_bytes,
        options.call_deadline,
        state,
        Some(Arc::clone(&log)),
    ));
    let compaction = Compaction { after_bytes: location.compact_bytes, log_bytes, snapshot_bytes };
    let threads = writer::start(&shared, &log, directory, compaction)
        .map_err(|error| unavailable(path, "got no thread for its log", error))?;
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
}

#[async_trait]
impl Backend for Embedded {
    fn describe(&self) -> Description {
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
        Description { kind: "embedded", address: self.address.clone(), version: None, facts }
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
        // The threads end when the last sync is done.
        let stopped = tokio::task::spawn_blocking(move || engine.stop()).await;
        stopped.map_err(|error| StreamError::unavailable("closing was interrupted", error))?;
        match self.shared().log.as_ref().and_then(|log| log.failure()) {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }
}
