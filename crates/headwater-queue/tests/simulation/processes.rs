//! The producer and consumer processes of the simulation.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::future::join_all;
use headwater_queue::{
    Backoff, ConsumerConfig, Message, MessageOrder, Mode, NewMessage, Outcome, ProducerConfig,
    Queue, QueueConfig, RetryPolicy,
};
use headwater_stream::{LeaseRenewerConfig, Options};

use super::effect_log::EffectLog;
use super::ledger::is_poison;
use super::now_ms;

pub(crate) const TOPIC: &str = "simulated";
/// The group with owned partitions in order per key, and the one with shared partitions.
pub(crate) const OWNED: &str = "owned";
pub(crate) const SHARED: &str = "shared";
pub(crate) const GROUPS: [&str; 2] = [OWNED, SHARED];
pub(crate) const LEASE_TTL: Duration = Duration::from_millis(1500);
const KEYS: u64 = 20;
/// Pause between two calls of a producer.
const PAUSE: Duration = Duration::from_millis(4);
/// Messages of different keys in one call.
const BATCH: u64 = 5;
/// Every so many numbers of a key, a payload is large.
const LARGE_EVERY: u64 = 23;
const LARGE_BYTES: usize = 100 * 1024;
/// Every so many calls a message is delayed.
const DELAY_EVERY: u64 = 10;
const DELAYED: &str = "delayed-";

/// Whether messages of this key are delayed, so that they are in no order.
pub(crate) fn is_delayed(key: &str) -> bool {
    key.starts_with(DELAYED)
}

/// A message that says its key and number.
fn message(key: &str, number: u64) -> NewMessage {
    let padding = if number.is_multiple_of(LARGE_EVERY) { LARGE_BYTES } else { 0 };
    NewMessage::keyed(key, format!("{key} {number} {}", "x".repeat(padding)))
}

/// The key and the number in a payload.
pub(crate) fn read_payload(payload: &[u8]) -> Result<(&str, u64)> {
    let mut words = std::str::from_utf8(payload)?.split(' ');
    let key = words.next().context("no key")?;
    Ok((key, words.next().context("no number")?.parse()?))
}

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

/// Sends 1, 2, 3, … for each of its keys, retries each number until it is confirmed, and logs the confirmation. Sends single
/// messages and batches by turns, and delayed messages in between. Those are not deduplicated, so each is tried once.
#[tokio::main]
pub(crate) async fn produce() -> Result<()> {
    let settings = ProcessSettings::from_environment()?;
    let path = settings.directory.join(format!("{}.confirmed", settings.number));
    let mut next: HashMap<String, u64> = HashMap::new();
    for line in fs::read_to_string(&path).unwrap_or_default().lines() {
        let mut words = line.split(' ');
        if let (Some(key), Some(Ok(number))) = (words.next(), words.next().map(str::parse::<u64>)) {
            let next = next.entry(key.to_owned()).or_insert(1);
            *next = (*next).max(number + 1);
        }
    }
    let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
    // The zero shows that the line is complete.
    let mut confirm = |key: &str, number: u64, began_ms: u64, partition: u16| {
        let line = format!("{key} {number} {began_ms} {} {partition} 0\n", now_ms());
        file.write_all(line.as_bytes())
    };
    let queue = retry(|| settings.queue()).await;
    let producer = queue.producer(ProducerConfig::default())?;
    println!("READY");
    for turn in 0.. {
        if settings.file_exists("stop-producers") {
            break;
        }
        let keys: Vec<String> = match turn % 2 {
            0 => vec![format!("key-{}-{}", settings.number, turn % KEYS)],
            _ => (0..BATCH)
                .map(|at| format!("key-{}-{}", settings.number, (turn + at) % KEYS))
                .collect(),
        };
        let mut left: Vec<(String, u64)> =
            keys.into_iter().map(|key| (key.clone(), *next.get(&key).unwrap_or(&1))).collect();
        while !left.is_empty() {
            // The same id for every attempt: a send whose reply was lost must not count twice.
            let messages: Vec<NewMessage> = left
                .iter()
                .map(|(key, number)| message(key, *number).with_id(format!("{key} {number}")))
                .collect();
            let began_ms = now_ms();
            let results = match messages.len() {
                1 => vec![producer.send(TOPIC, messages[0].clone()).await],
                _ => producer.send_batch(TOPIC, messages).await.unwrap_or_default(),
            };
            let mut results = results.into_iter();
            let mut unconfirmed = Vec::new();
            for (key, number) in left {
                if let Some(Ok(sent)) = results.next() {
                    confirm(&key, number, began_ms, sent.partition)?;
                    next.insert(key, number + 1);
                } else {
                    unconfirmed.push((key, number));
                }
            }
            left = unconfirmed;
            tokio::time::sleep(PAUSE).await;
        }
        if turn % DELAY_EVERY == 0 {
            let key = format!("{DELAYED}{}", settings.number);
            let number = *next.get(&key).unwrap_or(&1);
            let after = Duration::from_millis(turn % 500);
            let began_ms = now_ms();
            let delayed = producer.send_after(TOPIC, message(&key, number), after).await;
            if let Ok(delayed) = delayed {
                confirm(&key, number, began_ms, delayed.partition)?;
            }
            next.insert(key, number + 1);
        }
    }
    Ok(())
}

