//! The clock of a backend, injected so that tests can control it.
//!
//! The embedded backend takes every time from its [`Clock`]. On Redis the server's clock is used, so processes with skewed
//! clocks agree.

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

    /// `self` plus `duration`; saturates at the maximum.
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }

    /// `self` minus `duration`; saturates at 1970.
    pub fn before(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }

    /// Parses an RFC 3339 instant such as `2026-01-01T00:00:00.250Z`. Truncated to milliseconds.
    pub fn from_rfc3339(text: &str) -> Option<Self> {
        calendar::parse(text).map(Self)
    }

    /// Formats as RFC 3339 in UTC with milliseconds. Years after 9999 become the last moment of 9999.
    pub fn to_rfc3339(self) -> String {
        calendar::format(self.0)
    }

    /// Time since `earlier`; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A source of time.
#[async_trait]
pub trait Clock: fmt::Debug + Send + Sync {
    /// The current wall-clock time. It may step in both directions, so two readings give neither order nor elapsed time.
    fn now(&self) -> Timestamp;

    /// Elapsed time since an arbitrary start. It never steps and never decreases within a process; values of different
    /// processes cannot be compared.
    fn monotonic(&self) -> Duration;

    /// Returns when `duration` has passed on this clock. Cancel-safe.
    async fn sleep(&self, duration: Duration);
}

/// The system clock.
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

/// Time since boot. Linux's `CLOCK_MONOTONIC`, which `Instant` uses, stops while the machine is suspended; the wall clock would
/// then seem to have stepped forward.
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

/// A clock that only moves when a test advances it. Clones share the time.
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
    /// A clock set to `now`.
    pub fn at(now: Timestamp) -> Self {
        let time = TestTime { wall: now, monotonic: Duration::ZERO };
        Self { time: Arc::new(Mutex::new(time)), moved: Arc::new(Notify::new()) }
    }

    /// Advances the time and wakes sleepers that are due.
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
        self.time.lock().expect("no code panics while it holds this lock")
    }
}

impl Default for TestClock {
    /// A clock set to the start of 2026.
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
            // Enabled before the time is read, so that no change in between is missed.
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
