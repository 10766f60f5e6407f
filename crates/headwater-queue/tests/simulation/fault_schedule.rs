//! The schedule of faults of the simulation without a server: a pure function of the seed.

use headwater_testkit::TestRandom;

use super::processes::LEASE_TTL;

pub(crate) const CONSUMERS: usize = 3;
pub(crate) const PRODUCERS: usize = 2;
pub(crate) const PROCESSES: usize = CONSUMERS + PRODUCERS;

const LEASE_TTL_MS: u64 = LEASE_TTL.as_millis() as u64;
/// Pause between the beginnings of two faults. Several are active at a time.
const GAP_MS: std::ops::Range<u64> = 50..500;
/// Faults of consumers last shorter or longer than a lease.
const CONSUMER_MS: std::ops::Range<u64> = 100..2 * LEASE_TTL_MS + 100;
/// Faults of producers are short: the order of a key is promised while a send takes less than the `refresh` of its topic.
const PRODUCER_MS: std::ops::Range<u64> = 100..1200;
/// How long a producer is not stopped again, so that one send has at most one pause.
const PRODUCER_REST_MS: u64 = 5000;
/// Shorter or longer than the deadline of a call.
const DELAY_MS: std::ops::Range<u64> = 20..1200;

/// What a call is about. A fault may hit some calls only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallClass {
    /// Sending messages.
    Send,
    /// Reading and promoting messages.
    Read,
    /// Settling and reclaiming messages.
    Settle,
    /// Leases, members and topics.
    Membership,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Calls fail and have no effect. `None`: all calls.
    Refuse(Option<CallClass>),
    /// Calls have their effect and fail.
    LoseReplies(Option<CallClass>),
    /// Requests arrive so many milliseconds later, also after the caller has given up or has died.
    Delay(u64),
    /// The server has no space: writes of all processes fail with `Full`.
    Full,
    /// The connections of blocking reads break.
    BreakReads,
    /// The process is stopped with `SIGSTOP` and continues. Its blocking reads go on at the server.
    Pause,
    /// The process is killed, and another one started. The server closes its connections.
    Kill,
    /// The same, but the server does not notice, and its blocking reads go on.
    Vanish,
    /// The process shuts down, and another one is started.
    Stop,
    /// The topic gets more partitions.
    Grow,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ScheduledFault {
    /// When it begins, in milliseconds since the start of the simulation.
    pub(crate) at_ms: u64,
    /// When it ends.
    pub(crate) until_ms: u64,
    /// Its process: first the consumers, then the producers.
    pub(crate) process: usize,
    pub(crate) fault: Fault,
}

impl Fault {
    /// Whether the process does not run meanwhile.
    pub(crate) fn stops_process(self) -> bool {
        matches!(self, Self::Pause | Self::Kill | Self::Vanish | Self::Stop)
    }
}

/// The faults of a seed, in the order they begin. All kinds come once before any comes again, in random order.
pub(crate) fn schedule(seed: u64, steps: u64) -> Vec<ScheduledFault> {
    let mut random = TestRandom::seeded(seed);
    let (mut at_ms, mut kinds) = (500, Vec::new());
    let mut has_grown = false;
    // When each process may be stopped again.
    let mut free_at = [0; PROCESSES];
    let mut schedule = Vec::new();
    while (schedule.len() as u64) < steps {
        if kinds.is_empty() {
            kinds = shuffled_kinds(&mut random);
            if std::mem::replace(&mut has_grown, true) {
                kinds.retain(|kind| *kind != Fault::Grow);
            }
        }
        let Some(fault) = kinds.pop() else { continue };
        at_ms += random.between(GAP_MS);
        // Only consumers have blocking reads and a shutdown.
        let among = match fault {
            Fault::BreakReads | Fault::Stop => CONSUMERS,
            _ => PROCESSES,
        };
        let chosen = random.between(0..among as u64) as usize;
        let mut candidates = (0..among).map(|next| (chosen + next) % among);
        let is_free = |process: &usize| !fault.stops_process() || free_at[*process] <= at_ms;
        let Some(process) = candidates.find(is_free) else {
            kinds.push(fault);
            continue;
        };
        let (times, rest) = match process >= CONSUMERS {
            true => (PRODUCER_MS, PRODUCER_REST_MS),
            false => (CONSUMER_MS, 0),
        };
        let until_ms = at_ms + random.between(times);
        if fault.stops_process() {
            free_at[process] = until_ms + rest;
        }
        schedule.push(ScheduledFault { at_ms, until_ms, process, fault });
    }
    schedule
}

fn shuffled_kinds(random: &mut TestRandom) -> Vec<Fault> {
    use Fault::*;
    let classes = [CallClass::Send, CallClass::Read, CallClass::Settle, CallClass::Membership];
    let mut kinds = vec![
        Refuse(None),
        LoseReplies(None),
        Delay(random.between(DELAY_MS)),
        Delay(random.between(DELAY_MS)),
        Full,
        BreakReads,
        Pause,
        Pause,
        Pause,
        Kill,
        Kill,
        Vanish,
        Stop,
        Grow,
    ];
    kinds.extend(classes.map(|class| LoseReplies(Some(class))));
    kinds.push(Refuse(Some(classes[random.between(0..4) as usize])));
    for at in (1..kinds.len()).rev() {
        kinds.swap(at, random.between(0..at as u64 + 1) as usize);
    }
    kinds
}
