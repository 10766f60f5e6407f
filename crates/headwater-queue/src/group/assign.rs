//! Who should own which partition: the same answer for everybody who sees the same.
//!
//! Upstream: `placement`, with what it saw of members and leases. Promises: every partition has one owner; everybody gets
//! as many as any other, or one more; nobody loses a partition that it may keep. Pure: no clock, no backend.
//! Refuses nothing: what is asked for is what members and leases said.

/// Who has a stake in a partition now. Members are numbered as they are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stake {
    /// Nobody.
    Free,
    /// This member holds its lease.
    Held(usize),
    /// Nobody holds its lease, and this member, which is away for a moment, will want it back.
    Reserved(usize),
}

/// The owner of each partition, for this many members. Of two members with the same claim, the first comes first.
pub(super) fn assign(members: usize, stakes: &[Stake]) -> Vec<usize> {
    assert!(members > 0, "whoever asks is a member");
    let mut left = quotas(members, stakes);
    let mut owners: Vec<Option<usize>> = vec![None; stakes.len()];
    // What is held before what is only reserved: a reservation moves nobody.
    for wanted in [Stake::Held as fn(usize) -> Stake, Stake::Reserved] {
        for (owner, stake) in owners.iter_mut().zip(stakes) {
            let (Stake::Held(member) | Stake::Reserved(member)) = *stake else { continue };
            if *stake == wanted(member) && left[member] > 0 {
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

/// How many partitions each member gets. The odd ones go to those who have the most, so that fewer move.
fn quotas(members: usize, stakes: &[Stake]) -> Vec<usize> {
    let mut counts = vec![0_usize; members];
    for stake in stakes {
        if let Stake::Held(member) | Stake::Reserved(member) = stake {
            counts[*member] += 1;
        }
    }
    let mut quotas = vec![stakes.len() / members; members];
    let mut order: Vec<usize> = (0..members).collect();
    // Stable: of those with as many, the first in the list.
    order.sort_by_key(|member| std::cmp::Reverse(counts[*member]));
    for member in &order[..stakes.len() % members] {
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

    fn world() -> impl Strategy<Value = (usize, Vec<Stake>)> {
        (1_usize..9).prop_flat_map(|members| {
            let stake = prop_oneof![
                Just(Stake::Free),
                (0..members).prop_map(Stake::Held),
                (0..members).prop_map(Stake::Held),
                (0..members).prop_map(Stake::Reserved),
            ];
            (Just(members), prop::collection::vec(stake, 0..40))
        })
    }

    fn kept(stakes: &[Stake], owners: &[usize]) -> usize {
        let kept = |(stake, owner): &(&Stake, &usize)| matches!(stake, Stake::Held(member) | Stake::Reserved(member) if member == *owner);
        stakes.iter().zip(owners).filter(kept).count()
    }

    proptest! {
        #[test]
        fn everybody_gets_as_many_as_any_other_or_one_more((members, stakes) in world()) {
            let owners = assign(members, &stakes);
            prop_assert_eq!(owners.len(), stakes.len());
            let counts = counts(members, &owners);
            prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1);
        }

        /// The most that can stay in any balanced assignment: everybody keeps what it has up to its share.
        #[test]
        fn nobody_moves_who_need_not((members, stakes) in world()) {
            let owners = assign(members, &stakes);
            let mut have = vec![0; members];
            for stake in &stakes {
                if let Stake::Held(member) | Stake::Reserved(member) = stake {
                    have[*member] += 1;
                }
            }
            let (floor, odd) = (stakes.len() / members, stakes.len() % members);
            let above = have.iter().filter(|count| **count > floor).count();
            let best: usize =
                have.iter().map(|count| floor.min(*count)).sum::<usize>() + above.min(odd);
            prop_assert_eq!(kept(&stakes, &owners), best);
        }

        /// Hand-overs happen one by one, and everybody looks at a different moment. Whoever looks in between goes on
        /// with the same plan: nothing moves twice.
        #[test]
        fn what_is_seen_half_way_leads_to_the_same_end(
            (members, stakes) in world(),
            picks in prop::collection::vec(any::<prop::sample::Index>(), 100),
        ) {
            let planned = stakes.len() - kept(&stakes, &assign(members, &stakes));
            let mut stakes = stakes;
            let mut taken = 0;
            for pick in picks {
                let owners = assign(members, &stakes);
                let open: Vec<usize> = (0..stakes.len())
                    .filter(|at| stakes[*at] != Stake::Held(owners[*at]))
                    .collect();
                if open.is_empty() {
                    break;
                }
                let at = open[pick.index(open.len())];
                stakes[at] = match stakes[at] {
                    Stake::Held(_) => Stake::Free,
                    Stake::Reserved(member) if member == owners[at] => Stake::Held(owners[at]),
                    Stake::Free | Stake::Reserved(_) => {
                        taken += 1;
                        Stake::Held(owners[at])
                    }
                };
            }
            prop_assert_eq!(taken, planned);
            let owners = assign(members, &stakes);
            prop_assert_eq!(kept(&stakes, &owners), stakes.len());
        }
    }

    #[test]
    fn a_late_joiner_gets_its_share_from_those_who_have_more() {
        let stakes = [0, 0, 0, 1, 1].map(Stake::Held);
        assert_eq!(assign(3, &stakes), [0, 0, 2, 1, 1]);
    }

    #[test]
    fn a_member_that_is_away_for_a_moment_keeps_its_partitions() {
        let stakes = [Stake::Held(0), Stake::Reserved(1), Stake::Held(0), Stake::Reserved(1)];
        assert_eq!(assign(2, &stakes), [0, 1, 0, 1]);
        // The odd one too, although others have as few.
        let stakes = [Stake::Held(0), Stake::Reserved(1), Stake::Reserved(1)];
        assert_eq!(assign(2, &stakes), [0, 1, 1]);
    }
}
