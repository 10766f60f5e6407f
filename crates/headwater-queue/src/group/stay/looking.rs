//! Looking at the group and at topics, and what follows from what is seen.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{ConsumerName, HeldLease};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::{Event, Stay, find};
use crate::config::Mode;
use crate::error::Result;
use crate::group::members::{Entry, Stand, View};
use crate::group::placement::{Part, PartState, Placement, Plan, Standing, Who};
use crate::group::seam::OwnedPartition;
use crate::group::session::{AFTER_END, Session};
use crate::group::steps::{self, Watchfulness};
use crate::keys;
use crate::metrics::ANOMALIES;
use crate::topic::{Partition, Topic};

/// Metas that are read at the same time.
const READS_MAX: usize = 32;
/// One meta in this time on average, so that many topics cost no more than a few.
const READ_EVERY: Duration = Duration::from_millis(40);

/// How long a member that is gone is remembered: by then, all it had is taken over.
const MISSED_FOR: Duration = Duration::from_secs(5 * 60);

impl Stay {
    /// Looks at the members, and at the leases of those topics of which something was heard.
    pub(super) fn look(&mut self, session: &mut Session, now: Instant) {
        self.looking = true;
        self.looked_at = now;
        self.look_at = self.sweep_at;
        let mut leases = Vec::new();
        for placement in session.placements.values_mut() {
            placement.looked_at = placement.dirty && placement.standing == Standing::Member;
            if placement.looked_at {
                placement.dirty = false;
                leases.extend_from_slice(&placement.leases);
            }
        }
        let place = Arc::clone(&self.place);
        self.work.spawn(async move {
            Event::Looked(View::look(&*place.backend, &place.group, leases).await)
        });
    }

    /// Follows what was seen; an error ends the stay.
    pub(super) fn handle_looked(
        &mut self,
        session: &mut Session,
        view: Result<View>,
    ) -> Result<(), String> {
        self.looking = false;
        let view = match view {
            Ok(view) => view,
            Err(error) => {
                warn!(group = %self.place.group, %error, "the group could not be looked at, trying again");
                session.placements.values_mut().for_each(|each| each.dirty |= each.looked_at);
                self.look_later(self.failed_looks);
                self.failed_looks = self.failed_looks.saturating_add(1);
                return Ok(());
            }
        };
        self.failed_looks = 0;
        let mine = Stand::Working(self.me.holder.clone());
        if view.dead().any(|entry| entry.stand == mine) {
            return Err("others take this member for dead".to_owned());
        }
        self.miss(view.consumers());
        self.bury_dead(session, &view);
        let mut next_end = view.next_end(&self.me.member);
        let seen: Vec<Who> = session
            .placements
            .values()
            .filter(|placement| placement.looked_at && placement.standing == Standing::Member)
            .map(Placement::who)
            .collect();
        for who in seen {
            let end = self.follow(session, &who, &view);
            next_end = next_end.into_iter().chain(end).min();
        }
        if let Some(end) = next_end {
            // Whatever ends then, it is seen at once, also if nobody tells us.
            self.sweep_at = self.sweep_at.min(view.seen_at + end + AFTER_END);
        }
        Ok(())
    }

    /// Notes who lives, and who did until now.
    fn miss(&mut self, alive: BTreeSet<ConsumerName>) {
        let now = Instant::now();
        for consumer in self.watchfulness.alive.iter() {
            if !alive.contains(consumer) {
                self.gone.insert(consumer.clone(), now);
            }
        }
        self.gone.retain(|_, missed_at| now.duration_since(*missed_at) < MISSED_FOR);
        let gone = self.gone.keys().cloned().collect();
        self.watchfulness = Watchfulness { alive: alive.into_iter().collect(), gone };
    }

