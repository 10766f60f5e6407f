//! Replaying dead letters.

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{DeadLetterFilter, DeadLetterSelection, Queue, ReplayConfig};
use headwater_stream::{Options, connect};
use headwater_testkit::{Child, Redis};

use crate::fixture::{Letter, QueueFixture, on_every_backend};

on_every_backend! {
    a_replayed_message_is_unchanged_and_in_its_original_partition
    all_matches_are_replayed_in_order_and_the_rest_remains
    a_dry_run_reports_a_replay_and_changes_nothing
    repeating_a_replay_after_a_crash_does_not_duplicate_the_message
    copies_are_replayed_once
    a_message_replayed_too_often_is_refused_unless_configured
    a_replay_respects_its_rate_and_its_limit
    a_refused_letter_does_not_stop_a_limited_replay
    dead_letters_that_cannot_be_replayed_remain_and_are_reported
    a_named_letter_that_cannot_be_replayed_is_an_error_without_effect
    a_message_that_fails_again_during_a_replay_is_not_replayed_again
}

mod bodies {
    use std::num::NonZeroU32;
    use std::time::{Duration, Instant};

    use anyhow::Result;
    use headwater_queue::{
        DeadLetterFilter, DeadLetterSelection, DeadLetters, QueueError, ReplayConfig, ReplayReport,
    };
    use headwater_stream::{EntryId, Range};

    use crate::fixture::*;

    fn all() -> DeadLetterSelection {
        DeadLetterSelection::Matching(DeadLetterFilter::default())
    }

    async fn letters(fixture: &QueueFixture) -> Result<DeadLetters> {
        Ok(fixture.queue.dead_letters(&fixture.topic).await?)
    }

    async fn replay(fixture: &QueueFixture, which: DeadLetterSelection) -> Result<ReplayReport> {
        Ok(letters(fixture).await?.replay(which, &ReplayConfig::default()).await?)
    }

    pub(super) async fn a_replayed_message_is_unchanged_and_in_its_original_partition(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(4).await?;
        // A partition other than that of its key.
        let id = fixture.dead_letter(&Letter::of(3, 7)).await?;

        let report = replay(&fixture, DeadLetterSelection::Ids(vec![id])).await?;

        assert_eq!((report.replayed, report.refused, report.is_done), (1, 0, true));
        assert_eq!(fixture.remaining_letters().await?, []);
        let [entry] = &fixture.entries(3).await?[..] else { panic!("one message") };
        assert_eq!(entry.fields.get("payload").expect("it exists").as_ref(), b"\x00\xffpayload");
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
        let found = fixture.queue.inspect().message(&fixture.topic, 3, entry.id).await?;
        let message = found.expect("it exists").message.expect("it is well-formed");
        assert_eq!((message.attempt, message.replayed_from), (1, Some(id)));
        Ok(())
    }

    pub(super) async fn all_matches_are_replayed_in_order_and_the_rest_remains(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(2).await?;
        let mut stays = Vec::new();
        for number in 0..70 {
            let letter = Letter::of(number as u16 % 2, 100 + number);
            if number % 10 == 0 {
                stays.push(fixture.dead_letter(&Letter { reason: "other", ..letter }).await?);
            } else {
                fixture.dead_letter(&letter).await?;
            }
        }
        let filter = DeadLetterFilter { reason: Some("boom".into()), ..Default::default() };
        let report = replay(&fixture, DeadLetterSelection::Matching(filter)).await?;
        assert_eq!((report.replayed, report.already_replayed, report.refused), (63, 0, 0));
        assert_eq!(fixture.remaining_letters().await?, stays);
        for partition in [0, 1] {
            let originals: Vec<EntryId> = fixture
                .entries(partition)
                .await?
                .iter()
                .map(|entry| {
                    text(entry, "originalMessageId").expect("it exists").parse().expect("it exists")
                })
                .collect();
            assert!(originals.is_sorted() && originals.len() > 20, "{originals:?}");
        }
        Ok(())
    }

