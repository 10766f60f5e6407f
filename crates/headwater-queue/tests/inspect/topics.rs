//! Topic administration.

use crate::fixture::on_every_backend;

on_every_backend! {
    a_topic_is_created_once_and_found
    creating_an_existing_topic_with_other_settings_fails
    settings_round_trip_through_the_registry
    on_a_cluster_each_partition_shares_a_slot_with_its_delays
    a_topic_is_altered_and_keeps_the_rest
    a_topic_grows_and_never_shrinks
    a_topic_of_another_program_can_be_grown
    a_resize_is_completed_by_the_next_one_if_its_process_died
    an_interrupted_registration_is_completed_by_the_next_creation
    a_deleted_topic_leaves_nothing_behind
    an_interrupted_deletion_can_be_repeated
    a_deleted_topic_can_be_created_again_with_other_settings
    deleting_a_missing_topic_returns_false
    a_plain_topic_is_described_and_deleted_but_does_not_grow
    invalid_names_and_settings_are_rejected_without_effect
    topic_statistics_are_correct
    plain_topic_statistics_are_correct
    statistics_of_a_missing_topic_are_an_error
}

mod bodies {
    use std::time::Duration;

    use anyhow::Result;
    use headwater_queue::{EntryFormat, Layout, Policies, PolicyChanges, QueueError};
    use headwater_stream::clock::Timestamp;
    use headwater_stream::{
        DelayName, DueTime, Fields, MapName, RegistryMap, Retention, ScheduleRequest, SetName,
    };

    use crate::fixture::*;

    fn meta(fixture: &QueueFixture) -> MapName {
        MapName::new(format!("streaming:mq:topic:{}:meta", fixture.topic)).expect("it exists")
    }

    fn partitions_set(fixture: &QueueFixture) -> SetName {
        SetName::new(format!("streaming:mq:topic:{}:partitions", fixture.topic)).expect("it exists")
    }

    fn registry() -> SetName {
        SetName::new("streaming:mq:topics:registry").expect("it exists")
    }

    async fn schedule_one(fixture: &QueueFixture, partition: u16) -> Result<()> {
        let described = fixture.queue.topics().describe(&fixture.topic).await?;
        let place = &described.partitions[usize::from(partition)];
        let item = ScheduleRequest {
            to: fixture.stream(partition).await?,
            due: DueTime::After(Duration::from_secs(3600)),
            fields: Fields::new([("payload", "later")]),
        };
        fixture.backend().schedule(&DelayName::new(&place.delays_key)?, &[item]).await?;
        Ok(())
    }

    pub(super) async fn a_topic_is_created_once_and_found(fixture: QueueFixture) -> Result<()> {
        let topics = fixture.queue.topics();
        assert!(topics.create(&fixture.topic, 3, quick()).await?);
        assert!(!topics.create(&fixture.topic, 3, quick()).await?, "the same topic exists");
        assert!(topics.list().await?.contains(&fixture.topic));
        let described = topics.describe(&fixture.topic).await?;
        assert_eq!((described.topic.partitions, described.partitions.len()), (3, 3));
        let now = fixture.backend().now().await?;
        let created_at = described.topic.created_at.expect("a created topic has a creation time");
        assert!(now.since(created_at) < Duration::from_secs(60));
        let mut keys = fixture.backend().set_members(&partitions_set(&fixture)).await?;
        keys.sort();
        let mut expected: Vec<String> =
            described.partitions.iter().map(|place| place.stream_key.clone()).collect();
        expected.sort();
        assert_eq!(keys, expected, "other programs find the streams");
        Ok(())
    }

    pub(super) async fn creating_an_existing_topic_with_other_settings_fails(
        fixture: QueueFixture,
    ) -> Result<()> {
        let topics = fixture.queue.topics();
        fixture.create(3).await?;
        let before = fixture.backend().map_get(&meta(&fixture)).await?;
        let budget = Policies { byte_budget: Some(1), ..quick() };
        let full = Policies { entry_format: EntryFormat::Full, ..quick() };
        for (partitions, policies) in [(4, quick()), (2, quick()), (3, budget), (3, full)] {
            let answer = topics.create(&fixture.topic, partitions, policies).await;
            assert!(matches!(answer, Err(QueueError::TopicExists { .. })), "{answer:?}");
        }
        assert_eq!(fixture.backend().map_get(&meta(&fixture)).await?, before);
        Ok(())
    }

