//! The lease renewer: a holder learns that it must stop before another holder can acquire its lease.
//!
//! Time is tokio's paused clock. The lease server is a fake that can be slow, unreachable or lose replies.
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

mod lease_server;

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_stream::clock::TestClock;
use headwater_stream::{
    Fence, HeldLease, HolderName, LeaseAcquisition, LeaseName, LeaseRenewer, LeaseRenewerConfig,
    Leases, LossCause, LostLease, LostLeases, StreamError,
};
use tokio::sync::oneshot;
use tokio::time::{Instant, advance, sleep, sleep_until, timeout};

use crate::lease_server::{LeaseServer, Network};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

fn lease(number: usize) -> LeaseName {
    LeaseName::new(format!("lease{number}")).unwrap()
}

fn renewer(server: &Arc<LeaseServer>, name: &str) -> Arc<LeaseRenewer> {
    renewer_and_losses(server, name).0
}

fn renewer_and_losses(server: &Arc<LeaseServer>, name: &str) -> (Arc<LeaseRenewer>, LostLeases) {
    let holder = HolderName::new(name).unwrap();
    let leases: Arc<dyn Leases> = Arc::clone(server) as _;
    let (renewer, losses) =
        LeaseRenewer::new(leases, holder, LeaseRenewerConfig::default()).unwrap();
    (Arc::new(renewer), losses)
}

/// The losses that were reported and not received yet.
fn drain(losses: &mut LostLeases) -> Vec<LostLease> {
    std::iter::from_fn(|| losses.try_recv().ok()).collect()
}

/// How long a lease is valid without renewal: 13.5 s by default.
fn validity() -> Duration {
    let LeaseRenewerConfig { ttl, safety_margin, .. } = LeaseRenewerConfig::default();
    ttl - safety_margin
}

async fn acquire(renewer: &LeaseRenewer, number: usize) -> HeldLease {
    let held = renewer.acquire(&lease(number)).await.unwrap();
    held.won().unwrap_or_else(|| panic!("expected {} to get lease {number}", renewer.holder()))
}

/// Runs a renewer until the sender is dropped or used.
fn run(renewer: &Arc<LeaseRenewer>) -> (oneshot::Sender<()>, tokio::task::JoinHandle<()>) {
    let (stop, stopped) = oneshot::channel();
    let renewer = Arc::clone(renewer);
    let task = tokio::spawn(async move {
        renewer.run(async move { stopped.await.unwrap_or_default() }).await;
    });
    (stop, task)
}

