//! The membership loop: runs one membership under one name, from joining until the session leaves or loses a lease.
//!
//! Upstream: `session` joins and runs it. Downstream: `group_ops`; each operation runs in its own task and reports back
//! with a [`MembershipEvent`].
//! Guarantees: the loop never blocks. Renewals, polls, acquires and revokes run concurrently; a late result is checked
//! against the current state. Losing a lease (the renewer reports it) ends the membership: `on_lost` runs for every owned partition, and the
//! consumer name is not reused. On a cluster, where one server may fail alone, losing the lease of a partition ends only the ownership of that partition.

mod leave;
mod poll;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{
    Backoff, ConsumerName, HeldLease, LeaseEvent, LeaseEventKind, LeaseName, LeaseRenewer,
    LostLeases, RetryTimer, StreamError, stable_name,
};
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use super::group_ops::{self, KnownConsumers};
use super::members::{GroupSnapshot, MemberEntry};
use super::rebalance_listener::{FencedSignal, GroupMembership, RejectedFences};
use super::session::{
    GroupContext, GroupSession, JoinedGroup, LeaseEventTarget, MembershipCommand,
};
use super::subscription_state::{
    GroupMemberIdentity, GroupSubscription, GroupSubscriptionId, JoinReply, SubscriptionState,
};
use crate::error::{QueueError, Result};
use crate::keys;
use crate::metrics::PARTITIONS_OWNED;
use crate::topic::{Partition, Topic};

/// How a membership ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MembershipEnd {
    /// All subscriptions have left.
    Left,
    /// A lease was lost. The remaining subscriptions rejoin.
    Evicted,
}

/// The result of an operation. The subscription it belongs to may be gone by then.
pub(super) enum MembershipEvent {
    Polled(Result<GroupSnapshot>),
    Registered {
        ids: Vec<GroupSubscriptionId>,
        refused: Result<Vec<Option<MemberEntry>>>,
    },
    Acquired {
        id: GroupSubscriptionId,
        partition: Partition,
        held: Result<Option<HeldLease>>,
    },
    Revoked {
        id: GroupSubscriptionId,
        partition: Partition,
        released: bool,
    },
    TopicRead {
        id: GroupSubscriptionId,
        topic: Result<Topic>,
    },
    CleanedUp {
        entry: MemberEntry,
        is_done: bool,
    },
    Left {
        id: GroupSubscriptionId,
    },
    /// A best-effort cleanup ran; the next poll repeats it if it failed.
    Maintained,
}

/// Minimum time between two polls, so that a burst of hints causes one poll.
const POLL_GAP: Duration = Duration::from_millis(5);
/// First and longest backoff after a failed operation.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);
const RETRY: Backoff = Backoff::doubling(RETRY_MIN, RETRY_MAX);

/// The state of one membership in a group.
pub(super) struct MembershipLoop {
    session: GroupSession,
    context: Arc<GroupContext>,
    me: GroupMemberIdentity,
    consumer: ConsumerName,
    renewer: Arc<LeaseRenewer>,
    losses: LostLeases,
    /// The liveness lease.
    lease: HeldLease,
    fenced: FencedSignal,
    rejected_fences: RejectedFences,
    /// Operations in progress and the renewal of the leases; aborted on drop.
    work: JoinSet<MembershipEvent>,
    /// When to poll next.
    poll_at: Instant,
    polling: bool,
    polled_at: Instant,
    /// When to poll all subscriptions, with or without hints.
    sweep_at: Instant,
    register_at: Instant,
    registering: bool,
    refresh_at: Instant,
    poll_retry: RetryTimer,
    acquire_retry: RetryTimer,
    /// Entries of dead members whose messages are being reclaimed.
    cleaning_up: HashSet<String>,
    /// Consumers of live and of recently gone members, as of the last poll.
    known_consumers: KnownConsumers,
    /// When each gone consumer was first missing.
    gone: BTreeMap<ConsumerName, Instant>,
    /// Lease name prefixes whose hints concern the member list.
    members: Vec<LeaseName>,
    /// Callers waiting until the last subscription has left.
    leave_waiters: Vec<oneshot::Sender<()>>,
}

