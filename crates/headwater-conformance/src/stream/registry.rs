//! The registry: maps with conditional updates, and sets with a TTL.

use std::sync::Arc;

use bytes::Bytes;
use headwater_stream::RegistryMap;

use super::env::StreamTestEnv;
use super::steps::{HOUR, ms, sleep_ms};
use crate::failure::TestResult;

fn map<const N: usize>(fields: [(&str, &'static str); N]) -> RegistryMap {
    fields.map(|(name, value)| (name.to_owned(), Bytes::from(value))).into()
}

pub async fn a_map_is_created_once(env: StreamTestEnv) -> TestResult {
    let name = env.map("topic");
    assert_eq!(env.backend.map_get(&name).await?, None);
    assert!(env.backend.map_create(&name, &map([("a", "1"), ("b", "2")])).await?);
    assert!(!env.second.map_create(&name, &map([("a", "9"), ("c", "3")])).await?);
    assert_eq!(env.backend.map_get(&name).await?, Some(map([("a", "1"), ("b", "2")])));
    Ok(())
}

pub async fn one_of_16_concurrent_callers_creates_the_map(env: StreamTestEnv) -> TestResult {
    let name = env.map("topic");
    let tasks = (0..16).map(|number: usize| {
        let backend = if number.is_multiple_of(2) { &env.backend } else { &env.second };
        let (backend, name) = (Arc::clone(backend), name.clone());
        tokio::spawn(async move {
            let fields = RegistryMap::from([("by".to_owned(), Bytes::from(number.to_string()))]);
            TestResult::Ok((backend.map_create(&name, &fields).await?, fields))
        })
    });
    let mut winners = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        let (created, fields) = task.await??;
        if created {
            winners.push(fields);
        }
    }
    let [winner] = &winners[..] else { panic!("expected one winner, found {winners:?}") };
    assert_eq!(env.second.map_get(&name).await?.as_ref(), Some(winner));
    Ok(())
}

pub async fn an_update_writes_its_fields_and_keeps_the_others(env: StreamTestEnv) -> TestResult {
    let name = env.map("topic");
    env.second.map_create(&name, &map([("a", "1"), ("b", "2")])).await?;

    assert!(env.backend.map_update(&name, None, &map([("b", "3"), ("c", "4")])).await?);

    let expected = map([("a", "1"), ("b", "3"), ("c", "4")]);
    assert_eq!(env.second.map_get(&name).await?, Some(expected));
    Ok(())
}

pub async fn a_conditional_update_applies_only_if_the_condition_holds(
    env: StreamTestEnv,
) -> TestResult {
    let name = env.map("topic");
    env.second.map_create(&name, &map([("version", "1"), ("x", "0"), ("empty", "")])).await?;
    let update = async |field: &str, value: &str, fields: RegistryMap| {
        env.backend.map_update(&name, Some((field, value.as_bytes())), &fields).await
    };

    assert!(!update("version", "2", map([("x", "1")])).await?, "another value");
    assert!(!update("missing", "", map([("x", "1")])).await?, "a field that is not there");
    assert!(!update("version", "", map([("x", "1")])).await?, "no value");
    assert_eq!(env.second.map_get(&name).await?.expect("it exists")["x"], "0");

    assert!(update("empty", "", map([("x", "1")])).await?, "an empty value is a value");
    assert!(update("version", "1", map([("x", "2"), ("version", "2")])).await?);
    let expected = map([("version", "2"), ("x", "2"), ("empty", "")]);
    assert_eq!(env.second.map_get(&name).await?, Some(expected));
    Ok(())
}

pub async fn one_of_16_concurrent_conditional_updates_applies(env: StreamTestEnv) -> TestResult {
    let name = env.map("topic");
    env.second.map_create(&name, &map([("version", "1")])).await?;
    let tasks = (0..16).map(|number: usize| {
        let backend = if number.is_multiple_of(2) { &env.backend } else { &env.second };
        let (backend, name) = (Arc::clone(backend), name.clone());
        tokio::spawn(async move {
            let version = Bytes::from(format!("2 by {number}"));
            let fields = RegistryMap::from([("version".to_owned(), version)]);
            backend.map_update(&name, Some(("version", b"1")), &fields).await
        })
    });
    let mut updated = 0;
    for task in tasks.collect::<Vec<_>>() {
        updated += usize::from(task.await??);
    }
    assert_eq!(updated, 1, "one update met its expectation");
    Ok(())
}

pub async fn a_missing_map_is_not_updated(env: StreamTestEnv) -> TestResult {
    let name = env.map("topic");
    assert!(!env.backend.map_update(&name, None, &map([("a", "1")])).await?);
    assert!(!env.backend.map_update(&name, Some(("a", b"1")), &map([("a", "1")])).await?);
    assert_eq!(env.second.map_get(&name).await?, None);
    Ok(())
}

pub async fn a_deleted_map_does_not_exist(env: StreamTestEnv) -> TestResult {
    let name = env.map("topic");
    env.second.map_create(&name, &map([("a", "1")])).await?;

    let deleted = env.backend.map_delete(&name).await?;

    assert!(deleted || env.is_faulty(), "there was one");
    assert!(!env.backend.map_delete(&name).await?, "now it does not exist");
    assert_eq!(env.second.map_get(&name).await?, None);
    assert!(env.second.map_create(&name, &map([("b", "2")])).await?, "it can be created again");
    Ok(())
}

pub async fn map_values_are_preserved_byte_for_byte(env: StreamTestEnv) -> TestResult {
    let name = env.map("topic");
    let all: Bytes = (0..=u8::MAX).collect();
    let fields = RegistryMap::from([
        ("bytes".to_owned(), all),
        ("empty".to_owned(), Bytes::new()),
        (String::new(), Bytes::from_static(b"no name")),
        ("键 {x}\n".to_owned(), Bytes::from_static(b"odd name")),
    ]);
    env.backend.map_create(&name, &fields).await?;
    assert_eq!(env.second.map_get(&name).await?, Some(fields));
    Ok(())
}

pub async fn set_add_and_remove_return_how_many_members_changed(env: StreamTestEnv) -> TestResult {
    let set = env.set("topics");
    assert_eq!(env.backend.set_add(&set, &["b", "a", "b"], None).await?, 2);
    assert_eq!(env.backend.set_add(&set, &["a", "c"], None).await?, 1);
    assert_eq!(env.backend.set_members(&set).await?, ["a", "b", "c"], "sorted");
    assert_eq!(env.backend.set_remove(&set, &["b", "z", "b"]).await?, 1);
    assert_eq!(env.backend.set_members(&set).await?, ["a", "c"]);
    Ok(())
}

pub async fn a_set_contains_added_and_not_removed_members(env: StreamTestEnv) -> TestResult {
    let set = env.set("topics");
    env.backend.set_add(&set, &["d", "b", "a", "c", "", "键"], None).await?;
    env.backend.set_remove(&set, &["c", "x"]).await?;
    assert_eq!(env.second.set_members(&set).await?, ["", "a", "b", "d", "键"]);
    Ok(())
}

pub async fn membership_is_returned_in_request_order(env: StreamTestEnv) -> TestResult {
    let set = env.set("topics");
    assert_eq!(env.backend.set_contains(&set, &["a"]).await?, [false], "a missing set");
    env.second.set_add(&set, &["a", "b"], None).await?;
    let found = env.backend.set_contains(&set, &["x", "b", "a", "b"]).await?;
    assert_eq!(found, [false, true, true, true]);
    assert!(env.backend.set_contains(&set, &[]).await?.is_empty());
    Ok(())
}

pub async fn a_missing_set_is_empty(env: StreamTestEnv) -> TestResult {
    let set = env.set("topics");
    assert_eq!(env.backend.set_members(&set).await?, [""; 0]);
    assert_eq!(env.backend.set_remove(&set, &["a"]).await?, 0);
    assert_eq!(env.backend.set_add(&set, &[], None).await?, 0);
    assert_eq!(env.backend.set_remove(&set, &[]).await?, 0);
    Ok(())
}

pub async fn the_name_of_an_empty_set_is_free(env: StreamTestEnv) -> TestResult {
    let set = env.set("topics");
    env.second.set_add(&set, &["a"], None).await?;
    env.backend.set_remove(&set, &["a"]).await?;
    let name = headwater_stream::MapName::new(set.as_str())?;
    assert!(env.second.map_create(&name, &map([("a", "1")])).await?, "another kind may use it");
    Ok(())
}

pub async fn a_set_expires_after_the_ttl_of_the_last_add(env: StreamTestEnv) -> TestResult {
    let [short, prolonged, kept] = [env.set("short"), env.set("prolonged"), env.set("kept")];
    for set in [&short, &prolonged] {
        env.backend.set_add(set, &["a"], Some(ms(150))).await?;
    }
    env.backend.set_add(&prolonged, &["b"], Some(HOUR)).await?;
    env.backend.set_add(&kept, &["a"], None).await?;

    sleep_ms(250).await;

    assert_eq!(env.second.set_members(&short).await?, [""; 0], "its time ran out");
    assert_eq!(env.second.set_contains(&short, &["a"]).await?, [false]);
    // On a slow machine the first member may expire before the second is added.
    assert!(env.second.set_members(&prolonged).await?.contains(&"b".to_owned()));
    assert_eq!(env.second.set_members(&kept).await?, ["a"], "no time was set");
    Ok(())
}
