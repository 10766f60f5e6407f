//! Connects a server to a stream backend that may be unreachable when the process starts.
//!
//! Upstream: `run.rs`. Downstream: `Backend::probe`; `health.rs` reports the problem. Guarantees: the process starts
//! within [`FIRST_PROBE_MAX`] whether or not Redis answers, because SQL takes every event. Only a server that cannot be
//! used with this URL stops the start. A rejected password does not: it can change at Redis without a restart. Watches
//! the backend as long as the process runs, which reconnects by itself: each change of its state is logged once, with
//! its address and the cause. Other parts repeat that only at the level `debug` (`telemetry/log_filter.rs`).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use headwater_stream::{Backend, BackendDescription, Backoff, StreamError};
use tokio::time::timeout;
use tracing::{error, info, warn};

use crate::exit::CliError;
use crate::server::startup;
use crate::text::with_causes;

/// How long the start waits for the stream backend.
const FIRST_PROBE_MAX: Duration = Duration::from_secs(2);

/// Pause between two probes.
const RETRY: Backoff = Backoff::doubling(Duration::from_millis(250), Duration::from_secs(2));

/// How often a backend that works is checked, and how long a check may take.
const CHECK_EVERY: Duration = Duration::from_secs(1);
const CHECK_MAX: Duration = Duration::from_secs(5);

/// Whether the stream backend works. Clones share one state.
#[derive(Clone, Debug)]
pub(crate) struct StreamMonitor {
    /// The address, without the password.
    shown: String,
    /// The reason for readiness; `None` while the backend answers.
    problem: Arc<Mutex<Option<&'static str>>>,
}

impl StreamMonitor {
    /// Probes the backend once. Fails if the server cannot be used with this URL.
    pub(crate) async fn open(streams: &dyn Backend, shown: String) -> Result<Self, CliError> {
        let monitor = Self { shown, problem: Arc::default() };
        match timeout(FIRST_PROBE_MAX, streams.probe()).await {
            Ok(Ok(description)) => monitor.opened(&description),
            Ok(Err(StreamError::Invalid { problem, .. })) => {
                return Err(startup::invalid_setting("stream.url", &monitor.shown, &problem));
            }
            Ok(Err(error)) => monitor.failed(&error),
            Err(_) => {
                let problem = format!("no answer within {FIRST_PROBE_MAX:?}");
                monitor.failed(&StreamError::Unavailable { problem, source: None });
            }
        }
        Ok(monitor)
    }

    /// Why the backend cannot be used, without details; `None` while it answers.
    pub(crate) fn problem(&self) -> Option<&'static str> {
        *self.problem.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches the backend. Runs until it is dropped.
    pub(crate) async fn run(self, streams: Arc<dyn Backend>) {
        loop {
            let mut retry = RETRY.timer();
            while self.problem().is_some() {
                tokio::time::sleep(retry.next_delay()).await;
                match streams.probe().await {
                    Ok(description) => self.opened(&description),
                    Err(error) => self.failed(&error),
                }
            }
            tokio::time::sleep(CHECK_EVERY).await;
            match timeout(CHECK_MAX, streams.now()).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => self.failed(&error),
                Err(_) => {
                    let problem = format!("no answer within {CHECK_MAX:?}");
                    self.failed(&StreamError::Unavailable { problem, source: None });
                }
            }
        }
    }

    fn opened(&self, BackendDescription { kind, version, .. }: &BackendDescription) {
        *self.problem.lock().unwrap_or_else(PoisonError::into_inner) = None;
        info!(streams = self.shown, kind, version, "stream backend opened");
    }

    fn failed(&self, error: &StreamError) {
        let (new, text) = (reason(error), with_causes(error));
        // The text of an error may differ from call to call; the state has changed only if its reason has.
        let known = self.problem.lock().unwrap_or_else(PoisonError::into_inner).replace(new);
        let is_known = known == Some(new);
        let address = self.shown.as_str();
        match error {
            _ if is_known => {}
            StreamError::Stopped { .. } => error!(
                address,
                error = text,
                "stream backend has stopped; restart this process; until then, events are taken and processed from SQL"
            ),
            error if error.is_transient() => warn!(
                address,
                error = text,
                "stream backend not reachable, retrying; events are taken and processed from SQL"
            ),
            _ => error!(
                address,
                error = text,
                "stream backend rejects this process; fix its password, ACL or `stream.url`; events are taken and processed from SQL"
            ),
        }
    }
}

/// Why a stream backend cannot be used, for callers that may not read the log.
pub(crate) fn reason(error: &StreamError) -> &'static str {
    match error {
        StreamError::Denied { .. } => "access denied, processing continues from SQL; see the log",
        StreamError::Full { .. } => "rejecting writes, processing continues from SQL; see the log",
        StreamError::Stopped { .. } => {
            "stopped after an error: restart this process; until then, processing continues from SQL; see the log"
        }
        StreamError::Invalid { .. } | StreamError::Protocol { .. } => {
            "server not supported, processing continues from SQL; see the log"
        }
        _ => "no answer, processing continues from SQL; see the log",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use async_trait::async_trait;
    use headwater_stream::clock::{Clock, SystemClock, Timestamp};
    use headwater_stream::{Fields, Options, Retention, StreamName, connect};

    use super::*;

    /// Panics while it is broken, inside of a call of the backend.
    #[derive(Debug, Default)]
    struct PanickingClock {
        is_broken: AtomicBool,
    }

    #[async_trait]
    impl Clock for PanickingClock {
        fn now(&self) -> Timestamp {
            assert!(!self.is_broken.load(Ordering::SeqCst), "the clock is broken");
            SystemClock.now()
        }

        fn monotonic(&self) -> Duration {
            assert!(!self.is_broken.load(Ordering::SeqCst), "the clock is broken");
            SystemClock.monotonic()
        }

        async fn sleep(&self, duration: Duration) {
            SystemClock.sleep(duration).await;
        }
    }

    #[tokio::test]
    async fn a_backend_that_stopped_needs_a_restart_and_does_not_seem_to_work_again() {
        let clock = Arc::new(PanickingClock::default());
        let options = Options { clock: Arc::clone(&clock) as _, ..Options::default() };
        let streams = connect("embedded:memory", &options).await.unwrap();
        let monitor = StreamMonitor::open(streams.as_ref(), "here".to_owned()).await.unwrap();
        assert_eq!(monitor.problem(), None);

        clock.is_broken.store(true, Ordering::SeqCst);
        let appending = Arc::clone(&streams);
        let append = tokio::spawn(async move {
            let stream = StreamName::new("s").unwrap();
            let fields = Fields::new([("a", "b")]);
            appending.append(&stream, &[fields], &Retention::KEEP_ALL).await
        });
        append.await.unwrap_err();
        clock.is_broken.store(false, Ordering::SeqCst);

        assert!(matches!(streams.probe().await, Err(StreamError::Stopped { .. })));
        let monitor = StreamMonitor::open(streams.as_ref(), "here".to_owned()).await.unwrap();
        assert!(monitor.problem().is_some_and(|problem| problem.contains("restart this process")));
    }
}
