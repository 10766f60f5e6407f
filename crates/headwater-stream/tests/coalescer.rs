//! The coalescer: batching, order, limits, and callers that are dropped meanwhile.

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::poll;
use headwater_stream::{BatchError, Coalescer, CoalescerConfig};
use tokio::sync::{Semaphore, mpsc};

/// A batch function that records each batch and blocks until it gets a permit.
struct Gate {
    batches: mpsc::UnboundedReceiver<Vec<u32>>,
    permits: Arc<Semaphore>,
}

impl Gate {
    fn new(config: CoalescerConfig) -> (Arc<Coalescer<u32, u32>>, Self) {
        let (sender, batches) = mpsc::unbounded_channel();
        let permits = Arc::new(Semaphore::new(0));
        let gate = Arc::clone(&permits);
        let execute_batch = move |batch: Vec<u32>| {
            let (sender, gate) = (sender.clone(), Arc::clone(&gate));
            async move {
                let _ = sender.send(batch.clone());
                gate.acquire().await.expect("never closed").forget();
                batch.into_iter().map(|request| request * 10).collect()
            }
        };
        (
            Arc::new(Coalescer::new(config, execute_batch).expect("valid settings")),
            Self { batches, permits },
        )
    }

    async fn batch(&mut self) -> Vec<u32> {
        self.batches.recv().await.expect("the function is running")
    }

    fn open(&self) {
        self.permits.add_permits(1000);
    }
}

fn spawn(
    coalescer: &Arc<Coalescer<u32, u32>>,
    request: u32,
) -> tokio::task::JoinHandle<Result<u32, BatchError>> {
    let coalescer = Arc::clone(coalescer);
    tokio::spawn(async move { coalescer.call(request).await })
}

/// Lets all other tasks of this thread run until they block.
async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn requests_made_while_a_batch_is_in_flight_share_the_next_batch() {
    let (coalescer, mut gate) = Gate::new(CoalescerConfig::default());
    let first = spawn(&coalescer, 1);
    assert_eq!(gate.batch().await, [1], "a single caller is not delayed");
    let others: Vec<_> = (2..=5).map(|request| spawn(&coalescer, request)).collect();
    settle().await;

    gate.open();

    assert_eq!(gate.batch().await, [2, 3, 4, 5]);
    assert_eq!(first.await.unwrap(), Ok(10));
    for (other, request) in others.into_iter().zip(2..) {
        assert_eq!(other.await.unwrap(), Ok(request * 10));
    }
}

