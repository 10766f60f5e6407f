//! Tests of the spool: recovery, corruption, limits and disk faults.

use std::fs;

use headwater_stream::clock::Timestamp;
use headwater_stream::{Fields, StreamName};
use proptest::prelude::*;
use tempfile::TempDir;

use super::fault_injection::Operation;
use super::*;
use crate::name::EventId;

const MIB: u64 = 1024 * 1024;

fn event(number: usize) -> SpooledEvent {
    SpooledEvent {
        stream: StreamName::new(format!("wink:events:{}", number % 3)).unwrap(),
        event_id: EventId::new(format!("event-{number}")).unwrap(),
        fields: Fields::new([
            ("type", "a.B".to_owned()),
            ("payload", format!("{{\"n\":{number}}}")),
        ]),
        attempted: number.is_multiple_of(2),
        spooled_at: Timestamp::from_millis(1_767_225_600_000 + number as u64),
    }
}

fn events(numbers: std::ops::Range<usize>) -> Vec<SpooledEvent> {
    numbers.map(event).collect()
}

fn open(directory: &TempDir, max_bytes: u64) -> Result<SpoolFile, SpoolError> {
    SpoolFile::open(&directory.path().join("spool"), "wink:default", max_bytes)
}

fn peek_all(file: &mut SpoolFile) -> Vec<SpooledEvent> {
    file.peek(usize::MAX, u64::MAX).unwrap()
}

#[test]
fn events_survive_reopening_in_order_and_acknowledged_ones_do_not() {
    let directory = tempfile::tempdir().unwrap();
    let mut file = open(&directory, MIB).unwrap();
    file.append(&events(0..10)).unwrap();
    file.acknowledge(3);
    file.append(&events(10..12)).unwrap();
    file.acknowledge(1);
    assert_eq!(peek_all(&mut file), events(4..12));
    drop(file);

    let mut file = open(&directory, MIB).unwrap();
    assert_eq!(file.pending(), 8);
    assert_eq!(peek_all(&mut file), events(4..12));
    assert_eq!(file.peek(2, u64::MAX).unwrap(), events(4..6));
    assert_eq!(file.peek(5, 1).unwrap(), events(4..5), "at least one, however large");

    file.acknowledge(8);
    file.append(&events(20..21)).unwrap();
    drop(file);
    assert_eq!(peek_all(&mut open(&directory, MIB).unwrap()), events(20..21));
}

#[test]
fn a_torn_write_is_truncated_at_any_offset() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("spool");
    let mut file = open(&directory, MIB).unwrap();
    file.append(&events(0..2)).unwrap();
    let kept = file.bytes() as usize;
    file.append(&events(2..3)).unwrap();
    drop(file);
    let original = fs::read(&path).unwrap();

    for end in kept..original.len() {
        for zeros in [0, 50] {
            let mut torn = original[..end].to_vec();
            torn.extend(vec![0; zeros]);
            fs::write(&path, &torn).unwrap();
            let mut file = open(&directory, MIB).unwrap();
            assert_eq!(peek_all(&mut file), events(0..2), "cut at {end}, {zeros} zeros");
            // New events can be appended.
            file.append(&events(7..8)).unwrap();
            drop(file);
            let expected = [events(0..2), events(7..8)].concat();
            assert_eq!(peek_all(&mut open(&directory, MIB).unwrap()), expected);
        }
    }
}

#[test]
fn a_torn_header_is_an_empty_spool() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("spool");
    drop(open(&directory, MIB).unwrap());
    let head = fs::read(&path).unwrap();
    for end in 0..head.len() {
        fs::write(&path, &head[..end]).unwrap();
        assert_eq!(open(&directory, MIB).unwrap().pending(), 0, "cut at {end}");
    }
}

#[test]
fn corruption_before_the_end_is_an_error_with_its_offset_and_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("spool");
    let mut file = open(&directory, MIB).unwrap();
    let first = file.bytes() as usize;
    file.append(&events(0..1)).unwrap();
    let second = file.bytes() as usize;
    file.append(&events(1..3)).unwrap();
    drop(file);
    let original = fs::read(&path).unwrap();
    for at in 0..second {
        let mut damaged = original.clone();
        damaged[at] ^= 0x41;
        fs::write(&path, &damaged).unwrap();
        match open(&directory, MIB) {
            Err(SpoolError::Corrupt { offset, .. }) if at < first => assert_eq!(offset, 0),
            Err(SpoolError::Corrupt { offset, .. }) => assert_eq!(offset, first as u64),
            // A length that points past the end looks like a torn write; nothing else may.
            Ok(_) => assert!((first..first + 4).contains(&at), "byte {at} went unnoticed"),
            Err(other) => panic!("byte {at}: {other}"),
        }
    }
}

