//! The PostgreSQL store, shared by many processes.
//!
//! Upstream: `connect` opens it. Downstream: SQL functions (`functions/`) that implement the transitions of
//! `state`; the conformance suite compares the two.
//!
//! Guarantees: a transition is one round trip and one transaction, so no row stays locked while a process stalls or
//! dies. All times are the server's. No call takes longer than its deadline, neither here nor on the server.

mod admin;
mod adopt;
mod claims;
mod clock;
mod connections;
mod functions;
mod migrate;
mod outbox;
mod outbox_listener;
mod record;
mod sweep;
mod timestamps;
mod transaction;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::clock::SystemClock;
use sqlx::postgres::{PgConnectOptions, PgConnection};

pub use self::adopt::{AdoptedIntegration, AdoptionMode, AdoptionReport, OLD_SCHEMA, adopt};
pub use self::connections::Checkout;
use self::connections::PgConnections;
use self::outbox_listener::OutboxListener;
use self::transaction::PostgresTransaction;
pub use self::transaction::{outbox_in, record_in};
use crate::claim::{
    Claim, ClaimOptions, ClaimRelease, ClaimReleased, ClaimRenewal, CompletionOutcome,
    FailureOutcome, RunCompletion, RunFailure, SweepOptions, SweepReport,
};
use crate::clock_watch::ClockWatch;
use crate::connect::with_deadline;
use crate::connect::{SchemaPolicy, StoreOptions};
use crate::error::{IssueError, Result};
use crate::event_batch::{EventBatch, ValidatedEvent, reject_all};
use crate::issue::{ClaimEpoch, DebounceWindow, EventLogId, IssueId, NewEvent, Recorded};
use crate::limits::{CONSECUTIVE_FAILURES_MAX, PAGE_MAX, WAIT_MAX};
use crate::migrations::{MIGRATION_TIMEOUT, Migration};
use crate::outbox::types::{OutboxRow, OutboxSettled, OutboxSettlement, OutboxTake};
use crate::row_decoding::{database_error, is_conflict, missing_event_logs};
use crate::store::Store;
use crate::transaction::{ReadConnection, StoreConnection, Transaction};
use crate::validate;

/// Delays before a call is retried after a conflict with another transaction.
const CONFLICT_RETRY_DELAYS: [Duration; 3] =
    [Duration::from_millis(50), Duration::from_millis(200), Duration::from_millis(500)];

/// A store on a PostgreSQL server.
#[derive(Debug)]
pub(crate) struct PostgresStore {
    connections: PgConnections,
    /// See [`idempotency_key`](crate::outbox::types::idempotency_key).
    identity: String,
    deadline: Duration,
    schema: SchemaPolicy,
    listener: OutboxListener,
    watch: ClockWatch,
}

/// Connects to the server and applies missing migrations.
pub(crate) async fn open(url: &str, options: &StoreOptions) -> Result<Arc<dyn Store>> {
    let connect: PgConnectOptions =
        url.parse().map_err(|error| IssueError::invalid("the database URL", format!("{error}")))?;
    let connect = connect.application_name("headwater");
    let connections = PgConnections::new(connect.clone(), options);
    // Statements of migrations have no timeout of their own, because they may change large tables.
    let deadline = options.call_deadline.max(MIGRATION_TIMEOUT);
    let schema = options.schema;
    let identity =
        with_deadline(deadline, "connecting to PostgreSQL", migrate::open(&connections, schema))
            .await?;
    let listener = OutboxListener::new(connect);
    // Only the monotonic time of this clock is used; the wall clock is the server's.
    let watch = ClockWatch::new(Arc::new(SystemClock));
    let deadline = options.call_deadline;
    let store = PostgresStore { connections, identity, deadline, schema, listener, watch };
    let first =
        async |connection: &mut PgConnection| clock::read_first(&store.watch, connection).await;
    store.call("reading the clock of the database", first).await?;
    Ok(Arc::new(store))
}

