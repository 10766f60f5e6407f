//! The files of the embedded backend: incomplete ends, damage, crashes during compaction, two processes.
//! Full disks: `embedded_full_disk.rs`.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_stream::*;
use headwater_testkit::Child;

const FILE_HEADER_BYTES: usize = 24;

fn stream(name: &str) -> StreamName {
    StreamName::new(name).unwrap()
}

fn url(directory: &Path, parameters: &str) -> String {
    format!("embedded:{}?{parameters}", directory.display())
}

async fn open(directory: &Path, parameters: &str) -> Result<Arc<dyn Backend>> {
    connect(&url(directory, parameters), &Options::default()).await
}

fn fields(number: usize) -> Fields {
    Fields::new([("number", number.to_string()), ("more", "x".repeat(number % 40))])
}

async fn append(backend: &dyn Backend, number: usize) -> EntryId {
    backend.append(&stream("s"), &[fields(number)], &Retention::KEEP_ALL).await.unwrap()[0]
}

async fn entries(backend: &dyn Backend) -> Vec<Entry> {
    backend.range(&stream("s"), Range::first(10_000)).await.unwrap()
}

/// The contents of the directory, by file name.
fn files(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|file| file.unwrap().path())
        .map(|path| {
            (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap())
        })
        .collect();
    files.sort();
    files
}

fn write_files(directory: &Path, files: &[(String, Vec<u8>)]) {
    fs::create_dir_all(directory).unwrap();
    for (name, bytes) in files {
        fs::write(directory.join(name), bytes).unwrap();
    }
}

/// A directory as a killed process leaves it: nine appends, one frame each. Returns the end of each frame.
async fn nine_appends(directory: &Path) -> (Vec<Entry>, Vec<usize>) {
    let source = tempfile::tempdir().unwrap();
    let backend = open(source.path(), "").await.unwrap();
    let mut ends = Vec::new();
    for number in 0..9 {
        append(&*backend, number).await;
        ends.push(fs::metadata(source.path().join("00000001.log")).unwrap().len() as usize);
    }
    let all = entries(&*backend).await;
    // Copied while it is open: this is what a crash would leave.
    write_files(directory, &files(source.path()));
    (all, ends)
}

#[tokio::test]
async fn an_end_torn_at_any_byte_is_truncated_and_everything_before_it_is_restored() {
    let original = tempfile::tempdir().unwrap();
    let (all, ends) = nine_appends(original.path()).await;
    let log = fs::read(original.path().join("00000001.log")).unwrap();
    assert_eq!(log.len(), ends[8]);

    for length in 0..log.len() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("00000001.log"), &log[..length]).unwrap();
        let backend = open(directory.path(), "").await.unwrap();
        let whole = ends.iter().filter(|end| **end <= length).count();
        assert_eq!(entries(&*backend).await, all[..whole], "torn at {length}");
        // It continues from there, and the next start finds both.
        let id = append(&*backend, 99).await;
        drop(backend);
        let backend = open(directory.path(), "").await.unwrap();
        let found = entries(&*backend).await;
        assert_eq!(found[..whole], all[..whole]);
        assert_eq!(found[whole..].iter().map(|entry| entry.id).collect::<Vec<_>>(), [id]);
    }
}

#[tokio::test]
async fn garbage_or_zeros_after_the_last_frame_are_truncated() {
    let original = tempfile::tempdir().unwrap();
    let (all, _) = nine_appends(original.path()).await;
    let log = fs::read(original.path().join("00000001.log")).unwrap();
    // The last one looks like the header of a frame that is longer than the file.
    let absurd = [&log[FILE_HEADER_BYTES..FILE_HEADER_BYTES + 4], &[0xff; 60]].concat();
    for garbage in [vec![0; 10_000], vec![0xff; 100], log[FILE_HEADER_BYTES..].to_vec(), absurd] {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("00000001.log"), [&log[..], &garbage].concat()).unwrap();
        let backend = open(directory.path(), "").await.unwrap();
        assert_eq!(entries(&*backend).await, all);
        assert_eq!(fact(&*backend, "cut_bytes"), garbage.len() as u64);
    }
}

