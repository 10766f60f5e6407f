//! What is put into the input, well formed or not.

use headwater_assignment::{AssignmentConfig, ClaimError, add};
use headwater_stream::limits::FIELDS_MAX;
use headwater_stream::{Fields, Retention, StreamError, StreamName};

use crate::place::{Place, QUIET, eventually, quick};

everywhere!(
    two_consumers_get_one_of_two_streams_each,
    what_was_added_before_anybody_listened_is_taken,
    the_info_is_echoed_as_it_was_written,
    keys_in_any_case_are_read,
    malformed_entries_go_to_the_dead_letters_and_stop_nobody,
    a_malformed_entry_of_a_dead_reader_is_buried_too,
    the_cap_holds_and_a_freed_place_is_filled,
    a_stream_that_was_added_twice_has_one_owner_at_a_time,
    a_producer_is_told_what_it_did_wrong,
);

async fn two_consumers_get_one_of_two_streams_each(place: &Place) {
    let config = AssignmentConfig { streams_max: 1, ..quick() };
    let mut first = place.consumer("first", config.clone()).await;
    let mut second = place.consumer("second", config).await;
    let streams = place.add(&["a", "b"]).await;

    let owned = [first.added().await, second.added().await];

    let mut names: Vec<_> = owned.iter().map(|owned| owned.stream().clone()).collect();
    names.sort();
    assert_eq!(names, streams);
    first.assignment.done(&owned[0]).await.unwrap();
    second.assignment.done(&owned[1]).await.unwrap();
    assert_eq!((place.pending().await, place.entries(&place.input()).await), (vec![], vec![]));
}

async fn what_was_added_before_anybody_listened_is_taken(place: &Place) {
    let stream = place.add(&["early"]).await.remove(0);
    let mut consumer = place.consumer("c", quick()).await;
    assert_eq!(consumer.added().await.stream(), &stream);
}

async fn the_info_is_echoed_as_it_was_written(place: &Place) {
    let mut consumer = place.consumer("c", quick()).await;
    let info = r#"{"tenant": "a b",  "limits": [1, 2.50], "键": null}"#;
    consumer.assignment.add(&place.stream("with"), Some(info)).await.unwrap();
    assert_eq!(consumer.added().await.info(), Some(info));
    consumer.assignment.add(&place.stream("without"), None).await.unwrap();
    assert_eq!(consumer.added().await.info(), None);
}

