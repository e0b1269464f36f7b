//! What a cluster keeps in its cell, measured and estimated (proxy contract §14).

use super::number;
use crate::domain::limits::Cap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// No measurement yet.
const UNMEASURED: u64 = u64::MAX;

/// A change of the block, to be logged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transition {
    /// The measured total went over the cap.
    Blocked {
        /// Measured, in bytes.
        total: u64,
        /// The cap, in bytes.
        cap: u64,
    },
    /// It came down to 90 % of the cap, or the cap was lifted.
    Released {
        /// Measured, in bytes.
        total: u64,
    },
}

/// The storage of one cluster.
#[derive(Debug)]
pub struct Storage {
    measured: AtomicU64,
    in_flight: AtomicU64,
    over: AtomicBool,
}

impl Default for Storage {
    fn default() -> Self {
        Self {
            measured: AtomicU64::new(UNMEASURED),
            in_flight: AtomicU64::new(0),
            over: AtomicBool::new(false),
        }
    }
}

impl Storage {
    /// Whether pushes are blocked under `cap`: the flag is up, or the last total with what was
    /// accepted since reaches the cap. A lifted cap blocks nothing from that moment on, zero always.
    pub fn is_blocked(&self, cap: Cap) -> bool {
        let Some(cap) = number(cap) else {
            return false;
        };
        if cap == 0 || self.over.load(Ordering::Acquire) {
            return true;
        }
        self.measured().is_some() && self.estimate() >= cap
    }

    /// The last total, if any, with what was accepted since, in bytes.
    pub fn estimate(&self) -> u64 {
        self.measured().unwrap_or(0).saturating_add(self.in_flight())
    }

    /// Adds payload bytes that go to the cell now.
    pub fn accept(&self, bytes: u64) {
        if bytes > 0 {
            let _ = self
                .in_flight
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |sum| Some(sum.saturating_add(bytes)));
        }
    }

    /// Takes the newest total, in bytes, which may be an old figure told again: only another one
    /// makes the estimate start anew. `None` when the cell told no bytes, which changes no total.
    pub fn publish(&self, total: Option<u64>, cap: Cap) -> Option<Transition> {
        if let Some(total) = total {
            let total = total.min(UNMEASURED - 1);
            if self.measured.swap(total, Ordering::AcqRel) != total {
                self.in_flight.store(0, Ordering::Release);
            }
        }
        let total = self.measured()?;
        let was = self.over.load(Ordering::Acquire);
        let over = number(cap).is_some_and(|cap| total > cap || (was && total > release_line(cap)));
        self.over.store(over, Ordering::Release);
        match (was, over) {
            (false, true) => Some(Transition::Blocked { total, cap: number(cap).unwrap_or(0) }),
            (true, false) => Some(Transition::Released { total }),
            _ => None,
        }
    }

    /// The last total, in bytes.
    pub fn measured(&self) -> Option<u64> {
        Some(self.measured.load(Ordering::Acquire)).filter(|measured| *measured != UNMEASURED)
    }

    /// Payload bytes accepted since the total last changed.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Acquire)
    }

    /// Whether the flag is up.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }
}

/// Whether a total is close enough to the cap that forgetting it would matter.
pub(super) fn is_near(total: u64, cap: Cap) -> bool {
    number(cap).is_some_and(|cap| total > release_line(cap))
}

fn release_line(cap: u64) -> u64 {
    u64::try_from(u128::from(cap) * 90 / 100).unwrap_or(cap)
}

#[cfg(test)]
mod tests {
    use super::{Storage, Transition};
    use crate::domain::limits::Cap;
    use proptest::prelude::*;

    const CAP: Cap = Cap::At(100);

