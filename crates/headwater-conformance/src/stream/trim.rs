//! Trimming: how much of a stream is kept, and what no trim removes unless it is told to.

use headwater_stream::{EntryId, Fields, GroupStart, Retention, StreamName, TrimGuard, Trimmed};

use super::env::{Env, group};
use super::failure::TestResult;
use super::steps::{ALL, Flow, contents, done, ids_of, numbers, settled, sleep_ms};

fn trimmed(removed: u64, held_back: bool) -> Trimmed {
    Trimmed { removed, held_back }
}

async fn ids(env: &Env, stream: &StreamName) -> TestResult<Vec<EntryId>> {
    Ok(contents(&*env.second, stream).await?.into_iter().map(|entry| entry.id).collect())
}

/// Ten entries; the group `workers` has four settled, two in hand (the third and the sixth) and four unread.
async fn worked_on(env: &Env) -> TestResult<(Flow, Vec<EntryId>)> {
    let flow = env.flow().await?;
    let all = flow.append(10).await?;
    flow.deliver("ann", 6).await?;
    let settlements = done(&[all[0], all[1], all[3], all[4]]);
    let settle = headwater_stream::Settle {
        stream: &flow.stream,
        group: &flow.group,
        consumer: &super::env::consumer("ann"),
        fence: None,
        entries: &settlements,
    };
    assert_eq!(env.second.settle(settle).await?, settled(4, 0));
    Ok((flow, all))
}

pub async fn a_trim_by_length_keeps_the_newest_exactly(env: Env) -> TestResult {
    let stream = env.stream("orders");
    let all = env.second.append(&stream, &numbers(250), &Retention::KEEP_ALL).await?;
    for (guard, keep) in [(TrimGuard::Safe, 237), (TrimGuard::Force, 101), (TrimGuard::Safe, 7)] {
        env.backend.trim(&stream, &Retention::max_len(keep), guard).await?;
        assert_eq!(ids(&env, &stream).await?, all[250 - keep as usize..], "{guard:?} {keep}");
    }
    Ok(())
}

pub async fn a_trim_tells_what_it_did(env: Env) -> TestResult {
    let stream = env.stream("orders");
    env.second.append(&stream, &numbers(150), &Retention::KEEP_ALL).await?;
    for (keep, removed) in [(200, 0), (150, 0), (149, 1), (20, 129), (0, 20)] {
        let answer = env.backend.trim(&stream, &Retention::max_len(keep), TrimGuard::Safe).await?;
        assert_eq!(answer, trimmed(removed, false), "keeping {keep}");
    }
    Ok(())
}

pub async fn keeping_everything_removes_nothing(env: Env) -> TestResult {
    let (flow, all) = worked_on(&env).await?;
    for guard in [TrimGuard::Safe, TrimGuard::Force] {
        let answer = env.backend.trim(&flow.stream, &Retention::KEEP_ALL, guard).await?;
        assert_eq!(answer, trimmed(0, false));
    }
    assert_eq!(flow.ids().await?, all);
    Ok(())
}

pub async fn there_is_nothing_to_trim_in_a_missing_stream(env: Env) -> TestResult {
    let stream = env.stream("missing");
    for guard in [TrimGuard::Safe, TrimGuard::Force] {
        let answer = env.backend.trim(&stream, &Retention::max_len(0), guard).await?;
        assert_eq!(answer, trimmed(0, false));
    }
    assert_eq!(env.second.stats(&stream).await?, None);
    Ok(())
}

pub async fn a_safe_trim_stops_at_the_first_pending_entry(env: Env) -> TestResult {
    let (flow, all) = worked_on(&env).await?;

    let answer = env.backend.trim(&flow.stream, &Retention::max_len(0), TrimGuard::Safe).await?;

    assert!(answer == trimmed(2, true) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.ids().await?, all[2..]);
    Ok(())
}

pub async fn a_safe_trim_stops_at_the_first_unread_entry(env: Env) -> TestResult {
    let (flow, all) = worked_on(&env).await?;
    flow.settle("ann", &done(&all[2..6])).await?;

    let answer = env.backend.trim(&flow.stream, &Retention::max_len(1), TrimGuard::Safe).await?;

    assert!(answer == trimmed(6, true) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.ids().await?, all[6..]);
    assert_eq!(ids_of(&flow.deliver("bob", ALL).await?), all[6..], "they are still to come");
    Ok(())
}

pub async fn a_safe_trim_within_what_is_done_is_not_held_back(env: Env) -> TestResult {
    let (flow, all) = worked_on(&env).await?;
    for (keep, removed, held_back) in [(9, 1, false), (8, 1, false), (7, 0, true)] {
        let retention = Retention::max_len(keep);
        let answer = env.backend.trim(&flow.stream, &retention, TrimGuard::Safe).await?;
        assert_eq!(answer, trimmed(removed, held_back), "keeping {keep}");
    }
    assert_eq!(flow.ids().await?, all[2..]);
    Ok(())
}

