//! Runs replay plans: takes their leases, sends letters at the rate of their step, and observes the outcomes.
//!
//! Upstream: `server/run.rs` starts one runner in every process. Downstream: `rows.rs` and the dead letters of the queue.
//! Guarantees: a letter is recorded before it is sent, sending is idempotent, and a letter is counted in the transaction
//! that removes its record; so after a crash another process repeats at most one batch, without effect. Before each batch
//! the state is read, so a paused or cancelled plan sends nothing after a second. While Redis does not answer a plan waits
//! and says so; while SQL does not answer nothing is sent. Not here: decisions (see `progress.rs`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use headwater_issue::{IssueError, Store};
use headwater_queue::{
    Queue, QueueError, ReplayOrder, ReplayOutcomes, ReplayReadiness, ReplayedLetterOutcome,
};
use headwater_stream::EntryId;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::http::ApiError;
use crate::server::plans::cause::{cause_id, cause_of};
use crate::server::plans::progress::{LetterOutcome, PlanAction, PlanEvent};
use crate::server::plans::rows::{self, LEASE_TTL, PlanLetter, PlanState, PlanUpdate, ReplayPlan};
use crate::server::shutdown_signal::ShutdownSignal;

/// Interval of batches of a plan that runs, and of looking for plans.
const TICK: Duration = Duration::from_millis(200);
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Interval of observations.
const OBSERVE_EVERY: Duration = Duration::from_millis(500);

/// Interval at which an idle plan renews its lease.
const RENEW_EVERY: Duration = Duration::from_secs(3);

/// Time before the end of the lease at which nothing more is sent.
const LEASE_MARGIN: Duration = Duration::from_secs(3);

/// How long the outcomes of a stopped or cancelled plan are observed.
const OBSERVED_AFTER_END: Duration = Duration::from_secs(10 * 60);

/// Time for the streams to answer in one turn of a plan.
const STREAMS_TIME_MAX: Duration = Duration::from_secs(5);

/// Bytes of a problem.
const PROBLEM_BYTES_MAX: usize = 500;

// Two renewals may be lost before the lease is, and a turn ends before it.
const _: () = assert!(RENEW_EVERY.as_secs() * 3 <= LEASE_TTL.as_secs());
const _: () = assert!(STREAMS_TIME_MAX.as_secs() + LEASE_MARGIN.as_secs() < LEASE_TTL.as_secs());

/// The plans that this process runs.
pub(crate) struct PlanRunner {
    store: Arc<dyn Store>,
    queue: Queue,
    name: String,
    held: HashMap<i64, HeldPlan>,
    shutdown: ShutdownSignal,
}

/// A plan whose lease this process holds.
struct HeldPlan {
    epoch: i64,
    /// When the lease was renewed last; a lower bound.
    renewed: Instant,
    /// Whether letters may have been sent whose entries are not stored.
    needs_recovery: bool,
    /// Whether recorded letters are known to be unsent. They are sent as soon as the plan runs.
    has_unsent: bool,
    outcomes: HashMap<String, ReplayOutcomes>,
    observe_at: Instant,
    send_at: Instant,
}

/// Why a turn of a plan ended early.
enum TurnError {
    /// Another process has the lease.
    Lost,
    Store(IssueError),
    Queue(QueueError),
    /// The streams did not answer in time.
    Late,
}

impl From<IssueError> for TurnError {
    fn from(error: IssueError) -> Self {
        Self::Store(error)
    }
}

impl From<QueueError> for TurnError {
    fn from(error: QueueError) -> Self {
        Self::Queue(error)
    }
}

