//! Runs a command for a message: `consume --exec`.
//!
//! Promises: the command gets the payload as it is on standard input; one that is no longer waited for is killed. It may say
//! on standard error what it likes: the end of it is kept.

use std::process::Stdio;

use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};

use crate::admin::Payload;

/// Characters of what a failed command said last that become the reason.
const REASON_MAX: usize = 500;
/// Bytes of what a command says that are kept until it ends.
const SAID_BYTES_MAX: usize = 4 * REASON_MAX;

/// Runs a command for a message, and says why if it fails.
pub(super) async fn execute(command: &str, message: &Value) -> Result<(), String> {
    let payload: Payload = serde_json::from_value(message.clone())
        .map_err(|error| format!("the message is odd: {error}"))?;
    let payload = payload.into_bytes().map_err(|error| error.message().to_owned())?;
    let word = |name: &str| message[name].as_str().unwrap_or_default();
    let mut child = tokio::process::Command::new("sh")
        .args(["-c", command])
        .env("HEADWATER_ID", word("id"))
        .env("HEADWATER_TOPIC", word("topic"))
        .env("HEADWATER_KEY", word("key"))
        .env("HEADWATER_PARTITION", message["partition"].to_string())
        .env("HEADWATER_ATTEMPT", message["attempt"].to_string())
        .env("HEADWATER_HEADERS", message["headers"].to_string())
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("`{command}` could not be started: {error}"))?;
    let mut input = child.stdin.take();
    // A command need not read its input; then the pipe breaks, which is no failure.
    let feed = async {
        if let Some(input) = input.as_mut() {
            let _ = input.write_all(&payload).await;
        }
        drop(input.take());
    };
    let said = child.stderr.take();
    let listen = async {
        match said {
            Some(said) => last_words(said).await,
            None => Vec::new(),
        }
    };
    let ((), said, status) = tokio::join!(feed, listen, child.wait());
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
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn of_what_a_command_says_the_end_is_kept_and_no_more() {
        let endless = tokio::io::repeat(b'x').take(10 * SAID_BYTES_MAX as u64 + 7);
        let said = last_words(endless.chain(&b"the end"[..])).await;
        assert_eq!(said.len(), SAID_BYTES_MAX);
        assert!(said.ends_with(b"xthe end"));
        let message = json!({"payload": "", "headers": {}, "partition": 0, "attempt": 1});
        let failed =
            execute("head -c 100000 /dev/zero | tr '\\0' y >&2; echo last >&2; exit 7", &message);
        let reason = failed.await.unwrap_err();
        assert!(reason.contains("exit status: 7") && reason.ends_with("ylast"), "{reason}");
        assert!(reason.len() < 1000, "{}", reason.len());
    }
}
