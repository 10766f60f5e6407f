//! The error of a command: a message and an exit code.

use std::fmt;

/// Exit code of a usage error.
pub(crate) const USAGE: u8 = 2;

/// Why a command failed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ExitError {
    /// What failed and, if known, the next step.
    pub(crate) message: String,
    /// The exit code, never 0; that of the failed step, if any.
    pub(crate) code: u8,
}

impl ExitError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 1 }
    }

    pub(crate) fn with_code(message: impl Into<String>, code: u8) -> Self {
        assert_ne!(code, 0, "a failure with exit code 0 would read as success");
        Self { message: message.into(), code }
    }
}

impl fmt::Display for ExitError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}
