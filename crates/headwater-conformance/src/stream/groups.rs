//! Groups: start positions, and what groups share and do not share.

use std::collections::BTreeSet;

use headwater_stream::{EntryId, GroupCondition, GroupStart, RegistryMap, Retention, StreamError};

use super::env::{StreamTestEnv, consumer, group};
use super::steps::{ALL, ids_of, ms, numbers, read_all, sleep_ms};
use crate::failure::TestResult;

const KEEP: &Retention = &Retention::KEEP_ALL;

/// The ids that a new group with this start gets: four existing entries and two later ones.
async fn delivered_from(
    env: &StreamTestEnv,
    start: impl Fn(&[EntryId]) -> GroupStart,
) -> TestResult<Vec<usize>> {
    let (stream, group) = (env.stream("orders"), group("workers"));
    let mut ids = env.second.append(&stream, &numbers(4), KEEP).await?;
    env.backend.ensure_group(&stream, &group, start(&ids)).await?;
    ids.extend(env.second.append(&stream, &numbers(2), KEEP).await?);

    let mut reader = env.backend.reader(&group, &consumer("ann")).await?;
    let mut found = Vec::new();
    loop {
        let batches = reader.read(std::slice::from_ref(&stream), ALL, ms(1)).await?;
        let Some(batch) = batches.first() else { break };
        found.extend(ids_of(&batch.entries));
    }
    let place = |id| ids.iter().position(|known| *known == id);
    Ok(found
        .into_iter()
        .map(|id| place(id).expect("only appended entries are delivered"))
        .collect())
}

pub async fn a_group_from_the_beginning_gets_every_entry(env: StreamTestEnv) -> TestResult {
    let found = delivered_from(&env, |_| GroupStart::Beginning).await?;
    assert_eq!(found, [0, 1, 2, 3, 4, 5]);
    Ok(())
}

pub async fn a_group_from_the_end_gets_later_entries(env: StreamTestEnv) -> TestResult {
    assert_eq!(delivered_from(&env, |_| GroupStart::End).await?, [4, 5]);
    Ok(())
}

pub async fn a_group_after_an_id_gets_the_entries_after_it(env: StreamTestEnv) -> TestResult {
    assert_eq!(delivered_from(&env, |ids| GroupStart::After(ids[1])).await?, [2, 3, 4, 5]);
    Ok(())
}

pub async fn a_group_from_the_end_of_a_missing_stream_gets_its_first_entry(
    env: StreamTestEnv,
) -> TestResult {
    let (stream, group) = (env.stream("orders"), group("workers"));
    env.backend.ensure_group(&stream, &group, GroupStart::End).await?;
    let ids = env.second.append(&stream, &numbers(2), KEEP).await?;

    let mut reader = env.backend.reader(&group, &consumer("ann")).await?;
    let found = read_all(&mut *reader, &[stream], 2).await?;

    assert_eq!(ids_of(&found[0].entries), ids);
    Ok(())
}

pub async fn ensuring_a_group_creates_its_stream(env: StreamTestEnv) -> TestResult {
    let (stream, group) = (env.stream("orders"), group("workers"));
    env.backend.ensure_group(&stream, &group, GroupStart::Beginning).await?;

    let stats = env.second.stats(&stream).await?.expect("the stream exists");
    assert_eq!((stats.length, stats.groups.len()), (0, 1), "{stats:?}");
    Ok(())
}

pub async fn ensuring_a_group_returns_whether_it_was_created(env: StreamTestEnv) -> TestResult {
    let (stream, group) = (env.stream("orders"), group("workers"));
    assert!(env.backend.ensure_group(&stream, &group, GroupStart::Beginning).await?);
    assert!(!env.backend.ensure_group(&stream, &group, GroupStart::End).await?);
    Ok(())
}

pub async fn ensuring_a_group_again_keeps_its_position(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let ids = flow.append(3).await?;
    flow.deliver("ann", 1).await?;

    for start in [GroupStart::Beginning, GroupStart::End, GroupStart::After(ids[1])] {
        let new = env.backend.ensure_group(&flow.stream, &flow.group, start).await?;
        assert!(!new, "the group already existed");
    }

    assert_eq!(ids_of(&flow.deliver("bob", ALL).await?), ids[1..], "the group continued");
    assert_eq!(flow.pending_ids().await?, ids, "and kept its pending entries");
    Ok(())
}

