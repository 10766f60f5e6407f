//! The producer and consumer processes of the simulation.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{
    Backoff, ConsumerConfig, Message, MessageOrder, NewMessage, Outcome, ProducerConfig, Queue,
    QueueConfig, RetryPolicy,
};
use headwater_stream::{LeaseRenewerConfig, Options};

use super::effect_log::EffectLog;
use super::ledger::is_poison;

pub(crate) const TOPIC: &str = "simulated";
pub(crate) const LEASE_TTL: Duration = Duration::from_millis(1500);
const KEYS: u64 = 20;
/// Pause between two messages of a producer.
const PAUSE: Duration = Duration::from_millis(4);

struct ProcessSettings {
    url: String,
    directory: PathBuf,
    number: String,
}

impl ProcessSettings {
    fn from_environment() -> Result<Self> {
        let variable = |name: &str| std::env::var(name).with_context(|| name.to_owned());
        Ok(Self {
            url: variable("URL")?,
            directory: variable("DIRECTORY")?.into(),
            number: variable("NUMBER")?,
        })
    }

    async fn queue(&self) -> Result<Queue> {
        let options = Options { call_deadline: Duration::from_secs(1), ..Default::default() };
        let backend = headwater_stream::connect(&self.url, &options).await?;
        let lease = LeaseRenewerConfig {
            ttl: LEASE_TTL,
            renew_every: LEASE_TTL / 5,
            safety_margin: LEASE_TTL / 10,
        };
        let rebalance_every = LEASE_TTL / 3;
        let config = QueueConfig { lease, rebalance_every, ..Default::default() };
        Ok(Queue::with_config(backend, config)?)
    }

    fn file_exists(&self, file: &str) -> bool {
        self.directory.join(file).exists()
    }
}

/// Sends 1, 2, 3, … for each of its keys, retries each number until it is confirmed, and logs the confirmation.
#[tokio::main]
pub(crate) async fn produce() -> Result<()> {
    let settings = ProcessSettings::from_environment()?;
    let path = settings.directory.join(format!("{}.confirmed", settings.number));
    let mut next: HashMap<String, u64> = HashMap::new();
    for line in fs::read_to_string(&path).unwrap_or_default().lines() {
        if let Some((key, number)) = line.split_once(' ') {
            next.insert(key.to_owned(), number.parse::<u64>()? + 1);
        }
    }
    let mut confirmed = OpenOptions::new().create(true).append(true).open(&path)?;
    let queue = retry(|| settings.queue()).await;
    let producer = queue.producer(ProducerConfig::default())?;
    println!("READY");
    for turn in 0.. {
        if settings.file_exists("stop-producers") {
            break;
        }
        let key = format!("key-{}-{}", settings.number, turn % KEYS);
        let number = *next.get(&key).unwrap_or(&1);
        let text = format!("{key} {number}");
        // The same id for every attempt: a send whose reply was lost must not count twice.
        let message = NewMessage::keyed(key.as_str(), text.clone()).with_id(text.as_str());
        while producer.send(TOPIC, message.clone()).await.is_err() {
            tokio::time::sleep(PAUSE).await;
        }
        confirmed.write_all(format!("{text}\n").as_bytes())?;
        next.insert(key, number + 1);
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

/// Handles messages in order per key and logs each effect with its epoch.
#[tokio::main]
pub(crate) async fn consume() -> Result<()> {
    let settings = ProcessSettings::from_environment()?;
    let queue = retry(|| settings.queue()).await;
    let config = ConsumerConfig {
        order: MessageOrder::PerKey,
        concurrency: 4,
        batch: 16,
        poll: Duration::from_secs(1),
        in_flight_max: 64,
        drain: Duration::from_secs(2),
        retry: RetryPolicy {
            // The simulation kills processes regardless of the message.
            max_crashes: 1000,
            backoff: Backoff::Fixed(Duration::from_millis(20)),
            ..Default::default()
        },
        ..Default::default()
    };
    let directory = settings.directory.clone();
    let handler = move |message: Message| {
        let directory = directory.clone();
        // The lock of the effect log may block the thread.
        async move {
            // So that some messages are in flight when the process is killed.
            tokio::time::sleep(Duration::from_millis(message.id.ms % 16)).await;
            tokio::task::spawn_blocking(move || handle(&directory, &message)).await?
        }
    };
    let subscription =
        retry(|| queue.subscribe(TOPIC, "simulation", handler.clone(), config.clone())).await;
    println!("READY");
    // Graceful shutdown, at the end or in between.
    let stop = format!("stop-{}", settings.number);
    while !settings.file_exists("stop-consumers") && !settings.file_exists(&stop) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    subscription.stop().await;
    Ok(())
}

fn handle(directory: &std::path::Path, message: &Message) -> Result<Outcome> {
    let text = std::str::from_utf8(&message.payload)?;
    let (key, number) = text.split_once(' ').context("a payload of this test")?;
    let number: u64 = number.parse()?;
    if number.is_multiple_of(13) && message.attempt == 1 {
        return Ok(Outcome::retry("the first attempt of every 13th fails"));
    }
    if number.is_multiple_of(17) && is_first_here(text) {
        return Ok(Outcome::Release);
    }
    let kind = if is_poison(number) { "dead" } else { "done" };
    let epoch = message.epoch.context("an owner has an epoch")?;
    let is_current =
        EffectLog::open(directory).put(message.partition, epoch.0, key, number, kind)?;
    Ok(match kind {
        _ if !is_current => Outcome::retry("a newer owner exists"),
        "dead" => Outcome::dead_letter("poison"),
        _ => Outcome::Done,
    })
}

/// Whether this process sees a message for the first time.
fn is_first_here(text: &str) -> bool {
    static SEEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    SEEN.lock().expect("no code panics while it holds this lock").insert(text.to_owned())
}

/// Tries until it works: networks are cut in this simulation.
async fn retry<T, E: std::fmt::Display, F: Future<Output = Result<T, E>>>(
    call: impl Fn() -> F,
) -> T {
    loop {
        match call().await {
            Ok(done) => return done,
            Err(error) => println!("retrying: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
