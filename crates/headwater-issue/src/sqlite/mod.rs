//! The SQLite store: one file, no server.
//!
//! Upstream: `connect` opens it. Downstream: `state` defines every transition; the modules here load, save and list.
//!
//! Guarantees: committed changes survive `kill -9` and a power failure (WAL, `synchronous = FULL`). All writes of a
//! process use one connection, in `BEGIN IMMEDIATE` transactions; other processes on the same file wait up to the
//! deadline of a call. Not supported: a file on a network share, where SQLite's locks do not work.

mod admin;
mod claims;
mod clock;
mod dead_letters;
mod file_identity;
mod migrate;
mod outbox;
mod record;
mod runs;
mod state_batch;
mod statements;
mod sweep;
mod transaction;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::clock::{Clock, Timestamp};
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{Connection as _, Sqlite, SqlitePool, Transaction};
use tokio::sync::Notify;

use self::file_identity::FileIdentity;
use self::transaction::SqliteTransaction;
pub use self::transaction::{outbox_in, record_in};
use crate::claim::{
    Claim, ClaimOptions, ClaimRelease, ClaimReleased, ClaimRenewal, CompletionOutcome,
    FailureOutcome, RunCompletion, RunFailure, SweepOptions, SweepReport,
};
use crate::clock_watch::ClockWatch;
use crate::connect::with_deadline;
use crate::connect::{SchemaPolicy, StoreOptions};
use crate::error::{IssueError, Result};
use crate::event_batch::{EventBatch, reject_all};
use crate::issue::{ClaimEpoch, DebounceWindow, EventLogId, IssueId, NewEvent, Recorded};
use crate::limits::{PAGE_MAX, WAIT_MAX};
use crate::migrations::Migration;
use crate::outbox::types::{OutboxRow, OutboxSettled, OutboxSettlement, OutboxTake};
use crate::row_decoding::{database_error, missing_event_logs};
use crate::store::Store;
use crate::transaction::{ReadConnection, StoreConnection, Transaction as CallersTransaction};
use crate::validate;

/// Maximum number of read connections, in addition to the writer.
const READERS_MAX: u32 = 8;

/// A store in a SQLite file.
#[derive(Debug)]
pub(crate) struct SqliteStore {
    /// One connection, so the pool serializes all writes of this process.
    writer: SqlitePool,
    readers: SqlitePool,
    file: FileIdentity,
    /// See [`idempotency_key`](crate::outbox::types::idempotency_key).
    identity: String,
    clock: Arc<dyn Clock>,
    watch: ClockWatch,
    deadline: Duration,
    schema: SchemaPolicy,
    wake: Arc<Notify>,
}

/// Opens the file, or a database in memory, and applies missing migrations.
pub(crate) async fn open(url: &str, options: &StoreOptions) -> Result<Arc<dyn Store>> {
    let in_memory = url.contains(":memory:");
    let connect: SqliteConnectOptions =
        url.parse().map_err(|error| IssueError::invalid("the database URL", format!("{error}")))?;
    let mut connect = connect
        .create_if_missing(options.schema == SchemaPolicy::Migrate)
        .foreign_keys(true)
        .busy_timeout(options.call_deadline)
        .synchronous(SqliteSynchronous::Full)
        .pragma("temp_store", "memory")
        .pragma("cache_size", "-65536");
    // The file keeps this mode.
    if !in_memory && options.schema == SchemaPolicy::Migrate {
        connect = connect.journal_mode(SqliteJournalMode::Wal);
    }
    let pool = |connections| {
        SqlitePoolOptions::new()
            .max_connections(connections)
            .min_connections(u32::from(in_memory))
            .acquire_timeout(options.call_deadline)
            .test_before_acquire(false)
            // SQLite ends a transaction when the disk is full; sqlx does not notice and considers it open.
            .before_acquire(move |connection, _| {
                let is_usable = in_memory || !connection.is_in_transaction();
                Box::pin(async move { Ok(is_usable) })
            })
            // A database in memory exists only in its connection.
            .max_lifetime(None)
            .idle_timeout(None)
    };
    let writer =
        migrate::open_and_migrate(pool(1), &connect, options.schema, options.call_deadline).await?;
    let opening = async {
        let readers = if in_memory {
            writer.clone()
        } else {
            let readers = options.connections_max.min(READERS_MAX);
            pool(readers)
                .connect_lazy_with(connect.clone().read_only(true).create_if_missing(false))
        };
        let identity = migrate::identity(&writer).await?;
        let file = FileIdentity::of((!in_memory).then(|| connect.get_filename()));
        let file = file.map_err(|error| database_error("opening the SQLite database", error))?;
        let stored = clock::stored(&writer).await;
        let stored = stored.map_err(|error| database_error("reading the stored time", error))?;
        Ok::<_, IssueError>((readers, identity, file, stored))
    };
    let (readers, identity, file, stored) =
        with_deadline(options.call_deadline, "opening the SQLite database", opening).await?;
    let watch = ClockWatch::new(Arc::clone(&options.clock));
    // The first reading, with which every later one is compared. A detected step is handled before the first write.
    let requested_at = watch.monotonic();
    let now = options.clock.now();
    let _ = watch.read(now, requested_at).or_else(|| watch.compare(now, stored));
    Ok(Arc::new(SqliteStore {
        writer,
        readers,
        file,
        identity,
        clock: Arc::clone(&options.clock),
        watch,
        deadline: options.call_deadline,
        schema: options.schema,
        wake: Arc::new(Notify::new()),
    }))
}

