//! Changes of many partitions that the server leaves in the middle: the error says how far they came, and repeating them as
//! it says finishes them.

use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{Interrupted, NewMessage, Queue, QueueError, Reset, ResetTo, Sent};
use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, Options, connect};
use headwater_testkit::{Proxy, Redis};

use crate::setup::{GROUP, Setup};

const PARTITIONS: u16 = 24;

/// A topic on a server, and a queue that reaches it through a proxy alone.
struct Cut {
    setup: Setup,
    queue: Queue,
    proxy: Proxy,
    redis: Redis,
}

impl Cut {
    async fn new() -> Result<Self> {
        let redis = Redis::start()?;
        let setup = Setup::at(&redis.url()).await?;
        setup.create(PARTITIONS).await?;
        let proxy = Proxy::start(redis.addr())?;
        let options = Options { call_deadline: Duration::from_secs(2), ..Default::default() };
        let queue = Queue::new(connect(&redis.url_at(proxy.addr()), &options).await?);
        Ok(Self { setup, queue, proxy, redis })
    }

    /// Slows the server down while `change` runs, and cuts it off as soon as `has_begun`.
    async fn interrupt<T: std::fmt::Debug>(
        &self,
        change: impl Future<Output = headwater_queue::Result<T>>,
        has_begun: impl AsyncFn() -> Result<bool>,
    ) -> Result<QueueError> {
        self.proxy.delay(Duration::from_millis(20))?;
        let cutting = async {
            while !has_begun().await? {
                tokio::task::yield_now().await;
            }
            self.proxy.cut()?;
            anyhow::Ok(())
        };
        let (changed, cut) = tokio::join!(change, cutting);
        cut?;
        self.proxy.heal()?;
        changed.err().context("it was carried out before it could be cut off")
    }

    /// Where the group stands on each partition.
    async fn positions(&self) -> Result<Vec<EntryId>> {
        let view = self.setup.queue.inspect().group(&self.setup.topic, GROUP).await?;
        Ok(view.partitions.iter().map(|each| each.last_delivered.unwrap_or(EntryId::MIN)).collect())
    }

    async fn lengths(&self) -> Result<Vec<u64>> {
        let view = self.setup.queue.inspect().topic(&self.setup.topic).await?;
        Ok(view.partitions.iter().map(|each| each.length).collect())
    }
}

/// What an interrupted change says: the partitions that are done, those that may be, those that are not, and what to do.
fn told(error: &QueueError) -> (Vec<u16>, Vec<u16>, Vec<u16>, String) {
    println!("{error}");
    match error {
        QueueError::Interrupted(interrupted) => {
            let Interrupted { done, uncertain, left, next, .. } = &**interrupted;
            (done.clone(), uncertain.clone(), left.clone(), next.clone())
        }
        other => panic!("{other}"),
    }
}

/// Each partition is said to be what it is.
fn is_true(error: &QueueError, is_changed: impl Fn(u16) -> bool) {
    let (done, uncertain, left, _) = told(error);
    assert!(done.iter().all(|partition| is_changed(*partition)), "{done:?} are done");
    assert!(!left.iter().any(|partition| is_changed(*partition)), "{left:?} are not");
    assert!(!done.is_empty() && !left.is_empty(), "it was cut off in the middle");
    let mut all = [done, uncertain, left].concat();
    all.sort_unstable();
    assert_eq!(all, (0..PARTITIONS).collect::<Vec<_>>());
}

