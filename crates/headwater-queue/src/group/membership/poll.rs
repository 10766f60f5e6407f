//! Polls the group and its topics, and reconciles the held partitions with what the poll found.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{ConsumerName, HeldLease};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::{MembershipEvent, MembershipLoop, RETRY_MIN, find};
use crate::config::Mode;
use crate::error::Result;
use crate::group::group_ops::{self, KnownConsumers};
use crate::group::members::{GroupSnapshot, MemberEntry, MemberStatus, member_list};
use crate::group::rebalance_listener::AssignedPartition;
use crate::group::session::EXPIRY_MARGIN;
use crate::group::subscription_state::{
    GroupSubscription, GroupSubscriptionId, HeldPartition, PartitionOwnership, RebalanceActions,
    SubscriptionState,
};
use crate::keys;
use crate::metrics::ANOMALIES;
use crate::topic::{Partition, Topic};

/// Topic metas read concurrently.
const READS_MAX: usize = 32;
/// Average time between two meta reads, so that the cost does not grow with the number of topics.
const READ_EVERY: Duration = Duration::from_millis(40);

/// How long a gone member is remembered; by then its partitions have new owners.
const REMEMBER_GONE_FOR: Duration = Duration::from_secs(5 * 60);

impl MembershipLoop {
    /// Reads the member list, and the partition leases of dirty subscriptions.
    pub(super) fn poll(&mut self, now: Instant) {
        self.polling = true;
        self.polled_at = now;
        self.poll_at = self.sweep_at;
        let mut leases = Vec::new();
        for subscription in self.session.subscriptions.values_mut() {
            subscription.in_poll =
                subscription.dirty && subscription.state == SubscriptionState::Member;
            if subscription.in_poll {
                subscription.dirty = false;
                leases.extend_from_slice(&subscription.leases);
            }
        }
        let context = Arc::clone(&self.context);
        self.work.spawn(async move {
            MembershipEvent::Polled(
                GroupSnapshot::read(&*context.backend, &context.group, leases).await,
            )
        });
    }

    /// Reconciles all polled subscriptions with the snapshot; an error ends the membership.
    pub(super) fn handle_polled(&mut self, snapshot: Result<GroupSnapshot>) -> Result<(), String> {
        self.polling = false;
        let snapshot = match snapshot {
            Ok(snapshot) => snapshot,
            Err(error) => {
                warn!(group = %self.context.group, %error, "polling the group failed, retrying");
                self.session.subscriptions.values_mut().for_each(|each| each.dirty |= each.in_poll);
                let retry_at = Instant::now() + self.poll_retry.next_delay();
                self.poll_soon(retry_at);
                return Ok(());
            }
        };
        self.poll_retry.reset();
        let mine = MemberStatus::Active(self.me.holder.clone());
        if snapshot.dead().any(|entry| entry.status == mine) {
            return Err("the liveness lease is gone or has another holder".to_owned());
        }
        self.track_liveness(snapshot.consumers());
        self.clean_up_dead_members(&snapshot);
        let mut next_expiry = snapshot.next_expiry(&self.me.member);
        let seen: Vec<GroupSubscriptionId> = self
            .session
            .subscriptions
            .values()
            .filter(|subscription| {
                subscription.in_poll && subscription.state == SubscriptionState::Member
            })
            .map(GroupSubscription::id)
            .collect();
        for id in seen {
            let end = self.reconcile(&id, &snapshot);
            next_expiry = next_expiry.into_iter().chain(end).min();
        }
        if let Some(end) = next_expiry {
            // Polls right after the expiry, without relying on a hint.
            self.sweep_at = self.sweep_at.min(snapshot.seen_at + end + EXPIRY_MARGIN);
        }
        Ok(())
    }

    /// Updates the sets of live and of recently gone consumers.
    fn track_liveness(&mut self, alive: BTreeSet<ConsumerName>) {
        let now = Instant::now();
        for consumer in self.known_consumers.alive.iter() {
            if !alive.contains(consumer) {
                self.gone.insert(consumer.clone(), now);
            }
        }
        self.gone.retain(|_, gone_since| now.duration_since(*gone_since) < REMEMBER_GONE_FOR);
        let gone = self.gone.keys().cloned().collect();
        self.known_consumers = KnownConsumers { alive: alive.into_iter().collect(), gone };
    }

