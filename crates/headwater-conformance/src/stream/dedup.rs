//! Deduplication: in progress for a short time, done for a long one.

use std::sync::Arc;

use bytes::Bytes;
use headwater_stream::DedupStatus::{Done, InProgress, New};

use super::env::StreamTestEnv;
use super::steps::{HOUR, ms, sleep_ms};
use crate::failure::TestResult;

fn value(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

pub async fn an_id_is_fresh_then_in_progress_then_done(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    assert_eq!(env.backend.dedup_begin(&scope, &["m1"], HOUR).await?, [New]);
    assert_eq!(env.second.dedup_begin(&scope, &["m1"], HOUR).await?, [InProgress]);
    env.backend.dedup_finish(&scope, &[("m1", value("result"))], HOUR).await?;
    for backend in [&env.backend, &env.second] {
        let found = backend.dedup_begin(&scope, &["m1"], HOUR).await?;
        assert_eq!(found, [Done(value("result"))]);
    }
    Ok(())
}

pub async fn dedup_results_are_in_request_order(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    env.second.dedup_begin(&scope, &["busy"], HOUR).await?;
    env.second.dedup_finish(&scope, &[("done", value("1")), ("empty", value(""))], HOUR).await?;

    let found =
        env.backend.dedup_begin(&scope, &["new", "empty", "busy", "done", "other"], HOUR).await?;

    assert_eq!(found, [New, Done(value("")), InProgress, Done(value("1")), New]);
    Ok(())
}

pub async fn an_id_given_twice_is_fresh_once(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    let found = env.backend.dedup_begin(&scope, &["m1", "m2", "m1"], HOUR).await?;
    assert_eq!(found, [New, New, InProgress]);
    Ok(())
}

pub async fn one_of_32_concurrent_callers_gets_the_fresh_id(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    let tasks = (0..32).map(|number| {
        let backend = if number % 2 == 0 { &env.backend } else { &env.second };
        let (backend, scope) = (Arc::clone(backend), scope.clone());
        tokio::spawn(async move { backend.dedup_begin(&scope, &["m1"], HOUR).await })
    });
    let mut fresh = 0;
    for task in tasks.collect::<Vec<_>>() {
        fresh += usize::from(task.await?? == [New]);
    }
    assert_eq!(fresh, 1, "one caller handles it");
    Ok(())
}

pub async fn an_in_progress_record_expires(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    env.backend.dedup_begin(&scope, &["m1"], ms(80)).await?;
    sleep_ms(160).await;
    assert_eq!(env.second.dedup_begin(&scope, &["m1"], HOUR).await?, [New]);
    Ok(())
}

pub async fn asking_again_does_not_extend_an_in_progress_record(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    env.second.dedup_begin(&scope, &["m1"], ms(5_000)).await?;
    env.backend.dedup_begin(&scope, &["m1"], HOUR).await?;
    sleep_ms(5_200).await;
    let found = env.second.dedup_begin(&scope, &["m1"], HOUR).await?;
    assert_eq!(found, [New], "the record of a dead caller expires, however often others ask");
    Ok(())
}

pub async fn a_done_record_expires(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    env.backend.dedup_finish(&scope, &[("m1", value("1"))], ms(80)).await?;
    sleep_ms(160).await;
    assert_eq!(env.second.dedup_begin(&scope, &["m1"], HOUR).await?, [New]);
    Ok(())
}

pub async fn a_done_record_outlives_its_in_progress_ttl(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    env.backend.dedup_begin(&scope, &["m1"], ms(80)).await?;
    env.backend.dedup_finish(&scope, &[("m1", value("1"))], HOUR).await?;
    sleep_ms(160).await;
    assert_eq!(env.second.dedup_begin(&scope, &["m1"], HOUR).await?, [Done(value("1"))]);
    Ok(())
}

pub async fn an_abandoned_id_is_fresh_at_once(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    env.second.dedup_begin(&scope, &["m1", "m2"], HOUR).await?;
    env.backend.dedup_abandon(&scope, &["m1", "unknown"]).await?;
    assert_eq!(env.second.dedup_begin(&scope, &["m1", "m2"], HOUR).await?, [New, InProgress]);
    Ok(())
}

pub async fn abandoning_a_done_id_changes_nothing(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    for text in ["result", ""] {
        env.second.dedup_finish(&scope, &[("m1", value(text))], HOUR).await?;
        env.backend.dedup_abandon(&scope, &["m1"]).await?;
        assert_eq!(env.second.dedup_begin(&scope, &["m1"], HOUR).await?, [Done(value(text))]);
    }
    Ok(())
}

pub async fn an_id_can_be_finished_without_having_begun(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    env.backend.dedup_finish(&scope, &[("m1", value("1"))], HOUR).await?;
    assert_eq!(env.second.dedup_begin(&scope, &["m1"], HOUR).await?, [Done(value("1"))]);
    Ok(())
}

pub async fn values_and_ids_are_preserved_byte_for_byte(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    let all: Bytes = (0..=u8::MAX).collect();
    let done = [("m1", all.clone()), ("键 {x}:\n", value("odd id")), ("m1:", value("no prefix"))];
    env.backend.dedup_finish(&scope, &done, HOUR).await?;
    let found = env.backend.dedup_begin(&scope, &["m1:", "m1", "键 {x}:\n"], HOUR).await?;
    assert_eq!(found, [Done(value("no prefix")), Done(all), Done(value("odd id"))]);
    Ok(())
}

pub async fn scopes_are_independent(env: StreamTestEnv) -> TestResult {
    let [a, b] = [env.scope("a"), env.scope("a:b")];
    env.second.dedup_finish(&a, &[("b:m1", value("1")), ("m1", value("2"))], HOUR).await?;
    let found = env.backend.dedup_begin(&b, &["m1"], HOUR).await?;
    assert!(found == [New] || (env.is_faulty() && found == [InProgress]), "found {found:?}");
    Ok(())
}

pub async fn no_ids_do_nothing(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    assert_eq!(env.backend.dedup_begin(&scope, &[], HOUR).await?, []);
    env.backend.dedup_finish(&scope, &[], HOUR).await?;
    env.backend.dedup_abandon(&scope, &[]).await?;
    Ok(())
}

pub async fn a_thousand_ids_are_begun_in_one_call(env: StreamTestEnv) -> TestResult {
    let scope = env.scope("mail");
    let names: Vec<String> = (0..1000).map(|number| number.to_string()).collect();
    let ids: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(env.backend.dedup_begin(&scope, &ids, HOUR).await?, vec![New; 1000]);
    let done: Vec<(&str, Bytes)> =
        ids.iter().map(|id| (*id, Bytes::from((*id).to_owned()))).collect();
    env.backend.dedup_finish(&scope, &done, HOUR).await?;
    let expected: Vec<_> = done.into_iter().map(|(_, value)| Done(value)).collect();
    assert_eq!(env.second.dedup_begin(&scope, &ids, HOUR).await?, expected);
    Ok(())
}
