//! Applies records in any order, valid or not: the state applies them or returns an error, and never panics.

use proptest::prelude::*;

use super::*;
use crate::embedded::codec::tests::{encoded, examples};

/// Records as in a log with valid checksums and invalid contents.
fn mangled(order: &[usize], changes: &[(usize, u8)]) -> Vec<u8> {
    let examples = examples();
    let records: Vec<RedoRecord<'_>> =
        order.iter().map(|index| examples[index % examples.len()].clone()).collect();
    let mut bytes = encoded(&records);
    for (place, byte) in changes {
        let length = bytes.len();
        bytes[place % length] = *byte;
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn records_that_do_not_match_the_state_are_errors_and_never_panic(
        order in prop::collection::vec(0usize..100, 1..60),
        changes in prop::collection::vec((any::<usize>(), any::<u8>()), 0..6),
    ) {
        let bytes = mangled(&order, &changes);
        let mut rest = bytes.as_slice();
        let mut state = EmbeddedState::default();
        while let Ok(Some(record)) = RedoRecord::decode(&mut rest) {
            // Recovery discards the state after an error; continuing with it is the harder case.
            let _ = state.apply(&record);
        }
    }
}