impl MembershipLoop {
    pub(super) fn new(
        session: GroupSession,
        JoinedGroup { me, renewer, losses, lease }: JoinedGroup,
    ) -> Self {
        let context = Arc::clone(&session.context);
        let (now, group) = (Instant::now(), &context.group);
        let renewer = Arc::new(renewer);
        let (fenced, rejected_fences) = FencedSignal::new(lease.fence().clone());
        let keys = context.keys();
        let mut members = keys.member("");
        members.extend(keys.reservation(""));
        members.push(keys::group_notification(group));
        let mut work = JoinSet::new();
        let renewing = Arc::clone(&renewer);
        work.spawn(async move {
            renewing.run(std::future::pending()).await;
            MembershipEvent::Maintained
        });
        Self {
            consumer: keys::consumer(&me.holder),
            me,
            renewer,
            losses,
            lease,
            fenced,
            rejected_fences,
            work,
            poll_at: now,
            polling: false,
            polled_at: now,
            sweep_at: now,
            register_at: now,
            registering: false,
            refresh_at: now,
            poll_retry: RETRY.timer(),
            acquire_retry: RETRY.timer(),
            cleaning_up: HashSet::new(),
            known_consumers: KnownConsumers::default(),
            gone: BTreeMap::new(),
            members,
            leave_waiters: Vec::new(),
            context,
            session,
        }
    }

    /// Runs until all subscriptions have left or a lease is lost.
    pub(super) async fn run(mut self) -> (GroupSession, MembershipEnd) {
        info!(group = %self.context.group, consumer = %self.consumer, "joined the group");
        loop {
            if !self.lease.is_valid() {
                return self.evict("the liveness lease was not renewed in time");
            }
            self.start_due();
            let wake_at = self.wake_at();
            // All branches are cancel-safe. Loss of the lease takes precedence.
            tokio::select! {
                biased;
                () = self.lease.lost() => return self.evict("the liveness lease was not renewed in time"),
                Some(lost) = self.losses.recv() => {
                    let lease = lost.fence.lease;
                    if !self.may_lose(&lease) {
                        return self.evict(&format!("lease `{lease}` was lost"));
                    }
                    self.lose_partition(&lease);
                }
                Some(fence) = self.rejected_fences.recv() => {
                    if !self.may_lose(&fence.lease) {
                        return self.evict("the backend rejected a write as fenced");
                    }
                    // Otherwise it was lost before, and may be held in another epoch now.
                    if self.renewer.held().contains(&fence) {
                        self.renewer.release_later(&fence.lease);
                        self.lose_partition(&fence.lease);
                    }
                }
                // `None` when every subscription has asked to leave and no new one can join.
                Some(command) = self.session.commands.recv() => self.handle_command(command),
                hint = self.session.hints.recv() => match hint {
                    Ok(hint) => self.handle_hint(&hint),
                    Err(_) => self.poll_everything(),
                },
                Some(event) = self.work.join_next() => {
                    if let Err(reason) = self.handle(event) {
                        return self.evict(&reason);
                    }
                }
                () = sleep_until(wake_at) => {}
            }
            if self.session.subscriptions.is_empty() {
                return self.leave().await;
            }
        }
    }

    /// Whether the membership goes on without this lease.
    fn may_lose(&self, lease: &LeaseName) -> bool {
        self.context.backend.cluster_slot("").is_some() && *lease != self.lease.fence().lease
    }

    fn wake_at(&self) -> Instant {
        let mut at = self.sweep_at.min(self.refresh_at);
        if !self.registering {
            at = at.min(self.register_at);
        }
        if !self.polling {
            at = at.min(self.poll_at);
        }
        at
    }

