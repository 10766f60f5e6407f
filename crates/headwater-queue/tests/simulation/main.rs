//! A seeded simulation: producers and consumers are real processes that are killed, paused and disconnected at random
//! while the topic grows. Afterwards every confirmed message must have its effect.
//!
//! `HEADWATER_SEED` repeats a run, `HEADWATER_STEPS` sets how much happens in it (`cargo xtask chaos` raises it).

mod effect_log;
mod ledger;
mod processes;
mod simulator;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use simulator::Simulation;

const STEPS_DEFAULT: u32 = 10;
/// Time for the remaining work after the last fault.
const LIMIT: Duration = Duration::from_secs(90);

#[test]
fn crashes_lose_no_message_and_keep_the_order_per_key() -> anyhow::Result<()> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let from_clock =
        || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis() as u64);
    let seed = number("HEADWATER_SEED").unwrap_or_else(from_clock);
    let steps = number("HEADWATER_STEPS").map_or(STEPS_DEFAULT, |steps| steps as u32);
    println!("HEADWATER_SEED={seed} HEADWATER_STEPS={steps}");

    // Given a topic, two producers and three consumers.
    let mut simulation = Simulation::start(seed)?;
    // When faults happen for a while, and then no more.
    for _ in 0..steps {
        simulation.step()?;
    }
    simulation.heal()?;
    simulation.stop_producers(LIMIT)?;
    // Then every confirmed message has its effect, in order per key, and poison messages are dead letters.
    let ledger = simulation.ledger();
    let settled = headwater_testkit::wait_until("every effect", LIMIT, || {
        ledger.missing().is_ok_and(|missing| missing.is_empty())
    });
    anyhow::ensure!(settled.is_ok(), "lost: {:?}", ledger.missing()?);
    ledger.check_order()?;
    simulation.check_dead_letters(LIMIT)?;
    simulation.stop_consumers(LIMIT)?;
    println!("{}", ledger.summary()?);
    Ok(())
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
