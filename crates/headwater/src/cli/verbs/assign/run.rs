//! `headwater assign run`: a consumer of a service that runs a command for each stream it owns.
//!
//! Upstream: `assign.rs`. Downstream: `headwater-assignment`; `consume_exec.rs` runs the commands.
//! Guarantees: a stream is completed only after its command succeeded. A command that fails gives the stream back after a
//! pause that grows with each failure, during which it stays owned, so that no other consumer runs it sooner. A command
//! is killed as soon as its stream is lost, and before its stream is released at shutdown.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use headwater_assignment::{
    Assignment, AssignmentConfig, EndError, Notification, OnExpired, Owned, Terminated,
};
use headwater_stream::{Backend, Backoff, StreamName, process_name};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::AssignRunArgs;
use crate::cli::consume_exec::{CommandOutput, run_command};
use crate::cli::output;
use crate::exit::CliError;
use crate::server::shutdown_signal::ShutdownSignal;

/// How long shutdown waits for running commands, and then for their streams to be released.
const DRAIN: Duration = Duration::from_secs(20);
const RELEASE_MAX: Duration = Duration::from_secs(5);

/// Pause after a failed command, by the number of failures in a row.
const FAILURE_PAUSE: Backoff = Backoff::doubling(Duration::from_secs(1), Duration::from_secs(60));

/// Pause between attempts to end a stream while the backend does not answer.
const END_RETRY: Backoff = Backoff::doubling(Duration::from_millis(100), Duration::from_secs(2));

/// Streams whose failures are counted; with more, the counts start again.
const FAILURES_MAX: usize = 10_000;

/// Maximum bytes of HEADWATER_INFO: the kernel limits a variable. Standard input always has the whole text.
const INFO_VARIABLE_MAX: usize = 64 * 1024;

/// Owns streams until a signal is received.
pub(super) async fn run(args: &AssignRunArgs, backend: &Arc<dyn Backend>) -> Result<(), CliError> {
    let shutdown = ShutdownSignal::default();
    shutdown.on_signals().map_err(|error| CliError::new(error.to_string()))?;
    let config = AssignmentConfig {
        streams_max: args.streams_max,
        heartbeat_every: args.heartbeat,
        // Fail-over is fast on servers without keyspace notifications too.
        sweep_every: args.heartbeat.min(AssignmentConfig::default().sweep_every),
        on_expired: OnExpired::Claim,
        ..AssignmentConfig::default()
    };
    let name = args.name.as_deref().unwrap_or_else(|| process_name());
    let (assignment, mut notifications) =
        Assignment::start(Arc::clone(backend), &args.service, name, config)
            .await
            .map_err(|error| CliError::new(error.to_string()))?;
    output::note(&format!("waiting for streams of `{}` as {}", args.service, assignment.holder()));
    let consumer =
        Arc::new(StreamConsumer { args: args.clone(), assignment, kill: CancellationToken::new() });
    let mut commands = RunningCommands::default();
    let stopping = stop(&consumer, &shutdown);
    tokio::pin!(stopping);
    let mut is_stopped = false;
    let ended = loop {
        tokio::select! {
            () = &mut stopping, if !is_stopped => is_stopped = true,
            Some(ended) = commands.tasks.join_next() => commands.ended(ended.ok()),
            // Cancel-safe.
            notification = notifications.recv() => match notification {
                Some(Notification::Added(owned)) => commands.start(&consumer, owned, &shutdown),
                Some(Notification::Disowned { stream, reason }) => {
                    commands.kill(&stream);
                    output::note(&format!("stream `{stream}` lost ({reason:?}); its command was killed"));
                }
                Some(Notification::Quarantined { stream, owners }) => output::note(&format!(
                    "stream `{stream}` moved to `{}-input:dlq`: {owners} owners died with it", args.service
                )),
                Some(Notification::Terminated(reason)) => break Some(reason),
                Some(_) => {}
                None => break None,
            },
        }
    };
    commands.tasks.shutdown().await;
    match ended {
        Some(Terminated::Failed { problem }) => {
            Err(CliError::new(format!("stream assignment failed: {problem}; start it again")))
        }
        _ => Ok(()),
    }
}

/// After a signal: acquires nothing more, waits for commands, kills the rest and releases their streams.
async fn stop(consumer: &StreamConsumer, shutdown: &ShutdownSignal) {
    shutdown.wait().await;
    let shut_down = consumer.assignment.shutdown(DRAIN + RELEASE_MAX);
    tokio::pin!(shut_down);
    let shut_down = match timeout(DRAIN, &mut shut_down).await {
        Ok(shut_down) => shut_down,
        Err(_) => {
            consumer.kill.cancel();
            shut_down.await
        }
    };
    if let Err(error) = shut_down {
        output::note(&format!("some streams could not be released; their leases expire: {error}"));
    }
}

