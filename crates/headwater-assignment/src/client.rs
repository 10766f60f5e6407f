//! The client: one per process and service. Starts the tasks and shuts them down in order.
//!
//! Guarantees: `shutdown` joins every task, `drop` aborts it. A shutdown releases unfinished streams and
//! never acknowledges them. It takes at most its drain time plus a few backend deadlines.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_stream::{
    Backend, EntryId, HolderName, Result, Retention, StreamError, StreamName, WatchMode,
};
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{error, info, warn};

use crate::config::AssignmentConfig;
use crate::error::{ClaimError, EndError};
use crate::heartbeat;
use crate::input;
use crate::input_reader::InputReader;
use crate::member::{AssignmentMember, Lifecycle, lifecycle_reached};
use crate::names::{MemberIdentity, Names};
use crate::notification::{Disowned, Notification, Notifications, Terminated};
use crate::owned::{EndReason, Owned};
use crate::sweep::AssignmentSweep;

/// Polling interval of a drain, in case a wakeup is missed.
const DRAIN_CHECK: Duration = Duration::from_millis(50);

/// How long a task may take to stop. A task that waits for the backend stops at the backend's own deadline.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// A consumer of a service: acquires, keeps and releases streams.
///
/// If dropped without [`shutdown`](Self::shutdown), it stops at once and its leases expire.
pub struct Assignment {
    member: Arc<AssignmentMember>,
    supervisor: Mutex<Option<JoinHandle<Result<usize>>>>,
    stop: Mutex<Option<oneshot::Sender<Duration>>>,
    lifecycle: watch::Receiver<Lifecycle>,
}

impl fmt::Debug for Assignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Assignment")
            .field("service", &self.member.names.service)
            .field("holder", &self.member.identity.holder)
            .finish_non_exhaustive()
    }
}

/// Adds a stream to the input of a service; a consumer with free capacity acquires it. `info` is JSON text
/// for its owner.
pub async fn add(
    backend: &dyn Backend,
    service: &str,
    stream: &StreamName,
    info: Option<&str>,
) -> Result<EntryId> {
    append(backend, &Names::new(service)?, stream, info).await
}

async fn append(
    backend: &dyn Backend,
    names: &Names,
    stream: &StreamName,
    info: Option<&str>,
) -> Result<EntryId> {
    // Reject a name that is too long for its lease here, not in the consumer.
    names.lease(stream)?;
    let fields = input::fields(stream, info)?;
    let ids = backend.append(&names.input, &[fields], &Retention::KEEP_ALL).await?;
    ids.first().copied().ok_or_else(|| StreamError::Protocol {
        problem: "an append of one entry returned no id".to_owned(),
    })
}

impl Assignment {
    /// Joins a service and reads its input from the beginning. `consumer` is a display name; several processes
    /// may use the same one.
    pub async fn start(
        backend: Arc<dyn Backend>,
        service: &str,
        consumer: &str,
        config: AssignmentConfig,
    ) -> Result<(Self, Notifications)> {
        config.validate()?;
        let (names, identity) = (Names::new(service)?, MemberIdentity::new(consumer)?);
        let (member, losses) = AssignmentMember::new(backend, names, identity, config)?;
        let member = Arc::new(member);
        member.prepare().await?;
        let lease_watch = member.backend.watch(&member.names.lease_prefix).await?;
        if let WatchMode::ReleasesOnly { reason } = lease_watch.mode() {
            // The backend has logged a warning; this is the consequence.
            let sweep_every = member.config.sweep_every;
            info!(
                service,
                reason,
                ?sweep_every,
                "no expiry notifications: only the sweep detects expired leases"
            );
        }
        let mut reader =
            member.backend.reader(&member.names.group, &member.identity.consumer).await?;
        // An input stream that is deleted does not come back through a read that was blocked on it.
        reader.require_groups();
        member.join().await?;

        let (lifecycle_sender, lifecycle) = watch::channel(Lifecycle::Running);
        let (stop, stopped) = oneshot::channel();
        let notifications = Notifications::new(&member.notification_queue);
        let mut tasks = AssignmentTasks { working: JoinSet::new(), heartbeat: JoinSet::new() };
        tasks.heartbeat.spawn(heartbeat::run(Arc::clone(&member), losses, lifecycle.clone()));
        let intake = InputReader::new(Arc::clone(&member), reader);
        tasks.working.spawn(intake.run(lifecycle.clone()));
        let sweep = AssignmentSweep::new(Arc::clone(&member)).run(lease_watch, lifecycle.clone());
        tasks.working.spawn(async move {
            sweep.await;
            Ok(())
        });
        let supervisor =
            tokio::spawn(supervise(Arc::clone(&member), tasks, lifecycle_sender, stopped));
        info!(service, consumer = %member.identity.consumer, "assignment started");
        let assignment = Self {
            member,
            supervisor: Mutex::new(Some(supervisor)),
            stop: Mutex::new(Some(stop)),
            lifecycle,
        };
        Ok((assignment, notifications))
    }

    /// Adds a stream to the input of the service; a consumer with free capacity acquires it. `info` is JSON text
    /// for its owner.
    pub async fn add(&self, stream: &StreamName, info: Option<&str>) -> Result<EntryId> {
        append(&*self.member.backend, &self.member.names, stream, info).await
    }

    /// Claims a stream whose owner died or released it. One caller wins across all processes.
    ///
    /// The stream is returned here and not sent as a notification.
    pub async fn claim(&self, stream: &StreamName) -> Result<Owned, ClaimError> {
        self.member.claim(stream).await
    }

