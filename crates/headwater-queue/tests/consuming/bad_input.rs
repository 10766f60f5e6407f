//! Entries and topics that are not as they should be: the message is safe, the reader lives, the case is counted.

use anyhow::Result;
use bytes::Bytes;
use headwater_queue::{ConsumerConfig, Outcome, metrics};
use headwater_stream::{
    ConsumerName, Fields, GroupName, GroupStart, Retention, StreamError, StreamName, TrimGuard,
};

use crate::counted::{counted, start_counting};
use crate::env::{Env, GROUP, eventually};
use crate::record::{payload, recorder};
use crate::shared::shared;

/// The reader lives: what is sent now is handled.
macro_rules! assert_alive {
    ($env:ident, $seen:ident) => {
        $env.send(0, None, "alive").await?;
        assert_eq!($seen.payloads(1).await?, ["alive"]);
        $env.until_settled(0).await?;
    };
}

async fn malformed_entries_go_to_the_dead_letters_with_their_bytes(env: Env) -> Result<()> {
    start_counting();
    let odd: [(&str, &[u8]); 4] =
        [("retryCount", b"many"), ("maxRetries", b"-1"), ("key", b"\xff\xfe"), ("headers", b"[1]")];
    for (field, value) in odd {
        let pairs = [
            (Bytes::from_static(b"payload"), Bytes::from_static(b"\x00\xff")),
            (Bytes::copy_from_slice(field.as_bytes()), Bytes::copy_from_slice(value)),
        ];
        env.append(0, Fields::new(pairs)).await?;
    }
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    let letters = env.until_dead_letters(4).await?;
    for ((field, value), letter) in odd.iter().zip(&letters) {
        assert_eq!(letter.fields.get("payload").map(AsRef::as_ref), Some(&b"\x00\xff"[..]));
        assert_eq!(letter.fields.get(field).map(AsRef::as_ref), Some(*value), "{field}");
        assert!(letter.fields.get("reason").is_some());
    }
    assert_alive!(env, seen);
    assert_eq!(counted(metrics::DEAD_LETTERS, &env.topic, "malformed"), 4);
    assert_eq!(counted(metrics::CONSUMED, &env.topic, "dead_letter"), 4);
    subscription.stop().await;
    Ok(())
}

async fn unknown_fields_and_headers_are_delivered_as_they_are(env: Env) -> Result<()> {
    start_counting();
    let headers = r#"{"x-unknown":"1","n":[2]}"#;
    let fields = Fields::new([("issue_id", "7"), ("headers", headers), ("partitionId", "999")]);
    env.append(0, fields.clone()).await?;
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    let message = seen.next().await?;
    assert_eq!((message.fields, message.partition), (fields, 0));
    assert_eq!(message.headers["x-unknown"], "1");
    assert_alive!(env, seen);
    assert_eq!(counted(metrics::CONSUMED, &env.topic, "done"), 2);
    subscription.stop().await;
    Ok(())
}

async fn an_entry_as_large_as_the_backend_takes_can_be_retried_and_given_up(
    env: Env,
) -> Result<()> {
    start_counting();
    let limit = headwater_stream::limits::ENTRY_BYTES_MAX - "payload".len();
    env.append(0, Fields::new([("payload", vec![b'x'; limit])])).await?;
    let (handler, mut seen) = recorder(|message| match message.attempt {
        1 if message.payload.len() > 100 => Outcome::retry_after(std::time::Duration::ZERO, "no"),
        _ if message.payload.len() > 100 => Outcome::dead_letter("no"),
        _ => Outcome::Done,
    });
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    assert_eq!((seen.next().await?.attempt, seen.next().await?.attempt), (1, 2));
    let letters = env.until_dead_letters(1).await?;
    assert_eq!(letters[0].fields.get("payload").map(Bytes::len), Some(limit));
    assert_alive!(env, seen);
    assert_eq!(counted(metrics::DEAD_LETTERS, &env.topic, "handler"), 1);
    subscription.stop().await;
    Ok(())
}

async fn an_entry_trimmed_while_it_is_handled_is_safe_in_our_hands(env: Env) -> Result<()> {
    start_counting();
    env.send(0, None, "trimmed").await?;
    let stream = env.stream(0).await?;
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
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    is_handling.recv().await;
    let removed =
        env.backend.trim(&stream, &Retention::max_len(0), TrimGuard::Force).await?.removed;
    assert_eq!(removed, 1);
    trimmed.send_replace(true);
    let again = is_handling.recv().await.expect("the handler lives");
    assert_eq!((payload(&again), again.attempt), ("trimmed".to_owned(), 2));
    env.until_settled(0).await?;
    assert_eq!(counted(metrics::RETRIES, &env.topic, ""), 1);
    subscription.stop().await;
    Ok(())
}

