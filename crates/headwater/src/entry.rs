//! One function per verb: from the command line to the exit code.
//!
//! Upstream: `main`. Downstream: `settings`, then `run`. Promises: whatever goes wrong ends in one sentence on standard
//! error and the exit code that `Failure` gives it.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use futures_util::future::LocalBoxFuture;
use headwater_issue::IssueHandler;

use crate::cli::args::{self, CommandLine, Config, Parsed, Serve, Verb};
use crate::cli::supervise;
use crate::config::{self, FILE, FILE_VARIABLE, Given, Loaded, Secrets, SettingsError};
use crate::exit::Failure;
use crate::http_client;
use crate::server::demo::{Demo, Then};
use crate::server::run::{self, Role};
use crate::telemetry;
use crate::text::printable;

/// Runs the command line of this process, with the desk as handler.
pub async fn main() -> ExitCode {
    run_command_line(None).await
}

/// The same, with a handler of your own in place of the desk.
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
        Err(Failure::NobodyReads) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("headwater: {}", printable(&failure.to_string()));
            if let Failure::Usage(_) = &failure {
                eprintln!("\n{}", args::usage(&path));
            }
            failure.exit_code()
        }
    }
}

async fn dispatch(parsed: Parsed, handler: Option<Arc<dyn IssueHandler>>) -> Result<(), Failure> {
    let Parsed { line, flags, .. } = parsed;
    // In boxes: the future of a whole server holds those of all its parts, and the compiler gives up on a `main` that holds
    // it by value.
    let running: LocalBoxFuture<'_, _> = match &line.verb {
        Verb::Config(config) => return print_settings(config, &line, flags),
        Verb::Serve(options) => {
            Box::pin(serve(options, load(&line, flags, Secrets::Needed)?, handler))
        }
        Verb::Worker => {
            let loaded = load(&line, flags, Secrets::Needed)?;
            Box::pin(start(Role::Worker, loaded, handler, None))
        }
        Verb::Operator(verb) => {
            let loaded = load(&line, flags, Secrets::NotNeeded)?;
            Box::pin(async move { verb.run(&loaded.settings).await })
        }
    };
    running.await
}

async fn serve(
    options: &Serve,
    mut loaded: Loaded,
    handler: Option<Arc<dyn IssueHandler>>,
) -> Result<(), Failure> {
    if !options.demo {
        return start(Role::Serve, loaded, handler, None).await;
    }
    let then = if options.demo_exit { Then::Exit } else { Then::Serve };
    let (demo, directory) = Demo::prepare(&mut loaded, then).await?;
    let outcome = start(Role::Serve, loaded, handler, Some(demo)).await;
    // Not before everything in it is closed.
    drop(directory);
    outcome
}

async fn start(
    role: Role,
    loaded: Loaded,
    handler: Option<Arc<dyn IssueHandler>>,
    demo: Option<Demo>,
) -> Result<(), Failure> {
    http_client::choose_tls();
    let telemetry = telemetry::begin(&loaded.settings.telemetry)?;
    let running: LocalBoxFuture<'_, _> =
        Box::pin(run::run(role, loaded.settings, handler, demo, &telemetry));
    let outcome = running.await;
    telemetry.end().await;
    outcome
}

fn print_settings(
    config: &Config,
    line: &CommandLine,
    flags: Vec<(&'static str, String)>,
) -> Result<(), Failure> {
    let text = if config.markdown {
        config::as_markdown()
    } else {
        let loaded = load(line, flags, Secrets::NotNeeded)?;
        if config.json { config::as_json(&loaded) + "\n" } else { config::as_text(&loaded) }
    };
    // A reader that went away, such as `head`, is no failure.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

/// What was said on the command line, in the environment and in the file, as checked settings.
fn load(
    line: &CommandLine,
    flags: Vec<(&'static str, String)>,
    secrets: Secrets,
) -> Result<Loaded, Failure> {
    let lossy = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
    let environment: Vec<_> =
        std::env::vars_os().map(|(name, value)| (lossy(name), lossy(value))).collect();
    let named = environment.iter().find(|(name, _)| name == FILE_VARIABLE);
    let named = line.settings.clone().or_else(|| named.map(|(_, path)| PathBuf::from(path)));
    let path = named.clone().unwrap_or_else(|| PathBuf::from(FILE));
    let file = match std::fs::read_to_string(&path) {
        Ok(text) => Some((path, text)),
        // Only a file that somebody asked for must be there.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && named.is_none() => None,
        Err(error) => {
            let path = path.display();
            return Err(SettingsError::new(format!(
                "the settings file {path} cannot be read: {error}"
            ))
            .into());
        }
    };
    Ok(config::load(&Given { flags, environment, file }, secrets)?)
}
