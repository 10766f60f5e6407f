//! Writes: rows and stream position in one transaction.

use std::collections::HashSet;
use std::time::Instant;

use duckdb::types::{TimeUnit, Value};
use duckdb::{Connection, Transaction, params, params_from_iter};
use headwater_stream::EntryId;
use headwater_stream::clock::Timestamp;

use super::{AnalyticsStore, StoreWriter, failed, schema};
use crate::error::{AnalyticsError, Result};
use crate::event::TicketEventRow;
use crate::limits::BATCH_ROWS_MAX;
use crate::metrics;

/// The result of storing a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredBatch {
    /// New rows.
    pub rows: usize,
    /// Entries that were already stored.
    pub duplicates: usize,
}

/// A dead letter as a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetterRow {
    /// The topic whose message it was.
    pub topic: String,
    /// The entry id of the dead letter.
    pub entry: EntryId,
    /// The identity it shares with its copies.
    pub identity: String,
    /// The id of its first entry, if known.
    pub original_id: Option<EntryId>,
    /// Number of failures.
    pub failures: u32,
    /// Why it became a dead letter.
    pub reason: String,
    /// When it became a dead letter.
    pub failed_at: Timestamp,
}

/// The result of a rebuild.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RebuildReport {
    /// Rows removed.
    pub removed: u64,
    /// Rows stored.
    pub stored: u64,
}

/// The name of the position of `events`.
const EVENTS: &str = "events";

impl AnalyticsStore {
    /// Stores a batch of events from a stream. Idempotent: an entry that is already stored is skipped.
    ///
    /// At most [`BATCH_ROWS_MAX`] rows. If it fails, nothing is stored.
    pub fn store(&self, events: &[TicketEventRow]) -> Result<StoredBatch> {
        if events.len() > BATCH_ROWS_MAX {
            let problem = format!("{} rows; the limit is {BATCH_ROWS_MAX}", events.len());
            return Err(AnalyticsError::invalid("a batch", problem));
        }
        let started = Instant::now();
        let result = self.write(|writer| store(writer, events));
        match &result {
            Ok(stored) => {
                metrics::stored(EVENTS, stored.rows, stored.duplicates, started.elapsed());
            }
            Err(_) => metrics::commit_failed(),
        }
        result
    }

    /// The last stored dead letter of a topic.
    pub fn last_dead_letter(&self, topic: &str) -> Result<Option<EntryId>> {
        self.write(|writer| position(&writer.connection, &dead_letter_source(topic)))
    }

    /// Stores dead letters of a topic, in the order of their entries, all of them after
    /// [`last_dead_letter`](Self::last_dead_letter). Copies of one dead letter are stored once. Returns the number of
    /// new rows.
    pub fn store_dead_letters(&self, topic: &str, letters: &[DeadLetterRow]) -> Result<usize> {
        let Some(last) = letters.iter().map(|letter| letter.entry).max() else { return Ok(0) };
        let started = Instant::now();
        let stored = self.write(|writer| {
            let mut seen = stored_copies(writer, topic, letters)?;
            let is_new = |letter: &&DeadLetterRow| seen.insert(letter.identity.clone());
            let fresh: Vec<&DeadLetterRow> = letters.iter().filter(is_new).collect();
            transact(writer, "store dead letters", |transaction| {
                append_dead_letters(transaction, &fresh)?;
                move_position(transaction, &dead_letter_source(topic), last)
            })?;
            Ok(fresh.len())
        })?;
        metrics::stored("dead_letters", stored, letters.len() - stored, started.elapsed());
        Ok(stored)
    }

