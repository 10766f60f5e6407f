//! Runs the command line: one function per command, from the arguments to the exit code.
//!
//! Upstream: `main.rs`. Downstream: `config` reads the settings, then `server/run.rs` or `cli` does the work.
//! Guarantees: every error is printed on standard error (`cli/advice.rs`) and ends with the exit code of its
//! [`CliError`].

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use futures_util::future::LocalBoxFuture;
use headwater_issue::IssueHandler;
use rustix::fs::Mode;

use crate::cli::args::{
    self, CommandLine, ConfigArgs, HeadwaterCommand, ParsedCommandLine, ServeArgs,
};
use crate::cli::{self, advice, completion, supervise};
use crate::config::{
    self, FILE, FILE_VARIABLE, RawSettings, ResolvedSettings, SecretsPolicy, SettingsError,
};
use crate::desk::{LanguageModel, Provider, Tool};
use crate::exit::CliError;
use crate::http_client;
use crate::outbound::notifications::{NotificationConfig, NotificationSink};
use crate::server::demo::{AfterDemo, Demo};
use crate::server::run::{self, ProcessRole};
use crate::telemetry;

/// The setting with which an operator command writes a log, to standard error.
const LOG_LEVEL: &str = "log.level";

/// Parts of an embedding program that `serve` and `worker` run.
#[derive(Default)]
pub struct Extensions {
    pub(crate) handler: Option<Arc<dyn IssueHandler>>,
    pub(crate) notifications: Vec<(NotificationConfig, Arc<dyn NotificationSink>)>,
    pub(crate) model: Option<Arc<dyn LanguageModel>>,
    pub(crate) routes: Option<axum::Router>,
    pub(crate) tools: Vec<Arc<dyn Tool>>,
    pub(crate) providers: Vec<Arc<dyn Provider>>,
}

impl std::fmt::Debug for Extensions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Extensions")
            .field("has_handler", &self.handler.is_some())
            .field("model", &self.model)
            .field("has_routes", &self.routes.is_some())
            .field(
                "notifications",
                &self.notifications.iter().map(|one| &one.0).collect::<Vec<_>>(),
            )
            .field("tools", &self.tools)
            .field("providers", &self.providers)
            .finish()
    }
}

impl Extensions {
    /// Handles issues with `handler` instead of the desk.
    #[must_use]
    pub fn handler(mut self, handler: impl IssueHandler) -> Self {
        self.handler = Some(Arc::new(handler));
        self
    }

    /// Answers with `model` instead of the model of `model.url`: it is the endpoint `default`, with the prices of
    /// `model.price_in` and `model.price_out`. `[[model.endpoint]]` sections are tried after it.
    #[must_use]
    pub fn model(mut self, model: impl LanguageModel + 'static) -> Self {
        self.model = Some(Arc::new(model));
        self
    }

    /// Serves these routes below `/x`, in `serve` only. Requests are authenticated, limited and audited like those of the API:
    /// reading requires the role `read`, every other method `write`. They are not in `/openapi.json`.
    #[must_use]
    pub fn routes(mut self, routes: axum::Router) -> Self {
        self.routes = Some(match self.routes.take() {
            Some(others) => others.merge(routes),
            None => routes,
        });
        self
    }

    /// Forwards ticket events to `sink`, in a group of its own. The id must differ from those of the `[[notification]]`
    /// sections and of other sinks; otherwise the server does not start.
    #[must_use]
    pub fn notify(mut self, config: NotificationConfig, sink: impl NotificationSink) -> Self {
        self.notifications.push((config, Arc::new(sink)));
        self
    }

    /// Lets the model of the desk call `tool`. Its name must differ from those of the built-in tools, the `[[tool]]` sections
    /// and other tools; otherwise the server does not start.
    #[must_use]
    pub fn tool(mut self, tool: impl Tool) -> Self {
        self.tools.push(Arc::new(tool));
        self
    }

    /// Lets `[[integration]]` sections name `provider`. Its name must be valid, and differ from `github`, `gitlab`, `standard`,
    /// `desk` and other providers; otherwise every command fails.
    #[must_use]
    pub fn provider(mut self, provider: impl Provider) -> Self {
        self.providers.push(Arc::new(provider));
        self
    }
}

/// Runs the command line of this process with the desk as handler.
pub async fn main() -> ExitCode {
    run_command_line(Extensions::default()).await
}

/// Runs the command line of this process with `handler` instead of the desk.
pub async fn main_with(handler: impl IssueHandler) -> ExitCode {
    run_command_line(Extensions::default().handler(handler)).await
}

/// Runs the command line of this process with parts of the caller.
pub async fn main_with_extensions(extensions: Extensions) -> ExitCode {
    run_command_line(extensions).await
}

