//! Changes of many partitions that an outage interrupts: the error reports the progress, and repeating the change as it
//! says completes it.

use std::time::Duration;

use anyhow::{Context, Result};
use headwater_queue::{Interrupted, NewMessage, Queue, QueueError, Reset, ResetTo, Sent};
use headwater_stream::clock::Timestamp;
use headwater_stream::{EntryId, Options, connect};
use headwater_testkit::{Proxy, Redis};

use crate::fixture::{GROUP, QueueFixture};

const PARTITIONS: u16 = 24;

/// A topic on a server, and a queue that connects through a proxy.
struct Cut {
    fixture: QueueFixture,
    queue: Queue,
    proxy: Proxy,
    redis: Redis,
}

impl Cut {
    async fn new() -> Result<Self> {
        let redis = Redis::start()?;
        let fixture = QueueFixture::at(&redis.url()).await?;
        fixture.create(PARTITIONS).await?;
        let proxy = Proxy::start(redis.addr())?;
        let options = Options { call_deadline: Duration::from_secs(2), ..Default::default() };
        let queue = Queue::new(connect(&redis.url_at(proxy.addr()), &options).await?);
        Ok(Self { fixture, queue, proxy, redis })
    }

    /// Slows the server down while `change` runs, and disconnects it as soon as `has_begun`.
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
        changed.err().context("the change completed before the disconnect")
    }

    /// The position of the group on each partition.
    async fn positions(&self) -> Result<Vec<EntryId>> {
        let view = self.fixture.queue.inspect().group(&self.fixture.topic, GROUP).await?;
        Ok(view.partitions.iter().map(|each| each.last_delivered.unwrap_or(EntryId::MIN)).collect())
    }

    async fn lengths(&self) -> Result<Vec<u64>> {
        let view = self.fixture.queue.inspect().topic(&self.fixture.topic).await?;
        Ok(view.partitions.iter().map(|each| each.length).collect())
    }
}

/// The parts of an interrupted change: done, uncertain and remaining partitions, and the next step.
fn interrupted_parts(error: &QueueError) -> (Vec<u16>, Vec<u16>, Vec<u16>, String) {
    println!("{error}");
    match error {
        QueueError::Interrupted(interrupted) => {
            let Interrupted { done, uncertain, left, next, .. } = &**interrupted;
            (done.clone(), uncertain.clone(), left.clone(), next.clone())
        }
        other => panic!("{other}"),
    }
}

/// Asserts that the error reports the state of each partition correctly.
fn assert_reported_correctly(error: &QueueError, is_changed: impl Fn(u16) -> bool) {
    let (done, uncertain, left, _) = interrupted_parts(error);
    assert!(done.iter().all(|partition| is_changed(*partition)), "{done:?} are done");
    assert!(!left.iter().any(|partition| is_changed(*partition)), "{left:?} are not");
    assert!(!done.is_empty() && !left.is_empty(), "it was interrupted part-way");
    let mut all = [done, uncertain, left].concat();
    all.sort_unstable();
    assert_eq!(all, (0..PARTITIONS).collect::<Vec<_>>());
}

