//! Malformed entries and broken topics: no message is lost, the consumer keeps running, the anomaly is counted.

use anyhow::Result;
use bytes::Bytes;
use headwater_queue::{ConsumerConfig, Outcome, metrics};
use headwater_stream::{
    ConsumerName, Fields, GroupName, GroupStart, Retention, StreamError, StreamName, TrimGuard,
};

use crate::fixture::{Fixture, GROUP, eventually};
use crate::metric_recorder::{counter_value, install_metric_recorder};
use crate::recording_handler::{payload, recording_handler};
use crate::shared::shared;

/// The consumer is running: a new message is handled.
macro_rules! assert_running {
    ($fixture:ident, $seen:ident) => {
        $fixture.send(0, None, "alive").await?;
        assert_eq!($seen.payloads(1).await?, ["alive"]);
        $fixture.wait_until_settled(0).await?;
    };
}

async fn malformed_entries_become_dead_letters_with_their_bytes(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    let odd: [(&str, &[u8]); 4] =
        [("retryCount", b"many"), ("maxRetries", b"-1"), ("key", b"\xff\xfe"), ("headers", b"[1]")];
    for (field, value) in odd {
        let pairs = [
            (Bytes::from_static(b"payload"), Bytes::from_static(b"\x00\xff")),
            (Bytes::copy_from_slice(field.as_bytes()), Bytes::copy_from_slice(value)),
        ];
        fixture.append(0, Fields::new(pairs)).await?;
    }
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    let letters = fixture.wait_for_dead_letters(4).await?;
    for ((field, value), letter) in odd.iter().zip(&letters) {
        assert_eq!(letter.fields.get("payload").map(AsRef::as_ref), Some(&b"\x00\xff"[..]));
        assert_eq!(letter.fields.get(field).map(AsRef::as_ref), Some(*value), "{field}");
        assert!(letter.fields.get("reason").is_some());
    }
    assert_running!(fixture, seen);
    assert_eq!(counter_value(metrics::DEAD_LETTERS, &fixture.topic, "malformed"), 4);
    assert_eq!(counter_value(metrics::CONSUMED, &fixture.topic, "dead_letter"), 4);
    subscription.stop().await;
    Ok(())
}

async fn unknown_fields_and_headers_are_delivered_unchanged(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    let headers = r#"{"x-unknown":"1","n":[2]}"#;
    let fields = Fields::new([("issue_id", "7"), ("headers", headers), ("partitionId", "999")]);
    fixture.append(0, fields.clone()).await?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    let message = seen.next().await?;
    assert_eq!((message.fields, message.partition), (fields, 0));
    assert_eq!(message.headers["x-unknown"], "1");
    assert_running!(fixture, seen);
    assert_eq!(counter_value(metrics::CONSUMED, &fixture.topic, "done"), 2);
    subscription.stop().await;
    Ok(())
}

async fn an_entry_of_the_maximum_size_can_be_retried_and_dead_lettered(
    fixture: Fixture,
) -> Result<()> {
    install_metric_recorder();
    let limit = headwater_stream::limits::ENTRY_BYTES_MAX - "payload".len();
    fixture.append(0, Fields::new([("payload", vec![b'x'; limit])])).await?;
    let (handler, mut seen) = recording_handler(|message| match message.attempt {
        1 if message.payload.len() > 100 => Outcome::retry_after(std::time::Duration::ZERO, "no"),
        _ if message.payload.len() > 100 => Outcome::dead_letter("no"),
        _ => Outcome::Done,
    });
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    assert_eq!((seen.next().await?.attempt, seen.next().await?.attempt), (1, 2));
    let letters = fixture.wait_for_dead_letters(1).await?;
    assert_eq!(letters[0].fields.get("payload").map(Bytes::len), Some(limit));
    assert_running!(fixture, seen);
    assert_eq!(counter_value(metrics::DEAD_LETTERS, &fixture.topic, "handler"), 1);
    subscription.stop().await;
    Ok(())
}

async fn an_entry_trimmed_while_it_is_handled_is_still_retried(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    fixture.send(0, None, "trimmed").await?;
    let stream = fixture.stream(0).await?;
    let (handling, mut is_handling) = tokio::sync::mpsc::unbounded_channel();
    let (trimmed, is_trimmed) = tokio::sync::watch::channel(false);
    let handler = move |message: headwater_queue::Message| {
        let (handling, mut is_trimmed) = (handling.clone(), is_trimmed.clone());
        async move {
            let _ = handling.send(message.clone());
            let _ = is_trimmed.wait_for(|trimmed| *trimmed).await;
            match message.attempt {
                1 => Outcome::retry_after(std::time::Duration::ZERO, "once more"),
                _ => Outcome::Done,
            }
        }
    };
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    is_handling.recv().await;
    let removed =
        fixture.backend.trim(&stream, &Retention::max_len(0), TrimGuard::Force).await?.removed;
    assert_eq!(removed, 1);
    trimmed.send_replace(true);
    let again = is_handling.recv().await.expect("the handler is running");
    assert_eq!((payload(&again), again.attempt), ("trimmed".to_owned(), 2));
    fixture.wait_until_settled(0).await?;
    assert_eq!(counter_value(metrics::RETRIES, &fixture.topic, ""), 1);
    subscription.stop().await;
    Ok(())
}

