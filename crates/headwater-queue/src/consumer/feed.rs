//! The feed: one blocking read for all partitions that one consumer reads for one group.
//!
//! Upstream: the backend. Downstream: each `worker` gets what was read for it.
//! Promises: a partition without room is left out of the next read and the others go on; when `remove` has returned, no
//! read can deliver from that partition any more; one broken stream does not end the reading of the others.
//! All subscriptions of a process that agree on group, consumer, batch and poll share it: a thousand topics are one read.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::{TryStreamExt, stream};
use headwater_stream::limits::READ_STREAMS_MAX;
use headwater_stream::{
    Backend, Batch, ConsumerName, Delivery, GroupName, GroupReader, Settle, Settlement, Silenced,
    StreamError, StreamName, Then,
};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::plan::{Candidates, next_depth};
use super::runner::let_others_run;
use super::worker::Worker;

/// How long the others go unread while some are read deep.
const OTHERS_EVERY: Duration = Duration::from_millis(5);
/// How long a stream that cannot be read is left alone.
const BROKEN_FOR: Duration = Duration::from_secs(2);
/// How long after its failure a read may still be answered at the server, beyond the time it was to wait there.
const DOUBT_FOR: Duration = Duration::from_secs(30);
/// Streams that are silenced at the same time.
const SILENCED_AT_ONCE: usize = 16;
/// After so few entries, handlers come before the next read.
const FEW: usize = 8;
const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// What feeds must agree on to be one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct FeedKey {
    pub(super) group: GroupName,
    pub(super) consumer: ConsumerName,
    pub(super) batch: usize,
    pub(super) poll: Duration,
}

/// A shared read. It ends when the last one who uses it is gone.
pub(super) struct Feed {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    backend: Arc<dyn Backend>,
    key: FeedKey,
    routes: Mutex<Routes>,
    changed: Notify,
    /// Removals up to this number are in effect.
    confirmed: watch::Sender<u64>,
    turn: AtomicU64,
    /// What a deep read asks of each partition.
    depth: AtomicUsize,
    /// When those were read last that are not read deep.
    others_at: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct Routes {
    all: HashMap<StreamName, Route>,
    removals: u64,
}

struct Route {
    worker: Arc<Worker>,
    /// The number of the removal that ends it.
    leaves: Option<u64>,
    broken_until: Option<Instant>,
}

/// What to read next.
struct Plan {
    turn: u64,
    streams: Vec<StreamName>,
    count: usize,
    wait: Duration,
    is_deep: bool,
    /// Whether some wait for room for a deep read.
    is_waiting: bool,
    /// Removals that are in effect once this read has returned.
    removals: u64,
    has_leaving: bool,
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Feed {
    pub(super) fn start(backend: Arc<dyn Backend>, key: FeedKey) -> Self {
        let depth = AtomicUsize::new(key.batch);
        let shared = Arc::new(Shared {
            backend,
            key,
            depth,
            others_at: Mutex::default(),
            routes: Mutex::default(),
            changed: Notify::new(),
            confirmed: watch::Sender::new(0),
            turn: AtomicU64::new(0),
        });
        let task = tokio::spawn(Arc::clone(&shared).run());
        Self { shared, task }
    }

    /// Whether it takes one more partition. Each partition holds the feed once.
    pub(super) fn has_place(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) <= READ_STREAMS_MAX
    }

    /// Reads this partition, too.
    pub(super) fn add(&self, worker: &Arc<Worker>) {
        let stream = worker.rules.stream.clone();
        let route = Route { worker: Arc::clone(worker), leaves: None, broken_until: None };
        self.shared.lock().all.insert(stream, route);
        self.look_again();
    }

    /// There is something to read that was left out before.
    pub(super) fn look_again(&self) {
        self.shared.changed.notify_one();
    }

