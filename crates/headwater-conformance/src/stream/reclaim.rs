//! Reclaim: sources, pages and delivery counts.

use headwater_stream::{
    ConsumerName, EntryId, ReclaimFrom, ReclaimRequest, ReclaimResult, SettleAction, Settlement,
};
use tokio::time::Instant;

use super::env::{StreamTestEnv, consumer};
use super::steps::{ALL, Flow, HOUR, ids_of, ms, numbered, sleep_ms};
use crate::failure::TestResult;

/// Six entries, pending for ann, bob and cid in turn.
async fn three_consumers(env: &StreamTestEnv) -> TestResult<(Flow, Vec<EntryId>)> {
    let flow = env.flow().await?;
    let ids = flow.append(6).await?;
    for name in ["ann", "bob", "cid", "ann", "bob", "cid"] {
        flow.deliver(name, 1).await?;
    }
    Ok((flow, ids))
}

pub async fn a_reclaimed_entry_changes_owner_and_increments_its_delivery_count(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;

    let found = flow.reclaim("bob", ReclaimFrom::Anyone).await?;

    assert_eq!(ids_of(&found.entries), ids);
    for (number, entry) in found.entries.iter().enumerate() {
        assert_eq!(entry.fields, numbered(number), "the entry comes whole");
        assert!(entry.deliveries == 2 || env.is_faulty(), "{entry:?}");
    }
    assert_eq!(found.deleted, []);
    let owned = flow.pending_owners().await?;
    for ((id, owner, deliveries), entry) in owned.iter().zip(&found.entries) {
        assert_eq!((id, owner.as_str(), deliveries), (&entry.id, "bob", &entry.deliveries));
    }
    Ok(())
}

pub async fn each_reclaim_increments_the_delivery_count(env: StreamTestEnv) -> TestResult {
    let (flow, _) = env.flow_with_pending(1).await?;
    for (deliveries, name) in (2..8).zip(["bob", "cid"].into_iter().cycle()) {
        let found = flow.reclaim(name, ReclaimFrom::Others).await?;
        assert_eq!(found.entries[0].deliveries, deliveries);
    }
    Ok(())
}

pub async fn a_reclaim_of_own_entries_is_not_one_more_delivery(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = three_consumers(&env).await?;
    for _ in 0..3 {
        let found = flow.reclaim("bob", ReclaimFrom::Own(&ids)).await?;
        assert_eq!(ids_of(&found.entries), [ids[1], ids[4]], "only those of bob");
        assert!(found.entries.iter().all(|entry| entry.deliveries == 1), "{found:?}");
        assert_eq!(found.entries[0].fields, numbered(1), "the entry comes whole");
    }
    assert!(flow.pending_owners().await?.iter().all(|(_, _, deliveries)| *deliveries == 1));
    Ok(())
}

pub async fn a_reclaim_from_anyone_includes_own_entries(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = three_consumers(&env).await?;
    let found = flow.reclaim("ann", ReclaimFrom::Anyone).await?;
    assert_eq!(ids_of(&found.entries), ids);
    Ok(())
}

pub async fn a_reclaim_from_others_excludes_own_entries(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = three_consumers(&env).await?;
    let found = flow.reclaim("ann", ReclaimFrom::Others).await?;
    assert_eq!(ids_of(&found.entries), [ids[1], ids[2], ids[4], ids[5]]);
    let owners: Vec<(String, u64)> =
        flow.pending_owners().await?.into_iter().map(|(_, owner, count)| (owner, count)).collect();
    let counts = [1, 2, 2, 1, 2, 2];
    assert_eq!(owners, counts.map(|count| ("ann".to_owned(), count)), "one's own count stays");
    Ok(())
}

pub async fn a_reclaim_from_one_consumer_excludes_other_consumers(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = three_consumers(&env).await?;
    let found = flow.reclaim("ann", ReclaimFrom::Consumer(&consumer("bob"))).await?;
    assert_eq!(ids_of(&found.entries), [ids[1], ids[4]]);
    let owners: Vec<String> =
        flow.pending_owners().await?.into_iter().map(|(_, owner, _)| owner).collect();
    assert_eq!(owners, ["ann", "ann", "cid", "ann", "ann", "cid"]);
    Ok(())
}

pub async fn a_reclaim_from_a_consumer_without_entries_returns_nothing(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, _) = three_consumers(&env).await?;
    let before = flow.pending_owners().await?;
    let found = flow.reclaim("ann", ReclaimFrom::Consumer(&consumer("unknown"))).await?;
    assert_eq!(found, ReclaimResult::default());
    assert_eq!(flow.pending_owners().await?, before);
    Ok(())
}

