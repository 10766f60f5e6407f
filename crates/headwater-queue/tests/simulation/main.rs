//! A seeded simulation: producers and consumers are real processes that are killed, paused and disconnected at random
//! while the topic grows, on one server, on Sentinel and on a cluster. Two groups consume: one with `Owned` partitions in
//! order per key, one with `Shared` ones. Messages are sent one by one, in batches and delayed; some are large.
//! Afterwards every confirmed message must have its effect in both groups. What a fail-over may lose is known by the
//! state of the replication: before it, a `WAIT` confirms what the replica has; from then on the replica is disconnected, and what
//! is written until the primary is killed may be lost (`deployment.rs`).
//!
//! `virtual_simulation.rs` is a simulation of the same work without a server, under a virtual clock: many seeds in seconds.
//!
//! `HEADWATER_SEED` repeats a schedule of faults, `HEADWATER_STEPS` sets how much happens in it (`cargo xtask chaos` raises
//! it), `HEADWATER_CHAOS_END` is the time (seconds since 1970) after which no further fault begins.

mod deployment;
mod effect_log;
mod fault_schedule;
mod faulty_backend;
mod fence_rules;
mod ledger;
mod processes;
mod simulator;
mod virtual_clock;
mod virtual_processes;
mod virtual_simulation;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use deployment::Deployment;
use simulator::Simulation;

/// Time for the remaining work after the last fault.
const LIMIT: Duration = Duration::from_secs(90);

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis() as u64)
}

/// Runs so many steps by default, and as many for each ten of `HEADWATER_STEPS`.
fn simulate(test: &str, deployment: Deployment, steps: u64) -> anyhow::Result<()> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seed = number("HEADWATER_SEED").unwrap_or_else(now_ms);
    let steps = number("HEADWATER_STEPS").map_or(steps, |chosen| (chosen * steps).div_ceil(10));
    println!("HEADWATER_SEED={seed}, {steps} steps");

    // Given a topic, two producers and three consumers.
    let mut simulation = Simulation::start(seed, deployment)?;
    // When faults happen for a while, and then no more.
    for _ in 0..steps {
        if headwater_testkit::chaos_is_over() {
            break;
        }
        simulation.step()?;
    }
    simulation.check_fail_overs()?;
    simulation.heal()?;
    simulation.print_longest_windows();
    simulation.stop_producers(LIMIT)?;
    // Then every confirmed message has its effect, in order per key, and poison messages are dead letters.
    let ledger = simulation.ledger();
    for group in processes::GROUPS {
        let settled = headwater_testkit::wait_until("every effect", LIMIT, || {
            ledger.missing(group).is_ok_and(|missing| missing.is_empty())
        });
        anyhow::ensure!(settled.is_ok(), "lost by `{group}`: {:?}", ledger.missing(group)?);
    }
    ledger.check_order(processes::OWNED)?;
    simulation.check_dead_letters(LIMIT)?;
    simulation.stop_consumers(LIMIT)?;
    ledger.counts()?.report(test)
}

#[test]
fn crashes_lose_no_message_and_keep_the_order_per_key() -> anyhow::Result<()> {
    simulate("simulation on one server", Deployment::one_server()?, 10)
}

#[test]
fn a_cluster_loses_only_what_was_not_replicated() -> anyhow::Result<()> {
    simulate("simulation on a cluster", Deployment::cluster()?, 4)
}

#[test]
fn a_sentinel_service_loses_only_what_was_not_replicated() -> anyhow::Result<()> {
    simulate("simulation on Sentinel", Deployment::sentinel()?, 3)
}

#[test]
#[ignore = "started as a child process by the simulation"]
fn producer() -> anyhow::Result<()> {
    processes::produce()
}

#[test]
#[ignore = "started as a child process by the simulation"]
fn consumer() -> anyhow::Result<()> {
    processes::consume()
}
