//! A disk that is full for a while: calls fail with `Full`, and when there is space again the same backend
//! recovers.
//!
//! Two kinds of disk. On a tmpfs the write fails. On an ext4 on full storage (thin provisioning) the write
//! succeeds and the sync fails, after which the page cache cannot be trusted. Or the sync succeeds and the data is not stored: a
//! loop device confirms a write of which its file took only the beginning. `HEADWATER_SEED` sets the times of the kills.
#![cfg(feature = "embedded")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use headwater_stream::*;
use headwater_testkit::Child;

const LOCATION: &str = "HEADWATER_TEST_LOCATION";
const CHILD: &str = "child_that_fills_the_disk";
const LIMIT: Duration = Duration::from_secs(60);

/// Size of the small disk, and of the ballast whose removal frees space.
const DISK_BYTES: usize = 8 * 1024 * 1024;
const BALLAST_BYTES: usize = 5 * 1024 * 1024;
/// The storage allocates pages of this size.
const PAGE_BYTES: usize = 4096;

/// Ends every line that the child prints, so that a line truncated by the kill is not mistaken for a
/// complete one.
const END: &str = " .";

fn stream(name: &str) -> StreamName {
    StreamName::new(name).unwrap()
}

fn group() -> GroupName {
    GroupName::new("g").unwrap()
}

async fn open(directory: &Path, parameters: &str) -> Result<Arc<dyn Backend>> {
    connect(&format!("embedded:{}?{parameters}", directory.display()), &Options::default()).await
}

fn run(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}

/// A small file system, if this process may mount one.
struct SmallDisk {
    /// The underlying storage: a tmpfs.
    storage: PathBuf,
    /// Where the files are: the storage itself, or an ext4 image in it that is larger than the storage.
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl SmallDisk {
    /// A disk on which writes fail when it is full.
    fn mount(bytes: usize) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let storage = directory.path().join("storage");
        fs::create_dir(&storage).unwrap();
        let size = format!("size={bytes}");
        let path = storage.clone();
        let disk = Self { storage, path, _directory: directory };
        run("mount", &["-t", "tmpfs", "-o", &size, "tmpfs", disk.storage.to_str().unwrap()])
            .then_some(disk)
    }

    /// A disk on which syncs fail when its storage is full.
    fn mount_thin(bytes: usize) -> Option<Self> {
        let mut disk = Self::mount(bytes)?;
        let image = disk.image();
        fs::File::create(&image).unwrap().set_len(4 * bytes as u64).unwrap();
        let is_made =
            run("mkfs.ext4", &["-q", "-F", "-O", "^has_journal", image.to_str().unwrap()]);
        disk.path = disk.storage.with_file_name("thin");
        fs::create_dir(&disk.path).unwrap();
        (is_made && disk.mount_image()).then_some(disk)
    }

    fn image(&self) -> PathBuf {
        self.storage.join("image")
    }

    fn is_thin(&self) -> bool {
        self.path != self.storage
    }

    fn mount_image(&self) -> bool {
        run("mount", &["-o", "loop", self.image().to_str().unwrap(), self.path.to_str().unwrap()])
    }

    /// Drops what is only in memory, as a restart of the machine would.
    fn remount(&self) {
        assert!(run("umount", &[self.path.to_str().unwrap()]));
        assert!(self.mount_image());
    }

    fn add_ballast(&self) {
        fs::write(self.storage.join("ballast"), vec![1; BALLAST_BYTES]).unwrap();
    }

    /// Fills the storage except for this many bytes.
    fn add_ballast_except(&self, bytes: usize) {
        let mut ballast = fs::File::create(self.storage.join("ballast")).unwrap();
        let mut length = 0;
        while ballast.write_all(&[1; PAGE_BYTES]).is_ok() {
            length += PAGE_BYTES;
        }
        ballast.set_len((length - bytes) as u64).unwrap();
    }