    /// Does for one topic what the view calls for. Returns how soon a lease ends that we wait for.
    fn follow(&mut self, session: &mut Session, who: &Who, view: &View) -> Option<Duration> {
        let placement = find(session, who)?;
        let entry = placement.entry(&self.me);
        if !view.alive(&who.0).any(|known| *known == entry) {
            warn!(topic = %who.0, group = %self.place.group, "our entry was removed, writing it again");
            placement.dirty = true;
            let place = Arc::clone(&self.place);
            self.work.spawn(async move {
                let (backend, group) = (&*place.backend, &place.group);
                // If it fails, the next look says so again.
                if steps::write(backend, group, &[entry.to_string()]).await.is_ok() {
                    steps::ring_for(backend, group, &[entry]).await;
                }
                Event::Tidied
            });
            return None;
        }
        if placement.joining.mode == Mode::Shared {
            return None;
        }
        let Some(Plan { take, give_up, stray, next_end }) = placement.plan(view, &self.me) else {
            // The topic changed meanwhile; it is dirty and looked at again.
            placement.dirty = true;
            return None;
        };
        let came_back: Vec<String> = self.came_back(placement, view);
        take.into_iter().for_each(|partition| self.take(session, who, partition));
        for partition in give_up {
            self.give_up(session, who, partition);
        }
        if !stray.is_empty() || !came_back.is_empty() {
            let (place, holder) = (Arc::clone(&self.place), self.me.holder.clone());
            self.work.spawn(async move {
                // If this fails, the leases run out, and the next look says it again.
                let _ = place.backend.release(&holder, &stray).await;
                let _ = steps::remove(&*place.backend, &place.group, &came_back).await;
                Event::Tidied
            });
        }
        next_end
    }

    /// What was kept for us while we were away and need be kept no longer: we have it, or others do.
    fn came_back(&self, placement: &Placement, view: &View) -> Vec<String> {
        let is_back = |partition: &Partition| {
            let lease = placement.leases.get(usize::from(*partition));
            let is_held = |lease| matches!(view.leases.get(lease), Some(Some(_)));
            placement.parts.get(partition).is_some_and(|part| part.state == PartState::Owned)
                || lease.is_none_or(is_held)
        };
        let is_done = |entry: &&Entry| match &entry.stand {
            Stand::Resting(kept) => entry.member == self.me.member && kept.iter().all(is_back),
            Stand::Working(_) => false,
        };
        view.alive(&placement.topic.name).filter(is_done).map(Entry::to_string).collect()
    }

    /// Forgets dead members, after what they had in hand is taken over.
    fn bury_dead(&mut self, session: &mut Session, view: &View) {
        let mut removed = Vec::new();
        for entry in view.dead() {
            if steps::is_removable(entry) {
                removed.push(entry.to_string());
                continue;
            }
            let (Stand::Working(holder), Some(placement)) =
                (&entry.stand, session.placements.get(&entry.topic))
            else {
                continue;
            };
            let can = placement.standing == Standing::Member
                && placement.joining.mode == Mode::Shared
                && self.burying.insert(entry.to_string());
            if can {
                info!(topic = %entry.topic, group = %self.place.group, consumer = %holder,
                    "a member died, taking over what it had in hand");
                let workplace = Arc::clone(&placement.joining.workplace);
                let (entry, dead) = (entry.clone(), keys::consumer(holder));
                self.work.spawn(async move {
                    Event::Buried { is_done: workplace.orphaned(dead).await, entry }
                });
            }
        }
        self.remove(removed);
    }

    pub(super) fn handle_buried(&mut self, entry: Entry, is_done: bool) {
        self.burying.remove(&entry.to_string());
        // Otherwise the next look finds it again.
        if is_done {
            self.remove(vec![entry.to_string()]);
        }
    }

    fn remove(&mut self, entries: Vec<String>) {
        if entries.is_empty() {
            return;
        }
        let place = Arc::clone(&self.place);
        self.work.spawn(async move {
            if let Err(error) = steps::remove(&*place.backend, &place.group, &entries).await {
                debug!(%error, "dead members are still listed, the next look removes them");
            }
            Event::Tidied
        });
    }

    fn take(&mut self, session: &mut Session, who: &Who, partition: Partition) {
        let Some(placement) = find(session, who) else { return };
        let Some(lease) = placement.leases.get(usize::from(partition)).cloned() else { return };
        let topic = Arc::clone(&placement.topic);
        let stream = keys::stream(&topic, partition);
        let part = Part { topic, lease: lease.clone(), state: PartState::Taking };
        placement.parts.insert(partition, part);
        let (place, keeper) = (Arc::clone(&self.place), Arc::clone(&self.keeper));
        let (watchfulness, who) = (self.watchfulness.clone(), who.clone());
        self.work.spawn(async move {
            let at = (&stream, &place.group);
            let held = steps::take(&*place.backend, &keeper, &lease, at, &watchfulness).await;
            Event::Taken { who, partition, held }
        });
    }