    pub(super) async fn settings_round_trip_through_the_registry(
        fixture: QueueFixture,
    ) -> Result<()> {
        let policies = Policies {
            retention: Retention {
                max_len: Some(7),
                // More precise than the registry stores it.
                max_age: Some(Duration::from_micros(1500)),
                max_bytes: Some(1 << 20),
            },
            byte_budget: Some(1 << 30),
            payload_bytes_max: 1000,
            max_retries: 2,
            refresh: Duration::from_millis(70),
            entry_format: EntryFormat::Full,
        };
        let topics = fixture.queue.topics();
        topics.create(&fixture.topic, 2, policies.clone()).await?;
        assert!(!topics.create(&fixture.topic, 2, policies.clone()).await?, "it is the same");
        // A program that knows only full entries created the topic; they have all that compact ones have.
        let compact = Policies { entry_format: EntryFormat::Compact, ..policies.clone() };
        assert!(!topics.create(&fixture.topic, 2, compact).await?, "it is good enough");
        let found = topics.describe(&fixture.topic).await?.topic.policies;
        let age = Some(Duration::from_millis(1));
        let retention = Retention { max_age: age, ..policies.retention };
        assert_eq!(found, Policies { retention, ..policies });
        Ok(())
    }

    pub(super) async fn on_a_cluster_each_partition_shares_a_slot_with_its_delays(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(8).await?;
        let described = fixture.queue.topics().describe(&fixture.topic).await?;
        let slot = |key: &str| fixture.backend().cluster_slot(key);
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

    pub(super) async fn a_topic_is_altered_and_keeps_the_rest(fixture: QueueFixture) -> Result<()> {
        let topics = fixture.queue.topics();
        fixture.create(2).await?;
        let before = topics.describe(&fixture.topic).await?.topic;
        let changes = PolicyChanges {
            retention_age: Some(Some(Duration::from_secs(60))),
            retention_count: Some(Some(7)),
            byte_budget: Some(Some(1_000_000)),
            ..PolicyChanges::default()
        };
        let altered = topics.alter(&fixture.topic, &changes).await?;
        assert_eq!(topics.describe(&fixture.topic).await?.topic.policies, altered);
        let retention = altered.retention;
        assert_eq!(
            (retention.max_len, retention.max_age),
            (Some(7), Some(Duration::from_secs(60)))
        );
        assert_eq!(
            (altered.byte_budget, altered.refresh),
            (Some(1_000_000), before.policies.refresh)
        );

        let removed = PolicyChanges {
            retention_age: Some(None),
            byte_budget: Some(None),
            max_retries: Some(1),
            ..PolicyChanges::default()
        };
        topics.alter(&fixture.topic, &removed).await?;
        let topic = topics.describe(&fixture.topic).await?.topic;
        let Policies { retention, byte_budget, max_retries, .. } = topic.policies;
        assert_eq!((retention.max_len, retention.max_age), (Some(7), None));
        assert_eq!((byte_budget, max_retries, topic.partitions), (None, 1, 2));
        // Growing keeps the altered policies.
        topics.grow(&fixture.topic, 3).await?;
        assert_eq!(topics.describe(&fixture.topic).await?.topic.policies.max_retries, 1);

        let wrong = PolicyChanges { retention_bytes: Some(Some(0)), ..PolicyChanges::default() };
        assert_invalid(topics.alter(&fixture.topic, &wrong).await, "retention");
        let missing = topics.alter("missing", &removed).await;
        assert!(matches!(missing, Err(QueueError::NoTopic { .. })), "{missing:?}");
        Ok(())
    }

    pub(super) async fn a_topic_grows_and_never_shrinks(fixture: QueueFixture) -> Result<()> {
        let topics = fixture.queue.topics();
        fixture.create(2).await?;
        let sent = fixture.send(1, "old").await?;
        topics.grow(&fixture.topic, 5).await?;
        topics.grow(&fixture.topic, 5).await?;

        let topic = topics.describe(&fixture.topic).await?.topic;
        assert_eq!((topic.partitions, topic.resizes.len()), (5, 1));
        let growth = &topic.resizes[0];
        assert_eq!((growth.from, growth.to), (2, 5));
        assert_eq!(
            growth.last_ids.as_ref().expect("it exists")[1],
            sent.id,
            "moved keys wait up to here"
        );
        assert_eq!(fixture.backend().set_members(&partitions_set(&fixture)).await?.len(), 5);
        fixture.send(4, "new").await?;
        assert_eq!(fixture.entries(1).await?.len(), 1, "existing messages stay in place");

        assert_invalid(topics.grow(&fixture.topic, 4).await, "partitions");
        assert_eq!(topics.describe(&fixture.topic).await?.topic, topic, "nothing happened");
        Ok(())
    }

    /// A topic as another program creates it.
    async fn foreign_topic(fixture: &QueueFixture, partitions: u16) -> Result<()> {
        let fields: RegistryMap = [
            ("partitionCount".to_owned(), partitions.to_string().into()),
            ("createdAt".to_owned(), "1767225600250".into()),
            ("refreshMs".to_owned(), "20".into()),
        ]
        .into();
        fixture.backend().map_create(&meta(fixture), &fields).await?;
        fixture.backend().set_add(&registry(), &[&fixture.topic], None).await?;
        Ok(())
    }

    pub(super) async fn a_topic_of_another_program_can_be_grown(
        fixture: QueueFixture,
    ) -> Result<()> {
        foreign_topic(&fixture, 2).await?;
        let topics = fixture.queue.topics();
        let described = topics.describe(&fixture.topic).await?;
        let key = format!("stream:topic:{}:p:1", fixture.topic);
        assert_eq!(described.partitions[1].stream_key, key, "the names other programs use");
        let slot = |key: &str| fixture.backend().cluster_slot(key);
        assert_eq!(slot(&described.partitions[1].delays_key), slot(&key), "in one slot");
        fixture.send(1, "to a foreign topic").await?;
        schedule_one(&fixture, 1).await?;

        topics.grow(&fixture.topic, 4).await?;
        topics.grow(&fixture.topic, 6).await?;

        let topic = topics.describe(&fixture.topic).await?.topic;
        assert_eq!((topic.partitions, topic.resizes.len()), (6, 2));
        assert_eq!(topic.created_at, Some(Timestamp::from_millis(1_767_225_600_250)));
        assert_eq!(fixture.entries(1).await?.len(), 1);
        assert_eq!(fixture.queue.inspect().topic(&fixture.topic).await?.delayed, 1);
        assert!(topics.delete(&fixture.topic).await?);
        assert_eq!(fixture.backend().stats(&fixture.stream(0).await?).await?, None);
        Ok(())
    }

    pub(super) async fn a_resize_is_completed_by_the_next_one_if_its_process_died(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        // The process died after the first step: only the meta is written.
        let began = fixture.backend().now().await?.as_millis();
        let resizes = format!(r#"[{{"beganMs":{began},"from":1,"lastIds":null,"to":2}}]"#);
        let fields: RegistryMap =
            [("partitionCount".to_owned(), "2".into()), ("growths".to_owned(), resizes.into())]
                .into();
        assert!(fixture.backend().map_update(&meta(&fixture), None, &fields).await?);

        fixture.queue.topics().grow(&fixture.topic, 2).await?;

        let topic = fixture.queue.topics().describe(&fixture.topic).await?.topic;
        assert_eq!((topic.partitions, topic.resizes.len()), (2, 1));
        assert!(topic.resizes[0].last_ids.is_some(), "the resize is complete");
        assert_eq!(fixture.backend().set_members(&partitions_set(&fixture)).await?.len(), 2);
        Ok(())
    }

    pub(super) async fn an_interrupted_registration_is_completed_by_the_next_creation(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(2).await?;
        fixture.backend().set_remove(&registry(), &[&fixture.topic]).await?;
        let key = fixture.stream(1).await?;
        fixture.backend().set_remove(&partitions_set(&fixture), &[key.as_str()]).await?;

        assert!(!fixture.queue.topics().create(&fixture.topic, 2, quick()).await?);

        assert!(fixture.queue.topics().list().await?.contains(&fixture.topic));
        assert_eq!(fixture.backend().set_members(&partitions_set(&fixture)).await?.len(), 2);
        Ok(())
    }

    pub(super) async fn a_deleted_topic_leaves_nothing_behind(fixture: QueueFixture) -> Result<()> {
        fixture.create(3).await?;
        fixture.send_many(3, 6).await?;
        fixture.deliver(0, "ann", 1).await?;
        fixture.dead_letter(&Letter::of(0, 7)).await?;
        for partition in 0..3 {
            schedule_one(&fixture, partition).await?;
        }
        let described = fixture.queue.topics().describe(&fixture.topic).await?;

        assert!(fixture.queue.topics().delete(&fixture.topic).await?);

        assert!(!fixture.queue.topics().list().await?.contains(&fixture.topic));
        assert_eq!(fixture.backend().map_get(&meta(&fixture)).await?, None);
        assert_eq!(fixture.backend().set_members(&partitions_set(&fixture)).await?.len(), 0);
        for place in described.partitions {
            let stream = headwater_stream::StreamName::new(place.stream_key)?;
            assert_eq!(fixture.backend().stats(&stream).await?, None);
            let delays = DelayName::new(place.delays_key)?;
            assert_eq!(fixture.backend().delay_stats(&delays).await?.waiting, 0);
        }
        let letters = headwater_stream::StreamName::new(described.dead_letters_key)?;
        assert_eq!(fixture.backend().stats(&letters).await?, None);
        assert_no_topic(fixture.queue.inspect().topic(&fixture.topic).await);
        Ok(())
    }

    pub(super) async fn an_interrupted_deletion_can_be_repeated(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(2).await?;
        fixture.send_many(2, 4).await?;
        // The deleting process died: the registry entry and one stream are gone.
        fixture.backend().set_remove(&registry(), &[&fixture.topic]).await?;
        fixture.backend().delete_stream(&fixture.stream(0).await?).await?;
        let left = fixture.stream(1).await?;

        assert!(fixture.queue.topics().delete(&fixture.topic).await?);

        assert_eq!(fixture.backend().stats(&left).await?, None);
        assert_eq!(fixture.backend().map_get(&meta(&fixture)).await?, None);
        Ok(())
    }

    pub(super) async fn a_deleted_topic_can_be_created_again_with_other_settings(
        fixture: QueueFixture,
    ) -> Result<()> {
        let topics = fixture.queue.topics();
        fixture.create(3).await?;
        fixture.send_many(3, 6).await?;
        topics.delete(&fixture.topic).await?;
        assert!(topics.create(&fixture.topic, 2, quick()).await?);
        assert_eq!(fixture.queue.inspect().topic(&fixture.topic).await?.length, 0);
        assert_eq!(fixture.backend().set_members(&partitions_set(&fixture)).await?.len(), 2);
        fixture.send(1, "new").await?;
        assert_eq!(fixture.queue.inspect().topic(&fixture.topic).await?.length, 1);
        Ok(())
    }

    pub(super) async fn deleting_a_missing_topic_returns_false(
        fixture: QueueFixture,
    ) -> Result<()> {
        assert!(!fixture.queue.topics().delete(&fixture.topic).await?);
        assert!(!fixture.queue.topics().list().await?.contains(&fixture.topic));
        Ok(())
    }

    pub(super) async fn a_plain_topic_is_described_and_deleted_but_does_not_grow(
        fixture: QueueFixture,
    ) -> Result<()> {
        let topics = fixture.queue.topics();
        fixture.send(0, "plain").await?;
        let described = topics.describe(&fixture.topic).await?;
        assert!(described.topic.layout.is_plain());
        assert_eq!(described.partitions[0].stream_key, fixture.topic);
        assert_no_topic(topics.grow(&fixture.topic, 2).await);
        assert!(!topics.list().await?.contains(&fixture.topic));
        assert!(topics.delete(&fixture.topic).await?);
        assert_eq!(fixture.entries(0).await?.len(), 0);
        Ok(())
    }

    pub(super) async fn invalid_names_and_settings_are_rejected_without_effect(
        fixture: QueueFixture,
    ) -> Result<()> {
        let topics = fixture.queue.topics();
        let long = "x".repeat(201);
        for name in ["", "a{b", "a}b", "a\nb", &long] {
            assert_invalid(topics.create(name, 1, quick()).await, "a topic name");
            assert_invalid(topics.describe(name).await, "a topic name");
            assert_invalid(topics.grow(name, 2).await, "a topic name");
            assert_invalid(topics.delete(name).await, "a topic name");
            assert_invalid(fixture.queue.inspect().topic(name).await, "a topic name");
        }
        for partitions in [0, 1025] {
            assert_invalid(topics.create(&fixture.topic, partitions, quick()).await, "partitions");
            assert_invalid(topics.grow(&fixture.topic, partitions).await, "partitions");
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
            assert_invalid(topics.create(&fixture.topic, 1, policies).await, argument);
        }
        assert_eq!(fixture.backend().map_get(&meta(&fixture)).await?, None);
        assert!(!topics.list().await?.contains(&fixture.topic));
        Ok(())
    }

    pub(super) async fn topic_statistics_are_correct(fixture: QueueFixture) -> Result<()> {
        fixture.create(3).await?;
        let empty = fixture.queue.inspect().topic(&fixture.topic).await?;
        assert_eq!((empty.length, empty.first_id, empty.updated_at), (0, None, None));
        assert_eq!((empty.delayed, empty.next_due, empty.dead_letters), (0, None, 0));

        let sent = fixture.send_many(2, 5).await?;
        fixture.group(0).await?;
        schedule_one(&fixture, 0).await?;
        schedule_one(&fixture, 1).await?;
        fixture.dead_letter(&Letter::of(0, 7)).await?;
        let view = fixture.queue.inspect().topic(&fixture.topic).await?;

        assert_eq!((view.name.as_str(), view.length), (fixture.topic.as_str(), 5));
        assert_eq!((view.first_id, view.last_id), (Some(sent[0].id), Some(sent[4].id)));
        assert_eq!(view.updated_at, Some(Timestamp::from_millis(sent[4].id.ms)));
        assert!(view.created_at.is_some() && view.bytes.is_none_or(|bytes| bytes > 5));
        assert_eq!((view.delayed, view.dead_letters, view.is_growing), (2, 1, false));
        let left = view.next_due.expect("something waits").since(fixture.backend().now().await?);
        assert!(left > Duration::from_secs(3000), "{left:?}");
        assert_eq!(view.groups, [GROUP]);
        assert_eq!(view.policies, quick());
        let lengths: Vec<u64> = view.partitions.iter().map(|p| p.length).collect();
        assert_eq!(lengths, [3, 2, 0]);
        assert_eq!(view.partitions[1].last_id, Some(sent[3].id));
        assert_eq!(view.partitions[2].first_id, None);
        Ok(())
    }

    pub(super) async fn plain_topic_statistics_are_correct(fixture: QueueFixture) -> Result<()> {
        let sent = fixture.send(0, "plain").await?;
        let view = fixture.queue.inspect().topic(&fixture.topic).await?;
        assert!(view.layout.is_plain());
        assert_eq!((view.length, view.last_id, view.created_at), (1, Some(sent.id), None));
        Ok(())
    }

    pub(super) async fn statistics_of_a_missing_topic_are_an_error(
        fixture: QueueFixture,
    ) -> Result<()> {
        assert_no_topic(fixture.queue.inspect().topic(&fixture.topic).await);
        assert_eq!(
            fixture.backend().stats(&fixture.stream(0).await?).await?,
            None,
            "nor was it created"
        );
        Ok(())
    }
}