async fn an_entry_trimmed_while_its_consumer_was_dead_is_counted(env: Env) -> Result<()> {
    start_counting();
    // Another program reads an entry and dies; somebody removes the entry.
    let id = env.send(0, None, "gone").await?;
    let stream = env.stream(0).await?;
    read_and_die(&env, &stream).await?;
    env.backend.delete_entries(&stream, &[id]).await?;
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let config = ConsumerConfig::default();
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, config).await?;
    assert_alive!(env, seen);
    assert_eq!(counted(metrics::ANOMALIES, &env.topic, "deleted_while_pending"), 1);
    subscription.stop().await;
    Ok(())
}

/// A consumer of another program takes all there is, and does nothing with it.
pub(crate) async fn read_and_die(env: &Env, stream: &StreamName) -> Result<()> {
    // Who takes over silences this name, on the whole server.
    let foreign = ConsumerName::new(format!("foreign-{}", env.topic))?;
    let group = GroupName::new(GROUP)?;
    env.backend.ensure_group(stream, &group, GroupStart::Beginning).await?;
    let mut reader = env.backend.reader(&group, &foreign).await?;
    reader.read(std::slice::from_ref(stream), 100, std::time::Duration::ZERO).await?;
    reader.close().await?;
    Ok(())
}

async fn a_topic_deleted_under_its_consumer_works_again_when_it_is_created(env: Env) -> Result<()> {
    start_counting();
    env.create(2).await?;
    for mut config in [ConsumerConfig::default(), shared()] {
        config.start = GroupStart::End;
        let (handler, mut seen) = recorder(|_| Outcome::Done);
        let group = format!("{:?}", config.mode);
        let subscription = env.queue.subscribe(&env.topic, &group, handler, config).await?;
        env.send(1, None, "before").await?;
        assert_eq!(seen.payloads(1).await?, ["before"]);
        let before = counted(metrics::ANOMALIES, &env.topic, "topic_deleted");
        env.queue.topics().delete(&env.topic).await?;
        eventually("it was noticed and counted", async || {
            Ok(counted(metrics::ANOMALIES, &env.topic, "topic_deleted") > before)
        })
        .await?;
        env.create(2).await?;
        env.send(1, None, "after").await?;
        assert_eq!(seen.payloads(1).await?, ["after"]);
        subscription.stop().await;
    }
    Ok(())
}

async fn a_key_of_another_kind_stops_nobody_else(env: Env) -> Result<()> {
    start_counting();
    env.create(2).await?;
    let (handler, mut seen) = recorder(|_| Outcome::Done);
    let subscription = env.queue.subscribe(&env.topic, GROUP, handler, shared()).await?;
    env.send(1, None, "first").await?;
    assert_eq!(seen.payloads(1).await?, ["first"]);
    // Somebody puts something else into the place of a partition.
    let broken = env.stream(1).await?;
    let map = headwater_stream::MapName::new(broken.as_str())?;
    let fields = [("a".to_owned(), Bytes::from_static(b"b"))].into();
    // The consumer creates its group again as soon as it misses it, so it takes some tries to be in between.
    eventually("something else lies there", async || {
        env.backend.delete_stream(&broken).await?;
        match env.backend.map_create(&map, &fields).await {
            Ok(is_new) => Ok(is_new),
            Err(StreamError::WrongType { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    })
    .await?;
    if env.url.starts_with("redis") {
        eventually("it was noticed and counted", async || {
            Ok(counted(metrics::ANOMALIES, &env.topic, "wrong_type") > 0)
        })
        .await?;
    }
    assert_alive!(env, seen);
    // When it is mended, the partition works again.
    env.backend.map_delete(&map).await?;
    env.send(1, None, "mended").await?;
    assert_eq!(seen.payloads(1).await?, ["mended"]);
    subscription.stop().await;
    Ok(())
}

on_every_backend!(
    malformed_entries_go_to_the_dead_letters_with_their_bytes,
    unknown_fields_and_headers_are_delivered_as_they_are,
    an_entry_as_large_as_the_backend_takes_can_be_retried_and_given_up,
    an_entry_trimmed_while_it_is_handled_is_safe_in_our_hands,
    an_entry_trimmed_while_its_consumer_was_dead_is_counted,
    a_topic_deleted_under_its_consumer_works_again_when_it_is_created,
    a_key_of_another_kind_stops_nobody_else,
);
