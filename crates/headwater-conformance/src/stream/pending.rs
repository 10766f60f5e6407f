//! Pending entries: listing them and keeping them alive.

use headwater_stream::{EntryId, GroupStart, PendingDelivery, PendingDeliveryQuery, StreamError};
use tokio::time::Instant;

use super::env::{StreamTestEnv, consumer, group};
use super::steps::{ALL, HOUR, TICK, done, ms, sleep_ms};
use crate::failure::TestResult;

fn ids(pending: &[PendingDelivery]) -> Vec<EntryId> {
    pending.iter().map(|pending| pending.id).collect()
}

pub async fn pending_entries_are_listed_in_id_order_with_owner_and_count(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let ids = flow.append(4).await?;
    for name in ["bob", "ann", "bob"] {
        flow.deliver(name, 1).await?;
    }

    let found = env.backend.pending(flow.pending_query()).await?;

    let found: Vec<(EntryId, &str, u64)> =
        found.iter().map(|p| (p.id, p.consumer.as_str(), p.deliveries)).collect();
    assert_eq!(found, [(ids[0], "bob", 1), (ids[1], "ann", 1), (ids[2], "bob", 1)]);
    Ok(())
}

pub async fn pending_entries_of_one_consumer_can_be_listed(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let all = flow.append(6).await?;
    for name in ["ann", "bob", "ann", "bob", "ann"] {
        flow.deliver(name, 1).await?;
    }
    for (name, expected) in
        [("ann", vec![all[0], all[2], all[4]]), ("bob", vec![all[1], all[3]]), ("cid", vec![])]
    {
        let consumer = consumer(name);
        let query = PendingDeliveryQuery { consumer: Some(&consumer), ..flow.pending_query() };
        assert_eq!(ids(&env.backend.pending(query).await?), expected, "{name}");
    }
    Ok(())
}

pub async fn paging_through_pending_entries_returns_each_once(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let all = flow.append(25).await?;
    for _ in 0..5 {
        flow.deliver("ann", 4).await?;
        flow.deliver("bob", 1).await?;
    }
    let ann = consumer("ann");
    let of_ann: Vec<EntryId> =
        all.iter().enumerate().filter(|(at, _)| at % 5 != 4).map(|(_, id)| *id).collect();

    for (who, expected) in [(None, &all), (Some(&ann), &of_ann)] {
        let mut found = Vec::new();
        let mut after = None;
        loop {
            let query =
                PendingDeliveryQuery { consumer: who, after, count: 3, ..flow.pending_query() };
            let page = env.backend.pending(query).await?;
            assert!(page.len() <= 3, "expected at most 3, found {page:?}");
            let Some(last) = page.last() else { break };
            after = Some(last.id);
            found.extend(ids(&page));
        }
        assert_eq!(&found, expected, "{who:?}");
    }
    Ok(())
}

pub async fn pending_entries_can_be_listed_by_idle_time(env: StreamTestEnv) -> TestResult {
    let min_idle = ms(500);
    let (flow, all) = env.flow_with_pending(4).await?;
    sleep_ms(550).await;

    // On a slow machine the fresh ones may become idle before they are listed; then retry.
    for _ in 0..10 {
        let touched = Instant::now();
        let ann = consumer("ann");
        env.second.keep_alive(&flow.stream, &flow.group, &ann, &all[..2]).await?;
        let query = PendingDeliveryQuery { min_idle, ..flow.pending_query() };
        let found = env.backend.pending(query).await?;
        if touched.elapsed() < min_idle {
            assert_eq!(ids(&found), all[2..]);
            let query = PendingDeliveryQuery { min_idle: HOUR, ..flow.pending_query() };
            assert_eq!(ids(&env.backend.pending(query).await?), []);
            return Ok(());
        }
    }
    panic!("expected a listing within {min_idle:?}, found this machine too slow ten times");
}

pub async fn idle_time_is_reported(env: StreamTestEnv) -> TestResult {
    let (flow, _) = env.flow_with_pending(1).await?;
    sleep_ms(150).await;
    let found = env.backend.pending(flow.pending_query()).await?;
    assert!(found[0].idle + TICK >= ms(150), "expected at least 150 ms, found {found:?}");
    Ok(())
}

pub async fn listing_pending_entries_changes_nothing(env: StreamTestEnv) -> TestResult {
    let (flow, _) = env.flow_with_pending(3).await?;
    let before = flow.pending_owners().await?;
    sleep_ms(100).await;
    for _ in 0..3 {
        env.backend.pending(flow.pending_query()).await?;
    }
    assert_eq!(flow.pending_owners().await?, before, "owners and counts stay");
    let idle: Vec<_> = flow.pending().await?.into_iter().map(|pending| pending.idle).collect();
    assert!(idle.iter().all(|idle| *idle + TICK >= ms(100)), "the idle time increases: {idle:?}");
    Ok(())
}

