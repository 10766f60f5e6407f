//! Fixture: a group on a backend, and members whose listeners record their calls.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::{
    Backend, ConsumerName, GroupName, HeldLease, LeaseInfo, LeaseRenewerConfig, Options, connect,
};
use headwater_testkit::{Cluster, Redis, unique};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use crate::config::{Mode, QueueConfig};
use crate::error::Result;
use crate::group::coordinator::MembershipHandle;
use crate::group::rebalance_listener::{
    AssignedPartition, GroupMembership, JoinRequest, RebalanceListener,
};
use crate::keys::{self, MembershipKeys};
use crate::queue::Queue;
use crate::topic::{Partition, Policies, Topic, TopicName};

/// Timeout for everything a test waits for.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// How long a test waits to conclude that nothing happens.
pub(super) const QUIET: Duration = Duration::from_millis(400);

/// Runs each scenario on the backends where all leases are on one server.
macro_rules! on_one_server {
    ($($scenario:ident),* $(,)?) => {
        mod embedded {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(&crate::group::tests::fixture::GroupFixture::embedded().await).await;
            })*
        }
        mod redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(&crate::group::tests::fixture::GroupFixture::redis()).await;
            })*
        }
    };
}

/// Runs each scenario on all three backends.
macro_rules! on_every_backend {
    ($($scenario:ident),* $(,)?) => {
        on_one_server!($($scenario),*);
        mod cluster {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(&crate::group::tests::fixture::GroupFixture::cluster()).await;
            })*
        }
    };
}

/// Fast enough for a test, slow enough for a busy machine.
pub(super) fn fast_config() -> QueueConfig {
    QueueConfig {
        lease: LeaseRenewerConfig {
            ttl: Duration::from_secs(3),
            renew_every: Duration::from_millis(500),
            safety_margin: Duration::from_millis(500),
        },
        rebalance_every: Duration::from_secs(1),
        ..Default::default()
    }
}

/// A topic and a group on a backend.
pub(super) struct GroupFixture {
    target: BackendTarget,
    pub(super) topic: String,
    pub(super) group: GroupName,
    pub(super) config: QueueConfig,
    /// The owner of each partition over all members of the test; a second owner fails the test.
    owners: Arc<Mutex<HashMap<(String, Partition), u64>>>,
}

enum BackendTarget {
    /// All members share one backend.
    Shared(Arc<dyn Backend>),
    /// Each member has its own connections.
    Url(String),
}

impl GroupFixture {
    pub(super) async fn embedded() -> Self {
        let backend = connect("embedded:memory", &Options::default()).await.unwrap();
        Self::new(BackendTarget::Shared(backend))
    }

    pub(super) fn redis() -> Self {
        Self::with_server(Redis::shared().unwrap().url())
    }

    pub(super) fn cluster() -> Self {
        Self::with_server(Cluster::shared().unwrap().url())
    }

    pub(super) fn with_server(url: String) -> Self {
        Self::new(BackendTarget::Url(url))
    }

    fn new(target: BackendTarget) -> Self {
        let group = GroupName::new(unique("g:r")).unwrap();
        let (topic, config) = (unique("topic"), fast_config());
        Self { target, topic, group, config, owners: Arc::default() }
    }

    /// The same topic and group through another server address.
    pub(super) fn with_url(&self, url: String) -> Self {
        let (topic, group) = (self.topic.clone(), self.group.clone());
        let (config, owners) = (self.config.clone(), Arc::clone(&self.owners));
        Self { target: BackendTarget::Url(url), topic, group, config, owners }
    }

    /// Another topic and group on the same backend.
    pub(super) fn other_topic(&self) -> Self {
        Self::new(match &self.target {
            BackendTarget::Shared(backend) => BackendTarget::Shared(Arc::clone(backend)),
            BackendTarget::Url(url) => BackendTarget::Url(url.clone()),
        })
    }

    pub(super) async fn connect(&self) -> Arc<dyn Backend> {
        match &self.target {
            BackendTarget::Shared(backend) => Arc::clone(backend),
            BackendTarget::Url(url) => connect(url, &Options::default()).await.unwrap(),
        }
    }

    pub(super) async fn queue(&self) -> Queue {
        Queue::with_config(self.connect().await, self.config.clone()).unwrap()
    }

    pub(super) async fn create(&self, partitions: u16) {
        let policies = Policies { refresh: Duration::from_millis(200), ..Default::default() };
        self.queue().await.topics().create(&self.topic, partitions, policies).await.unwrap();
    }

    /// A member in a queue of its own, as another process would be.
    pub(super) async fn member(&self) -> Member {
        self.try_member(Mode::Owned, None).await.unwrap()
    }

