//! Effects in any order, fitting or not: the state takes them or names the problem, and never panics.

use proptest::prelude::*;

use super::*;
use crate::embedded::codec;
use crate::embedded::codec::tests::{encoded, examples};

/// Effects as a log could hold them whose checksums are right and whose contents are not.
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
    fn effects_that_do_not_fit_are_a_problem_and_no_panic(
        order in prop::collection::vec(0usize..100, 1..60),
        changes in prop::collection::vec((any::<usize>(), any::<u8>()), 0..6),
    ) {
        let bytes = mangled(&order, &changes);
        let mut rest = bytes.as_slice();
        let mut state = EmbeddedState::default();
        while let Ok(Some(record)) = codec::decode(&mut rest) {
            // After a problem the state is thrown away; here it goes on, which is worse.
            let _ = state.apply(&record);
        }
    }
}