    /// Completes a stream: deletes its input entry and releases its lease.
    ///
    /// Idempotent: retry if the backend was unavailable. If the first call took effect, the retry succeeds, even
    /// if the stream was disowned since, unless it has had another owner or a day has passed.
    pub async fn done(&self, owned: &Owned) -> Result<(), EndError> {
        self.member.end(owned, EndReason::Done).await
    }

    /// Releases the stream; another consumer acquires it as new. Does not count towards `owners_max`.
    pub async fn release(&self, owned: &Owned) -> Result<(), EndError> {
        self.member.end(owned, EndReason::Release).await
    }

    /// The streams this process owns, in no particular order.
    pub fn owned(&self) -> Vec<Owned> {
        self.member.owned_set.owned()
    }

    /// The holder name of this process in leases.
    pub fn holder(&self) -> &HolderName {
        &self.member.identity.holder
    }

    /// The consumers of the service that are alive.
    pub async fn members(&self) -> Result<Vec<HolderName>> {
        self.member.live_members().await
    }

    /// Stops acquiring streams, waits up to `drain` for owned streams to end, and releases the rest
    /// unacknowledged. Returns how many were released.
    pub async fn shutdown(&self, drain: Duration) -> Result<usize> {
        if let Some(stop) = lock(&self.stop).take() {
            // Fails if the assignment has already terminated.
            let _ = stop.send(drain);
        }
        let supervisor = lock(&self.supervisor).take();
        match supervisor {
            Some(supervisor) => supervisor.await.unwrap_or_else(|error| {
                let problem = "the assignment task was aborted".to_owned();
                Err(StreamError::Unavailable { problem, source: Some(error.into()) })
            }),
            None => {
                // Another call is shutting down, or has.
                lifecycle_reached(&mut self.lifecycle.clone(), Lifecycle::Stopped).await;
                Ok(0)
            }
        }
    }
}

impl Drop for Assignment {
    fn drop(&mut self) {
        self.member.owned_set.close();
        if let Some(supervisor) = lock(&self.supervisor).take() {
            // Aborts all tasks it owns.
            supervisor.abort();
            self.member.notification_queue.send(Notification::Terminated(Terminated::Dropped));
        }
    }
}

/// The tasks of an assignment; dropping them aborts them.
struct AssignmentTasks {
    /// Input reader and sweep. If one fails, the assignment terminates.
    working: JoinSet<Result<()>>,
    /// Runs until everything is released.
    heartbeat: JoinSet<()>,
}

/// Waits for a shutdown or a failed task, then shuts everything down in order.
async fn supervise(
    member: Arc<AssignmentMember>,
    mut tasks: AssignmentTasks,
    lifecycle: watch::Sender<Lifecycle>,
    stop: oneshot::Receiver<Duration>,
) -> Result<usize> {
    let (drain, reason) = tokio::select! {
        drain = stop => (drain.unwrap_or_default(), Terminated::Shutdown),
        ended = tasks.working.join_next() => (Duration::ZERO, failed(match ended {
            Some(Ok(Err(error))) => error.to_string(),
            Some(Err(error)) => error.to_string(),
            Some(Ok(Ok(()))) | None => "an assignment task ended unexpectedly".to_owned(),
        })),
        ended = tasks.heartbeat.join_next() => (Duration::ZERO, failed(match ended {
            Some(Err(error)) => error.to_string(),
            Some(Ok(())) | None => "the heartbeat task ended unexpectedly".to_owned(),
        })),
    };
    if let Terminated::Failed { problem } = &reason {
        error!(problem, "assignment failed");
    }
    let given_back = finish(&member, &mut tasks, &lifecycle, drain).await;
    lifecycle.send_replace(Lifecycle::Stopped);
    join_all(&mut tasks.heartbeat, "heartbeat").await;
    if let Err(error) = member.leave().await {
        warn!(%error, "could not release the member lease; it will expire");
    }
    member.notification_queue.send(Notification::Terminated(reason));
    info!(service = member.names.service, "assignment terminated");
    given_back
}

fn failed(problem: String) -> Terminated {
    Terminated::Failed { problem }
}

/// Stops acquiring, drains owned streams and releases the rest.
async fn finish(
    member: &AssignmentMember,
    tasks: &mut AssignmentTasks,
    lifecycle: &watch::Sender<Lifecycle>,
    drain: Duration,
) -> Result<usize> {
    let deadline = Instant::now() + drain;
    member.owned_set.close();
    lifecycle.send_replace(Lifecycle::Closing);
    join_all(&mut tasks.working, "input reader and sweep").await;
    while member.owned_set.len() > 0 && Instant::now() < deadline {
        let check = deadline.min(Instant::now() + DRAIN_CHECK);
        let _ = timeout_at(check, member.owned_set.freed.notified()).await;
    }
    let rest = member.owned_set.owned().into_iter();
    let rest: Vec<_> = rest
        .filter_map(|owned| {
            let attempt = owned.begin_end(EndReason::Release).ok()?;
            Some((owned, attempt))
        })
        .collect();
    if rest.is_empty() {
        return Ok(0);
    }
    info!(count = rest.len(), "releasing unfinished streams");
    member.release_streams(rest, Disowned::Shutdown).await
}

async fn join_all<T: 'static>(tasks: &mut JoinSet<T>, what: &'static str) {
    let joined = timeout(STOP_LIMIT, async { while tasks.join_next().await.is_some() {} }).await;
    if joined.is_err() {
        warn!(what, "task did not stop in time; aborting it");
        tasks.shutdown().await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().expect("no code panics while it holds this lock")
}
