//! Runs a command for each message of `consume --exec`, each stream of `assign run --exec` and each request of
//! `loop worker --exec`.
//!
//! Upstream: `verbs/consume.rs`, `verbs/assign/`, `verbs/main_loop.rs`. Downstream: `supervise.rs`, this program again as parent of the shell. Guarantees: the
//! command's standard input is a file that is complete before the command starts, so it is never truncated. When the
//! future is dropped, the command is killed with its process group; `supervise.rs` does the same if the consumer is
//! killed. The end of standard error is kept.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;

use crate::api::PayloadDto;
use crate::cli::supervise;

/// Maximum number of characters of a command in a message.
const COMMAND_SHOWN_MAX: usize = 60;
/// Maximum characters of standard error in the failure reason.
const REASON_MAX: usize = 500;
/// Maximum bytes of standard error kept while the command runs.
const STDERR_BYTES_MAX: usize = 4 * REASON_MAX;

/// Runs a command for a message; the error is the failure reason. Dropping the future kills the command.
pub(super) async fn execute(command: &str, message: &Value) -> Result<(), String> {
    let payload: PayloadDto = serde_json::from_value(message.clone())
        .map_err(|error| format!("unexpected message format: {error}"))?;
    let payload = payload.into_bytes().map_err(|error| error.message().to_owned())?;
    let sha256 = hex::encode(Sha256::digest(&payload));
    let word = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
    let variables = [
        ("HEADWATER_ID", word("id")),
        ("HEADWATER_TOPIC", word("topic")),
        ("HEADWATER_KEY", word("key")),
        ("HEADWATER_PARTITION", message["partition"].to_string()),
        ("HEADWATER_ATTEMPT", message["attempt"].to_string()),
        ("HEADWATER_HEADERS", message["headers"].to_string()),
        ("HEADWATER_PAYLOAD_BYTES", payload.len().to_string()),
        ("HEADWATER_PAYLOAD_SHA256", sha256),
    ];
    run_command(command, &variables, &payload, CommandOutput::Inherit).await.map(drop)
}

/// The beginning of a command on one line, for messages.
fn shortened(command: &str) -> String {
    let line = command.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(COMMAND_SHOWN_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// What happens to the standard output of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommandOutput {
    /// It goes to the standard output of this process.
    Inherit,
    /// It is returned; more bytes than these are a failure.
    Capture { bytes_max: usize },
}

/// Runs a command with these variables and this standard input. Returns its captured output; the error is the failure
/// reason. Dropping the future kills the command.
pub(super) async fn run_command(
    command: &str,
    variables: &[(&str, String)],
    input: &[u8],
    output: CommandOutput,
) -> Result<Vec<u8>, String> {
    let input = complete_file(input)
        .map_err(|error| format!("failed to write the input of `{command}`: {error}"))?;
    let mut child = Command::new(own_program())
        .args([supervise::VERB, command])
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(input)
        .stdout(match output {
            CommandOutput::Inherit => Stdio::inherit(),
            CommandOutput::Capture { .. } => Stdio::piped(),
        })
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("failed to start `{command}`: {error}"))?;
    let mut group = ProcessGroup(child.id().and_then(|id| Pid::from_raw(id.cast_signed())));
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let capture = async {
        match (stdout, output) {
            (Some(stdout), CommandOutput::Capture { bytes_max }) => {
                read_all(stdout, bytes_max).await
            }
            _ => Some(Vec::new()),
        }
    };
    let listen = async {
        match stderr {
            Some(stderr) => read_tail(stderr).await,
            None => Vec::new(),
        }
    };
    let wait = async {
        let status = child.wait().await;
        // If the supervisor was killed by a signal, its command may still run; otherwise it ended before its
        // supervisor.
        if !status.as_ref().is_ok_and(|status| status.signal().is_some()) {
            group.0 = None;
        }
        drop(group);
        status
    };
    let (stdout, stderr, status) = tokio::join!(capture, listen, wait);
    let status = status.map_err(|error| format!("failed to wait for `{command}`: {error}"))?;
    if status.success() {
        return stdout.ok_or_else(|| format!("`{command}` printed more than its maximum output"));
    }
    let stderr = String::from_utf8_lossy(&stderr);
    let stderr = stderr.trim();
    let skipped = stderr.chars().count().saturating_sub(REASON_MAX);
    let stderr: String = stderr.chars().skip(skipped).collect();
    let command = shortened(command);
    let said = if stderr.is_empty() { String::new() } else { format!(": {stderr}") };
    Err(format!("`{command}` failed with {status}{said}"))
}

/// Process group of supervisor, shell and command; killed on drop.
struct ProcessGroup(Option<Pid>);

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

/// An anonymous, sealed file with these bytes, positioned at its start.
#[cfg(target_os = "linux")]
fn complete_file(payload: &[u8]) -> io::Result<File> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    use std::io::Seek;

    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create("payload", flags)?);
    file.write_all(payload)?;
    file.rewind()?;
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

#[cfg(not(target_os = "linux"))]
fn complete_file(payload: &[u8]) -> io::Result<File> {
    use std::io::Seek;

    let mut file = tempfile::tempfile()?;
    file.write_all(payload)?;
    file.rewind()?;
    Ok(file)
}

/// Path of this program. The link works even after an upgrade has replaced the file.
fn own_program() -> PathBuf {
    let link = PathBuf::from("/proc/self/exe");
    if link.exists() { link } else { std::env::current_exe().unwrap_or(link) }
}

/// Reads to the end; `None` if there are more bytes than `bytes_max`.
async fn read_all(mut stdout: impl AsyncRead + Unpin, bytes_max: usize) -> Option<Vec<u8>> {
    let (mut kept, mut buffer) = (Vec::new(), [0; STDERR_BYTES_MAX]);
    let mut fits = true;
    while let Ok(length) = stdout.read(&mut buffer).await
        && length > 0
    {
        fits &= kept.len() + length <= bytes_max;
        if fits {
            kept.extend_from_slice(&buffer[..length]);
        }
    }
    fits.then_some(kept)
}

/// Reads to the end and keeps the last bytes.
async fn read_tail(mut stderr: impl AsyncRead + Unpin) -> Vec<u8> {
    let (mut kept, mut buffer) = (Vec::new(), [0; STDERR_BYTES_MAX]);
    while let Ok(length) = stderr.read(&mut buffer).await
        && length > 0
    {
        kept.extend_from_slice(&buffer[..length]);
        let too_many = kept.len().saturating_sub(STDERR_BYTES_MAX);
        kept.drain(..too_many);
    }
    kept
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[tokio::test]
    async fn only_the_end_of_standard_error_is_kept() {
        let endless = tokio::io::repeat(b'x').take(10 * STDERR_BYTES_MAX as u64 + 7);
        let stderr = read_tail(endless.chain(&b"the end"[..])).await;
        assert_eq!(stderr.len(), STDERR_BYTES_MAX);
        assert!(stderr.ends_with(b"xthe end"));
    }

    #[test]
    fn the_payload_file_is_complete_and_read_only() {
        let mut file = complete_file(b"payload").unwrap();
        let mut read = Vec::new();
        file.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"payload");
        #[cfg(target_os = "linux")]
        assert!(file.write_all(b"more").is_err() && file.set_len(0).is_err());
    }
}
