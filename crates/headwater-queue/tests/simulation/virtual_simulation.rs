//! The simulation without a server: producers and consumers of one `embedded:memory` backend under a virtual clock.
//!
//! `fault_schedule.rs` decides by the seed which process has which fault when; this file carries it out. Each process has a
//! runtime (`virtual_clock.rs`) and reaches the server through a faulty network (`faulty_backend.rs`). A run takes a fraction
//! of a second, so each test runs many seeds. The schedule is reproducible; the order in which tasks of a process run
//! is not quite, because names of processes, hash maps and `select!` are random.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use headwater_queue::{Policies, Queue};
use headwater_stream::{Backend, DelayName, EntryId, Options, Range, Retention, StreamName};
use headwater_testkit::{ChaosCounts, chaos_is_over};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::effect_log::EffectLog;
use super::fault_schedule::{CONSUMERS, Fault, PROCESSES, ScheduledFault, schedule};
use super::faulty_backend::Network;
use super::now_ms;
use super::processes::{GROUPS, OWNED, TOPIC, read_payload};
use super::virtual_clock::{VirtualClock, VirtualRuntime};
use super::virtual_processes::{ProcessContext, Records, consume, produce};

const SEEDS: u64 = 20;
/// Faults in each schedule, for each ten of `HEADWATER_STEPS`.
const STEPS: u64 = 20;
const PARTITIONS: u16 = 3;
const GROWN: u16 = 5;
/// More messages of a partition than any process has in hand; handled ones are trimmed.
const RETENTION: Retention = Retention::max_len(500);
/// The order of a key is promised while sends take less than this.
const REFRESH: Duration = Duration::from_secs(5);
/// Virtual time in which producers go on after the last fault.
const HEALTHY_MS: u64 = 1000;
/// Virtual time for anything that must happen.
const LIMIT_MS: u64 = 120_000;

struct VirtualSimulation {
    clock: VirtualClock,
    server: VirtualRuntime,
    backend: Arc<dyn Backend>,
    queue: Queue,
    records: Arc<Records>,
    processes: Vec<SimulatedProcess>,
    /// Runtimes of dead processes. Their tasks neither run nor end.
    dead: Vec<VirtualRuntime>,
    growth: Option<JoinHandle<headwater_queue::Result<()>>>,
    _directory: TempDir,
}

struct SimulatedProcess {
    number: usize,
    network: Arc<Network>,
    state: ProcessState,
}

enum ProcessState {
    Running(RunningProcess),
    Paused(RunningProcess, u64),
    /// Until when it is not started again.
    Down(u64),
}

struct RunningProcess {
    runtime: VirtualRuntime,
    main: JoinHandle<Result<()>>,
    shutdown: CancellationToken,
    /// When another one is started, if it shuts down.
    restart_ms: Option<u64>,
}

impl SimulatedProcess {
    fn start(&self, now_ms: u64, records: &Arc<Records>) -> Result<RunningProcess> {
        let runtime = VirtualRuntime::start(now_ms)?;
        let shutdown = CancellationToken::new();
        let context = ProcessContext {
            backend: self.network.connect(),
            records: Arc::clone(records),
            number: self.number,
            shutdown: shutdown.clone(),
        };
        let main = match self.number < CONSUMERS {
            true => runtime.handle().spawn(consume(context)),
            false => runtime.handle().spawn(produce(context)),
        };
        Ok(RunningProcess { runtime, main, shutdown, restart_ms: None })
    }

    /// Runs it for a millisecond, if it runs. Returns the runtime of a process that has ended.
    fn run_until(&mut self, now_ms: u64, records: &Arc<Records>) -> Result<Option<VirtualRuntime>> {
        self.state = match std::mem::replace(&mut self.state, ProcessState::Down(0)) {
            ProcessState::Running(running) => {
                running.runtime.run_until(now_ms);
                if running.main.is_finished() {
                    let RunningProcess { runtime, main, restart_ms, .. } = running;
                    runtime.block_on(main)??;
                    let until_ms = restart_ms.context("a process ended by itself")?;
                    self.network.close_reads();
                    self.state = ProcessState::Down(until_ms);
                    return Ok(Some(runtime));
                }
                ProcessState::Running(running)
            }
            ProcessState::Paused(running, until_ms) if until_ms <= now_ms => {
                running.runtime.skip_to(now_ms);
                ProcessState::Running(running)
            }
            ProcessState::Down(until_ms) if until_ms <= now_ms => {
                ProcessState::Running(self.start(now_ms, records)?)
            }
            waiting => waiting,
        };
        Ok(None)
    }

    fn shut_down(&mut self, restart_ms: u64) {
        if let ProcessState::Running(running) = &mut self.state {
            running.restart_ms = Some(restart_ms);
            running.shutdown.cancel();
        }
    }

    fn is_down(&self) -> bool {
        matches!(self.state, ProcessState::Down(_))
    }
}

