//! Leases: one holder at a time, ascending epochs, and lease hints.

use std::sync::Arc;
use std::time::Duration;

use headwater_stream::{
    AcquireResult, Backend, Epoch, Fence, LeaseEventKind, LeaseName, Renewal, WatchMode,
};
use tokio::time::Instant;

use super::env::{StreamTestEnv, holder};
use super::steps::{HOUR, ms, sleep_ms, soon};
use crate::failure::TestResult;

const MINUTE: Duration = Duration::from_secs(60);

/// Acquires a free lease.
async fn win(
    backend: &dyn Backend,
    lease: &LeaseName,
    name: &str,
    ttl: Duration,
) -> TestResult<Fence> {
    match backend.acquire(lease, &holder(name), ttl).await? {
        AcquireResult::Won(epoch) => Ok(Fence { lease: lease.clone(), epoch }),
        held => panic!("expected {name} to win {lease}, found {held:?}"),
    }
}

async fn assert_held(
    env: &StreamTestEnv,
    lease: &LeaseName,
    name: &str,
    epoch: Epoch,
) -> TestResult {
    let found = env.second.leases(std::slice::from_ref(lease)).await?;
    let [Some(info)] = &found[..] else { panic!("expected {name} to hold it, found {found:?}") };
    assert_eq!((info.holder.as_str(), info.epoch), (name, epoch), "{info:?}");
    Ok(())
}

pub async fn a_free_lease_is_acquired_and_then_held(env: StreamTestEnv) -> TestResult {
    let lease = env.lease("orders");
    let fence = win(&*env.backend, &lease, "ann", MINUTE).await?;

    match env.second.acquire(&lease, &holder("bob"), MINUTE).await? {
        AcquireResult::Held { by, remaining } => {
            assert_eq!(by.as_str(), "ann");
            assert!(
                !remaining.is_zero() && remaining <= MINUTE,
                "found {remaining:?} of {MINUTE:?}"
            );
        }
        won => panic!("expected ann to hold it, found {won:?}"),
    }
    assert_held(&env, &lease, "ann", fence.epoch).await
}

pub async fn one_of_32_concurrent_callers_acquires_the_lease(env: StreamTestEnv) -> TestResult {
    let lease = env.lease("orders");
    let tasks = (0..32).map(|number| {
        let backend = if number % 2 == 0 { &env.backend } else { &env.second };
        let (backend, lease) = (Arc::clone(backend), lease.clone());
        tokio::spawn(async move {
            let answer = backend.acquire(&lease, &holder(&format!("h{number}")), MINUTE).await?;
            TestResult::Ok((format!("h{number}"), answer))
        })
    });
    let (mut winners, mut named) = (Vec::new(), Vec::new());
    for task in tasks.collect::<Vec<_>>() {
        match task.await?? {
            (name, AcquireResult::Won(epoch)) => winners.push((name, epoch)),
            (_, AcquireResult::Held { by, .. }) => named.push(by.to_string()),
        }
    }
    let [(winner, epoch)] = &winners[..] else { panic!("expected one winner, found {winners:?}") };
    assert!(named.iter().all(|by| by == winner), "expected all to name {winner}, found {named:?}");
    assert_held(&env, &lease, winner, *epoch).await
}

pub async fn the_holder_reacquires_with_the_same_epoch_and_a_new_ttl(
    env: StreamTestEnv,
) -> TestResult {
    let lease = env.lease("orders");
    let fence = win(&*env.backend, &lease, "ann", ms(10_000)).await?;
    let again = win(&*env.backend, &lease, "ann", HOUR).await?;

    assert_eq!(again, fence);
    let info = env.second.leases(&[lease]).await?.remove(0).expect("ann holds it");
    assert!(info.remaining > MINUTE, "expected about an hour, found {:?}", info.remaining);
    Ok(())
}

