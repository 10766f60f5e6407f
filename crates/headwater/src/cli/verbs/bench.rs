//! `headwater bench`: measures throughput, latency and processor time on the configured backends, and checks for losses.
//!
//! Guarantees: prints a summary on a terminal and one JSON line otherwise; counts every message and event, and fails if one is missing. Topics are
//! created for the run and deleted; `record` and `claim` leave their issues in the integration `bench`. Callers run on worker
//! threads, and arrivals are counted without a task switch, so that the library is measured and not this program.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use headwater_issue::{
    HandlerError, Inbox, InboxConfig, NewEvent, Nudger, Resolution, Run, Store, Worker,
    WorkerConfig, limits,
};
use headwater_queue::{
    ConsumerConfig, Message, Mode, NewMessage, Outcome, Policies, ProducerConfig, Queue, QueueError,
};
use headwater_stream::Backend;
use indicatif::ProgressBar;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;

use crate::cli::in_process;
use crate::cli::output::{self, OutputStyle};
use crate::cli::progress;
use crate::cli::units::{show_milliseconds, show_rate, show_size, size};
use crate::config::Settings;
use crate::exit::CliError;

/// Messages per call when filling a topic.
const FILL_BATCH: usize = 1000;
/// Messages per call of `produce-bulk`.
const BULK_BATCH: usize = 100;
/// Callers that record the issues of `claim`, before the measurement.
const FILL_CALLERS: u64 = 256;
/// Runs of `claim` in flight beyond the handlers: two batches of claims and two of completions.
const CLAIM_AHEAD: usize = 4 * limits::BATCH_MAX;
/// After this time without an arrival, missing messages count as lost.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(20);
/// A caller shows its progress after so many calls: all callers change the same number.
const PROGRESS_STEP: usize = 64;
/// How often arrivals are shown.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// Measure a workload.
#[derive(Clone, Debug, clap::Args)]
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
    /// Concurrent calls, handlers, or messages in flight.
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
    /// Send messages, one per call.
    Produce,
    /// Send messages, 100 per call, one call at a time.
    ProduceBulk,
    /// Consume and acknowledge stored messages.
    Consume,
    /// Time from sending a message to its handler, one at a time.
    Latency,
    /// Record events, one issue each.
    Record,
    /// Claim and complete issues with one event each.
    Claim,
}

impl Workload {
    fn name(self) -> String {
        let value = clap::ValueEnum::to_possible_value(&self);
        value.map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Result of a run.
struct BenchResult {
    spent: Spent,
    /// Latencies, where they are meaningful.
    each: Vec<Duration>,
    arrived: ArrivalCount,
}

#[derive(Default)]
struct ArrivalCount {
    distinct: u64,
    duplicated: u64,
}

/// Time spent, by the clock and by the processors for this process.
struct Spent {
    elapsed: Duration,
    processor: Duration,
}

/// Measures time from its creation.
struct Stopwatch {
    started: Instant,
    processor: Duration,
}

impl Stopwatch {
    fn start() -> Self {
        Self { started: Instant::now(), processor: processor_time() }
    }

    /// The time until `end`; the processor time until now.
    fn until(&self, end: Instant) -> Spent {
        let processor = processor_time().saturating_sub(self.processor);
        Spent { elapsed: end.saturating_duration_since(self.started), processor }
    }

    fn stop(&self) -> Spent {
        self.until(Instant::now())
    }
}

/// Processor time of all threads of this process.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let (seconds, nanoseconds) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or_default(), nanoseconds.unwrap_or_default())
}

/// Counts numbered arrivals, from any thread.
struct Arrivals {
    times: Vec<AtomicU8>,
    distinct: AtomicU64,
    /// Arrivals, also repeated and foreign ones.
    all: AtomicU64,
    complete: Notify,
}

impl Arrivals {
    fn new(count: u64) -> Arc<Self> {
        let times = (0..count).map(|_| AtomicU8::new(0)).collect();
        let (distinct, all) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { times, distinct, all, complete: Notify::new() })
    }

    /// Counts the message with this number; `None` if it is not of this run.
    fn add(&self, number: Option<u64>) {
        self.all.fetch_add(1, Ordering::Relaxed);
        let index = number.and_then(|number| usize::try_from(number).ok());
        let Some(times) = index.and_then(|index| self.times.get(index)) else { return };
        // Saturating: what matters is whether it came more than once.
        let before = times.fetch_add(1, Ordering::Relaxed);
        if before == u8::MAX {
            times.store(u8::MAX, Ordering::Relaxed);
        }
        if before == 0 {
            let distinct = self.distinct.fetch_add(1, Ordering::AcqRel) + 1;
            if distinct == self.times.len() as u64 {
                self.complete.notify_one();
            }
        }
    }

