//! Single messages and batches, and rejected messages.

use crate::setup::on_every_backend;

on_every_backend! {
    produce_with_hash_partitioning
    a_message_is_stored_in_its_partition_with_the_documented_fields
    a_compact_entry_has_only_the_fields_that_its_message_needs
    the_entry_format_of_a_topic_can_be_changed
    a_topic_that_was_not_created_is_plain
    messages_without_a_key_are_distributed_round_robin
    an_explicit_partition_is_used
    concurrent_sends_are_all_stored_once
    a_batch_returns_one_result_per_message
    a_batch_with_one_invalid_message_sends_nothing
    messages_over_a_limit_are_rejected_and_nothing_is_sent
    unusual_headers_are_delivered_unchanged
    a_topic_with_invalid_metadata_is_rejected
    a_resize_is_known_after_refresh
    messages_beyond_the_retention_are_trimmed
}

mod bodies {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use anyhow::{Context, Result};
    use headwater_queue::limits::{HEADERS_BYTES_MAX, KEY_BYTES_MAX, PAYLOAD_BYTES_MAX};
    use headwater_queue::{
        EntryFormat, NewMessage, Partitioner, Policies, PolicyChanges, ProducerConfig, Queue,
        QueueError, hash_code,
    };
    use headwater_stream::{Entry, MapName, RegistryMap, Retention};

    use crate::setup::{Setup, full, text};

    /// The sequence diagram of the same name.
    pub(super) async fn produce_with_hash_partitioning(setup: Setup) -> Result<()> {
        let (producer, topic) = (&setup.producer, &setup.topic);

        // Producer -> Meta: ensure topic meta (P)
        let partitions = 2;
        setup.queue.topics().create(topic, partitions, full()).await?;

        for key in ["user-123", "k0", "k29"] {
            // Producer -> Producer: p = hash(key) % P
            let p = u16::try_from(hash_code(key).rem_euclid(i32::from(partitions)))?;

            // alt p == 0: Producer -> R0: XADD payload, partitionId = 0
            // else p == 1: Producer -> R1: XADD payload, partitionId = 1
            let sent = producer.send(topic, NewMessage::keyed(key, "payload")).await?;
            assert_eq!(sent.partition, p);
            let there = setup.entries(p).await?;
            let entry =
                there.iter().find(|entry| entry.id == sent.id).context("it is not there")?;
            assert_eq!(text(entry, "payload"), Some("payload"));
            assert_eq!(text(entry, "partitionId"), Some(p.to_string().as_str()));
        }
        let (r0, r1) = (setup.entries(0).await?, setup.entries(1).await?);
        assert_eq!((r0.len(), r1.len()), (2, 1));
        Ok(())
    }

