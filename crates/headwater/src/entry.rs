//! Runs the command line: one function per command, from the arguments to the exit code.
//!
//! Upstream: `main.rs`. Downstream: `config` reads the settings, then `server/run.rs` or `cli` does the work.
//! Guarantees: every error is printed as one sentence on standard error and ends with the exit code of its
//! [`CliError`].

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use futures_util::future::LocalBoxFuture;
use headwater_issue::IssueHandler;

use crate::cli::args::{
    self, CommandLine, ConfigArgs, HeadwaterCommand, ParsedCommandLine, ServeArgs,
};
use crate::cli::supervise;
use crate::config::{
    self, FILE, FILE_VARIABLE, RawSettings, ResolvedSettings, SecretsPolicy, SettingsError,
};
use crate::exit::CliError;
use crate::http_client;
use crate::server::demo::{AfterDemo, Demo};
use crate::server::run::{self, ProcessRole};
use crate::telemetry;
use crate::text::printable;

/// Runs the command line of this process with the desk as handler.
pub async fn main() -> ExitCode {
    run_command_line(None).await
}

/// Runs the command line of this process with `handler` instead of the desk.
pub async fn main_with(handler: impl IssueHandler) -> ExitCode {
    run_command_line(Some(Arc::new(handler))).await
}

async fn run_command_line(handler: Option<Arc<dyn IssueHandler>>) -> ExitCode {
    if let Some(code) = supervise::run(std::env::args_os()) {
        return code;
    }
    let parsed = match args::parse(std::env::args_os()) {
        Ok(parsed) => parsed,
        Err(error) => {
            // Help goes to standard output with code 0, wrong usage to standard error with code 2.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let path = parsed.path.clone();
    match dispatch(parsed, handler).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(CliError::BrokenPipe) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("headwater: {}", printable(&failure.to_string()));
            if let CliError::Usage(_) = &failure {
                eprintln!("\n{}", args::usage(&path));
            }
            failure.exit_code()
        }
    }
}

async fn dispatch(
    parsed: ParsedCommandLine,
    handler: Option<Arc<dyn IssueHandler>>,
) -> Result<(), CliError> {
    let ParsedCommandLine { line, flags, .. } = parsed;
    // Boxed: the future of the server is too large for the compiler to hold by value.
    let running: LocalBoxFuture<'_, _> = match &line.verb {
        HeadwaterCommand::Config(config) => return print_settings(config, &line, flags),
        HeadwaterCommand::Serve(options) => {
            Box::pin(serve(options, load(&line, flags, SecretsPolicy::Required)?, handler))
        }
        HeadwaterCommand::Worker => {
            let loaded = load(&line, flags, SecretsPolicy::Required)?;
            Box::pin(start(ProcessRole::Worker, loaded, handler, None))
        }
        HeadwaterCommand::Operator(verb) => {
            let loaded = load(&line, flags, SecretsPolicy::Optional)?;
            Box::pin(async move { verb.run(&loaded.settings).await })
        }
    };
    running.await
}

async fn serve(
    options: &ServeArgs,
    mut loaded: ResolvedSettings,
    handler: Option<Arc<dyn IssueHandler>>,
) -> Result<(), CliError> {
    if !options.demo {
        return start(ProcessRole::Serve, loaded, handler, None).await;
    }
    let then = if options.demo_exit { AfterDemo::Exit } else { AfterDemo::Serve };
    let (demo, directory) = Demo::prepare(&mut loaded, then).await?;
    let outcome = start(ProcessRole::Serve, loaded, handler, Some(demo)).await;
    // The server has stopped, so no file in the directory is open.
    drop(directory);
    outcome
}

async fn start(
    role: ProcessRole,
    loaded: ResolvedSettings,
    handler: Option<Arc<dyn IssueHandler>>,
    demo: Option<Demo>,
) -> Result<(), CliError> {
    http_client::install_tls_provider();
    let telemetry = telemetry::init(&loaded.settings.telemetry)?;
    let running: LocalBoxFuture<'_, _> =
        Box::pin(run::run(role, loaded.settings, handler, demo, &telemetry));
    let outcome = running.await;
    telemetry.flush().await;
    outcome
}

fn print_settings(
    config: &ConfigArgs,
    line: &CommandLine,
    flags: Vec<(&'static str, String)>,
) -> Result<(), CliError> {
    let text = if config.markdown {
        config::as_markdown()
    } else {
        let loaded = load(line, flags, SecretsPolicy::Optional)?;
        if config.json { config::as_json(&loaded) + "\n" } else { config::as_text(&loaded) }
    };
    // A closed pipe, as with `head`, is not an error.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

/// Resolves and checks the settings from flags, environment and file.
fn load(
    line: &CommandLine,
    flags: Vec<(&'static str, String)>,
    secrets: SecretsPolicy,
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
    Ok(config::load(&RawSettings { flags, environment, file }, secrets)?)
}
