//! The lease keeper: whoever holds a lease learns that it must stop before anybody else can have it.
//!
//! Time is tokio's paused clock, and the server of leases a small one of our own that can be slow, deaf or forgetful.
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use headwater_stream::{
    AcquireResult, Epoch, Fence, HeldLease, HolderName, LeaseAcquisition, LeaseInfo, LeaseName,
    LeaseRenewer, LeaseRenewerConfig, LeaseWatch, Leases, LossCause, LostLease, Renewal, Result,
    StreamError,
};
use tokio::sync::oneshot;
use tokio::time::{Instant, advance, sleep, sleep_until, timeout};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// A server of leases in paused time.
#[derive(Debug)]
struct Server {
    held: Mutex<HashMap<LeaseName, (HolderName, Epoch, Instant)>>,
    epochs: Mutex<u64>,
    network: Mutex<Network>,
    renewals: AtomicUsize,
}

/// What happens to a call on its way.
#[derive(Clone, Copy, Debug)]
enum Network {
    Fine,
    /// This long to the server, and this long back.
    Slow(Duration, Duration),
    /// The call never arrives and fails after a second.
    Deaf,
    /// The call arrives, its answer does not.
    AnswerLost,
    /// Each call draws one of the above.
    Random(u64),
}

impl Server {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            held: Mutex::default(),
            epochs: Mutex::new(100),
            network: Mutex::new(Network::Fine),
            renewals: AtomicUsize::new(0),
        })
    }

    fn network(&self, network: Network) {
        *self.network.lock().unwrap() = network;
    }

    fn holder(&self, lease: &LeaseName) -> Option<(HolderName, Epoch)> {
        let held = self.held.lock().unwrap();
        let (holder, epoch, until) = held.get(lease)?;
        (Instant::now() < *until).then(|| (holder.clone(), *epoch))
    }

    fn draw(&self) -> Network {
        let mut network = self.network.lock().unwrap();
        let Network::Random(state) = &mut *network else { return *network };
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        let delay = |shift: u64| MS * ((*state >> shift) % 4_000) as u32;
        match *state % 10 {
            0 => Network::Deaf,
            1 => Network::AnswerLost,
            2 | 3 => Network::Slow(delay(20), delay(40)),
            4 | 5 => Network::Slow(delay(20) / 20, delay(40) / 20),
            _ => Network::Fine,
        }
    }

    async fn call<T>(&self, effect: impl FnOnce(&Self) -> T) -> Result<T> {
        let unavailable = || StreamError::Unavailable { problem: "a test".into(), source: None };
        match self.draw() {
            Network::Slow(there, back) => {
                sleep(there).await;
                let answer = effect(self);
                sleep(back).await;
                Ok(answer)
            }
            Network::Deaf => {
                sleep(SECOND).await;
                Err(unavailable())
            }
            Network::AnswerLost => {
                effect(self);
                sleep(SECOND).await;
                Err(unavailable())
            }
            Network::Fine | Network::Random(_) => Ok(effect(self)),
        }
    }

    fn is_held(&self, holder: &HolderName, fence: &Fence) -> bool {
        self.holder(&fence.lease) == Some((holder.clone(), fence.epoch))
    }
}

#[async_trait]
impl Leases for Server {
    async fn acquire(
        &self,
        lease: &LeaseName,
        holder: &HolderName,
        ttl: Duration,
    ) -> Result<AcquireResult> {
        let effect = |server: &Self| {
            let epoch = match server.holder(lease) {
                Some((by, epoch)) if by == *holder => epoch,
                Some((by, _)) => return AcquireResult::Held { by, remaining: SECOND },
                None => {
                    let mut epochs = server.epochs.lock().unwrap();
                    *epochs += 1;
                    Epoch(*epochs)
                }
            };
            let until = Instant::now() + ttl;
            server.held.lock().unwrap().insert(lease.clone(), (holder.clone(), epoch, until));
            AcquireResult::Won(epoch)
        };
        self.call(effect).await
    }

    async fn renew(
        &self,
        holder: &HolderName,
        leases: &[Fence],
        ttl: Duration,
    ) -> Result<Vec<Renewal>> {
        self.renewals.fetch_add(1, Ordering::SeqCst);
        let effect = |server: &Self| {
            let renew = |fence: &Fence| {
                if !server.is_held(holder, fence) {
                    return Renewal::Lost;
                }
                let until = Instant::now() + ttl;
                let lease = (holder.clone(), fence.epoch, until);
                server.held.lock().unwrap().insert(fence.lease.clone(), lease);
                Renewal::Kept
            };
            leases.iter().map(renew).collect()
        };
        self.call(effect).await
    }

