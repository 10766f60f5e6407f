//! Input entries, well formed or not.

use headwater_assignment::{AssignmentConfig, ClaimError, add};
use headwater_stream::limits::FIELDS_MAX;
use headwater_stream::{Fields, Retention, StreamError, StreamName};

use crate::fixture::{QUIET, ServiceFixture, eventually, quick};

everywhere!(
    two_consumers_get_one_of_two_streams_each,
    a_stream_added_before_a_consumer_starts_is_acquired,
    info_is_passed_through_unchanged,
    keys_are_case_insensitive,
    malformed_entries_go_to_the_dead_letters_and_block_nothing,
    a_malformed_entry_of_a_dead_reader_is_dead_lettered_too,
    streams_max_holds_and_freed_capacity_is_used,
    a_stream_that_was_added_twice_has_one_owner_at_a_time,
    invalid_streams_and_info_are_rejected_with_a_reason,
    a_deleted_input_stream_does_not_come_back_until_a_stream_is_added,
);

async fn two_consumers_get_one_of_two_streams_each(fixture: &ServiceFixture) {
    let config = AssignmentConfig { streams_max: 1, ..quick() };
    let mut first = fixture.consumer("first", config.clone()).await;
    let mut second = fixture.consumer("second", config).await;
    let streams = fixture.add(&["a", "b"]).await;

    let owned = [first.added().await, second.added().await];

    let mut names: Vec<_> = owned.iter().map(|owned| owned.stream().clone()).collect();
    names.sort();
    assert_eq!(names, streams);
    first.assignment.done(&owned[0]).await.unwrap();
    second.assignment.done(&owned[1]).await.unwrap();
    assert_eq!(
        (fixture.pending().await, fixture.entries(&fixture.input()).await),
        (vec![], vec![])
    );
}

async fn a_stream_added_before_a_consumer_starts_is_acquired(fixture: &ServiceFixture) {
    let stream = fixture.add(&["early"]).await.remove(0);
    let mut consumer = fixture.consumer("c", quick()).await;
    assert_eq!(consumer.added().await.stream(), &stream);
}

async fn info_is_passed_through_unchanged(fixture: &ServiceFixture) {
    let mut consumer = fixture.consumer("c", quick()).await;
    let info = r#"{"tenant": "a b",  "limits": [1, 2.50], "键": null}"#;
    consumer.assignment.add(&fixture.stream("with"), Some(info)).await.unwrap();
    assert_eq!(consumer.added().await.info(), Some(info));
    consumer.assignment.add(&fixture.stream("without"), None).await.unwrap();
    assert_eq!(consumer.added().await.info(), None);
}

async fn a_deleted_input_stream_does_not_come_back_until_a_stream_is_added(
    fixture: &ServiceFixture,
) {
    let mut consumer = fixture.consumer("c", quick()).await;
    fixture.add(&["before"]).await;
    let owned = consumer.added().await;
    consumer.assignment.done(&owned).await.unwrap();

    let (backend, input) = (fixture.connect().await, fixture.input());
    assert!(backend.delete_stream(&input).await.unwrap());
    // Longer than the blocked read, several sweeps and a heartbeat.
    for _ in 0..60 {
        assert_eq!(backend.stats(&input).await.unwrap(), None);
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }

    let after = fixture.add(&["after"]).await.remove(0);
    assert_eq!(consumer.added().await.stream(), &after);
}

