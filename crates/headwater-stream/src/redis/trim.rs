//! Trimming: exact on request; approximate and periodic as part of appends.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;

use super::command::Commands;
use super::error::ReplyError;
use super::keys::Key;
use super::reply::Cursor;
use super::scripts;
use super::streams::millis;
use crate::name::StreamName;
use crate::streams::{Retention, TrimGuard, TrimResult};

/// A stream is trimmed after this process appended this many entries to it...
const ENTRIES_BETWEEN: usize = 64;
/// ...or after this long...
const TIME_BETWEEN: Duration = Duration::from_millis(500);
/// ...or after this many appends, if the last trim was held back by a group.
const APPENDS_WHILE_HELD_BACK: usize = 8;
/// Maximum number of tracked streams. At the limit all are forgotten and trimmed with their next append.
const STREAMS_MAX: usize = 4096;
/// A stream may exceed its maximum length by a tenth, at most by this many entries, before it is trimmed.
const SLACK_MAX: u64 = 100;

/// Decides which appends include a trim, so that most of them do not.
#[derive(Debug, Default)]
pub(super) struct TrimSchedule(Mutex<HashMap<StreamName, LastTrim>>);

/// The last trim of a stream, and the appends since then.
#[derive(Debug)]
struct LastTrim {
    at: Instant,
    held_back: bool,
    appends: usize,
    entries: usize,
}

impl TrimSchedule {
    /// Whether this append includes a trim.
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
        let now = LastTrim { at: Instant::now(), held_back: false, appends: 0, entries: 0 };
        trims.insert(stream.clone(), now);
        true
    }

    /// Records whether a trim was held back by a group.
    pub(super) fn held_back(&self, stream: &StreamName, held_back: bool) {
        if let Some(last) = self.lock().get_mut(stream) {
            last.held_back = held_back;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<StreamName, LastTrim>> {
        self.0.lock().expect("no code panics while it holds this lock")
    }
}

/// Parses the reply of a trim.
pub(super) fn read(cursor: &mut Cursor<'_>) -> Result<TrimResult, ReplyError> {
    cursor.array_of(2)?;
    Ok(TrimResult { removed: cursor.count()?, held_back: cursor.number()? == 1 })
}

/// Adds the trim script; `approximate` is faster and leaves a few more entries.
pub(super) fn add(
    commands: &mut Commands,
    stream: Key<'_>,
    retention: &Retention,
    guard: TrimGuard,
    approximate: bool,
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
    commands.arg(optional(approximate.then_some(slack)));
}
