//! The error type of test cases: an unexpected error and its source location.

use std::error::Error;
use std::fmt;
use std::panic::Location;

/// Result of a test case. A failed assertion panics; an unexpected error is returned here.
pub type TestResult<T = ()> = Result<T, TestFailure>;

/// An unexpected error with its source location.
pub struct TestFailure {
    message: String,
    at: &'static Location<'static>,
}

impl<E: Error + 'static> From<E> for TestFailure {
    #[track_caller]
    fn from(error: E) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            message = format!("{message}: {cause}");
            source = cause.source();
        }
        Self { message, at: Location::caller() }
    }
}

// Printed by the test harness.
impl fmt::Debug for TestFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected success, found an error: {}", self.at, self.message)
    }
}
