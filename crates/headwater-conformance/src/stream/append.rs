//! Append: ascending ids and preserved bytes.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use headwater_stream::limits::{BATCH_MAX, ENTRY_BYTES_MAX, FIELDS_MAX};
use headwater_stream::{
    AppendRequest, Entry, EntryId, EntrySize, EntrySource, Fields, Range, Retention, SetName,
    StreamError, StreamName, TrimGuard,
};

use super::env::StreamTestEnv;
use super::steps::{contents, fields_in, numbered, numbers};
use crate::failure::TestResult;

const KEEP: &Retention = &Retention::KEEP_ALL;

/// Appends one entry and reads it back by its id.
async fn round_trip(env: &StreamTestEnv, fields: Fields) -> TestResult {
    let stream = env.stream("orders");
    let ids = env.backend.append(&stream, std::slice::from_ref(&fields), KEEP).await?;
    let [id] = ids[..] else { panic!("expected one id, found {ids:?}") };
    let found = env.second.range(&stream, Range { from: id, to: id, ..Range::first(2) }).await?;
    assert!(found == [Entry { id, fields }], "expected the entry unchanged, found {found:?}");
    Ok(())
}

pub async fn ids_are_ascending_within_a_call_and_across_calls(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let mut all = Vec::new();
    for count in [1, 3, 100, 1] {
        let ids = env.backend.append(&stream, &numbers(count), KEEP).await?;
        assert_eq!(ids.len(), count, "one id for each entry");
        all.extend(ids);
    }
    assert!(all.is_sorted_by(|a, b| a < b), "expected ascending ids, found {all:?}");
    Ok(())
}

pub async fn ids_are_ascending_across_two_connections(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let mut all = Vec::new();
    for _ in 0..10 {
        for backend in [&env.backend, &env.second] {
            all.extend(backend.append(&stream, &numbers(1), KEEP).await?);
        }
    }
    assert!(all.is_sorted_by(|a, b| a < b), "expected ascending ids, found {all:?}");
    Ok(())
}

pub async fn ids_stay_ascending_after_the_newest_entry_was_deleted(
    env: StreamTestEnv,
) -> TestResult {
    let stream = env.stream("orders");
    let ids = env.backend.append(&stream, &numbers(3), KEEP).await?;
    env.second.delete_entries(&stream, &ids).await?;

    let next = env.backend.append(&stream, &numbers(1), KEEP).await?;

    assert!(next[0] > ids[2], "expected an id after {}, found {}", ids[2], next[0]);
    Ok(())
}

pub async fn ids_stay_ascending_after_all_entries_were_deleted(env: StreamTestEnv) -> TestResult {
    let flow = env.flow().await?;
    let mut newest = EntryId::MIN;
    // Many rounds, so that some of them fall into one millisecond.
    for round in 0..60 {
        let ids = flow.append(20).await?;
        assert!(newest < ids[0], "round {round}: expected more than {newest}, found {}", ids[0]);
        newest = ids[19];
        if round % 2 == 0 {
            env.second.trim(&flow.stream, &Retention::max_len(0), TrimGuard::Force).await?;
        } else {
            env.second.delete_entries(&flow.stream, &ids).await?;
        }
        let next = env.backend.append(&flow.stream, &numbers(1), KEEP).await?[0];
        assert!(newest < next, "round {round}: expected more than {newest}, found {next}");
        newest = next;
        env.second.trim(&flow.stream, &Retention::max_len(0), TrimGuard::Force).await?;
    }
    Ok(())
}

pub async fn an_id_contains_the_time_of_the_backend_clock(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let before = env.second.now().await?.as_millis();
    let ids = env.backend.append(&stream, &numbers(1), KEEP).await?;
    let after = env.second.now().await?.as_millis();

    let found = ids[0].ms;
    assert!((before..=after).contains(&found), "expected {before} to {after}, found {found}");
    Ok(())
}

pub async fn a_batch_keeps_its_order(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let ids = env.backend.append(&stream, &numbers(500), KEEP).await?;

    let expected: Vec<Entry> =
        ids.into_iter().zip(numbers(500)).map(|(id, fields)| Entry { id, fields }).collect();
    assert_eq!(contents(&*env.second, &stream).await?, expected);
    Ok(())
}

