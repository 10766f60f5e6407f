//! The way to a topic: what is known of it, and an outlet for each of its partitions.
//!
//! Upstream: `producer`. Downstream: the queue's knowledge of topics.
//! Promises: a route that is handed out was true at most `refresh` ago; when it has to be read again, one caller does
//! so and the others wait for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, RwLock};

use metrics::counter;
use tokio::time::Instant;

use super::budget::Budget;
use super::outlet::Outlet;
use crate::error::Result;
use crate::limits::PRODUCER_TOPICS_MAX;
use crate::metrics::PRODUCED;
use crate::queue::Queue;
use crate::topic::{Growth, Partition, Topic, TopicName};

/// A topic as it was at one moment.
pub(super) struct Route {
    /// What is known of it.
    pub(super) topic: Arc<Topic>,
    /// When it was so.
    known_at: Instant,
    /// What the queue had forgotten by then.
    forgotten: u64,
    outlets: Arc<Outlets>,
    /// What it may hold, if that is limited.
    pub(super) budget: Option<Arc<Budget>>,
}

/// The ways into the partitions, made when they are first used and kept while the topic stays as it is.
type Outlets = Vec<OnceLock<Outlet>>;

impl Route {
    /// The way into a partition, which exists.
    pub(super) fn outlet(&self, partition: Partition) -> &Outlet {
        let make = || Outlet::new(&self.topic, partition);
        self.outlets[usize::from(partition)].get_or_init(make)
    }

    /// Counts messages that break a limit, or go with one that does: they were not sent.
    pub(super) fn count_refused(&self, messages: usize) {
        let topic = self.topic.name.to_string();
        counter!(PRODUCED, "topic" => topic, "partition" => "", "result" => "refused")
            .increment(messages as u64);
    }

    /// Whether the topic may have grown without this route knowing, and old messages may be waited for no longer.
    pub(super) fn is_overdue(&self) -> bool {
        self.known_at.elapsed() >= Growth::settling(self.topic.policies.refresh)
    }
}

/// The routes of a producer.
pub(super) struct Routes {
    queue: Queue,
    known: RwLock<HashMap<TopicName, Arc<Place>>>,
}

/// The latest route to one topic.
#[derive(Default)]
struct Place {
    latest: Mutex<Option<Arc<Route>>>,
    reading: tokio::sync::Mutex<()>,
}

const WHY: &str = "no code panics while it holds a route";

impl Routes {
    pub(super) fn new(queue: Queue) -> Self {
        Self { queue, known: RwLock::default() }
    }

    /// The route, if it can still be relied on.
    pub(super) fn fresh(&self, topic: &str, now: Instant) -> Option<Arc<Route>> {
        let known = self.known.read().expect(WHY);
        let route = known.get(topic)?.latest.lock().expect(WHY).clone()?;
        self.is_fresh(&route, now).then_some(route)
    }

    fn is_fresh(&self, route: &Route, now: Instant) -> bool {
        route.forgotten == self.queue.forgotten()
            && now.duration_since(route.known_at) < route.topic.policies.refresh
    }

    /// The route, read again unless somebody else does so just now.
    pub(super) async fn read(&self, topic: &str) -> Result<Arc<Route>> {
        let name = TopicName::new(topic)?;
        let place = self.place(&name);
        let _reading = place.reading.lock().await;
        let latest = place.latest.lock().expect(WHY).clone();
        if let Some(route) = latest.as_ref().filter(|route| self.is_fresh(route, Instant::now())) {
            return Ok(route.clone());
        }
        // Looked at before the question, so that what is forgotten meanwhile is asked for again.
        let forgotten = self.queue.forgotten();
        let (known_at, topic) = self.queue.topic_since(&name).await?;
        let (outlets, budget) = match latest {
            Some(route) if route.topic == topic => (route.outlets.clone(), route.budget.clone()),
            _ => {
                let outlets = (0..topic.partitions).map(|_| OnceLock::new()).collect();
                let budget = topic.policies.byte_budget.map(Budget::new).map(Arc::new);
                (Arc::new(outlets), budget)
            }
        };
        let route = Arc::new(Route { topic, known_at, forgotten, outlets, budget });
        *place.latest.lock().expect(WHY) = Some(route.clone());
        Ok(route)
    }

    fn place(&self, name: &TopicName) -> Arc<Place> {
        let mut known = self.known.write().expect(WHY);
        if known.len() >= PRODUCER_TOPICS_MAX && !known.contains_key(name) {
            // Those that nobody sends to now; if all are in use, all are read again, once.
            let now = Instant::now();
            known.retain(|_, place| {
                let latest = place.latest.lock().expect(WHY);
                latest.as_ref().is_some_and(|route| self.is_fresh(route, now))
            });
            if known.len() >= PRODUCER_TOPICS_MAX {
                known.clear();
            }
        }
        known.entry(name.clone()).or_default().clone()
    }
}