    /// Starts the operations that are due.
    fn start_due(&mut self) {
        let now = Instant::now();
        if now >= self.register_at && !self.registering {
            self.register_at = now + self.context.config.rebalance_every;
            self.register();
        }
        if now >= self.sweep_at {
            self.poll_everything();
        }
        if now >= self.poll_at && !self.polling {
            self.poll(now);
        }
        if now >= self.refresh_at {
            self.refresh(now);
        }
    }

    fn handle_command(&mut self, command: MembershipCommand) {
        match command {
            MembershipCommand::Join { serial, request, reply } => {
                self.session.add(serial, request, reply);
                self.register_at = Instant::now();
            }
            MembershipCommand::Leave { topic, serial, done } => {
                self.session.cancel_queued_join(serial);
                let id = (topic, serial);
                match find(&mut self.session, &id) {
                    Some(subscription) => subscription.leave_waiters.extend(done),
                    // Its join was rejected, or it has already left.
                    None => drop(done.map(|done| done.send(()))),
                }
                self.begin_leave(&id);
            }
        }
    }

    /// Schedules what a hint about a lease calls for.
    fn handle_hint(&mut self, hint: &LeaseEvent) {
        let Some(lease) = hint.lease.as_ref().filter(|_| hint.kind != LeaseEventKind::Lagged)
        else {
            return self.poll_everything();
        };
        let now = Instant::now();
        match self.session.event_targets.get(lease) {
            Some(LeaseEventTarget::Partition(topic)) => {
                let Some(subscription) = self.session.subscriptions.get_mut(topic) else { return };
                subscription.dirty = true;
                self.poll_soon(now);
            }
            Some(LeaseEventTarget::Topic(topic)) => {
                let Some(subscription) = self.session.subscriptions.get_mut(topic) else { return };
                subscription.refresh_at = now;
                self.refresh_at = now;
            }
            None if self.members.iter().any(|start| lease.as_str().starts_with(start.as_str())) => {
                self.poll_everything();
            }
            None => {}
        }
    }

    /// Handles the result of an operation; an error ends the membership.
    fn handle(&mut self, event: Result<MembershipEvent, JoinError>) -> Result<(), String> {
        let event = event.map_err(|error| format!("a group operation panicked: {error}"))?;
        match event {
            MembershipEvent::Registered { ids, refused } => {
                self.handle_registered(ids, refused);
            }
            MembershipEvent::Polled(snapshot) => return self.handle_polled(snapshot),
            MembershipEvent::Acquired { id, partition, held } => {
                self.handle_acquired(&id, partition, held);
            }
            MembershipEvent::Revoked { id, partition, released } => {
                self.handle_revoked(&id, partition, released);
            }
            MembershipEvent::TopicRead { id, topic } => self.handle_topic_read(&id, topic),
            MembershipEvent::CleanedUp { entry, is_done } => self.handle_cleaned_up(entry, is_done),
            MembershipEvent::Left { id } => self.handle_left(&id),
            MembershipEvent::Maintained => {}
        }
        Ok(())
    }

    /// Adds new subscriptions to the member list.
    fn register(&mut self) {
        let is_new = |subscription: &&mut GroupSubscription| {
            subscription.state == SubscriptionState::Unregistered
        };
        let mut ids = Vec::new();
        let mut entries = Vec::new();
        for subscription in self.session.subscriptions.values_mut().filter(is_new) {
            subscription.state = SubscriptionState::Registering;
            ids.push((subscription.topic.name.clone(), subscription.serial));
            entries.push(subscription.entry(&self.me));
        }
        if ids.is_empty() {
            return;
        }
        // One registration at a time: joins that arrive meanwhile are batched into the next.
        self.registering = true;
        let context = Arc::clone(&self.context);
        self.work.spawn(async move {
            let refused = group_ops::register(&*context.backend, &context.group, &entries).await;
            MembershipEvent::Registered { ids, refused }
        });
    }