pub async fn a_batch_of_the_maximum_size_is_appended(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let ids = env.backend.append(&stream, &numbers(BATCH_MAX), KEEP).await?;
    assert_eq!(ids.len(), BATCH_MAX, "one id for each entry");

    let found: std::collections::HashMap<EntryId, Fields> =
        contents(&*env.second, &stream).await?.into_iter().map(|e| (e.id, e.fields)).collect();
    for (number, id) in ids.iter().enumerate() {
        assert_eq!(found.get(id), Some(&numbered(number)), "the entry {id}");
    }
    Ok(())
}

pub async fn an_empty_batch_appends_nothing(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    assert_eq!(env.backend.append(&stream, &[], KEEP).await?, []);
    assert_eq!(env.second.stats(&stream).await?, None, "no stream was created");
    Ok(())
}

pub async fn every_byte_value_is_preserved_in_names_and_values(env: StreamTestEnv) -> TestResult {
    let bytes: Bytes = (0..=u8::MAX).collect();
    round_trip(&env, Fields::new([(bytes.clone(), bytes)])).await
}

pub async fn empty_names_and_values_are_preserved(env: StreamTestEnv) -> TestResult {
    round_trip(&env, Fields::new([("", ""), ("name", ""), ("", "value")])).await
}

pub async fn repeated_field_names_are_preserved_in_order(env: StreamTestEnv) -> TestResult {
    round_trip(&env, Fields::new([("a", "2"), ("b", "x"), ("a", "1"), ("a", "2")])).await
}

pub async fn the_maximum_number_of_fields_is_preserved(env: StreamTestEnv) -> TestResult {
    let fields = (0..FIELDS_MAX).map(|field| (format!("f{field}"), field.to_string()));
    round_trip(&env, Fields::new(fields)).await
}

pub async fn an_entry_of_the_maximum_size_is_preserved(env: StreamTestEnv) -> TestResult {
    let value: Vec<u8> = (0..ENTRY_BYTES_MAX - 1).map(|at| ((at * 31) >> 3) as u8).collect();
    round_trip(&env, Fields::new([(Bytes::from_static(b"p"), Bytes::from(value))])).await
}

pub async fn streams_are_independent(env: StreamTestEnv) -> TestResult {
    let streams = [env.stream("a"), env.stream("b"), env.stream_elsewhere("c")];
    for (number, stream) in streams.iter().enumerate() {
        env.second.append(stream, &[numbered(number)], KEEP).await?;
    }
    for (number, stream) in streams.iter().enumerate() {
        assert_eq!(fields_in(&*env.backend, stream).await?, [numbered(number)], "{stream}");
    }
    Ok(())
}

pub async fn entries_appended_by_64_concurrent_tasks_are_all_stored(
    env: StreamTestEnv,
) -> TestResult {
    const TASKS: usize = 64;
    const EACH: usize = 10;
    let stream = env.stream("orders");
    let tasks = (0..TASKS).map(|task| {
        let (backend, stream) = (Arc::clone(&env.backend), stream.clone());
        tokio::spawn(async move { append_one_by_one(&*backend, &stream, task * EACH, EACH).await })
    });
    let mut expected = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        let ids = task.await??;
        assert!(ids.is_sorted_by(|a, b| a.0 < b.0), "expected ascending ids, found {ids:?}");
        expected.extend(ids);
    }
    assert_eq!(expected.iter().map(|(id, _)| id).collect::<HashSet<_>>().len(), TASKS * EACH);
    expected.sort();

    let found = contents(&*env.second, &stream).await?;
    if !env.is_faulty() {
        assert_eq!(found.len(), TASKS * EACH, "nothing was duplicated");
    }
    let found: HashSet<(EntryId, String)> =
        found.into_iter().map(|entry| (entry.id, format!("{:?}", entry.fields))).collect();
    for (id, number) in expected {
        let entry = (id, format!("{:?}", numbered(number)));
        assert!(found.contains(&entry), "expected {entry:?} in the stream");
    }
    Ok(())
}

