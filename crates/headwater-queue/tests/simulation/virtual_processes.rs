//! What the producers and consumers of the simulation without a server do. They follow the same rules as the processes of
//! the simulation with servers (`processes.rs`), whose ledger checks both.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::future::join_all;
use headwater_queue::{
    Backoff, ConsumerConfig, Message, MessageOrder, Mode, NewMessage, Outcome, ProducerConfig,
    Queue, QueueConfig, RetryPolicy, Subscription,
};
use headwater_stream::{Backend, LeaseRenewerConfig};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::effect_log::EffectLog;
use super::fence_rules::FenceRules;
use super::ledger::{Ledger, is_poison};
use super::now_ms;
use super::processes::{GROUPS, LEASE_TTL, OWNED, TOPIC, read_payload};

const KEYS: u64 = 12;
/// Pause between two calls of a producer.
const PAUSE: Duration = Duration::from_millis(30);
/// Messages of different keys in one call.
const BATCH: u64 = 5;
/// Every so many calls a message is delayed.
const DELAY_EVERY: u64 = 5;
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// What is outside of all processes and survives them.
pub(crate) struct Records {
    /// Confirmations and effects.
    pub(crate) directory: PathBuf,
    pub(crate) rules: Arc<FenceRules>,
    /// Numbers that were passed to a send, by key.
    attempted: Mutex<BTreeMap<String, BTreeSet<u64>>>,
}

impl Records {
    pub(crate) fn new(directory: PathBuf) -> Self {
        Self { directory, rules: Arc::default(), attempted: Mutex::default() }
    }

    pub(crate) fn ledger(&self) -> Ledger {
        Ledger::open(&self.directory, Vec::new())
    }

    pub(crate) fn was_attempted(&self, key: &str, number: u64) -> bool {
        self.lock().get(key).is_some_and(|numbers| numbers.contains(&number))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, BTreeSet<u64>>> {
        self.attempted.lock().expect("no code panics while it holds the attempts")
    }

    /// Notes that this message is about to be sent.
    fn message(&self, key: &str, number: u64) -> NewMessage {
        self.lock().entry(key.to_owned()).or_default().insert(number);
        NewMessage::keyed(key, format!("{key} {number}"))
    }

    /// A delayed message is sent once: the number after the newest that was attempted.
    fn next_delayed(&self, key: &str) -> u64 {
        self.lock().get(key).and_then(BTreeSet::last).map_or(1, |newest| newest + 1)
    }

    /// Logs that a message was confirmed. The zero shows that the line is complete.
    fn confirm(&self, process: usize, key: &str, number: u64, partition: u16) -> Result<()> {
        let path = self.directory.join(format!("{process}.confirmed"));
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        let now = now_ms();
        Ok(file.write_all(format!("{key} {number} {now} {now} {partition} 0\n").as_bytes())?)
    }
}

/// What a process gets when it starts.
pub(crate) struct ProcessContext {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) records: Arc<Records>,
    pub(crate) number: usize,
    pub(crate) shutdown: CancellationToken,
}

impl ProcessContext {
    fn queue(&self) -> Result<Queue> {
        let lease = LeaseRenewerConfig {
            ttl: LEASE_TTL,
            renew_every: LEASE_TTL / 5,
            safety_margin: LEASE_TTL / 10,
        };
        let config = QueueConfig { lease, rebalance_every: LEASE_TTL / 3, ..Default::default() };
        Ok(Queue::with_config(Arc::clone(&self.backend), config)?)
    }
}