impl PlanRunner {
    /// A runner with this process name.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        queue: Queue,
        name: &str,
        shutdown: ShutdownSignal,
    ) -> Self {
        // Unique, so that a process started with the name of another one does not give back its leases.
        let name = format!("{name}~{}", uuid::Uuid::now_v7().simple());
        Self { store, queue, name, held: HashMap::new(), shutdown }
    }

    /// Runs plans until shutdown, then gives back their leases.
    pub(crate) async fn run(mut self) {
        let mut is_failing = false;
        let mut look_at = Instant::now();
        while !self.shutdown.is_triggered() {
            let mut failed = None;
            if Instant::now() >= look_at {
                look_at = Instant::now() + LOOK_EVERY;
                failed = self.look().await.err();
            }
            if failed.is_none() {
                failed = self.run_all().await.err();
            }
            match failed {
                Some(error) if !is_failing => {
                    warn!(%error, "database unavailable; replay plans wait");
                    is_failing = true;
                }
                Some(_) => {}
                None if is_failing => {
                    info!("database available again; replay plans continue");
                    is_failing = false;
                }
                None => {}
            }
            let pause = if self.held.is_empty() || is_failing { LOOK_EVERY } else { TICK };
            tokio::select! {
                () = self.shutdown.wait() => {}
                () = sleep(pause) => {}
            }
        }
        if !self.held.is_empty()
            && let Err(error) = rows::release(self.store.as_ref(), &self.name, None).await
        {
            warn!(%error, "leases of replay plans not given back; they expire");
        }
    }

    async fn look(&mut self) -> Result<(), IssueError> {
        let began = Instant::now();
        for (id, epoch) in rows::acquire(self.store.as_ref(), &self.name).await? {
            info!(plan = id, epoch, "replay plan taken");
            self.held.insert(id, HeldPlan::new(epoch, began));
        }
        Ok(())
    }

    /// One turn of every plan. Fails only if the database does.
    async fn run_all(&mut self) -> Result<(), IssueError> {
        let ids: Vec<i64> = self.held.keys().copied().collect();
        for id in ids {
            let Some(mut held) = self.held.remove(&id) else { continue };
            match self.turn(id, &mut held).await {
                Ok(true) => {
                    self.held.insert(id, held);
                }
                Ok(false) => info!(plan = id, "replay plan is over"),
                Err(TurnError::Lost) => info!(plan = id, "replay plan taken over"),
                Err(TurnError::Store(error)) => {
                    held.needs_recovery = true;
                    self.held.insert(id, held);
                    return Err(error);
                }
                Err(TurnError::Queue(error)) => {
                    let problem = ApiError::from(error).message().to_owned();
                    self.keep_waiting(id, held, &problem).await?;
                }
                Err(TurnError::Late) => {
                    let problem = format!("the streams did not answer within {STREAMS_TIME_MAX:?}");
                    self.keep_waiting(id, held, &problem).await?;
                }
            }
        }
        Ok(())
    }

    /// Stores why a plan waits.
    async fn keep_waiting(
        &mut self,
        id: i64,
        mut held: HeldPlan,
        problem: &str,
    ) -> Result<(), IssueError> {
        held.needs_recovery = true;
        held.observe_at = Instant::now() + LOOK_EVERY;
        held.send_at = held.observe_at;
        let problem = crate::text::cut(problem, PROBLEM_BYTES_MAX);
        let plan = rows::plan(self.store.as_ref(), id).await?;
        let Some(plan) = plan.filter(|plan| plan.epoch == held.epoch) else { return Ok(()) };
        if plan.problem.as_deref() != Some(problem) {
            warn!(plan = id, problem, "replay plan waits");
        }
        let update = PlanUpdate { problem: Some(problem), ..PlanUpdate::default() };
        let began = Instant::now();
        if rows::save(self.store.as_ref(), (id, held.epoch), &plan.progress, update).await? {
            held.renewed = began;
            self.held.insert(id, held);
        }
        Ok(())
    }

    /// One turn of a plan: recover, observe, send. Returns whether it goes on.
    async fn turn(&self, id: i64, held: &mut HeldPlan) -> Result<bool, TurnError> {
        let Some(mut plan) = rows::plan(self.store.as_ref(), id).await? else { return Ok(false) };
        if plan.epoch != held.epoch {
            return Err(TurnError::Lost);
        }
        if plan.resumes > plan.progress.resumes {
            plan.progress.on(PlanEvent::Resumed(plan.resumes));
        }
        let now = Instant::now();
        // While it waits for the streams, it asks them again only now and then.
        if plan.problem.is_some() && now < held.observe_at && held.needs_recovery {
            return Ok(true);
        }
        let has_ended = !matches!(plan.state, PlanState::Running | PlanState::Paused);
        // Streams that do not answer keep no plan that has ended.
        let is_old = has_ended && plan.unchanged_for >= OBSERVED_AFTER_END;
        if !is_old {
            let can_send = held.has_unsent && plan.state == PlanState::Running;
            if held.needs_recovery || can_send {
                held.has_unsent = self.recover(&mut plan, held).await?;
                held.needs_recovery = false;
            }
            if now >= held.observe_at && plan.progress.awaited() > 0 {
                self.observe(&mut plan, held).await?;
                held.observe_at = Instant::now() + OBSERVE_EVERY;
            }
        }
        match plan.state {
            PlanState::Running => self.act(&mut plan, held).await?,
            _ => {
                if has_ended && (plan.progress.awaited() == 0 || is_old) {
                    let update = PlanUpdate { is_over: true, ..PlanUpdate::default() };
                    self.save(&plan, held, update).await?;
                    // If it was resumed just now, it is active, and is taken again.
                    rows::release(self.store.as_ref(), &self.name, Some(id)).await?;
                    return Ok(false);
                }
            }
        }
        // The problem is over only now: a recovery without letters asks no stream.
        if plan.problem.is_some() || held.renewed.elapsed() >= RENEW_EVERY {
            self.save(&plan, held, PlanUpdate::default()).await?;
        }
        Ok(true)
    }

    /// Finds out which recorded letters were sent, and sends the others if the plan runs. Returns whether some are not sent.
    async fn recover(&self, plan: &mut ReplayPlan, held: &mut HeldPlan) -> Result<bool, TurnError> {
        let letters = rows::letters(self.store.as_ref(), plan.id).await?;
        let unsent: Vec<PlanLetter> =
            letters.into_iter().filter(|letter| letter.entry.is_none()).collect();
        // Before anything is sent: what was sent by a predecessor must be known before outcomes are read.
        let rest = self.store_entries(plan, held, unsent, SendMode::Look).await?;
        if plan.state != PlanState::Running {
            return Ok(!rest.is_empty());
        }
        self.store_entries(plan, held, rest, SendMode::Send).await?;
        Ok(false)
    }

    /// Sends recorded letters, or only looks where they are, and stores their entries. Returns those that are not sent.
    async fn store_entries(
        &self,
        plan: &mut ReplayPlan,
        held: &mut HeldPlan,
        letters: Vec<PlanLetter>,
        mode: SendMode,
    ) -> Result<Vec<PlanLetter>, TurnError> {
        let mut rest = Vec::new();
        for of_topic in letters.chunk_by(|one, other| one.topic == other.topic) {
            if held.renewed.elapsed() >= LEASE_TTL - LEASE_MARGIN - STREAMS_TIME_MAX {
                self.save(plan, held, PlanUpdate::default()).await?;
            }
            let orders: Vec<ReplayOrder> = of_topic.iter().map(|one| one.order.clone()).collect();
            let entries = in_time(async {
                match (self.queue.dead_letters(&of_topic[0].topic).await, mode) {
                    // The topic was deleted.
                    (Err(QueueError::NoTopic { .. }), _) => Ok(vec![None; orders.len()]),
                    (Err(error), _) => Err(error),
                    (Ok(letters), SendMode::Look) => letters.replayed_entries(&orders).await,
                    (Ok(letters), SendMode::Send) => letters.send_again(&orders).await,
                }
            });
            let (mut sent, mut gone) = (Vec::new(), Vec::new());
            for (letter, entry) in of_topic.iter().zip(entries.await?) {
                match (entry, mode) {
                    (Some(_), _) => sent.push(PlanLetter { entry, ..letter.clone() }),
                    (None, SendMode::Look) => rest.push(letter.clone()),
                    (None, SendMode::Send) => gone.push(letter.clone()),
                }
            }
            if sent.is_empty() && gone.is_empty() {
                continue;
            }
            plan.progress.on(PlanEvent::Sent(sent.len() as u64));
            for letter in &gone {
                plan.progress.on(PlanEvent::Gone { step: letter.step });
            }
            let update = PlanUpdate { sent: &sent, removed: &gone, ..PlanUpdate::default() };
            self.save(plan, held, update).await?;
        }
        Ok(rest)
    }

    /// Counts the outcomes that are known now.
    async fn observe(&self, plan: &mut ReplayPlan, held: &mut HeldPlan) -> Result<(), TurnError> {
        let mut letters = rows::letters(self.store.as_ref(), plan.id).await?;
        letters.sort_by(|one, other| one.topic.cmp(&other.topic));
        let mut ended = Vec::new();
        for of_topic in letters.chunk_by(|one, other| one.topic == other.topic) {
            let topic = &of_topic[0].topic;
            let after = plan.selection.topics.iter().find(|one| one.topic == *topic);
            let after = after.map_or(EntryId::MIN, |topic| topic.last());
            let seen = held.outcomes.entry(topic.clone());
            let seen = seen.or_insert_with(|| ReplayOutcomes::new(after));
            let open: Vec<_> = of_topic.iter().map(PlanLetter::replayed).collect();
            let found = in_time(async {
                match self.queue.dead_letters(topic).await {
                    // The topic was deleted.
                    Err(QueueError::NoTopic { .. }) => Ok(None),
                    Err(error) => Err(error),
                    Ok(letters) => letters.outcomes(seen, &open).await.map(Some),
                }
            });
            let found: Option<HashMap<_, _>> =
                found.await?.map(|found| found.into_iter().collect());
            for letter in of_topic.iter().filter(|letter| letter.entry.is_some()) {
                let outcome = match &found {
                    None => LetterOutcome::Unknown,
                    Some(found) => match found.get(&letter.order.letter) {
                        None => continue,
                        Some(ReplayedLetterOutcome::Settled) => LetterOutcome::Settled,
                        Some(ReplayedLetterOutcome::FailedAgain { reason, .. }) => {
                            LetterOutcome::Failed {
                                same_cause: letter.cause == letter_cause(topic, reason),
                            }
                        }
                    },
                };
                plan.progress.on(PlanEvent::Outcome { step: letter.step, outcome });
                ended.push(letter.clone());
            }
        }
        if !ended.is_empty() {
            let update = PlanUpdate { removed: &ended, ..PlanUpdate::default() };
            self.save(plan, held, update).await?;
        }
        Ok(())
    }

    /// Does what is next.
    async fn act(&self, plan: &mut ReplayPlan, held: &mut HeldPlan) -> Result<(), TurnError> {
        match plan.progress.next() {
            PlanAction::Wait => {}
            PlanAction::Send { at_most, per_second } => {
                if Instant::now() >= held.send_at {
                    let batch = (per_second / 5).max(1).min(at_most.try_into().unwrap_or(u32::MAX));
                    self.send(plan, held, batch, per_second).await?;
                }
            }
            PlanAction::Stop(reason) => {
                warn!(plan = plan.id, reason, "replay plan stopped");
                let ended = Some((PlanState::Stopped, Some(reason.as_str())));
                self.save(plan, held, PlanUpdate { ended, ..PlanUpdate::default() }).await?;
            }
            PlanAction::Finish => {
                let progress = &plan.progress;
                let (settled, failed) = (progress.settled, progress.failed);
                info!(plan = plan.id, settled, failed, "replay plan done");
                let ended = Some((PlanState::Done, None));
                self.save(plan, held, PlanUpdate { ended, ..PlanUpdate::default() }).await?;
            }
        }
        Ok(())
    }

    /// Records the next letters, then sends them.
    async fn send(
        &self,
        plan: &mut ReplayPlan,
        held: &mut HeldPlan,
        batch: u32,
        per_second: u32,
    ) -> Result<(), TurnError> {
        let Some(topic) = plan.selection.topics.get(plan.progress.topic).cloned() else {
            plan.progress.on(PlanEvent::EndReached);
            return self.save(plan, held, PlanUpdate::default()).await;
        };
        let after = plan.progress.after.as_ref().and_then(|id| id.parse().ok());
        let range = (after.unwrap_or(EntryId::MIN), topic.last());
        let (selection, step) = (&plan.selection, plan.progress.step);
        let filter = selection.filter();
        let page = in_time(async {
            match self.queue.dead_letters(&topic.topic).await {
                // The topic was deleted: none of its letters is left.
                Err(QueueError::NoTopic { .. }) => Ok(None),
                Err(error) => Err(error),
                Ok(letters) => {
                    let limit = batch as usize;
                    let page = letters.candidates(&filter, range, limit, selection.max_replays);
                    page.await.map(Some)
                }
            }
        });
        let page = page.await?;
        let (mut added, mut left_out, mut skipped) = (Vec::new(), Vec::new(), 0);
        let (last, has_ended) =
            page.as_ref().map_or((None, true), |page| (page.last, page.has_ended));
        let items = page.into_iter().flat_map(|page| page.items);
        for candidate in items.filter(|candidate| selection.has_cause(&candidate.letter)) {
            let letter = candidate.letter;
            match candidate.readiness {
                ReplayReadiness::Ready(partition) => added.push(PlanLetter {
                    topic: topic.topic.clone(),
                    cause: letter_cause(&topic.topic, &letter.reason),
                    order: ReplayOrder {
                        letter: letter.id,
                        partition,
                        identity: letter.identity(),
                    },
                    group: letter.group,
                    step,
                    entry: None,
                }),
                ReplayReadiness::Replayed => left_out.push(letter.id),
                ReplayReadiness::Refused(_) => skipped += 1,
            }
        }
        let counted = skipped + left_out.len() as u64;
        plan.progress.on(PlanEvent::Skipped(counted));
        if has_ended {
            (plan.progress.topic, plan.progress.after) = (plan.progress.topic + 1, None);
        } else if let Some(last) = last {
            plan.progress.after = Some(last.to_string());
        }
        plan.progress.on(PlanEvent::Taken(added.len() as u64));
        let count = added.len();
        self.save(plan, held, PlanUpdate { added: &added, ..PlanUpdate::default() }).await?;
        self.store_entries(plan, held, added, SendMode::Send).await?;
        if !left_out.is_empty() {
            in_time(async {
                self.queue.dead_letters(&topic.topic).await?.delete_replayed(&left_out).await
            })
            .await?;
        }
        let spent = Duration::from_secs_f64(count as f64 / f64::from(per_second));
        held.send_at = held.send_at.max(Instant::now() - TICK) + spent;
        Ok(())
    }

    async fn save(
        &self,
        plan: &ReplayPlan,
        held: &mut HeldPlan,
        update: PlanUpdate<'_>,
    ) -> Result<(), TurnError> {
        let began = Instant::now();
        if !rows::save(self.store.as_ref(), (plan.id, held.epoch), &plan.progress, update).await? {
            return Err(TurnError::Lost);
        }
        held.renewed = began;
        Ok(())
    }
}

/// Whether recorded letters are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendMode {
    /// Only those that were sent are found.
    Look,
    Send,
}

impl HeldPlan {
    fn new(epoch: i64, renewed: Instant) -> Self {
        let now = Instant::now();
        Self {
            epoch,
            renewed,
            needs_recovery: true,
            has_unsent: false,
            outcomes: HashMap::new(),
            observe_at: now,
            send_at: now,
        }
    }
}

/// A digest of the cause of a letter.
fn letter_cause(topic: &str, reason: &str) -> String {
    cause_id("dead_letter", topic, &cause_of(reason))
}

async fn in_time<T>(work: impl Future<Output = Result<T, QueueError>>) -> Result<T, TurnError> {
    timeout(STREAMS_TIME_MAX, work).await.map_err(|_| TurnError::Late)?.map_err(TurnError::Queue)
}
