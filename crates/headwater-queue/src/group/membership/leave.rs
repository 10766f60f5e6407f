//! Revoking a partition, removing a subscription, leaving the group, and eviction after a lost lease.

use std::sync::Arc;

use headwater_stream::LeaseName;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::{MembershipEnd, MembershipEvent, MembershipLoop, RETRY_MIN, find};
use crate::config::Mode;
use crate::group::group_ops::{self, LeaveRequest};
use crate::group::members::member_list;
use crate::group::session::GroupSession;
use crate::group::subscription_state::{
    GroupSubscription, GroupSubscriptionId, PartitionOwnership, SubscriptionState,
};
use crate::keys;
use crate::topic::{Partition, TopicName};

impl MembershipLoop {
    /// Starts revoking a partition if the listener owns it.
    pub(super) fn revoke(&mut self, id: &GroupSubscriptionId, partition: Partition) {
        let is_static = self.context.member.is_some();
        let Some(subscription) = find(&mut self.session, id) else { return };
        // A leaving static member keeps its leases until its reservation is written.
        let is_released = subscription.state != SubscriptionState::Draining || !is_static;
        let Some(part) = subscription.held.get_mut(&partition) else { return };
        if part.state != PartitionOwnership::Owned {
            return;
        }
        part.state = PartitionOwnership::Revoking;
        info!(topic = %id.0, partition, group = %self.context.group, consumer = %self.consumer,
            "revoking the partition");
        let listener = Arc::clone(&subscription.request.listener);
        let (renewer, lease, id) = (Arc::clone(&self.renewer), part.lease.clone(), id.clone());
        let held = part.held.clone();
        self.work.spawn(async move {
            let lost = async {
                match held {
                    Some(held) => held.lost().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = listener.on_revoke(partition) => {}
                // `on_lost` is called, too.
                () = lost => {}
            }
            if is_released {
                group_ops::release(&renewer, &[lease]).await;
            }
            MembershipEvent::Revoked { id, partition, released: is_released }
        });
    }

    /// Releases a partition that was never assigned to the listener.
    pub(super) fn release(&mut self, id: &GroupSubscriptionId, partition: Partition) {
        let Some(subscription) = find(&mut self.session, id) else { return };
        let Some(part) = subscription.held.get_mut(&partition) else { return };
        part.state = PartitionOwnership::Releasing;
        let (renewer, lease, id) = (Arc::clone(&self.renewer), part.lease.clone(), id.clone());
        self.work.spawn(async move {
            group_ops::release(&renewer, &[lease]).await;
            MembershipEvent::Revoked { id, partition, released: true }
        });
    }

    pub(super) fn handle_revoked(
        &mut self,
        id: &GroupSubscriptionId,
        partition: Partition,
        released: bool,
    ) {
        let Some(subscription) = find(&mut self.session, id) else { return };
        if released {
            subscription.held.remove(&partition);
        } else if let Some(part) = subscription.held.get_mut(&partition) {
            part.state = PartitionOwnership::Drained;
        }
        // It may be assigned to this member again: the topic changed, or its new owner died.
        subscription.dirty = true;
        let subscription = &self.session.subscriptions[&id.0];
        self.report_owned(subscription);
        self.poll_soon(Instant::now());
        self.finish_leave_if_drained(id);
    }

    /// Starts leaving: revokes all partitions of a subscription.
    pub(super) fn begin_leave(&mut self, id: &GroupSubscriptionId) {
        let Some(subscription) = find(&mut self.session, id) else { return };
        match subscription.state {
            SubscriptionState::Unregistered => self.remove_subscription(id),
            SubscriptionState::Registering => subscription.state = SubscriptionState::Draining,
            SubscriptionState::Member => {
                subscription.state = SubscriptionState::Draining;
                let partitions: Vec<Partition> = subscription.held.keys().copied().collect();
                partitions.into_iter().for_each(|each| self.revoke(id, each));
                self.finish_leave_if_drained(id);
            }
            SubscriptionState::Draining | SubscriptionState::Deregistering => {}
        }
    }

    /// Deregisters a leaving subscription once all its partitions are drained.
    pub(super) fn finish_leave_if_drained(&mut self, id: &GroupSubscriptionId) {
        let Some(subscription) = find(&mut self.session, id) else { return };
        let is_drained =
            subscription.held.values().all(|part| part.state == PartitionOwnership::Drained);
        if subscription.state != SubscriptionState::Draining || !is_drained {
            return;
        }
        subscription.state = SubscriptionState::Deregistering;
        let leases = subscription.held.values().map(|part| part.lease.clone()).collect();
        let is_reserved = self.context.member.is_some() && subscription.request.mode == Mode::Owned;
        let leave = LeaveRequest {
            entry: subscription.entry(&self.me),
            reservation: is_reserved.then(|| (subscription.reservation_entry(&self.me), leases)),
            reserve_for: self.context.config.lease.ttl,
            shared: (subscription.request.mode == Mode::Shared).then(|| {
                let topic = &subscription.topic;
                let streams = (0..topic.partitions).map(|partition| keys::stream(topic, partition));
                (streams.collect(), self.consumer.clone())
            }),
        };
        let (context, renewer, id) =
            (Arc::clone(&self.context), Arc::clone(&self.renewer), id.clone());
        self.work.spawn(async move {
            group_ops::finish_leave(&*context.backend, &context.group, &renewer, &leave).await;
            MembershipEvent::Left { id }
        });
    }

    pub(super) fn handle_left(&mut self, id: &GroupSubscriptionId) {
        info!(topic = %id.0, group = %self.context.group, consumer = %self.consumer, "left the topic");
        self.remove_subscription(id);
    }

    /// Removes a subscription and notifies its leave waiters.
    pub(super) fn remove_subscription(&mut self, id: &GroupSubscriptionId) {
        if find(&mut self.session, id).is_none() {
            return;
        }
        let Some(mut subscription) = self.session.remove(&id.0) else { return };
        // A queued join may take its place.
        self.register_at = Instant::now();
        subscription.held.clear();
        self.report_owned(&subscription);
        if self.session.subscriptions.is_empty() {
            // Notified when the member has left the group, too.
            self.leave_waiters.append(&mut subscription.leave_waiters);
        } else {
            subscription.leave_waiters.into_iter().for_each(notify);
        }
    }

    /// Leaves the group by releasing the liveness lease.
    pub(super) async fn leave(self) -> (GroupSession, MembershipEnd) {
        let lease = self.lease.fence().lease.clone();
        let released = group_ops::release(&self.renewer, std::slice::from_ref(&lease));
        // After the TTL the lease has expired anyway.
        let _ = timeout(self.context.config.lease.ttl, released).await;
        info!(group = %self.context.group, consumer = %self.consumer, "left the group");
        self.leave_waiters.into_iter().for_each(notify);
        (self.session, MembershipEnd::Left)
    }

    /// Ends the membership after a lost lease: no partition is ours, and this consumer name is never reused.
    pub(super) fn evict(mut self, reason: &str) -> (GroupSession, MembershipEnd) {
        warn!(group = %self.context.group, consumer = %self.consumer, reason,
            "evicted from the group, rejoining under a new name");
        let (mut owned, mut shared) = (Vec::new(), Vec::new());
        let mut leaving: Vec<TopicName> = Vec::new();
        let mut subscriptions = std::mem::take(&mut self.session.subscriptions);
        for subscription in subscriptions.values_mut() {
            if subscription.state != SubscriptionState::Unregistered {
                let entries = match subscription.request.mode {
                    Mode::Owned => &mut owned,
                    Mode::Shared => &mut shared,
                };
                entries.push(subscription.entry(&self.me).to_string());
            }
            if matches!(
                subscription.state,
                SubscriptionState::Draining | SubscriptionState::Deregistering
            ) {
                leaving.push(subscription.topic.name.clone());
            }
            self.lose_all(subscription);
        }
        self.session.subscriptions = subscriptions;
        let mut leave_waiters = self.leave_waiters;
        for topic in leaving {
            leave_waiters.extend(
                self.session.remove(&topic).into_iter().flat_map(|left| left.leave_waiters),
            );
        }
        // Release what we still hold, so that other members need not wait for expiry. The liveness lease first: a new
        // owner must see that the last owner is no longer a member.
        let member = self.lease.fence().lease.clone();
        let held = self.renewer.held().into_iter().map(|fence| fence.lease);
        let partitions: Vec<LeaseName> = held.filter(|lease| *lease != member).collect();
        let (context, renewer) = (self.context, self.renewer);
        self.session.cleanup.spawn(async move {
            let tidied = async {
                group_ops::release(&renewer, &[member]).await;
                group_ops::release(&renewer, &partitions).await;
                let members = member_list(&*context.backend, &context.group);
                let _ = members.remove(&*context.backend, &owned).await;
                // In shared mode other members reclaim our pending messages as those of a dead member. Written again in
                // case the server lost its data.
                if !shared.is_empty() {
                    let _ = members.add(&*context.backend, &shared).await;
                }
            };
            // After the TTL the leases have expired and other members have cleaned up.
            let _ = timeout(context.config.lease.ttl, tidied).await;
            leave_waiters.into_iter().for_each(notify);
        });
        (self.session, MembershipEnd::Evicted)
    }

    /// Loses one partition, because its server did not answer or has lost the lease. On a cluster the others go on; the next
    /// owner disconnects our reads of it.
    pub(super) fn lose_partition(&mut self, lease: &LeaseName) {
        let mut subscriptions = self.session.subscriptions.values_mut();
        let held = subscriptions.find_map(|subscription| {
            let mut held = subscription.held.iter();
            let (partition, part) = held.find(|(_, part)| part.lease == *lease)?;
            let (partition, state) = (*partition, part.state);
            Some((subscription, partition, state))
        });
        let Some((subscription, partition, state)) = held else { return };
        let is_assigned = matches!(state, PartitionOwnership::Owned | PartitionOwnership::Revoking);
        if is_assigned {
            warn!(topic = %subscription.topic.name, partition, group = %self.context.group,
                consumer = %self.consumer, "partition lost");
            subscription.request.listener.on_lost(partition);
        }
        // In the other states, a running operation ends with an event that removes it.
        if state == PartitionOwnership::Owned {
            subscription.held.remove(&partition);
        }
        subscription.dirty = true;
        let id = subscription.id();
        self.report_owned(&self.session.subscriptions[&id.0]);
        self.poll_soon(Instant::now() + RETRY_MIN);
        self.finish_leave_if_drained(&id);
    }

    /// Reports all partitions of a subscription as lost, and the eviction.
    fn lose_all(&self, subscription: &mut GroupSubscription) {
        let listener = &subscription.request.listener;
        for (partition, part) in std::mem::take(&mut subscription.held) {
            if matches!(part.state, PartitionOwnership::Owned | PartitionOwnership::Revoking) {
                warn!(topic = %subscription.topic.name, partition, group = %self.context.group,
                    consumer = %self.consumer, "partition lost");
                listener.on_lost(partition);
            }
        }
        if std::mem::take(&mut subscription.has_joined) {
            listener.on_evicted();
        }
        subscription.state = SubscriptionState::Unregistered;
        subscription.in_poll = false;
        // Change notifications may have been missed.
        subscription.is_reading_meta = false;
        subscription.refresh_at = Instant::now();
        self.report_owned(subscription);
    }
}

/// Ignores a caller that is gone.
fn notify(waiter: oneshot::Sender<()>) {
    let _ = waiter.send(());
}
