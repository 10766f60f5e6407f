//! A session: this process in one group, from its first subscription to its last.
//!
//! Upstream: `coordinator` sends it commands. Downstream: `membership`, while it is a member.
//! Guarantees: it never blocks on the backend or on a listener, so slow calls do not delay lease renewal. When its
//! liveness lease is no longer trusted it evicts its subscriptions immediately and rejoins under a new name. On a cluster
//! that lease has copies on three servers: one of them may fail.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{
    Backend, Backoff, GroupName, HeldLease, LeaseAcquisition, LeaseEvent, LeaseName, LeaseRenewer,
    Leases, LostLeases, MajorityLease, StreamError, process_name, unique_holder,
};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::warn;

use super::membership::{MembershipEnd, MembershipLoop};
use super::rebalance_listener::JoinRequest;
use super::subscription_state::{GroupMemberIdentity, GroupSubscription, JoinReply};
use crate::config::QueueConfig;
use crate::error::{QueueError, Result};
use crate::keys::{self, MembershipKeys};
use crate::topic::TopicName;

/// A command from a subscription to its session.
pub(super) enum MembershipCommand {
    /// Join the group. The reply is sent when the subscription is registered.
    Join { serial: u64, request: JoinRequest, reply: JoinReply },
    /// Revoke all partitions and leave. `done` is sent when other members can take over.
    Leave { topic: TopicName, serial: u64, done: Option<oneshot::Sender<()>> },
}

/// Shared, immutable context of a session.
pub(super) struct GroupContext {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) config: QueueConfig,
    pub(super) group: GroupName,
    /// Static member id, if configured.
    pub(super) member: Option<String>,
}

impl GroupContext {
    pub(super) fn keys(&self) -> MembershipKeys {
        MembershipKeys::new(&*self.backend, &self.group)
    }
}

/// This process in one group.
pub(super) struct GroupSession {
    pub(super) context: Arc<GroupContext>,
    pub(super) commands: mpsc::UnboundedReceiver<MembershipCommand>,
    pub(super) hints: broadcast::Receiver<LeaseEvent>,
    /// Keeps the lease watch alive.
    pub(super) _lease_events: Arc<dyn Any + Send + Sync>,
    pub(super) subscriptions: HashMap<TopicName, GroupSubscription>,
    /// Maps lease names to the topic a hint is about.
    pub(super) event_targets: HashMap<LeaseName, LeaseEventTarget>,
    /// Joins waiting until the previous subscription to the same topic has left.
    pub(super) queued_joins: Vec<(u64, JoinRequest, JoinReply)>,
    /// Best-effort cleanup after an eviction.
    pub(super) cleanup: JoinSet<()>,
}

/// The liveness lease and who holds it.
pub(super) struct JoinedGroup {
    pub(super) me: GroupMemberIdentity,
    pub(super) renewer: LeaseRenewer,
    pub(super) losses: LostLeases,
    pub(super) lease: HeldLease,
}

/// What a hint about a lease concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LeaseEventTarget {
    /// The partition leases or the members of this topic changed.
    Partition(TopicName),
    /// The meta of this topic changed.
    Topic(TopicName),
}

/// Longest and first backoff between two attempts to join.
const RETRY_MAX: Duration = Duration::from_secs(5);
const RETRY_MIN: Duration = Duration::from_millis(50);
/// Added to a lease's remaining time before checking whether it has expired.
pub(super) const EXPIRY_MARGIN: Duration = Duration::from_millis(5);

impl GroupSession {
    /// Runs until the last subscription has left.
    pub(super) async fn run(mut self) {
        while let Some(joined) = self.join().await {
            let end;
            (self, end) = MembershipLoop::new(self, joined).run().await;
            if end == MembershipEnd::Left
                || (self.subscriptions.is_empty() && self.commands.is_empty())
            {
                break;
            }
            // Lets the old membership be cleaned up first, and limits the rate of repeated evictions.
            let _ = timeout(RETRY_MAX, self.cleanup.join_next()).await;
            sleep(RETRY_MIN).await;
        }
        // Later joins start a new session.
        self.commands.close();
        while self.commands.try_recv().is_ok() {}
        let limit = self.context.config.lease.ttl;
        let cleaned_up =
            timeout(limit, async { while self.cleanup.join_next().await.is_some() {} });
        // After the TTL all leases have expired.
        let _ = cleaned_up.await;
    }

