//! Set-up, tests, demo and benchmarks: everything a contributor types after `cargo xtask`.
//!
//! `command` turns the arguments into a validated command, this file hands it to the module of the
//! same name, and `cargo` starts the inner cargo. Guarantees: a failing step stops the run with its
//! own exit code and one message. Not here: dependencies. This crate has none, so that the first
//! command on a new machine starts within seconds.

mod bench;
mod cargo;
mod chaos;
mod checkout;
mod command;
mod demo;
mod duckdb;
mod exit;
mod lines;
mod npm_files;
mod python_client;
mod redis_versions;
mod screenshots;
mod setup;
mod test;
mod tidy;

use std::process::ExitCode;

use command::XtaskCommand;
use exit::ExitError;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(failure.code)
        }
    }
}

fn run() -> Result<(), ExitError> {
    match XtaskCommand::parse(std::env::args().skip(1))? {
        XtaskCommand::Help => {
            print!("{}", command::HELP);
            Ok(())
        }
        XtaskCommand::Setup => setup::everything(),
        XtaskCommand::Test { nextest_arguments } => test::run(&nextest_arguments),
        XtaskCommand::Tidy => tidy::run(),
        XtaskCommand::Lines => lines::run(),
        XtaskCommand::Demo { analytics, arguments } => demo::run(analytics, &arguments),
        XtaskCommand::Bench { arguments } => bench::run(&arguments),
        XtaskCommand::BenchConsole { quick, only } => bench::console(quick, only.as_deref()),
        XtaskCommand::Chaos { minutes } => chaos::run(minutes),
        XtaskCommand::Screenshots => screenshots::run(),
    }
}