    pub(super) async fn a_dry_run_reports_a_replay_and_changes_nothing(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(2).await?;
        for number in 0..30 {
            fixture.dead_letter(&Letter::of(number as u16 % 2, 100 + number)).await?;
        }
        fixture.dead_letter(&Letter::of(0, 100)).await?;
        let no_letter = fixture.foreign_letter(&[("what", "ever")]).await?;
        let before = fixture.remaining_letters().await?;
        let dry = ReplayConfig { dry_run: true, ..Default::default() };
        let report = letters(&fixture).await?.replay(all(), &dry).await?;
        assert_eq!((report.replayed, report.already_replayed, report.refused), (30, 1, 1));
        assert_eq!((report.is_done, report.refusals[0].id), (false, no_letter));
        assert_eq!(fixture.remaining_letters().await?, before);
        assert_eq!(fixture.queue.inspect().topic(&fixture.topic).await?.length, 0);
        let done = replay(&fixture, all()).await?;
        assert_eq!(
            done,
            ReplayReport { is_done: true, ..report },
            "it was interrupted_parts truly"
        );
        Ok(())
    }

    pub(super) async fn repeating_a_replay_after_a_crash_does_not_duplicate_the_message(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        fixture.dead_letter(&Letter::of(0, 7)).await?;
        replay(&fixture, all()).await?;
        // As if the letter had not been deleted.
        fixture.dead_letter(&Letter::of(0, 7)).await?;
        let dry = ReplayConfig { dry_run: true, ..Default::default() };
        let interrupted_parts = letters(&fixture).await?.replay(all(), &dry).await?;
        let report = replay(&fixture, all()).await?;
        assert_eq!((report.replayed, report.already_replayed), (0, 1));
        assert_eq!(interrupted_parts.already_replayed, 1);
        assert_eq!(fixture.remaining_letters().await?, []);
        assert_eq!(fixture.entries(0).await?.len(), 1, "one message");
        Ok(())
    }

    pub(super) async fn copies_are_replayed_once(fixture: QueueFixture) -> Result<()> {
        fixture.create(2).await?;
        for _ in 0..3 {
            fixture.dead_letter(&Letter::of(1, 7)).await?;
        }
        let last = fixture.remaining_letters().await?[2];
        let report = replay(&fixture, DeadLetterSelection::Ids(vec![last])).await?;
        assert_eq!((report.replayed, report.already_replayed), (1, 2));
        assert_eq!(fixture.remaining_letters().await?, []);
        assert_eq!(fixture.entries(1).await?.len(), 1);
        Ok(())
    }

    /// Simulates that a replayed message fails again.
    async fn fails_again(fixture: &QueueFixture, partition: u16) -> Result<EntryId> {
        let stream = fixture.stream(partition).await?;
        let last = fixture.backend().range(&stream, Range::last(1)).await?.remove(0);
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
        fixture.foreign_letter(&fields).await
    }

    pub(super) async fn a_message_replayed_too_often_is_refused_unless_configured(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        fixture.dead_letter(&Letter::of(0, 7)).await?;
        for _ in 0..3 {
            assert_eq!(replay(&fixture, all()).await?.replayed, 1);
            fails_again(&fixture, 0).await?;
        }
        let report = replay(&fixture, all()).await?;
        assert_eq!((report.replayed, report.refused), (0, 1));
        assert!(report.refusals[0].problem.contains("3 times"), "{report:?}");
        assert_eq!(fixture.remaining_letters().await?.len(), 1, "it stays");
        let named = DeadLetterSelection::Ids(fixture.remaining_letters().await?);
        let answer = letters(&fixture).await?.replay(named, &ReplayConfig::default()).await;
        assert_invalid(answer, "replay");
        let more = ReplayConfig { max_replays: 4, ..Default::default() };
        assert_eq!(letters(&fixture).await?.replay(all(), &more).await?.replayed, 1);
        Ok(())
    }

    pub(super) async fn a_replay_respects_its_rate_and_its_limit(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(2).await?;
        for number in 0..30 {
            fixture.dead_letter(&Letter::of(number as u16 % 2, 100 + number)).await?;
        }
        let config =
            ReplayConfig { per_second: NonZeroU32::new(50), limit: Some(26), ..Default::default() };
        let started = Instant::now();
        let report = letters(&fixture).await?.replay(all(), &config).await?;
        // At 50 per second the first batches are sent at once and later ones wait.
        assert!(started.elapsed() >= Duration::from_millis(400), "{:?}", started.elapsed());
        assert_eq!((report.replayed, fixture.remaining_letters().await?.len()), (26, 4));
        Ok(())
    }

