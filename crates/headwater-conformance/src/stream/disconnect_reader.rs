//! Disconnecting readers: reads of a consumer that is considered dead deliver nothing afterwards.
//!
//! Consumer names are unique to each test, because all readers with a name are disconnected, whatever they
//! read.

use std::task::Poll;
use std::time::Duration;

use futures_util::poll;
use headwater_stream::{
    Backend, DeliveredEntry, DisconnectOutcome, GroupName, GroupReader, GroupStart,
    PendingDeliveryQuery, Result, Retention, StreamBatch, StreamError, StreamName,
};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::env::{StreamTestEnv, consumer, group};
use super::steps::{LONG, ids_of, numbers, soon};
use crate::failure::TestResult;

const ROUNDS: u64 = 20;

type ReadTask = JoinHandle<(Result<Vec<StreamBatch<DeliveredEntry>>>, Box<dyn GroupReader>)>;

/// A read in flight, at an unknown point.
async fn begin_read(
    backend: &dyn Backend,
    stream: &StreamName,
    group: &GroupName,
    name: &str,
) -> TestResult<ReadTask> {
    let mut reader = backend.reader(group, &consumer(name)).await?;
    let streams = [stream.clone()];
    let (begun, has_begun) = oneshot::channel();
    let reading = tokio::spawn(async move {
        let answer = {
            let mut read = reader.read(&streams, 10, LONG);
            let first = poll!(&mut read);
            let _ = begun.send(());
            match first {
                Poll::Ready(answer) => answer,
                Poll::Pending => read.await,
            }
        };
        (answer, reader)
    });
    has_begun.await?;
    Ok(reading)
}

async fn silence(
    env: &StreamTestEnv,
    stream: &StreamName,
    group: &GroupName,
    name: &str,
) -> TestResult<usize> {
    match env.backend.disconnect_reader(stream, group, &consumer(name)).await? {
        DisconnectOutcome::Disconnected { readers: ended } => Ok(ended),
        DisconnectOutcome::Denied { reason } => panic!("expected a disconnect, found {reason}"),
    }
}

fn assert_ended(answer: &Result<Vec<StreamBatch<DeliveredEntry>>>) {
    assert!(matches!(answer, Err(StreamError::Unavailable { .. })), "found {answer:?}");
}

pub async fn a_read_in_flight_delivers_nothing_after_disconnect(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    for round in 0..ROUNDS {
        let name = env.name("consumer", &format!("ann-{round}"));
        let reading = begin_read(&*env.second, &flow.stream, &flow.group, &name).await?;
        // It is connecting, about to block, or blocked.
        tokio::time::sleep(Duration::from_micros(round * round * 50)).await;

        silence(&env, &flow.stream, &flow.group, &name).await?;

        let ids = env.second.append(&flow.stream, &numbers(2), &Retention::KEEP_ALL).await?;
        let (answer, _reader) = soon("the read to end", reading).await?;
        assert_ended(&answer);
        let delivered = flow.deliver("bob", 10).await?;
        assert_eq!(
            ids_of(&delivered),
            ids,
            "round {round}: they are delivered to another consumer"
        );
    }
    Ok(())
}

pub async fn disconnect_does_not_affect_other_consumers_and_groups(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let (ann, others) = (env.name("consumer", "ann"), group("others"));
    env.second.ensure_group(&flow.stream, &others, GroupStart::Beginning).await?;
    let bob = begin_read(&*env.second, &flow.stream, &flow.group, "bob").await?;
    let ann_of_others = begin_read(&*env.second, &flow.stream, &others, &ann).await?;
    let anns = begin_read(&*env.second, &flow.stream, &flow.group, &ann).await?;
    // Eventually all of them are blocked.
    tokio::time::sleep(Duration::from_millis(100)).await;

    silence(&env, &flow.stream, &flow.group, &ann).await?;
    let ids = env.second.append(&flow.stream, &numbers(1), &Retention::KEEP_ALL).await?;

    for reading in [bob, ann_of_others] {
        let (answer, _reader) = soon("the read to be answered", reading).await?;
        assert_eq!(ids_of(&answer?[0].entries), ids);
    }
    let (answer, _reader) = soon("the read to end", anns).await?;
    assert_ended(&answer);
    Ok(())
}

pub async fn a_disconnected_consumer_can_read_again(env: StreamTestEnv) -> TestResult {
    let (flow, ann) = (env.flow().await?, env.name("consumer", "ann"));
    let reading = begin_read(&*env.second, &flow.stream, &flow.group, &ann).await?;
    silence(&env, &flow.stream, &flow.group, &ann).await?;
    let (answer, mut reader) = soon("the read to end", reading).await?;
    assert_ended(&answer);
    let ids = env.second.append(&flow.stream, &numbers(3), &Retention::KEEP_ALL).await?;

    let reading = async {
        loop {
            match reader.read(std::slice::from_ref(&flow.stream), 10, LONG).await {
                // It reconnects and gets the error once more.
                Err(StreamError::Unavailable { .. }) => {}
                answer => return answer,
            }
        }
    };
    let read = soon("the reader to continue", reading).await?;
    assert_eq!(ids_of(&read[0].entries), ids);
    Ok(())
}

pub async fn entries_delivered_before_disconnect_stay_pending(env: StreamTestEnv) -> TestResult {
    let (flow, ann) = (env.flow().await?, env.name("consumer", "ann"));
    let ids = flow.append(3).await?;
    flow.deliver(&ann, 3).await?;
    silence(&env, &flow.stream, &flow.group, &ann).await?;
    let query = PendingDeliveryQuery {
        stream: &flow.stream,
        group: &flow.group,
        consumer: Some(&consumer(&ann)),
        min_idle: Duration::ZERO,
        after: None,
        count: 10,
    };
    let pending = env.second.pending(query).await?;
    assert_eq!(pending.iter().map(|pending| pending.id).collect::<Vec<_>>(), ids);
    Ok(())
}

pub async fn disconnecting_without_readers_succeeds(env: StreamTestEnv) -> TestResult {
    let (stream, ann) = (env.stream("orders"), env.name("consumer", "ann"));
    for _ in 0..2 {
        assert_eq!(silence(&env, &stream, &group("workers"), &ann).await?, 0);
    }
    assert_eq!(env.second.stats(&stream).await?, None, "no stream was created");
    Ok(())
}
