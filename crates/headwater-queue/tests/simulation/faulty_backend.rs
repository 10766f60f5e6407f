//! A backend as one simulated process reaches it: calls are refused, delayed, or have their effect and lose their reply.
//!
//! Downstream: the real backend. Writes are performed by the runtime of the server: a request that was sent takes effect although
//! the process has given up, is stopped or dead. Requests of a process are not reordered. The rules that any backend must
//! keep are checked where it performs a call (`fence_rules.rs`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use headwater_stream::clock::Timestamp;
use headwater_stream::*;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::fault_schedule::{CallClass, Fault};
use super::fence_rules::FenceRules;
use super::virtual_clock::VirtualClock;

/// A call without a reply for so long fails.
const CALL_DEADLINE: Duration = Duration::from_secs(1);

/// The network between one process and the server, with the faults that are active.
pub(crate) struct Network {
    server: Handle,
    backend: Arc<dyn Backend>,
    clock: VirtualClock,
    rules: Arc<FenceRules>,
    state: Mutex<NetworkState>,
}

#[derive(Default)]
struct NetworkState {
    /// Faults with the time they end.
    faults: Vec<(u64, Fault)>,
    /// When the newest request arrives at the server. A later one does not overtake it.
    last_arrival_ms: u64,
    /// Reads that the process is waiting for.
    reads: BTreeMap<u64, BlockingRead>,
    /// Number of reads so far.
    read_count: u64,
}

/// A read as the server knows it.
struct BlockingRead {
    group: GroupName,
    consumer: ConsumerName,
    streams: Vec<StreamName>,
    count: usize,
    wait: Duration,
    /// Passes the read on to the server. If it is dropped, the connection is broken.
    moved: oneshot::Sender<ReadAtServer>,
}

/// A read that goes on at the server while the process is paused.
struct ReadAtServer {
    reply: oneshot::Receiver<Result<Batches>>,
    cancel: CancellationToken,
}

type Batches = Vec<StreamBatch<DeliveredEntry>>;

/// How a call is treated that is not refused.
#[derive(Clone, Copy)]
struct Treatment {
    delay: Duration,
    is_reply_lost: bool,
}

impl Treatment {
    fn reply<T>(self, reply: Result<T>) -> Result<T> {
        if self.is_reply_lost { Err(unavailable("the reply was lost")) } else { reply }
    }
}

fn unavailable(problem: &str) -> StreamError {
    StreamError::Unavailable { problem: problem.to_owned(), source: None }
}

impl Network {
    pub(crate) fn new(
        server: Handle,
        backend: Arc<dyn Backend>,
        clock: VirtualClock,
        rules: Arc<FenceRules>,
    ) -> Arc<Self> {
        Arc::new(Self { server, backend, clock, rules, state: Mutex::default() })
    }

    /// A backend for a process that starts.
    pub(crate) fn connect(self: &Arc<Self>) -> Arc<dyn Backend> {
        Arc::new(FaultyBackend { network: Arc::clone(self) })
    }