pub async fn a_group_is_created_only_while_its_condition_holds(env: StreamTestEnv) -> TestResult {
    let (map, group) = (env.map("meta"), group("workers"));
    let owned = RegistryMap::from([("owner".to_owned(), "ann".into())]);
    let deleting = RegistryMap::from([("deleting".to_owned(), "now".into())]);
    let if_map = GroupCondition::StreamOrMap { map: &map, without: "deleting" };
    // On a cluster the map is in another slot than one of them.
    for stream in [env.stream("orders"), env.stream_elsewhere("orders")] {
        let refuses = async |condition| {
            let ensured =
                env.backend.ensure_group_if(&stream, &group, GroupStart::Beginning, condition);
            let ensured = ensured.await;
            assert!(matches!(ensured, Err(StreamError::NoGroup { .. })), "{ensured:?}");
            assert_eq!(env.second.stats(&stream).await?, None, "nothing is created");
            TestResult::Ok(())
        };
        refuses(GroupCondition::StreamExists).await?;
        refuses(if_map).await?;
        env.second.map_create(&map, &owned).await?;
        refuses(GroupCondition::StreamExists).await?;
        env.second.map_update(&map, None, &deleting).await?;
        refuses(if_map).await?;
        env.second.map_delete(&map).await?;

        env.second.map_create(&map, &owned).await?;
        env.backend.ensure_group_if(&stream, &group, GroupStart::Beginning, if_map).await?;
        env.second.map_delete(&map).await?;
        let ids = env.second.append(&stream, &numbers(2), KEEP).await?;
        // What exists needs no map, and the group keeps its position.
        for condition in [if_map, GroupCondition::StreamExists] {
            let start = GroupStart::After(ids[1]);
            assert!(!env.backend.ensure_group_if(&stream, &group, start, condition).await?);
        }
        let mut reader = env.backend.reader(&group, &consumer("ann")).await?;
        let found = read_all(&mut *reader, std::slice::from_ref(&stream), 2).await?;
        assert_eq!(ids_of(&found[0].entries), ids);
    }
    Ok(())
}

pub async fn every_group_gets_every_entry(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let others = [group("audit"), group("search")];
    for other in &others {
        env.backend.ensure_group(&flow.stream, other, GroupStart::Beginning).await?;
    }
    let ids = flow.append(20).await?;

    assert_eq!(ids_of(&flow.deliver("ann", ALL).await?), ids);
    for other in &others {
        assert_eq!(ids_of(&flow.deliver_to(other, "ann", ALL).await?), ids, "{other}");
    }
    Ok(())
}

pub async fn each_entry_goes_to_one_consumer_of_a_group(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let ids = flow.append(100).await?;
    let mut readers = Vec::new();
    for name in ["ann", "bob", "cid"] {
        readers.push(env.backend.reader(&flow.group, &consumer(name)).await?);
    }

    let mut found = Vec::new();
    while found.len() < ids.len() {
        let before = found.len();
        for reader in &mut readers {
            for batch in reader.read(std::slice::from_ref(&flow.stream), 7, ms(100)).await? {
                found.extend(ids_of(&batch.entries));
            }
        }
        assert!(found.len() > before, "expected all of {ids:?}, found only {found:?}");
    }

    assert_eq!(found.len(), ids.len(), "nothing was delivered twice");
    assert_eq!(BTreeSet::from_iter(found), BTreeSet::from_iter(ids));
    Ok(())
}

pub async fn a_group_of_the_same_name_on_another_stream_is_another_group(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let other = env.stream("invoices");
    flow.append(2).await?;
    flow.deliver("ann", ALL).await?;
    let ids = env.second.append(&other, &numbers(2), KEEP).await?;
    env.second.ensure_group(&other, &flow.group, GroupStart::Beginning).await?;

    let mut reader = env.backend.reader(&flow.group, &consumer("ann")).await?;
    let found = read_all(&mut *reader, std::slice::from_ref(&other), 2).await?;
    env.second.remove_group(&other, &flow.group).await?;

    assert_eq!(ids_of(&found[0].entries), ids);
    assert_eq!(flow.pending_ids().await?.len(), 2, "the first group is untouched");
    Ok(())
}

