//! Renaming streams: in one step, with everything they contain, and never over other entries.

use headwater_stream::{GroupStart, Retention};

use super::env::{StreamTestEnv, consumer, group};
use super::steps::{contents, ids_of, numbers, read_all, sleep_ms};
use crate::failure::TestResult;

pub async fn a_renamed_stream_keeps_its_entries_groups_and_pending_entries(
    env: StreamTestEnv,
) -> TestResult {
    let flow = env.flow().await?;
    let ids = flow.append(5).await?;
    flow.deliver("ann", 2).await?;
    let (before, to) = (contents(&*env.second, &flow.stream).await?, env.stream("renamed"));

    assert!(env.backend.rename_stream(&flow.stream, &to).await?, "the target does not exist");

    assert_eq!(env.second.stats(&flow.stream).await?, None, "the old name is free");
    assert_eq!(contents(&*env.second, &to).await?, before);
    let stats = env.second.stats(&to).await?.expect("the stream exists");
    assert_eq!((stats.length, stats.last_id), (5, Some(ids[4])));
    let [of_group] = &stats.groups[..] else { panic!("{stats:?}") };
    assert_eq!((&of_group.name, of_group.pending), (&flow.group, 2));
    assert_eq!(of_group.last_delivered, ids[1]);
    // Both names can be used.
    let later = env.second.append(&to, &numbers(1), &Retention::KEEP_ALL).await?;
    assert!(later[0] > ids[4], "ids stay ascending");
    env.second.append(&flow.stream, &numbers(1), &Retention::KEEP_ALL).await?;
    assert_eq!(contents(&*env.second, &flow.stream).await?.len(), 1);
    Ok(())
}

pub async fn a_stream_is_not_renamed_over_one_with_entries(env: StreamTestEnv) -> TestResult {
    let (from, to) = (env.stream("from"), env.stream("to"));
    env.second.append(&from, &numbers(3), &Retention::KEEP_ALL).await?;
    env.second.append(&to, &numbers(2), &Retention::KEEP_ALL).await?;
    let before = (contents(&*env.second, &from).await?, contents(&*env.second, &to).await?);

    assert!(!env.backend.rename_stream(&from, &to).await?, "the target has entries");
    assert!(!env.backend.rename_stream(&from, &from).await?, "it has this name");

    let after = (contents(&*env.second, &from).await?, contents(&*env.second, &to).await?);
    assert_eq!(after, before);
    Ok(())
}

pub async fn an_empty_stream_is_replaced_by_a_renamed_one(env: StreamTestEnv) -> TestResult {
    let (from, to) = (env.stream("from"), env.stream("to"));
    let ids = env.second.append(&from, &numbers(3), &Retention::KEEP_ALL).await?;
    env.second.ensure_group(&to, &group("lost"), GroupStart::Beginning).await?;

    assert!(env.backend.rename_stream(&from, &to).await?, "the target is empty");

    let stats = env.second.stats(&to).await?.expect("the stream exists");
    assert_eq!((stats.first_id, stats.groups.len()), (Some(ids[0]), 0));
    Ok(())
}

pub async fn a_missing_stream_is_not_renamed(env: StreamTestEnv) -> TestResult {
    let (from, to) = (env.stream("from"), env.stream("to"));
    assert!(!env.backend.rename_stream(&from, &to).await?);
    assert_eq!(env.second.stats(&to).await?, None, "nothing was created");
    Ok(())
}

pub async fn of_concurrent_renames_to_one_name_one_takes_effect(env: StreamTestEnv) -> TestResult {
    let to = env.stream("to");
    let sources: Vec<_> = (0..16).map(|number| env.stream(&format!("from-{number}"))).collect();
    for (count, from) in sources.iter().enumerate() {
        env.second.append(from, &numbers(count + 1), &Retention::KEEP_ALL).await?;
    }

    let renames = sources.iter().map(|from| env.backend.rename_stream(from, &to));
    let renamed: Vec<bool> = futures_util::future::try_join_all(renames).await?;

    assert_eq!(renamed.iter().filter(|renamed| **renamed).count(), 1, "{renamed:?}");
    for (count, (from, renamed)) in sources.iter().zip(renamed).enumerate() {
        let now = if renamed { &to } else { from };
        assert_eq!(contents(&*env.second, now).await?.len(), count + 1, "{from}");
    }
    Ok(())
}

pub async fn a_blocked_reader_gets_the_entries_of_a_stream_that_is_renamed_to_its_own(
    env: StreamTestEnv,
) -> TestResult {
    let (from, to, readers) = (env.stream("from"), env.stream("to"), group("readers"));
    let ids = env.second.append(&from, &numbers(3), &Retention::KEEP_ALL).await?;
    let mut reader = env.backend.reader(&readers, &consumer("ann")).await?;

    let reading = read_all(&mut *reader, std::slice::from_ref(&to), ids.len());
    let renaming = async {
        sleep_ms(100).await;
        env.second.rename_stream(&from, &to).await
    };
    let (found, renamed) = tokio::join!(reading, renaming);

    assert!(renamed?, "the target is empty");
    assert_eq!(ids_of(&found?[0].entries), ids);
    Ok(())
}
