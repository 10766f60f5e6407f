//! Sessions of runs that began while streams were away: put into the list of sessions once their events are there.
//!
//! Upstream: `session`, which could not make them; their events wait in the spool meanwhile. Downstream: the sessions of the bus.
//! Promises: at most [`WAITING_MAX`] are remembered, by this process alone. One that it forgets, because it was killed, is found
//! by its name all the same, but not listed.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use headwater_bus::{SessionError, SessionId, Sessions};
use tokio::time::{MissedTickBehavior, interval};
use tracing::{debug, warn};

/// Sessions that wait at once.
const WAITING_MAX: usize = 10_000;

/// How often they are looked for.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How often one is looked for in vain while the streams answer: an hour. Its events are lost by then.
const LOOKS_MAX: u32 = 720;

/// Sessions that are not in the list yet.
pub(crate) struct LateSessions {
    sessions: Arc<Sessions>,
    /// With how often each was looked for.
    waiting: Mutex<VecDeque<(SessionId, u32)>>,
}

impl LateSessions {
    pub(crate) fn new(sessions: Arc<Sessions>) -> Self {
        Self { sessions, waiting: Mutex::default() }
    }

    /// Remembers one.
    pub(crate) fn add(&self, session: SessionId) {
        let mut waiting = self.waiting();
        if waiting.len() >= WAITING_MAX {
            warn!(%session, "a session will be found by its name, and not be listed");
            return;
        }
        waiting.push_back((session, 0));
    }

    /// Looks from time to time until `shutdown`.
    pub(crate) async fn run(&self, shutdown: impl Future<Output = ()>) {
        let mut ticks = interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        tokio::pin!(shutdown);
        loop {
            tokio::select! {
                () = &mut shutdown => return,
                _ = ticks.tick() => {}
            }
            tokio::select! {
                () = &mut shutdown => return,
                () = self.run_once() => {}
            }
        }
    }

    /// Takes in those whose events are there. Cancel-safe: one that is being looked for is forgotten, no more.
    async fn run_once(&self) {
        let count = self.waiting().len();
        for _ in 0..count {
            let Some((session, looks)) = self.waiting().pop_front() else { return };
            // Whoever recovers a session that other programs wrote puts it into the list.
            match self.sessions.recover(&session).await {
                Ok(_) => debug!(%session, "a session is in the list"),
                Err(SessionError::NotFound { .. }) if looks < LOOKS_MAX => {
                    self.waiting().push_back((session, looks + 1));
                }
                Err(error) if error.is_transient() => {
                    self.waiting().push_back((session, looks));
                    return;
                }
                Err(error) => warn!(%session, %error, "a session is not in the list"),
            }
        }
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<(SessionId, u32)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
