//! Tests of the spool: recovery, limits, owners and writes whose result is unknown.

use headwater_stream::clock::SystemClock;
use tempfile::TempDir;

use super::*;

fn stream() -> StreamName {
    StreamName::new("wink:events:s").unwrap()
}

fn event(number: usize) -> Fields {
    Fields::new([(EVENT_ID, number.to_string()), ("payload", "x".repeat(100))])
}

fn config(directory: &TempDir) -> SpoolConfig {
    SpoolConfig { max_bytes: 8192, ..SpoolConfig::new(directory.path().join("spool")) }
}

async fn open(config: SpoolConfig, owner: &str) -> Result<Spool> {
    Spool::open(config, owner, Arc::new(SystemClock)).await
}

async fn add(spool: &Spool, numbers: std::ops::Range<usize>) -> Result<()> {
    let events: Vec<Fields> = numbers.map(event).collect();
    spool.add(&stream(), events.iter(), false).await
}

/// The numbers of the events that are not drained.
async fn numbers(spool: &Spool) -> Vec<usize> {
    let entries = spool.peek(1000, u64::MAX).await.unwrap();
    let events = entries.iter().map(|entry| SpooledEvent::read(entry).unwrap());
    let number = |event: SpooledEvent| {
        assert_eq!((&event.stream, event.fields.len()), (&stream(), 2));
        event.event_id.as_str().parse().unwrap()
    };
    events.map(number).collect()
}

#[tokio::test]
async fn events_survive_reopening_in_order_and_removed_ones_do_not() {
    let directory = tempfile::tempdir().unwrap();
    let spool = open(config(&directory), "tests").await.unwrap();
    add(&spool, 0..4).await.unwrap();
    spool.add(&stream(), [event(4)].iter(), true).await.unwrap();
    let oldest = spool.peek(2, u64::MAX).await.unwrap();
    spool.remove(&oldest).await;
    let before = spool.health();
    assert_eq!((before.events, numbers(&spool).await), (3, vec![2, 3, 4]));
    spool.close().await;

    let spool = open(config(&directory), "tests").await.unwrap();
    assert_eq!(spool.health(), before);
    let entries = spool.peek(10, u64::MAX).await.unwrap();
    let attempted = |entry: &Entry| SpooledEvent::read(entry).unwrap().attempted;
    assert_eq!(entries.iter().map(attempted).collect::<Vec<_>>(), [false, false, true]);
    assert_eq!(spool.peek(10, 1).await.unwrap().len(), 1, "about one byte is one event");
    spool.remove(&entries).await;
    assert_eq!((spool.health().events, spool.health().bytes), (0, 0));
}

#[tokio::test]
async fn a_spool_of_another_bus_or_in_use_is_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let spool = open(config(&directory), "tests").await.unwrap();
    add(&spool, 0..1).await.unwrap();
    let error = open(config(&directory), "tests").await.err().unwrap();
    let in_use = |error: &BusError| matches!(error, BusError::Spool { source, .. } if matches!(**source, StreamError::Locked { .. }));
    assert!(in_use(&error) && !error.is_transient(), "{error}");
    spool.close().await;
    let error = open(config(&directory), "others").await.err().unwrap();
    assert!(error.to_string().contains("belongs to bus `tests`, not to `others`"), "{error}");
    let spool = open(config(&directory), "tests").await.unwrap();
    assert_eq!(numbers(&spool).await, [0]);
}

#[tokio::test]
async fn a_full_spool_rejects_events_until_some_are_removed() {
    let directory = tempfile::tempdir().unwrap();
    let spool = open(config(&directory), "tests").await.unwrap();
    let mut count = 0;
    let error = loop {
        // Two at once: a batch is added completely or not at all.
        match add(&spool, count..count + 2).await {
            Ok(()) => count += 2,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, BusError::SpoolFull { .. }) && error.is_transient(), "{error}");
    let health = spool.health();
    assert_eq!((health.events, health.max_bytes), (count, 8192));
    assert!(health.bytes > 4096 && health.bytes <= 8192, "{health:?}");
    assert_eq!(numbers(&spool).await, (0..count).collect::<Vec<_>>());
    let oldest = spool.peek(2, u64::MAX).await.unwrap();
    spool.remove(&oldest).await;
    add(&spool, count..count + 2).await.unwrap();
    assert_eq!(numbers(&spool).await, (2..count + 2).collect::<Vec<_>>());
}