    fn remove_ballast(&self) {
        fs::remove_file(self.storage.join("ballast")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        for path in [&self.path, &self.storage] {
            let _ = Command::new("umount").arg("-l").arg(path).output();
        }
    }
}

#[tokio::test]
async fn a_full_disk_fails_all_calls_with_full_and_loses_no_acknowledged_data() {
    let Some(disk) = SmallDisk::mount(1024 * 1024) else {
        eprintln!("skipped: mounting a small file system needs privileges");
        return;
    };
    let backend = open(&disk.path.join("d"), "").await.unwrap();
    let mut acknowledged = Vec::new();
    let (group, consumer) = (GroupName::new("g").unwrap(), ConsumerName::new("c").unwrap());
    let mut reader = backend.reader(&group, &consumer).await.unwrap();
    let waiting =
        tokio::spawn(
            async move { reader.read(&[stream("another")], 1, Duration::from_secs(60)).await },
        );
    let error = loop {
        let entry = Fields::new([("data", vec![1; 10_000])]);
        match backend.append(&stream("s"), &[entry], &Retention::KEEP_ALL).await {
            Ok(ids) => acknowledged.extend(ids),
            Err(error) => break error,
        }
    };
    assert!(
        matches!(&error, StreamError::Full { problem } if problem.contains("00000001.log")),
        "{error}"
    );
    // All other calls fail too.
    let later = backend.stats(&stream("s")).await.err().unwrap();
    assert!(matches!(later, StreamError::Full { .. }), "{later}");
    let waited = tokio::time::timeout(Duration::from_secs(20), waiting).await.unwrap();
    assert!(
        matches!(waited.unwrap(), Err(StreamError::Full { .. })),
        "a blocked reader gets the error"
    );
    assert!(backend.close().await.is_err());
    drop(backend);

    let backend = open(&disk.path.join("d"), "").await.unwrap();
    let found: Vec<EntryId> =
        all_entries(&*backend).await.into_iter().map(|entry| entry.id).collect();
    assert_eq!(found[..acknowledged.len()], acknowledged);
}

async fn all_entries(backend: &dyn Backend) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    loop {
        let from = entries.last().map_or(EntryId::MIN, |entry| entry.id.next());
        let range = Range { from, to: EntryId::MAX, direction: Direction::Forward, count: 1000 };
        let page = backend.range(&stream("s"), range).await.unwrap();
        if page.is_empty() {
            return entries;
        }
        entries.extend(page);
    }
}

fn report(line: &str) {
    println!("\n{line}{END}");
}

fn fields(number: u64, bytes: usize) -> Fields {
    Fields::new([("n", number.to_string()), ("padding", "x".repeat(bytes))])
}

