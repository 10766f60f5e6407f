//! `headwater bench`: how fast this program is on these servers; and whether everything arrived.
//!
//! Promises: one JSON line a run; every message and every event is counted, and one that is missing is a failure. Topics are
//! made for the run and deleted; `record` and `claim` leave their issues behind, under the integration `bench`.

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
use crate::cli::output;
use crate::cli::progress::Progress;
use crate::config::Settings;
use crate::exit::Failure;

/// Messages that are sent with one call to fill a topic.
const FILL: usize = 1000;
/// How long nothing may arrive before what is missing counts as lost.
const SILENCE_MAX: Duration = Duration::from_secs(20);

/// Measures.
#[derive(Debug, clap::Args)]
pub(crate) struct Bench {
    /// What to measure.
    #[arg(value_enum)]
    workload: Workload,
    /// Messages or events.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    count: u64,
    /// Bytes of each payload, at least 20.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(20..=1_000_000))]
    payload_bytes: u64,
    /// Partitions of the topic.
    #[arg(long, default_value_t = 1)]
    partitions: u16,
    /// Calls, or messages in hand, at once.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    in_flight: u64,
    /// One JSON value a line, which it prints anyway.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Workload {
    /// Send messages.
    Produce,
    /// Handle and settle messages that wait.
    Consume,
    /// From sending a message to its handler, one after the other.
    Latency,
    /// Store events, one issue each.
    Record,
    /// Claim and complete issues with one event each.
    Claim,
}

/// What a run came to.
struct Measured {
    seconds: f64,
    /// How long each took, where that says something.
    each: Vec<Duration>,
    arrived: Arrived,
}

#[derive(Default)]
struct Arrived {
    distinct: u64,
    duplicated: u64,
}

impl Bench {
    pub(in crate::cli) async fn run(&self, settings: &Settings) -> Result<(), Failure> {
        let streams = in_process::streams(settings).await?;
        let (backend, measured) = match self.workload {
            Workload::Record | Workload::Claim => {
                let store = in_process::store(settings).await?;
                let measured = self.on_store(&store, &streams).await;
                let kind = settings.database_shown();
                let kind = kind.split(':').next().unwrap_or_default().to_owned();
                // What was committed is safe; there is nothing else to say here.
                store.close().await;
                (kind, measured)
            }
            _ => (streams.describe().kind.to_owned(), self.on_topic(&streams).await),
        };
        let _ = streams.close().await;
        self.report(&backend, measured?)
    }

    fn report(&self, backend: &str, measured: Measured) -> Result<(), Failure> {
        let Measured { seconds, mut each, arrived } = measured;
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
        output::line(&line.to_string())?;
        match lost {
            0 => Ok(()),
            lost => Err(Failure::new(format!("{lost} of {} are missing", self.count))),
        }
    }

    async fn on_topic(&self, streams: &Arc<dyn Backend>) -> Result<Measured, Failure> {
        let queue = Queue::new(Arc::clone(streams));
        let topic = format!("bench-{}", uuid::Uuid::new_v4());
        queue
            .topics()
            .create(&topic, self.partitions, Policies::default())
            .await
            .map_err(failed)?;
        let measured = match self.workload {
            Workload::Produce => self.produce(&queue, &topic).await,
            Workload::Consume => self.consume(&queue, &topic).await,
            _ => self.latency(&queue, &topic).await,
        };
        let deleted = queue.topics().delete(&topic).await;
        let measured = measured.map_err(failed)?;
        deleted.map_err(failed)?;
        Ok(measured)
    }

    async fn produce(&self, queue: &Queue, topic: &str) -> Result<Measured, QueueError> {
        let producer = queue.producer(ProducerConfig::default())?;
        let progress = Progress::new("sent", Some(self.count));
        let started = Instant::now();
        let sends = stream::iter(0..self.count).map(|number| {
            let (producer, message) = (&producer, self.message(number));
            async move {
                let started = Instant::now();
                producer.send(topic, message).await?;
                Ok::<_, QueueError>(started.elapsed())
            }
        });
        let sends = sends.buffer_unordered(self.in_flight as usize).inspect(|_| progress.add(1));
        let sent: Vec<_> = sends.collect().await;
        let seconds = started.elapsed().as_secs_f64();
        let each = sent.into_iter().collect::<Result<Vec<_>, _>>()?;
        let stored = queue.inspect().topic(topic).await?.length;
        let arrived = Arrived {
            distinct: stored.min(self.count),
            duplicated: stored.saturating_sub(self.count),
        };
        Ok(Measured { seconds, each, arrived })
    }

