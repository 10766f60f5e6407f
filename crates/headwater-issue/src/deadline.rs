//! The end of patience: no call to a database lasts longer than its deadline.

use std::time::Duration;

use crate::error::{IssueError, Result};

/// Runs `call` to its end, or gives up after `deadline`; whether it took effect is unknown then.
pub(crate) async fn within<T>(
    deadline: Duration,
    what: &str,
    call: impl Future<Output = Result<T>>,
) -> Result<T> {
    match tokio::time::timeout(deadline, call).await {
        Ok(answer) => answer,
        Err(_) => Err(timed_out(what, deadline)),
    }
}

/// The error of a call that reached its deadline.
pub(crate) fn timed_out(what: &str, deadline: Duration) -> IssueError {
    let problem = format!("{what}: no answer within {deadline:?}");
    IssueError::Unavailable { problem, source: None }
}