    /// Acquires a membership, with retries; `None` when no subscription is left.
    async fn join(&mut self) -> Option<JoinedGroup> {
        let mut retry = Backoff::doubling(RETRY_MIN, RETRY_MAX).timer();
        let mut warned = false;
        loop {
            while self.subscriptions.is_empty() {
                let command = self.commands.recv().await?;
                self.handle_command_while_joining(command);
                if self.subscriptions.is_empty() && self.commands.is_empty() {
                    return None;
                }
            }
            let name = self.context.config.name.as_deref().unwrap_or_else(|| process_name());
            let holder = unique_holder(name).expect("the name was checked and is short");
            let member = self.context.member.clone().unwrap_or_else(|| holder.to_string());
            let me = GroupMemberIdentity { member, holder };
            let retry_at = match self.try_acquire_membership(&me).await {
                Ok((renewer, losses, LeaseAcquisition::Won(lease))) => {
                    return Some(JoinedGroup { me, renewer, losses, lease });
                }
                Ok((_, _, LeaseAcquisition::Held { by, remaining })) => {
                    if !std::mem::replace(&mut warned, true) {
                        warn!(member = %me.member, group = %self.context.group, %by,
                            "another process uses this member id, waiting until it has left");
                    }
                    // Joining continues in the background; `join` must not block until the id is free.
                    self.reply_to_all(|_| Ok(()));
                    Instant::now()
                        + remaining.min(self.context.config.rebalance_every)
                        + EXPIRY_MARGIN
                }
                Err(error) => {
                    warn!(group = %self.context.group, %error, "joining the group failed");
                    self.fail_new(error);
                    Instant::now() + retry.next_delay()
                }
            };
            self.wait_to_retry(retry_at, &self.context.keys().member(&me.member)).await;
        }
    }

    /// Makes one attempt to acquire the liveness lease, and handles commands meanwhile.
    async fn try_acquire_membership(
        &mut self,
        me: &GroupMemberIdentity,
    ) -> Result<(LeaseRenewer, LostLeases, LeaseAcquisition)> {
        let GroupContext { backend, config, .. } = &*self.context;
        let copies = self.context.keys().member(&me.member);
        let lease = copies[0].clone();
        let leases: Arc<dyn Leases> = match copies.len() {
            1 => Arc::clone(backend) as _,
            _ => Arc::new(MajorityLease::new(Arc::clone(backend) as _, copies)),
        };
        let (renewer, losses) = LeaseRenewer::new(leases, me.holder.clone(), config.lease)?;
        let acquired = {
            let acquiring = renewer.acquire(&lease);
            tokio::pin!(acquiring);
            loop {
                // The acquire is not cancelled: a lease acquired without our knowledge would block our next attempt.
                tokio::select! {
                    acquired = &mut acquiring => break acquired?,
                    Some(command) = self.commands.recv() => {
                        self.handle_command_while_joining(command);
                    }
                }
            }
        };
        Ok((renewer, losses, acquired))
    }

    /// Waits until `retry_at`, or until one of `leases` may be free.
    async fn wait_to_retry(&mut self, retry_at: Instant, leases: &[LeaseName]) {
        loop {
            tokio::select! {
                () = sleep_until(retry_at) => return,
                Some(command) = self.commands.recv() => {
                    self.handle_command_while_joining(command);
                    if self.subscriptions.is_empty() {
                        return;
                    }
                }
                hint = self.hints.recv() => match hint {
                    Ok(hint) if hint.lease.as_ref().is_some_and(|about| !leases.contains(about)) => {}
                    // About this lease, or hints were missed.
                    Ok(_) | Err(_) => return,
                }
            }
        }
    }