#[tokio::test]
async fn a_changed_byte_anywhere_is_an_error_with_its_offset_or_a_truncated_end() {
    let original = tempfile::tempdir().unwrap();
    let (all, ends) = nine_appends(original.path()).await;
    let log = fs::read(original.path().join("00000001.log")).unwrap();

    for place in 0..log.len() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("00000001.log");
        let mut changed = log.clone();
        changed[place] ^= 0x10;
        fs::write(&path, &changed).unwrap();
        let frame_begins = ends.iter().rev().find(|end| **end <= place).copied();
        let frame_begins =
            frame_begins.unwrap_or(if place < FILE_HEADER_BYTES { 0 } else { FILE_HEADER_BYTES });
        match open(directory.path(), "").await {
            // It is unknown whether the last frame was ever complete.
            Ok(backend) => {
                assert!(place >= ends[7], "byte {place} changed undetected");
                assert_eq!(entries(&*backend).await, all[..8], "byte {place}");
            }
            Err(StreamError::Corrupt { file, offset, .. }) => {
                assert!(place < ends[7], "byte {place}");
                assert_eq!(
                    (Path::new(&file), offset),
                    (&*path, frame_begins as u64),
                    "byte {place}"
                );
                assert_eq!(fs::read(&path).unwrap(), changed, "the file is unchanged");
            }
            Err(error) => panic!("byte {place}: {error}"),
        }
    }
}

#[tokio::test]
async fn after_a_clean_close_a_changed_byte_in_any_frame_with_data_is_an_error() {
    let original = tempfile::tempdir().unwrap();
    let backend = open(original.path(), "sync=interval").await.unwrap();
    for number in 0..5 {
        append(&*backend, number).await;
    }
    let all = entries(&*backend).await;
    backend.close().await.unwrap();
    let log = fs::read(original.path().join("00000001.log")).unwrap();
    const CLOSING_FRAME_BYTES: usize = 24;

    for place in 0..log.len() {
        let directory = tempfile::tempdir().unwrap();
        let mut changed = log.clone();
        changed[place] ^= 1;
        fs::write(directory.path().join("00000001.log"), &changed).unwrap();
        match open(directory.path(), "").await {
            Err(StreamError::Corrupt { .. }) => assert!(place < log.len() - CLOSING_FRAME_BYTES),
            Ok(backend) => {
                assert!(place >= log.len() - CLOSING_FRAME_BYTES, "byte {place}");
                assert_eq!(entries(&*backend).await, all);
            }
            Err(error) => panic!("byte {place}: {error}"),
        }
    }
}

#[tokio::test]
async fn a_power_failure_that_drops_unsynced_frames_in_any_order_leaves_a_valid_prefix() {
    // Given frames of which none declares an earlier one synced.
    let original = tempfile::tempdir().unwrap();
    let backend = open(original.path(), "sync=interval").await.unwrap();
    let mut ends = vec![FILE_HEADER_BYTES];
    for number in 0..6 {
        append(&*backend, number).await;
        ends.push(fs::metadata(original.path().join("00000001.log")).unwrap().len() as usize);
    }
    let all = entries(&*backend).await;
    let log = fs::read(original.path().join("00000001.log")).unwrap();

    // When the disk has lost one of them and kept the later ones.
    for lost in 0..6 {
        let directory = tempfile::tempdir().unwrap();
        let mut torn = log.clone();
        torn[ends[lost]..ends[lost + 1]].fill(0);
        fs::write(directory.path().join("00000001.log"), &torn).unwrap();

        // Then everything before it is restored, and nothing else.
        let backend = open(directory.path(), "").await.unwrap();
        assert_eq!(entries(&*backend).await, all[..lost]);
    }
}

