//! The `headwater` binary: starts the async runtime and calls `headwater::main`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("headwater: failed to start the async runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(headwater::main());
    // Do not wait for blocked threads: `run` has already applied its shutdown deadlines.
    runtime.shutdown_background();
    code
}