impl VirtualSimulation {
    fn start() -> Result<Self> {
        let directory = TempDir::new()?;
        let clock = VirtualClock::new();
        let server = VirtualRuntime::start(0)?;
        let options = Options { clock: Arc::new(clock.clone()), ..Default::default() };
        let (backend, queue) = server.block_on(async {
            let backend = headwater_stream::connect("embedded:memory", &options).await?;
            let queue = Queue::new(Arc::clone(&backend));
            let policies =
                Policies { refresh: REFRESH, retention: RETENTION, ..Default::default() };
            queue.topics().create(TOPIC, PARTITIONS, policies).await?;
            anyhow::Ok((backend, queue))
        })?;
        let records = Arc::new(Records::new(directory.path().to_owned()));
        let processes = (0..PROCESSES).map(|number| {
            let (server, backend, clock) =
                (server.handle().clone(), backend.clone(), clock.clone());
            let network = Network::new(server, backend, clock, Arc::clone(&records.rules));
            SimulatedProcess { number, network, state: ProcessState::Down(0) }
        });
        let processes = processes.collect();
        Ok(Self {
            clock,
            server,
            backend,
            queue,
            records,
            processes,
            dead: Vec::new(),
            growth: None,
            _directory: directory,
        })
    }

    /// Lets a millisecond pass. Each process is the first one at times.
    fn tick(&mut self) -> Result<u64> {
        let now_ms = self.clock.tick();
        self.server.run_until(now_ms);
        for turn in 0..PROCESSES {
            let process = &mut self.processes[(now_ms as usize + turn) % PROCESSES];
            self.dead.extend(process.run_until(now_ms, &self.records)?);
        }
        Ok(now_ms)
    }

    /// Lets time pass until something is so.
    fn wait_until(&mut self, what: &str, is_so: impl Fn(&Self) -> Result<bool>) -> Result<()> {
        let until_ms = self.clock.elapsed_ms() + LIMIT_MS;
        while !is_so(self)? {
            if self.tick()? >= until_ms {
                bail!("timed out waiting for {what}");
            }
        }
        Ok(())
    }

    /// Begins a fault. A process that is still shutting down keeps doing that.
    fn begin(&mut self, scheduled: &ScheduledFault) {
        let ScheduledFault { until_ms, process, fault, .. } = *scheduled;
        let process = &mut self.processes[process];
        match fault {
            Fault::Refuse(_) | Fault::LoseReplies(_) | Fault::Delay(_) => {
                process.network.begin(fault, until_ms);
            }
            Fault::Full => {
                self.processes.iter().for_each(|process| process.network.begin(fault, until_ms));
            }
            Fault::BreakReads => process.network.close_reads(),
            Fault::Stop => process.shut_down(until_ms),
            Fault::Pause | Fault::Kill | Fault::Vanish => {
                let state = std::mem::replace(&mut process.state, ProcessState::Down(until_ms));
                let ProcessState::Running(running) = state else {
                    process.state = state;
                    return;
                };
                match fault {
                    Fault::Pause => {
                        process.network.pause_reads();
                        process.state = ProcessState::Paused(running, until_ms);
                        return;
                    }
                    Fault::Kill => process.network.close_reads(),
                    _ => process.network.orphan_reads(),
                }
                self.dead.push(running.runtime);
            }
            Fault::Grow => {
                let topics = self.queue.topics();
                let grow = async move { topics.grow(TOPIC, GROWN).await };
                self.growth = Some(self.server.handle().spawn(grow));
            }
        }
    }

    /// Runs the whole schedule, and then until everything is handled.
    fn run(&mut self, schedule: &[ScheduledFault]) -> Result<ChaosCounts> {
        for scheduled in schedule {
            while self.clock.elapsed_ms() < scheduled.at_ms {
                self.tick()?;
            }
            self.begin(scheduled);
        }
        let last_ms = schedule.iter().map(|fault| fault.until_ms).max().unwrap_or(0);
        self.wait_until("the end of all faults", |simulation| {
            let is_running = |process: &SimulatedProcess| {
                matches!(&process.state, ProcessState::Running(running) if running.restart_ms.is_none())
            };
            let is_over = simulation.clock.elapsed_ms() >= last_ms + HEALTHY_MS;
            Ok(is_over && simulation.processes.iter().all(is_running))
        })?;
        self.shut_down("producers", CONSUMERS..PROCESSES)?;
        self.wait_until("messages to be handled", |simulation| {
            // Asking costs more than a millisecond of the simulation.
            Ok(simulation.clock.elapsed_ms().is_multiple_of(50)
                && simulation.unsettled()?.is_empty())
        })
        .with_context(|| format!("{:?}", self.unsettled()))?;
        self.shut_down("consumers", 0..CONSUMERS)?;
        self.check()
    }

    fn shut_down(&mut self, what: &str, processes: std::ops::Range<usize>) -> Result<()> {
        self.processes[processes.clone()].iter_mut().for_each(|one| one.shut_down(u64::MAX));
        self.wait_until(what, |simulation| {
            Ok(simulation.processes[processes.clone()].iter().all(SimulatedProcess::is_down))
        })
    }

