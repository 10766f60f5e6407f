//! A session: this process in one group, from its first subscription to its last.
//!
//! Upstream: `coordinator` sends it commands. Downstream: `stay`, while it is a member.
//! Promises: it never blocks on the backend or on a subscription, so leases are renewed whatever else takes long; when
//! it is no longer trusted it tells its subscriptions at once, and enters again under a new name.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{Backend, GroupName, LeaseHint, LeaseName, StreamError};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::warn;

use super::identity;
use super::placement::{Answer, Me, Placement};
use super::seam::Joining;
use super::stay::{End, Stay};
use super::steps::{self, Entering};
use crate::config::QueueConfig;
use crate::error::{QueueError, Result};
use crate::keys;
use crate::topic::TopicName;

/// What a subscription asks of its session.
pub(super) enum Command {
    /// Take part. The answer comes when others know of it.
    Join { serial: u64, joining: Joining, answer: Answer },
    /// Hand everything over and take part no more.
    Leave { topic: TopicName, serial: u64, farewell: Option<oneshot::Sender<()>> },
}

/// What all parts of a session share.
pub(super) struct Place {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) config: QueueConfig,
    pub(super) group: GroupName,
    /// The id that stays over restarts, if there is one.
    pub(super) member: Option<String>,
}

/// This process in one group.
pub(super) struct Session {
    pub(super) place: Arc<Place>,
    pub(super) commands: mpsc::UnboundedReceiver<Command>,
    pub(super) hints: broadcast::Receiver<LeaseHint>,
    /// Where the hints come from.
    pub(super) _ears: Arc<dyn Any + Send + Sync>,
    pub(super) placements: HashMap<TopicName, Placement>,
    /// Which topic a hint is about.
    pub(super) heard: HashMap<LeaseName, Heard>,
    /// Those who want a topic that is just being left.
    pub(super) waiting: Vec<(u64, Joining, Answer)>,
    /// What is done after a stay has ended and nothing depends on.
    pub(super) tidying: JoinSet<()>,
}

/// What a hint about a lease says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// A partition of this topic may be free, or somebody may want one.
    Partition(TopicName),
    /// This topic was changed.
    Topic(TopicName),
}

/// The longest wait between two tries to enter.
const WAIT_MAX: Duration = Duration::from_secs(5);
const WAIT_MIN: Duration = Duration::from_millis(50);
/// A lease is gone this long after it should have ended.
pub(super) const AFTER_END: Duration = Duration::from_millis(5);

impl Session {
    /// Lives until the last subscription has left.
    pub(super) async fn run(mut self) {
        while let Some(stay) = self.enter().await {
            let end = stay.run(&mut self).await;
            if end == End::Departed || (self.placements.is_empty() && self.commands.is_empty()) {
                break;
            }
            // Others first hear that the old name is gone; and one that is always expelled at once must not spin.
            let _ = timeout(WAIT_MAX, self.tidying.join_next()).await;
            sleep(WAIT_MIN).await;
        }
        // Whoever asks from now on finds another session.
        self.commands.close();
        while self.commands.try_recv().is_ok() {}
        let patience = self.place.config.lease.ttl;
        let tidied = timeout(patience, async { while self.tidying.join_next().await.is_some() {} });
        // What is not done by then has ended by itself.
        let _ = tidied.await;
    }

    /// Becomes a member; `None` when nobody wants to any more.
    async fn enter(&mut self) -> Option<Stay> {
        let mut wait = WAIT_MIN;
        let mut warned = false;
        loop {
            while self.placements.is_empty() {
                let command = self.commands.recv().await?;
                self.obey_outside(command);
                if self.placements.is_empty() && self.commands.is_empty() {
                    return None;
                }
            }
            let holder = identity::new_holder(&self.place.config);
            let member = self.place.member.clone().unwrap_or_else(|| holder.to_string());
            let me = Me { member, holder };
            let again_at = match self.try_enter(&me).await {
                Ok(Entering::Entered(keeper, lease)) => {
                    return Some(Stay::new(Arc::clone(&self.place), me, *keeper, lease));
                }
                Ok(Entering::Taken { by, remaining }) => {
                    if !std::mem::replace(&mut warned, true) {
                        warn!(member = %me.member, group = %self.place.group, %by,
                            "another process bears this member id, waiting until it is gone");
                    }
                    // They wait for their turn; that is no reason to hold up whoever subscribes.
                    self.answer_all(|_| Ok(()));
                    Instant::now() + remaining.min(self.place.config.rebalance_every) + AFTER_END
                }
                Err(error) => {
                    warn!(group = %self.place.group, %error, "joining the group failed");
                    self.refuse_new(error);
                    wait = (wait * 2).min(WAIT_MAX);
                    Instant::now() + wait
                }
            };
            self.wait_outside(again_at, &keys::member(&self.place.group, &me.member)).await;
        }
    }

