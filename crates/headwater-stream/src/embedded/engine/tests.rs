//! The order of things, step by step: here the test is the writer and the syncer.

use std::borrow::Cow;
use std::pin::pin;

use futures_util::poll;

use super::*;
use crate::clock::TestClock;
use crate::embedded::effect::Effect;
use crate::embedded::log::{Damage, Failure, SyncMode, Tail};
use crate::embedded::reader::Reader;
use crate::entry::{EntryId, Fields};
use crate::name::{ConsumerName, GroupName, StreamName};
use crate::streams::GroupReader;

/// An engine whose log nobody writes.
fn engine(mode: SyncMode) -> (Arc<Engine>, Arc<Log>, Tail) {
    let file = Arc::new(tempfile::tempfile().unwrap());
    let tail = Tail { file, path: Arc::default(), number: 1, offset: 0, synced: 0 };
    let log = Arc::new(Log::new(mode, tail.clone()));
    let clock = Arc::new(TestClock::default());
    let deadline = Duration::from_secs(60);
    let shared = Shared::new(clock, 1 << 20, deadline, State::default(), Some(Arc::clone(&log)));
    (Arc::new(Engine::new(Arc::new(shared), None)), log, tail)
}

async fn append(shared: &Shared, number: u64) -> Result<()> {
    let append = shared.change(Until::Durable, |change| {
        let entries = Cow::Owned(vec![Fields::new([("n", number.to_string())])]);
        change.apply(&Effect::Append { stream: "s", first: EntryId::new(number, 0), entries });
        Ok(())
    });
    append.await
}

async fn length(shared: &Shared) -> Result<usize> {
    let look = shared.look(|look| {
        Ok(look.state.stream("s", look.now)?.map_or(0, |stream| stream.entries.len()))
    });
    look.await
}

#[tokio::test]
async fn no_answer_shows_what_a_crash_could_take_back() {
    for (mode, written_is_enough) in [(SyncMode::Always, false), (SyncMode::Interval, true)] {
        let (engine, log, tail) = engine(mode);
        let shared = &engine.shared;
        assert_eq!(length(shared).await.unwrap(), 0, "nothing is shown, so nothing is waited for");
        let mut first = pin!(append(shared, 1));
        assert!(poll!(first.as_mut()).is_pending());
        let mut look = pin!(length(shared));
        assert!(poll!(look.as_mut()).is_pending(), "it shows an entry that could be lost");
        let mut second = pin!(append(shared, 2));
        assert!(poll!(second.as_mut()).is_pending());

        log.publish_written(1, 10);
        assert_eq!(poll!(first.as_mut()).is_ready(), written_is_enough);
        log.publish_synced(1, &tail, Duration::ZERO);
        if !written_is_enough {
            first.await.unwrap();
        }
        assert_eq!(look.await.unwrap(), 1);
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
async fn a_reader_hands_out_what_is_durable_and_keeps_the_rest() {
    let (engine, log, tail) = engine(SyncMode::Always);
    let (group, consumer) = (GroupName::new("g").unwrap(), ConsumerName::new("c").unwrap());
    let streams = [StreamName::new("s").unwrap()];
    let mut reader = Reader::new(Arc::clone(&engine), &group, &consumer);
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
        // And the read is dropped with the entry in its hands.
    }
    let mut read = pin!(reader.read(&streams, 10, Duration::ZERO));
    assert!(poll!(read.as_mut()).is_pending());
    // A delivery need only be written: nobody waits for its sync.
    log.publish_written(2, 20);
    assert_eq!(read.await.unwrap()[0].entries[0].id, EntryId::new(1, 0));
}

#[tokio::test]
async fn whoever_waits_for_a_log_that_fails_gets_its_error() {
    let (engine, log, _) = engine(SyncMode::Always);
    let mut appended = pin!(append(&engine.shared, 1));
    assert!(poll!(appended.as_mut()).is_pending());
    let cause = std::io::Error::other("the cable was pulled");
    log.fail(Failure::new(Damage::Sync, "the.log".as_ref(), "synced", cause));
    let said = |error: StreamError| {
        let text = error.to_string();
        text.contains("the.log") && text.contains("the cable was pulled")
    };
    assert!(said(appended.await.err().unwrap()));
    assert!(said(append(&engine.shared, 2).await.err().unwrap()));
    assert!(said(length(&engine.shared).await.err().unwrap()));
}
