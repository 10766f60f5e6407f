//! Partition assignment: a deterministic, sticky and balanced owner for each partition.
//!
//! Upstream: `subscription_state`, with members and leases from a snapshot. Guarantees: every partition has one owner;
//! the shares of two members differ by at most one; a member keeps every partition it may keep. Members with the same
//! snapshot compute the same result. Pure: no clock, no backend.

/// The current owner of a partition. Members are given by their index in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CurrentOwner {
    /// No owner.
    Free,
    /// This member holds the lease.
    Held(usize),
    /// The lease is free but reserved for this static member, which is restarting.
    Reserved(usize),
}

/// Returns the owner of each partition. Ties go to the member with the lower index. Panics if `members` is 0.
pub(super) fn assign(members: usize, current_owners: &[CurrentOwner]) -> Vec<usize> {
    assert!(members > 0, "the calling process is a member");
    let mut left = quotas(members, current_owners);
    let mut owners: Vec<Option<usize>> = vec![None; current_owners.len()];
    // Held before reserved: a reservation never takes a partition from its holder.
    for wanted in [CurrentOwner::Held as fn(usize) -> CurrentOwner, CurrentOwner::Reserved] {
        for (owner, current) in owners.iter_mut().zip(current_owners) {
            let (CurrentOwner::Held(member) | CurrentOwner::Reserved(member)) = *current else {
                continue;
            };
            if *current == wanted(member) && left[member] > 0 {
                left[member] -= 1;
                *owner = Some(member);
            }
        }
    }
    let mut below = 0;
    owners
        .into_iter()
        .map(|owner| {
            owner.unwrap_or_else(|| {
                while left[below] == 0 {
                    below += 1;
                }
                left[below] -= 1;
                below
            })
        })
        .collect()
}

/// How many partitions each member gets. The remainder goes to the members that have the most, so that fewer move.
fn quotas(members: usize, current_owners: &[CurrentOwner]) -> Vec<usize> {
    let mut counts = vec![0_usize; members];
    for current in current_owners {
        if let CurrentOwner::Held(member) | CurrentOwner::Reserved(member) = current {
            counts[*member] += 1;
        }
    }
    let mut quotas = vec![current_owners.len() / members; members];
    let mut order: Vec<usize> = (0..members).collect();
    // Stable sort: ties go to the lower index.
    order.sort_by_key(|member| std::cmp::Reverse(counts[*member]));
    for member in &order[..current_owners.len() % members] {
        quotas[*member] += 1;
    }
    quotas
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counts(members: usize, owners: &[usize]) -> Vec<usize> {
        (0..members).map(|member| owners.iter().filter(|owner| **owner == member).count()).collect()
    }

    fn any_group() -> impl Strategy<Value = (usize, Vec<CurrentOwner>)> {
        (1_usize..9).prop_flat_map(|members| {
            let current = prop_oneof![
                Just(CurrentOwner::Free),
                (0..members).prop_map(CurrentOwner::Held),
                (0..members).prop_map(CurrentOwner::Held),
                (0..members).prop_map(CurrentOwner::Reserved),
            ];
            (Just(members), prop::collection::vec(current, 0..40))
        })
    }

    fn kept(current_owners: &[CurrentOwner], owners: &[usize]) -> usize {
        let kept = |(current, owner): &(&CurrentOwner, &usize)| matches!(current, CurrentOwner::Held(member) | CurrentOwner::Reserved(member) if member == *owner);
        current_owners.iter().zip(owners).filter(kept).count()
    }

    proptest! {
        #[test]
        fn shares_differ_by_at_most_one((members, current_owners) in any_group()) {
            let owners = assign(members, &current_owners);
            prop_assert_eq!(owners.len(), current_owners.len());
            let counts = counts(members, &owners);
            prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1);
        }

        /// Each member keeps what it has up to its share: the most that any balanced assignment can keep.
        #[test]
        fn as_few_partitions_move_as_possible((members, current_owners) in any_group()) {
            let owners = assign(members, &current_owners);
            let mut have = vec![0; members];
            for current in &current_owners {
                if let CurrentOwner::Held(member) | CurrentOwner::Reserved(member) = current {
                    have[*member] += 1;
                }
            }
            let (floor, odd) = (current_owners.len() / members, current_owners.len() % members);
            let above = have.iter().filter(|count| **count > floor).count();
            let best: usize =
                have.iter().map(|count| floor.min(*count)).sum::<usize>() + above.min(odd);
            prop_assert_eq!(kept(&current_owners, &owners), best);
        }

        /// Partitions are handed over one by one and members read snapshots at different times. A plan made from an
        /// intermediate snapshot continues the first plan: no partition moves twice.
        #[test]
        fn intermediate_snapshots_lead_to_the_same_assignment(
            (members, current_owners) in any_group(),
            picks in prop::collection::vec(any::<prop::sample::Index>(), 100),
        ) {
            let planned = current_owners.len() - kept(&current_owners, &assign(members, &current_owners));
            let mut current_owners = current_owners;
            let mut taken = 0;
            for pick in picks {
                let owners = assign(members, &current_owners);
                let open: Vec<usize> = (0..current_owners.len())
                    .filter(|at| current_owners[*at] != CurrentOwner::Held(owners[*at]))
                    .collect();
                if open.is_empty() {
                    break;
                }
                let at = open[pick.index(open.len())];
                current_owners[at] = match current_owners[at] {
                    CurrentOwner::Held(_) => CurrentOwner::Free,
                    CurrentOwner::Reserved(member) if member == owners[at] => CurrentOwner::Held(owners[at]),
                    CurrentOwner::Free | CurrentOwner::Reserved(_) => {
                        taken += 1;
                        CurrentOwner::Held(owners[at])
                    }
                };
            }
            prop_assert_eq!(taken, planned);
            let owners = assign(members, &current_owners);
            prop_assert_eq!(kept(&current_owners, &owners), current_owners.len());
        }
    }

    #[test]
    fn a_late_joiner_takes_partitions_from_the_largest_owners() {
        let current_owners = [0, 0, 0, 1, 1].map(CurrentOwner::Held);
        assert_eq!(assign(3, &current_owners), [0, 0, 2, 1, 1]);
    }

    #[test]
    fn a_restarting_static_member_keeps_its_partitions() {
        let current_owners = [
            CurrentOwner::Held(0),
            CurrentOwner::Reserved(1),
            CurrentOwner::Held(0),
            CurrentOwner::Reserved(1),
        ];
        assert_eq!(assign(2, &current_owners), [0, 1, 0, 1]);
        // Including the extra partition.
        let current_owners =
            [CurrentOwner::Held(0), CurrentOwner::Reserved(1), CurrentOwner::Reserved(1)];
        assert_eq!(assign(2, &current_owners), [0, 1, 1]);
    }
}
