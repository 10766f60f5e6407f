//! The simulation: producers and consumers on some servers, and the schedule of faults, which the seed decides.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use headwater_queue::{Policies, Queue};
use headwater_stream::{EntryId, Options, Range, Retention, StreamName};
use headwater_testkit::{Child, Proxy};
use tempfile::TempDir;

use super::deployment::{Deployment, LossCause, LossWindow};
use super::ledger::{Ledger, is_poison};
use super::processes::{GROUPS, LEASE_TTL, OWNED, TOPIC, read_payload};

const CONSUMERS: usize = 3;
const PRODUCERS: usize = 2;
const PARTITIONS: u16 = 3;
const GROWN: u16 = 5;
/// More messages of a partition than any process has in hand; handled ones are trimmed.
const RETAINED: u64 = 5000;
/// Long enough for members to join.
const START_LIMIT: Duration = Duration::from_secs(30);

pub(crate) struct Simulation {
    random: SeededRandom,
    directory: TempDir,
    deployment: Deployment,
    runtime: tokio::runtime::Runtime,
    queue: Queue,
    consumers: Vec<SimulatedProcess>,
    producers: Vec<SimulatedProcess>,
    /// The faults to come, the last one first.
    schedule: Vec<Fault>,
    has_begun: bool,
    has_grown: bool,
    /// Faults that were injected.
    steps: usize,
    windows: Vec<LossWindow>,
}

/// A process, and its proxy if there is one server.
struct SimulatedProcess {
    role: &'static str,
    number: usize,
    proxy: Option<Proxy>,
    child: Option<Child>,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    KillConsumer,
    PauseConsumer,
    StopConsumer,
    StallConsumer,
    CutConsumer,
    KillProducer,
    PauseProducer,
    StallProducer,
    CutProducer,
    GrowTopic,
    FillMemory,
    KillServer,
    FailOver,
    MoveSlot,
}

/// The faults of a deployment: first those that it alone can have, then those of processes.
fn faults(deployment: &Deployment) -> (&'static [Fault], &'static [Fault]) {
    use Fault::*;
    let processes: &[Fault] = &[
        KillConsumer,
        KillConsumer,
        PauseConsumer,
        PauseConsumer,
        StopConsumer,
        KillProducer,
        PauseProducer,
        GrowTopic,
    ];
    let servers: &[Fault] = match deployment {
        Deployment::OneServer(_) => {
            &[StallConsumer, CutConsumer, StallProducer, CutProducer, KillServer, FillMemory]
        }
        Deployment::Sentinel(_) => &[FailOver, FillMemory],
        Deployment::Cluster(_) => &[FailOver, MoveSlot, FillMemory],
    };
    (servers, processes)
}

impl Simulation {
    pub(crate) fn start(seed: u64, deployment: Deployment) -> Result<Self> {
        let directory = TempDir::new()?;
        let runtime = tokio::runtime::Runtime::new()?;
        let queue = runtime.block_on(async {
            let backend = headwater_stream::connect(&deployment.url(), &Options::default()).await?;
            let queue = Queue::new(backend);
            // A short refresh, so that the resize completes within the run.
            let refresh = Duration::from_millis(500);
            let retention = Retention::max_len(RETAINED);
            let policies = Policies { refresh, retention, ..Default::default() };
            queue.topics().create(TOPIC, PARTITIONS, policies).await?;
            anyhow::Ok(queue)
        })?;
        let process = |role, number| {
            let proxy = deployment.one().map(|redis| Proxy::start(redis.addr())).transpose()?;
            anyhow::Ok(SimulatedProcess { role, number, proxy, child: None })
        };
        let consumers = (0..CONSUMERS).map(|n| process("consumer", n)).collect::<Result<_>>()?;
        let producers = (0..PRODUCERS).map(|n| process("producer", n)).collect::<Result<_>>()?;
        let mut simulation = Self {
            random: SeededRandom(seed),
            directory,
            deployment,
            runtime,
            queue,
            consumers,
            producers,
            schedule: Vec::new(),
            has_begun: false,
            has_grown: false,
            steps: 0,
            windows: Vec::new(),
        };
        simulation.heal()?;
        Ok(simulation)
    }

    pub(crate) fn ledger(&self) -> Ledger {
        Ledger::open(self.directory.path(), self.windows.clone())
    }

    /// The next fault. All of them come once before any comes again; in the first round those of servers come first, so
    /// that a short run has them.
    fn next_fault(&mut self) -> Fault {
        if let Some(fault) = self.schedule.pop() {
            return fault;
        }
        let (servers, processes) = faults(&self.deployment);
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        let mut from = 0;
        for some in [processes, servers] {
            self.schedule.extend(some);
            let len = self.schedule.len();
            for at in (from + 1..len).rev() {
                let with = from + self.random.below((at - from + 1) as u64) as usize;
                self.schedule.swap(at, with);
            }
            from = if is_first { len } else { 0 };
        }
        self.schedule.pop().expect("there are faults")
    }