    pub(super) async fn try_member(&self, mode: Mode, id: Option<&str>) -> Result<Member> {
        Member::join(self.queue().await, &self.topic, self, mode, id).await
    }

    pub(super) async fn members(&self, count: usize) -> Vec<Member> {
        let mut members = Vec::new();
        for _ in 0..count {
            members.push(self.member().await);
        }
        members
    }

    /// The partition leases as the backend has them.
    pub(super) async fn holders(&self) -> Vec<Option<LeaseInfo>> {
        let backend = self.connect().await;
        let name = TopicName::new(&self.topic).unwrap();
        let topic = Topic::read(&*backend, &name).await.unwrap();
        let leases: Vec<_> =
            (0..topic.partitions).map(|at| keys::lease(&topic, &self.group, at)).collect();
        backend.leases(&leases).await.unwrap()
    }

    /// After the server has lost its leases, a member that knows takes the partitions of one that does not know yet.
    pub(super) fn forget_owners(&self) {
        self.owners.lock().unwrap().clear();
    }

    /// The entries of the member list.
    pub(super) async fn member_list(&self) -> Vec<String> {
        let backend = self.connect().await;
        let copies = MembershipKeys::new(&*backend, &self.group).members();
        // An entry in one copy of several may be left over.
        backend.set_members(&copies[copies.len() / 2]).await.unwrap()
    }

    /// Waits until the members own all `partitions` and their shares differ by at most one.
    pub(super) async fn wait_until_balanced(&self, members: &[&Member], partitions: u16) {
        wait_until(&format!("{} members to share {partitions}", members.len()), || async {
            is_balanced(members, partitions)
        })
        .await;
    }
}

pub(super) fn is_balanced(members: &[&Member], partitions: u16) -> bool {
    let shares: Vec<BTreeSet<Partition>> = members.iter().map(|member| member.owns()).collect();
    let all: BTreeSet<Partition> = shares.iter().flatten().copied().collect();
    let sizes: Vec<usize> = shares.iter().map(BTreeSet::len).collect();
    let total: usize = sizes.iter().sum();
    all == (0..partitions).collect()
        && total == usize::from(partitions)
        && sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1
}

/// A subscription without a handler.
pub(super) struct Member {
    pub(super) queue: Queue,
    pub(super) membership: Option<MembershipHandle>,
    pub(super) listener: Arc<RecordingListener>,
}

impl Member {
    pub(super) async fn join(
        queue: Queue,
        topic: &str,
        fixture: &GroupFixture,
        mode: Mode,
        id: Option<&str>,
    ) -> Result<Self> {
        let topic = queue.read_topic(&TopicName::new(topic).unwrap()).await?;
        Self::join_topic(queue, topic, fixture, mode, id).await
    }

    pub(super) async fn join_topic(
        queue: Queue,
        topic: Arc<Topic>,
        fixture: &GroupFixture,
        mode: Mode,
        id: Option<&str>,
    ) -> Result<Self> {
        let listener = Arc::new(RecordingListener::new(Arc::clone(&fixture.owners)));
        let request = JoinRequest {
            group: fixture.group.clone(),
            topic,
            mode,
            member: id.map(str::to_owned),
            listener: Arc::clone(&listener) as Arc<dyn RebalanceListener>,
        };
        let membership = queue.inner.coordinator.join(request).await?;
        Ok(Self { queue, membership: Some(membership), listener })
    }

    pub(super) fn owns(&self) -> BTreeSet<Partition> {
        self.listener.lock().owned.keys().copied().collect()
    }

    pub(super) fn callbacks(&self) -> Vec<Callback> {
        self.listener.lock().callbacks.iter().map(|(_, callback)| callback.clone()).collect()
    }

    pub(super) fn count(&self, what: impl Fn(&Callback) -> bool) -> usize {
        self.callbacks().iter().filter(|callback| what(callback)).count()
    }

    pub(super) fn consumer(&self) -> ConsumerName {
        self.listener.lock().joined.clone().expect("joined").consumer
    }

    pub(super) fn clear_callbacks(&self) {
        self.listener.lock().callbacks.clear();
    }

    pub(super) async fn leave(mut self) {
        let membership = self.membership.take().unwrap();
        timeout(LIMIT, membership.leave()).await.expect("leaving completes");
    }

    /// Simulates a killed process: nothing is released or notified.
    pub(super) fn die(self) {
        self.listener.drop_all();
        self.queue.inner.coordinator.die();
    }
}

/// A call of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Callback {
    Joined(ConsumerName),
    Assigned(Partition),
    Revoke(Partition),
    Revoked(Partition),
    Lost(Partition),
    Evicted,
    MemberDied(ConsumerName),
    TopicChanged(u16),
}