    pub(super) fn handle_taken(
        &mut self,
        session: &mut Session,
        who: &Who,
        partition: Partition,
        held: Result<Option<HeldLease>>,
    ) {
        let failed_takes = self.failed_takes;
        // A subscription with a part that is being taken is not forgotten.
        let Some(placement) = find(session, who) else { return };
        let is_current = placement.is_current(partition);
        let Some(part) = placement.parts.get_mut(&partition) else { return };
        match held {
            Ok(Some(lease)) => {
                self.failed_takes = 0;
                let is_wanted =
                    placement.standing == Standing::Member && is_current && lease.is_trusted();
                if !is_wanted {
                    // We are leaving, or the topic changed, or it took too long: nobody has heard of it yet.
                    return self.release(session, who, partition);
                }
                part.state = PartState::Owned;
                info!(topic = %who.0, partition, group = %self.place.group,
                    consumer = %self.consumer, epoch = %lease.fence().epoch, "partition gained");
                let topic = Arc::clone(&part.topic);
                placement.joining.workplace.gained(OwnedPartition {
                    topic,
                    partition,
                    lease,
                    consumer: self.consumer.clone(),
                    alarm: self.alarm.clone(),
                });
                let placement = &session.placements[&who.0];
                return self.count_owned(placement);
            }
            // Somebody saw something else than we did, and was faster.
            Ok(None) => {}
            Err(error) => {
                warn!(topic = %who.0, partition, group = %self.place.group, %error,
                    "the partition could not be taken, trying again");
                self.failed_takes = self.failed_takes.saturating_add(1);
            }
        }
        placement.parts.remove(&partition);
        placement.dirty = true;
        self.look_later(failed_takes);
        self.part_if_idle(session, who);
    }

    /// Reads the metas whose time has come.
    pub(super) fn refresh(&mut self, session: &mut Session, now: Instant) {
        let interval = READ_EVERY * u32::try_from(session.placements.len()).unwrap_or(u32::MAX);
        self.refresh_at = now + interval.max(READ_EVERY);
        let mut room = READS_MAX;
        for placement in session.placements.values_mut() {
            let is_member = placement.standing == Standing::Member;
            if !is_member || placement.reading {
                continue;
            }
            if placement.refresh_at <= now && room > 0 {
                room -= 1;
                placement.reading = true;
                placement.refresh_at = now + interval.max(placement.topic.policies.refresh);
                let (place, who) = (Arc::clone(&self.place), placement.who());
                self.work.spawn(async move {
                    let topic = Topic::read(&*place.backend, &who.0).await;
                    Event::Read { who, topic }
                });
            }
            // Those for which there was no room come a little later.
            self.refresh_at = self.refresh_at.min(placement.refresh_at.max(now + READ_EVERY));
        }
    }

    pub(super) fn handle_read(&mut self, session: &mut Session, who: &Who, topic: Result<Topic>) {
        let Some(placement) = find(session, who) else { return };
        placement.reading = false;
        // The bell may have rung while it was read.
        self.refresh_at = self.refresh_at.min(placement.refresh_at);
        let topic = match topic {
            Ok(topic) => topic,
            Err(error) => return warn!(topic = %who.0, %error, "the topic could not be read"),
        };
        if topic == *placement.topic || placement.standing != Standing::Member {
            return;
        }
        if placement.topic.created_at.is_some() && topic.created_at.is_none() {
            warn!(topic = %who.0, group = %self.place.group, "the topic was deleted under a running consumer");
            let (name, group) = (who.0.to_string(), self.place.group.to_string());
            let labels = [("topic", name), ("group", group), ("result", "topic_deleted".into())];
            ::metrics::counter!(ANOMALIES, &labels).increment(1);
        }
        let topic = Arc::new(topic);
        let old = placement.leases.clone();
        let outdated = placement.change(Arc::clone(&topic));
        placement.joining.workplace.changed(topic);
        old.iter().for_each(|lease| drop(session.heard.remove(lease)));
        session.listen_for(&who.0);
        for partition in outdated {
            self.give_up(session, who, partition);
        }
        self.look_soon(Instant::now());
    }
}
