//! Append once: each id is appended one time, however often a call is retried.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use headwater_stream::limits::{BATCH_MAX, ENTRY_BYTES_MAX, FIELDS_MAX};
use headwater_stream::{
    AppendedEntry, Backend, EntryId, Fields, IdempotentEntry, Result, Retention, SettleAction,
    StreamName, TrimGuard,
};

use super::env::StreamTestEnv;
use super::steps::{HOUR, contents, fields_in, ms, numbered, numbers, sleep_ms};
use crate::failure::TestResult;

const KEEP: &Retention = &Retention::KEEP_ALL;
/// TTL for bulk ids: a server full of expired keys reports other expirations late.
const SHORT: Duration = Duration::from_secs(10);

fn once(id: &str, number: usize) -> IdempotentEntry {
    IdempotentEntry { id: id.to_owned(), fields: numbered(number) }
}

async fn append(
    backend: &dyn Backend,
    stream: &StreamName,
    entries: &[IdempotentEntry],
) -> Result<Vec<AppendedEntry>> {
    backend.append_once(stream, entries, HOUR, KEEP).await
}

fn ids(appended: &[AppendedEntry]) -> Vec<EntryId> {
    appended.iter().map(|one| one.id).collect()
}

/// On a faulty network, a retried call may find its own first attempt.
fn assert_duplicates(env: &StreamTestEnv, appended: &[AppendedEntry], expected: &[bool]) {
    let found: Vec<bool> = appended.iter().map(|one| one.duplicate).collect();
    for (found, expected) in found.iter().zip(expected) {
        assert!(found == expected || (env.is_faulty() && *found), "{appended:?}");
    }
    assert_eq!(found.len(), expected.len());
}

pub async fn a_new_id_is_appended_and_a_duplicate_is_not(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let first = append(&*env.backend, &stream, &[once("a", 1), once("b", 2)]).await?;
    assert_duplicates(&env, &first, &[false, false]);
    assert!(first[0].id < first[1].id, "in order: {first:?}");

    let second = append(&*env.second, &stream, &[once("c", 3), once("a", 4)]).await?;

    assert_eq!(
        second[1],
        AppendedEntry { id: first[0].id, duplicate: true },
        "the first one counts"
    );
    assert!(!second[0].duplicate && second[0].id > first[1].id);
    let found = fields_in(&*env.second, &stream).await?;
    assert_eq!(found, [numbered(1), numbered(2), numbered(3)]);
    Ok(())
}

pub async fn an_id_given_twice_in_one_call_is_appended_once(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let entries = [once("a", 1), once("b", 2), once("a", 3), once("a", 4), once("b", 5)];
    let appended = append(&*env.backend, &stream, &entries).await?;
    assert_duplicates(&env, &appended, &[false, false, true, true, true]);
    let found = ids(&appended);
    assert_eq!(found, [found[0], found[1], found[0], found[0], found[1]]);
    assert_eq!(fields_in(&*env.second, &stream).await?, [numbered(1), numbered(2)]);
    Ok(())
}

pub async fn retrying_a_whole_call_changes_nothing(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let entries: Vec<IdempotentEntry> =
        (0..100).map(|number| once(&format!("id-{number}"), number)).collect();
    let first = append(&*env.second, &stream, &entries).await?;
    for _ in 0..3 {
        let again = append(&*env.backend, &stream, &entries).await?;
        assert_eq!(ids(&again), ids(&first));
        assert_duplicates(&env, &again, &[true; 100]);
    }
    let found = contents(&*env.second, &stream).await?;
    assert_eq!(found.iter().map(|entry| entry.id).collect::<Vec<_>>(), ids(&first));
    assert_eq!(fields_in(&*env.second, &stream).await?, numbers(100));
    Ok(())
}

pub async fn one_of_32_concurrent_appends_of_an_id_succeeds(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let tasks = (0..32).map(|number| {
        let backend = if number % 2 == 0 { &env.backend } else { &env.second };
        let (backend, stream) = (Arc::clone(backend), stream.clone());
        tokio::spawn(async move { append(&*backend, &stream, &[once("a", number)]).await })
    });
    let mut answers = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        answers.extend(task.await??);
    }
    let found = contents(&*env.second, &stream).await?;
    assert_eq!(found.len(), 1, "found {found:?}");
    assert!(answers.iter().all(|answer| answer.id == found[0].id), "found {answers:?}");
    let new = answers.iter().filter(|answer| !answer.duplicate).count();
    assert!(new == 1 || (env.is_faulty() && new == 0), "{new} calls appended it");
    Ok(())
}

