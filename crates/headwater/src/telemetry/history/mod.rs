//! History of the most important metrics, without a second server: ten-second samples of the last hour in memory, and minutes of
//! all processes in SQL.
//!
//! Upstream: `server/run.rs` runs it in every process. Downstream: `series.rs` (what is recorded), `rows.rs` (the table), and
//! `api/history.rs`, which reads it; `topics.rs` is the history of single topics. Guarantees: memory is bounded; sampling never waits for the database: minutes wait in a bounded
//! buffer, and the oldest is dropped and counted if it is full. A time without samples is a gap. Gauges that could not be
//! updated are left out, so an outage of the database is a gap too.

pub(crate) mod rows;
pub(crate) mod series;
pub(crate) mod topics;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use headwater_issue::{IssueError, Store};
use headwater_stream::clock::{Clock, SystemClock};
use metrics::counter;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tracing::debug;

use crate::telemetry::history::rows::{HistoryRow, ProcessStart};
use crate::telemetry::history::series::{HistorySample, MetricTotals};

/// Rows of the history, by `result`: `written`, `dropped`.
const ROWS: &str = "headwater_history_rows_total";

/// Time between two samples.
pub(crate) const SAMPLE_EVERY: Duration = Duration::from_secs(10);
const SAMPLE_MS: u64 = 10_000;
pub(crate) const MINUTE_MS: u64 = 60_000;

/// Samples in memory: one hour.
const SAMPLES_MAX: usize = 360;

/// Minutes that wait for the database: one hour.
const UNWRITTEN_MAX: usize = 60;

/// Rows of one transaction.
const WRITE_BATCH: usize = 20;

/// Time for a transaction, and until a failed one is repeated.
const WRITE_MAX: Duration = Duration::from_secs(5);
const RETRY_EVERY: Duration = Duration::from_secs(5);

/// Time for the last row of a process that stops.
const FLUSH_MAX: Duration = Duration::from_secs(1);

/// How old gauges may be to count as up to date; they are set every five seconds.
const GAUGES_FRESH: Duration = Duration::from_secs(15);

/// Maximum rows of one read: 48 hours of 17 processes.
const READ_ROWS_MAX: usize = 50_000;

/// Time for a read.
const READ_MAX: Duration = Duration::from_secs(2);

/// How long and how many results of reads are kept, because every viewer of the console asks for the same.
const KEPT_FOR: Duration = Duration::from_secs(5);
const KEPT_MAX: usize = 8;

const _: () = assert!(SAMPLE_EVERY.as_millis() == SAMPLE_MS as u128);
const _: () = assert!(MINUTE_MS.is_multiple_of(SAMPLE_MS));

/// The history of one process.
pub(crate) struct MetricsHistory {
    process: String,
    start: ProcessStart,
    /// Whether minutes are stored.
    is_stored: bool,
    state: Mutex<HistoryState>,
    has_rows: Notify,
}

struct HistoryState {
    /// When the metrics were read last, and their values.
    last: (Instant, MetricTotals),
    /// When the gauges were set.
    gauges_at: Option<Instant>,
    /// By number of ten seconds since 1970, ascending.
    samples: VecDeque<(u64, HistorySample)>,
    /// The minute that has not ended, by number of minutes since 1970.
    minute: Option<(u64, HistorySample)>,
    /// Set until it is part of a row.
    start: Option<ProcessStart>,
    unwritten: VecDeque<HistoryRow>,
    kept: VecDeque<(HistoryRange, Instant, Arc<HistoryRead>)>,
}

/// Which steps to read, in milliseconds since 1970. `from` and `to` are multiples of `step_ms`, which is one of ten seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HistoryRange {
    pub(crate) from_ms: u64,
    pub(crate) to_ms: u64,
    pub(crate) step_ms: u64,
}

impl HistoryRange {
    /// Whether minutes are enough. Otherwise only this process knows.
    pub(crate) fn is_of_all_processes(self) -> bool {
        self.step_ms.is_multiple_of(MINUTE_MS)
    }

    /// The beginning of the step of a time, if the range contains it.
    fn step_of(self, ms: u64) -> Option<u64> {
        (self.from_ms..self.to_ms).contains(&ms).then(|| ms - ms % self.step_ms)
    }
}

/// What a step consists of.
#[derive(Debug, Default)]
pub(crate) struct HistoryPoint {
    pub(crate) sum: HistorySample,
    /// Samples of each process.
    by_process: BTreeMap<String, u64>,
}

impl HistoryPoint {
    fn add(&mut self, process: &str, sample: &HistorySample) {
        self.sum.merge(sample);
        *self.by_process.entry(process.to_owned()).or_default() += sample.samples;
    }

    pub(crate) fn processes(&self) -> usize {
        self.by_process.len()
    }

