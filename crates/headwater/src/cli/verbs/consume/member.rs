//! `headwater consume` without a server: a member of the group in this process.
//!
//! Upstream: `consume.rs`. Downstream: a subscription of `headwater-queue`. Guarantees: with `owned`, the messages
//! of a partition are handled in order; at most `--count` messages are handled successfully; if this process is
//! killed, its messages are delivered again when its lease expires.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_queue::{ConsumerConfig, Message, Mode, Outcome, Queue, QueueError};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, sleep_until};

use super::{ConsumeArgs, ConsumeMode, DRAIN, HandledMessage};
use crate::api::ReceivedMessage;
use crate::api::names::wire_group;
use crate::exit::CliError;
use crate::server::shutdown_signal::ShutdownSignal;

/// Maximum messages in flight, those that wait in this process included.
const IN_FLIGHT_MAX: usize = 1000;

/// Consumes until enough messages are done, none arrives any more, or a signal is received.
pub(super) async fn run(
    args: &ConsumeArgs,
    queue: &Queue,
    mode: ConsumeMode,
) -> Result<(), CliError> {
    let shutdown = ShutdownSignal::default();
    shutdown.on_signals().map_err(|error| CliError::new(error.to_string()))?;
    let wanted = args.count.map_or(Semaphore::MAX_PERMITS, |count| {
        usize::try_from(count).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS)
    });
    let concurrency = usize::try_from(args.concurrency).unwrap_or(IN_FLIGHT_MAX);
    let config = ConsumerConfig {
        mode: match mode {
            ConsumeMode::Owned => Mode::Owned,
            ConsumeMode::Shared => Mode::Shared,
        },
        concurrency,
        in_flight_max: wanted.clamp(concurrency, IN_FLIGHT_MAX),
        drain: DRAIN,
        ..ConsumerConfig::default()
    };
    let (topic, group) = wire_group((args.topic.clone(), args.group.clone()));
    let max_retries = max_retries(queue, &topic).await?;
    let progress = Arc::new(Progress::new(wanted));
    let (args, handling) = (Arc::new(args.clone()), Arc::clone(&progress));
    let timeout = args.timeout;
    let handler = move |message: Message| {
        let (args, progress) = (Arc::clone(&args), Arc::clone(&handling));
        async move { handle(&args, &progress, message, max_retries).await }
    };
    let subscription = queue.subscribe(&topic, &group, handler, config).await?;
    tokio::select! {
        () = shutdown.wait() => {}
        () = progress.finished(timeout) => {}
    }
    // Messages that wait for a permit are released; nothing is started any more.
    progress.permits.close();
    subscription.stop().await;
    match progress.state.lock().expect("no code panics while it holds this lock").error.take() {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// Maximum retries of a message that does not specify its own. For a created topic this reads only its metadata: partitions,
/// delayed messages and dead letters may be on a server of a cluster that does not answer.
async fn max_retries(queue: &Queue, topic: &str) -> Result<u32, QueueError> {
    let described = queue.topics().describe(topic).await?.topic;
    if described.layout.is_plain() {
        let groups = queue.inspect().group_names(topic).await;
        if matches!(groups, Err(QueueError::NoTopic { .. })) {
            super::note_unknown(topic);
        }
    }
    Ok(described.policies.max_retries)
}

async fn handle(
    args: &ConsumeArgs,
    progress: &Progress,
    message: Message,
    max_retries: u32,
) -> Outcome {
    // Fails when enough messages are done.
    let Ok(permit) = progress.permits.acquire().await else { return Outcome::Release };
    let running = progress.begin();
    let attempts_max = u64::from(message.max_retries.unwrap_or(max_retries)) + 1;
    let message = serde_json::to_value(ReceivedMessage::from(message)).expect("texts are JSON");
    let handled = args.handle(&message, attempts_max).await;
    drop(running);
    match handled {
        HandledMessage::Done => {
            permit.forget();
            progress.done();
            Outcome::Done
        }
        HandledMessage::Failed(reason) => Outcome::Retry { after: None, reason },
        HandledMessage::NotPrinted(error) => {
            progress.fail(error);
            Outcome::Release
        }
    }
}

/// What was done so far.
struct Progress {
    /// One for each message still wanted.
    permits: Semaphore,
    state: Mutex<ProgressState>,
    changed: Notify,
}

struct ProgressState {
    left: usize,
    running: usize,
    /// When a message began or ended.
    active_at: Instant,
    error: Option<CliError>,
}

/// A message that is being handled, until it is dropped.
struct RunningMessage<'a>(&'a Progress);

impl Drop for RunningMessage<'_> {
    fn drop(&mut self) {
        self.0.change(|state| state.running -= 1);
    }
}

impl Progress {
    fn new(wanted: usize) -> Self {
        let state =
            ProgressState { left: wanted, running: 0, active_at: Instant::now(), error: None };
        Self { permits: Semaphore::new(wanted), state: Mutex::new(state), changed: Notify::new() }
    }

    fn change(&self, change: impl FnOnce(&mut ProgressState)) {
        let mut state = self.state.lock().expect("no code panics while it holds this lock");
        change(&mut state);
        state.active_at = Instant::now();
        self.changed.notify_one();
    }

    fn begin(&self) -> RunningMessage<'_> {
        self.change(|state| state.running += 1);
        RunningMessage(self)
    }

    fn done(&self) {
        self.change(|state| state.left -= 1);
    }

    fn fail(&self, error: CliError) {
        self.change(|state| state.error = Some(error));
    }

    /// Returns when all wanted messages are done, printing failed, or no message arrived for `timeout`.
    async fn finished(&self, timeout: Option<Duration>) {
        loop {
            let idle_end = {
                let state = self.state.lock().expect("no code panics while it holds this lock");
                if state.left == 0 || state.error.is_some() {
                    return;
                }
                let idle_end = timeout.map(|limit| state.active_at + limit);
                idle_end.filter(|_| state.running == 0)
            };
            let idle = async {
                match idle_end {
                    Some(end) => sleep_until(end).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.changed.notified() => {}
                () = idle => return,
            }
        }
    }
}
