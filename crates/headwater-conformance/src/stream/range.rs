//! Reading and deleting by id.

use headwater_stream::{Direction, Entry, EntryId, GroupStart, Range, Retention, StreamName};

use super::env::{StreamTestEnv, group};
use super::steps::{ALL, contents, ids_of, numbers};
use crate::failure::TestResult;

const KEEP: &Retention = &Retention::KEEP_ALL;

async fn ten(env: &StreamTestEnv) -> TestResult<(StreamName, Vec<EntryId>)> {
    let stream = env.stream("orders");
    let ids = env.second.append(&stream, &numbers(10), KEEP).await?;
    Ok((stream, ids))
}

fn ids(entries: &[Entry]) -> Vec<EntryId> {
    entries.iter().map(|entry| entry.id).collect()
}

fn reversed(ids: &[EntryId]) -> Vec<EntryId> {
    ids.iter().rev().copied().collect()
}

pub async fn a_range_includes_both_ends(env: StreamTestEnv) -> TestResult {
    let (stream, all) = ten(&env).await?;
    let range = Range { from: all[2], to: all[7], ..Range::first(ALL) };
    let found = env.backend.range(&stream, range).await?;
    assert_eq!(ids(&found), all[2..=7]);
    assert_eq!(found[0].fields, numbers(3)[2], "the entries come whole");

    let one = Range { from: all[4], to: all[4], ..Range::first(ALL) };
    assert_eq!(ids(&env.backend.range(&stream, one).await?), [all[4]]);
    Ok(())
}

pub async fn a_backward_range_starts_with_the_newest_entry(env: StreamTestEnv) -> TestResult {
    let (stream, all) = ten(&env).await?;
    assert_eq!(ids(&env.backend.range(&stream, Range::last(3)).await?), reversed(&all[7..]));

    let direction = Direction::Backward;
    let range = Range { from: all[2], to: all[7], direction, count: ALL };
    assert_eq!(ids(&env.backend.range(&stream, range).await?), reversed(&all[2..=7]));
    Ok(())
}

pub async fn a_range_returns_at_most_count_entries(env: StreamTestEnv) -> TestResult {
    let (stream, all) = ten(&env).await?;
    for count in [1, 4, 10, 11] {
        let expected = count.min(10);
        let found = env.backend.range(&stream, Range::first(count)).await?;
        assert_eq!(ids(&found), all[..expected]);
        let found = env.backend.range(&stream, Range::last(count)).await?;
        assert_eq!(ids(&found), reversed(&all[10 - expected..]));
    }
    Ok(())
}

pub async fn paging_through_a_range_returns_each_entry_once(env: StreamTestEnv) -> TestResult {
    let (stream, all) = ten(&env).await?;
    let (mut forward, mut from) = (Vec::new(), EntryId::MIN);
    loop {
        let page = env.backend.range(&stream, Range { from, ..Range::first(3) }).await?;
        let Some(last) = page.last() else { break };
        from = last.id.next();
        forward.extend(ids(&page));
    }
    assert_eq!(forward, all);
    Ok(())
}

pub async fn bounds_between_and_beyond_the_entries_are_valid(env: StreamTestEnv) -> TestResult {
    let (stream, all) = ten(&env).await?;
    let before_first = EntryId::new(all[0].ms - 1, 7);
    let after_last = EntryId::new(all[9].ms + 1, 0);
    let cases = [
        (EntryId::MIN, EntryId::MAX, &all[..]),
        (before_first, after_last, &all[..]),
        (all[3].next(), EntryId::MAX, &all[4..]),
        (EntryId::MIN, before_first, &[]),
        (after_last, EntryId::MAX, &[]),
        (all[5], all[4], &[]),
        (EntryId::MAX, EntryId::MIN, &[]),
    ];
    for (from, to, expected) in cases {
        let forward = Range { from, to, ..Range::first(ALL) };
        assert_eq!(ids(&env.backend.range(&stream, forward).await?), expected, "{forward:?}");
        let backward = Range { direction: Direction::Backward, ..forward };
        let found = ids(&env.backend.range(&stream, backward).await?);
        assert_eq!(found, reversed(expected), "{backward:?}");
    }
    Ok(())
}

