//! `headwater produce`: sends one message, or one for each line of standard input.

use std::io::{BufRead, IsTerminal};
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::cli::api_client::{ApiClient, escape};
use crate::cli::output;
use crate::cli::progress;
use crate::cli::{ConnectionArgs, milliseconds, time};
use crate::exit::CliError;

/// Maximum messages in one call.
const BATCH: usize = 500;
/// Maximum bytes in one call, below the body limit of a server.
const BATCH_BYTES: usize = 512 * 1024;

/// Send messages.
#[derive(Debug, clap::Args)]
pub(crate) struct ProduceArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    topic: String,
    /// Key that determines partition and order.
    #[arg(long)]
    key: Option<String>,
    /// Header `name=value`; repeatable.
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
    headers: Vec<(String, String)>,
    /// Payload; `-` sends one message per line of standard input.
    #[arg(long, default_value = "-", allow_hyphen_values = true)]
    payload: String,
    /// Delay until delivery, such as 5s.
    #[arg(long, value_name = "TIME", value_parser = time)]
    delay: Option<Duration>,
    /// Target partition; by default the key determines it.
    #[arg(long)]
    partition: Option<u16>,
    /// Idempotency id: sent again within ten minutes, the message is stored once.
    #[arg(long)]
    id: Option<String>,
}

fn header(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

impl ProduceArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        if self.payload != "-" {
            return self.send(client, vec![self.message(&self.payload)]).await;
        }
        if self.id.is_some() {
            return Err(CliError::usage("--id requires --payload with a single message"));
        }
        // On a terminal, the printed ids show the progress.
        let progress = (!std::io::stdout().is_terminal()).then(|| progress::start("sent", None));
        let (mut batch, mut bytes, mut sent) = (Vec::new(), 0, 0);
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|error| {
                CliError::new(format!(
                    "cannot read standard input: {error}. {sent} lines were sent"
                ))
            })?;
            bytes += line.len();
            batch.push(self.message(&line));
            if batch.len() == BATCH || bytes >= BATCH_BYTES {
                let count = batch.len() as u64;
                self.send_next(client, std::mem::take(&mut batch), sent).await?;
                (bytes, sent) = (0, sent + count);
                if let Some(progress) = &progress {
                    progress.inc(count);
                }
            }
        }
        if batch.is_empty() { Ok(()) } else { self.send_next(client, batch, sent).await }
    }

    /// Sends a batch. If the connection is lost, it may or may not have been stored.
    async fn send_next(
        &self,
        client: &ApiClient,
        messages: Vec<Value>,
        sent: u64,
    ) -> Result<(), CliError> {
        let count = messages.len();
        let before =
            |problem: String| format!("{problem}. {sent} lines were sent before these {count}");
        self.send(client, messages).await.map_err(|failure| match failure {
            CliError::Unreachable(problem) => CliError::Unreachable(format!(
                "{problem}. {sent} lines were sent; the status of the next {count} is unknown"
            )),
            CliError::Usage(problem) => CliError::Usage(before(problem)),
            CliError::NotFound(problem) => CliError::NotFound(before(problem)),
            CliError::Failed(error) => CliError::new(before(format!("{error:#}"))),
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

    async fn send(&self, client: &ApiClient, messages: Vec<Value>) -> Result<(), CliError> {
        let path = format!("/topics/{}/messages", escape(&self.topic));
        let answer = client.post(&path, json!({"messages": messages})).await?;
        let mut failed = None;
        for sent in answer["messages"].as_array().into_iter().flatten() {
            failed = failed.or_else(|| sent["error"].as_str().map(str::to_owned));
            if self.connection.json {
                output::exact(&sent.to_string())?;
            } else {
                let id = sent["id"].as_str().or(sent["delayed_id"].as_str()).unwrap_or("failed");
                output::line(&format!("{id}  partition {}", sent["partition"]))?;
            }
        }
        match failed {
            None => Ok(()),
            Some(problem) => Err(CliError::new(format!("not all messages were sent: {problem}"))),
        }
    }
}
