use super::{Admission, Caps, HashedPair, NameHash, TooMany};
use crate::domain::limits::Cap;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

const MANY: usize = 1_000;

fn pair(queue: NameHash, partition: NameHash) -> HashedPair {
    HashedPair { queue, partition }
}

fn caps(queues: i64, partitions: i64) -> Caps {
    Caps { queues: Cap::At(queues), partitions: Cap::At(partitions) }
}

/// Evaluates and records, as a request does.
fn admit(admission: &mut Admission, caps: Caps, pairs: &[(NameHash, NameHash)]) -> Result<Vec<u64>, TooMany> {
    let pairs: Vec<_> = pairs.iter().map(|&(queue, partition)| pair(queue, partition)).collect();
    let plan = admission.evaluate(&pairs, caps)?;
    Ok(admission.record(&plan, 1, MANY).iter().map(|row| row.partitions).collect())
}

fn loaded(rows: &[(NameHash, u64)]) -> Admission {
    let mut admission = Admission::default();
    admission.load(rows.iter().copied());
    admission
}

#[test]
fn queues_and_partitions_up_to_their_caps() {
    let mut admission = loaded(&[]);
    let caps = caps(2, 3);
    assert_eq!(admit(&mut admission, caps, &[(1, 1), (1, 2)]), Ok(vec![2]));
    assert_eq!(admit(&mut admission, caps, &[(2, 1)]), Ok(vec![1]));
    assert_eq!(admit(&mut admission, caps, &[(3, 1)]), Err(TooMany::Queues { pair: 0, used: 2 }));
    assert_eq!(admit(&mut admission, caps, &[(1, 3)]), Ok(vec![3]));
    assert_eq!(admit(&mut admission, caps, &[(1, 1), (1, 4)]), Err(TooMany::Partitions { pair: 1, used: 3 }));
    assert_eq!(admit(&mut admission, caps, &[(1, 1), (1, 2), (1, 3), (2, 1)]), Ok(vec![]), "known ones pass");
}

#[test]
fn the_pairs_of_one_request_count_together_and_a_refusal_leaves_no_trace() {
    let mut admission = loaded(&[(9, 0)]);
    let over = [(9, 1), (9, 2), (9, 3)];
    assert_eq!(admit(&mut admission, caps(2, 2), &over), Err(TooMany::Partitions { pair: 2, used: 2 }));
    assert_eq!(
        admit(&mut admission, caps(2, 2), &[(1, 1), (2, 1)]),
        Err(TooMany::Queues { pair: 1, used: 2 })
    );
    assert_eq!(admission.queues(), 1);
    assert_eq!(admit(&mut admission, caps(2, 2), &over[1..]), Ok(vec![2]));
}

#[test]
fn what_is_there_is_never_refused() {
    // After a restart or a downgrade: more queues and partitions than the caps allow.
    let mut admission = loaded(&[(1, 4), (2, 1), (3, 0)]);
    let caps = caps(1, 2);
    for partition in 1..=4 {
        admit(&mut admission, caps, &[(1, partition)]).unwrap();
    }
    assert_eq!(admit(&mut admission, caps, &[(1, 5)]), Err(TooMany::Partitions { pair: 0, used: 4 }));
    admit(&mut admission, caps, &[(2, 7)]).unwrap();
    assert_eq!(admit(&mut admission, caps, &[(2, 8)]), Ok(vec![2]));
    assert_eq!(admit(&mut admission, caps, &[(2, 9)]), Err(TooMany::Partitions { pair: 0, used: 2 }));
    assert_eq!(admit(&mut admission, caps, &[(4, 1)]), Err(TooMany::Queues { pair: 0, used: 3 }));
}

#[test]
fn nothing_is_refused_before_the_table_was_read_and_what_went_through_counts_afterwards() {
    let mut admission = Admission::default();
    for partition in 1..=5 {
        admit(&mut admission, caps(1, 2), &[(1, partition), (partition + 10, 1)]).unwrap();
    }
    admission.load([(1, 7)]);
    admission.load([(99, 99)]);
    assert_eq!(admission.queues(), 6, "the second load is not taken in");
    admit(&mut admission, caps(1, 2), &[(1, 6), (1, 7)]).unwrap();
    assert_eq!(admit(&mut admission, caps(1, 2), &[(1, 8)]), Err(TooMany::Partitions { pair: 0, used: 7 }));
}

