//! What is encoded reads as it was written, and no bytes can make the reader panic.

use proptest::prelude::*;

use super::*;
use crate::entry::{EntryId, Fields};

/// One of each kind; a new kind without an example here does not compile.
pub(in crate::embedded) fn examples() -> Vec<Effect<'static>> {
    let (stream, group, consumer, at) = ("s", "group", "消费者", Timestamp::from_millis(1 << 41));
    let id = EntryId::new(1_767_225_600_000, 7);
    let ids: Cow<'_, [EntryId]> = vec![id, EntryId::MIN, EntryId::MAX, id.next()].into();
    let fields = Fields::new([("name", "value"), ("", ""), ("name", "again")]);
    let examples = vec![
        Effect::Append { stream, first: id, entries: vec![fields.clone(), fields.clone()].into() },
        Effect::CreateGroup { stream, group, after: EntryId::MAX },
        Effect::RemoveGroup { stream, group },
        Effect::RestoreConsumer { stream, group, consumer, at },
        Effect::Deliver { stream, group, consumer, through: id, at },
        Effect::Acknowledge { stream, group, ids: ids.clone() },
        Effect::Claim { stream, group, consumer, ids: ids.clone(), at },
        Effect::Release { stream, group, ids: ids.clone(), at },
        Effect::KeepAlive { stream, group, ids: ids.clone(), at },
        Effect::RemoveConsumer { stream, group, consumer },
        Effect::Trim { stream, before: id },
        Effect::DeleteEntries { stream, ids },
        Effect::PutAside { delays: "d", id: u64::MAX, due: at, to: stream, fields: fields.clone() },
        Effect::Cancel { delays: "d", id: 0 },
        Effect::Return { delays: "d", id: 300, entry: id },
        Effect::Hold { lease: "l", holder: "h", epoch: 5, until: at, at },
        Effect::AddMembers { set: "set", members: vec!["a", ""], until: Some(at), at },
        Effect::AddMembers { set: "set", members: vec![], until: None, at },
        Effect::RemoveMembers { set: "set", members: vec!["a"] },
        Effect::PutFields { map: "m", fields: vec![("f", Bytes::from_static(b"\0\xff"))] },
        Effect::Mark { scope: "c", id: "i", done: None, until: at, at },
        Effect::Mark { scope: "c", id: "i", done: Some(Bytes::new()), until: at, at },
        Effect::Unmark { scope: "c", id: "i" },
        Effect::Remove { name: "n" },
        Effect::RestoreCounters { next_delay: 128 },
        Effect::RestoreTime { at },
        Effect::RestoreStream { stream, last_id: id },
        Effect::RestoreEntries { stream, entries: vec![(id, fields.clone()), (id.next(), fields)] },
        Effect::RestorePending { stream, group, consumer, pending: vec![(id, at, 3)] },
        Effect::RestoreLease { lease: "l", holder: "h", epoch: 5, until: at },
        Effect::RestoreEpoch { lease: "l", epoch: 5, until: at },
    ];
    for example in &examples {
        match example {
            Effect::Append { .. } | Effect::CreateGroup { .. } | Effect::RemoveGroup { .. } => {}
            Effect::RestoreConsumer { .. }
            | Effect::Deliver { .. }
            | Effect::Acknowledge { .. } => {}
            Effect::Claim { .. } | Effect::Release { .. } | Effect::KeepAlive { .. } => {}
            Effect::RemoveConsumer { .. } | Effect::Trim { .. } => {}
            Effect::DeleteEntries { .. } | Effect::PutAside { .. } | Effect::Cancel { .. } => {}
            Effect::Return { .. } | Effect::Hold { .. } | Effect::AddMembers { .. } => {}
            Effect::RemoveMembers { .. } | Effect::PutFields { .. } | Effect::Mark { .. } => {}
            Effect::Unmark { .. } | Effect::Remove { .. } | Effect::RestoreCounters { .. } => {}
            Effect::RestoreStream { .. } | Effect::RestoreEntries { .. } => {}
            Effect::RestorePending { .. } | Effect::RestoreLease { .. } => {}
            Effect::RestoreEpoch { .. } | Effect::RestoreTime { .. } => {}
        }
    }
    examples
}

pub(in crate::embedded) fn encoded(effects: &[Effect<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    effects.iter().for_each(|effect| encode(effect, &mut bytes));
    bytes
}

fn decoded(mut bytes: &[u8]) -> Decoded<Vec<Effect<'_>>> {
    let mut effects = Vec::new();
    while let Some(effect) = decode(&mut bytes)? {
        effects.push(effect);
    }
    Ok(effects)
}

#[test]
fn every_effect_is_read_as_it_was_written() {
    let effects = examples();
    assert_eq!(decoded(&encoded(&effects)), Ok(effects));
}

#[test]
fn an_effect_that_is_cut_off_anywhere_is_a_problem_and_no_panic() {
    for effect in examples() {
        let bytes = encoded(std::slice::from_ref(&effect));
        for length in 1..bytes.len() {
            assert!(decoded(&bytes[..length]).is_err(), "{effect:?} cut at {length}");
        }
    }
}

proptest! {
    #[test]
    fn bytes_that_are_no_effects_are_a_problem_and_no_panic(
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
    fn ids_in_any_order_are_read_as_they_were_written(
        ids in prop::collection::vec((any::<u64>(), any::<u64>()), 0..20),
    ) {
        let ids: Vec<EntryId> = ids.into_iter().map(|(ms, seq)| EntryId::new(ms, seq)).collect();
        let effect = Effect::DeleteEntries { stream: "s", ids: ids.into() };
        let bytes = encoded(std::slice::from_ref(&effect));
        prop_assert_eq!(decoded(&bytes), Ok(vec![effect]));
    }
}
