//! How a bus on streams is: asked for, and looked at now and then.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_stream::{StreamError, StreamName};

use super::Inner;
use crate::bus::{GroupHealth, Health, StreamHealth};
use crate::metrics;

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
            last_check: self.config.clock.now(),
            problem: None,
        };
        if let Err(error) = self.ask(&mut health).await {
            health.problem = Some(error.to_string());
        }
        for (stream, found) in &health.streams {
            for (group, at) in &found.groups {
                metrics::pending(stream, group, at.pending);
            }
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

    /// Every stream this bus works with.
    fn streams(&self) -> BTreeSet<StreamName> {
        let own = self.config.session.as_ref().map(|session| self.keys.session(session));
        let followed = self.followed.positions().into_iter().map(|(stream, _)| stream);
        let groups: Vec<StreamName> =
            self.groups().values().map(|group| group.stream.clone()).collect();
        [self.control.clone()].into_iter().chain(own).chain(followed).chain(groups).collect()
    }
}
