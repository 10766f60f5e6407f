//! Fault injection: permanent faults and one-shot faults.

use std::time::Duration;

use crate::random::TestRandom;

const FLAKY_DELAY_MS: std::ops::Range<u64> = 0..6;
const FLAKY_CHUNKS: std::ops::Range<u64> = 50..201;

/// Faults that last until the proxy is healed.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ProxyFaults {
    pub(super) stalled: bool,
    pub(super) delay: Duration,
    /// Connections up to this number forward nothing.
    pub(super) forgotten: u64,
}

/// Faults that happen once, on the first connection they apply to.
#[derive(Debug, Default)]
pub(super) struct OneShots {
    pub(super) drop_after: Option<usize>,
    pub(super) drop_reply: bool,
    pub(super) drop_replies: Option<DropRule>,
    pub(super) hold: Option<HoldRule>,
    /// How many connections were closed on purpose.
    pub(super) fired: u64,
    /// How many requests were held back by `hold`.
    pub(super) held: u64,
    flaky: Option<Flaky>,
}

/// A source of random faults.
#[derive(Debug)]
struct Flaky {
    random: TestRandom,
    chunks_left: u64,
}

/// Drops the replies to some requests that contain a pattern.
#[derive(Debug)]
pub(super) struct DropRule {
    pattern: Vec<u8>,
    left: u64,
}

impl DropRule {
    pub(super) fn new(pattern: &str, times: u64) -> DropRule {
        DropRule { pattern: pattern.as_bytes().to_vec(), left: times }
    }

    fn applies(&mut self, request: &[u8]) -> bool {
        let is_due = self.left > 0 && contains(request, &self.pattern);
        self.left -= u64::from(is_due);
        is_due
    }
}

fn contains(request: &[u8], pattern: &[u8]) -> bool {
    request.windows(pattern.len()).any(|part| part == pattern)
}

/// Delays some of the requests that contain a pattern.
#[derive(Debug)]
pub(super) struct HoldRule {
    pattern: Vec<u8>,
    one_in: u64,
    pause: Duration,
    seen: u64,
}

impl HoldRule {
    pub(super) fn new(pattern: &str, one_in: u64, pause: Duration) -> HoldRule {
        HoldRule { pattern: pattern.as_bytes().to_vec(), one_in: one_in.max(1), pause, seen: 0 }
    }

    /// The delay of this request; `None` if it is not delayed.
    fn pause(&mut self, request: &[u8]) -> Option<Duration> {
        let matches = contains(request, &self.pattern);
        self.seen += u64::from(matches);
        (matches && self.seen.is_multiple_of(self.one_in)).then_some(self.pause)
    }
}

/// What to do with a chunk from the client.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ChunkAction {
    Forward,
    /// Forward the first bytes, then close the connection.
    CutAfter(usize),
    /// Forward it, and close the connection instead of forwarding a reply.
    DropReply,
}

impl OneShots {
    pub(super) fn flaky(seed: u64) -> OneShots {
        let mut random = TestRandom::seeded(seed);
        let chunks_left = random.between(FLAKY_CHUNKS);
        OneShots { flaky: Some(Flaky { random, chunks_left }), ..OneShots::default() }
    }

    /// Removes all faults.
    pub(super) fn clear(&mut self) {
        *self = OneShots { fired: self.fired, held: self.held, ..OneShots::default() };
    }

    /// A random delay for the next chunk.
    pub(super) fn delay(&mut self) -> Duration {
        let flaky = self.flaky.as_mut();
        Duration::from_millis(flaky.map_or(0, |flaky| flaky.random.between(FLAKY_DELAY_MS)))
    }

    /// The delay of this request: random, plus that of a matching hold rule.
    pub(super) fn request_delay(&mut self, request: &[u8]) -> Duration {
        let pause = self.hold.as_mut().and_then(|hold| hold.pause(request));
        self.held += u64::from(pause.is_some());
        pause.unwrap_or_default() + self.delay()
    }

    /// Decides about the next chunk from a client.
    pub(super) fn next_action(&mut self, chunk: &[u8]) -> ChunkAction {
        let length = chunk.len();
        if let Some(left) = self.drop_after {
            if left > length {
                self.drop_after = Some(left - length);
                return ChunkAction::Forward;
            }
            self.drop_after = None;
            self.fired += 1;
            return ChunkAction::CutAfter(left);
        }
        let is_dropped = self.drop_replies.as_mut().is_some_and(|rule| rule.applies(chunk));
        if is_dropped || std::mem::take(&mut self.drop_reply) {
            self.fired += 1;
            return ChunkAction::DropReply;
        }
        let Some(flaky) = &mut self.flaky else { return ChunkAction::Forward };
        flaky.chunks_left -= 1;
        if flaky.chunks_left > 0 {
            return ChunkAction::Forward;
        }
        self.fired += 1;
        flaky.chunks_left = flaky.random.between(FLAKY_CHUNKS);
        match flaky.random.between(0..2) {
            0 => ChunkAction::CutAfter(length / 2),
            _ => ChunkAction::DropReply,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn actions_of(seed: u64) -> Vec<ChunkAction> {
        let mut one_shots = OneShots::flaky(seed);
        (0..1_000).map(|_| one_shots.next_action(&[0; 10])).collect()
    }

    #[test]
    fn the_same_seed_gives_the_same_faults() {
        assert_eq!(actions_of(7), actions_of(7));
        assert_ne!(actions_of(7), actions_of(8));
    }

    #[test]
    fn every_nth_request_that_matches_a_pattern_is_delayed() {
        let pause = Duration::from_secs(1);
        let hold = Some(HoldRule::new("BEGIN", 2, pause));
        let mut one_shots = OneShots { hold, ..OneShots::default() };
        let delays = ["BEGIN", "COMMIT", "; BEGIN", "BEGIN", "xBEGINx"]
            .map(|request| one_shots.request_delay(request.as_bytes()));
        let zero = Duration::ZERO;
        assert_eq!(delays, [zero, zero, pause, zero, pause]);
        assert_eq!(one_shots.held, 2);
    }

    #[test]
    fn a_flaky_proxy_both_cuts_and_drops_replies() {
        let faults = actions_of(7);

        assert!(faults.contains(&ChunkAction::CutAfter(5)));
        assert!(faults.contains(&ChunkAction::DropReply));
        assert!(faults.iter().filter(|fault| **fault != ChunkAction::Forward).count() <= 20);
    }
}