    fn lock(&self) -> MutexGuard<'_, NetworkState> {
        self.state.lock().expect("no code panics while it holds the network")
    }

    /// Begins a fault of calls.
    pub(crate) fn begin(&self, fault: Fault, until_ms: u64) {
        self.lock().faults.push((until_ms, fault));
    }

    /// Breaks the connections of blocking reads: the server ends them, and the process learns of it when it runs.
    pub(crate) fn close_reads(&self) {
        self.lock().reads.clear();
    }

    /// The same, but the server does not notice: what a read delivers is pending for the consumer, which does not learn of it.
    pub(crate) fn orphan_reads(&self) {
        let reads = std::mem::take(&mut self.lock().reads);
        for read in reads.into_values() {
            drop(self.move_to_server(read));
        }
    }

    /// The process is paused: the server goes on with its blocking reads, and the process gets the replies when it continues.
    pub(crate) fn pause_reads(&self) {
        let reads = std::mem::take(&mut self.lock().reads);
        for read in reads.into_values() {
            let (moved, at_server) = self.move_to_server(read);
            // Fails if the process does not wait any more.
            let _ = moved.send(at_server);
        }
    }

    /// Performs a read by the runtime of the server.
    fn move_to_server(
        &self,
        BlockingRead { group, consumer, streams, count, wait, moved }: BlockingRead,
    ) -> (oneshot::Sender<ReadAtServer>, ReadAtServer) {
        let (backend, cancel) = (Arc::clone(&self.backend), CancellationToken::new());
        let (sender, reply) = oneshot::channel();
        let cancelled = cancel.clone();
        self.server.spawn(async move {
            let read = async {
                let mut reader = backend.reader(&group, &consumer).await?;
                reader.require_groups();
                reader.read(&streams, count, wait).await
            };
            let result = tokio::select! {
                biased;
                result = read => result,
                () = cancelled.cancelled() => Ok(Batches::new()),
            };
            // Fails if nobody waits for it any more.
            let _ = sender.send(result);
        });
        (moved, ReadAtServer { reply, cancel })
    }

    /// How to treat a call that is made now; fails if it is refused.
    fn treat(&self, class: CallClass, needs_space: bool) -> Result<Treatment> {
        let now_ms = self.clock.elapsed_ms();
        let mut state = self.lock();
        state.faults.retain(|(until_ms, _)| now_ms < *until_ms);
        let (mut arrival_ms, mut is_reply_lost) = (state.last_arrival_ms.max(now_ms), false);
        for (_, fault) in &state.faults {
            let is_hit = |only: &Option<CallClass>| only.is_none_or(|only| only == class);
            match fault {
                Fault::Refuse(only) if is_hit(only) => {
                    return Err(unavailable("the connection was refused"));
                }
                Fault::LoseReplies(only) if is_hit(only) => is_reply_lost = true,
                Fault::Delay(delay_ms) => arrival_ms = arrival_ms.max(now_ms + delay_ms),
                Fault::Full if needs_space => {
                    return Err(StreamError::Full { problem: "simulated".to_owned() });
                }
                _ => {}
            }
        }
        state.last_arrival_ms = arrival_ms;
        Ok(Treatment { delay: Duration::from_millis(arrival_ms - now_ms), is_reply_lost })
    }

    /// Sends a request. The server performs it, whatever becomes of the process.
    async fn send<T: Send + 'static>(
        &self,
        treatment: Treatment,
        perform: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let performing = self.server.spawn(async move {
            sleep(treatment.delay).await;
            perform.await
        });
        match timeout(CALL_DEADLINE, performing).await {
            Ok(Ok(reply)) => treatment.reply(reply),
            Ok(Err(error)) => panic!("the server failed: {error}"),
            Err(_) => Err(unavailable("no reply within the deadline")),
        }
    }
}

struct FaultyBackend {
    network: Arc<Network>,
}

impl FaultyBackend {
    async fn send_settle(&self, settle: SettleBatch<'_>) -> Result<SettleResult> {
        let is_follow_up = |entry: &Settlement| {
            matches!(entry.action, SettleAction::Append { .. } | SettleAction::Reschedule { .. })
        };
        let needs_space = settle.entries.iter().any(is_follow_up);
        let treatment = self.network.treat(CallClass::Settle, needs_space)?;
        let SettleBatch { stream, group, consumer, fence, entries } = settle;
        let (stream, group, consumer) = (stream.clone(), group.clone(), consumer.clone());
        let (fence, entries) = (fence.cloned(), entries.to_vec());
        let network = Arc::clone(&self.network);
        let perform = async move {
            let settle = SettleBatch {
                stream: &stream,
                group: &group,
                consumer: &consumer,
                fence: fence.as_ref(),
                entries: &entries,
            };
            let result = network.backend.settle(settle).await;
            network.rules.on_settle(settle, &result);
            result
        };
        self.network.send(treatment, perform).await
    }

    async fn send_reclaim(&self, reclaim: ReclaimRequest<'_>) -> Result<ReclaimResult> {
        let treatment = self.network.treat(CallClass::Settle, false)?;
        let ReclaimRequest { stream, group, consumer, fence, from, min_idle, after, count } =
            reclaim;
        let (stream, group, consumer) = (stream.clone(), group.clone(), consumer.clone());
        let fence = fence.cloned();
        let from = OwnedReclaimFrom::new(from);
        let network = Arc::clone(&self.network);
        let perform = async move {
            let reclaim = ReclaimRequest {
                stream: &stream,
                group: &group,
                consumer: &consumer,
                fence: fence.as_ref(),
                from: from.borrow(),
                min_idle,
                after,
                count,
            };
            let result = network.backend.reclaim(reclaim).await;
            network.rules.on_reclaim(reclaim, &result);
            result
        };
        self.network.send(treatment, perform).await
    }