    /// Injects one fault for a while.
    pub(crate) fn step(&mut self) -> Result<()> {
        let consumer = self.random.below(CONSUMERS as u64) as usize;
        let producer = self.random.below(PRODUCERS as u64) as usize;
        let partition = self.random.below(u64::from(PARTITIONS)) as usize;
        // Shorter or longer than the lease TTL.
        let time = Duration::from_millis(100 + self.random.below(2 * LEASE_TTL.as_millis() as u64));
        let fault = self.next_fault();
        println!(
            "{fault:?}: consumer {consumer}, producer {producer}, partition {partition}, {time:?}"
        );
        match fault {
            Fault::KillConsumer => self.consumers[consumer].kill()?,
            Fault::PauseConsumer => self.consumers[consumer].pause(time)?,
            Fault::StopConsumer => self.stop_consumer(consumer)?,
            Fault::StallConsumer => self.consumers[consumer].proxy()?.stall()?,
            Fault::CutConsumer => self.consumers[consumer].proxy()?.cut()?,
            Fault::KillProducer => self.producers[producer].kill()?,
            Fault::PauseProducer => self.producers[producer].pause(time)?,
            Fault::StallProducer => self.producers[producer].proxy()?.stall()?,
            Fault::CutProducer => self.producers[producer].proxy()?.cut()?,
            Fault::GrowTopic => self.grow()?,
            Fault::FillMemory => self.deployment.set_maxmemory(1)?,
            Fault::KillServer => self.deployment.one().context("one server")?.kill9()?,
            Fault::FailOver => {
                let streams = self.streams()?;
                let window = self.deployment.fail_over(&streams, &streams[partition], time)?;
                self.windows.extend(window);
            }
            Fault::MoveSlot => self.deployment.move_slot(&self.streams()?[partition])?,
        }
        self.steps += 1;
        std::thread::sleep(time);
        self.heal()
    }

    /// Checks that servers with replicas had a fail-over. Their first faults include one, see `next_fault`.
    pub(crate) fn check_fail_overs(&self) -> Result<()> {
        let (servers, _) = faults(&self.deployment);
        let is_due = self.deployment.one().is_none() && self.steps >= servers.len();
        ensure!(!is_due || !self.windows.is_empty(), "no fail-over in {} steps", self.steps);
        Ok(())
    }

    /// Prints for how long confirmed writes could be lost at most.
    pub(crate) fn print_longest_windows(&self) {
        for cause in [LossCause::FailOver, LossCause::Restart] {
            match LossWindow::longest(&self.windows, cause) {
                Some(longest) => println!("the longest loss window by {cause:?} was {longest:?}"),
                None => println!("no loss window by {cause:?}"),
            }
        }
    }

    /// The streams of all partitions.
    fn streams(&self) -> Result<Vec<String>> {
        let topics = self.queue.topics();
        let mut last = None;
        // A server may be taking over.
        for _ in 0..50 {
            match self.runtime.block_on(topics.describe(TOPIC)) {
                Ok(described) => {
                    let streams = described.partitions.into_iter();
                    return Ok(streams.map(|partition| partition.stream_key).collect());
                }
                Err(error) => last = Some(error),
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Err(last.context("no attempt")?.into())
    }

    /// Ends all faults and restarts all processes.
    pub(crate) fn heal(&mut self) -> Result<()> {
        let window = self.deployment.heal(self.windows.last())?;
        self.windows.extend(window);
        for process in self.consumers.iter_mut().chain(&mut self.producers) {
            if let Some(proxy) = &process.proxy {
                proxy.heal()?;
            }
            if process.child.is_none() {
                let url = match (&process.proxy, self.deployment.one()) {
                    (Some(proxy), Some(redis)) => redis.url_at(proxy.addr()),
                    _ => self.deployment.url(),
                };
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

    /// Checks that every poison message is a dead letter of each group, unless a server may have lost it. One server writes
    /// the dead letters of owners once.
    pub(crate) fn check_dead_letters(&self, limit: Duration) -> Result<()> {
        let ledger = self.ledger();
        for group in GROUPS {
            let poison = ledger.poison(group)?;
            let expected: BTreeSet<(String, u64)> = poison
                .iter()
                .filter(|(_, handled_at)| !ledger.may_have_lost_dead_letter(**handled_at))
                .map(|(message, _)| message.clone())
                .collect();
            let missing = || -> Result<Vec<(String, u64)>> {
                let letters = self.dead_letters(group)?;
                Ok(expected
                    .iter()
                    .filter(|message| !letters.contains_key(message))
                    .cloned()
                    .collect())
            };
            // The effect is logged before the dead letter is written.
            let _ = headwater_testkit::wait_until("every dead letter", limit, || {
                missing().is_ok_and(|missing| missing.is_empty())
            });
            let missing = missing()?;
            ensure!(missing.is_empty(), "no dead letters of `{group}` for {missing:?}");
            for (message, times) in self.dead_letters(group)? {
                ensure!(is_poison(message.1), "{message:?} is not poison");
                let is_exact = self.deployment.one().is_some() && group == OWNED;
                ensure!(times == 1 || !is_exact, "{times} dead letters of {message:?}");
            }
        }
        Ok(())
    }

    /// How many dead letters of a group each message has.
    fn dead_letters(&self, group: &str) -> Result<BTreeMap<(String, u64), usize>> {
        let stream = StreamName::new(format!("stream:topic:{TOPIC}:dlq"))?;
        let mut found = BTreeMap::new();
        let mut from = EntryId::MIN;
        loop {
            let range = Range { from, ..Range::first(1000) };
            let letters = self.runtime.block_on(self.queue.backend().range(&stream, range))?;
            let Some(last) = letters.last() else { return Ok(found) };
            from = last.id.next();
            for letter in &letters {
                let reason = letter.fields.get("reason").context("a letter without reason")?;
                if !reason.ends_with(group.as_bytes()) {
                    continue;
                }
                let payload = letter.fields.get("payload").context("a letter without payload")?;
                let (key, number) = read_payload(payload)?;
                *found.entry((key.to_owned(), number)).or_default() += 1;
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

    fn proxy(&self) -> Result<&Proxy> {
        self.proxy.as_ref().context("only one server is reached through proxies")
    }

    /// Kills it; `heal` restarts it.
    fn kill(&mut self) -> Result<()> {
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
