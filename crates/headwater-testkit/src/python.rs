//! Python with the client library for Redis that `cargo xtask setup` downloads (`xtask/src/python_client.rs`).

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::npm_files;

/// The folder of the package in the cache.
const FOLDER: &str = "python-redis-6.4.0";

/// A command that runs `script` with Python; the script can `import redis`.
pub fn python_with_redis(script: &Path) -> Result<Command> {
    let folder = npm_files::cache()?.join(FOLDER);
    ensure!(
        folder.join("redis").is_dir(),
        "{} is missing: run `cargo xtask setup`",
        folder.display()
    );
    let mut command = Command::new("python3");
    // -B: no cache files next to the script.
    command.arg("-B").arg(script).env("PYTHONPATH", folder);
    Ok(command)
}