    async fn send_acquire(
        &self,
        lease: &LeaseName,
        holder: &HolderName,
        ttl: Duration,
    ) -> Result<AcquireResult> {
        let treatment = self.network.treat(CallClass::Membership, false)?;
        let (lease, holder, network) = (lease.clone(), holder.clone(), Arc::clone(&self.network));
        let perform = async move {
            let result = network.backend.acquire(&lease, &holder, ttl).await;
            network.rules.on_acquire(&lease, &result);
            result
        };
        self.network.send(treatment, perform).await
    }

    async fn open_reader(
        &self,
        group: &GroupName,
        consumer: &ConsumerName,
    ) -> Result<Box<dyn GroupReader>> {
        self.network.treat(CallClass::Read, false)?;
        Ok(Box::new(FaultyReader {
            network: Arc::clone(&self.network),
            identity: (group.clone(), consumer.clone()),
            inner: None,
            at_server: None,
        }))
    }
}

/// [`ReclaimFrom`] for a request that outlives its caller.
enum OwnedReclaimFrom {
    Anyone,
    Others,
    Consumer(ConsumerName),
    Ids(Vec<EntryId>),
    Own(Vec<EntryId>),
}

impl OwnedReclaimFrom {
    fn new(from: ReclaimFrom<'_>) -> Self {
        match from {
            ReclaimFrom::Anyone => Self::Anyone,
            ReclaimFrom::Others => Self::Others,
            ReclaimFrom::Consumer(consumer) => Self::Consumer(consumer.clone()),
            ReclaimFrom::Ids(ids) => Self::Ids(ids.to_vec()),
            ReclaimFrom::Own(ids) => Self::Own(ids.to_vec()),
        }
    }

    fn borrow(&self) -> ReclaimFrom<'_> {
        match self {
            Self::Anyone => ReclaimFrom::Anyone,
            Self::Others => ReclaimFrom::Others,
            Self::Consumer(consumer) => ReclaimFrom::Consumer(consumer),
            Self::Ids(ids) => ReclaimFrom::Ids(ids),
            Self::Own(ids) => ReclaimFrom::Own(ids),
        }
    }
}

struct FaultyReader {
    network: Arc<Network>,
    identity: (GroupName, ConsumerName),
    inner: Option<Box<dyn GroupReader>>,
    /// A read that was passed on to the server. It stays if the caller drops its future.
    at_server: Option<ReadAtServer>,
}

/// A read that the process is waiting for; removed on drop.
struct ReadGuard<'a> {
    network: &'a Network,
    number: u64,
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        self.network.lock().reads.remove(&self.number);
    }
}

impl FaultyReader {
    async fn try_read(
        &mut self,
        streams: &[StreamName],
        count: usize,
        wait: Duration,
    ) -> Result<Batches> {
        let treatment = self.network.treat(CallClass::Read, false)?;
        let fetched = self.cancel_moved().await?;
        if !fetched.is_empty() {
            return treatment.reply(Ok(fetched));
        }
        let (group, consumer) = &self.identity;
        let inner = match &mut self.inner {
            Some(inner) => inner,
            empty => {
                let mut inner = self.network.backend.reader(group, consumer).await?;
                // As the fetcher wants it.
                inner.require_groups();
                empty.insert(inner)
            }
        };
        sleep(treatment.delay).await;
        let (moved, mut is_moved) = oneshot::channel();
        let read = BlockingRead {
            group: group.clone(),
            consumer: consumer.clone(),
            streams: streams.to_vec(),
            count,
            wait,
            moved,
        };
        let number = {
            let mut state = self.network.lock();
            state.read_count += 1;
            let number = state.read_count;
            state.reads.insert(number, read);
            number
        };
        let guard = ReadGuard { network: &self.network, number };
        tokio::select! {
            biased;
            at_server = &mut is_moved => {
                let at_server = at_server.map_err(|_| unavailable("the connection broke"))?;
                self.at_server = Some(at_server);
            }
            result = inner.read(streams, count, wait) => return treatment.reply(result),
        }
        drop(guard);
        treatment.reply(self.take_moved().await)
    }

    /// The result of a read that was passed on to the server. Cancel-safe.
    async fn take_moved(&mut self) -> Result<Batches> {
        let Some(at_server) = &mut self.at_server else { return Ok(Batches::new()) };
        let reply = (&mut at_server.reply).await;
        self.at_server = None;
        reply.unwrap_or_else(|_| Err(unavailable("the server has ended")))
    }