/// A directory with a snapshot and two logs. Returns all entries.
async fn with_snapshot(directory: &Path) -> Vec<Entry> {
    let backend = open(directory, "compact_bytes=2000").await.unwrap();
    for number in 0..100 {
        append(&*backend, number).await;
    }
    let all = entries(&*backend).await;
    // Closing ends a snapshot that is being written.
    let is_snapshot = |name: &str| name.starts_with("snapshot-") && !name.ends_with(".tmp");
    let has_snapshot = || {
        let mut names = fs::read_dir(directory).unwrap().map(|file| file.unwrap().file_name());
        names.any(|name| is_snapshot(name.to_str().unwrap()))
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while !has_snapshot() {
        assert!(Instant::now() < deadline, "no snapshot is written");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    backend.close().await.unwrap();
    all
}

#[tokio::test]
async fn a_changed_byte_in_a_snapshot_is_an_error() {
    let original = tempfile::tempdir().unwrap();
    with_snapshot(original.path()).await;
    let all_files = files(original.path());
    let (name, bytes) = all_files.iter().find(|(name, _)| name.starts_with("snapshot-")).unwrap();
    for place in (0..bytes.len()).step_by(3) {
        let directory = tempfile::tempdir().unwrap();
        write_files(directory.path(), &all_files);
        let mut changed = bytes.clone();
        changed[place] ^= 0x80;
        fs::write(directory.path().join(name), &changed).unwrap();
        let error =
            open(directory.path(), "").await.err().unwrap_or_else(|| panic!("byte {place}"));
        let StreamError::Corrupt { file, .. } = &error else { panic!("byte {place}: {error}") };
        assert!(file.ends_with(name.as_str()));
    }
    for length in (0..bytes.len()).step_by(7) {
        let directory = tempfile::tempdir().unwrap();
        write_files(directory.path(), &all_files);
        fs::write(directory.path().join(name), &bytes[..length]).unwrap();
        let opened = open(directory.path(), "").await;
        assert!(matches!(opened, Err(StreamError::Corrupt { .. })), "cut at {length}");
    }
}

#[tokio::test]
async fn a_damaged_log_that_is_not_the_last_is_an_error_even_at_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let (all, ends) = nine_appends(directory.path()).await;
    drop(open(directory.path(), "").await.unwrap());
    let first = fs::read(directory.path().join("00000001.log")).unwrap();

    // A second log, as after a rotation.
    let other = tempfile::tempdir().unwrap();
    let backend = open(other.path(), "compact_bytes=1").await.unwrap();
    append(&*backend, 1).await;
    backend.close().await.unwrap();
    let second = fs::read(other.path().join("00000002.log")).unwrap();

    let whole = tempfile::tempdir().unwrap();
    let two = |first: &[u8]| {
        [("00000001.log".to_owned(), first.to_vec()), ("00000002.log".to_owned(), second.clone())]
    };
    write_files(whole.path(), &two(&first));
    assert_eq!(entries(&*open(whole.path(), "").await.unwrap()).await, all);

    let torn = tempfile::tempdir().unwrap();
    write_files(torn.path(), &two(&first[..ends[8] - 1]));
    let error = open(torn.path(), "").await.err().unwrap();
    let StreamError::Corrupt { offset, .. } = error else { panic!("{error}") };
    assert_eq!(offset as usize, ends[7]);
}

#[tokio::test]
async fn a_missing_log_is_an_error_that_names_it() {
    let original = tempfile::tempdir().unwrap();
    with_snapshot(original.path()).await;
    // Opening removes the log before the snapshot, if that was closed too early for it: without the log after it, such a directory is
    // one whose repair was interrupted.
    open(original.path(), "").await.unwrap().close().await.unwrap();
    let all_files = files(original.path());
    let numbers = all_files.iter().filter_map(|(name, _)| name.strip_prefix("snapshot-"));
    let after_snapshot = format!("{}.log", numbers.max().unwrap());

    // Without the log after the snapshot.
    let directory = tempfile::tempdir().unwrap();
    write_files(directory.path(), &all_files);
    fs::remove_file(directory.path().join(&after_snapshot)).unwrap();
    let error = open(directory.path(), "").await.err().unwrap();
    assert!(
        matches!(&error, StreamError::Corrupt { file, .. } if file.ends_with(&after_snapshot)),
        "{error}"
    );

    // Without the snapshot before the log.
    let directory = tempfile::tempdir().unwrap();
    write_files(directory.path(), &all_files);
    for (name, _) in all_files.iter().filter(|(name, _)| name.starts_with("snapshot-")) {
        fs::remove_file(directory.path().join(name)).unwrap();
    }
    let error = open(directory.path(), "").await.err().unwrap();
    assert!(
        matches!(&error, StreamError::Corrupt { file, .. } if file.ends_with("00000001.log")),
        "{error}"
    );
}

#[tokio::test]
async fn a_foreign_file_or_an_unsupported_version_is_rejected_with_a_clear_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("00000001.log");
    fs::write(&path, "2026-01-01 12:00:00 something happened\n").unwrap();
    let error = open(directory.path(), "").await.err().unwrap().to_string();
    assert!(error.contains("not a Headwater file"), "{error}");

    // A header of version 2 with a valid checksum.
    let mut header = b"HEADWLOG\x02\0\0\0\x01\0\0\0\0\0\0\0".to_vec();
    let checksum = crc32(&header);
    header.extend(checksum.to_le_bytes());
    fs::write(&path, &header).unwrap();
    let error = open(directory.path(), "").await.err().unwrap();
    assert!(!error.is_transient(), "a retry does not help: {error}");
    let error = error.to_string();
    assert!(error.contains("version 2") && error.contains("00000001.log"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), header, "the file is unchanged");
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg())
        })
    };
    !bytes.iter().fold(!0, step)
}