    /// Replaces all events by those of `batches`; if a batch is an error, nothing changes. Stream positions are kept, and so are
    /// events with entries from `keep_from` on, which the source may not have yet.
    ///
    /// Each batch is one transaction on a second table, which takes the place of the first in the end. Other writes go on
    /// between batches; the last transaction copies only the events from `keep_from` on.
    pub fn rebuild(
        &self,
        keep_from: Timestamp,
        batches: impl IntoIterator<Item = Result<Vec<TicketEventRow>>>,
    ) -> Result<RebuildReport> {
        self.write(|writer| execute(writer, &schema::create_rebuild_table()))?;
        let rebuilt = self.fill_and_replace(keep_from, batches);
        if rebuilt.is_err() {
            // If this fails as well, opening the file removes the table.
            let _ = self.write(|writer| execute(writer, schema::DROP_REBUILD_TABLE));
        }
        rebuilt
    }

    fn fill_and_replace(
        &self,
        keep_from: Timestamp,
        batches: impl IntoIterator<Item = Result<Vec<TicketEventRow>>>,
    ) -> Result<RebuildReport> {
        let mut stored = 0;
        for batch in batches {
            let batch = batch?;
            let rows: Vec<&TicketEventRow> = batch.iter().collect();
            self.write(|writer| {
                transact(writer, REBUILD, |transaction| {
                    append(transaction, schema::REBUILD_TABLE, &rows)
                })
            })?;
            stored += batch.len() as u64;
        }
        let mut removed = 0;
        self.write(|writer| {
            transact(writer, REBUILD, |transaction| {
                let old = "SELECT count(*) FROM events WHERE entry_ms IS NULL OR entry_ms < ?";
                removed = transaction.query_row(old, [keep_from.as_millis()], |row| row.get(0))?;
                let keep = "INSERT INTO events_rebuild SELECT * FROM events WHERE entry_ms >= ?";
                transaction.execute(keep, [keep_from.as_millis()])?;
                transaction.execute_batch(&schema::replace_events())
            })
        })?;
        Ok(RebuildReport { removed, stored })
    }
}

/// The operation named in errors of a rebuild.
const REBUILD: &str = "rebuild its tables";

fn execute(writer: &StoreWriter<'_>, sql: &str) -> Result<()> {
    writer.connection.execute_batch(sql).map_err(|error| failed(REBUILD, error))
}

fn store(writer: &mut StoreWriter<'_>, events: &[TicketEventRow]) -> Result<StoredBatch> {
    let position = match *writer.position {
        Some(position) => position,
        None => position(&writer.connection, EVENTS)?.unwrap_or(EntryId::MIN),
    };
    let seen = stored_before(writer, events, position)?;
    let mut taken = HashSet::with_capacity(events.len());
    let fresh: Vec<&TicketEventRow> = events
        .iter()
        .filter(|event| {
            event.entry.is_none_or(|entry| !seen.contains(&entry) && taken.insert(entry))
        })
        .collect();
    let last = fresh.iter().filter_map(|event| event.entry).fold(position, EntryId::max);
    if !fresh.is_empty() {
        transact(writer, "store events", |transaction| {
            append(transaction, "events", &fresh)?;
            move_position(transaction, EVENTS, last)
        })?;
    }
    *writer.position = Some(last);
    Ok(StoredBatch { rows: fresh.len(), duplicates: events.len() - fresh.len() })
}

/// The entries that are already stored. Only entries up to the position are looked up; usually there are none.
fn stored_before(
    writer: &StoreWriter<'_>,
    events: &[TicketEventRow],
    position: EntryId,
) -> Result<HashSet<EntryId>> {
    let ids = events.iter().filter_map(|event| event.entry).filter(|entry| *entry <= position);
    let list: Vec<String> = ids.map(|id| format!("({}, {})", id.ms, id.seq)).collect();
    if list.is_empty() {
        return Ok(HashSet::new());
    }
    let sql_text = format!(
        "SELECT entry_ms, entry_seq FROM events SEMI JOIN (VALUES {}) AS asked (ms, seq) \
         ON entry_ms = ms AND entry_seq = seq",
        list.join(", ")
    );
    let read = || {
        let mut statement = writer.connection.prepare(&sql_text)?;
        let rows = statement.query_map([], |row| Ok(EntryId::new(row.get(0)?, row.get(1)?)))?;
        rows.collect::<duckdb::Result<HashSet<EntryId>>>()
    };
    read().map_err(|error| failed("look for events", error))
}