    pub(super) async fn a_refused_letter_does_not_stop_a_limited_replay(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        for _ in 0..30 {
            fixture.foreign_letter(&[("what", "ever")]).await?;
        }
        fixture.dead_letter(&Letter::of(0, 7)).await?;
        let config = ReplayConfig { limit: Some(1), ..Default::default() };
        let report = letters(&fixture).await?.replay(all(), &config).await?;
        assert_eq!((report.replayed, report.refused), (1, 30));
        Ok(())
    }

    pub(super) async fn dead_letters_that_cannot_be_replayed_remain_and_are_reported(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(2).await?;
        let no_letter = fixture.foreign_letter(&[("what", "ever")]).await?;
        let nowhere = fixture.dead_letter(&Letter::of(2, 7)).await?;
        let elsewhere =
            fixture.foreign_letter(&[("partitionId", "0"), ("originalTopic", "another")]).await?;
        fixture.dead_letter(&Letter::of(1, 8)).await?;
        let report = replay(&fixture, all()).await?;
        assert_eq!((report.replayed, report.refused), (1, 3));
        let refused: Vec<EntryId> = report.refusals.iter().map(|refusal| refusal.id).collect();
        assert_eq!(refused, [no_letter, nowhere, elsewhere]);
        assert_eq!(fixture.remaining_letters().await?, refused);
        Ok(())
    }

    pub(super) async fn a_named_letter_that_cannot_be_replayed_is_an_error_without_effect(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        let good = fixture.dead_letter(&Letter::of(0, 7)).await?;
        let no_letter = fixture.foreign_letter(&[("what", "ever")]).await?;
        let letters = letters(&fixture).await?;
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
        assert_eq!(fixture.remaining_letters().await?, [good, no_letter]);
        assert_eq!(fixture.entries(0).await?.len(), 0, "nothing was sent");
        Ok(())
    }

    pub(super) async fn a_message_that_fails_again_during_a_replay_is_not_replayed_again(
        fixture: QueueFixture,
    ) -> Result<()> {
        fixture.create(1).await?;
        // More than are read at once.
        for number in 0..60 {
            fixture.dead_letter(&Letter::of(0, 100 + number)).await?;
        }
        // Slow enough that the first ones fail again before the last ones are read.
        let slow = ReplayConfig { per_second: NonZeroU32::new(100), ..Default::default() };
        let handle = letters(&fixture).await?;
        let replaying = handle.replay(all(), &slow);
        let failing = async {
            while fixture.entries(0).await?.is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            fails_again(&fixture, 0).await
        };
        let (report, again) = tokio::join!(replaying, failing);
        assert_eq!(report?.replayed, 60);
        assert_eq!(fixture.remaining_letters().await?, [again?]);
        Ok(())
    }
}

/// A replaying process is killed; another one continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_replay_is_completed_by_another_without_duplicates() -> Result<()> {
    let fixture = QueueFixture::redis().await?;
    fixture.create(3).await?;
    for number in 0..300 {
        fixture.dead_letter(&Letter::of(number as u16 % 3, 100 + number)).await?;
    }
    let url = Redis::shared()?.url();
    for _ in 0..3 {
        let environment = [("REPLAY_URL", url.as_str()), ("REPLAY_TOPIC", &fixture.topic)];
        let left = fixture.remaining_letters().await?.len();
        let role_replay = Child::spawn_self("replay::role_replay", &environment)?;
        while fixture.remaining_letters().await?.len() == left {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        role_replay.kill9()?;
    }
    assert!(!fixture.remaining_letters().await?.is_empty(), "the killed processes were too fast");
    let letters = fixture.queue.dead_letters(&fixture.topic).await?;
    let all = DeadLetterSelection::Matching(DeadLetterFilter::default());
    letters.replay(all, &ReplayConfig::default()).await?;

    assert_eq!(fixture.remaining_letters().await?, []);
    let mut originals = Vec::new();
    for partition in 0..3 {
        for entry in fixture.entries(partition).await? {
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
#[ignore = "started as a child process by other tests of this file"]
async fn role_replay() -> Result<()> {
    let (url, topic) = (std::env::var("REPLAY_URL")?, std::env::var("REPLAY_TOPIC")?);
    let queue = Queue::new(connect(&url, &Options::default()).await?);
    let letters = queue.dead_letters(&topic).await?;
    let slow = ReplayConfig { per_second: std::num::NonZeroU32::new(100), ..Default::default() };
    letters.replay(DeadLetterSelection::Matching(DeadLetterFilter::default()), &slow).await?;
    Ok(())
}