#[tokio::test]
async fn other_files_in_the_directory_are_ignored() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("README"), "mine").unwrap();
    fs::write(directory.path().join("1.log"), "mine, too").unwrap();
    let backend = open(directory.path(), "compact_bytes=1").await.unwrap();
    append(&*backend, 1).await;
    backend.close().await.unwrap();
    assert_eq!(entries(&*open(directory.path(), "").await.unwrap()).await.len(), 1);
    assert_eq!(fs::read(directory.path().join("README")).unwrap(), b"mine");
    assert_eq!(fs::read(directory.path().join("1.log")).unwrap(), b"mine, too");
}

#[tokio::test]
async fn a_crash_at_any_point_of_a_compaction_loses_nothing_and_leaves_no_obsolete_files() {
    let original = tempfile::tempdir().unwrap();
    let all = with_snapshot(original.path()).await;
    let all_files = files(original.path());
    let number =
        |name: &str| name.trim_matches(|c: char| !c.is_ascii_digit()).parse::<u64>().unwrap();
    let snapshot = all_files.iter().find(|(name, _)| name.starts_with("snapshot-")).unwrap();
    let before = number(&snapshot.0);

    // The snapshot exists, and the files it replaces are not all removed yet.
    let directory = tempfile::tempdir().unwrap();
    write_files(directory.path(), &all_files);
    let old_log = format!("{:08}.log", before - 1);
    let old_snapshot = format!("snapshot-{:08}", before - 1);
    fs::write(directory.path().join(&old_log), "whatever was in it").unwrap();
    fs::write(directory.path().join(&old_snapshot), "whatever was in it").unwrap();
    // The next snapshot was started.
    let unfinished = format!("snapshot-{:08}.tmp", before + 1);
    fs::write(directory.path().join(&unfinished), &snapshot.1[..snapshot.1.len() / 2]).unwrap();
    // Its log was created without its header.
    let last = all_files
        .iter()
        .filter(|(name, _)| name.ends_with(".log"))
        .map(|(name, _)| number(name))
        .max()
        .unwrap();
    fs::write(directory.path().join(format!("{:08}.log", last + 1)), "HEADW").unwrap();

    let backend = open(directory.path(), "").await.unwrap();
    assert_eq!(entries(&*backend).await, all);
    for gone in [&old_log, &old_snapshot, &unfinished] {
        assert!(!directory.path().join(gone).exists(), "{gone}");
    }
    let id = append(&*backend, 100).await;
    backend.close().await.unwrap();
    let backend = open(directory.path(), "").await.unwrap();
    assert_eq!(entries(&*backend).await.last().unwrap().id, id);
}

#[tokio::test]
async fn a_crash_between_the_snapshot_of_a_repair_and_its_new_log_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let backend = open(directory.path(), "compact_bytes=1").await.unwrap();
    append(&*backend, 1).await;
    while fact(&*backend, "compactions") == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    backend.close().await.unwrap();
    let name = |number: u64| directory.path().join(format!("{number:08}.log"));
    assert_eq!(entries(&*open(directory.path(), "").await.unwrap()).await.len(), 1);

    // The log before the snapshot still exists, torn by a failed sync, and the next one does not exist yet.
    fs::write(name(1), "torn").unwrap();
    fs::remove_file(name(2)).unwrap();

    let backend = open(directory.path(), "").await.unwrap();
    assert_eq!(entries(&*backend).await.len(), 1);
    append(&*backend, 2).await;
    drop(backend);
    assert!(!name(1).exists());
    assert_eq!(entries(&*open(directory.path(), "").await.unwrap()).await.len(), 2);
}

