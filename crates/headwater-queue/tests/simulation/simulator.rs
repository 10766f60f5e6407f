//! The simulation: one Redis, one proxy per process, and the faults.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use headwater_queue::{Policies, Queue};
use headwater_stream::{EntryId, Options, Range, StreamName};
use headwater_testkit::{Child, Persistence, Proxy, Redis};
use tempfile::TempDir;

use super::ledger::{Ledger, is_poison};
use super::processes::{LEASE_TTL, TOPIC};

const CONSUMERS: usize = 3;
const PRODUCERS: usize = 2;
const PARTITIONS: u16 = 3;
const GROWN: u16 = 5;
/// Long enough for members to join.
const START_LIMIT: Duration = Duration::from_secs(30);

pub(crate) struct Simulation {
    random: SeededRandom,
    directory: TempDir,
    redis: Redis,
    runtime: tokio::runtime::Runtime,
    queue: Queue,
    consumers: Vec<SimulatedProcess>,
    producers: Vec<SimulatedProcess>,
    has_grown: bool,
    redis_is_dead: bool,
}

/// A process and its proxy.
struct SimulatedProcess {
    role: &'static str,
    number: usize,
    proxy: Proxy,
    child: Option<Child>,
}

impl Simulation {
    pub(crate) fn start(seed: u64) -> Result<Self> {
        // Confirmed writes survive `kill -9`.
        let redis = Redis::builder().persistence(Persistence::Always).start()?;
        let directory = TempDir::new()?;
        let runtime = tokio::runtime::Runtime::new()?;
        let queue = runtime.block_on(async {
            let backend = headwater_stream::connect(&redis.url(), &Options::default()).await?;
            let queue = Queue::new(backend);
            // A short refresh, so that the resize completes within the run.
            let policies = Policies { refresh: Duration::from_millis(500), ..Default::default() };
            queue.topics().create(TOPIC, PARTITIONS, policies).await?;
            anyhow::Ok(queue)
        })?;
        let process = |role, number| {
            anyhow::Ok(SimulatedProcess {
                role,
                number,
                proxy: Proxy::start(redis.addr())?,
                child: None,
            })
        };
        let consumers = (0..CONSUMERS).map(|n| process("consumer", n)).collect::<Result<_>>()?;
        let producers = (0..PRODUCERS).map(|n| process("producer", n)).collect::<Result<_>>()?;
        let random = SeededRandom(seed);
        let mut simulation = Self {
            random,
            directory,
            redis,
            runtime,
            queue,
            consumers,
            producers,
            has_grown: false,
            redis_is_dead: false,
        };
        simulation.heal()?;
        Ok(simulation)
    }

    pub(crate) fn ledger(&self) -> Ledger {
        Ledger::open(self.directory.path())
    }

    /// Injects one fault for a while.
    pub(crate) fn step(&mut self) -> Result<()> {
        let consumer = self.random.below(CONSUMERS as u64) as usize;
        let producer = self.random.below(PRODUCERS as u64) as usize;
        // Shorter or longer than the lease TTL.
        let time = Duration::from_millis(100 + self.random.below(2 * LEASE_TTL.as_millis() as u64));
        let what = self.random.below(13);
        println!("step {what}: consumer {consumer}, producer {producer}, {time:?}");
        match what {
            0 | 1 => self.consumers[consumer].kill(time)?,
            2 | 3 => self.consumers[consumer].pause(time)?,
            4 => self.consumers[consumer].proxy.stall()?,
            5 => self.consumers[consumer].proxy.cut()?,
            6 => self.producers[producer].kill(time)?,
            7 => self.producers[producer].proxy.stall()?,
            8 => self.producers[producer].proxy.cut()?,
            9 => {
                self.redis_is_dead = true;
                self.redis.kill9()?;
            }
            10 => self.grow()?,
            11 => self.producers[producer].pause(time)?,
            _ => self.stop_consumer(consumer)?,
        }
        std::thread::sleep(time);
        self.heal()
    }

    /// Ends all faults and restarts all processes.
    pub(crate) fn heal(&mut self) -> Result<()> {
        if std::mem::take(&mut self.redis_is_dead) {
            self.redis.restart()?;
        }
        for process in self.consumers.iter_mut().chain(&mut self.producers) {
            process.proxy.heal()?;
            if process.child.is_none() {
                let url = self.redis.url_at(process.proxy.addr());
                process.start(&url, self.directory.path())?;
            }
        }
        Ok(())
    }