fn number_of(fields: &Fields) -> u64 {
    std::str::from_utf8(fields.get("n").unwrap()).unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run and killed by the other tests"]
async fn child_that_fills_the_disk() {
    let Ok(location) = env::var(LOCATION) else { return };
    let backend = connect(&format!("embedded:{location}"), &Options::default()).await.unwrap();
    let numbers = Arc::new(AtomicU64::new(0));
    let was_full = Arc::new(AtomicBool::new(false));
    // What is written before a sync reports the full disk must fit into it when there is space again.
    let is_slow = location.contains("sync=interval");
    let mut tasks = Vec::new();
    for _ in 0..4 {
        let (backend, numbers, was_full) =
            (Arc::clone(&backend), Arc::clone(&numbers), Arc::clone(&was_full));
        tasks.push(tokio::spawn(appends(backend, numbers, was_full, is_slow)));
    }
    tasks.push(tokio::spawn(consumes(backend)));
    for task in tasks {
        task.await.unwrap();
    }
}

/// Fills the disk with large entries, then continues with small ones.
async fn appends(
    backend: Arc<dyn Backend>,
    numbers: Arc<AtomicU64>,
    was_full: Arc<AtomicBool>,
    is_slow: bool,
) {
    loop {
        let number = numbers.fetch_add(1, Ordering::Relaxed);
        let bytes = if was_full.load(Ordering::Relaxed) { 10 } else { 3000 };
        let entry = [fields(number, bytes)];
        match backend.append(&stream("s"), &entry, &Retention::KEEP_ALL).await {
            Ok(ids) => report(&format!("appended {number} {}", ids[0])),
            Err(error) if is_from_the_disk(&error) => {
                was_full.store(true, Ordering::Relaxed);
                let is_rejected = error.to_string().contains("all calls fail");
                report(&format!("{} {number} 0-0", if is_rejected { "rejected" } else { "cut" }));
            }
            Err(error) => panic!("{error}"),
        }
        if is_slow || was_full.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// An ext4 whose storage is full reports `ENOSPC` if it could not write data, and `EIO` if it could not write its own
/// metadata. Only a sync meets the second. Or it reports nothing, and the data is not there when it is read back.
fn is_from_the_disk(error: &StreamError) -> bool {
    let problem = error.to_string();
    let is_failed_sync =
        || problem.contains("could not be synced") && problem.contains("(os error 5)");
    let is_lost =
        || problem.contains("confirmed a sync of") && problem.contains("does not have its data");
    matches!(error, StreamError::Full { .. }) || is_failed_sync() || is_lost()
}

async fn consumes(backend: Arc<dyn Backend>) {
    let (s, group, consumer) = (stream("s"), group(), ConsumerName::new("c").unwrap());
    let mut reader = backend.reader(&group, &consumer).await.unwrap();
    let pause = || tokio::time::sleep(Duration::from_millis(5));
    loop {
        let batches = reader.read(std::slice::from_ref(&s), 16, Duration::from_millis(20)).await;
        let Ok(batches) = batches else {
            pause().await;
            continue;
        };
        for entry in batches.into_iter().flat_map(|batch| batch.entries) {
            let entries = [Settlement::ack(entry.id)];
            let settle = || SettleBatch {
                stream: &s,
                group: &group,
                consumer: &consumer,
                fence: None,
                entries: &entries,
            };
            report(&format!("delivered {} {}", number_of(&entry.fields), entry.id));
            while backend.settle(settle()).await.is_err() {
                pause().await;
            }
            report(&format!("settled {} {}", number_of(&entry.fields), entry.id));
        }
    }
}

/// What the child has reported.
#[derive(Default)]
struct Reported {
    appended: BTreeMap<u64, EntryId>,
    rejected: BTreeSet<u64>,
    delivered: BTreeMap<u64, EntryId>,
    settled: BTreeSet<EntryId>,
    newest: u64,
}

impl Reported {
    /// Processes a line and returns its subject.
    fn read_line(&mut self, line: &str) -> Option<(String, u64)> {
        let words: Vec<&str> = line.strip_suffix(END)?.split(' ').collect();
        let [what, number, id] = words[..] else { return None };
        let (number, id): (u64, EntryId) = (number.parse().unwrap(), id.parse().unwrap());
        match what {
            "appended" => assert_eq!(self.appended.insert(number, id), None),
            "rejected" => assert!(self.rejected.insert(number)),
            "delivered" => {
                assert_eq!(self.delivered.insert(number, id), None, "{number} was delivered twice");
            }
            "settled" => assert!(self.settled.insert(id)),
            _ => {}
        }
        self.newest = self.newest.max(number);
        Some((what.to_owned(), number))
    }

    fn read_until(&mut self, child: &Child, mut is_it: impl FnMut(&str, u64) -> bool) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = child.line(left).unwrap();
            if self.read_line(&line).is_some_and(|(what, number)| is_it(&what, number)) {
                return;
            }
        }
    }
}

/// When the child is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kill {
    WhileFull,
    /// The directory is opened while the disk is still full, and again when there is space.
    WhileFullAndOpened,
    DuringRepair,
    AfterRepair,
}

/// A deterministic pseudorandom generator.
fn random_below(state: &mut u64, end: u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % end
}