#[test]
fn inconsistent_times_are_rejected() {
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
            other => panic!("expected {argument} to be rejected, found {other:?}"),
        }
        let holder = HolderName::new("ann").unwrap();
        assert!(LeaseRenewer::new(LeaseServer::new(), holder, config).is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_valid_until_shortly_before_it_expires() {
    let server = LeaseServer::new();
    let held = acquire(&renewer(&server, "ann"), 1).await;

    advance(validity() - MS).await;
    assert!(held.is_valid());
    advance(MS).await;
    assert!(!held.is_valid(), "the safety margin has begun");
    assert!(server.holder(&lease(1)).is_some(), "the server still holds the lease");
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_not_valid_after_the_machine_was_suspended() {
    let (server, clock) = (LeaseServer::new(), TestClock::default());
    let holder = HolderName::new("ann").unwrap();
    let leases: Arc<dyn Leases> = Arc::clone(&server) as _;
    let config = LeaseRenewerConfig::default();
    let (renewer, mut losses) =
        LeaseRenewer::with_clock(leases, holder, config, Arc::new(clock.clone())).unwrap();
    let held = acquire(&renewer, 1).await;
    clock.advance(validity() - SECOND * 2);
    assert!(held.is_valid() && renewer.holds(&lease(1)));

    // Only the clock that goes on while the machine is suspended moves.
    clock.advance(SECOND * 3);

    assert!(!held.is_valid() && !renewer.holds(&lease(1)));
    timeout(MS, held.lost()).await.expect("it is lost at once");
    renewer.run_once().await.unwrap();
    let lost: Vec<LossCause> = drain(&mut losses).iter().map(|lost| lost.cause).collect();
    assert_eq!(lost, [LossCause::Lapsed], "and it is not renewed");
}

#[tokio::test(start_paused = true)]
async fn validity_is_counted_from_the_moment_the_request_was_sent() {
    let server = LeaseServer::new();
    server.network(Network::Slow(MS * 10, SECOND * 4));
    let renewer = renewer(&server, "ann");
    let sent = Instant::now();
    let held = acquire(&renewer, 1).await;
    assert_eq!(sent.elapsed(), SECOND * 4 + MS * 10);

    held.lost().await;

    assert_eq!(
        sent.elapsed(),
        validity(),
        "a slow reply shortens the validity and never extends it"
    );
}

#[tokio::test(start_paused = true)]
async fn validity_of_a_renewed_lease_is_counted_from_the_moment_the_renewal_was_sent() {
    let server = LeaseServer::new();
    let (renewer, mut losses) = renewer_and_losses(&server, "ann");
    let held = acquire(&renewer, 1).await;
    advance(SECOND * 5).await;
    server.network(Network::Slow(MS, SECOND * 4));
    let sent = Instant::now();
    renewer.run_once().await.unwrap();
    assert_eq!(drain(&mut losses), []);

    held.lost().await;

    assert_eq!(sent.elapsed(), validity());
}

#[tokio::test(start_paused = true)]
async fn a_lease_whose_reply_came_too_late_is_not_valid() {
    let server = LeaseServer::new();
    server.network(Network::Slow(MS, validity()));
    let renewer = renewer(&server, "ann");
    let held = acquire(&renewer, 1).await;

    assert!(!held.is_valid());
    timeout(MS, held.lost()).await.expect("it is lost from the start");
}

#[tokio::test(start_paused = true)]
async fn a_lease_of_another_holder_is_not_acquired() {
    let server = LeaseServer::new();
    let ann = renewer(&server, "ann");
    acquire(&ann, 1).await;
    let bob = renewer(&server, "bob");

    match bob.acquire(&lease(1)).await.unwrap() {
        LeaseAcquisition::Held { by, remaining } => {
            assert_eq!(&by, ann.holder());
            assert!(remaining > Duration::ZERO && remaining <= LeaseRenewerConfig::default().ttl);
        }
        LeaseAcquisition::Won(held) => panic!("bob acquired {held:?} as well"),
    }
    assert_eq!(bob.held(), []);
    assert_eq!(ann.held().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn acquiring_a_held_lease_again_extends_it() {
    let renewer = renewer(&LeaseServer::new(), "ann");
    let first = acquire(&renewer, 1).await;
    advance(SECOND * 10).await;
    let again = acquire(&renewer, 1).await;

    assert_eq!(first.fence(), again.fence());
    advance(SECOND * 10).await;
    assert!(first.is_valid() && again.is_valid(), "both handles see the new time");
    assert_eq!(renewer.held(), [first.fence().clone()]);
}

#[tokio::test(start_paused = true)]
async fn all_leases_are_renewed_in_one_call() {
    let server = LeaseServer::new();
    let (renewer, mut losses) = renewer_and_losses(&server, "ann");
    let mut held = Vec::new();
    for number in 0..1000 {
        held.push(acquire(&renewer, number).await);
    }
    advance(SECOND * 10).await;

    renewer.run_once().await.unwrap();
    assert_eq!(drain(&mut losses), []);

    assert_eq!(server.renewals.load(Ordering::SeqCst), 1);
    advance(SECOND * 10).await;
    assert!(held.iter().all(HeldLease::is_valid));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_while_no_lease_is_held() {
    let server = LeaseServer::new();
    renewer(&server, "ann").run_once().await.unwrap();
    assert_eq!(server.renewals.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_running_renewer_keeps_its_leases() {
    let server = LeaseServer::new();
    let renewer = renewer(&server, "ann");
    let held = acquire(&renewer, 1).await;
    let (stop, task) = run(&renewer);

    assert!(timeout(SECOND * 600, held.lost()).await.is_err(), "the lease was lost");
    assert!(held.is_valid());

    drop(stop);
    timeout(SECOND, task).await.expect("it stops on shutdown").unwrap();
    let stopped = Instant::now();
    held.lost().await;
    assert!(stopped.elapsed() <= validity(), "the lease is no longer renewed");
}

#[tokio::test(start_paused = true)]
async fn a_lost_lease_is_reported_once() {
    let server = LeaseServer::new();
    let (renewer, mut losses) = renewer_and_losses(&server, "ann");
    let held = [acquire(&renewer, 1).await, acquire(&renewer, 2).await];
    server.held.lock().unwrap().remove(&lease(1));

    renewer.run_once().await.unwrap();
    let lost = drain(&mut losses);

    let fence = held[0].fence().clone();
    assert_eq!(lost, [LostLease { fence, cause: LossCause::LostOnServer }]);
    assert!(!held[0].is_valid() && held[1].is_valid());
    timeout(MS, held[0].lost()).await.expect("handles are notified");
    renewer.run_once().await.unwrap();
    assert_eq!(drain(&mut losses), [], "it is reported once");
    assert_eq!(renewer.held(), [held[1].fence().clone()]);
}

#[tokio::test(start_paused = true)]
async fn all_tasks_that_wait_for_the_loss_are_woken() {
    let server = LeaseServer::new();
    let renewer = renewer(&server, "ann");
    let held = acquire(&renewer, 1).await;
    let waiting: Vec<_> = (0..10)
        .map(|_| {
            let held = held.clone();
            tokio::spawn(async move { held.lost().await })
        })
        .collect();
    // A dropped wait does not affect the others.
    assert!(timeout(MS, held.lost()).await.is_err());
    server.held.lock().unwrap().clear();

    renewer.run_once().await.unwrap();

    for task in waiting {
        timeout(MS, task).await.expect("it is woken").unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_lapsed_while_the_server_was_unreachable_is_released_and_stays_lost() {
    let server = LeaseServer::new();
    let (renewer, mut losses) = renewer_and_losses(&server, "ann");
    let held = acquire(&renewer, 1).await;
    let acquired = Instant::now();
    server.network(Network::Unreachable);
    let (_stop, _task) = run(&renewer);

    held.lost().await;
    assert_eq!(acquired.elapsed(), validity());
    assert!(server.holder(&lease(1)).is_some(), "the holder stopped before the lease expired");

    // The server still holds the lease. It is released, not renewed.
    server.network(Network::Healthy);
    sleep_until(acquired + validity() + MS * 1_400).await;
    renewer.run_once().await.unwrap();
    let lost = drain(&mut losses);
    assert_eq!(lost, [lapsed(&held)]);
    assert!(!held.is_valid());
    assert!(server.holder(&lease(1)).is_none(), "other holders can acquire it");
    assert_eq!(renewer.held(), []);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_whose_reply_arrives_after_the_lapse_does_not_restore_the_lease() {
    let server = LeaseServer::new();
    let (renewer, mut losses) = renewer_and_losses(&server, "ann");
    let held = acquire(&renewer, 1).await;
    let acquired = Instant::now();
    advance(validity() - SECOND).await;
    // It is sent in time and executed; its reply arrives just after the lease has lapsed.
    server.network(Network::Slow(MS, SECOND));
    let renewing = tokio::spawn({
        let renewer = Arc::clone(&renewer);
        async move { renewer.run_once().await }
    });
    held.lost().await;
    assert_eq!(acquired.elapsed(), validity());

    renewing.await.unwrap().unwrap();
    let lost = drain(&mut losses);

    assert_eq!(lost, [lapsed(&held)]);
    assert!(!held.is_valid(), "a holder that was notified of the loss must not become owner again");
    assert!(server.holder(&lease(1)).is_none(), "the renewed lease is released");
    renewer.run_once().await.unwrap();
    assert_eq!(drain(&mut losses), [], "it is reported once");
}

#[tokio::test(start_paused = true)]
async fn a_lapse_is_reported_immediately_and_once() {
    let server = LeaseServer::new();
    let (renewer, mut losses) = renewer_and_losses(&server, "ann");
    let (_stop, _task) = run(&renewer);
    sleep(SECOND).await;
    let held = acquire(&renewer, 1).await;
    let acquired = Instant::now();
    server.network(Network::Unreachable);

    assert_eq!(losses.recv().await, Some(lapsed(&held)));

    assert_eq!(acquired.elapsed(), validity());
    assert!(!held.is_valid());
    server.network(Network::Healthy);
    renewer.run_once().await.unwrap();
    assert!(timeout(SECOND * 60, losses.recv()).await.is_err());
}

/// The server of one lease does not answer.
#[tokio::test(start_paused = true)]
async fn a_lease_whose_renewal_is_unknown_lapses_and_the_others_are_kept() {
    let server = LeaseServer::new();
    let (renewer, mut losses) = renewer_and_losses(&server, "ann");
    let held = [acquire(&renewer, 1).await, acquire(&renewer, 2).await];
    let acquired = Instant::now();
    server.unknown.lock().unwrap().insert(lease(1));
    let (_stop, _task) = run(&renewer);

    assert_eq!(losses.recv().await, Some(lapsed(&held[0])));

    assert_eq!(acquired.elapsed(), validity());
    assert!(!held[0].is_valid() && held[1].is_valid());
    assert!(timeout(SECOND * 60, losses.recv()).await.is_err(), "the other lease is renewed");
    assert!(renewer.renewed() > 0);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_was_unknown_once_is_repeated_in_time() {
    let server = LeaseServer::new();
    let (renewer, mut losses) = renewer_and_losses(&server, "ann");
    let held = acquire(&renewer, 1).await;
    server.unknown.lock().unwrap().insert(lease(1));
    assert!(renewer.run_once().await.is_err(), "the caller learns that it must be repeated");
    let (_stop, _task) = run(&renewer);
    sleep(SECOND * 12).await;
    server.unknown.lock().unwrap().clear();
    sleep(SECOND * 60).await;

    assert!(held.is_valid());
    assert_eq!(drain(&mut losses), []);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_was_dropped_is_released_soon() {
    let server = LeaseServer::new();
    let (renewer, mut losses) = renewer_and_losses(&server, "ann");
    let held = acquire(&renewer, 1).await;
    let (_stop, _task) = run(&renewer);
    sleep(SECOND).await;

    renewer.release_later(&lease(1));
    assert!(!held.is_valid(), "at once");
    sleep(MS).await;

    assert!(server.holder(&lease(1)).is_none(), "without waiting for the next renewal");
    assert_eq!(drain(&mut losses), [], "a released lease is not a lost one");
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_lapsed_is_acquired_again_with_a_new_epoch() {
    let server = LeaseServer::new();
    let (renewer, mut losses) = renewer_and_losses(&server, "ann");
    let old = acquire(&renewer, 1).await;
    advance(validity()).await;
    assert!(server.holder(&lease(1)).is_some(), "the server still holds it");

    let new = acquire(&renewer, 1).await;

    assert!(new.fence().epoch > old.fence().epoch, "{new:?} {old:?}");
    assert!(new.is_valid() && !old.is_valid());
    renewer.run_once().await.unwrap();
    assert_eq!(drain(&mut losses), [lapsed(&old)]);
    assert!(new.is_valid());
    assert_eq!(renewer.held(), [new.fence().clone()]);
}

#[tokio::test(start_paused = true)]
async fn a_failed_release_is_retried() {
    let server = LeaseServer::new();
    let (renewer, mut losses) = renewer_and_losses(&server, "ann");
    acquire(&renewer, 1).await;
    server.network(Network::Unreachable);
    assert!(renewer.release(&[lease(1)]).await.is_err());
    assert!(server.holder(&lease(1)).is_some());

    server.network(Network::Healthy);
    renewer.run_once().await.unwrap();
    assert_eq!(drain(&mut losses), [], "a released lease is not a lost one");

    assert!(server.holder(&lease(1)).is_none());
}

fn lapsed(held: &HeldLease) -> LostLease {
    LostLease { fence: held.fence().clone(), cause: LossCause::Lapsed }
}

#[tokio::test(start_paused = true)]
async fn one_lost_reply_does_not_lose_a_lease() {
    let server = LeaseServer::new();
    let renewer = renewer(&server, "ann");
    let held = acquire(&renewer, 1).await;
    for network in [Network::ReplyLost, Network::Unreachable] {
        let (stop, task) = run(&renewer);
        server.network(network);
        sleep(SECOND * 6).await;
        server.network(Network::Healthy);
        sleep(SECOND * 6).await;
        assert!(held.is_valid(), "two more renewals fit into the ttl");
        drop(stop);
        task.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_paused_process_finds_its_leases_invalid() {
    let server = LeaseServer::new();
    let (renewer, mut losses) = renewer_and_losses(&server, "ann");
    let held = acquire(&renewer, 1).await;

    // No task of this process runs meanwhile; another process acquires the lease.
    advance(SECOND * 20).await;
    let other = acquire(&self::renewer(&server, "bob"), 1).await;

    assert!(!held.is_valid(), "it is invalid before any renewal");
    assert!(other.fence().epoch > held.fence().epoch);
    renewer.run_once().await.unwrap();
    assert_eq!(drain(&mut losses).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_released_lease_is_invalid_before_the_server_releases_it() {
    let server = LeaseServer::new();
    let renewer = renewer(&server, "ann");
    let held = acquire(&renewer, 1).await;
    server.network(Network::Slow(SECOND, SECOND));
    let releasing = tokio::spawn({
        let renewer = Arc::clone(&renewer);
        async move { renewer.release(&[lease(1), lease(7)]).await }
    });
    sleep(MS).await;

    assert!(!held.is_valid(), "no owner may work under a lease that is being released");
    assert!(server.holder(&lease(1)).is_some());
    assert_eq!(releasing.await.unwrap().unwrap(), 1);
    assert!(server.holder(&lease(1)).is_none(), "other holders can acquire it at once");
    assert_eq!(renewer.release(&[lease(1)]).await.unwrap(), 0, "it is no longer held");
}

#[tokio::test(start_paused = true)]
async fn a_renewal_in_flight_does_not_restore_a_released_lease() {
    let server = LeaseServer::new();
    let (renewer, mut losses) = renewer_and_losses(&server, "ann");
    let held = [acquire(&renewer, 1).await, acquire(&renewer, 2).await];
    // The renewal is executed; its reply arrives after the release.
    server.network(Network::Slow(MS, SECOND));
    let renewing = tokio::spawn({
        let renewer = Arc::clone(&renewer);
        async move { renewer.run_once().await }
    });
    sleep(MS * 10).await;
    server.network(Network::Healthy);
    renewer.release(&[lease(1)]).await.unwrap();

    renewing.await.unwrap().unwrap();
    assert_eq!(drain(&mut losses), [], "a released lease is not a lost one");
    assert!(!held[0].is_valid() && held[1].is_valid());
    assert_eq!(renewer.held(), [held[1].fence().clone()]);
}

#[tokio::test(start_paused = true)]
async fn a_reply_about_an_old_epoch_does_not_affect_the_new_one() {
    let server = LeaseServer::new();
    let (renewer, mut losses) = renewer_and_losses(&server, "ann");
    let old = acquire(&renewer, 1).await;
    server.held.lock().unwrap().clear();
    // The server reports the old epoch as lost; before the reply arrives, the lease is acquired again.
    server.network(Network::Slow(MS, SECOND));
    let renewing = tokio::spawn({
        let renewer = Arc::clone(&renewer);
        async move { renewer.run_once().await }
    });
    sleep(MS * 10).await;
    server.network(Network::Healthy);
    let new = acquire(&renewer, 1).await;

    renewing.await.unwrap().unwrap();
    assert_eq!(drain(&mut losses), []);
    assert!(new.fence().epoch > old.fence().epoch);
    assert!(!old.is_valid() && new.is_valid());
    timeout(MS, old.lost()).await.expect("the old epoch is lost");
    assert_eq!(renewer.held(), [new.fence().clone()]);
}

#[tokio::test(start_paused = true)]
async fn a_started_renewal_is_completed_before_the_renewer_stops() {
    let server = LeaseServer::new();
    let renewer = renewer(&server, "ann");
    let held = acquire(&renewer, 1).await;
    server.network(Network::Slow(SECOND, SECOND));
    let started = Instant::now();
    let (stop, task) = run(&renewer);
    sleep(MS).await;
    drop(stop);

    task.await.unwrap();

    assert_eq!(started.elapsed(), SECOND * 2);
    assert!(held.is_valid());
}

/// Three renewers compete for three leases on a network that delays, loses and fails calls. At every check at most one of them
/// considers a lease valid, and the server agrees.
#[tokio::test(start_paused = true)]
async fn a_lease_is_valid_for_at_most_one_renewer_at_any_time() {
    let mut held_for = 0;
    let mut losses = 0;
    for seed in 1..=8u64 {
        let server = LeaseServer::new();
        server.network(Network::Random(seed * 0x9e37_79b9));
        let handles: Arc<Mutex<Vec<(usize, HeldLease)>>> = Arc::default();
        let mut tasks = Vec::new();
        for (number, name) in ["ann", "bob", "cid"].into_iter().enumerate() {
            let renewer = renewer(&server, name);
            tasks.push(run(&renewer).1);
            let handles = Arc::clone(&handles);
            tasks.push(tokio::spawn(async move {
                for round in 0.. {
                    sleep(MS * (700 + 300 * number as u32)).await;
                    let wanted = lease((round + number) % 3);
                    if let Ok(LeaseAcquisition::Won(held)) = renewer.acquire(&wanted).await {
                        handles.lock().unwrap().push((number, held));
                    }
                    // Sometimes all leases are released, so that leases also change holders by release.
                    if round % 17 == 16 {
                        let _ = renewer.release(&[lease(0), lease(1), lease(2)]).await;
                    }
                }
            }));
        }
        for _ in 0..60_000 {
            sleep(MS * 2).await;
            let mut valid: HashMap<LeaseName, Fence> = HashMap::new();
            let mut handles = handles.lock().unwrap();
            let before = handles.len();
            handles.retain(|(_, held)| held.is_valid());
            losses += before - handles.len();
            for (number, held) in &*handles {
                held_for += 1;
                let fence = held.fence();
                let known = valid.entry(fence.lease.clone()).or_insert_with(|| fence.clone());
                assert_eq!(known, fence, "seed {seed}: two epochs of one lease are valid");
                let holder = server.holder(&fence.lease);
                let expected = HolderName::new(["ann", "bob", "cid"][*number]).unwrap();
                assert_eq!(holder, Some((expected, fence.epoch)), "seed {seed}: {fence:?}");
            }
        }
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
    assert!(held_for > 40_000, "expected leases to be held most of the time, found {held_for}");
    assert!(losses > 40, "expected some leases to be lost, found {losses}");
}