pub async fn a_reclaim_by_ids_claims_them_from_any_consumer(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = three_consumers(&env).await?;
    let unread = flow.append(1).await?[0];
    // Out of order, with one that is undelivered and one that never existed.
    let wanted = [ids[4], ids[0], unread, EntryId::new(1, 1)];

    let found = flow.reclaim("dan", ReclaimFrom::Ids(&wanted)).await?;

    assert_eq!(ids_of(&found.entries), [ids[0], ids[4]], "in id order");
    assert_eq!(found.deleted, [], "an entry that is not pending is ignored");
    let of_dan: Vec<EntryId> = flow
        .pending_owners()
        .await?
        .into_iter()
        .filter(|(_, who, _)| who == "dan")
        .map(|x| x.0)
        .collect();
    assert_eq!(of_dan, [ids[0], ids[4]]);
    Ok(())
}

pub async fn a_reclaim_by_idle_time_excludes_recently_active_entries(
    env: StreamTestEnv,
) -> TestResult {
    let min_idle = ms(500);
    let (flow, old) = env.flow_with_pending(2).await?;
    sleep_ms(550).await;
    let bob = consumer("bob");
    let touched = Instant::now();
    flow.append(2).await?;
    flow.deliver("ann", ALL).await?;

    let found = env.backend.reclaim(ReclaimRequest { min_idle, ..flow.reclaim_any(&bob) }).await?;
    if touched.elapsed() < min_idle {
        assert_eq!(ids_of(&found.entries), old);
    }

    let found =
        env.backend.reclaim(ReclaimRequest { min_idle: HOUR, ..flow.reclaim_any(&bob) }).await?;
    assert_eq!(found.entries, [], "nothing is an hour old");
    let by_ids = ReclaimFrom::Ids(&old);
    let found = env
        .backend
        .reclaim(ReclaimRequest { min_idle: HOUR, from: by_ids, ..flow.reclaim_any(&bob) })
        .await?;
    assert_eq!(found.entries, [], "also when asked for by id");
    Ok(())
}

pub async fn a_reclaim_resets_the_idle_time(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    sleep_ms(300).await;
    flow.reclaim("bob", ReclaimFrom::Ids(&ids[..1])).await?;
    let found = flow.pending().await?;
    assert!(found[0].idle + ms(250) <= found[1].idle, "expected 250 ms between, found {found:?}");
    Ok(())
}

/// Follows the cursor to the end with pages of `count`; returns the reclaimed and the deleted entries.
async fn all_pages(
    env: &StreamTestEnv,
    flow: &Flow,
    taker: &ConsumerName,
    from: ReclaimFrom<'_>,
    count: usize,
) -> TestResult<(Vec<EntryId>, Vec<EntryId>)> {
    let (mut reclaimed, mut deleted) = (Vec::new(), Vec::new());
    let mut after = None;
    // More pages than entries means that the cursor does not advance.
    for _ in 0..200 {
        let reclaim = ReclaimRequest { from, after, count, ..flow.reclaim_any(taker) };
        let found = env.backend.reclaim(reclaim).await?;
        assert!(found.entries.len() <= count, "expected at most {count}, found {found:?}");
        reclaimed.extend(ids_of(&found.entries));
        deleted.extend(found.deleted);
        match found.next {
            Some(next) => {
                assert!(after < Some(next), "expected a cursor after {after:?}, found {next}");
                after = Some(next);
            }
            None => return Ok((reclaimed, deleted)),
        }
    }
    panic!("expected the cursor to come to an end, found it at {after:?} after 200 pages");
}

pub async fn the_cursor_visits_everything_once(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(100).await?;
    for (count, taker) in [(7, "bob"), (25, "cid"), (100, "dan"), (1000, "eve")] {
        let (reclaimed, _) =
            all_pages(&env, &flow, &consumer(taker), ReclaimFrom::Anyone, count).await?;
        assert_eq!(reclaimed, ids, "in pages of {count}");
    }
    let counts: Vec<u64> =
        flow.pending_owners().await?.into_iter().map(|(_, _, count)| count).collect();
    assert!(env.is_faulty() || counts.iter().all(|count| *count == 5), "{counts:?}");
    Ok(())
}

pub async fn the_cursor_skips_entries_of_other_consumers(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    flow.append(60).await?;
    flow.deliver("ann", 30).await?;
    let of_bob = ids_of(&flow.deliver("bob", 5).await?);
    flow.deliver("ann", 25).await?;

    let from = consumer("bob");
    let (reclaimed, _) =
        all_pages(&env, &flow, &consumer("cid"), ReclaimFrom::Consumer(&from), 10).await?;

    assert_eq!(reclaimed, of_bob);
    Ok(())
}

