//! Trim: retention limits, and what a safe trim keeps.

use headwater_stream::{EntryId, Fields, GroupStart, Retention, StreamName, TrimGuard, TrimResult};

use super::env::{StreamTestEnv, group};
use super::steps::{ALL, Flow, contents, done, ids_of, numbers, settled, sleep_ms};
use crate::failure::TestResult;

fn trimmed(removed: u64, held_back: bool) -> TrimResult {
    TrimResult { removed, held_back }
}

async fn ids(env: &StreamTestEnv, stream: &StreamName) -> TestResult<Vec<EntryId>> {
    Ok(contents(&*env.second, stream).await?.into_iter().map(|entry| entry.id).collect())
}

/// Ten entries; the group `workers` has settled four, two are pending (the third and the sixth) and four are
/// unread.
async fn worked_on(env: &StreamTestEnv) -> TestResult<(Flow, Vec<EntryId>)> {
    let flow = env.flow().await?;
    let all = flow.append(10).await?;
    flow.deliver("ann", 6).await?;
    let settlements = done(&[all[0], all[1], all[3], all[4]]);
    let settle = headwater_stream::SettleBatch {
        stream: &flow.stream,
        group: &flow.group,
        consumer: &super::env::consumer("ann"),
        fence: None,
        entries: &settlements,
    };
    assert_eq!(env.second.settle(settle).await?, settled(4, 0));
    Ok((flow, all))
}

pub async fn a_trim_by_length_keeps_the_newest_exactly(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let all = env.second.append(&stream, &numbers(250), &Retention::KEEP_ALL).await?;
    for (guard, keep) in [(TrimGuard::Safe, 237), (TrimGuard::Force, 101), (TrimGuard::Safe, 7)] {
        env.backend.trim(&stream, &Retention::max_len(keep), guard).await?;
        assert_eq!(ids(&env, &stream).await?, all[250 - keep as usize..], "{guard:?} {keep}");
    }
    Ok(())
}

pub async fn a_trim_reports_what_it_removed(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    env.second.append(&stream, &numbers(150), &Retention::KEEP_ALL).await?;
    for (keep, removed) in [(200, 0), (150, 0), (149, 1), (20, 129), (0, 20)] {
        let answer = env.backend.trim(&stream, &Retention::max_len(keep), TrimGuard::Safe).await?;
        assert_eq!(answer, trimmed(removed, false), "keeping {keep}");
    }
    Ok(())
}

pub async fn keeping_everything_removes_nothing(env: StreamTestEnv) -> TestResult {
    let (flow, all) = worked_on(&env).await?;
    for guard in [TrimGuard::Safe, TrimGuard::Force] {
        let answer = env.backend.trim(&flow.stream, &Retention::KEEP_ALL, guard).await?;
        assert_eq!(answer, trimmed(0, false));
    }
    assert_eq!(flow.ids().await?, all);
    Ok(())
}

pub async fn trimming_a_missing_stream_removes_nothing(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("missing");
    for guard in [TrimGuard::Safe, TrimGuard::Force] {
        let answer = env.backend.trim(&stream, &Retention::max_len(0), guard).await?;
        assert_eq!(answer, trimmed(0, false));
    }
    assert_eq!(env.second.stats(&stream).await?, None);
    Ok(())
}

pub async fn a_safe_trim_stops_at_the_first_pending_entry(env: StreamTestEnv) -> TestResult {
    let (flow, all) = worked_on(&env).await?;

    let answer = env.backend.trim(&flow.stream, &Retention::max_len(0), TrimGuard::Safe).await?;

    assert!(answer == trimmed(2, true) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.ids().await?, all[2..]);
    Ok(())
}

pub async fn a_safe_trim_stops_at_the_first_unread_entry(env: StreamTestEnv) -> TestResult {
    let (flow, all) = worked_on(&env).await?;
    flow.settle("ann", &done(&all[2..6])).await?;

    let answer = env.backend.trim(&flow.stream, &Retention::max_len(1), TrimGuard::Safe).await?;

    assert!(answer == trimmed(6, true) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.ids().await?, all[6..]);
    assert_eq!(ids_of(&flow.deliver("bob", ALL).await?), all[6..], "they are still delivered");
    Ok(())
}

