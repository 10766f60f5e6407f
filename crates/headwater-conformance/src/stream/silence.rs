//! Silence: the reads of a consumer that is thought dead deliver nothing after they were ended.
//!
//! Consumers have names that no other test has, for all readers of a name are ended, whatever they read.

use std::task::Poll;
use std::time::Duration;

use futures_util::poll;
use headwater_stream::{
    Backend, Batch, Delivery, GroupName, GroupReader, GroupStart, PendingQuery, Result, Retention,
    Silenced, StreamError, StreamName,
};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::env::{Env, consumer, group};
use super::failure::TestResult;
use super::steps::{LONG, ids_of, numbers, soon};

const ROUNDS: u64 = 20;

type Reading = JoinHandle<(Result<Vec<Batch<Delivery>>>, Box<dyn GroupReader>)>;

/// A read that has begun, and nobody knows how far it has come.
async fn begin_read(
    backend: &dyn Backend,
    stream: &StreamName,
    group: &GroupName,
    name: &str,
) -> TestResult<Reading> {
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
    env: &Env,
    stream: &StreamName,
    group: &GroupName,
    name: &str,
) -> TestResult<usize> {
    match env.backend.silence(stream, group, &consumer(name)).await? {
        Silenced::Yes { ended } => Ok(ended),
        Silenced::No { reason } => panic!("expected silence, found {reason}"),
    }
}

fn assert_ended(answer: &Result<Vec<Batch<Delivery>>>) {
    assert!(matches!(answer, Err(StreamError::Unavailable { .. })), "found {answer:?}");
}

pub async fn a_read_that_had_begun_delivers_nothing_after_silence(env: Env) -> TestResult {
    let flow = env.flow().await?;
    for round in 0..ROUNDS {
        let name = env.name("consumer", &format!("ann-{round}"));
        let reading = begin_read(&*env.second, &flow.stream, &flow.group, &name).await?;
        // It is still connecting, about to wait, or waits.
        tokio::time::sleep(Duration::from_micros(round * round * 50)).await;

        silence(&env, &flow.stream, &flow.group, &name).await?;

        let ids = env.second.append(&flow.stream, &numbers(2), &Retention::KEEP_ALL).await?;
        let (answer, _reader) = soon("the read to end", reading).await?;
        assert_ended(&answer);
        let delivered = flow.deliver("bob", 10).await?;
        assert_eq!(ids_of(&delivered), ids, "round {round}: they were left for others");
    }
    Ok(())
}

pub async fn silence_leaves_other_consumers_and_groups_alone(env: Env) -> TestResult {
    let flow = env.flow().await?;
    let (ann, others) = (env.name("consumer", "ann"), group("others"));
    env.second.ensure_group(&flow.stream, &others, GroupStart::Beginning).await?;
    let bob = begin_read(&*env.second, &flow.stream, &flow.group, "bob").await?;
    let ann_of_others = begin_read(&*env.second, &flow.stream, &others, &ann).await?;
    let anns = begin_read(&*env.second, &flow.stream, &flow.group, &ann).await?;
    // Sooner or later all of them wait.
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

pub async fn a_silenced_consumer_can_read_again(env: Env) -> TestResult {
    let (flow, ann) = (env.flow().await?, env.name("consumer", "ann"));
    let reading = begin_read(&*env.second, &flow.stream, &flow.group, &ann).await?;
    silence(&env, &flow.stream, &flow.group, &ann).await?;
    let (answer, mut reader) = soon("the read to end", reading).await?;
    assert_ended(&answer);
    let ids = env.second.append(&flow.stream, &numbers(3), &Retention::KEEP_ALL).await?;

    let reading = async {
        loop {
            match reader.read(std::slice::from_ref(&flow.stream), 10, LONG).await {
                // It connects anew, and learns once more that it was silenced.
                Err(StreamError::Unavailable { .. }) => {}
                answer => return answer,
            }
        }
    };
    let read = soon("the reader to go on", reading).await?;
    assert_eq!(ids_of(&read[0].entries), ids);
    Ok(())
}

pub async fn what_was_delivered_before_silence_stays_pending(env: Env) -> TestResult {
    let (flow, ann) = (env.flow().await?, env.name("consumer", "ann"));
    let ids = flow.append(3).await?;
    flow.deliver(&ann, 3).await?;
    silence(&env, &flow.stream, &flow.group, &ann).await?;
    let query = PendingQuery {
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

pub async fn to_silence_nobody_is_no_error(env: Env) -> TestResult {
    let (stream, ann) = (env.stream("orders"), env.name("consumer", "ann"));
    for _ in 0..2 {
        assert_eq!(silence(&env, &stream, &group("workers"), &ann).await?, 0);
    }
    assert_eq!(env.second.stats(&stream).await?, None, "no stream came into being");
    Ok(())
}