#[test]
fn a_spool_of_another_bus_or_in_use_is_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("spool");
    let file = open(&directory, MIB).unwrap();
    let second = open(&directory, MIB);
    assert!(matches!(second, Err(SpoolError::InUse { .. })));
    drop(file);
    let before = fs::read(&path).unwrap();
    let other = SpoolFile::open(&path, "wink:other", MIB);
    assert!(matches!(other, Err(SpoolError::WrongOwner { owner, .. }) if owner == "wink:default"));
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[test]
fn a_full_spool_rejects_events_until_some_are_acknowledged() {
    let directory = tempfile::tempdir().unwrap();
    let mut file = open(&directory, 4096).unwrap();
    let mut added = 0;
    while file.append(&events(added..added + 1)).is_ok() {
        added += 1;
    }
    let error = file.append(&events(added..added + 1)).unwrap_err();
    assert!(matches!(error, SpoolError::Full { limit: 4096, .. }), "{error}");
    assert_eq!(peek_all(&mut file), events(0..added));

    // A batch is added completely or not at all.
    file.acknowledge(1);
    assert!(file.append(&events(added..added + 10)).is_err());
    file.acknowledge(added / 2);
    file.append(&events(added..added + 3)).unwrap();
    let expected = events(1 + added / 2..added + 3);
    assert_eq!(peek_all(&mut file), expected);
    drop(file);
    assert_eq!(peek_all(&mut open(&directory, 4096).unwrap()), expected);
}

