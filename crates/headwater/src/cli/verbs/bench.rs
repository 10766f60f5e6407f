//! `headwater bench`: measures throughput and latency on the configured backends, and checks for losses.
//!
//! Guarantees: prints a summary on a terminal and one JSON line otherwise; counts every message and event, and fails if one is missing. Topics are
//! created for the run and deleted; `record` and `claim` leave their issues in the integration `bench`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt};
use headwater_issue::{
    HandlerError, Inbox, InboxConfig, NewEvent, Nudger, Resolution, Run, Store, Worker,
    WorkerConfig,
};
use headwater_queue::{
    ConsumerConfig, Message, Mode, NewMessage, Outcome, Policies, ProducerConfig, Queue, QueueError,
};
use headwater_stream::Backend;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::cli::in_process;
use crate::cli::output::{self, OutputStyle};
use crate::cli::progress;
use crate::cli::units::{show_milliseconds, show_rate, show_size, size};
use crate::config::Settings;
use crate::exit::CliError;

/// Messages per call when filling a topic.
const FILL_BATCH: usize = 1000;
/// After this time without an arrival, missing messages count as lost.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(20);

/// Measure a workload.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// Workload.
    #[arg(value_enum)]
    workload: Workload,
    /// Number of messages or events.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    count: u64,
    /// Size of each payload, 20 bytes to 1MB.
    #[arg(long, value_name = "SIZE", default_value = "256", value_parser = payload_size)]
    payload_bytes: u64,
    /// Partitions of the topic.
    #[arg(long, default_value_t = 1)]
    partitions: u16,
    /// Concurrent calls, or messages in flight.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    in_flight: u64,
    /// Print one JSON value also on a terminal.
    #[arg(long)]
    json: bool,
}