    async fn consume(&self, queue: &Queue, topic: &str) -> Result<Measured, QueueError> {
        let producer = queue.producer(ProducerConfig::default())?;
        let mut number = 0;
        while number < self.count {
            let end = (number + FILL as u64).min(self.count);
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
        Ok(Measured { seconds, each: Vec::new(), arrived })
    }

    async fn latency(&self, queue: &Queue, topic: &str) -> Result<Measured, QueueError> {
        let producer = queue.producer(ProducerConfig::default())?;
        let (sender, mut arriving) = mpsc::unbounded_channel();
        let handler = move |message: Message| {
            let _ = sender.send((number_of(&message.payload), Instant::now()));
            async { Outcome::Done }
        };
        let subscription = queue.subscribe(topic, "bench", handler, self.consumer()).await?;
        let started = Instant::now();
        let (mut each, mut arrived) = (Vec::new(), Arrived::default());
        for number in 0..self.count {
            let sent = Instant::now();
            producer.send(topic, self.message(number)).await?;
            while let Ok(Some((came, at))) =
                tokio::time::timeout(SILENCE_MAX, arriving.recv()).await
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
        Ok(Measured { seconds, each, arrived })
    }

    async fn on_store(
        &self,
        store: &Arc<dyn Store>,
        streams: &Arc<dyn Backend>,
    ) -> Result<Measured, Failure> {
        let failed = |error: headwater_issue::IssueError| Failure::new(error.to_string());
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
        let progress = Progress::new("recorded", Some(self.count));
        let records =
            records.buffer_unordered(self.in_flight as usize).inspect(|_| progress.add(1));
        let recorded: Vec<_> = records.collect().await;
        drop(progress);
        let seconds = started.elapsed().as_secs_f64();
        let mut each = Vec::with_capacity(recorded.len());
        for result in recorded {
            each.push(result.map_err(failed)?.1);
        }
        if self.workload == Workload::Record {
            let arrived = Arrived { distinct: each.len() as u64, duplicated: 0 };
            return Ok(Measured { seconds, each, arrived });
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
        Ok(Measured { seconds, each: Vec::new(), arrived })
    }

    /// Counts until all have come, or until nothing comes any more.
    async fn count_arrivals(
        &self,
        mut arriving: mpsc::UnboundedReceiver<Option<u64>>,
    ) -> (Arrived, Instant) {
        let progress = Progress::new("arrived", Some(self.count));
        let mut seen: HashMap<u64, u64> = HashMap::new();
        let mut last = Instant::now();
        while (seen.len() as u64) < self.count
            && let Ok(Some(number)) = tokio::time::timeout(SILENCE_MAX, arriving.recv()).await
        {
            last = Instant::now();
            progress.add(1);
            if let Some(number) = number {
                *seen.entry(number).or_default() += 1;
            }
        }
        let duplicated = seen.values().map(|times| times - 1).sum();
        (Arrived { distinct: seen.len() as u64, duplicated }, last)
    }

    fn consumer(&self) -> ConsumerConfig {
        ConsumerConfig {
            mode: Mode::Owned,
            concurrency: self.in_flight as usize,
            in_flight_max: (self.in_flight as usize).max(1000),
            ..ConsumerConfig::default()
        }
    }

    /// Begins with its number, so that it can be told from all others.
    fn message(&self, number: u64) -> NewMessage {
        let width = self.payload_bytes as usize;
        NewMessage::keyed(format!("key-{}", number % 10_000), format!("{number:<width$}"))
    }
}

fn number_of(payload: &[u8]) -> Option<u64> {
    std::str::from_utf8(payload).ok()?.trim_end().parse().ok()
}

/// Its number, if it is of this run: others may have left theirs behind.
fn number_in(payload: &str, run: &str) -> Option<u64> {
    let payload: Value = serde_json::from_str(payload).ok()?;
    (payload["run"] == run).then(|| payload["number"].as_u64())?
}

fn failed(error: QueueError) -> Failure {
    match error.is_transient() {
        true => Failure::Unreachable(error.to_string()),
        false => Failure::new(error.to_string()),
    }
}
