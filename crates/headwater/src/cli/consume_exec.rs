//! Runs a command for a message: `consume --exec`.
//!
//! Upstream: `consume`. Downstream: `supervise`, this program again as the parent of the shell.
//! Promises: the standard input of a command is a file that is complete before the command starts, so nothing that
//! happens to the consumer afterwards can shorten it. A command that is no longer waited for is killed with its process
//! group; `supervise` does the same when the consumer itself is killed. Of standard error the end is kept.

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

use crate::api::Payload;
use crate::cli::supervise;

/// Characters of what a failed command said last that become the reason.
const REASON_MAX: usize = 500;
/// Bytes of what a command says that are kept until it ends.
const SAID_BYTES_MAX: usize = 4 * REASON_MAX;

/// Runs a command for a message, and says why if it fails. Dropping the future kills the command.
pub(super) async fn execute(command: &str, message: &Value) -> Result<(), String> {
    let payload: Payload = serde_json::from_value(message.clone())
        .map_err(|error| format!("the message is odd: {error}"))?;
    let payload = payload.into_bytes().map_err(|error| error.message().to_owned())?;
    let sha256: String =
        Sha256::digest(&payload).iter().map(|byte| format!("{byte:02x}")).collect();
    let input = complete_file(&payload)
        .map_err(|error| format!("the payload for `{command}` could not be written: {error}"))?;
    let word = |name: &str| message[name].as_str().unwrap_or_default();
    let mut child = Command::new(own_program())
        .args([supervise::VERB, command])
        .env("HEADWATER_ID", word("id"))
        .env("HEADWATER_TOPIC", word("topic"))
        .env("HEADWATER_KEY", word("key"))
        .env("HEADWATER_PARTITION", message["partition"].to_string())
        .env("HEADWATER_ATTEMPT", message["attempt"].to_string())
        .env("HEADWATER_HEADERS", message["headers"].to_string())
        .env("HEADWATER_PAYLOAD_BYTES", payload.len().to_string())
        .env("HEADWATER_PAYLOAD_SHA256", sha256)
        .stdin(input)
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("`{command}` could not be started: {error}"))?;
    let mut group = ProcessGroup(child.id().and_then(|id| Pid::from_raw(id.cast_signed())));
    let said = child.stderr.take();
    let listen = async {
        match said {
            Some(said) => last_words(said).await,
            None => Vec::new(),
        }
    };
    let wait = async {
        let status = child.wait().await;
        // A supervisor that was killed has left its command behind; it ends by itself only after its command.
        if !status.as_ref().is_ok_and(|status| status.signal().is_some()) {
            group.0 = None;
        }
        drop(group);
        status
    };
    let (said, status) = tokio::join!(listen, wait);
    let status = status.map_err(|error| format!("`{command}` could not be waited for: {error}"))?;
    if status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&said);
    let said = said.trim();
    let skipped = said.chars().count().saturating_sub(REASON_MAX);
    let said: String = said.chars().skip(skipped).collect();
    Err(format!("`{command}` ended with {status}: {said}"))
}

/// The supervisor, the shell and what that started; killed when dropped.
struct ProcessGroup(Option<Pid>);

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

/// A file without a name that holds these bytes, open at its beginning, and sealed.
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

/// This program. The link leads to it even after an upgrade has replaced its file.
fn own_program() -> PathBuf {
    let link = PathBuf::from("/proc/self/exe");
    if link.exists() { link } else { std::env::current_exe().unwrap_or(link) }
}

/// Reads to the end, and keeps the last of it.
async fn last_words(mut said: impl AsyncRead + Unpin) -> Vec<u8> {
    let (mut kept, mut buffer) = (Vec::new(), [0; SAID_BYTES_MAX]);
    while let Ok(length) = said.read(&mut buffer).await
        && length > 0
    {
        kept.extend_from_slice(&buffer[..length]);
        let too_many = kept.len().saturating_sub(SAID_BYTES_MAX);
        kept.drain(..too_many);
    }
    kept
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[tokio::test]
    async fn of_what_a_command_says_the_end_is_kept_and_no_more() {
        let endless = tokio::io::repeat(b'x').take(10 * SAID_BYTES_MAX as u64 + 7);
        let said = last_words(endless.chain(&b"the end"[..])).await;
        assert_eq!(said.len(), SAID_BYTES_MAX);
        assert!(said.ends_with(b"xthe end"));
    }

    #[test]
    fn the_file_of_a_payload_is_complete_and_cannot_be_written() {
        let mut file = complete_file(b"payload").unwrap();
        let mut read = Vec::new();
        file.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"payload");
        #[cfg(target_os = "linux")]
        assert!(file.write_all(b"more").is_err() && file.set_len(0).is_err());
    }
}
