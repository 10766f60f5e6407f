//! Time as a backend sees it, injected so that tests can move it.
//!
//! The embedded backend takes every time from its [`Clock`]. On Redis the server's own clock decides; processes with
//! skewed clocks then still agree.

mod calendar;
#[cfg(any(feature = "embedded", test))]
mod steady;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use tokio::sync::Notify;

#[cfg(any(feature = "embedded", test))]
pub(crate) use self::steady::SteadyClock;

/// Milliseconds since 1970-01-01 UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(u64);

impl Timestamp {
    /// From milliseconds since 1970-01-01 UTC.
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms)
    }

    /// Milliseconds since 1970-01-01 UTC.
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// This long after `self`; stays at the end of time instead of overflowing.
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }

    /// This long before `self`; stays at 1970 instead of underflowing.
    pub fn before(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }

    /// From an instant as in RFC 3339, such as `2026-01-01T00:00:00.250Z`. Finer than milliseconds is cut off.
    pub fn from_rfc3339(text: &str) -> Option<Self> {
        calendar::parse(text).map(Self)
    }

    /// As an instant of RFC 3339 with milliseconds, in UTC. Years after 9999 are written as the last moment of it.
    pub fn to_rfc3339(self) -> String {
        calendar::format(self.0)
    }

    /// How long after `earlier` this is; zero if it is not.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Tells the time and waits for it.
#[async_trait]
pub trait Clock: fmt::Debug + Send + Sync {
    /// The wall-clock time now. It may step in both directions, so two readings tell neither order nor elapsed time.
    fn now(&self) -> Timestamp;

    /// Elapsed time since an arbitrary start. It never steps and never goes back within a process; across processes it
    /// means nothing.
    fn monotonic(&self) -> Duration;

    /// Returns when `duration` has passed on this clock. Cancel-safe.
    async fn sleep(&self, duration: Duration);
}

/// The clock of the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

#[async_trait]
impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp::default().after(since_1970)
    }

    fn monotonic(&self) -> Duration {
        since_start()
    }

    async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }
}

/// Time since the machine was started. Linux's `CLOCK_MONOTONIC`, which `Instant` reads, stands still while the machine is
/// suspended; then the wall clock would seem to have been set forward.
#[cfg(target_os = "linux")]
fn since_start() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or_default(), nanos.unwrap_or_default())
}

/// Time since the first call.
#[cfg(not(target_os = "linux"))]
fn since_start() -> Duration {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed()
}

/// A clock that stands still until a test moves it. Clones share the time.
#[derive(Clone, Debug)]
pub struct TestClock {
    time: Arc<Mutex<TestTime>>,
    moved: Arc<Notify>,
}

#[derive(Clone, Copy, Debug)]
struct TestTime {
    wall: Timestamp,
    monotonic: Duration,
}

impl TestClock {
    /// A clock that shows `now`.
    pub fn at(now: Timestamp) -> Self {
        let time = TestTime { wall: now, monotonic: Duration::ZERO };
        Self { time: Arc::new(Mutex::new(time)), moved: Arc::new(Notify::new()) }
    }

    /// Lets time pass and wakes those whose time has come.
    pub fn advance(&self, duration: Duration) {
        {
            let mut time = self.time();
            time.wall = time.wall.after(duration);
            time.monotonic += duration;
        }
        self.moved.notify_waiters();
    }

    /// Sets the wall clock back. No time passes.
    pub fn step_back(&self, by: Duration) {
        let mut time = self.time();
        time.wall = time.wall.before(by);
    }

    /// Sets the wall clock forward. No time passes.
    pub fn step_forward(&self, by: Duration) {
        let mut time = self.time();
        time.wall = time.wall.after(by);
    }

    fn time(&self) -> MutexGuard<'_, TestTime> {
        self.time.lock().expect("no code panics while it holds the time")
    }
}

impl Default for TestClock {
    /// A clock that shows the first second of 2026.
    fn default() -> Self {
        Self::at(Timestamp::from_millis(1_767_225_600_000))
    }
}

#[async_trait]
impl Clock for TestClock {
    fn now(&self) -> Timestamp {
        self.time().wall
    }

    fn monotonic(&self) -> Duration {
        self.time().monotonic
    }

    async fn sleep(&self, duration: Duration) {
        let until = self.monotonic().saturating_add(duration);
        loop {
            // Registered before the time is read, so that no move in between goes unseen.
            let moved = self.moved.notified();
            tokio::pin!(moved);
            moved.as_mut().enable();
            if self.monotonic() >= until {
                return;
            }
            moved.await;
        }
    }
}
