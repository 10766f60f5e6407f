//! The current time as text, formatted once per millisecond instead of once per message.

use std::sync::{Mutex, MutexGuard};

use bytes::Bytes;
use headwater_stream::clock::{Clock, SystemClock, Timestamp};

/// Caches the text of the last timestamp.
#[derive(Debug, Default)]
pub(super) struct TimestampCache(Mutex<(Timestamp, Bytes)>);

impl TimestampCache {
    /// The current time of this machine.
    pub(super) fn now(&self) -> Bytes {
        self.text_of(SystemClock.now())
    }

    fn text_of(&self, now: Timestamp) -> Bytes {
        let mut last = self.lock();
        if last.0 != now || last.1.is_empty() {
            *last = (now, now.to_rfc3339().into());
        }
        last.1.clone()
    }

    fn lock(&self) -> MutexGuard<'_, (Timestamp, Bytes)> {
        self.0.lock().expect("no code panics while it holds the text")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_current_even_if_the_clock_is_set_back() {
        let timestamps = TimestampCache::default();
        for ms in [0, 5, 5, 6, 4] {
            let now = Timestamp::from_millis(ms);
            assert_eq!(timestamps.text_of(now), now.to_rfc3339());
        }
    }
}