    /// Ends a read that was passed on to the server. Returns what it fetched.
    async fn cancel_moved(&mut self) -> Result<Batches> {
        if let Some(at_server) = &self.at_server {
            at_server.cancel.cancel();
        }
        self.take_moved().await
    }
}

#[async_trait]
impl GroupReader for FaultyReader {
    fn require_groups(&mut self) {}

    async fn read(
        &mut self,
        streams: &[StreamName],
        count: usize,
        wait: Duration,
    ) -> Result<Batches> {
        let result = self.try_read(streams, count, wait).await;
        if result.is_err() {
            // With the connection, what it had fetched is lost.
            self.inner = None;
        }
        result
    }

    async fn close(mut self: Box<Self>) -> Result<Batches> {
        let treatment = self.network.treat(CallClass::Read, false)?;
        sleep(treatment.delay).await;
        let mut fetched = self.cancel_moved().await?;
        if let Some(inner) = self.inner.take() {
            fetched.extend(inner.close().await?);
        }
        treatment.reply(Ok(fetched))
    }
}

/// Performs a call: in the process, at the server with copies of its arguments, or by a method.
macro_rules! perform {
    ($this:ident, $name:ident($($arg:ident),*), by $by:ident) => {
        $this.$by($($arg),*).await
    };
    ($this:ident, $name:ident($($arg:ident),*), $class:ident, needs space: $space:literal) => {{
        let treatment = $this.network.treat(CallClass::$class, $space)?;
        sleep(treatment.delay).await;
        treatment.reply($this.network.backend.$name($($arg),*).await)
    }};
    ($this:ident, $name:ident($($arg:ident),*), $class:ident, needs space: $space:literal, sends($($copy:expr),*)) => {{
        let treatment = $this.network.treat(CallClass::$class, $space)?;
        $(let $arg = $arg.to_owned();)*
        let backend = Arc::clone(&$this.network.backend);
        $this.network.send(treatment, async move { backend.$name($($copy),*).await }).await
    }};
}

/// Implements a part of the backend.
macro_rules! remote {
    (impl $seam:ident { $(fn $name:ident($($arg:ident: $type:ty),*) -> $reply:ty, [$($how:tt)*];)* }) => {
        #[async_trait]
        impl $seam for FaultyBackend {
            $(async fn $name(&self, $($arg: $type),*) -> Result<$reply> {
                let this = self;
                perform!(this, $name($($arg),*), $($how)*)
            })*
        }
    };
}

#[async_trait]
impl Backend for FaultyBackend {
    fn describe(&self) -> BackendDescription {
        self.network.backend.describe()
    }

    fn cluster_slot(&self, key: &str) -> Option<u16> {
        self.network.backend.cluster_slot(key)
    }

    async fn now(&self) -> Result<Timestamp> {
        self.network.backend.now().await
    }

    async fn close(&self) -> Result<()> {
        self.network.backend.close().await
    }
}