pub async fn every_change_of_holder_increases_the_epoch(env: StreamTestEnv) -> TestResult {
    let lease = env.lease("orders");
    let mut epochs = Vec::new();
    for round in 0..3 {
        // Released, expired, and expired and reacquired by the same holder.
        let given_up = win(&*env.backend, &lease, "ann", HOUR).await?;
        env.backend.release(&holder("ann"), std::slice::from_ref(&given_up)).await?;
        epochs.push(given_up.epoch);
        for name in ["bob", "bob", "cid"] {
            epochs.push(win(&*env.second, &lease, name, ms(50)).await?.epoch);
            sleep_ms(90).await;
        }
        assert!(epochs.is_sorted_by(|a, b| a < b), "round {round}: found {epochs:?}");
    }
    Ok(())
}

pub async fn an_epoch_is_at_least_its_acquisition_time(env: StreamTestEnv) -> TestResult {
    let lease = env.lease("orders");
    for _ in 0..3 {
        let before = env.second.now().await?.as_millis();
        let fence = win(&*env.backend, &lease, "ann", HOUR).await?;
        assert!(fence.epoch.0 >= before, "expected at least {before}, found {}", fence.epoch);
        env.second.release(&holder("ann"), &[fence]).await?;
    }
    Ok(())
}

pub async fn a_lease_expires_and_not_before_its_ttl(env: StreamTestEnv) -> TestResult {
    let lease = env.lease("orders");
    let asked = Instant::now();
    let first = win(&*env.second, &lease, "ann", ms(250)).await?;

    let taking = async {
        loop {
            let bob = env.backend.acquire(&lease, &holder("bob"), HOUR).await?;
            if let AcquireResult::Won(epoch) = bob {
                return TestResult::Ok(epoch);
            }
            sleep_ms(5).await;
        }
    };
    let epoch = soon("the lease to expire", taking).await?;

    assert!(asked.elapsed() + ms(20) >= ms(250), "found it free after {:?}", asked.elapsed());
    assert!(epoch > first.epoch, "expected more than {}, found {epoch}", first.epoch);
    Ok(())
}

pub async fn a_renewal_extends_the_lease(env: StreamTestEnv) -> TestResult {
    let lease = env.lease("orders");
    let fence = win(&*env.second, &lease, "ann", ms(10_000)).await?;

    let renewed = env.backend.renew(&holder("ann"), std::slice::from_ref(&fence), HOUR).await?;

    assert_eq!(renewed, [Renewal::Kept]);
    let info = env.second.leases(&[lease]).await?.remove(0).expect("ann holds it");
    assert!(info.remaining > MINUTE, "expected about an hour, found {:?}", info.remaining);
    assert_eq!(info.epoch, fence.epoch, "the epoch stays");
    Ok(())
}

pub async fn a_renewed_lease_outlives_its_original_ttl(env: StreamTestEnv) -> TestResult {
    let lease = env.lease("orders");
    let fence = win(&*env.second, &lease, "ann", ms(5_000)).await?;
    let renewed = env.backend.renew(&holder("ann"), std::slice::from_ref(&fence), MINUTE).await?;
    assert_eq!(renewed, [Renewal::Kept]);
    sleep_ms(5_500).await;
    assert_held(&env, &lease, "ann", fence.epoch).await
}

pub async fn renewal_results_are_in_request_order(env: StreamTestEnv) -> TestResult {
    let names = ["kept", "taken", "released", "never", "expired", "also_kept"];
    let leases = names.map(|name| env.lease(name));
    let mut fences = Vec::new();
    for (name, lease) in names.iter().zip(&leases) {
        let ttl = if *name == "expired" || *name == "taken" { ms(60) } else { HOUR };
        let fence = if *name == "never" {
            Fence { lease: lease.clone(), epoch: Epoch(1) }
        } else {
            win(&*env.second, lease, "ann", ttl).await?
        };
        fences.push(fence);
    }
    sleep_ms(120).await;
    win(&*env.second, &leases[1], "bob", HOUR).await?;
    env.second.release(&holder("ann"), &fences[2..3]).await?;

    let renewed = env.backend.renew(&holder("ann"), &fences, HOUR).await?;

    use Renewal::{Kept, Lost};
    assert_eq!(renewed, [Kept, Lost, Lost, Lost, Lost, Kept], "for {names:?}");
    let found = env.second.leases(&leases).await?;
    assert!(found[4].is_none(), "an expired lease is not renewed, found {:?}", found[4]);
    Ok(())
}