    /// Stops one consumer gracefully; `heal` restarts it.
    fn stop_consumer(&mut self, number: usize) -> Result<()> {
        let file = self.directory.path().join(format!("stop-{number}"));
        fs::write(&file, "")?;
        stop(&mut self.consumers[number..=number], START_LIMIT)?;
        Ok(fs::remove_file(file)?)
    }

    fn grow(&mut self) -> Result<()> {
        if !std::mem::replace(&mut self.has_grown, true) {
            self.runtime.block_on(self.queue.topics().grow(TOPIC, GROWN))?;
        }
        Ok(())
    }

    /// Stops the producers: they exit when this file exists.
    pub(crate) fn stop_producers(&mut self, limit: Duration) -> Result<()> {
        fs::write(self.directory.path().join("stop-producers"), "")?;
        stop(&mut self.producers, limit)
    }

    pub(crate) fn stop_consumers(&mut self, limit: Duration) -> Result<()> {
        fs::write(self.directory.path().join("stop-consumers"), "")?;
        stop(&mut self.consumers, limit)
    }

    /// Checks that every poison message is a dead letter, once and unchanged.
    pub(crate) fn check_dead_letters(&self, limit: Duration) -> Result<()> {
        let expected: BTreeSet<String> = self
            .ledger()
            .confirmed()?
            .into_iter()
            .flat_map(|(key, last)| (1..=last).map(move |number| (key.clone(), number)))
            .filter(|(_, number)| is_poison(*number))
            .map(|(key, number)| format!("{key} {number}"))
            .collect();
        let all_there = || self.dead_letters().is_ok_and(|letters| letters.len() >= expected.len());
        // The effect is logged before the dead letter is written.
        let _ = headwater_testkit::wait_until("every dead letter", limit, all_there);
        let letters = self.dead_letters()?;
        let once: BTreeSet<String> = letters.iter().cloned().collect();
        ensure!(once.len() == letters.len(), "duplicate dead letters: {letters:?}");
        ensure!(once == expected, "not the same: {:?}", once.symmetric_difference(&expected));
        Ok(())
    }

    fn dead_letters(&self) -> Result<Vec<String>> {
        let stream = StreamName::new(format!("stream:topic:{TOPIC}:dlq"))?;
        let mut payloads = Vec::new();
        let mut from = EntryId::MIN;
        loop {
            let range = Range { from, ..Range::first(1000) };
            let letters = self.runtime.block_on(self.queue.backend().range(&stream, range))?;
            let Some(last) = letters.last() else { return Ok(payloads) };
            from = last.id.next();
            for letter in &letters {
                let payload = letter.fields.get("payload").context("a letter without payload")?;
                payloads.push(String::from_utf8(payload.to_vec())?);
            }
        }
    }
}

fn stop(processes: &mut [SimulatedProcess], limit: Duration) -> Result<()> {
    for process in processes {
        let child = process.child.take().context("running after heal")?;
        let status = child.wait(limit)?;
        ensure!(status.success(), "{} {} failed: {status}", process.role, process.number);
    }
    Ok(())
}

impl SimulatedProcess {
    fn start(&mut self, url: &str, directory: &std::path::Path) -> Result<()> {
        let directory = PathBuf::from(directory);
        let number = self.number.to_string();
        let directory = directory.to_string_lossy();
        let environment = [("URL", url), ("DIRECTORY", &directory), ("NUMBER", number.as_str())];
        let child = Child::spawn_self(self.role, &environment)?;
        child.line_after("READY", START_LIMIT)?;
        self.child = Some(child);
        Ok(())
    }

    /// Kills it; `heal` restarts it.
    fn kill(&mut self, _for: Duration) -> Result<()> {
        self.child.take().context("it is running")?.kill9()
    }

    fn pause(&mut self, time: Duration) -> Result<()> {
        let child = self.child.as_ref().context("it is running")?;
        child.pause()?;
        std::thread::sleep(time);
        child.resume()
    }
}

/// Seeded random numbers (splitmix64).
struct SeededRandom(u64);

impl SeededRandom {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}
