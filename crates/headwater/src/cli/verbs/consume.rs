//! `headwater consume`: takes part in a group; a message is acknowledged after it is printed, or after a command for it
//! has succeeded.
//!
//! Upstream: `operator`. Downstream: the routes of `admin` that hand out messages and settle them; `execute` runs commands.
//! Promises: what is not printed is not acknowledged; a command that fails is a failed attempt, which is retried and
//! becomes a dead letter as everywhere; ending gives back what is in hand and counts no attempt.

use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{BoxStream, FuturesUnordered, StreamExt};
use futures_util::{FutureExt, future};
use serde_json::{Value, json};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use crate::api::{LEASE, ModeName};
use crate::cli::api_client::{Client, escape};
use crate::cli::consume_exec::execute;
use crate::cli::output;
use crate::cli::{Reach, time};
use crate::exit::Failure;
use crate::server::shutdown::Stopping;

/// Signs of life are sent so often; several may be lost before the lease runs out.
const BEAT_EVERY: Duration = Duration::from_secs(8);
const _: () = assert!(BEAT_EVERY.as_millis() * 3 < LEASE.as_millis());
/// How long a stop waits for commands that are at work.
const DRAIN: Duration = Duration::from_secs(25);
/// Messages that are settled with one call.
const SETTLED_MAX: usize = 500;
/// Messages that are read ahead, at most.
const IN_FLIGHT_MAX: u64 = 1000;

/// Consumes messages as a member of a group.
#[derive(Debug, clap::Args)]
pub(crate) struct Consume {
    #[command(flatten)]
    pub(crate) reach: Reach,
    topic: String,
    #[arg(long)]
    group: String,
    /// End after so many messages.
    #[arg(long)]
    count: Option<u64>,
    /// End when no message has come for this time, such as 10s.
    #[arg(long, value_name = "TIME", value_parser = time)]
    timeout: Option<Duration>,
    /// Run this command for each message. Its standard input is a file with the whole payload; its environment has
    /// HEADWATER_KEY, HEADWATER_PARTITION, HEADWATER_ATTEMPT, HEADWATER_HEADERS, HEADWATER_ID, HEADWATER_TOPIC,
    /// HEADWATER_PAYLOAD_BYTES and HEADWATER_PAYLOAD_SHA256. If it exits with 0 the message is done, else it is tried
    /// again later. If this process is killed, the command is killed, too.
    #[arg(long, value_name = "COMMAND")]
    exec: Option<String>,
    /// `owned`: partitions have one reader each, in order. `shared`: readers compete.
    #[arg(long, value_enum, default_value_t = ModeName::Owned)]
    mode: ModeName,
    /// Messages of one partition handled at once.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=IN_FLIGHT_MAX))]
    concurrency: u64,
}

/// What a message came to: the settlement, and whether it counts.
struct Ended {
    settlement: Value,
    is_done: bool,
}

/// A member of a group, until it leaves.
struct Member<'a> {
    client: &'a Client,
    path: String,
    messages: BoxStream<'static, Result<Value, Failure>>,
    commands: FuturesUnordered<BoxFuture<'static, Ended>>,
    settlements: Vec<Value>,
    /// How many are still wanted.
    left: u64,
}

impl Consume {
    pub(in crate::cli) async fn run(&self, client: &Client) -> Result<(), Failure> {
        let stopping = Stopping::default();
        stopping.on_signals().map_err(|error| Failure::new(error.to_string()))?;
        let left = self.count.unwrap_or(u64::MAX);
        if left == 0 {
            return Ok(());
        }
        let group = format!("/topics/{}/groups/{}", escape(&self.topic), escape(&self.group));
        let wish = json!({
            "mode": self.mode, "concurrency": self.concurrency,
            "in_flight": left.clamp(self.concurrency, IN_FLIGHT_MAX),
        });
        let mut messages = client.post_events(&format!("{group}/consume"), wish).await?;
        let admitted = messages.next().await.unwrap_or_else(|| Err(ended_by_itself()))?;
        let consumer = admitted["consumer"].as_str().ok_or_else(ended_by_itself)?;
        let mut member = Member {
            client,
            path: format!("{group}/consumers/{}", escape(consumer)),
            messages,
            commands: FuturesUnordered::new(),
            settlements: Vec::new(),
            left,
        };
        let outcome = self.work(&mut member, &stopping).await;
        let last_words = member.leave().await;
        outcome.and(last_words)
    }