#[tokio::test]
async fn a_batch_has_at_most_max_items() {
    let config = CoalescerConfig { max_items: 3, ..Default::default() };
    let (coalescer, mut gate) = Gate::new(config);
    let first = spawn(&coalescer, 0);
    assert_eq!(gate.batch().await, [0]);
    let others: Vec<_> = (1..=7).map(|request| spawn(&coalescer, request)).collect();
    settle().await;
    gate.open();
    assert_eq!(gate.batch().await, [1, 2, 3]);
    assert_eq!(gate.batch().await, [4, 5, 6]);
    assert_eq!(gate.batch().await, [7]);
    first.await.unwrap().unwrap();
    for other in others {
        other.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_batch_has_at_most_max_bytes_and_a_larger_request_gets_its_own() {
    let config = CoalescerConfig { max_bytes: 10, ..Default::default() };
    let (coalescer, mut gate) = Gate::new(config);
    let first = spawn(&coalescer, 0);
    assert_eq!(gate.batch().await, [0]);
    let weights = [(1, 4), (2, 4), (3, 4), (4, usize::MAX), (5, 1), (6, 9)];
    let calls = join_all(weights.map(|(request, bytes)| coalescer.call_with_size(request, bytes)));
    let opening = async {
        settle().await;
        gate.open();
    };
    let (responses, ()) = tokio::join!(calls, opening);
    assert!(responses.iter().all(Result::is_ok));
    assert_eq!(gate.batch().await, [1, 2]);
    assert_eq!(gate.batch().await, [3]);
    assert_eq!(gate.batch().await, [4]);
    assert_eq!(gate.batch().await, [5, 6]);
    first.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_first_request_lingers_for_at_most_the_linger_time() {
    let linger = Duration::from_millis(2);
    let config = CoalescerConfig { linger, max_items: 4, ..Default::default() };
    let (coalescer, mut gate) = Gate::new(config);
    gate.open();
    let started = tokio::time::Instant::now();
    let both = tokio::join!(coalescer.call(1), coalescer.call(2));
    assert_eq!(both, (Ok(10), Ok(20)));
    assert_eq!(gate.batch().await, [1, 2]);
    assert!(started.elapsed() >= linger, "it waited {:?}", started.elapsed());
    assert!(started.elapsed() < 2 * linger, "it waited {:?}", started.elapsed());

    // A full batch does not linger.
    let started = tokio::time::Instant::now();
    join_all((1..=4).map(|request| coalescer.call(request))).await;
    assert_eq!(gate.batch().await, [1, 2, 3, 4]);
    assert_eq!(started.elapsed(), Duration::ZERO);
}

#[tokio::test]
async fn at_most_in_flight_max_batches_run_and_they_start_in_order() {
    let config = CoalescerConfig { max_items: 1, in_flight_max: 3, ..Default::default() };
    let (coalescer, mut gate) = Gate::new(config);
    let callers: Vec<_> = (0..9).map(|request| spawn(&coalescer, request)).collect();
    for request in 0..3 {
        assert_eq!(gate.batch().await, [request]);
    }
    settle().await;
    assert!(gate.batches.try_recv().is_err(), "a fourth batch was started");
    gate.open();
    for request in 3..9 {
        assert_eq!(gate.batch().await, [request]);
    }
    for (caller, request) in callers.into_iter().zip(0..) {
        assert_eq!(caller.await.unwrap(), Ok(request * 10));
    }
}

#[tokio::test]
async fn a_queued_request_is_removed_when_its_caller_is_dropped() {
    let (coalescer, mut gate) = Gate::new(CoalescerConfig::default());
    let first = spawn(&coalescer, 1);
    assert_eq!(gate.batch().await, [1]);
    let [second, third] = [2, 3].map(|request| spawn(&coalescer, request));
    settle().await;
    second.abort();
    assert!(second.await.unwrap_err().is_cancelled());
    gate.open();
    assert_eq!(gate.batch().await, [3]);
    assert_eq!((first.await.unwrap(), third.await.unwrap()), (Ok(10), Ok(30)));
}

#[tokio::test]
async fn a_request_in_flight_is_executed_when_its_caller_is_dropped() {
    let done = Arc::new(AtomicUsize::new(0));
    let started = Arc::new(Semaphore::new(0));
    let lets = Arc::new(Semaphore::new(0));
    let (count, has_started, gate) = (Arc::clone(&done), Arc::clone(&started), Arc::clone(&lets));
    let coalescer = Coalescer::new(CoalescerConfig::default(), move |batch: Vec<u32>| {
        let (count, has_started, gate) =
            (Arc::clone(&count), Arc::clone(&has_started), Arc::clone(&gate));
        async move {
            has_started.add_permits(1);
            gate.acquire().await.expect("never closed").forget();
            count.fetch_add(batch.len(), Ordering::SeqCst);
            batch
        }
    })
    .unwrap();
    let mut call = Box::pin(coalescer.call(1));
    assert!(poll!(&mut call).is_pending());
    started.acquire().await.unwrap().forget();
    drop(call);
    lets.add_permits(1);

    coalescer.close().await;

    assert_eq!(done.load(Ordering::SeqCst), 1, "close waits for batches in flight");
}

#[tokio::test]
async fn a_caller_that_stops_polling_does_not_block_others() {
    let (coalescer, gate) = Gate::new(CoalescerConfig::default());
    gate.open();
    let mut asleep = Box::pin(coalescer.call(1));
    assert!(poll!(&mut asleep).is_pending());
    assert_eq!(coalescer.call(2).await, Ok(20));
    assert_eq!(asleep.await, Ok(10));
}

#[tokio::test]
async fn a_batch_that_panics_or_returns_too_few_responses_does_not_affect_others() {
    let coalescer = Coalescer::new(CoalescerConfig::default(), |batch: Vec<u32>| async move {
        assert_ne!(batch[0], 13, "unlucky");
        if batch[0] == 0 { Vec::new() } else { batch }
    })
    .unwrap();
    assert_eq!(coalescer.call(13).await, Err(BatchError));
    assert_eq!(coalescer.call(0).await, Err(BatchError));
    assert_eq!(coalescer.call(7).await, Ok(7));
}

#[test]
fn callers_get_an_error_when_the_runtime_of_the_task_has_shut_down() {
    let runtime = || tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (theirs, ours) = (runtime(), runtime());
    let (coalescer, _gate) = theirs.block_on(async { Gate::new(CoalescerConfig::default()) });
    let entered = ours.enter();
    let caller = spawn(&coalescer, 1);
    drop(entered);
    ours.block_on(settle());
    drop(theirs);
    assert_eq!(ours.block_on(caller).unwrap(), Err(BatchError), "it was already waiting");
    assert_eq!(ours.block_on(coalescer.call(2)), Err(BatchError), "it was made afterwards");
}

#[tokio::test]
async fn the_task_ends_when_the_coalescer_is_dropped() {
    let alive = Arc::new(());
    let witness = Arc::downgrade(&alive);
    let coalescer = Coalescer::new(CoalescerConfig::default(), move |batch: Vec<u32>| {
        let _alive = Arc::clone(&alive);
        async move { batch }
    })
    .unwrap();
    assert_eq!(coalescer.call(1).await, Ok(1));
    drop(coalescer);
    settle().await;
    assert!(witness.upgrade().is_none(), "the task still holds its function");
}

#[test]
fn invalid_settings_are_rejected() {
    let good = CoalescerConfig::default();
    let bad = [
        CoalescerConfig { max_items: 0, ..good },
        CoalescerConfig { max_items: usize::MAX, ..good },
        CoalescerConfig { max_bytes: 0, ..good },
        CoalescerConfig { in_flight_max: 0, ..good },
        CoalescerConfig { linger: Duration::MAX, ..good },
    ];
    assert!(good.validate().is_ok());
    for config in bad {
        assert!(config.validate().is_err(), "{config:?}");
    }
}

fn many_workers<T>(test: impl Future<Output = T>) -> T {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(4).enable_all().build().expect("a runtime").block_on(test)
}

#[test]
fn concurrent_callers_get_their_own_responses_in_order() {
    const CALLERS: u32 = 64;
    const EACH: u32 = 200;
    many_workers(async {
        let seen = Arc::new(Mutex::new(vec![Vec::new(); CALLERS as usize]));
        let recorded = Arc::clone(&seen);
        let config = CoalescerConfig { max_items: 50, in_flight_max: 2, ..Default::default() };
        let coalescer = Coalescer::new(config, move |batch: Vec<(u32, u32)>| {
            for (caller, number) in &batch {
                recorded.lock().unwrap()[*caller as usize].push(*number);
            }
            async move {
                tokio::task::yield_now().await;
                batch
            }
        })
        .unwrap();
        let coalescer = Arc::new(coalescer);
        let callers = (0..CALLERS).map(|caller| {
            let coalescer = Arc::clone(&coalescer);
            tokio::spawn(async move {
                for number in 0..EACH {
                    if (caller + number).is_multiple_of(7) {
                        // Some calls are dropped at a random point.
                        let mut call = Box::pin(coalescer.call((caller, number)));
                        let _ = poll!(&mut call);
                        tokio::task::yield_now().await;
                        continue;
                    }
                    let response = coalescer.call((caller, number)).await;
                    assert_eq!(response, Ok((caller, number)));
                }
            })
        });
        for caller in callers.collect::<Vec<_>>() {
            caller.await.unwrap();
        }
        for (caller, numbers) in seen.lock().unwrap().iter().enumerate() {
            assert!(numbers.is_sorted_by(|a, b| a < b), "caller {caller}: {numbers:?}");
            for number in (0..EACH).filter(|number| !(caller as u32 + number).is_multiple_of(7)) {
                assert!(numbers.binary_search(&number).is_ok(), "caller {caller}: no {number}");
            }
        }
    });
}