    /// Waits until all have arrived, or none arrives any more. Returns when the last one did.
    async fn wait(&self) -> Instant {
        let progress = progress::start("arrived", Some(self.times.len() as u64));
        let (mut seen, mut last) = (0, Instant::now());
        loop {
            let complete = tokio::time::timeout(PROGRESS_EVERY, self.complete.notified()).await;
            let all = self.all.load(Ordering::Relaxed);
            progress.inc(all - seen);
            if all > seen || complete.is_ok() {
                (seen, last) = (all, Instant::now());
            }
            if complete.is_ok() || last.elapsed() >= ARRIVAL_TIMEOUT {
                return last;
            }
        }
    }

    fn count(&self) -> ArrivalCount {
        let repeated = self.times.iter().map(|times| times.load(Ordering::Relaxed));
        let duplicated = repeated.map(|times| u64::from(times.saturating_sub(1))).sum();
        ArrivalCount { distinct: self.distinct.load(Ordering::Acquire), duplicated }
    }
}

impl BenchArgs {
    pub(in crate::cli) async fn run(&self, settings: &Settings) -> Result<(), CliError> {
        let streams = in_process::streams(settings).await?;
        let args = Arc::new(self.clone());
        let (backend, measured) = match self.workload {
            Workload::Record | Workload::Claim => {
                let store = in_process::store(settings).await?;
                let measured = args.on_store(&store, &streams).await;
                let kind = settings.database_shown();
                let kind = kind.split(':').next().unwrap_or_default().to_owned();
                // Committed data is durable, so an error on close does not matter.
                store.close().await;
                (kind, measured)
            }
            _ => (streams.describe().kind.to_owned(), args.on_topic(&streams).await),
        };
        let _ = streams.close().await;
        self.report(&backend, measured?)
    }

