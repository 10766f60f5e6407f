//! Handing over: one partition, one subscription, everything, or all at once because a lease is lost.

use std::sync::Arc;

use headwater_stream::LeaseName;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::{End, Event, Stay, find};
use crate::config::Mode;
use crate::group::placement::{PartState, Placement, Standing, Who};
use crate::group::session::Session;
use crate::group::steps::{self, Parting};
use crate::keys;
use crate::topic::{Partition, TopicName};

impl Stay {
    /// Begins to hand over a partition, if it is ours.
    pub(super) fn give_up(&mut self, session: &mut Session, who: &Who, partition: Partition) {
        let is_static = self.place.member.is_some();
        let Some(placement) = find(session, who) else { return };
        // One that will be back keeps its leases until others know that the partitions are kept for it.
        let is_released = placement.standing != Standing::Leaving || !is_static;
        let Some(part) = placement.parts.get_mut(&partition) else { return };
        if part.state != PartState::Owned {
            return;
        }
        part.state = PartState::GivingUp;
        info!(topic = %who.0, partition, group = %self.place.group, consumer = %self.consumer,
            "giving the partition up");
        let workplace = Arc::clone(&placement.joining.workplace);
        let (keeper, lease, who) = (Arc::clone(&self.keeper), part.lease.clone(), who.clone());
        self.work.spawn(async move {
            workplace.give_up(partition).await;
            if is_released {
                steps::release(&keeper, &[lease]).await;
            }
            Event::GivenUp { who, partition, released: is_released }
        });
    }

    /// Releases a partition that nobody has worked on.
    pub(super) fn release(&mut self, session: &mut Session, who: &Who, partition: Partition) {
        let Some(placement) = find(session, who) else { return };
        let Some(part) = placement.parts.get_mut(&partition) else { return };
        part.state = PartState::Releasing;
        let (keeper, lease, who) = (Arc::clone(&self.keeper), part.lease.clone(), who.clone());
        self.work.spawn(async move {
            steps::release(&keeper, &[lease]).await;
            Event::GivenUp { who, partition, released: true }
        });
    }

    pub(super) fn handle_given_up(
        &mut self,
        session: &mut Session,
        who: &Who,
        partition: Partition,
        released: bool,
    ) {
        let Some(placement) = find(session, who) else { return };
        if released {
            placement.parts.remove(&partition);
        } else if let Some(part) = placement.parts.get_mut(&partition) {
            part.state = PartState::Idle;
        }
        // It may be ours again: the topic changed, or whoever should have it died.
        placement.dirty = true;
        let placement = &session.placements[&who.0];
        self.count_owned(placement);
        self.look_soon(Instant::now());
        self.part_if_idle(session, who);
    }

    /// Begins to hand over everything a subscription has.
    pub(super) fn leave(&mut self, session: &mut Session, who: &Who) {
        let Some(placement) = find(session, who) else { return };
        match placement.standing {
            Standing::Outside => self.forget(session, who),
            Standing::Announcing => placement.standing = Standing::Leaving,
            Standing::Member => {
                placement.standing = Standing::Leaving;
                let partitions: Vec<Partition> = placement.parts.keys().copied().collect();
                partitions.into_iter().for_each(|each| self.give_up(session, who, each));
                self.part_if_idle(session, who);
            }
            Standing::Leaving | Standing::Parting => {}
        }
    }

    /// Takes a subscription that leaves out of the group, once nothing is in hand.
    pub(super) fn part_if_idle(&mut self, session: &mut Session, who: &Who) {
        let Some(placement) = find(session, who) else { return };
        let is_idle = placement.parts.values().all(|part| part.state == PartState::Idle);
        if placement.standing != Standing::Leaving || !is_idle {
            return;
        }
        placement.standing = Standing::Parting;
        let leases = placement.parts.values().map(|part| part.lease.clone()).collect();
        let rests = self.place.member.is_some() && placement.joining.mode == Mode::Owned;
        let parting = Parting {
            entry: placement.entry(&self.me),
            resting: rests.then(|| (placement.resting_entry(&self.me), leases)),
            rest: self.place.config.lease.ttl,
            shared: (placement.joining.mode == Mode::Shared).then(|| {
                let topic = &placement.topic;
                let streams = (0..topic.partitions).map(|partition| keys::stream(topic, partition));
                (streams.collect(), self.consumer.clone())
            }),
        };
        let (place, keeper, who) = (Arc::clone(&self.place), Arc::clone(&self.keeper), who.clone());
        self.work.spawn(async move {
            steps::part(&*place.backend, &place.group, &keeper, &parting).await;
            Event::Parted { who }
        });
    }