/// This process as a consumer of the service.
struct StreamConsumer {
    args: AssignRunArgs,
    assignment: Assignment,
    /// Kills all commands; their streams are released.
    kill: CancellationToken,
}

/// A stream whose command has ended, and whether it failed.
struct EndedCommand {
    stream: StreamName,
    failed: bool,
}

/// The commands that run, one for each stream.
#[derive(Default)]
struct RunningCommands {
    tasks: JoinSet<EndedCommand>,
    running: HashMap<StreamName, AbortHandle>,
    /// Failures in a row.
    failures: HashMap<StreamName, u32>,
}

impl RunningCommands {
    fn start(&mut self, consumer: &Arc<StreamConsumer>, owned: Owned, shutdown: &ShutdownSignal) {
        let (consumer, shutdown, stream) =
            (Arc::clone(consumer), shutdown.clone(), owned.stream().clone());
        let failures = self.failures.get(&stream).copied().unwrap_or(0);
        let task = self.tasks.spawn(async move { consumer.work(owned, failures, &shutdown).await });
        if let Some(former) = self.running.insert(stream, task) {
            former.abort();
        }
    }

    /// Kills the command of a stream: aborting the task drops its future.
    fn kill(&mut self, stream: &StreamName) {
        if let Some(task) = self.running.remove(stream) {
            task.abort();
        }
    }

    /// Counts failures. `None` for a command that was killed.
    fn ended(&mut self, ended: Option<EndedCommand>) {
        self.running.retain(|_, task| !task.is_finished());
        let Some(EndedCommand { stream, failed }) = ended else { return };
        if !failed {
            self.failures.remove(&stream);
            return;
        }
        if self.failures.len() >= FAILURES_MAX {
            self.failures.clear();
        }
        *self.failures.entry(stream).or_default() += 1;
    }
}

impl StreamConsumer {
    /// Runs the command of a stream, then completes or releases the stream.
    async fn work(&self, owned: Owned, failures: u32, shutdown: &ShutdownSignal) -> EndedCommand {
        let stream = owned.stream().clone();
        // During work the stream is not given to another consumer. Without it, the stream is lost already.
        let Some(work) = owned.work() else { return EndedCommand { stream, failed: false } };
        let result = tokio::select! {
            result = self.execute(&owned) => Some(result),
            () = self.kill.cancelled() => None,
        };
        drop(work);
        let Some(Err(reason)) = result else {
            self.end(&owned, result.is_some()).await;
            return EndedCommand { stream, failed: false };
        };
        let pause = FAILURE_PAUSE.delay(failures + 1, fastrand::f64());
        output::note(&format!(
            "stream `{stream}` is released in {:.1} s: {}",
            pause.as_secs_f64(),
            output::plain(&reason)
        ));
        tokio::select! {
            () = sleep(pause) => {}
            () = shutdown.wait() => {}
        }
        self.end(&owned, false).await;
        EndedCommand { stream, failed: true }
    }

    async fn execute(&self, owned: &Owned) -> Result<(), String> {
        let info = owned.info().unwrap_or_default();
        let mut variables = vec![
            ("HEADWATER_SERVICE", self.args.service.clone()),
            ("HEADWATER_STREAM", owned.stream().to_string()),
            ("HEADWATER_EPOCH", owned.epoch().to_string()),
            ("HEADWATER_OWNERS", owned.owners().to_string()),
        ];
        if info.len() <= INFO_VARIABLE_MAX {
            variables.push(("HEADWATER_INFO", info.to_owned()));
        }
        let command = &self.args.exec;
        run_command(command, &variables, info.as_bytes(), CommandOutput::Inherit).await.map(drop)
    }

    /// Completes or releases a stream; repeated until the backend answers or the stream is lost.
    async fn end(&self, owned: &Owned, is_done: bool) {
        let mut retry = END_RETRY.timer();
        loop {
            let ended = match is_done {
                true => self.assignment.done(owned).await,
                false => self.assignment.release(owned).await,
            };
            match ended {
                Ok(()) => return,
                Err(EndError::Backend(error)) if error.is_transient() => retry.wait().await,
                Err(error) => return output::note(&error.to_string()),
            }
        }
    }
}
