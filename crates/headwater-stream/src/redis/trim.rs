//! Trimming: by request, exactly; while appending, roughly and not every time.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use super::command::Commands;
use super::scripts;
use super::streams::millis;
use crate::name::StreamName;
use crate::streams::{Retention, TrimGuard};

/// A stream is trimmed after this many entries were appended to it from here...
const TRIM_EVERY: usize = 64;
/// ...or after this long.
const TRIM_AFTER: Duration = Duration::from_millis(500);
/// Streams whose trims are counted. One that is forgotten is trimmed a little sooner.
const STREAMS_MAX: usize = 4096;
/// A stream may be longer than asked for by a tenth, and by no more than this, before it is trimmed.
const SLACK_MAX: u64 = 100;

/// Remembers when streams were trimmed, so that an append mostly costs no more than itself.
#[derive(Debug, Default)]
pub(super) struct Trims(Mutex<HashMap<StreamName, (usize, Instant)>>);

impl Trims {
    /// Whether a stream is to be trimmed along with this append.
    pub(super) fn is_due(
        &self,
        stream: &StreamName,
        entries: usize,
        retention: &Retention,
    ) -> bool {
        if *retention == Retention::KEEP_ALL {
            return false;
        }
        let now = Instant::now();
        let mut trims = self.0.lock().expect("no code panics while it holds this lock");
        if let Some((appended, since)) = trims.get_mut(stream) {
            *appended += entries;
            if *appended < TRIM_EVERY && now.duration_since(*since) < TRIM_AFTER {
                return false;
            }
            (*appended, *since) = (0, now);
            return true;
        }
        if trims.len() >= STREAMS_MAX {
            trims.clear();
        }
        trims.insert(stream.clone(), (0, now));
        true
    }
}

/// Adds the script that trims; `roughly` for speed.
pub(super) fn add(
    commands: &mut Commands,
    stream: &StreamName,
    retention: &Retention,
    guard: TrimGuard,
    roughly: bool,
) {
    let optional = |number: Option<u64>| number.map_or(String::new(), |number| number.to_string());
    let slack = (retention.max_len.unwrap_or(u64::MAX) / 10).min(SLACK_MAX);
    commands.script(&scripts::TRIM, &[stream], 5);
    commands.arg(optional(retention.max_len));
    commands.arg(optional(retention.max_age.map(millis)));
    commands.arg(optional(retention.max_bytes));
    commands.arg(match guard {
        TrimGuard::Safe => "safe",
        TrimGuard::Force => "force",
    });
    commands.arg(optional(roughly.then_some(slack)));
}
