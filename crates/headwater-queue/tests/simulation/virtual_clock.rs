//! Virtual time: a clock that the simulation moves, and runtimes that run until a time of it.
//!
//! Each simulated process and the server have a Tokio runtime of their own on the thread of the test, with a paused clock.
//! The simulation runs one after the other for a millisecond of virtual time. A runtime that is not run is a process that is
//! stopped (`SIGSTOP`) or dead (`SIGKILL`): its tasks do nothing, and none of its destructors runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;
use headwater_stream::clock::{Clock, Timestamp};
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;

use super::now_ms;

/// The time of a simulation, which begins at the current time: producers compare it with the system clock. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct VirtualClock {
    start: Timestamp,
    elapsed_ms: Arc<AtomicU64>,
}

impl VirtualClock {
    pub(crate) fn new() -> Self {
        Self { start: Timestamp::from_millis(now_ms()), elapsed_ms: Arc::default() }
    }

    /// Milliseconds since the start of the simulation.
    pub(crate) fn elapsed_ms(&self) -> u64 {
        self.elapsed_ms.load(Ordering::Relaxed)
    }

    /// Advances by a millisecond and returns the time since the start.
    pub(crate) fn tick(&self) -> u64 {
        self.elapsed_ms.fetch_add(1, Ordering::Relaxed) + 1
    }
}

#[async_trait]
impl Clock for VirtualClock {
    fn now(&self) -> Timestamp {
        self.start.after(self.monotonic())
    }

    fn monotonic(&self) -> Duration {
        Duration::from_millis(self.elapsed_ms())
    }

    async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }
}

/// A Tokio runtime whose time passes only while it is run.
pub(crate) struct VirtualRuntime {
    runtime: Runtime,
    /// Its start on its own clock, and on that of the simulation.
    started: (Instant, u64),
}

impl VirtualRuntime {
    pub(crate) fn start(now_ms: u64) -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build()?;
        let started = runtime.block_on(async { Instant::now() });
        Ok(Self { runtime, started: (started, now_ms) })
    }

    /// Runs all tasks until this time of the simulation. Tokio advances the paused clock from timer to timer, whenever no task
    /// is ready.
    pub(crate) fn run_until(&self, now_ms: u64) {
        let until = self.time_at(now_ms);
        self.runtime.block_on(async { tokio::time::sleep_until(until).await });
    }

    /// Lets time pass in which no task ran: all of them find the later time at once.
    pub(crate) fn skip_to(&self, now_ms: u64) {
        let until = self.time_at(now_ms);
        self.runtime.block_on(async {
            tokio::time::advance(until.saturating_duration_since(Instant::now())).await;
        });
    }

    /// Completes a future that needs no time to pass.
    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    pub(crate) fn handle(&self) -> &tokio::runtime::Handle {
        self.runtime.handle()
    }

    fn time_at(&self, now_ms: u64) -> Instant {
        let (started, started_ms) = self.started;
        started + Duration::from_millis(now_ms.saturating_sub(started_ms))
    }
}
