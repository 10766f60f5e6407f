//! The embedded backend and a real Redis return the same results for any sequence of calls.
//!
//! Sequences are random; `HEADWATER_SEQUENCES` sets how many (default 1000), `HEADWATER_SEED` the seed,
//! which is printed. A sequence with a difference is shrunk. Time is excluded: idle times are zero or an
//! hour, entries are due at once or far in the future.
#![cfg(all(feature = "embedded", feature = "redis"))]
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

mod calls;
mod observed_backend;
mod operations;

use std::cell::{Cell, RefCell};
use std::hash::{BuildHasher, RandomState};

use headwater_stream::{Options, connect};
use headwater_testkit::{Redis, chaos_is_over, unique};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

use self::observed_backend::{Connection, ObservedBackend};
use self::operations::{Operation, sequences};

const SEQUENCES_DEFAULT: u32 = 1000;
/// Longer shrinking finds little more.
const SHRINKS_MAX: u32 = 3000;

fn from_environment<T: std::str::FromStr>(variable: &str) -> Option<T> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}: `{text}` is not a number")))
}

/// Runs a sequence on both and returns the first difference.
async fn compare(
    connections: &mut (Connection, Connection),
    sequence: &[Operation],
) -> Result<(), String> {
    let prefix = unique("differential");
    let mut embedded = ObservedBackend::new(&mut connections.0, prefix.clone());
    let mut redis = ObservedBackend::new(&mut connections.1, prefix);
    for (at, operation) in sequence.iter().enumerate() {
        let embedded_result = embedded.run(operation).await;
        let redis_result = redis.run(operation).await;
        if !embedded_result.agrees_with(&redis_result) {
            return Err(format!(
                "call {at}, {operation:?}:\n  embedded: {embedded_result:?}\n  redis:    {redis_result:?}"
            ));
        }
    }
    let ends = embedded.everything().await.into_iter().zip(redis.everything().await);
    for ((what, embedded_result), (_, redis_result)) in ends {
        if !embedded_result.agrees_with(&redis_result) {
            return Err(format!(
                "at the end, {what}:\n  embedded: {embedded_result:?}\n  redis:    {redis_result:?}"
            ));
        }
    }
    Ok(())
}

#[test]
fn embedded_and_redis_return_the_same_results_for_every_sequence_of_calls() -> anyhow::Result<()> {
    let cases = from_environment("HEADWATER_SEQUENCES").unwrap_or(SEQUENCES_DEFAULT);
    let seed: u64 = from_environment("HEADWATER_SEED")
        .unwrap_or_else(|| RandomState::new().hash_one("seed") >> 32);
    println!("HEADWATER_SEED={seed} HEADWATER_SEQUENCES={cases}");

    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let redis = Redis::shared()?;
    let connections = runtime.block_on(async {
        let options = Options::default();
        let embedded = Connection::new(connect("embedded:memory", &options).await?).await?;
        let redis = Connection::new(connect(&redis.url(), &options).await?).await?;
        headwater_stream::Result::<_>::Ok(RefCell::new((embedded, redis)))
    })?;

    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = Config {
        cases,
        max_shrink_iters: SHRINKS_MAX,
        failure_persistence: None,
        ..Config::default()
    };
    let is_over = Cell::new(false);
    let outcome = TestRunner::new_with_rng(config, rng).run(&sequences(), |sequence| {
        is_over.set(is_over.get() || chaos_is_over());
        if is_over.get() {
            return Ok(());
        }
        runtime
            .block_on(compare(&mut connections.borrow_mut(), &sequence))
            .map_err(TestCaseError::fail)
    });
    match outcome {
        Ok(()) => Ok(()),
        Err(TestError::Fail(difference, sequence)) => {
            let calls: Vec<String> = sequence.iter().map(|call| format!("  {call:?}")).collect();
            panic!("HEADWATER_SEED={seed}: {difference}\nafter the calls:\n{}", calls.join("\n"));
        }
        Err(TestError::Abort(reason)) => anyhow::bail!("the run was aborted: {reason}"),
    }
}
