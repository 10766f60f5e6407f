//! Why a command ended without success, split by its exit code.
//!
//! Upstream: everything that can stop the start. Downstream: `command`, which prints it and ends. Promises: each is one
//! sentence that says what happened and what to do; none holds a secret.

use std::process::ExitCode;

use crate::config::SettingsError;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// Exit code 2: mend the setting.
    #[error("{0}")]
    Settings(#[from] SettingsError),
    /// Exit code 2: mend the command line.
    #[error("{0}")]
    Usage(String),
    /// Exit code 4: nothing is broken, but something should be changed.
    #[error("there are warnings, see above")]
    Warnings,
    /// Exit code 0: whoever read our output has gone, as `head` does.
    #[error("nobody reads the output any more")]
    NobodyReads,
    /// Exit code 3: start the server, or mend its address.
    #[error("{0}")]
    Unreachable(String),
    /// Exit code 1: there is no such thing.
    #[error("{0}")]
    Missing(String),
    /// Exit code 1: everything else.
    #[error("{0:#}")]
    Failed(anyhow::Error),
}

impl Failure {
    /// Anything that is neither a setting nor a server.
    pub(crate) fn new(sentence: impl Into<String>) -> Self {
        Self::Failed(anyhow::Error::msg(sentence.into()))
    }

    /// A wrong command line.
    pub(crate) fn usage(sentence: impl Into<String>) -> Self {
        Self::Usage(sentence.into())
    }

    /// 1 failed, 2 usage or a wrong setting, 3 a server cannot be reached.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Self::Failed(_) | Self::Missing(_) => ExitCode::FAILURE,
            Self::Settings(_) | Self::Usage(_) => ExitCode::from(2),
            Self::NobodyReads => ExitCode::SUCCESS,
            Self::Warnings => ExitCode::from(4),
            Self::Unreachable(_) => ExitCode::from(3),
        }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}