/// Sends 1, 2, 3, … for each of its keys and retries each number until it is confirmed. Sends single messages and batches by
/// turns, and delayed messages in between. Those are not deduplicated, so each is tried once.
pub(crate) async fn produce(context: ProcessContext) -> Result<()> {
    let ProcessContext { records, number: process, .. } = &context;
    let key_of = |turn: u64| format!("key-{process}-{}", turn % KEYS);
    let delayed_key = format!("delayed-{process}");
    let mut next: BTreeMap<String, u64> = BTreeMap::new();
    for (key, numbers) in records.ledger().confirmed()? {
        if let Some((newest, _)) = numbers.last_key_value() {
            next.insert(key, newest + 1);
        }
    }
    let producer = context.queue()?.producer(ProducerConfig::default())?;
    for turn in 0.. {
        if context.shutdown.is_cancelled() {
            break;
        }
        let mut left: Vec<String> = match turn % 2 {
            0 => vec![key_of(turn)],
            _ => (0..BATCH).map(|at| key_of(turn + at)).collect(),
        };
        while !left.is_empty() {
            let number = |key: &String| *next.get(key).unwrap_or(&1);
            // The same id for every attempt: a send whose reply was lost must not count twice.
            let message = |key: &String| {
                let number = number(key);
                records.message(key, number).with_id(format!("{key} {number}"))
            };
            let mut messages: Vec<NewMessage> = left.iter().map(message).collect();
            let results = match messages.len() {
                1 => vec![producer.send(TOPIC, messages.remove(0)).await],
                _ => producer.send_batch(TOPIC, messages).await.unwrap_or_default(),
            };
            let mut results = results.into_iter();
            for key in std::mem::take(&mut left) {
                let number = *next.get(&key).unwrap_or(&1);
                match results.next() {
                    Some(Ok(sent)) => {
                        records.confirm(*process, &key, number, sent.partition)?;
                        next.insert(key, number + 1);
                    }
                    _ => left.push(key),
                }
            }
            sleep(PAUSE).await;
        }
        if turn % DELAY_EVERY == 0 {
            let number = records.next_delayed(&delayed_key);
            let after = Duration::from_millis(turn * 7 % 500);
            let message = records.message(&delayed_key, number);
            if let Ok(delayed) = producer.send_after(TOPIC, message, after).await {
                records.confirm(*process, &delayed_key, number, delayed.partition)?;
            }
        }
    }
    Ok(())
}

/// Handles messages in both groups and logs each effect with its epoch.
pub(crate) async fn consume(context: ProcessContext) -> Result<()> {
    let queue = context.queue()?;
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
    let mut subscriptions: Vec<Subscription> = Vec::new();
    for (group, config) in GROUPS.into_iter().zip([owned, shared]) {
        let records = Arc::clone(&context.records);
        let seen = Arc::new(Mutex::new(BTreeSet::new()));
        let handler = move |message: Message| {
            let (records, seen) = (Arc::clone(&records), Arc::clone(&seen));
            async move {
                records.rules.on_handler_start(group, &message);
                let (key, number) = read_payload(&message.payload)?;
                // So that some messages are in flight when the process stops.
                sleep(Duration::from_millis(number % 16)).await;
                let is_first_here = seen
                    .lock()
                    .expect("no code panics while it holds this lock")
                    .insert((key.to_owned(), number));
                handle(&records, group, is_first_here, &message)
            }
        };
        let subscription = loop {
            if context.shutdown.is_cancelled() {
                break None;
            }
            let subscribed = queue.subscribe(TOPIC, group, handler.clone(), config.clone()).await;
            if let Ok(subscription) = subscribed {
                break Some(subscription);
            }
            sleep(RETRY_PAUSE).await;
        };
        subscriptions.extend(subscription);
    }
    context.shutdown.cancelled().await;
    join_all(subscriptions.iter().map(Subscription::stop)).await;
    Ok(())
}

fn handle(
    records: &Records,
    group: &str,
    is_first_here: bool,
    message: &Message,
) -> Result<Outcome> {
    let (key, number) = read_payload(&message.payload).context("not a message of a producer")?;
    if number.is_multiple_of(13) && message.attempt == 1 {
        return Ok(Outcome::retry("the first attempt of every 13th fails"));
    }
    if number.is_multiple_of(17) && is_first_here {
        return Ok(Outcome::Release);
    }
    let kind = if is_poison(number) { "dead" } else { "done" };
    let epoch = message.epoch.map(|epoch| epoch.0);
    ensure!(epoch.is_some() == (group == OWNED), "only owners have an epoch");
    let log = EffectLog::open(&records.directory, group);
    let is_current = log.put(message.partition, epoch, key, number, kind)?;
    Ok(match kind {
        _ if !is_current => Outcome::retry("a newer owner exists"),
        "dead" => Outcome::dead_letter(format!("poison in {group}")),
        _ => Outcome::Done,
    })
}