    #[test]
    fn the_band() {
        let storage = Storage::default();
        // total, cap, transition, blocked then
        let steps: &[(Option<u64>, Cap, Option<Transition>, bool)] = &[
            (None, CAP, None, false),
            (Some(99), CAP, None, false),
            (Some(100), CAP, None, true), // by the estimate: the total reaches the cap
            (Some(101), CAP, Some(Transition::Blocked { total: 101, cap: 100 }), true),
            (Some(91), CAP, None, true),
            (Some(91), CAP, None, true),
            (Some(90), CAP, Some(Transition::Released { total: 90 }), false),
            (Some(100), CAP, None, true),
            (Some(101), CAP, Some(Transition::Blocked { total: 101, cap: 100 }), true),
            (None, CAP, None, true),
            (Some(101), Cap::Unlimited, Some(Transition::Released { total: 101 }), false),
            (Some(101), Cap::At(0), Some(Transition::Blocked { total: 101, cap: 0 }), true),
            (Some(0), Cap::At(0), Some(Transition::Released { total: 0 }), true), // zero denies
            (Some(5), Cap::At(-1), Some(Transition::Blocked { total: 5, cap: 0 }), true),
            (Some(5), Cap::At(i64::MAX), Some(Transition::Released { total: 5 }), false),
        ];
        for (at, (total, cap, transition, blocked)) in steps.iter().enumerate() {
            assert_eq!(storage.publish(*total, *cap), *transition, "step {at}");
            assert_eq!(storage.is_blocked(*cap), *blocked, "step {at}");
        }
    }

    #[test]
    fn a_lifted_cap_blocks_nothing_even_before_the_next_total() {
        let storage = Storage::default();
        storage.publish(Some(500), CAP);
        assert!(storage.is_blocked(CAP));
        assert!(!storage.is_blocked(Cap::Unlimited));
    }

    #[test]
    fn what_was_accepted_counts_until_the_total_changes() {
        let storage = Storage::default();
        storage.accept(1_000);
        assert!(!storage.is_blocked(CAP), "a cell that tells no bytes is not estimated");
        storage.publish(Some(50), CAP);
        storage.accept(49);
        assert!(!storage.is_blocked(CAP));
        storage.accept(1);
        assert!(storage.is_blocked(CAP));
        storage.publish(Some(50), CAP);
        assert!(storage.is_blocked(CAP), "the same figure told again is no news");
        assert!(!storage.is_over());
        storage.publish(Some(51), CAP);
        assert_eq!((storage.in_flight(), storage.is_blocked(CAP)), (0, false));
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Accept(u64),
        Publish(Option<u64>),
        Cap(Option<u64>),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0_u64..60).prop_map(Step::Accept),
            prop::option::weighted(0.9, 0_u64..150).prop_map(Step::Publish),
            prop::option::weighted(0.9, 0_u64..150).prop_map(Step::Cap),
        ]
    }

    proptest! {
        /// Against what the contract says in a few lines of plain numbers, while the plan changes.
        #[test]
        fn it_does_what_the_model_does(steps in prop::collection::vec(step(), 0..60)) {
            let storage = Storage::default();
            let (mut cap, mut measured, mut accepted, mut over) = (Some(100), None, 0, false);
            let as_cap = |cap: Option<u64>| cap.map_or(Cap::Unlimited, |cap| Cap::At(i64::try_from(cap).unwrap()));
            for step in steps {
                match step {
                    Step::Accept(bytes) => {
                        storage.accept(bytes);
                        accepted += bytes;
                    }
                    Step::Cap(new) => cap = new,
                    Step::Publish(total) => {
                        let was = over;
                        if let Some(total) = total {
                            if measured != Some(total) {
                                accepted = 0;
                            }
                            measured = Some(total);
                        }
                        if let Some(total) = measured {
                            over = cap.is_some_and(|cap| total > cap || (was && total * 100 > cap * 90));
                        }
                        let told = storage.publish(total, as_cap(cap));
                        prop_assert_eq!(told.is_some(), was != over);
                    }
                }
                let full = |cap| measured.is_some_and(|total: u64| total + accepted >= cap);
                let blocked = cap.is_some_and(|cap| cap == 0 || over || full(cap));
                prop_assert_eq!(storage.is_blocked(as_cap(cap)), blocked, "{:?}", step);
            }
        }

        /// However much is sent, what was let pass under a steady total exceeds the cap by less than
        /// one batch.
        #[test]
        fn at_most_the_crossing_batch_passes(
            cap in 1_u64..10_000, total in 0_u64..12_000, batches in prop::collection::vec(0_u64..2_000, 0..40),
        ) {
            let storage = Storage::default();
            let as_cap = Cap::At(i64::try_from(cap).unwrap());
            storage.publish(Some(total), as_cap);
            let mut kept = total;
            for batch in batches {
                let blocked = storage.is_blocked(as_cap);
                prop_assert_eq!(blocked, kept >= cap);
                if !blocked {
                    storage.accept(batch);
                    kept += batch;
                    prop_assert!(kept < cap + batch.max(1));
                }
            }
        }
    }
}
