//! `headwater loop`: requests and replies over the control stream of the bus, with a command as the handler.
//!
//! Upstream: `cli/mod.rs`. Downstream: the main loop of `headwater-bus`; `consume_exec.rs` runs the commands.
//! Guarantees: a request is executed by one worker of its namespace and has one reply, whatever dies; a command is killed
//! when its request is cancelled, its deadline passes, or this process is killed.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use clap::Subcommand;
use headwater_bus::{
    CompletedRequest, EventBus, EventRegistry, ExecuteError, Folds, MainLoop, MainLoopClient,
    MainLoopClientConfig, MainLoopConfig, MainLoopError, MainLoopWorker, Namespace, RequestContext,
    RequestId, Requester, Session, Sessions, SessionsConfig, StreamedBus, StreamedBusConfig,
    Submission,
};
use headwater_stream::{Backend, Backoff};
use serde_json::{Value, json};

use crate::cli::api_client::ApiClient;
use crate::cli::consume_exec::{CommandOutput, run_command};
use crate::cli::units::time;
use crate::cli::{ConnectionArgs, output};
use crate::config::BusSettings;
use crate::desk::build;
use crate::exit::CliError;
use crate::server::shutdown_signal::ShutdownSignal;

/// Maximum bytes of the output of a command, as of an output of the main loop.
const OUTPUT_BYTES_MAX: usize = 1024 * 1024;
/// Longest delay between two attempts of a request.
const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// Maximum bytes of a request read from standard input.
const REQUEST_BYTES_MAX: u64 = 1024 * 1024;

/// Send requests to workers, and execute them.
#[derive(Debug, clap::Args)]
pub(crate) struct MainLoopArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: MainLoopCommand,
}

#[derive(Debug, Subcommand)]
enum MainLoopCommand {
    /// Execute the requests of a namespace with a command, until a signal is received.
    Worker {
        /// Namespace of the requests.
        namespace: String,
        /// Shell command to run for each request. Its standard input is the request as JSON, its standard output the
        /// reply as JSON; its environment has HEADWATER_NAMESPACE, HEADWATER_REQUEST_ID and HEADWATER_ATTEMPT. Exit code
        /// 0 completes the request, any other retries it, up to `bus.request_attempts` (3).
        #[arg(long, value_name = "COMMAND")]
        exec: String,
        /// Commands that run concurrently.
        #[arg(long, value_name = "N", default_value_t = 16)]
        concurrency: usize,
    },
    /// Send a request and print its reply.
    Submit {
        /// Namespace of the request.
        namespace: String,
        /// The request as JSON; `-` reads it from standard input.
        #[arg(long, value_name = "JSON", default_value = "-", allow_hyphen_values = true)]
        request: String,
        /// Request id: sent again, the request is executed once and has the same reply.
        #[arg(long, value_name = "ID")]
        id: Option<String>,
        /// How long to wait for the reply. The request ends at the same time.
        #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
        timeout: Duration,
    },
}

impl MainLoopArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let ApiClient::InProcess(api) = client else {
            return Err(CliError::usage(
                "`loop` needs a connection to the streams: leave out --url and set --stream-url",
            ));
        };
        let (backend, settings) = (api.queue().backend(), &api.bus_settings);
        match &self.command {
            MainLoopCommand::Worker { namespace, exec, concurrency } => {
                let main_loop = CommandLoop { namespace: namespace.clone(), command: exec.clone() };
                let config = MainLoopConfig {
                    concurrency: *concurrency,
                    max_attempts: settings.request_attempts,
                    backoff: Backoff::doubling(settings.retry_backoff, BACKOFF_MAX),
                    ..MainLoopConfig::default()
                };
                let bus = open(backend, settings, namespace).await?;
                let ended = work(&bus, main_loop, config).await;
                build::close(bus).await;
                ended
            }
            MainLoopCommand::Submit { namespace, request, id, timeout } => {
                let request = parse(request)?;
                let bus = open(backend, settings, namespace).await?;
                let reply = submit(&bus, request, id.as_deref(), *timeout).await;
                build::close(bus).await;
                let reply = reply?;
                match self.connection.json {
                    false => output::json(self.connection.style(), &reply.output),
                    true => {
                        let request_id = reply.request_id.to_string();
                        let session = reply.session.map(|session| session.to_string());
                        let output = reply.output;
                        let reply = json!({ "request_id": request_id, "session": session, "output": output });
                        output::json(self.connection.style(), &reply)
                    }
                }
            }
        }
    }
}

