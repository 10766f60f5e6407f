//! The stay of a session in its group, under one name: from entering to leaving, or until a lease is lost.
//!
//! Upstream: `session` enters and stays. Downstream: `steps`, each in a task of its own; the loop only decides.
//! Promises: nothing waits for anything else. Renewals, looks, take-overs and hand-overs run beside each other, however
//! long a hand-over takes; whatever comes back late is judged by what holds then. A lease that is lost, in whatever
//! way, ends the stay: every partition is `lost`, and the name is not used again.

mod looking;
mod parting;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{
    ConsumerName, HeldLease, HintKind, LeaseHint, LeaseKeeper, LeaseName, LostLease, StreamError,
};
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use super::members::{Entry, View};
use super::placement::{Answer, Me, Placement, Standing, Who};
use super::seam::{Alarm, Joined};
use super::session::{Command, Heard, Place, Session};
use super::steps::{self, Watchfulness};
use crate::error::{QueueError, Result};
use crate::keys;
use crate::metrics::PARTITIONS_OWNED;
use crate::topic::{Partition, Topic};

/// How a stay ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Everybody has left.
    Departed,
    /// A lease was lost. Those who are left enter again.
    Expelled,
}

/// What became of a step. Those about a subscription name it by topic and serial: it may be gone by then.
pub(super) enum Event {
    Renewed(Result<Vec<LostLease>, StreamError>),
    Looked(Result<View>),
    Announced {
        who: Vec<Who>,
        refused: Result<Vec<Option<Entry>>>,
    },
    Taken {
        who: Who,
        partition: Partition,
        held: Result<Option<HeldLease>>,
    },
    GivenUp {
        who: Who,
        partition: Partition,
        released: bool,
    },
    Read {
        who: Who,
        topic: Result<Topic>,
    },
    Buried {
        entry: Entry,
        is_done: bool,
    },
    Parted {
        who: Who,
    },
    /// Something was tidied up, or will be next time.
    Tidied,
}

/// The shortest time between two looks, so that hints that come together are answered together.
const LOOK_GAP: Duration = Duration::from_millis(5);
/// The first and longest wait after a step that failed.
const AGAIN_MIN: Duration = Duration::from_millis(100);
const AGAIN_MAX: Duration = Duration::from_secs(5);

/// A stay in a group.
pub(super) struct Stay {
    place: Arc<Place>,
    me: Me,
    consumer: ConsumerName,
    keeper: Arc<LeaseKeeper>,
    /// Shows that this member lives. It is renewed with all others, so while it is trusted they are.
    lease: HeldLease,
    alarm: Alarm,
    /// The steps under way. Dropped, they end.
    work: JoinSet<Event>,
    renew_at: Instant,
    renewing: bool,
    /// When to look next; in the past while a look is wanted as soon as possible.
    look_at: Instant,
    looking: bool,
    looked_at: Instant,
    /// When everything is looked at, whatever was heard.
    sweep_at: Instant,
    announce_at: Instant,
    announcing: bool,
    refresh_at: Instant,
    /// Failures in a row.
    failed_looks: u32,
    failed_takes: u32,
    /// Entries of dead members that are being taken over.
    burying: HashSet<String>,
    /// Consumers of members that live, and of those that did, as last seen.
    watchfulness: Watchfulness,
    /// When each of those that are gone was missed.
    gone: BTreeMap<ConsumerName, Instant>,
    /// How leases begin whose hints are about members.
    members: [LeaseName; 3],
    /// Those who wait until the last subscription has left.
    farewells: Vec<oneshot::Sender<()>>,
}

impl Stay {
    pub(super) fn new(place: Arc<Place>, me: Me, keeper: LeaseKeeper, lease: HeldLease) -> Self {
        let (now, group) = (Instant::now(), &place.group);
        Self {
            consumer: keys::consumer(&me.holder),
            me,
            keeper: Arc::new(keeper),
            lease,
            alarm: Alarm::default(),
            work: JoinSet::new(),
            renew_at: now + place.config.lease.renew_every,
            renewing: false,
            look_at: now,
            looking: false,
            looked_at: now,
            sweep_at: now,
            announce_at: now,
            announcing: false,
            refresh_at: now,
            failed_looks: 0,
            failed_takes: 0,
            burying: HashSet::new(),
            watchfulness: Watchfulness::default(),
            gone: BTreeMap::new(),
            members: [keys::member(group, ""), keys::resting(group, ""), keys::bell(group)],
            farewells: Vec::new(),
            place,
        }
    }