async fn fill_and_free(disk: fn(usize) -> Option<SmallDisk>, all_parameters: &[&str]) {
    let seed = env::var("HEADWATER_SEED").map_or_else(
        |_| RandomState::new().hash_one("seed") >> 32,
        |seed| seed.parse().expect("a number"),
    );
    println!("HEADWATER_SEED={seed}");
    let mut random = seed;
    for parameters in all_parameters {
        let (repair, full) = (Kill::DuringRepair, Kill::WhileFull);
        for kill in [Kill::AfterRepair, full, Kill::WhileFullAndOpened, repair, repair] {
            let Some(disk) = disk(DISK_BYTES) else {
                eprintln!("skipped: mounting a small file system needs privileges");
                return;
            };
            println!("{parameters}, killed {kill:?}");
            fill_free_and_check(&disk, parameters, kill, &mut random).await;
        }
    }
}

async fn fill_free_and_check(disk: &SmallDisk, parameters: &str, kill: Kill, random: &mut u64) {
    disk.add_ballast();
    let directory = disk.path.join("d");
    let location = format!("{}?{parameters}", directory.display());
    let child = Child::spawn_self(CHILD, &[(LOCATION, &location)]).unwrap();
    let mut reported = Reported::default();
    reported.read_until(&child, |what, _| what == "rejected");
    match kill {
        Kill::WhileFull | Kill::WhileFullAndOpened => {}
        Kill::DuringRepair => {
            disk.remove_ballast();
            std::thread::sleep(Duration::from_millis(random_below(random, 2500)));
        }
        Kill::AfterRepair => {
            disk.remove_ballast();
            // Without a restart everything works again: appends, deliveries, settlements.
            let newest = reported.newest;
            for wanted in ["appended", "delivered", "settled"] {
                let mut count = 0;
                reported.read_until(&child, |what, number| {
                    count += u32::from(what == wanted && number > newest);
                    count == 20
                });
            }
        }
    }
    child.kill9().unwrap();
    while let Ok(line) = child.line(Duration::from_secs(10)) {
        reported.read_line(&line);
    }
    if kill == Kill::WhileFullAndOpened {
        match open(&directory, parameters).await {
            Ok(backend) => drop(check_and_close(&*backend, &reported).await),
            Err(error) => assert!(is_from_the_disk(&error), "{error}"),
        }
    }
    if matches!(kill, Kill::WhileFull | Kill::WhileFullAndOpened) && disk.is_thin() {
        disk.remove_ballast();
    }
    let found = open_and_check(&directory, parameters, &reported).await;
    if disk.is_thin() && parameters.contains("always") {
        // What was found is on the disk, not only in the page cache.
        disk.remount();
        assert_eq!(open_and_check(&directory, parameters, &reported).await, found);
    }
}

async fn open_and_check(
    directory: &Path,
    parameters: &str,
    reported: &Reported,
) -> BTreeMap<u64, EntryId> {
    let backend = open(directory, parameters).await.unwrap();
    check_and_close(&*backend, reported).await
}