pub async fn overlapping_concurrent_batches_append_each_id_once(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let tasks = (0..16).map(|task| {
        let backend = if task % 2 == 0 { &env.backend } else { &env.second };
        let (backend, stream) = (Arc::clone(backend), stream.clone());
        tokio::spawn(async move {
            let entries: Vec<IdempotentEntry> =
                (task..task + 20).map(|number| once(&format!("id-{number}"), number)).collect();
            let appended = append(&*backend, &stream, &entries).await?;
            let ids = entries.into_iter().map(|entry| entry.id).zip(ids(&appended));
            Ok::<_, headwater_stream::StreamError>(ids.collect::<Vec<_>>())
        })
    });
    let mut places = BTreeMap::new();
    for task in tasks.collect::<Vec<_>>() {
        for (id, place) in task.await?? {
            assert_eq!(*places.entry(id.clone()).or_insert(place), place, "{id}");
        }
    }
    let found = contents(&*env.second, &stream).await?;
    assert_eq!(found.len(), 35, "found {found:?}");
    Ok(())
}

pub async fn an_expired_id_is_new_again(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let short = env.second.append_once(&stream, &[once("a", 1)], ms(80), KEEP).await?;
    append(&*env.second, &stream, &[once("b", 2)]).await?;
    sleep_ms(160).await;
    assert_eq!(env.backend.appended(&stream, &["a"]).await?, [None]);
    let again = append(&*env.backend, &stream, &[once("a", 3), once("b", 4)]).await?;
    assert!(again[0].id > short[0].id, "found {again:?}");
    assert!(again[1].duplicate, "each id has a time of its own");
    let found = fields_in(&*env.second, &stream).await?;
    assert_eq!(found, [numbered(1), numbered(2), numbered(3)]);
    Ok(())
}

pub async fn a_duplicate_does_not_extend_the_expiration_of_an_id(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    env.second.append_once(&stream, &[once("a", 1)], ms(5_000), KEEP).await?;
    append(&*env.backend, &stream, &[once("a", 2)]).await?;
    sleep_ms(5_200).await;
    assert_eq!(env.second.appended(&stream, &["a"]).await?, [None]);
    Ok(())
}

pub async fn the_entry_of_an_id_can_be_looked_up_without_appending(
    env: StreamTestEnv,
) -> TestResult {
    let stream = env.stream("orders");
    assert_eq!(env.backend.appended(&stream, &["a", "b"]).await?, [None, None]);
    assert_eq!(env.second.stats(&stream).await?, None, "no stream was created");
    let appended = append(&*env.second, &stream, &[once("a", 1), once("c", 2)]).await?;

    let found = env.backend.appended(&stream, &["c", "b", "a", "c"]).await?;

    let [a, c] = [appended[0].id, appended[1].id];
    assert_eq!(found, [Some(c), None, Some(a), Some(c)]);
    assert_eq!(env.backend.appended(&stream, &[]).await?, []);
    Ok(())
}

pub async fn an_id_is_remembered_after_its_entry_was_deleted(env: StreamTestEnv) -> TestResult {
    let (flow, _) = env.flow_with_pending(1).await?;
    let stream = flow.stream.clone();
    let entries = ["deleted", "trimmed", "settled"].map(|id| once(id, 1));
    let first = append(&*env.second, &stream, &entries).await?;
    flow.deliver("ann", 3).await?;
    env.second.delete_entries(&stream, &[first[0].id]).await?;
    flow.settle_one("ann", first[2].id, SettleAction::Delete).await?;
    env.second.trim(&stream, &Retention::max_len(0), TrimGuard::Force).await?;

    let again = append(&*env.backend, &stream, &entries).await?;

    assert_eq!(ids(&again), ids(&first));
    assert_eq!(contents(&*env.second, &stream).await?, []);
    env.second.delete_stream(&stream).await?;
    let again = append(&*env.backend, &stream, &entries).await?;
    assert_eq!(ids(&again), ids(&first), "also when the stream is gone");
    assert_eq!(env.second.stats(&stream).await?, None);
    Ok(())
}