fn parse(request: &str) -> Result<Value, CliError> {
    let mut text = request.to_owned();
    if request == "-" {
        text.clear();
        let read = std::io::stdin().take(REQUEST_BYTES_MAX + 1).read_to_string(&mut text);
        read.map_err(|error| CliError::new(format!("cannot read standard input: {error}")))?;
    }
    serde_json::from_str(&text)
        .map_err(|error| CliError::usage(format!("the request is not JSON: {error}")))
}

async fn open(
    backend: &Arc<dyn Backend>,
    settings: &BusSettings,
    namespace: &str,
) -> Result<Arc<StreamedBus>, CliError> {
    let namespace =
        Namespace::new(namespace).map_err(|error| CliError::usage(error.to_string()))?;
    let config = StreamedBusConfig { namespace, ..settings.config() };
    let bus = StreamedBus::open(Arc::clone(backend), EventRegistry::builtin(), config).await;
    bus.map(Arc::new).map_err(|error| CliError::new(error.to_string()))
}

async fn work(
    bus: &Arc<StreamedBus>,
    main_loop: CommandLoop,
    config: MainLoopConfig,
) -> Result<(), CliError> {
    let failed = |error: &dyn std::fmt::Display| CliError::new(error.to_string());
    let shutdown = ShutdownSignal::default();
    shutdown.on_signals().map_err(|error| failed(&error))?;
    let namespace = main_loop.namespace.clone();
    let bus = Arc::clone(bus) as Arc<dyn EventBus>;
    let sessions = Sessions::new(bus, Folds::none(), SessionsConfig::default()).await;
    let sessions = sessions.map_err(|error| failed(&error))?;
    let worker = MainLoopWorker::start(sessions, main_loop, config).await;
    let worker = worker.map_err(|error| failed(&error))?;
    output::note(&format!("waiting for requests of namespace `{namespace}`"));
    shutdown.wait().await;
    worker.stop().await.map_err(|error| failed(&error))
}

async fn submit(
    bus: &Arc<StreamedBus>,
    request: Value,
    id: Option<&str>,
    timeout: Duration,
) -> Result<CompletedRequest<Value>, CliError> {
    let usage = |error: &dyn std::fmt::Display| CliError::usage(error.to_string());
    // A name of its own: the reply is for this process.
    let requester = Requester::new(format!("cli-{}", headwater_stream::start_id()));
    let requester = requester.map_err(|error| usage(&error))?;
    let mut submission = Submission::new(request).within(timeout).timeout(timeout);
    if let Some(id) = id {
        submission = submission.id(RequestId::new(id).map_err(|error| usage(&error))?);
    }
    let bus = Arc::clone(bus) as Arc<dyn EventBus>;
    let asking = async {
        let client = MainLoopClient::open(bus, requester, MainLoopClientConfig::default()).await?;
        client.submit::<_, Value>(submission).await
    };
    asking.await.map_err(|error: MainLoopError| match error.is_transient() {
        true => CliError::Unreachable(error.to_string()),
        false => CliError::new(error.to_string()),
    })
}

/// Executes requests with a command.
struct CommandLoop {
    namespace: String,
    command: String,
}

#[async_trait]
impl MainLoop for CommandLoop {
    type Request = Value;
    type Output = Value;

    async fn execute(
        &self,
        request: Value,
        _session: &Session,
        context: &RequestContext,
    ) -> Result<Value, ExecuteError> {
        let variables = [
            ("HEADWATER_NAMESPACE", self.namespace.clone()),
            ("HEADWATER_REQUEST_ID", context.request_id().to_string()),
            ("HEADWATER_ATTEMPT", context.attempt().to_string()),
        ];
        let input = request.to_string();
        let output = CommandOutput::Capture { bytes_max: OUTPUT_BYTES_MAX };
        let printed = run_command(&self.command, &variables, input.as_bytes(), output).await;
        let printed = printed.map_err(ExecuteError::retry)?;
        if printed.trim_ascii().is_empty() {
            return Ok(Value::Null);
        }
        // The same command would print the same again.
        serde_json::from_slice(&printed).map_err(|error| {
            ExecuteError::give_up(format!("`{}` did not print JSON: {error}", self.command))
        })
    }
}