    /// Reads this partition no more. When it returns, no read can deliver from it; what was on its way was delivered.
    pub(super) async fn remove(&self, worker: &Arc<Worker>) {
        let mut confirmed = self.shared.confirmed.subscribe();
        let number = {
            let mut routes = self.shared.lock();
            let number = routes.removals + 1;
            let Some(route) = routes.of(worker) else { return };
            let number = *route.leaves.get_or_insert(number);
            routes.removals = routes.removals.max(number);
            number
        };
        self.look_again();
        // Fails when the feed has ended: then nothing reads.
        let _ = confirmed.wait_for(|done| *done >= number).await;
    }

    /// Forgets a partition at once: what a read may still deliver from it is for whoever owns it now.
    pub(super) fn forget(&self, worker: &Worker) {
        let mut routes = self.shared.lock();
        if routes.of(worker).is_some() {
            routes.all.remove(&worker.rules.stream);
        }
        drop(routes);
        self.look_again();
    }
}

impl Routes {
    /// The route of a worker, unless another one has its place.
    fn of(&mut self, worker: &Worker) -> Option<&mut Route> {
        let route = self.all.get_mut(&worker.rules.stream)?;
        std::ptr::eq(Arc::as_ptr(&route.worker), worker).then_some(route)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Routes> {
        self.routes.lock().expect("no code panics while it holds the routes")
    }

    async fn run(self: Arc<Self>) {
        let mut reader: Option<Box<dyn GroupReader>> = None;
        // Whether a dropped read may still deliver.
        let mut is_dangling = false;
        // Until when a read that failed may still be under way at the server.
        let mut doubt: Option<Instant> = None;
        let mut pause = PAUSE_FIRST;
        loop {
            let plan = self.plan();
            if plan.streams.is_empty() {
                // One that waits comes back to the reader in a moment.
                if ((is_dangling && !plan.is_waiting) || plan.has_leaving)
                    && let Some(reader) = reader.take()
                    && !self.close(reader).await
                {
                    doubt = Some(self.doubtful_until());
                }
                is_dangling &= reader.is_some();
                if self.confirm_ended(&plan, &mut doubt).await {
                    self.wait_for_change(plan.is_waiting).await;
                }
                continue;
            }
            let open = match reader.take() {
                Some(open) => Ok(open),
                None => self.backend.reader(&self.key.group, &self.key.consumer).await,
            };
            let answer = match open {
                Err(error) => Some(Err(error)),
                Ok(open) => self.read(reader.insert(open).as_mut(), &plan).await,
            };
            match answer {
                // Something changed while the read waited.
                None => is_dangling = true,
                Some(Ok(batches)) => {
                    is_dangling = false;
                    pause = PAUSE_FIRST;
                    let entries: usize = batches.iter().map(|batch| batch.entries.len()).sum();
                    let is_empty = entries == 0;
                    self.note_pace(&plan, &batches);
                    self.deliver(batches).await;
                    if (1..=FEW).contains(&entries) {
                        // Their handlers are on this thread, where nobody else can fetch them, and to put the next
                        // read together and send it takes longer than they may take.
                        let_others_run().await;
                    }
                    if self.confirm_ended(&plan, &mut doubt).await && is_empty && plan.is_waiting {
                        self.wait_for_change(true).await;
                    }
                }
                Some(Err(error)) => {
                    is_dangling = false;
                    // What it had fetched and nobody saw is looked for by the workers.
                    self.failed(&error);
                    let is_broken_stream = matches!(error, StreamError::WrongType { .. });
                    if !is_broken_stream {
                        doubt = Some(self.doubtful_until());
                    }
                    self.confirm_ended(&plan, &mut doubt).await;
                    if !is_broken_stream {
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(PAUSE_MAX);
                    }
                }
            }
        }
    }

    /// Reads; `None` if the plan changed before anything came.
    async fn read(
        &self,
        reader: &mut dyn GroupReader,
        plan: &Plan,
    ) -> Option<headwater_stream::Result<Vec<Batch<Delivery>>>> {
        let read = reader.read(&plan.streams, plan.count, plan.wait);
        if plan.wait.is_zero() {
            return Some(read.await);
        }
        tokio::select! {
            biased;
            answer = read => Some(answer),
            () = self.changed.notified() => None,
        }
    }

    /// Waits until there may be something to do: a change, or the end of a time-out.
    async fn wait_for_change(&self, is_waiting: bool) {
        let next = self.lock().all.values().filter_map(|route| route.broken_until).min();
        let longest = if is_waiting { OTHERS_EVERY } else { Duration::from_secs(3600) };
        let latest = Instant::now() + longest;
        let until = next.map_or(latest, |next| next.min(latest));
        tokio::select! {
            () = self.changed.notified() => {}
            () = tokio::time::sleep_until(until) => {}
        }
    }

    /// What to read next.
    fn plan(&self) -> Plan {
        let now = Instant::now();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let routes = self.lock();
        let removals = routes.removals;
        let has_leaving = routes.all.values().any(|route| route.leaves.is_some());
        let mut candidates = Candidates::default();
        let mut soonest: Option<Instant> = None;
        for route in routes.all.values() {
            if route.leaves.is_some() {
                continue;
            }
            if let Some(until) = route.broken_until.filter(|until| *until > now) {
                soonest = Some(soonest.map_or(until, |soonest| soonest.min(until)));
                continue;
            }
            candidates.add(&route.worker, now);
        }
        drop(routes);
        let mut others_at = self.others_at.lock().expect("no code panics while it holds it");
        let others_due = others_at.is_none_or(|at| now.duration_since(at) >= OTHERS_EVERY);
        let depth = self.depth.load(Ordering::Relaxed);
        let chosen = candidates.choose(turn, depth, others_due, now);
        if !chosen.is_deep {
            *others_at = Some(now);
        }
        drop(others_at);
        let mut wait = self.key.poll.min(chosen.wait_max.unwrap_or(self.key.poll));
        if let Some(soonest) = soonest {
            wait = wait.min(soonest - now);
        }
        if has_leaving {
            // Without waiting, so that what is asked of the server no longer includes those that leave.
            wait = Duration::ZERO;
        }
        let count = chosen.count.clamp(1, self.key.batch);
        Plan {
            turn,
            streams: chosen.streams,
            count,
            wait,
            is_deep: chosen.is_deep,
            is_waiting: chosen.is_waiting,
            removals,
            has_leaving,
        }
    }

    /// Notes where there may be more.
    fn note_pace(&self, plan: &Plan, batches: &[Batch<Delivery>]) {
        let routes = self.lock();
        if plan.is_deep {
            let asked = plan.streams.iter().filter_map(|stream| routes.all.get(stream));
            asked.for_each(|route| route.worker.pace.was_read(plan.turn, false));
            let entries = batches.iter().map(|batch| batch.entries.len()).sum();
            let depth = next_depth(plan.streams.len(), entries, self.key.batch);
            self.depth.store(depth, Ordering::Relaxed);
        }
        for batch in batches {
            if let Some(route) = routes.all.get(&batch.stream) {
                route.worker.pace.was_read(plan.turn, batch.entries.len() >= plan.count);
            }
        }
    }

    async fn deliver(&self, batches: Vec<Batch<Delivery>>) {
        for stray in self.hand_out(batches) {
            self.give_back(stray).await;
        }
    }

    /// Gives everybody what was read for them. Returns what was read for nobody.
    fn hand_out(&self, batches: Vec<Batch<Delivery>>) -> Vec<Batch<Delivery>> {
        let mut strays = Vec::new();
        let routes = self.lock();
        let found: Vec<_> = batches
            .into_iter()
            .filter_map(|batch| match routes.all.get(&batch.stream) {
                Some(route) => Some((Arc::clone(&route.worker), batch.entries)),
                None => {
                    strays.push(batch);
                    None
                }
            })
            .collect();
        drop(routes);
        for (worker, entries) in found {
            worker.receive(entries);
        }
        strays
    }

    /// Read for somebody who works on the partition no more: others shall have it at once.
    async fn give_back(&self, Batch { stream, entries }: Batch<Delivery>) {
        debug!(%stream, entries = entries.len(), "read for a former owner");
        let release = |entry: &Delivery| Settlement { id: entry.id, then: Then::Release };
        let entries: Vec<Settlement> = entries.iter().map(release).collect();
        let FeedKey { group, consumer, .. } = &self.key;
        let settle = Settle { stream: &stream, group, consumer, fence: None, entries: &entries };
        if let Err(error) = self.backend.settle(settle).await {
            debug!(%stream, %error, "what was read for a former owner stays pending");
        }
    }

    /// A read failed. The stream that is to blame is left alone for a while; else everybody looks for what was lost.
    fn failed(&self, error: &StreamError) {
        let mut routes = self.lock();
        if let StreamError::WrongType { name } = error {
            for (stream, route) in &mut routes.all {
                if stream.as_str() == name {
                    route.broken_until = Some(Instant::now() + BROKEN_FOR);
                    route.worker.meters.anomaly("wrong_type", 1);
                }
            }
            warn!(%error, "a partition cannot be read");
            return;
        }
        warn!(group = %self.key.group, consumer = %self.key.consumer, %error, "a read failed, trying again");
        // Also those that this read did not ask for: what an earlier one had fetched for them was to come with it.
        let workers: Vec<_> = routes.all.values().map(|route| Arc::clone(&route.worker)).collect();
        drop(routes);
        for worker in workers {
            worker.look_for_unseen();
        }
    }

    /// Returns whether it is certain that the reader delivers nothing any more.
    async fn close(&self, reader: Box<dyn GroupReader>) -> bool {
        match reader.close().await {
            Ok(batches) => {
                self.deliver(batches).await;
                true
            }
            Err(error) => {
                debug!(%error, "a reader was not closed in good order");
                self.failed(&error);
                false
            }
        }
    }

    fn doubtful_until(&self) -> Instant {
        Instant::now() + self.key.poll + DOUBT_FOR
    }

    /// Confirms the removals of a plan, unless a read of one of them may still be under way: that is ended first.
    /// Returns whether they are confirmed; if not, after a pause.
    async fn confirm_ended(&self, plan: &Plan, doubt: &mut Option<Instant>) -> bool {
        if plan.has_leaving && doubt.is_some_and(|until| Instant::now() < until) {
            if let Err(error) = self.silence_leaving(plan.removals).await {
                warn!(group = %self.key.group, consumer = %self.key.consumer, %error,
                    "a read that failed may still be under way, partitions are given up later");
                tokio::time::sleep(PAUSE_FIRST).await;
                return false;
            }
            *doubt = None;
        }
        self.confirm(plan.removals);
        true
    }

    /// Ends the reads of partitions that leave, wherever they are.
    async fn silence_leaving(&self, removals: u64) -> headwater_stream::Result<()> {
        let leaving: Vec<StreamName> = {
            let routes = self.lock();
            let all = routes.all.iter();
            let leaving = all.filter(|(_, route)| route.leaves.is_some_and(|n| n <= removals));
            leaving.map(|(stream, _)| stream.clone()).collect()
        };
        let FeedKey { group, consumer, .. } = &self.key;
        stream::iter(leaving.iter().map(Ok))
            .try_for_each_concurrent(SILENCED_AT_ONCE, async |stream| {
                match self.backend.silence(stream, group, consumer).await? {
                    Silenced::Yes { ended } => debug!(%stream, ended, "silenced our own reads"),
                    Silenced::No { reason } => warn!(%stream, reason,
                        "a read that failed cannot be ended: it may take messages from the next owner"),
                }
                Ok(())
            })
            .await
    }

    /// Removals up to this number are in effect.
    fn confirm(&self, removals: u64) {
        if *self.confirmed.borrow() >= removals {
            return;
        }
        let mut routes = self.lock();
        routes.all.retain(|_, route| route.leaves.is_none_or(|number| number > removals));
        drop(routes);
        self.confirmed.send_if_modified(|done| {
            let is_new = *done < removals;
            *done = removals.max(*done);
            is_new
        });
    }
}