fn payload_size(text: &str) -> Result<u64, String> {
    let bytes = size(text)?;
    match (20..=1_000_000).contains(&bytes) {
        true => Ok(bytes),
        false => Err("expected 20 bytes to 1MB".to_owned()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Workload {
    /// Send messages.
    Produce,
    /// Consume and acknowledge stored messages.
    Consume,
    /// Time from sending a message to its handler, one at a time.
    Latency,
    /// Record events, one issue each.
    Record,
    /// Claim and complete issues with one event each.
    Claim,
}

/// Result of a run.
struct BenchResult {
    seconds: f64,
    /// Latencies, where they are meaningful.
    each: Vec<Duration>,
    arrived: ArrivalCount,
}

#[derive(Default)]
struct ArrivalCount {
    distinct: u64,
    duplicated: u64,
}

impl BenchArgs {
    pub(in crate::cli) async fn run(&self, settings: &Settings) -> Result<(), CliError> {
        let streams = in_process::streams(settings).await?;
        let (backend, measured) = match self.workload {
            Workload::Record | Workload::Claim => {
                let store = in_process::store(settings).await?;
                let measured = self.on_store(&store, &streams).await;
                let kind = settings.database_shown();
                let kind = kind.split(':').next().unwrap_or_default().to_owned();
                // Committed data is durable, so an error on close does not matter.
                store.close().await;
                (kind, measured)
            }
            _ => (streams.describe().kind.to_owned(), self.on_topic(&streams).await),
        };
        let _ = streams.close().await;
        self.report(&backend, measured?)
    }

    fn report(&self, backend: &str, measured: BenchResult) -> Result<(), CliError> {
        let BenchResult { seconds, mut each, arrived } = measured;
        each.sort_unstable();
        let at = |part: f64| {
            let place = ((each.len() as f64 - 1.0) * part).round() as usize;
            each.get(place).map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
        };
        let lost = self.count.saturating_sub(arrived.distinct);
        let line = json!({
            "workload": format!("{:?}", self.workload).to_lowercase(),
            "backend": backend,
            "count": self.count,
            "payload_bytes": self.payload_bytes,
            "partitions": self.partitions,
            "in_flight": self.in_flight,
            "seconds": seconds,
            "per_second": (self.count as f64 / seconds).round(),
            "p50_us": at(0.5),
            "p99_us": at(0.99),
            "lost": lost,
            "duplicated": arrived.duplicated,
        });
        let style = OutputStyle { json: self.json, wide: false };
        if style.is_rows() {
            summary(&line)?;
        } else {
            output::json(style, &line)?;
        }
        match lost {
            0 => Ok(()),
            lost => Err(CliError::new(format!(
                "{lost} of {} messages or events are missing",
                self.count
            ))),
        }
    }

    async fn on_topic(&self, streams: &Arc<dyn Backend>) -> Result<BenchResult, CliError> {
        let queue = Queue::new(Arc::clone(streams));
        let topic = format!("bench-{}", uuid::Uuid::new_v4());
        queue.topics().create(&topic, self.partitions, Policies::default()).await?;
        let measured = match self.workload {
            Workload::Produce => self.produce(&queue, &topic).await,
            Workload::Consume => self.consume(&queue, &topic).await,
            _ => self.latency(&queue, &topic).await,
        };
        let deleted = queue.topics().delete(&topic).await;
        let measured = measured?;
        deleted?;
        Ok(measured)
    }

    async fn produce(&self, queue: &Queue, topic: &str) -> Result<BenchResult, QueueError> {
        let producer = queue.producer(ProducerConfig::default())?;
        let progress = progress::start("sent", Some(self.count));
        let started = Instant::now();
        let sends = stream::iter(0..self.count).map(|number| {
            let (producer, message) = (&producer, self.message(number));
            async move {
                let started = Instant::now();
                producer.send(topic, message).await?;
                Ok::<_, QueueError>(started.elapsed())
            }
        });
        let sends = sends.buffer_unordered(self.in_flight as usize).inspect(|_| progress.inc(1));
        let sent: Vec<_> = sends.collect().await;
        let seconds = started.elapsed().as_secs_f64();
        let each = sent.into_iter().collect::<Result<Vec<_>, _>>()?;
        let stored = queue.inspect().topic(topic).await?.length;
        let arrived = ArrivalCount {
            distinct: stored.min(self.count),
            duplicated: stored.saturating_sub(self.count),
        };
        Ok(BenchResult { seconds, each, arrived })
    }

    async fn consume(&self, queue: &Queue, topic: &str) -> Result<BenchResult, QueueError> {
        let producer = queue.producer(ProducerConfig::default())?;
        let mut number = 0;
        while number < self.count {
            let end = (number + FILL_BATCH as u64).min(self.count);
            let messages = (number..end).map(|number| self.message(number)).collect();
            producer
                .send_batch(topic, messages)
                .await?
                .into_iter()
                .collect::<Result<Vec<_>, _>>()?;
            number = end;
        }
        let started = Instant::now();
        let (sender, arriving) = mpsc::unbounded_channel();
        let handler = move |message: Message| {
            let _ = sender.send(number_of(&message.payload));
            async { Outcome::Done }
        };
        let subscription = queue.subscribe(topic, "bench", handler, self.consumer()).await?;
        let (arrived, last) = self.count_arrivals(arriving).await;
        let seconds = (last - started).as_secs_f64();
        subscription.stop().await;
        Ok(BenchResult { seconds, each: Vec::new(), arrived })
    }

    async fn latency(&self, queue: &Queue, topic: &str) -> Result<BenchResult, QueueError> {
        let producer = queue.producer(ProducerConfig::default())?;
        let (sender, mut arriving) = mpsc::unbounded_channel();
        let handler = move |message: Message| {
            let _ = sender.send((number_of(&message.payload), Instant::now()));
            async { Outcome::Done }
        };
        let subscription = queue.subscribe(topic, "bench", handler, self.consumer()).await?;
        let started = Instant::now();
        let (mut each, mut arrived) = (Vec::new(), ArrivalCount::default());
        for number in 0..self.count {
            let sent = Instant::now();
            producer.send(topic, self.message(number)).await?;
            while let Ok(Some((came, at))) =
                tokio::time::timeout(ARRIVAL_TIMEOUT, arriving.recv()).await
            {
                if came == Some(number) {
                    arrived.distinct += 1;
                    each.push(at.saturating_duration_since(sent));
                    break;
                }
                arrived.duplicated += 1;
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        subscription.stop().await;
        Ok(BenchResult { seconds, each, arrived })
    }

    async fn on_store(
        &self,
        store: &Arc<dyn Store>,
        streams: &Arc<dyn Backend>,
    ) -> Result<BenchResult, CliError> {
        let failed = |error: headwater_issue::IssueError| CliError::new(error.to_string());
        store.ensure_integration("bench", "bench").await.map_err(failed)?;
        let nudger = Nudger::new(Arc::clone(streams));
        let inbox = Inbox::new(Arc::clone(store), nudger.clone(), InboxConfig::default())
            .map_err(failed)?;
        let run = uuid::Uuid::new_v4();
        let started = Instant::now();
        let records = stream::iter(0..self.count).map(|number| {
            let payload =
                json!({"run": run, "number": number, "text": "x".repeat(self.payload_bytes as usize)});
            let event =
                NewEvent::new("bench", format!("{run}-{number}"), "bench", payload.to_string());
            let inbox = &inbox;
            async move {
                let started = Instant::now();
                inbox.record(event).await.map(|recorded| (recorded, started.elapsed()))
            }
        });
        let progress = progress::start("recorded", Some(self.count));
        let records =
            records.buffer_unordered(self.in_flight as usize).inspect(|_| progress.inc(1));
        let recorded: Vec<_> = records.collect().await;
        drop(progress);
        let seconds = started.elapsed().as_secs_f64();
        let mut each = Vec::with_capacity(recorded.len());
        for result in recorded {
            each.push(result.map_err(failed)?.1);
        }
        if self.workload == Workload::Record {
            let arrived = ArrivalCount { distinct: each.len() as u64, duplicated: 0 };
            return Ok(BenchResult { seconds, each, arrived });
        }

        let (sender, arriving) = mpsc::unbounded_channel();
        let this_run = run.to_string();
        let handler = move |run: Run| {
            let numbers: Vec<_> =
                run.events().iter().map(|event| number_in(&event.payload, &this_run)).collect();
            for number in numbers {
                let _ = sender.send(number);
            }
            async { Ok::<_, HandlerError>(Resolution::new()) }
        };
        let config =
            WorkerConfig { concurrency: self.in_flight as usize, ..WorkerConfig::default() };
        let worker = Worker::new(Arc::clone(store), nudger, handler, config).map_err(failed)?;
        let stop = Arc::new(tokio::sync::Notify::new());
        let queue = Queue::new(Arc::clone(streams));
        let started = Instant::now();
        let (stopped, working) = (Arc::clone(&stop), worker.clone());
        let working = tokio::spawn(async move {
            working.run(&queue, async move { stopped.notified().await }).await;
        });
        let (arrived, last) = self.count_arrivals(arriving).await;
        let seconds = (last - started).as_secs_f64();
        stop.notify_one();
        let _ = working.await;
        Ok(BenchResult { seconds, each: Vec::new(), arrived })
    }

    /// Counts arrivals until all have come, or none comes any more.
    async fn count_arrivals(
        &self,
        mut arriving: mpsc::UnboundedReceiver<Option<u64>>,
    ) -> (ArrivalCount, Instant) {
        let progress = progress::start("arrived", Some(self.count));
        let mut seen: HashMap<u64, u64> = HashMap::new();
        let mut last = Instant::now();
        while (seen.len() as u64) < self.count
            && let Ok(Some(number)) = tokio::time::timeout(ARRIVAL_TIMEOUT, arriving.recv()).await
        {
            last = Instant::now();
            progress.inc(1);
            if let Some(number) = number {
                *seen.entry(number).or_default() += 1;
            }
        }
        let duplicated = seen.values().map(|times| times - 1).sum();
        (ArrivalCount { distinct: seen.len() as u64, duplicated }, last)
    }

    fn consumer(&self) -> ConsumerConfig {
        ConsumerConfig {
            mode: Mode::Owned,
            concurrency: self.in_flight as usize,
            in_flight_max: (self.in_flight as usize).max(1000),
            ..ConsumerConfig::default()
        }
    }

    /// The payload starts with the number of the message.
    fn message(&self, number: u64) -> NewMessage {
        let width = self.payload_bytes as usize;
        NewMessage::keyed(format!("key-{}", number % 10_000), format!("{number:<width$}"))
    }
}

/// The result for people.
fn summary(line: &Value) -> Result<(), CliError> {
    let micros = |name: &str| match line[name].as_u64() {
        Some(micros) if micros < 1000 => format!("{micros} µs"),
        Some(micros) => show_milliseconds(micros / 1000),
        None => "-".to_owned(),
    };
    let count = |name: &str| line[name].to_string();
    let row = [
        line["workload"].as_str().unwrap_or_default().to_owned(),
        line["backend"].as_str().unwrap_or_default().to_owned(),
        count("count"),
        show_size(line["payload_bytes"].as_u64().unwrap_or(0)),
        format!("{:.2} s", line["seconds"].as_f64().unwrap_or(0.0)),
        show_rate(line["per_second"].as_f64().unwrap_or(0.0)),
        micros("p50_us"),
        micros("p99_us"),
        count("lost"),
        count("duplicated"),
    ];
    let headings = [
        "WORKLOAD",
        "BACKEND",
        "COUNT",
        "PAYLOAD",
        "TIME",
        "RATE",
        "P50",
        "P99",
        "LOST",
        "DUPLICATED",
    ];
    output::print_table(&[headings.map(str::to_owned).to_vec(), row.to_vec()], None, "")
}

fn number_of(payload: &[u8]) -> Option<u64> {
    std::str::from_utf8(payload).ok()?.trim_end().parse().ok()
}

/// The number of an event of this run; earlier runs may have left events.
fn number_in(payload: &str, run: &str) -> Option<u64> {
    let payload: Value = serde_json::from_str(payload).ok()?;
    (payload["run"] == run).then(|| payload["number"].as_u64())?
}