    /// Acquires and revokes partitions of one topic according to the snapshot. Returns the remaining time of the first
    /// awaited lease to expire.
    fn reconcile(
        &mut self,
        id: &GroupSubscriptionId,
        snapshot: &GroupSnapshot,
    ) -> Option<Duration> {
        let subscription = find(&mut self.session, id)?;
        let entry = subscription.entry(&self.me);
        let is_known = snapshot.alive(&id.0).any(|known| *known == entry);
        if !is_known || snapshot.is_incomplete(&entry) {
            warn!(topic = %id.0, group = %self.context.group, "member-list entry is missing, writing it again");
            let context = Arc::clone(&self.context);
            self.work.spawn(async move {
                let (backend, group) = (&*context.backend, &context.group);
                // If this fails, the next poll repeats it.
                if member_list(backend, group).add(backend, &[entry.to_string()]).await.is_ok() {
                    group_ops::notify_members(backend, group, &[entry]).await;
                }
                MembershipEvent::Maintained
            });
        }
        let subscription = find(&mut self.session, id)?;
        if !is_known {
            subscription.dirty = true;
            return None;
        }
        if subscription.request.mode == Mode::Shared {
            return None;
        }
        let now = Instant::now();
        let is_partial = subscription.is_partial(snapshot);
        let since = subscription.partial_since.unwrap_or(now);
        subscription.partial_since = is_partial.then_some(since);
        let Some(RebalanceActions { acquire, mut revoke, orphan_leases, next_expiry }) =
            subscription.plan(snapshot, &self.me)
        else {
            // The topic changed during the poll: poll again.
            subscription.dirty = true;
            return None;
        };
        if is_partial && now.duration_since(since) < self.context.config.lease.ttl {
            // Other members may know more. Once the leases must have expired, no member owns those partitions.
            revoke.clear();
        }
        let obsolete_reservations: Vec<String> =
            obsolete_reservations(subscription, snapshot, &self.me.member);
        acquire.into_iter().for_each(|partition| self.acquire(id, partition));
        for partition in revoke {
            self.revoke(id, partition);
        }
        if !orphan_leases.is_empty() || !obsolete_reservations.is_empty() {
            let (context, holder) = (Arc::clone(&self.context), self.me.holder.clone());
            self.work.spawn(async move {
                // If this fails, the leases expire and the next poll repeats it.
                let _ = context.backend.release(&holder, &orphan_leases).await;
                let members = member_list(&*context.backend, &context.group);
                let _ = members.remove(&*context.backend, &obsolete_reservations).await;
                MembershipEvent::Maintained
            });
        }
        next_expiry
    }

    /// Removes dead members from the member list. In shared mode, their pending messages are reclaimed first.
    fn clean_up_dead_members(&mut self, snapshot: &GroupSnapshot) {
        let mut removed = Vec::new();
        for entry in snapshot.dead() {
            if group_ops::is_removable(entry) {
                removed.push(entry.to_string());
                continue;
            }
            let (MemberStatus::Active(holder), Some(subscription)) =
                (&entry.status, self.session.subscriptions.get(&entry.topic))
            else {
                continue;
            };
            let should_reclaim = subscription.state == SubscriptionState::Member
                && subscription.request.mode == Mode::Shared
                && self.cleaning_up.insert(entry.to_string());
            if should_reclaim {
                info!(topic = %entry.topic, group = %self.context.group, consumer = %holder,
                    "member died, reclaiming its pending messages");
                let listener = Arc::clone(&subscription.request.listener);
                let (entry, dead) = (entry.clone(), keys::consumer(holder));
                self.work.spawn(async move {
                    MembershipEvent::CleanedUp {
                        is_done: listener.on_member_died(dead).await,
                        entry,
                    }
                });
            }
        }
        self.remove_entries(removed);
    }

    pub(super) fn handle_cleaned_up(&mut self, entry: MemberEntry, is_done: bool) {
        self.cleaning_up.remove(&entry.to_string());
        // Otherwise the next poll retries.
        if is_done {
            self.remove_entries(vec![entry.to_string()]);
        }
    }

    fn remove_entries(&mut self, entries: Vec<String>) {
        if entries.is_empty() {
            return;
        }
        let context = Arc::clone(&self.context);
        self.work.spawn(async move {
            let members = member_list(&*context.backend, &context.group);
            if let Err(error) = members.remove(&*context.backend, &entries).await {
                debug!(%error, "removing dead members failed, the next poll retries");
            }
            MembershipEvent::Maintained
        });
    }

    fn acquire(&mut self, id: &GroupSubscriptionId, partition: Partition) {
        let Some(subscription) = find(&mut self.session, id) else { return };
        let Some(lease) = subscription.leases.get(usize::from(partition)).cloned() else { return };
        let topic = Arc::clone(&subscription.topic);
        let stream = keys::stream(&topic, partition);
        let part = HeldPartition {
            topic,
            lease: lease.clone(),
            held: None,
            state: PartitionOwnership::Acquiring,
        };
        subscription.held.insert(partition, part);
        let (context, renewer) = (Arc::clone(&self.context), Arc::clone(&self.renewer));
        let (known_consumers, id) = (self.known_consumers.clone(), id.clone());
        self.work.spawn(async move {
            let at = (&stream, &context.group);
            let held = group_ops::acquire_partition(
                &*context.backend,
                &renewer,
                &lease,
                at,
                &known_consumers,
            )
            .await;
            MembershipEvent::Acquired { id, partition, held }
        });
    }

