//! Decoding returns what was encoded, and no input makes it panic.

use proptest::prelude::*;

use super::*;
use crate::embedded::redo_record::RedoRecord;
use crate::entry::{EntryId, Fields};

/// One record of each variant; the match below fails to compile if a variant is missing.
pub(in crate::embedded) fn examples() -> Vec<RedoRecord<'static>> {
    let (stream, group, consumer, at) = ("s", "group", "消费者", Timestamp::from_millis(1 << 41));
    let id = EntryId::new(1_767_225_600_000, 7);
    let ids: Cow<'_, [EntryId]> = vec![id, EntryId::MIN, EntryId::MAX, id.next()].into();
    let fields = Fields::new([("name", "value"), ("", ""), ("name", "again")]);
    let examples = vec![
        RedoRecord::Append {
            stream,
            first: id,
            entries: vec![fields.clone(), fields.clone()].into(),
        },
        RedoRecord::CreateGroup { stream, group, after: EntryId::MAX },
        RedoRecord::RemoveGroup { stream, group },
        RedoRecord::RestoreConsumer { stream, group, consumer, at },
        RedoRecord::Deliver { stream, group, consumer, through: id, at },
        RedoRecord::Acknowledge { stream, group, ids: ids.clone() },
        RedoRecord::Claim { stream, group, consumer, ids: ids.clone(), at },
        RedoRecord::Release { stream, group, ids: ids.clone(), at },
        RedoRecord::KeepAlive { stream, group, ids: ids.clone(), at },
        RedoRecord::RemoveConsumer { stream, group, consumer },
        RedoRecord::Trim { stream, before: id },
        RedoRecord::DeleteEntries { stream, ids },
        RedoRecord::Schedule {
            delays: "d",
            id: u64::MAX,
            due: at,
            to: stream,
            fields: fields.clone(),
        },
        RedoRecord::Cancel { delays: "d", id: 0 },
        RedoRecord::Promote { delays: "d", id: 300, entry: id },
        RedoRecord::HoldLease { lease: "l", holder: "h", epoch: 5, until: at, at },
        RedoRecord::AddMembers { set: "set", members: vec!["a", ""], until: Some(at), at },
        RedoRecord::AddMembers { set: "set", members: vec![], until: None, at },
        RedoRecord::RemoveMembers { set: "set", members: vec!["a"] },
        RedoRecord::PutFields { map: "m", fields: vec![("f", Bytes::from_static(b"\0\xff"))] },
        RedoRecord::SetDedup { scope: "c", id: "i", done: None, until: at, at },
        RedoRecord::SetDedup { scope: "c", id: "i", done: Some(Bytes::new()), until: at, at },
        RedoRecord::RemoveDedup { scope: "c", id: "i" },
        RedoRecord::Rename { from: stream, to: "n" },
        RedoRecord::Remove { name: "n" },
        RedoRecord::RestoreCounters { next_delay: 128 },
        RedoRecord::RestoreTime { at },
        RedoRecord::RestoreStream { stream, last_id: id },
        RedoRecord::RestoreEntries {
            stream,
            entries: vec![(id, fields.clone()), (id.next(), fields)],
        },
        RedoRecord::RestorePending { stream, group, consumer, pending: vec![(id, at, 3)] },
        RedoRecord::RestoreLease { lease: "l", holder: "h", epoch: 5, until: at },
        RedoRecord::RestoreEpoch { lease: "l", epoch: 5, until: at },
    ];
    for example in &examples {
        match example {
            RedoRecord::Append { .. }
            | RedoRecord::CreateGroup { .. }
            | RedoRecord::RemoveGroup { .. } => {}
            RedoRecord::RestoreConsumer { .. }
            | RedoRecord::Deliver { .. }
            | RedoRecord::Acknowledge { .. } => {}
            RedoRecord::Claim { .. }
            | RedoRecord::Release { .. }
            | RedoRecord::KeepAlive { .. } => {}
            RedoRecord::RemoveConsumer { .. } | RedoRecord::Trim { .. } => {}
            RedoRecord::DeleteEntries { .. }
            | RedoRecord::Schedule { .. }
            | RedoRecord::Cancel { .. } => {}
            RedoRecord::Promote { .. }
            | RedoRecord::HoldLease { .. }
            | RedoRecord::AddMembers { .. } => {}
            RedoRecord::RemoveMembers { .. }
            | RedoRecord::PutFields { .. }
            | RedoRecord::SetDedup { .. } => {}
            RedoRecord::RemoveDedup { .. }
            | RedoRecord::Rename { .. }
            | RedoRecord::Remove { .. }
            | RedoRecord::RestoreCounters { .. } => {}
            RedoRecord::RestoreStream { .. } | RedoRecord::RestoreEntries { .. } => {}
            RedoRecord::RestorePending { .. } | RedoRecord::RestoreLease { .. } => {}
            RedoRecord::RestoreEpoch { .. } | RedoRecord::RestoreTime { .. } => {}
        }
    }
    examples
}

pub(in crate::embedded) fn encoded(records: &[RedoRecord<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    records.iter().for_each(|record| record.encode(&mut bytes));
    bytes
}

fn decoded(mut bytes: &[u8]) -> Decoded<Vec<RedoRecord<'_>>> {
    let mut records = Vec::new();
    while let Some(record) = RedoRecord::decode(&mut bytes)? {
        records.push(record);
    }
    Ok(records)
}

#[test]
fn every_record_decodes_to_what_was_encoded() {
    let records = examples();
    assert_eq!(decoded(&encoded(&records)), Ok(records));
}

#[test]
fn a_truncated_record_is_an_error_and_never_a_panic() {
    for record in examples() {
        let bytes = encoded(std::slice::from_ref(&record));
        for length in 1..bytes.len() {
            assert!(decoded(&bytes[..length]).is_err(), "{record:?} truncated at {length}");
        }
    }
}

proptest! {
    #[test]
    fn invalid_bytes_are_an_error_and_never_a_panic(
        place in 0usize..10_000,
        garbage in prop::collection::vec(any::<u8>(), 1..40),
    ) {
        let mut bytes = encoded(&examples());
        let place = place % bytes.len();
        let end = (place + garbage.len()).min(bytes.len());
        bytes[place..end].copy_from_slice(&garbage[..end - place]);
        let _ = decoded(&bytes);
        let _ = decoded(&garbage);
    }

    #[test]
    fn ids_in_any_order_decode_to_what_was_encoded(
        ids in prop::collection::vec((any::<u64>(), any::<u64>()), 0..20),
    ) {
        let ids: Vec<EntryId> = ids.into_iter().map(|(ms, seq)| EntryId::new(ms, seq)).collect();
        let record = RedoRecord::DeleteEntries { stream: "s", ids: ids.into() };
        let bytes = encoded(std::slice::from_ref(&record));
        prop_assert_eq!(decoded(&bytes), Ok(vec![record]));
    }
}