pub async fn ids_of_different_streams_and_scopes_are_independent(env: StreamTestEnv) -> TestResult {
    let [one, two] = [env.stream("a"), env.stream("a:b")];
    let elsewhere = env.stream_elsewhere("a");
    append(&*env.second, &one, &[once("b:x", 1), once("x", 2)]).await?;
    env.second.dedup_begin(&env.scope("a"), &["x"], HOUR).await?;
    for stream in [&two, &elsewhere] {
        assert_eq!(env.backend.appended(stream, &["x"]).await?, [None]);
        let found = append(&*env.backend, stream, &[once("x", 3)]).await?;
        assert_duplicates(&env, &found, &[false]);
        assert_eq!(fields_in(&*env.second, stream).await?, [numbered(3)]);
    }
    Ok(())
}

pub async fn ids_and_fields_are_preserved_byte_for_byte(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let odd = ["键 {x}:\n", "a\0b", "{", "}", "1-2", " "];
    let all: Bytes = (0..=u8::MAX).collect();
    let large = vec![7_u8; ENTRY_BYTES_MAX - 1];
    let mut fields = vec![Fields::new([(all.clone(), all), ("".into(), "".into())])];
    fields.push(Fields::new((0..FIELDS_MAX).map(|field| (format!("f{field}"), "x"))));
    fields.push(Fields::new([("p", large)]));
    fields.extend(numbers(3));
    let entry = |(id, fields): (&&str, &Fields)| IdempotentEntry {
        id: (*id).to_owned(),
        fields: fields.clone(),
    };
    let entries: Vec<IdempotentEntry> = odd.iter().zip(&fields).map(entry).collect();

    let first = append(&*env.backend, &stream, &entries).await?;

    assert!(fields_in(&*env.second, &stream).await? == fields, "expected the fields unchanged");
    let found = env.second.appended(&stream, &odd).await?;
    assert_eq!(found, first.iter().map(|one| Some(one.id)).collect::<Vec<_>>());
    Ok(())
}

pub async fn the_maximum_batch_is_appended_once(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let half = BATCH_MAX / 2;
    let entry = |number: usize| once(&(number % half).to_string(), number);
    let entries: Vec<IdempotentEntry> = (0..BATCH_MAX).map(entry).collect();
    let appended = env.backend.append_once(&stream, &entries, SHORT, KEEP).await?;
    let found = ids(&appended);
    assert_eq!(found[..half], found[half..]);
    assert_eq!(fields_in(&*env.second, &stream).await?, numbers(half));
    Ok(())
}

pub async fn an_empty_append_once_does_nothing(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    assert_eq!(append(&*env.backend, &stream, &[]).await?, []);
    assert_eq!(env.second.stats(&stream).await?, None, "no stream was created");
    Ok(())
}

pub async fn retention_trims_entries_appended_once(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let retention = Retention::max_len(10);
    let mut first = None;
    for round in 0..60 {
        let entries: Vec<IdempotentEntry> =
            (0..20).map(|number| once(&format!("{round}-{number}"), number)).collect();
        let keep = if round == 0 { HOUR } else { SHORT };
        let appended = env.backend.append_once(&stream, &entries, keep, &retention).await?;
        first = first.or(Some(appended[0].id));
    }
    let found = contents(&*env.second, &stream).await?.len();
    assert!((10..400).contains(&found), "expected about 10 of 1200 entries, found {found}");
    assert_eq!(env.second.appended(&stream, &["0-0"]).await?, [first]);
    Ok(())
}

pub async fn entries_appended_once_are_delivered_normally(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let mut reader = env.second.reader(&flow.group, &super::env::consumer("ann")).await?;
    let streams = [flow.stream.clone()];
    let reading = super::steps::soon(
        "the waiting reader to be woken",
        reader.read(&streams, 10, Duration::from_secs(20)),
    );
    let appending = async {
        sleep_ms(50).await;
        append(&*env.backend, &flow.stream, &[once("a", 1)]).await
    };
    let (read, appended) = tokio::join!(reading, appending);
    assert_eq!(read?[0].entries[0].id, appended?[0].id);
    Ok(())
}