    async fn release(&self, holder: &HolderName, leases: &[Fence]) -> Result<usize> {
        let effect = |server: &Self| {
            let held: Vec<&Fence> = leases.iter().filter(|f| server.is_held(holder, f)).collect();
            for fence in &held {
                server.held.lock().unwrap().remove(&fence.lease);
            }
            held.len()
        };
        self.call(effect).await
    }

    async fn leases(&self, _leases: &[LeaseName]) -> Result<Vec<Option<LeaseInfo>>> {
        unreachable!("a keeper does not ask who holds a lease")
    }

    async fn watch(&self, _prefix: &str) -> Result<Box<dyn LeaseWatch>> {
        unreachable!("a keeper does not watch")
    }
}

fn lease(number: usize) -> LeaseName {
    LeaseName::new(format!("lease{number}")).unwrap()
}

fn keeper(server: &Arc<Server>, name: &str) -> Arc<LeaseRenewer> {
    let holder = HolderName::new(name).unwrap();
    let leases: Arc<dyn Leases> = Arc::clone(server) as _;
    Arc::new(LeaseRenewer::new(leases, holder, LeaseRenewerConfig::default()).unwrap())
}

/// How long a lease is trusted without renewal: 13.5 s by default.
fn trust() -> Duration {
    let LeaseRenewerConfig { ttl, safety_margin, .. } = LeaseRenewerConfig::default();
    ttl - safety_margin
}

async fn acquire(keeper: &LeaseRenewer, number: usize) -> HeldLease {
    let held = keeper.acquire(&lease(number)).await.unwrap();
    held.won().unwrap_or_else(|| panic!("expected {} to get lease {number}", keeper.holder()))
}

/// Runs a keeper until the sender is dropped or used.
fn run(keeper: &Arc<LeaseRenewer>) -> (oneshot::Sender<()>, tokio::task::JoinHandle<()>) {
    let (stop, stopped) = oneshot::channel();
    let keeper = Arc::clone(keeper);
    let task = tokio::spawn(async move {
        keeper.run(async move { stopped.await.unwrap_or_default() }).await;
    });
    (stop, task)
}

