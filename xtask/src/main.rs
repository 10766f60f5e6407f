//! Set-up, tests, demo and benchmarks: everything a contributor types after `cargo xtask`.
//!
//! `command` turns the arguments into a validated command, this file hands it to the module of the
//! same name, and `cargo` starts the inner cargo. Promises: a failing step stops the run with its
//! own exit code and one sentence. Not here: dependencies. This crate has none, so that the first
//! command on a new machine starts within seconds.

mod bench;
mod cargo;
mod chaos;
mod command;
mod demo;
mod duckdb;
mod failure;
mod setup;
mod test;
mod tidy;

use std::process::ExitCode;

use command::Command;
use failure::Failure;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(failure.code)
        }
    }
}

fn run() -> Result<(), Failure> {
    match Command::parse(std::env::args().skip(1))? {
        Command::Help => {
            print!("{}", command::HELP);
            Ok(())
        }
        Command::Setup => setup::everything(),
        Command::Test { nextest_arguments } => test::run(&nextest_arguments),
        Command::Tidy => tidy::run(),
        Command::Demo { arguments } => demo::run(&arguments),
        Command::Bench { arguments } => bench::run(&arguments),
        Command::Chaos { minutes } => chaos::run(minutes),
    }
}
