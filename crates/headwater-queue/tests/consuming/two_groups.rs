//! Two groups on one topic: what one of them tries again is no new message for the other.

use std::time::Duration;

use anyhow::Result;
use headwater_queue::{
    Backoff, ConsumerConfig, Letters, MessageOrder, MessageQuery, Outcome, ReplayConfig,
    RetryPolicy, metrics,
};
use headwater_stream::Fields;

use crate::counted::{counted, start_counting};
use crate::env::{Env, eventually, text};
use crate::record::{payload, recorder};

/// Order is relaxed, so that what fails comes back through the partition's stream.
fn config(mode: headwater_queue::Mode) -> ConsumerConfig {
    let backoff = Backoff::Fixed(Duration::from_millis(10));
    let retry = RetryPolicy { backoff, max_attempts: Some(3), ..Default::default() };
    ConsumerConfig { order: MessageOrder::Relaxed, retry, mode, ..Default::default() }
}

async fn a_retry_is_for_the_group_that_asked_for_it(env: Env) -> Result<()> {
    start_counting();
    use headwater_queue::Mode::{Owned, Shared};
    let (failing, mut failed) = recorder(|message| match message.attempt {
        1 | 2 => Outcome::retry("not yet"),
        _ => Outcome::Done,
    });
    let (working, mut worked) = recorder(|_| Outcome::Done);
    let billing = env.queue.subscribe(&env.topic, "billing", failing, config(Owned)).await?;
    let shipping = env.queue.subscribe(&env.topic, "shipping", working, config(Shared)).await?;
    env.send(0, Some("k"), "once").await?;
    for attempt in 1..=3 {
        assert_eq!(failed.next().await?.attempt, attempt);
    }
    // What comes later shows that nothing else came before it.
    env.send(0, Some("k"), "last").await?;
    assert_eq!(worked.payloads(2).await?, ["once", "last"]);
    eventually("both retries were passed over", async || {
        Ok(counted(metrics::CONSUMED, &env.topic, "skipped") >= 2)
    })
    .await?;
    // Those of "last" may have come since.
    while payload(&failed.next().await?) != "last" {}
    billing.stop().await;
    shipping.stop().await;
    assert!(worked.now().is_none());

    // Whoever looks at the topic sees for whom it came back.
    let page = env.queue.inspect().messages(&env.topic, &MessageQuery::default()).await;
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

async fn a_replay_is_for_the_group_that_gave_up(env: Env) -> Result<()> {
    start_counting();
    env.create(1).await?;
    let mode = headwater_queue::Mode::Owned;
    let (failing, mut failed) = recorder(|message| match message.replayed_from {
        None => Outcome::dead_letter("cannot be billed"),
        Some(_) => Outcome::Done,
    });
    let (also_failing, mut also_failed) = recorder(|message| match message.replayed_from {
        None => Outcome::dead_letter("cannot be shipped"),
        Some(_) => Outcome::Done,
    });
    let (working, mut worked) = recorder(|_| Outcome::Done);
    let billing = env.queue.subscribe(&env.topic, "billing", failing, config(mode)).await?;
    let shipping = env.queue.subscribe(&env.topic, "shipping", also_failing, config(mode)).await?;
    let counting = env.queue.subscribe(&env.topic, "counting", working, config(mode)).await?;
    env.send(0, Some("k"), "once").await?;
    env.until_dead_letters(2).await?;
    assert_eq!((failed.payloads(1).await?, also_failed.payloads(1).await?).0, ["once"]);

    let letters = env.queue.dead_letters(&env.topic).await?;
    let page = letters.browse(&Default::default()).await?;
    let mut groups: Vec<_> = page.items.iter().map(|letter| letter.group.clone()).collect();
    groups.sort();
    assert_eq!(groups, [Some("billing".to_owned()), Some("shipping".to_owned())]);
    let billed = page.items.iter().find(|letter| letter.group.as_deref() == Some("billing"));
    let id = billed.expect("there is one").id;
    letters.replay(Letters::Ids(vec![id]), &ReplayConfig::default()).await?;
    let again = failed.next().await?;
    assert_eq!((again.replayed_from, again.attempt), (Some(id), 1));

    // The other one, too: the two are no copies of each other.
    let all = Letters::Matching(Default::default());
    assert_eq!(letters.replay(all, &ReplayConfig::default()).await?.replayed, 1);
    assert!(also_failed.next().await?.replayed_from.is_some());
    env.send(0, Some("k"), "last").await?;
    assert_eq!(worked.payloads(2).await?, ["once", "last"]);
    assert_eq!(failed.payloads(1).await?, ["last"]);
    assert_eq!(also_failed.payloads(1).await?, ["last"]);
    for subscription in [billing, shipping, counting] {
        subscription.stop().await;
    }
    Ok(())
}

async fn a_dead_letter_keeps_what_another_program_called_by_the_same_names(env: Env) -> Result<()> {
    start_counting();
    env.create(1).await?;
    let own = [
        ("reason", "their reason"),
        ("failedAt", "yesterday"),
        ("originalTopic", "theirs"),
        ("partitionId", "999"),
        ("retryGroup", "their group"),
        ("original:reason", "older"),
        ("payload", "p"),
    ];
    env.append(0, Fields::new(own)).await?;
    let (handler, mut seen) = recorder(|message| match message.replayed_from {
        None => Outcome::dead_letter("ours"),
        Some(_) => Outcome::Done,
    });
    let mode = headwater_queue::Mode::Shared;
    let subscription = env.queue.subscribe(&env.topic, "billing", handler, config(mode)).await?;
    seen.next().await?;
    let letters = env.until_dead_letters(1).await?;
    for (field, value) in [
        ("reason", "ours"),
        ("partitionId", "0"),
        ("originalTopic", env.topic.as_str()),
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
    let all = Letters::Matching(Default::default());
    let letters = env.queue.dead_letters(&env.topic).await?;
    assert_eq!(letters.replay(all, &ReplayConfig::default()).await?.replayed, 1);
    let again = seen.next().await?;
    for (field, value) in own {
        // This one field a message that comes back needs for itself.
        let field = if field == "retryGroup" { "original:retryGroup" } else { field };
        assert_eq!(again.fields.get(field).expect(field), value, "{field}");
    }
    assert_eq!(again.retry_group.as_deref(), Some("billing"));
    subscription.stop().await;
    Ok(())
}

on_every_backend!(
    a_retry_is_for_the_group_that_asked_for_it,
    a_replay_is_for_the_group_that_gave_up,
    a_dead_letter_keeps_what_another_program_called_by_the_same_names,
);