pub async fn a_safe_trim_heeds_the_slowest_of_all_groups(env: Env) -> TestResult {
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

pub async fn a_safe_trim_removes_nothing_for_a_group_that_read_nothing(env: Env) -> TestResult {
    let flow = env.flow().await?;
    let all = flow.append(5).await?;

    let answer = env.backend.trim(&flow.stream, &Retention::max_len(0), TrimGuard::Safe).await?;

    assert_eq!(answer, trimmed(0, true));
    assert_eq!(flow.ids().await?, all);
    Ok(())
}

pub async fn a_safe_trim_leaves_released_entries(env: Env) -> TestResult {
    let (flow, all) = env.flow_in_hand(3).await?;
    flow.settle("ann", &done(&all[1..])).await?;
    flow.settle_one("ann", all[0], headwater_stream::Then::Release).await?;

    let answer = env.backend.trim(&flow.stream, &Retention::max_len(0), TrimGuard::Safe).await?;

    assert_eq!(answer, trimmed(0, true));
    assert_eq!(flow.ids().await?, all);
    Ok(())
}

pub async fn a_forced_trim_removes_unread_and_pending_entries(env: Env) -> TestResult {
    let (flow, all) = worked_on(&env).await?;

    let answer = env.backend.trim(&flow.stream, &Retention::max_len(2), TrimGuard::Force).await?;

    assert!(answer == trimmed(8, false) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.ids().await?, all[8..]);
    assert_eq!(
        ids_of(&flow.deliver("bob", ALL).await?),
        all[8..],
        "the group goes on with the rest"
    );
    Ok(())
}

pub async fn a_trim_by_age_goes_by_the_time_in_the_id(env: Env) -> TestResult {
    let stream = env.stream("orders");
    let old = env.second.append(&stream, &numbers(20), &Retention::KEEP_ALL).await?;
    sleep_ms(5_000).await;
    let new = env.second.append(&stream, &numbers(20), &Retention::KEEP_ALL).await?;

    // The new ones must not have grown as old by the time of the trim, however late it comes.
    let now = env.second.now().await?.as_millis();
    let max_age = Some(std::time::Duration::from_millis(now - (old[19].ms + 1)));
    let retention = Retention { max_age, ..Retention::KEEP_ALL };
    env.backend.trim(&stream, &retention, TrimGuard::Safe).await?;

    assert_eq!(ids(&env, &stream).await?, new);
    Ok(())
}

pub async fn a_safe_trim_by_age_leaves_what_groups_need(env: Env) -> TestResult {
    let (flow, all) = worked_on(&env).await?;
    sleep_ms(50).await;
    let retention =
        Retention { max_age: Some(std::time::Duration::from_millis(1)), ..Retention::KEEP_ALL };

    let answer = env.backend.trim(&flow.stream, &retention, TrimGuard::Safe).await?;

    assert!(answer == trimmed(2, true) || env.is_faulty(), "{answer:?}");
    assert_eq!(flow.ids().await?, all[2..]);
    Ok(())
}

pub async fn a_trim_by_bytes_keeps_about_that_much_of_the_newest(env: Env) -> TestResult {
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

pub async fn a_safe_trim_by_bytes_leaves_what_groups_need(env: Env) -> TestResult {
    let (flow, all) = worked_on(&env).await?;
    let retention = Retention { max_bytes: Some(1), ..Retention::KEEP_ALL };

    let answer = env.backend.trim(&flow.stream, &retention, TrimGuard::Safe).await?;

    assert!(answer.held_back, "{answer:?}");
    assert_eq!(flow.ids().await?, all[2..]);
    Ok(())
}

pub async fn the_strictest_limit_decides(env: Env) -> TestResult {
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

pub async fn appending_with_retention_keeps_the_stream_short(env: Env) -> TestResult {
    let stream = env.stream("orders");
    let retention = Retention::max_len(100);
    let mut newest = Vec::new();
    for _ in 0..40 {
        newest = env.backend.append(&stream, &numbers(100), &retention).await?;
    }
    let left = ids(&env, &stream).await?;
    // A few nodes of a hundred entries may stay for speed.
    assert!((100..=600).contains(&left.len()), "expected about 100, found {}", left.len());
    assert_eq!(left[left.len() - 100..], newest, "the newest are kept");
    Ok(())
}

pub async fn appending_with_retention_never_removes_what_a_group_needs(env: Env) -> TestResult {
    let flow = env.flow().await?;
    let retention = Retention::max_len(10);
    let mut all = Vec::new();
    for _ in 0..10 {
        all.extend(env.backend.append(&flow.stream, &numbers(100), &retention).await?);
    }
    assert_eq!(flow.ids().await?, all, "nothing was read yet");

    // All read, all but the 500th settled: that one holds back what follows it.
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

    // Settled and read, nothing holds back the rest.
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