/// Handles messages in both groups and logs each effect with its epoch.
#[tokio::main]
pub(crate) async fn consume() -> Result<()> {
    let settings = ProcessSettings::from_environment()?;
    let queue = retry(|| settings.queue()).await;
    let owned = ConsumerConfig {
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
    let shared = ConsumerConfig {
        mode: Mode::Shared,
        order: MessageOrder::Relaxed,
        reclaim_idle: 3 * LEASE_TTL,
        ..owned.clone()
    };
    let mut subscriptions = Vec::new();
    for (group, config) in [(OWNED, owned), (SHARED, shared)] {
        let directory = settings.directory.clone();
        let handler = move |message: Message| {
            let directory = directory.clone();
            // The lock of the effect log may block the thread.
            async move {
                // So that some messages are in flight when the process is killed.
                tokio::time::sleep(Duration::from_millis(message.id.ms % 16)).await;
                tokio::task::spawn_blocking(move || handle(&directory, group, &message)).await?
            }
        };
        let subscribe = || queue.subscribe(TOPIC, group, handler.clone(), config.clone());
        subscriptions.push(retry(subscribe).await);
    }
    println!("READY");
    // Graceful shutdown, at the end or in between.
    let stop = format!("stop-{}", settings.number);
    while !settings.file_exists("stop-consumers") && !settings.file_exists(&stop) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    join_all(subscriptions.iter().map(headwater_queue::Subscription::stop)).await;
    Ok(())
}

fn handle(directory: &std::path::Path, group: &str, message: &Message) -> Result<Outcome> {
    let (key, number) = read_payload(&message.payload)?;
    if number.is_multiple_of(13) && message.attempt == 1 {
        return Ok(Outcome::retry("the first attempt of every 13th fails"));
    }
    if number.is_multiple_of(17) && is_first_here(format!("{group} {key} {number}")) {
        return Ok(Outcome::Release);
    }
    let kind = if is_poison(number) { "dead" } else { "done" };
    let epoch = message.epoch.map(|epoch| epoch.0);
    anyhow::ensure!(epoch.is_some() == (group == OWNED), "only owners have an epoch");
    let log = EffectLog::open(directory, group);
    let is_current = log.put(message.partition, epoch, key, number, kind)?;
    Ok(match kind {
        _ if !is_current => Outcome::retry("a newer owner exists"),
        "dead" => Outcome::dead_letter(format!("poison in {group}")),
        _ => Outcome::Done,
    })
}

/// Whether this process sees a message for the first time.
fn is_first_here(text: String) -> bool {
    static SEEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    SEEN.lock().expect("no code panics while it holds this lock").insert(text)
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