    fn handle_registered(
        &mut self,
        ids: Vec<GroupSubscriptionId>,
        refused: Result<Vec<Option<MemberEntry>>>,
    ) {
        self.registering = false;
        let mut refused = refused.map(Vec::into_iter);
        let mut joined = Vec::new();
        for id in ids {
            let refused: Result<Option<MemberEntry>, String> = match &mut refused {
                Ok(refused) => Ok(refused.next().flatten()),
                Err(error) => Err(error.to_string()),
            };
            let Some(subscription) = find(&mut self.session, &id) else { continue };
            let reply = subscription.reply.take();
            let problem = match refused {
                Ok(None) => {
                    joined.push(subscription.entry(&self.me));
                    self.become_member(&id, reply);
                    continue;
                }
                Ok(Some(conflict)) => QueueError::invalid(
                    "the mode",
                    format!(
                        "`{:?}`; member `{}` of group `{}` consumes topic `{}` as `{:?}`; all members must use the same mode",
                        subscription.request.mode,
                        conflict.member,
                        self.context.group,
                        id.0,
                        conflict.mode
                    ),
                ),
                Err(problem) => {
                    // The entry may or may not have been written. If so, it is removed once our lease is gone.
                    StreamError::Unavailable { problem, source: None }.into()
                }
            };
            warn!(topic = %id.0, group = %self.context.group, error = %problem, "registering the subscription with the group failed");
            let is_leaving = subscription.state == SubscriptionState::Draining;
            subscription.state = SubscriptionState::Unregistered;
            if reply.is_some() || is_leaving {
                reply.map(|reply| reply.send(Err(problem)));
                self.remove_subscription(&id);
            } else {
                self.register_at =
                    Instant::now() + RETRY_MAX.min(self.context.config.rebalance_every);
            }
        }
        if !joined.is_empty() {
            // This member does not wait for it: others give partitions away at their next poll at the latest.
            let context = Arc::clone(&self.context);
            self.work.spawn(async move {
                group_ops::notify_members(&*context.backend, &context.group, &joined).await;
                MembershipEvent::Maintained
            });
        }
    }

    fn become_member(&mut self, id: &GroupSubscriptionId, reply: Option<JoinReply>) {
        let Some(subscription) = find(&mut self.session, id) else { return };
        // The subscription asked to leave, or was dropped, while it was registered.
        if subscription.state == SubscriptionState::Draining {
            return self.finish_leave_if_drained(id);
        }
        subscription.state = SubscriptionState::Member;
        (subscription.dirty, subscription.in_poll, subscription.has_joined) = (true, false, true);
        subscription.request.listener.on_joined(GroupMembership {
            consumer: self.consumer.clone(),
            lease: self.lease.clone(),
            fenced: self.fenced.clone(),
        });
        // If the caller is gone, its `MembershipHandle` was dropped and sends a leave.
        reply.map(|reply| reply.send(Ok(())));
        self.refresh_at = self.refresh_at.min(subscription.refresh_at);
        self.poll_soon(Instant::now());
    }

    /// Polls at `at`, or earlier if already scheduled.
    fn poll_soon(&mut self, at: Instant) {
        self.poll_at = self.poll_at.min(at.max(self.polled_at + POLL_GAP));
    }

    fn poll_everything(&mut self) {
        self.session.subscriptions.values_mut().for_each(|subscription| subscription.dirty = true);
        self.sweep_at = Instant::now() + self.context.config.rebalance_every;
        self.poll_soon(Instant::now());
    }

    fn report_owned(&self, subscription: &GroupSubscription) {
        let (topic, group) = (subscription.topic.name.to_string(), self.context.group.to_string());
        let consumer = stable_name(self.consumer.as_str());
        let labels = [("topic", topic), ("group", group), ("consumer", consumer)];
        ::metrics::gauge!(PARTITIONS_OWNED, &labels).set(subscription.owned() as f64);
    }
}

/// The subscription with this id, if it still exists.
fn find<'s>(
    session: &'s mut GroupSession,
    id: &GroupSubscriptionId,
) -> Option<&'s mut GroupSubscription> {
    session.subscriptions.get_mut(&id.0).filter(|subscription| subscription.serial == id.1)
}