    fn report(&self, backend: &str, measured: BenchResult) -> Result<(), CliError> {
        let BenchResult { spent, mut each, arrived } = measured;
        each.sort_unstable();
        let at = |part: f64| {
            let place = ((each.len() as f64 - 1.0) * part).round() as usize;
            each.get(place).map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
        };
        let seconds = spent.elapsed.as_secs_f64();
        let cpu_us = spent.processor.as_secs_f64() * 1e6 / self.count as f64;
        let lost = self.count.saturating_sub(arrived.distinct);
        let line = json!({
            "workload": self.workload.name(),
            "backend": backend,
            "count": self.count,
            "payload_bytes": self.payload_bytes,
            "partitions": self.partitions,
            "in_flight": self.in_flight,
            "seconds": seconds,
            "per_second": (self.count as f64 / seconds).round(),
            "cpu_us": (cpu_us * 100.0).round() / 100.0,
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

    async fn on_topic(
        self: &Arc<Self>,
        streams: &Arc<dyn Backend>,
    ) -> Result<BenchResult, CliError> {
        let queue = Arc::new(Queue::new(Arc::clone(streams)));
        let topic: Arc<str> = format!("bench-{}", uuid::Uuid::new_v4()).into();
        queue.topics().create(&topic, self.partitions, Policies::default()).await?;
        let (args, measured_queue, measured_topic) =
            (Arc::clone(self), Arc::clone(&queue), Arc::clone(&topic));
        // On a worker thread: on the main thread, every reply would be handed from one thread to another.
        let measured = tokio::spawn(async move {
            let (queue, topic) = (measured_queue, measured_topic);
            match args.workload {
                Workload::Produce => args.produce(&queue, &topic).await,
                Workload::ProduceBulk => args.produce_bulk(&queue, &topic).await,
                Workload::Consume => args.consume(&queue, &topic).await,
                _ => args.latency(&queue, &topic).await,
            }
        });
        let measured = measured.await;
        let deleted = queue.topics().delete(&topic).await;
        let measured = measured.map_err(|error| CliError::new(error.to_string()))??;
        deleted?;
        Ok(measured)
    }

    async fn produce(
        self: &Arc<Self>,
        queue: &Queue,
        topic: &Arc<str>,
    ) -> Result<BenchResult, QueueError> {
        let producer = Arc::new(queue.producer(ProducerConfig::default())?);
        let progress = progress::start("sent", Some(self.count));
        let stopwatch = Stopwatch::start();
        let mut callers = JoinSet::new();
        for caller in 0..self.in_flight.min(self.count) {
            let (args, producer, topic) =
                (Arc::clone(self), Arc::clone(&producer), Arc::clone(topic));
            let progress = progress.clone();
            callers.spawn(async move {
                let mut each = Vec::new();
                for number in args.share(caller, args.in_flight) {
                    let started = Instant::now();
                    producer.send(&topic, args.message(number)).await?;
                    each.push(started.elapsed());
                    show_progress(&progress, each.len());
                }
                Ok::<_, QueueError>(each)
            });
        }
        let each = all(callers).await?;
        let spent = stopwatch.stop();
        let arrived = self.stored(queue, topic).await?;
        Ok(BenchResult { spent, each, arrived })
    }

    async fn produce_bulk(&self, queue: &Queue, topic: &str) -> Result<BenchResult, QueueError> {
        let producer = queue.producer(ProducerConfig::default())?;
        let stopwatch = Stopwatch::start();
        let mut each = Vec::new();
        for messages in self.batches(BULK_BATCH) {
            let started = Instant::now();
            let sent = producer.send_batch(topic, messages).await?;
            each.push(started.elapsed());
            sent.into_iter().try_for_each(|sent| sent.map(drop))?;
        }
        let spent = stopwatch.stop();
        let arrived = self.stored(queue, topic).await?;
        Ok(BenchResult { spent, each, arrived })
    }

    /// Counts the messages in the topic.
    async fn stored(&self, queue: &Queue, topic: &str) -> Result<ArrivalCount, QueueError> {
        let stored = queue.inspect().topic(topic).await?.length;
        Ok(ArrivalCount {
            distinct: stored.min(self.count),
            duplicated: stored.saturating_sub(self.count),
        })
    }

    /// The messages, in batches.
    fn batches(&self, size: usize) -> impl Iterator<Item = Vec<NewMessage>> + '_ {
        (0..self.count).step_by(size).map(move |first| {
            let end = first.saturating_add(size as u64).min(self.count);
            (first..end).map(|number| self.message(number)).collect()
        })
    }

    async fn consume(&self, queue: &Queue, topic: &str) -> Result<BenchResult, QueueError> {
        let producer = queue.producer(ProducerConfig::default())?;
        for messages in self.batches(FILL_BATCH) {
            let sent = producer.send_batch(topic, messages).await?;
            sent.into_iter().try_for_each(|sent| sent.map(drop))?;
        }
        let arrivals = Arrivals::new(self.count);
        let arriving = Arc::clone(&arrivals);
        let handler = move |message: Message| {
            arriving.add(number_of(&message.payload));
            async { Outcome::Done }
        };
        let stopwatch = Stopwatch::start();
        let subscription = queue.subscribe(topic, "bench", handler, self.consumer()).await?;
        let last = arrivals.wait().await;
        let spent = stopwatch.until(last);
        subscription.stop().await;
        Ok(BenchResult { spent, each: Vec::new(), arrived: arrivals.count() })
    }

    async fn latency(&self, queue: &Queue, topic: &str) -> Result<BenchResult, QueueError> {
        let producer = queue.producer(ProducerConfig::default())?;
        let (sender, mut arriving) = mpsc::unbounded_channel();
        let handler = move |message: Message| {
            let _ = sender.send((number_of(&message.payload), Instant::now()));
            async { Outcome::Done }
        };
        let subscription = queue.subscribe(topic, "bench", handler, self.consumer()).await?;
        let stopwatch = Stopwatch::start();
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
        let spent = stopwatch.stop();
        subscription.stop().await;
        Ok(BenchResult { spent, each, arrived })
    }

    async fn on_store(
        self: &Arc<Self>,
        store: &Arc<dyn Store>,
        streams: &Arc<dyn Backend>,
    ) -> Result<BenchResult, CliError> {
        store.ensure_integration("bench", "bench").await.map_err(failed)?;
        let (args, store, streams) = (Arc::clone(self), Arc::clone(store), Arc::clone(streams));
        // On a worker thread, like `on_topic`.
        let measured = tokio::spawn(async move {
            let nudger = Nudger::new(Arc::clone(&streams));
            let run = uuid::Uuid::new_v4().to_string();
            let recorded = args.record(&store, &nudger, &run).await?;
            match args.workload {
                Workload::Record => Ok(recorded),
                _ => args.claim(store, nudger, &Queue::new(streams), run).await,
            }
        });
        measured.await.map_err(|error| CliError::new(error.to_string()))?
    }

    /// Records events, each of its own issue: by `in_flight` callers, or as fast as possible to fill the store for `claim`.
    async fn record(
        self: &Arc<Self>,
        store: &Arc<dyn Store>,
        nudger: &Nudger,
        run: &str,
    ) -> Result<BenchResult, CliError> {
        let is_fill = self.workload == Workload::Claim;
        let callers_max = if is_fill { FILL_CALLERS } else { self.in_flight };
        let inbox = Inbox::new(Arc::clone(store), nudger.clone(), InboxConfig::default());
        let inbox = Arc::new(inbox.map_err(failed)?);
        let progress = progress::start("recorded", Some(self.count));
        let stopwatch = Stopwatch::start();
        let mut callers = JoinSet::new();
        for caller in 0..callers_max.min(self.count) {
            let (args, inbox, run) = (Arc::clone(self), Arc::clone(&inbox), run.to_owned());
            let progress = progress.clone();
            callers.spawn(async move {
                let text = "x".repeat(args.payload_bytes as usize);
                let mut each = Vec::new();
                for number in args.share(caller, callers_max) {
                    let payload = format!(r#"{{"number":{number},"text":"{text}"}}"#);
                    let event = NewEvent::new("bench", format!("{run}-{number}"), "bench", payload);
                    let started = Instant::now();
                    inbox.record(event).await.map_err(failed)?;
                    each.push(started.elapsed());
                    show_progress(&progress, each.len());
                }
                Ok::<_, CliError>(each)
            });
        }
        let each = all(callers).await?;
        let spent = stopwatch.stop();
        let arrived = ArrivalCount { distinct: each.len() as u64, duplicated: 0 };
        Ok(BenchResult { spent, each, arrived })
    }

    async fn claim(
        &self,
        store: Arc<dyn Store>,
        nudger: Nudger,
        queue: &Queue,
        run: String,
    ) -> Result<BenchResult, CliError> {
        let arrivals = Arrivals::new(self.count);
        let arriving = Arc::clone(&arrivals);
        let handler = move |handled: Run| {
            // Earlier runs may have left events.
            let number = handled.issue().external_issue_id.strip_prefix(&run);
            let number = number.and_then(|number| number.strip_prefix('-')?.parse().ok());
            handled.events().iter().for_each(|_| arriving.add(number));
            async { Ok::<_, HandlerError>(Resolution::new()) }
        };
        let concurrency = self.in_flight as usize;
        let claim_ahead = CLAIM_AHEAD.min(limits::CONCURRENT_RUNS_MAX - concurrency);
        let config = WorkerConfig { concurrency, claim_ahead, ..WorkerConfig::default() };
        let worker = Worker::new(store, nudger, handler, config).map_err(failed)?;
        let stop = Notify::new();
        let stopwatch = Stopwatch::start();
        let measuring = async {
            let last = arrivals.wait().await;
            let spent = stopwatch.until(last);
            stop.notify_one();
            spent
        };
        let (spent, ()) = tokio::join!(measuring, worker.run(queue, stop.notified()));
        Ok(BenchResult { spent, each: Vec::new(), arrived: arrivals.count() })
    }

    /// The numbers of one of `callers` callers.
    fn share(&self, caller: u64, callers: u64) -> impl Iterator<Item = u64> + use<> {
        (caller..self.count).step_by(usize::try_from(callers).unwrap_or(usize::MAX))
    }

    fn consumer(&self) -> ConsumerConfig {
        ConsumerConfig {
            mode: Mode::Owned,
            concurrency: self.in_flight as usize,
            in_flight_max: (self.in_flight as usize).max(1000),
            ..ConsumerConfig::default()
        }
    }

    /// The payload starts with the number of the message. Padded by hand: a format width is written character by character,
    /// which takes longer than sending.
    fn message(&self, number: u64) -> NewMessage {
        let mut payload = Vec::with_capacity(self.payload_bytes as usize);
        // Writing to memory does not fail.
        let _ = write!(payload, "{number}");
        payload.resize(self.payload_bytes as usize, b' ');
        NewMessage::keyed(format!("key-{}", number % 10_000), payload)
    }
}

/// Shows the progress of a caller that has made so many calls.
fn show_progress(progress: &ProgressBar, calls: usize) {
    if calls.is_multiple_of(PROGRESS_STEP) {
        progress.inc(PROGRESS_STEP as u64);
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
        format!("{:.1} µs", line["cpu_us"].as_f64().unwrap_or(0.0)),
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
        "CPU",
        "P50",
        "P99",
        "LOST",
        "DUPLICATED",
    ];
    output::print_table(&[headings.map(str::to_owned).to_vec(), row.to_vec()], None, "")
}

fn number_of(payload: &[u8]) -> Option<u64> {
    let digits = payload.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&payload[..digits]).ok()?.parse().ok()
}

fn failed(error: headwater_issue::IssueError) -> CliError {
    CliError::new(error.to_string())
}

/// The results of all callers, or the first error.
async fn all<T: 'static, E: 'static>(mut callers: JoinSet<Result<Vec<T>, E>>) -> Result<Vec<T>, E> {
    let mut each = Vec::new();
    while let Some(caller) = callers.join_next().await {
        match caller {
            Ok(results) => each.extend(results?),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
    Ok(each)
}
