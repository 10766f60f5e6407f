//! The conformance suite on every backend, in eight configurations.
#![cfg(any(feature = "embedded", feature = "redis"))]

#[cfg(feature = "redis")]
mod redis_support;

use std::sync::Arc;

use headwater_conformance::stream::{StreamTestEnv, TestResult};
use headwater_conformance::stream_suite;
use headwater_stream::{Backend, Options, connect};

async fn open(url: &str) -> TestResult<Arc<dyn Backend>> {
    Ok(connect(url, &Options::default()).await?)
}

/// Converts an error of the testkit.
#[cfg(feature = "redis")]
fn testkit<T>(answer: anyhow::Result<T>) -> TestResult<T> {
    Ok(answer.map_err(|error| std::io::Error::other(format!("{error:#}")))?)
}

#[cfg(feature = "embedded")]
mod embedded_memory {
    use super::*;

    async fn setup() -> TestResult<StreamTestEnv> {
        let backend = open("embedded:memory").await?;
        Ok(StreamTestEnv::new(Arc::clone(&backend), backend))
    }

    stream_suite!(setup());
}

#[cfg(feature = "embedded")]
mod embedded_directory {
    use super::*;

    async fn setup() -> TestResult<StreamTestEnv> {
        let directory = tempfile::tempdir()?;
        let backend = open(&format!("embedded:{}", directory.path().display())).await?;
        Ok(StreamTestEnv::new(Arc::clone(&backend), backend).keep(directory))
    }

    stream_suite!(setup());
}

#[cfg(feature = "redis")]
mod redis {
    use headwater_testkit::Redis;

    use super::*;

    async fn setup() -> TestResult<StreamTestEnv> {
        let redis = testkit(Redis::shared())?;
        let url = redis.url();
        Ok(StreamTestEnv::new(open(&url).await?, open(&url).await?).keep(redis))
    }

    stream_suite!(setup());
}

#[cfg(feature = "redis")]
mod redis_cluster {
    use headwater_testkit::Cluster;

    use super::*;

    async fn setup() -> TestResult<StreamTestEnv> {
        let cluster = testkit(Cluster::shared())?;
        let url = cluster.url();
        Ok(StreamTestEnv::new(open(&url).await?, open(&url).await?).keep(cluster))
    }

    stream_suite!(setup());
}

/// As a user who may do only what `docs/redis.md` lists, on a server whose settings that user cannot change.
#[cfg(feature = "redis")]
mod redis_acl {
    use headwater_testkit::Redis;

    use super::*;

    async fn setup() -> TestResult<StreamTestEnv> {
        let redis = testkit(Redis::shared())?;
        testkit(redis_support::allow(std::slice::from_ref(&redis), "headwater", ""))?;
        let url = format!("redis://headwater:PASSWORD@{}/", redis.addr());
        Ok(StreamTestEnv::new(open(&url).await?, open(&url).await?).keep(redis))
    }

    stream_suite!(setup());
}

/// The same with a key prefix, as a user who may use only keys and channels that begin with it.
#[cfg(feature = "redis")]
mod redis_prefix {
    use headwater_testkit::Redis;

    use super::*;

    async fn setup() -> TestResult<StreamTestEnv> {
        let redis = testkit(Redis::shared())?;
        testkit(redis_support::allow(std::slice::from_ref(&redis), "app1", "app1:"))?;
        let url = redis_support::url_of_user(&redis, "app1", "app1:");
        Ok(StreamTestEnv::new(open(&url).await?, open(&url).await?).keep(redis))
    }

    stream_suite!(setup());
}

#[cfg(feature = "redis")]
mod redis_cluster_prefix {
    use headwater_testkit::Cluster;

    use super::*;

    async fn setup() -> TestResult<StreamTestEnv> {
        let cluster = testkit(Cluster::shared())?;
        testkit(redis_support::allow(cluster.nodes(), "app1", "app1:"))?;
        let url = redis_support::cluster_url_of_user(&cluster, "app1", "app1:");
        Ok(StreamTestEnv::new(open(&url).await?, open(&url).await?).keep(cluster))
    }

    stream_suite!(setup());
}

/// Each test has its own proxy that drops replies and cuts connections: some at random, and one before every
/// few calls. The seed is printed; `HEADWATER_FAULT_SEED` sets it.
#[cfg(feature = "redis")]
mod redis_faulty {
    use std::env;
    use std::hash::{BuildHasher, RandomState};
    use std::sync::Mutex;
    use std::time::{Duration, Instant};

    use headwater_conformance::stream::Retrying;
    use headwater_testkit::{Proxy, Redis};

    use super::*;

    /// One call in this many gets a dropped reply or a cut connection.
    const FAULT_EVERY: u64 = 3;
    /// Without a pause between faults, tests with many concurrent calls would make no progress.
    const FAULT_PAUSE: Duration = Duration::from_millis(60);

    async fn setup() -> TestResult<StreamTestEnv> {
        let seed = match env::var("HEADWATER_FAULT_SEED") {
            Ok(seed) => seed.parse()?,
            Err(_) => RandomState::new().hash_one(std::process::id()) >> 32,
        };
        println!("HEADWATER_FAULT_SEED={seed}");
        let redis = testkit(Redis::shared())?;
        let proxy = Arc::new(testkit(Proxy::flaky(redis.addr(), seed))?);
        let second = open(&redis.url()).await?;
        let raw = open_despite_faults(&redis.url_at(proxy.addr())).await?;

        let faulty_proxy = Arc::clone(&proxy);
        let state = Mutex::new((seed, None));
        let before = move || inject_fault(&faulty_proxy, &state);
        let backend = Arc::new(Retrying::new(Arc::clone(&raw), before));
        let counted = Arc::clone(&proxy);
        let faults = move || counted.faults();
        Ok(StreamTestEnv::faulty(backend, second, raw, faults).keep(proxy).keep(redis))
    }

    async fn open_despite_faults(url: &str) -> TestResult<Arc<dyn Backend>> {
        for _ in 0..20 {
            if let Ok(backend) = open(url).await {
                return Ok(backend);
            }
        }
        open(url).await
    }

    /// Injects a fault for the next call from time to time.
    fn inject_fault(proxy: &Proxy, state: &Mutex<(u64, Option<Instant>)>) {
        let mut state = state.lock().expect("no code panics while it holds this lock");
        let (seed, last) = &mut *state;
        let random = next(seed);
        if !random.is_multiple_of(FAULT_EVERY) || last.is_some_and(|at| at.elapsed() < FAULT_PAUSE)
        {
            return;
        }
        *last = Some(Instant::now());
        let order = match random / FAULT_EVERY % 3 {
            0 => proxy.drop_reply(),
            1 => proxy.drop_after((random / 64 % 200) as usize),
            _ => proxy.cut_once(),
        };
        order.expect("the proxy runs as long as the test");
    }

    /// SplitMix64.
    fn next(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    stream_suite!(setup(), faulty);
}