impl PostgresStore {
    /// Runs `call` on a connection within the deadline. `what` names the operation in errors. `Ok` means committed.
    async fn call<T>(
        &self,
        what: &str,
        call: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T> {
        let running = async {
            let result = self.connections.run(call).await;
            result.map_err(|error| database_error(what, error))
        };
        with_deadline(self.deadline, what, running).await
    }

    /// Runs a transition within the deadline, and retries it after a deadlock or serialization failure with growing
    /// delays.
    async fn transition<T, F>(&self, what: &str, call: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<T, sqlx::Error>>,
    {
        let repeating = async {
            for delay in CONFLICT_RETRY_DELAYS {
                match call().await {
                    Err(error) if is_conflict(&error) => {
                        tracing::debug!(%error, "conflict with another transaction, retrying");
                        tokio::time::sleep(delay).await;
                    }
                    result => return result,
                }
            }
            call().await
        };
        let repeating = async { repeating.await.map_err(|error| database_error(what, error)) };
        with_deadline(self.deadline, what, repeating).await
    }

    async fn record_batch(
        &self,
        events: &[ValidatedEvent<'_>],
        debounce: &DebounceWindow,
    ) -> Result<Vec<Result<Recorded>>> {
        self.transition("recording events", || {
            self.connections
                .run(async |connection| record::record(connection, events, debounce).await)
        })
        .await
    }

    /// Records events one by one after a batch failed because of one of them. Does not wait again for an issue that is
    /// locked, or after too many locked issues.
    async fn record_singly(
        &self,
        events: &[ValidatedEvent<'_>],
        debounce: &DebounceWindow,
    ) -> Vec<Result<Recorded>> {
        let mut results: Vec<Result<Recorded>> = Vec::with_capacity(events.len());
        let mut unavailable: Vec<((&str, &str, &str), IssueError)> = Vec::new();
        for one in events {
            let NewEvent { integration, external_project_id, external_issue_id, .. } = one.event;
            let issue =
                (integration.as_str(), external_project_id.as_str(), external_issue_id.as_str());
            let known = unavailable.iter().find(|(locked, _)| *locked == issue);
            let known = known
                .or(unavailable.last().filter(|_| unavailable.len() >= CONSECUTIVE_FAILURES_MAX));
            if let Some((_, error)) = known {
                results.push(Err(error.clone()));
                continue;
            }
            let result = self.record_batch(std::slice::from_ref(one), debounce).await;
            let result = result.and_then(|mut results| results.remove(0));
            if let Err(error) = &result
                && error.is_transient()
            {
                unavailable.push((issue, error.clone()));
            }
            results.push(result);
        }
        results
    }
}

#[async_trait]
impl Store for PostgresStore {
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
        let stored = match self.record_batch(&batch.events, debounce).await {
            Ok(stored) => stored,
            // Also for a single event: a conflict with another transaction is over when it is retried.
            Err(error)
                if error.is_item_error() && (batch.events.len() > 1 || error.is_transient()) =>
            {
                self.record_singly(&batch.events, debounce).await
            }
            Err(error) => return reject_all(events.len(), &error),
        };
        let needs_retry = batch.needs_retry(&stored);
        let mut results = batch.into_results(&stored);
        for index in needs_retry {
            results[index] = self.record(&events[index..=index], debounce).await.remove(0);
        }
        results
    }

    async fn claim(&self, issues: &[IssueId], options: &ClaimOptions) -> Result<Vec<Claim>> {
        validate::batch("issues", issues.len())?;
        options.validate()?;
        if issues.is_empty() {
            return Ok(vec![]);
        }
        self.watch.note_claim_ttl(options.ttl);
        // A claim that only seems expired after a clock step must not be taken from its owner. Fencing would prevent a
        // second effect, but the work would be done twice.
        if !self.watch.is_fresh()
            && let Err(error) = self.check_clock().await
        {
            tracing::warn!(%error, "the clock of the database was not checked, claiming anyway");
        }
        self.transition("claiming issues", || {
            self.connections
                .run(async |connection| claims::claim(connection, issues, options).await)
        })
        .await
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
        self.transition("renewing claims", || {
            self.connections
                .run(async |connection| claims::heartbeat(connection, claims, ttl).await)
        })
        .await
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
        let completing = self.transition("completing runs", || {
            self.connections.run(async |connection| {
                claims::complete(connection, &self.identity, completions).await
            })
        });
        let completed = completing.await?;
        if completions.iter().any(|completion| !completion.outbox.is_empty()) {
            self.listener.wake();
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
        self.transition("failing runs", || {
            self.connections
                .run(async |connection| claims::fail(connection, failures, attempts_max).await)
        })
        .await
    }

    async fn release_claims(&self, claims: &[ClaimRelease]) -> Result<Vec<ClaimReleased>> {
        validate::batch("claims", claims.len())?;
        if claims.is_empty() {
            return Ok(vec![]);
        }
        self.transition("releasing claims", || {
            self.connections
                .run(async |connection| claims::release_claims(connection, claims).await)
        })
        .await
    }

    async fn sweep(&self, options: &SweepOptions) -> Result<SweepReport> {
        options.validate()?;
        self.check_clock().await?;
        let keep = options.keep.saturating_add(self.watch.ahead());
        let options = SweepOptions { keep, ..*options };
        self.transition("sweeping", || {
            self.connections.run(async |connection| sweep::sweep(connection, &options).await)
        })
        .await
    }

    async fn take_outbox_from(&self, take: &OutboxTake) -> Result<Vec<OutboxRow>> {
        validate::outbox_take(take)?;
        self.watch.note_outbox_ttl(take.ttl);
        if !self.watch.is_fresh() {
            self.check_clock().await?;
        }
        // A taken row must not be taken again because of a clock step since the last check. Half of its TTL is more
        // than any call takes, and less than a delivery has left.
        let latest = self.watch.latest(take.ttl / 2);
        self.call("taking outbox rows", async |connection| {
            outbox::take(connection, take, latest).await
        })
        .await
    }

    async fn settle_outbox(&self, settlements: &[OutboxSettlement]) -> Result<Vec<OutboxSettled>> {
        validate::settlements(settlements)?;
        if settlements.is_empty() {
            return Ok(vec![]);
        }
        self.transition("settling deliveries", || {
            self.connections.run(async |connection| outbox::settle(connection, settlements).await)
        })
        .await
    }

    async fn outbox_wake(&self, wait: Duration) {
        self.listener.wait(wait.min(WAIT_MAX)).await;
    }

    async fn heartbeat_worker(&self, worker: &str, ttl: Duration) -> Result<()> {
        validate::name("worker", worker)?;
        validate::delay("ttl", ttl)?;
        // A clock step must not remove live workers.
        self.check_clock().await?;
        self.call("registering a worker heartbeat", async |connection| {
            admin::heartbeat_worker(connection, worker, ttl).await
        })
        .await
    }

    async fn missing_event_logs(&self, ids: &[EventLogId]) -> Result<Vec<EventLogId>> {
        validate::count("ids", ids.len(), PAGE_MAX)?;
        let what = "reading confirmed events back";
        let reading = async {
            let read = self.connections.run_on_new_connection(async |connection| {
                missing_event_logs(StoreConnection::Postgres(connection), ids).await
            });
            read.await.map_err(|error| database_error(what, error))
        };
        with_deadline(self.deadline, what, reading).await
    }

    async fn begin(&self) -> Result<Box<dyn Transaction>> {
        let beginning = PostgresTransaction::begin(&self.connections, self.deadline);
        Ok(Box::new(with_deadline(self.deadline, "beginning a transaction", beginning).await?))
    }

    async fn read_connection(&self) -> Result<ReadConnection> {
        let checkout = async {
            let checkout = self.connections.checkout().await;
            checkout.map_err(|error| database_error("connecting to PostgreSQL", error))
        };
        let checkout = with_deadline(self.deadline, "connecting to PostgreSQL", checkout).await?;
        Ok(ReadConnection::postgres(checkout))
    }

    async fn migrate(&self, migrations: &[Migration]) -> Result<()> {
        let deadline = self.deadline.max(MIGRATION_TIMEOUT);
        let migrating = migrate::migrate(&self.connections, migrations, self.schema);
        with_deadline(deadline, "migrating the database", migrating).await
    }

    async fn close(&self) {
        self.listener.close();
        self.connections.close().await;
    }
}
