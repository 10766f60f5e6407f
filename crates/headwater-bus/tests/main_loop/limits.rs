//! Budgets and deadlines are enforced and passed on.

use std::sync::Arc;
use std::time::Duration;

use headwater_bus::{
    Budget, MainLoopConfig, MainLoopError, RequestFailure, RequestId, RequestUsage, Submission,
};
use serde_json::{Value, json};

use crate::fixture::{Ask, Fixture, Given, LIMIT, Loop, begun, fast_config, quick_lease};

on_streams![
    a_request_over_its_budget_ends_even_if_it_ignores_the_error,
    each_budget_limit_ends_a_request,
    a_request_may_use_up_its_budget,
    a_request_ends_at_its_deadline_and_at_the_run_timeout,
    a_request_whose_deadline_passed_while_waiting_is_not_started,
    a_sub_request_gets_the_remaining_budget_and_is_charged,
];

mod on_backends {
    use super::*;
    on_streams![a_request_that_blocks_its_worker_beyond_the_lease_fails_at_the_crash_limit];
}

/// Each worker loses its lock, survives, and gets the request again.
async fn a_request_that_blocks_its_worker_beyond_the_lease_fails_at_the_crash_limit(
    fixture: Fixture,
) {
    // The group must not consider the process dead, which it would count: only the lock is lost.
    let main_loop = Loop::default();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let worker = std::thread::spawn({
        let (fixture, main_loop) = (fixture.again(), main_loop.clone());
        move || {
            // One thread: a blocked thread blocks the renewal of the lock, too.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let config =
                    MainLoopConfig { max_crashes: 2, lease: quick_lease(), ..fast_config() };
                let worker = fixture.worker_with(&main_loop, config).await;
                let _ = stopped.await;
                worker.stop().await.unwrap();
            });
        }
    });
    let client = fixture.client("desk").await;
    let blocks = quick_lease().ttl.as_millis() as u64 + 500;
    let submit = Submission::new(Ask::Block(blocks)).id(RequestId::new("blocks").unwrap());
    let submit = submit.timeout(LIMIT * 2);
    let failed = client.submit::<_, Value>(submit).await.unwrap_err();
    assert_eq!(failed.failure(), Some(RequestFailure::Crashed), "{failed}");
    assert_eq!(begun(&main_loop, "blocks"), 2);
    // The worker continues.
    let fine =
        client.submit::<_, String>(Submission::new(Ask::Echo("a".to_owned()))).await.unwrap();
    assert_eq!(fine.output, "a");
    let _ = stop.send(());
    tokio::task::spawn_blocking(move || worker.join().unwrap()).await.unwrap();
}

fn tokens(max: u64) -> Budget {
    Budget { max_total_tokens: Some(max), ..Budget::default() }
}

async fn a_request_over_its_budget_ends_even_if_it_ignores_the_error(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    for is_stubborn in [false, true] {
        // A stubborn request would otherwise run forever.
        let charges = if is_stubborn { u64::MAX } else { 11 };
        let ask = Ask::Spend { tokens: 10, charges, is_stubborn };
        let id = RequestId::new(format!("stubborn {is_stubborn}")).unwrap();
        let submit = Submission::new(ask).budget(tokens(100)).id(id.clone());
        let error = client.submit::<_, Value>(submit).await.unwrap_err();
        let MainLoopError::Failed(failed) = error else { panic!("{error}") };
        assert_eq!(failed.kind, RequestFailure::OverBudget);
        assert!(failed.usage.input_tokens > 100 && failed.session.is_some(), "{failed:?}");
        assert_eq!(begun(&main_loop, id.as_str()), 1, "it is not tried again");
    }
    worker.stop().await.unwrap();
}

async fn each_budget_limit_ends_a_request(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    // Each charge is one call with ten input tokens that costs one millionth.
    for (budget, what, charges) in [
        (tokens(40), "50 of 40 total tokens", 5),
        (Budget { max_input_tokens: Some(40), ..Budget::default() }, "50 of 40 input tokens", 5),
        (Budget { max_calls: Some(3), ..Budget::default() }, "4 of 3 calls", 4),
        (Budget { max_cost_micros: Some(2), ..Budget::default() }, "3 of 2 millionths of cost", 3),
    ] {
        let ask = Ask::Spend { tokens: 10, charges: 100, is_stubborn: false };
        let error =
            client.submit::<_, Value>(Submission::new(ask).budget(budget)).await.unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
        let MainLoopError::Failed(failed) = error else { panic!("{error}") };
        assert_eq!(failed.kind, RequestFailure::OverBudget);
        assert_eq!((failed.usage.calls, failed.usage.cost_micros), (charges, charges));
    }
    worker.stop().await.unwrap();
}

