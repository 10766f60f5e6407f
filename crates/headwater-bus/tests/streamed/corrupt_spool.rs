//! Spools that are torn, corrupt, full, of another bus, or cannot be created: typed errors, nothing lost.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use headwater_bus::{
    BusError, EventBus, EventBusExt, FailurePolicy, Namespace, SpoolConfig, StoreOutcome,
    StreamedBus, StreamedBusConfig,
};
use headwater_conformance::bus::registry;
use headwater_stream::StreamError;
use tempfile::TempDir;

use crate::fixture::{Fixture, numbers, stored, watch};
use crate::outage_fixture::{LIMIT, OutageFixture, publish_until_stored};
use crate::spool::{spooling, wait_until_empty};

with_outage!(
    a_torn_spool_is_drained_up_to_the_torn_record,
    a_corrupt_or_foreign_spool_fails_opening_the_bus_and_is_unchanged,
    a_full_spool_is_an_error_until_the_backend_is_available_again,
);

async fn open_error(fixture: &Fixture, config: StreamedBusConfig) -> Arc<StreamError> {
    match StreamedBus::open(fixture.connect().await, registry(), config).await {
        Err(BusError::Spool { source, .. }) => source,
        other => panic!("{other:?}"),
    }
}

/// The newest log of a spool.
fn log_of(directory: &TempDir) -> PathBuf {
    let files = fs::read_dir(directory.path().join("spool")).unwrap();
    let files = files.map(|file| file.unwrap().path());
    files.filter(|file| file.extension().is_some_and(|end| end == "log")).max().unwrap()
}

async fn a_torn_spool_is_drained_up_to_the_torn_record(outage: OutageFixture) {
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let bus = fixture.bus_with(registry(), spooling(fixture, &directory)).await;
    outage.begin().await;
    for number in 0..10 {
        assert_eq!(bus.publish(fixture.noted(number)).await.unwrap().stored, StoreOutcome::Spooled);
    }
    // The machine crashed while it wrote the last event.
    let file = log_of(&directory);
    let whole = fs::read(&file).unwrap();
    bus.close().await.unwrap();
    drop(bus);
    fs::write(&file, &whole[..whole.len() - 7]).unwrap();
    outage.end().await;

    let bus = fixture.bus_with(registry(), spooling(fixture, &directory)).await;
    wait_until_empty(&bus, LIMIT).await;
    publish_until_stored(&bus, &fixture.session, 10).await;
    let all = stored(&*fixture.connect().await, &fixture.stream()).await;
    assert_eq!(all, [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]);
    bus.close().await.unwrap();
}

async fn a_corrupt_or_foreign_spool_fails_opening_the_bus_and_is_unchanged(outage: OutageFixture) {
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let config = || spooling(fixture, &directory);
    let bus = fixture.bus_with(registry(), config()).await;
    assert!(matches!(*open_error(fixture, config()).await, StreamError::Locked { .. }));
    outage.begin().await;
    for number in 0..3 {
        assert_eq!(bus.publish(fixture.noted(number)).await.unwrap().stored, StoreOutcome::Spooled);
    }
    bus.close().await.unwrap();
    drop(bus);
    outage.end().await;

    let namespace = Namespace::new("other").unwrap();
    let error = open_error(fixture, StreamedBusConfig { namespace, ..config() }).await;
    assert!(matches!(*error, StreamError::Invalid { .. }), "{error}");
    let file = log_of(&directory);
    let whole = fs::read(&file).unwrap();
    let mut damaged = whole.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 0x41;
    for content in [&damaged[..], b"a letter to my aunt, about everything"] {
        fs::write(&file, content).unwrap();
        let error = open_error(fixture, config()).await;
        assert!(matches!(*error, StreamError::Corrupt { .. }), "{error}");
        assert_eq!(fs::read(&file).unwrap(), content);
    }
    // Once repaired, nothing is lost.
    fs::write(&file, &whole).unwrap();
    let bus = fixture.bus_with(registry(), config()).await;
    wait_until_empty(&bus, LIMIT).await;
    assert_eq!(stored(&*fixture.connect().await, &fixture.stream()).await, [0, 1, 2]);
    bus.close().await.unwrap();
}

async fn a_full_spool_is_an_error_until_the_backend_is_available_again(outage: OutageFixture) {
    let (fixture, directory) = (&outage.fixture, tempfile::tempdir().unwrap());
    let spool = SpoolConfig { max_bytes: 8192, ..SpoolConfig::new(directory.path().join("spool")) };
    let config = StreamedBusConfig { on_failure: FailurePolicy::Spool(spool), ..fixture.config() };
    let bus = fixture.bus_with(registry(), config).await;
    let log = watch(&bus).await;
    outage.begin().await;
    let mut accepted = 0;
    let error = loop {
        match bus.publish(fixture.noted(accepted)).await {
            Ok(result) => assert_eq!(result.stored, StoreOutcome::Spooled),
            Err(error) => break error,
        }
        accepted += 1;
    };
    assert!(matches!(error, BusError::SpoolFull { .. }), "{error}");
    assert!(error.is_transient() && accepted > 5, "{accepted}");
    // Rejected events were not handled.
    assert_eq!(log.lines(), numbers(0..accepted));
    outage.end().await;
    wait_until_empty(&bus, LIMIT).await;
    publish_until_stored(&bus, &fixture.session, accepted).await;
    let all = stored(&*fixture.connect().await, &fixture.stream()).await;
    assert_eq!(all, (0..=accepted).collect::<Vec<u64>>());
    bus.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spool_that_cannot_be_created_fails_opening_the_bus() {
    let (fixture, directory) = (Fixture::embedded().await, tempfile::tempdir().unwrap());
    let at = |file: &Path| {
        let spool = FailurePolicy::Spool(SpoolConfig::new(file));
        StreamedBusConfig { on_failure: spool, ..fixture.config() }
    };
    let file = directory.path().join("file");
    fs::write(&file, b"something else").unwrap();
    for path in [&file, &file.join("below a file")] {
        let error = open_error(&fixture, at(path)).await;
        assert!(matches!(*error, StreamError::Unavailable { .. }), "{error}");
    }
    assert_eq!(fs::read(&file).unwrap(), b"something else");
}
