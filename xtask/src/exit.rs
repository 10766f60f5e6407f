//! Why a command stopped: one message for the reader, one exit code for the shell.

use std::fmt;

/// The exit code of a command that was not understood.
pub(crate) const USAGE: u8 = 2;

/// The end of a run that did not succeed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ExitError {
    /// What went wrong and, where we know it, what to do next.
    pub(crate) message: String,
    /// Never 0. That of the failed step, if a step failed.
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