/// A listener that records its calls.
pub(super) struct RecordingListener {
    serial: u64,
    state: Mutex<RecordedCalls>,
    /// While set, `on_revoke` does not return.
    pub(super) blocks_revoke: AtomicBool,
    unblock_revoke: Notify,
    /// The result of `on_member_died`.
    pub(super) reclaims: AtomicBool,
    owners: Arc<Mutex<HashMap<(String, Partition), u64>>>,
}

#[derive(Default)]
pub(super) struct RecordedCalls {
    pub(super) callbacks: Vec<(Instant, Callback)>,
    pub(super) owned: BTreeMap<Partition, AssignedPartition>,
    pub(super) joined: Option<GroupMembership>,
}

impl RecordingListener {
    fn new(owners: Arc<Mutex<HashMap<(String, Partition), u64>>>) -> Self {
        static SERIALS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        Self {
            serial: SERIALS.fetch_add(1, Ordering::Relaxed),
            state: Mutex::default(),
            blocks_revoke: AtomicBool::new(false),
            unblock_revoke: Notify::new(),
            reclaims: AtomicBool::new(true),
            owners,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, RecordedCalls> {
        self.state.lock().unwrap()
    }

    pub(super) fn lease(&self, partition: Partition) -> HeldLease {
        self.lock().owned[&partition].lease.clone()
    }

    /// When it was last called this way.
    pub(super) fn last_time_of(&self, what: &Callback) -> Option<Instant> {
        self.lock().callbacks.iter().rev().find(|(_, callback)| callback == what).map(|(at, _)| *at)
    }

    pub(super) fn block_revoke(&self) {
        self.blocks_revoke.store(true, Ordering::SeqCst);
    }

    pub(super) fn unblock_revoke(&self) {
        self.blocks_revoke.store(false, Ordering::SeqCst);
        self.unblock_revoke.notify_waiters();
    }

    fn record(&self, callback: Callback) {
        self.lock().callbacks.push((Instant::now(), callback));
    }

    fn remove_owned(&self, partition: Partition) {
        if let Some(owned) = self.lock().owned.remove(&partition) {
            let key = (owned.topic.name.to_string(), partition);
            let mut owners = self.owners.lock().unwrap();
            if owners.get(&key) == Some(&self.serial) {
                owners.remove(&key);
            }
        }
    }

    fn drop_all(&self) {
        let owned: Vec<Partition> = self.lock().owned.keys().copied().collect();
        owned.into_iter().for_each(|partition| self.remove_owned(partition));
    }
}

#[async_trait]
impl RebalanceListener for RecordingListener {
    fn on_joined(&self, joined: GroupMembership) {
        self.record(Callback::Joined(joined.consumer.clone()));
        let before = self.lock().joined.replace(joined);
        assert!(before.is_none(), "joined twice");
    }

    fn on_assigned(&self, owned: AssignedPartition) {
        let partition = owned.partition;
        self.record(Callback::Assigned(partition));
        assert!(owned.lease.is_valid());
        let key = (owned.topic.name.to_string(), partition);
        let other = self.owners.lock().unwrap().insert(key, self.serial);
        assert_eq!(other, None, "partition {partition} has two owners");
        let before = self.lock().owned.insert(partition, owned);
        assert!(before.is_none(), "partition {partition} assigned twice");
    }

    async fn on_revoke(&self, partition: Partition) {
        self.record(Callback::Revoke(partition));
        loop {
            let unblock_revoke = self.unblock_revoke.notified();
            if !self.blocks_revoke.load(Ordering::SeqCst) {
                break;
            }
            let _ = timeout(Duration::from_millis(50), unblock_revoke).await;
        }
        self.remove_owned(partition);
        self.record(Callback::Revoked(partition));
    }

    fn on_lost(&self, partition: Partition) {
        self.record(Callback::Lost(partition));
        self.remove_owned(partition);
    }

    fn on_evicted(&self) {
        self.record(Callback::Evicted);
        let mut recorded = self.lock();
        assert!(recorded.owned.is_empty(), "evicted before all partitions were lost");
        recorded.joined.take().expect("evicted before it joined");
    }

    async fn on_member_died(&self, dead: ConsumerName) -> bool {
        self.record(Callback::MemberDied(dead));
        self.reclaims.load(Ordering::SeqCst)
    }

    fn on_topic_changed(&self, topic: Arc<Topic>) {
        self.record(Callback::TopicChanged(topic.partitions));
    }
}

/// Polls until `condition` holds.
pub(super) async fn wait_until<F: Future<Output = bool>>(
    what: &str,
    mut condition: impl FnMut() -> F,
) {
    let deadline = Instant::now() + LIMIT;
    while !condition().await {
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
