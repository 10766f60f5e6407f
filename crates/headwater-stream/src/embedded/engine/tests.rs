//! Ordering of writes, syncs and results, step by step; the test acts as writer and sync thread.

use std::borrow::Cow;
use std::pin::pin;

use futures_util::poll;

use super::*;
use crate::clock::TestClock;
use crate::connect::Options;
use crate::embedded::location::Location;
use crate::embedded::log::{Damage, LogFailure, LogTail, SyncMode};
use crate::embedded::reader::EmbeddedGroupReader;
use crate::embedded::redo_record::RedoRecord;
use crate::embedded::{Embedded, open_directory};
use crate::entry::{EntryId, Fields};
use crate::name::{ConsumerName, GroupName, StreamName};
use crate::streams::GroupReader;

/// An engine without log threads.
fn engine(mode: SyncMode) -> (Arc<Engine>, Arc<CommitLog>, LogTail) {
    let file = Arc::new(tempfile::tempfile().unwrap());
    let tail = LogTail { file, path: Arc::default(), number: 1, offset: 0, synced: 0 };
    let log = Arc::new(CommitLog::new(mode, tail.clone()));
    let clock = Arc::new(TestClock::default());
    let deadline = Duration::from_secs(60);
    let shared = EngineShared::new(
        clock,
        1 << 20,
        deadline,
        EmbeddedState::default(),
        Some(Arc::clone(&log)),
    );
    (Arc::new(Engine::new(Arc::new(shared), None)), log, tail)
}

async fn append(shared: &EngineShared, number: u64) -> Result<()> {
    let append = shared.transact(Durability::Durable, |tx| {
        let entries = Cow::Owned(vec![Fields::new([("n", number.to_string())])]);
        tx.apply(&RedoRecord::Append { stream: "s", first: EntryId::new(number, 0), entries });
        Ok(())
    });
    append.await
}

async fn length(shared: &EngineShared) -> Result<usize> {
    let read = shared
        .read(|tx| Ok(tx.state.stream("s", tx.now)?.map_or(0, |stream| stream.entries.len())));
    read.await
}

#[tokio::test]
async fn no_result_shows_data_that_a_crash_could_revert() {
    for (mode, written_is_enough) in [(SyncMode::Always, false), (SyncMode::Interval, true)] {
        let (engine, log, tail) = engine(mode);
        let shared = &engine.shared;
        assert_eq!(length(shared).await.unwrap(), 0, "an empty result has nothing to wait for");
        let mut first = pin!(append(shared, 1));
        assert!(poll!(first.as_mut()).is_pending());
        let mut read = pin!(length(shared));
        assert!(
            poll!(read.as_mut()).is_pending(),
            "the result contains an entry that could be lost"
        );
        let mut second = pin!(append(shared, 2));
        assert!(poll!(second.as_mut()).is_pending());

        log.publish_written(1, 10);
        assert_eq!(poll!(first.as_mut()).is_ready(), written_is_enough);
        log.publish_synced(1, &tail, Duration::ZERO);
        if !written_is_enough {
            first.await.unwrap();
        }
        assert_eq!(read.await.unwrap(), 1);
        assert!(
            poll!(second.as_mut()).is_pending(),
            "its own commit is neither written nor synced"
        );
        log.publish_written(2, 20);
        log.publish_synced(2, &tail, Duration::ZERO);
        second.await.unwrap();
    }
}

#[tokio::test]
async fn a_reader_returns_durable_entries_and_buffers_the_rest() {
    let (engine, log, tail) = engine(SyncMode::Always);
    let (group, consumer) = (GroupName::new("g").unwrap(), ConsumerName::new("c").unwrap());
    let streams = [StreamName::new("s").unwrap()];
    let mut reader = EmbeddedGroupReader::new(Arc::clone(&engine), &group, &consumer);
    let mut appended = pin!(append(&engine.shared, 1));
    assert!(poll!(appended.as_mut()).is_pending());

    // Commit 1 is the append, commit 2 the delivery.
    {
        let mut read = pin!(reader.read(&streams, 10, Duration::ZERO));
        assert!(poll!(read.as_mut()).is_pending(), "the entry could be lost");
        log.publish_written(1, 10);
        log.publish_synced(1, &tail, Duration::ZERO);
        assert!(
            poll!(read.as_mut()).is_pending(),
            "the delivery would not be counted after a crash"
        );
        // The read is dropped after the entry was delivered to the reader.
    }
    let mut read = pin!(reader.read(&streams, 10, Duration::ZERO));
    assert!(poll!(read.as_mut()).is_pending());
    // A delivery needs to be written, not synced.
    log.publish_written(2, 20);
    assert_eq!(read.await.unwrap()[0].entries[0].id, EntryId::new(1, 0));
}

#[tokio::test]
async fn calls_that_wait_for_a_failed_log_get_its_error() {
    let (engine, log, _) = engine(SyncMode::Always);
    let mut appended = pin!(append(&engine.shared, 1));
    assert!(poll!(appended.as_mut()).is_pending());
    let cause = std::io::Error::other("device not responding");
    log.fail(LogFailure::new(Damage::Sync, "the.log".as_ref(), "synced", cause));
    let names_the_cause = |error: StreamError| {
        let text = error.to_string();
        text.contains("the.log") && text.contains("device not responding")
    };
    assert!(names_the_cause(appended.await.err().unwrap()));
    assert!(names_the_cause(append(&engine.shared, 2).await.err().unwrap()));
    assert!(names_the_cause(length(&engine.shared).await.err().unwrap()));
}

/// With its log threads, in a directory.
fn open_in(directory: &tempfile::TempDir) -> Embedded {
    let location = Location::parse(directory.path().to_str().unwrap()).unwrap();
    open_directory(directory.path(), &location, Options::default()).unwrap()
}

#[tokio::test]
async fn after_a_panic_of_a_log_thread_calls_fail_permanently_until_the_directory_is_opened_again()
{
    let directory = tempfile::tempdir().unwrap();
    let embedded = open_in(&directory);
    let shared = Arc::clone(&embedded.engine.shared);
    append(&shared, 1).await.unwrap();
    let assert_stopped = |error: Option<StreamError>, consequence: &str| {
        let error = error.unwrap();
        assert!(matches!(error, StreamError::Stopped { .. }) && !error.is_transient(), "{error:?}");
        assert!(error.to_string().contains(consequence), "{error}");
    };
    {
        let mut in_flight = pin!(shared.wait(2, 0));
        assert!(poll!(in_flight.as_mut()).is_pending());
        // The thread that writes needs space for the header of a frame: it panics.
        shared.lock().unwrap().buffer.bytes.truncate(1);
        shared.to_write.notify_all();
        assert_stopped(in_flight.await.err(), "whether this call took effect is unknown");
    }
    let permanently = "all calls fail until the directory is opened again";
    for _ in 0..2 {
        assert_stopped(append(&shared, 2).await.err(), permanently);
        assert_stopped(length(&shared).await.err(), permanently);
    }

    drop(embedded);
    let embedded = open_in(&directory);
    append(&embedded.engine.shared, 2).await.unwrap();
    assert_eq!(length(&embedded.engine.shared).await.unwrap(), 2);
}