    /// Stays until everybody has left or a lease is lost.
    pub(super) async fn run(mut self, session: &mut Session) -> End {
        info!(group = %self.place.group, consumer = %self.consumer, "joined the group");
        loop {
            if !self.lease.is_trusted() {
                return self.expel(session, "it was not renewed in time");
            }
            self.start_due(session);
            let wake_at = self.wake_at();
            // All of these are cancel-safe. What says that we must stop comes first.
            tokio::select! {
                biased;
                () = self.lease.lost() => return self.expel(session, "it was not renewed in time"),
                () = self.alarm.raised() => return self.expel(session, "an effect was refused"),
                // None when everybody has said that they leave, and nobody else can come.
                Some(command) = session.commands.recv() => self.obey(session, command),
                hint = session.hints.recv() => match hint {
                    Ok(hint) => self.hear(session, &hint),
                    Err(_) => self.look_at_everything(session),
                },
                Some(event) = self.work.join_next() => {
                    if let Err(reason) = self.handle(session, event) {
                        return self.expel(session, &reason);
                    }
                }
                () = sleep_until(wake_at) => {}
            }
            if session.placements.is_empty() {
                return self.depart(session).await;
            }
        }
    }

    fn wake_at(&self) -> Instant {
        let mut at = self.sweep_at.min(self.refresh_at);
        if !self.announcing {
            at = at.min(self.announce_at);
        }
        if !self.renewing {
            at = at.min(self.renew_at);
        }
        if !self.looking {
            at = at.min(self.look_at);
        }
        at
    }

    /// Starts the steps whose time has come.
    fn start_due(&mut self, session: &mut Session) {
        let now = Instant::now();
        if now >= self.renew_at && !self.renewing {
            self.renewing = true;
            let (keeper, limit) = (Arc::clone(&self.keeper), self.place.config.lease.ttl / 3);
            self.work.spawn(async move {
                let late = || StreamError::Unavailable {
                    problem: format!("leases were not renewed within {limit:?}"),
                    source: None,
                };
                let renewed = timeout(limit, keeper.run_once()).await;
                Event::Renewed(renewed.unwrap_or_else(|_| Err(late())))
            });
        }
        if now >= self.announce_at && !self.announcing {
            self.announce_at = now + self.place.config.rebalance_every;
            self.announce(session);
        }
        if now >= self.sweep_at {
            self.look_at_everything(session);
        }
        if now >= self.look_at && !self.looking {
            self.look(session, now);
        }
        if now >= self.refresh_at {
            self.refresh(session, now);
        }
    }

    fn obey(&mut self, session: &mut Session, command: Command) {
        match command {
            Command::Join { serial, joining, answer } => {
                session.add(serial, joining, answer);
                self.announce_at = Instant::now();
            }
            Command::Leave { topic, serial, farewell } => {
                session.wait_no_more(serial);
                let who = (topic, serial);
                match find(session, &who) {
                    Some(placement) => placement.farewells.extend(farewell),
                    // It was refused, or has left before.
                    None => drop(farewell.map(|farewell| farewell.send(()))),
                }
                self.leave(session, &who);
            }
        }
    }

    /// Something was heard of a lease.
    fn hear(&mut self, session: &mut Session, hint: &LeaseHint) {
        let Some(lease) = hint.lease.as_ref().filter(|_| hint.kind != HintKind::Missed) else {
            return self.look_at_everything(session);
        };
        let now = Instant::now();
        match session.heard.get(lease) {
            Some(Heard::Partition(topic)) => {
                let Some(placement) = session.placements.get_mut(topic) else { return };
                placement.dirty = true;
                self.look_soon(now);
            }
            Some(Heard::Topic(topic)) => {
                let Some(placement) = session.placements.get_mut(topic) else { return };
                placement.refresh_at = now;
                self.refresh_at = now;
            }
            None if self.members.iter().any(|start| lease.as_str().starts_with(start.as_str())) => {
                self.look_at_everything(session);
            }
            None => {}
        }
    }

    /// What became of a step; an error ends the stay.
    fn handle(
        &mut self,
        session: &mut Session,
        event: Result<Event, JoinError>,
    ) -> Result<(), String> {
        let event = event.map_err(|error| format!("a step failed: {error}"))?;
        match event {
            Event::Renewed(renewed) => return self.handle_renewed(renewed),
            Event::Announced { who, refused } => self.handle_announced(session, who, refused),
            Event::Looked(view) => return self.handle_looked(session, view),
            Event::Taken { who, partition, held } => {
                self.handle_taken(session, &who, partition, held);
            }
            Event::GivenUp { who, partition, released } => {
                self.handle_given_up(session, &who, partition, released);
            }
            Event::Read { who, topic } => self.handle_read(session, &who, topic),
            Event::Buried { entry, is_done } => self.handle_buried(entry, is_done),
            Event::Parted { who } => self.handle_parted(session, &who),
            Event::Tidied => {}
        }
        Ok(())
    }

    fn handle_renewed(
        &mut self,
        renewed: Result<Vec<LostLease>, StreamError>,
    ) -> Result<(), String> {
        let every = self.place.config.lease.renew_every;
        self.renewing = false;
        match renewed {
            Ok(lost) => {
                // From when it began: the answer may have taken long.
                self.renew_at = (self.renew_at + every).max(Instant::now() + every / 2);
                lost.first().map_or(Ok(()), |lost| Err(format!("`{}` is gone", lost.fence.lease)))
            }
            Err(error) => {
                warn!(group = %self.place.group, %error, "leases were not renewed, trying again");
                self.renew_at = Instant::now() + every / 8;
                Ok(())
            }
        }
    }