#[tokio::test]
async fn concurrently_added_events_are_kept_in_the_order_of_each_caller() {
    let directory = tempfile::tempdir().unwrap();
    let config = SpoolConfig::new(directory.path().join("deeper/spool"));
    let spool = Arc::new(Spool::open(config, "wink:default").await.unwrap());
    assert!(!spool.has_pending());
    let callers: Vec<_> = (0..8)
        .map(|caller| {
            let spool = Arc::clone(&spool);
            tokio::spawn(async move {
                for number in 0..20 {
                    spool
                        .add(events(caller * 100 + number..caller * 100 + number + 1))
                        .await
                        .unwrap();
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    assert!(spool.has_pending());
    let all = spool.peek(1000, MIB).await.unwrap();
    for caller in 0..8 {
        let mine: Vec<String> = all
            .iter()
            .map(|event| event.event_id.to_string())
            .filter(|id| {
                id.strip_prefix("event-").unwrap().parse::<usize>().unwrap() / 100 == caller
            })
            .collect();
        let expected: Vec<String> =
            (0..20).map(|number| format!("event-{}", caller * 100 + number)).collect();
        assert_eq!(mine, expected);
    }
    spool.acknowledge(160).await.unwrap();
    assert!(!spool.has_pending());
}

#[tokio::test]
async fn events_that_do_not_fit_do_not_affect_other_callers() {
    let directory = tempfile::tempdir().unwrap();
    let config =
        SpoolConfig { max_bytes: 4096, ..SpoolConfig::new(directory.path().join("spool")) };
    let spool = Spool::open(config, "wink:default").await.unwrap();
    let (too_many, few) = tokio::join!(spool.add(events(0..100)), spool.add(events(100..102)));
    assert!(matches!(too_many, Err(SpoolError::Full { .. })));
    few.unwrap();
    assert_eq!(spool.peek(1000, MIB).await.unwrap(), events(100..102));
    assert_eq!(spool.health().events, 2);
}

#[tokio::test]
async fn newer_events_are_throttled_while_the_drain_makes_progress_and_only_then() {
    let directory = tempfile::tempdir().unwrap();
    let config = SpoolConfig::new(directory.path().join("spool"));
    let spool = Arc::new(Spool::open(config, "wink:default").await.unwrap());
    spool.add(events(0..10)).await.unwrap();
    let throttle = spool.drain_throttle();
    // The drain is stalled: callers do not wait.
    spool.throttle().await;

    // The drain makes progress: a caller waits for one step.
    throttle.advanced(5);
    let mut waiting = throttled(&spool);
    assert!(!is_done(&mut waiting).await);
    throttle.advanced(5);
    waiting.await.unwrap();

    // Almost empty: a caller waits until the spool is empty.
    spool.acknowledge(6).await.unwrap();
    throttle.advanced(5);
    let mut waiting = throttled(&spool);
    throttle.advanced(0);
    assert!(!is_done(&mut waiting).await);
    spool.acknowledge(4).await.unwrap();
    throttle.advanced(5);
    waiting.await.unwrap();

    // The drain stalls or is dropped: callers stop waiting.
    for is_dropped in [false, true] {
        spool.add(events(0..1)).await.unwrap();
        let throttle = spool.drain_throttle();
        throttle.advanced(5);
        let mut waiting = throttled(&spool);
        assert!(!is_done(&mut waiting).await);
        if is_dropped {
            drop(throttle);
        } else {
            throttle.stalled();
        }
        waiting.await.unwrap();
    }
}

impl Spool {
    /// Makes the next disk operations fail.
    fn inject(&self, operations: &[Operation]) {
        self.shared.lock().as_mut().unwrap().faults.inject(operations);
    }
}

#[tokio::test]
async fn a_failed_marker_write_blocks_no_caller() {
    let directory = tempfile::tempdir().unwrap();
    let config = SpoolConfig::new(directory.path().join("spool"));
    for faults in [&[Operation::Write][..], &[Operation::Write, Operation::SetLength]] {
        let spool = Arc::new(Spool::open(config.clone(), "wink:default").await.unwrap());
        spool.add(events(0..10)).await.unwrap();
        // The disk is full when the marker is written.
        spool.inject(faults);
        spool.acknowledge(6).await.unwrap();
        assert_eq!(spool.health().events, 4);
        assert_eq!(spool.peek(100, MIB).await.unwrap(), events(6..10));
        // The next marker includes it.
        spool.acknowledge(1).await.unwrap();
        spool.add(events(10..11)).await.unwrap();
        spool.close().await;
        let spool = Arc::new(Spool::open(config.clone(), "wink:default").await.unwrap());
        assert_eq!(spool.peek(100, MIB).await.unwrap(), events(7..11));
        // The spool is empty: callers do not wait.
        let throttle = spool.drain_throttle();
        spool.acknowledge(4).await.unwrap();
        throttle.advanced(100);
        assert!(!spool.has_pending());
        spool.throttle().await;
        spool.close().await;
    }
}

#[tokio::test]
async fn a_disk_error_while_the_spool_is_emptied_blocks_no_caller() {
    let directory = tempfile::tempdir().unwrap();
    let config = SpoolConfig::new(directory.path().join("spool"));
    for faults in [
        &[Operation::SetLength][..],
        &[Operation::Write],
        // Still failing at the next use; adding events makes two attempts.
        &[Operation::Write; 3],
    ] {
        let spool = Spool::open(config.clone(), "wink:default").await.unwrap();
        spool.add(events(0..10)).await.unwrap();
        spool.inject(faults);
        spool.acknowledge(10).await.unwrap();
        // Events are stored in their streams directly again.
        assert!(!spool.has_pending());
        assert_eq!(spool.peek(100, MIB).await.unwrap(), []);
        if faults.len() > 1 {
            let rejected = spool.add(events(20..22)).await;
            assert!(matches!(rejected, Err(SpoolError::Disk { .. })));
            assert!(!spool.has_pending());
        }
        // The spool works again as soon as the disk does.
        spool.add(events(10..12)).await.unwrap();
        spool.close().await;
        let spool = Spool::open(config.clone(), "wink:default").await.unwrap();
        assert_eq!(spool.peek(100, MIB).await.unwrap(), events(10..12));
        spool.acknowledge(2).await.unwrap();
        spool.close().await;
    }
}

#[tokio::test]
async fn events_of_a_dropped_caller_count_until_they_are_written_or_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let config =
        SpoolConfig { max_bytes: 4096, ..SpoolConfig::new(directory.path().join("spool")) };
    let spool = Spool::open(config, "wink:default").await.unwrap();
    // Events that fit and events that do not, dropped before or after the write starts.
    for (numbers, polls) in [(0..2, 1), (2..200, 1), (0..2, 2), (2..200, 2), (2..200, 3)] {
        {
            let mut adding = std::pin::pin!(spool.add(events(numbers)));
            for _ in 0..polls {
                if futures_util::poll!(&mut adding).is_ready() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        }
        // This one is processed after them.
        let _ = spool.add(events(300..500)).await;
        let waiting = spool.peek(1000, MIB).await.unwrap().len();
        assert_eq!(spool.health().events, waiting);
    }
}

#[test]
fn a_disk_error_during_a_rewrite_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut file = open(&directory, 4096).unwrap();
    let mut added = 0;
    while file.append(&events(added..added + 1)).is_ok() {
        added += 1;
    }
    file.acknowledge(added / 2);
    file.faults.inject(&[Operation::SyncDirectory]);
    let rejected = file.append(&events(added..added + 3)).unwrap_err();
    assert!(matches!(rejected, SpoolError::Disk { .. }), "{rejected}");
    // The new file has the name, and it is locked.
    assert!(matches!(open(&directory, 4096), Err(SpoolError::InUse { .. })));
    file.append(&events(added..added + 3)).unwrap();
    drop(file);
    let expected = events(added / 2..added + 3);
    assert_eq!(peek_all(&mut open(&directory, 4096).unwrap()), expected);
}

#[test]
fn markers_never_exceed_the_size_limit() {
    let directory = tempfile::tempdir().unwrap();
    let mut file = open(&directory, 4096).unwrap();
    let mut added = 0;
    while file.append(&events(added..added + 1)).is_ok() {
        added += 1;
    }
    for done in 1..added {
        file.acknowledge(1);
        assert!(file.bytes() <= 4096, "{} bytes after {done}", file.bytes());
        assert_eq!(peek_all(&mut file), events(done..added));
    }
    drop(file);
    assert_eq!(peek_all(&mut open(&directory, 4096).unwrap()), events(added - 1..added));
}

#[tokio::test]
async fn rejected_events_are_kept_once_and_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let config =
        SpoolConfig { max_bytes: 4096, ..SpoolConfig::new(directory.path().join("spool")) };
    let spool = Spool::open(config.clone(), "wink:default").await.unwrap();
    // As after a crash: rejected events are rejected again, together with later ones.
    spool.reject(events(0..3)).await.unwrap();
    spool.reject(events(0..5)).await.unwrap();
    assert_eq!(spool.rejected(100).await.unwrap(), events(0..5));
    assert_eq!(spool.health().rejected, 5);
    let error = spool.reject(events(5..100)).await.unwrap_err();
    assert!(matches!(error, SpoolError::Full { .. }), "{error}");
    assert_eq!(spool.rejected(100).await.unwrap(), events(0..5));
    assert_eq!(spool.health().rejected, 5);
    spool.close().await;
    let spool = Spool::open(config, "wink:default").await.unwrap();
    assert_eq!(spool.health().rejected, 5);
}

#[test]
fn spools_that_differ_only_in_their_extension_do_not_interfere() {
    let directory = tempfile::tempdir().unwrap();
    let open = |name: &str| SpoolFile::open(&directory.path().join(name), "wink:default", 4096);
    let mut one = open("bus.one").unwrap();
    // The path that a careless replacement of the first would use.
    let other = open("bus.new").unwrap();
    let mut added = 0;
    while one.append(&events(added..added + 1)).is_ok() {
        added += 1;
    }
    one.acknowledge(added / 2);
    one.append(&events(added..added + 3)).unwrap();
    assert_eq!(peek_all(&mut one), events(added / 2..added + 3));
    drop((one, other));
    assert_eq!(open("bus.new").unwrap().pending(), 0);
}

fn throttled(spool: &Arc<Spool>) -> tokio::task::JoinHandle<()> {
    let spool = Arc::clone(spool);
    tokio::spawn(async move { spool.throttle().await })
}

async fn is_done(task: &mut tokio::task::JoinHandle<()>) -> bool {
    tokio::time::timeout(std::time::Duration::from_millis(50), task).await.is_ok()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_spool_is_a_queue_over_any_sequence_of_steps(steps in prop::collection::vec((0..6u8, 1..12usize), 1..250)) {
        let directory = tempfile::tempdir().unwrap();
        let mut file = open(&directory, 4096).unwrap();
        let (mut front, mut back) = (0, 0);
        for (step, count) in steps {
            match step {
                0 | 1 => {
                    if file.append(&events(back..back + count)).is_ok() {
                        back += count;
                    }
                }
                // Mostly small steps: each writes a marker.
                2..5 => {
                    let count = if step == 2 { count } else { 1 };
                    file.acknowledge(count);
                    front = back.min(front + count);
                }
                _ => {
                    drop(file);
                    file = open(&directory, 4096).unwrap();
                }
            }
            prop_assert_eq!(peek_all(&mut file), events(front..back));
            prop_assert!(file.bytes() <= 4096, "{} bytes", file.bytes());
            prop_assert_eq!(fs::metadata(directory.path().join("spool")).unwrap().len(), file.bytes());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn arbitrary_bytes_do_not_cause_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), keep_head in any::<bool>()) {
        let directory = tempfile::tempdir().unwrap();
        drop(open(&directory, MIB).unwrap());
        let path = directory.path().join("spool");
        let mut content = if keep_head { fs::read(&path).unwrap() } else { Vec::new() };
        content.extend(&bytes);
        fs::write(&path, &content).unwrap();
        let _ = open(&directory, MIB);
    }
}

#[tokio::test]
async fn a_closed_spool_can_be_reopened_while_a_child_process_is_being_spawned() {
    let directory = tempfile::tempdir().unwrap();
    let config = SpoolConfig::new(directory.path().join("spool"));
    let spool = Spool::open(config.clone(), "tests").await.unwrap();
    // A child process has all files of its parent until it executes its program.
    let inherited = spool.shared.lock().as_ref().unwrap().file.try_clone().unwrap();
    spool.close().await;
    Spool::open(config, "tests").await.unwrap().close().await;
    drop(inherited);
}