pub async fn a_reclaim_begins_after_the_cursor(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(5).await?;
    let bob = consumer("bob");
    let found = env
        .backend
        .reclaim(ReclaimRequest { after: Some(ids[1]), ..flow.reclaim_any(&bob) })
        .await?;
    assert_eq!(ids_of(&found.entries), ids[2..]);

    let after = Some(ids[4]);
    let found = env.backend.reclaim(ReclaimRequest { after, ..flow.reclaim_any(&bob) }).await?;
    assert_eq!(found, ReclaimResult::default());
    Ok(())
}

pub async fn deleted_entries_are_reported_once_and_no_longer_pending(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(10).await?;
    let gone = [ids[0], ids[4], ids[9]];
    env.second.delete_entries(&flow.stream, &gone).await?;
    let left: Vec<EntryId> = ids.iter().copied().filter(|id| !gone.contains(id)).collect();

    let (reclaimed, deleted) =
        all_pages(&env, &flow, &consumer("bob"), ReclaimFrom::Anyone, 4).await?;

    assert_eq!(reclaimed, left);
    assert!(deleted == gone || env.is_faulty(), "expected {gone:?}, found {deleted:?}");
    assert_eq!(flow.pending_ids().await?, left);
    Ok(())
}

pub async fn deleted_entries_are_reported_when_reclaimed_by_id(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(4).await?;
    env.second.delete_entries(&flow.stream, &ids[1..3]).await?;

    let found = flow.reclaim("bob", ReclaimFrom::Ids(&ids[..3])).await?;

    assert_eq!(ids_of(&found.entries), ids[..1]);
    assert_eq!(found.deleted, ids[1..3]);
    assert_eq!(flow.pending_ids().await?, [ids[0], ids[3]]);
    Ok(())
}

pub async fn released_entries_are_found_among_live_ones(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(30).await?;
    let released: Vec<EntryId> = ids.iter().copied().step_by(3).collect();
    let entries: Vec<Settlement> =
        released.iter().map(|id| Settlement { id: *id, action: SettleAction::Release }).collect();
    flow.settle("ann", &entries).await?;

    let bob = consumer("bob");
    let reclaim = ReclaimRequest { min_idle: HOUR, ..flow.reclaim_any(&bob) };
    let found = env.second.reclaim(reclaim).await?;

    assert_eq!(ids_of(&found.entries), released, "whatever the idle time asked for");
    assert!(found.entries.iter().all(|entry| entry.deliveries == 1), "{:?}", found.entries);
    let again = env.second.reclaim(reclaim).await?;
    assert_eq!(again.entries, [], "from then on they are live entries of bob");
    Ok(())
}

pub async fn a_release_after_a_crash_keeps_the_delivery_count_of_the_crash(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(1).await?;
    let (bob, cid) = (consumer("bob"), consumer("cid"));
    env.second.reclaim(flow.reclaim_any(&bob)).await?;
    flow.settle_one("bob", ids[0], SettleAction::Release).await?;

    let found =
        env.second.reclaim(ReclaimRequest { min_idle: HOUR, ..flow.reclaim_any(&cid) }).await?;

    let counts: Vec<u64> = found.entries.iter().map(|entry| entry.deliveries).collect();
    assert_eq!(counts, [2], "ann's delivery and cid's; the one bob gave back does not count");
    Ok(())
}

pub async fn a_reclaim_without_pending_entries_returns_nothing(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    flow.append(3).await?;
    assert_eq!(flow.reclaim("bob", ReclaimFrom::Anyone).await?, ReclaimResult::default());
    assert_eq!(flow.deliver("ann", ALL).await?.len(), 3, "new entries are for reads");
    Ok(())
}

pub async fn a_reclaim_of_no_ids_returns_nothing(env: StreamTestEnv) -> TestResult {
    let (flow, _) = env.flow_with_pending(2).await?;
    let before = flow.pending_owners().await?;
    assert_eq!(flow.reclaim("bob", ReclaimFrom::Ids(&[])).await?, ReclaimResult::default());
    assert_eq!(flow.pending_owners().await?, before);
    Ok(())
}

pub async fn a_thousand_entries_are_reclaimed_in_one_call(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(1000).await?;
    let found = flow.reclaim("bob", ReclaimFrom::Anyone).await?;
    assert_eq!(ids_of(&found.entries), ids);
    let found = flow.reclaim("cid", ReclaimFrom::Ids(&ids)).await?;
    assert_eq!(ids_of(&found.entries), ids);
    Ok(())
}