/// A write transaction and its time. The time is read after the write lock was acquired, so that times follow commit
/// order.
struct WriteTx {
    transaction: Transaction<'static, Sqlite>,
    now: Timestamp,
}

impl SqliteStore {
    async fn begin_write(&self) -> Result<WriteTx, sqlx::Error> {
        loop {
            self.check_clock().await?;
            let transaction = self.writer.begin_with("BEGIN IMMEDIATE").await?;
            let requested_at = self.watch.monotonic();
            let now = self.clock.now();
            if self.watch.read(now, requested_at).is_none() {
                return Ok(WriteTx { transaction, now });
            }
            // The clock was set while this call waited for the writer: deadlines mislead until that is handled.
            transaction.rollback().await?;
        }
    }

    /// Runs `call` in a transaction and commits.
    async fn commit<T>(
        &self,
        call: impl AsyncFnOnce(&mut WriteTx) -> Result<T, sqlx::Error>,
    ) -> Result<T, sqlx::Error> {
        let mut tx = self.begin_write().await?;
        let result = call(&mut tx).await?;
        tx.transaction.commit().await?;
        Ok(result)
    }

    /// Runs `call` in a transaction and commits, within the deadline. `what` names the operation in errors.
    async fn write<T>(
        &self,
        what: &str,
        call: impl AsyncFnOnce(&mut WriteTx) -> Result<T, sqlx::Error>,
    ) -> Result<T> {
        self.bounded(what, self.commit(call)).await
    }

