//! Tests of the history: times are given, so nothing waits.

use headwater_issue::{StoreOptions, connect};

use super::*;

const MINUTE: u64 = 29_000_000;
/// The first ten seconds of [`MINUTE`].
const SLOT: u64 = MINUTE * 6;

fn totals(events: u64) -> MetricTotals {
    MetricTotals::parse(&format!(
        "headwater_events_recorded_total{{result=\"recorded\"}} {events}\nheadwater_issues{{status=\"queued\"}} {events}\n"
    ))
}

fn history() -> (MetricsHistory, Instant) {
    let history = MetricsHistory::new("a", Some(Duration::from_secs(3600)));
    let began = history.state().last.0;
    (history, began)
}

/// The events of each step.
fn events(read: &HistoryRead) -> Vec<(u64, u64)> {
    let points = read.points.iter();
    points.map(|(at, point)| (*at, point.sum.value("events").as_u64().unwrap())).collect()
}

fn range(from_slot: u64, to_slot: u64, step_ms: u64) -> HistoryRange {
    HistoryRange { from_ms: from_slot * SAMPLE_MS, to_ms: to_slot * SAMPLE_MS, step_ms }
}

#[test]
fn samples_become_minutes_and_memory_is_bounded() {
    let (history, began) = history();
    for number in 0..1000 {
        let at = began + SAMPLE_EVERY * u32::try_from(number + 1).unwrap();
        history.record(SLOT + number, at, totals(number + 1));
    }
    let state = history.state();
    assert_eq!(state.samples.len(), SAMPLES_MAX);
    assert_eq!(state.samples.back().unwrap().0, SLOT + 999);
    assert_eq!(state.unwritten.len(), UNWRITTEN_MAX);
    let row = state.unwritten.front().unwrap();
    assert_eq!((row.sample.samples, row.sample.value("events")), (6, 6.into()));
    assert_eq!(row.start, Some(history.start.clone()), "the mark outlives dropped minutes");
    assert!(state.unwritten.iter().skip(1).all(|row| row.start.is_none()));
    drop(state);

    let read = history.combine(range(SLOT + 990, SLOT + 1000, SAMPLE_MS), Vec::new(), None);
    assert_eq!(events(&read).len(), 10);
    assert_eq!(read.points.first_key_value().unwrap().1.covered(), SAMPLE_EVERY);
}

#[test]
fn a_suspended_process_leaves_a_gap_and_stale_gauges_are_left_out() {
    let (history, began) = history();
    history.state().gauges_at = Some(began);
    history.record(SLOT, began + SAMPLE_EVERY, totals(1));
    // The next sample comes after a minute, and the one after that in time.
    history.record(SLOT + 7, began + SAMPLE_EVERY * 8, totals(100));
    history.record(SLOT + 8, began + SAMPLE_EVERY * 9, totals(103));
    let read = history.combine(range(SLOT, SLOT + 12, SAMPLE_MS), Vec::new(), None);
    assert_eq!(events(&read), [(SLOT * SAMPLE_MS, 1), ((SLOT + 8) * SAMPLE_MS, 3)]);
    let queued: Vec<_> = read.points.values().map(|point| point.sum.value("queued")).collect();
    assert_eq!(queued, [serde_json::json!(1), serde_json::Value::Null]);
}

#[test]
fn a_clock_that_is_set_back_discards_later_samples() {
    let (history, began) = history();
    history.record(SLOT, began + SAMPLE_EVERY, totals(1));
    history.record(SLOT + 1, began + SAMPLE_EVERY * 2, totals(3));
    history.record(SLOT, began + SAMPLE_EVERY * 3, totals(7));
    let read = history.combine(range(SLOT, SLOT + 12, SAMPLE_MS), Vec::new(), None);
    assert_eq!(events(&read), [(SLOT * SAMPLE_MS, 5)]);
}

#[test]
fn processes_are_added_and_a_stored_minute_is_not_counted_twice() {
    let (history, began) = history();
    for number in 0..6 {
        let at = began + SAMPLE_EVERY * u32::try_from(number + 1).unwrap();
        history.record(SLOT + number, at, totals(number + 1));
    }
    let own = history.state().unwritten.front().unwrap().clone();
    let other = HistoryRow { process: "b".to_owned(), start: None, ..own.clone() };
    let minute = range(SLOT, SLOT + 6, MINUTE_MS);
    let both = history.combine(minute, vec![other.clone()], None);
    assert_eq!(events(&both), [(SLOT * SAMPLE_MS, 12)]);
    let point = both.points.values().next().unwrap();
    assert_eq!((point.processes(), point.covered()), (2, Duration::from_secs(60)));
    let stored = history.combine(minute, vec![own, other], None);
    assert_eq!(events(&stored), [(SLOT * SAMPLE_MS, 12)]);
}

#[tokio::test]
async fn without_the_database_minutes_wait_and_are_written_later() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", directory.path().join("a.db").display());
    let closed = connect(&url, &StoreOptions::default()).await.unwrap();
    crate::tickets::migrate(closed.as_ref()).await.unwrap();
    closed.close().await;
    let (history, began) = history();
    for number in 0..12 {
        let at = began + SAMPLE_EVERY * u32::try_from(number + 1).unwrap();
        history.record(SLOT + number, at, totals(number + 1));
    }
    assert!(!history.write_batch(closed.as_ref()).await);
    assert_eq!(history.state().unwritten.len(), 2);
    let two_minutes = range(SLOT, SLOT + 12, MINUTE_MS);
    let read = history.read(&closed, two_minutes).await;
    assert_eq!(events(&read).len(), 2, "memory is still readable");
    assert!(read.problem.is_some());

    let store = connect(&url, &StoreOptions::default()).await.unwrap();
    assert!(history.write_batch(store.as_ref()).await);
    assert_eq!(history.state().unwritten.len(), 0);
    // Another process reads both.
    let reader = MetricsHistory::of_command();
    let read = reader.read(&store, two_minutes).await;
    assert_eq!(events(&read), [(SLOT * SAMPLE_MS, 6), ((SLOT + 6) * SAMPLE_MS, 6)]);
    store.close().await;
}