remote! {
    impl Streams {
        fn append(stream: &StreamName, entries: &[Fields], retention: &Retention) -> Vec<EntryId>, [Send, needs space: true, sends(&stream, &entries, &retention)];
        fn append_once(stream: &StreamName, entries: &[IdempotentEntry], keep: Duration, retention: &Retention) -> Vec<AppendedEntry>, [Send, needs space: true, sends(&stream, &entries, keep, &retention)];
        fn appended(stream: &StreamName, ids: &[&str]) -> Vec<Option<EntryId>>, [Send, needs space: false];
        fn ensure_group(stream: &StreamName, group: &GroupName, start: GroupStart) -> bool, [Membership, needs space: false];
        fn ensure_group_if(stream: &StreamName, group: &GroupName, start: GroupStart, condition: GroupCondition<'_>) -> bool, [Membership, needs space: false];
        fn remove_group(stream: &StreamName, group: &GroupName) -> bool, [Membership, needs space: false];
        fn reset_group(stream: &StreamName, group: &GroupName, start: GroupStart) -> bool, [Membership, needs space: false];
        fn reader(group: &GroupName, consumer: &ConsumerName) -> Box<dyn GroupReader>, [by open_reader];
        fn disconnect_reader(stream: &StreamName, group: &GroupName, consumer: &ConsumerName) -> DisconnectOutcome, [Membership, needs space: false];
        fn tail() -> Box<dyn TailReader>, [Read, needs space: false];
        fn settle(settle: SettleBatch<'_>) -> SettleResult, [by send_settle];
        fn keep_alive(stream: &StreamName, group: &GroupName, consumer: &ConsumerName, ids: &[EntryId]) -> Vec<EntryId>, [Settle, needs space: false];
        fn reclaim(reclaim: ReclaimRequest<'_>) -> ReclaimResult, [by send_reclaim];
        fn pending(query: PendingDeliveryQuery<'_>) -> Vec<PendingDelivery>, [Settle, needs space: false];
        fn range(stream: &StreamName, range: Range) -> Vec<Entry>, [Read, needs space: false];
        fn trim(stream: &StreamName, retention: &Retention, guard: TrimGuard) -> TrimResult, [Membership, needs space: false];
        fn delete_entries(stream: &StreamName, ids: &[EntryId]) -> usize, [Membership, needs space: false];
        fn delete_stream(stream: &StreamName) -> bool, [Membership, needs space: false];
        fn rename_stream(from: &StreamName, to: &StreamName) -> bool, [Membership, needs space: false];
        fn stats(stream: &StreamName) -> Option<StreamStats>, [Membership, needs space: false];
        fn remove_consumer(stream: &StreamName, group: &GroupName, consumer: &ConsumerName) -> bool, [Membership, needs space: false];
        fn remove_idle_consumers(stream: &StreamName, group: &GroupName, idle: Duration) -> Vec<ConsumerName>, [Membership, needs space: false];
    }
}

remote! {
    impl Delays {
        fn schedule(delays: &DelayName, items: &[ScheduleRequest]) -> Vec<DelayId>, [Send, needs space: true, sends(&delays, &items)];
        fn cancel(delays: &DelayName, id: DelayId) -> bool, [Send, needs space: false];
        fn promote_due(delays: &DelayName, count: usize) -> Vec<PromotedEntry>, [Read, needs space: false, sends(&delays, count)];
        fn wait_until_due(delays: &DelayName, wait: Duration) -> bool, [Read, needs space: false];
        fn delay_stats(delays: &DelayName) -> DelayStats, [Read, needs space: false];
        fn delayed(delays: &DelayName, offset: usize, count: usize) -> Vec<DelayedEntry>, [Read, needs space: false];
        fn delete_delay_set(delays: &DelayName) -> bool, [Membership, needs space: false];
    }
}

remote! {
    impl Leases {
        fn acquire(lease: &LeaseName, holder: &HolderName, ttl: Duration) -> AcquireResult, [by send_acquire];
        fn renew(holder: &HolderName, leases: &[Fence], ttl: Duration) -> Vec<Renewal>, [Membership, needs space: false, sends(&holder, &leases, ttl)];
        fn release(holder: &HolderName, leases: &[Fence]) -> usize, [Membership, needs space: false, sends(&holder, &leases)];
        fn leases(leases: &[LeaseName]) -> Vec<Option<LeaseInfo>>, [Membership, needs space: false];
        fn watch(prefix: &str) -> Box<dyn LeaseWatch>, [Membership, needs space: false];
    }
}

remote! {
    impl Registry {
        fn set_add(set: &SetName, members: &[&str], ttl: Option<Duration>) -> usize, [Membership, needs space: true];
        fn set_remove(set: &SetName, members: &[&str]) -> usize, [Membership, needs space: false];
        fn set_members(set: &SetName) -> Vec<String>, [Membership, needs space: false];
        fn set_contains(set: &SetName, members: &[&str]) -> Vec<bool>, [Membership, needs space: false];
        fn map_create(map: &MapName, fields: &RegistryMap) -> bool, [Membership, needs space: true, sends(&map, &fields)];
        fn map_update(map: &MapName, expect: Option<(&str, &[u8])>, fields: &RegistryMap) -> bool, [Membership, needs space: true];
        fn map_get(map: &MapName) -> Option<RegistryMap>, [Membership, needs space: false];
        fn map_delete(map: &MapName) -> bool, [Membership, needs space: false];
    }
}

remote! {
    impl Dedup {
        fn dedup_begin(scope: &DedupScope, ids: &[&str], hold: Duration) -> Vec<DedupStatus>, [Send, needs space: true];
        fn dedup_finish(scope: &DedupScope, done: &[(&str, Bytes)], keep: Duration) -> (), [Send, needs space: true];
        fn dedup_abandon(scope: &DedupScope, ids: &[&str]) -> (), [Send, needs space: false];
    }
}
