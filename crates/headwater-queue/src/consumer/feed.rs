//! The feed: one blocking read for all partitions that one consumer reads for one group.
//!
//! Upstream: the backend. Downstream: each `worker` gets what was read for it.
//! Promises: a partition without room is left out of the next read and the others go on; when `remove` has returned, no
//! read can deliver from that partition any more; one broken stream does not end the reading of the others.
//! All subscriptions of a process that agree on group, consumer, batch and poll share it: a thousand topics are one read.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::{TryStreamExt, stream};
use headwater_stream::limits::READ_STREAMS_MAX;
use headwater_stream::{
    Backend, Batch, ConsumerName, Delivery, GroupName, GroupReader, Silenced, StreamError,
    StreamName,
};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::worker::{Room, Worker};

/// How long a read waits when partitions take turns.
const TURN: Duration = Duration::from_millis(20);
/// How long a stream that cannot be read is left alone.
const BROKEN_FOR: Duration = Duration::from_secs(2);
/// How long after its failure a read may still be answered at the server, beyond the time it was to wait there.
const DOUBT_FOR: Duration = Duration::from_secs(30);
/// Streams that are silenced at the same time.
const SILENCED_AT_ONCE: usize = 16;
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
    streams: Vec<StreamName>,
    count: usize,
    wait: Duration,
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
        let shared = Arc::new(Shared {
            backend,
            key,
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
                if (is_dangling || plan.has_leaving)
                    && let Some(reader) = reader.take()
                    && !self.close(reader).await
                {
                    doubt = Some(self.doubtful_until());
                }
                is_dangling = false;
                if self.confirm_ended(&plan, &mut doubt).await {
                    self.wait_for_change().await;
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
                    self.deliver(batches);
                    self.confirm_ended(&plan, &mut doubt).await;
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
    async fn wait_for_change(&self) {
        let next = self.lock().all.values().filter_map(|route| route.broken_until).min();
        let until = next.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
        tokio::select! {
            () = self.changed.notified() => {}
            () = tokio::time::sleep_until(until) => {}
        }
    }

    /// What to read next: wide partitions together, with a count that fits the narrowest of them.
    fn plan(&self) -> Plan {
        let now = Instant::now();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let routes = self.lock();
        let removals = routes.removals;
        let has_leaving = routes.all.values().any(|route| route.leaves.is_some());
        let (mut wide, mut tight) = (Choice::default(), Choice::default());
        let mut soonest: Option<Instant> = None;
        for (stream, route) in &routes.all {
            if route.leaves.is_some() {
                continue;
            }
            if let Some(until) = route.broken_until.filter(|until| *until > now) {
                soonest = Some(soonest.map_or(until, |soonest| soonest.min(until)));
                continue;
            }
            match route.worker.room() {
                Room::None => {}
                Room::Tight(room) => tight.add(stream, &route.worker, room),
                Room::Wide(room) => wide.add(stream, &route.worker, room),
            }
        }
        let mut wait = self.key.poll;
        if let Some(soonest) = soonest {
            wait = wait.min(soonest - now);
        }
        let mut choice = wide;
        if choice.streams.is_empty() {
            choice = tight;
        } else if !tight.streams.is_empty() {
            // Both get their turn: a small count for all would slow the wide ones down.
            wait = wait.min(TURN);
            if turn.is_multiple_of(2) {
                choice = tight;
                wait = Duration::ZERO;
            }
        }
        if choice.bound_by_total(turn) {
            wait = wait.min(TURN);
        }
        if has_leaving {
            // Without waiting, so that what is asked of the server no longer includes those that leave.
            wait = Duration::ZERO;
        }
        let chosen = choice.streams.into_iter().take(READ_STREAMS_MAX);
        let streams = chosen.map(|(stream, worker)| {
            worker.is_listed();
            stream
        });
        let streams = streams.collect();
        let count = choice.room.clamp(1, self.key.batch);
        Plan { streams, count, wait, removals, has_leaving }
    }

    fn deliver(&self, batches: Vec<Batch<Delivery>>) {
        let routes = self.lock();
        let found: Vec<_> = batches
            .into_iter()
            .filter_map(|batch| {
                let route = routes.all.get(&batch.stream);
                if route.is_none() {
                    debug!(stream = %batch.stream, entries = batch.entries.len(), "read for a former owner");
                }
                Some((Arc::clone(&route?.worker), batch.entries))
            })
            .collect();
        drop(routes);
        for (worker, entries) in found {
            worker.receive(entries);
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
                self.deliver(batches);
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

/// Streams for one read.
#[derive(Default)]
struct Choice {
    streams: Vec<(StreamName, Arc<Worker>)>,
    /// What the narrowest of them has room for.
    room: usize,
}

impl Choice {
    fn add(&mut self, stream: &StreamName, worker: &Arc<Worker>, room: usize) {
        self.room = if self.streams.is_empty() { room } else { self.room.min(room) };
        self.streams.push((stream.clone(), Arc::clone(worker)));
    }

    /// Where the partitions of a subscription together could take more than it may have in hand, they share what is
    /// left, or take turns. Returns whether some were left out.
    fn bound_by_total(&mut self, turn: u64) -> bool {
        let is_bound = |worker: &Worker| worker.job.is_bound.load(Ordering::Relaxed);
        let mut jobs: HashMap<usize, Left> = HashMap::new();
        for (_, worker) in self.streams.iter().filter(|(_, worker)| is_bound(worker)) {
            let job = &worker.job;
            let left = jobs.entry(Arc::as_ptr(job) as usize).or_insert_with(|| {
                let in_hand = job.in_hand.load(Ordering::Relaxed);
                Left { room: job.config.in_flight_max.saturating_sub(in_hand), streams: 0 }
            });
            left.streams += 1;
        }
        if jobs.is_empty() {
            return false;
        }
        let fits = jobs.values().filter(|left| left.room >= left.streams);
        let narrowest = fits.map(|left| left.room / left.streams).min();
        let before = self.streams.len();
        if jobs.values().any(|left| left.room < left.streams) {
            self.room = 1;
            self.streams.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
            let shift = usize::try_from(turn).unwrap_or(0) % before;
            self.streams.rotate_left(shift);
            self.streams.retain(|(_, worker)| {
                match jobs.get_mut(&(Arc::as_ptr(&worker.job) as usize)) {
                    Some(left) => left.take(),
                    None => true,
                }
            });
        }
        self.room = self.room.min(narrowest.unwrap_or(1));
        self.streams.len() < before
    }
}

/// What a subscription may still take in hand, and how many of its streams want it.
struct Left {
    room: usize,
    streams: usize,
}

impl Left {
    fn take(&mut self) -> bool {
        let fits = self.room > 0;
        self.room = self.room.saturating_sub(1);
        fits
    }
}