    /// Runs `call` on a read connection within the deadline. `what` names the operation in errors.
    async fn call<T>(
        &self,
        what: &str,
        call: impl AsyncFnOnce(&mut SqliteConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T> {
        self.bounded(what, async { call(&mut *self.readers.acquire().await?).await }).await
    }

    /// Runs `call` within the deadline. `what` names the operation in errors. `Ok` also means that the opened file
    /// still exists.
    async fn bounded<T>(
        &self,
        what: &str,
        call: impl Future<Output = Result<T, sqlx::Error>>,
    ) -> Result<T> {
        with_deadline(self.deadline, what, async {
            let result = call.await;
            self.file.check().and(result).map_err(|error| database_error(what, error))
        })
        .await
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn record(
        &self,
        events: &[NewEvent],
        debounce: &DebounceWindow,
    ) -> Vec<Result<Recorded>> {
        let batch = match debounce.validate().and_then(|()| EventBatch::prepare(events)) {
            Ok(batch) => batch,
            Err(error) => return reject_all(events.len(), &error),
        };
        if batch.events.is_empty() {
            return batch.into_results(&[]);
        }
        let recording = self.write("recording events", async |WriteTx { transaction, now }| {
            record::record(transaction, &batch.events, debounce, *now).await
        });
        match recording.await {
            Ok(stored) => {
                let needs_retry = batch.needs_retry(&stored);
                let mut results = batch.into_results(&stored);
                for index in needs_retry {
                    results[index] = self.record(&events[index..=index], debounce).await.remove(0);
                }
                results
            }
            Err(error) => reject_all(events.len(), &error),
        }
    }

    async fn claim(&self, issues: &[IssueId], options: &ClaimOptions) -> Result<Vec<Claim>> {
        validate::batch("issues", issues.len())?;
        options.validate()?;
        if issues.is_empty() {
            return Ok(vec![]);
        }
        self.watch.note_claim_ttl(options.ttl);
        self.write("claiming issues", async |tx| claims::claim(tx, issues, options).await).await
    }

    async fn heartbeat(
        &self,
        claims: &[(IssueId, ClaimEpoch)],
        ttl: Duration,
    ) -> Result<Vec<ClaimRenewal>> {
        validate::batch("claims", claims.len())?;
        validate::ttl("ttl", ttl)?;
        if claims.is_empty() {
            return Ok(vec![]);
        }
        self.write("renewing claims", async |tx| claims::heartbeat(tx, claims, ttl).await).await
    }

    async fn check_claims(&self, claims: &[(IssueId, ClaimEpoch)]) -> Result<Vec<ClaimRenewal>> {
        validate::batch("claims", claims.len())?;
        if claims.is_empty() {
            return Ok(vec![]);
        }
        self.call("checking claims", async |connection| claims::check(connection, claims).await)
            .await
    }

    async fn complete(&self, completions: &[RunCompletion]) -> Result<Vec<CompletionOutcome>> {
        validate::completions(completions)?;
        if completions.is_empty() {
            return Ok(vec![]);
        }
        let completing = self.write("completing runs", async |tx| {
            claims::complete(tx, &self.identity, completions).await
        });
        let completed = completing.await?;
        if completions.iter().any(|completion| !completion.outbox.is_empty()) {
            self.wake.notify_one();
        }
        Ok(completed)
    }

    async fn fail(
        &self,
        failures: &[RunFailure],
        attempts_max: u32,
    ) -> Result<Vec<FailureOutcome>> {
        validate::failures(failures, attempts_max)?;
        if failures.is_empty() {
            return Ok(vec![]);
        }
        self.write("failing runs", async |tx| claims::fail(tx, failures, attempts_max).await).await
    }

    async fn release_claims(&self, claims: &[ClaimRelease]) -> Result<Vec<ClaimReleased>> {
        validate::batch("claims", claims.len())?;
        if claims.is_empty() {
            return Ok(vec![]);
        }
        self.write("releasing claims", async |tx| claims::release_claims(tx, claims).await).await
    }

    async fn sweep(&self, options: &SweepOptions) -> Result<SweepReport> {
        options.validate()?;
        self.bounded("sweeping", async {
            self.check_clock().await?;
            self.store_time().await?;
            let keep = options.keep.saturating_add(self.watch.ahead());
            let options = &SweepOptions { keep, ..*options };
            // Most sweeps find nothing; they must not block writers.
            let mut reader = self.readers.acquire().await?;
            if !sweep::is_needed(&mut reader, options, self.clock.now()).await? {
                return Ok(SweepReport::default());
            }
            drop(reader);
            self.commit(async |tx| sweep::sweep(tx, options).await).await
        })
        .await
    }

    async fn take_outbox_from(&self, take: &OutboxTake) -> Result<Vec<OutboxRow>> {
        validate::outbox_take(take)?;
        self.watch.note_outbox_ttl(take.ttl);
        self.bounded("taking outbox rows", async {
            self.check_clock().await?;
            let mut reader = self.readers.acquire().await?;
            if !outbox::is_due(&mut reader, self.clock.now()).await? {
                return Ok(vec![]);
            }
            drop(reader);
            self.commit(async |tx| outbox::take(tx, take).await).await
        })
        .await
    }

    async fn settle_outbox(&self, settlements: &[OutboxSettlement]) -> Result<Vec<OutboxSettled>> {
        validate::settlements(settlements)?;
        if settlements.is_empty() {
            return Ok(vec![]);
        }
        self.write("settling deliveries", async |tx| outbox::settle(tx, settlements).await).await
    }

    async fn outbox_wake(&self, wait: Duration) {
        // A timeout is not an error here.
        let _ = tokio::time::timeout(wait.min(WAIT_MAX), self.wake.notified()).await;
    }

    async fn heartbeat_worker(&self, worker: &str, ttl: Duration) -> Result<()> {
        validate::name("worker", worker)?;
        validate::delay("ttl", ttl)?;
        self.write("registering a worker heartbeat", async |tx| {
            admin::heartbeat_worker(tx, worker, ttl).await
        })
        .await
    }

    async fn missing_event_logs(&self, ids: &[EventLogId]) -> Result<Vec<EventLogId>> {
        validate::count("ids", ids.len(), PAGE_MAX)?;
        self.call("reading confirmed events back", async |connection| {
            missing_event_logs(StoreConnection::Sqlite(connection), ids).await
        })
        .await
    }

    async fn begin(&self) -> Result<Box<dyn CallersTransaction>> {
        let tx = self.bounded("beginning a transaction", self.begin_write()).await?;
        let (deadline, wake, file) = (self.deadline, Arc::clone(&self.wake), self.file.clone());
        Ok(Box::new(SqliteTransaction::new(tx, deadline, file, wake)))
    }

    async fn read_connection(&self) -> Result<ReadConnection> {
        let acquiring = self.bounded("opening the SQLite database", self.readers.acquire());
        Ok(ReadConnection::sqlite(acquiring.await?))
    }

    async fn migrate(&self, migrations: &[Migration]) -> Result<()> {
        migrate::migrate(&self.writer, migrations, self.schema, self.deadline).await
    }

    async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }
}