/// A group that has read the first of two messages of each partition.
async fn read_half(cut: &Cut) -> Result<Vec<Sent>> {
    let fixture = &cut.fixture;
    let mut sent = fixture.send_many(PARTITIONS, usize::from(PARTITIONS)).await?;
    for first in &sent {
        let to = Reset { partition: Some(first.partition), ..Reset::to(ResetTo::End) };
        fixture.group(first.partition).await?;
        fixture.queue.reset_group(&fixture.topic, GROUP, &to).await?;
    }
    sent.extend(fixture.send_many(PARTITIONS, usize::from(PARTITIONS)).await?);
    Ok(sent)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_reset_reports_the_done_partitions_and_can_be_repeated() -> Result<()> {
    let cut = Cut::new().await?;
    read_half(&cut).await?;
    let (topic, to) = (&cut.fixture.topic, Reset::to(ResetTo::Beginning));
    let begun = async || Ok(cut.positions().await?[5] == EntryId::MIN);
    let error = cut.interrupt(cut.queue.reset_group(topic, GROUP, &to), begun).await?;
    let positions = cut.positions().await?;
    assert_reported_correctly(&error, |partition| {
        positions[usize::from(partition)] == EntryId::MIN
    });
    assert!(error.is_transient());

    assert!(cut.queue.reset_group(topic, GROUP, &to).await?.is_done);
    assert_eq!(cut.positions().await?, vec![EntryId::MIN; usize::from(PARTITIONS)]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeating_an_interrupted_reset_to_the_end_skips_no_newer_message() -> Result<()> {
    let cut = Cut::new().await?;
    let sent = read_half(&cut).await?;
    let last = |partition: u16| {
        let of_partition = sent.iter().filter(|sent| sent.partition == partition);
        of_partition.map(|sent| sent.id).max().unwrap()
    };
    let (topic, to) = (&cut.fixture.topic, Reset::to(ResetTo::End));
    let begun = async || Ok(cut.positions().await?[5] == last(5));
    let error = cut.interrupt(cut.queue.reset_group(topic, GROUP, &to), begun).await?;
    let positions = cut.positions().await?;
    assert_reported_correctly(&error, |partition| {
        positions[usize::from(partition)] == last(partition)
    });

    // Messages sent before the repetition are read on all partitions.
    for partition in 0..PARTITIONS {
        let late = NewMessage::new("late".to_owned()).to_partition(partition);
        cut.fixture.producer.send(topic, late).await?;
    }
    let (.., next) = interrupted_parts(&error);
    let time = next.split('`').nth(3).and_then(Timestamp::from_rfc3339).context(next.clone())?;
    cut.queue.reset_group(topic, GROUP, &Reset::to(ResetTo::Time(time))).await?;
    let view = cut.fixture.queue.inspect().group(topic, GROUP).await?;
    let lags: Vec<Option<u64>> = view.partitions.iter().map(|each| each.lag).collect();
    assert_eq!(lags, vec![Some(1); usize::from(PARTITIONS)]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_removal_reports_the_done_partitions() -> Result<()> {
    let cut = Cut::new().await?;
    read_half(&cut).await?;
    let topic = &cut.fixture.topic;
    let has_group = async |partition: u16| {
        let stream = cut.fixture.stream(partition).await?;
        let stats = cut.fixture.backend().stats(&stream).await?;
        anyhow::Ok(stats.is_some_and(|stats| !stats.groups.is_empty()))
    };
    let begun = async || Ok(!has_group(5).await?);
    let error = cut.interrupt(cut.queue.remove_group(topic, GROUP), begun).await?;
    let mut removed = Vec::new();
    for partition in 0..PARTITIONS {
        removed.push(!has_group(partition).await?);
    }
    assert_reported_correctly(&error, |partition| removed[usize::from(partition)]);
    cut.queue.remove_group(topic, GROUP).await?;
    assert!(cut.fixture.queue.inspect().groups(topic).await?.is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_deletion_is_visible_until_it_is_repeated() -> Result<()> {
    let cut = Cut::new().await?;
    cut.fixture.send_many(PARTITIONS, usize::from(PARTITIONS) * 2).await?;
    let (topic, topics) = (&cut.fixture.topic, cut.fixture.queue.topics());
    assert_eq!(cut.fixture.queue.inspect().topic(topic).await?.deleting_since, None);
    let is_marked =
        async || Ok(cut.fixture.queue.inspect().topic(topic).await?.deleting_since.is_some());
    let error = cut.interrupt(cut.queue.topics().delete(topic), is_marked).await?;
    let (done, uncertain, left, next) = interrupted_parts(&error);
    assert_eq!(done.len() + uncertain.len() + left.len(), usize::from(PARTITIONS));
    let lengths = cut.lengths().await?;
    assert!(left.iter().all(|partition| lengths[usize::from(*partition)] == 2), "{lengths:?}");
    assert!(next.contains("delete the topic again"), "{next}");

    // The deletion is visible, also if the deleting process was killed.
    assert!(topics.list().await?.contains(topic));
    assert!(topics.describe(topic).await?.topic.deleting_since.is_some());
    // The topic lock of the disconnected process expires.
    assert!(topics.delete(topic).await?);
    assert!(!topics.list().await?.contains(topic));
    assert!(!topics.delete(topic).await?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeating_a_deletion_without_meta_keeps_the_stream_of_another_program() -> Result<()> {
    let cut = Cut::new().await?;
    let topic = &cut.fixture.topic;
    // As after a deletion whose reply to the removal of the meta was lost; the plain name is a stream of another
    // program.
    cut.redis.command(&["XADD", topic, "*", "theirs", "1"])?.ok()?;
    cut.redis.command(&["DEL", &format!("streaming:mq:topic:{topic}:meta")])?.ok()?;
    assert!(cut.fixture.queue.topics().list().await?.contains(topic));
    assert!(cut.fixture.queue.topics().delete(topic).await?);
    assert!(!cut.fixture.queue.topics().list().await?.contains(topic));
    assert_eq!(cut.redis.command(&["XLEN", topic])?.int(), Some(1));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_with_an_interrupted_deletion_cannot_be_created() -> Result<()> {
    let cut = Cut::new().await?;
    let topic = &cut.fixture.topic;
    let meta = format!("streaming:mq:topic:{topic}:meta");
    cut.redis.command(&["HSET", &meta, "deletingSince", "2026-11-01T08:00:00Z"])?.ok()?;
    let created = cut.fixture.queue.topics().create(topic, PARTITIONS, Default::default()).await;
    assert!(
        matches!(&created, Err(QueueError::TopicExists { difference, .. })
        if difference.contains("deletion was interrupted")),
        "{created:?}"
    );
    assert!(cut.fixture.queue.topics().delete(topic).await?);
    assert!(cut.fixture.queue.topics().create(topic, PARTITIONS, Default::default()).await?);
    Ok(())
}
