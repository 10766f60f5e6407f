//! `headwater produce`: sends one message, or one for each line of standard input.
//!
//! Guarantees: payloads are bytes: a file, base64 or lines that are not UTF-8 arrive unchanged.

use std::fs::File;
use std::io::{BufRead, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use headwater_queue::limits::PAYLOAD_BYTES_MAX;
use serde_json::{Map, Value, json};

use crate::api::PayloadDto;
use crate::cli::ConnectionArgs;
use crate::cli::api_client::{ApiClient, escape};
use crate::cli::output;
use crate::cli::progress;
use crate::cli::units::{milliseconds, show_milliseconds, show_size, time};
use crate::exit::CliError;
use crate::text::counted;

/// Maximum messages in one call.
const BATCH: usize = 500;
/// Maximum bytes in one call, below the body limit of a server.
const BATCH_BYTES: usize = 384 * 1024;
/// Maximum bytes of a payload file: those of a message.
const FILE_BYTES_MAX: u64 = PAYLOAD_BYTES_MAX as u64;

/// Send messages.
#[derive(Debug, clap::Args)]
pub(crate) struct ProduceArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    /// Name of the topic.
    topic: String,
    /// Key that determines partition and order.
    #[arg(long)]
    key: Option<String>,
    /// Header `name=value`; repeatable.
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
    headers: Vec<(String, String)>,
    /// Payload; `-`, the default, sends one message per line of standard input.
    #[arg(long, allow_hyphen_values = true, value_name = "TEXT")]
    payload: Option<String>,
    /// Send the bytes of this file as one message; `-` is standard input.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["payload", "payload_base64"])]
    payload_file: Option<PathBuf>,
    /// Send these bytes, in base64, as one message.
    #[arg(long, value_name = "BASE64", conflicts_with = "payload")]
    payload_base64: Option<String>,
    /// Delay until delivery, such as 5s.
    #[arg(long, value_name = "TIME", value_parser = time)]
    delay: Option<Duration>,
    /// Target partition; by default the key determines it.
    #[arg(long)]
    partition: Option<u16>,
    /// How partitions are chosen; default: hash. `round-robin` and `random` ignore the key and keep no order.
    #[arg(long, value_name = "NAME", value_parser = ["hash", "round-robin", "random", "consistent"])]
    partitioner: Option<String>,
    /// Idempotency id: sent again within ten minutes, the message is stored once.
    #[arg(long)]
    id: Option<String>,
    /// Create the topic if it does not exist, with one partition and no settings.
    #[arg(long)]
    create: bool,
}

fn header(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

impl ProduceArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        if let Some(payload) = self.one_payload()? {
            return self.send(client, vec![self.message(payload)]).await;
        }
        if self.id.is_some() {
            return Err(CliError::usage(
                "--id needs one message: --payload, --payload-file or --payload-base64",
            ));
        }
        // On a terminal, the printed ids show the progress.
        let progress = (!std::io::stdout().is_terminal()).then(|| progress::start("sent", None));
        let (mut batch, mut bytes, mut sent) = (Vec::new(), 0, 0);
        for line in std::io::stdin().lock().split(b'\n') {
            let mut line = line.map_err(|error| {
                CliError::new(format!(
                    "cannot read standard input: {error}. {sent} lines were sent"
                ))
            })?;
            if line.last() == Some(&b'\r') {
                line.pop();
            }
            bytes += line.len();
            batch.push(self.message(PayloadDto::from_bytes(&line)));
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

    /// The payload, if the arguments give exactly one.
    fn one_payload(&self) -> Result<Option<PayloadDto>, CliError> {
        if let Some(file) = &self.payload_file {
            return Ok(Some(PayloadDto::from_bytes(&read_file(file)?)));
        }
        if let Some(base64) = &self.payload_base64 {
            let payload = PayloadDto { payload: None, payload_base64: Some(base64.clone()) };
            let bytes = payload.into_bytes();
            let bytes = bytes.map_err(|error| {
                CliError::usage(format!("invalid --payload-base64: {}", error.message()))
            })?;
            return Ok(Some(PayloadDto::from_bytes(&bytes)));
        }
        let text = self.payload.as_deref().filter(|text| *text != "-");
        Ok(text.map(|text| PayloadDto::from_bytes(text.as_bytes())))
    }

    /// Sends a batch. If the connection is lost, it may or may not have been stored.
    async fn send_next(
        &self,
        client: &ApiClient,
        messages: Vec<Value>,
        sent: u64,
    ) -> Result<(), CliError> {
        let count = messages.len();
        let before = |problem: String| match sent {
            0 => problem,
            sent => format!("{problem}. {} sent before", counted(sent, "line was", "lines were")),
        };
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

    fn message(&self, payload: PayloadDto) -> Value {
        let headers: Map<String, Value> =
            self.headers.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
        json!({
            "key": self.key,
            "payload": payload.payload,
            "payload_base64": payload.payload_base64,
            "headers": headers,
            "partition": self.partition,
            "id": self.id,
            "delay_ms": self.delay.map(milliseconds),
        })
    }

    async fn send(&self, client: &ApiClient, messages: Vec<Value>) -> Result<(), CliError> {
        let path = format!("/topics/{}/messages", escape(&self.topic));
        let mut request = json!({"messages": messages, "create": self.create});
        if let Some(partitioner) = &self.partitioner {
            request["partitioner"] = json!(partitioner);
        }
        let answer = client.post(&path, request).await?;
        let mut failed = None;
        for sent in answer["messages"].as_array().into_iter().flatten() {
            failed = failed.or_else(|| sent["error"].as_str().map(str::to_owned));
            let partition = &sent["partition"];
            let sentence = match (&sent["id"], &sent["delayed_id"], &sent["duplicate"]) {
                (Value::String(id), _, Value::Bool(true)) => {
                    format!("{id} in partition {partition} was sent before")
                }
                (Value::String(id), ..) => format!("sent {id} to partition {partition}"),
                (_, Value::String(id), _) => {
                    let delay = show_milliseconds(self.delay.map_or(0, milliseconds));
                    format!("scheduled message {id} for partition {partition} in {delay}")
                }
                _ => "not sent".to_owned(),
            };
            output::changed(self.connection.style(), sent, sentence)?;
        }
        match failed {
            None => Ok(()),
            Some(problem) => Err(CliError::new(format!("not all messages were sent: {problem}"))),
        }
    }
}

/// The bytes of a file, or of standard input for `-`.
fn read_file(file: &Path) -> Result<Vec<u8>, CliError> {
    let name = file.display();
    let failed = |error: std::io::Error| CliError::usage(format!("cannot read `{name}`: {error}"));
    let mut bytes = Vec::new();
    let mut reader: Box<dyn Read> = match file == Path::new("-") {
        true => Box::new(std::io::stdin().lock()),
        false => Box::new(File::open(file).map_err(failed)?),
    };
    reader.by_ref().take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        let limit = show_size(FILE_BYTES_MAX);
        return Err(CliError::usage(format!(
            "`{name}` is larger than {limit}, the maximum of a message; store it elsewhere and send its location"
        )));
    }
    Ok(bytes)
}