pub async fn a_safe_trim_of_acknowledged_entries_is_not_held_back(
    env: StreamTestEnv,
) -> TestResult {
    let (flow, all) = worked_on(&env).await?;
    for (keep, removed, held_back) in [(9, 1, false), (8, 1, false), (7, 0, true)] {
        let retention = Retention::max_len(keep);
        let answer = env.backend.trim(&flow.stream, &retention, TrimGuard::Safe).await?;
        assert_eq!(answer, trimmed(removed, held_back), "keeping {keep}");
    }
    assert_eq!(flow.ids().await?, all[2..]);
    Ok(())
}

pub async fn a_safe_trim_respects_the_slowest_group(env: StreamTestEnv) -> TestResult {
    let (flow, all) = worked_on(&env).await?;
    let (fast, slow) = (group("fast"), group("slow"));
    env.second.ensure_group(&flow.stream, &fast, GroupStart::End).await?;
    env.second.ensure_group(&flow.stream, &slow, GroupStart::After(all[0])).await?;

    env.backend.trim(&flow.stream, &Retention::max_len(0), TrimGuard::Safe).await?;
    assert_eq!(flow.ids().await?, all[1..], "the slow group has read nothing after the first");

    env.second.remove_group(&flow.stream, &slow).await?;
    env.backend.trim(&flow.stream, &Retention::max_len(0), TrimGuard::Safe).await?;
    assert_eq!(flow.ids().await?, all[2..], "then the other group decides");
    Ok(())
}

pub async fn a_safe_trim_removes_nothing_for_a_group_that_read_nothing(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let all = flow.append(5).await?;

    let answer = env.backend.trim(&flow.stream, &Retention::max_len(0), TrimGuard::Safe).await?;

    assert_eq!(answer, trimmed(0, true));
    assert_eq!(flow.ids().await?, all);
    Ok(())
}

pub async fn a_safe_trim_keeps_released_entries(env: StreamTestEnv) -> TestResult {
    let (flow, all) = env.flow_with_pending(3).await?;
    flow.settle("ann", &done(&all[1..])).await?;
    flow.settle_one("ann", all[0], headwater_stream::SettleAction::Release).await?;

    let answer = env.backend.trim(&flow.stream, &Retention::max_len(0), TrimGuard::Safe).await?;

    assert_eq!(answer, trimmed(0, true));
    assert_eq!(flow.ids().await?, all);
    Ok(())
}

pub async fn a_forced_trim_removes_unread_and_pending_entries(env: StreamTestEnv) -> TestResult {
    let (flow, all) = worked_on(&env).await?;

    let answer = env.backend.trim(&flow.stream, &Retention::max_len(2), TrimGuard::Force).await?;

    assert!(answer == trimmed(8, false) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.ids().await?, all[8..]);
    assert_eq!(
        ids_of(&flow.deliver("bob", ALL).await?),
        all[8..],
        "the group continues with the rest"
    );
    Ok(())
}

pub async fn a_trim_by_age_uses_the_time_in_the_id(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let old = env.second.append(&stream, &numbers(20), &Retention::KEEP_ALL).await?;
    sleep_ms(5_000).await;
    let new = env.second.append(&stream, &numbers(20), &Retention::KEEP_ALL).await?;

    // The new entries must not reach that age before the trim, however late it runs.
    let now = env.second.now().await?.as_millis();
    let max_age = Some(std::time::Duration::from_millis(now - (old[19].ms + 1)));
    let retention = Retention { max_age, ..Retention::KEEP_ALL };
    env.backend.trim(&stream, &retention, TrimGuard::Safe).await?;

    assert_eq!(ids(&env, &stream).await?, new);
    Ok(())
}

pub async fn a_safe_trim_by_age_keeps_entries_that_groups_need(env: StreamTestEnv) -> TestResult {
    let (flow, all) = worked_on(&env).await?;
    sleep_ms(50).await;
    let retention =
        Retention { max_age: Some(std::time::Duration::from_millis(1)), ..Retention::KEEP_ALL };

    let answer = env.backend.trim(&flow.stream, &retention, TrimGuard::Safe).await?;

    assert!(answer == trimmed(2, true) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.ids().await?, all[2..]);
    Ok(())
}

