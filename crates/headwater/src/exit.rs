//! Errors that end a command, with their exit codes.
//!
//! Upstream: every command. Downstream: `entry.rs`, which prints the error. Guarantees: a message is one sentence that
//! says what failed and what to do; it contains no secret.

use std::process::ExitCode;

use headwater_queue::QueueError;

use crate::config::SettingsError;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// Exit code 2: fix the setting.
    #[error("{0}")]
    Settings(#[from] SettingsError),
    /// Exit code 2: fix the command line.
    #[error("{0}")]
    Usage(String),
    /// Exit code 4: `doctor` has warnings but no errors.
    #[error("warnings found; see above")]
    Warnings,
    /// Exit code 0: the reader of standard output closed the pipe, as `head` does.
    #[error("standard output was closed by its reader")]
    BrokenPipe,
    /// Exit code 3: start the server, or fix its address.
    #[error("{0}")]
    Unreachable(String),
    /// Exit code 1: the named object does not exist.
    #[error("{0}")]
    NotFound(String),
    /// Exit code 1: the tables of the database are missing or older than this program.
    #[error("{message}")]
    OutdatedSchema {
        message: String,
        /// Whether there are no tables at all.
        is_empty: bool,
    },
    /// Exit code 1: any other error.
    #[error("{0:#}")]
    Failed(anyhow::Error),
}

impl CliError {
    /// An error with exit code 1.
    pub(crate) fn new(sentence: impl Into<String>) -> Self {
        Self::Failed(anyhow::Error::msg(sentence.into()))
    }

    /// A usage error (exit code 2).
    pub(crate) fn usage(sentence: impl Into<String>) -> Self {
        Self::Usage(sentence.into())
    }

    /// 0 for a closed pipe, 1 failed, 2 usage or setting, 3 unreachable, 4 warnings.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Self::Failed(_) | Self::NotFound(_) | Self::OutdatedSchema { .. } => ExitCode::FAILURE,
            Self::Settings(_) | Self::Usage(_) => ExitCode::from(2),
            Self::BrokenPipe => ExitCode::SUCCESS,
            Self::Warnings => ExitCode::from(4),
            Self::Unreachable(_) => ExitCode::from(3),
        }
    }
}

impl From<anyhow::Error> for CliError {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

impl From<QueueError> for CliError {
    fn from(error: QueueError) -> Self {
        match &error {
            QueueError::NoTopic { .. } => Self::NotFound(error.to_string()),
            _ if error.is_transient() => Self::Unreachable(error.to_string()),
            _ => Self::new(error.to_string()),
        }
    }
}