async fn a_request_may_use_up_its_budget(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = fixture.client("desk").await;
    let ask = Ask::Spend { tokens: 10, charges: 10, is_stubborn: false };
    let budget = Budget { max_calls: Some(10), max_cost_micros: Some(10), ..tokens(100) };
    let done = client.submit::<_, RequestUsage>(Submission::new(ask).budget(budget)).await.unwrap();
    assert_eq!(done.output, done.usage);
    assert_eq!((done.usage.input_tokens, done.usage.calls), (100, 10));
    worker.stop().await.unwrap();
}

async fn a_request_ends_at_its_deadline_and_at_the_run_timeout(fixture: Fixture) {
    let main_loop = Loop::default();
    let config = MainLoopConfig { run_timeout: Duration::from_secs(2), ..fast_config() };
    let worker = fixture.worker_with(&main_loop, config).await;
    let client = fixture.client("desk").await;
    let asking = [("own", Some(1)), ("any", Some(3600)), ("none", None)].map(|(name, seconds)| {
        let submit = Submission::new(Ask::Wait(String::new())).id(RequestId::new(name).unwrap());
        client.submit::<_, Value>(match seconds {
            Some(seconds) => submit.within(Duration::from_secs(seconds)),
            None => submit,
        })
    });
    for failed in futures_util::future::join_all(asking).await {
        let failed = failed.unwrap_err();
        assert_eq!(failed.failure(), Some(RequestFailure::DeadlinePassed), "{failed}");
    }
    // On a slow machine, the first may time out before it starts.
    let begun = [begun(&main_loop, "own"), begun(&main_loop, "any"), begun(&main_loop, "none")];
    assert!(begun == [1, 1, 1] || begun == [0, 1, 1], "{begun:?}");
    let dropped = main_loop.log.lines().iter().filter(|line| line.starts_with("dropped")).count();
    assert_eq!(dropped, begun.iter().sum::<usize>(), "nothing runs on");
    worker.stop().await.unwrap();
}

async fn a_request_whose_deadline_passed_while_waiting_is_not_started(fixture: Fixture) {
    // The worker is at its concurrency limit, so the request waits.
    let main_loop = Loop::default();
    let config = MainLoopConfig { concurrency: 1, ..fast_config() };
    let worker = fixture.worker_with(&main_loop, config).await;
    let client = fixture.client("desk").await;
    let first = client.submit::<_, String>(Submission::new(Ask::Wait("a".to_owned())));
    let late = async {
        main_loop.begun.notified().await;
        let submit = Submission::new(Ask::Echo("b".to_owned()))
            .id(RequestId::new("late").unwrap())
            .within(Duration::from_millis(50));
        let (failed, ()) = tokio::join!(client.submit::<_, String>(submit), async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            main_loop.open_gate();
        });
        failed
    };
    let (first, failed) = tokio::join!(first, late);
    assert_eq!(first.unwrap().output, "a");
    assert_eq!(failed.unwrap_err().failure(), Some(RequestFailure::DeadlinePassed));
    assert_eq!(begun(&main_loop, "late"), 0);
    worker.stop().await.unwrap();
}

async fn a_sub_request_gets_the_remaining_budget_and_is_charged(fixture: Fixture) {
    let main_loop = Loop::default();
    let worker = fixture.worker(&main_loop).await;
    let client = Arc::new(fixture.client("desk").await);
    *main_loop.client.lock().unwrap() = Some(Arc::new(fixture.client("main-loop").await));
    let submit = Submission::new(Ask::Delegate { tokens: 30 })
        .budget(Budget { max_calls: Some(5), ..tokens(100) })
        .within(Duration::from_secs(40));
    let done = client.submit::<_, (Given, RequestUsage)>(submit).await.unwrap();
    let (given, used) = done.output;
    assert_eq!(given.budget, Budget { max_calls: Some(4), ..tokens(70) });
    assert!(given.time_left_ms <= 40_000, "{given:?}");
    assert_eq!(used, RequestUsage { input_tokens: 37, calls: 1, ..RequestUsage::default() });
    assert_eq!(done.usage, used);

    let submit = Submission::new(Ask::Limits)
        .resources(json!({ "tool": "search" }))
        .within(Duration::MAX)
        .timeout(Duration::MAX);
    let given = client.submit::<_, Given>(submit).await.unwrap().output;
    assert_eq!(given.resources, json!({ "tool": "search" }));
    assert_eq!(given.budget, Budget::default(), "without a budget there is no limit");
    worker.stop().await.unwrap();
}
