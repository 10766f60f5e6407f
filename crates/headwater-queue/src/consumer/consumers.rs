//! What all subscriptions of a queue share: feeds, the mover of delayed messages, upkeep.
//!
//! Upstream: `workplace`. Promises: a feed, or a mover, ends when nobody uses it any more.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use headwater_stream::Backend;

use super::feed::{Feed, FeedKey};
use super::mover::Movers;
use super::upkeep::Upkeep;

#[derive(Default)]
pub(crate) struct Consumers {
    /// More than one feed of a kind when one read cannot hold all streams.
    feeds: Mutex<HashMap<FeedKey, Vec<Weak<Feed>>>>,
    pub(super) movers: Movers,
    pub(super) upkeep: Upkeep,
}

impl Consumers {
    /// A feed of this kind that has room for one more partition.
    pub(super) fn feed(&self, backend: &Arc<dyn Backend>, key: FeedKey) -> Arc<Feed> {
        let mut feeds = self.feeds.lock().expect("no code panics while it holds the feeds");
        feeds.retain(|_, kind| {
            kind.retain(|feed| feed.strong_count() > 0);
            !kind.is_empty()
        });
        let kind = feeds.entry(key.clone()).or_default();
        let with_place = kind.iter().filter_map(Weak::upgrade).find(Feed::has_place);
        with_place.unwrap_or_else(|| {
            let feed = Arc::new(Feed::start(Arc::clone(backend), key));
            kind.push(Arc::downgrade(&feed));
            feed
        })
    }
}
