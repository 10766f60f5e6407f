//! `headwater consume --url`: pulls messages from a server and settles them.
//!
//! Upstream: `consume.rs`. Downstream: the routes of `api/consume.rs`. Guarantees: leases are extended while
//! commands run. If this process is killed, its messages are delivered again when their leases run out.

use std::time::Duration;

use futures_util::future::{self, BoxFuture, FutureExt};
use futures_util::stream::{FuturesUnordered, StreamExt};
use headwater_stream::Backoff;
use serde_json::{Value, json};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::{ConsumeArgs, DRAIN, HandledMessage};
use crate::api::LEASE_DEFAULT;
use crate::cli::api_client::{ApiClient, escape};
use crate::cli::output;
use crate::exit::CliError;
use crate::server::shutdown_signal::ShutdownSignal;

/// Interval of extending leases; one may fail before they run out.
const EXTEND_INTERVAL: Duration = Duration::from_secs(10);
const _: () = assert!(EXTEND_INTERVAL.as_millis() * 2 < LEASE_DEFAULT.as_millis());
/// Pauses between attempts to settle, and for how long; the leases end later.
const RETRY: Backoff = Backoff::doubling(Duration::from_millis(200), Duration::from_secs(2));
const RETRY_MAX: Duration = Duration::from_secs(10);
/// Maximum time of one pull.
const WAIT_MAX: Duration = Duration::from_secs(20);
/// Messages in one pull, if they are printed.
const PRINT_BATCH: u64 = 100;

/// A leased message that was handled.
type Handled = (Value, HandledMessage);

/// The messages of this consumer.
struct LeasedMessages<'a> {
    args: &'a ConsumeArgs,
    client: &'a ApiClient,
    path: String,
    /// Leases of messages being handled.
    running: Vec<Value>,
    handling: FuturesUnordered<BoxFuture<'a, Handled>>,
    settlements: Vec<Value>,
    /// Messages still wanted.
    left: u64,
}

/// Consumes until enough messages are done, none arrives any more, or a signal is received.
pub(super) async fn run(args: &ConsumeArgs, client: &ApiClient) -> Result<(), CliError> {
    let shutdown = ShutdownSignal::default();
    shutdown.on_signals().map_err(|error| CliError::new(error.to_string()))?;
    let topic = format!("/topics/{}", escape(&args.topic));
    match client.get_optional(&topic, &[]).await {
        Ok(None) => super::note_unknown(&args.topic),
        // A topic is described only while all of its servers answer. The pull says what cannot be reached.
        Ok(Some(_)) | Err(CliError::Unreachable(_)) => {}
        Err(error) => return Err(error),
    }
    let mut messages = LeasedMessages {
        args,
        client,
        path: format!("{topic}/groups/{}", escape(&args.group)),
        running: Vec::new(),
        handling: FuturesUnordered::new(),
        settlements: Vec::new(),
        left: args.count.unwrap_or(u64::MAX),
    };
    let outcome = messages.work(&shutdown).await;
    outcome.and(messages.finish().await)
}