    /// What is delayed, pending or not delivered.
    fn unsettled(&self) -> Result<Vec<String>> {
        self.server.block_on(async {
            let mut unsettled = Vec::new();
            if self.growth.as_ref().is_some_and(|growth| !growth.is_finished()) {
                unsettled.push("the topic grows".to_owned());
            }
            let delays = DelayName::new(format!("streaming:mq:retry:{TOPIC}"))?;
            let delayed = self.backend.delay_stats(&delays).await?.waiting;
            if delayed > 0 {
                unsettled.push(format!("{delayed} delayed"));
            }
            for partition in self.queue.topics().describe(TOPIC).await?.partitions {
                let stream = StreamName::new(partition.stream_key)?;
                let groups = self.backend.stats(&stream).await?.map_or(Vec::new(), |s| s.groups);
                for name in GROUPS {
                    let group = groups.iter().find(|group| group.name.as_str() == name);
                    if group.is_none_or(|group| group.pending > 0 || group.lag != Some(0)) {
                        unsettled.push(format!("{stream}: {name}: {group:?}"));
                    }
                }
            }
            Ok(unsettled)
        })
    }

    fn check(&self) -> Result<ChaosCounts> {
        let (records, ledger) = (&self.records, self.records.ledger());
        for group in GROUPS {
            let missing = ledger.missing(group)?;
            ensure!(missing.is_empty(), "lost by `{group}`: {missing:?}");
            for effect in EffectLog::open(&records.directory, group).effects()? {
                let was_sent = records.was_attempted(&effect.key, effect.number);
                ensure!(was_sent, "`{group}` handled {effect:?}, which was not sent");
            }
        }
        ledger.check_order(OWNED)?;
        let violations = records.rules.violations();
        ensure!(violations.is_empty(), "{violations:#?}");
        for group in GROUPS {
            let expected: BTreeMap<(String, u64), usize> =
                ledger.poison(group)?.into_keys().map(|message| (message, 1)).collect();
            let letters = self.dead_letters(group)?;
            ensure!(
                letters == expected,
                "dead letters of `{group}`: {letters:?}, not {expected:?}"
            );
        }
        ledger.counts()
    }

    /// How many dead letters of a group each message has.
    fn dead_letters(&self, group: &str) -> Result<BTreeMap<(String, u64), usize>> {
        let stream = StreamName::new(format!("stream:topic:{TOPIC}:dlq"))?;
        let mut found = BTreeMap::new();
        let mut from = EntryId::MIN;
        loop {
            let range = Range { from, ..Range::first(1000) };
            let letters = self.server.block_on(self.backend.range(&stream, range))?;
            let Some(last) = letters.last() else { return Ok(found) };
            from = last.id.next();
            for letter in &letters {
                let of = letter.fields.get("retryGroup").context("a letter without group")?;
                if of == group.as_bytes() {
                    let payload = letter.fields.get("payload").context("no payload")?;
                    let (key, number) = read_payload(payload)?;
                    *found.entry((key.to_owned(), number)).or_default() += 1;
                }
            }
        }
    }
}

/// Runs the schedule of a seed.
fn run(seed: u64, steps: u64) -> Result<ChaosCounts> {
    // The jitter of backoffs.
    fastrand::seed(seed);
    let schedule = schedule(seed, steps);
    let mut simulation = VirtualSimulation::start()?;
    let counts = simulation.run(&schedule);
    let at = format!("HEADWATER_SEED={seed}, {} ms", simulation.clock.elapsed_ms());
    let counts = counts.with_context(|| format!("{at}, faults: {schedule:#?}"))?;
    println!("{at}, {} calls were refused by fences", simulation.records.rules.refused());
    Ok(counts)
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

/// So many steps for each ten of `HEADWATER_STEPS`.
fn steps() -> u64 {
    number("HEADWATER_STEPS").map_or(STEPS, |chosen| (chosen * STEPS).div_ceil(10))
}

#[test]
fn no_seed_of_faults_loses_a_message_or_breaks_the_order_of_a_key() -> Result<()> {
    // The same seeds in every run of the suite, and new ones in chaos.
    let is_chaos = std::env::var_os("HEADWATER_CHAOS_END").is_some();
    let chosen = || if is_chaos { now_ms() } else { 1 };
    let first = number("HEADWATER_SEED").unwrap_or_else(chosen);
    println!("HEADWATER_SEED={first} and the {} after it, {} steps each", SEEDS - 1, steps());
    let mut total = ChaosCounts::default();
    for seed in first..first + SEEDS {
        if seed > first && chaos_is_over() {
            break;
        }
        let counts = run(seed, steps())?;
        total.sent += counts.sent;
        total.handled += counts.handled;
        total.doubled += counts.doubled;
        total.lost += counts.lost;
    }
    total.report("simulation without a server")
}

#[test]
fn a_seed_gives_one_schedule_of_faults() {
    let seed = number("HEADWATER_SEED").unwrap_or_else(now_ms);
    assert_eq!(schedule(seed, steps()), schedule(seed, steps()));
    assert_ne!(schedule(seed, steps()), schedule(seed + 1, steps()));
}