/// A group that has read the first of two messages of each partition.
async fn half_read(cut: &Cut) -> Result<Vec<Sent>> {
    let setup = &cut.setup;
    let mut sent = setup.send_many(PARTITIONS, usize::from(PARTITIONS)).await?;
    for first in &sent {
        let to = Reset { partition: Some(first.partition), ..Reset::to(ResetTo::End) };
        setup.group(first.partition).await?;
        setup.queue.reset_group(&setup.topic, GROUP, &to).await?;
    }
    sent.extend(setup.send_many(PARTITIONS, usize::from(PARTITIONS)).await?);
    Ok(sent)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_reset_says_which_partitions_are_done_and_is_finished_by_repeating_it()
-> Result<()> {
    let cut = Cut::new().await?;
    half_read(&cut).await?;
    let (topic, to) = (&cut.setup.topic, Reset::to(ResetTo::Beginning));
    let begun = async || Ok(cut.positions().await?[5] == EntryId::MIN);
    let error = cut.interrupt(cut.queue.reset_group(topic, GROUP, &to), begun).await?;
    let positions = cut.positions().await?;
    is_true(&error, |partition| positions[usize::from(partition)] == EntryId::MIN);
    assert!(error.is_transient());

    assert!(cut.queue.reset_group(topic, GROUP, &to).await?.is_done);
    assert_eq!(cut.positions().await?, vec![EntryId::MIN; usize::from(PARTITIONS)]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_reset_to_the_end_is_finished_without_skipping_what_came_since() -> Result<()>
{
    let cut = Cut::new().await?;
    let sent = half_read(&cut).await?;
    let last = |partition: u16| {
        let of_partition = sent.iter().filter(|sent| sent.partition == partition);
        of_partition.map(|sent| sent.id).max().unwrap()
    };
    let (topic, to) = (&cut.setup.topic, Reset::to(ResetTo::End));
    let begun = async || Ok(cut.positions().await?[5] == last(5));
    let error = cut.interrupt(cut.queue.reset_group(topic, GROUP, &to), begun).await?;
    let positions = cut.positions().await?;
    is_true(&error, |partition| positions[usize::from(partition)] == last(partition));

    // Messages that come before it is repeated are read, on all partitions.
    for partition in 0..PARTITIONS {
        let late = NewMessage::new("late".to_owned()).to_partition(partition);
        cut.setup.producer.send(topic, late).await?;
    }
    let (.., next) = told(&error);
    let time = next.split('`').nth(3).and_then(Timestamp::from_rfc3339).context(next.clone())?;
    cut.queue.reset_group(topic, GROUP, &Reset::to(ResetTo::Time(time))).await?;
    let view = cut.setup.queue.inspect().group(topic, GROUP).await?;
    let lags: Vec<Option<u64>> = view.partitions.iter().map(|each| each.lag).collect();
    assert_eq!(lags, vec![Some(1); usize::from(PARTITIONS)]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_removal_of_a_group_says_which_partitions_are_done() -> Result<()> {
    let cut = Cut::new().await?;
    half_read(&cut).await?;
    let topic = &cut.setup.topic;
    let has_group = async |partition: u16| {
        let stream = cut.setup.stream(partition).await?;
        let stats = cut.setup.backend().stats(&stream).await?;
        anyhow::Ok(stats.is_some_and(|stats| !stats.groups.is_empty()))
    };
    let begun = async || Ok(!has_group(5).await?);
    let error = cut.interrupt(cut.queue.remove_group(topic, GROUP), begun).await?;
    let mut removed = Vec::new();
    for partition in 0..PARTITIONS {
        removed.push(!has_group(partition).await?);
    }
    is_true(&error, |partition| removed[usize::from(partition)]);
    cut.queue.remove_group(topic, GROUP).await?;
    assert!(cut.setup.queue.inspect().groups(topic).await?.is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_deletion_of_a_topic_says_so_until_it_is_repeated() -> Result<()> {
    let cut = Cut::new().await?;
    cut.setup.send_many(PARTITIONS, usize::from(PARTITIONS) * 2).await?;
    let (topic, topics) = (&cut.setup.topic, cut.setup.queue.topics());
    assert_eq!(cut.setup.queue.inspect().topic(topic).await?.deleting_since, None);
    let is_marked =
        async || Ok(cut.setup.queue.inspect().topic(topic).await?.deleting_since.is_some());
    let error = cut.interrupt(cut.queue.topics().delete(topic), is_marked).await?;
    let (done, uncertain, left, next) = told(&error);
    assert_eq!(done.len() + uncertain.len() + left.len(), usize::from(PARTITIONS));
    let lengths = cut.lengths().await?;
    assert!(left.iter().all(|partition| lengths[usize::from(*partition)] == 2), "{lengths:?}");
    assert!(next.contains("delete the topic again"), "{next}");

    // Whoever looks at it sees it, and why: also if the process that deleted it was killed.
    assert!(topics.list().await?.contains(topic));
    assert!(topics.describe(topic).await?.topic.deleting_since.is_some());
    // The right to change the topic ends with whoever was cut off.
    assert!(topics.delete(topic).await?);
    assert!(!topics.list().await?.contains(topic));
    assert!(!topics.delete(topic).await?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleting_a_topic_again_whose_meta_is_gone_touches_no_stream_of_another_program()
-> Result<()> {
    let cut = Cut::new().await?;
    let topic = &cut.setup.topic;
    // As a deletion leaves it whose reply to the removal of the meta is lost; the bare name is another program's stream.
    cut.redis.command(&["XADD", topic, "*", "theirs", "1"])?.ok()?;
    cut.redis.command(&["DEL", &format!("streaming:mq:topic:{topic}:meta")])?.ok()?;
    assert!(cut.setup.queue.topics().list().await?.contains(topic));
    assert!(cut.setup.queue.topics().delete(topic).await?);
    assert!(!cut.setup.queue.topics().list().await?.contains(topic));
    assert_eq!(cut.redis.command(&["XLEN", topic])?.int(), Some(1));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_whose_deletion_is_not_finished_cannot_be_created_again() -> Result<()> {
    let cut = Cut::new().await?;
    let topic = &cut.setup.topic;
    let meta = format!("streaming:mq:topic:{topic}:meta");
    cut.redis.command(&["HSET", &meta, "deletingSince", "2026-11-01T08:00:00Z"])?.ok()?;
    let created = cut.setup.queue.topics().create(topic, PARTITIONS, Default::default()).await;
    assert!(
        matches!(&created, Err(QueueError::TopicExists { difference, .. })
        if difference.contains("not finished")),
        "{created:?}"
    );
    assert!(cut.setup.queue.topics().delete(topic).await?);
    assert!(cut.setup.queue.topics().create(topic, PARTITIONS, Default::default()).await?);
    Ok(())
}
