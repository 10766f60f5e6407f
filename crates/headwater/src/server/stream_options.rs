//! How the stream backend is opened: the options that follow from the settings.
//!
//! Upstream: `startup.rs` and `doctor`. Guarantees: a password file or command is read again for new connections, and connections
//! are replaced before `stream.password_lifetime` is over. Neither the password nor the output of the command is logged.

use std::fmt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::{BoxError, CredentialProvider, Credentials, Options};
use secrecy::{ExposeSecret, SecretString};
use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::config::Settings;

/// The output of a command is used for this long, so that many connections that open together run it once.
const OUTPUT_REUSE_MAX: Duration = Duration::from_secs(10);

/// Where the password of the stream backend comes from, if not from its URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PasswordSource {
    /// The text of a file.
    File(PathBuf),
    /// What a command of the shell prints.
    Command(String),
}

/// The options of these settings.
pub(crate) fn stream_options(settings: &Settings) -> Options {
    let provider = |source: &PasswordSource| -> Arc<dyn CredentialProvider> {
        Arc::new(PasswordProvider::new(source.clone(), settings.stream_password_lifetime))
    };
    Options {
        configure_notifications: settings.stream_configure_notifications,
        credentials: settings.stream_password.as_ref().map(provider),
        ..Options::default()
    }
}

/// Reads the password from its source. The user is that of the URL.
struct PasswordProvider {
    source: PasswordSource,
    lifetime: Duration,
    last_output: Mutex<Option<(Instant, SecretString)>>,
}

impl PasswordProvider {
    fn new(source: PasswordSource, lifetime: Duration) -> Self {
        Self { source, lifetime, last_output: Mutex::default() }
    }

    async fn password(&self) -> Result<SecretString, BoxError> {
        match &self.source {
            PasswordSource::File(path) => {
                let file = path.clone();
                let text = tokio::task::spawn_blocking(|| std::fs::read_to_string(file)).await?;
                let failed = |error| format!("`stream.password_file` {}: {error}", path.display());
                first_line(&text.map_err(failed)?, "`stream.password_file`")
            }
            PasswordSource::Command(command) => {
                let mut last = self.last_output.lock().await;
                let reuse = OUTPUT_REUSE_MAX.min(self.lifetime / 8);
                if let Some((at, password)) = &*last
                    && at.elapsed() < reuse
                {
                    return Ok(password.clone());
                }
                let password = run(command).await?;
                *last = Some((Instant::now(), password.clone()));
                Ok(password)
            }
        }
    }
}

#[async_trait]
impl CredentialProvider for PasswordProvider {
    async fn credentials(&self) -> Result<Credentials, BoxError> {
        let password = self.password().await?.expose_secret().to_owned();
        Ok(Credentials { user: None, password, expires_in: Some(self.lifetime) })
    }
}

impl fmt::Debug for PasswordProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PasswordProvider").field("source", &self.source).finish_non_exhaustive()
    }
}

/// Runs the command; it is killed if the caller stops waiting.
async fn run(command: &str) -> Result<SecretString, BoxError> {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).stdin(Stdio::null()).stderr(Stdio::inherit()).kill_on_drop(true);
    let output = shell.output().await;
    let output =
        output.map_err(|error| format!("`stream.password_command` did not run: {error}"))?;
    if !output.status.success() {
        return Err(format!("`stream.password_command` failed: {}", output.status).into());
    }
    let text = String::from_utf8(output.stdout);
    let text = text.map_err(|_| "`stream.password_command` printed text that is not UTF-8")?;
    first_line(&text, "`stream.password_command`")
}

fn first_line(text: &str, source: &str) -> Result<SecretString, BoxError> {
    match text.lines().next().map(str::trim) {
        None | Some("") => Err(format!("{source} has no password in its first line").into()),
        Some(password) => Ok(password.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_is_read_again_and_a_command_runs_again_when_its_output_is_old() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, "one\n").unwrap();
        let lifetime = Duration::from_millis(80);
        let read = PasswordProvider::new(PasswordSource::File(file.clone()), lifetime);
        let command = format!("cat {}", file.display());
        let ran = PasswordProvider::new(PasswordSource::Command(command), lifetime);
        for password in ["one", "two"] {
            std::fs::write(&file, format!("{password}\n")).unwrap();
            assert_eq!(read.credentials().await.unwrap().password, password);
            tokio::time::sleep(lifetime / 8).await;
            let given = ran.credentials().await.unwrap();
            assert_eq!((given.password.as_str(), given.expires_in), (password, Some(lifetime)));
        }
    }

    #[tokio::test]
    async fn a_source_without_a_password_is_an_error_that_does_not_show_its_output() {
        for command in ["exit 3", "echo", "echo hush >&2; echo hunter2 | false"] {
            let source = PasswordSource::Command(command.to_owned());
            let provider = PasswordProvider::new(source, Duration::from_secs(60));
            let error = provider.credentials().await.unwrap_err().to_string();
            assert!(error.contains("stream.password_command"), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
