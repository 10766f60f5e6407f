//! Two groups on one topic: a retry for one group is not delivered to the other.

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{
    Backoff, ConsumerConfig, DeadLetterSelection, MessageOrder, MessageQuery, Outcome,
    ReplayConfig, RetryPolicy, metrics,
};
use headwater_stream::Fields;

use crate::fixture::{Fixture, eventually, text};
use crate::metric_recorder::{counter_value, install_metric_recorder};
use crate::recording_handler::{payload, recording_handler};

/// Relaxed order, so that a retry is appended to the stream of the partition.
fn config(mode: headwater_queue::Mode) -> ConsumerConfig {
    let backoff = Backoff::Fixed(Duration::from_millis(10));
    let retry = RetryPolicy { backoff, max_attempts: Some(3), ..Default::default() };
    ConsumerConfig { order: MessageOrder::Relaxed, retry, mode, ..Default::default() }
}

async fn a_retry_is_delivered_only_to_the_group_that_failed(fixture: Fixture) -> Result<()> {
    install_metric_recorder();
    use headwater_queue::Mode::{Owned, Shared};
    let (failing, mut failed) = recording_handler(|message| match message.attempt {
        1 | 2 => Outcome::retry("not yet"),
        _ => Outcome::Done,
    });
    let (working, mut worked) = recording_handler(|_| Outcome::Done);
    let billing =
        fixture.queue.subscribe(&fixture.topic, "billing", failing, config(Owned)).await?;
    let shipping =
        fixture.queue.subscribe(&fixture.topic, "shipping", working, config(Shared)).await?;
    fixture.send(0, Some("k"), "once").await?;
    for attempt in 1..=3 {
        assert_eq!(failed.next().await?.attempt, attempt);
    }
    // A later message proves that nothing was delivered before it.
    fixture.send(0, Some("k"), "last").await?;
    assert_eq!(worked.payloads(2).await?, ["once", "last"]);
    eventually("both retries were skipped", async || {
        Ok(counter_value(metrics::CONSUMED, &fixture.topic, "skipped") >= 2)
    })
    .await?;
    // The retries of "last" may have been skipped since.
    while payload(&failed.next().await?) != "last" {}
    billing.stop().await;
    shipping.stop().await;
    assert!(worked.now().is_none());

    // Inspection shows the group of a retry.
    let page = fixture.queue.inspect().messages(&fixture.topic, &MessageQuery::default()).await;
    let groups: Vec<Option<String>> = match page {
        Ok(page) => {
            let messages = page.items.into_iter().filter_map(|stored| stored.message.ok());
            messages
                .filter(|message| message.payload == "once")
                .map(|message| message.retry_group)
                .collect()
        }
        Err(error) => anyhow::bail!("{error}"),
    };
    let billing = Some("billing".to_owned());
    assert_eq!(groups, [None, billing.clone(), billing]);
    Ok(())
}

