//! Why a promise could not be tested to its end: an error, and the line that met it.

use std::error::Error;
use std::fmt;
use std::panic::Location;

/// What a promise returns. A broken promise panics; an error that was not expected comes back here.
pub type TestResult<T = ()> = Result<T, Failure>;

/// An error that was not expected, with the place that met it.
pub struct Failure {
    message: String,
    at: &'static Location<'static>,
}

impl<E: Error + 'static> From<E> for Failure {
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

// What the test harness prints.
impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected success, found an error: {}", self.at, self.message)
    }
}