    pub(super) async fn a_message_is_stored_in_its_partition_with_the_documented_fields(
        setup: Setup,
    ) -> Result<()> {
        setup.queue.topics().create(&setup.topic, 3, full()).await?;
        let payload: &[u8] = b"\x00\xff\r\n{}";
        let mut message = NewMessage::keyed("k29", payload).header("kind", "refund");
        let sent = setup.producer.send(&setup.topic, message.clone()).await?;
        assert_eq!((sent.partition, sent.duplicate), (1, false));

        let entry = setup.entries(1).await?.remove(0);
        assert_eq!(entry.id, sent.id);
        let names: Vec<_> = entry.fields.iter().map(|(name, _)| name.as_ref()).collect();
        let wanted = "payload timestamp retryCount maxRetries topic partitionId key headers";
        assert_eq!(names, wanted.split(' ').map(str::as_bytes).collect::<Vec<_>>());
        assert_eq!(entry.fields.get("payload").map(AsRef::as_ref), Some(payload));
        assert_eq!(text(&entry, "retryCount"), Some("0"));
        assert_eq!(text(&entry, "maxRetries"), Some("4"));
        assert_eq!(text(&entry, "topic"), Some(setup.topic.as_str()));
        assert_eq!(text(&entry, "partitionId"), Some("1"));
        assert_eq!(text(&entry, "key"), Some("k29"));
        assert_eq!(text(&entry, "headers"), Some(r#"{"kind":"refund"}"#));
        let timestamp = text(&entry, "timestamp").context("no timestamp")?;
        assert!(headwater_stream::clock::Timestamp::from_rfc3339(timestamp).is_some());

        // Without a key there is no key field, and the message's own limit overrides the topic's.
        (message.key, message.max_retries, message.partition) = (None, Some(7), Some(0));
        setup.producer.send(&setup.topic, message).await?;
        let entry = setup.entries(0).await?.remove(0);
        assert_eq!((text(&entry, "key"), text(&entry, "maxRetries")), (None, Some("7")));
        Ok(())
    }

    pub(super) async fn a_compact_entry_has_only_the_fields_that_its_message_needs(
        setup: Setup,
    ) -> Result<()> {
        setup.queue.topics().create(&setup.topic, 1, Policies::default()).await?;
        let bare = NewMessage::new("p");
        let mut whole = NewMessage::keyed("k", "p").header("kind", "refund");
        whole.max_retries = Some(7);
        let batch = vec![bare.clone(), whole.clone()];
        setup.producer.send(&setup.topic, bare).await?;
        let last = setup.producer.send(&setup.topic, whole).await?;
        for sent in setup.producer.send_batch(&setup.topic, batch).await? {
            sent?;
        }

        let entries = setup.entries(0).await?;
        let names = |entry: &Entry| -> Vec<String> {
            let name = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
            entry.fields.iter().map(|(field, _)| name(field)).collect()
        };
        let named: Vec<_> = entries.iter().map(names).collect();
        let (bare, whole) = (vec!["payload"], vec!["payload", "key", "headers", "maxRetries"]);
        assert_eq!(named, [bare.clone(), whole.clone(), bare, whole]);

        // What the entry does not say is derived.
        let found = setup.queue.inspect().message(&setup.topic, 0, last.id).await?;
        let message = found.context("it is there")?.message?;
        assert_eq!((message.attempt, message.max_retries), (1, Some(7)));
        assert_eq!(message.sent_at.as_millis(), last.id.ms);
        assert_eq!(message.headers["kind"], "refund");
        Ok(())
    }

    pub(super) async fn the_entry_format_of_a_topic_can_be_changed(setup: Setup) -> Result<()> {
        let policies = Policies { refresh: Duration::from_millis(20), ..Policies::default() };
        setup.queue.topics().create(&setup.topic, 1, policies).await?;
        setup.producer.send(&setup.topic, NewMessage::new("p")).await?;
        let changes = PolicyChanges { entry_format: Some(EntryFormat::Full), ..Default::default() };
        setup.queue.topics().alter(&setup.topic, &changes).await?;
        setup.producer.send(&setup.topic, NewMessage::new("p")).await?;
        let entries = setup.entries(0).await?;
        assert_eq!(entries.iter().map(|entry| entry.fields.len()).collect::<Vec<_>>(), [1, 7]);
        Ok(())
    }

    pub(super) async fn a_topic_that_was_not_created_is_plain(setup: Setup) -> Result<()> {
        let sent = setup.producer.send(&setup.topic, NewMessage::keyed("k", "p")).await?;
        assert_eq!(sent.partition, 0);
        assert_eq!(setup.stream(0).await?.as_str(), setup.topic);
        assert_eq!(setup.entries(0).await?.len(), 1);

        // After this process creates the topic, it has partitions at once.
        setup.queue.topics().create(&setup.topic, 8, Policies::default()).await?;
        let sent = setup.producer.send(&setup.topic, NewMessage::keyed("k0", "p")).await?;
        assert_eq!(sent.partition, 5);
        assert_eq!(setup.entries(5).await?.len(), 1);
        Ok(())
    }

    pub(super) async fn messages_without_a_key_are_distributed_round_robin(
        setup: Setup,
    ) -> Result<()> {
        setup.queue.topics().create(&setup.topic, 3, Policies::default()).await?;
        for _ in 0..9 {
            setup.producer.send(&setup.topic, NewMessage::new("p")).await?;
        }
        for partition in 0..3 {
            assert_eq!(setup.entries(partition).await?.len(), 3);
        }
        Ok(())
    }

    pub(super) async fn an_explicit_partition_is_used(setup: Setup) -> Result<()> {
        setup.queue.topics().create(&setup.topic, 3, Policies::default()).await?;
        // The hash of this key is partition 0.
        let message = NewMessage::keyed("k1", "p").to_partition(2);
        assert_eq!(setup.producer.send(&setup.topic, message).await?.partition, 2);
        assert_eq!(setup.entries(2).await?.len(), 1);
        Ok(())
    }

    pub(super) async fn concurrent_sends_are_all_stored_once(setup: Setup) -> Result<()> {
        setup.queue.topics().create(&setup.topic, 4, Policies::default()).await?;
        let senders = (0..32).map(|sender| {
            let (producer, topic) = (setup.producer.clone(), setup.topic.clone());
            tokio::spawn(async move {
                let mut sent = Vec::new();
                for number in 0..25 {
                    let key = format!("k{sender}");
                    let message = NewMessage::keyed(key, format!("{sender}-{number}"));
                    sent.push(producer.send(&topic, message).await?);
                }
                anyhow::Ok(sent)
            })
        });
        let mut confirmed = BTreeMap::new();
        for sender in senders.collect::<Vec<_>>() {
            let sent = sender.await??;
            assert!(sent.is_sorted_by_key(|sent| sent.id), "messages of one sender are in order");
            confirmed.extend(sent.into_iter().map(|sent| ((sent.partition, sent.id), ())));
        }
        assert_eq!(confirmed.len(), 32 * 25);
        let mut payloads = BTreeMap::new();
        for partition in 0..4 {
            for entry in setup.entries(partition).await? {
                assert!(
                    confirmed.contains_key(&(partition, entry.id)),
                    "a stored message was not confirmed"
                );
                *payloads
                    .entry(text(&entry, "payload").context("no payload")?.to_owned())
                    .or_insert(0) += 1;
            }
        }
        assert_eq!(payloads.len(), 32 * 25);
        assert!(payloads.values().all(|count| *count == 1));
        Ok(())
    }

    pub(super) async fn a_batch_returns_one_result_per_message(setup: Setup) -> Result<()> {
        setup.queue.topics().create(&setup.topic, 3, Policies::default()).await?;
        let batch: Vec<_> =
            (0..100).map(|n| NewMessage::keyed(format!("k{}", n % 7), n.to_string())).collect();
        let sent = setup.producer.send_batch(&setup.topic, batch).await?;
        assert_eq!(sent.len(), 100);
        let mut last = BTreeMap::new();
        for (number, sent) in sent.into_iter().enumerate() {
            let sent = sent?;
            let there = setup.entries(sent.partition).await?;
            let entry = there.iter().find(|entry| entry.id == sent.id).context("not there")?;
            assert_eq!(text(entry, "payload"), Some(number.to_string().as_str()));
            // In the order of the batch within each partition.
            let before = last.insert(sent.partition, sent.id);
            assert!(before.is_none_or(|before| before < sent.id));
        }
        assert_eq!(setup.count().await?, 100);
        assert!(setup.producer.send_batch(&setup.topic, Vec::new()).await?.is_empty());
        Ok(())
    }

    pub(super) async fn a_batch_with_one_invalid_message_sends_nothing(setup: Setup) -> Result<()> {
        setup.queue.topics().create(&setup.topic, 3, Policies::default()).await?;
        let mut batch: Vec<_> = (0..10).map(|n| NewMessage::new(n.to_string())).collect();
        batch[7].partition = Some(3);
        let error =
            setup.producer.send_batch(&setup.topic, batch).await.expect_err("it is rejected");
        assert!(matches!(error, QueueError::Invalid { .. }));
        assert!(error.to_string().contains("message 7 of the batch"), "{error}");
        assert_eq!(setup.count().await?, 0);
        Ok(())
    }

    pub(super) async fn messages_over_a_limit_are_rejected_and_nothing_is_sent(
        setup: Setup,
    ) -> Result<()> {
        let policies = Policies { payload_bytes_max: 10, ..Default::default() };
        setup.queue.topics().create(&setup.topic, 2, policies).await?;
        let with_id = |id: &str| NewMessage::new("").with_id(id);
        for (message, complaint) in [
            (NewMessage::new("eleven byte"), "allows 10"),
            (NewMessage::keyed("k".repeat(KEY_BYTES_MAX + 1), ""), "key is invalid"),
            (NewMessage::new("").to_partition(2), "has partitions 0 to 1"),
            (NewMessage::new("").header("h", "x".repeat(HEADERS_BYTES_MAX)), "as JSON"),
            (with_id(""), "id is invalid"),
            (with_id(&"i".repeat(513)), "id is invalid"),
            (NewMessage { max_retries: Some(1000), ..Default::default() }, "max_retries"),
        ] {
            let error =
                setup.producer.send(&setup.topic, message).await.expect_err("it is rejected");
            assert!(matches!(error, QueueError::Invalid { .. }), "{error:?}");
            assert!(error.to_string().contains(complaint), "{error}");
            assert!(!error.is_transient());
        }
        for name in ["", "a{b}", "line\nbreak"] {
            let error =
                setup.producer.send(name, NewMessage::new("p")).await.expect_err("it is rejected");
            assert!(error.to_string().starts_with("a topic name is invalid"), "{error}");
        }
        let picky = ProducerConfig {
            partitioner: std::sync::Arc::new(OutOfRangePartitioner),
            ..Default::default()
        };
        let error = setup.queue.producer(picky)?.send(&setup.topic, NewMessage::new("")).await;
        assert!(matches!(error, Err(QueueError::Invalid { .. })), "{error:?}");
        assert_eq!(setup.count().await?, 0);

        // A message of exactly the maximum size is sent.
        let plain = format!("{}-plain", setup.topic);
        let headers = format!("{:x<1$}", "", HEADERS_BYTES_MAX - r#"{"h":""}"#.len());
        let mut largest = NewMessage::keyed("k".repeat(KEY_BYTES_MAX), vec![7; PAYLOAD_BYTES_MAX]);
        largest = largest.header("h", headers);
        setup.producer.send(&plain, largest).await?;
        Ok(())
    }

    struct OutOfRangePartitioner;

    impl Partitioner for OutOfRangePartitioner {
        fn partition(&self, _key: Option<&str>, partitions: u16) -> u16 {
            partitions
        }
    }

    pub(super) async fn unusual_headers_are_delivered_unchanged(setup: Setup) -> Result<()> {
        let headers =
            [("", "empty name"), ("a\"b\\", "c\nd\u{0}"), ("traceparent", "no such"), ("键", "😀")];
        let mut message = NewMessage::new("p");
        for (name, value) in headers {
            message = message.header(name, value);
        }
        setup.producer.send(&setup.topic, message.clone()).await?;
        let entry = setup.entries(0).await?.remove(0);
        let read: BTreeMap<String, String> =
            serde_json::from_str(text(&entry, "headers").context("no headers")?)?;
        assert_eq!(read, message.headers);
        Ok(())
    }

    pub(super) async fn a_topic_with_invalid_metadata_is_rejected(setup: Setup) -> Result<()> {
        let meta = MapName::new(format!("streaming:mq:topic:{}:meta", setup.topic))?;
        let fields: RegistryMap = [("partitionCount".to_owned(), "many".into())].into();
        setup.backend().map_create(&meta, &fields).await?;
        let error = setup
            .producer
            .send(&setup.topic, NewMessage::new("p"))
            .await
            .expect_err("it is rejected");
        assert!(error.to_string().contains("`partitionCount` in the meta of topic"), "{error}");
        setup.backend().map_delete(&meta).await?;

        // Unknown settings are ignored.
        let fields: RegistryMap =
            [("partitionCount".to_owned(), "3".into()), ("colour".to_owned(), "red".into())].into();
        setup.backend().map_create(&meta, &fields).await?;
        assert_eq!(
            setup.producer.send(&setup.topic, NewMessage::keyed("k29", "p")).await?.partition,
            1
        );
        Ok(())
    }

    pub(super) async fn a_resize_is_known_after_refresh(setup: Setup) -> Result<()> {
        let policies = Policies { refresh: Duration::from_millis(50), ..Default::default() };
        setup.queue.topics().create(&setup.topic, 3, policies).await?;
        assert_eq!(
            setup.producer.send(&setup.topic, NewMessage::keyed("k0", "p")).await?.partition,
            2
        );
        // By another process, so that this one is not notified.
        let other = Queue::new(setup.backend().clone());
        other.topics().grow(&setup.topic, 8).await?;
        assert_eq!(
            setup.producer.send(&setup.topic, NewMessage::keyed("k0", "p")).await?.partition,
            5
        );
        Ok(())
    }

    pub(super) async fn messages_beyond_the_retention_are_trimmed(setup: Setup) -> Result<()> {
        let policies = Policies { retention: Retention::max_len(50), ..Default::default() };
        setup.queue.topics().create(&setup.topic, 1, policies).await?;
        for _ in 0..10 {
            let batch = vec![NewMessage::new("p"); 100];
            for sent in setup.producer.send_batch(&setup.topic, batch).await? {
                sent?;
            }
        }
        let left = setup.entries(0).await?.len();
        assert!((50..400).contains(&left), "{left} are left");
        Ok(())
    }
}
