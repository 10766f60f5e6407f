//! Why a command stopped: one sentence for the reader, one exit code for the shell.

use std::fmt;

/// The exit code of a command that was not understood.
pub(crate) const USAGE: u8 = 2;

/// The end of a run that did not succeed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// What went wrong and, where we know it, what to do next.
    pub(crate) sentence: String,
    /// Never 0. That of the failed step, if a step failed.
    pub(crate) code: u8,
}

impl Failure {
    pub(crate) fn new(sentence: impl Into<String>) -> Self {
        Self { sentence: sentence.into(), code: 1 }
    }

    pub(crate) fn with_code(sentence: impl Into<String>, code: u8) -> Self {
        assert_ne!(code, 0, "a failure with exit code 0 would read as success");
        Self { sentence: sentence.into(), code }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.sentence)
    }
}