async fn an_entry_trimmed_while_its_consumer_is_dead_is_counted(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    // Another program reads an entry and dies; then the entry is deleted.
    let id = fixture.send(0, None, "gone").await?;
    let stream = fixture.stream(0).await?;
    read_and_die(&fixture, &stream).await?;
    fixture.backend.delete_entries(&stream, &[id]).await?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let config = ConsumerConfig::default();
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, config).await?;
    assert_running!(fixture, seen);
    assert_eq!(counter_value(metrics::ANOMALIES, &fixture.topic, "deleted_while_pending"), 1);
    subscription.stop().await;
    Ok(())
}

/// A consumer of another program reads all entries and acknowledges none.
pub(crate) async fn read_and_die(fixture: &Fixture, stream: &StreamName) -> Result<()> {
    read_and_die_in(fixture, stream, GROUP).await
}

pub(crate) async fn read_and_die_in(
    fixture: &Fixture,
    stream: &StreamName,
    group: &str,
) -> Result<()> {
    // Unique: the consumer that reclaims from it disconnects this name on the whole server.
    let foreign = ConsumerName::new(format!("foreign-{}", fixture.topic))?;
    let group = GroupName::new(group)?;
    fixture.backend.ensure_group(stream, &group, GroupStart::Beginning).await?;
    let mut reader = fixture.backend.reader(&group, &foreign).await?;
    reader.read(std::slice::from_ref(stream), 100, std::time::Duration::ZERO).await?;
    reader.close().await?;
    Ok(())
}

async fn a_consumer_survives_the_deletion_and_recreation_of_its_topic(
    fixture: Fixture,
) -> Result<()> {
    install_metric_recorder();
    fixture.create(2).await?;
    for mut config in [ConsumerConfig::default(), shared()] {
        config.start = GroupStart::End;
        let (handler, mut seen) = recording_handler(|_| Outcome::Done);
        let group = format!("{:?}", config.mode);
        let subscription = fixture.queue.subscribe(&fixture.topic, &group, handler, config).await?;
        fixture.send(1, None, "before").await?;
        assert_eq!(seen.payloads(1).await?, ["before"]);
        let before = counter_value(metrics::ANOMALIES, &fixture.topic, "topic_deleted");
        fixture.queue.topics().delete(&fixture.topic).await?;
        eventually("it is counted", async || {
            Ok(counter_value(metrics::ANOMALIES, &fixture.topic, "topic_deleted") > before)
        })
        .await?;
        fixture.create(2).await?;
        fixture.send(1, None, "after").await?;
        assert_eq!(seen.payloads(1).await?, ["after"]);
        subscription.stop().await;
    }
    Ok(())
}

async fn a_key_of_the_wrong_type_does_not_stop_other_partitions(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    fixture.create(2).await?;
    let (handler, mut seen) = recording_handler(|_| Outcome::Done);
    let subscription = fixture.queue.subscribe(&fixture.topic, GROUP, handler, shared()).await?;
    fixture.send(1, None, "first").await?;
    assert_eq!(seen.payloads(1).await?, ["first"]);
    // The stream of a partition is replaced by a map.
    let broken = fixture.stream(1).await?;
    let map = headwater_stream::MapName::new(broken.as_str())?;
    let fields = [("a".to_owned(), Bytes::from_static(b"b"))].into();
    // Repeated: a call may be in flight.
    eventually("the map exists", async || {
        fixture.backend.delete_stream(&broken).await?;
        match fixture.backend.map_create(&map, &fields).await {
            Ok(is_new) => Ok(is_new),
            Err(StreamError::WrongType { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    })
    .await?;
    if fixture.url.starts_with("redis") {
        eventually("it is counted", async || {
            Ok(counter_value(metrics::ANOMALIES, &fixture.topic, "wrong_type") > 0)
        })
        .await?;
    }
    assert_running!(fixture, seen);
    // Once the map is deleted, the partition works again.
    fixture.backend.map_delete(&map).await?;
    fixture.send(1, None, "recovered").await?;
    assert_eq!(seen.payloads(1).await?, ["recovered"]);
    subscription.stop().await;
    Ok(())
}

on_every_backend!(
    malformed_entries_become_dead_letters_with_their_bytes,
    unknown_fields_and_headers_are_delivered_unchanged,
    an_entry_of_the_maximum_size_can_be_retried_and_dead_lettered,
    an_entry_trimmed_while_it_is_handled_is_still_retried,
    an_entry_trimmed_while_its_consumer_is_dead_is_counted,
    a_consumer_survives_the_deletion_and_recreation_of_its_topic,
    a_key_of_the_wrong_type_does_not_stop_other_partitions,
);