    fn handle_command_while_joining(&mut self, command: MembershipCommand) {
        match command {
            MembershipCommand::Join { serial, request, reply } => self.add(serial, request, reply),
            MembershipCommand::Leave { topic, serial, done } => {
                self.cancel_queued_join(serial);
                let is_same = |subscription: &GroupSubscription| subscription.serial == serial;
                if self.subscriptions.get(&topic).is_some_and(is_same) {
                    self.remove(&topic);
                }
                // The caller may be gone.
                let _ = done.map(|done| done.send(()));
            }
        }
    }

    /// Adds a subscription, unregistered. At most one per topic; one that follows a leaving one is queued.
    pub(super) fn add(&mut self, serial: u64, request: JoinRequest, reply: JoinReply) {
        use super::subscription_state::SubscriptionState::{Deregistering, Draining};
        match self.subscriptions.get(&request.topic.name) {
            None => {
                let name = request.topic.name.clone();
                self.subscriptions
                    .insert(name.clone(), GroupSubscription::new(serial, request, reply));
                self.watch_topic(&name);
            }
            Some(subscription) if matches!(subscription.state, Draining | Deregistering) => {
                self.queued_joins.push((serial, request, reply));
            }
            Some(_) => {
                let problem = format!(
                    "this queue already consumes topic `{}` in group `{}`; raise `concurrency`, or create another \
                     `Queue` for another consumer",
                    request.topic.name, request.group
                );
                // The caller may be gone.
                let _ = reply.send(Err(QueueError::invalid("a second subscription", problem)));
            }
        }
    }

    /// Removes a queued join whose subscription was dropped.
    pub(super) fn cancel_queued_join(&mut self, serial: u64) {
        self.queued_joins.retain(|(queued, ..)| *queued != serial);
    }

    /// Removes a subscription and adds a queued join for the same topic.
    pub(super) fn remove(&mut self, topic: &TopicName) -> Option<GroupSubscription> {
        let subscription = self.subscriptions.remove(topic)?;
        self.event_targets.remove(&keys::topic_notification(topic));
        self.event_targets.remove(&keys::join_notification(&self.context.group, topic));
        subscription.leases.iter().for_each(|lease| drop(self.event_targets.remove(lease)));
        let (next, later) = std::mem::take(&mut self.queued_joins)
            .into_iter()
            .partition(|(_, request, _)| request.topic.name == *topic);
        self.queued_joins = later;
        for (serial, request, reply) in next {
            self.add(serial, request, reply);
        }
        Some(subscription)
    }

    /// Maps the lease names of a topic to it, after they changed.
    pub(super) fn watch_topic(&mut self, topic: &TopicName) {
        let Some(subscription) = self.subscriptions.get(topic) else { return };
        self.event_targets
            .insert(keys::topic_notification(topic), LeaseEventTarget::Topic(topic.clone()));
        let join = keys::join_notification(&self.context.group, topic);
        self.event_targets.insert(join, LeaseEventTarget::Partition(topic.clone()));
        for lease in &subscription.leases {
            self.event_targets.insert(lease.clone(), LeaseEventTarget::Partition(topic.clone()));
        }
    }

    fn reply_to_all(&mut self, result: impl Fn(&GroupSubscription) -> Result<()>) {
        for subscription in self.subscriptions.values_mut() {
            if let Some(caller) = subscription.reply.take() {
                let _ = caller.send(result(subscription));
            }
        }
    }

    /// Fails new joins with the error; subscriptions that were members before keep retrying.
    fn fail_new(&mut self, error: QueueError) {
        let text = error.to_string();
        let mut error = Some(error);
        let is_new = |subscription: &&GroupSubscription| subscription.reply.is_some();
        let new: Vec<TopicName> =
            self.subscriptions.values().filter(is_new).map(|new| new.topic.name.clone()).collect();
        for topic in new {
            let reply = self.remove(&topic).and_then(|subscription| subscription.reply);
            let again = || StreamError::Unavailable { problem: text.clone(), source: None }.into();
            reply.map(|reply| reply.send(Err(error.take().unwrap_or_else(again))));
        }
    }
}