#[tokio::test]
async fn compaction_runs_concurrently_with_calls_and_bounds_the_file_size() {
    let directory = tempfile::tempdir().unwrap();
    let backend = open(directory.path(), "sync=interval&compact_bytes=100000").await.unwrap();
    let compactions = || fact(&*backend, "compactions");
    let mut last = Vec::new();
    for number in 0.. {
        let entries = vec![fields(number); 10];
        last = backend.append(&stream("s"), &entries, &Retention::max_len(50)).await.unwrap();
        if compactions() >= 3 {
            break;
        }
    }
    backend.close().await.unwrap();
    let names: Vec<String> = files(directory.path()).into_iter().map(|(name, _)| name).collect();
    let logs: Vec<&String> = names.iter().filter(|name| name.ends_with(".log")).collect();
    assert!(logs.len() <= 2 && logs[0].as_str() > "00000003.log", "{names:?}");
    let found = entries(&*open(directory.path(), "").await.unwrap()).await;
    assert_eq!((found.len(), found.last().unwrap().id), (50, last[9]));
}

fn fact(backend: &dyn Backend, name: &str) -> u64 {
    let facts = backend.describe().facts;
    facts.iter().find(|(fact, _)| *fact == name).unwrap().1.parse().unwrap()
}

#[tokio::test]
async fn a_directory_that_is_open_cannot_be_opened_again_until_it_is_closed_or_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let backend = open(directory.path(), "").await.unwrap();
    let again = open(directory.path(), "").await;
    assert!(matches!(again, Err(StreamError::Locked { .. })));
    backend.close().await.unwrap();
    let second = open(directory.path(), "").await.unwrap();
    drop(second);
    open(directory.path(), "").await.unwrap();
    drop(backend);
}

const DIRECTORY: &str = "HEADWATER_TEST_DIRECTORY";

#[tokio::test]
async fn a_directory_that_another_process_has_open_is_locked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let child =
        Child::spawn_self("child_that_holds_a_directory_open", &[(DIRECTORY, path)]).unwrap();
    child.line_after("opened", Duration::from_secs(20)).unwrap();
    let error = open(directory.path(), "").await.err().unwrap();
    assert!(matches!(&error, StreamError::Locked { directory } if directory == path), "{error}");
    child.kill9().unwrap();
    open(directory.path(), "").await.unwrap();
}

#[tokio::test]
#[ignore = "run by a_directory_that_another_process_has_open_is_locked"]
async fn child_that_holds_a_directory_open() {
    let Ok(path) = std::env::var(DIRECTORY) else { return };
    let _backend = open(Path::new(&path), "").await.unwrap();
    println!("\nopened");
    tokio::time::sleep(Duration::from_secs(60)).await;
}

#[tokio::test]
async fn a_closed_backend_fails_calls_and_wakes_blocked_ones() {
    let directory = tempfile::tempdir().unwrap();
    let backend = open(directory.path(), "").await.unwrap();
    append(&*backend, 1).await;
    let group = GroupName::new("g").unwrap();
    let consumer = ConsumerName::new("c").unwrap();
    let mut reader = backend.reader(&group, &consumer).await.unwrap();
    reader.read(&[stream("s")], 10, Duration::ZERO).await.unwrap();
    let waiting =
        tokio::spawn(async move { reader.read(&[stream("s")], 10, Duration::from_secs(60)).await });
    let other = Arc::clone(&backend);
    let due = tokio::spawn(async move {
        other.wait_until_due(&DelayName::new("d").unwrap(), Duration::from_secs(60)).await
    });
    tokio::time::sleep(Duration::from_millis(50)).await;

    backend.close().await.unwrap();

    for error in [
        waiting.await.unwrap().err().unwrap(),
        due.await.unwrap().err().unwrap(),
        backend.append(&stream("s"), &[fields(1)], &Retention::KEEP_ALL).await.err().unwrap(),
        backend.now().await.err().unwrap(),
        backend.stats(&stream("s")).await.err().unwrap(),
    ] {
        assert!(
            matches!(&error, StreamError::Unavailable { problem, .. } if problem.contains("closed")),
            "{error}"
        );
    }
    backend.close().await.unwrap();
}

#[tokio::test]
async fn a_directory_that_cannot_be_created_is_an_error_with_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let error = open(&file.join("below"), "").await.err().unwrap();
    assert!(
        matches!(&error, StreamError::Unavailable { problem, .. } if problem.contains("file/below")),
        "{error}"
    );
}