impl<'a> LeasedMessages<'a> {
    async fn work(&mut self, shutdown: &ShutdownSignal) -> Result<(), CliError> {
        let mut extending = interval(EXTEND_INTERVAL);
        extending.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut active = Instant::now();
        // Kept until it ends: messages of a dropped pull are delivered again only when their leases run out.
        let mut pulling: Option<BoxFuture<'_, Result<Value, CliError>>> = None;
        while self.left > 0 {
            let at_once =
                if self.args.exec.is_some() { self.args.concurrency } else { PRINT_BATCH };
            let max = at_once.min(self.left).saturating_sub(self.running.len() as u64);
            if pulling.is_none() && max > 0 {
                let idle = active.elapsed();
                let wait = self.args.timeout.map_or(WAIT_MAX, |limit| limit.saturating_sub(idle));
                pulling = Some(self.pull(max, wait.min(WAIT_MAX)));
            }
            let pulled = async {
                match &mut pulling {
                    Some(pulling) => pulling.await,
                    None => future::pending().await,
                }
            };
            tokio::select! {
                // In this order: after a signal nothing is started, and leases are extended even under load.
                biased;
                () = shutdown.wait() => return Ok(()),
                _ = extending.tick() => match self.extend().await {
                    // The next one comes before the leases run out.
                    Err(CliError::Unreachable(problem)) => output::note(&problem),
                    extended => extended?,
                },
                Some(handled) = self.handling.next() => {
                    let mut outcome = self.record(handled);
                    // Messages that have ended by now are settled in the same call.
                    while outcome.is_ok() && let Some(Some(handled)) = self.handling.next().now_or_never() {
                        outcome = self.record(handled);
                    }
                    self.settle().await?;
                    outcome?;
                    active = Instant::now();
                }
                pulled = pulled => {
                    pulling = None;
                    let Value::Array(pulled) = pulled?["messages"].take() else { continue };
                    if !pulled.is_empty() {
                        active = Instant::now();
                    }
                    pulled.into_iter().for_each(|message| self.start(message));
                    let is_idle = self.args.timeout.is_some_and(|limit| active.elapsed() >= limit);
                    if is_idle && self.running.is_empty() {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// Starts to handle a message.
    fn start(&mut self, mut message: Value) {
        let (lease, attempts_max) = (message["lease"].take(), message["attempts_max"].as_u64());
        if let Some(fields) = message.as_object_mut() {
            for name in ["lease", "lease_ms", "attempts_max"] {
                fields.remove(name);
            }
        }
        self.running.push(lease.clone());
        let args = self.args;
        let handling = async move {
            let handled = args.handle(&message, attempts_max.unwrap_or(u64::MAX)).await;
            (lease, handled)
        };
        self.handling.push(handling.boxed());
    }

    /// Records how a message ended; fails if it could not be printed.
    fn record(&mut self, (lease, handled): Handled) -> Result<(), CliError> {
        self.running.retain(|running| *running != lease);
        let (settlement, outcome) = match handled {
            HandledMessage::Done => {
                self.left = self.left.saturating_sub(1);
                (json!({"lease": lease, "outcome": "done"}), Ok(()))
            }
            HandledMessage::Failed(reason) => {
                (json!({"lease": lease, "outcome": "retry", "reason": reason}), Ok(()))
            }
            HandledMessage::NotPrinted(error) => {
                (json!({"lease": lease, "outcome": "release"}), Err(error))
            }
        };
        self.settlements.push(settlement);
        outcome
    }

    fn pull(&self, max: u64, wait: Duration) -> BoxFuture<'a, Result<Value, CliError>> {
        let (client, path) = (self.client, format!("{}/pull", self.path));
        let (wait, lease) = (wait.as_millis() as u64, LEASE_DEFAULT.as_millis() as u64);
        let request = json!({"max": max, "wait_ms": wait, "lease_ms": lease});
        async move { client.post(&path, request).await }.boxed()
    }

    async fn settle(&mut self) -> Result<(), CliError> {
        if self.settlements.is_empty() {
            return Ok(());
        }
        let (path, request) =
            (format!("{}/settle", self.path), json!({"settlements": self.settlements}));
        let mut retry = RETRY.timer();
        let give_up_at = Instant::now() + RETRY_MAX;
        // A repeated call settles what the first one has not; so nothing that is done is handled again.
        let answer = loop {
            match self.client.post(&path, request.clone()).await {
                Err(CliError::Unreachable(_)) if Instant::now() < give_up_at => {
                    sleep(retry.next_delay()).await;
                }
                answer => break answer?,
            }
        };
        self.settlements.clear();
        note_expired(&answer, "settled");
        Ok(())
    }

    async fn extend(&self) -> Result<(), CliError> {
        if self.running.is_empty() {
            return Ok(());
        }
        let request = json!({"leases": self.running});
        let answer = self.client.post(&format!("{}/extend", self.path), request).await?;
        note_expired(&answer, "extended");
        Ok(())
    }

    /// Waits for running commands, settles, and releases the messages of commands that did not end.
    async fn finish(mut self) -> Result<(), CliError> {
        let mut handling = std::mem::take(&mut self.handling);
        let mut extending = interval(EXTEND_INTERVAL);
        let finishing = async {
            while !handling.is_empty() {
                tokio::select! {
                    // Without standard output there is nobody to tell.
                    Some(handled) = handling.next() => { let _ = self.record(handled); }
                    _ = extending.tick() => { let _ = self.extend().await; }
                }
            }
        };
        let _ = timeout(DRAIN, finishing).await;
        // Kills the commands that still run.
        drop(handling);
        let unfinished = std::mem::take(&mut self.running).into_iter();
        let release = |lease| json!({"lease": lease, "outcome": "release"});
        self.settlements.extend(unfinished.map(release));
        self.settle().await
    }
}

/// Says how many leases ran out before they were settled or extended.
fn note_expired(answer: &Value, what: &str) {
    let results = answer["results"].as_array().into_iter().flatten();
    let expired = results.filter(|result| *result == "expired").count();
    if expired > 0 {
        output::note(&format!(
            "{expired} messages could not be {what}: their leases ran out, and they are delivered again"
        ));
    }
}
