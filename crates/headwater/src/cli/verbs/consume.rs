//! `headwater consume`: joins a group; acknowledges a message after printing it, or after its command succeeded.
//!
//! Upstream: `cli/mod.rs`. Downstream: the routes of `api/consume`; `consume_exec.rs` runs commands. Guarantees: a
//! message that was not printed is not acknowledged; a failed command is a failed attempt, which is retried and
//! finally becomes a dead letter; on exit, deliveries in flight are released without counting an attempt.

use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{BoxStream, FuturesUnordered, StreamExt};
use futures_util::{FutureExt, future};
use serde_json::{Value, json};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use crate::api::{ConsumeMode, LEASE};
use crate::cli::api_client::{ApiClient, escape};
use crate::cli::consume_exec::execute;
use crate::cli::output;
use crate::cli::{ConnectionArgs, time};
use crate::exit::CliError;
use crate::server::shutdown_signal::ShutdownSignal;

/// Interval of heartbeats; several may be lost before the lease expires.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(8);
const _: () = assert!(HEARTBEAT_INTERVAL.as_millis() * 3 < LEASE.as_millis());
/// How long shutdown waits for running commands.
const DRAIN: Duration = Duration::from_secs(25);
/// Maximum settlements in one call.
const SETTLE_BATCH: usize = 500;
/// Maximum messages in flight.
const IN_FLIGHT_MAX: u64 = 1000;

/// Consume messages as a member of a group.
#[derive(Debug, clap::Args)]
pub(crate) struct ConsumeArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    topic: String,
    #[arg(long)]
    group: String,
    /// Exit after this many messages.
    #[arg(long)]
    count: Option<u64>,
    /// Exit when no message has arrived for this time, such as 10s.
    #[arg(long, value_name = "TIME", value_parser = time)]
    timeout: Option<Duration>,
    /// Run this shell command for each message. Its standard input is a file with the whole payload. Its environment
    /// has HEADWATER_ID, HEADWATER_TOPIC, HEADWATER_KEY, HEADWATER_PARTITION, HEADWATER_ATTEMPT, HEADWATER_HEADERS,
    /// HEADWATER_PAYLOAD_BYTES and HEADWATER_PAYLOAD_SHA256. Exit code 0 acknowledges the message, any other retries
    /// it. If this process is killed, the command is killed as well.
    #[arg(long, value_name = "COMMAND")]
    exec: Option<String>,
    /// `owned`: each partition has one consumer and is processed in order. `shared`: consumers compete.
    #[arg(long, value_enum, default_value_t = ConsumeMode::Owned)]
    mode: ConsumeMode,
    /// Messages of one partition handled concurrently.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=IN_FLIGHT_MAX))]
    concurrency: u64,
}

/// Outcome of a message: its settlement, and whether it counts as done.
struct HandledMessage {
    settlement: Value,
    is_done: bool,
}

/// A group member, until it leaves.
struct GroupMember<'a> {
    client: &'a ApiClient,
    path: String,
    messages: BoxStream<'static, Result<Value, CliError>>,
    commands: FuturesUnordered<BoxFuture<'static, HandledMessage>>,
    settlements: Vec<Value>,
    /// Messages still wanted.
    left: u64,
}

