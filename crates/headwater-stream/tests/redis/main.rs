//! What only a real server can show: ways to reach it, ways it can fail, and how work goes on afterwards.
#![cfg(feature = "redis")]

mod access;
mod hints;
mod outages;
mod topologies;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use headwater_stream::{
    Backend, ConsumerName, Delivery, EntryId, Fields, GroupName, GroupReader, GroupStart, Options,
    Range, Retention, Settle, Settled, Settlement, StreamName, connect,
};

/// Long enough for a busy machine, short enough to wait for in a test.
const DEADLINE: Duration = Duration::from_millis(700);
/// By when everything has to work again after a failure.
const RECOVERY_MAX: Duration = Duration::from_secs(20);

/// A backend with a stream and a group, and the steps that tests are made of.
struct Desk {
    backend: Arc<dyn Backend>,
    stream: StreamName,
    group: GroupName,
    consumer: ConsumerName,
}

impl Desk {
    async fn open(url: &str) -> Result<Self> {
        let options = Options { call_deadline: DEADLINE, ..Options::default() };
        let backend = connect(url, &options).await?;
        Self::with(backend, &headwater_testkit::unique("orders")).await
    }

    async fn with(backend: Arc<dyn Backend>, stream: &str) -> Result<Self> {
        let (stream, group) = (StreamName::new(stream)?, GroupName::new("workers")?);
        let consumer = ConsumerName::new("ada")?;
        backend.ensure_group(&stream, &group, GroupStart::Beginning).await?;
        Ok(Self { backend, stream, group, consumer })
    }

    async fn reader(&self) -> Result<Box<dyn GroupReader>> {
        Ok(self.backend.reader(&self.group, &self.consumer).await?)
    }

    async fn append(&self, payload: &str) -> headwater_stream::Result<EntryId> {
        let entries = [Fields::new([("payload", payload.to_owned())])];
        Ok(self.backend.append(&self.stream, &entries, &Retention::KEEP_ALL).await?[0])
    }

    /// Appends until it works: what a patient producer does during an outage.
    async fn append_patiently(&self, payload: &str) -> Result<EntryId> {
        patiently("append", async || self.append(payload).await).await
    }

    async fn read(
        &self,
        reader: &mut dyn GroupReader,
        wait: Duration,
    ) -> headwater_stream::Result<Vec<Delivery>> {
        let batches = reader.read(std::slice::from_ref(&self.stream), 100, wait).await?;
        Ok(batches.into_iter().flat_map(|batch| batch.entries).collect())
    }

    /// Reads until something comes, whatever fails meanwhile.
    async fn read_patiently(&self, reader: &mut dyn GroupReader) -> Result<Vec<Delivery>> {
        let started = std::time::Instant::now();
        loop {
            match self.read(reader, Duration::from_secs(1)).await {
                Ok(entries) if !entries.is_empty() => return Ok(entries),
                Ok(_) => {}
                Err(error) => ensure!(error.is_transient(), "read: {error}"),
            }
            ensure!(started.elapsed() < RECOVERY_MAX, "nothing came within {RECOVERY_MAX:?}");
        }
    }

    async fn settle(&self, entries: &[Delivery]) -> headwater_stream::Result<Settled> {
        let done: Vec<_> = entries.iter().map(|entry| Settlement::done(entry.id)).collect();
        let settle = Settle {
            stream: &self.stream,
            group: &self.group,
            consumer: &self.consumer,
            fence: None,
            entries: &done,
        };
        self.backend.settle(settle).await
    }

    /// Append, read, settle: the whole way once.
    async fn round_trip(&self) -> Result<()> {
        let mut reader = self.reader().await?;
        let id = self.append("espresso").await?;
        let entries = self.read(reader.as_mut(), Duration::from_secs(5)).await?;
        ensure!(entries.iter().any(|entry| entry.id == id), "{id} is not in {entries:?}");
        ensure!(self.settle(&entries).await?.stale == 0, "something was not pending");
        Ok(())
    }

    async fn payloads(&self) -> Result<Vec<String>> {
        let entries = self.backend.range(&self.stream, Range::first(10_000)).await?;
        Ok(entries.iter().map(|entry| payload(&entry.fields)).collect())
    }
}

fn payload(fields: &Fields) -> String {
    fields
        .get("payload")
        .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
        .unwrap_or_default()
}

/// Repeats a call as long as it is only unavailable.
async fn patiently<T>(
    what: &str,
    call: impl AsyncFn() -> headwater_stream::Result<T>,
) -> Result<T> {
    let started = std::time::Instant::now();
    loop {
        match call().await {
            Ok(answer) => return Ok(answer),
            Err(error) => {
                ensure!(error.is_transient(), "{what}: {error}");
                ensure!(started.elapsed() < RECOVERY_MAX, "{what}: {error}, for {RECOVERY_MAX:?}");
            }
        }
    }
}