async fn keys_are_case_insensitive(fixture: &ServiceFixture) {
    let mut consumer = fixture.consumer("c", quick()).await;
    let stream = fixture.stream("s");
    let json = format!(r#"{{"dataStreamNAME": "{stream}", "info": {{"a": 1}}}}"#);
    append(fixture, Fields::new([("lbs-input", json)])).await;
    let owned = consumer.added().await;
    assert_eq!((owned.stream(), owned.info()), (&stream, Some(r#"{"a": 1}"#)));
}

async fn malformed_entries_go_to_the_dead_letters_and_block_nothing(fixture: &ServiceFixture) {
    let bad = malformed();
    let mut consumer = fixture.consumer("c", quick()).await;
    fixture.add(&["before"]).await;
    for fields in &bad {
        append(fixture, fields.clone()).await;
    }
    fixture.add(&["after"]).await;

    consumer.added_many(2).await;
    eventually("all dead letters", || async { fixture.dead_letters().await.len() == bad.len() })
        .await;

    for (letter, fields) in fixture.dead_letters().await.iter().zip(&bad) {
        let added_fields = ["reason", "originalMessageId"];
        let kept: Vec<_> =
            letter.fields.iter().take(letter.fields.len() - added_fields.len()).collect();
        if fields.len() < FIELDS_MAX {
            assert_eq!(kept, fields.iter().collect::<Vec<_>>(), "the bytes are unchanged");
        } else {
            // Too large to be moved: it stays in the input, and the letter refers to it.
            let id = letter.fields.get("originalMessageId").unwrap();
            let entries = fixture.entries(&fixture.input()).await;
            let original = entries.iter().find(|entry| entry.id.to_string().as_bytes() == id);
            assert_eq!(&original.unwrap().fields, fields);
        }
        for name in added_fields {
            assert!(!letter.fields.get(name).unwrap().is_empty());
        }
    }
    assert_eq!(fixture.pending().await.len(), 2);
    consumer.expect_no_notification_for(QUIET).await;
}

async fn a_malformed_entry_of_a_dead_reader_is_dead_lettered_too(fixture: &ServiceFixture) {
    let backend = fixture.connect().await;
    let start = headwater_stream::GroupStart::Beginning;
    backend.ensure_group(&fixture.input(), &fixture.group(), start).await.unwrap();
    append(fixture, Fields::new([("lbs-input", "{")])).await;
    fixture.read_and_die().await;

    let mut consumer = fixture.consumer("c", quick()).await;
    eventually("the dead letter", || async { fixture.dead_letters().await.len() == 1 }).await;

    assert_eq!(fixture.dead_letters().await[0].fields.get("lbs-input").unwrap(), "{");
    // The entry is removed after the letter is complete.
    let input = fixture.input();
    eventually("the removal", || async { fixture.entries(&input).await.is_empty() }).await;
    assert_eq!(fixture.pending().await, vec![]);
    consumer.expect_no_notification_for(QUIET).await;
}

async fn streams_max_holds_and_freed_capacity_is_used(fixture: &ServiceFixture) {
    let config = AssignmentConfig { streams_max: 2, ..quick() };
    let mut consumer = fixture.consumer("c", config.clone()).await;
    fixture.add(&["a", "b", "c", "d"]).await;
    let first = consumer.added().await;
    consumer.added().await;
    consumer.expect_no_notification_for(QUIET).await;
    assert_eq!(fixture.pending().await.len(), 2, "no more is read than there is capacity for");

    consumer.assignment.done(&first).await.unwrap();
    consumer.added().await;
    consumer.expect_no_notification_for(QUIET).await;

    // A manual claim needs capacity as well.
    fixture.read_and_die().await;
    let lost = consumer.expired().await;
    match consumer.assignment.claim(&lost).await {
        Err(ClaimError::AtCapacity { streams_max }) => assert_eq!(streams_max, 2),
        other => panic!("{other:?}"),
    }
}

async fn a_stream_that_was_added_twice_has_one_owner_at_a_time(fixture: &ServiceFixture) {
    let mut first = fixture.consumer("first", quick()).await;
    let mut second = fixture.consumer("second", quick()).await;
    let stream = fixture.add(&["s", "s"]).await.remove(0);
    let (first, second, owned) = tokio::select! {
        owned = first.added() => (&mut first, &mut second, owned),
        owned = second.added() => (&mut second, &mut first, owned),
    };
    first.expect_no_notification_for(quick().lease_ttl()).await;
    second.expect_no_notification_for(QUIET).await;
    assert_eq!(fixture.pending().await.len(), 2);

    // When it is done, then the first consumer to acquire the second entry starts it again.
    first.assignment.done(&owned).await.unwrap();
    let (owner, again) = tokio::select! {
        again = first.added() => (first, again),
        again = second.added() => (second, again),
    };
    assert_eq!((again.stream(), again.owners()), (&stream, 1));
    assert!(again.epoch() > owned.epoch());
    owner.assignment.done(&again).await.unwrap();
    assert_eq!(
        (fixture.pending().await, fixture.entries(&fixture.input()).await),
        (vec![], vec![])
    );
}

async fn invalid_streams_and_info_are_rejected_with_a_reason(fixture: &ServiceFixture) {
    let backend = fixture.connect().await;
    let long = StreamName::new("x".repeat(510)).unwrap();
    for (stream, info) in [(&fixture.stream("s"), Some("{not json")), (&long, None)] {
        let added = add(&*backend, &fixture.service, stream, info).await;
        assert!(matches!(added, Err(StreamError::Invalid { .. })), "{added:?}");
    }
    assert_eq!(fixture.entries(&fixture.input()).await, []);
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

async fn append(fixture: &ServiceFixture, fields: Fields) {
    let backend = fixture.connect().await;
    backend.append(&fixture.input(), &[fields], &Retention::KEEP_ALL).await.unwrap();
}
