//! `headwater consume`: takes part in a group; a message is acknowledged after it is printed, or after a command for it
//! has succeeded.
//!
//! Promises: what is not printed is not acknowledged; a command that fails is a failed attempt, which is retried and
//! becomes a dead letter as everywhere; ending gives back what is in hand and counts no attempt.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use headwater_queue::{ConsumerConfig, Message, Mode, Outcome, Queue};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use super::{Reach, client, print, time};
use crate::failure::Failure;
use crate::settings::Settings;
use crate::stop::Stopping;

/// Characters of what a failed command said that become the reason.
const REASON_MAX: usize = 500;

/// Consumes messages as a member of a group.
#[derive(Debug, clap::Args)]
pub(crate) struct Consume {
    #[command(flatten)]
    pub(super) reach: Reach,
    topic: String,
    #[arg(long)]
    group: String,
    /// End after so many messages.
    #[arg(long)]
    count: Option<u64>,
    /// End when no message has come for this time, such as 10s.
    #[arg(long, value_name = "TIME", value_parser = time)]
    timeout: Option<Duration>,
    /// Run this command for each message, with the payload on its standard input and HEADWATER_KEY,
    /// HEADWATER_PARTITION, HEADWATER_ATTEMPT, HEADWATER_HEADERS, HEADWATER_ID, HEADWATER_TOPIC in its environment. If
    /// it exits with 0 the message is done, else it is tried again later.
    #[arg(long, value_name = "COMMAND")]
    exec: Option<String>,
    /// `owned`: partitions have one reader each, in order. `shared`: readers compete.
    #[arg(long, value_enum, default_value_t = ModeName::Owned)]
    mode: ModeName,
    /// Messages handled at once.
    #[arg(long, default_value_t = 1)]
    concurrency: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ModeName {
    Owned,
    Shared,
}

/// What a message came to, for whoever counts.
enum Ended {
    Done,
    Failed,
    /// Standard output cannot be written.
    Stuck(Failure),
}

impl Consume {
    pub(super) async fn run(&self, settings: &Settings) -> Result<(), Failure> {
        if self.reach.url.is_some() {
            return Err(Failure::usage(
                "consume reads the streams itself: give --stream-url instead of --url",
            ));
        }
        let stopping = Stopping::default();
        stopping.on_signals().map_err(|error| Failure::new(error.to_string()))?;
        let streams = client::streams(settings).await?;
        let queue = Queue::new(Arc::clone(&streams));

        let (sender, ended) = mpsc::unbounded_channel();
        let begun = Arc::new(AtomicU64::new(0));
        let limit = self.count.unwrap_or(u64::MAX);
        let exec = self.exec.clone();
        let handler = move |message: Message| {
            let (sender, begun, exec) = (sender.clone(), Arc::clone(&begun), exec.clone());
            async move {
                // One more than was asked for is for the next who comes.
                if begun.fetch_add(1, Ordering::SeqCst) >= limit {
                    return Outcome::Release;
                }
                let (outcome, end) = match exec {
                    None => printed(&message),
                    Some(command) => executed(&command, &message).await,
                };
                if matches!(end, Ended::Failed) {
                    // It counts for nothing, so another one may take its place.
                    begun.fetch_sub(1, Ordering::SeqCst);
                }
                let _ = sender.send(end);
                outcome
            }
        };
        let config = ConsumerConfig {
            mode: match self.mode {
                ModeName::Owned => Mode::Owned,
                ModeName::Shared => Mode::Shared,
            },
            concurrency: self.concurrency,
            in_flight_max: self.concurrency.max(usize::try_from(limit.min(1000)).unwrap_or(1000)),
            ..ConsumerConfig::default()
        };
        let subscription = queue.subscribe(&self.topic, &self.group, handler, config).await;
        let subscription = subscription.map_err(|error| match error.is_transient() {
            true => Failure::Unreachable(error.to_string()),
            false => Failure::new(error.to_string()),
        })?;
        let outcome = self.count_down(ended, limit, &stopping).await;
        subscription.stop().await;
        // What was acknowledged is safe; there is nothing else to say here.
        let _ = streams.close().await;
        outcome
    }

    /// Waits until so many messages are done, until none comes any more, or until a signal.
    async fn count_down(
        &self,
        mut ended: mpsc::UnboundedReceiver<Ended>,
        mut left: u64,
        stopping: &Stopping,
    ) -> Result<(), Failure> {
        while left > 0 {
            let idle = async {
                match self.timeout {
                    Some(limit) => tokio::time::sleep(limit).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                end = ended.recv() => match end {
                    Some(Ended::Done) => left -= 1,
                    Some(Ended::Failed) => {}
                    Some(Ended::Stuck(failure)) => return Err(failure),
                    None => return Err(Failure::new("the subscription ended by itself; the log says why")),
                },
                () = idle => return Ok(()),
                () = stopping.begun() => return Ok(()),
            }
        }
        Ok(())
    }
}

fn printed(message: &Message) -> (Outcome, Ended) {
    let mut line = json!({
        "id": message.id.to_string(),
        "topic": message.topic.as_str(),
        "partition": message.partition,
        "key": message.key,
        "headers": message.headers,
        "attempt": message.attempt,
    });
    let payload = crate::admin::Payload::of(&message.payload);
    for (name, value) in [("payload", payload.payload), ("payload_base64", payload.payload_base64)]
    {
        if let Some(value) = value {
            line[name] = value.into();
        }
    }
    if message.fields.get("payload").is_none() {
        line["fields"] = json!(crate::admin::all_fields(&message.fields));
    }
    match print::line(&line.to_string()) {
        Ok(()) => (Outcome::Done, Ended::Done),
        Err(failure) => (Outcome::Release, Ended::Stuck(failure)),
    }
}

async fn executed(command: &str, message: &Message) -> (Outcome, Ended) {
    match execute(command, message).await {
        Ok(()) => (Outcome::Done, Ended::Done),
        Err(reason) => {
            eprintln!("headwater: message {} will be tried again: {reason}", message.id);
            (Outcome::retry(reason), Ended::Failed)
        }
    }
}

async fn execute(command: &str, message: &Message) -> Result<(), String> {
    let headers = serde_json::to_string(&message.headers).unwrap_or_default();
    let mut child = tokio::process::Command::new("sh")
        .args(["-c", command])
        .env("HEADWATER_ID", message.id.to_string())
        .env("HEADWATER_TOPIC", message.topic.as_str())
        .env("HEADWATER_KEY", message.key.as_deref().unwrap_or_default())
        .env("HEADWATER_PARTITION", message.partition.to_string())
        .env("HEADWATER_ATTEMPT", message.attempt.to_string())
        .env("HEADWATER_HEADERS", headers)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("`{command}` could not be started: {error}"))?;
    let mut input = child.stdin.take();
    let payload = message.payload.clone();
    // A command need not read its input; then the pipe breaks, which is no failure.
    let feed = async {
        if let Some(input) = input.as_mut() {
            let _ = input.write_all(&payload).await;
        }
        drop(input.take());
    };
    let ((), output) = tokio::join!(feed, child.wait_with_output());
    let output = output.map_err(|error| format!("`{command}` could not be waited for: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said: String = said.trim().chars().take(REASON_MAX).collect();
    Err(format!("`{command}` ended with {}: {said}", output.status))
}
