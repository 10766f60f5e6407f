//! Close, and the description of a backend.

use std::fmt::Debug;
use std::time::Duration;

use headwater_stream::{Range, RegistryMap, Result, Retention, StreamError};

use super::env::{StreamTestEnv, consumer, group, holder};
use super::steps::{HOUR, LONG, numbers, sleep_ms, soon};
use crate::failure::TestResult;

fn assert_unavailable<T: Debug>(call: &str, answer: &Result<T>) {
    let unavailable = matches!(answer, Err(StreamError::Unavailable { .. }));
    assert!(unavailable, "{call}: expected Unavailable, found {answer:?}");
}

pub async fn a_backend_describes_itself(env: StreamTestEnv) -> TestResult {
    let description = env.backend.describe();
    assert!(!description.kind.is_empty(), "{description:?}");
    assert!(!description.address.contains('@'), "no credentials, found {description:?}");
    Ok(())
}

pub async fn the_backend_clock_advances(env: StreamTestEnv) -> TestResult {
    let first = env.backend.now().await?;
    sleep_ms(20).await;
    let later = env.backend.now().await?;
    assert!(later > first, "expected more than {first}, found {later}");
    Ok(())
}

pub async fn a_closed_backend_is_unavailable(env: StreamTestEnv) -> TestResult {
    let backend = &env.backend;
    let stream = env.stream("orders");
    let (group, ann) = (group("workers"), consumer("ann"));
    backend.append(&stream, &numbers(1), &Retention::KEEP_ALL).await?;
    let mut reader = backend.reader(&group, &ann).await?;
    let mut tail = backend.tail().await?;

    soon("the backend to close", backend.close()).await?;

    let calls = async {
        let keep = Retention::KEEP_ALL;
        assert_unavailable("append", &backend.append(&stream, &numbers(1), &keep).await);
        assert_unavailable("range", &backend.range(&stream, Range::first(1)).await);
        assert_unavailable("stats", &backend.stats(&stream).await);
        let streams = std::slice::from_ref(&stream);
        assert_unavailable("read", &reader.read(streams, 1, LONG).await);
        let position = [(stream.clone(), headwater_stream::EntryId::MIN)];
        assert_unavailable("tail", &tail.read(&position, 1, LONG).await);
        assert_unavailable("reader", &backend.reader(&group, &ann).await.map(drop));
        assert_unavailable("delays", &backend.delay_stats(&env.delays("later")).await);
        assert_unavailable(
            "wait_until_due",
            &backend.wait_until_due(&env.delays("later"), LONG).await,
        );
        assert_unavailable("leases", &backend.acquire(&env.lease("a"), &holder("ann"), HOUR).await);
        assert_unavailable("registry", &backend.map_get(&env.map("a")).await);
        let fields = RegistryMap::from([("a".to_owned(), bytes::Bytes::new())]);
        assert_unavailable("map_create", &backend.map_create(&env.map("a"), &fields).await);
        assert_unavailable("sets", &backend.set_members(&env.set("a")).await);
        assert_unavailable("dedup", &backend.dedup_begin(&env.scope("a"), &["x"], HOUR).await);
        assert_unavailable("now", &backend.now().await);
    };
    soon("calls on a closed backend to fail", calls).await;
    Ok(())
}

pub async fn closing_wakes_blocked_calls(env: StreamTestEnv) -> TestResult {
    let mut reader = env.backend.reader(&group("workers"), &consumer("ann")).await?;
    let stream = env.stream("orders");
    let waiting = tokio::spawn(async move { reader.read(&[stream], 1, LONG).await });
    sleep_ms(100).await;

    soon("the backend to close", env.backend.close()).await?;

    match soon("the reader to wake", waiting).await? {
        Ok(read) => assert_eq!(read, []),
        Err(StreamError::Unavailable { .. }) => {}
        Err(other) => return Err(other.into()),
    }
    Ok(())
}

pub async fn calls_in_flight_complete_before_close(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let (backend, stream) = (std::sync::Arc::clone(&env.backend), stream.clone());
            tokio::spawn(
                async move { backend.append(&stream, &numbers(1), &Retention::KEEP_ALL).await },
            )
        })
        .collect();
    tokio::time::sleep(Duration::from_micros(200)).await;
    soon("the backend to close", env.backend.close()).await?;
    for task in tasks {
        match soon("an append that was begun", task).await? {
            Ok(ids) => assert_eq!(ids.len(), 1),
            Err(StreamError::Unavailable { .. }) => {}
            Err(other) => return Err(other.into()),
        }
    }
    Ok(())
}
