//! Cost of owning many streams: round trips and CPU time per heartbeat.
//!
//! Run `cargo bench -p headwater-assignment --all-features --bench heartbeat`; `-- STREAMS` sets another
//! number than 10 000. Two runs: over the loopback for CPU time, and over a slow connection for round trips.
//! There, a heartbeat takes longer by the number of its consecutive round trips.

use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use headwater_assignment::{Assignment, AssignmentConfig, INPUT_FIELD, Notifications};
use headwater_stream::{Backend, Fields, Options, Retention, StreamName, connect};
use headwater_testkit::bench::processor_seconds;
use headwater_testkit::{Redis, unique};
use metrics::{
    Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

const STREAMS: usize = 10_000;
/// Number of measured intervals.
const INTERVALS: u32 = 4;
/// One-way latency of the slow connection.
const ONE_WAY: Duration = Duration::from_millis(250);

#[tokio::main]
async fn main() -> Result<()> {
    let streams = std::env::args().find_map(|word| word.parse().ok()).unwrap_or(STREAMS);
    metrics::set_global_recorder(Beats)
        .map_err(|_| anyhow::anyhow!("a recorder is already installed"))?;
    let redis = Redis::start()?;
    let every = AssignmentConfig::default().heartbeat_every;
    println!(
        "{streams} streams in one process, a heartbeat every {every:?}, Redis on this machine\n"
    );

    let backend = connect(&redis.url(), &Options::default()).await?;
    let owner = Owner::start(backend, streams).await?;
    println!("acquiring them  {:8.2} s", owner.took.as_secs_f64());
    let (cpu, server, started) =
        (processor_seconds(None)?, server_seconds(&redis)?, Instant::now());
    let near = owner.watch(every * INTERVALS).await?;
    let elapsed = started.elapsed().as_secs_f64();
    let (cpu, server) = (processor_seconds(None)? - cpu, server_seconds(&redis)? - server);
    println!("one heartbeat   {:8.1} ms", mean(&near) * 1000.0);
    println!("processor       {:8.2} % of a core, sweep included", 100.0 * cpu / elapsed);
    println!("server          {:8.2} % of a core", 100.0 * server / elapsed);
    owner.stop().await?;

    let wire = slow_connection(redis.addr()).await?;
    let backend = connect(&redis.url_at(wire), &Options::default()).await?;
    let owner = Owner::start(Arc::clone(&backend), streams).await?;
    let far = owner.watch(every * INTERVALS).await?;
    // Measure the round trip time of this connection.
    let mut round_trips = Vec::new();
    for _ in 0..5 {
        let started = Instant::now();
        backend.now().await?;
        round_trips.push(started.elapsed().as_secs_f64());
    }
    let round_trip = fastest(&round_trips);
    println!("\nover a connection with a round trip of {:.0} ms", round_trip * 1000.0);
    println!("one heartbeat   {:8.1} ms", mean(&far) * 1000.0);
    println!("round trips     {:8.2} per heartbeat", (fastest(&far) - fastest(&near)) / round_trip);
    owner.stop().await
}

/// A process that owns many streams.
struct Owner {
    assignment: Assignment,
    _notifications: Notifications,
    took: Duration,
}

impl Owner {
    async fn start(backend: Arc<dyn Backend>, streams: usize) -> Result<Self> {
        let service = unique("heartbeat");
        let input = StreamName::new(format!("{service}-input"))?;
        let names: Vec<usize> = (0..streams).collect();
        for some in names.chunks(1000) {
            let entry = |i: &usize| {
                let json = format!(r#"{{"DataStreamName": "{service}:{i}"}}"#);
                Fields::new([(INPUT_FIELD, json)])
            };
            let entries: Vec<Fields> = some.iter().map(entry).collect();
            backend.append(&input, &entries, &Retention::KEEP_ALL).await?;
        }
        let config = AssignmentConfig {
            streams_max: streams,
            notifications_max: streams,
            read_batch: 1000,
            ..Default::default()
        };
        let started = Instant::now();
        let (assignment, notifications) =
            Assignment::start(backend, &service, "owner", config).await?;
        while assignment.owned().len() < streams {
            ensure!(started.elapsed() < Duration::from_secs(120), "the streams were not acquired");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(Self { assignment, _notifications: notifications, took: started.elapsed() })
    }

    /// Durations of heartbeats in seconds, measured for `limit`.
    async fn watch(&self, limit: Duration) -> Result<Vec<f64>> {
        let owned = self.assignment.owned().len();
        take_beats();
        tokio::time::sleep(limit).await;
        let beats = take_beats();
        ensure!(self.assignment.owned().len() == owned, "streams were lost");
        ensure!(!beats.is_empty(), "no heartbeat");
        Ok(beats)
    }

    async fn stop(self) -> Result<()> {
        self.assignment.shutdown(Duration::ZERO).await?;
        Ok(())
    }
}

/// Forwards all data with a fixed latency and unlimited bandwidth.
async fn slow_connection(target: std::net::SocketAddr) -> Result<std::net::SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let Ok(server) = TcpStream::connect(target).await else { return };
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            tokio::spawn(carry(from_client, to_server));
            tokio::spawn(carry(from_server, to_client));
        }
    });
    Ok(address)
}

async fn carry(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
) -> std::io::Result<()> {
    let (sender, mut on_the_way) = mpsc::unbounded_channel::<(tokio::time::Instant, Vec<u8>)>();
    tokio::spawn(async move {
        while let Some((arrives, bytes)) = on_the_way.recv().await {
            tokio::time::sleep_until(arrives).await;
            to.write_all(&bytes).await?;
        }
        Ok::<_, std::io::Error>(())
    });
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let length = from.read(&mut buffer).await?;
        let arrives = tokio::time::Instant::now() + ONE_WAY;
        if length == 0 || sender.send((arrives, buffer[..length].to_vec())).is_err() {
            return Ok(());
        }
    }
}

/// CPU time of the server so far.
fn server_seconds(redis: &Redis) -> Result<f64> {
    let info = redis.command(&["INFO", "cpu"])?.text();
    let value = |name: &str| -> Result<f64> {
        let line = info.lines().find_map(|line| line.strip_prefix(name)).context("no such line")?;
        Ok(line.trim().parse()?)
    };
    Ok(value("used_cpu_sys:")? + value("used_cpu_user:")?)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The minimum, to exclude noise.
fn fastest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

static BEATS: LazyLock<Mutex<Vec<f64>>> = LazyLock::new(Mutex::default);

fn take_beats() -> Vec<f64> {
    std::mem::take(&mut *BEATS.lock().expect("no code panics while it holds this lock"))
}

/// A recorder that only keeps the durations of heartbeats.
struct Beats;

impl HistogramFn for Beats {
    fn record(&self, value: f64) {
        BEATS.lock().expect("no code panics while it holds this lock").push(value);
    }
}

impl Recorder for Beats {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        match key.name() {
            "headwater_assignment_heartbeat_seconds" => Histogram::from_arc(Arc::new(Beats)),
            _ => Histogram::noop(),
        }
    }
}
