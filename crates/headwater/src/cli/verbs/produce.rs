//! `headwater produce`: one message, or one for each line of standard input.

use std::io::{BufRead, IsTerminal};
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::cli::api_client::{Client, escape};
use crate::cli::output;
use crate::cli::progress::Progress;
use crate::cli::{Reach, milliseconds, time};
use crate::exit::Failure;

/// Lines that are sent with one call.
const BATCH: usize = 500;
/// Bytes that are sent with one call, so that a body stays below the limit of a server.
const BATCH_BYTES: usize = 512 * 1024;

/// Sends messages.
#[derive(Debug, clap::Args)]
pub(crate) struct Produce {
    #[command(flatten)]
    pub(crate) reach: Reach,
    topic: String,
    /// What decides the partition and the order.
    #[arg(long)]
    key: Option<String>,
    /// A header, `name=value`; may be given several times.
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
    headers: Vec<(String, String)>,
    /// The payload; `-` sends one message for each line of standard input.
    #[arg(long, default_value = "-", allow_hyphen_values = true)]
    payload: String,
    /// Deliver after this time, such as 5s.
    #[arg(long, value_name = "TIME", value_parser = time)]
    delay: Option<Duration>,
    /// The partition, if it is not to be chosen by the key.
    #[arg(long)]
    partition: Option<u16>,
    /// Counts once however often it is sent within ten minutes.
    #[arg(long)]
    id: Option<String>,
}

fn header(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("a header is NAME=VALUE".to_owned()),
    }
}

impl Produce {
    pub(in crate::cli) async fn run(&self, client: &Client) -> Result<(), Failure> {
        if self.payload != "-" {
            return self.send(client, vec![self.message(&self.payload)]).await;
        }
        if self.id.is_some() {
            return Err(Failure::usage("--id is for one message; give it with --payload"));
        }
        // On a terminal, the ids that are printed tell how far it is.
        let progress = (!std::io::stdout().is_terminal()).then(|| Progress::new("sent", None));
        let (mut batch, mut bytes, mut sent) = (Vec::new(), 0, 0);
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|error| {
                Failure::new(format!(
                    "standard input cannot be read: {error}. {sent} lines were sent"
                ))
            })?;
            bytes += line.len();
            batch.push(self.message(&line));
            if batch.len() == BATCH || bytes >= BATCH_BYTES {
                let count = batch.len() as u64;
                self.send_next(client, std::mem::take(&mut batch), sent).await?;
                (bytes, sent) = (0, sent + count);
                if let Some(progress) = &progress {
                    progress.add(count);
                }
            }
        }
        if batch.is_empty() { Ok(()) } else { self.send_next(client, batch, sent).await }
    }

    /// Sends a part of many; one that is cut off may have been stored or not.
    async fn send_next(
        &self,
        client: &Client,
        messages: Vec<Value>,
        sent: u64,
    ) -> Result<(), Failure> {
        let count = messages.len();
        let before =
            |problem: String| format!("{problem}. {sent} lines were sent before these {count}");
        self.send(client, messages).await.map_err(|failure| match failure {
            Failure::Unreachable(problem) => Failure::Unreachable(format!(
                "{problem}. {sent} lines were sent; of the next {count} it is not known"
            )),
            Failure::Usage(problem) => Failure::Usage(before(problem)),
            Failure::Missing(problem) => Failure::Missing(before(problem)),
            Failure::Failed(error) => Failure::new(before(format!("{error:#}"))),
            other => other,
        })
    }

    fn message(&self, payload: &str) -> Value {
        let headers: Map<String, Value> =
            self.headers.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
        json!({
            "key": self.key,
            "payload": payload,
            "headers": headers,
            "partition": self.partition,
            "id": self.id,
            "delay_ms": self.delay.map(milliseconds),
        })
    }

    async fn send(&self, client: &Client, messages: Vec<Value>) -> Result<(), Failure> {
        let path = format!("/topics/{}/messages", escape(&self.topic));
        let answer = client.post(&path, json!({"messages": messages})).await?;
        let mut failed = None;
        for sent in answer["messages"].as_array().into_iter().flatten() {
            failed = failed.or_else(|| sent["error"].as_str().map(str::to_owned));
            if self.reach.json {
                output::exact(&sent.to_string())?;
            } else {
                let id = sent["id"].as_str().or(sent["delayed_id"].as_str()).unwrap_or("failed");
                output::line(&format!("{id}  partition {}", sent["partition"]))?;
            }
        }
        match failed {
            None => Ok(()),
            Some(problem) => Err(Failure::new(format!("not all messages were sent: {problem}"))),
        }
    }
}