async fn check_and_close(backend: &dyn Backend, reported: &Reported) -> BTreeMap<u64, EntryId> {
    let entries = all_entries(backend).await;
    assert!(entries.is_sorted_by_key(|entry| entry.id));
    let found: BTreeMap<u64, EntryId> =
        entries.iter().map(|entry| (number_of(&entry.fields), entry.id)).collect();
    assert_eq!(found.len(), entries.len(), "a number exists twice");
    for (number, id) in reported.appended.iter().chain(&reported.delivered) {
        assert_eq!(found.get(number), Some(id), "{number} was acknowledged and is lost");
    }
    let appeared: Vec<&u64> =
        reported.rejected.iter().filter(|number| found.contains_key(number)).collect();
    assert!(appeared.is_empty(), "these were rejected and exist: {appeared:?}");
    let query = PendingDeliveryQuery {
        stream: &stream("s"),
        group: &group(),
        consumer: None,
        min_idle: Duration::ZERO,
        after: None,
        count: 10_000,
    };
    let pending = backend.pending(query).await.unwrap();
    assert!(
        pending.iter().all(|pending| !reported.settled.contains(&pending.id)),
        "a settled entry is pending"
    );
    // Fails while the disk is full, because close syncs everything.
    let _ = backend.close().await;
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_full_disk_the_log_recovers_and_acknowledged_data_survives_every_kill() {
    let parameters = ["sync=always", "sync=interval", "sync=always&compact_bytes=200000"];
    fill_and_free(SmallDisk::mount, &parameters).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_failed_syncs_the_log_recovers_and_acknowledged_data_survives_every_kill() {
    let parameters = ["sync=always", "sync=interval", "sync=always&compact_bytes=200000"];
    fill_and_free(SmallDisk::mount_thin, &parameters).await;
}

/// Opens a new directory, appends about 900 kB and closes it. Returns what was appended and the size of the log.
async fn fill_directory(directory: &Path) -> (Vec<Entry>, usize) {
    let backend = open(directory, "").await.unwrap();
    for batch in 0..3 {
        let batch: Vec<Fields> =
            (0..100).map(|number| fields(100 * batch + number, 3000)).collect();
        backend.append(&stream("s"), &batch, &Retention::KEEP_ALL).await.unwrap();
    }
    let entries = all_entries(&*backend).await;
    backend.close().await.unwrap();
    (entries, fs::metadata(directory.join("00000001.log")).unwrap().len() as usize)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_the_log_that_the_disk_has_confirmed_and_not_stored_does_not_replace_the_log() {
    for missing_pages in 0..20 {
        let Some(disk) = SmallDisk::mount_thin(DISK_BYTES) else {
            eprintln!("skipped: mounting a small file system needs privileges");
            return;
        };
        let directory = disk.path.join("d");
        let (entries, log_bytes) = fill_directory(&directory).await;
        disk.remount();

        // The log is copied when it is opened, and the last pages of the copy do not fit.
        disk.add_ballast_except(
            log_bytes.next_multiple_of(PAGE_BYTES) - missing_pages * PAGE_BYTES,
        );
        let backend = open(&directory, "").await.unwrap();
        assert_eq!(all_entries(&*backend).await, entries);
        let _ = backend.close().await;
        drop(backend);

        disk.remove_ballast();
        disk.remount();
        let backend = open(&directory, "").await.unwrap();
        let is_kept = all_entries(&*backend).await == entries;
        assert!(is_kept, "entries are lost: {missing_pages} pages did not fit");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_could_not_be_copied_is_not_written_before_a_snapshot_replaces_it() {
    let Some(disk) = SmallDisk::mount(DISK_BYTES) else {
        eprintln!("skipped: mounting a small file system needs privileges");
        return;
    };
    let directory = disk.path.join("d");
    let (entries, log_bytes) = fill_directory(&directory).await;
    let append = async |backend: &dyn Backend, number| {
        backend.append(&stream("s"), &[fields(number, 10)], &Retention::KEEP_ALL).await
    };

    // Space for an entry, and not for a copy or a snapshot.
    disk.add_ballast_except(log_bytes / 2);
    let backend = open(&directory, "").await.unwrap();
    assert_eq!(all_entries(&*backend).await, entries);
    let error = append(&*backend, 1000).await.unwrap_err();
    assert!(matches!(error, StreamError::Full { .. }), "{error}");
    let log = directory.join("00000001.log");
    assert_eq!(fs::metadata(&log).unwrap().len() as usize, log_bytes);

    disk.remove_ballast();
    let deadline = Instant::now() + LIMIT;
    while let Err(error) = append(&*backend, 1001).await {
        assert!(is_from_the_disk(&error) && Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!log.exists(), "a snapshot has replaced it");
    drop(backend);
    let found = all_entries(&*open(&directory, "").await.unwrap()).await;
    assert_eq!(found[..entries.len()], entries);
    assert_eq!(number_of(&found.last().unwrap().fields), 1001);
}
