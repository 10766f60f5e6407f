//! The world of the simulation: one Redis, a network of its own for each process, and what can go wrong.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use headwater_queue::{Policies, Queue};
use headwater_stream::{EntryId, Options, Range, StreamName};
use headwater_testkit::{Child, Persistence, Proxy, Redis};
use tempfile::TempDir;

use super::books::{Books, is_poison};
use super::roles::{LEASE_TTL, TOPIC};

const CONSUMERS: usize = 3;
const PRODUCERS: usize = 2;
const PARTITIONS: u16 = 3;
const GROWN: u16 = 5;
/// Long enough for members to join.
const START_LIMIT: Duration = Duration::from_secs(30);

pub(crate) struct World {
    chance: Chance,
    directory: TempDir,
    redis: Redis,
    runtime: tokio::runtime::Runtime,
    queue: Queue,
    consumers: Vec<Place>,
    producers: Vec<Place>,
    has_grown: bool,
    redis_is_dead: bool,
}

/// A process and its network.
struct Place {
    role: &'static str,
    number: usize,
    proxy: Proxy,
    child: Option<Child>,
}

impl World {
    pub(crate) fn start(seed: u64) -> Result<Self> {
        // What it confirmed, it has: also after `kill -9`.
        let redis = Redis::builder().persistence(Persistence::Always).start()?;
        let directory = TempDir::new()?;
        let runtime = tokio::runtime::Runtime::new()?;
        let queue = runtime.block_on(async {
            let backend = headwater_stream::connect(&redis.url(), &Options::default()).await?;
            let queue = Queue::new(backend);
            // Growing is to be over within the run.
            let policies = Policies { refresh: Duration::from_millis(500), ..Default::default() };
            queue.topics().create(TOPIC, PARTITIONS, policies).await?;
            anyhow::Ok(queue)
        })?;
        let place = |role, number| {
            anyhow::Ok(Place { role, number, proxy: Proxy::start(redis.addr())?, child: None })
        };
        let consumers = (0..CONSUMERS).map(|n| place("consumer", n)).collect::<Result<_>>()?;
        let producers = (0..PRODUCERS).map(|n| place("producer", n)).collect::<Result<_>>()?;
        let chance = Chance(seed);
        let mut world = Self {
            chance,
            directory,
            redis,
            runtime,
            queue,
            consumers,
            producers,
            has_grown: false,
            redis_is_dead: false,
        };
        world.heal()?;
        Ok(world)
    }

    pub(crate) fn books(&self) -> Books {
        Books::open(self.directory.path())
    }

    /// One thing goes wrong, for a while.
    pub(crate) fn step(&mut self) -> Result<()> {
        let consumer = self.chance.below(CONSUMERS as u64) as usize;
        let producer = self.chance.below(PRODUCERS as u64) as usize;
        // Shorter and longer than a lease lives.
        let time = Duration::from_millis(100 + self.chance.below(2 * LEASE_TTL.as_millis() as u64));
        let what = self.chance.below(13);
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

    /// Every network works and every process runs.
    pub(crate) fn heal(&mut self) -> Result<()> {
        if std::mem::take(&mut self.redis_is_dead) {
            self.redis.restart()?;
        }
        for place in self.consumers.iter_mut().chain(&mut self.producers) {
            place.proxy.heal()?;
            if place.child.is_none() {
                let url = self.redis.url_at(place.proxy.addr());
                place.start(&url, self.directory.path())?;
            }
        }
        Ok(())
    }

    /// One consumer goes in good order, and comes back when the world is healed.
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

    /// Producers end when they find this file.
    pub(crate) fn stop_producers(&mut self, limit: Duration) -> Result<()> {
        fs::write(self.directory.path().join("enough"), "")?;
        stop(&mut self.producers, limit)
    }

    pub(crate) fn stop_consumers(&mut self, limit: Duration) -> Result<()> {
        fs::write(self.directory.path().join("over"), "")?;
        stop(&mut self.consumers, limit)
    }

    /// Every poison message is a dead letter, once, with its bytes.
    pub(crate) fn check_dead_letters(&self, limit: Duration) -> Result<()> {
        let expected: BTreeSet<String> = self
            .books()
            .confirmed()?
            .into_iter()
            .flat_map(|(key, last)| (1..=last).map(move |number| (key.clone(), number)))
            .filter(|(_, number)| is_poison(*number))
            .map(|(key, number)| format!("{key} {number}"))
            .collect();
        let all_there = || self.dead_letters().is_ok_and(|letters| letters.len() >= expected.len());
        // The effect comes before the letter.
        let _ = headwater_testkit::wait_until("every dead letter is there", limit, all_there);
        let letters = self.dead_letters()?;
        let once: BTreeSet<String> = letters.iter().cloned().collect();
        ensure!(once.len() == letters.len(), "dead letters come twice: {letters:?}");
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

fn stop(places: &mut [Place], limit: Duration) -> Result<()> {
    for place in places {
        let child = place.child.take().context("it was healed before")?;
        let status = child.wait(limit)?;
        ensure!(status.success(), "{} {} failed: {status}", place.role, place.number);
    }
    Ok(())
}

impl Place {
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

    /// Dead; `heal` starts it anew.
    fn kill(&mut self, _for: Duration) -> Result<()> {
        self.child.take().context("it runs")?.kill9()
    }

    fn pause(&mut self, time: Duration) -> Result<()> {
        let child = self.child.as_ref().context("it runs")?;
        child.pause()?;
        std::thread::sleep(time);
        child.resume()
    }
}

/// Numbers by chance, the same for the same seed (splitmix64).
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}