pub async fn a_thousand_leases_are_renewed_and_released_in_one_call(
    env: StreamTestEnv,
) -> TestResult {
    const COUNT: usize = 1000;
    let leases: Vec<LeaseName> = (0..COUNT)
        .map(|n| {
            if n % 10 == 0 {
                env.lease_elsewhere(&n.to_string())
            } else {
                env.lease(&n.to_string())
            }
        })
        .collect();
    let mut fences = Vec::new();
    for chunk in leases.chunks(100) {
        let wins = chunk.iter().map(|lease| win(&*env.second, lease, "ann", MINUTE));
        for fence in futures_util::future::join_all(wins).await {
            fences.push(fence?);
        }
    }

    let renewed = env.backend.renew(&holder("ann"), &fences, HOUR).await?;
    assert_eq!(renewed, [Renewal::Kept; COUNT]);
    let found = env.backend.leases(&leases).await?;
    assert_eq!(found.len(), COUNT);
    for (fence, info) in fences.iter().zip(found) {
        let info = info.unwrap_or_else(|| panic!("expected ann to hold {}", fence.lease));
        assert!(info.epoch == fence.epoch && info.remaining > MINUTE, "{}: {info:?}", fence.lease);
    }

    let released = env.backend.release(&holder("ann"), &fences).await?;
    assert!(released == COUNT || env.is_faulty(), "expected {COUNT}, found {released}");
    assert_eq!(env.second.leases(&leases).await?, [const { None }; COUNT]);
    Ok(())
}

pub async fn renewing_releasing_and_listing_no_leases_succeeds(env: StreamTestEnv) -> TestResult {
    assert_eq!(env.backend.renew(&holder("ann"), &[], HOUR).await?, []);
    assert_eq!(env.backend.release(&holder("ann"), &[]).await?, 0);
    assert_eq!(env.backend.leases(&[]).await?, []);
    Ok(())
}

pub async fn a_released_lease_is_free_at_once(env: StreamTestEnv) -> TestResult {
    let lease = env.lease("orders");
    let fence = win(&*env.second, &lease, "ann", HOUR).await?;

    let released = env.backend.release(&holder("ann"), std::slice::from_ref(&fence)).await?;

    assert!(released == 1 || env.is_faulty(), "expected 1, found {released}");
    let next = win(&*env.second, &lease, "bob", HOUR).await?;
    assert!(next.epoch > fence.epoch, "expected more than {}, found {}", fence.epoch, next.epoch);
    Ok(())
}

pub async fn leases_are_listed_in_request_order(env: StreamTestEnv) -> TestResult {
    let [a, b, free] = [env.lease("a"), env.lease_elsewhere("b"), env.lease("free")];
    let in_a = win(&*env.second, &a, "ann", MINUTE).await?;
    let in_b = win(&*env.second, &b, "bob", HOUR).await?;

    let found = env.backend.leases(&[b.clone(), free, a.clone(), b]).await?;

    let found: Vec<Option<(String, Epoch)>> = found
        .into_iter()
        .map(|info| {
            info.map(|info| {
                assert!(!info.remaining.is_zero() && info.remaining <= HOUR, "{info:?}");
                (info.holder.to_string(), info.epoch)
            })
        })
        .collect();
    let of_b = Some(("bob".to_owned(), in_b.epoch));
    assert_eq!(found, [of_b.clone(), None, Some(("ann".to_owned(), in_a.epoch)), of_b]);
    Ok(())
}

