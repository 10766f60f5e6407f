//! `headwater consume`: acknowledges a message after printing it, or after its command succeeded.
//!
//! Upstream: `cli/mod.rs`. Downstream: `member.rs` without a server, `pull.rs` with `--url`;
//! `consume_exec.rs` runs commands. Guarantees: a message that was not printed is not acknowledged; a failed command is
//! a failed attempt, which is retried and finally becomes a dead letter; on exit, messages whose command did not end
//! are released without counting an attempt.

mod member;
mod pull;

use std::time::Duration;

use serde_json::Value;

use crate::cli::api_client::ApiClient;
use crate::cli::consume_exec::execute;
use crate::cli::units::{at_least_one, time};
use crate::cli::{ConnectionArgs, output};
use crate::exit::CliError;

/// How long shutdown waits for running commands.
const DRAIN: Duration = Duration::from_secs(25);
/// Maximum concurrent commands.
const CONCURRENCY_MAX: u64 = 1000;

/// Consume messages as a member of a group.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ConsumeArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    /// Name of the topic.
    topic: String,
    /// Name of the group; it is created if it does not exist.
    #[arg(long)]
    group: String,
    /// Exit after this many messages.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
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
    /// `owned`: each partition has one consumer and is processed in order; the default without --url. `shared`:
    /// consumers compete for messages; the only mode with --url.
    #[arg(long, value_enum)]
    mode: Option<ConsumeMode>,
    /// Commands that run concurrently; with `owned`, of each partition.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=CONCURRENCY_MAX))]
    concurrency: u64,
}

/// How a group shares partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ConsumeMode {
    /// Each partition has one consumer and is processed in order.
    Owned,
    /// Consumers compete for messages.
    Shared,
}

/// How a message was handled.
#[derive(Debug)]
enum HandledMessage {
    /// Printed, or its command succeeded.
    Done,
    /// Its command failed, for this reason.
    Failed(String),
    /// Standard output failed.
    NotPrinted(CliError),
}

/// Says that a topic will exist with its first message.
fn note_unknown(topic: &str) {
    output::note(&format!("topic `{topic}` does not exist yet; waiting for its first message"));
}

impl ConsumeArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        match (client, self.mode) {
            (ApiClient::Network { .. }, Some(ConsumeMode::Owned)) => Err(CliError::usage(
                "`--mode owned` needs a connection to the streams: leave out --url, or consume with `--mode shared`",
            )),
            (ApiClient::Network { .. }, _) => pull::run(self, client).await,
            (ApiClient::InProcess(api), mode) => {
                member::run(self, api.queue(), mode.unwrap_or(ConsumeMode::Owned)).await
            }
        }
    }

    /// Prints a message, or runs its command. Dropping the future kills the command.
    async fn handle(&self, message: &Value, attempts_max: u64) -> HandledMessage {
        let Some(command) = &self.exec else {
            let printed = output::message(self.connection.style(), message);
            return printed.map_or_else(HandledMessage::NotPrinted, |()| HandledMessage::Done);
        };
        let Err(reason) = execute(command, message).await else { return HandledMessage::Done };
        let id = message["id"].as_str().unwrap_or_default();
        let what = match message["attempt"].as_u64() >= Some(attempts_max) {
            true => "failed its last attempt and becomes a dead letter",
            false => "failed and will be retried",
        };
        output::note(&format!("message {id} {what}: {}", output::plain(&reason)));
        HandledMessage::Failed(reason)
    }
}
