//! Statistics of streams, groups and consumers.

use headwater_stream::{ConsumerStats, EntryId, GroupStart, Retention, TrimGuard};

use super::env::{StreamTestEnv, consumer, group};
use super::steps::{ALL, HOUR, done, ms, numbers, sleep_ms};
use crate::failure::TestResult;

fn names(consumers: &[ConsumerStats]) -> Vec<(&str, u64)> {
    consumers.iter().map(|consumer| (consumer.name.as_str(), consumer.pending)).collect()
}

pub async fn a_missing_stream_has_no_stats(env: StreamTestEnv) -> TestResult {
    assert_eq!(env.backend.stats(&env.stream("missing")).await?, None);
    Ok(())
}

pub async fn a_stream_without_groups_has_a_length_and_first_and_last_ids(
    env: StreamTestEnv,
) -> TestResult {
    let stream = env.stream("orders");
    let ids = env.second.append(&stream, &numbers(120), &Retention::KEEP_ALL).await?;

    let found = env.backend.stats(&stream).await?.expect("the stream exists");

    assert_eq!(found.length, 120);
    assert_eq!((found.first_id, found.last_id), (Some(ids[0]), Some(ids[119])));
    assert_eq!(found.groups, []);
    if let Some(bytes) = found.bytes {
        assert!(bytes > 120, "expected about what 120 entries take, found {bytes} bytes");
    }
    Ok(())
}

pub async fn first_and_last_ids_are_those_of_existing_entries(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let ids = env.second.append(&stream, &numbers(5), &Retention::KEEP_ALL).await?;
    env.second.delete_entries(&stream, &[ids[0], ids[4]]).await?;

    let found = env.backend.stats(&stream).await?.expect("the stream exists");

    assert_eq!(found.length, 3);
    assert_eq!((found.first_id, found.last_id), (Some(ids[1]), Some(ids[3])));
    // The last generated id is kept.
    assert_eq!(found.last_generated_id, ids[4]);
    if let Some(added) = found.entries_added {
        assert_eq!((added, found.max_deleted_id), (5, Some(ids[4])));
    }
    env.second.trim(&stream, &Retention::max_len(0), TrimGuard::Force).await?;
    let emptied = env.backend.stats(&stream).await?.expect("the stream exists");
    assert_eq!((emptied.last_id, emptied.last_generated_id), (None, ids[4]));
    assert_eq!(emptied.entries_added, found.entries_added);
    Ok(())
}

pub async fn groups_and_consumers_are_sorted_by_name(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    env.second.append(&stream, &numbers(20), &Retention::KEEP_ALL).await?;
    for name in ["c", "a", "b"] {
        env.second.ensure_group(&stream, &group(name), GroupStart::Beginning).await?;
    }
    for name in ["zoe", "ann", "bob"] {
        let mut reader = env.second.reader(&group("b"), &consumer(name)).await?;
        reader.read(std::slice::from_ref(&stream), 2, ms(0)).await?;
        reader.close().await?;
    }

    let found = env.backend.stats(&stream).await?.expect("the stream exists");

    let groups: Vec<&str> = found.groups.iter().map(|group| group.name.as_str()).collect();
    assert_eq!(groups, ["a", "b", "c"]);
    assert_eq!(names(&found.groups[1].consumers), [("ann", 2), ("bob", 2), ("zoe", 2)]);
    assert_eq!(names(&found.groups[0].consumers), []);
    Ok(())
}

pub async fn pending_count_lag_and_position_are_up_to_date(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let check = async |pending: u64, lag: u64, last: EntryId, what: &str| {
        let stats = env.backend.stats(&flow.stream).await?.expect("the stream exists");
        let found = &stats.groups[0];
        assert_eq!((found.pending, found.last_delivered), (pending, last), "{what}: {found:?}");
        assert_eq!(found.lag, Some(lag), "{what}");
        TestResult::Ok(())
    };
    check(0, 0, EntryId::MIN, "an empty stream").await?;
    let ids = flow.append(10).await?;
    check(0, 10, EntryId::MIN, "ten unread entries").await?;
    flow.deliver("ann", 4).await?;
    check(4, 6, ids[3], "four of them delivered").await?;
    flow.deliver("bob", 4).await?;
    check(8, 2, ids[7], "eight of them delivered").await?;
    flow.settle("ann", &done(&ids[..3])).await?;
    check(5, 2, ids[7], "three of them settled").await?;
    flow.deliver("bob", ALL).await?;
    flow.settle("ann", &done(&ids)).await?;
    check(0, 0, ids[9], "all of them settled").await?;
    Ok(())
}

