//! Where a scenario runs, and the members that take part in it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::{
    Backend, ConsumerName, GroupName, HeldLease, KeeperConfig, LeaseInfo, Options, connect,
};
use headwater_testkit::{Cluster, Redis, unique};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use crate::config::{Mode, QueueConfig};
use crate::error::Result;
use crate::group::coordinator::Membership;
use crate::group::seam::{Joined, Joining, OwnedPartition, Workplace};
use crate::keys;
use crate::queue::Queue;
use crate::topic::{Partition, Policies, Topic, TopicName};

/// Nothing that should happen takes longer.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// How long nothing must happen before a test believes that it does not.
pub(super) const QUIET: Duration = Duration::from_millis(400);

/// Writes each scenario once and runs it on all three backends.
macro_rules! everywhere {
    ($($scenario:ident),* $(,)?) => {
        mod embedded {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(&crate::group::tests::place::Place::embedded().await).await;
            })*
        }
        mod redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(&crate::group::tests::place::Place::redis()).await;
            })*
        }
        mod cluster {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(&crate::group::tests::place::Place::cluster()).await;
            })*
        }
    };
}

/// Fast enough for a test, slow enough for a busy machine.
pub(super) fn quick() -> QueueConfig {
    QueueConfig {
        lease: KeeperConfig {
            ttl: Duration::from_secs(3),
            renew_every: Duration::from_millis(500),
            margin: Duration::from_millis(500),
        },
        rebalance_every: Duration::from_secs(1),
        ..Default::default()
    }
}

/// A topic and a group on a backend.
pub(super) struct Place {
    target: Target,
    pub(super) topic: String,
    pub(super) group: GroupName,
    pub(super) config: QueueConfig,
    /// Who works on what, over all members of this test: two at once is the end of it.
    at_work: Arc<Mutex<HashMap<(String, Partition), u64>>>,
}

enum Target {
    /// All members share the one backend there is.
    Shared(Arc<dyn Backend>),
    /// Each member has its own connections.
    Url(String),
}

impl Place {
    pub(super) async fn embedded() -> Self {
        let backend = connect("embedded:memory", &Options::default()).await.unwrap();
        Self::new(Target::Shared(backend))
    }

    pub(super) fn redis() -> Self {
        Self::at(Redis::shared().unwrap().url())
    }

    pub(super) fn cluster() -> Self {
        Self::at(Cluster::shared().unwrap().url())
    }

    pub(super) fn at(url: String) -> Self {
        Self::new(Target::Url(url))
    }

    fn new(target: Target) -> Self {
        let group = GroupName::new(unique("g:r")).unwrap();
        let (topic, config) = (unique("topic"), quick());
        Self { target, topic, group, config, at_work: Arc::default() }
    }

    /// The same topic and group by another way.
    pub(super) fn through(&self, url: String) -> Self {
        let (topic, group) = (self.topic.clone(), self.group.clone());
        let (config, at_work) = (self.config.clone(), Arc::clone(&self.at_work));
        Self { target: Target::Url(url), topic, group, config, at_work }
    }

    /// Another topic and group on the same backend.
    pub(super) fn another(&self) -> Self {
        Self::new(match &self.target {
            Target::Shared(backend) => Target::Shared(Arc::clone(backend)),
            Target::Url(url) => Target::Url(url.clone()),
        })
    }

