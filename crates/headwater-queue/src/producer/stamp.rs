//! The time as text, written once per millisecond and not once per message.

use std::sync::{Mutex, MutexGuard};

use bytes::Bytes;
use headwater_stream::clock::{Clock, SystemClock, Timestamp};

/// Stamps messages with the time of this machine.
#[derive(Debug, Default)]
pub(super) struct Stamp(Mutex<(Timestamp, Bytes)>);

impl Stamp {
    /// The time now.
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
    fn the_text_is_that_of_the_moment_also_if_the_clock_goes_back() {
        let stamp = Stamp::default();
        for ms in [0, 5, 5, 6, 4] {
            let now = Timestamp::from_millis(ms);
            assert_eq!(stamp.text_of(now), now.to_rfc3339());
        }
    }
}
