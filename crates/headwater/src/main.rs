//! `headwater`, the binary: thin, everything is in the library beside it.

use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    headwater::main().await
}