pub async fn a_former_holder_can_neither_renew_nor_release(env: StreamTestEnv) -> TestResult {
    let lease = env.lease("orders");
    let old = win(&*env.second, &lease, "ann", ms(60)).await?;
    sleep_ms(120).await;
    let new = win(&*env.second, &lease, "bob", HOUR).await?;
    let forged = Fence { epoch: new.epoch, ..old.clone() };

    for fence in [old, forged] {
        let renewed = env.backend.renew(&holder("ann"), std::slice::from_ref(&fence), HOUR).await?;
        assert_eq!(renewed, [Renewal::Lost], "{fence:?}");
        assert_eq!(env.backend.release(&holder("ann"), &[fence]).await?, 0);
    }
    assert_held(&env, &lease, "bob", new.epoch).await
}

pub async fn an_older_epoch_of_the_same_holder_can_neither_renew_nor_release(
    env: StreamTestEnv,
) -> TestResult {
    let lease = env.lease("orders");
    let old = win(&*env.second, &lease, "ann", ms(60)).await?;
    sleep_ms(120).await;
    let new = win(&*env.second, &lease, "ann", HOUR).await?;

    let renewed = env.backend.renew(&holder("ann"), &[old.clone(), new.clone()], HOUR).await?;
    assert_eq!(renewed, [Renewal::Lost, Renewal::Kept]);
    assert_eq!(env.backend.release(&holder("ann"), &[old]).await?, 0);

    assert_held(&env, &lease, "ann", new.epoch).await
}

pub async fn a_watch_reports_releases(env: StreamTestEnv) -> TestResult {
    let prefix = env.name("lease", "mine");
    let [mine, other] = [env.lease("mine/1"), env.lease("other")];
    let mut watch = env.backend.watch(&prefix).await?;
    for lease in [&other, &mine] {
        let fence = win(&*env.second, lease, "ann", HOUR).await?;
        env.second.release(&holder("ann"), &[fence]).await?;
    }

    let waiting = async {
        loop {
            let hint = watch.next().await;
            match hint.kind {
                LeaseEventKind::Lagged => assert_eq!(hint.lease, None, "{hint:?}"),
                _ => break hint,
            }
        }
    };
    let hint = soon("a hint", waiting).await;

    assert_eq!((hint.lease, hint.kind), (Some(mine), LeaseEventKind::Released), "only of {prefix}");
    Ok(())
}

pub async fn a_watch_reports_expiration_or_declares_that_it_does_not(
    env: StreamTestEnv,
) -> TestResult {
    let prefix = env.name("lease", "mine");
    let [mine, other] = [env.lease("mine/1"), env.lease("other")];
    let mut watch = env.backend.watch(&prefix).await?;
    if let WatchMode::ReleasesOnly { reason } = watch.mode() {
        assert!(!reason.is_empty(), "there is a reason");
        return Ok(());
    }
    for lease in [&other, &mine] {
        win(&*env.second, lease, "ann", ms(60)).await?;
    }

    let waiting = async {
        loop {
            tokio::select! {
                hint = watch.next() => if hint.kind != LeaseEventKind::Lagged { break hint },
                // A server with many keys reports this expiration late, unless a client accesses the key.
                () = sleep_ms(100) => drop(env.second.leases(std::slice::from_ref(&mine)).await),
            }
        }
    };
    let hint = soon("a hint", waiting).await;

    assert_eq!(
        (hint.lease, hint.kind),
        (Some(mine.clone()), LeaseEventKind::Expired),
        "only of {prefix}"
    );
    Ok(())
}

pub async fn a_cancelled_wait_for_a_hint_does_not_lose_it(env: StreamTestEnv) -> TestResult {
    let lease = env.lease("orders");
    let mut watch = env.backend.watch(&env.name("lease", "")).await?;
    for _ in 0..5 {
        assert!(tokio::time::timeout(ms(5), watch.next()).await.is_err(), "nothing happened yet");
    }
    let fence = win(&*env.second, &lease, "ann", HOUR).await?;
    env.second.release(&holder("ann"), &[fence]).await?;

    let waiting = async {
        loop {
            if let Ok(hint) = tokio::time::timeout(ms(3), watch.next()).await {
                break hint;
            }
        }
    };
    let hint = soon("a hint", waiting).await;
    assert_eq!((hint.lease, hint.kind), (Some(lease), LeaseEventKind::Released));
    Ok(())
}