pub async fn lag_is_correct_or_unknown_after_deletes_and_unusual_starts(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let ids = flow.append(10).await?;
    let (late, end) = (group("late"), group("end"));
    env.second.ensure_group(&flow.stream, &late, GroupStart::After(ids[5])).await?;
    env.second.ensure_group(&flow.stream, &end, GroupStart::End).await?;
    flow.deliver("ann", 3).await?;
    env.second.delete_entries(&flow.stream, &[ids[1], ids[7]]).await?;

    let found = env.backend.stats(&flow.stream).await?.expect("the stream exists");

    let lag = |name: &str| found.groups.iter().find(|g| g.name.as_str() == name).map(|g| g.lag);
    for (name, expected) in [("workers", 6), ("late", 3), ("end", 0)] {
        let lag = lag(name).expect("the group exists");
        assert!(
            lag.is_none_or(|lag| lag == expected),
            "{name}: expected {expected}, found {lag:?}"
        );
    }
    Ok(())
}

pub async fn lag_counts_only_existing_entries(env: StreamTestEnv) -> TestResult {
    let lag = async |stream| {
        let stats = env.backend.stats(stream).await?.expect("the stream exists");
        TestResult::Ok(stats.groups[0].lag)
    };
    let flow = env.flow().await?;
    let ids = flow.append(10).await?;
    flow.deliver("ann", 3).await?;

    env.second.delete_entries(&flow.stream, &ids[4..6]).await?;
    assert_eq!(lag(&flow.stream).await?, Some(5), "unread entries were deleted");
    flow.deliver("ann", 2).await?;
    assert_eq!(lag(&flow.stream).await?, Some(3), "and reading continued after them");
    env.second.trim(&flow.stream, &Retention::max_len(2), TrimGuard::Force).await?;
    assert_eq!(lag(&flow.stream).await?, Some(2), "unread entries were trimmed by force");
    flow.deliver("ann", 1).await?;
    assert_eq!(lag(&flow.stream).await?, Some(1), "and reading continued after them");
    env.second.delete_entries(&flow.stream, &ids).await?;
    assert_eq!(lag(&flow.stream).await?, Some(0), "the stream is empty");
    flow.append(1).await?;
    assert_eq!(lag(&flow.stream).await?, Some(1), "a new entry");
    Ok(())
}

pub async fn consumer_stats_show_pending_entries_and_idle_time(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    flow.append(5).await?;
    flow.deliver("ann", 3).await?;
    sleep_ms(300).await;
    flow.deliver("bob", 2).await?;

    let found = env.backend.stats(&flow.stream).await?.expect("the stream exists");

    let consumers = &found.groups[0].consumers;
    assert_eq!(names(consumers), [("ann", 3), ("bob", 2)]);
    let (ann, bob) = (consumers[0].idle, consumers[1].idle);
    assert!(bob + ms(250) <= ann, "expected ann to be idle 250 ms longer, found {consumers:?}");
    Ok(())
}

pub async fn idle_consumers_without_pending_entries_are_removed(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let ids = flow.append(4).await?;
    for name in ["zoe", "ann", "bob", "cid"] {
        flow.deliver(name, 1).await?;
    }
    flow.settle("zoe", &done(&[ids[0], ids[2]])).await?;
    sleep_ms(60).await;

    let removed = env.backend.remove_idle_consumers(&flow.stream, &flow.group, ms(50)).await?;

    let removed: Vec<&str> = removed.iter().map(|consumer| consumer.as_str()).collect();
    assert!(removed == ["bob", "zoe"] || env.is_faulty(), "sorted by name, found {removed:?}");
    assert_eq!(names(&flow.group_stats().await?.consumers), [("ann", 1), ("cid", 1)]);
    assert_eq!(flow.pending_ids().await?, [ids[1], ids[3]], "nothing pending was lost");
    Ok(())
}

pub async fn a_consumer_is_removed_unless_entries_are_pending_for_it(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, ids) = env.flow_with_pending(1).await?;
    let ann = consumer("ann");
    assert!(!env.backend.remove_consumer(&flow.stream, &flow.group, &ann).await?, "it has one");
    assert!(!env.backend.remove_consumer(&flow.stream, &flow.group, &consumer("no")).await?);
    assert_eq!(flow.pending_ids().await?, ids);

    flow.settle("ann", &done(&ids)).await?;
    let removed = env.backend.remove_consumer(&flow.stream, &flow.group, &ann).await?;
    assert!(removed || env.is_faulty(), "it has none");
    assert_eq!(names(&flow.group_stats().await?.consumers), []);
    Ok(())
}

pub async fn recently_active_consumers_are_kept(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(2).await?;
    flow.settle("ann", &done(&ids)).await?;

    let removed = env.backend.remove_idle_consumers(&flow.stream, &flow.group, HOUR).await?;

    assert_eq!(removed, []);
    assert_eq!(names(&flow.group_stats().await?.consumers), [("ann", 0)]);
    Ok(())
}

pub async fn a_removed_consumer_can_rejoin(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(1).await?;
    flow.settle("ann", &done(&ids)).await?;
    sleep_ms(20).await;
    env.backend.remove_idle_consumers(&flow.stream, &flow.group, ms(1)).await?;
    assert_eq!(names(&flow.group_stats().await?.consumers), []);

    let ids = flow.append(1).await?;
    assert_eq!(flow.deliver("ann", ALL).await?[0].id, ids[0]);
    Ok(())
}
