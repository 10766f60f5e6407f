//! Health checks of a bus on streams: on demand and at intervals.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use headwater_stream::{StreamError, StreamName};

use super::Inner;
use crate::bus::{BusHealth, GroupHealth, StreamHealth};
use crate::metrics;

/// Labels of a pending gauge: kind of stream, and group. Groups with the same label in different sessions share one.
pub(super) type ReportedGauge = (&'static str, String);

/// Checks the health at intervals until the bus closes.
pub(super) async fn run(inner: Arc<Inner>, every: Duration) {
    while inner.sleep_unless_closing(every).await {
        inner.check_health().await;
    }
}

impl Inner {
    /// Queries the backend, stores the result and updates the gauges.
    pub(super) async fn check_health(&self) -> BusHealth {
        let mut health = BusHealth {
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
        match self.query_backend(&mut health).await {
            Ok(()) => self.update_gauges(&health),
            Err(error) => health.problem = Some(error.to_string()),
        }
        *self.last_health() = Some(health.clone());
        health
    }

    async fn query_backend(&self, health: &mut BusHealth) -> Result<(), StreamError> {
        let began = Instant::now();
        self.backend.now().await?;
        health.connected = true;
        health.latency = Some(began.elapsed());
        for stream in self.streams() {
            // A stream that was never written or read does not exist.
            let Some(stats) = self.backend.stats(&stream).await? else { continue };
            // Guard groups of sessions never read; their lag is meaningless.
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

    /// Updates the pending gauges, with all sessions summed up, because there may be millions.
    fn update_gauges(&self, health: &BusHealth) {
        let mut pending: BTreeMap<ReportedGauge, u64> = BTreeMap::new();
        for (stream, found) in &health.streams {
            for (group, at) in &found.groups {
                *pending.entry(self.gauge_for(stream, group)).or_default() += at.pending;
            }
        }
        let now: BTreeSet<ReportedGauge> = pending.keys().cloned().collect();
        let before = std::mem::replace(&mut *self.reported_gauges(), now);
        // Groups that are no longer used would otherwise keep their last value.
        for (kind, group) in before.iter().filter(|one| !pending.contains_key(one)) {
            metrics::pending(kind, group, 0);
        }
        for ((kind, group), count) in &pending {
            metrics::pending(kind, group, *count);
        }
    }

    /// Resets the gauges when the bus is closed.
    pub(super) fn clear_gauges(&self) {
        for (kind, group) in std::mem::take(&mut *self.reported_gauges()) {
            metrics::pending(kind, &group, 0);
        }
    }

    fn gauge_for(&self, stream: &str, group: &str) -> ReportedGauge {
        let session = stream.strip_prefix(&format!("{}:events:", self.keys.prefix()));
        let kind = if session.is_some() { "session" } else { "control" };
        let place = session.unwrap_or(self.config.namespace.as_str());
        let label = group.strip_prefix(&format!("{}:cg:{place}:", self.keys.prefix()));
        // The name of a foreign group may contain the session id, so it must not become a label.
        let other = if session.is_some() { "other" } else { group };
        (kind, label.unwrap_or(other).to_owned())
    }

    fn reported_gauges(&self) -> MutexGuard<'_, BTreeSet<ReportedGauge>> {
        self.reported_gauges.lock().expect("no code panics while it holds this lock")
    }

    /// All streams of this bus.
    fn streams(&self) -> BTreeSet<StreamName> {
        let own = self.config.session.as_ref().map(|session| self.keys.session(session));
        let followed = self.followed.positions().into_iter().map(|(stream, _)| stream);
        let groups: Vec<StreamName> =
            self.groups().values().map(|group| group.stream.clone()).collect();
        [self.control.clone()].into_iter().chain(own).chain(followed).chain(groups).collect()
    }
}