    pub(super) async fn connect(&self) -> Arc<dyn Backend> {
        match &self.target {
            Target::Shared(backend) => Arc::clone(backend),
            Target::Url(url) => connect(url, &Options::default()).await.unwrap(),
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

    /// Who holds the leases of the partitions, by the backend.
    pub(super) async fn holders(&self) -> Vec<Option<LeaseInfo>> {
        let backend = self.connect().await;
        let name = TopicName::new(&self.topic).unwrap();
        let topic = Topic::read(&*backend, &name).await.unwrap();
        let leases: Vec<_> =
            (0..topic.partitions).map(|at| keys::lease(&topic, &self.group, at)).collect();
        backend.leases(&leases).await.unwrap()
    }

    /// The entries of the members' set.
    pub(super) async fn listed(&self) -> Vec<String> {
        self.connect().await.set_members(&keys::members(&self.group)).await.unwrap()
    }

    /// Waits until the members have all `partitions`, none more than one above another, and nothing is on its way.
    pub(super) async fn balanced(&self, members: &[&Member], partitions: u16) {
        eventually(&format!("{} members to share {partitions}", members.len()), || async {
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

/// A subscription that does no work.
pub(super) struct Member {
    pub(super) queue: Queue,
    pub(super) membership: Option<Membership>,
    pub(super) desk: Arc<Desk>,
}

impl Member {
    pub(super) async fn join(
        queue: Queue,
        topic: &str,
        place: &Place,
        mode: Mode,
        id: Option<&str>,
    ) -> Result<Self> {
        let topic = queue.read_topic(&TopicName::new(topic).unwrap()).await?;
        Self::join_topic(queue, topic, place, mode, id).await
    }

    pub(super) async fn join_topic(
        queue: Queue,
        topic: Arc<Topic>,
        place: &Place,
        mode: Mode,
        id: Option<&str>,
    ) -> Result<Self> {
        let desk = Arc::new(Desk::new(Arc::clone(&place.at_work)));
        let joining = Joining {
            group: place.group.clone(),
            topic,
            mode,
            member: id.map(str::to_owned),
            workplace: Arc::clone(&desk) as Arc<dyn Workplace>,
        };
        let membership = queue.inner.coordinator.join(joining).await?;
        Ok(Self { queue, membership: Some(membership), desk })
    }

    pub(super) fn owns(&self) -> BTreeSet<Partition> {
        self.desk.lock().owned.keys().copied().collect()
    }

    pub(super) fn told(&self) -> Vec<Told> {
        self.desk.lock().told.iter().map(|(_, told)| told.clone()).collect()
    }

    pub(super) fn count(&self, what: impl Fn(&Told) -> bool) -> usize {
        self.told().iter().filter(|told| what(told)).count()
    }

    pub(super) fn consumer(&self) -> ConsumerName {
        self.desk.lock().joined.clone().expect("it joined").consumer
    }

    pub(super) fn forget_told(&self) {
        self.desk.lock().told.clear();
    }

    pub(super) async fn leave(mut self) {
        let membership = self.membership.take().unwrap();
        timeout(LIMIT, membership.leave()).await.expect("leaving ends");
    }

    /// Dies as a process does that is killed: nothing is released, nobody is told.
    pub(super) fn die(self) {
        self.desk.bury();
        self.queue.inner.coordinator.die();
    }
}

/// What a workplace was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Told {
    Joined(ConsumerName),
    Gained(Partition),
    GiveUp(Partition),
    GivenUp(Partition),
    Lost(Partition),
    Expelled,
    Orphaned(ConsumerName),
    Changed(u16),
}

/// A workplace that writes down what it is told.
pub(super) struct Desk {
    serial: u64,
    state: Mutex<Notes>,
    /// While it is set, `give_up` does not end.
    pub(super) holds_on: AtomicBool,
    let_go: Notify,
    /// Whether `orphaned` succeeds.
    pub(super) takes_over: AtomicBool,
    at_work: Arc<Mutex<HashMap<(String, Partition), u64>>>,
}

#[derive(Default)]
pub(super) struct Notes {
    pub(super) told: Vec<(Instant, Told)>,
    pub(super) owned: BTreeMap<Partition, OwnedPartition>,
    pub(super) joined: Option<Joined>,
}

impl Desk {
    fn new(at_work: Arc<Mutex<HashMap<(String, Partition), u64>>>) -> Self {
        static SERIALS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        Self {
            serial: SERIALS.fetch_add(1, Ordering::Relaxed),
            state: Mutex::default(),
            holds_on: AtomicBool::new(false),
            let_go: Notify::new(),
            takes_over: AtomicBool::new(true),
            at_work,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Notes> {
        self.state.lock().unwrap()
    }

    pub(super) fn lease(&self, partition: Partition) -> HeldLease {
        self.lock().owned[&partition].lease.clone()
    }

    /// When it was last told so.
    pub(super) fn when(&self, what: &Told) -> Option<Instant> {
        self.lock().told.iter().rev().find(|(_, told)| told == what).map(|(at, _)| *at)
    }

    pub(super) fn hold_on(&self) {
        self.holds_on.store(true, Ordering::SeqCst);
    }

    pub(super) fn let_go(&self) {
        self.holds_on.store(false, Ordering::SeqCst);
        self.let_go.notify_waiters();
    }

    fn note(&self, told: Told) {
        self.lock().told.push((Instant::now(), told));
    }

    fn take_off(&self, partition: Partition) {
        if let Some(owned) = self.lock().owned.remove(&partition) {
            let key = (owned.topic.name.to_string(), partition);
            let mut at_work = self.at_work.lock().unwrap();
            if at_work.get(&key) == Some(&self.serial) {
                at_work.remove(&key);
            }
        }
    }

    fn bury(&self) {
        let owned: Vec<Partition> = self.lock().owned.keys().copied().collect();
        owned.into_iter().for_each(|partition| self.take_off(partition));
    }
}

#[async_trait]
impl Workplace for Desk {
    fn joined(&self, joined: Joined) {
        self.note(Told::Joined(joined.consumer.clone()));
        let before = self.lock().joined.replace(joined);
        assert!(before.is_none(), "joined twice");
    }

    fn gained(&self, owned: OwnedPartition) {
        let partition = owned.partition;
        self.note(Told::Gained(partition));
        assert!(owned.lease.is_trusted());
        let key = (owned.topic.name.to_string(), partition);
        let other = self.at_work.lock().unwrap().insert(key, self.serial);
        assert_eq!(other, None, "two work on partition {partition}");
        let before = self.lock().owned.insert(partition, owned);
        assert!(before.is_none(), "partition {partition} gained twice");
    }

    async fn give_up(&self, partition: Partition) {
        self.note(Told::GiveUp(partition));
        loop {
            let let_go = self.let_go.notified();
            if !self.holds_on.load(Ordering::SeqCst) {
                break;
            }
            let _ = timeout(Duration::from_millis(50), let_go).await;
        }
        self.take_off(partition);
        self.note(Told::GivenUp(partition));
    }

    fn lost(&self, partition: Partition) {
        self.note(Told::Lost(partition));
        self.take_off(partition);
    }

    fn expelled(&self) {
        self.note(Told::Expelled);
        let mut notes = self.lock();
        assert!(notes.owned.is_empty(), "expelled before everything was lost");
        notes.joined.take().expect("expelled before it joined");
    }

    async fn orphaned(&self, dead: ConsumerName) -> bool {
        self.note(Told::Orphaned(dead));
        self.takes_over.load(Ordering::SeqCst)
    }

    fn changed(&self, topic: Arc<Topic>) {
        self.note(Told::Changed(topic.partitions));
    }
}

/// Asks again and again until `condition` holds.
pub(super) async fn eventually<F: Future<Output = bool>>(
    what: &str,
    mut condition: impl FnMut() -> F,
) {
    let deadline = Instant::now() + LIMIT;
    while !condition().await {
        assert!(Instant::now() < deadline, "waited in vain for: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