pub async fn a_missing_stream_has_an_empty_range(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("missing");
    for range in [Range::first(1), Range::last(ALL)] {
        assert_eq!(env.backend.range(&stream, range).await?, []);
    }
    assert_eq!(env.second.stats(&stream).await?, None, "looking creates nothing");
    Ok(())
}

pub async fn a_range_returns_entries_that_groups_have_read(env: StreamTestEnv) -> TestResult {
    let (flow, ids_in_hand) = env.flow_with_pending(3).await?;
    let range = env.backend.range(&flow.stream, Range::first(ALL)).await?;
    assert_eq!(ids(&range), ids_in_hand);
    assert_eq!(flow.pending_ids().await?, ids_in_hand, "and changes nothing for them");
    Ok(())
}

pub async fn ten_thousand_entries_are_returned_in_one_range(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    for _ in 0..5 {
        env.second.append(&stream, &numbers(2001), KEEP).await?;
    }
    let found = env.backend.range(&stream, Range::first(ALL)).await?;
    assert_eq!(found.len(), ALL);
    assert!(found.is_sorted_by(|a, b| a.id < b.id), "in id order");
    Ok(())
}

pub async fn deleted_entries_do_not_reappear(env: StreamTestEnv) -> TestResult {
    let (stream, all) = ten(&env).await?;
    let victims = [all[9], all[0], all[5], EntryId::new(1, 1)];

    let deleted = env.backend.delete_entries(&stream, &victims).await?;

    assert!(deleted == 3 || env.is_faulty(), "expected 3, found {deleted}");
    let left: Vec<EntryId> = all.iter().copied().filter(|id| !victims.contains(id)).collect();
    assert_eq!(ids(&contents(&*env.second, &stream).await?), left);
    assert_eq!(env.backend.delete_entries(&stream, &victims).await?, 0, "there is nothing left");
    Ok(())
}

pub async fn deleting_entries_keeps_them_pending(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(3).await?;
    env.backend.delete_entries(&flow.stream, &ids[..1]).await?;
    assert_eq!(flow.pending_ids().await?, ids, "the delivery has not ended");
    Ok(())
}

pub async fn deleting_entries_of_a_missing_stream_returns_zero(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("missing");
    assert_eq!(env.backend.delete_entries(&stream, &[EntryId::new(1, 1)]).await?, 0);
    assert_eq!(env.backend.delete_entries(&stream, &[]).await?, 0);
    assert_eq!(env.second.stats(&stream).await?, None);
    Ok(())
}

pub async fn deleting_a_stream_removes_its_groups(env: StreamTestEnv) -> TestResult {
    let (flow, _) = env.flow_with_pending(3).await?;

    let deleted = env.backend.delete_stream(&flow.stream).await?;

    assert!(deleted || env.is_faulty(), "there was a stream");
    assert!(!env.backend.delete_stream(&flow.stream).await?, "now it does not exist");
    assert_eq!(env.second.stats(&flow.stream).await?, None);
    let new = env.second.ensure_group(&flow.stream, &flow.group, GroupStart::Beginning).await?;
    assert!(new, "the group went with the stream");
    assert_eq!(flow.pending_ids().await?, []);
    Ok(())
}

pub async fn a_stream_emptied_by_deletes_still_has_its_groups(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    env.backend.delete_entries(&flow.stream, &ids).await?;

    let stats = env.second.stats(&flow.stream).await?.expect("the stream exists");
    assert_eq!((stats.length, stats.first_id, stats.last_id), (0, None, None), "{stats:?}");
    assert_eq!(stats.groups.len(), 1, "{stats:?}");
    let new = flow.append(1).await?;
    let found = flow.deliver_to(&group("workers"), "bob", ALL).await?;
    assert_eq!(ids_of(&found), new, "the group continues");
    Ok(())
}