async fn run_command_line(extensions: Extensions) -> ExitCode {
    if let Some(code) = supervise::run(std::env::args_os()) {
        return code;
    }
    if let Some(code) = completion::run() {
        return code;
    }
    let parsed = match args::parse(std::env::args_os()) {
        Ok(parsed) => parsed,
        Err(error) => return advice::print_parse_error(&error),
    };
    let named = parsed.named.clone();
    match dispatch(parsed, extensions).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(CliError::BrokenPipe) => ExitCode::SUCCESS,
        Err(failure) => {
            advice::print(&failure, &named);
            failure.exit_code()
        }
    }
}

async fn dispatch(parsed: ParsedCommandLine, mut extensions: Extensions) -> Result<(), CliError> {
    let ParsedCommandLine { line, flags, .. } = parsed;
    // The settings keep those that an integration names.
    let providers = std::mem::take(&mut extensions.providers);
    let load = |flags, secrets| load(&line, flags, secrets, providers.clone());
    // Boxed: the future of the server is too large for the compiler to hold by value.
    let running: LocalBoxFuture<'_, _> = match &line.verb {
        HeadwaterCommand::Config(config) => {
            return print_settings(config, || load(flags, SecretsPolicy::Optional));
        }
        HeadwaterCommand::Serve(options) => {
            Box::pin(serve(options, load(flags, SecretsPolicy::Required)?, extensions))
        }
        HeadwaterCommand::Worker => {
            let loaded = load(flags, SecretsPolicy::Required)?;
            Box::pin(start(ProcessRole::Worker, loaded, extensions, None))
        }
        HeadwaterCommand::Operator(verb) => {
            // Only on request: a level in the settings file is meant for servers.
            let has_level = flags.iter().any(|(name, _)| *name == LOG_LEVEL);
            let loaded = load(flags, SecretsPolicy::Optional)?;
            if has_level {
                telemetry::init_logs(&loaded.settings.telemetry)?;
            }
            Box::pin(async move { verb.run(&loaded.settings).await })
        }
    };
    running.await
}

async fn serve(
    options: &ServeArgs,
    mut loaded: ResolvedSettings,
    extensions: Extensions,
) -> Result<(), CliError> {
    if !options.demo {
        return start(ProcessRole::Serve, loaded, extensions, None).await;
    }
    let then = if options.demo_exit { AfterDemo::Exit } else { AfterDemo::Serve };
    let (demo, directory) = Demo::prepare(&mut loaded, then).await?;
    let outcome = start(ProcessRole::Serve, loaded, extensions, Some(demo)).await;
    // The server has stopped, so no file in the directory is open.
    drop(directory);
    outcome
}

async fn start(
    role: ProcessRole,
    loaded: ResolvedSettings,
    extensions: Extensions,
    demo: Option<Demo>,
) -> Result<(), CliError> {
    // Also for files that libraries create, such as the write-ahead log of DuckDB.
    rustix::process::umask(Mode::from_raw_mode(0o077));
    http_client::install_tls_provider();
    let telemetry = telemetry::init(&loaded.settings.telemetry)?;
    let running: LocalBoxFuture<'_, _> =
        Box::pin(run::run(role, loaded.settings, extensions, demo, &telemetry));
    let outcome = running.await;
    telemetry.flush().await;
    outcome
}

fn print_settings(
    config: &ConfigArgs,
    load: impl FnOnce() -> Result<ResolvedSettings, CliError>,
) -> Result<(), CliError> {
    let text = if config.markdown {
        config::as_markdown()
    } else {
        let loaded = load()?;
        if config.json { config::as_json(&loaded) + "\n" } else { config::as_text(&loaded) }
    };
    cli::print(text.trim_end())
}

/// Resolves and checks the settings from flags, environment and file.
fn load(
    line: &CommandLine,
    flags: Vec<(&'static str, String)>,
    secrets: SecretsPolicy,
    providers: Vec<Arc<dyn Provider>>,
) -> Result<ResolvedSettings, CliError> {
    let lossy = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
    let environment: Vec<_> =
        std::env::vars_os().map(|(name, value)| (lossy(name), lossy(value))).collect();
    let named = environment.iter().find(|(name, _)| name == FILE_VARIABLE);
    let named = line.settings.clone().or_else(|| named.map(|(_, path)| PathBuf::from(path)));
    let path = named.clone().unwrap_or_else(|| PathBuf::from(FILE));
    let file = match std::fs::read_to_string(&path) {
        Ok(text) => Some((path, text)),
        // The default file may be missing; a file named explicitly may not.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && named.is_none() => None,
        Err(error) => {
            let path = path.display();
            return Err(
                SettingsError::new(format!("cannot read settings file `{path}`: {error}")).into()
            );
        }
    };
    Ok(config::load(&RawSettings { flags, environment, file, providers }, secrets)?)
}