pub async fn removing_a_group_removes_its_pending_entries(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(3).await?;

    let removed = env.backend.remove_group(&flow.stream, &flow.group).await?;
    assert!(removed || env.is_faulty(), "there was a group");
    assert!(!env.backend.remove_group(&flow.stream, &flow.group).await?, "now it does not exist");
    assert_eq!(flow.ids().await?, ids, "the entries stay");

    env.second.ensure_group(&flow.stream, &flow.group, GroupStart::Beginning).await?;
    assert_eq!(flow.pending_ids().await?, []);
    let again = flow.deliver("ann", ALL).await?;
    assert_eq!(ids_of(&again), ids, "a new group of that name starts from the beginning");
    assert!(again.iter().all(|delivery| delivery.deliveries == 1), "{again:?}");
    Ok(())
}

pub async fn removing_a_group_does_not_affect_other_groups(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(3).await?;
    let audit = group("audit");
    env.second.ensure_group(&flow.stream, &audit, GroupStart::Beginning).await?;

    env.backend.remove_group(&flow.stream, &audit).await?;

    assert_eq!(flow.pending_ids().await?, ids);
    Ok(())
}

pub async fn removing_a_group_of_a_missing_stream_returns_false(env: StreamTestEnv) -> TestResult {
    let (stream, group) = (env.stream("orders"), group("workers"));
    assert!(!env.backend.remove_group(&stream, &group).await?, "there is no such group");
    assert!(!env.backend.delete_stream(&stream).await?, "there is no such stream");
    Ok(())
}

pub async fn a_reset_group_continues_from_its_new_position_with_nothing_pending(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let ids = flow.append(6).await?;
    for (start, expected) in [
        (GroupStart::Beginning, &ids[..]),
        (GroupStart::After(ids[3]), &ids[4..]),
        (GroupStart::End, &ids[6..]),
        (GroupStart::Beginning, &ids[..]),
    ] {
        flow.deliver("ann", 4).await?;

        let reset = env.backend.reset_group(&flow.stream, &flow.group, start).await?;

        assert!(reset, "{start:?}: the group exists");
        assert_eq!(flow.pending_ids().await?, [], "{start:?}");
        let found = flow.deliver("bob", ALL).await?;
        assert_eq!(ids_of(&found), expected, "{start:?}");
        assert!(found.iter().all(|delivery| delivery.deliveries == 1), "{start:?}: {found:?}");
    }
    Ok(())
}

pub async fn resetting_a_group_does_not_affect_other_groups(env: StreamTestEnv) -> TestResult {
    let (flow, ids) = env.flow_with_pending(3).await?;
    let audit = group("audit");
    env.second.ensure_group(&flow.stream, &audit, GroupStart::Beginning).await?;

    env.backend.reset_group(&flow.stream, &audit, GroupStart::End).await?;

    assert_eq!(flow.pending_ids().await?, ids);
    assert_eq!(flow.ids().await?, ids, "the entries stay");
    Ok(())
}

pub async fn a_blocked_reader_continues_where_its_group_was_reset_to(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let ids = flow.append(4).await?;
    flow.deliver("bob", ALL).await?;
    let mut reader = env.backend.reader(&flow.group, &consumer("ann")).await?;

    let reading = read_all(&mut *reader, std::slice::from_ref(&flow.stream), 2);
    let resetting = async {
        sleep_ms(100).await;
        env.second.reset_group(&flow.stream, &flow.group, GroupStart::After(ids[1])).await
    };
    let (found, reset) = tokio::join!(reading, resetting);

    assert!(reset?, "the group exists");
    assert_eq!(ids_of(&found?[0].entries), ids[2..], "and not from the beginning");
    Ok(())
}

pub async fn a_group_that_does_not_exist_is_not_reset(env: StreamTestEnv) -> TestResult {
    let (flow, _) = env.flow_with_pending(1).await?;
    let unknown = group("unknown");
    assert!(!env.backend.reset_group(&flow.stream, &unknown, GroupStart::End).await?);
    assert!(!env.backend.reset_group(&env.stream("no"), &unknown, GroupStart::End).await?);
    let stats = env.second.stats(&flow.stream).await?.expect("the stream exists");
    assert_eq!(stats.groups.len(), 1, "no group was created");
    assert_eq!(env.second.stats(&env.stream("no")).await?, None, "nor a stream");
    Ok(())
}
