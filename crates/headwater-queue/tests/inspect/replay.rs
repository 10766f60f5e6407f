//! Replaying dead letters.

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{DeadLetterFilter, DeadLetterSelection, Queue, ReplayConfig};
use headwater_stream::{Options, connect};
use headwater_testkit::{Child, Redis};

use crate::setup::{Letter, Setup, on_every_backend};

on_every_backend! {
    a_replayed_message_is_what_it_was_in_the_partition_it_was_in
    all_that_match_are_replayed_in_order_and_the_rest_stays
    a_dry_run_says_what_a_replay_would_do_and_does_nothing
    a_replay_that_died_before_the_letter_was_removed_is_repeated_without_a_second_message
    copies_are_replayed_once
    a_message_that_was_replayed_often_is_refused_unless_told_otherwise
    a_replay_keeps_to_its_rate_and_its_limit
    a_refused_letter_does_not_stop_a_limited_replay
    what_cannot_be_replayed_stays_and_is_told
    a_named_letter_that_cannot_be_replayed_is_an_error_without_effect
    a_message_that_fails_again_while_a_replay_runs_is_left_for_the_next_one
}

mod bodies {
    use std::num::NonZeroU32;
    use std::time::{Duration, Instant};

    use anyhow::Result;
    use headwater_queue::{
        DeadLetterFilter, DeadLetterSelection, DeadLetters, QueueError, ReplayConfig, ReplayReport,
    };
    use headwater_stream::{EntryId, Range};

    use crate::setup::*;

    fn all() -> DeadLetterSelection {
        DeadLetterSelection::Matching(DeadLetterFilter::default())
    }

    async fn letters(setup: &Setup) -> Result<DeadLetters> {
        Ok(setup.queue.dead_letters(&setup.topic).await?)
    }

    async fn replay(setup: &Setup, which: DeadLetterSelection) -> Result<ReplayReport> {
        Ok(letters(setup).await?.replay(which, &ReplayConfig::default()).await?)
    }