    pub(super) fn handle_parted(&mut self, session: &mut Session, who: &Who) {
        info!(topic = %who.0, group = %self.place.group, consumer = %self.consumer, "left the topic");
        self.forget(session, who);
    }

    /// Removes a subscription, and tells those who wait for that.
    pub(super) fn forget(&mut self, session: &mut Session, who: &Who) {
        if find(session, who).is_none() {
            return;
        }
        let Some(mut placement) = session.take_out(&who.0) else { return };
        // Somebody may have waited for the topic.
        self.announce_at = Instant::now();
        placement.parts.clear();
        self.count_owned(&placement);
        if session.placements.is_empty() {
            // Told when the member is gone, too.
            self.farewells.append(&mut placement.farewells);
        } else {
            placement.farewells.into_iter().for_each(say);
        }
    }

    /// Leaves the group for good: others hear of it at once.
    pub(super) async fn depart(self, _session: &mut Session) -> End {
        let lease = self.lease.fence().lease.clone();
        let released = steps::release(&self.keeper, std::slice::from_ref(&lease));
        // What takes longer has run out by itself.
        let _ = timeout(self.place.config.lease.ttl, released).await;
        info!(group = %self.place.group, consumer = %self.consumer, "left the group");
        self.farewells.into_iter().for_each(say);
        End::Departed
    }

    /// A lease is lost: nothing is ours any more, and this name is never used again.
    pub(super) fn expel(self, session: &mut Session, reason: &str) -> End {
        warn!(group = %self.place.group, consumer = %self.consumer, reason,
            "no longer a member, joining again");
        let (mut owned, mut shared) = (Vec::new(), Vec::new());
        let mut leaving: Vec<TopicName> = Vec::new();
        for placement in session.placements.values_mut() {
            if placement.standing != Standing::Outside {
                let entries = match placement.joining.mode {
                    Mode::Owned => &mut owned,
                    Mode::Shared => &mut shared,
                };
                entries.push(placement.entry(&self.me).to_string());
            }
            if matches!(placement.standing, Standing::Leaving | Standing::Parting) {
                leaving.push(placement.topic.name.clone());
            }
            self.lose(placement);
        }
        let mut farewells = self.farewells;
        for topic in leaving {
            farewells.extend(session.take_out(&topic).into_iter().flat_map(|left| left.farewells));
        }
        // What is still ours at the server, others may have at once. The member first: whoever takes a partition over
        // must see that its last owner is no member any more.
        let member = self.lease.fence().lease.clone();
        let held = self.keeper.held().into_iter().map(|fence| fence.lease);
        let partitions: Vec<LeaseName> = held.filter(|lease| *lease != member).collect();
        let (place, keeper) = (self.place, self.keeper);
        session.tidying.spawn(async move {
            let tidied = async {
                steps::release(&keeper, &[member]).await;
                steps::release(&keeper, &partitions).await;
                let _ = steps::remove(&*place.backend, &place.group, &owned).await;
                // What was in hand of shared partitions is taken over from a member that died. Written once more, for a
                // server that lost everything has no entry of ours.
                if !shared.is_empty() {
                    let _ = steps::write(&*place.backend, &place.group, &shared).await;
                }
            };
            // What takes longer has run out by itself, and others have tidied up.
            let _ = timeout(place.config.lease.ttl, tidied).await;
            farewells.into_iter().for_each(say);
        });
        End::Expelled
    }

    /// Takes everything out of a subscription's hands.
    fn lose(&self, placement: &mut Placement) {
        let workplace = &placement.joining.workplace;
        for (partition, part) in std::mem::take(&mut placement.parts) {
            if matches!(part.state, PartState::Owned | PartState::GivingUp) {
                warn!(topic = %placement.topic.name, partition, group = %self.place.group,
                    consumer = %self.consumer, "partition lost");
                workplace.lost(partition);
            }
        }
        if std::mem::take(&mut placement.joined) {
            workplace.expelled();
        }
        placement.standing = Standing::Outside;
        placement.looked_at = false;
        // What happened to the topic meanwhile was not heard.
        placement.reading = false;
        placement.refresh_at = Instant::now();
        self.count_owned(placement);
    }
}

/// Whoever waited may be gone; then there is nobody to tell.
fn say(farewell: oneshot::Sender<()>) {
    let _ = farewell.send(());
}