#[test]
fn zero_and_negative_caps_deny_what_is_new() {
    for cap in [0, -1, i64::MIN] {
        let mut admission = loaded(&[(1, 1)]);
        admit(&mut admission, caps(cap, cap), &[(1, 1)]).unwrap();
        assert!(matches!(admit(&mut admission, caps(cap, 9), &[(2, 1)]), Err(TooMany::Queues { .. })));
        assert!(matches!(admit(&mut admission, caps(9, cap), &[(1, 2)]), Err(TooMany::Partitions { .. })));
    }
    let unlimited = Caps { queues: Cap::Unlimited, partitions: Cap::Unlimited };
    let mut admission = loaded(&[]);
    for n in 0..100 {
        admit(&mut admission, unlimited, &[(n, n), (n, n + 1)]).unwrap();
    }
}

#[test]
fn listings_free_what_is_gone_and_raise_what_others_made() {
    let mut admission = loaded(&[(1, 2), (2, 2)]);
    admit(&mut admission, caps(2, 3), &[(1, 1), (2, 1)]).unwrap();
    let partitions = Cap::At(3);
    assert_eq!(admission.reconcile(&HashMap::from([(1, 2)]), partitions, 5), 1, "2 was deleted");
    admit(&mut admission, caps(2, 3), &[(3, 1)]).unwrap();
    assert_eq!(
        admission.reconcile(&HashMap::from([(1, 2)]), partitions, 0),
        0,
        "3 may be too new to be listed"
    );
    assert_eq!(admission.reconcile(&HashMap::new(), partitions, 5), 2, "an empty listing counts");
    // Another proxy made a partition: its name passes here.
    admission.reconcile(&HashMap::from([(1, 3)]), partitions, 5);
    for partition in 1..=3 {
        admit(&mut admission, caps(2, 3), &[(1, partition)]).unwrap();
    }
    assert!(admit(&mut admission, caps(2, 3), &[(1, 4)]).is_err());
}

#[test]
fn listings_do_not_make_room_again_and_again() {
    let mut admission = loaded(&[(1, 8)]);
    let mut at_the_cell = 8;
    for round in 0..20 {
        for partition in 0..10 {
            at_the_cell +=
                u64::from(admit(&mut admission, caps(1, 8), &[(1, round * 10 + partition)]).is_ok());
        }
        admission.reconcile(&HashMap::from([(1, at_the_cell)]), Cap::At(8), 5);
    }
    assert_eq!(at_the_cell, 16, "each restart lets as many new names pass as there were old ones, no more");
}

#[test]
fn kept_names_are_bounded() {
    let mut admission = loaded(&[]);
    for n in 0..1_000 {
        let plan = admission.evaluate(&[pair(n % 10, n)], caps(i64::MAX, i64::MAX)).unwrap();
        admission.record(&plan, 1, 50);
    }
    assert_eq!(admission.names, 50);
    assert_eq!(admission.queues(), 10);
}

proptest! {
    /// A cell as a plain set of pairs, a proxy that restarts at any time with the counts of the table,
    /// which are those of the cell, and plans that change.
    #[test]
    fn against_a_cell(
        steps in prop::collection::vec(
            prop_oneof![
                12 => prop::collection::vec((0_u64..5, 0_u64..12), 1..4).prop_map(Some),
                1 => Just(None),
            ],
            1..150,
        ),
        queues in 0_i64..5,
        partitions in 0_i64..8,
    ) {
        let caps = caps(queues, partitions);
        let mut cell: HashMap<NameHash, HashSet<NameHash>> = HashMap::new();
        let mut admission = loaded(&[]);
        let most = usize::try_from(partitions).unwrap();
        let mut allowance = 0;
        for step in steps {
            let Some(mut pairs) = step else {
                let rows: Vec<_> = cell.iter().map(|(name, set)| (*name, set.len() as u64)).collect();
                admission = loaded(&rows);
                // As many unknown names pass for old ones as there are old ones, beside what the cap allows.
                let largest = cell.values().map(HashSet::len).max().unwrap_or(0);
                allowance = largest + largest.max(most);
                continue;
            };
            pairs.sort_unstable();
            pairs.dedup();
            let all_old = pairs.iter().all(|(q, p)| cell.get(q).is_some_and(|set| set.contains(p)));
            let before = format!("{admission:?}").len();
            match admit(&mut admission, caps, &pairs) {
                Ok(_) => pairs.into_iter().for_each(|(queue, partition)| {
                    cell.entry(queue).or_default().insert(partition);
                }),
                Err(_) => {
                    prop_assert_eq!(before, format!("{admission:?}").len());
                    // Old names are only refused when new ones took their places after a restart.
                    prop_assert!(!all_old || allowance > 0);
                }
            }
            prop_assert!(cell.len() <= usize::try_from(queues).unwrap());
            prop_assert!(cell.values().all(|set| set.len() <= most.max(allowance)));
        }
    }
}