    /// Works until so many messages are done, until none comes any more, or until a signal.
    async fn work(&self, member: &mut Member<'_>, stopping: &Stopping) -> Result<(), Failure> {
        let mut beats = interval(BEAT_EVERY);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut active = Instant::now();
        while member.left > 0 {
            let limit = self.timeout.filter(|_| member.commands.is_empty());
            let idle = async {
                match limit {
                    Some(limit) => sleep_until(active + limit).await,
                    None => future::pending().await,
                }
            };
            // A message that is read in vain would be lost to us until we leave, so none is read beyond what is wanted.
            let has_room = (member.commands.len() as u64) < member.left;
            tokio::select! {
                // In this order: after a signal nothing more is begun, and who is busy still gives signs of life.
                biased;
                () = stopping.begun() => return Ok(()),
                _ = beats.tick() => member.beat().await?,
                Some(ended) = member.commands.next() => {
                    member.note(ended);
                    member.settle().await?;
                    active = Instant::now();
                }
                message = member.messages.next(), if has_room => {
                    self.take(member, message.unwrap_or_else(|| Err(ended_by_itself()))?)?;
                    // Those that are here already are settled with it.
                    while member.commands.is_empty()
                        && member.left > 0
                        && member.settlements.len() < SETTLED_MAX
                        && let Some(Some(message)) = member.messages.next().now_or_never()
                    {
                        self.take(member, message?)?;
                    }
                    member.settle().await?;
                    active = Instant::now();
                }
                () = idle => return Ok(()),
            }
        }
        Ok(())
    }

    /// Prints a message, or begins its command.
    fn take(&self, member: &mut Member<'_>, mut message: Value) -> Result<(), Failure> {
        let (delivery, attempts_max) = (message["delivery"].take(), message["attempts_max"].take());
        if let Some(fields) = message.as_object_mut() {
            fields.remove("delivery");
            fields.remove("attempts_max");
        }
        match &self.exec {
            None => {
                let printed = output::json(self.reach.json, &message);
                let outcome = if printed.is_ok() { "done" } else { "release" };
                let settlement = json!({"delivery": delivery, "outcome": outcome});
                member.note(Ended { settlement, is_done: printed.is_ok() });
                printed
            }
            Some(command) => {
                let command = command.clone();
                let running = async move {
                    match execute(&command, &message).await {
                        Ok(()) => Ended {
                            settlement: json!({"delivery": delivery, "outcome": "done"}),
                            is_done: true,
                        },
                        Err(reason) => {
                            let id = message["id"].as_str().unwrap_or_default();
                            let is_last = attempts_max.as_u64().is_some_and(|most| {
                                message["attempt"].as_u64().unwrap_or(0) >= most
                            });
                            let what = if is_last {
                                "has failed for the last time and becomes a dead letter"
                            } else {
                                "will be tried again"
                            };
                            output::note(&format!(
                                "message {id} {what}: {}",
                                output::plain(&reason)
                            ));
                            let settlement =
                                json!({"delivery": delivery, "outcome": "retry", "reason": reason});
                            Ended { settlement, is_done: false }
                        }
                    }
                };
                member.commands.push(running.boxed());
                Ok(())
            }
        }
    }
}

impl Member<'_> {
    fn note(&mut self, ended: Ended) {
        self.settlements.push(ended.settlement);
        self.left = self.left.saturating_sub(u64::from(ended.is_done));
    }

    async fn settle(&mut self) -> Result<(), Failure> {
        if self.settlements.is_empty() {
            return Ok(());
        }
        let settlements = std::mem::take(&mut self.settlements);
        self.say(settlements).await
    }

    async fn beat(&self) -> Result<(), Failure> {
        self.say(Vec::new()).await
    }

    async fn say(&self, settlements: Vec<Value>) -> Result<(), Failure> {
        let wish = json!({"settlements": settlements});
        self.client.post(&format!("{}/settle", self.path), wish).await.map(drop)
    }

    /// Lets commands finish that are at work, and leaves the group.
    async fn leave(mut self) -> Result<(), Failure> {
        let mut commands = std::mem::take(&mut self.commands);
        let mut beats = interval(BEAT_EVERY);
        let finishing = async {
            while !commands.is_empty() {
                tokio::select! {
                    Some(ended) = commands.next() => self.note(ended),
                    _ = beats.tick() => { let _ = self.beat().await; }
                }
            }
        };
        // What does not end in time is given back, and its command is killed.
        let _ = timeout(DRAIN, finishing).await;
        drop(commands);
        let settled = self.settle().await;
        settled.and(self.client.delete(&self.path).await.map(drop))
    }
}

fn ended_by_itself() -> Failure {
    Failure::Unreachable(
        "the server ended the stream of messages; what was printed is done".to_owned(),
    )
}
