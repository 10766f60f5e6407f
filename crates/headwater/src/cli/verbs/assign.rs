//! `headwater assign`: adds streams to a service, shows and releases them, and works on them with a command.
//!
//! Upstream: `cli/mod.rs`. Downstream: `api/assignment.rs`; `run.rs` for `run`, which is a consumer in this process.

mod run;

use std::time::Duration;

use clap::Subcommand;
use serde_json::{Value, json};

use crate::cli::api_client::{ApiClient, escape};
use crate::cli::output::{self, OutputRows};
use crate::cli::units::{limit, time};
use crate::cli::{ConfirmArgs, ConnectionArgs};
use crate::exit::CliError;

/// Assign whole streams to one consumer each.
#[derive(Debug, clap::Args)]
pub(crate) struct AssignArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: AssignCommand,
}

#[derive(Debug, Subcommand)]
enum AssignCommand {
    /// Add a stream to a service; a consumer with free capacity acquires it.
    Add {
        /// Name of the service.
        service: String,
        /// Name of the stream.
        stream: String,
        /// JSON for the owner.
        #[arg(long, value_name = "JSON", value_parser = info)]
        info: Option<Value>,
    },
    /// List the streams of a service with their owners. Streams that are done are not listed.
    List {
        /// Name of the service.
        service: String,
        /// Maximum number of streams.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
    /// Describe a service, or one of its streams.
    Describe {
        /// Name of the service.
        service: String,
        /// Name of one of its streams.
        stream: Option<String>,
    },
    /// Take a stream from its owner, alive or dead; another consumer acquires it as new.
    Release {
        /// Name of the service.
        service: String,
        /// Name of the stream.
        stream: String,
        #[command(flatten)]
        confirm: ConfirmArgs,
    },
    /// Own streams and run a command for each.
    Run(AssignRunArgs),
}

/// Own streams and run a command for each.
#[derive(Clone, Debug, clap::Args)]
struct AssignRunArgs {
    /// Name of the service.
    service: String,
    /// Shell command to run for each stream that this process owns. Its standard input is the `Info` of the stream, its
    /// environment has HEADWATER_SERVICE, HEADWATER_STREAM, HEADWATER_INFO (up to 64 KiB), HEADWATER_EPOCH and
    /// HEADWATER_OWNERS. Exit code 0 completes the stream; any other releases it after a pause. The command is killed
    /// if the stream is lost or this process is killed.
    #[arg(long, value_name = "COMMAND")]
    exec: String,
    /// Maximum number of streams this process owns at a time, each with its own command.
    #[arg(long, value_name = "N", default_value_t = 100)]
    streams_max: usize,
    /// Heartbeat interval; a dead owner is replaced after two of them. Use the same for all consumers of a service.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time)]
    heartbeat: Duration,
    /// Name of this consumer in leases and lists; default: `worker:HOST:PID`.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
}

fn info(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("expected JSON: {error}"))
}

impl AssignArgs {
    pub(crate) fn is_read_only(&self) -> bool {
        matches!(self.command, AssignCommand::List { .. } | AssignCommand::Describe { .. })
    }

    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match &self.command {
            AssignCommand::Add { service, stream, info } => {
                let request = json!({ "stream": stream, "info": info });
                output::object(style, &client.post(&streams(service), request).await?)
            }
            AssignCommand::List { service, limit } => {
                let columns = &[
                    ("STREAM", "/stream"),
                    ("STATE", "/state"),
                    ("HOLDER", "/holder"),
                    ("EPOCH", "/epoch"),
                    ("OWNERS", "/owners"),
                    ("REMAINING MS", "/remaining_ms"),
                ];
                let rows = OutputRows::new(style, columns);
                client.show_pages(rows, &streams(service), &[], "streams", *limit).await
            }
            AssignCommand::Describe { service, stream: None } => {
                let path = format!("/assignments/{}", escape(service));
                output::object(style, &client.get(&path, &[]).await?)
            }
            AssignCommand::Describe { service, stream: Some(stream) } => {
                output::object(style, &client.get(&path(service, stream), &[]).await?)
            }
            AssignCommand::Release { service, stream, confirm } => {
                confirm.ask(&format!(
                    "Take stream `{stream}` of service `{service}` from its owner? Its work since the last effect is lost."
                ))?;
                let path = format!("{}/release", path(service, stream));
                output::object(style, &client.post(&path, json!({})).await?)
            }
            AssignCommand::Run(args) => match client {
                ApiClient::InProcess(api) => run::run(args, api.queue().backend()).await,
                ApiClient::Network { .. } => Err(CliError::usage(
                    "`assign run` needs a connection to the streams: leave out --url and set --stream-url",
                )),
            },
        }
    }
}

fn streams(service: &str) -> String {
    format!("/assignments/{}/streams", escape(service))
}

fn path(service: &str, stream: &str) -> String {
    format!("{}/{}", streams(service), escape(stream))
}
