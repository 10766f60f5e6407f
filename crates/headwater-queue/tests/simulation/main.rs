//! A simulation by seed: producers and consumers are real processes that are killed, paused and cut off at random while
//! the topic grows, and afterwards the books must balance.
//!
//! `HEADWATER_SEED` repeats a run, `HEADWATER_STEPS` sets how much happens in it (`cargo xtask chaos` raises it).

mod books;
mod roles;
mod sink;
mod world;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use world::World;

const STEPS_DEFAULT: u32 = 10;
/// How long the survivors get to finish what is left.
const LIMIT: Duration = Duration::from_secs(90);

#[test]
fn whatever_dies_nothing_is_lost_and_each_key_keeps_its_order() -> anyhow::Result<()> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let from_clock =
        || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis() as u64);
    let seed = number("HEADWATER_SEED").unwrap_or_else(from_clock);
    let steps = number("HEADWATER_STEPS").map_or(STEPS_DEFAULT, |steps| steps as u32);
    println!("HEADWATER_SEED={seed} HEADWATER_STEPS={steps}");

    // Given a topic, two producers and three consumers.
    let mut world = World::start(seed)?;
    // When for a while one thing after another goes wrong, and then nothing any more.
    for _ in 0..steps {
        world.step()?;
    }
    world.heal()?;
    world.stop_producers(LIMIT)?;
    // Then everything that was confirmed has happened, in the order of its key, and what was poison is a dead letter.
    let books = world.books();
    let settled = headwater_testkit::wait_until("every effect happened", LIMIT, || {
        books.missing().is_ok_and(|missing| missing.is_empty())
    });
    anyhow::ensure!(settled.is_ok(), "lost: {:?}", books.missing()?);
    books.check_order()?;
    world.check_dead_letters(LIMIT)?;
    world.stop_consumers(LIMIT)?;
    println!("{}", books.summary()?);
    Ok(())
}

#[test]
#[ignore = "a role in the simulation"]
fn producer() -> anyhow::Result<()> {
    roles::produce()
}

#[test]
#[ignore = "a role in the simulation"]
fn consumer() -> anyhow::Result<()> {
    roles::consume()
}