pub async fn appends_to_several_streams_are_independent(env: StreamTestEnv) -> TestResult {
    let streams: Vec<_> = (0..5).map(|number| env.stream(&format!("orders-{number}"))).collect();
    let (two, hundred, none) = (numbers(2), numbers(100), Vec::new());
    // The third name is not a stream, the fourth append is invalid, and the first stream is used again.
    env.backend.set_add(&SetName::new(streams[2].as_str())?, &["a set"], None).await?;
    let rejected = [Fields::new([("", ""); 0])];
    let keep_ten = Retention::max_len(10);
    let appends = [
        AppendRequest { stream: &streams[0], entries: &two, retention: KEEP },
        AppendRequest { stream: &streams[1], entries: &hundred, retention: &keep_ten },
        AppendRequest { stream: &streams[2], entries: &two, retention: KEEP },
        AppendRequest { stream: &streams[3], entries: &rejected, retention: KEEP },
        AppendRequest { stream: &streams[4], entries: &none, retention: KEEP },
        AppendRequest { stream: &streams[0], entries: &two, retention: KEEP },
    ];
    let results = env.backend.append_many(&appends).await;
    assert_eq!(results.len(), appends.len(), "one result for each append");
    let mut ids = Vec::new();
    for (number, result) in results.into_iter().enumerate() {
        match (number, result) {
            (2, Err(StreamError::WrongType { .. })) | (3, Err(StreamError::Invalid { .. })) => {}
            (0 | 1 | 4 | 5, Ok(found)) => {
                assert_eq!(found.len(), appends[number].entries.len(), "append {number}");
                ids.push(found);
            }
            (number, result) => panic!("append {number}: {result:?}"),
        }
    }
    let found = contents(&*env.second, &streams[0]).await?;
    // Each append keeps its order; which of the two comes first is not defined.
    let (first, last) = if ids[0] < ids[3] { (&ids[0], &ids[3]) } else { (&ids[3], &ids[0]) };
    if !env.is_faulty() {
        let found: Vec<EntryId> = found.iter().map(|entry| entry.id).collect();
        assert_eq!(found, [&first[..], last].concat());
    }
    let newest = env.second.range(&streams[1], Range::last(1)).await?;
    assert_eq!(newest[0].fields, hundred[99]);
    assert!(contents(&*env.second, &streams[3]).await?.is_empty());
    assert!(env.backend.append_many(&[]).await.is_empty());
    Ok(())
}

/// Lazily encoded entries, one of which may report that it is too large.
struct LazyEntries {
    count: usize,
    too_large: Option<usize>,
}

impl EntrySource for LazyEntries {
    fn len(&self) -> usize {
        self.count
    }

    fn size(&self, at: usize) -> EntrySize {
        let size = self.entry(at).size();
        let bytes = if self.too_large == Some(at) { ENTRY_BYTES_MAX + 1 } else { size.bytes };
        EntrySize { bytes, ..size }
    }

    fn entry(&self, at: usize) -> Cow<'_, Fields> {
        let padding = if self.too_large == Some(at) { ENTRY_BYTES_MAX } else { 400 };
        let fields = [("number", at.to_string()), ("padding", "x".repeat(padding))];
        Cow::Owned(Fields::new(fields))
    }
}

pub async fn entries_can_be_encoded_lazily(env: StreamTestEnv) -> TestResult {
    let stream = env.stream("orders");
    let made = LazyEntries { count: 500, too_large: None };
    let append = AppendRequest { stream: &stream, entries: &made, retention: KEEP };
    let ids = env.backend.append_many(&[append]).await.remove(0)?;
    let found = contents(&*env.second, &stream).await?;
    if !env.is_faulty() {
        let expected = ids.iter().zip(0..500);
        let expected: Vec<Entry> = expected
            .map(|(id, at)| Entry { id: *id, fields: made.entry(at).into_owned() })
            .collect();
        assert!(found == expected, "expected {} entries in order, found others", ids.len());
    }
    let before = found.len();
    let rejected = LazyEntries { count: 500, too_large: Some(499) };
    let append = AppendRequest { stream: &stream, entries: &rejected, retention: KEEP };
    let rejected = env.backend.append_many(&[append]).await.remove(0);
    assert!(matches!(rejected, Err(StreamError::Invalid { .. })), "found {rejected:?}");
    assert_eq!(
        contents(&*env.second, &stream).await?.len(),
        before,
        "a rejected append has no effect"
    );
    Ok(())
}

async fn append_one_by_one(
    backend: &dyn headwater_stream::Backend,
    stream: &StreamName,
    first: usize,
    count: usize,
) -> headwater_stream::Result<Vec<(EntryId, usize)>> {
    let mut ids = Vec::new();
    for number in first..first + count {
        let new = backend.append(stream, &[numbered(number)], KEEP).await?;
        ids.extend(new.into_iter().map(|id| (id, number)));
    }
    Ok(ids)
}