#[tokio::test]
async fn concurrently_added_events_are_kept_in_the_order_of_each_caller() {
    let directory = tempfile::tempdir().unwrap();
    let config = SpoolConfig { max_bytes: MIB, ..config(&directory) };
    let spool = Arc::new(open(config, "tests").await.unwrap());
    let callers = (0..8).map(|caller| {
        let spool = Arc::clone(&spool);
        tokio::spawn(async move {
            for number in 0..20 {
                let number = caller * 100 + number;
                add(&spool, number..number + 1).await.unwrap();
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.unwrap();
    }
    let all = numbers(&spool).await;
    assert_eq!(all.len(), 160);
    for caller in 0..8 {
        let own = all.iter().filter(|number| **number / 100 == caller);
        assert!(own.is_sorted(), "{all:?}");
    }
}

#[tokio::test]
async fn events_of_a_dropped_caller_count_until_they_are_removed() {
    let directory = tempfile::tempdir().unwrap();
    let spool = open(config(&directory), "tests").await.unwrap();
    {
        let mut adding = std::pin::pin!(add(&spool, 0..1));
        assert!(futures_util::poll!(&mut adding).is_pending(), "it waits for the disk");
    }
    assert!(spool.has_pending());
    assert_eq!(numbers(&spool).await, [0]);
    let entries = spool.peek(10, u64::MAX).await.unwrap();
    spool.remove(&entries).await;
    assert!(!spool.has_pending());
}

#[tokio::test]
async fn events_of_a_failed_write_count_until_the_spool_is_found_empty() {
    let directory = tempfile::tempdir().unwrap();
    let config = SpoolConfig { max_bytes: MIB, ..config(&directory) };
    let spool = open(config, "tests").await.unwrap();
    let too_many = (0..=headwater_stream::limits::FIELDS_MAX).map(|n| (n.to_string(), "x"));
    let error = spool.add(&stream(), [Fields::new(too_many)].iter(), false).await.unwrap_err();
    assert!(matches!(error, BusError::Spool { .. }), "{error}");
    assert!(spool.has_pending());
    {
        // While another event is being added, the spool is not considered empty.
        let _adding = spool.begin_add(&[event(1)]).unwrap();
        assert!(numbers(&spool).await.is_empty() && spool.has_pending());
    }
    assert!(numbers(&spool).await.is_empty() && !spool.has_pending());
}

#[tokio::test]
async fn rejected_events_are_kept_once_until_they_are_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let spool = open(config(&directory), "tests").await.unwrap();
    add(&spool, 0..3).await.unwrap();
    let entries = spool.peek(10, u64::MAX).await.unwrap();
    // As after a crash: rejected events are rejected again, together with later ones.
    spool.reject(entries[..1].to_vec()).await.unwrap();
    spool.reject(entries[..2].to_vec()).await.unwrap();
    spool.close().await;
    let spool = open(config(&directory), "tests").await.unwrap();
    assert_eq!((spool.health().rejected, spool.health().events), (2, 3));
    let rejected = spool.rejected(10).await.unwrap();
    let ids = rejected.iter().map(|event| event.event_id.as_str()).collect::<Vec<_>>();
    assert_eq!(ids, ["0", "1"]);
    assert!(spool.delete_rejected(rejected[0].id).await.unwrap());
    assert!(!spool.delete_rejected(rejected[0].id).await.unwrap());
    assert_eq!((spool.health().rejected, spool.rejected(10).await.unwrap().len()), (1, 1));
}

#[tokio::test]
async fn newer_events_wait_while_the_drain_makes_progress_but_not_forever() {
    let directory = tempfile::tempdir().unwrap();
    let spool = open(config(&directory), "tests").await.unwrap();
    tokio::time::pause();
    let mut throttle = Box::pin(spool.throttle());
    assert!(futures_util::poll!(&mut throttle).is_ready());
    spool.set_draining(true);
    let mut throttle = Box::pin(spool.throttle());
    assert!(futures_util::poll!(&mut throttle).is_pending());
    spool.set_draining(false);
    assert!(futures_util::poll!(&mut throttle).is_ready());
    spool.set_draining(true);
    spool.throttle().await;
}

#[test]
fn a_directory_is_usable_in_a_url() {
    for (directory, is_valid) in [("memory", true), ("a b", true), ("a?b", false)] {
        let url = SpoolConfig::new(directory).url();
        assert_eq!(url.is_ok(), is_valid, "{directory}");
        assert!(url.is_err() || url.unwrap().starts_with("embedded:/"));
    }
}