    /// Tells the group of subscriptions it does not know yet.
    fn announce(&mut self, session: &mut Session) {
        let is_new = |placement: &&mut Placement| placement.standing == Standing::Outside;
        let mut who = Vec::new();
        let mut entries = Vec::new();
        for placement in session.placements.values_mut().filter(is_new) {
            placement.standing = Standing::Announcing;
            who.push((placement.topic.name.clone(), placement.serial));
            entries.push(placement.entry(&self.me));
        }
        if who.is_empty() {
            return;
        }
        // One at a time: those who come meanwhile are announced together.
        self.announcing = true;
        let place = Arc::clone(&self.place);
        self.work.spawn(async move {
            let refused = steps::announce(&*place.backend, &place.group, &entries).await;
            Event::Announced { who, refused }
        });
    }

    fn handle_announced(
        &mut self,
        session: &mut Session,
        who: Vec<Who>,
        refused: Result<Vec<Option<Entry>>>,
    ) {
        self.announcing = false;
        let mut refused = refused.map(Vec::into_iter);
        for who in who {
            let refused: Result<Option<Entry>, String> = match &mut refused {
                Ok(refused) => Ok(refused.next().flatten()),
                Err(error) => Err(error.to_string()),
            };
            let Some(placement) = find(session, &who) else { continue };
            let answer = placement.answer.take();
            let problem = match refused {
                Ok(None) => {
                    self.become_member(session, &who, answer);
                    continue;
                }
                Ok(Some(rival)) => QueueError::invalid(
                    "the mode",
                    format!(
                        "`{:?}`; member `{}` of group `{}` consumes topic `{}` as `{:?}`, and all must do the same",
                        placement.joining.mode, rival.member, self.place.group, who.0, rival.mode
                    ),
                ),
                Err(problem) => {
                    // The entry may be there or not; whoever looks finds it without a lease when we are gone.
                    StreamError::Unavailable { problem, source: None }.into()
                }
            };
            warn!(topic = %who.0, group = %self.place.group, error = %problem, "not a member yet");
            let is_leaving = placement.standing == Standing::Leaving;
            placement.standing = Standing::Outside;
            if answer.is_some() || is_leaving {
                answer.map(|answer| answer.send(Err(problem)));
                self.forget(session, &who);
            } else {
                self.announce_at =
                    Instant::now() + AGAIN_MAX.min(self.place.config.rebalance_every);
            }
        }
    }

    fn become_member(&mut self, session: &mut Session, who: &Who, answer: Option<Answer>) {
        let Some(placement) = find(session, who) else { return };
        // Whoever asked is gone, or has asked to leave meanwhile.
        if placement.standing == Standing::Leaving {
            return self.part_if_idle(session, who);
        }
        placement.standing = Standing::Member;
        (placement.dirty, placement.looked_at, placement.joined) = (true, false, true);
        placement.joining.workplace.joined(Joined {
            consumer: self.consumer.clone(),
            lease: self.lease.clone(),
            alarm: self.alarm.clone(),
        });
        // If nobody waits for it any more, its `Membership` was dropped and says so itself.
        answer.map(|answer| answer.send(Ok(())));
        self.refresh_at = self.refresh_at.min(placement.refresh_at);
        self.look_soon(Instant::now());
    }

    /// Looks at that time, or sooner if something else asks for it.
    fn look_soon(&mut self, at: Instant) {
        self.look_at = self.look_at.min(at.max(self.looked_at + LOOK_GAP));
    }

    fn look_at_everything(&mut self, session: &mut Session) {
        session.placements.values_mut().for_each(|placement| placement.dirty = true);
        self.sweep_at = Instant::now() + self.place.config.rebalance_every;
        self.look_soon(Instant::now());
    }

    /// After failures: soon at first, then less often.
    fn look_later(&mut self, failures: u32) {
        let wait = AGAIN_MIN * 2_u32.saturating_pow(failures.min(10));
        self.look_soon(Instant::now() + wait.min(AGAIN_MAX));
    }

    fn count_owned(&self, placement: &Placement) {
        let (topic, group) = (placement.topic.name.to_string(), self.place.group.to_string());
        let consumer = self.consumer.to_string();
        let labels = [("topic", topic), ("group", group), ("consumer", consumer)];
        ::metrics::gauge!(PARTITIONS_OWNED, &labels).set(placement.owned() as f64);
    }
}

/// The subscription that an event is about, if it is still there.
fn find<'s>(session: &'s mut Session, who: &Who) -> Option<&'s mut Placement> {
    session.placements.get_mut(&who.0).filter(|placement| placement.serial == who.1)
}