/// The identities of those dead letters that are already stored.
fn stored_copies(
    writer: &StoreWriter<'_>,
    topic: &str,
    letters: &[DeadLetterRow],
) -> Result<HashSet<String>> {
    let places = vec!["?"; letters.len()].join(", ");
    let sql_text =
        format!("SELECT identity FROM dead_letters WHERE topic = ? AND identity IN ({places})");
    let asked = letters.iter().map(|letter| letter.identity.as_str());
    let values = params_from_iter(std::iter::once(topic).chain(asked));
    let read = || {
        let mut statement = writer.connection.prepare(&sql_text)?;
        let rows = statement.query_map(values, |row| row.get::<_, String>(0))?;
        rows.collect::<duckdb::Result<HashSet<String>>>()
    };
    read().map_err(|error| failed("look for dead letters", error))
}

fn transact(
    writer: &mut StoreWriter<'_>,
    what: &'static str,
    body: impl FnOnce(&Transaction<'_>) -> duckdb::Result<()>,
) -> Result<()> {
    let run = || {
        // Rolled back on drop.
        let transaction = writer.connection.transaction()?;
        body(&transaction)?;
        transaction.commit()
    };
    run().map_err(|error| failed(what, error))
}

fn append_dead_letters(connection: &Connection, letters: &[&DeadLetterRow]) -> duckdb::Result<()> {
    let mut appender = connection.appender("dead_letters")?;
    for letter in letters {
        appender.append_row(params![
            letter.topic,
            letter.entry.ms,
            letter.entry.seq,
            letter.original_id.map(|id| id.to_string()),
            letter.failures,
            letter.reason,
            timestamp(letter.failed_at),
            letter.identity,
        ])?;
    }
    appender.flush()
}

fn append(connection: &Connection, table: &str, events: &[&TicketEventRow]) -> duckdb::Result<()> {
    let mut appender = connection.appender(table)?;
    for event in events {
        appender.append_row(params![
            event.entry.map(|entry| entry.ms),
            event.entry.map(|entry| entry.seq),
            event.event_type,
            event.ticket_id,
            event.message_id,
            event.user_id,
            event.content,
            timestamp(event.occurred_at),
            event.run.events,
            event.run.tokens_in,
            event.run.tokens_out,
            event.run.cost,
        ])?;
    }
    appender.flush()
}

fn move_position(connection: &Connection, source: &str, to: EntryId) -> duckdb::Result<()> {
    let sql = "INSERT OR REPLACE INTO positions VALUES (?, ?, ?)";
    connection.prepare_cached(sql)?.execute(params![source, to.ms, to.seq]).map(|_| ())
}

fn position(connection: &Connection, source: &str) -> Result<Option<EntryId>> {
    let sql = "SELECT entry_ms, entry_seq FROM positions WHERE source = ?";
    let found =
        connection.query_row(sql, [source], |row| Ok(EntryId::new(row.get(0)?, row.get(1)?)));
    match found {
        Ok(position) => Ok(Some(position)),
        Err(duckdb::Error::QueryReturnedNoRows) => Ok(None),
        Err(error) => Err(failed("read a position", error)),
    }
}

fn dead_letter_source(topic: &str) -> String {
    format!("dead letters of {topic}")
}

/// Clamps times after the year 292277, which DuckDB cannot store.
fn timestamp(at: Timestamp) -> Value {
    let ms = i64::try_from(at.as_millis()).unwrap_or(i64::MAX).min(i64::MAX / 1000);
    Value::Timestamp(TimeUnit::Millisecond, ms)
}
