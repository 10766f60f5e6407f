//! Messages with an id are stored once.

use crate::setup::on_every_backend;

on_every_backend! {
    a_message_that_is_sent_again_is_a_duplicate
    ids_are_remembered_only_for_the_window
    without_a_key_the_id_determines_the_partition
    a_batch_drops_duplicates_and_keeps_its_order
    after_a_resize_a_duplicate_is_found_in_the_old_partition
    concurrent_duplicates_are_stored_once
}

mod bodies {
    use std::sync::Arc;
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{NewMessage, Policies, ProducerConfig, Queue, RoundRobin, hash_code};

    use crate::setup::{Setup, text};

    pub(super) async fn a_message_that_is_sent_again_is_a_duplicate(setup: Setup) -> Result<()> {
        setup.queue.topics().create(&setup.topic, 4, Policies::default()).await?;
        let message = NewMessage::keyed("k", "first").with_id("order 7");
        let first = setup.producer.send(&setup.topic, message.clone()).await?;
        assert!(!first.duplicate);

        // Also from another process, and with another payload: only the id matters.
        let other = Queue::new(setup.backend().clone()).producer(ProducerConfig::default())?;
        let changed = NewMessage { payload: "second".into(), ..message.clone() };
        for producer in [&setup.producer, &other] {
            let again = producer.send(&setup.topic, changed.clone()).await?;
            assert!(again.duplicate);
            assert_eq!((again.id, again.partition), (first.id, first.partition));
        }
        assert_eq!(setup.count().await?, 1);

        // Another id is another message; without an id every message is new.
        setup.producer.send(&setup.topic, message.clone().with_id("order 8")).await?;
        setup.producer.send(&setup.topic, NewMessage { id: None, ..message }).await?;
        assert_eq!(setup.count().await?, 3);
        Ok(())
    }

    pub(super) async fn ids_are_remembered_only_for_the_window(setup: Setup) -> Result<()> {
        let window = Duration::from_secs(5);
        let config =
            ProducerConfig { deadline: window, idempotence_window: window, ..Default::default() };
        let producer = setup.queue.producer(config)?;
        let message = NewMessage::new("p").with_id("a");
        let first = producer.send(&setup.topic, message.clone()).await?;
        let second = loop {
            let again = producer.send(&setup.topic, message.clone()).await?;
            if !again.duplicate {
                break again;
            }
            assert_eq!(again.id, first.id);
            tokio::time::sleep(Duration::from_millis(200)).await;
        };
        assert!(second.id.ms >= first.id.ms + 4_999, "{} after {}", second.id, first.id);
        assert_eq!(setup.count().await?, 2);
        Ok(())
    }

    pub(super) async fn without_a_key_the_id_determines_the_partition(setup: Setup) -> Result<()> {
        setup.queue.topics().create(&setup.topic, 8, Policies::default()).await?;
        // With a round-robin partitioner, the duplicate would go to another partition.
        let config =
            ProducerConfig { partitioner: Arc::new(RoundRobin::default()), ..Default::default() };
        let around = setup.queue.producer(config)?;
        for number in 0..20 {
            let id = format!("id-{number}");
            let partition = u16::try_from(hash_code(&id).rem_euclid(8))?;
            let first =
                setup.producer.send(&setup.topic, NewMessage::new("p").with_id(&id)).await?;
            assert_eq!((first.partition, first.duplicate), (partition, false));
            let keyed = NewMessage::keyed("k", "p").with_id(&id);
            let again = around.send(&setup.topic, keyed).await?;
            assert_eq!((again.partition, again.duplicate), (partition, true));
        }
        assert_eq!(setup.count().await?, 20);
        Ok(())
    }

    pub(super) async fn a_batch_drops_duplicates_and_keeps_its_order(setup: Setup) -> Result<()> {
        setup.queue.topics().create(&setup.topic, 2, Policies::default()).await?;
        let message = |payload: &str, id: Option<&str>| NewMessage {
            id: id.map(str::to_owned),
            partition: Some(1),
            ..NewMessage::new(payload.to_owned())
        };
        let batch = vec![
            message("a", None),
            message("b", Some("1")),
            message("c", Some("2")),
            message("b again", Some("1")),
            message("d", None),
            message("e", Some("3")),
        ];
        let mut duplicates = Vec::new();
        for _ in 0..2 {
            for sent in setup.producer.send_batch(&setup.topic, batch.clone()).await? {
                duplicates.push(sent?.duplicate);
            }
        }
        let first = [false, false, false, true, false, false];
        let second = [false, true, true, true, false, true];
        assert_eq!(duplicates, [first, second].concat());
        let entries = setup.entries(1).await?;
        let payloads: Vec<_> = entries.iter().filter_map(|entry| text(entry, "payload")).collect();
        assert_eq!(payloads, ["a", "b", "c", "d", "e", "a", "d"]);
        Ok(())
    }

    pub(super) async fn after_a_resize_a_duplicate_is_found_in_the_old_partition(
        setup: Setup,
    ) -> Result<()> {
        let policies = Policies { refresh: Duration::from_millis(20), ..Default::default() };
        setup.queue.topics().create(&setup.topic, 2, policies).await?;
        let message = |number: usize| {
            let message = NewMessage::new(number.to_string()).with_id(format!("id-{number}"));
            // Half of them have a key.
            NewMessage { key: number.is_multiple_of(2).then(|| format!("k{number}")), ..message }
        };
        let mut first = Vec::new();
        for number in 0..10 {
            first.push(setup.producer.send(&setup.topic, message(number)).await?);
        }
        setup.queue.topics().grow(&setup.topic, 5).await?;
        setup.queue.topics().grow(&setup.topic, 7).await?;
        let again = setup.producer.send_batch(&setup.topic, (0..10).map(message).collect()).await?;
        for (number, (first, in_batch)) in first.iter().zip(again).enumerate() {
            let again = setup.producer.send(&setup.topic, message(number)).await?;
            for again in [again, in_batch?] {
                assert_eq!((again.id, again.partition), (first.id, first.partition), "{number}");
                assert!(again.duplicate);
            }
        }
        assert_eq!(setup.count().await?, 10);
        Ok(())
    }

    pub(super) async fn concurrent_duplicates_are_stored_once(setup: Setup) -> Result<()> {
        setup.queue.topics().create(&setup.topic, 3, Policies::default()).await?;
        let tasks = (0..40).map(|task| {
            let (producer, topic) = (setup.producer.clone(), setup.topic.clone());
            let message = NewMessage::new("p").with_id(format!("id-{}", task % 8));
            tokio::spawn(async move { producer.send(&topic, message).await })
        });
        let mut new = 0;
        for task in tasks.collect::<Vec<_>>() {
            new += usize::from(!task.await??.duplicate);
        }
        assert_eq!((new, setup.count().await?), (8, 8));
        Ok(())
    }
}
