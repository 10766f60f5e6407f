//! `headwater`, the binary: thin, everything is in the library beside it.

use std::process::ExitCode;

fn main() -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("headwater: no threads to run on: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(headwater::main());
    // What holds a thread by now was waited for long enough.
    runtime.shutdown_background();
    code
}