pub async fn a_trim_by_bytes_keeps_approximately_that_many_bytes_of_the_newest_entries(
    env: StreamTestEnv,
) -> TestResult {
    let stream = env.stream("orders");
    let kibibyte = Fields::new([("payload", "x".repeat(1024))]);
    let mut all = Vec::new();
    for _ in 0..10 {
        let entries = vec![kibibyte.clone(); 100];
        all.extend(env.second.append(&stream, &entries, &Retention::KEEP_ALL).await?);
    }
    let retention = Retention { max_bytes: Some(200 * 1024), ..Retention::KEEP_ALL };

    env.backend.trim(&stream, &retention, TrimGuard::Safe).await?;

    let left = ids(&env, &stream).await?;
    assert!((20..=400).contains(&left.len()), "expected about 200 entries, found {}", left.len());
    assert_eq!(left, all[1000 - left.len()..], "the newest ones");
    Ok(())
}

pub async fn a_safe_trim_by_bytes_keeps_entries_that_groups_need(env: StreamTestEnv) -> TestResult {
    let (flow, all) = worked_on(&env).await?;
    let retention = Retention { max_bytes: Some(1), ..Retention::KEEP_ALL };

    let answer = env.backend.trim(&flow.stream, &retention, TrimGuard::Safe).await?;

    assert!(answer.held_back, "{answer:?}");
    assert_eq!(flow.ids().await?, all[2..]);
    Ok(())
}

pub async fn the_strictest_limit_applies(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let all = env.second.append(&stream, &numbers(50), &Retention::KEEP_ALL).await?;
    let loose = Retention {
        max_len: Some(30),
        max_age: Some(super::steps::HOUR),
        max_bytes: Some(u64::from(u32::MAX)),
    };
    env.backend.trim(&stream, &loose, TrimGuard::Safe).await?;
    assert_eq!(ids(&env, &stream).await?, all[20..], "the length is the strictest");

    sleep_ms(50).await;
    let max_age = Some(std::time::Duration::from_millis(1));
    env.backend.trim(&stream, &Retention { max_age, ..loose }, TrimGuard::Safe).await?;
    assert_eq!(ids(&env, &stream).await?, [], "the age is");
    Ok(())
}

pub async fn appending_with_retention_keeps_the_stream_short(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let retention = Retention::max_len(100);
    let mut newest = Vec::new();
    for _ in 0..40 {
        newest = env.backend.append(&stream, &numbers(100), &retention).await?;
    }
    let left = ids(&env, &stream).await?;
    // Redis may keep a few extra nodes of a hundred entries.
    assert!((100..=600).contains(&left.len()), "expected about 100, found {}", left.len());
    assert_eq!(left[left.len() - 100..], newest, "the newest are kept");
    Ok(())
}

pub async fn appending_with_retention_never_removes_entries_that_a_group_needs(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let retention = Retention::max_len(10);
    let mut all = Vec::new();
    for _ in 0..10 {
        all.extend(env.backend.append(&flow.stream, &numbers(100), &retention).await?);
    }
    assert_eq!(flow.ids().await?, all, "nothing was read yet");

    // All are read and all but the 500th settled: that one holds back what follows it.
    flow.deliver("ann", 1000).await?;
    let rest: Vec<EntryId> = all.iter().copied().filter(|id| *id != all[500]).collect();
    flow.settle("ann", &done(&rest)).await?;
    for _ in 0..10 {
        all.extend(env.backend.append(&flow.stream, &numbers(100), &retention).await?);
    }
    let left = flow.ids().await?;
    assert_eq!(left, all[all.len() - left.len()..], "the newest stay");
    assert!(left.first() <= Some(&all[500]), "the pending entry stays");
    assert!(
        left.first() > Some(&all[0]),
        "expected the settled ones trimmed, found {}",
        left.len()
    );

    // Once it is settled, nothing holds back the rest.
    flow.settle("ann", &done(&[all[500]])).await?;
    let read = ids_of(&flow.deliver("ann", ALL).await?);
    flow.settle("ann", &done(&read)).await?;
    for _ in 0..10 {
        env.backend.append(&flow.stream, &numbers(1), &retention).await?;
    }
    let left = flow.ids().await?.len();
    assert!((10..=500).contains(&left), "expected a short stream, found {left} entries");
    Ok(())
}