    /// Tries to take the member's lease; commands are obeyed meanwhile.
    async fn try_enter(&mut self, me: &Me) -> Result<Entering> {
        let place = Arc::clone(&self.place);
        let entering =
            steps::enter(Arc::clone(&place.backend), &place.group, me, place.config.lease);
        tokio::pin!(entering);
        loop {
            // Not dropped half way: a lease that was taken without our knowledge would stand in our own way.
            tokio::select! {
                entered = &mut entering => return entered,
                Some(command) = self.commands.recv() => self.obey_outside(command),
            }
        }
    }

    /// Waits for the next try: until `again_at`, or until the lease in our way becomes free.
    async fn wait_outside(&mut self, again_at: Instant, lease: &LeaseName) {
        loop {
            tokio::select! {
                () = sleep_until(again_at) => return,
                Some(command) = self.commands.recv() => {
                    self.obey_outside(command);
                    if self.placements.is_empty() {
                        return;
                    }
                }
                hint = self.hints.recv() => match hint {
                    Ok(hint) if hint.lease.as_ref().is_some_and(|about| about != lease) => {}
                    // Or hints were missed, and it may be.
                    Ok(_) | Err(_) => return,
                }
            }
        }
    }

    fn obey_outside(&mut self, command: Command) {
        match command {
            Command::Join { serial, joining, answer } => self.add(serial, joining, answer),
            Command::Leave { topic, serial, farewell } => {
                self.wait_no_more(serial);
                let is_it = |placement: &Placement| placement.serial == serial;
                if self.placements.get(&topic).is_some_and(is_it) {
                    self.take_out(&topic);
                }
                // Whoever asked may be gone; then there is nobody to tell.
                let _ = farewell.map(|farewell| farewell.send(()));
            }
        }
    }

    /// Adds a subscription that others do not know of yet. One at a time for each topic.
    pub(super) fn add(&mut self, serial: u64, joining: Joining, answer: Answer) {
        use super::placement::Standing::{Leaving, Parting};
        match self.placements.get(&joining.topic.name) {
            None => {
                let name = joining.topic.name.clone();
                self.placements.insert(name.clone(), Placement::new(serial, joining, answer));
                self.listen_for(&name);
            }
            Some(placement) if matches!(placement.standing, Leaving | Parting) => {
                self.waiting.push((serial, joining, answer));
            }
            Some(_) => {
                let problem = format!(
                    "this queue consumes topic `{}` in group `{}` already; raise `concurrency`, or make another \
                     `Queue` for another consumer",
                    joining.topic.name, joining.group
                );
                // Whoever asked may be gone; then there is nobody to tell.
                let _ = answer.send(Err(QueueError::invalid("a second subscription", problem)));
            }
        }
    }

    /// One that was dropped before its turn came.
    pub(super) fn wait_no_more(&mut self, serial: u64) {
        self.waiting.retain(|(waiting, ..)| *waiting != serial);
    }

    /// Removes a subscription; those who waited for its topic come next.
    pub(super) fn take_out(&mut self, topic: &TopicName) -> Option<Placement> {
        let placement = self.placements.remove(topic)?;
        self.heard.remove(&keys::topic_bell(topic));
        self.heard.remove(&keys::join_bell(&self.place.group, topic));
        placement.leases.iter().for_each(|lease| drop(self.heard.remove(lease)));
        let (next, later) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|(_, joining, _)| joining.topic.name == *topic);
        self.waiting = later;
        for (serial, joining, answer) in next {
            self.add(serial, joining, answer);
        }
        Some(placement)
    }

    /// Notes which hints are about a topic, after its leases were named anew.
    pub(super) fn listen_for(&mut self, topic: &TopicName) {
        let Some(placement) = self.placements.get(topic) else { return };
        self.heard.insert(keys::topic_bell(topic), Heard::Topic(topic.clone()));
        let bell = keys::join_bell(&self.place.group, topic);
        self.heard.insert(bell, Heard::Partition(topic.clone()));
        for lease in &placement.leases {
            self.heard.insert(lease.clone(), Heard::Partition(topic.clone()));
        }
    }

    fn answer_all(&mut self, answer: impl Fn(&Placement) -> Result<()>) {
        for placement in self.placements.values_mut() {
            if let Some(waiting) = placement.answer.take() {
                let _ = waiting.send(answer(placement));
            }
        }
    }

    /// Those who just subscribe are told of the failure; those who were members before try again.
    fn refuse_new(&mut self, error: QueueError) {
        let text = error.to_string();
        let mut error = Some(error);
        let is_new = |placement: &&Placement| placement.answer.is_some();
        let new: Vec<TopicName> =
            self.placements.values().filter(is_new).map(|new| new.topic.name.clone()).collect();
        for topic in new {
            let answer = self.take_out(&topic).and_then(|placement| placement.answer);
            let again = || StreamError::Unavailable { problem: text.clone(), source: None }.into();
            answer.map(|answer| answer.send(Err(error.take().unwrap_or_else(again))));
        }
    }
}
