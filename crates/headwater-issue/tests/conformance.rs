//! The conformance suite on every store there is.
#![cfg(all(feature = "conformance", any(feature = "sqlite", feature = "postgres")))]

use std::sync::Arc;

use headwater_issue::conformance::{Env, TestResult};
use headwater_issue::{Store, StoreOptions, conformance_suite, connect};

async fn open(url: &str, options: &StoreOptions) -> TestResult<Arc<dyn Store>> {
    Ok(connect(url, options).await?)
}

#[cfg(feature = "sqlite")]
mod sqlite_memory {
    use headwater_stream::clock::TestClock;

    use super::*;

    async fn setup() -> TestResult<Env> {
        let clock = TestClock::default();
        let options = StoreOptions { clock: Arc::new(clock.clone()), ..StoreOptions::default() };
        let store = open("sqlite::memory:", &options).await?;
        Env::new(Arc::clone(&store), store, move |duration| {
            clock.advance(duration);
            async { Ok(()) }
        })
        .await
    }

    conformance_suite!(setup());
}

#[cfg(feature = "sqlite")]
mod sqlite_file {
    use headwater_stream::clock::TestClock;

    use super::*;

    async fn setup() -> TestResult<Env> {
        let clock = TestClock::default();
        let options = StoreOptions { clock: Arc::new(clock.clone()), ..StoreOptions::default() };
        let directory = tempfile::tempdir()?;
        let url = format!("sqlite:{}", directory.path().join("issues.db").display());
        let (store, second) = (open(&url, &options).await?, open(&url, &options).await?);
        let env = Env::new(store, second, move |duration| {
            clock.advance(duration);
            async { Ok(()) }
        });
        Ok(env.await?.keep(directory))
    }

    conformance_suite!(setup());
}