    pub(super) async fn a_replayed_message_is_what_it_was_in_the_partition_it_was_in(
        setup: Setup,
    ) -> Result<()> {
        setup.create(4).await?;
        // A partition that its key does not lead to.
        let id = setup.dead_letter(&Letter::of(3, 7)).await?;

        let report = replay(&setup, DeadLetterSelection::Ids(vec![id])).await?;

        assert_eq!((report.replayed, report.refused, report.is_done), (1, 0, true));
        assert_eq!(setup.letters_left().await?, []);
        let [entry] = &setup.entries(3).await?[..] else { panic!("one message") };
        assert_eq!(entry.fields.get("payload").expect("it is there").as_ref(), b"\x00\xffpayload");
        for (field, expected) in [
            ("key", "k1"),
            ("headers", r#"{"h":"1","traceparent":"00-x"}"#),
            ("timestamp", "2026-01-01T00:00:00.000Z"),
            ("maxRetries", "4"),
            ("retryCount", "0"),
            ("partitionId", "3"),
            ("originalMessageId", "7-0"),
            ("replayedFrom", &id.to_string()),
            ("replayCount", "1"),
        ] {
            assert_eq!(text(entry, field), Some(expected), "{field}");
        }
        for field in ["originalTopic", "failedAt", "reason"] {
            assert_eq!(text(entry, field), None, "{field}");
        }
        let found = setup.queue.inspect().message(&setup.topic, 3, entry.id).await?;
        let message = found.expect("it is there").message.expect("it is well-formed");
        assert_eq!((message.attempt, message.replayed_from), (1, Some(id)));
        Ok(())
    }

    pub(super) async fn all_that_match_are_replayed_in_order_and_the_rest_stays(
        setup: Setup,
    ) -> Result<()> {
        setup.create(2).await?;
        let mut stays = Vec::new();
        for number in 0..70 {
            let letter = Letter::of(number as u16 % 2, 100 + number);
            if number % 10 == 0 {
                stays.push(setup.dead_letter(&Letter { reason: "other", ..letter }).await?);
            } else {
                setup.dead_letter(&letter).await?;
            }
        }
        let filter = DeadLetterFilter { reason: Some("boom".into()), ..Default::default() };
        let report = replay(&setup, DeadLetterSelection::Matching(filter)).await?;
        assert_eq!((report.replayed, report.already_replayed, report.refused), (63, 0, 0));
        assert_eq!(setup.letters_left().await?, stays);
        for partition in [0, 1] {
            let originals: Vec<EntryId> = setup
                .entries(partition)
                .await?
                .iter()
                .map(|entry| {
                    text(entry, "originalMessageId")
                        .expect("it is there")
                        .parse()
                        .expect("it is there")
                })
                .collect();
            assert!(originals.is_sorted() && originals.len() > 20, "{originals:?}");
        }
        Ok(())
    }

    pub(super) async fn a_dry_run_says_what_a_replay_would_do_and_does_nothing(
        setup: Setup,
    ) -> Result<()> {
        setup.create(2).await?;
        for number in 0..30 {
            setup.dead_letter(&Letter::of(number as u16 % 2, 100 + number)).await?;
        }
        setup.dead_letter(&Letter::of(0, 100)).await?;
        let no_letter = setup.foreign_letter(&[("what", "ever")]).await?;
        let before = setup.letters_left().await?;
        let dry = ReplayConfig { dry_run: true, ..Default::default() };
        let report = letters(&setup).await?.replay(all(), &dry).await?;
        assert_eq!((report.replayed, report.already_replayed, report.refused), (30, 1, 1));
        assert_eq!((report.is_done, report.refusals[0].id), (false, no_letter));
        assert_eq!(setup.letters_left().await?, before);
        assert_eq!(setup.queue.inspect().topic(&setup.topic).await?.length, 0);
        let done = replay(&setup, all()).await?;
        assert_eq!(done, ReplayReport { is_done: true, ..report }, "it was told truly");
        Ok(())
    }

    pub(super) async fn a_replay_that_died_before_the_letter_was_removed_is_repeated_without_a_second_message(
        setup: Setup,
    ) -> Result<()> {
        setup.create(1).await?;
        setup.dead_letter(&Letter::of(0, 7)).await?;
        replay(&setup, all()).await?;
        // As if the letter was never removed.
        setup.dead_letter(&Letter::of(0, 7)).await?;
        let dry = ReplayConfig { dry_run: true, ..Default::default() };
        let told = letters(&setup).await?.replay(all(), &dry).await?;
        let report = replay(&setup, all()).await?;
        assert_eq!((report.replayed, report.already_replayed), (0, 1));
        assert_eq!(told.already_replayed, 1);
        assert_eq!(setup.letters_left().await?, []);
        assert_eq!(setup.entries(0).await?.len(), 1, "one message");
        Ok(())
    }

    pub(super) async fn copies_are_replayed_once(setup: Setup) -> Result<()> {
        setup.create(2).await?;
        for _ in 0..3 {
            setup.dead_letter(&Letter::of(1, 7)).await?;
        }
        let last = setup.letters_left().await?[2];
        let report = replay(&setup, DeadLetterSelection::Ids(vec![last])).await?;
        assert_eq!((report.replayed, report.already_replayed), (1, 2));
        assert_eq!(setup.letters_left().await?, []);
        assert_eq!(setup.entries(1).await?.len(), 1);
        Ok(())
    }

    /// What was replayed fails again: the consumer makes a dead letter of the message as it is.
    async fn fails_again(setup: &Setup, partition: u16) -> Result<EntryId> {
        let stream = setup.stream(partition).await?;
        let last = setup.backend().range(&stream, Range::last(1)).await?.remove(0);
        let fields: Vec<(&'static str, String)> = [
            "payload",
            "key",
            "headers",
            "partitionId",
            "originalMessageId",
            "replayedFrom",
            "replayCount",
        ]
        .into_iter()
        .filter_map(|field| {
            let value = last.fields.get(field)?;
            Some((field, String::from_utf8_lossy(value).into_owned()))
        })
        .collect();
        let fields: Vec<(&'static str, &str)> =
            fields.iter().map(|(name, value)| (*name, value.as_str())).collect();
        setup.foreign_letter(&fields).await
    }

    pub(super) async fn a_message_that_was_replayed_often_is_refused_unless_told_otherwise(
        setup: Setup,
    ) -> Result<()> {
        setup.create(1).await?;
        setup.dead_letter(&Letter::of(0, 7)).await?;
        for _ in 0..3 {
            assert_eq!(replay(&setup, all()).await?.replayed, 1);
            fails_again(&setup, 0).await?;
        }
        let report = replay(&setup, all()).await?;
        assert_eq!((report.replayed, report.refused), (0, 1));
        assert!(report.refusals[0].problem.contains("3 times"), "{report:?}");
        assert_eq!(setup.letters_left().await?.len(), 1, "it stays");
        let named = DeadLetterSelection::Ids(setup.letters_left().await?);
        let answer = letters(&setup).await?.replay(named, &ReplayConfig::default()).await;
        assert_invalid(answer, "replay");
        let more = ReplayConfig { max_replays: 4, ..Default::default() };
        assert_eq!(letters(&setup).await?.replay(all(), &more).await?.replayed, 1);
        Ok(())
    }

    pub(super) async fn a_replay_keeps_to_its_rate_and_its_limit(setup: Setup) -> Result<()> {
        setup.create(2).await?;
        for number in 0..30 {
            setup.dead_letter(&Letter::of(number as u16 % 2, 100 + number)).await?;
        }
        let config =
            ReplayConfig { per_second: NonZeroU32::new(50), limit: Some(26), ..Default::default() };
        let started = Instant::now();
        let report = letters(&setup).await?.replay(all(), &config).await?;
        // The first ones go at once; at 50 a second, what comes after the first 20 waits for them.
        assert!(started.elapsed() >= Duration::from_millis(400), "{:?}", started.elapsed());
        assert_eq!((report.replayed, setup.letters_left().await?.len()), (26, 4));
        Ok(())
    }

    pub(super) async fn a_refused_letter_does_not_stop_a_limited_replay(
        setup: Setup,
    ) -> Result<()> {
        setup.create(1).await?;
        for _ in 0..30 {
            setup.foreign_letter(&[("what", "ever")]).await?;
        }
        setup.dead_letter(&Letter::of(0, 7)).await?;
        let config = ReplayConfig { limit: Some(1), ..Default::default() };
        let report = letters(&setup).await?.replay(all(), &config).await?;
        assert_eq!((report.replayed, report.refused), (1, 30));
        Ok(())
    }

    pub(super) async fn what_cannot_be_replayed_stays_and_is_told(setup: Setup) -> Result<()> {
        setup.create(2).await?;
        let no_letter = setup.foreign_letter(&[("what", "ever")]).await?;
        let nowhere = setup.dead_letter(&Letter::of(2, 7)).await?;
        let elsewhere =
            setup.foreign_letter(&[("partitionId", "0"), ("originalTopic", "another")]).await?;
        setup.dead_letter(&Letter::of(1, 8)).await?;
        let report = replay(&setup, all()).await?;
        assert_eq!((report.replayed, report.refused), (1, 3));
        let refused: Vec<EntryId> = report.refusals.iter().map(|refusal| refusal.id).collect();
        assert_eq!(refused, [no_letter, nowhere, elsewhere]);
        assert_eq!(setup.letters_left().await?, refused);
        Ok(())
    }

    pub(super) async fn a_named_letter_that_cannot_be_replayed_is_an_error_without_effect(
        setup: Setup,
    ) -> Result<()> {
        setup.create(1).await?;
        let good = setup.dead_letter(&Letter::of(0, 7)).await?;
        let no_letter = setup.foreign_letter(&[("what", "ever")]).await?;
        let letters = letters(&setup).await?;
        let config = ReplayConfig::default();
        let answer = letters.replay(DeadLetterSelection::Ids(vec![good, no_letter]), &config).await;
        assert_invalid(answer, &no_letter.to_string());
        let unknown = EntryId::new(1, 1);
        let answer = letters.replay(DeadLetterSelection::Ids(vec![good, unknown]), &config).await;
        assert!(matches!(answer, Err(QueueError::NoDeadLetter { .. })), "{answer:?}");
        assert_invalid(
            letters.replay(DeadLetterSelection::Ids(Vec::new()), &config).await,
            "number",
        );
        let nothing = ReplayConfig { limit: Some(0), ..config };
        assert_invalid(letters.replay(all(), &nothing).await, "limit");
        let nowhere = DeadLetterFilter { partition: Some(1), ..Default::default() };
        assert_invalid(
            letters.replay(DeadLetterSelection::Matching(nowhere), &config).await,
            "a partition",
        );
        assert_eq!(setup.letters_left().await?, [good, no_letter]);
        assert_eq!(setup.entries(0).await?.len(), 0, "nothing was sent");
        Ok(())
    }

    pub(super) async fn a_message_that_fails_again_while_a_replay_runs_is_left_for_the_next_one(
        setup: Setup,
    ) -> Result<()> {
        setup.create(1).await?;
        // More than are read at once.
        for number in 0..60 {
            setup.dead_letter(&Letter::of(0, 100 + number)).await?;
        }
        // Slow enough that the first ones fail again before the last ones are read.
        let slow = ReplayConfig { per_second: NonZeroU32::new(100), ..Default::default() };
        let handle = letters(&setup).await?;
        let replaying = handle.replay(all(), &slow);
        let failing = async {
            while setup.entries(0).await?.is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            fails_again(&setup, 0).await
        };
        let (report, again) = tokio::join!(replaying, failing);
        assert_eq!(report?.replayed, 60);
        assert_eq!(setup.letters_left().await?, [again?]);
        Ok(())
    }
}

/// A process that replays is killed in the middle; another one goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_that_is_killed_half_way_is_finished_by_another_one_message_by_message()
-> Result<()> {
    let setup = Setup::redis().await?;
    setup.create(3).await?;
    for number in 0..300 {
        setup.dead_letter(&Letter::of(number as u16 % 3, 100 + number)).await?;
    }
    let url = Redis::shared()?.url();
    for _ in 0..3 {
        let environment = [("REPLAY_URL", url.as_str()), ("REPLAY_TOPIC", &setup.topic)];
        let left = setup.letters_left().await?.len();
        let victim = Child::spawn_self("replay::victim", &environment)?;
        while setup.letters_left().await?.len() == left {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        victim.kill9()?;
    }
    assert!(!setup.letters_left().await?.is_empty(), "the victims were too fast");
    let letters = setup.queue.dead_letters(&setup.topic).await?;
    let all = DeadLetterSelection::Matching(DeadLetterFilter::default());
    letters.replay(all, &ReplayConfig::default()).await?;

    assert_eq!(setup.letters_left().await?, []);
    let mut originals = Vec::new();
    for partition in 0..3 {
        for entry in setup.entries(partition).await? {
            originals.push(entry.fields.get("originalMessageId").cloned());
        }
    }
    assert_eq!(originals.len(), 300);
    originals.sort();
    originals.dedup();
    assert_eq!(originals.len(), 300, "each message once");
    Ok(())
}

#[tokio::test]
#[ignore = "a role that other tests of this file start as a process of its own"]
async fn victim() -> Result<()> {
    let (url, topic) = (std::env::var("REPLAY_URL")?, std::env::var("REPLAY_TOPIC")?);
    let queue = Queue::new(connect(&url, &Options::default()).await?);
    let letters = queue.dead_letters(&topic).await?;
    let slow = ReplayConfig { per_second: std::num::NonZeroU32::new(100), ..Default::default() };
    letters.replay(DeadLetterSelection::Matching(DeadLetterFilter::default()), &slow).await?;
    Ok(())
}