#[test]
fn times_that_do_not_fit_together_are_refused() {
    let default = LeaseRenewerConfig::default();
    assert!(default.validate().is_ok());
    let bad = [
        ("ttl", LeaseRenewerConfig { ttl: MS * 49, ..default }),
        ("ttl", LeaseRenewerConfig { ttl: SECOND * 86_401, ..default }),
        ("renew_every", LeaseRenewerConfig { renew_every: Duration::ZERO, ..default }),
        ("renew_every", LeaseRenewerConfig { renew_every: SECOND * 5 + MS, ..default }),
        ("safety_margin", LeaseRenewerConfig { safety_margin: SECOND * 10, ..default }),
    ];
    for (argument, config) in bad {
        match config.validate() {
            Err(StreamError::Invalid { what, .. }) => assert_eq!(what, argument, "{config:?}"),
            other => panic!("expected {argument} to be refused, found {other:?}"),
        }
        let holder = HolderName::new("ann").unwrap();
        assert!(LeaseRenewer::new(Server::new(), holder, config).is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_trusted_until_shortly_before_it_runs_out() {
    let server = Server::new();
    let held = acquire(&keeper(&server, "ann"), 1).await;

    advance(trust() - MS).await;
    assert!(held.is_valid());
    advance(MS).await;
    assert!(!held.is_valid(), "the safety_margin has begun");
    assert!(server.holder(&lease(1)).is_some(), "on the server the lease still lives");
}

#[tokio::test(start_paused = true)]
async fn trust_is_counted_from_the_moment_the_request_was_sent() {
    let server = Server::new();
    server.network(Network::Slow(MS * 10, SECOND * 4));
    let keeper = keeper(&server, "ann");
    let sent = Instant::now();
    let held = acquire(&keeper, 1).await;
    assert_eq!(sent.elapsed(), SECOND * 4 + MS * 10);

    held.lost().await;

    assert_eq!(sent.elapsed(), trust(), "a slow answer shortens the trust and never stretches it");
}

#[tokio::test(start_paused = true)]
async fn trust_in_a_renewed_lease_is_counted_from_the_moment_the_renewal_was_sent() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let held = acquire(&keeper, 1).await;
    advance(SECOND * 5).await;
    server.network(Network::Slow(MS, SECOND * 4));
    let sent = Instant::now();
    assert_eq!(keeper.run_once().await.unwrap(), []);

    held.lost().await;

    assert_eq!(sent.elapsed(), trust());
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_came_too_late_gives_no_trust() {
    let server = Server::new();
    server.network(Network::Slow(MS, trust()));
    let keeper = keeper(&server, "ann");
    let held = acquire(&keeper, 1).await;

    assert!(!held.is_valid());
    timeout(MS, held.lost()).await.expect("it is lost from the beginning");
}

#[tokio::test(start_paused = true)]
async fn a_lease_of_another_is_not_held() {
    let server = Server::new();
    let ann = keeper(&server, "ann");
    acquire(&ann, 1).await;
    let bob = keeper(&server, "bob");

    match bob.acquire(&lease(1)).await.unwrap() {
        LeaseAcquisition::Held { by, remaining } => {
            assert_eq!(&by, ann.holder());
            assert!(remaining > Duration::ZERO && remaining <= LeaseRenewerConfig::default().ttl);
        }
        LeaseAcquisition::Won(held) => panic!("bob has {held:?}, too"),
    }
    assert_eq!(bob.held(), []);
    assert_eq!(ann.held().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_lease_acquired_twice_is_one_lease() {
    let keeper = keeper(&Server::new(), "ann");
    let first = acquire(&keeper, 1).await;
    advance(SECOND * 10).await;
    let again = acquire(&keeper, 1).await;

    assert_eq!(first.fence(), again.fence());
    advance(SECOND * 10).await;
    assert!(first.is_valid() && again.is_valid(), "both see the new time");
    assert_eq!(keeper.held(), [first.fence().clone()]);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_is_one_call_for_all_leases() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let mut held = Vec::new();
    for number in 0..1000 {
        held.push(acquire(&keeper, number).await);
    }
    advance(SECOND * 10).await;

    assert_eq!(keeper.run_once().await.unwrap(), []);

    assert_eq!(server.renewals.load(Ordering::SeqCst), 1);
    advance(SECOND * 10).await;
    assert!(held.iter().all(HeldLease::is_valid));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_renewed_while_nothing_is_held() {
    let server = Server::new();
    assert_eq!(keeper(&server, "ann").run_once().await.unwrap(), []);
    assert_eq!(server.renewals.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_running_keeper_keeps_its_leases() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let held = acquire(&keeper, 1).await;
    let (stop, task) = run(&keeper);

    assert!(timeout(SECOND * 600, held.lost()).await.is_err(), "it is never lost");
    assert!(held.is_valid());

    drop(stop);
    timeout(SECOND, task).await.expect("it stops when told to").unwrap();
    let stopped = Instant::now();
    held.lost().await;
    assert!(stopped.elapsed() <= trust(), "from then on the trust runs out");
}

#[tokio::test(start_paused = true)]
async fn a_lost_lease_is_told_once_and_forgotten() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let held = [acquire(&keeper, 1).await, acquire(&keeper, 2).await];
    server.held.lock().unwrap().remove(&lease(1));

    let lost = keeper.run_once().await.unwrap();

    let fence = held[0].fence().clone();
    assert_eq!(lost, [LostLease { fence, cause: LossCause::LostOnServer }]);
    assert!(!held[0].is_valid() && held[1].is_valid());
    timeout(MS, held[0].lost()).await.expect("those who wait are told");
    assert_eq!(keeper.run_once().await.unwrap(), [], "and not again");
    assert_eq!(keeper.held(), [held[1].fence().clone()]);
}

#[tokio::test(start_paused = true)]
async fn all_who_wait_for_the_loss_are_told() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let held = acquire(&keeper, 1).await;
    let waiting: Vec<_> = (0..10)
        .map(|_| {
            let held = held.clone();
            tokio::spawn(async move { held.lost().await })
        })
        .collect();
    // Dropped waits do no harm to the others.
    assert!(timeout(MS, held.lost()).await.is_err());
    server.held.lock().unwrap().clear();

    keeper.run_once().await.unwrap();

    for task in waiting {
        timeout(MS, task).await.expect("it is told").unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_lapsed_while_the_server_was_silent_is_released_and_stays_lost() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let held = acquire(&keeper, 1).await;
    let acquired = Instant::now();
    server.network(Network::Deaf);
    let (_stop, _task) = run(&keeper);

    held.lost().await;
    assert_eq!(acquired.elapsed(), trust());
    assert!(server.holder(&lease(1)).is_some(), "it stopped before the lease ran out");

    // The lease still lives at the server. It is given up, not renewed.
    server.network(Network::Fine);
    sleep_until(acquired + trust() + MS * 1_400).await;
    let lost = keeper.run_once().await.unwrap();
    assert_eq!(lost, [lapsed(&held)]);
    assert!(!held.is_valid());
    assert!(server.holder(&lease(1)).is_none(), "others can have it");
    assert_eq!(keeper.held(), []);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_is_answered_after_the_lapse_does_not_bring_the_lease_back() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let held = acquire(&keeper, 1).await;
    let acquired = Instant::now();
    advance(trust() - SECOND).await;
    // It is sent in time, happens at the server, and is answered a moment after the lease has lapsed.
    server.network(Network::Slow(MS, SECOND));
    let renewing = tokio::spawn({
        let keeper = Arc::clone(&keeper);
        async move { keeper.run_once().await }
    });
    held.lost().await;
    assert_eq!(acquired.elapsed(), trust());

    let lost = renewing.await.unwrap().unwrap();

    assert_eq!(lost, [lapsed(&held)]);
    assert!(!held.is_valid(), "who was told that it is lost must not be its owner again");
    assert!(server.holder(&lease(1)).is_none(), "the renewal is taken back");
    assert_eq!(keeper.run_once().await.unwrap(), [], "it is told once");
}

#[tokio::test(start_paused = true)]
async fn a_lapse_is_told_at_its_moment_and_once() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let waiting = tokio::spawn({
        let keeper = Arc::clone(&keeper);
        async move { keeper.lapsed().await }
    });
    advance(SECOND).await;
    let held = acquire(&keeper, 1).await;
    let acquired = Instant::now();
    server.network(Network::Deaf);

    assert_eq!(waiting.await.unwrap(), [lapsed(&held)]);

    assert_eq!(acquired.elapsed(), trust());
    assert!(!held.is_valid());
    server.network(Network::Fine);
    assert_eq!(keeper.run_once().await.unwrap(), []);
    assert!(timeout(SECOND * 60, keeper.lapsed()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_lapsed_is_acquired_again_with_a_new_epoch() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let old = acquire(&keeper, 1).await;
    advance(trust()).await;
    assert!(server.holder(&lease(1)).is_some(), "at the server it still lives");

    let new = acquire(&keeper, 1).await;

    assert!(new.fence().epoch > old.fence().epoch, "{new:?} {old:?}");
    assert!(new.is_valid() && !old.is_valid());
    assert_eq!(keeper.run_once().await.unwrap(), [lapsed(&old)]);
    assert!(new.is_valid());
    assert_eq!(keeper.held(), [new.fence().clone()]);
}

#[tokio::test(start_paused = true)]
async fn a_release_that_failed_is_tried_again() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    acquire(&keeper, 1).await;
    server.network(Network::Deaf);
    assert!(keeper.release(&[lease(1)]).await.is_err());
    assert!(server.holder(&lease(1)).is_some());

    server.network(Network::Fine);
    assert_eq!(keeper.run_once().await.unwrap(), [], "a released lease is not a lost one");

    assert!(server.holder(&lease(1)).is_none());
}

fn lapsed(held: &HeldLease) -> LostLease {
    LostLease { fence: held.fence().clone(), cause: LossCause::Lapsed }
}

#[tokio::test(start_paused = true)]
async fn one_lost_answer_costs_no_lease() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let held = acquire(&keeper, 1).await;
    for network in [Network::AnswerLost, Network::Deaf] {
        let (stop, task) = run(&keeper);
        server.network(network);
        sleep(SECOND * 6).await;
        server.network(Network::Fine);
        sleep(SECOND * 6).await;
        assert!(held.is_valid(), "two more renewals fit into the life of a lease");
        drop(stop);
        task.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_paused_process_finds_its_trust_gone() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let held = acquire(&keeper, 1).await;

    // No task of this process runs meanwhile; another one takes the lease.
    advance(SECOND * 20).await;
    let other = acquire(&self::keeper(&server, "bob"), 1).await;

    assert!(!held.is_valid(), "it is gone before anything was renewed");
    assert!(other.fence().epoch > held.fence().epoch);
    assert_eq!(keeper.run_once().await.unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_released_lease_is_forgotten_before_the_server_hears_of_it() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let held = acquire(&keeper, 1).await;
    server.network(Network::Slow(SECOND, SECOND));
    let releasing = tokio::spawn({
        let keeper = Arc::clone(&keeper);
        async move { keeper.release(&[lease(1), lease(7)]).await }
    });
    sleep(MS).await;

    assert!(!held.is_valid(), "nobody works under a lease that is being given away");
    assert!(server.holder(&lease(1)).is_some());
    assert_eq!(releasing.await.unwrap().unwrap(), 1);
    assert!(server.holder(&lease(1)).is_none(), "others get it at once");
    assert_eq!(keeper.release(&[lease(1)]).await.unwrap(), 0, "it is not ours any more");
}

#[tokio::test(start_paused = true)]
async fn a_renewal_under_way_does_not_bring_back_a_released_lease() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let held = [acquire(&keeper, 1).await, acquire(&keeper, 2).await];
    // The renewal happens on the server, its answer comes after the release.
    server.network(Network::Slow(MS, SECOND));
    let renewing = tokio::spawn({
        let keeper = Arc::clone(&keeper);
        async move { keeper.run_once().await }
    });
    sleep(MS * 10).await;
    server.network(Network::Fine);
    keeper.release(&[lease(1)]).await.unwrap();

    assert_eq!(renewing.await.unwrap().unwrap(), [], "a released lease is not a lost one");
    assert!(!held[0].is_valid() && held[1].is_valid());
    assert_eq!(keeper.held(), [held[1].fence().clone()]);
}

#[tokio::test(start_paused = true)]
async fn an_answer_about_an_old_epoch_does_not_touch_the_new_one() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let old = acquire(&keeper, 1).await;
    server.held.lock().unwrap().clear();
    // The server says that the old epoch is lost; before that is heard, the lease is acquired anew.
    server.network(Network::Slow(MS, SECOND));
    let renewing = tokio::spawn({
        let keeper = Arc::clone(&keeper);
        async move { keeper.run_once().await }
    });
    sleep(MS * 10).await;
    server.network(Network::Fine);
    let new = acquire(&keeper, 1).await;

    assert_eq!(renewing.await.unwrap().unwrap(), []);
    assert!(new.fence().epoch > old.fence().epoch);
    assert!(!old.is_valid() && new.is_valid());
    timeout(MS, old.lost()).await.expect("the old epoch is lost");
    assert_eq!(keeper.held(), [new.fence().clone()]);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_has_begun_is_finished_before_the_keeper_stops() {
    let server = Server::new();
    let keeper = keeper(&server, "ann");
    let held = acquire(&keeper, 1).await;
    server.network(Network::Slow(SECOND, SECOND));
    let started = Instant::now();
    let (stop, task) = run(&keeper);
    sleep(MS).await;
    drop(stop);

    task.await.unwrap();

    assert_eq!(started.elapsed(), SECOND * 2);
    assert!(held.is_valid());
}

/// Three keepers fight for three leases on a network that delays, loses and fails, and processes that pause. At every
/// millisecond: at most one keeper trusts a lease, and what it trusts is what the server says.
#[tokio::test(start_paused = true)]
async fn at_most_one_keeper_trusts_a_lease_at_any_time() {
    let mut held_for = 0;
    let mut losses = 0;
    for seed in 1..=8u64 {
        let server = Server::new();
        server.network(Network::Random(seed * 0x9e37_79b9));
        let handles: Arc<Mutex<Vec<(usize, HeldLease)>>> = Arc::default();
        let mut tasks = Vec::new();
        for (number, name) in ["ann", "bob", "cid"].into_iter().enumerate() {
            let keeper = keeper(&server, name);
            tasks.push(run(&keeper).1);
            let handles = Arc::clone(&handles);
            tasks.push(tokio::spawn(async move {
                for round in 0.. {
                    sleep(MS * (700 + 300 * number as u32)).await;
                    let wanted = lease((round + number) % 3);
                    if let Ok(LeaseAcquisition::Won(held)) = keeper.acquire(&wanted).await {
                        handles.lock().unwrap().push((number, held));
                    }
                    // Now and then all is given up, so that leases change hands in good order, too.
                    if round % 17 == 16 {
                        let _ = keeper.release(&[lease(0), lease(1), lease(2)]).await;
                    }
                }
            }));
        }
        for _ in 0..60_000 {
            sleep(MS * 2).await;
            let mut trusted: HashMap<LeaseName, Fence> = HashMap::new();
            let mut handles = handles.lock().unwrap();
            let before = handles.len();
            handles.retain(|(_, held)| held.is_valid());
            losses += before - handles.len();
            for (number, held) in &*handles {
                held_for += 1;
                let fence = held.fence();
                let known = trusted.entry(fence.lease.clone()).or_insert_with(|| fence.clone());
                assert_eq!(known, fence, "seed {seed}: two epochs of one lease are trusted");
                let holder = server.holder(&fence.lease);
                let expected = HolderName::new(["ann", "bob", "cid"][*number]).unwrap();
                assert_eq!(holder, Some((expected, fence.epoch)), "seed {seed}: {fence:?}");
            }
        }
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
    assert!(held_for > 40_000, "expected leases to be held most of the time, found {held_for}");
    assert!(losses > 40, "expected leases to be lost now and then, found {losses}");
}