    pub(super) fn handle_acquired(
        &mut self,
        id: &GroupSubscriptionId,
        partition: Partition,
        held: Result<Option<HeldLease>>,
    ) {
        // A subscription is not removed while it acquires a partition.
        let Some(subscription) = find(&mut self.session, id) else { return };
        let is_current = subscription.is_current(partition);
        let Some(part) = subscription.held.get_mut(&partition) else { return };
        let retry_after = match held {
            Ok(Some(lease)) => {
                self.acquire_retry.reset();
                let is_wanted = subscription.state == SubscriptionState::Member
                    && is_current
                    && lease.is_valid();
                if !is_wanted {
                    // Leaving, or the topic changed, or the lease is too old. The listener does not know it yet.
                    return self.release(id, partition);
                }
                part.state = PartitionOwnership::Owned;
                part.held = Some(lease.clone());
                info!(topic = %id.0, partition, group = %self.context.group,
                    consumer = %self.consumer, epoch = %lease.fence().epoch, "partition assigned");
                let (topic, fenced) =
                    (Arc::clone(&part.topic), self.fenced.of(lease.fence().clone()));
                subscription.request.listener.on_assigned(AssignedPartition {
                    topic,
                    partition,
                    lease,
                    consumer: self.consumer.clone(),
                    fenced,
                });
                let subscription = &self.session.subscriptions[&id.0];
                return self.report_owned(subscription);
            }
            // Another member acquired it first.
            Ok(None) => RETRY_MIN,
            Err(error) => {
                warn!(topic = %id.0, partition, group = %self.context.group, %error,
                    "acquiring the partition failed, retrying");
                self.acquire_retry.next_delay()
            }
        };
        subscription.held.remove(&partition);
        subscription.dirty = true;
        self.poll_soon(Instant::now() + retry_after);
        self.finish_leave_if_drained(id);
    }

    /// Reads the topic metas that are due.
    pub(super) fn refresh(&mut self, now: Instant) {
        let interval =
            READ_EVERY * u32::try_from(self.session.subscriptions.len()).unwrap_or(u32::MAX);
        self.refresh_at = now + interval.max(READ_EVERY);
        let mut permits = READS_MAX;
        for subscription in self.session.subscriptions.values_mut() {
            let is_member = subscription.state == SubscriptionState::Member;
            if !is_member || subscription.is_reading_meta {
                continue;
            }
            if subscription.refresh_at <= now && permits > 0 {
                permits -= 1;
                subscription.is_reading_meta = true;
                subscription.refresh_at = now + interval.max(subscription.topic.policies.refresh);
                let (context, id) = (Arc::clone(&self.context), subscription.id());
                self.work.spawn(async move {
                    let topic = Topic::read(&*context.backend, &id.0).await;
                    MembershipEvent::TopicRead { id, topic }
                });
            }
            // Topics over the limit are read at the next refresh.
            self.refresh_at = self.refresh_at.min(subscription.refresh_at.max(now + READ_EVERY));
        }
    }

    pub(super) fn handle_topic_read(&mut self, id: &GroupSubscriptionId, topic: Result<Topic>) {
        let Some(subscription) = find(&mut self.session, id) else { return };
        subscription.is_reading_meta = false;
        // A change notification may have arrived during the read.
        self.refresh_at = self.refresh_at.min(subscription.refresh_at);
        let topic = match topic {
            Ok(topic) => topic,
            Err(error) => return warn!(topic = %id.0, %error, "reading the topic's meta failed"),
        };
        if topic == *subscription.topic || subscription.state != SubscriptionState::Member {
            return;
        }
        if subscription.topic.created_at.is_some() && topic.created_at.is_none() {
            warn!(topic = %id.0, group = %self.context.group, "topic deleted while it is being consumed");
            let (name, group) = (id.0.to_string(), self.context.group.to_string());
            let labels = [("topic", name), ("group", group), ("result", "topic_deleted".into())];
            ::metrics::counter!(ANOMALIES, &labels).increment(1);
        }
        let topic = Arc::new(topic);
        let old = subscription.leases.clone();
        let outdated = subscription.change(Arc::clone(&topic));
        subscription.request.listener.on_topic_changed(topic);
        old.iter().for_each(|lease| drop(self.session.event_targets.remove(lease)));
        self.session.watch_topic(&id.0);
        for partition in outdated {
            self.revoke(id, partition);
        }
        self.poll_soon(Instant::now());
    }
}

/// Reservations of this static member whose partitions all have an owner again.
fn obsolete_reservations(
    subscription: &GroupSubscription,
    snapshot: &GroupSnapshot,
    me: &str,
) -> Vec<String> {
    let is_taken = |partition: &Partition| {
        let lease = subscription.leases.get(usize::from(*partition));
        let is_held = |lease| matches!(snapshot.leases.get(lease), Some(Some(_)));
        subscription.held.get(partition).is_some_and(|part| part.state == PartitionOwnership::Owned)
            || lease.is_none_or(is_held)
    };
    let is_obsolete = |entry: &&MemberEntry| match &entry.status {
        MemberStatus::Reserved(reserved) => entry.member == me && reserved.iter().all(is_taken),
        MemberStatus::Active(_) => false,
    };
    snapshot
        .alive(&subscription.topic.name)
        .filter(is_obsolete)
        .map(MemberEntry::to_string)
        .collect()
}
