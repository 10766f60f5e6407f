//! The clock of a backend, injected so that tests can control it.
//!
//! The embedded backend takes every time from its [`Clock`]. On Redis the server's clock is used, so processes with skewed
//! clocks agree.

#[cfg(any(feature = "embedded", test))]
mod steady;

use std::fmt;
use std::num::NonZeroU8;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use time::OffsetDateTime;
use time::format_description::well_known::iso8601::{Config, EncodedConfig, TimePrecision};
use time::format_description::well_known::{Iso8601, Rfc3339};
use tokio::sync::Notify;
use tokio::time::Instant;

#[cfg(any(feature = "embedded", test))]
pub(crate) use self::steady::SteadyClock;

/// Seconds with three digits of a fraction.
const MILLISECONDS: EncodedConfig = Config::DEFAULT
    .set_time_precision(TimePrecision::Second { decimal_digits: NonZeroU8::new(3) })
    .encode();
/// 9999-12-31T23:59:59.999Z
const LAST_MS: u64 = 253_402_300_799_999;
const NANOS_PER_MS: i128 = 1_000_000;

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

    /// Parses an RFC 3339 instant such as `2026-01-01T00:00:00.250Z`. Truncated to milliseconds; a leap second becomes the last
    /// millisecond before it. `None` before 1970.
    pub fn from_rfc3339(text: &str) -> Option<Self> {
        // The library accepts any separator.
        text.as_bytes().get(10).filter(|separator| b"Tt ".contains(separator))?;
        let instant = OffsetDateTime::parse(text, &Rfc3339).ok()?;
        u64::try_from(instant.unix_timestamp_nanos().div_euclid(NANOS_PER_MS)).ok().map(Self)
    }

    /// Formats as RFC 3339 in UTC with milliseconds. Years after 9999 become the last moment of 9999.
    pub fn to_rfc3339(self) -> String {
        let nanos = i128::from(self.0.min(LAST_MS)) * NANOS_PER_MS;
        let instant = OffsetDateTime::from_unix_timestamp_nanos(nanos);
        let text = instant.map(|instant| instant.format(&Iso8601::<MILLISECONDS>));
        text.expect("the year is at most 9999").expect("formatting to a string does not fail")
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

/// Shorter suspensions are covered by the safety margins of leases.
const SUSPENSION_MIN: Duration = Duration::from_millis(100);

/// Time for the validity of leases and claims. It goes on while the machine is suspended; `Instant` stands still meanwhile, and a
/// lease that has expired on the server would seem valid.
#[derive(Clone, Debug)]
pub struct LeaseClock {
    clock: Arc<dyn Clock>,
    started: (std::time::Instant, Duration),
}

impl LeaseClock {
    /// Time that passes on the monotonic clock of `clock` while `Instant` stands still counts as a suspension of the machine.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let started = (std::time::Instant::now(), clock.monotonic());
        Self { clock, started }
    }

    /// How long the machine was suspended since the start.
    fn suspended(&self) -> Duration {
        let (running, boot) = self.started;
        let ahead = self.clock.monotonic().saturating_sub(boot).saturating_sub(running.elapsed());
        // Less is the time between the readings of both clocks.
        if ahead < SUSPENSION_MIN { Duration::ZERO } else { ahead }
    }

    /// The current time. Compare only times of the same clock.
    pub fn now(&self) -> Instant {
        Instant::now() + self.suspended()
    }

    /// Returns at this time, or later by at most the time left if the machine is suspended meanwhile. Cancel-safe.
    pub async fn sleep_until(&self, time: Instant) {
        let left = time.saturating_duration_since(self.now());
        tokio::time::sleep(left).await;
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<u64> {
        Timestamp::from_rfc3339(text).map(Timestamp::as_millis)
    }

    #[test]
    fn instants_round_trip_over_leap_years_and_centuries() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (951_868_799_999, "2000-02-29T23:59:59.999Z"),
            (1_767_225_600_250, "2026-01-01T00:00:00.250Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
            (LAST_MS, "9999-12-31T23:59:59.999Z"),
        ] {
            assert_eq!(Timestamp(ms).to_rfc3339(), text);
            assert_eq!(parse(text), Some(ms));
        }
        assert_eq!(Timestamp(u64::MAX).to_rfc3339(), "9999-12-31T23:59:59.999Z");
    }

    #[test]
    fn other_spellings_of_the_same_instant_are_parsed() {
        for text in [
            "2026-01-01T00:00:00Z",
            "2026-01-01 00:00:00.000000999z",
            "2026-01-01T01:30:00+01:30",
            "2025-12-31T22:00:00.0-02:00",
        ] {
            assert_eq!(parse(text), Some(1_767_225_600_000), "{text}");
        }
        assert_eq!(parse("2016-12-31T23:59:60Z"), Some(1_483_228_799_999));
    }

    #[test]
    fn invalid_instants_are_rejected() {
        for text in [
            "",
            "2026",
            "2026-01-01",
            "2026-13-01T00:00:00Z",
            "2026-02-29T00:00:00Z",
            "2026-01-01T24:00:00Z",
            "2026-01-01T00:00:00",
            "2026-01-01T00:00:00.Z",
            "2026-01-01T00:00:00Zx",
            "1969-12-31T23:59:59Z",
            "1969-12-31T23:59:59.9999Z",
            "2026-01-01T00:00:00+0100",
            "键",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
