//! `headwater`, the binary: thin, it picks the command and reports what went wrong.
//!
//! Not here yet: the server, the desk and the operator's commands; see CHANGELOG.md for what works.

mod demo;

use std::process::ExitCode;

const USAGE: &str = "\
usage: headwater COMMAND

commands:
  demo    show an embedded stream at work: append, read, settle, crash and go on
";

#[tokio::main]
async fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("demo") => match demo::run().await {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("headwater: {error:#}");
                ExitCode::FAILURE
            }
        },
        Some("help" | "--help" | "-h") => {
            print!("{USAGE}");
            ExitCode::SUCCESS
        }
        unknown => {
            if let Some(unknown) = unknown {
                eprintln!("headwater: there is no command `{unknown}`\n");
            }
            eprint!("{USAGE}");
            ExitCode::from(2)
        }
    }
}
