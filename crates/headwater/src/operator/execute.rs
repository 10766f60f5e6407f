//! Runs a command for a message: `consume --exec`.
//!
//! Promises: the command gets the payload as it is on standard input; one that is no longer waited for is killed.

use std::process::Stdio;

use serde_json::Value;
use tokio::io::AsyncWriteExt;

use crate::admin::Payload;

/// Characters of what a failed command said that become the reason.
const REASON_MAX: usize = 500;

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
    let ((), output) = tokio::join!(feed, child.wait_with_output());
    let output = output.map_err(|error| format!("`{command}` could not be waited for: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said: String = said.trim().chars().take(REASON_MAX).collect();
    Err(format!("`{command}` ended with {}: {said}", output.status))
}
