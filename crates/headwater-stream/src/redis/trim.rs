//! Trimming: by request, exactly; while appending, roughly and not every time.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;

use super::command::Commands;
use super::error::Failure;
use super::reply::Cursor;
use super::scripts;
use super::streams::millis;
use crate::name::StreamName;
use crate::streams::{Retention, TrimGuard, Trimmed};

/// A stream is trimmed after this many entries were appended to it from here...
const ENTRIES_BETWEEN: usize = 64;
/// ...or after this long...
const TIME_BETWEEN: Duration = Duration::from_millis(500);
/// ...or after this many appends, if a group held entries back that it may have done with by now.
const APPENDS_WHILE_HELD_BACK: usize = 8;
/// Streams whose trims are counted. One that is forgotten is trimmed a little sooner.
const STREAMS_MAX: usize = 4096;
/// A stream may be longer than asked for by a tenth, and by no more than this, before it is trimmed.
const SLACK_MAX: u64 = 100;

/// Remembers when streams were trimmed, so that an append mostly costs no more than itself.
#[derive(Debug, Default)]
pub(super) struct Trims(Mutex<HashMap<StreamName, Last>>);

/// The last trim of a stream, and what was appended since.
#[derive(Debug)]
struct Last {
    at: Instant,
    held_back: bool,
    appends: usize,
    entries: usize,
}

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
        let mut trims = self.lock();
        if let Some(last) = trims.get_mut(stream) {
            last.appends += 1;
            last.entries += entries;
            let due = last.entries >= ENTRIES_BETWEEN
                || (last.held_back && last.appends >= APPENDS_WHILE_HELD_BACK)
                || last.at.elapsed() >= TIME_BETWEEN;
            if !due {
                return false;
            }
        } else if trims.len() >= STREAMS_MAX {
            trims.clear();
        }
        let now = Last { at: Instant::now(), held_back: false, appends: 0, entries: 0 };
        trims.insert(stream.clone(), now);
        true
    }

    /// Learns what a trim could not remove.
    pub(super) fn held_back(&self, stream: &StreamName, held_back: bool) {
        if let Some(last) = self.lock().get_mut(stream) {
            last.held_back = held_back;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<StreamName, Last>> {
        self.0.lock().expect("no code panics while it holds this lock")
    }
}

/// What a trim did.
pub(super) fn read(cursor: &mut Cursor<'_>) -> Result<Trimmed, Failure> {
    cursor.array_of(2)?;
    Ok(Trimmed { removed: cursor.count()?, held_back: cursor.number()? == 1 })
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
