//! Subscriptions: what an application has in hand while its handler gets messages.
//!
//! Upstream: applications. Downstream: the `coordinator`, which gives partitions to the subscription's workplace.
//! Promises: a subscription that is stopped has finished or released what it had in hand and counts no attempt; one
//! that is dropped loses nothing: what it had in hand stays pending and is taken over.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use tracing::info;

use super::gatekeeper;
use super::job::{Job, SubscriptionStats};
use super::worker::Phase;
use super::workplace::Bench;
use crate::config::{ConsumerConfig, Order};
use crate::error::Result;
use crate::group::coordinator::Membership;
use crate::group::seam::Joining;
use crate::keys;
use crate::queue::Queue;
use crate::retry::Handler;
use crate::topic::{TopicName, group_name};

/// A handler that gets the messages of a topic for a group. Dropping it stops it at once: nothing is lost, but what was
/// in hand is delivered again, to whoever takes it over.
pub struct Subscription {
    bench: Arc<Bench>,
    /// Gone once it has left the group.
    membership: Mutex<Option<Membership>>,
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let job = &self.bench.job;
        f.debug_struct("Subscription")
            .field("topic", &job.topic)
            .field("group", &job.group)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Queue {
    /// Gives the messages of a topic to a handler, as a member of a group. It works until the subscription is stopped or
    /// dropped. A topic that nobody created is plain: one stream, which has its name.
    pub async fn subscribe(
        &self,
        topic: &str,
        group: &str,
        handler: impl Handler,
        config: ConsumerConfig,
    ) -> Result<Subscription> {
        config.validate()?;
        let name = TopicName::new(topic)?;
        let group = group_name(group)?;
        let topic = self.read_topic(&name).await?;
        let inner = &self.inner;
        for partition in 0..topic.partitions {
            let stream = keys::stream(&topic, partition);
            inner.backend.ensure_group(&stream, &group, config.start).await?;
        }
        let (mode, order, member) = (config.mode, config.order, config.member.clone());
        let backend = Arc::clone(&inner.backend);
        let trace = inner.config.trace.clone();
        let job =
            Job::new(backend, Arc::clone(&topic), group.clone(), Arc::new(handler), config, trace);
        let bench = Arc::new(Bench::new(job, Arc::clone(&topic), Arc::clone(&inner.consumers)));
        let workplace = Arc::clone(&bench);
        let joining = Joining { group, topic, mode, member, workplace };
        // Made before: if the caller goes away now, what has begun to work ends.
        let subscription = Subscription { bench, membership: Mutex::default() };
        let membership = inner.coordinator.join(joining).await?;
        *subscription.lock() = Some(membership);
        let bench = &subscription.bench;
        inner.consumers.upkeep.add(bench);
        if order == Order::PerKey {
            bench.spawn(gatekeeper::run(Arc::downgrade(bench), Arc::downgrade(inner)));
        }
        Ok(subscription)
    }
}

impl Subscription {
    /// Handles no more messages until `resume`: those being handled are finished, those read ahead stay in hand.
    pub fn pause(&self) {
        self.bench.job.paused.store(true, Ordering::Release);
    }

    /// Goes on after `pause`.
    pub fn resume(&self) {
        self.bench.job.paused.store(false, Ordering::Release);
        self.bench.workers().iter().for_each(|worker| worker.resume());
    }

    /// Reads no more, handles everything in hand within the drain time, gives back the rest and leaves the group.
    pub async fn drain(&self) {
        self.finish(Phase::Draining).await;
    }

    /// Reads no more, lets those handlers finish that are at work, within the drain time, gives back everything else and
    /// leaves the group. No attempt is counted for what is given back.
    pub async fn stop(&self) {
        self.finish(Phase::Closing).await;
    }

    async fn finish(&self, phase: Phase) {
        self.bench.finish(phase).await;
        let membership = self.lock().take();
        if let Some(membership) = membership {
            membership.leave().await;
            info!(topic = %self.bench.job.topic, group = %self.bench.job.group, "subscription stopped");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Membership>> {
        self.membership.lock().expect("no code panics while it holds the membership")
    }

    /// What it has done so far.
    pub fn stats(&self) -> SubscriptionStats {
        self.bench.stats()
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.bench.end();
    }
}