    /// How much of the step samples cover, of the process with most of them.
    pub(crate) fn covered(&self) -> Duration {
        let samples = self.by_process.values().max().copied().unwrap_or(0);
        SAMPLE_EVERY.saturating_mul(u32::try_from(samples).unwrap_or(u32::MAX))
    }
}

/// A part of the history.
#[derive(Debug, Default)]
pub(crate) struct HistoryRead {
    /// By the beginning of the step, in milliseconds since 1970. A step without samples is absent.
    pub(crate) points: BTreeMap<u64, HistoryPoint>,
    /// Process and start, oldest first.
    pub(crate) starts: Vec<(String, ProcessStart)>,
    /// Why a part is missing.
    pub(crate) problem: Option<&'static str>,
}

impl MetricsHistory {
    /// Of a process that starts now. `keep`: how long minutes are stored; `None` for not at all.
    pub(crate) fn new(process: &str, keep: Option<Duration>) -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let start = ProcessStart { at: SystemClock.now(), version };
        Self {
            process: process.to_owned(),
            is_stored: keep.is_some(),
            state: Mutex::new(HistoryState {
                last: (Instant::now(), MetricTotals::default()),
                gauges_at: None,
                samples: VecDeque::new(),
                minute: None,
                start: Some(start.clone()),
                unwritten: VecDeque::new(),
                kept: VecDeque::new(),
            }),
            start,
            has_rows: Notify::new(),
        }
    }

    /// For a command without a server: it has no samples of its own.
    pub(crate) fn of_command() -> Self {
        Self::new("", None)
    }

    fn state(&self) -> MutexGuard<'_, HistoryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says that the gauges were set.
    pub(crate) fn note_gauges(&self) {
        self.state().gauges_at = Some(Instant::now());
    }

    /// Samples and writes until it is dropped.
    pub(crate) async fn run(&self, metrics: &PrometheusHandle, store: &dyn Store) {
        tokio::join!(self.take_samples(metrics), self.write_rows(store));
    }

    /// Stores the minute that has not ended. For a process that stops.
    pub(crate) async fn flush(&self, metrics: &PrometheusHandle, store: &dyn Store) {
        let totals = MetricTotals::parse(&metrics.render());
        self.record(SystemClock.now().as_millis() / SAMPLE_MS, Instant::now(), totals);
        {
            let state = &mut *self.state();
            let minute = state.minute.take();
            self.finish_minute(state, minute);
        }
        if timeout(FLUSH_MAX, self.write_batch(store)).await.is_err() {
            debug!("the last minute of the history was not stored in time");
        }
    }

    async fn take_samples(&self, metrics: &PrometheusHandle) {
        loop {
            // At the end of every ten seconds of the wall clock, so that the steps of all processes agree.
            let now = SystemClock.now().as_millis();
            sleep(Duration::from_millis(SAMPLE_MS - now % SAMPLE_MS)).await;
            let totals = MetricTotals::parse(&metrics.render());
            // Timers and the wall clock differ a little.
            let ended = (SystemClock.now().as_millis() + SAMPLE_MS / 2) / SAMPLE_MS;
            self.record(ended.saturating_sub(1), Instant::now(), totals);
        }
    }

    /// Records what happened since the last call as the sample of the ten seconds `slot`.
    fn record(&self, slot: u64, at: Instant, totals: MetricTotals) {
        let state = &mut *self.state();
        let (last_at, last) = std::mem::replace(&mut state.last, (at, totals));
        // A process that was suspended cannot tell when things happened.
        if at.duration_since(last_at) > SAMPLE_EVERY * 2 {
            return;
        }
        let mut sample = state.last.1.since(&last);
        if state.gauges_at.is_none_or(|set| at.duration_since(set) > GAUGES_FRESH) {
            sample.forget_gauges();
        }
        // The clock was set back: what it says of later times is wrong.
        while state.samples.back().is_some_and(|(newest, _)| *newest > slot) {
            state.samples.pop_back();
        }
        match state.samples.back_mut() {
            Some((newest, known)) if *newest == slot => {
                sample.samples = 0;
                known.merge(&sample);
            }
            _ => state.samples.push_back((slot, sample.clone())),
        }
        if state.samples.len() > SAMPLES_MAX {
            state.samples.pop_front();
        }
        let minute = slot * SAMPLE_MS / MINUTE_MS;
        match &mut state.minute {
            Some((current, known)) if *current == minute => known.merge(&sample),
            other => {
                let ended = other.replace((minute, sample));
                self.finish_minute(state, ended);
            }
        }
        if ((slot + 1) * SAMPLE_MS).is_multiple_of(MINUTE_MS) {
            let ended = state.minute.take();
            self.finish_minute(state, ended);
        }
    }

    /// Queues a minute for the database.
    fn finish_minute(&self, state: &mut HistoryState, minute: Option<(u64, HistorySample)>) {
        let Some((minute, sample)) = minute.filter(|_| self.is_stored) else { return };
        let start = state.start.take();
        let process = self.process.clone();
        state.unwritten.push_back(HistoryRow { minute, process, sample, start });
        if state.unwritten.len() > UNWRITTEN_MAX {
            let dropped = state.unwritten.pop_front();
            counter!(ROWS, "result" => "dropped").increment(1);
            // The start of the process is not forgotten with its first minute.
            if let (Some(start), Some(next)) =
                (dropped.and_then(|row| row.start), state.unwritten.front_mut())
            {
                next.start = Some(start);
            }
        }
        self.has_rows.notify_one();
    }

    async fn write_rows(&self, store: &dyn Store) {
        loop {
            self.has_rows.notified().await;
            while !self.write_batch(store).await {
                sleep(RETRY_EVERY).await;
            }
        }
    }

    /// Writes the oldest rows. Returns whether it worked. A row that is being written may be dropped meanwhile.
    async fn write_batch(&self, store: &dyn Store) -> bool {
        loop {
            let batch: Vec<_> = self.state().unwritten.iter().take(WRITE_BATCH).cloned().collect();
            if batch.is_empty() {
                return true;
            }
            match timeout(WRITE_MAX, rows::write(store, &batch)).await {
                Ok(Ok(())) => {
                    counter!(ROWS, "result" => "written").increment(batch.len() as u64);
                    self.state().unwritten.retain(|row| !batch.contains(row));
                }
                Ok(Err(error)) => {
                    debug!(%error, "history of metrics not stored, retrying");
                    return false;
                }
                Err(_) => return false,
            }
        }
    }

    /// Reads a part of the history: minutes of all processes from the database, and what is not there yet from the memory of
    /// this one. Without the database it is what this process knows.
    pub(crate) async fn read(
        &self,
        store: &Arc<dyn Store>,
        range: HistoryRange,
    ) -> Arc<HistoryRead> {
        let is_kept = |(kept, at, _): &&(HistoryRange, Instant, Arc<HistoryRead>)| {
            *kept == range && at.elapsed() < KEPT_FOR
        };
        if let Some((_, _, read)) = self.state().kept.iter().find(is_kept) {
            return Arc::clone(read);
        }
        let (rows, problem) = match range.is_of_all_processes() {
            false => (Vec::new(), None),
            true => match read_rows(store, range).await {
                Some(Ok(rows)) if rows.len() >= READ_ROWS_MAX => {
                    (rows, Some("there are too many rows; the oldest were left out"))
                }
                Some(Ok(rows)) => (rows, None),
                _ => {
                    (Vec::new(), Some("the database did not answer; only this process is included"))
                }
            },
        };
        let read = Arc::new(self.combine(range, rows, problem));
        if read.problem.is_none() {
            let mut state = self.state();
            state.kept.truncate(KEPT_MAX - 1);
            state.kept.push_front((range, Instant::now(), Arc::clone(&read)));
        }
        read
    }

    fn combine(
        &self,
        range: HistoryRange,
        rows: Vec<HistoryRow>,
        problem: Option<&'static str>,
    ) -> HistoryRead {
        let mut read = HistoryRead { problem, ..HistoryRead::default() };
        let mut starts = BTreeMap::new();
        // Minutes of this process that the database has.
        let mut stored = HashSet::new();
        for row in rows {
            if row.process == self.process {
                stored.insert(row.minute);
            }
            if let Some(step) = range.step_of(row.minute * MINUTE_MS) {
                read.points.entry(step).or_default().add(&row.process, &row.sample);
            }
            if let Some(start) = row.start {
                starts.insert(row.process, start);
            }
        }
        for (slot, sample) in &self.state().samples {
            let at = slot * SAMPLE_MS;
            if let Some(step) = range.step_of(at)
                && !stored.contains(&(at / MINUTE_MS))
            {
                read.points.entry(step).or_default().add(&self.process, sample);
            }
        }
        if !self.process.is_empty() {
            starts.insert(self.process.clone(), self.start.clone());
        }
        let is_within = |(_, start): &(String, ProcessStart)| {
            (range.from_ms..range.to_ms + range.step_ms).contains(&start.at.as_millis())
        };
        read.starts = starts.into_iter().filter(is_within).collect();
        read.starts.sort_by_key(|(_, start)| start.at);
        read
    }
}

/// `None` if the database did not answer in time.
async fn read_rows(
    store: &Arc<dyn Store>,
    range: HistoryRange,
) -> Option<Result<Vec<HistoryRow>, IssueError>> {
    let store = Arc::clone(store);
    let (from, to) = (range.from_ms / MINUTE_MS, range.to_ms / MINUTE_MS);
    // On a task of its own: a query is not dropped half-way.
    let reading =
        tokio::spawn(async move { rows::read(store.as_ref(), from, to, READ_ROWS_MAX).await });
    timeout(READ_MAX, reading).await.ok()?.ok()
}

#[cfg(test)]
mod tests;
