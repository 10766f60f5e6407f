//! The lanes of one reader: one without a cluster, one for each slot with it.
//!
//! Upstream: `reader` and `tail`. Promises: whichever lane has something first ends the wait; what other lanes fetch
//! meanwhile comes with the next read.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::Instant;

use super::lane::{Lane, Question};
use super::reply::Replies;
use super::servers::{Servers, closed};
use crate::error::{Result, StreamError};

/// A wait that ends this much after the one that was asked for need not be ended early.
const WAIT_SLACK: Duration = Duration::from_millis(5);

pub(super) struct Lanes<Q> {
    servers: Arc<Servers>,
    lanes: BTreeMap<u16, Lane<Q>>,
    /// Answers that nobody has taken yet.
    arrived: Vec<Arrived<Q>>,
    /// What went wrong while something else arrived.
    trouble: Option<StreamError>,
}

/// An answer, and the question it answers.
pub(super) struct Arrived<Q> {
    pub(super) question: Q,
    pub(super) replies: Replies,
    /// Replies that come before the answer.
    pub(super) skips: usize,
}

impl<Q: Question> Lanes<Q> {
    pub(super) fn new(servers: &Arc<Servers>) -> Self {
        Self {
            servers: Arc::clone(servers),
            lanes: BTreeMap::new(),
            arrived: Vec::new(),
            trouble: None,
        }
    }

    pub(super) fn servers(&self) -> &Servers {
        &self.servers
    }

    pub(super) fn has_arrived(&self) -> bool {
        !self.arrived.is_empty()
    }

    /// Takes what has arrived.
    pub(super) fn take(&mut self) -> Vec<Arrived<Q>> {
        std::mem::take(&mut self.arrived)
    }

    /// Asks one question per slot and waits until something arrives. What arrives is there to `take`, also after this
    /// future was dropped. Cancel-safe.
    pub(super) async fn ask(&mut self, questions: &[(u16, Q)], wait: Duration) -> Result<()> {
        let servers = Arc::clone(&self.servers);
        servers.check_open()?;
        if let Some(trouble) = self.trouble.take() {
            return Err(trouble);
        }
        if !self.arrived.is_empty() {
            return Ok(());
        }
        tokio::select! {
            biased;
            asked = self.ask_all(questions, wait) => asked,
            () = servers.until_closed() => Err(closed()),
        }
    }

    async fn ask_all(&mut self, questions: &[(u16, Q)], wait: Duration) -> Result<()> {
        let wait_until = (!wait.is_zero()).then(|| Instant::now() + wait);
        self.end_others(questions, wait_until).await?;
        if !self.arrived.is_empty() {
            return Ok(());
        }
        for (slot, _) in questions {
            self.lanes.entry(*slot).or_insert_with(|| Lane::new(*slot));
        }
        if let [(slot, question)] = questions
            && let Some(lane) = self.lanes.get_mut(slot)
        {
            if let Some(replies) = lane.ask(&self.servers, question, wait_until).await? {
                let (question, skips) = (question.clone(), lane.skips());
                self.arrived.push(Arrived { question, replies, skips });
            }
            return Ok(());
        }
        // First what is there already, on all lanes; then whatever comes first.
        self.ask_many(questions, None).await?;
        if self.arrived.is_empty() && wait_until.is_some() {
            self.ask_many(questions, wait_until).await?;
        }
        Ok(())
    }

    /// Asks on all lanes. Without a wait it collects all answers, else it stops at the first.
    async fn ask_many(
        &mut self,
        questions: &[(u16, Q)],
        wait_until: Option<Instant>,
    ) -> Result<()> {
        let servers = &self.servers;
        let mut asking: FuturesUnordered<_> = self
            .lanes
            .iter_mut()
            .filter_map(|(slot, lane)| {
                let (_, question) = questions.iter().find(|(asked, _)| asked == slot)?;
                // A lane that still waits has nothing yet: its server would have answered.
                let waits = lane.outstanding().is_some() && wait_until.is_none();
                (!waits).then_some(async move {
                    let answer = lane.ask(servers, question, wait_until).await;
                    (answer, question, lane.skips())
                })
            })
            .collect();
        while let Some((answer, question, skips)) = asking.next().await {
            match answer {
                Ok(None) => {}
                Ok(Some(replies)) => {
                    self.arrived.push(Arrived { question: question.clone(), replies, skips });
                    if wait_until.is_some() {
                        break;
                    }
                }
                Err(error) => self.trouble = Some(error),
            }
            if wait_until.is_some() && self.trouble.is_some() {
                break;
            }
        }
        drop(asking);
        self.report_trouble()
    }

    /// Ends waits for other questions than these, and waits that would last too long.
    async fn end_others(
        &mut self,
        questions: &[(u16, Q)],
        wait_until: Option<Instant>,
    ) -> Result<()> {
        let fits = |slot: &u16, lane: &Lane<Q>| match lane.outstanding() {
            None => true,
            Some((asked, until)) => {
                questions.iter().any(|(at, question)| at == slot && question == asked)
                    && wait_until.is_some_and(|wait| until <= wait + WAIT_SLACK)
            }
        };
        let stale = self.lanes.iter().filter(|(slot, lane)| !fits(slot, lane));
        let stale: Vec<u16> = stale.map(|(slot, _)| *slot).collect();
        if !stale.is_empty() {
            self.end(&stale).await?;
        }
        let unused: Vec<u16> = self
            .lanes
            .keys()
            .filter(|slot| questions.iter().all(|(asked, _)| asked != *slot))
            .copied()
            .collect();
        self.drop_lanes(&unused);
        Ok(())
    }

    /// Ends everything. What arrived is there to `take`.
    pub(super) async fn close(&mut self) -> Result<()> {
        let slots: Vec<u16> = self.lanes.keys().copied().collect();
        let ended = self.end(&slots).await;
        self.drop_lanes(&slots);
        ended
    }

    /// Ends the waits on these lanes and keeps what arrived.
    async fn end(&mut self, slots: &[u16]) -> Result<()> {
        let servers = &self.servers;
        let lanes = self.lanes.iter_mut().filter(|(slot, _)| slots.contains(slot));
        let mut ending: FuturesUnordered<_> = lanes
            .map(|(_, lane)| async move {
                let question = lane.outstanding().map(|(question, _)| question.clone());
                (lane.end(servers).await, question, lane.skips())
            })
            .collect();
        // Each answer is kept as it comes: this future may be dropped in between.
        while let Some((answer, question, skips)) = ending.next().await {
            match (answer, question) {
                (Ok(Some(replies)), Some(question)) => {
                    self.arrived.push(Arrived { question, replies, skips });
                }
                (Ok(_), _) => {}
                (Err(error), _) => self.trouble = Some(error),
            }
        }
        drop(ending);
        self.report_trouble()
    }

    /// What went wrong, unless something arrived; then it waits for the next read.
    fn report_trouble(&mut self) -> Result<()> {
        match self.trouble.take() {
            Some(error) if self.arrived.is_empty() => Err(error),
            trouble => {
                self.trouble = trouble;
                Ok(())
            }
        }
    }

    fn drop_lanes(&mut self, slots: &[u16]) {
        self.lanes.retain(|slot, _| !slots.contains(slot));
    }
}
