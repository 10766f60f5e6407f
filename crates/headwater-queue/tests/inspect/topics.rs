//! The life of topics.

use crate::setup::on_every_backend;

on_every_backend! {
    a_topic_is_created_once_and_found
    a_topic_with_other_settings_is_not_created_over_the_old_one
    settings_survive_the_registry
    on_a_cluster_each_partition_shares_a_slot_with_its_delays
    a_topic_grows_and_never_shrinks
    a_topic_of_another_program_without_growths_grows
    a_growth_whose_starter_died_is_finished_by_the_next_one
    a_registration_that_was_cut_short_is_finished_by_the_next_creation
    a_deleted_topic_leaves_nothing_behind
    a_topic_whose_deletion_was_cut_short_is_deleted_again
    a_deleted_topic_can_be_created_anew_with_other_settings
    deleting_a_topic_that_does_not_exist_says_so
    a_plain_topic_is_described_and_deleted_but_does_not_grow
    bad_names_and_settings_are_refused_without_effect
    a_topic_in_numbers
    a_plain_topic_in_numbers
    a_topic_that_does_not_exist_has_no_numbers
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{Layout, Policies, QueueError};
    use headwater_stream::clock::Timestamp;
    use headwater_stream::{
        DelayName, Due, Fields, MapName, PutAside, RegistryMap, Retention, SetName,
    };

    use crate::setup::*;

    fn meta(setup: &Setup) -> MapName {
        MapName::new(format!("streaming:mq:topic:{}:meta", setup.topic)).expect("it is there")
    }

    fn partitions_set(setup: &Setup) -> SetName {
        SetName::new(format!("streaming:mq:topic:{}:partitions", setup.topic)).expect("it is there")
    }

    fn registry() -> SetName {
        SetName::new("streaming:mq:topics:registry").expect("it is there")
    }

    async fn put_aside(setup: &Setup, partition: u16) -> Result<()> {
        let described = setup.queue.topics().describe(&setup.topic).await?;
        let place = &described.partitions[usize::from(partition)];
        let item = PutAside {
            to: setup.stream(partition).await?,
            due: Due::After(Duration::from_secs(3600)),
            fields: Fields::new([("payload", "later")]),
        };
        setup.backend().put_aside(&DelayName::new(&place.delays_key)?, &[item]).await?;
        Ok(())
    }

    pub(super) async fn a_topic_is_created_once_and_found(setup: Setup) -> Result<()> {
        let topics = setup.queue.topics();
        assert!(topics.create(&setup.topic, 3, quick()).await?);
        assert!(!topics.create(&setup.topic, 3, quick()).await?, "the same topic is there");
        assert!(topics.list().await?.contains(&setup.topic));
        let described = topics.describe(&setup.topic).await?;
        assert_eq!((described.topic.partitions, described.partitions.len()), (3, 3));
        let now = setup.backend().now().await?;
        let created_at = described.topic.created_at.expect("a created topic says when");
        assert!(now.since(created_at) < Duration::from_secs(60));
        let mut keys = setup.backend().set_members(&partitions_set(&setup)).await?;
        keys.sort();
        let mut expected: Vec<String> =
            described.partitions.iter().map(|place| place.stream_key.clone()).collect();
        expected.sort();
        assert_eq!(keys, expected, "other programs find the streams");
        Ok(())
    }

    pub(super) async fn a_topic_with_other_settings_is_not_created_over_the_old_one(
        setup: Setup,
    ) -> Result<()> {
        let topics = setup.queue.topics();
        setup.create(3).await?;
        let before = setup.backend().map_get(&meta(&setup)).await?;
        let budget = Policies { byte_budget: Some(1), ..quick() };
        for (partitions, policies) in [(4, quick()), (2, quick()), (3, budget)] {
            let answer = topics.create(&setup.topic, partitions, policies).await;
            assert!(matches!(answer, Err(QueueError::TopicExists { .. })), "{answer:?}");
        }
        assert_eq!(setup.backend().map_get(&meta(&setup)).await?, before);
        Ok(())
    }

    pub(super) async fn settings_survive_the_registry(setup: Setup) -> Result<()> {
        let policies = Policies {
            retention: Retention {
                max_len: Some(7),
                // Finer than the registry keeps it.
                max_age: Some(Duration::from_micros(1500)),
                max_bytes: Some(1 << 20),
            },
            byte_budget: Some(1 << 30),
            payload_bytes_max: 1000,
            max_retries: 2,
            refresh: Duration::from_millis(70),
        };
        let topics = setup.queue.topics();
        topics.create(&setup.topic, 2, policies.clone()).await?;
        assert!(!topics.create(&setup.topic, 2, policies.clone()).await?, "it is the same");
        let found = topics.describe(&setup.topic).await?.topic.policies;
        let age = Some(Duration::from_millis(1));
        let retention = Retention { max_age: age, ..policies.retention };
        assert_eq!(found, Policies { retention, ..policies });
        Ok(())
    }

    pub(super) async fn on_a_cluster_each_partition_shares_a_slot_with_its_delays(
        setup: Setup,
    ) -> Result<()> {
        setup.create(8).await?;
        let described = setup.queue.topics().describe(&setup.topic).await?;
        let slot = |key: &str| setup.backend().cluster_slot(key);
        let is_cluster = slot("any").is_some();
        let layout = if is_cluster { Layout::Clustered } else { Layout::Partitioned };
        assert_eq!(described.topic.layout, layout);
        assert_eq!(described.dead_letters_slot, slot(&described.dead_letters_key));
        for place in &described.partitions {
            assert_eq!(place.slot, slot(&place.stream_key));
            assert!(!is_cluster || place.slot == slot(&place.delays_key), "{place:?}");
        }
        let mut slots: Vec<_> = described.partitions.iter().filter_map(|p| p.slot).collect();
        slots.sort();
        slots.dedup();
        assert!(!is_cluster || slots.len() == 8, "partitions spread over the cluster: {slots:?}");
        Ok(())
    }

    pub(super) async fn a_topic_grows_and_never_shrinks(setup: Setup) -> Result<()> {
        let topics = setup.queue.topics();
        setup.create(2).await?;
        let sent = setup.send(1, "old").await?;
        topics.grow(&setup.topic, 5).await?;
        topics.grow(&setup.topic, 5).await?;

        let topic = topics.describe(&setup.topic).await?.topic;
        assert_eq!((topic.partitions, topic.resizes.len()), (5, 1));
        let growth = &topic.resizes[0];
        assert_eq!((growth.from, growth.to), (2, 5));
        assert_eq!(
            growth.last_ids.as_ref().expect("it is there")[1],
            sent.id,
            "moved keys wait up to here"
        );
        assert_eq!(setup.backend().set_members(&partitions_set(&setup)).await?.len(), 5);
        setup.send(4, "new").await?;
        assert_eq!(setup.entries(1).await?.len(), 1, "what was there stays where it was");

        assert_invalid(topics.grow(&setup.topic, 4).await, "partitions");
        assert_eq!(topics.describe(&setup.topic).await?.topic, topic, "nothing happened");
        Ok(())
    }

    /// What another program writes that knows no more than the seed.
    async fn foreign_topic(setup: &Setup, partitions: u16) -> Result<()> {
        let fields: RegistryMap = [
            ("partitionCount".to_owned(), partitions.to_string().into()),
            ("createdAt".to_owned(), "1767225600250".into()),
            ("refreshMs".to_owned(), "20".into()),
        ]
        .into();
        setup.backend().map_create(&meta(setup), &fields).await?;
        setup.backend().set_add(&registry(), &[&setup.topic], None).await?;
        Ok(())
    }

    pub(super) async fn a_topic_of_another_program_without_growths_grows(
        setup: Setup,
    ) -> Result<()> {
        foreign_topic(&setup, 2).await?;
        let topics = setup.queue.topics();
        let described = topics.describe(&setup.topic).await?;
        let key = format!("stream:topic:{}:p:1", setup.topic);
        assert_eq!(described.partitions[1].stream_key, key, "the seed's names");
        let slot = |key: &str| setup.backend().cluster_slot(key);
        assert_eq!(slot(&described.partitions[1].delays_key), slot(&key), "in one slot");
        setup.send(1, "to a foreign topic").await?;
        put_aside(&setup, 1).await?;

        topics.grow(&setup.topic, 4).await?;
        topics.grow(&setup.topic, 6).await?;

        let topic = topics.describe(&setup.topic).await?.topic;
        assert_eq!((topic.partitions, topic.resizes.len()), (6, 2));
        assert_eq!(topic.created_at, Some(Timestamp::from_millis(1_767_225_600_250)));
        assert_eq!(setup.entries(1).await?.len(), 1);
        assert_eq!(setup.queue.inspect().topic(&setup.topic).await?.delayed, 1);
        assert!(topics.delete(&setup.topic).await?);
        assert_eq!(setup.backend().stats(&setup.stream(0).await?).await?, None);
        Ok(())
    }

    pub(super) async fn a_growth_whose_starter_died_is_finished_by_the_next_one(
        setup: Setup,
    ) -> Result<()> {
        setup.create(1).await?;
        // The starter died after the first step: the meta says it, nothing else does.
        let began = setup.backend().now().await?.as_millis();
        let resizes = format!(r#"[{{"beganMs":{began},"from":1,"lastIds":null,"to":2}}]"#);
        let fields: RegistryMap =
            [("partitionCount".to_owned(), "2".into()), ("growths".to_owned(), resizes.into())]
                .into();
        assert!(setup.backend().map_update(&meta(&setup), None, &fields).await?);

        setup.queue.topics().grow(&setup.topic, 2).await?;

        let topic = setup.queue.topics().describe(&setup.topic).await?.topic;
        assert_eq!((topic.partitions, topic.resizes.len()), (2, 1));
        assert!(topic.resizes[0].last_ids.is_some(), "it is settled");
        assert_eq!(setup.backend().set_members(&partitions_set(&setup)).await?.len(), 2);
        Ok(())
    }

    pub(super) async fn a_registration_that_was_cut_short_is_finished_by_the_next_creation(
        setup: Setup,
    ) -> Result<()> {
        setup.create(2).await?;
        setup.backend().set_remove(&registry(), &[&setup.topic]).await?;
        let key = setup.stream(1).await?;
        setup.backend().set_remove(&partitions_set(&setup), &[key.as_str()]).await?;

        assert!(!setup.queue.topics().create(&setup.topic, 2, quick()).await?);

        assert!(setup.queue.topics().list().await?.contains(&setup.topic));
        assert_eq!(setup.backend().set_members(&partitions_set(&setup)).await?.len(), 2);
        Ok(())
    }

    pub(super) async fn a_deleted_topic_leaves_nothing_behind(setup: Setup) -> Result<()> {
        setup.create(3).await?;
        setup.send_many(3, 6).await?;
        setup.deliver(0, "ann", 1).await?;
        setup.dead_letter(&Letter::of(0, 7)).await?;
        for partition in 0..3 {
            put_aside(&setup, partition).await?;
        }
        let described = setup.queue.topics().describe(&setup.topic).await?;

        assert!(setup.queue.topics().delete(&setup.topic).await?);

        assert!(!setup.queue.topics().list().await?.contains(&setup.topic));
        assert_eq!(setup.backend().map_get(&meta(&setup)).await?, None);
        assert_eq!(setup.backend().set_members(&partitions_set(&setup)).await?.len(), 0);
        for place in described.partitions {
            let stream = headwater_stream::StreamName::new(place.stream_key)?;
            assert_eq!(setup.backend().stats(&stream).await?, None);
            let delays = DelayName::new(place.delays_key)?;
            assert_eq!(setup.backend().delay_stats(&delays).await?.waiting, 0);
        }
        let letters = headwater_stream::StreamName::new(described.dead_letters_key)?;
        assert_eq!(setup.backend().stats(&letters).await?, None);
        assert_no_topic(setup.queue.inspect().topic(&setup.topic).await);
        Ok(())
    }

    pub(super) async fn a_topic_whose_deletion_was_cut_short_is_deleted_again(
        setup: Setup,
    ) -> Result<()> {
        setup.create(2).await?;
        setup.send_many(2, 4).await?;
        // Whoever deleted it died half way: the name is gone and one stream is.
        setup.backend().set_remove(&registry(), &[&setup.topic]).await?;
        setup.backend().delete_stream(&setup.stream(0).await?).await?;
        let left = setup.stream(1).await?;

        assert!(setup.queue.topics().delete(&setup.topic).await?);

        assert_eq!(setup.backend().stats(&left).await?, None);
        assert_eq!(setup.backend().map_get(&meta(&setup)).await?, None);
        Ok(())
    }

    pub(super) async fn a_deleted_topic_can_be_created_anew_with_other_settings(
        setup: Setup,
    ) -> Result<()> {
        let topics = setup.queue.topics();
        setup.create(3).await?;
        setup.send_many(3, 6).await?;
        topics.delete(&setup.topic).await?;
        assert!(topics.create(&setup.topic, 2, quick()).await?);
        assert_eq!(setup.queue.inspect().topic(&setup.topic).await?.length, 0);
        assert_eq!(setup.backend().set_members(&partitions_set(&setup)).await?.len(), 2);
        setup.send(1, "new").await?;
        assert_eq!(setup.queue.inspect().topic(&setup.topic).await?.length, 1);
        Ok(())
    }

    pub(super) async fn deleting_a_topic_that_does_not_exist_says_so(setup: Setup) -> Result<()> {
        assert!(!setup.queue.topics().delete(&setup.topic).await?);
        assert!(!setup.queue.topics().list().await?.contains(&setup.topic));
        Ok(())
    }

    pub(super) async fn a_plain_topic_is_described_and_deleted_but_does_not_grow(
        setup: Setup,
    ) -> Result<()> {
        let topics = setup.queue.topics();
        setup.send(0, "plain").await?;
        let described = topics.describe(&setup.topic).await?;
        assert!(described.topic.layout.is_plain());
        assert_eq!(described.partitions[0].stream_key, setup.topic);
        assert_no_topic(topics.grow(&setup.topic, 2).await);
        assert!(!topics.list().await?.contains(&setup.topic));
        assert!(topics.delete(&setup.topic).await?);
        assert_eq!(setup.entries(0).await?.len(), 0);
        Ok(())
    }

    pub(super) async fn bad_names_and_settings_are_refused_without_effect(
        setup: Setup,
    ) -> Result<()> {
        let topics = setup.queue.topics();
        let long = "x".repeat(201);
        for name in ["", "a{b", "a}b", "a\nb", &long] {
            assert_invalid(topics.create(name, 1, quick()).await, "a topic name");
            assert_invalid(topics.describe(name).await, "a topic name");
            assert_invalid(topics.grow(name, 2).await, "a topic name");
            assert_invalid(topics.delete(name).await, "a topic name");
            assert_invalid(setup.queue.inspect().topic(name).await, "a topic name");
        }
        for partitions in [0, 1025] {
            assert_invalid(topics.create(&setup.topic, partitions, quick()).await, "partitions");
            assert_invalid(topics.grow(&setup.topic, partitions).await, "partitions");
        }
        let age = Retention { max_age: Some(Duration::ZERO), ..Retention::KEEP_ALL };
        let bytes = Retention { max_bytes: Some(0), ..Retention::KEEP_ALL };
        for (argument, policies) in [
            ("retention", Policies { retention: age, ..quick() }),
            ("retention", Policies { retention: bytes, ..quick() }),
            ("payload_bytes_max", Policies { payload_bytes_max: 0, ..quick() }),
            ("refresh", Policies { refresh: Duration::from_millis(1), ..quick() }),
            ("refresh", Policies { refresh: Duration::from_secs(61), ..quick() }),
            ("max_retries", Policies { max_retries: 1000, ..quick() }),
        ] {
            assert_invalid(topics.create(&setup.topic, 1, policies).await, argument);
        }
        assert_eq!(setup.backend().map_get(&meta(&setup)).await?, None);
        assert!(!topics.list().await?.contains(&setup.topic));
        Ok(())
    }

    pub(super) async fn a_topic_in_numbers(setup: Setup) -> Result<()> {
        setup.create(3).await?;
        let empty = setup.queue.inspect().topic(&setup.topic).await?;
        assert_eq!((empty.length, empty.first_id, empty.updated_at), (0, None, None));
        assert_eq!((empty.delayed, empty.next_due, empty.dead_letters), (0, None, 0));

        let sent = setup.send_many(2, 5).await?;
        setup.group(0).await?;
        put_aside(&setup, 0).await?;
        put_aside(&setup, 1).await?;
        setup.dead_letter(&Letter::of(0, 7)).await?;
        let view = setup.queue.inspect().topic(&setup.topic).await?;

        assert_eq!((view.name.as_str(), view.length), (setup.topic.as_str(), 5));
        assert_eq!((view.first_id, view.last_id), (Some(sent[0].id), Some(sent[4].id)));
        assert_eq!(view.updated_at, Some(Timestamp::from_millis(sent[4].id.ms)));
        assert!(view.created_at.is_some() && view.bytes.is_none_or(|bytes| bytes > 5));
        assert_eq!((view.delayed, view.dead_letters, view.is_growing), (2, 1, false));
        let left = view.next_due.expect("something waits").since(setup.backend().now().await?);
        assert!(left > Duration::from_secs(3000), "{left:?}");
        assert_eq!(view.groups, [GROUP]);
        assert_eq!(view.policies, quick());
        let lengths: Vec<u64> = view.partitions.iter().map(|p| p.length).collect();
        assert_eq!(lengths, [3, 2, 0]);
        assert_eq!(view.partitions[1].last_id, Some(sent[3].id));
        assert_eq!(view.partitions[2].first_id, None);
        Ok(())
    }

    pub(super) async fn a_plain_topic_in_numbers(setup: Setup) -> Result<()> {
        let sent = setup.send(0, "plain").await?;
        let view = setup.queue.inspect().topic(&setup.topic).await?;
        assert!(view.layout.is_plain());
        assert_eq!((view.length, view.last_id, view.created_at), (1, Some(sent.id), None));
        Ok(())
    }

    pub(super) async fn a_topic_that_does_not_exist_has_no_numbers(setup: Setup) -> Result<()> {
        assert_no_topic(setup.queue.inspect().topic(&setup.topic).await);
        assert_eq!(setup.backend().stats(&setup.stream(0).await?).await?, None, "nor was it made");
        Ok(())
    }
}