impl ConsumeArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let shutdown = ShutdownSignal::default();
        shutdown.on_signals().map_err(|error| CliError::new(error.to_string()))?;
        let left = self.count.unwrap_or(u64::MAX);
        if left == 0 {
            return Ok(());
        }
        let group = format!("/topics/{}/groups/{}", escape(&self.topic), escape(&self.group));
        let request = json!({
            "mode": self.mode, "concurrency": self.concurrency,
            "in_flight": left.clamp(self.concurrency, IN_FLIGHT_MAX),
        });
        let mut messages = client.post_events(&format!("{group}/consume"), request).await?;
        let admitted = messages.next().await.unwrap_or_else(|| Err(stream_ended()))?;
        let consumer = admitted["consumer"].as_str().ok_or_else(stream_ended)?;
        let mut member = GroupMember {
            client,
            path: format!("{group}/consumers/{}", escape(consumer)),
            messages,
            commands: FuturesUnordered::new(),
            settlements: Vec::new(),
            left,
        };
        let outcome = self.work(&mut member, &shutdown).await;
        let left_group = member.leave().await;
        outcome.and(left_group)
    }

    /// Consumes until enough messages are done, none arrives any more, or a signal is received.
    async fn work(
        &self,
        member: &mut GroupMember<'_>,
        shutdown: &ShutdownSignal,
    ) -> Result<(), CliError> {
        let mut heartbeats = interval(HEARTBEAT_INTERVAL);
        heartbeats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut active = Instant::now();
        while member.left > 0 {
            let limit = self.timeout.filter(|_| member.commands.is_empty());
            let idle = async {
                match limit {
                    Some(limit) => sleep_until(active + limit).await,
                    None => future::pending().await,
                }
            };
            // A message read beyond `left` would stay in flight until we leave, so none is read.
            let has_room = (member.commands.len() as u64) < member.left;
            tokio::select! {
                // In this order: after a signal nothing is started, and heartbeats are sent even under load.
                biased;
                () = shutdown.wait() => return Ok(()),
                _ = heartbeats.tick() => member.heartbeat().await?,
                Some(handled) = member.commands.next() => {
                    member.record(handled);
                    member.settle().await?;
                    active = Instant::now();
                }
                message = member.messages.next(), if has_room => {
                    self.handle(member, message.unwrap_or_else(|| Err(stream_ended()))?)?;
                    // Messages that are already here are settled in the same call.
                    while member.commands.is_empty()
                        && member.left > 0
                        && member.settlements.len() < SETTLE_BATCH
                        && let Some(Some(message)) = member.messages.next().now_or_never()
                    {
                        self.handle(member, message?)?;
                    }
                    member.settle().await?;
                    active = Instant::now();
                }
                () = idle => return Ok(()),
            }
        }
        Ok(())
    }

    /// Prints a message, or starts its command.
    fn handle(&self, member: &mut GroupMember<'_>, mut message: Value) -> Result<(), CliError> {
        let (delivery, attempts_max) = (message["delivery"].take(), message["attempts_max"].take());
        if let Some(fields) = message.as_object_mut() {
            fields.remove("delivery");
            fields.remove("attempts_max");
        }
        match &self.exec {
            None => {
                let printed = output::json(self.connection.json, &message);
                let outcome = if printed.is_ok() { "done" } else { "release" };
                let settlement = json!({"delivery": delivery, "outcome": outcome});
                member.record(HandledMessage { settlement, is_done: printed.is_ok() });
                printed
            }
            Some(command) => {
                let command = command.clone();
                let running = async move {
                    match execute(&command, &message).await {
                        Ok(()) => HandledMessage {
                            settlement: json!({"delivery": delivery, "outcome": "done"}),
                            is_done: true,
                        },
                        Err(reason) => {
                            let id = message["id"].as_str().unwrap_or_default();
                            let is_last = attempts_max.as_u64().is_some_and(|most| {
                                message["attempt"].as_u64().unwrap_or(0) >= most
                            });
                            let what = if is_last {
                                "failed its last attempt and becomes a dead letter"
                            } else {
                                "failed and will be retried"
                            };
                            output::note(&format!(
                                "message {id} {what}: {}",
                                output::plain(&reason)
                            ));
                            let settlement =
                                json!({"delivery": delivery, "outcome": "retry", "reason": reason});
                            HandledMessage { settlement, is_done: false }
                        }
                    }
                };
                member.commands.push(running.boxed());
                Ok(())
            }
        }
    }
}

impl GroupMember<'_> {
    fn record(&mut self, handled: HandledMessage) {
        self.settlements.push(handled.settlement);
        self.left = self.left.saturating_sub(u64::from(handled.is_done));
    }

    async fn settle(&mut self) -> Result<(), CliError> {
        if self.settlements.is_empty() {
            return Ok(());
        }
        let settlements = std::mem::take(&mut self.settlements);
        self.post_settlements(settlements).await
    }

    async fn heartbeat(&self) -> Result<(), CliError> {
        self.post_settlements(Vec::new()).await
    }

    async fn post_settlements(&self, settlements: Vec<Value>) -> Result<(), CliError> {
        let request = json!({"settlements": settlements});
        self.client.post(&format!("{}/settle", self.path), request).await.map(drop)
    }

    /// Waits for running commands, then leaves the group.
    async fn leave(mut self) -> Result<(), CliError> {
        let mut commands = std::mem::take(&mut self.commands);
        let mut heartbeats = interval(HEARTBEAT_INTERVAL);
        let finishing = async {
            while !commands.is_empty() {
                tokio::select! {
                    Some(handled) = commands.next() => self.record(handled),
                    _ = heartbeats.tick() => { let _ = self.heartbeat().await; }
                }
            }
        };
        // Deliveries whose command does not finish in time are released, and the command is killed.
        let _ = timeout(DRAIN, finishing).await;
        drop(commands);
        let settled = self.settle().await;
        settled.and(self.client.delete(&self.path).await.map(drop))
    }
}

fn stream_ended() -> CliError {
    CliError::Unreachable(
        "the server closed the message stream; printed messages are acknowledged".to_owned(),
    )
}