async fn keys_in_any_case_are_read(place: &Place) {
    let mut consumer = place.consumer("c", quick()).await;
    let stream = place.stream("s");
    let json = format!(r#"{{"dataStreamNAME": "{stream}", "info": {{"a": 1}}}}"#);
    append(place, Fields::new([("lbs-input", json)])).await;
    let owned = consumer.added().await;
    assert_eq!((owned.stream(), owned.info()), (&stream, Some(r#"{"a": 1}"#)));
}

async fn malformed_entries_go_to_the_dead_letters_and_stop_nobody(place: &Place) {
    let bad = malformed();
    let mut consumer = place.consumer("c", quick()).await;
    place.add(&["before"]).await;
    for fields in &bad {
        append(place, fields.clone()).await;
    }
    place.add(&["after"]).await;

    consumer.added_many(2).await;
    eventually("all dead letters", || async { place.dead_letters().await.len() == bad.len() })
        .await;

    for (letter, fields) in place.dead_letters().await.iter().zip(&bad) {
        let ours = ["reason", "originalMessageId"];
        let kept: Vec<_> = letter.fields.iter().take(letter.fields.len() - ours.len()).collect();
        if fields.len() < FIELDS_MAX {
            assert_eq!(kept, fields.iter().collect::<Vec<_>>(), "the bytes are intact");
        } else {
            // Too large to be moved: it stays where it is, and the letter says where.
            let id = letter.fields.get("originalMessageId").unwrap();
            let entries = place.entries(&place.input()).await;
            let original = entries.iter().find(|entry| entry.id.to_string().as_bytes() == id);
            assert_eq!(&original.unwrap().fields, fields);
        }
        for name in ours {
            assert!(!letter.fields.get(name).unwrap().is_empty());
        }
    }
    assert_eq!(place.pending().await.len(), 2);
    consumer.hears_nothing_for(QUIET).await;
}

async fn a_malformed_entry_of_a_dead_reader_is_buried_too(place: &Place) {
    let backend = place.connect().await;
    let start = headwater_stream::GroupStart::Beginning;
    backend.ensure_group(&place.input(), &place.group(), start).await.unwrap();
    append(place, Fields::new([("lbs-input", "{")])).await;
    place.read_and_die().await;

    let mut consumer = place.consumer("c", quick()).await;
    eventually("the dead letter", || async { place.dead_letters().await.len() == 1 }).await;

    assert_eq!(place.dead_letters().await[0].fields.get("lbs-input").unwrap(), "{");
    assert_eq!((place.pending().await, place.entries(&place.input()).await), (vec![], vec![]));
    consumer.hears_nothing_for(QUIET).await;
}

async fn the_cap_holds_and_a_freed_place_is_filled(place: &Place) {
    let config = AssignmentConfig { streams_max: 2, ..quick() };
    let mut consumer = place.consumer("c", config.clone()).await;
    place.add(&["a", "b", "c", "d"]).await;
    let first = consumer.added().await;
    consumer.added().await;
    consumer.hears_nothing_for(QUIET).await;
    assert_eq!(place.pending().await.len(), 2, "no more is read than there is room for");

    consumer.assignment.done(&first).await.unwrap();
    consumer.added().await;
    consumer.hears_nothing_for(QUIET).await;

    // A claim by hand needs room as well.
    place.read_and_die().await;
    let lost = consumer.expired().await;
    match consumer.assignment.claim(&lost).await {
        Err(ClaimError::AtCapacity { streams_max }) => assert_eq!(streams_max, 2),
        other => panic!("{other:?}"),
    }
}

async fn a_stream_that_was_added_twice_has_one_owner_at_a_time(place: &Place) {
    let mut first = place.consumer("first", quick()).await;
    let mut second = place.consumer("second", quick()).await;
    let stream = place.add(&["s", "s"]).await.remove(0);
    let (first, second, owned) = tokio::select! {
        owned = first.added() => (&mut first, &mut second, owned),
        owned = second.added() => (&mut second, &mut first, owned),
    };
    first.hears_nothing_for(quick().lease_ttl()).await;
    second.hears_nothing_for(QUIET).await;
    assert_eq!(place.pending().await.len(), 2);

    // When it is done, then it begins anew, for whoever is first.
    first.assignment.done(&owned).await.unwrap();
    let (owner, again) = tokio::select! {
        again = first.added() => (first, again),
        again = second.added() => (second, again),
    };
    assert_eq!((again.stream(), again.owners()), (&stream, 1));
    assert!(again.epoch() > owned.epoch());
    owner.assignment.done(&again).await.unwrap();
    assert_eq!((place.pending().await, place.entries(&place.input()).await), (vec![], vec![]));
}

async fn a_producer_is_told_what_it_did_wrong(place: &Place) {
    let backend = place.connect().await;
    let long = StreamName::new("x".repeat(510)).unwrap();
    for (stream, info) in [(&place.stream("s"), Some("{not json")), (&long, None)] {
        let added = add(&*backend, &place.service, stream, info).await;
        assert!(matches!(added, Err(StreamError::Invalid { .. })), "{added:?}");
    }
    assert_eq!(place.entries(&place.input()).await, []);
}

fn malformed() -> Vec<Fields> {
    vec![
        Fields::new([("lbs-input", "not json")]),
        Fields::new([("lbs-input", "{}")]),
        Fields::new([("lbs-input", r#"{"DataStreamName": 7}"#)]),
        Fields::new([("lbs-input", r#"{"DataStreamName": "a\u0000b"}"#)]),
        Fields::new([("other", "field"), ("and", "another")]),
        Fields::new([("lbs-input", &b"\xff\xfe"[..]), ("reason", b"mine")]),
        Fields::new((0..FIELDS_MAX).map(|i| (format!("f{i}"), "v"))),
    ]
}

async fn append(place: &Place, fields: Fields) {
    let backend = place.connect().await;
    backend.append(&place.input(), &[fields], &Retention::KEEP_ALL).await.unwrap();
}