pub async fn listing_pending_entries_of_a_missing_group_fails(env: StreamTestEnv) -> TestResult {
    let (flow, _) = env.flow_with_pending(1).await?;
    let (missing, unknown) = (env.stream("missing"), group("unknown"));
    let ann = consumer("ann");
    for (stream, group) in [(&missing, &flow.group), (&flow.stream, &unknown)] {
        let expected = format!("NoGroup for {stream} and {group}");
        let query = PendingDeliveryQuery { stream, group, ..flow.pending_query() };
        let calls = [
            ("pending", env.backend.pending(query).await.map(drop)),
            (
                "reclaim",
                env.backend
                    .reclaim(headwater_stream::ReclaimRequest {
                        stream,
                        group,
                        ..flow.reclaim_any(&ann)
                    })
                    .await
                    .map(drop),
            ),
            (
                "remove_idle_consumers",
                env.backend.remove_idle_consumers(stream, group, HOUR).await.map(drop),
            ),
        ];
        for (call, answer) in calls {
            match answer {
                Err(StreamError::NoGroup { stream: s, group: g }) => {
                    assert_eq!(
                        (s.as_str(), g.as_str()),
                        (stream.as_str(), group.as_str()),
                        "{call}"
                    );
                }
                other => panic!("{call}: expected {expected}, found {other:?}"),
            }
        }
    }
    assert_eq!(env.second.stats(&missing).await?, None, "no stream was created");
    Ok(())
}

pub async fn keep_alive_returns_every_id_if_the_group_was_removed(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let (missing, unknown) = (env.stream("missing"), group("unknown"));
    let ann = consumer("ann");
    for (stream, group) in [(&missing, &flow.group), (&flow.stream, &unknown)] {
        assert_eq!(env.backend.keep_alive(stream, group, &ann, &ids).await?, ids);
    }
    assert_eq!(env.second.stats(&missing).await?, None, "no stream was created");
    Ok(())
}

pub async fn keep_alive_resets_the_idle_time_and_keeps_the_delivery_count(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    let ann = consumer("ann");
    sleep_ms(300).await;

    let lost = env.backend.keep_alive(&flow.stream, &flow.group, &ann, &ids[..1]).await?;

    assert_eq!(lost, [], "it is still pending");
    let found = flow.pending().await?;
    let (kept, other) = (&found[0], &found[1]);
    assert!(kept.idle + ms(250) <= other.idle, "expected 250 ms between them, found {found:?}");
    assert_eq!((kept.deliveries, other.deliveries), (1, 1), "{found:?}");
    Ok(())
}

pub async fn keep_alive_returns_ids_that_are_no_longer_pending_for_the_consumer(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, mut ids) = env.flow_with_pending(4).await?;
    let (ann, bob) = (consumer("ann"), consumer("bob"));
    flow.settle("ann", &done(&ids[..1])).await?;
    let reclaim = headwater_stream::ReclaimRequest {
        from: headwater_stream::ReclaimFrom::Ids(&ids[1..2]),
        ..flow.reclaim_any(&bob)
    };
    env.second.reclaim(reclaim).await?;
    ids.push(flow.append(1).await?[0]);
    ids.push(EntryId::new(1, 1));

    let mut lost = env.backend.keep_alive(&flow.stream, &flow.group, &ann, &ids).await?;

    lost.sort();
    let mut expected = vec![ids[0], ids[1], ids[4], ids[5]];
    expected.sort();
    assert_eq!(lost, expected, "settled, reclaimed, unread and unknown ones");
    let owned = flow.pending_owners().await?;
    let expected = [
        (ids[1], "bob".to_owned(), 2),
        (ids[2], "ann".to_owned(), 1),
        (ids[3], "ann".to_owned(), 1),
    ];
    assert_eq!(owned, expected, "nothing changed hands");
    Ok(())
}

pub async fn an_entry_kept_alive_is_not_reclaimed_by_idle_time(env: StreamTestEnv) -> TestResult {
    let min_idle = ms(500);
    let (flow, ids) = env.flow_with_pending(2).await?;
    let (ann, bob) = (consumer("ann"), consumer("bob"));
    sleep_ms(550).await;
    let touched = Instant::now();
    env.backend.keep_alive(&flow.stream, &flow.group, &ann, &ids[..1]).await?;

    let reclaim = headwater_stream::ReclaimRequest { min_idle, ..flow.reclaim_any(&bob) };
    let found = env.second.reclaim(reclaim).await?;

    if touched.elapsed() < min_idle {
        let found: Vec<EntryId> = found.entries.iter().map(|entry| entry.id).collect();
        assert_eq!(found, ids[1..], "only the one that was not kept alive");
    }
    Ok(())
}

pub async fn pending_entries_of_two_groups_are_independent(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(3).await?;
    let audit = group("audit");
    env.second.ensure_group(&flow.stream, &audit, GroupStart::Beginning).await?;
    flow.deliver_to(&audit, "ann", ALL).await?;

    flow.settle("ann", &done(&ids[..2])).await?;

    assert_eq!(flow.pending_ids().await?, ids[2..]);
    let query = PendingDeliveryQuery { group: &audit, ..flow.pending_query() };
    let found: Vec<EntryId> =
        env.backend.pending(query).await?.into_iter().map(|pending| pending.id).collect();
    assert_eq!(found, ids);
    Ok(())
}