async fn a_replay_is_delivered_only_to_the_group_of_the_dead_letter(
    fixture: Fixture,
) -> Result<()> {
    install_metric_recorder();
    fixture.create(1).await?;
    let mode = headwater_queue::Mode::Owned;
    let (failing, mut failed) = recording_handler(|message| match message.replayed_from {
        None => Outcome::dead_letter("cannot be billed"),
        Some(_) => Outcome::Done,
    });
    let (also_failing, mut also_failed) =
        recording_handler(|message| match message.replayed_from {
            None => Outcome::dead_letter("cannot be shipped"),
            Some(_) => Outcome::Done,
        });
    let (working, mut worked) = recording_handler(|_| Outcome::Done);
    let billing = fixture.queue.subscribe(&fixture.topic, "billing", failing, config(mode)).await?;
    let shipping =
        fixture.queue.subscribe(&fixture.topic, "shipping", also_failing, config(mode)).await?;
    let counting =
        fixture.queue.subscribe(&fixture.topic, "counting", working, config(mode)).await?;
    fixture.send(0, Some("k"), "once").await?;
    fixture.wait_for_dead_letters(2).await?;
    assert_eq!((failed.payloads(1).await?, also_failed.payloads(1).await?).0, ["once"]);

    let letters = fixture.queue.dead_letters(&fixture.topic).await?;
    let page = letters.browse(&Default::default()).await?;
    let mut groups: Vec<_> = page.items.iter().map(|letter| letter.group.clone()).collect();
    groups.sort();
    assert_eq!(groups, [Some("billing".to_owned()), Some("shipping".to_owned())]);
    let billed = page.items.iter().find(|letter| letter.group.as_deref() == Some("billing"));
    let id = billed.expect("there is one").id;
    letters.replay(DeadLetterSelection::Ids(vec![id]), &ReplayConfig::default()).await?;
    let again = failed.next().await?;
    assert_eq!((again.replayed_from, again.attempt), (Some(id), 1));

    // The other dead letter, too: they are not copies of each other.
    let all = DeadLetterSelection::Matching(Default::default());
    assert_eq!(letters.replay(all, &ReplayConfig::default()).await?.replayed, 1);
    assert!(also_failed.next().await?.replayed_from.is_some());
    fixture.send(0, Some("k"), "last").await?;
    assert_eq!(worked.payloads(2).await?, ["once", "last"]);
    assert_eq!(failed.payloads(1).await?, ["last"]);
    assert_eq!(also_failed.payloads(1).await?, ["last"]);
    for subscription in [billing, shipping, counting] {
        subscription.stop().await;
    }
    Ok(())
}

async fn a_dead_letter_keeps_fields_of_another_program_with_the_same_names(
    fixture: Fixture,
) -> Result<()> {
    install_metric_recorder();
    fixture.create(1).await?;
    let own = [
        ("reason", "their reason"),
        ("failedAt", "yesterday"),
        ("originalTopic", "theirs"),
        ("partitionId", "999"),
        ("retryGroup", "their group"),
        ("original:reason", "older"),
        ("payload", "p"),
    ];
    fixture.append(0, Fields::new(own)).await?;
    let (handler, mut seen) = recording_handler(|message| match message.replayed_from {
        None => Outcome::dead_letter("ours"),
        Some(_) => Outcome::Done,
    });
    let mode = headwater_queue::Mode::Shared;
    let subscription =
        fixture.queue.subscribe(&fixture.topic, "billing", handler, config(mode)).await?;
    seen.next().await?;
    let letters = fixture.wait_for_dead_letters(1).await?;
    for (field, value) in [
        ("reason", "ours"),
        ("partitionId", "0"),
        ("originalTopic", fixture.topic.as_str()),
        ("retryGroup", "billing"),
        ("original:reason", "their reason"),
        ("original:failedAt", "yesterday"),
        ("original:originalTopic", "theirs"),
        ("original:partitionId", "999"),
        ("original:retryGroup", "their group"),
        ("original:original:reason", "older"),
    ] {
        assert_eq!(text(&letters[0], field), value, "{field}");
    }
    let all = DeadLetterSelection::Matching(Default::default());
    let letters = fixture.queue.dead_letters(&fixture.topic).await?;
    assert_eq!(letters.replay(all, &ReplayConfig::default()).await?.replayed, 1);
    let again = seen.next().await?;
    for (field, value) in own {
        // A replayed message needs this field itself.
        let field = if field == "retryGroup" { "original:retryGroup" } else { field };
        assert_eq!(again.fields.get(field).expect(field), value, "{field}");
    }
    assert_eq!(again.retry_group.as_deref(), Some("billing"));
    subscription.stop().await;
    Ok(())
}

on_every_backend!(
    a_retry_is_delivered_only_to_the_group_that_failed,
    a_replay_is_delivered_only_to_the_group_of_the_dead_letter,
    a_dead_letter_keeps_fields_of_another_program_with_the_same_names,
);
