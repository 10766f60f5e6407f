//! Background tasks shared by all subscriptions of a queue: fetchers, delay schedulers and maintenance.
//!
//! Upstream: `partition_set`. Guarantees: a fetcher or a delay scheduler ends when its last user is dropped.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use headwater_stream::Backend;

use super::delay_scheduler::DelaySchedulers;
use super::fetcher::{Fetcher, FetcherKey};
use super::maintenance::ConsumerMaintenance;

#[derive(Default)]
pub(crate) struct SharedTasks {
    /// More than one fetcher per key if one read cannot include all streams.
    fetchers: Mutex<HashMap<FetcherKey, Vec<Weak<Fetcher>>>>,
    pub(super) delay_schedulers: DelaySchedulers,
    pub(super) maintenance: ConsumerMaintenance,
}

impl SharedTasks {
    /// A fetcher with this key that can read one more partition, started if there is none.
    pub(super) fn fetcher(&self, backend: &Arc<dyn Backend>, key: FetcherKey) -> Arc<Fetcher> {
        let mut fetchers =
            self.fetchers.lock().expect("no code panics while it holds the fetchers");
        fetchers.retain(|_, same_key| {
            same_key.retain(|fetcher| fetcher.strong_count() > 0);
            !same_key.is_empty()
        });
        let same_key = fetchers.entry(key.clone()).or_default();
        let with_capacity = same_key.iter().filter_map(Weak::upgrade).find(Fetcher::has_capacity);
        with_capacity.unwrap_or_else(|| {
            let fetcher = Arc::new(Fetcher::start(Arc::clone(backend), key));
            same_key.push(Arc::downgrade(&fetcher));
            fetcher
        })
    }
}
