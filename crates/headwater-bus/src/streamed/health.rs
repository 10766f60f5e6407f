//! How a bus on streams is: asked for, and looked at now and then.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use headwater_stream::{StreamError, StreamName};

use super::Inner;
use crate::bus::{GroupHealth, Health, StreamHealth};
use crate::metrics;

/// A group as the metrics know it: the same label in all sessions is one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Reported {
    kind: &'static str,
    group: String,
}

/// Looks at the health of the bus every so often, until it closes.
pub(super) async fn run(inner: Arc<Inner>, every: Duration) {
    while inner.pause(every).await {
        inner.look().await;
    }
}

impl Inner {
    /// Asks the backend, and remembers and counts what it found.
    pub(super) async fn look(&self) -> Health {
        let mut health = Health {
            connected: false,
            latency: None,
            streams: Default::default(),
            breaker: self.breaker.state(),
            spool: self.spool.as_ref().map(|spool| spool.health()),
            parked: 0,
            missed: self.missed.load(Ordering::Relaxed),
            last_check: self.config.clock.now(),
            problem: None,
        };
        match self.ask(&mut health).await {
            Ok(()) => self.report(&health),
            Err(error) => health.problem = Some(error.to_string()),
        }
        *self.last_health() = Some(health.clone());
        health
    }

    async fn ask(&self, health: &mut Health) -> Result<(), StreamError> {
        let began = Instant::now();
        self.backend.now().await?;
        health.connected = true;
        health.latency = Some(began.elapsed());
        for stream in self.streams() {
            // A stream nobody wrote to or read from does not exist.
            let Some(stats) = self.backend.stats(&stream).await? else { continue };
            // Guards of sessions never read, and nobody waits for them to.
            let groups = stats.groups.into_iter().filter(|group| !self.keys.is_guard(&group.name));
            let groups = groups.map(|group| {
                (group.name.to_string(), GroupHealth { pending: group.pending, lag: group.lag })
            });
            let found = StreamHealth { length: stats.length, groups: groups.collect() };
            health.streams.insert(stream.to_string(), found);
        }
        health.parked = self.parked.count().await?;
        Ok(())
    }

    /// Tells the metrics what is pending: all sessions together, for there may be millions of them.
    fn report(&self, health: &Health) {
        let mut pending: BTreeMap<Reported, u64> = BTreeMap::new();
        for (stream, found) in &health.streams {
            for (group, at) in &found.groups {
                *pending.entry(self.reported_as(stream, group)).or_default() += at.pending;
            }
        }
        let now: BTreeSet<Reported> = pending.keys().cloned().collect();
        let before = std::mem::replace(&mut *self.reported(), now);
        // Nobody works with them any more: what was told last would stand for ever.
        for Reported { kind, group } in before.iter().filter(|one| !pending.contains_key(one)) {
            metrics::pending(kind, group, 0);
        }
        for (Reported { kind, group }, count) in &pending {
            metrics::pending(kind, group, *count);
        }
    }

    /// The bus is closed: nobody looks any more.
    pub(super) fn report_nothing(&self) {
        for Reported { kind, group } in std::mem::take(&mut *self.reported()) {
            metrics::pending(kind, &group, 0);
        }
    }

    fn reported_as(&self, stream: &str, group: &str) -> Reported {
        let session = stream.strip_prefix(&format!("{}:events:", self.keys.prefix()));
        let kind = if session.is_some() { "session" } else { "control" };
        let place = session.unwrap_or(self.config.namespace.as_str());
        let label = group.strip_prefix(&format!("{}:cg:{place}:", self.keys.prefix()));
        // A group of another program may have the session in its name, in whichever way.
        let other = if session.is_some() { "other" } else { group };
        Reported { kind, group: label.unwrap_or(other).to_owned() }
    }

    fn reported(&self) -> MutexGuard<'_, BTreeSet<Reported>> {
        self.reported.lock().expect("no code panics while it holds this lock")
    }

    /// Every stream this bus works with.
    fn streams(&self) -> BTreeSet<StreamName> {
        let own = self.config.session.as_ref().map(|session| self.keys.session(session));
        let followed = self.followed.positions().into_iter().map(|(stream, _)| stream);
        let groups: Vec<StreamName> =
            self.groups().values().map(|group| group.stream.clone()).collect();
        [self.control.clone()].into_iter().chain(own).chain(followed).chain(groups).collect()
    }
}
